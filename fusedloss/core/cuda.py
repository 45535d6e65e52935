"""One way to compile and launch a kernel of `cuda/`."""

import ctypes
import functools
import os
import re
import struct
import threading
import warnings
from importlib.resources import files
from types import SimpleNamespace
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from fusedloss.core.devices import device_of, lacks
from fusedloss.core.tuning import announced, in_graph


INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)


def cuda_source(name: str) -> str:
    "Text of `cuda/{name}.cu` with its headers: in the package, or beside it in a checkout."
    home = files(__package__.partition(".")[0])
    places = home / "cuda", home.parent / "cuda"
    folder = next(p for p in places if p.is_dir())
    text = lambda file: folder.joinpath(file).read_text(encoding="utf-8")
    return INCLUDE.sub(lambda found: text(found[1]), text(f"{name}.cu"))


KERNEL = re.compile(r'^extern "C" __global__ ([^{]*){.*?^}\n', re.MULTILINE | re.DOTALL)


def kernel_alone(
    source: str,
    name: str,  # of a kernel
) -> str:
    "A source without its other kernels: a compiler takes its time for each."
    empty = lambda text: "\n" * text.count("\n")  # messages name the lines of the whole source
    return KERNEL.sub(lambda found: found[0] if re.search(rf"\b{name}\(", found[1]) else empty(found[0]), source)


@functools.cache
def driver() -> ctypes.CDLL:
    "The driver's library; `OSError` where there is none."
    return ctypes.CDLL("libcuda.so.1")


def ask_driver(name: str, *args: Any):
    "Call a function of the driver; `RuntimeError` if it refuses."
    failed = getattr(driver(), name)(*args)
    if failed:
        raise RuntimeError(f"{name}: the driver answers with error {failed}")


def as_bits(value: Tensor | float | int | None) -> int:
    "A kernel's argument in 64 bits: an address, a double, an integer."
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return struct.unpack("q", struct.pack("d", value))[0]
    return int(value or 0)


def driver_handle(kernel) -> Optional[ctypes.c_void_p]:  # of CuPy
    "A kernel as the driver knows it; None where either is not to be had."
    try:
        driver()
    except OSError:
        return None
    address = getattr(getattr(kernel, "kernel", None), "ptr", None)
    return address and ctypes.c_void_p(address)


class Parameters:
    "Memory from which the driver reads a kernel's parameters, 64 bits each: of a number of 32 bits the first four bytes."

    def __init__(
        self,
        given: str,  # those that a launch gives, a letter of `struct` each
        *numbers: int | float,  # those after them, the same for all launches
    ):
        kinds = given + "".join("d" if isinstance(n, float) else "q" for n in numbers)
        self.memory = ctypes.create_string_buffer(struct.pack(kinds, *[0] * len(given), *numbers))
        begin = ctypes.addressof(self.memory)
        self.places = (ctypes.c_void_p * len(kinds))(*range(begin, begin + 8 * len(kinds), 8))
        self.write, self.lock = struct.Struct(given).pack_into, threading.Lock()

    def launch(
        self,
        ask: Callable,  # the driver's `cuLaunchKernel`
        how: tuple,  # the kernel as the driver knows it, and numbers of blocks, of threads, of bytes that they share
        stream: int,
        values: list[int],
    ) -> int:  # the driver's error, and nothing has happened; 0 if there is none
        "Launch a kernel on the current device."
        with self.lock:  # another thread would write its values
            self.write(self.memory, 0, *values)
            return ask(*how, ctypes.c_void_p(stream), self.places, None)


COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def parameter_count(source: str, name: str) -> int:
    "How many parameters a kernel has; `ValueError` if the source has no such kernel."
    found = re.search(rf"__global__\s[^;{{}}]*?\b{name}\s*\(([^()]*)\)", COMMENTS.sub("", source))
    if found is None:
        raise ValueError(f"source: expected a kernel {name}, got none")
    return found[1].count(",") + 1 if found[1].strip() else 0


