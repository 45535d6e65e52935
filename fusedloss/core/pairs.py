"""What is made of two rows of one length: a student's divergence from its teacher, and cross entropy against probabilities, and against several labels; the loss, and the gradient in the place of the logits."""

import math
from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor

from fusedloss.core.checks import acc_dtype
from fusedloss.core.operators import operator
from fusedloss.core.options import LossOptions
from fusedloss.core.products import part, tile_slices
from fusedloss.core.reference import (
    finite_max,
    plain_divisor,
    plain_row_coefs,
    row_terms,
    RowTerms,
    plain_scores,
    score_and_slope,
    sub_max,
    with_z_loss,
    z_loss_slope,
)
from fusedloss.core.rows import (
    all_weights,
    class_weight,
    divisor_of,
    load_block,
    load_labels,
    row_coefs,
    row_loss,
    row_start,
    row_weights,
)
from fusedloss.core.softmax import (
    LOG2E,
    exp2_diff,
    exponentials,
    inverse_temperature,
    lane_grid,
    log2_scale,
    merge_lanes,
    online_softmax_step,
    score_fn,
    zero_if_neg_inf,
)
from fusedloss.core.triton import has_kernel, jit, launch_kernel, log2, next_power_of_2, on_device, tl, triton


class DivergenceOptions(NamedTuple):
    "What is computed of the two scores, in the order in which the operators take it."

    kind: str = "forward_kl"  # "forward_kl", "reverse_kl" or "jsd"
    beta: float = 0.5  # the teacher's share of the mixture
    # what multiplies the logits of the student and of the teacher: s / T, s alone where each token has a T
    logit_scale: float = 1.0
    teacher_logit_scale: float = 1.0
    # c / T, or c likewise; 0 for none
    softcap: float = 0.0
    teacher_softcap: float = 0.0
    drops_rest: bool = False

    @property
    def student(self) -> LossOptions:
        return LossOptions(logit_scale=self.logit_scale, softcap=self.softcap)

    @property
    def teacher(self) -> LossOptions:
        return LossOptions(logit_scale=self.teacher_logit_scale, softcap=self.teacher_softcap)


def mixture_log_probs(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    "log m, m = beta p + (1 - beta) q; -inf where both are 0."
    return torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))


def divergence_terms(
    # [M,K], of student and teacher
    log_q: Tensor,
    log_p: Tensor,
    o: DivergenceOptions,
) -> tuple[Tensor, Tensor]:  # [M,K] each
    "The terms of the divergence, and q times its derivative by q."
    q, p = log_q.exp(), log_p.exp()
    of = lambda share, log_ratio: torch.where(share == 0, 0.0, share * log_ratio)  # NaN stays
    if o.kind == "forward_kl":
        return of(p, log_p - log_q), -p
    if o.kind == "reverse_kl":
        terms = of(q, log_q - log_p)
        return terms, terms + q
    log_m = mixture_log_probs(log_q, log_p, o.beta)
    rest = (1 - o.beta) * of(q, log_q - log_m)
    return o.beta * of(p, log_p - log_m) + rest, rest


def weigh_rows(
    divergence: Tensor,  # [M]
    token_weight: Optional[Tensor],  # [M]
    denominator: Optional[Tensor],
    o: DivergenceOptions,
    unscaled_grad: bool,
) -> tuple[Tensor, Tensor]:  # [M] each
    "Losses, and what multiplies each row's gradient: 0 for a token without weight."
    w_t = torch.ones_like(divergence) if token_weight is None else token_weight.to(divergence.dtype)
    share = w_t / plain_divisor(denominator)
    losses = torch.where(w_t == 0, 0.0, divergence * share)
    flat = (divergence == torch.inf) & (o.kind == "reverse_kl")  # infinite all around: no slope
    return losses, torch.where(flat, 0.0, w_t if unscaled_grad else share)


def put_pair_gradient(
    # [M,V]; `raw` is overwritten
    raw: Tensor,
    log_q: Tensor,
    u: Tensor,
    total: Tensor,  # [M], the sum of u over all classes
    slope: Tensor | float,  # [M,V]
    scale: Tensor,  # [M]
):
    "The gradient of the logits; 0 where `scale` is."
    dz = (u - log_q.exp() * total[:, None]) * slope * scale[:, None]
    raw.copy_(dz.masked_fill_(scale[:, None] == 0, 0.0))


def reference_divergence(
    raw: Tensor,  # [M,V], overwritten where `turn`
    teacher_raw: Tensor,  # [M,V]
    token_weight: Optional[Tensor],
    denominator: Optional[Tensor],
    o: DivergenceOptions,
    turn: bool,
    unscaled_grad: bool = False,
    temperature: Optional[Tensor] = None,  # [M]
) -> Tensor:  # [M]
    "`launch_divergence` in PyTorch."
    z, slope = score_and_slope(raw, o.student, temperature)
    log_q = z.log_softmax(1)
    log_p = plain_scores(teacher_raw, o.teacher, temperature).log_softmax(1).to(log_q.dtype)
    terms, u = divergence_terms(log_q, log_p, o)
    losses, scale = weigh_rows(terms.sum(1).clamp(min=0), token_weight, denominator, o, unscaled_grad)
    if turn:
        put_pair_gradient(raw, log_q, u, u.sum(1), slope, scale)
    return losses


@jit
def rescaled_cross(cross, s, old_max, new_max, old_other, new_other):
    "Σ e^(z - m) ((z - m) - (other - m')) after the maxima m and m' have risen; s is Σ e^(z - m) from before."
    factor = exp2_diff(old_max, zero_if_neg_inf(new_max), 1.0)
    rise = (old_max - new_max) - (zero_if_neg_inf(old_other) - zero_if_neg_inf(new_other))
    return tl.where(factor > 0, (cross + rise * s) * factor, 0.0)  # 0 · inf is no number


@jit
def gap_of(z, row_max, other, other_max):
    "(z - m) - (other - m') of scores [BN,R,C] and maxima [BN,C] or [BN,1]: offsets go before anything cancels."
    return (z - tl.expand_dims(row_max, 1)) - (other - tl.expand_dims(zero_if_neg_inf(other_max), 1))


@jit
def cross_step(cross, s, old_max, new_max, old_other, new_other, z, other):
    "`rescaled_cross` of the lanes [BN,C], after the scores z, other [BN,R,C]."
    e = exponentials(z, new_max, 1.0)
    more = tl.sum(tl.where(e > 0, e * gap_of(z, new_max, other, new_other), 0.0), 1)
    return rescaled_cross(cross, s, old_max, new_max, old_other, new_other) + more


LN2 = tl.constexpr(math.log(2)) if triton else math.log(2)


@jit
def log2_prob(z, row_max, log2_s):
    "log2 of e^(z - row_max) / s."
    return (z - row_max) * LOG2E - log2_s


@jit
def log2_mixture(p, q, beta):
    "log2 (β p + (1 - β) q), of at least the least normal number: `log2` takes smaller ones for 0."
    return log2(tl.maximum(beta * p + (1 - beta) * q, 1.1754943508222875e-38))


