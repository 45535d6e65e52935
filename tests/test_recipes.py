"What an extension takes: each is added to a copy, or from a module of its own, and nothing else is touched."
import ast
import importlib.util
from types import SimpleNamespace

import pytest
import torch

import fusedloss
from fusedloss import clusters, ctc, kernels, scans, segments
from fusedloss.core import devices, rates, tiling

DEVICE = '''
from fusedloss.core.devices import Board, DeviceKind, peaks

class Toy(DeviceKind):
    "A made-up accelerator that runs Triton: descriptors, no clusters, little shared memory."
    title, vendor, multiprocessors, shared_memory, tma = "Toy", "toymaker", 24, 48 * 2**10, True
    boards = Board("Toy 16GB", ("Toymaker Toy 16GB",), 20, peaks(1e12, 100e12, 10e12, 5e12), "a data sheet"),
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    "The class of a device, from a module that nothing else knows; forgotten afterwards"
    monkeypatch.setattr(devices, "KINDS", [*devices.KINDS])
    monkeypatch.setattr(devices, "GPUS", {**devices.GPUS})
    monkeypatch.setattr(rates, "KINDS", devices.KINDS)
    path = tmp_path / "toymaker.py"
    path.write_text(DEVICE)
    spec = importlib.util.spec_from_file_location("toymaker", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    devices.recognised.cache_clear()
    yield module.Toy
    devices.recognised.cache_clear()


def play(monkeypatch, name, **fields):
    "Let PyTorch report a GPU"
    properties = SimpleNamespace(name=name, major=9, minor=9, **fields)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def test_a_device_is_one_class(toy, monkeypatch, tmp_path):
    definitions = [node for node in ast.parse(DEVICE).body if not isinstance(node, ast.ImportFrom)]
    assert len(definitions) == 1 and isinstance(definitions[0], ast.ClassDef) and len(DEVICE.strip().splitlines()) < 12
    d = devices.GPUS["Toy"]
    # its limits decide how products are cut
    for desc in (False, True):
        for busy in (False, True):
            t = tiling.cut(d, desc, busy)
            fits = [t for t in ((tiling.BUSY if busy else tiling.WIDE) if desc else tiling.POINTERS) if tiling.shared_bytes(t, d) <= d.shared_memory]
            assert t == (fits[0] if fits else (tiling.BUSY if busy else tiling.WIDE)[-1]) and not tiling.deeper(t, d, True)
    assert tiling.deeper(tiling.POINTERS[0], d._replace(shared_memory=2 * d.shared_memory), True)
    # what it lacks decides which implementations take it
    found = devices.implementations(kernels, clusters, tiling, scans, ctc, segments)
    assert {i.what for i in found if not i.lacks(d)} == {kernels.TRITON_ROWS.what, tiling.BY_POINTERS.what}
    assert tiling.BY_DESCRIPTORS.lacks(d) == "not of NVIDIA" and clusters.ROW_CLUSTERS.lacks(d._replace(vendor="nvidia")) == "no clusters"
    _, rows = devices.support_rows(found, [d])
    assert {row[2].partition(";")[0] for row in rows} == {"passed over: not of NVIDIA", "not tried"}
    # a plan knows its board, and says what it is passed over for
    p = fusedloss.plan(8192, 65536, 2048, machine="Toy 16GB")
    said = {row[0]: row[-1] for row in p.table.rows}
    assert p.machine == "Toymaker Toy 16GB" and p.device.multiprocessors == 20
    assert said["recompute"].endswith("operands by pointers: not of NVIDIA") and said["chunks"].endswith("rows by Triton: not of NVIDIA")
    assert p["recompute"].seconds > 3 * fusedloss.plan(8192, 65536, 2048, machine="H200")["recompute"].seconds
    # and it is recognised where it is at hand
    play(monkeypatch, "Toymaker Toy 16GB", multi_processor_count=20)
    monkeypatch.setenv("FUSEDLOSS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(rates, "found_machines", {})
    assert devices.device_of("cuda") == toy.on_board(toy.boards[0])
    assert rates.machine_here(torch.device("cuda")) is rates.machine_of("Toy 16GB")


def test_an_accelerator_of_another_backend_is_one_class_too(toy, monkeypatch):
    class Other(toy):
        title, backend, boards = "Other", "xpu", ()

        @classmethod
        def matches(cls, properties): return properties.name == "Other 1"
    there = SimpleNamespace(is_available=lambda: True, current_device=lambda: 0,
                            get_device_properties=lambda index: SimpleNamespace(name="Other 1", multi_processor_count=7))
    monkeypatch.setattr(torch, "get_device_module", lambda backend: there)
    assert devices.device_of("xpu") == devices.GPUS["Other"]._replace(name="Other 1", multiprocessors=7)
    assert devices.device_of("cpu") is devices.CPU


def test_the_class_that_is_defined_last_describes_a_device(toy):
    class Better(toy):
        title, shared_memory = "Better", 2**17
    seen = SimpleNamespace(name="Toymaker Toy 16GB", multi_processor_count=20)
    first, second = [kind for kind in devices.KINDS if kind.matches(seen)][:2]
    assert (first, second) == (Better, toy) and first.described(seen).shared_memory == 2**17


MARGIN = '''
from fusedloss.margins import Margin

class Cubed(Margin):
    "scale · (cos³ θ − margin)."
    def __init__(self, margin, scale): self.margin, self.scale = margin, scale

    def target_score(self, cos, norm=None): return self.scale * (cos**3 - self.margin)
'''


def by_formula(x, w, y, margin, scale):
    "The mean loss of the rows with a label, dx and dw, with all cosines in float64"
    cos = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(w).T
    labelled = y >= 0
    target = torch.nn.functional.one_hot(y.clamp(min=0), len(w)).bool()
    z = scale * torch.where(target, cos**3 - margin, cos)
    loss = torch.nn.functional.cross_entropy(z[labelled], y[labelled])
    return loss, *torch.autograd.grad(loss, [x, w])


def test_a_margin_is_one_class(tmp_path):
    definitions = [node for node in ast.parse(MARGIN).body if not isinstance(node, ast.ImportFrom)]
    assert len(definitions) == 1 and isinstance(definitions[0], ast.ClassDef) and len(MARGIN.strip().splitlines()) < 9
    path = tmp_path / "cubed.py"
    path.write_text(MARGIN, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("cubed", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    margin, made = module.Cubed(0.2, 16.0), torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 6, generator=made, dtype=torch.float64).requires_grad_() for rows in (7, 30))
    y = torch.tensor([3, 29, -1, 0, 3, 17, 8])
    expected = by_formula(x, w, y, 0.2, 16.0)
    loss = fusedloss.margin_cross_entropy(x, w, y, margin=margin, ignore_index=-1, token_tile=3, class_tile=8)
    torch.testing.assert_close((loss, *torch.autograd.grad(loss, [x, w])), expected)
    for head_class in (fusedloss.PartialFC, fusedloss.ShardedPartialFC):
        head = head_class(30, 6, margin=margin, dtype=torch.float64)
        with torch.no_grad():
            head.weight.copy_(w)
        loss = head(x, y)
        torch.testing.assert_close((loss, *torch.autograd.grad(loss, [x, head.weight])), expected)
