"""Trainers of TRL: what they compute beside TRL's own functions, in heads, from logits and in whole steps; what is replaced, refused and put back."""
import copy
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fusedloss as fl
import fusedloss.integrations.trl as adapter
from fusedloss.integrations.trl import patch, unpatch

trl = pytest.importorskip("trl", reason="trl is not installed")
import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers as hf  # noqa: E402
from trl.trainer import utils  # noqa: E402

pytestmark = pytest.mark.thorough  # one head is in test_integrations.py
V, NAMES = 96, ("_ChunkedLogProbFunction", "selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy",
                 "ChunkedDivergenceFunction", "GKDTrainer.compute_loss", "GKDTrainer.generalized_jsd_loss")
SIZES = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
             max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    "No test leaves TRL patched"
    yield
    unpatch()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(kind: str = "Llama", **config) -> nn.Module:
    "A small model with random weights, in evaluation and so without dropout"
    torch.manual_seed(0)
    model = getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**SIZES | config)).eval()
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))  # biases are zeros otherwise, and losses those of chance
    return model


# ---- the fused head


def said(model: nn.Module, given: dict, entropy_coef: float = 0.3) -> tuple[dict, list]:
    "What a fused head returns for some tokens, and every gradient of an uneven loss"
    ids = torch.randint(3, V, (2, 12), generator=seeded(1))
    labels = ids.masked_fill(torch.arange(12) < torch.tensor([[5], [2]]), -100)
    model.zero_grad()
    output = model(**dict(input_ids=ids, labels=labels, fused_lm_head=True) | given)
    coef = torch.rand(output.log_probs.shape, generator=seeded(2))
    loss = output.loss + (coef * output.log_probs).sum()
    if output.entropy is not None:
        loss = loss + entropy_coef * (coef * output.entropy).sum()
    loss.backward()
    return output, [p.grad for p in model.parameters()]


def same_head(model: nn.Module, rtol: float = 1e-5, calls: int = 1, given: dict = {}, compact: bool = False, **head) -> None:
    "A fused head says the same and gives the same gradients by TRL and by ours"
    utils.add_fused_lm_head(model, **dict(outputs=OUTPUTS) | head)
    expected, grads = said(model, given)
    patch()
    with mock.patch.object(adapter, "linear_log_probs", wraps=adapter.linear_log_probs) as ours, \
            mock.patch.object(utils, "_use_triton", lambda device: compact):
        got, found = said(model, given)
    assert ours.call_count == calls and list(got) == list(expected)
    for name in expected:
        assert_close(got[name], expected[name], rtol=rtol, atol=rtol)
    for g, e in zip(found, grads, strict=True):
        assert (g is None) == (e is None)
        if e is not None:
            assert_close(g, e, rtol=10 * rtol, atol=rtol)


MODELS = {"llama": ("Llama", {}), "llama, tied": ("Llama", dict(tie_word_embeddings=True)), "qwen3": ("Qwen3", dict(head_dim=16)),
          "phi, bias": ("Phi", {}), "gemma2, soft cap": ("Gemma2", dict(head_dim=16, final_logit_softcapping=0.8)),
          "cohere, scale": ("Cohere", dict(logit_scale=0.25)), "granite, scale": ("Granite", dict(logits_scaling=7.0))}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_heads(name, temperature):
    kind, config = MODELS[name]
    same_head(made(kind, **config), temperature=temperature)


HEADS = {"log-probabilities alone": dict(outputs=("log_probs",)), "no entropy": dict(outputs=("log_probs", "is_top1")),
         "a number of tokens": dict(given=dict(num_items_in_batch=torch.tensor(7))),
         "labels of the same positions": dict(given=dict(shift_labels=torch.randint(V, (2, 12), generator=seeded(3)))),
         "nothing to learn": dict(given=dict(labels=torch.full((2, 12), -100)))}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("compact", [False, True])
def test_calls_of_a_head(name, compact):
    "Compact, as on a GPU: only positions with a label reach the head"
    same_head(made(), compact=compact, **HEADS[name])


def test_a_head_in_float32_on_a_model_in_bf16():
    same_head(made().to(torch.bfloat16), rtol=3e-2, cast_lm_head_to_fp32=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype):
    with torch.autocast("cpu", torch.bfloat16):
        same_head(made().to(dtype), rtol=6e-2)


