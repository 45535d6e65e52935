"""Models of transformers: losses, gradients and outputs beside the unpatched model's, what surrounds a model in a training, what is refused."""
import copy
import inspect
import json
import os
import pickle
import subprocess
import sys
import threading
import warnings
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close

import fusedloss as fl
import fusedloss.integrations.transformers as adapter
from fusedloss.integrations.transformers import causal_lm_loss, patch, unpatch
from grids import FULL, few

hf = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.thorough  # one step of a model is in test_integrations.py
HERE = Path(__file__).parent
V = 96
SIZES = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
             max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, output_router_logits=True, router_aux_loss_coef=0.5)
MODELS = {  # class, and what its config has besides
    "llama": ("Llama", {}), "llama tied": ("Llama", dict(tie_word_embeddings=True)), "qwen2": ("Qwen2", {}), "qwen3": ("Qwen3", dict(head_dim=16)),
    "gemma2": ("Gemma2", dict(head_dim=16, final_logit_softcapping=2.0)), "gemma2 uncapped": ("Gemma2", dict(head_dim=16, final_logit_softcapping=None)),
    "gemma3": ("Gemma3", dict(head_dim=16, final_logit_softcapping=0.7)), "mistral": ("Mistral", {}), "phi, bias": ("Phi", {}),
    "gpt2 tied": ("GPT2", dict(n_embd=32, n_layer=1, n_head=2, n_positions=64)), "cohere": ("Cohere", dict(logit_scale=0.25)),
    "granite": ("Granite", dict(logits_scaling=7.0)), "qwen2 moe": ("Qwen2Moe", dict(EXPERTS, shared_expert_intermediate_size=16)),
    "qwen3 moe": ("Qwen3Moe", dict(EXPERTS, head_dim=16)), "roberta, bias": ("Roberta", dict(is_decoder=True)),
    "bart": ("Bart", dict(d_model=32, decoder_ffn_dim=48, decoder_layers=1, decoder_attention_heads=2)),
}
SEQ2SEQ = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
               decoder_start_token_id=1)
ENCODER_DECODERS = {  # class, and what its config has besides; the first eleven add `final_logits_bias` to their logits, or have one
    **{name: SEQ2SEQ for name in ("Bart", "Marian", "Pegasus", "MBart", "Blenderbot", "BlenderbotSmall", "PLBart", "Mvp", "BigBirdPegasus")},
    "LED": dict(SEQ2SEQ, attention_window=4), "FSMT": dict(SEQ2SEQ, src_vocab_size=V, tgt_vocab_size=V, langs=["en", "de"]),
    "T5": dict(d_model=32, d_ff=48, d_kv=16, num_layers=1, num_heads=2, decoder_start_token_id=1)}
SPEECH = dict(vocab_size=24, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, conv_dim=(32,), conv_stride=(4,), conv_kernel=(8,),
              num_feat_extract_layers=1, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, pad_token_id=3, mask_time_prob=0.0, layerdrop=0.0)
SPEECH_ENCODER = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=48, num_mel_bins=16,
                      subsampling_conv_channels=8, layerdrop=0.0)
SPEECH_MODELS = {  # class, and what its config has besides
    **{name: {} for name in ("Wav2Vec2", "Hubert", "WavLM", "Data2VecAudio", "UniSpeech", "UniSpeechSat", "Wav2Vec2Conformer")},
    "SEW": dict(squeeze_factor=1), "SEWD": dict(squeeze_factor=1, max_position_embeddings=64, position_buckets=8),
    "Wav2Vec2Bert": dict(feature_projection_input_dim=16), "Parakeet": SPEECH_ENCODER, "Lasr": SPEECH_ENCODER}
SCORES = {"gemma2": (1.0, 2.0), "gemma3": (1.0, 0.7), "cohere": (0.25, None), "granite": (1 / 7, None), "llama": (1.0, None)}  # scale, cap


@cache
def made(name: str) -> nn.Module:
    "A small model with random weights, in evaluation and so without dropout"
    kind, more = MODELS[name]
    torch.manual_seed(0)
    config = getattr(hf, f"{kind}TextConfig", None) or getattr(hf, f"{kind}Config")
    model = getattr(hf, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config(**SIZES | more)).eval()
    for p in model.parameters():
        p.data.add_(0.05 * torch.randn_like(p))  # biases are zeros otherwise, and losses those of chance
    return model


def shaken(model: nn.Module) -> nn.Module:
    "A model whose biases are no zeros, the one of its logits included"
    for p in [*model.parameters(), *(b for name, b in model.named_buffers() if name == "final_logits_bias")]:
        p.data.add_(0.05 * torch.randn_like(p) if p.requires_grad else torch.randn_like(p))
    return model.eval()


@cache
def encoder_decoder(name: str) -> nn.Module:
    "A small encoder and decoder with random weights"
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return shaken(getattr(hf, "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration")(getattr(hf, f"{name}Config")(**sizes | ENCODER_DECODERS[name])))


