"""What the tools share: where the notebooks are, how they are read, and the hash that dates their outputs.

    python tools/workbook.py prologue   put the first code cell into notebooks that lack it
    python tools/workbook.py left-out   bring nbs/left_out.json up to date: a reason for each cell that `nbdev_test` leaves out
    python tools/workbook.py stamp      write .commit, for a copy of the project without its history
"""
import ast
import hashlib
import importlib
import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Iterator

from package_code import PACKAGE, canonical, package

ROOT = Path(__file__).resolve().parent.parent
CHECK_NAME = re.compile(r"(test|check|assert)(_|$)|raises$")
METADATA_KEY = "fusedloss"  # in a notebook's metadata; settings.ini lets it through nbdev_clean
FOLDED_KEY = "jp-MarkdownHeadingCollapsed"  # in a cell's, likewise: JupyterLab folds what follows the heading
LIBRARY = "In the library"  # the heading of what follows a lesson
PROLOGUE = """\
#| hide
# Without a GPU, Triton's interpreter runs the kernels, and cells marked `#| cuda` show their saved outputs.
import os
import torch
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
from fusedloss.core.pages import prepare_page
prepare_page()"""  # the first code cell of every notebook
INTERPRETED = """\
#| hide
# Triton's interpreter runs the kernels of this page, with a GPU and without.
import os
os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton"""  # or this one, where a GPU has nothing to do
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|tmp|home|Users|usr/local/lib)/\w[\w./-]*")


def notebooks(root: Path = ROOT) -> list[Path]:
    "Every notebook of the workbook, in reading order"
    return sorted(p for p in (root / "nbs").rglob("*.ipynb") if not any(part[0] in "._" for part in p.relative_to(root).parts))


def is_stage(path: Path) -> bool:
    "Is `path` a numbered stage, not its solutions?"
    return path.parent.name == "nbs" and bool(re.match(r"\d\d_", path.name))


def project_files(root: Path = ROOT) -> list[Path]:
    "The files that git tracks or would track; where there is no repository, all but caches"
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True) if (root / ".git").exists() else None
    paths = [root / name for name in listed.stdout.split("\0")] if listed and listed.returncode == 0 else root.rglob("*")
    return sorted({p for p in paths if p.is_file() and not {"__pycache__", ".venv", ".pytest_cache", ".mypy_cache"} & set(p.parts)})


def copy_tree(target: Path) -> None:
    "A copy of the project's files, for work that must not change the tree"
    for path in project_files():
        copied = target / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copied)


def notebook_from(text: str) -> dict:
    "A notebook from its text, each cell's source joined to one string"
    nb = json.loads(text)
    for cell in nb["cells"]:
        cell["source"] = "".join(cell["source"])
    return nb


def read_notebook(path: Path) -> dict:
    "A notebook from its file"
    return notebook_from(path.read_text(encoding="utf-8"))


def directives(source: str) -> set[str]:
    "The names of the `#|` lines on top of a cell"
    return set(re.findall(r"^#\|\s*([\w-]+)", source, flags=re.MULTILINE))


def called_name(node: ast.AST) -> str:
    "The last part of the name that a call calls: `test_close` in `fc.test_close(a, b)`"
    func = node.func if isinstance(node, ast.Call) else None
    return getattr(func, "attr", getattr(func, "id", ""))


COMPREHENSION = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def outer(tree: ast.AST) -> Iterator[ast.AST]:
    "The nodes of a cell but for what is local to its functions and comprehensions"
    yield tree
    for child in [] if isinstance(tree, ast.FunctionDef | ast.Lambda | COMPREHENSION) else ast.iter_child_nodes(tree):
        yield from outer(child)


def changed_by(node: ast.AST) -> list[ast.AST]:
    "What a statement may change without naming it anew: a part of it, x of `x.f(y)`, and y unless that is a check"
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return [node]
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return []
    call = node.value
    owner = [call.func] if isinstance(call.func, ast.Attribute) else []
    return owner if CHECK_NAME.match(called_name(call)) else owner + call.args + [k.value for k in call.keywords]


