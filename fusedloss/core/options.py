"""The words and numbers that every loss takes, by the names under which the whole library knows them."""

__all__ = ["CrossEntropyStats"]


import functools
import inspect
from typing import (
    Annotated,
    Any,
    Callable,
    get_args,
    get_type_hints,
    Iterable,
    Iterator,
    Literal,
    NamedTuple,
    Optional,
    Sequence,
    TypedDict,
    TypeVar,
    Union,
)

import torch
from torch import Tensor

from fusedloss.core.checks import did_you_mean, expect, in_range, is_integer


Reduction = Literal["none", "mean", "sum"]  # of the losses of tokens, rows or sequences


BackboneReduction = Literal["mean", "sum"]  # what a wrapper makes of the ranks' gradients


Accumulate = Literal["auto", "float32", "native"]  # where chunks of dw add up


Method = Literal["auto", "eager", "tiles", "chunks", "recompute", "product"]  # of a linear layer's loss


HeadMethod = Literal["auto", "tiles", "recompute"]  # of a cosine head


ShardedMethod = Literal["auto", "product", "recompute"]  # of a linear layer's loss whose classes are over ranks


MatmulDtype = torch.dtype  # of backward matmuls: torch.float8_e4m3fn


Lengths = Union[Tensor, Sequence[int]]  # [N], frames or labels of each sequence


class Check(NamedTuple):
    "What a caller may give for an option."

    expected: str
    holds: Callable[[Any], bool]
    optional: bool = False  # None stands for the default


SHARE = lambda v: in_range(v, 0, 1)
POSITIVE = lambda v: in_range(v, 0) and v > 0
NOT_NEGATIVE = lambda v: in_range(v, 0)


class LossOptions(NamedTuple):
    "What shapes the loss of a row, in the order in which the operators take it."

    # tokens with this target count nothing
    ignore_index: Annotated[int, Check("an integer", is_integer)] = -100
    # share of the target spread over all classes
    label_smoothing: Annotated[float, Check("a number from 0 to 1", SHARE)] = 0.0
    # multiplies the logits, bias and all; a 0-dim tensor, of any sign, gets a gradient
    logit_scale: Annotated[float, Check("a positive number", POSITIVE)] = 1.0
    # c: scores are c · tanh(scaled logits / c), undivided by a temperature T: that is s/T, c/T
    softcap: Annotated[float, Check("a positive number or None", POSITIVE, True)] = 0.0
    # weight of lse² in each token's loss
    z_loss: Annotated[float, Check("a number not below 0", NOT_NEGATIVE)] = 0.0

    @property
    def keeps_scores(self) -> bool:
        "Whether the scores are the logits themselves."
        return (self.logit_scale, self.softcap) == (1.0, 0.0)

    def changed(self) -> tuple[str, ...]:
        "Names of the options that shape scores and losses, and are not at their defaults."
        if self[1:] == DEFAULTS[1:]:
            return ()
        return tuple(name for name, value in zip(self._fields[1:], self[1:]) if value != self._field_defaults[name])


DEFAULTS = LossOptions()


class Operands(NamedTuple):
    "The tensors of a linear layer's loss."

    input: Tensor  # [..., H]
    linear_weight: Tensor  # [V,H]
    target: Tensor  # [...]; probabilities [..., V]; several labels [..., K]
    linear_bias: Optional[Tensor] = None  # [V]
    weight: Optional[Tensor] = None  # [V]
    token_weight: Optional[Tensor] = None  # [...]
    target_weight: Optional[Tensor] = None  # [K]


class Asked(NamedTuple):
    "What a caller asks for beside them."

    options: LossOptions
    reduction: str = "mean"
    shift: int = 0
    method: str = "auto"
    memory_budget: Optional[int] = None  # bytes beyond the gradients
    accumulate: str = "auto"
    filter_eps: Optional[float] = None
    chunk_size: Optional[int] = None
    max_valid: Optional[int] = None  # a promise: no more tokens than this are not ignored
    return_stats: bool = False
    monitored: bool = False  # statistics need no gradient
    backbone_reduction: Optional[str] = None
    matmul_dtype: Optional[MatmulDtype] = None  # of the backward matmuls; as the forward one's if None
    forward_dtype: Optional[MatmulDtype] = None  # of the forward matmul; as the operands' if None


def _checks() -> dict[str, tuple[type, Check]]:
    "Type and check of each option."
    return {name: get_args(kind) for name, kind in get_type_hints(LossOptions, include_extras=True).items()}


KINDS = _checks()


def argument_names(
    fn: Callable,  # a function or a class
) -> list[str]:
    "What may be given by name, each option of `**options` too."
    names = []
    for f in [c for c in fn.__mro__ if {"__init__", "__new__"} & {*vars(c)}] if inspect.isclass(fn) else [fn]:
        parameters = inspect.signature(f).parameters.values()
        names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        rest = [p.annotation for p in parameters if p.kind is p.VAR_KEYWORD]
        if not rest:
            break
        names += getattr(next(iter(get_args(rest[0])), None), "__annotations__", ())
    return list(dict.fromkeys(names))


