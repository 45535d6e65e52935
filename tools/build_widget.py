"""What the sliders on the site show: `plan` asked at every combination of their stops, and the table that stands there without a script.

A page that holds PLACE gets the table, GRID beside it and SCRIPT, which draws the same table for other stops; it computes nothing.
A figure is kept as one of BASE² codes of two characters: three figures of seconds, or of bytes in MiB, GiB or TiB. Where `plan` gives the
same figures for other budgets or GPUs, they are kept once.
"""
import html
import json
import re
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import torch
from site_pages import fill_places
from project import ROOT

from fusedloss.core.tables import si
from fusedloss.core.rates import dtype_name, machines
from fusedloss.plans import Plan, plan
from workbook.records import load_results

GRID, SCRIPT = "plan_grid.js", "plan_widget.js"  # beside the pages that use them
ASSIGN = "globalThis.planGrid = "
PLACE = re.compile(r'<p class="fl-plans">.*?</p>', re.DOTALL)
METHODS = ("eager", "product", "chunks", "recompute", "tiles")
METRICS = {"seconds": "time", "bytes": "moved", "extra": "beyond the gradients"}  # fields of an estimate, and what a column is called
LETTERS = "".join(chr(c) for c in range(32, 127) if chr(c) not in '"\\')
BASE = len(LETTERS)
LEAST_SECOND, UNITS = -6, ("MiB", "GiB", "TiB")  # the power of ten at which codes of seconds begin
UNIT_CODES = 900 + 900 + 924  # 1.00 to 9.99, 10.0 to 99.9, 100 to 1023


class Axes(NamedTuple):
    "The stops of each slider, in the order in which the pages have them"
    n: tuple[int, ...]
    v: tuple[int, ...]
    h: tuple[int, ...]
    dtype: tuple[torch.dtype, ...]
    budget: tuple[int | None, ...]
    gpu: tuple[str, ...]


class Stop(NamedTuple):
    "A position of all sliders"
    n: int
    v: int
    h: int
    dtype: torch.dtype
    budget: int | None
    gpu: str


BESIDE_PEERS = "25_results"  # the page whose records call the library's methods ours
LIKE_OTHERS = ("A100 40GB", "H100 PCIe")  # a chip that is there already, with less bandwidth
LABELS = Axes("N, tokens", "V, classes", "H, features", "dtype", "budget", "GPU")
AXES = Axes(tuple(2**k for k in range(9, 17)), (32000, 50257, 128256, 131072, 151936, 256000), (896, 2048, 2304, 3584, 4096, 8192),
            (torch.bfloat16, torch.float16, torch.float32), (None, 2**26, 2**28, 2**29, 2**30, 2**32, 2**34),
            tuple(sorted(machines().keys() - set(LIKE_OTHERS), key=lambda name: (machines()[name].rate(torch.bfloat16), name))))
FIRST = Stop(8192, 128256, 4096, torch.bfloat16, 2**29, "H200")  # where the sliders stand at first, and what the table is about


class Answer(Plan):
    "A plan that chooses once, however often it is asked for reasons"
    budget = cached_property(Plan.budget.fget)
    chosen = cached_property(Plan.chosen.fget)


def answer(at: Stop) -> Answer:
    "What `plan` says at a stop"
    p = plan(at.n, at.v, at.h, at.dtype, memory_budget=at.budget, machine=at.gpu)
    return Answer(p.call, p.estimates, p.machine, p.device)


def stop_name(value: Any) -> str:
    "A stop of a slider in words"
    if value is None:
        return "our own limit"
    return dtype_name(value) if isinstance(value, torch.dtype) else value if isinstance(value, str) else f"{value:,}".replace(",", "\u00a0")


def stop_names(axis: str, stops: tuple) -> list[str]:
    "The stops of an axis in words; a budget in bytes"
    return [si(stop, "B") if axis == "budget" and stop else stop_name(stop) for stop in stops]


