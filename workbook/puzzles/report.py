"""`check(3, kernel)` runs a kernel on Triton's interpreter, says in words what is wrong with it, counts the bytes that it moves and draws what it touched."""

__all__ = ["check", "picture"]


import html
import re
from typing import Any, NamedTuple, Optional

import numpy as np

from fusedloss.core.tables import si
from fusedloss.core.triton import triton
from workbook.drawing import as_drawing, Drawing, drawing_style, GREY, INK, stage_color
from workbook.puzzles.refusals import refusal, stop_words, with_causes
from workbook.puzzles.tasks import Case, TASKS
from workbook.puzzles.verdicts import faults, loads_along, row_and_column, size_words, wrong_accesses
from workbook.puzzles.watch import ANYONE, Array, called, Endless, Watch, watch_kernel


NOBODY, SEVERAL = -2, ANYONE


def rectangles(programs: np.ndarray) -> list[tuple[int, int, int, int, int]]:
    "A matrix of programs as (row, column, rows, columns, program): runs of a row, joined where rows are alike."
    found, above = [], []
    for i, row in enumerate(programs):
        ends = [0, *(np.flatnonzero(np.diff(row)) + 1), len(row)]
        runs = [(a, b - a, int(row[a])) for a, b in zip(ends, ends[1:])]
        if runs == above:
            found[-len(runs) :] = [(r, c, h + 1, w, p) for r, c, h, w, p in found[-len(runs) :]]
        else:
            found += [(i, a, 1, width, program) for a, width, program in runs]
        above = runs
    return found


def color_of(program: int) -> str:
    "A program's colour; grey for several."
    return GREY if program == SEVERAL else stage_color(program % 7 + 1)


def label_of(name: str, array: Array) -> str:
    "An array's name, and below it its shape."
    return f"{name}\n{size_words(array)}"


def draw_array(
    # of each place
    ax,
    left: float,
    label: str,
    array: Array,
    programs: np.ndarray,
    # fewer rows or columns have no room for a number of two digits
    grid: tuple[int, ...],
    small: tuple[float, float],
) -> None:
    "One array: its places in the colours of programs, the frames of its tiles, its name and shape."
    from matplotlib.patches import Rectangle

    (rows, columns), (high, wide) = array.shape, array.tile
    for i, j, h, w, program in rectangles(programs):
        if program == NOBODY:
            continue
        ax.add_patch(
            Rectangle((left + j, i), w, h, fc=color_of(program), alpha=0.35 if program == SEVERAL else 0.75, lw=0)
        )
        number = called(program, grid) if program >= 0 else ""
        if number and h >= small[0] and w >= small[1] * max(1, len(number) / 2.5):
            ax.text(left + j + w / 2, i + h / 2, number, ha="center", va="center", fontsize=8.5)
    for i in range(0, rows, high):
        for j in range(0, columns, wide):
            if (high, wide) != (1, 1):
                ax.add_patch(Rectangle((left + j, i), wide, high, fill=False, ec=GREY, lw=0.5, ls=":"))
    ax.add_patch(Rectangle((left, 0), columns, rows, fill=False, ec=INK, lw=1))
    ax.text(left, -0.3, label, va="bottom", fontsize=8.5)


