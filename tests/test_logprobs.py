"""Log-probabilities, entropy and mean score of hidden states and of logits: every option against float64, both ways, batches, promises, planted bugs."""
import itertools
import sys
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fusedloss.logprobs as logprobs
from fusedloss import linear_log_probs, log_probs
from fusedloss.core.options import Statistics
from workbook.measure import peak_memory, relative_error, saved_tensors
from grids import few, grid, thorough_but
from helpers import LAYOUTS, TOLERANCE, everywhere, first_fault_of, has_no_second_derivative, hidden_from_hooks, interpreted, need_kernels, off, planted, replays, roundings, same_gradients_compiled, unchanged
from test_kernels import LABELS

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter


def take_kernels(monkeypatch, module, taken):
    "Kernels for all that can take them, or for nothing"
    everywhere(monkeypatch, module, "takes_kernel", lambda x: taken and x.dtype != f64 and len(x) > 0)
    everywhere(monkeypatch, sys.modules[module.row_numbers.__module__], "has_kernel", lambda z: taken and z.dtype != f64 and z.numel() > 0)


@pytest.fixture(params=["plain", "kernels"])
def way(request, device, monkeypatch):
    "The device, on which either PyTorch or the kernels take everything they can"
    if request.param == "kernels":
        need_kernels(device)
    take_kernels(monkeypatch, logprobs, request.param == "kernels")
    return device


TEMPERATURES = {"one": lambda n: 1.0, "number": lambda n: 0.7, "each": lambda n: torch.linspace(0.4, 2.5, n)}
SCORES = {"bare": {}, "scale": dict(logit_scale=1.5), "cap": dict(softcap=3.0), "both": dict(logit_scale=0.5, softcap=2.0)}
IGNORED = {"none": slice(0, 0), "some": slice(1, None, 4), "middle": slice(2, 5), "all": slice(None)}
SUMS = {  # a number whose gradient is asked for, of log-probabilities and entropy [N]
    "log_probs": lambda p, h, ramp: (ramp * p).sum(), "entropy": lambda p, h, ramp: ((0.7 - ramp) * h).sum(),
    "both": lambda p, h, ramp: (ramp * p).sum() + ((0.7 - ramp) * h).sum(), "twice": lambda p, h, ramp: (ramp * p).sum() - 2 * (p * p).sum() + (p * h).sum(),
    "expanded": lambda p, h, ramp: -1.7 * p.sum() + h.mean(), "large": lambda p, h, ramp: 65536 * (ramp * p).sum(), "none of it": lambda p, h, ramp: 0 * p.sum(),
}


@dataclass(frozen=True)
class Case:
    "One call: sizes N, H, V, and what it asks for; `offset` of all scores and `masked` classes by the bias"
    sizes: tuple[int, int, int] = (9, 5, 21)
    temperature: str = "one"
    score: str = "bare"
    ignored: str = "some"
    sum: str = "both"
    bias: bool = True
    requires: tuple[bool, bool, bool] = (True, True, True)
    offset: float = 0.0
    spread: float = 1.0  # of the scores
    masked: tuple[int, int] = (0, 0)
    ignore_index: int = -100
    budget: int | None = None
    dtype: torch.dtype = f32

    def tensors(self, device):
        "Leaves x, w, b (or None), labels, and the options"
        (n, h, v), g = self.sizes, torch.Generator().manual_seed(0)
        draw = lambda *size: torch.randn(size, generator=g, dtype=f64)
        x, w, b = draw(n, h), self.spread * 2 * draw(v, h) / max(h, 1) ** 0.5, draw(v) + self.offset
        y = torch.randint(v, (n,), generator=g)
        y = torch.where((y >= self.masked[0]) & (y < self.masked[1]), self.masked[1], y)
        b[slice(*self.masked)] = -torch.inf
        y[IGNORED[self.ignored]] = self.ignore_index
        x, w, b = (t.to(device, self.dtype).requires_grad_(need) for t, need in zip((x, w, b), self.requires))
        t = TEMPERATURES[self.temperature](n)
        temperature = t.to(device) if isinstance(t, torch.Tensor) else t
        return x, w, b if self.bias else None, y.to(device), dict(SCORES[self.score], temperature=temperature, ignore_index=self.ignore_index)


def truth(z, y, *, temperature=1.0, logit_scale=1.0, softcap=None, ignore_index=-100):
    "Log-probabilities, entropy and mean score of logits [N,V] in float64, by their definitions; scale, then soft cap, then temperature"
    z = logit_scale * z
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z / (temperature.double()[:, None] if isinstance(temperature, torch.Tensor) else temperature)
    valid, logs = y != ignore_index, z.log_softmax(1)
    possible = logs > -torch.inf
    finite = torch.where(possible, logs, 0.0)
    entropy = -(torch.where(possible, finite.exp(), 0.0) * finite).sum(1)
    found = logs.gather(1, torch.where(valid, y, 0)[:, None])[:, 0], entropy, z.detach().mean(1)
    return [torch.where(valid, t, 0.0) for t in found]


def summed(case, p, h):
    "The number whose gradient a case asks for"
    return SUMS[case.sum](p, h, torch.linspace(-1, 2, len(p), dtype=p.dtype, device=p.device))


def wanted(case, leaves):
    return [t for t, need in zip(leaves, case.requires) if t is not None and need]


