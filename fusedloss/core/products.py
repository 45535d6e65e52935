"""Matrix products whose operands are narrow and whose sums are wide: by PyTorch, and in tiles by Triton with something done to each tile before it is stored."""

import functools
from typing import Optional

import torch
from torch import Tensor

from fusedloss.core.checks import acc_dtype, expect, is_empty
from fusedloss.core.operators import autocasts, larger_size
from fusedloss.core.softmax import cooled
from fusedloss.core.triton import has_kernel, jit, tl


def product_dtype(t: Tensor) -> torch.dtype:
    "What products of `t` are taken in: its own dtype on a GPU, at least float32 on a CPU."
    return t.dtype if t.is_cuda else acc_dtype(t.dtype)


@functools.cache
def multiplies_in_float32(device: torch.device) -> bool:
    "Whether half-precision products can be returned in float32 there."
    if device.type == "cpu":
        return False  # not asked: a fake tensor would say yes
    a = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    try:
        torch.mm(a, a, out_dtype=torch.float32)
    except RuntimeError:
        return False  # such as ROCm's before PyTorch 2.10
    return True


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    "`a [R,K]` times `b [K,C]`, summed and returned in `acc_dtype`."
    if a.dtype == acc_dtype(a.dtype):
        return a @ b
    if multiplies_in_float32(a.device):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def tile_slices(size: int, tile: int) -> list[slice]:
    "`size` elements in runs of `tile`, the last one shorter."
    return [slice(start, min(start + tile, size)) for start in range(0, size, tile)]


