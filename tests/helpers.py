"""The cases every linear cross entropy must pass, and one check that says what a method got wrong."""
import gc
import importlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec, resolve_name
from itertools import count
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Callable, Iterable, Mapping
from unittest.mock import patch

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusedloss import _ops
from fusedloss.baseline import Sample, sample_data
from fusedloss.core.versions import torch_version
from workbook.measure import relative_error

# fp64: a few hundred additions of rounding 1e-16. fp32: the same of 6e-8.
# Half precisions: results are rounded once to 8 or 11 bits (4e-3, 5e-4), and on a GPU so is dz before its products.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = find_spec("triton") is not None and torch.cuda.is_available()
NOT_INTERPRETED = "runs in Triton's interpreter alone: Triton and TRITON_INTERPRET=1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
where_kernels_run = pytest.mark.skipif(not INTERPRETED and not COMPILED, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
follows_plans = pytest.mark.skipif(torch_version() < (2, 9), reason="torch.compile of PyTorch 2.8 leaves a plan uncompiled")


def reference(x, w, y, *, reduction="mean", ignore_index=-100, margin=0.35, scale=None):
    "The loss by its definition, in float64, sharing no line with the library"
    x, w, y = x.double(), w.double(), y.long()
    if scale is not None:
        x, w = (t / torch.where(t.norm(dim=-1) == 0, 1.0, t.norm(dim=-1)).unsqueeze(-1) for t in (x, w))
    valid = y != ignore_index
    hot = torch.zeros(*y.shape, len(w), dtype=x.dtype, device=x.device)
    hot.scatter_(-1, torch.where(valid, y, 0).unsqueeze(-1), 1.0)
    z = x @ w.T if scale is None else scale * (x @ w.T - margin * hot)
    losses = torch.where(valid, z.logsumexp(-1) - (z * hot).sum(-1), 0.0)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / max(int(valid.sum()), 1)}[reduction]


@dataclass(frozen=True)
class Case:
    "One call of a loss: sizes N, H, V, tile sides, options, and what is unusual about the data."
    sizes: tuple[int, int, int] = (7, 3, 10)
    tiles: tuple[int, int] = (3, 4)
    options: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    label_dtype: torch.dtype = torch.int64
    ignored: tuple[int, ...] = ()  # rows whose label is ignored
    zeros: bool = False  # the first row of x and the last of w are zero
    last_tile: bool = False  # all targets in the last, ragged tile of classes
    requires: tuple[bool, bool] = (True, True)  # gradients of x, of w

    def sample(self, device) -> Sample:
        x, w, y = sample_data(*self.sizes, dtype=self.dtype, device=device, requires_grad=False)
        if self.zeros:
            x[0], w[-1] = 0, 0
        if self.last_tile:
            start = (len(w) - 1) // self.tiles[1] * self.tiles[1]
            y = start + y % (len(w) - start)
        y[list(self.ignored)] = self.options.get("ignore_index", -100)
        return Sample(x.requires_grad_(self.requires[0]), w.requires_grad_(self.requires[1]), y.to(self.label_dtype))


def upstream(loss):
    "A gradient for `loss` that is uneven, negative, and zero for one token"
    steps = torch.arange(loss.numel(), dtype=torch.float64, device=loss.device).view(loss.shape)
    return ((steps - 1) * 0.75).to(loss.dtype) if loss.dim() else torch.full_like(loss, -1.7)


def gradients(fn, sample, g=None, **options):
    "Loss and the gradients of x and w, None where not asked for"
    x, w = (t.detach().requires_grad_(t.requires_grad) for t in sample[:2])
    loss = fn(x, w, sample.target, **options)
    if loss.requires_grad:
        loss.backward(upstream(loss) if g is None else g)
    return loss.detach(), x.grad, w.grad


