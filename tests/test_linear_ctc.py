"""CTC of a linear layer: loss and gradients by loops, by Triton and by the lattice's kernel run on a CPU; bugs planted in all."""
import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

import fusedloss as fl
import fusedloss.linear_ctc
import fusedloss.segments
from fusedloss.core import sequences
from fusedloss.core.cuda import cuda_source
from fusedloss.core.devices import GPUS
from fusedloss.core.tiling import tiling_of
from fusedloss.core.lattice import scan_shape, ScanShape
from fusedloss.ctc import ctc_by_logz, ctc_loss_with_logits
from fusedloss.linear_ctc import linear_ctc_loss
from fusedloss.segments import compile_kernels, default_budget, FrameCounts, label_symbols, segment_frames
from workbook.measure import peak_memory, relative_error, saved_tensors
from grids import FULL, few, thorough_but
from helpers import everywhere, has_no_second_derivative, interpreted, need_kernels, planted, replaced, unchanged
from on_cpu import check_nvcc, kernels_on_cpu
from test_ctc import HARD, case, collapsed, hard, reference, same_losses, ways

INF = math.inf
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter


# three ways: loops and products, the lattice's kernels, and beside them the softmax by Triton

def lattice_on_cpu(*pairs):
    "The kernels of linear_ctc.cu and of ctc.cu, or of the first of them that has the text with it replaced"
    sources = {name: cuda_source(name) for name in ("linear_ctc", "ctc")}
    name = next((name for name, source in sources.items() if pairs and pairs[0] in source), "linear_ctc")
    return kernels_on_cpu("linear_ctc_on_cpu.cpp", **sources | {name: replaced(sources[name], *pairs)})


@pytest.fixture(scope="module")
def lattice():
    return lattice_on_cpu()


def use_lattice(kernel, monkeypatch, shape=None):
    "Let segments take them, on the CPU"
    module = fusedloss.segments
    compile_kernels.cache_clear()
    everywhere(monkeypatch, module, "runs_kernels", lambda e: e.dtype == f32 and e.numel() > 0)
    everywhere(monkeypatch, module, "device_of", lambda t: GPUS["H200"])
    everywhere(monkeypatch, module, "scan_shape", lambda longest, clusters: shape or scan_shape(longest, clusters))
    everywhere(monkeypatch, module, "lattice_kernel", kernel)


def take_rows(monkeypatch, takes):
    "Let the Triton kernels of this loss take what `takes` says"
    for module in (fusedloss.segments, fusedloss.linear_ctc):
        monkeypatch.setattr(module, "takes_kernel", takes)


@pytest.fixture(autouse=True)
def no_kernels_left():
    yield
    compile_kernels.cache_clear()


def parts_of(K):
    "As many parts of a segment as divide it, up to three"
    return next(parts for parts in (3, 2, 1) if K % parts == 0)


def short_segments(monkeypatch, K, sweep=2):
    "K frames a segment, so many of them in a launch of α alone"
    everywhere(monkeypatch, fusedloss.linear_ctc, "frame_counts", lambda *given: FrameCounts(K, sweep * K, 3 * K, parts_of(K)))


WAYS = few(["loops", "lattice", "both", "GPU"], "loops", "both", "GPU")
OF_LAYERS = [name for name in HARD if name != "a label that once cannot be"]  # no layer of finite weights gives -inf
HARDER = few(OF_LAYERS, "ragged", "T 0 and 1, infeasible", "two equal labels in two frames", "another blank, and blanks among the labels")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    "The device, where the library goes one of its ways"
    if request.param == "GPU":
        if not torch.cuda.is_available():
            pytest.skip("no GPU on this machine")
        return "cuda"
    if request.param == "both":
        need_kernels("cpu")
        take_rows(monkeypatch, lambda x: x.dtype == f32 and len(x) > 0)
    if request.param in ("lattice", "both"):
        use_lattice(request.getfixturevalue("lattice"), monkeypatch)
    return "cpu"


# the cases of stage 20: any logits are a linear layer of themselves, with orthogonal weights

def layer(z, bias=True):
    "x, w, b in float64 with x wᵀ + b = z"
    C = z.shape[-1]
    g = torch.Generator().manual_seed(3)
    w = torch.linalg.qr(torch.randn(C, C, generator=g, dtype=f64))[0]
    b = torch.linspace(-1, 1, C, dtype=f64) if bias else None
    return (z.double() - (0 if b is None else b)) @ w, w, b


def upstream_of(N, dtype=f64):
    return (torch.arange(N, dtype=f64) * 0.75 - 1).to(dtype)


def truth_of(x, w, b, y, frames, lengths, blank):
    "Losses and gradients by the reference, float64"
    x, w = x.double(), w.double()
    z = x @ w.T if b is None else x @ w.T + b.double()
    losses, dz = reference(z, y, frames, lengths, blank)
    dz = dz * upstream_of(len(losses))[:, None]
    return losses, [dz @ w, dz.flatten(0, 1).T @ x.flatten(0, 1), None if b is None else dz.sum((0, 1))]


def run(x, w, b, y, frames, lengths, blank=0, device="cpu", loss=None, **options):
    "Losses and gradients"
    x, w, b = (None if t is None else t.detach().to(device).clone().requires_grad_() for t in (x, w, b))
    losses = (loss or fl.linear_ctc_loss)(x, w, y.to(device), frames, lengths, linear_bias=b, blank=blank, reduction="none", **options)
    leaves = [t for t in (x, w, b) if t is not None]
    got = torch.autograd.grad(losses, leaves, upstream_of(len(losses), losses.dtype).to(device))
    return losses.detach(), [*got, None][:3]


def close(got, truth, tolerance):
    "Gradients, relative to the largest element"
    for name, a, e in zip(("dx", "dw", "db"), got, truth):
        if e is None:
            assert a is None
        else:
            error = (a.cpu().double() - e).abs().max() / e.abs().max().clamp(min=1e-3) if e.numel() else torch.tensor(0.0)
            assert error <= tolerance, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("name", HARDER)
@pytest.mark.parametrize("way, dtype", [*((w, f32) for w in WAYS), ("loops", f64), ("GPU", f64)], indirect=["way"])
def test_loss_and_gradients(name, dtype, way, monkeypatch):
    z, y, frames, lengths, blank = hard(name, f64)
    x, w, b = (t.to(dtype) for t in layer(z))
    losses, gradients = truth_of(x, w, b, y, frames, lengths, blank)
    size = max(1.0, z.abs().max().item())  # what lse and scores are rounded relative to
    tolerance = 1e-10 if dtype == f64 else (4e-6 if way == "cpu" else 1e-5) * size  # each BLAS sums in an order of its own
    for K in (7, 1000):
        short_segments(monkeypatch, K)
        got, d = run(x, w, b, y, frames, lengths, blank, way)
        assert got.dtype == dtype and all(t.dtype == dtype for t in d)
        same_losses(got, losses, tolerance)
        close(d, gradients, tolerance)


SHORT = ("ragged", 5), ("T 0 and 1, infeasible", 2), ("repeats", 8), ("three warps", 33)


