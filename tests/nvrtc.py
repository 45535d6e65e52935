"""NVRTC by itself: the compiler that CuPy and PyTorch bring compiles for any GPU on a machine without one."""
import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Mapping

from fusedloss.core.cuda import OPTIONS


@cache
def library(major: int) -> ctypes.CDLL | None:
    "NVRTC of a version of CUDA, from a wheel of NVIDIA's or from the system; None where there is none"
    wheels = [str(path) for folder in sys.path for path in Path(folder or ".").glob(f"nvidia/*/lib/libnvrtc.so.{major}")]
    for path in (*wheels, f"libnvrtc.so.{major}"):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def version(nvrtc: ctypes.CDLL) -> tuple[int, int]:
    "Of CUDA, as NVRTC says"
    numbers = ctypes.c_int(), ctypes.c_int()
    assert nvrtc.nvrtcVersion(*map(ctypes.byref, numbers)) == 0
    return tuple(n.value for n in numbers)


def knows(nvrtc: ctypes.CDLL, arch: int) -> bool:
    "Does this NVRTC compile for an architecture?"
    count = ctypes.c_int()
    assert nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
    archs = (ctypes.c_int * count.value)()
    assert nvrtc.nvrtcGetSupportedArchs(archs) == 0
    return arch in archs


def complaint(nvrtc: ctypes.CDLL, source: str, constants: Mapping, arch: int | str) -> str:
    "What NVRTC has against a source, compiled as the library compiles it; empty if nothing"
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None) == 0
    options = [*OPTIONS, *(f"-D{k}={v}" for k, v in constants.items()), "-ftz=true", f"-arch=sm_{arch}"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
    assert nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetProgramLog(program, log) == 0 and nvrtc.nvrtcDestroyProgram(ctypes.byref(program)) == 0
    return log.value.decode() or str(failed) if failed else ""
