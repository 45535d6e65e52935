"""The same rows in plain PyTorch: what runs where no kernel does, and what kernels are held to."""

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from fusedloss.core.checks import acc_dtype, bad_labels
from fusedloss.core.operators import observed
from fusedloss.core.options import CrossEntropyStats, LossOptions


class RowTerms(NamedTuple):
    "What the rows bring beside their scores."

    label: Tensor  # [M], 0 where it is no class
    ignored: Tensor
    valid: Tensor  # [M]
    w_y: Tensor
    w_t: Tensor  # [M], 0 where not valid
    w: Tensor  # [V]


def row_terms(
    z: Tensor,  # [M,V]
    target: Tensor,
    weight: Optional[Tensor],
    token_weight: Optional[Tensor],
    o: LossOptions,
) -> RowTerms:
    "Labels and weights of the rows, in the dtype of `z`."
    ignored = target == o.ignore_index
    valid = ~ignored & ~bad_labels(target, z.shape[1], o.ignore_index)
    label = torch.where(valid, target, 0)
    w = z.new_ones(z.shape[1]) if weight is None else weight.to(z.dtype)
    w_t = z.new_ones(len(z)) if token_weight is None else token_weight.to(z.dtype)
    return RowTerms(label, ignored, valid, valid * w[label], valid * w_t, w)


def score_argument(z: Tensor, o: LossOptions) -> Tensor:
    "Logits, scaled, in their place; with a softcap what tanh is taken of."
    return z.mul_(o.logit_scale / (o.softcap or 1.0))


def scores_in_place(z: Tensor, o: LossOptions) -> Tensor:
    "The scores of logits, in their place."
    if o.keeps_scores:
        return z
    z = score_argument(z, o)
    return z.tanh_().mul_(o.softcap) if o.softcap else z


def inverse_temperatures(
    temperature: Tensor,  # [M]
    dtype: torch.dtype,
) -> Tensor:  # [M,1]
    "What each row's scores are multiplied by; NaN unless its temperature is positive and finite."
    right = (temperature > 0) & temperature.isfinite()
    return torch.where(right, 1 / temperature.to(dtype), torch.nan)[:, None]


def score_arguments(
    logits: Tensor,
    o: LossOptions,
) -> Tensor:  # in `acc_dtype`; the logits themselves where these are scores
    "`score_argument` of logits, which stay as they are."
    z = logits.to(acc_dtype(logits.dtype))
    return z if o.keeps_scores else score_argument(z.clone() if z is logits else z, o)


def capped(z: Tensor, o: LossOptions) -> Tensor:
    "Scores of `score_arguments`, which a softcap overwrites; a copy, for autograd may record it."
    return z.tanh_() * o.softcap if o.softcap else z


def plain_scores(
    logits: Tensor,
    o: LossOptions,
    temperature: Optional[Tensor] = None,  # of the rows of logits [M,V]
) -> Tensor:  # as `score_arguments`
    "The scores of logits."
    z = capped(score_arguments(logits, o), o)
    return z if temperature is None else z * inverse_temperatures(temperature, z.dtype)


def score_and_slope(
    logits: Tensor,
    o: LossOptions,
    temperature: Optional[Tensor] = None,  # of the rows of logits [M,V]
) -> tuple[Tensor, Tensor | float]:  # in `acc_dtype`
    "The scores of logits, and their derivative."
    z, slope = score_arguments(logits, o), o.logit_scale
    if o.softcap:
        e = z.abs().mul_(-2).exp_()
        slope = (e + 1).square_().reciprocal_().mul_(e).mul_(4 * o.logit_scale)
        del e  # before another copy
    z = capped(z, o)
    if temperature is None:
        return z, slope
    by = inverse_temperatures(temperature, z.dtype)
    return z * by, slope * by


def with_z_loss(
    losses: Tensor,
    lse: Tensor,
    o: LossOptions,
    w_t: Tensor | float = 1.0,  # what each row weighs
    divisor: Tensor | float = 1.0,  # of `plain_divisor`
) -> Tensor:
    "Losses and the rows' z_loss · lse²; the losses themselves where no z-loss is asked for."
    return losses + o.z_loss * (w_t / divisor) * lse**2 if o.z_loss else losses


