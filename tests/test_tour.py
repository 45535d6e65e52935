"""The tour: the same answer twice, and no wrong loss gets through."""
import json
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from grids import few, thorough_but
from helpers import need_fonts
from torch.nn import functional as F
from project import ROOT

from fusedloss.baseline import baseline_linear_cross_entropy as baseline
from workbook import tour
from workbook.tour import torch_ctc

SMALL = tour.Sizes(N=128, H=32, K=3, steps=6)
FEW = tour.Sizes(N=4, H=16, K=5, steps=3)
ABSENT = """
import sys
from hidden_modules import hide
hide({'matplotlib', 'IPython', 'ipywidgets', 'nbdev', 'fastcore', 'execnb', 'triton', 'cupy'})
from workbook import tour
tour.CPU_SIZES = tour.READING_SIZES = tour.Sizes(64, 16, 2, 3)
sys.exit(tour.main())
"""


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    "Small sizes, one thread, an empty folder"
    monkeypatch.setattr(tour, "CPU_SIZES", SMALL)
    monkeypatch.setattr(tour, "GPU_SIZES", SMALL)
    monkeypatch.setattr(tour, "READING_SIZES", FEW)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(capsys):
    "Run the command; the exit code, standard output, standard error. Without matplotlib it draws nothing, with it it needs fonts"
    if find_spec("matplotlib"):
        need_fonts("DejaVuSerif", "DejaVuSans")
    def run(*argv: str):
        try:
            code = tour.main([*argv])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()
    return run


def flipped(x, w, y):
    "The sign of dw is wrong in one tile of 32 classes of 3409"
    sign = torch.ones(len(w), 1, device=w.device)
    sign[320:352] = -1
    w = w * 1
    w.register_hook(lambda g: g * sign)
    return baseline(x, w, y)


def lost_rows(x, w, y):
    "The last tokens get no gradient"
    x = x * 1
    x.register_hook(lambda g: torch.cat([g[:-2], 0 * g[-2:]]))
    return baseline(x, w, y)


def doubled_gradient(x, w, y):
    "The value is right and its gradient twice what it should be, which Adam does not feel"
    loss = baseline(x, w, y)
    return 2 * loss - loss.detach()


def scores_ignored_words(x, w, y):
    return baseline(x, w, y.clamp(min=0))


def sums(x, w, y):
    return baseline(x, w, y, reduction="sum")


def lowered(x, w, y):
    return baseline(x.bfloat16(), w.bfloat16(), y)


class After:
    "The right loss for some calls, then `then`; or the other way round"
    def __init__(self, calls, first, then):
        self.left, self.first, self.then = calls, first, then

    def __call__(self, x, w, y):
        self.left -= 1
        return (self.first if self.left >= 0 else self.then)(x, w, y)


def nan(x, w, y):
    return baseline(x, w, y) * math.nan


def nan_gradient(x, w, y):
    x = x * 1
    x.register_hook(lambda g: g * math.nan)
    return baseline(x, w, y)


def raises(x, w, y):
    raise RuntimeError("no such tile")


AMOUNT = r"\d\.\d+e[+-]\d\d, more than"
PLANTED = {
    "one per cent": (lambda x, w, y: 1.01 * baseline(x, w, y), r"loss differs from float64 by 1\.0e-02, more than 1e-05"),
    "one in ten thousand": (lambda x, w, y: 1.0001 * baseline(x, w, y), r"loss differs from float64 by 1\.0e-04, more than 1e-05"),
    "sign flip in a tile": (flipped, rf"dw differs from float64 by {AMOUNT} 1e-04"),
    "rows without gradient": (lost_rows, rf"dx differs from float64 by {AMOUNT} 1e-04"),
    "doubled gradient": (doubled_gradient, r"dw differs from float64 by 1\.0e\+00, more than 1e-04"),
    "ignored words counted": (scores_ignored_words, rf"dx differs from float64 by {AMOUNT} 1e-04"),
    "a sum for a mean": (sums, r"loss differs from float64 by 1\.\de\+02, more than 1e-05"),
    "bf16 products": (lowered, rf"dw differs from float64 by {AMOUNT} 1e-04"),
    "wrong in training only": (After(3, flipped, baseline), rf"final loss \S+, baseline \S+: they differ by {AMOUNT} 1e-04"),
    "nan": (nan, r"FloatingPointError: loss is nan \(in training step 1\)"),
    "nan later": (After(4, baseline, nan), r"FloatingPointError: loss is nan \(in training step 5\)"),
    "nan in a gradient": (nan_gradient, r"FloatingPointError: loss is nan \(in training step 2\)"),
    "exception": (raises, r"RuntimeError: no such tile \(in training step 1\)"),
    "exception after training": (After(SMALL.steps, baseline, raises), r"RuntimeError: no such tile \(after training\)"),
    "no gradient": (lambda x, w, y: baseline(x, w, y).detach(), r"RuntimeError: .*\(in training step 1\)"),
    "not a scalar": (lambda x, w, y: baseline(x, w, y, reduction="none"), r"RuntimeError: .*\(in training step 1\)"),
}


