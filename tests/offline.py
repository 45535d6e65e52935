"""Launches as a GPU that is not here would get them: the library is told of a device, and given tensors that have no memory.

PyTorch's fake tensors say that they lie on a GPU, the library chooses its tilings for the device that it is told of, and
each launch of Triton is written down (typed_launches.py compiles it) instead of run.
"""
import importlib
import pkgutil
from contextlib import contextmanager
from typing import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import fusedloss
from fusedloss.core import devices, hopper, products, triton, tuning
from helpers import everywhere
from typed_launches import build_line

MODULES = [importlib.import_module(m.name) for m in pkgutil.walk_packages(fusedloss.__path__, "fusedloss.") if not m.ispkg and m.name != "fusedloss._modidx"]


class Event:
    "What times kernels: here every one takes as long as the others"
    def __init__(self, **options): pass
    def record(self, *stream): pass
    def synchronize(self): pass
    def elapsed_time(self, other): return 1.0


def indexed(t: torch.Tensor, index) -> torch.Tensor:
    "t[index] by the operators behind it"
    aten, dim = torch.ops.aten, 0
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [i for i in index if not isinstance(i, torch.Tensor)]:
        at = next(i for i, part in enumerate(index) if part is Ellipsis)
        index[at:at + 1] = [slice(None)] * (t.dim() - sum(part is not None for part in index) + 1)
    tensors = [None] * t.dim()
    for part in index:
        if isinstance(part, torch.Tensor):
            tensors[dim], dim = part, dim + 1
        elif part is None:
            t, dim = t.unsqueeze(dim), dim + 1
            tensors.insert(dim - 1, None)
        elif isinstance(part, slice):
            t, dim = aten.slice(t, dim, part.start, part.stop, part.step or 1), dim + 1
        else:
            t = t.select(dim, part)
            tensors.pop(dim)
    return aten.index(t, tensors[:max(i for i, part in enumerate(tensors) if part is not None) + 1]) if any(p is not None for p in tensors) else t


class Driverless(TorchFunctionMode):
    "Indexing and copies ask for the driver of a tensor's device, which is not there; the operators behind an index do not"
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            return indexed(*args)
        if function in (torch.Tensor.__setitem__, torch.Tensor.copy_):
            return args[0]  # there is nothing to write to
        if function is torch.Tensor.contiguous:
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        return function(*args, **(kwargs or {}))


def triton_kernels() -> dict:
    "Every kernel of the library, by name"
    found = [(name, getattr(module, name)) for module in MODULES for name in vars(module) if name.endswith("_kernel")]
    return {name: kernel for name, kernel in found if hasattr(kernel, "fn") and kernel.fn.__module__.startswith("fusedloss.")}


@contextmanager
def told_of(device: devices.Device, monkeypatch) -> Iterator[list[tuple]]:
    "The library takes `device` for the GPU at hand; gives the list of its launches: kernel, arguments, options"
    launches = []
    with monkeypatch.context() as patch, FakeTensorMode(), Driverless():
        everywhere(patch, devices, "recognised", lambda backend, index: device)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(tuning, "_chosen", tuning._Chosen())
        patch.setattr(triton, "_compiled", {})  # a kernel that another test has compiled would be launched
        everywhere(patch, tuning, "platform_of", lambda where: device.name)
        everywhere(patch, tuning, "_compile_all", lambda run, variants: None)
        everywhere(patch, tuning.store, "read", lambda name: {})
        everywhere(patch, tuning.store, "update", lambda *entry: None)
        patch.setattr(torch.Tensor, "data_ptr", lambda t: 0)
        everywhere(patch, triton, "triton_works", lambda: True)
        everywhere(patch, products, "adds_in_float32", lambda device: False)  # PyTorch 2.11 has no such product of tensors without memory
        patch.setattr(hopper.WarpGroupProduct, "matrices_reason", lambda self, x, w, kernel="": "no driver")
        for kind in {type(kernel) for kernel in triton_kernels().values()}:
            if not hasattr(kind, "run"):
                pytest.skip("the interpreter of this Triton has no method that launches")
            patch.setattr(kind, "run", lambda kernel, *args, grid, warmup=False, **options: launches.append((kernel, args, options)))
        yield launches


def lines_of(call: Callable[[], object], device: devices.Device, monkeypatch) -> list[str]:
    "The launches of `call` on `device`, each once, for `Lowerer.usage`"
    with told_of(device, monkeypatch) as launches:
        call()
        return list(dict.fromkeys(build_line(*launch) for launch in launches))


def cuda(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    "A tensor without memory on the GPU that is not here"
    return torch.empty(shape, dtype=dtype, device="cuda")
