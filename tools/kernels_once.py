"""Every kernel once, on small tensors: what `make sanitize` gives compute-sanitizer to watch. Names of parts choose among them.

`--lines` compiles the sources of `cuda/` with the numbers of their lines, for the reports."""
import sys
from contextlib import contextmanager
from inspect import isfunction
from itertools import product
from types import ModuleType
from typing import Iterator

import torch

import fusedloss as fl
from fusedloss import fp8 as stage_34, kernels, lattices as stage_32, product as stage_9, sharded_product as stage_28
from fusedloss.core import column_sums, cuda, score_product
from fusedloss.core.options import LossOptions
from fusedloss.core.ranks import Shards
from fusedloss.scans import scan_fwd_triton
from fusedloss.semirings import Log, Max

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
f32 = torch.float32
HALF = torch.bfloat16 if DEVICE == "cuda" else f32  # the interpreter has no bf16


def leaf(*size: int, dtype: torch.dtype = f32) -> torch.Tensor:
    "Normal numbers that want a gradient"
    return torch.randn(*size, device=DEVICE).to(dtype).requires_grad_()


def labels(top: int, *size: int) -> torch.Tensor:
    "Labels from 1 to `top` - 1"
    return torch.randint(1, top, size, device=DEVICE)


def cross_entropy() -> None:
    "Stage 4: Triton, and rows that a cluster holds"
    rows = [(5, 300, False), (9, 1003 if DEVICE == "cuda" else 103, True)] + [(140, 5003, True), (17, 128256, False)] * (DEVICE == "cuda")
    for n, v, inplace in rows:
        fl.cross_entropy(leaf(n, v, dtype=HALF) * 1, labels(v, n), label_smoothing=0.1, inplace=inplace).backward()


def linear_cross_entropy() -> None:
    "Stages 6, 7 and 11, with tokens that are ignored"
    sizes = ((33, 515, 64), (70, 1003, 96)) if DEVICE == "cuda" else ((17, 70, 32),)
    for (n, v, h), (method, eps) in product(sizes, (("chunks", None), ("recompute", None), ("recompute", 1e-4), ("eager", None))):
        x, w, y = leaf(n, h, dtype=HALF), leaf(v, h, dtype=HALF), labels(v, n)
        y[::3] = -100
        fl.linear_cross_entropy(x, w, y, method=method, filter_eps=eps).backward()


def exponentials() -> None:
    "Stage 9: on Hopper its method, and recompute and entropies by its kernels; elsewhere those of Triton alone"
    if DEVICE == "cuda":
        for n, v, h in ((33, 515, 64), (300, 5003, 200)):
            x, w = leaf(n, h, dtype=torch.bfloat16), leaf(v, h, dtype=torch.bfloat16)
            w.data[5] *= 300  # far from what offsets are made of
            for method in ("product", "recompute"):
                fl.linear_cross_entropy(x, w, labels(v, n), method=method).backward()
            for how in (dict(softcap=30.0), dict(label_smoothing=0.1)):
                fl.linear_cross_entropy(x, w, labels(v, n), linear_bias=leaf(v, dtype=torch.bfloat16), method="product", **how).backward()
            found = fl.linear_log_probs(x, w, labels(v, n), entropy=True)
            (found.log_probs + found.entropy).sum().backward()
        return
    (x, w), y, o = (torch.randn(size, 16) for size in (9, 70)), labels(70, 9), LossOptions()
    k = stage_9.work_of(x, w, y, None, None, None, o, 9, None, None)
    stage_9.reference_exponentials(k.room, x, w, y, k.offsets, k.log2_scale)
    rows = stage_9.Rows(*torch.empty(4, 9), torch.ones((), dtype=torch.int32))
    stage_9.launch_rows(rows, k.room, *k.labels)
    stage_9.launch_better_offsets(k, torch.zeros(1, 9, 2), rows.failed)
    stage_9.launch_scaled(x, x, rows.coefs, rows.at_target, y, w, rows.coefs, w[0])
    stage_9.launch_targets(w, x, y, rows.at_target)
    stage_9.launch_offsets(torch.zeros(9, 70), y, o)
    column_sums.launch_column_sums(x, rows.coefs)
    score_product.merge_statistics(torch.zeros(7, 9), torch.zeros(1, 9, 2), torch.zeros(1, 9), y, 70, 1.0)
    score_product.put_targets(torch.zeros(9, 70), torch.zeros(6, 9), torch.zeros(9), y, 1.0, True)


