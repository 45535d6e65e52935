"""CTC: loss, gradient, alignments, by PyTorch and by the kernels, whose source also runs on a CPU; bugs planted in both."""
import contextlib
import itertools
import math
import sys
import warnings
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

import fusedloss as fl
import fusedloss.ctc
from fusedloss.core import lattice, scaled, sequences
from fusedloss.core.cuda import cuda_source
from fusedloss.core.lattice import interleave, may_skip, scan_shape, ScanShape
from fusedloss.ctc import ctc_by_logz, ctc_graph, ctc_posteriors, ctc_sample, forced_align
from fusedloss.scans import logz
from fusedloss.semirings import Count, Entropy, Log, Max, brute_force
from workbook.measure import MemoryTrace, saved_tensors
from grids import FULL, few, thorough_but
from helpers import everywhere, fault_of, planted, replaced, replays, unchanged
from on_cpu import check_nvcc, kernels_on_cpu

INF = math.inf
on_any = settings(max_examples=60 if FULL else 20, deadline=None, derandomize=True)
f32, f64 = torch.float32, torch.float64


# the reference: every state of every sequence apart, float64, by the definition

def add(*terms):
    "log of a sum of exponentials, in plain Python"
    top = max(terms)
    return top if top == -INF else top + math.log(sum(math.exp(t - top) for t in terms))


def sequence(log_p, y, blank):
    "−log likelihood and posteriors [T,C] of one sequence: alpha and beta in plain Python"
    T, C, S = len(log_p), len(log_p[0]) if log_p else 0, 2 * len(y) + 1
    symbols = [y[s // 2] if s % 2 else blank for s in range(S)]
    skip = [s % 2 == 1 and s > 1 and symbols[s] != symbols[s - 2] for s in range(S)]
    if T == 0:
        return (0.0 if not y else INF), []
    at = lambda row, s: row[s] if 0 <= s < S else -INF
    alpha, beta = [[0.0] + [-INF] * (S - 1)], [[0.0 if s >= S - 2 else -INF for s in range(S)]]
    for t in range(T):
        row = alpha[-1]
        alpha.append([add(at(row, s), at(row, s - 1), at(row, s - 2) if skip[s] else -INF) + log_p[t][symbols[s]] for s in range(S)])
    for t in reversed(range(1, T)):
        row = [b + log_p[t][symbols[s]] for s, b in enumerate(beta[-1])]
        beta.append([add(at(row, s), at(row, s + 1), at(row, s + 2) if s + 2 < S and skip[s + 2] else -INF) for s in range(S)])
    joint = [[a + b for a, b in zip(row, back)] for row, back in zip(alpha[1:], beta[::-1])]
    totals = [add(*row) for row in joint]
    assert max(totals) == -INF or max(totals) - min(totals) < 1e-9 * max(1, abs(totals[0])), "alpha and beta disagree"
    if totals[-1] == -INF:
        return INF, [[0.0] * C for _ in range(T)]
    posterior = [[0.0] * C for _ in range(T)]
    for t, row in enumerate(joint):
        for s, v in enumerate(row):
            posterior[t][symbols[s]] += math.exp(v - totals[t])
    return -totals[-1], posterior


def reference(z, y, frames, lengths, blank=0, logits=True):
    "Losses and the gradient of their sum, float64; `y` is padded"
    x = z.detach().cpu().double()
    log_p = x.log_softmax(-1) if logits else x
    losses, dz = [], torch.zeros_like(x)
    for n, (T, L) in enumerate(zip(frames, lengths)):
        loss, posterior = sequence(log_p[:T, n].tolist(), list(map(int, y[n][:L])), blank)
        losses.append(loss)
        if loss < INF and T:
            dz[:T, n] = log_p[:T, n].exp() - torch.tensor(posterior, dtype=f64)
    return torch.tensor(losses, dtype=f64), dz


def case(T=23, N=6, C=9, L=7, frames=None, lengths=None, dtype=f32, scale=1.0, margin=0.0, blank=0, seed=0, labels=None):
    "Logits, padded targets and lengths"
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(T, N, C, generator=g, dtype=f64) * scale
    z[..., blank] += margin
    y = torch.randint(1, C, (N, L), generator=g) if labels is None else torch.tensor(labels, dtype=torch.int64)
    if blank and labels is None:
        y = torch.where(y == blank, 0, y)
    return z.to(dtype), y, list(frames or [T] * N), list(lengths or [L] * N)  # for a test to change


def graded(loss, z, *args, g=None, **options):
    "Loss and gradient"
    z = z.detach().clone().requires_grad_()
    out = loss(z, *args, **options)
    return out.detach(), torch.autograd.grad(out, z, torch.ones_like(out) if g is None else g)[0]


def same_losses(a, b, tolerance):
    a, b = a.cpu().double(), b.cpu().double()
    assert torch.equal(a.isinf(), b.isinf()) and not a.isnan().any()
    a, b = (torch.where(t.isinf(), 0, t) for t in (a, b))
    assert ((a - b).abs() <= tolerance * b.abs().clamp(min=1)).all(), (a, b)


HARD = {  # of the reference's section 4, and what users of others ran into
    "plain": {},
    "ragged": dict(frames=[23, 12, 20, 7, 17, 22], lengths=[7, 3, 0, 2, 5, 1]),
    "one frame less": dict(frames=[29, 30, 30], lengths=[7, 7, 5], T=30, N=3),
    "empty targets": dict(lengths=[0, 4, 5, 6, 0, 0]),
    "all targets empty": dict(lengths=[0] * 6),
    "no columns of targets": dict(L=0, lengths=[0] * 6, labels=[[]] * 6),
    "T 0 and 1, infeasible": dict(frames=[1, 1, 0, 0, 5, 2], lengths=[0, 1, 0, 1, 7, 2]),
    "two equal labels in two frames": dict(T=3, N=2, L=2, labels=[[1, 1], [1, 1]], frames=[2, 3]),
    "repeats": dict(N=3, labels=[[1, 1, 2, 2, 2, 3, 3]] * 3, frames=[23, 11, 12]),
    "one label only": dict(N=2, C=2, labels=[[1] * 7] * 2, frames=[23, 13]),
    "another blank, and blanks among the labels": dict(N=3, blank=4, labels=[[4, 1, 4, 4, 2, 3, 0], [1, 2, 3, 4, 5, 6, 4], [4] * 7]),
    "the last class is the blank": dict(blank=8),
    "tight": dict(T=7, frames=[7, 7, 6, 7, 7, 7], lengths=[7, 6, 7, 4, 7, 7]),
    "three warps": dict(T=100, N=3, L=77, frames=[100, 90, 99], lengths=[77, 60, 33]),
    "scale 20": dict(T=60, N=3, L=40, scale=20.0, frames=[60, 55, 59], lengths=[40, 30, 21]),
    "scale 60": dict(T=60, N=2, L=40, scale=60.0),
    "blank margin 20": dict(T=80, N=2, L=38, margin=20.0),
    "blank margin 120": dict(T=80, N=2, L=38, margin=120.0),
    "blank margin -120": dict(T=80, N=2, L=38, margin=-120.0),
    "large offset": dict(N=2, margin=0.0, C=9, scale=1.0, seed=5),
    "more classes": dict(T=12, N=2, C=100, L=5),
    "longer than all frames": dict(T=5, N=2, L=8, labels=[[1, 2, 3, 4, 5, 6, 7, 8]] * 2, lengths=[8, 5]),
    "blocks of few frames": dict(T=60, N=3, L=40, scale=9.0, frames=[60, 55, 41], lengths=[40, 30, 38], margin=-25.0),
    "a label that once cannot be": dict(T=250, N=2, C=4, L=1, labels=[[1], [2]], margin=-10.0, scale=0.1),
    "emissions beyond a double": dict(T=12, N=2, L=8, labels=[[1, 2, 3, 4, 5, 6, 7, 8]] * 2, margin=1000.0),
}


def hard(name, dtype=f32):
    options = dict(HARD[name])
    z, y, frames, lengths = case(dtype=dtype, **options)
    if name == "large offset":
        z = z + 1000
    if name == "a label that once cannot be":
        z[100, 0, 1], z[5, 1, 0] = -INF, -INF
    return z, y, frames, lengths, options.get("blank", 0)


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("dtype, tolerance", [(f32, 1e-6), (f64, 1e-9)])
def test_loss_and_gradient_of_logits(name, dtype, tolerance, device):
    z, y, frames, lengths, blank = hard(name, dtype)
    truth = reference(z, y, frames, lengths, blank)
    loss, dz = graded(fl.ctc_loss_with_logits, z.to(device), y.to(device), frames, lengths, blank, "none")
    same_losses(loss, truth[0], tolerance)
    assert loss.dtype == dz.dtype == dtype and (dz.cpu().double() - truth[1]).abs().max() <= tolerance


# the kernels on a CPU

def on_cpu(source=None):
    "The kernels of ctc.cu, or of another text of it"
    return kernels_on_cpu("ctc_on_cpu.cpp", ctc=source)


@pytest.fixture(scope="module")
def kernels():
    return on_cpu()


def shape_on_cpu(z, p, shape=None):
    "`kernel_shape` as it is on a GPU"
    return (shape or scan_shape(p.width, True)) if fusedloss.ctc.runs_kernels(z) else None


def use(kernels, monkeypatch):
    "Let the library take them, on the CPU"
    fusedloss.ctc.kernels_for.cache_clear()
    everywhere(monkeypatch, fusedloss.ctc, "ctc_kernel", kernels)
    everywhere(monkeypatch, fusedloss.ctc, "runs_kernels", lambda z: z.dtype in fusedloss.ctc.ELEMENTS and z.numel() > 0)
    everywhere(monkeypatch, fusedloss.ctc, "kernel_shape", shape_on_cpu)


@pytest.fixture(autouse=True)
def own_paths(monkeypatch):
    "PyTorch's own loss takes few sequences on a CPU: its tests ask for it, all others are of the library's"
    everywhere(monkeypatch, fusedloss.ctc, "torch_loss", lambda *args: None)
    yield
    fusedloss.ctc.kernels_for.cache_clear()


@pytest.fixture
def with_kernels(kernels, monkeypatch):
    "The library as it is on a GPU, the kernels' source on the CPU"
    use(kernels, monkeypatch)
    monkeypatch.setattr(kernels, "seed", 0)
    return kernels


@pytest.mark.parametrize("name", few(HARD, "ragged", "one frame less", "empty targets", "no columns of targets", "T 0 and 1, infeasible", "two equal labels in two frames", "repeats",
                                     "another blank, and blanks among the labels", "tight", "three warps", "scale 60", "large offset"))
def test_the_kernels_source(name, with_kernels):
    z, y, frames, lengths, blank = hard(name)
    truth = reference(z, y, frames, lengths, blank)
    loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, blank, "none")
    same_losses(loss, truth[0], 1e-6)
    assert (dz.double() - truth[1]).abs().max() <= 1e-6
    assert torch.equal(fl.ctc_loss_with_logits(z, y, frames, lengths, blank, "none"), loss), "the loss alone is another"


SHAPES = [(1, 8, 1, 4), (1, 8, 4, 2), (2, 4, 2, 2), (2, 8, 1, 2), (4, 4, 2, 1), (1, 4, 8, 1), (1, 8, 1, 1, 4), (1, 4, 1, 2, 2), (2, 8, 1, 1, 2)]


@pytest.mark.parametrize("shape, seed", few([(shape, seed) for shape in SHAPES for seed in (0, 1)], (SHAPES[2], 0), (SHAPES[6], 1)), ids=str)
def test_the_scan_in_other_shapes_and_orders(shape, seed, with_kernels, monkeypatch):
    shape = ScanShape(*shape)
    everywhere(monkeypatch, fusedloss.ctc, "kernel_shape", partial(shape_on_cpu, shape=shape))
    monkeypatch.setattr(with_kernels, "seed", seed)
    for name in ("ragged", "T 0 and 1, infeasible", "repeats", "three warps", "tight"):
        z, y, frames, lengths, blank = hard(name)
        truth = reference(z, y, frames, lengths, blank)
        loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, blank, "none")
        same_losses(loss, truth[0], 1e-6)
        assert (dz.double() - truth[1]).abs().max() <= 1e-6
        assert torch.equal(fl.ctc_loss_with_logits(z, y, frames, lengths, blank, "none"), loss), "the loss alone is another"


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_the_kernels_source_in_half_precision(dtype, tolerance, with_kernels):
    z, y, frames, lengths, blank = hard("ragged", dtype)
    truth = reference(z, y, frames, lengths, blank)
    loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, blank, "none")
    same_losses(loss, truth[0], 1e-6)
    assert dz.dtype == dtype and (dz.double() - truth[1]).abs().max() <= tolerance


