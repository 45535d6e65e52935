"""What examples/many_gpus.py draws, computes and says, without ranks; tests/sharded_cases.py runs it on several processes."""
import statistics
from types import SimpleNamespace

import pytest
import torch

from helpers import example_module, planted, unchanged

pytestmark = pytest.mark.thorough
MESH = SimpleNamespace(size=lambda: 2, device_type="cpu", get_group=lambda: None)
BUGS = {  # what is wrong: (text of the source, what stands in its place)
    "one order for all rounds": ("return [order.sample(names, len(names)) for _ in range(rounds)]", "return [order.sample(names, len(names))] * rounds"),
    "every rank draws its own order": ("order = random.Random(seed)", "order = random.Random()"),
    "a ratio of medians": ("statistics.median(a / (ranks * b) for a, b in zip(one, many, strict=True))", "statistics.median(one) / (ranks * statistics.median(many))"),
    "more GPUs are for free": ("a / (ranks * b)", "a / b"),
    "a wrong loss is timed": ("if not why and not math.isclose", "if why and not math.isclose"),
    "a method is compared with what was left out": ("if method.one in left else None", "if method.one else None"),
    "a method on one GPU is compared": ("if method.one in left else None", "if left else None"),
    "one by one is in a row": ('dict(zip(("in a row", "one by one")', 'dict(zip(("one by one", "in a row")'),
}


in_turn = example_module("in_turn")


def faults(program, monkeypatch):
    "What is wrong with how methods are timed in turn: ranks are played, and a clock gives seconds by the loss"
    first, again, other = (program.draws([*"abcdef"], 4, seed) for seed in (0, 0, 1))
    wrong = [] if first == again != other else ["the order depends on who draws it"]
    wrong += [] if all(sorted(names) == [*"abcdef"] for names in first) and len(set(map(tuple, first))) > 1 else ["the order is not drawn anew"]
    one, many = [1.0, 4.0, 2.0], [1.0, 1.0, 1.5]
    wrong += [] if program.linear(one, many, 2) == statistics.median([0.5, 2.0, 2 / 3]) else ["the ratio is not of rounds"]
    monkeypatch.setattr(program, "of_all", lambda value, mesh: [value] * 2)
    monkeypatch.setattr(program, "largest", lambda values, mesh: values)
    monkeypatch.setattr(program, "peak_memory", lambda step, device: step() and 5)
    monkeypatch.setattr(program, "seconds_of", lambda step, calls, mesh: float(step()[1]) / calls)
    step = lambda loss, seconds: program.Method(lambda: (torch.tensor(loss), seconds))
    compared = lambda *of, one="one": step(*of)._replace(one=one)
    methods = {"one": step(2.0, 8.0), "two": compared(2.0001, 5.0), "wrong": compared(2.1, 5.0), "broken": step(None, 1.0), "beside it": compared(2.0, 1.0, one="broken")}
    found = program.measured(methods, MESH, rounds=3, calls=10)
    wrong += [] if found["two"] == dict(seconds=0.5, peak=5, linear=0.8) else [f"two is {found['two']}"]
    wrong += [] if found["two, one by one"]["seconds"] == 5.0 and found["one"] == dict(seconds=0.8, peak=5) else ["steps one by one are others"]
    wrong += [] if found.get("wrong") == dict(reason="its loss is 2.1, not 2") else ["a wrong loss has figures"]
    return wrong + ([] if "reason" in found["broken"] and found["beside it"] == dict(seconds=0.1, peak=5) else ["a step beside a missing one is not timed"])


def test_methods_are_timed_in_turn(monkeypatch):
    assert faults(in_turn, monkeypatch) == []


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_noticed(bug, tmp_path, monkeypatch):
    try:
        assert faults(planted(in_turn, tmp_path, *BUGS[bug]), monkeypatch)
    except (KeyError, TypeError):  # it fails, and that is noticed too
        pass


def test_without_a_bug_nothing_is_noticed(tmp_path, monkeypatch):
    assert faults(planted(in_turn, tmp_path, *unchanged(BUGS.values())), monkeypatch) == []


def test_a_line_says_what_was_found():
    assert in_turn.line("two", dict(seconds=0.5, peak=2**20, linear=0.8), 2) == "two, 2 ranks: 500 ms, 0.800 of linear, 1 MiB at the peak"
    assert in_turn.line("no", dict(reason="ImportError: x"), 2) == "no, 2 ranks: left out, ImportError: x"
