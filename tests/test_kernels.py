"""Cross entropy of logits: every option against float64, in place and not, and a citizen of autograd."""
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st

import fusedloss.clusters as clusters
import fusedloss.kernels as kernels
from fusedloss.clusters import cross_entropy
from fusedloss.core.options import CrossEntropyStats, LossOptions, statistics_of
from fusedloss.core.reference import with_z_loss, z_loss_slope
from fusedloss.kernels import rows_view
from workbook.measure import relative_error, saved_tensors
from grids import FULL, few, grid, thorough_but
from helpers import TOLERANCE, everywhere, has_no_second_derivative, upstream

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
both_ways = pytest.mark.parametrize("inplace", [False, True])


def tanh(x):
    "`torch.tanh`, whose derivative 1 - tanh² loses its digits where tanh is near one; this one's keeps them"
    half = lambda x: (1 - torch.exp(-2 * x)) / (1 + torch.exp(-2 * x))
    return torch.where(x >= 0, half(x.clamp(min=-1)), -half((-x).clamp(min=-1)))


def exact(z, y, weight=None, *, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, softcap=None, z_loss=0.0,
          token_weight=None) -> SimpleNamespace:
    "What a pass over logits [V], [N,V], [N,V,...] should know, in float64 on the CPU, sharing no line with the library"
    z, y = z.cpu().double() * logit_scale, y.cpu().long()
    weight, t = (None if w is None else w.cpu().double() for w in (weight, token_weight))
    if softcap is not None:
        z = softcap * tanh(z / softcap)
    dim, n_classes = min(1, z.dim() - 1), z.shape[min(1, z.dim() - 1)]
    valid = (y != ignore_index) & (y >= 0) & (y < n_classes)
    label, t = torch.where(valid, y, 0), torch.ones(y.shape, dtype=f64) if t is None else t
    lse, z_y = z.logsumexp(dim), z.gather(dim, label.unsqueeze(dim))
    losses = F.cross_entropy(z, label, weight, reduction="none", label_smoothing=label_smoothing)
    blank = torch.where(y == ignore_index, 0.0, torch.nan).double()
    lower = torch.arange(n_classes).view([-1 if d == dim else 1 for d in range(z.dim())]) < label.unsqueeze(dim)
    rank = ((z > z_y) | (z == z_y) & lower).sum(dim)
    known = lambda value, other: torch.where(valid, value, other)
    return SimpleNamespace(
        losses=torch.where(valid, t * (losses + z_loss * lse**2), blank), lse=known(lse, 0.0),
        entropy=known(lse - (z.softmax(dim) * z.clamp(min=-1e6)).sum(dim), 0.0), target_rank=known(rank, -1),
        logit_max=known(z.amax(dim), 0.0), logit_norm=known(z.square().sum(dim).sqrt(), 0.0),
        z_loss=known(t * z_loss * lse**2, 0.0), n_valid=valid.sum(), valid=valid,
        accuracy=(valid & (rank == 0)).sum().double() / max(int(valid.sum()), 1),
        total=(valid * t * (1.0 if weight is None else weight[label])).sum())


def reference(z, y, weight=None, *, reduction="mean", **options):
    "The loss by its definition"
    e = exact(z, y, weight, **options)
    mean = e.losses.sum() / (e.total if e.total else 1.0)
    return {"none": e.losses, "sum": e.losses.sum(), "mean": mean}[reduction]


def differentiate(fn, z, *args, g=None, **options):
    "Loss of a copy of `z` that has the same strides, and the gradient of that copy"
    leaf = z.detach().requires_grad_()
    loss = fn(leaf * 1, *args, **options)
    loss.backward(upstream(loss) if g is None else g.to(loss))
    return loss.detach(), leaf.grad


def near_one(z, logit_scale=1.0) -> float:
    "What is left of a difference of terms that nearly cancel, lse - score or p - 1 of a certain target: roundings of the scores"
    scores = z.double()[z.isfinite()] * logit_scale
    eps = torch.finfo(torch.promote_types(z.dtype, f32)).eps
    return 4 * eps * (1 + (scores.abs().max().item() if scores.numel() else 0.0))


def truth(z, *args, **options):
    "The same of the definition, in float64"
    return differentiate(reference, z.cpu().double(), *args, **options)


def wrong(z, y, weight=None, *, call=cross_entropy, inplace=False, g=None, tolerance=None, **options) -> list[str]:
    "What `call` gets wrong, in words"
    given = [t for t in (z, y, weight, options.get("token_weight")) if t is not None]
    before, versions = [t.detach().clone() for t in given], [t._version for t in given]
    got = differentiate(call, z, y, weight, inplace=inplace, g=g, **options)
    expected = truth(z, y, weight, g=g, **options)
    limits = (TOLERANCE[f64 if z.dtype == f64 else f32], tolerance or TOLERANCE[z.dtype])
    faults = [f"an argument was changed: {list(b.shape)}" for t, b, v in zip(given, before, versions)
              if t._version != v or not torch.equal(t.nan_to_num(), b.nan_to_num())]
    dtypes = (f64 if z.dtype == f64 else f32, z.dtype)
    floor = near_one(z, options.get("logit_scale", 1.0))
    for name, a, b, limit, dtype in zip(("loss", "gradient"), got, expected, limits, dtypes):
        if a.shape != b.shape or a.dtype != dtype:
            faults.append(f"{name} is {a.dtype} {list(a.shape)}")
        elif not (relative_error(a.cpu(), b) <= limit or (a.cpu() - b).abs().max() <= floor):
            faults.append(f"{name} is off by {relative_error(a.cpu(), b):.1e}")
    return faults


def sample(shape, device="cpu", dtype=f32, *, ignore_index=-100, spread=2.0, seed=0):
    "Logits and labels, of which every fourth from the second is ignored"
    generator = torch.Generator().manual_seed(seed)
    z = spread * torch.randn(shape, generator=generator, dtype=f64)
    places, classes = shape[:1] + shape[2:] if len(shape) > 1 else (), shape[min(1, len(shape) - 1)]
    y = torch.randint(classes, places, generator=generator)
    y.view(-1)[1::4] = ignore_index
    return z.to(device, dtype), y.to(device)


def weights(n, device, seed=3):
    "Uneven positive weights, one of them zero"
    w = 0.2 + torch.rand(n, generator=torch.Generator().manual_seed(seed))
    if w.numel() > 2:
        w.view(-1)[2] = 0
    return w.to(device)


def prepared(options, z, y):
    "Arguments and options with their weights made: True stands for a tensor"
    options = dict(options)
    weight = weights(z.shape[min(1, z.dim() - 1)], z.device) if options.pop("weight", False) else None
    if options.pop("token_weight", False):
        options["token_weight"] = weights(y.shape, z.device, 4)
    return (z, y, weight), options


SHAPES = [(1,), (7,), (1, 1), (6, 1), (5, 2), (3, 7), (9, 127), (3, 129), (47, 123), (64, 257), (3, 1000), (2, 5000),
          (5, 7, 6), (2, 129, 4), (2, 10, 3, 2), (0, 7), (2, 7, 0)]
OPTIONS = {
    "plain": {},
    "label_smoothing": dict(label_smoothing=0.1),
    "all smooth": dict(label_smoothing=1.0),
    "logit_scale": dict(logit_scale=0.3),
    "softcap": dict(softcap=3.0),
    "scale and cap": dict(logit_scale=2.5, softcap=5.0),
    "z_loss": dict(z_loss=1e-2),
    "weight": dict(weight=True),
    "token_weight": dict(token_weight=True),
    "smooth weights": dict(weight=True, label_smoothing=0.2),
    "everything": dict(weight=True, token_weight=True, label_smoothing=0.1, logit_scale=1.5, softcap=4.0, z_loss=1e-2),
}
DTYPES, REDUCTIONS = (f64, f32, bf16, f16), ("none", "mean", "sum")


