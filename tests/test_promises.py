"""What each loss promises under `torch.compile` and `torch.export`: a table, loss × promise. Run as a script it prints the table of graphs as Markdown.

A row is a `Case`. A size is of its rows, which are all tensors that `rows` makes; what `fixed` makes is the same for every size."""
import copy
import sys
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from grids import thorough_but
from helpers import everywhere
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusedloss as fl
from fusedloss import losses, margins

V, H = 11, 8


class Case(NamedTuple):
    "A loss to be called as `call(*rows(n), *fixed(), **numbers)`"
    call: Callable[..., Any]  # or a module; what it returns is added up
    rows: Callable[[int], tuple[Tensor, ...]]  # of a number of tokens, pairs or sequences
    fixed: Callable[[], tuple[Tensor, ...]] = lambda: ()
    numbers: dict[str, Callable[[float], Any]] = {}  # options that may change from call to call, made of numbers between 0 and 1


def floats(*size: int) -> Tensor:
    return torch.randn(size).requires_grad_()


def labels(n: int) -> Tensor:
    return torch.arange(n) % V


def of_logits(call: Callable, target: Callable[[int], Tensor] = labels, **numbers) -> Case:
    return Case(call, lambda n: (floats(n, V), target(n)), numbers=numbers)


def of_features(call: Callable, target: Callable[[int], Tensor] = labels, **numbers) -> Case:
    return Case(call, lambda n: (floats(n, H), target(n)), lambda: (floats(V, H),), numbers)


def linear(loss: Callable, **options) -> Callable:
    return lambda x, y, w, **numbers: loss(x, w, y, **options, **numbers)


def in_fp8(x: Tensor, w: Tensor, y: Tensor, **options) -> Tensor:
    "The loss of bf16 operands with sixteen features, whose backward matmuls are in FP8"
    x, w = (torch.nn.functional.pad(t, (0, 16 - t.shape[-1])).bfloat16() for t in (x, w))
    return fl.linear_cross_entropy(x, w, y, matmul_dtype=torch.float8_e4m3fn, **options)


def probabilities(n: int) -> Tensor:
    return torch.randn(n, V).softmax(-1)


def several(n: int) -> Tensor:
    return torch.arange(2 * n).view(n, 2) % V


def itself(value: float) -> float:
    return value


def above_1(value: float) -> float:
    return 1 + value


def of_teacher(**options) -> Callable:
    return lambda x, t, w, u, **numbers: fl.linear_divergence(x, w, t, u, **options, **numbers)


def of_list(x: Tensor, indices: Tensor, log_p: Tensor, w: Tensor, **numbers) -> Tensor:
    return fl.linear_divergence(x, w, teacher_top=(indices, log_p), **numbers)


def of_positives(x: Tensor, positives: Tensor, y: Tensor, logit_scale: float) -> Tensor:
    return fl.contrastive_loss(x, y, logit_scale, positives=positives)


def head(**options) -> Case:
    "A `PartialFC`, whose weight is its own"
    return of_head(fl.PartialFC(V, H, **options))


def of_head(module: nn.Module) -> Case:
    return Case(module, lambda n: (floats(n, H), labels(n)))


class MarginLoss(nn.Module):
    "A margin's loss, and what the margin remembers"
    def __init__(self, m: margins.Margin):
        super().__init__()
        self.margin = m

    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor: return fl.margin_cross_entropy(x, w, y, margin=self.margin)


def margin(m: margins.Margin) -> Case:
    return Case(MarginLoss(m), lambda n: (floats(n, H), labels(n)), lambda: (floats(V * m.centers, H),))


SCORES = dict(logit_scale=above_1, softcap=above_1)
LOGITS = dict(**SCORES, label_smoothing=itself, z_loss=itself)
TEACHER = dict(temperature=above_1, softcap=above_1, teacher_softcap=above_1, logit_scale=above_1, teacher_logit_scale=above_1)

LINEAR = {
    "auto": ({}, labels, LOGITS), "auto, each token": (dict(reduction="none"), labels, LOGITS), "auto, a budget": (dict(memory_budget=2**20), labels, LOGITS),
    "auto, a promise": (dict(max_valid=64), labels, {}), "auto, probabilities": ({}, probabilities, LOGITS), "auto, several": ({}, several, LOGITS),
    "each token, several": (dict(reduction="none"), several, LOGITS),
    **{method: (dict(method=method), labels, LOGITS) for method in ("eager", "chunks", "recompute", "product")},
    "tiles": (dict(method="tiles"), labels, dict(logit_scale=above_1)), "tiles, a budget": (dict(method="tiles", memory_budget=2**24), labels, {}),
    "eager, a budget": (dict(method="eager", memory_budget=2**20, reduction="none"), labels, {}),
}

