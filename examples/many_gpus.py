"""Losses over many classes on the GPUs of one host: time, peak memory, and what is the same on any number of them.

    torchrun --nproc-per-node 4 examples/many_gpus.py [CASE ...]

Each shape of a language model is one run of rounds, in which the first GPU also takes the step alone, and peers take theirs over
all GPUs. That GPU holds all classes beside its own during the rounds; peaks count what a step adds. Results go to
nbs/results/16_many_gpus.json, which the pages on losses and on heads over ranks show. Without names all cases run; "large" needs
GPUs of 110 GB, the others fit 80 GB. A head's classes grow with the GPUs, and its step on each GPU alone is taken in the same run.
"peers-A" and "peers-C" have the cross entropies alone, ours and those of the libraries that are installed, with their errors: run each
in a process of its own, since Liger's kernels have room for the sizes of their first call.
"""
import functools
import os
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fusedloss as fl
from fusedloss.core.ranks import dtensor_of_rows, shard_range
from workbook.measure import SHAPES
from workbook.peers import end_peers, liger_pools, peers_over_ranks
from workbook.records import machine_line, record
from workbook.timeline import record_timeline
from in_turn import line, measured, Method

RESULTS = Path(os.environ.get("FUSEDLOSS_RESULTS", Path(__file__).parent.parent / "nbs" / "results")) / "16_many_gpus.json"
bf16 = torch.bfloat16


class Head(NamedTuple):
    "What a loss is made of"
    x: Tensor; y: Tensor  # [N,H], [N], the same on all ranks
    w: DTensor  # [V,H], Shard(0)
    whole: Optional[Tensor]  # [V,H], on the first rank alone


def class_weights(mesh, shape, dtype, rank, seed):
    "The classes of a rank, the same whoever draws them"
    torch.manual_seed(seed + rank)
    rows = len(shard_range(shape.V, mesh.size(), rank))
    return (torch.randn(rows, shape.H, device=mesh.device_type) * shape.H**-0.5).to(dtype)


def drawn(mesh, shape, dtype, seed=0):
    "A head's tokens and classes, with gradients"
    rank, leaf = mesh.get_local_rank(), lambda t: t.requires_grad_()
    w = dtensor_of_rows(class_weights(mesh, shape, dtype, rank, seed), mesh, torch.Size((shape.V, shape.H)))
    whole = torch.cat([class_weights(mesh, shape, dtype, r, seed) for r in range(mesh.size())]) if rank == 0 else None
    torch.manual_seed(seed + mesh.size())
    x, y = torch.randn(shape.N, shape.H, device=mesh.device_type).to(dtype), torch.randint(shape.V, (shape.N,), device=mesh.device_type)
    return Head(leaf(x), y, leaf(w), None if whole is None else leaf(whole))


def spread(t, mesh):
    "A DTensor of the rows of each rank, from what all ranks have"
    mine = shard_range(len(t), mesh.size(), mesh.get_local_rank())
    rows = t.detach()[mine.start:mine.stop].clone()
    return dtensor_of_rows(rows, mesh, t.shape).requires_grad_(t.requires_grad)


def step_of(loss, x, w, *rest):
    "Loss and gradients; None where the classes are missing"
    def step():
        found = loss(x, w, *rest)
        return found.detach(), *torch.autograd.grad(found, [x, w])
    return None if w is None else step


def cross_entropies(mesh, head):
    "Methods of the cross entropy: alone on one GPU, and over ranks with the tokens on all of them and spread"
    loss = lambda method, reduction=None: lambda x, w, y: fl.linear_cross_entropy(x, w, y, method=method, backbone_reduction=reduction)
    found = {"one GPU": Method(step_of(loss("auto"), head.x, head.whole, head.y))}
    own = spread(head.x, mesh), head.w, spread(head.y, mesh)
    for method, name in (("recompute", ""), ("product", ", product")):
        found[f"tokens on all{name}"] = Method(step_of(loss(method), head.x, head.w, head.y), "one GPU")
        found[f"tokens spread{name}"] = Method(step_of(loss(method, "sum"), *own), "one GPU")
    return found


