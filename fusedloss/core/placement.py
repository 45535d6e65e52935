"""Tensors, DTensors and rows beside a mesh, seen from one rank: what of them lies here, whose the tokens are, and whether all ranks make the same call."""

from typing import Any, Callable, NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fusedloss.core.checks import (
    check_flags,
    check_linear,
    check_matrix,
    check_target,
    check_weights,
    expect,
    expect_tensor,
    is_integer,
)
from fusedloss.core.learned import fold_scale, gathered_scale
from fusedloss.core.operators import autocasts, first_order
from fusedloss.core.ranks import (
    agreed_facts,
    Agreement,
    all_gather,
    all_reduce,
    facts_device,
    is_dtensor,
    is_token_sharded,
    RankTokens,
    shard_range,
    Shards,
    shards_of,
)


def local_of(
    t,  # a tensor, a DTensor or None
    name: str,
    mesh,
    placements: list,  # those that will do
):
    "What of a DTensor lies here; other tensors as they are."
    if not is_dtensor(t):
        return t
    fits = t.device_mesh == mesh and t.placements in [(p,) for p in placements]
    expect(
        fits,
        name,
        f"a plain tensor, or one of {placements} on the weight's mesh",
        f"{list(t.placements)} on {t.device_mesh}",
    )
    return t.to_local()


def kinds_for(t: Tensor) -> list:
    "How a tensor may lie that goes with `t`."
    return [t.placements[0]] if is_dtensor(t) and len(t.placements) == 1 else []


def input_kinds(input: Tensor) -> list:
    "How an input may lie: whole everywhere, or its tokens over the ranks."
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate(), *(Shard(d) for d in range(input.dim() - 1))]  # the last is features'


def heads_here(
    # input, weight, bias each
    student: tuple,
    teacher: tuple,
    token_weight: Optional[Tensor],
    mesh,
) -> tuple[tuple, tuple, Optional[Tensor]]:
    "What of two linear layers, their inputs and the tokens' weights lies on this rank."
    (x, w, b), (teacher_x, teacher_w, teacher_b) = student, teacher
    mesh = w.device_mesh if is_dtensor(w) else mesh
    of_classes = lambda t, name: local_of(t, name, mesh, kinds_for(w))
    of_tokens = lambda t, name: local_of(t, name, mesh, kinds_for(x))
    here = local_of(x, "input", mesh, input_kinds(x) if is_dtensor(x) else [])
    return (
        (here, of_classes(w, "linear_weight"), of_classes(b, "linear_bias")),
        (
            of_tokens(teacher_x, "teacher_input"),
            of_classes(teacher_w, "teacher_weight"),
            of_classes(teacher_b, "teacher_bias"),
        ),
        of_tokens(token_weight, "token_weight"),
    )


def batch_of(
    input: Tensor,
    s: Shards,
    backbone_reduction: Optional[str],
) -> tuple[RankTokens, int]:
    "Whose the tokens are, and the dimension along which ranks share them, or -1."
    n, factor = input.shape[:-1].numel(), s.ranks if backbone_reduction == "mean" else 1
    if not is_token_sharded(input):
        return RankTokens(backbone_reduction is None, n, n, factor), -1
    dim = input.placements[0].dim
    others = n // max(input.shape[dim], 1)
    here = len(shard_range(input.shape[dim], s.ranks, s.rank))
    rows = others * len(shard_range(input.shape[dim], s.ranks, 0))
    return RankTokens(False, others * here, rows, factor), dim


def asked_shards(
    # as a caller gives them
    linear_weight: Tensor,
    mesh,
    num_classes: Optional[int],
) -> Shards:
    "Where the classes are; `ValueError` for a number of classes that is none."
    check_matrix("linear_weight", linear_weight, over_ranks=True)
    expect(
        num_classes is None or is_integer(num_classes) and num_classes > 0,
        "num_classes",
        "a positive integer or None",
        repr(num_classes),
    )
    return shards_of(linear_weight, mesh, num_classes)


def check_bias(bias: Optional[Tensor], x: Tensor, w: Tensor):
    "`ValueError` for a bias that does not go with this rank's classes."
    if bias is None:
        return
    expect_tensor("linear_bias", bias, "a tensor or None")
    mixes = autocasts(x.device.type) and bias.is_floating_point()
    expect(
        bias.shape == w.shape[:1] and (mixes or bias.dtype == w.dtype),
        "linear_bias",
        f"{w.dtype} [{len(w)}], of this rank's classes",
        f"{bias.dtype} {list(bias.shape)}",
    )
    expect(bias.device == x.device, "linear_bias", f"the input's device {x.device}", bias.device)


