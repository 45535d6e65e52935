"The moving drawings of the site show what the algorithms do; they stop, and they are the same bytes each time."
import functools
import html
import math
import re
import types
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import build_movement
import movement
import pytest
import torch
from browse import LAYOUT, PHONE, WIDE, evaluate
from build_movement import CACHE, COLUMNS, FEATURES, PROGRAMS, ROWS, SCENES, C, R, filled, movement_of
from test_browse import AXE, VIOLATIONS
from test_plan_widget import PAGE, WITHOUT_A_BROWSER, Keys
from project import ROOT, notebooks

from fusedloss.core.lattice import interleave, may_skip
from fusedloss.core.products import swizzle_tile
from fusedloss.ctc import alpha_table, posterior_table
from workbook.measure import Shape

pytestmark = pytest.mark.thorough
DRAWING, HOLE = '<figure class="fl-figure"><svg></svg></figure>', '<p class="fl-movement fl-%s"><a href="x">x</a></p>'


def softmax_faults(m) -> list[str]:
    "Lanes against the definition, after each block, and where they meet"
    row = torch.tensor(m.row_of_scores(5, R, C), dtype=torch.float64)
    found, held = [], list(m.online_softmax(row.tolist(), R, C))
    for b, lanes in enumerate(held):
        seen = row[:(b + 1) * R * C].view(-1, C)
        want = seen.amax(0), (seen - seen.amax(0)).exp().sum(0)
        found += [f"block {b}"] * (not all(torch.allclose(torch.tensor(got, dtype=torch.float64), w) for got, w in zip((lanes.high, lanes.total), want)))
        found += [f"factor {b}"] * (b > 0 and lanes.factor != [math.exp(old - new) for old, new in zip(held[b - 1].high, lanes.high)])
    met = m.together(held[-1])
    return found + ["lse"] * (not math.isclose(met.high[0] + math.log(sum(met.total)), row.logsumexp(0).item()))


def walk_faults(m) -> list[str]:
    "Orders against the kernels' own, reads against the simulation of page 9"
    swizzled = types.FunctionType(swizzle_tile.fn.__code__, {"tl": types.SimpleNamespace(minimum=min)})
    page = m.of_page("09_product", dict(functools=functools, OrderedDict=OrderedDict, H200_L2=0, Shape=Shape), "order", "hbm_bytes")
    found = []
    for group, rows, columns in ((1, ROWS, COLUMNS), (4, ROWS, COLUMNS), (3, 7, 5)):
        want = [swizzled(t, rows, columns, group) for t in range(rows * columns)]
        found += [f"order {group}"] * (not list(m.tile_order(group, rows, columns)) == want == list(page["order"](group, rows, columns)))
        steps = list(m.walk(group, rows, columns, PROGRAMS, CACHE))
        moved = page["hbm_bytes"](group, 1, 128, Shape(128 * rows, 1, 128 * columns), 256 * CACHE)
        found += [f"reads {group}"] * (256 * steps[-1].reads != moved) + [f"L2 {group}"] * any(len(s.held) > CACHE for s in steps)
        found += [f"tiles {group}"] * (sum((s.tiles for s in steps), []) != want or steps[0].reads != len(steps[0].read))
    return found


def pipeline_faults(m) -> list[str]:
    "A copy begins when the one before is done and its place was given back, and what is multiplied is in its place"
    page, found = build_movement.of_product(), []
    for name, rung in {"two stages": page["Rung"](stages=2), **{name: page["RUNGS"][name] for name in ("7 clusters of 2", "8 in turn")}}.items():
        stages, work = rung.stages, m.pipeline(rung, page["simulate"], FEATURES, 5)
        for k, copy in enumerate(work.copies):
            free = max(work.copies[k - 1].end if k else 0, work.back(k - stages) if k >= stages else 0)
            state = work.slot(k % stages, stages, page["LATENCY"], copy.end + 1e-3)
            found += [f"{name}: copy {k}"] * (copy.begin != free or state != ("coming", copy.tile))
            product = work.products[k]
            inside = [work.slot(j, stages, page["LATENCY"], product.begin + 1) for j in range(stages)]
            found += [f"{name}: product {k}"] * (inside[k % stages] != ("used", product.tile) or [state for state, _ in inside].count("used") != 1)
            found += [f"{name}: at {k}"] * (work.at(work.products, product.begin + 1) != product)
            waits = product.begin > copy.end + page["LATENCY"] + 1e-3
            full = work.slot(k % stages, stages, page["LATENCY"], product.begin - 1e-6)[0]
            found += [f"{name}: {k} is {full}"] * (waits and full != "full")
    return found