def log_probs(mesh, head):
    "Log-probabilities with the entropy, both differentiated, likewise"
    one, mean = "log-probs, one GPU", lambda found: (found.entropy - found.log_probs).mean()
    loss = lambda reduction=None: lambda x, w, y: mean(fl.sharded_linear_log_probs(x, w, y, entropy=True, backbone_reduction=reduction))
    alone = step_of(lambda x, w, y: mean(fl.linear_log_probs(x, w, y, entropy=True)), head.x, head.whole, head.y)
    return {one: Method(alone), "log-probs, tokens on all": Method(step_of(loss(), head.x, head.w, head.y), one),
            "log-probs, tokens spread": Method(step_of(loss("sum"), spread(head.x, mesh), head.w, spread(head.y, mesh)), one)}


def divergences(mesh, head, teacher):
    "A student's forward divergence from a teacher of its size, likewise"
    one, x, t = "divergence, one GPU", spread(head.x, mesh), spread(teacher.x, mesh)
    loss = lambda reduction=None: lambda x, w, *rest: fl.sharded_linear_divergence(x, w, *rest, backbone_reduction=reduction)
    return {one: Method(step_of(fl.linear_divergence, head.x, head.whole, teacher.x, teacher.whole)),
            "divergence, tokens on all": Method(step_of(loss(), head.x, head.w, teacher.x, teacher.w), one),
            "divergence, tokens spread": Method(step_of(loss("sum"), x, head.w, t, teacher.w), one)}


K = 64  # classes of a row, of a teacher that is stored


def choices(mesh, shape, dtype=bf16, **how):
    "The K most likely classes of each token, and a class drawn for each, without gradients: alone on one GPU, and over ranks"
    head = drawn(mesh, shape, dtype)
    x, w, whole, own = (None if t is None else t.detach() for t in (head.x, head.w, head.whole, spread(head.x, mesh)))
    draw = lambda: torch.Generator(mesh.device_type).manual_seed(0)
    best = lambda take, x, w, **ranks: None if w is None else lambda: (take(x, w, K, **ranks).log_probs.mean(),)
    class_of = lambda take, x, w: None if w is None else lambda: (take(x, w, generator=draw()).log_probs.mean(),)
    methods = {"top-k, one GPU": Method(best(fl.linear_topk, x, whole)), "sample, one GPU": Method(class_of(fl.linear_sample, x, whole)),
               "top-k, tokens on all": Method(best(fl.sharded_linear_topk, x, w), "top-k, one GPU"),
               "top-k, tokens spread": Method(best(fl.sharded_linear_topk, own, w, backbone_reduction="sum"), "top-k, one GPU"),
               "sample, tokens on all": Method(class_of(fl.sharded_linear_sample, x, w), "sample, one GPU")}
    keep(measured(methods, mesh, **how), mesh, shape._asdict(), dtype, K=K)


def of_peers(peers, head):
    "Steps of other libraries, with the tokens on all ranks; those of log-probabilities are compared with ours of them"
    alone = lambda name: "log-probs, one GPU" if name.endswith("log-probs") else "one GPU"
    return {name: Method(functools.partial(step, head.x, head.w, head.y), alone(name)) for name, step in peers.items()}


def keep(found, mesh, shape, dtype, ranks=0, **more):
    "Print and record, on the first rank; of fewer ranks than the mesh has, if they are given"
    for name, figures in found.items() if mesh.get_local_rank() == 0 else ():
        print(line(name, figures, ranks or mesh.size()), flush=True)
        record(RESULTS, name, dict(shape, R=ranks or mesh.size()), dtype, mesh.device_type, **figures, **more)


