"""Scans: sums over paths and their gradient by hand, against a list of all paths; the kernel's source, run on a CPU."""
import ctypes
import math
import shutil
import subprocess
from functools import cache, partial
from itertools import product

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings, strategies as st

import fusedloss.kernels
import fusedloss.scans
from fusedloss.core.cuda import CompiledByTorch, cuda_source
from fusedloss.scans import Fused, edge_slots, fused_shape, logz, logz_autograd, path_score, posteriors, sample, scan_bwd, scan_fwd, scan_fwd_triton, transpose, viterbi
from fusedloss.semirings import Count, Entropy, KBest, Log, Max, Real, Sample, brute_force, path_sum
from workbook.measure import peak_memory, saved_tensors
from grids import few, FULL, thorough_but
from helpers import everywhere, fault_of, hidden_from_hooks, planted, unchanged
from on_cpu import build, check_nvcc, STANDARD

INF = math.inf
ROOM = 232448  # bytes of shared memory that a block may have on an H200
on_any = settings(max_examples=60 if FULL else 25, deadline=None, derandomize=True)


@st.composite
def graphs(draw, dtype=torch.float64, integers=False, steps=6):
    "Scores, edges, start, end and lengths: holes, parallel edges, unreachable states, NaN beyond the ends"
    t, n, c, nz = (draw(st.integers(*r)) for r in ((0, steps), (0, 3), (1, 3), (1, 2)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    holes, scale = draw(st.sampled_from([0.0, 0.2, 0.7])), draw(st.sampled_from([1.0, 30.0]))

    def scores(*shape):
        x = torch.randint(0, 2, shape, generator=g).to(dtype) if integers else torch.randn(shape, generator=g, dtype=dtype) * scale
        return torch.where(torch.rand(shape, generator=g) < holes, -INF, x)

    lengths = torch.tensor(draw(st.lists(st.integers(0, t), min_size=n, max_size=n)), dtype=torch.int64)
    Ms, idx = scores(t, n, c, nz), torch.randint(-1, c, (c, nz), generator=g)
    Ms[torch.arange(t)[:, None] >= lengths] = math.nan
    return (Ms, idx, scores(n, c), scores(n, c)), lengths


def sequence(graph, lengths, n):
    "One of a batch, cut at its length"
    Ms, idx, v0, vT = graph
    return Ms[:lengths[n], n:n + 1], idx, v0[n:n + 1], vT[n:n + 1]


def graded(program, graph, S, g=None, **options):
    "Sums, and the gradients of scores, start and end"
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in graph]
    out = program(*leaves, S, **options)
    return out.detach(), *torch.autograd.grad(out, [t for t in leaves if t.requires_grad], torch.arange(len(out)).to(out) - 0.5 if g is None else g, materialize_grads=True)


# the sums and their gradients

@pytest.mark.parametrize("program", [logz, logz_autograd])
@on_any
@given(case=graphs())
def test_each_sequence_is_the_list_of_its_paths(program, case):
    graph, lengths = case
    for S in (Log, Max):
        z, *slopes = graded(program, graph, S, lengths=lengths)
        assert all(s.isfinite().all() for s in slopes)
        for n, steps in enumerate(lengths.tolist()):
            truth, d_Ms, d_v0, d_vT = graded(brute_force, sequence(graph, lengths, n), S, g=torch.tensor([n - 0.5], dtype=torch.float64))
            close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
            close(z[n:n + 1], truth)
            close(slopes[0][:steps, n:n + 1], d_Ms)
            close(slopes[1][n:n + 1], d_v0)
            close(slopes[2][n:n + 1], d_vT)
            assert not slopes[0][steps:, n].any()
        assert (slopes[0][:, :, graph[1] < 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@on_any
@given(data=st.data())
def test_a_sequence_alone_is_itself_in_a_batch(dtype, data):
    graph, lengths = data.draw(graphs(dtype))
    for S in (Log, Max):
        together = graded(logz, graph, S, lengths=lengths)
        for n, steps in enumerate(lengths.tolist()):
            z, d_Ms, *ends = graded(logz, sequence(graph, lengths, n), S, g=torch.tensor([n - 0.5], dtype=dtype))
            parts = together[0][n:n + 1], together[1][:steps, n:n + 1], *(t[n:n + 1] for t in together[2:])
            torch.testing.assert_close(parts, (z, d_Ms, *ends))


@pytest.mark.parametrize("C, nz", [(1, 1), (7, 3), (47, 5), (1500, 3)])
def test_larger_graphs_against_autograd(C, nz, device):
    g = torch.Generator().manual_seed(C)
    T, N = 9, 5
    Ms, idx = torch.randn(T, N, C, nz, generator=g, dtype=torch.float64).to(device), torch.randint(-1, C, (C, nz), generator=g).to(device)
    lengths = torch.tensor([9, 0, 3, 8, 9]).to(device)
    for S in (Log, Max):
        case = Ms, idx, *torch.randn(2, N, C, generator=g, dtype=torch.float64).to(device)
        for a, b in zip(graded(logz, case, S, lengths=lengths), graded(logz_autograd, case, S, lengths=lengths)):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        for a, b in zip(graded(logz, case, S), graded(path_sum, case, S)):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        for a, b in zip(graded(logz, case, S), graded(logz, case, S)):
            assert torch.equal(a, b), "two runs differ"


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)])
def test_first_and_second_derivatives_against_differences(wanted):
    g = torch.Generator().manual_seed(0)
    idx = torch.tensor([[0, 1], [0, 2], [0, -1]])  # parallel edges, an absent one, uneven rows
    leaves = [torch.randn(*s, dtype=torch.float64, generator=g).requires_grad_(w) for s, w in zip(((3, 2, 3, 2), (2, 3), (2, 3)), wanted)]

    def f(Ms, v0, vT):
        return logz(Ms.masked_fill(torch.arange(3)[:, None, None, None] == 1, -INF).where(idx.bool(), Ms), idx, v0, vT, Log, torch.tensor([3, 1]))
    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)


