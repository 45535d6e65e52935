"""Any causal language model of transformers returns its loss without logits: its own forward runs, and the output layer hands the loss what it would have multiplied."""

__all__ = ["patch", "unpatch", "causal_lm_loss"]


import contextlib
import copy
import functools
import inspect
import math
import sys
import threading
import warnings
from types import MethodType
from typing import Any, Callable, Iterator, NamedTuple, Optional, Sequence, TypeVar

import torch
import torch.nn.functional as F
from torch import nn, Tensor

from fusedloss.core.checks import expect, is_number
from fusedloss.core.options import Accumulate, Method
from fusedloss.core.weights import has_hooks, more_than_product
from fusedloss.integrations.causal_lm import causal_lm_loss as causal_lm_loss
from fusedloss.linear_ctc import linear_ctc_loss
from fusedloss.losses import linear_cross_entropy


class Term(NamedTuple):
    "A product that is not computed."

    layer: nn.Module  # W [V,H] and b [V], by `weight_and_bias`
    input: Tensor  # x [...,H]
    factor: float = 1.0  # f
    bias: Optional[Tensor] = None  # [V], beside the layer's own


def weight_and_bias(
    layer: nn.Module,  # an `nn.Linear`, an `nn.Conv1d` of width 1, or PEFT's layer of trainable tokens
) -> tuple[Tensor, Optional[Tensor]]:  # [V,H], [V]
    "Weight and bias whose product with the input is a layer's output."
    if isinstance(layer, nn.Linear):
        return layer.weight, layer.bias
    if isinstance(layer, nn.Conv1d):
        return layer.weight.squeeze(-1), layer.bias
    return layer.get_merged_weights(layer.active_adapters), None


def classes_of(layer: nn.Module) -> int:
    "V."
    return layer.out_channels if isinstance(layer, nn.Conv1d) else layer.out_features


def with_bias(
    # [V,H]; [V] both
    w: Tensor,
    own: Optional[Tensor],
    more: Optional[Tensor],
) -> Optional[Tensor]:  # [V], on the weight's device and of its dtype
    "The sum of two biases."
    if more is None:
        return own
    return more.to(w) if own is None else own + more.to(own)


KNOWN = (
    "numbers as factors, a bias [V], a soft cap, views, slices of tokens and a cross entropy "
    "or CTC between the output layer and the loss"
)


class Unknown(ValueError):
    "What a model does to logits that are not computed."

    def __init__(self, operation: str):
        super().__init__(f"model: expected {KNOWN}, got {operation}: unpatch(model) computes logits")
        self.operation = operation


def refuse(operation: str):
    raise Unknown(operation)


def joined(
    terms: tuple[Term, ...],  # K of them, of one V
) -> tuple[Tensor, Tensor, Optional[Tensor]]:  # [...,H0+...], [V,H0+...], [V]
    "Input, weight and bias of the one product that is the sum of all, divided by the first factor."
    first, products = terms[0], [weight_and_bias(t.layer) for t in terms]
    shares, dtype = [t.factor / first.factor for t in terms], products[0][0].dtype
    inputs = [t.input if t is first else t.input.to(first.input.dtype) * share for t, share in zip(terms, shares)]
    biases = [with_bias(w, b, t.bias) for t, (w, b) in zip(terms, products)]
    biases = [b.to(dtype) * share for b, share in zip(biases, shares) if b is not None]
    weight = torch.cat([w.to(dtype) for w, _ in products], 1)
    return torch.cat(inputs, -1), weight, sum(biases[1:], biases[0]) if biases else None


def with_product(
    logits: "LazyLogits",
    loss: Callable,
    target: Tensor,
) -> Any:
    "What `loss` makes of input, weight, target and bias; a single layer is called for its weight."
    layer, input, _, bias = logits.terms[0]
    if len(logits.terms) == 1:
        return layer(input, loss, target, bias)
    x, w, b = joined(logits.terms)
    return loss(x, w, target, linear_bias=b)


def keeps_classes(
    index: Any,  # of logits
    dims: int,  # of the logits
) -> bool:
    "Whether an index leaves the last dimension as it is."
    parts = index if isinstance(index, tuple) else (index,)
    if isinstance(parts[-1], slice) and parts[-1] == slice(None):
        return True
    taken = sum(p.dim() if isinstance(p, Tensor) and p.dtype == torch.bool else 1 for p in parts)
    return taken < dims and not any(p is None or p is ... for p in parts)


