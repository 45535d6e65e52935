"""What must not spoil a loss: weights so small that one over their sum overflows, and NaN in tokens that are ignored."""
import sys
from itertools import product

import pytest
import torch

import fusedloss as fl
from fusedloss import chunks, filter as with_filter
from fusedloss.core.ignored import counted_copy
from grids import thorough_but
from helpers import everywhere, need_kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN in the interpreter
f32, f64 = torch.float32, torch.float64
N, V, H = 7, 37, 4


def tried(names, *by_kernels):
    "Losses and ways: by PyTorch each one, by the kernels in the gate those that are named"
    names = list(names)
    return thorough_but(product(names, ("plain", "kernels")), *product(names, ["plain"]), *product(by_kernels, ["kernels"]))


@pytest.fixture
def way(request, device, monkeypatch):
    "The device, on which either PyTorch or the Triton kernels take everything they can"
    taken = request.param == "kernels"
    if taken:
        need_kernels(device)
    everywhere(monkeypatch, with_filter, "takes_kernel", lambda x: taken and x.dtype == f32 and len(x) > 0)
    everywhere(monkeypatch, sys.modules["fusedloss.core.triton"], "has_kernel", lambda z: taken and z.dtype == f32 and z.numel() > 0)
    return device


def made(device, dtype=f32):
    "Features, weights, bias; labels of which two are ignored; probabilities, several labels"
    g = torch.Generator().manual_seed(3)
    x, w, b, z = (torch.randn(size, generator=g) for size in ((N, H), (V, H), (V,), (N, V)))
    y = torch.randint(V, (N,), generator=g)
    y[2] = y[5] = -100
    several = torch.stack([torch.where(y == -100, -100, (y + 5 * k) % V) for k in range(3)], 1)
    soft = torch.rand(N, V, generator=g).softmax(1)
    numbers = [t.to(device, dtype) for t in (x, w, b, z, soft)]
    return *numbers, y.to(device), several.to(device)


def logits(call, target, **how):
    return lambda x, w, b, z, y, **more: call(z, target(y), **how, **more)


def layer(method, **how):
    if method == "tiles":  # it has no bias
        return lambda x, w, b, z, y, **more: fl.linear_cross_entropy(x, w, y, method=method, **how, **more)
    return lambda x, w, b, z, y, **more: fl.linear_cross_entropy(x, w, y, linear_bias=b, method=method, **how, **more)


def results(loss, tensors):
    "The loss, and each gradient of it, zeros where a tensor does not enter"
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    value = loss(*leaves)
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    return [value.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads))]


def in_place(z, y, **how):
    return fl.cross_entropy(z * 1.0, y, inplace=True, **how)


MEANS = {  # and whether class weights may be so small too
    "cross_entropy": (logits(fl.cross_entropy, lambda y: y), True), "in place": (logits(in_place, lambda y: y), True),
    "eager": (layer("eager"), True), "chunks": (layer("chunks"), True), "recompute": (layer("recompute"), True),
    "smoothing": (logits(fl.cross_entropy, lambda y: y, label_smoothing=0.2), False), "z-loss": (layer("recompute", z_loss=0.1), False),
}


@pytest.mark.parametrize("by", ["tokens", "classes"])
@pytest.mark.parametrize("name, way", tried(MEANS, "cross_entropy", "recompute"), indirect=["way"])
def test_a_mean_over_tiny_weights(name, by, way):
    "Weights times a number leave the mean as it is; these are powers of two, which keep their digits where they are no normal numbers"
    loss, by_classes = MEANS[name]
    if by != "tokens" and not by_classes: pytest.skip("the term is not weighed by classes")
    x, w, b, z, _, y, _ = made(way)
    option, size = ("token_weight", N) if by == "tokens" else ("weight", V)
    weights = 2.0 ** (torch.arange(size, device=way) % 4)
    run = lambda by: results(lambda *t: loss(*t, y, **{option: weights * by}), (x, w, b, z))
    for tiny, usual in zip(run(2.0 ** -140), run(1.0)):
        torch.testing.assert_close(tiny, usual)


@pytest.mark.parametrize("kind, way", tried(["forward_kl", "reverse_kl", "jsd"], "jsd"), indirect=["way"])
def test_a_divergence_over_tiny_weights(kind, way):
    x, w, b, z, _, y, _ = made(way)
    weights = 2.0 ** (torch.arange(N, device=way) % 4)
    run = lambda by: results(lambda x, w: fl.linear_divergence(x, w, x.detach() + 1, w.detach() * 0.5, kind=kind, token_weight=weights * by), (x, w))
    for tiny, usual in zip(run(2.0 ** -140), run(1.0)):
        torch.testing.assert_close(tiny, usual)


@pytest.mark.parametrize("way", ["plain", pytest.param("kernels", marks=pytest.mark.thorough)], indirect=True)
def test_probabilities_and_several_targets_over_tiny_weights(way):
    x, w, b, z, soft, _, several = made(way)
    weights = 2.0 ** (torch.arange(N, device=way) % 4)
    for target in (soft, several):
        for method in ("eager", "chunks"):
            run = lambda by, target=target, method=method: results(
                lambda x, w, b: fl.linear_cross_entropy(x, w, target, linear_bias=b, method=method, token_weight=weights * by), (x, w, b))
            for tiny, usual in zip(run(2.0 ** -140), run(1.0)):
                torch.testing.assert_close(tiny, usual)