@pytest.mark.parametrize("C", few([31, 33, 1024, 1025, 8192, 8193, 20000], 33, 1024, 8193))
def test_the_gradient_kernel_with_many_classes(C, with_kernels):
    z, y, frames, lengths = case(T=5, N=2, C=C, L=3, labels=[[1, C - 1, 1], [C - 1, C - 2, C // 2]], frames=[5, 4])
    z, truth = z.requires_grad_(), ctc_by_logz(z.double().log_softmax(-1), y, torch.tensor(frames), torch.tensor(lengths))
    loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, 0, "none")
    same_losses(loss, truth, 1e-6)
    leaf = z.detach().double().requires_grad_()
    exact, = torch.autograd.grad(ctc_by_logz(leaf.log_softmax(-1), y, torch.tensor(frames), torch.tensor(lengths)).sum(), leaf)
    assert (dz.double() - exact).abs().max() <= 1e-6


def test_the_kernels_source_of_log_probabilities(with_kernels):
    z, y, frames, lengths, _ = hard("ragged")
    for x in (z.log_softmax(-1), z):  # normalised, and not
        truth, _ = reference(x, y, frames, lengths, logits=False)
        for gradient in ("torch", "exact"):
            loss, dz = graded(fl.ctc_loss, x, y, frames, lengths, 0, "none", gradient=gradient)
            same_losses(loss, truth, 1e-6)
            plain = graded(fl.ctc_loss, x.double(), y, frames, lengths, 0, "none", gradient=gradient)[1]
            assert (dz - plain).abs().max() <= 2e-6 * x.exp().max().clamp(min=1)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("dtype", [f32, torch.float16])
def test_the_kernels_source_reduces_as_torch_does(reduction, dtype, with_kernels):
    z, y, frames, lengths, _ = hard("T 0 and 1, infeasible", dtype)
    g = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, 1.0]) if reduction == "none" else torch.tensor(-1.7)
    for zero_infinity in (False, True):
        loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, 0, reduction, zero_infinity, g=g)
        truth, exact = graded(fl.ctc_loss_with_logits, z.double(), y, frames, lengths, 0, reduction, zero_infinity, g=g.double())
        same_losses(loss, truth, 1e-6)
        assert (dz.double() - exact).abs().max() <= (1e-6 if dtype == f32 else 1e-3)


def mean_fault(dtype=torch.float16, C=1100):
    "What is wrong with the mean of a batch whose gradient backward makes, where posteriors are few"
    z, y, frames, lengths = case(T=9, N=3, C=C, L=4, dtype=dtype, labels=[[3, C - 1, 3, 7], [1, 2, 2, 5], [4, 4, 4, 4]], frames=[9, 7, 3], lengths=[4, 3, 4])
    for factor in (1.0, -3.0, 65536.0):
        g = torch.tensor(factor)
        loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, 0, "mean", True, g=g)
        want, exact = graded(fl.ctc_loss_with_logits, z.double(), y, frames, lengths, 0, "mean", True, g=g.double())
        if abs(loss - want) > 1e-6 * want:
            return f"{factor}, the loss"
        if not torch.allclose(dz.double(), exact, rtol=2e-3, atol=1e-7 * max(1.0, abs(factor))) or dz[7:, 1].any() or dz[:, 2].any():
            return f"{factor}, the gradient"


@pytest.mark.parametrize("C", [40, 1100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_in_half_precision_is_rounded_once(dtype, C, with_kernels):
    "In fp16 with its factor: the gradient of 1100 classes is made in backward"
    if dtype == torch.float16:
        assert mean_fault(dtype, C) is None
    z, y, frames, lengths = case(T=9, N=3, C=C, L=4, dtype=dtype)
    z.requires_grad_()
    loss = fl.ctc_loss_with_logits(z, y, frames, lengths)
    first, = torch.autograd.grad(loss, z, torch.tensor(512.0), retain_graph=True)
    again, = torch.autograd.grad(loss, z, torch.tensor(512.0), retain_graph=True)
    kept, = torch.autograd.grad(loss, z, torch.tensor(512.0), create_graph=True)
    last, = torch.autograd.grad(loss, z, torch.tensor(512.0))
    assert torch.equal(first, again) and torch.equal(first, last) and torch.equal(first, kept)


@pytest.mark.parametrize("C, late", [(40, False), (1100, True)])
def test_what_waits_for_backward_takes_less_memory_than_the_gradient(C, late, with_kernels):
    z, y, frames, lengths = case(T=9, N=3, C=C, L=4, dtype=torch.float16)
    frames, lengths = torch.tensor(frames), torch.tensor(lengths)
    saved = saved_tensors(lambda: fl.ctc_loss_with_logits(z.requires_grad_(), y, frames, lengths), z, y, frames, lengths)
    assert (z.shape in [t.shape for t in saved]) != late
    assert sum(t.numel() * t.element_size() for t in saved) <= z.numel() * z.element_size() + 32


@pytest.mark.parametrize("T, N, C", [(40, 8, 300), (30, 3, 100)])  # the scaled sums, and PyTorch's loss in float64
def test_on_a_cpu_no_more_is_held_than_by_pytorchs_loss(T, N, C):
    z, y = torch.randn(T, N, C).requires_grad_(), torch.randint(1, C, (N, 9))
    lengths = torch.full((N,), T), torch.full((N,), 9)
    peaks = []
    for loss in (lambda: fl.ctc_loss_with_logits(z, y, *lengths), lambda: F.ctc_loss(z.log_softmax(-1), y, *lengths)):
        with MemoryTrace() as trace:
            torch.autograd.grad(loss(), z)
        peaks.append(trace.peak)
    assert peaks[0] <= peaks[1]


def test_compiled_kernels_give_the_mean_of_half_precision(with_kernels):
    z, y, frames, lengths = case(T=9, N=3, C=40, L=4, dtype=torch.float16)
    T, L = torch.tensor(frames), torch.tensor(lengths)
    compiled_loss = torch.compile(lambda x: fl.ctc_loss_with_logits(x * 1, y, T, L), fullgraph=True, backend="aot_eager")
    for a, b in zip(graded(compiled_loss, z, g=torch.tensor(1000.0)), graded(fl.ctc_loss_with_logits, z, y, T, L, g=torch.tensor(1000.0))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("N", thorough_but([1, 3, 300], 1, 3))
def test_losses_are_added_in_the_last_block(N, with_kernels):
    z, y, frames, lengths = case(T=5, N=N, C=6, L=2)
    losses = fl.ctc_loss_with_logits(z, y, frames, lengths, 0, "none")
    total = fl.ctc_loss_with_logits(z, y, frames, lengths, 0, "sum")
    torch.testing.assert_close(total.double(), losses.double().sum(), rtol=2**-23, atol=0)  # rounded once


def test_bad_input_of_the_kernels_source_is_nan_and_harms_nobody(with_kernels, monkeypatch):
    everywhere(monkeypatch, sequences, "readable_on_host", lambda t: False)
    z, y, frames, lengths = case(N=6)
    good = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, 0, "none")
    y[1, 2], y[2, 6], frames[3], frames[4], lengths[5] = 9, -1, 24, -1, 8
    loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, 0, "none")
    assert loss.isnan().tolist() == [False] + [True] * 5 and not dz[:, 1:].any()
    assert torch.equal(loss[:1], good[0][:1]) and torch.equal(dz[:, 0], good[1][:, 0])


def test_nan_and_infinity_in_the_scores_stay_visible(with_kernels):
    z, y, frames, lengths = case(N=6)
    good = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, 0, "none")
    z[5, 1, y[1, 3]], z[7, 2, 0], z[3, 3, 2], z[4:9, 4, 5:] = math.nan, INF, math.nan, -INF
    loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, 0, "none")
    assert loss.isnan().tolist() == [False, True, True, True, False, False]
    assert dz.isnan().any(2).any(0).tolist() == loss.isnan().tolist()
    assert torch.equal(dz[:, 5], good[1][:, 5])
    truth = reference(z[:, 4:5], y[4:5], [23], [7])
    assert (dz[:, 4:5].double() - truth[1]).abs().max() <= 1e-6


def test_scores_out_of_range_are_zero_or_noticed(with_kernels):
    z, y, frames, lengths = case(N=3)
    z[3, 0, y[0]], z[4, 1, :] = -1e30, 3e30
    loss = fl.ctc_loss_with_logits(z, y, frames, lengths, 0, "none")
    z[3, 0, y[0]] = -INF
    assert torch.equal(loss[0], fl.ctc_loss_with_logits(z, y, frames, lengths, 0, "none")[0]) and loss[1].isnan()


@pytest.mark.parametrize("name", ["three warps", "ragged", "repeats"])
def test_a_sequence_alone_is_itself_in_a_batch(name, with_kernels):
    z, y, frames, lengths, blank = hard(name)
    loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, blank, "none")
    for n, (T, L) in enumerate(zip(frames, lengths)):
        one, d = graded(fl.ctc_loss_with_logits, z[:T, n:n + 1], y[n:n + 1, :L], [T], [L], blank, "none")
        assert torch.equal(one, loss[n:n + 1]) and torch.equal(d[:, 0], dz[:T, n]), n


@pytest.mark.parametrize("T, L, clusters", few([(300, 256, True), (560, 511, True), (560, 512, True), (1030, 1023, False), (1040, 1030, False)], (300, 256, True)))
def test_the_kernels_source_with_long_targets(T, L, clusters, with_kernels, monkeypatch):
    everywhere(monkeypatch, fusedloss.ctc, "kernel_shape", partial(shape_on_cpu, shape=scan_shape(L, clusters)))
    z, y, frames, lengths = case(T=T, N=1, L=L, C=30)
    y[:, 1::2] = 1 + y[:, 1::2] % 14
    y[:, ::2] = 15 + y[:, ::2] % 14  # no repeats: it fits
    truth = graded(fl.ctc_loss_with_logits, z.double(), y, frames, lengths, 0, "none")
    loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, 0, "none")
    same_losses(loss, truth[0], 1e-6)
    assert (dz.double() - truth[1]).abs().max() <= 2e-6


