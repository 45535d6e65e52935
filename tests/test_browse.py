"The built site in a browser: no errors, nothing beyond the edge, and what a checker of access finds."
from pathlib import Path

import pytest
from browse import LAYOUT, PHONE, WIDE, browser, complaints, evaluate, evaluate_all, faults
from grids import few
from workbook import ROOT, is_stage, notebooks

DOCS = ROOT / "docs"
LESSON = 10_900  # px of a lesson's open half, at most
AXE = ROOT / ".axe" / "package" / "axe.min.js"  # npm pack axe-core, unpacked
VIOLATIONS = """; const found = await axe.run();
return found.violations.map(v => `${v.id}: ${v.nodes.length}, such as ${v.nodes[0].html.slice(0, 120)}`);"""


@pytest.fixture(autouse=True)
def a_browser():
    "Asked for when a test runs, not where tests are only collected"
    if not browser():
        pytest.skip("no browser on this machine")


@pytest.mark.parametrize("width, pages", few([(WIDE, "*.html"), (PHONE, "*.html"), (WIDE, "*/*.html"), (PHONE, "*/*.html")], (PHONE, "*.html")))
def test_pages_fit_their_window(pages, width):
    found = sorted(DOCS.glob(pages))
    assert [fault for page, seen in zip(found, evaluate_all(found, LAYOUT, width)) for fault in faults(page, seen, width)] == []


def test_lessons_are_read_in_one_sitting():
    lessons = [DOCS / f"{path.stem[3:]}.html" for path in notebooks() if is_stage(path)]
    heights = {page.name: seen["found"]["height"] for page, seen in zip(lessons, evaluate_all(lessons, LAYOUT))}
    assert {name: height for name, height in heights.items() if height > LESSON} == {}


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not in .axe")
@pytest.mark.parametrize("dark, pages", few([(False, "[gi]*.html"), (False, "*.html"), (True, "*.html")], (False, "[gi]*.html")))
def test_pages_can_be_read_by_all(dark, pages):
    axe, found = AXE.read_text(encoding="utf-8").replace("</script", r"<\/script"), sorted(DOCS.glob(pages))
    assert {page.name: seen for page, seen in zip(found, evaluate_all(found, axe + VIOLATIONS, dark=dark)) if seen != {"found": [], "errors": []}} == {}


SEARCH = """
  const input = document.querySelector(".smalldocs-search input");
  input.value = "ctc";
  input.dispatchEvent(new Event("input"));
  for (let i = 0; i < 50 && !document.querySelector(".search-result"); i++) await new Promise(done => setTimeout(done, 100));
  return document.querySelector(".search-result")?.getAttribute("href");
"""


@pytest.mark.skipif(not (ROOT / "docs" / "search.js").exists(), reason="docs/ is not built")
def test_search_works_without_a_server():
    assert evaluate(ROOT / "docs" / "house.html", SEARCH) == {"found": "./ctc.html", "errors": []}


@pytest.fixture
def page(tmp_path) -> Path:
    path = tmp_path / "a.html"
    path.write_text("<html><head></head><body><main><h1>x</h1>%s</main></body></html>", encoding="utf-8")
    return path


SVG = "<svg width=200 height=40 viewBox='0 0 200 40' font-size=14><text x=5 y=20>one</text>%s</svg>"
FAULTS = {"<div style='width: 3000px'>wide</div>": "beyond the edge: DIV wide", "<script>undefinedName()</script>": "error ", "<img src='gone.png'>": "error ",
          SVG % "<text x=8 y=20>two</text>": "collide: one | two", SVG % "<text x=90 y=50>two</text>": "clipped: two",
          SVG % "<text x=90 y=20 font-size=8>two</text>": "8.0 px: two"}


@pytest.mark.parametrize("body, expected", FAULTS.items(), ids=["wide", "script", "picture", "collision", "clipped", "small"])
def test_a_fault_is_seen(page, body, expected):
    text = page.read_text(encoding="utf-8")
    page.write_text(text % "", encoding="utf-8")
    assert complaints(page, WIDE) == []
    page.write_text(text % body, encoding="utf-8")
    assert any(expected in line for line in complaints(page, WIDE))
