"""Log-probabilities of several classes a row, of hidden states and of logits: every option against float64, both ways, lists of every kind, promises, memory."""
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fusedloss.logprobs as logprobs
from fusedloss import linear_log_probs, log_probs
from fusedloss.core import dots
from fusedloss.core.options import Statistics
from workbook.measure import peak_memory, relative_error, saved_tensors
from grids import few, grid
from helpers import LAYOUTS, TOLERANCE, everywhere, has_no_second_derivative, off, replays, roundings, same_gradients_compiled, where_kernels_run
from test_logprobs import blind, take_kernels, way  # noqa: F401, a fixture

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter

NONE = -100
TEMPERATURES = {"one": lambda n: 1.0, "number": lambda n: 0.7, "each": lambda n: torch.linspace(0.4, 2.5, n)}
SCORES = {"bare": {}, "scale": dict(logit_scale=1.5), "cap": dict(softcap=3.0), "both": dict(logit_scale=0.5, softcap=2.0)}


def drawn_list(n, v, k, kind):
    "Classes [n,k]"
    y = torch.randint(v, (n, k), generator=torch.Generator().manual_seed(1))
    if kind == "some ignored":
        y.view(-1)[::3] = NONE
        y[1::4] = NONE
    if kind == "one class twice":
        y[:, -1] = y[:, 0]
    if kind == "the same for all":
        y[:] = y[:1]
    if kind == "all ignored":
        y[:] = NONE
    return y


LISTS = "any", "some ignored", "one class twice", "the same for all", "all ignored"


@dataclass(frozen=True)
class Case:
    "One call: sizes N, H, V, K, and what it asks for; `offset` of all scores, `spread` of them, and `masked` classes by the bias"
    sizes: tuple[int, int, int, int] = (9, 5, 21, 3)
    temperature: str = "one"
    score: str = "bare"
    list: str = "some ignored"
    bias: bool = True
    offset: float = 0.0
    spread: float = 1.0
    masked: tuple[int, int] = (0, 0)
    dtype: torch.dtype = f32

    def tensors(self, device):
        "Leaves x, w, b (or None), classes, and the options"
        (n, h, v, k), g = self.sizes, torch.Generator().manual_seed(0)
        draw = lambda *size: torch.randn(size, generator=g, dtype=f64)
        x, w, b = draw(n, h), self.spread * 2 * draw(v, h) / max(h, 1) ** 0.5, draw(v) + self.offset
        b[slice(*self.masked)] = -torch.inf
        x, w, b = (t.to(device, self.dtype).requires_grad_() for t in (x, w, b))
        t = TEMPERATURES[self.temperature](n)
        options = dict(SCORES[self.score], temperature=t.to(device) if isinstance(t, torch.Tensor) else t)
        return x, w, b if self.bias else None, drawn_list(n, v, k, self.list).to(device), options


def truth(z, y, *, temperature=1.0, logit_scale=1.0, softcap=None):
    "Log-probabilities [N,K], entropy and mean score [N] of logits in float64, by their definitions"
    z = logit_scale * z
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z / (temperature.double()[:, None] if isinstance(temperature, torch.Tensor) else temperature)
    logs, valid = z.log_softmax(1), y != NONE
    finite = torch.where(logs > -torch.inf, logs, 0.0)
    entropy = -(torch.where(logs > -torch.inf, finite.exp(), 0.0) * finite).sum(1)
    row = valid.any(1)
    return torch.where(valid, logs.gather(1, torch.where(valid, y, 0)), 0.0), torch.where(row, entropy, 0.0), torch.where(row, z.detach().mean(1), 0.0)


def summed(p, h):
    "A number whose gradient differs for each log-probability and entropy"
    ramp = lambda t: torch.linspace(-1, 2, t.numel(), dtype=t.dtype, device=t.device).view(t.shape)
    p = torch.where(p > -torch.inf, p, 0.0)
    return (ramp(p) * p).sum() - 0.1 * (p * p).sum() + ((0.7 - ramp(h)) * h).sum()


