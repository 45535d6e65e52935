"""The reference has every public name, and every parameter a meaning; a name without one is named."""
import inspect
import json
from typing import Literal, NamedTuple, Optional

import pytest
import reference
from torch import Tensor
from project import ROOT, read_notebook

import fusedloss

pytestmark = pytest.mark.thorough


def described(
    x: Tensor,  # [N,H], rows
    n: int = 1, m: int = 2,  # two sizes
    *, method: Literal["auto", "tiles"] = "auto",  # as a word,
                                                   # or as none
    zero_infinity: bool = False,  # as for `ctc_loss`
) -> Tensor:  # [N]
    "A sentence.\n\nArgs:\n    x: what `help` adds"


def undescribed(x: Tensor, nothing_says: int = 0) -> Tensor:
    "A sentence."


class Fields(NamedTuple):
    "A tuple."
    # above
    a: int
    b: int  # beside


@pytest.fixture(scope="module")
def page() -> dict:
    return read_notebook(ROOT / "nbs" / reference.PAGE)


def cell(kind: str, source: str, shown: str = "") -> dict:
    "A cell, with an output if it shows something"
    return {"cell_type": kind, "source": source, "outputs": [{"output_type": "stream", "text": shown}] if shown else []}


@pytest.fixture
def with_name(page, monkeypatch):
    "The page with an entry of one more public name; its faults"
    def add(name: str, obj: object, *cells: dict) -> list[str]:
        monkeypatch.setattr(fusedloss, name, obj, raising=False)
        monkeypatch.setattr(fusedloss, "__all__", [*fusedloss.__all__, name])
        reference.entry_of.cache_clear()
        return reference.faults({"cells": [*page["cells"], *cells]})
    yield add
    reference.entry_of.cache_clear()


def test_every_public_name_is_there_and_described(page):
    assert reference.faults(page) == []
    assert not {"linear_cross_entropy", "margins.ArcFace", "semirings.Log", "HeadStats"} - {n for e in reference.entries(page) for n in e.names}


def test_a_parameter_without_a_meaning_is_a_fault(with_name):
    entry = cell("markdown", "### undescribed"), cell("code", "undescribed(x)", "1")
    assert with_name("undescribed", undescribed, *entry) == [
        f"undescribed: {name} has no meaning: a comment beside it gives it one" for name in ("x", "nothing_says")]


def test_a_name_that_is_described_and_shown_is_none(with_name):
    assert with_name("described", described, cell("markdown", "### described"), cell("code", "described(x)", "1")) == []


def test_a_name_without_an_entry_an_example_or_a_meaning_of_its_own(with_name):
    assert with_name("described", described) == [f"described: no entry in nbs/{reference.PAGE}"]
    assert with_name("described", described, cell("markdown", "### described"), cell("code", "described(x)"))[-1] == "described: no example with an output"
    unknown = cell("markdown", "### gone"), cell("code", "gone()", "1")
    assert f"gone: an entry in nbs/{reference.PAGE}, and no public name" in with_name("described", described, *unknown)


def test_a_site_with_a_fault_is_not_built(tmp_path, page):
    path = tmp_path / reference.PAGE
    path.write_text(json.dumps({"cells": [c for c in page["cells"] if not c["source"].startswith("### plan")]}), encoding="utf-8")
    with pytest.raises(ValueError, match=f"plan: no entry in nbs/{reference.PAGE}"):
        reference.fill(path, "https://example.org/r")


def test_comments_beside_above_and_below():
    assert reference.beside(described) == {"x": "[N,H], rows", "n": "two sizes", "m": "two sizes", "method": "as a word, or as none",
                                           "zero_infinity": "as for `ctc_loss`", "return": "[N]"}
    assert reference.beside(Fields) == {"a": "above", "b": "beside"}
    assert reference.sentence(described) == ("A sentence.", "")


def test_a_meaning_may_be_another_functions():
    rows = {p.name: p.meaning for p in reference.parameters(fusedloss.ctc_posteriors)}
    assert rows == {p.name: p.meaning for p in reference.parameters(fusedloss.ctc_loss) if p.name in rows}
    assert "frames" in rows["input_lengths"]


def test_signatures_are_python(page):
    for entry in reference.entries(page):
        if entry.names[0] in reference.RESULTS or inspect.ismodule(entry.obj):
            continue
        for block in reference.entry_text(entry, "src").split("```python\n")[1:]:
            text = block.split("\n```")[0]
            compile(f"def {text.split('(')[0].split('.')[-1]}({text.split('(', 1)[1]}: pass", entry.names[0], "exec")


def test_types_as_words():
    assert reference.type_words(Optional[Literal["a", "b"]]) == '`"a"`, `"b"` or `None`'
    assert reference.type_words(tuple[Tensor, int]).endswith("tensors.html), `int`)")
    assert reference.prose('[N,H], "mean" of `x_y`, a*b in [0, V)') == '`[N,H]`, `"mean"` of `x_y`, a\\*b in \\[0, V)'


def test_the_page_is_filled(tmp_path, page):
    path = tmp_path / reference.PAGE
    path.write_text(json.dumps(page), encoding="utf-8")
    reference.fill(path, "https://example.org/r")
    text = "\n".join(c["source"] for c in json.loads(path.read_text(encoding="utf-8"))["cells"])
    assert "### linear_cross_entropy {#linear_cross_entropy}" in text and "[`plan`](#plan)" in text
    assert f"https://example.org/r/blob/v{fusedloss.__version__}/fusedloss/losses.py#L" in text
    assert "[Stage 11 · Let one function choose the method](11_losses.ipynb) · [source](" in text
    assert f"\n\n[source](https://example.org/r/blob/v{fusedloss.__version__}/fusedloss/core/sampling.py#L" in text, "no page of core"
    assert text.count("weight of lse² in each token's loss") == 1  # options stand once
