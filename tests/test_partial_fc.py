"""Partial FC: laws of the sample, the head against its definition, row-wise optimizers against PyTorch's, faults of other heads, planted bugs."""
import copy
import io
import itertools
import math
import os
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import fusedloss as fl
import fusedloss.partial_fc as partial_fc
from fusedloss.baseline import sample_data
from fusedloss.margins import EPS, AdaFace, ArcFace, CosFace, SubCenter, margin_cross_entropy, normalize
from fusedloss.measure import peak_memory, relative_error, saved_tensors
from fusedloss.partial_fc import (
    NegativeSampler, PartialFC, RowIndex, RowSparse, Scoring, Update, block_key, columns_bwd, columns_of, draw, draw_plain, first_occurrence,
    launch_rest, launch_update, live_index, plain_rest, plain_update, shuffle, slot_plain, strata_of, tangent_kernel, unit_kernel, unit_rows_of)
from fusedloss.recompute import Tiling
from grids import FULL, few, grid, pairs
from helpers import TOLERANCE, fault_of, has_no_second_derivative, planted, unchanged
from test_margins import FORMULAS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
COUNT = 300  # classes of most heads here


@pytest.fixture
def place(device):
    "A device on which kernels run"
    pytest.importorskip("triton", reason="Triton is not installed")
    if device == "cpu" and not INTERPRETED:
        pytest.skip("on a CPU Triton wants TRITON_INTERPRET=1")
    return device


# --- the sample ---

numbers = st.integers(0, 2**62)
rates = st.floats(1e-4, 1.0)


@settings(max_examples=60 if FULL else 15, deadline=None)
@given(numbers, st.integers(1, 10).map(lambda k: 2 * k))
def test_a_key_permutes(key, bits):
    j = torch.arange(min(2**bits, 4096)) + max(0, 2**bits - 4096) // 2
    images = shuffle(j, block_key(torch.tensor(key), torch.tensor(1), torch.tensor(5)), bits)
    assert images.unique().numel() == len(j) and images.min() >= 0 and images.max() < 2**bits
    assert torch.equal(shuffle(images, block_key(torch.tensor(key), torch.tensor(1), torch.tensor(5)), bits, back=True), j)


@settings(max_examples=100 if FULL else 25, deadline=None)
@given(numbers, numbers, rates, st.integers(1, 5000), st.data())
def test_ranks_draw_what_one_draws(seed, step, rate, n_classes, data):
    seed, step, s = torch.tensor(seed), torch.tensor(step), strata_of(rate)
    whole = draw_plain(seed, step, s, 0, n_classes)
    alive = whole[whole >= 0]
    assert len(alive.unique()) == len(alive) and (alive < n_classes).all()
    cuts = sorted(data.draw(st.lists(st.integers(0, n_classes), max_size=5)))
    edges = [0, *cuts, n_classes]
    parts = [draw_plain(seed, step, s, a, b) for a, b in zip(edges, edges[1:])]  # empty ranks included
    y = data.draw(st.lists(st.integers(0, n_classes - 1), max_size=9).map(lambda v: torch.tensor(v, dtype=torch.int64)))
    args = seed, step, s
    one = partial_fc.plain_columns(y, *args, 0, n_classes, -1, 0.7, f64)
    ranks = [partial_fc.plain_columns(y, *args, a, b, -1, 0.7, f64) for a, b in zip(edges, edges[1:])]
    scored = lambda c, a: {(r + a, q) for r, q in zip(c.rows.tolist(), c.shift.tolist()) if r >= 0}
    assert set.union(*(scored(c, a) for c, a in zip(ranks, edges))) == scored(one, 0)
    for part, a, b in zip(parts, edges, edges[1:]):
        assert ((part < 0) | (part >= a) & (part < b)).all()
    assert torch.equal(torch.cat([p[p >= 0] for p in parts]).sort().values, alive.sort().values)


@settings(max_examples=60 if FULL else 15, deadline=None)
@given(numbers, numbers, rates, st.integers(1, 3000), st.integers(0, 3000))
def test_a_class_is_found_where_it_was_drawn(seed, step, rate, n_classes, start):
    seed, step, s, y = torch.tensor(seed), torch.tensor(step), strata_of(rate), torch.arange(start, start + n_classes)
    drawn, at = draw_plain(seed, step, s, start, start + n_classes), slot_plain(y, seed, step, s, start)
    assert torch.equal(drawn[at[at >= 0]], y[at >= 0]) and (at >= 0).sum() == (drawn >= 0).sum()


@settings(max_examples=200 if FULL else 50, deadline=None)
@given(st.floats(1e-9, 1.0))
def test_strata_draw_the_rate(rate):
    s = strata_of(rate)
    mean = s.whole + s.chance / 2**32
    assert mean / 2**s.bits == pytest.approx(rate, rel=1e-6, abs=2**-52) and s.bits % 2 == 0 and s.slots <= 2**s.bits
    assert rate < 1e-7 or s.slots <= 1.02 * mean  # few slots stay empty


@pytest.mark.parametrize("rate", few([0.07, 0.37, 0.9], 0.07, 0.9))
def test_alone_and_in_pairs(rate):
    s, steps, v = strata_of(rate), 1500 if FULL else 500, 2**strata_of(rate).bits + 70
    hits = torch.zeros(steps, v)
    for k in range(steps):
        drawn = draw_plain(torch.tensor(3), torch.tensor(k), s, 0, v)
        hits[k, drawn[drawn >= 0]] = 1
    alone = hits.mean(0)
    assert alone.mean().item() == pytest.approx(rate, abs=0.002)
    assert alone.std().item() == pytest.approx((rate * (1 - rate) / steps) ** 0.5, rel=0.15)
    joint = (hits.T @ hits / steps)[~torch.eye(v, dtype=torch.bool)]
    assert joint.mean().item() == pytest.approx(rate**2, rel=0.02)  # without replacement: 1 % fewer
    assert joint.std().item() == pytest.approx((rate**2 * (1 - rate**2) / steps) ** 0.5, rel=0.15)
    lag = (hits[1:] * hits[:-1]).mean().item()  # a step says nothing of the next
    assert lag == pytest.approx(rate**2, rel=0.06)


def test_the_size_is_bounded_and_nearly_fixed():
    sizes = []
    for step in range(40):
        drawn = draw_plain(torch.tensor(1), torch.tensor(step), strata_of(0.1), 0, 10**6)
        sizes.append(int((drawn >= 0).sum()))
    assert all(abs(n - 10**5) < 120 for n in sizes) and len(drawn) < 1.02 * 10**5  # a binomial's deviation would be 300


def test_classes_beyond_32_bits():
    s, start = strata_of(0.1), 2**33 + 123
    drawn = draw_plain(torch.tensor(1), torch.tensor(2), s, start, start + 5000)
    alive = drawn[drawn >= 0]
    assert abs(len(alive) - 500) < 60 and alive.min() >= start and alive.max() < start + 5000
    low = draw_plain(torch.tensor(1), torch.tensor(2), s, 0, 5000)
    assert len(set((alive - 2**33).tolist()) & set(low.tolist())) < 120  # another block, another permutation


@pytest.mark.parametrize("seeds", [((1, 0), (2, 0)), ((1, 0), (1, 1)), ((1, 0), (1 + 2**32, 0)), ((1, 0), (1, 2**32)), ((1, 2), (2, 1))])
def test_all_bits_of_seed_and_step_count(seeds):
    one, two = (set(draw_plain(torch.tensor(a), torch.tensor(b), strata_of(0.1), 0, 20000).tolist()) for a, b in seeds)
    assert 0.05 * 2000 < len(one & two) < 0.15 * 2000


@pytest.mark.parametrize("bad", [0, 0.0, -0.1, 1.5, 2, True, math.nan, math.inf, "all", None])
def test_strange_rates(bad):
    with pytest.raises(ValueError, match="rate: expected"):
        NegativeSampler(bad)
    with pytest.raises(ValueError, match="sample_rate: expected"):
        PartialFC(10, 4, sample_rate=bad)


@pytest.mark.parametrize("bad", [-1, 2**63, 1.0, None, True])
def test_strange_seeds(bad):
    with pytest.raises(ValueError, match="seed: expected"):
        NegativeSampler(0.1, bad)


@settings(max_examples=60 if FULL else 15, deadline=None)
@given(st.lists(st.integers(-1, 12), max_size=30))
def test_first_occurrence(labels):
    assert first_occurrence(torch.tensor(labels, dtype=torch.int64)).tolist() == [labels.index(v) for v in labels]


