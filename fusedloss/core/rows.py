"""What Triton kernels of rows share: labels, weights and loads, the loss of a row from its sums, its gradient."""

from typing import Optional

import torch
from torch import Tensor

from fusedloss.core.softmax import rescaled, rescaled_moment, zero_if_neg_inf
from fusedloss.core.triton import jit, tl


@jit
def load_labels(y_ptr, rows, M, V, ignore_index):
    "Labels [BN], -1 unless a class; which are ignored; which are classes and not ignored."
    y = tl.load(y_ptr + rows, mask=rows < M, other=ignore_index)
    ignored, inside = y == ignore_index, (y >= 0) & (y < V)
    return tl.where(inside, y, -1).to(tl.int32), ignored, inside & (y != ignore_index)


@jit
def label_weights(weight_ptr, token_weight_ptr, y, valid, rows):
    "Weight of the target's class and of the token, [BN]; 0 where not valid."
    w_y = tl.where(valid, 1.0, 0.0)
    w_t = w_y
    if weight_ptr is not None:
        w_y = tl.load(weight_ptr + y, mask=valid, other=0.0).to(tl.float32)
    if token_weight_ptr is not None:
        w_t = tl.load(token_weight_ptr + rows, mask=valid, other=0.0).to(tl.float32)
    return w_y, w_t


@jit
def row_weights(weight_ptr, token_weight_ptr, all_weight_ptr, y, valid, rows, V):
    "Weight of the target's class, of the token [BN], and of all classes together."
    w_y, w_t = label_weights(weight_ptr, token_weight_ptr, y, valid, rows)
    w_all = V * 1.0
    if all_weight_ptr is not None:
        w_all = tl.load(all_weight_ptr).to(tl.float32)
    return w_y, w_t, w_all


@jit
def row_coefs(lse, w_y, w_t, w_all, o, V, divisor):
    "What multiplies p, the one-hot, and the class weights in the gradient of a row, and lse² in its loss: [BN] each."
    each = w_t / divisor  # infinite if class weights alone are tiny
    target_coef = (1 - o.label_smoothing) * (w_y * w_t / divisor)
    smoothing_coef = tl.where(o.label_smoothing > 0, o.label_smoothing / V * each, 0.0)
    z_coef = tl.where(o.z_loss > 0, o.z_loss * each, 0.0)
    return target_coef + smoothing_coef * w_all + 2 * z_coef * lse, target_coef, smoothing_coef, z_coef


@jit
def row_loss(lse, log_p, total, target_coef, smoothing_coef, z_coef, w_all, ignored, valid):
    "The loss [BN] from the target's log-probability and Σ w (z - z_y); NaN for labels out of range."
    log_p = tl.where(log_p > 0, 0.0, log_p)  # a rounding may put it above, by 1e-7
    loss = -(smoothing_coef * w_all + target_coef) * log_p - smoothing_coef * total + z_coef * lse * lse
    return tl.where(valid, loss, tl.where(ignored, 0.0, float("nan")))


@jit
def divisor_of(denominator_ptr):
    "What a loss is divided by: the denominator, or one without it or where it is 0. Its inverse may overflow."
    if denominator_ptr is None:
        return 1.0
    else:
        total = tl.load(denominator_ptr).to(tl.float32)
        return tl.where(total == 0, 1.0, total)


