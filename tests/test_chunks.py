"""Linear layer and loss by chunks of tokens: every option and subset of gradients against float64, and a citizen of autograd."""
import itertools

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import torch.utils.flop_counter
from hypothesis import HealthCheck, given, settings, strategies as st

import fusedloss.chunks as chunks
from fusedloss.baseline import sample_data
from fusedloss.chunks import Chunks, ChunkedLinearCrossEntropyLoss, chunk_bytes, chunked_linear_cross_entropy, chunked_loss, plan_chunks, sum_unit
from fusedloss.core import products, promises
from fusedloss.core.products import equal_rows, put_product
from workbook.measure import SHAPES, peak_memory, relative_error, saved_tensors
from grids import FULL, few, grid
from helpers import TOLERANCE, broken, has_no_second_derivative, misfits, planted, replays, unchanged
from test_kernels import exact, reference

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
SUBSETS = list(itertools.product((False, True), repeat=3))  # of gradients of x, w, b
OPTIONS = {
    "plain": {}, "sum": dict(reduction="sum"), "smoothing": dict(label_smoothing=0.1), "scale": dict(logit_scale=0.5),
    "softcap": dict(softcap=1.5), "z-loss": dict(z_loss=1e-2), "class weights": dict(weight=True),
    "token weights": dict(token_weight=True), "ignore 0": dict(ignore_index=0),
    "all": dict(weight=True, token_weight=True, label_smoothing=0.2, logit_scale=2.0, softcap=2.5, z_loss=1e-2),
    "all, sum": dict(weight=True, token_weight=True, label_smoothing=0.2, softcap=2.5, z_loss=1e-2, reduction="sum"),
}


def sample(n=11, h=5, v=17, device="cpu", dtype=f64, ignored=True, ignore_index=-100, bias=True):
    "Input, weight, bias (or None), labels with every fourth ignored"
    x, w, y = sample_data(n, h, v, dtype, device, requires_grad=False)
    b = torch.linspace(-1, 1, v, dtype=dtype, device=device) if bias else None
    return x, w, b, y.masked_fill(torch.arange(n, device=device) % 4 == 1, ignore_index) if ignored else y


def prepared(options, x, w):
    "`True` stands for weights of the sample's sizes"
    ramp = lambda n, low: torch.linspace(low, 2.0, n, dtype=torch.float32, device=x.device)
    sized = dict(weight=len(w), token_weight=len(x))
    return {k: ramp(sized[k], 0.25) if value is True and k in sized else value for k, value in options.items()}


def differentiate(loss_of, tensors, needs=(True, True, True), g=-1.7):
    "Loss, and the gradients of x, w, b: None where not asked for"
    leaves = [None if t is None else t.detach().requires_grad_(need) for t, need in zip(tensors, needs)]
    loss = loss_of(*leaves)
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(g * loss, wanted) if wanted else ())
    return loss.detach(), *(next(found) if t is not None and t.requires_grad else None for t in leaves)


def truth(x, w, b, y, needs=(True, True, True), g=-1.7, **options):
    "The same by definition, in float64 on the CPU"
    double = [None if t is None else t.detach().cpu().double() for t in (x, w, b)]
    options = {k: t.cpu() if isinstance(t, torch.Tensor) else t for k, t in options.items()}
    weight = options.pop("weight", None)
    loss_of = lambda x, w, b: reference(F.linear(x, w, b), y.cpu(), weight, **options)
    return differentiate(loss_of, double, needs, g)


def wrong(x, w, b, y, needs=(True, True, True), call=chunked_linear_cross_entropy, g=-1.7, tolerance=None, how=None, **options):
    "What `call`, told `how` to do it, gets wrong, in words"
    options = prepared(options, x, w)
    got = differentiate(lambda x, w, b: call(x, w, y, linear_bias=b, **(how or {}), **options), (x, w, b), needs, g)
    def limit(dtype: torch.dtype, of_loss: bool) -> float:
        if of_loss and x.is_cuda and x.dtype.itemsize == 2:
            return TOLERANCE[x.dtype]  # of logits that are rounded
        return TOLERANCE[dtype] if of_loss or tolerance is None else tolerance
    return misfits(got, truth(x, w, b, y, needs, g, **options), (x, w, b), limit)


# --- right ---

@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", [3, None])
def test_every_option_and_every_subset_of_gradients(options, rows, device):
    given_ = sample(device=device, ignore_index=options.get("ignore_index", -100))
    for needs in few(SUBSETS, (True, True, True), (False, True, False), (True, False, True)):
        assert not wrong(*given_, needs, how=dict(chunk_size=rows), **options), needs


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 3, 2), (47, 16, 123), (64, 8, 257), (3, 300, 1030)])
@pytest.mark.parametrize("bias", [False, True])
def test_ragged_shapes(shape, bias, device):
    for rows in (1, 32, 46, 47, 48, 1000):
        assert not wrong(*sample(*shape, device=device, bias=bias), how=dict(chunk_size=rows), label_smoothing=0.1)


@st.composite
def calls(draw):
    "Sizes, options, how, and the subset of gradients"
    n, h, v = draw(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(1, 40)))
    maybe = lambda strategy: st.one_of(st.none(), strategy)
    options = dict(
        reduction=draw(st.sampled_from(("mean", "sum"))), ignore_index=draw(st.sampled_from((-100, 0, v - 1, v + 7))),
        label_smoothing=draw(st.sampled_from((0.0, 0.3, 1.0))), logit_scale=draw(st.sampled_from((1.0, 0.25, 3.0))),
        softcap=draw(maybe(st.sampled_from((0.5, 30.0)))), z_loss=draw(st.sampled_from((0.0, 0.1))),
        **draw(st.sampled_from(({}, dict(weight=True), dict(token_weight=True), dict(weight=True, token_weight=True)))))
    how = dict(accumulate=draw(st.sampled_from(("auto", "float32", "native"))), **draw(st.one_of(
        st.integers(1, 25).map(lambda r: dict(chunk_size=r)), st.integers(320, 9000).map(lambda m: dict(memory_budget=m)),
        st.just({}))))
    return (n, h, v), options, how, draw(st.sampled_from(SUBSETS)), draw(st.booleans()), draw(st.sampled_from((0.0, 1.0, -2.5)))


