"""What moves of code must not change: schemas of operators, public signatures and docstrings, the bits of losses and gradients.

    python tools/snapshot.py take FILE       before the move
    python tools/snapshot.py compare FILE    after it: prints every line that differs, and fails if there is one

With TRITON_INTERPRET=1 the calls are made a second time on a CPU, by the Triton kernels. Bits are compared with those of the same machine alone.
"""
import hashlib
import inspect
import json
import math
import os
import platform
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any, is_typeddict

import torch
import torch.distributed as dist
from kernels_once import DEVICE, LAUNCHES, forced_kernels, labels, launches
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import fusedloss as fl
from fusedloss.ctc import ctc_sample
from fusedloss.scans import scan_fwd_triton

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
DTYPES = f32, f64, bf16
GPU, TRITON = DEVICE == "cuda", os.environ.get("TRITON_INTERPRET") == "1"
REFUSALS = "ValueError", "IndexError", "TypeError"  # with their words a result like any other
Lines = dict[str, str]
Call = Callable[[], tuple[Any, list[torch.Tensor]]]  # returns a result and the tensors to differentiate it by
Calls = Iterable[tuple[str, Call]]


def leaf(*size: int, dtype: torch.dtype = f32, std: float = 1.0) -> torch.Tensor:
    "Normal numbers that want a gradient"
    return torch.randn(*size, device=DEVICE).mul_(std).to(dtype).requires_grad_()


def lengths(top: int, n: int) -> torch.Tensor:
    "Lengths of n sequences up to `top`, which the first one has"
    return torch.cat([torch.tensor([top]), torch.randint(1, top + 1, (n - 1,))])


# Options of the losses over logits; what is callable makes a tensor for n tokens and v classes.
of_classes = lambda n, v, dtype: torch.rand(v, device=DEVICE)
of_tokens = lambda n, v, dtype: torch.rand(n, device=DEVICE)
a_bias = lambda n, v, dtype: leaf(v, dtype=dtype)
TOGETHER = dict(weight=of_classes, token_weight=of_tokens, ignore_index=3, label_smoothing=0.1, logit_scale=0.7, softcap=5.0, z_loss=1e-3)
OPTIONS: dict[str, dict] = {
    "": {}, "sum": dict(reduction="sum"), "none": dict(reduction="none"), "ignored": dict(ignore_index=3),
    "weight": dict(weight=of_classes), "token_weight": dict(token_weight=of_tokens), "label_smoothing": dict(label_smoothing=0.1),
    "smoothing and weight": dict(label_smoothing=0.1, weight=of_classes), "logit_scale": dict(logit_scale=0.5), "softcap": dict(softcap=3.0),
    "z_loss": dict(z_loss=1e-3), "stats": dict(return_stats=True), "together": TOGETHER,
    "together, none, stats": dict(TOGETHER, reduction="none", return_stats=True),
}
LINEAR_OPTIONS: dict[str, dict] = OPTIONS | {
    "bias": dict(linear_bias=a_bias), "together, bias": dict(TOGETHER, linear_bias=a_bias), "memory_budget": dict(memory_budget=2**20 if GPU else 2**14),
    "max_valid": dict(max_valid=2**14), "accumulate": dict(accumulate="native"),
}
LOGITS = ((9, 1003), (140, 5003), (17, 128256)) if GPU else ((9, 103),)
LINEAR = ((70, 1003, 96), (1030, 8200, 256)) if GPU else ((17, 70, 32),)
HEADS = ((77, 3000, 64), (300, 9000, 128)) if GPU else ((9, 60, 16),)
LARGER = "", "together, bias", "together, none, stats", "sampled", "recompute", "conflict", "AdaFace 0.5"  # options that sizes after the first take
MARGINS: dict[str, Callable] = {
    "CosFace": fl.margins.CosFace, "ArcFace": fl.margins.ArcFace, "ArcFace straight": partial(fl.margins.ArcFace, grad="straight_through", past_pi="linear"),
    "Combined": fl.margins.Combined, "AdaFace": fl.margins.AdaFace, "Circle": fl.margins.Circle, "Circle exact": partial(fl.margins.Circle, grad="exact"),
    "SubCenter": partial(fl.margins.SubCenter, 3), "SubCenter AdaFace": lambda: fl.margins.SubCenter(2, fl.margins.AdaFace()),
}
HEAD_OPTIONS: dict[str, dict] = {
    "": {}, "sampled": dict(sample_rate=0.3), "positives": dict(sample_rate="positives"), "dense": dict(sample_rate=0.3, sparse=False),
    "conflict": dict(sample_rate=0.3, conflict=0.2), "conflict zero": dict(conflict=0.2, conflict_mode="zero"), "tiles": dict(method="tiles"),
    "recompute": dict(method="recompute", sample_rate=0.3), "log_q": dict(sampler=lambda: fl.NegativeSampler(0.3, seed=5, log_q=True)),
} | {f"{name} {rate}": dict(margin=margin, sample_rate=rate) for (name, margin), rate in product(MARGINS.items(), (1.0, 0.5))}
SEMIRINGS = {"Log": fl.semirings.Log, "Max": fl.semirings.Max, "Real": fl.semirings.Real, "Count": fl.semirings.Count,
             "Entropy": fl.semirings.Entropy, "KBest": fl.semirings.KBest(2)}
