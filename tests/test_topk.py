"""The k largest scores of hidden states: order, ties, log-probabilities and gradients against float64, both ways, hostile rows, promises, planted bugs."""
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import fusedloss.topk as topk
from fusedloss import linear_divergence, linear_topk
from fusedloss.core.options import LossOptions
from fusedloss.core.tiling import Tiling
from grids import thorough_but
from helpers import TOLERANCE, everywhere, has_no_second_derivative, need_kernels, off, planted, replays, roundings, where_kernels_run
from workbook.measure import peak_memory, saved_tensors

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter


@pytest.fixture(params=["plain", "kernels"])
def way(request, device, monkeypatch):
    "The device, on which either PyTorch or the kernels take everything they can"
    if request.param == "kernels":
        need_kernels(device)
    everywhere(monkeypatch, topk, "takes_kernel", lambda x: request.param == "kernels" and x.dtype != f64 and len(x) > 0)
    return device


def right_order(z, k):
    "Classes of each row of z [N,V] by Python: the largest first, of equal ones the lower"
    rows = z.detach().tolist()
    return torch.tensor([sorted(range(len(row)), key=lambda v: (-row[v], v))[:k] for row in rows], dtype=torch.int64).view(len(rows), k).to(z.device)


def scores(x, w, b=None, *, temperature=1.0, logit_scale=1.0, softcap=None):
    "Scores [N,V] in float64, by their definition"
    z = logit_scale * (x.double() @ w.double().T + (0 if b is None else b.double()))
    if isinstance(temperature, torch.Tensor): temperature = temperature.double()[:, None]
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


HOW = {"bare": {}, "scale": dict(logit_scale=1.5), "cool": dict(temperature=0.6), "cap": dict(softcap=3.0),
       "all": dict(logit_scale=0.5, softcap=2.0, temperature=1.7)}


@dataclass(frozen=True)
class Case:
    "One call: sizes N, H, V, and what it asks for"
    sizes: tuple[int, int, int] = (9, 5, 83)
    k: int = 4
    how: str = "bare"
    bias: bool = True
    dtype: torch.dtype = f32
    budget: int | None = None
    masked: int = 0  # classes whose score is -inf
    upstream: str = "both"
    each: bool = False  # a temperature for each token

    def leaves(self, device):
        "x, w, b (or None): float64 numbers, rounded"
        (n, h, v), made = self.sizes, torch.Generator().manual_seed(0)
        draw = lambda *size: torch.randn(size, generator=made, dtype=f64)
        b = draw(v)
        b[:self.masked] = -torch.inf
        x, w, b = (t.to(device, self.dtype).requires_grad_() for t in (draw(n, h), 2 * draw(v, h) / h**0.5, b))
        return x, w, b if self.bias else None

    def options(self, device):
        "What `how` names, and temperatures from 0.4 to 2"
        each = {"temperature": torch.linspace(0.4, 2, self.sizes[0], dtype=f64 if self.dtype == f64 else f32, device=device)}
        return HOW[self.how] | (each if self.each else {})


def weighed(upstream, log_probs, lse):
    "A number whose gradient is asked for"
    ramp = lambda t: torch.linspace(-1, 2, t.numel(), dtype=t.dtype, device=t.device).view(t.shape)
    finite = torch.where(log_probs > -torch.inf, log_probs, 0.0)
    parts = dict(log_probs=(ramp(log_probs) * finite).sum(), lse=(ramp(lse) * lse).sum(), mean=finite.mean(), square=(finite * finite).sum())
    return parts["log_probs"] + parts["lse"] if upstream == "both" else parts[upstream]