def compared(case, names, got, want, leaves, tolerance) -> list[str]:
    "What is wrong, in words"
    floors = roundings(*leaves, rows=case.sizes[0])
    known, wrong = {"p": f32, "h": f32, "mean": f32}, []
    for name, a, e in zip(names, got, want, strict=True):
        limit = TOLERANCE[f32] if name in known and case.dtype != f64 else tolerance
        like = (f64 if case.dtype == f64 else f32) if name in known else case.dtype
        a, e = (t.detach().cpu() for t in (a, e))
        if a.dtype != like or a.shape != e.shape:
            wrong.append(f"{name} is {a.dtype} {list(a.shape)}")
            continue
        a, e = (t.double().nan_to_num(nan=9e9, posinf=7.0, neginf=-7.0) for t in (a, e))
        wrong += off(name, a, e, limit, 8 * max(floors.get(name, 0.0), floors["loss"]))
    return wrong


def faults(module, case, device, tolerance=None) -> list[str]:
    "What `linear_log_probs` of a module gets wrong on `case`, in words"
    x, w, b, y, options = case.tensors(device)
    found = module.linear_log_probs(x, w, y, linear_bias=b, entropy=True, mean_logits=True, memory_budget=case.budget, **options)
    exact = [None if t is None else t.detach().cpu().double().requires_grad_() for t in (x, w, b)]
    options = {k: t.cpu() if isinstance(t, torch.Tensor) else t for k, t in options.items()}
    e = truth(exact[0] @ exact[1].T + (0 if b is None else exact[2]), y.cpu(), **options)
    got, want, names = [*found[:3]], e, ["p", "h", "mean"]
    if wanted(case, (x, w, b)):
        names += wanted(case, ["dx", "dw", "db"] if case.bias else ["dx", "dw", None])
        got += torch.autograd.grad(summed(case, *found[:2]), wanted(case, (x, w, b)))
        want += torch.autograd.grad(summed(case, *e[:2]), wanted(case, exact))
    elif found.log_probs.requires_grad or found.entropy.requires_grad:
        return ["a gradient that nobody asked for"]
    return compared(case, names, got, want, (x, w, b), tolerance or TOLERANCE[case.dtype])


def faults_of_logits(module, case, device, tolerance=None, layout=lambda z: z) -> list[str]:
    "What `log_probs` of a module gets wrong on the logits of `case`"
    x, w, b, y, options = case.tensors(device)
    z = (x.detach() @ w.detach().T + (0 if b is None else b.detach())).contiguous()
    z = layout(z).requires_grad_()
    exact = z.detach().cpu().double().contiguous().requires_grad_()
    found = module.log_probs(z, y, entropy=True, mean_logits=True, **options)
    options = {k: t.cpu() if isinstance(t, torch.Tensor) else t for k, t in options.items()}
    e = truth(exact, y.cpu(), **options)
    got = *found[:3], *torch.autograd.grad(summed(case, *found[:2]), z)
    want = *e, *torch.autograd.grad(summed(case, *e[:2]), exact)
    return compared(case, ("p", "h", "mean", "dz"), got, want, (x, w, b), tolerance or TOLERANCE[case.dtype])


SIZES = (1, 1, 1), (3, 5, 1), (16, 16, 64), (17, 9, 70)
GRID = grid(SIZES, TEMPERATURES, SCORES, IGNORED)
CASES = {
    **{f"{sizes}, {t}, {score}, {ignored}": Case(sizes, t, score, ignored, bias=score != "scale", budget=2**12) for sizes, t, score, ignored in GRID},
    "no token": Case((0, 5, 21)),
    "no feature": Case((9, 0, 21)),
    "ignore_index is a class": Case(ignore_index=3, ignored="some"),
    "two runs": Case((17, 5, 300), "each", budget=2**12),
}
EXTREMES = {
    "200 above": Case((9, 5, 50), offset=200.0), "200 below": Case((9, 5, 50), offset=-200.0),
    "steep": Case((9, 5, 50), spread=100.0), "cold": Case((9, 5, 50), "number", spread=60.0, score="both"),
    "one class is left": Case((9, 7, 70), masked=(0, 69)), "the first tile is impossible": Case((9, 7, 120), "each", masked=(0, 64)),
    "a tile is impossible": Case((9, 7, 120), masked=(32, 96), sum="twice"),
}


CHOSEN = few(CASES, *[*CASES][:len(GRID):6], "no token", "no feature", "two runs")


@pytest.mark.parametrize("name", CHOSEN)
def test_values_and_gradients_are_the_definition(name, way):
    assert faults(logprobs, CASES[name], way) == []


@pytest.mark.parametrize("name", few(EXTREMES, "200 above", "one class is left", "a tile is impossible"))
@pytest.mark.parametrize("of", [faults, faults_of_logits])
def test_extreme_scores(name, of, way):
    assert of(logprobs, EXTREMES[name], way, 1e-4) == []


@pytest.mark.parametrize("name", [*CASES, *EXTREMES])
def test_float64(name, device):
    case = replace((CASES | EXTREMES)[name], dtype=f64)
    assert faults(logprobs, case, device, 1e-11) == [] and faults_of_logits(logprobs, case, device, 1e-11) == []


@pytest.mark.parametrize("name", few(CASES, *[*CASES][1:len(GRID):7], "ignore_index is a class"))
def test_of_logits(name, way):
    assert faults_of_logits(logprobs, CASES[name], way) == []


@pytest.mark.parametrize("sum", few(SUMS, "twice", "expanded"))
def test_any_upstream_gradient(sum, way):
    case = Case(sum=sum, temperature="each", score="both")
    assert faults(logprobs, case, way) == [] and faults_of_logits(logprobs, case, way) == []