def covered(array: Array) -> tuple[int, int]:
    "Rows and columns of all its tiles, with what lies beyond it."
    return tuple(-(-size // tile) * tile for size, tile in zip(array.shape, array.tile))


def draw_arrays(
    case: Case, programs: dict[str, np.ndarray], missed: dict[str, list], alt: str, caption: str
) -> Drawing:
    "All arrays of a launch side by side."
    from matplotlib.patches import Rectangle
    import matplotlib.pyplot as plt

    width, height = (
        sum(covered(a)[1] + 2 for a in case.arrays.values()),
        max(covered(a)[0] for a in case.arrays.values()),
    )
    high = max(1.0, 0.14 * width / 8.2)  # a place's height in its widths: the number of a program has to fit
    inches = min(8.2 / width, 3.6 / (high * height))  # of a place's width
    labels = {name: label_of(name, array) for name, array in case.arrays.items()}
    rooms = [
        max(covered(a)[1] + 2, 0.07 * max(map(len, labels[name].split("\n"))) / inches + 1)
        for name, a in case.arrays.items()
    ]
    width, small = sum(rooms), (0.11 / (inches * high), 0.12 / inches)
    with drawing_style():
        fig, ax = plt.subplots(figsize=(inches * width, inches * high * height + 0.6))
        for left, (name, array) in zip(np.cumsum([0, *rooms]), case.arrays.items()):
            draw_array(ax, left, labels[name], array, programs[name], case.grid, small)
            for i, j, h, w in missed.get(name, []):
                ax.add_patch(
                    Rectangle((left + j + 0.05, i + 0.05), w - 0.1, h - 0.1, fill=False, ec="#d00000", lw=1.6, zorder=3)
                )
        ax.set(xlim=(-0.5, width), ylim=(height + 1.1, -1), aspect=high)
        ax.axis("off")
        return as_drawing(fig, alt, caption)


def launch_words(case: Case) -> str:
    "The grid of a launch, its sizes and its constants."
    sizes = [f"{name} {value}".replace("-", "−") for name, value in case.others.items()]
    return ", ".join([f"{' × '.join(map(str, case.grid))} programs", *sizes])


def question_picture(case: Case, title: str) -> Drawing:
    "What belongs to which program."
    programs = {name: array.owners for name, array in case.arrays.items()}
    for name, array in case.arrays.items():
        if array.allowed is not None:
            programs[name] = sole_programs(array.allowed, array)

    return draw_arrays(
        case,
        programs,
        {},
        f"{title}: the arrays of a launch, their tiles and the programs to which they belong.",
        "Colours and numbers: the program that a tile belongs to. Grey: for all programs. Dotted: tiles. "
        f"{launch_words(case)}.",
    )


def sole_programs(touched: np.ndarray, array: Array) -> np.ndarray:
    "The program of each place from [programs, places]; several and nobody apart."
    count = touched.sum(0)
    return np.where(count == 0, NOBODY, np.where(count > 1, SEVERAL, touched.argmax(0))).reshape(array.shape)


def touched_picture(case: Case, watch: Watch, title: str) -> Drawing:
    "What each program loaded, or stored of an output; what missed, framed in red."
    programs, missed = {}, {}
    for name, array in case.arrays.items():
        touched = np.zeros((len(watch.products), array.shape[0] * array.shape[1]), bool)
        for a in watch.accesses:
            if a.name == name and (array.expected is None) == (a.kind == "loads"):
                touched[a.program, a.places[a.places >= 0]] = True
        programs[name], missed[name] = sole_programs(touched, array), near_misses(array, watch, name)
    return draw_arrays(
        case,
        programs,
        missed,
        f"{title}: which program touched which place.",
        "What each program loaded, or stored of an output. Grey: several programs. Red: what it must not touch.",
    )


def near_misses(array: Array, watch: Watch, name: str) -> list[tuple[int, int, int, int]]:
    "Rectangles (row, column, rows, columns) of what was touched and must not be, as far as it lies near the array."
    rows, columns = array.shape
    wrong = np.full((rows + 2, columns + 10), NOBODY)  # from row -1 and column -2 on
    for a in watch.accesses:
        if a.name != name:
            continue
        lanes = (a.places < 0) | ~array.may(a.program)[np.maximum(a.places, 0)]
        for i, j in {row_and_column(array, int(offset)) for offset in a.offsets[lanes]}:
            if -1 <= i <= rows and -2 <= j < columns + 8:
                wrong[i + 1, j + 2] = 0
    return [(i - 1, j - 2, h, w) for i, j, h, w, program in rectangles(wrong) if program != NOBODY]


def order_picture(case: Case, watch: Watch) -> Drawing:
    "When program 0 loads each step, and when it multiplies it."
    from matplotlib.patches import Rectangle
    import matplotlib.pyplot as plt

    loads = {(made, 0, step) for program, step, made in loads_along(case, watch) if program == 0}
    events = sorted(loads | {(number, 1, number) for number in range(watch.products[0])})
    with drawing_style():
        fig, ax = plt.subplots(figsize=(6.4, 1.7))
        for at, (_, row, step) in enumerate(events):
            ax.add_patch(Rectangle((at, row + 0.1), 0.9, 0.8, fc=color_of(step), alpha=0.75))
            ax.text(at + 0.45, row + 0.5, step, ha="center", va="center", fontsize=8.5)
        ax.set(
            xlim=(0, len(events)),
            ylim=(2, 0),
            xticks=[],
            yticks=[0.5, 1.5],
            yticklabels=["loads", "products"],
            xlabel="order of what program 0 does →",
        )
        for side in ax.spines.values():
            side.set_visible(False)
        return as_drawing(
            fig,
            "The order of loads and products of program 0.",
            "A number is a step along H: its tiles are loaded, and later multiplied.",
        )


def moved_bytes(case: Case, watch: Watch) -> list[tuple[str, int, int, int]]:
    "Of each array: its name, bytes loaded, bytes stored, and how many of both together are enough."
    rows = []
    for name, array in case.arrays.items():
        size, places = array.dtype.itemsize, array.shape[0] * array.shape[1]
        loaded, stored = (
            sum(len(np.unique(a.places)) for a in watch.accesses if a.name == name and (a.kind == "loads") == is_load)
            for is_load in (True, False)
        )
        enough = (array.start is not None) * round(array.times * places) + (array.expected is not None) * places
        rows.append((name, loaded * size, stored * size, enough * size))
    return [*rows, ("all", *(sum(row[k] for row in rows) for k in (1, 2, 3)))]


def as_html(words: str) -> str:
    "Words of a report, with what stands in backticks as code."
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(words, quote=False))


class Report(NamedTuple):
    "What `check` found."

    number: int
    solved: bool
    words: list[str]  # what is wrong, or what keeps the check from being made
    case: Optional[Case] = None  # the launch that is shown, if the kernel touched anything
    watch: Optional[Watch] = None
    ran: bool = True  # False if there is no interpreter to run the kernel

    def verdict(self) -> str:
        "One line."
        how = "was not checked" if not self.ran else "is solved" if self.solved else "is not solved yet"
        return f"Puzzle {self.number} {how}: {TASKS[self.number].title}."

    def pictures(self) -> list[Drawing]:
        "What was touched, and in which order where the puzzle asks for one."
        if self.watch is None:
            return []
        order = [order_picture(self.case, self.watch)] if self.case.ahead else []
        return [touched_picture(self.case, self.watch, TASKS[self.number].title), *order]

    def __repr__(self) -> str:
        moved = moved_bytes(self.case, self.watch)[-1:] if self.watch else []
        total = [
            f"{si(loaded + stored, 'B')} moved ({si(loaded, 'B')} loaded, {si(stored, 'B')} stored); {si(enough, 'B')} are enough."
            for _, loaded, stored, enough in moved
        ]
        return "\n".join([self.verdict(), *self.words, *total])

    def _repr_html_(self) -> str:
        cells = lambda row, tag: f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in row)}</tr>"
        moved = moved_bytes(self.case, self.watch) if self.watch else []
        rows = [
            cells((name, *(si(n, "B") for n in (loaded, stored, loaded + stored, enough))), "td")
            for name, loaded, stored, enough in moved
        ]
        table = ["<table>", cells(("", "loaded", "stored", "both", "enough"), "th"), *rows, "</table>"] if rows else []
        said = [f"<p>{as_html(words)}</p>" for words in self.words]
        pictures = [picture._repr_html_() for picture in self.pictures()]
        return "\n".join([f"<p><strong>{html.escape(self.verdict())}</strong></p>", *said, *table, *pictures])


