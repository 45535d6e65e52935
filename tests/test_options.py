"""Options of the cross entropies: defaults, what is refused, the signatures that list them; a check that runs once for calls that are alike."""
import inspect
import weakref
from functools import partial
from typing import Unpack

import pytest
import torch
from torch import Tensor

import fusedloss as fl
from fusedloss.core.checks import once_for_alike
from fusedloss.core.options import LossArguments, LossOptions, Operands, lists_options, loss_options


def test_options_have_defaults_and_say_what_was_changed():
    assert loss_options(dict(logit_scale=2, softcap=None)) == LossOptions(logit_scale=2.0)
    assert LossOptions(-1, z_loss=0.1).changed() == ("z_loss",)
    with pytest.raises(ValueError, match=r"^z_loss: expected a number not below 0, got -1.0$"):
        loss_options(dict(z_loss=-1.0))


def test_a_signature_lists_the_options():
    @lists_options
    def scaled(x: float, *, twice: bool = False, **options: Unpack[LossArguments]) -> float:
        return x * loss_options(options).logit_scale * (1 + twice)

    assert scaled(3.0, logit_scale=2.0, twice=True) == 12
    assert "softcap: Optional[float] = None" in str(inspect.signature(scaled))
    assert inspect.signature(scaled).parameters["logit_scale"].annotation == float | Tensor


CHANGED = dict(ignore_index=5, label_smoothing=0.3, logit_scale=0.5, softcap=2.0, z_loss=0.1)
TAKE_OPTIONS = {
    **{method: partial(fl.linear_cross_entropy, method=method) for method in ("eager", "tiles", "chunks", "recompute", "product")},
    "alone, chunks": fl.chunked_linear_cross_entropy, "alone, recompute": fl.recompute_linear_cross_entropy,
    "of logits": lambda x, w, y, **options: fl.cross_entropy(x @ w.T, y, **options),
    **{f"over ranks, {method}": partial(fl.sharded_linear_cross_entropy, method=method) for method in ("recompute", "product")},
}


@pytest.mark.parametrize("name", LossOptions._fields)
@pytest.mark.parametrize("function", TAKE_OPTIONS)
def test_no_option_is_ignored(function, name):
    "Whatever takes the options heeds each in the loss and in its gradients, or refuses it"
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 4, generator=g, dtype=torch.float64).requires_grad_() for n in (6, 9))
    y = torch.tensor([5, 1, 8, 5, 0, 3])
    found = []
    for options in ({}, {name: CHANGED[name]}):
        try:
            loss = TAKE_OPTIONS[function](x, w, y, **options)
        except ValueError as refusal:
            assert options and name in str(refusal) and function != "eager"
            return
        found.append([loss, *torch.autograd.grad(loss, [x, w])])
    assert not any(torch.allclose(a, b) for a, b in zip(*found))


def test_a_check_runs_once_for_calls_that_are_alike():
    runs = []
    check = once_for_alike(lambda *args: runs.append(args))
    for rows in (2, 2, 3):
        check(torch.zeros(rows), dict(size=1))
    check(torch.zeros(2), dict(size=True))  # equal to 1, but no integer
    for _ in range(2):
        check([])  # which has no hash
    assert len(runs) == 5


def test_what_passed_a_check_is_not_kept():
    "Tensors stand in tuples and dicts, too; what may hold any is checked each time"
    runs = []
    check = once_for_alike(lambda *args: runs.append(len(args)))
    for rows in (2, 2, 3):
        given = torch.zeros(rows), Operands(*(torch.zeros(rows) for _ in range(3))), dict(numbers=(torch.zeros(rows),))
        left = [weakref.ref(t) for t in (given[0], *given[1][:3], given[2]["numbers"][0])]
        check(*given)
        del given
        assert not any(ref() is not None for ref in left)
    assert len(runs) == 2
    for _ in range(2):
        check(torch.nn.Linear(2, 2))
    assert len(runs) == 4
