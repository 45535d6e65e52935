"""The tiled loss: the same numbers with one tile of scores in memory, and a citizen of autograd."""
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from fusedloss.baseline import Sample, baseline_linear_cross_entropy, sample_data
from fusedloss.tiles import MemoryEfficientVocabOutput, remove_radial, square_tile, tiled_linear_cross_entropy, tiled_lse, tiled_lse_grad
from fusedloss.core.products import tile_slices, grad_scale_of
from workbook.measure import peak_memory, relative_error, saved_tensors
from grids import FULL, grid, thorough_but
from helpers import CASES, TOLERANCE, Case, faults, gradients, has_no_second_derivative, off, reference, roundings, upstream

small = partial(tiled_linear_cross_entropy, token_tile=3, class_tile=4)


def leaves(sample):
    "The same data as new leaves"
    return Sample(*(t.detach().clone().requires_grad_() for t in sample[:2]), sample.target)


def exactly(got, expected):
    "Whether two tuples of tensors are equal bit for bit"
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def assert_near(got, expected, tolerance=1e-12):
    "Every tensor within `tolerance` of its counterpart, relative to its norm"
    errors = [relative_error(a, b) for a, b in zip(got, expected, strict=True)]
    assert all(e <= tolerance for e in errors), errors


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tiles_are_the_definition(case, device):
    assert faults(tiled_linear_cross_entropy, case, device) == []


@st.composite
def calls(draw):
    "Any sizes, tiles, dtype, options and wanted gradients, with any of the tokens ignored"
    n, v = draw(st.integers(0, 20)), draw(st.integers(1, 40))
    ignore_index = draw(st.sampled_from([-100, -1, 0, v - 1, v, 2 * v]))
    options = dict(reduction=draw(st.sampled_from(["none", "mean", "sum"])), ignore_index=ignore_index,
                   scale=draw(st.none() | st.floats(0.1, 64)), margin=draw(st.floats(-1, 1)))
    return Case((n, draw(st.integers(1, 9)), v), draw(st.tuples(st.integers(1, 25), st.integers(1, 45))), options,
                draw(st.sampled_from(list(TOLERANCE))), draw(st.sampled_from([torch.int64, torch.int32, torch.int16])),
                tuple(draw(st.sets(st.integers(0, n - 1)))) if n else (), requires=draw(st.tuples(st.booleans(), st.booleans())))


@settings(max_examples=60 if FULL else 20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls())
def test_any_call_agrees_with_the_baseline_in_float64(device, case):
    s = case.sample(device)
    exact = Sample(*(t.detach().double().requires_grad_(t.requires_grad) for t in s[:2]), s.target)
    tiles = dict(zip(("token_tile", "class_tile"), case.tiles))
    expected = gradients(baseline_linear_cross_entropy, exact, **case.options)
    # beside the result's own size, the size of what may cancel in it: upstream (n at most) times scale
    floor = (1 + case.sizes[0]) * max(1.0, case.options["scale"] or 0.0)
    for got, ref in zip(gradients(tiled_linear_cross_entropy, s, **case.options, **tiles), expected):
        assert (got is None) == (ref is None)
        if got is not None:
            assert got.shape == ref.shape
            assert (got.double() - ref).norm() <= TOLERANCE[case.dtype] * (ref.norm() + 0.1 * floor)


@pytest.mark.parametrize("scale", [None, 8.0])
def test_result_does_not_depend_on_the_tiles(scale, device):
    s = Case((23, 4, 37)).sample(device)
    whole = gradients(tiled_linear_cross_entropy, s, scale=scale, reduction="none")
    for tiles in [(1, 1), (1, 37), (23, 1), (2, 3), (7, 13), (22, 36), (23, 37), (99, 99)]:
        tiles = dict(zip(("token_tile", "class_tile"), tiles))
        assert_near(gradients(tiled_linear_cross_entropy, s, scale=scale, reduction="none", **tiles), whole)


