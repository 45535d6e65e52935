"""The front door: every method against float64 and each other, what it refuses, and what it takes."""
import itertools
import logging
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import HealthCheck, given, settings, strategies as st
from torch._dynamo.testing import CompileCounter

import fusedloss as fl
import fusedloss.losses as losses
from fusedloss.core import checks
from fusedloss.core.options import Asked, LossOptions, Operands
from fusedloss.core.versions import torch_version
from fusedloss.baseline import sample_data
from fusedloss.filter import recompute_linear_cross_entropy
from fusedloss.losses import METHODS, LinearCrossEntropyLoss, linear_cross_entropy, shift_targets
from fusedloss.plans import cached_plan
from workbook.measure import peak_memory, relative_error
from grids import FULL, few, grid, thorough_but
from helpers import TOLERANCE, broken, everywhere, follows_plans, misfits, planted, replays, unchanged, upstream
from test_kernels import reference

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
SUBSETS = list(itertools.product((False, True), repeat=3))  # of gradients of x, w, b
WHOLE = ("auto", "eager", "recompute")  # methods with every option
OPTIONS = {
    "plain": {}, "smoothing": dict(label_smoothing=0.1), "scale": dict(logit_scale=0.5), "softcap": dict(softcap=1.5),
    "z-loss": dict(z_loss=1e-2), "class weights": dict(weight=True), "token weights": dict(token_weight=True),
    "ignore 0": dict(ignore_index=0),
    "all": dict(weight=True, token_weight=True, label_smoothing=0.2, logit_scale=2.0, softcap=2.5, z_loss=1e-2),
}


def sample(shape=(11,), h=5, v=17, device="cpu", dtype=f64, ignore_index=-100, bias=True):
    "Input [*shape,H], weight, bias or None, labels of which every fourth is ignored"
    n = torch.Size(shape).numel()
    x, w, y = sample_data(n, h, v, dtype, device, requires_grad=False)
    b = torch.linspace(-1, 1, v, dtype=dtype, device=device) if bias else None
    y = y.masked_fill(torch.arange(n, device=device) % 4 == 1, ignore_index)
    return x.view(*shape, h), w, b, y.view(shape)


def prepared(options, w, y):
    "`True` stands for weights of the sample's sizes"
    ramp = lambda *size: torch.linspace(0.25, 2.0, torch.Size(size).numel(), device=w.device).view(size)
    sized = dict(weight=(len(w),), token_weight=y.shape)
    return {k: ramp(*sized[k]) if value is True else value for k, value in options.items()}


def differentiate(loss_of, tensors, needs=(True, True, True)):
    "Loss, and the gradients of x, w, b: None where not asked for"
    leaves = [None if t is None else t.detach().requires_grad_(need) for t, need in zip(tensors, needs)]
    loss = loss_of(*leaves)
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted, upstream(loss)) if wanted else ())
    return loss.detach(), *(next(found) if t is not None and t.requires_grad else None for t in leaves)


def definition(x, w, b, y, **options):
    "The loss by its definition, in float64 on the CPU, for any leading shape"
    t = options.pop("token_weight", None)
    z = F.linear(x, w, b).reshape(-1, len(w))
    loss = reference(z, y.cpu().reshape(-1), token_weight=None if t is None else t.cpu().reshape(-1), **options)
    return loss.view(y.shape) if options.get("reduction") == "none" else loss


def wrong(x, w, b, y, needs=(True, True, True), call=linear_cross_entropy, how=None, tolerance=None, **options):
    "What `call`, told `how`, gets wrong, in words"
    options = prepared(options, w, y)
    got = differentiate(lambda x, w, b: call(x, w, y, linear_bias=b, **(how or {}), **options), (x, w, b), needs)
    options = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    double = [None if t is None else t.detach().cpu().double() for t in (x, w, b)]
    exact = differentiate(lambda x, w, b: definition(x, w, b, y, **options), double, needs)
    return misfits(got, exact, (x, w, b), lambda *_: tolerance or TOLERANCE[x.dtype])


# --- right ---