def test_a_frozen_head_has_no_gradient():
    model = made()
    model.lm_head.weight.requires_grad_(False)
    same_head(model)


def test_weights_of_wpo_stay_trls():
    same_head(made(), calls=0, outputs=(*OUTPUTS, "log_sum_sq_probs"))


def test_partitioned_weights_stay_trls():
    model = made()
    model.lm_head.weight.ds_id = 0
    same_head(model, calls=0)


def test_a_target_leads_if_none_is_higher_and_no_earlier_one_equal():
    model, ids = made(), torch.randint(3, V, (2, 12), generator=seeded(1))
    in_64ths = lambda t: t.mul(64).round() / 64  # a score is the same number in whatever order its products are added
    model.lm_head.weight.data = in_64ths(model.lm_head.weight.data)
    model.model.norm.register_forward_hook(lambda module, given, out: in_64ths(out))
    model.lm_head.weight.data[1::2] = model.lm_head.weight.data[::2]  # classes in pairs
    utils.add_fused_lm_head(model, outputs=OUTPUTS)
    best = model(input_ids=ids).logits.argmax(-1) // 2 * 2
    second = model(input_ids=ids).logits.scatter(-1, torch.stack([best, best + 1], -1), -torch.inf).argmax(-1)
    kind = torch.arange(24).view(2, 12) % 3
    given = dict(input_ids=ids, fused_lm_head=True, shift_labels=torch.where(kind == 0, best, torch.where(kind == 1, best + 1, second)))
    expected = model(**given).is_top1
    patch()
    assert torch.equal(model(**given).is_top1, expected) and torch.equal(expected, kind == 0)


def test_no_token_leads_where_the_scores_are_no_numbers():
    model = made()
    model.lm_head.weight.data[5] = torch.nan
    utils.add_fused_lm_head(model, outputs=OUTPUTS)
    patch()
    assert not model(input_ids=torch.tensor([[3, 5, 7]]), labels=torch.tensor([[3, 5, 7]]), fused_lm_head=True).is_top1.any()


def test_compiled():
    model = made()
    utils.add_fused_lm_head(model, outputs=OUTPUTS)
    expected, grads = said(model, {})
    patch()
    model.forward = torch.compile(model.forward, backend="aot_eager")
    got, found = said(model, {})
    assert_close(got.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
    assert_close(found, grads, rtol=1e-4, atol=1e-5)


# ---- a student and its teacher


def diverging(beta: float, given: dict, bias: bool = True, dtype: torch.dtype = torch.float32, n: int = 7) -> list[torch.Tensor]:
    "Each token's divergence and the student's entropy, and every gradient of an uneven sum"
    from trl.trainer import distillation_trainer
    draw = lambda *size: torch.randn(size, generator=seeded(sum(size))).to(dtype).requires_grad_()
    student, teacher = (draw(n, 16), draw(V, 16), draw(V) if bias else None), (draw(n, 24), draw(V, 24), draw(V) if bias else None)
    divergence, entropy = distillation_trainer.ChunkedDivergenceFunction.apply(*student, *teacher, beta, *given.values())
    assert not entropy.requires_grad
    leaves = [t for t in student if t is not None]
    return [divergence, entropy, *torch.autograd.grad((divergence * torch.rand(n, generator=seeded(7))).sum(), leaves)]


SCORES = {"plain": {}, "temperature": dict(temperature=1.7), "soft caps": dict(temperature=0.8, scale=1.0, cap=3.0, teacher_scale=1.0, teacher_cap=5.0)}


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", SCORES)
def test_divergences(beta, name):
    expected = diverging(beta, SCORES[name], bias=name != "plain")
    patch()
    with mock.patch.object(adapter, "linear_divergence", wraps=adapter.linear_divergence) as ours:
        got = diverging(beta, SCORES[name], bias=name != "plain")
    assert ours.call_count == 1
    assert_close(got, expected, rtol=1e-4, atol=2e-5)


def test_divergences_of_no_token_and_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        expected = diverging(0.5, {}), diverging(0.5, {}, n=0)
        patch()
        assert_close((diverging(0.5, {}), diverging(0.5, {}, n=0)), expected, rtol=6e-2, atol=6e-2)


def test_divergences_of_scaled_logits_stay_trls():
    given = dict(temperature=1.0, scale=0.5)
    expected = diverging(0.5, given)
    patch()
    with mock.patch.object(adapter, "linear_divergence", wraps=adapter.linear_divergence) as ours:
        assert all(torch.equal(g, e) for g, e in zip(diverging(0.5, given), expected, strict=True))
    assert ours.call_count == 0


# ---- GKD: logits of two models that nobody computes


def gkd_step(student: nn.Module, teacher: nn.Module, beta: float, labels: list[list[int]], given: dict = {}, wrapped: nn.Module | None = None) -> list:
    "The loss of TRL's trainer and the gradient of every weight"
    from trl.experimental.gkd import GKDTrainer
    ids = torch.randint(3, V, (2, 9), generator=seeded(1))
    trainer = SimpleNamespace(teacher_model=teacher, beta=beta, generalized_jsd_loss=GKDTrainer.generalized_jsd_loss,
                              accelerator=SimpleNamespace(unwrap_model=lambda model: getattr(model, "module", model)))
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.tensor(labels))
    student.zero_grad()
    loss = GKDTrainer.compute_loss(trainer, student if wrapped is None else wrapped, inputs, **given)
    outputs = loss[1] if isinstance(loss, tuple) else None
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters())
    return [loss.detach(), None if outputs is None else outputs.logits, *(p.grad for p in student.parameters())]


