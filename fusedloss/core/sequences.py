"""What the losses over paths share: the states of a label sequence, its targets and lengths in one form, and how its lattice lies in registers."""

import os
from itertools import groupby
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedloss.core.checks import as_integers, expect, expect_tensor
from fusedloss.core.operators import observed


def sum_per_class(
    gammas: Tensor,  # [T,N,S]
    states: Tensor,  # [N,S]
    C: int,
) -> Tensor:  # [T,N,C]
    "Sums over the states that emit a class, always in the same order."
    n = torch.arange(len(states), device=states.device)[:, None]
    key, order = (states + C * n).flatten().sort(stable=True)
    ends = torch.arange(len(states) * C + 1, device=states.device)
    rows = gammas.flatten(1)[:, order].T.contiguous()
    sums = torch.segment_reduce(rows, "sum", offsets=torch.searchsorted(key, ends), initial=0, unsafe=True)
    return sums.view(len(states), C, len(gammas)).permute(2, 0, 1)


def softmax_and_lse(
    x: Tensor,  # [...,C]
) -> tuple[Tensor, Tensor]:  # [...,C], [...] float64
    "The log-sum-exp by its maximum and that one's probability: large logits keep their digits."
    top, p = x.amax(-1), x.softmax(-1)
    return p, torch.where(top == -torch.inf, top.double(), top.double() - p.amax(-1).log())


class Targets(NamedTuple):
    "Targets and lengths in one form, on the device of the scores."

    y: Tensor  # [N,W] int64
    frames: Tensor  # [N] int64, of the scores
    lengths: Tensor  # [N] int64, of the targets
    width: int  # no feasible target is longer
    longest: int  # no legal one is


def transposed_hint(
    given: int,  # sequences that another argument has
    z: Tensor,  # scores
) -> str:
    "What to add to an error where scores seem to be [N,T,C]."
    swapped = z.dim() == 3 and given == z.shape[0] != z.shape[1]
    return "; are the scores [N, T, ...]? transpose(0, 1) makes them [T, N, ...]" if swapped else ""


def check_integers(lengths: Tensor, name: str, z: Tensor):
    "`ValueError` unless these are N integers on a device that can be read; z is [T,N,...]."
    n = z.shape[1]
    kind = lengths.dtype
    whole = not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
    if not (lengths.shape == (n,) and (whole or n == 0)):  # a compiler takes sizes in a text for fixed
        got = f"{lengths.dtype} {list(lengths.shape)}{transposed_hint(lengths.numel(), z)}"
        raise ValueError(f"{name}: expected {n} integers, got {got}")
    expect(not lengths.is_meta or z.is_meta, name, lambda: f"integers on {z.device} or a CPU", "meta")


def as_lengths(
    lengths,  # a tensor, a tuple, a list or a number
    name: str,
    z: Tensor,  # [T,N,C] scores
) -> Tensor:  # [N] int64, wherever it was
    "`ValueError` unless these are N integers."
    lengths = as_integers(name, lengths)
    if lengths.dim() == 0:
        lengths = lengths[None]
    check_integers(lengths, name, z)
    return lengths.long().contiguous()  # kernels read one after the other


def full_lengths(length: int, z: Tensor) -> Tensor:  # [N] int64, on the host
    "The same length for each sequence of z."
    return torch.full((z.shape[1],), length, device="cpu")


def both_lengths(
    input_lengths,  # as `as_lengths` takes them
    target_lengths,  # None: all frames, all labels that are no padding
    z: Tensor,  # [T,N,C]
    targets: Tensor,  # [N,L] or [sum of target_lengths]
) -> tuple[Tensor, Tensor]:  # frames and labels of each sequence, [N] int64
    "The lengths of a loss, under the names that its caller knows."
    if input_lengths is None:
        input_lengths = full_lengths(z.shape[0], z)
    if target_lengths is None:
        expect(
            targets.dim() == 2,
            "target_lengths",
            "the length of each target, as targets is not [N, L] but one row",
            None,
        )
        target_lengths = (targets >= 0).sum(1)  # a negative label before others is within: an error
    return as_lengths(input_lengths, "input_lengths", z), as_lengths(target_lengths, "target_lengths", z)


