"""The answers of the solutions pass the checks of the pages, so that a reader's right answer is not told to be wrong."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exercises import calls, checks_of
from grids import thorough_but
from project import notebooks, read_notebook, ROOT

pytest.importorskip("execnb")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs the pages, and `make test` without a GPU has done so")

CODE = {path.stem: [c["source"] for c in read_notebook(path)["cells"] if c["cell_type"] == "code"] for path in notebooks() if path.parent.name == "nbs"}
CHECKS = {page: names for page, cells in CODE.items() if (names := set().union(*map(checks_of, cells)))}  # of exercises, by page
SOLUTIONS = ROOT / "nbs" / "solutions"


def told(page: str, solutions: Path) -> list[str]:
    "What each check of a page says of the answers"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tools", ROOT / "tests")))
    command = [sys.executable, str(ROOT / "tests" / "exercises.py"), str(ROOT / "nbs" / f"{page}.ipynb"), str(solutions)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith("check_")]


@pytest.mark.parametrize("page", thorough_but(CHECKS, "02_tiles"))
def test_answers_pass(page):
    found = told(page, SOLUTIONS / f"{page}.ipynb")
    assert {line.partition("(")[0] for line in found} == CHECKS[page] and [line for line in found if not line.endswith("\tpasses")] == []


def test_every_stub_has_a_check():
    "A stub is a function whose lines say where an answer goes; a page without solutions shows its answers itself"
    stubs = lambda cells: [s for text in cells for s in re.findall(r"^def (\w+)\((?:(?!^\S).)*?# your", text, re.MULTILINE | re.DOTALL)]
    taken = lambda page: {name for text in CODE[page] for _, names in calls(text, CHECKS.get(page, set())) for name in names}
    pages = {page: cells for page, cells in CODE.items() if (SOLUTIONS / f"{page}.ipynb").exists()}
    assert {page: left for page, cells in pages.items() if (left := {*stubs(cells)} - taken(page))} == {}


@pytest.mark.thorough
def test_a_wrong_answer_is_noticed_and_so_is_a_missing_one(tmp_path):
    text, path = (SOLUTIONS / "02_tiles.ipynb").read_text(encoding="utf-8"), tmp_path / "02_tiles.ipynb"
    for old, new in (("112 * 2**20", "113 * 2**20"), ("def online(", "def offline(")):
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    assert [line.split("\t")[0] for line in told("02_tiles", path) if not line.endswith("\tpasses")] == ["check_needs_less(needs_less)", "check_online(online)"]
