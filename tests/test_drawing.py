"""Numbers, tables and pictures: what they say, and that they are the same byte for byte."""
import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
import torch

from fusedloss.core.tables import Table, si
from fusedloss.core.rates import H200, Machine
from fusedloss.measure import Cost, product_cost, sweep_cost
from workbook.drawing import GREY, INK, STAGE_COLORS, drawing_style, least_in_bold, letters_of, spread_labels, stage_color, tile_picture
from workbook.measure import memory_timeline, roofline, trace_memory
from workbook.records import Check, predicted_against_measured, trade_off
from grids import few, thorough_but
from helpers import need_fonts
from test_records import RECORD

TOY = Machine("toy", 100.0, dict(float32=1000.0, bfloat16=2000.0))
HOSTILE = 'a <b> & "c" ]]> <script>alert(1)</script> $x$'


@pytest.mark.parametrize("value, unit, text", [
    (0, "s", "0 s"), (0.0121, "s", "12.1 ms"), (1, "", "1"), (1000, "", "1 k"), (999, "s", "999 s"), (-0.002, "s", "-2 ms"),
    (1.5e12, "FLOP", "1.5 TFLOP"), (2e-9, "s", "2 ns"), (3e-6, "s", "3 µs"), (7e15, "B/s", "7 PB/s"), (1e-15, "s", "0.001 ps"),
    (999.6, "s", "1 ks"), (0.9999, "s", "1 s"), (9.996e-4, "s", "1 ms"), (-999_999, "", "-1 M"),
    (0, "B", "0 B"), (0.5, "B", "0.5 B"), (1023, "B", "1023 B"), (1024, "B", "1 KiB"), (-3 * 2**20, "B", "-3 MiB"), (1.5 * 2**40, "B", "1.5 TiB"),
    (float("nan"), "s", "nan s"), (float("inf"), "B", "inf B"), (-float("inf"), "", "-inf"), (2**70, "B", "1.074e+09 TiB"),
])
def test_si_gives_figures_and_a_prefix(value, unit, text):
    assert si(value, unit) == text


@pytest.mark.parametrize("values, texts", [
    ([1.0, 2.0], ["**1.0**", "2.0"]), ([None, 2.0, 1.0, None], ["–", "2.0", "**1.0**", "–"]), ([2.0, None], ["2.0", "–"]), ([], []),
    ([1.04, 1.0401, 1.1], ["**1.0**", "**1.0**", "1.1"]), ([-3.0, -5.0], ["-3.0", "**-5.0**"])])
def test_least_is_bold_and_what_reads_the_same(values, texts):
    assert least_in_bold(values, lambda v: f"{v:.1f}") == texts


def test_table_aligns_numbers_right_and_escapes_bars():
    table = Table(["name", "time"], [["a|b", "1 s"], ["c", "×20"]])
    assert table._repr_markdown_() == "| name | time |\n| :-- | --: |\n| a\\|b | 1 s |\n| c | ×20 |"
    assert repr(table) == "name  time\n----  ----\na|b    1 s\nc      ×20"


@pytest.mark.parametrize("rows", [[["", ""]], iter([[None, 1.5]]), [["a", 1], ["b", "–"]]])
def test_table_takes_any_rows(rows):
    lines = Table(["", "b"], rows)._repr_markdown_().splitlines()
    assert len(lines) == 3 and all(line.count("|") == 3 for line in lines)


@pytest.mark.parametrize("rows", [[], [["a", "–"]]])
def test_a_table_without_figures_shows_nothing(rows):
    table = Table(["", "b"], rows)
    assert table._repr_markdown_() == repr(table) == ""


def timeline(fn, text="t", **options):
    return memory_timeline(trace_memory(fn), text, text, text, **options)


