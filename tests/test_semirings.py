"""Semirings: their laws, exact zeros, and one loop that agrees with a list of all paths."""
import math
from functools import partial
from itertools import product
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import fusedloss.semirings
from fusedloss.semirings import (Count, CountSemiring, Entropy, KBest, Log, Max, Real, Sample, all_paths, brute_force, check_graph,
                                 path_sum)
from workbook.measure import saved_tensors
from grids import few, FULL
from helpers import fault_of, planted, unchanged

INF = math.inf
SEMIRINGS = {str(S): S for S in (Log, Max, Real, Count, Entropy, KBest(1), KBest(2), KBest(5), Sample())} | {"Count, float64": CountSemiring(torch.float64)}
LOGARITHMIC = ("Log", "Max", "Entropy", "KBest(1)", "KBest(2)", "KBest(5)", "Sample")
DIFFERENTIABLE = ("Log", "Max", "Real", "Entropy", "KBest(3)")
on_any = settings(max_examples=100 if FULL else 25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


def semiring(name):
    "By the name it prints"
    return SEMIRINGS.get(name) or KBest(3)


# laws

SCORES = st.one_of(st.just(-INF), st.floats(-5, 5), st.floats(-1e9, 1e9), st.sampled_from([0.0, 1.0, -1e300, 1e300]))


@st.composite
def elements(draw, S, n=3):
    "n values of S"
    if isinstance(S, CountSemiring):
        return list(torch.tensor(draw(st.lists(st.integers(0, 2**15), min_size=n, max_size=n)), dtype=S.dtype))
    if S is Real:
        return list(torch.tensor(draw(st.lists(st.just(0.0) | st.floats(1e-90, 1e90), min_size=n, max_size=n)), dtype=torch.float64))
    rows = draw(st.lists(st.lists(SCORES, min_size=max(S.components or (1,)), max_size=max(S.components or (1,))), min_size=n, max_size=n))
    values = torch.tensor(rows, dtype=torch.float64)
    if S is Entropy:
        nats = torch.tensor(draw(st.lists(st.floats(0, 1e3), min_size=n, max_size=n)), dtype=torch.float64)
        values = torch.stack([values[:, 0], torch.where(values[:, 0] == -INF, 0.0, nats)], 1)
    return list(values.sort(1, descending=True).values if isinstance(S, KBest) else values if S.components else values[:, 0])


def assert_same(S, a, b, *operands):
    "Equal up to rounding: of the largest operand for sums of logarithms, of the value itself for products"
    assert a.shape == b.shape and a.dtype == b.dtype
    assert not (a != a).any() and not (b != b).any(), "NaN"
    if not a.is_floating_point():
        assert torch.equal(a, b)
        return
    infinite = a == -INF
    assert torch.equal(infinite, b == -INF), (a, b)
    size = max([1.0, *(v[v > -INF].abs().max().item() for v in operands if (v > -INF).any())])
    if S is Real or isinstance(S, CountSemiring):
        size = b.abs()
    assert ((a - b).masked_fill(infinite, 0).abs() <= 64 * torch.finfo(a.dtype).eps * size).all(), (a, b)


def plus(S, *values):
    "⊕ of a few values"
    return S.sum(torch.stack(values, -1))


def constants(S, like):
    "0 and 1 as values"
    return (torch.tensor(c, dtype=like.dtype) for c in (S.zero, S.one))


@pytest.mark.parametrize("name", SEMIRINGS)
@on_any
@given(data=st.data())
def test_laws(name, data):
    S = SEMIRINGS[name]
    a, b, c = data.draw(elements(S))
    if S is Entropy:  # an entropy moves with the rounding of weights: keep those where it means something
        a, b, c = (torch.stack([v[0].clamp(max=1e6).where(v[0] > -1e6, -torch.tensor(INF)), v[1] * (v[0] > -1e6)]) for v in (a, b, c))
    zero, one = constants(S, a)
    same = partial(assert_same, S)
    same(plus(S, a, b), plus(S, b, a), a, b)
    same(plus(S, plus(S, a, b), c), plus(S, a, plus(S, b, c)), a, b, c)
    same(plus(S, a, b, c), plus(S, plus(S, a, b), c), a, b, c)
    same(S.mul(a, b), S.mul(b, a), a, b)
    same(S.mul(S.mul(a, b), c), S.mul(a, S.mul(b, c)), a, b, c)
    same(S.mul(a, plus(S, b, c)), plus(S, S.mul(a, b), S.mul(a, c)), a, b, c)
    same(S.mul(plus(S, b, c), a), plus(S, S.mul(b, a), S.mul(c, a)), a, b, c)
    for neutral in (plus(S, a, zero), plus(S, zero, a), S.mul(a, one), S.mul(one, a), plus(S, a)):
        same(neutral, a, a)
    for nothing in (S.mul(a, zero), S.mul(zero, a), plus(S, zero, zero)):
        assert torch.equal(nothing, zero)


@given(st.lists(st.integers(-2**63, 2**63 - 1), min_size=3, max_size=3))
def test_counts_are_a_ring_even_beyond_int64(values):
    a, b, c = torch.tensor(values)
    assert Count.mul(a, plus(Count, b, c)) == plus(Count, Count.mul(a, b), Count.mul(a, c))


@pytest.mark.parametrize("name", SEMIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lift_gives_the_constants(name, dtype, device):
    S = SEMIRINGS[name]
    for score, constant in ((-INF, S.zero), (0.0, S.one)):
        value = S.lift(torch.full((2, 3), score, dtype=dtype, device=device))
        assert value.shape == (*S.components, 2, 3)
        assert value.dtype == (S.dtype if isinstance(S, CountSemiring) else dtype) and value.device.type == device
        expected = torch.tensor(constant, device=device).to(value.dtype).view(*S.components, 1, 1)
        assert torch.equal(value, expected.expand_as(value))


@pytest.mark.parametrize("name", SEMIRINGS)
def test_sum_of_nothing_is_zero(name, device):
    S = SEMIRINGS[name]
    empty = S.sum(S.lift(torch.zeros(2, 0, device=device)))
    assert torch.equal(empty, S.lift(torch.full((2,), -INF, device=device)))
    assert S.sum(S.lift(torch.zeros(0, 3, device=device))).shape == (*S.components, 0)
    assert S.sum(S.lift(torch.zeros(0, 3, device=device)), 0).shape == (*S.components, 3)


@pytest.mark.parametrize("name", SEMIRINGS)
def test_axes_are_those_after_the_components(name, device):
    S = SEMIRINGS[name]
    scores = torch.randn(2, 3, 4, dtype=torch.float64, device=device)
    for dim in range(3):
        last = S.sum(S.lift(scores.movedim(dim, -1)))
        assert torch.equal(S.sum(S.lift(scores), dim), last) or torch.allclose(S.sum(S.lift(scores), dim), last, atol=1e-14)
        assert torch.equal(S.sum(S.lift(scores), dim - 3), S.sum(S.lift(scores), dim))
        if not S.components and not isinstance(S, (Sample, CountSemiring)):
            torch.testing.assert_close(S.dsum(scores, dim), S.dsum(scores.movedim(dim, -1)).movedim(-1, dim), rtol=1e-14, atol=0)


# the derivative of the sum

def slopes(S, x, g=None, dim=-1):
    "Gradient of the sum along `dim`"
    x = x.detach().clone().requires_grad_()
    out = S.sum(x, dim)
    return torch.autograd.grad(out, x, torch.ones_like(out) if g is None else g)[0]


def test_log_is_logsumexp_and_softmax(device):
    x, g = torch.randn(5, 7, dtype=torch.float64, device=device) * 30, torch.arange(5.0, dtype=torch.float64, device=device) - 2
    torch.testing.assert_close(Log.sum(x), x.logsumexp(-1))
    torch.testing.assert_close(slopes(Log, x, g), g[:, None] * x.softmax(-1))


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_of_large_magnitudes(scale, dtype, device):
    x = torch.tensor([[scale, scale], [-scale, -scale], [scale, -INF], [-scale, -INF], [scale, -scale]], dtype=dtype, device=device)
    expected = torch.tensor([scale + math.log(2), math.log(2) - scale, scale, -scale, math.log(math.exp(1) + math.exp(-1)) if scale == 1 else scale], dtype=dtype, device=device)
    torch.testing.assert_close(Log.sum(x), expected)
    p = slopes(Log, x)
    assert torch.equal(p[:4], torch.tensor([[0.5, 0.5], [0.5, 0.5], [1, 0], [1, 0]], dtype=dtype, device=device))
    torch.testing.assert_close(p.sum(1), torch.ones_like(expected))


@pytest.mark.parametrize("S", [Log, Max, Sample()], ids=str)
def test_no_gradient_where_there_is_no_path(S, device):
    x = torch.tensor([[-INF] * 3, [-INF, 2.0, -INF]], device=device)
    assert S.sum(x).tolist() == [-INF, 2.0]
    assert slopes(S, x).tolist() == [[0, 0, 0], [0, 1, 0]]
    assert S.dsum(x[0]).tolist() == [0, 0, 0]


def test_derivatives_of_log_against_differences():
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    holes = torch.tensor([[0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)
    for f in (Log.sum, partial(Log.sum, dim=0), lambda z: Log.sum(z.masked_fill(holes, -INF))[[0, 2]], Log.dsum,
              lambda z: Log.dsum(z.masked_fill(holes, -INF))):
        assert torch.autograd.gradcheck(f, x)
        assert torch.autograd.gradgradcheck(f, x)


def test_every_derivative_obeys_the_rule_for_zeros(device):
    x = torch.tensor([[-INF, -INF], [0.5, -INF]], dtype=torch.float64, device=device, requires_grad=True)
    value = Log.sum(x)
    for _ in range(4):
        value, = torch.autograd.grad((value.masked_fill(value == -INF, 0) ** 2).sum(), x, create_graph=True)
        assert not value.isnan().any() and (value[0] == 0).all() and value[1, 1] == 0


def test_function_transforms(device):
    x = torch.randn(4, dtype=torch.float64, device=device)
    p = x.softmax(0)
    torch.testing.assert_close(torch.func.jacrev(torch.func.grad(Log.sum))(x), p.diag() - p[:, None] * p)
    torch.testing.assert_close(torch.func.vmap(Log.sum)(x.view(2, 2)), x.view(2, 2).logsumexp(1))


def test_max_marks_the_first_of_equals(device):
    x = torch.tensor([[1.0, 1, 0], [0, 2, 2], [-INF, -INF, -INF], [3, 3, 3], [-INF, 0, 0]], device=device)
    marks = [[1, 0, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0], [0, 1, 0]]
    assert slopes(Max, x).tolist() == marks and Max.dsum(x).tolist() == marks
    assert slopes(Max, x.T, dim=0).T.tolist() == marks
    many = torch.zeros(3, 5000, device=device)
    assert (Max.dsum(many).argmax(1) == 0).all() and Max.dsum(many).sum() == 3


def test_nan_stays_visible(device):
    x = torch.tensor([[0.0, math.nan], [-INF, math.nan]], device=device)
    for S in (Log, Max, Real):
        assert S.sum(x).isnan().all()
    assert slopes(Log, x).isnan().any(1).all()


@pytest.mark.parametrize("S", [Log, Max, Sample()], ids=str)
def test_only_the_operand_is_saved(S, device):
    x = torch.randn(6, 5, device=device, requires_grad=True)
    assert saved_tensors(lambda: S.sum(x), x) == []


# graphs

@st.composite
def graphs(draw, dtype=torch.float64, integers=False):
    "Scores, edges, start and end: holes, parallel edges and unreachable states welcome"
    t, n, c, nz = (draw(st.integers(*r)) for r in ((0, 4), (0, 3), (1, 4), (1, 3)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    holes, scale = draw(st.sampled_from([0.0, 0.2, 0.7])), draw(st.sampled_from([1.0, 30.0]))

    def scores(*shape):
        x = torch.randint(0, 2, shape, generator=g).to(dtype) if integers else torch.randn(shape, generator=g, dtype=dtype) * scale
        return torch.where(torch.rand(shape, generator=g) < holes, -INF, x)

    return scores(t, n, c, nz), torch.randint(-1, c, (c, nz), generator=g), scores(n, c), scores(n, c)


def weights_of_paths(Ms, idx, v0, vT):
    "Score and edges of every path of one sequence, from plain Python numbers and from the first state on"
    (steps, c, nz), out = Ms.shape, []
    for states in product(range(c), repeat=steps + 1):
        for edges in product(range(nz), repeat=steps):
            if all(idx[b, j] == a for a, b, j in zip(states, states[1:], edges)):
                along = [Ms[t, b, j].item() for t, (b, j) in enumerate(zip(states[1:], edges))]
                score = math.fsum([v0[states[0]].item(), *along, vT[states[-1]].item()]) if -INF not in along else -INF
                out.append((score, states, edges))
    return [path for path in out if path[0] > -INF]


def expected_value(S, scores):
    "What S says of a list of path scores"
    scores = sorted(scores, reverse=True)
    top = scores[0] if scores else 0.0
    total = math.fsum(math.exp(s - top) for s in scores)
    logz = top + math.log(total) if scores else -INF
    if S is Max:
        return scores[0] if scores else -INF
    if S is Real:
        return math.fsum(map(math.exp, scores))
    if isinstance(S, CountSemiring):
        return len(scores)
    if S is Entropy:
        return logz, -math.fsum(math.exp(s - logz) * (s - logz) for s in scores)
    if isinstance(S, KBest):
        return tuple(([*scores] + [-INF] * S.components[0])[:S.components[0]])
    return logz


@pytest.mark.parametrize("program", [path_sum, brute_force])
@settings(on_any, max_examples=40 if FULL else 20)
@given(graph=graphs())
def test_both_programs_are_the_definition(program, graph):
    Ms, idx, v0, vT = graph
    paths = [weights_of_paths(Ms[:, n], idx, v0[n], vT[n]) for n in range(len(v0))]
    for S in SEMIRINGS.values():
        got = program(*graph, S)
        assert got.shape == (*S.components, len(v0))
        expected = torch.tensor([expected_value(S, [p[0] for p in path]) for path in paths], dtype=got.dtype)
        expected = expected.view(len(v0), *S.components).movedim(0, -1)
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11, msg=lambda m: f"{S}: {m}")


def edge_gradient(program, graph, S, component=-1):
    "Gradient of one component on the edges, start and end, under an uneven upstream gradient"
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in graph]
    out = program(*leaves, S).view(math.prod(S.components), -1)[component]
    g = torch.arange(len(out)).to(out) - 0.5
    inputs = [t for t in leaves if t.requires_grad]
    found = torch.autograd.grad(out, inputs, g, allow_unused=True)
    return [torch.zeros_like(t) if f is None else f for t, f in zip(inputs, found)]


@settings(on_any, max_examples=60 if FULL else 25)
@given(graph=graphs())
def test_gradients_agree_and_have_no_nan(graph):
    for name in DIFFERENTIABLE:
        S = semiring(name)
        if S is Real and any((t > 50).any() for t in graph):
            continue  # products of e^90 leave float64
        for component in range(math.prod(S.components)):
            ours, truth = (edge_gradient(p, graph, S, component) for p in (path_sum, brute_force))
            for a, b, scores in zip(ours, truth, (graph[0], *graph[2:])):
                assert a.isfinite().all(), name
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")
                assert (a[scores == -INF] == 0).all()
            assert (ours[0][:, :, graph[1] < 0] == 0).all()


@on_any
@given(graph=graphs(integers=True))
def test_best_path_under_ties_is_one_path_and_the_first(graph):
    Ms, idx, *_ = graph
    best = path_sum(*graph, Max)
    marks, truth = (edge_gradient(p, graph, Max) for p in (path_sum, brute_force))
    for a, b in zip(marks, truth):
        assert torch.equal(a, b)
    for n, score in enumerate(best.tolist()):
        picked, start, end = (m.select(-2 if m.dim() == 2 else 1, n) / (n - 0.5) for m in marks)
        assert_is_path(picked, start, end, idx, exists=score > -INF)
        if score > -INF:
            chosen = [Ms[:, n][picked == 1].sum(), graph[2][n][start == 1].sum(), graph[3][n][end == 1].sum()]
            assert sum(chosen).item() == score


def assert_is_path(marks, start, end, idx, exists=True):
    "One edge a step, each from where the last one ended; nothing at all where no path exists"
    assert set(marks.unique().tolist()) <= {0, 1}
    if not exists:
        assert not marks.any() and not start.any() and not end.any()
        return
    assert start.sum() == 1 and end.sum() == 1
    state = start.argmax().item()
    for step in marks:
        assert step.sum() == 1
        c, j = divmod(step.flatten().argmax().item(), idx.shape[1])
        assert idx[c, j] == state
        state = c
    assert end[state] == 1


@settings(on_any, max_examples=50 if FULL else 25)
@given(graph=graphs(), seed=st.integers(0, 1000))
def test_a_sample_is_a_path_of_positive_weight(graph, seed):
    Ms, idx, *_ = graph
    marks = edge_gradient(path_sum, graph, Sample(torch.Generator().manual_seed(seed)))
    again = edge_gradient(path_sum, graph, Sample(torch.Generator().manual_seed(seed)))
    assert all(torch.equal(a, b) for a, b in zip(marks, again))
    for n, score in enumerate(path_sum(*graph, Max).tolist()):
        picked, start, end = (m.select(-2 if m.dim() == 2 else 1, n) / (n - 0.5) for m in marks)
        assert_is_path(picked, start, end, idx, exists=score > -INF)
        assert (Ms[:, n][picked == 1] > -INF).all()


@pytest.mark.parametrize("program", [path_sum, brute_force])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_have_the_posterior_frequencies(program, dtype, device):
    n, g = 20000, torch.Generator(device).manual_seed(0)
    Ms = torch.randn(3, 1, 3, 2, dtype=dtype, generator=torch.Generator().manual_seed(1)).to(device)
    idx, ends = torch.tensor([[0, 1], [0, 2], [1, 1]], device=device), torch.zeros(2, 1, 3, dtype=dtype, device=device)
    graph = Ms.expand(-1, n, -1, -1).contiguous().requires_grad_(), idx, *ends.expand(-1, n, -1)
    drawn, = torch.autograd.grad(program(*graph, Sample(g)).sum(), graph[0])
    leaf = Ms.clone().requires_grad_()
    p, = torch.autograd.grad(brute_force(leaf, idx, *ends, Log).sum(), leaf)
    assert ((drawn.mean(1) - p[:, 0]).abs() <= 5 * (p[:, 0] * (1 - p[:, 0]) / n).sqrt() + 1e-6).all()


def test_one_forward_serves_many_samples():
    x = torch.zeros(1, 8, requires_grad=True)
    total = Sample(torch.Generator().manual_seed(0)).sum(x)
    drawn = [torch.autograd.grad(total.sum(), x, retain_graph=True)[0].argmax().item() for _ in range(20)]
    assert len(set(drawn)) > 3


def test_k_best_paths_are_different_paths():
    g = torch.Generator().manual_seed(0)
    graph = torch.randint(0, 2, (4, 1, 3, 2), generator=g).double(), torch.randint(0, 3, (3, 2), generator=g), *torch.zeros(2, 1, 3, dtype=torch.float64)
    scores, seen = path_sum(*graph, KBest(10))[:, 0], set()
    for i, score in enumerate(scores.tolist()):
        marks, start, end = (2 * m.abs() for m in edge_gradient(path_sum, graph, KBest(10), i))
        assert_is_path(marks[:, 0], start[0], end[0], graph[1])
        assert (marks * graph[0]).sum() == score
        seen.add(tuple(marks.flatten().tolist()) + tuple(start.flatten().tolist()))
    assert len(seen) == 10 and torch.equal(scores, scores.sort(descending=True).values)


def test_fewer_paths_than_k_leave_no_score_and_no_gradient(device):
    Ms = torch.tensor([[[[1.0], [2.0]]]], device=device, requires_grad=True)
    graph = Ms, torch.tensor([[0], [0]], device=device), torch.tensor([[0.0, -INF]], device=device), torch.zeros(1, 2, device=device)
    scores = path_sum(*graph, KBest(4))[:, 0]
    assert scores.tolist() == [2, 1, -INF, -INF]
    assert [torch.autograd.grad(s, Ms, retain_graph=True)[0].flatten().tolist() for s in scores] == [[0, 1], [1, 0], [0, 0], [0, 0]]


def ctc_graph(length, n=1, dtype=torch.float64):
    "CTC's edges for different labels, with start and end"
    idx = torch.arange(2 * length + 1)[:, None] - torch.arange(3)
    idx[::2, 2] = -1
    start, end = torch.full((2, n, 2 * length + 1), -INF, dtype=dtype)
    start[:, :2], end[:, -2:] = 0, 0
    return idx.clamp(min=-1), start, end


@pytest.mark.parametrize("length, steps", [(1, 1), (1, 7), (3, 2), (3, 1), (5, 12), (20, 60)])
def test_ctc_alignments_are_a_binomial_coefficient(length, steps):
    Ms = torch.zeros(steps, 1, 2 * length + 1, 3, dtype=torch.float64)
    expected = math.comb(steps + 1 + length, 2 * length)
    assert path_sum(Ms, *ctc_graph(length), Count).item() == (expected + 2**63) % 2**64 - 2**63  # int64 wraps around
    torch.testing.assert_close(path_sum(Ms, *ctc_graph(length), CountSemiring(torch.float64)).item(), float(expected), rtol=1e-13, atol=0)


def test_infeasible_rows_harm_nobody(device):
    idx, start, end = (t.to(device) for t in ctc_graph(3, 3))
    Ms = torch.randn(3, 3, 7, 3, dtype=torch.float64, device=device)
    Ms[:, 1] = -INF
    end[2] = -INF
    for S in (Log, Max, Entropy, KBest(2)):
        together, alone = edge_gradient(path_sum, (Ms, idx, start, end), S, 0), edge_gradient(path_sum, (Ms[:, :1], idx, start[:1], end[:1]), S, 0)
        assert all(t.isfinite().all() for t in together)
        torch.testing.assert_close(together[0][:, :1], alone[0], rtol=1e-12, atol=1e-14)
        assert not together[0][:, 1:].any()


def test_padding_edges_are_never_read(device):
    idx, start, end = (t.to(device) for t in ctc_graph(2))
    Ms = torch.randn(4, 1, 5, 3, dtype=torch.float64, device=device)
    clean = [edge_gradient(path_sum, (Ms, idx, start, end), S)[0] for S in (Log, Max)]
    Ms[:, :, idx < 0] = math.nan
    for S, expected in zip((Log, Max), clean):
        assert path_sum(Ms, idx, start, end, S).isfinite().all() and brute_force(Ms, idx, start, end, S).isfinite().all()
        assert torch.equal(edge_gradient(path_sum, (Ms, idx, start, end), S)[0], expected)


def test_parallel_edges_are_two_edges():
    graph = torch.zeros(1, 1, 1, 2), torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 1), torch.zeros(1, 1)
    for program in (path_sum, brute_force):
        assert program(*graph, Count).item() == 2
        assert edge_gradient(program, graph, Max)[0].abs().flatten().tolist() == [0.5, 0]


def test_all_paths_are_all_and_in_the_order_of_max():
    idx = torch.tensor([[1, -1], [0, 0]])
    states, edges = all_paths(idx, 2)
    assert states.tolist() == [[0, 1, 0], [0, 1, 0], [1, 0, 1], [1, 0, 1]] and edges.tolist() == [[0, 0], [1, 0], [0, 0], [0, 1]]
    assert [t.shape for t in all_paths(idx, 0)] == [(2, 1), (2, 0)]
    assert [t.shape for t in all_paths(torch.full((2, 2), -1), 3)] == [(0, 4), (0, 3)]


def test_entropy_of_a_uniform_and_of_a_sure_choice():
    idx, start, end = ctc_graph(3)
    uniform = path_sum(torch.zeros(6, 1, 7, 3, dtype=torch.float64), idx, start, end, Entropy)
    torch.testing.assert_close(uniform[1].item(), math.log(math.comb(10, 6)), rtol=1e-13, atol=0)
    sure = torch.full((6, 1, 7, 3), -300.0, dtype=torch.float64)
    sure[:, :, :, 1] = 0  # always to the next state, which is the end after six steps
    assert 0 <= path_sum(sure, idx, start, end, Entropy)[1].item() < 1e-100


def test_double_backward_through_the_loop():
    idx, start, end = ctc_graph(2)
    Ms = torch.randn(3, 1, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for S in (Log, Entropy):
        assert torch.autograd.gradcheck(lambda m: path_sum(m, idx, start, end, S), Ms)
        assert torch.autograd.gradgradcheck(lambda m: path_sum(m, idx, start, end, S), Ms)


def test_compiles_whole():
    graph = torch.randn(3, 2, 5, 3, dtype=torch.float64), *ctc_graph(2, 2)
    for S in (Log, Max, Entropy):
        compiled = torch.compile(partial(path_sum, S=S), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*graph), path_sum(*graph, S))


def test_runs_are_equal_bit_for_bit(device):
    idx, start, end = (t.to(device) for t in ctc_graph(5, 4, torch.float32))
    graph = torch.randn(9, 4, 11, 3, device=device), idx, start, end
    for name in DIFFERENTIABLE:
        runs = [edge_gradient(path_sum, graph, semiring(name)) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_strided_inputs_and_int32_edges(dtype, tolerance, device):
    idx, start, end = (t.to(device) for t in ctc_graph(3, 2, dtype))
    Ms = torch.randn(3, 7, 2, 5, dtype=dtype, device=device).permute(3, 2, 1, 0)
    plain = path_sum(Ms.contiguous(), idx, start, end, Log)
    torch.testing.assert_close(path_sum(Ms, idx.int(), start, end, Log), plain, rtol=tolerance, atol=tolerance)


BAD = {
    "Ms of three axes": (dict(Ms=torch.zeros(1, 2, 3)), ValueError, r"Ms: expected floating point \[T, N, C, nz\], got torch.float32 \[1, 2, 3\]"),
    "Ms of integers": (dict(Ms=torch.zeros(2, 1, 3, 2, dtype=torch.long)), ValueError, "Ms: expected floating point"),
    "idx of another graph": (dict(idx=torch.zeros(3, 1).long()), ValueError, r"idx: expected int64 or int32 \[3, 2\], got torch.int64 \[3, 1\]"),
    "idx of floats": (dict(idx=torch.zeros(3, 2)), ValueError, "idx: expected int64 or int32"),
    "v0 of another batch": (dict(v0=torch.zeros(2, 3)), ValueError, r"v0: expected torch.float32 \[1, 3\], got torch.float32 \[2, 3\]"),
    "vT of another dtype": (dict(vT=torch.zeros(1, 3).double()), ValueError, "vT: expected torch.float32"),
    "a state beyond the last": (dict(idx=torch.tensor([[0, 1], [3, 0], [0, 0]])), IndexError, r"idx\[1, 0\] is 3: expected 0 ≤ state < 3, or −1"),
    "a state below −1": (dict(idx=torch.tensor([[0, 1], [0, -2], [0, 0]])), IndexError, r"idx\[1, 1\] is -2"),
}


@pytest.mark.parametrize("program", [path_sum, brute_force, check_graph])
@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named(bad, program):
    change, error, match = BAD[bad]
    graph = dict(Ms=torch.zeros(2, 1, 3, 2), idx=torch.zeros(3, 2).long(), v0=torch.zeros(1, 3), vT=torch.zeros(1, 3)) | change
    with pytest.raises(error, match=match):
        program(**graph)


def test_names():
    assert [str(S) for S in (Log, Max, Real, Count, Entropy, KBest(3), Sample())] == ["Log", "Max", "Real", "Count", "Entropy", "KBest(3)", "Sample"]


# planted bugs

MUTANTS = {  # what is wrong: (text of the source, what stands in its place)
    "an unreachable row is 0/0": (".all(dim, keepdim=True)", ".all(dim, keepdim=True) & False"),
    "only the value is masked": ("x.masked_fill(unreachable, 0.0).softmax", "x.softmax"),
    "an unreachable row is shared out": (".softmax(dim).masked_fill(unreachable, 0.0)", ".softmax(dim)"),
    "the upstream gradient is dropped": ("g.unsqueeze(ctx.dim) * ", ""),
    "Max marks the last of equals": ("x.argmax(dim, keepdim=True)", "x.shape[dim] - 1 - x.flip(dim).argmax(dim, keepdim=True)"),
    "Max marks all equals": ("iota == x.argmax(dim, keepdim=True)", "x == x.amax(dim, keepdim=True)"),
    "Max marks where there is no path": ("(first & (x.amax(dim, keepdim=True) != -torch.inf))", "first"),
    "a zero weight counts": ("scores > -torch.inf", "scores >= -torch.inf"),
    "nothing has an entropy": ("entropy.masked_fill(weight == -torch.inf, 0.0)", "entropy"),
    "the choice has no surprise": ("(entropy + surprise)", "entropy"),
    "the parts have no entropy": ("(entropy + surprise)", "surprise"),
    "the surprise is negative": ("total.unsqueeze(dim) - weight", "weight - total.unsqueeze(dim)"),
    "the worst are kept": ("descending=True", "descending=False"),
    "missing paths pass a gradient": ("top.masked_fill(top == -torch.inf, -torch.inf)", "top"),
    "only equal ranks are joined": ("(a[:, None] + b[None])", "(a[:, None] + b[:1])"),
    "absent edges are there": ("scores.masked_fill(absent, -torch.inf)", "scores"),
    "the end is forgotten": ("S.sum(S.mul(v, S.lift(vT)))", "S.sum(v)"),
    "the start is forgotten": ("v = S.lift(v0)", "v = S.lift(torch.zeros_like(v0))"),
    "the list holds absent edges": ("if source >= 0]", "if source >= -1]"),
    "the list is in another order": ("enumerate(sources[states[0]])", "reversed([*enumerate(sources[states[0]])])"),
    "samples are uniform": ("Log.dsum(x, dim).log() - clocks", "0 * x - clocks"),
    "samples are the best path": (" - clocks.log(), dim)", ", dim)"),
    "samples run the wrong race": (" - clocks.log(), dim)", " + clocks.log(), dim)"),
}


def first_fault(m: ModuleType) -> str | None:
    "The first of a few checks that a version of the module does not pass"
    g = torch.Generator().manual_seed(0)
    x = torch.tensor([[-INF, -INF], [0.5, -INF], [1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    second, = torch.autograd.grad((slope := torch.autograd.grad(m.Log.sum(x), x, torch.arange(3.0).double() + 1, create_graph=True)[0]).square().sum(), x)
    if slope.tolist() != [[0, 0], [2, 0], [1.5, 1.5]] or not second.isfinite().all():
        return "derivatives of Log"
    pair = torch.tensor([-INF, 0.0]).double(), torch.tensor([1.0, 5.0]).double()
    if m.Entropy.mul(*pair).tolist() != [-INF, 0] or m.KBest(2).mul(torch.tensor([5.0, 1.0]), torch.tensor([5.0, 4.0])).tolist() != [10, 9]:
        return "a product"
    for steps, n, c, nz in ((1, 2, 2, 2), (3, 2, 3, 2), (4, 3, 3, 2), (2, 6, 2, 3)):
        def draw(*shape):
            return torch.where(torch.rand(shape, generator=g) < 0.2, -INF, torch.randint(0, 2, shape, generator=g).double())
        graph = draw(steps, n, c, nz), torch.randint(-1, c, (c, nz), generator=g), draw(n, c), draw(n, c)
        for S in (m.Log, m.Max, m.Count, m.Entropy, m.KBest(3)):
            truth = torch.tensor([expected_value(semiring(str(S)), [p[0] for p in weights_of_paths(graph[0][:, i], graph[1], graph[2][i], graph[3][i])]) for i in range(n)])
            for program in (m.path_sum, m.brute_force):
                if not torch.allclose(program(*graph, S).double(), truth.view(n, *S.components).movedim(0, -1).double(), rtol=1e-6):
                    return f"{program.__name__} of {S}"
            if S is not m.Count:
                ours, listed = (edge_gradient(p, graph, S) for p in (m.path_sum, m.brute_force))
                if not all(a.isfinite().all() and torch.allclose(a, b) for a, b in zip(ours, listed)) and not isinstance(S, m.KBest):
                    return f"gradient of {S}"
                if not all((a[s == -INF] == 0).all() for a, s in zip(ours, (graph[0], *graph[2:]))):
                    return f"gradient of {S} without a path"
        if not torch.equal(edge_gradient(m.path_sum, graph, m.Max)[0], edge_gradient(path_sum, graph, Max)[0]):
            return "ties"
    drawn = torch.stack([m.Sample(g).dsum(torch.tensor([2.0] + [0.0] * 7 + [-INF])) for _ in range(1000)]).mean(0)
    return None if abs(drawn[0] - 0.5135) < 0.05 and (drawn[1:8] > 0.03).all() and drawn[8] == 0 else "samples"  # e² / (e² + 7)


def test_the_unchanged_source_passes(tmp_path):
    assert first_fault(planted(fusedloss.semirings, tmp_path, *unchanged(MUTANTS.values()))) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", few(MUTANTS, "an unreachable row is 0/0", "Max marks the last of equals", "the choice has no surprise", "absent edges are there"))
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert fault_of(first_fault, fusedloss.semirings, tmp_path, *MUTANTS[bug]), f"no check notices that {bug}"
