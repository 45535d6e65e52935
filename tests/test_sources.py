"""A record names the commit of its sources, and is refused where they differ from it."""
import json
import shutil
import subprocess

import pytest
import torch

from fusedloss.core.records import load_results, record
from fusedloss.core.sources import commit, write_stamp


def page(source: str, *outputs: str) -> str:
    "A notebook of one cell"
    return json.dumps({"cells": [{"cell_type": "code", "source": [source], "outputs": outputs}], "metadata": {}})


@pytest.fixture
def git(tmp_path, monkeypatch):
    "Runs git in a new, empty folder, which is current"
    if not shutil.which("git"):
        pytest.skip("no git on this machine")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    root = tmp_path / "a project"
    root.mkdir()
    monkeypatch.chdir(root)
    return lambda *args: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *args], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def project(git, tmp_path):
    "A committed project of two files; its folder"
    root = tmp_path / "a project"
    (root / "nbs/results").mkdir(parents=True)
    (root / "a.py").write_text("x = 1\n")
    (root / "nbs/0.ipynb").write_text(page("x = 1"))
    (root / ".gitignore").write_text(".commit\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    return root


def test_a_commit_is_named_with_its_sources(git, project):
    first = commit(project)
    assert git("rev-parse", "HEAD").startswith(first.commit) and len(first.sources) == 16
    assert commit(project / "nbs") == first
    (project / "a.py").write_text("x = 2\n")
    git("commit", "-am", "second")
    assert commit(project).sources != first.sources


MADE = {"outputs": ("nbs/0.ipynb", page("x = 1", "an output")), "records": ("nbs/results/0.json", "[]"),
        "site": ("docs/index.html", "a"), "README": ("README.md", "a")}
CHANGED = {"a file": ("a.py", "x = 2\n"), "a notebook's code": ("nbs/0.ipynb", page("x = 2")), "a new file": ("b.py", "x = 1\n"),
           "a new notebook": ("nbs/1.ipynb", page("x = 1")), "no file": ("a.py", None)}


def put(project, name: str, text: str | None) -> None:
    "Write a file of the project, or remove it"
    path = project / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text) if text is not None else path.unlink()


@pytest.mark.parametrize("name, text", MADE.values(), ids=MADE)
def test_what_is_made_from_sources_may_differ(project, name, text):
    before = commit(project)
    put(project, name, text)
    assert commit(project) == before


@pytest.mark.parametrize("name, text", CHANGED.values(), ids=CHANGED)
def test_a_record_of_changed_sources_is_refused(project, name, text):
    head = commit(project).commit
    put(project, name, text)
    with pytest.raises(RuntimeError, match=f"sources: expected those of commit {head}, got changes in {name}"):
        record(project / "nbs/results/new/0.json", "a", {}, torch.float32, ratio=1.0)
    assert not (project / "nbs/results/new").exists()
    with pytest.raises(RuntimeError, match="got changes"):
        write_stamp(project)
    assert not (project / ".commit").exists()


def without_history(project) -> None:
    "What a machine without the history receives"
    write_stamp(project)
    shutil.rmtree(project / ".git")


def test_a_stamp_stands_for_the_history(project):
    before = commit(project)
    without_history(project)
    put(project, *MADE["outputs"])
    assert commit(project / "nbs") == before
    entry = record(project / "nbs/results/0.json", "a", {}, torch.float32, ratio=1.0)
    assert (entry["commit"], entry["sources"]) == before == tuple(load_results(project / "nbs/results")[0][k] for k in ("commit", "sources"))


@pytest.mark.parametrize("kind", CHANGED)
def test_files_are_held_to_the_stamp(project, kind):
    without_history(project)
    put(project, *CHANGED[kind])
    with pytest.raises(RuntimeError, match=f"got changes in {CHANGED[kind][0]}"):
        commit(project)


@pytest.mark.parametrize("change", [True, False])
def test_an_old_stamp_gives_way_to_the_history(git, project, change):
    old = write_stamp(project).commit
    if change: put(project, *CHANGED["a file"])
    git("commit", "-am", "second", "--allow-empty")
    assert commit(project).commit != old


def test_the_nearest_project_counts(git, project):
    "A folder with a stamp inside of a repository that knows nothing of it"
    copy = project.parent / "others" / project.name
    write_stamp(project)
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns(".git"))
    git("-C", str(copy.parent), "init")
    assert commit(copy) == commit(project)


@pytest.mark.parametrize("prepare", [[], ["init"]], ids=["no repository", "no commit yet"])
def test_a_folder_without_history_has_no_commit(prepare, git, tmp_path):
    if prepare:
        git(*prepare)
    assert commit(tmp_path / "a project") == ("unknown", "unknown")


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert commit(tmp_path) == ("unknown", "unknown")