CASES = {
    "cross_entropy": of_logits(fl.cross_entropy, **LOGITS),
    "cross_entropy, each token": of_logits(lambda z, y, **numbers: fl.cross_entropy(z, y, reduction="none", **numbers), **LOGITS),
    "cross_entropy, statistics": of_logits(lambda z, y, **numbers: fl.cross_entropy(z, y, return_stats=True, **numbers)[0], **LOGITS),
    "cross_entropy, probabilities": of_logits(fl.cross_entropy, probabilities, **LOGITS),
    "iota_cross_entropy": of_logits(fl.iota_cross_entropy),
    "log_probs": of_logits(lambda z, y, **numbers: fl.log_probs(z, y, entropy=True, **numbers)[:2], temperature=above_1, **SCORES),
    "linear_log_probs": of_features(linear(lambda *a, **k: fl.linear_log_probs(*a, entropy=True, **k)[:2]), temperature=above_1, **SCORES),
    "linear_topk": of_features(lambda x, y, w, **k: fl.linear_topk(x, w, 3, **k)[::2], temperature=above_1, **SCORES),
    "log_probs, several": of_logits(lambda z, y, **numbers: fl.log_probs(z, y, entropy=True, **numbers)[:2], several, temperature=above_1, **SCORES),
    "linear_log_probs, several": of_features(linear(lambda *a, **k: fl.linear_log_probs(*a, entropy=True, **k)[:2]), several, temperature=above_1, **SCORES),
    "baseline_linear_cross_entropy": of_features(linear(fl.baseline_linear_cross_entropy)),
    "tiled_linear_cross_entropy": of_features(linear(fl.tiled_linear_cross_entropy), logit_scale=above_1),
    "tiled_linear_cross_entropy, LMCL": of_features(linear(fl.tiled_linear_cross_entropy), scale=above_1, margin=itself),
    "chunked_linear_cross_entropy": of_features(linear(fl.chunked_linear_cross_entropy), **LOGITS),
    "recompute_linear_cross_entropy": of_features(linear(fl.recompute_linear_cross_entropy), **LOGITS),
    "recompute_linear_cross_entropy, filtered": of_features(linear(fl.recompute_linear_cross_entropy), filter_eps=lambda v: v / 100, **SCORES),
    **{f"linear_cross_entropy, {name}": of_features(linear(fl.linear_cross_entropy, **options), target, **numbers) for name, (options, target, numbers) in LINEAR.items()},
    "linear_cross_entropy, statistics": of_features(linear(lambda *a, **k: fl.linear_cross_entropy(*a, return_stats=True, **k)[1].lse), **SCORES),
    "linear_cross_entropy, FP8": of_features(linear(in_fp8), **SCORES, z_loss=itself),
    "linear_cross_entropy, a module": of_head(fl.LinearCrossEntropyLoss(H, V, monitoring=True)),
    "MemoryEfficientVocabOutput": of_head(fl.MemoryEfficientVocabOutput(nn.Parameter(torch.randn(V, H)))),
    "linear_divergence": Case(of_teacher(), lambda n: (floats(n, H), torch.randn(n, H)), lambda: (floats(V, H), torch.randn(V, H)), TEACHER),
    "linear_divergence, jsd of each token": Case(of_teacher(kind="jsd", reduction="none"), lambda n: (floats(n, H), torch.randn(n, H)),
                                                 lambda: (floats(V, H), torch.randn(V, H)), dict(beta=itself, **TEACHER)),
    "linear_divergence, lists": Case(of_list, lambda n: (floats(n, H), torch.arange(3).repeat(n, 1), torch.full((n, 3), -2.0)),
                                     lambda: (floats(V, H),), dict(temperature=above_1, logit_scale=above_1)),
    "contrastive_loss": Case(fl.contrastive_loss, lambda n: (floats(n, H), floats(n, H)), numbers=dict(logit_scale=above_1)),
    "contrastive_loss, positives": Case(of_positives, lambda n: (floats(n, H), torch.arange(2 * n).view(n, 2) % V), lambda: (floats(V, H),), dict(logit_scale=above_1)),
    "sigmoid_contrastive_loss": Case(fl.sigmoid_contrastive_loss, lambda n: (floats(n, H), floats(n, H)), numbers=dict(logit_scale=above_1, logit_bias=itself)),
    **{f"margin_cross_entropy, {type(m).__name__}": margin(m)
       for m in (margins.CosFace(), margins.ArcFace(), margins.Combined(), margins.AdaFace(), margins.Circle(), margins.SubCenter(2))},
    "PartialFC": head(),
    "PartialFC, ArcFace": head(margin=margins.ArcFace()),
    "PartialFC, sampled": head(sample_rate=0.3),
    "PartialFC, dot products": head(normalize=False, bias=True),
    "PartialFC, dot products sampled": head(normalize=False, sample_rate=0.3),
}
# numbers where sizes change: a scale has no default, and a filter is off by default
GIVEN = {"contrastive_loss": dict(logit_scale=2.0), "contrastive_loss, positives": dict(logit_scale=2.0), "sigmoid_contrastive_loss": dict(logit_scale=2.0, logit_bias=-1.0), "recompute_linear_cross_entropy, filtered": dict(filter_eps=0.01)}