def short_cases_are_right(monkeypatch, *cases):
    "Losses and gradients in fp32 of a few cases, each in segments of so many frames"
    for name, K in cases:
        short_segments(monkeypatch, K)
        z, y, frames, lengths, blank = hard(name, f64)
        given = [t.float() for t in layer(z)]
        losses, gradients = truth_of(*given, y, frames, lengths, blank)
        got, d = run(*given, y, frames, lengths, blank)
        same_losses(got, losses, 5e-6)
        close(d, gradients, 1e-5)


SHAPES = [(1, 8, 1, 4), (1, 8, 4, 2), (2, 4, 2, 2), (2, 8, 1, 2), (4, 4, 2, 1), (1, 4, 8, 1), (1, 8, 1, 1, 4), (1, 4, 1, 2, 2)]


@pytest.mark.thorough
@pytest.mark.parametrize("shape, seed", few([(shape, seed) for shape in SHAPES for seed in (0, 1)], (SHAPES[2], 1), (SHAPES[6], 1)), ids=str)
def test_the_lattice_in_other_shapes_and_orders(shape, seed, lattice, monkeypatch):
    use_lattice(lattice, monkeypatch, ScanShape(*shape))
    monkeypatch.setattr(lattice, "seed", seed)
    short_cases_are_right(monkeypatch, *few(SHORT, SHORT[1], SHORT[3]), ("tight", 3))


@pytest.mark.thorough
@pytest.mark.parametrize("threads, near, packed", few([(t, *how) for t in (64, 256) for how in ((True, True), (False, True), (False, False))], (64, False, False)))
def test_warps_that_share_a_row(threads, near, packed, lattice, monkeypatch):
    "Rows of the cases above are short enough for one warp, and for shared memory"
    if packed:
        need_kernels("cpu")
    use_lattice(lattice, monkeypatch)
    everywhere(monkeypatch, fusedloss.linear_ctc, "finish_threads", lambda row: threads)
    take_rows(monkeypatch, lambda x: packed and len(x) > 0)
    if not near:
        everywhere(monkeypatch, fusedloss.segments, "finish_shared_bytes", lambda *given: 100_000)
    monkeypatch.setattr(lattice, "seed", 2)
    short_cases_are_right(monkeypatch, *few(SHORT, SHORT[0]), ("more classes", 9))


@pytest.mark.parametrize("K", thorough_but(few([1, 2, 3, 8, 9, 22, 23, 24], 1, 8, 22), 8))
def test_segments_change_nothing(K, way, monkeypatch):
    z, y, frames, lengths, _ = hard("ragged", f64)
    given = [t.float() for t in layer(z)]
    short_segments(monkeypatch, 1000)
    whole = run(*given, y, frames, lengths, device=way)
    short_segments(monkeypatch, K)
    cut = run(*given, y, frames, lengths, device=way)
    same_losses(cut[0], whole[0], 1e-6)
    close(cut[1], [t.cpu().double() for t in whole[1]], 5e-6)


@pytest.mark.parametrize("dtype, tolerance", [(bf16, 2e-2), (f16, 3e-3)])
def test_half_precision(dtype, tolerance, device):
    z, y, frames, lengths, _ = hard("ragged", f64)
    given = [t.to(dtype) for t in layer(z)]
    losses, gradients = truth_of(*given, y, frames, lengths, 0)
    got, d = run(*given, y, frames, lengths, device=device)
    assert got.dtype == f32 and all(t.dtype == dtype for t in d)
    same_losses(got, losses, 1e-5)  # scores are summed in fp32
    close(d, gradients, tolerance)


def test_small_factors_survive_half_precision(device):
    "1 / (L N) and a small upstream gradient: below the smallest number of fp16"
    z, y, frames, lengths, _ = hard("ragged", f64)
    given = [t.to(f16) for t in layer(z, bias=False)[:2]]
    one = run(*given, None, y, frames, lengths, device=device)[1]
    x, w = (t.to(device).requires_grad_() for t in given)
    loss = linear_ctc_loss(x, w, y.to(device), frames, lengths, reduction="none").float()
    d = torch.autograd.grad(loss, [x, w], upstream_of(6, f32).to(device) * 2**-9)
    if device == "cuda":  # on a CPU dx itself is rounded
        close([t.cpu().double() * 2**9 for t in d], [t.cpu().double() for t in one[:2]], 2e-3)


# all of it in forward, for a mean or a sum

def run_all(x, w, b, y, frames, lengths, blank=0, device="cpu", loss=None, reduction="mean", factor=-1.75, **options):
    "Loss and gradients; upstream is one number"
    leaves = [None if t is None else t.detach().to(device).clone().requires_grad_() for t in (x, w, b)]
    out = (loss or fl.linear_ctc_loss)(*leaves[:2], y.to(device), frames, lengths, linear_bias=leaves[2], blank=blank, reduction=reduction,
                                       **options)
    asked = [t for t in leaves if t is not None]
    got = torch.autograd.grad(out, asked, torch.tensor(factor, dtype=out.dtype, device=device))
    return out.detach(), [*got, None][:3]


def truth_of_all(x, w, b, y, frames, lengths, blank, reduction="mean", factor=-1.75):
    "The same by the reference, in float64"
    x, w = x.double(), w.double()
    z = x @ w.T if b is None else x @ w.T + b.double()
    losses, dz = reference(z, y, frames, lengths, blank)
    part = torch.ones(len(losses), dtype=f64)
    if reduction == "mean":
        part = 1 / (torch.as_tensor(lengths).clamp(min=1) * len(losses)).double()
    dz = dz * (part * factor)[:, None]
    return (losses * part).sum(), [dz @ w, dz.flatten(0, 1).T @ x.flatten(0, 1), None if b is None else dz.sum((0, 1))]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", HARDER)
@pytest.mark.parametrize("way, dtype", [*((w, f32) for w in WAYS), ("loops", f64), ("GPU", f64)], indirect=["way"])
def test_all_in_forward(name, dtype, way, reduction, monkeypatch):
    z, y, frames, lengths, blank = hard(name, f64)
    given = [t.to(dtype) for t in layer(z)]
    loss, gradients = truth_of_all(*given, y, frames, lengths, blank, reduction)
    size = max(1.0, z.abs().max().item())
    tolerance = 1e-10 if dtype == f64 else (4e-6 if way == "cpu" else 1e-5) * size  # each BLAS sums in an order of its own
    for K in (7, 1000):
        short_segments(monkeypatch, K)
        got, d = run_all(*given, y, frames, lengths, blank, way, reduction=reduction)
        assert got.dtype == dtype and all(t.dtype == dtype for t in d)
        same_losses(got[None], loss[None], tolerance)
        largest = max([e.abs().max().item() for e in gradients if e.numel()], default=0)
        for a, e in zip(d, gradients):  # with one sign upstream, db nearly cancels
            assert not e.numel() or (a.cpu().double() - e).abs().max() <= tolerance * max(largest, 1e-3)


@pytest.mark.parametrize("shape", few(SHAPES, SHAPES[2]), ids=str)
def test_all_in_forward_in_other_shapes(shape, lattice, monkeypatch):
    use_lattice(lattice, monkeypatch, ScanShape(*shape))
    for name, K in (("ragged", 5), ("T 0 and 1, infeasible", 2), ("repeats", 8), ("three warps", 33)):
        short_segments(monkeypatch, K)
        z, y, frames, lengths, blank = hard(name, f64)
        given = [t.float() for t in layer(z)]
        loss, gradients = truth_of_all(*given, y, frames, lengths, blank)
        got, d = run_all(*given, y, frames, lengths, blank)
        same_losses(got[None], loss[None], 5e-6)
        close(d, gradients, 1e-5)