SUBSETS = [*itertools.product([False, True], repeat=3)]


@pytest.mark.parametrize("requires", few(SUBSETS, (True, False, False), (False, True, True)), ids=str)
def test_gradients_exactly_where_they_are_asked_for(requires, way):
    for sum in few(SUMS, "entropy" if requires[0] else "log_probs"):
        assert faults(logprobs, Case(requires=requires, sum=sum, budget=2**12), way) == []


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True)], ids=str)
def test_only_what_is_asked_for(flags, way):
    x, w, b, y, _ = Case().tensors(way)
    for found in (linear_log_probs(x, w, y, entropy=flags[0], mean_logits=flags[1]), log_probs(x @ w.T, y, entropy=flags[0], mean_logits=flags[1])):
        assert (found.entropy is not None, found.mean_logits is not None) == flags
        assert found.log_probs.requires_grad and (not flags[1] or not found.mean_logits.requires_grad)
        assert torch.autograd.grad(found.log_probs.sum(), w)[0].isfinite().all()


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_logits_and_hidden_states_agree(temperature, device):
    x, w, b, y, options = Case(temperature=temperature, score="both", dtype=f64).tensors(device)
    first = linear_log_probs(x, w, y, linear_bias=b, entropy=True, mean_logits=True, **options)
    second = log_probs(F.linear(x, w, b), y, entropy=True, mean_logits=True, **options)
    assert all(relative_error(a, e) < 1e-12 for a, e in zip(first[:3], second))
    a, e = (torch.autograd.grad((found.log_probs + found.entropy).sum(), [x, w, b]) for found in (first, second))
    assert all(relative_error(s, t) < 1e-12 for s, t in zip(a, e))


def test_an_ignored_token_is_zero_and_not_negative(way):
    x, w, b, y, _ = Case(ignored="some").tensors(way)
    for found in (linear_log_probs(x, w, y, entropy=True, mean_logits=True), log_probs(x @ w.T, y, entropy=True, mean_logits=True)):
        for t in found[:3]:
            assert not t[1::4].any() and not t[1::4].signbit().any()
        dx, = torch.autograd.grad((found.log_probs + found.entropy).sum(), x, retain_graph=True)
        assert not dx[1::4].any() and dx[::4].any()


def test_of_one_class(way):
    x, w, b, y, _ = Case(ignored="some").tensors(way)
    whole = [(4 * t.detach()).round() / 4 for t in (x, w)]  # a score is the same number in whatever order it is added
    for x, w in ((x, w), whole):
        alone = linear_log_probs(x, w[:1], torch.zeros_like(y), entropy=True)
        assert (alone.log_probs <= 0).all() and (alone.log_probs > -roundings(x, w)["loss"]).all() and not alone.entropy.any()
    assert not alone.log_probs.any() and not alone.log_probs.signbit().any()


def test_temperature_comes_after_the_soft_cap(device):
    z, y = torch.tensor([[9.0, 0.0]], device=device), torch.tensor([0], device=device)
    got = log_probs(z, y, softcap=2.0, temperature=0.5).log_probs
    capped = 2 * torch.tanh(z / 2)
    assert torch.allclose(got, (capped / 0.5).log_softmax(1)[:, 0]) and not torch.allclose(got, (2 * torch.tanh(z / 0.5 / 2)).log_softmax(1)[:, 0])


def test_a_number_is_the_same_temperature_for_all(way):
    x, w, b, y, _ = Case().tensors(way)
    for other in (torch.full((9,), 0.7, device=way), torch.full((1,), 0.7, device=way, dtype=f64).expand(9)):
        pair = [linear_log_probs(x, w, y, temperature=t, entropy=True) for t in (0.7, other)]
        assert all(relative_error(a, e) < 1e-5 for a, e in zip(pair[0][:2], pair[1]))


# Promises


@pytest.mark.parametrize("ignored", few(IGNORED, "some", "all"))
def test_a_promise_that_holds_changes_nothing(ignored, way):
    x, w, b, y, options = Case((17, 9, 70), "each", ignored=ignored).tensors(way)
    count = int((y >= 0).sum())
    call = lambda **more: linear_log_probs(x, w, y, linear_bias=b, entropy=True, mean_logits=True, **options, **more)
    plain = call()
    for most in {count, min(count + 2, 17), 40}:
        found = call(max_valid=most)
        assert all(torch.allclose(a, e, rtol=1e-5, atol=1e-6) for a, e in zip(found[:3], plain))
        a, e = (torch.autograd.grad((f.log_probs - f.entropy).sum(), [x, w, b], retain_graph=True) for f in (found, plain))
        assert all(torch.allclose(s, t, rtol=1e-5, atol=1e-5) for s, t in zip(a, e))


def blind(t, ignore_index, max_valid):
    "`packed_rows` as a GPU has it, which does not count"
    return None if max_valid is None or max_valid >= len(t) else (t == ignore_index).byte().argsort(stable=True)[:max(max_valid, 1)]


