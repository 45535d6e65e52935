"""Render the notebooks and the API reference to docs/, or to another folder.

    python tools/build_site.py [FOLDER]
"""
import ast
import logging
import os
import re
import shutil
import sys
import tempfile
from functools import cache
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath

from fontTools import subset
from latex2mathml.converter import convert
from nbdev.processors import FilterDefaults
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve_drv import exec_nb
from smalldocs import api as smalldocs_api
from smalldocs import highlight as smalldocs_highlight
from smalldocs import site as smalldocs
from smalldocs.config import Project, load

import colab
import reference
from glossary_links import link_stages
from search_index import index_script, with_search
from site_pages import CARD, LOST, finish_all, prepare, source_links
from project import ROOT, SETTINGS, copy_tree, notebooks, read_notebook

logging.getLogger("fontTools").setLevel(logging.ERROR)  # the icon font has two bytes too many
VENDOR = smalldocs.ASSETS / "vendor"
LICENSED = ("bootstrap", "bootstrap-icons", "fuse")  # folders of VENDOR that the site serves
LIBRARY = re.compile(r'<section id="in-the-library" class="level2">\s*(<h2.*?</h2>)(.*)</section>', re.DOTALL)
OPENER = """<script>
const openTarget = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let fold = target?.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  target?.scrollIntoView();
};
addEventListener("hashchange", openTarget);
openTarget();
</script>"""
MATH = re.compile(r'<span class="math (inline|display)">\\[(\[](.*?)\\[)\]]</span>', re.DOTALL)


def binding_cells(nb: dict) -> dict[str, int]:
    "For every name that a code cell binds at its top level, the number of the first such cell"
    found = {}
    for number, cell in enumerate(nb["cells"]):
        for node in ast.parse(cell["source"]).body if cell["cell_type"] == "code" else ():
            targets = getattr(node, "targets", [getattr(node, "target", node)])
            for name in filter(None, (getattr(t, "id", getattr(t, "name", None)) for t in targets)):
                found.setdefault(name, number)
    return found


def blob_url(project: Project) -> str:
    "Where the repository shows its files"
    return f"{project.website['repo-url']}/blob/{project.website['repo-branch']}"


def to_mathml(page: str) -> str:
    "TeX becomes MathML here, so that the page needs no script and no font for it"
    unescape = smalldocs.html.unescape
    return MATH.sub(lambda m: convert(unescape(m[2]), display="block" if m[1] == "display" else "inline"), page)


def fold_library(page: str) -> str:
    "The last section of a page, if it is the library's, shows its heading until it is opened, also by a link into it"
    page = page.replace('<h2 class="anchored" data-anchor-id="in-the-library">', "<h2>")  # what opens a fold holds no link
    return LIBRARY.sub(rf'<details class="fl-library" id="in-the-library">\n<summary>\1</summary>\2</details>\n{OPENER}', page)


class Site(smalldocs.Site):
    "A smalldocs site that serves everything itself and depends on nothing but its sources"

    def read(self, src: PurePosixPath) -> smalldocs.Page:
        "Name a page after its module, as nbdev does"
        page = super().read(src)
        page.out = src.with_name(LOST if src.stem == "not_found" else page.front.pop("output-file", page.out.name))
        if src.suffix == ".ipynb":
            page.meta = page.meta | {"code-links": source_links(str(src), self.project.website["repo-url"])}
        return page

    def load_symbols(self) -> None:
        "What the reference leaves out, constants, kernels and helpers, links to the cell that binds it"
        super().load_symbols()
        for src, page in self.pages.items():
            module = sys.modules.get(f"fusedloss.{page.out.stem}")
            if src.suffix == ".ipynb" and module:
                cells = binding_cells(read_notebook(self.root / src))
                names = [name for name in cells if hasattr(module, name) and name not in self.symbols]
                self.symbols |= {name: f"/{src}#cell-{cells[name]}" for name in names}
        self.symbols |= {name: f"/{reference.PAGE}#{anchor}" for name, anchor in reference.anchors().items()}

    def resolve(self, href: str, page: smalldocs.Page | None, record: bool = True) -> str:
        "A link out of nbs/ leads to the repository"
        folder = page.src.parent if page else ""
        name = smalldocs.posixpath.normpath(f"nbs/{folder}/{href}")
        if href.startswith("../") and not name.startswith("nbs/") and (ROOT / name).is_file():
            return f"{blob_url(self.project)}/{name}"
        return super().resolve(href, page, record)

    def render_page(self, page: smalldocs.Page) -> None:
        "Without `math` in its environment the page asks for no script; what follows the lesson is folded"
        super().render_page(page)
        if page.env.pop("math", False):
            page.html = to_mathml(page.html)
        page.html = fold_library(page.html)

    def copy_assets(self, nav) -> None:
        "The themes import one Bootstrap; of the icons only those in use remain"
        super().copy_assets(nav)
        libs = self.out / "site_libs"
        shutil.copy(VENDOR / "bootstrap" / "bootstrap.min.css", libs / "bootstrap")
        copy_licences(libs)
        for name in ("math.woff", "math.LICENSE", CARD):
            shutil.copy(ROOT / "nbs" / name, self.out)
        trim_icons(self.out)

    def write_sitemap(self) -> None:
        "None: a sitemap dates pages by their files, and a fresh clone has new dates"

    def write_search(self) -> None:
        "The index as a script, and the search that reads it"
        (self.out / "search.js").write_text(index_script(list(self.pages.values())), encoding="utf-8")
        script = self.out / "site_libs" / "smalldocs.js"
        script.write_text(with_search(script.read_text(encoding="utf-8")), encoding="utf-8")


