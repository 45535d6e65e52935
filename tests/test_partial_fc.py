"""Partial FC: the head against its definition, faults of other heads, classes that come and go, kernels, planted bugs."""
import copy
import io
import itertools
import math
import types
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fusedloss as fl
from fusedloss import partial_fc, row_sparse
from fusedloss.baseline import sample_data
from fusedloss.core import cosine, negatives, operators, sampling
from fusedloss.core.cosine import EPS, HeadConfig, plain_negatives_lse, unit_rows_of
from fusedloss.core.sampling import NegativeSampler
from fusedloss.margins import AdaFace, ArcFace, CosFace, SubCenter, margin_cross_entropy, normalize
from fusedloss.partial_fc import PartialFC
from fusedloss.row_sparse import RowSparse
from workbook.measure import peak_memory, relative_error, saved_tensors
from grids import few, grid, thorough_but
from head_cases import (
    ADAMW, CASES, COUNT, SGD, Failing, bf16, f16, f32, f64, failure_fault, faults, kernels_for_all, make_head, one_step, place, sample,  # noqa: F401 (fixtures)
    scored_classes, state_fault)
from helpers import everywhere, fault_of, has_no_second_derivative, planted, unchanged
from test_margins import FORMULAS


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
    assert told.accuracy == ((c > others.amax(1)) & valid).double().sum() / valid.sum()
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
    o = HeadConfig(scale=64.0)
    unit, inverse = unit_rows_of(w, None, f32, EPS)
    rest, cos, _ = plain_negatives_lse(unit[:64], unit, y, None, o, 1000)
    peak = peak_memory(lambda: plain_negatives_lse(unit[:64], unit, y, None, o, 1000))
    assert peak < 64 * 1000 * 4 * 6


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
    plain = make_head(w, sample_rate=0.3)
    one_step(plain, layer(x).detach(), y, momentum=0.9)
    before = head.weight.detach().clone()
    step(True)
    assert torch.equal(before, head.weight) and scaler.get_scale() == 512 and head.sampler.step == 0
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


def test_a_sampler_and_a_rate_do_not_go_together():
    with pytest.raises(ValueError, match="sample_rate: expected"):
        PartialFC(10, 4, sample_rate=0.1, sampler=NegativeSampler(0.1))


@pytest.mark.parametrize("x,y,match", [
    (torch.randn(3, 5), torch.zeros(3, dtype=torch.int64), "features"), (torch.randn(3, 4), torch.zeros(2, dtype=torch.int64), "target"),
    (torch.randn(3, 4, dtype=f64), torch.zeros(3, dtype=torch.int64), "features"),
    (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "features"),
    (torch.randn(3, 4), [0, 1, 2], "target")])
def test_inputs_that_cannot_be_taken(x, y, match):
    head = PartialFC(10, 4, sample_rate=0.5)
    with pytest.raises(ValueError, match=f"{match}: expected"):
        head(x, y)
    assert head.sampler.used == 0 and getattr(head.weight, "grad_rows", None) is None


def test_a_forward_that_fails_has_drawn_nothing_and_seen_nothing():
    x, w, y = sample(dtype=f32)
    for margin, labels, error in ((AdaFace(), y + 7 * COUNT, IndexError), (AdaFace(reduce=lambda sums: 1 / 0), y, ZeroDivisionError), (Failing(), y, RuntimeError)):
        head = PartialFC(COUNT, 6, margin=margin, sample_rate=0.3)
        with pytest.raises(error):
            head(x, labels)
        if type(margin) is not Failing:
            margin.advance()
        assert head.sampler.used == 0 and (type(margin) is Failing or (margin.mean, margin.std) == (20, 100))


def test_a_row_that_overflowed_does_not_count_in_the_statistics():
    x, w, y = sample(dtype=f32)
    heads = [PartialFC(COUNT, 6, margin=AdaFace(momentum=0.5)) for _ in range(2)]
    y[2] = y[4] = 5
    bad = x.clone()
    bad[2, 0], bad[4, 0] = math.inf, math.nan
    heads[0](bad, y), heads[1](x, y.index_fill(0, torch.tensor([2, 4]), -1))
    for head in heads:
        head.margin.advance()
    assert heads[0].margin.state_dict() == heads[1].margin.state_dict() and heads[0].margin.mean != 20


def test_a_method_that_cannot_says_which_can(device):
    head = PartialFC(10, 4, method="recompute", margin=fl.margins.Circle(), device=device)
    with pytest.raises(ValueError, match="'tiles'"):
        head(torch.randn(2, 4, device=device), torch.tensor([0, 1], device=device))