def faults(case, device, tolerance=None, call=linear_log_probs, of_logits=False, layout=lambda z: z) -> list[str]:
    "What a function gets wrong on `case`, in words"
    x, w, b, y, options = case.tensors(device)
    exact = [None if t is None else t.detach().cpu().double().requires_grad_() for t in (x, w, b)]
    if of_logits:
        z = layout((x.detach() @ w.detach().T + (0 if b is None else b.detach())).contiguous()).requires_grad_()
        leaves, exact = [z], [z.detach().cpu().double().contiguous().requires_grad_()]
        found, scores = log_probs(z, y, entropy=True, mean_logits=True, **options), exact[0]
    else:
        leaves, (x_e, w_e, b_e) = [x, w, b], exact
        found = call(x, w, y, linear_bias=b, entropy=True, mean_logits=True, **options)
        scores = x_e @ w_e.T + (0 if b is None else b_e)
    options = {k: t.cpu() if isinstance(t, torch.Tensor) else t for k, t in options.items()}
    want = truth(scores, y.cpu(), **options)
    got = *found[:3], *torch.autograd.grad(summed(*found[:2]), [t for t in leaves if t is not None])
    want = *want, *torch.autograd.grad(summed(*want[:2]), [t for t in exact if t is not None])
    names = ["p", "h", "mean", *(["dz"] if of_logits else ["dx", "dw", "db"])]
    floors, wrong = roundings(x, w, b, rows=y.numel()), []
    for name, a, e in zip(names, got, want):
        value = name in ("p", "h", "mean")
        if a.dtype != (case.dtype if not value else f64 if case.dtype == f64 else f32) or a.shape != e.shape:
            wrong.append(f"{name} is {a.dtype} {list(a.shape)}")
            continue
        limit = TOLERANCE[f32] if value and case.dtype != f64 else tolerance or TOLERANCE[case.dtype]
        a, e = (t.detach().cpu().double().nan_to_num(nan=9e9, posinf=7.0, neginf=-7.0) for t in (a, e))
        wrong += off(name, a, e, limit, 8 * max(floors.get(name, 0.0), floors["loss"]))
    return wrong


SIZES = (1, 1, 1, 1), (9, 5, 21, 3), (17, 9, 70, 9), (3, 530, 30, 2), (5, 7, 12, 1)
CASES = {
    **{f"{sizes}, {t}, {score}, {kind}": Case(sizes, t, score, kind, bias=score != "scale") for sizes, t, score, kind in grid(SIZES, TEMPERATURES, SCORES, LISTS)},
    "no token": Case((0, 5, 21, 3)), "no feature": Case((9, 0, 21, 3)), "more than there are": Case((3, 5, 4, 11), list="any"),
}
EXTREMES = {
    "200 above": Case((9, 5, 50, 4), offset=200.0), "200 below": Case((9, 5, 50, 4), offset=-200.0),
    "steep": Case((9, 5, 50, 4), spread=100.0), "cold": Case((9, 5, 50, 4), "number", spread=60.0, score="both"),
    "a third is impossible": Case((9, 7, 30, 5), masked=(0, 10)), "all but one are": Case((9, 7, 30, 5), masked=(0, 29)),
}


@pytest.mark.parametrize("name", few(CASES, *[*CASES][1:15:5], "no token", "no feature", "more than there are"))
def test_values_and_gradients_are_the_definition(name, way):
    assert faults(CASES[name], way) == [] and faults(CASES[name], way, of_logits=True) == []


@pytest.mark.parametrize("name", few(EXTREMES, "200 above", "a third is impossible", "all but one are"))
def test_extreme_scores(name, way):
    assert faults(EXTREMES[name], way, 1e-4) == [] and faults(EXTREMES[name], way, 1e-4, of_logits=True) == []


@pytest.mark.parametrize("name", few([*CASES, *EXTREMES], *[*CASES][::3], "no token", *EXTREMES))
def test_float64(name, device):
    case = Case(**{**vars((CASES | EXTREMES)[name]), "dtype": f64})
    assert faults(case, device, 1e-11) == [] and faults(case, device, 1e-11, of_logits=True) == []


def test_impossible_classes_stay_impossible(way):
    x, w, b, _, _ = Case(masked=(0, 10)).tensors(way)
    y = torch.tensor([[0, 15, 3], [4, 1, NONE], [20, 20, 9]], device=way)
    for found in (linear_log_probs(x[:3], w, y, linear_bias=b), log_probs(F.linear(x[:3], w, b), y)):
        assert (found.log_probs == -torch.inf).tolist() == [[True, False, True], [True, True, False], [False, False, True]]
        assert not found.log_probs.isnan().any()


