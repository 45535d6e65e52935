"""A record and a saved output name the commit of the code that made them."""
import shutil
import subprocess

import pytest
import torch

from workbook.records import load_results, record
from workbook.sources import STAMP, commit


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
    (root / "nbs").mkdir()
    (root / "a.py").write_text("x = 1\n")
    (root / "nbs/0.ipynb").write_text("{}")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    return root


def test_the_commit_is_the_last_one(git, project):
    head = git("rev-parse", "--short=10", "HEAD").strip()
    assert commit(project) == commit(project / "nbs") == commit(project / "to be made") == head
    (project / "nbs/0.ipynb").write_text("an output")
    assert commit(project) == head, "pages and records are made from code"


@pytest.mark.parametrize("name", ["a.py", "b.py", "cuda/a.cu"])
def test_changed_code_shows_as_a_plus(git, project, name):
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text("x = 2\n")
    assert commit(project / "nbs") == git("rev-parse", "--short=10", "HEAD").strip() + "+"


def test_a_record_names_the_commit(project):
    entry = record(project / "nbs/results/0.json", "a", {}, torch.float32, ratio=1.0)
    assert entry["commit"] == commit(project) == load_results(project / "nbs/results")[0]["commit"]


def test_a_stamp_stands_for_the_history_where_there_is_none(git, project):
    (project / STAMP).write_text("an old one\n")
    head = commit(project)
    assert head != "an old one", "the history is here"
    (project / STAMP).write_text(f"{head}\n")
    shutil.rmtree(project / ".git")
    assert commit(project / "nbs") == head


def test_the_nearest_project_counts(git, project):
    "A copy with a stamp, inside of a repository that knows nothing of it"
    copy = project / "others"
    copy.mkdir()
    (copy / STAMP).write_text("0123abc\n")
    assert commit(copy) == "0123abc"


@pytest.mark.parametrize("prepare", [[], ["init"]], ids=["no repository", "no commit yet"])
def test_a_folder_without_history_has_no_commit(prepare, git, tmp_path):
    if prepare:
        git(*prepare)
    assert commit(tmp_path / "a project") == "unknown"


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert commit(tmp_path) == "unknown"