@pytest.mark.parametrize("name", ["ragged", "T 0 and 1, infeasible", "repeats", "three warps", "no columns of targets"])
def test_posteriors_by_the_kernels_source(name, with_kernels, monkeypatch):
    z, y, frames, lengths, blank = hard(name)
    for x in (z.log_softmax(-1), z.bfloat16()):
        ours = ctc_posteriors(x, y, frames, lengths, blank)
        for a, b in zip(ours, ctc_posteriors(x.double(), y, frames, lengths, blank)):
            assert a.dtype == f32
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T, L", [(1100, 1050), (2500, 2100)])
def test_long_targets_in_strips_on_a_gpu(T, L, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    z, y, frames, lengths = case(T=T, N=3, L=L, C=30, frames=[T, T - 1, T // 2], lengths=[L, L // 3, 30])
    y[:, 1::2], y[:, ::2] = 1 + y[:, 1::2] % 14, 15 + y[:, ::2] % 14  # no repeats: it fits
    given = z.cuda(), y.cuda(), frames, lengths, 0, "none"
    want = graded(fl.ctc_loss_with_logits, *given)  # by a cluster, where there are any
    everywhere(monkeypatch, fusedloss.ctc, "scan_shape", lambda longest, clusters: scan_shape(longest, False))
    loss, dz = graded(fl.ctc_loss_with_logits, *given)
    same_losses(loss, want[0], 1e-6)
    assert (dz - want[1]).abs().max() <= 2e-6
    exact = fl.ctc_loss_with_logits(z[:, 1:].double().cuda(), y[1:].cuda(), frames[1:], lengths[1:], 0, "none")
    same_losses(loss[1:], exact, 1e-6)


VARIANTS = [dict(ELEMENT=e, PAIRS=p, AHEAD=a, CLUSTER=c, THREADS=t, TABLES=int(t != 256)) for e, p, a, c, t in
            [("f32", 1, 8, 1, 256), ("bf16", 4, 4, 1, 512), ("f16", 1, 8, 2, 128), ("f32", 1, 8, 8, 256), ("f32", 4, 4, 8, 512)]]
VARIANTS += [dict(VARIANTS[1], STRIPS=4)]
VARIANTS += [dict(ELEMENT=e, PER=p, ROWTHREADS=r, NORMALISE=n, SOFTMAX=s) for e, p, r, n, s in
             [("f32", 1, 32, 1, 1), ("bf16", 32, 32, 0, 1), ("f16", 32, 256, 1, 1), ("f32", 5, 256, 0, 0)]]


COMPILED = [(arch, i) for arch in (75, 80, 90, 100) for i, v in enumerate(VARIANTS) if arch >= 90 or v.get("CLUSTER", 1) == 1]  # as the library asks


@pytest.mark.parametrize("arch, variant", few(COMPILED, (75, 0), (80, 5), (90, 3), (100, 9)))
def test_the_kernels_compile_without_a_gpu(arch, variant):
    check_nvcc(arch, cuda_source("ctc"), VARIANTS[variant])


def test_shapes_without_clusters_are_never_given_one():
    for longest in range(20000):
        few, many = scan_shape(longest, False), scan_shape(longest, True)
        assert few.cluster == 1 and few.plane > longest and few.threads <= 512
        assert many.plane > longest and (many.strips > 1) == (longest > 8191)


def test_without_a_compiler_pytorch_takes_over(monkeypatch):
    use(lambda *given, **constants: None, monkeypatch)
    z, y, frames, lengths, _ = hard("ragged")
    loss = fl.ctc_loss_with_logits(z, y, frames, lengths, 0, "none")
    same_losses(loss, reference(z, y, frames, lengths)[0], 1e-6)


# the definition

def collapsed(path, blank):
    "Repeats merged, then blanks dropped"
    return [c for c, _ in itertools.groupby(path) if c != blank]


@pytest.mark.parametrize("T, y, blank", [(0, [], 0), (1, [1], 0), (3, [1, 1], 0), (4, [1, 2], 0), (5, [1, 2, 1], 0), (5, [0, 1], 2), (6, [2, 2], 1), (4, [], 1), (2, [1, 1], 0)])
def test_all_strings_of_symbols(T, y, blank):
    z = torch.randn(T, 1, 3, generator=torch.Generator().manual_seed(T), dtype=f64)
    log_p = z.log_softmax(-1)
    weights = {path: sum(log_p[t, 0, c].item() for t, c in enumerate(path)) for path in itertools.product(range(3), repeat=T) if collapsed(path, blank) == y}
    total = add(*weights.values()) if weights else -INF
    args = torch.tensor([y], dtype=torch.int64), [T], [len(y)], blank
    for loss in (fl.ctc_loss(log_p, *args, "none"), fl.ctc_loss_with_logits(z, *args, "none")):
        assert loss.item() == pytest.approx(-total, abs=1e-12)
    a, p = forced_align(log_p, *args), ctc_posteriors(log_p, *args)
    if not weights:
        assert a.score.item() == -INF and (a.labels == -1).all() and not p.states.any() and p.entropy == 0
        return
    assert a.score.item() == pytest.approx(max(weights.values())) and collapsed(a.labels[0].tolist(), blank) == y
    assert weights[tuple(a.labels[0].tolist())] == pytest.approx(a.score.item()) == pytest.approx(a.frame_scores.sum().item())
    assert p.entropy.item() == pytest.approx(sum(-math.exp(w - total) * (w - total) for w in weights.values()), abs=1e-10)
    assert p.log_likelihood.item() == pytest.approx(total)
    for t in range(T):
        for c in range(3):
            here = p.states[0, t][interleave(args[0], blank)[0] == c].sum().item()
            assert here == pytest.approx(sum(math.exp(w - total) for path, w in weights.items() if path[t] == c), abs=1e-10)


@on_any
@given(data=st.data())
def test_graph_loop_and_list_of_paths(data):
    T, N, C, L = (data.draw(st.integers(*r)) for r in ((0, 6), (1, 3), (2, 4), (0, 3)))
    blank = data.draw(st.integers(0, C - 1))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    z = torch.randn(T, N, C, generator=g, dtype=f64) * data.draw(st.sampled_from([1.0, 20.0]))
    z = torch.where(torch.rand(T, N, C, generator=g) < data.draw(st.sampled_from([0.0, 0.2])), -INF, z)
    y = torch.randint(0, C, (N, L), generator=g)
    frames = torch.tensor(data.draw(st.lists(st.integers(0, T), min_size=N, max_size=N)))
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, L), min_size=N, max_size=N)))
    loss, dz = graded(fl.ctc_loss, z, y, frames, lengths, blank, "none", gradient="exact")
    again, exact = graded(ctc_by_logz, z, y, frames, lengths, blank)
    torch.testing.assert_close(loss, again)
    torch.testing.assert_close(dz, exact, rtol=1e-9, atol=1e-9)
    for n in range(N):
        one = ctc_graph(z[:frames[n], n:n + 1], y[n:n + 1, :lengths[n]], lengths[n:n + 1], blank)
        torch.testing.assert_close(-loss[n:n + 1], brute_force(*one, Log))
        torch.testing.assert_close(forced_align(z, y, frames, lengths, blank).score[n:n + 1], brute_force(*one, Max))
        weight, entropy = brute_force(*one, Entropy)
        torch.testing.assert_close(ctc_posteriors(z, y, frames, lengths, blank).entropy[n:n + 1], entropy, atol=1e-9, rtol=1e-9)


# the interface, beside torch's

def ways(y, frames, lengths):
    "The same batch in every form that torch knows"
    row = torch.cat([labels[:n] for labels, n in zip(y, lengths)])
    for targets in (y, y.int(), row, row.int()):
        for cast in (tuple, list, torch.tensor, partial(torch.tensor, dtype=torch.int32)):
            yield targets, cast(frames), cast(lengths)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_every_form_of_the_arguments(reduction, zero_infinity, device):
    z, y, frames, lengths, _ = hard("ragged", f64)
    frames[3], lengths[3] = 1, 2  # infeasible
    log_p, options = z.log_softmax(-1), (0, reduction, zero_infinity)
    g = torch.arange(6.0, dtype=f64) - 1.5 if reduction == "none" else torch.tensor(-1.7, dtype=f64)
    truth = graded(F.ctc_loss, log_p, y, frames, lengths, *options, g=g)
    g = g.to(device)
    for targets, T, L in ways(y, frames, lengths):
        loss, d = graded(fl.ctc_loss, log_p.to(device), targets.to(device), T, L, *options, g=g)
        torch.testing.assert_close(loss.cpu(), truth[0])
        torch.testing.assert_close(d.cpu(), truth[1].nan_to_num(0))  # where torch has NaN
        direct = fl.ctc_loss_with_logits(z.to(device), targets, T, L, *options)
        torch.testing.assert_close(direct.cpu(), truth[0])
        module = fl.CTCLoss(reduction=reduction, zero_infinity=zero_infinity, logits=True)
        assert torch.equal(module(z.to(device), targets, T, L), direct)


def test_lengths_lie_on_either_device():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    z, y, frames, lengths = case()
    want = fl.ctc_loss_with_logits(z.cuda(), y.cuda(), torch.tensor(frames).cuda(), torch.tensor(lengths).cuda())
    for targets, T, L in ways(y, frames, lengths):
        assert torch.equal(fl.ctc_loss_with_logits(z.cuda(), targets, T, L), want)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_a_single_sequence(reduction, device):
    z, y, frames, lengths = case(N=1, dtype=f64)
    for T, L in ((23, 7), (torch.tensor(20), torch.tensor(5)), ([20], (5,))):
        one = fl.ctc_loss_with_logits(z[:, 0].to(device), y[0, :L if isinstance(L, int) else None].to(device), T, L, reduction=reduction)
        many = F.ctc_loss(z.log_softmax(-1), y, torch.as_tensor(T).view(1), torch.as_tensor(L).view(1), reduction=reduction)
        torch.testing.assert_close(one.cpu(), many.view(()))
    a = forced_align(z[:, 0], y[0], 23, 7)
    assert a.score.shape == () and a.labels.shape == (23,) and ctc_posteriors(z[:, 0], y[0], 23, 7).states.shape == (23, 15)


def test_defaults_and_names_are_those_of_torch():
    import inspect
    ours, theirs = (inspect.signature(f).parameters for f in (fl.ctc_loss, F.ctc_loss))
    assert list(ours)[:7] == list(theirs)
    may_be_left_out = dict.fromkeys(("input_lengths", "target_lengths"))
    assert {k: ours[k].default for k in theirs} == {k: p.default for k, p in theirs.items()} | may_be_left_out
    assert repr(fl.CTCLoss(3, "sum", True)) == "CTCLoss(blank=3, reduction='sum', zero_infinity=True, logits=False)"


def test_the_samples_that_torch_ships(device, torchs_samples):
    from torch.testing._internal.common_methods_invocations import op_db
    op = next(op for op in op_db if op.name == "nn.functional.ctc_loss")
    count = 0
    for dtype in (f32, f64):
        for sample in op.sample_inputs(device, dtype, requires_grad=True):
            z, args = sample.input, sample.args
            theirs, ours = op(z, *args, **sample.kwargs), fl.ctc_loss(z, *args, **sample.kwargs)
            g = torch.linspace(-1, 2, ours.numel(), dtype=ours.dtype, device=device).view(ours.shape)
            d, = torch.autograd.grad(ours, z, g)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            if not z.is_cuda or dtype == f64:
                torch.testing.assert_close(d, torch.autograd.grad(theirs, z, g)[0], rtol=1e-3, atol=1e-4 if dtype == f32 else 1e-9)
            count += 1
    assert count >= 16