def equal_rows(
    n_tokens: int,
    most: int,  # rows that a chunk may have
) -> int:
    "Rows of the fewest equal chunks, in multiples of 128 where `most` allows."
    if n_tokens <= most:
        return max(n_tokens, 1)
    rows = -(-n_tokens // -(-n_tokens // most))
    aligned = -(-rows // 128) * 128
    return aligned if aligned <= most else rows


def part(t: Optional[Tensor], i: slice) -> Optional[Tensor]:
    "The rows `i`; the tensor itself where these are all."
    return t if t is None or i.stop - i.start == t.shape[0] else t[i]


@functools.cache
def adds_in_float32(device: torch.device) -> bool:
    "Whether half-precision products can be added to a float32 sum there."
    a = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    out = torch.zeros(8, 8, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(out, a, a, out.dtype, out=out)
    except (RuntimeError, TypeError):
        return False  # the latter on meta, before PyTorch 2.13
    return True


def put_product(
    out: Tensor,  # [R,C], written or added to
    # [R,K], [K,C], of one dtype
    a: Tensor,
    b: Tensor,
    add: bool = False,  # to what `out` holds
    alpha: float = 1.0,  # multiplies the product
):
    "`out = a b` or `out += a b`, summed in at least fp32 and rounded once."
    factors = dict(beta=int(add), alpha=alpha, out=out)
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, **factors)
    elif out.dtype == torch.float32 and adds_in_float32(a.device):
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, **factors)
    else:
        for i in tile_slices(len(out), 8192):
            part = wide_product(a[i], b).mul_(alpha)
            out[i] = out[i] + part if add else part


def add_product(total: Tensor, a: Tensor, b: Tensor):
    "`total [R,C] += a [R,K] b [K,C]`, in place; `total` is in `acc_dtype`."
    put_product(total, a, b, add=True)


def grad_scale_of(*factors: Tensor) -> Tensor:
    "Product of the factors' largest magnitudes over 2¹²; at least the smallest normal number."
    largest = [f.abs().nan_to_num(0.0, 0.0).amax() for f in factors]  # inf spoils its own row
    top = (torch.stack(largest).prod() if len(largest) > 1 else largest[0]) / 4096
    return top.clamp(min=torch.finfo(top.dtype).tiny)


def autocast_like_linear(*tensors: Tensor) -> tuple[Tensor, ...]:
    "Under autocast, what `F.linear` would see: its dtype, but float64 stays."
    device = tensors[0].device.type
    if not autocasts(device) or any(t.dtype == torch.float64 for t in tensors):
        return tensors
    return tuple(t.to(torch.get_autocast_dtype(device)) for t in tensors)


def linear_operands(
    x: Tensor,
    w: Tensor,
    bias: Optional[Tensor],  # [V], of any stride
) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    "What `F.linear` would see of them under autocast; the bias one number after the other, as kernels read it."
    x, w, *biases = autocast_like_linear(x, w, *([] if bias is None else [bias.contiguous()]))
    return x, w, biases[0] if biases else None


def linear_dtype(input: Tensor, linear_weight: Tensor) -> torch.dtype:
    "What `F.linear` would multiply in: autocast's dtype, but float64 stays."
    device = input.device.type
    wide = torch.float64 in (input.dtype, linear_weight.dtype)
    if wide or not autocasts(device):
        return input.dtype
    return torch.get_autocast_dtype(device)


def cast_bytes(
    dtype: torch.dtype,  # that products are taken in
    *operands: Optional[Tensor],
) -> int:
    "Bytes of the copies that autocast makes of operands, which have another dtype."
    return sum([t.numel() for t in operands if t is not None and t.dtype != dtype]) * dtype.itemsize


def budget_without(budget: Optional[int], held: int) -> Optional[int]:  # bytes
    "A budget less what is held anyway; at least 1, for 0 is none."
    return budget if budget is None or held == 0 else larger_size(budget - held, 1)


def linear_budget(
    budget: Optional[int],  # bytes, or None
    x: Tensor,
    w: Tensor,
    bias: Optional[Tensor],
) -> Optional[int]:
    "A budget less the copies that `linear_operands` makes of what wants no gradient; `ValueError` where it is no more than these."
    graded = torch.is_grad_enabled()  # a float32 gradient's bytes: the copy's, and the gradient's in 16 bits
    copies = cast_bytes(
        linear_dtype(x, w), *(t for t in (x, w, bias) if t is not None and not (graded and t.requires_grad))
    )
    return budget_beside(budget, copies)


def budget_beside(budget: Optional[int], copies: int) -> Optional[int]:  # bytes
    "A budget less autocast's copies; `ValueError` where it is no more than these."
    room = budget is None or copies == 0 or budget > copies
    expect(
        room, "memory_budget", lambda: f"more than the {copies} bytes of autocast's 16-bit copies", lambda: repr(budget)
    )
    return budget_without(budget, copies)


def rounded_operand(t: Optional[Tensor], dtype: torch.dtype) -> Optional[Tensor]:
    "`t` as the products take it, having been rounded to `dtype`."
    if t is None:
        return None
    t = t.to(dtype)
    return t.to(product_dtype(t))


def logits_row(n_classes: int, dtype: torch.dtype) -> int:
    "Bytes of one row of logits; rows start on sixteen bytes."
    return -(-n_classes // 8) * 8 * dtype.itemsize


def make_logits(z: Tensor, x: Tensor, w: Tensor, b: Optional[Tensor]):
    "`z [B,V] = x wᵀ + b`, in place."
    if b is None:
        torch.mm(x, w.T, out=z)
    else:
        torch.addmm(b, x, w.T, out=z)


def write_product(
    out: Tensor,  # [R,C]
    a: Tensor,  # [R,K]
    b: Tensor,  # [K,C]
    grad_scale: Optional[Tensor],
):
    "out = grad_scale · a b, summed in float32 and rounded once."
    if grad_scale is None:
        torch.mm(a, b, out=out)
    else:
        out.copy_(wide_product(a, b).mul_(grad_scale))


def takes_kernel(x: Tensor) -> bool:
    "Whether the kernels of this page take this input."
    return has_kernel(x) and x.element_size() == 2 and not is_empty(x)


def wide(t: Tensor) -> Tensor:
    "`t` in `acc_dtype`."
    return t.to(acc_dtype(t.dtype))


def chunk_scores(
    x: Tensor,  # [n,H]
    w: Tensor,  # [V,H]
    bias: Optional[Tensor],  # [V] or None
) -> Tensor:  # [n,1,V]
    "Scores of a chunk as the row kernels take them, in the dtype of `w`."
    z = x.to(w.dtype) @ w.T
    return (z if bias is None else z.add_(bias))[:, None]


@jit
def swizzle_tile(t, tiles_n, tiles_v, GROUP: tl.constexpr):
    "Row and column of tile t: down GROUP rows of tiles, then to the next column."
    first = t // (GROUP * tiles_v) * GROUP
    height = tl.minimum(tiles_n - first, GROUP)
    inner = t % (GROUP * tiles_v)
    return first + inner % height, inner // height


@jit
def program_tiles(tiles_n, runs, RUN: tl.constexpr):
    "How many tiles this program makes: of all runs of RUN tiles its share."
    return tl.cdiv(tiles_n * runs - tl.program_id(0), tl.num_programs(0)) * RUN


@jit
def run_tile(i, tiles_n, runs, RUN: tl.constexpr, GROUP: tl.constexpr):
    "Row and column of the i-th tile of this program; its run, and whether that began before it."
    run_number = tl.program_id(0) + i // RUN * tl.num_programs(0)
    tn, run = swizzle_tile(run_number, tiles_n, runs, GROUP)
    return tn, run * RUN + i % RUN, run, (i % RUN != 0) & (RUN > 1)


@jit
def load_operand(
    # a descriptor, or a pointer and its strides
    t,
    first,
    k,
    rows,
    width,
    stride_r,
    stride_k,
    R: tl.constexpr,
    K: tl.constexpr,
    DESC: tl.constexpr,
):
    "Rows `first`.., features `k`.. of a matrix, [R,K], zeros beyond its edges."
    if DESC:
        return t.load([first, k])
    else:
        r, c = first + tl.arange(0, R), k + tl.arange(0, K)
        at = r.to(tl.int64)[:, None] * stride_r + c.to(tl.int64)[None, :] * stride_k
        return tl.load(t + at, mask=(r < rows)[:, None] & (c < width)[None, :], other=0.0)


@jit
def tile_product(
    x,
    w,
    tn,
    tv,
    N,
    V,
    H,
    x_stride_n,
    x_stride_h,
    w_stride_v,
    w_stride_h,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    DESC: tl.constexpr,
):
    "The tile (tn, tv) of x wᵀ, [BN,BV] in float32; its rows [BN] and columns [BV]."
    product = tl.zeros([BN, BV], tl.float32)
    for k in range(0, H, BH):
        a = load_operand(x, tn * BN, k, N, H, x_stride_n, x_stride_h, BN, BH, DESC)
        b = load_operand(w, tv * BV, k, V, H, w_stride_v, w_stride_h, BV, BH, DESC)
        product = tl.dot(a, b.T, product, input_precision="ieee")
    return product, tn * BN + tl.arange(0, BN), tv * BV + tl.arange(0, BV)


@jit
def tile_scores(
    x,
    w,
    bias_ptr,  # [V] or None
    temperature_ptr,  # [N] or None
    tn,
    tv,
    N,
    V,
    H,
    x_stride_n,
    x_stride_h,
    w_stride_v,
    w_stride_h,
    o,
    SCORE: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    DESC: tl.constexpr,
):
    "Scores [BN,BV] of the tile (tn, tv) and their slopes; its rows [BN] and columns [BV], and which of them there are."
    product, rows, cols = tile_product(
        x, w, tn, tv, N, V, H, x_stride_n, x_stride_h, w_stride_v, w_stride_h, BN, BV, BH, DESC
    )
    keep, inside = rows < N, cols < V
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        product += bias[None, :]
    z, slope = SCORE(product, o)
    z, slope = cooled(z, slope, temperature_ptr, rows, keep)
    return z, slope, rows, cols, keep, inside


@jit
def store_tile(
    # a descriptor of half tiles or a pointer; [BN,BV]
    out,
    tile,
    tn,
    tv,
    # which rows [BN] and columns [BV] there are
    keep,
    inside,
    stride_n,
    BN: tl.constexpr,
    BV: tl.constexpr,
    DESC: tl.constexpr,
):
    "Write the tile (tn, tv) of a matrix, rounded to its dtype."
    if DESC:
        halves = tl.permute(tl.reshape(tile, (BN, 2, BV // 2)), (0, 2, 1))
        left, right = tl.split(halves)  # half the shared memory
        out.store([tn * BN, tv * BV], left.to(out.dtype))
        out.store([tn * BN, tv * BV + BV // 2], right.to(out.dtype))
    else:
        rows, cols = tn * BN + tl.arange(0, BN), tv * BV + tl.arange(0, BV)
        at = out + rows.to(tl.int64)[:, None] * stride_n + cols[None, :]
        tl.store(at, tile.to(out.dtype.element_ty), mask=keep[:, None] & inside[None, :])