def several_classes() -> None:
    "Stage 12: log-probabilities of several classes a row, some of them ignored, others twice"
    for n, v, h, k in ((33, 515, 64, 3), (300, 5003, 200, 11)) if DEVICE == "cuda" else ((9, 70, 16, 3),):
        x, w, b, y = leaf(n, h, dtype=HALF), leaf(v, h, dtype=HALF), leaf(v, dtype=HALF), labels(v, n, k)
        y[::4], y[1, 0], y[2] = -100, -100, y[3]
        fl.linear_log_probs(x, w, y, linear_bias=b).log_probs.sum().backward()


def product_over_ranks() -> None:
    "Stage 28: on Hopper its method, on one rank; elsewhere those kernels of Triton that no other stage has"
    if DEVICE == "cuda":
        x, w = leaf(300, 200, dtype=torch.bfloat16), leaf(5003, 200, dtype=torch.bfloat16)
        fl.sharded_linear_cross_entropy(x, w, labels(5003, 300), method="product").backward()
        return
    (x, w), y = (torch.randn(size, 16) for size in (9, 70)), labels(70, 9)
    t = stage_28.Tokens(x, y, stage_28.labels_here(y, Shards(70, 0, 70), -100), None, None, None, LossOptions(), 70)
    k = stage_28.rooms_of(t, w, 9, None)[0].of(slice(0, 9), None)
    stage_9.reference_exponentials(k.room, x, w, y, k.offsets, k.log2_scale)
    numbers = torch.empty(3, 9)
    stage_28.launch_numbers(numbers, torch.zeros((), dtype=torch.int32), k)
    stage_28.launch_merge(stage_28.Merged(*torch.empty(3, 9)), numbers[None], 0, t)


def pairs() -> None:
    "Two rows side by side: a student and its teacher, by heads and by lists; logits and probabilities; logits and several labels"
    n, v, h, t_h = (33, 5003, 64, 96) if DEVICE == "cuda" else (9, 70, 16, 24)
    for kind, reduction in (("forward_kl", "mean"), ("reverse_kl", "none"), ("jsd", "sum")):
        x, w, t_x, t_w = leaf(n, h, dtype=HALF), leaf(v, h, dtype=HALF), leaf(n, t_h, dtype=HALF), leaf(v, t_h, dtype=HALF)
        weight, each = (torch.arange(n, device=DEVICE) > 2).float(), torch.linspace(0.5, 2, n, device=DEVICE)
        fl.linear_divergence(x, w, t_x, t_w, kind=kind, softcap=8.0, token_weight=weight, reduction=reduction).sum().backward()
        fl.sharded_linear_divergence(x, w, t_x, t_w, kind=kind, softcap=8.0, token_weight=weight, reduction=reduction).sum().backward()
        fl.linear_divergence(x, w, t_x, t_w[:-3], kind=kind, temperature=each, n_classes=v - 5, reduction=reduction).sum().backward()
        fl.sharded_linear_divergence(x, w, t_x, t_w, kind=kind, temperature=each, reduction=reduction).sum().backward()
        at = torch.rand(n, v, device=DEVICE).argsort(1)[:, :7]
        at[::2, 1:4] = -1  # lists that end early
        fl.linear_divergence(x, w, teacher_top=(at, torch.full(at.shape, -3.0, device=DEVICE)), kind=kind, temperature=each, reduction=reduction).sum().backward()
    share = torch.rand(n, v, device=DEVICE)
    fl.linear_cross_entropy(x, w, share, label_smoothing=0.1).backward()
    fl.cross_entropy(leaf(n, v, dtype=HALF), share, weight=torch.rand(v, device=DEVICE), reduction="none").sum().backward()
    several = torch.stack([labels(v, n), labels(v, n).flip(0), torch.full((n,), -100, device=DEVICE)], 1)
    for method in ("eager", "chunks"):
        fl.linear_cross_entropy(x, w, several, label_smoothing=0.1, method=method, weight=torch.rand(v, device=DEVICE)).backward()


def contrast() -> None:
    "Stage 26: gradients of three blocks a side, the last not full"
    for n, h in ((300, 64), (33, 67)) if DEVICE == "cuda" else ((9, 16),):
        scale = torch.tensor(5.0, device=DEVICE, requires_grad=True)
        fl.contrastive_loss(leaf(n, h, dtype=HALF), leaf(n, h, dtype=HALF), scale, memory_budget=2**19).backward()
        named = labels(n + 5, n, 3)
        fl.contrastive_loss(leaf(n, h, dtype=HALF), leaf(n + 5, h, dtype=HALF), scale, positives=named, memory_budget=2**19).backward()
        fl.sigmoid_contrastive_loss(leaf(n, h, dtype=HALF), leaf(n + 5, h, dtype=HALF), scale, -3.0, positives=named, memory_budget=2**19).backward()
        fl.sigmoid_contrastive_loss(leaf(n, h, dtype=HALF), leaf(n, h, dtype=HALF), scale, -3.0, memory_budget=2**19).backward()
        fl.contrastive_loss(leaf(n, h, dtype=HALF), leaf(n + 5, h, dtype=HALF), scale, positives=named[:, 0], memory_budget=2**19).backward()