GRAPHS = ((6, 3, 4, 2), (20, 2, 33, 3), (6, 2, 1024, 5)) if GPU else ((6, 3, 4, 2),)  # T, N, C, nz
CTC = ((9, 3, 5, 2), (70, 2, 40, 33), (140, 2, 33, 130), (620, 1, 30, 300)) if GPU else ((9, 3, 5, 2), (21, 2, 8, 6))  # T, N, C, L
LINEAR_CTC = ((40, 2, 300, 64, 12), (70, 3, 515, 96, 40), (18, 2, 40000, 64, 7)) if GPU else ((9, 2, 70, 16, 3),)  # T, N, V, H, L


def made(options: dict, *sizes) -> dict:
    "Options with their tensors and objects made"
    return {name: value(*sizes) if callable(value) else value for name, value in options.items()}


def grid(sizes: tuple, options: dict[str, dict]) -> Iterator[tuple[tuple, torch.dtype, str, dict]]:
    "Every option at the first size, and a few at the others, which are there for kernels of their own; in every precision"
    for size, dtype, (name, option) in product(sizes, DTYPES, options.items()):
        if size == sizes[0] or name in LARGER:
            yield size, dtype, name, option


def wanted(*tensors) -> list[torch.Tensor]:
    "Those of the arguments that want a gradient"
    return [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]


def of_logits(loss: Callable, size: tuple, dtype: torch.dtype, options: dict):
    "A loss of logits [n, v], which are no leaf: it may overwrite them"
    n, v, *others = size
    z, y, given = leaf(n, v, *others, dtype=dtype, std=2.0), labels(v, n, *others), made(options, n, v, dtype)
    return loss(z * 1, y, **given), [z]


def linear(loss: Callable, size: tuple, dtype: torch.dtype, options: dict, needs: str = "xw", autocast: bool = False):
    "A linear layer's loss"
    n, v, h = size
    x, w = leaf(n, h, dtype=dtype).requires_grad_("x" in needs), leaf(v, h, dtype=dtype, std=2 * h**-0.5).requires_grad_("w" in needs)
    y, given = labels(v, n), made(options, n, v, dtype)
    with torch.autocast(DEVICE, bf16) if autocast else nullcontext():
        return loss(x, w, y, **given), wanted(x, w, *given.values())


