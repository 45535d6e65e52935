"""Running notebooks in place: outputs and hash are saved together, or nothing is."""
import json

import pytest
from workbook import METADATA_KEY, code_hash, read_notebook

pytest.importorskip("execnb")
from run_notebooks import lean, run_here  # noqa: E402

PATH = "/" + "tmp/x.py"


@pytest.fixture
def run(tmp_path):
    "Run a notebook of these cells in place; read it again"
    def write_and_run(*sources: str) -> dict:
        path = tmp_path / "00_try.ipynb"
        empty = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
        cells = [{**empty, "id": f"c{number}", "source": source} for number, source in enumerate(sources)]
        path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
        before = path.read_bytes()
        try:
            run_here(path, {"cuda"})
        except RuntimeError:
            assert path.read_bytes() == before, "a failed run changed the notebook"
            raise
        return read_notebook(path)
    return write_and_run


def test_outputs_and_hash_are_saved(run):
    loud = "#| cuda\nprint('out')\nimport sys; print('progress', file=sys.stderr)"
    nb = run(loud, "#| eval: false\n1/0", "#| distributed\n1/0", "2 + 2")
    outputs = [cell["outputs"] for cell in nb["cells"]]
    assert [o["text"] for o in outputs[0]] == [["out\n"]]
    assert outputs[1] == outputs[2] == []
    assert outputs[3][0]["data"]["text/plain"] == ["4"]
    assert nb["metadata"][METADATA_KEY]["code"] == code_hash(nb) and "torch" in nb["metadata"][METADATA_KEY]["machine"]
    assert "#| cuda" in nb["cells"][0]["source"]


def test_error_names_the_cell(run):
    with pytest.raises(RuntimeError, match="cell 1 failed"):
        run("1", "1/0")


def test_machine_path_is_refused(run):
    with pytest.raises(RuntimeError, match="cell 0 shows the machine's path"):
        run(f"print({PATH!r})")


RECORD = "from pathlib import Path; Path('results').mkdir(exist_ok=True); Path('results/00_try.json').write_text('{}')"


def test_records_are_made_anew(run, tmp_path):
    (tmp_path / "results").mkdir()
    stale = tmp_path / "results" / "00_try.json"
    stale.write_text("stale")
    run("assert not __import__('pathlib').Path('results/00_try.json').exists()", RECORD.format("new"))
    assert stale.read_text() == "new"


def test_failed_run_keeps_the_old_records(run, tmp_path):
    (tmp_path / "results").mkdir()
    old = tmp_path / "results" / "00_try.json"
    old.write_text("old")
    with pytest.raises(RuntimeError, match="cell 1 failed"):
        run(RECORD.format("new"), "1/0")
    assert old.read_text() == "old"


def test_drawings_lose_bytes_and_nothing_else():
    drawing = '<svg>\n <g>\n  <path d="M 1.23456 -2.5 \nL 3.00001 4 \n" style="fill: none; stroke-dashoffset: 0; stroke: #8c8c8c"/>\n </g>\n</svg>'
    assert lean(drawing) == '<svg><g><path d="M 1.23 -2.5 L 3 4 " style="fill:none;stroke:#8c8c8c"/></g></svg>'
    prose = '<p>\n <a d="1.23456">x</a></p>'
    assert lean(prose + drawing) == prose + lean(drawing) and lean(lean(drawing)) == lean(drawing)


def test_drawings_are_saved_lean(run):
    html = "'<svg> <path d=\"M 0.12345 1\"/></svg>'"
    nb = run(f"class D:\n    def _repr_html_(self): return {html}\nD()")
    assert "".join(nb["cells"][0]["outputs"][0]["data"]["text/html"]) == '<svg><path d="M 0.12 1"/></svg>'