def cannot_run(kernel: Any) -> Optional[str]:
    "Why the interpreter cannot run a kernel, in words; None if it can."
    if triton is None:
        return "Triton is not installed here, so the kernel was not run. On Linux, `pip install triton` installs it."
    if isinstance(kernel, triton.JITFunction):
        return (
            "The environment variable TRITON_INTERPRET is not set, or was set after Triton was imported, so the kernel was not run. "
            "Restart Python and begin with `import os; os.environ['TRITON_INTERPRET'] = '1'`, before anything imports Triton. "
            "`make puzzles` sets it for you."
        )
    return None


def check_arguments(number: int, kernel: Any) -> None:
    "Raise unless there is such a puzzle, and the kernel is one with its parameters."
    if type(number) is not int or number not in TASKS:
        raise ValueError(f"number: expected an integer from 1 to {len(TASKS)}, got {number!r}")
    case = TASKS[number].case(0)
    expected = [*(f"{name}_ptr" for name in case.arrays), *case.others]
    if triton is None:
        return
    if not hasattr(kernel, "arg_names"):
        raise ValueError(f"kernel: expected a function under `@jit`, got {type(kernel).__name__}")
    if sorted(kernel.arg_names) != sorted(expected):
        raise ValueError(f"kernel: expected the parameters {', '.join(expected)}, got {', '.join(kernel.arg_names)}")


