"""Unit vectors and their gradients, and the scores of a cosine head in tiles: as PyTorch defines them, and as Triton makes them."""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from fusedloss.core.checks import acc_dtype
from fusedloss.core.devices import device_of
from fusedloss.core.products import (
    program_tiles,
    run_tile,
    store_tile,
    swizzle_tile,
    tile_product,
    tile_slices,
    wide_product,
)
from fusedloss.core.softmax import carried, exp2_diff, log2_scale, merge_parts, online_softmax_step
from fusedloss.core.tiling import deeper, fastest, multiprocessors, operand, run_length, Tiling, tiling_of
from fusedloss.core.triton import has_kernel, jit, launch_kernel, on_device, tl
from fusedloss.core.tuning import launcher


EPS = 1e-5  # the shortest row that counts as having a direction


def divisors(norms: Tensor, eps: float = EPS) -> Tensor:
    "What rows of these norms are divided by: the norms, at least `eps`; 1 for a row of zeros."
    return torch.where(norms > 0, norms.clamp(min=eps), 1.0)


def lengths(
    t: Tensor,  # [..., H]
    eps: float = EPS,
) -> Tensor:  # [...], in `acc_dtype`
    "`divisors` of rows."
    return divisors(torch.linalg.vector_norm(t, dim=-1, dtype=acc_dtype(t.dtype)), eps)


class Target(NamedTuple):
    "Where each row's target stands in a tile."

    column: Tensor  # [BN,1], the nearest column of the tile
    inside: Tensor  # [BN,1], whether that column is the target's


def locate(y: Tensor, j: slice) -> Target:
    "Find the targets `y [BN]` among the classes `j`."
    column = (y - j.start)[:, None]
    nearest = column.clamp(0, j.stop - j.start - 1)
    return Target(nearest, column == nearest)


class HeadConfig(NamedTuple):
    "How a cosine head scores a row's negatives, the classes that are not its target."

    centers: int = 1  # K, vectors of a class, of which the nearest counts
    scale: float = 64.0
    circle_margin: float = -1.0  # of Circle, which reweights every score; below 0: none
    constant_weights: bool = False  # whether the gradient takes Circle's weights for constants
    eps: float = EPS  # of `lengths`
    conflict: float = 2.0  # cosines above it are no negatives; 2: all are
    conflict_score: float = -torch.inf  # theirs: -inf, or 0
    as_given: bool = False  # whether rows of the input count as they are: unit rows times a learned scale

    @property
    def tile_scale(self) -> float:  # what a tile of scores holds, over cosines
        return self.scale if self.circle_margin < 0 else 1.0


def reweighted_logits(
    z: Tensor,  # [BN,BV] as a tile has them
    o: HeadConfig,
) -> Tensor:  # [BN,BV]
    "Scores of the negatives: z itself, or what Circle's weights make of it."
    if o.circle_margin < 0:
        return z
    return (z + o.circle_margin).clamp_(min=0).mul_(z - o.circle_margin).mul_(o.scale)


def reweighted_slope(
    z: Tensor,  # [BN,BV] as a tile has them
    o: HeadConfig,
) -> Tensor:  # [BN,BV]
    "Derivative of Circle's `reweighted_logits` by z."
    weights = (z + o.circle_margin).clamp_(min=0)
    return (weights if o.constant_weights else 2 * z * (weights > 0)).mul_(o.scale)


def mask_targets(
    z: Tensor,  # [BN,BV]
    target: Target,  # from `locate`
) -> Tensor:
    "Scores with those of the targets at -inf, in place."
    at = torch.where(target.inside, -torch.inf, z.gather(1, target.column))
    return z.scatter_(1, target.column, at)


