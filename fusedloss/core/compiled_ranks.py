"""A loss over ranks under `torch.compile`: one operator, which does when the graph runs what the loss does without a compiler."""

import functools
import inspect
import types
import weakref
from contextlib import AbstractContextManager, contextmanager, ExitStack, nullcontext
from typing import (
    Any,
    Callable,
    get_args,
    get_origin,
    get_type_hints,
    Iterator,
    Literal,
    NamedTuple,
    Optional,
    Sequence,
    TypeVar,
    Union,
)

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fusedloss.core.checks import expect
from fusedloss.core.operators import autocasts, is_recorded, operator, SECOND, typed_signature
from fusedloss.core.ranks import is_dtensor
from fusedloss.core.weights import weight_and_bias


GRADED = (
    "input",
    "linear_weight",
    "linear_bias",
    "x",
    "y",
    "scale",
    "logit_scale",
    "logit_bias",
)  # arguments that have gradients
WHERE = ("mesh", "num_classes", "backbone_reduction", "generator")  # that no schema has, or a site has for it
TENSORS = (Tensor, Optional[Tensor])

_meshes = weakref.WeakKeyDictionary()  # by process group


class Site(NamedTuple):
    "Where a call's tensors lie, in words and numbers."

    group: str  # the name of the ranks' group; "": one process has all
    num_classes: Optional[int]  # V of all ranks
    token_dim: Optional[int]  # in which the tokens of an input that is a DTensor lie over the ranks
    tokens: int  # of all ranks in that dimension
    backbone_reduction: Optional[str]
    autocast: Optional[torch.dtype]  # None: it is off

    def process_group(self):
        "The ranks; None: one process has all."
        return torch.distributed.distributed_c10d._resolve_process_group(self.group) if self.group else None

    def mesh(self, device: torch.device) -> Optional[DeviceMesh]:
        "The ranks in one dimension."
        group = self.process_group()
        if group is not None and group not in _meshes:
            _meshes[group] = DeviceMesh.from_group(group, device.type)
        return None if group is None else _meshes[group]

    def placed(self, input: Tensor) -> Tensor:
        "This rank's part of an input, as the caller had it."
        if self.token_dim is None:
            return input
        from torch.distributed.tensor import DTensor, Shard

        mesh, shape = self.mesh(input.device), list(input.shape)
        shape[self.token_dim] = self.tokens
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            input, mesh, [Shard(self.token_dim)], run_check=False, shape=torch.Size(shape), stride=stride
        )

    def casting(self, device: str) -> AbstractContextManager:
        "The caller's autocast, which is over when the graph runs."
        return nullcontext() if self.autocast is None else torch.autocast(device, dtype=self.autocast)


OF_CLASSES = ("linear_bias", "teacher_weight", "teacher_bias")  # lie as the weight does; others as the input


def place_of(name: str, t: Tensor) -> tuple[str, Optional[int]]:
    "The ranks of a DTensor, by their group's name, and the dimension that lies over them; None: each rank has all."
    one = t.device_mesh.ndim == 1 and not t.placements[0].is_partial()
    expect(one, name, "a DTensor over a mesh of one dimension", "another placement")
    placement = t.placements[0]
    return t.device_mesh.get_group().group_name, placement.dim if placement.is_shard() else None


def site_of(
    given: dict[str, Any],  # a call's arguments by name
    input: Tensor,
) -> Site:
    "Where they lie; `ValueError` for a weight or an input that lies elsewhere than a loss over ranks takes it."
    weight, mesh, n_classes, dim = given.get("linear_weight"), given["mesh"], given.get("num_classes"), None
    group = "" if mesh is None else mesh.get_group().group_name
    if is_dtensor(weight):
        (group, rows), n_classes = place_of("linear_weight", weight), weight.shape[0]
        expect(rows == 0, "linear_weight", "[Shard(0)] on a mesh of one dimension", "another placement")
    if is_dtensor(input):
        ranks, dim = place_of("input", input)
        fits = weight is not None and ranks == group and dim != input.dim() - 1
        expect(fits, "input", "whole features on the weight's mesh", "another placement")
    device = input.device.type
    autocast = torch.get_autocast_dtype(device) if autocasts(device) else None
    return Site(group, n_classes, dim, 0 if dim is None else input.shape[dim], given["backbone_reduction"], autocast)


def local_part(name: str, given: dict[str, Any], input: Tensor) -> Optional[Tensor]:
    "This rank's part of an argument; all of the weights of all classes; None for what is no tensor."
    t = given[name]
    if not isinstance(t, Tensor):
        return None
    if not is_dtensor(t):
        return t
    if name == "weight":
        return t.full_tensor()
    like = t if name == "linear_weight" else given["linear_weight"] if name in OF_CLASSES else input
    fits = is_dtensor(like) and place_of(name, t) == place_of(name, like)
    expect(fits, name, "a plain tensor, or one over the ranks as the weight or the input", "another placement")
    return t.to_local()