def test_far_from_zero(way):
    "Scores of 10⁶ have steps of 1/16 in float32; what is left is within a few"
    case = Case((9, 5, 50, 4), offset=1e6, list="any")
    x, w, b, y, _ = case.tensors(way)
    want, *_ = truth(x.detach().cpu().double() @ w.detach().cpu().double().T + b.detach().cpu().double(), y.cpu())
    found = linear_log_probs(x, w, y, linear_bias=b).log_probs
    assert (found.cpu() - want).abs().max() < 0.25 and (found <= 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum(), [x, w, b]))


def test_one_class_is_the_function_of_one(way):
    x, w, b, y, options = Case((9, 5, 21, 1), "each", "both").tensors(way)
    for call in (lambda y: linear_log_probs(x, w, y, linear_bias=b, entropy=True, mean_logits=True, **options),
                 lambda y: log_probs(F.linear(x, w, b), y, entropy=True, mean_logits=True, **options)):
        several, one = call(y), call(y[:, 0])
        assert torch.equal(several.log_probs[:, 0], one.log_probs)
        assert torch.equal(several.entropy, one.entropy) and torch.equal(several.mean_logits, one.mean_logits)
        got, want = (torch.autograd.grad(summed(f.log_probs.flatten(), f.entropy), [x, w, b]) for f in (several, one))
        assert all(torch.equal(a, e) for a, e in zip(got, want))


@pytest.mark.parametrize("lead", few([(), (3,), (2, 3), (2, 0)], (), (2, 3), (2, 0)), ids=str)
def test_any_leading_shape(lead, way):
    n = torch.Size(lead).numel()
    x, w, _, y, _ = Case((n, 5, 11, 4), list="any").tensors(way)
    t = torch.linspace(0.5, 2, n, device=way)
    flat = linear_log_probs(x, w, y, temperature=t, entropy=True, mean_logits=True)
    shaped = x.detach().view(*lead, 5).requires_grad_()
    for found in (linear_log_probs(shaped, w, y.view(*lead, 4), temperature=t.view(lead), entropy=True, mean_logits=True),
                  log_probs(shaped @ w.T, y.view(*lead, 4), temperature=t.view(lead), entropy=True, mean_logits=True)):
        assert found.log_probs.shape == (*lead, 4) and found.entropy.shape == found.mean_logits.shape == lead
        assert all(torch.allclose(a.flatten(), e.flatten(), atol=1e-5) for a, e in zip(found[:3], flat))
        assert torch.autograd.grad(found.log_probs.sum(), shaped)[0].shape == shaped.shape


def test_ignored_entries_are_zero_and_their_tokens_are_not_read(way):
    x, w, b, y, _ = Case((9, 5, 21, 3), list="any").tensors(way)
    y[2], y[5, 1], spoilt = NONE, NONE, x.detach().clone()
    spoilt[2] = torch.nan
    calls = lambda x: linear_log_probs(x, w, y, linear_bias=b, entropy=True, mean_logits=True)
    clean, found = calls(x), calls(spoilt.requires_grad_())
    for t in (found.log_probs[y == NONE], found.entropy[2], found.mean_logits[2]):
        assert not t.any() and not t.signbit().any()
    assert all(torch.equal(a, e) for a, e in zip(clean[:3], found[:3]))
    got, want = (torch.autograd.grad(summed(*f[:2]), [leaf, w, b]) for f, leaf in ((found, spoilt), (clean, x)))
    assert all(torch.equal(a, e) for a, e in zip(got, want)) and not got[0][2].any()


@pytest.mark.parametrize("bad", few([torch.nan, torch.inf], torch.nan))
def test_a_token_without_a_softmax_is_alone(bad, way):
    x, w, b, y, _ = Case((20, 5, 60, 3), list="any").tensors(way)
    clean, spoilt = linear_log_probs(x, w, y, entropy=True), x.detach().clone()
    spoilt[3] = bad
    found = linear_log_probs(spoilt.requires_grad_(), w, y, entropy=True)
    rest = torch.arange(20, device=way) != 3
    dx, = torch.autograd.grad((found.log_probs.sum(1) + found.entropy).sum(), spoilt)
    assert found.log_probs[3].isnan().all() and dx[rest].isfinite().all()
    assert all(torch.equal(a[rest], e[rest]) for a, e in zip(found[:2], clean))


