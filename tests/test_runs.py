"""A run that is broken off goes on as if it had not been; what does not fit is refused and changes nothing."""
import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from workbook.runs import Run, load_all, random_state, set_random_state


def train(run: Run, until: int, steps: int = 6) -> None:
    "Steps up to `until` of a model that learns to say zero"
    model, optimizer = run.parts["model"], run.parts["optimizer"]
    for step in run.steps(steps):
        if step == until:
            return
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)


def test_the_random_state_is_set_back():
    state, drawn = random_state(), torch.rand(3)
    set_random_state(state)
    assert torch.equal(torch.rand(3), drawn)


def test_a_resumed_run_is_the_whole_one(tmp_path):
    def fresh(name: str) -> Run:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        return Run(name, tmp_path, every=2, model=model, optimizer=torch.optim.AdamW(model.parameters(), 0.1))
    train(whole := fresh("whole"), 6)
    train(fresh("broken"), 4)
    again = fresh("broken")
    assert again.resume() == 4
    train(again, 6)
    assert again.curve == whole.curve and [step for step, _ in again.curve["loss"]] == list(range(6))
    assert_close(again.parts["model"].state_dict(), whole.parts["model"].state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"expected \['model'\], got \['model', 'optimizer'\]"):
        Run("whole", tmp_path, model=nn.Linear(4, 2)).resume()


def test_parts_of_which_one_does_not_fit_stay_as_they_were():
    small, large = nn.Linear(2, 3), nn.Linear(4, 3)
    was = copy.deepcopy(small.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_all({"small": small, "large": large}, {"small": nn.Linear(2, 3).state_dict(), "large": nn.Linear(5, 3).state_dict()})
    assert_close(small.state_dict(), was, rtol=0, atol=0)
