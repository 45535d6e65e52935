"""An LM head in fp32 from 16-bit operands: log-probabilities against float64 scores of the same operands, within what fp32 sums allow and far below what 16-bit logits miss; gradients within their own rounding."""
import sys

import pytest
import torch
import torch.nn.functional as F

import fusedloss as fl
import fusedloss.logprobs as logprobs
from workbook.measure import relative_error
from helpers import everywhere, need_kernels

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
N, H, V = 24, 64, 300
PATHS = [("plain", bf16), ("plain", f16), ("kernels", f16), ("kernels", bf16)]


@pytest.fixture(params=PATHS, ids=lambda p: f"{p[0]}-{str(p[1])[6:]}")
def path(request, device, monkeypatch):
    "The device, the operands' dtype, and whether the kernels take everything they can"
    way, dtype = request.param
    kernels = way == "kernels"
    if kernels:
        need_kernels(device)
        if device == "cpu" and dtype == bf16:
            pytest.skip("the interpreter multiplies no bf16")
    everywhere(monkeypatch, logprobs, "takes_kernel", lambda x: kernels and x.dtype in (f16, bf16) and len(x) > 0)
    everywhere(monkeypatch, sys.modules[logprobs.row_numbers.__module__], "has_kernel", lambda z: kernels and z.dtype != f64 and z.numel() > 0)
    return device, dtype, kernels


def head(device, dtype, seed=0):
    "Operands whose logits are as large as a language model's, and classes drawn from their softmax"
    made = torch.Generator().manual_seed(seed)
    x, w = 5 * torch.randn(N, H, generator=made), torch.randn(V, H, generator=made) / H**0.5
    x, w = x.to(dtype), w.to(dtype)
    y = (x.double() @ w.double().T).softmax(1).multinomial(1, generator=made)[:, 0]
    return x.to(device), w.to(device), y.to(device)


def in_double(x, w, y):
    "Log-probabilities, their upstream gradients, and the gradients, in float64 on a CPU"
    x, w = (t.detach().cpu().double().requires_grad_() for t in (x, w))
    found = (x @ w.T).log_softmax(1).gather(1, y.cpu()[:, None])[:, 0]
    return found.detach(), *torch.autograd.grad((found * upstream(found)).sum(), [x, w])


def upstream(found):
    return torch.linspace(-1, 2, len(found), dtype=found.dtype, device=found.device)


def fp32_bound(x, w):
    "What fp32 sums may miss of a log-probability [N]: H additions in each of two scores, V in the sum of exponentials, and the scores' own rounding"
    x, w = (t.detach().cpu().double() for t in (x, w))
    sizes = (x.abs() @ w.abs().T).amax(1)  # of the terms of a score
    return 2.0**-24 * (2 * (H + 4) * sizes + V + 16)


def rounded_logits(x, w, y):
    "Log-probabilities by logits in the operands' dtype: fp32 sums rounded once, as a tensor core's output is, then a softmax in fp32"
    return (x.float() @ w.float().T).to(x.dtype).float().log_softmax(1).gather(1, y[:, None])[:, 0]


def within(got, exact, bound):
    worst = ((got.detach().cpu().double() - exact).abs() / bound).max().item()
    if not worst <= 1: print(f"an error of {worst:.3g} of its bound")  # pytest shows what a failure has printed
    return worst <= 1


LISTED = {"one class": {}, "batch invariant": dict(batch_invariant=True), "entropy": dict(entropy=True), "few rows at a time": dict(memory_budget=2**14)}


@pytest.mark.parametrize("more", LISTED.values(), ids=LISTED)
def test_log_probabilities_are_those_of_an_fp32_head(more, path):
    device, dtype, _ = path
    x, w, y = head(device, dtype)
    exact, bound = in_double(x, w, y)[0], fp32_bound(x, w)
    found = fl.linear_log_probs(x, w, y, **more).log_probs
    assert found.dtype == f32 and within(found, exact, bound)
    missed = (rounded_logits(x, w, y).cpu().double() - exact).abs()
    assert missed.mean() > (2 if dtype == f16 else 20) * bound.mean(), "16-bit logits would pass, too"


def test_lists_of_classes_too(path):
    device, dtype, _ = path
    x, w, y = head(device, dtype)
    listed = torch.stack([y, (y + 1) % V, (y + 7) % V], 1)
    found = fl.linear_log_probs(x, w, listed).log_probs
    exact = (x.cpu().double() @ w.cpu().double().T).log_softmax(1).gather(1, listed.cpu())
    assert found.dtype == f32 and within(found, exact, fp32_bound(x, w)[:, None])


def test_samples_and_top_classes_too(path):
    device, dtype, _ = path
    x, w, _ = head(device, dtype)
    log_p, bound = (x.cpu().double() @ w.cpu().double().T).log_softmax(1), fp32_bound(x, w)[:, None]
    drawn, filtered, best = fl.linear_sample(x, w), fl.linear_sample(x, w, top_k=9), fl.linear_topk(x, w, 3)
    for found, classes in ((drawn.log_probs[:, None], drawn.tokens[:, None]), (filtered.log_probs[:, None], filtered.tokens[:, None]), (best.log_probs, best.indices)):
        assert found.dtype == f32 and within(found, log_p.gather(1, classes.cpu()), bound)


