"""A page whose kernels changed after its run on a GPU is listed, with the changes."""
import json
import shutil
import subprocess

import pytest
from outdated import commits, files_of, measured, outdated
from project import ROOT, notebooks, read_notebook

CELL = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "source": "#| cuda\n#| measures kernels ctc.cu\nf()"}


def test_names_lead_to_files():
    assert measured({"cells": [CELL, dict(CELL, source="x = 1")]}) == ["ctc.cu", "kernels"]
    assert [path.relative_to(ROOT).as_posix() for path in files_of("core.softmax")] == ["fusedloss/core/softmax.py"]
    assert [path.name for path in files_of("ctc.cu")] == ["ctc.cu", "common.cuh"]
    with pytest.raises(ValueError, match="expected a module or a CUDA source, got nothing"):
        files_of("nothing")


def test_commits_of_outputs_and_records_are_listed(tmp_path):
    (tmp_path / "nbs" / "results").mkdir(parents=True)
    made = {"machine": "NVIDIA H200", "date": "2020-01-01", "commit": "aaa", "cells": ["a"]}
    (tmp_path / "nbs" / "1_one.ipynb").write_text(json.dumps({"cells": [CELL], "metadata": {"fusedloss": {"gpu": made}}}))
    records = [{"machine": "NVIDIA H200", "commit": "bbb"}] * 2 + [{"machine": "a laptop's", "commit": "ccc"}]
    (tmp_path / "nbs" / "results" / "2_two.json").write_text(json.dumps(records))
    assert list(commits(tmp_path)) == ["bbb: 2 of 3, on 2_two", "aaa: 1 of 3, on 1_one"]


def test_every_page_names_files_that_are_there():
    names = {name for path in notebooks() for name in measured(read_notebook(path))}
    assert names and all(files_of(name) for name in names)


def test_a_page_is_listed_after_a_change_of_its_kernel(tmp_path):
    if not shutil.which("git"):
        pytest.skip("no git on this machine")

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c", *args], check=True, capture_output=True, text=True).stdout.strip()

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def page(commit: str) -> None:
        made = {"machine": "NVIDIA H200", "date": "2020-01-01", "commit": commit, "cells": ["a"]}
        write("nbs/1.ipynb", json.dumps({"cells": [dict(CELL, source="#| cuda\n#| measures kernels\nf()")], "metadata": {"fusedloss": {"gpu": made}}}))

    git("init")
    write("fusedloss/kernels.py", "x = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    page(git("rev-parse", "HEAD") + "+")
    assert list(outdated(tmp_path)) == []
    write("fusedloss/kernels.py", "x = 2\n")
    git("commit", "-am", "a faster kernel")
    title, change = outdated(tmp_path)
    assert title.startswith("nbs/1.ipynb: made 2020-01-01") and change.endswith("a faster kernel")
    page("0123456789")  # of a history that is not here: the date counts
    assert len(list(outdated(tmp_path))) == 3
