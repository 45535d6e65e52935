"""Scores times a scale that has a gradient: it goes into the features before the product, and its gradient comes out of theirs."""

from typing import Any, Callable, Optional

import torch
from torch import nn, Tensor

from fusedloss.core.checks import acc_dtype, check_scale, FLOATS
from fusedloss.core.operators import operator
from fusedloss.core.products import tile_slices


CHUNK = 2**22  # numbers that are held in `acc_dtype` at once


def one_wide(s: Tensor, t: Tensor) -> Tensor:  # [1]
    "A scale as products with `t` take it: not rounded to a narrower dtype."
    return s.to(acc_dtype(t.dtype)).reshape(1)


def scaled_fwd(t: Tensor, s: Tensor) -> Tensor:  # any shape, a scalar
    "t · s, rounded once."
    rows, out, wide_s = t.reshape(-1), torch.empty_like(t, memory_format=torch.contiguous_format), one_wide(s, t)
    made = out.view(-1)
    for i in tile_slices(len(rows), CHUNK):
        torch.mul(rows[i], wide_s, out=made[i])
    return out


def grad_of_scale(g: Tensor, t: Tensor) -> Tensor:  # a scalar in `acc_dtype`
    "The sum of g · t over all numbers."
    g, t, acc = g.reshape(-1), t.reshape(-1), acc_dtype(t.dtype)
    parts = [torch.where(g[i] == 0, 0.0, g[i].to(acc) * t[i]).sum() for i in tile_slices(len(t), CHUNK)]
    return torch.stack(parts).sum() if parts else t.new_zeros((), dtype=acc)


def scaled_bwd(
    g: Tensor,
    t: Tensor,
    s: Tensor,
    need_t: bool,
    need_s: bool,
) -> tuple[Tensor, Tensor]:
    "Gradients of t and s, in their dtypes; empty where not needed."
    dt = scaled_fwd(g, s) if need_t else t.new_empty(0)
    return dt, grad_of_scale(g, t).to(s.dtype) if need_s else s.new_empty(0)


def fake_scaled_grad(g, t, s, need_t, need_s):
    "The shapes of `scaled_bwd`'s results."
    dt = torch.empty_like(g, memory_format=torch.contiguous_format) if need_t else t.new_empty(0)
    return dt, s.new_empty(() if need_s else 0)


def save_scaled(ctx, inputs, output):
    "Both factors."
    ctx.save_for_backward(*inputs)


def scaled_gradients(ctx, needs, g: Tensor) -> dict[str, Optional[Tensor]]:
    "Those that are needed."
    if not (needs.t or needs.s):
        return {}
    dt, ds = scaled_grad(g, *ctx.saved_tensors, needs.t, needs.s)
    return {"t": dt if needs.t else None, "s": ds if needs.s else None}


scaled_grad = operator("scaled_grad", scaled_bwd, fake=fake_scaled_grad)
scaled_by = operator(
    "scaled_by",
    scaled_fwd,
    save=save_scaled,
    backward=scaled_gradients,
    fake=lambda t, s: torch.empty_like(t, memory_format=torch.contiguous_format),
)


def take_scale(
    options: dict[str, Any],  # by name, as a caller gave them
) -> Optional[Tensor]:
    "A `logit_scale` that is a tensor, taken out of the options; None if it is none."
    return options.pop("logit_scale") if isinstance(options.get("logit_scale"), Tensor) else None


def is_scalable(t: Any, scale: Tensor) -> bool:
    "Whether it is a plain tensor of floats, where the scale is."
    return isinstance(t, Tensor) and not hasattr(t, "full_tensor") and t.dtype in FLOATS and t.device == scale.device


def fold_scale(
    scale: Optional[Tensor],  # a scalar; None changes nothing
    input: Tensor,  # what enters the product beside it
    *others: Optional[Tensor],  # such as a bias
) -> tuple:
    "`input` and the others times the scale; `ValueError` for a scale that is none."
    if scale is None or not isinstance(input, Tensor):
        return input, *others
    check_scale(scale, input.device, "input")
    return tuple(scaled_by(t, scale) if is_scalable(t, scale) else t for t in (input, *others))


def keep_scale(
    module: nn.Module,
    scale: Optional[Tensor],  # of its loss
):
    "Have `module.logit_scale`: a parameter if the scale is one, else a buffer."
    if scale is not None:
        check_scale(scale, scale.device, "input")
    if isinstance(scale, nn.Parameter):
        module.logit_scale = scale
    else:
        module.register_buffer("logit_scale", scale)


class _Gathered(torch.autograd.Function):
    "A scalar, whose gradient goes through a function."

    @staticmethod
    def forward(ctx, scale, gather):
        ctx.gather = gather
        return scale.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.gather(g), None


def gathered_scale(
    scale: Tensor,  # a scalar, the same on all ranks
    gather: Callable[[Tensor], Tensor],  # a rank's part of the gradient to what the rank returns
) -> Tensor:
    "The scale, for one rank's classes."
    return _Gathered.apply(scale, gather)