@pytest.mark.parametrize("reduction, zero_infinity", thorough_but([*itertools.product(("mean", "sum"), (False, True))], ("mean", False), ("sum", True)))
def test_both_ways_agree(reduction, zero_infinity, way, monkeypatch):
    "Gradients in forward, and recomputed from the losses that `reduction=\"none\"` returns"
    short_segments(monkeypatch, 7)
    z, y, frames, lengths, _ = hard("ragged", f64)
    frames[3], lengths[3] = 1, 2  # infeasible
    given = [t.float() for t in layer(z)]
    leaves = [t.to(way).requires_grad_() for t in given]
    losses = linear_ctc_loss(*leaves[:2], y.to(way), frames, lengths, linear_bias=leaves[2], reduction="none", zero_infinity=zero_infinity)
    part = sequences.inv_denominators(torch.tensor(lengths), reduction == "mean", f32).to(way)
    want = (losses * part).sum()
    got, d = run_all(*given, y, frames, lengths, device=way, reduction=reduction, zero_infinity=zero_infinity)
    same_losses(got[None], want.detach().cpu()[None].double(), 1e-6)
    close(d, [t.cpu().double() for t in torch.autograd.grad(want, leaves, torch.tensor(-1.75, device=way))], 5e-6)


def test_padding_beside_all_in_forward(way, monkeypatch):
    "Left out where lengths are known; computed, and counting nothing, where not"
    z, y, frames, lengths, _ = hard("ragged", f64)
    x, w, b = (t.float() for t in layer(z))
    short_segments(monkeypatch, 7)
    want = run_all(x, w, b, y, frames, lengths, device=way)
    spoilt = x.clone()
    for n, k in enumerate(frames):
        spoilt[k:, n] = math.nan
    got = run_all(spoilt, w, b, y, frames, lengths, device=way)
    assert torch.equal(got[0], want[0]) and all(torch.equal(a, e) for a, e in zip(got[1], want[1]))
    assert not any(got[1][0][k:, n].any() for n, k in enumerate(frames))
    everywhere(monkeypatch, sequences, "readable_on_host", lambda t: False)
    got = run_all(x, w, b, y, frames, lengths, device=way)
    same_losses(got[0][None], want[0].cpu()[None], 1e-6)
    close(got[1], [t.cpu().double() for t in want[1]], 2e-6)


def test_bad_input_beside_all_in_forward(way, monkeypatch):
    everywhere(monkeypatch, sequences, "readable_on_host", lambda t: False)
    short_segments(monkeypatch, 10)
    z, y, frames, lengths = case(N=6, dtype=f64)
    given = [t.float() for t in layer(z)]
    good = run_all(*given, y, frames, lengths, device=way)
    y[1, 2], y[2, 6], frames[3], frames[4], lengths[5] = 9, -1, 24, -1, 8
    loss, (dx, dw, _) = run_all(*given, y, frames, lengths, device=way)
    assert loss.isnan() and not dx[:, 1:].any() and dw.isfinite().all()
    assert relative_error(dx[:, 0], good[1][0][:, 0]) < 1e-6
    z, y, frames, lengths = case(N=3, dtype=f64)
    x, w, b = (t.float() for t in layer(z))
    good = run_all(x, w, b, y, frames, lengths, device=way)
    x[5, 1] = math.nan
    loss, (dx, _, _) = run_all(x, w, b, y, frames, lengths, device=way)
    assert loss.isnan() and dx[5, 1].isnan().all()
    assert relative_error(dx[:, ::2], good[1][0][:, ::2]) < 1e-6


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_masked_classes_beside_all_in_forward(zero_infinity, way, monkeypatch):
    short_segments(monkeypatch, 10)
    z, y, frames, lengths = case(N=3, dtype=f64)
    y[0], y[1:] = torch.tensor([1, 2, 3, 8, 1, 2, 3]), torch.tensor([1, 2, 3, 4, 5, 6, 7])
    x, w, b = layer(z)
    b[8] = -INF
    given = x.float(), w.float(), b.float()
    loss, d = run_all(*given, y, frames, lengths, device=way, zero_infinity=zero_infinity, reduction="sum")
    assert loss.isfinite() if zero_infinity else loss == INF
    assert all(t.isfinite().all() for t in d) and not d[0][:, 0].any() and not d[1][8].any()
    finite = fl.linear_ctc_loss(*(t.to(way) for t in given[:2]), y.to(way), frames, lengths, linear_bias=given[2].to(way), reduction="sum",
                                zero_infinity=True)
    if zero_infinity:
        torch.testing.assert_close(loss, finite)


@pytest.mark.parametrize("T, N, L", [(0, 2, 0), (0, 2, 3), (5, 0, 3), (5, 2, 0), (0, 0, 0)])
def test_sizes_of_zero_all_in_forward(T, N, L, device):
    x, w = torch.randn(T, N, 4, device=device, requires_grad=True), torch.randn(6, 4, device=device, requires_grad=True)
    y = torch.ones(N, L, dtype=torch.int64, device=device)
    loss = linear_ctc_loss(x, w, y, [T] * N, [L] * N)
    torch.testing.assert_close(loss, ctc_loss_with_logits(x @ w.T, y, [T] * N, [L] * N))
    d = torch.autograd.grad(loss, [x, w])
    assert all(g.isfinite().all() and g.shape == t.shape for g, t in zip(d, (x, w)))


def test_half_precision_all_in_forward(device):
    z, y, frames, lengths, _ = hard("ragged", f64)
    given = [t.to(bf16) for t in layer(z)]
    loss, gradients = truth_of_all(*given, y, frames, lengths, 0)
    got, d = run_all(*given, y, frames, lengths, device=device)
    assert got.dtype == f32 and all(t.dtype == bf16 for t in d)
    same_losses(got[None], loss[None], 1e-5)
    close(d, gradients, 2e-2)


@pytest.mark.parametrize("V", few([600, 601, 1030, 4203], 601, 1030))
def test_rows_of_many_classes(V, way):
    "A warp or a block a row, whole packs or single classes, more than the loads that come early"
    g = torch.Generator().manual_seed(2)
    x, w, b = torch.randn(7, 2, 8, generator=g), torch.randn(V, 8, generator=g), torch.randn(V, generator=g)
    y = torch.tensor([[V - 1, 40, V - 1], [5, 64, 2]])
    loss, gradients = truth_of_all(x, w, b, y, [7, 5], [3, 3], 35)
    got, d = run_all(x, w, b, y, [7, 5], [3, 3], 35, device=way)
    same_losses(got[None], loss[None], 1e-5)
    close(d, gradients, 1e-5)