def test_a_broken_promise_is_an_error_or_nan(device, monkeypatch):
    x, w, b, y, _ = Case(ignored="middle").tensors(device)
    call = lambda most: linear_log_probs(x, w, y, linear_bias=b, entropy=True, mean_logits=True, max_valid=most)
    if device == "cpu":
        with pytest.raises(ValueError, match="max_valid: expected at least the 6 tokens that are not ignored, got 5"):
            call(5)
        everywhere(monkeypatch, logprobs, "check_promise", lambda *_: None)
        everywhere(monkeypatch, logprobs, "packed_rows", blind)
    for most in (5, 0):
        found = call(most)
        grads = torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), [x, w, b])
        assert all(t.isnan().all() for t in found[:3]), "ignored tokens too: nothing of a call that broke its promise is right"
        assert all(g.isnan().any() for g in grads)
    assert not any(t.isnan().any() for t in call(6)[:3])


@pytest.mark.parametrize("most", [11, 13])
def test_rows_are_packed_without_looking(most, way, monkeypatch):
    "As on a GPU: the order of the rows is found there, and ignored ones fill up what was promised"
    everywhere(monkeypatch, logprobs, "packed_rows", blind)
    class Promised:
        linear_log_probs = staticmethod(partial(linear_log_probs, max_valid=most))
    assert faults(Promised, Case((15, 9, 70), "each", "both"), way) == []


# Numbers that cannot be meant


@pytest.mark.parametrize("label", few([-1, 21, 2**32 + 3], -1, 21))
def test_a_label_out_of_range(label, way, monkeypatch):
    monkeypatch.setenv("FUSEDLOSS_DEBUG", "1")
    x, w, b, y, _ = Case(ignored="none").tensors(way)
    clean, = torch.autograd.grad(linear_log_probs(x, w, y).log_probs[torch.arange(9) != 3].sum(), x)
    y[3] = label
    for call in (lambda: linear_log_probs(x, w, y, entropy=True), lambda: log_probs(x @ w.T, y, entropy=True)):
        with pytest.raises(IndexError, match=rf"target\[3\] is {label}: expected 0 ≤ label < 21"):
            call()
    everywhere(monkeypatch, logprobs, "check_classes", lambda *_: None)
    for call in (lambda: linear_log_probs(x, w, y), lambda: log_probs(x @ w.T, y)):
        found = call().log_probs
        assert found.isnan().tolist() == [i == 3 for i in range(9)]
        dx, = torch.autograd.grad(found.sum(), x)
        assert not dx[3].any() and relative_error(dx, clean) < TOLERANCE[f32]


def test_a_temperature_that_divides_nothing(way, monkeypatch):
    x, w, b, y, _ = Case(ignored="none").tensors(way)
    t = torch.ones(9, device=way)
    for wrong in (0.0, -1.0, torch.inf, torch.nan):
        t[3] = wrong
        if way == "cpu":
            with pytest.raises(ValueError, match="temperature: expected positive, finite numbers, got"):
                linear_log_probs(x, w, y, temperature=t)
    everywhere(monkeypatch, logprobs, "check_temperature", lambda *_: None)
    for wrong in (0.0, -1.0, torch.inf, torch.nan):
        t[3] = wrong
        for found in (linear_log_probs(x, w, y, temperature=t, entropy=True), log_probs(x @ w.T, y, temperature=t, entropy=True)):
            assert found.log_probs.isnan().tolist() == found.entropy.isnan().tolist() == [i == 3 for i in range(9)]


@pytest.mark.parametrize("bad", few([torch.nan, torch.inf], torch.inf))
def test_a_token_without_a_softmax_is_alone(bad, way):
    x, w, b, y, _ = Case((20, 5, 60), ignored="none").tensors(way)
    clean = linear_log_probs(x, w, y, entropy=True)
    spoilt = x.detach().clone()
    spoilt[3] = bad
    found = linear_log_probs(spoilt.requires_grad_(), w, y, entropy=True)
    rest = torch.arange(20, device=way) != 3
    dx, = torch.autograd.grad((found.log_probs + found.entropy).sum(), spoilt)
    assert found.log_probs[3].isnan() and dx[rest].isfinite().all()
    assert all(torch.equal(a[rest], e[rest]) for a, e in zip(found[:2], clean))


# The same bits in every batch


INVARIANT = few([("plain", f32), ("plain", f64), ("kernels", f16), ("kernels", f32)], ("plain", f32), ("plain", f64), ("kernels", f16))


@pytest.mark.parametrize("path, dtype", INVARIANT, ids=str)
def test_a_token_has_the_same_bits_in_every_batch(path, dtype, device, monkeypatch):
    "In batches of other sizes, at other places, beside other and ignored neighbours, in other memory"
    if path == "kernels":
        need_kernels(device)
    take_kernels(monkeypatch, logprobs, path == "kernels")
    x, w, b, y, options = Case((130, 9, 75), "each", "both", ignored="none", dtype=dtype).tensors(device)
    t = options.pop("temperature")
    if path == "kernels" and device == "cpu":  # so that NumPy, which makes the interpreter's products, rounds nothing
        x, w, b = ((4 * s.detach()).round() / 4 for s in (x, w, b))
    def bits(rows, x=x, y=y):
        found = linear_log_probs(x[rows], w, y[rows], linear_bias=b, temperature=t[rows], entropy=True, mean_logits=True, batch_invariant=True, **options)
        return torch.stack([part.detach() for part in found[:3]])
    own = bits(slice(0, 130))
    assert len(own[0].unique()) > 100
    for rows in few([slice(0, 1), slice(7, 8), slice(128, 130), slice(3, 10), slice(1, 130), slice(0, 130, 2)], slice(7, 8), slice(128, 130), slice(3, 10)):
        assert torch.equal(bits(rows), own[:, rows]), f"rows {rows}"
    others, some, back = x.clone(), y.clone(), torch.arange(129, -1, -1, device=device)
    others[1::3], some[::3] = others[1::3].flip(1), -100
    assert torch.equal(bits(back, others, some).flip(1)[:, 2::3], own[:, 2::3]), "other places, other and ignored neighbours"
    wide = F.pad(x.detach(), (1, 4), value=torch.nan)[:, 1:-4]
    assert torch.equal(bits(slice(0, 40, 2), wide), own[:, :40:2]), "rows that lie apart"


