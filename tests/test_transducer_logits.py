"RNN-T's loss of logits: torchaudio's published values, brute force, gradients of every dtype, kernels beside PyTorch, hostile batches, promises."

import itertools
import math

import pytest
import torch

import fusedloss as fl
import fusedloss.lattices as lattices
from fusedloss.lattices import duration_flows, node_flows
from fusedloss.semirings import Max
from fusedloss.core.cuda import cuda_source
from grids import thorough_but
from helpers import everywhere, has_no_second_derivative, need_kernels
from on_cpu import check_nvcc, kernels_on_cpu
from test_lattices import batch, by_paths, every_path, SHAPES

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter


@pytest.fixture(params=["plain", "kernels"])
def way(request, device, monkeypatch):
    "The device, on which either PyTorch or the kernels take everything they can"
    if request.param == "kernels":
        need_kernels(device)
    takes = lambda x: request.param == "kernels" and x.dtype != f64 and x.numel() > 0
    everywhere(monkeypatch, lattices, "has_kernel", takes)
    return device


def dense(z, y, frames, labels, blank, scale=1.0):
    "Losses [N] in float64 by a loop over nodes that autograd differentiates."
    losses = []
    for n in range(len(z)):
        T, U = int(frames[n]), int(labels[n])
        lp = z[n].double().log_softmax(-1)
        alpha = {(0, 0): lp.new_zeros(())}
        for t in range(T):
            for u in range(U + 1):
                come = []
                if t:
                    come.append(alpha[t - 1, u] + lp[t - 1, u, blank])
                if u:
                    come.append(alpha[t, u - 1] + lp[t, u - 1, y[n, u - 1]])
                if come:
                    alpha[t, u] = torch.stack(come).logsumexp(0)
        losses.append(-(alpha[T - 1, U] + lp[T - 1, U, blank]))
    return torch.stack(losses)


def sample(N=3, T=5, U=3, V=7, dtype=f64, device="cpu", seed=0, blank=-1):
    "Logits that want a gradient, targets without the blank, ragged lengths."
    made = torch.Generator().manual_seed(seed)
    z = torch.randn(N, T, U + 1, V, generator=made, dtype=f64).mul(2).to(dtype)
    y = torch.randint(0, V - 1, (N, U), generator=made)
    y += y >= blank % V
    frames, labels = (T - torch.arange(N) % T).clamp(min=1), (U - torch.arange(N) % (U + 1))
    for n in range(N):
        z[n, frames[n]:], z[n, :, labels[n] + 1:] = math.nan, math.nan
        y[n, labels[n]:] = -7
    return z.to(device).requires_grad_(), y.to(device), frames.to(device), labels.to(device)


def test_published_values(way):
    "Of torchaudio and of warp-transducer."
    rows = [[.1, .6, .1, .1, .1], [.1, .1, .6, .1, .1], [.1, .1, .2, .8, .1]], [[.1, .6, .1, .1, .1], [.1, .1, .2, .1, .1], [.7, .1, .2, .1, .1]]
    for blank, expected in ((0, 4.495666), (4, 5.0956669), (-1, 5.0956669)):
        z = torch.tensor([rows], device=way, requires_grad=True)
        loss = fl.transducer_loss(z, torch.tensor([[1, 2]], device=way), torch.tensor([2]), torch.tensor([2]), blank=blank)
        assert abs(loss.item() - expected) < 2e-6
        loss.backward()
        if blank == 0:
            expected = torch.tensor([-.13116688, -.3999269, .17703125, .17703125, .17703125], device=way)
            torch.testing.assert_close(z.grad[0, 0, 0], expected, rtol=0, atol=1e-6)