def in_turn(number, kinds):
    "All kinds in a full run, else one of them: each in its turn, so that many cases together meet all"
    return kinds if FULL else [kinds[number % len(kinds)]]


WAYS = list(itertools.product(DTYPES, REDUCTIONS, [False, True]))
SHAPES_AND_OPTIONS = list(itertools.product(SHAPES, OPTIONS))


@pytest.mark.parametrize("number, shape, options", [(i, *case) for i, case in enumerate(SHAPES_AND_OPTIONS)], ids=str)
def test_loss_and_gradient_are_the_definition(number, shape, options, device):
    faults = []
    for dtype, reduction, inplace in in_turn(5 * number, WAYS):
        args, more = prepared(OPTIONS[options], *sample(shape, device, dtype))
        faults += [(dtype, reduction, inplace, f) for f in wrong(*args, reduction=reduction, inplace=inplace, **more)]
    assert faults == []


def test_the_slope_of_the_z_loss_is_its_derivative():
    lse, w_t = torch.tensor([-3.0, 0.0, 40.0], dtype=torch.float64, requires_grad=True), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    o, losses = LossOptions(z_loss=0.1), torch.zeros(3, dtype=torch.float64)
    added = with_z_loss(losses, lse, o, w_t, 4.0)
    torch.testing.assert_close(added, 0.1 * w_t / 4 * lse**2)
    torch.testing.assert_close(torch.autograd.grad(added.sum(), lse)[0], z_loss_slope(lse, o, w_t, 4.0))


def test_without_a_z_loss_an_infinite_lse_changes_nothing():
    losses = torch.ones(2)
    assert with_z_loss(losses, torch.full((2,), torch.inf), LossOptions()) is losses and z_loss_slope(losses, LossOptions()) == 0


@both_ways
@pytest.mark.parametrize("shape", [(140, 1500), (3, 9000), (133, 9001), (2, 70001), (133, 70001)], ids=str)
@pytest.mark.parametrize("options", ["plain", "everything"])
def test_long_rows(shape, options, inplace, device):
    "Sizes at which a GPU takes other blocks, several programs a row, or two launches"
    if device == "cpu" and shape[0] * shape[1] > 2**18:
        pytest.skip("this size differs from the others on a GPU only")
    for dtype in (f32, bf16):
        args, more = prepared(OPTIONS[options], *sample(shape, device, dtype))
        assert wrong(*args, inplace=inplace, reduction="sum", **more) == []


INDICES = {"-100": lambda v: -100, "0": lambda v: 0, "5": lambda v: 5,
           "V-1": lambda v: v - 1, "V": lambda v: v, "V+7": lambda v: v + 7}


@pytest.mark.parametrize("index, classes, weighted", grid(INDICES, [7, 130], [False, True]))
def test_ignore_index_inside_and_outside_the_classes(index, classes, weighted, device):
    index = INDICES[index](classes)
    z, y = sample((13, classes), device, ignore_index=index)
    weight = weights(classes, device) if weighted else None
    for inplace, reduction in itertools.product([False, True], REDUCTIONS):
        assert wrong(z, y, weight, ignore_index=index, reduction=reduction, inplace=inplace, label_smoothing=0.1) == []
    assert not differentiate(cross_entropy, z, y, weight, ignore_index=index)[1][y == index].any()


LAYOUTS = {
    "transposed": lambda z: z.t().contiguous().t(),
    "every second row": lambda z: z.repeat_interleave(2, 0)[::2],
    "every second class": lambda z: z.repeat_interleave(2, 1)[:, ::2],
    "part of a wider tensor": lambda z: F.pad(z, (3, 5), value=torch.nan)[:, 3:-5],
    "rows expanded": lambda z: z[:1].expand_as(z),
    "classes expanded": lambda z: z[:, :1].expand_as(z),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("classes", [9, 1100])
def test_logits_of_any_strides(layout, classes, device):
    z, y = sample((6, classes), device)
    for options in ({}, dict(label_smoothing=0.1), dict(reduction="none")):
        leaf = layout(z).detach().requires_grad_()
        loss = cross_entropy(leaf, y, **options)
        loss.backward(upstream(loss))
        expected = truth(layout(z), y, **options)
        assert relative_error(loss.cpu(), expected[0]) < near_one(z) and relative_error(leaf.grad.cpu(), expected[1]) < near_one(z)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_dimensions_in_memory_in_any_order(order, device):
    z, y = sample((3, 6, 4, 5), device)
    back = [order.index(d) for d in range(4)]
    assert wrong(z.permute(order).contiguous().permute(back), y, reduction="none") == []


def test_sequences_first(device):
    "[T,N,V] logits as a recurrent layer leaves them"
    z, y = sample((4, 9, 5), device)
    assert wrong(z.permute(2, 0, 1).contiguous().permute(1, 2, 0), y, reduction="none") == []


@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 4)])
@both_ways
def test_upstream_gradients_of_any_strides(shape, inplace, device):
    z, y = sample(shape, device)
    g = torch.randn([2 * n for n in y.shape], device=device)
    for g in (g[tuple(slice(None, None, 2) for _ in y.shape)], g[(0,) * y.dim()].expand(y.shape),
              g[tuple(slice(None, n) for n in reversed(y.shape))].permute(*range(y.dim())[::-1])):
        assert wrong(z, y, g=g, reduction="none", inplace=inplace) == []


@both_ways
def test_the_sum_of_losses_has_an_expanded_gradient(inplace, device):
    z, y = sample((7, 5), device)
    sum_of = lambda *args, **options: cross_entropy(*args, reduction="none", inplace=inplace, **options).sum()
    got, expected = differentiate(sum_of, z, y), truth(z, y, reduction="sum")
    assert relative_error(got[1].cpu(), expected[1]) < near_one(z)


LABELS = {
    "unaligned": lambda y: F.pad(y, (1, 1), value=10**6)[1:-1],
    "int32": lambda y: y.int(),
    "int16": lambda y: y.short(),
    "strided": lambda y: y.repeat_interleave(2)[::2],
    "expanded": lambda y: y[:1].expand(len(y)),
    "strided int32": lambda y: y.int().repeat_interleave(3)[::3],
}


@pytest.mark.parametrize("make", LABELS.values(), ids=LABELS)
def test_labels_of_any_kind(make, device):
    z, y = sample((33, 11), device)
    for inplace in (False, True):
        assert wrong(z, make(y), reduction="none", inplace=inplace) == []


def test_labels_of_eight_bits(device):
    z, y = sample((13, 300), device, ignore_index=255)
    assert wrong(z, (y % 256).to(torch.uint8), ignore_index=255) == []


def test_weights_of_any_dtype_and_strides(device):
    z, y = sample((40, 9), device)
    for dtype in DTYPES:
        w, t = (torch.stack([weights(n, device, n)] * 2, 1).to(dtype)[:, 0] for n in (9, 40))
        for inplace, reduction in itertools.product([False, True], REDUCTIONS):
            assert wrong(z, y, w, token_weight=t, reduction=reduction, inplace=inplace) == []


