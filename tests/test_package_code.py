"""The hash of a page follows what it uses into the package, and nothing else there."""
import ast

import pytest
from package_code import package
from workbook import ROOT, code_hash, notebooks, read_notebook

FILES = {
    "__init__.py": '"Losses."\nfrom fusedloss.middle import loss, other\nfrom fusedloss import far\n',
    "far.py": '''
import torch
from torch import float16 as half
SCALE = 2
UNUSED = 3
def deep(x):
    "Twice x."
    return SCALE * x
def message(x):
    if x < 0: raise ValueError("negative")
def registered(x): return x
registered.fake = deep
def rounded(x): return x.to(half)
operator = torch.library.custom_op("fusedloss::operator", deep)
@torch.library.register_fake("fusedloss::operator")
def _(x): return x
''',
    "middle.py": '''
from .far import deep
from fusedloss.far import deep as chosen, message
def kernel(): return compiled("kernel")
def both(x): return chosen(x), deep(x), message(x)
def loss(x): return deep(x)
def lazy(x):
    from fusedloss.far import registered
    return registered(x)
def other(x): return 0
def called(x): return torch.ops.fusedloss.operator(x)
''',
}


@pytest.fixture
def hashed(tmp_path):
    "The hash of a page of one cell, with the package as it is but for `old` made `new` in `file`"
    def write(cell: str, file: str = "", old: str = "", new: str = "") -> str:
        for name, text in {**{f"fusedloss/{k}": v for k, v in FILES.items()}, "cuda/kernel.cu": '#include "shared.cuh"\nint a; // one', "cuda/shared.cuh": "int c;"}.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            assert name != file or text.count(old) == 1
            path.write_text(text.replace(old, new) if name == file else text, encoding="utf-8")
        output = {"output_type": "stream", "name": "stdout", "text": ["1\n"]}
        nb = {"cells": [{"cell_type": "code", "metadata": {}, "source": cell, "outputs": [output]}]}
        package.cache_clear()
        return code_hash(nb, tmp_path)
    yield write
    package.cache_clear()


STAR, DOOR = "from fusedloss.middle import *\nloss(1)", "import fusedloss as fl\nfl.loss(1)"
FAR, MIDDLE = "fusedloss/far.py", "fusedloss/middle.py"
CHANGES = {
    "a function two modules away": (STAR, FAR, "return SCALE * x", "return SCALE + x", True),
    "a constant it reads": (STAR, FAR, "SCALE = 2", "SCALE = 4", True),
    "by attribute": (DOOR, FAR, "SCALE = 2", "SCALE = 4", True),
    "by attribute of a module": ("import fusedloss as fl\nfl.far.deep(1)", FAR, "SCALE = 2", "SCALE = 4", True),
    "inside a function": ("from fusedloss.middle import lazy\nlazy(1)", FAR, "def registered(x): return x", "def registered(x): return 0", True),
    "what is set on it": ("from fusedloss.far import registered\nregistered(1)", FAR, "SCALE = 2", "SCALE = 4", True),
    "an operator's registration": ("from fusedloss.middle import called\ncalled(1)", FAR, "def _(x): return x", "def _(x): return 0", True),
    "a module passed on": ("import fusedloss.far as far\nprint(vars(far))", FAR, "UNUSED = 3", "UNUSED = 4", True),
    "a script in a string": ('run("from fusedloss.middle import loss\\nloss(1)")', FAR, "SCALE = 2", "SCALE = 4", True),
    "what a name of PyTorch stands for": ("from fusedloss.far import rounded\nrounded(1)", FAR, "float16 as half", "bfloat16 as half", True),
    "what a name of the package stands for": ("from fusedloss.middle import both\nboth(1)", MIDDLE, "deep as chosen", "message as chosen", True),
    "another name of PyTorch": (STAR, FAR, "float16 as half", "bfloat16 as half", False),
    "CUDA": ("from fusedloss.middle import kernel\nkernel()", "cuda/kernel.cu", "int a", "int b", True),
    "CUDA, a header": ("from fusedloss.middle import kernel\nkernel()", "cuda/shared.cuh", "int c", "int d", True),
    "CUDA, a comment": ("from fusedloss.middle import kernel\nkernel()", "cuda/kernel.cu", "one", "two", False),
    "CUDA of another": (STAR, "cuda/kernel.cu", "int a", "int b", False),
    "a docstring": (STAR, FAR, "Twice x.", "x, twice.", False),
    "a name not used": (STAR, FAR, "UNUSED = 3", "UNUSED = 4", False),
    "a function not used": (STAR, MIDDLE, "return 0", "return 1", False),
    "a check elsewhere": (DOOR, FAR, '"negative"', '"below 0"', False),
}


@pytest.mark.parametrize("cell, file, old, new, counts", CHANGES.values(), ids=CHANGES)
def test_what_changes_the_hash(hashed, cell, file, old, new, counts):
    assert (hashed(cell) != hashed(cell, file, old, new)) == counts


def test_a_function_that_moves_keeps_the_hash(hashed):
    moved = hashed("from fusedloss.middle import message\nmessage(1)", MIDDLE, "def other(x): return 0",
                   'def message(x):\n    if x < 0: raise ValueError("negative")')
    assert moved == hashed("from fusedloss.far import message\nmessage(1)")


def test_a_function_that_leaves_its_page_keeps_the_hash(tmp_path):
    def page(*exported: str) -> str:
        "The hash of a page of the module `far` that exports these cells and calls `double`"
        sources = ["#| default_exp far", *(f"#| export\n{text}" for text in exported), "double(1)"]
        cells = [{"cell_type": "code", "metadata": {}, "source": s, "outputs": [1] * (s == "double(1)")} for s in sources]
        (tmp_path / "fusedloss" / "far.py").write_text("\n".join(exported), encoding="utf-8")
        package.cache_clear()
        return code_hash({"cells": cells}, tmp_path)
    (tmp_path / "fusedloss").mkdir()
    (tmp_path / "fusedloss" / "below.py").write_text("def double(x): return 2 * x", encoding="utf-8")
    here = page("import math", "def double(x): return 2 * x")
    assert page("from fusedloss.below import double") == here != page("import math", "def double(x): return 3 * x")
    package.cache_clear()


def test_a_page_depends_on_the_package():
    page = read_notebook(next(path for path in notebooks() if path.stem == "22_linear_ctc"))
    used = package(ROOT).used_by(ast.parse("from fusedloss.linear_ctc import linear_ctc_loss\nlinear_ctc_loss(1)"))
    assert len(used) > 50
    assert code_hash(page) != code_hash(page, ROOT / "nbs"), "where there is no package, only the page counts"