def speech(name: str, **more) -> tuple[nn.Module, dict]:
    "A small model for CTC with random weights, and three recordings with labels, of unlike lengths and one without any"
    more = SPEECH_MODELS[name] | more
    config = getattr(hf, f"{name}Config", None) or getattr(hf, f"{name}CTCConfig")
    if name in ("Parakeet", "Lasr"):
        encoder = type(config().encoder_config)(**{k: more.pop(k) for k in SPEECH_ENCODER if k in more})
        more["encoder_config"] = encoder.to_dict()
        config = config(vocab_size=24, pad_token_id=3, **more)
    else:
        config = config(**SPEECH | more)
    torch.manual_seed(0)
    shape, name_of_input = ((3, 200), "input_values") if name not in ("Parakeet", "Lasr", "Wav2Vec2Bert") else ((3, 130, 16), "input_features")
    frames = torch.tensor([[shape[1]], [shape[1] - 30], [shape[1] - 50]])
    pad = 3 if name in ("Parakeet", "Lasr") else -100  # the blank, which older versions take alone there
    labels = torch.tensor([[5, 6, 6, 7], [9, 3, 10, pad], [pad] * 4])
    given = {name_of_input: torch.randn(shape), "attention_mask": (torch.arange(shape[1]) < frames).long(), "labels": labels}
    return shaken(getattr(hf, f"{name}ForCTC")(config)), given


def pair(name: str = "llama") -> tuple[nn.Module, nn.Module]:
    "A model and its patched copy"
    return copy.deepcopy(made(name)), patch(copy.deepcopy(made(name)))


def tokens(ignored: bool = True) -> dict:
    "Tokens and labels, some of which count nothing"
    ids = torch.randint(3, V, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    if ignored:
        labels[0, :5] = -100
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)


CALLS = {  # what a training gives beside tokens and labels
    "mean": {}, "num_items_in_batch": dict(num_items_in_batch=torch.tensor(31)), "an integer": dict(num_items_in_batch=5),
    "shift_labels": dict(shift_labels=torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(2))),
    "ignore_index": dict(ignore_index=7, shift_labels=torch.tensor([[7, 8, 9] * 4] * 2)),
    "logits_to_keep": dict(logits_to_keep=3, shift_labels=torch.tensor([[5, 6, -100], [-100, 3, 4]])),
    "a tuple": dict(return_dict=False),
}


def logits_of(model: nn.Module) -> torch.Tensor:
    "What a model computes without labels"
    logits = model(input_ids=tokens()["input_ids"]).logits
    assert isinstance(logits, torch.Tensor) and logits.shape == (2, 12, V)
    return logits


def step(model: nn.Module, **given) -> tuple[object, list[torch.Tensor]]:
    "What a model returns, and every gradient"
    model.zero_grad()
    torch.manual_seed(3)
    output = model(**tokens() | given)
    loss = output[0] if isinstance(output, tuple) else output.loss
    loss.backward()
    return output, [p.grad for p in model.parameters()]


def same_losses(plain: nn.Module, patched: nn.Module, given: dict) -> None:
    "Loss and gradients of two models; some gradients are sums that cancel, so the largest tells how exact they are"
    steps = []
    for model in (plain, patched):
        model.zero_grad()
        output = model(**given)
        output.loss.backward()
        steps.append((output, [p.grad for p in model.parameters()]))
    (theirs, grads), (ours, found) = steps
    assert ours.logits is None and theirs.logits is not None
    assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-5)
    size = max(g.abs().max() for g in grads if g is not None).item()
    for d, e in zip(found, grads, strict=True):
        assert (d is None) == (e is None)
        if e is not None:
            assert_close(d, e, rtol=1e-4, atol=3e-5 * size)


def same_step(plain: nn.Module, patched: nn.Module, **given) -> object:
    "The loss and every gradient are the unpatched model's, and there are no logits; what the patched one returns"
    (expected, grads), (got, ours) = step(plain, **given), step(patched, **given)
    assert_close(got[0], expected[0], rtol=2e-6, atol=2e-6)
    for d, e in zip(ours, grads, strict=True):
        assert (d is None) == (e is None)
        if e is not None:
            assert_close(d, e, rtol=1e-4, atol=1e-6)
    assert type(got) is type(expected) and len(got) == len(expected) - 1
    assert isinstance(got, tuple) or got.logits is None
    return got


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_the_models_own(name):
    plain, patched = pair(name)
    own = ("mean", "a tuple") if name == "bart" else CALLS  # its loss takes no keywords, and shifts nothing
    for call in own if FULL or name in ("llama", "bart") else ("mean", "num_items_in_batch", "logits_to_keep"):
        same_step(plain, patched, **CALLS[call])


@pytest.mark.parametrize("name", SCORES)
def test_scale_and_cap_are_those_of_the_model(name):
    with mock.patch.object(adapter, "linear_cross_entropy", wraps=adapter.linear_cross_entropy) as loss:
        pair(name)[1](**tokens())
    assert (loss.call_args.kwargs["logit_scale"], loss.call_args.kwargs["softcap"]) == (pytest.approx(SCORES[name][0]), SCORES[name][1])


def test_how_the_loss_is_computed_is_the_callers_choice():
    how = dict(method="chunks", memory_budget=2**20, accumulate="float32")
    patched = patch(copy.deepcopy(made("gemma3")), **how)
    with mock.patch.object(adapter, "linear_cross_entropy", wraps=adapter.linear_cross_entropy) as loss:
        same_step(made("gemma3"), patched)
    assert how.items() <= loss.call_args.kwargs.items()
    with pytest.raises(ValueError, match="memory_budget: expected"):
        patch(copy.deepcopy(made("gemma3")), memory_budget=1)(**tokens())


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoders_with_decoders(name):
    plain = encoder_decoder(name)
    patched = patch(copy.deepcopy(plain))
    same_step(plain, patched)
    without = {k: v for k, v in tokens().items() if k != "labels"} | dict(decoder_input_ids=tokens()["input_ids"])
    assert torch.equal(patched(**without).logits, plain(**without).logits)


CTC = {"mean": {}, "sum": dict(ctc_loss_reduction="sum"), "infinite": dict(ctc_loss_reduction="sum", ctc_zero_infinity=True)}


