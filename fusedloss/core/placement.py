"""Tensors, DTensors and rows beside a mesh: one rank's part of a call, whose the tokens are, and whether all ranks make the same call."""

from typing import Any, Callable, NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fusedloss.core.checks import (
    check_bias,
    check_budget,
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
from fusedloss.core.operators import first_order
from fusedloss.core.options import Asked, Operands
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
    "This rank's part of a DTensor; other tensors as they are."
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
    "Placements of a DTensor that goes with `t`."
    return [t.placements[0]] if is_dtensor(t) and len(t.placements) == 1 else []


def input_kinds(input: Tensor) -> list:
    "Placements of an input: whole everywhere, or its tokens over the ranks."
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate(), *(Shard(d) for d in range(input.dim() - 1))]  # the last is features'


def local_heads(
    # input, weight, bias each
    student: tuple,
    teacher: tuple,
    token_weight: Optional[Tensor],
    temperature: float | Tensor,
    mesh,
) -> tuple[tuple, tuple, Optional[Tensor], float | Tensor]:
    "This rank's part of two linear layers, their inputs, the tokens' weights and their temperatures."
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
        of_tokens(temperature, "temperature"),
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


def class_shards(
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


class LocalCall(NamedTuple):
    "One rank's part of a call."

    tensors: Operands  # of this rank, but for the weights of all classes
    shards: Shards
    batch: RankTokens
    temperature: Optional[Tensor] = None  # [...] as the target
    first_tokens: int = 0  # of a sequence, those of the first rank; 0 where ranks do not share sequences
    agreed: Agreement = Agreement([])  # of all ranks


def rank_part(
    t: Operands,  # as a caller gives them
    s: Shards,
    mesh,
    backbone_reduction: Optional[str] = None,
    temperature: Optional[Tensor] = None,  # [...] as the target
) -> LocalCall:
    "What a call's tensors have on this rank."
    x, mesh = t.input, t.linear_weight.device_mesh if is_dtensor(t.linear_weight) else mesh
    of_classes = lambda name: local_of(getattr(t, name), name, mesh, kinds_for(t.linear_weight))
    of_tokens = lambda value, name: local_of(value, name, mesh, kinds_for(x))
    here = t._replace(
        input=local_of(x, "input", mesh, input_kinds(x) if is_dtensor(x) else []),
        linear_weight=of_classes("linear_weight"),
        target=of_tokens(t.target, "target"),
        linear_bias=of_classes("linear_bias"),
        weight=t.weight.full_tensor() if is_dtensor(t.weight) else t.weight,
        token_weight=of_tokens(t.token_weight, "token_weight"),
    )
    b, dim = batch_of(x, s, backbone_reduction)
    shared = dim >= 0 and dim == x.dim() - 2
    first = len(shard_range(x.shape[dim], s.ranks, 0)) if shared else 0
    return LocalCall(here, s, b, of_tokens(temperature, "temperature"), first)


def check_rank_part(call: LocalCall, a: Asked):
    "`ValueError` for what no loss over ranks accepts; labels are looked at when all are here."
    t, s = call.tensors, call.shards
    check_linear(t.input, t.linear_weight)
    check_target(t.target, t.input.shape[:-1], t.input.device, a.reduction)
    expect(s.n_classes > 0, "linear_weight", "at least one class", s.n_classes)
    check_bias(t.input, t.linear_weight, t.linear_bias, ", of this rank's classes")
    check_flags(return_stats=a.return_stats)
    check_weights(s.n_classes, t.linear_weight.device, t.weight, t.token_weight, t.target.shape)
    expect(type(a.shift) is int and a.shift >= 0, "shift", "an integer not below 0", repr(a.shift))
    expect(not a.shift or t.input.dim() > 1, "shift", "0 where the input has no token dimension", a.shift)
    check_budget(a.memory_budget)


def call_facts(call: LocalCall, a: Asked) -> dict[str, Any]:
    "What has to be the same on all ranks, and how many rows are here."
    t, s = call.tensors, call.shards
    numbers = {"token_weight": t.token_weight, "temperature": call.temperature}
    graded = t.input, t.linear_weight, t.linear_bias
    facts = a._asdict() | {
        "options": a.options._asdict(),
        "features": t.input.shape[-1],
        "dtype of input": str(t.input.dtype),
        "dtype of linear_weight": str(t.linear_weight.dtype),
        "num_classes": s.n_classes,
        "linear_bias": t.linear_bias is not None,
        "numbers of tokens": [name for name, number in numbers.items() if number is not None],
        "weight": t.weight,
        "requires_grad of input, linear_weight and linear_bias": [t is not None and t.requires_grad for t in graded],
        "gradients": torch.is_grad_enabled(),
        "rows": call.batch.own,
    }
    if s.group is None or not call.batch.shared:
        return facts
    return facts | {"shape of input": [*t.input.shape], "target": t.target} | numbers


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


def agreed_batch(
    look: Callable[[], dict[str, Any]],
    input: Tensor,  # as a caller gives it
    x: Tensor,  # the input here
    b: RankTokens,
    s: Shards,
) -> tuple[Agreement, RankTokens]:
    "What all ranks say of their calls, and whose the tokens are when each rank has said how many it has."
    rows_known = b.shared or is_dtensor(input)
    agreed = agreed_calls(look, x, s, rows_known)
    return agreed, b if rows_known else b._replace(rows=max(facts["rows"] for facts in agreed.calls))


def local_call(
    t: Operands,  # as a caller gives them
    a: Asked,
    mesh=None,  # of a weight that is this rank's rows
    num_classes: Optional[int] = None,  # likewise
    scale: Optional[Tensor] = None,  # learned
    temperature: Optional[Tensor] = None,  # [...] as the target
    look: Callable[[LocalCall], dict[str, Any]] = lambda call: {},  # checks what the caller alone knows; more facts
) -> LocalCall:
    "This rank's part of a call, checked on all ranks at once."
    for name in ("input", "linear_weight", "target"):
        expect_tensor(name, getattr(t, name), over_ranks=True)
    s = class_shards(t.linear_weight, mesh, num_classes)
    call = rank_part(t, s, mesh, a.backbone_reduction, temperature)

    def checked_facts():
        check_reduction(a.backbone_reduction, t.input, s, scale)
        check_rank_part(call, a)
        learned = {"requires_grad of logit_scale": scale is not None and scale.requires_grad, "logit_scale": scale}
        return look(call) | call_facts(call, a) | learned

    agreed, batch = agreed_batch(checked_facts, t.input, call.tensors.input, call.batch, s)
    x, bias = scale_shard(scale, call.tensors.input, call.tensors.linear_bias, batch, s)
    return call._replace(tensors=call.tensors._replace(input=x, linear_bias=bias), batch=batch, agreed=agreed)


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
        padded = F.pad(g, (*[0, 0] * (g.dim() - 1), 0, b.rows - len(g)))
        return all_gather(padded, s).flatten(0, 1), None, None


def own_rows(t: Tensor, b: RankTokens, s: Shards) -> Tensor:
    "The rows of this rank."
    return t if b.shared or s.group is None else _OwnRows.apply(t, b, s)
