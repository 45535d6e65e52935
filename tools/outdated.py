"""List the pages whose kernels have changed since their GPU outputs were made, and the commits that made outputs and records.

    python tools/outdated.py

A cell for a GPU names what it measures: `#| measures kernels core.softmax turnaround.cu`, modules of the package or files of cuda/.
"""
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from project import METADATA_KEY, PACKAGE, ROOT, notebooks, read_notebook

MEASURES = re.compile(r"^#\|\s*measures (.+)$", re.MULTILINE)
INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def files_of(name: str, root: Path = ROOT) -> list[Path]:
    "The file of a module or of a CUDA source, with the headers that it includes; `ValueError` if there is none"
    path = root / "cuda" / name if name.endswith(".cu") else root / PACKAGE / f"{name.replace('.', '/')}.py"
    if not path.is_file():
        raise ValueError(f"measures: expected a module or a CUDA source, got {name}")
    headers = INCLUDE.findall(path.read_text(encoding="utf-8")) if path.suffix == ".cu" else []
    return [path, *(path.with_name(header) for header in headers)]


def measured(nb: dict) -> list[str]:
    "The names of what a page measures"
    sources = [cell["source"] for cell in nb["cells"] if cell["cell_type"] == "code"]
    return sorted({name for source in sources for names in MEASURES.findall(source) for name in names.split()})


def changes(files: list[Path], made: dict, root: Path = ROOT) -> list[str]:
    "The commits, one line each, that changed any of these files after the commit of `made`, or after its date if the history lacks that"
    git = ["git", "-C", str(root), "log", "--format=%h %cs %s"]
    paths = ["--", *(str(path.relative_to(root)) for path in files)]
    since = subprocess.run([*git, f"{made['commit'].removesuffix('+')}..HEAD", *paths], capture_output=True, text=True)
    if since.returncode:
        since = subprocess.run([*git, f"--since={made['date']}T23:59:59", *paths], capture_output=True, text=True, check=True)
    return since.stdout.splitlines()


def outdated(root: Path = ROOT) -> Iterator[str]:
    "A line for each page that needs another run, and below it the changes"
    for path in notebooks(root):
        nb = read_notebook(path)
        made = nb["metadata"].get(METADATA_KEY, {}).get("gpu")
        files = [file for name in measured(nb) for file in files_of(name, root)]
        if made and files and (found := changes(files, made, root)):
            yield f"{path.relative_to(root)}: made {made['date']}, commit {made['commit']}"
            yield from (f"    {line}" for line in found)


def commits(root: Path = ROOT) -> Iterator[str]:
    "A line for each commit that made outputs or records on a GPU, the one with the most first: one set of figures has one commit"
    made = {path.stem: read_notebook(path)["metadata"].get(METADATA_KEY, {}).get("gpu") for path in notebooks(root)}
    found = Counter((gpu["commit"], page) for page, gpu in made.items() if gpu)
    for path in (root / "nbs").glob("**/results/*.json"):
        records = json.loads(path.read_text(encoding="utf-8"))
        found.update((r["commit"], path.stem) for r in records if "commit" in r and r["machine"].startswith("NVIDIA"))
    totals = Counter({commit: 0 for commit, _ in found})
    for (commit, _), count in found.items():
        totals[commit] += count
    for commit, total in totals.most_common():
        yield f"{commit}: {total} of {found.total()}, on {', '.join(sorted(page for named, page in found if named == commit))}"


if __name__ == "__main__":
    print("\n".join(outdated()) or "No kernel has changed since its page was run.")
    print("\nCommits of outputs and records:", *commits(), sep="\n")