@pytest.mark.parametrize("name", SPEECH_MODELS)
def test_models_for_ctc(name):
    for how in CTC if FULL or name == "Wav2Vec2" else ("mean",):
        plain, given = speech(name, **CTC[how])
        if how == "infinite":  # more labels than frames
            given["labels"] = torch.arange(4, 24).repeat(3, 5)
        same_losses(plain, patch(copy.deepcopy(plain)), given)


def test_a_budget_is_that_of_ctc_and_a_method_is_refused():
    plain, given = speech("Wav2Vec2")
    with mock.patch.object(adapter, "linear_ctc_loss", wraps=adapter.linear_ctc_loss) as loss:
        patch(copy.deepcopy(plain), memory_budget=2**20)(**given)
    assert loss.call_args.kwargs["memory_budget"] == 2**20
    for name, value in dict(method="chunks", accumulate="float32").items():
        with pytest.raises(ValueError, match=f"{name}: expected auto for a model that computes CTC, got {value}"):
            patch(copy.deepcopy(plain), **{name: value})(**given)


def test_a_convolution_that_does_more_is_refused():
    plain, _ = speech("Parakeet")
    plain.ctc_head.__class__ = type("Scaled", (nn.Conv1d,), dict(forward=lambda self, x: 2 * nn.Conv1d.forward(self, x.mT).mT))
    before = state(plain)
    with pytest.raises(ValueError, match="model: expected an output layer that adds products with its weights, got .*Scaled, whose output is another one"):
        patch(plain)
    assert state(plain) == before


def test_without_labels_there_are_logits_as_before():
    plain, patched = pair("gemma2")
    given = {k: v for k, v in tokens().items() if k != "labels"}
    assert torch.equal(patched(**given).logits, plain(**given).logits)
    assert torch.equal(patched(**given, logits_to_keep=2).logits, plain(**given, logits_to_keep=2).logits)
    assert torch.equal(patched.lm_head(torch.ones(1, 32)), plain.lm_head(torch.ones(1, 32)))
    ids = given["input_ids"][:1]
    assert torch.equal(*(m.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0) for m in (plain, patched)))


def test_labels_by_position():
    plain, patched = pair()
    given = tokens()
    args = [given["input_ids"], given["attention_mask"], None, None, None, given["labels"]]
    assert list(inspect.signature(plain.forward).parameters)[5] == "labels"
    assert patched(*args).logits is None
    assert_close(patched(*args).loss, plain(*args).loss)


def test_without_a_valid_label_the_loss_is_zero():
    plain, patched = pair()
    nothing = torch.full((2, 12), -100)
    output, grads = step(patched, labels=nothing)
    assert output.loss == 0 and not any(g.any() for g in grads)
    same_step(plain, patched, labels=nothing, num_items_in_batch=torch.tensor(4))


def test_labels_beside_other_positions_are_refused():
    _, patched = pair()
    with pytest.raises(ValueError, match="target: expected"):
        patched(**tokens(), logits_to_keep=3)
    logits_of(patched)


def test_bf16_is_no_further_from_float32_than_the_models_own():
    plain, patched = pair("gemma2")
    _, exact = step(plain)
    loss = step(plain)[0].loss
    (theirs, d), (ours, e) = step(plain.bfloat16()), step(patched.bfloat16())
    far = lambda grads: sum((a.float() - b.float()).norm() ** 2 for a, b in zip(grads, exact)) ** 0.5
    assert ours.loss.dtype == torch.float32 and abs(ours.loss - loss) < 2 * abs(theirs.loss - loss) + 1e-3
    assert far(e) < 1.2 * far(d)


# --- what a model's code does to its logits ---


def by_hand(logits, labels, vocab_size, **kwargs):
    "A loss as many models outside of the library write it"
    shifted = logits[..., :-1, :].contiguous()
    loss = nn.CrossEntropyLoss(weight=torch.linspace(0, 1, V), label_smoothing=0.1)(shifted.view(-1, vocab_size), labels[..., 1:].reshape(-1))
    return loss + 0.1 * F.cross_entropy(logits[labels != -100].float(), labels[labels != -100], reduction="none").square().mean()


def test_a_loss_by_hand():
    plain, patched = pair("gemma2")
    plain.loss_function = patched.loss_function = by_hand
    same_step(plain, patched)