def test_higher_derivatives_are_those_of_autograd():
    g = torch.Generator().manual_seed(1)
    idx = torch.tensor([[0, 1], [1, 1]])
    ends = torch.randn(2, 2, 2, dtype=torch.float64, generator=g)

    def third(program):
        Ms = torch.randn(3, 2, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
        value = program(Ms * Ms, idx, *ends)
        for _ in range(3):
            value, = torch.autograd.grad(value.square().sum(), Ms, create_graph=True)
        return value
    torch.testing.assert_close(third(logz), third(path_sum))


@pytest.mark.parametrize("S", [Log, Max], ids=str)
@pytest.mark.parametrize("steps", [0, 3])
def test_second_derivatives_with_a_start_that_is_the_end(S, steps):
    idx, g = torch.tensor([[0, 1], [1, -1]]), torch.Generator().manual_seed(3)
    Ms, ends = (torch.randn(*s, dtype=torch.float64, generator=g).requires_grad_() for s in ((steps, 2, 2, 2), (2, 2)))

    def second(program):
        z = program(Ms, idx, ends, ends, S)
        first = torch.autograd.grad(z.square().sum(), (Ms, ends), create_graph=True, materialize_grads=True)
        return torch.autograd.grad(sum(t.square().sum() for t in first), (Ms, ends), materialize_grads=True)
    for a, b in zip(second(logz), second(path_sum)):
        torch.testing.assert_close(a, b)


def test_a_sample_has_no_second_derivative():
    Ms = torch.zeros(2, 1, 2, 2, requires_grad=True)
    d, = torch.autograd.grad(logz(Ms, torch.tensor([[0, 1], [0, 1]]), *torch.zeros(2, 1, 2), Sample()).sum(), Ms, create_graph=True)
    with pytest.raises(ValueError, match="Log or Max for a second derivative"):
        d.sum().backward()


@on_any
@given(case=graphs(), seed=st.integers(0, 1000))
def test_the_gradient_of_a_sample_is_a_path(case, seed):
    graph, lengths = case
    z, d_Ms, d_v0, d_vT = graded(logz, graph, Sample(torch.Generator().manual_seed(seed)), g=torch.ones(len(lengths), dtype=torch.float64), lengths=lengths)
    for n, steps in enumerate(lengths.tolist()):
        exists = bool(z[n] > -INF)
        assert d_v0[n].sum() == d_vT[n].sum() == exists
        assert torch.equal(d_Ms[:steps, n].sum((1, 2)), torch.full((steps,), float(exists), dtype=torch.float64))
        if exists:
            state = d_v0[n].argmax().item()
            for step in d_Ms[:steps, n]:
                c, j = divmod(step.flatten().argmax().item(), graph[1].shape[1])
                assert graph[1][c, j] == state
                state = c
            assert d_vT[n, state] == 1


@pytest.mark.parametrize("S", [Real, Count, Entropy, KBest(3)], ids=str)
def test_other_semirings_take_the_loop(S):
    g = torch.Generator().manual_seed(3)
    graph = torch.randn(4, 2, 3, 2, dtype=torch.float64, generator=g), torch.randint(-1, 3, (3, 2), generator=g), *torch.randn(2, 2, 3, dtype=torch.float64, generator=g)
    torch.testing.assert_close(logz(*graph, S), brute_force(*graph, S))
    cut = logz(*graph, S, torch.tensor([4, 2]))
    torch.testing.assert_close(cut[..., 1:], brute_force(*sequence(graph, [4, 2], 1), S))


def test_a_relative_of_log_with_a_product_of_its_own_takes_the_loop():
    class Doubled(type(Log)):
        def mul(self, a, b): return a + 2 * b
    S, graph = Doubled(), (torch.ones(2, 1, 1, 1), torch.zeros(1, 1).long(), *torch.zeros(2, 1, 1))
    assert logz(*graph, S).item() == 4


def half_graph(dtype, device="cpu", T=120, N=2, C=4, nz=3):
    "Scores of 16 bits whose sums over paths are in the hundreds, and the same numbers in float64"
    g = torch.Generator().manual_seed(3)
    graph = [torch.randn(T, N, C, nz, generator=g).add(1).to(dtype), torch.randint(-1, C, (C, nz), generator=g), *torch.randn(2, N, C, generator=g).to(dtype)]
    graph[1][:, 0] = torch.arange(C)  # each state has a path
    graph = [t.to(device) for t in graph]
    return graph, [t.double() if t.is_floating_point() else t for t in graph]


def off_in_float32(got, exact, T):
    "The largest error, as a share of what T steps in float32 may lose"
    got, exact = got.double(), exact.double()
    return ((got - exact).abs() / exact.abs().clamp(min=1)).max().item() / (2 * T * 2**-24)


class Loudest(type(Max)):
    "A semiring of a user, with values of its own"
    additive = False
    def sum(self, x, dim=-1): return x.amax(dim)


HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@HALF
@pytest.mark.parametrize("method", ["auto", "autograd", "loop"])
def test_sums_of_half_precisions_are_those_of_float32(dtype, method, device):
    for lengths in (None, torch.tensor([120, 91])):
        graph, exact = half_graph(dtype, device)
        for S in (Log, Max):
            z, *slopes = graded(partial(logz, method=method), graph, S, lengths=lengths)
            truth, *want = graded(logz, exact, S, lengths=lengths)
            assert z.dtype == torch.float32 and off_in_float32(z, truth, 120) < 1
            for a, b in zip(slopes, want):  # a probability: e to a sum's error; and the last rounding to 16 bits
                assert a.dtype == dtype
                assert (a.double() - b).abs().max() < 1.5 * torch.finfo(dtype).eps + 4 * 120 * 2**-24 * truth.abs().max()
    ones = torch.ones(2500, 1, 1, 1, dtype=dtype, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device), *torch.zeros(2, 1, 1, dtype=dtype, device=device)
    assert logz(*ones, method=method).item() == 2500


@HALF
@pytest.mark.parametrize("S", [Log, Max, Entropy, KBest(2), Loudest()], ids=repr)
def test_every_semiring_sums_half_precisions_in_float32(dtype, S, device):
    graph, exact = half_graph(dtype, device)
    for program in (path_sum, logz, partial(logz, lengths=torch.tensor([120, 70]))):
        got, want = program(*graph, S=S), program(*exact, S=S)
        assert got.dtype == torch.float32 and off_in_float32(got, want, 120) < 2
    short, exact = half_graph(dtype, device, T=3)
    for S in (S, Real):
        assert off_in_float32(path_sum(*short, S), brute_force(*exact, S), 20) < 1
        assert off_in_float32(brute_force(*short, S), brute_force(*exact, S), 20) < 1
    assert logz(*short, Count).dtype == torch.int64 and torch.equal(logz(*short, Count), logz(*exact, Count))


@HALF
def test_paths_and_posteriors_of_half_precisions_are_those_of_float32(dtype, device):
    for lengths in (None, torch.tensor([120, 91])):
        graph, exact = half_graph(dtype, device)
        best, drawn = viterbi(*graph, lengths), sample(*graph, lengths=lengths)
        for path, truth in ((best, viterbi(*exact, lengths).score), (drawn, path_score(exact[0], *exact[2:], drawn.states, drawn.edges))):
            assert path.score.dtype == torch.float32 and off_in_float32(path.score, truth, 120) < 1
            assert off_in_float32(path.score, path_score(exact[0], *exact[2:], path.states, path.edges), 120) < 1
        found, want = posteriors(*graph, lengths), posteriors(*exact, lengths)
        for a, b in zip(found, want):
            assert a.dtype == torch.float32 and (a.double() - b).abs().max() < 120 * 2**-24 * 1000
        steps = found.states[:92].sum(-1)
        assert (steps - 1).abs().max() < 120 * 2**-24 * 1000


def test_strided_and_expanded_inputs(device):
    g = torch.Generator().manual_seed(5)
    plain = torch.randn(4, 3, 5, 2, generator=g), torch.randint(-1, 5, (5, 2), generator=g), torch.randn(1, 5, generator=g).expand(3, 5), torch.randn(3, 5, generator=g)
    plain = [t.to(device) for t in plain]
    strided = [plain[0].permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), plain[1].T.contiguous().T.int(), plain[2], plain[3].T.contiguous().T]
    for a, b in zip(graded(logz, plain, Log), graded(logz, strided, Log)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("nz", [1, 3, 5])
def test_only_a_number_for_each_state_is_saved(nz, device):
    T, N, C = 6, 2, 4
    Ms = torch.randn(T, N, C, nz, device=device, requires_grad=True)
    graph = torch.zeros(C, nz, dtype=torch.int64, device=device), *torch.zeros(2, N, C, device=device)
    saved = saved_tensors(lambda: logz(Ms, *graph, method="loop"), Ms, *graph)
    assert [t.shape for t in saved] == [(T + 1, N, C)]


def test_no_path_harms_nobody(device):
    graph = [t.to(device) for t in (torch.randn(5, 3, 4, 2, dtype=torch.float64), torch.randint(0, 4, (4, 2)), *torch.zeros(2, 3, 4, dtype=torch.float64))]
    alone = graded(logz, [graph[0][:, :1], graph[1], graph[2][:1], graph[3][:1]], Log, g=torch.tensor([-0.5], dtype=torch.float64, device=device))
    graph[0][2, 1], graph[3][2] = -INF, -INF
    z, d_Ms, d_v0, d_vT = graded(logz, graph, Log)
    assert z[1:].tolist() == [-INF, -INF] and not d_Ms[:, 1:].any() and not d_v0[1:].any() and not d_vT[1:].any()
    torch.testing.assert_close((z[:1], d_Ms[:, :1]), tuple(alone[:2]))


def test_nan_within_a_sequence_stays_visible(device):
    Ms = torch.zeros(3, 2, 2, 2, device=device)
    Ms[1, 0, 1, 1] = math.nan
    graph = torch.tensor([[0, 1], [0, 1]], device=device), *torch.zeros(2, 2, 2, device=device)
    for S in (Log, Max):
        assert logz(Ms, *graph, S).isnan().tolist() == [True, False]


# the transposed graph

@settings(max_examples=200 if FULL else 60, deadline=None, derandomize=True)
@given(data=st.data())
def test_transpose_against_a_list(data):
    c, nz = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 4))
    idx = torch.tensor(data.draw(st.lists(st.integers(-1, c - 1), min_size=c * nz, max_size=c * nz)), dtype=data.draw(st.sampled_from([torch.int64, torch.int32]))).view(c, nz)
    start, edge = transpose(idx)
    assert start.shape == (c + 1,) and edge.shape == (c * nz,) and start.dtype == edge.dtype == torch.int64
    for a in range(c):
        assert edge[start[a]:start[a + 1]].tolist() == [at for at, source in enumerate(idx.flatten().tolist()) if source == a]
    assert sorted(edge.tolist()) == list(range(c * nz)) and all(idx.flatten()[e] < 0 for e in edge[start[c]:])