@pytest.mark.parametrize("label", few([-1, 21, 2**32 + 3], -1, 2**32 + 3))
def test_an_id_that_is_no_class(label, way, monkeypatch):
    monkeypatch.setenv("FUSEDLOSS_DEBUG", "1")
    x, w, b, y, _ = Case(list="any").tensors(way)
    clean = linear_log_probs(x, w, y, entropy=True)
    y[3, 1] = label
    for call in (lambda: linear_log_probs(x, w, y), lambda: log_probs(x @ w.T, y)):
        with pytest.raises(IndexError, match=rf"target\[3, 1\] is {label}: expected 0 ≤ label < 21"):
            call()
    everywhere(monkeypatch, logprobs, "check_classes", lambda *_: None)
    y[5] = torch.tensor([NONE, label, NONE])
    for call in (lambda: linear_log_probs(x, w, y, entropy=True, mean_logits=True), lambda: log_probs(x @ w.T, y, entropy=True, mean_logits=True)):
        found = call()
        assert found.log_probs.isnan().nonzero().tolist() == [[3, 1], [5, 1]]
        rest = ~found.log_probs.isnan() & (y != NONE)
        assert torch.allclose(found.log_probs[rest], clean.log_probs[rest], atol=1e-5) and torch.allclose(found.entropy[3], clean.entropy[3], atol=1e-5)
        assert found.entropy.isnan().tolist() == found.mean_logits.isnan().tolist() == [i == 5 for i in range(9)]
        dx, = torch.autograd.grad(found.log_probs.nansum(), x)
        assert dx.isfinite().all() and not dx[5].any() and dx[3].any()


def test_what_is_refused(device):
    x, w, b, y, _ = Case(list="any").tensors(device)
    for call in (partial(linear_log_probs, x, w), partial(log_probs, (x @ w.T).detach())):
        with pytest.raises(ValueError, match="target: expected at least one class a row, got"):
            call(y[:, :0])
        with pytest.raises(ValueError, match=r"target: expected shape \[9, 3\], got \[8, 3\]"):
            call(y[:8])
        with pytest.raises(ValueError, match="target_rank: expected False beside several classes a row, got True"):
            call(y, target_rank=True)
        with pytest.raises(ValueError, match=r"temperature: expected a positive number, or a float tensor of the target's shape \[9\]"):
            call(y, temperature=torch.ones(9, 3, device=device))


# Promises


@pytest.mark.parametrize("kind", few(LISTS, "some ignored", "all ignored"))
def test_a_promise_counts_tokens(kind, way):
    x, w, b, y, options = Case((9, 5, 21, 3), "each", list=kind).tensors(way)
    count = int((y != NONE).any(1).sum())
    call = lambda **more: linear_log_probs(x, w, y, linear_bias=b, entropy=True, mean_logits=True, **options, **more)
    plain = call()
    for most in {count, min(count + 2, 9)}:
        found = call(max_valid=most)
        assert all(torch.allclose(a, e, rtol=1e-5, atol=1e-6) for a, e in zip(found[:3], plain))
        a, e = (torch.autograd.grad(summed(*f[:2]), [x, w, b], retain_graph=True) for f in (found, plain))
        assert all(torch.allclose(s, t, rtol=1e-5, atol=1e-5) for s, t in zip(a, e))


def test_a_broken_promise_is_an_error_or_nan(device, monkeypatch):
    x, w, b, y, _ = Case(list="any").tensors(device)
    y[::3] = NONE
    call = lambda most: linear_log_probs(x, w, y, linear_bias=b, entropy=True, mean_logits=True, max_valid=most)
    if device == "cpu":
        with pytest.raises(ValueError, match="max_valid: expected at least the 6 tokens that are not ignored, got 5"):
            call(5)
        everywhere(monkeypatch, logprobs, "check_promise", lambda *_: None)
        everywhere(monkeypatch, logprobs, "packed_rows", blind)
    found = call(5)
    assert all(t.isnan().all() for t in found[:3])
    assert all(g.isnan().any() for g in torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), [x, w, b]))
    assert not any(t.isnan().any() for t in call(6)[:3])