@pytest.mark.parametrize("offset", [0.0, 60.0, -60.0])
def test_tiles_far_apart(offset, way):
    "Scores that differ by hundreds from tile to tile, and rows that are sure"
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(9, 2, 8, generator=g), torch.randn(70, 8, generator=g)
    b = torch.where(torch.arange(70) // 32 == 1, 300.0, offset)
    y = torch.tensor([[33, 40, 33], [5, 64, 2]])
    loss, gradients = truth_of_all(x, w, b, y, [9, 8], [3, 3], 35)
    got, d = run_all(x, w, b, y, [9, 8], [3, 3], 35, device=way)
    same_losses(got[None], loss[None], 1e-5)
    close(d, gradients, 2e-4)  # of scores of 300 in float32


# brute force

@pytest.mark.parametrize("T, y, blank", [(0, [], 0), (1, [1], 0), (3, [1, 1], 0), (4, [1, 2], 0), (5, [1, 2, 1], 0), (5, [0, 1], 2), (6, [2, 2], 1),
                                         (4, [], 1), (2, [1, 1], 0)])
def test_all_strings_of_symbols(T, y, blank, way, monkeypatch):
    short_segments(monkeypatch, 2)
    z = torch.randn(T, 1, 3, generator=torch.Generator().manual_seed(T), dtype=f64)
    x, w, b = layer(z)
    log_p = z.log_softmax(-1)
    paths = [p for p in itertools.product(range(3), repeat=T) if collapsed(p, blank) == y]
    total = math.log(sum(math.exp(sum(log_p[t, 0, c].item() for t, c in enumerate(p))) for p in paths)) if paths else -INF
    for dtype, tolerance in ((f64, 1e-12), (f32, 1e-5)):
        got = linear_ctc_loss(*(t.to(way, dtype) for t in (x, w)), torch.tensor([y], dtype=torch.int64).to(way), [T], [len(y)],
                              linear_bias=b.to(way, dtype), blank=blank, reduction="none")
        assert got.item() == pytest.approx(-total, abs=tolerance)


@settings(max_examples=40 if FULL else 15, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_batch(data):
    T, N, C, L, H = (data.draw(st.integers(*r)) for r in ((0, 6), (1, 3), (2, 4), (0, 3), (1, 3)))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    x, w, b = (torch.randn(*s, generator=g, dtype=f64).requires_grad_() for s in ((T, N, H), (C, H), (C,)))
    y, blank = torch.randint(0, C, (N, L), generator=g), data.draw(st.integers(0, C - 1))
    frames, lengths = (torch.tensor(data.draw(st.lists(st.integers(0, k), min_size=N, max_size=N))) for k in (T, L))
    with pytest.MonkeyPatch.context() as patch:
        short_segments(patch, data.draw(st.integers(1, 7)))
        got = linear_ctc_loss(x, w, y, frames, lengths, linear_bias=b, blank=blank, reduction="none")
        finite = got.isfinite()
        d = torch.autograd.grad(got, (x, w, b), torch.ones_like(got))
    exact = ctc_by_logz((x @ w.T + b).log_softmax(-1), y, frames, lengths, blank)
    torch.testing.assert_close(got, exact.clamp(min=0))  # with blanks among the labels, paths are counted twice
    e = torch.autograd.grad(exact[finite].sum(), (x, w, b), materialize_grads=True)
    torch.testing.assert_close(d, e, rtol=1e-8, atol=1e-9)


@settings(max_examples=60 if FULL else 30, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 4), max_size=9), st.integers(0, 4))
def test_equal_labels_have_one_number(labels, blank):
    own = label_symbols(torch.tensor([labels, labels], dtype=torch.int64).view(2, -1), blank)
    want = [0 if c == blank else 1 + labels.index(c) for c in labels]
    assert own.tolist() == [want, want]


# the interface, beside torch's

@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_every_form_of_the_arguments(reduction, zero_infinity, device):
    z, y, frames, lengths, _ = hard("ragged", f64)
    frames[3], lengths[3] = 1, 2  # infeasible
    leaves = [t.to(device).requires_grad_() for t in layer(z)]
    g = upstream_of(6) if reduction == "none" else torch.tensor(-1.7, dtype=f64)
    log_p = (leaves[0] @ leaves[1].T + leaves[2]).log_softmax(-1).cpu().detach().requires_grad_()
    loss = F.ctc_loss(log_p, y, frames, lengths, 0, reduction, zero_infinity)
    dz = torch.autograd.grad(loss, log_p, g)[0].nan_to_num(0)  # where torch has NaN
    x, w = (t.detach().cpu() for t in leaves[:2])
    truth = dz @ w, dz.flatten(0, 1).T @ x.flatten(0, 1), dz.sum((0, 1))
    for targets, T, L in ways(y, frames, lengths):
        got = linear_ctc_loss(*leaves[:2], targets.to(device), T, L, linear_bias=leaves[2], reduction=reduction, zero_infinity=zero_infinity)
        torch.testing.assert_close(got.detach().cpu(), loss.detach())
        for a, e in zip(torch.autograd.grad(got, leaves, g.to(device)), truth):
            torch.testing.assert_close(a.cpu(), e)


def test_lengths_on_a_gpu_are_not_waited_for():
    if not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    z, y, frames, lengths, _ = hard("ragged", f64)
    given, y = [t.float().cuda().requires_grad_() for t in layer(z)], y.cuda()
    want = linear_ctc_loss(*given[:2], y, frames, lengths, linear_bias=given[2])
    on_gpu = [torch.tensor(t).cuda() for t in (frames, lengths)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = linear_ctc_loss(*given[:2], y, *on_gpu, linear_bias=given[2])
        d = torch.autograd.grad(got, given)
        on_host = torch.autograd.grad(linear_ctc_loss(*given[:2], y, frames, lengths, linear_bias=given[2]), given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(d, on_host)


def test_lengths_that_nobody_looks_at(way, monkeypatch):
    "As on a GPU: padding is computed, and counts nothing"
    z, y, frames, lengths, _ = hard("ragged", f64)
    given = [t.float() for t in layer(z)]
    short_segments(monkeypatch, 7)
    want = run(*given, y, frames, lengths, device=way)
    everywhere(monkeypatch, sequences, "readable_on_host", lambda t: False)
    got = run(*given, y, frames, lengths, device=way)
    same_losses(got[0], want[0], 1e-6)
    close(got[1], [t.cpu().double() for t in want[1]], 2e-6)


def test_padding_is_never_looked_at(way, monkeypatch):
    z, y, frames, lengths, _ = hard("ragged", f64)
    x, w, b = (t.float() for t in layer(z))
    short_segments(monkeypatch, 7)
    want = run(x, w, b, y, frames, lengths, device=way)
    for n, k in enumerate(frames):
        x[k:, n] = math.nan
    y[torch.arange(7) >= torch.tensor(lengths)[:, None]] = 10**12
    got = run(x, w, b, y, frames, lengths, device=way)
    assert torch.equal(got[0], want[0]) and all(torch.equal(a, e) for a, e in zip(got[1], want[1]))
    for n, k in enumerate(frames):
        assert not got[1][0][k:, n].any()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_a_single_sequence(reduction, device):
    z, y, *_ = case(N=1, dtype=f64)
    x, w, b = (t.to(device) for t in layer(z))
    for T, L in ((23, 7), (torch.tensor(20), torch.tensor(5)), ([20], (5,))):
        labels = y[0, :L if isinstance(L, int) else None].to(device)
        one = linear_ctc_loss(x[:, 0], w, labels, T, L, linear_bias=b, reduction=reduction)
        want = ctc_loss_with_logits(z[:, 0].to(device), labels, T, L, reduction=reduction)
        assert one.shape == want.shape
        torch.testing.assert_close(one, want)


@pytest.mark.parametrize("requires", [r for r in itertools.product([False, True], repeat=3)])
def test_gradients_are_there_where_they_are_asked_for(requires, device, monkeypatch):
    z, y, frames, lengths, _ = hard("ragged", f64)
    short_segments(monkeypatch, 9)
    leaves = [t.to(device).requires_grad_() for t in layer(z)]
    want = torch.autograd.grad(linear_ctc_loss(*leaves[:2], y.to(device), frames, lengths, linear_bias=leaves[2]), leaves)
    leaves = [t.detach().requires_grad_(r) for t, r in zip(leaves, requires)]
    loss = linear_ctc_loss(*leaves[:2], y.to(device), frames, lengths, linear_bias=leaves[2])
    assert loss.requires_grad == any(requires)
    if any(requires):
        loss.backward()
    for t, r, e in zip(leaves, requires, want):
        torch.testing.assert_close(t.grad, e if r else None)


def test_finite_differences(device, monkeypatch):
    short_segments(monkeypatch, 2)
    g = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*s, generator=g, dtype=f64).to(device).requires_grad_() for s in ((5, 2, 3), (4, 3), (4,)))
    y = torch.tensor([[1, 1], [3, 2]]).to(device)
    def loss(x, w, b): return linear_ctc_loss(x, w, y, (5, 4), (2, 1), linear_bias=b, reduction="none")
    assert torch.autograd.gradcheck(loss, (x, w, b))