# paths

@on_any
@given(case=graphs(integers=True), seed=st.integers(0, 1000))
def test_paths_connect_under_ties(case, seed):
    graph, lengths = case
    Ms, idx, v0, vT = graph
    best = logz(*graph, Max, lengths)
    for paths in (viterbi(*graph, lengths), sample(*graph, torch.Generator().manual_seed(seed), lengths)):
        assert paths.states.shape == (len(v0), len(Ms) + 1) and paths.edges.shape == (len(v0), len(Ms))
        for n, steps in enumerate(lengths.tolist()):
            states, edges = paths.states[n].tolist(), paths.edges[n].tolist()
            assert (best[n] == -INF) == (states[0] == -1)
            if states[0] == -1:
                assert set(states) | set(edges) <= {-1} and paths.score[n] == -INF
                continue
            assert states[steps + 1:] == edges[steps:] == [-1] * (len(Ms) - steps)
            assert all(idx[c, j] == a for a, c, j in zip(states, states[1:steps + 1], edges))
            along = [Ms[t, n, c, j].item() for t, (c, j) in enumerate(zip(states[1:steps + 1], edges))]
            assert v0[n, states[0]].item() + sum(along) + vT[n, states[steps]].item() == paths.score[n].item() > -INF
    assert torch.equal(viterbi(*graph, lengths).score, best)


def test_the_best_path_is_the_one_that_the_gradient_marks(device):
    g = torch.Generator().manual_seed(0)
    graph = [t.to(device) for t in (torch.randint(0, 2, (6, 40, 3, 2), generator=g).float(), torch.randint(0, 3, (3, 2), generator=g), *torch.zeros(2, 40, 3))]
    marks = graded(logz, graph, Max, g=torch.ones(40, device=device))[1]
    paths = viterbi(*graph)
    t, n = torch.arange(6, device=device), torch.arange(40, device=device)[:, None]
    assert (marks[t, n, paths.states[:, 1:], paths.edges] == 1).all() and marks.sum() == 240


def test_samples_have_the_frequencies_of_their_posteriors(device):
    n, g = 20000, torch.Generator().manual_seed(1)
    Ms, idx = torch.randn(4, 1, 3, 2, dtype=torch.float64, generator=g).to(device), torch.tensor([[0, 1], [0, 2], [1, 1]], device=device)
    ends = torch.randn(2, 1, 3, dtype=torch.float64, generator=g).to(device)
    p = posteriors(Ms, idx, *ends)
    drawn = sample(Ms.expand(-1, n, -1, -1), idx, *ends.expand(-1, n, -1), torch.Generator(device).manual_seed(0))
    hot = torch.nn.functional.one_hot(drawn.states[:, 1:] * 2 + drawn.edges, 6).double().mean(0).view(4, 3, 2)
    assert ((hot - p.edges[:, 0]).abs() <= 5 * (p.edges[:, 0] * (1 - p.edges[:, 0]) / n).sqrt() + 1e-9).all()


@on_any
@given(case=graphs())
def test_posteriors_sum_to_one(case):
    graph, lengths = case
    p, z = posteriors(*graph, lengths), logz(*graph, Log, lengths)
    for n, steps in enumerate(lengths.tolist()):
        expected = torch.zeros(len(graph[0]) + 1, dtype=torch.float64)
        expected[:steps + 1] = float(z[n] > -INF)
        torch.testing.assert_close(p.states[:, n].sum(-1), expected)
    torch.testing.assert_close(p.edges, graded(logz, graph, Log, g=torch.ones(len(z), dtype=torch.float64), lengths=lengths)[1])


def test_score_of_a_path_is_differentiable():
    Ms = torch.randn(3, 1, 2, 2, requires_grad=True)
    graph = torch.tensor([[0, 1], [0, 1]]), *torch.zeros(2, 1, 2)
    best = viterbi(Ms, *graph)
    d, = torch.autograd.grad(path_score(Ms, *graph[1:], best.states, best.edges).sum(), Ms)
    assert torch.equal(d, graded(logz, (Ms, *graph), Max, g=torch.ones(1))[1])


# bad input

@pytest.mark.parametrize("lengths, match", [([2, 4], r"lengths\[1\] is 4: expected 0 ≤ length ≤ 3"), ([-1, 2], r"lengths\[0\] is -1"), ([1], "lengths: expected 2 integers"),
                                            ([1.0, 2.0], "lengths: expected 2 integers"), ([[1, 2]], "lengths: expected 2 integers"), ([True, False], "lengths: expected 2 integers")])
