"""What every public loss makes of tensors that hold nothing, and of labels apart; promises; temperatures."""
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

import fusedloss as fl
from fusedloss.baseline import sample_data
from fusedloss.losses import METHODS, linear_cross_entropy
from workbook.measure import relative_error
from grids import thorough_but
from head_cases import place  # noqa: F401 (fixtures)
from helpers import broken, everywhere
from kernels_once import forced_kernels

f32, f64 = torch.float32, torch.float64
N, H, V = 6, 4, 9
CosFace = fl.margins.CosFace

def frames(x):
    "A sequence of a batch of one"
    return x[:, None] if isinstance(x, torch.Tensor) else x


LOGITS = {
    "cross_entropy": fl.cross_entropy, "iota": fl.iota_cross_entropy,
    "ctc": lambda x, y: fl.ctc_loss(frames(x), y, [N], [2]), "ctc of logits": lambda x, y: fl.ctc_loss_with_logits(frames(x), y, [N], [2]),
    "CTCLoss": lambda x, y: fl.CTCLoss()(frames(x), y, [N], [2]),
}
LINEAR = {
    **{m: lambda x, w, y, m=m: linear_cross_entropy(x, w, y, method=m) for m in METHODS},
    "tiled": fl.tiled_linear_cross_entropy, "chunked": fl.chunked_linear_cross_entropy, "recomputed": fl.recompute_linear_cross_entropy,
    "baseline": fl.baseline_linear_cross_entropy, "sharded": fl.sharded_linear_cross_entropy,
    "margins": lambda x, w, y: fl.margin_cross_entropy(x, w, y, margin=CosFace()),
    "linear ctc": lambda x, w, y: fl.linear_ctc_loss(frames(x), w, y, [N], [2]),
}


def labels(name, device="cpu"):
    "Targets of the loss's shape"
    y = torch.arange(N, device=device) % V
    return y[None, 1:3] if "ctc" in name.lower() else y


@pytest.mark.parametrize("name", [*LINEAR, *LOGITS])
def test_on_meta_shapes_are_right_or_a_sentence_says_why(name):
    x, w, _ = sample_data(N, H, V, f32)
    x, w = (t.detach().to("meta").requires_grad_() for t in (x, w))
    given = [x, w, labels(name, "meta")] if name in LINEAR else [(x @ w.T).detach().requires_grad_(), labels(name, "meta")]
    loss = {**LINEAR, **LOGITS}[name](*given)
    assert loss.is_meta and loss.shape == () and loss.dtype == f32
    for t, g in zip(given, torch.autograd.grad(loss, given[:-1])):
        assert g.is_meta and g.shape == t.shape and g.dtype == t.dtype


def head(cls, rate):
    "A head of the weight that is given"
    def loss(x, w, y):
        torch.manual_seed(0)
        made = cls(V, H, sample_rate=rate, device=x.device, dtype=w.dtype)
        made.weight = w
        return made(x, y)
    return loss


APART = LINEAR | LOGITS | {f"{cls.__name__} {rate}": head(cls, rate) for cls in (fl.PartialFC, fl.ShardedPartialFC) for rate in (1.0, 0.5, "positives")} | {
    "linear_log_probs": lambda x, w, y: fl.linear_log_probs(x, w, y).log_probs.mean(),
    "filtered": lambda x, w, y: fl.recompute_linear_cross_entropy(x, w, y, filter_eps=1e-6)}


@pytest.mark.parametrize("name", thorough_but(APART, *[*APART][::3]))
def test_labels_may_lie_apart(name, place):
    "What a kernel reads as labels next to each other is a copy that has them so"
    x, w, _ = sample_data(N, H, V, f32 if place == "cpu" else torch.bfloat16, place)
    given = [x, torch.nn.Parameter(w.detach())] if name not in LOGITS else [(x @ w.T).detach().requires_grad_()]
    y = labels(name, place)
    apart = torch.stack([y, V - 1 - y], -1)[..., 0]
    assert not apart.is_contiguous()
    found = []
    for target in (apart, apart.contiguous()):
        with forced_kernels() if place == "cpu" else nullcontext():
            loss = APART[name](*given, target)
            found.append([loss.detach(), *(g.to_dense() for g in torch.autograd.grad(loss, given))])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [f32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*LINEAR, "none", "of probabilities", "of probabilities, all logits"])
def test_without_features_all_scores_are_zero(name, dtype, device):
    loss = (LINEAR | {"none": lambda x, w, y: linear_cross_entropy(x, w, y, reduction="none").mean()}
            | {f"of probabilities{rest}": lambda x, w, y, m=m: linear_cross_entropy(x, w, F.one_hot(y, V).float(), method=m)
               for rest, m in (("", "chunks"), (", all logits", "eager"))})[name]
    x, w, wide_x, wide_w = (torch.zeros(n, h, device=device, dtype=dtype, requires_grad=True) for h in (0, H) for n in (N, V))
    y = labels(name, device)
    found = loss(x, w, y)
    torch.testing.assert_close(found, loss(wide_x, wide_w, y))
    assert [g.shape for g in torch.autograd.grad(found, [x, w])] == [(N, 0), (V, 0)]