def test_a_graph_used_twice_gives_the_same_bits(way, monkeypatch):
    short_segments(monkeypatch, 6)
    z, y, frames, lengths, _ = hard("ragged", f64)
    leaves = [t.float().to(way).requires_grad_() for t in layer(z)]
    def loss(): return linear_ctc_loss(*leaves[:2], y.to(way), frames, lengths, linear_bias=leaves[2])
    first = loss()
    one = torch.autograd.grad(first, leaves, retain_graph=True)
    two = torch.autograd.grad(first, leaves)
    three = torch.autograd.grad(loss(), leaves)
    for other in (two, three):
        assert all(torch.equal(a, e) for a, e in zip(other, one))
    scaled = torch.autograd.grad(-3 * loss(), leaves)
    assert all(relative_error(a, -3 * e) < 1e-6 for a, e in zip(scaled, one))


def test_a_second_derivative_is_refused():
    z, y, frames, lengths, _ = hard("ragged", f64)
    x, w, b = layer(z)
    x.requires_grad_()
    for reduction in ("mean", "none"):
        assert has_no_second_derivative(linear_ctc_loss(x, w, y, frames, lengths, reduction=reduction).sum(), x)


def test_strides_and_slices(way, monkeypatch):
    "Batch first, expanded targets, a slice of a larger weight"
    short_segments(monkeypatch, 8)
    z, y, frames, lengths, _ = hard("plain", f64)
    x, w, b = (t.float() for t in layer(z))
    want = run(x, w, b, y[:1].expand(6, -1), frames, lengths, device=way)
    wide = torch.full((18, 9), math.nan)
    wide[::2] = w
    xs, ws = x.transpose(0, 1).contiguous().to(way).transpose(0, 1).requires_grad_(), wide.to(way)[::2].requires_grad_()
    losses = linear_ctc_loss(xs, ws, y[:1].expand(6, -1).to(way), frames, lengths, linear_bias=b.to(way), reduction="none")
    d = torch.autograd.grad(losses, [xs, ws], upstream_of(6, f32).to(way))
    same_losses(losses.detach(), want[0], 1e-6)
    close([*d, None], [*(t.cpu().double() for t in want[1][:2]), None], 1e-6)


@pytest.mark.parametrize("T, N, L", [(0, 2, 0), (0, 2, 3), (5, 0, 3), (5, 2, 0), (0, 0, 0)])
def test_sizes_of_zero(T, N, L, device):
    x, w = torch.randn(T, N, 4, device=device, requires_grad=True), torch.randn(6, 4, device=device, requires_grad=True)
    y = torch.ones(N, L, dtype=torch.int64, device=device)
    loss = linear_ctc_loss(x, w, y, [T] * N, [L] * N, reduction="none")
    want = ctc_loss_with_logits(x @ w.T, y, [T] * N, [L] * N, reduction="none")
    torch.testing.assert_close(loss, want)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss.sum(), [x, w]))


def test_no_features(device):
    "Scores are the biases alone; lengths differ"
    x, w, b = (torch.zeros(size, device=device, requires_grad=True) for size in ((5, 2, 0), (6, 0), (6,)))
    y, frames, lengths = torch.tensor([[1, 2], [3, 1]], device=device), [5, 3], [2, 1]
    found, want = (torch.autograd.grad(losses, [x, w, b], torch.ones_like(losses)) for losses in (
        linear_ctc_loss(x, w, y, frames, lengths, linear_bias=b, reduction="none"), ctc_loss_with_logits(x @ w.T + b, y, frames, lengths, reduction="none")))
    for a, e in zip(found, want):
        torch.testing.assert_close(a, e)


# bad input

def test_bad_input_is_nan_and_harms_nobody(way, monkeypatch):
    everywhere(monkeypatch, sequences, "readable_on_host", lambda t: False)
    short_segments(monkeypatch, 10)
    z, y, frames, lengths = case(N=6, dtype=f64)
    given = [t.float() for t in layer(z)]
    good = run(*given, y, frames, lengths, device=way)
    y[1, 2], y[2, 6], frames[3], frames[4], lengths[5] = 9, -1, 24, -1, 8
    losses, (dx, dw, _) = run(*given, y, frames, lengths, device=way)
    assert losses.isnan().tolist() == [False] + [True] * 5 and not dx[:, 1:].any()
    same_losses(losses[:1], good[0][:1], 1e-6)
    assert relative_error(dx[:, 0], good[1][0][:, 0]) < 1e-6 and dw.isfinite().all()


def test_not_a_number_stays_visible(way, monkeypatch):
    short_segments(monkeypatch, 10)
    z, y, frames, lengths = case(N=3, dtype=f64)
    x, w, b = (t.float() for t in layer(z))
    good = run(x, w, b, y, frames, lengths, device=way)
    x[5, 1] = math.nan
    losses, (dx, _, _) = run(x, w, b, y, frames, lengths, device=way)
    assert losses.isnan().tolist() == [False, True, False] and dx[5, 1].isnan().all()
    same_losses(losses[::2], good[0][::2], 1e-6)
    assert relative_error(dx[:, ::2], good[1][0][:, ::2]) < 1e-6


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_masked_classes(zero_infinity, way, monkeypatch):
    "A bias of −∞: infeasible for who needs the class, nothing for the others"
    short_segments(monkeypatch, 10)
    z, y, frames, lengths = case(N=3, dtype=f64)
    y[0], y[1:] = torch.tensor([1, 2, 3, 8, 1, 2, 3]), torch.tensor([1, 2, 3, 4, 5, 6, 7])
    x, w, b = layer(z)
    b[8] = -INF
    given = x.float(), w.float(), b.float()
    losses, d = run(*given, y, frames, lengths, device=way, zero_infinity=zero_infinity)
    assert losses[0] == (0 if zero_infinity else INF) and losses[1:].isfinite().all()
    assert all(t.isfinite().all() for t in d) and not d[0][:, 0].any() and not d[1][8].any()
    keep = [0, 1, 2, 3, 4, 5, 6, 7]
    truth = reference((x @ w[keep].T + b[keep])[:, 1:], y[1:], frames[1:], lengths[1:])
    same_losses(losses[1:], truth[0], 1e-5)