@contextmanager
def recording() -> Iterator[None]:
    "Autograd at work as for a caller, in an operator's kernel, where the dispatcher has left it."
    with ExitStack() as stack:
        for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


class Parameter(NamedTuple):
    "An argument of a loss, as a schema has it."

    name: str
    kind: Any  # Tensor, Optional[Tensor], or a type of numbers, words or options
    number: str = ""  # the name of a place of its own, where a number may stand for the tensor


def kinds_of(annotation: Any) -> tuple:
    "The types that an argument may have; a word's for one of several."
    if get_origin(annotation) is Literal:
        return (str,)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(kind for part in get_args(annotation) for kind in kinds_of(part))
    return (annotation,)


def parameter_of(name: str, annotation: Any) -> Parameter:
    "What a schema makes of an argument."
    kinds = kinds_of(annotation)
    optional = type(None) in kinds
    if Tensor in kinds:
        number = f"{name}_number" if float in kinds else ""
        return Parameter(name, Optional[Tensor] if number or optional else Tensor, number)
    kind = next(kind for kind in kinds if kind is not type(None))
    return Parameter(name, Optional[kind] if optional else kind)


def with_signature(
    run: Callable,
    kinds: dict[str, Any],  # of its arguments, by name
    n: int,  # tensors that it returns
) -> Callable:
    "`run`, of which an operator can be made."
    fn = lambda *given: run(*given)
    fn.__annotations__, fn.__signature__ = kinds, typed_signature(kinds.items(), tuple[(Tensor,) * n])
    return fn


def room_for(t: Tensor) -> Tensor:
    "A gradient's place."
    return torch.empty_like(t, memory_format=torch.contiguous_format)