def same_gkd(student: nn.Module, beta: float = 0.3, calls: int = 1, computed: int = 0, labels: list[list[int]] = [[-100] * 3 + [5] * 6, [-100] * 7 + [5] * 2], **given) -> None:
    "GKD's loss and gradients are those of TRL, without logits if our divergence is called; the models are as they were"
    teacher = made("Gemma2", head_dim=16, hidden_size=48, final_logit_softcapping=2.0)
    expected = gkd_step(student, teacher, beta, labels, **given)
    patch()
    with mock.patch.object(adapter, "linear_divergence", wraps=adapter.linear_divergence) as ours, \
            mock.patch.object(adapter, "computed", wraps=adapter.computed) as of_logits:
        got = gkd_step(student, teacher, beta, labels, **given)
    assert (ours.call_count, of_logits.call_count) == (calls, computed)
    if calls:
        assert len(ours.call_args.args[0]) == (torch.tensor(labels)[:, 1:] != -100).sum()  # positions that count nothing reach no product
    assert_close(got, expected, rtol=1e-4, atol=2e-6)
    assert not any("forward" in vars(m) for model in (student, teacher) for m in model.modules())


@pytest.mark.parametrize("name", [name for name in MODELS if "scale" not in name])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gkd(name, beta):
    kind, config = MODELS[name]
    same_gkd(made(kind, **config), beta)


@pytest.mark.parametrize("number", [5, torch.tensor(11)])
def test_gkd_by_a_number_of_tokens(number):
    same_gkd(made(), given=dict(num_items_in_batch=number))


def test_gkd_where_nothing_counts():
    same_gkd(made(), labels=[[-100] * 9] * 2)


@pytest.mark.parametrize("name", [name for name in MODELS if "scale" in name])
def test_gkd_of_scaled_logits_stays_trls(name):
    same_gkd(made(MODELS[name][0], **MODELS[name][1]), calls=0, computed=2)


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, **given):
        return self.module(**given)


def test_gkd_stays_trls_where_the_loss_cannot_have_the_layer():
    same_gkd(made(), calls=0, given=dict(return_outputs=True))
    unpatch()
    student = made()
    same_gkd(student, calls=0, wrapped=Wrapped(student))
    unpatch()
    student.lm_head.weight.ds_id = 0
    same_gkd(student, calls=0)


def test_gkd_of_a_patched_student():
    student = made()
    teacher = made("Qwen3", head_dim=16)
    labels = [[-100] * 4 + [5] * 5] * 2
    expected = gkd_step(student, teacher, 0.5, labels)
    fl.integrations.transformers.patch(student)
    patch()
    assert_close(gkd_step(student, teacher, 0.5, labels), expected, rtol=1e-4, atol=2e-6)
    fl.integrations.transformers.unpatch(student)