@pytest.mark.parametrize("rate,backend", few([(r, b) for r in (1.0, 0.3) for b in ("eager", "aot_eager")], (0.3, "aot_eager")))
def test_compiles_whole(rate, backend):
    x, w, y = sample(dtype=f32)
    head = make_head(w, sample_rate=rate, sparse=False)
    expected = torch.autograd.grad(head(x.requires_grad_(), y), [x, head.weight])
    if head.sampler is not None:
        head.sampler.used.zero_()
    torch._dynamo.reset()
    loss = torch.compile(head, backend=backend, fullgraph=True)(x, y)
    torch.testing.assert_close(torch.autograd.grad(loss, [x, head.weight]), expected)
    assert head.sampler is None or head.sampler.used == 1


@pytest.mark.parametrize("rate", [0.3, "positives"])
def test_operators_by_opcheck(rate, device):
    x, w, y = sample(dtype=f32, device=device)
    s, looks = NegativeSampler(rate, 5).to(device), ("test_schema", "test_faketensor")
    checked = lambda op, *given: torch.library.opcheck(op, op.arguments.flat(given), test_utils=looks) and op(*given)
    c = sampling.Columns(*checked(sampling.sampled_columns, y, s.seed, s.step, s.strata, 0, COUNT, -1, 0.7, f32))
    given, o = (x, w, c.x_rows, c.w_rows, c.grad_index, c.target_column, c.shift), HeadConfig(scale=16.0)
    lse, _, _, *saved = checked(negatives.partial_lse, *given, o, f32, False, True)
    for needs in itertools.product([True, False], repeat=2):
        checked(negatives.partial_lse_grad, lse, lse, lse[0], lse, *saved, c.target_column, c.shift, o, f32, f32, False, *needs)


def test_operators_and_their_functions_give_the_same_bits(device, monkeypatch):
    x, w, y = sample(dtype=f32, device=device)
    x.requires_grad_()
    results = []
    for looked_at in (True, False):
        everywhere(monkeypatch, operators, "observed", lambda: looked_at)
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


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("margin", [CosFace(0.2, 16.0), ArcFace(0.3, 16.0)], ids=repr)
def test_these_kernels_serve_margin_cross_entropy(margin, reduction, kernels_for_all, monkeypatch):
    x, w, _ = sample_data(13, 20, 70, f32, kernels_for_all)
    y = torch.tensor([5, -100, 69, *range(10)], device=kernels_for_all)
    launched, way = [], cosine.launch_negatives_lse
    everywhere(monkeypatch, cosine, "launch_negatives_lse", lambda *a, **o: launched.append(1) or way(*a, **o))
    loss = partial(margin_cross_entropy, x, w, y, margin=margin, reduction=reduction)
    tiled, ours = loss(method="tiles"), loss()
    assert len(launched) == 1
    g = torch.linspace(0.5, 2, ours.numel(), device=ours.device).view(ours.shape)
    exact, got = (torch.autograd.grad(t, [x, w], g) for t in (tiled, ours))
    for a, b in zip((ours, *got), (tiled, *exact)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [f32, bf16, f16], ids=str)
def test_the_tangent_kernel_serves_tiles_of_any_strides(dtype, kernels_for_all):
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(20, n, generator=g).to(kernels_for_all, dtype).T.requires_grad_() for n in (13, 70))
    grads = [torch.autograd.grad(margin_cross_entropy(a, b, torch.arange(13, device=a.device), margin=ArcFace(0.3, 16.0), method="tiles", token_tile=5, class_tile=30), [x, w])
             for a, b in ((x, w), (x.double(), w.double()))]
    assert not x.is_contiguous() and not w.is_contiguous()
    for got, exact in zip(*grads):
        assert relative_error(got, exact) < {f32: 1e-5, bf16: 1e-2, f16: 1e-2}[dtype]


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


@pytest.mark.parametrize("case", thorough_but(few([c for c in CASES if "SubCenter" not in c and "Circle" not in c],
                                                  "log q", "conflict zero", "AdaFace", "MagFace", "few classes"), "MagFace", "log q", "conflict zero"))
def test_definition_by_kernels(case, kernels_for_all):
    assert not faults(**CASES[case], dtype=f32, tolerance=1e-4)


