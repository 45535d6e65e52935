"""Adapters to frameworks, one step of each: test_transformers.py and test_trl.py have the rest."""
import ast
import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from fusedloss import integrations
from fusedloss.integrations import transformers, trl
from fusedloss.integrations.transformers import patch


def test_a_patched_model_of_transformers_takes_the_same_step():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from test_transformers import pair, same_step
    same_step(*pair())


def test_a_patched_head_of_trl_says_the_same():
    pytest.importorskip("trl", reason="TRL is not installed")
    from test_trl import made, same_head, unpatch
    try:
        same_head(made())
    finally:
        unpatch()


def test_a_patched_model_serves_threads():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from test_transformers import pair, serves_threads
    serves_threads(pair()[1], rounds=15)


@pytest.mark.parametrize("name", ["Bart", "Marian", "Pegasus"])
def test_a_patched_encoder_with_a_decoder_takes_the_same_step(name):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from test_transformers import test_encoders_with_decoders
    test_encoders_with_decoders(name)


@pytest.mark.parametrize("name", ["Wav2Vec2", "Parakeet"])
def test_a_patched_model_for_ctc_takes_the_same_step(name):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from test_transformers import same_losses, speech
    plain, given = speech(name)
    same_losses(plain, patch(copy.deepcopy(plain)), given)


def test_trainable_tokens_of_a_tied_model_take_the_same_step():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from test_transformers import test_trainable_tokens
    test_trainable_tokens("tied", "patch")


def test_an_adapter_that_does_more_is_refused_by_patch():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from test_transformers import test_adapters_of_other_kinds_are_refused_and_nothing_changes
    test_adapters_of_other_kinds_are_refused_and_nothing_changes("Lora")


def test_no_framework_is_imported_before_it_is_used():
    frameworks = {"accelerate", "datasets", "peft", "transformers", "trl"}
    for path in Path(integrations.__file__).parent.glob("*.py"):
        nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {name.partition(".")[0] for node in nodes for name in [getattr(node, "module", None) or "", *(a.name for a in node.names)]}
        assert nodes and not frameworks & names, path


def test_an_adapter_is_loaded_when_it_is_asked_for():
    assert {"transformers", "trl"} <= set(dir(integrations)) and callable(integrations.trl.patch)
    with pytest.raises(AttributeError, match="'fusedloss.integrations' has no attribute 'keras'"):
        integrations.keras


def test_logits_that_are_a_sum_of_layers():
    "One product of joined features and weights stands for the sum"
    one, two, x = nn.Linear(4, 7), nn.Linear(2, 7), torch.randn(3, 4)
    terms = transformers.Term(one, x, 0.5), transformers.Term(two, x[:, :2], 3.0, torch.ones(7))
    logits = 0.5 * one(x) + 3 * two(x[:, :2]) + 3
    rows, weight, bias = transformers.joined(terms)
    assert_close(0.5 * F.linear(rows, weight, bias), logits)
    y = torch.tensor([1, -100, 6])
    assert_close(F.cross_entropy((transformers.LazyLogits(terms) / 30).tanh() * 30, y), F.cross_entropy(30 * torch.tanh(logits / 30), y))
    frames, targets = torch.randn(2, 6, 4), torch.tensor([[1, 2], [3, 3]])
    of_ctc = lambda z: F.ctc_loss(F.log_softmax(z, -1).transpose(0, 1), targets, input_lengths=torch.tensor([6, 5]), target_lengths=torch.tensor([2, 2]))
    lazy = transformers.LazyLogits((transformers.Term(one, frames), transformers.Term(two, frames[..., :2])))
    assert_close(of_ctc(lazy), of_ctc(one(frames) + two(frames[..., :2])))


def test_slices_that_keep_all_classes():
    assert transformers.keeps_classes((..., slice(-1), slice(None)), 3) and transformers.keeps_classes((slice(None), 0), 3)
    assert not transformers.keeps_classes((..., 5), 3) and not transformers.keeps_classes(torch.ones(2, 3, 7, dtype=torch.bool), 3)


def test_a_layer_is_replaced_only_inside():
    class OfOneLayer(nn.Module):
        def __init__(self): super().__init__(); self.head = nn.Linear(4, 7)
        def get_output_embeddings(self): return self.head
        def forward(self, input): return self.head(input)

    model, x = OfOneLayer(), torch.randn(3, 4)
    with transformers.lazy_logits(model), transformers.lazy_logits(model):
        got = transformers.with_product(model(x), lambda x, w, y, linear_bias: F.linear(x, w, linear_bias), x)
    assert torch.equal(got, model(x)) and not transformers.replaced(model)


def test_a_signature_that_is_replaced_is_told_by_its_parameters():
    def f(ctx, a: int, b: float = 1.0, *, c=("x",)) -> None: ...
    assert trl.takes(f, 1) == "(a, b=1.0, *, c=('x',))" and trl.described(f) == "(ctx, a, b=1.0, *, c=('x',))"
    assert trl.described(None) == ": NoneType"
    assert trl.described(type("G", (torch.autograd.Function,), dict(forward=staticmethod(f)))) == trl.takes(f, 1)