@settings(max_examples=80 if FULL else 25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=calls())
def test_any_call_is_the_definition(device, call):
    shape, options, how, needs, bias, g = call
    x, w, b, y = sample(*shape, device=device, ignore_index=options["ignore_index"], bias=bias)
    assert not wrong(x, w, b, y, needs, g=g, how=how, **options)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 3)])
def test_leading_shapes(shape, device):
    x, w, b, _ = sample(24, device=device)
    x = x[:max(1, torch.Size(shape).numel())].view(*shape, 5)
    y = torch.arange(x[..., 0].numel(), device=device).view(shape) % 17
    tokens = torch.rand(shape, device=device)
    flat = chunked_linear_cross_entropy(x.reshape(-1, 5), w, y.reshape(-1), token_weight=tokens.reshape(-1))
    loss, told = chunked_linear_cross_entropy(x, w, y, token_weight=tokens, return_stats=True)
    assert loss == flat and told.lse.shape == y.shape == told.target_rank.shape


@pytest.mark.parametrize("index", [-100, 0, 5, 16, 24])
@pytest.mark.parametrize("weighted", [False, True])
def test_ignore_index_inside_and_outside_the_classes(index, weighted, device):
    given_ = sample(device=device, ignore_index=index)
    assert not wrong(*given_, how=dict(chunk_size=3), ignore_index=index, **(dict(weight=True) if weighted else {}))


def test_the_result_does_not_depend_on_the_chunks(device):
    x, w, b, y = sample(13, device=device, ignored=False)
    run = lambda **how: differentiate(lambda x, w, b: chunked_linear_cross_entropy(x, w, y, linear_bias=b, **how), (x, w, b))
    whole = run(chunk_size=13)
    for how in [dict(chunk_size=r) for r in (1, 2, 3, 4, 7, 12, 14, 100)] + [dict(memory_budget=b) for b in (200, 700, 10**6)]:
        for a, b_ in zip(run(**how), whole):
            torch.testing.assert_close(a, b_, atol=1e-13, rtol=1e-12)


def test_a_token_does_not_depend_on_the_others(device):
    x, w, b, y = sample(12, device=device)
    rows = lambda x: differentiate(lambda x, w, b: chunked_linear_cross_entropy(
        x, w, y, linear_bias=b, reduction="sum", chunk_size=4), (x, w, b))[1]
    other = x.clone()
    other[5:] *= -3
    assert torch.equal(rows(x)[:4], rows(other)[:4])


@pytest.mark.parametrize("dtype", [f32, bf16, f16])
def test_runs_are_equal_bit_for_bit(dtype, device):
    given_ = sample(300, 64, 500, device, dtype)
    run = lambda: differentiate(lambda x, w, b: chunked_linear_cross_entropy(x, w, given_[3], linear_bias=b, chunk_size=64), given_[:3])
    first = run()
    assert all(torch.equal(a, b) for _ in range(4) for a, b in zip(run(), first))


# --- numbers that strain ---

@pytest.mark.parametrize("spread", [120.0, 1e4])
def test_targets_far_below_the_maximum(spread, device):
    x, w = torch.tensor([[spread, 0.0]], device=device), torch.eye(2, device=device)
    loss, dx, dw, _ = differentiate(lambda x, w, b: chunked_linear_cross_entropy(x, w, torch.tensor([1], device=device)), (x, w, None), g=1.0)
    assert loss == spread and dx.tolist() == [[1.0, -1.0]] and dw.isfinite().all()