SIZES = (4, 20, 7)  # fewer and more than classes; the third finds the graph of the second
VALUES = (0.25, 0.5, 0.125)
# of losses that share their operators and checks the gate tries one
ALIKE = ("cross_entropy, each token", "log_probs, several", "cross_entropy, statistics", "linear_divergence, lists", "margin_cross_entropy, CosFace",
         "margin_cross_entropy, Combined", "margin_cross_entropy, Circle", "margin_cross_entropy, SubCenter", "PartialFC, ArcFace",
         "PartialFC, dot products", "tiled_linear_cross_entropy, LMCL",
         *(f"linear_cross_entropy, {name}" for name in ("eager", "chunks", "recompute", "product", "tiles", "auto, a promise", "auto, a budget", "each token, several",
                                                        "auto, probabilities", "statistics", "eager, a budget")))
EACH = [name for name in CASES if name not in ALIKE]
WITH_BACKWARD = "cross_entropy", "linear_divergence", "PartialFC, sampled", "linear_cross_entropy, auto, each token"  # compiled too
OPERATORS = ("cross_entropy", "cross_entropy, probabilities", "linear_log_probs", "tiled_linear_cross_entropy", "chunked_linear_cross_entropy",
             "recompute_linear_cross_entropy", "linear_divergence", "contrastive_loss", "margin_cross_entropy, ArcFace", "PartialFC, sampled",
             "PartialFC, dot products sampled", "linear_cross_entropy, auto", "linear_cross_entropy, auto, each token")


def tried(names: Iterable[str], others: Iterable, *kept: tuple) -> list:
    "Rows of a loss and how it is tried, of which the gate tries those that are kept"
    return thorough_but(product(names, others), *kept)


def added(result: Any) -> Tensor:
    return result.sum() if isinstance(result, Tensor) else sum(added(t) for t in result)


class Pair:
    "A loss and the same compiled; what they return is compared, and their gradients"
    def __init__(self, case: Case, backend: str, run: Callable | None = None):
        torch._dynamo.reset()
        self.case, self.count = case, CompileCounterWithBackend(backend)
        self.run = run or (lambda call, *tensors, **numbers: added(call(*tensors, **numbers)))
        self.calls = case.call, copy.deepcopy(case.call)
        self.compiled = torch.compile(self.run, fullgraph=True, backend=self.count)

    def values(self, run: Callable, call: Callable, tensors: list[Tensor], numbers: dict) -> list[Tensor]:
        loss = run(call, *tensors, **numbers)
        if not loss.requires_grad: return [loss]
        leaves = [t for t in tensors if t.requires_grad] + (list(call.parameters()) if isinstance(call, nn.Module) else [])
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    def same(self, n: int, **numbers):
        tensors = [*self.case.rows(n), *self.case.fixed()]
        expected, got = (self.values(run, call, tensors, numbers) for run, call in zip((self.run, self.compiled), self.calls))
        for a, b in zip(got, expected, strict=True): torch.testing.assert_close(a.to_dense(), b.to_dense())


def graphs_of_sizes(name: str, backend: str) -> tuple[int, int]:
    "Graphs of training, and with evaluations in between"
    pair, given = Pair(CASES[name], backend), GIVEN.get(name, {})
    for n in SIZES: pair.same(n, **given)
    alone = pair.count.frame_count
    for n in SIZES:
        with torch.no_grad(): pair.same(n, **given)
        pair.same(n + 6, **given)
    return alone, pair.count.frame_count


def graphs_of_numbers(name: str, backend: str) -> int:
    "Graphs where every number changes at each call"
    pair = Pair(CASES[name], backend)
    for value in VALUES: pair.same(SIZES[0], **{key: make(value) for key, make in CASES[name].numbers.items()})
    return pair.count.frame_count


def kept(case: Case) -> Callable:
    "The loss of those rows that a mask names"
    n_fixed = len(case.fixed())

    def run(call: Callable, mask: Tensor, *tensors: Tensor, **numbers) -> Tensor:
        rows = len(tensors) - n_fixed
        return added(call(*(t[mask] for t in tensors[:rows]), *tensors[rows:], **numbers))
    return run


def graphs_of_masks(name: str, backend: str) -> int:
    "Graphs of x[mask], whose size no compiler knows"
    case = CASES[name]
    masked = case._replace(rows=lambda n: (torch.arange(20) < n, *case.rows(20)))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        pair = Pair(masked, backend, kept(case))
        for n in SIZES: pair.same(n, **GIVEN.get(name, {}))
    return pair.count.frame_count


