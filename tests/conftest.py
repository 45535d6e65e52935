"""What every test file may ask for by name."""
import os

import pytest
import torch
from typed_launches import check_launches

torch.set_num_threads(1)  # the tensors are small, and pytest-xdist fills the cores


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> str:
    "Each test runs once on the CPU and once on the GPU"
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    return request.param


@pytest.fixture(autouse=os.environ.get("TRITON_INTERPRET") == "1")
def lowered(monkeypatch) -> None:
    "What the interpreter runs, the compiler must accept"
    check_launches(monkeypatch)