@jit
def unit_rows_block(
    block,
    t_ptr,  # [V,H]
    rows_ptr,  # [R] or None
    unit_ptr,  # [R,H]
    inverse_ptr,  # [R]
    R,
    H,
    stride_r,
    stride_h,
    eps,
    BR: tl.constexpr,
    BH: tl.constexpr,
):
    "Unit rows and inverse lengths of BR rows."
    out_rows = block.to(tl.int64) * BR + tl.arange(0, BR)
    inside, row = out_rows < R, out_rows
    if rows_ptr is not None:
        row = tl.load(rows_ptr + out_rows, mask=inside, other=-1)
    alive = inside & (row >= 0)
    start, squares = t_ptr + (row * stride_r)[:, None], tl.zeros([BR], tl.float32)
    for k in range(0, H, BH):
        cols = k + tl.arange(0, BH)
        t = tl.load(
            start + (cols.to(tl.int64) * stride_h)[None, :], mask=alive[:, None] & (cols < H)[None, :], other=0.0
        ).to(tl.float32)
        squares += tl.sum(t * t, 1)
    norm = tl.sqrt(squares)
    inverse = tl.where(norm > 0, 1 / tl.maximum(norm, eps), 1.0)
    for k in range(0, H, BH):  # the second time from the cache
        cols = k + tl.arange(0, BH)
        t = tl.load(
            start + (cols.to(tl.int64) * stride_h)[None, :], mask=alive[:, None] & (cols < H)[None, :], other=0.0
        ).to(tl.float32)
        unit = (t * inverse[:, None]).to(unit_ptr.dtype.element_ty)
        tl.store(unit_ptr + (out_rows * H)[:, None] + cols[None, :], unit, mask=inside[:, None] & (cols < H)[None, :])
    sign = tl.where(norm > eps, 1.0, -1.0)  # a short row has no direction
    tl.store(inverse_ptr + out_rows, inverse * sign, mask=inside)


@jit
def unit_kernel(
    x_ptr,
    x_rows_ptr,
    ux_ptr,
    x_inverse_ptr,
    N,
    x_stride_n,
    x_stride_h,
    # two matrices at once
    w_ptr,
    w_rows_ptr,
    uw_ptr,
    w_inverse_ptr,
    T,
    w_stride_v,
    w_stride_h,
    H,
    eps,
    BR: tl.constexpr,
    BH: tl.constexpr,
):
    x_programs = tl.cdiv(N, BR)
    if tl.program_id(0) < x_programs:
        unit_rows_block(
            tl.program_id(0), x_ptr, x_rows_ptr, ux_ptr, x_inverse_ptr, N, H, x_stride_n, x_stride_h, eps, BR, BH
        )
    else:
        unit_rows_block(
            tl.program_id(0) - x_programs,
            w_ptr,
            w_rows_ptr,
            uw_ptr,
            w_inverse_ptr,
            T,
            H,
            w_stride_v,
            w_stride_h,
            eps,
            BR,
            BH,
        )


def row_block(h: int) -> tuple[int, int]:  # BR, BH
    "Rows and features of a program that sweeps rows."
    width = min(1024, max(16, 1 << max(h - 1, 0).bit_length()))
    return 2048 // width, width


def unit_rows_of(
    # [V,H]; [R], or all
    t: Tensor,
    rows: Optional[Tensor],
    dtype: torch.dtype,
    eps: float,
) -> tuple[Tensor, Tensor]:  # [R,H] in `dtype`; [R] inverse lengths, negative for short rows
    "Rows divided by their lengths, contiguous; zeros where `rows` is -1."
    if rows is not None:
        t = torch.where((rows >= 0)[:, None], t[rows.clamp(min=0)], 0)
    t = t.to(acc_dtype(t.dtype))
    norm = torch.linalg.vector_norm(t, dim=1)
    length = divisors(norm, eps)
    unit = (t / length[:, None]).to(dtype).contiguous()
    return unit, torch.where(norm > eps, 1, -1) / length