def test_gkd_that_fails_leaves_the_models_as_they_were():
    student, teacher = made(), made("Llama", vocab_size=V + 8)
    patch()
    with pytest.raises(ValueError, match="the student's 96 classes, got 104"):
        gkd_step(student, teacher, 0.5, [[5] * 9] * 2)
    assert not any("forward" in vars(m) for model in (student, teacher) for m in model.modules())


def test_tensors_given_to_gkds_divergence_stay_trls():
    from trl.experimental.gkd import GKDTrainer
    student, teacher = torch.randn(2, 4, V, generator=seeded(1)), torch.randn(2, 4, V, generator=seeded(2))
    expected = GKDTrainer.generalized_jsd_loss(student, teacher, reduction="none", temperature=0.7)
    patch()
    assert torch.equal(GKDTrainer.generalized_jsd_loss(student, teacher, reduction="none", temperature=0.7), expected)


# ---- functions of logits


def of_logits(shape: tuple = (2, 5, V), dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    "Logits and an index into them"
    logits = 3 * torch.randn(shape, generator=seeded(4))
    return logits.to(dtype).requires_grad_(), torch.randint(V, shape[:-1], generator=seeded(5))


def with_gradient(function: Callable, logits: torch.Tensor, *args, **kwargs) -> tuple[list, torch.Tensor]:
    "What a function of logits returns, and the gradient of an uneven sum of it"
    found = function(logits, *args, **kwargs)
    found = list(found) if isinstance(found, tuple) else [found]
    loss = sum((torch.rand(t.shape, generator=seeded(6)) * t).sum() for t in found if t.requires_grad)
    return found, torch.autograd.grad(loss, logits)[0]


ROWS = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]])
CALLS = {  # of which function, with what
    "chosen": ("selective_log_softmax", {}), "chosen, temperature": ("selective_log_softmax", dict(temperature=0.4)),
    "chosen, masked": ("selective_log_softmax", dict(temperature=2.0, row_mask=ROWS)),
    "both": ("selective_log_softmax_and_entropy", {}), "both, temperature": ("selective_log_softmax_and_entropy", dict(temperature=0.4)),
    "both, masked": ("selective_log_softmax_and_entropy", dict(row_mask=ROWS.bool())),
    "both, entropy detached": ("selective_log_softmax_and_entropy", dict(entropy_requires_grad=False, temperature=0.4, row_mask=ROWS))}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(2, 5, V), (7, V)], ids=str)
def test_functions_of_logits(name, shape):
    function, given = CALLS[name]
    if "row_mask" in given and len(shape) == 2:
        given = dict(given, row_mask=torch.tensor([1, 0, 1, 1, 0, 0, 1]))
    logits, index = of_logits(shape)
    expected, grad = with_gradient(getattr(utils, function), logits, index, **given)
    patch()
    with mock.patch.object(adapter, "log_probs", wraps=adapter.log_probs) as ours:
        got, found = with_gradient(getattr(utils, function), logits, index, **given)
    assert ours.call_count == 1
    assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert_close(found, grad, rtol=1e-5, atol=1e-6)
    assert [t.requires_grad for t in got] == [t.requires_grad for t in expected]


def test_entropy_of_logits():
    logits, _ = of_logits()
    expected, grad = with_gradient(utils.entropy_from_logits, logits, chunk_size=3)
    patch()
    got, found = with_gradient(utils.entropy_from_logits, logits, chunk_size=3)
    assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert_close(found, grad, rtol=1e-5, atol=1e-6)


def test_logits_in_bf16_give_float32():
    logits, index = of_logits(dtype=torch.bfloat16)
    patch()
    (found, entropy), _ = with_gradient(utils.selective_log_softmax_and_entropy, logits, index)
    scores = logits.double().log_softmax(-1)
    assert found.dtype == entropy.dtype == torch.float32
    assert_close(found.double(), scores.gather(-1, index[..., None])[..., 0], rtol=1e-5, atol=1e-5)
    assert_close(entropy.double(), -(scores.exp() * scores).sum(-1), rtol=1e-5, atol=1e-5)


