"""Linear cross entropy by recomputation: every option against float64, both its ways, bugs planted in the kernels."""
import itertools
import math
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st

import fusedloss.filter as with_filter
import fusedloss.recompute as recompute
from fusedloss.core import tiling, tuning
from fusedloss.core.options import ALL_STATISTICS, NO_STATISTICS, statistics_of
from fusedloss.filter import recompute_linear_cross_entropy as loss_of
from workbook.measure import peak_memory, relative_error, saved_tensors
from grids import FULL, few, thorough_but
from helpers import LAYOUTS, TOLERANCE, everywhere, first_fault_of, has_no_second_derivative, interpreted, need_kernels, off, planted, replays, roundings, same_gradients_compiled, unchanged, upstream
from test_kernels import BAD, INDICES, LABELS, OPTIONS, REDUCTIONS, exact, weights

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter


def short_runs(n_tokens, tiles_v, *_):
    "Runs of several tiles, which so small a problem would not have"
    return 1 + tiles_v // 3


@pytest.fixture(params=["plain", "kernels"])
def way(request, device, monkeypatch):
    "The device, on which either the plain path or the kernels take everything they can"
    if request.param == "plain":
        everywhere(monkeypatch, with_filter, "takes_kernel", lambda x: False)
    else:
        need_kernels(device)
        everywhere(monkeypatch, with_filter, "takes_kernel", lambda x: x.dtype != f64 and len(x) > 0)
        everywhere(monkeypatch, recompute, "run_length", short_runs)
    return device


@dataclass(frozen=True)
class Case:
    "One call: sizes N, H, V, options of `OPTIONS`, and what is unusual about the data."
    sizes: tuple[int, int, int] = (7, 5, 21)
    options: dict = field(default_factory=dict)
    reduction: str = "mean"
    bias: bool = True
    stats: bool = False  # gradients also through lse and entropy
    requires: tuple[bool, bool, bool] = (True, True, True)
    ignore_index: int = -100
    offset: float = 0.0  # of all scores, by the bias
    masked: tuple[int, int] = (0, 0)  # classes whose bias is -inf
    budget: int | None = None
    dtype: torch.dtype = f32
    ignored: tuple[int | None, ...] = (1, None, 4)  # of a slice

    def tensors(self, device):
        "Leaves x, w, b (or None), labels, and the options with their weights made"
        (n, h, v), g = self.sizes, torch.Generator().manual_seed(0)
        draw = lambda *size: torch.randn(size, generator=g, dtype=f64)
        x, w, b = draw(n, h), 2 * draw(v, h) / h**0.5, draw(v) + self.offset
        y = torch.randint(v, (n,), generator=g)
        y = torch.where((y >= self.masked[0]) & (y < self.masked[1]), self.masked[1], y)
        b[slice(*self.masked)] = -torch.inf
        y[slice(*self.ignored)] = self.ignore_index
        leaves = [t.to(device, self.dtype).requires_grad_(need) for t, need in zip((x, w, b), self.requires)]
        options = dict(self.options, ignore_index=self.ignore_index)
        for name, size, seed in (("weight", v, 3), ("token_weight", n, 4)):
            if options.pop(name, False):
                options[name] = weights(size, device, seed)
        return leaves[0], leaves[1], leaves[2] if self.bias else None, y.to(device), options


def truth(x, w, b, y, options, reduction):
    "Loss, lse and entropy by definition, in float64, of leaves of their own"
    leaves = [None if t is None else t.detach().cpu().double().requires_grad_(t.requires_grad) for t in (x, w, b)]
    x, w, b = leaves
    options = {k: t.cpu() if isinstance(t, torch.Tensor) else t for k, t in options.items()}
    e = exact(x @ w.T + (0 if b is None else b), y, options.pop("weight", None), **options)
    total = e.total if e.total else 1.0
    return {"none": e.losses, "sum": e.losses.sum(), "mean": e.losses.sum() / total}[reduction], e, leaves


def gradients(loss, lse, entropy, leaves):
    "Of the loss under an uneven upstream gradient, of lse and entropy too where they are given"
    total = (loss * upstream(loss)).sum()
    if lse is not None:
        ramp = torch.linspace(-1, 2, len(lse), dtype=lse.dtype, device=lse.device)
        total = total + (ramp * lse).sum() + ((0.7 - ramp) * entropy).sum()
    return torch.autograd.grad(total, [t for t in leaves if t is not None and t.requires_grad])


