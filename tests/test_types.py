"""The public interface is typed, a type checker understands it, and its types say what the checks at run time say."""
import inspect
import re
import subprocess
import sys
import tempfile
import types
from typing import Iterator, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn

import build_types
import fusedloss as fl
from fusedloss.core.rates import Machine
from project import ROOT

ERROR = re.compile(r"(?m)^tests/(typing_\w+\.py):(\d+): error: (.*)$")
x, w, y = torch.randn(4, 8), torch.randn(16, 8), torch.tensor([1, 2, 3, 4])
paths = torch.randn(9, 2, 5).log_softmax(-1), torch.tensor([[1, 2], [3, 4]]), (9, 9), (2, 2)
grid = torch.randn(2, 9, 3, 5), torch.tensor([[1, 2], [3, 1]]), (9, 9), (2, 2)
graph = torch.randn(3, 2, 2, 2), torch.tensor([[0, 1], [1, 0]]), torch.zeros(2, 2), torch.zeros(2, 2)
FILES = tempfile.TemporaryDirectory()
GIVEN = {  # a call of each function or class that takes words; the others of its arguments
    "baseline_linear_cross_entropy": (x, w, y), "chunked_linear_cross_entropy": (x, w, y), "cross_entropy": (x, y),
    "iota_cross_entropy": (x, y), "linear_cross_entropy": (x, w, y), "recompute_linear_cross_entropy": (x, w, y),
    "sharded_linear_cross_entropy": (x, w, y), "sharded_linear_log_probs": (x, w, y), "sharded_linear_topk": (x, w, 3), "sharded_linear_sample": (x, w), "tiled_linear_cross_entropy": (x, w, y), "plan": (4, 16, 8),
    "margin_cross_entropy": (x, w, y), "logz": graph, "ctc_loss": paths, "ctc_loss_with_logits": paths, "transducer_loss": grid,
    "linear_divergence": (x, w, x, w), "sharded_linear_divergence": (x, w, x, w), "contrastive_loss": (x, x, 2.0), "sigmoid_contrastive_loss": (x, x, 2.0, -1.0), "linear_ctc_loss": (paths[0], torch.randn(7, 5), *paths[1:]), "linear_transducer_loss": (torch.randn(2, 9, 5), torch.randn(2, 3, 5), torch.randn(7, 5), *grid[1:]), "CTCLoss": (), "TransducerLoss": (), "LinearCrossEntropyLoss": (8, 16),
    "MemoryEfficientVocabOutput": (nn.Parameter(w),), "PartialFC": (16, 8), "ShardedPartialFC": (16, 8),
    "NegativeSampler": (), "PopularitySampler": (torch.ones(16), 3), "margins.Circle": (),
    "save_insightface": (fl.PartialFC(16, 8), FILES.name, 1),
    **dict.fromkeys(("RowSparse", "ShardedRowSparse"), (torch.optim.SGD, [nn.Parameter(w)])),
}
NEEDED = {"margin_cross_entropy": {"margin": fl.margins.CosFace()}, "NegativeSampler": {"rate": 0.5}}
CALLED = {"CTCLoss": paths, "TransducerLoss": grid, "LinearCrossEntropyLoss": (x, y), "MemoryEfficientVocabOutput": (x, y)}  # which check when they run


def public() -> Iterator[tuple[str, object]]:
    "Names and what they stand for, of the package and of the classes of its two public modules"
    for name in fl.__all__:
        found = getattr(fl, name)
        if inspect.ismodule(found):
            yield from ((f"{name}.{k}", v) for k, v in vars(found).items() if inspect.isclass(v) and v.__module__ == found.__name__
                        and not k.startswith("_"))
        else:
            yield name, found


def methods(name: str, found: type) -> Iterator[tuple[str, types.FunctionType]]:
    "Public methods of our own of a class"
    for key in dir(found):
        method = inspect.getattr_static(found, key)
        method = getattr(method, "fget", getattr(method, "__func__", method))
        if (key in ("__init__", "__call__") or not key.startswith("_")) and inspect.isfunction(method):
            if method.__module__.startswith("fusedloss"):
                yield f"{name}.{key}", method


def functions() -> Iterator[tuple[str, types.FunctionType]]:
    "Public functions and methods of our own"
    for name, found in public():
        if inspect.isfunction(found):
            yield name, found
        elif inspect.isclass(found):
            yield from methods(name, found)


def adapters() -> Iterator[tuple[str, types.FunctionType]]:
    "Public functions of the adapters to frameworks"
    for name in fl.integrations.NAMES:
        module = getattr(fl.integrations, name)
        yield from ((f"{name}.{key}", getattr(module, key)) for key in module.__all__)