def test_several_classes_a_position_stay_trls():
    logits, index = of_logits()
    index = torch.stack([index, (index + 1) % V], -1)
    expected, grad = with_gradient(utils.selective_log_softmax, logits, index, temperature=0.5)
    patch()
    got, found = with_gradient(utils.selective_log_softmax, logits, index, temperature=0.5)
    assert torch.equal(got[0], expected[0]) and torch.equal(found, grad)


@pytest.mark.parametrize("wrong", [-100, V])
def test_an_index_that_is_no_class_is_an_error(wrong):
    logits, index = of_logits()
    index[0, 1] = wrong
    for function in (utils.selective_log_softmax, utils.selective_log_softmax_and_entropy):
        with pytest.raises((IndexError, RuntimeError)):
            function(logits, index)
    patch()
    for function in (utils.selective_log_softmax, utils.selective_log_softmax_and_entropy):
        with pytest.raises(IndexError):
            function(logits, index)


# ---- trainings


@pytest.fixture(scope="module")
def tokenizer() -> hf.PreTrainedTokenizerFast:
    "A word is a token"
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(V - 4))]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} </s> {% endfor %}"
    return fast


def texts(n: int, words: int, seed: int) -> list[str]:
    "Lines of random words, each of a length of its own"
    numbers = torch.randint(V - 4, (n, words), generator=seeded(seed)).tolist()
    return [" ".join(f"w{i}" for i in row[:words - k % 3]) for k, row in enumerate(numbers)]


def data_of(*names: str) -> datasets.Dataset:
    "Eight lines of a data set"
    data = dict(prompt=texts(8, 5, 1), completion=texts(8, 7, 2), chosen=texts(8, 7, 3), rejected=texts(8, 6, 4), label=[k % 2 == 0 for k in range(8)])
    data["messages"] = [[dict(role="user", content=p), dict(role="assistant", content=c)] for p, c in zip(data["prompt"], data["completion"])]
    return datasets.Dataset.from_dict({name: data[name] for name in names})


def few_letters(completions: list[str], **kwargs) -> list[float]:
    "A reward: words of few letters"
    return [sum(len(word) < 3 for word in text.split()) / 5 for text in completions]


PAIRS, SAMPLES = ("prompt", "chosen", "rejected"), dict(num_generations=2, max_completion_length=6)
TRAININGS = {  # class of the trainer, columns, what its config has besides; how often our log-probabilities are called, of hidden states and of logits, and our divergence
    "SFT": ("SFT", ("prompt", "completion"), {}, (2, 0, 0)),
    "SFT, dft, accumulation": ("SFT", ("prompt", "completion"), dict(loss_type="dft", gradient_accumulation_steps=2), (4, 0, 0)),
    "SFT, checkpointing": ("SFT", ("prompt", "completion"), dict(gradient_checkpointing=True), (2, 0, 0)),
    "SFT, label smoothing": ("SFT", ("prompt", "completion"), dict(label_smoothing_factor=0.1), (2, 0, 0)),
    "SFT, autocast": ("SFT", ("prompt", "completion"), dict(bf16=True), (2, 0, 0)),
    "DPO": ("DPO", PAIRS, {}, (4, 0, 0)),
    "DPO, part of a length": ("DPO", PAIRS, dict(ld_alpha=0.5, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]), (4, 0, 0)),
    "DPO, weighted": ("DPO", PAIRS, dict(use_weighting=True), (2, 0, 0)),  # the policy's weights are TRL's own; the reference has none
    "KTO": ("KTO", ("prompt", "completion", "label"), {}, (8, 0, 0)),
    "GRPO": ("GRPO", ("prompt",), dict(SAMPLES, temperature=0.8, beta=0.1, top_entropy_quantile=0.7), (4, 0, 0)),
    "GRPO, used twice": ("GRPO", ("prompt",), dict(SAMPLES, temperature=1.2, num_iterations=2), (3, 0, 0)),
    "RLOO": ("RLOO", ("prompt",), dict(SAMPLES, temperature=0.8), (6, 0, 0)),
    "GKD": ("experimental.gkd.GKD", ("messages",), dict(beta=0.5, lmbda=0.0), (0, 0, 2)),
    "GKD, forward, accumulation": ("experimental.gkd.GKD", ("messages",), dict(beta=0.0, lmbda=0.0, gradient_accumulation_steps=2), (0, 0, 4)),
    "GKD, of its own texts": ("experimental.gkd.GKD", ("messages",), dict(beta=1.0, lmbda=1.0, max_new_tokens=6), (0, 0, 2)),
    "GKD, autocast": ("experimental.gkd.GKD", ("messages",), dict(beta=0.1, lmbda=0.0, bf16=True), (0, 0, 2)),
    "distillation": ("Distillation", ("prompt",), dict(max_completion_length=6, beta=0.5), (2, 0, 2)),
    "distillation, forward": ("Distillation", ("prompt",), dict(max_completion_length=6, beta=0.0, temperature=0.7), (2, 0, 2)),
    "ORPO": ("experimental.orpo.ORPO", PAIRS, {}, (0, 2, 0)),
    "CPO": ("experimental.cpo.CPO", PAIRS, {}, (0, 2, 0)),
}