def faults(module, case, device, tolerance=None) -> list[str]:
    "What `recompute_linear_cross_entropy` of a module gets wrong on `case`, in words"
    x, w, b, y, options = case.tensors(device)
    got = module.recompute_linear_cross_entropy(x, w, y, linear_bias=b, reduction=case.reduction, memory_budget=case.budget,
                                                return_stats=case.stats, **options)
    loss, stats = got if case.stats else (got, None)
    want, e, leaves = truth(x, w, b, y, options, case.reduction)
    tolerance = tolerance or TOLERANCE[case.dtype]
    pairs = [("loss", loss, want)]
    if stats is not None:
        pairs += [(k, getattr(stats, k), getattr(e, k)) for k in ("lse", "entropy", "logit_max", "logit_norm", "z_loss", "accuracy")]
        pairs += [("rank", stats.target_rank.double(), e.target_rank.double())]
    names = [k for k, t in zip(("dx", "dw", "db"), (x, w, b)) if t is not None and t.requires_grad]
    if names:
        pairs += zip(names, gradients(loss, *((stats.lse, stats.entropy) if stats else (None, None)), (x, w, b)),
                     gradients(want, *((e.lse, e.entropy) if stats else (None, None)), leaves))
    wrong = [] if loss.dtype == (f64 if case.dtype == f64 else f32) else [f"the loss is {loss.dtype}"]
    floors = roundings(x, w, b, len(y) if case.stats else loss.numel())
    for name, a, c in pairs:
        limit = TOLERANCE[f32] if case.dtype != f64 and name not in ("dx", "dw", "db") else tolerance
        a, c = (t.detach().cpu().double().nan_to_num(nan=9e9, posinf=7.0, neginf=-7.0) for t in (a, c))
        wrong += off(name, a, c, limit, floors.get(name, floors["loss"])) if a.shape == c.shape else [f"{name} has shape {a.shape}"]
    return wrong


CASES = {
    "one of each": Case((1, 1, 1)),
    "one class": Case((3, 5, 1), stats=True, reduction="none"),
    "two classes": Case((5, 3, 2), bias=False),
    "tiles that divide": Case((32, 32, 96), OPTIONS["everything"], "none", stats=True),
    "ragged": Case((47, 33, 123), OPTIONS["everything"], "none", stats=True, budget=2**13),
    "ragged, plain": Case((47, 33, 123), bias=False, reduction="sum", budget=2**13),
    "several runs": Case((17, 5, 650), budget=2**12),
    "several runs, statistics": Case((17, 5, 650), OPTIONS["smooth weights"], "none", stats=True, budget=2**12),
    "deep": Case((20, 7, 50), offset=-30.0, bias=True),
    "deep, statistics": Case((20, 7, 50), offset=-30.0, stats=True, reduction="none"),
    "high": Case((20, 7, 50), offset=200.0, reduction="sum"),
    "a tile of classes masked": Case((9, 7, 120), masked=(32, 64), reduction="none"),
    "the first tile masked": Case((9, 7, 120), masked=(0, 40), stats=True, reduction="none"),
    "a run masked": Case((9, 7, 1100), masked=(0, 1050)),
    "all ignored": Case(ignored=(None,), stats=True),
    "none ignored": Case(ignored=(0, 0)),
    **{name: Case((23, 9, 70), options) for name, options in OPTIONS.items()},
    **{f"{name}, none, statistics": Case((23, 9, 70), options, "none", stats=True) for name, options in OPTIONS.items()},
}


CHOSEN = few(CASES, "one of each", "one class", "ragged, plain", "several runs, statistics", "deep", "high", "the first tile masked",
             "scale and cap", "everything, none, statistics")


@pytest.mark.parametrize("name", thorough_but(CHOSEN, "one of each", "ragged, plain", "several runs, statistics", "scale and cap", "everything, none, statistics"))
def test_loss_and_gradients_are_the_definition(name, way):
    assert faults(with_filter, CASES[name], way) == []


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_float64(case, device):
    case = Case(**{**case.__dict__, "dtype": f64})
    assert faults(with_filter, case, device, 1e-11) == []


def test_runs_of_any_length(device, monkeypatch):
    need_kernels(device)
    x, w, b, y, _ = Case((9, 7, 300)).tensors(device)
    args = x.detach(), w.detach(), y, b.detach(), None, None, None, recompute.LossOptions(), ALL_STATISTICS
    whole = recompute.launch_lse(*args)
    for run in few((1, 2, 3, 10), 2, 10):
        everywhere(monkeypatch, recompute, "run_length", lambda n, tiles, *_: run)
        for a, e in zip(recompute.launch_lse(*args), whole):
            assert torch.allclose(a, e, rtol=1e-5, atol=1e-5)


TILING = recompute.Tiling(True, 128, 256, 64)


