"""Gradient filtering: what stands for a dropped tile is bounded and named, what is kept is exact, planted bugs show."""
import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st

import fusedloss.filter as with_filter
from fusedloss.core.options import LossOptions, NO_STATISTICS, statistics_of
from fusedloss.filter import recompute_linear_cross_entropy as loss_of
from workbook.measure import peak_memory, relative_error, saved_tensors
from grids import FULL, few, thorough_but
from helpers import TOLERANCE, everywhere, first_fault_of, interpreted, off, planted, replays, roundings, same_gradients_compiled, unchanged
from test_kernels import OPTIONS, REDUCTIONS, exact
from test_recompute import LAYOUTS, cuda_only, short_runs, way  # noqa: F401 (a fixture)

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
PLAIN = {name: options for name, options in OPTIONS.items() if not options.get("label_smoothing")}
EPS = 0.02


def skewed(n=30, h=9, v=90, dtype=f64, device="cpu", offset=0.0):
    "Leaves x, w, b and labels of a problem most of whose tiles hold nothing; classes in no order"
    g = torch.Generator().manual_seed(1)
    draw = lambda *size: torch.randn(size, generator=g, dtype=f64)
    x, w, b = draw(n, h), 1.5 * draw(v, h) / h**0.5, -6 * torch.rand(v, generator=g, dtype=f64) ** 2 * 3 + offset
    b = b[torch.randperm(v, generator=g)]
    y = (x @ w.T + b).softmax(1).multinomial(1, generator=g)[:, 0] if v > 1 else torch.zeros(n, dtype=torch.long)
    y[1::7] = -100
    return [t.to(device, dtype).requires_grad_() for t in (x, w, b)] + [y.to(device)]


def upstream(losses):
    return torch.linspace(-1, 2, losses.numel(), dtype=losses.dtype, device=losses.device).view(losses.shape)


def tiles_of(module, x, options, stats):
    "Rows and columns of a tile"
    o = LossOptions(softcap=options.get("softcap") or 0.0)
    t = module.filter_tiling(x, o, stats)
    return t.BN, t.BV


