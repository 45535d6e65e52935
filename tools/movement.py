"""What the moving pictures of the site show, step by step, by the algorithms themselves: numbers, no drawing."""
import ast
import math
import random
import runpy
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from project import ROOT, read_notebook


class Lanes(NamedTuple):
    "What the lanes of a row hold after a block: their maxima, the factors their sums took, and their sums"
    high: list[float]
    factor: list[float]
    total: list[float]


def row_of_scores(blocks: int, rows: int, lanes: int) -> list[int]:
    "Whole scores that grow along a row, so that maxima rise"
    drawn = random.Random(7)
    return [drawn.randint(-4, 3) + k // (rows * lanes) for k in range(blocks * rows * lanes)]


def online_softmax(scores: list[float], rows: int, lanes: int) -> Iterator[Lanes]:
    "The lanes of a row after each of its blocks of `rows` × `lanes` scores"
    high, total = [-math.inf] * lanes, [0.0] * lanes
    for first in range(0, len(scores), rows * lanes):
        block = scores[first:first + rows * lanes]
        before, high = high, [max(old, *block[c::lanes]) for c, old in enumerate(high)]
        factor = [math.exp(old - new) for old, new in zip(before, high)]
        total = [s * f + sum(math.exp(z - m) for z in block[c::lanes]) for c, (s, f, m) in enumerate(zip(total, factor, high))]
        yield Lanes(high, factor, total)


def together(last: Lanes) -> Lanes:
    "What lanes bring to their meeting: the row's maximum, each lane's factor, each lane's part of the sum"
    top = max(last.high)
    factor = [math.exp(m - top) for m in last.high]
    return Lanes([top] * len(factor), factor, [s * f for s, f in zip(last.total, factor)])


def tile_order(group: int, rows: int, columns: int) -> Iterator[tuple[int, int]]:
    "Row and column of each tile, as `swizzle_tile` gives them"
    for t in range(rows * columns):
        first, inner = t // (group * columns) * group, t % (group * columns)
        height = min(rows - first, group)
        yield first + inner % height, inner // height


class Walk(NamedTuple):
    "A step of a walk over tiles: the tiles of this step, panels (side and number) that came from HBM, panels in L2, reads so far"
    tiles: list[tuple[int, int]]
    read: set[tuple[str, int]]
    held: set[tuple[str, int]]
    reads: int


def walk(group: int, rows: int, columns: int, programs: int, cache: int) -> Iterator[Walk]:
    "Tiles in their order, `programs` at a time; L2 forgets the panel that was used longest ago"
    held: OrderedDict[tuple[str, int], None] = OrderedDict()
    order, reads = list(tile_order(group, rows, columns)), 0
    for first in range(0, len(order), programs):
        read = set()
        for panel in (panel for tile in order[first:first + programs] for panel in zip("xw", tile)):
            if panel not in held:
                read.add(panel)
                reads += 1
            held[panel] = None
            held.move_to_end(panel)
            if len(held) > cache:
                held.popitem(last=False)
        yield Walk(order[first:first + programs], read, set(held), reads)


def bound(node: ast.stmt) -> set[str]:
    "The names that a statement binds at a page's top level"
    inside = ast.walk(ast.Tuple(node.targets)) if isinstance(node, ast.Assign) else ()
    return {name.id for name in inside if isinstance(name, ast.Name)} | {getattr(node, "name", "")}


def of_page(page: str, given: dict[str, Any], *names: str) -> dict[str, Any]:
    "What a page binds to these names, by the statements that bind them and no others"
    cells = [cell["source"] for cell in read_notebook(ROOT / "nbs" / f"{page}.ipynb")["cells"] if cell["cell_type"] == "code"]
    kept = [node for source in cells for node in ast.parse(source).body if bound(node) & set(names)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "statements.py")
        path.write_text(ast.unparse(ast.Module(kept, [])), encoding="utf-8")
        found = runpy.run_path(str(path), given)
    return {name: found[name] for name in names}


class Span(NamedTuple):
    "A tile's time on a unit, in clocks"
    tile: int
    begin: float
    end: float


class Pipeline(NamedTuple):
    "What a multiprocessor does: a span for each copy, for each product and for each tile's epilogue"
    copies: list[Span]
    products: list[Span]
    epilogues: list[Span]

    def at(self, unit: list[Span], clock: float) -> Span | None:
        "The span of a unit at a time"
        return next((span for span in unit if span.begin <= clock < span.end), None)

    def back(self, k: int) -> float:
        "When stage k is given back: as the next product of its tile begins, or as its own ends"
        after = self.products[k + 1:k + 2]
        return after[0].begin if after and after[0].tile == self.products[k].tile else self.products[k].end

    def slot(self, number: int, slots: int, latency: float, clock: float) -> tuple[str, int]:
        "What a place of the ring holds at a time: nothing, a copy on its way, a stage that waits, or one in use; and of which tile"
        for k in range(number, len(self.copies), slots)[::-1]:
            copy, product = self.copies[k], self.products[k]
            if copy.begin <= clock:
                return "coming" if clock < copy.end + latency else "full" if clock < product.begin else "used" if clock < self.back(k) else "empty", copy.tile
        return "empty", 0


def pipeline(rung: Any, simulate: Any, features: int, tiles: int) -> Pipeline:
    "The page's own simulation of a rung"
    return Pipeline(*([Span(*span) for span in unit] for unit in simulate(rung, features, tiles).values()))


Table = list[list[float]]  # [T][S]


class Ctc(NamedTuple):
    "α with each frame's own emission, β without it, and the sum over all paths"
    alpha: Table
    beta: Table
    total: float

    @property
    def gamma(self) -> Table:
        "Posteriors"
        return [[a * b / self.total for a, b in zip(*rows)] for rows in zip(self.alpha, self.beta)]


def edges(word: str) -> list[list[int]]:
    "For each state of a word, a blank before, between and after its letters, the states from which a path may come"
    states = "".join(f"·{letter}" for letter in word) + "·"
    return [[s - k for k in range(3) if s >= k and (k < 2 or s % 2 and (s < 3 or states[s] != states[s - 2]))] for s in range(len(states))]


def ctc(emitted: Table, word: str) -> Ctc:
    "The sums over beginnings and over ends of all paths, for probabilities [T][S] of the states' symbols"
    sources, last = edges(word), len(emitted) - 1
    alpha, beta = [[1.0] + [0.0] * 2 * len(word)], [[0.0] * (2 * len(word) - 1) + [1.0, 1.0]]
    for p in emitted:
        alpha.append([p[s] * sum(alpha[-1][k] for k in came) for s, came in enumerate(sources)])
    for t in range(last, 0, -1):
        onward = [p * b for p, b in zip(emitted[t], beta[0])]
        beta.insert(0, [sum(onward[s] for s, came in enumerate(sources) if k in came) for k in range(len(sources))])
    return Ctc(alpha[1:], beta, alpha[-1][-1] + alpha[-1][-2])


def emissions(word: str, frames: int) -> Table:
    "Made-up probabilities of the states' symbols: each letter is a bump at its place, the blank lies between"
    drawn, rows = random.Random(3), []
    for t in range(frames):
        bumps = [2.6 * math.exp(-((t - (k + 0.5) * frames / len(word)) / 1.3) ** 2) + 0.5 * drawn.random() for k in range(len(word))]
        weights = [math.exp(z) for z in (1.2, *bumps)]
        rows.append([weights[(s + 1) // 2 if s % 2 else 0] / sum(weights) for s in range(2 * len(word) + 1)])
    return rows
