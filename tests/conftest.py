"""What every test file may ask for by name."""
import fcntl
import os
import sys
import tempfile
import unittest
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import fusedloss
import pytest
import torch
from grids import FULL
from typed_launches import check_launches

# the tensors are small, and pytest-xdist fills the cores; two threads add in another order, as another processor does
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0]))

for name in fusedloss.__all__:  # a name that is fetched for the first time while a test has replaced it would stay replaced
    getattr(fusedloss, name)


# `make test-gpu` leaves out what needs no GPU: `make test` has run it
DEVICES = os.environ.get("FUSEDLOSS_DEVICES", "cpu cuda").split() if torch.cuda.is_available() else ["cpu"]


def pytest_report_header() -> str:
    return f"devices: {', '.join(DEVICES)}" + ("" if torch.cuda.is_available() else " (no GPU on this machine)")


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    "Each test runs once on each device at hand"
    return request.param


@pytest.fixture(autouse=torch.cuda.is_available())
def gpu_memory(request) -> Iterator[None]:
    "Workers share one GPU's memory: those tests that take much of it take turns, and none keeps what it no longer needs"
    with (Path(tempfile.gettempdir()) / "fusedloss-gpu-memory.lock").open("w") as lock:
        if request.node.get_closest_marker("big"):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
            torch.cuda.empty_cache()


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    "What PyTorch allocates is filled with NaN first: whoever reads before anything was written there gets NaN, not what an earlier test left"
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def torchs_samples(monkeypatch) -> None:
    "PyTorch's samples can be imported: its tests inherit from a package that need not be installed, and its samples do not need it"
    if "expecttest" not in sys.modules and find_spec("expecttest") is None:
        monkeypatch.setitem(sys.modules, "expecttest", SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False))


@pytest.fixture(autouse=os.environ.get("TRITON_INTERPRET") == "1")
def lowered(monkeypatch) -> None:
    "What the interpreter runs, the compiler must accept"
    check_launches(monkeypatch, each=FULL)
