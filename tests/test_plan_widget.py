"The sliders of the site show what `plan` says at their stops, and without a script there is a table."
import json
import os
import random
import re
import subprocess
import time
import types
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import build_widget
import pytest
import torch
from browse import QUIET, browser, evaluate
from build_widget import ASSIGN, AXES, FIRST, GRID, METHODS, METRICS, SCRIPT, Axes, Stop, answer, code_of, figure_text, figure_value
from test_browse import AXE, VIOLATIONS
from project import ROOT

pytestmark = pytest.mark.thorough
SMALL = Axes((512, 8192), (50257, 128256), (896, 4096), (torch.bfloat16, torch.float32), (2**29, 2**26), ("L4", "H200"))
DOCS = ROOT / "docs"
PAGE = '<!doctype html><html lang="en"><head><title>x</title><link rel="stylesheet" href="styles.css"></head><body style="margin: 0; font: 16px sans-serif"><main class="content"><h1>x</h1>%s</main></body></html>'


def number(grid: dict, text: str, place: int) -> int:
    "Two characters as a number"
    high, low = (grid["letters"].index(letter) for letter in text[2 * place:2 * place + 2])
    return high * len(grid["letters"]) + low


def looked_up(grid: dict, axes: Axes, at: Stop, name: str) -> int:
    "A code of the grid at a stop"
    blocks = list(product(axes.dtype, axes.gpu, axes.budget, axes.h))
    block = grid["blocks"][number(grid, grid["index"][name], blocks.index((at.dtype, at.gpu, at.budget, at.h)))]
    return number(grid, block, list(product(axes.v, axes.n)).index((at.v, at.n)))


def faults_of(grid: dict, axes: Axes, stops: list[Stop], texts=build_widget) -> list[str]:
    "Where a grid differs from `plan` in three figures, or in words"
    found = []
    for at in stops:
        p = answer(at)
        taken, why, *reasons = grid["said"][looked_up(grid, axes, at, "said")]
        limit = figure_value("extra", looked_up(grid, axes, at, "limit"))
        if (METHODS[taken] if taken >= 0 else None) != p.method or why.partition(" {}")[0] not in p.why or abs(limit / p.budget - 1) > 0.005:
            found.append(f"{at}: {why}, of {limit:g}")
        for m, (w, reason) in enumerate(zip(p.estimates, reasons)):
            shown = {metric: texts.figure_value(metric, looked_up(grid, axes, at, f"{metric}{m}")) for metric in METRICS}
            wrong = [metric for metric, value in shown.items() if abs(value / getattr(w, metric) - 1) > 0.0051]
            found += [f"{at}: {w.method}: {wrong}"] * bool(wrong or w.method != METHODS[m] or not reason.startswith(p.reason(w)))
    return found


@pytest.fixture(scope="module")
def small() -> dict:
    return json.loads(json.dumps(build_widget.make_grid(SMALL)))


def test_a_grid_is_what_plan_says(small):
    assert faults_of(small, SMALL, [Stop(*at) for at in product(*SMALL)]) == []
    assert build_widget.grid_script(small) == build_widget.grid_script(json.loads(json.dumps(build_widget.make_grid(SMALL))))


@pytest.mark.skipif(not (DOCS / GRID).exists(), reason="docs/ is not built")
def test_the_sites_grid_is_what_plan_says():
    text = (DOCS / GRID).read_text(encoding="utf-8")
    stops = [Stop(*map(random.Random(seed).choice, AXES)) for seed in range(40)]
    assert faults_of(json.loads(text.removeprefix(ASSIGN).rstrip(";\n")), AXES, stops) == []


BUGS = {
    "axes in another order": ("for v, n in product(axes.v, axes.n):", "for n, v in product(axes.n, axes.v):"),
    "GPUs in another order": ("in product(axes.dtype, axes.gpu, axes.budget, axes.h):", "in product(axes.dtype, axes.gpu[::-1], axes.budget, axes.h):"),
    "no budget": ("memory_budget=at.budget,", ""),
    "another method's figures": ("METHODS.index(p.method) if p.method else -1", "-1"),
    "bytes a unit too large": ("amount = value / 1024 ** (unit + 2)", "amount = value / 1024 ** (unit + 1)"),
    "two figures": ('f"{value:.2e}"', 'f"{value:.1e}"'),
    "moved in the place of beyond": ('getattr(w, metric)))\n    yield "said"', 'getattr(w, "bytes" if metric == "extra" else metric)))\n    yield "said"'),
}


