"""Check a site: every internal link, anchor and asset is there, and nothing is loaded from outside.

    python tools/check_site.py          the pages, rendered anew in a temporary folder
    python tools/check_site.py FOLDER   a site that is built
"""
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from search_index import addresses

LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"),
          ("audio", "src"), ("embed", "src"), ("object", "data"), ("image", "href"), ("image", "xlink:href"), ("use", "href")}
INLINE = "data:"  # a picture within the page: nothing is loaded
LINKED = {("a", "href"), ("use", "xlink:href"), ("div", "data-grid")}  # the last is loaded when it comes into view
CSS_URL = re.compile(r"""url\(\s*['"]?([^'")]+)|@import\s+['"]([^'"]+)""")
FENCE = re.compile(r"^::::*.*$", re.MULTILINE)  # the mark of a block in the renderer's source
INDEX = "search.js"  # loaded by the search itself
Problems = Iterator[str]


class Page(HTMLParser):
    "The identifiers of a page, what it loads and what it links to"

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.loads, self.links, self.cards, self.in_style, self.fences = set(), [], [], [], False, []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        "Collect one tag"
        self.in_style = tag == "style"
        if ("property", "og:image") in attrs:
            self.cards.append(urlsplit(dict(attrs)["content"]).path.rpartition("/")[2])
        for name, value in () if ("rel", "canonical") in attrs else attrs:  # an address, which nobody loads
            if name in ("id", "name"):
                self.ids.add(value)
            elif (value or "").startswith(INLINE):
                continue
            elif name == "style":
                self.loads += css_urls(value or "")
            elif (tag, name) in LOADED:
                self.loads.append(value or "")
            elif (tag, name) in LINKED:
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        "Styles within the page load things too; a block's marks are there to be rendered"
        if self.in_style:
            self.loads += css_urls(data)
        self.fences += FENCE.findall(data)


def css_urls(text: str) -> list[str]:
    "What a stylesheet loads"
    return [url for found in CSS_URL.findall(text) if not (url := "".join(found)).startswith(INLINE)]


def is_outside(url: str) -> bool:
    "Does `url` leave the site?"
    return bool(urlsplit(url).scheme or urlsplit(url).netloc)


@cache
def target_of(folder: Path, url: str) -> Path:
    "The file that an internal link of a file in `folder` leads to; every page has nearly the same links"
    return (folder / unquote(urlsplit(url).path)).resolve()


def missing(url: str, base: Path, pages: dict[Path, Page]) -> str:
    "What is wrong with an internal link of the page or stylesheet `base`, or an empty string"
    parts = urlsplit(url)
    target = target_of(base.parent, url) if parts.path else base
    target = target / "index.html" if target.is_dir() else target
    if target in pages and not parts.fragment:
        return ""
    if not target.is_file():
        return "leads nowhere"
    return "has no such anchor" if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids else ""


def check_page(path: Path, pages: dict[Path, Page]) -> Problems:
    "The problems of one page"
    page = pages[path]
    yield from (f"shows {mark!r}, the mark of a block that was not rendered" for mark in page.fences)
    yield from (f"loads {url} from outside" for url in page.loads if is_outside(url))
    inside = sorted({url for url in page.loads + page.links if not is_outside(url)})
    yield from (f"{url} {fault}" for url in inside if (fault := missing(url, path, pages)))


def check_styles(path: Path, pages: dict[Path, Page]) -> Problems:
    "The problems of one stylesheet"
    for url in css_urls(path.read_text(encoding="utf-8")):
        fault = "is loaded from outside" if is_outside(url) else missing(url, path, pages) if not url.startswith("#") else ""
        if fault:
            yield f"{url} {fault}"


def pages_of(site: Path) -> dict[Path, Page]:
    "The pages of a site by their files"
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def unused(site: Path) -> Problems:
    "Assets that no page and no stylesheet names"
    site = site.resolve()
    pages = pages_of(site)
    named = [(path, url) for path, page in pages.items() for url in page.loads + page.links]
    named += [(path, url) for path in site.rglob("*.css") for url in css_urls(path.read_text(encoding="utf-8"))]
    reached = {target_of(path.parent, url) for path, url in named if not is_outside(url)}
    reached |= {site / name for page in pages.values() for name in page.cards}
    for path in site.rglob("*"):
        if path.is_file() and path.suffix in {".css", ".js", ".woff", ".woff2", ".svg", ".png"} and path.resolve() not in reached and path != site / INDEX:
            yield f"{path.relative_to(site)}: no page uses it"


def unlicensed(site: Path) -> Problems:
    "What others made, without its licence beside it; the themes are our own"
    for path in sorted((site / "site_libs").rglob("*")):
        if path.suffix in {".css", ".js"} and path.parent.name != "themes":
            own = path.with_name(f"{path.stem}.LICENSE")
            if not own.exists() and not (path.parent / "LICENSE").exists():
                yield f"{path.relative_to(site)}: no licence lies beside it"


def problems(site: Path) -> Problems:
    "Every problem of the site"
    site = site.resolve()
    pages = pages_of(site)
    for path in pages:
        yield from (f"{path.relative_to(site)}: {problem}" for problem in check_page(path, pages))
        yield from (f"{path.relative_to(site)}: the card {name} is missing" for name in pages[path].cards if not (site / name).is_file())
    for path in sorted(site.rglob("*.css")):
        yield from (f"{path.relative_to(site)}: {problem}" for problem in check_styles(path, pages))
    search = site / INDEX
    for address in addresses(search.read_text(encoding="utf-8")) if search.exists() else ():
        if fault := missing(address, search, pages):
            yield f"{INDEX}: {address} {fault}"
    if site / "index.html" not in pages:
        yield "index.html: the site has no home page"


def rendered_problems() -> list[str]:
    "What the renderer complains of, and every problem of the pages that it makes"
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from build_site import render
    with tempfile.TemporaryDirectory() as folder:
        return [*render(Path(folder) / "site"), *problems(Path(folder) / "site")]


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1]))) if len(sys.argv) > 1 else rendered_problems()
    print("\n".join(found) if found else "Every link, anchor and asset of the site resolves.")
    sys.exit(bool(found))
