"Terms of the glossary are linked where they first stand, and nowhere that a link would hurt."
import pytest
from glossary_links import linked, terms

pytestmark = pytest.mark.thorough
GLOSSARY = """<main><section id="group" class="level2"><h2>Group</h2>
<h3 class="anchored" id="tile">tile</h3><p>Scores that exist <em>at once</em>. More.</p>
<h3 class="anchored" id="tile-factor">tile factor</h3><p>How many &amp; why.</p>
<h3 class="anchored" id="nan">NaN</h3><p>Not a number.</p>
<h3 class="anchored" id="run">run</h3><p>Consecutive tiles.</p></section>
<section id="symbols" class="level2"><h3 class="anchored" id="bnv">BNV</h3><p>A symbol.</p></section></main>"""


def anchors(body: str) -> list[str]:
    "Where the links of a page lead, in order"
    page = linked(f"<html><nav>tile</nav><main><h1>tile</h1>{body}</main>tile", terms(GLOSSARY))
    return [piece.partition('"')[0] for piece in page.split('href="glossary.html#')[1:]]


def test_terms_have_their_first_sentence_and_no_symbols():
    assert {term.name: term.meaning for term in terms(GLOSSARY)} == {"tile": "Scores that exist at once.", "tile factor": "How many & why.", "NaN": "Not a number."}


LINKED = {
    "first use": ("<p>A tile and a tile.</p>", ["tile"]),
    "plural": ("<p>All tiles.</p>", ["tile"]),
    "capital": ("<p>Tiles are small.</p>", ["tile"]),
    "longest": ("<p>A tile factor, then a tile.</p>", ["tile-factor", "tile"]),
    "not within a word": ("<p>A textile, tile_size and nan.</p>", []),
    "not in code": ("<pre>tile</pre><p><code>tile</code> <a href='#'>tile</a></p>", []),
    "after code": ("<p><code>tile</code> holds a tile</p>", ["tile"]),
    "everyday word": ("<p>We run it.</p>", []),
    "no symbol": ("<p>BNV</p>", []),
}


@pytest.mark.parametrize("body, expected", LINKED.values(), ids=LINKED)
def test_links(body, expected):
    assert anchors(body) == expected


def test_a_link_tells_the_meaning():
    page = linked("<main><p>The tile factor.</p></main>", terms(GLOSSARY))
    assert page == ('<main><p>The <a class="fl-term" href="glossary.html#tile-factor" title="How many &amp; why.">tile factor</a>.</p></main>')


def test_terms_of_sequences_stay_on_their_pages():
    group = '<section id="ctc-and-semirings" class="level2"><h3 id="edge">edge</h3><p>A step. <a href="scans.html">Scans</a></p></section>'
    assert [(term.name, term.pages) for term in terms(f"<main>{group}{GLOSSARY}</main>")][:2] == [("edge", {"scans.html"}), ("tile", None)]