def test_an_affine_margin_is_what_any_margin_is(kernels_for_all, monkeypatch):
    "CosFace's short way against the way of all margins: losses, gradients, statistics, a label that is no class, no labels"
    class Curve(CosFace):
        "Affine, but of another class"
    v = 40
    x, w, y = sample(13, v=v, dtype=f32)
    x[3] = 0
    everywhere(monkeypatch, partial_fc, "check_labels", lambda *args: None)
    for labels in (y, y.index_fill(0, torch.tensor([2]), v), torch.full_like(y, -1)):
        ways = []
        for margin in (CosFace(0.3, 40.0), Curve(0.3, 40.0)):
            head = PartialFC(v, 6, margin=margin, sample_rate=0.3)
            head.weight.data.copy_(w)
            xs = x.clone().requires_grad_()
            loss, told = head(xs, labels, return_stats=True)
            assert (type(loss.grad_fn) is negatives.affine_margin_loss.function._backward_cls) == (type(margin) is CosFace)
            dx, dw = torch.autograd.grad(2.5 * loss, [xs, head.weight])
            assert not any(t.requires_grad for t in told)
            assert has_no_second_derivative(head(xs, labels), xs)
            ways.append((loss.detach(), dx, dw.to_dense(), *told))
        torch.testing.assert_close(*ways, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert ways[0][0].isnan() == (labels >= v).any()


def test_the_operator_of_an_affine_margin(kernels_for_all):
    "It is sound, and a compiler takes it"
    x, w, y = sample(dtype=f32)
    head = make_head(w, sparse=False, sample_rate=0.3)
    c = sampling.step_columns(y, -1, COUNT, head.sampler, f32)
    given = x, w, c.x_rows, c.w_rows, c.grad_index, c.target_column, c.shift, c.loss_weight, cosine.AffineMargin(16.0, -3.0), HeadConfig(scale=16.0), f32, True
    op = negatives.affine_margin_loss
    torch.library.opcheck(op, op.arguments.flat(given), test_utils=("test_schema", "test_faketensor"))
    torch._dynamo.reset()
    results = []
    for run in (head, torch.compile(head, backend="aot_eager", fullgraph=True)):
        head.sampler.step.zero_()
        loss = run(x.requires_grad_(), y)
        results.append([loss, *torch.autograd.grad(loss, [x, head.weight])])
    torch.testing.assert_close(*results)


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
            fl.clip_grad_norm_([x, *head.parameters()], 1.0)
            optimizer.step()
            head.logits(x), head.topk(x, 5)
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
    everywhere(monkeypatch, partial_fc, "check_labels", lambda *args: None)  # on a CPU labels are looked at
    with Watch():
        head(x, y).backward()
    assert not [n for n in seen if any(word in n for word in ("nonzero", "unique", "_local_scalar", "masked_select", "equal.default"))]
    del optimizer


# --- scores without a loss ---

def scores_fault(m):
    "A word on scores that are not the definition's: whole, or the best by blocks of classes"
    for name, k, dtype in (("CosFace", 1, f64), ("Circle", 1, f32), ("ArcFace", 3, f64)):
        x, w, _ = sample(9, 6, 40, k, dtype)
        x[2], w[5 * k] = 0, 1e-7
        head = make_head(w, k, name, m, sample_rate=0.3, conflict=0.1)
        unit = lambda t: t.double() / torch.where(t.norm(dim=-1) > 0, t.norm(dim=-1).clamp(min=EPS), 1.0).double()[:, None]
        exact = head.margin.scale * (unit(x) @ unit(w).T).unflatten(1, (-1, k)).amax(2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(m, "BLOCK_BYTES", 3000 * k)  # blocks of a few classes
            z, best, all_of_them = head.logits(x.view(3, 3, 6)), head.topk(x.view(3, 3, 6), 7), head.topk(x, 40)
        if z.shape != (3, 3, 40) or z.dtype != dtype or z.requires_grad or not torch.allclose(z.view(9, 40).double(), exact, rtol=1e-5, atol=1e-4):
            return f"scores of {name}"
        if best.values.shape != (3, 3, 7) or best.indices.dtype != torch.int64 or not torch.allclose(best.values, z.topk(7)[0], rtol=1e-5, atol=1e-4):
            return f"the best of {name}"
        if not torch.allclose(z.gather(2, best.indices), best.values, rtol=1e-5, atol=1e-4):
            return f"classes of {name}"
        if not torch.equal(all_of_them.indices.sort(1)[0], torch.arange(40).expand(9, 40)):
            return "a class is there twice"
    return None


def test_scores():
    assert scores_fault(partial_fc) is None


def test_scores_are_those_of_the_loss(device):
    "Without a margin, the loss in eval is the cross entropy of the scores, under autocast too"
    x, w, y = sample(dtype=f32, device=device)
    head = make_head(w, sample_rate=0.3).eval()
    head.margin = CosFace(0.0, 64.0)
    with torch.autocast(device, bf16, enabled=False):
        torch.testing.assert_close(F.cross_entropy(head(x), y, ignore_index=-1), head(x, y))
    with torch.autocast(device, bf16):
        torch.testing.assert_close(F.cross_entropy(head(x), y, ignore_index=-1), head(x, y), rtol=1e-3, atol=1e-3)


def test_no_rows_no_numbers_and_nan():
    head = PartialFC(7, 3)
    assert head.logits(torch.zeros(0, 3)).shape == (0, 7) and head.topk(torch.zeros(2, 0, 3), 2).indices.shape == (2, 0, 2)
    x = torch.ones(2, 3)
    x[1, 0] = math.nan
    z = head.logits(x)
    assert z[0].isfinite().all() and z[1].isnan().all()
    torch.testing.assert_close(head.topk(x, 2).values[0], z[0].topk(2)[0])


def test_a_call_without_target():
    x, w, y = sample()
    head = make_head(w, sample_rate=0.3)
    for given in (dict(), dict(target=None), dict(return_stats=True)):
        with pytest.raises(ValueError, match="target: expected each row's class, or eval"):
            head(x, **given)
    head.eval()
    assert torch.equal(head(x), head.logits(x)) and head.sampler.step == 0
    with pytest.raises(ValueError, match="return_stats: expected False without a target"):
        head(x, return_stats=True)


def test_the_best_classes_need_no_memory_for_all(monkeypatch):
    "Neither [N,V] nor a copy of the weight"
    x, head = torch.randn(64, 8), PartialFC(100_000, 8)
    monkeypatch.setattr(partial_fc, "BLOCK_BYTES", 2**20)
    assert peak_memory(lambda: head.topk(x, 10)) < 3 * 2**20 < 64 * 100_000 * 4 / 8
    assert peak_memory(lambda: head.logits(x)) < 64 * 100_000 * 4 + 3 * 2**20


# --- weights and optimizers of others, and losses that live on ---

def test_a_weight_alone_is_loaded_and_the_rest_named():
    layer = torch.nn.Linear(6, COUNT, bias=False, dtype=f64)
    head = torch.nn.ModuleDict({"head": PartialFC(COUNT, 6, sampler=NegativeSampler(0.3, 7), margin=AdaFace(), dtype=f64)})
    head["head"].sampler.step.fill_(5)
    rest = "head.sampler.seed, head.sampler.step, head.margin.mean, head.margin.std"
    with pytest.warns(UserWarning, match=f"the weight alone: {rest} keep the values that the head has"):
        head.load_state_dict({"head.weight": layer.weight})
    assert torch.equal(head["head"].weight, layer.weight) and head["head"].sampler.step == 5 and head["head"].sampler.seed == 7


@pytest.mark.filterwarnings("error")
def test_what_loads_without_a_word_and_what_does_not():
    head, layer = PartialFC(9, 4, sample_rate=0.5), torch.nn.Linear(4, 9, bias=False)
    head.load_state_dict(head.state_dict())
    PartialFC(9, 4).load_state_dict(layer.state_dict())  # nothing is missing
    before = head.weight.detach().clone()
    for state, words in (({"weight": layer.weight * 2, "sampler.seed": torch.tensor(1)}, 'Missing key.*"sampler.step"'), ({}, 'Missing key.*"weight"'),
                         (torch.nn.Linear(4, 10, bias=False).state_dict(), "size mismatch for weight")):
        with pytest.raises(RuntimeError, match=words), warnings.catch_warnings(action="ignore"):
            head.load_state_dict(state)
    with pytest.raises(RuntimeError, match='Unexpected key.*"bias"'), warnings.catch_warnings(action="ignore"):
        head.load_state_dict(torch.nn.Linear(4, 9).state_dict())
    assert not torch.equal(head.weight, before)  # as PyTorch does: what fits is loaded before it raises


REFUSED = {"AdamW": dict(), "Adam": dict(), "SGD": dict(momentum=0.9), "SGD decay": dict(weight_decay=0.1), "Adagrad": dict(weight_decay=0.1), "RMSprop": dict(),
           "NAdam": dict(), "Adafactor": dict()}


def foreign(name, params, **options):
    "An optimizer of PyTorch"
    return getattr(torch.optim, name.partition(" ")[0])(params, lr=0.1, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_takes_no_rows_says_which_does(name):
    x, w, y = sample()
    head, layer = make_head(w, sample_rate=0.1), torch.nn.Linear(6, 6, dtype=f64)
    optimizer = foreign(name, [*layer.parameters(), *head.parameters()], **REFUSED[name])
    head(layer(x), y).backward()
    before = [p.detach().clone() for p in (*layer.parameters(), *head.parameters())]
    with pytest.raises(ValueError, match=r"optimizer: expected fl\.RowSparse\(torch\.optim\.SGD or AdamW.*sparse=False, got " + name.partition(" ")[0]):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip((*layer.parameters(), *head.parameters()), before))


def make_head_with_rows():
    "A head after a backward pass"
    x, w, y = sample()
    head = make_head(w, sample_rate=0.1)
    head(x, y).backward()
    return head


@pytest.mark.parametrize("name", ["SGD", "SparseAdam", "Adagrad", "AdamW"])
def test_optimizers_that_are_right_are_left_alone(name):
    "The first three move the sample's rows and no others; AdamW has a dense gradient, and rows that are no head's are none of ours"
    x, w, y = sample()
    head = make_head(w, sample_rate=0.1, sparse=name != "AdamW")
    optimizer = foreign(name, head.parameters())
    head(x, y).backward()
    moved = head.weight.grad.to_dense().ne(0).any(1) if head.sparse else torch.ones(COUNT, dtype=torch.bool)
    optimizer.step()
    assert torch.equal((head.weight != w).any(1), moved)
    class Own(torch.optim.Optimizer):
        "Somebody's optimizer, which takes rows and has momentum"
        def step(self):
            head.weight.data.add_(head.weight.grad, alpha=-0.1)
    head(x, y).backward()
    Own(head.parameters(), dict(momentum=0.9)).step()
    with pytest.raises(ValueError, match="got Mine"):
        type("Mine", (ADAMW,), {})(make_head_with_rows().parameters()).step()
    rows = torch.nn.Embedding(5, 3, sparse=True)
    rows(torch.tensor([1])).sum().backward()
    torch.optim.SGD(rows.parameters(), lr=0.1, momentum=0.9).step()


@pytest.mark.parametrize("change", ["extend", "remove"])
@pytest.mark.parametrize("rate,dtype", [(0.3, f64), (1.0, f32), (0.3, bf16)])
def test_a_loss_that_lives_on_does_not_keep_the_shape(change, rate, dtype):
    x, w, y = sample(dtype=dtype)
    y = y.clamp(max=COUNT - 4)
    head = make_head(w, sample_rate=rate)
    optimizer = RowSparse(SGD, head.parameters(), lr=0.1, momentum=0.9)
    alive, used = head(x, y), head(x, y)
    used.backward()
    optimizer.step()
    weight, count = head.weight, getattr(head, change)(3 if change == "extend" else [COUNT - 1, COUNT - 2], optimizer)
    optimizer.zero_grad()
    head(x, y).backward()
    optimizer.step()
    assert head.weight is weight and weight.dtype == dtype and weight.grad.shape == weight.shape == (head.num_classes, 6)
    optimizer.zero_grad()
    before = weight.detach().clone()
    with pytest.raises((ValueError, RuntimeError), match="grad: expected shape|shape"):
        alive.backward()
        optimizer.step()
    assert torch.equal(weight, before), count


# --- what a head says ---

def test_a_repr_shows_what_was_configured():
    assert repr(PartialFC(9, 4)) == "PartialFC(9, 4, margin=CosFace(margin=0.35, scale=64.0))"
    said = repr(PartialFC(9, 4, sample_rate=0.5, margin=ArcFace(0.3), method="tiles", reduction="sum", conflict=0.4, ignore_index=7, sparse=False, class_weight=torch.ones(9)))
    for part in ("rate=0.5", "ArcFace(margin=0.3", "method='tiles'", "reduction='sum'", "conflict=0.4", "ignore_index=7", "sparse=False", "class_weight=[9]"):
        assert part in said
    said = repr(fl.ShardedPartialFC(9, 4, margin=SubCenter(2, AdaFace(0.3)), backbone_reduction="sum", seed=3, method="tiles"))
    for part in ("AdaFace(margin=0.3)", "backbone_reduction='sum'", "seed=3", "method='tiles'", "2\n"):
        assert part in said
    said = repr(fl.LinearCrossEntropyLoss(4, 9, method="chunks", label_smoothing=0.1, softcap=3.0, reduction="sum"))
    assert all(part in said for part in ("method='chunks'", "label_smoothing=0.1", "softcap=3.0", "reduction='sum'")) and "z_loss" not in said
    assert repr(fl.MemoryEfficientVocabOutput(torch.nn.Parameter(torch.ones(9, 4)), reduction="mean")) == "MemoryEfficientVocabOutput(proj_weight=[9, 4], reduction='mean')"
    class Own(fl.margins.Margin):
        scale = 2.0
        def __init__(self): self.shape, self.classes = 3, torch.ones(4)
    assert repr(Own()) == "Own(shape=3, classes=[4])"  # the same on every rank


@pytest.mark.parametrize("default", [f64, bf16])
def test_no_result_follows_the_default_dtype(default):
    paths = torch.randn(9, 2, 5).log_softmax(-1), torch.tensor([[1, 2], [3, 4]]), (9, 9), (2, 2)
    x, w, y = sample(n=6, h=6, v=9, dtype=f32)
    graph = torch.randn(3, 2, 2, 2), torch.tensor([[0, 1], [1, 0]]), torch.zeros(2, 2), torch.zeros(2, 2)
    heads = [dict(), dict(sample_rate=0.5, margin=ArcFace()), dict(sampler=NegativeSampler(0.5, log_q=True), margin=AdaFace()), dict(normalize=False, bias=True),
             *(dict(normalize=False, sampler=fl.PopularitySampler(torch.arange(1, 10), 3, each_row=each)) for each in (True, False))]
    def results():
        made = [PartialFC(9, 6, dtype=f32, **copy.deepcopy(options)) for options in heads]
        for head in made:
            head.weight.data.copy_(w)
            if head.bias is not None: head.bias.data.zero_()
        known = y.clamp(min=0)
        found = [head(x, y, return_stats=True) for head in made], [head.topk(x, 2) for head in made], fl.cross_entropy(x @ w.T, y, ignore_index=-1, return_stats=True)
        found += fl.linear_cross_entropy(x, w, known, return_stats=True), fl.linear_log_probs(x, w, known, entropy=True), fl.linear_divergence(x, w, 2 * x, w)
        found += fl.contrastive_loss(x, x, 2.0), fl.ctc_loss(*paths), fl.ctc_posteriors(*paths), fl.forced_align(*paths), fl.logz(*graph), fl.viterbi(*graph)
        return [t.detach() for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
    expected = results()
    torch.set_default_dtype(default)
    try:
        torch.testing.assert_close(results(), expected)
    finally:
        torch.set_default_dtype(f32)


# --- weights and reductions ---

WEIGHTED = {
    "cosines": {}, "a sample": dict(sample_rate=0.3), "ArcFace": dict(margin=ArcFace()), "AdaFace": dict(margin=AdaFace().eval()),
    "sub-centres": dict(margin=SubCenter(2)), "dot products": dict(normalize=False, bias=True),
    "popular": dict(normalize=False, sampler=fl.PopularitySampler(torch.ones(COUNT), 16)),
    "of each row": dict(normalize=False, sampler=fl.PopularitySampler(torch.ones(COUNT), 16, each_row=True)),
}


def weighted_loss(options, x, y, weight, reduction, class_weight=None, token_weight=None):
    "A head's loss, and the gradients of x and its weight"
    head = PartialFC(COUNT, 6, **copy.deepcopy(options), dtype=x.dtype, device=x.device, reduction=reduction, class_weight=class_weight)
    head.weight.data.copy_(weight)
    if isinstance(head.margin, AdaFace):
        head.margin.eval()
    x = x.clone().requires_grad_()
    loss = head(x, y, token_weight=token_weight)
    def gradients(total): return [g.to_dense() for g in torch.autograd.grad(total, [x, head.weight], retain_graph=True)]
    return loss, gradients


def weighting_faults(options, dtype=f64, device="cpu", given=tuple(itertools.product((False, True), repeat=2)), **tolerance):
    "Weighted heads against the losses of each row, and these against the mean that other tests know"
    x, weight, y = sample(k=2 if isinstance(options.get("margin"), SubCenter) else 1, dtype=dtype, device=device)
    g = torch.Generator().manual_seed(2)
    of_class, of_row = torch.rand(COUNT, generator=g).to(device, dtype), torch.rand(len(y), generator=g).to(device, dtype)
    valid, of_row = y >= 0, of_row.masked_fill(y < 0, math.nan)
    each, gradients = weighted_loss(options, x, y, weight, "none")
    assert each.shape == y.shape and not each[~valid].any()
    for classes, rows in ((of_class if a else None, of_row if b else None) for a, b in given):
        w = torch.ones_like(each)
        if classes is not None: w = w * classes[y.clamp(min=0)]
        if rows is not None: w = w * rows.nan_to_num()
        w = w * valid
        for reduction, expected in (("none", each * w), ("sum", (each * w).sum()), ("mean", (each * w).sum() / w.sum())):
            got, own = weighted_loss(options, x, y, weight, reduction, classes, rows)
            up = torch.linspace(0.5, 2, got.numel(), dtype=got.dtype, device=device).view(got.shape)
            torch.testing.assert_close(got, expected, **tolerance)
            for a, e in zip(own((got * up).sum()), gradients((expected * up).sum())):
                torch.testing.assert_close(a, e, **tolerance)


@pytest.mark.parametrize("kind", WEIGHTED)
def test_weights_and_reductions(kind, device):
    weighting_faults(WEIGHTED[kind], device=device)


def test_weights_and_reductions_by_kernels(kernels_for_all):
    weighting_faults(dict(sample_rate="positives"), f32, kernels_for_all, [(True, True)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("margin", [CosFace(), ArcFace(), SubCenter(1, CosFace())], ids=["CosFace", "ArcFace", "SubCenter"])
def test_weights_of_margin_cross_entropy(margin):
    "As those of `linear_cross_entropy`, and of a head"
    x, w, y = sample()
    x[y < 0] = math.nan
    of_class, of_row = torch.rand(COUNT, dtype=f64), torch.rand(len(y), dtype=f64).masked_fill(y < 0, math.nan)
    for reduction in ("none", "sum", "mean"):
        head = PartialFC(COUNT, 6, margin=margin, dtype=f64, reduction=reduction, class_weight=of_class)
        head.weight.data.copy_(w)
        shaped = [t.unsqueeze(0) for t in (x, y, of_row)]
        ours = margin_cross_entropy(shaped[0], head.weight, shaped[1], margin=margin, ignore_index=-1, weight=of_class, reduction=reduction, token_weight=shaped[2])
        torch.testing.assert_close(ours, head(shaped[0], shaped[1], token_weight=shaped[2]))
    plain = CosFace(0.0, 5.0)
    x = x.nan_to_num()
    given = dict(weight=of_class, token_weight=of_row.nan_to_num(), ignore_index=-1)
    torch.testing.assert_close(margin_cross_entropy(x, w, y, margin=plain, **given),
                               fl.linear_cross_entropy(normalize(x), normalize(w), y, logit_scale=5.0, **given))


@pytest.mark.parametrize("normalize", [True, False])
def test_nothing_that_weighs_anything(normalize):
    "No label, or weights of 0: the loss and its gradients are 0"
    x, w, y = sample()
    nothing = torch.zeros(len(y))
    for labels, rows in ((torch.full_like(y, -1), torch.ones(len(y))), (y, nothing)):
        for reduction in ("none", "sum", "mean"):
            loss, gradients = weighted_loss(dict(normalize=normalize), x, labels, w, reduction, token_weight=rows)
            assert not loss.any() and not any(g.any() for g in gradients(loss.sum()))


def test_weights_follow_the_classes():
    head = PartialFC(5, 3, class_weight=torch.arange(5.0) + 2)
    head.extend(2)
    assert head.class_weight.tolist() == [2, 3, 4, 5, 6, 1, 1]
    head.remove([0, 5])
    assert head.class_weight.tolist() == [3, 4, 5, 6, 1]
    head.class_weight = head.class_weight[:3]
    with pytest.raises(ValueError, match="class_weight: expected 5 numbers"):
        head(torch.randn(2, 3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="token_weight: expected None without a target"):
        head.eval()(torch.randn(2, 3), token_weight=torch.ones(2))


# --- planted bugs ---

MUTANTS = {
    "labels get two columns": ("torch.where(slot >= 0, slot, own_column), -1)", "own_column, -1)"),
    "duplicates get two columns": ("k + first_occurrence(y)", "len(drawn) + n"),
    "dead columns count": ("shift.masked_fill_(w_rows < 0, -torch.inf)", "pass"),
    "log q has the wrong sign": ("drawn_shift = -math.log(sampler.rate)", "drawn_shift = math.log(sampler.rate)"),
    "the batch's classes are corrected": ("if drawn_shift: shift = torch.where(present[:-1], 0.0, shift)", "pass"),
    "the target stays in the sum": ("mask_targets(scores, target), conflicts", "scores, conflicts"),
    "conflicts pull": ("if conflicts is not None: d.masked_fill_(conflicts, 0.0)", "pass"),
    "conflicts are kept": ("scores.masked_fill_(conflicts, o.conflict_score)", "pass"),
    "the scale is forgotten backward": ("g_lse * o.tile_scale, g_cos)", "g_lse, g_cos)"),
    "Circle's slope is forgotten": ("if slope is not None: d.mul_(slope)", "pass"),
    "the cosine keeps its scale": ("0.0)[:, 0] / o.tile_scale", "0.0)[:, 0]"),
    "what is along w stays": ("d.sub_(radial[:, None] * u)", "d"),
    "lengths are forgotten": ("inverse.abs() if factor is None", "1 + 0 * inverse if factor is None"),
    "ignored rows count": ("torch.where(known, n, none), loss_weight", "n, loss_weight"),
    "ignored rows share in the mean": ("known.to(dtype).masked_fill_(", "torch.ones_like(known, dtype=dtype).masked_fill_("),
    "gradients go to the wrong rows": ("rows.amax().clamp(min=0), rows)", "rows.amax().clamp(min=0), rows).flip(0)"),
    "a dead column names row 0": ("rows.amax().clamp(min=0), rows)", "0, rows)"),
    "sub-centres are one": ("each = rows[:, None] * k + torch.arange(k, device=rows.device)", "each = rows[:, None] * k + 0 * torch.arange(k)"),
    "a change that fails has begun": ("    made = [(make(p.data)", "    params[0].grad = None\n    made = [(make(p.data)"),
    "new classes have no vectors": ("    begin(made[0][0][len(params[0]):])\n", ""),
    "the optimizer's rows stay": ("if made: optimizer.state[p].update(made)", "pass"),
    "classes keep their numbers": ("keep.cumsum(0) - 1, -1)", "torch.arange(len(keep)), -1)"),
    "an old loss keeps the shape": ("p.data = p.data.new_empty(0, dtype=other)", "pass"),
    "a step that fails has drawn": ("    affine = kernel and", "    if sampler is not None: sampler.note_use()\n    sampler = None\n    affine = kernel and"),
}
PROBES = [CASES[c] for c in ("all", "a tenth", "log q", "conflict", "conflict zero", "Circle", "SubCenter", "fewer than rows", "few classes")]


def first_fault(m):
    if found := failure_fault(m, row_sparse) or state_fault(m, row_sparse):
        return found
    for probe in PROBES:
        if found := faults(**probe, module=m):
            return found[0]
    return None


def test_the_unchanged_source_passes(tmp_path):
    assert first_fault(planted(partial_fc, tmp_path, *unchanged(MUTANTS.values()))) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", MUTANTS)
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert fault_of(first_fault, partial_fc, tmp_path, *MUTANTS[bug]), f"no case notices that {bug}"


SCORE_BUGS = {
    "Circle weighs scores": ("._replace(circle_margin=-1.0)", ""),
    "classes count from their block": ("HeadTopK(values, at + j.start)", "HeadTopK(values, at)"),
    "only the last block counts": ("best = best_of([best, HeadTopK(", "best = best_of([HeadTopK("),
    "blocks of one centre": ("w[j.start * k:j.stop * k]", "w[j.start:j.stop]"),
    "the first block's columns": ("z[:, j] = scores", "z[:, :scores.shape[1]] = scores"),
    "candidates lose their numbers": ("indices.gather(1, at))", "at)"),
}


def test_unchanged_scores_pass(tmp_path):
    assert scores_fault(planted(partial_fc, tmp_path, *unchanged(SCORE_BUGS.values()))) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", SCORE_BUGS)
def test_a_bug_in_scores_is_noticed(bug, tmp_path):
    assert fault_of(scores_fault, partial_fc, tmp_path, *SCORE_BUGS[bug]), f"no case notices that {bug}"


def test_the_front_door():
    assert fl.PartialFC is PartialFC and fl.NegativeSampler is NegativeSampler and fl.RowSparse is RowSparse
    assert isinstance(fl.partial_fc, types.ModuleType)
    assert isinstance(PartialFC(10, 4, margin=AdaFace(), sample_rate=0.5).margin, AdaFace) and ArcFace() == ArcFace()