def second_words(case: Optional[Case]) -> str:
    "What a second launch is."
    sizes = f" ({launch_words(case)})" if case else ""
    return f"A first launch is right. In a second one, of other sizes{sizes}:"


def is_endless(reason: Optional[BaseException]) -> bool:
    "Was a program stopped because it did too much?"
    return reason is not None and isinstance(with_causes(reason)[-1], Endless)


def stopped(kernel: Any, reason: BaseException, program: str) -> str:
    "Why a kernel did not come to its end."
    if is_endless(reason):
        return f"Program {program} does not come to an end: the condition of its loop stays true."
    return f"The kernel stops in program {program}{stop_words(kernel, reason)}"


def run_case(number: int, kernel: Any, case: Case) -> Report:
    "One launch of a kernel, judged."
    watch, reason = Watch(case.arrays, case.grid), None
    try:
        watch_kernel(watch, kernel, case.others)
    except Exception as error:
        reason = error  # whatever a kernel raises, the interpreter passes on
    found = [] if is_endless(reason) else faults(case, watch)
    if reason is not None and not any(wrong_accesses(case, watch)):
        found = [stopped(kernel, reason, called(watch.program, case.grid))]
    elif all(a.kind == "loads" and (a.places >= 0).all() for a in watch.accesses):
        found = ["It stores nothing so far."]
    return Report(number, not found, found, *((case, watch) if watch.accesses else ()))


def check(
    number: int,  # of the puzzle, from 1
    kernel: Any,  # a function under `@jit` with the parameters of the puzzle's stub
) -> Report:
    "Run a kernel on Triton's interpreter, with two sizes, and compile it, and say whether it solves the puzzle; if not, what is wrong."
    check_arguments(number, kernel)
    if reason := cannot_run(kernel):
        return Report(number, False, [reason], ran=False)
    first = run_case(number, kernel, TASKS[number].case(0))
    if not first.solved:
        return first
    second = run_case(number, kernel, TASKS[number].case(1))
    if not second.solved:
        return second._replace(words=[second_words(second.case), *second.words])
    pointers = {f"{name}_ptr": tensor for name, tensor in first.watch.memory.tensors.items()}
    words = refusal(kernel, pointers | first.case.others)
    return first._replace(solved=False, words=[words]) if words else first


def picture(
    number: int,  # of the puzzle, from 1
) -> Drawing:
    "The arrays of a puzzle's first launch, and which program each tile belongs to."
    if type(number) is not int or number not in TASKS:
        raise ValueError(f"number: expected an integer from 1 to {len(TASKS)}, got {number!r}")
    return question_picture(TASKS[number].case(0), TASKS[number].title)
