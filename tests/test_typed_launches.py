"""The compiler's eye on interpreted launches: what it must refuse it does, and it looks at every launch."""
import pytest
import torch
import typed_launches
from helpers import interpreted
from typed_launches import can_look, kind_of, launch_types, lowerer

triton = pytest.importorskip("triton")
tl = triton.language
pytestmark = [interpreted, pytest.mark.skipif(not can_look(), reason="in this Triton launches are not to be seen")]


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


def test_numbers_make_no_kind_of_launch_and_dtypes_and_what_is_none_do():
    kind = lambda *args, **options: kind_of(launch_types(mixed_kernel, args, options))
    x = torch.zeros(1)
    assert kind(x, x, WIDE=False) == kind(torch.zeros(5), x, WIDE=True)
    assert len({kind(x, x, WIDE=False), kind(x, x.double(), WIDE=False), kind(x, None, WIDE=False)}) == 3