def faults(module, case, device) -> list[str]:
    "What `linear_topk` of a module gets wrong on `case`, in words"
    leaves, how = case.leaves(device), case.options(device)
    found = module.linear_topk(*leaves[:2], case.k, linear_bias=leaves[2], memory_budget=case.budget, **how)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in leaves]
    z = scores(*exact, **how)
    logs, order = z.log_softmax(1), right_order(z, case.k)
    right = logs.gather(1, order), z.logsumexp(1)
    wrong = [] if torch.equal(found.indices, order) or (logs.gather(1, found.indices) - right[0]).abs().nan_to_num(0).max() < 1e-5 else ["indices"]
    wide = f64 if case.dtype == f64 else f32
    wrong += [f"{name} is {t.dtype}" for name, t in zip(("log_probs", "lse"), (found.log_probs, found.lse)) if t.dtype != wide]
    given = [t for t in leaves if t is not None]
    got = torch.autograd.grad(weighed(case.upstream, found.log_probs, found.lse), given)
    want = torch.autograd.grad(weighed(case.upstream, *right), [t for t in exact if t is not None])
    floors = roundings(*given, rows=case.sizes[0])
    for name, a, e, at_most in (("p", found.log_probs, right[0], TOLERANCE[wide]), ("lse", found.lse, right[1], TOLERANCE[wide]),
                                *((name, a, e, TOLERANCE[case.dtype]) for name, a, e in zip(("dx", "dw", "db"), got, want))):
        a, e = (t.detach().cpu().double().nan_to_num(nan=9e9, neginf=-7.0) for t in (a, e))
        wrong += off(name, a, e, at_most, 8 * max(floors.get(name, 0.0), floors["loss"]))
    return wrong


CASES = {
    "argmax": Case(k=1), "argmax, capped": Case(k=1, how="cap"), "fp64": Case(dtype=f64, k=7), "all options": Case(how="all", k=6), "scale": Case(how="scale"),
    "cool": Case(how="cool"), "cap": Case(how="cap", k=10), "no bias": Case(bias=False), "all classes": Case(k=83), "more than the kernel's rounds": Case(k=70),
    "one class": Case((3, 4, 1), 1), "one token": Case((1, 5, 40), 3), "odd": Case((33, 17, 129), 20), "many tiles": Case((5, 8, 700), 30),
    "half": Case(dtype=f16, how="scale"), "half, capped": Case(dtype=f16, how="cap", k=12), "budget": Case((40, 8, 300), 5, budget=2**13),
    "masked": Case(masked=40, k=50), "squares": Case(upstream="square", k=9), "mean": Case(upstream="mean"), "lse alone": Case(upstream="lse"),
    "log_probs alone": Case(upstream="log_probs"), "each token's temperature": Case(each=True, k=10), "each, all options": Case(each=True, how="all", k=6),
    "each, fp64": Case(each=True, how="cap", dtype=f64), "each, argmax": Case(each=True, k=1, bias=False), "each, half": Case(each=True, how="cap", dtype=f16, k=12),
    "each, budget": Case((40, 8, 300), 5, how="all", budget=2**13, each=True), "each, sorted": Case(each=True, how="cap", k=70),
}


@pytest.mark.parametrize("name", thorough_but(CASES, "argmax, capped", "fp64", "all options", "more than the kernel's rounds", "one class", "many tiles", "half, capped",
                                              "masked", "squares", "lse alone", "log_probs alone", "each, all options", "each, fp64", "each, half"))
def test_against_float64(name, way):
    assert faults(topk, CASES[name], way) == []


@pytest.mark.parametrize("dtype", (bf16, f16))
def test_halves_in_pytorch(dtype, device):
    assert faults(topk, Case(dtype=dtype, k=5), device) == []


@pytest.mark.parametrize("k", thorough_but((1, 3, 20, 64, 65, 90), 1, 20, 65))
def test_equal_scores_go_to_the_lower_class(k, way):
    "Small integers, whose scores every sum makes exactly; many are equal"
    made = torch.Generator().manual_seed(1)
    x, w = (torch.randint(-2, 3, size, generator=made).to(way, f32) for size in ((12, 3), (90, 3)))
    found, z = linear_topk(x, w, k), scores(x, w)
    order = right_order(z, k)
    assert torch.equal(found.indices, order)
    torch.testing.assert_close(found.log_probs.double(), z.log_softmax(1).gather(1, order), rtol=1e-6, atol=1e-6)
    same = linear_topk(torch.ones(2, 3, device=way), torch.ones(90, 3, device=way), k)
    assert torch.equal(same.indices, torch.arange(k, device=way).expand(2, k))


@pytest.mark.parametrize("k", thorough_but((1, 5, 70), 1, 5))
def test_neighbours_in_fp32(k, way):
    "Scores of one step of fp32 at 2²³ are told apart: no maximum is scaled before it is compared"
    steps = torch.randperm(100, generator=torch.Generator().manual_seed(2)).to(way, f32)
    w = torch.stack([torch.full_like(steps, 2.0**23), steps], 1)
    found = linear_topk(torch.ones(3, 2, device=way), w, k)
    assert torch.equal(found.indices, steps.argsort(descending=True)[:k].expand(3, k))
    torch.testing.assert_close(found.log_probs[0].double(), steps.double().log_softmax(0).sort(descending=True).values[:k], rtol=1e-6, atol=1e-6)