def test_torch_errs_where_the_last_label_is_the_blank():
    "The gradient of torch 2.13 is not that of its own loss there; ours is"
    z, y, frames, lengths, blank = hard("another blank, and blanks among the labels", f64)
    loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, blank, "none")
    step = torch.zeros_like(z)
    for at in ((5, 0, 3), (5, 1, 4), (9, 2, 4)):
        step.zero_()[at] = 1e-5
        up, down = (F.ctc_loss((z + s * step).log_softmax(-1), y, frames, lengths, blank, "none") for s in (1, -1))
        assert dz[at].item() == pytest.approx((up - down).sum().item() / 2e-5, abs=1e-7)


# derivatives

def test_gradients_against_differences(device):
    z, y, frames, lengths = (t.to(device) if isinstance(t, torch.Tensor) else t for t in case(T=5, N=3, C=4, L=2, dtype=f64, frames=[5, 3, 2], lengths=[2, 0, 1]))
    z.requires_grad_()
    for f in (lambda x: fl.ctc_loss_with_logits(x, y, frames, lengths), lambda x: fl.ctc_loss_with_logits(x, y, frames, lengths, 0, "none"),
              lambda x: fl.ctc_loss(x, y, frames, lengths, 0, "none", gradient="exact"), lambda x: fl.ctc_loss(x.log_softmax(-1), y, frames, lengths, 0, "sum")):
        assert torch.autograd.gradcheck(f, z)
    order = 1e-12 if device == "cuda" else 0.0  # a second derivative gathers; on a GPU the derivative of that adds in any order
    twice = {"logits": lambda x: fl.ctc_loss_with_logits(x, y, frames, lengths), "each": lambda x: fl.ctc_loss(x, y, frames, lengths, 0, "none", gradient="exact")}
    for name in few(twice, "each"):
        assert torch.autograd.gradgradcheck(twice[name], z, nondet_tol=order)


def test_the_second_derivative_of_torchs_gradient():
    "What torch returns as the gradient is a function, too"
    z, y, frames, lengths = case(T=5, N=2, C=4, L=2, dtype=f64)
    x = z.log_softmax(-1).requires_grad_()
    direction = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=f64)

    def slope(x):
        d, = torch.autograd.grad(fl.ctc_loss(x, y, frames, lengths, 0, "mean"), x, create_graph=True)
        return (d * direction).sum()
    second, = torch.autograd.grad(slope(x), x)
    for at in ((0, 0, 1), (3, 1, 0), (4, 0, 3)):
        step = torch.zeros_like(z)
        step[at] = 1e-5
        differences = (slope(x + step) - slope(x - step)) / 2e-5
        assert second[at].item() == pytest.approx(differences.item(), abs=1e-8)


def test_higher_derivatives_with_infeasible_neighbours(device):
    z, y, frames, lengths = (t.to(device) if isinstance(t, torch.Tensor) else t for t in case(T=5, N=3, C=4, L=3, dtype=f64, frames=[5, 2, 5], lengths=[2, 3, 3]))
    for zero_infinity in (False, True):
        x = z.clone().requires_grad_()
        d, = torch.autograd.grad(fl.ctc_loss_with_logits(x, y, frames, lengths, 0, "none", zero_infinity), x, torch.ones(3, dtype=f64, device=device), create_graph=True)
        second, = torch.autograd.grad(d.square().sum(), x, create_graph=True)
        third, = torch.autograd.grad(second.square().sum(), x)
        assert all(t.isfinite().all() and not t[:, 1].any() and t[:, [0, 2]].any() for t in (d, second, third))


def test_a_graph_that_is_kept_and_one_that_is_not(device):
    z, y, frames, lengths = (t.to(device) if isinstance(t, torch.Tensor) else t for t in case())
    z.requires_grad_()
    loss = fl.ctc_loss_with_logits(z, y, frames, lengths, 0, "none")
    g = torch.arange(6.0, device=device) - 2
    first, = torch.autograd.grad(loss, z, g, retain_graph=True)
    second, = torch.autograd.grad(loss, z, 2 * g, retain_graph=True)
    third, = torch.autograd.grad(loss, z, g)
    assert torch.equal(2 * first, second) and torch.equal(first, third)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, z, g)


def test_backward_keeps_the_gradient_and_nothing_else(device):
    z, y, frames, lengths = (t.to(device) if isinstance(t, torch.Tensor) else t for t in case(frames=[23] * 6))
    frames, lengths = torch.tensor(frames, device=device), torch.tensor(lengths, device=device)
    z.requires_grad_()
    saved = saved_tensors(lambda: fl.ctc_loss_with_logits(z, y, frames, lengths), z, y, frames, lengths)
    assert [t.shape for t in saved] == [z.shape]


def test_no_gradient_is_made_where_none_is_wanted(monkeypatch):
    def never(*args):
        raise AssertionError("a gradient was made")
    everywhere(monkeypatch, fusedloss.ctc, "gamma_table", never)
    everywhere(monkeypatch, scaled, "subtract_per_class", never)
    z, y, frames, lengths = case()
    alone = fl.ctc_loss_with_logits(z, y, frames, lengths)
    with torch.no_grad():
        assert torch.equal(fl.ctc_loss_with_logits(z.requires_grad_(), y, frames, lengths), alone)
    with pytest.raises(AssertionError):
        fl.ctc_loss_with_logits(z, y, frames, lengths)


@pytest.mark.parametrize("name", ["scale 60", "blank margin 120", "ragged", "tight"])
@pytest.mark.parametrize("dtype", [f32, f64])
def test_rows_sum_to_zero_and_two_runs_are_equal(name, dtype, device):
    z, y, frames, lengths, blank = hard(name, dtype)
    runs = [graded(fl.ctc_loss_with_logits, z.to(device), y.to(device), frames, lengths, blank, "none") for _ in range(2)]
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert runs[0][1].sum(-1).abs().max() <= (2e-6 if dtype == f32 else 1e-12)
    p = ctc_posteriors(z.to(device), y.to(device), frames, lengths, blank)
    on = torch.arange(len(z), device=device) < torch.tensor(frames, device=device)[:, None]
    torch.testing.assert_close(p.states.sum(-1), (on & (p.log_likelihood > -INF)[:, None]).to(dtype), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["ragged", "T 0 and 1, infeasible", "repeats"])
def test_by_pytorch_a_sequence_alone_is_itself_in_a_batch(name, device):
    z, y, frames, lengths, blank = hard(name)
    z, y = z.to(device), y.to(device)
    loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, blank, "none")
    for n, (T, L) in enumerate(zip(frames, lengths)):
        one, d = graded(fl.ctc_loss_with_logits, z[:T, n:n + 1], y[n:n + 1, :L], [T], [L], blank, "none")
        same_losses(one, loss[n:n + 1], 1e-6)
        torch.testing.assert_close(d[:, 0], dz[:T, n], rtol=0, atol=1e-6)


def test_infeasible_sequences_harm_nobody(device):
    z, y, frames, lengths, blank = hard("T 0 and 1, infeasible")
    z, y = z.to(device), y.to(device)
    loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, blank, "none")
    truth = reference(z, y, frames, lengths)[0].to(loss)
    assert torch.equal(loss.isinf(), truth.isinf()) and loss.isinf().sum() >= 2
    assert not dz[:, loss.isinf()].any() and dz[:, 1].any()
    zeros, same = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, blank, "none", zero_infinity=True)
    assert torch.equal(same, dz) and torch.equal(zeros, loss.masked_fill(loss.isinf(), 0))


@pytest.mark.parametrize("masked", ["used", "unused", "blank", "all but the path"])
def test_masked_classes(masked, device):
    z, y, frames, lengths = case(T=12, N=2, C=6, L=3, labels=[[1, 2, 3], [3, 3, 1]])
    at = {"used": (slice(4, 8), slice(None), 2), "unused": (slice(None), slice(None), 5), "blank": (slice(2, 5), slice(None), 0), "all but the path": (slice(3, 4), slice(None), slice(1, 6))}[masked]
    z[at] = -INF
    truth = reference(z, y, frames, lengths)
    loss, dz = graded(fl.ctc_loss_with_logits, z.to(device), y.to(device), frames, lengths, 0, "none")
    same_losses(loss, truth[0], 1e-6)
    assert dz.isfinite().all() and (dz.cpu().double() - truth[1]).abs().max() <= 1e-6 and not dz[at].any()


@pytest.mark.parametrize("layout", ["batch first", "every other class", "expanded", "reversed classes"])
def test_strided_scores(layout, device):
    z, y, frames, lengths = case()
    z, y = z.to(device), y.to(device)
    if layout == "expanded":
        z = z[:, :1].expand(-1, 6, -1)
    x = {"batch first": lambda: z.transpose(0, 1).contiguous().transpose(0, 1), "every other class": lambda: torch.stack([z, z], -1).flatten(2)[..., ::2],
         "expanded": lambda: z, "reversed classes": lambda: z.flip(-1).contiguous().flip(-1)}[layout]()
    leaf = x.detach().requires_grad_() if layout == "expanded" else x.requires_grad_()
    loss = fl.ctc_loss_with_logits(leaf, y, frames, lengths)
    d, = torch.autograd.grad(loss, leaf)
    want = graded(fl.ctc_loss_with_logits, z.contiguous(), y, frames, lengths)
    torch.testing.assert_close((loss, d), want)


@pytest.mark.parametrize("reduction, dtype", few([*itertools.product(["mean", "none"], [f32, torch.float16])], ("mean", f32), ("none", torch.float16)))
def test_a_compiler_follows(reduction, dtype, device):
    z, y, frames, lengths, _ = hard("ragged", dtype)
    z, y = z.to(device), y.to(device)
    row = torch.cat([labels[:n] for labels, n in zip(y, lengths)])
    for targets in (y, row):
        T, L = torch.tensor(frames), torch.tensor(lengths)
        compiled_loss = torch.compile(lambda x: fl.ctc_loss_with_logits(x * 1, targets, T, L, 0, reduction), fullgraph=True, backend="aot_eager")
        g = torch.arange(6.0, device=device) if reduction == "none" else None
        for a, b in zip(graded(compiled_loss, z, g=g), graded(fl.ctc_loss_with_logits, z, targets, T, L, 0, reduction, g=g)):
            torch.testing.assert_close(a, b, rtol=1e-3 if dtype == torch.float16 else 1e-6, atol=1e-3 if dtype == torch.float16 else 1e-6)