REFUSED = {  # what a model does to logits, and what the message says of it
    "logsumexp": lambda z: z.logsumexp(-1).mean(), "a sum": lambda z: (z + 1).mean(), "another operator": lambda z: 1 - z,
    "another operator ": lambda z: z**2, "a slice of classes": lambda z: z[..., :5], "a factor that is a Tensor": lambda z: z * torch.ones(()),
    "mul": lambda z: torch.ones(()) * z, "softmax": lambda z: torch.softmax(z, -1), "a log_softmax over": lambda z: F.log_softmax(z, 1), "mean": lambda z: F.log_softmax(z, -1).mean(), "nll_loss": lambda z: F.nll_loss(F.log_softmax(z, -1), z),
    "a transpose of classes": lambda z: F.log_softmax(z, -1).transpose(1, 2), "a scale or a soft cap before CTC": lambda z: F.ctc_loss(F.log_softmax(2 * z, -1), z, z, z),
    "a second tanh": lambda z: z.tanh().tanh(), "a sum ": lambda z: z.tanh() + z, "a cross entropy of logits": lambda z: F.cross_entropy(z, torch.zeros(2, 12).long()),
    "a view as": lambda z: z.view(2, -1), "a view as ": lambda z: z.view(-1, 2 * V), "sigmoid": lambda z: z.sigmoid(), "argmax": torch.argmax,
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_understood_is_refused(said):
    _, patched = pair()
    patched.loss_function = lambda logits, **kwargs: REFUSED[said](logits)
    with pytest.raises(ValueError, match=f"model: expected numbers as factors.*, got {said.strip()}.*unpatch"):
        patched(**tokens())
    assert torch.equal(logits_of(patched), logits_of(unpatch(patched)))


class Biased(hf.LlamaForCausalLM):
    "Learned terms between output layer and loss, one of them before a scale and one after it"
    def forward(self, input_ids, labels=None, **kwargs):
        w = self.lm_head.weight
        logits = 3.0 * (self.lm_head(self.model(input_ids)[0]) + w[:, 0]) + w[None, :, 1]
        logits = 5.0 * torch.tanh(logits / 5.0)
        return hf.modeling_outputs.CausalLMOutput(loss=self.loss_function(logits, labels, vocab_size=V), logits=logits)


def test_a_bias_of_logits_and_its_gradient():
    plain = Biased(made("llama").config)
    plain.load_state_dict(made("llama").state_dict())
    same_step(plain, patch(copy.deepcopy(plain)))


def test_a_model_without_a_loss_is_refused():
    class Silent(hf.LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            return super().forward(input_ids)
    with pytest.raises(ValueError, match="model: expected a loss beside its logits, got NoneType"):
        patch(Silent(made("llama").config))(**tokens())


# --- patch and unpatch ---


def state(model: nn.Module) -> dict:
    "What instances hold beside parameters and modules"
    return {name: {k: v for k, v in vars(m).items() if not k.startswith("_") or k == "_replicate_for_data_parallel"} for name, m in model.named_modules()}


def test_unpatched_is_as_it_was():
    plain, patched = pair()
    assert patch(plain) is plain and state(plain).keys() == state(patched).keys()
    assert unpatch(plain) is plain and state(plain) == state(copy.deepcopy(made("llama")))
    assert unpatch(plain) is plain and state(plain) == state(copy.deepcopy(made("llama")))
    assert_close(step(unpatch(patched))[0].logits, step(plain)[0].logits)


def test_signature_state_and_class_stay():
    plain, patched = pair()
    assert inspect.signature(patched.forward) == inspect.signature(plain.forward)
    assert type(patched) is type(plain) and patched.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_is_a_patched_model_of_its_own(copied):
    plain, patched = pair()
    twin = copied(patched)
    for model in (plain, twin):
        model.lm_head.weight.data.mul_(-2)
    same_step(plain, twin)
    same_step(made("llama"), patched)
    unpatch(twin)
    assert patched(**tokens()).logits is None and twin(**tokens()).logits is not None


def test_replicas_use_their_own_weights():
    _, patched = pair()
    replica, head = patched._replicate_for_data_parallel(), patched.lm_head._replicate_for_data_parallel()
    replica._modules["lm_head"] = head  # as nn.DataParallel puts copies together
    head.weight, head.bias = nn.Parameter(-2 * patched.lm_head.weight.detach()), None
    plain = copy.deepcopy(made("llama"))
    plain.lm_head.weight.data.mul_(-2)
    assert_close(replica(**tokens()).loss, plain(**tokens()).loss)
    assert_close(patched(**tokens()).loss, made("llama")(**tokens()).loss)


def at_once(*calls, rounds: int = 40) -> None:
    "Each call again and again in a thread of its own, which may be interrupted anywhere; what one of them raises"
    errors, before = [], sys.getswitchinterval()

    def repeated(call):
        try:
            for _ in range(rounds):
                call()
        except Exception as error:
            errors.append(error)
    threads = [threading.Thread(target=repeated, args=(call,)) for call in calls]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]


def serves_threads(model: nn.Module, rounds: int = 40) -> None:
    "A patched model in threads with labels, without, and for its lazy logits, says what it says alone"
    without = {k: v for k, v in tokens().items() if k != "labels"}
    loss, logits = model(**tokens()).loss.detach(), model(**without).logits.detach()

    def with_labels():
        output = model(**tokens())
        assert output.logits is None and torch.equal(output.loss, loss)

    def with_logits():
        output = model(**without).logits
        assert isinstance(output, torch.Tensor) and torch.equal(output, logits)

    def with_lazy_logits():
        with adapter.lazy_logits(model):
            assert isinstance(model(**without).logits, adapter.LazyLogits)
    at_once(with_labels, with_logits, with_labels, with_logits, with_lazy_logits, rounds=rounds)


def test_one_model_in_many_threads():
    serves_threads(pair("gemma2")[1])
    serves_threads(patch(adapted(**ADAPTERS["on the output layer"])[1].eval()), rounds=15)


def test_replicas_in_threads_of_their_own():
    _, patched = pair()
    without, calls = {k: v for k, v in tokens().items() if k != "labels"}, []
    for factor in (1, -2):
        replica = patched._replicate_for_data_parallel()
        replica._modules["lm_head"] = head = patched.lm_head._replicate_for_data_parallel()
        head.weight, head.bias = factor * patched.lm_head.weight.detach(), None
        plain = copy.deepcopy(made("llama"))
        plain.lm_head.weight.data.mul_(factor)
        loss, logits = plain(**tokens()).loss, plain(**without).logits
        calls += [lambda m=replica, e=loss: assert_close(m(**tokens()).loss, e), lambda m=replica, e=logits: assert_close(m(**without).logits, e)]
    at_once(*calls, rounds=15)


def test_a_model_that_nobody_has_patched_lends_its_logits_to_many_threads():
    model = copy.deepcopy(made("llama"))
    before, without = state(model), {k: v for k, v in tokens().items() if k != "labels"}
    logits = model(**without).logits.detach()

    def lazy():
        with adapter.lazy_logits(model):
            assert_close(adapter.computed(model(**without).logits), logits)
    at_once(lazy, lazy, lambda: assert_close(model(**without).logits, logits))
    assert state(model) == before


def test_calls_within_a_call():
    plain, patched = pair()

    def distilled(logits, labels, vocab_size, model=patched, **kwargs):
        "A loss that asks the same model for logits, and generates"
        ids = tokens()["input_ids"]
        teacher = model(input_ids=ids).logits
        model.generate(ids[:1], max_new_tokens=2, do_sample=False, pad_token_id=0)
        return F.cross_entropy(logits.view(-1, V).float(), labels.view(-1)) + teacher.square().mean()
    patched.loss_function, plain.loss_function = distilled, lambda *args, **kwargs: distilled(*args, model=plain, **kwargs)
    same_step(plain, patched)


def test_an_exception_in_a_call_leaves_nothing_behind():
    plain, patched = pair()
    for error in (KeyboardInterrupt, RuntimeError):
        patched.loss_function = mock.Mock(side_effect=error)
        with pytest.raises(error):
            patched(**tokens())
        assert torch.equal(logits_of(patched), logits_of(plain))
        with pytest.raises(error), adapter.lazy_logits(patched):
            raise error
        assert adapter.WAITING.losses == adapter.WAITING.asked == () and torch.equal(logits_of(patched), logits_of(plain))
    patched.loss_function = plain.loss_function
    same_step(plain, patched)


def test_a_copy_made_during_a_call_waits_for_nothing():
    _, patched = pair()
    copies = []
    own = patched.loss_function
    patched.loss_function = lambda *args, **kwargs: copies.append(copy.deepcopy(patched)) or own(*args, **kwargs)
    patched(**tokens())
    assert torch.equal(logits_of(copies[0]), logits_of(patched))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    plain, patched = pair()
    for model in (plain, patched):
        model.train().gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    same_step(plain, patched, use_cache=False)
    whole = torch.utils.checkpoint.checkpoint(lambda ids: patched(input_ids=ids, labels=ids, use_cache=False).loss, tokens()["input_ids"], use_reentrant=False)
    patched.zero_grad()
    whole.backward()
    plain.zero_grad()
    plain(input_ids=tokens()["input_ids"], labels=tokens()["input_ids"], use_cache=False).loss.backward()
    assert_close([p.grad for p in patched.parameters()], [p.grad for p in plain.parameters()], rtol=1e-4, atol=1e-6)


COMPILED = {  # in training, and what a call is given beside its tokens
    "training": (True, lambda labels: dict(labels=labels)),
    "training, counted": (True, lambda labels: dict(labels=labels, num_items_in_batch=(labels != -100).sum())),
    "evaluation": (False, lambda labels: dict(labels=labels)), "logits": (False, lambda labels: {}),
}


def graphs(model: nn.Module, training: bool, more) -> int:
    "How many graphs a compiled model makes of batches of many sizes and lengths"
    torch._dynamo.reset()
    found = []
    compiled = torch.compile(model.train(training), backend=lambda graph, inputs: found.append(graph) or graph.forward)
    for n, length in ((2, 12), (2, 9), (3, 17), (5, 9), (4, 31)):
        ids = torch.randint(3, V, (n, length), generator=torch.Generator().manual_seed(length))
        labels = ids.masked_fill(torch.arange(length) < 4, -100)
        with torch.set_grad_enabled(training):
            output = compiled(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more(labels))
        if training:
            output.loss.backward()
    return len(found)


@pytest.mark.parametrize("call", COMPILED)
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "phi, bias", "gpt2 tied"] if FULL else ["llama"])
def test_as_many_graphs_as_the_model_alone(name, call):
    plain, patched = pair(name)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # beyond the limit nothing is compiled, and so nothing counted
        assert graphs(patched, *COMPILED[call]) <= graphs(plain, *COMPILED[call])