graph_sources = []  # of the copies that a CUDA graph repeats: they live as long as any graph


def pinned(t: Tensor) -> Tensor:
    "A copy that a GPU can read, and that nobody else writes to."
    return torch.empty_like(t, pin_memory=True).copy_(t)


def to_device(t: Tensor, device) -> Tensor:
    "A copy on the device, without waiting for it; in a CUDA graph a constant."
    if t.device == device:
        return t
    if t.device.type == "cpu" and device.type == "cuda" and not observed():
        t = pinned(t)
        if torch.cuda.is_current_stream_capturing():
            graph_sources.append(t)
    return t.to(device, non_blocking=True)


def readable_on_host(t: Tensor) -> bool:
    "Whether looking at it costs nothing, or is asked for."
    return t.is_cpu or os.environ.get("FUSEDLOSS_DEBUG") == "1"


def check_lengths(lengths: Tensor, name: str, most: int):
    "`ValueError` with the index of the first length that is none."
    values = lengths.tolist()
    if not values or 0 <= min(values) and max(values) <= most:
        return
    i = next(i for i, value in enumerate(values) if not 0 <= value <= most)
    raise ValueError(f"{name}[{i}] is {values[i]}: expected 0 ≤ length ≤ {most}")


def check_sequence_labels(y: Tensor, lengths: Tensor, C: int):
    "`IndexError` with the sequence of the first label outside of the alphabet."
    inside = torch.arange(y.shape[1], device=y.device) < lengths[:, None]
    for n, k in (((y < 0) | (y >= C)) & inside).nonzero().tolist()[:1]:
        raise IndexError(f"targets: label {k} of sequence {n} is {y[n, k].item()}: expected 0 ≤ label < {C}")


def pad_targets(
    # [sum], [N], on one device
    targets: Tensor,
    lengths: Tensor,
    width: int,
) -> Tensor:  # [N,width]
    "Rows of targets that stand one after another."
    first = lengths.clamp(min=0).cumsum(0) - lengths
    at = first[:, None] + torch.arange(width, device=targets.device)
    last = max(len(targets) - 1, 0)
    return F.pad(targets, (0, 1))[at.clamp(0, last)]


def prepare_targets(
    z: Tensor,  # [T,N,C]
    targets: Tensor,  # [N,L] or [sum of lengths]
    frames: Tensor,  # [N]
    lengths: Tensor,  # [N]
) -> Targets:
    "One form for all; raises for what can be seen to be wrong."
    (T, _, C), longest = z.shape, targets.shape[-1]
    width = min(T, longest)
    if readable_on_host(frames):
        check_lengths(frames, "input_lengths", T)
    if readable_on_host(lengths):
        check_lengths(lengths, "target_lengths", longest)
        expect(
            targets.dim() == 2 or lengths.sum() == longest,
            "targets",
            f"{lengths.sum()} labels, the sum of target_lengths",
            longest,
        )
        width = min(width, max(lengths.tolist(), default=0))
    device = z.device
    if frames.is_cpu and lengths.is_cpu:  # one copy for both
        frames, lengths = to_device(torch.stack([frames, lengths]), device)
    y, frames, lengths = to_device(targets.long(), device), to_device(frames, device), to_device(lengths, device)
    if y.dim() == 1:  # a row that would end behind the last label has no length
        lengths = lengths.masked_fill(lengths.cumsum(0) > longest, -1)
        y = pad_targets(y, lengths, width)
    if readable_on_host(y):
        check_sequence_labels(y, lengths, C)
    return Targets(y.contiguous(), frames, lengths, width, longest)


