"""Operators: one registration a process, whose functions may be replaced."""
import gc
import importlib
import subprocess
import sys

import pytest
import torch
from helpers import planted
from torch import Tensor
from workbook import ROOT

import fusedloss as fl
from fusedloss import kernels
from fusedloss.core import operators
from fusedloss.core.operators import operator

Z, Y = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(5)


def define(factor: float):
    "The operator `again`, every function of it new"
    @operator("fusedloss_test::again")
    def again(x: Tensor) -> Tensor:
        return x * factor

    again.register_fake(lambda x: x.new_empty(x.shape))
    again.register_autograd(lambda ctx, g: g * factor * 10)
    return again


def test_defining_again_replaces_the_functions_behind_every_handle():
    first, x = define(0.0), torch.ones(3, requires_grad=True)
    call = torch.compile(lambda x: first(x), fullgraph=True, backend="aot_eager")
    for factor in range(1, 51):
        last = define(float(factor))
        gc.collect()
        if factor % 10: continue
        for handle in (first, last, torch.ops.fusedloss_test.again, call):
            y = handle(x)
            assert torch.equal(y, factor * torch.ones(3))
            if handle is not call:  # what a graph of a compiler holds is compiled
                assert torch.autograd.grad(y.sum(), x)[0].tolist() == [factor * 10] * 3
    torch.library.opcheck(first, (torch.randn(4),))


def test_another_schema_leaves_the_first_operator_as_it_is():
    first = define(2.0)
    @operator("fusedloss_test::again")
    def other(x: Tensor, factor: float) -> Tensor: return factor * x
    assert other is not first and other(torch.ones(()), 3.0) == 3 and first(torch.ones(())) == 2
    assert define(4.0) is first and first(torch.ones(())) == 4 and other(torch.ones(()), 3.0) == 3


def test_a_reload_and_a_fresh_import_keep_the_operators():
    "In a process of its own: classes of the library are made anew"
    code = """if True:
        import gc, importlib, sys, torch
        import fusedloss as fl
        from fusedloss import kernels
        from fusedloss.core import operators
        z, y, first = torch.randn(5, 7, requires_grad=True), torch.arange(5), kernels.logits_loss
        call = torch.compile(lambda z: fl.cross_entropy(z, y), fullgraph=True, backend="aot_eager")
        expected = call(z)
        for module in [operators, kernels] * 3: importlib.reload(module); gc.collect()
        assert kernels.logits_loss is first and torch.equal(call(z), expected)
        for name in [n for n in sys.modules if n.startswith("fusedloss")]: del sys.modules[name]
        gc.collect()
        import fusedloss
        assert sys.modules["fusedloss.kernels"].logits_loss is first
        torch._dynamo.reset()
        call(z).backward()
        fusedloss.cross_entropy(z, y).backward()
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_module_under_another_namespace_leaves_the_library_alone(tmp_path):
    changed = planted(kernels, tmp_path, "return losses if reduction", "return losses if reduction")
    assert changed.logits_loss is not kernels.logits_loss
    assert changed.logits_loss._qualname.startswith("variant")
