"""The moving pictures of the site: a page that holds PLACE after a drawing shows in its place a drawing that moves, with the steps of `movement`.

Motion is CSS within each SVG, on a screen alone and for readers who do not ask for less of it; all others see the step STILL of a scene. A box pauses it.
"""
import html
import math
import re
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import movement
from site_pages import fill_places

from fusedloss.core.rates import H200
from workbook.drawing import stage_color

PLACE = re.compile(r'<p class="fl-movement fl-(\w+)">.*?</p>', re.DOTALL)
FIGURE = '<figure class="fl-figure">'
READ = "#D55E00"  # what comes from memory in this step
WIDTH = 334  # px of a panel: a phone holds it
MOVES = "@media screen and (prefers-reduced-motion:no-preference){%s}"


class Panel:
    "A drawing whose elements change from step to step; each look is kept once, as the rule of a class"

    def __init__(self, name: str, steps: int, seconds: float, still: int, height: int, title: str, alt: str):
        self.name, self.steps, self.seconds, self.still, self.height, self.alt = name, steps, seconds, still, height, alt
        self.parts: list[str] = []
        self.rules: dict[str, int] = {}
        self.text(0, 13, title, weight="bold")

    def moving(self, looks: list[str]) -> str:
        "The attributes of an element with a look, in CSS, for each step"
        if len(looks) != self.steps:
            raise ValueError(f"{self.name}: expected a look for each of {self.steps} steps, got {len(looks)}")
        shown = f'style="{looks[self.still]}"'
        if len(set(looks)) == 1:
            return shown
        runs = [(look, len(list(run))) for look, run in groupby(looks)]
        begins = [sum(length for _, length in runs[:k]) for k in range(len(runs))]
        frames = "".join(f"{100 * begin / self.steps:.4g}%{{{look}}}" for begin, (look, _) in zip(begins, runs))
        return f'class="{self.name}{self.rules.setdefault(frames, len(self.rules))}" {shown}'

    def boxes(self, places: Iterable[tuple[float, float]], wide: float, high: float, looks: list[str]) -> None:
        "Rectangles that look alike at every step"
        shape = "".join(f"M{x:.4g} {y:.4g}h{wide:.4g}v{high:.4g}h-{wide:.4g}z" for x, y in places)
        self.parts.append(f'<path d="{shape}" {self.moving(looks)}/>')

    def text(self, x: float, y: float, words: list[str] | str, anchor: str = "start", weight: str = "normal") -> None:
        "Words, or words for each step"
        said = words if isinstance(words, list) else [words] * self.steps
        for word in dict.fromkeys(filter(None, said)):
            attributes = self.moving([f"visibility:{'visible' if here == word else 'hidden'}" for here in said]) if len(set(said)) > 1 else ""
            ends = f' text-anchor="{anchor}"' * (anchor != "start") + f' font-weight="{weight}"' * (weight != "normal")
            self.parts.append(f'<text x="{x:g}" y="{y:g}"{ends} {attributes}>{html.escape(word)}</text>')

    def line(self, points: str, looks: list[str] | str = "stroke-opacity:1") -> None:
        "A path"
        self.parts.append(f'<path d="{points}" fill="none" {self.moving([looks] * self.steps if isinstance(looks, str) else looks)}/>')

    def gliding(self, points: str, far: float) -> None:
        "A path that goes to the right all the time, `far` px in all"
        begin, end = (f"transform:translateX({x:.4g}px)" for x in (0, far))
        k = self.rules.setdefault(f"0%{{{begin};animation-timing-function:linear}}to{{{end}}}", len(self.rules))
        here = far * (self.still + 0.5) / self.steps
        self.parts.append(f'<path class="{self.name}{k}" d="{points}" stroke-width="2" style="transform:translateX({here:.4g}px)"/>')

    def svg(self) -> str:
        "The panel with its motion"
        rules = f"svg.{self.name} *{{animation:{self.seconds:g}s step-end infinite}}" + "".join(
            f"@keyframes {self.name}{k}{{{frames}}}svg .{self.name}{k}{{animation-name:{self.name}{k}}}" for frames, k in self.rules.items())
        return (f'<svg class="{self.name}" role="img" aria-label="{html.escape(self.alt)}" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
                f'height="{self.height}" font-size="12"><style>{MOVES % rules}</style>{"".join(self.parts)}</svg>')