def reads_and_gives(tree: ast.Module) -> tuple[set[str], set[str]]:
    "Names that a cell reads, and names that it gives a value or may change"
    reads = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    reads |= {n.target.id for n in ast.walk(tree) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}
    gives = set()
    for node in outer(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            gives.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            gives |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            gives.add(node.id)
        gives |= {n.id for part in changed_by(node) for n in ast.walk(part) if isinstance(n, ast.Name)}
    return reads, gives


def givers(names: list[tuple[set[str], set[str]]], reader: int, late: bool) -> set[int]:
    "The cells from which a cell has its names: the last before it; for functions, called late, any"
    found = set()
    for name in names[reader][0] | {"*"}:
        cells = [i for i, (_, gives) in enumerate(names) if name in gives and i != reader]
        found |= set(cells if late or name == "*" else [i for i in cells if i < reader][-1:])
    return found


EXPORTS = {"export", "exporti", "exports"}


def shows_source(cell: dict) -> bool:
    "Does a cell nothing but show the source of functions?"
    return bool(re.fullmatch(r"(#\|.*\n)*show_source\([\w., ]*\)", cell["source"].strip()))


def made_outputs(code: list[dict]) -> list[tuple[dict, ast.Module]]:
    "The cells that have outputs, or are for a GPU, and the cells whose names they read, directly or not"
    trees = [ast.parse(cell["source"]) for cell in code]
    names = [reads_and_gives(tree) for tree in trees]
    late = [any(isinstance(n, ast.FunctionDef | ast.Lambda) for n in ast.walk(tree)) for tree in trees]
    new = taken = {i for i, cell in enumerate(code) if cell["outputs"] or "cuda" in directives(cell["source"])}
    while new:
        new = set().union(*(givers(names, i, late[i]) for i in new)) - taken
        taken = taken | new
    return [(code[i], trees[i]) for i in sorted(taken)]


def imports_package(statement: ast.stmt) -> bool:
    "Does this statement only bring names from the package, whose code is hashed itself?"
    return isinstance(statement, ast.ImportFrom) and not statement.level and f"{statement.module}.".startswith(f"{PACKAGE}.")


def default_module(nb: dict) -> str:
    "The module to which a notebook is exported, or an empty string"
    found = (re.search(r"^#\|\s*default_exp +(\S+)", cell["source"], re.MULTILINE) for cell in nb["cells"] if cell["cell_type"] == "code")
    return next((f"{PACKAGE}.{match[1]}" for match in found if match), "")


def from_module(module: str, cells: list[dict]) -> ast.ImportFrom:
    "What exported cells bind, as an import from their module: where a definition stands, in a page or below it, is no part of a hash"
    names = set().union(*(reads_and_gives(ast.parse(cell["source"]))[1] for cell in cells))
    return ast.ImportFrom(module, [ast.alias(name) for name in sorted(names)], 0)


def code_hash(nb: dict, root: Path = ROOT) -> str:
    "A hash of the code that made the saved outputs, in the page and in the package: prose, comments, formatting and moves between files do not change it"
    code = [cell for cell in nb["cells"] if cell["cell_type"] == "code" and not shows_source(cell)]
    module = default_module(nb)
    exported = [cell for cell in code if directives(cell["source"]) & EXPORTS and module in package(root).modules]
    statements = [s for cell, tree in made_outputs(code) if cell not in exported for s in tree.body]
    imported = [from_module(module, exported)] if exported else []
    used = package(root).used_by(ast.Module([*imported, *statements], []))
    own = [canonical(statement) for statement in statements if not imports_package(statement)]
    return hashlib.sha256("\n".join([*own, *used]).encode()).hexdigest()[:16]


def output_text(output: dict) -> str:
    "All the text that an output shows"
    values = [output.get("text", ""), *output.get("data", {}).values(), output.get("traceback", "")]
    return "\n".join("".join(map(str, v)) if isinstance(v, list) else str(v) for v in values)


def has_prologue(nb: dict) -> bool:
    "Is the prologue the first code cell that holds code?"
    code = [cell["source"].strip() for cell in nb["cells"] if cell["cell_type"] == "code"]
    return next((source for source in code if not source.startswith("#| default_exp")), "") in (PROLOGUE, INTERPRETED)


def add_prologue(path: Path) -> bool:
    "Put the prologue into a notebook that lacks it, in place of an older one; was it lacking?"
    nb = json.loads(path.read_text(encoding="utf-8"))
    if has_prologue(read_notebook(path)):
        return False
    cells = [cell for cell in nb["cells"] if cell.get("id") != "prologue"]
    code = [i for i, cell in enumerate(cells) if cell["cell_type"] == "code"]
    first = next((i for i in code if not "".join(cells[i]["source"]).startswith("#| default_exp")), len(cells))
    cell = {"cell_type": "code", "execution_count": None, "id": "prologue", "metadata": {}, "outputs": []}
    cells.insert(first, cell | {"source": PROLOGUE.splitlines(keepends=True)})
    path.write_text(json.dumps(nb | {"cells": cells}, sort_keys=True, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return True


LEFT_OUT = "nbs/left_out.json"  # by notebook and cell: why `nbdev_test` does not run it
SETTINGS = ConfigParser(delimiters="=")
SETTINGS.read(ROOT / "settings.ini", encoding="utf-8")
FLAGS = set(SETTINGS["DEFAULT"]["tst_flags"].split())
MEASURES = re.compile(r"\b(time_call|compare|measure_\w+|record|\w*peak\w*|gpu_launches|do_bench|profile|Event|timed\w*|error\w*)\(")


def left_out(nb: dict) -> dict[str, str]:
    "The cells that `nbdev_test` leaves out, by their id"
    return {cell["id"]: cell["source"] for cell in nb["cells"] if cell["cell_type"] == "code" and directives(cell["source"]) & FLAGS}


def reason(source: str) -> str:
    "Why a cell is for a GPU, as far as its source tells"
    kinds = {type(statement) for statement in ast.parse(source).body}
    if MEASURES.search(source):
        return "measures time, memory, launches or errors on a GPU"
    if re.search(r"cuda['\"]|\.cuda\b", source.split("\n", 1)[-1]):
        return "names the GPU or makes its tensors there"
    if kinds <= {ast.Import, ast.ImportFrom}:
        return "imports what the measurements on a GPU alone need"
    if kinds <= {ast.FunctionDef, ast.ClassDef}:
        return "defines what the measurements on a GPU alone use"
    return "checks what was measured on a GPU" if kinds <= {ast.Assert, ast.For} else "prepares or shows what is measured on a GPU"


def read_left_out(root: Path = ROOT) -> dict[str, dict[str, str]]:
    "The committed list"
    path = root / LEFT_OUT
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_left_out() -> None:
    "Keep the reasons of the list, add those of new cells, drop those of cells that are gone"
    known, found = read_left_out(), {}
    for path in notebooks():
        name = path.relative_to(ROOT / "nbs").as_posix()
        cells = left_out(read_notebook(path))
        found |= {name: {key: known.get(name, {}).get(key) or reason(source) for key, source in cells.items()}} if cells else {}
    (ROOT / LEFT_OUT).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def source_outputs(nb: dict) -> dict[int, dict]:
    "By the number of a cell that shows the source of functions: its output"
    trees = [ast.parse(cell["source"]) for cell in nb["cells"] if cell["cell_type"] == "code"]
    modules = {a.asname or a.name: s.module for tree in trees for s in tree.body if imports_package(s) for a in s.names}
    found = {}
    for i, cell in enumerate(nb["cells"]):
        if cell["cell_type"] == "code" and shows_source(cell):
            names = [a.id for a in ast.parse(cell["source"]).body[-1].value.args]
            show = getattr(importlib.import_module(f"{PACKAGE}.core.pages"), "show_source")
            shown = show(*(getattr(importlib.import_module(modules[name]), name) for name in names))
            data = {"text/markdown": shown.data.splitlines(keepends=True), "text/plain": ["<IPython.core.display.Markdown object>"]}
            found[i] = {"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}
    return found


def write_sources() -> None:
    "Save with every cell that shows source the source as it is"
    sys.path.insert(0, str(ROOT))
    for path in notebooks():
        nb = json.loads(path.read_text(encoding="utf-8"))
        for i, output in source_outputs(read_notebook(path)).items():
            nb["cells"][i]["outputs"] = [output]
        path.write_text(json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(command: str) -> None:
    "Do what the command says"
    if command == "prologue":
        print("".join(f"{path.relative_to(ROOT)}\n" for path in notebooks() if add_prologue(path)), end="")
    elif command == "left-out":
        write_left_out()
    elif command == "sources":
        write_sources()
    elif command == "stamp":
        sys.path.insert(0, str(ROOT))
        from fusedloss.core.sources import write_stamp

        print("commit {}, sources {}".format(*write_stamp(ROOT)))
    else:
        raise SystemExit(f"command: expected prologue, left-out, sources or stamp, got {command}")


if __name__ == "__main__":
    main(*sys.argv[1:2] or [""])