class RankLoss:
    """A loss over ranks as two operators: its results, and its gradients.

    Where the loss is one number, the forward pass makes the gradients too, and nothing is computed twice. Where each token has
    an upstream gradient of its own, or fp16 would round a gradient to zero before it is multiplied, the backward pass makes the
    call again.
    """

    def __init__(
        self,
        name: str,  # of the operators
        loss: Callable,  # takes `mesh` and `backbone_reduction`
        parts: Callable,  # of what it returns: its tensors, None in the place of one that was not asked for
        fake: Callable,  # (arguments by name) to such tensors without numbers
        differentiable: tuple[bool, ...],  # each of them
    ):
        self.loss, self.parts, self.fake, self.differentiable = loss, parts, fake, differentiable
        hints = get_type_hints(loss)
        self.defaults = {p.name: p.default for p in inspect.signature(loss).parameters.values()}
        self.parameters = [parameter_of(name, hints[name]) for name in self.defaults if name not in WHERE]
        self.tensors = [p.name for p in self.parameters if p.kind in TENSORS]
        self.graded = [name for name in GRADED if name in self.tensors]
        kinds = {p.name: p.kind for p in self.parameters} | {p.number: float for p in self.parameters if p.number}
        kinds |= dict(site=Site, needs=Sequence[bool], early=bool)
        upstream = {f"g_{i}": Optional[Tensor] for i in range(len(differentiable))}
        self.n = len(differentiable)
        self.gradients = operator(
            f"{name}_grad",
            with_signature(self.run_gradients, upstream | kinds, len(self.graded)),
            fake=lambda *given: self.room(self.call(*given[self.n :]), True),
        )
        self.results = operator(
            name,
            with_signature(self.run, kinds, self.n + len(self.graded)),
            fake=self.fake_results,
            save=self.save,
            backward=self.backward,
        )
        self.call = self.results.arguments.named

    # --- while a compiler looks on ---

    def __call__(self, given: dict[str, Any]) -> tuple[Tensor, ...]:  # all of the loss's arguments by name
        "Its results, an empty one in the place of one that was not asked for."
        for of in ("linear", "teacher"):
            weight, bias = f"{of}_weight", f"{of}_bias"
            if weight in given:
                given[weight], given[bias] = weight_and_bias(given[weight], given[bias], weight)
        expect(given.get("generator") is None, "generator", "None under torch.compile", "a generator")
        input = given[self.tensors[0]]
        site, tensors = site_of(given, input), {name: local_part(name, given, input) for name in self.tensors}
        numbers = [1.0 if isinstance(given[p.name], Tensor) else given[p.name] for p in self.parameters if p.number]
        graded = [tensors[name] for name in self.graded]
        needs = [t is not None and torch.is_grad_enabled() and t.requires_grad for t in graded]
        one = given.get("reduction", "none") != "none" and (given.get("monitored") or not given.get("return_stats"))
        half = site.autocast == torch.float16 or any(t is not None and t.dtype == torch.float16 for t in graded)
        values = [tensors[p.name] if p.kind in TENSORS else given[p.name] for p in self.parameters]
        return self.results(*values, *numbers, site, needs, any(needs) and one and not half)[: self.n]

    def room(self, call, wanted: bool) -> tuple[Tensor, ...]:
        "A place for each gradient that is wanted and needed, an empty one for the others."
        nothing, given = self.nothing(call), [getattr(call, name) for name in self.graded]
        return tuple(room_for(t) if wanted and need else nothing() for t, need in zip(given, call.needs))

    def nothing(self, call) -> Callable[[], Tensor]:
        "What stands in the place of what was not asked for."
        return lambda: getattr(call, self.tensors[0]).new_empty(0)

    def fake_results(self, *given) -> tuple[Tensor, ...]:
        "The shapes of what `run` returns."
        call = self.call(*given)
        nothing = self.nothing(call)
        return *(nothing() if t is None else t for t in self.fake(call)), *self.room(call, call.early)

    def save(self, ctx, inputs, output):
        "The gradients that are there, or all that the call takes."
        ctx.early, n = inputs.early, self.n
        kept = [i < n and self.differentiable[i] and not (i and ctx.early) for i in range(len(output))]
        ctx.mark_non_differentiable(*(t for t, differs in zip(output, kept) if not differs))
        ctx.rest = inputs._replace(**dict.fromkeys(self.tensors))
        ctx.save_for_backward(*(output[n:] if ctx.early else [getattr(inputs, name) for name in self.tensors]))

    def backward(self, ctx, needs, *g) -> dict[str, Tensor]:
        "Gradients, where they are needed."
        if not ctx.early:
            call = ctx.rest._replace(**dict(zip(self.tensors, ctx.saved_tensors)))
            found = self.gradients(*g[: self.n], *call)
        elif torch.is_grad_enabled() and not is_recorded():
            raise RuntimeError(SECOND)
        else:
            found = [torch.where(d == 0, 0.0, d.to(g[0].dtype) * g[0]).to(d.dtype) for d in ctx.saved_tensors]
        return {name: d for name, d in zip(self.graded, found) if getattr(needs, name)}

    # --- when the graph runs ---

    def arguments(self, call, leaves: dict[str, Tensor]) -> dict[str, Any]:  # those that are differentiated
        "What the loss is called with, by name, as its caller did."
        given = {p.name: getattr(call, p.name) for p in self.parameters} | leaves
        given |= {p.name: getattr(call, p.number) for p in self.parameters if p.number and given[p.name] is None}
        site, first = call.site, self.tensors[0]
        mesh = site.mesh(given[first].device)
        given |= {first: site.placed(given[first]), "mesh": mesh, "backbone_reduction": site.backbone_reduction}
        return given | ({"num_classes": site.num_classes} if "num_classes" in self.defaults else {})

    def made(
        self,
        call,
        upstream: Callable[[tuple], Sequence[Optional[Tensor]]],  # of the results
    ) -> tuple[tuple, list[Tensor]]:
        "Results, and gradients where there is an upstream one."
        device, grads = getattr(call, self.tensors[0]).device.type, list(self.room(call, False))
        needed = [i for i, need in enumerate(call.needs) if need]
        with recording() if needed else torch.no_grad(), call.site.casting(device):
            leaves = {self.graded[i]: getattr(call, self.graded[i]).detach().requires_grad_() for i in needed}
            results = self.parts(self.loss(**self.arguments(call, leaves)))
            pairs = [(t, g) for t, g in zip(results, upstream(results)) if g is not None and t.requires_grad]
            if pairs:
                of, by = zip(*pairs)
                found = torch.autograd.grad(of, [*leaves.values()], by, allow_unused=True, materialize_grads=True)
                for i, d in zip(needed, found):
                    grads[i] = d.contiguous()
        return results, grads

    def run(self, *given) -> tuple[Tensor, ...]:
        "The results, and the gradients of one that is a number, if they are wanted."
        call = self.call(*given)
        results, grads = self.made(call, lambda results: [torch.ones_like(results[0])] if call.early else [])
        nothing = self.nothing(call)
        own = lambda t: t.detach().clone(memory_format=torch.contiguous_format)  # results may share their memory
        return *(nothing() if t is None else own(t) for t in results), *grads

    def run_gradients(self, *given) -> tuple[Tensor, ...]:  # upstream gradients, and as `run`
        "Gradients of the results: the call is made again."
        return tuple(self.made(self.call(*given[self.n :]), lambda _: given[: self.n])[1])


Loss = TypeVar("Loss", bound=Callable[..., Any])


def over_ranks(
    name: str,
    parts: Callable,
    fake: Callable,
    differentiable: tuple[bool, ...],  # as `RankLoss` takes them
    whole: Callable,  # (arguments by name, the results) to what the loss returns
    spread: Callable = lambda given: True,  # whether a call is one over ranks
) -> Callable[[Loss], Loss]:
    "Decorates a loss over ranks: under `torch.compile` it is one operator."

    def decorated(loss):
        compiled = RankLoss(name, loss, parts, fake, differentiable)
        names, defaults = tuple(compiled.defaults), compiled.defaults

        @functools.wraps(loss)
        def called(*args, **named):
            if not torch.compiler.is_compiling():
                return loss(*args, **named)
            given = defaults | dict(zip(names, args)) | named
            return whole(given, compiled(given)) if spread(given) else loss(*args, **named)

        return called

    return decorated
