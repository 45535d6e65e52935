"""The site's checker finds each kind of fault; mathematics needs no script; search finds names and stages first."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest
from check_site import INDEX, problems, unlicensed, unused
from colab import IMPORTED, add_all, colab_url, copy_for_colab, opens_there, requirements, set_up, with_button
from search_index import addresses, index_script, with_search
from site_pages import GUIDE, finish, finish_all, prepare, source_links
from project import ROOT, is_stage, notebooks

GOOD = {
    "index.html": '<link rel="stylesheet" href="a.css"><h2 id="here"></h2><a href="sub/page.html#there">x</a><a href="https://example.org">y</a>',
    "sub/page.html": '<p id="there"></p><a href="../index.html#here">x</a><svg><use xlink:href="#there"/></svg>',
    "a.css": "p { color: red }",
    INDEX: 'globalThis.searchIndex = [["index.html","Home",[["","","a"],["here","Here","b"]]]];\n',
}
FAULTS = {
    "dead link": ("index.html", '<a href="gone.html">x</a>', "index.html: gone.html leads nowhere"),
    "dead anchor": ("sub/page.html", '<a href="../index.html#gone">x</a>', "sub/page.html: ../index.html#gone has no such anchor"),
    "script from outside": ("index.html", '<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js from outside"),
    "style from outside": ("index.html", "<style>@import 'https://example.org/x.css';</style>", "loads https://example.org/x.css from outside"),
    "font from outside": ("a.css", "@font-face { src: url(//example.org/x.woff) }", "a.css: //example.org/x.woff is loaded from outside"),
    "a block that is not rendered": ("index.html", "<p>a\n::: {.cell}\nb</p>", "index.html: shows '::: {.cell}', the mark of a block that was not rendered"),
    "dead image": ("index.html", '<img src="gone.png">', "index.html: gone.png leads nowhere"),
    "dead search": (INDEX, 'globalThis.searchIndex = [["index.html","Home",[["gone","Here","b"]]]];\n', f"{INDEX}: index.html#gone has no such anchor"),
}


@pytest.fixture
def report(tmp_path):
    "Write a small site with additions; its problems, as one text"
    def write(name: str = "a.css", text: str = "") -> str:
        pages = GOOD | {name: text if name == INDEX else GOOD.get(name, "") + text}
        for path, content in pages.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content, encoding="utf-8")
        return "\n".join(problems(tmp_path))
    return write


def test_good_site_has_no_problem(report):
    assert report() == ""


def test_a_picture_may_be_in_the_page(report):
    picture = "data:image/png;base64," + "A" * 5000  # longer than a file's name may be
    assert report("index.html", f'<img src="{picture}"><svg><image xlink:href="{picture}"/></svg>') == ""


@pytest.mark.parametrize("name, text, expected", FAULTS.values(), ids=FAULTS)
def test_fault_is_named(report, name, text, expected):
    assert expected in report(name, text)


def test_an_address_is_not_loaded(report):
    assert report("index.html", '<link rel="canonical" href="https://example.org/index.html">') == ""


def test_a_page_is_finished():
    page = finish('<html><head></head><body class="a"><main id="quarto-document-content"><table><th>x</th><th scope="row">y</th><th class="z"></th><thead></table></main></body></html>', "https://example.org/a?b&c")
    assert page.index("<body") < page.index('href="#quarto-document-content"') < page.index("<main")
    assert '<link rel="canonical" href="https://example.org/a?b&amp;c">' in page.partition("</head>")[0]
    assert page.index("tabIndex = 0") < page.index("</body>") and '<td class="z"></td>' in page
    assert page.count('<th scope="col">') == 1 and '<th scope="row">' in page and "<thead>" in page


def test_an_entry_of_the_sidebar_has_no_wrappers():
    entry = '<li class="sidebar-item"><div class="sidebar-item-container"><a href="{}" class="sidebar-item-text sidebar-link{}><span class="menu-text">{}</span></a></div></li>'
    page = finish("<ul>" + entry.format("a.html", '"', "A") + entry.format("b.html", ' active" aria-current="page"', "B &amp; b") + "</ul>", "https://example.org/a")
    for link in ('<a href="a.html" class="sidebar-link">A</a>', '<a href="b.html" class="sidebar-link active" aria-current="page">B &amp; b</a>'):
        assert f'<li class="sidebar-item">{link}</li>' in page
    section = '<div class="sidebar-item-container"><a class="sidebar-item-text sidebar-link"><span class="menu-text">S</span></a><a href="#s"></a></div>'
    assert section in finish(section, "https://example.org/a")


def test_a_page_that_others_link_to_has_a_card():
    head = '<html><head><title>A &amp; B</title><meta name="description" content="About."></head><body></body></html>'
    page = finish(head, "https://example.org/s/a.html", "https://example.org/s")
    for name, value in {"title": "A &amp; B", "description": "About.", "image": "https://example.org/s/card.png"}.items():
        assert f'<meta property="og:{name}" content="{value}">' in page
    assert "<base" not in page


def test_the_lost_page_works_at_any_address():
    assert '<base href="https://example.org/s/">' in finish("<html><head></head></html>", "https://example.org/s/404.html", "https://example.org/s")


def test_a_missing_card_is_named(report):
    assert "index.html: the card gone.png is missing" in report("index.html", '<meta property="og:image" content="https://example.org/s/gone.png">')


def test_an_unused_asset_and_one_without_a_licence_are_named(report, tmp_path):
    report("site_libs/b.js", "1")
    assert list(unused(tmp_path)) == ["site_libs/b.js: no page uses it"]
    assert list(unlicensed(tmp_path)) == ["site_libs/b.js: no licence lies beside it"]


@pytest.mark.thorough
@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="docs/ is not built")
def test_the_built_site_serves_what_it_uses_with_its_licences():
    assert [*unused(ROOT / "docs"), *unlicensed(ROOT / "docs")] == []


def test_a_page_leads_to_its_notebook():
    repository, source, jupyter = source_links("recipes/b.ipynb", "https://example.org/r")
    assert source["href"] == "https://example.org/r/blob/main/nbs/recipes/b.ipynb" and jupyter["href"] == f"/{GUIDE}"


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="docs/ is not built")
@pytest.mark.parametrize("name, up", {"tiles.html": "", "solutions/tiles.html": "../"}.items())
def test_built_pages_say_how_they_are_opened(name, up):
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert f'href="{up}guide.html#open-a-page-in-jupyter"' in page and "/blob/main/nbs/" in page


COLAB = "https://colab.research.google.com/github/o/r/blob/main/docs/colab/02_tiles.ipynb"


def test_colab_opens_a_copy_where_the_repository_has_an_address():
    assert colab_url("02_tiles.ipynb", "https://github.com/o/r", "main") == COLAB
    assert [colab_url("02_tiles.ipynb", address, "main") for address in ("", "https://github.com", "https://example.org/o/r")] == [""] * 3


@pytest.mark.parametrize("address, copies", {"https://github.com/o/r": ["02_tiles.ipynb", "puzzles/1_rows.ipynb"], "": []}.items())
def test_lessons_and_puzzles_have_a_button_and_a_copy(address, copies, tmp_path):
    names = ["02_tiles", "puzzles/1_rows", "guide", "solutions/02_tiles", "recipes/trainer", "tutorials/2_policy"]
    pages = {PurePosixPath(f"{name}.ipynb"): SimpleNamespace(out=PurePosixPath(f"{name}.html")) for name in names}
    for page in pages.values():
        path = tmp_path / page.out
        path.parent.mkdir(exist_ok=True)
        path.write_text('<header id="title-block-header"><h1>A</h1></header>', encoding="utf-8")
    site = SimpleNamespace(pages=pages, out=tmp_path, resolve=lambda href, page, record: href.replace(".ipynb", ".html"))
    add_all(site, address, "main", "https://example.org/s")
    found = [name for name in names if "Open in Colab" in (tmp_path / f"{name}.html").read_text(encoding="utf-8")]
    assert sorted(f"{name}.ipynb" for name in found) == copies
    assert sorted(p.relative_to(tmp_path / "colab").as_posix() for p in tmp_path.rglob("*.ipynb")) == copies


def test_every_lesson_opens_on_colab():
    stages = [p for p in notebooks() if p.parent.name == "nbs"]
    assert [opens_there(p.name) for p in stages] == [is_stage(p) for p in stages]


def test_the_button_is_below_the_title():
    page = '<header id="quarto-header"></header><header id="title-block-header" class="a"><h1>A</h1>{}</header><p>b</p><header></header>'
    before, after = with_button(page.format(""), COLAB).split('<a class="fl-colab" href="' + COLAB)
    assert before == page.partition("{}")[0] and after.endswith(">Open in Colab</a>" + page.partition("{}")[2])


def test_a_copy_for_colab_fetches_the_workbook_first():
    cells = [{"cell_type": "markdown", "id": "a", "source": "# A"},
             {"cell_type": "code", "id": "b", "source": "x = [f](1)", "outputs": [1], "execution_count": 3},
             {"cell_type": "markdown", "id": "c", "source": "[a](b.ipynb#c), [d](https://e.org)"}]
    copy = copy_for_colab({"cells": cells, "metadata": {"fusedloss": {}}, "nbformat": 4}, "1", lambda href: f"<{href}>")
    assert [(cell["id"], cell["source"]) for cell in copy["cells"]] == [
        ("a", "# A"), ("colab", "1"), ("b", "x = [f](1)"), ("c", "[a](<b.ipynb#c>), [d](<https://e.org>)")]
    assert copy["cells"][2]["outputs"] == [] and "fusedloss" not in copy["metadata"] and cells[1]["outputs"] == [1]


def test_colab_installs_what_pages_import():
    names = [re.match(r"[\w-]+", line)[0] for line in requirements()]
    assert names[:2] == ["torch", "numpy"] and set(names[2:]) == IMPORTED


ON_COLAB = """
import importlib.util, json, os, sys
from IPython.core.interactiveshell import InteractiveShell
asked, find = [], importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "workbook" and sys.argv[2] == "without" else find(name)
shell = InteractiveShell.instance()
shell.system = lambda command: (asked.append(command), command.startswith("git") and os.makedirs("fusedloss/nbs/puzzles"))
shell.register_magic_function(lambda line: asked.append(f"pip {line}"), "line", "pip")
assert shell.run_cell(sys.argv[1]).success
print(json.dumps([asked, os.getcwd(), sys.path[0], os.environ.get("CUDA_VISIBLE_DEVICES")]))
"""


@pytest.mark.parametrize("workbook", ["without", "with"])
def test_the_first_cell_fetches_what_is_missing_and_nothing_else(workbook, tmp_path):
    pytest.importorskip("IPython", reason="IPython is not installed")
    source, path = set_up("puzzles/1_rows.ipynb", "https://github.com/o/r", "main"), os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "0", "IPYTHONDIR": str(tmp_path / "ipython")}
    ran = subprocess.run([sys.executable, "-c", ON_COLAB, source, workbook], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    asked, folder, first, devices = json.loads(ran.stdout.splitlines()[-1])
    if workbook == "with":
        assert asked == [] and folder == str(tmp_path) and devices == "0"
    else:
        assert asked[0] == "git clone --quiet --depth 1 --branch main https://github.com/o/r fusedloss" and '"torch>=' in asked[1]
        assert folder == str(tmp_path / "fusedloss" / "nbs" / "puzzles") and first == str(tmp_path / "fusedloss") and devices == ""


def test_outputs_say_where_they_were_made(tmp_path):
    out = {"output_type": "stream", "name": "stdout", "text": ["1"]}
    cells = [{"cell_type": "code", "id": name, "source": [source], "outputs": [out] * n}
             for name, source, n in (("a", "#| cuda\nf()", 1), ("b", "f()", 1), ("c", "#| cuda\nx = 1", 0), ("e", "#| cuda\nh()", 0), ("d", "#| cuda\ng()", 0))]
    made = {"machine": "NVIDIA H200 · python 3", "date": "2026-11-24", "commit": "abc"}
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {"fusedloss": {"page": made, "gpu": made | {"cells": ["a", "c"]}}}}), encoding="utf-8")
    prepare(path)
    *found, last = json.loads(path.read_text(encoding="utf-8"))["cells"]
    notes = [[*output.get("data", {}).values()][0][0] for cell in found for output in cell["outputs"] if "data" in output]
    assert [len(cell["outputs"]) for cell in found] == [2, 1, 0, 0, 1]
    assert notes == ['<p class="fl-small">NVIDIA H200, 2026-11-24, commit abc</p>', '<p class="fl-small">This cell needs a GPU and has not been run on one.</p>']
    assert last["source"] == '<p class="fl-small">Outputs: NVIDIA H200, 2026-11-24, commit abc</p>'


def test_a_folded_cell_says_what_is_inside(tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": ["#| exporti\n", "#| code-fold Check: \"x\" `is` one\n", "x = 1"], "outputs": []}], "metadata": {}}), encoding="utf-8")
    prepare(path)
    assert json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"] == '#| exporti\n#| code-fold: true\n#| code-summary: "Check: \\"x\\" is one"\nx = 1'


def test_a_sitemap_names_every_page(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("index.html", "sub/b.html"):
        (tmp_path / name).write_text("<head></head><body></body>", encoding="utf-8")
    finish_all(tmp_path, "https://example.org/x")
    assert re.findall("<loc>(.*?)</loc>", (tmp_path / "sitemap.xml").read_text(encoding="utf-8")) == ["https://example.org/x/index.html", "https://example.org/x/sub/b.html"]


def test_what_follows_a_lesson_is_folded():
    pytest.importorskip("smalldocs", reason="the site is built by smalldocs")
    from build_site import fold_library
    lesson = '<section id="recap" class="level2"><h2>Recap</h2></section>'
    library = '<section id="in-the-library" class="level2">\n<h2 class="anchored" data-anchor-id="in-the-library">In the library</h2><section id="b" class="level3"><p>x</p></section></section>'
    folded = fold_library(lesson + library)
    assert folded.startswith(lesson + '<details class="fl-library" id="in-the-library">\n<summary><h2>In the library</h2></summary><section id="b"')
    assert "<p>x</p></section></details>" in folded and fold_library(lesson) == lesson


def test_licences_lie_beside_what_others_made(tmp_path):
    pytest.importorskip("smalldocs", reason="the site is built by smalldocs")
    from build_site import LICENSED, VENDOR, copy_licences
    for name in LICENSED:
        (tmp_path / "site_libs" / name).mkdir(parents=True)
        (tmp_path / "site_libs" / name / "a.js").write_text("1", encoding="utf-8")
    (tmp_path / "site_libs" / "smalldocs.js").write_text("1", encoding="utf-8")
    assert len(list(unlicensed(tmp_path))) == len(LICENSED) + 1
    copy_licences(tmp_path / "site_libs")
    assert list(unlicensed(tmp_path)) == []
    notices = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")
    assert all(f"`{name}/`" in notices and (VENDOR / name).is_dir() for name in LICENSED)


def test_everything_others_made_is_in_the_notices():
    notices = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")
    served = {p.relative_to(ROOT / "docs" / "site_libs") for p in (ROOT / "docs" / "site_libs").rglob("*") if p.suffix in {".css", ".js", ".woff"}}
    named = {f"`{p.parts[0]}{'/' * (len(p.parts) > 1)}`" for p in served} - {"`themes/`"}
    assert named and all(name in notices for name in named)


def test_tex_becomes_mathml():
    pytest.importorskip("smalldocs", reason="smalldocs is not installed")
    from build_site import to_mathml
    page = to_mathml(r'<span class="math display">\[\sum_{v=1}^V e^{z_v} &lt; 1\]</span>')
    assert page.startswith('<math xmlns') and 'display="block"' in page and "\\" not in page


CORE = ["01_baseline", "02_tiles", "03_iota", "04_kernels", "06_chunks", "07_recompute", "14_partial_fc", "20_ctc"]


def test_readme_shows_which_loss_a_picture_and_the_core():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "## Which loss do I need?" in text and "pip install" in text
    assert all((ROOT / name).is_file() for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)) and "![" in text
    assert [name for name in CORE if f"](nbs/{name}.ipynb)" not in text] == []


def test_every_lesson_has_a_place_in_the_sidebar():
    listed = (ROOT / "nbs" / "_quarto.yml").read_text(encoding="utf-8")
    assert [p.name for p in notebooks() if is_stage(p) and listed.count(p.name) < 1] == []
    assert "solutions/" not in listed


def searched(src: str, title: str, body: str, *sections: tuple[str, str, str]) -> SimpleNamespace:
    "A page as the renderer hands it to the search"
    found = [{"id": id, "title": heading, "text": text} for id, heading, text in sections]
    src = PurePosixPath(src)
    return SimpleNamespace(src=src, out=src.with_suffix(".html"), title=title, body=body, meta={}, front={"description": "About [it](x.ipynb)."}, env={"search": found})


FENCED = "```python\ndef hidden_helper(x):\n    return x + 1\n```\n"
PAGES = [
    searched("api/ctc.qmd", "fusedloss.ctc", "", ("CTCLoss", "class CTCLoss", "A loss. Parameter Type"), ("CTCLoss.extra_repr", "CTCLoss.extra_repr", "ctc")),
    searched("solutions/20_ctc.ipynb", "Solutions: CTC", "", ("a", "Exercise 1", "ctc")),
    searched("20_ctc.ipynb", "CTC", FENCED, ("paths", "All paths", "Sums of paths. def hidden_helper(x): return x + 1 And more.")),
    searched("reference.ipynb", "Reference", "", ("CTCLoss", "CTCLoss", "ctc as a module"), ("margins.ArcFace", "margins.ArcFace", "a margin")),
    searched("13_margins.ipynb", "Margins", "", ("scale", "Scale", "The margin of ArcFace")),
]


def test_the_index_has_prose_and_names_and_begins_with_what_is_public():
    script = index_script(PAGES)
    assert addresses(script) == ["reference.html", "reference.html#CTCLoss", "reference.html#margins.ArcFace", "13_margins.html", "13_margins.html#scale",
                                 "20_ctc.html", "20_ctc.html#paths", "solutions/20_ctc.html", "solutions/20_ctc.html#a", "api/ctc.html", "api/ctc.html#CTCLoss"]
    assert '["paths","All paths","Sums of paths. And more.","hidden_helper"]' in script and '"About it."' in script and "Parameter" not in script


def first_hits(script: str, queries: list[str]) -> dict[str, str]:
    "What the site's own script finds first"
    node = shutil.which("node") or pytest.skip("the site's script needs node to run outside of a browser")
    search = (ROOT / "tools" / "search.js").read_text(encoding="utf-8")
    ask = f"for (const q of {json.dumps(queries)}) console.log((siteSearch.rank(siteSearch.loaded(searchIndex), q, 9)[0] || {{}}).href);"
    run = subprocess.run([node, "-"], input=f"{script}{search}{ask}", capture_output=True, text=True, check=True)
    return dict(zip(queries, run.stdout.split("\n")))


@pytest.mark.parametrize("query, page", {
    "ctc": "20_ctc.html", "CTCLoss": "reference.html#CTCLoss", "arcface": "reference.html#margins.ArcFace", "margin": "13_margins.html",
    "wav2vec": "20_ctc.html", "cosface": "13_margins.html", "hidden_helper": "20_ctc.html#paths", "sums paths": "20_ctc.html#paths", "nothing": "undefined"}.items())
def test_search_finds_titles_then_names_then_text(query, page):
    assert first_hits(index_script(PAGES), [query]) == {query: page}


HITS = {"ctc": "ctc.html", "semirings": "semirings.html", "linear_cross_entropy": "reference.html#linear_cross_entropy",
       "PartialFC": "reference.html#PartialFC", "recompute": "recompute.html", "fused linear": "recompute.html", "plan": "reference.html#plan",
       "CTCLoss": "reference.html#CTCLoss", "margin": "margins.html", "install": "index.html", "online softmax": "kernels.html", "CLIP": "contrast.html", "rlhf": "logprobs.html",
       "MTP": "losses.html", "RNN-T": "ctc.html", "sphereface": "margins.html"}


def test_searches_of_the_built_site():
    index = ROOT / "docs" / INDEX
    if not index.exists():
        pytest.skip("docs/ is not built")
    found = first_hits(index.read_text(encoding="utf-8"), list(HITS))
    assert {query: hit if "#" in HITS[query] else hit.split("#")[0] for query, hit in found.items()} == HITS


def test_the_renderers_script_searches_as_ours_does():
    smalldocs = pytest.importorskip("smalldocs.site", reason="the site is built by smalldocs")
    script = (smalldocs.ASSETS / "smalldocs.js").read_text(encoding="utf-8")
    made = with_search(script)
    assert "siteSearch.load(offset)" in made and "siteSearch.rank(index, q, limit)" in made and "search.json" not in made
    with pytest.raises(ValueError, match="smalldocs.js: expected once"):
        with_search(script.replace("search.json", "elsewhere.json"))
