"""The workbook's checker finds each kind of fault, and nothing in a notebook without one."""
import hashlib
import json

import pytest
from check_workbook import SECTIONS, problems
from workbook import FOLDED_KEY, INTERPRETED, METADATA_KEY, PROLOGUE, add_prologue, code_hash, left_out, read_notebook, reason

PATH = "/" + "tmp/x.py"  # in two parts, because this file is checked too


def cell(source: str, *outputs: dict) -> dict:
    "A code cell, or a Markdown cell where the source starts with a mark of Markdown"
    if source[:2] in ("# ", "##", "> ", "**"):
        return {"cell_type": "markdown", "metadata": {}, "source": source}
    return {"cell_type": "code", "id": hashlib.sha256(source.encode()).hexdigest()[:8], "metadata": {}, "source": source, "outputs": list(outputs), "execution_count": None}


def printed(text: str) -> dict:
    return {"output_type": "stream", "name": "stdout", "text": [text]}


def good_stage() -> list[dict]:
    "The cells of the smallest stage that keeps every rule"
    cells = [cell("# Title\n\n> One sentence."), cell(PROLOGUE)]
    for name in SECTIONS:
        cells += [cell(f"## {name or 'A name of its own'}"), cell("assert 1 + 1 == 2")]
    cells[-2]["metadata"] = {FOLDED_KEY: True}
    cells.append(cell("#| cuda\nprint('fast')", printed("fast\n")))
    return cells + [cell(f"### Exercise {n}\n\nHow many?") for n in (1, 2, 3)]


@pytest.fixture
def report(tmp_path):
    "Write a stage and its solutions; the problems found, as one text"
    def write(cells: list[dict], saved: dict | None = None, solutions: int = 3) -> str:
        folder = tmp_path / "nbs"
        (folder / "solutions").mkdir(parents=True, exist_ok=True)
        stage = {"cells": cells, "metadata": {}}
        if saved != {}:
            stage["metadata"][METADATA_KEY] = saved or {"code": code_hash(stage)}
        answers = [cell(f"## Exercise {n}\n\nFour.") for n in range(1, solutions + 1)]
        for path, nb in (("02_tiles.ipynb", stage), ("solutions/02_tiles.ipynb", {"cells": [cell(PROLOGUE), *answers], "metadata": {}})):
            (folder / path).write_text(json.dumps(nb), encoding="utf-8")
        listed = {"02_tiles.ipynb": dict.fromkeys(left_out(stage), "measures")} if left_out(stage) else {}
        (folder / "left_out.json").write_text(json.dumps(listed), encoding="utf-8")
        return "\n".join(problems(tmp_path))
    return write


def test_good_stage_has_no_problem(report):
    assert report(good_stage()) == ""


def replaced(index: int, *new: dict) -> list[dict]:
    "The good stage with other cells in place of one"
    cells = good_stage()
    cells[index:index + 1] = new
    return cells


LONG = "\n".join(f"x{i} = {i}" for i in range(46))
FAULTS = {
    "title": (replaced(0, cell("# Title\n\nNo sentence.")), "cell 0: is not `# Title`"),
    "missing section": (replaced(2), "section `## The question` is there 0 times"),
    "double section": (replaced(2, cell("## The question"), cell("## The question")), "`## The question` is there 2 times"),
    "order": (replaced(2, cell("## Recap")) [:-5] + [cell("## The question")], "is out of order"),
    "no code section": (replaced(10), "no code section"),
    "long cell": (replaced(3, cell(LONG)), "cell 3: 46 lines; no cell but a kernel"),
    "median": (good_stage() + [cell("\n".join(["assert True"] * 7))] * 20, "the median code cell has 7 lines"),
    "many long": (good_stage() + [cell("\n".join(["assert True"] * 25))] * 3, "3 of 16 code cells have 25 lines or more: cells"),
    "few checks": (good_stage() + [cell("x = 1")] * 40, "code cells hold a check that can fail; 25% is the least"),
    "exercises": (good_stage()[:-1], "2 headings `### Exercise N`, not 3"),
    "no output": (replaced(26, cell("#| cuda\nprint('fast')")), "cell 26: a `#| cuda` cell without saved output"),
    "saved error": (replaced(3, cell("assert 1", {"output_type": "error", "traceback": ["no"]})), "cell 3: a saved error"),
    "path": (replaced(3, cell("assert 1", printed(f"at {PATH}"))), f"cell 3: output names a machine's path {PATH}"),
    "no library": (replaced(24), "0 cells begin with `## In the library`"),
    "open library": (replaced(24, cell("## In the library")), "cell 24: `jp-MarkdownHeadingCollapsed` is not set"),
    "after the library": (good_stage() + [cell("## Another")], "a section follows `## In the library`"),
    "too many cells": (replaced(3, *[cell("assert 1 + 1 == 2")] * 69), "91 open cells in the lesson, more than 90"),
    "size": (replaced(3, cell("assert 1", printed("x" * 400_000))), "more than 400000"),
}


@pytest.mark.parametrize("cells, expected", FAULTS.values(), ids=FAULTS)
def test_fault_is_named(report, cells, expected):
    found = report(cells)
    assert expected in found
    assert all(line.startswith("nbs/02_tiles.ipynb: ") for line in found.splitlines())


def test_syntax_fault_is_named(report):
    assert report(replaced(3, cell("x = = 1")), {"code": "0"}) == "nbs/02_tiles.ipynb: cell 3: does not parse as Python"


def test_kernel_may_be_long(report):
    assert report(replaced(3, cell(f"import triton\nassert 1\n@triton.jit\ndef kernel():\n    pass\n{LONG}"))) == ""