def test_hostile_rows(way):
    x, w, b = Case((6, 4, 75), bias=True).leaves(way)
    clean = linear_topk(x, w, 5, linear_bias=b)
    spoilt = x.detach().clone()
    spoilt[1], spoilt[4, 2] = torch.nan, torch.inf
    found = linear_topk(spoilt, w, 5, linear_bias=b)
    bad, good = torch.tensor([1, 4], device=way), torch.tensor([0, 2, 3, 5], device=way)
    assert found.log_probs[bad].isnan().all() and (found.indices >= 0).all() and (found.indices < 75).all()
    for a, e in zip(found, clean): assert torch.equal(a[good], e[good])
    nothing = linear_topk(x, w, 5, linear_bias=torch.full_like(b, -torch.inf))
    assert nothing.log_probs.isnan().all() and torch.equal(nothing.indices, torch.arange(5, device=way).expand(6, 5))
    each = torch.tensor([1.0, torch.nan, 0.5, 2.0, -1.0, 1.0], device=way)  # as nobody looks at on a GPU
    log_probs, indices, lse, *_ = topk.topk_of_rows(x, w, b, each, LossOptions(), 5, 0)
    assert log_probs[bad].isnan().all() and lse[bad].isnan().all() and (indices >= 0).all() and (indices < 75).all()
    (dx,) = torch.autograd.grad(log_probs[good].sum(), x)
    assert dx[good].isfinite().all() and log_probs[good].isfinite().all()
    w_bad = w.detach().clone()
    w_bad[70:] = torch.nan  # a class that no row can do without
    found = linear_topk(x, w_bad, 75, linear_bias=b)
    assert found.log_probs.isnan().all() and torch.equal(found.indices.sort(1).values, torch.arange(75, device=way).expand(6, 75))