@st.composite
def calls(draw):
    "Any shape, dtype, options and ignored tokens"
    tail = draw(st.lists(st.integers(0, 4), max_size=2))
    shape = (draw(st.integers(0, 12)), draw(st.integers(1, 300)), *tail)
    index = draw(st.sampled_from([-100, 0, shape[1] - 1, shape[1], -1]))
    options = dict(label_smoothing=draw(st.sampled_from([0.0, 0.1, 1.0])), logit_scale=draw(st.floats(0.1, 3)),
                   ignore_index=index, softcap=draw(st.none() | st.floats(0.5, 50)),
                   z_loss=draw(st.sampled_from([0.0, 1e-3])),
                   weight=draw(st.booleans()), token_weight=draw(st.booleans()),
                   reduction=draw(st.sampled_from(REDUCTIONS)), inplace=draw(st.booleans()))
    return shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)), options


@settings(max_examples=60 if FULL else 20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls())
def test_any_call_is_the_definition(device, call):
    shape, dtype, seed, options = call
    z, y = sample(shape, device, dtype, ignore_index=options["ignore_index"], seed=seed)
    args, options = prepared(options, z, y)
    assert wrong(*args, **options, tolerance=2 * TOLERANCE[dtype]) == []


# Autograd


@both_ways
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_twice(inplace, reduction, device):
    z, y = sample((9, 70), device)
    z.requires_grad_()
    loss = 2 * cross_entropy(z * 1, y, reduction=reduction, inplace=inplace).sum()
    first, = torch.autograd.grad(loss, z, retain_graph=True)
    kept = first.clone()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(first, kept) and torch.equal(z.grad, 2 * kept)
    expected = truth(z, y, reduction=reduction, g=torch.full(y.shape if reduction == "none" else (), 2.0))[1]
    assert relative_error(kept.cpu(), expected) < near_one(z)


@both_ways
def test_grad_twice_with_other_upstream_gradients(inplace, device):
    z, y = sample((9, 70), device)
    z.requires_grad_()
    losses = cross_entropy(z * 1, y, reduction="none", inplace=inplace)
    last = -upstream(losses)
    for g in (upstream(losses), torch.randn_like(losses), torch.zeros_like(losses), last):
        got, = torch.autograd.grad(losses, z, g, retain_graph=g is not last)
        expected = truth(z, y, reduction="none", g=g)[1]
        assert (got.cpu() - expected).norm() <= 1e-6 * max(1, expected.norm())
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(losses.sum(), z)


@pytest.mark.parametrize("c, dtype, inplace", grid([0, -3, 1e-4, 65536], DTYPES, [False, True]))
def test_gradient_follows_the_scale_of_the_loss(c, dtype, inplace, device):
    z, y = sample((9, 70), device, dtype)
    got = differentiate(lambda *a, **o: c * cross_entropy(*a, **o), z, y, inplace=inplace, g=torch.ones(()))[1]
    expected = c * truth(z, y, g=torch.ones(()))[1]
    # below fp16's smallest number, 6e-8, there is no digit to be right
    floor = z.numel() ** 0.5 * 6e-8 if dtype == f16 else 0
    assert (got.cpu() - expected).norm() <= TOLERANCE[dtype] * expected.norm() + floor


@both_ways
@pytest.mark.parametrize(
    "expression", [lambda l: l**2, lambda l: l.exp() / (1 + l), lambda l: (l * 1.5).mul_(3).add_(1)])
def test_loss_inside_an_expression(expression, inplace, device):
    z, y = sample((9, 70), device)
    got = differentiate(lambda *a, **o: expression(cross_entropy(*a, **o)), z, y, inplace=inplace)
    expected = differentiate(lambda *a, **o: expression(reference(*a, **o)), z, y)
    assert relative_error(got[0].cpu(), expected[0]) < near_one(z) and relative_error(got[1].cpu(), expected[1]) < 2 * near_one(z)


@both_ways
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_operations_in_place_on_the_loss(reduction, inplace, device):
    z, y = sample((9, 70), device)
    def scaled(fn):
        def call(*args, **options):
            loss = fn(*args, reduction=reduction, **options)
            loss *= -3
            assert isinstance(loss.mean().item(), float)
            return loss
        return call
    got, expected = differentiate(scaled(cross_entropy), z, y, inplace=inplace), differentiate(scaled(reference), z, y)
    assert relative_error(got[0].cpu(), expected[0]) < near_one(z) and relative_error(got[1].cpu(), expected[1]) < 2 * near_one(z)


@pytest.mark.parametrize("dtype, reduction, inplace", grid(DTYPES, REDUCTIONS, [False, True]))
def test_nothing_but_ignored_tokens(dtype, reduction, inplace, device):
    z, y = sample((9, 1100), device, dtype)
    z[3] = torch.nan  # nobody looks
    y.fill_(-100)
    for options in ({}, dict(label_smoothing=0.1, z_loss=0.1, token_weight=weights(9, device))):
        loss, dz = differentiate(cross_entropy, z, y, reduction=reduction, inplace=inplace, **options)
        assert torch.equal(loss, torch.zeros_like(loss)) and torch.equal(dz, torch.zeros_like(dz))


@both_ways
def test_weights_that_are_all_zero(inplace, device):
    z, y = sample((9, 7), device)
    for options in (dict(weight=torch.zeros(7, device=device)), dict(token_weight=torch.zeros(9, device=device))):
        loss, dz = differentiate(cross_entropy, z, y, inplace=inplace, **options)
        assert loss == 0 and not dz.any()


@pytest.mark.parametrize("shape, dtype, inplace", grid([(0, 7), (0, 7, 3), (2, 7, 0), (3, 7, 0, 2)], [f32, f64], [False, True]))
def test_no_tokens(shape, dtype, inplace, device):
    z, y = sample(shape, device, dtype)
    for reduction in REDUCTIONS:
        loss, dz = differentiate(cross_entropy, z, y, reduction=reduction, inplace=inplace)
        assert loss.shape == (y.shape if reduction == "none" else ()) and not loss.any()
        assert dz.shape == z.shape and dz.dtype == dtype
    stats = cross_entropy(z, y, return_stats=True)[1]
    assert stats.lse.shape == y.shape and stats.n_valid == 0 and stats.accuracy == 0


