"""What every operator of the library shares: how it is registered, differentiated and counted."""

__all__ = [
    "is_repeated",
    "keeps_graph",
    "is_batched",
    "is_legacy",
    "for_each",
    "for_each_of_batch",
    "each_upstream",
    "Later",
    "is_later",
    "in_scalar",
    "quotient",
    "in_tensor",
    "products",
    "operator",
]


import functools
import inspect
import itertools
import math
import sys
import threading
from collections import namedtuple
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Callable, get_type_hints, Iterable, Optional, Sequence

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as are_transforms_active
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch._C._functorch import is_legacy_batchedtensor
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from fusedloss._ops import add_op_namespace_prefix


SECOND = (
    "fusedloss: a gradient of this loss has no derivative of its own (create_graph=True, "
    "hessian); take torch.nn.functional's loss of the logits for second derivatives"
)
FORWARD = (
    "fusedloss: this loss has no forward-mode derivative (torch.func.jvp, jacfwd, dual "
    "tensors); take backward() or torch.func.grad, or torch.nn.functional's loss"
)
BATCHED = (
    "fusedloss: this loss is not batched by torch.vmap; give it all rows in one call, "
    "with reduction='none' for a loss of each, or take torch.nn.functional's loss"
)
SPARSE = (
    "fusedloss: a sparse gradient comes for one upstream gradient, not for a batch of them "
    "(is_grads_batched, jacobian(vectorize=True)); take a head with sparse=False"
)


class _Refusal(torch.autograd.Function):
    "Its first `n` tensors, as functions of the others whose derivative raises."

    @staticmethod
    def forward(n, *tensors):
        return tuple(t if t is None else t.data for t in tensors[:n])

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *g):
        raise RuntimeError(SECOND)

    @staticmethod
    def jvp(ctx, *tangents):
        raise RuntimeError(FORWARD)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        raise RuntimeError(BATCHED)


class _Saved:
    "A Function's context, whose saved tensors are read once: checkpointing hands them out once."

    def __init__(self, ctx):
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str):
        return getattr(self.ctx, name)


class _Repeated(threading.local):
    "Whether this thread runs one backward pass for several upstream gradients."

    now = False


_repeated = _Repeated()


def is_repeated() -> bool:
    "Whether another upstream gradient comes through the same graph."
    return _repeated.now


def keeps_graph() -> bool:
    "Whether what a graph has saved is asked for again after this backward pass."
    return _repeated.now or torch._C._autograd._get_current_graph_task_keep_graph()


def is_batched(t: Optional[Tensor]) -> bool:
    "Whether `torch.vmap` takes `t` apart."
    while t is not None and is_wrapped(t):
        if torch._C._functorch.is_batchedtensor(t):
            return True
        t = torch._C._functorch.get_unwrapped(t)
    return False


def is_legacy(t: Optional[Tensor]) -> bool:
    "Whether `is_grads_batched` takes `t` apart."
    return t is not None and is_legacy_batchedtensor(t)


def for_each(
    backward: Callable,
    ctx,
    n: int,
    upstream: Callable[[int], Iterable],  # its gradients, by number
) -> tuple[Optional[Tensor], ...]:
    "What a backward pass makes of `n` upstream gradients, stacked."
    saved, before, _repeated.now = _Saved(ctx), _repeated.now, True
    try:
        each = list(zip(*(backward(saved, *upstream(i)) for i in range(n))))
    finally:
        _repeated.now = before
    if any(parts[0] is not None and parts[0].is_sparse for parts in each):
        raise RuntimeError(SPARSE)
    return tuple(None if parts[0] is None else torch.stack(parts) for parts in each)


class _EachUpstream(torch.autograd.Function):
    "A backward pass for each of the upstream gradients that `torch.vmap` has."

    @staticmethod
    def forward(backward, ctx, *g):
        return backward(ctx, *g)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *g):
        raise RuntimeError(SECOND)

    @staticmethod
    def vmap(info, in_dims, backward, ctx, *g):
        upstream = lambda i: [t if dim is None else t.select(dim, i) for t, dim in zip(g, in_dims[2:])]
        made = for_each(each_upstream(backward), ctx, info.batch_size, upstream)
        return made, tuple(None if t is None else 0 for t in made)


