"""The hand-written product of the GPU at hand, and what every architecture's product is followed by."""

from typing import Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedloss.core.architectures import ScoreProduct
from fusedloss.core.devices import Device, device_of
from fusedloss.core.hopper import IN_TURN
from fusedloss.core.options import LossOptions
from fusedloss.core.softmax import exp2_diff, log2_scale, merge_parts, rescaled_moment
from fusedloss.core.triton import jit, launch_kernel, on_device, tl


PRODUCTS: tuple[ScoreProduct, ...] = (IN_TURN,)  # one an architecture

# of `LossOptions`: those that leave each score as the product makes it, and its gradient a multiple of p
BARE = ("z_loss",)


def product_of(d: Device) -> ScoreProduct:
    "The product of a device; where it has none, the first, which says why."
    for product in PRODUCTS:
        if not product.lacks(d):
            return product
    return PRODUCTS[0]


def takes_scores(x: Tensor, w: Tensor, bias: Optional[Tensor], o: LossOptions) -> bool:  # [N,H], [V,H], [V]
    "Whether the kernels take a linear layer's scores: bare ones."
    bare = bias is None and all(name in BARE for name in o.changed())
    return bare and not product_of(device_of(x)).matrices_reason(x, w)


@jit
def merge_statistics_kernel(
    stats_ptr,  # [tiles,N,2]
    moments_ptr,  # [tiles,N] or None
    y_ptr,  # [N]
    sums_ptr,  # [3 to 7,N] as `finish_kernel` takes it, the targets' scores in row 2
    N,
    V,
    tiles,
    LOG2_SCALE: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
):
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    keep = rows < N
    y = tl.load(y_ptr + rows, mask=keep, other=-1)
    z_y = tl.load(sums_ptr + 2 * N + rows, mask=(y >= 0) & (y < V), other=-float("inf"))
    row_max, s = z_y * LOG2_SCALE, tl.where(z_y > -float("inf"), 1.0, 0.0)
    moment = tl.zeros([BN], tl.float32)
    for first in range(0, tiles, BT):
        tile = first + tl.arange(0, BT)[:, None]
        at, there = stats_ptr + 2 * (tile.to(tl.int64) * N + rows[None]), (tile < tiles) & keep[None]
        part_max = tl.load(at, mask=there, other=-float("inf")) * LOG2_SCALE
        part_s = tl.load(at + 1, mask=there, other=0.0)
        new_max, new_s = merge_parts(row_max, s, part_max, part_s, LOG2_SCALE)
        if moments_ptr is not None:
            part_moment = tl.load(moments_ptr + tile.to(tl.int64) * N + rows[None], mask=there, other=0.0)
            more = rescaled_moment(part_moment, part_s, part_max, new_max[None, :], LOG2_SCALE)
            moment = rescaled_moment(moment, s, row_max, new_max, LOG2_SCALE) + tl.sum(more, 0)
        row_max, s = new_max, new_s
    tl.store(sums_ptr + rows, row_max, mask=keep)
    tl.store(sums_ptr + N + rows, s, mask=keep)
    if moments_ptr is not None:
        tl.store(sums_ptr + 4 * N + rows, moment, mask=keep)