def fill(color: str, opacity: float) -> str:
    "A look"
    return f"fill:{color}{round(255 * opacity):02x}"


class Scene(NamedTuple):
    "Panels side by side, and what is seen in them"
    panels: list[Panel]
    caption: str


# The walk over tiles and L2, of page 7

ROWS, COLUMNS, PROGRAMS, CACHE, WAIT = 8, 16, 8, 10, 4
TILE = stage_color(7)


def walk_panel(name: str, group: int, title: str) -> Panel:
    "A walk over tiles by rows in groups, and the panels that it reads"
    steps = list(movement.walk(group, ROWS, COLUMNS, PROGRAMS, CACHE))
    shown = [*steps, *steps[-1:] * WAIT]
    p = Panel(name, len(shown), 0.8 * len(shown), 7, 196, title, f"{ROWS} by {COLUMNS} tiles, {PROGRAMS} at a time, {title.lower()}, and beside them "
              f"the rows of x and w that L2 holds. At the end {steps[-1].reads} panels have been read from memory; the panels are {ROWS + COLUMNS}.")
    x0, y0, wide, high = 42, 52, 18, 14
    for at, step in enumerate(steps):
        places = ((x0 + column * wide, y0 + row * high) for row, column in step.tiles)
        p.boxes(places, wide, high, [fill(TILE, 0 if k < at else 1 if k == at else 0.3) for k in range(len(shown))])
    for side, count in zip("xw", (ROWS, COLUMNS)):
        for k in range(count):
            looks = [fill(READ, 1) if n < len(steps) and (side, k) in s.read else fill(TILE, 0.6 * ((side, k) in s.held)) for n, s in enumerate(shown)]
            p.boxes([(x0 - 18, y0 + k * high + 2) if side == "x" else (x0 + k * wide + 3, y0 - 15)], 12, 10, looks)
    p.text(8, y0 + ROWS * high / 2 + 4, "x", anchor="middle")
    p.text(x0 + COLUMNS * wide / 2, y0 - 22, "w", anchor="middle")
    p.text(x0, y0 + ROWS * high + 20, [f"{s.reads} panels read from memory" for s in shown])
    return p


def walk() -> Scene:
    "One order beside the other"
    return Scene([walk_panel("fl-rows-", 1, "Row by row"), walk_panel("fl-groups-", 4, "In groups of four rows")],
                 f"{PROGRAMS} tiles at a time, faint when done. Beside them panels, the rows of x and w that they need: red when read from memory, filled while L2 "
                 f"({CACHE} panels) holds them.")


# The online softmax by columns, of page 4

BLOCKS, R, C = 4, 2, 4
LANE = stage_color(4)
PHASES = 3  # of a block: its maxima, its factors, its sums


def number(value: float) -> str:
    "Three figures; −∞ as it is written"
    return "−∞" if value == -math.inf else f"{value:.3g}".replace("-", "−")