def divergence(size: tuple, dtype: torch.dtype, top: int = 0, loss: Callable = fl.linear_divergence, **options):
    "A student's divergence from a teacher's head of half its width, or from lists"
    n, v, h = size
    x, w, given = leaf(n, h, dtype=dtype), leaf(v, h, dtype=dtype, std=2 * h**-0.5), (leaf(n, h // 2, dtype=dtype), leaf(v, h // 2, dtype=dtype))
    if not top: return loss(x, w, *given, **options), [x, w]
    log_probs, indices = (given[0] @ given[1].T).detach().float().log_softmax(1).topk(top)
    return fl.linear_divergence(x, w, teacher_top=(indices, log_probs), **options), [x, w]


def contrast(size: tuple, dtype: torch.dtype, **options):
    "Pairs of features, and a scale that is learned"
    n, _, h = size
    x, y, scale = leaf(n, h, dtype=dtype), leaf(n, h, dtype=dtype), torch.tensor(5.0, device=DEVICE, requires_grad=True)
    return fl.contrastive_loss(x, y, scale, memory_budget=2**19, **options), [x, y, scale]


def of_targets(size: tuple, dtype: torch.dtype, each: bool = False, over_logits: bool = False, loss: Callable = fl.linear_log_probs, **options):
    "Log-probabilities of the targets, and all that may be asked beside them; at temperatures of the tokens' own"
    n, v, h = size
    x, w, b, y = leaf(n, h, dtype=dtype), leaf(v, h, dtype=dtype, std=2 * h**-0.5), leaf(v, dtype=dtype), labels(v, n)
    given = dict(temperature=torch.rand(n, device=DEVICE) + 0.5 if each else 0.7, ignore_index=3, entropy=True, mean_logits=True, target_rank=True, **options)
    if over_logits: return fl.log_probs(x @ w.T, y, **given), [x, w]
    return loss(x, w, y, linear_bias=b, **given), [x, w, b]


def in_sequences(size: tuple, dtype: torch.dtype, **options):
    "Two sequences whose targets lie ahead"
    (n, v, h), k = size, options["shift"]
    x, w = leaf(2, n, h, dtype=dtype), leaf(v, h, dtype=dtype)
    return fl.linear_cross_entropy(x, w, labels(v, 2, n), token_weight=torch.rand(2, n, device=DEVICE) if k > 1 else None, **options), [x, w]


def buffered(size: tuple, dtype: torch.dtype):
    "Chunks whose gradient of the weight is added to a buffer"
    n, v, h = size
    x, w, buffer = leaf(n, h, dtype=dtype), leaf(v, h, dtype=dtype), torch.zeros(v, h, device=DEVICE)
    loss = fl.chunked_linear_cross_entropy(x, w, labels(v, n), grad_buffer=buffer, chunk_size=7)
    loss.backward()
    return [loss.detach(), buffer, x.grad], []


def module(make: Callable, size: tuple, dtype: torch.dtype, evaluated: bool = False):
    "A module's loss, by its own parameters"
    n, v, h = size
    x, y, loss = leaf(n, h, dtype=dtype), labels(v, n), make(v, h, dtype).to(DEVICE).train(not evaluated)
    return loss(x, y), [x, *loss.parameters()]


def vocabulary(v: int, h: int, dtype: torch.dtype, **options):
    "The module of tiles"
    return fl.MemoryEfficientVocabOutput(torch.nn.Parameter(leaf(v, h, dtype=dtype).detach()), tile_factor=3, **options)


def baseline(cls: type, v: int, h: int, dtype: torch.dtype, **options):
    "A module of the baseline"
    return cls(torch.nn.Parameter(leaf(v, h, dtype=dtype).detach()), **options)


def linear_loss(v: int, h: int, dtype: torch.dtype, **options):
    "The module of all methods"
    return fl.LinearCrossEntropyLoss(h, v, dtype=dtype, **options)


def margin(make: Callable, size: tuple, dtype: torch.dtype, **options):
    "A cosine head's loss, and what its margin has learnt"
    n, v, h = size
    m = make()
    x, w = leaf(n, h, dtype=dtype), leaf(v * m.centers, h, dtype=dtype)
    m = m.to(DEVICE) if isinstance(m, torch.nn.Module) else m
    loss = fl.margin_cross_entropy(x, w, labels(v, n), margin=m, ignore_index=2, **options)
    return [loss, *(m.buffers() if isinstance(m, torch.nn.Module) else ())], [x, w]


def head(cls: type, size: tuple, dtype: torch.dtype, options: dict, evaluated: bool = False):
    "PartialFC, one row without a label"
    n, v, h = size
    layer = cls(v, h, device=DEVICE, dtype=f64 if dtype == f64 else f32, **made(options)).to(DEVICE).train(not evaluated)  # a margin's statistics too
    x, y = leaf(n, h, dtype=dtype), labels(v, n)
    y[0] = layer.ignore_index
    return [layer(x, y, return_stats=True), *layer.buffers()], [x, layer.weight]


def steps(optimizer: type, size: tuple, dtype: torch.dtype, resized: bool = False, heads: type = fl.PartialFC, rows: type = fl.RowSparse, **options):
    "Two steps of a sampled head: its weight, and the optimizer's state"
    n, v, h = size
    layer = heads(v, h, sample_rate=0.3, device=DEVICE, dtype=dtype)
    updates, losses = rows(optimizer, layer.parameters(), lr=0.1, weight_decay=0.01, **options), []
    for step in range(2):
        loss = layer(leaf(n, h, dtype=bf16 if GPU else dtype), labels(v, n))
        loss.backward()
        losses.append(loss.detach())
        updates.clip_grad_norm_(0.5)
        updates.step()
        updates.zero_grad()
        if resized and step == 0:
            layer.extend(5, updates)
            layer.remove([1, 4, v + 2], updates)
    state = [kept[name] for kept in updates.state.values() for name in sorted(kept)]
    return [t.detach() if isinstance(t, torch.Tensor) else t for t in (*losses, layer.weight, *state)], []


def scored(cls: type, size: tuple, dtype: torch.dtype, options: dict):
    "A head's scores, and the best of them"
    n, v, h = size
    layer = cls(v, h, device=DEVICE, dtype=f64 if dtype == f64 else f32, **made(options)).to(DEVICE)
    x = leaf(n, h, dtype=dtype)
    return [layer.logits(x), layer.topk(x, 3).values], []


def clipped(norm_type: float, dtype: torch.dtype):
    "Gradients of rows beside dense ones, and their norm"
    layer, rows = torch.nn.Linear(16, 16).to(DEVICE, dtype), fl.PartialFC(60, 16, sample_rate=0.3, device=DEVICE, dtype=dtype)
    rows(layer(leaf(9, 16, dtype=dtype)), labels(60, 9)).backward()
    params = [*layer.parameters(), *rows.parameters()]
    return [fl.clip_grad_norm_(params, 0.1, norm_type), *(p.grad.to_dense() for p in params)], []


def clipped_values(dtype: torch.dtype):
    "Gradients of rows beside dense ones, number by number"
    layer, rows = torch.nn.Linear(16, 16).to(DEVICE, dtype), fl.PartialFC(60, 16, sample_rate=0.3, device=DEVICE, dtype=dtype)
    rows(layer(leaf(9, 16, dtype=dtype)), labels(60, 9)).backward()
    params = [*layer.parameters(), *rows.parameters()]
    fl.clip_grad_value_(params, 0.01)
    return [p.grad.to_dense() for p in params], []


def through_files(ranks: int, kind: str):
    "A head's weight, written as insightface's ranks do, and read"
    ours, theirs = (fl.PartialFC(60, 16, device=DEVICE) for _ in "ab")
    with tempfile.TemporaryDirectory() as folder:
        fl.save_insightface(ours, folder, ranks, kind=kind)
        fl.load_insightface(theirs, folder)
    return [theirs.weight.detach()], []


def drawn(rate):
    "A sampler's classes, in two steps"
    sampler = fl.NegativeSampler(rate, seed=7).to(DEVICE)
    first = sampler(3000, 11), sampler.find(labels(3000, 50))
    sampler.advance()
    return [*first, sampler(3000)], []


def popular(each_row: bool, dtype: torch.dtype):
    "Dot products with negatives by popularity, of two steps"
    head = fl.PartialFC(60, 16, normalize=False, bias=True, device=DEVICE, dtype=f64 if dtype == f64 else f32,
                        sampler=fl.PopularitySampler(1 / torch.arange(1.0, 61), 20, each_row=each_row, seed=3))
    x, y = leaf(9, 16, dtype=dtype), labels(60, 9)
    return [head.sampler(9), head(x, y, return_stats=True), head(x, y)], [x, head.weight, head.bias]


def paths(find: Callable, size: tuple, dtype: torch.dtype, *args, differentiable: bool = True, **options):
    "Sums over paths, their best or a random one"
    T, N, C, nz = size
    scores, start, end, idx = leaf(T, N, C, nz, dtype=dtype), leaf(N, C, dtype=dtype), leaf(N, C, dtype=dtype), torch.randint(-1, C, (C, nz), device=DEVICE)
    frames = lengths(T, N).to(DEVICE)
    return find(scores, idx, start, end, *args, lengths=frames, **options), [scores, start, end] if differentiable else []


def scanned(size: tuple, dtype: torch.dtype):
    "The sums over paths up to each frame, by the kernel that only this function launches"
    by_kernel = lambda scores, idx, start, end, lengths: scan_fwd_triton(scores.detach(), idx, start.detach())  # of all frames: nobody writes others
    return paths(by_kernel, size, dtype, differentiable=False)


def random_paths(size: tuple, dtype: torch.dtype):
    "Paths drawn by a generator of their own"
    return paths(fl.sample, size, dtype, torch.Generator(DEVICE).manual_seed(3), differentiable=False)


def ctc(loss: Callable, size: tuple, dtype: torch.dtype, on_logits: bool = False, flat: bool = False, on_host: bool = True, **options):
    "A loss, an alignment or posteriors of frames; an impossible sequence where three are there"
    T, N, C, L = size
    z, y, frames, long = leaf(T, N, C, dtype=dtype), labels(C, N, L), lengths(T, N), lengths(L, N)
    frames = torch.maximum(frames, 2 * long) if N < 3 else torch.cat([frames[:2], long[2:] - 1])
    frames, long = frames.clamp(max=T), long if on_host else long.to(DEVICE)
    y = torch.cat([row[:k] for row, k in zip(y, long.tolist(), strict=True)]) if flat else y
    return loss(z if on_logits else z.log_softmax(-1), y, frames if on_host else frames.to(DEVICE), long, **options), [z]


def linear_ctc(size: tuple, dtype: torch.dtype, bias: bool = True, on_host: bool = True, **options):
    "CTC of a linear layer"
    T, N, V, H, L = size
    x, w, b = leaf(T, N, H, dtype=dtype), leaf(V, H, dtype=dtype, std=2 * H**-0.5), leaf(V, dtype=dtype) if bias else None
    frames, long = lengths(T, N).clamp(min=min(2 * L, T)).to("cpu" if on_host else DEVICE), lengths(L, N).to("cpu" if on_host else DEVICE)
    return fl.linear_ctc_loss(x, w, labels(V, N, L), frames, long, linear_bias=b, **options), wanted(x, w, b)


def rewritten():
    "A traced gather, as a masked sum"
    z, y = leaf(7, 11), labels(11, 7)
    graph = fl.rewrite_gather(make_fx(lambda z, y: z.log_softmax(1).gather(1, y[:, None]))(z.detach(), y))
    return [graph.code, graph(z, y)], [z]


def on_one_rank(call: Callable):
    "A call with the mesh of one process"
    dist.init_process_group("nccl" if GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return call(mesh=dist.init_device_mesh(DEVICE, (1,)))
    finally:
        dist.destroy_process_group()


def of_values() -> Iterator[tuple[str, Call]]:
    "Losses of logits, and the single operations"
    for size, dtype, name, options in grid(LOGITS, OPTIONS):
        yield f"cross_entropy {size} {dtype} {name}", partial(of_logits, fl.cross_entropy, size, dtype, options)
        yield f"cross_entropy in place {size} {dtype} {name}", partial(of_logits, fl.cross_entropy, size, dtype, dict(options, inplace=True))
    for dtype, reduction in product(DTYPES, ("mean", "sum", "none")):
        options = dict(reduction=reduction, ignore_index=1)
        yield f"cross_entropy of images {dtype} {reduction}", partial(of_logits, fl.cross_entropy, (2, 13, 4, 3), dtype, options)
        yield f"iota_cross_entropy {dtype} {reduction}", partial(of_logits, fl.iota_cross_entropy, LOGITS[0], dtype, options)
        yield f"onehot_select {dtype} {reduction}", partial(of_logits, fl.onehot_select, LOGITS[0], dtype, {})
    yield "rewrite_gather", rewritten
    for n, budget, dtype in product((7, 8192), (None, 2**28), DTYPES):
        yield f"plan {n} {budget} {dtype}", lambda n=n, budget=budget, dtype=dtype: (str(fl.plan(n, 65536, 2048, dtype, machine="H200", memory_budget=budget)), [])


def of_linear_layers() -> Iterator[tuple[str, Call]]:
    "Every method of a linear layer's cross entropy, under every option"
    for method in ("auto", "eager", "tiles", "chunks", "recompute"):
        loss, at = partial(fl.linear_cross_entropy, method=method), f"linear_cross_entropy {method}"
        for size, dtype, name, options in grid(LINEAR, LINEAR_OPTIONS):
            yield f"{at} {size} {dtype} {name}", partial(linear, loss, size, dtype, options)
        for size, dtype in product(LINEAR, DTYPES):
            yield from ((f"{at} {size} {dtype} gradient of {needs}", partial(linear, loss, size, dtype, TOGETHER, needs)) for needs in ("x", "w", "none"))
            yield from ((f"{at} {size} {dtype} shift {k}", partial(in_sequences, size, dtype, shift=k, method=method)) for k in (1, 2))
            yield f"{at} {size} {dtype} filtered", partial(linear, loss, size, dtype, dict(filter_eps=0.02))
            yield f"{at} {size} {dtype} autocast", partial(linear, loss, size, dtype, {}, autocast=True)
    for size, dtype in product(LINEAR, DTYPES):
        at, cut = f"{size} {dtype}", dict(token_tile=5, class_tile=16)
        for name, options in {"": cut, "scale": dict(cut, scale=8.0, margin=0.2), "none": dict(cut, reduction="none", ignore_index=3)}.items():
            yield f"tiled_linear_cross_entropy {at} {name}", partial(linear, fl.tiled_linear_cross_entropy, size, dtype, options)
            yield f"baseline_linear_cross_entropy {at} {name}", partial(linear, fl.baseline_linear_cross_entropy, size, dtype, {k: v for k, v in options.items() if k not in cut})
        yield f"chunked_linear_cross_entropy {at}", partial(linear, fl.chunked_linear_cross_entropy, size, dtype, dict(TOGETHER, chunk_size=7, accumulate="float32"))
        yield f"chunked_linear_cross_entropy {at} buffer", partial(buffered, size, dtype)
        yield f"recompute_linear_cross_entropy {at}", partial(linear, fl.recompute_linear_cross_entropy, size, dtype, dict(TOGETHER, linear_bias=a_bias))
        yield f"recompute_linear_cross_entropy {at} filtered", partial(linear, fl.recompute_linear_cross_entropy, size, dtype, dict(filter_eps=0.02, linear_bias=a_bias))
        yield f"sharded_linear_cross_entropy {at}", partial(linear, fl.sharded_linear_cross_entropy, size, dtype, dict(TOGETHER, linear_bias=a_bias))
        yield from ((f"contrastive_loss {at} {reduction}", partial(contrast, size, dtype, reduction=reduction)) for reduction in ("mean", "none"))
        for kind, reduction in product(("forward_kl", "reverse_kl", "jsd"), ("mean", "none")):
            yield from ((f"linear_divergence {at} {kind} {reduction} {top}", partial(divergence, size, dtype, top, kind=kind, reduction=reduction)) for top in (0, 8))
        for each in (False, True):
            yield f"linear_log_probs {at} {each}", partial(of_targets, size, dtype, each)
            yield f"log_probs {at} {each}", partial(of_targets, size, dtype, each, True)
        yield f"linear_log_probs {at} batch_invariant", partial(of_targets, size, dtype, softcap=5.0, batch_invariant=True)
        yield f"sharded_linear_cross_entropy {at} stats", partial(linear, fl.sharded_linear_cross_entropy, size, dtype, dict(return_stats=True))
        yield f"sharded_linear_log_probs {at}", partial(of_targets, size, dtype, loss=fl.sharded_linear_log_probs)
        yield f"sharded_linear_divergence {at}", partial(divergence, size, dtype, loss=fl.sharded_linear_divergence, kind="jsd")


def of_modules() -> Iterator[tuple[str, Call]]:
    "The modules of linear layers"
    makers = {f"MemoryEfficientVocabOutput {reduction} {scale}": partial(vocabulary, reduction=reduction, scale=scale)
              for reduction, scale in product(("sum", "none"), (None, 8.0))}
    makers |= {f"{cls.__name__} {scale}": partial(baseline, cls, scale=scale) for cls, scale in product((fl.BaselineSoftmax, fl.BaselineSoftmaxNllLoss), (None, 8.0))}
    makers |= {f"LinearCrossEntropyLoss {method}": partial(linear_loss, method=method, bias=True, monitoring=True) for method in ("auto", "chunks", "recompute")}
    for (name, make), dtype in product(makers.items(), DTYPES):
        yield f"{name} {dtype}", partial(module, make, LINEAR[0], dtype)
        yield f"{name} {dtype} evaluated", partial(module, make, LINEAR[0], dtype, True)
    yield "MemoryEfficientVocabOutput.eval_forward", lambda: (vocabulary(9, 4, f32).to(DEVICE).eval_forward(leaf(3, 4)), [])


def of_heads() -> Iterator[tuple[str, Call]]:
    "Cosine heads, their samplers and their optimizers"
    for size, dtype, (name, make) in product(HEADS, DTYPES, MARGINS.items()):
        for method, reduction in (("auto", "mean"), ("auto", "none"), ("tiles", "sum"), ("recompute", "mean")):
            yield f"margin_cross_entropy {name} {size} {dtype} {method} {reduction}", partial(margin, make, size, dtype, method=method, reduction=reduction)
        yield f"margin_cross_entropy {name} {size} {dtype} cut", partial(margin, make, size, dtype, token_tile=4, class_tile=24)
    for cls, (size, dtype, name, options) in product((fl.PartialFC, fl.ShardedPartialFC), grid(HEADS, HEAD_OPTIONS)):
        yield f"{cls.__name__} {size} {dtype} {name}", partial(head, cls, size, dtype, options)
        if cls is fl.PartialFC or name in LARGER:
            yield f"{cls.__name__} {size} {dtype} {name} evaluated", partial(head, cls, size, dtype, options, True)
    for cls, (size, dtype, name, options) in product((fl.PartialFC, fl.ShardedPartialFC), grid(HEADS, {n: HEAD_OPTIONS[n] for n in ("", "Circle 1.0", "SubCenter 1.0")})):
        yield f"{cls.__name__} {size} {dtype} {name} scores", partial(scored, cls, size, dtype, options)
    yield from ((f"clip_grad_norm_ {norm_type} {dtype}", partial(clipped, norm_type, dtype)) for norm_type, dtype in product((1.0, 2.0, math.inf), (f32, f64)))
    yield from ((f"clip_grad_value_ {dtype}", partial(clipped_values, dtype)) for dtype in (f32, f64))
    yield from ((f"{name} {ranks} {kind}", partial(through_files, ranks, kind)) for name in ("load_insightface", "save_insightface")
                for ranks, kind in ((1, "weight"), (7, "checkpoint")))
    yield "ignore_in_ddp", lambda: ([len(fl.ignore_in_ddp(fl.PartialFC(9, 4))._ddp_params_and_buffers_to_ignore)], [])
    yield from ((f"NegativeSampler {rate}", partial(drawn, rate)) for rate in (0.1, 0.9, "positives"))
    yield from ((f"PopularitySampler {each_row} {dtype}", partial(popular, each_row, dtype)) for each_row, dtype in product((False, True), DTYPES))
    ways = {"SGD": dict(), "SGD momentum": dict(momentum=0.9, nesterov=True), "AdamW": dict(betas=(0.8, 0.9))}
    for (name, options), size, dtype, mode in product(ways.items(), HEADS, (f32, bf16), ("lazy", "dense")):
        optimizer, at = torch.optim.AdamW if name == "AdamW" else torch.optim.SGD, f"{name} {size} {dtype} {mode}"
        yield f"RowSparse {at}", partial(steps, optimizer, size, dtype, mode=mode, **options)
        yield f"RowSparse {at} resized", partial(steps, optimizer, size, dtype, True, mode=mode, **options)
        yield f"ShardedRowSparse {at}", partial(steps, optimizer, size, dtype, heads=fl.ShardedPartialFC, rows=fl.ShardedRowSparse, mode=mode, **options)


def of_one_rank() -> Iterator[tuple[str, Call]]:
    "What is sharded, over one process"
    for dtype, bias in product(DTYPES, (False, True)):
        options = dict(TOGETHER, linear_bias=a_bias, return_stats=True) if bias else {}
        yield f"sharded_linear_cross_entropy on a mesh {dtype} {bias}", partial(on_one_rank, lambda mesh, dtype=dtype, options=options: linear(
            partial(fl.sharded_linear_cross_entropy, mesh=mesh, num_classes=LINEAR[0][1]), LINEAR[0], dtype, options))
    for dtype, name in product(DTYPES, ("", "sampled", "conflict", "CosFace 1.0", "AdaFace 0.5")):
        yield f"ShardedPartialFC on a mesh {dtype} {name}", partial(on_one_rank, lambda mesh, dtype=dtype, name=name: head(
            partial(fl.ShardedPartialFC, mesh=mesh), HEADS[0], dtype, HEAD_OPTIONS[name]))


def of_paths() -> Iterator[tuple[str, Call]]:
    "Sums over paths, and CTC"
    for size, dtype in product(GRAPHS, (f32, f64)):
        at = f"{size} {dtype}"
        for (name, S), method in product(SEMIRINGS.items(), ("auto", "autograd", "loop", "scan", "fused")):
            if name != "KBest" or size[2] < 1024:
                yield f"logz {name} {method} {at}", partial(paths, fl.logz, size, dtype, S, method=method)
        if size[2] < 1024 and (GPU or TRITON):
            yield f"scan_fwd_triton {at}", partial(scanned, size, dtype)
        yield f"viterbi {at}", partial(paths, fl.viterbi, size, dtype, differentiable=False)
        yield f"sample {at}", partial(random_paths, size, dtype)
    for size, dtype in product(CTC, DTYPES):
        yield from ((f"{name} {size} {dtype}", call) for name, call in ctc_ways(size, dtype))
    for size, dtype, reduction, bias, on_host in product(LINEAR_CTC, DTYPES, ("mean", "sum", "none"), (True, False), (True, False)):
        options = dict(reduction=reduction, zero_infinity=reduction == "sum", memory_budget=None if bias else 2**20 if GPU else 2**12)
        yield f"linear_ctc_loss {size} {dtype} {reduction} {bias} {on_host}", partial(linear_ctc, size, dtype, bias, on_host, **options)


def ctc_ways(size: tuple, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    "What CTC offers, at one size"
    for reduction, on_host, infinite in product(("mean", "sum", "none"), (True, False), (True, False)):
        options, at = dict(on_host=on_host, reduction=reduction, zero_infinity=not infinite), f"{reduction} {on_host} {infinite}"
        yield f"ctc_loss {at}", partial(ctc, fl.ctc_loss, size, dtype, **options)
        yield f"ctc_loss exact {at}", partial(ctc, fl.ctc_loss, size, dtype, gradient="exact", **options)
        yield f"ctc_loss_with_logits {at}", partial(ctc, fl.ctc_loss_with_logits, size, dtype, True, **options)
    yield "ctc_loss flat", partial(ctc, fl.ctc_loss, size, dtype, flat=True)
    for logits in (True, False):
        yield f"CTCLoss {logits}", partial(ctc, fl.CTCLoss(logits=logits), size, dtype, logits)
    yield "forced_align", partial(ctc, fl.forced_align, size, dtype)
    yield "ctc_posteriors", partial(ctc, fl.ctc_posteriors, size, dtype)
    for beam in (1, 4):
        yield f"ctc_decode {beam}", partial(ctc, lambda z, y, frames, long, beam=beam: fl.ctc_decode(z, frames, beam=beam, k=beam), size, dtype)
    yield "ctc_sample", lambda: ctc(partial(ctc_sample, generator=torch.Generator(DEVICE).manual_seed(3)), size, dtype)


def all_calls() -> Calls:
    "Every call, by a name of its own"
    kinds = of_values, of_linear_layers, of_modules, of_heads, of_one_rank, of_paths
    return [pair for kind in kinds for pair in kind()]


def bits(value: Any) -> str:
    "Dtype, shape and sha256 of a tensor's bits, of both parts of a sparse one; other values as they print"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if hasattr(value, "full_tensor"):
        return f"distributed {bits(value.to_local())}"
    if value.is_sparse:
        return f"sparse {list(value.shape)} at {bits(value._indices())} {bits(value._values())}"
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(raw).hexdigest()}"


def gradients(found: list, leaves: list[torch.Tensor]) -> list:
    "Gradients of all outputs by all leaves, with numbers of their own coming in"
    outputs = [t for t in found if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs or not leaves:
        return []
    return list(torch.autograd.grad(outputs, leaves, [torch.randn_like(t) for t in outputs], allow_unused=True))


def outcome(name: str, call: Call) -> Lines:
    "The bits of a call's outputs and gradients, or the error that it raises"
    torch.manual_seed(zlib.crc32(name.encode()))
    try:
        result, leaves = call()
        found = tree_leaves(result)
        grads = gradients(found, leaves)
    except Exception as error:  # a call that a move has broken is a line that differs
        return {f"{name}: raises": f"{type(error).__name__}: {error}"}
    lines = {f"{name}: {type(result).__name__} {i}": bits(value) for i, value in enumerate(found)}
    return lines | {f"{name}: gradient {i}": bits(value) for i, value in enumerate(grads)}


def outcomes(calls: Calls) -> Lines:
    "The lines of all calls, each with the kernels that it launched"
    lines = {}
    with launches() as seen:
        for name, call in calls:
            seen.clear()
            lines |= outcome(name, call)
            if seen:
                lines[f"{name}: kernels"] = " ".join(sorted(seen))
    return lines


def failures(lines: Lines) -> list[str]:
    "The calls that raise what is no refusal"
    return [f"{name} · {words}" for name, words in lines.items() if name.endswith(": raises") and not words.startswith(REFUSALS)]


def by_kernels(calls: Calls) -> Lines:
    "The lines of those calls that Triton's interpreter makes, with kernels: in float32, and where weights are rounded to bfloat16"
    with forced_kernels():
        lines = outcomes((name, call) for name, call in calls if "bfloat16" not in name or name.startswith("RowSparse"))
    launched = {line.removesuffix(": kernels") for line in lines if line.endswith(": kernels")}
    return {f"by kernels: {line}": value for line, value in lines.items() if line.partition(": ")[0] in launched}


def unreached(lines: Lines) -> set[str]:
    "Kernels of the list in tools/kernels_once.py that no call launches"
    launched = {kernel for line, kernels in lines.items() if line.endswith(": kernels") for kernel in kernels.split()}
    return {kernel for kernels in LAUNCHES.values() for kernel in kernels.split()} - launched


def of_package(text: str) -> str:
    "`fusedloss.module.Name` as `Name`: definitions may move"
    return re.sub(r"\bfusedloss(?:\.\w+)*\.(\w+)", r"\1", text)


def described(value: Any) -> str:
    "A signature, its TypedDicts field by field, and the docstring, in one line; what is no function as it prints"
    if isinstance(value, property):
        return f"property · {value.__doc__}"
    if not callable(value):
        return of_package(repr(value))
    shape = inspect.signature(value)
    unpacked = [kind for p in shape.parameters.values() for kind in getattr(p.annotation, "__args__", ()) if is_typeddict(kind)]
    fields = "".join(f"; {name}: {kind}" for kind in unpacked for name, kind in inspect.get_annotations(kind).items())
    return of_package(f"{shape}{fields}") + f" · {' '.join(str(value.__doc__).split())}"


def members(cls: type) -> Iterator[tuple[str, Any]]:
    "Public methods and attributes that a class has from the package, its own or inherited"
    for name in dir(cls):
        home = next((base for base in cls.__mro__ if name in vars(base)), object)
        if home.__module__.startswith(fl.__name__) and (not name.startswith("_") or name in ("__init__", "__call__")):
            yield name, getattr(cls, name)


def public() -> Iterator[tuple[str, Any]]:
    "Every public name, margins and semirings among them"
    yield from ((name, getattr(fl, name)) for name in fl.__all__ if not inspect.ismodule(getattr(fl, name)))
    for module, base in ((fl.margins, fl.margins.Margin), (fl.semirings, fl.semirings.Semiring)):
        yield from ((name, value) for name, value in vars(module).items()
                   if not name.startswith("_") and (isinstance(value, base) or inspect.isclass(value) and issubclass(value, base)))


def interface() -> Lines:
    "Schemas of the operators; signatures and docstrings of what is public"
    lines = {f"schema {s.name}": str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("fusedloss::")}
    for name, value in public():
        parts = members(value) if inspect.isclass(value) else ()
        lines |= {f"public {name}": described(value)} | {f"public {name}.{part}": described(of) for part, of in parts}
    return lines


def version(package: str) -> str:
    "Of a package that is installed; empty if it is not"
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def machine() -> str:
    "What bits may depend on, the code aside"
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    processor = torch.cuda.get_device_name() if GPU else f"{models[0] if models else platform.processor()} {torch.backends.cpu.get_cpu_capability()}"
    kernels = f"CUDA {torch.version.cuda}" if GPU else f"TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET', '')}"
    cupy = next(filter(None, map(version, ("cupy-cuda12x", "cupy-cuda13x", "cupy"))), "none")
    return f"{processor}, {kernels}, Python {platform.python_version()}, torch {torch.__version__}, triton {version('triton') or 'none'}, CuPy {cupy}"


def take(calls: Calls) -> dict:
    "The snapshot of the code as it is"
    torch.set_num_threads(1)  # sums are cut by the number of threads
    lines = interface() | outcomes(calls)
    if TRITON and not GPU:
        lines |= by_kernels(calls)
    print("kernels that no call launches here:", ", ".join(sorted(unreached(lines))) or "none", file=sys.stderr)
    return {"machine": machine(), "lines": lines}


def differences(before: Lines, after: Lines) -> list[str]:
    "A line for each thing that is missing, new or not the same"
    return [f"{name} · expected {before.get(name, 'nothing')} · got {after.get(name, 'nothing')}"
            for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]


def main(argv: list[str], calls: Calls) -> int | str:
    "Write a snapshot, and print the calls that fail, or how the code differs from one; 0 if there is nothing to print"
    if len(argv) != 2 or argv[0] not in ("take", "compare"):
        return __doc__
    path = Path(argv[1])
    if argv[0] == "take":
        taken = take(calls)
        path.write_text(json.dumps(taken, sort_keys=True, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        found = failures(taken["lines"])
        print("\n".join(found) if found else f"{len(taken['lines'])} lines in {path}")
        return int(bool(found))
    before = json.loads(path.read_text(encoding="utf-8"))
    if before["machine"] != machine():
        return f"bits of two machines are not compared: expected one like that of {path}, {before['machine']}, got {machine()}"
    found = differences(before["lines"], take(calls)["lines"])
    print("\n".join(found) if found else f"{len(before['lines'])} lines, all the same")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], all_calls()))