def mentioned(annotation: object) -> Iterator[type]:
    "Classes of our own in an annotation"
    for part in annotation if isinstance(annotation, list) else get_args(annotation):
        yield from mentioned(part)
    found = get_origin(annotation) or annotation
    if inspect.isclass(found) and found.__module__.startswith("fusedloss"):
        yield found


def words_of(annotation: object) -> tuple:
    "The strings that an annotation allows"
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return sum(map(words_of, get_args(annotation)), ())
    return ()


def words() -> Iterator[tuple[str, str, tuple]]:
    "Name, parameter and words of each public argument that has some"
    for name, found in public():
        if inspect.isfunction(found) or inspect.isclass(found):
            yield from ((name, p.name, words_of(p.annotation)) for p in inspect.signature(found).parameters.values()
                        if words_of(p.annotation))


def call(name: str, **given) -> str:
    "What the error says that a call raises, up to what it got; empty if it raises none"
    found = fl
    for part in name.split("."):
        found = getattr(found, part)
    try:
        made = found(*GIVEN[name], **NEEDED.get(name, {}) | given)
        if name in CALLED:
            made(*CALLED[name])
    except ValueError as error:
        return str(error).partition(", got ")[0]
    return ""


def test_everything_public_is_annotated():
    missing, listed = [], [*functions(), *adapters()]
    hints = [hint for _, function in listed for hint in get_type_hints(inspect.unwrap(function)).values()]
    given_back = {klass for hint in hints for klass in mentioned(hint)}
    assert {Machine, fl.CrossEntropyStats} <= given_back
    for name, function in [*listed, *(method for klass in given_back for method in methods(klass.__name__, klass))]:
        signature = inspect.signature(function)
        bare = [p for i, p in enumerate(signature.parameters) if signature.parameters[p].annotation is inspect.Parameter.empty
                and not (i == 0 and p == "self")]
        if signature.return_annotation is inspect.Signature.empty and not name.endswith(".__init__"):
            bare.append("return")
        missing += [f"{name}: {part}" for part in bare]
    assert not missing


@pytest.mark.parametrize("name, parameter, known", [pytest.param(*case, id=".".join(case[:2])) for case in words()])
def test_words_are_those_that_are_accepted(name, parameter, known):
    refused = call(name, **{parameter: "a word of its own"})
    assert refused.startswith(f"{parameter}: expected") and all(word in refused for word in known)
    assert refused not in [call(name, **{parameter: word}) for word in known]


@pytest.mark.parametrize("name", ["LinearCrossEntropyLoss", "ShardedPartialFC"])
def test_options_are_those_of_the_base(name):
    own, base = (inspect.signature(c.__init__).parameters for c in (getattr(fl, name), getattr(fl, name).__mro__[1]))
    options, = get_args(own["options"].annotation)
    assert options.__annotations__ == {k: p.annotation for k, p in base.items() if k not in own}


def test_types_of_typical_calls():
    pytest.importorskip("mypy")
    files = ["fusedloss/__init__.pyi", "tests/typing_public.py", "tests/typing_wrong.py"]
    done = subprocess.run([sys.executable, "-m", "mypy", *files], cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    found = {(file, int(line)): text for file, line, text in ERROR.findall(done.stdout)}
    lines = (ROOT / "tests" / "typing_wrong.py").read_text(encoding="utf-8").splitlines()
    expected = {("typing_wrong.py", n) for n, line in enumerate(lines, 1) if line.endswith("# rejected")}
    assert {at: text for at, text in found.items() if at not in expected} == {}, "errors that are none"
    assert expected - found.keys() == set(), "calls that should be rejected"
    assert done.stdout.count(": error:") >= len(expected) and "fusedloss/" not in done.stdout


def test_a_function_without_the_flag_written_as_expected_is_named(tmp_path):
    package = tmp_path / "fusedloss"
    package.mkdir()
    (package / "__init__.py").write_text("_NAMES = {'a': ('f',)}\n_SPACES = ()\n", encoding="utf-8")
    text = "def f(x:int, *, return_stats: bool=False) -> int | str:\n    return x\n"
    (package / "a.py").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="^f: expected 'return_stats:bool=False' once"):
        build_types.stub(tmp_path)
    (package / "a.py").write_text(text.replace("return_stats: bool", "return_stats:bool"), encoding="utf-8")
    assert build_types.stub(tmp_path).count("@overload") == 3
