"""`make bench`: ours beside eager PyTorch at one commit, as ratios of the same run; and a picture of the last commits that have such ratios."""

__all__ = ["CASES", "Case", "measure_commit", "last_commits", "trend_picture"]


import argparse
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedloss as fl
from fusedloss.baseline import sample_data
from workbook.drawing import as_drawing, Drawing, drawing_style, GREY, stage_color
from workbook.measure import comparison, peak_memory, progress, time_in_turn
from workbook.peers import eager_fp32_logits, eager_fp32_softmax, torch_ctc
from workbook.records import load_results, machine_line, record
from workbook.sources import commit, git_text

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "nbs" / "results" / "trend"
Runs = dict[str, Callable[[], Any]]  # "ours" and "eager", each a loss and its gradients


def both(leaves: tuple[Tensor, ...], ours: Callable[..., Tensor], eager: Callable[..., Tensor]) -> Runs:
    "Two losses of the same tensors, each with the gradients of its leaves."
    step = lambda loss: lambda: torch.autograd.grad(loss(), leaves)
    return dict(ours=step(ours), eager=step(eager))


def layer(device: str, dtype: torch.dtype, N: int, H: int, V: int) -> Runs:
    "Cross entropy of a linear layer."
    x, w, y = sample_data(N, H, V, dtype, device)
    return both((x, w), lambda: fl.linear_cross_entropy(x, w, y), lambda: eager_fp32_softmax(x, w, y))


def log_probs(device: str, dtype: torch.dtype, N: int, H: int, V: int) -> Runs:
    "Mean log-probability of a linear layer's targets."
    x, w, y = sample_data(N, H, V, dtype, device)
    eager = lambda: F.log_softmax(x @ w.T, -1, dtype=torch.float32).gather(1, y[:, None]).mean()
    return both((x, w), lambda: fl.linear_log_probs(x, w, y).log_probs.mean(), eager)


def logits(device: str, dtype: torch.dtype, N: int, V: int) -> Runs:
    "Cross entropy of logits."
    z = sample_data(N, V, 1, dtype, device).input
    y = torch.arange(N, device=device) % V
    return both((z,), lambda: fl.cross_entropy(z, y), lambda: eager_fp32_logits(z, y))


def ctc(device: str, dtype: torch.dtype, T: int, N: int, C: int, L: int) -> Runs:
    "CTC of logits."
    z = sample_data(T * N, C, 1, dtype, device).input.detach().view(T, N, C).requires_grad_()
    targets = 1 + torch.arange(N * L, device=device).view(N, L) % (C - 1)
    lengths = torch.full((N,), T, device=device), torch.full((N,), L, device=device)
    ours = lambda: fl.ctc_loss_with_logits(z, targets, *lengths)
    return both((z,), ours, lambda: torch_ctc(z, targets, *lengths))


def contrast(device: str, dtype: torch.dtype, N: int, H: int) -> Runs:
    "CLIP's loss."
    x, w, _ = sample_data(N, H, N, dtype, device)
    y, diagonal = w, torch.arange(N, device=device)

    def eager():
        z = 10.0 * (x @ y.T).float()
        return (F.cross_entropy(z, diagonal) + F.cross_entropy(z.T, diagonal)) / 2

    return both((x, y), lambda: fl.contrastive_loss(x, y, 10.0), eager)


class Case(NamedTuple):
    "A loss at one size on one kind of device, and which of its ratios are measured."

    name: str
    make: Callable[..., Runs]
    sizes: dict[str, int]
    ratios: tuple[str, ...] = ("time", "memory")
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"


def on_cpu(name: str, make: Callable[..., Runs], small: dict[str, int], large: dict[str, int]) -> list[Case]:
    "Time at a size at which the host's work is most of it, and traced memory at one at which scores are."
    return [
        Case(name, make, small, ("time",), torch.float32, "cpu"),
        Case(name, make, large, ("memory",), torch.float32, "cpu"),
    ]


LARGE = dict(N=1024, H=64, V=16384)
CASES = [
    *on_cpu("linear_cross_entropy", layer, dict(N=32, H=16, V=128), LARGE),
    *on_cpu("linear_log_probs", log_probs, dict(N=32, H=16, V=128), LARGE),
    *on_cpu("cross_entropy", logits, dict(N=32, V=128), dict(N=1024, V=16384)),
    *on_cpu("contrastive_loss", contrast, dict(N=32, H=16), dict(N=4096, H=32)),
    *on_cpu("ctc_loss_with_logits", ctc, dict(T=16, N=2, C=8, L=4), dict(T=100, N=8, C=500, L=20)),
    Case("linear_cross_entropy", layer, dict(N=8192, H=4096, V=128256)),
    Case("linear_cross_entropy", layer, dict(N=512, H=1024, V=32000)),
    Case("linear_log_probs", log_probs, dict(N=8192, H=4096, V=128256)),
    Case("cross_entropy", logits, dict(N=8192, V=32768)),
    Case("contrastive_loss", contrast, dict(N=16384, H=512)),
    Case("ctc_loss_with_logits", ctc, dict(T=500, N=128, C=20, L=50), dtype=torch.float32),
]