class Compiled:
    "A kernel that a compiler made."

    def __init__(self, source: str, name: str):
        self.name, self.parameters = name, parameter_count(source, name)

    def check_arguments(self, count: int):
        "`ValueError` unless the kernel takes so many."
        if count != self.parameters:
            raise ValueError(f"{self.name}: expected {self.parameters} arguments, got {count}")


class CompiledByCupy(Compiled):
    "A kernel made by CuPy."

    def __init__(self, source: str, name: str, options: tuple[str, ...], arch: str = ""):
        super().__init__(source, name)
        from cupy import RawModule

        options = (*options, f"-arch=sm_{arch}") if arch else options
        self.kernel = RawModule(code=source, options=options).get_function(name)
        self.function = None  # what the driver knows it by, once CuPy has launched it
        self.values = Parameters("q" * self.parameters)

    def __call__(self, grid: int, block: int, *args: Any, shared: int = 0):
        if len(args) != self.parameters:
            self.check_arguments(len(args))
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        values = [
            a if type(a) is int else 0 if a is None else a.data_ptr() if type(a) is Tensor else as_bits(a) for a in args
        ]
        how = self.function, grid, 1, 1, block, 1, 1, shared
        if self.function and not self.values.launch(driver().cuLaunchKernel, how, stream, values):
            return  # which spares the objects that CuPy makes of numbers; CuPy says what is wrong
        if shared > 49152:
            self.kernel.max_dynamic_shared_size_bytes = shared
        self.kernel(
            (grid,), (block,), tuple(values), shared_mem=shared, stream=SimpleNamespace(ptr=stream)
        )  # an object of PyTorch costs the host more
        if shared <= 49152:
            self.function = driver_handle(self.kernel)

    def handle(self, shared: int, arguments: int) -> int:  # bytes that a launch may ask for; their number
        "What the driver knows it by."
        self.check_arguments(arguments)
        self.kernel.max_dynamic_shared_size_bytes = shared
        return self.kernel.kernel.ptr


@functools.cache
def null_pointer() -> Tensor:
    "A tensor without memory, whose address is null."
    return torch.empty(0, device="cuda")


class CompiledByTorch(Compiled):
    "A kernel made by PyTorch's NVRTC."

    def __init__(self, source: str, name: str, options: tuple[str, ...], arch: str = ""):
        super().__init__(source, name)
        options = [*options, "-ftz=true"]  # as CuPy compiles: the same bits
        self.kernel = torch.cuda._compile_kernel(source, name, arch or None, nvcc_options=options)

    def __call__(self, grid: int, block: int, *args: Any, shared: int = 0):
        self.check_arguments(len(args))
        if shared >= 49152:
            self.kernel.set_shared_memory_config(shared)
        given = [null_pointer() if a is None else a for a in args]
        self.kernel((grid, 1, 1), (block, 1, 1), given, shared_mem=shared)

    def handle(self, shared: int, arguments: int) -> int:  # bytes that a launch may ask for; their number
        "What the driver knows it by."
        self.check_arguments(arguments)
        self.kernel.set_shared_memory_config(shared)
        return self.kernel.func.value


COMPILERS = {"CuPy": CompiledByCupy, "PyTorch": CompiledByTorch}  # in the order of preference
OPTIONS = ("--std=c++17",)  # of every source
EMPTY_KERNEL = 'extern "C" __global__ void empty_kernel() {}'


@functools.cache
def compiler_failure(
    compiler: str,  # a key of `COMPILERS`
    device: int,  # the current one
) -> Optional[str]:  # None: it works
    "What hinders a compiler from compiling an empty kernel."
    if lacks(device_of(device), "nvidia") and not lacks(device_of(device), "gpu"):
        return "the kernels are written for GPUs of NVIDIA"
    try:
        COMPILERS[compiler](EMPTY_KERNEL, "empty_kernel", OPTIONS)
    except Exception as reason:
        return repr(reason)  # an import may raise anything


def large_shared_memory(
    device: int,  # the current one
) -> bool:
    "Whether a launch may ask for more than 48 KiB: by CuPy, or by a PyTorch that knows how."
    from torch.cuda import _utils

    kernel = getattr(_utils, "_CudaKernel", None)
    return not compiler_failure("CuPy", device) or hasattr(kernel, "set_shared_memory_config")


