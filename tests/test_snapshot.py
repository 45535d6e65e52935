"""A snapshot reports what has changed, and nothing else; its calls reach everything that is public."""
import inspect
from functools import partial

import pytest
import snapshot
import torch

import fusedloss as fl

pytestmark = pytest.mark.thorough
REFUSED = "sample softcap"


def squares(of: float = 1.0):
    "A result and its gradient"
    x = torch.full((3,), of, requires_grad=True)
    return x * x, [x]


CALLS = [("square", squares), (REFUSED, lambda: fl.cross_entropy(torch.ones(2, 3), torch.ones(2).long(), softcap=-1.0))]


@pytest.fixture
def compared(tmp_path, capsys):
    "The exit status and the lines of a comparison with `CALLS` as they are"
    path = tmp_path / "snapshot.json"
    assert snapshot.main(["take", str(path)], CALLS) == 0

    def compare(calls=CALLS):
        capsys.readouterr()
        status = snapshot.main(["compare", str(path)], calls)
        return status, capsys.readouterr().out.splitlines()
    return compare


def test_the_same_code_has_no_difference(compared):
    status, lines = compared()
    assert status == 0 and lines[0].endswith("lines, all the same")


def test_a_changed_bit_is_reported(compared):
    status, lines = compared([("square", partial(squares, 1.0 + 2**-23)), *CALLS[1:]])
    assert status == 1 and [line.partition(" · ")[0] for line in lines] == ["square: Tensor 0", "square: gradient 0"]


def test_a_missing_call_and_a_new_one_are_reported(compared):
    status, lines = compared([("new", squares), *CALLS[1:]])
    assert status == 1 and len(lines) == 4
    assert all("expected nothing" in line for line in lines[:2]) and all("got nothing" in line for line in lines[2:])


def test_other_words_of_an_error_are_reported(compared):
    status, lines = compared([CALLS[0], (REFUSED, lambda: fl.cross_entropy(torch.ones(2, 3), torch.ones(2).long(), softcap=-2.0))])
    assert status == 1 and len(lines) == 1 and lines[0].startswith(f"{REFUSED}: raises · expected ValueError: ")


def test_a_call_that_fails_is_printed_when_a_snapshot_is_taken(tmp_path, capsys):
    assert snapshot.main(["take", str(tmp_path / "snapshot.json")], [*CALLS, ("broken", lambda: torch.ones(2) @ torch.ones(3))]) == 1
    line, = capsys.readouterr().out.splitlines()
    assert line.startswith("broken: raises · RuntimeError: ")


def test_a_changed_schema_is_reported(tmp_path, capsys):
    path = str(tmp_path / "snapshot.json")
    for command, schema in (("take", "planted(Tensor x, int n) -> Tensor"), ("compare", "planted(Tensor x, float n) -> Tensor")):
        with torch.library._scoped_library("fusedloss", "FRAGMENT") as library:
            library.define(schema)
            status = snapshot.main([command, path], [])
    _, line = capsys.readouterr().out.splitlines()
    assert status == 1 and line.startswith("schema fusedloss::planted · expected") and line.endswith("float n) -> Tensor")


def test_a_changed_signature_or_docstring_is_reported(compared, monkeypatch):
    def logz(Ms, *, lengths=None):
        "Another."
    monkeypatch.setattr(fl, "logz", logz)
    monkeypatch.setattr(fl.RowSparse.update, "__doc__", "A step.")
    status, lines = compared()
    assert status == 1 and [line.partition(" · ")[0] for line in lines] == ["public RowSparse.update", "public logz"]


def test_another_machine_is_refused(compared, monkeypatch):
    monkeypatch.setattr(snapshot, "machine", lambda: "another one")
    status, lines = compared()
    assert "expected one like that of" in status and status.endswith("got another one") and not lines


def test_a_definition_may_move():
    assert snapshot.of_package("(x: fusedloss.core.options.Plan) -> tuple[fusedloss.Plan]") == "(x: Plan) -> tuple[Plan]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shapes for a GPU compile for minutes")
def test_the_calls_reach_all_that_is_public():
    calls = snapshot.all_calls()
    assert len(dict(calls)) == len(calls)
    few = [(name, call) for name, call in calls if "float64" not in name and "bfloat16" not in name]
    measured = {line.split()[0].rstrip(":") for line in snapshot.outcomes(few) if ": raises" not in line}
    public = {name for name in fl.__all__ if not inspect.ismodule(getattr(fl, name))}
    assert public - measured == {"CrossEntropyStats", "LogProbs"}  # which losses return