def by_definition(module, x, w, b, y, eps, options, stats=False, ignore_index=-100):
    "Losses, dx, dw, db in float64 by the rule itself: order, tiles, what stands for dropped ones; and the share kept"
    bn, bv = tiles_of(module, x, options, stats)
    run = module.run_length(len(x), -(-len(w) // bv)) if module.takes_kernel(x) else 1
    order = module.order_tiles(x.detach(), w.detach(), y, b.detach(), LossOptions(
        ignore_index, logit_scale=options.get("logit_scale", 1.0), softcap=options.get("softcap") or 0.0))
    classes, tokens = (t.long().cpu() for t in order)
    leaves = [t.detach().double().cpu().requires_grad_() for t in (x, w, b)]
    x, w, b = leaves
    y, v, options = y.cpu(), len(w), dict(options)
    weights = {k: options.pop(k).cpu() for k in ("weight", "token_weight") if k in options}
    valid = y != ignore_index
    raw = x @ w.T + b
    e = exact(raw, y, weights.get("weight"), ignore_index=ignore_index, **options, **{k: t for k, t in weights.items() if k != "weight"})
    dz, = torch.autograd.grad((e.losses * upstream(e.losses)).sum(), raw, retain_graph=True)
    z = raw.detach() * options.get("logit_scale", 1.0)
    cap = options.get("softcap")
    z = cap * (z / cap).tanh() if cap else z
    p, width, scale = z.softmax(1), bv * run, options.get("logit_scale", 1.0)
    slope = lambda z: scale * (1 - (z / cap) ** 2 if cap else torch.ones_like(z))
    own = torch.zeros(len(y), v, dtype=torch.bool)
    own[torch.arange(len(y))[valid], y[valid]] = True
    felt = (p * slope(z)).masked_fill(own, 0.0)
    best = felt.abs().argmax(1, keepdim=True)  # there dz is the row's pull times `felt`
    pull = torch.where(felt.gather(1, best) == 0, 0.0, dz.gather(1, best) / felt.gather(1, best))
    def sort_of(entries, fill=0):
        "Entries in order, cut into runs, and blocks of tokens"
        entries = F.pad(entries[tokens][:, classes], (0, -v % width, 0, -len(y) % bn), value=fill)
        return entries.view(-(-len(y) // bn), bn, -(-v // width), width)
    runs = sort_of(own | ((p >= eps) & valid[:, None])).any(3).any(1)
    size = sort_of(torch.ones_like(p))[0, 0].sum(1)
    mean = sort_of(p).sum(3) / size  # [blocks, BN, runs]
    mean = mean.flatten(0, 1)[:len(y)]
    stand = mean * slope(z.logsumexp(1)[tokens, None] + mean.log()) * pull[tokens]
    wide = lambda t: t.repeat_interleave(width, 1)[:len(y), :v]
    seen = torch.where(wide(runs.repeat_interleave(bn, 0)), dz[tokens][:, classes], wide(stand))
    used = torch.zeros_like(dz)
    used[tokens[:, None], classes] = seen
    tiles = runs.repeat_interleave(run, 1)[:, :-(-v // bv)]
    return (e.losses.detach(), used @ w.detach(), used.T @ x.detach(), dz.sum(0)), tiles.double().mean().item()


def step(module, x, w, b, y, eps, **options):
    "Losses and gradients of the filtered loss under an uneven upstream gradient"
    losses = module.recompute_linear_cross_entropy(x, w, y, linear_bias=b, reduction="none", filter_eps=eps, **options)
    return losses.detach(), *torch.autograd.grad((losses * upstream(losses)).sum(), [x, w, b])


def prepared(options, x, w):
    "Options with their weights made"
    options = dict(options)
    if options.pop("weight", False):
        options["weight"] = 0.2 + torch.arange(len(w), device=x.device) % 5 / 4.0
    if options.pop("token_weight", False):
        options["token_weight"] = 0.1 + torch.arange(len(x), device=x.device) % 3 / 2.0
    return options


SIZES = {"cpu": (30, 9, 90), "cuda": (300, 9, 1500)}  # of several tiles each


def faults(module, device, sizes=None, eps=EPS, options={}, dtype=f32, tolerance=2e-5, share=(0.0, 0.99), **more):
    "What the filtered loss gets wrong, in words"
    x, w, b, y = skewed(*(sizes or SIZES[device]), dtype=dtype, device=device)
    options = prepared(options, x, w)
    want, kept = by_definition(module if module is with_filter else TRUE, x, w, b, y, eps, options)
    got, wrong = step(module, x, w, b, y, eps, **options, **more), []
    if not share[0] <= kept <= share[1]:
        wrong.append(f"{kept:.0%} of the tiles are kept: nothing is tested")
    floors = roundings(x, w, b, len(y))
    for (name, floor), a, e in zip(floors.items(), got, want):
        wrong += off(name, a, e, tolerance, floor)
    return wrong


# What is kept, what is left out


@pytest.mark.parametrize("name", few(PLAIN, "plain", "scale and cap", "token_weight"))
def test_dropped_tiles_and_no_others(name, way):
    assert faults(with_filter, way, options=PLAIN[name]) == []


@pytest.mark.parametrize("sizes", few([(1, 1, 1), (7, 3, 10), (47, 13, 123), (33, 16, 257), (20, 5, 400)], (1, 1, 1), (20, 5, 400)), ids=str)
def test_ragged_sizes(sizes, way):
    for budget in few((None, 2**11), 2**11):
        assert faults(with_filter, way, sizes, share=(0, 1), memory_budget=budget) == []


LISTED = list(itertools.product([(300, 16, 330), (70, 7, 100)], [(None, EPS), (2**11, EPS), (2**11, 1e-30)]))


@pytest.mark.parametrize("sizes, how", few(LISTED, ((70, 7, 100), (2**11, 1e-30))), ids=str)
def test_the_list_of_kept_tiles_leaves_the_same_ones_out(sizes, how, way):
    "With a bias to differentiate every tile of dz is made, without one those of a list"
    budget, eps = how
    x, w, b, y = skewed(*sizes, dtype=bf16 if way == "cuda" else f32, device=way)
    def step(b):
        loss = loss_of(x, w, y, linear_bias=b, filter_eps=eps, memory_budget=budget and budget + 4 * x.numel())
        return torch.autograd.grad(loss, [x, w])
    assert all(torch.equal(listed, made) for listed, made in zip(step(b.detach()), step(b)))


@pytest.mark.parametrize("name", ["plain", "scale and cap"])
def test_float64(name, device):
    assert faults(with_filter, device, options=PLAIN[name], dtype=f64, tolerance=1e-11) == []


@settings(max_examples=4 if FULL else 2, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 120), st.floats(0.001, 0.9), st.sampled_from(list(PLAIN.values())))
def test_any_sizes_and_thresholds(way, n, h, v, eps, options):
    assert faults(with_filter, way, (n, h, v), eps, options, share=(0, 1), memory_budget=2**12) == []


def test_a_threshold_nothing_is_below_leaves_the_gradients(way):
    x, w, b, y = skewed(dtype=f32, device=way)
    for a, e in zip(step(with_filter, x, w, b, y, 1e-300), step(with_filter, x, w, b, y, None)):
        assert relative_error(a, e) < TOLERANCE[f32]


@pytest.mark.parametrize("eps", [2**-10, 0.02, 0.5, 0.999])
def test_the_bound(eps, device):
    x, w, b, y = skewed(device=device)
    got, exact_ = step(with_filter, x, w, b, y, eps), step(with_filter, x, w, b, y, None)
    up, valid = upstream(got[0]), y != -100
    gone = [(a - e).norm(dim=1) for a, e in zip(got[1:3], exact_[1:3])]  # weights less the mean of their tile: twice
    pull = up.abs() * valid
    assert torch.equal(got[0], exact_[0]) or relative_error(got[0], exact_[0]) < 1e-12
    assert (gone[0] <= pull * min(1.0, len(w) * eps) * 2 * w.norm(dim=1).max() + 1e-12).all()
    assert (gone[1] <= eps * (pull * x.norm(dim=1)).sum() + 1e-12).all()
    assert relative_error(got[3], exact_[3]) < 1e-12


def test_the_target_is_kept_however_unlikely(way):
    "p of the targets is below 2^-100, and their dz is -1"
    x, w = torch.ones(20, 4, device=way), torch.zeros(100, 4, device=way)
    w[0] = 30.0
    y = 40 + torch.arange(20, device=way) * 3
    x, w = x.requires_grad_(), w.requires_grad_()
    dx, dw = torch.autograd.grad(loss_of(x, w, y, reduction="sum", filter_eps=0.5), [x, w])
    assert torch.equal(dw[y], -x.detach()) and relative_error(dx, torch.full_like(dx, 30.0)) < TOLERANCE[f32]


def test_ignored_tokens_keep_no_tile(way):
    x, w, b, y = skewed(dtype=f32, device=way)
    y[:] = -100
    assert not any(t.any() for t in step(with_filter, x, w, b, y, EPS))
    *_, flags, _, _ = with_filter.filtered_fwd(x.detach(), w.detach(), y, b.detach(), None, None, None, LossOptions(), NO_STATISTICS, 0, EPS)
    assert not flags.any()


@pytest.mark.parametrize("index", few([0, 89, 90, 91, -1], 0, 90))
def test_any_ignore_index(index, way):
    x, w, b, y = skewed(dtype=f32, device=way)
    y[y == -100] = index
    want, _ = by_definition(with_filter, x, w, b, y, EPS, {}, ignore_index=index)
    for a, e in zip(step(with_filter, x, w, b, y, EPS, ignore_index=index), want):
        assert relative_error(a.cpu().double(), e) < 2e-5


def test_no_tokens(device):
    x, w, y = torch.zeros(0, 3, device=device, requires_grad=True), torch.ones(5, 3, device=device, requires_grad=True), torch.zeros(0, device=device).long()
    dx, dw = torch.autograd.grad(loss_of(x, w, y, filter_eps=0.1), [x, w])
    assert dx.shape == x.shape and not dw.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_token_without_a_softmax_spoils_what_it_would_have_spoilt(bad, way):
    x, w, b, y = skewed(dtype=f32, device=way)
    spoilt = x.detach().clone()
    spoilt[3] = bad
    losses, dx, dw, _ = step(with_filter, spoilt.requires_grad_(), w, b, y, EPS)
    rest = torch.arange(len(x), device=way) != 3
    assert losses[3].isnan() and losses[rest].isfinite().all()
    assert dx[rest].isfinite().all() and dx[3].isnan().any() and dw.isnan().any()


@pytest.mark.parametrize("label", few([-1, 90, 91, 10**6], -1, 90))
def test_a_label_out_of_range(label, way, monkeypatch):
    x, w, b, y = skewed(dtype=f32, device=way)
    everywhere(monkeypatch, with_filter, "check_inputs", lambda *_: None)
    y[3] = label
    losses, dx, dw, _ = step(with_filter, x, w, b, y, EPS)
    assert losses.isnan().sum() == 1 and losses[3].isnan() and not dx[3].any() and dw.isfinite().all()


# What is asked for


SUBSETS = [*itertools.product([False, True], repeat=3)]


@pytest.mark.parametrize("needs", few(SUBSETS, (False, False, False), (True, False, False), (False, True, True)), ids=str)
def test_gradients_exactly_where_they_are_asked_for(needs, way):
    leaves = skewed(dtype=f32, device=way)
    want = step(with_filter, *leaves, EPS)[1:]
    for t, need in zip(leaves, needs):
        t.requires_grad_(need)
    x, w, b, y = leaves
    losses = loss_of(x, w, y, linear_bias=b, reduction="none", filter_eps=EPS)
    asked = [t for t in (x, w, b) if t.requires_grad]
    assert losses.requires_grad == bool(asked)
    if asked:
        got = torch.autograd.grad((losses * upstream(losses)).sum(), asked)
        for a, e in zip(got, [e for e, need in zip(want, needs) if need]):
            assert relative_error(a, e) < TOLERANCE[f32]


@pytest.mark.parametrize("reduction", few(REDUCTIONS, "none"))
def test_statistics_and_reductions(reduction, way):
    x, w, b, y = skewed(dtype=f32, device=way)
    call = functools.partial(loss_of, x, w, y, linear_bias=b, reduction=reduction, return_stats=True)
    (loss, stats), (want, plain) = call(filter_eps=EPS), call()
    assert relative_error(loss, want) < TOLERANCE[f32]
    for name in ("lse", "entropy", "accuracy", "target_rank", "logit_max", "logit_norm"):
        a, e = (getattr(s, name).double() for s in (stats, plain))
        assert relative_error(a.nan_to_num(7.0), e.nan_to_num(7.0)) < 1e-5, name


def test_gradients_through_lse_and_entropy(way):
    "An entry of the entropy's gradient is p · (log p + entropy): below eps · (|log eps| + log V) where dropped"
    x, w, b, y = skewed(dtype=f32, device=way)
    def grads(eps):
        _, stats = loss_of(x, w, y, linear_bias=b, return_stats=True, filter_eps=eps)
        return torch.autograd.grad((stats.lse + 2 * stats.entropy).sum(), [x, w, b])
    (_, dw, db), (ex, ew, eb) = grads(1e-3), grads(None)
    each = 1e-3 * (1 + 2 * (-math.log(1e-3) + math.log(len(w))))
    assert (dw - ew).abs().max() <= each * x.norm(dim=1).sum() and relative_error(db, eb) < 1e-4
    for a, e in zip(grads(1e-300), (ex, ew, eb)):
        assert relative_error(a, e) < TOLERANCE[f32]


def test_without_a_gradient_nothing_is_sorted(device, monkeypatch):
    x, w, b, y = skewed(dtype=f32, device=device)
    everywhere(monkeypatch, with_filter, "order_tiles", lambda *_: pytest.fail("sorted"))
    with torch.no_grad():
        loss_of(x, w, y, linear_bias=b, filter_eps=EPS)
    loss_of(x.detach(), w.detach(), y, filter_eps=EPS)


@pytest.mark.thorough
def test_the_same_bits_every_time(way):
    leaves = skewed(dtype=f32, device=way)
    runs = [step(with_filter, *leaves, EPS, memory_budget=2**11) for _ in range(2)]
    assert all(torch.equal(a, c) for other in runs[1:] for a, c in zip(runs[0], other))


def test_upstream_gradients_are_linear_and_may_come_twice(way):
    x, w, b, y = skewed(dtype=f32, device=way)
    losses = loss_of(x, w, y, linear_bias=b, reduction="none", filter_eps=EPS)
    first = torch.autograd.grad(losses.sum(), [x, w, b], retain_graph=True)
    for c in (1, -3, 65536):
        for a, e in zip(torch.autograd.grad(c * losses.sum(), [x, w, b], retain_graph=True), first):
            assert relative_error(a, c * e) < TOLERANCE[f32]
    for a, e in zip(torch.autograd.grad(losses, [x, w, b], torch.ones(1, device=way).expand(len(y))), first):
        assert relative_error(a, e) < TOLERANCE[f32]


@pytest.mark.parametrize("name", thorough_but(few(LAYOUTS, "transposed", "part of a wider tensor"), "transposed"))
def test_matrices_of_any_strides(name, way):
    layout = LAYOUTS[name]
    x, w, b, y = skewed(dtype=f32, device=way)
    a, c = layout(x.detach()).requires_grad_(), layout(w.detach()).requires_grad_()
    plain = [t.detach().contiguous().requires_grad_() for t in (a, c)]
    floors = roundings(a, c, b, rows=len(y))  # of equal classes the gradients are nothing
    for name, g, e in zip(("loss", "dx", "dw", "db"), step(with_filter, a, c, b, y, EPS), step(with_filter, *plain, b, y, EPS)):
        assert off(name, g, e, TOLERANCE[f32], floors[name]) == []


def test_nothing_of_the_caller_changes(way):
    x, w, b, y = skewed(dtype=f32, device=way)
    before = [t.detach().clone() for t in (x, w, b, y)]
    step(with_filter, x, w, b, y, EPS)
    assert all(torch.equal(t, c) and t._version == 0 for t, c in zip((x, w, b), before)) and torch.equal(y, before[3])


def test_saved_are_two_numbers_a_token_an_order_flags_and_means(device):
    x, w, b, y = skewed(dtype=f32, device=device)
    kept = saved_tensors(lambda: loss_of(x, w, y, linear_bias=b, filter_eps=EPS), [x, w, b, y])
    bn, bv = tiles_of(with_filter, x, {}, False)
    tiles = -(-len(w) // bv)
    assert sum(t.numel() for t in kept) <= 3 * len(x) + 1 + len(w) + tiles * (-(-len(x) // bn) + sum(x.shape))


# Numbers that cannot be meant


def test_a_threshold_beside_smoothing_is_named():
    x, w, _, y = skewed(5, 4, 7)
    with pytest.raises(ValueError, match="^filter_eps: expected"):
        loss_of(x, w, y, filter_eps=0.1, label_smoothing=0.1)


# Compilers


def test_operators_keep_their_contract(device):
    x, w, b, y = skewed(20, 5, 70, dtype=f32, device=device)
    args = x, w, y, b, None, None, None, LossOptions()
    for stats in (False, True):
        torch.library.opcheck(with_filter.recompute_loss, (*args[:-1], *args[-1], *statistics_of(stats), 0, EPS))
        losses, lse, entropy, rows, *order = (t.detach() for t in with_filter.recompute_loss(*args, statistics_of(stats), 0, EPS))
        torch.library.opcheck(with_filter.recompute_grad, (
            torch.ones_like(losses), None, None, x.detach(), w.detach(), y, b.detach(), None, None, None, rows, entropy, *order,
            -100, 0.0, 1.0, 0.0, 0.0, 0, True, True, True))


@pytest.mark.thorough
def test_compiled_whole(device):
    x, w, b, y = skewed(40, 7, 90, dtype=f32, device=device)
    run = lambda x, w, b, y: loss_of(x * 1, w, y, linear_bias=b, filter_eps=EPS, softcap=9.0)
    assert same_gradients_compiled(run, x, w, b, y, (40, 23))


# Half precisions, and what only a GPU has


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_half_precision(dtype, device):
    leaves = skewed(300, 64, 2000, dtype=dtype, device=device) if device == "cuda" else skewed(dtype=dtype)
    plain = step(with_filter, *leaves, None)
    for eps in (1e-300, 1e-3):
        for name, a, e in zip(("losses", "dx", "dw", "db"), step(with_filter, *leaves, eps), plain):
            assert a.dtype == e.dtype and relative_error(a, e) < (0.02 if eps < 1e-9 else 0.1), name


@cuda_only
@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize("sizes", few([(300, 256, 1000), (512, 64, 4096), (77, 61, 999), (1000, 72, 20257), (1, 8, 129)],
                                      (300, 256, 1000), (77, 61, 999)), ids=str)
def test_tensor_descriptors_and_pointers(sizes, dtype):
    for options in few((PLAIN["plain"], PLAIN["scale and cap"], PLAIN["token_weight"]), PLAIN["scale and cap"]):
        for budget in (None, 4 * sizes[0] * sizes[1] + 2 * (sizes[0] + sizes[1]) * 600):
            assert faults(with_filter, "cuda", sizes, 0.003, options, dtype, 2e-2, share=(0, 1), memory_budget=budget) == []


@cuda_only
def test_half_precision_mean_over_many_tokens():
    "1/70000 is subnormal in fp16; gradients that themselves are in range must not suffer"
    x, w, b, y = skewed(70_000, 16, 600, dtype=f16, device="cuda")
    got = torch.autograd.grad(65536 * loss_of(x, w, y, linear_bias=b, filter_eps=1e-300), [x, w, b])
    want = torch.autograd.grad(65536 * loss_of(x, w, y, linear_bias=b), [x, w, b])
    assert all(relative_error(a, e) < 2e-3 for a, e in zip(got, want))


@cuda_only
def test_memory_of_the_kernels():
    "A copy of the weight in forward, which dw replaces; the budget in backward"
    x, w, _, y = skewed(4096, 1024, 32768, dtype=bf16, device="cuda")
    for budget in (2**26, 2**28):
        run = lambda: torch.autograd.grad(loss_of(x, w, y, memory_budget=budget, filter_eps=2**-12), [x, w])
        run()
        assert peak_memory(run, "cuda") - x.nbytes - w.nbytes < 1.1 * budget + 2**25


@cuda_only
def test_nothing_waits_for_the_gpu_and_a_graph_captures_it():
    x, w, b, y = skewed(300, 64, 3000, dtype=bf16, device="cuda")
    assert replays(lambda: torch.autograd.grad(loss_of(x, w, y, linear_bias=b, filter_eps=EPS), [x, w, b]))


# Bugs planted


MUTANTS = {  # what is wrong: (text of the source, what stands in its place)
    "the target's tile is not kept": ("valid[None, :] & (own | (small == 0))", "valid[None, :] & (small == 0)"),
    "ignored tokens keep tiles": ("    row_max = tl.load(rows_ptr + rows, mask=valid, other=float(\"inf\"))", "    valid = rows < N\n    row_max = tl.load(rows_ptr + rows, mask=valid, other=float(\"inf\"))"),
    "the threshold is not a logarithm": ("o.ignore_index, math.log(eps),", "o.ignore_index, eps,"),
    "the flags of one row count": ("kept = tl.max(tl.where(", "kept = tl.min(tl.where("),
    "a run is a tile": ("BR=run * t.BV", "BR=t.BV"),
    "nothing stands for a dropped tile": (".mul_(size).to(x.dtype)", ".mul_(0).to(x.dtype)"),
    "a short tile counts as a whole one": ("tl.minimum(V - run * BR, BR)", "tl.minimum(run * 0 + BR, BR)"),
    "the largest stands for the mean": ("mean = top + tl.log(s) - tl.log", "mean = top - tl.log"),
    "the mean's slope is 1": ("if not o.softcap: return dz", "return dz"),
    "the mean has no scale": (".mul_(o.logit_scale)\n    if not o.softcap", "\n    if not o.softcap"),
    "each slab is lifted as the first": ("lift[j.start // t.BV:]", "lift"),
    "stand-ins stay sorted": ("take(each, inverse(order.tokens), 1).T", "each.T"),
    "a run has the sums of the one before": ("tile_sums(w, run * t.BV)", "tile_sums(w.roll(t.BV, 0), run * t.BV)"),
    "places are classes": ("place = inverse(classes)[target.clamp(0, v - 1)].long()", "place = classes[target.clamp(0, v - 1)].long()"),
    "ignored places are classes": ("return torch.where(target == ignore_index, v + 1, place)", "return place"),
    "dw stays sorted": ("launch_spend(dz, x, dw, of, lift", "launch_spend(dz, x, dw, torch.arange(j.start, j.stop, device=w.device), lift"),
    "dx stays sorted": ("dx, order.tokens, None, kept[2]", "dx, torch.arange(n, device=w.device), None, kept[2]"),
    "dx forgets the slabs before": ("tl.store(at, tl.load(at, mask=inside, other=0.0) + total, mask=inside)", "tl.store(at, total, mask=inside)"),
    "the first steps of a tile are repeated": ("GK + i % (GK // BK) * BK", "GK"),
    "the last kept tile is left out": ("steps = tl.load(count_ptr + group) * (GK // BK)", "steps = tl.maximum(tl.load(count_ptr + group) - 1, 0) * (GK // BK)"),
    "every list is the first": ("entry = list_ptr + group * list_stride", "entry = list_ptr"),
    "lists begin with what is dropped": ("flags.argsort(dim=-1, descending=True, stable=True)", "flags.argsort(dim=-1, stable=True)"),
    "db is that of kept tiles": ("(parts[:, :len(of)], None) if need_b else (None, kept[0])", "(parts[:, :len(of)] if need_b else None), kept[0]"),
    "db stays sorted": ("return dx, dw, take(db, inverse(order.classes))", "return dx, dw, db"),
    "the slab takes the first classes": ("torch.index_select(w, 0, of, out=rows)", "torch.index_select(w, 0, order.classes[:len(of)], out=rows)"),
    "terms stay in the caller's order": ("    terms = take(terms, order.tokens, 1)\n", ""),
    "losses stay sorted": ("return *(take(t, back, -1) for t in out)", "return *out"),
    "weights of classes stay in their order": ("take(bias, order.classes), take(weight, order.classes),", "take(bias, order.classes), weight,"),
    "weights of tokens stay in their order": ("take(token_weight, order.tokens), denominator,\n                     o._replace", "token_weight, denominator,\n                     o._replace"),
    "dz is listed without its group": ("tiles_n, count = tl.cdiv(tiles_n, GROUP) * GROUP, tl.load(count_ptr)", "count = tl.load(count_ptr)"),
}


CHOSEN_BUGS = few(MUTANTS, "the target's tile is not kept", "places are classes")


def without_bias(module, eps):
    "What goes wrong where no bias asks for the whole of dz"
    x, w, b, y = skewed(dtype=f32)
    x, w = (torch.cat([t.detach(), c], 1).requires_grad_() for t, c in ((x, torch.ones(len(x), 1)), (w, b.detach()[:, None])))
    want, _ = by_definition(TRUE, x, w, torch.zeros_like(b), y, eps, {})
    losses = module.recompute_linear_cross_entropy(x, w, y, reduction="none", filter_eps=eps, memory_budget=2**11)
    got = torch.autograd.grad((losses * upstream(losses)).sum(), [x, w])
    return [name for name, a, e in zip(("dx", "dw"), got, want[1:]) if not relative_error(a.double(), e) < 2e-5]


def unlikely_targets(module):
    "Targets whose p is far below eps, behind ignored tokens whose p is far above"
    x, w, y = torch.ones(40, 4), torch.zeros(150, 4), 40 + torch.arange(40) % 35 * 3
    w[0], w[1:30], y[::2] = 30.0, -30.0, -100
    x[::2] = 0.0  # ignored, and spread over all classes
    x, w = x.requires_grad_(), w.requires_grad_()
    args = x.detach(), w.detach(), y, None, None, None, None, LossOptions(), NO_STATISTICS, 0, 0.005
    with pytest.MonkeyPatch.context() as patch:
        everywhere(patch, module, "run_length", lambda *_: 1)
        (*_, flags, _, _), (*_, want, _, _) = (m.filtered_fwd(*args) for m in (module, with_filter))
    dw, = torch.autograd.grad(module.recompute_linear_cross_entropy(x, w, y, reduction="sum", filter_eps=0.005), w)
    wrong = ["other tiles are kept"] if not torch.equal(flags, want) else []
    return wrong + (["a target is lost"] if not torch.equal(dw[y[1::2]], -torch.ones(20, 4)) else [])


def first_fault(module):
    "The first case that the module does not pass"
    both = dict(PLAIN["weight"], **PLAIN["token_weight"])
    cases = [lambda: unlikely_targets(module), lambda: without_bias(module, EPS), lambda: faults(module, "cpu", options=both), lambda: without_bias(module, 0.3),
             lambda: faults(module, "cpu", (40, 9, 333), options=PLAIN["scale and cap"]),
             lambda: faults(module, "cpu", (20, 5, 400), share=(0, 1), memory_budget=2**11)]
    return first_fault_of(cases if FULL else cases[:2])


class TRUE:
    "The unchanged module, on kernels in short runs"
    run_length, takes_kernel = staticmethod(short_runs), staticmethod(lambda x: len(x) > 0)
    order_tiles, filter_tiling = staticmethod(with_filter.order_tiles), staticmethod(with_filter.filter_tiling)


def variant(tmp_path, monkeypatch, *pairs):
    "The module with texts replaced, on kernels in short runs, which the unchanged one is not"
    module = planted(with_filter, tmp_path, *pairs, *unchanged([["def takes_kernel("], ["def run_length("]]))
    everywhere(monkeypatch, module, "takes_kernel", lambda x: len(x) > 0)
    everywhere(monkeypatch, module, "run_length", short_runs)
    return module


@pytest.mark.thorough
@interpreted
def test_the_unchanged_source_passes(tmp_path, monkeypatch):
    assert first_fault(variant(tmp_path, monkeypatch, *unchanged(MUTANTS.values()))) is None


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize("bug", CHOSEN_BUGS)
def test_a_planted_bug_is_noticed(bug, tmp_path, monkeypatch):
    assert first_fault(variant(tmp_path, monkeypatch, *MUTANTS[bug])), f"no case notices that {bug}"
