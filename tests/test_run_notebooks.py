"""Running notebooks in place: outputs and where they were made are saved together, or nothing is."""
import json
import os
import re
import sys

import pytest
from project import METADATA_KEY, read_notebook

pytest.importorskip("execnb")
from run_notebooks import environment, lean, made_now, run_all, run_here, waits_for  # noqa: E402

PATH = "/" + "tmp/x.py"


@pytest.fixture
def run(tmp_path):
    "Run a notebook of these cells in place; read it again"
    def write_and_run(*sources: str, flags: str = "cuda") -> dict:
        path = tmp_path / "00_try.ipynb"
        empty = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
        cells = [{**empty, "id": f"c{number}", "source": source} for number, source in enumerate(sources)]
        path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
        before = path.read_bytes()
        try:
            run_here(path, set(flags.split()))
        except RuntimeError:
            assert path.read_bytes() == before, "a failed run changed the notebook"
            raise
        return read_notebook(path)
    return write_and_run


def test_outputs_are_saved_with_where_they_were_made(run):
    loud = "#| cuda\nprint('out')\nimport sys; print('progress', file=sys.stderr)"
    nb = run(loud, "#| eval: false\n1/0", "#| distributed\n1/0", "2 + 2")
    outputs = [cell["outputs"] for cell in nb["cells"]]
    assert [o["text"] for o in outputs[0]] == [["out\n"]]
    assert outputs[1] == outputs[2] == []
    assert outputs[3][0]["data"]["text/plain"] == ["4"]
    made = nb["metadata"][METADATA_KEY]["page"]
    assert "torch" in made["machine"] and made["commit"] and re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"])
    assert nb["metadata"][METADATA_KEY]["gpu"] == made | {"cells": ["c0"]}
    assert "#| cuda" in nb["cells"][0]["source"]


def test_a_run_without_the_cells_for_a_gpu_leaves_their_outputs_and_where_they_were_made(run):
    nb = run("#| cuda\n1/0", "2 + 2", flags="")
    assert nb["metadata"][METADATA_KEY].keys() == {"page"}
    earlier = {"gpu": {"machine": "NVIDIA H200", "commit": "0123abc", "cells": ["c0"]}}
    assert made_now(None, set(), earlier, "4567def")["gpu"] == earlier["gpu"]


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


def test_a_run_without_the_cells_for_a_gpu_keeps_its_records(run, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "00_try.json").write_text("measured")
    assert run("from pathlib import Path; Path('results/00_try.json').read_text()", flags="")["cells"][0]["outputs"][0]["data"]["text/plain"] == ["'measured'"]


def test_failed_run_keeps_the_old_records(run, tmp_path):
    (tmp_path / "results").mkdir()
    old = tmp_path / "results" / "00_try.json"
    old.write_text("old")
    with pytest.raises(RuntimeError, match="cell 1 failed"):
        run(RECORD.format("new"), "1/0")
    assert old.read_text() == "old"


@pytest.fixture
def pages(tmp_path):
    "Write notebooks of one cell each, by name; their paths"
    def write(**sources: str) -> list:
        (tmp_path / "nbs").mkdir()
        for name, source in sources.items():
            empty = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
            (tmp_path / "nbs" / f"{name[1:]}.ipynb").write_text(json.dumps({"cells": [{**empty, "source": source}], "metadata": {}}))
        return [tmp_path / "nbs" / f"{name[1:]}.ipynb" for name in sources]
    return write


ALL = 'load_results("results")'
NEEDS = {"_index": ALL, "_tour": "1", "_05_e": ALL, "_10_s": "#| distributed\n1", "_06_a": 'load_results("results/05_e.json")', "_07_b": "1"}


