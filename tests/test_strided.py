"""Vectors that do not lie one number after the other give what their copies give: biases, weights, labels, temperatures, upstream gradients; by PyTorch and by kernels."""
import functools

import pytest
import torch

import fusedloss as fl
from fusedloss.core import products, triton
from helpers import everywhere, need_kernels

f32, f64 = torch.float32, torch.float64
N, H, V = 7, 16, 37


@pytest.fixture(params=["plain", "kernels"])
def way(request, device, monkeypatch):
    "The device, on which either PyTorch or the kernels take everything they can"
    if request.param == "kernels":
        need_kernels(device)
    everywhere(monkeypatch, products, "takes_kernel", lambda x: request.param == "kernels" and x.dtype != f64 and len(x) > 0)
    everywhere(monkeypatch, triton, "has_kernel", lambda z: request.param == "kernels" and z.dtype != f64 and z.numel() > 0)
    return device


def strided(t):
    "The same numbers, every third of a larger tensor whose others are no numbers or no labels"
    wide = torch.full((len(t) * 3,), torch.nan if t.is_floating_point() else 10**6, dtype=t.dtype, device=t.device)
    wide[::3] = t
    return wide[::3]


def graded(call, *leaves):
    "The numbers of a call, and their gradients for an uneven upstream gradient that is strided as well"
    leaves = [t.clone().requires_grad_() for t in leaves]
    found = call(*leaves)
    found = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
    graded = [t for t in found if t.requires_grad]
    ups = [strided(torch.linspace(-1, 2, t.numel(), device=t.device)).to(t.dtype).view(-1) if t.dim() == 1 else None for t in graded]
    return [t.detach() for t in found] + list(torch.autograd.grad(graded, leaves, ups)) if graded else found


def cross_entropy(method, reduction="mean"):
    def call(x, w, y, b, classes, tokens, t):
        more = {} if method == "tiles" else dict(linear_bias=b, weight=classes, token_weight=tokens, label_smoothing=0.1)
        return graded(lambda x, w: fl.linear_cross_entropy(x, w, y, method=method, reduction=reduction, **more), x, w)
    return call


def log_probs(**how):
    return lambda x, w, y, b, classes, tokens, t: graded(
        lambda x, w: fl.linear_log_probs(x, w, y, linear_bias=b, temperature=t, entropy=True, **how)[:2], x, w)


def several(x, w, y, b, classes, tokens, t):
    lists = torch.stack([y, (y + 5) % V], 1)
    return graded(lambda x, w: fl.linear_log_probs(x, w, lists, linear_bias=b, temperature=t).log_probs.sum(1), x, w)


def topk(best):
    return lambda x, w, y, b, classes, tokens, t: graded(lambda x, w: best(x, w, 3, linear_bias=b, temperature=t).log_probs.sum(1), x, w)


def divergence(loss, reduction="none"):
    return lambda x, w, y, b, classes, tokens, t: graded(
        lambda x, w: loss(x, w, x.detach() / 2, w.detach() / 3, linear_bias=b, teacher_bias=b, token_weight=tokens, temperature=t, reduction=reduction), x, w)


def over_ranks(x, w, y, b, classes, tokens, t):
    return graded(lambda x, w: fl.sharded_linear_log_probs(x, w, y, linear_bias=b, temperature=t, entropy=True)[:2], x, w)


CALLS = {f"linear_cross_entropy, {m}": cross_entropy(m) for m in ("eager", "tiles", "chunks", "recompute")} | {
    "linear_cross_entropy, each token": cross_entropy("recompute", "none"),
    "linear_log_probs": log_probs(), "linear_log_probs, batch_invariant": log_probs(batch_invariant=True), "linear_log_probs, lists": several,
    "linear_topk": topk(fl.linear_topk), "sharded_linear_topk": topk(fl.sharded_linear_topk),
    "linear_sample": lambda x, w, y, b, *_: list(fl.linear_sample(x, w, linear_bias=b, generator=torch.Generator(x.device).manual_seed(0))),
    "linear_divergence": divergence(fl.linear_divergence), "sharded_linear_divergence": divergence(fl.sharded_linear_divergence),
    "sharded_linear_log_probs": over_ranks,
    "sharded_linear_sample": lambda x, w, y, b, *_: list(fl.sharded_linear_sample(x, w, linear_bias=b, top_k=5, generator=torch.Generator(x.device).manual_seed(0))),
    "cross_entropy": lambda x, w, y, b, classes, tokens, t: graded(
        lambda z: fl.cross_entropy(z, y, weight=classes, token_weight=tokens, label_smoothing=0.1, reduction="none"), x @ w.T),
    "log_probs": lambda x, w, y, b, classes, tokens, t: graded(lambda z: fl.log_probs(z, y, temperature=t, entropy=True)[:2], x @ w.T),
}


@functools.cache
def sample(device):
    g = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.rand(size, generator=g).to(device)
    return draw(N, H) - 0.5, draw(V, H) - 0.5, torch.randint(V, (N,), generator=g).to(device), 3 * draw(V), draw(V), draw(N), draw(N) + 0.5


@pytest.mark.parametrize("name", CALLS)
def test_strided_vectors(name, way):
    x, w, *vectors = sample(way)
    got, wanted = (CALLS[name](x, w, *map(put, vectors)) for put in (strided, torch.clone))
    assert len(got) == len(wanted) > 0
    for a, e in zip(got, wanted):
        assert e.isfinite().all()
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)