def test_the_operators_are_what_they_declare(device):
    z, y, frames, lengths = case(T=6, N=2, C=4, L=2)
    args = (z.to(device).requires_grad_(), y.to(device), torch.tensor(frames), torch.tensor(lengths), 0, False, 0, True, True)
    torch.library.opcheck(fusedloss.ctc.ctc_operator, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    strided = args[0].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    torch.library.opcheck(fusedloss.ctc.ctc_operator, (strided, *args[1:]), test_utils=("test_schema", "test_faketensor"))
    for divided_by in (None, torch.tensor(lengths)):
        torch.library.opcheck(fusedloss.ctc.ctc_grad_operator, (torch.ones(2, device=device), z.to(device), divided_by), test_utils=("test_schema", "test_faketensor"))


# bad input

@pytest.mark.parametrize("change, error, match", [
    (dict(input_lengths=[24, 23]), ValueError, r"input_lengths\[0\] is 24: expected 0 ≤ length ≤ 23"),
    (dict(input_lengths=[23, -1]), ValueError, r"input_lengths\[1\] is -1"),
    (dict(target_lengths=[7, 8]), ValueError, r"target_lengths\[1\] is 8: expected 0 ≤ length ≤ 7"),
    (dict(input_lengths=[23]), ValueError, "input_lengths: expected 2 integers"),
    (dict(target_lengths=[1.0, 2.0]), ValueError, "target_lengths: expected 2 integers"),
    (dict(targets=torch.full((2, 7), 9)), IndexError, "label 0 of sequence 0 is 9: expected 0 ≤ label < 9"),
    (dict(targets=torch.tensor([[1] * 7, [1, 2, -3, 1, 1, 1, 1]])), IndexError, "label 2 of sequence 1 is -3"),
    (dict(targets=torch.ones(13, dtype=torch.int64)), ValueError, "targets: expected 14 labels, the sum of target_lengths, got 13"),
    (dict(targets=torch.ones(3, 7, dtype=torch.int64)), ValueError, r"targets: expected \[2, L\]"),
    (dict(targets=torch.ones(2, 7)), ValueError, "targets: expected integers"),
    (dict(blank=9), ValueError, "blank: expected a class below 9"),
    (dict(reduction="average"), ValueError, "reduction"),
    (dict(z=torch.zeros(23, 2, 9, dtype=torch.int64)), ValueError, "logits: expected floating point"),
    (dict(z=torch.zeros(9)), ValueError, "logits: expected floating point"),
])
def test_bad_input_is_named(change, error, match):
    z, y, frames, lengths = case(N=2)
    given = dict(z=z, targets=y, input_lengths=frames, target_lengths=lengths) | change
    with pytest.raises(error, match=match):
        fl.ctc_loss_with_logits(given.pop("z"), **given)


@pytest.mark.parametrize("targets", ["a row each", "in one row"])
@pytest.mark.parametrize("loss", [fl.ctc_loss, fl.ctc_loss_with_logits, fl.CTCLoss(), forced_align, ctc_posteriors, lambda z, *given: fl.linear_ctc_loss(z, torch.eye(9), *given)])
def test_scores_with_the_batch_first_are_recognised(loss, targets):
    z, y, frames, lengths = case(N=2)
    with pytest.raises(ValueError, match=r"are the scores \[N, T, ...\]\? transpose\(0, 1\)"):
        loss(z.transpose(0, 1), y if targets == "a row each" else y.flatten(), frames, lengths)
    with pytest.raises(ValueError, match=r"are the scores \[N, T, ...\]\? transpose\(0, 1\)" if targets == "a row each" else "target_lengths: expected the length of each"):
        loss(z.transpose(0, 1), y if targets == "a row each" else y.flatten())
    with pytest.raises(ValueError) as wrong:  # another mistake
        loss(z, y[:1], frames, lengths)
    assert "transpose" not in str(wrong.value)


def test_what_a_recorded_graph_copies_from_stays(monkeypatch):
    "A copy that a CUDA graph repeats reads its pinned source again"
    copy, gpu = SimpleNamespace(to=lambda device, non_blocking: "copy"), torch.device("cuda")
    lengths = torch.tensor([3, 1])
    everywhere(monkeypatch, sequences, "pinned", lambda t: copy)  # also of what is pinned: its owner may write to it
    monkeypatch.setattr(sequences, "graph_sources", [])
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        assert sequences.to_device(lengths, gpu) == "copy" and sequences.graph_sources == [copy] * capturing


def test_a_recorded_graph_with_lengths_on_the_host():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    z, y, frames, lengths, _ = hard("ragged")
    z, y = z.cuda().requires_grad_(), y.cuda()
    assert replays(lambda: torch.autograd.grad(fl.ctc_loss_with_logits(z, y, frames, lengths), z))


def test_padding_is_not_read(device):
    z, y, frames, lengths = case(N=3, lengths=[2, 0, 5], frames=[20, 10, 23])
    y[0, 2:], y[1], y[2, 5:] = -1, 99, 10**12
    z[20:, 0], z[10:, 1] = math.nan, math.nan
    loss, dz = graded(fl.ctc_loss_with_logits, z.to(device), y.to(device), frames, lengths, 0, "none")
    truth = reference(z, y, frames, lengths)
    same_losses(loss, truth[0], 1e-6)
    assert (dz.cpu().double() - truth[1]).abs().max() <= 1e-6


def test_bad_input_on_a_gpu(monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for dtype in (f32, f64):
        z, y, frames, lengths = case(N=6, dtype=dtype)
        good = graded(fl.ctc_loss_with_logits, z.cuda(), y.cuda(), frames, lengths, 0, "none")
        T, L = torch.tensor(frames).cuda(), torch.tensor(lengths).cuda()
        y[1, 2], y[2, 6], T[3], T[4], L[5] = 9, -1, 24, -1, 8
        loss, dz = graded(fl.ctc_loss_with_logits, z.cuda(), y.cuda(), T, L, 0, "none")
        assert loss.isnan().tolist() == [False] + [True] * 5 and not dz[:, 1:].any() and torch.equal(dz[:, 0], good[1][:, 0])
        monkeypatch.setenv("FUSEDLOSS_DEBUG", "1")
        with pytest.raises(ValueError, match=r"input_lengths\[3\] is 24"):
            fl.ctc_loss_with_logits(z.cuda(), y.cuda(), T, L)
        monkeypatch.delenv("FUSEDLOSS_DEBUG")


def test_the_kernels_run_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z, y, frames, lengths = case()
        p = sequences.prepare_targets(z.cuda(), y, torch.tensor(frames), torch.tensor(lengths))
        shape = fusedloss.ctc.kernel_shape(z.cuda(), p)
        assert shape and fusedloss.ctc.kernels_for(0, f32, 9, 0, shape)


def test_no_sequences_and_no_frames(device):
    z = torch.zeros(5, 0, 4, device=device, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    assert fl.ctc_loss_with_logits(z, torch.zeros(0, 3, dtype=torch.int64), none, none, 0, "none").shape == (0,)
    fl.ctc_loss_with_logits(z, torch.zeros(0, 3, dtype=torch.int64), none, none, 0, "sum").backward()
    assert z.grad.shape == z.shape
    z = torch.zeros(0, 2, 4, device=device, requires_grad=True)
    loss = fl.ctc_loss_with_logits(z, torch.tensor([[1], [1]]), [0, 0], [0, 1], 0, "none")
    assert loss.tolist() == [0, INF]
    loss.sum().backward()


# alignments

@on_any
@given(data=st.data())
def test_alignments_are_paths_with_their_scores(data):
    T, N, C, L = (data.draw(st.integers(*r)) for r in ((1, 8), (1, 3), (2, 3), (0, 4)))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    z = torch.randint(0, 2, (T, N, C), generator=g).to(f64)  # full of ties
    y = torch.randint(0, C, (N, L), generator=g)
    frames, lengths = (torch.tensor(data.draw(st.lists(st.integers(*r), min_size=N, max_size=N))) for r in ((0, T), (0, L)))
    best = ctc_graph_max(z, y, frames, lengths)
    for a in (forced_align(z, y, frames, lengths), ctc_sample(z, y, frames, lengths, generator=g)):
        for n, steps in enumerate(frames.tolist()):
            states, labels = a.states[n].tolist(), a.labels[n].tolist()
            assert set(states[steps:]) | set(labels[steps:]) <= {-1} and not a.frame_scores[n, steps:].any()
            if a.score[n] == -INF:
                assert best[n] == INF and set(states) <= {-1}
                continue
            symbols, skip = interleave(y[n:n + 1], 0)[0].tolist(), may_skip(interleave(y[n:n + 1], 0))[0].tolist()
            assert labels[:steps] == [symbols[s] for s in states[:steps]]
            path = [0, *states[:steps]]
            assert all(b - a in (0, 1) or b - a == 2 and skip[b] for a, b in zip(path, path[1:])) and path[-1] >= 2 * lengths[n] - 1
            assert sum(z[t, n, c].item() for t, c in enumerate(labels[:steps])) == a.score[n].item()
    assert torch.equal(forced_align(z, y, frames, lengths).score, -best)


def ctc_graph_max(z, y, frames, lengths):
    "−score of the best path, by stage 19"
    return -logz(*ctc_graph(z, y, lengths, 0), Max, frames)


def test_samples_have_the_frequencies_of_their_posteriors(device):
    z, y, frames, lengths = case(T=6, N=1, C=4, L=2, dtype=f64)
    n = 20000
    drawn = ctc_sample(z.to(device).expand(-1, n, -1), y.to(device).expand(n, -1), [6] * n, [2] * n, generator=torch.Generator(device).manual_seed(0))
    p = ctc_posteriors(z.to(device), y.to(device), frames, lengths).states[0]
    seen = F.one_hot(drawn.states, 5).double().mean(0)
    assert ((seen - p).abs() <= 5 * (p * (1 - p) / n).sqrt() + 1e-12).all()


def test_wrong_targets_have_no_alignment(monkeypatch):
    everywhere(monkeypatch, sequences, "readable_on_host", lambda t: False)  # as on a GPU
    z, y, frames, lengths = case(N=3)
    y[1, 2], lengths[2] = 9, 8
    for a in (forced_align(z, y, frames, lengths), ctc_sample(z, y, frames, lengths)):
        assert a.score.isnan().tolist() == [False, True, True] and (a.states[1:] == -1).all()
    p = ctc_posteriors(z, y, frames, lengths)
    assert p.entropy.isnan().tolist() == p.log_likelihood.isnan().tolist() == [False, True, True] and not p.states[1:].any()


def test_the_paths_of_a_graph_are_counted():
    y = torch.tensor([[1, 2, 3]])
    for T in range(3, 9):
        graph = ctc_graph(torch.zeros(T, 1, 4), y, torch.tensor([3]), 0)
        assert logz(*graph, Count).item() == math.comb(T + 3, 6)


def spans_by_hand(labels, states, frame_scores):
    "The frames of each label of one sequence"
    spans = []
    for k in range(max([0, *states]) // 2 + 1):
        at = [t for t, s in enumerate(states) if s == 2 * k + 1]
        if at:
            assert at == list(range(at[0], at[-1] + 1))
            spans.append((labels[at[0]], at[0], at[-1] + 1, sum(frame_scores[t] for t in at) / len(at)))
    return spans


@pytest.mark.parametrize("name", few(HARD, "ragged", "repeats", "T 0 and 1, infeasible", "another blank, and blanks among the labels", "tight"))
def test_spans_are_the_frames_of_each_label(name):
    z, y, frames, lengths, blank = hard(name, f64)
    a = forced_align(z.log_softmax(-1), y, frames, lengths, blank)
    for n, spans in enumerate(a.spans()):
        assert spans == spans_by_hand(*(t[n].tolist() for t in a[1:]))
        assert [s.label for s in spans] == (y[n, :lengths[n]].tolist() if a.score[n] > -INF else []) and all(s.end <= frames[n] for s in spans)
        alone = forced_align(z[:frames[n], n].log_softmax(-1), y[n, :lengths[n]], [frames[n]], [lengths[n]], blank).spans()
        assert [s[:3] for s in spans] == [s[:3] for s in alone] and [s.score for s in spans] == pytest.approx([s.score for s in alone], rel=1e-12)


@pytest.mark.parametrize("targets", ["padded", "in a row", "one sequence"])
def test_lengths_left_out_are_all_there_is(targets):
    z, y, *_ = case(N=3, T=17, L=4)
    z = z.log_softmax(-1)
    if targets == "one sequence":
        z, y = z[:, 0], y[0]
    calls = [fl.ctc_loss, fl.ctc_loss_with_logits, fl.CTCLoss(), lambda *a, **k: forced_align(*a, **k).score, lambda *a, **k: ctc_posteriors(*a, **k).states]
    for call in calls:
        given, labels = ([17], [4]) if targets == "one sequence" else ([17] * 3, [4] * 3)
        whole = call(z, y, given, labels)
        assert torch.equal(call(z, y, target_lengths=labels), whole)
        if targets != "in a row":
            assert torch.equal(call(z, y), whole) and torch.equal(call(z, y, given), whole)
        else:
            with pytest.raises(ValueError, match="target_lengths: expected the length of each target"):
                call(z, y.flatten())


@pytest.mark.parametrize("pad", [-100, -1])
def test_negative_labels_at_the_end_are_padding(pad, device):
    z, y, _, lengths = case(N=4, T=17, L=4, lengths=[4, 2, 0, 3])
    z, y = z.log_softmax(-1).to(device), y.to(device)
    padded = y.masked_fill(torch.arange(4, device=device) >= torch.tensor(lengths, device=device)[:, None], pad)
    w = torch.randn(9, 9, generator=torch.Generator().manual_seed(1)).to(device)
    calls = {call.__name__: call for call in (fl.ctc_loss, fl.ctc_loss_with_logits, forced_align, ctc_posteriors)}
    calls |= {"CTCLoss": fl.CTCLoss(reduction="none"), "linear_ctc_loss": lambda z, *a: fl.linear_ctc_loss(z, w, *a),
              "ctc_sample": lambda *a: fusedloss.ctc.ctc_sample(*a, generator=torch.Generator(device).manual_seed(0))}
    for name, call in calls.items():
        for labels in (padded, padded.int(), padded.cpu()):
            got, want = call(z, labels), call(z, labels, None, torch.tensor(lengths, device=device))
            got, want = (t if isinstance(t, tuple) else (t,) for t in (got, want))
            assert all(map(torch.equal, got, want)), name
        alone, want = call(z[:, 1], padded[1]), call(z[:, 1], y[1, :2])
        assert all(map(torch.equal, *(t if isinstance(t, tuple) else (t[None],) for t in (alone, want)))) or name == "ctc_posteriors" and device != "cpu", name
        within = padded.clone()
        within[0, 1] = pad  # before other labels it is none of them, and no padding
        if device == "cpu":
            with pytest.raises(IndexError, match=rf"label 1 of sequence 0 is {pad}"): call(z, within)
        elif name == "CTCLoss":
            assert call(z, within).isnan().tolist() == [True, False, False, False]


# planted bugs

MUTANTS = {  # what is wrong: (text of the source, what stands in its place)
    "the repeat rule is forgotten": ("return (before >= 0) & (states != before)", "return (before >= 0) & (torch.arange(states.shape[1]) % 2 == 1)"),
    "blanks are skipped to": ("return (before >= 0) & (states != before)", "return before >= 0"),
    "a path must end in the last blank": ("& (at >= 2 * lengths[:, None] - 1)", "& (at >= 2 * lengths[:, None])"),
    "a path may end anywhere": ("& (at >= 2 * lengths[:, None] - 1)", "& (at >= -1)"),
    "a path may start in any state": ("(at == 0).expand(skip.shape), may_end", "(at >= 0).expand(skip.shape), may_end"),
    "α goes on where a sequence is over": ("update_active(active(frames, t), new, alphas[t])", "new"),
    "γ goes on where a sequence is over": ("gammas[t] = torch.where(go, gamma, 0)", "gammas[t] = gamma"),
    "γ of a skip lands on a neighbour": ("F.pad(two, (0, 2))[:, 2:]", "F.pad(two, (0, 1))[:, 1:]"),
    "equal labels are not added": ("sums.view(len(states), C, len(gammas))", "sums.clamp(max=0.5).view(len(states), C, len(gammas))"),
    "frames beyond the end count": ("torch.where(on, of_rows, 0).sum(0)", "of_rows.sum(0)"),
    "frames beyond the end have a gradient": ("idle = ~on | (log_z", "idle = (~on & False) | (log_z"),
    "a target without a path has one": ("| (log_z == -torch.inf) | bad", "| bad"),
    "zero_infinity is forgotten": ("if zero_infinity: loss = loss", "if False: loss = loss"),
    "the mean divides by N alone": ("lengths.clamp(min=1) * lengths.shape", "lengths.clamp(max=1, min=1) * lengths.shape"),
    "the mean divides by length 0": ("lengths.clamp(min=1) * lengths.shape", "lengths.clamp(min=0) * lengths.shape"),
    "the upstream gradient is dropped": ("factor = g if lengths", "factor = torch.ones_like(g) if lengths"),
    "rows of targets all start at the first label": ("lengths.clamp(min=0).cumsum(0) - lengths", "lengths * 0"),
    "the exact gradient is torch's": ('TORCH_GRADIENT if gradient == "torch" else EXACT_GRADIENT', "TORCH_GRADIENT"),
    "emissions are read from another sequence": (
        "states.expand(len(z), -1, -1)).double()\n    return", "states.flip(0).expand(len(z), -1, -1)).double()\n    return"),
    "the best path takes all frames": ("path = viterbi(*lattice_graph(a.emitted, a.skip, a.lengths), a.frames)", "path = viterbi(*lattice_graph(a.emitted, a.skip, a.lengths))"),
    "labels are those of states one further": ("at, on = states.clamp(min=0), states >= 0", "at, on = (states + 1).clamp(min=0, max=a.states.shape[1] - 1), states >= 0"),
    "scaled rows forget the repeat rule": ("two *= skip", "two *= skip >= 0"),
    "backward, scaled rows skip to another label": ("F.pad(a.skip.flip(1), (2, 0))[:, :-2]", "a.skip.flip(1)"),
    "exponents stay behind their values": ("return ScaledRow(values * factor, new), frames", "return ScaledRow(values * factor, row.exponents), frames"),
    "a state keeps the exponent of what cannot be": ("values = numpy.where(first > 0, row.values, 0)", "values = row.values"),
    "a frame with −∞ is inside a block": (".masked_fill(alone, BITS).amax(1)", ".amax(1)"),
    "frames that span too much are taken": ("if not (bits <= BITS).all(): return None", "bits.clamp_(max=BITS)"),
    "a sequence that is over goes on in its padding": ("return p if on.all() else torch.where(on[..., None], p, a.end)", "return p"),
    "a target longer than all frames is cut": ("(index == 2 * lengths[:, None]).double()", "(index == 2 * lengths[:, None].clamp(max=y.shape[1])).double()"),
    "steps of NumPy lose the skip": ("numpy.add(after, spare, out=after)", "spare"),
    "steps of PyTorch lose the skip": (".addcmul_(left2, two)", ""),
    "a blank among the labels is lost": ("share.scatter_add_(2, of_blank", "share.scatter_(2, of_blank"),
    "the second derivative forgets the factor": ("(torch_extra * leaves[0][:, None])", "(torch_extra * 2 * leaves[0][:, None])"),
}


PLAIN_LOOPS, LONG_ROWS = "the loops in the log domain", "steps of PyTorch, as long rows take them"


def steep(bits, frames=16):
    "How many frames a block may have where a state is so many bits below the one before it"
    row = scaled.ScaledRow(numpy.ones((1, 3)), numpy.array([[0.0, -bits, -bits]]))
    new, frames = scaled.rescale(row, numpy.ones((1, 3)), frames)
    if frames:
        assert numpy.array_equal(numpy.log2(new.values) + new.exponents, row.exponents), "a value is another"
        assert -701 <= numpy.log2(new.values).min() and (numpy.diff(new.exponents) >= -(225 // frames)).all()
    return frames


def test_a_steep_row_shortens_its_block():
    assert [steep(b) for b in (0, 713, 716, 727, 730, 755, 758, 811, 814, 924, 927, 3000)] == [16, 16, 8, 8, 4, 4, 2, 2, 1, 1, 0, 0]
    assert steep(0, 5) == 5


def of_long_rows(sums):
    "Sums over paths by the steps that long rows take"
    module = sys.modules[sums.__module__]

    def changed(*args):
        with mock.patch.object(module, "SHORT", 0):
            return sums(*args)
    return changed


@pytest.mark.parametrize("name", few(HARD, "ragged", "blocks of few frames", "T 0 and 1, infeasible"))
def test_loss_and_gradient_by_the_steps_of_long_rows(name, monkeypatch):
    everywhere(monkeypatch, scaled, "scaled_path_sums", of_long_rows(scaled.scaled_path_sums))
    z, y, frames, lengths, blank = hard(name, f64)
    truth = reference(z, y, frames, lengths, blank)
    loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, blank, "none")
    same_losses(loss, truth[0], 1e-9)
    assert (dz - truth[1]).abs().max() <= 1e-9


OTHERS = ["another blank, and blanks among the labels", "a label that once cannot be", "T 0 and 1, infeasible", "empty targets"]


def taken_by_torch(m, z, *rest, **options):
    "Loss and gradient where PyTorch's own loss may take them; whether it did"
    done, none = [], m.torch_loss

    def noted(*args):
        done.append(TORCH_LOSS[m](*args))
        return done[-1]
    try:
        m.torch_loss = noted
        return *graded(options.pop("loss", m.ctc_loss_with_logits), z, *rest, **options), done[0] is not None
    finally:
        m.torch_loss = none


def torch_fault(m, names):
    "The first case in which PyTorch's own loss is taken and differs from the library's, or is another than expected"
    for name in names:
        z, y, frames, lengths, blank = hard(name, f64)
        own = not (name in OTHERS or (torch.tensor(lengths) == 0).any() or len(lengths) * (z.shape[2] + 2 * y.shape[1] + 1) > 512)
        truth = reference(z, y, frames, lengths, blank)
        loss, dz, taken = taken_by_torch(m, z, y, frames, lengths, blank, "none")
        if not torch.allclose(loss, truth[0], atol=1e-9) or not torch.allclose(dz, truth[1], atol=1e-9):
            return name
        if taken and not own:
            return f"{name}, taken"
        row = torch.cat([labels[:n] for labels, n in zip(y, lengths)])
        for reduction, zero, targets in itertools.product(("none", "sum", "mean"), (False, True), (y, row)):
            for options in (dict(gradient="torch"), dict(gradient="exact"), dict(loss=m.ctc_loss_with_logits)):
                g = torch.linspace(-1, 2, len(lengths), dtype=f64) if reduction == "none" else torch.tensor(-1.7, dtype=f64)
                given = z.log_softmax(-1), targets, frames, lengths, blank, reduction, zero
                want = graded(options.get("loss", m.ctc_loss), *given, g=g, **{k: v for k, v in options.items() if k != "loss"})
                *found, _ = taken_by_torch(m, *given, g=g, **({"loss": m.ctc_loss} | options))
                if not all(torch.allclose(a, b, atol=1e-9) for a, b in zip(found, want)):
                    return f"{name}, {reduction}, {options}"


TORCH_LOSS = {fusedloss.ctc: fusedloss.ctc.torch_loss}  # of the module and of its planted variants
TORCH_MUTANTS = {
    "labels may be the blank": ("& (p.y != blank) | ~inside", "| ~inside"),
    "scores may be infinite": ("if not x.isfinite().all(): return None", ""),
    "the exact gradient is PyTorch's": ("dz.sub_(x.exp())", "pass"),
    "log-probabilities for logits": ("if score_kind == LOGITS: x = x.log_softmax(-1)", ""),
    "lengths of zero": ("(t >= 1) & (t <= most)", "(t >= 0) & (t <= most)"),
}


def test_few_sequences_by_torchs_own_loss():
    assert torch_fault(fusedloss.ctc, ["plain", "tight", "two equal labels in two frames", *OTHERS]) is None
    z, y, frames, lengths, blank = hard("plain", f64)
    assert taken_by_torch(fusedloss.ctc, z, y, frames, lengths, blank, "none")[2], "few sequences are not taken"
    many = case(N=8, dtype=f64)
    assert not taken_by_torch(fusedloss.ctc, *many, 0, "none")[2] and not taken_by_torch(fusedloss.ctc, *case(T=9, N=1, C=600, dtype=f64), 0, "none")[2]


@pytest.mark.parametrize("dtype", [f32, torch.bfloat16, torch.float16])
def test_the_gradient_of_few_sequences_has_the_digits_of_its_dtype(dtype):
    "In float32 PyTorch's own has five less, at 1500 frames"
    z, y, frames, lengths = case(T=400, N=2, L=30, dtype=dtype)
    want = graded(fl.ctc_loss_with_logits, z.double(), y, frames, lengths, 0, "none")
    loss, dz, taken = taken_by_torch(fusedloss.ctc, z, y, frames, lengths, 0, "none")
    assert taken and loss.dtype == f32 and dz.dtype == dtype
    same_losses(loss, want[0], 1e-6)
    assert (dz.double() - want[1]).abs().max() <= {f32: 1e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


@pytest.mark.thorough
@pytest.mark.parametrize("bug", TORCH_MUTANTS)
def test_a_bug_planted_in_the_use_of_torchs_loss_is_noticed(bug, tmp_path):
    changed = planted(fusedloss.ctc, tmp_path, *TORCH_MUTANTS[bug])
    TORCH_LOSS[changed] = changed.torch_loss
    changed.torch_loss = lambda *args: None
    try:
        assert torch_fault(changed, ["two equal labels in two frames", *OTHERS]), f"no check notices that {bug}"
    except (RuntimeError, IndexError):
        pass  # PyTorch refuses


def first_fault(m):
    "The first of a few checks that a version of the module does not pass"
    with contextlib.ExitStack() as changes:
        return fault_of_some(m, changes)


def fault_of_some(m, changes):
    "`first_fault`; what it changes beside the version is undone by `changes`"
    m.torch_loss = lambda *args: None  # of this variant
    for name in ("ragged", "repeats", "T 0 and 1, infeasible", "empty targets", "another blank, and blanks among the labels", "longer than all frames",
                 "blocks of few frames", "a label that once cannot be", "emissions beyond a double", LONG_ROWS, "ragged", "blocks of few frames", "a label that once cannot be", PLAIN_LOOPS, "ragged", "repeats",
                 "T 0 and 1, infeasible"):
        if name == LONG_ROWS:
            home = sys.modules[m.scaled_loss.__module__]
            changes.enter_context(mock.patch.object(home, "scaled_path_sums", of_long_rows(home.scaled_path_sums)))
            continue
        if name == PLAIN_LOOPS:
            m.scaled_loss = lambda *args: None  # of this variant
            continue
        z, y, frames, lengths, blank = hard(name, f64)
        truth = reference(z, y, frames, lengths, blank)
        loss, dz = graded(m.ctc_loss_with_logits, z, y, frames, lengths, blank, "none")
        if not torch.allclose(loss, truth[0], atol=1e-9) or not torch.allclose(dz, truth[1], atol=1e-9):
            return f"logits, {name}"
        T, L = torch.tensor(frames), torch.tensor(lengths)
        log_p, row = z.log_softmax(-1), torch.cat([labels[:n] for labels, n in zip(y, lengths)])
        if not torch.allclose(m.ctc_by_logz(log_p, y, T, L, blank), truth[0]):
            return f"the graph, {name}"
        g, share = torch.linspace(-1, 2, len(loss), dtype=f64), 1 / (L.clamp(min=1) * len(L))
        for targets in (y, row):
            for zero in (False, True):
                wanted = torch.where(truth[0].isinf(), 0, truth[0]) if zero else truth[0]
                if not torch.allclose(m.ctc_loss(log_p, targets, T, L, blank, "mean", zero), (wanted * share).sum()):
                    return f"the mean, {name}"
        for gradient, extra in (("torch", 0), ("exact", log_p.exp() * ((torch.arange(len(z))[:, None] < T) & truth[0].isfinite())[..., None])):
            d = graded(m.ctc_loss, log_p, y, T, L, blank, "none", gradient=gradient, g=g)[1]
            if not torch.allclose(d, g[:, None] * (truth[1] - extra), atol=1e-9):
                return f"the {gradient} gradient, {name}"
        a, best = m.forced_align(log_p, y, T, L, blank), logz(*ctc_graph(log_p, torch.where(torch.arange(y.shape[1]) < L[:, None], y, blank), L, blank), Max, T)
        if not torch.allclose(a.score, best) or any(collapsed(a.labels[n, :t].tolist(), blank) != [c for c in y[n, :L[n]].tolist() if c != blank] for n, t in enumerate(frames) if best[n] > -INF and blank == 0):
            return f"alignment, {name}"
        if m.ctc_posteriors(log_p, y, T, L, blank).states[torch.arange(len(z)) >= T[:, None]].any():
            return f"posteriors, {name}"
    z, y, frames, lengths = case(T=4, N=2, C=3, L=2, dtype=f64)
    x = z.log_softmax(-1).requires_grad_()

    def slope(x):
        return torch.autograd.grad(m.ctc_loss(x, y, frames, lengths, 0, "sum"), x, create_graph=True)[0].square().sum()
    step = torch.zeros_like(z)
    step[1, 0, 1] = 1e-5
    if abs(torch.autograd.grad(slope(x), x)[0][1, 0, 1] - (slope(x + step) - slope(x - step)) / 2e-5) > 1e-6:
        return "the second derivative"


@pytest.mark.thorough
def test_the_unchanged_source_passes(tmp_path):
    assert first_fault(planted(fusedloss.ctc, tmp_path, *unchanged(MUTANTS.values()))) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", few(MUTANTS, "the repeat rule is forgotten", "γ of a skip lands on a neighbour", "frames beyond the end count", "zero_infinity is forgotten",
                                    "rows of targets all start at the first label", "the best path takes all frames", "the second derivative forgets the factor"))
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert fault_of(first_fault, fusedloss.ctc, tmp_path, *MUTANTS[bug]), f"no check notices that {bug}"


KERNEL_MUTANTS = {  # what is wrong: (the case that notices it, text of cuda/ctc.cu, what stands in its place)
    "the repeat rule is forgotten": ("ragged", "skip[i] = real && j > 0 && y != p.y[DIR ? p.length - j : j - 1];", "skip[i] = real && j > 0;"),
    "states are not renormalised": ("flat", "label[k] = renormalised(label[k]), blank[k] = renormalised(blank[k]);", ""),
    "beta has its frame's emission": ("ragged", "const State l1 = DIR ? l0 : label[k], b1 = DIR ? b0 : blank[k];", "const State l1 = label[k], b1 = blank[k];"),
    "alpha and beta meet a frame apart": ("ragged", "half = DIR ? p.frames - middle + 1 : middle;", "half = DIR ? p.frames - middle : middle;"),
    "a warp does not wait for the one before": ("three warps", "} while (!there && warp > 0);", "} while (false);", "while ((__float_as_int(get(ring + slot + AHEAD - 1).m) < 0) != lap) ;", ";"),
    "a ring is written before it is read": ("long", "while (get(own_taken) < count + AHEAD - RING) ;", ""),
    "the lap of a ring is not told": ("three warps", "| (lap ^ (int)over) << 31", "| lap << 31"),
    "lane 0 takes its neighbour from lane 31": ("ragged", "if (lane == 0) up = before[i];", ""),
    "exponents are shared by a pair": ("pairs apart", "label[k] = times(l0, emitted[i][k]), blank[k] = times(b0, by_blank[i]);",
                                       "label[k] = times(l0, emitted[i][k]), blank[k] = times(b0, by_blank[i]); { const int e = max(label[k].e, blank[k].e);"
                                       " label[k] = {label[k].m * exp2_whole(label[k].e - e), e}, blank[k] = {blank[k].m * exp2_whole(blank[k].e - e), e}; }"),
    "equal labels are not added": ("ragged", "atomicAdd(&class_posteriors[label[i]], g);", "class_posteriors[label[i]] = g;"),
    "a frame's posteriors are not divided by their sum": ("ragged", "target_coef = inv_denominator / (float)(blank_sum + label_sum)", "target_coef = inv_denominator / 1073741824.0f * 1.01f"),
    "log Z is a logarithm to base 2": ("ragged", "0.6931471805599453 * z.e", "z.e"),
    "frames beyond the end count": ("ragged", "for (int t = threadIdx.x; t < frames[n]; t += 256) {", "for (int t = threadIdx.x; t < frames[n] + 1; t += 256) {"),
    "infeasible targets have a gradient": ("T 0 and 1, infeasible", "if (t >= frames[n] || !(total.m > 0.0f)) {", "if (t >= frames[n] || total.m != total.m) {"),
    "labels out of range are read": ("ragged", "good = __syncthreads_and(inside);", "good = __syncthreads_and(inside) || true;"),
    "a mean made in backward forgets the factor": ("the mean in fp16", "factor = g ? g[(i64)n * g_stride] : 1.0f;", "factor = 1.0f;"),
    "a frame's labels are written before all classes": ("the mean in fp16", "  sync_row();\n  put_labels(0);\n", "", "  sync_row();\n  UNROLL\n", "  put_labels(0);\n  sync_row();\n  UNROLL\n"),
    "the blank's sum is not cleared": ("the mean in fp16", "in_slab(k < length ? labels[k] : blank, c0);\n      if (c >= 0) sums[c] = 0;", "in_slab(labels[k], c0);\n      if (k < length && c >= 0) sums[c] = 0;"),
    "the blank is not written again": ("the mean in fp16", "k <= length; k += ROWTHREADS) {\n      const int j", "k < length; k += ROWTHREADS) {\n      const int j"),
    "the first block adds the losses": ("ragged", "== (u32)N - 1;", "== 0u;"),
    "losses are not counted from 0": ("ragged", "log_z[gridDim.x / CLUSTER] = {0.0f, 0};", "log_z[gridDim.x / CLUSTER] = {1.0f, 1};"),
    "the mean forgets N": ("ragged", "(float)(lengths[n] > 1 ? lengths[n] : 1) * (float)N)", "(float)(lengths[n] > 1 ? lengths[n] : 1))"),
}


def kernel_case(name):
    "A case that the kernels must pass, and the order in which threads take turns"
    if name in ("long", "flat"):  # in a long one the first warp is faster than the others
        return (*case(T=200, N=1, L=40, C=9, seed=3, scale=float(name == "long")), 0), 2 * (name == "long")
    if name == "pairs apart":
        return (*case(T=120, N=1, C=9, L=50, scale=60.0), 0), 0
    return hard(name), 0


def kernel_fault(*cases):
    "The first of a few checks that the kernels at hand do not pass"
    for name in cases:
        if name == "the mean in fp16":
            if mean_fault():
                return name
            continue
        (z, y, frames, lengths, blank), fusedloss.ctc.ctc_kernel.seed = kernel_case(name)
        truth = reference(z, y, frames, lengths, blank)
        loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, blank, "none")
        if not torch.equal(loss.isinf(), truth[0].isinf()) or not torch.allclose(loss.double(), truth[0], rtol=1e-6, atol=1e-6) or not (dz - truth[1]).abs().max() <= 2e-6:
            return name
        share = 1 / (torch.tensor(lengths).clamp(min=1) * len(lengths))
        if not torch.allclose(fl.ctc_loss_with_logits(z, y, frames, lengths, blank).double(), (truth[0] * share).sum()):
            return f"{name}, mean"
        y[0, 1:2] = z.shape[2]
        if lengths[0] > 1 and not fl.ctc_loss_with_logits(z, y, frames, lengths, 0, "none")[0].isnan():
            return f"{name}, a bad label"


CHECKED = few(["the mean in fp16", "ragged", "repeats", "T 0 and 1, infeasible", "three warps", "long", "flat", "pairs apart"], "the mean in fp16", "ragged", "three warps")


def use_bugged(monkeypatch, *pairs):
    "Let the library take kernels with texts replaced, on the CPU"
    use(on_cpu(replaced(cuda_source("ctc"), *pairs)), monkeypatch)
    everywhere(monkeypatch, sequences, "readable_on_host", lambda t: False)


def test_the_unchanged_kernels_pass(monkeypatch):
    use_bugged(monkeypatch)
    assert kernel_fault(*CHECKED) is None


@pytest.mark.parametrize("bug", thorough_but(
    few(KERNEL_MUTANTS, "the repeat rule is forgotten", "beta has its frame's emission", "a warp does not wait for the one before",
        "the lap of a ring is not told", "equal labels are not added", "labels out of range are read", "the mean forgets N",
        "a mean made in backward forgets the factor", "the blank's sum is not cleared", "the first block adds the losses"),
    "the repeat rule is forgotten"))
def test_a_bug_planted_in_the_kernels_is_noticed(bug, monkeypatch):
    case, *pairs = KERNEL_MUTANTS[bug]
    use_bugged(monkeypatch, *pairs)
    assert kernel_fault(case), f"no check notices that {bug}"


@pytest.mark.parametrize("given", ["tensors", "lists"])
def test_lengths_stay_where_they_are(given):
    "A default device is where new tensors are made: lengths on a CPU are still seen there, and checked"
    z, y = torch.randn(12, 2, 5), torch.randint(1, 5, (2, 3))
    lengths = [12, 9], [3, 2]
    if given == "tensors": lengths = [*map(torch.tensor, lengths)]
    expected = fl.ctc_loss_with_logits(z, y, *lengths)
    with torch.device("meta"):
        assert torch.equal(fl.ctc_loss_with_logits(z, y, *lengths), expected)
        with pytest.raises(ValueError, match=r"input_lengths\[0\] is 13"):
            fl.ctc_loss_with_logits(z, y, [13, 9], lengths[1])


def test_states_of_a_lattice():
    states = interleave(torch.tensor([[5, 5, 2]]), 0)
    assert states.tolist() == [[0, 5, 0, 5, 0, 2, 0]] and may_skip(states).nonzero().tolist() == [[0, 5]]
    alpha, skip = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[False, False, True]])
    assert lattice.predecessors(alpha, skip).tolist() == [[[1, 2, 3]], [[-math.inf, 1, 2]], [[-math.inf, -math.inf, 1]]]
    new, old = torch.ones(2, 1), torch.zeros(2, 1)
    assert lattice.update_active(lattice.active(torch.tensor([1, 3]), 1), new, old).tolist() == [[0.0], [1.0]]
    for longest, clusters in itertools.product((0, 31, 500, 5000), (False, True)):
        assert scan_shape(longest, clusters).plane > longest
    assert scan_shape(5000, False).strips > 1 == scan_shape(500, True).strips


def test_sums_of_a_frame():
    one_frame = torch.tensor([[[0.1, 0.2, 0.3, 0.4, 0.0]]], dtype=torch.float64)
    sums = sequences.sum_per_class(one_frame, torch.tensor([[0, 2, 0, 2, 0]]), 3)
    torch.testing.assert_close(sums, torch.tensor([[[0.4, 0.0, 0.6]]], dtype=torch.float64))
    lse_of = lambda value: sequences.softmax_and_lse(torch.full((1, 1, 2), value))[1].item()
    assert abs(lse_of(1e6) - 1e6 - math.log(2)) < 1e-7 and lse_of(-math.inf) == -math.inf
    assert sequences.inv_denominators(torch.tensor([0, 4]), True, torch.float32).tolist() == [0.5, 0.125]
    spans = sequences.spans_of([0, 4, 4, 0, 4, -1], [0, 1, 1, 2, 3, -1], [-1.0, -2.0, -4.0, -1.0, -6.0, 0.0])
    assert spans == [(4, 1, 3, -3.0), (4, 4, 5, -6.0)]


def test_targets_in_a_row_and_in_a_matrix():
    scores, rows = torch.empty(6, 2, 4), torch.tensor([[1, 2, 3], [3, 2, 1]])
    assert sequences.as_lengths([6, 5], "input_lengths", scores).tolist() == [6, 5]
    assert [t.tolist() for t in sequences.both_lengths(None, None, scores, rows)] == [[6, 6], [3, 3]]
    made = sequences.prepare_targets(scores, rows[0], torch.tensor([6, 5]), torch.tensor([1, 2]))
    assert (made.y[0, :1].tolist(), made.y[1].tolist(), made.width, made.longest) == ([1], [2, 3], 2, 3)
    wrong = made._replace(y=torch.tensor([[1, 9], [2, 3]]), lengths=torch.tensor([2, 2]))
    y, *_, bad = sequences.clamped_targets(wrong, 6, 4, 0)
    assert (y.tolist(), bad.tolist()) == ([[1, 0], [2, 3]], [True, False])
    assert sequences.add_batch_dim(scores[:, 0], rows[0], True)[1].shape == (1, 3)


@pytest.mark.parametrize("kind, call, words", [
    (ValueError, lambda z, y: sequences.as_lengths(torch.ones(2), "target_lengths", z), "target_lengths: expected 2 integers"),
    (ValueError, lambda z, y: sequences.both_lengths(None, None, z, y), "target_lengths: expected the length of each target"),
    (ValueError, lambda z, y: sequences.check_ctc(z, y, 4, "mean", "logits"), "blank: expected a class below 4, got 4"),
    (IndexError, lambda z, y: sequences.check_sequence_labels(torch.tensor([[1, 4]]), torch.tensor([2]), 4), "label 1 of sequence 0 is 4: expected 0 ≤ label < 4")])
def test_wrong_sequences_are_refused(kind, call, words):
    with pytest.raises(kind, match=words):
        call(torch.empty(6, 2, 4), torch.tensor([1, 2, 3]))


def test_blocks_of_frames_are_as_long_as_a_power_of_two_reaches():
    y = torch.tensor([[1, 1, 2, 3], [3, 2, 1, 1], [2, 2, 2, 0], [0, 0, 0, 0]])
    def lattice_of(scale):
        z = torch.randn(40, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
        return scaled.scaled_lattice(z.log_softmax(-1), y, torch.tensor([40, 23, 5, 31]), torch.tensor([4, 4, 3, 0]), 0)
    frames = lambda scale: [block.at.stop - block.at.start for block in scaled.forward_blocks(lattice_of(scale))[0]]
    assert sum(frames(1)) == 41 and max(frames(1)) == scaled.FRAMES and max(frames(25)) < 8 and lattice_of(200) is None


@pytest.mark.parametrize("strides", [(20, 1, 1), (1, 1, 1), (8, 8, 1), (16, 0, 1), (2, 1, 6)], ids=str)
def test_scores_that_overlap_have_the_gradient_of_a_copy(strides, with_kernels):
    given, y = torch.randn(200).as_strided((6, 2, 8), strides), torch.tensor([[1, 2], [3, 3]])
    for reduction in ("none", "mean"):
        found = []
        for z in (given, given.contiguous()):
            z = z.detach().requires_grad_()  # a clone would lie otherwise
            loss = fl.ctc_loss_with_logits(z, y, None, torch.tensor([2, 2]), reduction=reduction)
            found.append((loss, torch.autograd.grad(loss.sum(), z)[0]))
        (a, da), (b, db) = found
        assert torch.equal(a, b) and torch.equal(da, db)


LENGTHS = {"ctc_loss": lambda z, y, frames, lengths: fl.ctc_loss(z.log_softmax(2), y, frames, lengths, reduction="none"),
           "ctc_loss_with_logits": lambda z, y, frames, lengths: fl.ctc_loss_with_logits(z, y, frames, lengths, reduction="none"),
           "linear_ctc_loss": lambda z, y, frames, lengths: fl.linear_ctc_loss(z, torch.eye(z.shape[2], device=z.device), y, frames, lengths, reduction="none"),
           "transducer_loss": lambda z, y, frames, lengths: fl.transducer_loss(z.transpose(0, 1)[:, :, None].expand(-1, -1, y.shape[1] + 1, -1).contiguous(), y.int(), frames, lengths, blank=0, reduction="none"),
           "forced_align": lambda z, y, frames, lengths: fl.forced_align(z.log_softmax(2), y, frames, lengths)[1],
           "ctc_posteriors": lambda z, y, frames, lengths: fl.ctc_posteriors(z.log_softmax(2), y, frames, lengths)}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_lie_in_memory_as_they_like(name, device):
    "A column of a larger tensor, or one number for all: kernels read them one after the other"
    z, y = torch.randn(9, 3, 7, device=device), torch.randint(1, 7, (3, 4), device=device)
    for frames, lengths in ((torch.tensor([[9, 5], [7, 0], [8, -1]]), torch.tensor([[4, 9], [2, 9], [3, 9]])), (torch.tensor([[8, 0]]).expand(3, 2), torch.tensor([[3, 0]]).expand(3, 2))):
        given = frames.to(device)[:, 0], lengths.to(device)[:, 0]
        found, expected = (LENGTHS[name](z, y, *of) for of in (given, [t.contiguous() for t in given]))
        for a, b in zip(found if isinstance(found, tuple) else [found], expected if isinstance(expected, tuple) else [expected]):
            assert torch.equal(a, b)


def test_lengths_are_made_one_after_the_other():
    z = torch.zeros(9, 3, 7)
    for lengths in (torch.arange(12)[::4], torch.arange(12).view(3, 4)[:, 1].int(), torch.tensor([2]).expand(3)):
        found = sequences.as_lengths(lengths, "input_lengths", z)
        assert found.is_contiguous() and found.dtype == torch.int64 and found.tolist() == lengths.tolist()