def seconds_code(value: float) -> int:
    "Three figures and a power of ten"
    figures, power = f"{value:.2e}".split("e")
    return 900 * (int(power) - LEAST_SECOND) + round(100 * float(figures)) - 100


def bytes_code(value: float) -> int:
    "Three figures, or four of 1000 to 1023, and a unit"
    for unit in range(len(UNITS)):
        amount = value / 1024 ** (unit + 2)
        for first, (below, scale) in {0: (9.995, 100), 900: (99.95, 10), 1800: (1023.5, 1)}.items():
            if amount < below:
                return UNIT_CODES * unit + first + round(amount * scale) - 100
    return BASE**2


def code_of(metric: str, value: float) -> int:
    "The code of a figure; `ValueError` if it is too small or too large for one"
    code = seconds_code(value) if metric == "seconds" else bytes_code(value)
    if not 0 <= code < BASE**2:
        raise ValueError(f"{metric}: expected a figure that codes reach, got {value!r}")
    return code


def figure_text(metric: str, code: int) -> str:
    "A code as it is shown; SCRIPT does the same"
    if metric == "seconds":
        power, figures = divmod(code, 900)
        prefix = power // 3
        return f"{(figures + 100) / 10 ** (2 - power % 3):.{2 - power % 3}f} {('µs', 'ms', 's')[prefix]}"
    unit, rest = divmod(code, UNIT_CODES)
    digits = 2 - min(rest // 900, 2)
    return f"{(rest - 900 * (2 - digits) + 100) / 10**digits:.{digits}f} {UNITS[unit]}"


def figure_value(metric: str, code: int) -> float:
    "A code in seconds, or in bytes"
    number, unit = figure_text(metric, code).split()
    return float(number) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]