@pytest.mark.parametrize("most", [11, 13])
def test_rows_are_packed_without_looking(most, way, monkeypatch):
    everywhere(monkeypatch, logprobs, "packed_rows", blind)
    assert faults(Case((15, 9, 70, 3), "each", "both"), way, call=partial(linear_log_probs, max_valid=most)) == []


@pytest.mark.parametrize("dtype", few([f32, f64, f16], f32))
def test_a_token_has_the_same_bits_in_every_batch(dtype, way):
    case = Case((20, 9, 75, 5), "each", "both", list="any", dtype=dtype)
    x, w, b, y, options = case.tensors(way)
    t = options.pop("temperature")
    if way == "cpu":  # so that NumPy, which makes the interpreter's products, rounds nothing
        x, w, b = ((4 * s.detach()).round() / 4 for s in (x, w, b))
    def bits(rows, x=x):
        return linear_log_probs(x[rows], w, y[rows], linear_bias=b, temperature=t[rows], entropy=True, batch_invariant=True, **options).log_probs
    own, wide = bits(slice(0, 20)), F.pad(x.detach(), (1, 4), value=torch.nan)[:, 1:-4]
    for rows in (slice(7, 8), slice(3, 10), slice(0, 20, 2)):
        assert torch.equal(bits(rows), own[rows]) and torch.equal(bits(rows, wide), own[rows]), f"rows {rows}"
    assert faults(case, way, 2e-2, call=partial(linear_log_probs, batch_invariant=True)) == []


# Precisions and layouts


@pytest.mark.parametrize("kind", few(LISTS, "some ignored", "one class twice"))
def test_half_precision(kind, way):
    for dtype in (f16, bf16):
        for case in (Case((9, 9, 30, 5), "each", "both", kind, dtype=dtype), Case((9, 24, 40, 3), list=kind, dtype=dtype)):
            if way == "cpu" and dtype == bf16 and logprobs.has_kernel(torch.ones(1, dtype=bf16)):
                continue  # which is wrong in the interpreter
            assert faults(case, way, 2 * TOLERANCE[dtype]) == [] and faults(case, way, 2 * TOLERANCE[dtype], of_logits=True) == []


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_what_cancels_is_not_rounded_before(dtype, device):
    "A class that has all the probability, named several times"
    z = torch.tensor([[0.0, 90.0], [0.0, 90.0], [90.0, 0.0]], device=device).to(dtype).requires_grad_()
    y = torch.tensor([[1, 1, 1], [1, -100, 1], [0, 0, -100]], device=device)
    up = torch.tensor([0.3, -1.7, 0.9], device=device) * torch.tensor([[1.0], [0.77], [1.3]], device=device)
    dz, = torch.autograd.grad(log_probs(z, y).log_probs, z, up)
    assert dz.abs().max() < 1e-6


@pytest.mark.parametrize("name", few(LAYOUTS, "transposed", "part of a wider tensor"))
def test_matrices_of_any_strides(name, way):
    layout = LAYOUTS[name]
    x, w, _, y, _ = Case((9, 7, 40, 3)).tensors(way)
    for a, c in ((layout(x.detach()), w.detach()), (x.detach(), layout(w.detach()))):
        a, c = a.requires_grad_(), c.requires_grad_()
        plain = [t.detach().contiguous().requires_grad_() for t in (a, c)]
        runs = [linear_log_probs(*pair, y, entropy=True) for pair in ((a, c), plain)]
        got, want = (torch.autograd.grad(summed(*f[:2]), pair) for f, pair in zip(runs, ((a, c), plain)))
        floors = roundings(a, c, rows=y.numel())
        assert [off(name, g, e, TOLERANCE[f32], floors[name]) for name, g, e in zip(("dx", "dw"), got, want)] == [[], []]
    assert faults(Case((9, 7, 40, 3), "each"), way, of_logits=True, layout=layout) == []