@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_methods_every_option_and_subset_of_gradients(options, reduction, device):
    given_ = sample(device=device, ignore_index=options.get("ignore_index", -100))
    for method in (*WHOLE, *["chunks"] * (reduction != "none")):
        for needs in few(SUBSETS, (True, True, True), (False, True, False)):
            assert not wrong(*given_, needs, how=dict(method=method), reduction=reduction, **options), (method, needs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_tiles_do_what_they_can(reduction, device):
    x, w, _, y = sample(device=device, ignore_index=3)
    for needs in SUBSETS[::2]:
        assert not wrong(x, w, None, y, needs, how=dict(method="tiles"), reduction=reduction, ignore_index=3, logit_scale=2.0)


@st.composite
def calls(draw):
    "Sizes, options, how, and the subset of gradients"
    shape = draw(st.one_of(st.tuples(), st.tuples(st.integers(0, 20)), st.tuples(st.integers(1, 3), st.integers(0, 5))))
    h, v = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    maybe = lambda strategy: st.one_of(st.none(), strategy)
    options = dict(
        reduction=draw(st.sampled_from(("mean", "sum", "none"))), ignore_index=draw(st.sampled_from((-100, 0, v - 1, v + 7))),
        label_smoothing=draw(st.sampled_from((0.0, 0.3, 1.0))), logit_scale=draw(st.sampled_from((1.0, 0.25, 3.0))),
        softcap=draw(maybe(st.sampled_from((0.5, 30.0)))), z_loss=draw(st.sampled_from((0.0, 0.1))),
        **draw(st.sampled_from(({}, dict(weight=True), dict(token_weight=True), dict(weight=True, token_weight=True)))))
    how = dict(method=draw(st.sampled_from(WHOLE)), accumulate=draw(st.sampled_from(("auto", "float32", "native"))))
    return shape, h, v, options, how, draw(st.sampled_from(SUBSETS)), draw(st.booleans())


@settings(max_examples=60 if FULL else 20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=calls())
def test_any_call_is_the_definition(device, call):
    shape, h, v, options, how, needs, bias = call
    assert not wrong(*sample(shape, h, v, device, ignore_index=options["ignore_index"], bias=bias), needs, how=how, **options)


@pytest.mark.parametrize("dtype", [f32, bf16, f16])
@pytest.mark.parametrize("method", METHODS)
def test_other_dtypes(dtype, method, device):
    x, w, _, y = sample((64,), 32, 300, device, dtype)
    assert not wrong(x, w, None, y, how=dict(method=method), tolerance=max(TOLERANCE[dtype], 1e-5))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 3)])
def test_leading_shapes(shape, method, device):
    x, w, _, _ = sample((24,), device=device)
    x = x[:max(1, torch.Size(shape).numel())].view(*shape, 5)
    y = torch.arange(x[..., 0].numel(), device=device).view(shape) % 17
    early = method in ("chunks", "product")
    reduction = "sum" if early else "none"
    assert linear_cross_entropy(x, w, y, method=method, reduction=reduction).shape == (() if early else shape)
    assert not wrong(x, w, None, y, how=dict(method=method), reduction=reduction)
    if method not in ("tiles", "product"):
        _, told = linear_cross_entropy(x, w, y, method=method, reduction=reduction, return_stats=True)
        assert told.lse.shape == told.entropy.shape == told.target_rank.shape == shape and told.n_valid == y.numel()


@pytest.mark.parametrize("method", METHODS)
def test_strided_inputs_and_other_labels(method, device):
    x, w, _, y = sample((6, 4), device=device)
    for a, c in ((x.transpose(0, 1), y.T), (x[:, ::2], y[:, ::2]), (x[:1].expand(3, 4, 5), y[:1].expand(3, 4))):
        assert not wrong(a, w.T.contiguous().T, None, c.int(), how=dict(method=method))


# --- shift ---

@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [0, 1, 3, 6, 9])
def test_shift_is_within_a_sequence(k, method, device):
    x, w, _, y = sample((2, 3, 6), device=device)
    tokens = torch.rand(2, 3, 6, device=device) if method in WHOLE else None
    loss = linear_cross_entropy(x, w, y, shift=k, method=method, token_weight=tokens)
    end = max(0, 6 - k)
    given_ = {} if tokens is None else dict(token_weight=tokens[..., k:].cpu())
    exact = definition(x[..., :end, :].cpu(), w.cpu(), None, y[..., k:].cpu(), **given_)
    torch.testing.assert_close(loss.cpu(), exact)


def test_shifted_shapes_and_gradients(device):
    x, w, _, y = sample((2, 6), device=device)
    loss, told = linear_cross_entropy(x, w, y, shift=2, reduction="none", return_stats=True)
    assert loss.shape == told.entropy.shape == (2, 4)
    x.requires_grad_()
    dx, = torch.autograd.grad(linear_cross_entropy(x, w, y, shift=2), x)
    assert not dx[:, -2:].any() and dx[0, 0].any()


def test_a_flat_sequence_may_be_shifted_and_a_vector_may_not():
    x, w, _, y = sample((7,))
    a, b, c = shift_targets(x, y, None, 2)
    assert torch.equal(a, x[:-2]) and torch.equal(b, y[2:]) and c is None
    with pytest.raises(ValueError, match=r"^shift: expected 0 where .*got 1"):
        linear_cross_entropy(x[0], w, y[0], shift=1)


# --- refusals ---

@pytest.mark.parametrize("name, bad", [("filter_eps", dict(filter_eps=0.1, label_smoothing=0.1)), ("memory_budget", dict(memory_budget=1))], ids=str)
def test_options_that_do_not_go_together_are_named(name, bad):
    x, w, _, y = sample(dtype=f32)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
        linear_cross_entropy(x, w, y, **bad)


