"""Seconds of the first call of each loss in a fresh process, with empty caches and with what an earlier process left on disk.

    python examples/first_calls.py [--small] [LOSS ...]

A call is forward and backward, until the gradients are there. Imports are timed apart; data and the GPU's context are made before it. Each
process of a round has the caches of Triton, CuPy, the driver, PyTorch's compiler and this library in a folder of its own, which is empty at
first; a second process then finds them filled. Losses take turns in an order drawn anew in each round. Results, medians, go to
nbs/results/first_calls.json, which the benchmarks page shows. `--small` takes sizes that a CPU can do in one round, and records nothing.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(os.environ.get("FUSEDLOSS_RESULTS", ROOT / "nbs" / "results")) / "first_calls.json"
LAYER, PATHS = dict(N=8192, H=2048, V=65536), dict(T=500, N=128, C=20, L=100)
SMALL = dict(N=32, H=16, V=64), dict(T=12, N=2, C=8, L=4)
ROUNDS = 3
CACHES = {"TRITON_CACHE_DIR": "triton", "FUSEDLOSS_CACHE_DIR": "fusedloss", "CUPY_CACHE_DIR": "cupy", "CUDA_CACHE_PATH": "cuda",
          "TORCHINDUCTOR_CACHE_DIR": "inductor", "PYTORCH_KERNEL_CACHE_PATH": "torch"}  # by what names it, a folder
STATES = "empty caches", "warm disk"  # of the two processes


def layer(loss):
    "A step of a loss of x, w, y"
    def make(device, **sizes):
        import torch
        from fusedloss.baseline import sample_data
        x, w, y = sample_data(sizes["N"], sizes["H"], sizes["V"], torch.bfloat16, device)
        call = loss()
        return lambda: torch.autograd.grad(call(x, w, y), [x, w])
    return make


def compiled():
    "The usual lines, compiled"
    import torch
    from workbook.peers import eager_fp32_softmax
    return torch.compile(eager_fp32_softmax, dynamic=False)


def eager():
    "The usual lines"
    from workbook.peers import eager_fp32_softmax
    return eager_fp32_softmax


def ours(method):
    "The linear cross entropy by a method"
    def loss():
        from fusedloss import linear_cross_entropy
        return lambda x, w, y: linear_cross_entropy(x, w, y, method=method)
    return loss


def summed_log_probs():
    "The targets' log-probabilities, added up"
    from fusedloss import linear_log_probs
    return lambda x, w, y: linear_log_probs(x, w, y).log_probs.sum()


def class_head(device, N, H, V):
    "A step of a head that samples a tenth of the classes"
    import torch
    from fusedloss import margins, PartialFC
    head = PartialFC(V, H, sample_rate=0.1, margin=margins.CosFace(0.4, 64.0), device=device)
    x = torch.randn(N, H, device=device).to(torch.bfloat16).requires_grad_()
    y = torch.randint(V, (N,), device=device)
    return lambda: head(x, y).backward()


def paths(device, T, N, C, L):
    "A step of CTC of logits, in fp32"
    import torch
    from fusedloss import ctc_loss_with_logits
    z, targets = torch.randn(T, N, C, device=device, requires_grad=True), torch.randint(1, C, (N, L), device=device)
    lengths = torch.full((N,), T), torch.full((N,), L)
    return lambda: torch.autograd.grad(ctc_loss_with_logits(z, targets, *lengths), z)


LOSSES = {"eager, fp32 softmax": layer(eager), "torch.compile": layer(compiled), "auto": layer(ours("auto")),
          "recompute": layer(ours("recompute")), "log-probabilities": layer(summed_log_probs), "PartialFC": class_head, "CTC": paths}


def sizes_of(name, small):
    "The shape of a loss"
    return (SMALL if small else (LAYER, PATHS))[name == "CTC"]


def seconds_of(call):
    "Until the GPU is done, where there is one"
    import torch
    begin = perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter() - begin


def this_process(name, small):
    "Seconds of the imports, of the first call and of the second"
    begin = perf_counter()
    import torch
    import fusedloss  # noqa: F401
    imports = perf_counter() - begin
    step = LOSSES[name]("cuda" if torch.cuda.is_available() else "cpu", **sizes_of(name, small))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return dict(imports=imports, seconds=seconds_of(step), again=seconds_of(step))


def with_caches(folder):
    "The environment of a process that keeps all its caches in `folder`"
    env = {key: value for key, value in os.environ.items() if key != "FUSEDLOSS_CHOICES"}
    path = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return env | {key: str(Path(folder) / part) for key, part in CACHES.items()} | {"PYTHONPATH": path}


def fresh_process(name, small, folder):
    "`this_process` in a new one; `RuntimeError` with its last words if it fails"
    command = [sys.executable, __file__, "--here", name, *["--small"] * small]
    done = subprocess.run(command, env=with_caches(folder), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: expected a process that ends well, got {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(names, small, rounds):
    "Medians by loss and state of the caches"
    found = {(name, state): [] for name in names for state in STATES}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            with tempfile.TemporaryDirectory() as folder:
                for state in STATES:
                    found[name, state].append(fresh_process(name, small, folder))
    return {key: {part: statistics.median(f[part] for f in times) for part in times[0]} for key, times in found.items()}


def main(args):
    parser = argparse.ArgumentParser()
    parser.add_argument("losses", nargs="*", metavar="LOSS", help=f"of {', '.join(LOSSES)}; default: all")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, one round, no record")
    parser.add_argument("--here", action="store_true", help="time one loss in this process and print JSON")
    asked = parser.parse_args(args)
    if unknown := [name for name in asked.losses if name not in LOSSES]:
        parser.error(f"expected losses of {[*LOSSES]}, got {unknown}")
    if asked.here:
        print(json.dumps(this_process(asked.losses[0], asked.small)), flush=True)
        os._exit(0)  # what libraries do as they end is not timed, and may fail
    import torch
    from workbook.records import machine_line, record
    if not (asked.small or torch.cuda.is_available()):
        parser.error("expected a GPU, got none: --small runs on a CPU")
    print(machine_line("cuda" if torch.cuda.is_available() else "cpu"), flush=True)
    for (name, state), f in measured(asked.losses or [*LOSSES], asked.small, 1 if asked.small else ROUNDS).items():
        print(f"{name}, {state}: {f['seconds']:.3f} s; again {f['again']:.4f} s; imports {f['imports']:.2f} s", flush=True)
        if not asked.small:
            record(RESULTS, f"{name}, {state}", sizes_of(name, False), "float32" if name == "CTC" else torch.bfloat16, "cuda", **f)


if __name__ == "__main__":
    main(sys.argv[1:])
