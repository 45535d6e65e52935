"""What is read is data: no code of the package, its tools, examples or pages runs what a file of others says."""
import ast
from typing import Iterator

import pytest

from project import ROOT, notebooks, read_notebook

RUNS_WHAT_IT_READS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
NETWORK = {"ftplib", "http", "httpx", "requests", "socket", "urllib", "urllib3"}
FAULTS = {  # a line of the package, and what is wrong with it
    "import pickle": "imports pickle",
    "from pickle import loads": "imports pickle",
    "import urllib.request": "imports urllib",
    "torch.load(file)": "torch.load without weights_only=True",
    "torch.load(file, weights_only=False)": "torch.load without weights_only=True",
    "np.load(file, allow_pickle=True)": "allow_pickle",
    "eval(text)": "calls eval",
    "exec(text)": "calls exec",
    "yaml.load(text)": "yaml.load, which is not safe_load",
    "subprocess.run(text, shell=True)": "shell",
    "os.system(text)": "os.system",
}
FINE = """
import json
json.loads(text)
torch.load(file, weights_only=True)
np.load(file)
yaml.safe_load(text)
model.eval()
exec_nb(page)
subprocess.run(["git", "status"])
"""


def wrong_import(node: ast.AST, forbidden: set[str]) -> Iterator[str]:
    "Forbidden modules that a statement imports"
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
    yield from (f"imports {top}" for name in names if (top := name.partition(".")[0]) in forbidden)


def wrong_call(node: ast.Call) -> Iterator[str]:
    "What makes a call run what it reads"
    name = ast.unparse(node.func)
    given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
    if name in ("eval", "exec"):
        yield f"calls {name}"
    if name == "torch.load" and given.get("weights_only") is not True:
        yield "torch.load without weights_only=True"
    if name == "yaml.load":
        yield "yaml.load, which is not safe_load"
    if name == "os.system":
        yield name
    yield from (key for key in ("allow_pickle", "shell") if given.get(key))


def faults(text: str, forbidden: set[str]) -> list[str]:
    "Line and fault of everything in a source that runs what it reads"
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call))]
    return [f"line {node.lineno}: {fault}" for node in nodes
            for fault in (wrong_call(node) if isinstance(node, ast.Call) else wrong_import(node, forbidden))]


def sources() -> Iterator[tuple[str, str]]:
    "Path and code of what is shipped and of every page"
    for folder in ("fusedloss", "tools", "examples"):
        yield from ((p.relative_to(ROOT).as_posix(), p.read_text(encoding="utf-8")) for p in (ROOT / folder).rglob("*.py"))
    for path in notebooks():
        cells = [cell["source"] for cell in read_notebook(path)["cells"] if cell["cell_type"] == "code"]
        yield path.relative_to(ROOT).as_posix(), "\n".join(cells)


def test_nothing_runs_what_it_reads():
    found = {path: faults(text, RUNS_WHAT_IT_READS | (NETWORK if path.startswith(("fusedloss/", "workbook/")) else set())) for path, text in sources()}
    assert "fusedloss/measure.py" in found and "nbs/14_partial_fc.ipynb" in found
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize("line, fault", FAULTS.items(), ids=FAULTS)
def test_fault_is_named(line, fault):
    assert faults(f"x = 1\n{line}", RUNS_WHAT_IT_READS | NETWORK) == [f"line 2: {fault}"]


def test_reading_data_is_fine():
    assert faults(FINE, RUNS_WHAT_IT_READS | NETWORK) == []