@pytest.mark.parametrize("name", thorough_but(
    few(PLANTED, "one in ten thousand", "rows without gradient", "wrong in training only", "nan in a gradient", "exception"), "wrong in training only"))
def test_planted_fault_is_named(name, device, run, monkeypatch):
    loss, expected = PLANTED[name]
    loss = After(loss.left, loss.first, loss.then) if isinstance(loss, After) else loss
    monkeypatch.setattr(tour, "STAGES", (tour.STAGES[0], tour.Stage("planted", 9, loss), tour.Stage("twin", 10, baseline)))
    monkeypatch.setattr(tour, "READERS", tour.READERS[:1])
    code, out, err = run("--device", device)
    assert code == 1
    assert re.search(f"^planted: {expected}", err, re.MULTILINE), err
    verdicts = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line.endswith(("yes", "NO"))}
    assert verdicts == {"baseline": "yes", "planted": "NO", "twin": "yes"}
    report = json.loads((tour.Path("tour") / "tour.json").read_text())
    assert [bool(s["failures"]) for s in report["stages"]] == [False, True, False] and not report["ok"]
    assert bool(report["stages"][1]["trace"]) == ("Error" in expected)


@pytest.mark.thorough
def test_failing_baseline_is_named(run, monkeypatch):
    monkeypatch.setattr(tour, "STAGES", (tour.Stage("baseline", 1, raises), *tour.STAGES[1:]))
    code, _, err = run()
    assert code == 1 and "baseline: RuntimeError: no such tile" in err and not re.search("^tiles:", err, re.MULTILINE)


@pytest.mark.thorough
def test_another_order_of_rounding_passes(device, run, monkeypatch):
    need_fonts("DejaVuSerif", "DejaVuSans")
    exact = tour.Stage("exact", 9, lambda x, w, y: baseline(x.double(), w.double(), y).float())
    reverse = tour.Stage("reverse", 10, lambda x, w, y: baseline(x.flip(0), w, y.flip(0)))
    monkeypatch.setattr(tour, "STAGES", (*tour.STAGES, exact, reverse))
    code, out, err = run("--device", device, "--steps", "20")
    assert code == 0, err
    assert f"All {len(tour.STAGES)} stages agree" in out and "All 3 stages agree" in out


@pytest.mark.thorough
def test_same_seed_same_bits(device):
    first, second = (tour.run_tour(device=device) for _ in range(2))
    for a, b in zip(first["stages"], second["stages"], strict=True):
        of_a_process = {"step_seconds", *(["memory_bytes", "memory_fraction"] if device == "cuda" else [])}  # and of what else it holds
        assert {k: v for k, v in a.items() if k not in of_a_process} == {k: v for k, v in b.items() if k not in of_a_process}
    assert tour.run_tour(device=device, seed=1)["stages"][0]["curve"] != first["stages"][0]["curve"]


@pytest.mark.thorough
def test_random_state_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tour.run_tour()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.thorough
def test_figures(device):
    report = tour.run_tour(device=device)
    assert report["ok"], tour.agreement_lines(report)
    config = report["config"]
    assert report["scores_bytes"] == 4 * config["N"] * config["V"] and config["V"] > 2000
    held = {s["name"]: s["memory_fraction"] for s in report["stages"]}
    assert 2 < held["baseline"] < 3.1, "three N×V tensors, less dx and dw"
    assert held["tiles"] < 0.25, "one tile of 64, its copies, and one tile's gradients"
    for s in report["stages"]:
        assert len(s["curve"]) == SMALL.steps and s["curve"][-1] < s["curve"][0] and s["step_seconds"] > 0
        assert max(s["dx_error"], s["dw_error"]) < 1e-5


def test_json_goes_alone_to_stdout(run, monkeypatch):
    loud = tour.Stage("loud", 9, lambda x, w, y: print("noise") or baseline(x, w, y))
    monkeypatch.setattr(tour, "STAGES", (*tour.STAGES, loud))
    code, out, err = run("--json", "--stage", "loud", "--out", "a folder/deep")
    assert code == 0
    report = json.loads(out)
    assert [s["name"] for s in report["stages"]] == ["baseline", "loud"], "the reference always runs"
    assert report == json.loads(tour.Path("a folder/deep/tour.json").read_text())
    assert "noise" in err and "final loss" in err and "noise" not in out
    assert {"config", "versions", "machine", "date", "tolerances", "stages", "ok"} <= report.keys()
    assert report["reading"] is None, "no reader was asked for"