# memory

@pytest.mark.thorough
@pytest.mark.parametrize("budget", few([None, 2**21], None))
def test_memory_beyond_the_gradients(budget):
    "On a CPU, every byte counted: an eighth of what stored logits hold, or what was asked for"
    g = torch.Generator().manual_seed(0)
    T, N, V, H, L = ((1000, 16, 600, 8, 6) if FULL else (500, 8, 600, 8, 6)) if budget is None else (400, 4, 1000, 16, 5)
    x, w = (torch.randn(*s, generator=g).requires_grad_() for s in ((T, N, H), (V, H)))
    y = torch.randint(1, V, (N, L), generator=g)
    if budget is None:
        fewer = pytest.MonkeyPatch()
        fewer.setattr(fusedloss.segments, "BUDGET", 2**20)
    def step(): return torch.autograd.grad(linear_ctc_loss(x, w, y, [T] * N, [L] * N, memory_budget=budget), [x, w])
    try:
        extra = peak_memory(step) - x.nbytes - w.nbytes
    finally:
        if budget is None:
            fewer.undo()
    most = budget or default_budget(T, N, V, H, L, 4)
    assert extra <= most <= (budget or T * N * (8 * V + 24 * 32) / 8), (extra, most)


def test_a_budget_has_room_for_autocasts_copies():
    "Of operands without a gradient: of others the float32 gradient has their bytes, and those of the gradient in 16 bits"
    x, w, y = torch.randn(512, 8, 256), torch.randn(64, 256), torch.randint(1, 64, (8, 10))
    copies = 2 * (x.numel() + w.numel())
    budget = 6 * copies // 5
    with torch.autocast("cpu", bf16):
        assert peak_memory(lambda: linear_ctc_loss(x, w, y, reduction="none", memory_budget=budget), "cpu") < budget + 2**17
        with pytest.raises(ValueError, match=f"memory_budget: expected more than the {copies} bytes of autocast's"):
            linear_ctc_loss(x, w, y, memory_budget=copies)
        x.requires_grad_()
        assert peak_memory(lambda: torch.autograd.grad(linear_ctc_loss(x, w, y, reduction="none", memory_budget=budget).sum(), x), "cpu") - x.nbytes < budget + 2**17
        loss = linear_ctc_loss(x, w, y, memory_budget=10 * copies)
        assert torch.equal(loss, linear_ctc_loss(x, w, y))


def test_what_is_saved(monkeypatch):
    "log Z and a row of states for each part of a segment; no logits, no table"
    short_segments(monkeypatch, 8)
    z, y, frames, lengths, _ = hard("ragged", f64)
    leaves = [t.requires_grad_() for t in layer(z)]
    saved = saved_tensors(lambda: linear_ctc_loss(*leaves[:2], y, frames, lengths, linear_bias=leaves[2], reduction="none"), *leaves, y)
    assert sorted(t.numel() for t in saved) == sorted([6, 6, 6, 6 * 6 * 2 * 8])  # frames, lengths, log Z; states
    saved = saved_tensors(lambda: linear_ctc_loss(*leaves[:2], y, frames, lengths, linear_bias=leaves[2]), *leaves, y)
    assert sorted(t.numel() for t in saved if t.numel()) == sorted(t.numel() for t in leaves)  # the gradients, and nothing beside them
    assert not saved_tensors(lambda: linear_ctc_loss(*(t.detach() for t in leaves[:2]), y, frames, lengths), *leaves)


@pytest.mark.parametrize("sizes", [(3000, 16, 5000, 1024, 400), (1500, 32, 1000, 512, 200), (100, 256, 96, 64, 30), (1, 1, 2, 1, 0), (7, 0, 5, 4, 2)])
@pytest.mark.parametrize("budget", [0, 2**20, 2**30])
def test_segments_fit_the_budget(sizes, budget):
    T, N, V, H, W = sizes
    K = segment_frames(*sizes, 2, 4, True, budget)
    assert 1 <= K <= max(T, 1) and (K % 8 == 0 or K == max(T, 1))
    outside = 2 * V * H + 2 * N * (W + 1) * H
    held = outside + K * N * max(24 * max(32, W) + 8 * W, 2 * V)
    assert K <= 16 or held <= 1.01 * (budget or max(2**26, default_budget(*sizes, 2), 2.5 * outside))


# compilers

def test_in_one_graph(device, monkeypatch):
    short_segments(monkeypatch, 8)
    z, y, frames, lengths, _ = hard("ragged", f64)
    leaves, y = [t.to(device).requires_grad_() for t in layer(z)], y.to(device)
    def loss(x, w, b): return linear_ctc_loss(x * 1, w, y, frames, lengths, linear_bias=b, zero_infinity=True)
    want = loss(*leaves)
    got = torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(got, want)
    for a, e in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves)):
        torch.testing.assert_close(a, e)


def test_the_operators_say_what_they_return(device):
    z, y, frames, lengths, _ = hard("ragged", f32)
    x, w, b = (t.float().to(device).requires_grad_() for t in layer(z))
    args = x, w, b, y.to(device), torch.tensor(frames), torch.tensor(lengths), 0, 0, False, True
    torch.library.opcheck(torch.ops.fusedloss.linear_ctc.default, args)
    for needs in ((True, True, True), (True, False, False), (False, True, True)):
        leaves = [t.detach().requires_grad_(need) for t, need in zip(args[:3], needs)]
        torch.library.opcheck(torch.ops.fusedloss.linear_ctc_all.default, (*leaves, *args[3:-1], "mean", True, *needs))


def test_autocast_as_a_linear_layer(device):
    z, y, frames, lengths, _ = hard("ragged", f32)
    x, w, b = (t.float().to(device).requires_grad_() for t in layer(z))
    with torch.autocast(device, dtype=bf16):
        loss = linear_ctc_loss(x, w, y.to(device), frames, lengths, linear_bias=b)
    d = torch.autograd.grad(loss, [x, w, b])
    assert loss.dtype == f32 and all(t.dtype == f32 for t in d)
    want = linear_ctc_loss(x.bfloat16(), w.bfloat16(), y.to(device), frames, lengths, linear_bias=b.bfloat16())
    assert torch.equal(loss, want)


# the kernel's source

SCAN, ROW = ("ELEMENT", "PAIRS", "AHEAD", "CLUSTER", "THREADS", "TABLES"), ("ELEMENT", "PER", "NORMALISE", "SOFTMAX", "ROWTHREADS", "STAGED")


