"""The page that trains a policy on sums: its checks notice faults of its data, rewards and groups, and it runs without transformers."""
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from project import read_notebook, ROOT

PAGE = ROOT / "nbs" / "tutorials" / "2_policy.ipynb"
QUICK = ("po-imports", "po-sizes", "po-pupil", "po-reward", "po-check-data", "po-split", "po-check-split", "po-floor", "po-floor-value", "po-encode", "po-check-encode",
         "po-write", "po-advantages", "po-check-advantages")
BUGS = {
    "digits in the order of reading": ("int(answer[-2::-1])", "int(answer[:-1])"),
    "an answer without an end": ('re.fullmatch("[0-9]+[.]", answer)', 're.match("[0-9]+", answer)'),
    "a carry too few": ("int(total > 9", "int(total > 12"),
    "a pupil who never forgets": ("chance.random() >= forgets", "True"),
    "carries of other digits": ("- digits(a + b)) // 9", "- digits(a)) // 9"),
    "what is held out is trained on": ("both_orders(pairs[sizes.held // 2:])", "both_orders(pairs)"),
    "the other order of what is held out is trained on": ("for b in numbers if a <= b]", "for b in numbers]"),
    "one order of each pair": ("sorted({pair, pair[::-1]})", "[pair]"),
    "rewards as they are": ("return (rewards - mean) / (std + 1e-4)", "return rewards"),
    "padding that is a class": ("[IGNORED] * (longest", "[0] * (longest"),
}


@pytest.fixture
def cells():
    "Sources of the page's code, by cell"
    pytest.importorskip("fastcore", reason="fastcore is not installed")
    return {cell["id"]: cell["source"] for cell in read_notebook(PAGE)["cells"] if cell["cell_type"] == "code"}


def run(cells, names, change=lambda source: source):
    "What the cells define, one after the other"
    scope = {"torch": torch}
    for name in names:
        exec(change(cells[name]), scope)
    return scope


def test_the_checks_hold(cells):
    run(cells, QUICK)


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS)
def test_a_fault_is_noticed(cells, bug):
    old, new = BUGS[bug]
    assert sum(cells[name].count(old) for name in QUICK) == 1
    with pytest.raises((AssertionError, ValueError)):
        run(cells, QUICK, lambda source: source.replace(old, new))


class Writer:
    "A model that writes given tokens, one a call"
    def __init__(self, rows):
        self.columns = iter(torch.tensor(rows).T)

    def model(self, ids, past_key_values, use_cache):
        return SimpleNamespace(last_hidden_state=next(self.columns)[:, None], past_key_values=None)

    def lm_head(self, tokens):
        return torch.nn.functional.one_hot(tokens, 13).float()


def test_nothing_counts_after_the_end(cells):
    scope = run(cells, ["po-imports", "po-sizes", "po-encode", "po-write"])
    scope["DEVICE"] = "cpu"
    end, none = scope["END"], scope["IGNORED"]
    rows = [[2, 2, 1, end], [6, end, 5, end], [1, 2, 3, 4], [end, end, end, end]]
    wanted = [[2, 2, 1, end], [6, end, none, none], [1, 2, 3, 4], [end, none, none, none]]
    scope["sizes"].digits = 2
    assert scope["write"](Writer(rows), torch.zeros(4, 6).long(), scope["best"]).tolist() == wanted


def test_without_transformers(cells, monkeypatch, capsys):
    "Every cell runs, those that train too, and one sentence says what is missing"
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name))
    run(cells, [name for name in cells if name != "prologue"])
    assert "transformers is not installed here" in capsys.readouterr().out
