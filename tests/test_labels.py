"""A label that is no class, where nobody looks at labels, as on a GPU: its loss is NaN, nobody else's is, and no gradient knows of its token."""
import sys
from functools import partial

import pytest
import torch

import fusedloss as fl
from fusedloss import filter as with_filter, margins, product
from fusedloss.chunks import Gradients
from fusedloss.core import checks
from fusedloss.core.options import LossOptions
from helpers import TOLERANCE, everywhere, need_kernels
from test_exponentials import ByPyTorch
from workbook.measure import relative_error

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter

f32 = torch.float32
N, V, H, ROW = 9, 37, 8, 4
OPTIONS = dict(label_smoothing=0.1, z_loss=0.01, logit_scale=0.7)


@pytest.fixture(params=["plain", "kernels"])
def way(request, device, monkeypatch):
    "The device, on which either PyTorch or the Triton kernels take everything they can, and nobody looks at labels"
    taken = request.param == "kernels"
    if taken:
        need_kernels(device)
    everywhere(monkeypatch, checks, "may_look", lambda t: False)
    everywhere(monkeypatch, with_filter, "takes_kernel", lambda x: taken and len(x) > 0)
    everywhere(monkeypatch, sys.modules["fusedloss.core.triton"], "has_kernel", lambda z: taken and z.numel() > 0)
    return device


def linear(method, x, w, y, **options):
    return fl.linear_cross_entropy(x, w, y, method=method, **options)


def of_logits(loss, x, w, y, **options):
    return loss(x @ w.T * 1.0, y, **options)


def several(method, x, w, y, **options):
    "Each token's label, and class 5 beside it"
    return linear(method, x, w, torch.stack([y, torch.where(y == -100, y, 5)], 1), **options)


def said(tell, x, w, y, reduction):
    "Log-probabilities, and entropies, of hidden states"
    found = tell(x, w, y)
    total = (found.log_probs if found.entropy is None else found.log_probs + found.entropy)
    return total if reduction == "none" else total.sum()


def popular(each_row):
    return fl.PopularitySampler(torch.arange(1, V + 1), 8, each_row=each_row)


def of_head(options, x, w, y, reduction):
    "PartialFC's loss: a new head, so that its sampler draws the same classes again"
    torch.manual_seed(0)
    sampler = options.get("sampler")
    head = fl.PartialFC(V, H, ignore_index=-100, reduction=reduction, sparse=False, **{**options, "sampler": sampler and sampler()}).to(x.device)
    return torch.func.functional_call(head, {"weight": w}, (x, y))


def by_margin(margin, x, w, y, **options):
    return fl.margin_cross_entropy(x, w, y, margin=margin().to(x.device) if margin is margins.AdaFace else margin(), **options)


def weighted(method, x, w, y, **options):
    return linear(method, x, w, y, weight=torch.linspace(0.5, 2, V, device=x.device), token_weight=torch.linspace(1, 2, N, device=x.device), **options, **OPTIONS)


LOSSES = {
    **{method: partial(linear, method) for method in ("eager", "tiles", "chunks", "recompute", "product")},
    **{f"{method}, options": partial(weighted, method) for method in ("eager", "chunks", "recompute")},
    **{f"{method}, several": partial(several, method) for method in ("eager", "chunks")},
    "filter": partial(fl.recompute_linear_cross_entropy, filter_eps=1e-30),
    "cross entropy": partial(of_logits, fl.cross_entropy), "in place": partial(of_logits, partial(fl.cross_entropy, inplace=True)),
    "iota": partial(of_logits, fl.iota_cross_entropy),
    "log-probabilities": partial(said, fl.linear_log_probs), "entropies": partial(said, partial(fl.linear_log_probs, entropy=True)),
    "invariant": partial(said, partial(fl.linear_log_probs, batch_invariant=True)),
    "over ranks": fl.sharded_linear_cross_entropy, "over ranks, product": partial(fl.sharded_linear_cross_entropy, method="product"),
    "log-probabilities over ranks": partial(said, fl.sharded_linear_log_probs),
    "margin": partial(by_margin, margins.CosFace), "margin of lengths": partial(by_margin, margins.AdaFace),
    "head": partial(of_head, {}), "head, a sample": partial(of_head, dict(sample_rate=0.5)),
    "head, ArcFace": partial(of_head, dict(margin=margins.ArcFace())), "head, lengths": partial(of_head, dict(margin=margins.AdaFace())),
    "head, class weights": partial(of_head, dict(class_weight=torch.linspace(0.5, 2, V))),
    "head, dot products": partial(of_head, dict(normalize=False)),
    **{f"head, popular, {each_row}": partial(of_head, dict(normalize=False, sampler=partial(popular, each_row))) for each_row in (False, True)},
    "log-probabilities of logits": partial(said, lambda x, w, y: fl.log_probs(x @ w.T, y)),
}
FORMED_IN_FORWARD = "chunks", "product"  # these have no losses of single tokens


