"""Hold the notebooks to the workbook's rules; one line for each problem, exit code 1 if there is one.

    python tools/check_workbook.py [ROOT]
"""
import ast
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from workbook import (CHECK_NAME, FOLDED_KEY, LEFT_OUT, LIBRARY, MACHINE_PATH, METADATA_KEY, PROLOGUE, ROOT, called_name, code_hash,
                      directives, has_prologue, is_stage, left_out, notebooks, output_text, project_files, read_left_out, read_notebook)

FREE = ""  # one or more headings of the author's own
SECTIONS = ["The question", "Shapes and symbols", "Prediction", "Picture", FREE, "Does it match?", "Measurement",
            "Prediction against measurement", "Left on the table", "Exercises", "Recap", LIBRARY]
OPEN_CELLS = 90
MAX_BYTES = 400_000
MEDIAN_LINES, LONG_LINES, LONG_SHARE, MAX_LINES = 6, 25, 0.10, 45
CHECK_SHARE = 0.25
INDEX = re.compile(r"Looking in (?:indexes|links):|https?://[\w.-]+/(?:simple|packages)/")  # a package host, by its paths
SILENT = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Assert)
PENDING = "**GPU outputs to come.**"  # a page says so to its readers, first in a cell, while what it shows of a GPU is missing or older than its code
Problems = Iterator[str]


def parse(cell: dict) -> ast.Module | None:
    "The syntax tree of a code cell, or None where it does not parse"
    try:
        return ast.parse(cell["source"])
    except SyntaxError:
        return None


def can_fail(tree: ast.Module) -> bool:
    "Does the cell hold a check?"
    return any(isinstance(node, ast.Assert) or CHECK_NAME.match(called_name(node)) for node in ast.walk(tree))


def is_silent(tree: ast.Module | ast.stmt) -> bool:
    "Does the cell end in a statement that shows nothing: a definition, an assignment, a check, a record, or a block of these?"
    last = tree.body[-1] if tree.body else None
    if isinstance(last, (ast.With, ast.If, ast.For)):
        return is_silent(last) and not getattr(last, "orelse", [])
    if isinstance(last, ast.Try) and not last.handlers:
        return True  # runs to see what it raises
    called = called_name(getattr(last, "value", last))
    return last is None or isinstance(last, SILENT) or called == "record" or bool(CHECK_NAME.match(called))


def code_lines(cell: dict) -> int:
    "Lines of a cell, without directives and blank lines; an import is one, however long its list"
    tree = parse(cell)
    imports = [range(s.lineno + 1, s.end_lineno + 1) for s in (tree.body if tree else []) if isinstance(s, (ast.Import, ast.ImportFrom))]
    lines = enumerate(cell["source"].splitlines(), 1)
    return sum(bool(line.strip()) and not line.startswith("#|") and not any(i in span for span in imports) for i, line in lines)


def headings(nb: dict, level: int) -> list[str]:
    "The headings of one level, fenced code aside"
    text = "\n\n".join(c["source"] for c in nb["cells"] if c["cell_type"] == "markdown")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(rf"^{'#' * level} +(.+?) *$", text, flags=re.MULTILINE)


def check_title(nb: dict) -> Problems:
    "The first cell is a title and one sentence: it becomes the module's docstring and the page's description"
    first = nb["cells"][0] if nb["cells"] else {"cell_type": "none", "source": ""}
    if first["cell_type"] != "markdown" or not re.fullmatch(r"# .+\n+> .+", first["source"].strip()):
        yield "cell 0: is not `# Title`, a blank line, `> one sentence` and nothing else"


def check_sections(nb: dict) -> Problems:
    "Every section of the template, once and in its order"
    found = headings(nb, 2)
    fixed = [name for name in SECTIONS if name != FREE]
    for name in fixed:
        if found.count(name) != 1:
            yield f"section `## {name}` is there {found.count(name)} times, not once"
    order = [name for name in found if name in fixed]
    expected = sorted(order, key=fixed.index)
    if order != expected:
        name = next(a for a, b in zip(order, expected) if a != b)
        yield f"section `## {name}` is out of order; the order is {', '.join(fixed)}"
    elif {"Picture", "Does it match?"} <= set(order) and found.index("Does it match?") == found.index("Picture") + 1:
        yield "no code section `## ...` between `## Picture` and `## Does it match?`"


