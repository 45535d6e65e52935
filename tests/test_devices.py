"What a GPU can do, and which implementations take it; no test needs a GPU."
from types import SimpleNamespace

import pytest
import torch

from fusedloss.core import devices
from fusedloss.core.devices import CPU, GPUS, device_of, lacks


@pytest.fixture
def properties(monkeypatch):
    "Let PyTorch report a GPU"
    def report(hip=None, **fields):
        given = SimpleNamespace(**fields)
        devices._gpu.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: given)
        monkeypatch.setattr(torch.version, "hip", hip)
    yield report
    devices._gpu.cache_clear()


@pytest.mark.parametrize("name", [name for name, d in GPUS.items() if d.vendor == "nvidia"])
def test_a_known_gpu_is_what_the_driver_describes(properties, name):
    d = GPUS[name]
    properties(name=d.name, major=d.capability[0], minor=d.capability[1], multi_processor_count=d.multiprocessors,
               shared_memory_per_block_optin=d.shared_memory)
    assert device_of("cuda") == device_of(0) == device_of(torch.device("cuda", 0)) == d


def test_a_capability_on_hip_is_not_nvidias(properties):
    properties(hip="6.4", name="AMD Instinct MI300X", major=9, minor=4, multi_processor_count=304, shared_memory_per_block=65536)
    d = device_of("cuda")
    assert d == GPUS["MI300X"]._replace(name="AMD Instinct MI300X")
    assert lacks(d, "nvidia") and lacks(d, "tma") and lacks(d, "clusters") and not lacks(d, "gpu")


def test_an_old_torch_reports_no_shared_memory_to_opt_in_to(properties):
    properties(name="unknown", major=9, minor=0, multi_processor_count=1)
    assert device_of("cuda").shared_memory == 49152


def test_what_is_no_gpu_has_no_vendor():
    places = "cpu", "meta", torch.zeros(2), torch.zeros(2, device="meta"), torch.device("cpu")
    assert all(device_of(place) is CPU for place in places)
    assert lacks(CPU, "gpu") == "CPU is no GPU"


def test_a_gpu_without_a_driver_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(torch.device("cuda", 0)) is CPU
