"""CUDA graphs of CTC, scans, PartialFC and linear CTC: at each replay they compute with what is in their inputs then."""
import pytest
import torch

import fusedloss as fl
import fusedloss.ctc
from fusedloss.core.lattice import scan_shape
from fusedloss.scans import logz, viterbi
from fusedloss.semirings import Log, Max
from helpers import everywhere, follows, replays

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


def sequences(T: int, N: int, C: int, L: int, seed: int) -> tuple[torch.Tensor, ...]:
    "Targets, frames and lengths on the GPU, different for each seed"
    g = torch.Generator().manual_seed(seed)
    y, frames, lengths = torch.randint(1, C, (N, L), generator=g), torch.randint(2 * L, T + 1, (N,), generator=g), torch.randint(0, L + 1, (N,), generator=g)
    return y.cuda(), frames.cuda(), lengths.cuda()


def graded(loss: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return loss, *torch.autograd.grad(loss.sum(), leaves)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dtype", [f32, bf16, f16])
@pytest.mark.parametrize("strips", [1, 2])
def test_ctc(strips, dtype, reduction, monkeypatch):
    if strips > 1:
        everywhere(monkeypatch, fusedloss.ctc, "scan_shape", lambda longest, clusters: scan_shape(1500, False))
    z = torch.randn(90, 6, 40, device="cuda", dtype=dtype).requires_grad_()
    y, frames, lengths = sequences(90, 6, 40, 20, 0)
    assert follows(lambda: graded(fl.ctc_loss_with_logits(z, y, frames, lengths, reduction=reduction), z), [z, y, frames, lengths],
                   [torch.randn_like(z), *sequences(90, 6, 40, 20, 1)])


def test_ctc_of_one_target_after_another():
    z, others = torch.randn(90, 3, 40, device="cuda").requires_grad_(), torch.randn(90, 3, 40, device="cuda")
    y, frames, lengths = (torch.tensor(t).cuda() for t in ([*range(1, 31)], [90, 70, 60], [20, 3, 7]))
    more = (torch.tensor(t).cuda() for t in ([*range(30, 0, -1)], [60, 80, 90], [1, 19, 10]))
    assert follows(lambda: graded(fl.ctc_loss_with_logits(z, y, frames, lengths), z), [z, y, frames, lengths], [others, *more])


@pytest.mark.parametrize("dtype", [f32, f16])
def test_lengths_on_the_host_are_constants_of_the_graph(dtype):
    "Even those that are pinned, which the graph could read again: they decide what is launched"
    z = torch.randn(90, 6, 40, device="cuda", dtype=dtype).requires_grad_()
    y, frames, lengths = sequences(90, 6, 40, 20, 0)
    host = [t.cpu().pin_memory() for t in (frames, lengths)]

    def run(frames, lengths):
        return graded(fl.ctc_loss_with_logits(z, y, frames, lengths), z)
    want = [t.detach().clone() for t in run(frames, lengths)]  # a graph of autograd would tie z to this stream
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(*host)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(*host)
    for t in host:
        t.fill_(1)
    del host
    junk = [torch.zeros(6, dtype=torch.int64).pin_memory() for _ in range(50)]
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, want)) and junk


@pytest.mark.parametrize("dtype", [f32, torch.float64])
@pytest.mark.parametrize("S", [Log, Max], ids=str)
@pytest.mark.parametrize("method", ["scan", "fused"])
def test_scans(method, S, dtype):
    T, N, C, nz = 50, 5, 30, 3
    new = lambda *shape: torch.randn(shape, device="cuda", dtype=dtype)
    Ms, v0, vT = (t.requires_grad_() for t in (new(T, N, C, nz), new(N, C), new(N, C)))
    idx, lengths = torch.randint(-1, C, (C, nz), device="cuda"), torch.randint(0, T + 1, (N,), device="cuda")
    others = new(T, N, C, nz), new(N, C), new(N, C), torch.randint(-1, C, (C, nz), device="cuda"), torch.randint(0, T + 1, (N,), device="cuda")
    assert follows(lambda: graded(logz(Ms, idx, v0, vT, S, lengths, method=method), Ms, v0, vT), [Ms, v0, vT, idx, lengths], others)


def test_best_paths():
    T, N, C, nz = 50, 5, 30, 3
    new = lambda *shape: torch.randn(shape, device="cuda")
    given = [new(T, N, C, nz), torch.randint(-1, C, (C, nz), device="cuda"), new(N, C), new(N, C), torch.randint(0, T + 1, (N,), device="cuda")]
    others = [new(T, N, C, nz), torch.randint(-1, C, (C, nz), device="cuda"), new(N, C), new(N, C), torch.randint(0, T + 1, (N,), device="cuda")]
    assert follows(lambda: viterbi(*given), given, others)


@pytest.mark.parametrize("margin", [fl.margins.CosFace(), fl.margins.ArcFace()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("rate", [1.0, 0.1, "positives"])
def test_partial_fc(rate, margin):
    "The sampler's step is an input like others; each replay draws for it and notes that it has"
    head = fl.PartialFC(5000, 64, sample_rate=rate, margin=margin, device="cuda", dtype=bf16)
    x = torch.randn(200, 64, device="cuda", dtype=bf16).requires_grad_()
    y = torch.randint(-1, 5000, (200,), device="cuda")
    inputs, others = [x, y, head.weight], [torch.randn_like(x), torch.randint(-1, 5000, (200,), device="cuda"), torch.randn_like(head.weight)]
    if rate != 1:
        inputs, others = [*inputs, head.sampler.step, head.sampler.used], [*others, torch.tensor(41, device="cuda"), torch.tensor(0, device="cuda")]

    def step():
        loss = head(x, y)
        dx, dw = torch.autograd.grad(loss, [x, head.weight])
        return loss, dx, *((dw._indices(), dw._values()) if dw.is_sparse else (dw,)), *([head.sampler.used.clone()] if rate != 1 else [])
    assert follows(step, inputs, others)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dtype", [f32, bf16, f16])
def test_linear_ctc(dtype, reduction):
    new = lambda *shape: torch.randn(shape, device="cuda", dtype=dtype) / 4
    x, w, b = (t.requires_grad_() for t in (new(70, 5, 64), new(3000, 64), new(3000)))
    y, frames, lengths = sequences(70, 5, 3000, 20, 0)
    others = [new(70, 5, 64), new(3000, 64), new(3000), *sequences(70, 5, 3000, 20, 1)]
    assert follows(lambda: graded(fl.linear_ctc_loss(x, w, y, frames, lengths, linear_bias=b, reduction=reduction), x, w, b),
                   [x, w, b, y, frames, lengths], others)


def test_linear_ctc_with_lengths_on_the_host():
    x, w = (torch.randn(shape, device="cuda", dtype=bf16).requires_grad_() for shape in ((70, 5, 64), (3000, 64)))
    y, frames, lengths = sequences(70, 5, 3000, 20, 0)
    frames, lengths = frames.cpu(), lengths.cpu()
    assert replays(lambda: torch.autograd.grad(fl.linear_ctc_loss(x, w, y, frames, lengths), [x, w]))
