"""A patched model of transformers under DeepSpeed's ZeRO-3, whose ranks each store a part of every weight, on two processes of a CPU.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/zero3.py
"""
import os

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import fusedloss as fl

CONFIG = dict(
    train_micro_batch_size_per_gpu=2, zero_allow_untested_optimizer=True,
    zero_optimization=dict(stage=3, overlap_comm=False, stage3_param_persistence_threshold=0))


def trained(patch, tied):
    "Losses of four steps, and the weights after them; the output layer is empty between passes"
    torch.manual_seed(0)
    model = patch(LlamaForCausalLM(LlamaConfig(
        vocab_size=124, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        initializer_range=0.2, tie_word_embeddings=tied)))
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config=CONFIG)[0]
    if engine.module.lm_head.weight.numel():
        raise ValueError("lm_head.weight: expected none of it here between passes")
    ids = torch.randint(124, (4, 2, 24), generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for batch in ids:
        loss = engine(input_ids=batch, labels=batch.where(batch > 20, -100), use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [torch.stack(losses), *(p.detach().clone() for p in model.parameters())]


def main():
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for tied in (False, True):
        expected, found = trained(lambda model: model, tied), trained(fl.integrations.transformers.patch, tied)
        error = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected))
        if dist.get_rank() == 0:
            print(f"ZeRO-3 of DeepSpeed {deepspeed.__version__}, {'tied' if tied else 'untied'}: {error:.0e} from logits", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that has done its work


if __name__ == "__main__":
    main()