class Lazy:
    "What takes the place of a tensor and refuses what it does not know."

    known: dict[Callable, Callable] = {}  # functions of PyTorch and what computes them

    def other(self, *args):
        refuse("another operator")

    __add__ = __mul__ = __truediv__ = __getitem__ = other
    __radd__ = __rmul__ = __sub__ = __rsub__ = __neg__ = __pow__ = __matmul__ = other
    __rtruediv__ = __setitem__ = __lt__ = __gt__ = __le__ = __ge__ = other
    __iter__ = None  # outputs of transformers try whether a field can be iterated

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function not in cls.known or not isinstance(args[0] if args else None, cls):
            refuse(getattr(function, "__name__", str(function)))
        return cls.known[function](*args, **(kwargs or {}))


class LazyLogits(Lazy):
    "Logits [..., V] as the products that would give them, until their loss is asked for."

    def __init__(self, terms: tuple[Term, ...], cap: Optional[float] = None):
        self.terms, self.cap = terms, cap  # the number that multiplies a tanh; None before one

    @property
    def shape(self):
        return (*self.terms[0].input.shape[:-1], classes_of(self.terms[0].layer))

    @property
    def device(self):
        return self.terms[0].input.device

    @property
    def dtype(self):
        return self.terms[0].input.dtype

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self):
        return len(self.shape)

    def same(self, *args, **kwargs):
        return self  # scores and losses are in float32 anyway

    float = contiguous = to = same

    def each(self, **changed):
        return LazyLogits(tuple(t._replace(**{k: f(t) for k, f in changed.items()}) for t in self.terms), self.cap)

    def view(self, *shape):
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if shape[-1] != self.shape[-1]:
            refuse(f"a view as {shape} of logits {self.shape}")
        return self.each(input=lambda t: t.input.reshape(*shape[:-1], t.input.shape[-1]))

    reshape = view

    def __getitem__(self, index):
        if not keeps_classes(index, self.dim()):
            refuse("a slice of classes")
        return self.each(input=lambda t: t.input[index])

    def __mul__(self, factor):
        if not is_number(factor):
            refuse(f"a factor that is a {type(factor).__name__}")
        if self.cap is not None:
            return LazyLogits(self.terms, self.cap * factor)
        return self.each(factor=lambda t: t.factor * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor):
        if not is_number(divisor):
            refuse(f"a divisor that is a {type(divisor).__name__}")
        return self * (1 / divisor)

    def __add__(self, other):
        if self.cap is not None or getattr(other, "cap", None) is not None:
            refuse("a sum")
        if isinstance(other, LazyLogits):
            return LazyLogits(self.terms + other.terms)
        classes = self.shape[-1]
        of_classes = isinstance(other, Tensor) and other.dim() and other.shape[-1] == classes
        if not of_classes or other.numel() != classes:
            refuse("a sum")
        (layer, input, factor, before), *rest = self.terms
        bias = other.reshape(classes) / factor
        bias = bias if before is None else before + bias
        return LazyLogits((Term(layer, input, factor, bias), *rest))

    def tanh(self):
        if self.cap is not None:
            refuse("a second tanh")
        return LazyLogits(self.terms, 1.0)


def scale_of(logits: LazyLogits) -> float:
    "The number between product and logits, or between product and soft cap."
    scale = logits.terms[0].factor * (logits.cap or 1.0)
    return 1.0 if math.isclose(scale, 1.0) else scale  # a cap divides and multiplies


def options_of(logits: LazyLogits) -> dict[str, Any]:
    "What `patch` was given."
    return getattr(logits.terms[0].layer.forward, "options", {})


