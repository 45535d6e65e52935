"""The log-sum-exp of a head's negatives, and its targets' scores, where scores are dot products and a bias: over columns that rows share, and over classes of each row's own."""

from typing import Optional

import torch
from torch import Tensor

from fusedloss.core.checks import acc_dtype
from fusedloss.core.column_sums import column_sums
from fusedloss.core.cosine import HeadConfig, launch_negatives_lse, plain_negatives_lse, positive_infinity
from fusedloss.core.negatives import product_into, rows_gradient, slab_products, tile_columns, within_range
from fusedloss.core.operators import operator, products
from fusedloss.core.products import tile_slices, wide


DOT = HeadConfig(scale=1.0)


def taken_rows(t: Tensor, rows: Optional[Tensor], dtype: torch.dtype) -> Tensor:  # [V,H]; [R], or all
    "Rows of a matrix, contiguous; zeros where `rows` is -1."
    if rows is None:
        return t.to(dtype).contiguous()
    return torch.where((rows >= 0)[:, None], t[rows.clamp(min=0)], 0).to(dtype)


def taken_whole(w: Tensor, rows: Optional[Tensor], dtype: torch.dtype) -> bool:
    "Whether `taken_rows` gives the matrix itself, which no operator may return."
    return rows is None and w.dtype == dtype and w.is_contiguous()


def add_rows(n: int, place: Tensor, values: Tensor) -> Tensor:  # [R]; [R,...]
    "n rows, each the sum of the values that belong there: the same bits every time."
    out = values.new_zeros(n, *values.shape[1:])
    if values.is_cuda:
        return out.index_put_((place,), values, accumulate=True)
    return out.index_add_(0, place, values)


def bias_level(bias: Optional[Tensor], dtype: torch.dtype) -> Tensor | float:  # [V,1]; of scores
    "The largest bias, 0 unless finite: scores relative to it keep the digits that a common offset would round."
    if bias is None:
        return 0.0
    largest = bias.detach().amax().to(dtype)
    return torch.where(largest.isfinite(), largest, 0.0)


def column_offsets(
    bias: Optional[Tensor],  # [V,1]
    w_rows: Optional[Tensor],  # [T]
    shift: Optional[Tensor],  # [T]
    n_shared: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Optional[Tensor]]:  # biases of all columns, or none; what is added to scores
    "What is added to the products of columns: biases [T] less their level, and with the shift [n_shared]."
    if bias is None:
        return torch.empty(0, dtype=dtype), shift
    biases = taken_rows(bias, w_rows, dtype)[:, 0] - bias_level(bias, dtype)
    if shift is None:
        return biases, biases[:n_shared]
    return biases, torch.where(shift == -torch.inf, shift, biases[:n_shared] + shift)


def target_scores(x: Tensor, columns: Tensor, biases: Tensor, target_column: Tensor) -> Tensor:  # [N]
    "Scores of the rows with their own columns; 0 without one."
    at = target_column.clamp(min=0)
    z = (wide(x) * wide(columns[at])).sum(1)
    if len(biases):
        z = z + biases[at]
    return torch.where(target_column >= 0, z, 0.0)