def test_folded_cells_are_not_open(report):
    folded = [cell(f"#| {how}\nassert 1 + 1 == 2") for how in ("hide", "code-fold: true")] * 40
    assert report(replaced(3, *folded)) == "" == report(good_stage() + [cell("assert 1 + 1 == 2")] * 100)


def test_silent_gpu_cell_needs_no_output(report):
    assert report(good_stage() + [cell("#| cuda\nx = 1"), cell("#| cuda\nf();"), cell("#| cuda\ntest_eq(1, 1)"), cell("#| cuda\nwith f():\n    x = 1"),
                                  cell("#| cuda\nfor x in y:\n    record(x)"),
                                  cell("#| cuda\ntry: f()\nfinally: g()")]) == ""


@pytest.mark.parametrize("loud", ["with f():\n    print(1)", "if x:\n    print(1)", "if x: y = 1\nelse: print(1)", "for x in y:\n    print(x)",
                                  "try: f()\nexcept E: print(1)"])
def test_a_block_that_shows_something_needs_its_output(report, loud):
    assert "without saved output" in report(good_stage() + [cell(f"#| cuda\n{loud}")])


@pytest.mark.parametrize("saved, expected", [({}, "no hash in the metadata"), ({"code": "0"}, "saved outputs are stale")])
def test_saved_outputs_are_of_this_code(report, saved, expected):
    assert expected in report(good_stage(), saved)


def test_a_page_may_wait_for_a_gpu_if_it_says_so(report):
    waits = cell("**GPU outputs to come.** Nobody had one.")
    assert report([*good_stage(), cell("#| cuda\nprint(1)"), waits], {}) == report([*good_stage(), waits], {"code": "0"}) == ""
    assert "and they are here" in report([*good_stage(), waits])


def test_a_page_begins_with_the_prologue(report, tmp_path):
    cells = good_stage()
    assert "first code cell is not the prologue" in report([*cells[:1], *cells[2:]])
    path = tmp_path / "nbs" / "02_tiles.ipynb"
    assert add_prologue(path) and not add_prologue(path)
    assert "prologue" not in report([*cells[:1], cell(INTERPRETED), *cells[2:]])
    assert list(problems(tmp_path)) == []


@pytest.mark.parametrize("listed", ["{}", '{"02_tiles.ipynb": {"0a1b2c3d": "measures"}}'])
def test_cells_left_out_are_listed(report, tmp_path, listed):
    report(good_stage())
    (tmp_path / "nbs" / "left_out.json").write_text(listed)
    found, = problems(tmp_path)
    assert found.startswith("nbs/left_out.json: 02_tiles.ipynb: cells ") and ("0a1b2c3d" in found) == ("0a1b2c3d" in listed)


@pytest.mark.parametrize("source, expected", [
    ("x = time_call(f)", "measures time, memory, launches or errors on a GPU"), ("x.cuda()", "names the GPU or makes its tensors there"),
    ("import a", "imports what the measurements on a GPU alone need"), ("def f(): pass", "defines what the measurements on a GPU alone use"),
    ("assert x", "checks what was measured on a GPU"), ("print(x)", "prepares or shows what is measured on a GPU")])
def test_a_reason_is_read_from_the_source(source, expected):
    assert reason(f"#| cuda\n{source}") == expected


def test_missing_solution_is_named(report):
    assert "Exercise 3 has no heading in nbs/solutions/02_tiles.ipynb" in report(good_stage(), solutions=2)


@pytest.mark.parametrize("text", [f"see {PATH}", "Looking in " + "indexes: x", "https://example.org" + "/simple/torch"])
def test_text_names_no_machine_and_no_index(report, tmp_path, text):
    (tmp_path / "notes.md").write_text(f"fine\n{text}\n")
    assert "notes.md: line 2: names" in report(good_stage())


@pytest.fixture
def hashed(tmp_path):
    "The hash of a notebook of these cells, of which the last has an output"
    def write(*sources: str) -> str:
        path = tmp_path / "x.ipynb"
        path.write_text(json.dumps({"cells": [cell(s) for s in sources[:-1]] + [cell(sources[-1], printed("1\n"))]}))
        return code_hash(read_notebook(path))
    return write


def test_hash_ignores_prose_comments_and_form(hashed):
    assert hashed("# A", "x = f(1,\n 2)", "print(x)") == hashed("x = f(1, 2)  # why", "## B", "print( x )")
    assert hashed("x = f(1, 2)", "print(x)") != hashed("x = f(1, 3)", "print(x)")


@pytest.mark.parametrize("change, counts", [
    ("def g(): return 1", False), ("assert x == 3", False), ("z = x", False),
    ("def f(): return 4", False), ("x = f() + 1", True), ("x = 4", True), ("y = 4", True), ("x.append(4)", True), ("x[0] = 4", True),
    ("f(x)", True), ("test_eq(x, 3)", False),
    ("from math import f", False), ("from math import x", True), ("from math import *", True), ("#| cuda\nz = 1", True)])
def test_hash_is_of_the_code_behind_outputs(hashed, change, counts):
    cells = "y = 2", "def f(): return y", "x = f()"
    assert (hashed(*cells, change, "print(x)") != hashed(*cells, "print(x)")) == counts


def test_hash_follows_a_function_to_what_it_reads(hashed):
    first = hashed("y = 2", "def f(): return y", "print(f())")
    assert first != hashed("y = 3", "def f(): return y", "print(f())")
    assert first != hashed("y = 2", "def f(): return y", "y = 3", "print(f())"), "read when called"


def test_hash_sees_through_what_is_added_to(hashed):
    assert hashed("x = 2", "x += 1", "print(x)") != hashed("x = 3", "x += 1", "print(x)")