@pytest.mark.parametrize("program", [logz, logz_autograd, viterbi, posteriors, sample])
def test_bad_lengths_are_named(program, lengths, match):
    with pytest.raises(ValueError, match=match):
        program(torch.zeros(3, 2, 1, 1), torch.zeros(1, 1).long(), *torch.zeros(2, 2, 1), lengths=torch.tensor(lengths))


@pytest.mark.parametrize("program", [logz, viterbi, posteriors, sample])
def test_bad_graphs_are_named(program):
    with pytest.raises(IndexError, match=r"idx\[1, 0\] is 2"):
        program(torch.zeros(1, 1, 2, 1), torch.tensor([[0], [2]]), *torch.zeros(2, 1, 2))
    with pytest.raises(ValueError, match="vT"):
        program(torch.zeros(1, 1, 2, 1), torch.tensor([[0], [1]]), torch.zeros(1, 2), torch.zeros(1, 3))


def test_lengths_may_be_a_list_and_of_any_integer_type():
    graph = torch.ones(3, 2, 1, 1), torch.zeros(1, 1).long(), *torch.zeros(2, 2, 1)
    for lengths in ([3, 1], (3, 1), torch.tensor([3, 1], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.uint8)):
        assert logz(*graph, lengths=lengths).tolist() == [3, 1]


def test_wrong_lengths_on_a_gpu_are_nan():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    graph = [t.cuda() for t in (torch.ones(3, 3, 1, 1), torch.zeros(1, 1).long(), *torch.zeros(2, 3, 1))]
    assert logz(*graph, lengths=torch.tensor([4, 2, -1]).cuda()).isnan().tolist() == [True, False, True]


# the kernel

VARIANTS = [(real, S, backward) for real in ("float", "double") for S in ("Log", "Max") for backward in (0, 1)]


COMPILED = [(arch, *variant) for arch in (75, 80, 90, 100) for variant in VARIANTS]


@pytest.mark.parametrize("arch, real, S, backward", few(COMPILED, (75, "float", "Log", 1), (90, "double", "Max", 0)))
def test_the_kernel_compiles_without_a_gpu(arch, real, S, backward):
    check_nvcc(arch, cuda_source("sparse_scan"), dict(REAL=real, SEMIRING=S, BACKWARD=backward))


FUSED = [(real, S, phase) for real in ("float", "double") for S, phases in (("Log", (0, 1, 2)), ("Max", (0, 2, 3))) for phase in phases]
COMPILED = [(arch, *variant, *size) for arch in (75, 80, 90, 100) for variant in FUSED for size in ((201, 3), (1024, 5))]


@pytest.mark.parametrize("arch, real, S, phase, c, nz", few(COMPILED, (75, "float", "Log", 2, 201, 3), (80, "double", "Max", 3, 201, 3), (90, "float", "Max", 2, 1024, 5),
                                                            (100, "double", "Log", 1, 1024, 5)))
def test_the_fused_kernel_compiles_without_a_gpu(arch, real, S, phase, c, nz):
    cut = fused_shape(c, nz, dict(Log=Log, Max=Max)[S], dict(float=4, double=8)[real], 10**6)
    check_nvcc(arch, cuda_source("sparse_logz"), dict(REAL=real, SEMIRING=S, PHASE=phase, NZ=nz, PER=cut.per, THREADS=cut.threads, AHEAD=cut.ahead))


# Blocks of a few threads, for more states than threads; blocks run one after another.
SHIM = """
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(n)
#ifndef THREADS
#define THREADS 3
#endif
struct Index { int x; };
static Index blockIdx, gridDim, blockDim = {THREADS};
static thread_local Index threadIdx;
static std::barrier threads(THREADS);
template <class To, class From> static To bits(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
static float __int_as_float(int i) { return bits<float>(i); }
static int __float_as_int(float x) { return bits<int>(x); }
static double __longlong_as_double(long long i) { return bits<double>(i); }
static long long __double_as_longlong(double x) { return bits<long long>(x); }
static void __syncthreads() { threads.arrive_and_wait(); }
template <class Body> static void over_blocks(int blocks, Body body) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    std::vector<std::thread> block;
    for (int k = 0; k < THREADS; k++) block.emplace_back([=] { threadIdx.x = k, body(); });
    for (auto& thread : block) thread.join();
  }
}
"""
SHIMS = {"sparse_scan": SHIM + """
#include "sparse_scan.cu"
extern "C" void run(int blocks, int, const real* a, const int* b, const long long* c, real* d, const long long* e, const long long* f, real* g,
                    real* h, int T, int C, int nz) {
  over_blocks(blocks, [=] { sparse_scan(a, b, c, d, e, f, g, h, T, C, nz); });
}
int main() {  // a ring of 8 states over 20 steps, for a detector of races
  constexpr int T = 20, C = 8, nz = 2;
  std::vector<real> scores(T * C * nz), alphas((T + 1) * C), state(C, 1), d(T * C * nz);
  std::vector<int> idx(C * nz);
  std::vector<long long> start(C + 1), edge(C * nz);
  for (int c = 0; c < C; c++) idx[c * nz] = c, idx[c * nz + 1] = (c + C - 1) % C;
  for (int a = 0; a < C; a++) start[a + 1] = start[a] + nz, edge[a * nz] = a * nz, edge[a * nz + 1] = (a + 1) % C * nz + 1;
  run(1, 0, scores.data(), idx.data(), nullptr, alphas.data(), start.data(), edge.data(), state.data(), d.data(), T, C, nz);
  return 0;
}
""", "sparse_logz": SHIM + """
#include "sparse_logz.cu"
unsigned char memory[1 << 21] __attribute__((aligned(16)));  // of a block; a block must not need what is not its own
extern "C" int run(int blocks, int shared, const real* a, const int* b, const i64* c, const i64* d, const i64* e, const real* f, const real* g,
                   real* h, real* i, real* j, real* k, const real* l, real* m, real* n, i64* o, i64* p, int T, int N, int C, int held) {
  memset(memory, 0xff, sizeof memory);  // NaN, and what lies beyond must stay so
  over_blocks(blocks, [=] { sparse_logz(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, T, N, C, held); });
  for (size_t at = shared; at < sizeof memory; at++) if (memory[at] != 0xff) return 1;
  return 0;
}
int main() {  // a ring of 8 states over 41 steps; the edges that leave state 1 are beyond its rectangle
  constexpr int T = 41, C = 8, W = C * NZ;
  std::vector<real> scores(T * W), d(T * W), ends(6 * C), middle(4 * C), total(2), z(1), g(1, 1);
  std::vector<int> slots(4 * W);
  std::vector<i64> start(C + 1), edge(W), states(T + 1), edges(T);
  for (int c = 0; c < C; c++)
    for (int j = 0; j < NZ; j++) {
      slots[j * C + c] = (c + j) % C, slots[W + j * C + c] = c * NZ + j;
      slots[2 * W + j * C + c] = (c + C - j) % C, slots[3 * W + j * C + c] = (c + C - j) % C * NZ + j;
    }
  for (int a = 2; a <= C; a++) start[a] = 2 * NZ;
  for (int j = 0; j < NZ; j++) edge[NZ + j] = slots[3 * W + j * C + 1], slots[2 * W + j * C + 1] = C, slots[3 * W + j * C + 1] = W;
  run(SEMIRING::MEETS && PHASE != 1 ? 2 : 1, 0, scores.data(), slots.data(), start.data(), edge.data(), nullptr, ends.data(), &ends[C], d.data(),
      middle.data(), total.data(), z.data(), g.data(), &ends[2 * C], &ends[3 * C], states.data(), edges.data(), T, 1, C, PHASE == 3 ? C : W);
  return 0;
}
"""}