def language_model(mesh, shape, dtype=bf16, **how):
    "Every method of one shape, in the same rounds"
    (peers, missing), head, teacher = peers_over_ranks(mesh), drawn(mesh, shape, dtype), drawn(mesh, shape, dtype, seed=1000)
    methods = cross_entropies(mesh, head) | log_probs(mesh, head) | divergences(mesh, head, teacher) | of_peers(peers, head)
    found = measured(methods, mesh, **how)
    keep(found | {name: dict(reason=why) for name, why in missing.items()}, mesh, shape._asdict(), dtype)


ROWS = 1024  # tokens whose logits in fp32 are there at once


def exact_step(mesh, head):
    "Loss, dx and dw, on all ranks, of the eager loss in fp32 on the first GPU, from the same operands"
    dtype, n, (v, h) = torch.promote_types(head.x.dtype, torch.float32), len(head.x), head.w.shape
    loss, dx, dw = (head.x.new_zeros(size, dtype=dtype) for size in ((), (n, h), (v, h)))
    if mesh.get_local_rank() == 0:
        x, w = (t.detach().to(dtype).requires_grad_() for t in (head.x, head.whole))
        for rows, labels in zip(x.split(ROWS), head.y.split(ROWS)):
            part = F.cross_entropy(rows @ w.T, labels, reduction="sum") / n
            part.backward()
            loss += part.detach()
        dx, dw = x.grad, w.grad
    for t in (loss, dx, dw):
        dist.broadcast(t, dist.get_global_rank(mesh.get_group(), 0), group=mesh.get_group())
    return loss, dx, dw


def errors(step, exact, mesh):
    "Norms of what loss, dx and dw of a step are off, divided by those of what is exact; over all ranks that take it"
    sums = torch.zeros(3, 2, dtype=torch.float64, device=mesh.device_type)
    for i, (found, wanted) in enumerate(zip(step() if step else (), exact)):
        own = (found.to_local() if isinstance(found, DTensor) else found).to(wanted.dtype)
        if own.shape != wanted.shape:  # tokens, or classes, of this rank
            mine = shard_range(len(wanted), mesh.size(), mesh.get_local_rank())
            wanted = wanted[mine.start:mine.stop]
        sums[i] = torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) ** 2 for t in (own - wanted, wanted)])
    dist.all_reduce(sums, group=mesh.get_group())
    return dict(zip(("loss error", "dx error", "dw error"), (sums[:, 0] / sums[:, 1]).sqrt().tolist()))