def test_an_offset_of_all_scores(way):
    x, w, _ = Case((6, 4, 75), bias=False).leaves(way)
    far = linear_topk((x * 0 + 1).round(), (w * 8).round(), 5, linear_bias=torch.full_like(w[:, 0], 1e6))
    near = linear_topk((x * 0 + 1).round(), (w * 8).round(), 5)
    assert torch.equal(far.indices, near.indices)
    torch.testing.assert_close(far.log_probs, near.log_probs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", thorough_but((1, 4), 1))
def test_shapes_and_strides(k, way):
    x, w, b = Case((12, 5, 83)).leaves(way)
    flat = linear_topk(x, w, k, linear_bias=b)
    for lead in ((3, 4), (2, 3, 2), (12,)):
        found = linear_topk(x.view(*lead, 5), w, k, linear_bias=b)
        assert found.log_probs.shape == found.indices.shape == (*lead, k) and found.lse.shape == lead and found.indices.dtype == torch.int64
        for a, e in zip(found, flat): assert torch.equal(a.view(e.shape), e)
    one = linear_topk(x[0], w, k, linear_bias=b)
    assert one.log_probs.shape == (k,) and one.lse.shape == ()
    each = torch.linspace(0.4, 2, 24, device=way)[::2]
    whole = linear_topk(x, w, k, linear_bias=b, temperature=each)
    for a, e in zip(linear_topk(x.view(3, 4, 5), w, k, linear_bias=b, temperature=each.view(3, 4)), whole): assert torch.equal(a.view(e.shape), e)
    for a, e in zip(linear_topk(x[0], w, k, linear_bias=b, temperature=each[0]), whole): torch.testing.assert_close(a, e[0])
    strided = linear_topk(x.T.contiguous().T, torch.cat([w, w], 1)[:, :5], k, linear_bias=torch.stack([b, b], 1)[:, 0])
    for a, e in zip(strided, flat): torch.testing.assert_close(a, e)
    expanded = linear_topk(x[:1].expand(7, 5), w, k, linear_bias=b)
    assert torch.equal(expanded.indices, flat.indices[:1].expand(7, k))
    empty = linear_topk(x[:0], w, k, linear_bias=b)
    assert empty.log_probs.shape == (0, k) and empty.lse.shape == (0,)
    assert all((g == 0).all() for g in torch.autograd.grad(empty.log_probs.sum() + empty.lse.sum(), (x, w, b)))


@where_kernels_run
@pytest.mark.parametrize("n, slots, n_tiles, size", ((1, 1, 1, 16), (7, 3, 5, 16), (50, 2, 3, 16), (40, 4, 4, 32), (3, 2, 200, 16), (300, 2, 3, 16)))
def test_blocks_hold_each_pair_once(n, slots, n_tiles, size, device):
    made = torch.Generator().manual_seed(n)
    tiles = torch.stack([torch.randperm(n_tiles, generator=made)[:slots] for _ in range(n)]).to(device)
    by_tile, pairs, blocks = topk.tile_blocks(tiles, n_tiles, size)
    assert torch.equal(tiles.flatten()[pairs], by_tile.long()) and torch.equal(by_tile, by_tile.sort().values)
    held = []
    for first in blocks[blocks >= 0].tolist():
        lanes = range(first, min(first + size, n * slots))
        held += [i for i in lanes if by_tile[i] == by_tile[first]]
    assert sorted(held) == list(range(n * slots))
    none = torch.where(torch.rand(tiles.shape, generator=made).to(device) < 0.4, n_tiles, tiles)  # which stands for no tile
    by_tile, pairs, blocks = topk.tile_blocks(none, n_tiles, size)
    held = [pairs[i].item() for first in blocks[blocks >= 0].tolist() for i in range(first, min(first + size, n * slots)) if by_tile[i] == by_tile[first]]
    assert sorted(held) == (none.flatten() < n_tiles).nonzero().flatten().tolist()


@where_kernels_run
@pytest.mark.parametrize("k, m", ((1, 1), (1, 100), (20, 100), (64, 64), (64, 300), (5, 8192), (65, 100), (20, 17000)))
def test_the_kernel_that_selects(k, m, device):
    made = torch.Generator().manual_seed(k)
    z = torch.randint(-9, 9, (3, m), generator=made).to(device, f32)
    z[1, m // 2:], z[2, ::3] = -torch.inf, -0.0
    for layout in (z, z.T.contiguous().T):
        for a, e in zip(topk.launch_best(layout, k), topk.sorted_best(z, k)): assert torch.equal(a, e)
    counts = torch.tensor([m, k, 0], device=device)  # of numbers that count
    known = torch.where(torch.arange(m, device=device) < counts[:, None], z, -torch.inf)
    for a, e in zip(topk.launch_best(z, k, counts), topk.sorted_best(known, k)): assert torch.equal(a, e)


@where_kernels_run
@pytest.mark.parametrize("dtype", (f32, f16))
def test_the_kernel_of_listed_tiles(dtype, device):
    x, w, b = (t.detach() for t in Case((21, 40, 200), dtype=dtype).leaves(device))
    tiles = torch.stack([torch.randperm(7)[:2].sort().values for _ in range(21)]).to(device)
    t = Tiling(False, 16, 32, 32, warps=4)
    for each in (None, torch.linspace(0.4, 2, 21, device=device)):
        found = topk.launch_listed_scores(x, w, b, each, tiles, LossOptions(softcap=2.0), t).view(21, 2, 32)
        z = scores(x, w, b, softcap=2.0, temperature=1.0 if each is None else each)
        z = F.pad(z, (0, -200 % 32), value=-torch.inf).unflatten(1, (-1, 32))
        torch.testing.assert_close(found.double(), z.take_along_dim(tiles[:, :, None], 1), rtol=1e-5, atol=1e-5)


# --- a citizen of autograd and of the compiler ---

@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
def test_gradients_where_they_are_asked_for(needs, way):
    leaves = Case().leaves(way)
    whole = torch.autograd.grad(weighed("both", *linear_topk(*leaves[:2], 4, linear_bias=leaves[2])[::2]), leaves)
    given = [t.detach().requires_grad_(bool(n)) for t, n in zip(leaves, needs)]
    found = linear_topk(*given[:2], 4, linear_bias=given[2])
    assert found.log_probs.requires_grad == found.lse.requires_grad == any(needs) and not found.indices.requires_grad
    if any(needs):
        got = torch.autograd.grad(weighed("both", *found[::2]), [t for t, n in zip(given, needs) if n])
        for a, e in zip(got, [e for e, n in zip(whole, needs) if n], strict=True): torch.testing.assert_close(a, e)


def test_gradcheck():
    x, w, b = Case((3, 3, 9), dtype=f64).leaves("cpu")
    for temperature in (1.0, torch.tensor([0.4, 1.0, 2.5], dtype=f64)):
        assert torch.autograd.gradcheck(lambda *t: linear_topk(*t[:2], 4, linear_bias=t[2], softcap=2.0, temperature=temperature)[::2], (x, w, b))
    assert has_no_second_derivative(linear_topk(x, w, 4).log_probs.sum(), w)


def test_a_learned_scale(way):
    x, w, b = Case().leaves(way)
    s = torch.tensor(1.3, device=way, requires_grad=True)
    got = torch.autograd.grad(linear_topk(x, w, 4, linear_bias=b, logit_scale=s).log_probs.sum(), (x, s))
    want = torch.autograd.grad((s * (x @ w.T + b)).log_softmax(1).topk(4).values.sum(), (x, s))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_modules_and_autocast(device):
    layer = torch.nn.Linear(5, 83).to(device)
    x = torch.randn(7, 5, device=device)
    for a, e in zip(linear_topk(x, layer, 3), linear_topk(x, layer.weight, 3, linear_bias=layer.bias)): assert torch.equal(a, e)
    table = torch.nn.Embedding(83, 5).to(device)
    for a, e in zip(linear_topk(x, table, 3), linear_topk(x, table.weight, 3)): assert torch.equal(a, e)
    with torch.autocast(device, bf16): found = linear_topk(x, layer, 3)
    half = [t.to(bf16) for t in (x, layer.weight, layer.bias)]
    for a, e in zip(found, linear_topk(*half[:2], 3, linear_bias=half[2])): assert torch.equal(a, e)


def test_one_graph_for_any_number_of_rows(device):
    x, w, b = Case((40, 5, 83)).leaves(device)
    call = lambda x, t: linear_topk(x, w, 4, linear_bias=b, temperature=t)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for n, t in ((7, 0.7), (40, 0.7), (3, 1.4)):
        grads = lambda f: torch.autograd.grad(weighed("both", *f(x[:n], t)[::2]), (x, w, b))
        assert torch.equal(compiled(x[:n], t).indices, call(x[:n], t).indices)
        torch.testing.assert_close(grads(compiled), grads(call))


def test_one_graph_for_a_temperature_of_each_token(device):
    x, w, b = Case((40, 5, 83)).leaves(device)
    call = lambda x, t: linear_topk(x, w, 4, linear_bias=b, temperature=t, softcap=2.0)
    compiled, each = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True), torch.linspace(0.4, 2, 40, device=device)
    for n in (7, 40, 3):
        grads = lambda f: torch.autograd.grad(weighed("both", *f(x[:n], each[:n])[::2]), (x, w, b))
        torch.testing.assert_close(grads(compiled), grads(call))


def test_what_is_stored(way):
    x, w, b = Case((40, 5, 83)).leaves(way)
    kept = saved_tensors(lambda: linear_topk(x, w, 4, linear_bias=b).log_probs, [x, w, b])
    assert sum(t.numel() for t in kept) == 40 * (2 * 4 + 2)


def test_a_budget_has_room_for_autocasts_copies():
    "Of operands without a gradient: of others the float32 gradient has their bytes, and those of the gradient in 16 bits"
    x, w = torch.randn(4096, 512), torch.randn(256, 512)
    copies = 2 * (x.numel() + w.numel())
    budget = 3 * copies // 2
    with torch.autocast("cpu", bf16):
        assert peak_memory(lambda: linear_topk(x, w, 2, memory_budget=budget), "cpu") < budget + 2**17
        with pytest.raises(ValueError, match=f"memory_budget: expected more than the {copies} bytes of autocast's"):
            linear_topk(x, w, 2, memory_budget=copies)
        x.requires_grad_()
        assert peak_memory(lambda: torch.autograd.grad(linear_topk(x, w, 2, memory_budget=budget).log_probs.sum(), x), "cpu") - x.nbytes < budget + 2**17
        loss = linear_topk(x, w, 2, memory_budget=10 * copies).log_probs
        assert torch.equal(loss, linear_topk(x, w, 2).log_probs)


def test_the_budget_bounds_memory():
    x, w = torch.randn(400, 4), torch.randn(5000, 4)
    assert peak_memory(lambda: linear_topk(x, w, 3, memory_budget=2**20)) < 2**20 < 400 * 5000 * 4


@cuda_only
@pytest.mark.parametrize("k", (1, 20, 64))
def test_the_budget_bounds_memory_on_a_gpu(k):
    x, w = (torch.randn(n, 64, device="cuda").to(bf16) for n in (4096, 2**16))
    results = 4096 * (k * (4 + 8 + 4) + 4 * 4)
    assert peak_memory(lambda: linear_topk(x, w, k, memory_budget=2**24), "cuda") < 2**24 + results + 2**20


@cuda_only
def test_no_waiting_on_a_gpu():
    x, w = (torch.randn(n, 64, device="cuda").to(bf16).requires_grad_() for n in (300, 5003))
    def step():
        found = linear_topk(x, w, 20)
        return found.indices, *torch.autograd.grad(found.log_probs.sum(), (x, w))
    assert replays(step)


@pytest.mark.parametrize("k", (0, -1, 84, 2.0, True, "3", None))
def test_k_is_a_number_of_classes(k):
    x, w, _ = Case().leaves("cpu")
    with pytest.raises(ValueError, match=r"k: expected an integer from 1 to 83, got"): linear_topk(x, w, k)


@pytest.mark.parametrize("temperature", (0.0, -1.0, float("nan"), "1"))
def test_a_temperature_is_positive(temperature):
    x, w, _ = Case().leaves("cpu")
    with pytest.raises(ValueError, match="temperature: expected a positive number, or"): linear_topk(x, w, 3, temperature=temperature)


@pytest.mark.parametrize("change, words", ((lambda t: t[:8], "leading shape"), (lambda t: t[:, None], "leading shape"), (lambda t: t.long(), "leading shape"),
                                           (lambda t: t.requires_grad_(), "without gradient"), (lambda t: t - 1, "positive, finite numbers"),
                                           (lambda t: t * torch.inf, "positive, finite numbers"), (lambda t: t.to("meta"), "leading device")))
def test_temperatures_are_one_for_each_token(change, words):
    x, w, _ = Case().leaves("cpu")
    with pytest.raises(ValueError, match=f"temperature: expected .*{words}"): linear_topk(x, w, 3, temperature=change(torch.ones(9)))


def test_lists_for_distillation(device):
    "All of the teacher's classes as a list: the divergence is that from its head"
    (x, w, b), (t_x, t_w, _) = Case(dtype=f64).leaves(device), Case(dtype=f64).leaves(device)
    with torch.no_grad(): found = linear_topk(t_x * 0.5, t_w, 82)
    got = linear_divergence(x, w, linear_bias=b, teacher_top=(found.indices, found.log_probs))
    torch.testing.assert_close(got, linear_divergence(x, w, t_x * 0.5, t_w, linear_bias=b), rtol=1e-6, atol=1e-6)


BUGS = {
    "ties to the higher tile": ("best, _ = best.sort(1)", "best, _ = best.sort(1, descending=True)"),
    "one tile too few": ("min(k, tiles.shape[1])", "max(1, min(k - 1, tiles.shape[1]))"),
    "the others' share is forgotten": ("g_lse - others.sum(1)", "g_lse"),
    "the cap's slope is forgotten": ("(1 - (scores * cool / o.softcap) ** 2)", "1"),
    "the slope knows no temperature": ("o.logit_scale / cool *", "o.logit_scale *"),
    "the cap knows no temperature": ("scores * cool", "scores"),
    "chunks share temperatures": ("each = part(temperature, i)", "each = None if temperature is None else temperature[:len(z)]"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug, tmp_path):
    bad = planted(topk, tmp_path, *BUGS[bug])
    cases = Case((9, 3, 2000), 3), Case(how="cap", k=10), Case((40, 8, 300), 5, how="all", budget=2**13, each=True)
    assert any(faults(bad, case, "cpu") for case in cases) or not ties_right(bad)


def ties_right(module):
    "Whether equal scores of far classes come in order"
    return torch.equal(module.linear_topk(torch.ones(2, 3), torch.ones(2000, 3), 5).indices, torch.arange(5).expand(2, 5))