@pytest.mark.parametrize("old, new", BUGS.values(), ids=BUGS)
def test_a_planted_bug_is_noticed(old, new):
    path = Path(build_widget.__file__)
    source = path.read_text(encoding="utf-8")
    assert source.count(old) == 1
    changed = types.ModuleType("changed_widget")
    changed.__file__ = str(path)
    exec(compile(source.replace(old, new), path, "exec"), vars(changed))
    axes = SMALL._replace(dtype=(torch.bfloat16,))
    try:
        grid = changed.make_grid(axes)
    except ValueError:
        return
    assert faults_of(grid, axes, [Stop(*at) for at in product(*axes)])


@pytest.mark.parametrize("metric, value, text", [
    ("seconds", 1.16e-3, "1.16 ms"), ("seconds", 0.0999951, "100 ms"), ("seconds", 488.8, "489 s"), ("seconds", 2e-6, "2.00 µs"), ("extra", 2**20, "1.00 MiB"),
    ("extra", 1002 * 2**20, "1002 MiB"), ("extra", 1023.6 * 2**20, "1.00 GiB"), ("bytes", 9.996 * 2**30, "10.0 GiB"), ("bytes", 99.96 * 2**30, "100 GiB"), ("bytes", 2**47, "128 TiB")])
def test_a_figure_is_shown_with_three_digits(metric, value, text):
    assert figure_text(metric, code_of(metric, value)) == text


@pytest.mark.parametrize("metric, value", [("seconds", 1e-7), ("seconds", 1e4), ("extra", 2**19), ("bytes", 2.0**60)])
def test_a_figure_out_of_reach_raises(metric, value):
    with pytest.raises(ValueError, match=f"{metric}: expected a figure that codes reach, got"):
        code_of(metric, value)


RECORD = dict(name="recompute, 256 MiB", shape=dict(N=8192, H=4096, V=128256), dtype="bfloat16", machine="NVIDIA H200", date="2026-01-02", commit="abc",
              figures=dict(seconds=0.05, extra=2**28))


@pytest.mark.parametrize("change, points", [
    ({}, 1), (dict(name="recompute"), 1), (dict(name="ours, recompute"), 1), (dict(name="ours"), 0), (dict(name="Liger"), 0), (dict(name="recompute, soft cap"), 0), (dict(name="recompute, error"), 0), (dict(machine="a CPU"), 0),
    (dict(shape=dict(N=8191, H=4096, V=128256)), 0), (dict(shape=dict(N=8192, H=4096, V=128256, R=4)), 0), (dict(figures=dict(dx=1e-3)), 0), (dict(dtype="float64"), 0)])
def test_only_a_stops_method_is_a_measured_point(tmp_path, change, points):
    (tmp_path / "25_results.json").write_text(json.dumps([RECORD | dict(date="2026-01-01"), RECORD | change]), encoding="utf-8")
    found = build_widget.measured(AXES, tmp_path)
    assert len(found) == points if not change else sum(point[-1] == "2026-01-02, commit abc" for point in found) == points


def test_there_may_be_no_record(tmp_path):
    assert build_widget.measured(AXES, tmp_path) == []


@pytest.fixture(scope="module")
def site(small, tmp_path_factory) -> Path:
    "A page with the widget, and a grid of few stops"
    folder = tmp_path_factory.mktemp("site")
    page = build_widget.fill(PAGE % '<p class="fl-plans"><a href="x">x</a></p>')
    for axis, stops in SMALL._asdict().items():
        place, full = stops.index(getattr(FIRST, axis)), AXES._asdict()[axis]
        page = page.replace(f'max="{len(full) - 1}" value="{full.index(getattr(FIRST, axis))}" aria-valuetext="{build_widget.stop_names(axis, stops)[place]}"', f'max="1" value="{place}" aria-valuetext="x"')
    (folder / "index.html").write_text(page, encoding="utf-8")
    (folder / GRID).write_text(build_widget.grid_script(small), encoding="utf-8")
    (folder / SCRIPT).write_text((ROOT / "tools" / SCRIPT).read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "styles.css").write_text((ROOT / "nbs" / "styles.css").read_text(encoding="utf-8"), encoding="utf-8")
    return folder / "index.html"


WITHOUT_A_BROWSER = pytest.mark.skipif("not __import__('browse').browser()", reason="no browser on this machine")
READ = """
  const read = () => [".fl-verdict", "caption", "tbody"].map(part => document.querySelector(part).innerText.replace(/\\s+/g, " "));
"""