def letters(code: int) -> str:
    "A code in two characters"
    return LETTERS[code // BASE] + LETTERS[code % BASE]


def said(p: Answer) -> list:
    "Which method is taken, as a number, or -1; why, with `{}` for the limit; and of each method why it is or is not, and what it lacks"
    reasons = ["; ".join(filter(None, (p.reason(w), p.note(w)))) for w in p.estimates]
    return [METHODS.index(p.method) if p.method else -1, p.why.replace(si(p.budget, "B"), "{}"), *reasons]


class Pool:
    "Things by number, each kept once"

    def __init__(self):
        self.numbers: dict = {}

    def number(self, thing: Any) -> int:
        "The number of a thing, as it was first seen"
        return self.numbers.setdefault(thing, len(self.numbers))

    def letters(self, thing: Any) -> str:
        "That number in two characters"
        number = self.number(thing)
        if number >= BASE**2:
            raise ValueError(f"expected at most {BASE**2} different things, got more")
        return letters(number)


def columns(p: Answer, texts: Pool) -> Iterator[tuple[str, str]]:
    "The name of each figure of a plan, and its two characters"
    for metric, (m, w) in product(METRICS, enumerate(p.estimates)):
        yield f"{metric}{m}", letters(code_of(metric, getattr(w, metric)))
    yield "said", texts.letters(json.dumps(said(p), ensure_ascii=False))
    yield "limit", letters(code_of("extra", p.budget))


def block_rows(axes: Axes, texts: Pool) -> Iterator[dict[str, str]]:
    "For each dtype, GPU, budget and H, in this order, the characters of all N and V, by the name of the figure"
    for dtype, gpu, budget, h in product(axes.dtype, axes.gpu, axes.budget, axes.h):
        found: dict[str, list[str]] = {}
        for v, n in product(axes.v, axes.n):
            for name, two in columns(answer(Stop(n, v, h, dtype, budget, gpu)), texts):
                found.setdefault(name, []).append(two)
        yield {name: "".join(parts) for name, parts in found.items()}


def measured_stop(r: dict, axes: Axes) -> tuple[str, Stop] | None:
    "The method and the stop that a record is about; None if it is about no method of `linear_cross_entropy` or no stop"
    names = {machines()[gpu].name: gpu for gpu in axes.gpu}
    budgets = dict(zip(("", *stop_names("budget", axes.budget)[1:]), axes.budget))
    method, _, budget = r["name"].removeprefix("ours, " if r["stage"] == BESIDE_PEERS else "").partition(", ")
    known = method in METHODS and budget in budgets and {"seconds", "extra"} <= r.get("figures", {}).keys() and r.get("machine") in names
    if not known or set(r["shape"]) != {"N", "V", "H"}:
        return None
    at = Stop(*(r["shape"][side] for side in "NVH"), getattr(torch, r["dtype"]), budgets[budget], names[r["machine"]])
    return (method, at) if all(value in stops for value, stops in zip(at, axes)) else None


def measured(axes: Axes, folder: Path = ROOT / "nbs" / "results") -> list[list]:
    "What was measured at stops: place on each axis, method, seconds, bytes beyond the gradients, and where it was; of equal ones the last"
    found = {}
    for r in sorted(load_results(folder), key=lambda r: (r.get("date", ""), r["stage"])):
        if about := measured_stop(r, axes):
            method, at = about
            place = [stops.index(value) for value, stops in zip(at, axes)]
            codes = [code_of(metric, r["figures"][metric]) for metric in ("seconds", "extra")]
            found[method, at] = [*place, METHODS.index(method), *codes, f"{r['date']}, commit {r['commit']}"]
    return sorted(found.values())


def make_grid(axes: Axes = AXES) -> dict:
    "All that SCRIPT needs to know"
    texts, blocks = Pool(), Pool()
    index: dict[str, list[str]] = {}
    for row in block_rows(axes, texts):
        for name, block in row.items():
            index.setdefault(name, []).append(blocks.letters(block))
    return {"stops": {axis: stop_names(axis, stops) for axis, stops in axes._asdict().items()}, "letters": LETTERS, "methods": METHODS,
            "said": [json.loads(text) for text in texts.numbers], "index": {name: "".join(parts) for name, parts in index.items()},
            "blocks": list(blocks.numbers), "measured": measured(axes)}


def grid_script(grid: dict) -> str:
    "The grid as a script, which a page reads without a server"
    return f"{ASSIGN}{json.dumps(grid, ensure_ascii=False, separators=(',', ':'))};\n"


def share(metric: str, code: int, longest: float) -> str:
    "A figure as a part of the longest bar"
    return f"{100 * figure_value(metric, code) / longest:.1f}%"


def cell(metric: str, code: int, longest: float, limit: int, point: int | None) -> str:
    "A figure, its bar with marks of the limit and of what was measured, and that in words"
    marks = [f'<i style="width:{share(metric, code, longest)}"></i>']
    if metric == "extra" and figure_value("extra", limit) <= longest:
        marks.append(f'<i class="fl-limit" style="left:{share("extra", limit, longest)}"></i>')
    if point is not None:
        marks.append(f'<i class="fl-point" style="left:{share(metric, point, longest)}"></i>')
    found = f'<span class="fl-measured">measured {figure_text(metric, point)}</span>' if point is not None else ""
    return (f'<td role="cell" data-name="{METRICS[metric].replace("the ", "")}"><span class="fl-shown">{figure_text(metric, code)}</span>'
            f'<span class="fl-bar" aria-hidden="true">{"".join(marks)}</span>{found}</td>')


class Shown(NamedTuple):
    "What the table says of a stop, in codes"
    codes: dict[str, list[int]]  # by metric, of each method
    limit: int
    said: list
    points: dict[int, dict[str, int]]  # measured, by the method's number and the metric
    made: list[str]  # when that was


def shown(at: Stop) -> Shown:
    "What the table says of a stop"
    p, place = answer(at), [stops.index(value) for value, stops in zip(at, AXES)]
    codes = {metric: [code_of(metric, getattr(w, metric)) for w in p.estimates] for metric in METRICS}
    found = [point[len(place):] for point in measured(AXES) if point[:len(place)] == place]
    points = {m: {"seconds": seconds, "extra": extra} for m, seconds, extra, _ in found}
    return Shown(codes, code_of("extra", p.budget), said(p), points, list(dict.fromkeys(made for *_, made in found)))


def table_rows(s: Shown) -> Iterator[str]:
    "A row for each method"
    longest = {metric: max(figure_value(metric, code) for code in [*codes, *(p[metric] for p in s.points.values() if metric in p)])
               for metric, codes in s.codes.items()}
    for m, method in enumerate(METHODS):
        taken = ' class="fl-taken"' if s.said[0] == m else ""
        cells = "".join(cell(metric, s.codes[metric][m], longest[metric], s.limit, s.points.get(m, {}).get(metric)) for metric in METRICS)
        yield (f'<tr role="row"{taken}><th role="rowheader" scope="row">{method}</th>{cells}'
               f'<td role="cell" class="fl-why">{html.escape(s.said[2 + m])}</td></tr>')


def sliders(at: Stop) -> Iterator[str]:
    "A slider for each axis, which a script shows"
    for axis, stops in AXES._asdict().items():
        number, names = stops.index(getattr(at, axis)), stop_names(axis, stops)
        yield (f'<div><label for="fl-plan-{axis}">{getattr(LABELS, axis)}</label><output for="fl-plan-{axis}" aria-live="off">{names[number]}</output>'
               f'<input type="range" id="fl-plan-{axis}" min="0" max="{len(stops) - 1}" value="{number}" aria-valuetext="{names[number]}"></div>')


def caption(names: list[str]) -> str:
    "What the table is about; SCRIPT does the same"
    n, v, h, dtype, _, gpu = names
    return f"Predicted for {n} tokens, {v} classes and {h} features in {dtype}, on {gpu}"


def made_text(gpu: str, made: list[str]) -> str:
    "Where and when the measured figures were made; SCRIPT does the same"
    return f" Measured on {gpu}: {'; '.join(made)}." if made else ""


def limit_text(at: Stop, limit: int) -> str:
    "The limit in words: the stop where somebody names a budget"
    return si(at.budget, "B") if at.budget else figure_text("extra", limit)


def widget(at: Stop = FIRST) -> str:
    "The sliders, hidden, and the table of a stop"
    s = shown(at)
    names = [stop_names(axis, (value,))[0] for axis, value in at._asdict().items()]
    heads = "".join(f'<th role="columnheader" scope="col">{name}</th>' for name in ("method", *METRICS.values(), "why"))
    return WIDGET.format(grid=GRID, script=SCRIPT, sliders="".join(sliders(at)), caption=caption(names), heads=heads, rows="".join(table_rows(s)),
                         verdict=s.said[1].format(limit_text(at, s.limit)), made=made_text(at.gpu, s.made))


WIDGET = """<div class="fl-plans" data-grid="{grid}"><div class="fl-sliders" hidden>{sliders}</div>
<p class="fl-verdict" aria-live="polite">{verdict}</p>
<table role="table"><caption>{caption}</caption><thead role="rowgroup"><tr role="row">{heads}</tr></thead>
<tbody role="rowgroup">{rows}</tbody></table>
<p class="fl-small">Loss and gradients of x and w, as <code>plan</code> predicts them; computed when this site was built. Bars begin at zero, and the longest of a
column fills it. Moved: bytes read and written. A line across a bar is the limit; a ring is what we measured.<span class="fl-made">{made}</span></p></div>
<script src="{script}" defer></script>"""


def fill(page: str) -> str:
    "A page with the widget in its place"
    return PLACE.sub(lambda _: widget(), page, count=1)


def fill_all(out: Path) -> None:
    "Put the widget into the pages of a site that have a place for it, and beside them what it needs"
    fill_places(out, PLACE, fill)
    (out / GRID).write_text(grid_script(make_grid()), encoding="utf-8")
    (out / SCRIPT).write_text(Path(__file__).with_name(SCRIPT).read_text(encoding="utf-8"), encoding="utf-8")
