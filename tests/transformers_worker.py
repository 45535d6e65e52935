"""`python transformers_worker.py FOLDER`: two ranks, forks of a process that has imported, and a Llama of each wrapper, patched and not."""
import json
import multiprocessing
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fusedloss.integrations.transformers import patch
from transformers import LlamaConfig, LlamaForCausalLM


def model_of(tied: bool = False) -> nn.Module:
    "The same weights on every rank"
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                                        num_key_value_heads=2, tie_word_embeddings=tied))


def sharded(model: nn.Module, head: dict | None = None, **options) -> nn.Module:
    "Its layers apart, then what is left; the output layer apart with options of its own"
    options |= dict(mesh=DeviceMesh("cpu", [0, 1]))
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if head is not None:
        fully_shard(model.lm_head, **options, **head)
    return fully_shard(model, **options)


CASES = {  # whether tied, and what wraps it
    "DDP": (False, DistributedDataParallel), "FSDP2": (False, sharded), "FSDP2, tied": (True, sharded),
    "FSDP2, output layer apart": (False, lambda m: sharded(m, head={})),
    "FSDP2, output layer apart, kept": (False, lambda m: sharded(m, head=dict(reshard_after_forward=False))),
    "FSDP2, bf16": (False, lambda m: sharded(m, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))),
}


def gradients(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    "Loss and whole gradients of two passes, on this rank's tokens; ranks count unlike numbers of them"
    ids = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(dist.get_rank()))
    labels = ids.masked_fill(ids < 30 * dist.get_rank(), -100)
    for _ in range(2):
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
    return loss.detach(), [getattr(p.grad, "full_tensor", lambda: p.grad)() for p in model.parameters()]


def distance(tied: bool, wrap) -> tuple[float, float]:
    "How far the patched model's loss and gradients are from the other's"
    loss, grads = gradients(wrap(model_of(tied)))
    patched, ours = gradients(wrap(patch(model_of(tied))))
    return (loss - patched).abs().item(), max((a - b).abs().max().item() for a, b in zip(grads, ours, strict=True))


def work(rank: int, folder: str) -> None:
    "One rank: every case"
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/meeting")
    found = {name: distance(*case) for name, case in CASES.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    start = multiprocessing.get_context("fork")
    ranks = [start.Process(target=work, args=(rank, sys.argv[1])) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in ranks))