@pytest.mark.thorough
def test_failure_as_json(run, monkeypatch):
    monkeypatch.setattr(tour, "STAGES", (tour.STAGES[0], tour.Stage("planted", 9, nan_gradient)))
    code, out, err = run("--json")
    assert code == 1 and not json.loads(out)["ok"] and "planted: FloatingPointError" in err


@pytest.mark.thorough
def test_table_and_files_are_named(run):
    need_fonts("DejaVuSerif", "DejaVuSans")
    code, out, _ = run("--stage", "tiles")
    assert code == 0
    for name in ("tour.svg", "tour.json"):
        assert str(tour.Path("tour") / name) in out and (tour.Path("tour") / name).exists()


@pytest.mark.parametrize("argv, said", [
    (["--stage", "tile"], r"invalid choice: 'tile' \(choose from .*baseline.*tiles"),
    (["--device", "tpu"], r"invalid choice: 'tpu' \(choose from .*cpu"),
    (["--steps", "0"], "--steps: expected a positive integer, got '0'"),
    (["--steps", "many"], "--steps: expected a positive integer, got 'many'"),
    (["--out", "file/tour"], "--out: cannot make file"),
])
def test_wrong_question_is_exit_code_2(argv, said, run):
    tour.Path("file").write_text("in the way")
    code, out, err = run(*argv)
    assert code == 2 and not out and re.search(said, err), err
    assert "final loss" not in err, "nothing was trained"


