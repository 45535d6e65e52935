"""What a call must look like: one sentence for each way in which it does not, with what was expected and what came."""

import functools
import math
import os
import re
from types import FunctionType
from typing import Any, Callable, Hashable, Iterable, Optional

import torch
from torch import Tensor

from fusedloss.core.operators import autocasts, check_unbatched


def is_number(value) -> bool:
    "A finite Python number; a tensor would want a gradient."
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def is_integer(value) -> bool:
    "An integer of Python or NumPy; a bool is none."
    return type(value) is int or (hasattr(value, "__index__") and not isinstance(value, (bool, Tensor)))


def did_you_mean(got: str, known: Iterable[str]) -> str:
    "The end of a sentence that refuses a word: the one of those known that is nearly the same, or has it as a part."
    from difflib import get_close_matches  # errors alone need it

    words = {word.lower(): word for word in known}
    near = get_close_matches(got.lower(), words, 1) or [w for w in words if got.lower() in w.split("_")]
    return f"; did you mean {words[near[0]]}?" if near else ""


def in_words(value) -> str:
    "A value as a message has it; a function is called for it."
    return str(value() if isinstance(value, FunctionType) else value)


def expect(ok: bool, name: str, expected, got):
    "`ValueError` with what was expected and what came, unless `ok`; for a misspelt word also the word that it resembles."
    if ok:
        return
    # texts with sizes are functions, called only here: if they were made earlier, torch.compile would take the sizes for constants
    expected, got = in_words(expected), in_words(got)
    word = re.fullmatch("'(.*)'", got)
    near = did_you_mean(word[1], re.findall("'([^']*)'", expected)) if word else ""
    raise ValueError(f"{name}: expected {expected}, got {got}{near}")


PLAIN_TENSORS = Tensor, torch.nn.Parameter
ONE_PROCESS = (
    "a plain tensor, such as .full_tensor(); a weight whose classes are over ranks is for fl.linear_cross_entropy, "
    "fl.sharded_linear_log_probs, fl.sharded_linear_topk, fl.sharded_linear_sample, fl.sharded_linear_divergence "
    "or fl.ShardedPartialFC"
)


def expect_tensor(
    name: str,
    value,
    expected: str = "a tensor",
    over_ranks: bool = False,  # a DTensor may be given
):
    "`ValueError` unless `value` is a tensor."
    if type(value) in PLAIN_TENSORS:
        return
    expect(isinstance(value, Tensor), name, expected, type(value).__name__)
    expect(over_ranks or not hasattr(value, "full_tensor"), name, ONE_PROCESS, "a DTensor")


def check_flags(**flags: bool):
    "`ValueError` naming the first that is neither True nor False."
    for name, flag in flags.items():
        expect(flag in (True, False), name, "True or False", repr(flag))


def as_integers(name: str, value) -> Tensor:  # a tensor stays where it is
    "A tensor of what PyTorch makes one of; `ValueError` for anything else."
    if isinstance(value, Tensor):
        expect_tensor(name, value)
        return value
    try:
        return torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        made = None
    expect(made is not None, name, "integers, as a tensor or a list", repr(value))


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_device(device) -> bool:
    "Whether PyTorch takes it for a device: None is the default, an integer an accelerator."
    if not isinstance(device, str):
        return device is None or is_integer(device) or isinstance(device, torch.device)
    try:
        return bool(torch.device(device))
    except RuntimeError:
        return False


def check_factory(device: torch.types.Device, dtype: torch.dtype | None):
    "`ValueError` for a device or dtype that no weight can have."
    expect(is_device(device), "device", "a device such as 'cpu', or None", repr(device))
    expect(dtype is None or dtype in FLOATS, "dtype", "a floating dtype of 16, 32 or 64 bits, or None", repr(dtype))


def check_matrix(name: str, t: Tensor, over_ranks: bool = False):  # [V,H]
    "`ValueError` unless it is a matrix of floats."
    expect_tensor(name, t, over_ranks=over_ranks)
    expect(t.dim() == 2, name, "shape [V, H]", list(t.shape))
    expect(t.dtype in FLOATS, name, "a floating dtype of 16, 32 or 64 bits", t.dtype)


