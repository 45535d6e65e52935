"""Options of the cross entropies: defaults, what is refused, the signatures that list them; a check that runs once for calls that are alike."""
import inspect
from typing import Unpack

import pytest
import torch
from torch import Tensor

from fusedloss.core.checks import once_for_alike
from fusedloss.core.options import LossArguments, LossOptions, lists_options, loss_options


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


def test_a_check_runs_once_for_calls_that_are_alike():
    runs = []
    check = once_for_alike(lambda *args: runs.append(args))
    for rows in (2, 2, 3):
        check(torch.zeros(rows), dict(size=1))
    check(torch.zeros(2), dict(size=True))  # equal to 1, but no integer
    for _ in range(2):
        check([])  # which has no hash
    assert len(runs) == 5