def check_reduction(
    backbone_reduction: Optional[str],
    input: Tensor,
    s: Shards,
    scale: Optional[Tensor] = None,  # learned
):
    "`ValueError` where a wrapper's reduction is unknown, or does not go with weight and input."
    how, many = backbone_reduction, dist.is_available() and dist.is_initialized()
    expect(how in (None, "mean", "sum"), "backbone_reduction", "'mean', 'sum' or None", repr(how))
    alone = how is None or s.group is not None or not many or dist.get_world_size() == 1
    expect(
        alone,
        "backbone_reduction",
        "None for a weight that is whole on each rank, as its "
        "wrapper reduces its gradient with the input's (a mean over all ranks' tokens is "
        "reduction='sum' times ranks / all valid tokens)",
        repr(how),
    )
    wants = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (input, scale))
    own = is_token_sharded(input)
    expect(
        how is not None or s.ranks == 1 or not (own and wants),
        "backbone_reduction",
        "'mean' where the wrapper of input's backbone averages gradients over ranks (FSDP2, "
        "DDP), 'sum' where they are added (parameters that are DTensors, or by hand)",
        None,
    )
    expect(
        how is None or s.ranks == 1 or own or not is_dtensor(input),
        "backbone_reduction",
        "None for an input that is the same on all ranks, Replicate()",
        repr(how),
    )


def check_sharded(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    given: dict,
    s: Shards,
    shift: int,
    budget: Optional[int],
):
    "`ValueError` for what no loss over ranks accepts; labels are looked at when all are here."
    check_linear(x, w)
    check_target(y, x.shape[:-1], x.device, given["reduction"])
    expect(s.n_classes > 0, "linear_weight", "at least one class", s.n_classes)
    check_bias(given["linear_bias"], x, w)
    check_flags(return_stats=given["return_stats"])
    check_weights(s.n_classes, w.device, given["weight"], given["token_weight"], y.shape)
    expect(type(shift) is int and shift >= 0, "shift", "an integer not below 0", repr(shift))
    expect(not shift or x.dim() > 1, "shift", "0 where the input has no token dimension", shift)
    expect(
        budget is None or type(budget) is int and budget > 0,
        "memory_budget",
        "a positive number of bytes or None",
        budget,
    )


def scale_shard(
    scale: Optional[Tensor],
    x: Tensor,
    bias: Optional[Tensor],
    b: RankTokens,
    s: Shards,
) -> tuple[Tensor, Optional[Tensor]]:
    "This rank's features and bias times a learned scale."
    (x,) = fold_scale(scale, x)
    if scale is None or bias is None:
        return x, bias
    gather = lambda g: all_reduce(g.clone(), s) if b.shared else g * b.factor
    return x, *fold_scale(gathered_scale(scale, gather), bias)


TOKEN_NUMBERS = "token_weight", "temperature"  # arguments of the target's shape


class Here(NamedTuple):
    "A call as one rank sees it."

    x: Tensor
    w: Tensor
    y: Tensor
    given: dict  # options, and tensors of this rank
    batch: RankTokens
    each: int  # tokens of a sequence on the first rank, where ranks share it; else 0
    agreed: Agreement = Agreement([])  # of all ranks


def seen_here(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    given: dict,
    s: Shards,
    mesh,
    backbone_reduction: Optional[str] = None,
) -> Here:
    "What of everything lies on this rank."
    mesh = linear_weight.device_mesh if is_dtensor(linear_weight) else mesh
    of_classes = lambda t, name: local_of(t, name, mesh, kinds_for(linear_weight))
    of_tokens = lambda t, name: local_of(t, name, mesh, kinds_for(input))
    kinds, weight = input_kinds(input) if is_dtensor(input) else [], given["weight"]
    x = local_of(input, "input", mesh, kinds)
    given = dict(
        given,
        linear_bias=of_classes(given["linear_bias"], "linear_bias"),
        weight=weight.full_tensor() if is_dtensor(weight) else weight,
        **{name: of_tokens(given[name], name) for name in TOKEN_NUMBERS if name in given},
    )
    b, dim = batch_of(input, s, backbone_reduction)
    sequence = dim >= 0 and dim == input.dim() - 2
    each = len(shard_range(input.shape[dim], s.ranks, 0)) if sequence else 0
    return Here(x, of_classes(linear_weight, "linear_weight"), of_tokens(target, "target"), given, b, each)