@pytest.mark.parametrize("options", [dict(return_stats=True), dict(reduction="none"), dict(label_smoothing=0.1, softcap=3.0)], ids=str)
def test_options_on_meta(options):
    x, w, y = (t.detach().to("meta") for t in sample_data(N, H, V, f32))
    found = linear_cross_entropy(x.requires_grad_(), w.requires_grad_(), y, **options)
    loss = found[0] if isinstance(found, tuple) else found
    assert loss.is_meta and loss.shape == ((N,) if "reduction" in options else ())
    loss.sum().backward()
    assert x.grad.shape == x.shape and x.grad.is_meta


# --- a promise about the number of valid tokens ---

@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_promise_is_the_same_for_every_method(method, reduction, device):
    if method in ("chunks", "product") and reduction == "none":
        pytest.skip("they have no 'none'")
    x, w, y = sample_data(N, H, V, f64, device)
    y[1] = -100
    call = lambda promise: linear_cross_entropy(x, w, y, method=method, reduction=reduction, max_valid=promise)
    torch.testing.assert_close(call(N), linear_cross_entropy(x, w, y, method=method, reduction=reduction))
    torch.testing.assert_close(call(N - 1), call(N))
    assert broken(lambda: call(N - 2), [x, w])
    assert broken(lambda: call(0), [x, w])


@pytest.mark.parametrize("method", METHODS)
def test_a_broken_promise_is_nan_where_nobody_looks(method, monkeypatch):
    "As on a GPU, where nothing waits: loss, statistics and every gradient"
    everywhere(monkeypatch, fl.losses, "check_promise", lambda *_: None)
    x, w, y = sample_data(N, H, V, f32)
    told = method in ("auto", "eager", "recompute")
    found = linear_cross_entropy(x, w, y, method=method, max_valid=3, return_stats=told)
    loss = found[0] if told else found
    assert loss.isnan() and all(g.isnan().all() for g in torch.autograd.grad(loss, [x, w], retain_graph=told))
    if told:
        assert found[1].lse.isnan().all() and torch.autograd.grad(found[1].entropy.sum(), x)[0].isnan().all()


def test_a_promise_is_about_the_shifted_tokens():
    x, w, y = sample_data(6, H, V, f32)
    assert linear_cross_entropy(x, w, y, shift=2, max_valid=4).isfinite()
    with pytest.raises(ValueError, match="^max_valid: expected at least the 4 tokens that are not ignored, got 3"):
        linear_cross_entropy(x, w, y, shift=2, max_valid=3)


# --- scales ---

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("call", [fl.tiled_linear_cross_entropy, lambda *t, **how: linear_cross_entropy(*t, method="tiles", **how),
                                  lambda *t, **how: linear_cross_entropy(*t, method="recompute", **how)], ids=["tiled", "tiles", "recompute"])
def test_scores_are_scaled_and_not_inputs(call, dtype):
    "A scale that 16 bits cannot hold, on the scores in fp32: the error is that of rounding the gradients"
    x, w, y = sample_data(256, 16, 64, dtype, seed=3)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    truth = F.cross_entropy(20.3 * F.linear(*exact), y)
    loss = call(x, w, y, logit_scale=20.3)
    assert relative_error(loss, truth) < 2e-6
    for g, e in zip(torch.autograd.grad(loss, [x, w]), torch.autograd.grad(truth, exact)):
        assert relative_error(g, e) < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_tiles_scale_as_the_definition(reduction, device):
    x, w, y = sample_data(11, 5, 17, f64, device)
    for scale, cosines in ((0.3, None), (7.0, 2.0)):
        found = fl.tiled_linear_cross_entropy(x, w, y, reduction=reduction, logit_scale=scale, scale=cosines, token_tile=4, class_tile=5)
        z = F.linear(x, w)
        if cosines is not None:
            z = cosines * (F.linear(F.normalize(x, dim=1), F.normalize(w, dim=1)) - 0.35 * F.one_hot(y, 17))
        exact = F.cross_entropy(scale * z, y, reduction=reduction)
        torch.testing.assert_close(found, exact)
        for a, e in zip(torch.autograd.grad(found.sum(), [x, w]), torch.autograd.grad(exact.sum(), [x, w])):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("method", ["auto", "eager", "chunks", "recompute"])
def test_a_temperature_under_a_soft_cap(method):
    "c tanh(s z / c) / T is (c / T) tanh((s / T) z / (c / T))"
    x, w, y = sample_data(11, 5, 17, f64)
    s, c, T = 1.5, 2.0, 0.7
    exact = F.cross_entropy(c * torch.tanh(s * F.linear(x, w) / c) / T, y)
    found = linear_cross_entropy(x, w, y, logit_scale=s / T, softcap=c / T, method=method)
    torch.testing.assert_close(found, exact)
    for a, e in zip(torch.autograd.grad(found, [x, w]), torch.autograd.grad(exact, [x, w])):
        torch.testing.assert_close(a, e)
