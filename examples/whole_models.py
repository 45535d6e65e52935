"""A training step of whole language models with each loss: tokens a second, peak memory, and the loss of the same batch.

    python examples/whole_models.py [--small]

The models are Llamas of transformers with random weights in bf16, whose layers keep no activations (gradient checkpointing). A step is
forward and backward, without an optimizer, which takes the same time and memory with every loss. All losses work on one set of weights,
and nothing but the loss differs; those of one batch have to be equal. The order is drawn anew in each round. Results go to
nbs/results/whole_models.json, which the benchmarks page and the recipe for Trainer show. A loss whose package is missing is recorded
with the reason. `--small` takes a model that a CPU trains in seconds, and records nothing.
"""
import copy
import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from fusedloss.core.checks import expect
from fusedloss.core.tables import si
from fusedloss.integrations.transformers import patch
from workbook.measure import peak_memory, time_in_turn
from workbook.peers import brief_error
from workbook.records import machine_line, record

RESULTS = Path(os.environ.get("FUSEDLOSS_RESULTS", Path(__file__).parent.parent / "nbs" / "results")) / "whole_models.json"


class Size(NamedTuple):
    "A model and its batch"
    batch: int  # sequences
    length: int  # tokens of each
    config: dict  # what LlamaConfig takes

    @property
    def shape(self):
        return dict(B=self.batch, T=self.length, V=self.config["vocab_size"], H=self.config["hidden_size"])


def size(batch, length, v, h, inner, layers, heads, kv_heads):
    "A size by its numbers"
    return Size(batch, length, dict(vocab_size=v, hidden_size=h, intermediate_size=inner, num_hidden_layers=layers,
                                    num_attention_heads=heads, num_key_value_heads=kv_heads))


SIZES = {"half a billion": size(8, 4096, 151936, 896, 4864, 24, 14, 2), "one billion": size(4, 8192, 128256, 2048, 8192, 16, 32, 8)}
SMALL = {"small": size(2, 24, 512, 64, 96, 1, 2, 2)}


def random_llama(config, device):
    "A Llama in bf16 whose layers make their activations again in backward"
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(LlamaConfig(**config, max_position_embeddings=8192, tie_word_embeddings=True))
    finally:
        torch.set_default_dtype(torch.float32)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # its older name
    enable()
    return model.train()


def compiled(model):
    "The model with its own loss compiled"
    model.loss_function = torch.compile(model.loss_function, dynamic=False)
    return model


def with_liger(model):
    "The model with Liger's forward, and no other of its kernels"
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    apply_liger_kernel_to_llama(rope=False, rms_norm=False, swiglu=False, cross_entropy=False, fused_linear_cross_entropy=True, model=model)
    return model


def with_cce(model):
    "The model with the forward of cut cross-entropy"
    from cut_cross_entropy.transformers import cce_patch
    return cce_patch(model)


PEERS = {"torch.compile": compiled, "Liger": with_liger, "CCE": with_cce}
WAYS = {"as it comes": lambda model: model, **PEERS, "patched": patch}


def sharing_weights(model):
    "A copy of the model with the same parameters, and so the same gradients"
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def training_step(model, ids):
    "Forward and backward; gives the loss"
    def run():
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()
    return run


def working_steps(ways, model, ids):
    "A step with each loss, which has run once, and its value; and why a peer has none"
    steps, losses, missing = {}, {}, {}
    for name, way in ways.items():
        try:
            steps[name] = training_step(way(sharing_weights(model)), ids)
            losses[name] = steps[name]().item()
        except Exception as error:  # a library may raise anything
            if name not in PEERS:
                raise
            steps.pop(name, None)
            missing[name] = brief_error(error)
    return steps, losses, missing


def check_equal(losses, tokens):
    "`ValueError` unless losses of one batch are equal up to the rounding of logits to bf16, averaged over the tokens"
    (name, expected), *others = losses.items()
    allowed = 2**-8 * expected / tokens**0.5
    for other, got in others:
        expect(abs(got - expected) <= allowed, other, f"the loss of '{name}', {expected:.6f}, within {allowed:.1e}", f"{got:.6f}")


def measured(ways, size, device, rounds=5, seconds=0.2):
    "Figures of each loss by name; of a peer that is missing, the reason"
    model, (tokens, v) = random_llama(size.config, device), (size.batch * size.length, size.config["vocab_size"])
    ids = torch.randint(v, (size.batch, size.length), device=device)
    steps, losses, missing = working_steps(ways, model, ids)
    check_equal(losses, tokens)
    peaks = {name: peak_memory(step, device) for name, step in steps.items()}
    times = {name: statistics.median(found) for name, found in time_in_turn(steps, device, rounds, seconds).items()}
    figures = {name: dict(seconds=times[name], tokens=tokens / times[name], peak=peaks[name], loss=losses[name]) for name in steps}
    return figures | {name: dict(reason=why) for name, why in missing.items()}


def told(f):
    "A loss's figures in a line"
    if "reason" in f:
        return f"not run, {f['reason']}"
    return f"{f['tokens']:.0f} tokens a second, {si(f['peak'], 'B')} beyond weights and gradients, loss {f['loss']:.6f}"


def main(args):
    small, device = "--small" in args, "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not small:
        sys.exit("expected a GPU, got none: --small runs on a CPU")
    print(machine_line(device), flush=True)
    ways = {name: way for name, way in WAYS.items() if name != "torch.compile" or not small}
    for name, size in (SMALL if small else SIZES).items():
        for way, f in measured(ways, size, device, **(dict(rounds=3, seconds=0.02) if small else {})).items():
            print(f"{name}, {way}: {told(f)}", flush=True)
            if not small:
                record(RESULTS, way, size.shape, torch.bfloat16, device, **f)


if __name__ == "__main__":
    main(sys.argv[1:])