@settings(max_examples=60 if FULL else 15, deadline=None)
@given(st.lists(st.integers(-1, 40), max_size=30), st.sampled_from([0.03, 0.3, 0.8, 1.0, "positives"]), st.booleans(), st.integers(0, 10**9))
def test_columns(labels, rate, log_q, seed):
    y, sampler = torch.tensor(labels, dtype=torch.int64), NegativeSampler(rate, seed, log_q)
    columns = columns_of(y, -1, 41, sampler, f64)
    alive = columns.rows[columns.rows >= 0]
    assert len(columns.rows) == -(-(len(sampler(41)) + len(labels)) // 8) * 8  # known beforehand
    assert len(alive.unique()) == len(alive)
    assert set(alive.tolist()) == set(sampler(41).tolist()) - {-1} | set(labels) - {-1}
    assert torch.equal(columns.rows[columns.slot[y >= 0]], y[y >= 0]) and (columns.slot[y < 0] == -1).all()
    present = torch.isin(columns.rows, y)
    missed = -math.log(rate) if log_q and rate != "positives" else 0.0
    expected = torch.full(columns.rows.shape, missed, dtype=f64).masked_fill(present, 0).masked_fill(columns.rows < 0, -math.inf)
    assert torch.equal(columns.shift, expected)


def test_log_q_makes_the_sum_right_on_average():
    z = torch.randn(4000, dtype=f64, generator=torch.Generator().manual_seed(0))
    y, sums = torch.arange(0, 4000, 400), {True: [], False: []}
    for log_q in sums:
        sampler = NegativeSampler(0.1, 5, log_q)
        for _ in range(200):
            sampler.advance()
            columns = columns_of(y, -1, 4000, sampler, f64)
            sums[log_q].append(((z[columns.rows.clamp(min=0)] + columns.shift).exp().sum() / z.exp().sum()).item())
    mean = {k: sum(v) / len(v) for k, v in sums.items()}
    assert mean[True] == pytest.approx(1, abs=0.01) and mean[False] == pytest.approx(0.1, abs=0.01)


# --- the head against its definition ---

def definition(x, w, y, name, scored, k=1, log_q=None, conflict=None, mode="drop"):
    "The mean loss over the classes that are `scored` [V], all cosines in float64, by the formulas of the margins' tests"
    margin, formula = FORMULAS[name]
    x, w = x.double(), w.double()
    unit = lambda t: t / torch.where(t.norm(dim=-1) > 0, t.norm(dim=-1).clamp(min=EPS), 1.0).unsqueeze(-1)
    cos = (unit(x) @ unit(w).T).unflatten(-1, (-1, k)).amax(-1)
    valid, label = y >= 0, y.clamp(min=0)[:, None]
    hot = torch.zeros_like(cos, dtype=torch.bool).scatter_(1, label, True)
    c = cos.gather(1, label)[:, 0]
    z = margin.scale * (torch.relu(cos + 0.25) * (cos - 0.25) if name == "Circle" else cos)
    if conflict is not None:
        z = torch.where(cos > conflict, 0.0 if mode == "zero" else -1e6, z)
    if log_q:
        z = z - math.log(log_q) * (~torch.isin(torch.arange(len(scored)), y[valid])).double()
    z = z.masked_fill(hot | ~scored, -1e6)
    losses = F.softplus(z.logsumexp(1) - formula(c, torch.acos(c.clamp(-1, 1)), x.norm(dim=-1)), threshold=100)
    return torch.where(valid, losses, 0.0).sum() / max(int(valid.sum()), 1)


def scored_classes(head, y):
    "What the head's next step scores, by asking its sampler"
    mask = torch.zeros(head.num_classes, dtype=torch.bool)
    drawn = torch.arange(head.num_classes) if head.sampler is None else head.sampler(head.num_classes).cpu()
    mask[drawn[drawn >= 0]] = True
    mask[y[y >= 0].cpu()] = True
    return mask


def sample(n=23, h=6, v=COUNT, k=1, dtype=f64, device="cpu", seed=0):
    "Rows, some near their class; every fifth has no label, and two share one"
    g = torch.Generator().manual_seed(seed)
    w, y = torch.randn(v * k, h, generator=g, dtype=f64), torch.randint(v, (n,), generator=g)
    x = torch.randn(n, h, generator=g, dtype=f64)
    x[::3] += 2 * w[y[::3] * k]
    if n > 8:
        y[7] = y[3]
    return x.to(device, dtype), w.to(device, dtype), y.masked_fill(torch.arange(n) % 5 == 1, -1).to(device)


def make_head(w, k=1, name="CosFace", module=partial_fc, **options):
    "A head with these vectors"
    margin = copy.deepcopy(FORMULAS[name][0])
    margin = SubCenter(k, margin) if k > 1 else margin
    if isinstance(margin, torch.nn.Module):
        margin = margin.to(w.device)
    head = module.PartialFC(len(w) // k, w.shape[1], margin=margin, device=w.device, dtype=w.dtype, **options)
    head.weight.data.copy_(w)
    return head.train() if name != "AdaFace" else head  # its statistics are held by eval() of the margin alone


CASES = {
    "all": {}, "a tenth": dict(rate=0.1), "a third": dict(rate=0.37), "positives": dict(rate="positives"), "rate 1": dict(rate=1.0),
    "log q": dict(rate=0.2, log_q=True), "conflict": dict(rate=0.5, conflict=0.3), "conflict, all": dict(conflict=0.3),
    "conflict zero": dict(conflict=0.2, mode="zero"), "conflict and log q": dict(rate=0.4, conflict=0.3, mode="zero", log_q=True),
    "ArcFace": dict(rate=0.3, name="ArcFace"), "SphereFace": dict(rate=0.3, name="SphereFace"), "Circle": dict(rate=0.3, name="Circle"),
    "Circle, conflict": dict(rate=0.3, name="Circle", conflict=0.3), "AdaFace": dict(rate=0.3, name="AdaFace"),
    "SubCenter": dict(rate=0.3, k=3), "SubCenter, all": dict(k=2), "SubCenter, Circle": dict(rate=0.3, k=2, name="Circle"),
    "SubCenter, log q": dict(rate=0.3, k=2, log_q=True), "few classes": dict(v=3, rate=0.5), "fewer than rows": dict(v=7, rate=0.9),
    "many rows": dict(n=70, rate=0.05), "dense gradient": dict(rate=0.3, sparse=False),
}


def faults(name="CosFace", rate=None, log_q=False, conflict=None, mode="drop", k=1, n=23, v=COUNT, dtype=f64, device="cpu",
           module=partial_fc, tolerance=None, h=6, **options):
    "What the head gets wrong, in words"
    x, w, y = sample(n, h, v, k, dtype, device)
    sampler = None if rate is None else module.NegativeSampler(rate, 11, log_q)
    head = make_head(w, k, name, module, sampler=sampler, conflict=conflict, conflict_mode=mode, **options)
    mask, x = scored_classes(head, y), x.requires_grad_()
    loss = head(x, y)
    got = loss.detach(), *torch.autograd.grad(loss * -1.7, [x, head.weight])
    xd, wd = x.detach().double().cpu().requires_grad_(), w.double().cpu().requires_grad_()
    exact = definition(xd, wd, y.cpu(), name, mask, k, rate if log_q else None, conflict, mode)
    exact = exact.detach(), *torch.autograd.grad(exact * -1.7, [xd, wd])
    limit = tolerance or TOLERANCE[dtype]
    dw = got[2]
    wrong = [f"{what} is off by {error:.1e}" for what, a, e in zip(("loss", "dx", "dw"), (*got[:2], dw.to_dense()), exact)
             if not (error := relative_error(a.cpu(), e)) <= limit]
    wrong += ["dw is dense" for _ in range(1) if dw.is_sparse != (rate is not None and options.get("sparse", True))]
    wrong += [f"{t} has another dtype" for t, a, b in (("dx", got[1], x), ("dw", dw, w)) if a.dtype != b.dtype]
    if dw.is_sparse:
        rows = mask.nonzero().flatten().repeat_interleave(k) * k + torch.arange(k).repeat(int(mask.sum()))
        if set(dw._indices()[0].tolist()) != set(rows.tolist()):
            wrong.append("dw names rows that were not scored")
    return wrong


@pytest.mark.parametrize("case", CASES)
def test_definition(case, device):
    assert not faults(**CASES[case], device=device)


# in 16 bits it is a matter of rounding which cosines exceed the threshold of a conflict
@pytest.mark.parametrize("case,dtype", [(c, d) for c, d in itertools.product(CASES, [f32, bf16, f16]) if "SubCenter" not in c and "Circle" not in c
                                        and (d == f32 or not CASES[c].get("conflict"))])
def test_definition_in_other_dtypes(case, dtype, device):
    # cosines round to 2⁻⁹ in bf16; a scale of 64 makes that 0.1 in a score
    assert not faults(**CASES[case], dtype=dtype, device=device, tolerance={f32: 1e-4, bf16: 0.15, f16: 0.03}[dtype])


def test_all_classes_is_the_head_of_the_stage_before(device):
    x, w, y = sample(device=device)
    head = make_head(w)
    torch.testing.assert_close(head(x, y), margin_cross_entropy(x, w, y, margin=CosFace(), ignore_index=-1))
    head = make_head(w, sample_rate=0.1).eval()  # to evaluate, nothing is drawn
    torch.testing.assert_close(head(x, y), margin_cross_entropy(x, w, y, margin=CosFace(), ignore_index=-1))
    assert head.sampler.step == 0


def test_autocast(device):
    x, w, y = sample(dtype=f32, device=device)
    head = make_head(w, sample_rate=0.5)
    with torch.autocast(device, bf16):
        loss = head(x.requires_grad_(), y)
    dx, dw = torch.autograd.grad(loss, [x, head.weight])
    assert loss.dtype == dx.dtype == dw.dtype == f32
    head.sampler.step.zero_()
    assert relative_error(loss.detach(), head(x, y).detach()) < 0.01


@pytest.mark.parametrize("x_dtype,w_dtype", [(bf16, f32), (f16, f32), (f32, bf16), (bf16, bf16)])
def test_mixed_dtypes(x_dtype, w_dtype, device):
    x, w, y = sample(dtype=f32, device=device)
    head = make_head(w.to(w_dtype), sample_rate=0.5)
    x = x.to(x_dtype).requires_grad_()
    dx, dw = torch.autograd.grad(head(x, y), [x, head.weight])
    assert dx.dtype == x_dtype and dw.dtype == w_dtype and dx.isfinite().all()


def test_batches_of_any_shape():
    x, w, y = sample(24)
    head = make_head(w)
    torch.testing.assert_close(head(x.view(4, 6, 6), y.view(4, 6)), head(x, y))
    torch.testing.assert_close(head(x.t().contiguous().t(), y.int()), head(x, y))
    assert head(x[:0], y[:0]) == 0


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=2)))
def test_gradients_are_where_they_are_asked_for(needs):
    x, w, y = sample()
    head = make_head(w, sample_rate=0.3)
    x.requires_grad_(needs[0]), head.weight.requires_grad_(needs[1])
    loss = head(x, y)
    assert loss.requires_grad == any(needs)
    if any(needs):
        loss.backward()
    assert (x.grad is not None, head.weight.grad is not None) == needs


def test_statistics():
    x, w, y = sample()
    head = make_head(w, sample_rate=0.5)
    mask = scored_classes(head, y)
    loss, told = head(x, y, return_stats=True)
    cos, valid = normalize(x) @ normalize(w).T, y >= 0
    others = cos.masked_fill(F.one_hot(y.clamp(min=0), COUNT).bool() | ~mask, -9)
    c = cos.gather(1, y.clamp(min=0)[:, None])[:, 0]
    torch.testing.assert_close(told.cos, torch.where(valid, c, 0.0))
    torch.testing.assert_close(told.rest[valid], (64 * others).logsumexp(1)[valid])
    assert told.accuracy == ((c > others.amax(1)) & valid).sum() / valid.sum()
    assert told.n_valid == valid.sum() and told.n_scored == mask.sum() and not told.cos.requires_grad


def test_deterministic(device):
    x, w, y = sample(64, 32, dtype=f32, device=device)
    first = None
    for _ in range(3):
        head = make_head(w, sample_rate=0.3)
        dx, dw = torch.autograd.grad(head(x.requires_grad_(), y), [x, head.weight])
        first = first or (dx, dw.to_dense())
        assert torch.equal(first[0], dx) and torch.equal(first[1], dw.to_dense())


def test_nobodys_generator_is_asked(device):
    head = PartialFC(COUNT, 6, sample_rate=0.3, device=device)
    x, _, y = sample(dtype=f32, device=device)
    before = torch.get_rng_state()
    head(x, y).backward()
    assert torch.equal(before, torch.get_rng_state())


def test_memory_goes_with_the_columns():
    x, w, y = sample(64, 16, 100_000, dtype=f32)
    head = make_head(w, sample_rate=0.01, sparse=True)
    t = -(-(len(head.sampler(100_000)) + 64) // 8) * 8
    run = lambda: head(x.requires_grad_(), y)
    assert all(k.numel() <= t * 16 for k in saved_tensors(run, x, head.weight, y))
    o = Scoring(1, 64.0, -1.0, False, EPS, 2.0, 0.0)
    unit, inverse = unit_rows_of(w, None, f32, EPS)
    rest, cos, _ = plain_rest(unit[:64], unit, y, None, o, 1000)
    peak = peak_memory(lambda: plain_rest(unit[:64], unit, y, None, o, 1000))
    assert peak < 64 * 1000 * 4 * 6


# --- faults of other heads: F of the one with swapped sub-weights, I of the widely used one ---

def one_step(head, x, y, **options):
    optimizer = RowSparse(torch.optim.SGD, head.parameters(), lr=0.1, **options)
    head(x, y).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_f2_ignored_rows_count_nothing(rate, device):
    x, w, y = sample(device=device)
    x.requires_grad_()
    head = make_head(w, sample_rate=rate)
    restart = (lambda: None) if head.sampler is None else head.sampler.step.zero_
    loss = head(x, y)
    dx, = torch.autograd.grad(loss, x)
    assert (dx[y < 0] == 0).all()
    restart()
    torch.testing.assert_close(head(x[y >= 0], y[y >= 0]), loss)
    with torch.no_grad():
        x[y < 0] = math.nan  # not even what is no number
    restart()
    dx, dw = torch.autograd.grad(head(x, y), [x, head.weight])
    assert dw.to_dense().isfinite().all() and dx[y >= 0].isfinite().all() and (dx[y < 0] == 0).all()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_parameter_without_rows_takes_a_step(kind):
    "Such as a shard of no classes"
    p = torch.zeros(0, 5, requires_grad=True)
    p.grad = torch.zeros(0, 5)
    fl.RowSparse(kind, [p], lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {})).step()
    assert p.shape == (0, 5)


def test_f2_labels_out_of_range(device, monkeypatch):
    x, w, y = sample(device=device)
    head = make_head(w, sample_rate=0.3)
    for bad in (COUNT, -2, 10**12):
        y[3] = bad
        monkeypatch.setenv("FUSEDLOSS_DEBUG", "1")
        with pytest.raises(IndexError, match=f"target\\[3\\] is {bad}"):
            head(x, y)
        monkeypatch.delenv("FUSEDLOSS_DEBUG")
        if device == "cuda":
            assert head(x, y).isnan()


def test_f3_a_loss_is_not_clamped():
    w = normalize(torch.randn(40, 16, dtype=f64))
    head, y = make_head(w), torch.arange(40)
    z = 64 * (-w @ w.T - 0.35 * torch.eye(40))
    loss = head(-w, y)
    assert loss > 70
    torch.testing.assert_close(loss, F.cross_entropy(z, y))


def test_f4_the_callers_tensors_stay():
    x, w, y = sample()
    before = x.clone(), y.clone()
    one_step(make_head(w, sample_rate=0.3), x, y)
    one_step(make_head(w), x, y)
    assert torch.equal(x, before[0]) and torch.equal(y, before[1]) and y.shape == before[1].shape


@pytest.mark.parametrize("labels,rate,v", grid([(), (0,), (-1, -1), (0, 0, -1)], [1e-6, 0.5, 1.0, "positives"], [1, 2, 3]))
def test_f5_few_classes_and_tiny_rates(v, rate, labels, device):
    head = PartialFC(v, 4, sample_rate=rate, device=device)
    x, y = torch.randn(len(labels), 4, device=device, requires_grad=True), torch.tensor(labels, dtype=torch.int64, device=device)
    loss = head(x, y)
    dx, dw = torch.autograd.grad(loss, [x, head.weight])
    dw = dw.to_dense()
    assert loss.isfinite() and dx.isfinite().all() and dw.isfinite().all()
    if v == 1 or not any(k >= 0 for k in labels):
        assert loss == 0 and not dx.any() and not dw.any()


@pytest.mark.parametrize("name", [n for n in FORMULAS if n != "AdaFace"])
def test_f6_on_the_class_and_against_it(name):
    w = torch.randn(COUNT, 6)
    head = make_head(w, name=name, sample_rate=0.3)
    x = torch.stack([7 * w[0], -2 * w[1]]).requires_grad_()
    loss = head(x, torch.arange(2))
    dx, dw = torch.autograd.grad(loss, [x, head.weight])
    assert loss.isfinite() and dx.isfinite().all() and dw.to_dense().isfinite().all()


def test_f7_zero_vectors(device):
    x, w, y = sample(dtype=f32, device=device)
    usual = torch.autograd.grad(make_head(w)(x.requires_grad_(), y), x)[0].norm(dim=1).max()
    with torch.no_grad():
        x[0], w[y[3]], x[2] = 0, 0, x[2] * 1e-7
    head = make_head(w, sample_rate=0.5)
    dx, dw = torch.autograd.grad(head(x, y), [x, head.weight])
    dw = dw.to_dense()
    assert dx[0].norm() < 100 * usual and dw[y[3]].norm() < 100 * usual and dx.norm(dim=1).max() < 64 / EPS


def test_f8_the_optimizer_keeps_its_parameters():
    x, w, y = sample()
    head, layer, other = make_head(w, sample_rate=0.3), torch.nn.Linear(6, 6).double(), torch.nn.Linear(2, 2)
    optimizer = RowSparse(torch.optim.SGD, [*head.parameters(), *layer.parameters()], lr=0.1, momentum=0.9)
    optimizer.add_param_group(dict(params=list(other.parameters()), lr=0.5))
    ids = [id(p) for g in optimizer.param_groups for p in g["params"]]
    before = [p.clone() for p in other.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        head(layer(x), y).backward()
        optimizer.step()
    assert ids == [id(p) for g in optimizer.param_groups for p in g["params"]] and optimizer.param_groups[0]["params"][0] is head.weight
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters()))