@pytest.mark.parametrize("scale", [None, 8.0])
def test_a_token_does_not_depend_on_the_others(scale, device):
    s = Case((9, 4, 12)).sample(device)
    x = sample_data(9, 4, 12, torch.float64, device, seed=1, requires_grad=False).input
    x[4] = s.input[4].detach()
    (loss, dx, _), (changed, dx_changed, _) = (gradients(small, Sample(t.requires_grad_(), *s[1:]), reduction="none", scale=scale) for t in (s.input, x))
    assert_near((changed[4], dx_changed[4]), (loss[4], dx[4]))
    assert (changed != loss).sum() == 8


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_upstream_gradient_spoils_its_own_token_alone(bad, device):
    s, g = Case((9, 4, 12)).sample(device), torch.ones(9, dtype=torch.float64, device=device)
    exact = gradients(small, s, g, reduction="none")[1]
    g[4] = bad
    dx = gradients(small, s, g, reduction="none")[1]
    others = torch.arange(9, device=device) != 4
    assert not dx[4].isfinite().any()
    assert_near((dx[others],), (exact[others],))


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_are_equal_bit_for_bit(dtype, scale, device):
    s = sample_data(50, 16, 130, dtype, device)
    runs = [gradients(tiled_linear_cross_entropy, s, scale=scale, token_tile=16, class_tile=32) for _ in range(3)]
    assert exactly(runs[0], runs[1]) and exactly(runs[0], runs[2])


@pytest.mark.parametrize("spread", [120.0, 1e4])
@pytest.mark.parametrize("label", [0, 1])
def test_scores_far_below_the_maximum_keep_their_loss(spread, label, device):
    x = torch.tensor([[spread, 0.0]], device=device, requires_grad=True)
    s = Sample(x, torch.eye(2, device=device, requires_grad=True), torch.tensor([label], device=device))
    loss, dx, dw = gradients(tiled_linear_cross_entropy, s, torch.ones((), device=device), class_tile=1)
    sign = float(label)  # softmax is one-hot to the last bit
    assert loss == spread * label
    assert torch.equal(dx, torch.tensor([[sign, -sign]], device=device))
    assert torch.equal(dw, sign * torch.tensor([[spread, 0.0], [-spread, 0.0]], device=device))


@pytest.mark.parametrize("spread", [120.0, 1e4])
def test_random_scores_of_any_spread_match_float64(spread, device):
    x, w, y = sample_data(47, 8, 123, torch.float32, device, requires_grad=False)
    s = Sample((x * spread).requires_grad_(), w.requires_grad_(), y)
    floors = roundings(*s[:2])  # a score's rounding, 6e-8 of its terms, is a relative error of its probability
    for name, got, exact in zip(("loss", "dx", "dw"), gradients(small, s), gradients(reference, s)):
        assert off(name, got, exact, 2e-6, floors[name]) == []


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_lmcl_does_not_see_the_length_of_its_inputs(size, device):
    x, w, y = sample_data(9, 4, 12, torch.float32, device, requires_grad=False)
    exact = gradients(reference, Sample(x.double().requires_grad_(), w.double().requires_grad_(), y), scale=16.0)
    got = gradients(small, Sample((x * size).requires_grad_(), (w * size).requires_grad_(), y), scale=16.0)
    assert_near((got[0], got[1] * size, got[2] * size), exact, 2e-6)


def test_gradient_of_a_zero_vector_is_bounded(device):
    s = Case(zeros=True, options=dict(scale=64.0)).sample(device)
    loss, dx, dw = gradients(small, s, scale=64.0, reduction="sum")
    assert loss.isfinite() and dx.isfinite().all() and dw.isfinite().all()
    assert dx[0].norm() <= 1.7 * 2 * 64  # |upstream| · Σ|dz| · scale, class weights of length one
    assert dw[-1].norm() <= 1.7 * 7 * 64