def for_each_of_batch(backward: Callable, ctx, *g: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
    "As `_EachUpstream`, in the older batches that `torch.autograd.grad` makes."
    whole = [
        torch._remove_batch_dim(t, 1, 1, 0) if is_legacy(t) else t for t in g
    ]  # of the outermost `is_grads_batched`
    if any(map(is_legacy, whole)):
        raise RuntimeError(BATCHED)
    n = next(len(t) for t, old in zip(whole, g) if is_legacy(old))
    made = for_each(backward, ctx, n, lambda i: [t[i] if is_legacy(old) else t for t, old in zip(whole, g)])
    return tuple(None if t is None else torch._add_batch_dim(t, 0, 1) for t in made)


def each_upstream(
    backward: Callable,  # of a Function
) -> Callable:
    "`backward`, also of upstream gradients in a batch (`is_grads_batched`, `jacobian(vectorize=True)`): one after the other."

    @functools.wraps(backward)
    def one_by_one(ctx, *g):
        if torch.compiler.is_compiling():
            return backward(ctx, *g)
        for t in g:  # `any` of a map would take longer than all the rest
            if t is not None and is_legacy_batchedtensor(t):
                return for_each_of_batch(backward, ctx, *g)
        if not (are_transforms_active() and any(map(is_batched, g))):
            return backward(ctx, *g)
        return _EachUpstream.apply(backward, ctx, *g)

    return one_by_one


def first_order(
    backward: Callable,  # of a Function that saves all its inputs, or one of its outputs
) -> Callable:
    "`backward`, to which autocast does nothing, and whose gradients raise when they are differentiated."

    @each_upstream
    @functools.wraps(backward)
    def recorded(ctx, *g):
        for t in g:  # `all` of a generator would take longer
            if t is not None:
                break
        else:
            return (None,) * len(ctx.needs_input_grad)
        plainly = without_autocast(t.device.type)
        if not torch.is_grad_enabled():
            with plainly:
                return backward(ctx, *g)
        saved = _Saved(ctx)
        with torch.no_grad(), plainly:
            grads = backward(saved, *g)
        by = [t for t in (*g, *saved.saved_tensors) if t is not None and t.requires_grad]
        return _Refusal.apply(len(grads), *grads, *by)

    return recorded


def transformed() -> bool:
    "Whether `torch.func` or forward-mode AD is at work."
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def observed() -> bool:
    "Whether a compiler, a dispatch mode, `torch.func` or forward-mode AD wants operators."
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or transformed()


def is_recorded() -> bool:
    "Whether a compiler records each operation, to make kernels of its own."
    if not torch._C._len_torch_dispatch_stack():
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def check_unbatched(
    t: Tensor,  # labels, which are looked at
):
    "`RuntimeError` where `torch.vmap` takes `t` apart."
    if is_batched(t):
        raise RuntimeError(BATCHED)


def check_reverse(
    name: str,  # of a loss without an operator
    instead: str,  # what to use
):
    "`RuntimeError` where `torch.func` or forward-mode AD is at work."
    if torch.compiler.is_compiling() or not transformed():
        return
    raise RuntimeError(
        f"{name}: expected backward() or torch.autograd.grad, got a transform of "
        f"torch.func or forward-mode AD; use {instead}"
    )


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    "`function.apply(*args)` where no transform is at work and none has left a tensor behind: it does not look."
    return super(torch.autograd.Function, function).apply(*args)


class Later(float):
    "NaN in the place of a float that is known when a compiled graph runs."

    def __new__(cls, numbers: Tensor, at: int):  # [K]; which of them
        self = super().__new__(cls, math.nan)
        self.numbers, self.at = numbers, at
        return self


def is_later(value: Optional[float]) -> bool:
    "Whether a compiler does not know a float, and would make a graph for each."
    if type(value) is Later or isinstance(value, Tensor):
        return True
    if value is None or not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(value)


def in_scalar(value: float | Tensor) -> Tensor:  # [] float64, on the CPU
    "A float that a compiler does not know."
    if isinstance(value, Tensor):
        return value
    return torch.ones((), dtype=torch.float64, device="cpu") * value  # any constructor's argument is made a constant


def quotient(a: float, b: float) -> float | Tensor:  # [] float64, for an operator
    "a / b; of numbers that a compiler does not know a tensor's: PyTorch 2.11 makes a graph for each number of a float's arithmetic."
    if not torch.compiler.is_compiling():
        return a / b
    return in_scalar(a) / b if is_later(a) or is_later(b) else a / b


def smaller_size(a: int, b: int) -> int:
    "The smaller size; of a compiler's numbers without a guard. PyTorch 2.11 traces `torch.sym_min` of nothing else."
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


def larger_size(a: int, b: int) -> int:
    "The larger size, as `smaller_size`."
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_max(a, b)


def in_tensor(values: list) -> Tensor:  # [K] float64, on the CPU
    "Floats that a compiler does not know."
    if type(values[0]) is Later:
        numbers = values[0].numbers
        if [(v.numbers is numbers, v.at) for v in values] == [(True, i) for i in range(numbers.shape[0])]:
            return numbers
        return torch.stack([v.numbers[v.at] for v in values])
    return torch.stack([in_scalar(value) for value in values])


place = functools.partial(inspect.Parameter, kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)  # an argument


def typed_signature(
    kinds: Iterable[tuple[str, Any]],  # arguments' names and types
    result: Any,  # its type
    *more: inspect.Parameter,
) -> inspect.Signature:
    "A signature from which a schema can be read."
    given = [place(name, annotation=kind) for name, kind in kinds]
    return inspect.Signature([*given, *more], return_annotation=result)


class Arguments:
    "What a function takes: by name, and as its schema has it, options field by field."

    def __init__(self, fn: Callable):
        kinds, given = get_type_hints(fn), inspect.signature(fn).parameters
        self.names = names = tuple(given)
        self.named = namedtuple(
            "Arguments", names, defaults=[p.default for p in given.values() if p.default is not p.empty]
        )
        self.options = {n: kinds[n] for n in names if hasattr(kinds[n], "_fields")}
        self.kinds = {n: get_type_hints(self.options[n]) if n in self.options else {n: kinds[n]} for n in names}
        self.tensors = [i for i, n in enumerate(names) if kinds[n] in (Tensor, Optional[Tensor])]
        each = itertools.chain(*(kinds.values() for kinds in self.kinds.values()))
        self.floats = [i for i, kind in enumerate(each) if kind in (float, Optional[float])]  # flat
        self.first = next((i for i in self.tensors if kinds[names[i]] is Tensor), None)

    def flat(self, args: Iterable) -> list:
        "The arguments, options field by field."
        return [value for name, arg in zip(self.names, args) for value in (arg if name in self.options else (arg,))]

    def group(self, flat: Iterable) -> tuple:
        "`flat` undone, by name."
        rest = iter(flat)

        def next_of(name: str) -> Any:
            kind = self.options.get(name)
            return next(rest) if kind is None else kind._make(itertools.islice(rest, len(kind._fields)))

        return self.named(*map(next_of, self.names))

    def signature(self, result: Any) -> inspect.Signature:
        "What the schema is read from."
        flat = itertools.chain(*(kinds.items() for kinds in self.kinds.values()))
        numbers = [place("numbers", annotation=Optional[Tensor], default=None)] if self.floats else []
        return typed_signature(flat, result, *numbers)

    def put_out(self, flat: list) -> list:
        "`flat`; floats that a compiler does not know are NaN, and stand in a tensor behind it."
        at = [i for i in self.floats if is_later(flat[i])]
        if not at:
            return flat
        return [*(math.nan if i in at else v for i, v in enumerate(flat)), in_tensor([flat[i] for i in at])]

    def put_in(self, flat: Sequence, known: bool) -> Sequence:  # whether the tensor's numbers can be read
        "`put_out` undone, floats being `Later` unless they are known."
        numbers = flat[-1] if self.floats else None
        if not isinstance(numbers, Tensor):
            return flat
        values = iter(numbers.tolist() if known else [Later(numbers, i) for i in range(numbers.shape[0])])
        return [next(values) if i in self.floats and v is not None and v != v else v for i, v in enumerate(flat[:-1])]

    def gradients(
        self,
        found: dict[str, Optional[Tensor]],
        flat: bool,
    ) -> tuple[Optional[Tensor], ...]:
        "Those that were found, by name, in the order of the arguments; None for all others."
        if not found.keys() <= self.kinds.keys():
            raise KeyError(f"expected gradients of {self.names}, got {tuple(found)}")
        if not flat:
            return tuple(map(found.get, self.names))
        each = ((found.get(n), len(self.kinds[n])) for n in self.names)
        return *(part for grad, places in each for part in [grad] + [None] * (places - 1)), *[None] * bool(self.floats)


class Unguarded(CustomOpDef):
    "A custom operator whose kernel Dynamo's guard enters as late as it can; and its FLOPs."

    guarded: Optional[Callable] = None  # the kernel that Dynamo leaves alone, until it is there

    def spare_dynamo(self, fn: Callable):
        "Run `fn` unguarded while Dynamo is not there: its guard imports it, for seconds."
        self.guarded, self._backend_fns[None] = self._backend_fns[None], fn

    def guard(self):
        "Dynamo is there, and is not to look into the kernel."
        guarded = self.guarded  # another thread may be here too
        if guarded is not None:
            self._backend_fns[None] = guarded
        self.guarded = None

    def tell_counters(self):
        "Give the formula to every `FlopCounterMode` that looks on."
        count = lambda *flat, out_val: self.flops(self.arguments.group(flat), out_val)
        for mode in _python_dispatch._get_current_dispatch_mode_stack():
            counter = getattr(mode, "counter", mode)
            if hasattr(counter, "flop_registry"):
                counter.flop_registry[self._opoverload._overloadpacket] = count


class Operator(Unguarded):
    "A custom operator, of which any derivative is right or raises."

    def __call__(self, *args, **named):
        if named or len(args) < len(self.arguments.names):
            args = self.arguments.named(*args, **named)
        if torch.compiler.is_compiling():
            return self._opoverload(*self.arguments.put_out(self.arguments.flat(args)))
        if not observed() and self.is_plain(args):
            return self.eager(*args)
        return self.dispatch(*self.arguments.flat(args))

    def is_plain(self, args: tuple) -> bool:
        "Whether all tensors are real ones, of no class that wants to see the operator, and of no transform that is over."
        first = self.arguments.first
        if first is not None and args[first].is_meta:
            return False
        for i in self.arguments.tensors:  # `all` of a generator would take longer
            t = args[i]
            if t is not None and (type(t) not in PLAIN or is_wrapped(t)):
                return False
        return True

    def eager(self, *args):
        "As the dispatcher would, which takes longer than a small loss."
        if not torch.is_grad_enabled():
            return self.run(*args)
        if self.backward is None:
            return self.dispatch(*self.arguments.flat(args))
        return applied(self.function, *args)

    def dispatch(self, *flat):
        "The registered operator, and what looks on is told of it."
        if self.guarded and "torch._dynamo" in sys.modules:
            self.guard()
        flat = self.arguments.put_out(flat)
        if torch._C._are_functorch_transforms_active():
            return _Transformed.apply(*flat, self)
        if forward_ad._current_level >= 0:
            check_tangents(flat)
        if torch._C._len_torch_dispatch_stack() and self.flops:
            self.tell_counters()
        return self._opoverload(*flat)

    def run(self, *args):
        "The function, in the dtypes that it is given."
        first = self.arguments.first
        device = "meta" if first is None else args[first].device.type
        with without_autocast(device):
            return self.fn(*args)

    def flat_save(self, ctx, inputs: tuple, output: Any):
        ctx.set_materialize_grads(False)
        inputs = self.arguments.put_in(inputs, not observed())
        self.save(ctx, self.arguments.group(inputs), output)

    def flat_backward(self, ctx, *g) -> tuple[Optional[Tensor], ...]:
        if self.backward is None:
            raise RuntimeError(SECOND)
        if all(t is None for t in g):
            return (None,) * len(ctx.needs_input_grad)
        needs = self.arguments.group(ctx.needs_input_grad)
        return self.arguments.gradients(self.backward(ctx, needs, *g), True)


PLAIN = (Tensor, torch.nn.Parameter)  # what no subclass has to see


def autocasts(device: str) -> bool:
    "Whether autocast is on for a type of device; never on meta, which has none."
    return device != "meta" and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager:
    "A context in which autocast casts nothing for a type of device."
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


def check_tangents(args: tuple):
    "`RuntimeError` for a dual tensor."
    tensors = (t for t in args if isinstance(t, Tensor))
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(FORWARD)


class _Transformed(torch.autograd.Function):
    "An operator, the last argument, under the transforms of `torch.func`."

    @staticmethod
    def forward(*args):
        return args[-1].dispatch(*args[:-1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        *inputs, ctx.operator = inputs
        ctx.operator.flat_save(ctx, tuple(inputs), output)

    @staticmethod
    def backward(ctx, *g):
        return *each_upstream(ctx.operator.flat_backward)(ctx, *g), None

    @staticmethod
    def jvp(ctx, *tangents):
        raise RuntimeError(FORWARD)

    @staticmethod
    def vmap(info, in_dims, *args):
        raise RuntimeError(BATCHED)


def eager_function(op: Operator) -> type[torch.autograd.Function]:
    "The operator's functions without the dispatcher and its autograd."

    def forward(ctx, *args):
        output = op.run(*args)
        ctx.set_materialize_grads(False)
        op.save(ctx, op.arguments.named(*args), output)
        return output

    def backward(ctx, *g):
        found = op.backward(ctx, op.arguments.named(*ctx.needs_input_grad), *g)
        return op.arguments.gradients(found, False)

    functions = dict(forward=staticmethod(forward), backward=staticmethod(first_order(backward)))
    return type(op._name, (torch.autograd.Function,), functions)


def products(
    x: Tensor,  # [...,H]
    w: Tensor,  # [V,H]
    *more: bool,  # products of the same size that may be made besides
) -> int:
    "FLOPs of x wᵀ, and of those of `more` that are true."
    return 2 * x.numel() * w.shape[0] * (1 + sum(more))


def _registered() -> dict[str, dict[str, Operator]]:
    "The process's operators, by name and schema."
    return vars(torch.library).setdefault("_fusedloss_operators", {})


def is_operator(
    name: str,  # with the number of a schema or without
) -> bool:
    "Whether it is there, or about to be."
    name = add_op_namespace_prefix(name)
    return not _registered().keys().isdisjoint({name, name.rstrip("0123456789").removesuffix("_")})


def registered(name: str, signature: inspect.Signature) -> Operator:
    "The library's operator of this name and signature, made where there is none."
    name = add_op_namespace_prefix(name)

    def prototype(*args):
        raise NotImplementedError(name)

    prototype.__signature__ = signature
    schema = torch.library.infer_schema(prototype, mutates_args=())
    known = _registered().setdefault(name, {})
    if schema not in known:
        namespace, short = name.split("::")
        known[schema] = Operator(namespace, f"{short}_{len(known) + 1}" if known else short, schema, prototype)
    return known[schema]


def operator(
    name: str,  # in the library's namespace
    fn: Optional[Callable] = None,  # tensors, numbers and options; without it, a decorator
    *,
    fake: Optional[Callable] = None,  # as `fn`, of tensors without numbers
    save: Callable = lambda ctx, inputs, output: None,  # what backward needs, arguments by name
    backward: Optional[Callable] = None,  # (ctx, needs by name, *grads) to {name: gradient}
    flops: Optional[Callable] = None,  # (inputs by name, output) to the FLOPs of one call
) -> Operator:
    "`fn` as the operator `name`; another schema gets a name of its own, with a number."
    functions = dict(fake=fake, save=save, backward=backward, flops=flops)
    if fn is None:
        return functools.partial(operator, name, **functions)
    arguments = Arguments(fn)
    op = registered(name, arguments.signature(inspect.signature(fn).return_annotation))
    op.fn, op.arguments, op.fake, op.flops = fn, arguments, fake, flops
    op.save, op.backward = save, backward
    run = lambda *flat: op.run(*arguments.group(arguments.put_in(flat, True)))
    op.register_kernel(None)(run)
    op.spare_dynamo(run)
    if fake:
        op.register_fake(lambda *flat: fake(*arguments.group(flat)))
    op.register_autograd(each_upstream(op.flat_backward), setup_context=op.flat_save)
    op.function = eager_function(op)
    return op