@pytest.mark.parametrize("score, ignored", few([("bare", "some"), ("both", "all"), ("cap", "none")], ("both", "all"), ("cap", "none")))
def test_invariant_values_are_the_definition(score, ignored, way):
    class Invariant:
        linear_log_probs = staticmethod(partial(linear_log_probs, batch_invariant=True))
    assert faults(Invariant, Case((17, 9, 70), "each", score, ignored), way) == []
    assert faults(Invariant, Case((0, 9, 70)), way) == []


# Precisions and layouts


HALVES = few(CASES, *[*CASES][2:len(GRID):12], "two runs")


@pytest.mark.parametrize("name", thorough_but(HALVES, HALVES[0], "two runs"))
def test_half_precision_by_the_kernels(name, device, monkeypatch):
    need_kernels(device)
    take_kernels(monkeypatch, logprobs, True)
    for dtype in (f16,) if device == "cpu" else (f16, bf16):  # bf16 is wrong in the interpreter
        case = replace(CASES[name], dtype=dtype)
        assert faults(logprobs, case, device, 2 * TOLERANCE[dtype]) == []
        assert faults_of_logits(logprobs, case, device, 2 * TOLERANCE[dtype]) == []


def test_half_precision_without_kernels(device):
    for dtype in (bf16, f16):
        assert faults(logprobs, Case((17, 9, 70), "each", "both", dtype=dtype), device, 2 * TOLERANCE[dtype]) == []


@pytest.mark.parametrize("name", few(LAYOUTS, "part of a wider tensor"))
def test_matrices_of_any_strides(name, way):
    layout = LAYOUTS[name]
    x, w, _, y, _ = Case((9, 7, 40)).tensors(way)
    for a, c in ((layout(x.detach()), w.detach()), (x.detach(), layout(w.detach()))):
        a, c = a.requires_grad_(), c.requires_grad_()
        plain = [t.detach().contiguous().requires_grad_() for t in (a, c)]
        runs = [linear_log_probs(*pair, y, entropy=True) for pair in ((a, c), plain)]
        got, want = (torch.autograd.grad((f.log_probs - f.entropy).sum(), pair) for f, pair in zip(runs, ((a, c), plain)))
        floors = roundings(a, c, rows=len(y))  # of equal classes the gradients are nothing
        assert [off(name, g, e, TOLERANCE[f32], floors[name]) for name, g, e in zip(("dx", "dw"), got, want)] == [[], []]


@pytest.mark.parametrize("name", few(LAYOUTS, "transposed", "part of a wider tensor"))
def test_logits_of_any_strides(name, way):
    assert faults_of_logits(logprobs, Case((9, 7, 40), "each"), way, layout=LAYOUTS[name]) == []


@pytest.mark.parametrize("name", few(LABELS, "unaligned", "strided"))
def test_labels_of_any_kind(name, way):
    x, w, _, y, _ = Case((13, 5, 21)).tensors(way)
    kind = LABELS[name](y)
    plain = kind.long().clone(memory_format=torch.contiguous_format)
    for call in (partial(linear_log_probs, x, w), partial(log_probs, (x @ w.T).detach())):
        assert torch.equal(call(kind).log_probs, call(plain).log_probs)


@pytest.mark.parametrize("lead", few([(), (3,), (2, 3), (2, 0), (2, 1, 3)], (2, 0), (2, 1, 3)), ids=str)
def test_any_leading_shape(lead, way):
    n = torch.Size(lead).numel()
    x, w, _, y, _ = Case((n, 5, 11), ignored="none").tensors(way)
    t = torch.linspace(0.5, 2, n, device=way)
    flat = linear_log_probs(x, w, y, temperature=t, entropy=True, mean_logits=True)
    shaped = x.detach().view(*lead, 5).requires_grad_()
    for found in (linear_log_probs(shaped, w, y.view(lead), temperature=t.view(lead), entropy=True, mean_logits=True),
                  log_probs(shaped @ w.T, y.view(lead), temperature=t.view(lead), entropy=True, mean_logits=True)):
        assert all(a.shape == torch.Size(lead) and torch.allclose(a.flatten(), e, atol=1e-5) for a, e in zip(found[:3], flat))
        assert torch.autograd.grad(found.log_probs.sum(), shaped)[0].shape == shaped.shape


def test_images_whose_channels_come_last(way):
    "Hidden states [B,C,h,w] moved to [..., C], a view without rows of one stride"
    x, w = torch.randn(2, 5, 3, 4, device=way, requires_grad=True), torch.randn(11, 5, device=way)
    y = torch.randint(11, (2, 3, 4), device=way)
    found = linear_log_probs(x.movedim(1, -1), w, y, entropy=True)
    want = torch.einsum("bchw,vc->bhwv", x, w).log_softmax(-1)
    assert torch.allclose(found.log_probs, want.gather(-1, y[..., None])[..., 0], atol=1e-5)
    logits = torch.einsum("bchw,vc->bvhw", x, w)
    assert torch.allclose(log_probs(logits.movedim(1, -1), y).log_probs, found.log_probs, atol=1e-5)
    assert torch.autograd.grad(found.entropy.sum(), x)[0].shape == x.shape