@pytest.mark.parametrize("factor", [0.0, -3.0, 1e-4, 65536.0, 1e-30, 1e30])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_gradients_scale_with_the_upstream(scale, factor, device):
    s = sample_data(9, 4, 12, torch.float32, device)
    _, dx, dw = gradients(small, s, torch.ones((), device=device), scale=scale)
    _, fx, fw = gradients(small, s, torch.full((), factor, device=device), scale=scale)
    assert_near((fx.double(), fw.double()), (factor * dx.double(), factor * dw.double()), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_uneven_upstream_survives_half_precision(dtype, device):
    s = sample_data(16, 32, 200, dtype, device)
    g = torch.tensor([1e-3, -0.03, 0.7, 4.0], device=device).repeat(4)
    got, exact = (gradients(f, s, g, reduction="none")[1] for f in (small, reference))
    assert_near(got.unbind(), exact.unbind(), 1e-2)  # row by row: 8 bits


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_near_as_the_baseline(dtype, scale, device):
    s = sample_data(128, 64, 500, dtype, device)
    exact = gradients(reference, s, scale=scale)
    tiled, baseline = (gradients(f, s, scale=scale) for f in (partial(tiled_linear_cross_entropy, token_tile=50, class_tile=128), baseline_linear_cross_entropy))
    for name, a, b, c in zip(("loss", "dx", "dw"), tiled, baseline, exact):
        # both round the result once; the baseline rounds scores and dz too. One ulp of float32 for a loss hit by luck
        assert relative_error(a, c) <= 1.05 * relative_error(b, c) + 1e-6, name


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_are_not_rounded(dtype, scale, device):
    s = sample_data(64, 64, 300, dtype, device)
    losses = tiled_linear_cross_entropy(*s, reduction="none", scale=scale, token_tile=16, class_tile=100)
    # products of halves are exact in float32; what is left is the rounding of sums
    assert_near((losses,), (reference(*s, reduction="none", scale=scale),), 1e-6)


def test_half_precision_error_of_dw_does_not_grow_with_the_tiles(device):
    s = sample_data(256, 32, 200, torch.bfloat16, device)
    exact = gradients(reference, Sample(*(t.detach().double().requires_grad_() for t in s[:2]), s.target))[2]
    errors = [relative_error(gradients(partial(tiled_linear_cross_entropy, token_tile=t), s)[2], exact) for t in (256, 16, 1)]
    assert max(errors) <= 1.2 * errors[0]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_backward_twice_gives_the_same_gradients(scale, reduction, device):
    s = Case().sample(device)
    loss = small(*s, scale=scale, reduction=reduction)
    once, again, other = (torch.autograd.grad(loss, s[:2], k * upstream(loss), retain_graph=True) for k in (1, 1, -2))
    assert exactly(once, again)
    assert_near(other, [-2 * t for t in once])


def test_autograd_grad_sees_both_and_writes_no_grad(device):
    s = Case().sample(device)
    assert_near(torch.autograd.grad(small(*s), s[:2]), torch.autograd.grad(reference(*s), s[:2]))
    assert s.input.grad is None and s.weight.grad is None


def test_hooks_fire_once_with_the_gradient(device):
    s, seen = Case().sample(device), []
    for t in s[:2]:
        t.register_hook(lambda g: seen.append(("hook", g)))
        t.register_post_accumulate_grad_hook(lambda p: seen.append(("accumulated", p.grad)))
    small(*s).backward()
    assert sorted(name for name, _ in seen) == ["accumulated"] * 2 + ["hook"] * 2
    assert {tuple(g.shape) for name, g in seen if name == "hook"} == {(7, 3), (10, 3)}


def test_hook_can_change_the_gradient(device):
    s, plain = Case().sample(device), Case().sample(device)
    s.weight.register_hook(lambda g: 3 * g)
    small(*s).backward()
    small(*plain).backward()
    assert_near((s.weight.grad, s.input.grad), (3 * plain.weight.grad, plain.input.grad))


def test_micro_batches_add_up(device):
    whole, parts = Case().sample(device), Case().sample(device)
    small(*whole, reduction="sum").backward()
    for rows in (slice(0, 4), slice(4, 7)):
        small(parts.input[rows], parts.weight, parts.target[rows], reduction="sum").backward()
    assert_near((parts.input.grad, parts.weight.grad), (whole.input.grad, whole.weight.grad))


def test_tied_weights_get_both_gradients(device):
    x, w, y = Case().sample(device)
    tokens = torch.tensor([9, 0, 3, 3, 1, 2, 9], device=device)
    tied, apart = (nn.Embedding(10, 3, _weight=w.detach().clone()) for _ in range(2))
    small(tied(tokens), tied.weight, y).backward()
    reference(apart(tokens), apart.weight, y).backward()
    assert_near((tied.weight.grad,), (apart.weight.grad,))


def test_input_and_weight_may_be_one_tensor(device):
    t = Case().sample(device).weight
    y = torch.arange(10, device=device)
    for fn in (small, reference):
        fn(t, t, y).backward()
    (got,) = torch.autograd.grad(small(t, t, y), t)
    assert_near((2 * got,), (t.grad,))


def test_loss_is_part_of_a_larger_expression(device):
    s = Case().sample(device)
    got, exact = (torch.autograd.grad((fn(*s) ** 2).exp() * s.input.sum(), s[:2]) for fn in (small, reference))
    assert_near(got, exact)


def test_returned_loss_may_be_changed_in_place(device):
    s = Case().sample(device)
    loss = small(*s)
    loss *= 3
    assert_near(torch.autograd.grad(loss, s[:2]), torch.autograd.grad(3 * reference(*s), s[:2]))


def test_no_grad_builds_no_graph(device):
    s = Case().sample(device)
    with torch.no_grad():
        loss = small(*s)
    assert not loss.requires_grad and loss == small(*s)
    with torch.inference_mode():
        assert small(*s) == loss


def test_second_derivative_is_refused_not_wrong(device):
    s = Case().sample(device)
    assert has_no_second_derivative(small(*s), s.input) and has_no_second_derivative(small(*s), s.weight)


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradcheck(reduction, scale, device):
    s = Case((5, 3, 7), ignored=(1,)).sample(device)
    fn = lambda x, w: small(x, w, s.target, reduction=reduction, scale=scale)
    assert torch.autograd.gradcheck(fn, s[:2])


@pytest.mark.parametrize("scale", [None, 8.0])
def test_operators_follow_torchs_rules(scale, device):
    x, w, y = sample_data(7, 3, 10, device=device)
    options = (0.35, scale, 3, 4)
    torch.library.opcheck(tiled_lse, (x, w, y, *options, 1.5, 0))
    x, w, g = x.detach(), w.detach(), torch.ones(7, device=device)
    lse, _, row_max = tiled_lse(x, w, y, *options, 1.5)
    for needs in [(True, True), (True, False), (False, True)]:
        torch.library.opcheck(tiled_lse_grad, (g, -g, x, w, y, lse, row_max, *options, *needs, 1.5, 0))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_compiles_without_a_graph_break(scale, backend, device):
    torch._dynamo.reset()
    s = sample_data(7, 3, 10, device=device)
    compiled = torch.compile(partial(small, scale=scale), backend=backend, fullgraph=True)
    assert_near(gradients(compiled, s), gradients(small, s, scale=scale), 1e-6)


@pytest.mark.parametrize("dynamic", [False, True])
def test_module_compiles_without_a_graph_break(dynamic, device):
    torch._dynamo.reset()
    s = sample_data(12, 3, 10, device=device)
    module = MemoryEfficientVocabOutput(nn.Parameter(s.weight.detach()), tile_factor=3)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for n in (12, 7):
        assert compiled(s.input[:n], s.target[:n]) == module(s.input[:n], s.target[:n])


def test_bad_label_is_nan_when_compiled(device):
    torch._dynamo.reset()
    s = sample_data(7, 3, 10, device=device)
    bad = s.target.index_fill(0, torch.tensor([3], device=device), 99)
    losses = torch.compile(partial(small, reduction="none"), backend="eager", fullgraph=True)(s.input, s.weight, bad)
    assert losses.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("loss", [small, baseline_linear_cross_entropy])
def test_autocast_works_in_its_dtype_and_gradients_in_their_parameters(loss, dtypes, device):
    x, w, y = sample_data(9, 16, 40, device=device, requires_grad=False)
    s = Sample(x.to(dtypes[0]).requires_grad_(), w.to(dtypes[1]).requires_grad_(), y)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = loss(*s)
    got.backward()
    assert (got.dtype, s.input.grad.dtype, s.weight.grad.dtype) == (torch.float32, *dtypes)
    rounded = Sample(*(t.detach().bfloat16().double().requires_grad_() for t in s[:2]), y)
    exact = gradients(reference, rounded, torch.ones((), dtype=torch.float64, device=device))
    assert_near((got.detach(), s.input.grad, s.weight.grad), exact, 1e-2)  # bfloat16: 8 bits


def test_autocast_sees_what_linear_sees(device):
    s = sample_data(9, 16, 40, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = small(*s)
    assert exactly((got,), (small(s.input.bfloat16(), s.weight.bfloat16(), s.target),))
    with torch.autocast(device, dtype=torch.bfloat16):
        wide = small(*Case().sample(device))
        assert F.linear(*Case().sample(device)[:2]).dtype == wide.dtype == torch.float64


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "negative", "labels"])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_any_strides(scale, layout, device):
    x, w, y = Case().sample(device)
    change = {
        "transposed": lambda: (x.t().contiguous().t(), w.t().contiguous().t(), y),
        "strided": lambda: (x.repeat(1, 2)[:, ::2], w.repeat_interleave(2, 0)[::2], y),
        "expanded": lambda: (x[:1].expand(7, 3), w[:1].expand(10, 3), y),
        "negative": lambda: (x.flip(0)[:, [2, 0, 1]], w[:, [2, 0, 1]], y.flip(0)),
        "labels": lambda: (x, w, y.int().repeat_interleave(2)[1::2]),
    }
    got, exact = (torch.autograd.grad(fn(*change[layout](), scale=scale), (x, w)) for fn in (small, reference))
    assert_near([t + 1 for t in got], [t + 1 for t in exact])  # expanded weights have gradients that cancel


