"""Check what a reader of any page would meet: code that does not parse, a saved error, a machine's path, a missing first cell.

    python tools/check_workbook.py [ROOT]
"""
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from project import MACHINE_PATH, ROOT, has_prologue, notebooks, output_text, project_files, read_notebook

INDEX = re.compile(r"Looking in (?:indexes|links):|https?://[\w.-]+/(?:simple|packages)/")  # a package host, by its paths
Problems = Iterator[str]


def parses(source: str) -> bool:
    "Is it Python?"
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def check_notebook(path: Path) -> Problems:
    "The problems of one page"
    nb = read_notebook(path)
    for i, cell in enumerate(nb["cells"]):
        if cell["cell_type"] != "code":
            continue
        if not parses(cell["source"]):
            yield f"cell {i}: does not parse as Python"
        if any(output["output_type"] == "error" for output in cell["outputs"]):
            yield f"cell {i}: a saved error"
        for found in {m[0] for output in cell["outputs"] for m in MACHINE_PATH.finditer(output_text(output))}:
            yield f"cell {i}: output names a machine's path {found}"
    if not has_prologue(nb):
        yield "its first code cell is not the prologue (python tools/project.py prologue)"


def check_text(path: Path) -> Problems:
    "No machine's path and no package host in a text file"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return
    for number, line in enumerate(lines, 1):
        for match in filter(None, (MACHINE_PATH.search(line), INDEX.search(line))):
            yield f"line {number}: names {match[0]}"


def problems(root: Path = ROOT) -> Problems:
    "Every problem of the workbook under `root`"
    for path in notebooks(root):
        yield from (f"{path.relative_to(root)}: {problem}" for problem in check_notebook(path))
    for path in project_files(root):
        if path.suffix != ".ipynb" and "site_libs" not in path.parts:
            yield from (f"{path.relative_to(root)}: {problem}" for problem in check_text(path))


def main(argv: list[str]) -> int:
    "Print the problems; 0 if there are none"
    found = list(problems(Path(argv[0]).resolve() if argv else ROOT))
    print("\n".join(found) if found else "Every page parses, and none shows an error or a machine's path.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
