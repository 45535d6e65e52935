"""Saved-tensor hooks see every large tensor that backward waits for: offloading, checkpoints and counters of memory rely on it."""

import pytest
import torch

import fusedloss as fl
from fusedloss.iota import iota_cross_entropy
from fusedloss.margins import margin_cross_entropy
from fusedloss.scans import logz
from fusedloss.semirings import Log
from workbook.measure import relative_error
from grids import few, thorough_but
from helpers import hidden_from_hooks

N, H, V = 96, 24, 160
x, w, z = torch.randn(N, H), torch.randn(V, H), torch.randn(N, V)
y = torch.randint(V, (N,))
T, L, C = 40, 6, 30
frames, lengths = torch.tensor([T, T - 3]), torch.tensor([L, L - 1])
scores, targets = torch.randn(T, 2, C), torch.randint(1, C, (2, L))
states = torch.randn(T, 2, H)
edges, sources = torch.randn(T, 2, 20, 3), torch.randint(-1, 20, (20, 3))
ends = torch.zeros(2, 2, 20).unbind()


def head(x, w):
    model = fl.PartialFC(V, H, sample_rate=0.5)
    model.weight.data = w
    return model, model(x, y)


LOSSES = {  # a loss of leaves
    "cross_entropy": (lambda z: fl.cross_entropy(z, y), z),
    "cross_entropy, sums": (lambda z: fl.cross_entropy(z, y, reduction="none", label_smoothing=0.1), z),
    "iota": (lambda z: iota_cross_entropy(z, y), z),
    **{f"linear, {m}": (lambda x, w, m=m: fl.linear_cross_entropy(x, w, y, method=m), x, w) for m in ("eager", "tiles", "chunks", "recompute")},
    "linear, recompute, each": (lambda x, w: fl.linear_cross_entropy(x, w, y, method="recompute", reduction="none"), x, w),
    "linear, filtered": (lambda x, w: fl.linear_cross_entropy(x, w, y, method="recompute", filter_eps=1e-3), x, w),
    "margin": (lambda x, w: margin_cross_entropy(x, w, y, margin=fl.margins.ArcFace()), x, w),
    "ctc": (lambda z: fl.ctc_loss(z.log_softmax(2), targets, frames, lengths), scores),
    "ctc of logits": (lambda z: fl.ctc_loss_with_logits(z, targets, frames, lengths), scores),
    "linear ctc": (lambda x, w: fl.linear_ctc_loss(x, w[:C], targets, frames, lengths), states, w),
    "linear ctc, each": (lambda x, w: fl.linear_ctc_loss(x, w[:C], targets, frames, lengths, reduction="none"), states, w),
    "logz": (lambda Ms: logz(Ms, sources, *ends, Log), edges),
}


@pytest.mark.parametrize("name", thorough_but(
    few(LOSSES, "cross_entropy", "linear, recompute, each", "linear, filtered", "margin", "ctc of logits", "linear ctc, each", "logz"),
    "linear, recompute, each", "margin", "linear ctc, each"))
def test_hooks_see_every_large_tensor(name):
    loss, *tensors = LOSSES[name]
    leaves = [t.clone().requires_grad_() for t in tensors]
    plain = torch.autograd.grad(loss(*leaves).sum(), leaves)
    left, got = hidden_from_hooks(lambda: loss(*leaves), leaves, 2000)
    assert not left, f"backward waits for storages of {left} bytes that no hook has seen"
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(got, plain))


def test_a_tensor_on_the_side_is_noticed():
    class Sly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            ctx.held = z.exp()
            return z.sum()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.held
    leaf = z.clone().requires_grad_()
    assert hidden_from_hooks(lambda: Sly.apply(leaf), [leaf], 2000)[0] == [z.nbytes]
