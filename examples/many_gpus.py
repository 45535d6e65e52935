"""Losses over many classes on the GPUs of one host: time, peak memory, and what is the same on any number of them.

    torchrun --nproc-per-node 4 examples/many_gpus.py [CASE ...]

Results go to nbs/results/16_many_gpus.json, which the pages on losses and on heads over ranks show.
"""
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fusedloss as fl
from fusedloss.core.drawing import si
from fusedloss.core.records import machine_line, record
from fusedloss.core.tuning import event_seconds

RESULTS = Path(os.environ.get("FUSEDLOSS_RESULTS", Path(__file__).parent.parent / "nbs" / "results")) / "16_many_gpus.json"
LANGUAGE_MODEL = dict(N=8192, H=4096, V=128256)
bf16 = torch.bfloat16


def timed(step, runs, rounds):
    "Seconds of a step among `runs` that follow one another, of the slowest rank: the median of some rounds"
    times = []
    for _ in range(rounds):
        dist.barrier()  # every rank makes as many steps, or they would wait for each other for ever
        times += event_seconds(step, calls=runs)
    slowest = torch.tensor(sorted(times)[rounds // 2], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def peak_of(step):
    "Bytes above what was there, of this rank"
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measured(name, shape, step, **more):
    "Time a step in a row of steps, and one by one; print and record, on the first rank"
    for _ in range(3):
        step()
    peak, ranks, state = peak_of(step), dist.get_world_size(), torch.cuda.memory_allocated()  # state: with the last gradient
    for name, runs, rounds in ((name, 10, 3), (f"{name}, one by one", 1, 10)):
        seconds = timed(step, runs, rounds)
        if dist.get_rank() == 0:
            print(f"{name}, {ranks} GPUs: {si(seconds, 's')}, {si(peak, 'B')} at the peak", flush=True)
            record(RESULTS, name, dict(shape, R=ranks), bf16, "cuda", seconds=seconds, peak=peak, state=state,
                   samples_per_second=shape["N"] / seconds, **more)


def language_model(mesh, tokens_spread):
    "A vocabulary over the GPUs; the tokens on all of them, or spread too"
    (n, h, v), ranks = LANGUAGE_MODEL.values(), mesh.size()
    torch.manual_seed(0)  # the same tokens on every rank
    x, y = torch.randn(n, h, device="cuda").to(bf16), torch.randint(v, (n,), device="cuda")
    rows = len(torch.arange(v).chunk(ranks)[mesh.get_local_rank()])
    torch.manual_seed(1 + dist.get_rank())
    w = (torch.randn(rows, h, device="cuda") * h**-0.5).to(bf16)
    w = DTensor.from_local(w, mesh, [Shard(0)], run_check=False, shape=torch.Size((v, h)), stride=(h, 1)).requires_grad_()
    if tokens_spread:
        x = DTensor.from_local(x.chunk(ranks)[mesh.get_local_rank()], mesh, [Shard(0)], run_check=False)
        y = y.chunk(ranks)[mesh.get_local_rank()]
    x.requires_grad_()
    step = lambda: torch.autograd.grad(fl.linear_cross_entropy(x, w, y, backbone_reduction="sum" if tokens_spread else None), [x, w])
    measured("tokens spread" if tokens_spread else "tokens on all", LANGUAGE_MODEL, step)


def class_head(mesh, per_gpu, rows, name, rate=0.1, h=512):
    "One training step of a head: forward, backward, SGD with momentum; `rows` of all GPUs together"
    ranks = mesh.size()
    rows_per_gpu = rows // ranks
    head = fl.ShardedPartialFC(per_gpu * ranks, h, mesh=mesh, sample_rate=rate, margin=fl.margins.CosFace(0.4, 64.0), equal_batch=True)
    optimizer = fl.ShardedRowSparse(torch.optim.SGD, head.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(rows_per_gpu, h, device="cuda").to(bf16).requires_grad_()
    y = torch.randint(per_gpu * ranks, (rows_per_gpu,), device="cuda")

    def step():
        optimizer.zero_grad()
        x.grad = None
        head(x, y).backward()
        optimizer.step()

    measured(name, dict(N=rows, H=h, V=per_gpu * ranks), step, rate=rate)


def same_answer(mesh):
    "A head in float64 whose loss is the same on any number of GPUs: its last digits are printed, to be compared"
    head = fl.ShardedPartialFC(100_003, 64, mesh=mesh, sample_rate=0.1, dtype=torch.float64, margin=fl.margins.ArcFace(0.3, 16.0))
    torch.manual_seed(0)
    x, y = torch.randn(24, 64, dtype=torch.float64, device="cuda"), torch.randint(100_003, (24,), device="cuda")
    ranks, rank = mesh.size(), mesh.get_local_rank()
    loss = head(x.chunk(ranks)[rank], y.chunk(ranks)[rank])
    if rank == 0:
        print(f"a loss on {ranks} GPUs: {loss.item():.15f}", flush=True)


CASES = {"same": same_answer,
         "all": lambda mesh: language_model(mesh, False),
         "spread": lambda mesh: language_model(mesh, True),
         "weak": lambda mesh: class_head(mesh, 5_000_000, 1024, "5 M classes a GPU"),
         "large": lambda mesh: class_head(mesh, 25_000_000, 4096, "25 M classes a GPU")}


def main(names):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
    if dist.get_rank() == 0:
        print(machine_line("cuda"), flush=True)
    for name in names or CASES:
        CASES[name](mesh)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
