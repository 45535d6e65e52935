"""tools/fuzz.py: its draws are right, each alone the same as among others, and it finds what is planted."""
import gc
import os
import random
import subprocess
import sys
import weakref
from functools import wraps
from inspect import signature
from pathlib import Path

import pytest
import torch

import fusedloss as fl
import fuzz
from fusedloss.core import reference
from fusedloss.margins import CosFace
from fuzz_calls import LOSSES, Call
from helpers import INTERPRETED, everywhere

SEED = 1
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN in the interpreter


def wrong_draws(draws, device, names=tuple(LOSSES)) -> list[str]:
    "What the fuzzer says of these"
    return [f"{k}: {what}: {wrong}" for k in draws for what, _, wrong in [fuzz.run_one(SEED, k, list(names), device)] if wrong]


def test_draws_are_right(device):
    assert wrong_draws(range(10 * len(LOSSES)), device) == []


@pytest.mark.thorough
@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the kernels take them anyway")
def test_draws_are_right_by_kernels(monkeypatch):
    fuzz.kernels_everywhere(monkeypatch)
    assert wrong_draws(range(2 * len(LOSSES)), "cpu") == []


def test_most_draws_are_answered(device):
    outcomes = [fuzz.run_one(SEED, k, ["linear_cross_entropy", "cross_entropy", "linear_ctc_loss"], device)[1] for k in range(60)]
    assert outcomes.count("right") > 40 and outcomes.count("refused") > 0


def test_a_draw_does_not_depend_on_others(device):
    alone = fuzz.run_one(SEED, 33, list(LOSSES), device)[0]
    for k in range(30, 33):
        fuzz.run_one(SEED, k, list(LOSSES), device)
    assert fuzz.run_one(SEED, 33, list(LOSSES), device)[0] == alone != fuzz.run_one(SEED + 1, 33, list(LOSSES), device)[0]


def kept(call: Call, device: str) -> list[str]:
    "Names of tensors that live on after a call and its gradients"
    leaves = {name: (t if name in call.at_home else t.to(device)).clone().requires_grad_(name in call.leaves) for name, t in call.tensors.items()}
    left = {name: weakref.ref(t) for name, t in leaves.items()}
    try:
        of = [t for t in call.run(**leaves) if t is not None and t.requires_grad]
        if of: torch.autograd.grad(of, [leaves[name] for name in call.leaves], [torch.ones_like(t) for t in of], materialize_grads=True)
    except (ValueError, IndexError): pass  # a refusal keeps nothing either
    of = leaves = None
    gc.collect()
    return [name for name, ref in left.items() if ref() is not None]


@pytest.mark.parametrize("name", LOSSES)
def test_no_call_keeps_its_tensors(name, device):
    "A training run would keep those of every step"
    assert [kept(LOSSES[name](fuzz.drawing(7, k, device)), device) for k in range(4)] == [[]] * 4


# --- calls with one fault each ---

def doubled(input):
    return [2 * input]


def beside(input):
    "Reads one number too many"
    return [2 * input + 0 * input.detach().as_strided((1,), (1,), input.storage_offset() + sum((n - 1) * s for n, s in zip(input.shape, input.stride())) + 1)]


def beyond(input):
    "Writes one number too many"
    out = torch.empty(4, device=input.device)
    out.as_strided((1,), (1,), out.storage_offset() + 4).fill_(1.0)
    return [2 * input]


def unwritten(input):
    "Leaves new memory as it is"
    return [2 * input + torch.empty_like(input)]


def overwrites(input):
    input.detach().mul_(1.5)
    return [2 * input / 1.5]


def restless(input, made=random.Random(0)):
    return [2 * input * (1 + 1e-5 * made.random())]


def breaks(input):
    raise TypeError("input: expected something, got nothing")


def mumbles(input):
    raise ValueError("this is not right")