def roundings(x, w, b=None, rows=1) -> dict[str, float]:
    "What a few roundings leave where a result is a small difference of its terms: lse - score, p - 1; for `rows` gradients near 1"
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    longest = lambda t: max((n for n in t.detach().double().norm(dim=-1).flatten().tolist() if isfinite(n)), default=0.0)
    bias = 0.0 if b is None else max((abs(v) for v in b.tolist() if isfinite(v)), default=0.0)
    rounded = 8 * eps * (1 + longest(x) * longest(w) + bias) * rows**0.5  # scores are at most this large
    return {"loss": rounded, "dx": rounded * longest(w), "dw": rounded * longest(x), "db": rounded}


def off(name, got, exact, tolerance, floor=0.0) -> list[str]:
    "Whether `got` is further from `exact` than a share of it, and a floor that roundings of its terms reach, in words"
    exact = exact.detach().cpu().double()
    error, size = (got.detach().cpu().double() - exact).norm().item(), exact.norm().item()
    return [] if error <= tolerance * size + floor else [f"{name} is off by {error:.1e} of {size:.1e}"]


def differences(fn, sample, tolerance, **options) -> list[str]:
    "What `fn` gets wrong on `sample`, in words; empty if nothing"
    before = [t.detach().clone() for t in sample]
    versions = [t._version for t in sample]
    got = gradients(fn, sample, **options)
    names = ("loss", "dx", "dw")
    wrong = [f"{n} was changed" for n, t, b in zip("xwy", sample, before) if not torch.equal(t, b)]
    wrong += [f"{n} was written to" for n, t, v in zip("xwy", sample, versions) if t._version != v]
    options = {k: v for k, v in options.items() if not k.endswith("_tile")}
    exact = gradients(reference, Sample(*(t.detach().double().requires_grad_(t.requires_grad) for t in sample[:2]), sample.target), **options)
    floors = roundings(*sample[:2], rows=got[0].numel()) if options.get("scale") is None else {}
    for name, a, b in zip(names, got, exact):
        if (a is None) != (b is None):
            wrong.append(f"{name} is {'missing' if a is None else 'not asked for'}")
        elif a is not None and a.shape != b.shape:
            wrong.append(f"{name} has shape {list(a.shape)}")
        elif a is not None:
            wrong += off(name, a, b, tolerance, floors.get(name, 0.0))
    loss_dtype = torch.float64 if sample.input.dtype == torch.float64 else torch.float32
    dtypes = (loss_dtype, sample.input.dtype, sample.weight.dtype)
    return wrong + [f"{n} is {t.dtype}" for n, t, d in zip(names, got, dtypes) if t is not None and t.dtype != d]


def faults(fn, case, device, tiled=True) -> list[str]:
    "What `fn` gets wrong on `case`"
    tiles = dict(zip(("token_tile", "class_tile"), case.tiles)) if tiled else {}
    return differences(fn, case.sample(device), TOLERANCE[case.dtype], **case.options, **tiles)