def measure_case(
    case: Case,
    path: Path,  # of the commit's records
    rounds: int,
    seconds: float,  # of measurement a round for each
) -> dict:  # the record
    "Record ours divided by eager: times of rounds that ran both, in an order drawn anew for each, and peaks of memory."
    runs, figures = case.make(case.device, case.dtype, **case.sizes), {}
    if "time" in case.ratios:
        times = time_in_turn(runs, case.device, rounds, seconds)
        ratio = comparison(times["eager"], times["ours"]).ratio
        figures |= dict(time=ratio.median, time_low=ratio.low, time_high=ratio.high)
    if "memory" in case.ratios:
        figures |= dict(memory=peak_memory(runs["ours"], case.device) / peak_memory(runs["eager"], case.device))
    return record(path, case.name, case.sizes, case.dtype, case.device, **figures)


def commit_path(folder: Path) -> Path:
    "The file of the commit at hand: names of later commits sort after it."
    stamp = git_text(ROOT, "show", "-s", "--format=%ct", "HEAD") or time.time()
    made = datetime.fromtimestamp(float(stamp), timezone.utc)
    return folder / f"{made:%Y%m%dT%H%M%S}-{commit(ROOT)}.json"


def measure_commit(
    folder: Path = FOLDER,
    cases: Iterable[Case] = CASES,
    rounds: int = 7,  # times that each is measured
    seconds: float = 0.05,  # of measurement a round for each
) -> Path:  # the file
    "Measure every case whose device is here, and keep the ratios of this commit in one file."
    path = commit_path(folder)
    here = [case for case in cases if case.device == "cpu" or torch.cuda.is_available()]
    for case in progress(here, "losses"):
        found = measure_case(case, path, rounds, seconds)
        print(case.name, found["shape"], found["machine"], *(f"{k} ×{v:.2f}" for k, v in found["figures"].items()))
    return path


def last_commits(folder: str | Path = FOLDER, most: int = 20) -> list[dict]:
    "The records of the last commits, in their order."
    records = load_results(folder)
    kept = sorted({r["stage"] for r in records})[-most:]
    return [r for r in records if r["stage"] in kept]


def panels_of(records: list[dict]) -> dict[tuple[str, str], dict[tuple, list[dict]]]:
    "Records by machine and ratio, then by loss and sizes."
    found = {}
    for r in records:
        for ratio in {"time", "memory"} & r["figures"].keys():
            group = found.setdefault((r["machine"], ratio), {})
            group.setdefault((r["name"], *r["shape"].items()), []).append(r)
    return dict(sorted(found.items()))


def draw_panel(ax, ratio: str, records: list[dict], commits: list[str]):
    "One loss: a dot a commit, and the spread of its rounds."
    at = [commits.index(r["stage"]) for r in records]
    figures = [r["figures"] for r in records]
    ax.axhline(1, color=GREY, ls=":", lw=1)
    ax.plot(at, [f[ratio] for f in figures], "o-", color=stage_color(2), ms=3, lw=1)
    if ratio == "time":
        bounds = [f["time_low"] for f in figures], [f["time_high"] for f in figures]
        ax.vlines(at, *bounds, color=stage_color(2), alpha=0.4, lw=2)
    sizes = " × ".join(str(size) for size in records[0]["shape"].values())
    ax.set_title(f"{records[0]['name']}\n{sizes}", fontsize=7.5, fontweight="normal", pad=4)
    ends = sorted({0, len(commits) - 1})
    ax.set(xlim=(-0.5, len(commits) - 0.5), ylim=(0, None))
    ax.set_xticks(ends, [commits[i].partition("-")[2][:7] for i in ends], fontsize=7)
    ax.tick_params(axis="y", labelsize=7)


def in_words(panels: dict) -> str:
    "What the picture shows: the first and the last ratio of each panel."
    said = []
    for (machine, ratio), group in panels.items():
        ends = [(key[0], rs[0]["figures"][ratio], rs[-1]["figures"][ratio]) for key, rs in group.items()]
        said.append(f"{ratio} on {machine}: " + ", ".join(f"{n} from ×{a:.2f} to ×{b:.2f}" for n, a, b in ends))
    return "Ours divided by eager PyTorch at each commit. " + "; ".join(said) + "."


def trend_picture(
    records: list[dict],  # of `last_commits`, one or more
) -> Drawing:
    "Small panels, a row for each machine and ratio: ours divided by eager, from commit to commit."
    import matplotlib.pyplot as plt

    panels, commits = panels_of(records), sorted({r["stage"] for r in records})
    columns = max(map(len, panels.values()))
    with drawing_style():
        fig = plt.figure(figsize=(max(3.4, 1.7 * columns), 1.9 * len(panels)))
        rows = fig.subfigures(len(panels), squeeze=False)[:, 0]
        for row, ((machine, ratio), group) in zip(rows, panels.items()):
            row.suptitle(f"{ratio}, ours / eager: {machine}", x=0, ha="left", fontsize=9, fontweight="bold")
            for ax, found in zip(row.subplots(1, columns, squeeze=False)[0], group.values()):
                draw_panel(ax, ratio, found, commits)
            for ax in row.axes[len(group) :]:
                ax.set_axis_off()
        made = f"{len(commits)} commits, {records[0]['date']} to {records[-1]['date']}"
        note = "Dots: medians of rounds that ran both; bars: 20 % to 80 % of the rounds."
        return as_drawing(fig, in_words(panels), f"{made}. {note}")


def main(argv: list[str] | None = None):
    "Measure this commit, and say where its ratios are."
    parser = argparse.ArgumentParser("python -m workbook.trend", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the files, one a commit (default: %(default)s)")
    folder = parser.parse_args(argv).folder
    torch.set_num_threads(1)  # of the CPU's part, on any machine
    print(machine_line())
    print(measure_commit(folder))


if __name__ == "__main__":
    main()