@both_ways
def test_bad_upstream_gradients_stay_in_their_rows(inplace, device):
    z, y = sample((9, 12), device)
    g = torch.ones(9, device=device)
    clean = differentiate(cross_entropy, z, y, g=g, reduction="none", inplace=inplace)[1]
    g[4], g[1] = torch.nan, torch.inf  # the second token is ignored
    dz = differentiate(cross_entropy, z, y, g=g, reduction="none", inplace=inplace)[1]
    assert dz[4].isnan().all()
    assert torch.equal(dz[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_gradcheck(device):
    z, y = sample((5, 6, 2), device, f64)
    z.requires_grad_()
    for number, options in enumerate(few(OPTIONS, "plain", "smooth weights", "everything")):
        args, options = prepared(OPTIONS[options], z, y)
        for reduction in in_turn(number, REDUCTIONS):
            assert torch.autograd.gradcheck(lambda z: cross_entropy(z, *args[1:], reduction=reduction, **options), z)


def test_second_derivatives_are_refused(device):
    z, y = sample((5, 6), device)
    z.requires_grad_()
    for inplace in (False, True):
        for reduction in REDUCTIONS:
            assert has_no_second_derivative(cross_entropy(z * 1, y, inplace=inplace, reduction=reduction).sum(), z)


def test_no_gradient_where_none_is_asked_for(device):
    z, y = sample((5, 6), device)
    assert not cross_entropy(z, y).requires_grad
    with torch.no_grad():
        assert not cross_entropy(z.requires_grad_(), y).requires_grad
    with torch.inference_mode():
        assert cross_entropy(z * 1, y, inplace=True).item() == pytest.approx(reference(z, y).item(), rel=1e-6)


def test_several_losses_of_the_same_logits(device):
    z, y = sample((5, 6), device)
    two = lambda fn: lambda z, y: fn(z, y) + fn(z, (y + 1).clamp(0, 5), label_smoothing=0.3)
    got, expected = (differentiate(two(fn), z, y) for fn in (cross_entropy, reference))
    assert relative_error(got[1].cpu(), expected[1]) < near_one(z)


# Numbers


BAD = [-1, 7, 10, 2**31, 2**40, -2**40, 2**32 + 3]


@pytest.mark.parametrize("label, shape", few(grid(BAD, [(5, 7), (5, 7, 2)]), (-1, (5, 7)), (7, (5, 7, 2)), (2**32 + 3, (5, 7))))
def test_a_label_out_of_range_raises(label, shape, device, monkeypatch):
    if device == "cuda":
        monkeypatch.setenv("FUSEDLOSS_DEBUG", "1")
    z, y = sample(shape, device)
    y[3] = label
    for inplace in (False, True):
        with pytest.raises(IndexError, match=rf"target\[3(, 0)?\] is {label}: expected 0 ≤ label < 7, or -100 "):
            differentiate(cross_entropy, z, y, inplace=inplace)


@both_ways
@pytest.mark.parametrize("label", few(BAD, -1, 7, 2**32 + 3))
def test_a_label_out_of_range_poisons_its_own_token(label, inplace, device, monkeypatch):
    "Without the check, which a GPU leaves out, the operators themselves: NaN for that token, and no gradient"
    everywhere(monkeypatch, clusters, "check_labels", lambda *_: None)
    z, y = sample((5, 7), device)
    options = dict(reduction="none", inplace=inplace, label_smoothing=0.1, weight=weights(7, device))
    losses, dz = differentiate(cross_entropy, z, y, **options)
    y[3] = label
    spoilt, dz_spoilt = differentiate(cross_entropy, z, y, **options)
    assert spoilt[3].isnan() and not dz_spoilt[3].any()
    for a, b in ((spoilt, losses), (dz_spoilt, dz)):
        assert torch.equal(a[[0, 1, 2, 4]], b[[0, 1, 2, 4]])
    stats = cross_entropy(z, y, return_stats=True)[1]
    assert stats.n_valid == 3 and stats.target_rank[3] == -1 and stats.lse[3] == 0 and stats.accuracy <= 1


@pytest.mark.parametrize("classes", few([1, 2, 7, 127, 129, 1000, 50257], 1, 7, 129, 50257))
@pytest.mark.parametrize("offset", [-30.0, -1e4, 2.0**24])
def test_no_probability_above_one(classes, offset, device):
    "Strongly negative logits, one far above the others: a lane beyond the last class would show"
    z = torch.full((4, classes), offset, device=device)
    z[:, classes // 2] += 40
    y = torch.tensor([classes // 2, 0, classes - 1, classes // 3], device=device)
    for inplace in (False, True):
        losses, dz = differentiate(cross_entropy, z, y, reduction="none", inplace=inplace, g=torch.ones(4))
        assert (losses >= 0).all()
        assert (losses.cpu() - reference(z, y, reduction="none")).abs().max() < 1e-5
        assert dz.sum(1).abs().max() < 1e-5


@pytest.mark.parametrize("spread, dtype", [(120.0, f32), (120.0, bf16), (1e4, f32), (1e4, bf16), (2e9, bf16), (1e20, f32)])
def test_targets_far_below_the_maximum(spread, dtype, device):
    z, y = torch.tensor([[spread, 0.0]] * 2, device=device, dtype=dtype), torch.tensor([1, 0], device=device)
    for inplace in (False, True):
        losses, dz = differentiate(cross_entropy, z, y, reduction="none", inplace=inplace, g=torch.ones(2))
        assert losses.tolist() == pytest.approx([z[0, 0].item(), 0.0], rel=1e-6, abs=1e-6)
        assert dz.flatten().tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-6)


def test_bfloat16_gradients_are_scaled_before_they_are_rounded(device):
    z, y = sample((4, 300), device, bf16)
    y[1], g = 5, torch.tensor([0.01, 0.03, 0.1, 0.7], device=device)
    got = differentiate(cross_entropy, z, y, reduction="none", g=g)[1].cpu().double()
    expected = truth(z, y, reduction="none", g=g)[1]
    # one rounding to eight bits is 2⁻⁸ of the value at most, two would be more
    assert ((got - expected).abs() <= (2**-8 + 1e-5) * expected.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_is_not_rounded_to_the_dtype_of_the_logits(dtype, device):
    z, y = sample((100_000, 5), device, dtype)
    loss = cross_entropy(z, y)
    assert loss.dtype == (f64 if dtype == f64 else f32)
    assert abs(loss.item() - reference(z, y).item()) < near_one(z)


@both_ways
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_gradient_of_a_confident_target(dtype, inplace, device):
    "p - 1 of the target, formed before it is rounded"
    z = torch.zeros(3, 11, device=device, dtype=dtype)
    z[:, 4] = torch.tensor(11.5)  # p = 1 - 1e-4
    y = torch.full((3,), 4, device=device)
    g = torch.full((3,), 64.0)  # clear of fp16's subnormal numbers
    got = differentiate(cross_entropy, z, y, reduction="none", inplace=inplace, g=g)[1][:, 4].cpu()
    expected = truth(z, y, reduction="none", g=g)[1][:, 4]
    assert 1e-5 < -expected[0] / 64 < 2e-4
    assert relative_error(got, expected) < TOLERANCE[dtype]


@both_ways
def test_half_precision_mean_over_many_tokens(inplace, device):
    "1/70000 is subnormal in fp16; a loss scale brings it back only if the division comes last"
    z, y = sample((70_000, 5), device, f16)
    scaled = lambda *a, **o: 65536 * cross_entropy(*a, **o)
    got = differentiate(scaled, z, y, inplace=inplace, g=torch.ones(()))[1]
    expected = 65536 * truth(z, y, g=torch.ones(()))[1]
    assert relative_error(got.cpu(), expected) < 1e-3


@both_ways
@pytest.mark.parametrize("classes", [7, 300, 9000])
def test_classes_masked_by_minus_infinity(classes, inplace, device):
    z, _ = sample((4, classes), device)
    y = torch.tensor([1, 1, 1, 0], device=device)
    z[0, 0] = -torch.inf
    z[1, 2:] = -torch.inf
    z[2, :1], z[2, classes // 2:] = -torch.inf, -torch.inf
    assert wrong(z, y, reduction="none", inplace=inplace) == []
    y[0] = 0  # a masked target costs everything, and its own token only
    losses, dz = differentiate(cross_entropy, z, y, reduction="none", inplace=inplace, g=torch.ones(4))
    assert losses[0] == torch.inf and losses[1:].isfinite().all() and dz.isfinite().all()


@pytest.mark.parametrize("bad, classes, inplace", grid([-torch.inf, torch.nan, torch.inf], [7, 1100], [False, True]))
def test_a_row_without_a_softmax_is_nan_and_alone(bad, classes, inplace, device):
    z, y = sample((4, classes), device)
    clean = differentiate(cross_entropy, z, y, reduction="none", inplace=inplace)
    z[2, classes // 2:], z[2, :classes // 2] = bad, bad if bad == -torch.inf else 0.0
    losses, dz = differentiate(cross_entropy, z, y, reduction="none", inplace=inplace)
    assert losses[2].isnan() and dz[2].isnan().any()
    for a, b in zip((losses, dz), clean):
        assert torch.equal(a[[0, 1, 3]], b[[0, 1, 3]])


@both_ways
def test_garbage_in_ignored_rows_is_not_seen(inplace, device):
    z, y = sample((9, 1100), device)
    expected = differentiate(cross_entropy, z, y, inplace=inplace)
    z[y == -100] = torch.nan
    loss, dz = differentiate(cross_entropy, z, y, inplace=inplace)
    assert torch.equal(loss, expected[0]) and torch.equal(dz, expected[1])


@both_ways
@pytest.mark.parametrize("classes", [70, 1100, 9000])
def test_runs_are_equal_bit_for_bit(classes, inplace, device):
    args, options = prepared(OPTIONS["everything"], *sample((19, classes), device))
    runs = [differentiate(cross_entropy, *args, inplace=inplace, **options) for _ in range(5)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


@both_ways
@pytest.mark.parametrize("classes", [70, 1100])
def test_a_token_does_not_depend_on_the_others(classes, inplace, device):
    z, y = sample((9, classes), device)
    losses, dz = differentiate(cross_entropy, z, y, reduction="none", inplace=inplace)
    other, _ = sample((9, classes), device, seed=1)
    other[4] = z[4]
    labels = torch.where(torch.arange(9, device=device) == 4, y, 0)
    changed, dz_changed = differentiate(cross_entropy, other, labels, reduction="none", inplace=inplace)
    assert torch.equal(changed[4], losses[4]) and torch.equal(dz_changed[4], dz[4])
    assert not torch.equal(changed, losses)


# Statistics


STATISTICS = list(itertools.product([(7,), (9, 1), (9, 70), (3, 1100), (5, 7, 6)], OPTIONS))


@pytest.mark.parametrize("number, shape, options", [(i, *case) for i, case in enumerate(STATISTICS)], ids=str)
def test_statistics(number, shape, options, device):
    for dtype, reduction in in_turn(number, ((f64, "mean"), (f32, "none"), (bf16, "sum"))):
        args, more = prepared(OPTIONS[options], *sample(shape, device, dtype))
        loss, stats = cross_entropy(*args, reduction=reduction, return_stats=True, **more)
        e, acc = exact(*args, **more), f64 if dtype == f64 else f32
        assert torch.allclose(loss, cross_entropy(*args, reduction=reduction, **more), rtol=1e-6, atol=1e-6)
        for name in ("lse", "entropy", "logit_max", "logit_norm", "z_loss"):
            got, expected = getattr(stats, name), getattr(e, name)
            assert got.dtype == acc and got.shape == expected.shape, name
            assert (got.cpu() - expected).abs().max() <= TOLERANCE[acc] * expected.abs().max().clamp(min=1), name
        assert torch.equal(stats.target_rank.cpu(), e.target_rank) and stats.target_rank.dtype == torch.int64
        assert stats.n_valid.item() == e.n_valid and stats.n_valid.dtype == torch.int64
        assert stats.accuracy.item() == pytest.approx(e.accuracy.item()) and stats.accuracy.shape == ()


@pytest.mark.parametrize("wanted, options, dtype", grid(
    [("lse",), ("entropy",), ("lse", "entropy"), ("losses", "lse"), ("losses", "entropy", "lse")],
    ["plain", "scale and cap", "everything"], [f64, f32, bf16]), ids=str)
def test_gradients_of_statistics(wanted, options, dtype, device):
    args, options = prepared(OPTIONS[options], *sample((9, 70), device, dtype))
    def mixed(z, *args, **options):
        if z.device.type == "cpu" and z.dtype == f64 and mixed.exact:
            parts = vars(exact(z, *args, **options))
        else:
            losses, stats = cross_entropy(z, *args, reduction="none", return_stats=True, **options)
            parts = dict(stats._asdict(), losses=losses)
        return sum((i + 1.5) * (upstream(parts[name]) * parts[name]).sum() for i, name in enumerate(wanted))
    mixed.exact = False
    got = differentiate(mixed, *args, g=torch.ones(()), **options)[1]
    mixed.exact = True
    expected = differentiate(mixed, args[0].cpu().double(), *args[1:], g=torch.ones(()), **options)[1]
    assert relative_error(got.cpu(), expected) < TOLERANCE[dtype]


def test_gradcheck_of_statistics(device):
    args, options = prepared(OPTIONS["everything"], *sample((4, 6, 2), device, f64))
    def outputs(z):
        loss, stats = cross_entropy(z, *args[1:], return_stats=True, **options)
        return loss, stats.lse, stats.entropy
    assert torch.autograd.gradcheck(outputs, args[0].requires_grad_())


def test_only_lse_and_entropy_have_gradients(device):
    z, y = sample((9, 70), device)
    _, stats = cross_entropy(z.requires_grad_(), y, z_loss=0.1, return_stats=True)
    assert {name for name in CrossEntropyStats._fields if getattr(stats, name).requires_grad} == {"lse", "entropy"}


@pytest.mark.parametrize("classes", [5, 300, 9000])
def test_ties_go_to_the_lower_index(classes, device):
    z = torch.zeros(5, classes, device=device)
    y = torch.tensor([0, 1, classes - 1, -100, 2], device=device)
    z[4, 2] = 1
    _, stats = cross_entropy(z, y, return_stats=True)
    assert stats.target_rank.tolist() == [0, 1, classes - 1, -1, 0]
    assert stats.accuracy.item() == 0.5 and stats.n_valid.item() == 4  # the ignored token is no failure


def test_statistics_where_nothing_is_valid(device):
    z, y = sample((3, 7), device)
    loss, stats = cross_entropy(z, y.fill_(-100), z_loss=1.0, return_stats=True)
    zeros = [0.0] * 3
    assert [t.tolist() for t in (loss, *stats)] == [0.0, zeros, zeros, 0.0, [-1] * 3, zeros, zeros, zeros, 0]


@pytest.mark.parametrize("mask", [-torch.inf, torch.finfo(f32).min])
def test_statistics_of_masked_classes(mask, device):
    z, y = sample((3, 70), device)
    y[1] = 60
    z[:, :50], y = mask, y % 20 + 50
    _, stats = cross_entropy(z, y, return_stats=True)
    e = exact(z, y)
    for name in ("lse", "entropy", "logit_max"):
        assert (getattr(stats, name).cpu() - getattr(e, name)).abs().max() < 1e-5, name
    z.requires_grad_()
    dz, = torch.autograd.grad(cross_entropy(z, y, return_stats=True)[1].entropy.sum(), z)
    assert dz.isfinite().all() and not dz[:, :50].any() and dz[:, 50:].any()


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan])
def test_a_row_without_a_softmax_is_not_right(bad, device):
    z, y = sample((3, 7), device)
    z[0], z[2, 3] = bad, torch.nan
    _, stats = cross_entropy(z, y.fill_(0), return_stats=True)
    assert stats.lse[[0, 2]].isfinite().logical_not().all() and stats.entropy[[0, 2]].isnan().all()
    assert stats.accuracy.item() == pytest.approx((z[1].argmax() == 0).item() / 3)


def test_statistics_keep_the_dtype_of_the_loss(device):
    z, y = sample((9, 7), device)
    _, stats = cross_entropy(z, y, z_loss=0.1, token_weight=weights(9, device).double(), return_stats=True)
    assert stats.z_loss.dtype == f32


# In place


@pytest.mark.parametrize("shape", [(7,), (9, 70), (3, 1100), (5, 7, 6), (2, 10, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_takes_the_place_of_the_logits(shape, dtype, device):
    z, y = sample(shape, device, dtype)
    leaf = z.clone().requires_grad_()
    logits, seen = leaf * 1, []
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    version = logits._version
    loss = cross_entropy(logits, y, inplace=True)
    assert logits._version > version
    assert not torch.equal(logits, z)
    loss.backward()
    assert seen == [logits.data_ptr()]
    assert torch.equal(logits, leaf.grad)
    assert relative_error(leaf.grad.cpu(), truth(z, y, g=torch.ones(()))[1]) < TOLERANCE[dtype]


def test_an_operation_that_saved_the_logits_complains(device):
    z, y = sample((9, 7), device)
    logits = torch.tanh(z.requires_grad_())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(logits, y, inplace=True).backward()


def test_a_change_of_the_logits_after_the_loss_is_noticed(device):
    z, y = sample((9, 7), device)
    logits = z.requires_grad_() * 1
    loss = cross_entropy(logits, y, inplace=True)
    with torch.no_grad():
        logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


LEAVES = {
    "leaf": lambda z: z.requires_grad_(),
    "view": lambda z: z.requires_grad_().view(9, 7),
    "slice": lambda z: z.requires_grad_()[:5],
    "view of a view": lambda z: z.requires_grad_().t()[:, :4].t(),
    "leaf that is a slice": lambda z: z[:5].requires_grad_(),
}


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES)
def test_leaves_and_their_views_are_not_overwritten(make, device):
    z, y = sample((9, 7), device)
    kept, view = z.clone(), make(z)
    with pytest.raises(ValueError, match="inplace: expected .*, got a.* leaf"):
        cross_entropy(view, y[:len(view)], inplace=True)
    assert torch.equal(z, kept)


def test_logits_that_share_memory_are_not_overwritten(device):
    z, y = sample((9, 7), device)
    z.requires_grad_()
    for shared in ((z[:1] * 1).expand(9, 7), (z[:, :1] * 1).expand(9, 7)):
        with pytest.raises(ValueError, match="inplace: expected logits of their own memory.*got strides"):
            cross_entropy(shared, y, inplace=True)
    twisted = (torch.randn(2, 5, 4, 3, device=device, requires_grad=True) * 1).transpose(2, 3)
    with pytest.raises(ValueError, match="inplace: expected .*strides can describe"):
        cross_entropy(twisted, torch.zeros(2, 3, 4, dtype=torch.long, device=device), inplace=True)


@pytest.mark.parametrize("wanted", [False, True])
def test_without_gradients_the_logits_stay(wanted, device):
    z, y = sample((9, 7), device)
    kept, version = z.clone(), z._version
    with torch.set_grad_enabled(not wanted):
        cross_entropy(z.requires_grad_(wanted), y, inplace=True)
    assert torch.equal(z, kept) and z._version == version


def test_in_place_there_are_no_statistics(device):
    z, y = sample((9, 7), device)
    with pytest.raises(ValueError, match="inplace: expected no statistics.*got return_stats=True"):
        cross_entropy(z.requires_grad_() * 1, y, inplace=True, return_stats=True)


STRIDED = {
    "transposed": lambda z: (z.t() * 1).contiguous().t(),
    "part of a wider tensor": lambda z: F.pad(z, (3, 5), value=torch.nan)[:, 3:-5],
    "every second class": lambda z: z.repeat_interleave(2, 1)[:, ::2],
    "classes inside": lambda z: (z.view(3, 3, -1) * 1).transpose(1, 2),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("classes", [8, 1100])
def test_strided_logits_in_place(make, classes, device):
    "What lies between the rows stays, and so does the gradient's way through the view"
    z, y = sample((9, classes), device)
    for g in (1.0, -2.5):
        dz = []
        for fn, options in ((cross_entropy, dict(inplace=True)), (reference, {})):
            leaf = z.detach().clone().requires_grad_()
            logits = make(leaf)
            target = y if logits.dim() == 2 else y.view(3, 3)
            base = logits._base if logits._base is not None else logits
            around = base.isnan().sum()
            (g * fn(logits, target, **options)).backward()
            assert base.isnan().sum() == around
            dz.append(leaf.grad.cpu())
        assert relative_error(*dz) < 2 * near_one(z)


# Memory


SAVED = {"plain": lambda z: z, "[N,V,L]": lambda z: z.view(8, 10, -1).transpose(1, 2), "wider": lambda z: z[:, :-3]}


@pytest.mark.parametrize("make", SAVED.values(), ids=SAVED)
@both_ways
def test_nothing_of_the_size_of_the_logits_is_saved(make, inplace, device):
    z, _ = sample((80, 500), device)
    logits = make(z.requires_grad_() * 1)
    y = torch.zeros(logits.shape[:1] + logits.shape[2:], dtype=torch.long, device=device)
    args, options = prepared(OPTIONS["everything"], logits, y)
    saved = saved_tensors(lambda: cross_entropy(*args, inplace=inplace, **options), logits)
    assert all(t.numel() <= 500 for t in saved), [list(t.shape) for t in saved]
    if not inplace:
        saved = saved_tensors(lambda: cross_entropy(*args, return_stats=True, **options), logits)
        assert all(t.numel() <= 500 for t in saved), [list(t.shape) for t in saved]


@cuda_only
@pytest.mark.big
@both_ways
@pytest.mark.parametrize("shape", [(2048, 32000), (64, 128000), (4, 32000, 128), (40000, 1000)], ids=str)
def test_peak_memory(shape, inplace):
    "Beside the logits: their gradient, or in place nothing"
    z, y = sample(shape, "cuda", bf16)
    logits = z.requires_grad_() * 1
    size = logits.nbytes
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(cross_entropy(logits, y, inplace=inplace), logits)
    assert torch.cuda.max_memory_allocated() - before < (0.03 if inplace else 1.05) * size


# Arguments


Z, Y = torch.zeros(3, 5), torch.zeros(3, dtype=torch.long)
BAD_ARGUMENTS = {
    "input is a list": (([1.0], Y), {}, r"input: expected a tensor, got list"),
    "input is a number": ((torch.tensor(1.0), Y), {}, r"input: expected .*got torch.float32 \[\]"),
    "input of integers": ((Y, Y), {}, r"input: expected .*got torch.int64 \[3\]"),
    "input of complex numbers": ((Z.to(torch.complex64), Y), {}, r"input: expected .*got torch.complex64"),
    "no classes": ((torch.zeros(3, 0), Y), {}, r"input: expected .* with at least one class, got torch.float32 \[3, 0\]"),
    "target is a list": ((Z, [0, 0, 0]), {}, r"target: expected a tensor, got list"),
    "target is too long": ((Z, torch.zeros(4, dtype=torch.long)), {}, r"target: expected shape \[3\].*got \[4\]"),
    "target is a column": ((Z, Y[:, None]), {}, r"target: expected shape \[3\].*got \[3, 1\]"),
    "classes last": ((torch.zeros(3, 4, 5), torch.zeros(3, 4, dtype=torch.long)), {},
                     r"target: expected shape \[3, 5\], got \[3, 4\]"),
    "target of floats": ((Z, Y.float()), {}, r"target: expected an integer dtype, got torch.float32"),
    "target of booleans": ((Z, Y.bool()), {}, r"target: expected an integer dtype, got torch.bool"),
    "target on another device": ((Z, Y.to("meta")), {}, r"target: expected the input's device cpu, got meta"),
    "reduction": ((Z, Y), dict(reduction="avg"), r"reduction: expected 'none', 'mean' or 'sum', got 'avg'"),
    "ignore_index": ((Z, Y), dict(ignore_index=1.5), r"ignore_index: expected an integer, got 1.5"),
    "label_smoothing below": (
        (Z, Y), dict(label_smoothing=-0.1), r"label_smoothing: expected a number from 0 to 1, got -0.1"),
    "label_smoothing above": ((Z, Y), dict(label_smoothing=1.1), r"label_smoothing: expected .*got 1.1"),
    "label_smoothing is NaN": ((Z, Y), dict(label_smoothing=float("nan")), r"label_smoothing: expected .*got nan"),
    "logit_scale is zero": ((Z, Y), dict(logit_scale=0), r"logit_scale: expected a positive number, got 0"),
    "logit_scale is a tensor": (
        (Z, Y), dict(logit_scale=torch.ones(1)), r"logit_scale: expected a number or a 0-dim tensor, got shape \[1\]"),
    "logit_scale is infinite": ((Z, Y), dict(logit_scale=float("inf")), r"logit_scale: expected .*got inf"),
    "logit_scale is None": ((Z, Y), dict(logit_scale=None), r"logit_scale: expected .*got None"),
    "softcap is zero": ((Z, Y), dict(softcap=0.0), r"softcap: expected a positive number or None, got 0.0"),
    "softcap is negative": ((Z, Y), dict(softcap=-1), r"softcap: expected .*got -1"),
    "z_loss is negative": ((Z, Y), dict(z_loss=-1e-4), r"z_loss: expected a number not below 0, got -0.0001"),
    "z_loss is a boolean": ((Z, Y), dict(z_loss=True), r"z_loss: expected .*got True"),
    "weight is short": ((Z, Y, torch.ones(3)), {}, r"weight: expected floats of shape \[5\], got .*\[3\]"),
    "weight of integers": ((Z, Y, torch.ones(5, dtype=torch.long)), {}, r"weight: expected floats"),
    "weight is a list": ((Z, Y, [1.0] * 5), {}, r"weight: expected a tensor or None, got list"),
    "weight on another device": (
        (Z, Y, torch.ones(5, device="meta")), {}, r"weight: expected the input's device cpu, got meta"),
    "weight wants a gradient": (
        (Z, Y, torch.ones(5, requires_grad=True)), {},
        r"weight: expected a tensor without gradient, got requires_grad"),
    "token_weight is short": (
        (Z, Y), dict(token_weight=torch.ones(2)), r"token_weight: expected floats of shape \[3\], got .*\[2\]"),
    "token_weight wants a gradient": (
        (Z, Y), dict(token_weight=torch.ones(3, requires_grad=True)), r"token_weight: expected a tensor without"),
    "token_weight on another device": (
        (Z, Y), dict(token_weight=torch.ones(3, device="meta")), r"token_weight: expected the input's device cpu"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments(case):
    args, options, message = case
    with pytest.raises(ValueError, match=message):
        cross_entropy(*args, **options)


def test_the_scalar_target_of_a_vector_of_logits():
    with pytest.raises(ValueError, match=r"target: expected shape \[\].*got \[1\]"):
        cross_entropy(torch.zeros(5), torch.zeros(1, dtype=torch.long))


# torch.compile, operators, threads, devices


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILED = {"plain": {}, "inplace": dict(inplace=True), "everything": OPTIONS["everything"]}


@pytest.mark.parametrize("name", thorough_but(few(COMPILED, "inplace", "everything"), "everything"))
def test_compiled_without_a_graph_break(name, device, fresh_compiler):
    "Also for more tokens than at first, without compiling again for each count; logits stay as they are"
    doubled = lambda z, *args, **options: cross_entropy(z * 2, *args, **options)
    compiled = torch.compile(doubled, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 8, 11, 14):
        args, more = prepared(COMPILED[name], *sample((n, 9), device))
        got, eager = (differentiate(fn, *args, **more) for fn in (compiled, doubled))
        assert all(relative_error(a, b.double()) < near_one(args[0]) for a, b in zip(got, eager))
    torch._dynamo.reset()
    logits = args[0].clone().requires_grad_() * 1
    before = logits.clone()
    torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")(logits, *args[1:], **more).backward()
    assert torch.equal(logits, before)


def test_compiled_statistics(device, fresh_compiler):
    args, options = prepared(OPTIONS["everything"], *sample((4, 9, 3), device))
    def penalised(z, *args, **options):
        loss, stats = cross_entropy(z, *args, return_stats=True, **options)
        return loss + 0.1 * stats.entropy.mean() + stats.lse.mean()
    got = differentiate(torch.compile(penalised, fullgraph=True, backend="aot_eager"), *args, **options)
    assert all(relative_error(a, b.double()) < near_one(args[0]) for a, b in zip(got, differentiate(penalised, *args, **options)))


def operator_arguments(layout, stats, device, n=4, dtype=f32):
    z, y = sample((n, 9, 3), device, dtype)
    rows = rows_view(z.transpose(1, 2).contiguous().transpose(1, 2) if layout == "rows" else z)
    y = y.reshape(-1)
    tensors = rows, y, weights(9, device), weights(len(y), device), torch.tensor(3.7, device=device)
    return *tensors, LossOptions(-100, 0.1, 1.5, 4.0, 1e-2), statistics_of(stats), None


OPERATORS = grid(["rows", "classes inside"], [False, True])


@pytest.mark.parametrize("layout, stats", few(OPERATORS, ("rows", True), ("classes inside", False)))
def test_operators_by_opcheck(layout, stats, device):
    args = operator_arguments(layout, stats, device)
    flat = lambda op, *args: op.arguments.flat(args)
    torch.library.opcheck(kernels.logits_loss, flat(kernels.logits_loss, args[0].requires_grad_(), *args[1:]))
    _, lse, entropy, rows = kernels.logits_loss(*args)
    g = upstream(lse)
    upstreams = (g, 2 * g, 3 * g) if stats else (g, None, None)
    tensors = (*args[:5], rows, entropy)
    grads = flat(kernels.logits_loss_grad, *upstreams, *(t.detach() for t in tensors), args[5], None)
    torch.library.opcheck(kernels.logits_loss_grad, grads)


@pytest.mark.parametrize("stats, layout, n, dtype", grid([False, True], ["rows", "classes inside"], [0, 4], [f64, bf16]))
def test_fake_results_have_the_shapes_of_real_ones(stats, layout, n, dtype, device):
    from torch._subclasses.fake_tensor import FakeTensorMode
    args = operator_arguments(layout, stats, device, n, dtype)
    def results(args):
        out = kernels.logits_loss(*args)
        dz = kernels.logits_loss_grad(out[0], None, None, *args[:5], out[3], out[2], args[5])
        return [(t.shape, t.stride() if t.numel() else None, t.dtype, t.device) for t in (*out, dz)]
    with FakeTensorMode() as mode:
        fake = results([mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args])
    assert fake == results(args)


def test_threads_do_not_meet(device):
    step = lambda i: differentiate(cross_entropy, *sample((9, 70), device, seed=i), inplace=i % 2 == 1)
    expected, got = [step(i) for i in range(4)], [None] * 4
    def work(i):
        for _ in range(5):
            got[i] = step(i)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    for a, b in zip(got, expected):
        assert torch.allclose(a[0], b[0], rtol=1e-6) and torch.allclose(a[1], b[1], rtol=1e-5, atol=1e-8)


@cuda_only
@both_ways
def test_no_host_synchronisation(inplace):
    args, options = prepared(OPTIONS["everything"], *sample((140, 9000), "cuda", bf16))
    g = torch.ones((), device="cuda")
    def run():
        differentiate(cross_entropy, *args, inplace=inplace, g=g, **options)
        cross_entropy(*args, return_stats=not inplace, **options)
    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@cuda_only
@both_ways
@pytest.mark.parametrize("shape", [(9, 70), (3, 20000), (140, 9000)], ids=str)
def test_graph_capture(shape, inplace):
    args, options = prepared(OPTIONS["everything"], *sample(shape, "cuda"))
    leaf, stream = args[0].requires_grad_(), torch.cuda.Stream()
    def step():
        loss = cross_entropy(leaf * 1, *args[1:], inplace=inplace, **options)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]
    with torch.cuda.stream(stream):
        for _ in range(2): step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for seed in (1, 2):
        z, y = sample(shape, "cuda", seed=seed)
        with torch.no_grad():
            leaf.copy_(z), args[1].copy_(y)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, step()))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@both_ways
def test_tensors_on_a_device_that_is_not_the_current(inplace):
    with torch.cuda.device(0):
        for shape in ((9, 70), (140, 9000)):
            z, y = sample(shape, "cuda:1")
            assert wrong(z, y, inplace=inplace) == []


@cuda_only
@both_ways
def test_a_stream_of_ones_own(inplace):
    z, y = sample((140, 20000), "cuda")
    expected = differentiate(cross_entropy, z, y, inplace=inplace)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(z)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(z)
        got = differentiate(cross_entropy, late, y, inplace=inplace)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


@cuda_only
@pytest.mark.big
@both_ways
def test_more_than_two_to_the_31_logits(inplace):
    "Offsets of 64 bits: the first and last rows of 4.3 GB of bfloat16, and as much again for the gradient"
    n, v, ends = 16896, 128256, [0, 1, -2, -1]
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of GPU memory")
    shift = torch.zeros(v, device="cuda", dtype=bf16, requires_grad=True)
    logits, seen = torch.randn(n, v, device="cuda", dtype=bf16) + shift, []
    logits.register_hook(lambda dz: seen.append(dz[ends].clone()))
    y = torch.randint(v, (n,), device="cuda")
    y[-1] = v - 1
    expected = truth(logits.detach()[ends], y[ends], reduction="none", g=torch.ones(4))
    losses = cross_entropy(logits, y, reduction="none", inplace=inplace)
    losses.backward(torch.ones_like(losses))
    assert relative_error(losses.detach()[ends].cpu(), expected[0]) < 1e-5
    assert relative_error(seen[0].cpu(), expected[1]) < TOLERANCE[bf16]


# --- probabilities as targets ---

SOFT = {"plain": {}, "smoothed": dict(label_smoothing=0.2), "weights": dict(weight=True), "all of torch's": dict(label_smoothing=0.1, weight=True),
        "capped": dict(softcap=3.0, logit_scale=0.5), "z-loss": dict(z_loss=0.1, token_weight=True), "token weights": dict(token_weight=True, weight=True)}


def soft_exact(z, t, weight=None, *, reduction="mean", label_smoothing=0.0, logit_scale=1.0, softcap=None, z_loss=0.0, token_weight=None):
    "PyTorch's loss of each token, and what we add to it"
    z = z * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    losses = F.cross_entropy(z, t, weight, reduction="none", label_smoothing=label_smoothing) + z_loss * z.logsumexp(min(1, z.dim() - 1)) ** 2
    weights = torch.ones_like(losses) if token_weight is None else token_weight
    losses = losses * weights
    return losses if reduction == "none" else losses.sum() / (1 if reduction == "sum" else weights.sum())


def soft_sample(shape, how):
    "Logits, probabilities, and options, in float64"
    made, options = torch.Generator().manual_seed(0), dict(SOFT[how])
    z, t = (2 * torch.randn(shape, generator=made, dtype=f64) for _ in range(2))
    if options.pop("weight", False): options["weight"] = torch.rand(shape[min(1, len(shape) - 1)], generator=made, dtype=f64)
    if options.get("token_weight"): options["token_weight"] = torch.linspace(-1, 2, z.select(min(1, z.dim() - 1), 0).numel(), dtype=f64).view(
        z.select(min(1, z.dim() - 1), 0).shape)
    return z, t.softmax(min(1, len(shape) - 1)), options


@pytest.mark.parametrize("shape, how, reduction", grid([(7, 11), (3, 11, 4), (11,), (2, 3, 2, 2)], SOFT, ("none", "mean", "sum")))
def test_probabilities(shape, how, reduction, device):
    z, t, options = soft_sample(shape, how)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    z, t = z.to(device).requires_grad_(), t.to(device)
    for dtype, limit in ((f64, 1e-9), (f32, 1e-4)):
        leaf = z.detach().to(dtype).requires_grad_()
        got, expected = cross_entropy(leaf, t.to(dtype), reduction=reduction, **moved), soft_exact(z, t, reduction=reduction, **moved)
        g = torch.linspace(-1, 2, max(got.numel(), 1), device=device).view(got.shape)
        assert got.shape == expected.shape and got.dtype == dtype and relative_error(got.detach().cpu(), expected.detach().cpu()) < limit
        grads = torch.autograd.grad(got, leaf, g.to(got))[0], torch.autograd.grad(expected, z, g.to(expected))[0]
        assert relative_error(grads[0].cpu(), grads[1].cpu()) < limit
    if not set(options) - {"weight", "label_smoothing"}:
        torch.testing.assert_close(cross_entropy(z, t, reduction=reduction, **moved), F.cross_entropy(z, t, reduction=reduction, **moved))


def test_probabilities_of_masked_classes():
    "A class that no one expects may be -inf; one that is expected has an infinite loss, and a finite gradient"
    z, t = torch.randn(2, 9, dtype=f64) * 1e4, torch.zeros(2, 9, dtype=f64)
    z[:, 3], t[0, 1], t[1, 3] = -torch.inf, 1, 1
    leaf = z.clone().requires_grad_()
    losses = cross_entropy(leaf, t, reduction="none")
    losses.sum().backward()
    assert losses.isfinite().tolist() == [True, False] and leaf.grad.isfinite().all()
    torch.testing.assert_close(losses[0], F.cross_entropy(z[0], torch.tensor(1)))


def test_probabilities_in_operators_and_second_derivatives():
    z, t = torch.randn(5, 7, requires_grad=True), torch.rand(5, 7)
    call = lambda z: cross_entropy(z, t, label_smoothing=0.1)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(z), z), torch.autograd.grad(call(z), z))
    torch.testing.assert_close(torch.func.grad(call)(z.detach()), torch.autograd.grad(call(z), z)[0])
    assert has_no_second_derivative(call(z), z)


SOFT_REFUSED = {
    "a gradient": (dict(target=torch.rand(5, 7, requires_grad=True)), "target: expected probabilities without gradient"),
    "in place": (dict(inplace=True), "target: expected integers beside inplace or return_stats, got probabilities"),
    "statistics": (dict(return_stats=True), "target: expected integers beside inplace or return_stats, got probabilities"),
    "an ignored class": (dict(ignore_index=2), "ignore_index: expected a negative number beside probabilities"),
    "weights of all": (dict(token_weight=torch.ones(5, 7)), r"token_weight: expected floats of shape \[5\]"),
    "another shape": (dict(target=torch.rand(5, 6)), r"target: expected shape \[5\], got \[5, 6\]"),
}


@pytest.mark.parametrize("given, words", SOFT_REFUSED.values(), ids=SOFT_REFUSED)
def test_probabilities_that_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        cross_entropy(**{"input": torch.randn(5, 7), "target": torch.rand(5, 7)} | given)
