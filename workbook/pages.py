"""A notebook on a machine without a GPU runs from top to bottom: cells for a GPU show the outputs that were saved with them."""

__all__ = ["prepare_page", "show_source", "lesson_box"]


import inspect
import json
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Callable

import torch


def needs_gpu(source: str) -> bool:
    "Is this the source of a cell that is marked `#| cuda` or `#| distributed`?"
    return bool(re.search(r"^#\|\s*(cuda|distributed)\b", source, re.MULTILINE))


METADATA = "fusedloss"  # the key in a notebook's metadata
NOT_RUN = "This cell needs a GPU and has not been run on one."


def made_line(made: dict) -> str:
    "Machine, date and commit of saved outputs, in one line."
    return ", ".join(
        [made["machine"].split(" · ")[0], *([made["date"]] if made.get("date") else []), f"commit {made['commit']}"]
    )


def gpu_note(nb: dict, cell: dict) -> str:
    "The small print beneath a cell for a GPU: where its outputs were made, or that it has not run; empty if it ran and shows nothing."
    made = nb["metadata"].get(METADATA, {}).get("gpu")
    if made is None or cell.get("id") not in made["cells"]:
        return NOT_RUN
    return made_line(made) if cell["outputs"] else ""


def saved_cells(folder: str | Path = ".") -> dict[str, tuple[list[dict], str]]:
    "Outputs and small print of the cells for a GPU in the notebooks of `folder`, by the cell's source."
    found = {}
    for path in sorted(Path(folder).glob("*.ipynb")):
        nb = json.loads(path.read_text(encoding="utf-8"))
        for cell in nb["cells"]:
            source = "".join(cell["source"]).strip()
            if cell["cell_type"] == "code" and needs_gpu(source):
                found.setdefault(source, (cell["outputs"], gpu_note(nb, cell)))
    return found


def show_output(output: dict) -> None:
    "Print or display one output of a notebook's file; what went to stderr is left out."
    from IPython.display import display

    if output["output_type"] == "stream":
        print("".join(output["text"]) if output["name"] == "stdout" else "", end="")
    elif "data" in output:
        data = {kind: value if isinstance(value, dict) else "".join(value) for kind, value in output["data"].items()}
        display(data, raw=True)


class ReplayedCells:
    "Cells for a GPU become one line that shows their saved outputs: an input transformer and its magic."

    def __init__(self, folder: str | Path = "."):
        self.saved = saved_cells(folder)
        self.sources = list(self.saved)

    def transform(self, lines: list[str]) -> list[str]:
        "The lines that run in place of a cell's `lines`."
        source = "".join(lines).strip()
        if not needs_gpu(source):
            return lines
        return [f"%saved_output {self.sources.index(source) if source in self.saved else -1}\n"]

    def saved_output(self, line: str) -> None:
        "The magic: show the outputs of cell number `line`."
        if int(line) < 0:
            return print("This cell needs a GPU, and no notebook here holds an output of it.")
        outputs, note = self.saved[self.sources[int(line)]]
        for output in outputs:
            show_output(output)
        if note:
            print(note)


def prepare_page(
    folder: str | Path = ".",  # of the notebooks; a notebook's kernel starts in its own
) -> None:
    "Nothing where there is a GPU; elsewhere, from the next cell on, cells for a GPU show their saved outputs."
    if torch.cuda.is_available():
        return
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    try:
        from IPython import get_ipython
    except ImportError:
        return
    if (shell := get_ipython()) is None:
        return
    replayed, transformers = ReplayedCells(folder), shell.input_transformers_cleanup
    others = [t for t in transformers if type(getattr(t, "__self__", None)).__name__ != "ReplayedCells"]
    transformers[:] = [*others, replayed.transform]
    shell.register_magic_function(replayed.saved_output, "line", "saved_output")
    print("No GPU: Triton's interpreter runs the kernels, and cells marked `#| cuda` show their saved outputs.")


def needs_packages(*names: str):
    "`ImportError` that says what to install, unless this Python has all of `names`."
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ImportError(f"this page needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def source_text(*functions: Callable) -> str:
    "The source of functions of one module, kernels too, and above it the module's file."
    plain = [inspect.unwrap(getattr(f, "fn", f)) for f in functions]
    file = plain[0].__module__.replace(".", "/")
    return f"# {file}.py\n" + "\n".join(inspect.getsource(f) for f in plain)


def show_source(
    *functions: Callable,  # of one module of the library
):
    "What a page shows in place of a cell of its own: the functions' code."
    from IPython.display import Markdown

    return Markdown(f"```python\n{source_text(*functions)}```")


def power_of_ten(x: float) -> str:
    "A number with one figure and a power of ten in letters: `power_of_ten(5e-7)` is `'5 · 10⁻⁷'`."
    digit, power = f"{x:.0e}".split("e")
    return f"{digit} · 10" + str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def lesson_box(
    # in Markdown
    saves: str,
    costs: str,
    use_it_when: str,
    not_when: str,
):
    "The table that opens a lesson: what the stage saves and costs, when to use it, and when not."
    from IPython.display import Markdown

    rows = {"saves": saves, "costs": costs, "use it when": use_it_when, "do not use it when": not_when}
    return Markdown(
        "\n".join(["| | |", "|---|---|", *(f"| **{question}** | {answer} |" for question, answer in rows.items())])
    )