LIARS = {
    "reads beside": (beside, "not finite"), "writes beyond": (beyond, "wrote beside a result of shape (4,)"), "leaves memory": (unwritten, "not finite"),
    "changes its input": (overwrites, "input was changed"), "is not the same again": (restless, "when repeated"), "another error": (breaks, "TypeError"),
    "an error that names nothing": (mumbles, "ValueError"), "wrong": (lambda input: [2.001 * input], "output 0 is off"),
    "wrong gradient": (lambda input: [2 * input.detach() + 0 * input], "d input is off"), "another dtype": (lambda input: [2 * input.double()], "torch.float64"),
    "another shape": (lambda input: [2 * input[None]], "not torch.float32 [3, 5]"), "takes what cannot be": (doubled, "that cannot be was taken"), "honest": (doubled, ""),
}


@pytest.mark.parametrize("name", LIARS)
def test_a_fault_is_found(name, device):
    run, words = LIARS[name]
    t = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    call = Call(run, lambda _, input: [2 * input], dict(input=t), ["input"], ["input"], {}, impossible=name == "takes what cannot be", expands=False)
    for seed in range(8):  # layouts
        _, wrong = fuzz.judged(call, random.Random(seed), device)
        assert words in "; ".join(wrong) and bool(wrong) == bool(words), (seed, wrong)


def test_a_stride_that_is_ignored_is_found(monkeypatch):
    "Where labels and weights are made vectors"
    careless = lambda t: t if t is None else t.as_strided((t.numel(),), (1,))
    everywhere(monkeypatch, reference, "flat", careless)
    found = wrong_draws(range(40), "cpu", ["cross_entropy"])
    assert len(found) > 5


# A public name, what it does with one of its arguments instead, and the draws that notice; without a change it takes no notice of it.
CARELESS = {
    "target_weight": ("linear_cross_entropy", "target_weight", None, "linear_cross_entropy"),
    "filter_eps": ("linear_cross_entropy", "filter_eps", lambda eps: 0.99, "linear_cross_entropy"),
    "a margin": ("margin_cross_entropy", "margin", lambda m: CosFace(0.3, m.scale), "margin_cross_entropy"),
    "eps of a margin": ("margin_cross_entropy", "eps", None, "margin_cross_entropy"),
    "weights of a margin": ("margin_cross_entropy", "token_weight", None, "margin_cross_entropy"),
    "log_q": ("NegativeSampler", "log_q", None, "partial_fc"), "log_q of products": ("NegativeSampler", "log_q", None, "partial_fc_of_products"),
    "popularity": ("PopularitySampler", "log_q", None, "partial_fc_of_products"), "rows of their own": ("PopularitySampler", "each_row", None, "partial_fc_of_products"),
    "durations": ("linear_transducer_loss", "durations", lambda d: [x + 1 for x in d], "linear_transducer_loss"), "sigma": ("linear_transducer_loss", "sigma", None, "linear_transducer_loss"),
    "FastEmit": ("linear_transducer_loss", "fastemit_lambda", None, "linear_transducer_loss"), "clamp": ("linear_transducer_loss", "clamp", None, "linear_transducer_loss"),
    "clamp of logits": ("transducer_loss", "clamp", None, "transducer_loss"), "log-probabilities": ("transducer_loss", "fused_log_softmax", None, "transducer_loss"),
    "a list's rest": ("linear_divergence", "top_rest", None, "linear_divergence"), "n_classes": ("linear_divergence", "n_classes", lambda n: max(n - 1, 1), "linear_divergence"),
    "positives": ("contrastive_loss", "positives", lambda p: p[:, :1] if p.dim() == 2 else p, "contrastive_loss"),
    "a scale": ("contrastive_loss", "logit_scale", abs, "contrastive_loss"), "a bias": ("sigmoid_contrastive_loss", "logit_bias", lambda b: -b, "sigmoid_contrastive_loss"),
}


@pytest.mark.parametrize("name", CARELESS)
def test_an_argument_without_its_effect_is_found(name, monkeypatch):
    owner, argument, change, loss = CARELESS[name]
    real = getattr(fl, owner)

    @wraps(real)
    def careless(*args, **given):
        if argument in given:
            given |= {argument: change(given[argument])} if change else {argument: signature(real).parameters[argument].default}
        return real(*args, **given)
    monkeypatch.setattr(fl, owner, careless)
    found = next((k for k in range(400) if wrong_draws([k], "cpu", [loss])), None)
    assert found is not None
    monkeypatch.undo()
    assert wrong_draws([found], "cpu", [loss]) == []