def check_linear(
    input: Tensor,  # [..., H]
    linear_weight: Tensor,  # [V,H]
    over_ranks: bool = False,  # either may be a DTensor
):
    "`ValueError` unless `input` and `linear_weight` can be multiplied, or will be by autocast."
    expect_tensor("input", input, over_ranks=over_ranks)
    check_matrix("linear_weight", linear_weight, over_ranks)
    expect(
        input.dim() >= 1 and input.shape[-1] == linear_weight.shape[1],
        "input",
        lambda: f"shape [..., {linear_weight.shape[1]}]",
        list(input.shape),
    )
    expect(input.dtype in FLOATS, "input", "a floating dtype of 16, 32 or 64 bits", input.dtype)
    mixes = autocasts(input.device.type) and torch.float64 not in (input.dtype, linear_weight.dtype)
    expect(
        input.dtype == linear_weight.dtype or mixes,
        "linear_weight",
        f"the input's dtype {input.dtype}",
        linear_weight.dtype,
    )
    expect(
        input.device == linear_weight.device,
        "linear_weight",
        f"the input's device {input.device}",
        linear_weight.device,
    )


def is_empty(t: Tensor) -> bool:
    "Whether it has no rows; a number of rows that a compiler does not know is not 0."
    if not torch.compiler.is_compiling():
        return t.shape[0] == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(t.shape[0] == 0)


def is_debugged() -> bool:
    "Whether checks may wait for a GPU."
    return os.environ.get("FUSEDLOSS_DEBUG") == "1"


def may_look(t: Tensor) -> bool:
    "Whether checks look at the numbers of a tensor: on a GPU that waits for it, and is done if FUSEDLOSS_DEBUG=1."
    debugged = os.environ.get("FUSEDLOSS_DEBUG") == "1"  # no call: each step asks
    return (t.is_cpu or debugged) and not torch.compiler.is_compiling()


def check_labels(
    target: Tensor,  # any shape, integers
    n_classes: int,
    ignore_index: int,
):
    "`IndexError` naming the first label not in `[0, n_classes)`; on GPUs if FUSEDLOSS_DEBUG=1."
    expect(is_integer(ignore_index), "ignore_index", "an integer", ignore_index)
    if not may_look(target):
        return
    check_unbatched(target)
    wrong = bad_labels(target.long(), n_classes, ignore_index)
    if isinstance(wrong, torch._subclasses.FakeTensor):
        return  # which has a shape and no numbers
    wrong = wrong.nonzero()
    if not len(wrong):
        return
    at = tuple(wrong[0].tolist())
    raise IndexError(
        f"target[{', '.join(map(str, at))}] is {target[at].item()}: "
        f"expected 0 ≤ label < {n_classes}, or {ignore_index} to ignore"
    )


def bad_labels(target: Tensor, n_classes: int, ignore_index: int) -> Tensor:
    "True where a label (int64) is neither a class nor ignored."
    return (target != ignore_index) & ((target < 0) | (target >= n_classes))


def check_target(
    target: Tensor,  # of `shape`, integers
    shape: torch.Size,
    device: torch.device,
    reduction: str,
    name: str = "target",
):
    "Raise `ValueError` for targets of another kind, and for an unknown reduction."
    expect_tensor(name, target)
    expect(target.shape == shape, name, f"shape {list(shape)}", list(target.shape))
    integer = not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
    expect(integer, name, "an integer dtype", target.dtype)
    expect(target.device == device, name, f"the input's device {device}", target.device)
    expect(reduction in ("none", "mean", "sum"), "reduction", "'none', 'mean' or 'sum'", repr(reduction))


def check_margin(margin: float, scale: float | None):
    "`ValueError` for numbers that LMCL cannot have."
    expect(is_number(margin), "margin", "a finite number", margin)
    expect(scale is None or is_number(scale) and scale > 0, "scale", "a positive number or None", scale)


def check_inputs(
    input: Tensor,  # [..., H]
    linear_weight: Tensor,  # [V,H]
    target: Tensor,  # [...], integers
    reduction: str = "mean",
    ignore_index: int = -100,
    margin: float = 0.35,
    scale: float | None = None,
):
    "Raise `ValueError` or `IndexError` for input that no loss here accepts."
    check_linear(input, linear_weight)
    check_target(target, input.shape[:-1], input.device, reduction)
    check_margin(margin, scale)
    check_labels(target, linear_weight.shape[0], ignore_index)


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    "float64 for float64, else float32: what losses, statistics and sums are kept in."
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_scale(
    logit_scale: float | Tensor,
    device: torch.device,
    beside: str,  # the argument that is on the device
    name: str = "logit_scale",
):
    "`ValueError` unless it is a finite number, or a tensor that holds one."
    expected = "a finite number or a 0-dim tensor"
    if not isinstance(logit_scale, Tensor):
        return expect(is_number(logit_scale), name, expected, lambda: repr(logit_scale))
    expect(not hasattr(logit_scale, "full_tensor"), name, "a plain tensor", "a DTensor")
    expect(logit_scale.dim() == 0, name, "a number or a 0-dim tensor", f"shape {list(logit_scale.shape)}")
    expect(logit_scale.dtype in FLOATS, name, "a floating dtype of 16, 32 or 64 bits", logit_scale.dtype)
    expect(logit_scale.device == device, name, f"{beside}'s device {device}", logit_scale.device)