@pytest.fixture(scope="module")
def on_cpu():
    "The kernel as C++: a launcher for each variant, like that of `cuda_kernel`"
    if not shutil.which("g++") or subprocess.run(["g++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-"], input=b"#include <barrier>", capture_output=True).returncode:
        pytest.skip("no g++ with C++20 on this machine")
    command = *STANDARD, "-O0", "-shared", "-fPIC", "-pthread"

    @cache
    def library(name, constants):
        return ctypes.CDLL(str(build(command, {f"{name}.cu": cuda_source(name), "shim.cpp": SHIMS[name]}, "shim.cpp", dict(constants))))

    def kernel(name, device, **constants):
        if "THREADS" in constants:  # three do the work of many
            constants["PER"] = -(-constants["THREADS"] * constants["PER"] // 3)
            constants["THREADS"] = 3

        def launch(grid, block, *args, shared=0):
            assert 32 <= block <= 1024 and block % 32 == 0
            pointers = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in args]
            beyond = library(name, tuple(constants.items())).run(grid, shared, *pointers)
            assert name == "sparse_scan" or not beyond, "more shared memory than was asked for"
        return launch
    return kernel


def races(name, constants, *pairs):
    "What a detector of races says of the kernel's source with texts replaced; None where there is no detector"
    if not shutil.which("g++"):
        return None
    source = cuda_source(name)
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in source
        source = source.replace(old, new)
    command = *STANDARD, "-O1", "-g", "-pthread", "-fsanitize=thread"
    try:
        program = build(command, {f"{name}.cu": source, "shim.cpp": SHIMS[name]}, "shim.cpp", dict(REAL="float", **constants))
    except AssertionError:
        return None
    done = subprocess.run([str(program)], capture_output=True, text=True)
    return None if "FATAL" in done.stderr else done.stderr


@pytest.mark.parametrize("backward", few([0, 1], 1))
def test_threads_of_a_block_do_not_race(backward):
    planted_race = races("sparse_scan", dict(SEMIRING="Log", BACKWARD=backward), "__syncthreads();", "")
    if planted_race is None:
        pytest.skip("no g++ with a detector of races on this machine")
    assert "data race" in planted_race
    for S in few(["Log", "Max"], "Log"):
        assert races("sparse_scan", dict(SEMIRING=S, BACKWARD=backward)) == ""


@pytest.mark.parametrize("S, phase", few([("Log", 0), ("Log", 1), ("Log", 2), ("Max", 0), ("Max", 2), ("Max", 3)], ("Log", 0)))
def test_threads_of_the_fused_kernel_do_not_race(S, phase):
    constants = dict(SEMIRING=S, PHASE=phase, NZ=3, PER=3, THREADS=3, AHEAD=3)
    planted_race = races("sparse_logz", constants, "__syncthreads();", "")
    if planted_race is None:
        pytest.skip("no g++ with a detector of races on this machine")
    assert "data race" in planted_race
    assert races("sparse_logz", constants) == ""


ROWS = [("fetch(s + AHEAD);", "fetch(s + AHEAD + 1);"), ("grad_rows + (s & 1) * width", "grad_rows"), ("cells + (~s & 1) * (C + 2)", "cells + (s & 1) * (C + 2)")]


def test_rows_are_not_overwritten_while_they_are_read():
    constants = dict(SEMIRING="Log", PHASE=2, NZ=3, PER=3, THREADS=3, AHEAD=3)
    if races("sparse_logz", constants) is None:
        pytest.skip("no g++ with a detector of races on this machine")
    for old, new in few(ROWS, ROWS[1]):
        assert "data race" in races("sparse_logz", constants, old, new), old


@pytest.fixture
def with_kernel(on_cpu, monkeypatch):
    "The library as it is on a GPU, with the kernel's source on the CPU"
    everywhere(monkeypatch, fusedloss.scans, "cuda_kernel", on_cpu)
    everywhere(monkeypatch, fusedloss.scans, "runs_kernel", lambda Ms, S: Ms.numel() > 0 and type(S) in (type(Log), type(Max)))
    everywhere(monkeypatch, fusedloss.scans, "shared_memory_limit", lambda device: ROOM)


LOOPS = [(method, S, dtype, tolerance) for method in ("scan", "auto") for S in (Log, Max) for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12))]


@pytest.mark.parametrize("method, S, dtype, tolerance", few(LOOPS, LOOPS[0], LOOPS[3], LOOPS[4], LOOPS[6]), ids=str)
def test_the_source_of_the_kernel_is_the_loop(S, dtype, tolerance, method, with_kernel):
    @on_any
    @given(case=graphs(dtype))
    def check(case):
        graph, lengths = case
        for options in (dict(lengths=lengths), {}):
            if not options and graph[0].isnan().any():
                continue
            for a, b in zip(graded(logz, graph, S, method=method if graph[0].numel() else "auto", **options), graded(logz_autograd, graph, S, **options)):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * 30)
    check()


@pytest.mark.parametrize("method, C", few([("scan", 1500), ("fused", 900), ("fused", 600)], ("scan", 1500), ("fused", 600)))
def test_the_source_of_the_kernel_with_many_states_and_a_star(method, C, with_kernel):
    g = torch.Generator().manual_seed(0)
    for idx in (torch.randint(-1, C, (C, 3), generator=g), torch.zeros(C, 3, dtype=torch.int32)):
        graph = torch.randn(3, 2, C, 3, generator=g, dtype=torch.float64), idx, *torch.randn(2, 2, C, generator=g, dtype=torch.float64)
        for S in (Log, Max):
            for a, b in zip(graded(logz, graph, S, method=method), graded(path_sum, graph, S)):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


SIZES = [(*size, dtype) for size in ((1, 1, 1, 2), (30, 3, 7, 3), (17, 2, 33, 5), (9, 2, 20, 24), (40, 2, 5, 2)) for dtype in (torch.float32, torch.float64)]


@pytest.mark.parametrize("T, N, C, nz, dtype", few(SIZES, (1, 1, 1, 2, torch.float32), (30, 3, 7, 3, torch.float32)))
def test_the_fused_kernel_against_fp64_autograd(T, N, C, nz, dtype, with_kernel):
    g = torch.Generator().manual_seed(C)
    idx, lengths = torch.randint(-1, C, (C, nz), generator=g), torch.randint(0, T + 1, (N,), generator=g)
    graph = (torch.randn(T, N, C, nz, generator=g) * 5).to(dtype), idx, *torch.randn(2, N, C, generator=g).to(dtype)
    exact = [t.double() if t.is_floating_point() else t for t in graph]
    for S, options in product((Log, Max), (dict(lengths=lengths), {})):
        ours, truth = (graded(logz, graph, S, method="fused", **options), graded(logz_autograd, exact if S is Log else graph, S, **options))
        torch.testing.assert_close(ours[0].double(), truth[0].double(), rtol=1e-6, atol=1e-6)
        for a, b in zip(ours[1:], truth[1:]):
            torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=1e-6 * N if dtype == torch.float32 else 1e-12)
        for a, b in zip(ours, graded(logz, graph, S, method="fused", **options)):
            assert torch.equal(a, b), "two runs differ"
        for n in range(N):
            steps = int(lengths[n]) if options else T
            if steps:
                one = graded(logz, sequence(graph, [steps] * N, n), S, method="fused", g=torch.tensor([n - 0.5], dtype=dtype))
                assert torch.equal(one[0], ours[0][n:n + 1]) and torch.equal(one[1], ours[1][:steps, n:n + 1])


