"""Every notebook runs from top to bottom in a Jupyter kernel, as a reader runs it."""
import json
import os
import shutil

import pytest
import torch
from grids import few
from project import ROOT, directives, notebooks, output_text
from workbook.pages import gpu_note

pytestmark = pytest.mark.thorough
NAMES = [path.relative_to(ROOT).as_posix() for path in notebooks()]
CHOSEN = ["nbs/house.ipynb"]  # of these, `make test` runs all cells in a kernel


@pytest.fixture
def copy(tmp_path):
    "A copy of what the pages need, for on a GPU they write nbs/results; and the environment of a reader who has set nothing"
    for folder in ("nbs", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "settings.ini", tmp_path)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "IPYTHONDIR": str(tmp_path / "ipython")}
    env.pop("TRITON_INTERPRET", None)
    return tmp_path, env


def shown(cell: dict) -> list[str]:
    "The lines of a cell's outputs, progress bars and empty lines apart: a note below them may be part of the last one"
    texts = [output_text(output) for output in cell["outputs"] if output.get("name") != "stderr"]
    return [line for text in texts for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("notebook", few(NAMES, *CHOSEN))
def test_run_all(notebook, copy):
    nbformat, client = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    folder, env = copy
    path = folder / notebook
    before = json.loads(path.read_text(encoding="utf-8"))
    nb = nbformat.read(path, as_version=4)
    client.NotebookClient(nb, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute(env=env)
    for number, (cell, saved) in enumerate((c, s) for c, s in zip(nb.cells, before["cells"]) if c.cell_type == "code"):
        for output in cell.outputs:
            assert "Warning" not in output_text(output), f"code cell {number} warns: {output_text(output)}"
        if {"cuda", "distributed"} & directives(cell.source) and not torch.cuda.is_available():
            assert shown(cell) == shown(saved) + gpu_note(before, saved).splitlines(), f"code cell {number} does not show what was saved"
