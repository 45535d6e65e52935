"""What is measured is kept with its machine, versions, commit and date, and shown beside what was predicted."""

__all__ = [
    "machine_line",
    "record",
    "load_results",
    "results_table",
    "trade_off",
    "prediction_table",
    "predicted_against_measured",
]


import json
import math
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

import fusedloss
from fusedloss.core.tables import si, Table
from fusedloss.core.rates import dtype_name, processor
from workbook.drawing import as_drawing, Drawing, drawing_style, GREY, spread_labels, stage_color
from workbook.peers import PEER_NAMES
from workbook.sources import commit


def machine_name(device: str | torch.device = "cpu") -> str:
    "The processor's name."
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' * (threads > 1)}"


def versions() -> dict[str, str]:
    "Versions of what the figures depend on."
    found = dict(python=platform.python_version(), torch=torch.__version__)
    try:
        found["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        pass
    return found | dict(fusedloss=fusedloss.__version__)


def machine_line(device: str | torch.device = "cpu") -> str:
    "One line that names the machine and the versions."
    return " · ".join([machine_name(device), *(f"{k} {v}" for k, v in versions().items())])


def record(
    path: str | Path,  # the JSON file, a list of records
    name: str,  # what was measured, such as "tiles"
    shape: dict[str, int],
    dtype: torch.dtype | str,
    device: str | torch.device = "cpu",
    **figures: float,  # in seconds, bytes, or ratios: the key says which
) -> dict:
    "Append one measurement to `path`, in place of the same one made earlier, with its machine, versions, commit and date; of what is absent now, the earlier one stays."
    path = Path(path)
    entry = dict(
        name=name,
        shape=dict(shape),
        dtype=dtype_name(dtype),
        machine=machine_name(device),
        versions=versions(),
        commit=commit(path.parent),
        date=datetime.now(timezone.utc).date().isoformat(),
        figures=figures,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    key = lambda r: [r[k] for k in ("name", "shape", "dtype", "machine")]
    found, absent = _read(path), str(figures.get("reason", "")).startswith(("ModuleNotFoundError", "ImportError"))
    earlier = [r for r in found if key(r) == key(entry) and "seconds" in r["figures"]]
    if absent and earlier:
        return earlier[-1]
    kept = [r for r in found if key(r) != key(entry)]
    text = json.dumps([*kept, entry], indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return entry


def _read(path: Path) -> list[dict]:
    return json.loads(path.read_text("utf-8")) if path.exists() else []


def load_results(
    path: str | Path,  # one JSON file, or a folder of them
) -> list[dict]:  # each with the name of its file as `stage`
    "The records in `path`, in order; none where it does not exist."
    path = Path(path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    return [dict(r, stage=f.stem) for f in files for r in _read(f)]


def records_by_name(
    path: str | Path,  # one JSON file, read again at each call
    dtype: str = "bfloat16",
    **sizes: int,  # such as `N=8192`; a record has all of them
) -> dict[str, dict]:
    "The records in `path` by name, of one dtype and the sizes given; of equal names the last."
    chosen = lambda r: r["dtype"] == dtype and sizes.items() <= r["shape"].items()
    return {r["name"]: r for r in load_results(path) if chosen(r)}


def figures_of(
    path: str | Path,  # one JSON file, read again at each call
    dtype: str = "bfloat16",
    **sizes: int,  # such as `N=8192`; a record has all of them
) -> dict[str, dict[str, float]]:
    "The figures in `path` by the record's name, of one dtype and the sizes given; of equal names the last."
    return {name: r["figures"] for name, r in records_by_name(path, dtype, **sizes).items()}


def records_over_ranks(
    path: str | Path,  # one JSON file, whose shapes have an R
    dtype: str = "bfloat16",
    **sizes: int,  # such as `N=8192`; a record has all of them
) -> dict[tuple[str, int], dict]:  # by name and R
    "Records by number of ranks: of each name one machine's, the last that has one rank and several, else the last."
    found = {}
    for r in load_results(path):
        if r["dtype"] == dtype and sizes.items() <= r["shape"].items():
            machines = found.setdefault(r["name"], {})
            machines[r["machine"]] = machines.pop(r["machine"], {}) | {r["shape"]["R"]: r}
    whole = lambda machines: [m for m in machines if 1 in m and len(m) > 1] or machines
    return {
        (name, ranks): r for name, machines in found.items() for ranks, r in whole([*machines.values()])[-1].items()
    }


def caption(entry: dict) -> str:
    "A figure's caption from a record: machine, dtype, shape, date, commit."
    shape = " × ".join(f"{k} {v}" for k, v in entry["shape"].items())
    return f"{entry['machine']}, {entry['dtype']}, {shape}, {entry['date']}, commit {entry['commit']}"


def source_line(
    records: list[dict],  # those that a table shows
    command: str,  # that makes them
) -> str:  # Markdown
    "The line under a table: machine, date and commit of its records, and the command that reproduces them."
    runs = sorted({f"{r['machine']}, {r['date']}, commit {r['commit']}" for r in records})
    if not runs:
        return f"Not measured yet: on a machine with a GPU, `{command}` makes these figures."
    return f"{'; '.join(runs)}; reproduce with `{command}`"


def linear_losses(records: list[dict]) -> list[dict]:
    "Records of losses of a linear layer, timed against three products."
    return [r for r in records if "H" in r["shape"] and "ratio" in r["figures"]]


def logits_losses(records: list[dict]) -> list[dict]:
    "Records of losses of given logits, timed against one read and one write of them."
    return [r for r in records if "H" not in r["shape"] and "ratio" in r["figures"]]


def results_table(records: list[dict]) -> Table:
    "Losses measured against the three matmuls alone: time, ratio, memory beyond the gradients."
    rows = [(r, r["figures"]) for r in records if "ratio" in r["figures"]]
    return Table(
        ["stage", "loss", "time", "vs. 3 matmuls", "beyond the gradients"],
        [
            [r["stage"], r["name"], si(f["seconds"], "s"), f"×{f['ratio']:.2f}", si(max(f["extra"], 0), "B")]
            for r, f in rows
        ],
    )


def trade_off(records: list[dict], title: str, alt: str, caption: str = "") -> Drawing:
    "Memory beyond the gradients against time as a multiple of the three matmuls alone, a dot for each loss; peers in grey."
    import matplotlib.pyplot as plt

    with drawing_style():
        fig, ax = plt.subplots(figsize=(6.4, 3.6))
        points = [(r["figures"]["ratio"], r["figures"]["extra"] / 2**20) for r in records]
        for r, point in zip(records, points):
            ax.plot(*point, "o", color=GREY if r["name"] in PEER_NAMES else stage_color(r["stage"]))
        label = dict(
            xytext=(9, -3),
            textcoords="offset points",
            fontsize=9,
            arrowprops=dict(arrowstyle="-", lw=0.5, color=GREY, shrinkA=0),
        )
        labels = [ax.annotate(r["name"], point, **label) for r, point in zip(records, points)]
        ax.axvline(1, color=GREY, ls=":")
        ax.set(
            yscale="log",
            xlabel="time, as a multiple of three cuBLAS matmuls",
            ylabel="MiB beyond the gradients",
            title=title,
        )
        ax.set_xlim(0.9, 1.25 * max([1.0, *(ratio for ratio, _ in points)]))
        spread_labels(fig, labels)
        return as_drawing(fig, alt, caption)


class Check(NamedTuple):
    "One line of prediction against measurement."

    name: str
    predicted: float
    measured: float
    unit: str = "s"  # or `B`
    cause: str = ""  # why they differ, where they do

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def prediction_table(checks: list[Check]) -> Table:
    "Predicted, measured, ratio; a miss beyond 1.5 without a cause says so."
    cause = lambda c: c.cause or ("unexplained" if not 1 / 1.5 <= c.ratio <= 1.5 else "")
    return Table(
        ["", "predicted", "measured", "ratio", "cause"],
        [[c.name, si(c.predicted, c.unit), si(c.measured, c.unit), f"×{c.ratio:.2f}", cause(c)] for c in checks],
    )


def predicted_against_measured(
    checks: list[Check],
    title: str,
    alt: str,
    caption: str = "",
    stage: int | str = 1,
) -> Drawing:
    "The ratio of measured to predicted, a line for each check, on a scale of powers of two."
    import matplotlib.pyplot as plt

    with drawing_style():
        fig, ax = plt.subplots(figsize=(6.4, 1.1 + 0.34 * len(checks)))
        ax.axvline(1, color=GREY)
        ax.axvspan(1 / 1.5, 1.5, color=GREY, alpha=0.15, lw=0)
        for i, c in enumerate(checks):
            ax.plot([1, c.ratio], [i, i], color=stage_color(stage))
            ax.plot(c.ratio, i, "o", color=stage_color(stage))
            ax.annotate(f"×{c.ratio:.2f}", (c.ratio, i), xytext=(8, -3), textcoords="offset points", fontsize=9)
        reach = max([1, *(math.ceil(abs(math.log2(c.ratio)) + 0.3) for c in checks)])
        ax.set(
            xscale="log",
            xlim=(2**-reach, 2**reach),
            ylim=(max(1, len(checks)) - 0.5, -0.5),
            yticks=range(len(checks)),
            yticklabels=[c.name for c in checks],
            xlabel="measured / predicted",
        )
        fig.suptitle(title, x=0, ha="left", fontsize=11, fontweight="bold")  # long names
        ticks = [2.0**k for k in range(-reach, reach + 1)]
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks], minor=False)
        ax.set_xticks([], minor=True)
        return as_drawing(fig, alt, caption)