def dot_lse_fwd(
    x: Tensor,  # [N,H]
    w: Tensor,  # [V,H]
    bias: Optional[Tensor],  # [V,1]
    x_rows: Tensor,  # [N]
    # of `Columns`
    w_rows: Optional[Tensor],
    grad_index: Optional[Tensor],
    target_column: Tensor,
    shift: Optional[Tensor],  # [n_shared]
    n_shared: int,
    dtype: torch.dtype,  # of products
    kernel: bool,
    sparse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    "lse, score, largest [N], less the level of biases; rows of x, columns, what is added to scores."
    ux, columns = taken_rows(x, x_rows, dtype), taken_rows(w, w_rows, dtype)
    biases, added = column_offsets(bias, w_rows, shift, n_shared, acc_dtype(x.dtype))
    none = ux.new_empty(0, dtype=acc_dtype(x.dtype))
    kept = w.new_empty((0, w.shape[1])) if taken_whole(w, w_rows, dtype) else columns
    scores = ux, kept, none if added is None else added.clone()
    if not len(x):
        return none, none.clone(), none.clone(), *scores
    shared, inside = columns[:n_shared], torch.where(target_column < n_shared, target_column, -1)
    if kernel:
        lse, _, largest = launch_negatives_lse(ux, shared, inside, added, DOT)
    else:
        lse, _, largest = plain_negatives_lse(ux, shared, inside, added, DOT, tile_columns(ux, DOT))
    score = target_scores(ux, columns, biases, target_column)
    return lse, score, largest, *scores


def own_gradients(
    # [N], of scores
    g: Tensor,
    x: Tensor,
    columns: Tensor,
    target_column: Tensor,
    n_shared: int,
    # [N,H], [T,H], [T] or empty
    dx: Tensor,
    values: Tensor,
    biases: Tensor,
    factor: Optional[Tensor],
):
    "Add what columns of their own rows' bring to dx, and write their rows and biases."
    alone = target_column >= n_shared
    g, place = torch.where(alone, g, 0.0), (target_column - n_shared).clamp(min=0)
    n, scale = len(columns) - n_shared, 1.0 if factor is None else factor
    if len(dx):
        dx += g[:, None] * wide(columns[target_column.clamp(min=0)])
    if len(values):
        values[n_shared:] = add_rows(n, place, g[:, None] * wide(x)) * scale
    if len(biases):
        biases[n_shared:] = add_rows(n, place, g)


def dot_lse_bwd(
    # of forward
    g_lse: Tensor,
    g_score: Tensor,
    lse: Tensor,
    ux: Tensor,
    columns: Tensor,
    added: Tensor,
    target_column: Tensor,
    n_shared: int,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    kernel: bool,
    need_x: bool,
    need_w: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    "dx [N,H], gradients of the columns' rows [T,H] and biases [T,1]; empty where not needed."
    values = ux.new_empty(columns.shape if need_w else 0, dtype=w_dtype)
    biases = lse.new_zeros(len(columns) if need_bias else 0)
    if not len(ux):
        return ux.new_empty(ux.shape if need_x else 0, dtype=x_dtype), values.zero_(), biases[:, None].to(bias_dtype)
    g_score = torch.where(target_column >= 0, g_score, 0.0)
    g_lse, g_score, factor = within_range(g_lse.contiguous(), g_score, None, 1.0, ux.dtype)
    inside = target_column < n_shared

    def accumulate_grads(rows: slice, dz: Tensor):
        if need_bias:
            biases[rows] = column_sums(dz)
        if not need_w:
            return
        product_into(part := lse.new_empty(columns[rows].shape), dz.T, ux)
        values[rows] = part if factor is None else part * factor

    dx = slab_products(
        g_lse,
        torch.where(inside, g_score, 0.0),
        ux,
        columns[:n_shared],
        lse,
        torch.where(inside, target_column, -1),
        added if len(added) else None,
        DOT,
        kernel,
        accumulate_grads=accumulate_grads,
        need_x=need_x,
    )
    if n_shared < len(columns):
        own_gradients(g_score, ux, columns, target_column, n_shared, dx, values, biases, factor)
    if factor is not None:
        dx, biases = dx * factor, biases * factor
    return dx.to(x_dtype), values, biases[:, None].to(bias_dtype)


def fake_dot_lse(x, w, bias, x_rows, w_rows, grad_index, target_column, shift, n_shared, dtype, kernel, sparse):
    "The shapes of `dot_lse_fwd`'s results."
    t, sums = (w if w_rows is None else w_rows).shape[0], acc_dtype(x.dtype)
    if taken_whole(w, w_rows, dtype):
        t = 0
    lse, score, largest = (x.new_empty(x.shape[0], dtype=sums) for _ in range(3))
    adds = bias is not None or shift is not None
    return (
        lse,
        score,
        largest,
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty((t, x.shape[1]), dtype=dtype),
        x.new_empty(n_shared if adds else 0, dtype=sums),
    )


def fake_dot_grad(
    g_lse,
    g_score,
    lse,
    ux,
    columns,
    added,
    target_column,
    n_shared,
    x_dtype,
    w_dtype,
    bias_dtype,
    kernel,
    need_x,
    need_w,
    need_bias,
):
    "The shapes of `dot_lse_bwd`'s results."
    return (
        ux.new_empty(ux.shape if need_x else 0, dtype=x_dtype),
        ux.new_empty(columns.shape if need_w else 0, dtype=w_dtype),
        ux.new_empty((columns.shape[0] if need_bias else 0, 1), dtype=bias_dtype),
    )


def save_numbers(ctx, inputs):
    "What a backward pass has to know, tensors aside."
    ctx.sparse, ctx.shapes = inputs.sparse, (inputs.w.shape, None if inputs.bias is None else inputs.bias.shape)
    ctx.dtypes = inputs.x.dtype, inputs.w.dtype, inputs.w.dtype if inputs.bias is None else inputs.bias.dtype


def both_or_zero(like: Tensor, *grads: Optional[Tensor]) -> list[Tensor]:
    "Gradients, zeros where there are none."
    return [torch.zeros_like(like) if g is None else g for g in grads]


def as_parameters(
    ctx, needs, index: Optional[Tensor], dx: Tensor, dw: Tensor, dbias: Tensor
) -> dict[str, Optional[Tensor]]:
    "Gradients by name, those of rows as sparse tensors, or dense."
    found = {"x": dx, "w": dw, "bias": dbias}
    for name, shape in zip(("w", "bias"), ctx.shapes):
        if getattr(needs, name) and index is not None:
            found[name] = rows_gradient(index, found[name], shape, ctx.sparse)
    return {name: d for name, d in found.items() if getattr(needs, name)}


def save_dot_lse(ctx, inputs, output):
    "Rows, columns, what is added to scores, and lse; w itself only where all of it is scored."
    lse, _, largest, *rows = output
    ux, columns, added = rows
    if taken_whole(inputs.w, inputs.w_rows, inputs.dtype):
        columns = inputs.w
    ctx.save_for_backward(lse, ux, columns, added, inputs.target_column, inputs.grad_index)
    ctx.mark_non_differentiable(largest, *rows)
    save_numbers(ctx, inputs)
    ctx.how = inputs.n_shared, *ctx.dtypes, inputs.kernel


def dot_lse_gradients(ctx, needs, g_lse, g_score, *_) -> dict[str, Optional[Tensor]]:
    "dx, dw and the bias's gradient, from those of lse and score."
    *tensors, index = ctx.saved_tensors
    g = both_or_zero(tensors[0], g_lse, g_score)
    found = dot_lse_grad(*g, *tensors, *ctx.how, needs.x, needs.w, needs.bias)
    return as_parameters(ctx, needs, index, *found)


dot_lse_grad = operator(
    "dot_lse_grad",
    dot_lse_bwd,
    fake=fake_dot_grad,
    flops=lambda i, out: products(i.ux, i.columns[: i.n_shared], i.need_x, i.need_w),
)
dot_lse = operator(
    "dot_lse",
    dot_lse_fwd,
    fake=fake_dot_lse,
    save=save_dot_lse,
    backward=dot_lse_gradients,
    flops=lambda i, out: products(i.x, i.w if i.w_rows is None else i.w_rows[: i.n_shared]),
)


GATHERED = 2**26  # bytes of the rows that a block gathers


def row_blocks(x: Tensor, w: Tensor, classes: Tensor) -> list[slice]:  # [N,H], [V,H], [N,K]
    "Blocks of rows, whose classes' rows take some `GATHERED` bytes."
    bytes_of_row = classes.shape[1] * x.shape[1] * (w.element_size() + 2 * acc_dtype(x.dtype).itemsize)
    return tile_slices(len(x), max(1, GATHERED // max(bytes_of_row, 1)))


def gathered_scores(
    x: Tensor,  # [B,H] of products
    w: Tensor,  # [V,H]
    bias: Optional[Tensor],  # [V,1]
    level: Tensor | float,  # of `bias_level`
    classes: Tensor,  # [B,K]
) -> tuple[Tensor, Tensor]:  # [B,K,H], [B,K] in `acc_dtype`
    "Rows of each row's classes, and their scores less the level of biases."
    at = classes.clamp(min=0)
    rows = wide(w[at].to(x.dtype)).masked_fill_((classes < 0)[:, :, None], 0)
    z = torch.bmm(rows, wide(x)[:, :, None])[:, :, 0]
    return rows, z if bias is None else z + (bias[at, 0].to(z.dtype) - level)


def row_lse_fwd(
    x: Tensor,  # [N,H]
    w: Tensor,  # [V,H]
    bias: Optional[Tensor],  # [V,1]
    x_rows: Tensor,  # [N]
    # of `RowDraws`
    classes: Tensor,
    shift: Tensor,
    place: Tensor,
    grad_index: Tensor,
    dtype: torch.dtype,  # of products
    sparse: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # [N] each
    "lse and largest of each row's negatives, and the score of its target or 0, all less the level of biases."
    level = bias_level(bias, acc_dtype(x.dtype))
    lse, score, largest = (x.new_empty(len(x), dtype=acc_dtype(x.dtype)) for _ in range(3))
    for i in row_blocks(x, w, classes):
        _, z = gathered_scores(taken_rows(x, x_rows[i], dtype), w, bias, level, classes[i])
        score[i] = torch.where(classes[i, -1] >= 0, z[:, -1], 0.0)
        negatives = torch.where(shift[i] == -torch.inf, -torch.inf, z[:, :-1] + shift[i])
        lse[i], largest[i] = negatives.logsumexp(1), negatives.amax(1)
    return lse, score, largest


def score_gradients(
    # [B,K+1], [B,K]; [B] each
    z: Tensor,
    shift: Tensor,
    lse: Tensor,
    g_lse: Tensor,
    g_score: Tensor,
) -> Tensor:  # [B,K+1]
    "Gradients of a block's scores."
    p = (z[:, :-1] + shift - positive_infinity(lse)[:, None]).exp()
    p = torch.where(shift == -torch.inf, 0.0, p * g_lse[:, None])
    return torch.cat([p, g_score[:, None]], 1)


def row_lse_bwd(
    g_lse: Tensor,
    g_score: Tensor,
    lse: Tensor,
    x: Tensor,
    w: Tensor,
    bias: Optional[Tensor],
    x_rows: Tensor,
    classes: Tensor,
    shift: Tensor,
    place: Tensor,
    n_rows: int,
    dtype: torch.dtype,
    need_x: bool,
    need_w: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    "dx [N,H], gradients of `n_rows` rows [T,H] and of their biases [T,1]; empty where not needed."
    dx, values, biases = (
        lse.new_zeros(size if need else (0,) * len(size))
        for need, size in ((need_x, x.shape), (need_w, (n_rows, x.shape[1])), (need_bias, (n_rows, 1)))
    )
    g_score = torch.where(classes[:, -1] >= 0, g_score, 0.0)
    level = bias_level(bias, lse.dtype)
    for i in row_blocks(x, w, classes):
        ux = taken_rows(x, x_rows[i], dtype)
        rows, z = gathered_scores(ux, w, bias, level, classes[i])
        dz = score_gradients(z, shift[i], lse[i], g_lse[i], g_score[i])
        if need_x:
            dx[i] = torch.bmm(dz[:, None], rows)[:, 0]
        if need_w:
            spend(values, place[i], torch.mul(dz[:, :, None], wide(ux)[:, None], out=rows))
        if need_bias:
            spend(biases, place[i], dz[:, :, None])
    return dx.to(x.dtype), values.to(w.dtype), biases.to(w.dtype if bias is None else bias.dtype)


def spend(total: Tensor, place: Tensor, values: Tensor):  # [T,H]; [B,K], [B,K,H]
    "Add values to the rows that they belong to, the same bits every time."
    place, values = place.flatten(), values.flatten(0, 1)
    if total.is_cuda:
        total.index_put_((place,), values, accumulate=True)
    else:
        total.index_add_(0, place, values)


def fake_row_grad(
    g_lse, g_score, lse, x, w, bias, x_rows, classes, shift, place, n_rows, dtype, need_x, need_w, need_bias
):
    "The shapes of `row_lse_bwd`'s results."
    like = lambda t, need, *size: x.new_empty(size if need else (0,) * len(size), dtype=t.dtype)
    return (
        like(x, need_x, *x.shape),
        like(w, need_w, n_rows, x.shape[1]),
        like(w if bias is None else bias, need_bias, n_rows, 1),
    )


def save_row_lse(ctx, inputs, output):
    "What is gathered from, which scores, and lse."
    ctx.save_for_backward(output[0], *inputs[:7], inputs.grad_index)
    ctx.mark_non_differentiable(output[2])
    save_numbers(ctx, inputs)
    ctx.dtype = inputs.dtype


def row_lse_gradients(ctx, needs, g_lse, g_score, *_) -> dict[str, Optional[Tensor]]:
    "dx, dw and the bias's gradient, from those of lse and score."
    *tensors, index = ctx.saved_tensors
    g = both_or_zero(tensors[0], g_lse, g_score)
    found = row_lse_grad(*g, *tensors, index.shape[0], ctx.dtype, needs.x, needs.w, needs.bias)
    return as_parameters(ctx, needs, index, *found)


row_lse_grad = operator(
    "row_lse_grad",
    row_lse_bwd,
    fake=fake_row_grad,
    flops=lambda i, out: 2 * i.classes.numel() * i.x.shape[1] * (1 + i.need_x + i.need_w),
)
row_lse = operator(
    "row_lse",
    row_lse_fwd,
    save=save_row_lse,
    backward=row_lse_gradients,
    fake=lambda x, *_: tuple(x.new_empty(x.shape[0], dtype=acc_dtype(x.dtype)) for _ in range(3)),
    flops=lambda i, out: 2 * i.classes.numel() * i.x.shape[1],
)
