"""Sums over the paths of a label sequence on a CPU: a double for each state, and a power of two beside it that holds for a block of frames."""

import math
from typing import NamedTuple, Optional

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from fusedloss.core.lattice import interleave, may_skip
from fusedloss.core.sequences import clamped_targets, inv_denominators, softmax_and_lse, Targets

f32, f64 = torch.float32, torch.float64


SHORT = 4096  # numbers of a row that NumPy's steps take
FRAMES, BITS = 16, 225  # of a block, at most; bits by which values may fall in it
DEPTH = 700  # bits by which a value may be below its exponent where a block begins
ABSENT = -1e12  # exponent of a value that is 0, as are all before it


def emission_range(
    z: Tensor,  # [T,N,C] log-probabilities
    classes: Tensor,  # [N,K] the classes that states emit
    frames: Tensor,  # [N]
) -> tuple[Tensor, Tensor]:  # [T,N] the largest of them; [T] bits from it to the least, over the batch
    "What each frame's emissions are measured from, and how far they reach."
    t, top, bits = torch.arange(len(z), device=z.device)[:, None], [], []
    few = max(FRAMES, SHORT // max(1, classes.numel()))  # what a cache holds
    for scores, at in zip(z.split(few), t.split(few)):
        scores = scores.gather(2, classes.expand(len(scores), -1, -1))
        never, largest = scores == -torch.inf, scores.amax(2).double()
        least = scores.masked_fill(never, torch.inf).amin(2).double()
        on = (at < frames) & (largest != -torch.inf)
        reach = torch.where(on, largest - least, 0) / math.log(2)
        alone = never.any(2) & (at < frames) & (reach <= BITS)
        top.append(torch.where(on, largest, 0))
        bits.append(reach.clamp(min=1).masked_fill(alone, BITS).amax(1))
    return torch.cat(top), torch.cat(bits)


class ScaledLattice(NamedTuple):
    "A batch on the host."

    z: Tensor  # [T,N,C] log-probabilities
    top: Tensor  # [T,N] float64, the largest emission of each frame
    bits: list[float]  # [T+1] that each frame's emissions reach below it
    states: Tensor  # [N,S]
    skip: Tensor  # [N,S] float64: 1 where a path may come from two states before
    frames: Tensor  # [N]
    end: Tensor  # [N,S] float64: 1 at the last blank


def scaled_lattice(
    # [T,N,C]; of `clamped_targets`
    z: Tensor,
    y: Tensor,
    frames: Tensor,
    lengths: Tensor,
    blank: int,
) -> Optional[ScaledLattice]:  # None where a frame spans too much, or is not a number
    "The batch as `scaled_path_sums` takes it."
    top, bits = emission_range(z, F.pad(y, (1, 0), value=blank), frames)
    if not (bits <= BITS).all():
        return None
    states = interleave(y, blank)
    index = torch.arange(states.shape[1], device=z.device)
    end = (index == 2 * lengths[:, None]).double()  # nowhere, if more labels than frames
    return ScaledLattice(z, top, [*bits.tolist(), 1.0], states, may_skip(states).double(), frames, end)


def emissions(a: ScaledLattice, at: slice) -> Tensor:  # [K,N,S] float64, at most 1
    "Probabilities of the states in some frames, of the largest of each frame; then of the end."
    scores = a.z[at]
    p = scores.gather(2, a.states.expand(len(scores), -1, -1)).double()
    p = p.sub_(a.top[at][..., None]).exp_()
    if at.stop > len(a.z):
        p = torch.cat([p, a.end[None]])
    on = torch.arange(at.start, at.stop, device=p.device)[:, None] < a.frames
    return p if on.all() else torch.where(on[..., None], p, a.end)


class ScaledRow(NamedTuple):
    "Values of the states: each times 2 to its exponent."

    values: numpy.ndarray  # [N,S] float64
    exponents: numpy.ndarray  # [N,S] float64, integers


def rescale(
    row: ScaledRow,
    first: numpy.ndarray,  # [N,S] emissions of the block's first frame
    frames: int,  # that the block may have
) -> tuple[ScaledRow, int]:  # and how many it has; 0 where the row is too steep for any
    "The same row with exponents for a block."
    values = numpy.where(first > 0, row.values, 0)
    none, index = values == 0, numpy.arange(1.0, values.shape[1] + 1)
    exact = numpy.where(none, ABSENT, row.exponents + numpy.frexp(values)[1])
    while frames:
        fall = index * (BITS // frames)
        new = numpy.maximum.accumulate(exact + fall, 1) - fall
        if numpy.where(none, 0, exact - new).min() >= -DEPTH:
            break
        frames //= 2
    factor = numpy.exp2(numpy.minimum(row.exponents - new, 1000))  # of a 0 it may be anything
    return ScaledRow(values * factor, new), frames


def edge_factors(
    exponents: numpy.ndarray,  # [N,S]
    skip: numpy.ndarray,  # [N,S]
) -> tuple[numpy.ndarray, numpy.ndarray]:  # [N,S] of edges from one state before, and from two
    "Powers of two from a neighbour's exponent to one's own; 0 where there is no edge."
    one, two = numpy.zeros_like(exponents), numpy.zeros_like(exponents)
    for k, edges in enumerate((one, two), 1):
        numpy.exp2(exponents[:, :-k] - exponents[:, k:], out=edges[:, k:])
    two *= skip
    return one, two


class Tables(NamedTuple):
    "Memory for the rows of a block."

    arrived: Tensor  # [FRAMES+1,N,S] before each frame's emission
    emitted: Tensor  # [FRAMES,N,S+2] after it; two columns of 0 first

    @classmethod
    def of(cls, states: Tensor) -> "Tables":
        "For states [N,S]."
        N, S = states.shape
        return cls(states.new_empty((FRAMES + 1, N, S), dtype=f64), states.new_zeros((FRAMES, N, S + 2), dtype=f64))


def torch_step(before, after, scores, here, left, left2, one, two, spare):
    "A frame's row [N,S] from the one before."
    torch.mul(before, scores, out=here)
    torch.addcmul(here, left, one, out=after).addcmul_(left2, two)


def numpy_step(before, after, scores, here, left, left2, one, two, spare):
    "The same."
    numpy.multiply(before, scores, out=here)
    numpy.multiply(left, one, out=after)
    numpy.multiply(left2, two, out=spare)
    numpy.add(after, spare, out=after)
    numpy.add(after, here, out=after)


def run_block(
    p: Tensor,  # [K,N,S] emissions
    row: ScaledRow,  # before them
    skip: Tensor,  # [N,S]
    tables: Tables,  # are written
) -> ScaledRow:
    "The row after a block of frames."
    K, N, S = p.shape
    arrived, emitted = tables.arrived[: K + 1], tables.emitted[:K]
    arrived[0] = torch.from_numpy(row.values)
    frames = arrived[:-1], arrived[1:], p, *(emitted[:, :, k : k + S] for k in (2, 1, 0))
    edges = *edge_factors(row.exponents, skip.numpy()), numpy.empty((N, S))
    if N * S > SHORT:
        step, edges = torch_step, [torch.from_numpy(e) for e in edges]
    else:
        step, frames = numpy_step, [t.numpy() for t in frames]
    for rows in zip(*frames):
        step(*rows, *edges)
    return ScaledRow(arrived[K].numpy().copy(), row.exponents)


class Block(NamedTuple):
    "Frames with the same exponents, and the row before them."

    at: slice
    row: ScaledRow


def frames_within(bits: list[float], start: int) -> int:
    "Frames from `start` whose emissions together reach no further than `BITS`, at most `FRAMES`."
    used, stop = 0.0, start
    while stop < min(start + FRAMES, len(bits)) and used + bits[stop] <= BITS:
        used += bits[stop]
        stop += 1
    return stop - start


def first_row(a: ScaledLattice) -> ScaledRow:
    "A path begins in the first blank or the first label."
    values = numpy.zeros(a.end.shape)
    values[:, :2] = 1
    return ScaledRow(values, numpy.zeros_like(values))


class Total(NamedTuple):
    "A sum over all paths: value times 2 to the exponent."

    value: Tensor  # [N,1] float64
    exponent: Tensor  # [N,1] float64, integers


def backward_block(
    # [K,N,S], frames and states in the opposite order
    p: Tensor,
    row: ScaledRow,
    skip: Tensor,
    tables: Tables,
) -> Optional[tuple[list[tuple[Tensor, numpy.ndarray]], ScaledRow]]:
    "Values after their emission and their exponents, in order of time; the row before the block."
    parts, done = [], 0
    while done < len(p):
        row, frames = rescale(row, p[done].numpy(), len(p) - done)
        if not frames:
            return None
        row = run_block(p[done : done + frames], row, skip, tables)
        parts.append((tables.emitted[:frames, :, 2:].flip(0, 2), row.exponents[:, ::-1]))
        done += frames
    return parts[::-1], row


def block_posteriors(
    forward: Tensor,  # [K,N,S]
    exponents: numpy.ndarray,  # [N,S]
    parts: list[tuple[Tensor, numpy.ndarray]],  # of backward, each with its own exponents
    total: Total,
) -> Tensor:  # [K,N,S]
    "The share of all paths that is in each state: forward times backward over their sum."
    shares, first, inverse = [], 0, 1 / total.value.where(total.value > 0, 1)
    for values, own in parts:
        both = torch.from_numpy(exponents + own) - total.exponent
        values.mul_(both.clamp_(max=1020).exp2_().mul_(inverse)).clamp_(max=1e300)  # of no path
        shares.append(values.mul_(forward[first : first + len(values)]))  # it may be anything
        first += len(values)
    return torch.cat(shares) if len(shares) > 1 else shares[0]


class ClassColumns(NamedTuple):
    "The classes that a sequence's states emit, each once."

    of_states: Tensor  # [N,1+L] column of the blank, and of each label
    classes: Tensor  # [N,U] class of each column; columns that are not used have any


def class_columns(states: Tensor, C: int) -> ClassColumns:  # states [N,S]
    "Few columns where there are many classes."
    emitted = torch.cat([states[:, :1], states[:, 1::2]], 1)
    row = torch.arange(len(states), device=states.device)[:, None]
    number = (emitted + C * row).unique(return_inverse=True)[1]
    column = number - number.amin(1, keepdim=True)
    classes = emitted.new_zeros((len(states), int(column.max()) + 1))
    return ClassColumns(column, classes.scatter_(1, column, emitted))


def subtract_per_class(
    dz: Tensor,  # [K,N,C] is written
    gammas: Tensor,  # [K,N,S]
    columns: ClassColumns,
):
    "The states' shares from their classes: in float64 to columns, and these to the classes."
    gammas = gammas[: len(dz)]  # without the frame behind the last
    share = gammas.new_zeros((len(dz), *columns.classes.shape))
    of_blank, of_labels = (
        t.expand(len(dz), -1, -1) for t in columns.of_states.split([1, columns.of_states.shape[1] - 1], 1)
    )
    share.scatter_add_(2, of_labels, gammas[..., 1::2])
    share.scatter_add_(2, of_blank, gammas[..., ::2].sum(2, keepdim=True))
    at = columns.classes.expand(len(dz), -1, -1)
    dz.scatter_add_(2, at, share.neg_().to(dz.dtype))


def forward_blocks(
    a: ScaledLattice,
) -> Optional[tuple[list[Block], Total]]:  # None where doubles do not reach
    "The blocks from the first frame to the last."
    tables, row, t, blocks = Tables.of(a.states), first_row(a), 0, []
    while t < len(a.bits):
        p = emissions(a, slice(t, t + frames_within(a.bits, t)))
        row, frames = rescale(row, p[0].numpy(), len(p))
        if not frames:
            return None
        blocks.append(Block(slice(t, t + frames), row))
        row, t = run_block(p[:frames], row, a.skip, tables), t + frames
    return blocks, Total(*((torch.from_numpy(x) * a.end).sum(1, keepdim=True) for x in row))


def subtract_posteriors(
    a: ScaledLattice,
    blocks: list[Block],
    total: Total,
    dz: Tensor,  # [T,N,C]: shares of classes are taken from it
) -> bool:  # False where doubles do not reach
    "The blocks from the last to the first."
    columns = class_columns(a.states, dz.shape[2])
    tables, back_tables = Tables.of(a.states), Tables.of(a.states)
    skip, end = F.pad(a.skip.flip(1), (2, 0))[:, :-2], a.end.flip(1).numpy()
    row = ScaledRow(end, numpy.zeros_like(end))
    for block in reversed(blocks):
        p = emissions(a, block.at)
        run_block(p, block.row, a.skip, tables)
        back = backward_block(p.flip(0, 2), row, skip, back_tables)
        if back is None:
            return False
        parts, row = back
        gammas = block_posteriors(tables.arrived, block.row.exponents, parts, total)
        subtract_per_class(dz[block.at], gammas, columns)
    return True


def scaled_path_sums(
    z: Tensor,  # [T,N,C] log-probabilities on a CPU
    y: Tensor,  # [N,L]
    frames: Tensor,  # [N]
    lengths: Tensor,  # [N] of `clamped_targets`
    blank: int,
    dz: Optional[Tensor] = None,  # [T,N,C]: posteriors of classes are taken from it
) -> Optional[Tensor]:  # [N] float64; None, and dz is of no use: take the log domain
    "Log of the sum over all alignments."
    a = scaled_lattice(z, y, frames, lengths, blank)
    with numpy.errstate(all="ignore"):
        forward = a and forward_blocks(a)
        if not forward:
            return None
        if dz is not None and not subtract_posteriors(a, *forward, dz):
            return None
    value, exponent = forward[1]
    return (value.log() + exponent * math.log(2))[:, 0] + a.top.sum(0)


LOGITS, TORCH_GRADIENT, EXACT_GRADIENT = 0, 1, 2  # what z is, and which gradient is wanted


def scores_alone(
    z: Tensor,  # [T,N,C]
    on: Tensor,  # [T,N] the frames that count
    score_kind: int,
    grad: bool,
) -> tuple[Tensor | float, Optional[Tensor]]:  # [N] float64, 0 of log-probabilities; [T,N,C]
    "The sum over frames of the log-sum-exp; the gradient, but for the posteriors to come off."
    x = z.detach() if z.dtype == f64 else z.detach().float()
    if score_kind == LOGITS:
        p, of_rows = softmax_and_lse(x)
        return torch.where(on, of_rows, 0).sum(0), p if grad else None
    if not grad:
        return 0, None
    return 0, x.exp() if score_kind == TORCH_GRADIENT else torch.zeros_like(x)


def divides_late(dtype: torch.dtype, mean: bool) -> bool:  # of the scores
    "Whether the gradient waits for backward with the mean's division: fp16 cannot hold the quotient."
    return mean and dtype == torch.float16


def finished_loss(
    # of `scores_alone`; [N] float64
    lse: Tensor | float,
    dz: Optional[Tensor],
    log_z: Tensor,
    on: Tensor,  # [T,N]
    lengths: Tensor,  # [N]
    bad: Tensor,  # [N]
    dtype: torch.dtype,  # of the scores
    zero_infinity: bool,
    score_kind: int,
    mean: bool,
) -> tuple[Tensor, Optional[Tensor]]:  # [N], and the gradient [T,N,C] of their sum
    "The loss from the sum over all paths; the gradient, 0 where nothing counts."
    loss, inv_denominator = lse - log_z, inv_denominators(lengths, mean, f64)
    if score_kind == LOGITS:
        loss = loss.clamp(min=0)  # a rounding may put it below
    if zero_infinity:
        loss = loss.masked_fill(log_z == -torch.inf, 0)
    loss = (loss * inv_denominator).masked_fill(bad, torch.nan).to(f64 if dtype == f64 else f32)
    if dz is None:
        return loss, None
    idle = ~on | (log_z == -torch.inf) | bad
    if mean and not divides_late(dtype, mean):
        dz.mul_(inv_denominator.to(dz.dtype)[:, None])
    if dz.device.type != "cpu" or idle.any():
        dz.masked_fill_(idle[..., None], 0)
    return loss, dz.to(dtype)


def scaled_loss(
    z: Tensor,
    p: Targets,
    blank: int,
    zero_infinity: bool,
    score_kind: int,
    mean: bool,
    grad: bool,
) -> Optional[tuple[Tensor, Optional[Tensor]]]:  # as `finished_loss`; None: take `plain_loss`
    "The loss by `scaled_path_sums`, on a CPU."
    if z.device.type != "cpu" or z.numel() == 0:
        return None
    y, frames, lengths, bad = clamped_targets(p, len(z), z.shape[2], blank)
    on = torch.arange(len(z), device=z.device)[:, None] < frames
    lse, dz = scores_alone(z, on, score_kind, grad)
    log_z = scaled_path_sums(z.detach(), y, frames, lengths, blank, dz)
    return (
        None
        if log_z is None
        else finished_loss(lse, dz, log_z, on, lengths, bad, z.dtype, zero_infinity, score_kind, mean)
    )


FEW, SMALL = 8, 512  # sequences; their states and classes


def suits_torch(z: Tensor, p: Targets, blank: int) -> bool:  # [T,N,C]
    "Whether PyTorch's own loss is quick, and right, for these lengths and labels."
    (T, N, C), L = z.shape, p.y.shape[1]
    if z.device.type != "cpu" or not 0 < N < FEW or N * (C + 2 * L + 1) > SMALL:
        return False
    inside = torch.arange(L) < p.lengths[:, None]
    labels = (p.y >= 0) & (p.y < C) & (p.y != blank) | ~inside
    whole = [(t >= 1) & (t <= most) for t, most in ((p.frames, T), (p.lengths, p.width))]
    return bool(labels.all() & whole[0].all() & whole[1].all())


def torch_loss(
    z: Tensor,
    p: Targets,
    blank: int,
    zero_infinity: bool,
    score_kind: int,
    mean: bool,
    grad: bool,
) -> Optional[tuple[Tensor, Optional[Tensor]]]:  # as `finished_loss`; None: take `scaled_loss`
    "The loss of few sequences on a CPU, by PyTorch's own in float64."
    if not suits_torch(z, p, blank):
        return None
    x, aten = z.detach().double(), torch.ops.aten
    if score_kind == LOGITS:
        x = x.log_softmax(-1)
    if not x.isfinite().all():
        return None
    given = p.y, p.frames.tolist(), p.lengths.tolist()
    loss, alpha = aten._ctc_loss(x, *given, blank)
    on, dz = torch.arange(len(z))[:, None] < p.frames, None
    if grad:
        dz = aten._ctc_loss_backward(torch.ones_like(loss), x, *given, loss, alpha, blank)
    if grad and score_kind == EXACT_GRADIENT:
        dz.sub_(x.exp())
    return finished_loss(0, dz, -loss, on, p.lengths, torch.zeros_like(on[0]), z.dtype, zero_infinity, score_kind, mean)