class Exported(nn.Module):
    "A loss as a module"
    def __init__(self, call: Callable, numbers: dict):
        super().__init__()
        self.call, self.numbers = call, numbers

    def forward(self, *tensors: Tensor) -> Tensor: return added(self.call(*tensors, **self.numbers))


def export(name: str, strict: bool):
    "Export with any number of rows, and compare at other numbers"
    case, n = CASES[name], torch.export.Dim("n", min=2, max=4096)
    call, own = (Exported(copy.deepcopy(case.call), GIVEN.get(name, {})) for _ in range(2))
    rows, fixed = case.rows(6), case.fixed()
    program = torch.export.export(call, (*rows, *fixed), strict=strict, dynamic_shapes={"tensors": (*({0: n} for _ in rows), *({} for _ in fixed))})
    for size in (3, 20):
        tensors = *case.rows(size), *fixed
        torch.testing.assert_close(program.module()(*tensors), own(*tensors))


# without a backward pass of its own a graph costs half as much, and sizes that are unknown ask more of the backward pass
@pytest.mark.parametrize("name, backend", tried(
    CASES, ("eager", "aot_eager"), *((name, "aot_eager" if name in WITH_BACKWARD else "eager") for name in EACH)))
def test_two_graphs_a_grad_mode_for_any_sizes(name, backend):
    alone, with_evaluations = graphs_of_sizes(name, backend)
    assert alone <= 2 and with_evaluations <= 4


@pytest.mark.parametrize("name, backend", tried(
    (name for name, case in CASES.items() if case.numbers), ("eager", "aot_eager"), *((name, "aot_eager") for name in (
        "cross_entropy", "linear_log_probs", "chunked_linear_cross_entropy", "recompute_linear_cross_entropy, filtered",
        "linear_divergence, jsd of each token", "contrastive_loss", "linear_cross_entropy, auto"))))
def test_numbers_that_change_make_no_graphs(name, backend):
    assert graphs_of_numbers(name, backend) <= 2


@pytest.mark.parametrize("name, backend", tried(CASES, ("eager", "aot_eager"), *((name, "aot_eager") for name in OPERATORS)))
def test_sizes_that_no_compiler_knows(name, backend):
    assert graphs_of_masks(name, backend) <= 2


@pytest.mark.parametrize("name, strict", tried(CASES, (False, True), *((name, False) for name in OPERATORS)))
def test_export_of_any_size(name, strict):
    export(name, strict)


ROUTES = {"mean": {}, "each token": dict(reduction="none"), "statistics": dict(return_stats=True)}


@pytest.mark.parametrize("route", ROUTES)
def test_a_compiled_call_takes_the_method_of_its_size(route, caplog, monkeypatch):
    "One graph for sizes whose plans differ: each is run by its own, as the same call is without a compiler"
    everywhere(monkeypatch, losses, "has_kernels", lambda t: True)  # a GPU's plans differ at small sizes

    def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        found = fl.linear_cross_entropy(x, w, y, memory_budget=100_000, **ROUTES[route])
        return found[0] + found[1].lse.sum() if isinstance(found, tuple) else found.sum()

    torch._dynamo.reset()
    compiled, w = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True), floats(301, H)
    said = []
    for n in (40, 50, 4000, 60):
        x, y = floats(n, H), torch.arange(n) % 301
        for run in (loss, compiled):
            caplog.clear()
            with caplog.at_level("DEBUG", "fusedloss"): grads = torch.autograd.grad(run(x, w, y), [x, w])
            said.append((caplog.messages[-1], grads))
    for (plain, expected), (planned, got) in zip(said[::2], said[1::2]):
        assert plain == planned
        for a, b in zip(got, expected): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len({text.split(": ")[1] for text, _ in said}) > 1, "all sizes are alike"


def table() -> str:
    "Each promise's graphs, or the error's kind, by loss"
    def of(promise: Callable, *args) -> str:
        try: found = promise(*args)
        except Exception as error:
            print(args, type(error).__name__, str(error)[:400], file=sys.stderr)
            return type(error).__name__
        return "yes" if found is None else "; ".join(map(str, found)) if isinstance(found, tuple) else str(found)

    lines = [f"PyTorch {torch.__version__}", "", "| loss | graphs; with evaluations | numbers | `x[mask]` | exported strict | not |", "|:--|--:|--:|--:|:--|:--|"]
    for name in [n for n in CASES if not sys.argv[1:] or any(a in n for a in sys.argv[1:])]:
        cells = [of(graphs_of_sizes, name, "aot_eager"), of(graphs_of_numbers, name, "aot_eager") if CASES[name].numbers else "–",
                 of(graphs_of_masks, name, "aot_eager"), of(export, name, True), of(export, name, False)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