def test_images_whose_channels_come_last(way):
    "Logits [B,V,h,w] moved to [..., V], a view without rows of one stride"
    z, y = torch.randn(2, 11, 3, 4, device=way, requires_grad=True), torch.randint(11, (2, 3, 4, 5), device=way)
    found, want = log_probs(z.movedim(1, -1), y), z.movedim(1, -1).log_softmax(-1).gather(-1, y)
    assert torch.allclose(found.log_probs, want, atol=1e-5)
    assert torch.allclose(*(torch.autograd.grad((p * torch.linspace(0, 1, p.numel(), device=way).view(p.shape)).sum(), z)[0] for p in (found.log_probs, want)), atol=1e-5)
    deep = torch.randn(2, 3, 11, device=way, requires_grad=True)
    y = torch.randint(11, (2, 3, 5), device=way)
    got, want = (torch.autograd.grad((p * p).sum(), deep)[0] for p in (log_probs(deep, y).log_probs, deep.log_softmax(-1).gather(-1, y)))
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("kind", few([torch.int32, torch.int64, torch.uint8, "strided"], torch.uint8, "strided"))
def test_lists_of_any_kind(kind, way):
    x, w, _, y, _ = Case((13, 5, 21, 4), list="any").tensors(way)
    given = y.repeat_interleave(2, 1)[:, ::2] if kind == "strided" else y.to(kind)
    assert torch.equal(linear_log_probs(x, w, given).log_probs, linear_log_probs(x, w, y).log_probs)
    assert torch.equal(log_probs(x @ w.T, given).log_probs, log_probs(x @ w.T, y).log_probs)


@pytest.mark.parametrize("low", [bf16, f16])
def test_autocast(low, device):
    x, w, b, y, options = Case((9, 16, 40, 3), "each").tensors(device)
    with torch.autocast(device, low):
        found = linear_log_probs(x, w, y, linear_bias=b, entropy=True, **options)
    rounded = [t.detach().to(low).double().requires_grad_() for t in (x, w, b)]
    want = truth(rounded[0] @ rounded[1].T + rounded[2], y, **options)
    assert all(a.dtype == f32 and relative_error(a, e) < 1e-5 for a, e in zip(found[:2], want))
    got, exact = (torch.autograd.grad(summed(*f[:2]), leaves) for f, leaves in ((found, (x, w, b)), (want, rounded)))
    assert all(g.dtype == f32 and relative_error(g, e) < 1e-2 for g, e in zip(got, exact))


def test_a_layer_in_place_of_its_weight(device):
    x, w, b, y, _ = Case().tensors(device)
    layer, table = torch.nn.Linear(5, 21, device=device), torch.nn.Embedding(21, 5, device=device)
    for module, bias in ((layer, layer.bias), (table, None)):
        a, e = linear_log_probs(x, module, y).log_probs, linear_log_probs(x, module.weight, y, linear_bias=bias).log_probs
        assert torch.equal(a, e)
        assert torch.equal(*(torch.autograd.grad(t.sum(), module.weight)[0] for t in (a, e)))


def test_a_learned_scale(device):
    x, w, b, y, _ = Case(dtype=f64).tensors(device)
    s = torch.tensor(1.3, dtype=f64, device=device, requires_grad=True)
    want = torch.autograd.grad(summed(*truth(s.cpu() * (x.cpu() @ w.cpu().T + b.cpu()), y.cpu())[:2]), s)[0]
    for found in (linear_log_probs(x, w, y, linear_bias=b, logit_scale=s, entropy=True), log_probs(F.linear(x, w, b), y, logit_scale=s, entropy=True)):
        assert relative_error(torch.autograd.grad(summed(*found[:2]), s)[0], want) < 1e-10


# A citizen of autograd, compilers and memory


@pytest.mark.thorough
def test_only_what_is_asked_for(way):
    x, w, b, y, _ = Case().tensors(way)
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        leaves = [t.detach().requires_grad_(need) for t, need in zip((x, w, b), needs)]
        found = linear_log_probs(*leaves[:2], y, linear_bias=leaves[2], entropy=True)
        whole = linear_log_probs(x, w, y, linear_bias=b, entropy=True)
        place = needs.index(True)
        got, want = torch.autograd.grad(summed(*found[:2]), leaves[place])[0], torch.autograd.grad(summed(*whole[:2]), (x, w, b)[place])[0]
        assert relative_error(got, want) < TOLERANCE[f32]
    alone = torch.autograd.grad(linear_log_probs(x, w, y, entropy=True).entropy.sum(), w)[0]
    row = y.amax(1)
    assert relative_error(alone, torch.autograd.grad(linear_log_probs(x, w, row, entropy=True).entropy.sum(), w)[0]) < TOLERANCE[f32]