def test_tied_weights_and_accumulation(way):
    _, w, _, y, _ = Case((7, 5, 21), ignored="none").tensors(way)
    linear_log_probs(w[:7] * 1, w, y, entropy=True).log_probs.sum().backward()  # an embedding that is also the head
    exact = w.detach().double().requires_grad_()
    truth(exact[:7] @ exact.T, y)[0].sum().backward()
    assert relative_error(w.grad, exact.grad) < TOLERANCE[f32]
    for half in (slice(0, 4), slice(4, 7)):
        linear_log_probs(w[:7][half] * 1, w, y[half]).log_probs.sum().backward()
    assert relative_error(w.grad, 2 * exact.grad) < TOLERANCE[f32]


@pytest.mark.parametrize("low", [bf16, f16])
def test_autocast(low, device):
    x, w, b, y, options = Case((9, 16, 40), "each").tensors(device)
    with torch.autocast(device, low):
        found = linear_log_probs(x, w, y, linear_bias=b, entropy=True, **options)
    rounded = [t.detach().to(low).double().requires_grad_() for t in (x, w, b)]
    want = truth(rounded[0] @ rounded[1].T + rounded[2], y, **options)
    assert all(a.dtype == f32 and relative_error(a, e) < 1e-5 for a, e in zip(found[:2], want))
    got, exact = (torch.autograd.grad((p + h).sum(), leaves) for (p, h, *_), leaves in ((found, (x, w, b)), (want, rounded)))
    assert all(g.dtype == f32 and relative_error(g, e) < 1e-2 for g, e in zip(got, exact))


# A citizen of autograd, compilers and memory


def test_backward_twice(way):
    x, w, b, y, _ = Case().tensors(way)
    found = linear_log_probs(x, w, y, linear_bias=b, entropy=True)
    first = torch.autograd.grad((found.log_probs + found.entropy).sum(), [x, w, b], retain_graph=True)
    for c in (1, -3, 65536):
        again = torch.autograd.grad(c * (found.log_probs + found.entropy).sum(), [x, w, b], retain_graph=True)
        assert all(relative_error(a, c * e) < TOLERANCE[f32] for a, e in zip(again, first))


def test_second_derivatives_are_refused(device):
    x, w, _, y, _ = Case().tensors(device)
    z = (x @ w.T).detach().requires_grad_()
    for kind in ("log_probs", "entropy"):
        assert has_no_second_derivative(getattr(linear_log_probs(x, w, y, entropy=True), kind).sum(), w)
        assert has_no_second_derivative(getattr(log_probs(z, y, entropy=True), kind).sum(), z)


def test_gradcheck(device):
    x, w, b, y, options = Case((4, 3, 6), "each", "both", dtype=f64).tensors(device)
    assert torch.autograd.gradcheck(lambda x, w, b: linear_log_probs(x, w, y, linear_bias=b, entropy=True, **options)[:2], (x, w, b))


def test_functional_gradients(device):
    x, w, b, y, options = Case((9, 7, 40), "each").tensors(device)
    loss = lambda x, w, b: linear_log_probs(x, w, y, linear_bias=b, entropy=True, **options)
    total = lambda *leaves: (lambda f: (f.log_probs + 2 * f.entropy).sum())(loss(*leaves))
    got = torch.func.grad(total, argnums=(0, 1, 2))(x.detach(), w.detach(), b.detach())
    assert all(relative_error(a, e) < 1e-6 for a, e in zip(got, torch.autograd.grad(total(x, w, b), [x, w, b])))


@pytest.mark.parametrize("temperature", few(["number", "each"], "each"))
def test_compiled_whole(temperature, device):
    x, w, b, y, _ = Case((9, 7, 40)).tensors(device)
    def step(x, w, b, y):
        t = 0.7 if temperature == "number" else y.clamp(min=0) / 10 + 0.5
        found = linear_log_probs(x * 1, w, y, linear_bias=b, temperature=t, entropy=True, mean_logits=True, softcap=9.0)
        of_logits = log_probs(F.linear(x, w, b), y, temperature=t, entropy=True)
        return (found.log_probs + found.entropy).sum() - (of_logits.entropy * found.mean_logits).sum()
    assert same_gradients_compiled(step, x, w, b, y, (9, 5))


@pytest.mark.parametrize("temperature", few(["one", "each"], "each"))
def test_operators_keep_their_contract(temperature, device):
    x, w, b, y, options = Case((5, 4, 7)).tensors(device)
    each = TEMPERATURES["each"](5).to(device) if temperature == "each" else None
    o, _, _ = logprobs.temperature_options(0.7, 1.5, 2.0, -100)
    stats = Statistics(entropy=True, mean=True)
    torch.library.opcheck(logprobs.log_probs_of_rows, (x, w, y, b, each, *o, *stats, 0, None, False))
    found = logprobs.log_probs_of_rows(*(t.detach() for t in (x, w, y, b)), each, o, stats, 0, None, False)
    g = torch.ones(5, device=device)
    args = g, g, x.detach(), w.detach(), y, b.detach(), each, found[2], found[1], *o, 0, None, True, True, True
    torch.library.opcheck(logprobs.log_probs_grad, args)