def merge_statistics(
    sums: Tensor,  # [3 to 7,N]
    stats: Tensor,  # [tiles,N,2]
    moments: Optional[Tensor],  # [tiles,N]
    y: Tensor,  # [N]
    n_classes: int,
    scale: float,
    BN: int = 16,  # few, since a program waits for its loads, not for the memory
    BT: int = 64,
):
    "Each row's maximum, times a scale, its sum and its moment, of all tiles and the target: rows 0, 1 and 4 of the sums."
    tiles, n, _ = stats.shape
    with on_device(stats):
        launch_kernel(
            merge_statistics_kernel,
            (-(-n // BN),),
            stats,
            moments,
            y,
            sums,
            n,
            n_classes,
            tiles,
            LOG2_SCALE=scale,
            BN=BN,
            BT=BT,
        )


def bias_of_tiles(x: Tensor, bias: Optional[Tensor]) -> Optional[Tensor]:  # [N,H], [V] to [V, and on to whole tiles]
    "A bias as the product of x's device takes it: fp32, zeros behind."
    return None if bias is None else F.pad(bias.float(), (0, -len(bias) % product_of(device_of(x)).classes))


def statistics_sums(
    x: Tensor,  # [N,H]
    w: Tensor,  # [V,H]
    y: Tensor,  # [N]
    entropy: bool = False,
    bias: Optional[Tensor] = None,  # of `bias_of_tiles`; without entropy
) -> Tensor:  # [3,N]; with entropy [5,N], without numbers in row 3
    "What each row knows of its bare scores: of the rows that `finish_kernel` takes those that it reads then."
    product = product_of(device_of(x))
    tiles, new = -(-len(w) // product.classes), lambda kind, *size: kind(size, dtype=torch.float32)
    sums, stats = new(x.new_empty, 5 if entropy else 3, len(x)), new(x.new_empty, tiles, len(x), 2)
    sums[2].zero_()  # where a row has no target
    moments = new(x.new_empty, tiles, len(x)) if entropy else None
    if entropy:
        product.moments(x, w, y, stats, moments, sums[2])
    else:
        product.statistics(x, w, y, stats, sums[2], bias=bias)
    merge_statistics(sums, stats, moments, y, len(w), log2_scale(x))
    return sums


@jit
def put_targets_kernel(
    dz_ptr,  # [N,V] of a slab of V classes
    terms_ptr,  # [6,N]
    target_z_ptr,  # [N]
    y_ptr,  # [N]: labels less the slab's first
    N,
    V,
    dz_stride,
    ENTROPY: tl.constexpr,
    LOG2_SCALE: tl.constexpr,
    BN: tl.constexpr,
):
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.load(y_ptr + rows, mask=rows < N, other=-1)
    there = (column >= 0) & (column < V)
    row_max = tl.load(terms_ptr + rows, mask=there, other=float("inf"))
    coef, target_coef = (
        tl.load(terms_ptr + N + rows, mask=there, other=0.0),
        tl.load(terms_ptr + 2 * N + rows, mask=there, other=0.0),
    )
    below = tl.load(target_z_ptr + rows, mask=there, other=0.0) * LOG2_SCALE - row_max
    if ENTROPY:
        slope, mean = (
            tl.load(terms_ptr + 4 * N + rows, mask=there, other=0.0),
            tl.load(terms_ptr + 5 * N + rows, mask=there, other=0.0),
        )
        coef += slope * (mean - tl.maximum(below, -1e30) / LOG2_SCALE)
    d = tl.where(row_max < float("inf"), coef * exp2_diff(below, 0.0, LOG2_SCALE) - target_coef, 0.0)
    tl.store(dz_ptr + rows.to(tl.int64) * dz_stride + column, d.to(dz_ptr.dtype.element_ty), mask=there)


def put_targets(
    dz: Tensor,  # [N,V]
    terms: Tensor,  # [6,N]
    target_z: Tensor,  # [N]
    column: Tensor,  # [N]
    scale: float,
    entropy: bool = False,
    BN: int = 128,
):
    "The gradients of those targets' scores whose column is in the slab `dz`."
    with on_device(dz):
        launch_kernel(
            put_targets_kernel,
            (-(-len(column) // BN),),
            dz,
            terms,
            target_z,
            column,
            *dz.shape,
            dz.stride(0),
            ENTROPY=entropy,
            LOG2_SCALE=scale,
            BN=BN,
        )


def put_gradients(
    x: Tensor,  # [N,H]
    w: Tensor,  # [V,H] of a slab of classes
    dz: Tensor,  # [N,V] to be written
    y: Tensor,  # [N]
    terms: Tensor,  # [6,N] as `launch_terms` makes them
    begin: int,  # the slab's first class
    entropy: bool = False,
    bias: Optional[Tensor] = None,  # as `statistics_sums` takes it
):
    "dz from the scores."
    product, target_z = product_of(device_of(x)), terms.new_empty(len(y))
    column = y - begin if begin else y
    if entropy:
        product.entropy_gradients(x, w, column, *terms[:2], *terms[4:6], dz, target_z, log2_scale(x))
    else:
        product.gradients(x, w, column, *terms[:2], dz, target_z, log2_scale(x), bias)
    put_targets(dz, terms, target_z, column, log2_scale(x), entropy)