def rows_as_given(
    x: Tensor,  # [N,H]
    x_rows: Tensor,  # [N]
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # [N,H] in `dtype`; [N], -1: gradients keep what is along a row
    "`unit_rows_of` of rows that need no division."
    rows = torch.where((x_rows >= 0)[:, None], x, 0).to(dtype).contiguous()
    return rows, rows.new_full((len(x),), -1.0, dtype=acc_dtype(x.dtype))


def unit_rows_of_two(
    x: Tensor,  # [N,H]
    x_rows: Tensor,  # [N]
    w: Tensor,  # [V,H]
    w_rows: Optional[Tensor],  # [T] or all
    dtype: torch.dtype,
    eps: float,
    as_given: bool = False,  # whether rows of x stay as they are
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [N,H], [N], [T,H], [T]
    "`unit_rows_of` of two matrices, by one kernel where there is one."
    if as_given:
        return *rows_as_given(x, x_rows, dtype), *unit_rows_of_two(x[:0], x_rows[:0], w, w_rows, dtype, eps)[2:]
    if not has_kernel(x) or torch.float64 in (x.dtype, w.dtype):
        return *unit_rows_of(x, x_rows, dtype, eps), *unit_rows_of(w, w_rows, dtype, eps)
    (n, h), t = x.shape, len(w) if w_rows is None else len(w_rows)
    ux, uw = (x.new_empty((n_rows, h), dtype=dtype) for n_rows in (n, t))
    x_inverse, w_inverse = (x.new_empty(n_rows, dtype=torch.float32) for n_rows in (n, t))
    height, width = row_block(h)
    with on_device(x):
        launch_kernel(
            unit_kernel,
            (-(-n // height) + -(-t // height),),
            x,
            x_rows,
            ux,
            x_inverse,
            n,
            *x.stride(),
            w,
            w_rows,
            uw,
            w_inverse,
            t,
            *w.stride(),
            h,
            eps,
            BR=height,
            BH=width,
        )
    return ux, x_inverse, uw, w_inverse


@jit
def tangent_kernel(
    d_ptr,  # [R,H]
    unit_ptr,  # [R,H]
    inverse_ptr,  # [R]
    factor_ptr,  # [1] or None
    out_ptr,  # [R,H]
    R,
    H,
    BR: tl.constexpr,
    BH: tl.constexpr,
):
    out_rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    inside_rows, start, radial = out_rows < R, (out_rows * H)[:, None], tl.zeros([BR], tl.float32)
    inverse = tl.load(inverse_ptr + out_rows, mask=inside_rows, other=0.0)
    for k in range(0, H, BH):
        cols = k + tl.arange(0, BH)[None, :]
        inside = inside_rows[:, None] & (cols < H)
        d = tl.load(d_ptr + start + cols, mask=inside, other=0.0)
        u = tl.load(unit_ptr + start + cols, mask=inside, other=0.0).to(tl.float32)
        radial += tl.sum(d * u, 1)
    radial = tl.where(inverse > 0, radial, 0.0)
    scale = tl.abs(inverse)
    if factor_ptr is not None:
        scale *= tl.load(factor_ptr)
    for k in range(0, H, BH):
        cols = k + tl.arange(0, BH)[None, :]
        inside = inside_rows[:, None] & (cols < H)
        d = tl.load(d_ptr + start + cols, mask=inside, other=0.0)
        u = tl.load(unit_ptr + start + cols, mask=inside, other=0.0).to(tl.float32)
        d = (d - radial[:, None] * u) * scale[:, None]
        tl.store(out_ptr + start + cols, d.to(out_ptr.dtype.element_ty), mask=inside)


def to_tangent(
    # [R,H] gradient by unit rows, overwritten; [R,H], [R]
    d: Tensor,
    unit: Tensor,
    inverse: Tensor,
    factor: Optional[Tensor],  # a scalar or None
    out: Tensor,  # [R,H] to be written, may be d
):
    "out = factor · gradient by the rows themselves: what is along them is lost."
    r, h = d.shape
    if has_kernel(d) and d.dtype == torch.float32:
        height, width = row_block(h)
        with on_device(d):
            if r:
                launch_kernel(
                    tangent_kernel, (-(-r // height),), d, unit, inverse, factor, out, r, h, BR=height, BH=width
                )
        return
    u = unit.to(d.dtype)
    radial = torch.where(inverse > 0, (d * u).sum(1), 0.0)
    scale = inverse.abs() if factor is None else inverse.abs() * factor
    out.copy_(d.sub_(radial[:, None] * u).mul_(scale[:, None]))


def nearest_centers(
    z: Tensor,  # [BN, BV·K]
    o: HeadConfig,
) -> tuple[Tensor, Optional[Tensor]]:  # [BN,BV] each
    "The largest number of each class's centres, and which one has it; None for one centre."
    return (z, None) if o.centers == 1 else z.view(len(z), -1, o.centers).max(2)


def target_cosines(
    z: Tensor,  # [BN,BV] as a tile has them
    target: Target,
    o: HeadConfig,
) -> Tensor:  # [BN]
    "The targets' cosines; 0 where the target is none of the tile's classes."
    return torch.where(target.inside, z.gather(1, target.column), 0.0)[:, 0] / o.tile_scale


def plain_negative_scores(
    # [BN,BV], overwritten; [BV]
    z: Tensor,
    shift: Optional[Tensor],
    target: Target,
    o: HeadConfig,
) -> tuple[Tensor, Optional[Tensor]]:  # [BN,BV] each
    "Scores of a tile, -inf for targets; and which of them are conflicts, if any can be."
    scores, conflicts = reweighted_logits(z, o), None
    if o.conflict < 2:
        conflicts = z > o.conflict * o.tile_scale
        scores.masked_fill_(conflicts, o.conflict_score)
    if shift is not None:
        scores.add_(shift)
    return mask_targets(scores, target), conflicts


def scaled_cosines(
    x: Tensor,  # unit rows [N,H]
    w: Tensor,  # [BV·K,H]
    o: HeadConfig,
) -> tuple[Tensor, Optional[Tensor]]:  # [N,BV] each
    "A tile, and of several centres which counts."
    return nearest_centers(wide_product(x, w.T).mul_(o.tile_scale), o)


def plain_negatives_lse(
    x: Tensor,  # unit rows [N,H]
    w: Tensor,  # [T·K,H]
    target_column: Tensor,  # [N]
    shift: Optional[Tensor],  # [T]
    o: HeadConfig,
    tile: int,  # columns at once
) -> tuple[Tensor, Tensor, Tensor]:  # lse, cos, largest: [N] each, in `acc_dtype`
    "Log-sum-exp and largest of the negatives' scores; the target's cosine, or 0."
    lse = x.new_full((len(x),), -torch.inf, dtype=acc_dtype(x.dtype))
    cos, largest = torch.zeros_like(lse), lse.clone()
    for j in tile_slices(len(w) // o.centers, tile):
        target = locate(target_column, j)
        z, _ = scaled_cosines(x, w[j.start * o.centers : j.stop * o.centers], o)
        cos += target_cosines(z, target, o)
        scores, _ = plain_negative_scores(z, None if shift is None else shift[j], target, o)
        lse = torch.logaddexp(lse, torch.logsumexp(scores, 1))
        largest = torch.maximum(largest, scores.amax(1))
    return lse, cos, largest


def plain_cosine_dz(
    # a tile [BN,BV], overwritten; [BV]
    z: Tensor,
    which: Optional[Tensor],
    shift: Optional[Tensor],
    target: Target,
    lse: Tensor,  # [BN]; +inf: no negatives
    g_lse: Tensor,  # [BN]
    g_cos: Tensor,  # [BN]
    o: HeadConfig,
) -> Tensor:  # [BN, BV·K]
    "Gradient by a tile's products, with all that scales them in `g_lse` and `g_cos`."
    slope = None if o.circle_margin < 0 else reweighted_slope(z, o)
    d, conflicts = plain_negative_scores(z, shift, target, o)
    d.sub_(lse[:, None]).exp_().mul_(g_lse[:, None])
    if slope is not None:
        d.mul_(slope)
    if conflicts is not None:
        d.masked_fill_(conflicts, 0.0)
    from_target = torch.where(target.inside, g_cos[:, None], d.gather(1, target.column))
    d.scatter_(1, target.column, from_target)
    if which is None:
        return d
    of_centers = d.new_zeros(*d.shape, o.centers)
    return of_centers.scatter_(2, which[..., None], d[..., None]).flatten(1)


def positive_infinity(lse: Tensor) -> Tensor:  # [N]
    "+inf in place of -inf, where a row has no negatives: none then has a probability."
    return torch.where(lse == -torch.inf, torch.inf, lse)


@jit
def negative_scores(
    product,
    shift_ptr,
    target_column,
    cols,
    T,
    scale,
    conflict,
    conflict_score,
    CONFLICT: tl.constexpr,
    EVEN: tl.constexpr,
):
    "Scores of a tile [BN,BV], -inf for targets, dead columns and what is past the last one."
    z = product * scale
    if CONFLICT:
        z = tl.where(product > conflict, conflict_score, z)
    if shift_ptr is not None:
        z += tl.load(shift_ptr + cols, mask=cols < T, other=-float("inf"))[None, :]
    elif not EVEN:
        z = tl.where((cols < T)[None, :], z, -float("inf"))
    return tl.where(cols[None, :] == target_column[:, None], -float("inf"), z)


@jit
def negatives_lse_kernel(
    x,  # unit rows [N,H]
    w,  # [T,H]: descriptors or pointers
    # [N], [T] or None; [2, runs, N]: scaled maximum, sum
    target_column_ptr,
    shift_ptr,
    parts_ptr,
    N,
    T,
    H,
    x_stride_n,
    x_stride_h,
    w_stride_v,
    w_stride_h,
    scale,
    conflict,
    conflict_score,
    CONFLICT: tl.constexpr,
    LOG2_SCALE: tl.constexpr,
    DESC: tl.constexpr,
    EVEN: tl.constexpr,
    RUN: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
):
    tiles_n, runs = tl.cdiv(N, BN), tl.cdiv(tl.cdiv(T, BV), RUN)
    row_max = tl.full([BN], -float("inf"), tl.float32)
    s = tl.zeros([BN], tl.float32)
    for i in tl.range(0, program_tiles(tiles_n, runs, RUN), flatten=DESC):
        tn, tv, run, continues = run_tile(i, tiles_n, runs, RUN, GROUP)
        product, rows, cols = tile_product(
            x, w, tn, tv, N, T, H, x_stride_n, x_stride_h, w_stride_v, w_stride_h, BN, BV, BH, DESC
        )
        target_column = tl.load(target_column_ptr + rows, mask=rows < N, other=-1)
        z = negative_scores(product, shift_ptr, target_column, cols, T, scale, conflict, conflict_score, CONFLICT, EVEN)
        row_max, s = carried(continues, row_max, s)
        row_max, s = online_softmax_step(row_max, s, z, LOG2_SCALE)
        at = parts_ptr + run * N + rows
        tl.store(at, row_max, mask=rows < N)
        tl.store(at + runs * N, s, mask=rows < N)


@jit
def cosine_dz_kernel(
    # unit rows [N,H], [T,H], [N,T]: descriptors or pointers; T is a slab
    x,
    w,
    dz,
    target_column_ptr,  # [N]
    shift_ptr,  # [T] of the slab, or None
    lse_ptr,  # [N]
    g_lse_ptr,  # [N]
    g_cos_ptr,  # [N]
    N,
    T,
    H,
    x_stride_n,
    x_stride_h,
    w_stride_v,
    w_stride_h,
    dz_stride_n,
    begin,  # the slab's first column
    scale,
    conflict,
    conflict_score,
    CONFLICT: tl.constexpr,
    LOG2_SCALE: tl.constexpr,
    DESC: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
):
    tiles_n, tiles_v = tl.cdiv(N, BN), tl.cdiv(T, BV)
    for t in tl.range(tl.program_id(0), tiles_n * tiles_v, tl.num_programs(0), flatten=DESC):
        tn, tv = swizzle_tile(t, tiles_n, tiles_v, GROUP)
        product, rows, cols = tile_product(
            x, w, tn, tv, N, T, H, x_stride_n, x_stride_h, w_stride_v, w_stride_h, BN, BV, BH, DESC
        )
        in_batch, in_slab = rows < N, cols < T
        target_column = tl.load(target_column_ptr + rows, mask=in_batch, other=-1) - begin
        scaled_lse = tl.load(lse_ptr + rows, mask=in_batch, other=float("inf")) * LOG2_SCALE
        no_negatives = scaled_lse == -float("inf")
        scaled_lse = tl.where(no_negatives, float("inf"), scaled_lse)  # no probabilities
        softmax_coef = tl.load(g_lse_ptr + rows, mask=in_batch, other=0.0) * scale
        target_coef = tl.load(g_cos_ptr + rows, mask=in_batch, other=0.0)
        z = negative_scores(product, shift_ptr, target_column, cols, T, scale, conflict, conflict_score, CONFLICT, True)
        d = softmax_coef[:, None] * exp2_diff(z * LOG2_SCALE, scaled_lse[:, None], LOG2_SCALE)
        if CONFLICT:
            d = tl.where(product > conflict, 0.0, d)
        d = tl.where(cols[None, :] == target_column[:, None], target_coef[:, None], d)
        store_tile(dz, d, tn, tv, in_batch, in_slab, dz_stride_n, BN, BV, DESC)


@jit
def softplus_and_slope(gap):
    "log(1 + e^gap), and its slope."
    e = tl.exp(-tl.abs(gap))
    log1p = tl.where(e < 1e-3, e * (1 - e * (1 / 2 - e / 3)), tl.log(1 + e))
    return tl.maximum(gap, 0.0) + log1p, tl.where(gap < 0, e, 1.0) / (1 + e)


@jit
def merge_lse_kernel(
    parts_ptr,  # [2, runs, N]
    x_ptr,  # unit rows [N,H]
    w_ptr,  # [T,H]
    target_column_ptr,  # [N]
    lse_ptr,  # [N]
    cos_ptr,  # [N]
    largest_ptr,  # [N]
    # [N] each, or None: no affine margin
    loss_weight_ptr,
    loss_ptr,
    g_lse_ptr,
    g_cos_ptr,
    slope,
    offset,
    N,
    runs,
    H,
    LOG2_SCALE: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    BH: tl.constexpr,
):
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    in_batch, row_max = rows < N, tl.full([BN], -float("inf"), tl.float32)
    s, cos = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    for first in range(0, runs, BP):
        parts = first + tl.arange(0, BP)[:, None]
        there, at = (parts < runs) & in_batch[None, :], parts_ptr + parts * N + rows[None, :]
        part_max = tl.load(at, mask=there, other=-float("inf"))  # [BP,BN]
        part_s = tl.load(at + runs * N, mask=there, other=0.0)
        row_max, s = merge_parts(row_max, s, part_max, part_s, LOG2_SCALE)
    target_column = tl.load(target_column_ptr + rows, mask=in_batch, other=-1)
    known = (in_batch & (target_column >= 0))[:, None]
    x_at, w_at = (rows.to(tl.int64) * H)[:, None], (target_column.to(tl.int64) * H)[:, None]
    for k in range(0, H, BH):
        cols = k + tl.arange(0, BH)[None, :]
        a = tl.load(x_ptr + x_at + cols, mask=known & (cols < H), other=0.0).to(tl.float32)
        b = tl.load(w_ptr + w_at + cols, mask=known & (cols < H), other=0.0).to(tl.float32)
        cos += tl.sum(a * b, 1)
    lse = row_max / LOG2_SCALE + tl.log(tl.where(s == 0, 1.0, s))  # 0: no scores
    tl.store(lse_ptr + rows, lse, mask=in_batch)
    tl.store(cos_ptr + rows, cos, mask=in_batch)
    tl.store(largest_ptr + rows, row_max / LOG2_SCALE, mask=in_batch)
    if loss_weight_ptr is not None:
        loss_weight = tl.load(loss_weight_ptr + rows, mask=in_batch, other=0.0)
        loss, loss_slope = softplus_and_slope(lse - (slope * cos + offset))
        tl.store(loss_ptr + rows, loss_weight * loss, mask=in_batch)
        g_loss = tl.where(loss_weight == loss_weight, loss_weight, 0.0)  # 0: the label is no class
        tl.store(g_lse_ptr + rows, g_loss * loss_slope, mask=in_batch)
        tl.store(g_cos_ptr + rows, -slope * g_loss * loss_slope, mask=in_batch)


class AffineMargin(NamedTuple):
    "A margin that makes of a target's cosine the score slope · cosine + offset."

    slope: float
    offset: float


def launch_negatives_lse(
    x: Tensor,
    w: Tensor,
    target_column: Tensor,
    shift: Optional[Tensor],
    o: HeadConfig,
    tiling: Optional[Tiling] = None,
    margin: Optional[AffineMargin] = None,
    loss_weight: Optional[Tensor] = None,  # [N], beside a margin
) -> tuple[Tensor, ...]:  # with a margin also losses [N], and their derivatives by lse and cos
    "`plain_negatives_lse` by the kernels."
    (n, h), v, t = x.shape, len(w), tiling or tiling_of(x, w)
    tiles_n, tiles_v = -(-n // t.BN), -(-v // t.BV)
    run = run_length(n, tiles_v)
    runs, scale = -(-tiles_v // run), log2_scale(x)
    new = lambda *size: x.new_empty(size, dtype=torch.float32)
    parts, out, more = new(2, runs, n), [new(n) for _ in range(3)], []
    if margin is not None:
        more = [new(n) for _ in range(3)]
    slope, offset = margin or (0.0, 0.0)
    grid = (min(multiprocessors(x.device), tiles_n * runs),)
    launch = lambda t, only_compile=False: launcher(negatives_lse_kernel, grid, only_compile)(
        operand(x, t.BN, t.BH, t.desc),
        operand(w, t.BV, t.BH, t.desc),
        target_column,
        shift,
        parts,
        n,
        v,
        h,
        *x.stride(),
        *w.stride(),
        o.scale,
        o.conflict,
        o.conflict_score,
        CONFLICT=o.conflict < 2,
        LOG2_SCALE=scale,
        DESC=t.desc,
        EVEN=v % (t.BV * run) == 0,
        RUN=run,
        GROUP=t.group,
        BN=t.BN,
        BV=t.BV,
        BH=t.BH,
        num_warps=t.warps,
        num_stages=t.stages,
    )
    with on_device(x):
        launch(
            fastest(
                negatives_lse_kernel,
                x,
                v,
                t,
                deeper(t, device_of(x), False),
                launch,
                CONFLICT=o.conflict < 2,
                RUN=run,
                EVEN=v % (t.BV * run) == 0,
                SHIFT=shift is not None,
            )
        )
        launch_kernel(
            merge_lse_kernel,
            (-(-n // 8),),
            parts,
            x,
            w,
            target_column,
            *out,
            loss_weight,
            *(more or [None] * 3),
            slope,
            offset,
            n,
            runs,
            h,
            LOG2_SCALE=scale,
            BN=8,
            BP=128,
            BH=128,
        )
    return *out, *more


def launch_cosine_dz(
    x: Tensor,  # unit rows [N,H]
    w: Tensor,  # unit rows [T,H]; T is a slab
    dz: Tensor,  # [N,T] to be written
    target_column: Tensor,  # [N]
    shift: Optional[Tensor],  # [T]
    row_terms: tuple[Tensor, ...],  # lse, g_lse, g_cos: [N]
    begin: int,
    o: HeadConfig,
    t: Tiling,
):
    "Gradient of a slab's products, recomputed."
    (n, h), v = x.shape, len(w)
    programs = min(multiprocessors(x.device), -(-n // t.BN) * -(-v // t.BV))
    launch = lambda t, only_compile=False: launcher(cosine_dz_kernel, (programs,), only_compile)(
        operand(x, t.BN, t.BH, t.desc),
        operand(w, t.BV, t.BH, t.desc),
        operand(dz, t.BN, t.BV // 2, t.desc),
        target_column,
        shift,
        *row_terms,
        n,
        v,
        h,
        *x.stride(),
        *w.stride(),
        dz.stride(0),
        begin,
        o.scale,
        o.conflict,
        o.conflict_score,
        CONFLICT=o.conflict < 2,
        LOG2_SCALE=log2_scale(x),
        DESC=t.desc,
        GROUP=t.group,
        BN=t.BN,
        BV=t.BV,
        BH=t.BH,
        num_warps=t.warps,
        num_stages=t.stages,
    )
    with on_device(x):
        launch(
            fastest(
                cosine_dz_kernel,
                x,
                v,
                t,
                deeper(t, device_of(x), True),
                launch,
                CONFLICT=o.conflict < 2,
                SHIFT=shift is not None,
            )
        )