def lazy_cross_entropy(
    logits: LazyLogits,  # [N,V]
    target: Tensor,  # [N]
    weight: Optional[Tensor] = None,
    size_average: Optional[bool] = None,
    ignore_index: int = -100,
    reduce: Optional[bool] = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    "`F.cross_entropy` of logits that stay uncomputed."
    if logits.dim() != 2:
        refuse(f"a cross entropy of logits {list(logits.shape)}, not [N, V]")
    if size_average is not None or reduce is not None:
        refuse("size_average or reduce")
    return with_product(
        logits,
        functools.partial(
            linear_cross_entropy,
            **options_of(logits),
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            logit_scale=scale_of(logits),
            softcap=logits.cap,
        ),
        target,
    )


class LazyLogProbs(Lazy):
    "Log-probabilities of CTC, [B,T,V] or [T,B,V], until their loss is asked for."

    def __init__(self, logits: LazyLogits):
        self.logits, self.shape, self.device = logits, logits.shape, logits.device

    def dim(self):
        return len(self.shape)

    def transpose(self, first, second):
        if self.dim() != 3 or {first, second} != {0, 1}:
            refuse("a transpose of classes")
        return LazyLogProbs(self.logits.each(input=lambda t: t.input.transpose(0, 1)))


def lazy_log_softmax(
    logits: LazyLogits,
    dim: Optional[int] = None,
    _stacklevel: int = 3,
    dtype: Optional[torch.dtype] = None,
) -> LazyLogProbs:
    "`F.log_softmax` of logits that stay uncomputed."
    if dim not in (-1, logits.dim() - 1):
        refuse(f"a log_softmax over dimension {dim}")
    return LazyLogProbs(logits)


def lazy_ctc_loss(
    log_probs: LazyLogProbs,  # [T,N,V]
    # as `F.ctc_loss` takes them
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    "`F.ctc_loss` of logits that stay uncomputed."
    how = options_of(log_probs.logits)
    for name in ("method", "accumulate"):
        expect(how.get(name, "auto") == "auto", name, "auto for a model that computes CTC", how.get(name))
    if scale_of(log_probs.logits) != 1 or log_probs.logits.cap is not None:
        refuse("a scale or a soft cap before CTC")
    return with_product(
        log_probs.logits,
        functools.partial(
            linear_ctc_loss,
            input_lengths=input_lengths,
            target_lengths=target_lengths,
            blank=blank,
            reduction=reduction,
            zero_infinity=zero_infinity,
            memory_budget=how.get("memory_budget"),
        ),
        targets,
    )


LazyLogits.known = {torch.tanh: LazyLogits.tanh, F.cross_entropy: lazy_cross_entropy, F.log_softmax: lazy_log_softmax}
LazyLogProbs.known = {F.ctc_loss: lazy_ctc_loss}


class ReplacedForward:
    "What a module calls in place of its forward."

    def __init__(self, module: nn.Module):
        self.module, self.before = module, vars(module).get("forward")  # accelerate puts one there
        self.install()

    def install(self):
        self.module.forward = self
        self.module._replicate_for_data_parallel = functools.partial(replicate, self.module)

    def original(self, *args, **kwargs):
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def remove(self):
        vars(self.module).pop("_replicate_for_data_parallel")
        if self.before is not None:
            self.module.forward = self.before
        else:
            vars(self.module).pop("forward")


def replicate(module: nn.Module) -> nn.Module:
    "A copy for `nn.DataParallel`, whose forward uses the copy's weights."
    replica = type(module)._replicate_for_data_parallel(module)
    forward = replica.__dict__["forward"] = copy.copy(module.forward)
    forward.module = replica
    return replica


class Waiting(threading.local):
    "The output layers' forwards that return `LazyLogits` in this thread."

    def __init__(self):  # once in each thread
        self.losses: tuple[LinearForward, ...] = ()  # of the model that is computing its loss
        self.asked: tuple[LinearForward, ...] = ()  # of models whose caller takes `LazyLogits`


WAITING = Waiting()


class LinearForward(ReplacedForward):
    "Logits as before, logits to be, or their loss."

    def __init__(self, module: nn.Module, options: dict[str, Any]):
        super().__init__(module)
        self.options = options  # of `linear_cross_entropy`, as `patch` takes them
        self.borrowers: Optional[int] = None  # calls of `lazy_logits`; None if `patch` put it there

    def waits(self) -> bool:
        "Whether this call returns `LazyLogits`; trainable tokens that are off leave it to their base."
        waiting, layer = WAITING.losses + WAITING.asked, self.module
        if not waiting or not any(f is self for f in waiting):
            return False
        if not is_of_tokens(layer):
            return True
        return bool(layer.active_adapters) and not layer.disable_adapters and not layer.merged

    def __call__(
        self,
        input: Tensor,
        loss: Optional[Callable] = None,
        target: Optional[Tensor] = None,
        bias: Optional[Tensor] = None,
    ):
        if loss is not None:
            w, own = weight_and_bias(self.module)
            expect(
                w.device.type != "meta" or input.is_meta,
                "model",
                "an output layer with a weight",
                "one whose weight is kept on another device",
            )
            return loss(input.to(w.device), w, target.to(w.device), linear_bias=with_bias(w, own, bias))
        return LazyLogits((Term(self.module, input),)) if self.waits() else self.original(input)


def is_of_tokens(layer: nn.Module) -> bool:
    "Whether this is PEFT's layer of trainable tokens."
    return hasattr(type(layer), "get_merged_weights")


def unlike_product(
    layer: nn.Module,
) -> str:
    "What makes a layer's logits something else than a product; empty if nothing."
    hook = vars(layer).get("_hf_hook")  # of accelerate: it moves tensors, and may keep weights away
    if any(getattr(h, "offload", False) for h in (hook, *getattr(hook, "hooks", ()))):
        return "whose weight is kept on another device"
    if not isinstance(layer, nn.Linear):
        return "which has hooks" if has_hooks(layer) else ""
    forward = vars(layer).get("forward")
    if isinstance(forward, LinearForward):
        forward = forward.before
    if forward is not None and hook is None:
        return more_than_product(layer)
    bare = object.__new__(type(layer))  # the same layer without a forward that may be there
    vars(bare).update({name: value for name, value in vars(layer).items() if name != "forward"})
    return more_than_product(bare)


def kind_of(head: nn.Module) -> str:
    "The whole name of a class: PEFT has many a `Linear`."
    return f"{type(head).__module__}.{type(head).__name__}"


def layers_of(
    head: nn.Module,  # the output layer
) -> list[nn.Module]:
    "The layers in it whose outputs are the classes."
    found = [
        m
        for m in head.modules()
        if isinstance(m, nn.Linear) or is_of_tokens(m) or isinstance(m, nn.Conv1d) and m.kernel_size == (1,)
    ]
    most = max([0, *map(classes_of, found)])
    return [m for m in found if classes_of(m) == most]


def products_of(
    head: nn.Module,
) -> list[nn.Module]:
    "The same; `ValueError` for one that does more than its product."
    layers = layers_of(head)
    expect(bool(layers), "model", "an output layer that is an nn.Linear", type(head).__name__)
    for layer in layers:
        more = unlike_product(layer)
        expect(
            not more,
            "model",
            "an output layer that is a product with its weight alone",
            f"{type(layer).__name__}, {more}",
        )
    return layers


def forwards_of(
    head: nn.Module,
) -> tuple[LinearForward, ...]:
    "The forwards that `patch` has replaced; `ValueError` if a layer came after it."
    found = tuple(m.forward for m in layers_of(head))
    expect(
        all(isinstance(f, LinearForward) for f in found) and found,
        "model",
        "the output layer that patch has found",
        f"{kind_of(head)} with a layer that came later: patch(model) again after a change of it",
    )
    return found


def of_hidden_dtype(
    hidden: Tensor,
    *tensors: Optional[Tensor],
) -> tuple[Optional[Tensor], ...]:
    "Weight and bias in the dtype of the product; autocast chooses that itself."
    if torch.is_autocast_enabled(hidden.device.type):
        return tensors
    return tuple(None if t is None else t.to(hidden.dtype) for t in tensors)


def computed(
    logits: LazyLogits,  # [...,V]
) -> Tensor:  # [...,V]
    "Logits as the model would have made them."
    of_layer = lambda x, w, _, linear_bias: F.linear(x, *of_hidden_dtype(x, w, linear_bias))
    z = with_product(logits, of_layer, torch.empty(0))
    factor = logits.terms[0].factor
    z = z if factor == 1 else z * factor
    return z if logits.cap is None else logits.cap * torch.tanh(z)


def is_partitioned(
    weight: Tensor,
) -> bool:
    "Whether ZeRO-3 of DeepSpeed or FSDP2 keeps a parameter in parts, and gathers it for a while."
    return hasattr(weight, "ds_id") or hasattr(weight, "full_tensor")


@torch.no_grad()
def check_products(
    head: nn.Module,
    forwards: Sequence[LinearForward],  # that are in it
):
    "`ValueError` for an output layer of several modules that does more than add their products."
    weights = list(head.parameters())
    if isinstance(head, nn.Linear) or any(w.is_meta or is_partitioned(w) for w in weights):
        return
    w = next(m for m in head.modules() if isinstance(m, (nn.Linear, nn.Conv1d))).weight
    x = torch.linspace(-1, 1, 2 * w.shape[1], device=w.device).view(1, 2, -1).to(w.dtype)
    before, drawn = WAITING.asked, functools.partial(torch.random.fork_rng, [w.device] * w.is_cuda)
    try:
        with drawn():
            expected = head.forward(x)
        WAITING.asked = before + tuple(forwards)
        with drawn():
            lazy = head.forward(x)  # dropout draws the same
        size = expected.abs().max()
        same = isinstance(lazy, LazyLogits) and torch.allclose(
            computed(lazy).to(expected), expected, rtol=0.03, atol=0.03 * size
        )
        more = "" if same else "whose output is another one"
    except Unknown as error:
        more = f"which does more: {error.operation}"
    except (NotImplementedError, TypeError) as error:
        more = f"whose forward raises: {error}"
    finally:
        WAITING.asked = before
    expect(not more, "model", "an output layer that adds products with its weights", f"{kind_of(head)}, {more}")


def without_logits(
    output: Any,  # a `ModelOutput` or a tuple
) -> Any:
    "A model's output less the logits; `ValueError` if it has no loss, or logits that are computed."
    lazy = lambda v: isinstance(v, LazyLogits)
    if isinstance(output, tuple):
        rest, loss = tuple(v for v in output if not lazy(v)), output[0]
        found = len(rest) < len(output)
    else:
        rest, loss = {k: v for k, v in output.items() if not lazy(v)}, output.get("loss")
        found, rest = len(rest) < len(output), type(output)(**rest)
    expect(
        found, "model", "logits of the output layer that patch has found", "other logits: unpatch(model) computes them"
    )
    expect(isinstance(loss, Tensor), "model", "a loss beside its logits", type(loss).__name__)
    return rest


def is_asked_for_metrics() -> bool:
    "Whether a `Trainer` that is calling this would compute metrics of logits, and of nothing else."
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "prediction_step":
        frame = frame.f_back
    if frame is None or frame.f_locals.get("prediction_loss_only"):
        return False
    trainer = frame.f_locals.get("self")
    if getattr(getattr(trainer, "args", None), "predict_with_generate", False):
        return False  # its metrics are of generated tokens
    made_otherwise = getattr(trainer, "preprocess_logits_for_metrics", None) is not None
    return getattr(trainer, "compute_metrics", None) is not None and not made_otherwise


class ModelForward(ReplacedForward):
    "A model's own forward, which computes no logits when labels are given."

    def __init__(self, module: nn.Module):
        names = list(inspect.signature(type(module).forward).parameters)
        expect("labels" in names, "model", "a forward that takes labels", type(module).__name__)
        super().__init__(module)
        self.labels_at = names.index("labels") - 1
        self.warned = False  # that metrics get no logits

    @property
    def __signature__(self):  # `Trainer` chooses a data set's columns by it
        return inspect.signature(MethodType(type(self.module).forward, self.module))

    def __call__(self, *args, **kwargs):
        labels = args[self.labels_at] if len(args) > self.labels_at else kwargs.get("labels")
        before = WAITING.losses
        if labels is None and not before:
            return self.original(*args, **kwargs)
        WAITING.losses = () if labels is None else forwards_of(output_layer(self.module))
        try:
            output = self.original(*args, **kwargs)
        finally:
            WAITING.losses = before
        if labels is None:
            return output
        if not (self.warned or self.module.training or torch.compiler.is_compiling()) and is_asked_for_metrics():
            self.warned = True
            warnings.warn(
                "compute_metrics: the patched model returns a loss and no logits; unpatch(model) before an evaluation, "
                "or hand predicted tokens on by preprocess_logits_for_metrics, as the recipe on evaluation does",
                stacklevel=2,
            )
        return without_logits(output)


def replaced(
    module: nn.Module,
    kind: type = ReplacedForward,
) -> list[ReplacedForward]:
    "The replaced forwards in a module."
    return [m.forward for m in module.modules() if isinstance(getattr(m, "forward", None), kind)]


def output_layer(
    model: nn.Module,  # of transformers
) -> Optional[nn.Module]:
    "The layer that makes logits, also of models that name an embedding (FSMT) or none (CTC)."
    head = model.get_output_embeddings()
    if isinstance(head, nn.Embedding):
        like = [m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.shape == head.weight.shape]
        return like[0] if len(like) == 1 else head
    if head is not None:
        return head
    return next((m for name, m in model.named_children() if name in ("lm_head", "ctc_head")), None)


def inner_model(
    model: nn.Module,  # of transformers, or of PEFT around one
) -> nn.Module:
    "The model that has the output layer; `ValueError` if there is none."
    inner = model.get_base_model() if hasattr(type(model), "get_base_model") else model
    expected = "a causal language model of transformers, not wrapped but by PEFT"
    expect(hasattr(type(inner), "get_output_embeddings"), "model", expected, type(model).__name__)
    expect(output_layer(inner) is not None, "model", "a model with an output layer", type(inner).__name__)
    return inner


LOCK = threading.Lock()


def borrow(head: nn.Module) -> tuple[LinearForward, ...]:
    "The forwards of an output layer, put there unless `patch` or another thread has done so."
    with LOCK:
        if not replaced(head, LinearForward):
            for layer in products_of(head):
                LinearForward(layer, {}).borrowers = 0
        forwards = forwards_of(head)
        for f in forwards:
            f.borrowers = None if f.borrowers is None else f.borrowers + 1
    return forwards


def give_back(forwards: Sequence[LinearForward]):
    "Remove forwards that nobody else has borrowed."
    with LOCK:
        for f in forwards:
            if f.borrowers is None:
                continue
            f.borrowers -= 1
            if not f.borrowers:
                f.remove()


@contextlib.contextmanager
def lazy_logits(
    model: nn.Module,  # of transformers, or of PEFT around one; patched or not
) -> Iterator[None]:
    "Let a model's logits be `LazyLogits`. `ValueError` for an output layer that is not understood."
    head, before = output_layer(inner_model(model)), WAITING.asked
    forwards = borrow(head)
    try:
        check_products(head, forwards)
        WAITING.asked = before + forwards
        yield
    finally:
        WAITING.asked = before
        give_back(forwards)


def is_scaled(logits: LazyLogits) -> bool:
    "Whether more than a soft cap lies between product and logits."
    return scale_of(logits) != 1


Model = TypeVar("Model", bound=nn.Module)


def patched_forwards(
    inner: nn.Module,
) -> list[ReplacedForward]:
    "What `patch` has put there; `ValueError` if something was put around it, or a part is patched."
    forwards = replaced(inner)
    models = [f.module for f in forwards if isinstance(f, ModelForward)]
    hidden = bool(forwards) and not isinstance(inner.forward, ModelForward)
    expect(
        not hidden,
        "model",
        "the forward that patch has set, outermost",
        f"another one around that of {', '.join(type(m).__name__ for m in models) or 'a layer'}: remove that first",
    )
    return forwards


def patch(
    model: Model,  # of transformers, with an output layer; or of PEFT around one
    *,
    method: Method = "auto",  # as for `linear_cross_entropy`
    memory_budget: Optional[int] = None,  # bytes beyond the gradients
    accumulate: Accumulate = "auto",  # as for `linear_cross_entropy`
) -> Model:  # the same model
    """Let a model return its loss without logits whenever it is given labels.

    Its forward stays its own; `output.logits` is None, and left out of a tuple. Without labels it
    gives logits as before. `ValueError`, and nothing has changed, for an output layer that is not
    understood; at the first loss, for a model that does something else to its logits than scale
    them, add a bias, cap them and take their cross entropy or CTC. A second call finds the output
    layer anew, and its options hold. Patch before wrappers such as DDP and FSDP2.
    """
    inner = inner_model(model)
    head, old = output_layer(inner), patched_forwards(inner)
    layers = products_of(head)
    for forward in old:
        forward.remove()
    new = [ModelForward(inner)]
    how = dict(method=method, memory_budget=memory_budget, accumulate=accumulate)
    new += [LinearForward(layer, how) for layer in layers]
    try:
        check_products(head, new[1:])
    except ValueError:
        for forward in new:
            forward.remove()
        for forward in old:
            forward.install()
        raise
    return model


def unpatch(
    model: Model,  # that `patch` has changed, or not
) -> Model:  # the same model
    "Undo `patch`; without one, nothing. `ValueError` for a forward that was replaced since."
    for forward in patched_forwards(inner_model(model)):
        forward.remove()
    return model