class Scaled(nn.Linear):
    "What a layer of quantised weights is: a linear layer with a forward of its own."
    def forward(self, input):
        return 2 * super().forward(input)


def changed_head(change) -> nn.Module:
    "A Llama with another output layer"
    model = copy.deepcopy(made("llama"))
    change(model)
    return model


HEADS = {
    "whose forward is its own": lambda m: m.set_output_embeddings(Scaled(32, V)), "has hooks": lambda m: m.lm_head.register_forward_hook(print),
    "has a parametrization": lambda m: weight_norm(m.lm_head), "got Sequential": lambda m: m.set_output_embeddings(nn.Sequential(nn.Tanh())),
    "with an output layer, got": lambda m: (setattr(m, "get_output_embeddings", lambda: None), delattr(m, "lm_head")),
    "is kept on another device": lambda m: setattr(m.lm_head, "_hf_hook", mock.Mock(offload=True, hooks=[])),
    "kept on another device": lambda m: setattr(m.lm_head, "_hf_hook", mock.Mock(offload=False, hooks=[mock.Mock(offload=True)])),
}


@pytest.mark.parametrize("said", HEADS)
def test_an_output_layer_that_is_not_a_product_is_refused_and_nothing_changes(said):
    model = changed_head(HEADS[said])
    before = state(model)
    with pytest.raises(ValueError, match=f"model: expected .*{said}"):
        patch(model)
    assert state(model) == before


