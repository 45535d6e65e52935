"""The running softmax of Triton kernels: the score, the maximum and the sum of exponentials relative to it, their merge, and what else is summed on the way."""

import math

import torch
from torch import Tensor

from fusedloss.core.options import LossOptions
from fusedloss.core.triton import jit, tl, triton


LOG2E = tl.constexpr(math.log2(math.e)) if triton else math.log2(math.e)


@jit
def zero_if_neg_inf(row_max):
    "-inf as 0: what scores are taken relative to while there is none."
    return tl.where(row_max == -float("inf"), 0.0, row_max)


@jit
def exp2_diff(x, row_max, LOG2_SCALE: tl.constexpr):
    "e^((x - row_max) / LOG2_SCALE): of a score times LOG2_SCALE, or of another maximum."
    return tl.exp2((x - row_max) * (LOG2E / LOG2_SCALE))


@jit
def exponentials(z, row_max, LOG2_SCALE: tl.constexpr):
    "e^(z - m) of scores [BN,BV] with a maximum [BN], or of [BN,R,C] with one for each lane [BN,C]."
    return exp2_diff(z * LOG2_SCALE, tl.expand_dims(zero_if_neg_inf(row_max), 1), LOG2_SCALE)


@jit
def rescaled(s, row_max, new_max, LOG2_SCALE: tl.constexpr):
    "Σ e^(z - m) after its maximum has risen."
    return s * exp2_diff(row_max, zero_if_neg_inf(new_max), LOG2_SCALE)


@jit
def online_softmax_step(row_max, s, z, LOG2_SCALE: tl.constexpr):
    "Maximum and sum, of a row [BN] or its lanes [BN,C], after the scores z [BN,BV] or [BN,R,C]."
    new_max = tl.maximum(row_max, tl.max(z, 1) * LOG2_SCALE)
    s = rescaled(s, row_max, new_max, LOG2_SCALE)
    return new_max, s + tl.sum(exponentials(z, new_max, LOG2_SCALE), 1)


@jit
def merge_lanes(row_max, s, LOG2_SCALE: tl.constexpr):
    "All lanes of a row as one: [BN,C] to [BN]."
    new_max = tl.max(row_max, 1)
    return new_max, tl.sum(rescaled(s, row_max, new_max[:, None], LOG2_SCALE), 1)


@jit
def merge_parts(row_max, s, part_max, part_s, LOG2_SCALE: tl.constexpr):
    "Maximum and sum [BN] of a row after those of more of its parts, [BP,BN]."
    new_max = tl.maximum(row_max, tl.max(part_max, 0))
    s = rescaled(s, row_max, new_max, LOG2_SCALE)
    return new_max, s + tl.sum(rescaled(part_s, part_max, new_max[None, :], LOG2_SCALE), 0)


@jit
def carried(continues, row_max, s):
    "Maximum and sum [BN] that a tile takes over from those before: none where a run begins."
    return tl.where(continues, row_max, -float("inf")), tl.where(continues, s, 0.0)


def log2_scale(z: Tensor) -> float:
    "What kernels multiply the scores of these logits by."
    return 1.0 if z.dtype == torch.float32 else math.log2(math.e)


@jit
def lane_grid(R: tl.constexpr, C: tl.constexpr):
    "Positions in a block, [1,R,C]: neighbours in C are neighbours in memory."
    return tl.arange(0, R)[None, :, None] * C + tl.arange(0, C)[None, None, :]


@jit
def bare_score(raw, o):
    "The logit itself."
    return raw, 1.0


@jit
def scaled_score(raw, o):
    "logit_scale · raw."
    return raw * o.logit_scale, o.logit_scale


@jit
def capped_score(raw, o):
    "softcap · tanh(logit_scale · raw / softcap), near 0 by its series."
    x = o.logit_scale / o.softcap * raw
    x2 = x * x
    series = x * (1 - x2 * (1 / 3 - x2 * (2 / 15 - x2 * (17 / 315))))
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    r = 1 / (1 + e)
    tanh = tl.where(x2 < 0.01, series, tl.where(x < 0, e - 1, 1 - e) * r)
    return o.softcap * tanh, o.logit_scale * 4 * e * r * r


def score_fn(o: LossOptions):
    "The device function of the score that the options need."
    if o.softcap:
        return capped_score
    return bare_score if o.keeps_scores else scaled_score


@jit
def inverse_temperature(temperature_ptr, rows, keep):
    "1 / T of tokens [BN] with a temperature each; NaN unless T is positive and finite."
    t = tl.load(temperature_ptr + rows, mask=keep, other=1.0).to(tl.float32)
    return tl.where((t > 0) & (t < float("inf")), 1 / t, float("nan"))


@jit
def cooled(z, slope, temperature_ptr, rows, keep):
    "Scores [BN,BV] and their slopes, of tokens with a temperature each or without."
    if temperature_ptr is None:
        return z, slope
    else:
        by = inverse_temperature(temperature_ptr, rows, keep)[:, None]
        return z * by, slope * by


@jit
def rescaled_moment(moment, s, row_max, new_max, LOG2_SCALE: tl.constexpr):
    "Σ e^(z - m) (z - m) after its maximum has risen."
    rise = (row_max - zero_if_neg_inf(new_max)) / LOG2_SCALE
    return tl.where(rise > -1e4, tl.exp(rise) * (moment + rise * s), 0.0)  # 0 · -inf is no number


@jit
def outranks(z, z_y, cols, y):
    "Whether other classes' scores are ahead of the target's: larger, or equal and of a class before it."
    return (cols != y) & ((z > z_y) | ((cols < y) & (z == z_y)))


@jit
def moment_step(moment, row_max, s, new_max, z, LOG2_SCALE: tl.constexpr):
    "The entropy's moment, Σ e^(z - m) (z - m), after the scores z [BN,BV] or [BN,R,C]."
    below = (z * LOG2_SCALE - tl.expand_dims(zero_if_neg_inf(new_max), 1)) / LOG2_SCALE
    share = exponentials(z, new_max, LOG2_SCALE) * tl.maximum(below, -1e4)  # 0 · -inf is no number
    return rescaled_moment(moment, s, row_max, new_max, LOG2_SCALE) + tl.sum(share, 1)


@jit
def rank_step(ahead, squares, z, leads, inside):
    "Number of scores that lead the target's, and Σ z², after the scores z [BN,BV] or [BN,R,C]."
    return (ahead + tl.sum(tl.where(leads, 1.0, 0.0), 1), squares + tl.sum(tl.where(inside, z * z, 0.0), 1))