def topk() -> None:
    "Stage 29: the best tiles, their scores, the best of these; and gradients of listed classes"
    for n, v, h in ((70, 1003, 96), (33, 5003, 64)) if DEVICE == "cuda" else ((9, 70, 16),):
        for temperature in (0.7, torch.linspace(0.5, 2, n, device=DEVICE)):
            fl.linear_topk(leaf(n, h, dtype=HALF), leaf(v, h, dtype=HALF), 7, softcap=8.0, temperature=temperature).log_probs.sum().backward()
        fl.linear_topk(leaf(n, h, dtype=HALF), leaf(v, h, dtype=HALF), 7)  # by the hand-written product, where there is one


def partial_fc() -> None:
    "Stage 14: rows by index, one of them ignored, and the optimizer's"
    for v, n, h, rate in ((3000, 77, 64, 0.1), (777, 33, 64, 0.5)) if DEVICE == "cuda" else ((300, 9, 16, 0.2),):
        head = fl.PartialFC(v, h, sample_rate=rate, device=DEVICE)
        optimizer = fl.RowSparse(torch.optim.AdamW if rate < 0.5 else torch.optim.SGD, head.parameters(), lr=0.1)
        y = labels(v, n)
        y[0] = head.ignore_index
        head(leaf(n, h, dtype=HALF), y).backward()
        optimizer.step()


def logz() -> None:
    "Stage 19: both semirings, with edges that are missing; every rung"
    for T, N, C, nz in ((6, 3, 4, 2), (20, 2, 33, 3), (6, 2, 1024, 5))[:3 if DEVICE == "cuda" else 1]:
        idx, frames = torch.randint(-1, C, (C, nz), device=DEVICE), labels(T + 1, N)
        scores, start, end = leaf(T, N, C, nz), leaf(N, C), leaf(N, C)
        for S in (Log, Max):
            for method in ("auto", "scan") if DEVICE == "cuda" else ("auto",):
                fl.logz(scores, idx, start, end, S, lengths=frames, method=method).sum().backward()
        fl.viterbi(scores.detach(), idx, start.detach(), end.detach(), lengths=frames)
        if C < 1024: scan_fwd_triton(scores.detach(), idx, start.detach(), frames)


def ctc() -> None:
    "Stage 20: a warp, several, and clusters; a label that is none, on a GPU"
    for T, N, C, L, dtype in ((9, 3, 5, 2, f32), (70, 2, 40, 33, HALF), (140, 2, 33, 130, f32), (620, 1, 30, 300, f32))[:4 if DEVICE == "cuda" else 2]:
        z, y, frames, lengths = leaf(T, N, C, dtype=dtype), labels(C, N, L), torch.full((N,), T), labels(L + 1, N).cpu()
        if DEVICE == "cuda": y[0, 0] = C + 7
        fl.ctc_loss_with_logits(z, y, frames, lengths).backward()
        fl.ctc_loss(z.float().log_softmax(-1), y, frames, lengths, reduction="none").sum().backward()


def linear_ctc() -> None:
    "Stage 22: padded frames left out, or unknown to the host; rows that shared memory holds, and one that it does not"
    sizes = ((40, 2, 300, 64, 12, "mean"), (70, 3, 515, 96, 40, "none"), (18, 2, 40000, 64, 7, "sum")) if DEVICE == "cuda" else ((9, 2, 70, 16, 3, "mean"),)
    for T, N, V, H, L, reduction in sizes:
        x, w, b, y = leaf(T, N, H, dtype=HALF), leaf(V, H, dtype=HALF), leaf(V, dtype=HALF), labels(V, N, L)
        for place in ("cpu", DEVICE):
            frames, lengths = torch.arange(T - N + 1, T + 1).to(place), torch.full((N,), L).to(place)
            fl.linear_ctc_loss(x, w, y, frames, lengths, linear_bias=b, reduction=reduction).sum().backward()