def in_range(value, low, high=math.inf) -> bool:
    "A finite Python number between low and high."
    return is_number(value) and low <= value <= high


def check_bias(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Optional[Tensor],
    whose: str = "",  # words after the shape that is expected
):
    "`ValueError` for a bias that does not go with the weight."
    classes, b, dtype = len(linear_weight), linear_bias, linear_weight.dtype
    if b is None:
        return
    expect_tensor("linear_bias", b, "a tensor or None")
    mixes = autocasts(input.device.type) and b.is_floating_point()
    expect(
        b.shape == (classes,) and (mixes or b.dtype == dtype),
        "linear_bias",
        lambda: f"{dtype} [{classes}]{whose}",
        f"{b.dtype} {list(b.shape)}",
    )
    expect(b.device == input.device, "linear_bias", f"the input's device {input.device}", b.device)


def check_budget(memory_budget: Optional[int]):
    "`ValueError` for a budget that cannot be meant."
    m = memory_budget
    expect(m is None or type(m) is int and m > 0, "memory_budget", "a positive number of bytes or None", m)


def check_bias_and_budget(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Optional[Tensor],
    memory_budget: Optional[int],
):
    "`ValueError` for a weight without classes, and for a bias or a budget that cannot be meant."
    expect(len(linear_weight) > 0, "linear_weight", "at least one class", list(linear_weight.shape))
    check_bias(input, linear_weight, linear_bias)
    check_budget(memory_budget)


def check_weight(name: str, t: Optional[Tensor], shape: tuple[int, ...]):
    "`ValueError` for weights of another shape or dtype, or that want a gradient."
    if t is None:
        return
    expect_tensor(name, t, "a tensor or None")
    expect(
        t.is_floating_point() and t.shape == tuple(shape),
        name,
        f"floats of shape {list(shape)}",
        f"{t.dtype} {list(t.shape)}",
    )
    expect(not t.requires_grad, name, "a tensor without gradient", "requires_grad=True")


def check_weights(
    n_classes: int,
    device: torch.device,  # of the input
    weight: Optional[Tensor],  # [V]
    token_weight: Optional[Tensor],
    shape: torch.Size,  # of the targets
):
    "`ValueError` for weights of another shape, dtype or device, or that want a gradient."
    for name, t, size in (("weight", weight, (n_classes,)), ("token_weight", token_weight, shape)):
        check_weight(name, t, size)
        expect(t is None or t.device == device, name, f"the input's device {device}", None if t is None else t.device)


REMEMBERED = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))  # they keep nothing else alive


def traits(value: Any) -> Hashable:
    "What a check may look at of an argument; `TypeError` where that cannot be looked up."
    if type(value) in PLAIN_TENSORS:
        device = value.device
        cast = torch._C._is_any_autocast_enabled() and autocasts(device.type)
        return value.shape, value.dtype, device, value.requires_grad, cast
    if isinstance(value, tuple):
        return type(value), *traits_of(value)
    if type(value) is dict:
        return dict, *value, *traits_of(value.values())
    if type(value) in REMEMBERED:
        return type(value), value
    raise TypeError(f"a {type(value)}, which may hold tensors")


def traits_of(values: Iterable) -> list[Hashable]:
    "Of each; most are None, a word or a flag, for which no call is made."
    return [v if v is None or type(v) is str else (bool, v) if type(v) is bool else traits(v) for v in values]


def once_for_alike(
    check: Callable[..., None],  # raises, or looks at `traits` alone
    most: int = 4096,  # calls that are remembered
) -> Callable[..., None]:
    "`check`, which is not run again for arguments like those that passed."
    passed = set()

    @functools.wraps(check)
    def checked(*args):
        if torch.compiler.is_compiling():
            return check(*args)
        try:
            seen = (key := tuple(traits_of(args))) in passed
        except TypeError:
            return check(*args)
        if seen:
            return
        check(*args)
        if len(passed) < most:
            passed.add(key)

    return checked