@pytest.mark.parametrize("scale", few([1, 5, 20, 60], 5, 60))
def test_digits_that_logarithms_lose(scale, with_kernel):
    T, C, g = 300, 21, torch.Generator().manual_seed(0)
    idx, (v0, vT) = torch.arange(C)[:, None] - torch.arange(3), torch.full((2, 1, C), -INF)
    v0[:, :2], vT[:, -2:] = 0, 0
    graph = (torch.randn(T, 1, C, 3, generator=g) * scale).log_softmax(2), idx.clamp(min=-1), v0, vT
    exact = [t.double() if t.is_floating_point() else t for t in graph]
    truth = graded(logz_autograd, exact, Log, g=torch.ones(1, dtype=torch.float64))[1]
    fused, scan = ((graded(logz, graph, Log, method=m, g=torch.ones(1))[1] - truth).abs().max() for m in ("fused", "scan"))
    assert fused < 2e-6 and scan > 2 * fused


@pytest.mark.parametrize("big", [-1e4, -1e30, -3e38, 1e4, 1e20])
def test_large_scores_in_the_fused_kernel(big, with_kernel):
    g = torch.Generator().manual_seed(0)
    graph = torch.randn(9, 3, 7, 3, generator=g), torch.randint(0, 7, (7, 3), generator=g), *torch.randn(2, 3, 7, generator=g)
    graph[0][torch.rand(graph[0].shape, generator=g) < 0.3] = big
    exact = [t.double() if t.is_floating_point() else t for t in graph]
    ours, truth = graded(logz, graph, Log, method="fused"), graded(logz_autograd, exact, Log)
    torch.testing.assert_close(ours[0].double(), truth[0], rtol=1e-6, atol=1e-4)
    assert all(t.isfinite().all() for t in ours[1:])
    if abs(big) < 1e9:
        for a, b in zip(ours[1:], truth[1:]):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5)


def test_what_is_no_score_is_seen_in_the_fused_kernel(with_kernel):
    ring = torch.stack([torch.arange(4), (torch.arange(4) - 1) % 4], 1)
    for bad in (math.nan, math.inf):
        Ms = torch.zeros(5, 2, 4, 2)
        Ms[3, 0, 1, 1] = bad
        assert logz(Ms, ring, *torch.zeros(2, 2, 4), method="fused").isnan().tolist() == [True, False]
    beyond = torch.tensor([[0, 4], [1, 0], [0, 2], [1, 3]], dtype=torch.int32)
    for S in (Log, Max):
        way = Fused(fused_shape(4, 2, S, 4, ROOM))
        assert way.forward(S, torch.zeros(5, 2, 4, 2), beyond, *torch.zeros(2, 2, 4), None, False)[0].isnan().all()


def test_gradients_twice_and_second_derivatives_of_the_fused_kernel(with_kernel):
    g, T = torch.Generator().manual_seed(0), 6 if FULL else 3
    Ms, idx = torch.randn(T, 2, 3, 2, generator=g, dtype=torch.float64, requires_grad=True), torch.tensor([[0, 1], [0, 2], [0, -1]])
    z = logz(Ms, idx, *torch.zeros(2, 2, 3, dtype=torch.float64), method="fused")
    one, = torch.autograd.grad(z.sum(), Ms, retain_graph=True)
    kept = one.clone()
    two, = torch.autograd.grad(2 * z.sum(), Ms)
    assert torch.equal(one, kept) and torch.equal(two, 2 * one)
    free = [Ms, *torch.randn(2, 2, 3, generator=g, dtype=torch.float64).requires_grad_().unbind()]

    def f(Ms, v0, vT):
        return logz(Ms, idx, v0, vT, Log, torch.tensor([T, 1]), method="fused")
    assert torch.autograd.gradcheck(f, free) and torch.autograd.gradgradcheck(f, free)


def test_the_fused_kernel_keeps_nothing_but_the_gradient(with_kernel, monkeypatch):
    made, empty = [], torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, *shape, **o: made.append(empty(t, *shape, **o)) or made[-1])
    Ms = torch.randn(50, 4, 9, 3, requires_grad=True)
    graph = torch.randint(-1, 9, (9, 3)), *torch.zeros(2, 4, 9)
    d, = torch.autograd.grad(logz(Ms, *graph, method="fused").sum(), Ms)
    large = [t for t in made if t.numel() > 4 * 4 * 9]
    assert len(large) == 1 and large[0].data_ptr() == d.data_ptr()
    made.clear()
    logz(Ms.detach(), *graph, method="fused")
    assert not [t for t in made if t.numel() > 4 * 4 * 9]


@pytest.mark.parametrize("S", thorough_but([Log, Max], Log), ids=str)
def test_hooks_see_what_the_fused_kernel_keeps(S, with_kernel):
    Ms = torch.randn(50, 4, 9, 3, requires_grad=True)
    graph = torch.randint(-1, 9, (9, 3)), *torch.zeros(2, 4, 9)

    def run():
        return logz(Ms, *graph, S, method="fused")
    want, = torch.autograd.grad(run().sum(), Ms)
    left, (got,) = hidden_from_hooks(run, [Ms], Ms.nbytes)
    assert not left, f"backward waits for storages of {left} bytes that no hook has seen"
    assert torch.equal(got, want)
    with torch.autograd.graph.save_on_cpu():
        z = run()
    first, = torch.autograd.grad(z.sum(), Ms, retain_graph=True)
    assert torch.equal(first, want) and torch.equal(torch.autograd.grad(z.sum(), Ms)[0], want)
    again = torch.utils.checkpoint.checkpoint(lambda Ms: logz(Ms, *graph, S, method="fused"), Ms, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.sum(), Ms)[0], want)


def test_a_graph_that_inference_has_prepared_can_be_trained_on(with_kernel):
    Ms, graph = torch.randn(6, 2, 5, 3), (torch.randint(-1, 5, (5, 3)), *torch.zeros(2, 2, 5))
    with torch.inference_mode():
        logz(Ms, *graph, method="fused")
        viterbi(Ms, *graph)
    want = graded(logz_autograd, (Ms, *graph), Log)
    for a, b in zip(graded(logz, (Ms, *graph), Log, method="fused"), want):
        torch.testing.assert_close(a, b)