def ctc_faults(m) -> list[str]:
    "α and γ against the tables of page 20"
    found = []
    for word in ("all", "ab", "see"):
        labels = torch.tensor([[ord(letter) for letter in word]])
        emitted = m.emissions(word, 9)
        given = torch.tensor(emitted, dtype=torch.float64).log()[:, None]
        T, L, skip = torch.tensor([9]), torch.tensor([len(word)]), may_skip(interleave(labels, 0))
        alphas, ours = alpha_table(given, skip, T), m.ctc(emitted, word)
        want = {"alpha": alphas[1:, 0].exp(), "gamma": posterior_table(alphas, skip, T, L)[:, 0]}
        found += [f"{word}: {name}" for name, rows in want.items() if not torch.allclose(torch.tensor(getattr(ours, name), dtype=torch.float64), rows)]
        found += [f"{word}: Z"] * any(not math.isclose(sum(a * b for a, b in zip(*rows)), ours.total) for rows in zip(ours.alpha, ours.beta))
    return found


FAULTS = (softmax_faults, walk_faults, pipeline_faults, ctc_faults)


@pytest.mark.parametrize("faults", FAULTS)
def test_steps_are_the_algorithms(faults):
    assert faults(movement) == []


BUGS = {
    "a sum that is not rescaled": ("total = [s * f + sum", "total = [s + sum"),
    "another lane's scores": ("max(old, *block[c::lanes])", "max(old, *block[c:c + rows])"),
    "lanes that meet as they are": ("[s * f for s, f in zip(last.total, factor)]", "last.total"),
    "across, then down": ("yield first + inner % height, inner // height", "yield first + inner // columns, inner % columns"),
    "no last group": ("min(rows - first, group)", "group"),
    "the panel that came first is forgotten": ("            held.move_to_end(panel)\n", ""),
    "a cache of one panel more": ("if len(held) > cache:", "if len(held) > cache + 1:"),
    "a stage without its latency": ('"coming" if clock < copy.end + latency else', '"coming" if clock < copy.end else'),
    "a stage given back as its product ends": ("return after[0].begin if after and after[0].tile == self.products[k].tile else self.products[k].end", "return self.products[k].end"),
    "equal letters skip the blank": ("(s < 3 or states[s] != states[s - 2])", "True"),
    "β with its frame's emission": ("for p, b in zip(emitted[t], beta[0])]", "for p, b in zip(emitted[t - 1], beta[0])]"),
    "ends in the last blank alone": ("[1.0, 1.0]]", "[0.0, 1.0]]"),
}