CASES = {
    "one of each": Case((1, 1, 1), (1, 1)),
    "one token": Case((1, 3, 10)),
    "two tokens, one class": Case((2, 3, 1)),
    "ragged tiles": Case((7, 3, 10)),
    "tiles of one score": Case((5, 3, 4), (1, 1)),
    "tiles that divide": Case((6, 2, 8), (3, 4)),
    "tile larger than all": Case((7, 3, 10), (64, 64)),
    "ragged and larger": Case((47, 5, 123), (16, 50)),
    "more classes": Case((64, 8, 257), (30, 100)),
    "none": Case(options=dict(reduction="none")),
    "sum": Case(options=dict(reduction="sum")),
    "ignored": Case(ignored=(0, 4)),
    "ignored, none": Case(ignored=(2,), options=dict(reduction="none")),
    "ignored, sum": Case(ignored=(6,), options=dict(reduction="sum")),
    "ignore_index is a class": Case(ignored=(1, 3), options=dict(ignore_index=5)),
    "ignore_index is the last class": Case(ignored=(1,), options=dict(ignore_index=9)),
    "ignore_index above the classes": Case(ignored=(5,), options=dict(ignore_index=10)),
    "all ignored, mean": Case(ignored=tuple(range(7))),
    "all ignored, none": Case(ignored=tuple(range(7)), options=dict(reduction="none", scale=8.0)),
    "int32 labels": Case(label_dtype=torch.int32),
    "uint8 labels": Case(label_dtype=torch.uint8, ignored=(1,), options=dict(ignore_index=255)),
    "LMCL": Case(options=dict(scale=8.0)),
    "LMCL, none": Case(ignored=(1,), options=dict(scale=30.0, margin=0.2, reduction="none")),
    "LMCL, no margin": Case(options=dict(scale=64.0, margin=0.0)),
    "LMCL, zero vectors": Case(zeros=True, options=dict(scale=8.0, reduction="sum")),
    "LMCL, targets in the last tile": Case((13, 5, 100), (4, 16), dict(scale=8.0), last_tile=True),
    "LMCL, one tile": Case(tiles=(64, 64), options=dict(scale=8.0)),
    "targets in the last tile": Case((13, 5, 100), (4, 16), last_tile=True),
    "frozen input": Case(requires=(False, True)),
    "frozen weight": Case(requires=(True, False)),
    "frozen input, LMCL": Case(requires=(False, True), options=dict(scale=8.0)),
    "frozen weight, LMCL": Case(requires=(True, False), options=dict(scale=8.0)),
    "all frozen": Case(requires=(False, False)),
    "float32": Case((47, 16, 123), (16, 50), dtype=torch.float32),
    "float32, LMCL": Case((47, 16, 123), (16, 50), dict(scale=16.0), torch.float32),
    "bfloat16": Case((47, 16, 123), (16, 50), dtype=torch.bfloat16),
    "float16": Case((47, 16, 123), (16, 50), dtype=torch.float16),
}


NUMBERS = count()


def replaced(source: str, *pairs: str) -> str:
    "A source with a bug in it; each text stands in it once"
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert source.count(old) == 1, f"{source.count(old)} places hold {old!r}, not one: plant this bug elsewhere"
        source = source.replace(old, new)
    return source


GAP = r"(?:[\s;]|\\\n|#[^\n]*\n)*"  # what may stand between two tokens of Python
PARTS = re.compile(r"\w+|[^\w\s;]|(?<=\w)[\s;]+(?=\w)")


def in_any_layout(text: str) -> re.Pattern[str]:
    """Finds some Python whatever its white space, quotes, semicolons and last commas; what begins or ends as a line does, at a line's
    begin or end alone. The first group is the white space before it"""
    def part(found: str) -> str:
        if not found.strip("; \t\n"):
            return r"(?<!\w)"
        comma = rf"(?:,{GAP})?" if found in ")]}" else ""
        return comma + ("['\"]" if found in "'\"" else re.escape(found))
    begin = r"(^[ \t]*)" if text.startswith(("\n", "    ")) else r"((?<!\w))" if text[0].isspace() else "()"
    end = r"(?=[ \t]*(?:$|[#;]))" if text.endswith("\n") else r"(?!\w)" if text[-1].isspace() else ""
    return re.compile(begin + GAP.join(map(part, PARTS.findall(text))) + end, re.MULTILINE)


FROM = re.compile(r"^([ \t]*)from ([.\w]+) import (\([^)]*\)|[^(\n;#]+)", re.MULTILINE)
MODULE = re.compile(r"^([ \t]*)import ([.\w]+) as (\w+)", re.MULTILINE)


def source_of(name: str) -> str:
    "The text of a loaded module"
    return Path(sys.modules[name].__file__).read_text(encoding="utf-8")


def home_of(name: str, given: str) -> str:
    "The whole name of what the module `name` imports as `given`, which may begin with dots"
    return resolve_name(given, sys.modules[name].__package__)