def test_no_loss_below_zero(device):
    for v in (1, 2, 7, 127, 129, 1000):
        x, w = torch.full((5, 4), 1.0, device=device), torch.full((v, 4), -7.5, device=device)
        w[v // 2] = -2.0
        y = torch.full((5,), v // 2, device=device)
        assert chunked_linear_cross_entropy(x, w, y, reduction="sum", chunk_size=2) >= 0


def test_masked_classes_by_the_bias(device):
    x, w, b, y = sample(device=device, dtype=f32)
    b[3:9], y = -torch.inf, torch.where((y >= 3) & (y < 9), 1, y)
    assert not wrong(x, w, b, y, (True, True, False), how=dict(chunk_size=4))


@pytest.mark.parametrize("c, dtype", few(grid([0.0, -3.0, 1e-4, 65536.0], [f64, f32, bf16]), (0.0, f64), (-3.0, f32), (1e-4, bf16), (65536.0, f32)))
def test_gradients_follow_the_scale_of_the_loss(c, dtype, device):
    given_ = sample(40, 8, 30, device, dtype)
    assert not wrong(*given_, g=c, how=dict(chunk_size=16), tolerance=TOLERANCE[dtype])


def test_loss_inside_an_expression(device):
    x, w, b, y = sample(device=device)
    ours = differentiate(lambda x, w, b: chunked_linear_cross_entropy(x, w, y, linear_bias=b, chunk_size=4) ** 2 + x.sum(), (x, w, b))
    mask = torch.where(y == -100, -100, y)
    theirs = differentiate(lambda x, w, b: F.cross_entropy(F.linear(x, w, b), mask) ** 2 + x.sum(), (x, w, b))
    for a, e in zip(ours, theirs):
        torch.testing.assert_close(a, e)


def test_the_loss_may_be_changed_in_place(device):
    x, w, b, y = sample(device=device)
    def loss_of(x, w, b):
        loss = chunked_linear_cross_entropy(x, w, y, linear_bias=b)
        loss *= 2
        return loss / 2
    assert all(relative_error(a.cpu(), e) < 1e-12 for a, e in zip(differentiate(loss_of, (x, w, b)), truth(x, w, b, y)))


HOW = {"plain": {}, "in chunks": dict(chunk_size=3), "statistics": dict(return_stats=True)}


@pytest.mark.parametrize("dtype, reduction, how", grid([f64, bf16, f16], ["mean", "sum"], HOW))
def test_nothing_but_ignored_tokens(dtype, reduction, how, device):
    x, w, b, y = sample(device=device, dtype=dtype)
    def loss_of(x, w, b):
        loss = chunked_linear_cross_entropy(x, w, torch.full_like(y, -100), linear_bias=b, reduction=reduction, **HOW[how])
        return loss[0] if isinstance(loss, tuple) else loss
    found = differentiate(loss_of, (x, w, b), g=3.0)
    assert all((t == 0).all() for t in found) and [t.shape for t in found[1:]] == [x.shape, w.shape, b.shape]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_tokens(reduction, device):
    x, w, b, y = sample(0, device=device)
    for how in ({}, dict(chunk_size=4), dict(memory_budget=10**6), dict(max_valid=0)):
        found = differentiate(lambda x, w, b: chunked_linear_cross_entropy(x, w, y, linear_bias=b, reduction=reduction, **how), (x, w, b))
        assert found[1].shape == (0, 5) and all((t == 0).all() for t in found)
    loss, told = chunked_linear_cross_entropy(x, w, y, return_stats=True)
    assert loss == 0 and told.lse.shape == (0,) and told.n_valid == 0


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize("accumulate", ["auto", "float32", "native"])
def test_half_precision(dtype, accumulate, device):
    given_ = sample(256, 64, 1000, device, dtype)
    limit = 2 * TOLERANCE[dtype] if accumulate == "native" else TOLERANCE[dtype]
    assert not wrong(*given_, how=dict(chunk_size=64, accumulate=accumulate), tolerance=limit, g=1.0 if dtype == bf16 else 256.0)


def test_error_of_dw_does_not_grow_with_the_chunks(device):
    x, w, _, y = sample(512, 32, 200, device, bf16, ignored=False)
    expected = truth(x, w, None, y, reduction="sum")[2]
    error = lambda k, how: relative_error(differentiate(lambda x, w, b: chunked_linear_cross_entropy(
        x, w, y, reduction="sum", chunk_size=512 // k, accumulate=how), (x, w, None))[2].cpu(), expected)
    once = error(1, "float32")
    assert max(error(16, how) for how in ("float32", "auto")) < 1.1 * once and error(256, "float32") < 1.1 * once
    assert error(256, "native") > 3 * once


def test_gradient_of_a_confident_target(device):
    x = torch.zeros(4, 8, dtype=bf16, device=device)
    x[:, 0] = 1
    w = torch.zeros(16, 8, dtype=bf16, device=device)
    w[3, 0] = 12.0
    y = torch.full((4,), 3, device=device)
    found, expected = (f(x, w, None, y) for f in (lambda x, w, b, y: differentiate(
        lambda x, w, b: chunked_linear_cross_entropy(x, w, y, chunk_size=2), (x, w, b)), truth))
    assert all(relative_error(a.cpu(), e) < 2 * TOLERANCE[bf16] for a, e in zip(found[:3], expected))


def test_the_loss_is_not_rounded(device):
    x, w, _, y = sample(2000, 8, 100, device, bf16, ignored=False)
    loss = chunked_linear_cross_entropy(x, w, y, chunk_size=128)
    assert loss.dtype == f32 and relative_error(loss.cpu(), truth(x, w, None, y)[0]) < (1e-6 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("accumulate", ["float32", "native"])
def test_half_precision_mean_over_many_tokens(accumulate, device):
    "1 / 70 000 is no normal fp16 number, and a sum of 70 000 passes the largest: neither may show"
    n = 70000
    x, w, _, y = sample(n, 2, 3, device, f16, ignored=False)
    x, y = x.abs() + 1, torch.zeros_like(y)
    limit = 2e-3 if accumulate == "float32" else 1e-2
    assert not wrong(x, w, None, y, (True, True, False), g=65536.0 / 4, tolerance=limit, how=dict(chunk_size=8192, accumulate=accumulate))


@pytest.mark.parametrize("n", [0, 1, 1024, 1025, 2**20])
def test_sum_unit_is_a_power_of_two(n):
    assert sum_unit(n, f16) == 2.0 ** round(torch.tensor(sum_unit(n, f16)).log2().item()) and sum_unit(n, f16) * n <= 1024
    assert sum_unit(n, f32) == sum_unit(n, bf16) == 1


# --- autograd ---

def leaves(device="cpu", **kwargs):
    x, w, b, y = sample(device=device, **kwargs)
    return x.requires_grad_(), w.requires_grad_(), b.requires_grad_(), y


@pytest.mark.parametrize("dtype", [f64, f16])
def test_backward_twice(dtype, device):
    x, w, b, y = leaves(device, dtype=dtype)
    loss = 2 * chunked_linear_cross_entropy(x, w, y, linear_bias=b, chunk_size=4)
    first = [g.clone() for g in torch.autograd.grad(loss, [x, w, b], retain_graph=True)]
    halves = torch.autograd.grad(loss, [x, w, b], torch.full_like(loss, 0.5), retain_graph=True)
    again = torch.autograd.grad(loss, [x, w, b])
    assert all(torch.equal(a, c) for a, c in zip(first, again))
    assert all(torch.allclose(a / 2, h, rtol=1e-2 if dtype == f16 else 1e-12) for a, h in zip(first, halves))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)


def test_grad_writes_no_grad_and_hooks_fire_once(device):
    x, w, b, y = leaves(device)
    fired = []
    w.register_hook(lambda g: fired.append(g.clone()))
    dw, = torch.autograd.grad(chunked_linear_cross_entropy(x, w, y, linear_bias=b), [w])
    assert x.grad is None and w.grad is None and len(fired) == 1 and torch.equal(fired[0], dw)


def test_micro_batches_add_up(device):
    x, w, b, y = sample(12, device=device, ignored=False)
    expected = truth(x, w, b, y, g=1.0, reduction="sum")
    w.requires_grad_()
    for i in (slice(0, 5), slice(5, 12)):
        chunked_linear_cross_entropy(x[i], w, y[i], linear_bias=b, reduction="sum", chunk_size=3).backward()
    assert relative_error(w.grad.cpu(), expected[2]) < 1e-12


def test_tied_weights_get_both_gradients(device):
    _, w, _, y = sample(device=device)
    w.requires_grad_()
    ids = torch.arange(11, device=device)
    loss = chunked_linear_cross_entropy(F.embedding(ids, w), w, y, chunk_size=4)
    expected, = torch.autograd.grad(F.cross_entropy(F.embedding(ids, w) @ w.T, y), w)
    torch.testing.assert_close(torch.autograd.grad(loss, w)[0], expected)


def test_input_and_weight_may_be_one_tensor(device):
    t = sample(device=device)[1].requires_grad_()
    y = torch.arange(17, device=device)
    expected, = torch.autograd.grad(F.cross_entropy(t @ t.T, y), t)
    torch.testing.assert_close(torch.autograd.grad(chunked_linear_cross_entropy(t, t, y, chunk_size=5), t)[0], expected)


def test_checkpointed_like_any_layer(device):
    x, w, b, y = leaves(device)
    loss_of = lambda x, w: chunked_linear_cross_entropy(torch.tanh(x), w, y, chunk_size=4)
    kept = torch.utils.checkpoint.checkpoint(loss_of, x, w, use_reentrant=False)
    for a, e in zip(torch.autograd.grad(3 * kept, [x, w]), torch.autograd.grad(3 * loss_of(x, w), [x, w])):
        torch.testing.assert_close(a, e)


def test_no_graph_where_none_is_asked_for(device):
    x, w, b, y = leaves(device)
    with torch.no_grad():
        quiet = chunked_linear_cross_entropy(x, w, y, linear_bias=b)
    with torch.inference_mode():
        assert chunked_linear_cross_entropy(x, w, y, linear_bias=b) == quiet
    assert not quiet.requires_grad and not chunked_linear_cross_entropy(x.detach(), w.detach(), y).requires_grad
    loss = chunked_linear_cross_entropy(x, w, y, linear_bias=b)
    assert all(not g.is_inference() and not g.requires_grad for g in torch.autograd.grad(loss, [x, w, b]))


def test_second_derivatives_are_refused(device):
    x, w, b, y = leaves(device)
    for leaf in (x, w, b):
        assert has_no_second_derivative(chunked_linear_cross_entropy(x, w, y, linear_bias=b), leaf)


def test_gradcheck(device):
    x, w, b, y = leaves(device)
    for reduction in ("mean", "sum"):
        assert torch.autograd.gradcheck(lambda x, w, b: chunked_linear_cross_entropy(
            x, w, y, linear_bias=b, chunk_size=4, reduction=reduction, softcap=2.0, z_loss=0.1), (x, w, b))


def test_a_non_finite_upstream_gradient_leaves_ignored_tokens_alone(device):
    x, w, _, y = sample(device=device)
    dx = differentiate(lambda x, w, b: chunked_linear_cross_entropy(x, w, y), (x, w, None), (True, False, False), g=torch.inf)[1]
    assert (dx[y == -100] == 0).all() and not dx[y != -100].isfinite().all()


def test_the_callers_tensors_stay_as_they_are(device):
    given_ = sample(device=device)
    before = [t.clone() for t in given_]
    versions = [t._version for t in given_]
    x, w, b, y = given_
    differentiate(lambda x, w, b: chunked_linear_cross_entropy(x, w, y, linear_bias=b, chunk_size=3), (x, w, b))
    assert all(torch.equal(a, t) for a, t in zip(before, given_)) and versions == [t._version for t in given_]


# --- layouts, dtypes ---

LAYOUTS = {
    "transposed input": lambda x, w: (x.T.contiguous().T, w), "transposed weight": lambda x, w: (x, w.T.contiguous().T),
    "every other feature": lambda x, w: (x.repeat_interleave(2, 1)[:, ::2], w), "part of a weight": lambda x, w: (x, torch.cat([w, w], 1)[:, :w.shape[1]]),
    "one row for all": lambda x, w: (x[:1].expand_as(x), w), "one feature for all": lambda x, w: (x, w[:, :1].expand_as(w)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [f64, bf16])
def test_any_strides(layout, dtype, device):
    x, w, b, y = sample(40, 16, 50, device, dtype)
    for accumulate in ("float32", "native"):
        assert not wrong(*layout(x, w), b, y, how=dict(chunk_size=16, accumulate=accumulate), tolerance=2 * TOLERANCE[dtype])


def test_sequences_first(device):
    x, w, b, _ = sample(24, device=device)
    x, y = x.view(4, 6, 5).transpose(0, 1), torch.arange(24, device=device).view(4, 6).T % 17
    torch.testing.assert_close(chunked_linear_cross_entropy(x, w, y, chunk_size=5),
                               chunked_linear_cross_entropy(x.reshape(24, 5), w, y.reshape(24)))


LABELS = {
    "not aligned": lambda y: torch.cat([y[:1], y])[1:], "int32": lambda y: y.int(), "int16": lambda y: y.short(),
    "every other": lambda y: y.repeat_interleave(2)[::2], "expanded": lambda y: y[:1].expand_as(y),
}


@pytest.mark.parametrize("make", LABELS.values(), ids=LABELS)
def test_labels_of_any_kind(make, device):
    x, w, b, y = sample(device=device)
    assert not wrong(x, w, b, make(y), how=dict(chunk_size=4))


@pytest.mark.parametrize("seen", [bf16, f16])
@pytest.mark.parametrize("dtypes", [(f32, f32), (bf16, f32), (f32, bf16)], ids=str)
def test_autocast_works_in_its_dtype_and_gradients_in_their_parameters(seen, dtypes, device):
    x, w, b, y = sample(64, 16, 90, device, f32)
    x, w = x.to(dtypes[0]), w.to(dtypes[1])
    def call(x, w, y, **options):
        with torch.autocast(device, dtype=seen):
            return chunked_linear_cross_entropy(x, w, y, **options)
    expected, found = truth(x, w, b, y), differentiate(lambda x, w, b: call(x, w, y, linear_bias=b, chunk_size=16), (x, w, b))
    assert [t.dtype for t in found] == [f32, *dtypes, f32]
    assert all(relative_error(a.cpu(), e) < 2e-2 for a, e in zip(found, expected))


def test_autocast_sums_dw_of_float32_weights_in_float32(device):
    x, w, _, y = sample(512, 16, 40, device, f32, ignored=False)
    def dw(rows):
        with torch.autocast(device, dtype=bf16):
            loss_of = lambda x, w, b: chunked_linear_cross_entropy(x, w, y, chunk_size=rows)
            return differentiate(loss_of, (x, w, None))[2]
    assert relative_error(dw(2), dw(512).double()) < (1e-5 if device == "cpu" else 5e-3)  # there dz is rounded


def test_autocast_leaves_float64_alone(device):
    given_ = sample(device=device)
    with torch.autocast(device, dtype=bf16):
        assert not wrong(*given_, how=dict(chunk_size=4))


def test_mixed_dtypes_without_autocast_are_refused(device):
    x, w, _, y = sample(device=device)
    with pytest.raises(ValueError, match="linear_weight"):
        chunked_linear_cross_entropy(x, w.float(), y)


# --- ignored tokens, buffers, statistics ---

@pytest.mark.parametrize("bound", [6, 8, 11, 50])
@pytest.mark.parametrize("options", [{}, dict(token_weight=True, weight=True, label_smoothing=0.1)], ids=["plain", "weighted"])
def test_a_promise_changes_nothing(bound, options, device):
    x, w, b, y = sample(device=device)
    y[6:8] = -100
    valid = int((y != -100).sum())
    assert valid == 6
    for needs in SUBSETS:
        assert not wrong(x, w, b, y, needs, how=dict(max_valid=bound, chunk_size=4), **options)


def test_a_broken_promise_is_loud(device):
    x, w, b, y = sample(device=device)
    x, w = x.requires_grad_(), w.requires_grad_()
    for bound in (3, 7):
        assert broken(lambda: chunked_linear_cross_entropy(x, w, y, max_valid=bound), [x, w])
    assert chunked_linear_cross_entropy(x, w, y, max_valid=8).isfinite()


def test_garbage_in_ignored_tokens_is_not_seen(device):
    x, w, b, y = sample(device=device)
    spoilt = torch.where((y == -100)[:, None], torch.nan, x)
    run = lambda x: differentiate(lambda x, w, b: chunked_linear_cross_entropy(
        x, w, y, linear_bias=b, max_valid=int((y != -100).sum())), (x, w, b))
    for a, e in zip(run(spoilt), run(x)):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("dtype", [f32, bf16, f16])
@pytest.mark.parametrize("g", [1.0, -0.125])
def test_dw_is_added_to_a_buffer(dtype, g, device):
    x, w, b, y = sample(64, 16, 40, device, dtype)
    home = torch.ones(40, 16, device=device)
    leaves_ = [t.detach().requires_grad_() for t in (x, w, b)]
    loss = chunked_linear_cross_entropy(leaves_[0], leaves_[1], y, linear_bias=leaves_[2], chunk_size=16, grad_buffer=home)
    assert (home == 1).all(), "not before backward"
    (g * loss).backward(retain_graph=True)
    expected = truth(x, w, b, y, g=g)
    assert leaves_[1].grad is None and relative_error((home - 1).cpu(), expected[2]) < (1e-2 if device == "cuda" else 1e-4)
    assert relative_error(leaves_[0].grad.cpu(), expected[1]) < TOLERANCE[dtype]
    (g * loss).backward()
    assert relative_error((home - 1).cpu(), 2 * expected[2]) < (1e-2 if device == "cuda" else 1e-4)


def test_a_frozen_weight_leaves_the_buffer_alone(device):
    x, w, _, y = sample(device=device, dtype=f32)
    home = torch.zeros_like(w)
    chunked_linear_cross_entropy(x.requires_grad_(), w, y, grad_buffer=home).backward()
    assert (home == 0).all() and x.grad is not None


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("how", [dict(chunk_size=4), dict(max_valid=8, chunk_size=4), {}], ids=str)
def test_statistics(grads, how, device):
    x, w, b, y = sample(device=device)
    options = dict(logit_scale=0.5, softcap=3.0, z_loss=0.1, token_weight=torch.rand(11, device=device))
    loss, told = chunked_linear_cross_entropy(x.requires_grad_(grads), w, y, linear_bias=b, return_stats=True, **how, **options)
    expected = exact(F.linear(x.detach(), w, b), y, **{k: t.cpu() if k == "token_weight" else t for k, t in options.items()})
    for name, value in told._asdict().items():
        torch.testing.assert_close(value.cpu().double(), getattr(expected, name).double(), msg=name)
        assert not value.requires_grad
    assert told.target_rank.dtype == told.n_valid.dtype == torch.int64 and loss.requires_grad == grads
    assert not wrong(x, w, b, y, call=lambda *a, **k: chunked_linear_cross_entropy(*a, return_stats=True, **k)[0], how=how,
                     **{k: v for k, v in options.items()})


# --- memory ---

@pytest.mark.parametrize("needs", SUBSETS)
def test_saved_are_the_gradients_alone(needs, device):
    x, w, b, y = sample(64, 16, 40, device, bf16)
    x, w, b = (t.requires_grad_(need) for t, need in zip((x, w, b), needs))
    saved = saved_tensors(lambda: chunked_linear_cross_entropy(x, w, y, linear_bias=b, chunk_size=16), x, w, b, y)
    gradients = x.nbytes * needs[0] + w.nbytes * needs[1] + len(b) * 4 * needs[2]
    assert sum(t.nbytes for t in saved) == gradients


def test_memory_is_a_chunk_whatever_the_tokens():
    def extra(n):
        x, w, y = sample_data(n, 8, 4000)
        return peak_memory(lambda: torch.autograd.grad(chunked_linear_cross_entropy(x, w, y, chunk_size=64), [x, w])) - x.nbytes - w.nbytes
    assert extra(1024) < 10 * 64 * 4000 * 4 and extra(1024) < extra(128) + 1024 * 100


def test_a_budget_has_room_for_autocasts_copies(monkeypatch):
    "Chunks are then those of 16-bit operands, and less is refused"
    x, w, y = sample_data(512, 32, 256)
    row, copies, plans = 256 * 2, 2 * (x.numel() + w.numel()), []
    monkeypatch.setattr(chunks, "plan_chunks", lambda *given: plans.append(plan_chunks(*given)) or plans[-1])
    def loss(budget, *operands): return chunked_linear_cross_entropy(*operands, y, memory_budget=budget)
    with torch.autocast("cpu", bf16):
        found = loss(copies + 64 * row, x, w)
        assert torch.equal(loss(copies + 4096 * row, x, w), loss(None, x, w))
        loss(copies + row, x, w)
        with pytest.raises(ValueError, match=f"memory_budget: expected at least {copies + row} bytes here; .*, got {copies + row - 1}"): loss(copies + row - 1, x, w)
    expected = loss(64 * row, x.to(bf16), w.to(bf16))
    assert plans[0].rows == plans[-1].rows <= 64 and torch.equal(found, expected)


def test_a_promise_of_no_token_takes_one_row():
    "On a GPU, whose gradients are NaN where the promise is broken"
    y = torch.empty(5, dtype=torch.int64, device="meta")
    assert [len(promises.packed_rows(y, -100, promise)) for promise in (0, 1, 4)] == [1, 1, 4]


@cuda_only
@pytest.mark.parametrize("how", [{}, dict(memory_budget=2**26), dict(chunk_size=1024, accumulate="float32"), dict(chunk_size=1024, accumulate="native")], ids=str)
def test_peak_memory_is_the_plans(how):
    x, w, y = sample_data(4096, 1024, 32768, bf16, "cuda")
    plan = plan_chunks(4096, 1024, 32768, bf16, bf16, **how)
    peak = peak_memory(lambda: torch.autograd.grad(chunked_linear_cross_entropy(x, w, y, **how), [x, w]), "cuda")
    predicted = chunk_bytes(plan, 1024, 32768, bf16, bf16)
    assert abs(peak - x.nbytes - w.nbytes - predicted) < 2**20 and predicted <= how.get("memory_budget", 2**40)


@given(n=st.integers(0, 10**6), most=st.integers(1, 10**4))
def test_rows_are_equal_and_fit(n, most):
    rows = equal_rows(n, most)
    assert 1 <= rows <= max(most, 1) and (n > most or rows == max(n, 1))
    assert n <= most or -(-n // rows) <= -(-n // most) + 1


@given(n=st.integers(1, 10**6), h=st.integers(1, 10**4), v=st.integers(1, 300000), budget=st.integers(20, 40),
       accumulate=st.sampled_from(("auto", "native")), dtype=st.sampled_from((bf16, f32)))
def test_plans_keep_their_budget(n, h, v, budget, accumulate, dtype):
    plan = plan_chunks(n, h, v, dtype, dtype, memory_budget=2**budget, accumulate=accumulate)
    assert 1 <= plan.rows <= n and not (plan.wide and (accumulate == "native" or dtype == f32 or plan.rows == n))
    assert chunk_bytes(plan, h, v, dtype, dtype) <= max(2**budget, products.logits_row(v, dtype))


def test_plans_of_the_three_shapes():
    for s in SHAPES:
        plan = plan_chunks(*s, bf16, bf16)
        assert chunk_bytes(plan, *s[1:], bf16, bf16) <= s.N * s.V and 2048 <= plan.rows <= 8192
    assert plan_chunks(512, 1024, 32000, bf16, bf16) == Chunks(512, False)
    assert plan_chunks(8192, 64, 1000, bf16, bf16, need_w=False) == Chunks(4096, False)
    assert plan_chunks(2**20, 64, 1000, bf16, bf16) == Chunks(4096, True)
    assert plan_chunks(8192, 64, 1000, bf16, f32) == plan_chunks(8192, 64, 1000, f32, f32) == Chunks(4096, False)


def test_products_are_rounded_once(device):
    a, b = torch.randn(40, 64, device=device), torch.randn(64, 50, device=device)
    for operand, total in ((bf16, bf16), (bf16, f32), (f32, f32), (f64, f64)):
        if device == "cpu" and operand != total:
            continue
        out = torch.full((40, 50), torch.nan, dtype=total, device=device)
        put_product(out, a.to(operand), b.to(operand), alpha=0.5)
        put_product(out, a.to(operand), b.to(operand), add=True, alpha=0.25)
        assert relative_error(out, 0.75 * (a.to(operand).double() @ b.to(operand).double())) < TOLERANCE[total]


# --- bad input ---

@pytest.mark.parametrize("bad", [dict(memory_budget=8), dict(memory_budget=10**6, chunk_size=4)], ids=str)
def test_a_budget_that_cannot_be_kept_is_named(bad):
    x, w, _, y = sample(dtype=f32)
    with pytest.raises(ValueError, match="^memory_budget: expected .*got "):
        chunked_linear_cross_entropy(x, w, y, **bad)


def test_what_chunks_cannot_do_names_what_can():
    x, w, _, y = sample()
    with pytest.raises(ValueError, match="method 'recompute'"):
        chunked_linear_cross_entropy(x, w, y, reduction="none")


@pytest.mark.parametrize("label", [-1, 17, 20, 2**40])
def test_a_label_out_of_range(label, device, monkeypatch):
    x, w, b, y = sample(device=device)
    y[3] = label
    if device == "cpu":
        with pytest.raises(IndexError, match=rf"target\[3\] is {label}"):
            chunked_linear_cross_entropy(x, w, y)
        return
    monkeypatch.delenv("FUSEDLOSS_DEBUG", raising=False)
    loss, dx, _, _ = differentiate(lambda x, w, b: chunked_linear_cross_entropy(x, w, y, linear_bias=b, chunk_size=4, reduction="sum"), (x, w, b), g=1.0)
    y[3] = -100
    assert loss.isnan() and relative_error(dx[4:].cpu(), truth(x, w, b, y, g=1.0, reduction="sum")[1][4:]) < 1e-12


# --- the module ---

@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_module_is_the_functional(transposed, bias, device):
    torch.manual_seed(0)
    layer = ChunkedLinearCrossEntropyLoss(5, 17, bias, transposed=transposed, device=device, dtype=f64, z_loss=0.01, logit_scale=2.0, chunk_size=4)
    x, _, _, y = sample(device=device)
    layer(x, y).backward()
    loss_of = lambda x, w, b: chunked_linear_cross_entropy(x, w, y, linear_bias=b, z_loss=0.01, logit_scale=2.0)
    _, _, dw, db = differentiate(loss_of, (x, layer.linear_weight, layer.bias), g=1.0)
    torch.testing.assert_close(layer.weight.grad, dw.T if transposed else dw)
    assert layer.weight.grad.is_contiguous() and (not bias or torch.allclose(layer.bias.grad, db))


def test_module_keeps_what_it_saw(device):
    x, _, _, y = sample(device=device)
    layer = ChunkedLinearCrossEntropyLoss(5, 17, device=device, dtype=f64, monitoring=True, z_loss=0.1)
    loss = layer(x, y)
    z = (x @ layer.weight.T).detach()[y != -100]
    expected = dict(logit_norm=z.norm(dim=1).mean(), logit_max=z.amax(), z_loss=0.1 * z.logsumexp(1).square().mean(),
                    entropy=torch.distributions.Categorical(logits=z).entropy().mean())
    assert layer.metrics.keys() == expected.keys() and loss.requires_grad
    for name, value in expected.items():
        torch.testing.assert_close(layer.metrics[name], value)
    assert not any(m.requires_grad for m in layer.metrics.values())


def test_module_of_nothing_to_see(device):
    layer = ChunkedLinearCrossEntropyLoss(5, 17, device=device, monitoring=True)
    assert layer(torch.zeros(0, 5, device=device), torch.zeros(0, dtype=torch.int64, device=device)) == 0
    assert layer.metrics["entropy"] == 0


def test_module_state_and_init():
    torch.manual_seed(0)
    layer = ChunkedLinearCrossEntropyLoss(5, 17, True, class_weight=torch.ones(17))
    torch.manual_seed(0)
    linear = torch.nn.Linear(5, 17)
    assert torch.equal(layer.weight, linear.weight) and torch.equal(layer.bias, linear.bias)
    assert set(layer.state_dict()) == {"weight", "bias", "class_weight"}
    filled = ChunkedLinearCrossEntropyLoss(5, 17, transposed=True, init_method=lambda w: w.copy_(linear.weight))
    assert torch.equal(filled.weight, linear.weight.T) and "in_features=5, num_classes=17" in repr(filled)


# --- compilers ---

@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("options", [*[{}] * FULL, dict(return_stats=True)], ids=[*["plain"] * FULL, "statistics"])
def test_compiled_without_a_graph_break(options, device, fresh_compiler):
    x, w, b, y = leaves(device)
    def fn(x, w, b, y):
        loss = chunked_linear_cross_entropy(x, w, y, linear_bias=b, chunk_size=4, **options)
        return 2 * (loss[0] if options else loss)
    compiled = torch.compile(fn, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager", dynamic=True)
    for n in (11, 7):
        part = x.detach()[:n].requires_grad_(), w, b, y[:n]
        for a, e in zip(torch.autograd.grad(compiled(*part), part[:3]), torch.autograd.grad(fn(*part), part[:3])):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("needs, stats", few(grid(SUBSETS[1::2], [False, True]), ((False, True, True), False), ((True, True, True), True)))
def test_operator_by_opcheck(needs, stats, device):
    x, w, b, y = sample(device=device, dtype=f32)
    x, w, b = (t.requires_grad_(need) for t, need in zip((x, w, b), needs))
    torch.library.opcheck(chunked_loss, (x, w, b, y, None, None, -100, 0.1, 1.0, 0.0, 0.0, f32, f32, True, 4, None, "auto", None,
                                         *needs, stats))


def test_operator_and_function_agree(device):
    given_ = sample(device=device, dtype=f16)
    def observed(x, w, y, **options):
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            return chunked_linear_cross_entropy(x, w, y, **options)
    run = lambda call: differentiate(lambda x, w, b: call(x, w, given_[3], linear_bias=b, chunk_size=4), given_[:3])
    for a, e in zip(run(observed), run(chunked_linear_cross_entropy)):
        torch.testing.assert_close(a, e)


def test_a_buffer_is_refused_where_a_compiler_looks_on(fresh_compiler):
    x, w, _, y = leaves(dtype=f32)
    home = torch.zeros_like(w)
    with torch.utils.flop_counter.FlopCounterMode(display=False), pytest.raises(ValueError, match="grad_buffer"):
        chunked_linear_cross_entropy(x, w, y, grad_buffer=home)


# --- GPU ---

@cuda_only
@pytest.mark.parametrize("how", [{}, dict(chunk_size=128), dict(chunk_size=128, max_valid=400), dict(weight=True, softcap=20.0, label_smoothing=0.1),
                                 dict(return_stats=True)], ids=str)
def test_nothing_waits_for_the_gpu_and_a_graph_captures_it(how):
    x, w, _, y = sample(512, 64, 5003, "cuda", bf16)
    how = prepared(how, x, w)
    x.requires_grad_(), w.requires_grad_()
    def step():
        loss = chunked_linear_cross_entropy(x, w, y, **how)
        loss = loss[0] if isinstance(loss, tuple) else loss
        return loss.detach(), *torch.autograd.grad(2 * loss, [x, w])  # a graph kept alive would tie the capture to its stream
    assert replays(step)


@cuda_only
@pytest.mark.big
@pytest.mark.parametrize("shape", [(16896, 64, 128256), (2**20 + 8, 2056, 64), (512, 8208, 262144)])
def test_more_than_two_to_the_31_elements(shape):
    n, h, v = shape
    x, w, y = sample_data(*shape, bf16, "cuda")
    loss, told = chunked_linear_cross_entropy(x, w, y, reduction="sum", chunk_size=n if n < 2**20 else 2**19, return_stats=True)
    dx, dw = torch.autograd.grad(loss, [x, w])
    for rows in (slice(0, 4), slice(n - 4, n)):
        z = x[rows].detach().double() @ w.detach().double().T
        p = torch.softmax(z, 1) - F.one_hot(y[rows], v)
        assert relative_error(dx[rows], p @ w.detach().double()) < 1e-2
        assert relative_error(told.lse[rows], z.logsumexp(1)) < 1e-2
    assert dw[-4:].isfinite().all()


# --- planted bugs ---

MUTANTS = {  # what is wrong: (text of the source, what stands in its place)
    "dw forgets the chunks before": ("dz.T, self.counted(x, i), self.begun,", "dz.T, self.counted(x, i), False,"),
    "dw adds to what memory held": ("dz.T, self.counted(x, i), self.begun,", "dz.T, self.counted(x, i), True,"),
    "dx takes the first rows for all": ("put_product(part(self.dx, i), dz, w)", "put_product(self.dx[:len(dz)], dz, w)"),
    "db is the last chunk's": ("part(self.db, first).add_(column_sums", "part(self.db, first).copy_(column_sums"),
    "labels of the first chunk for all": ("part(y_k, i), weight", "y_k[:len(z)], weight"),
    "token weights of the first chunk for all": ("part(t_k, i), total", "t_k[:len(z)], total"),
    "the last chunk is left out": ("for i in tile_slices(len(x), rows):", "for i in tile_slices(len(x), rows)[:-1] or [slice(0, len(x))]:"),
    "the bias is forgotten": ("if b is None: torch.mm", "if True: torch.mm"),
    "one flag decides both gradients": ("self.dw = torch.empty_like(w, dtype=total) if need_w", "self.dw = torch.empty_like(w, dtype=total) if need_x"),
    "the upstream gradient is dropped": ("(g * factors).unbind() if len(factors) else (g, g)", "factors.unbind() if len(factors) else (torch.ones_like(g),) * 2"),
    "backward writes over what it saved": ("keep = keeps_graph()\n        if ctx.buffer", "keep = False\n        if ctx.buffer"),
    "the mean is not divided late": ("new_ones(2) / plain_divisor(total)", "new_ones(2)"),
    "the mean is divided twice": ("if not unscaled_grad: return", "if False: return"),
    "the unit stays": ("part[1:] /= unit", "pass"),
    "the unit is forgotten when dw is rounded": ("if self.last != 1: dw", "if False: dw"),
    "packed rows go back to the front": ("index_copy_(0, order, part)", "index_copy_(0, torch.arange(len(part)), part)"),
    "packed rows are the ignored ones": ("valid.nonzero()", "(~valid).nonzero()"),
    "token weights are not packed": ("pick(token_weight)", "token_weight"),
    "a broken promise is not told": ("valid <= max_valid", "True"),
    "dw is always summed in its own dtype": ("total = torch.float32 if wide else grad_dtype", "total = grad_dtype"),
    "the buffer is added to without g": ("ctx.buffer.addcmul_(dw, gw)", "ctx.buffer.add_(dw)"),
    "the mean is a sum": ("reduction == \"mean\",", "False,"),
    "no chunk, no zeros": ("else self.dw.zero_()", "else self.dw.fill_(1.0)"),
}


CHOSEN_BUGS = few(MUTANTS, "dw forgets the chunks before", "labels of the first chunk for all", "the unit is forgotten when dw is rounded",
                  "packed rows are the ignored ones", "backward writes over what it saved", "the buffer is added to without g")


@pytest.fixture
def variant(tmp_path):
    "The loss of the module with texts replaced"
    return lambda *pairs: planted(chunks, tmp_path, *pairs).chunked_linear_cross_entropy


def twice(call):
    "Backward of a kept graph, then again: the second result"
    def run(x, w, y, **options):
        loss = call(x, w, y, **options)
        wanted = [t for t in (x, w, options["linear_bias"]) if t.requires_grad]
        if wanted: torch.autograd.grad(3 * loss, wanted, retain_graph=True)
        return loss
    return run


def any_fault(call):
    "Whether the cases notice something in `call`"
    given_, options = sample(), dict(weight=True, token_weight=True, label_smoothing=0.1)
    whole, half = sample(ignored=False), sample(2100, 4, 6, dtype=f16, ignored=False)
    home = torch.zeros(17, 5, dtype=f64)
    def with_buffer():
        x, w, b, y = (t.detach().clone() for t in given_)
        (3 * call(x, w.requires_grad_(), y, linear_bias=b, grad_buffer=home)).backward()
        return relative_error(home, truth(*given_, g=3.0)[2]) > 1e-12
    x, w, b, y = sample(512, 4, 20, dtype=bf16, ignored=False)
    return (any(wrong(*given_, needs, call=call, how=dict(chunk_size=3), **options) for needs in SUBSETS)
            or wrong(*whole, call=twice(call), how=dict(chunk_size=4))
            or wrong(*half, call=call, g=4096.0, how=dict(chunk_size=512), tolerance=5e-3)
            or wrong(x, w, b, y, call=call, how=dict(chunk_size=2), tolerance=5e-3, reduction="sum")
            or not broken(lambda: call(*given_[:2], given_[3], max_valid=2), given_[:2])
            or wrong(given_[0], *given_[1:3], torch.full_like(given_[3], -100), call=call)
            or with_buffer())


def test_the_unchanged_source_passes(variant):
    assert not any_fault(variant(*unchanged(MUTANTS.values())))


@pytest.mark.thorough
@pytest.mark.parametrize("bug", CHOSEN_BUGS)
def test_a_planted_bug_is_noticed(bug, variant):
    call = variant(*MUTANTS[bug])
    try:
        assert any_fault(call), "nothing noticed"
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
        pass
