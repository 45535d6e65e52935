"""A copy of each lesson for Google Colab, and on the lesson's page the button that opens it there.

Colab opens a notebook of a repository on GitHub, but has neither the package nor the files beside the notebook. So the site holds copies,
whose first code cell fetches both. The repository's address is `git_url` of settings.ini; without one there is neither copy nor button.
"""
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin

from project import ROOT, SETTINGS, read_notebook

FOLDER = "colab"  # of the site
TITLE = re.compile(r'(<header id="title-block-header".*?)(?=</header>)', re.DOTALL)
MARKDOWN_LINK = re.compile(r"(?<=\]\()[^)\s]+")
IMPORTED = {"nbdev", "fastcore", "execnb", "matplotlib", "triton"}  # what pages import, of the requirements for developers
SET_UP = """\
# Only on Colab, which lacks this workbook: fetch it, and install what its pages import. Elsewhere this does nothing.
import os, sys
from importlib.util import find_spec
if find_spec("workbook") is None:
    if not os.path.exists("{name}"):
        !git clone --quiet --depth 1 --branch {branch} {repository} {name}
    %pip install --quiet {requirements}
    sys.path.insert(0, os.path.abspath("{name}"))
    os.chdir("{name}/nbs{folder}")
    # Cells marked `#| cuda` have the sizes of an H200. Without a GPU they show the outputs that were saved there.
    os.environ["CUDA_VISIBLE_DEVICES"] = \"\""""


def opens_there(src: str) -> bool:
    "Is this notebook under nbs/ a lesson or a page of puzzles? Those run on any CPU, with nothing but the repository"
    return bool(re.match(r"(puzzles/)?\d+_", src))


def colab_url(src: str, repository: str, branch: str) -> str:
    "Where Colab opens the copy of a notebook; empty where the repository has no address on GitHub"
    found = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)/?", repository)
    return f"https://colab.research.google.com/github/{found[1]}/blob/{branch}/{SETTINGS['DEFAULT']['doc_path']}/{FOLDER}/{src}" if found else ""


def requirements() -> list[str]:
    "What pages import beside the workbook"
    settings = SETTINGS["DEFAULT"]
    developers = [line.partition(";")[0] for line in settings["dev_requirements"].split()]
    return settings["requirements"].split() + [line for line in developers if re.match(r"[\w-]+", line)[0] in IMPORTED]


def set_up(src: str, repository: str, branch: str) -> str:
    "The source of a copy's first code cell"
    asked = " ".join(f'"{line}"' for line in requirements())
    folder = "/".join(["", *Path(src).parts[:-1]])
    return SET_UP.format(name=SETTINGS["DEFAULT"]["repo"], repository=repository, branch=branch, requirements=asked, folder=folder)


def copy_for_colab(nb: dict, source: str, link: Callable[[str], str]) -> dict:
    "A notebook without outputs, with its first code cell below the title and links that lead to the site"
    cells = [dict(cell) for cell in nb["cells"]]
    for cell in cells:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
        else:
            cell["source"] = MARKDOWN_LINK.sub(lambda found: link(found[0]), cell["source"])
    first = {"cell_type": "code", "id": "colab", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nb | {"cells": [*cells[:1], first, *cells[1:]], "metadata": {"kernelspec": kernel}}


def with_button(page: str, url: str) -> str:
    "A rendered page with the button below its title"
    button = f'<a class="fl-colab" href="{html.escape(url)}" title="Run this page in the browser, on a computer of Google\'s">Open in Colab</a>'
    return TITLE.sub(lambda found: found[1] + button, page, count=1)


def add_all(site, repository: str, branch: str, address: str) -> None:
    "Write the copies into a rendered site, which is served at `address`, and the buttons into its pages"
    for src, page in site.pages.items():
        url = colab_url(str(src), repository, branch)
        if not url or not opens_there(str(src)):
            continue
        path, copy = site.out / page.out, site.out / FOLDER / src
        path.write_text(with_button(path.read_text(encoding="utf-8"), url), encoding="utf-8")
        here = f"{address}/{page.out.as_posix()}"
        nb = copy_for_colab(read_notebook(ROOT / "nbs" / src), set_up(str(src), repository, branch),
                            lambda href: urljoin(here, site.resolve(href, page, record=False)))
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