@jit
def cooling(temperature_ptr, rows, keep):
    "1 / T of tokens with a temperature each, [BN,1,1]; 1 without."
    if temperature_ptr is None:
        return 1.0
    else:
        return inverse_temperature(temperature_ptr, rows, keep)[:, None, None]


@jit
def pair_scores(q_start, p_start, first, lanes, V, live, by, o, t_o, SCORE: tl.constexpr, T_SCORE: tl.constexpr):
    "Scores of student and teacher in a block [BN,R,C], times `by`, and the former's slopes; -inf where there are none."
    raw_q, inside = load_block(q_start, first, lanes, V, 1, live, True, "")
    raw_p, there = load_block(p_start, first, lanes, V, 1, live, True, "")
    z_q, slope = SCORE(raw_q.to(tl.float32), o)
    z_p, unused = T_SCORE(raw_p.to(tl.float32), t_o)
    return tl.where(inside, z_q * by, -float("inf")), tl.where(inside, z_p * by, -float("inf")), slope * by


@jit
def scan_pairs(
    q_start,
    p_start,
    bound,
    lanes,
    V,
    live,
    by,
    o,
    t_o,
    SCORE: tl.constexpr,
    T_SCORE: tl.constexpr,
    KIND: tl.constexpr,
    BN: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
):
    "Maximum and sum of exponentials of the student's scores and of the teacher's, and, of a KL, the sum of `rescaled_cross`: [BN] each."
    q_max = tl.full([BN, C], -float("inf"), tl.float32)
    q_s = tl.zeros([BN, C], tl.float32)
    p_max, p_s, cross = q_max, q_s, q_s
    for first in tl.range(0, bound, B, num_stages=3):
        z_q, z_p, slope = pair_scores(q_start, p_start, first, lanes, V, live, by, o, t_o, SCORE, T_SCORE)
        old_q, old_p, old_q_s, old_p_s = q_max, p_max, q_s, p_s
        q_max, q_s = online_softmax_step(q_max, q_s, z_q, 1.0)
        p_max, p_s = online_softmax_step(p_max, p_s, z_p, 1.0)
        if KIND == "forward_kl":
            cross = cross_step(cross, old_p_s, old_p, p_max, old_q, q_max, z_p, z_q)
        elif KIND == "reverse_kl":
            cross = cross_step(cross, old_q_s, old_q, q_max, old_p, p_max, z_q, z_p)
    q_top, q_sum = merge_lanes(q_max, q_s, 1.0)
    p_top, p_sum = merge_lanes(p_max, p_s, 1.0)
    if KIND == "forward_kl":
        cross = rescaled_cross(cross, p_s, p_max, p_top[:, None], q_max, q_top[:, None])
    elif KIND == "reverse_kl":
        cross = rescaled_cross(cross, q_s, q_max, q_top[:, None], p_max, p_top[:, None])
    return q_top, q_sum, p_top, p_sum, tl.sum(cross, 1)


@jit
def mixture_sums(
    q_start,
    p_start,
    q_top,
    q_log_s,
    p_top,
    p_log_s,
    bound,
    lanes,
    V,
    live,
    by,
    beta,
    o,
    t_o,
    SCORE: tl.constexpr,
    T_SCORE: tl.constexpr,
    BN: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
):
    "KL(q‖m) and KL(p‖m) to the mixture m in bits, of the classes that are read: [BN] each."
    q_at, q_less = q_top[:, None, None], (q_log_s * LOG2E)[:, None, None]
    p_at, p_less = p_top[:, None, None], (p_log_s * LOG2E)[:, None, None]
    mean = tl.zeros([BN, C], tl.float32)
    cross = mean
    for first in tl.range(0, bound, B, num_stages=3):
        z_q, z_p, slope = pair_scores(q_start, p_start, first, lanes, V, live, by, o, t_o, SCORE, T_SCORE)
        log_q, log_p = log2_prob(z_q, q_at, q_less), log2_prob(z_p, p_at, p_less)
        q, p = tl.exp2(log_q), tl.exp2(log_p)
        log_m = log2_mixture(p, q, beta)
        mean += tl.sum(tl.where(q > 0, q * (log_q - log_m), 0.0), 1)
        cross += tl.sum(tl.where(p > 0, p * (log_p - log_m), 0.0), 1)
    return tl.sum(mean, 1), tl.sum(cross, 1)


@jit
def store_pair_gradient(
    q_start,
    p_start,
    q_top,
    q_log_s,
    p_top,
    p_log_s,
    slant,
    scale,
    live,
    finite,
    keep,
    lanes,
    V,
    by,
    beta,
    o,
    t_o,
    SCORE: tl.constexpr,
    T_SCORE: tl.constexpr,
    KIND: tl.constexpr,
    B: tl.constexpr,
):
    "The gradient of the student's logits in their place; `slant [BN]` is the mean, by q, of what stands beside it below."
    q_at, q_less = q_top[:, None, None], (q_log_s * LOG2E)[:, None, None]
    p_at, p_less = p_top[:, None, None], (p_log_s * LOG2E)[:, None, None]
    scale, slant, finite = scale[:, None, None], slant[:, None, None], finite[:, None, None]
    last = (tl.cdiv(V, B) - 1) * B
    for back in range(0, V, B):
        z_q, z_p, slope = pair_scores(q_start, p_start, last - back, lanes, V, live, by, o, t_o, SCORE, T_SCORE)
        log_q, log_p = log2_prob(z_q, q_at, q_less), log2_prob(z_p, p_at, p_less)
        q = tl.exp2(log_q)
        if KIND == "forward_kl":
            dz = q - tl.exp2(log_p)
        elif KIND == "reverse_kl":
            dz = tl.where((q != 0) & finite, q * (gap_of(z_q, q_top[:, None], z_p, p_top[:, None]) - slant), 0.0)
        else:
            log_m = log2_mixture(tl.exp2(log_p), q, beta)
            dz = tl.where(q != 0, (1 - beta) * q * LN2 * ((log_q - log_m) - slant), 0.0)
        cols = last - back + lanes
        dz = tl.where(live, dz * scale * slope, 0.0).to(q_start.dtype.element_ty)
        tl.store(q_start + cols.to(tl.int64), dz, mask=keep[:, None, None] & (cols < V))


