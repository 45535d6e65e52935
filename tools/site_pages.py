"""What every page of the site gets beside its content: where its GPU outputs were made, a link past the navigation, its address."""
import html
import json
import re
from collections.abc import Callable
from pathlib import Path

from project import METADATA_KEY, read_notebook

from workbook.pages import NOT_RUN, gpu_note, made_line, needs_gpu

CARD, LOST, HOME = "card.png", "404.html", "index.html"
GUIDE = "guide.ipynb#open-a-page-in-jupyter"
CONTENT = "quarto-document-content"  # the id of a page's main part
NAVIGATION = {'class="navbar ': "Site", 'class="quarto-secondary-nav': "Place on the site", 'id="quarto-sidebar': "Pages", 'id="TOC"': "On this page",
              'class="page-navigation': "Before and after"}  # landmarks without a name
SCROLLED = """<script>
for (const box of document.querySelectorAll("pre, math[display=block], .sd-table, .fl-figure")) if (box.localName == "math" || box.scrollWidth > box.clientWidth) box.tabIndex = 0;
</script>"""  # a keyboard reaches what scrolls
ENTRY = re.compile(r'<div class="sidebar-item-container">(<a href="[^"]*" class=")sidebar-item-text (sidebar-link[^>]*>)<span class="menu-text">([^<]*)</span></a></div>')
SIDEBAR = re.compile(r'<nav [^>]*id="quarto-sidebar".*?</nav>', re.DOTALL)
SKIP = f'<a class="fl-skip" href="#{CONTENT}">Skip to the content</a>'


def small_print(text: str) -> dict:
    "An output of one line in small print"
    return {"output_type": "display_data", "metadata": {}, "data": {"text/html": [f'<p class="fl-small">{html.escape(text)}</p>']}}


def say_where_made(nb: dict) -> None:
    "Say beneath each cell for a GPU where its outputs were made, or that it has not run, once for several; and at the page's end the same of all others"
    code = [cell for cell in nb["cells"] if cell["cell_type"] == "code"]
    notes = [gpu_note(nb, cell) if cell in code and needs_gpu(cell["source"]) else "" for cell in nb["cells"]]
    for cell, note, following in zip(nb["cells"], notes, [*notes[1:], ""]):
        if note and not note == following == NOT_RUN:
            cell["outputs"].append(small_print(note))
    made = nb["metadata"].get(METADATA_KEY, {}).get("page")
    if made and any(cell["outputs"] and not needs_gpu(cell["source"]) for cell in code):
        nb["cells"].append({"cell_type": "markdown", "metadata": {}, "source": f'<p class="fl-small">Outputs: {html.escape(made_line(made))}</p>'})


def folded(source: str) -> str:
    "A cell's `#| code-fold what is inside`, which nbdev keeps out of modules, as the renderer has it, whose blocks end at a backtick"
    quarto = lambda found: f"#| code-fold: true\n#| code-summary: {json.dumps(found[1].replace('`', ''), ensure_ascii=False)}"
    return re.sub(r"^#\| code-fold (.+)$", quarto, source, flags=re.MULTILINE)


def prepare(path: Path) -> None:
    "A copy of a notebook, made ready for the renderer"
    nb = read_notebook(path)
    say_where_made(nb)
    for cell in (c for c in nb["cells"] if c["cell_type"] == "code"):
        cell["source"] = folded(cell["source"])
    path.write_text(json.dumps(nb), encoding="utf-8")


def social(page: str, url: str, site: str) -> str:
    "What others show where somebody links to a page: its title, its sentence and the card"
    title, about = (re.search(found, page) for found in (r"<title>(.*?)</title>", r'<meta name="description" content="([^"]*)">'))
    shown = {"og:type": "article", "og:url": html.escape(url), "og:image": f"{html.escape(site)}/{CARD}",
             "og:title": title[1] if title else "", "og:description": about[1] if about else ""}
    rows = "".join(f'<meta property="{name}" content="{value}">' for name, value in shown.items() if value)
    return rows + '<meta name="twitter:card" content="summary_large_image">'


def source_links(name: str, repository: str) -> list:
    "What stands beside a page's contents: the repository, its notebook, and how one opens it"
    return ["repo", {"text": "View source", "href": f"{repository}/blob/main/nbs/{name}", "icon": "file-code"},
            {"text": "Open in Jupyter", "href": f"/{GUIDE}", "icon": "journal-code"}]


def finish(page: str, url: str, site: str = "") -> str:
    "A rendered page with a link past its navigation and its own address, which a screen reader and a keyboard get through"
    page = re.sub(r"(<body[^>]*>)", rf"\1{SKIP}", page, count=1)
    page = page.replace("</head>", f'<link rel="canonical" href="{html.escape(url)}">{social(page, url, site)}</head>', 1)
    if url.endswith(f"/{LOST}"):  # it is shown at any address
        page = page.replace("<head>", f'<head><base href="{html.escape(site)}/">', 1)
    if url == f"{site}/{HOME}":  # where everybody arrives: one column
        page = SIDEBAR.sub("", re.sub(r'<body class="', '<body class="fl-home ', page, count=1), count=1)
    page = re.sub(r"<th(?=[ >])(?![^>]*\bscope=)", '<th scope="col"', page)
    page = re.sub(r'<th scope="col"([^>]*)></th>', r"<td\1></td>", page)  # a corner heads no column
    page = ENTRY.sub(r"\1\2\3</a>", page)  # every page lists every page: what only wraps a link is a fifth of the site
    page = page.replace("</body>", f"{SCROLLED}</body>", 1)
    page = re.sub(r'data-bs-target="(#[\w-]+)" role="navigation"', r'data-bs-target="\1" href="\1" role="button"', page)
    for begin, label in NAVIGATION.items():
        page = page.replace(f"<nav {begin}", f'<nav aria-label="{label}" {begin}')
    return page


def fill_places(out: Path, place: re.Pattern[str], filled: Callable[[str], str]) -> None:
    "Rewrite the pages of a site that have a place for something"
    for path in sorted(out.glob("*.html")):
        page = path.read_text(encoding="utf-8")
        if place.search(page):
            path.write_text(filled(page), encoding="utf-8")


def finish_all(out: Path, address: str) -> None:
    "Finish the pages in `out`, and list them in a sitemap without dates, which a fresh clone would change"
    pages = sorted(out.rglob("*.html"))
    urls = [f"{address}/{path.relative_to(out).as_posix()}" for path in pages]
    for path, url in zip(pages, urls):
        path.write_text(finish(path.read_text(encoding="utf-8"), url, address), encoding="utf-8")
    rows = "\n".join(f"  <url><loc>{html.escape(url)}</loc></url>" for url in urls if not url.endswith(LOST))
    (out / "sitemap.xml").write_text(f'<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{rows}\n</urlset>\n',
                                     encoding="utf-8")