def check_names(
    names: Iterable[str],  # keywords that nobody knows
    fn: Callable,  # a function or a class
):
    "`TypeError` as Python's for the first; it names the argument that was meant, and all that there are."
    for name in names:
        known = argument_names(fn)
        raise TypeError(
            f"{fn.__name__}() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}"
            f" (expected {', '.join(known)})"
        )


def loss_options(
    given: dict[str, Any],  # options by name, as a caller gave them; or all in one, as `options`
    fn: Callable = LossOptions,  # the function or class to which they were given
) -> LossOptions:
    "The options in one; `ValueError` for one that is not what it can be, `TypeError` for one that is none."
    if not given:
        return DEFAULTS
    if "options" in given:
        return given["options"]
    check_names([name for name in given if name not in KINDS], fn)
    made = {}
    for name, value in given.items():
        kind, check = KINDS[name]
        if value is None and check.optional:
            continue
        expect(check.holds(value), name, check.expected, value)
        made[name] = kind(value)
    return LossOptions(**made)


class LossArguments(TypedDict, total=False):
    "The options as a type checker knows them."

    ignore_index: int
    label_smoothing: float
    logit_scale: float | Tensor
    softcap: Optional[float]
    z_loss: float


LEARNED = {"logit_scale"}  # options that may also be a 0-dim tensor, which a loss takes out (`core.learned`)

F = TypeVar("F", bound=Callable[..., Any])


def lists_options(
    fn: F,  # takes `**options:Unpack[LossArguments]`
) -> F:
    "`fn`, whose signature lists each option."
    signature, kinds = inspect.signature(fn), dict(fn.__annotations__)
    listed = []
    for name, (kind, check) in KINDS.items():
        default = None if check.optional else LossOptions._field_defaults[name]
        kinds[name] = Optional[kind] if check.optional else kind | Tensor if name in LEARNED else kind
        listed.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name]))
    own = [p for p in signature.parameters.values() if p.name != "options"]
    others = [own.pop()] if own[-1].kind is own[-1].VAR_KEYWORD else []
    fn.__signature__ = signature.replace(parameters=own + listed + others)
    fn.__annotations__ = {name: kind for name, kind in kinds.items() if name != "options"}
    return fn


class CrossEntropyStats(NamedTuple):
    "What a pass over the logits knows beside the loss; 0 (rank -1) where a token is ignored."

    lse: Tensor  # of the target's shape, differentiable
    entropy: Tensor  # of the target's shape, nats, differentiable
    accuracy: Tensor  # scalar, the share of valid tokens whose target leads
    target_rank: Tensor  # of the target's shape, int64, 0 for the highest score
    logit_max: Tensor  # of the target's shape, of the scores, as are all of these
    logit_norm: Tensor  # of the target's shape
    z_loss: Tensor  # of the target's shape, this term's share of the loss
    n_valid: Tensor  # scalar, int64


@functools.cache
def constructor_defaults(kind: type) -> dict[str, Any]:
    "Arguments of a class's constructor and their defaults, then its bases' that have one."
    own, *bases = (inspect.signature(c.__init__).parameters for c in kind.__mro__ if "__init__" in vars(c))
    known = {name: p.default for name, p in own.items() if p.kind is not p.VAR_KEYWORD and name != "device"}
    for base in bases:
        known = {name: p.default for name, p in base.items() if p.default is not p.empty and name != "device"} | known
    return {name: known[name] for name in sorted(known, key=lambda name: name not in own)}


def configured(
    module: Any,
    **held: Any,  # by name, what it keeps elsewhere than in attributes
) -> Iterator[str]:
    "Arguments of a module's constructor, and of its bases', that it holds and that are no defaults: for its `repr`."
    for name, default in constructor_defaults(type(module)).items():
        value = held.get(name, getattr(module, name, default))
        if value is default or isinstance(value, torch.nn.Module):
            continue
        if isinstance(value, Tensor):
            yield f"{name}={list(value.shape)}"
        elif default is inspect.Parameter.empty:
            yield f"{value!r}"
        elif value != default:
            yield f"{name}={value!r}"


class Statistics(NamedTuple):
    "What a pass over the scores sums beside the loss."

    entropy: bool = False
    ranks: bool = False  # the target's rank, the maximum and the norm of the scores
    mean: bool = False  # of the scores


NO_STATISTICS, ALL_STATISTICS = Statistics(), Statistics(entropy=True, ranks=True)


def statistics_of(
    asked: bool,  # `return_stats`
) -> Statistics:
    "What `CrossEntropyStats` needs, or nothing."
    return ALL_STATISTICS if asked else NO_STATISTICS