def data(device, label):
    "Hidden states, a weight, and labels of which one is ignored and another one is `label`"
    made = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, H, generator=made).to(device) for n in (N, V))
    y = torch.randint(V, (N,), generator=made).to(device)
    y[2], y[ROW] = -100, label
    return x, w, y


def gradients(loss, x, w, y, **options):
    "The loss, dx and dw"
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    found = loss(*leaves, y, **options)
    return found.detach(), *torch.autograd.grad(found.sum(), leaves)


@pytest.mark.parametrize("label", [-1, V, 2**40])
@pytest.mark.parametrize("name", LOSSES)
def test_a_label_outside_the_classes(name, label, way):
    loss, how = LOSSES[name], dict(reduction="sum")
    total, *found = gradients(loss, *data(way, label), **how)
    _, *wanted = gradients(loss, *data(way, -100), **how)
    assert total.isnan() and not found[0][ROW].any()
    assert all(relative_error(a, b) < TOLERANCE[f32] for a, b in zip(found, wanted))
    if name.rpartition(" ")[2] not in FORMED_IN_FORWARD and name.partition(",")[0] not in FORMED_IN_FORWARD:
        losses, *found = gradients(loss, *data(way, label), reduction="none")
        assert losses.isnan().nonzero().tolist() == [[ROW]]
        assert all(relative_error(a, b) < TOLERANCE[f32] for a, b in zip(found, wanted))


@pytest.mark.parametrize("tell", [fl.linear_log_probs, partial(fl.linear_log_probs, batch_invariant=True), lambda x, w, y, **asked: fl.log_probs(x @ w.T, y, **asked)])
def test_whatever_is_told_of_its_token(tell, way):
    "Nothing that could be taken for a number"
    found = tell(*data(way, V), entropy=True, mean_logits=True)
    for told in (found.log_probs, found.entropy, found.mean_logits):
        assert told.isnan().nonzero().tolist() == [[ROW]] and told[2] == 0


@pytest.mark.parametrize("far", [0.0, 300.0])
@pytest.mark.parametrize("label", [-1, V, 2**40])
def test_by_the_kernels_of_a_product(label, far, device, monkeypatch):
    "Of an architecture that nobody has; the token's score that no offset foresaw overflows bf16, which no gradient knows of either"
    need_kernels(device)
    monkeypatch.setattr(product, "SAMPLED", 2)
    x, w, y = data(device, label)
    x[:, 0], w[:, 0] = 0.0, 0.0
    x[ROW, 0], w[20, 0] = 1.0, far

    def by_product(y):
        grads = Gradients(x.bfloat16(), w.bfloat16(), (True, True, False), torch.bfloat16, True, 1.0)
        losses = product.run_exponentials(x.bfloat16(), w.bfloat16(), y, None, None, None, LossOptions(), N, grads, ByPyTorch())
        return losses, grads.dx, grads.rounded_dw()

    losses, *found = by_product(y)
    assert losses.isnan().nonzero().tolist() == [[ROW]] and not found[0][ROW].any()
    y[ROW] = -100
    _, *wanted = by_product(y)
    assert all(relative_error(a, b) < TOLERANCE[torch.bfloat16] for a, b in zip(found, wanted))
