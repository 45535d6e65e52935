"""The sources of `cuda/` as C++ for a CPU: each text is compiled once, in a folder that workers and later runs share."""
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Callable, Mapping

import pytest
import torch

from fusedloss.core.cuda import cuda_source

HERE = Path(__file__).parent
BUILT = Path(tempfile.gettempdir()) / f"fusedloss-on-cpu-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
STANDARD = ("g++", "-std=c++20", "-w")
NVCC = ("nvcc", "--std=c++17", "-Werror=all-warnings", "-cubin")


@cache
def version(compiler: str) -> str:
    "What a compiler says of itself"
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


def build(command: tuple[str, ...], texts: Mapping[str, str], main: str, constants: Mapping) -> Path:
    "What `command` makes of the file `main` among `texts`, or what was made of the same before; fails with the compiler's words"
    options = *command[1:], *(f"-D{k}={v}" for k, v in constants.items())
    key = hashlib.sha256(repr((version(command[0]), options, main, sorted(texts.items()))).encode()).hexdigest()
    out = BUILT / key
    if not out.exists():
        BUILT.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as folder:
            for name, text in texts.items():
                Path(folder, name).write_text(text, encoding="utf-8")
            done = subprocess.run([command[0], *options, "-o", f"{folder}/out", f"{folder}/{main}"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            os.replace(f"{folder}/out", out)  # at once: others may build the same
    return out


def check_nvcc(arch: int | str, source: str, constants: Mapping) -> None:
    "The source compiles for an architecture, without a warning"
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc on this machine")
    build((*NVCC, f"-arch=sm_{arch}"), {"source.cu": source}, "source.cu", constants)


def kernels_on_cpu(shim: str, level: str = "-O0", **sources: str | None) -> Callable:
    "A stand-in for a loader of kernels, which a file of C++ runs thread by thread; None stands for the library's source"
    if platform.machine() != "x86_64" or not shutil.which("g++"):
        pytest.skip("no g++ for x86-64 on this machine")
    texts = {f"{name}.cu": source or cuda_source(name) for name, source in sources.items()}
    texts |= {path.name: path.read_text(encoding="utf-8") for path in (HERE / "cuda_on_cpu.h", *HERE.glob("*_on_cpu.cpp"))}
    command = *STANDARD, level, "-ffp-contract=off", "-shared", "-fPIC"  # mostly the compiler takes longer than what it compiles

    @cache
    def library(constants: tuple) -> ctypes.CDLL:
        return ctypes.CDLL(str(build(command, texts, shim, dict(constants))))

    def kernel(name, device, **constants):
        run = getattr(library(tuple(constants.items())), f"run_{name.removeprefix('ctc_')}")

        def launch(grid, block, *args, shared=0):
            assert 32 <= block <= 1024 and block % 32 == 0 and shared <= 1 << 17
            run(grid, block, kernel.seed, *(ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in args))
        return launch
    kernel.seed = 0
    return kernel