@on_any
@given(seed=st.integers(0, 1000))
def test_paths_of_the_fused_kernel_are_those_of_the_loop(on_cpu, seed):
    g = torch.Generator().manual_seed(seed)
    ties, idx = torch.randint(0, 2, (45, 3, 4, 2), generator=g).float(), torch.randint(-1, 4, (4, 2), generator=g)
    graph, lengths = (ties, idx, *torch.zeros(2, 3, 4)), torch.tensor([45, 7, 0])
    plain = viterbi(*graph, lengths)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("cuda_kernel", on_cpu), ("runs_kernel", lambda Ms, S: True), ("shared_memory_limit", lambda device: ROOM)):
            patch.setattr(fusedloss.scans, name, value)
        assert all(torch.equal(a, b) for a, b in zip(viterbi(*graph, lengths), plain))


def test_a_graph_is_prepared_once_and_again_when_it_changes(with_kernel, monkeypatch):
    calls = []
    everywhere(monkeypatch, fusedloss.scans, "transpose", lambda idx: calls.append(1) or transpose(idx))
    Ms, idx = torch.randn(4, 2, 3, 2), torch.tensor([[0, 1], [1, 2], [2, 0]])
    first = [logz(Ms, idx, *torch.zeros(2, 2, 3), method="fused") for _ in range(3)]
    assert len(calls) == 1 and torch.equal(first[0], first[2])
    idx[0, 1] = -1
    changed = logz(Ms, idx, *torch.zeros(2, 2, 3), method="fused")
    assert len(calls) == 2
    torch.testing.assert_close(changed, path_sum(Ms, idx, *torch.zeros(2, 2, 3)))


@on_any
@given(data=st.data())
def test_slots_hold_each_edge_once(data):
    c, nz = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    idx = torch.tensor(data.draw(st.lists(st.integers(-1, c - 1), min_size=c * nz, max_size=c * nz))).view(c, nz)
    out = transpose(idx)
    (came, at), (went, place) = edge_slots(idx, out).transpose(-1, -2)
    assert torch.equal(came.long(), idx.masked_fill(idx < 0, c)) and ((at == c * nz) == (idx < 0)).all()
    for a in range(c):
        row = out.edge[out.start[a]:out.start[a + 1]][:nz].tolist()
        assert place[a].tolist() == row + [c * nz] * (nz - len(row)) and went[a].tolist() == [e // nz for e in row] + [c] * (nz - len(row))


@pytest.mark.parametrize("c, nz, real", [(1, 2, 4), (201, 3, 4), (1024, 5, 4), (1024, 5, 8), (1500, 3, 4), (4096, 5, 4), (7, 1, 4), (512, 24, 4), (512, 25, 4), (3000, 2, 8)])
def test_cuts_fit_or_there_is_none(c, nz, real):
    for S in (Log, Max):
        cut = fused_shape(c, nz, S, real, ROOM)
        if cut is None:
            assert nz in (1, 25) or c * nz > 5000
            continue
        assert cut.threads * cut.per >= c and cut.threads % 32 == 0 and cut.threads <= 1024 and (cut.ahead + 1) & cut.ahead == 0
        assert all(cut.shared(phase, S, c, nz, real) <= ROOM for phase in range(4))


@pytest.mark.parametrize("method, match", [("fused", "auto"), ("scan", "auto"), ("quick", "'auto', 'autograd'")])
def test_methods_that_cannot_are_named(method, match):
    with pytest.raises(ValueError, match=f"method.*{match}"):
        logz(torch.zeros(1, 1, 1, 2), torch.zeros(1, 2).long(), *torch.zeros(2, 1, 1), method=method)


def test_all_methods_of_a_cpu_agree():
    g = torch.Generator().manual_seed(0)
    graph = torch.randn(5, 2, 4, 3, dtype=torch.float64, generator=g), torch.randint(-1, 4, (4, 3), generator=g), *torch.zeros(2, 2, 4, dtype=torch.float64)
    for a, b in zip(graded(logz, graph, Log, method="loop"), graded(logz, graph, Log, method="autograd")):
        torch.testing.assert_close(a, b)


def test_without_a_compiler_the_loop_takes_over(monkeypatch):
    everywhere(monkeypatch, fusedloss.scans, "cuda_kernel", lambda *a, **k: None)
    everywhere(monkeypatch, fusedloss.scans, "runs_kernel", lambda Ms, S: True)
    everywhere(monkeypatch, fusedloss.scans, "shared_memory_limit", lambda device: ROOM)
    graph = torch.randn(5, 2, 4, 3), torch.randint(0, 4, (4, 3)), *torch.zeros(2, 2, 4)
    for a, b in zip(graded(logz, graph, Log), graded(logz_autograd, graph, Log)):
        torch.testing.assert_close(a, b)
    assert viterbi(*graph).states.shape == (2, 6) and posteriors(*graph).edges.shape == graph[0].shape


def test_a_scan_by_triton_is_the_loop(device):
    if fusedloss.core.triton.triton is None or device == "cpu" and not fusedloss.core.triton.triton.knobs.runtime.interpret:
        pytest.skip("no Triton, or no interpreter of it")
    g = torch.Generator().manual_seed(0)
    for T, N, C, nz in ((6, 3, 5, 2), (4, 2, 17, 3), (0, 1, 1, 1)):
        Ms, idx = torch.randn(T, N, C, nz, generator=g), torch.randint(-1, C, (C, nz), generator=g)
        Ms[torch.rand(Ms.shape, generator=g) < 0.2] = -INF
        Ms, idx, v0 = (t.to(device) for t in (Ms, idx, torch.randn(N, C, generator=g)))
        lengths = torch.randint(0, T + 1, (N,), generator=g).to(device)
        for cut in (None, lengths):
            ours, truth = scan_fwd_triton(Ms, idx, v0, cut), scan_fwd(Ms, idx, v0, lengths=cut)
            for n in range(N):
                stop = (T if cut is None else int(cut[n])) + 1
                torch.testing.assert_close(ours[:stop, n], truth[:stop, n])
        half, start = Ms.bfloat16(), v0.bfloat16()  # whose sums are float32 too
        torch.testing.assert_close(scan_fwd_triton(half, idx, start), scan_fwd(half.float(), idx, start.float()))


def test_the_source_of_the_kernel_reads_no_state_that_is_not_there(with_kernel):
    Ms, idx = torch.zeros(2, 1, 2, 2), torch.tensor([[0, 2], [1, -7]], dtype=torch.int32)
    assert scan_fwd(Ms, idx, torch.zeros(1, 2), Log)[1].isnan().tolist() == [[True, False]]


def test_the_source_of_the_kernel_survives_wrong_lengths(with_kernel):
    Ms, idx = torch.zeros(2, 2, 1, 1), torch.zeros(1, 1, dtype=torch.int64)
    lengths = torch.tensor([9, -3])
    alphas = scan_fwd(Ms, idx, torch.zeros(2, 1), Log, lengths)
    d_Ms, d_v0 = scan_bwd(Ms, idx, alphas, torch.ones(2, 1), Log, lengths)
    assert d_Ms[:, :, 0, 0].tolist() == [[1, 0], [1, 0]] and d_v0.tolist() == [[1], [1]]


@pytest.mark.parametrize("method", ["scan", "fused"])
def test_the_source_of_the_kernel_takes_strided_input(method, with_kernel):
    g = torch.Generator().manual_seed(0)
    plain = torch.randn(6, 3, 5, 2, generator=g), torch.randint(-1, 5, (5, 2), generator=g), torch.randn(1, 5, generator=g).expand(3, 5), torch.randn(3, 5, generator=g)
    strided = [plain[0].permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), plain[1].T.contiguous().T.int(), plain[2], plain[3].T.contiguous().T]
    for lengths in (torch.tensor([6, 9, 2, 9, 0])[::2], torch.tensor([4]).expand(3)):
        for S in (Log, Max):
            for a, b in zip(graded(logz, strided, S, lengths=lengths, method=method), graded(logz_autograd, plain, S, lengths=lengths.clone())):
                torch.testing.assert_close(a, b)