@pytest.mark.parametrize("method", ["recompute", "tiles"])
def test_a_loss_by_methods_that_round_no_logits(method, path):
    device, dtype, _ = path
    x, w, y = head(device, dtype)
    exact, bound = in_double(x, w, y)[0], fp32_bound(x, w)
    loss = fl.linear_cross_entropy(x, w, y, reduction="sum", method=method)
    assert loss.dtype == f32 and within(loss, -exact.sum(), bound.sum() + 2.0**-24 * N * exact.abs().sum())


# Gradients


def gradient_bounds(x, w, y, rounds_dz):
    "What dx and dw may miss: one rounding to their dtype; what fp32 scores bring to dz; and dz's own rounding, if it is rounded"
    half, least = torch.finfo(x.dtype).eps / 2, torch.finfo(x.dtype).smallest_normal
    _, dx, dw = in_double(x, w, y)
    wide_x, wide_w = (t.detach().cpu().double() for t in (x, w))
    p = (wide_x @ wide_w.T).softmax(1)
    g = upstream(p[:, 0]).abs()[:, None]
    hot = F.one_hot(y.cpu(), V).double()
    dz = g * (hot - p).abs()
    off = 1.1 * g * p * fp32_bound(x, w)[:, None] + (N + V) * 2.0**-24 * dz
    if rounds_dz:
        off = off + half * (dz + g.amax() * least)
    rounding = lambda t: 1.01 * half * t.abs().clamp(min=least)
    return rounding(dx) + 1.01 * off @ wide_w.abs(), rounding(dw) + 1.01 * off.T @ wide_x.abs()


@pytest.fixture
def one_rounding():
    "cuBLAS adds the parts of a sum that it splits in fp32: by default it may in bf16"
    how = torch.backends.cuda.matmul
    before, how.allow_bf16_reduced_precision_reduction = how.allow_bf16_reduced_precision_reduction, False
    yield
    how.allow_bf16_reduced_precision_reduction = before


def gradients(call, x, w):
    x, w = (t.detach().requires_grad_() for t in (x, w))
    found = call(x, w)
    return torch.autograd.grad((found * upstream(found)).sum(), [x, w])


def test_gradients_miss_no_more_than_their_own_rounding(path, one_rounding):
    device, dtype, kernels = path
    x, w, y = head(device, dtype)
    exact = in_double(x, w, y)[1:]
    found = gradients(lambda x, w: fl.linear_log_probs(x, w, y).log_probs, x, w)
    for g, e, bound in zip(found, exact, gradient_bounds(x, w, y, kernels or device == "cuda")):
        assert g.dtype == dtype and within(g, e, bound)
    eager = gradients(lambda x, w: F.log_softmax(F.linear(x, w), -1, dtype=f32).gather(1, y[:, None])[:, 0], x, w)
    for ours, theirs, e in zip(found, eager, exact):
        assert 2 * relative_error(ours, e) < relative_error(theirs, e), "rounded logits cost a gradient more than its own rounding"


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_fp32_tensors_have_fp32_gradients(dtype, device):
    "The same 16-bit numbers in fp32 tensors: nothing is rounded to 16 bits on the way"
    if device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        pytest.skip("TF32 rounds dz")
    x, w, y = head(device, dtype)
    found = gradients(lambda x, w: fl.linear_log_probs(x, w, y).log_probs, x.float(), w.float())
    for g, e in zip(found, in_double(x, w, y)[1:]):
        assert g.dtype == f32 and relative_error(g, e) < 1e-5


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_autocast_takes_fp32_weights_as_the_sampler_has_them(dtype, device, one_rounding):
    "Rounded to 16 bits once, as `F.linear` rounds them; log-probabilities are an fp32 head's of these numbers, and gradients are fp32 tensors that were rounded once"
    x, w, y = head(device, dtype)
    x, w = x.float() * 1.001, w.float() * 1.001  # no longer 16-bit numbers
    low = x.to(dtype), w.to(dtype), y
    def call(x, w):
        with torch.autocast(device, dtype):
            return fl.linear_log_probs(x, w, y).log_probs
    assert within(call(x, w), in_double(*low)[0], fp32_bound(*low[:2]))
    for g, e, bound in zip(gradients(call, x, w), in_double(*low)[1:], gradient_bounds(*low, device == "cuda")):
        assert g.dtype == f32 and within(g, e, bound)


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_a_mean_by_chunks_gives_fp32_weights_an_fp32_gradient(dtype, device):
    "Under autocast: sums of dw in fp32, and none rounded to 16 bits at the end"
    x, w, y = head(device, dtype)
    x, w = x.float().requires_grad_(), w.float().requires_grad_()
    with torch.autocast(device, dtype):
        loss = fl.linear_cross_entropy(x, w, y, method="chunks", accumulate="float32")
    dw, = torch.autograd.grad(loss, w)
    assert dw.dtype == f32 and not torch.equal(dw.to(dtype).float(), dw)
    wide_x, wide_w = (t.detach().cpu().double().requires_grad_() for t in (x, w))
    exact, = torch.autograd.grad(F.cross_entropy(wide_x @ wide_w.T, y.cpu()), wide_w)
    assert relative_error(dw, exact) < (1e-5 if device == "cpu" else 2e-2)  # a GPU rounds the chunk's logits, and dz