def test_upstream_gradient_may_be_strided_or_expanded(device):
    x, w, y = Case((6, 3, 10)).sample(device)
    for g in (torch.full((1, 1), 2.0, device=device).double().expand(2, 3), torch.arange(6.0, device=device).double().view(3, 2).T):
        got, exact = (torch.autograd.grad(fn(x.view(2, 3, 3), w, y.view(2, 3), reduction="none"), (x, w), g) for fn in (small, reference))
        assert_near(got, exact)


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_are_the_inputs_and_two_numbers_a_token(dtype, scale, device):
    s = sample_data(40, 3, 50, dtype, device)
    saved = saved_tensors(lambda: tiled_lse(*s, 0.35, scale, 8, 8))
    assert [(t.shape, t.dtype) for t in saved] == [((40, 3), dtype), ((50, 3), dtype), ((40,), torch.int64), *2 * [((40,), torch.float32)]]
    assert {t.data_ptr() for t in saved[:3]} == {t.data_ptr() for t in s}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_reduction_saves_no_more_than_masks(reduction, device):
    s = sample_data(40, 3, 50, device=device)
    saved = saved_tensors(lambda: tiled_linear_cross_entropy(*s, reduction=reduction), *s)
    x = [] if device == "cpu" else [(40, 3)]  # without ignored tokens, of which the host of a GPU knows nothing
    assert [t.shape for t in saved if t.is_floating_point()] == x + 2 * [(40,)]
    assert sum(t.nbytes for t in saved if t.dim() == 1 or not t.is_floating_point()) <= 40 * (8 + 2 + 1) + 8