def test_published_value_with_durations():
    "NeMo's: zeros, T = 3, one label of three, durations 0 to 2, σ = 0.05."
    tokens, d = torch.zeros(6, 4, dtype=f64).log_softmax(1) - 0.05, torch.zeros(6, 3, dtype=f64).log_softmax(1)
    one = lambda *v: torch.tensor(v)
    got = duration_flows(tokens[:, 3], tokens[:, 0], d, (0, 1, 2), one(0, 6), one(3), one(1), 3, 1)
    assert abs(-got.log_z.item() - 4.155739) < 2e-6
    node, share = got.node[0], torch.full((4,), 0.25, dtype=f64)
    dz = node * share - torch.stack([got.label[0], node * 0, node * 0, got.blank[0]])
    torch.testing.assert_close(dz.float(), torch.tensor([-.64962804, .25, .25, .14962798]), rtol=0, atol=2e-6)
    dd = node / 3 - got.durations[0]
    torch.testing.assert_close(dd.float(), torch.tensor([.2672583, -.16792619, -.09933221]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype, rtol", [(f64, 1e-11), (f32, 2e-5), (f16, 2e-3), (bf16, 2e-2)])
@pytest.mark.parametrize("blank", [0, 2, -1])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_loss_and_gradient(way, dtype, rtol, blank, reduction):
    if way == "cpu" and dtype == bf16 and lattices.has_kernel(torch.zeros(1)):
        pytest.skip("the interpreter has no bf16")
    z, y, frames, labels = sample(dtype=dtype, device=way, blank=blank)
    x = z.detach().double().cpu().requires_grad_()
    exact = dense(x, y.cpu(), frames, labels, blank)
    got = fl.transducer_loss(z, y, frames, labels, blank=blank, reduction=reduction)
    assert got.dtype == (f64 if dtype == f64 else f32)
    g = torch.tensor([0.5, -2.0, 0.0], dtype=got.dtype, device=way) if reduction == "none" else torch.tensor(1.5, dtype=got.dtype, device=way)
    exact = dict(none=exact, mean=exact.mean(), sum=exact.sum())[reduction]
    torch.testing.assert_close(got.double().cpu(), exact, rtol=max(1e-12, min(rtol, 1e-5)), atol=1e-6 if dtype != f64 else 1e-12)
    d, = torch.autograd.grad(exact, x, g.double().cpu())
    got.backward(g)
    assert z.grad.dtype == dtype
    torch.testing.assert_close(z.grad.double().cpu(), d.nan_to_num(0), rtol=rtol, atol=rtol * 0.1)
    for n in range(len(z)):  # padding: NaN unread, a gradient of exactly 0
        assert (z.grad[n, frames[n]:] == 0).all() and (z.grad[n, :, labels[n] + 1:] == 0).all()
    if reduction == "none":
        assert (z.grad[2] == 0).all()


@pytest.mark.parametrize("frames", [7, 8])
@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("dtype", [f32, f16])
def test_numbers_of_any_alignment(frames, begin, dtype, way):
    "Sixty classes, whose kernel has a shape for which Triton 3.6 and 3.7 could not compile it where numbers begin at other places"
    z, y, *lengths = sample(N=3, T=frames, U=4, V=60, dtype=f32, device=way, blank=0)
    room = torch.zeros(z.numel() + begin, dtype=dtype, device=way)
    room[begin:] = z.detach().reshape(-1)
    x, part = room[begin:].double().view(z.shape).requires_grad_(), room[begin:].view(z.shape).requires_grad_()
    losses = [fl.transducer_loss(t, y, *lengths, blank=0, reduction="sum") for t in (part, x)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0].double(), losses[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(part.grad.double(), x.grad, rtol=2e-3, atol=2e-3 if dtype == f16 else 1e-5)


def test_kernels_beside_pytorch(device, monkeypatch):
    "Larger grids: 40 labels over two warps of states, many classes, strided logits."
    need_kernels(device)
    a = batch((9, 4, 1, 0, 30), (40, 0, 5, 2, 33), dtype=f32)
    (blank, label), (starts, *lengths) = a
    given = [t.to(device) for t in (blank, label, starts, *lengths)]
    for S in (lattices.Log, Max):
        everywhere(monkeypatch, lattices, "has_kernel", lambda x: False)
        exact = node_flows(*(t.double() if t.is_floating_point() else t for t in given), 30, 40, S)
        everywhere(monkeypatch, lattices, "has_kernel", lambda x: x.numel() > 0)
        for t, e in zip(node_flows(*given, 30, 40, S), exact):
            torch.testing.assert_close(t.double(), e, rtol=1e-5, atol=2e-6)
    z, y, frames, labels = sample(N=2, T=3, U=2, V=5000, dtype=f32, device=device, blank=0)
    z = z.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    fl.transducer_loss(z, y, frames, labels, blank=0, reduction="sum").backward()
    x = z.detach().double().cpu().requires_grad_()
    dense(x, y.cpu(), frames, labels, 0).sum().backward()
    torch.testing.assert_close(z.grad.double().cpu(), x.grad.nan_to_num(0), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("n", range(3))
def test_flows_against_paths(way, n):
    "The kernel's flows against every path."
    frames, labels = zip(*SHAPES)
    (blank, label), (starts, *lengths) = batch(frames, labels, dtype=f32, scale=(1, 5, 30)[n], seed=n)
    got = node_flows(*(t.to(way) for t in (blank, label, starts, *lengths)), 6, 7)
    for i, (T, U) in enumerate(zip(frames, labels)):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        log_z, *flows, _ = by_paths(T, U, blank[rows].double(), label[rows].double())
        assert math.isclose(got.log_z[i].item(), log_z, rel_tol=1e-5)
        for t, e in zip(got[1:], flows):
            torch.testing.assert_close(t[rows].cpu().double(), e, rtol=2e-4, atol=2e-6)
    assert all((t[int(starts[-1]):] == 0).all() for t in got[1:])


def test_hostile_scores(way):
    "−∞ closes arcs; no path: log Z −∞ and nothing flows; a NaN stays in its sequence."
    T, U = 4, 2
    (blank, label), a = batch((T,) * 5, (U,) * 5, dtype=f32)
    n = T * (U + 1)
    label[:n][1::3] = -math.inf
    blank[n] = -math.inf
    blank[2 * n + 5], label[3 * n + 1] = math.nan, math.inf
    for S in (lattices.Log, Max):
        got = node_flows(*(t.to(way) for t in (blank, label, *a)), T, U, S)
        assert got.log_z[0] == -math.inf and got.log_z[1].isfinite() and got.log_z[2:4].isnan().all() and got.log_z[4].isfinite()
        for t in got[1:]:
            assert (t[:n] == 0).all() and t[n:2 * n].isfinite().all() and t[4 * n:5 * n].isfinite().all()
        assert got.blank[2 * n:4 * n].isnan().any() and abs(got.blank[n:2 * n].sum() - T) < 1e-5


DURATIONS = [(0, 1, 2), (1, 2), (2,), (0, 1), (3, 0, 1), (0,), (4, 1), (1, 9)]


@pytest.mark.parametrize("durations, scale", thorough_but([*itertools.product(DURATIONS, (1.0, 20.0))], ((0, 1, 2), 1.0), ((2,), 1.0), ((3, 0, 1), 20.0)))
def test_flows_with_durations_against_paths(way, durations, scale):
    "The kernel of durations against every path; where they cannot add up nothing flows."
    frames, labels = zip(*SHAPES)
    (blank, label, dur), (starts, *lengths) = batch(frames, labels, dtype=f32, depth=(len(durations),), scale=scale)
    given = [t.to(way) for t in (blank, label, dur, starts, *lengths)]
    got = duration_flows(*given[:3], durations, *given[3:], max(frames) + 1, max(labels) + 2)
    for i, (T, U) in enumerate(zip(frames, labels)):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        log_z, *flows, taken = by_paths(T, U, blank[rows].double(), label[rows].double(), dur[rows].double(), durations)
        assert got.log_z[i] == log_z or math.isclose(got.log_z[i].item(), log_z, rel_tol=1e-5)
        for t, e in zip((got.blank, got.label, got.durations, got.node), (*flows, taken, flows[0] + flows[1])):
            torch.testing.assert_close(t[rows].cpu().double(), e, rtol=3e-4, atol=2e-6)
    assert all((t[int(starts[-1]):] == 0).all() for t in got[1:])
    alone = duration_flows(*given[:3], durations, *given[3:], max(frames) + 1, max(labels) + 2, flows=False)
    assert torch.equal(alone.log_z, got.log_z) and alone[1:] == (None,) * 4


@pytest.mark.parametrize("durations", [(0, 1, 2, 3, 4), (2, 0, 7, 1), (11, 3)])
def test_kernel_of_durations_beside_pytorch(device, durations, monkeypatch, nan_in_new_memory):
    "Larger grids, and an empty one; the same bits again."
    need_kernels(device)
    (blank, label, dur), (starts, *lengths) = batch((9, 4, 1, 0, 30), (40, 0, 5, 2, 33), dtype=f32, depth=(len(durations),))
    given = [t.to(device) for t in (blank, label, dur, starts, *lengths)]
    flows = lambda *scores: duration_flows(*scores, durations, *given[3:], 30, 40)
    everywhere(monkeypatch, lattices, "has_kernel", lambda x: False)
    exact = flows(*(t.double() for t in given[:3]))
    everywhere(monkeypatch, lattices, "has_kernel", lambda x: x.numel() > 0)
    for t, e, same in zip(flows(*given[:3]), exact, flows(*given[:3])):
        torch.testing.assert_close(t.double(), e, rtol=1e-5, atol=4e-6)
        assert torch.equal(t, same)


def test_error_with_durations_in_float32(way):
    "Scores as of 1024 classes, log Z of -150: β relative to its diagonal keeps the digits of the flows."
    T, U, durations = 50, 20, (0, 1, 2, 3)
    (blank, label, dur), a = batch((T,), (U,), dtype=f32, depth=(4,), padding=0)
    given = blank - 6, label - 6, dur.log_softmax(1)
    exact = duration_flows(*(t.double() for t in given), durations, *a, T, U)
    got = duration_flows(*(t.to(way) for t in given), durations, *(t.to(way) for t in a), T, U)
    assert exact.log_z < -150 and abs(got.log_z.item() - exact.log_z.item()) < 2e-5
    assert max((t.cpu().double() - e).abs().max().item() for t, e in zip(got[1:], exact[1:])) < 1.5e-6


def test_hostile_scores_with_durations(way):
    "−∞ closes arcs; no path: log Z −∞ and nothing flows; NaN and +∞ stay in their sequence, also where no path comes by."
    T, U, durations = 4, 2, (2, 0)
    (blank, label, dur), a = batch((T,) * 6, (U,) * 6, dtype=f32, depth=(2,))
    n = T * (U + 1)
    label[:n][1::3] = -math.inf
    dur[n, 1] = -math.inf
    blank[2 * n + 5], label[3 * n], dur[4 * n + 3, 0] = math.nan, math.inf, math.nan  # the first and the last in frame 1, which no path visits
    got = duration_flows(*(t.to(way) for t in (blank, label, dur)), durations, *(t.to(way) for t in a), T, U)
    assert got.log_z[0] == -math.inf and got.log_z[1].isfinite() and got.log_z[2:5].isnan().all() and got.log_z[5].isfinite()
    log_z, *flows, taken = by_paths(T, U, blank[n:2 * n].double(), label[n:2 * n].double(), dur[n:2 * n].double(), durations)
    for t, e in zip(got[1:], (*flows, taken, flows[0] + flows[1])):
        assert (t[:n] == 0).all() and t[5 * n:].isfinite().all() and t[2 * n:3 * n].isnan().any()
        torch.testing.assert_close(t[n:2 * n].cpu().double(), e, rtol=1e-5, atol=1e-6)


def test_grids_with_durations_that_no_program_holds(device, monkeypatch):
    "Too many arcs of a diagonal for a program: PyTorch takes them, with the same result."
    need_kernels(device)
    everywhere(monkeypatch, lattices, "has_kernel", lambda x: x.numel() > 0)
    (blank, label, dur), a = batch((3, 2), (2, 1), dtype=f32, depth=(3,))
    given = [t.to(device) for t in (blank, label, dur)], (0, 1, 2), *(t.to(device) for t in a)
    flows = lambda: duration_flows(*given[0], *given[1:], 3, 2)
    expected = flows()
    assert lattices.duration_blocks(lattices.Grids(*given[2:], 3, 2), 3)["BD"] == 4
    monkeypatch.setattr(lattices, "MOST_ARCS", 15)
    everywhere(monkeypatch, lattices, "launch_durations", None)
    for t, e in zip(flows(), expected):
        torch.testing.assert_close(t, e, rtol=1e-5, atol=1e-6)


def test_clamp_is_of_the_gradient_before_upstream(way):
    z, y, frames, labels = sample(device=way, dtype=f32)
    clipped = []
    for clamp in (-1.0, 0.05):
        d, = torch.autograd.grad(fl.transducer_loss(z, y, frames, labels, clamp=clamp, reduction="sum"), z, torch.tensor(3.0, device=way))
        clipped.append(d)
    torch.testing.assert_close(clipped[1], (clipped[0] / 3).clamp(-0.05, 0.05) * 3)
    assert (clipped[0] != clipped[1]).any()


def test_log_probabilities(way):
    "Without the softmax: the same value, and −γ as the gradient."
    z, y, frames, labels = sample(device=way, dtype=f32)
    whole = fl.transducer_loss(z, y, frames, labels, reduction="sum")
    apart = fl.transducer_loss(z.log_softmax(-1), y, frames, labels, reduction="sum", fused_log_softmax=False)
    torch.testing.assert_close(whole, apart)
    d, = torch.autograd.grad(whole, z)
    e, = torch.autograd.grad(apart, z)
    keep = d != 0
    torch.testing.assert_close(d[keep], e[keep], rtol=1e-4, atol=1e-6)


def test_offset_of_a_million(way):
    "Logits far from 0: the loss takes them relative to their maximum."
    z, y, frames, labels = sample(device=way, dtype=f32)
    z = (z.detach() * 4).round() / 4
    results = []
    for offset in (0, 2.0**20):
        x = (z + offset).requires_grad_()
        loss = fl.transducer_loss(x, y, frames, labels, reduction="none")
        loss.sum().backward()
        results.append((loss.detach(), x.grad))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_classes_at_minus_infinity(way):
    "A class that never is: finite loss, gradient 0 for it; a label of it: +∞ and gradient 0."
    z, y, frames, labels = sample(device=way, dtype=f32)
    x = z.detach().nan_to_num(0)
    y = y.clamp(0, 4)
    x[..., 5] = -math.inf
    x[1, ..., y[1, 0]] = -math.inf
    x.requires_grad_()
    labels[1] = 1
    loss = fl.transducer_loss(x, y, frames, labels, reduction="none")
    assert loss[0].isfinite() and loss[1] == math.inf and loss[2].isfinite()
    loss.sum().backward()
    assert (x.grad[..., 5] == 0).all() and (x.grad[1] == 0).all() and x.grad.isfinite().all()


def test_edges(way):
    "No sequence; one frame; no label."
    lengths = torch.zeros(0, dtype=torch.int64)
    z = torch.zeros(0, 3, 2, 5, device=way, requires_grad=True)
    loss = fl.transducer_loss(z, torch.zeros(0, 1, dtype=torch.int32), lengths, lengths)
    loss.backward()
    assert loss == 0 and z.grad.shape == z.shape
    z = torch.randn(2, 1, 1, 4, device=way, requires_grad=True)
    loss = fl.transducer_loss(z, torch.zeros(2, 0, dtype=torch.int32, device=way), [1, 1], [0, 0], reduction="none")
    torch.testing.assert_close(loss, -z.log_softmax(-1)[:, 0, 0, -1], rtol=1e-5, atol=1e-6)


BAD = {
    "logits": dict(logits=torch.zeros(2, 3, 4)),
    "integers": dict(logits=torch.zeros(2, 3, 4, 5, dtype=torch.int64)),
    "targets' shape": dict(targets=torch.zeros(2, 4, dtype=torch.int64)),
    "targets' dtype": dict(targets=torch.zeros(2, 3)),
    "no frames": dict(logit_lengths=[0, 3]),
    "too many frames": dict(logit_lengths=[4, 3]),
    "too many labels": dict(target_lengths=[3, 4]),
    "lengths": dict(target_lengths=[3]),
    "blank": dict(blank=5),
    "clamp": dict(clamp=math.nan),
    "reduction": dict(reduction="max"),
    "flag": dict(fused_log_softmax="yes"),
    "the blank among targets": dict(targets=torch.full((2, 3), 4)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    good = dict(logits=torch.zeros(2, 3, 4, 5), targets=torch.zeros(2, 3, dtype=torch.int64), logit_lengths=[3, 3], target_lengths=[3, 3])
    fl.transducer_loss(**good)
    with pytest.raises(ValueError, match="expected"):
        fl.transducer_loss(**good | BAD[name])


def test_label_outside():
    with pytest.raises(IndexError, match=r"targets\[1, 2\] is 5"):
        fl.transducer_loss(torch.zeros(2, 3, 4, 5), torch.tensor([[0, 0, 9], [0, 0, 5]]), [3, 3], [2, 3])


def test_the_first_fault_is_named():
    "Of several; labels beyond a length, and those of a small dtype below more classes than it has, are none."
    z, y = torch.zeros(3, 3, 4, 400), torch.tensor([[1, 2, 300], [1, 0, 400], [-1, 0, 0]])
    call = lambda y, frames=(3, 3, 3), labels=(2, 3, 3): fl.transducer_loss(z, y, frames, labels, blank=0)
    with pytest.raises(ValueError, match=r"targets\[1, 1\] is 0: expected a label that is not the blank"): call(y)
    with pytest.raises(IndexError, match=r"targets\[1, 2\] is 400: expected 0 ≤ label < 400"): call(y.clamp(min=-1).masked_fill(y == 0, 5))
    with pytest.raises(IndexError, match=r"targets\[2, 0\] is -1: expected 0 ≤ label < 400"): call(y, labels=(3, 1, 1))
    with pytest.raises(ValueError, match=r"logit_lengths\[1\] is 0: expected 1 ≤ length ≤ 3"): call(y, frames=(3, 0, 4))
    with pytest.raises(ValueError, match=r"target_lengths\[2\] is 4: expected 0 ≤ length ≤ 3"): call(y, labels=(2, 3, 4))
    assert call(y.clamp(1, 255).to(torch.uint8)).isfinite()


def test_bad_sequences_of_a_gpu_are_nan_alone(way, monkeypatch):
    "As on a GPU, where nobody looks: NaN for the sequence, a gradient of 0 there, others as they are."
    everywhere(monkeypatch, lattices, "readable_on_host", lambda t: False)
    z, y, frames, labels = sample(N=6, device=way, dtype=f32)
    x = z.detach().nan_to_num(0).requires_grad_()
    frames, labels, y = frames.clone(), labels.clone(), y.clamp(0)
    frames[1], labels[2], y[3, 0], labels[3], y[4, 0], labels[4] = 0, 9, 77, 1, 6, 1
    loss = fl.transducer_loss(x, y, frames, labels, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, True, True, False]
    loss.sum().backward()
    assert (x.grad[1:5] == 0).all() and x.grad.isfinite().all() and (x.grad[0] != 0).any()


def test_compiled(device):
    "Without a break, and with sizes that vary."
    run = lambda z, y, frames, labels: fl.transducer_loss(z, y, frames, labels)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for N, T in ((3, 5), (4, 7), (2, 9)):
        z, y, frames, labels = sample(N=N, T=T, dtype=f32, device=device)
        loss = compiled(z, y, frames, labels)
        d, = torch.autograd.grad(loss, z)
        e, = torch.autograd.grad(run(z, y, frames, labels), z)
        torch.testing.assert_close(d, e)


def test_no_second_derivative(device):
    z, y, frames, labels = sample(device=device, dtype=f32)
    x = z.detach().nan_to_num(0).requires_grad_()
    assert has_no_second_derivative(fl.transducer_loss(x * 1, y, frames, labels), x)


def test_functional_gradient(device):
    z, y, frames, labels = sample(device=device, dtype=f32)
    x = z.detach().nan_to_num(0)
    d = torch.func.grad(lambda x: fl.transducer_loss(x, y, frames, labels))(x)
    e, = torch.autograd.grad(fl.transducer_loss(x.requires_grad_(), y, frames, labels), x)
    torch.testing.assert_close(d, e)


def test_registration(device):
    z, y, frames, labels = sample(N=2, T=3, U=2, dtype=f32, device=device)
    x = z.detach().nan_to_num(0).requires_grad_()
    torch.library.opcheck(lattices.transducer_of_logits._opoverload, (x, y, frames, labels, 6, -1.0, True, True),
                          test_utils=("test_schema", "test_faketensor"))


def test_alignment_is_the_best_path(way):
    "Frames of labels: those of the most probable of all paths."
    z, y, frames, labels = sample(N=4, device=way, dtype=f32)
    got = fl.transducer_align(z, y, frames, labels)
    lp = z.detach().double().cpu().log_softmax(-1)
    for n in range(4):
        T, U = int(frames[n]), int(labels[n])
        best = max(((sum(lp[n, t, u, y[n, u] if kind else -1].item() for t, u, kind, _ in path), path) for path in every_path(T, U)), key=lambda found: found[0])
        at = {u: t for t, u, kind, _ in best[1] if kind}
        assert math.isclose(got.score[n].item(), best[0], rel_tol=1e-5)
        assert got.frames[n].tolist() == [at.get(u, -1) for u in range(y.shape[1])]
        for u, t in at.items():
            assert math.isclose(got.label_scores[n, u].item(), lp[n, t, u, y[n, u]].item(), rel_tol=1e-5, abs_tol=1e-5)
        assert (got.label_scores[n, U:] == 0).all()
    assert not got.score.requires_grad


def test_alignment_without_a_path(way):
    z, y, frames, labels = sample(device=way, dtype=f32)
    x = z.detach().nan_to_num(0)
    x[0, ..., y[0, 1]] = -math.inf
    got = fl.transducer_align(x, y, frames, labels)
    assert got.score[0] == -math.inf and (got.frames[0] == -1).all() and (got.label_scores[0] == 0).all() and got.score[1].isfinite()


class Model(torch.nn.Module):
    "A predictor that remembers the last label, and a joint network."
    def __init__(self, V=6, J=8):
        super().__init__()
        self.table, self.out = torch.nn.Embedding(V + 1, J), torch.nn.Linear(J, V)
        torch.nn.init.normal_(self.out.weight, std=1.5)

    def predict(self, labels, state):
        self.calls = getattr(self, "calls", 0) + 1
        found = self.table.weight[-1:].expand(self.N, -1) if labels is None else self.table(labels) + 0.5 * state["last"]
        return found, {"last": found}

    def joint(self, frames, outputs):
        return self.out(torch.tanh(frames + outputs))


def test_greedy_decoding():
    "The same as a loop over frames and labels of each sequence alone."
    torch.manual_seed(3)
    model, x, frames = Model().double(), torch.randn(4, 9, 8, dtype=f64) * 2, torch.tensor([9, 4, 0, 7])
    model.N = 4
    got = fl.transducer_decode(x, frames, model.predict, model.joint, blank=2, max_symbols=3)
    assert got.labels.shape[1] == 1 and got.lengths.max() == got.labels.shape[2]
    model.N = 1
    for n in range(4):
        (out, state), labels, times, total = model.predict(None, None), [], [], 0.0
        for t in range(int(frames[n])):
            for i in range(4):
                lp = model.joint(x[n:n + 1, t], out)[0].log_softmax(-1)
                y = int(lp.argmax()) if i < 3 else 2
                total += lp[y].item()
                if y == 2:
                    break
                labels.append(y), times.append(t)
                out, state = model.predict(torch.tensor([y]), state)
        U = len(labels)
        assert got.lengths[n, 0] == U and got.labels[n, 0, :U].tolist() == labels and got.timesteps[n, 0, :U].tolist() == times
        assert (got.labels[n, 0, U:] == -1).all() and math.isclose(got.log_probs[n, 0].item(), total, rel_tol=1e-12, abs_tol=1e-12)


def every_alignment(model, x, blank, most):
    "Log-probabilities of all paths that one sequence [T,J] can take, with at most `most` labels a frame: {labels: [(log-probability, frames of the labels)]}"
    found = {}

    def walk(t, total, labels, times, in_frame, held):
        if t == len(x):
            found.setdefault(labels, []).append((total, times))
            return
        lp = model.joint(x[t][None], held[0])[0].log_softmax(-1)
        walk(t + 1, total + lp[blank].item(), labels, times, 0, held)
        for y in range(len(lp)) if in_frame < most else ():
            if y != blank:
                walk(t, total + lp[y].item(), (*labels, y), (*times, t), in_frame + 1, model.predict(torch.tensor([y]), held[1]))
    walk(0, 0.0, (), (), 0, model.predict(None, None))
    return found


def beam_of(model, x, frames, **options):
    "A beam's result; the model is told how many sequences there are"
    model.N = len(x)
    return fl.transducer_decode(x, frames, model.predict, model.joint, **options)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("blank, most", [(0, 2), (2, 2), (-1, 1)])
def test_a_wide_beam_finds_every_label_sequence(seed, blank, most):
    "Beside all alignments one by one: labels, their probability, the frames of the best path; ragged."
    torch.manual_seed(seed)
    model, x, frames = Model(V=3).double(), torch.randn(3, 3, 8, dtype=f64) * 2, (3, 2, 0)
    got = beam_of(model, x, frames, blank=blank, max_symbols=most, beam_size=140, k=127)
    model.N = 1
    for n, T in enumerate(frames):
        paths = every_alignment(model, x[n, :T], blank % 3, most)
        total = {labels: torch.tensor([p for p, _ in found], dtype=f64).logsumexp(0).item() for labels, found in paths.items()}
        order = sorted(total, key=total.get, reverse=True)
        for i, labels in enumerate(order):
            U = len(labels)
            assert tuple(got.labels[n, i, :U].tolist()) == labels and got.lengths[n, i] == U
            assert math.isclose(got.log_probs[n, i].item(), total[labels], rel_tol=1e-12, abs_tol=1e-12)
            assert tuple(got.timesteps[n, i, :U].tolist()) == max(paths[labels])[1]
            assert (got.labels[n, i, U:] == -1).all() and (got.timesteps[n, i, U:] == -1).all()
        assert (got.log_probs[n, len(order):] == -math.inf).all() and (got.lengths[n, len(order):] == 0).all()


def test_a_narrow_beam():
    "Each sequence as if alone; sums of some of its paths; wider ones find what is at least as probable; the same again."
    torch.manual_seed(5)
    model, x, frames = Model().double(), torch.randn(4, 9, 8, dtype=f64) * 2, torch.tensor([9, 4, 0, 7])
    options = dict(blank=2, max_symbols=3)
    greedy, got, wide = beam_of(model, x, frames, **options), beam_of(model, x, frames, beam_size=4, k=3, **options), beam_of(model, x, frames, beam_size=60, **options)
    assert got.labels.shape[:2] == (4, 3) and (got.log_probs[:, 1:] <= got.log_probs[:, :-1]).all() and (got.labels[2] == -1).all()
    assert (wide.log_probs[:, 0] >= got.log_probs[:, 0] - 1e-9).all() and (got.log_probs[:, 0] >= greedy.log_probs[:, 0]).all()
    for t, same in zip(got, beam_of(model, x, frames, beam_size=4, k=3, **options)):
        assert torch.equal(t, same)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lattices, "MARGIN", math.inf)
        for t, e in zip(got, beam_of(model, x, frames, beam_size=4, k=3, **options)):
            torch.testing.assert_close(t, e, rtol=1e-8, atol=1e-8)
    for n in range(4):
        alone = beam_of(model, x[n:n + 1], frames[n:n + 1], beam_size=4, k=3, **options)
        L = alone.labels.shape[2]
        torch.testing.assert_close(alone.log_probs[0], got.log_probs[n], rtol=1e-12, atol=1e-12)
        assert torch.equal(alone.labels[0], got.labels[n, :, :L]) and torch.equal(alone.timesteps[0], got.timesteps[n, :, :L]) and torch.equal(alone.lengths[0], got.lengths[n])
    spoilt = x.clone()
    spoilt[1, 5:], spoilt[3, 2] = math.nan, math.nan
    again = beam_of(model, spoilt, frames, beam_size=4, k=3, **options)
    assert torch.equal(again.log_probs[:3], got.log_probs[:3]) and again.log_probs[3].isnan().all() and (again.lengths[3] == 0).all() and (again.labels[3] == -1).all()


def test_what_a_full_beam_still_adds():
    "Paths that come to a label sequence within a frame count, though they alone are below the beam; what is far below says no more."
    predict = lambda labels, state: (torch.full((1 if labels is None else len(labels), 1), float(labels is not None)), ())
    once = lambda x, said: torch.where(said > 0, torch.tensor([1.0, 0.0]), torch.tensor([0.6, 0.4])).log()
    got = fl.transducer_decode(torch.zeros(1, 2, 1), [2], predict, once, blank=0, beam_size=2, k=2)
    torch.testing.assert_close(got.log_probs.exp(), torch.tensor([[0.64, 0.36]]))
    assert got.labels.tolist() == [[[1], [-1]]]
    calls = []

    def rarely(x, said):
        calls.append(len(said))
        return torch.tensor([0.0, -23.0]).expand(len(said), 2)
    fl.transducer_decode(torch.zeros(1, 3, 1), [3], predict, rarely, blank=0, beam_size=2)
    assert calls == [2] * 6  # the blank, and one label, of each frame


def test_equal_probabilities_have_an_order():
    "Of equals the first found: shorter ones, then smaller labels."
    joint, predict = lambda x, outputs: torch.zeros(len(outputs), 3), lambda labels, state: (torch.zeros(1 if labels is None else len(labels), 1), ())
    got = fl.transducer_decode(torch.zeros(2, 1, 1), [1, 1], predict, joint, blank=1, max_symbols=2, beam_size=8, k=8)
    for found in got.labels.tolist():
        assert found == [[-1, -1], [0, -1], [2, -1], [0, 0], [0, 2], [2, 0], [2, 2], [-1, -1]]
    few = fl.transducer_decode(torch.zeros(2, 1, 1), [1, 1], predict, joint, blank=1, max_symbols=2, beam_size=2, k=2)
    assert few.labels[0].tolist() == [[-1], [0]]


def test_largest_numbers_and_of_equals_the_first():
    made = torch.Generator().manual_seed(0)
    for k, most in ((1, 3), (5, 3), (40, 9), (40, 1)):
        x = torch.randint(0, most, (6, 40), generator=made).double().log()
        assert torch.equal(lattices.first_largest(x, k), x.sort(dim=1, descending=True, stable=True).indices[:, :k])


@pytest.mark.parametrize("rows, message", [(2, "6 rows for as many labels and states, got shape \\[2, 4\\]"), (3, "1 row or 2 before the first label, got shape \\[3, 4\\]")])
def test_a_predictor_for_other_numbers_of_rows(rows, message):
    predict = lambda labels, state: (torch.zeros(rows, 4), ())
    with pytest.raises(ValueError, match="predict: expected " + message):
        fl.transducer_decode(torch.zeros(2, 5, 4), [5, 4], predict, lambda x, outputs: x + outputs, beam_size=3)


def test_a_beam_without_a_path():
    "Where the blank cannot be there is no end: −∞, and no labels."
    model = Model()
    joint = lambda x, outputs: torch.tensor([0.0, 0.0, -math.inf]).expand(len(x), 3)
    model.N = 2
    got = fl.transducer_decode(torch.zeros(2, 3, 8), [3, 1], model.predict, joint, max_symbols=2, beam_size=3, k=2)
    assert got.log_probs.isneginf().all() and got.labels.shape == (2, 2, 0) and (got.lengths == 0).all()


def test_decoding_nothing():
    model = Model()
    model.N = 0
    assert fl.transducer_decode(torch.zeros(0, 3, 8), torch.zeros(0, dtype=torch.int64), model.predict, model.joint).labels.shape == (0, 1, 0)
    assert beam_of(model, torch.zeros(0, 3, 8), torch.zeros(0, dtype=torch.int64), beam_size=3, k=2).labels.shape == (0, 2, 0)
    assert beam_of(model, torch.zeros(2, 3, 8), [0, 0], beam_size=3, k=2).log_probs.tolist() == [[0.0, -math.inf]] * 2


def test_module():
    z, y, frames, labels = sample(dtype=f32)
    m = fl.TransducerLoss(reduction="sum", clamp=0.1)
    assert m(z, y, frames, labels) == fl.transducer_loss(z, y, frames, labels, reduction="sum", clamp=0.1)
    assert repr(m) == "TransducerLoss(blank=-1, clamp=0.1, reduction='sum', fused_log_softmax=True)"


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("labels, seed", [((3, 0, 4, 1), 0), ((40, 0, 5, 33), 1), ((150, 130, 0, 7), 2)])
def test_cuda_source_on_a_cpu(labels, seed, best):
    "One warp, several states a thread, several warps: what transducer.cu computes, thread by thread."
    kernel = kernels_on_cpu("transducer_on_cpu.cpp", transducer=None)
    kernel.seed = seed
    frames = (5, 3, 1, 9)
    (blank, label), (starts, *lengths) = batch(frames, labels, dtype=f32, seed=seed)
    blank[3], label[int(starts[2])] = -math.inf, math.nan if labels[2] else 0.0
    most = max(labels)
    for flows in (True, False):
        threads, per = shape_of(most)
        run = kernel("transducer_lattice", 0, THREADS=threads, PER=per, BEST=int(best), FLOWS=int(flows))
        got = torch.empty(4), *((torch.zeros_like(blank), torch.zeros_like(blank)) if flows else (None, None))
        run(4, threads, blank, label, starts, *lengths, *got)
        exact = node_flows(blank.double(), label.double(), starts, *lengths, max(frames), most, Max if best else lattices.Log)
        for t, e in zip(got[:1 + 2 * flows], exact):
            torch.testing.assert_close(t.double(), e, rtol=1e-5, atol=2e-6, equal_nan=True)


def shape_of(most):
    "Threads of a block, and states a thread, as the library chooses them"
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lattices, "cuda_kernel", lambda *given, **constants: seen.update(constants) or print)
        lattices.cuda_lattice.__wrapped__(0, most, False, True)
    return seen["THREADS"], seen["PER"]


@pytest.mark.parametrize("most", [0, 31, 32, 63, 64, 100, 127, 128, 255, 256, 1023, 2000, 4095])
def test_a_block_has_all_states(most):
    threads, per = shape_of(most)
    assert threads % 32 == 0 and 32 <= threads <= 1024 and threads * per > most


@pytest.mark.parametrize("arch", [75, 90])
def test_cuda_source_compiles(arch):
    for most in (40, 1000):
        threads, per = shape_of(most)
        check_nvcc(arch, cuda_source("transducer"), dict(THREADS=threads, PER=per, BEST=0, FLOWS=1))
