"""A loss whose product leaves exponentials: against float64, kernels against their reference, options, tokens that do not count."""
import math
import os

import pytest
import torch
import torch.nn.functional as F

from fusedloss import product
from fusedloss.chunks import Gradients
from fusedloss.core.options import LossOptions
from fusedloss.measure import relative_error

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
N, V, H = 37, 71, 16
HOW = {"plain": {}, "scaled": dict(logit_scale=0.5), "z-loss": dict(z_loss=0.1), "both": dict(logit_scale=1.5, z_loss=0.03)}


def sample(dtype=f32, scale=1.0):
    made = torch.Generator().manual_seed(0)
    x, w = (scale * torch.randn(size, H, generator=made, dtype=f64) for size in (N, V))
    y = torch.where(torch.arange(N) % 5 == 4, -100, torch.arange(N) * 37 % V)
    return x.to(dtype), w.to(dtype), y, torch.linspace(-1, 2, N).to(dtype), torch.tensor(7.5, dtype=dtype)


def exact(x, w, y, token_weight, denominator, o):
    x, w = (t.double().requires_grad_() for t in (x, w))
    z = x @ w.T * o.logit_scale
    losses = (F.cross_entropy(z, y, reduction="none") + torch.where(y == -100, 0.0, o.z_loss * z.logsumexp(1) ** 2)) * token_weight.double() / denominator.double()
    return losses.detach(), *torch.autograd.grad(losses.sum(), (x, w))


def ours(x, w, y, token_weight, denominator, o, rows=10):
    grads = Gradients(x, w, (True, True, False), x.dtype, False, 1.0)
    losses = product.run_exponentials(x, w, y, token_weight, denominator, o, rows, grads)
    return losses, grads.dx, grads.rounded_dw()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype, limit", [(f64, 1e-12), (f32, 1e-5), (bf16, 6e-3)], ids=str)
def test_loss_and_gradients(how, dtype, limit):
    data = sample(dtype)
    o = LossOptions(**HOW[how])
    for got, wanted in zip(ours(*data, o), exact(*data, o), strict=True):
        assert relative_error(got, wanted) < limit


def test_a_confident_target_keeps_its_digits():
    x, w, y, token_weight, denominator = sample(bf16)
    y = torch.arange(N) % V
    x = (8 * w[y].float() / w[y].float().norm(dim=1, keepdim=True)).bfloat16()
    for got, wanted in zip(ours(x, w, y, token_weight, denominator, LossOptions())[1:], exact(x, w, y, token_weight, denominator, LossOptions())[1:], strict=True):
        assert relative_error(got, wanted) < 6e-3


def test_a_token_that_does_not_count_may_be_no_number():
    x, w, y, *others = sample()
    wanted = exact(x, w, y, *others, LossOptions())
    x[y == -100] = math.nan
    for got, want in zip(ours(x, w, y, *others, LossOptions()), wanted, strict=True):
        assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("far", [300.0, -300.0])
def test_offsets_that_are_no_good_are_made_again(far, monkeypatch):
    "One class, which none looks at, has a score far from the others'"
    x, w, y, *others = sample()
    monkeypatch.setattr(product, "SAMPLED", 2)
    x[:, 0], w[:, 0], w[50, 0] = 1.0, 0.0 if far > 0 else 300.0, 300.0 if far > 0 else 0.0
    w[::35, 0] = 0.0 if far > 0 else -300.0
    for got, want in zip(ours(x, w, y, *others, LossOptions()), exact(x, w, y, *others, LossOptions()), strict=True):
        assert relative_error(got, want) < 1e-4


place = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="on a CPU Triton wants TRITON_INTERPRET=1")


def prepared(device, o):
    x, w, y, token_weight, denominator = (t.to(device) for t in sample())
    log2_scale = o.logit_scale * math.log2(math.e)
    offsets = product.row_offsets(x, w, y, log2_scale, -100)
    found = product.Exponentials(torch.empty(N, V, device=device), torch.empty(1, N, device=device), torch.empty(N, device=device))
    product.reference_exponentials(found, x, w, y, offsets, log2_scale)
    return found._replace(sums=torch.cat([found.sums / 4, found.sums / 4, found.sums / 2])), (y, offsets, token_weight, denominator, o)


def room(device):
    return product.Rows(torch.full((N,), torch.nan, device=device), torch.full((N,), torch.nan, device=device), torch.zeros((), dtype=torch.int32, device=device))


@place
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("blocks", [(32, 16), (4, 2)])
def test_rows_by_the_kernel(how, blocks, device):
    found, given = prepared(device, LossOptions(**HOW[how]))
    copy, out = found._replace(e=found.e.clone()), room(device)
    product.launch_rows(out, copy, *given, None, *blocks)
    for got, wanted in zip(out, product.reference_rows(found, *given), strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(copy.e, found.e, rtol=1e-5, atol=1e-6)


@place
def test_what_is_not_wanted_is_not_written(device):
    found, given = prepared(device, LossOptions())
    out, before, none = room(device), found.e.clone(), torch.zeros((), dtype=torch.int32, device=device)
    product.launch_rows(out, found, *given, none)
    assert out.losses.isnan().all() and out.coefs.isnan().all() and torch.equal(found.e, before)
    product.launch_rows(out, found, *given, none + 1)
    assert out.losses.isfinite().all()


@pytest.mark.parametrize("off", [-200.0, 200.0])
def test_an_offset_that_is_no_good_is_told(off):
    found, (y, offsets, *given) = prepared("cpu", LossOptions())
    x, w, *_ = sample()
    offsets[3] += off
    found = product.Exponentials(found.e, found.sums[:1], found.target_z)
    product.reference_exponentials(found, x, w, y, offsets, math.log2(math.e))
    assert product.reference_rows(found, y, offsets, *given)[2]


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU of compute capability 9.0")
@pytest.mark.parametrize("form", [product.Form(), product.Form(5, in_turn=True)], ids=str)
@pytest.mark.parametrize("far", [0.0, 300.0])
def test_on_a_gpu(form, far):
    made = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(n, 264, generator=made, device="cuda").bfloat16() / 4 for n in (1000, 5003))
    y = torch.where(torch.arange(1000, device="cuda") % 5 == 4, -100, torch.arange(1000, device="cuda") * 37 % 5003)
    x[:, 0], w[:, 0], w[50, 0] = 1.0, 0.0, far
    x[4] = math.nan
    grads = Gradients(x, w, (True, True, False), x.dtype, False, 1.0)
    token_weight, denominator = torch.linspace(-1, 2, 1000, device="cuda"), torch.tensor(7.5, device="cuda")
    got = product.run_exponentials(x, w, y, token_weight, denominator, LossOptions(), 384, grads, form), grads.dx, grads.rounded_dw()
    x[4] = 0
    for found, wanted, limit in zip(got, exact(x, w, y, token_weight, denominator, LossOptions()), (1e-4, 6e-3, 6e-3), strict=True):
        assert relative_error(found, wanted) < limit