def copy_licences(libs: Path) -> None:
    "The licences of what others made, beside it; THIRD_PARTY.md lists them"
    for name in LICENSED:
        shutil.copy(VENDOR / name / "LICENSE", libs / name)
    (libs / "smalldocs.LICENSE").write_text(distribution("smalldocs").read_text("licenses/LICENSE"), encoding="utf-8")


def trim_icons(out: Path) -> None:
    "Keep the icons that pages and styles name"
    libs = out / "site_libs"
    css = libs / "bootstrap-icons" / "bootstrap-icons.min.css"
    pages = "".join(page.read_text(encoding="utf-8") for page in out.rglob("*.html"))
    styled = re.findall(r'content: "\\(f[0-9a-f]{3})"', (libs / "smalldocs.css").read_text(encoding="utf-8"))
    text, used, named = css.read_text(encoding="utf-8"), set(styled), set(re.findall(r"\bbi-([\w-]+)", pages))
    for rule, name, code in re.findall(r'(\.bi-([\w-]+)::before\{content:"\\(\w+)"\})', text):
        if name in named:
            used.add(code)
        else:
            text = text.replace(rule, "")
    css.write_text(re.sub(r'url\("[^)]*\) format\("woff2"\),', "", text), encoding="utf-8")
    (css.parent / "fonts" / "bootstrap-icons.woff2").unlink()
    trim_font(css.parent / "fonts" / "bootstrap-icons.woff", [int(code, 16) for code in used])


def trim_font(path: Path, unicodes: list[int]) -> None:
    "Keep a font's glyphs for these code points"
    options = subset.Options(flavor="woff", recalc_timestamp=False)
    font = subset.load_font(path, options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=unicodes)
    subsetter.subset(font)
    subset.save_font(font, path, options)


def process(work: Path) -> Path:
    "A copy of the notebooks, through nbdev's processors"
    copy_tree(work)
    os.chdir(work)  # nbdev finds its settings from the working directory
    refresh_quarto_yml()
    for path in notebooks(work):
        prepare(path)
        exec_nb(path, path, FilterDefaults)
    return work / "nbs"


def expand_sections(root: Path, contents: list) -> None:
    "A pattern in the sidebar, at any depth, becomes the pages it matches"
    for entry in contents:
        inside = entry.get("contents") if isinstance(entry, dict) else None
        if isinstance(inside, list):
            expand_sections(root, inside)
        elif inside and not inside.startswith("api/"):  # the reference is written later
            entry["contents"] = sorted(path.relative_to(root).as_posix() for path in root.glob(inside))


def address() -> str:
    "Where the site is served"
    return SETTINGS["DEFAULT"]["doc_host"] + SETTINGS["DEFAULT"]["doc_baseurl"]


def footer(project: Project) -> dict[str, str]:
    "The version, the licence and the repository, at the end of every page; once there is a release, its pages too"
    released = f" · [last release]({address()}/stable/)" if SETTINGS["DEFAULT"]["install_from"] == "index" else ""
    return {"left": f"fusedloss {SETTINGS['DEFAULT']['version']}{released}", "center": "Apache 2.0", "right": f"[Repository]({project.website['repo-url']})"}


def build(out: Path) -> list[str]:
    "Write the whole site to `out`: its pages, and the plans behind the slider; return the renderer's complaints"
    complaints = render(out)
    import build_widget
    build_widget.fill_all(out)
    return complaints


def render(out: Path) -> list[str]:
    "Write the pages to `out`; return the renderer's complaints"
    sys.path.insert(0, str(ROOT))  # the package of this tree, not one that is installed
    import build_movement
    smalldocs_api.line_of = cache(smalldocs_api.line_of)  # else every class has its module parsed anew, often
    smalldocs_highlight.css_class = cache(smalldocs_highlight.css_class)  # most tokens are there many times
    with tempfile.TemporaryDirectory() as folder:
        project = load(process(Path(folder).resolve()))
        project.config["project"]["output-dir"] = "../site"
        repository = project.website["repo-url"]
        project.smalldocs["api"] |= {"root": str(ROOT), "source": reference.tag_url(repository)}
        project.website.update({"favicon": "favicon.svg", "page-footer": footer(project)})
        reference.fill(project.root / reference.PAGE, repository)
        expand_sections(project.root, project.website["sidebar"]["contents"])
        site = Site(project, quiet=True)
        site.build()
        link_stages(site.out)
        build_movement.fill_all(site.out)
        colab.add_all(site, repository, project.website["repo-branch"], address())
        finish_all(site.out, address())
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(site.out, out)
    return [line for line in site.warnings if "output-file" not in line]  # `read` does what it asks


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    complaints = build(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "docs")
    print("\n".join(complaints) or "The site is built.")
    sys.exit(bool(complaints))