def clamped_targets(
    p: Targets,
    T: int,
    C: int,
    blank: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # y [N,width], frames, lengths; [N] what is bad
    "Labels and lengths that can be computed with, also where they mean nothing."
    k, y = torch.arange(p.y.shape[1], device=p.y.device), p.y
    outside = ((y < 0) | (y >= C)) & (k < p.lengths[:, None])
    bad = (p.frames < 0) | (p.frames > T) | (p.lengths < 0) | (p.lengths > p.longest)
    bad = bad | outside.any(1)
    y = torch.where((k < p.lengths[:, None]) & ~outside, y, blank)[:, : p.width]
    return y, p.frames.clamp(0, T), p.lengths.clamp(min=0), bad


def inv_denominators(lengths: Tensor, mean: bool, dtype) -> Tensor:
    "How much each sequence counts in the loss [N]."
    if not mean:
        return torch.ones_like(lengths, dtype=dtype)
    return (lengths.clamp(min=1) * lengths.shape[0]).to(dtype).reciprocal()


def check_scores(z: Tensor, blank: int, name: str):
    "`ValueError` unless these are scores [T,N,C] of classes with a blank."
    expect(
        z.dim() == 3 and z.is_floating_point(), name, "floating point [T, N, C] or [T, C]", f"{z.dtype} {list(z.shape)}"
    )
    if not (type(blank) is int and 0 <= blank < z.shape[2]):
        raise ValueError(f"blank: expected a class below {z.shape[2]}, got {blank}")


def check_ctc(z: Tensor, targets: Tensor, blank: int, reduction: str, name: str):
    "`ValueError` for shapes, dtypes and options that cannot be meant."
    check_scores(z, blank, name)
    whole = targets.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    expect(whole, "targets", "integers", targets.dtype)
    padded_shape = targets.dim() == 2 and targets.shape[0] == z.shape[1]
    if not (targets.dim() == 1 or padded_shape):
        got = f"{list(targets.shape)}{transposed_hint(targets.shape[:1].numel(), z)}"
        raise ValueError(f"targets: expected [{z.shape[1]}, L] or [sum of target_lengths], got {got}")
    expect(not targets.is_meta or z.is_meta, "targets", f"labels on {z.device} or a CPU", "meta")
    expect(reduction in ("none", "mean", "sum"), "reduction", "'none', 'mean' or 'sum'", repr(reduction))


def add_batch_dim(z: Tensor, targets: Tensor, unbatched: bool) -> tuple[Tensor, Tensor]:
    "One sequence as a batch of one."
    expect_tensor("targets", targets)
    if not unbatched:
        return z, targets
    return z[:, None], targets[None] if targets.dim() == 1 else targets


def unbatch(results: tuple, unbatched: bool) -> tuple:
    "The first of each where there was no batch."
    return type(results)(*(t if t is None else t[0] for t in results)) if unbatched else results


class Span(NamedTuple):
    "The frames of one label of a target."

    label: int  # the class
    start: int  # its first frame
    end: int  # the frame behind its last one
    score: float  # mean log-probability of its frames


def spans_of(
    # of each frame, as in `Alignment`
    labels: list[int],
    states: list[int],
    scores: list[float],
) -> list[Span]:
    "A span for each label of a target, in their order; the frames of blanks are in none."
    spans, start = [], 0
    for state, run in groupby(states):
        end = start + len([*run])
        if state > 0 and state % 2:  # neither a blank nor beyond the path
            spans.append(Span(labels[start], start, end, sum(scores[start:end]) / (end - start)))
        start = end
    return spans


class Segment(NamedTuple):
    "A run of frames of all sequences."

    at: slice
    kept: Optional[Tensor]  # [n] rows of [K·N] that are no padding; None: all


def unpadded_rows(t: Tensor, s: Segment) -> Tensor:
    "Rows [n,...] of a segment [K,N,...]."
    rows = t.flatten(0, 1)
    return rows if s.kept is None else rows.index_select(0, s.kept)


def put_unpadded_rows(out: Tensor, rows: Tensor, s: Segment):
    "The way back: rows [n,...] into a segment [K,N,...]."
    to = out.view(out.shape[:2].numel(), *out.shape[2:])
    if s.kept is None:
        to.copy_(rows)
    else:
        to.index_copy_(0, s.kept, rows)
