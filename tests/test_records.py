"""Records of measurements: kept whole, in order, and told apart where they are shown."""
import json
import re

import pytest
import torch

from workbook.records import (Check, caption, figures_of, linear_losses, load_results, logits_losses, machine_line, machine_name, prediction_table, record,
                                    records_by_name, records_over_ranks, results_table, source_line, versions)

RECORD = dict(name="tiles", shape=dict(N=2, H=3, V=4), dtype="float32", machine="toy", versions={}, commit="abc", date="2026-11-21",
              figures=dict(ratio=1.5, seconds=0.1, extra=2**20), stage="02_tiles")


def test_record_replaces_the_same_measurement_alone(tmp_path):
    path = tmp_path / "new folder" / "02_tiles.json"
    write = lambda name, n, dtype, **figures: record(path, name, dict(N=n), dtype, **figures)
    write("a", 1, torch.float32, seconds=1.0)
    write("a", 2, torch.float32, seconds=2.0)
    write("a", 1, torch.bfloat16, seconds=3.0)
    write("b", 1, torch.float32, seconds=4.0)
    last = write("a", 1, torch.float32, seconds=5.0, extra=7)
    records = load_results(path)
    assert [r["figures"]["seconds"] for r in records] == [2.0, 3.0, 4.0, 5.0]
    assert records[-1] == dict(last, stage="02_tiles") and "stage" not in path.read_text(encoding="utf-8")


def test_a_library_that_is_absent_leaves_its_earlier_measurement(tmp_path):
    file, of = tmp_path / "results.json", lambda **figures: record(tmp_path / "results.json", "peer", dict(N=1), "bfloat16", **figures)
    of(reason="ModuleNotFoundError: No module named 'peer'")
    assert "reason" in load_results(file)[0]["figures"]
    measured = of(seconds=1.0)
    assert of(reason="ImportError: peer needs another") == measured and load_results(file)[0]["figures"] == dict(seconds=1.0)
    of(reason="OutOfMemoryError: too large")
    assert load_results(file)[0]["figures"] == dict(reason="OutOfMemoryError: too large")



def test_record_says_where_when_and_with_what(tmp_path, device):
    entry = record(tmp_path / "r.json", "naïve – 1", dict(N=1, H=2, V=3), torch.float16, device, ratio=1.5)
    assert entry["machine"] == machine_name(device) and entry["dtype"] == "float16"
    assert entry["versions"]["torch"] == torch.__version__ and re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"])
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8")) == [entry]
    assert "float16, N 1 × H 2 × V 3" in caption(entry) and entry["machine"] in machine_line(device)


def test_a_record_names_the_version_of_the_code_that_ran(monkeypatch):
    monkeypatch.setattr("fusedloss.__version__", "9.8.7")
    assert versions()["fusedloss"] == "9.8.7" and machine_line().endswith("fusedloss 9.8.7")


def test_failed_record_leaves_the_file_as_it_was(tmp_path):
    record(tmp_path / "r.json", "a", {}, torch.float32, ratio=1.0)
    before = (tmp_path / "r.json").read_bytes()
    with pytest.raises(TypeError):
        record(tmp_path / "r.json", "b", {}, torch.float32, ratio=torch.ones(1))
    assert (tmp_path / "r.json").read_bytes() == before


def test_results_of_a_folder_come_in_order_of_files(tmp_path):
    for stage in ("02_tiles", "01_baseline"):
        record(tmp_path / f"{stage}.json", "a", {}, torch.float32, ratio=1.0)
    (tmp_path / "notes.txt").write_text("no record")
    assert [r["stage"] for r in load_results(tmp_path)] == ["01_baseline", "02_tiles"]
    assert load_results(tmp_path / "absent.json") == load_results(tmp_path / "absent") == []


def test_losses_of_a_layer_and_of_logits_are_told_apart():
    logits, sweep = dict(RECORD, shape=dict(N=2, V=4)), dict(RECORD, shape={}, figures=dict(seconds=1.0))
    product = dict(RECORD, figures=dict(rate=1.0))
    records = [sweep, logits, RECORD, product, dict(RECORD, name="b"), dict(logits, figures=dict(seconds=1.0)), dict(logits, name="c")]
    assert linear_losses(records) == [RECORD, dict(RECORD, name="b")]
    assert logits_losses(records) == [logits, dict(logits, name="c")]
    assert linear_losses([]) == logits_losses([]) == []


def test_results_table_skips_records_without_a_ratio():
    other = dict(RECORD, figures=dict(rate=1.0))
    assert results_table([other, RECORD]).rows == [["02_tiles", "tiles", "100 ms", "×1.50", "1 MiB"]]
    assert results_table([]).rows == []


def test_line_under_a_table_names_each_run_once():
    runs = [RECORD, dict(RECORD, name="b", figures={}), dict(RECORD, commit="abd"), dict(RECORD, machine="other")]
    assert source_line(runs, "make x") == "other, 2026-11-21, commit abc; toy, 2026-11-21, commit abc; toy, 2026-11-21, commit abd; reproduce with `make x`"
    assert "`make x`" in source_line([], "make x") and "commit" not in source_line([], "make x")


def test_miss_without_a_cause_is_unexplained():
    checks = [Check("a", 1.0, 1.4), Check("b", 1.0, 1.6), Check("c", 1.0, 0.6), Check("d", 2**20, 2**22, "B", "cache"), Check("e", 3.0, 2.0)]
    table = prediction_table(checks)
    assert [row[-1] for row in table.rows] == ["", "unexplained", "unexplained", "cache", ""]
    assert table.rows[3] == ["d", "1 MiB", "4 MiB", "×4.00", "cache"]


def test_figures_are_those_of_a_dtype_and_sizes(tmp_path):
    path = tmp_path / "00_page.json"
    path.write_text(json.dumps([dict(name="a", dtype="bfloat16", shape=dict(N=n, V=3), figures=dict(ratio=n)) for n in (1, 2)]), encoding="utf-8")
    assert (figures_of(path, N=1), figures_of(path, V=3), figures_of(path, "float16")) == ({"a": {"ratio": 1}}, {"a": {"ratio": 2}}, {})
    assert records_by_name(path, V=3)["a"]["shape"] == dict(N=2, V=3)
    path.write_text("[]", encoding="utf-8")
    assert records_by_name(path) == {}, "the file as it is now"


def test_records_over_ranks_are_of_the_last_machine_that_has_several(tmp_path):
    path = tmp_path / "00_page.json"
    measured = [("old", 4), ("old", 1), ("new", 2), ("new", 1), ("last", 1)]
    path.write_text(json.dumps([dict(name="a", dtype="bfloat16", machine=machine, shape=dict(N=8, R=r)) for machine, r in measured]), encoding="utf-8")
    assert {key: r["machine"] for key, r in records_over_ranks(path, N=8).items()} == {("a", 2): "new", ("a", 1): "new"}
    assert (records_over_ranks(path, N=9), records_over_ranks(path, "float32")) == ({}, {})
