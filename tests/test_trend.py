"""`make bench`: what a commit's file holds, and the picture of the last commits."""
import json
import re

import pytest
import torch

from project import ROOT, read_notebook
from test_records import RECORD
from workbook import trend
from workbook.records import machine_name
from workbook.trend import CASES, Case, last_commits, measure_commit, trend_picture

SMALL = [case for case in CASES if case.device == "cpu" and "time" in case.ratios]


def entry(commit, machine="toy", **more):
    "A record of `cross_entropy` at a commit"
    figures = dict(time=1.5, time_low=1.4, time_high=1.6) | more.pop("figures", {})
    return RECORD | dict(name="cross_entropy", shape=dict(N=4, V=8), machine=machine, commit=commit, figures=figures) | more


def written(folder, *records):
    "Each in the file of its commit"
    for i, r in enumerate(records):
        (folder / f"2026110{i}T000000-{r['commit']}.json").write_text(json.dumps([{k: v for k, v in r.items() if k != "stage"}]), encoding="utf-8")


def test_a_commit_has_one_file_of_ratios(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = measure_commit(tmp_path / "new", SMALL, rounds=1, seconds=1e-4)
    again = measure_commit(tmp_path / "new", SMALL, rounds=1, seconds=1e-4)
    assert path == again and [*path.parent.iterdir()] == [path] and re.fullmatch(r"\d{8}T\d{6}-(\w+\+?|unknown)\.json", path.name)
    records = json.loads(path.read_text(encoding="utf-8"))
    assert [(r["name"], r["shape"], r["dtype"]) for r in records] == [(case.name, case.sizes, "float32") for case in SMALL]
    for r in records:
        assert r["machine"] == machine_name() and {"commit", "date", "versions"} < r.keys() and r["figures"].keys() == {"time", "time_low", "time_high"}
        assert 0 < r["figures"]["time_low"] <= r["figures"]["time"] <= r["figures"]["time_high"]


def test_a_machine_without_a_gpu_measures_the_part_of_the_cpu(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(trend, "measure_case", lambda case, *how: measured.append(case) or entry("a"))
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        measure_commit(tmp_path)
    assert {case.device for case in measured[:-len(CASES)]} == {"cpu"} and measured[-len(CASES):] == CASES


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_both_losses_are_one(case):
    "With the same gradients, of small sizes: a ratio compares equals"
    ours, eager = case.make("cpu", torch.float64, **case.sizes).values()
    for a, b in zip(ours(), eager()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)  # the eager softmax is fp32


def test_time_is_of_the_same_rounds_and_memory_is_traced(tmp_path, monkeypatch):
    asked = []
    def in_turn(runs, device, rounds, seconds):
        asked.append(([*runs], device, rounds, seconds))
        return dict(ours=[3.0, 8.0, 5.0], eager=[1.0, 2.0, 2.5])
    monkeypatch.setattr(trend, "time_in_turn", in_turn)
    make = lambda device, dtype, n: dict(ours=lambda: torch.ones(n) + 1, eager=lambda: torch.ones(4 * n) + 1)
    figures = trend.measure_case(Case("loss", make, dict(n=8), dtype=torch.float32, device="cpu"), tmp_path / "a.json", 3, 0.1)["figures"]
    assert asked == [(["ours", "eager"], "cpu", 3, 0.1)] and figures["time"] == 3.0 and figures["memory"] == 0.25


def test_the_last_commits_come_in_order(tmp_path):
    written(tmp_path, *(entry(f"c{i}") for i in range(5)))
    assert [r["commit"] for r in last_commits(tmp_path, 3)] == ["c2", "c3", "c4"]
    assert last_commits(tmp_path / "none") == []


def test_a_later_commit_sorts_after_an_earlier_one(tmp_path, monkeypatch):
    names = []
    for stamp in ("1700000000", "999999999", "1800000000"):
        monkeypatch.setattr(trend, "git_text", lambda *args: stamp)
        names.append(trend.commit_path(tmp_path).name)
    assert sorted(names) == [names[1], names[0], names[2]] and names[0].startswith("20231114T221320-")


def test_the_picture_has_a_row_for_each_machine_and_ratio(tmp_path):
    written(tmp_path, entry("aaaaaaaaaa"), entry("bbbbbbbbbb", figures=dict(time=0.5, memory=0.25)), entry("cccccccccc", "another toy"))
    drawn = trend_picture(last_commits(tmp_path))
    for text in ("time, ours / eager: toy", "memory, ours / eager: toy", "time, ours / eager: another toy", "aaaaaaa", "ccccccc", "cross_entropy"):
        assert f">{text}</text>" in drawn.svg or f">{text}<" in drawn.svg, text
    assert "bbbbbbb" not in drawn.svg, "the ends name the commits"
    assert drawn.alt == ("Ours divided by eager PyTorch at each commit. time on another toy: cross_entropy from ×1.50 to ×1.50; "
                         "memory on toy: cross_entropy from ×0.25 to ×0.25; time on toy: cross_entropy from ×1.50 to ×0.50.")
    assert drawn.caption.startswith("3 commits, 2026-11-21 to 2026-11-21.")


@pytest.mark.parametrize("records", ((), ("aaaaaaaaaa", "bbbbbbbbbb")))
def test_the_page_draws_what_there_is(tmp_path, monkeypatch, records):
    "And says nothing without a record"
    (tmp_path / "results" / "trend").mkdir(parents=True)
    written(tmp_path / "results" / "trend", *map(entry, records))
    monkeypatch.chdir(tmp_path)
    cell, = (c["source"] for c in read_notebook(ROOT / "nbs" / "25_results.ipynb")["cells"] if "last_commits(" in c["source"])
    shown = []
    exec(cell, dict(last_commits=last_commits, trend_picture=trend_picture, Markdown=str, display=lambda *parts: shown.extend(parts)))
    assert len(shown) == (2 if records else 0) and (not records or shown[0].startswith("## From commit to commit") and "2 commits" in shown[1].caption)


def test_the_workflow_keeps_the_file():
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert "- run: make bench" in text and f"path: {trend.FOLDER.relative_to(ROOT).as_posix()}/*.json" in text