def test_the_same_bits_each_time_and_nothing_changes(way):
    x, w, b, y, options = Case((9, 9, 30, 6), "each", "both", "the same for all").tensors(way)
    given = [x, w, b, y, options["temperature"]]
    before, versions = [t.detach().clone() for t in given], [t._version for t in given]
    def run():
        found = linear_log_probs(x, w, y, linear_bias=b, entropy=True, memory_budget=2**11, **options)
        of_logits = log_probs(F.linear(x, w, b), y, entropy=True, **options)
        return *found[:2], *torch.autograd.grad(summed(*found[:2]), [x, w, b]), *torch.autograd.grad(summed(*of_logits[:2]), [x, w, b])
    runs = [run() for _ in range(2)]
    assert all(torch.equal(a, c) for a, c in zip(*runs))
    assert all(torch.equal(t, c) and t._version == v for t, c, v in zip(given, before, versions))


def test_second_derivatives_are_refused(device):
    x, w, _, y, _ = Case().tensors(device)
    z = (x @ w.T).detach().requires_grad_()
    assert has_no_second_derivative(linear_log_probs(x, w, y).log_probs.sum(), w) and has_no_second_derivative(log_probs(z, y).log_probs.sum(), z)


def test_gradcheck_and_functional_gradients(device):
    x, w, b, y, options = Case((4, 3, 6, 3), "each", "both", dtype=f64).tensors(device)
    call = lambda x, w, b: linear_log_probs(x, w, y, linear_bias=b, entropy=True, **options)[:2]
    assert torch.autograd.gradcheck(call, (x, w, b))
    assert torch.autograd.gradcheck(lambda z: log_probs(z, y, entropy=True, **options)[:2], (F.linear(x, w, b).detach().requires_grad_(),))
    got = torch.func.grad(lambda *leaves: summed(*call(*leaves)), argnums=(0, 1, 2))(x.detach(), w.detach(), b.detach())
    assert all(relative_error(a, e) < 1e-9 for a, e in zip(got, torch.autograd.grad(summed(*call(x, w, b)), [x, w, b])))


@pytest.mark.parametrize("temperature", few(["number", "each"], "each"))
def test_compiled_whole(temperature, device):
    x, w, b, y, _ = Case((9, 7, 40, 3)).tensors(device)
    def step(x, w, b, y):
        t = 0.7 if temperature == "number" else y[:, 0].clamp(min=0) / 10 + 0.5
        found = linear_log_probs(x * 1, w, y, linear_bias=b, temperature=t, entropy=True, mean_logits=True, softcap=9.0)
        of_logits = log_probs(F.linear(x, w, b), y, temperature=t, entropy=True)
        return found.log_probs.sum() + found.entropy.sum() - (of_logits.entropy * found.mean_logits).sum() + (of_logits.log_probs ** 2).sum()
    assert same_gradients_compiled(step, x, w, b, y, (9, 5))


def test_operators_keep_their_contract(device):
    x, w, b, y, _ = Case((5, 4, 7, 3)).tensors(device)
    each, g = torch.linspace(0.4, 2.5, 5, device=device), torch.ones(5, device=device)
    o, _, _ = logprobs.temperature_options(0.7, 1.5, 2.0, NONE)
    stats = Statistics(entropy=True, mean=True)
    torch.library.opcheck(logprobs.listed_log_probs, (x, w, y, b, each, *o, *stats, 0, None, False))
    _, entropy, rows, _, raw = logprobs.listed_log_probs(*(t.detach() for t in (x, w, y, b)), each, o, stats, 0, None, False)
    given = x.detach(), w.detach(), y, b.detach(), each, rows, entropy, raw, *o, 0, None, True, True, True
    torch.library.opcheck(logprobs.listed_grad, (g[:, None].expand(5, 3), g, *given))
    z = F.linear(x, w, b).detach()[:, None].requires_grad_()
    torch.library.opcheck(logprobs.listed_logits, (z, y, each, *o, *stats))
    _, entropy, rows, _ = logprobs.listed_logits(z.detach(), y, each, o, stats)
    torch.library.opcheck(logprobs.listed_logits_grad, (g[:, None].expand(5, 3), g, z.detach(), y, each, rows, entropy, *o))