def linear_transducer() -> None:
    "Stage 33: lengths that the host knows and lengths that it does not, chunks of few nodes; durations"
    for N, T, U, J, V, dtype in ((3, 20, 7, 640, 300, HALF), (2, 9, 5, 33, 67, f32)) if DEVICE == "cuda" else ((2, 3, 2, 8, 9, HALF),):
        e, p, w, y = leaf(N, T, J, dtype=dtype), leaf(N, U + 1, J, dtype=dtype), leaf(V, J, dtype=dtype), labels(V - 4, N, U) + 1
        for place, activation, durations in (("cpu", "tanh", None), (DEVICE, "relu", [0, 1, 2])):
            frames, lengths = torch.arange(T - N + 1, T + 1).to(place), torch.full((N,), U).to(place)
            fl.linear_transducer_loss(e, p, w, y, frames, lengths, linear_bias=w[:, 0], activation=activation, durations=durations, memory_budget=2**16).backward()


def samples() -> None:
    "Stage 30: samples from all classes, and from those that filters keep"
    x, w = leaf(5, 64, dtype=HALF), leaf(515 if DEVICE == "cuda" else 70, 64, dtype=HALF)
    for filters in ({}, dict(top_k=3, top_p=0.9, min_p=0.01)):
        fl.linear_sample(x, w, linear_bias=w[:, 0], **filters)
        fl.sharded_linear_sample(x, w, linear_bias=w[:, 0], **filters)


def backward_in_fp8() -> None:
    "Stage 34, in one group of tokens and in several, and in slabs of classes"
    for n, v, cut in ((33, 515, (33, 16, 515)), (70, 300, (32, 32, 128))):
        x, w, y = leaf(n, 64, dtype=HALF), leaf(v, 64, dtype=HALF), labels(v, n)
        y[::3] = -100
        for how in ({}, dict(forward_dtype=torch.float8_e4m3fn)) if DEVICE == "cuda" else ():
            fl.linear_cross_entropy(x, w, y, linear_bias=leaf(v, dtype=HALF), matmul_dtype=torch.float8_e4m3fn, **how).backward()
        sizes = stage_34.Sizes(n, 64, v, True, True, x.element_size(), x.element_size() * v)
        grads = stage_34.Gradients(x, w, (True, True, False), HALF, False, 1.0)
        by = stage_34.KERNELS8 if DEVICE == "cuda" else stage_34.KERNELS8._replace(round=stage_34.reference_rounded)  # Triton's alone
        stage_34.run_groups(x.detach(), w.detach(), y, None, None, None, LossOptions(), stage_34.Cut(*cut), sizes, grads, by=by)


def transducers() -> None:
    "Stage 32: logits in two layouts, the lattice, its gradient; a label that is none, on a GPU"
    for N, T, U, V, dtype in ((3, 9, 4, 40, HALF), (2, 70, 150, 515, f32))[:2 if DEVICE == "cuda" else 1]:
        z, y, frames, lengths = leaf(N, T, U + 1, V, dtype=dtype), labels(V, N, U), torch.arange(T - N + 1, T + 1), torch.arange(N).clamp(max=U)
        if DEVICE == "cuda": y[0, 0] = V + 7
        fl.transducer_loss(z, y, frames, lengths, blank=0, clamp=0.5).backward()
        fl.transducer_loss(z.float().log_softmax(-1), y, frames, lengths, blank=0, reduction="none", fused_log_softmax=False).sum().backward()
        lengths = torch.tensor([0, T * (U + 1)]), torch.tensor([T]), torch.tensor([U])
        stage_32.launch_lattice([torch.randn(T * (U + 1), device=DEVICE) for _ in range(5)], stage_32.Grids(*(t.to(DEVICE) for t in lengths), T, U), False)


LAUNCHES = {  # every kernel, by the part that launches it on a GPU with clusters
    cross_entropy: "scan_kernel finish_kernel bwd_kernel turnaround_kernel scale_kernel label_weights turnaround scale_rows",
    linear_cross_entropy: "target_kernel lse_kernel merge_kernel terms_kernel dz_kernel flag_kernel spend_kernel zero_rows",
    exponentials: "column_sums_kernel score_statistics score_moments exponentials score_gradients entropy_gradients offsets_kernel rows_kernel better_offsets_kernel scaled_kernel targets_kernel merge_statistics_kernel put_targets_kernel",
    several_classes: "class_scores_kernel",
    product_over_ranks: "rank_numbers_kernel merge_ranks_kernel",
    pairs: "divergence_kernel pair_numbers_kernel pair_mixture_kernel pair_gradient_kernel soft_kernel labels_kernel",
    topk: "score_maxima select_kernel blocks_kernel listed_scores_kernel listed_kernel",
    contrast: "contrast_fwd_kernel add_sums_kernel pair_loss_kernel upstream_kernel contrast_bwd_kernel positive_scores_kernel positive_losses_kernel shares_kernel column_terms_kernel "
              "sigmoid_fwd_kernel add_losses_kernel sigmoid_bwd_kernel",
    partial_fc: "draw_kernel columns_kernel unit_kernel tangent_kernel negatives_lse_kernel merge_lse_kernel cosine_dz_kernel count_kernel update_kernel",
    backward_in_fp8: "round_fp8 entries_kernel row_sums_kernel class_sums_kernel row_factors_kernel divided_kernel",
    logz: "sparse_scan sparse_logz scan_fwd_kernel",
    ctc: "ctc_scan ctc_grad ctc_loss ctc_scale",
    samples: "sample_kernel pick_kernel threshold_kernel draw_kept_kernel",
    transducers: "node_scores_kernel transducer_lattice lattice_kernel node_grad_kernel",
    linear_transducer: "join_kernel sums_kernel duration_lattice_kernel",
    linear_ctc: "ctc_segment ctc_targets ctc_kept ctc_finish tile_softmax_kernel",
}
PARTS = tuple(LAUNCHES)
HANDLES: dict[int, str] = {}  # names of kernels compiled while launches were watched, by what the driver knows them by


