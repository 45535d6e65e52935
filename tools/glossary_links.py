"""Terms of the glossary become links, each where it first stands on a page."""
import html
import re
from pathlib import Path
from typing import Iterator, NamedTuple

GLOSSARY = "glossary.html"
ENTRY = re.compile(r'<h3[^>]* id="([^"]+)"[^>]*>(.*?)</h3>\s*<p>(.*?)</p>', re.DOTALL)
CLOSED = frozenset("a abbr button code figure h1 h2 h3 h4 h5 h6 header math nav pre script style summary svg th".split())  # no links in these
EVERYDAY = frozenset("""accumulate block bound budget chain class column conflict counter decay error feature filter floor gap gather head in-turn in-place mean part
    flop pair path place plan positives product program rank record row run sample scan score shift start state step storage stream support table time token turn wrapper
    """.split())  # words that a page also uses in their everyday sense, spaces as hyphens
SEQUENCES = "ctc-and-semirings"  # a group of terms such as pair and edge: on pages that it does not name they mean something else
TAG = re.compile(r"(<[^>]*>)")


class Term(NamedTuple):
    "An entry of the glossary"
    name: str
    anchor: str
    meaning: str
    pages: frozenset[str] | None = None  # where it is linked; None: on all


def text_of(markup: str) -> str:
    "The words of some HTML, on one line"
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", markup)).split())


def entries(group: str, pages: frozenset[str] | None) -> list[Term]:
    "The entries of a group that are linked"
    found = [Term(text_of(name), anchor, re.split(r"(?<=[.:]) ", text_of(meaning))[0], pages) for anchor, name, meaning in ENTRY.findall(group)]
    return [term for term in found if term.name.lower().replace(" ", "-") not in EVERYDAY and len(term.name) > 2]


def terms(glossary: str) -> list[Term]:
    "The entries of the rendered glossary that are linked, symbols aside"
    groups = re.split(r'(?=<section id="[^"]+" class="level2")', glossary.partition('<section id="symbols"')[0])
    named = lambda group: frozenset(re.findall(r'href="(?:\./)?(\w+\.html)', group)) if f'id="{SEQUENCES}"' in group else None
    return [term for group in groups for term in entries(group, named(group))]


def pattern(known: list[Term]) -> re.Pattern:
    "Any of the terms as a whole word, perhaps in the plural; the longest first"
    names = sorted((term.name for term in known), key=len, reverse=True)
    return re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, names))})(?:s|es)?(?![\w-])", re.IGNORECASE)


def pieces(page: str) -> Iterator[tuple[str, bool]]:
    "Tags and texts of some HTML, and of each whether it is a text that may hold links"
    closed = 0
    for piece in TAG.split(page):
        tag = re.match(r"<(/?)(\w+)", piece)
        if tag and tag[2] in CLOSED:
            closed += -1 if tag[1] else 1
        yield piece, not closed and not piece.startswith("<")


def linked(page: str, known: list[Term]) -> str:
    "A page with links to the glossary, at the first use of each term in its main part"
    before, main, rest = page.partition("<main")
    body, end, after = rest.partition("</main>")
    left, words = {term.name.lower(): term for term in known}, pattern(known)

    def link(found: re.Match) -> str:
        term = left.get(found[1].lower())
        if not term or found[1][1:] != term.name[1:]:  # a capital may begin a sentence, not more
            return found[0]
        del left[found[1].lower()]
        return f'<a class="fl-term" href="{GLOSSARY}#{term.anchor}" title="{html.escape(term.meaning)}">{found[0]}</a>'

    return before + main + "".join(words.sub(link, piece) if text else piece for piece, text in pieces(body)) + end + after


def link_stages(out: Path) -> None:
    "Link the terms on all lessons of a site; its other pages stay as they are"
    known = terms((out / GLOSSARY).read_text(encoding="utf-8"))
    for path in sorted(out.glob("*.html")):
        page = path.read_text(encoding="utf-8")
        if 'id="in-the-library"' in page:
            path.write_text(linked(page, [term for term in known if term.pages is None or path.name in term.pages]), encoding="utf-8")