COMPILED = [
    (75, dict(zip(SCAN, ("f32", 1, 8, 1, 256, 1)))), (80, dict(zip(SCAN, ("f32", 4, 4, 1, 512, 1)))), (90, dict(zip(SCAN, ("f32", 1, 8, 8, 256, 0)))),
    (90, dict(zip(SCAN, ("f32", 1, 8, 8, 256, 1)))), (100, dict(zip(SCAN, ("f32", 4, 4, 8, 512, 1)))), (75, dict(zip(ROW, ("f16", 1, 1, 1, 256, 0)))),
    (80, dict(zip(ROW, ("bf16", 1, 1, 1, 256, 1)))), (90, dict(zip(ROW, ("bf16", 1, 1, 1, 256, 1)))), (100, dict(zip(ROW, ("f32", 1, 1, 1, 256, 1))))]


@pytest.mark.parametrize("arch, constants", few(COMPILED, COMPILED[2], COMPILED[5], COMPILED[7]), ids=str)
def test_the_kernel_compiles_without_a_gpu(arch, constants):
    check_nvcc(arch, cuda_source("ctc") + cuda_source("linear_ctc"), constants)


def test_without_a_compiler_loops_take_over(monkeypatch):
    use_lattice(lambda *given, **constants: None, monkeypatch)
    short_cases_are_right(monkeypatch, *SHORT)


# bugs

SUSPECTS = {"ragged": 5, "repeats": 7, "T 0 and 1, infeasible": 2, "two equal labels in two frames": 2,
            "another blank, and blanks among the labels": 100}


def suspects(module, cases=SUSPECTS):
    "A few of the cases above, for a module with a bug in it: what it gets wrong, one after another"
    for name, K in cases.items():
        z, y, frames, lengths, blank = hard(name, f64)
        given = [t.float() for t in layer(z)]
        losses, gradients = truth_of(*given, y, frames, lengths, blank)
        mean, means = truth_of_all(*given, y, frames, lengths, blank)
        for n, k in enumerate(frames):
            given[0][k:, n] = math.nan  # padding
        try:
            with pytest.MonkeyPatch.context() as patch:
                everywhere(patch, module, "frame_counts", lambda *given: FrameCounts(K, 2 * K, 3 * K, parts_of(K)))
                got, d = run(*given, y, frames, lengths, blank, loss=module.linear_ctc_loss)
                same_losses(got, losses, 5e-6)
                close(d, gradients, 1e-5)
                got, d = run_all(*given, y, frames, lengths, blank, loss=module.linear_ctc_loss)
                same_losses(got[None], mean[None], 5e-6)
                close(d, means, 1e-5)
        except (AssertionError, RuntimeError, IndexError, ValueError) as e:
            yield f"{name}: {type(e).__name__}"