def package_modules() -> list[ModuleType]:
    "The modules of the package that are imported"
    return [module for name, module in sys.modules.items() if name.partition(".")[0] == fl.__name__]


@contextmanager
def launches() -> Iterator[set[str]]:
    "The names of the kernels that are launched meanwhile, by Triton and by the loader of `cuda/`"
    seen, triton_kernel = set(), type(kernels.scan_kernel)
    run, compilers = triton_kernel.run, dict(cuda.COMPILERS)

    def seen_run(self, *args, **options):
        seen.add(self.fn.__name__)
        return run(self, *args, **options)

    def noted(compiled):
        class Noted(compiled):
            def __init__(self, source, name, *given):
                super().__init__(source, name, *given)
                self.name = name

            def __call__(self, *args, **more):
                seen.add(self.name)
                super().__call__(*args, **more)

            def handle(self, *given):
                handle = super().handle(*given)
                HANDLES[handle] = self.name
                return handle
        return Noted

    def seen_bound(self, *addresses):
        seen.add(self.kernel.name)
        return call_bound(self, *addresses)

    def seen_ask(function, *args):
        if function == "cuLaunchKernel" and args[0].value in HANDLES:
            seen.add(HANDLES[args[0].value])
        return ask_driver(function, *args)

    ask_driver, asking = cuda.ask_driver, [module for module in package_modules() if getattr(module, "ask_driver", None) is cuda.ask_driver]
    for module in asking:
        module.ask_driver = seen_ask
    call_bound, cuda.Bound.__call__ = cuda.Bound.__call__, seen_bound
    triton_kernel.run = seen_run
    cuda.COMPILERS.update({name: noted(compiled) for name, compiled in compilers.items()})
    try:
        yield seen
    finally:
        triton_kernel.run, cuda.Bound.__call__ = run, call_bound
        for module in asking:
            module.ask_driver = ask_driver
        cuda.COMPILERS.update(compilers)


@contextmanager
def forced_kernels() -> Iterator[None]:
    "On a CPU, for Triton's interpreter: meanwhile the package's modules are told that they have kernels"
    takes = lambda t, *given: t.dtype not in (torch.float64, torch.bfloat16) and t.numel() > 0
    told = {"has_kernel": takes, "takes_kernel": takes, "fits_kernels": lambda x, o: takes(x) and o.centers == 1 and o.circle_margin < 0, "row_cluster": lambda *given: None}
    known = [(module, held, value) for module in package_modules() for held, value in vars(module).items() if isfunction(value) and value.__name__ in told]
    for module, held, value in known:
        setattr(module, held, told[value.__name__])
    try:
        yield
    finally:
        for module, held, value in known:
            setattr(module, held, value)


def missing(part, seen: set[str]) -> set[str]:
    "Kernels of a part that were not launched"
    return set(LAUNCHES[part].split()) - seen


def main(chosen: list[str]) -> int:
    "Run them one after another; on a GPU the number of kernels that should have been launched and were not"
    torch.manual_seed(0)
    if "--lines" in chosen:
        cuda.OPTIONS += ("--generate-line-info",)
    chosen, absent = [name for name in chosen if name != "--lines"], 0
    with launches() as seen:
        for part in PARTS:
            if chosen and part.__name__ not in chosen:
                continue
            seen.clear()
            part()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
                absent += len(missing(part, seen))
            print(f"{part.__name__}: {part.__doc__}; launched: {' '.join(sorted(seen)) or 'nothing'}", flush=True)
    return absent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) and "kernels of the list were not launched")