def names_in(text: str) -> list[tuple[str, str]]:
    "The names that `from ... import` lists, and what they are called from then on"
    names = [part.split() for part in re.sub(r"#.*", "", text).strip("() \n").split(",")]
    return [(part[0], part[-1]) for part in names if part]


@cache
def imported(name: str) -> tuple[str, ...]:
    "What a module of a package imports from the same package when it is loaded: each after what it imports itself, the module last"
    source, own = source_of(name), name.partition(".")[0] + "."
    found = [home for indent, home, _ in MODULE.findall(source) if not indent]
    for indent, given, names in FROM.findall(source):
        home = home_of(name, given)
        found += [] if indent else [home, *(f"{home}.{part}" for part, _ in names_in(names))]
    below = [imported(home) for home in found if home.startswith(own) and home in sys.modules]
    return *dict.fromkeys(each for homes in below for each in homes), name


def importing(name: str, source: str, variants: Mapping[str, str]) -> str:
    "The text of a module, which imports variants in place of the modules that they are of"
    def modules(found: re.Match) -> str:
        indent, home, called = found.groups()
        return f"{indent}import {variants.get(home, home)} as {called}"

    def parts(found: re.Match) -> str:
        indent, home, names = found[1], home_of(name, found[2]), names_in(found[3])
        if home in variants or not any(f"{home}.{part}" in variants for part, _ in names):
            return f"{indent}from {variants.get(home, home)} import {found[3]}"
        lines = [f"import {variants[whole]} as {called}" if (whole := f"{home}.{part}") in variants else f"from {home} import {part} as {called}"
                 for part, called in names]
        return indent + "; ".join(lines)
    return FROM.sub(parts, MODULE.sub(modules, source))


def with_texts_replaced(top: str, *pairs: str) -> tuple[dict[str, str], set[str]]:
    """The sources of a module and of all that it imports, directly or not, by name, with texts replaced; the names of those that differ.
    In all of them each text stands once, in any layout"""
    sources, changed = {name: source_of(name) for name in imported(top)}, set()
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        pattern, words = in_any_layout(old), set(re.findall(r"\w+", old))
        likely = [name for name, source in sources.items() if all(word in source for word in words)]
        places = [name for name in likely for _ in pattern.finditer(sources[name])]
        assert len(places) == 1, f"{len(places)} places hold {old!r}, not one: plant this bug elsewhere{': ' * bool(places)}{', '.join(places)}"
        new = new.lstrip() if old[0].isspace() else new
        new = new.rstrip() if old[-1].isspace() else new
        sources[places[0]] = pattern.sub(lambda found: found[1] + new, sources[places[0]])
        changed.add(places[0])
    return sources, changed


def planted(module: ModuleType, folder: Path, *pairs: str) -> ModuleType:
    "`module` with texts replaced: it, the changed modules and those that lead to them are variants, from files, their operators in a namespace of their own"
    top, variant = module.__name__, f"variant{next(NUMBERS)}"
    own = top.partition(".")[0]
    sources, changed = with_texts_replaced(top, *pairs)
    changed.add(top)
    variants = {name: name.replace(own, variant, 1).replace(".", "_") for name in sources if not changed.isdisjoint(imported(name))}
    with patch.object(_ops, "NAMESPACE", variant):
        for name, called in variants.items():
            path = folder / f"{called}.py"
            path.write_text(importing(name, sources[name], variants), encoding="utf-8")
            spec = importlib.util.spec_from_file_location(called, path)
            sys.modules[called] = importlib.util.module_from_spec(spec)  # where dataclasses look for their module
            spec.loader.exec_module(sys.modules[called])
    return sys.modules[variants[top]]


def need_kernels(device: str) -> None:
    "Skip where Triton's kernels do not run on a device"
    pytest.importorskip("triton", reason="Triton is not installed")
    if device == "cpu" and not INTERPRETED:
        pytest.skip(NOT_INTERPRETED)