KNOWN = lambda y: y != -100  # noqa: E731
IGNORING = {
    **{f"{method}, {name}": layer(method, **how) for method in ("eager", "chunks", "recompute", "auto", "product")
       for name, how in {"mean": {}, "smoothing": dict(label_smoothing=0.1), "stats": dict(return_stats=True)}.items() if not (method == "product" and "return_stats" in how)},
    "recompute, none": layer("recompute", reduction="none"), "eager, none": layer("eager", reduction="none"), "tiles": layer("tiles"),
    "filter": lambda x, w, b, z, y: fl.linear_cross_entropy(x, w, y, linear_bias=b, method="recompute", filter_eps=1e-3),
    "LMCL": lambda x, w, b, z, y: fl.tiled_linear_cross_entropy(x, w, y, scale=8.0, token_tile=3, class_tile=16),
    **{f"margin, {type(m).__name__}": lambda x, w, b, z, y, m=m: fl.margin_cross_entropy(x, w, y, margin=m, token_tile=3, class_tile=16)
       for m in (fl.margins.CosFace(), fl.margins.AdaFace().eval(), fl.margins.Circle())},
    "cross_entropy": logits(fl.cross_entropy, lambda y: y, label_smoothing=0.1), "in place": logits(in_place, lambda y: y),
    "iota": logits(fl.iota_cross_entropy, lambda y: y),
    "log_probs": lambda x, w, b, z, y: sum(t.sum() for t in fl.log_probs(z, y, entropy=True)[:2]),
    "linear_log_probs": lambda x, w, b, z, y: sum(t.sum() for t in fl.linear_log_probs(x, w, y, linear_bias=b, entropy=True)[:2]),
    "divergence": lambda x, w, b, z, y: fl.linear_divergence(x, w, x.detach() + 1, w.detach() * 0.5, linear_bias=b, token_weight=KNOWN(y).float()),
}


@pytest.mark.parametrize("name, way", tried(
    IGNORING, "chunks, smoothing", "recompute, smoothing", "recompute, stats", "product, mean", "tiles", "filter", "LMCL", "margin, AdaFace", "cross_entropy", "in place",
    "log_probs", "linear_log_probs", "divergence"), indirect=["way"])
def test_nothing_of_an_ignored_token_reaches_a_gradient(name, way):
    x, w, b, z, _, y, _ = made(way)
    of = lambda found: (found[0] if isinstance(found, tuple) else found).sum()
    loss = lambda *t: of(IGNORING[name](*t, y))
    right = results(loss, (x, w, b, z))
    ignored = ~KNOWN(y)
    bad = torch.tensor([torch.nan, torch.inf], device=way)  # of the two that are ignored
    x[ignored, 1], z[ignored, 3] = bad, bad
    for got, wanted in zip(results(loss, (x, w, b, z)), right):
        torch.testing.assert_close(got, wanted)
    for g in (right[1], right[4]):
        assert not g[ignored].any()


@pytest.mark.parametrize("h", [8, 200, 5])
@pytest.mark.parametrize("dtype", [f32, torch.bfloat16, f64], ids=str)
def test_a_copy_without_ignored_tokens(dtype, h, device):
    "By a kernel where a row is whole vectors; of rows that are not packed; and its gradient is that of a copy"
    x = torch.randn(9, 2 * h, dtype=dtype, device=device)[:, ::2]
    y = torch.tensor([3, -100, 0, -100, 2**40, 1, 1, -1, -100], device=device)
    x[y == -100] = torch.nan
    x.requires_grad_()
    found = counted_copy(x, y, -100)
    assert torch.equal(found, torch.where((y == -100)[:, None], 0.0, x)) and x[1].isnan().all()
    g = torch.where((y == -100)[:, None], 0.0, torch.randn(9, h, dtype=dtype, device=device))
    assert torch.equal(torch.autograd.grad(found, x, g)[0], g)
    assert counted_copy(x[:0], y[:0], -100).shape == (0, h)


@pytest.mark.parametrize("method, way", tried(["eager", "chunks"], "eager"), indirect=["way"])
def test_nothing_of_a_token_whose_targets_are_all_ignored(method, way):
    x, w, b, _, _, y, several = made(way)
    loss = lambda x, w, b: fl.linear_cross_entropy(x, w, several, linear_bias=b, method=method)
    right = results(loss, (x, w, b))
    x[y == -100] = torch.nan
    for got, wanted in zip(results(loss, (x, w, b)), right):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False)], ids=["dx too", "dw alone"])
@pytest.mark.parametrize("dtype", [f32, torch.bfloat16], ids=str)
def test_chunks_that_are_not_packed(needs, dtype, device):
    "As on a GPU, which is not asked how many tokens are ignored: 0 · NaN does not enter dw"
    x, w, b, z, _, y, _ = made(device)
    dz, counts = torch.where((y == -100)[:, None], 0.0, z), y != -100
    x[~counts] = torch.nan
    grads = chunks.Gradients(x.to(dtype), w, needs, f32, False, 1.0, counts)
    for i in (slice(0, 4), slice(4, N)): grads.spend(dz[i], x[i], w, i)
    torch.testing.assert_close(grads.dw, dz.T @ x.nan_to_num(0.0))
    if needs[0]: torch.testing.assert_close(grads.dx, (dz @ w).to(dtype))