@jit
def row_start(ptr, rows, inner, stride_o, stride_i):
    "Where each row [BN] of a tensor [O,I,V] starts; `inner` is I."
    o, i = (rows // inner).to(tl.int64), (rows % inner).to(tl.int64)
    return ptr + o * stride_o + i * stride_i


@jit
def class_weight(weight_ptr, cols, inside):
    "Weights of the classes `cols`, or 1."
    if weight_ptr is None:
        return 1.0
    else:
        at = tl.broadcast_to(weight_ptr + cols, inside.shape)  # a mask is not, in Triton 3.4
        return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@jit
def load_block(start, first, lanes, size, stride_v, stored, EDGE: tl.constexpr, KEEP: tl.constexpr):
    "Logits of one block, and which of them exist; only at an edge does the load ask."
    cols = first + lanes
    inside = stored & (cols < size)
    at = start + cols.to(tl.int64) * stride_v
    if EDGE:
        return tl.load(at, mask=inside, other=0.0, eviction_policy=KEEP), inside
    else:
        return tl.load(at, eviction_policy=KEEP), inside


def all_weights(
    weight: Optional[Tensor],  # [V]
) -> Optional[Tensor]:  # a scalar
    "The class weights' sum, on their device."
    return None if weight is None else weight.sum(dtype=torch.float32)


@jit
def finish_kernel(
    sums_ptr,  # [7, M * parts] of `scan_kernel`
    y_ptr,  # [M]
    # [V], [M], [1], each or None
    weight_ptr,
    token_weight_ptr,
    all_weight_ptr,
    denominator_ptr,  # [1] or None
    loss_ptr,  # [M]
    lse_ptr,  # [M]
    entropy_ptr,  # [M] with ENTROPY
    rows_ptr,  # [2 to 6, M]: row_max, s; with RANKS the target's rank, maximum, norm; with MEAN it
    M,
    V,
    parts,
    o,
    TOTAL: tl.constexpr,
    ENTROPY: tl.constexpr,
    RANKS: tl.constexpr,
    MEAN: tl.constexpr,
    LOG2_SCALE: tl.constexpr,
    BN: tl.constexpr,
):
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    y, ignored, valid = load_labels(y_ptr, rows, M, V, o.ignore_index)
    keep, at, size = rows < M, sums_ptr + rows * parts, tl.cast(M, tl.int64)
    step = size * parts
    z_y = tl.load(at + 2 * step, mask=keep, other=0.0)
    row_max = tl.full([BN], -float("inf"), tl.float32)
    s = tl.zeros([BN], tl.float32)
    total, moment, ahead, squares = s, s, s, s
    for part in range(parts):
        part_max = tl.load(at + part, mask=keep, other=-float("inf"))
        part_s = tl.load(at + part + step, mask=keep, other=0.0)
        new_max = tl.maximum(row_max, part_max)
        if TOTAL:
            total += tl.load(at + part + 3 * step, mask=keep, other=0.0)
        if ENTROPY:
            part_moment = tl.load(at + part + 4 * step, mask=keep, other=0.0)
            moment = rescaled_moment(moment, s, row_max, new_max, LOG2_SCALE) + rescaled_moment(
                part_moment, part_s, part_max, new_max, LOG2_SCALE
            )
        if RANKS:
            ahead += tl.load(at + part + 5 * step, mask=keep, other=0.0)
            squares += tl.load(at + part + 6 * step, mask=keep, other=0.0)
        s = rescaled(s, row_max, new_max, LOG2_SCALE) + rescaled(part_s, part_max, new_max, LOG2_SCALE)
        row_max = new_max
    log_s = tl.log(s)
    lse = row_max / LOG2_SCALE + log_s
    w_y, w_t, w_all = row_weights(weight_ptr, token_weight_ptr, all_weight_ptr, y, valid, rows, V)
    softmax_coef, target_coef, smoothing_coef, z_coef = row_coefs(
        lse, w_y, w_t, w_all, o, V, divisor_of(denominator_ptr)
    )
    smoothed = tl.where(o.label_smoothing > 0, total, 0.0)  # 0 · -inf is no number
    loss = row_loss(
        lse,
        (z_y * LOG2_SCALE - row_max) / LOG2_SCALE - log_s,
        smoothed,
        target_coef,
        smoothing_coef,
        z_coef,
        w_all,
        ignored,
        valid,
    )
    tl.store(loss_ptr + rows, loss, mask=keep)
    tl.store(lse_ptr + rows, tl.where(valid, lse, 0.0), mask=keep)
    tl.store(rows_ptr + rows, row_max, mask=keep)
    tl.store(rows_ptr + M + rows, s, mask=keep)
    if ENTROPY:
        tl.store(entropy_ptr + rows, tl.where(valid, log_s - moment / s, 0.0), mask=keep)
    if RANKS:
        tl.store(rows_ptr + 2 * size + rows, tl.where(valid, ahead, -1.0), mask=keep)
        tl.store(rows_ptr + 3 * size + rows, tl.where(valid, row_max / LOG2_SCALE, 0.0), mask=keep)
        tl.store(rows_ptr + 4 * size + rows, tl.where(valid, tl.sqrt(squares), 0.0), mask=keep)
    if MEAN:
        at_mean = rows_ptr + (2 + 3 * RANKS) * size + rows
        tl.store(at_mean, tl.where(valid, zero_if_neg_inf(z_y) + total / V, 0.0), mask=keep)


@jit
def row_gradient(
    rows_ptr,  # [2..,M]
    weight_ptr,  # [V]
    token_weight_ptr,  # [M]
    all_weight_ptr,  # [1]
    # upstream [M], each or None; [1] or None
    g_loss_ptr,
    g_lse_ptr,
    denominator_ptr,
    y,
    valid,
    rows,
    M,
    V,
    g_loss_stride,
    g_lse_stride,
    o,
    LOG2_SCALE: tl.constexpr,
):
    "Maximum and sum of rows [BN], and what multiplies p, the one-hot and the class weights."
    w_y, w_t, w_all = row_weights(weight_ptr, token_weight_ptr, all_weight_ptr, y, valid, rows, V)
    row_max = tl.load(rows_ptr + rows, mask=valid, other=0.0)
    s = tl.load(rows_ptr + M + rows, mask=valid, other=1.0)
    lse = row_max / LOG2_SCALE + tl.log(s)
    softmax_coef, target_coef, smoothing_coef, _ = row_coefs(lse, w_y, w_t, w_all, o, V, divisor_of(denominator_ptr))
    g = tl.zeros_like(softmax_coef)
    if g_loss_ptr is not None:
        g += tl.load(g_loss_ptr + rows.to(tl.int64) * g_loss_stride, mask=valid, other=0.0)
    softmax_coef *= g
    if g_lse_ptr is not None:
        softmax_coef += tl.load(g_lse_ptr + rows.to(tl.int64) * g_lse_stride, mask=valid, other=0.0)
    return row_max, s, softmax_coef, target_coef * g, smoothing_coef * g
