"""What the tools share: where the notebooks are and how they are read.

    python tools/project.py prologue   put the first code cell into notebooks that lack it
    python tools/project.py sources    save with every cell that shows source the source as it is
    python tools/project.py stamp      write .commit, for a copy of the project without its history
"""
import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, WORKBOOK = "fusedloss", "workbook"
METADATA_KEY = "fusedloss"  # in a notebook's metadata; settings.ini lets it through nbdev_clean
FOLDED_KEY = "jp-MarkdownHeadingCollapsed"  # in a cell's metadata, likewise: JupyterLab folds what follows the heading
PROLOGUE = """\
#| hide
# Without a GPU, Triton's interpreter runs the kernels, and cells marked `#| cuda` show their saved outputs.
import os
import torch
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
from workbook.pages import prepare_page
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
    listed = subprocess.run(command, capture_output=True, text=True) if (root / ".git").exists() and shutil.which("git") else None
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


def default_module(nb: dict) -> str:
    "The module to which a notebook is exported, or an empty string"
    found = (re.search(r"^#\|\s*default_exp +(\S+)", cell["source"], re.MULTILINE) for cell in nb["cells"] if cell["cell_type"] == "code")
    return next((f"{PACKAGE}.{match[1]}" for match in found if match), "")


def shows_source(cell: dict) -> bool:
    "Does a cell nothing but show the source of functions?"
    return bool(re.fullmatch(r"(#\|.*\n)*show_source\([\w., ]*\)", cell["source"].strip()))


def imports_package(statement: ast.stmt) -> bool:
    "Does this statement only bring names from the package or the workbook beside it?"
    return isinstance(statement, ast.ImportFrom) and not statement.level and statement.module.partition(".")[0] in (PACKAGE, WORKBOOK)


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


SETTINGS = ConfigParser(delimiters="=")
SETTINGS.read(ROOT / "settings.ini", encoding="utf-8")


def source_outputs(nb: dict) -> dict[int, dict]:
    "By the number of a cell that shows the source of functions: its output"
    trees = [ast.parse(cell["source"]) for cell in nb["cells"] if cell["cell_type"] == "code"]
    modules = {a.asname or a.name: s.module for tree in trees for s in tree.body if imports_package(s) for a in s.names}
    found = {}
    for i, cell in enumerate(nb["cells"]):
        if cell["cell_type"] == "code" and shows_source(cell):
            names = [a.id for a in ast.parse(cell["source"]).body[-1].value.args]
            show = getattr(importlib.import_module(f"{WORKBOOK}.pages"), "show_source")
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
    elif command == "sources":
        write_sources()
    elif command == "stamp":
        sys.path.insert(0, str(ROOT))
        from workbook.sources import STAMP, commit

        (ROOT / STAMP).write_text(f"{commit(ROOT)}\n", encoding="utf-8")
    else:
        raise SystemExit(f"command: expected prologue, sources or stamp, got {command}")


if __name__ == "__main__":
    main(*sys.argv[1:2] or [""])
