"""An `nn.Linear` or `nn.Embedding` in the place of a weight, and what a module may not do beside its product."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import fusedloss as fl
from fusedloss.baseline import sample_data
from helpers import follows_plans

N, H, V = 6, 4, 9
f32 = torch.float32


class Lora(nn.Linear):
    "A low-rank adapter, as adapter libraries write it: a forward of its own beside the base weight"
    def __init__(self):
        super().__init__(H, V, bias=False)
        self.a, self.b = nn.Linear(H, 2, bias=False), nn.Linear(2, V, bias=False)

    def forward(self, x): return super().forward(x) + self.b(self.a(x))


class ScaledEmbedding(nn.Embedding):
    "An embedding whose rows are scaled when they are looked up"
    def forward(self, y): return super().forward(y) * 2.0


class Quantised(nn.Linear):
    "A layer whose weight is stored otherwise than it is used"
    def forward(self, x): return F.linear(x, self.weight * 0.5)


class WrappedParameter(nn.Parameter):
    "A weight that is an adapter itself"


def hooked(kind):
    layer = nn.Linear(H, V, bias=False)
    getattr(layer, f"register_{kind}_hook")(lambda *_: None)
    return layer


def hooked_child():
    layer = nn.Linear(H, V, bias=False)
    layer.extra = nn.Identity()
    layer.extra.register_forward_hook(lambda *_: None)
    return layer


def patched():
    layer = nn.Linear(H, V, bias=False)
    layer.forward = lambda x: 2 * F.linear(x, layer.weight)
    return layer


def wrapped():
    layer = nn.Linear(H, V, bias=False)
    layer.weight = WrappedParameter(layer.weight.detach())
    return layer


MORE = {  # what does more than the product, and the words that say so
    "adapter": (Lora, "got Lora, whose forward is its own"), "scale": (lambda: ScaledEmbedding(V, H), "got ScaledEmbedding, whose forward"),
    "quantised": (lambda: Quantised(H, V, False), "got Quantised, whose forward"), "patched": (patched, "got Linear, whose forward is its own"),
    "hook": (lambda: hooked("forward"), "has hooks"), "pre-hook": (lambda: hooked("forward_pre"), "has hooks"),
    "backward hook": (lambda: hooked("full_backward"), "has hooks"), "a child's hook": (hooked_child, "has hooks"),
    "weight_norm": (lambda: weight_norm(nn.Linear(H, V, False)), "parametrization"),
    "spectral_norm, by a hook": (lambda: nn.utils.spectral_norm(nn.Linear(H, V, False)), "has hooks"),
    "weight class": (wrapped, "whose weight is a WrappedParameter"),
    "max_norm": (lambda: nn.Embedding(V, H, max_norm=1.0), "has max_norm=1.0"),
    "by frequency": (lambda: nn.Embedding(V, H, scale_grad_by_freq=True), "scale_grad_by_freq=True"),
    "sparse": (lambda: nn.Embedding(V, H, sparse=True), "has sparse=True"),
    "another module": (lambda: nn.Conv1d(H, V, 1), "an nn.Linear or an nn.Embedding, got Conv1d$"),
    "a container": (lambda: nn.Sequential(nn.Linear(H, V, False)), "got Sequential"),
}


def ctc(x, w, y, **how): return fl.linear_ctc_loss(x[:, None], w, y[None, :2].clamp(min=1), [N], [2], **how)


LOSSES = {
    "auto": fl.linear_cross_entropy, "recompute": fl.recompute_linear_cross_entropy, "chunks": fl.chunked_linear_cross_entropy,
    "eager": lambda *args, **how: fl.linear_cross_entropy(*args, method="eager", **how), "sharded": fl.sharded_linear_cross_entropy, "ctc": ctc,
}
WITHOUT_BIAS = {
    "tiles": fl.tiled_linear_cross_entropy, "margins": lambda x, w, y: fl.margin_cross_entropy(x, w, y, margin=fl.margins.CosFace()),
    "MemoryEfficientVocabOutput": lambda x, w, y: fl.MemoryEfficientVocabOutput(w)(x, y),
}


@pytest.fixture
def sample(): return sample_data(N, H, V, f32)


@pytest.mark.parametrize("loss", [*LOSSES, *WITHOUT_BIAS])
@pytest.mark.parametrize("kind", ["Linear", "Embedding"])
def test_a_module_is_its_weight(loss, kind, sample):
    call = {**LOSSES, **WITHOUT_BIAS}[loss]
    module = nn.Linear(H, V, bias=loss in LOSSES) if kind == "Linear" else nn.Embedding(V, H, padding_idx=0)
    bias = getattr(module, "bias", None)
    expected = call(sample.input, module.weight, sample.target, **({} if bias is None else dict(linear_bias=bias)))
    found = call(sample.input, module, sample.target)
    leaves = [sample.input, *module.parameters()]
    assert torch.equal(found, expected)
    for a, e in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves)):
        assert torch.equal(a, e)


def test_a_subclass_without_a_forward_is_its_weight(sample):
    class Head(nn.Linear):
        "Another name"
    head = Head(H, V, bias=False)
    assert torch.equal(fl.linear_cross_entropy(sample.input, head, sample.target), fl.linear_cross_entropy(sample.input, head.weight, sample.target))


def test_hooks_of_torchs_own_wrappers_are_no_more(sample):
    layer = nn.Linear(H, V, bias=False)
    def gather(*_): raise AssertionError("a loss calls no module")
    gather.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    layer.register_forward_pre_hook(gather)
    assert fl.linear_cross_entropy(sample.input, layer, sample.target).isfinite()


@pytest.mark.parametrize("what", MORE)
@pytest.mark.parametrize("loss", ["auto", "tiles"])
def test_more_than_the_product_is_refused_by_name(what, loss, sample):
    make, words = MORE[what]
    with pytest.raises(ValueError, match=rf"^linear_weight: expected .*{words}"):
        {**LOSSES, **WITHOUT_BIAS}[loss](sample.input, make(), sample.target)


@pytest.mark.parametrize("loss", [*LOSSES, *WITHOUT_BIAS])
def test_every_loss_refuses_an_adapter(loss, sample):
    name = "proj_weight" if loss == "MemoryEfficientVocabOutput" else "linear_weight"
    with pytest.raises(ValueError, match=f"^{name}: .*got Lora"):
        {**LOSSES, **WITHOUT_BIAS}[loss](sample.input, Lora(), sample.target)


def test_two_biases_and_one_that_nobody_takes(sample):
    layer = nn.Linear(H, V)
    for name, call in LOSSES.items():
        with pytest.raises(ValueError, match="^linear_bias: expected None beside a Linear with a bias"):
            call(sample.input, layer, sample.target, linear_bias=torch.zeros(V))
    for name, call in WITHOUT_BIAS.items():
        with pytest.raises(ValueError, match="a weight without a bias.*got Linear with bias=True"):
            call(sample.input, layer, sample.target)


@follows_plans
def test_a_module_under_torch_compile(sample):
    layer = nn.Linear(H, V)
    call = lambda x, y: fl.linear_cross_entropy(x, layer, y)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="eager")(*sample[::2]), call(*sample[::2]))