def test_saved_are_the_inputs_and_two_numbers_a_token(device):
    x, w, b, y, _ = Case((40, 16, 300)).tensors(device)
    for more, numbers in (({}, 2), (dict(entropy=True), 3)):
        kept = saved_tensors(lambda: linear_log_probs(x, w, y, linear_bias=b, **more).log_probs, [x, w, b, y])
        assert sum(t.numel() for t in kept) <= numbers * 40


def test_hooks_see_every_large_tensor():
    x, w, _, y, _ = Case((96, 24, 160)).tensors("cpu")
    left, grads = hidden_from_hooks(lambda: linear_log_probs(x, w, y, entropy=True).log_probs, [x, w], 2000)
    assert not left and all(g.isfinite().all() for g in grads)


def test_memory_stays_within_the_budget(device):
    n, h, v = 64, 16, 4000
    x, w, _, y, _ = Case((n, h, v), bias=False, ignored="none").tensors(device)
    def run(budget):
        found = linear_log_probs(x, w, y, entropy=True, memory_budget=budget)
        return torch.autograd.grad((found.log_probs + found.entropy).sum(), [x, w])
    for budget in (2**18, 2**19):
        assert peak_memory(lambda: run(budget), device) - x.nbytes - w.nbytes < 1.1 * budget + 2**17 < n * v * 4


def test_a_budget_has_room_for_autocasts_copies(device):
    "Of operands without a gradient: of others the float32 gradient has their bytes, and those of the gradient in 16 bits"
    x, w, y = torch.randn(4096, 256, device=device), torch.randn(64, 256, device=device), torch.randint(64, (4096,), device=device)
    copies = 2 * (x.numel() + w.numel())
    budget = 6 * copies // 5
    with torch.autocast(device, bf16):
        assert peak_memory(lambda: linear_log_probs(x, w, y, memory_budget=budget), device) < budget + 2**17
        with pytest.raises(ValueError, match=f"memory_budget: expected more than the {copies} bytes of autocast's"):
            linear_log_probs(x, w, y, memory_budget=copies)
        x.requires_grad_()
        assert peak_memory(lambda: torch.autograd.grad(linear_log_probs(x, w, y, memory_budget=budget).log_probs.sum(), x), device) - x.nbytes < budget + 2**17
        loss = linear_log_probs(x, w, y, memory_budget=10 * copies).log_probs
        assert torch.equal(loss, linear_log_probs(x, w, y).log_probs)


def test_the_same_bits_each_time_and_nothing_changes(way):
    x, w, b, y, options = Case((17, 9, 70), "each", "both").tensors(way)
    given = [x, w, b, y, options["temperature"]]
    before, versions = [t.detach().clone() for t in given], [t._version for t in given]
    def run():
        found = linear_log_probs(x, w, y, linear_bias=b, entropy=True, memory_budget=2**11, **options)
        return *found[:2], *torch.autograd.grad((found.log_probs + found.entropy).sum(), [x, w, b])
    runs = [run() for _ in range(2)]
    assert all(torch.equal(a, c) for other in runs[1:] for a, c in zip(runs[0], other))
    assert all(torch.equal(t, c) and t._version == v for t, c, v in zip(given, before, versions))


def test_a_layer_in_place_of_its_weight(device):
    x, w, b, y, _ = Case().tensors(device)
    layer, table = torch.nn.Linear(5, 21, device=device), torch.nn.Embedding(21, 5, device=device)
    for module, bias in ((layer, layer.bias), (table, None)):
        a, e = linear_log_probs(x, module, y).log_probs, linear_log_probs(x, module.weight, y, linear_bias=bias).log_probs
        assert torch.equal(a, e)
        assert torch.equal(*(torch.autograd.grad(t.sum(), module.weight)[0] for t in (a, e)))


# On a GPU


@cuda_only
@pytest.mark.parametrize("sizes", few([(300, 256, 1000), (77, 61, 999), (1, 8, 129), (1000, 72, 50257)], (300, 256, 1000), (77, 61, 999), (1, 8, 129)), ids=str)
@pytest.mark.parametrize("dtype", [bf16, f16, f32])
def test_kernels_on_a_gpu(sizes, dtype):
    for temperature, score, ignored in (("one", "bare", "none"), ("each", "both", "some"), ("number", "cap", "middle")):
        case = Case(sizes, temperature, score, ignored, dtype=dtype)
        tolerance = 2 * TOLERANCE[dtype] if dtype != f32 else 1e-4
        assert faults(logprobs, case, "cuda", tolerance) == [] and faults_of_logits(logprobs, case, "cuda", tolerance) == []


@cuda_only
@pytest.mark.parametrize("more", [{}, dict(max_valid=200), dict(batch_invariant=True)], ids=str)
def test_cuda_graph(more):
    "Which raises where a step waits for the GPU"
    x, w, b, y, options = Case((300, 64, 1000), "each", "both", ignored="none", dtype=bf16).tensors("cuda")
    y[::2] = -100
    def step():
        found = linear_log_probs(x, w, y, linear_bias=b, entropy=True, **options, **more)
        grads = torch.autograd.grad((found.log_probs + found.entropy).sum(), [x, w, b])
        return *(t.detach() for t in found[:2]), *grads  # a graph that outlives its step would tie the next to this stream
    assert replays(step)