def trainer_of(name: str, tokenizer: hf.PreTrainedTokenizerFast, folder: Path) -> hf.Trainer:
    "A trainer of two steps"
    kind, names, config, _ = TRAININGS[name]
    module, _, kind = kind.rpartition(".")
    module = importlib.import_module(f"trl.{module}" if module else "trl")
    model = made()
    model.save_pretrained(folder)  # references are loaded from there
    model.config._name_or_path = str(folder)
    others = {"GRPO": dict(reward_funcs=few_letters), "RLOO": dict(reward_funcs=few_letters), "DPO": dict(ref_model=made("Qwen3", head_dim=16)),
              "KTO": dict(ref_model=made("Qwen3", head_dim=16)), "GKD": dict(teacher_model=made("Qwen3", head_dim=16)),
              "Distillation": dict(teacher_model=made("Qwen3", head_dim=16))}
    common = dict(output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, learning_rate=0.1, optim="sgd", logging_steps=1, use_cpu=True,
                  seed=1, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False)
    args = getattr(module, f"{kind}Config")(**common | config)
    return getattr(module, f"{kind}Trainer")(model=model, args=args, train_dataset=data_of(*names), processing_class=copy.deepcopy(tokenizer),
                                             **others.get(kind, {}))


def trained(trainer: hf.Trainer) -> tuple[list[dict], dict[str, torch.Tensor]]:
    "What two steps log, times aside, and the weights after them"
    trainer.train()
    log = [{k: v for k, v in entry.items() if isinstance(v, float) and not re.search("time|second|flos|mfu", k)} for entry in trainer.state.log_history]
    return log, trainer.model.state_dict()


@pytest.mark.parametrize("name", TRAININGS)
def test_steps_are_trls(name, tokenizer, tmp_path):
    expected, weights = trained(trainer_of(name, tokenizer, tmp_path))
    patch()
    with mock.patch.object(adapter, "linear_log_probs", wraps=adapter.linear_log_probs) as of_states, \
            mock.patch.object(adapter, "log_probs", wraps=adapter.log_probs) as of_logits, \
            mock.patch.object(adapter, "linear_divergence", wraps=adapter.linear_divergence) as of_pairs:
        log, got = trained(trainer_of(name, tokenizer, tmp_path))
    assert (of_states.call_count, of_logits.call_count, of_pairs.call_count) == TRAININGS[name][3]
    close = dict(rel=3e-2, abs=3e-2) if "autocast" in name else dict(rel=2e-5, abs=2e-5)
    assert len(log) == 3 and log[0]["loss"] != log[1]["loss"]
    for ours, theirs in zip(log, expected, strict=True):
        assert ours == pytest.approx(theirs, **close)
    start = made().state_dict()
    assert max((weights[k] - start[k]).abs().max() for k in start) > 1e-4  # it was trained
    for key in weights:
        assert_close(got[key], weights[key], rtol=0, atol=5e-3 if "autocast" in name else 2e-6)


