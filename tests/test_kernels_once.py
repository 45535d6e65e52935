"""The calls that compute-sanitizer watches: each runs, on the device at hand, and together they launch every kernel."""
import ast
import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import kernels_once
import pytest
import torch

import fusedloss
from fusedloss.core import cuda
from helpers import interpreted

pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(fusedloss.__file__).parents[1]
PARTS = {part.__name__: part for part in kernels_once.PARTS}


def triton_kernels() -> set[str]:
    "Names of the functions `@jit def ..._kernel`, or `@unspecialized(...)`, in the package"
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "fusedloss").rglob("*.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions if f.name.endswith("_kernel") and any(re.match("jit|unspecialized", ast.unparse(d)) for d in f.decorator_list)}


def cuda_kernels() -> set[str]:
    "Names of the functions `__global__ void` in cuda/"
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "cuda").glob("*.cu")]
    return {name for text in texts for name in re.findall(r"__global__ void (?:\w+ |__launch_bounds__\([^)]*\) )*(\w+)\(", text)}


def test_the_list_names_every_kernel_once():
    listed = [name for names in kernels_once.LAUNCHES.values() for name in names.split()]
    assert sorted(listed) == sorted(triton_kernels() | cuda_kernels())


watched = pytest.mark.skipif(not hasattr(type(getattr(kernels_once.kernels, "scan_kernel", None)), "run"), reason="the interpreter of this Triton has no method that launches")


@watched
@pytest.mark.parametrize("part", PARTS)
def test_every_part_runs(part, capsys):
    kernels_once.main([part])
    assert capsys.readouterr().out.startswith(f"{part}: ")


@interpreted
@watched
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the next test")
@pytest.mark.parametrize("part", PARTS)
def test_every_triton_kernel_is_launched(part):
    "By the interpreter, with the modules told that they have kernels"
    torch.manual_seed(0)
    with kernels_once.forced_kernels(), kernels_once.launches() as seen:
        PARTS[part]()
    assert kernels_once.missing(PARTS[part], seen) <= cuda_kernels()


@watched
def test_a_launch_by_the_driver_is_seen_whoever_asks_for_it(monkeypatch):
    "Such as a product's: of an architecture whose module is not named here"
    class Made(cuda.Compiled):
        def handle(self, shared, arguments): return 77

    asked = []
    monkeypatch.setattr(cuda, "ask_driver", lambda *given: asked.append(given))
    another = ModuleType("fusedloss.core.another_product")
    another.ask_driver = cuda.ask_driver
    monkeypatch.setitem(sys.modules, another.__name__, another)
    monkeypatch.setattr(cuda, "COMPILERS", {"NVRTC": Made})
    with kernels_once.launches() as seen:
        kernel = cuda.COMPILERS["NVRTC"]("__global__ void scores(int n) {}", "scores")
        handle = ctypes.c_void_p(kernel.handle(0, 1))
        assert not seen
        another.ask_driver("cuLaunchKernel", handle)
        assert seen == {"scores"}
    another.ask_driver("cuLaunchKernel", handle)
    assert asked == [("cuLaunchKernel", handle)] * 2 and seen == {"scores"}


def test_every_kernel_is_launched_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    done = subprocess.run([sys.executable, "tools/kernels_once.py"], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
