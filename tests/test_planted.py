"""Bugs are planted wherever their text stands below a module, and functions are replaced wherever they are held."""
import sys
from importlib import import_module
from types import ModuleType
from typing import Callable

import pytest
import torch

import fusedloss.chunks
import fusedloss.core.checks
import fusedloss.kernels
import fusedloss.losses
from fusedloss import _ops
from fusedloss.core.checks import acc_dtype
from helpers import everywhere, in_any_layout, planted, unchanged

pytestmark = pytest.mark.thorough
SOURCES = {  # of a package `name`, whose module `top` imports the others in every way
    "__init__": "",
    "words": "greeting = 'hello'\n",
    "low": "from name.words import greeting\nlimit = 1\n\nclass Answer: pass\n\ndef double(n):\n    return 2 * n\n",
    "part/__init__": "",
    "part/middle": "from ..low import (\n    Answer,  # with a comment\n    double as twice,\n)\nfrom .. import low\nfrom . import side, leaf as end\n\n"
                   "def six(): return 3 * twice(1) * low.limit\n",
    "part/side": "from name.words import greeting\nimport name.low as low\ncalls = []\n\ndef later():\n    from name.low import limit\n    return limit\n",
    "part/leaf": "from typing import Any\nnothing: Any = 0\n",
    "top": "from name.part import middle, side\nfrom name.part.middle import six\nimport name.words as words\nfrom fusedloss import _ops\n\n"
           "space = _ops.NAMESPACE\n"
           "def answer(): return six() + middle.end.nothing, words.greeting, side.later(), space\n"}


@pytest.fixture
def package(tmp_path, monkeypatch) -> Callable[[str], ModuleType]:
    "Imports a module of a package of the sources above"
    name = f"toy_{tmp_path.name}"
    for part, source in SOURCES.items():
        path = tmp_path / name / f"{part}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source.replace("name", name), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return lambda part: import_module(f"{name}.{part}")


def test_a_bug_two_imports_below_is_seen_from_above(package, tmp_path):
    top, low = package("top"), package("low")
    before = dict(sys.modules)
    changed = planted(top, tmp_path, "return 2 * n", "return 5 * n")
    assert changed.answer()[0] == 15 and top.answer()[0] == 6 and low.double(1) == 2
    assert all(sys.modules[name] is module for name, module in before.items()), "the real modules stay"
    spaces = changed.answer()[-1], _ops.NAMESPACE, top.answer()[-1]
    assert spaces == (changed.__name__.partition("_")[0], "fusedloss", "fusedloss"), "operators have a namespace of their own"


def test_all_that_lead_to_a_bug_import_the_variants_and_others_are_real(package, tmp_path):
    changed = planted(package("top"), tmp_path, "limit = 1", "limit = 10")
    assert changed.answer()[:3] == (60, "hello", 10), "an import in a function too"
    assert changed.middle.low is changed.side.low is sys.modules[changed.middle.Answer.__module__] is not package("low")
    assert changed.words is package("words") and changed.middle.end is package("part.leaf")
    assert changed.middle.side is changed.side is not package("part.side")


def test_several_texts_in_several_modules(package, tmp_path):
    changed = planted(package("top"), tmp_path, "return 2 * n", "return 5 * n", "5 * n", "7 * n", "3 * twice", "1 * twice", "nothing: Any = 0", "nothing: Any = 1")
    assert changed.answer()[0] == 8


def test_without_a_bug_the_module_alone_is_a_variant(package, tmp_path):
    top = package("top")
    assert (changed := planted(top, tmp_path)) is not top and changed.answer()[:3] == top.answer()[:3]
    assert changed.middle is top.middle
    same = planted(top, tmp_path, *unchanged([("return 2 * n", "return 5 * n"), ("limit = 1", "limit = 10")]))
    assert same.answer()[:3] == top.answer()[:3] and same.middle is not top.middle


@pytest.mark.parametrize("text", ["[double(n) for n in 'ab', 'c']; limit = 2", '[double( n )for n in "ab","c"]\nlimit=2'])
@pytest.mark.parametrize("source", ["[\n  double(n,)\n  for n in 'ab', 'c'  # with a comment\n]; limit = 2", '[double(n) for n in "ab", "c"]\n\nlimit = \\\n  2'])
def test_a_text_is_found_in_any_layout(text, source):
    assert in_any_layout(text).fullmatch(source)
    for other in source.replace("for n", "forn"), source.replace("2", "3"), source.replace("double(n", "double(m"):
        assert not in_any_layout(text).search(other)


@pytest.mark.parametrize("text, found", [("n + 1", 1), (" n + 1", 0), ("n += n", 2), ("n += n\n", 1), ("    n += n\n", 1), ("    a:", 0)])
def test_white_space_at_the_ends_says_where_a_text_begins_and_ends(text, found):
    assert len(in_any_layout(text).findall("n = an + 1\nif a:\n    n += n  # once\n    n += n - 1\n")) == found


@pytest.mark.parametrize("text, places", [("not there", []), ("import greeting", ["low", "part.side"]), ("twice", ["part.middle", "part.middle"])])
def test_a_text_that_stands_in_no_place_or_in_two_fails(text, places, package, tmp_path):
    with pytest.raises(AssertionError, match="plant this bug elsewhere") as caught:
        planted(package("top"), tmp_path, text, "")
    said = str(caught.value).splitlines()[0].replace(tmp_path.name, "name")
    assert said == f"{len(places)} places hold {text!r}, not one: plant this bug elsewhere{': ' * bool(places)}{', '.join(f'toy_name.{p}' for p in places)}"


def test_what_a_module_does_not_import_is_not_searched(package, tmp_path):
    package("top")
    with pytest.raises(AssertionError, match="^0 places"):
        planted(package("low"), tmp_path, "3 * twice(1)", "")


def test_a_bug_far_below_a_loss_is_seen_from_it(tmp_path):
    x, w, y = torch.randn(4, 3), torch.randn(5, 3), torch.tensor([0, 1, 2, 3])
    changed = planted(fusedloss.losses, tmp_path, 'ValueError(f"{name}: expected {expected}', 'ValueError(f"{name}: planted {expected}')
    for module, word in (changed, "planted"), (fusedloss.losses, "expected"):
        with pytest.raises(ValueError, match=f"^reduction: {word}"):
            module.linear_cross_entropy(x, w, y, reduction="average")
    assert torch.equal(changed.linear_cross_entropy(x, w, y), fusedloss.losses.linear_cross_entropy(x, w, y))


def test_everywhere_is_wherever_a_function_is_held(monkeypatch, tmp_path):
    old, variant = acc_dtype, planted(fusedloss.chunks, tmp_path)
    monkeypatch.setattr(fusedloss.kernels, "by_another_name", old, raising=False)
    held = lambda: [fusedloss.core.checks.acc_dtype, fusedloss.kernels.acc_dtype, fusedloss.kernels.by_another_name, variant.acc_dtype]
    with monkeypatch.context() as patch:
        for module, new in (fusedloss.kernels, lambda f: f), (variant, len), (fusedloss.core.checks, None):
            everywhere(patch, module, "acc_dtype", new)
            assert all(it is new for it in held())
        with pytest.raises(AssertionError, match="expected a function or a class, got None"):
            everywhere(patch, variant, "acc_dtype", old)
    assert all(it is old for it in held())
