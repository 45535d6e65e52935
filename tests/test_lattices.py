"Sums over the grids of transducers, against every path one by one."

import itertools
import math

import pytest
import torch

from fusedloss.lattices import duration_flows, node_flows
from fusedloss.semirings import Max

f32, f64 = torch.float32, torch.float64


def packed(frames, labels):
    "First rows [N+1]."
    nodes = torch.tensor(frames) * (torch.tensor(labels) + 1)
    return torch.cat([torch.zeros(1, dtype=torch.int64), nodes.cumsum(0)])


def batch(frames, labels, dtype=f64, seed=0, scale=1.0, padding=3, depth=()):
    "Scores of all nodes, NaN in rows of padding."
    starts = packed(frames, labels)
    made = torch.Generator().manual_seed(seed)
    scores = [torch.randn(int(starts[-1]) + padding, *d, generator=made, dtype=f64).mul(scale).sub(1).to(dtype)
              for d in ((), (), depth)]
    for s in scores:
        s[int(starts[-1]):] = math.nan
    return scores if depth else scores[:2], (starts, torch.tensor(frames), torch.tensor(labels))


def every_path(T, U, durations=None):
    "Paths as lists of (t, u, takes a label, number of a duration)."
    durations_of = [(True, 0, None), (False, 1, None)]
    if durations is not None:
        durations_of = [(kind, d, i) for kind in (True, False) for i, d in enumerate(durations) if kind or d]

    def walk(t, u):
        for kind, d, i in durations_of:
            if kind and u < U and t + d < T:
                yield from ([(t, u, True, i), *rest] for rest in walk(t + d, u + 1))
            if not kind and t + d < T:
                yield from ([(t, u, False, i), *rest] for rest in walk(t + d, u))
            if not kind and u == U and t + d == T:
                yield [(t, u, False, i)]

    return list(walk(0, 0)) if T else []


def by_paths(T, U, blank, label, dur=None, durations=None):
    "log Z, and the flow of each row, by enumeration in float64."
    paths, weights = every_path(T, U, durations), []
    row = lambda t, u: t * (U + 1) + u
    for path in paths:
        weights.append(sum((label if y else blank)[row(t, u)].item() + (dur[row(t, u), i].item() if dur is not None else 0)
                           for t, u, y, i in path))
    log_z = torch.tensor(weights, dtype=f64).logsumexp(0).item() if paths else -math.inf
    flows = torch.zeros(2, T * (U + 1), dtype=f64)
    taken = torch.zeros(T * (U + 1), len(durations or ()), dtype=f64)
    for path, w in zip(paths, weights):
        for t, u, y, i in path:
            p = math.exp(w - log_z) if log_z > -math.inf else 0.0
            flows[int(y), row(t, u)] += p
            if i is not None:
                taken[row(t, u), i] += p
    return log_z, *flows, taken


SHAPES = [(1, 0), (1, 3), (4, 0), (3, 2), (5, 4), (2, 5)]


@pytest.mark.parametrize("frames, labels", [*(((T,), (U,)) for T, U in SHAPES), tuple(zip(*SHAPES))])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_flows_are_those_of_every_path(frames, labels, scale):
    (blank, label), (starts, *lengths) = batch(frames, labels, scale=scale)
    got = node_flows(blank, label, starts, *lengths, max(frames) + 1, max(labels) + 2)
    for n, (T, U) in enumerate(zip(frames, labels)):
        rows = slice(int(starts[n]), int(starts[n + 1]))
        log_z, *flows, _ = by_paths(T, U, blank[rows], label[rows])
        assert math.isclose(got.log_z[n].item(), log_z, rel_tol=1e-13)
        torch.testing.assert_close(got.blank[rows], flows[0], rtol=1e-12, atol=1e-300)
        torch.testing.assert_close(got.label[rows], flows[1], rtol=1e-12, atol=1e-300)
    for t in got[1:]:
        assert (t[int(starts[-1]):] == 0).all()


@pytest.mark.parametrize("durations", [(0, 1, 2), (1, 2), (2,), (0, 1), (3, 0, 1), (0,), (4, 1)])
def test_flows_with_durations_are_those_of_every_path(durations):
    frames, labels = zip(*SHAPES)
    (blank, label, dur), (starts, *lengths) = batch(frames, labels, depth=(len(durations),), scale=3)
    got = duration_flows(blank, label, dur, durations, starts, *lengths, max(frames), max(labels))
    for n, (T, U) in enumerate(zip(frames, labels)):
        rows = slice(int(starts[n]), int(starts[n + 1]))
        log_z, *flows, taken = by_paths(T, U, blank[rows], label[rows], dur[rows], durations)
        assert got.log_z[n].item() == log_z or math.isclose(got.log_z[n].item(), log_z, rel_tol=1e-12)
        for t, e in zip((got.blank, got.label, got.durations, got.node), (*flows, taken, flows[0] + flows[1])):
            torch.testing.assert_close(t[rows], e, rtol=1e-12, atol=1e-300)
    assert all((t[int(starts[-1]):] == 0).all() for t in got[1:])


def test_invariants():
    T, U = 40, 17
    (blank, label), a = batch((T,), (U,), padding=0)
    got = node_flows(blank, label, *a, T, U)
    node = (got.blank + got.label).view(T, U + 1)
    for k in range(T + U):
        on = [node[k - u, u] for u in range(U + 1) if 0 <= k - u < T]
        assert math.isclose(sum(on), 1, rel_tol=1e-12)
    assert math.isclose(got.blank.sum(), T, rel_tol=1e-12) and math.isclose(got.label.sum(), U, rel_tol=1e-12)