MEASURED = grid([None, 8.0], [torch.float32, torch.bfloat16], [(64, 8, 2048), (2048, 8, 64), (300, 8, 300), (600, 8, 600), (72, 64, 1500)])


@pytest.mark.parametrize("scale, dtype, sizes", thorough_but(MEASURED, *MEASURED[::3]))
def test_memory_is_a_few_tiles_whatever_n_times_v(sizes, dtype, scale, device):
    (n, h, v), (bn, bv) = sizes, (32, 64)
    s = sample_data(*sizes, dtype, device)
    forward = lambda: tiled_linear_cross_entropy(*s, scale=scale, token_tile=bn, class_tile=bv)
    # elements of 4 bytes: two tiles of scores and a temporary; slices of x, w and their gradients; maxima, sums, score, upstream, factors
    extra = 4 * (3 * bn * bv + 4 * h * (bn + bv) + 14 * (n + v))
    grads = s.input.nbytes + s.weight.nbytes + (4 * n * h if dtype != torch.float32 else 0)  # dx is summed in float32
    slack = 0 if device == "cpu" else 64 * 512  # the GPU's allocator rounds each of some 60 tensors up to 512 bytes
    assert peak_memory(forward, device) <= extra + slack
    assert peak_memory(lambda: torch.autograd.grad(forward(), s[:2]), device) <= extra + grads + slack
    assert peak_memory(lambda: baseline_linear_cross_entropy(*s, scale=scale), device) > n * v * 4


def test_frozen_parameters_cost_no_memory(device):
    def step(*requires):
        x, w, y = Case((32, 256, 32), dtype=torch.float32, requires=requires).sample(device)
        wanted, kept = [t for t in (x, w) if t.requires_grad], []  # autograd's thread may hold the last results until the next call
        return peak_memory(lambda: kept.append(torch.autograd.grad(tiled_linear_cross_entropy(x, w, y, token_tile=8, class_tile=8), wanted)), device)

    assert max(step(True, False), step(False, True)) <= step(True, True) - 32 * 256 * 4