def test_nan_in_the_source_of_the_kernel_stays_visible(with_kernel):
    Ms = torch.zeros(3, 2, 2, 2)
    Ms[1, 0, 1, 1] = math.nan
    for S in (Log, Max):
        assert logz(Ms, torch.tensor([[0, 1], [0, 1]]), *torch.zeros(2, 2, 2), S).isnan().tolist() == [True, False]


# planted bugs

MUTANTS = {  # what is wrong: (text of the source, what stands in its place)
    "edges are cut into rows of nz": ("torch.searchsorted(ordered, states)", "states * idx.shape[1]"),
    "absent edges leave state 0": ("leaves.masked_fill(leaves < 0, len(idx))", "leaves.clamp(min=0)"),
    "absent edges are there": ("blocked = absent if", "blocked = torch.zeros_like(absent) if"),
    "γ goes on where a sequence is over": ("state = update_active(go, leaving(d_Ms[t], out), state)", "state = leaving(d_Ms[t], out)"),
    "α goes on where a sequence is over": ("v = update_active(go, S.sum(S.mul(v[..., source], edges)), v)", "v = S.sum(S.mul(v[..., source], edges))"),
    "all sequences end at T": ("if lengths is None: return alphas[-1]", "if True: return alphas[-1] * 0 + alphas[len(alphas) // 2]"),
    "the end is forgotten": ("return S.reduce(final_alphas(alphas, lengths) + vT, -1)", "return S.reduce(final_alphas(alphas, lengths), -1)"),
    "the upstream gradient is dropped": ("d_end = g[:, None] * S.dsum", "d_end = S.dsum"),
    "gradients of start and end are swapped": ("return None, None, d_Ms, None, d_v0, d_vT, None", "return None, None, d_Ms, None, d_vT, d_v0, None"),
    "the path is followed from the wrong state": ("source.gather(1, j[:, None])[:, 0])", "here)"),
    "a path goes on beyond its length": ("states = states.masked_fill(at > lengths[:, None], -1)", "pass"),
}


def first_fault(m):
    "The first of a few checks that a version of the module does not pass"
    g = torch.Generator().manual_seed(0)
    idx, lengths = torch.tensor([[0, 1], [0, 2], [0, 0], [0, -1]]), torch.tensor([4, 2, 0])
    if m.transpose(idx).edge.tolist() != [0, 2, 4, 5, 6, 1, 3, 7]:
        return "the transposed graph"
    graph = torch.randn(4, 3, 4, 2, generator=g, dtype=torch.float64), idx, *torch.randn(2, 3, 4, generator=g, dtype=torch.float64)
    for S in (Log, Max):
        if not all(torch.allclose(a, b) for a, b in zip(graded(m.logz, graph, S), graded(brute_force, graph, S))):
            return f"{S} of a batch of one length"
        for n in range(3):
            alone = sequence(graph, lengths, n)
            for program in (m.logz, m.logz_autograd):
                z, _, d_v0, d_vT = graded(program, graph, S, lengths=lengths, g=torch.ones(3, dtype=torch.float64))
                truth = graded(path_sum, alone, S, g=torch.ones(1, dtype=torch.float64))
                if not all(torch.allclose(a[n:n + 1], b) for a, b in zip((z, d_v0, d_vT), (truth[0], *truth[2:]))):
                    return f"{program.__name__} of sequence {n}"
    paths = m.viterbi(*graph, lengths)
    if not (paths.states >= 0).sum(1).equal(lengths + 1) or not torch.allclose(m.path_score(graph[0], *graph[2:], paths.states, paths.edges), logz(*graph, Max, lengths)):
        return "paths"


def test_the_unchanged_source_passes(tmp_path):
    assert first_fault(planted(fusedloss.scans, tmp_path, *unchanged(MUTANTS.values()))) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", few(MUTANTS, "edges are cut into rows of nz", "γ goes on where a sequence is over", "the upstream gradient is dropped", "a path goes on beyond its length"))
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert fault_of(first_fault, fusedloss.scans, tmp_path, *MUTANTS[bug]), f"no check notices that {bug}"


# the GPU

@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    g = torch.Generator().manual_seed(0)
    return [t.cuda() for t in (torch.randn(50, 4, 100, 3, generator=g), torch.randint(-1, 100, (100, 3), generator=g), *torch.randn(2, 4, 100, generator=g))]


@pytest.mark.parametrize("S", [Log, Max], ids=str)
def test_cupy_and_torch_compile_the_fused_kernel_to_the_same_bits(S, gpu, monkeypatch):
    pytest.importorskip("cupy")
    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip("this PyTorch compiles no kernels")
    by_cupy = graded(logz, gpu, S, method="fused")

    def by_torch(name, device, **constants):
        return CompiledByTorch(cuda_source(name), name, ("--std=c++17", *(f"-D{k}={v}" for k, v in constants.items())))
    everywhere(monkeypatch, fusedloss.scans, "cuda_kernel", by_torch)
    assert all(torch.equal(a, b) for a, b in zip(by_cupy, graded(logz, gpu, S, method="fused")))


@pytest.mark.parametrize("S", [Log, Max], ids=str)
def test_a_side_stream_is_waited_for(S, gpu):
    want, half, idx, side = graded(logz, gpu, S), gpu[0] / 2, torch.zeros_like(gpu[1]), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**8)
        half.mul_(2)
        idx.copy_(gpu[1])
        got = graded(logz, [half, idx, *gpu[2:]], S)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_a_second_device_gives_the_same_bits(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    for a, b in zip(graded(logz, gpu, Log), graded(logz, [t.to("cuda:1") for t in gpu], Log)):
        assert b.get_device() == 1 and torch.equal(a.cpu(), b.cpu())


@pytest.mark.parametrize("S", [Log, Max], ids=str)
def test_a_recorded_graph_gives_the_same_bits(S, gpu):
    Ms, lengths = gpu[0].requires_grad_(), torch.tensor([50, 3, 20, 0]).cuda()

    def run():
        return torch.autograd.grad(logz(*gpu, S, lengths).sum(), Ms)[0]
    want, side = run(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        got = run()
    got.zero_()
    recorded.replay()
    assert torch.equal(got, want)


def test_the_gradient_is_all_that_the_fused_kernel_holds(gpu):
    Ms = torch.randn(500, 32, 201, 3, device="cuda", requires_grad=True)
    graph = (torch.arange(201)[:, None] - torch.arange(3)).clamp(min=-1).cuda(), *torch.zeros(2, 32, 201, device="cuda")

    def step():
        torch.autograd.grad(logz(Ms, *graph, method="fused").sum(), Ms)
    assert peak_memory(step, "cuda") < 1.03 * Ms.nbytes