@pytest.mark.parametrize("model", [nn.Linear(2, 3), torch.nn.DataParallel(nn.Linear(2, 3))], ids=["a module", "wrapped"])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ValueError, match=f"model: expected a causal language model of transformers, .*got {type(model).__name__}"):
        patch(model)


def test_a_model_that_takes_no_labels_is_refused():
    class Unlabelled(hf.LlamaForCausalLM):
        def forward(self, input_ids):
            return super().forward(input_ids)
    with pytest.raises(ValueError, match="model: expected a forward that takes labels, got Unlabelled"):
        patch(Unlabelled(made("llama").config))


def test_an_output_layer_put_there_later_is_noticed():
    _, patched = pair()
    patched.resize_token_embeddings(V + 3, mean_resizing=False)
    with pytest.raises(ValueError, match="model: expected the output layer that patch has found"):
        patched(**tokens())
    patch(unpatch(patched))
    assert patched(**tokens()).logits is None


# --- what surrounds a model ---


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "qwen2 moe", "phi, bias"] if FULL else ["gemma2"])
def test_compiled_whole(name):
    plain, patched = pair(name)
    torch._dynamo.reset()  # models share the code that is compiled
    step(patched)  # a mixture's first call sets up what no compiler traces, patched or not
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    (expected, grads), (got, ours) = step(plain, use_cache=False), step(compiled, use_cache=False)
    assert_close(got.loss, expected.loss)
    assert got.logits is None and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, grads))
    logits_of(compiled)


@pytest.mark.parametrize("name", ["llama", "llama tied"])
def test_autocast(name):
    plain, patched = pair(name)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = (m(**tokens()).loss for m in (plain, patched))
    assert ours.dtype == torch.float32
    assert_close(ours, theirs, rtol=2e-3, atol=0)


def adapted(**config) -> tuple[nn.Module, nn.Module]:
    "A Llama with an adapter whose weights are no zeros, and its patched copy"
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plain = peft.get_peft_model(copy.deepcopy(made("llama")), peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **config))
    return plain.train(), patch(copy.deepcopy(plain)).train()


ADAPTERS = {"in the layers": dict(target_modules=["q_proj"]), "on the output layer": dict(target_modules=["lm_head"], lora_alpha=3),
            "with dropout": dict(target_modules=["lm_head", "v_proj"], lora_dropout=0.4, use_rslora=True),
            "with a bias": dict(target_modules=["lm_head"], lora_bias=True, bias="all"),
            "a copy of the output layer": dict(target_modules=["q_proj"], modules_to_save=["lm_head"])}


@pytest.mark.parametrize("where", ADAPTERS)
def test_adapters(where):
    plain, patched = adapted(**ADAPTERS[where])
    same_step(plain, patched)
    with plain.disable_adapter(), patched.disable_adapter():
        assert_close(patched(**tokens()).loss, plain(**tokens()).loss)
    assert torch.equal(logits_of(patched.eval()), logits_of(plain.eval()))
    assert unpatch(patched)(**tokens()).logits is not None


TOKENS = {  # model, and where its rows are trained
    "tied": ("llama tied", dict(trainable_token_indices=[1, 5, 20])),
    "tied, ensured": ("llama tied", dict(trainable_token_indices=[1, 5, 20], ensure_weight_tying=True)),
    "embedding": ("llama", dict(trainable_token_indices=[1, 5, 20])),
    "each its own": ("llama", dict(trainable_token_indices={"embed_tokens": [1, 5], "lm_head": [2, 6]}))}


@pytest.mark.parametrize("where", TOKENS)
@pytest.mark.parametrize("first", ["adapter", "patch"])
def test_trainable_tokens(where, first):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    name, rows = TOKENS[where]
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **rows)
    plain, model = (peft.get_peft_model(m, config) for m in (copy.deepcopy(made(name)), (pair(name)[1] if first == "patch" else copy.deepcopy(made(name)))))
    torch.manual_seed(4)
    for p, twin in zip(plain.parameters(), model.parameters(), strict=True):
        p.data.add_(0.3 * torch.randn_like(p) * p.requires_grad)
        twin.data.copy_(p)
    if first == "patch" and where != "embedding":
        with pytest.raises(ValueError, match=r"TrainableTokensWrapper with a layer that came later: patch\(model\) again"):
            model(**tokens())
    same_step(plain, patch(model))
    rows = [p.grad for key, p in model.named_parameters() if "trainable_tokens_delta" in key]
    assert rows and all(g.abs().sum() > 0 for g in rows)
    with plain.disable_adapter(), model.disable_adapter():
        assert_close(model(**tokens()).loss, plain(**tokens()).loss)
    assert torch.equal(logits_of(model), logits_of(plain))


OTHER_ADAPTERS = {  # that do more to logits than add products
    "IA3": dict(target_modules=["lm_head"], feedforward_modules=[], init_ia3_weights=False), "LoHa": dict(target_modules=["lm_head"], init_weights=False),
    "Vera": dict(target_modules=["lm_head"]), "Shira": dict(target_modules=["lm_head"], r=1), "AdaLora": dict(target_modules=["lm_head"], total_step=9),
    "Lora": dict(target_parameters=["lm_head.weight"], init_lora_weights=False)}


@pytest.mark.parametrize("name", OTHER_ADAPTERS)
def test_adapters_of_other_kinds_are_refused_and_nothing_changes(name):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(copy.deepcopy(made("llama")), getattr(peft, f"{name}Config")(**OTHER_ADAPTERS[name]))
    before = state(model)
    with pytest.raises(ValueError, match="model: expected an output layer that adds products with its weights, got peft"):
        patch(model)
    assert state(model) == before
    with pytest.raises(ValueError, match="model: expected an output layer that adds products with its weights, got peft"), adapter.lazy_logits(model):
        pass
    assert state(model) == before


