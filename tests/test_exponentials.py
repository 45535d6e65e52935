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
    losses, failed = product.run_exponentials(x, w, y, token_weight, denominator, o, rows, grads)
    assert not failed
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


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="on a CPU Triton wants TRITON_INTERPRET=1")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("blocks", [(32, 16), (4, 2)])
def test_rows_by_the_kernel(how, blocks, device):
    x, w, y, token_weight, denominator = (t.to(device) for t in sample())
    o = LossOptions(**HOW[how])
    offsets = product.row_offsets(x, w, o.logit_scale * math.log2(math.e))
    found = product.reference_exponentials(x, w, y, offsets, o.logit_scale * math.log2(math.e))
    found = found._replace(sums=torch.cat([found.sums / 4, found.sums / 4, found.sums / 2]))
    copy = found._replace(e=found.e.clone())
    for got, wanted in zip(product.launch_rows(copy, y, offsets, token_weight, denominator, o, *blocks),
                           product.reference_rows(found, y, offsets, token_weight, denominator, o), strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(copy.e, found.e, rtol=1e-5, atol=1e-6)


def test_an_offset_that_is_no_good_is_told():
    x, w, y, token_weight, denominator = sample()
    for off in (-200.0, 200.0):
        offsets = product.row_offsets(x, w, math.log2(math.e))
        offsets[3] += off
        found = product.reference_exponentials(x, w, y, offsets, math.log2(math.e))
        assert product.reference_rows(found, y, offsets, token_weight, denominator, LossOptions())[2]