FIGURES = {
    "tiles": lambda text="t": tile_picture((3, 4), [(0, 0), (2, 3)], text, text, (text, text)),
    "one tile": lambda text="t": tile_picture((1, 1), [], text, text, stage=0),
    "timeline": lambda text="t": timeline(lambda: torch.zeros(100).exp().exp(), text),
    "empty timeline": lambda text="t": timeline(lambda: None, text),
    "timeline of empty tensors": lambda text="t": timeline(lambda: torch.zeros(0), text),
    "timeline of small tensors": lambda text="t": timeline(lambda: torch.zeros(9), text, at_least=10**9),
    "roofline": lambda text="t": roofline([(product_cost(text, 64, 64, 64, torch.float32), 1e-3), (Cost("c", 1.0, 1.0), 1.0)], TOY, torch.float32, text, text, text),
    "roofline of a sweep": lambda text="t": roofline([(sweep_cost("s", 10, torch.float32), 1.0)], TOY, torch.float32, text, text),
    "empty roofline": lambda text="t": roofline([], H200, torch.bfloat16, text, text),
    "predicted": lambda text="t": predicted_against_measured([Check(text, 1.0, 1.2), Check("b", 1.0, 100.0), Check("c", 9.0, 1e-3)], text, text, text),
    "nothing predicted": lambda text="t": predicted_against_measured([], text, text),
    "trade-off": lambda text="t": trade_off([dict(RECORD, name=text), dict(RECORD, stage="01_baseline")], text, text, text),
    "no trade-off": lambda text="t": trade_off([], text, text),
}


KINDS = "tiles", "timeline", "roofline", "predicted", "trade-off"  # one figure of each


@pytest.fixture
def draw():
    need_fonts("DejaVuSans")
    import matplotlib
    matplotlib.use("svg")
    return lambda name, *text: FIGURES[name](*text)


@pytest.mark.parametrize("name", thorough_but(FIGURES, *KINDS))
@pytest.mark.parametrize("text", few(["a title", HOSTILE, ""], HOSTILE), ids=lambda text: "hostile" if text == HOSTILE else None)
def test_figure_is_well_formed_and_says_its_alternative_text(name, text, draw):
    drawing = draw(name, text)
    root = ElementTree.fromstring(drawing.svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("role") == "img" and root.get("aria-label") == text
    assert ElementTree.fromstring(drawing._repr_html_()).tag == "figure"
    assert not root.findall(".//{*}script") and "viewBox" in root.attrib


@pytest.mark.parametrize("name", thorough_but(FIGURES, *KINDS))
def test_figure_is_the_same_byte_for_byte_and_stands_alone(name, draw):
    from matplotlib import pyplot
    before = dict(pyplot.rcParams), pyplot.get_fignums()
    drawing = draw(name)
    assert drawing.svg == draw(name).svg
    assert (dict(pyplot.rcParams), pyplot.get_fignums()) == before
    links = set(re.findall(r"https?://[^\s\"'<>)]+", drawing.svg))
    assert links <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<script|<image|@import|url\((?!#)|20\d\d-\d\d", drawing.svg)
    assert all(ref.startswith("#") for ref in re.findall(r'href="([^"]*)"', drawing.svg))


def test_figure_takes_the_pages_ink_and_a_file_brings_its_own(draw, tmp_path):
    drawing = draw("tiles")
    assert "currentColor" in drawing.svg and INK not in drawing.svg and "#000000" not in drawing.svg
    drawing.save(tmp_path / "d.svg")
    root = ElementTree.parse(tmp_path / "d.svg").getroot()
    assert root.get("color") == "#777" and root.get("aria-label") == "t"
    assert repr(drawing) == "Drawing: t"


def test_every_stage_has_its_colour_and_the_baseline_is_grey():
    assert stage_color(0) == GREY and [stage_color(i) for i in range(1, 8)] == list(STAGE_COLORS)
    assert stage_color(8) == stage_color(1)


def test_labels_at_one_point_stand_above_each_other():
    need_fonts("DejaVuSans")
    import matplotlib.pyplot as plt
    from matplotlib.backends.backend_agg import RendererAgg
    with drawing_style():
        fig, ax = plt.subplots()
        labels = [ax.annotate(text, (0.5, 0.5), xytext=(9, -3), textcoords="offset points", arrowprops=dict(arrowstyle="-")) for text in ("one", "two", "three")]
        spread_labels(fig, labels)
    boxes = [letters_of(label, RendererAgg(*fig.bbox.size, fig.dpi)) for label in labels]
    plt.close(fig)
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2)) and labels[0].xyann == (9, -3)