REFUSED = {
    "chunks, none": (dict(method="chunks", reduction="none"), r"'eager' or 'recompute'.*got 'chunks'"),
    "tiles, soft cap": (dict(method="tiles", softcap=1.0), r"'recompute'.*no softcap"),
    "tiles, bias": (dict(method="tiles", linear_bias=torch.zeros(17)), r"'chunks'.*no linear_bias"),
    "tiles, weights": (dict(method="tiles", weight=torch.ones(17), z_loss=0.1), r"no weight, z_loss"),
    "tiles, statistics": (dict(method="tiles", return_stats=True), r"no return_stats"),
    "eager, budget": (dict(method="eager", memory_budget=800), r"expected \d+ bytes for 'eager', or .*got 800 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_method_cannot_do_names_what_can(case):
    x, w, _, y = sample(dtype=f32)
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(x.requires_grad_(), w.requires_grad_(), y, **options)


class Sharded(torch.Tensor):
    "Looks like a distributed tensor."
    def full_tensor(self): return self


def test_an_old_compiler_is_passed_by_or_refused_in_a_sentence(monkeypatch):
    x, w, b, y = sample()
    step = lambda x, w, y: 2 * linear_cross_entropy(x, w, y)
    compiled = lambda whole: torch.compile(step, fullgraph=whole, backend="eager")(x, w, y)
    assert losses.for_compilers(step, (2, 9)) is step
    everywhere(monkeypatch, losses, "planned_loss", losses.for_compilers(losses.planned_loss, (2, 8)))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"expected PyTorch 2.9 or later under torch.compile\(fullgraph=True\), got 2.8"):
        compiled(True)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(False), step(x, w, y))


def test_shards_are_refused_and_what_is_taken_named():
    x, w, b, y = sample()
    for bad in (w.as_subclass(Sharded), torch.empty(0, dtype=f64), w[:0], w[:, :0]):
        with pytest.raises(ValueError, match=r"^linear_weight: expected a whole, local tensor.*got "):
            linear_cross_entropy(x, bad, y)
    with pytest.raises(ValueError, match=r"^linear_bias: expected a whole, local tensor"):
        linear_cross_entropy(x, w, y, linear_bias=b.as_subclass(Sharded))


@pytest.mark.parametrize("method", METHODS)
def test_a_label_out_of_range(method):
    x, w, _, y = sample()
    y[3] = 17
    with pytest.raises(IndexError, match=r"target\[3\] is 17"):
        linear_cross_entropy(x, w, y, method=method)


def test_a_plan_knows_of_every_option_and_tensor_that_is_given():
    x, w, b, y = sample()
    t = Operands(x, w, y)
    changed = LossOptions(*(0.5 for _ in LossOptions._fields))._replace(ignore_index=-100)
    assert losses.call_of(t, Asked(LossOptions())).options == ()
    assert losses.call_of(t, Asked(changed, filter_eps=0.1)).options == ("filter_eps", *LossOptions._fields[1:])
    for name in Operands._fields[3:]: assert losses.call_of(t._replace(**{name: b}), Asked(LossOptions())).options == (name,)


# --- a citizen of autograd ---

@pytest.mark.parametrize("method", METHODS)
def test_used_twice_scaled_and_accumulated(method, device):
    x, w, _, y = sample(device=device)
    x.requires_grad_(), w.requires_grad_()
    loss = linear_cross_entropy(x, w, y, method=method)
    once = torch.autograd.grad(3 * loss, [x, w], retain_graph=True)
    again = torch.autograd.grad(-1.5 * loss, [x, w])
    for a, b in zip(once, again):
        torch.testing.assert_close(a, -2 * b)
    for part in (slice(0, 4), slice(4, 11)):
        linear_cross_entropy(x[part], w, y[part], method=method, reduction="sum").backward()
    for t, g in zip((x, w), torch.autograd.grad(linear_cross_entropy(x, w, y, method=method, reduction="sum"), [x, w])):
        torch.testing.assert_close(t.grad, g)