def score_panel(scores: list[int], steps: int, parts: list[str]) -> Panel:
    "The row in blocks, and what is done with them"
    p = Panel("fl-row-", steps, 1.2 * steps, steps - 1, 150, f"A row of {len(scores)} logits, in blocks of {R} × {C}",
              f"{len(scores)} logits in {BLOCKS} blocks of {R} times {C}; one block after the other is read.")
    for b in range(BLOCKS):
        now = [fill(LANE, 0.75 if k // PHASES == b else 0.2 if k // PHASES > b else 0) for k in range(steps)]
        p.boxes([(b * 84, 44)], 80, 44, now)
        p.text(b * 84 + 40, 38, f"block {b}", anchor="middle")
        for k, score in enumerate(scores[b * R * C:(b + 1) * R * C]):
            p.text(b * 84 + 10 + k % C * 20, 62 + k // C * 18, number(score), anchor="middle")
    p.text(0, 118, parts)
    return p


def lane_panel(name: str, held: list[movement.Lanes], answer: str, alt: str) -> Panel:
    "The columns' numbers, a line for each, and the row's log-sum-exp"
    steps = len(held)
    p = Panel(name, steps, 1.2 * steps, steps - 1, 150, "The numbers of each column", alt)
    for k, (head, column) in enumerate(zip(("m", "factor", "s"), zip(*held))):
        p.text(112 + 104 * k, 38, head, anchor="end")
        for c in range(C):
            p.text(112 + 104 * k, 58 + 19 * c, ["" if math.isnan(row[c]) else number(row[c]) for row in column], anchor="end")
    for c in range(C):
        p.text(0, 58 + 19 * c, f"column {c}")
    p.line(f"M0 43H{WIDTH}")
    p.text(0, 142, [""] * (steps - 2) + [answer] * 2)
    return p


def lane_steps(scores: list[int]) -> tuple[list[str], list[movement.Lanes]]:
    "For each step what is done, and the numbers of the columns; a factor is not a number where none is taken"
    done, high, factor, total = [], [], [], []
    m, s = [-math.inf] * C, [0.0] * C
    for b, lanes in enumerate(movement.online_softmax(scores, R, C)):
        done += [f"Block {b}: each column's maximum", "The sums take the factor exp(old m − new m)", "The block's exp(logit − m) are added"]
        high += [lanes.high] * PHASES
        factor += [[math.nan] * C, lanes.factor, lanes.factor]
        total += [s, [a * f for a, f in zip(s, lanes.factor)], lanes.total]
        m, s = lanes.high, lanes.total
    met = movement.together(movement.Lanes(m, [], s))
    done += ["End of the row: the maximum of all columns", "The sums take the factor exp(column's m − m)", *["All sums together give the log-sum-exp"] * 2]
    high += [met.high] * 4
    factor += [[math.nan] * C, *[met.factor] * 3]
    total += [s, *[met.total] * 3]
    return done, list(map(movement.Lanes, high, factor, total))


def lanes() -> Scene:
    "A row that is read once"
    scores = movement.row_of_scores(BLOCKS, R, C)
    done, held = lane_steps(scores)
    top, total = max(held[-1].high), sum(held[-1].total)
    lse = f"lse = {number(top)} + ln {number(total)} = {number(top + math.log(total))}"
    steps = len(done)
    right = lane_panel("fl-lanes-", held, lse, f"Each column's maximum, factor and sum after every block. In the end {lse}.")
    return Scene([score_panel(scores, steps, done), right], "Each column of a block has its own maximum m and sum s. If a column's maximum rises, its sum shrinks by a factor. "
                 "No logit is read twice.")


# The pipeline of the product, of page 9

FEATURES, TILES, MOMENTS = 384, 4, 96
TILE_COLORS = (stage_color(9), stage_color(4))
OPACITY = {"empty": 0, "coming": 0.25, "full": 0.6, "used": 1}


def of_product() -> dict:
    "The page's own simulation"
    given = {"math": math, "NamedTuple": NamedTuple, "H200": H200}
    return movement.of_page("09_product", given, "Rung", "RUNGS", "SMS", "LATENCY", "PORT", "L2_SHARE", "classes_of", "clocks_of", "simulate")


def joined(unit: list[movement.Span], clocks: float) -> list[movement.Span]:
    "Spans without a gap, of one tile, as one; up to a time"
    found: list[movement.Span] = []
    for span in (span for span in unit if span.begin < clocks):
        first = found.pop() if found and found[-1].tile == span.tile and span.begin - found[-1].end < 1 else span
        found.append(movement.Span(span.tile, first.begin, min(span.end, clocks)))
    return found


def timeline(p: Panel, units: Iterable[list[movement.Span]], clocks: float, x0: float, y0: float) -> None:
    "Three lanes, a bar for each tile, and the line of now"
    scale = (WIDTH - x0) / clocks
    for lane, (name, unit) in enumerate(zip(("copies", "tensor cores", "epilogue"), units)):
        p.text(x0 - 6, y0 + 11 + 17 * lane, name, anchor="end")
        for tile, begin, end in joined(unit, clocks):
            p.boxes([(x0 + begin * scale, y0 + 17 * lane)], (end - begin) * scale, 13, [fill(TILE_COLORS[tile % 2], 0.6) + ";stroke:none"] * p.steps)
    p.gliding(f"M{x0:g} {y0 - 4:g}v56", WIDTH - x0)


def pipeline_panel(name: str, rung: str, title: str, clocks: float, found: dict) -> Panel:
    "The ring, the units and their time"
    stages, work = found["RUNGS"][rung].stages, movement.pipeline(found["RUNGS"][rung], found["simulate"], FEATURES, 2 * TILES)
    moments = [clocks * (k + 0.5) / MOMENTS for k in range(MOMENTS)]
    busy = sum(min(end, clocks) - begin for _, begin, end in joined(work.products, clocks)) / clocks
    p = Panel(name, MOMENTS, 16, MOMENTS * 5 // 8, 196, title, f"A ring of {stages} stages, the tensor cores and the epilogue of one multiprocessor; {title}. "
              f"The tensor cores multiply in {busy:.0%} of the time that is shown.")
    for k in range(stages):
        states = [work.slot(k, stages, found["LATENCY"], clock) for clock in moments]
        p.boxes([(98 + 60 * k, 26)], 54, 22, [fill(TILE_COLORS[tile % 2], OPACITY[state]) for state, tile in states])
    p.text(92, 41, "ring of stages", anchor="end")
    for label, unit, y in (("tensor cores", work.products, 56), ("epilogue", work.epilogues, 86)):
        spans = [work.at(unit, clock) for clock in moments]
        p.text(92, y + 15, label, anchor="end")
        p.boxes([(98, y)], 234, 22, [fill(TILE_COLORS[span.tile % 2] if span else TILE_COLORS[0], 0.6 * bool(span)) for span in spans])
        p.text(215, y + 15, [f"tile {span.tile}" if span else "waits" for span in spans], anchor="middle")
    timeline(p, work, clocks, 98, 122)
    p.text(98, 190, f"tensor cores multiply {busy:.0%} of the time")
    return p


def pipeline() -> Scene:
    "Two versions of the page"
    found = of_product()
    last = movement.pipeline(found["RUNGS"]["7 clusters of 2"], found["simulate"], FEATURES, TILES).epilogues[-1].end
    panels = [pipeline_panel("fl-shared-", "7 clusters of 2", "Two warp groups share each tile", last, found),
              pipeline_panel("fl-turn-", "8 in turn", "Each warp group has its own tile", last, found)]
    return Scene(panels, f"The simulation at {FEATURES} features, during {last:.0f} clocks; tiles in two colours by turns. A stage is on its way (faint), has arrived, or is "
                 "multiplied (full colour).")


# α meets β, of page 20

WORD, FRAMES = "all", 10
ALPHA, BETA, GAMMA = map(stage_color, (13, 12, 14))


def x_of(t: int) -> float:
    "Where a frame is"
    return 42 + 31 * t


def y_of(s: int) -> float:
    "Where a state is"
    return 40 + 20 * s


def lattice(p: Panel) -> None:
    "States, frames and the edges of all paths"
    sources = movement.edges(WORD)
    p.line("".join(f"M{x_of(t)} {y_of(k)}L{x_of(t + 1)} {y_of(s)}" for t in range(FRAMES - 1) for s, came in enumerate(sources) for k in came), "stroke-opacity:.2")
    for s in range(len(sources)):
        p.text(14, y_of(s) + 4, WORD[s // 2] if s % 2 else "·", anchor="middle")
    for t in range(0, FRAMES, 3):
        p.text(x_of(t), y_of(len(sources)) + 4, str(t), anchor="middle")


def dots(p: Panel, t: int, looks: Callable[[int, int], str]) -> None:
    "The states of a frame; their looks by state and step"
    for s in range(2 * len(WORD) + 1):
        p.boxes([(x_of(t) - 7, y_of(s) - 7)], 14, 14, [looks(s, k) for k in range(p.steps)])


def shade(row: list[float], s: int) -> float:
    "A state's share of the largest of its frame, so that small numbers are seen: its root"
    return math.sqrt(row[s] / max(row))


def side(found: movement.Ctc, t: int, s: int, k: int) -> str:
    "What the walks have of a frame at step k, where α is at frame k and β at frame FRAMES − 1 − k: rows that are stored, and the two that move"
    back = FRAMES - 1 - k
    if t == k or t < min(k, back):
        return fill(ALPHA, shade(found.alpha[t], s))
    return fill(BETA, shade(found.beta[t], s)) if t == back or t > max(k, back) else fill(ALPHA, 0)


def meeting() -> Scene:
    "Two walks and what they leave"
    found, ends = movement.ctc(movement.emissions(WORD, FRAMES), WORD), [*range(FRAMES), *[FRAMES - 1] * 3]
    met = f"ln Z = {number(math.log(found.total))}, from the frame where they meet"
    alt = f"The lattice of the word {WORD}, {2 * len(WORD) + 1} states over {FRAMES} frames. "
    left = Panel("fl-walks-", len(ends), 0.9 * len(ends), 7, 206, "α from the left, β from the right", f"{alt}α fills the left half and β the right; then each "
                 "crosses what the other has stored.")
    right = Panel("fl-gamma-", len(ends), 0.9 * len(ends), 7, 206, "γ = αβ / Z", f"{alt}After the middle posteriors appear, two frames at a time. {met}.")
    for p in (left, right):
        lattice(p)
    for t in range(FRAMES):
        over = [n >= FRAMES for n in range(len(ends))]
        dots(left, t, lambda s, n: fill(ALPHA, 0) if over[n] else side(found, t, s, ends[n]))
        dots(right, t, lambda s, n: fill(GAMMA, shade(found.gamma[t], s) if FRAMES - 1 - ends[n] <= t <= ends[n] else 0))
    left.text(14, 202, [f"α at frame {k}, β at frame {FRAMES - 1 - k}: " + ("stored" if k < FRAMES // 2 else "times what is stored") for k in range(FRAMES)]
              + ["every row is multiplied"] * (len(ends) - FRAMES))
    right.text(14, 202, [met if k >= FRAMES // 2 else "" for k in ends])
    return Scene([left, right], f"States of “{WORD}” over {FRAMES} frames; · is the blank. The fuller a square, the larger its share of the frame.")


SCENES: dict[str, Callable[[], Scene]] = {"walk": walk, "lanes": lanes, "pipeline": pipeline, "meeting": meeting}
MADE = "In a notebook the cell above draws a still."


def movement_of(name: str) -> str:
    "A scene as a figure, with a box that pauses it"
    scene = SCENES[name]()
    panels = "".join(p.svg() for p in scene.panels)
    return (f'<figure class="fl-figure fl-movement"><div class="fl-panels">{panels}</div><figcaption><label class="fl-pause"><input type="checkbox"> Pause</label> '
            f"{html.escape(scene.caption)} {MADE}</figcaption></figure>")


def filled(page: str) -> str:
    "A page whose drawing before each place is replaced by the moving one; `ValueError` where no drawing stands before it"
    while place := PLACE.search(page):
        before, begin, figure = page[:place.start()].rpartition(FIGURE)
        drawing, end, between = figure.partition("</figure>")
        if not (begin and end) or "<figure" in between or "<h2" in between:
            raise ValueError(f"{place[0]}: expected a drawing before it, got none")
        page = before + movement_of(place[1]) + between + page[place.end():]
    return page


def fill_all(out: Path) -> None:
    "Put the moving drawings into the pages of a site that have a place for them"
    fill_places(out, PLACE, filled)