def check_lengths(code: list[tuple[int, dict]]) -> Problems:
    "Short cells: the median, the nine in ten, and the longest"
    lengths = {i: code_lines(cell) for i, cell in code}
    for i, cell in code:
        if lengths[i] > MAX_LINES and not re.search(r"^@(triton\.)?jit$", cell["source"], re.MULTILINE):
            yield f"cell {i}: {lengths[i]} lines; no cell but a kernel has more than {MAX_LINES}"
    counts = [n for n in lengths.values() if n]
    if counts and statistics.median(counts) > MEDIAN_LINES:
        yield f"the median code cell has {statistics.median(counts):g} lines, more than {MEDIAN_LINES}"
    long = [i for i, n in lengths.items() if n >= LONG_LINES]
    if len(long) > LONG_SHARE * len(counts):
        yield f"{len(long)} of {len(counts)} code cells have {LONG_LINES} lines or more: cells {', '.join(map(str, long))}"


def check_checks(code: list[tuple[int, dict]]) -> Problems:
    "Enough cells hold a check that can fail"
    trees = [tree for _, cell in code if (tree := parse(cell)) and tree.body]
    checked = sum(map(can_fail, trees))
    if checked < CHECK_SHARE * len(trees):
        yield f"{checked} of {len(trees)} code cells hold a check that can fail; {CHECK_SHARE:.0%} is the least"


def is_open(cell: dict) -> bool:
    "Does a reader of the lesson see the cell's source?"
    return cell["cell_type"] == "markdown" or not {"hide", "code-fold"} & directives(cell["source"])


def check_halves(nb: dict) -> Problems:
    "A lesson of few open cells, and at the end the library, folded"
    at = [i for i, c in enumerate(nb["cells"]) if c["cell_type"] == "markdown" and re.match(rf"## {LIBRARY}\b", c["source"])]
    if len(at) != 1:
        yield f"{len(at)} cells begin with `## {LIBRARY}`, not one"
        return
    if nb["cells"][at[0]]["metadata"].get(FOLDED_KEY) is not True:
        yield f"cell {at[0]}: `{FOLDED_KEY}` is not set, which folds it in JupyterLab"
    if any(c["cell_type"] == "markdown" and re.search(r"^## ", c["source"], re.MULTILINE) for c in nb["cells"][at[0] + 1:]):
        yield f"a section follows `## {LIBRARY}`, the last one"
    seen = sum(map(is_open, nb["cells"][:at[0]]))
    if seen > OPEN_CELLS:
        yield f"{seen} open cells in the lesson, more than {OPEN_CELLS}: fold imports, plotting and tests, or move them below `## {LIBRARY}`"


def check_exercises(nb: dict, path: Path) -> Problems:
    "Three exercises, each with its solution"
    exercises = [match for name in headings(nb, 3) if (match := re.match(r"Exercise\b *\d*", name))]
    if len(exercises) != 3:
        yield f"{len(exercises)} headings `### Exercise N`, not 3"
    solutions = path.parent / "solutions" / path.name
    if not solutions.exists():
        yield f"no solutions in {solutions.relative_to(path.parent.parent)}"
        return
    solved = [name for level in (1, 2, 3) for name in headings(read_notebook(solutions), level)]
    for exercise in (match[0].strip() for match in exercises):
        if not any(re.search(rf"\b{exercise}\b", name) for name in solved):
            yield f"{exercise} has no heading in {solutions.relative_to(path.parent.parent)}"


def check_outputs(nb: dict, root: Path) -> Problems:
    "GPU cells keep outputs, made from the code as it is now"
    cuda = [(i, c) for i, c in enumerate(nb["cells"]) if c["cell_type"] == "code" and "cuda" in directives(c["source"])]
    for i, cell in cuda:
        tree = parse(cell)
        quiet = cell["source"].rstrip().endswith(";")  # IPython shows no result then
        if not cell["outputs"] and tree and not quiet and not is_silent(tree):
            yield f"cell {i}: a `#| cuda` cell without saved output (make notebooks-gpu)"
    saved = nb["metadata"].get(METADATA_KEY, {})
    if cuda and not saved:
        yield "outputs are not from `make notebooks-gpu`: no hash in the metadata"
    elif saved and all(map(parse, code_cells(nb).values())) and saved.get("code") != code_hash(nb, root):
        yield "saved outputs are stale: the code changed after they were made (make notebooks-gpu)"


