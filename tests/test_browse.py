"The built site in a browser: no errors, nothing beyond the edge, and what a checker of access finds."
import pytest
from browse import LAYOUT, PHONE, WIDE, browser, evaluate, evaluate_all, faults
from grids import few
from project import ROOT

pytestmark = pytest.mark.thorough
DOCS = ROOT / "docs"
AXE = ROOT / ".axe" / "package" / "axe.min.js"  # npm pack axe-core, unpacked
VIOLATIONS = """; const found = await axe.run();
return found.violations.map(v => `${v.id}: ${v.nodes.length}, such as ${v.nodes[0].html.slice(0, 120)}`);"""


@pytest.fixture(autouse=True)
def a_browser():
    "Asked for when a test runs, not where tests are only collected"
    if not browser():
        pytest.skip("no browser on this machine")


@pytest.mark.parametrize("width, pages", few([(WIDE, "*.html"), (PHONE, "*.html"), (WIDE, "*/*.html"), (PHONE, "*/*.html"), (PHONE, "i*.html")],
                                             (WIDE, "*.html"), (PHONE, "i*.html")))
def test_pages_fit_their_window(pages, width):
    found = sorted(DOCS.glob(pages))
    seen = evaluate_all(found, LAYOUT, width)
    assert [fault for page, answer in zip(found, seen, strict=True) for fault in faults(page, answer, width)] == []


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not in .axe")
@pytest.mark.parametrize("dark, pages", few([(False, "i*.html"), (False, "*.html"), (True, "*.html")], (False, "i*.html")))
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


SVG = "<svg width=200 height=40 viewBox='0 0 200 40' font-size=14><text x=5 y=20>one</text>%s</svg>"
FAULTS = {"": "", "<div style='width: 3000px'>wide</div>": "beyond the edge: DIV wide", "<script>undefinedName()</script>": "error ", "<img src='gone.png'>": "error ",
          SVG % "<text x=8 y=20>two</text>": "collide: one | two", SVG % "<text x=90 y=50>two</text>": "clipped: two"}


def test_faults_are_seen_and_nothing_else(tmp_path):
    pages = [tmp_path / f"{number}.html" for number in range(len(FAULTS))]
    for page, body in zip(pages, FAULTS):
        page.write_text(f"<html><head></head><body><main><h1>x</h1>{body}</main></body></html>", encoding="utf-8")
    for page, seen, expected in zip(pages, evaluate_all(pages, LAYOUT), FAULTS.values()):
        found = faults(page, seen, WIDE)
        assert any(expected in line for line in found) if expected else found == [], (expected, found)
