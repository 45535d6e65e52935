"""The checks of a page's exercises take the answers of its page of solutions.

    python tests/exercises.py PAGE SOLUTIONS

Prints a line for each check: "passes", or what it says. Cells run as `make pages` runs them; right after a cell with a check, the answer's
definitions are made in a copy of what the page has by then, as a reader types them there.
"""
import ast
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Iterator

from project import read_notebook, ROOT
from run_notebooks import skips

MARK = "The stub must fail here; a right answer passes."  # what such a check says of itself
FENCED = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def checks_of(source: str) -> set[str]:
    "The checks of exercises that a cell defines"
    return {s.name for s in ast.parse(source).body if isinstance(s, ast.FunctionDef) and ast.get_docstring(s) == MARK}


def calls(source: str, checks: set[str]) -> Iterator[tuple[str, list[str]]]:
    "Where a cell shows that stubs fail: the call of the check, and the names of what it takes"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "test_fail" and isinstance(node.args[0], ast.Lambda):
            call = node.args[0].body
            if isinstance(call, ast.Call) and ast.unparse(call.func) in checks:
                yield ast.unparse(call), [re.match(r"\w+", ast.unparse(a))[0] for a in call.args]


def pieces(solutions: Path) -> list[ast.Module]:
    "The code of a page of solutions: its cells, and what its prose shows"
    cells = read_notebook(solutions)["cells"]
    return [ast.parse(text) for c in cells for text in ([c["source"]] if c["cell_type"] == "code" else FENCED.findall(c["source"]))]


def defines(statement: ast.stmt) -> set[str]:
    "The names that a statement defines without measuring or checking anything"
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    plain = isinstance(statement, ast.Assign) and isinstance(statement.value, (ast.Lambda, ast.Constant))
    entry = isinstance(statement, ast.Assign) and isinstance(getattr(statement.targets[0], "slice", None), ast.Constant)  # of a table
    return {ast.unparse(t) for t in statement.targets} if plain or entry else set()


def add_answers(names: list[str], code: list[ast.Module], space: dict, folder: Path) -> None:
    "Define the answers in `space`, with what stands beside them, and import what it lacks; `KeyError` for an answer that is nowhere"
    for module in code:
        for statement in module.body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                statement.names = [a for a in statement.names if (a.asname or a.name).partition(".")[0] not in space]
                if statement.names:
                    exec(compile(ast.Module([statement], []), "imports", "exec"), space)
    for name in names:
        home = next((m for m in code if any(name in defines(s) for s in m.body)), None)
        if home is None:
            raise KeyError(name)
        text = "\n\n".join(ast.unparse(s) for s in home.body if defines(s))
        path = folder / f"{name}.py"  # Triton reads a kernel's source
        path.write_text(text, encoding="utf-8")
        exec(compile(text, str(path), "exec"), space)


def said_of(page: Path, solutions: Path) -> Iterator[tuple[str, str]]:
    "Each check, and what it says of the answers"
    from execnb.shell import CaptureShell
    from fastcore.xtras import working_directory
    from nbdev.config import get_config
    from nbdev.process import NBProcessor

    shell, flags, checks = CaptureShell(page, mpl_format="svg"), set(get_config(path=ROOT).tst_flags.split()), set()
    with working_directory(page.parent), TemporaryDirectory() as folder:
        for cell in NBProcessor(page, rm_directives=False).nb.cells:
            if skips(cell, set(), flags):
                continue
            shell.cell(cell)
            if shell.exc:
                raise RuntimeError(f"{page.name}: a cell failed: {shell.exc!r}")
            checks |= checks_of(cell.source)
            for call, names in calls(cell.source, checks):
                space = dict(shell.user_ns)
                try:
                    add_answers(names, pieces(solutions), space, Path(folder))
                    eval(call, space)
                    yield call, "passes"
                except BaseException as reason:  # a check may raise anything
                    yield call, f"{type(reason).__name__}: {reason}".replace("\n", " ")[:300]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for told in said_of(*(Path(name).resolve() for name in sys.argv[1:])):
        print(*told, sep="\t", flush=True)