def test_a_refusal_leaves_an_earlier_patch():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    _, patched = pair()
    patched.set_output_embeddings(peft.tuners.lora.Linear(patched.lm_head, "default", peft.LoraConfig(r=2, use_dora=True), r=2, use_dora=True))
    before = {name: vars(m).get("forward") for name, m in patched.named_modules()}
    with pytest.raises(ValueError, match="got peft.*which does more"):
        patch(patched)
    assert {name: vars(m).get("forward") for name, m in patched.named_modules()} == before


@pytest.mark.parametrize("name", ["PromptTuning", "PrefixTuning"])
def test_virtual_tokens(name):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plain = peft.get_peft_model(copy.deepcopy(made("llama")), getattr(peft, f"{name}Config")(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    same_step(plain, patch(copy.deepcopy(plain)))


def test_patched_again_with_other_options():
    plain, patched = pair()
    patch(patched, method="chunks")
    assert patch(patched, memory_budget=2**20) is patched
    with mock.patch.object(adapter, "linear_cross_entropy", wraps=adapter.linear_cross_entropy) as loss:
        same_step(plain, patched)
    assert loss.call_args.kwargs["method"] == "auto" and loss.call_args.kwargs["memory_budget"] == 2**20
    assert state(unpatch(patched)) == state(plain)
    patched.forward = lambda *args, own=patch(patched).forward, **kwargs: own(*args, **kwargs)
    for function in (patch, unpatch):
        with pytest.raises(ValueError, match="model: expected the forward that patch has set, outermost, got another one around"):
            function(patched)


def test_an_adapter_in_float32_on_a_layer_in_bf16():
    plain, patched = adapted(target_modules=["lm_head"])
    for model in (plain, patched):
        for name, p in model.named_parameters():
            p.data = p.data if "lora" in name else p.data.bfloat16()
    (theirs, d), (ours, e) = step(plain), step(patched)
    assert_close(ours.loss, theirs.loss, rtol=3e-3, atol=0)
    for a, b in zip(e, d):
        assert a is None and b is None or (a - b).norm() < 0.03 * b.norm() and a.dtype == torch.float32


def test_two_adapters_at_once():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plain, patched = adapted(**ADAPTERS["on the output layer"])
    for model in (unpatch(patched), plain):
        torch.manual_seed(5)
        model.add_adapter("second", peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["lm_head"]))
        model.base_model.set_adapter(["default", "second"])
    same_step(plain, patch(patched))


def test_adapters_that_do_more_than_add_are_refused():
    with pytest.raises(ValueError, match="model: expected an output layer that adds products with its weights, got peft.*Linear, which does more"):
        adapted(target_modules=["lm_head"], use_dora=True)


def test_adapters_put_on_the_output_layer_after_patch_are_refused():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(pair()[1], peft.LoraConfig(r=4, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match=r"model: expected the output layer that patch has found, got .* later: patch\(model\) again"):
        model(**tokens())
    assert patch(model)(**tokens()).logits is None


def test_a_model_that_accelerate_has_dispatched():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = accelerate.dispatch_model(copy.deepcopy(made("llama")), {"": "cpu"}, main_device="cpu", force_hooks=True)
    before = state(model)
    assert "forward" in before["lm_head"]
    same_step(made("llama"), patch(model))
    unpatch(model)
    assert state(model) == before and model(**tokens()).logits is not None


def test_a_forward_that_was_replaced_before_is_called_and_put_back():
    plain, calls = copy.deepcopy(made("llama")), []
    plain.forward = replaced = lambda *args, **kwargs: calls.append(len(kwargs)) or type(plain).forward(plain, *args, **kwargs)
    patch(plain)
    assert plain(**tokens()).logits is None and logits_of(plain) is not None and calls == [3, 1]
    assert unpatch(plain).forward is replaced


def test_a_weight_that_leaves_after_patch_is_missed():
    _, patched = pair()
    patched.lm_head.to("meta")
    with pytest.raises(ValueError, match="model: expected an output layer with a weight, got one whose weight is kept on another device"):
        patched(**tokens())


TRAININGS = {"accumulation": dict(gradient_accumulation_steps=2), "checkpointing": dict(gradient_checkpointing=True),
             "autocast": dict(bf16=True), "label smoothing": dict(label_smoothing_factor=0.1)}


def trained(model: nn.Module, folder: Path, **options) -> tuple[list[float], dict[str, torch.Tensor]]:
    "Losses of three steps, the loss of an evaluation, and the weights after it"
    data = [{k: v[i % 2] for k, v in tokens().items()} for i in range(12)]
    torch.manual_seed(0)
    args = hf.TrainingArguments(str(folder), max_steps=3, per_device_train_batch_size=2, learning_rate=0.01, logging_steps=1, use_cpu=True, seed=1,
                                report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, **options)
    trainer = hf.Trainer(model, args, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]], model.state_dict()


@pytest.mark.parametrize("name", few(TRAININGS, "accumulation", "autocast"))
def test_trainer(name, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    plain, patched = pair()
    with mock.patch.object(adapter, "linear_cross_entropy", wraps=adapter.linear_cross_entropy) as loss:
        (theirs, weights), (ours, got) = (trained(m, tmp_path, **TRAININGS[name]) for m in (plain, patched))
    assert loss.call_count == {"accumulation": 7, "label smoothing": 0}.get(name, 4)  # and one batch of the evaluation
    close = 2e-3 if name == "autocast" else 1e-5
    assert len(ours) == 4 and ours[2] < ours[0] and ours == pytest.approx(theirs, rel=close)
    if name != "autocast":
        assert all(torch.allclose(got[k], weights[k], atol=1e-4) for k in weights)


def evaluated(model: nn.Module, folder: Path, kind: str = "", metrics=lambda found: {"accuracy": 0.0}, **options) -> list[str]:
    "What two evaluations of a `Trainer`, or of a `Seq2SeqTrainer`, warn of metrics"
    data = [{k: v[i % 2] for k, v in tokens().items()} for i in range(4)]
    given = {k: options.pop(k) for k in ("preprocess_logits_for_metrics",) if k in options}
    args = getattr(hf, f"{kind}TrainingArguments")(str(folder), per_device_eval_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True,
                                                  dataloader_pin_memory=False, **options)
    trainer = getattr(hf, f"{kind}Trainer")(model, args, eval_dataset=data, compute_metrics=metrics, **given)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.evaluate()
    return [str(w.message) for w in seen if "metrics" in str(w.message)]


def test_metrics_without_logits_warn_once(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    plain, patched = pair()
    got = []
    said = evaluated(patched, tmp_path, metrics=lambda found: got.append(found.predictions) or {})
    assert len(said) == 1 and said[0].startswith("compute_metrics: the patched model returns a loss and no logits; unpatch(model)")
    assert got == [(), ()]
    said = evaluated(patch(patched), tmp_path)  # each patch anew
    assert len(said) == 1
    # nor for a loss alone, for what a hook hands on, for logits that are there, or for tokens that are generated
    others = [(patched, "", {"metrics": None}), (patched, "", {"prediction_loss_only": True}), (plain, "", {}),
              (patched, "", {"preprocess_logits_for_metrics": lambda none, labels: labels}), (patched, "", {"label_smoothing_factor": 0.1}),
              (patched, "Seq2Seq", {"predict_with_generate": True, "generation_max_length": 20})]
    for model, kind, options in others:
        assert not evaluated(patch(model) if model is patched else model, tmp_path, kind, **options), options
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch(patched).eval()(**tokens())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> dict:
    "By case: on each of two ranks, how far loss and gradients are from the unpatched model's"
    path = tmp_path_factory.mktemp("ranks")
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, str(HERE / "transformers_worker.py"), str(path)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return {rank: json.loads((path / f"{rank}.json").read_text()) for rank in (0, 1)}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch was built without torch.distributed")
@pytest.mark.parametrize("name", ["DDP", "FSDP2", "FSDP2, tied", "FSDP2, output layer apart", "FSDP2, output layer apart, kept", "FSDP2, bf16"])
def test_on_two_ranks(ranks, name):
    for rank in (0, 1):
        loss, grads = ranks[rank][name]
        assert loss < (2e-2 if "bf16" in name else 1e-5) and grads < (2e-2 if "bf16" in name else 1e-5)


# --- the loss alone ---


@pytest.mark.parametrize("given", [{}, dict(num_items_in_batch=torch.tensor(7)), dict(num_items_in_batch=3), dict(ignore_index=4),
                                   dict(shift_labels=torch.randint(9, (2, 5))), dict(position_ids=None)], ids=lambda g: next(iter(g), "mean"))
@pytest.mark.parametrize("bias", [False, True])
def test_the_loss_alone_is_that_of_transformers(given, bias):
    from transformers.loss.loss_utils import ForCausalLMLoss
    torch.manual_seed(0)
    leaves = [torch.randn(2, 5, 4), torch.randn(9, 4), *[torch.randn(9)] * bias]
    given = dict(labels=torch.randint(9, (2, 5)), vocab_size=9) | given
    logits = lambda x, w, b=None: F.linear(x, w, b)
    ways = (lambda *t: ForCausalLMLoss(logits(*t), **given), lambda *t: causal_lm_loss(logits(*t), **given),
            lambda x, w, b=None: causal_lm_loss(hidden_states=x, lm_head_weight=w, lm_head_bias=b, **given))
    results = []
    for way in ways:
        for t in leaves:
            t.requires_grad_().grad = None
        loss = way(*leaves)
        loss.backward()
        results.append([loss.detach(), *(t.grad for t in leaves)])
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert causal_lm_loss.can_torch_compile


@pytest.mark.parametrize("n", [None, torch.tensor(7)])
def test_the_loss_alone_is_compiled_whole(n):
    x, w = torch.randn(2, 5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    given = dict(labels=torch.randint(9, (2, 5)), vocab_size=9, num_items_in_batch=n, hidden_states=x, lm_head_weight=w)
    compiled = torch.compile(causal_lm_loss, fullgraph=True, backend="aot_eager")
    assert_close(torch.autograd.grad(compiled(**given), (x, w)), torch.autograd.grad(causal_lm_loss(**given), (x, w)))


def test_the_loss_alone_as_a_models_own():
    plain, _ = pair("gemma2")
    own = copy.deepcopy(plain)
    own.loss_function = causal_lm_loss
    assert_close(step(own)[1], step(plain)[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("said, given", [("labels: expected a tensor", {}), ("lm_head_weight: expected a tensor", dict(labels=torch.ones(1, 2).long())),
                                         ("vocab_size: expected 9, got 8", dict(logits=torch.ones(1, 2, 9), labels=torch.ones(1, 2).long(), vocab_size=8))])
def test_the_loss_alone_refuses(said, given):
    with pytest.raises(ValueError, match=said):
        causal_lm_loss(**given)


def test_the_adapter_is_found_from_the_package():
    assert fl.integrations.transformers is adapter and fl.integrations.transformers.patch is patch
