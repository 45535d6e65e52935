"""The compiler's eye on interpreted launches: what it must refuse it does, and it looks at every launch."""
import os

import pytest
import torch
import typed_launches
from typed_launches import can_look, launch_types, lowerer

triton = pytest.importorskip("triton")
tl = triton.language
pytestmark = [pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a CPU Triton wants TRITON_INTERPRET=1"),
              pytest.mark.skipif(not can_look(), reason="in this Triton launches are not to be seen")]


@triton.jit
def widen_kernel(out_ptr, n):
    "An integer that is 1 is no tensor"
    tl.store(out_ptr, n.to(tl.int64))


@triton.jit
def mixed_kernel(out_ptr, x_ptr, WIDE: tl.constexpr):
    "A variable has one type"
    total = tl.load(x_ptr)
    for _ in range(2):
        if WIDE:
            total = total.to(tl.float64)
    tl.store(out_ptr, total)


def complaint(kernel, *args, **options):
    return lowerer().complaint(launch_types(kernel, args, options))


def test_an_integer_that_is_one_is_a_constant():
    out = torch.zeros(1, dtype=torch.int64)
    assert complaint(widen_kernel, out, 2) == ""
    assert "'int' object has no attribute 'to'" in complaint(widen_kernel, out, 1)


def test_a_loop_keeps_the_types_of_its_variables():
    out = torch.zeros(1)
    assert complaint(mixed_kernel, out, out, WIDE=False) == complaint(mixed_kernel, out, out.double(), WIDE=True) == ""
    assert "total" in complaint(mixed_kernel, out, out, WIDE=True)


def test_a_launch_of_the_library_is_looked_at(monkeypatch):
    from fusedloss.kernels import launch_scan
    from fusedloss.core.options import LossOptions
    monkeypatch.setattr(typed_launches, "LOWERED", set())
    monkeypatch.setattr(type(lowerer()), "complaint", lambda self, line: "no")
    z, y = torch.randn(3, 1, 7), torch.tensor([0, 3, -100])
    for _ in range(2):  # what was refused is refused again
        with pytest.raises(AssertionError, match="the compiler refuses"):
            launch_scan(z, y, None, None, LossOptions())


@pytest.mark.parametrize("each", [False, True])
def test_launches_of_a_kind_are_looked_at_once_or_each(each, monkeypatch):
    "Numbers make no kind of their own; dtypes and what is None do"
    from fusedloss.kernels import launch_scan
    from fusedloss.core.options import LossOptions
    seen = []
    monkeypatch.setattr(typed_launches, "LOWERED", set())
    monkeypatch.setattr(type(lowerer()), "complaint", lambda self, line: seen.append(line) or "")
    with monkeypatch.context() as patch:
        typed_launches.check_launches(patch, each)
        z, y, w = torch.randn(3, 1, 7), torch.tensor([0, 3, -100]), torch.ones(7)
        for logits, weight, kinds in ((z, None, 1), (z[:, :, :1], None, 1), (z.double(), None, 2), (z, w, 3)):
            launch_scan(logits, y.clamp(max=logits.shape[2] - 1), weight, None, LossOptions())
            assert len({*map(typed_launches.kind_of, seen)}) == kinds
    assert (len(seen) == 3) != each
