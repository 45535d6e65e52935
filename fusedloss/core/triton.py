"""Kernels can be read and imported without Triton; tensors then take another path."""

import functools
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Callable

import torch
from torch import Tensor


try:
    import triton
    import triton.language as tl

    jit = triton.jit
except Exception as reason:  # an import may raise anything: the kernels can be read, and tensors take another path
    triton, tl, jit = None, SimpleNamespace(constexpr=object), lambda fn: fn
    absent = isinstance(reason, ModuleNotFoundError) and reason.name == "triton"
    not_imported = "" if absent else repr(reason)


def unspecialized(*names: str) -> Callable:  # a decorator, as `jit`
    "`jit` of one kernel for all values of these arguments: 1, and multiples of 16, get none of their own."
    return functools.partial(jit, do_not_specialize=names) if triton else jit


@jit
def exact_log2(x):
    "log2 x: a polynomial, some twenty instructions."
    return tl.log2(x)


def own_log2() -> Callable:
    "log2 as one instruction, where Triton compiles for GPUs of NVIDIA; elsewhere `exact_log2`."
    if not isinstance(exact_log2, getattr(triton, "JITFunction", ())) or torch.version.hip:
        return exact_log2
    from triton.language.extra.libdevice import fast_log2f

    return fast_log2f


log2 = own_log2()


HERE = nullcontext()


def on_device(t: Tensor):
    "A context in which kernels launch where `t` lies."
    elsewhere = t.is_cuda and t.get_device() != torch.cuda.current_device()
    return torch.cuda.device(t.device) if elsewhere else HERE


def triton_failure() -> str:
    "What hinders a Triton that is there from being imported, or from finding a driver and a compiler; empty if nothing does."
    if triton is None:
        return not_imported
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as reason:  # whatever the driver, or the compiler of its launcher, raises
        return repr(reason)
    return ""


@functools.cache
def triton_works() -> bool:
    "Whether there is a Triton that works; if it does not, one warning names the cause."
    failure = triton_failure()
    if failure:
        warnings.warn(f"Triton does not work here, and PyTorch takes its place: {failure}", stacklevel=3)
    return triton is not None and not failure


def next_power_of_2(n: int) -> int:
    "The least power of two that is not below n; Triton's own function takes as long as a launch."
    return 1 << (n - 1).bit_length()


def has_kernel(z: Tensor) -> bool:
    "Whether Triton takes these logits."
    return z.is_cuda and z.dtype != torch.float64 and z.numel() > 0 and triton_works()


def kind_of(
    value: Any,  # an argument of a kernel: neither a plain tensor nor a number
) -> Any:
    "What of it the compiled kernel depends on."
    if isinstance(value, tuple):
        return type(value), kinds_of(value)
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16
    if hasattr(value, "block_shape"):
        return value.base.dtype, *value.block_shape
    return type(value), value


def kinds_of(
    args: tuple,  # of a kernel: all but its constants
) -> tuple:
    "What of them the compiled kernel depends on."
    return tuple(
        [
            v
            if v is None
            else (v.dtype, v.data_ptr() % 16)
            if type(v) is Tensor
            else (v == 1, v % 16 == 0, -(2**31) <= v < 2**31, v < 2**63)
            if type(v) is int
            else float
            if type(v) is float
            else kind_of(v)
            for v in args
        ]
    )


_compiled: dict[tuple, tuple] = {}  # kernel, what its compiled form depends on: that form


def keeps_form(kernel, n_args: int) -> bool:
    "Whether the first `n_args` parameters are all that a compiled kernel reads."
    return [p.is_constexpr for p in kernel.params] == [i >= n_args for i in range(len(kernel.params))]


def launch_kernel(
    kernel,
    grid: tuple[int, ...],
    *args: Any,
    **constants: Any,  # of one type by name
):
    "`kernel[grid](*args, **constants)`, in less of the host's time from the second such call on."
    if not isinstance(kernel, triton.JITFunction):
        return kernel[grid](*args, **constants)
    key = (id(kernel), torch.cuda.current_device(), kinds_of(args), tuple(constants), tuple(constants.values()))
    _, compiled = _compiled.get(key, (None, None))
    if compiled is not None and not kernel.pre_run_hooks:
        return compiled[(*grid, 1, 1)[:3]](*args, *[None] * (len(kernel.params) - len(args)))
    compiled = kernel[grid](*args, **constants)
    if compiled is not None and keeps_form(kernel, len(args)):
        _compiled[key] = kernel, compiled  # a kernel that lives keeps its id
    return compiled