class Keys:
    "A browser on a page, whose keys a test presses"

    def __init__(self, page: Path, ready: str = "return document.querySelector('.fl-sliders')?.hidden === false"):
        (theirs, to), (back, ours) = os.pipe(), os.pipe()
        command = " ".join([browser(), *QUIET, "--remote-debugging-pipe", f"3<&{theirs}", f"4>&{ours}"])
        self.process = subprocess.Popen(["bash", "-c", f"exec {command}"], pass_fds=(theirs, ours), stderr=subprocess.DEVNULL)
        os.close(theirs), os.close(ours)
        self.to, self.back, self.session = os.fdopen(to, "wb", 0), os.fdopen(back, "rb"), {}
        tab = self.ask("Target.createTarget", url=f"file://{page}")["targetId"]
        self.session = {"sessionId": self.ask("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]}
        for _ in range(100):
            if self.find(ready):
                break
            time.sleep(0.1)

    def ask(self, method: str, **params) -> dict:
        "What the browser answers to a command"
        self.to.write(json.dumps({"id": 1, "method": method, "params": params} | self.session).encode() + b"\0")
        while "id" not in (answer := json.loads(self.message())):
            pass
        return answer["result"]

    def message(self) -> bytes:
        "The next one, which ends with a zero"
        return b"".join(iter(lambda: self.back.read(1).strip(b"\0"), b""))

    def find(self, script: str):
        "What a script returns"
        found = self.ask("Runtime.evaluate", expression=f"(async () => {{ {script} }})()", awaitPromise=True, returnByValue=True)
        return found["result"].get("value")

    def press(self, key: str, number: int) -> None:
        "A key, down and up"
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=number)


@pytest.fixture(scope="module")
def keys(site) -> Iterator[Keys]:
    "A browser that shows the sliders"
    pressed = Keys(site)
    yield pressed
    pressed.process.terminate()
    pressed.process.wait()


def words(at: Stop) -> list[str]:
    "What the page is to say at a stop: the verdict, every figure and every reason"
    s = build_widget.shown(at)
    figures = [[figure_text(metric, s.codes[metric][m]) for metric in METRICS] + [s.said[2 + m]] for m in range(len(METHODS))]
    return [s.said[1].format(build_widget.limit_text(at, s.limit)), *sum(figures, [])]


def is_said(said: list[str], at: Stop) -> bool:
    "Does the page say that, word by word?"
    verdict, caption, rows = said
    expected, *figures = words(at)
    return verdict == expected and at.gpu in caption and all(figure in rows for figure in figures)


@WITHOUT_A_BROWSER
def test_a_keyboard_moves_the_verdict_and_the_bars(keys):
    before = keys.find(READ + "return read()")
    for axis in (*AXES._fields, "after the last"):
        focused = keys.find("return [document.activeElement.id, document.activeElement.ariaValueText]")
        keys.press(*{"fl-plan-budget": ("ArrowRight", 39), "fl-plan-gpu": ("ArrowLeft", 37)}.get(focused[0], ("Shift", 16)))
        keys.press("Tab", 9)
    after = keys.find(READ + "return read()")
    assert focused == ["fl-plan-gpu", "H200"] and keys.find("return document.getElementById('fl-plan-gpu').ariaValueText") == "L4"
    assert is_said(before, FIRST) and is_said(after, FIRST._replace(budget=2**26, gpu="L4")) and before[0] != after[0]


@WITHOUT_A_BROWSER
def test_without_a_script_there_is_a_table(site):
    bare = site.with_name("bare.html")
    bare.write_text(re.sub(r"<script.*?</script>", "", site.read_text(encoding="utf-8")), encoding="utf-8")
    read = READ + "return [...read(), document.querySelector('.fl-sliders').offsetHeight, document.querySelectorAll('tbody tr').length]"
    *said, height, rows = evaluate(bare, read)["found"]
    assert is_said(said, FIRST) and (height, rows) == (0, len(METHODS))


OUTSIDE = """
  const box = document.querySelector(".fl-plans"), end = box.getBoundingClientRect().right, texts = document.createTreeWalker(box, NodeFilter.SHOW_TEXT), found = [];
  while (texts.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(texts.currentNode);
    if (!texts.currentNode.parentElement.closest("thead") && range.getBoundingClientRect().right > end) found.push(range.toString());
  }
  return [innerWidth, found];
"""


@WITHOUT_A_BROWSER
@pytest.mark.parametrize("width", [360, 1280])
def test_a_screen_holds_it(keys, width):
    keys.ask("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
    assert keys.find(OUTSIDE) == [width, []]


@WITHOUT_A_BROWSER
@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not in .axe")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_sliders_can_be_used_by_all(keys, scheme):
    keys.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    assert keys.find(AXE.read_text(encoding="utf-8") + VIOLATIONS) == []
