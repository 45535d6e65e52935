"""Every code block of the home page, which becomes README.md, of the guide and of CONTRIBUTING.md works: Python is run, commands are looked up."""
import configparser
import functools
import importlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
from project import ROOT, directives, read_notebook

BESIDE = Path(sys.executable).parent
installed = pytest.mark.skipif(not (BESIDE / "nbdev_export").exists(), reason="nbdev's commands are not installed beside this Python")

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"`make ([\w-]+)")
REQUIREMENT = re.compile(r"(?P<name>\w+|\.)(\[(?P<extra>\w+)\])?( @ git\+(?P<url>\S+))?$")


@functools.cache
def pages() -> dict[str, str]:
    "The home page, from which README.md is made, and the guide, with the code that they show; and CONTRIBUTING.md"
    return {"README.md": shown("index"), "guide": shown("guide"), "CONTRIBUTING.md": (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")}


def shown(page: str) -> str:
    "What a reader sees of a notebook's sources, as Markdown"
    cells = [cell for cell in read_notebook(ROOT / "nbs" / f"{page}.ipynb")["cells"] if not {"hide", "echo"} & directives(cell["source"])]
    return "\n\n".join(cell["source"] if cell["cell_type"] == "markdown" else f"```python\n{cell['source']}\n```" for cell in cells)


def blocks(language: str) -> dict[str, list[str]]:
    "The blocks of a language, in order, by page"
    return {page: [code for found, code in BLOCK.findall(text) if found == language] for page, text in pages().items()}


def commands() -> list[list[str]]:
    "The words of every command line in a block"
    return [words for found in blocks("sh").values() for code in found for line in code.splitlines()
            if (words := shlex.split(line, comments=True))]


@functools.cache
def settings() -> dict[str, str]:
    parser = configparser.ConfigParser(delimiters="=")
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(parser["DEFAULT"])


@functools.cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def complaint(words: list[str]) -> str:
    "What is wrong with a command, after what it sets in the environment; empty if nothing"
    words = words[sum(1 for _ in takewhile(re.compile(r"[A-Z_]+=").match, words)):]
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        return "".join(f"make has no {target}" for target in targets if target not in make_targets())
    if words[:2] == ["pip", "install"]:
        asked = REQUIREMENT.match(words[2])
        if not asked or asked["name"] not in (".", settings()["lib_name"]) or asked["extra"] and f"{asked['extra']}_requirements" not in settings():
            return f"pip is asked for {words[2]}"
        origin = settings()["git_url"] if settings()["install_from"] == "repository" else None
        return "" if asked["name"] == "." or asked["url"] == origin else f"the package is not at {asked['url']}"
    if words[0] == "torchrun":
        return many_gpus_complaint(words)
    name = Path(words[0])
    known = name.name in ("pytest", "python") or (BESIDE / name.name).exists()
    return "" if known and name.parent == Path(".venv/bin") else f"no command {words[0]}"


def many_gpus_complaint(words: list[str]) -> str:
    "Whether the program is there, and has the cases that it is asked for"
    i = next(i for i, word in enumerate(words) if word.endswith(".py"))
    if not (ROOT / words[i]).is_file():
        return f"no program {words[i]}"
    source = (ROOT / words[i]).read_text(encoding="utf-8")
    cases = re.findall(r'"(\w+)": ', source[source.index("CASES = {"):])
    return "".join(f"{words[i]} has no case {case}" for case in words[i + 1:] if case not in cases)


def run_python(code: list[str], tmp_path: Path) -> subprocess.CompletedProcess:
    "Blocks in one process, on a CPU; its only rank is told a free port, as torchrun would"
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1",
               MASTER_PORT=port)
    return subprocess.run([sys.executable, "-W", "ignore", "-c", "\n".join(code)], cwd=tmp_path, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("page", ["README.md", "guide", "CONTRIBUTING.md"])
def test_python_blocks_run_in_order(page, tmp_path):
    code = blocks("python")[page]
    assert code or page == "CONTRIBUTING.md"
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]


@installed
def test_commands_exist():
    found = commands()
    assert len(found) > 8 and [c for words in found if (c := complaint(words))] == []


def test_targets_that_prose_names_exist():
    named = {page: TARGET.findall(text) for page, text in pages().items()}
    assert named["README.md"] and named["CONTRIBUTING.md"]
    assert {page: [t for t in targets if t not in make_targets()] for page, targets in named.items()} == dict.fromkeys(named, [])


@pytest.mark.skipif(not shutil.which("make"), reason="no make on this machine")
def test_make_can_be_read():
    targets = sorted({word for words in commands() if words[0] == "make" for word in words[1:] if "=" not in word})
    result = subprocess.run(["make", "--dry-run", "PYTHON=python3", *targets], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@installed
@pytest.mark.parametrize("line, expected", [
    ("make tset", "make has no tset"), ('pip install "fusedloss @ git+https://example.org/x"', "the package is not at https://example.org/x"),
    ('pip install "fusedloss[cuda99] @ git+https://example.org/x"', "pip is asked for"),
    ("torchrun --nproc-per-node 4 examples/few_gpus.py", "no program"), ("torchrun examples/many_gpus.py sparse", "has no case sparse"),
    (".venv/bin/nbdev_exprot", "no command")])
def test_a_wrong_command_is_noticed(line, expected):
    assert expected in complaint(shlex.split(line))


def test_one_setting_says_where_to_install_from():
    "For README.md and the site"
    installing = pytest.importorskip("build_readme", exc_type=ImportError).installing
    page, url = shown("index"), settings()["git_url"]
    repository, index = (installing(page, origin) for origin in ("repository", "index"))
    assert dict(repository=repository, index=index)[settings()["install_from"]] == page, "make docs writes it"
    assert f'\npip install "fusedloss @ git+{url}"\n' in repository and '`"fusedloss[cuda13] @ git+…"`' in repository
    assert "\npip install fusedloss\n" in index and '`"fusedloss[cuda13]"`' in index and "git+" not in index
    assert installing(index, "repository") == repository and installing(repository, "index") == index
    with pytest.raises(SystemExit, match="install_from: expected index or repository, got wheel"):
        installing(page, "wheel")


def test_contributing_names_functions_that_exist():
    named = re.findall(r"`([a-z_]+)\.([a-zA-Z_]+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Where a call goes")[2].partition("## Test")[0])
    assert len(named) > 8
    for module, name in named:
        assert hasattr(importlib.import_module(f"fusedloss.{module}"), name), f"{module}.{name}"