def changed(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
    "A module with another text"
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1
    other = types.ModuleType("changed_" + module.__name__)
    exec(compile(source.replace(old, new), module.__file__, "exec"), vars(other))
    return other


@pytest.mark.parametrize("old, new", BUGS.values(), ids=BUGS)
def test_a_planted_bug_is_noticed(old, new):
    other = changed(movement, old, new)
    assert any(faults(other) for faults in FAULTS)


def said(svg: str, steps: int) -> list[list[str]]:
    "The words that a panel shows in each step, by its rules"
    rules = {name: re.findall(r"([\d.]+)%\{visibility:(\w+)\}", frames) for name, frames in re.findall(r"@keyframes ([\w-]+)\{(.*?\})\}", svg)}
    words = [[] for _ in range(steps)]
    for name, text in re.findall(r'<text [^>]*?(?:class="([\w-]+)"[^>]*)?>([^<]*)</text>', svg):
        for k in range(steps):
            at = [look for begin, look in rules.get(name, []) if float(begin) <= 100 * (k + 0.5) / steps]
            words[k] += [html.unescape(text)] * (not name or at[-1] == "visible")
    return words


def test_what_stands_in_a_drawing_are_the_steps():
    rows, groups = SCENES["walk"]().panels
    for panel, group in ((rows, 1), (groups, 4)):
        steps = list(movement.walk(group, ROWS, COLUMNS, PROGRAMS, CACHE))
        shown = said(panel.svg(), panel.steps)
        assert all(f"{s.reads} panels read from memory" in words for s, words in zip(steps, shown))
    _, lanes = SCENES["lanes"]().panels
    shown = said(lanes.svg(), lanes.steps)
    for b, held in enumerate(movement.online_softmax(movement.row_of_scores(build_movement.BLOCKS, R, C), R, C)):
        want = [build_movement.number(value) for row in held for value in row]
        assert not [w for w in want if w not in shown[build_movement.PHASES * (b + 1) - 1]]
    lse = torch.tensor(movement.row_of_scores(build_movement.BLOCKS, R, C), dtype=torch.float64).logsumexp(0).item()
    assert any(word.endswith(f" = {lse:.3g}") for word in shown[-1])


def test_the_walks_cross():
    found = movement.ctc(movement.emissions("all", build_movement.FRAMES), "all")
    half, last = build_movement.FRAMES // 2, build_movement.FRAMES - 1
    colour = lambda t, k: {build_movement.side(found, t, s, k)[5:12] for s in range(7) if not build_movement.side(found, t, s, k).endswith("00")}
    assert [colour(t, half - 1) for t in range(last + 1)] == [{build_movement.ALPHA}] * half + [{build_movement.BETA}] * half
    assert [colour(t, last) for t in range(last + 1)] == [{build_movement.BETA}] + [set()] * (last - 1) + [{build_movement.ALPHA}]


@pytest.mark.parametrize("name", SCENES)
def test_a_drawing_is_the_same_each_time_and_has_no_script(name):
    drawn = movement_of(name)
    assert drawn == movement_of(name) and "<script" not in drawn


def test_each_has_one_place_below_a_drawing():
    places = [name for path in notebooks() for name in build_movement.PLACE.findall(path.read_text(encoding="utf-8").replace('\\"', '"'))]
    assert sorted(places) == sorted(SCENES)
    page = filled(f"<h2>x</h2>{DRAWING}</div><p>between</p>{HOLE % 'walk'}<p>after</p>")
    assert "fl-movement fl-walk" not in page and DRAWING not in page and page.endswith("</div><p>between</p><p>after</p>")


@pytest.mark.parametrize("page", [HOLE % "walk", DRAWING + "<h2>x</h2>" + HOLE % "walk", DRAWING + HOLE % "walk" + HOLE % "lanes"])
def test_a_place_without_a_drawing_is_refused(page):
    with pytest.raises(ValueError, match="expected a drawing before it"):
        filled(page)


def test_a_look_is_asked_for_each_step():
    panel = build_movement.Panel("x", 3, 1, 0, 10, "x", "x")
    with pytest.raises(ValueError, match="a look for each of 3 steps, got 2"):
        panel.moving(["fill:red"] * 2)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    "A page with all of them"
    path = tmp_path_factory.mktemp("site") / "index.html"
    path.write_text(filled(PAGE % "".join(DRAWING + HOLE % name for name in SCENES)), encoding="utf-8")
    path.with_name("styles.css").write_text((ROOT / "nbs" / "styles.css").read_text(encoding="utf-8"), encoding="utf-8")
    return path


MOVING = """
  const figures = [...document.querySelectorAll("figure")], moves = document.getAnimations();
  return document.readyState == "complete" && figures.length > 0 && figures.every(figure => moves.some(a => figure.contains(a.effect.target)));
"""


@pytest.fixture(scope="module")
def keys(site) -> Iterator[Keys]:
    pressed = Keys(site, MOVING)
    yield pressed
    pressed.process.terminate()
    pressed.process.wait()


STATES = """
  const moves = [...document.querySelectorAll("figure")].map(figure => new Set(document.getAnimations().filter(a => figure.contains(a.effect.target)).map(a => a.playState)));
  return [moves.map(states => [...states].join()), document.querySelector(".fl-pause").offsetHeight > 0];
"""


@WITHOUT_A_BROWSER
def test_a_keyboard_pauses_one_and_lets_it_go_on(keys):
    seen = [keys.find(STATES)]
    keys.press("Tab", 9)
    for _ in range(2):
        keys.ask("Input.dispatchKeyEvent", type="keyDown", key=" ", code="Space", windowsVirtualKeyCode=32, text=" ")
        keys.ask("Input.dispatchKeyEvent", type="keyUp", key=" ", code="Space", windowsVirtualKeyCode=32)
        seen.append(keys.find(STATES))
    run = ["running"] * len(SCENES)
    assert seen == [[run, True], [["paused", *run[1:]], True], [run, True]]


@WITHOUT_A_BROWSER
@pytest.mark.parametrize("media", [dict(features=[{"name": "prefers-reduced-motion", "value": "reduce"}]), dict(media="print")], ids=["less motion", "print"])
def test_it_stands_still_for_those_who_ask(keys, media):
    keys.ask("Emulation.setEmulatedMedia", **media)
    seen = keys.find(STATES)
    read = keys.find("return [...document.querySelectorAll('svg text')].filter(t => getComputedStyle(t).visibility == 'visible').length")
    keys.ask("Emulation.setEmulatedMedia", media="", features=[])
    assert seen == [[""] * len(SCENES), False] and read > 50


@WITHOUT_A_BROWSER
@pytest.mark.parametrize("width", [PHONE, WIDE])
def test_letters_are_read_on_every_screen(site, width):
    seen = evaluate(site, LAYOUT, width)
    assert seen["errors"] == [] and {key: seen["found"][key] for key in ("letters", "beyond", "scrolls")} == {"letters": [], "beyond": [], "scrolls": False}


@WITHOUT_A_BROWSER
@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not in .axe")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_used_by_all(keys, scheme):
    keys.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    assert keys.find(AXE.read_text(encoding="utf-8") + VIOLATIONS) == []