def test_python_without_help_texts(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    code, _, err = run()
    assert code == 2 and "pydoc_data.topics" in err


@pytest.mark.thorough
def test_plain_install_elsewhere(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]), OMP_NUM_THREADS="1")
    env.pop("TQDM_DISABLE", None)
    done = subprocess.run([sys.executable, "-c", ABSENT, "--json", "--stage", "tiles", "--device", "cpu"],
                          cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
    assert "no plot: it needs matplotlib" in done.stderr and "3/6" in done.stderr, "the bar is there, the plot is not"
    assert sorted(p.name for p in (folder / "tour").iterdir()) == ["tour.json"]


@pytest.mark.thorough
def test_same_report_same_picture():
    need_fonts("DejaVuSerif", "DejaVuSans")
    report = tour.run_tour()
    pictures = [tour.tour_plot(report) for _ in range(2)]
    assert pictures[0].svg == pictures[1].svg
    assert all(f"{s['name']} ×{s['memory_fraction']:.2f}" in pictures[0].alt for s in report["stages"])


def forgets_letter(x, w, y):
    return torch_ctc(x, w, y._replace(lengths=y.lengths - 1))


def forgets_column(x, w, y):
    return torch_ctc(x, w, y._replace(columns=y.columns - 1))


def reads_padding(x, w, y):
    return torch_ctc(x, w, y._replace(columns=torch.full_like(y.columns, len(x))))


def other_mean(x, w, y):
    return F.ctc_loss(F.linear(x, w).log_softmax(2), *y, reduction="sum") / y.lengths.sum()


def doubled_ctc_gradient(x, w, y):
    loss = torch_ctc(x, w, y)
    return 2 * loss - loss.detach()


def lost_class(x, w, y):
    "One letter's vector gets no gradient"
    w = w * 1
    w.register_hook(lambda g: g.index_fill(0, torch.tensor(5, device=g.device), 0))
    return torch_ctc(x, w, y)


def lowered_ctc(x, w, y):
    return torch_ctc(x.bfloat16().float(), w.bfloat16().float(), y).double()


MISREAD = {
    "last letter forgotten": (forgets_letter, r"loss differs from float64 by"),
    "last column forgotten": (forgets_column, r"loss differs from float64 by"),
    "padding read": (reads_padding, r"loss differs from float64 by"),
    "a mean over letters": (other_mean, r"loss differs from float64 by"),
    "doubled gradient": (doubled_ctc_gradient, r"dx differs from float64 by 1\.0e\+00"),
    "a class without gradient": (lost_class, rf"dw differs from float64 by {AMOUNT} 1e-04"),
    "bf16 products": (lowered_ctc, rf"dx differs from float64 by {AMOUNT} 1e-04"),
    "wrong in training only": (After(FEW.steps, forgets_letter, torch_ctc), rf"final loss \S+, torch \S+: they differ by {AMOUNT} 1e-04"),
    "nan": (lambda x, w, y: torch_ctc(x, w, y) * math.nan, r"FloatingPointError: loss is nan \(in training step 1\)"),
    "exception": (raises, r"RuntimeError: no such tile \(in training step 1\)"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", few(MISREAD, "last column forgotten", "a class without gradient", "wrong in training only", "exception"))
def test_planted_fault_in_reading_is_named(name, device, run, monkeypatch):
    need_fonts("DejaVuSerif", "DejaVuSans")
    loss, expected = MISREAD[name]
    loss = After(loss.left, loss.first, loss.then) if isinstance(loss, After) else loss
    planted = tour.Stage("planted", 9, loss)
    monkeypatch.setattr(tour, "STAGES", tour.STAGES[:1])
    monkeypatch.setattr(tour, "READERS", (*tour.READERS, planted))
    code, out, err = run("--device", device)
    assert code == 1 and re.search(f"^planted: {expected}", err, re.MULTILINE), err
    report = json.loads((tour.Path("tour") / "tour.json").read_text())
    assert [bool(s["failures"]) for s in report["reading"]["stages"]] == [False, False, False, True]
    assert not report["ok"] and not any(s["failures"] for s in report["stages"])


@pytest.mark.thorough
def test_failing_reference_of_reading_is_named(run, monkeypatch):
    need_fonts("DejaVuSerif", "DejaVuSans")
    monkeypatch.setattr(tour, "READERS", (tour.Stage("torch", 1, forgets_letter), *tour.READERS[1:]))
    code, _, err = run("--stage", "ctc")
    assert code == 1 and re.search("^torch: loss differs from float64", err, re.MULTILINE), "the oracle is not the reference"


@pytest.mark.thorough
def test_all_readers_fail(run, monkeypatch):
    need_fonts("DejaVuSerif", "DejaVuSans")
    monkeypatch.setattr(tour, "READERS", tuple(r._replace(loss=raises) for r in tour.READERS))
    code, out, err = run("--stage", "ctc", "linear_ctc")
    assert code == 1 and err.count("RuntimeError: no such tile") == 3 and "without a mistake: none" in out
    assert not (tour.Path("tour") / "reading.svg").exists()


def test_reading_is_named_and_drawn(device, run):
    need_fonts("DejaVuSerif", "DejaVuSans")
    code, out, err = run("--stage", "linear_ctc", "--device", device)
    assert code == 0, err
    report = json.loads((tour.Path("tour") / "tour.json").read_text())
    assert [s["name"] for s in report["stages"]] == ["baseline"]
    assert [s["name"] for s in report["reading"]["stages"]] == ["torch", "linear_ctc"]
    assert "Held-out words read without a mistake: torch " in out and str(tour.Path("tour") / "reading.svg") in out


@pytest.mark.thorough
def test_reader_learns_to_read(device):
    need_fonts("DejaVuSerif", "DejaVuSans")
    report = tour.run_reading(tour.READERS[1:2], tour.Sizes(N=16, H=64, K=13, steps=200), device)
    shown = report["stages"][0]["shown"]
    assert report["ok"] and shown["right"] > 0.4 and len(shown["written"]) == 64
    assert sum(a == b for a, b in zip(shown["written"], shown["read"], strict=True)) == shown["right"] * 64
    assert all(len(row) == len(shown["path"]) for row in shown["picture"])
    aligned = [label for label in torch.tensor(shown["path"]).unique_consecutive().tolist() if label]
    assert "".join(tour.LETTERS[label - 1] for label in aligned) == shown["word"]


@pytest.mark.thorough
def test_same_seed_reads_the_same():
    need_fonts("DejaVuSerif", "DejaVuSans")
    first, second = (tour.run_reading(sizes=FEW) for _ in range(2))
    for a, b in zip(first["stages"], second["stages"], strict=True):
        assert {k: v for k, v in a.items() if k != "step_seconds"} == {k: v for k, v in b.items() if k != "step_seconds"}
    assert tour.alignment_plot(first).svg == tour.alignment_plot(first).svg
    assert tour.run_reading(sizes=FEW, seed=1)["stages"][0]["shown"]["written"] != first["stages"][0]["shown"]["written"]


def test_reading_without_its_font(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.ft2font", None)
    monkeypatch.setattr(tour, "STAGES", tour.STAGES[:2])
    code, out, err = run()
    assert code == 0 and "no reading: it needs a font" in err and "All 2 stages agree" in out
    assert json.loads((tour.Path("tour") / "tour.json").read_text())["reading"] is None
    code, out, err = run("--stage", "ctc")
    assert code == 2 and not out and "reading needs a font" in err, "asked for by name, and nothing was trained"
    with pytest.raises(ImportError):
        tour.run_reading()