def test_the_fastest_variant_is_found_once_a_class_of_shapes(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEDLOSS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_chosen", tuning._Chosen())
    everywhere(monkeypatch, tuning, "is_capturing", lambda: False)
    cost, asked = {(3, 8): 3, (3, 32): 2, (4, 8): 4, (4, 32): 1}, set()
    everywhere(monkeypatch, tuning, "variant_milliseconds", lambda run, t: asked.add(t) or cost[t.stages, t.group])
    def best(n, v, stages=(4,), **flags):
        asked.clear()
        x = torch.empty(n, 4096, device="meta", dtype=bf16)
        found = recompute.fastest(recompute.lse_kernel, x, v, TILING, stages, None, **flags)
        return found.stages, found.group, len(asked)
    assert best(8192, 128256) == (4, 32, 4)
    assert best(5000, 100000) == (4, 32, 0), "of the same powers of two"
    assert best(4096, 128256, ()) == (3, 32, 2), "another class, other choices"
    assert best(8192, 128256, STATS=True) == (4, 32, 4), "another kernel, by its options"
    assert best(64, 1000) == (3, 8, 0), "small work is not timed"
    monkeypatch.setattr(tuning, "_chosen", tuning._Chosen())
    assert best(8192, 128256) == (4, 32, 0), "another process reads it"
    everywhere(monkeypatch, tuning, "is_capturing", lambda: True)
    assert best(2**20, 128256) == (3, 8, 0), "nothing is timed in a graph's capture"


@cuda_only
def test_every_variant_gives_the_same_bits():
    x, w, _, y, _ = Case((1000, 512, 5000), dtype=bf16).tensors("cuda")
    x, w = x.detach(), w.detach()
    lse = lambda t: recompute.launch_lse(x, w, y, None, None, None, None, recompute.LossOptions(), NO_STATISTICS, t)[1]
    terms = torch.rand(6, 1000, device="cuda")
    def dz(t):
        out = torch.empty(1000, 5000, device="cuda", dtype=bf16)
        recompute.launch_dz(x, w, out, y, None, None, terms, None, 0, recompute.LossOptions(), False, t)
        return out
    for run, stages in ((lse, (4,)), (dz, ())):
        first, *others = [run(t) for t in tiling.variants(TILING, stages)]
        assert others and all(torch.equal(first, other) for other in others)


SUBSETS = [*itertools.product([False, True], repeat=3)]


@pytest.mark.parametrize("requires", few(SUBSETS, (False, False, False), (True, False, False), (False, True, True)), ids=str)
def test_gradients_exactly_where_they_are_asked_for(requires, way):
    for reduction in few(REDUCTIONS, "mean"):
        assert faults(with_filter, Case(requires=requires, reduction=reduction, budget=2**12), way) == []


@pytest.mark.parametrize("name", few(INDICES, "0", "V"))
def test_ignore_index_inside_and_outside_the_classes(name, way):
    index = INDICES[name]
    for options in (OPTIONS["plain"], OPTIONS["smooth weights"]):
        assert faults(with_filter, Case((13, 5, 40), options, "none", ignore_index=index(40)), way) == []


@pytest.mark.parametrize("features", few([1, 127, 128, 256, 257, 512], 128, 257))
def test_bias_counts_once(features, way):
    assert faults(with_filter, Case((5, features, 40)), way) == []


@pytest.mark.parametrize("classes", few([1, 2, 7, 127, 129, 500], 1, 7, 129))
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_no_probability_above_one(classes, dtype, way):
    "Scores around -30, one far above the others: a class beyond the last would show"
    if dtype == bf16 and way == "cpu":
        pytest.skip("bf16 is wrong in Triton's interpreter")
    x, w = torch.ones(4, 8, device=way, dtype=dtype), torch.full((classes, 8), -4.0, device=way, dtype=dtype)
    w[classes // 2] += 2.5
    y = torch.tensor([classes // 2, 0, classes - 1, classes // 3], device=way)
    losses = loss_of(x, w, y, reduction="none")
    want = F.cross_entropy(x.double() @ w.double().T, y, reduction="none")
    assert (losses >= 0).all() and (losses - want).abs().max() < 1e-5


@pytest.mark.parametrize("spread", [120.0, 1e4])
def test_targets_far_below_the_maximum(spread, way):
    x = torch.tensor([[spread, 0.0]] * 2, device=way, requires_grad=True)
    losses = loss_of(x, torch.eye(2, device=way), torch.tensor([1, 0], device=way), reduction="none")
    dx, = torch.autograd.grad(losses.sum(), x)
    assert losses.tolist() == pytest.approx([spread, 0.0]) and dx.flatten().tolist() == pytest.approx([1.0, -1.0, 0, 0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_token_without_a_softmax_is_alone(bad, way):
    x, w, _, y, _ = Case((40, 5, 60), ignored=(0, 0)).tensors(way)
    clean = loss_of(x, w, y, reduction="none").detach()
    spoilt = x.detach().clone()
    spoilt[3] = bad
    losses = loss_of(spoilt.requires_grad_(), w, y, reduction="none")
    dx, = torch.autograd.grad(losses.sum(), spoilt)
    rest = torch.arange(40, device=way) != 3
    assert losses[3].isnan() and torch.equal(losses[rest], clean[rest]) and dx[rest].isfinite().all()


def test_ties_go_to_the_first(way):
    x, w = torch.ones(6, 4, device=way), torch.ones(6, 4, device=way)
    stats = loss_of(x, w, torch.arange(6, device=way), return_stats=True)[1]
    assert stats.target_rank.tolist() == list(range(6)) and stats.accuracy.item() == pytest.approx(1 / 6)


@st.composite
def calls(draw):
    "Any sizes, options, budget and requires_grad"
    v = draw(st.integers(1, 90))
    return Case((draw(st.integers(0, 20)), draw(st.integers(1, 40)), v), draw(st.sampled_from(list(OPTIONS.values()))),
                draw(st.sampled_from(REDUCTIONS)), draw(st.booleans()), draw(st.booleans()),
                draw(st.tuples(*[st.booleans()] * 3)), draw(st.sampled_from([-100, 0, v - 1, v])),
                budget=draw(st.sampled_from([None, 1, 2**12, 2**20])))


@settings(max_examples=25 if FULL else 4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls())
def test_any_call_is_the_definition(way, case):
    assert faults(with_filter, case, way, 2e-5) == []


# A citizen of autograd


def test_backward_twice_and_with_other_upstream_gradients(way):
    x, w, b, y, _ = Case().tensors(way)
    losses = loss_of(x, w, y, linear_bias=b, reduction="none")
    first = torch.autograd.grad(losses.sum(), [x, w, b], retain_graph=True)
    for c in (1, -3, 0, 65536):
        again = torch.autograd.grad(c * losses.sum(), [x, w, b], retain_graph=True)
        for a, e in zip(again, first):
            assert relative_error(a, c * e) < TOLERANCE[f32]


@pytest.mark.parametrize("shape", ["expanded", "strided"])
def test_upstream_gradients_of_any_strides(shape, way):
    x, w, _, y, _ = Case().tensors(way)
    g = torch.randn(14, device=way)[::2] if shape == "strided" else torch.full((1,), 0.3, device=way).expand(7)
    got = torch.autograd.grad(loss_of(x, w, y, reduction="none"), [x, w], g)
    want = torch.autograd.grad(loss_of(x, w, y, reduction="none"), [x, w], g.clone())
    assert all(torch.equal(a, e) for a, e in zip(got, want))


def test_hooks_accumulation_and_tied_weights(way):
    x, w, _, y, _ = Case((7, 5, 21)).tensors(way)
    seen, whole = [], torch.autograd.grad(loss_of(x, w, y, reduction="sum"), w)[0]
    w.register_hook(lambda g: seen.append(g))
    for half in (slice(0, 4), slice(4, 7)):
        loss_of(x[half], w, y[half], reduction="sum").backward()
    assert len(seen) == 2 and relative_error(w.grad, whole) < TOLERANCE[f32]
    tied = loss_of(w[:7] * 1, w, y)  # an embedding that is also the head
    a, b = w.detach().double().requires_grad_(), w.detach().clone().requires_grad_()
    loss_of(b[:7] * 1, b, y).backward()
    torch.nn.functional.cross_entropy(a[:7] @ a.T, y).backward()
    assert tied.requires_grad and relative_error(b.grad, a.grad) < 1e-5


def test_second_derivatives_are_refused(device):
    x, w, _, y, _ = Case().tensors(device)
    assert has_no_second_derivative(loss_of(x, w, y), x) and has_no_second_derivative(loss_of(x, w, y), w)


def test_gradcheck(device):
    for options in (OPTIONS["plain"], OPTIONS["everything"]):
        x, w, b, y, more = Case((4, 3, 6), options, dtype=f64).tensors(device)
        call = lambda x, w, b: [t for t in (loss_of(x, w, y, linear_bias=b, reduction="none", return_stats=True, **more))
                                for t in ([t] if isinstance(t, torch.Tensor) else [t.lse, t.entropy])]
        assert torch.autograd.gradcheck(call, (x, w, b))


def test_saved_are_the_inputs_and_two_numbers_a_token(device):
    x, w, b, y, _ = Case((40, 16, 300)).tensors(device)
    kept = saved_tensors(lambda: loss_of(x, w, y, linear_bias=b), [x, w, b, y])
    assert sum(t.numel() for t in kept) <= 2 * 40 + 1


def test_nothing_of_the_caller_changes(way):
    case = Case((9, 7, 50), OPTIONS["everything"], "none", stats=True)
    x, w, b, y, options = case.tensors(way)
    given = [t for t in (x, w, b, y, *options.values()) if isinstance(t, torch.Tensor)]
    before, versions = [t.detach().clone() for t in given], [t._version for t in given]
    loss, stats = loss_of(x, w, y, linear_bias=b, reduction="none", return_stats=True, **options)
    gradients(loss, stats.lse, stats.entropy, (x, w, b))
    assert all(torch.equal(t, c) and t._version == v for t, c, v in zip(given, before, versions))


def test_the_same_bits_five_times(way):
    x, w, b, y, _ = Case((17, 9, 70)).tensors(way)
    runs = [torch.autograd.grad(loss_of(x, w, y, linear_bias=b, memory_budget=2**11), [x, w, b]) for _ in range(5)]
    assert all(torch.equal(a, c) for other in runs[1:] for a, c in zip(runs[0], other))


def test_any_budget_gives_the_same(device):
    x, w, b, y, _ = Case((40, 5, 60), dtype=f64).tensors(device)
    runs = [torch.autograd.grad(loss_of(x, w, y, linear_bias=b, memory_budget=budget), [x, w, b])
            for budget in (None, 1, 9 * 60 * 8 * 7, 9 * 60 * 8 * 13)]
    for other in runs[1:]:
        assert all(relative_error(a, c) < 1e-13 for a, c in zip(other, runs[0]))


def test_a_row_does_not_depend_on_the_others(way):
    x, w, b, y, _ = Case((40, 5, 60), ignored=(0, 0)).tensors(way)
    other = torch.randn_like(x)
    other[7] = x[7]
    pair = [loss_of(t, w, y, linear_bias=b, reduction="none")[7] for t in (x.detach(), other)]
    assert torch.equal(*pair)


def test_memory_stays_within_the_budget(device):
    n, h, v = 256, 16, 4000
    x, w, _, y, _ = Case((n, h, v), bias=False).tensors(device)
    for budget in (2**18, 2**20):
        peak = peak_memory(lambda: torch.autograd.grad(loss_of(x, w, y, memory_budget=budget), [x, w]), device)
        slack = 2**16 if device == "cpu" else 2**17
        assert peak - x.nbytes - w.nbytes < 1.1 * budget + slack < n * v * 4


@cuda_only
@pytest.mark.parametrize("budget", [2**26, 2**28])
def test_memory_of_the_kernels(budget):
    x, w, _, y, _ = Case((4096, 1024, 32768), bias=False, dtype=bf16).tensors("cuda")
    run = lambda: torch.autograd.grad(loss_of(x, w, y, memory_budget=budget), [x, w])
    run()
    assert peak_memory(run, "cuda") - x.nbytes - w.nbytes < 1.1 * budget


# Kinds of tensors


@pytest.mark.parametrize("name", thorough_but(few(LAYOUTS, "transposed", "part of a wider tensor", "rows expanded"), "transposed"))
def test_matrices_of_any_strides(name, way):
    layout = LAYOUTS[name]
    x, w, _, y, _ = Case((9, 7, 40)).tensors(way)
    for a, c in ((layout(x.detach()), w.detach()), (x.detach(), layout(w.detach()))):
        a, c = a.requires_grad_(), c.requires_grad_()
        plain = [t.detach().contiguous().requires_grad_() for t in (a, c)]
        got = torch.autograd.grad(loss_of(a, c, y), [a, c])
        floors = roundings(a, c)  # of equal classes the gradients are nothing
        for name, g, e in zip(("dx", "dw"), got, torch.autograd.grad(loss_of(*plain, y), plain)):
            assert off(name, g, e, TOLERANCE[f32], floors[name]) == []


@pytest.mark.parametrize("name", few(LABELS, "unaligned", "strided int32"))
def test_labels_of_any_kind(name, way):
    make = LABELS[name]
    x, w, _, y, _ = Case((13, 5, 21)).tensors(way)
    assert torch.equal(loss_of(x, w, make(y)), loss_of(x, w, make(y).long().clone()))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 0), (2, 1, 3)], ids=str)
def test_any_leading_shape(lead, device):
    n = torch.Size(lead).numel()
    x, w, _, y, _ = Case((n, 5, 11), ignored=(0, 0)).tensors(device)
    x, y = x.detach().view(*lead, 5).requires_grad_(), y.view(lead)
    losses, stats = loss_of(x, w, y, reduction="none", return_stats=True)
    assert losses.shape == stats.lse.shape == lead
    got = torch.autograd.grad(losses.sum(), [x, w])
    assert got[0].shape == x.shape and torch.isfinite(got[1]).all() and (n or not got[1].any())
    assert loss_of(x, w, y).item() == pytest.approx(F.cross_entropy(x.view(-1, 5) @ w.T, y.view(-1)).item() if n else 0, rel=1e-5)


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize("name", ["ragged", "ragged, plain", "everything, none, statistics", "deep"])
def test_half_precision(name, dtype, device):
    case = Case(**{**CASES[name].__dict__, "dtype": dtype})
    x, w, b, y, options = case.tensors(device)
    assert faults(with_filter, case, device, 2 * TOLERANCE[dtype]) == []


@cuda_only
@pytest.mark.parametrize("sizes", few([(300, 256, 1000), (512, 64, 4096), (77, 61, 999), (1000, 72, 50257), (1, 8, 129)],
                                      (300, 256, 1000), (77, 61, 999), (1, 8, 129)), ids=str)
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_tensor_descriptors_and_pointers(sizes, dtype):
    for options, stats in ((OPTIONS["plain"], False), (OPTIONS["everything"], True)):
        for budget in (None, 2 * sizes[0] * (sizes[1] + 256)):
            case = Case(sizes, options, "none", stats=stats, budget=budget, dtype=dtype)
            assert faults(with_filter, case, "cuda", 2 * TOLERANCE[dtype]) == []


@cuda_only
@pytest.mark.big
@pytest.mark.parametrize("sizes", [(16896, 64, 128256), (2**20 + 8, 2056, 64), (64, 8208, 262144)], ids=str)
def test_offsets_beyond_32_bits(sizes):
    n, h, v = sizes
    x = torch.randn(n, h, device="cuda", dtype=bf16).requires_grad_()
    w = (torch.randn(v, h, device="cuda", dtype=bf16) / h**0.5).requires_grad_()
    y = torch.randint(v, (n,), device="cuda")
    losses = loss_of(x, w, y, reduction="none")
    dx, dw = torch.autograd.grad(losses.sum(), [x, w])
    ends = [0, 1, n - 2, n - 1]
    z = (x[ends].double() @ w.double().T).detach().requires_grad_()
    want = F.cross_entropy(z, y[ends], reduction="none")
    dz, = torch.autograd.grad(want.sum(), z)
    assert (losses[ends] - want).abs().max() < 1e-3 and relative_error(dx[ends], dz @ w.double()) < 1e-2
    assert dw[[0, v - 1]].isfinite().all()


@cuda_only
@pytest.mark.big
def test_rows_of_dz_and_of_the_bias_that_lie_far_apart():
    "The third row of tiles of db begins 2³¹ numbers behind the first, the last rows of dz more than that"
    n, h, v, o = 384, 64, 256, recompute.LossOptions()
    x, w, b = (torch.randn(shape, device="cuda", dtype=bf16) for shape in ((n, h), (v, h), (v,)))
    y, g = torch.randint(v, (n,), device="cuda"), torch.rand(n, device="cuda")
    _, _, entropy, rows = recompute.launch_lse(x, w, y, b, None, None, None, o)
    terms = recompute.launch_terms(g, None, None, x, v, y, None, None, None, rows, entropy, o)
    made = []
    for dz_pitch, db_pitch in ((v, v), (2**23, 2**30)):
        dz, db = torch.empty(n, dz_pitch, device="cuda", dtype=bf16)[:, :v], torch.empty(n // 128, db_pitch, device="cuda")[:, :v]
        recompute.launch_dz(x, w, dz, y, b, None, terms, db, 0, o, False, recompute.tiling_of(x, w))
        made.append((dz.clone(), db.clone()))
        del dz, db
    assert all(torch.equal(near, far) for near, far in zip(*made))


@cuda_only
def test_half_precision_mean_over_many_tokens():
    "1/70000 is subnormal in fp16; gradients that themselves are in range must not suffer"
    x, w, _, y, _ = Case((70_000, 16, 40), bias=False, dtype=f16).tensors("cuda")
    got = torch.autograd.grad(65536 * loss_of(x, w, y), [x, w])
    double = [t.detach().double().requires_grad_() for t in (x, w)]
    want = torch.autograd.grad(65536 * F.cross_entropy(double[0] @ double[1].T, y), double)
    assert all(relative_error(a, e) < 2e-3 for a, e in zip(got, want))


@cuda_only
def test_cuda_graph():
    x, w, _, y, _ = Case((300, 64, 1000), dtype=bf16).tensors("cuda")
    assert replays(lambda: torch.autograd.grad(loss_of(x, w, y), [x, w]))


@interpreted
@pytest.mark.parametrize("how", [{}, dict(softcap=5.0), dict(label_smoothing=0.1), dict(z_loss=0.1)], ids=str)
def test_ignored_tokens_bring_nothing_where_the_weight_wants_no_gradient(how, monkeypatch):
    everywhere(monkeypatch, recompute, "has_kernel", lambda x: x.numel() > 0)
    used = []
    everywhere(monkeypatch, recompute, "launch_gradients", lambda *given, launch=recompute.launch_gradients: used.append(given) or launch(*given))
    made = torch.Generator().manual_seed(0)
    x, w, y = torch.randn(40, 32, generator=made).to(f16), torch.randn(300, 32, generator=made).to(f16), torch.randint(300, (40,), generator=made)
    y[::3], x[::3] = -100, math.nan
    x.requires_grad_()
    alone, = torch.autograd.grad(loss_of(x, w, y, **how), x)
    assert used and not alone[::3].any() and alone.isfinite().all()


def test_a_budget_has_room_for_autocasts_copies(device):
    "Of operands without a gradient: of others the float32 gradient has their bytes, and those of the gradient in 16 bits"
    x, w, y = torch.randn(4096, 256, device=device), torch.randn(64, 256, device=device), torch.randint(64, (4096,), device=device)
    copies = 2 * (x.numel() + w.numel())
    budget = 6 * copies // 5
    with torch.autocast(device, bf16):
        assert peak_memory(lambda: loss_of(x, w, y, reduction="none", memory_budget=budget), device) < budget + 2**17
        with pytest.raises(ValueError, match=f"memory_budget: expected more than the {copies} bytes of autocast's"):
            loss_of(x, w, y, memory_budget=copies)
        x.requires_grad_()
        assert peak_memory(lambda: torch.autograd.grad(loss_of(x, w, y, memory_budget=budget), x), device) - x.nbytes < budget + 2**17
        loss = loss_of(x, w, y, memory_budget=10 * copies)
        assert torch.equal(loss, loss_of(x, w, y))


@pytest.mark.parametrize("low", [bf16, f16])
def test_autocast(low, device):
    x, w, b, y, _ = Case((9, 16, 40)).tensors(device)
    with torch.autocast(device, low):
        loss = loss_of(x, w, y, linear_bias=b)
    rounded = [t.detach().to(low).double().requires_grad_() for t in (x, w, b)]
    want = F.cross_entropy(rounded[0] @ rounded[1].T + rounded[2], y)
    assert loss.dtype == f32 and relative_error(loss, want) < 1e-5
    for g, e in zip(torch.autograd.grad(loss, [x, w, b]), torch.autograd.grad(want, rounded)):
        assert g.dtype == f32 and relative_error(g, e) < 1e-2


def test_gradients_keep_their_dtype_and_the_loss_is_float32(device):
    for dtype in (bf16, f16, f32, f64):
        x, w, b, y, _ = Case(dtype=dtype).tensors(device)
        loss = loss_of(x, w, y, linear_bias=b)
        assert loss.dtype == (f64 if dtype == f64 else f32)
        assert all(g.dtype == dtype for g in torch.autograd.grad(loss, [x, w, b]))


# Compilers


@pytest.mark.parametrize("reduction", few(REDUCTIONS, "none"))
def test_compiled_whole(reduction, device):
    x, w, b, y, _ = Case((9, 7, 40)).tensors(device)
    def step(x, w, b, y):
        loss, stats = loss_of(x * 1, w, y, linear_bias=b, reduction=reduction, return_stats=True, softcap=9.0)
        return loss.sum() + stats.entropy.sum()
    assert same_gradients_compiled(step, x, w, b, y, (9, 5))


@pytest.mark.parametrize("stats", [False, True])
def test_operators_keep_their_contract(stats, device):
    x, w, b, y, _ = Case(dtype=f32).tensors(device)
    args = (x, w, y, b, None, None, None, -100, 0.1, 1.0, 0.0, 0.0, *statistics_of(stats), 0, 0.0)
    torch.library.opcheck(with_filter.recompute_loss, args)


# Numbers that cannot be meant


@pytest.mark.parametrize("label", few(BAD, -1, 7, 2**32 + 3))
def test_a_label_out_of_range(label, way, monkeypatch):
    monkeypatch.setenv("FUSEDLOSS_DEBUG", "1")
    x, w, _, y, _ = Case((5, 4, 7), ignored=(0, 0)).tensors(way)
    clean = torch.autograd.grad(loss_of(x, w, y, reduction="none")[[0, 1, 2, 4]].sum(), x)[0]
    y[3] = label
    with pytest.raises(IndexError, match=rf"target\[3\] is {label}: expected 0 ≤ label < 7"):
        loss_of(x, w, y)
    everywhere(monkeypatch, with_filter, "check_inputs", lambda *_: None)
    losses = loss_of(x, w, y, reduction="none")
    assert losses.isnan().tolist() == [False, False, False, True, False]
    dx, = torch.autograd.grad(losses.sum(), x)
    assert not dx[3].any() and relative_error(dx, clean) < TOLERANCE[f32]


# Bugs planted


MUTANTS = {  # what is wrong: (text of the source, what stands in its place)
    "classes beyond the last are summed": ("EVEN=v % (t.BV * run) == 0", "EVEN=True"),
    "the sum is not rescaled": ("    s = rescaled(s, row_max, new_max, LOG2_SCALE)\n    return new_max, s + tl.sum(exponentials(", "    return new_max, s + tl.sum(exponentials("),
    "a run begins where the last one ended": ('tl.where(continues, row_max, -float("inf"))', "row_max"),
    "the target is a neighbour": ("w_at = w_ptr + at.to(tl.int64)[:, None] * w_stride_v", "w_at = w_ptr + (at ^ 1).to(tl.int64)[:, None] * w_stride_v"),
    "the diagonal is the first column": ("lanes[:, None] == lanes[None, :]", "(lanes[:, None] * 0) == lanes[None, :]"),
    "runs are merged without their maxima": ("tl.sum(rescaled(part_s, part_max, new_max[None, :], LOG2_SCALE), 0)", "tl.sum(part_s, 0)"),
    "the bias is forgotten": ("product += bias[None, :]", "product += 0 * bias[None, :]"),
    "features beyond the last are read": ("(c < width)[None, :]", "(c < width + 1)[None, :]"),
    "one tile is made twice": ("return first + inner % height, inner // height", "return first + inner % height, inner // GROUP"),
    "the target is sought from the first class": ("other=-1) - begin", "other=-1)"),
    "the slab takes the first classes' bias": ("part(bias, j), part(weight, j), terms", "bias, part(weight, j), terms"),
    "the slab takes the first classes' weights": ("part(bias, j), part(weight, j), terms", "part(bias, j), weight, terms"),
    "ignored rows have a maximum": ('tl.where(valid, row_max, float("inf"))', "row_max"),
    "the slope is left out": ("d *= slope", "d *= 1.0"),
    "dx forgets the slabs before": ("elif need_x: add_product(total, dz, w[j])", "elif need_x: total = wide_product(dz, w[j])"),
    "the bias' gradient is that of one tile": ("db[j] = column_sums(dz if parts is None else db_parts)", "db[j].copy_(db_parts[0])"),
    "the upstream gradient of lse is dropped": ("g_lse_ptr,\n        denominator_ptr, y, valid, rows, N, V,", "None,\n        denominator_ptr, y, valid, rows, N, V,"),
    "the entropy's mean is missing": ("softmax_coef += g_h * mean", "softmax_coef += 0.0 * mean"),
    "the denominator is forgotten": ("denominator_ptr, y, valid, rows, N, V,", "None, y, valid, rows, N, V,"),
    "one flag decides all gradients": ("\"x\": needs.x, \"w\": needs.w, \"bias\": needs.bias}", "\"x\": needs.x, \"w\": needs.x, \"bias\": needs.x}"),
    "the target outranks itself": ("(cols != y) & ((z > z_y)", "((z > z_y)"),
    "smoothing skips the class weights": ("d -= smoothing_coef[:, None] * class_weight(weight_ptr, cols[None, :], inside[None, :])", "d -= smoothing_coef[:, None]"),
    "Σ w z counts each run twice": ("total = tl.where(continues, total, 0.0) +", "total = total +"),
}
CHOSEN_BUGS = few(MUTANTS, "the sum is not rescaled", "runs are merged without their maxima", "dx forgets the slabs before",
                  "one flag decides all gradients")
NOTICING = few(["one class", "high", "ragged", "ragged, plain", "several runs, statistics", "deep", "everything, none, statistics", "smooth weights"],
               "one class", "high", "ragged, plain")


def variant(tmp_path, monkeypatch, *pairs):
    "The module with texts replaced, on kernels in short runs, which the unchanged one is not"
    module = planted(with_filter, tmp_path, *pairs, *unchanged([["def takes_kernel("], ["def run_length("]]))
    everywhere(monkeypatch, module, "takes_kernel", lambda x: len(x) > 0)
    everywhere(monkeypatch, module, "run_length", short_runs)
    return module


def first_fault(module):
    "The first case that the module does not pass"
    extra = [Case(requires=(False, True, True)), Case((3, 2, 4), requires=(True, False, False))]
    return first_fault_of(partial(faults, module, case, "cpu") for case in [*(CASES[name] for name in NOTICING), *extra])


@pytest.mark.thorough
@interpreted
def test_the_unchanged_source_passes(tmp_path, monkeypatch):
    assert first_fault(variant(tmp_path, monkeypatch, *unchanged(MUTANTS.values()))) is None


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize("bug", CHOSEN_BUGS)
def test_a_planted_bug_is_noticed(bug, tmp_path, monkeypatch):
    assert first_fault(variant(tmp_path, monkeypatch, *MUTANTS[bug])), f"no case notices that {bug}"
