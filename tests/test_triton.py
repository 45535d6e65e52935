"Launches that remember the compiled kernel: what they remember it by must tell apart all that Triton does."
from types import SimpleNamespace

import pytest
import torch

from fusedloss.core import triton as core
from fusedloss.core.options import LossOptions
from fusedloss.core.triton import jit, launch_kernel, tl, triton
from helpers import INTERPRETED, need_kernels

pytestmark = pytest.mark.skipif(triton is None, reason="needs Triton")


@jit
def probe_kernel(x_ptr, more_ptr, out_ptr, n, stride, factor, o, SIGN: tl.constexpr, B: tl.constexpr):
    at = tl.arange(0, B)
    value = tl.load(x_ptr + at * stride).to(tl.float64) * factor + n + o.z_loss + o.ignore_index
    if more_ptr is not None:
        value += tl.load(more_ptr + at)
    tl.store(out_ptr + at, SIGN * value)


def probed(x, more, n, stride, factor, o, sign):
    "What the kernel writes"
    out = torch.zeros(16, dtype=torch.float64, device=x.device)
    launch_kernel(probe_kernel, (1,), x, more, out, n, stride, factor, o, SIGN=sign, B=16)
    return out


def expected(x, more, n, stride, factor, o, sign):
    "The same by PyTorch"
    value = x[:16 * stride:stride].double() * torch.tensor(factor).double().to(x.device) + n + torch.tensor(o.z_loss).double().to(x.device) + o.ignore_index
    return sign * (value if more is None else value + more[:16])


X = torch.arange(64.0)
CALLS = {"plain": {}, "unaligned": {}, "half": dict(x=X.half()), "a pointer more": dict(more=X.double()), "one": dict(n=1), "a multiple": dict(n=48),
         "negative": dict(n=-16), "large": dict(n=2**31), "larger": dict(n=2**40 + 1), "of stride 2": dict(stride=2), "of stride 4": dict(stride=4),
         "another factor": dict(factor=-2.5), "an integer factor": dict(factor=3), "other options": dict(o=LossOptions(ignore_index=1, z_loss=0.5)), "negated": dict(sign=-1)}


def test_each_launch_gets_its_own_kernel(device):
    need_kernels(device)
    plain = dict(x=X, more=None, n=5, stride=1, factor=1.5, o=LossOptions(), sign=1)
    for _ in range(2):  # compiled, then remembered
        for name, changes in CALLS.items():
            call = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in {**plain, **changes}.items()}
            call["x"] = call["x"][name == "unaligned":]
            torch.testing.assert_close(probed(**call), expected(**call), msg=lambda text, name=name: f"{name}: {text}")


class Recorded(triton.JITFunction if triton else object):
    "A kernel that writes its launches down"
    def __init__(self, constants):
        self.params = [SimpleNamespace(is_constexpr=c) for c in constants]
        self.pre_run_hooks, self.launches = [], []

    def __getitem__(self, grid): return lambda *args, **constants: self.compiled("anew", grid, args)

    def compiled(self, how, grid, args):
        self.launches.append((how, grid, args))
        return Compiled(self)


class Compiled:
    def __init__(self, kernel): self.kernel = kernel

    def __getitem__(self, grid): return lambda *args: self.kernel.launches.append(("remembered", grid, args))


@pytest.fixture
def remembered(monkeypatch):
    monkeypatch.setattr(core, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_the_second_launch_is_remembered(remembered):
    kernel, x = Recorded([False, False, True]), torch.zeros(4)
    for n in (5, 7, 16):
        launch_kernel(kernel, (3,), x, n, B=8)
    assert kernel.launches == [("anew", (3,), (x, 5)), ("remembered", (3, 1, 1), (x, 7, None)), ("anew", (3,), (x, 16))]
    launch_kernel(kernel, (3, 2), x, 5, B=16)
    kernel.pre_run_hooks.append(print)
    launch_kernel(kernel, (3, 2), x, 5, B=8)
    assert [how for how, *_ in kernel.launches[3:]] == ["anew", "anew"]


def test_a_device_has_its_own_kernels(remembered, monkeypatch):
    kernel = Recorded([False, True])
    for index in (0, 1, 0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        launch_kernel(kernel, (1,), 5, B=8)
    assert [how for how, *_ in kernel.launches] == ["anew", "anew", "remembered", "remembered"]


def test_constants_by_position_are_not_remembered(remembered):
    kernel = Recorded([False, True])
    for b in (8, 16, 8):
        launch_kernel(kernel, (1,), 5, b)
    assert [how for how, *_ in kernel.launches] == ["anew"] * 3


def test_arguments_of_which_a_kernel_is_made_are_told_apart():
    kind = lambda value: core.kinds_of((value,))
    assert kind(torch.ones(4)) == kind(torch.zeros(9)) and kind(48) == kind(-2**31) and kind((7, 0.5)) == kind((9, -1.0))
    differ = [torch.ones(4), torch.ones(4)[1:], torch.ones(4).half(), 0.5, 1, 2, 16, 2**31 + 1, 2**40, 2**63, None, True, False, (1, 0.5), (2, 0.5)]
    assert len(set(map(kind, differ))) == len(differ)


def test_powers_of_two():
    assert [core.next_power_of_2(n) for n in (1, 2, 3, 4, 5, 1024, 1025, 2**40 + 1)] == [1, 2, 4, 4, 8, 1024, 2048, 2**41]


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has the instruction")
def test_the_interpreter_has_no_instruction_of_a_gpu():
    assert core.own_log2() is core.exact_log2
