"""What every page runs first: saved outputs of cells for a GPU, the packages that a page needs, the source that it shows."""
import pytest

from workbook import pages
from workbook.pages import METADATA, NOT_RUN, ReplayedCells, gpu_note, lesson_box, made_line, needs_packages, power_of_ten, source_text

CELL = dict(cell_type="code", id="a", source="#| cuda\nf()", outputs=[{"output_type": "stream"}])
MADE = dict(machine="NVIDIA H200 · torch 2.11", date="2026-11-24", commit="0123abc", cells=["a"])
PAGE = dict(metadata={METADATA: {"gpu": MADE}})


def test_a_note_says_where_a_cell_ran():
    assert gpu_note(PAGE, CELL) == "NVIDIA H200, 2026-11-24, commit 0123abc"
    assert gpu_note(PAGE, dict(CELL, outputs=[])) == ""
    assert gpu_note(PAGE, dict(CELL, id="b")) == gpu_note(dict(metadata={}), CELL) == NOT_RUN


def test_a_cell_for_a_gpu_shows_its_saved_output(capsys):
    replayed = ReplayedCells(".")
    replayed.saved["#| cuda\nrun()"] = [{"output_type": "stream", "name": "stdout", "text": ["12.1 ", "ms\n"]}], made_line(MADE)
    replayed.sources = list(replayed.saved)
    assert replayed.transform(["x = 1\n"]) == ["x = 1\n"]
    shown = []
    for change in ("", "  # changed"):
        line, = replayed.transform(["#| cuda\n", f"run(){change}\n"])
        replayed.saved_output(line.split()[1])
        shown.append(capsys.readouterr().out)
    assert shown == [f"12.1 ms\n{made_line(MADE)}\n", "This cell needs a GPU, and no notebook here holds an output of it.\n"]


def test_missing_packages_are_named():
    needs_packages("torch")
    with pytest.raises(ImportError, match="this page needs no_such and nor_this: pip install no_such nor_this"):
        needs_packages("no_such", "torch", "nor_this")


def test_a_source_is_shown_with_its_file():
    shown = source_text(pages.needs_gpu)
    assert shown.startswith("# workbook/pages.py\ndef needs_gpu(source: str)") and shown.endswith("re.MULTILINE))\n")


def test_the_box_of_a_lesson_has_four_lines():
    given = dict(saves="the N×V scores", costs="a fourth product", use_it_when="memory is short", not_when="the scores fit")
    assert [line.split("|")[2].strip() for line in lesson_box(**given).data.splitlines()[2:]] == [*given.values()]


def test_a_power_of_ten_has_one_figure():
    assert [power_of_ten(x) for x in (5.4e-7, 1, 2.5e12)] == ["5 · 10⁻⁷", "1 · 10⁰", "2 · 10¹²"]