def beside_peers(mesh, shape, dtype=bf16, **how):
    "The cross entropies of one shape, ours and other libraries', in the same rounds; and their errors"
    (peers, missing), head = peers_over_ranks(mesh), drawn(mesh, shape, dtype)
    methods = cross_entropies(mesh, head) | of_peers({name: step for name, step in peers.items() if not name.endswith("log-probs")}, head)
    found, exact = measured(methods, mesh, **how), exact_step(mesh, head)
    for name, method in methods.items():
        if "reason" not in found[name]:
            found[name] |= errors(method.step, exact, mesh)
    if "seconds" in found.get("Liger, NVSHMEM", {}):
        found["Liger, NVSHMEM"] |= dict(pools=liger_pools(shape.N, shape.H, shape.V // mesh.size()))
    keep(found | {name: dict(reason=f"absent, {why}") for name, why in missing.items()}, mesh, shape._asdict(), dtype)


def contrast(mesh, pairs, name, h=512, dtype=bf16, alone=True, candidates=1, **how):
    "CLIP's loss of so many pairs, on one GPU and with the pairs spread over a ring; y has `candidates` rows for each of x, the first of which belongs to it"
    torch.manual_seed(0)
    unit = lambda n: torch.nn.functional.normalize(torch.randn(n, h, device=mesh.device_type)).to(dtype)
    x, y, positives = unit(pairs), unit(pairs * candidates), torch.arange(pairs, device=mesh.device_type) * candidates
    mine = shard_range(pairs, mesh.size(), mesh.get_local_rank())

    def step(start, stop, **ranks):
        leaves = [t.clone().requires_grad_() for t in (x[start:stop], y[start * candidates:stop * candidates])]
        named = None if candidates == 1 else positives[start:stop]  # numbers of all ranks' rows
        return step_of(lambda x, y: fl.contrastive_loss(x, y, 50.0, positives=named, **ranks), *leaves)

    one, first = f"{name}, one GPU", alone and mesh.get_local_rank() == 0
    methods = {one: Method(step(0, pairs) if first else None)} if alone else {}
    methods[name] = Method(step(mine.start, mine.stop, mesh=mesh, backbone_reduction="sum"), one if alone else "")
    keep(measured(methods, mesh, **how), mesh, dict(N=pairs, H=h) | (dict(M=len(y)) if candidates > 1 else {}), dtype)


def teacher_alone(mesh, shape, dtype=bf16, **how):
    "The divergences of one shape without its other losses"
    methods = divergences(mesh, drawn(mesh, shape, dtype), drawn(mesh, shape, dtype, seed=1000))
    keep(measured(methods, mesh, **how), mesh, shape._asdict(), dtype)


KINDS = {"messages": "nccl", "exponentials": "exponentials", "matmuls": "gemm|nvjet|cutlass|xmma"}  # by a kernel's name; others are "others"


def overlap(mesh, shape, pairs=2**17, h=512, dtype=bf16):
    "When each kernel of a step ran on the first rank, as PyTorch's profiler saw it: kind, start and stop in seconds; of four losses"
    head, teacher = drawn(mesh, shape, dtype), drawn(mesh, shape, dtype, seed=1000)
    own, taught = (spread(head.x, mesh), head.w, spread(head.y, mesh)), spread(teacher.x, mesh)
    mine = torch.nn.functional.normalize(torch.randn(2, pairs // mesh.size(), h, device=mesh.device_type), dim=2).to(dtype)
    how = dict(backbone_reduction="sum")
    steps = {"product": step_of(lambda x, w, y: fl.linear_cross_entropy(x, w, y, method="product", **how), *own),
             "log-probs": step_of(lambda x, w, y: fl.sharded_linear_log_probs(x, w, y, entropy=True, **how).log_probs.mean(), *own),
             "divergence": step_of(lambda x, w: fl.sharded_linear_divergence(x, w, taught, teacher.w, **how), *own[:2]),
             f"{pairs} pairs": step_of(lambda x, y: fl.contrastive_loss(x, y, 50.0, mesh=mesh, **how), *(t.requires_grad_() for t in mine))}
    kind = lambda name: next((k for k, words in KINDS.items() if re.search(words, name)), "others")
    for name, step in steps.items():
        found = record_timeline(step)
        spans = [(kind(w.name), w.start, w.stop) for w in found.work]
        if mesh.get_local_rank() == 0:
            print(name, *(f"{k:12} {a * 1e3:7.3f} {b * 1e3:7.3f} ms" for k, a, b in spans if b - a > 3e-5), sep="\n", flush=True)
            record(RESULTS.with_name("28_timeline.json"), name, dict(shape._asdict(), R=mesh.size()), dtype, mesh.device_type, spans=spans)


def head_step(mesh, per_gpu, rows, h, dtype, rate=0.1):
    "One training step of a head over a mesh: forward, backward, SGD with momentum; `rows` of all its GPUs together"
    ranks, device = mesh.size(), mesh.device_type
    head = fl.ShardedPartialFC(per_gpu * ranks, h, mesh=mesh, sample_rate=rate, margin=fl.margins.CosFace(0.4, 64.0), equal_batch=True)
    optimizer = fl.ShardedRowSparse(torch.optim.SGD, head.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(rows // ranks, h, device=device).to(dtype).requires_grad_()
    y = torch.randint(per_gpu * ranks, (rows // ranks,), device=device)

    def step():
        optimizer.zero_grad()
        x.grad = None
        head(x, y).backward()
        optimizer.step()

    return step


def alone(mesh):
    "A mesh of this rank's GPU"
    return DeviceMesh.from_group(dist.new_group([dist.get_rank()], use_local_synchronization=True), mesh.device_type)


def class_head(mesh, per_gpu, rows, name, h=512, dtype=bf16, **how):
    "A head over all GPUs; before it one on each GPU alone, with as many classes and rows, all at the same time: of these the slowest counts"
    held, seconds = lambda: torch.cuda.memory_allocated() if mesh.device_type == "cuda" else 0, []
    for own in (alone(mesh), mesh) if mesh.size() > 1 else (mesh,):
        empty, step = held(), head_step(own, per_gpu, rows, h, dtype)
        found = measured({name: Method(step)}, mesh, **how)
        if "reason" in found[name]:
            raise RuntimeError(f"{name}: {found[name]['reason']}")
        keep(found, mesh, dict(N=rows, H=h, V=per_gpu * own.size()), dtype, ranks=own.size(), state=held() - empty)  # with the last gradient
        seconds.append(found[name]["seconds"])
        del step
    if mesh.get_local_rank() == 0:
        print(f"{name}, {mesh.size()} ranks: {seconds[0] / seconds[-1]:.3f} of weak scaling", flush=True)


def same_answer(mesh):
    "A head in float64 whose loss is the same on any number of GPUs: its last digits are printed, to be compared"
    head = fl.ShardedPartialFC(100_003, 64, mesh=mesh, sample_rate=0.1, dtype=torch.float64, margin=fl.margins.ArcFace(0.3, 16.0))
    torch.manual_seed(0)
    x, y = torch.randn(24, 64, dtype=torch.float64, device=mesh.device_type), torch.randint(100_003, (24,), device=mesh.device_type)
    ranks, rank = mesh.size(), mesh.get_local_rank()
    loss = head(x.chunk(ranks)[rank], y.chunk(ranks)[rank])
    if rank == 0:
        print(f"a loss on {ranks} GPUs: {loss.item():.15f}", flush=True)


CASES = {"same": same_answer,
         "A": lambda mesh: language_model(mesh, SHAPES[0]),
         "B": lambda mesh: language_model(mesh, SHAPES[1]),
         "C": lambda mesh: language_model(mesh, SHAPES[2]),
         "peers-A": lambda mesh: beside_peers(mesh, SHAPES[0]),
         "peers-C": lambda mesh: beside_peers(mesh, SHAPES[2]),
         "divergences": lambda mesh: [teacher_alone(mesh, shape) for shape in SHAPES[:3]],
         "overlap": lambda mesh: overlap(mesh, SHAPES[0]),
         "pairs": lambda mesh: contrast(mesh, 2**18, "2¹⁸ pairs", rounds=3, calls=2),
         "many pairs": lambda mesh: contrast(mesh, 2**20, "2²⁰ pairs", alone=False, rounds=1, calls=1),
         "hard negatives": lambda mesh: contrast(mesh, 2**17, "2¹⁷ pairs, four rows of y each", candidates=4, rounds=3, calls=2),
         "choices": lambda mesh: [choices(mesh, shape) for shape in SHAPES[:3]],
         "weak": lambda mesh: class_head(mesh, 5_000_000, 1024, "5 M classes a GPU"),
         "middle": lambda mesh: class_head(mesh, 15_000_000, 4096, "15 M classes a GPU"),
         "large": lambda mesh: class_head(mesh, 25_000_000, 4096, "25 M classes a GPU")}


def main(names):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(minutes=5))  # ranks compare their calls on the host
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
    if dist.get_rank() == 0:
        print(machine_line("cuda"), flush=True)
    for name in names or CASES:
        CASES[name](mesh)
        torch.cuda.empty_cache()
    end_peers()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