def z_loss_slope(
    lse: Tensor,
    o: LossOptions,
    w_t: Tensor | float = 1.0,
    divisor: Tensor | float = 1.0,
) -> Tensor | float:
    "The derivative by lse of what `with_z_loss` adds."
    return 2 * (o.z_loss * (w_t / divisor)) * lse if o.z_loss else 0.0


def plain_row_coefs(
    lse: Tensor,
    t: RowTerms,
    o: LossOptions,
    divisor: Tensor | float = 1.0,  # of `plain_divisor`
) -> tuple[Tensor, Tensor, Tensor]:  # [M] each
    "The first three of `row_coefs`, in PyTorch."
    target_coef = (1 - o.label_smoothing) * (t.w_y * t.w_t / divisor)
    smoothing_coef = o.label_smoothing / len(t.w) * (t.w_t / divisor) if o.label_smoothing else torch.zeros_like(t.w_t)
    softmax_coef = target_coef + smoothing_coef * t.w.sum() + z_loss_slope(lse, o, t.w_t, divisor)
    return softmax_coef, target_coef, smoothing_coef


def plain_divisor(denominator: Optional[Tensor]) -> Tensor | float:
    "`divisor_of` in PyTorch."
    return 1.0 if denominator is None else torch.where(denominator == 0, 1.0, denominator)


def finite_max(row_max: Tensor) -> Tensor:
    "Maxima from which differences are taken: 0 where no score is finite."
    return torch.where(row_max == -torch.inf, 0.0, row_max)


def sub_max(z: Tensor, row_max: Tensor) -> Tensor:
    "z [M,V] less the rows' maxima [M]; less nothing where all is -inf."
    return z - finite_max(row_max)[:, None]


def online_sums(row_max: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:  # [M] twice, [M,C]
    "Rows' maxima, and their sums of exponentials relative to these, after more scores."
    higher = torch.maximum(row_max, z.amax(1))
    return higher, s * sub_max(row_max[:, None], higher)[:, 0].exp() + sub_max(z, higher).exp_().sum(1)


def reduce_rows(
    losses: Tensor,  # [M]
    reduction: str,
) -> Tensor:
    "The losses themselves, or their sum; those of a mean are divided already."
    return losses if reduction == "none" else losses.sum()


def flat(t: Optional[Tensor]) -> Optional[Tensor]:  # [M]
    "A tensor's numbers in one dimension, side by side; itself where they are."
    return t if t is None or t.dim() == 1 and t.is_contiguous() else t.reshape(-1).contiguous()


def as_rows(t: Tensor) -> Tensor:  # [N,H]
    "A tensor [...,H] as a matrix; itself where it is one."
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def total_weight(
    target: Tensor,  # [M]
    weight: Optional[Tensor],  # [V]
    token_weight: Optional[Tensor],  # [M]
    ignore_index: int,
    dtype: torch.dtype,
) -> Tensor:  # a scalar
    "What the mean divides by: Σ token_weight · weight[target] of valid tokens."
    counted = target != ignore_index
    if weight is not None:
        counted = counted * weight[target.clamp(0, weight.shape[0] - 1)].to(dtype)
    if token_weight is not None:
        counted = counted * token_weight.to(dtype)
    return counted.sum(dtype=dtype)


def counted_rows(x: Tensor, y: Tensor, ignore_index: int) -> Tensor:  # [N,H], [N]
    "`x` with zeros for ignored tokens: 0 · NaN in a product with their gradient would be NaN. Itself where a CPU sees none."
    ignored = y == ignore_index
    if y.is_cpu and not observed() and not ignored.any():
        return x
    return torch.where(ignored[:, None], 0.0, x)


def row_stats(
    lse: Tensor,  # [M]
    entropy: Tensor,  # [M]
    rows: Tensor,  # [5,M]
    target: Tensor,
    token_weight: Optional[Tensor],
    z_loss: float,
) -> CrossEntropyStats:
    "Name the rows' statistics."
    rank, n_valid = rows[2].long(), (rows[2] >= 0).sum()
    right = ((rank == 0) & lse.isfinite()).sum(dtype=lse.dtype) / n_valid.clamp(min=1)
    z = (z_loss * lse.detach()) * lse.detach()  # 0 for a weight of 0, however large lse is
    z = z if token_weight is None else (z * token_weight).to(z.dtype)
    shaped = lambda t: t.view(target.shape)
    return CrossEntropyStats(
        shaped(lse), shaped(entropy), right, shaped(rank), shaped(rows[3]), shaped(rows[4]), shaped(z), n_valid
    )