@pytest.mark.parametrize("n, v", [(1, 1), (7, 3), (47, 123), (8192, 128256), (16384, 1000), (0, 10), (10, 0), (1, 10**9)])
@pytest.mark.parametrize("factor", [1, 3, 16, 1000])
def test_square_tile_holds_its_share(n, v, factor):
    token_tile, class_tile = square_tile(n, v, factor)
    up = lambda side: -(-side // 128) * 128 if side >= 128 else side
    assert min(token_tile, class_tile) >= 1
    assert all(side < 128 or side % 128 == 0 for side in (token_tile, class_tile))
    assert token_tile <= max(1, up(n)) and class_tile <= max(1, up(v))
    side = (n * v) ** 0.5 / factor
    assert token_tile * class_tile >= n * v / factor**2
    assert token_tile * class_tile <= max(1, n * v / factor**2) + 130 * (side + max(token_tile, class_tile))


@pytest.mark.parametrize("size, tile", [(0, 4), (1, 4), (4, 4), (9, 4), (12, 4), (5, 1)])
def test_slices_cover_every_element_once(size, tile):
    covered = [i for run in tile_slices(size, tile) for i in range(size)[run]]
    assert covered == list(range(size))
    assert all(run.stop - run.start == tile for run in tile_slices(size, tile)[:-1])


def test_radial_part_is_removed(device):
    t, d = torch.randn(2, 5, 3, device=device, dtype=torch.float64)
    left = remove_radial(d.clone(), t)
    assert ((left * t).sum(1).abs() < 1e-12).all()
    torch.testing.assert_close(left, d - (d * t).sum(1, keepdim=True) / (t * t).sum(1, keepdim=True) * t)


def test_unit_is_never_zero(device):
    assert grad_scale_of(torch.zeros(3, device=device)) == torch.finfo(torch.float32).tiny
    assert grad_scale_of(torch.tensor([4096.0, -8192.0], device=device), torch.tensor([3.0], device=device)) == 6.0


def module_of(sample, **options):
    return MemoryEfficientVocabOutput(nn.Parameter(sample.weight.detach()), **options)


@pytest.mark.parametrize("factor", [1, 2, 16])
@pytest.mark.parametrize("options", [{}, dict(reduction="mean"), dict(reduction="none", scale=8.0, margin=0.1)], ids=str)
def test_module_is_the_functional(options, factor, device):
    x, _, y = s = Case((12, 3, 10)).sample(device)
    x, y = x.view(3, 4, 3), y.view(3, 4)
    module = module_of(s, tile_factor=factor, **options)
    loss = module(x, y)
    expected = {"reduction": "sum", **options}
    got = torch.autograd.grad(loss, (x, module.proj_weight), upstream(loss))
    assert_near((loss.detach(),), (reference(x, s.weight, y, **expected).detach(),))
    assert_near(got, torch.autograd.grad(reference(x, s.weight, y, **expected), (x, s.weight), upstream(loss)))


def test_module_shares_its_weight_and_adds_nothing_to_the_state(device):
    weight = nn.Parameter(torch.ones(5, 3, device=device))
    module = MemoryEfficientVocabOutput(weight)
    assert module.proj_weight is weight and list(module.state_dict()) == ["proj_weight"]


def test_module_gives_plain_scores_in_eval_mode(device):
    s = Case().sample(device)
    module = module_of(s, scale=8.0).eval()
    for scores in (module(s.input, None), module.eval_forward(s.input)):
        torch.testing.assert_close(scores, s.input @ s.weight.T)
    assert module(s.input, s.target).dim() == 0


def test_module_wants_a_target_in_training_mode():
    with pytest.raises(ValueError, match="target: expected .*, got None"):
        module_of(sample_data(4, 3, 5))(torch.ones(4, 3), None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("scale", [None, 8.0])
def test_step_is_captured_in_a_cuda_graph(scale):
    s = sample_data(40, 16, 130, device="cuda")
    step = lambda: torch.autograd.grad(tiled_linear_cross_entropy(*s, scale=scale, token_tile=16, class_tile=32), s[:2])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert exactly(captured, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_nothing_waits_for_the_gpu():
    s = sample_data(40, 16, 130, device="cuda")
    step = lambda: torch.autograd.grad(tiled_linear_cross_entropy(*s, scale=8.0, token_tile=16, class_tile=32), s[:2])
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