def test_f9_f10_one_step_moves_the_weight_that_is_saved():
    x, w, y = sample()
    head = make_head(w, sample_rate=0.3)
    mask = scored_classes(head, y)
    optimizer = one_step(head, x, y, momentum=0.9)
    state = head.state_dict()
    assert set(state) == {"weight", "sampler.seed", "sampler.step"} and state["weight"].shape == w.shape
    moved = (state["weight"] != w).any(1)
    assert torch.equal(moved, mask) and optimizer.state_dict()["state"][0]["momentum_buffer"].shape == w.shape


def test_f14_a_skipped_step_skips_the_head(device):
    x, w, y = sample(dtype=f32, device=device)
    head, layer = make_head(w, sample_rate=0.3), torch.nn.Linear(6, 6, device=device)
    optimizer = RowSparse(torch.optim.SGD, [*head.parameters(), *layer.parameters()], lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    def step(bad):
        optimizer.zero_grad()
        scaler.scale(head(layer(x), y)).backward()
        if bad:
            layer.weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
    before = head.weight.detach().clone()
    step(True)
    assert torch.equal(before, head.weight) and scaler.get_scale() == 512
    head.sampler.step.zero_()
    plain = make_head(w, sample_rate=0.3)
    one_step(plain, layer(x).detach(), y, momentum=0.9)
    step(False)
    torch.testing.assert_close(head.weight, plain.weight)  # unscaled before it was used


def test_f15_batches_of_any_size_follow_each_other():
    head = PartialFC(COUNT, 6, sample_rate=0.3)
    for n in (7, 0, 4, 1, 64):
        x, _, y = sample(n, dtype=f32)
        one_step(head, x, y)


def test_f16_clipping_reaches_the_head():
    x, w, y = sample()
    head = make_head(w, sample_rate=0.3)
    head(x, y).backward()
    whole = head.weight.grad.to_dense().norm()
    layer = torch.nn.Linear(2, 2).double()
    layer(torch.ones(2, dtype=f64)).sum().backward()
    optimizer = RowSparse(SGD, [*head.parameters(), *layer.parameters()], lr=0.1)
    both = torch.stack([whole, *(p.grad.norm() for p in layer.parameters())]).norm()
    torch.testing.assert_close(optimizer.clip_grad_norm_(2 * both.item()), both)
    torch.testing.assert_close(head.weight.grad.to_dense().norm(), whole)  # nothing to clip
    optimizer.clip_grad_norm_(0.5 * both.item())
    torch.testing.assert_close(head.weight.grad.to_dense().norm(), 0.5 * whole, rtol=1e-5, atol=0)
    torch.testing.assert_close(optimizer.clip_grad_norm_(1.0), 0.5 * both, rtol=1e-5, atol=0)
    head.weight.grad = None
    head(x, y).backward(), head(x, y).backward()  # duplicates add before they are squared
    whole = head.weight.grad.to_dense().norm()
    layer.zero_grad()
    torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), whole)
    assert optimizer.clip_grad_norm_(math.inf).isfinite() and RowSparse(SGD, [torch.nn.Parameter(w)], lr=1.0).clip_grad_norm_(1.0) == 0