def test_saved_are_the_inputs_and_a_few_numbers_a_token(device):
    x, w, b, y, _ = Case((40, 16, 300, 5)).tensors(device)
    kept = saved_tensors(lambda: linear_log_probs(x, w, y, linear_bias=b).log_probs, [x, w, b, y])
    assert sum(t.numel() for t in kept) <= (2 + 5) * 40


def test_no_copy_of_the_listed_rows(device, monkeypatch):
    n, h, v, k = 256, 64, 300, 32
    monkeypatch.setattr(dots, "GATHERED", 2**18)
    x, w, _, y, _ = Case((n, h, v, k), bias=False, list="any").tensors(device)
    def run():
        found = linear_log_probs(x, w, y, entropy=True, memory_budget=2**19)
        return torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), [x, w])
    run()
    assert peak_memory(run, device) - x.nbytes - w.nbytes < 2**20 < n * k * h * 4


# Kernels


@where_kernels_run
@pytest.mark.parametrize("dtype", [f32, f16])
@pytest.mark.parametrize("k", few([1, 3, 8, 13], 1, 13))
def test_scores_of_classes_by_the_kernel(k, dtype, device):
    x, w, b, y, _ = Case((7, 37, 30, k), dtype=dtype).tensors(device)
    x, w, b = (t.detach() for t in (x, w, b))
    at = logprobs.known_classes(y, 30, NONE)
    at[3] = -1
    x[3] = torch.nan
    for bias in (None, b):
        got, want = (f(x, w, bias, at, False)[at >= 0] for f in (partial(logprobs.launch_class_scores, BH=16), logprobs.reference_class_scores))
        assert got.dtype == f32 and not off("z", got, want, 1e-5)


# On a GPU


@cuda_only
@pytest.mark.parametrize("sizes", [(300, 256, 1000, 8), (77, 61, 999, 3), (1, 8, 129, 2), (1000, 72, 50257, 20)], ids=str)
@pytest.mark.parametrize("dtype", [bf16, f16, f32, f64])
def test_kernels_on_a_gpu(sizes, dtype):
    for temperature, score, kind in (("one", "bare", "any"), ("each", "both", "some ignored"), ("number", "cap", "the same for all"), ("one", "bare", "one class twice")):
        case = Case(sizes, temperature, score, kind, dtype=dtype, bias=score != "bare")
        tolerance = {f32: 1e-4, f64: 1e-11}.get(dtype, 2 * TOLERANCE[dtype])
        assert faults(case, "cuda", tolerance) == [] and faults(case, "cuda", tolerance, of_logits=True) == []


@cuda_only
@pytest.mark.parametrize("more", [{}, dict(max_valid=200), dict(batch_invariant=True)], ids=str)
@pytest.mark.parametrize("dtype", [bf16, f32, f64])
def test_cuda_graph(more, dtype):
    "Which raises where a step waits for the GPU"
    x, w, b, y, options = Case((300, 64, 1000, 8), "each", "both", "any", dtype=dtype).tensors("cuda")
    y[::2] = NONE
    def step():
        found = linear_log_probs(x, w, y, linear_bias=b, entropy=True, **options, **more)
        of_logits = log_probs(F.linear(x, w, b), y, entropy=True, **options)
        grads = torch.autograd.grad(summed(*found[:2]) + summed(*of_logits[:2]), [x, w, b])
        return *(t.detach() for t in found[:2]), *grads
    assert replays(step)


@cuda_only
def test_memory_of_the_kernels():
    n, h, v, k = 4096, 1024, 32768, 16
    x, w, _, y, _ = Case((n, h, v, k), bias=False, list="any", dtype=bf16).tensors("cuda")
    def run(y):
        return torch.autograd.grad(linear_log_probs(x, w, y).log_probs.sum(), [x, w])
    of_one, of_all = (peak_memory(partial(run, given), "cuda") for given in (y[:, 0], y))
    assert of_all - of_one < n * k * 64 < n * k * h * 2