def test_a_wrong_call_is_printed_and_repeated(monkeypatch, capsys):
    real = fl.log_probs

    @wraps(real)
    def doubled_values(*args, **how):
        found = real(*args, **how)
        return found._replace(log_probs=2 * found.log_probs)
    monkeypatch.setattr(fl, "log_probs", doubled_values)
    assert fuzz.main(["log_probs", "--seconds", "0.5", "--seed", "1", "--device", "cpu"]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("--seed"))
    command = line.partition(":")[0].split()
    assert fuzz.main([*command, "--device", "cpu"]) == 1 and capsys.readouterr().out.startswith(line)
    monkeypatch.undo()
    assert fuzz.main([*command, "--device", "cpu"]) == 0


# --- over ranks ---

TOOL = Path(fuzz.__file__)
OVER_RANKS = pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch was built without torch.distributed")


def over_two_ranks(*words, plant="") -> subprocess.CompletedProcess:
    "The fuzzer on two processes of a CPU, which start from one that has this planted"
    program = f"import sys; sys.path.insert(0, {str(TOOL.parent)!r}); import fuzz; import fusedloss as fl; from fusedloss.core import placement, ranks\n{plant}\nsys.exit(fuzz.main(sys.argv[1:]))"
    env = dict(os.environ, PYTHONPATH=str(TOOL.parents[1]), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    return subprocess.run([sys.executable, "-c", program, "--ranks", "2", "--seed", str(SEED), "--device", "cpu", *words], env=env, capture_output=True, text=True, timeout=300)


@OVER_RANKS
def test_draws_over_ranks_are_right():
    done = over_two_ranks("--seconds", "4")
    assert not done.returncode and "0 wrong" in done.stdout, done.stdout + done.stderr[-3000:]


PLANTED = {  # what is wrong, where it is planted, and the draws that notice
    "a rank counts classes from its first": ("real = ranks.Shards.local_labels; ranks.Shards.local_labels = lambda s, *given: real(s._replace(start=0), *given)", "sharded_linear_log_probs"),
    "rows that pad are tokens": ("real = ranks.pack; ranks.pack = lambda *given: real(*given[:-1], 0)", "sharded_partial_fc"),
    "a wrapper's average is forgotten": ("real = placement.batch_of\ndef forgets(*given):\n    b, dim = real(*given)\n    return b._replace(factor=1), dim\nplacement.batch_of = forgets", "linear_cross_entropy"),
    "a sum of this rank alone": ("import fusedloss.contrast; fusedloss.contrast.all_reduce = lambda t, s: t", "sigmoid_contrastive_loss"),
}


@pytest.mark.thorough
@OVER_RANKS
@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_over_ranks_is_found_and_repeated(name):
    plant, loss = PLANTED[name]
    plant = f"fuzz.HANGS /= 10\n{plant}"
    done = over_two_ranks("--seconds", "5", loss, plant=plant)
    line = next((line for line in done.stdout.splitlines() if line.startswith("--ranks 2 --seed")), "")
    assert done.returncode == 1 and loss in line, done.stdout + done.stderr[-3000:]
    command = line.partition(":")[0].split()
    assert over_two_ranks(*command, plant=plant).stdout.startswith(line) and not over_two_ranks(*command).returncode


@OVER_RANKS
@pytest.mark.parametrize("fault, says", [("raise ValueError('k: expected 1, got 2')", "Timed out"), ("__import__('os')._exit(9)", "no answer of all ranks")])
def test_a_call_that_hangs_is_named(fault, says):
    "As the second rank raises, or falls, before they talk"
    plant = f"""
from datetime import timedelta
fuzz.HANGS, real = timedelta(seconds=2), fl.sharded_linear_topk
def falls(*given, **how):
    if fuzz.dist.get_rank(): {fault}
    return real(*given, **how)
fl.sharded_linear_topk = falls
"""
    done = over_two_ranks("--seconds", "30", "sharded_linear_topk", plant=plant)
    assert done.returncode == 1 and "--ranks 2 --seed 1 --only 0" in done.stdout and says in done.stdout, done.stdout + done.stderr[-3000:]