def test_uniform_scores_count_the_paths():
    T, U = 30, 11
    zeros = torch.zeros(T * (U + 1), dtype=f64)
    got = node_flows(zeros, zeros, packed((T,), (U,)), torch.tensor([T]), torch.tensor([U]), T, U)
    assert math.isclose(got.log_z.item(), math.log(math.comb(T - 1 + U, U)), rel_tol=1e-13)


def test_gradient_of_log_z():
    "Flows are the derivatives of log Z by scores: by autograd through a plain loop."
    T, U = 6, 4
    (blank, label), a = batch((T,), (U,), padding=0)
    b, y = blank.clone().requires_grad_(), label.clone().requires_grad_()
    beta = {}
    for t, u in itertools.product(reversed(range(T)), reversed(range(U + 1))):
        arcs = []
        if (t, u) == (T - 1, U):
            arcs.append(b[t * (U + 1) + u])
        if t + 1 < T:
            arcs.append(b[t * (U + 1) + u] + beta[t + 1, u])
        if u < U:
            arcs.append(y[t * (U + 1) + u] + beta[t, u + 1])
        beta[t, u] = torch.stack(arcs).logsumexp(0)
    got = node_flows(blank, label, *a, T, U)
    for t, e in zip(got[1:], torch.autograd.grad(beta[0, 0], (b, y))):
        torch.testing.assert_close(t, e, rtol=1e-12, atol=1e-15)


def test_best_path():
    frames, labels = zip(*SHAPES)
    (blank, label), (starts, *lengths) = batch(frames, labels)
    got = node_flows(blank, label, starts, *lengths, 5, 5, Max)
    for n, (T, U) in enumerate(zip(frames, labels)):
        rows = slice(int(starts[n]), int(starts[n + 1]))
        weights = {}
        for path in every_path(T, U):
            weights[tuple(path)] = sum((label if y else blank)[rows][t * (U + 1) + u].item() for t, u, y, _ in path)
        best = max(weights, key=weights.get)
        assert math.isclose(got.log_z[n].item(), weights[best], rel_tol=1e-12)
        for t, u, y, _ in best:
            assert (got.label if y else got.blank)[rows][t * (U + 1) + u] == 1
        assert got.label[rows].sum() == U and got.blank[rows].sum() == T


def test_hostile_scores():
    "−∞ closes arcs; where no path is left log Z is −∞ and nothing flows; a NaN stays in its sequence."
    T, U = 4, 2
    (blank, label), a = batch((T,) * 4, (U,) * 4, dtype=f32)
    n = T * (U + 1)
    label[:n][1::3] = -math.inf  # sequence 0: its second label is never said
    blank[n] = -math.inf  # sequence 1: a label comes first
    blank[2 * n + 5], label[2 * n + 1] = math.nan, math.inf
    got = node_flows(blank, label, *a, T, U)
    assert got.log_z[0] == -math.inf and got.log_z[1].isfinite() and got.log_z[2].isnan() and got.log_z[3].isfinite()
    assert (got.blank[:n] == 0).all() and (got.label[:n] == 0).all()
    log_z, *flows, _ = by_paths(T, U, blank[n:2 * n].double(), label[n:2 * n].double())
    for t, e in zip(got[1:], flows):
        torch.testing.assert_close(t[n:2 * n].double(), e, rtol=1e-5, atol=1e-6)
        assert t[2 * n:3 * n].isnan().all() and t[3 * n:4 * n].isfinite().all()


def test_empty_batches_and_empty_sequences():
    empty = torch.zeros(0, dtype=torch.int64)
    got = node_flows(torch.zeros(0), torch.zeros(0), torch.zeros(1, dtype=torch.int64), empty, empty, 0, 0)
    assert [t.numel() for t in got] == [0, 0, 0]
    (blank, label), a = batch((0, 2, 0), (3, 1, 0), dtype=f32)
    got = node_flows(blank, label, *a, 2, 3)
    assert got.log_z.isneginf().tolist() == [True, False, True] and abs(got.blank[:4].sum() - 2) < 1e-6


def test_offsets_of_a_million_keep_flows():
    T, U = 20, 6
    (blank, label), a = batch((T,), (U,), padding=0)
    blank, label = ((t * 64).round() / 64 for t in (blank, label))
    got, moved = node_flows(blank, label, *a, T, U), node_flows(blank - 2.0**20, label - 2.0**20, *a, T, U)
    torch.testing.assert_close(moved.blank, got.blank, rtol=1e-8, atol=1e-10)
    assert math.isclose(moved.log_z, got.log_z - (T + U) * 2.0**20, rel_tol=1e-14)


def test_error_in_float32():
    "At 250 frames and 100 labels flows have errors of 2e-6, where exp(α + β − log Z) has 1e-3."
    T, U, V = 250, 100, 1024
    made = torch.Generator().manual_seed(0)
    lse = torch.full((T * (U + 1),), math.log(V) + 0.5, dtype=f64)
    blank, label = (torch.randn(T * (U + 1), generator=made, dtype=f64) - lse for _ in range(2))
    a = packed((T,), (U,)), torch.tensor([T]), torch.tensor([U])
    exact, got = (node_flows(blank.to(d).to(to), label.to(d).to(to), *a, T, U) for d, to in ((f32, f64), (f32, f32)))
    assert max((g.double() - e).abs().max().item() for g, e in zip(got[1:], exact[1:])) < 5e-6
    assert abs(got.log_z.double() - exact.log_z).item() < 2e-3
