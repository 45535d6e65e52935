"""CTC: loss, gradient, alignments, by PyTorch and by the kernels, whose source also runs on a CPU; bugs planted in both."""
import ctypes
import itertools
import math
import platform
import shutil
import subprocess
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

import fusedloss as fl
import fusedloss.ctc
from fusedloss.ctc import ctc_by_logz, ctc_graph, ctc_posteriors, ctc_sample, forced_align, interleave, may_skip, scan_shape
from fusedloss.kernels import cuda_source
from fusedloss.measure import saved_tensors
from fusedloss.semirings import Count, Entropy, Log, Max, brute_force
from helpers import planted

INF = math.inf
HERE = Path(__file__).parent
ARCHITECTURES = [75, 80, 90, 100]
on_any = settings(max_examples=60, deadline=None, derandomize=True)
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
    return z.to(dtype), y, frames or [T] * N, lengths or [L] * N


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
}


def hard(name, dtype=f32):
    options = dict(HARD[name])
    z, y, frames, lengths = case(dtype=dtype, **options)
    if name == "large offset":
        z = z + 1000
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

def compiled(command, out, constants, source):
    "Compile with constants, or fail with what the compiler says"
    done = subprocess.run([*command, "-o", str(out), *(f"-D{k}={v}" for k, v in constants.items()), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def on_cpu(folder, source=None):
    "A stand-in for `ctc_kernel`, whose kernels are compiled as C++ and run thread by thread"
    if platform.machine() != "x86_64" or not shutil.which("g++"):
        pytest.skip("no g++ for x86-64 on this machine")
    (folder / "ctc.cu").write_text(source or cuda_source("ctc"), encoding="utf-8")
    for name in ("cuda_on_cpu.h", "ctc_on_cpu.cpp"):
        shutil.copy(HERE / name, folder / name)
    made = {}

    def kernel(name, device, **constants):
        key = tuple(constants.items())
        if key not in made:
            command = ["g++", "-std=c++20", "-O2", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
            made[key] = ctypes.CDLL(str(compiled(command, folder / f"{len(made)}.so", constants, folder / "ctc_on_cpu.cpp")))

        def launch(grid, block, *args):
            assert 32 <= block <= 1024 and block % 32 == 0
            arguments = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else None if a is None else a for a in args]
            getattr(made[key], f"run_{name.removeprefix('ctc_')}")(grid, block, kernel.seed, *arguments)
        return launch
    kernel.seed = 0
    return kernel


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return on_cpu(tmp_path_factory.mktemp("kernels"))


def shape_on_cpu(z, p, shape=None):
    "`kernel_shape` as it is on a GPU"
    if z.dtype not in fusedloss.ctc.ELEMENTS or z.numel() == 0:
        return None
    return shape or scan_shape(p.width, True)


@pytest.fixture
def with_kernels(kernels, monkeypatch):
    "The library as it is on a GPU, the kernels' source on the CPU"
    monkeypatch.setattr(fusedloss.ctc, "ctc_kernel", kernels)
    monkeypatch.setattr(fusedloss.ctc, "kernel_shape", shape_on_cpu)
    monkeypatch.setattr(kernels, "seed", 0)
    return kernels


@pytest.mark.parametrize("name", HARD)
def test_the_kernels_source(name, with_kernels):
    z, y, frames, lengths, blank = hard(name)
    truth = reference(z, y, frames, lengths, blank)
    loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, blank, "none")
    same_losses(loss, truth[0], 1e-6)
    assert (dz.double() - truth[1]).abs().max() <= 1e-6
    assert torch.equal(fl.ctc_loss_with_logits(z, y, frames, lengths, blank, "none"), loss), "the loss alone is another"


SHAPES = [(1, 8, 1, 4), (1, 8, 4, 2), (2, 4, 2, 2), (2, 8, 1, 2), (4, 4, 2, 1), (1, 4, 8, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_scan_in_other_shapes_and_orders(shape, seed, with_kernels, monkeypatch):
    shape = fusedloss.ctc.ScanShape(*shape)
    monkeypatch.setattr(fusedloss.ctc, "kernel_shape", partial(shape_on_cpu, shape=shape))
    monkeypatch.setattr(with_kernels, "seed", seed)
    for name in ("ragged", "T 0 and 1, infeasible", "repeats", "three warps", "tight"):
        z, y, frames, lengths, blank = hard(name)
        truth = reference(z, y, frames, lengths, blank)
        loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, blank, "none")
        same_losses(loss, truth[0], 1e-6)
        assert (dz.double() - truth[1]).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_the_kernels_source_in_half_precision(dtype, tolerance, with_kernels):
    z, y, frames, lengths, blank = hard("ragged", dtype)
    truth = reference(z, y, frames, lengths, blank)
    loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, blank, "none")
    same_losses(loss, truth[0], 1e-6)
    assert dz.dtype == dtype and (dz.double() - truth[1]).abs().max() <= tolerance


@pytest.mark.parametrize("C", [31, 33, 1024, 1025, 8192, 8193, 20000])
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


def test_bad_input_of_the_kernels_source_is_nan_and_harms_nobody(with_kernels, monkeypatch):
    monkeypatch.setattr(fusedloss.ctc, "visible", lambda t: False)
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


@pytest.mark.parametrize("T, L", [(300, 256), (560, 511), (560, 512)])
def test_the_kernels_source_with_long_targets(T, L, with_kernels):
    z, y, frames, lengths = case(T=T, N=1, L=L, C=30)
    y[:, 1::2] = 1 + y[:, 1::2] % 14
    y[:, ::2] = 15 + y[:, ::2] % 14  # no repeats: it fits
    truth = graded(fl.ctc_loss_with_logits, z.double(), y, frames, lengths, 0, "none")
    loss, dz = graded(fl.ctc_loss_with_logits, z, y, frames, lengths, 0, "none")
    same_losses(loss, truth[0], 1e-6)
    assert (dz.double() - truth[1]).abs().max() <= 2e-6


VARIANTS = [dict(ELEMENT=e, PAIRS=p, AHEAD=a, CLUSTER=c, THREADS=t) for e, p, a, c, t in
            [("f32", 1, 8, 1, 256), ("bf16", 4, 4, 1, 512), ("f16", 1, 8, 2, 128), ("f32", 1, 8, 8, 256), ("f32", 4, 4, 8, 512)]]
VARIANTS += [dict(ELEMENT=e, PER=p, ROWTHREADS=r, NORMALISE=n, SOFTMAX=s) for e, p, r, n, s in
             [("f32", 1, 32, 1, 1), ("bf16", 32, 32, 0, 1), ("f16", 32, 256, 1, 1), ("f32", 5, 256, 0, 0)]]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("constants", VARIANTS, ids=lambda d: " ".join(map(str, d.values())))
def test_the_kernels_compile_without_a_gpu(arch, constants, tmp_path):
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc on this machine")
    if constants.get("CLUSTER", 1) > 1 and arch < 90:
        return  # the library asks for no cluster there
    source = tmp_path / "ctc.cu"
    source.write_text(cuda_source("ctc"), encoding="utf-8")
    compiled(["nvcc", "--std=c++17", "-Werror=all-warnings", f"-arch=sm_{arch}", "-cubin"], tmp_path / "out", constants, source)


def test_shapes_without_clusters_are_never_given_one():
    for longest in range(9000):
        few, many = scan_shape(longest, False), scan_shape(longest, True)
        assert few is None or few.cluster == 1 and few.plane > longest and few.threads <= 512
        assert (many is None) == (longest > 8191) and (many is None or many.plane > longest)


def test_a_missing_compiler_is_said_and_done_without(monkeypatch):
    def missing(source, name, options):
        raise OSError("no NVRTC")
    monkeypatch.setattr(fusedloss.ctc, "_by_cupy", missing)
    monkeypatch.setattr(fusedloss.ctc, "_by_torch", missing)
    monkeypatch.setattr(fusedloss.ctc, "kernel_shape", shape_on_cpu)
    fusedloss.ctc.ctc_kernel.cache_clear()
    z, y, frames, lengths, _ = hard("ragged")
    with pytest.warns(UserWarning, match="PyTorch takes its place.*no NVRTC"):
        loss = fl.ctc_loss_with_logits(z, y, frames, lengths, 0, "none")
    fusedloss.ctc.ctc_kernel.cache_clear()
    same_losses(loss, reference(z, y, frames, lengths)[0], 1e-6)
