"""The log-sum-exp of a cosine head's other classes, over all of them or over the columns of a step, as an operator with its gradient."""

from collections import OrderedDict
from typing import Callable, Iterator, NamedTuple, Optional

import torch
from torch import Tensor

from fusedloss.core.checks import acc_dtype, expect, is_empty
from fusedloss.core.cosine import (
    AffineMargin,
    HeadConfig,
    launch_cosine_dz,
    launch_negatives_lse,
    locate,
    plain_cosine_dz,
    plain_negatives_lse,
    positive_infinity,
    scaled_cosines,
    to_tangent,
    unit_rows_of_two,
)
from fusedloss.core.operators import operator, products
from fusedloss.core.products import (
    add_product,
    autocast_like_linear,
    multiplies_in_float32,
    product_dtype,
    put_product,
    tile_slices,
    grad_scale_of,
)
from fusedloss.core.sampling import step_columns
from fusedloss.core.tiling import Tiling, tiling_of
from fusedloss.core.triton import has_kernel
from fusedloss.core.tuning import current_agreement, keep_agreement


SLAB = 2**28  # bytes of a slab's gradient


def slab_columns(n_rows: int, n_columns: int, itemsize: int, centers: int = 1, step: int = 256) -> int:
    "Columns whose gradient takes about `SLAB` bytes, in steps of a tile; two tiles at least."
    fit = max(SLAB // (max(n_rows, 1) * itemsize * centers), 2 * step)
    slabs = max(1, round(n_columns / fit))  # all of one size
    return -(-max(n_columns, 1) // slabs // step) * step


def product_into(out: Tensor, a: Tensor, b: Tensor):
    "out = a b, summed in the dtype of `out`, which is `acc_dtype`."
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif multiplies_in_float32(a.device):
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    else:
        put_product(out, a, b)


def slab_gradients(
    g_lse: Tensor,  # [N]
    g_cos: Tensor,  # [N]
    x: Tensor,  # unit rows [N,H]
    w: Tensor,  # [T·K,H]
    lse: Tensor,
    target_column: Tensor,
    shift: Optional[Tensor],
    o: HeadConfig,
    kernel: bool,
    tiling: Tiling,
) -> Iterator[tuple[slice, Tensor]]:
    "Slab after slab: rows of w, and the gradient of their products."
    n, k, v = len(x), o.centers, len(w) // o.centers
    slab = slab_columns(n, v, x.element_size(), k)
    buffer = x.new_empty(n, slab) if kernel else None
    plain_terms = () if kernel else (positive_infinity(lse), g_lse * o.tile_scale, g_cos)
    for j in tile_slices(v, slab):
        rows, part = slice(j.start * k, j.stop * k), None if shift is None else shift[j]
        if kernel:
            dz = buffer[:, : j.stop - j.start]
            launch_cosine_dz(x, w[rows], dz, target_column, part, (lse, g_lse, g_cos), j.start, o, tiling)
        else:
            tile, target = scaled_cosines(x, w[rows], o), locate(target_column, j)
            dz = plain_cosine_dz(*tile, part, target, *plain_terms, o).to(x.dtype)
        yield rows, dz


def slab_products(
    *args,  # of `slab_gradients`, up to kernel
    accumulate_grads: Callable[[slice, Tensor], None],  # takes rows of w and the gradient dz
    need_x: bool,
    tiling: Optional[Tiling] = None,
) -> Tensor:  # [N,H] in `acc_dtype`
    "Slab after slab: dz, which `accumulate_grads` makes dzᵀ x of, and the sum of dz w."
    _, _, x, w, lse, *_ = args
    total = lse.new_empty(x.shape if need_x else 0)
    for rows, dz in slab_gradients(*args, tiling or tiling_of(x, w)):
        accumulate_grads(rows, dz)
        if need_x and not rows.start:
            product_into(total, dz, w[rows])
        elif need_x:
            add_product(total, dz, w[rows])
    return total


def fits_kernels(x: Tensor, o: HeadConfig) -> bool:
    "Whether the kernels take these unit rows and this head."
    in_16_bits = has_kernel(x) and x.element_size() == 2
    return in_16_bits and o.centers == 1 and o.circle_margin < 0


def tile_columns(x: Tensor, o: HeadConfig) -> int:
    "Columns whose scores and copies take some 256 MiB."
    return max(1, 2**26 // (max(len(x), 1) * o.centers * acc_dtype(x.dtype).itemsize))


def partial_lse_fwd(
    # of `unit_rows_of_two`
    x: Tensor,
    w: Tensor,
    x_rows: Tensor,
    w_rows: Optional[Tensor],
    # of `Columns`
    grad_index: Optional[Tensor],
    target_column: Tensor,
    shift: Optional[Tensor],
    o: HeadConfig,
    dtype: torch.dtype,  # of the unit rows
    kernel: bool,
    sparse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    "lse, cos, largest [N]; unit rows and inverse lengths of x and of the columns."
    ux, x_inverse, uw, w_inverse = unit_rows_of_two(x, x_rows, w, w_rows, dtype, o.eps, o.as_given)
    if not len(x):
        out = tuple(x_inverse.new_empty(0) for _ in range(3))
    elif kernel:
        out = launch_negatives_lse(ux, uw, target_column, shift, o)
    else:
        out = plain_negatives_lse(ux, uw, target_column, shift, o, tile_columns(ux, o))
    return *out, ux, x_inverse, uw, w_inverse


def within_range(
    g_lse: Tensor,
    g_cos: Tensor,
    factor: Optional[Tensor],
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Optional[Tensor]]:  # [N], [N]; their factor, a scalar
    "Gradients that fp16 can hold, and what is to be multiplied with them."
    if dtype != torch.float16:
        return g_lse, g_cos, factor
    grad_scale = grad_scale_of(torch.maximum(g_lse.abs() * scale, g_cos.abs()))
    factor = grad_scale if factor is None else grad_scale * factor
    return g_lse / grad_scale, g_cos / grad_scale, factor


def partial_lse_bwd(
    g_lse: Tensor,
    g_cos: Tensor,
    factor: Optional[Tensor],
    lse: Tensor,
    ux: Tensor,
    x_inverse: Tensor,
    uw: Tensor,
    w_inverse: Tensor,
    target_column: Tensor,
    shift: Optional[Tensor],
    o: HeadConfig,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    kernel: bool,
    need_x: bool,
    need_w: bool,
) -> tuple[Tensor, Tensor]:
    "dx [N,H], gradient of the columns' rows [T·K,H], times factor; empty where not needed."
    values = uw.new_empty(uw.shape if need_w else 0, dtype=w_dtype)
    if not len(ux):
        return ux.new_empty(ux.shape if need_x else 0, dtype=x_dtype), values.zero_()
    g_lse, g_cos, factor = within_range(g_lse.contiguous(), g_cos.contiguous(), factor, o.scale, ux.dtype)

    def accumulate_grads(rows: slice, dz: Tensor):
        if not need_w:
            return
        du = values[rows] if w_dtype == lse.dtype else lse.new_empty(uw[rows].shape)
        product_into(du, dz.T, ux)
        to_tangent(du, uw[rows], w_inverse[rows], factor, values[rows])

    total = slab_products(
        g_lse, g_cos, ux, uw, lse, target_column, shift, o, kernel, accumulate_grads=accumulate_grads, need_x=need_x
    )
    dx = torch.empty_like(total, dtype=x_dtype)
    if need_x:
        to_tangent(total, ux, x_inverse, factor, dx)
    return dx, values


def uses_kernels(method: str, x: Tensor, dtype: torch.dtype, o: HeadConfig) -> bool:
    "Whether `method` means the kernels here; `ValueError` if they cannot do what was asked."
    able = fits_kernels(x.new_empty(1, 1, dtype=dtype), o)
    expect(
        method != "recompute" or able or is_empty(x),
        "method",
        "'tiles' for what is no product in 16 bits on a GPU with one centre a class and no pace",
        "'recompute'",
    )
    return able and method != "tiles"


def head_dtype(x: Tensor) -> torch.dtype:
    "What products of a head are taken in: the features' dtype, or autocast's; on CPUs wider."
    (x,) = autocast_like_linear(x[:0])
    return product_dtype(x)


def fake_unit_rows(
    x: Tensor,
    w: Tensor,
    w_rows: Optional[Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    "The shapes of `unit_rows_of_two`'s results."
    t, numbers = (w if w_rows is None else w_rows).shape[0], acc_dtype(x.dtype)
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.shape[0], dtype=numbers),
        x.new_empty((t, x.shape[1]), dtype=dtype),
        x.new_empty(t, dtype=numbers),
    )


def fake_lse(x, w, x_rows, w_rows, grad_index, target_column, shift, o, dtype, kernel, sparse):
    "The shapes of `partial_lse_fwd`'s results."
    lse, cos, largest = (x.new_empty(x.shape[0], dtype=acc_dtype(x.dtype)) for _ in range(3))
    return lse, cos, largest, *fake_unit_rows(x, w, w_rows, dtype)


def fake_lse_grad(g_lse, g_cos, factor, lse, ux, x_inverse, uw, w_inverse, *others):
    "The shapes of `partial_lse_bwd`'s results."
    x_dtype, w_dtype, _, need_x, need_w = others[-5:]
    return (
        ux.new_empty(ux.shape if need_x else (0,), dtype=x_dtype),
        uw.new_empty(uw.shape if need_w else (0,), dtype=w_dtype),
    )


def rows_gradient(index: Tensor, values: Tensor, shape: torch.Size, sparse: bool) -> Tensor:
    "Gradient of a weight from that of some of its rows."
    if not sparse:
        return values.new_zeros(shape).index_add_(0, index, values)
    with torch.sparse.check_sparse_tensor_invariants(False):  # looking would wait for the GPU
        return torch.sparse_coo_tensor(index[None], values, shape)


class RowIndex(NamedTuple):
    "Which rows of a weight a gradient holds."

    index: Tensor  # [T], none outside the weight: dead columns name a live row, with zeros
    rows: Tensor  # [T], -1 for dead columns; else all different

    def __reduce__(self) -> tuple:
        "Nothing: it hangs on a parameter, whose pickle carries it, and `torch.load` is to know all that is there."
        return OrderedDict, ()


def save_numbers(ctx, inputs, kernel: bool):
    "What a backward pass has to know, tensors aside."
    ctx.numbers = inputs.o, inputs.x.dtype, inputs.w.dtype, kernel
    ctx.sparse, ctx.shape, ctx.step = inputs.sparse, inputs.w.shape, current_agreement()


def input_gradients(
    ctx,
    needs,
    g_lse: Tensor,
    g_cos: Tensor,
    factor: Optional[Tensor],
    *tensors: Tensor,
) -> dict[str, Optional[Tensor]]:
    "dx and dw, that of w's rows as a sparse tensor, or dense."
    *tensors, index = tensors
    with keep_agreement(ctx.step):
        dx, dw = partial_lse_grad(g_lse, g_cos, factor, *tensors, *ctx.numbers, needs.x, needs.w)
    if needs.w and index is not None:
        dw = rows_gradient(index, dw, ctx.shape, ctx.sparse)
    return {"x": dx if needs.x else None, "w": dw if needs.w else None}


def save_lse(ctx, inputs, output):
    "What `lse_gradients` needs: unit rows, lengths and lse; neither x nor w."
    lse, _, largest, *unit_rows = output
    ctx.save_for_backward(lse, *unit_rows, inputs.target_column, inputs.shift, inputs.grad_index)
    ctx.mark_non_differentiable(largest, *unit_rows)
    save_numbers(ctx, inputs, inputs.kernel)


def lse_gradients(
    ctx,
    needs,
    g_lse: Optional[Tensor],
    g_cos: Optional[Tensor],
    *_,
) -> dict[str, Optional[Tensor]]:
    "dx and dw from the gradients of lse and cos."
    lse, *_ = tensors = ctx.saved_tensors
    g_lse, g_cos = (torch.zeros_like(lse) if g is None else g for g in (g_lse, g_cos))
    return input_gradients(ctx, needs, g_lse, g_cos, None, *tensors)


partial_lse_grad = operator(
    "partial_lse_grad",
    partial_lse_bwd,
    fake=fake_lse_grad,
    flops=lambda i, out: products(i.ux, i.uw, i.need_x, i.need_w),
)
partial_lse = operator(
    "partial_lse",
    partial_lse_fwd,
    fake=fake_lse,
    save=save_lse,
    backward=lse_gradients,
    flops=lambda i, out: products(i.x, out[5]),
)


def affine_loss_fwd(
    x: Tensor,
    w: Tensor,
    x_rows: Tensor,
    w_rows: Optional[Tensor],
    # of `Columns`
    grad_index: Optional[Tensor],
    target_column: Tensor,
    shift: Optional[Tensor],
    loss_weight: Tensor,
    margin: AffineMargin,
    o: HeadConfig,
    dtype: torch.dtype,
    sparse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    "The weighted sum of losses; losses, lse, cos, largest, g_lse, g_cos [N]; unit rows."
    unit_rows = ux, x_inverse, uw, _ = unit_rows_of_two(x, x_rows, w, w_rows, dtype, o.eps)
    if not len(x):
        return x_inverse.sum(), *(x_inverse.new_empty(0) for _ in range(6)), *unit_rows
    lse, cos, largest, losses, g_lse, g_cos = launch_negatives_lse(
        ux, uw, target_column, shift, o, margin=margin, loss_weight=loss_weight
    )
    return losses.sum(), losses, lse, cos, largest, g_lse, g_cos, *unit_rows


def fake_affine_loss(x, w, x_rows, w_rows, grad_index, target_column, shift, loss_weight, margin, o, dtype, sparse):
    "The shapes of `affine_loss_fwd`'s results."
    rows = (x.new_empty(x.shape[0], dtype=acc_dtype(x.dtype)) for _ in range(6))
    return x.new_empty((), dtype=acc_dtype(x.dtype)), *rows, *fake_unit_rows(x, w, w_rows, dtype)


def save_affine_loss(ctx, inputs, output):
    "Derivatives by lse and cos, which forward has made, and what `save_lse` saves."
    _, losses, lse, cos, largest, g_lse, g_cos, *unit_rows = output
    ctx.save_for_backward(
        g_lse,
        g_cos,
        losses,
        lse,
        *unit_rows,  # losses for `first_order`
        inputs.target_column,
        inputs.shift,
        inputs.grad_index,
    )
    ctx.mark_non_differentiable(lse, cos, largest, g_lse, g_cos, *unit_rows)
    save_numbers(ctx, inputs, True)


def affine_loss_gradients(
    ctx,
    needs,
    g: Tensor,
    *_,
) -> dict[str, Optional[Tensor]]:
    "dx and dw: what comes from above is one number."
    g_lse, g_cos, _, *tensors = ctx.saved_tensors
    return input_gradients(ctx, needs, g_lse, g_cos, g, *tensors)


affine_margin_loss = operator(
    "affine_margin_loss",
    affine_loss_fwd,
    fake=fake_affine_loss,
    save=save_affine_loss,
    backward=affine_loss_gradients,
    flops=lambda i, out: products(i.x, out[9]),
)


def all_classes_lse(
    x: Tensor,  # [N,H]
    w: Tensor,  # [V·K,H]
    y: Tensor,  # [N]
    o: HeadConfig,
    method: str,
) -> Optional[tuple[Tensor, Tensor]]:  # lse, cos [N]; None where no kernel takes the rows
    "The two numbers of `margin_cross_entropy`, without a sample: all classes are columns."
    dtype = head_dtype(x)
    if not uses_kernels(method, x, dtype, o):
        return None
    c = step_columns(y, -1, w.shape[0], None, acc_dtype(x.dtype))
    return partial_lse(x, w, c.x_rows, None, None, c.target_column, None, o, dtype, True, False)[:2]
