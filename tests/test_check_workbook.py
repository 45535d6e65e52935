"""The workbook's checker finds each kind of fault, and nothing in a page without one."""
import json

import pytest
from check_workbook import problems
from project import INTERPRETED, PROLOGUE, add_prologue

PATH = "/" + "tmp/x.py"  # in two parts, because this file is checked too


def cell(source: str, *outputs: dict) -> dict:
    return {"cell_type": "code", "metadata": {}, "source": source, "outputs": list(outputs), "execution_count": None}


TITLE = {"cell_type": "markdown", "metadata": {}, "source": "# Title"}
GOOD = [TITLE, cell(PROLOGUE), cell("1 + 1", {"output_type": "stream", "name": "stdout", "text": ["2"]})]


@pytest.fixture
def report(tmp_path):
    "Write a page; the problems found, as one text"
    def write(cells: list[dict]) -> str:
        (tmp_path / "nbs").mkdir(exist_ok=True)
        (tmp_path / "nbs" / "02_tiles.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}}), encoding="utf-8")
        return "\n".join(problems(tmp_path))
    return write


def test_a_good_page_has_no_problem(report):
    assert report(GOOD) == report([TITLE, cell(INTERPRETED)]) == ""


@pytest.mark.parametrize("bad, expected", [
    (cell("x = = 1"), "does not parse as Python"),
    (cell("1/0", {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}), "a saved error"),
    (cell("x", {"output_type": "stream", "name": "stdout", "text": [f"at {PATH}"]}), f"output names a machine's path {PATH}"),
], ids=["syntax", "error", "path"])
def test_a_fault_is_named(report, bad, expected):
    assert report([*GOOD, bad]) == f"nbs/02_tiles.ipynb: cell 3: {expected}"


def test_a_page_begins_with_the_prologue(report, tmp_path):
    assert "first code cell is not the prologue" in report([TITLE, GOOD[2]])
    path = tmp_path / "nbs" / "02_tiles.ipynb"
    assert add_prologue(path) and not add_prologue(path)
    assert list(problems(tmp_path)) == []


@pytest.mark.parametrize("text", [f"see {PATH}", "Looking in " + "indexes: x", "https://example.org" + "/simple/torch"])
def test_text_names_no_machine_and_no_index(report, tmp_path, text):
    (tmp_path / "notes.md").write_text(f"fine\n{text}\n")
    assert "notes.md: line 2: names" in report(GOOD)