def test_a_trainer_that_was_there_before_changes_with_patch(tokenizer, tmp_path):
    trainer = trainer_of("SFT", tokenizer, tmp_path)
    patch()
    with mock.patch.object(adapter, "linear_log_probs", wraps=adapter.linear_log_probs) as ours:
        trainer.train()
    assert ours.call_count == 2


# ---- what is replaced, refused and put back


def references() -> dict[tuple[str, str], int]:
    "What each name in TRL's loaded modules means"
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "trl"}
    classes = {f"{name}.{key}": value for name, module in modules.items() for key, value in vars(module).items() if isinstance(value, type)}
    return {(name, key): id(value) for name, holder in (modules | classes).items() for key, value in vars(holder).items()}


def test_unpatched_is_as_it_was():
    import trl.experimental.orpo.orpo_trainer
    import trl.trainer.distillation_trainer  # noqa: F401
    before = references()
    assert unpatch() == ()
    assert patch() == patch() == NAMES
    changed = {key for key, value in references().items() if value != before[key]}
    assert {("trl.trainer.utils", name) for name in NAMES[:4]} | {("trl.trainer.distillation_trainer", NAMES[4])} | {("trl.kernels", "ChunkedLogProbFunction"),
            ("trl.experimental.orpo.orpo_trainer", "selective_log_softmax")} <= changed
    assert {name for _, name in changed} == {*(name.split(".")[-1] for name in NAMES), "ChunkedLogProbFunction"}
    assert unpatch() == NAMES and references() == before and unpatch() == ()


def test_patched_again_after_unpatch():
    patch()
    unpatch()
    patch()
    same_head(made())


def test_modules_that_are_loaded_later_are_put_back(monkeypatch):
    monkeypatch.delitem(sys.modules, "trl.experimental.cpo.cpo_trainer", raising=False)
    own = utils.selective_log_softmax
    patch()
    late = importlib.import_module("trl.experimental.cpo.cpo_trainer")
    assert late.selective_log_softmax is utils.selective_log_softmax is not own
    unpatch()
    assert late.selective_log_softmax is utils.selective_log_softmax is own


class OtherHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature=1.0): ...


def other_entropy(logits, chunk_size=256): ...


CHANGES = {  # what a TRL has in the place of a name, and what is said of it
    "other arguments": ("_ChunkedLogProbFunction", OtherHead, r"got _ChunkedLogProbFunction\(hidden, weight, targets, temperature=1.0\)"),
    "another default": ("entropy_from_logits", other_entropy, r".*utils.entropy_from_logits\(logits, chunk_size=128\), got .*256\)"),
    "gone": ("selective_log_softmax_and_entropy", None, "got selective_log_softmax_and_entropy: NoneType"),
    "no function": ("selective_log_softmax", 3, "got selective_log_softmax: int")}


@pytest.mark.parametrize("name", CHANGES)
def test_a_trl_with_other_functions_is_refused_and_nothing_changes(name, monkeypatch):
    place, other, message = CHANGES[name]
    monkeypatch.setattr(utils, place, other)
    before = references()
    with pytest.raises(ValueError, match=f"trl: expected .*{message} in TRL {re.escape(trl.__version__)}, of which nothing is replaced"):
        patch()
    assert references() == before and unpatch() == ()
    monkeypatch.undo()
    assert patch() == NAMES


def test_a_trl_without_gkd_is_patched_in_all_else(monkeypatch):
    monkeypatch.setitem(sys.modules, adapter.GKD, None)
    assert patch() == NAMES[:5] and unpatch() == NAMES[:5]
    monkeypatch.setitem(sys.modules, adapter.GKD, ModuleType("gkd_trainer"))
    assert patch() == NAMES[:5]


def test_a_trl_whose_gkd_takes_other_arguments_is_refused(monkeypatch):
    from trl.experimental.gkd import GKDTrainer
    monkeypatch.setattr(GKDTrainer, "generalized_jsd_loss", staticmethod(other_entropy))
    before = references()
    with pytest.raises(ValueError, match=r"got GKDTrainer.generalized_jsd_loss\(logits, chunk_size=256\) in TRL"):
        patch()
    assert references() == before


def test_the_adapter_is_found_from_the_package():
    assert fl.integrations.trl.patch is patch and fl.integrations.trl.unpatch is unpatch