def need_fonts(*names: str) -> None:
    "Skip where matplotlib is missing, or one of the fonts that it usually brings: some systems package them apart"
    folder = Path(pytest.importorskip("matplotlib", reason="matplotlib is not installed").get_data_path(), "fonts", "ttf")
    if missing := [name for name in names if not (folder / f"{name}.ttf").is_file()]:
        pytest.skip(f"matplotlib has no {', '.join(missing)} here")


def example_module(name: str) -> ModuleType:
    "A program of examples/, imported beside those that it imports from there"
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def unchanged(bugs: Iterable[Iterable[str]]) -> list[str]:
    "Pairs that leave the texts as they are: planting them makes the variants that any of the bugs makes, without a bug"
    return [old for pairs in bugs for old in [*pairs][::2] for _ in range(2)]


def everywhere(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, value) -> None:
    "Replace the function or class that is `module.name` now in each module of the package and the workbook, and each planted variant, that holds it"
    old = getattr(module, name)
    assert callable(old), f"expected a function or a class, got {old!r}: others may hold the same value for other reasons"
    for home in [m for key, m in sys.modules.items() if re.match(r"(fusedloss|workbook)(\.|$)|variant\d+_", key)]:
        for held in [held for held, it in vars(home).items() if it is old]:
            monkeypatch.setattr(home, held, value)
    assert getattr(module, name) is value


def has_no_second_derivative(loss: torch.Tensor, leaf: torch.Tensor) -> bool:
    "Does a gradient that matters twice raise, by every way to ask? Its first derivative alone must be there"
    g, = torch.autograd.grad(loss, leaf, create_graph=True)
    penalty = loss + 10 * g.pow(2).sum()
    for ask in (lambda: torch.autograd.grad(penalty, leaf, retain_graph=True), lambda: torch.autograd.grad(g.sum(), leaf, retain_graph=True), penalty.backward):
        try:
            ask()
        except RuntimeError as error:
            if "no derivative of its own" in str(error):
                continue
            raise
        return False
    return True


def fault_of(find: Callable[[ModuleType], str | None], module: ModuleType, folder: Path, *pairs: str) -> str | None:
    "What `find` says of a module with texts replaced, or the error that it ran into"
    changed = planted(module, folder, *pairs)
    try:
        return find(changed)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        return repr(error)


def first_fault_of(checks: Iterable[Callable[[], list[str]]]) -> list[str] | None:
    "What the first check says that finds something; the error counts that a planted bug runs into"
    for check in checks:
        try:
            wrong = check()
        except Exception as error:  # a planted bug may break anything
            assert "is not defined" not in str(error), f"what is planted knows no such name: {error}"
            wrong = [repr(error)]
        if wrong:
            return wrong
    return None


def replays(step: Callable[[], Iterable[torch.Tensor]]) -> bool:
    "Does a CUDA graph of `step` give its bits again? Raises where the step waits for the GPU"
    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = [t.clone() for t in step()]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for t in found:
        t.fill_(torch.nan if t.is_floating_point() else -1)
    graph.replay()
    return all(torch.equal(a, e) for a, e in zip(found, expected, strict=True))


def same_gradients_compiled(run: Callable, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, y: torch.Tensor, rows: Iterable[int]) -> bool:
    "Does one whole graph of `run` give its gradients for any number of rows?"
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    grads = lambda f, n: torch.autograd.grad(f(x[:n], w, b, y[:n]), [x, w, b])
    return all(relative_error(a, e) < 1e-6 for n in rows for a, e in zip(grads(compiled, n), grads(run, n), strict=True))