def test_a_page_waits_for_the_records_it_reads(pages):
    paths = pages(**NEEDS)
    named = lambda found: {path.stem for path in found}
    needs = {path.stem: named(n) for path, n in waits_for(paths, {path for path in paths if path.stem == "10_s"}).items()}
    stages = {"05_e", "06_a", "07_b", "10_s"}
    assert needs == {"05_e": set(), "06_a": {"05_e"}, "07_b": set(), "10_s": {"05_e", "06_a", "07_b"}, "index": stages, "tour": stages}


LOGGED = """import json, os, sys, time
from pathlib import Path
path = Path(sys.argv[-1])
started = time.time()
time.sleep(60 if path.stem == "07_b" else 0.2)
(path.parent / "results").mkdir(exist_ok=True)
(path.parent / "results" / f"{path.stem}.json").write_text("new")
(path.parent / f"{path.stem}.log").write_text(json.dumps([started, time.time(), os.environ.get("CUDA_VISIBLE_DEVICES")]))
sys.exit(path.stem == "06_a")"""


def test_pages_run_side_by_side_each_on_its_gpu(pages, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    paths = pages(**NEEDS)
    old = tmp_path / "nbs" / "results" / "06_a.json"
    old.parent.mkdir()
    old.write_text("old")
    assert run_all(paths, "cuda", jobs=2, limit=5, command=[sys.executable, "-c", LOGGED]) == 2
    printed = capfd.readouterr().out
    assert "07_b.ipynb stopped at its limit of 5 s, after 5 s" in printed and "06_a.ipynb FAILED" in printed
    assert "4 of 6 notebooks saved; failed: 06_a.ipynb, 07_b.ipynb" in printed
    assert old.read_text() == "old" and not (old.parent / "07_b.json").exists() and (old.parent / "05_e.json").read_text() == "new"
    log = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "nbs").glob("*.log")}
    assert log["05_e"][1] <= log["06_a"][0] and log["10_s"][1] <= min(log["tour"][0], log["index"][0])
    assert log["10_s"][2] == "4,5" and {log["tour"][2], log["index"][2]} == {"4", "5"}


def test_cores_are_shared(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert environment([], 1)["TRITON_INTERPRET"] == "1"  # where no GPU is there, before the page's own process imports Triton
    assert environment(["2"], 4)["OMP_NUM_THREADS"] == "16" and environment(["0", "1"], 1)["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_drawings_lose_bytes_and_nothing_else():
    drawing = '<svg>\n <g>\n  <path d="M 1.23456 -2.5 \nL 3.00001 4 \n" style="fill: none; stroke-dashoffset: 0; stroke: #8c8c8c"/>\n </g>\n</svg>'
    assert lean(drawing) == '<svg><g><path d="M 1.23 -2.5 L 3 4 " style="fill:none;stroke:#8c8c8c"/></g></svg>'
    prose = '<p>\n <a d="1.23456">x</a></p>'
    assert lean(prose + drawing) == prose + lean(drawing) and lean(lean(drawing)) == lean(drawing)


def test_drawings_are_saved_lean(run):
    html = "'<svg> <path d=\"M 0.12345 1\"/></svg>'"
    nb = run(f"class D:\n    def _repr_html_(self): return {html}\nD()")
    assert "".join(nb["cells"][0]["outputs"][0]["data"]["text/html"]) == '<svg><path d="M 0.12 1"/></svg>'


def test_pages_that_read_each_others_records_run_one_after_the_other(pages):
    paths = pages(p06_a="load_results('results/07_b.json')", p07_b="load_results('results/06_a.json')")
    wrote = [sys.executable, "-c", "import sys; from pathlib import Path; Path(sys.argv[-1] + '.log').write_text('ran')"]
    assert run_all(paths, "", command=wrote) == 0
    assert all(path.with_name(f"{path.name}.log").read_text() == "ran" for path in paths)


def test_a_cell_that_shows_records_comes_last(run):
    show = "#| shows-records\nfrom pathlib import Path; print(Path('results/00_try.json').read_text())"
    first = run(show, RECORD.format("new"))["cells"][0]
    assert first["outputs"][0]["text"] == ["new\n"]