warned_sources = set()  # sources that a warning has named


def warn_not_compiled(
    file: str,  # of the source
    reasons: dict[str, str],  # why each compiler failed
):
    "One warning a source, whatever the kernels and constants."
    if file in warned_sources:
        return
    warned_sources.add(file)
    causes = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    warnings.warn(
        f"cuda/{file}.cu was not compiled, and an implementation without it takes its place. {causes}", stacklevel=4
    )


@functools.cache
def compiled_kernel(
    name: str,  # of the kernel
    device: int,  # the current one
    sources: tuple[str, ...],  # files, in the order in which they are joined
    arch: str,
    **constants,  # what the sources leave open
) -> Optional[Callable]:  # as of `cuda_kernel`
    "A kernel by the first compiler that makes it."
    source = kernel_alone("".join(map(cuda_source, sources)), name)
    options = (*OPTIONS, *(f"-D{key}={value}" for key, value in constants.items()))
    reasons = {}
    for compiler, compiled in COMPILERS.items():
        with announced(f"makes {compiler} ready"):
            reasons[compiler] = compiler_failure(compiler, device)
        if reasons[compiler]:
            continue
        try:
            with announced(f"compiles cuda/{sources[-1]}.cu"):
                return compiled(source, name, options, arch)
        except Exception as reason:  # a mistake in the source: the compiler works
            if os.environ.get("FUSEDLOSS_DEBUG") == "1":
                raise
            if in_graph():  # where a module may not be loaded; outside it can be
                expected = "expected a call before the CUDA graph is captured, got the first within"
                raise RuntimeError(f"cuda/{sources[-1]}.cu: {expected}") from reason
            reasons[compiler] = repr(reason)
    warn_not_compiled(sources[-1], reasons)


compile_locks: dict[tuple, threading.Lock] = {}  # by what a kernel is compiled from


@functools.cache
def watch_forks():
    "Drop the locks in each process that is forked."
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=compile_locks.clear)


@functools.cache
def cuda_kernel(
    name: str,  # of the kernel
    device: int,  # the current one
    sources: tuple[str, ...] = (),  # files, in the order in which they are joined; (): `name` alone
    arch: str = "",  # compute capability without a point, and a letter: "90a"; "": that of the device
    **constants,  # what the sources leave open
) -> Optional[Callable]:  # (blocks, threads, *arguments, shared=bytes), with a `handle`; None: not compiled
    "A kernel of `cuda/`, compiled once; an error in its source raises under `FUSEDLOSS_DEBUG=1`."
    watch_forks()
    sources = sources or (name,)
    key = name, device, sources, arch, *sorted(constants.items())
    with compile_locks.setdefault(key, threading.Lock()):
        return compiled_kernel(name, device, sources, arch, **constants)


ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


NO_CONTEXT = 201  # the driver's error


def enter_context(
    device: int,  # the current one
):
    "Give this thread the context in which PyTorch works."
    context = ctypes.c_void_p()
    ask_driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    ask_driver("cuCtxSetCurrent", context)


class Bound:
    "A kernel with its grid and its numbers: a launch takes the addresses, or tensors, with which its parameters begin."

    def __init__(self, launch: Callable, device: int, blocks: int, threads: int, addresses: int, *numbers: int | float):
        self.kernel, self.device, self.values = launch, device, Parameters("Q" * addresses, *numbers)
        function = ctypes.c_void_p(launch.handle(0, addresses + len(numbers)))  # which lives as long as the kernel
        self.how, self.ask = (function, blocks, 1, 1, threads, 1, 1, 0), driver().cuLaunchKernel

    def __call__(self, *places: Tensor | int | None):
        "Launch on the current stream of the device, which is the current one."
        addresses = [p if type(p) is int else 0 if p is None else p.data_ptr() for p in places]
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        failed = self.values.launch(self.ask, self.how, stream, addresses)
        if failed == NO_CONTEXT:
            enter_context(self.device)
            failed = self.values.launch(self.ask, self.how, stream, addresses)
        if failed:
            raise RuntimeError(f"cuLaunchKernel: the driver answers with error {failed}")