@jit
def divergence_kernel(
    q_ptr,  # [M,V]: the student's logits, which become their gradient if GRAD
    p_ptr,  # the teacher's
    # [M], [M], [1], each or None; [M]
    token_weight_ptr,
    temperature_ptr,
    denominator_ptr,
    loss_ptr,
    M,
    V,
    q_stride,
    p_stride,
    beta,
    o,  # `LossOptions` of the student's score
    t_o,  # and of the teacher's
    SCORE: tl.constexpr,
    T_SCORE: tl.constexpr,
    KIND: tl.constexpr,
    GRAD: tl.constexpr,
    UNSCALED_GRAD: tl.constexpr,
    BN: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    B: tl.constexpr = R * C
    lanes, rows = lane_grid(R, C), tl.program_id(0) * BN + tl.arange(0, BN)
    keep = rows < M
    w_t = tl.where(keep, 1.0, 0.0)
    if token_weight_ptr is not None:
        w_t = tl.load(token_weight_ptr + rows, mask=keep, other=0.0).to(tl.float32)
    weighs = w_t != 0
    live, bound = weighs[:, None, None], V * tl.max(weighs.to(tl.int32), 0)
    by = cooling(temperature_ptr, rows, keep)
    q_start = row_start(q_ptr, rows, 1, q_stride, 0)[:, None, None]
    p_start = row_start(p_ptr, rows, 1, p_stride, 0)[:, None, None]
    q_top, q_sum, p_top, p_sum, cross = scan_pairs(
        q_start, p_start, bound, lanes, V, live, by, o, t_o, SCORE, T_SCORE, KIND, BN, C, B
    )
    q_log_s, p_log_s = tl.log(q_sum), tl.log(p_sum)
    if KIND == "forward_kl":
        divergence = cross / p_sum - (p_log_s - q_log_s)
        slant = divergence
    elif KIND == "reverse_kl":
        slant = cross / q_sum  # the mean of (z_q - q_top) - (z_p - p_top)
        divergence = slant - (q_log_s - p_log_s)
    else:
        slant, cross = mixture_sums(
            q_start,
            p_start,
            q_top,
            q_log_s,
            p_top,
            p_log_s,
            bound,
            lanes,
            V,
            live,
            by,
            beta,
            o,
            t_o,
            SCORE,
            T_SCORE,
            BN,
            C,
            B,
        )
        divergence = (beta * cross + (1 - beta) * slant) * LN2
    divergence += q_log_s * 0 + p_log_s * 0  # a row without any probability is no number
    share = w_t / divisor_of(denominator_ptr)
    loss = tl.where(divergence < 0, 0.0, divergence) * share
    tl.store(loss_ptr + rows, tl.where(weighs, loss, 0.0), mask=keep)
    if GRAD:
        scale, finite = w_t if UNSCALED_GRAD else share, divergence != float("inf")
        store_pair_gradient(
            q_start,
            p_start,
            q_top,
            q_log_s,
            p_top,
            p_log_s,
            slant,
            scale,
            live,
            finite,
            keep,
            lanes,
            V,
            by,
            beta,
            o,
            t_o,
            SCORE,
            T_SCORE,
            KIND,
            B,
        )


class PairBlocks(NamedTuple):
    "BN pairs of rows a program, in blocks of R × C classes, by so many warps."

    BN: int
    R: int
    C: int
    warps: int


def pair_blocks(n_classes: int) -> PairBlocks:
    "Several short rows a program, or one, whose lanes lie 256 a warp: a lane's classes meet in its thread."
    if n_classes > 1024:
        return PairBlocks(1, 2, 1024, 4)
    width = max(64, next_power_of_2(n_classes))
    return PairBlocks(2048 // width, 4, width // 4, 4)


def launch_divergence(
    z: Tensor,  # [M,V], overwritten where `turn`, classes next to each other
    teacher_z: Tensor,  # [M,V]
    token_weight: Optional[Tensor],  # [M]
    denominator: Optional[Tensor],  # a scalar that divides
    o: DivergenceOptions,
    turn: bool,
    unscaled_grad: bool = False,
    temperature: Optional[Tensor] = None,  # [M]
    blocks: Optional[PairBlocks] = None,
) -> Tensor:  # [M]
    "Weighted divergences of the rows, and their gradient in the place of the student's logits."
    m, v = z.shape
    b, losses = blocks or pair_blocks(v), z.new_empty(m, dtype=torch.float32)
    with on_device(z):
        launch_kernel(
            divergence_kernel,
            (-(-m // b.BN),),
            z,
            teacher_z,
            token_weight,
            temperature,
            denominator,
            losses,
            m,
            v,
            z.stride(0),
            teacher_z.stride(0),
            o.beta,
            o.student,
            o.teacher,
            SCORE=score_fn(o.student),
            T_SCORE=score_fn(o.teacher),
            KIND=o.kind,
            GRAD=turn,
            UNSCALED_GRAD=unscaled_grad,
            BN=b.BN,
            R=b.R,
            C=b.C,
            num_warps=b.warps,
        )
    return losses


def pair_parts(z: Tensor) -> list[slice]:  # [M,V]
    "Rows of which some ten matrices are made at once in PyTorch."
    return tile_slices(len(z), max(1, 2 ** (18 if z.is_cpu else 24) // max(1, z.shape[1])))


@jit
def pair_numbers_kernel(
    # [M,V]: logits of student and teacher; [M] or None; [5,M]
    q_ptr,
    p_ptr,
    temperature_ptr,
    numbers_ptr,
    M,
    V,
    q_stride,
    p_stride,
    o,  # `LossOptions` of the student's score
    t_o,  # and of the teacher's
    SCORE: tl.constexpr,
    T_SCORE: tl.constexpr,
    KIND: tl.constexpr,
    BN: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    lanes, rows = lane_grid(R, C), tl.program_id(0) * BN + tl.arange(0, BN)
    keep = rows < M
    by = cooling(temperature_ptr, rows, keep)
    q_start = row_start(q_ptr, rows, 1, q_stride, 0)[:, None, None]
    p_start = row_start(p_ptr, rows, 1, p_stride, 0)[:, None, None]
    q_top, q_sum, p_top, p_sum, cross = scan_pairs(
        q_start, p_start, V, lanes, V, keep[:, None, None], by, o, t_o, SCORE, T_SCORE, KIND, BN, C, R * C
    )
    tl.store(numbers_ptr + rows, q_top, mask=keep)
    tl.store(numbers_ptr + M + rows, q_sum, mask=keep)
    tl.store(numbers_ptr + 2 * M + rows, p_top, mask=keep)
    tl.store(numbers_ptr + 3 * M + rows, p_sum, mask=keep)
    tl.store(numbers_ptr + 4 * M + rows, cross, mask=keep)


@jit
def pair_mixture_kernel(
    # [M,V]: logits of student and teacher; [M] or None; [4,M], of `JoinedPairs`; [2,M]
    q_ptr,
    p_ptr,
    temperature_ptr,
    at_ptr,
    sums_ptr,
    M,
    V,
    q_stride,
    p_stride,
    beta,
    o,  # `LossOptions` of the student's score
    t_o,  # and of the teacher's
    SCORE: tl.constexpr,
    T_SCORE: tl.constexpr,
    BN: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    lanes, rows = lane_grid(R, C), tl.program_id(0) * BN + tl.arange(0, BN)
    keep = rows < M
    by = cooling(temperature_ptr, rows, keep)
    q_start = row_start(q_ptr, rows, 1, q_stride, 0)[:, None, None]
    p_start = row_start(p_ptr, rows, 1, p_stride, 0)[:, None, None]
    q_top, q_log_s = tl.load(at_ptr + rows, mask=keep), tl.load(at_ptr + M + rows, mask=keep)
    p_top, p_log_s = tl.load(at_ptr + 2 * M + rows, mask=keep), tl.load(at_ptr + 3 * M + rows, mask=keep)
    live = keep[:, None, None]
    mean, cross = mixture_sums(
        q_start,
        p_start,
        q_top,
        q_log_s,
        p_top,
        p_log_s,
        V,
        lanes,
        V,
        live,
        by,
        beta,
        o,
        t_o,
        SCORE,
        T_SCORE,
        BN,
        C,
        R * C,
    )
    tl.store(sums_ptr + rows, mean * LN2, mask=keep)
    tl.store(sums_ptr + M + rows, cross * LN2, mask=keep)


@jit
def pair_gradient_kernel(
    # [M,V]: the student's logits, which become their gradient, and the teacher's; [M] or None; [4,M]; [M] twice
    q_ptr,
    p_ptr,
    temperature_ptr,
    at_ptr,
    slant_ptr,
    scale_ptr,
    M,
    V,
    q_stride,
    p_stride,
    beta,
    o,  # `LossOptions` of the student's score
    t_o,  # and of the teacher's
    SCORE: tl.constexpr,
    T_SCORE: tl.constexpr,
    KIND: tl.constexpr,
    BN: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    lanes, rows = lane_grid(R, C), tl.program_id(0) * BN + tl.arange(0, BN)
    keep = rows < M
    by = cooling(temperature_ptr, rows, keep)
    q_start = row_start(q_ptr, rows, 1, q_stride, 0)[:, None, None]
    p_start = row_start(p_ptr, rows, 1, p_stride, 0)[:, None, None]
    q_top, q_log_s = tl.load(at_ptr + rows, mask=keep), tl.load(at_ptr + M + rows, mask=keep)
    p_top, p_log_s = tl.load(at_ptr + 2 * M + rows, mask=keep), tl.load(at_ptr + 3 * M + rows, mask=keep)
    slant, scale = tl.load(slant_ptr + rows, mask=keep), tl.load(scale_ptr + rows, mask=keep, other=0.0)
    if KIND == "jsd":
        slant /= LN2
    live = (scale != 0)[:, None, None]
    store_pair_gradient(
        q_start,
        p_start,
        q_top,
        q_log_s,
        p_top,
        p_log_s,
        slant,
        scale,
        live,
        keep,
        keep,
        lanes,
        V,
        by,
        beta,
        o,
        t_o,
        SCORE,
        T_SCORE,
        KIND,
        R * C,
    )


def launch_pairs(
    kernel,
    z: Tensor,
    teacher_z: Tensor,
    temperature: Optional[Tensor],  # [M,V] twice, [M]
    *given,
    o: DivergenceOptions,
    **flags,
):
    "A kernel of pairs of rows whose classes are over ranks."
    b = pair_blocks(z.shape[1])
    scores, options = dict(SCORE=score_fn(o.student), T_SCORE=score_fn(o.teacher)), (o.student, o.teacher)
    beta = () if kernel is pair_numbers_kernel else (o.beta,)
    with on_device(z):
        launch_kernel(
            kernel,
            (-(-len(z) // b.BN),),
            z,
            teacher_z,
            temperature,
            *given,
            *z.shape,
            z.stride(0),
            teacher_z.stride(0),
            *beta,
            *options,
            **scores,
            **flags,
            BN=b.BN,
            R=b.R,
            C=b.C,
            num_warps=b.warps,
        )


class JoinedPairs(NamedTuple):
    "What follows for each row from the numbers of all ranks."

    at: Tensor  # [4,M]: the largest score of the student, the logarithm of its sum of exponentials from there; of the teacher
    divergence: Tensor  # [M]
    slant: Tensor  # [M], the mean, by q, of the derivative by q


def cross_sum(
    score: Tensor, other: Tensor, row_max: Tensor, other_max: Tensor
) -> Tensor:  # [M,V] twice, [M] twice, to [M]
    "Σ e^(z - m) ((z - m) - (z' - m')), of scores and maxima of two models."
    gap = sub_max(score, row_max)
    e = gap.exp()
    return torch.where(e > 0, e * (gap - sub_max(other, other_max)), 0.0).sum(1)


def pair_numbers(
    z: Tensor, teacher_z: Tensor, o: DivergenceOptions, temperature: Optional[Tensor] = None
) -> Tensor:  # [M,V] twice, [M], to [5,M]
    "Of each row the student's largest score and sum of exponentials from it, the teacher's, and of a KL `cross_sum`."
    if not z.shape[1]:
        nothing = z.new_tensor([-torch.inf, 0, -torch.inf, 0, 0], dtype=acc_dtype(z.dtype))
        return nothing[:, None].repeat(1, len(z))
    if has_kernel(z) and has_kernel(teacher_z):
        numbers = z.new_empty(5, len(z), dtype=torch.float32)
        launch_pairs(pair_numbers_kernel, z, teacher_z, temperature, numbers, o=o, KIND=o.kind)
        return numbers
    found = []
    for i in pair_parts(z):
        t = part(temperature, i)
        q, p = plain_scores(z[i], o.student, t), plain_scores(teacher_z[i], o.teacher, t)
        p = p.to(q.dtype)
        tops = q.amax(1), p.amax(1)
        q_sum, p_sum = (sub_max(t, top).exp().sum(1) for t, top in zip((q, p), tops))
        given = (p, q, *tops[::-1]) if o.kind == "forward_kl" else (q, p, *tops)
        cross = torch.zeros_like(q_sum) if o.kind == "jsd" else cross_sum(*given)
        found.append(torch.stack([tops[0], q_sum, tops[1], p_sum, cross]))
    return torch.cat(found, 1)


def mixture_numbers(
    z: Tensor, teacher_z: Tensor, at: Tensor, o: DivergenceOptions, temperature: Optional[Tensor] = None
) -> Tensor:  # [M,V] twice, [4,M], [M], to [2,M]
    "KL(q‖m) and KL(p‖m), m the mixture of a Jensen-Shannon divergence, of the classes here."
    if has_kernel(z) and has_kernel(teacher_z):
        sums = z.new_empty(2, len(z), dtype=torch.float32)
        launch_pairs(pair_mixture_kernel, z, teacher_z, temperature, at, sums, o=o)
        return sums
    found = []
    for i in pair_parts(z):
        log_q, log_p, _ = pair_log_probs(z[i], teacher_z[i], at[:, i], o, part(temperature, i))
        log_m = mixture_log_probs(log_q, log_p, o.beta)
        each = [torch.where(t == -torch.inf, 0.0, t.exp() * (t - log_m)).sum(1) for t in (log_q, log_p)]
        found.append(torch.stack(each))
    return torch.cat(found, 1)


def pair_log_probs(
    z: Tensor,
    teacher_z: Tensor,
    at: Tensor,  # [M,V] twice, [4,M]
    o: DivergenceOptions,
    temperature: Optional[Tensor],  # [M]
) -> tuple[Tensor, Tensor, Tensor | float]:
    "log q and log p [M,V], and the slopes of the student's scores."
    (q, slope), p = score_and_slope(z, o.student, temperature), plain_scores(teacher_z, o.teacher, temperature)
    q_max, q_log_s, p_max, p_log_s = at
    return sub_max(q, q_max) - q_log_s[:, None], sub_max(p.to(q.dtype), p_max) - p_log_s[:, None], slope


def joined_cross(
    parts: Tensor, top: int, other: int, joined: Tensor, joined_other: Tensor
) -> Tensor:  # [R,5,M], to [M]
    "The ranks' `cross_sum` from the largest scores of all ranks; `top` and `other` say where a rank's are."
    share = (parts[:, top] - finite_max(joined)).exp()
    rise = finite_max(parts[:, top]) - finite_max(joined) - (finite_max(parts[:, other]) - finite_max(joined_other))
    return torch.where(share > 0, (parts[:, 4] + rise * parts[:, top + 1]) * share, 0.0).sum(0)


def join_pairs(
    parts: Tensor,  # [R,5,M], every rank's `pair_numbers`
    o: DivergenceOptions,
    mixture: Callable[[Tensor], Tensor],  # from `at` to the sum over ranks of `mixture_numbers`
) -> JoinedPairs:
    "Both softmaxes over all ranks' classes, and the divergence."
    q_top, p_top = parts[:, 0].amax(0), parts[:, 2].amax(0)
    whole = lambda top, k: ((parts[:, k] - finite_max(top)).exp() * parts[:, k + 1]).sum(0)
    q_sum, p_sum = whole(q_top, 0), whole(p_top, 2)
    at = torch.stack([q_top, q_sum.log(), p_top, p_sum.log()])
    between = at[3] - at[1]
    if o.kind == "forward_kl":
        slant = divergence = joined_cross(parts, 2, 0, p_top, q_top) / p_sum - between
    elif o.kind == "reverse_kl":
        slant = joined_cross(parts, 0, 2, q_top, p_top) / q_sum
        divergence = slant + between
    else:
        slant, cross = mixture(at)
        divergence = o.beta * cross + (1 - o.beta) * slant
    return JoinedPairs(at, divergence + 0 * (at[1] + at[3]), slant)  # a row without any probability is no number


def put_joined_gradient(
    z: Tensor,  # [M,V], overwritten
    teacher_z: Tensor,  # [M,V]
    joined: JoinedPairs,
    scale: Tensor,  # [M]
    o: DivergenceOptions,
    temperature: Optional[Tensor] = None,  # [M]
):
    "The gradient in the place of the student's logits; 0 where `scale` is."
    if has_kernel(z) and has_kernel(teacher_z):
        given = temperature, joined.at, joined.slant, scale
        return launch_pairs(pair_gradient_kernel, z, teacher_z, *given, o=o, KIND=o.kind)
    total = {  # Σ u of all ranks
        "forward_kl": torch.full_like(joined.slant, -1.0),
        "reverse_kl": joined.divergence + 1,
        "jsd": (1 - o.beta) * joined.slant,
    }[o.kind]
    for i in pair_parts(z):
        log_q, log_p, slope = pair_log_probs(z[i], teacher_z[i], joined.at[:, i], o, part(temperature, i))
        put_pair_gradient(z[i], log_q, divergence_terms(log_q, log_p, o)[1], total[i], slope, scale[i])


def divergence_rows(
    z: Tensor,
    teacher_z: Tensor,
    token_weight: Optional[Tensor],
    denominator: Optional[Tensor],
    o: DivergenceOptions,
    turn: bool,
    unscaled_grad: bool = False,
    temperature: Optional[Tensor] = None,
) -> Tensor:  # [M], of at least one row
    "`launch_divergence` by whatever runs here."
    how = denominator, o, turn, unscaled_grad
    if has_kernel(z) and has_kernel(teacher_z):
        return launch_divergence(z, teacher_z, token_weight, *how, temperature)
    rows = lambda i: (z[i], teacher_z[i], part(token_weight, i), *how, part(temperature, i))
    return torch.cat([reference_divergence(*rows(i)) for i in pair_parts(z)])


def soft_coefs(target: Tensor, weight: Optional[Tensor], o: LossOptions, dtype: torch.dtype) -> Tensor:
    "What multiplies each class's negative log-probability, [M,V]."
    a = target.to(dtype) * (1 - o.label_smoothing) + o.label_smoothing / target.shape[1]
    return a if weight is None else a * weight.to(dtype)


def reference_soft(
    raw: Tensor,  # [M,V]
    target: Tensor,  # [M,V]
    weight: Optional[Tensor],  # [V]
    token_weight: Optional[Tensor],  # [M]
    denominator: Optional[Tensor],
    o: LossOptions,
    turn: bool,
    unscaled_grad: bool = False,
) -> tuple[Tensor, Optional[Tensor]]:  # [M]; [M,V] where `turn`
    "`launch_soft` in PyTorch."
    z, slope = score_and_slope(raw, o)
    a, lse, log_q = soft_coefs(target, weight, o, z.dtype), z.logsumexp(1), z.log_softmax(1)
    w_t = torch.ones_like(lse) if token_weight is None else token_weight.to(z.dtype)
    share, live = w_t / plain_divisor(denominator), (w_t != 0)[:, None]
    losses = with_z_loss(-torch.where(a == 0, 0.0, a * log_q).sum(1), lse, o)
    losses = torch.where(live[:, 0], losses * share, 0.0)
    if not turn:
        return losses, None
    scale = w_t if unscaled_grad else share
    coef = a.sum(1) + z_loss_slope(lse, o)
    dz = (log_q.exp() * coef[:, None] - a) * slope * scale[:, None]
    return losses, torch.where(live, dz, 0.0).to(raw.dtype)


@jit
def soft_kernel(
    # [O,I,V]: logits, probabilities, and where the gradient goes, which may be z, or None
    z_ptr,
    t_ptr,
    dz_ptr,
    # [V], [M], [1], each or None; [M]
    weight_ptr,
    token_weight_ptr,
    denominator_ptr,
    loss_ptr,
    M,
    V,
    inner,
    z_stride_o,
    z_stride_i,
    z_stride_v,
    t_stride_o,
    t_stride_i,
    t_stride_v,
    d_stride_o,
    d_stride_i,
    d_stride_v,
    o,  # `LossOptions`
    SCORE: tl.constexpr,
    UNSCALED_GRAD: tl.constexpr,
    BN: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    B: tl.constexpr = R * C
    lanes, rows = lane_grid(R, C), tl.program_id(0) * BN + tl.arange(0, BN)
    keep = rows < M
    w_t = tl.where(keep, 1.0, 0.0)
    if token_weight_ptr is not None:
        w_t = tl.load(token_weight_ptr + rows, mask=keep, other=0.0).to(tl.float32)
    weighs = w_t != 0
    live, bound = weighs[:, None, None], V * tl.max(weighs.to(tl.int32), 0)
    z_start = row_start(z_ptr, rows, inner, z_stride_o, z_stride_i)[:, None, None]
    t_start = row_start(t_ptr, rows, inner, t_stride_o, t_stride_i)[:, None, None]
    row_max = tl.full([BN, C], -float("inf"), tl.float32)
    s = tl.zeros([BN, C], tl.float32)
    mass, below = s, s  # Σ a, Σ a (z - row_max)
    for first in tl.range(0, bound, B, num_stages=3):
        raw, inside = load_block(z_start, first, lanes, V, z_stride_v, live, True, "")
        t, there = load_block(t_start, first, lanes, V, t_stride_v, live, True, "")
        z, slope = SCORE(raw.to(tl.float32), o)
        z = tl.where(inside, z, -float("inf"))
        a = t.to(tl.float32) * (1 - o.label_smoothing) + o.label_smoothing / V
        a = tl.where(inside, a * class_weight(weight_ptr, first + lanes, inside), 0.0)
        old = zero_if_neg_inf(row_max)
        row_max, s = online_softmax_step(row_max, s, z, 1.0)
        new = zero_if_neg_inf(row_max)
        below += (old - new) * mass + tl.sum(tl.where(a != 0, a * (z - new[:, None, :]), 0.0), 1)
        mass += tl.sum(a, 1)
    top, whole = merge_lanes(row_max, s, 1.0)
    below = tl.sum(below + (zero_if_neg_inf(row_max) - zero_if_neg_inf(top)[:, None]) * mass, 1)
    total, log_s = tl.sum(mass, 1), tl.log(whole)
    lse = top + log_s
    share = w_t / divisor_of(denominator_ptr)
    loss = tl.where(total == 0, 0.0, total * log_s) - below + o.z_loss * lse * lse
    tl.store(loss_ptr + rows, tl.where(weighs, loss * share, 0.0), mask=keep)
    if dz_ptr is not None:
        d_start = row_start(dz_ptr, rows, inner, d_stride_o, d_stride_i)[:, None, None]
        scale = (w_t if UNSCALED_GRAD else share)[:, None, None]
        coef, at = (total + 2 * o.z_loss * lse)[:, None, None], top[:, None, None]
        inv_s, last = (1 / whole)[:, None, None], (tl.cdiv(V, B) - 1) * B
        for back in range(0, V, B):
            raw, inside = load_block(z_start, last - back, lanes, V, z_stride_v, live, True, "")
            t, there = load_block(t_start, last - back, lanes, V, t_stride_v, live, True, "")
            z, slope = SCORE(raw.to(tl.float32), o)
            cols = last - back + lanes
            a = t.to(tl.float32) * (1 - o.label_smoothing) + o.label_smoothing / V
            dz = coef * exp2_diff(z, at, 1.0) * inv_s - a * class_weight(weight_ptr, cols, inside)
            dz = tl.where(live, dz * scale * slope, 0.0).to(dz_ptr.dtype.element_ty)
            tl.store(d_start + cols.to(tl.int64) * d_stride_v, dz, mask=keep[:, None, None] & (cols < V))


def launch_soft(
    # [O,I,V]; the last is written, and may be z
    z: Tensor,
    target: Tensor,
    dz: Optional[Tensor],
    weight: Optional[Tensor],  # [V]
    token_weight: Optional[Tensor],  # [M]
    denominator: Optional[Tensor],  # a scalar
    o: LossOptions,
    unscaled_grad: bool = False,
    blocks: Optional[PairBlocks] = None,
) -> Tensor:  # [M]
    "Weighted losses of the rows against probabilities, and their gradient in `dz`."
    m, v, b = z.shape[0] * z.shape[1], z.shape[2], blocks or pair_blocks(z.shape[2])
    losses = z.new_empty(m, dtype=torch.float32)
    with on_device(z):
        launch_kernel(
            soft_kernel,
            (-(-m // b.BN),),
            z,
            target,
            dz,
            weight,
            token_weight,
            denominator,
            losses,
            m,
            v,
            z.shape[1],
            *z.stride(),
            *target.stride(),
            *(z if dz is None else dz).stride(),
            o,
            SCORE=score_fn(o),
            UNSCALED_GRAD=unscaled_grad,
            BN=b.BN,
            R=b.R,
            C=b.C,
            num_warps=b.warps,
        )
    return losses


def soft_rows(
    z: Tensor,
    target: Tensor,
    dz: Optional[Tensor],
    weight: Optional[Tensor],
    token_weight: Optional[Tensor],
    denominator: Optional[Tensor],
    o: LossOptions,
    unscaled_grad: bool = False,
) -> Tensor:  # [M]
    "`launch_soft` by whatever runs here."
    if has_kernel(z):
        return launch_soft(z, target, dz, weight, token_weight, denominator, o, unscaled_grad)
    flat = lambda t: t.reshape(-1, t.shape[-1])
    losses, found = reference_soft(
        flat(z), flat(target), weight, token_weight, denominator, o, dz is not None, unscaled_grad
    )
    if dz is not None:
        dz.copy_(found.view(z.shape))
    return losses


def soft_loss_fwd(
    input: Tensor,  # [O,I,V]
    target: Tensor,  # [O,I,V]
    weight: Optional[Tensor],  # [V]
    token_weight: Optional[Tensor],  # [M]
    denominator: Optional[Tensor],
    o: LossOptions,
) -> Tensor:  # [M]
    "Losses of logits against probabilities."
    return soft_rows(input, target, None, weight, token_weight, denominator, o)


def soft_loss_bwd(
    g: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor],
    token_weight: Optional[Tensor],
    denominator: Optional[Tensor],
    o: LossOptions,
) -> Tensor:  # [O,I,V]
    "The gradient of the logits, of upstream gradients `g [M]`."
    dz, each = torch.empty_like(input), g if token_weight is None else g * token_weight
    soft_rows(input, target, dz, weight, each.contiguous(), denominator, o)
    return dz


def save_soft_loss(ctx, inputs, output):
    "The inputs."
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5]


soft_loss_grad = operator("soft_loss_grad", soft_loss_bwd, fake=lambda g, input, *_: torch.empty_like(input))
soft_loss = operator(
    "soft_loss",
    soft_loss_fwd,
    save=save_soft_loss,
    fake=lambda input, *_: input.new_empty(input.shape[0] * input.shape[1], dtype=acc_dtype(input.dtype)),
    backward=lambda ctx, needs, g: {"input": soft_loss_grad(g, *ctx.saved_tensors, ctx.options)},
)


def label_terms(
    z: Tensor,  # [M,V]
    target: Tensor,  # [M,K]
    weight: Optional[Tensor],  # [V]
    share: Optional[Tensor],  # [M,K]
    o: LossOptions,
) -> RowTerms:  # [M,K] each, but of the classes [V]
    "Labels and weights, as if each row stood once with each of its labels."
    rows = z[:1].expand(target.numel(), -1)  # for its size and dtype
    flat = row_terms(rows, target.reshape(-1), weight, None if share is None else share.reshape(-1), o)
    return RowTerms(*(t.view(target.shape) for t in flat[:-1]), flat.w)


def reference_labels(
    raw: Tensor,  # [M,V]
    target: Tensor,  # [M,K]
    weight: Optional[Tensor],  # [V]
    share: Optional[Tensor],  # [M,K]
    denominator: Optional[Tensor],
    o: LossOptions,
    turn: bool,
    unscaled_grad: bool = False,
) -> tuple[Tensor, Optional[Tensor]]:  # [M]; [M,V] where `turn`
    "`launch_labels` in PyTorch."
    z, slope = score_and_slope(raw, o)
    lse, log_q, t = z.logsumexp(1, keepdim=True), z.log_softmax(1), label_terms(z, target, weight, share, o)
    coefs = lambda divisor: plain_row_coefs(lse, t, o, divisor)
    _, target_coef, smoothing_coef = coefs(plain_divisor(denominator))
    losses = with_z_loss(-target_coef * log_q.gather(1, t.label), lse, o, t.w_t, plain_divisor(denominator))
    if o.label_smoothing:
        losses = losses - smoothing_coef * (log_q @ t.w)[:, None]
    losses = torch.where(t.ignored, 0.0, torch.where(t.valid, losses, torch.nan)).sum(1)
    if not turn:
        return losses, None
    softmax_coef, target_coef, smoothing_coef = coefs(1.0 if unscaled_grad else plain_divisor(denominator))
    dz = log_q.exp_().mul_(softmax_coef.sum(1, keepdim=True))
    if o.label_smoothing:
        dz.addr_(smoothing_coef.sum(1), t.w, alpha=-1)
    dz.scatter_add_(1, t.label, -target_coef)
    if not o.keeps_scores:
        dz *= slope
    dead = t.ignored.all(1) | ~(t.ignored | t.valid).all(1)
    return losses, dz.masked_fill_(dead[:, None], 0.0).to(raw.dtype)


@jit
def labels_scan(
    start,
    first,
    lanes,
    V,
    stored,
    row_max,
    s,
    total,
    near,
    weight_ptr,
    o,
    SCORE: tl.constexpr,
    SMOOTH: tl.constexpr,
    LOG2_SCALE: tl.constexpr,
    EDGE: tl.constexpr,
):
    "Maximum, sum and Σ w (z - near) of the lanes [BN,C], after a block of logits; `near` is [BN,1,1]."
    raw, inside = load_block(start, first, lanes, V, 1, stored, EDGE, "evict_last")
    z, slope = SCORE(raw.to(tl.float32), o)
    if EDGE:
        z = tl.where(inside, z, -float("inf"))
    row_max, s = online_softmax_step(row_max, s, z, LOG2_SCALE)
    if SMOOTH:
        total += tl.sum(tl.where(inside, (z - near) * class_weight(weight_ptr, first + lanes, inside), 0.0), 1)
    return row_max, s, total


@jit
def labels_gradient(
    start,
    out,
    first,
    lanes,
    V,
    stored,
    live,
    row_max,
    softmax_coef,
    smoothing_coef,
    weight_ptr,
    o,
    SCORE: tl.constexpr,
    SMOOTH: tl.constexpr,
    LOG2_SCALE: tl.constexpr,
    EDGE: tl.constexpr,
):
    "Write the gradient of a block, but for the labels; the coefficients [BN,1,1], the first is over s."
    raw, inside = load_block(start, first, lanes, V, 1, stored, EDGE, "evict_first")
    z, slope = SCORE(raw.to(tl.float32), o)
    cols = first + lanes
    dz = softmax_coef * exp2_diff(z * LOG2_SCALE, row_max, LOG2_SCALE)
    if SMOOTH:
        dz -= smoothing_coef * class_weight(weight_ptr, cols, inside)
    dz = tl.where(live, dz * slope, 0.0).to(out.dtype.element_ty)
    if EDGE:
        tl.store(out + cols.to(tl.int64), dz, mask=inside)
    else:
        tl.store(out + cols.to(tl.int64), dz)


@jit
def labels_kernel(
    # [M,V]: logits, and where the gradient goes, which may be z, or None; [M,K]
    z_ptr,
    dz_ptr,
    y_ptr,
    # [V], [M,K], [1], [1], each or None; [M]
    weight_ptr,
    share_ptr,
    all_weight_ptr,
    denominator_ptr,
    loss_ptr,
    M,
    V,
    K,
    z_stride,
    d_stride,
    o,  # `LossOptions`
    SCORE: tl.constexpr,
    SMOOTH: tl.constexpr,
    LOG2_SCALE: tl.constexpr,
    UNSCALED_GRAD: tl.constexpr,
    BN: tl.constexpr,  # 1 unless a row fits in a block
    KP: tl.constexpr,  # K, rounded up to a power of two
    R: tl.constexpr,
    C: tl.constexpr,
):
    B: tl.constexpr = R * C
    lanes, rows, each = lane_grid(R, C), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, KP)[None, :]
    keep, size, own = rows < M, tl.cast(M, tl.int64) * K, rows.to(tl.int64)[:, None] * K
    at = tl.where(each < K, own + each, size)  # a place beyond all labels is ignored
    y, ignored, valid = load_labels(y_ptr, at, size, V, o.ignore_index)
    counts = (tl.max(valid.to(tl.int32), 1) > 0) & (tl.max((~ignored & ~valid).to(tl.int32), 1) == 0)
    start = row_start(z_ptr, rows, 1, z_stride, 0)
    raw_y = tl.load(start[:, None] + y.to(tl.int64), mask=valid, other=0.0)
    z_y, slope_y = SCORE(raw_y.to(tl.float32), o)
    near = zero_if_neg_inf(tl.max(tl.where(valid, z_y, -float("inf")), 1))  # where scores may share an offset
    edge = tl.cdiv(tl.maximum(V - B, 0), B) * B  # where the last block starts
    busy = tl.max(counts.to(tl.int32), 0)  # nothing of an ignored row
    start, stored, live = start[:, None, None], (keep & counts)[:, None, None], counts[:, None, None]
    about = near[:, None, None]
    row_max = tl.full([BN, C], -float("inf"), tl.float32)
    s = tl.zeros([BN, C], tl.float32)
    total = s
    for first in tl.range(0, edge * busy, B, num_stages=3):
        row_max, s, total = labels_scan(
            start, first, lanes, V, stored, row_max, s, total, about, weight_ptr, o, SCORE, SMOOTH, LOG2_SCALE, False
        )
    row_max, s, total = labels_scan(
        start, edge, lanes, V, stored, row_max, s, total, about, weight_ptr, o, SCORE, SMOOTH, LOG2_SCALE, True
    )
    row_max, s = merge_lanes(row_max, s, LOG2_SCALE)
    log_s = tl.log(s)
    lse = (row_max / LOG2_SCALE + log_s)[:, None]
    w_y, w_t, w_all = row_weights(weight_ptr, share_ptr, all_weight_ptr, y, valid, at, V)
    divisor = divisor_of(denominator_ptr)
    softmax_coef, target_coef, smoothing_coef, z_coef = row_coefs(lse, w_y, w_t, w_all, o, V, divisor)
    log_p = (z_y * LOG2_SCALE - row_max[:, None]) / LOG2_SCALE - log_s[:, None]
    total = tl.sum(total, 1)[:, None] + (near[:, None] - zero_if_neg_inf(z_y)) * w_all  # Σ w (z - z_y)
    losses = row_loss(lse, log_p, total, target_coef, smoothing_coef, z_coef, w_all, ignored, valid)
    tl.store(loss_ptr + rows, tl.sum(losses, 1), mask=keep)
    if dz_ptr is not None:
        out = row_start(dz_ptr, rows, 1, d_stride, 0)
        if UNSCALED_GRAD:
            divisor = 1.0
            softmax_coef, target_coef, smoothing_coef, z_coef = row_coefs(lse, w_y, w_t, w_all, o, V, divisor)
        all_coef, all_smoothing = tl.sum(softmax_coef, 1) / s, tl.sum(smoothing_coef, 1)
        top, wide, p_coef = row_max[:, None, None], out[:, None, None], all_coef[:, None, None]
        u_coef, written = all_smoothing[:, None, None], keep[:, None, None]
        tl.debug_barrier()  # no lane overwrites a label's score before all have read it
        labels_gradient(
            start,
            wide,
            edge,
            lanes,
            V,
            written,
            live,
            top,
            p_coef,
            u_coef,
            weight_ptr,
            o,
            SCORE,
            SMOOTH,
            LOG2_SCALE,
            True,
        )
        for back in range(0, edge * busy, B):
            labels_gradient(
                start,
                wide,
                edge - B - back,
                lanes,
                V,
                written,
                live,
                top,
                p_coef,
                u_coef,
                weight_ptr,
                o,
                SCORE,
                SMOOTH,
                LOG2_SCALE,
                False,
            )
        for blank in range(0, edge * (1 - busy), B):
            tl.store(wide + (blank + lanes).to(tl.int64), tl.zeros([BN, R, C], dz_ptr.dtype.element_ty))
        taken = tl.zeros([BN, KP], tl.float32)
        for k in range(0, K):
            at_k = own + k
            y_k, ignored_k, valid_k = load_labels(y_ptr, at_k, size, V, o.ignore_index)
            w_k, share_k, w_all = row_weights(weight_ptr, share_ptr, all_weight_ptr, y_k, valid_k, at_k, V)
            taken += tl.where(y == y_k, (1 - o.label_smoothing) * (w_k * share_k / divisor), 0.0)
        dz_y = all_coef[:, None] * exp2_diff(z_y * LOG2_SCALE, row_max[:, None], LOG2_SCALE) - taken
        if SMOOTH:
            dz_y -= all_smoothing[:, None] * class_weight(weight_ptr, y, valid)
        tl.debug_barrier()  # the block's own stores come first
        tl.store(
            out[:, None] + y.to(tl.int64), (dz_y * slope_y).to(dz_ptr.dtype.element_ty), mask=valid & counts[:, None]
        )


def label_blocks(n_classes: int) -> PairBlocks:
    "Several short rows a program; the longer the row, the more threads for it, and the fewer rows at once."
    if n_classes <= 1024:
        return pair_blocks(n_classes)
    return PairBlocks(1, 2, 2048, 8) if n_classes <= 65536 else PairBlocks(1, 2, 8192, 32)


def launch_labels(
    z: Tensor,  # [M,V], classes next to each other
    target: Tensor,  # [M,K]
    dz: Optional[Tensor],  # [M,V], written; may be z
    weight: Optional[Tensor],  # [V]
    share: Optional[Tensor],  # [M,K]
    denominator: Optional[Tensor],  # a scalar
    o: LossOptions,
    unscaled_grad: bool = False,
    blocks: Optional[PairBlocks] = None,
) -> Tensor:  # [M]
    "Each row's loss, the sum over its labels, and the gradient in `dz`."
    (m, v), k, b = z.shape, target.shape[1], blocks or label_blocks(z.shape[1])
    losses = z.new_empty(m, dtype=torch.float32)
    with on_device(z):
        launch_kernel(
            labels_kernel,
            (-(-m // b.BN),),
            z,
            dz,
            target,
            weight,
            share,
            all_weights(weight),
            denominator,
            losses,
            m,
            v,
            k,
            z.stride(0),
            (z if dz is None else dz).stride(0),
            o,
            SCORE=score_fn(o),
            SMOOTH=o.label_smoothing > 0,
            LOG2_SCALE=log2_scale(z),
            UNSCALED_GRAD=unscaled_grad,
            BN=b.BN,
            KP=next_power_of_2(max(k, 1)),
            R=b.R,
            C=b.C,
            num_warps=b.warps,
        )
    return losses


def labels_rows(
    z: Tensor,
    target: Tensor,
    dz: Optional[Tensor],
    weight: Optional[Tensor],
    share: Optional[Tensor],
    denominator: Optional[Tensor],
    o: LossOptions,
    unscaled_grad: bool = False,
) -> Tensor:  # [M]
    "`launch_labels` by whatever runs here."
    if has_kernel(z):
        return launch_labels(z, target, dz, weight, share, denominator, o, unscaled_grad)
    losses, found = reference_labels(z, target, weight, share, denominator, o, dz is not None, unscaled_grad)
    if dz is not None:
        dz.copy_(found)
    return losses


def labels_loss_fwd(
    input: Tensor,  # [M,V]
    target: Tensor,  # [M,K]
    weight: Optional[Tensor],  # [V]
    share: Optional[Tensor],  # [M,K]
    denominator: Optional[Tensor],
    o: LossOptions,
) -> Tensor:  # [M]
    "Losses of logits against several labels a row."
    return labels_rows(input.contiguous(), target, None, weight, share, denominator, o)


def labels_loss_bwd(
    g: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor],
    share: Optional[Tensor],
    denominator: Optional[Tensor],
    o: LossOptions,
) -> Tensor:  # [M,V]
    "The gradient of the logits, of upstream gradients `g [M]`."
    dz, each = input.new_empty(input.shape), g[:, None].expand(target.shape) if share is None else g[:, None] * share
    labels_rows(input.contiguous(), target, dz, weight, each.contiguous(), denominator, o)
    return dz


labels_loss_grad = operator("labels_loss_grad", labels_loss_bwd, fake=lambda g, input, *_: input.new_empty(input.shape))
labels_loss = operator(
    "labels_loss",
    labels_loss_fwd,
    save=save_soft_loss,
    fake=lambda input, *_: input.new_empty(input.shape[0], dtype=acc_dtype(input.dtype)),
    backward=lambda ctx, needs, g: {"input": labels_loss_grad(g, *ctx.saved_tensors, ctx.options)},
)