def call_facts(here: Here, s: Shards) -> dict[str, Any]:
    "What has to be the same on all ranks, and how many rows are here."
    given, tensors = here.given, (here.x, here.w, here.given["linear_bias"])
    facts = {
        "features": here.x.shape[-1],
        "dtype of input": str(here.x.dtype),
        "dtype of linear_weight": str(here.w.dtype),
        "num_classes": s.n_classes,
        "options": given["options"]._asdict(),
        "reduction": given["reduction"],
        "return_stats": given["return_stats"],
        "method": given.get("method"),
        "asked": given.get("asked"),
        "linear_bias": given["linear_bias"] is not None,
        "numbers of tokens": [name for name in TOKEN_NUMBERS if given.get(name) is not None],
        "weight": given["weight"],
        "requires_grad of input, linear_weight and linear_bias": [t is not None and t.requires_grad for t in tensors],
        "gradients": torch.is_grad_enabled(),
        "rows": here.batch.own,
    }
    if s.group is None or not here.batch.shared:
        return facts
    return (
        facts
        | {"shape of input": [*here.x.shape], "target": here.y}
        | {name: given.get(name) for name in TOKEN_NUMBERS}
    )


OWN_TARGETS = (
    "; for tokens of each rank's own give backbone_reduction: 'mean' where input's wrapper averages gradients "
    "over ranks (FSDP2, DDP), else 'sum'"
)


def agreed_calls(
    look: Callable[[], dict[str, Any]],  # as `agreed_facts` takes it
    x: Tensor,  # the input here
    s: Shards,
    rows_known: bool,  # of all ranks, without asking them
) -> Agreement:
    "What all ranks say of their calls. Nobody waits for a GPU whose graph is captured: where facts do not travel on the host, a rank looks at its own."
    alone = (
        x.is_cuda
        and torch.cuda.is_current_stream_capturing()
        and s.group is not None
        and facts_device(s, x.device) != "cpu"
    )
    expect(
        rows_known or not alone,
        "input",
        "a DTensor, or process groups with a backend for CPUs, while a CUDA graph is captured",
        "a plain tensor of this rank's own tokens",
    )
    return agreed_facts(
        look,
        s._replace(group=None) if alone else s,
        x.device,
        ("rows",),
        dict.fromkeys(("target", "input", "shape of input"), OWN_TARGETS),
    )


def placed(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    given: dict,
    shift: int,
    memory_budget: Optional[int],
    mesh,
    num_classes: Optional[int],
    backbone_reduction: Optional[str],
    scale: Optional[Tensor] = None,  # learned
    check: Callable[[Here], None] = lambda here: None,  # of what the caller alone knows
) -> tuple[Here, Shards]:
    "What lies on this rank, checked, on all ranks at once."
    for name, t in dict(input=input, linear_weight=linear_weight, target=target).items():
        expect_tensor(name, t, over_ranks=True)
    s = asked_shards(linear_weight, mesh, num_classes)
    here = seen_here(input, linear_weight, target, given, s, mesh, backbone_reduction)

    def look():
        check_reduction(backbone_reduction, input, s, scale)
        check_sharded(*here[:4], s, shift, memory_budget)
        check(here)
        learned = {"requires_grad of logit_scale": scale is not None and scale.requires_grad}
        return (
            call_facts(here, s)
            | learned
            | dict(shift=shift, memory_budget=memory_budget, backbone_reduction=backbone_reduction, logit_scale=scale)
        )

    rows_known = here.batch.shared or is_dtensor(input)
    agreed = agreed_calls(look, here.x, s, rows_known)
    x, bias = scale_shard(scale, here.x, here.given["linear_bias"], here.batch, s)
    here = here._replace(x=x, given=here.given | dict(linear_bias=bias), agreed=agreed)
    if rows_known:
        return here, s
    return here._replace(batch=here.batch._replace(rows=max(call["rows"] for call in agreed.calls))), s


class _OwnRows(torch.autograd.Function):
    "This rank's part of all rows' numbers; backward collects what every rank says of its own."

    @staticmethod
    def forward(ctx, t, b, s):
        ctx.how, ctx.size = (b, s), len(t)
        return t[b.token_slice(s)].clone()

    @staticmethod
    @first_order
    def backward(ctx, g):
        b, s = ctx.how
        padded = F.pad(g, (0, b.rows - len(g)))
        return all_gather(padded, s).flatten(), None, None


def own_rows(t: Tensor, b: RankTokens, s: Shards) -> Tensor:
    "The rows of this rank."
    return t if b.shared or s.group is None else _OwnRows.apply(t, b, s)