def test_i4_rows_that_were_not_scored_stay():
    x, w, y = sample()
    head = make_head(w, sample_rate=0.1)
    optimizer = RowSparse(torch.optim.SGD, head.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    seen = torch.zeros(COUNT, dtype=torch.bool)
    for _ in range(3):
        seen |= scored_classes(head, y)
        optimizer.zero_grad()
        head(x, y).backward()
        optimizer.step()
    assert not seen.all() and torch.equal(head.weight[~seen], w[~seen]) and (head.weight[seen] != w[seen]).any(1).all()


def test_i6_i7_a_batch_of_one_and_eval():
    x, w, y = sample()
    head = make_head(w, sample_rate=0.3)
    for n in (1, 5, 2):
        one_step(head, x[:n], y[:n])
        head.eval()(x[:n], y[:n])
        head.train()
    assert head(x[0], y[0]).shape == ()


def test_i8_backward_twice():
    x, w, y = sample()
    head = make_head(w, sample_rate=0.3)
    loss = head(x.requires_grad_(), y)
    one = torch.autograd.grad(loss, [x, head.weight], retain_graph=True)
    two = torch.autograd.grad(loss, [x, head.weight])
    assert torch.equal(one[0], two[0]) and torch.equal(one[1].to_dense(), two[1].to_dense())


def test_i11_float_labels():
    head = PartialFC(COUNT, 6)
    with pytest.raises(ValueError, match="target: expected an integer dtype"):
        head(torch.randn(2, 6), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("options,match", [
    (dict(num_classes=0), "num_classes"), (dict(num_classes=2.5), "num_classes"), (dict(embedding_size=0), "embedding_size"),
    (dict(margin=0.4), "margin"), (dict(sampler=0.1), "sampler"), (dict(sample_rate=0.1, sampler=NegativeSampler(0.1)), "sample_rate"),
    (dict(ignore_index=1.0), "ignore_index"), (dict(method="quick"), "method"), (dict(conflict=1.0), "conflict"),
    (dict(conflict_mode="keep"), "conflict_mode"), (dict(eps=0), "eps")])
def test_options_that_cannot_be_meant(options, match):
    with pytest.raises(ValueError, match=f"{match}: expected"):
        PartialFC(**{"num_classes": 10, "embedding_size": 4, **options})


@pytest.mark.parametrize("x,y,match", [
    (torch.randn(3, 5), torch.zeros(3, dtype=torch.int64), "features"), (torch.randn(3, 4), torch.zeros(2, dtype=torch.int64), "target"),
    (torch.randn(3, 4, dtype=f64), torch.zeros(3, dtype=torch.int64), "features"),
    (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "features"),
    (torch.randn(3, 4), [0, 1, 2], "target")])
def test_inputs_that_cannot_be_taken(x, y, match):
    head = PartialFC(10, 4, sample_rate=0.5)
    with pytest.raises(ValueError, match=f"{match}: expected"):
        head(x, y)
    assert head.sampler.step == 0 and getattr(head.weight, "grad_rows", None) is None


class Failing(ArcFace):
    "Fails when the cosines are there"
    def target_score(self, cos, norm):
        raise RuntimeError("no score")


def test_a_forward_that_fails_has_drawn_nothing_and_seen_nothing():
    x, w, y = sample(dtype=f32)
    for margin, labels, error in ((AdaFace(), y + 7 * COUNT, IndexError), (AdaFace(reduce=lambda sums: 1 / 0), y, ZeroDivisionError), (Failing(), y, RuntimeError)):
        head = PartialFC(COUNT, 6, margin=margin, sample_rate=0.3)
        with pytest.raises(error):
            head(x, labels)
        assert head.sampler.step == 0 and (type(margin) is Failing or (margin.mean, margin.std) == (20, 100))


def test_a_row_that_overflowed_does_not_count_in_the_statistics():
    x, w, y = sample(dtype=f32)
    heads = [PartialFC(COUNT, 6, margin=AdaFace(momentum=0.5)) for _ in range(2)]
    y[2] = y[4] = 5
    bad = x.clone()
    bad[2, 0], bad[4, 0] = math.inf, math.nan
    heads[0](bad, y), heads[1](x, y.index_fill(0, torch.tensor([2, 4]), -1))
    assert heads[0].margin.state_dict() == heads[1].margin.state_dict() and heads[0].margin.mean != 20


def test_a_method_that_cannot_says_which_can(device):
    head = PartialFC(10, 4, method="recompute", margin=fl.margins.Circle(), device=device)
    with pytest.raises(ValueError, match="'tiles'"):
        head(torch.randn(2, 4, device=device), torch.tensor([0, 1], device=device))


@pytest.mark.parametrize("rate,backend", few([(r, b) for r in (1.0, 0.3) for b in ("eager", "aot_eager")], (1.0, "eager"), (0.3, "aot_eager")))
def test_compiles_whole(rate, backend):
    x, w, y = sample(dtype=f32)
    head = make_head(w, sample_rate=rate, sparse=False)
    expected = torch.autograd.grad(head(x.requires_grad_(), y), [x, head.weight])
    if head.sampler is not None:
        head.sampler.step.zero_()
    torch._dynamo.reset()
    loss = torch.compile(head, backend=backend, fullgraph=True)(x, y)
    torch.testing.assert_close(torch.autograd.grad(loss, [x, head.weight]), expected)
    assert head.sampler is None or head.sampler.step == 1


@pytest.mark.parametrize("rate", [0.3, "positives"])
def test_operators_by_opcheck(rate, device):
    x, w, y = sample(dtype=f32, device=device)
    s, looks = NegativeSampler(rate, 5).to(device), ("test_schema", "test_faketensor")
    given = y, s.seed, s.step, *s.strata, 0, COUNT, -1, 0.7, f32
    torch.library.opcheck(partial_fc.sampled_columns, given, test_utils=looks)
    rows, slot, shift, _, kept, _ = partial_fc.sampled_columns(*given)
    o = Scoring(1, 16.0, -1.0, False, EPS, 2.0, 0.0)
    given = x, w, kept, rows, slot, shift, *o, f32, False
    torch.library.opcheck(partial_fc.partial_lse, given, test_utils=looks)
    rest, _, _, *saved = partial_fc.partial_lse(*given)
    for needs in itertools.product([True, False], repeat=2):
        given = rest, rest, rest[0], rest, *saved, slot, shift, *o, f32, f32, False, *needs
        torch.library.opcheck(partial_fc.partial_lse_grad, given, test_utils=looks)


def test_operators_and_their_functions_give_the_same_bits(device, monkeypatch):
    x, w, y = sample(dtype=f32, device=device)
    x.requires_grad_()
    results = []
    for looked_at in (True, False):
        monkeypatch.setattr(partial_fc, "observed", lambda: looked_at)
        head = make_head(w, sample_rate=0.3)
        loss = head(x, y)
        dx, dw = torch.autograd.grad(loss, [x, head.weight])
        results.append((loss, dx, dw.to_dense()))
    assert all(torch.equal(*pair) for pair in zip(*results))


def test_a_mode_that_looks_sees_operators():
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = set()
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(str(func).split(".")[1])
            return func(*args, **(kwargs or {}))
    x, w, y = sample(dtype=f32)
    head = make_head(w, sample_rate=0.3)
    with Watch():
        head(x, y).backward()
    assert seen >= {"sampled_columns", "partial_lse", "partial_lse_grad"}


# --- the optimizer ---

OF_SGD = [row for row in itertools.product((0.0, 0.9), (0.0, 0.5), (0.0, 0.1), (False, True), (False, True)) if not row[3] or row[0] and not row[1]]
SETTINGS = [(SGD, dict(lr=0.1, momentum=m, dampening=d, weight_decay=wd, nesterov=nest, maximize=up))
            for m, d, wd, nest, up in (OF_SGD if FULL else pairs(OF_SGD))]
SETTINGS += [(ADAMW, dict(lr=0.01, weight_decay=wd, betas=b, maximize=up))
             for wd, b, up in grid((0.0, 0.1), ((0.9, 0.999), (0.5, 0.6)), (False, True))]


def sparse_gradients(shape, n_steps, dtype, seed=0, count=5):
    "Rows and values of random steps"
    g = torch.Generator().manual_seed(seed)
    for _ in range(n_steps):
        yield torch.randperm(shape[0], generator=g)[:count], torch.randn(count, shape[1], generator=g, dtype=f64).to(dtype)


def given_rows(p, rows, values):
    "p's gradient as a head leaves it, a dead column among it"
    rows = torch.cat([rows[:2], torch.tensor([-1]), rows[2:]]).to(p.device)
    values = torch.cat([values[:2], torch.zeros(1, values.shape[1], dtype=values.dtype), values[2:]]).to(p.device)
    p.grad_rows = RowIndex(live_index(rows), rows)
    p.grad = torch.sparse_coo_tensor(p.grad_rows.index[None], values, p.shape, check_invariants=False)


def row_by_row(w, gradients, kind, options):
    "What PyTorch makes of each row by itself"
    out = w.clone()
    for r in range(len(w)):
        row = torch.nn.Parameter(w[r].clone())
        optimizer = kind([row], **options)
        for rows, values in gradients:
            if r in rows:
                row.grad = values[rows == r][0]
                optimizer.step()
        out[r] = row.detach()
    return out


@pytest.mark.parametrize("kind,options", SETTINGS)
def test_lazy_is_pytorchs_for_each_row(kind, options, device):
    w = torch.randn(12, 5, dtype=f64)
    p, gradients = torch.nn.Parameter(w.clone().to(device)), list(sparse_gradients(w.shape, 9, f64))
    optimizer = RowSparse(kind, [p], **options)
    for rows, values in gradients:
        given_rows(p, rows, values)
        optimizer.step()
    torch.testing.assert_close(p.detach().cpu(), row_by_row(w, gradients, kind, options))


@pytest.mark.parametrize("kind,options", SETTINGS)
def test_dense_is_pytorchs_for_the_whole(kind, options, device):
    w = torch.randn(12, 5, dtype=f64, device=device)
    p, q = torch.nn.Parameter(w.clone()), torch.nn.Parameter(w.clone())
    ours, theirs = RowSparse(kind, [p], mode="dense", **options), kind([q], **options)
    for rows, values in sparse_gradients(w.shape, 9, f64):
        given_rows(p, rows, values)
        q.grad = p.grad.to_dense()
        ours.step(), theirs.step()
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize("kind,options", SETTINGS)
def test_dense_gradients_and_any_shape(kind, options, device):
    shapes = [(4, 3), (7,), (2, 3, 4), (1,)]
    ps = [torch.nn.Parameter(torch.randn(s, dtype=f64, device=device)) for s in shapes]
    qs = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    ours, theirs = RowSparse(kind, ps, **options), kind(qs, **options)
    for _ in range(5):
        for p, q in zip(ps, qs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step(), theirs.step()
    torch.testing.assert_close(ps, qs)


def test_foreign_and_accumulated_gradients(device):
    "An embedding's gradient has duplicates; two backward passes make one gradient"
    torch.manual_seed(0)
    e = torch.nn.Embedding(10, 3, sparse=True, device=device)
    f = torch.nn.Embedding(10, 3, device=device)
    f.load_state_dict(e.state_dict())
    ours, theirs = RowSparse(SGD, e.parameters(), lr=0.1, mode="dense", momentum=0.9), SGD(f.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for o in (ours, theirs):
            o.zero_grad()
        for seed in (1, 2):
            ids = torch.randint(10, (8,), generator=torch.Generator().manual_seed(seed)).to(device)
            e(ids).square().sum().backward(), f(ids).square().sum().backward()
        ours.step(), theirs.step()
    torch.testing.assert_close(e.weight, f.weight)


def test_a_heads_gradient_is_known(device):
    "Its rows go to the optimizer as they are: no sort, no wait"
    x, w, y = sample(device=device)
    head, layer = make_head(w, sample_rate=0.3), torch.nn.Linear(6, 6, device=device, dtype=f64)
    for _ in range(3):
        head.zero_grad()
        head(layer(x), y).backward()
        known, g = head.weight.grad_rows, head.weight.grad
        assert not g.is_coalesced() and g._indices().data_ptr() == known.index.data_ptr()
        assert partial_fc.live_rows(head.weight, g)[0] is known.rows


def test_accumulation_over_the_head(device):
    x, w, y = sample(device=device)
    head = make_head(w, sample_rate=0.3)
    optimizer = RowSparse(SGD, head.parameters(), lr=0.1)
    head(x[:10], y[:10]).backward()
    head(x[10:], y[10:]).backward()  # another sample
    total = head.weight.grad.to_dense()
    optimizer.step()
    torch.testing.assert_close(head.weight, w - 0.1 * total)


def test_two_forwards_then_their_backwards(device):
    x, w, y = sample(device=device)
    head = make_head(w, sample_rate=0.3)
    optimizer = RowSparse(SGD, head.parameters(), lr=0.1)
    one = head(x[:10], y[:10])
    two = head(x[10:], y[10:])
    one.backward()  # its rows are not those of the last forward
    total = head.weight.grad.to_dense()
    optimizer.step()
    torch.testing.assert_close(head.weight, w - 0.1 * total)
    del two


@pytest.mark.parametrize("kind,options", [(SGD, dict(lr=0.1, momentum=0.9, dampening=0.5)), (ADAMW, dict(lr=0.01))])
def test_resume_bit_for_bit(kind, options, device):
    def make():
        torch.manual_seed(1)
        head = PartialFC(COUNT, 6, sample_rate=0.2, device=device)
        return head, RowSparse(kind, head.parameters(), **options)
    def run(head, optimizer, steps):
        losses = []
        for k in steps:
            x, _, y = sample(dtype=f32, device=device, seed=k)
            optimizer.zero_grad()
            loss = head(x, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses
    (a, oa), (b, ob) = make(), make()
    run(a, oa, range(4))
    file = io.BytesIO()
    torch.save([a.state_dict(), oa.state_dict()], file)
    file.seek(0)
    for held, state in zip((b, ob), torch.load(file, weights_only=True)):
        held.load_state_dict(state)
    assert run(a, oa, range(4, 8)) == run(b, ob, range(4, 8)) and torch.equal(a.weight, b.weight)


def test_state_keeps_its_dtypes():
    p = torch.nn.Parameter(torch.randn(6, 3).bfloat16())
    optimizer = RowSparse(ADAMW, [p], lr=0.1)
    for rows, values in sparse_gradients(p.shape, 3, bf16, count=2):
        given_rows(p, rows, values)
        optimizer.step()
    other = RowSparse(ADAMW, [p], lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, t in optimizer.state[p].items():
        held = other.state[p][name]
        assert held.dtype == t.dtype and torch.equal(held, t) and held is not t
    assert other.state[p]["exp_avg"].dtype == f32 and other.state[p]["row_steps"].dtype == torch.int32


@pytest.mark.parametrize("kind,options", [(SGD, dict(lr=0.1, momentum=0.9)), (ADAMW, dict(lr=0.01))])
def test_goes_on_from_pytorchs_state(kind, options):
    w = torch.randn(8, 3, dtype=f64)
    p, q = torch.nn.Parameter(w.clone()), torch.nn.Parameter(w.clone())
    theirs = kind([q], **options)
    for _ in range(3):
        q.grad = torch.randn(8, 3, dtype=f64)
        theirs.step()
    p.data.copy_(q.data)
    ours = RowSparse(kind, [p], mode="dense", **options)
    ours.load_state_dict(theirs.state_dict())
    for rows, values in sparse_gradients(w.shape, 3, f64):
        given_rows(p, rows, values)
        q.grad = p.grad.to_dense()
        ours.step(), theirs.step()
    torch.testing.assert_close(p, q)


def test_schedules_groups_and_closures():
    p, q = (torch.nn.Parameter(torch.ones(3, 2)) for _ in "pq")
    optimizer = RowSparse(SGD, [dict(params=[p]), dict(params=[q], lr=1.0)], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    def closure():
        optimizer.zero_grad()
        loss = (p.sum() + q.sum())
        loss.backward()
        return loss
    assert optimizer.step(closure) == 12
    schedule.step()
    assert optimizer.step(closure) < 12
    assert p[0, 0].item() == pytest.approx(1 - 0.1 - 0.01) and q[0, 0].item() == pytest.approx(1 - 1.0 - 0.1)


@pytest.mark.parametrize("kind,options,match", [
    (torch.optim.Adagrad, dict(lr=0.1), "optimizer_class"), ("sgd", {}, "optimizer_class"), (SGD, dict(lr=0.1, mode="eager"), "mode"),
    (SGD, dict(lr=-1.0), "learning rate"), (ADAMW, dict(amsgrad=True), "amsgrad"), (SGD, dict(lr=0.1, nesterov=True), "Nesterov")])
def test_optimizers_that_cannot_be(kind, options, match):
    with pytest.raises(ValueError, match=match):
        RowSparse(kind, [torch.nn.Parameter(torch.zeros(2, 2))], **options)


STRIDED = {  # a weight [6,4,2,2] or [6,4] of other strides than its own copy's
    "transposed": lambda d: torch.empty(4, 6, device=d).T, "every other column": lambda d: torch.empty(6, 8, device=d)[:, ::2],
    "every other row": lambda d: torch.empty(12, 4, device=d)[::2], "channels last": lambda d: torch.empty(6, 4, 2, 2, device=d).to(memory_format=torch.channels_last),
    "permuted": lambda d: torch.empty(2, 4, 6, 2, device=d).permute(2, 1, 3, 0), "a slice of four": lambda d: torch.empty(6, 4, 2, 5, device=d)[..., 1:3],
}


def strided_steps(name, kind, mode, device, dtype, rows):
    "A strided parameter after some steps, a contiguous copy of it after the same, and the bits that nobody may write"
    g, ends = torch.Generator().manual_seed(0), []
    like = STRIDED[name](device)
    whole = torch.full((like.untyped_storage().nbytes() // 4,), 7.0, device=device).to(dtype)
    own = whole.as_strided(like.shape, like.stride(), like.storage_offset())
    own.copy_(torch.randn(like.shape, generator=g))
    mine, plain = torch.nn.Parameter(own), torch.nn.Parameter(own.clone(memory_format=torch.contiguous_format))
    options = dict(lr=0.1, weight_decay=0.1) | (dict(momentum=0.9, dampening=0.5) if kind is SGD else {})
    given = [(torch.randperm(6, generator=g)[:3], torch.randn(3, *like.shape[1:], generator=g).to(dtype)) for _ in range(3)]
    for p in (mine, plain):
        optimizer = RowSparse(kind, [p], mode=mode, **options)
        for at, values in given:
            p.grad = torch.sparse_coo_tensor(at[None], values, p.shape, check_invariants=False).to(device)
            p.grad = p.grad if rows else p.grad.to_dense().mT.contiguous().mT
            optimizer.step()
        ends.append(p.detach().clone(memory_format=torch.contiguous_format))
    own.fill_(7.0)
    return *ends, whole


STEPS = [(SGD, True, "lazy"), (ADAMW, True, "lazy"), (SGD, True, "dense"), (ADAMW, True, "dense"), (SGD, False, "lazy"), (ADAMW, False, "lazy")]
STRIDED_STEPS = [(name, *step) for name in STRIDED for step in STEPS]


@pytest.mark.parametrize("name,kind,rows,mode", few(STRIDED_STEPS, *STRIDED_STEPS[::5], *STRIDED_STEPS[3::5]))
def test_strides_do_not_count(name, kind, rows, mode, device):
    for dtype in (f32, bf16):
        mine, plain, whole = strided_steps(name, kind, mode, device, dtype, rows)
        # numbers up to 4, rounded by the kernel and by PyTorch: 2⁻²² in fp32, a step of 2⁻⁶ in bf16
        torch.testing.assert_close(mine, plain, rtol=0, atol=2**-6 if dtype == bf16 else 1e-6)
        assert (whole == 7).all()


@pytest.mark.parametrize("name,kind,rows,mode", few(STRIDED_STEPS, *STRIDED_STEPS[::9]))
def test_strides_do_not_count_in_kernels(name, kind, rows, mode, kernels_for_all):
    test_strides_do_not_count(name, kind, rows, mode, kernels_for_all)


def test_the_update_kernel_follows_strides(place):
    p = torch.arange(6.0, device=place).view(2, 3).T  # rows 0 3, 1 4, 2 5
    u = Update(False, 1.0, 0.0, 0.9, 0.0, 0.0, False, 1.0)
    m, g = torch.zeros(3, 4, device=place)[:, ::2], torch.ones(4, 3, device=place).T[:, 2:]
    launch_update(p, m, None, None, g, None, None, u, None)
    assert p.tolist() == [[-1, 2], [0, 3], [1, 4]] and (m == 0.1 * 0 + 1).all()


def test_memory_that_elements_share_is_refused_before_anything_moves():
    moved = torch.nn.Parameter(torch.ones(3, 2))
    for shared in (torch.zeros(1, 3).expand(4, 3), torch.zeros(6).as_strided((4, 3), (1, 1)), torch.zeros(4, 1).expand(4, 3)):
        p = torch.nn.Parameter(shared)
        p.grad, moved.grad = torch.ones(4, 3), torch.ones(3, 2)
        with pytest.raises(ValueError, match="params: expected elements that share no memory"):
            RowSparse(SGD, [moved, p], lr=0.1).step()
        assert (moved == 1).all() and (p == 0).all()
    assert not partial_fc.may_overlap(torch.zeros(3, 0)) and not partial_fc.may_overlap(torch.zeros(())) and not partial_fc.may_overlap(torch.zeros(1, 3).T)


def test_a_step_that_fails_has_moved_nothing():
    ps = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizer = RowSparse(ADAMW, ps, lr=0.1)
    def step():
        for p in ps:
            p.grad = torch.ones_like(p)
        optimizer.step()
    step()
    before = [p.detach().clone() for p in ps], {n: t.clone() for n, t in optimizer.state[ps[0]].items()}
    for name, bad in (("exp_avg", torch.zeros(4, 2)), ("row_steps", torch.zeros(4, dtype=torch.int32))):
        good, optimizer.state[ps[1]][name] = optimizer.state[ps[1]][name], bad
        with pytest.raises(ValueError, match=f"state: expected {name} of .*give extend and remove the optimizer"):
            step()
        optimizer.state[ps[1]][name] = good
        torch.testing.assert_close(([p.detach() for p in ps], optimizer.state[ps[0]]), before)
    for shape, dims in ((ps[1].shape, 2), ((3,), 1)):  # single elements of a weight, or of a vector
        ps[1] = torch.nn.Parameter(torch.ones(shape))
        ps[1].grad = torch.sparse_coo_tensor(torch.zeros(dims, 1, dtype=torch.int64), torch.ones(1), shape, check_invariants=False)
        with pytest.raises(ValueError, match="grad: expected a dense one, or the rows of a weight"):
            RowSparse(SGD, ps, lr=0.1).step()
        torch.testing.assert_close(ps[0].detach(), before[0][0])


def test_a_state_that_cannot_be_loaded_changes_nothing():
    p = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = RowSparse(SGD, [p], lr=0.1, momentum=0.9)
    p.grad = torch.ones_like(p)
    optimizer.step()
    held, state = optimizer.state[p], optimizer.state_dict()
    class Broken(torch.Tensor):
        def detach(self):
            raise torch.OutOfMemoryError("no room")
    two = RowSparse(SGD, [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)], lr=0.5).state_dict()
    broken = dict(state, state={0: dict(state["state"][0], momentum_buffer=torch.zeros(3, 2).as_subclass(Broken))}, param_groups=[dict(state["param_groups"][0], lr=9.0)])
    for bad, error in ((two, ValueError), (broken, torch.OutOfMemoryError)):
        with pytest.raises(error):
            optimizer.load_state_dict(bad)
        assert optimizer.state[p] is held and optimizer.param_groups[0]["lr"] == 0.1


def test_bf16_weights_arrive_where_fp32_weights_do(device):
    "A step of 2⁻¹¹ of a weight is lost by rounding to nearest, not by chance"
    start = torch.ones(64, 64, device=device)
    def train(dtype, chance):
        p = torch.nn.Parameter(start.to(dtype, copy=True))
        optimizer = RowSparse(SGD, [p], lr=2**-11, stochastic_rounding=chance)
        for _ in range(256):
            given_rows(p, torch.arange(64), -torch.ones(64, 64, dtype=dtype))
            optimizer.step()
        return p.detach().float()
    assert torch.equal(train(bf16, False), start)
    assert train(f32, True).mean().item() == pytest.approx(1 + 256 / 2048, abs=1e-4)
    assert train(bf16, True).mean().item() == pytest.approx(1 + 256 / 2048, abs=1e-3)
    assert torch.equal(train(bf16, True), train(bf16, True))


def test_bf16_heads_learn():
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(100, 16, generator=g)
    def accuracy(dtype):
        torch.manual_seed(0)
        head, layer = PartialFC(100, 16, sample_rate=0.5, margin=CosFace(0.2, 16.0), dtype=dtype), torch.nn.Linear(16, 16)
        optimizer = RowSparse(SGD, [*head.parameters(), *layer.parameters()], lr=0.02, momentum=0.9)
        for k in range(120):
            y = torch.randint(100, (128,), generator=g.manual_seed(k + 1))
            optimizer.zero_grad()
            head(layer(centres[y] + 0.4 * torch.randn(128, 16, generator=g)), y).backward()
            optimizer.step()
        y = torch.arange(100).repeat(5)
        x = layer(centres[y] + 0.4 * torch.randn(500, 16, generator=g.manual_seed(0)))
        return (normalize(x) @ normalize(head.weight.float()).T).argmax(1).eq(y).float().mean().item()
    full, half = accuracy(f32), accuracy(bf16)
    assert full > 0.9 and half > full - 0.03


# --- classes that come and go ---

@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind,options", [(SGD, dict(lr=0.1, momentum=0.9, dampening=0.5)), (ADAMW, dict(lr=0.01))])
def test_extend_and_remove(kind, options, k):
    x, w, y = sample(k=k)
    head = make_head(w, k, sample_rate=0.3)
    optimizer = RowSparse(kind, head.parameters(), **options)
    def step(y):
        optimizer.zero_grad()
        head(x, y).backward()
        optimizer.step()
    step(y)
    weight, old = head.weight, {n: t.clone() for n, t in optimizer.state[head.weight].items()}
    before = weight.detach().clone()
    assert head.extend(5, optimizer) == range(COUNT, COUNT + 5) and head.weight is weight and weight.grad is None
    assert torch.equal(weight[:COUNT * k], before) and (weight[COUNT * k:].norm(dim=1) > 0).all()
    for name, t in optimizer.state[weight].items():
        if t.dim():
            assert torch.equal(t[:COUNT * k], old[name]) and not t[COUNT * k:].any() and len(t) == (COUNT + 5) * k
    step(y.clamp(max=COUNT + 4))
    kept, state = weight.detach().clone(), {n: t.clone() for n, t in optimizer.state[weight].items()}
    gone = torch.tensor([0, 17, COUNT + 4])
    new = head.remove(gone, optimizer)
    assert head.num_classes == COUNT + 2 and (new[gone] == -1).all()
    left = (new >= 0).nonzero().flatten()
    rows = (left[:, None] * k + torch.arange(k)).flatten()
    assert torch.equal(new[left], torch.arange(COUNT + 2)) and torch.equal(weight, kept[rows])
    assert all(torch.equal(t, state[n][rows]) for n, t in optimizer.state[weight].items() if t.dim())
    step(torch.where(y >= 0, new[y.clamp(min=0)], -1))


def test_an_optimizer_left_behind_says_so():
    x, w, y = sample()
    head = make_head(w, sample_rate=0.3)
    optimizer = one_step(head, x, y, momentum=0.9)
    head.extend(3)
    head(x, y).backward()
    with pytest.raises(ValueError, match="give extend and remove the optimizer"):
        optimizer.step()
    with pytest.raises(ValueError, match="optimizers: expected"):
        head.extend(3, SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    for bad in ([-1], [COUNT + 3], list(range(COUNT + 3))):
        with pytest.raises(ValueError, match="classes: expected"):
            head.remove(bad)
    for bad in ([0.5], [True, False]):  # neither a share nor a mask
        with pytest.raises(ValueError, match="classes: expected integers"):
            head.remove(bad)
    with pytest.raises(ValueError, match="n: expected"):
        head.extend(0)


def trained_head(kind=SGD, **options):
    "A head, two optimizers that hold its weight, and what all three hold"
    x, w, y = sample()
    head = make_head(w, sample_rate=0.3)
    optimizers = [RowSparse(kind, head.parameters(), lr=0.1, **options) for _ in range(2)]
    head(x, y).backward()
    for optimizer in optimizers:
        optimizer.step()
    return head, optimizers, held_by(head, optimizers)


def held_by(head, optimizers):
    "All that extend and remove may change, copied; and PyTorch's generator"
    state = [{n: t.clone() for n, t in o.state[head.weight].items()} for o in optimizers]
    return dict(weight=head.weight.detach().clone(), grad=head.weight.grad.to_dense(), count=torch.tensor(head.num_classes),
                sampler=head.sampler.state_dict(), state=state, generator=torch.get_rng_state())


class OutOfMemory(torch.optim.SGD):
    "Keeps state of a weight whose copies nobody can afford"
    def __init__(self, p, fails):
        super().__init__([p], lr=0.1)
        class Large(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                if getattr(function, "__name__", "") in fails:
                    raise torch.OutOfMemoryError("no room")
                return super().__torch_function__(function, types, args, kwargs or {})
        self.state[p]["exp_avg"] = torch.zeros_like(p.data).as_subclass(Large)


WRONG = {  # what is given beside one optimizer that is right, and what is raised
    "another's optimizer": (lambda head, other: SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1), ValueError, "ones that hold the head's weight, got SGD"),
    "no optimizer": (lambda head, other: "sgd", ValueError, "optimizers: expected"),
    "state of other rows": (lambda head, other: other.state[head.weight].update(momentum_buffer=torch.zeros(7, 6, dtype=f64)) or other,
                            ValueError, "optimizers: expected state of 300 rows"),
    "counts of other rows": (lambda head, other: other.state[head.weight].update(row_steps=torch.zeros(7, dtype=torch.int32)) or other,
                             ValueError, "got row_steps of \\[7\\]"),
    "no memory": (lambda head, other: OutOfMemory(head.weight, ("cat", "new_zeros", "__getitem__")), torch.OutOfMemoryError, "no room"),
}


@pytest.mark.parametrize("change", ["extend", "remove"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_change_that_fails_has_changed_nothing(wrong, change):
    head, (optimizer, other), _ = trained_head(momentum=0.9, dampening=0.5)
    make, error, match = WRONG[wrong]
    bad = make(head, other)
    before = held_by(head, [optimizer])
    with pytest.raises(error, match=match):
        getattr(head, change)(1000 if change == "extend" else [3, 5], optimizer, bad)
    torch.testing.assert_close(held_by(head, [optimizer]), before, rtol=0, atol=0)


@pytest.mark.parametrize("change,argument", [("extend", 2**70), ("extend", 2**45), ("extend", 1.0), ("extend", True), ("extend", -1), ("remove", [300]),
                                             ("remove", [-1]), ("remove", [0.0]), ("remove", "a"), ("remove", list(range(300)))])
def test_a_number_of_classes_that_cannot_be_changes_nothing(change, argument):
    head, optimizers, before = trained_head(ADAMW)
    with pytest.raises((ValueError, TypeError, RuntimeError, OverflowError)):
        getattr(head, change)(argument, *optimizers)
    torch.testing.assert_close(held_by(head, optimizers), before, rtol=0, atol=0)


def test_vectors_that_cannot_be_drawn_change_nothing(monkeypatch):
    head, optimizers, before = trained_head(ADAMW)
    def fail(*args, **options):
        raise RuntimeError("no normal numbers here")
    monkeypatch.setattr(torch.nn.init, "normal_", fail)
    with pytest.raises(RuntimeError, match="no normal numbers"):
        head.extend(3, *optimizers)
    torch.testing.assert_close(held_by(head, optimizers), before, rtol=0, atol=0)


def test_an_optimizer_without_state_has_none_after_a_change():
    head = PartialFC(10, 4, sample_rate=0.5)
    optimizer = RowSparse(SGD, head.parameters(), lr=0.1, momentum=0.9)
    head.extend(3, optimizer, optimizer), head.remove([0], optimizer)
    assert not optimizer.state_dict()["state"] and len(head.weight) == head.num_classes == 12


def test_a_checkpoint_of_another_class_count():
    with pytest.raises(RuntimeError, match="size mismatch"):
        PartialFC(10, 4).load_state_dict(PartialFC(11, 4).state_dict())


def test_copies_and_files():
    x, w, y = sample()
    head = make_head(w, sample_rate=0.3)
    head(x, y).backward()
    other = copy.deepcopy(head)
    file = io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    third = torch.load(file, weights_only=False)
    losses = [h(x, y) for h in (head, other, third)]
    assert losses[0] == losses[1] == losses[2]


# --- kernels, interpreted or compiled ---

def guarded(*shape, dtype=f32, device="cpu", values=None):
    "A tensor inside a larger one of NaN"
    around = torch.full((shape[0] + 12, *shape[1:]), math.nan, dtype=dtype, device=device)
    inner = around[6:6 + shape[0]]
    if values is not None:
        inner.copy_(values)
    return inner


DRAWS = list(itertools.product([1.0, 0.1, 0.37, 1e-5], [(0, 1), (0, 777), (1300, 5000), (2**33, 2**33 + 300)]))


@pytest.mark.parametrize("rate,span", few(DRAWS, *DRAWS[::5], *DRAWS[2::7]))
def test_draw_kernel(rate, span, place):
    s, seed, step = strata_of(rate), torch.tensor(2**40 + 5, device=place), torch.tensor(3, device=place)
    first = span[0] >> s.bits
    total = (-(-span[1] >> s.bits) - first) * s.slots
    out, shift = torch.full((total + 9,), -7, device=place), torch.full((total + 9,), math.nan, device=place)
    partial_fc.draw_kernel[(-(-total // 256),)](out, shift, seed, step, first, *span, total, 0, 1.5, s.whole, s.chance, s.slots, s.bits,
                                                partial_fc.ROUNDS, B=256)
    exact = draw_plain(seed.cpu(), step.cpu(), s, *span)
    assert torch.equal(out[:total].cpu(), exact) and (out[total:] == -7).all()
    assert torch.equal(shift[:total].cpu(), torch.where(exact < 0, -math.inf, 1.5)) and shift[total:].isnan().all()
    assert torch.equal(draw(seed, step, s, *span), out[:total])


def same_columns(got, exact):
    "All that columns say is the same; which living class the dead name is free"
    alive, index = got.rows[got.rows >= 0].cpu(), got.index.cpu()
    free = torch.equal(index[exact.rows >= 0], alive) and torch.isin(index, alive if len(alive) else torch.tensor([0])).all()
    rest = zip(got._replace(index=exact.index), exact)
    return free and all(a.shape == e.shape and torch.allclose(a.cpu().double(), e.double(), rtol=0, atol=0, equal_nan=True) for a, e in rest)


BATCHES = [(1, (0, 1)), (5, (0, 3)), (70, (300, 340)), (200, (0, 3000)), (200, (1234, 4000)), (9, (2**33 + 5, 2**33 + 900)), (0, (0, 900)), (9, (50, 50))]
COLUMNS = list(itertools.product(BATCHES, [1.0, 0.1, 0.37, 1e-5, "positives"], [True, False]))


@pytest.mark.parametrize("batch,rate,log_q", few(COLUMNS, *COLUMNS[::11], COLUMNS[25], (BATCHES[3], "positives", True)))
def test_columns_kernel(batch, rate, log_q, place):
    n, span = batch
    sampler, g = NegativeSampler(rate, 2**33 + 1, log_q), torch.Generator().manual_seed(n)
    y = torch.randint(span[0], max(span[1], span[0] + 1), (n,), generator=g)
    sampler.step += 9
    y[torch.arange(n) % 7 == 3] += 10**12  # no class at all
    ignored = y[1].item() if n > 1 else -5  # a class may be one that is ignored
    known = (y != ignored) & (y < span[1])
    missed = -math.log(rate) if log_q and rate != "positives" else 0.0
    args = sampler.seed, sampler.step, sampler.strata, *span
    exact = partial_fc.plain_columns(y, *args, ignored, missed, f32)
    got = partial_fc.launch_columns(y.to(place), *(a.to(place) for a in args[:2]), *args[2:], ignored, missed, f32)
    assert same_columns(got, exact)
    chosen = columns_of(torch.where(known, y, -1).to(place), -1, span[1] - span[0], sampler.to(place), f32, span[0])
    assert same_columns(chosen, partial_fc.plain_columns(torch.where(known, y, -1), *args, -1, missed, f32))
    assert torch.equal(exact.kept, torch.where(known, torch.arange(n), -1)) and torch.equal(exact.share.isnan(), (y != ignored) & ~known)
    wanted = max(int((y != ignored).sum()), 1)
    assert torch.equal(exact.share.nan_to_num(0.0), known / torch.tensor(wanted, dtype=f32))
    assert torch.equal(exact.rows[exact.slot[known]], y[known] - span[0]) and exact.rows.lt(span[1] - span[0]).all()


@pytest.mark.parametrize("shape,some", few([(shape, some) for shape in ((1, 1), (23, 40), (9, 130)) for some in (True, False)],
                                           ((1, 1), False), ((9, 40 + 90), True), ((23, 40), False)))
def test_unit_and_tangent_kernels(shape, some, place):
    (v, h), g = shape, torch.Generator().manual_seed(0)
    t = torch.randn(v, h, generator=g)
    if v > 5:
        t[4], t[5] = 0, t[5] * 1e-7
    t = guarded(v, h, device=place, values=t)
    rows = torch.cat([torch.randperm(v, generator=g), torch.tensor([-1])]).to(place) if some else None
    r = v + 1 if some else v
    unit, inverse = guarded(r, h, device=place), guarded(r, device=place)
    x, kept = guarded(7, h, dtype=bf16, device=place, values=torch.randn(7, h, generator=g)), torch.tensor([0, 1, -1, 3, 4, -1, 6], device=place)
    ux, xi = guarded(7, h, dtype=bf16, device=place), guarded(7, device=place)
    unit_kernel[(-(-r // 4) + 2,)](x, kept, ux, xi, 7, *x.stride(), t, rows, unit, inverse, r, *t.stride(), h, EPS, BR=4, BH=32)
    exact = unit_rows_of(x.double().cpu(), kept.cpu(), f64, EPS)
    torch.testing.assert_close([ux.double().cpu(), xi.double().cpu()], list(exact), rtol=1e-2, atol=1e-6)
    exact = unit_rows_of(t.double().cpu(), None if rows is None else rows.cpu(), f64, EPS)
    torch.testing.assert_close([unit.double().cpu(), inverse.double().cpu()], list(exact), rtol=1e-5, atol=1e-6)
    d = torch.randn(r, h, generator=g)
    out, factor = guarded(r, h, device=place, values=d), torch.tensor(1.5, device=place)
    tangent_kernel[(-(-r // 4),)](out, unit, inverse, factor, out, r, h, BR=4, BH=32)
    expected = torch.empty(r, h, dtype=f64)
    partial_fc.to_tangent(d.double(), *exact, torch.tensor(1.5, dtype=f64), expected)
    assert relative_error(out.cpu(), expected) < 1e-5


OF_SCORES = {"plain": Scoring(1, 16.0, -1.0, False, EPS, 2.0, 0.0), "dropped": Scoring(1, 16.0, -1.0, False, EPS, 0.1, -math.inf),
             "at zero": Scoring(1, 64.0, -1.0, False, EPS, 0.1, 0.0)}


SCORES = [(name, shifted, size) for name, shifted, size in itertools.product(OF_SCORES, (True, False), [(1, 1, 3), (19, 70, 40), (33, 128, 32)])]


@pytest.mark.parametrize("name,shifted,size", few(SCORES, *SCORES[::4], SCORES[7]))
def test_score_kernels(name, shifted, size, place):
    n, t, h = size
    o, g, tiling = OF_SCORES[name], torch.Generator().manual_seed(0), Tiling(False, 16, 32, 32)
    draw_ = lambda *size: torch.randn(size, generator=g).to(place)
    x, w = guarded(n, h, device=place, values=normalize(draw_(n, h))), guarded(t, h, device=place, values=normalize(draw_(t, h)))
    slot = torch.randint(t, (n,), generator=g).to(place)
    slot[n // 2] = -1
    shift = None
    if shifted:
        shift = torch.where(draw_(t) > 1, -math.inf, 1.2 * (draw_(t) > 0))
    got, exact = launch_rest(x, w, slot, shift, o, tiling), plain_rest(x.double(), w.double(), slot, shift, o, 13)
    for a, e in zip(got, exact):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-4)
    g_rest, g_cos, grads = draw_(n), draw_(n), {}
    for kernel, (a, b, rest) in {True: (x, w, got[0]), False: (x.double(), w.double(), exact[0])}.items():
        dw = torch.full_like(b, math.nan)
        def spend(rows, dz):
            dw[rows] = dz.T @ a
        dx = columns_bwd(g_rest.to(a.dtype), g_cos.to(a.dtype), a, b, rest, slot, shift, o, kernel, spend=spend, need_x=True, tiling=tiling)
        grads[kernel] = dx, dw
    for a, e in zip(grads[True], grads[False]):
        assert relative_error(a.cpu(), e.cpu()) < 1e-4


@pytest.fixture
def kernels_for_all(place, monkeypatch):
    "The kernels take fp32, interpreted"
    if place != "cpu":
        pytest.skip("a GPU has its kernels without asking")
    monkeypatch.setattr(partial_fc, "has_kernel", lambda t: t.dtype != f64 and t.numel() > 0)
    monkeypatch.setattr(partial_fc, "takes_columns", lambda x, o: len(x) > 0 and o.centers == 1 and o.pace < 0)
    return place


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("margin", [CosFace(0.2, 16.0), ArcFace(0.3, 16.0)], ids=repr)
def test_these_kernels_serve_margin_cross_entropy(margin, reduction, kernels_for_all, monkeypatch):
    x, w, _ = sample_data(13, 20, 70, f32, kernels_for_all)
    y = torch.tensor([5, -100, 69, *range(10)], device=kernels_for_all)
    launched, way = [], partial_fc.launch_rest
    monkeypatch.setattr(partial_fc, "launch_rest", lambda *a, **o: launched.append(1) or way(*a, **o))
    loss = partial(margin_cross_entropy, x, w, y, margin=margin, reduction=reduction)
    tiled, ours = loss(method="tiles"), loss()
    assert len(launched) == 1
    g = torch.linspace(0.5, 2, ours.numel(), device=ours.device).view(ours.shape)
    exact, got = (torch.autograd.grad(t, [x, w], g) for t in (tiled, ours))
    for a, b in zip((ours, *got), (tiled, *exact)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("dtype", [bf16, torch.float16], ids=str)
@pytest.mark.parametrize("margin", [CosFace(0.2, 16.0), ArcFace(0.3, 16.0)], ids=repr)
def test_these_kernels_serve_margin_cross_entropy_on_a_gpu(margin, dtype):
    x, w, y = sample_data(300, 72, 5000, dtype, "cuda")
    y[::7] = -100
    loss = partial(margin_cross_entropy, margin=margin, reduction="none")
    g = torch.linspace(0.5, 2, 300, device="cuda")
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    exact, ours = loss(*wide, y, method="tiles"), loss(x, w, y, method="recompute")
    torch.testing.assert_close(ours.double(), exact, rtol=2e-3, atol=2e-2)
    assert not ours[::7].any()
    for a, e in zip(torch.autograd.grad(ours, [x, w], g), torch.autograd.grad(exact, wide, g.double())):
        assert a.dtype == dtype and relative_error(a, e) < 2e-2


def test_margin_cross_entropy_names_its_ways():
    x, w, y = sample_data(3, 4, 5)
    for method in ("fused", "recompute"):  # the one is none, the other has no kernels for fp32
        with pytest.raises(ValueError, match="method"):
            margin_cross_entropy(x, w, y, margin=ArcFace(), method=method)


@pytest.mark.parametrize("case", few([c for c in CASES if "SubCenter" not in c and "Circle" not in c],
                                     "log q", "conflict zero", "AdaFace", "few classes"))
def test_definition_by_kernels(case, kernels_for_all):
    assert not faults(**CASES[case], dtype=f32, tolerance=1e-4)


def test_a_line_is_what_any_margin_is(kernels_for_all, monkeypatch):
    "CosFace's short way against the way of all margins: losses, gradients, statistics, a label that is no class, no labels"
    class Curve(CosFace):
        "No line, as far as anybody knows"
    v = 40
    x, w, y = sample(13, v=v, dtype=f32)
    x[3] = 0
    monkeypatch.setattr(partial_fc, "check_labels", lambda *args: None)
    for labels in (y, y.index_fill(0, torch.tensor([2]), v), torch.full_like(y, -1)):
        ways = []
        for margin in (CosFace(0.3, 40.0), Curve(0.3, 40.0)):
            head = PartialFC(v, 6, margin=margin, sample_rate=0.3)
            head.weight.data.copy_(w)
            xs = x.clone().requires_grad_()
            loss, told = head(xs, labels, return_stats=True)
            assert type(loss.grad_fn).__name__.startswith("_LineLoss") == (type(margin) is CosFace)
            dx, dw = torch.autograd.grad(2.5 * loss, [xs, head.weight])
            assert not any(t.requires_grad for t in told)
            assert has_no_second_derivative(head(xs, labels), xs)
            ways.append((loss.detach(), dx, dw.to_dense(), *told))
        torch.testing.assert_close(*ways, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert ways[0][0].isnan() == (labels >= v).any()


UPDATES = {"SGD": Update(False, 0.1, 0.0, 0.0, 0.0, 0.0, False, 1.0), "momentum": Update(False, 0.1, 0.01, 0.9, 0.0, 0.0, False, 1.0),
           "dampening": Update(False, 0.1, 0.01, 0.9, 0.3, 0.0, False, 1.0), "Nesterov": Update(False, 0.1, 0.01, 0.9, 0.0, 0.0, True, -1.0),
           "AdamW": Update(True, 0.1, 0.01, 0.9, 0.999, 1e-8, False, 1.0)}


@pytest.mark.parametrize("name,mode,dtype", grid(list(UPDATES), ["rows", "all", "slots"], [f32, bf16]))
def test_update_kernel(name, mode, dtype, place):
    u, (v, h, t), g = UPDATES[name], (30, 20, 12), torch.Generator().manual_seed(0)
    rows = torch.randperm(v, generator=g)[:t]
    rows[2] = -1
    times = torch.randint(40, (v,), generator=g, dtype=torch.int32)
    times[:9] = 0
    values = torch.randn(v if mode == "all" else t, h, generator=g)
    def state():
        made = [torch.randn(v, h, generator=g.manual_seed(1)).to(dtype), torch.rand(v, h, generator=g), torch.rand(v, h, generator=g), times]
        return [m.clone().to(place) if keep else None for m, keep in zip(made, (True, u.a > 0, u.adam, u.adam or u.b > 0))]
    ours, exact, seed = state(), [None if s is None else s.cpu() for s in state()], None if dtype == f32 else 5 << 40
    spare, slots, some, used = torch.where(rows < 0, v, rows), None, rows.to(place), values
    keep = rows >= 0
    if mode == "slots":
        slots = torch.full((v + 1,), -1, dtype=torch.int32)
        slots[spare] = torch.arange(t, dtype=torch.int32)
        slots, some, used = slots.to(place), None, torch.zeros(v + 1, h).index_copy_(0, spare, values)[:-1]
    elif mode == "all":
        some = None
    launch_update(*ours, values.to(place), some, slots, u, seed)
    plain_update(*exact, *((values[keep], rows[keep]) if mode == "rows" else (used, None)), u, seed)
    for a, e in zip(ours, exact):
        if a is not None:
            tight = a.dtype != bf16
            torch.testing.assert_close(a.cpu(), e, rtol=1e-5 if tight else 8e-3, atol=1e-6 if tight else 1e-2)


@pytest.mark.parametrize("h", [1, 5, 96])
def test_threads_do_not_read_what_others_wrote(h, device):
    "Rows narrower than a program's threads, and counts that several threads read: the same bits, and PyTorch's"
    v = 3000 if device == "cuda" else 60
    w = torch.randn(v, h, generator=torch.Generator().manual_seed(0))
    ends = []
    for mode in ("lazy", "dense", "dense"):
        p = torch.nn.Parameter(w.to(device, copy=True))
        q = torch.nn.Parameter(w.double())
        ours, theirs = RowSparse(ADAMW, [p], lr=0.01, mode=mode), ADAMW([q], lr=0.01)
        for rows, values in sparse_gradients(w.shape, 12, f32, count=v if mode == "lazy" else v // 3):
            given_rows(p, rows, values)
            q.grad = p.grad.to_dense().double().cpu()
            ours.step(), theirs.step()
        assert relative_error(p.detach().cpu(), q.detach()) < 1e-6
        ends.append(p.detach())
    assert torch.equal(*ends[1:])
    x, y = torch.randn(9, h, device=device), torch.arange(9, device=device)
    head = PartialFC(2000, h, device=device, sample_rate=0.5)
    grads = []
    for _ in range(2):
        head.sampler.step.zero_()
        grads.append(torch.autograd.grad(head(x, y), head.weight)[0].to_dense())
    assert torch.equal(*grads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_no_step_waits_for_the_host(rate):
    head = PartialFC(20000, 64, sample_rate=rate, device="cuda")
    optimizer = RowSparse(SGD, head.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(128, 64, device="cuda", dtype=bf16, requires_grad=True)
    y = torch.randint(20000, (128,), device="cuda")
    for k in range(4):
        if k == 3:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            head(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("case", ["all", "a tenth", "log q", "ArcFace", "conflict"])
def test_kernels_and_tiles_agree(case):
    options, grads = CASES[case], {}
    x, w, y = sample(200, 64, 3000, dtype=f32, device="cuda")
    for method in ("recompute", "tiles"):
        sampler = None if "rate" not in options else NegativeSampler(options["rate"], 11, options.get("log_q", False))
        head = make_head(w, name=options.get("name", "CosFace"), sampler=sampler, conflict=options.get("conflict"), method=method)
        xs = x.bfloat16().requires_grad_()
        loss = head(xs, y)
        grads[method] = loss.detach(), *(t.to_dense() for t in torch.autograd.grad(loss, [xs, head.weight]))
    for a, b in zip(*grads.values()):
        assert relative_error(a.cpu(), b.cpu()) < 1e-2


def test_the_first_step_imports_no_host_reads(monkeypatch):
    "No operator of a step asks for a value, on any device"
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = []
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))
    head = PartialFC(COUNT, 6, sample_rate=0.3)
    optimizer = RowSparse(SGD, head.parameters(), lr=0.1, momentum=0.9)
    x, _, y = sample(dtype=f32)
    monkeypatch.setattr(partial_fc, "check_labels", lambda *args: None)  # on a CPU labels are looked at
    with Watch():
        head(x, y).backward()
    assert not [n for n in seen if any(word in n for word in ("nonzero", "unique", "_local_scalar", "masked_select", "equal.default"))]
    del optimizer


# --- planted bugs ---

MUTANTS = {
    "the permutation forgets its key": ("(key + r * GOLDEN & MASK) ^ right", "(r * GOLDEN & MASK) ^ right"),
    "the step is forgotten": ("for word in (seed, step, block)", "for word in (seed, seed, block)"),
    "blocks share a permutation": ("for word in (seed, step, block)", "for word in (seed, step, step)"),
    "one more is always drawn": ("(mix(key ^ 0x5A5A5A5A) < s.chance).long()", "1"),
    "the last classes are never drawn": ("first, last = start >> s.bits, -(-stop >> s.bits)", "first, last = start >> s.bits, stop >> s.bits"),
    "classes past the end are drawn": ("(slot < drawn_of(key, s)) & (chosen >= start) & (chosen < stop)", "(slot < drawn_of(key, s)) & (chosen >= start)"),
    "the inverse runs forward": ("key, s.bits, back=True)", "key, s.bits)"),
    "the step stands still": ("def advance(self) -> None: self.step.add_(1)", "def advance(self): pass"),
    "labels get two columns": ("torch.where(at >= 0, at, fresh), -1)", "fresh, -1)"),
    "duplicates get two columns": ("len(drawn) + first_occurrence(y)", "len(drawn) + n"),
    "dead columns count": (".masked_fill_(rows < 0, -torch.inf)", ""),
    "log q has the wrong sign": ("missed = -math.log(sampler.rate)", "missed = math.log(sampler.rate)"),
    "the batch's classes are corrected": ("if missed: shift = torch.where(present[:-1], 0.0, shift)", "pass"),
    "the target stays in the sum": ("leave_out(scores, target), close, which", "scores, close, which"),
    "conflicts pull": ("if close is not None: d.masked_fill_(close, 0.0)", "pass"),
    "conflicts are kept": ("scores = torch.where(close, o.fill, scores)", "pass"),
    "the scale is forgotten backward": ("exp_().mul_(g_rest[:, None] * o.level)", "exp_().mul_(g_rest[:, None])"),
    "Circle's slope is forgotten": ("if o.pace >= 0: d.mul_(bent_slope(z, o))", "pass"),
    "the cosine keeps its scale": ("z.gather(1, target.column), 0.0)[:, 0] / o.level", "z.gather(1, target.column), 0.0)[:, 0]"),
    "what is along w stays": ("out.copy_((d - along[:, None] * u)", "out.copy_((d)"),
    "lengths are forgotten": ("inverse.abs() if factor is None", "1 + 0 * inverse if factor is None"),
    "ignored rows count": ("torch.where(known, n, -1), share", "n, share"),
    "ignored rows share in the mean": ("torch.where(wanted, torch.nan, 0.0)", "torch.where(wanted, torch.nan, 1.0)"),
    "gradients go to the wrong rows": ("rows.amax().clamp(min=0), rows)", "rows.amax().clamp(min=0), rows).flip(0)"),
    "a dead column names row 0": ("rows.amax().clamp(min=0), rows)", "0, rows)"),
    "sub-centres are one": ("each = rows[:, None] * k + torch.arange(k, device=rows.device)", "each = rows[:, None] * k + 0 * torch.arange(k)"),
    "momentum is plain": ("g = g + u.a * m if u.nesterov else m", "g = m"),
    "dampening from the start": ("t == 1, g, u.a * m + (1 - u.b) * g)", "t == 0, g, u.a * m + (1 - u.b) * g)"),
    "decay reaches no weight": ("g = g + u.decay * old", "pass"),
    "AdamW forgets to correct": ("(1 - x**power_)", "(1 + 0 * x**power_)"),
    "AdamW decays the gradient": ("new = old - u.lr * u.decay * old", "new = old"),
    "rows' steps are the run's": ("(take_(times) + 1)", "(times.amax().expand(len(old)) + 1)"),
    "dead rows are stepped": ("if rows is not None: rows, g = rows[rows >= 0], g[rows >= 0]", "pass"),
    "dense is lazy": ("if rows is not None and dense:", "if False:"),
    "any gradient is taken for a known one": ("known.index.data_ptr() == g._indices().data_ptr()", "True"),
    "it always minimises": ('-1.0 if group["maximize"] else 1.0', "1.0"),
    "both moments are corrected alike": ("for x in (u.a, u.b))", "for x in (u.a, u.a))"),
    "a resumed row starts anew": ('int(state["step"]), dtype=torch.int32', "0, dtype=torch.int32"),
    "a loaded state has the weight's dtype": ("for (p, name, _), t in zip(tensors, made): self.state[p][name] = t", "pass"),
    "short gradients grow": (".clamp(max=1).to(v.dtype)", ".to(v.dtype)"),
    "the norm forgets duplicates": ("if known is None or rows is not known.rows: p.grad = p.grad.coalesce()", "pass"),
    "the first parameter alone is checked": ("for p, group in given:  # all of them", "for p, group in given[:1]:  # all of them"),
    "memory may be shared": ("if stride <= reach: return True", "if stride < reach: return True"),
    "a change that fails has begun": ("    states = [rebuilt_state(", "    p.grad = None\n    states = [rebuilt_state("),
    "new classes have no vectors": ("    begin(rows[len(p):])\n", ""),
    "the optimizer's rows stay": ("if made: optimizer.state[p].update(made)", "pass"),
    "classes keep their numbers": ("keep.cumsum(0) - 1, -1)", "torch.arange(len(keep)), -1)"),
    "a step that fails has drawn": ("    straight = kernel and", "    if sampler is not None: sampler.advance()\n    sampler = None\n    straight = kernel and"),
}
PROBES = [CASES[c] for c in ("all", "a tenth", "log q", "conflict", "conflict zero", "Circle", "SubCenter", "fewer than rows", "few classes")]


def sampler_fault(m):
    "A word on what a sampler does wrong"
    for rate, v in ((0.1, 2500), (0.37, 700)):
        sampler = m.NegativeSampler(rate, 3)
        last, total = None, 0
        for _ in range(30):
            sampler.advance()
            drawn = sampler(v)
            alive = drawn[drawn >= 0]
            if len(alive.unique()) != len(alive) or alive.max() >= v:
                return "a draw is no subset"
            at = sampler.find(torch.arange(v))
            if not torch.equal(drawn[at[at >= 0]], torch.arange(v)[at >= 0]) or (at >= 0).sum() != len(alive):
                return "a class is not found"
            if last is not None and len(set(alive.tolist()) & set(last.tolist())) > 1.5 * rate * len(alive) + 20:
                return "steps repeat"
            size = 2**sampler.strata.bits
            if v >= 2 * size and len(set((alive[alive < size]).tolist()) & set((alive[(alive >= size) & (alive < 2 * size)] - size).tolist())) > 3 * rate * rate * size + 20:
                return "blocks repeat"
            last, total = alive, total + len(alive)
        if abs(total / 30 / v - rate) > 0.004:
            return "the rate is wrong"
        if alive.max() < v - 60 / rate / 10 - 40:
            return "the last classes are missing"


PROBED = [(SGD, dict(lr=0.1, maximize=True)), (SGD, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)),
          (SGD, dict(lr=0.1, momentum=0.9, dampening=0.5)), (ADAMW, dict(lr=0.01, weight_decay=0.1, betas=(0.5, 0.6)))]


def optimizer_fault(m):
    "A word on what the optimizer does wrong"
    w = torch.randn(8, 3, dtype=f64, generator=torch.Generator().manual_seed(0))
    for kind, options in PROBED:
        p, q = torch.nn.Parameter(w.clone()), torch.nn.Parameter(w.clone())
        gradients = list(sparse_gradients(w.shape, 5, f64, count=4))
        lazy, dense, theirs = m.RowSparse(kind, [p], **options), m.RowSparse(kind, [q], mode="dense", **options), None
        e = torch.nn.Parameter(w.clone())
        theirs = kind([e], **options)
        for rows, values in gradients:
            given_rows(p, rows, values), given_rows(q, rows, values)
            e.grad = q.grad.to_dense()
            lazy.step(), dense.step(), theirs.step()
        if not torch.allclose(p, row_by_row(w, gradients, kind, options)):
            return f"lazy {kind.__name__} {options}"
        if not torch.allclose(q, e):
            return f"dense {kind.__name__} {options}"


def state_fault(m):
    "A word on what goes from one step to another, or from one row"
    x, w, y = sample()
    head = make_head(w, sample_rate=0.3, module=m)
    optimizer = m.RowSparse(SGD, head.parameters(), lr=0.1)
    losses = [head(x[:10], y[:10]), head(x[10:20], y[10:20])]
    losses[0].backward()  # as many rows as the last forward's, and others
    total = head.weight.grad.to_dense()
    optimizer.step()
    if not torch.allclose(head.weight, w - 0.1 * total):
        return "rows of another forward"
    if head.sampler.step != 2:
        return "steps are not counted"
    head.zero_grad()
    bad = x.clone()
    bad[y < 0] = math.nan
    head(bad, y).backward()
    if not head.weight.grad.to_dense().isfinite().all():
        return "ignored rows"


def resumed_fault(m):
    "A word on what an optimizer does with a state, and on clipping"
    p, q = (torch.nn.Parameter(torch.ones(3, 2, dtype=bf16)) for _ in "pq")
    theirs, ours = ADAMW([q], lr=0.1), m.RowSparse(ADAMW, [p], lr=0.1)
    for _ in range(3):
        q.grad = torch.ones_like(q)
        theirs.step()
    state = theirs.state_dict()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].float() + 2**-20
    ours.load_state_dict(state)
    if not torch.equal(ours.state[p]["exp_avg"], state["state"][0]["exp_avg"]):
        return "the state is rounded"
    p.grad = torch.sparse_coo_tensor([[0, 0]], torch.tensor([[3.0, 0], [0, 4.0]], dtype=bf16), p.shape, check_invariants=False)
    if ours.clip_grad_norm_(100.0) != 5 or ours.clip_grad_norm_(2.0) != 5 or not 1.98 < p.grad.to_dense().float().norm() < 2.02:
        return "clipping"
    p.grad = torch.sparse_coo_tensor([[0, 0]], torch.ones(2, 2, dtype=bf16), p.shape, check_invariants=False)
    if ours.clip_grad_norm_(100.0) != 8**0.5:
        return "duplicates"
    ours.step()
    if ours.state[p]["row_steps"].tolist() != [4, 3, 3]:
        return "counts"


def failure_fault(m):
    "A word on what calls that fail, and calls that change the classes, do wrong"
    p, q = torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.zeros(1, 3).expand(4, 3))
    p.grad, q.grad = torch.ones(4, 3), torch.ones(4, 3)
    with pytest.raises(ValueError):
        m.RowSparse(SGD, [p, q], lr=0.1).step()
    head, x = m.PartialFC(9, 3, sample_rate=0.5), torch.randn(4, 3)
    optimizer, y = m.RowSparse(SGD, head.parameters(), lr=0.1, momentum=0.9), torch.arange(4)
    head(x, y).backward()
    optimizer.step()
    with pytest.raises(ValueError):
        head.extend(5, optimizer, SGD([p], lr=0.1))
    if head.weight.grad is None or len(head.weight) != 9 or head.num_classes != 9 or (p != 1).any():
        return "what failed has changed something"
    head.extend(2, optimizer)
    if (head.weight[9:] == 0).all() or len(optimizer.state[head.weight]["momentum_buffer"]) != 11:
        return "new rows"
    if head.remove([0], optimizer).tolist() != [-1, *range(10)]:
        return "numbers"
    head.margin = Failing()
    with pytest.raises(RuntimeError):
        head(x, y)
    return None if head.sampler.step == 1 else "what failed has drawn"


def first_fault(m):
    for look in (resumed_fault, failure_fault, sampler_fault, optimizer_fault, state_fault):
        if found := look(m):
            return found
    for probe in PROBES:
        if found := faults(**probe, module=m):
            return found[0]
    return None


def test_the_unchanged_source_passes(tmp_path):
    assert first_fault(planted(partial_fc, tmp_path, *unchanged(MUTANTS.values()))) is None


@pytest.mark.parametrize("bug", MUTANTS)
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert fault_of(first_fault, partial_fc, tmp_path, *MUTANTS[bug]), f"no case notices that {bug}"


SCORE_BUGS = {
    "dead columns score": ("mask=cols < T, other=-float(\"inf\"))[None, :]", "mask=cols < T, other=0.0)[None, :]"),
    "columns past the end score": ("z = tl.where((cols < T)[None, :], z, -float(\"inf\"))", "z = z"),
    "targets stay in the sum": ("return tl.where(cols[None, :] == slot[:, None], -float(\"inf\"), z)", "return z"),
    "conflicts stay": ("z = tl.where(product > conflict, fill, z)", "z = z"),
    "conflicts pull": ("d = tl.where(product > conflict, 0.0, d)", "d = d"),
    "targets pull like others": ("d = tl.where(cols[None, :] == slot[:, None], hold[:, None], d)", "d = d"),
    "slabs begin at 0": ("slot_ptr + rows, mask=keep, other=-1) - begin", "slot_ptr + rows, mask=keep, other=-1)"),
    "runs do not join": ("& (RUN > 1)\n        base, s = join", "& (RUN > 99)\n        base, s = join"),
}
ROW_BUGS = {
    "dead rows are read": ("live = there & (row >= 0)", "live = there"),
    "short rows have a direction": ("sign = tl.where(norm > eps, 1.0, -1.0)", "sign = tl.where(norm > 0, 1.0, -1.0)"),
    "what is along short rows goes": ("along = tl.where(inverse > 0, along, 0.0)", "along = along"),
    "rows of zeros are divided": ("tl.where(norm > 0, 1 / tl.maximum(norm, eps), 1.0)", "1 / tl.maximum(norm, eps)"),
    "the factor is forgotten": ("scale *= tl.load(factor_ptr)", "scale *= 1"),
    "rounds share a key": ("turn += 0x9E3779B9", "turn += 0"),
    "the inverse starts elsewhere": ("turn = key + ((ROUNDS - 1) * 0x9E3779B9 & 0xFFFFFFFF)", "turn = key"),
    "duplicates get two columns": ("earliest = tl.minimum(earliest, tl.min(tl.where(same, other[None, :], N), 1))", "earliest = earliest"),
    "drawn labels get another column": ("slot = tl.where(found,", "slot = tl.where(found & False,"),
    "the batch's classes are corrected": ("tl.store(shift_ptr + slot, 0.0, mask=drawn)", "pass"),
    "rows count from 0": ("tl.where(own, y - start, -1)", "tl.where(own, y, -1)"),
    "the batch's dead name row 0": ("tl.where(own, y - start, name)", "tl.where(own, y - start, 0)"),
    "the dead that were drawn name row 0": ("tl.where(row < 0, name, row)", "tl.where(row < 0, 0, row)"),
    "ignored rows are kept": ("tl.where(known, at, -1), mask", "at, mask"),
    "ignored rows count": ("n += counts.to(tl.int32)", "n += (other < N).to(tl.int32)"),
    "labels out of range are ignored": ("tl.where(wanted, float(\"nan\"), 0.0)", "0.0"),
    "parts are added as they are": ("s = s * power(base, safe, UNIT) + tl.sum", "s = s + tl.sum"),
    "the largest of the last parts": ("        base = top\n    slot", "        base = tl.max(base_k, 0)\n    slot"),
    "the offset is forgotten": ("rest - (slope * cos + offset)", "rest - slope * cos"),
    "the loss is not shared": ("share * loss, mask=keep", "loss, mask=keep"),
    "the slope is forgotten": ("-slope * share * rise", "-share * rise"),
    "below 0 the rise is another": ("tl.where(gap < 0, e, 1.0)", "1.0"),
    "small losses vanish": ("e * (1 - e * (1 / 2 - e / 3))", "0 * e"),
    "rows without a label have a cosine": ("(keep & (slot >= 0))[:, None]", "keep[:, None]"),
}
UPDATE_BUGS = {
    "others' gradients are read": ("has = live & (place_ >= 0)", "has = live"),
    "dampening from the start": ("m = tl.where(t[:, None] == 1, g, a * m + b_left * g)", "m = a * m + b_left * g"),
    "Nesterov is plain": ("g = g + a * m if NESTEROV else m", "g = m"),
    "counts stand still": ("tl.store(times_ptr + row, count, mask=live)", "count = count"),
    "counts are those before": ("t = tl.load(times_ptr + row, mask=live, other=2).to(tl.float32)", "t = tl.load(times_ptr + row, mask=live, other=2).to(tl.float32) - 1"),
    "AdamW forgets to correct": ("p -= lr / rise[:, None] * m", "p -= lr * m"),
    "AdamW forgets to decay": ("p -= lr * decay * p", "p -= 0 * p"),
    "noise is the same everywhere": ("add_word(tl.full([BR, BH], 0x9E3779B9, tl.uint32), number ^ seed)", "add_word(tl.full([BR, BH], 0x9E3779B9, tl.uint32), number * 0 + seed)"),
    "rows of the weight touch each other": ("here = (row * p_row)[:, None] + cols * p_col", "here = (row * H)[:, None] + cols"),
    "momentum lies as the weight": ("in_first = (row * first_row)[:, None] + cols * first_col", "in_first = here"),
    "the second moment lies as the first": ("in_second = (row * second_row)[:, None] + cols * second_col", "in_second = in_first"),
    "rows of gradients touch each other": ("there = (place_ * g_row)[:, None] + cols * g_col", "there = (place_ * H)[:, None] + cols"),
    "rounding is down": ("(bits + (noise & 0xFFFF))", "(bits + 0 * noise)"),
}


def row_fault(m, place, g):
    "A word on what a kernel does otherwise than PyTorch"
    seed, step = torch.tensor(2**33 + 1), torch.tensor(4)
    for rate, n, span in [(0.37, 70, (0, 40)), (0.1, 60, (1234, 4000))]:
        y = torch.randint(*span, (n,), generator=g)
        y[3], y[5] = -1, 10**12
        args = strata_of(rate), *span, -1, 1.5, f32
        exact = partial_fc.plain_columns(y, seed, step, *args)
        if not same_columns(m.launch_columns(y.to(place), seed.to(place), step.to(place), *args), exact):
            return "columns"
    t, rows = torch.randn(23, 40, generator=g), torch.cat([torch.randperm(23, generator=g), torch.tensor([-1])])
    t[4], t[5] = 0, t[5] * 1e-7
    unit, inverse = torch.empty(24, 40, device=place), torch.empty(24, device=place)
    held = torch.cat([torch.full((1, 40), 3.0), t]).to(place)[1:]  # a row before the first, which nobody may read
    x, kept, ux, xi = torch.randn(5, 40, generator=g), torch.tensor([0, -1, 2, 3, 4]), torch.empty(5, 40, device=place), torch.empty(5, device=place)
    m.unit_kernel[(8,)](x.to(place), kept.to(place), ux, xi, 5, 40, 1, held, rows.to(place), unit, inverse, 24, 40, 1, 40, EPS, BR=4, BH=32)
    exact = unit_rows_of(t, rows, f32, EPS)
    if not all(torch.allclose(a.cpu(), e, rtol=1e-4) for a, e in zip((ux, xi, unit, inverse), (*unit_rows_of(x, kept, f32, EPS), *exact))):
        return "unit rows"
    parts, slot = torch.randn(2, 300, 19, generator=g), torch.arange(-1, 18)
    parts[0] = 20 * parts[0] - torch.linspace(0, 90, 19)  # gaps of both signs
    parts[1] = parts[1].abs()
    out, line = ([torch.empty(19, device=place) for _ in range(3)] for _ in range(2))
    share = torch.linspace(0, 1, 19)
    m.finish_rest_kernel[(3,)](parts.to(place), unit, torch.cat([torch.full((1, 40), 3.0).to(place), unit])[1:], slot.to(place), *out, share.to(place), *line, 7.0, -2.0, 19, 300, 40, UNIT=1.0, BN=8,
                              BP=128, BH=32)
    own = (exact[0][:19] * exact[0][slot.clamp(min=0)]).sum(1).masked_fill(slot < 0, 0.0)
    for a, e in zip(out, ((parts[0] + parts[1].log()).logsumexp(0), own, parts[0].amax(0))):
        if not torch.allclose(a.cpu(), e, rtol=1e-4, atol=1e-5):
            return "merge"
    gap = out[0].cpu().double() - 7 * out[1].cpu().double() + 2
    gap, share = gap.requires_grad_(), share.double()
    loss = share * F.softplus(gap, threshold=100)
    rise, = torch.autograd.grad(loss.sum(), gap)
    if not all(torch.allclose(a.cpu().double(), e, rtol=1e-4, atol=1e-7) for a, e in zip(line, (loss, rise, -7 * rise))):
        return "line"
    d, factor, out, expected = torch.randn(24, 40, generator=g), torch.tensor(1.5), torch.empty(24, 40, device=place), torch.empty(24, 40)
    m.tangent_kernel[(6,)](d.to(place), unit, inverse, factor.to(place), out, 24, 40, BR=4, BH=32)
    partial_fc.to_tangent(d, *exact, factor, expected)
    if not torch.allclose(out.cpu(), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item()):
        return "tangent"


def score_fault(m, place, g):
    tiling = Tiling(False, 16, 32, 32)
    for name, shifted in (("plain", True), ("at zero", False), ("dropped", True)):
        o, (n, t, h) = m.Scoring(*OF_SCORES[name]), (11, 75, 24)
        x, w = (normalize(torch.randn(k, h, generator=g)).to(place) for k in (n, t))
        slot = torch.randint(t, (n,), generator=g).to(place)
        shift = torch.where(torch.rand(t, generator=g) > 0.8, -math.inf, 1.2).to(place) if shifted else None
        if shifted:
            shift[slot] = 0.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(m, "run_length", lambda *sizes: 2)
            patch.setattr(m, "slab_columns", lambda *sizes: 64)
            got, exact = m.launch_rest(x, w, slot, shift, o, tiling), plain_rest(x, w, slot, shift, OF_SCORES[name], 130)
            if not all(torch.allclose(a, e, rtol=1e-4, atol=1e-4) for a, e in zip(got, exact)):
                return f"rest, {name}"
            terms, grads = (torch.randn(n, generator=g).to(place), torch.randn(n, generator=g).to(place)), []
            for module, kernel in ((m, True), (partial_fc, False)):
                dw = torch.zeros_like(w)
                def spend(rows, dz):
                    dw[rows] = dz.T @ x
                grads.append((module.columns_bwd(*terms, x, w, exact[0], slot, shift, o, kernel, spend=spend, need_x=True, tiling=tiling), dw))
        if not all(torch.allclose(a, e, rtol=1e-3, atol=1e-4 * e.abs().max().item()) for a, e in zip(*grads)):
            return f"dz, {name}"


def update_fault(m, place, g):
    for name, mode, dtype in grid(list(UPDATES), ("rows", "slots"), (f32, bf16)):
        u, rows, values = UPDATES[name], torch.randperm(30, generator=g)[:12], torch.randn(12, 20, generator=g)
        rows[2] = -1
        times = torch.randint(40, (30,), generator=g, dtype=torch.int32)
        times[:9] = 0
        made = [torch.randn(30, 20, generator=g).to(dtype), torch.rand(30, 20, generator=g), torch.rand(30, 20, generator=g), times]
        made = [t if keep else None for t, keep in zip(made, (True, u.a > 0, u.adam, u.adam or u.b > 0))]
        ours, exact = ([None if t is None else t.clone().to(d) for t in made] for d in (place, "cpu"))
        spare = torch.where(rows < 0, 30, rows)
        slots = torch.full((31,), -1, dtype=torch.int32).index_copy_(0, spare, torch.arange(12, dtype=torch.int32)).to(place)
        seed = None if dtype == f32 else 5 << 40
        held = torch.cat([torch.full((1, 20), 3.0), values]).to(place).T.contiguous().T[1:]
        ours[0] = ours[0].T.contiguous().T  # strides of their own for each, within their own memory
        ours[2] = None if ours[2] is None else ours[2].repeat_interleave(2, 1)[:, ::2]
        m.launch_update(*ours, held, rows.to(place) if mode == "rows" else None, None if mode == "rows" else slots, u, seed)
        whole = torch.zeros(31, 20).index_copy_(0, spare, values)[:-1]
        plain_update(*exact, *((values[rows >= 0], rows[rows >= 0]) if mode == "rows" else (whole, None)), u, seed)
        for a, e in zip(ours, exact):
            if a is not None and (a.cpu().float() - e.float()).abs().max() > (1e-5 if dtype == f32 else 1e-2 if a.dtype == bf16 else 1e-5):
                return f"update, {name}, {mode}"
            if a is not None and a.dtype == bf16 and (a.cpu() != e).float().mean() > 0.02:
                return "rounding"


KERNEL_BUGS = {bug: (look, pair) for look, bugs in ((row_fault, ROW_BUGS), (score_fault, SCORE_BUGS), (update_fault, UPDATE_BUGS))
               for bug, pair in bugs.items()}


def test_the_unchanged_kernels_pass(tmp_path, place):
    m = planted(partial_fc, tmp_path, *unchanged(pair for _, pair in KERNEL_BUGS.values()))
    assert not [found for look in (row_fault, score_fault, update_fault) if (found := look(m, place, torch.Generator().manual_seed(0)))]


@pytest.mark.parametrize("bug", KERNEL_BUGS)
def test_a_bug_in_a_kernel_is_noticed(bug, tmp_path, place):
    look, pair = KERNEL_BUGS[bug]
    find = partial(look, place=place, g=torch.Generator().manual_seed(0))
    assert fault_of(find, partial_fc, tmp_path, *pair), f"no case notices that {bug}"


def test_the_front_door():
    assert fl.PartialFC is PartialFC and fl.NegativeSampler is NegativeSampler and fl.RowSparse is RowSparse
    assert isinstance(fl.partial_fc, types.ModuleType)
    assert isinstance(PartialFC(10, 4, margin=AdaFace(), sample_rate=0.5).margin, AdaFace) and ArcFace() == ArcFace()