def is_pending(nb: dict) -> bool:
    "Does the page say that it waits for a run on a GPU?"
    return any(cell["cell_type"] == "markdown" and cell["source"].startswith(PENDING) for cell in nb["cells"])


def check_saved(nb: dict, root: Path) -> Problems:
    "Outputs of a GPU are there and of this code, or else the page says that they are not"
    found = list(check_outputs(nb, root))
    if not is_pending(nb):
        yield from found
    elif not found:
        yield f"says {PENDING}, and they are here"


def code_cells(nb: dict) -> dict[int, dict]:
    "Code cells by their number"
    return {i: cell for i, cell in enumerate(nb["cells"]) if cell["cell_type"] == "code"}


def check_any(nb: dict, path: Path, root: Path) -> Problems:
    "What holds for every notebook: size, syntax, outputs without errors and of this code"
    if path.stat().st_size > MAX_BYTES:
        yield f"{path.stat().st_size} bytes, more than {MAX_BYTES}"
    for i, cell in code_cells(nb).items():
        if parse(cell) is None:
            yield f"cell {i}: does not parse as Python"
        if any(output["output_type"] == "error" for output in cell["outputs"]):
            yield f"cell {i}: a saved error"
        for found in {m[0] for output in cell["outputs"] for m in MACHINE_PATH.finditer(output_text(output))}:
            yield f"cell {i}: output names a machine's path {found}"
    if not has_prologue(nb):
        yield "its first code cell is not the prologue (python tools/workbook.py prologue)"
    yield from check_saved(nb, root)


def check_stage(nb: dict, path: Path) -> Problems:
    "What holds for a numbered stage"
    code = [(i, cell) for i, cell in code_cells(nb).items() if cell["source"].strip() != PROLOGUE]
    yield from check_title(nb)
    yield from check_sections(nb)
    yield from check_lengths(code)
    yield from check_checks(code)
    yield from check_exercises(nb, path)
    yield from check_halves(nb)


def check_text(path: Path) -> Problems:
    "No machine's path and no package host in a text file"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return
    for number, line in enumerate(lines, 1):
        for match in filter(None, (MACHINE_PATH.search(line), INDEX.search(line))):
            yield f"line {number}: names {match[0]}"


def check_left_out(root: Path) -> Problems:
    "The list of cells that `nbdev_test` leaves out names each of them, and a reason"
    listed = read_left_out(root)
    pages = {path.relative_to(root / "nbs").as_posix(): left_out(read_notebook(path)) for path in notebooks(root)}
    for name in sorted(pages.keys() | listed.keys()):
        reasons, cells = listed.get(name, {}), pages.get(name, {})
        missing = [key for key in cells if not reasons.get(key)] + [key for key in reasons if key not in cells]
        if missing:
            yield f"{LEFT_OUT}: {name}: cells {', '.join(missing)} lack a reason or are gone (python tools/workbook.py left-out)"


def problems(root: Path = ROOT) -> Problems:
    "Every problem of the workbook under `root`"
    yield from check_left_out(root)
    for path in notebooks(root):
        nb = read_notebook(path)
        found = [*check_any(nb, path, root), *(check_stage(nb, path) if is_stage(path) else ())]
        yield from (f"{path.relative_to(root)}: {problem}" for problem in found)
    for path in project_files(root):
        if path.suffix != ".ipynb" and "site_libs" not in path.parts:
            yield from (f"{path.relative_to(root)}: {problem}" for problem in check_text(path))


def main(argv: list[str]) -> int:
    "Print the problems; 0 if there are none"
    root = Path(argv[0]).resolve() if argv else ROOT
    found = list(problems(root))
    print("\n".join(found) if found else "The workbook keeps its rules.")
    print("".join(f"{path.name} waits for a run on a GPU.\n" for path in notebooks(root) if is_pending(read_notebook(path))), end="")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