@cuda_only
@pytest.mark.parametrize("dtype", [bf16, f16, f32])
def test_the_same_bits_in_every_batch_on_a_gpu(dtype):
    x, w, b, y, options = Case((1030, 256, 5000), "each", "both", ignored="none", dtype=dtype).tensors("cuda")
    t = options.pop("temperature")
    def bits(rows):
        found = linear_log_probs(x[rows], w, y[rows], linear_bias=b, temperature=t[rows], entropy=True, mean_logits=True, batch_invariant=True, **options)
        return torch.stack([t.detach() for t in (found.log_probs, found.entropy, found.mean_logits)])
    own = bits(slice(0, 1030))
    for rows in (slice(0, 1), slice(1029, 1030), slice(1, 3), slice(3, 10), slice(16, 32), slice(100, 230), slice(1, 600), slice(0, 1024)):
        assert torch.equal(bits(rows), own[:, rows]), f"rows {rows}"


@cuda_only
@pytest.mark.parametrize("budget", [2**26, 2**28])
def test_memory_of_the_kernels(budget):
    x, w, _, y, _ = Case((4096, 1024, 32768), bias=False, ignored="none", dtype=bf16).tensors("cuda")
    def run():
        found = linear_log_probs(x, w, y, entropy=True, memory_budget=budget)
        return torch.autograd.grad((found.log_probs + found.entropy).sum(), [x, w])
    run()
    assert peak_memory(run, "cuda") - x.nbytes - w.nbytes < 1.1 * budget


# Bugs planted


MUTANTS = {  # what is wrong: (text of the source, what stands in its place)
    "the moment is not carried on": ("rescaled_moment(moment, s, row_max, new_max, LOG2_SCALE) + tl.sum(share, 1)", "moment + tl.sum(share, 1)"),
    "runs are merged without their moments' maxima": ("rescaled_moment(part_moment, part_s, part_max, new_max[None, :], LOG2_SCALE), 0))", "part_moment, 0))"),
    "the entropy's mean is missing from its gradient": ("softmax_coef += g_h * mean", "softmax_coef += 0 * g_h * mean"),
    "the entropy's gradient is dropped": ("coef -= (g_h / LOG2_SCALE)[:, None] * tl.maximum(below, -1e30)", "coef -= 0 * tl.maximum(below, -1e30)"),
    "a score that cannot be has an entropy": ("coef -= (g_h / LOG2_SCALE)[:, None] * tl.maximum(below, -1e30)", "coef -= (g_h / LOG2_SCALE)[:, None] * below"),
    "the temperature leaves the slope as it was": ("by = inverse_temperature(temperature_ptr, rows, keep)[:, None]\n        return z * by, slope * by", "by = inverse_temperature(temperature_ptr, rows, keep)[:, None]\n        return z * by, slope"),
    "the target is not cooled": ("z, slope = SCORE(raw, o)\n    if temperature_ptr is not None:\n        z *= inverse_temperature(temperature_ptr, rows, rows < N)", "z, slope = SCORE(raw, o)"),
    "the temperature comes before the soft cap": ("softcap=quotient(o.softcap, temperature)", "softcap=o.softcap"),
    "all temperatures are the first": ("tl.load(temperature_ptr + rows, mask=keep, other=1.0)", "tl.load(temperature_ptr + rows * 0, mask=keep, other=1.0)"),
    "the target of logits is not cooled": ("        z_y *= by\n", "        z_y *= 1.0\n"),
    "temperatures stay where they were when rows are packed": ("args[0]): found = launch_lse(*args, None, budget, part(temperature))", "args[0]): found = launch_lse(*args, None, budget, temperature)"),
    "rows are put back in the order of the products": ("return part.new_full((n, *part.shape[1:]), blank).index_copy_(0, order, part)", "return part.new_full((n, *part.shape[1:]), blank).index_copy_(0, order.sort().values.flip(0), part)"),
    "gradients are of rows in another order": ("upstream = part(None if g is None else -g), None, part(g_entropy)", "upstream = None if g is None else -g, None, part(g_entropy)"),
    "the mean counts ignored tokens' scores": ("of_row(rows[-1] + mark) if stats.mean", "of_row(rows[-1] + mark + 1) if stats.mean"),
    "one flag decides all gradients": ('else None\n    wanted = {"x": needs.x, "w": needs.w, "bias": needs.bias}', 'else None\n    wanted = {"x": needs.x, "w": needs.x, "bias": needs.x}'),
}
NOTICING = Case((9, 5, 170), "each", "both", "middle", budget=2**12), Case((9, 5, 40), "number", "cap"), Case((9, 7, 120), masked=(32, 64), ignored="none"), \
    Case(requires=(False, True, True))


def variant(tmp_path, monkeypatch, *pairs):
    "The module with texts replaced, on kernels"
    module = planted(logprobs, tmp_path, *pairs, *unchanged([["def takes_kernel("], ["def has_kernel("], ["def run_length("]]))
    take_kernels(monkeypatch, module, True)
    everywhere(monkeypatch, sys.modules[module.launch_lse.__module__], "run_length", lambda n, tiles, *_: 1 + tiles // 3)
    return module


def first_fault(module):
    "The first case that the module does not pass"
    return first_fault_of(partial(of, module, case, "cpu") for case in NOTICING for of in (faults, faults_of_logits))


@pytest.mark.thorough
@interpreted
def test_the_unchanged_source_passes(tmp_path, monkeypatch):
    assert first_fault(variant(tmp_path, monkeypatch, *unchanged(MUTANTS.values()))) is None


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize("bug", few(MUTANTS, "the moment is not carried on", "the target of logits is not cooled"))
def test_a_planted_bug_is_noticed(bug, tmp_path, monkeypatch):
    assert first_fault(variant(tmp_path, monkeypatch, *MUTANTS[bug])), f"no case notices that {bug}"