@pytest.mark.parametrize("method", METHODS)
def test_tied_embeddings_and_checkpointing(method, device):
    ids = torch.arange(12, device=device).view(2, 6) % 17
    exact = None
    for name in ("exact", method):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(17, 5, device=device, dtype=f64)
        if name == "exact":
            z = embedding(ids).tanh() @ embedding.weight.T
            F.cross_entropy(z[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            exact = embedding.weight.grad
        else:
            for whole in (False, True):
                embedding.weight.grad = None
                head = lambda x: linear_cross_entropy(x.tanh(), embedding.weight, ids, shift=1, method=name)
                x = embedding(ids)
                loss = torch.utils.checkpoint.checkpoint(head, x, use_reentrant=False) if whole else head(x)
                loss.backward()
                torch.testing.assert_close(embedding.weight.grad, exact)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtypes", [(f32, f32), (bf16, f32), (f32, bf16), (f64, f64)], ids=str)
def test_autocast_as_linear(dtypes, method, device):
    x, w, _, y = sample((64,), 32, 300, device, f32)
    x, w = x.to(dtypes[0]).requires_grad_(), w.to(dtypes[1]).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        loss = linear_cross_entropy(x, w, y, method=method)
        exact = F.cross_entropy(F.linear(x, w).double(), y)
    assert loss.dtype == (f64 if dtypes[0] == f64 else f32)
    for t, a, e in zip((x, w), torch.autograd.grad(loss, [x, w]), torch.autograd.grad(exact, [x, w])):
        assert a.dtype == t.dtype and relative_error(a, e.double()) < 1e-2


@pytest.mark.parametrize("method", METHODS)
def test_nothing_counts_and_nothing_there(method, device):
    x, w, _, y = sample(device=device)
    x.requires_grad_(), w.requires_grad_()
    for part, labels in ((x, torch.full_like(y, -100)), (x[:0], y[:0])):
        loss = linear_cross_entropy(part, w, labels, method=method)
        grads = torch.autograd.grad(loss, [x, w])
        assert loss == 0 and not any(g.any() for g in grads)


def test_inputs_stay_and_grad_mode_counts(device):
    x, w, b, y = sample(device=device)
    before = [t.clone() for t in (x, w, b, y)]
    x.requires_grad_(), w.requires_grad_()
    for method in METHODS:
        bias = None if method == "tiles" else b
        linear_cross_entropy(x, w, y, linear_bias=bias, method=method).backward()
        with torch.no_grad():
            assert not linear_cross_entropy(x, w, y, linear_bias=bias, method=method).requires_grad
    assert all(torch.equal(a, c) and a._version == 0 for a, c in zip((x, w, b, y), before))


def test_statistics_are_differentiable_unless_chunks_are_named(device):
    x, w, _, y = sample(device=device)
    x.requires_grad_()
    lse = torch.where(y != -100, (x @ w.T).logsumexp(-1), 0.0)
    exact, = torch.autograd.grad(lse.sum(), x)
    for method in WHOLE:
        _, told = linear_cross_entropy(x, w, y, method=method, return_stats=True)
        torch.testing.assert_close(torch.autograd.grad(told.lse.sum(), x)[0], exact)
    loss, told = linear_cross_entropy(x, w, y, method="chunks", return_stats=True)
    assert loss.requires_grad and not told.lse.requires_grad
    torch.testing.assert_close(told.lse, lse.detach())


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@follows_plans
@pytest.mark.parametrize("method", thorough_but(METHODS))
def test_compiled_without_a_graph_break(method, device, fresh_compiler):
    x, w, _, y = sample((2, 6), device=device)
    x.requires_grad_(), w.requires_grad_()
    fn = lambda x, w, y: 2 * linear_cross_entropy(x, w, y, method=method, shift=1)
    compiled = torch.compile(fn, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager", dynamic=True)
    for rows in (2, 1):
        part = x[:rows], w, y[:rows]
        for a, e in zip(torch.autograd.grad(compiled(*part), [x, w]), torch.autograd.grad(fn(*part), [x, w])):
            torch.testing.assert_close(a, e)


@follows_plans
@pytest.mark.parametrize("method, dtype", thorough_but(grid(METHODS, [f32, bf16])))
def test_a_compiler_can_follow_the_plan_for_a_gpu(method, dtype, fresh_compiler, monkeypatch):
    everywhere(monkeypatch, losses, "has_kernels", lambda t: True)
    x, w, _, y = sample((2, 6), dtype=dtype)
    fn = torch.compile(lambda x, w, y: linear_cross_entropy(x, w, y, method=method), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (2, 1):
        got, expected = fn(x[:rows], w, y[:rows]), linear_cross_entropy(x[:rows], w, y[:rows], method=method)
        torch.testing.assert_close(got, expected, rtol=1e-3 if dtype == bf16 else 1e-6, atol=1e-5)


@follows_plans
@pytest.mark.parametrize("method", thorough_but(METHODS, "auto"))
def test_compiled_once_for_any_number_of_tokens(method, fresh_compiler):
    w, seen = torch.randn(50, 8, requires_grad=True), CompileCounter()
    fn = torch.compile(lambda x, y: linear_cross_entropy(x, w, y, method=method), fullgraph=True, backend=seen, dynamic=True)
    for n in (5, 6, 9, 12):
        fn(torch.randn(n, 8, requires_grad=True), torch.randint(50, (n,)))
    assert seen.frame_count == 1


@follows_plans
@pytest.mark.parametrize("method, reduction", [*grid(METHODS, ["mean"]), ("tiles", "sum"), ("auto", "none"), ("eager", "none")])
def test_a_compiled_label_outside_the_classes_has_no_gradient(method, reduction, fresh_compiler, monkeypatch):
    "Its loss is NaN; the gradients of the others are those of the same method without a compiler"
    everywhere(monkeypatch, checks, "may_look", lambda t: False)
    x, w, _, y = sample(dtype=f32)
    y[3] = 40
    x.requires_grad_(), w.requires_grad_()
    fn = lambda x, w, y: linear_cross_entropy(x, w, y, method=method, reduction=reduction, memory_budget=2**24).sum()
    found = [(loss, *torch.autograd.grad(loss, [x, w])) for loss in (torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)(x, w, y), fn(x, w, y))]
    for got, expected in zip(*found): torch.testing.assert_close(got, expected, equal_nan=True)
    assert found[0][0].isnan() and (found[0][1][3] == 0).all()


@follows_plans
@pytest.mark.parametrize("asked", [{}, dict(reduction="none"), dict(return_stats=True)])
def test_a_compiled_call_is_planned_as_the_same_without_a_compiler(asked, fresh_compiler, monkeypatch):
    planned, decide = [], losses.decide_method
    everywhere(monkeypatch, losses, "decide_method", lambda r, *how: planned.append(r) or decide(r, *how))
    x, w, b, y = sample(dtype=f32)
    share = torch.linspace(1, 2, len(y))
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", bf16):
            found = linear_cross_entropy(x, w, y, linear_bias=b, token_weight=share, softcap=5.0, **asked)
        return found[0] + found[1].lse.sum() if asked.get("return_stats") else found.sum()
    leaves = [t.requires_grad_() for t in (x, w, b)]
    for run in (fn, torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)): run(*leaves)
    assert planned[0] == planned[-1] and len(planned) > 1


# --- what it takes ---

@pytest.mark.parametrize("method", ["eager", "tiles", "chunks", "recompute"])
def test_results_do_not_depend_on_the_default_dtype(method):
    "A choice between two numbers has the default dtype, float64 say, and took the loss with it"
    x, w, y = sample_data(16, 8, 40, f32)
    y[:3] = -100
    def found():
        given = [t.clone().requires_grad_() for t in (x, w)]
        loss = linear_cross_entropy(*given, y, method=method)
        return [loss.detach(), *torch.autograd.grad(loss, given)]
    expected = found()
    try:
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(expected, found())), dtype
    finally: torch.set_default_dtype(f32)


@pytest.mark.parametrize("method", ["eager", "tiles", "chunks", "recompute"])
def test_fake_tensors_tell_shapes(method):
    "As estimates of memory use them: labels that are not there are not looked at"
    with torch._subclasses.FakeTensorMode():
        x, w, y = torch.empty(16, 8, requires_grad=True), torch.empty(40, 8, requires_grad=True), torch.zeros(16, dtype=torch.long)
        loss = linear_cross_entropy(x, w, y, method=method)
        assert loss.shape == () and [g.shape for g in torch.autograd.grad(loss, (x, w))] == [x.shape, w.shape]


def test_a_call_is_planned_for_the_tokens_that_count(caplog):
    x, w, y = sample_data(64, 8, 40, f32)
    y[8:] = -100
    with caplog.at_level("DEBUG", "fusedloss"):
        linear_cross_entropy(x, w, y, max_valid=8)
    r = losses.call_of(Operands(x, w, y), Asked(LossOptions(), max_valid=8))
    assert cached_plan(r).why in caplog.text and r.packed == 8


def test_budget_is_kept_on_a_cpu():
    x, w, y = sample_data(512, 16, 4000, f32)
    for budget in (2**20, 2**22, 2**24, 2**26):
        held = peak_memory(lambda: torch.autograd.grad(linear_cross_entropy(x, w, y, memory_budget=budget), [x, w]))
        assert held - x.nbytes - w.nbytes < 1.1 * budget


def test_log_says_what_was_taken(caplog):
    x, w, _, y = sample(dtype=f32)
    with caplog.at_level(logging.DEBUG, logger="fusedloss"):
        linear_cross_entropy(x, w, y)
        linear_cross_entropy(x, w, y, method="tiles")
    assert "11 × 5 × 17: eager: the fastest within our own limit" in caplog.messages[0] and "tiles, as asked" in caplog.messages[1]
    caplog.clear()
    linear_cross_entropy(x, w, y)
    assert not caplog.messages


def test_auto_is_the_method_it_names(device, monkeypatch):
    x, w, _, y = sample((64,), 8, 500, device, f32)
    taken = []
    for name, run in losses.RUNS.items(): monkeypatch.setitem(losses.RUNS, name, lambda *call, name=name, run=run: taken.append(name) or run(*call))
    linear_cross_entropy(x.requires_grad_(), w.requires_grad_(), y)
    linear_cross_entropy(x, w, y, memory_budget=60_000)
    linear_cross_entropy(x, w, y, memory_budget=60_000, reduction="none")
    assert taken[0] == "eager" and taken[1] in ("chunks", "recompute") and taken[2] == "recompute"


# --- the module ---

@pytest.mark.parametrize("how", [{}, dict(method="recompute"), dict(chunk_size=4), dict(method="chunks", memory_budget=4000)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_module_is_the_functional(how, transposed, device):
    torch.manual_seed(0)
    layer = LinearCrossEntropyLoss(5, 17, True, transposed=transposed, device=device, dtype=f64, z_loss=0.01, logit_scale=2.0, shift=1,
                                   class_weight=torch.linspace(1, 2, 17, device=device), **how)
    x, _, _, y = sample((2, 6), device=device)
    loss = layer(x, y)
    loss.backward()
    leaf = layer.linear_weight.detach().contiguous().requires_grad_()
    exact = linear_cross_entropy(x, leaf, y, linear_bias=layer.bias.detach(), weight=layer.class_weight, z_loss=0.01, logit_scale=2.0, shift=1)
    exact.backward()
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(layer.weight.grad, leaf.grad.T if transposed else leaf.grad)


@pytest.mark.parametrize("method", ["auto", "eager", "chunks", "recompute"])
def test_module_keeps_what_it_saw(method, device):
    x, _, _, y = sample(device=device)
    layer = LinearCrossEntropyLoss(5, 17, device=device, dtype=f64, monitoring=True, z_loss=0.1, method=method)
    assert layer(x, y).requires_grad
    z = (x @ layer.weight.T).detach()[y != -100]
    torch.testing.assert_close(layer.metrics["entropy"], torch.distributions.Categorical(logits=z).entropy().mean())
    torch.testing.assert_close(layer.metrics["logit_max"], z.amax())
    assert not any(m.requires_grad for m in layer.metrics.values())


@pytest.mark.parametrize("method", ["auto", "recompute"])
def test_a_filter_goes_to_the_method_that_has_one(method, device):
    x, w, _, y = sample((64,), 16, 900, device)
    x, w, y = x.requires_grad_(), w.requires_grad_(), y.clamp(max=20)
    b = torch.linspace(2, -20, 900, dtype=f64, device=device)  # most tiles hold nothing
    how = dict(linear_bias=b, filter_eps=0.01)
    expected = torch.autograd.grad(recompute_linear_cross_entropy(x, w, y, **how), [x, w])
    found = torch.autograd.grad(linear_cross_entropy(x, w, y, method=method, **how), [x, w])
    exact = torch.autograd.grad(linear_cross_entropy(x, w, y, method=method, linear_bias=b), [x, w])
    for f, e, whole in zip(found, expected, exact):
        assert torch.equal(f, e) and not torch.equal(f, whole), "filtered, and by the same kernels"


@pytest.mark.parametrize("method", ["eager", "chunks", "tiles"])
def test_methods_without_a_filter_name_the_one_that_has(method):
    x, w, _, y = sample(dtype=f32)
    with pytest.raises(ValueError, match="'recompute'.*filter_eps"):
        linear_cross_entropy(x, w, y, method=method, filter_eps=0.01)


def test_module_names_what_it_cannot_do():
    x, _, _, y = sample(dtype=f32)
    for options, message in ((dict(chunk_size=2, reduction="none"), "no method"), (dict(chunk_size=2, method="recompute"), "'chunks'"),
                             (dict(filter_eps=2.0), "filter_eps"), (dict(shift=-1), "shift")):
        with pytest.raises(ValueError, match=message):
            LinearCrossEntropyLoss(5, 17, **options)(x, y)
    layer = LinearCrossEntropyLoss(5, 17, True, dtype=f32)
    assert set(layer.state_dict()) == {"weight", "bias"} and "num_classes=17" in repr(layer)


def test_module_hands_the_promise_on(device):
    x, _, _, y = sample(device=device)
    layer = LinearCrossEntropyLoss(5, 17, device=device, dtype=f64, chunk_size=3)
    torch.testing.assert_close(layer(x, y, max_valid=9), layer(x, y))
    assert broken(lambda: layer(x, y, max_valid=2), [layer.weight])


# --- torch's own samples ---

def torch_samples():
    "What torch ships to test its own function, or a skip"
    invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    found = getattr(invocations, "sample_inputs_linear_cross_entropy", None)
    if found is None:
        pytest.skip("this torch has no linear_cross_entropy")
    for chunked in (False, True):
        yield from found(None, "cpu", f64, True, chunked=chunked)


def test_samples_that_torch_tests_itself_with(torchs_samples):
    seen = 0
    for s in torch_samples():
        x, (w, y), options = s.input, s.args, {k: v for k, v in s.kwargs.items() if k != "options"}
        if w.dim() != 2 or y.is_floating_point():
            continue  # several heads and soft targets are not ours
        exact = F.linear_cross_entropy(x, w, y, **options)
        if options.get("ignore_index", 0) is None:
            options.pop("ignore_index")
        options["weight"] = None if options.get("weight") is None else options["weight"].detach()
        found = linear_cross_entropy(x, w, y, **options)
        if exact.isnan().any():
            continue  # a mean over nothing: 0 here
        torch.testing.assert_close(found, exact)
        for a, e in zip(torch.autograd.grad(found.sum(), [x, w]), torch.autograd.grad(exact.sum(), [x, w])):
            torch.testing.assert_close(a, e)
        seen += 1
    assert seen >= 5


# --- planted bugs ---

MUTANTS = {  # what is wrong: (text of the source, what stands in its place)
    "the shift comes one too late": ("input[..., :-shift, :]", "input[..., :-shift - 1, :]"),
    "the token weights are not shifted": ("later(target), later(token_weight)", "later(target), token_weight[..., :max(0, input.shape[-2] - shift)]"),
    "targets go back": ("t[..., shift:]", "t[..., :max(0, t.shape[-1] - shift)]"),
    "tiles forget the scale": ("a.options.logit_scale, *tile_sides(r)", "1.0, *tile_sides(r)"),
    "tiles forget the ignored": ("a.options.ignore_index, 0.0, None", "-100, 0.0, None"),
    "eager forgets the bias": ("z = F.linear(x, linear_weight, linear_bias)", "z = F.linear(x, linear_weight)"),
    "a module's bias is left out": ("linear_weight=w, linear_bias=bias)", "linear_weight=w)"),
    "a broken promise passes": ("check_promise(t.target, a.options.ignore_index, a.max_valid)", "pass"),
    "eager forgets the class weights": ("run_cross_entropy(z, target, weight, token_weight,", "run_cross_entropy(z, target, None, token_weight,"),
    "a mean is a sum": ("run_cross_entropy(z, target, weight, token_weight, o, reduction,", 'run_cross_entropy(z, target, weight, token_weight, o, "sum" if reduction == "mean" else reduction,'),
    "an empty shard passes": ("t.numel() > 0 or not n_features", "True"),
}


CHOSEN_BUGS = few(MUTANTS, "the shift comes one too late", "tiles forget the ignored")


@pytest.fixture
def variant(tmp_path):
    "The module with texts replaced"
    return partial(planted, losses, tmp_path)


def head(w, b):
    "An `nn.Linear` with this weight and bias"
    layer = torch.nn.Linear(*w.shape[::-1], dtype=w.dtype, device=w.device)
    layer.weight.data, layer.bias.data = w, b
    return layer


def promise_passes(call, x, w, y):
    "Whether a method other than chunks takes more tokens than were promised without raising, on a CPU"
    try:
        call(x, w, y, max_valid=1, method="eager")
    except ValueError:
        return False
    return True


def any_fault(module):
    "Whether the cases notice something in the front door"
    call = module.linear_cross_entropy
    x, w, b, y = sample((2, 6))
    tokens = torch.linspace(0.5, 2, 12, dtype=f64).view(2, 6)
    shifted = call(x, w, y, shift=2, token_weight=tokens)
    statistics = call(x.clone().requires_grad_(), w, y, return_stats=True)[1]
    try:
        call(x, w[:0], y)
        return "an empty shard"
    except ValueError as e:
        if "a whole, local tensor" not in str(e):
            return "an empty shard"
    return (wrong(x, w, b, y, call=call) or wrong(x, w, b, y, call=call, reduction="none", weight=True, how=dict(method="eager"))
            or wrong(x, w, None, torch.where(y < 0, 3, y), call=call, how=dict(method="tiles"), logit_scale=2.0, ignore_index=3)
            or relative_error(shifted, definition(x[:, :-2], w, None, y[:, 2:], token_weight=tokens[:, 2:])) > 1e-12
            or promise_passes(call, x, w, y) or relative_error(call(x, head(w, b), y), definition(x, w, b, y)) > 1e-12
            or not statistics.lse.requires_grad)


def test_the_unchanged_source_passes(variant):
    assert not any_fault(variant(*unchanged(MUTANTS.values())))


@pytest.mark.thorough
@pytest.mark.parametrize("bug", CHOSEN_BUGS)
def test_a_planted_bug_is_noticed(bug, variant):
    try:
        assert any_fault(variant(*MUTANTS[bug])), "nothing noticed"
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
        pass


# --- GPU ---

@cuda_only
@pytest.mark.parametrize("method", ["auto", "eager", "chunks", "recompute", *(["product"] if ON_HOPPER else [])])
def test_nothing_waits_for_the_gpu_and_a_graph_captures_it(method):
    x, w, _, y = sample((512,), 64, 5003, "cuda", bf16, bias=False)
    x.requires_grad_(), w.requires_grad_()
    def step():
        loss = linear_cross_entropy(x, w, y, method=method)
        return loss.detach(), *torch.autograd.grad(2 * loss, [x, w])  # a graph kept alive would tie the capture to its stream
    assert replays(step)


@pytest.mark.thorough
def test_importing_needs_no_gpu_and_no_triton():
    code = ("import sys; sys.modules['triton'] = None; import torch; from fusedloss import linear_cross_entropy as f, plan; "
            "print(f(torch.ones(2, 3), torch.eye(3), torch.tensor([0, 1])).item(), plan(8192, 128256, 4096).method)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["1.0986123085021973", "product"], done.stderr


# --- probabilities as targets ---

@pytest.mark.parametrize("method, reduction, options", grid(("auto", "chunks", "eager"), ("mean", "sum", "none"), ("plain", "torch's", "ours")))
def test_probabilities(method, reduction, options, device):
    if method == "chunks" and reduction == "none": pytest.skip("which chunks do not give")
    made = torch.Generator().manual_seed(0)
    new = lambda *size: torch.randn(size, generator=made, dtype=f64).to(device)
    x, w, b, t = new(2, 9, 5).requires_grad_(), new(11, 5).requires_grad_(), new(11).requires_grad_(), new(2, 9, 11).softmax(-1)
    given = {"plain": {}, "torch's": dict(weight=new(11).abs(), label_smoothing=0.1), "ours": dict(softcap=3.0, z_loss=0.1, token_weight=new(2, 9))}[options]
    got = fl.linear_cross_entropy(x, w, t, linear_bias=b, method=method, reduction=reduction, **given)
    plain = {k: v.reshape(-1) if k == "token_weight" else v for k, v in given.items()}
    expected = fl.cross_entropy(torch.nn.functional.linear(x, w, b).flatten(0, 1), t.flatten(0, 1), reduction=reduction, **plain)
    g = torch.linspace(-1, 2, max(1, got.numel()), dtype=f64, device=device).view(got.shape)
    assert got.shape == ((2, 9) if reduction == "none" else ())
    torch.testing.assert_close(got.flatten(), expected.flatten())
    for a, e in zip(torch.autograd.grad(got, (x, w, b), g), torch.autograd.grad(expected, (x, w, b), g.view(expected.shape))): torch.testing.assert_close(a, e)


def test_probabilities_are_shifted_chunked_and_compiled():
    made = torch.Generator().manual_seed(0)
    x, w, t = torch.randn(2, 300, 5, generator=made, requires_grad=True), torch.randn(11, 5, generator=made), torch.rand(2, 300, 11, generator=made)
    for how in (dict(), dict(memory_budget=16 * 4 * 64)):
        call = lambda x: fl.linear_cross_entropy(x, w, t, shift=1, **how)
        expected = torch.nn.functional.cross_entropy((x[:, :-1] @ w.T).flatten(0, 1), t[:, 1:].flatten(0, 1))
        for loss in (call(x), torch.compile(call, fullgraph=True, backend="aot_eager")(x)) if torch_version() >= (2, 9) else (call(x),):
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(expected, x, retain_graph=True))


@pytest.mark.parametrize("given, words", [
    (dict(method="recompute"), r"method: expected 'eager' or 'chunks' for this call, got 'recompute': it has no probabilities"),
    (dict(method="chunks", reduction="none"), "method: expected 'eager' for this call, got 'chunks'"),
    (dict(max_valid=3), "max_valid: expected nothing beside probabilities, got 3"), (dict(return_stats=True), "return_stats: expected nothing beside probabilities"),
    (dict(filter_eps=1e-3), "filter_eps: expected nothing beside probabilities"), (dict(ignore_index=1), "ignore_index: expected a negative number"),
    (dict(memory_budget=1), "memory_budget: expected at least 88 bytes for 'chunks', got 1 bytes"), (dict(memory_budget=64, reduction="none"), "memory_budget: expected at least 528 bytes for 'eager'"),
    (dict(target=torch.rand(5, 11)), r"target: expected shape \[6, 11\], got \[5, 11\]"),
    (dict(target=torch.rand(6, 11, requires_grad=True)), "target: expected probabilities without gradient")])
def test_probabilities_that_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        fl.linear_cross_entropy(**dict(input=torch.randn(6, 4), linear_weight=torch.randn(11, 4), target=torch.rand(6, 11)) | given)


@pytest.mark.thorough
@pytest.mark.parametrize("budget", (1_500_000, 6_000_000, 11_000_000, 30_000_000))  # below the operands in 16 bits; below what recompute holds; below eager's; enough
@pytest.mark.parametrize("method", ("auto", "eager"))
def test_a_compiled_loss_of_tokens_refuses_the_budgets_that_a_plain_one_refuses(method, budget):
    x, w, y = sample_data(100, 1000, 1000, f32)
    loss = lambda x: linear_cross_entropy(x, w, y, method=method, memory_budget=budget, reduction="none")
    def taken(run):
        with torch.autocast("cpu", bf16):
            try:
                return run(x).detach()
            except (ValueError, RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
                assert "memory_budget" in str(error), error
    torch._dynamo.reset()
    plain, compiled = taken(loss), taken(torch.compile(loss, backend="aot_eager", dynamic=False))
    assert (plain is None) == (compiled is None)
    assert plain is None or torch.allclose(compiled, plain, rtol=1e-5, atol=1e-5)


NAMED = {  # arguments, what a target is, bytes that 32 tokens take
    "recompute": (dict(method="recompute"), "label", 122_896), "of tokens": (dict(method="recompute", reduction="none"), "label", 122_896),
    "filter": (dict(filter_eps=1e-3), "label", 122_896), "statistics": (dict(method="recompute", return_stats=True), "label", 125_900),
    "chunks": (dict(method="chunks"), "label", 121_696), "product": (dict(method="product"), "label", 121_696),
    "FP8": (dict(matmul_dtype=torch.float8_e4m3fn), "label", 119_296),
    "probabilities": ({}, "probabilities", 121_696), "several targets": (dict(method="chunks"), "labels", 121_696)}


@pytest.mark.skipif(torch_version() < (2, 9), reason="PyTorch then leaves plans uncompiled")
@pytest.mark.parametrize("how, kind, budget", NAMED.values(), ids=NAMED)
def test_a_compiled_method_refuses_the_budgets_that_a_plain_one_refuses(how, kind, budget):
    "With the same words, when the graph runs; one graph takes 32 tokens and refuses 64"
    made, counter = torch.Generator().manual_seed(0), CompileCounter()
    w = torch.randn(300, 64, generator=made)
    def loss(x, y):
        found = linear_cross_entropy(x, w, y, memory_budget=budget, **how)
        return found[0] if isinstance(found, tuple) else found
    def taken(run, x, y):
        with torch.autocast("cpu", bf16):
            try: found = run(x, y)
            except ValueError as error: return str(error)
        return found, *torch.autograd.grad(found.sum(), x)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=counter, fullgraph=True, dynamic=True)
    for n in (32, 64, 32):
        x = torch.randn(n, 64, generator=made, requires_grad=True)
        y = torch.rand(n, 300, generator=made) if kind == "probabilities" else torch.randint(300, (n,) if kind == "label" else (n, 3), generator=made)
        plain, found = taken(loss, x, y), taken(compiled, x, y)
        if n == 64: assert "memory_budget: expected" in plain and plain == found
        else: assert all(map(torch.equal, plain, found))
    assert counter.frame_count == 1