BUGS = {
    "labels numbered by position": ("symbols = torch.empty_like(y).scatter_(1, order, order.gather(1, begin)) + 1", "symbols = at + 1"),
    "a blank among the labels is a label": ("return torch.where(y == blank, 0, symbols)", "return symbols.contiguous()"),
    "padding kept": ("if host_frames is None or min(host_frames, default=0) == last:", "if True:"),
    "no bias in the small scores": ("return e if b.target_bias is None else e.add_(b.target_bias)", "return e"),
    "every segment starts in the first blank": ("row = None if start is None else boundary_row(start)", "row = None"),
    "the edge that is not there yet": ("self.states[0, at.start // self.every - 1]", "self.states[0, at.start // self.every]"),
    "γ forgotten between segments": ("boundary_row(back).copy_(gamma)", "pass"),
    "ends one segment late": ("(b.frames > at.start) & (b.frames <= at.stop)", "(b.frames >= at.start) & (b.frames < at.stop)"),
    "p alone": ("p - unpadded_rows(gamma, s)", "p - 0 * unpadded_rows(gamma, s)"),
    "posteriors alone": ("p - unpadded_rows(gamma, s)", "-unpadded_rows(gamma, s)"),
    "p before its sum": (".exp_().div_(row_sum[:, None])\n    scale_tiles", ".exp_()\n    scale_tiles"),
    "columns, not their first": ("values = c.gather(1, b.symbols[n])", "values = c"),
    "subtracted from the softmax, not written over it": ("dz.scatter_(1, b.classes[n]", "dz.scatter_add_(1, b.classes[n]"),
    "upstream of another sequence": ("torch.where(on & path, g, 0)", "torch.where(on & path, g.roll(1), 0)"),
    "gradient where there is no path": ("torch.where(on & path, g, 0)", "torch.where(on, g, 0)"),
    "one edge for all": ("self.states[0, (at.stop - 1) // self.every]", "self.states[0, 0]"),
    "lse of padding counts": ("torch.where(on, lse, 0).sum(0)", "lse.sum(0)"),
    "the mean counts as a sum": ("inv_denominators(b.lengths, mean, acc_dtype(x.dtype))", "inv_denominators(b.lengths, False, acc_dtype(x.dtype))"),
    "rows where they are not": ("enumerate((row_max, row_sum)): put_unpadded_rows(stats[s.at][..., i], part, s)", "enumerate((row_max, row_sum)): put_unpadded_rows(stats[s.at][..., i], part.flip(0), s)"),
    "only the last dw": ("add_product(sums.dw, dz.T, x if x.dtype == dz.dtype else x.to(dz.dtype))", "sums.dw.copy_(dz.T @ x.to(dz.dtype))"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("bug", few(BUGS, "labels numbered by position", "padding kept", "γ forgotten between segments", "upstream of another sequence", "only the last dw"))
def test_planted_bugs_are_found(bug, tmp_path):
    assert any(suspects(planted(fusedloss.linear_ctc, tmp_path, *BUGS[bug])))


def test_no_bug_no_finding(tmp_path):
    assert not list(suspects(planted(fusedloss.linear_ctc, tmp_path, *unchanged(BUGS.values()))))


MORE = {"more classes": 9}  # than a tile has

TRITON_BUGS = {
    "classes that are not there": ('z = tl.where(inside[None, :], z, -float("inf"))', "pass"),
    "the first tile's sum alone": ("tl.store(at + tiles_v * N, tl.sum(e, 1), mask=keep)", "tl.store(at + tiles_v * N, tl.sum(e, 1), mask=keep & (tv == 0))"),
    "the last tile's largest for the first": ("at = stats_ptr + tv * N + rows", "at = stats_ptr + tv * 0 + rows"),
    "nothing is taken off": ("e = exponentials(z, row_max, LOG2_SCALE)", "e = exponentials(z, row_max * 0, LOG2_SCALE)"),
}


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize("bug", [None, *few(TRITON_BUGS, "classes that are not there", "the last tile's largest for the first")])
def test_bugs_in_the_triton_kernel(bug, tmp_path, monkeypatch):
    changes = TRITON_BUGS.get(bug) or unchanged(TRITON_BUGS.values())
    module = planted(fusedloss.linear_ctc, tmp_path, *changes)
    everywhere(monkeypatch, module, "takes_kernel", lambda x: x.dtype == f32 and len(x) > 0)
    cases = MORE | SUSPECTS
    assert any(suspects(module, {name: cases[name] for name in few(cases, "ragged", "more classes")})) == (bug is not None)


KERNEL_BUGS = {
    "no state comes from before": ("rank, edge.from, edge.pitch", "rank, nullptr, edge.pitch"),
    "nothing from the warp before": ("if (s.lane == 0 && s.warp > 0)", "if (false)"),
    "beta is not handed on": ("if (works && edge.to) sweep", "if (works && edge.to && DIR == 0) sweep"),
    "beta begins in every segment": ("last || !beta ? nullptr : beta", "true ? nullptr : beta"),
    "segments one frame long": ("last ? max(t_n - first, 0) : most, l_n", "last ? max(t_n - first, 0) : most - 1, l_n"),
    "one row of alpha for all segments": ("edge.to + piece * edge.step", "edge.to"),
    "all parts begin where the first one does": ("skipped = part * every;", "skipped = 0;"),
    "pieces of beta from the front": ("const int piece = DIR ? pieces - 1 - i : i", "const int piece = i"),
    "beta in the frames of alpha": ("(TABLES || forward ? begin : beta_begin) + skipped", "begin + skipped"),
    "alpha from its own end": ("first ? alpha + edge - step : nullptr", "first ? alpha + edge : nullptr"),
    "posteriors of the first part": ("((i64)n * K + skipped) * 2 * PLANE", "(i64)n * K * 2 * PLANE"),
    "Z from the first row": ("(p.frames - 1) / every * step", "0 * step"),
    "Z without the last blank": ("State total = load_from_afar(end + C + l_n);", "State total = {0.0f, ZERO_EXPONENT};"),
    "Z without the last label": ("if (l_n) total = sum", "if (false) total = sum"),
    "labels in the place of blanks": ("load_state(from + pitch + j)", "load_state(from + j)"),
    "labels numbered by position": ("while (labels[first++] != c) ;", "first = j;"),
    "a blank among the labels is a label": ("if (c != blank) while", "if (real) while"),
    "an empty target has no path": ("t_n || l_n ? 0.0f : 1.0f", "0.0f"),
    "labels that repeat": ("atomicAdd(&symbol_posteriors[(int)row_symbols[j]], v)", "atomicAdd(&symbol_posteriors[j], v)"),
    "columns, not their first": ("(float)symbol_posteriors[(int)symbol]", "(float)symbol_posteriors[j]"),
    "blanks forgotten": ("atomicAdd(&symbol_posteriors[0], blank_sum)", "0"),
    "rows in their order": ("row % (K * N)", "row"),
    "rows of the compacted": ("kept_rows ? (u32)kept_rows[row] : row", "row"),
    "the first tile's factor": ("tile_coefs[c >> shift]", "tile_coefs[0]"),
    "the first tile's sum": ("row_sum += tile_sums[j] * tile_coefs[j];", "if (j == 0) row_sum += tile_sums[j] * tile_coefs[j];"),
    "no class above the number": ("first | c << 32", "first"),
    "labels with their own blank": ("to_fixed(label_posteriors[j - 1])", "to_fixed(label_posteriors[j])"),
    "read before it is there": ("wait_for_copies();\n  __syncthreads();", "wait_for_copies();"),
    "upstream of another sequence": ("g_n = g[n]", "g_n = g[0]"),
    "gradient where there is no path": ("|| !(total.m > 0.0f) ||", "||"),
}


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize("bug", [None, *few(KERNEL_BUGS, "beta is not handed on", "Z without the last label", "labels that repeat",
                                            "rows of the compacted")])
def test_bugs_in_the_lattice_kernel(bug, lattice, monkeypatch):
    rest = lattice if bug is None else lattice_on_cpu(*KERNEL_BUGS[bug])
    use_lattice(rest, monkeypatch, ScanShape(1, 8, 2, 4))
    take_rows(monkeypatch, lambda x: x.dtype == f32 and len(x) > 0)
    narrow = tiling_of(torch.empty(8, 8), torch.empty(100, 8))._replace(BV=32)
    everywhere(monkeypatch, fusedloss.linear_ctc, "tiling_of", lambda *_: narrow)  # some cases have more classes than a tile
    cases = SUSPECTS | {"three warps": 40} | MORE
    assert any(suspects(fusedloss.linear_ctc, {name: cases[name] for name in few(cases, "ragged", "more classes")})) == (bug is not None)


PACKED_BUGS = {
    "dx where x was packed": ("dx.flatten(0, 1).index_copy_(0, kept, packed)", "dx.flatten(0, 1)[:len(packed)] = packed"),
    "rows of other segments": ("x.split([len(s.kept) for s in parts])", "x.split([len(s.kept) for s in parts[::-1]])[::-1]"),
    "padding keeps what is there": ("dx = b.x.new_zeros(b.x.shape)", "dx = b.x.new_full(b.x.shape, 9)"),
}


def packed(monkeypatch, lattice, module, K):
    "Rows are packed all at once, three segments a run"
    use_lattice(lattice, monkeypatch)
    take_rows(monkeypatch, lambda x: x.dtype == f32 and len(x) > 0)
    everywhere(monkeypatch, module, "takes_kernel", lambda x: x.dtype == f32 and len(x) > 0)
    everywhere(monkeypatch, module, "packs_at_once", lambda b, parts, room: bool(parts) and parts[0].kept is not None)
    everywhere(monkeypatch, module, "frame_counts", lambda *given: FrameCounts(K, 3 * K, 3 * K, parts_of(K)))


@interpreted
@pytest.mark.parametrize("bug", thorough_but([None, *few(PACKED_BUGS, "dx where x was packed", "rows of other segments")], None))
def test_rows_packed_all_at_once(bug, lattice, tmp_path, monkeypatch):
    changes = PACKED_BUGS.get(bug) or unchanged(PACKED_BUGS.values())
    module = planted(fusedloss.linear_ctc, tmp_path, *changes)
    packed(monkeypatch, lattice, module, 8)
    z, y, frames, lengths, blank = hard("ragged", f64)
    given = [t.float() for t in layer(z)]
    loss, gradients = truth_of_all(*given, y, frames, lengths, blank)
    got, d = run_all(*given, y, frames, lengths, blank, loss=module.linear_ctc_loss)
    right = all(relative_error(a, e) < 1e-5 for a, e in zip((got, *d), (loss, *gradients)))
    assert right == (bug is None)


@interpreted
def test_packed_rows_give_what_is_asked_for(lattice, monkeypatch):
    packed(monkeypatch, lattice, fusedloss.linear_ctc, 8)
    z, y, frames, lengths, _ = hard("ragged", f64)
    leaves = [t.float().requires_grad_() for t in layer(z)]
    def loss(): return linear_ctc_loss(*leaves[:2], y, frames, lengths, linear_bias=leaves[2])
    want = torch.autograd.grad(loss(), leaves)
    for i, (leaf, e) in enumerate(zip(leaves, want)):
        for k, other in enumerate(leaves):
            other.requires_grad_(k == i)
        assert relative_error(torch.autograd.grad(loss(), leaf)[0], e) < 1e-6
    assert not any(want[0][k:, n].any() for n, k in enumerate(frames))


def test_lengths_left_out_are_all_there_is():
    z, y, *_ = case(N=3, T=11, L=4)
    w = torch.eye(9)
    whole = linear_ctc_loss(z, w, y, [11] * 3, [4] * 3)
    assert torch.equal(linear_ctc_loss(z, w, y), whole) and torch.equal(linear_ctc_loss(z, w, y.flatten(), target_lengths=[4] * 3), whole)
    with pytest.raises(ValueError, match="target_lengths: expected the length of each target"):
        linear_ctc_loss(z, w, y.flatten())