def misfits(got: Iterable, exact: Iterable, leaves: tuple, limit: Callable[[torch.dtype, bool], float]) -> list[str]:
    "What is wrong with a loss and its gradients, in words; `limit` of a dtype, and whether it is the loss's, is the error allowed"
    loss_dtype, faults = torch.float64 if leaves[0].dtype == torch.float64 else torch.float32, []
    got = list(got)
    floors = roundings(*leaves, rows=got[0].numel())
    for name, a, e, like in zip(("loss", "dx", "dw", "db"), got, exact, (None, *leaves)):
        dtype = loss_dtype if like is None else like.dtype
        if (a is None) != (e is None):
            faults.append(f"{name} is {a}")
        elif a is not None and (a.dtype != dtype or a.shape != e.shape):
            faults.append(f"{name} is {a.dtype} {list(a.shape)}")
        elif a is not None:
            faults += off(name, a, e, limit(dtype, like is None), floors[name])
    return faults


def broken(call, leaves):
    "Whether a broken promise raises on the CPU, and makes loss and gradients NaN on a GPU"
    try:
        loss = call()
    except ValueError as e:
        return leaves[0].device.type == "cpu" and "max_valid: expected at least" in str(e)
    grads = torch.autograd.grad(loss.sum(), [t for t in leaves if t.requires_grad])
    return leaves[0].is_cuda and loss.isnan().any().item() and all(g.isnan().any() for g in grads)


class Storages(TorchDispatchMode):
    "Writes down the storages that operators make, and those that they were given"
    def __init__(self):
        super().__init__()
        self.made, self.given = {}, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        of = lambda tree: [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.layout == torch.strided]
        self.given |= {s._cdata for s in of((args, kwargs)) if s._cdata not in self.made}
        out = function(*args, **(kwargs or {}))
        self.made |= {s._cdata: (StorageWeakRef(s), s.nbytes()) for s in of(out) if s._cdata not in self.given}
        return out


def hidden_from_hooks(call: Callable[[], torch.Tensor], leaves: Iterable[torch.Tensor], least: int) -> tuple[list[int], list[torch.Tensor]]:
    "Bytes of each storage of `least` bytes or more that backward waits for though hooks took every saved tensor away; the gradients"
    elsewhere, storages = [], Storages()

    def pack(t):
        elsewhere.append(t.detach().numpy().copy() if t.dtype != torch.bfloat16 else t.detach().float().numpy())
        return len(elsewhere) - 1, t.dtype
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: torch.from_numpy(elsewhere[kept[0]].copy()).to(kept[1])):
        with storages:
            loss = call()
        result = StorageWeakRef(loss.untyped_storage())
        gc.collect()
        left = [size for storage, size in storages.made.values() if size >= least and not storage.expired() and storage.cdata != result.cdata]
        return left, list(torch.autograd.grad(loss.sum(), list(leaves)))


def follows(step: Callable[[], Iterable[torch.Tensor]], inputs: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    "Does a CUDA graph of `step` give eager's bits for what is in its inputs at each replay?"
    inputs = list(inputs)
    first, side = [t.detach().clone() for t in inputs], torch.cuda.Stream()

    @torch.no_grad()
    def put(values):
        for t, value in zip(inputs, values, strict=True):
            t.copy_(value)

    def eager(values):
        put(values)
        return [t.detach().clone() for t in step()]
    step()  # compiles
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    put(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = list(step())
    same = []
    for values in (others, first, others):
        expected = eager(values)
        put(values)
        for t in found:
            t.detach().fill_(7)
        graph.replay()
        same.append(all(torch.equal(a, e) for a, e in zip(found, expected, strict=True)))
    return all(same)


LAYOUTS = {  # of a matrix
    "transposed": lambda t: t.t().contiguous().t(),
    "every second row": lambda t: t.repeat_interleave(2, 0)[::2],
    "every second feature": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "part of a wider tensor": lambda t: F.pad(t, (3, 5), value=torch.nan)[:, 3:-5],
    "rows expanded": lambda t: t[:1].expand_as(t),
}
