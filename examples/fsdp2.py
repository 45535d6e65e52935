"""A language model that FSDP2 shards over two processes of a CPU, trained beside one process that has all tokens.

    torchrun --nproc-per-node 2 examples/fsdp2.py
"""
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fusedloss as fl
from fusedloss.core.tables import si
from workbook.measure import peak_memory

CLASSES, FEATURES, ROWS, TOKENS, STEPS = 8000, 32, 4, 32, 2
IGNORED = 40  # labels at the start of a batch: the first rank has fewer valid tokens than the others
BUDGET = 2 * 2**20  # bytes for the loss beyond its gradients


class LanguageModel(nn.Module):
    "An embedding, one layer and an output layer; the loss is in forward, where FSDP2 prepares to reduce gradients"
    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(CLASSES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.lm_head = nn.Linear(FEATURES, CLASSES, bias=False)
        self.options, self.factor = dict(memory_budget=BUDGET), 1.0

    def forward(self, ids, labels):
        states = self.layer(self.embed(ids)).tanh()
        return self.factor * fl.linear_cross_entropy(states, self.lm_head.weight, labels, **self.options)


def usual_logits(model):
    "Logits in memory, to compare with; else as `sum_of_tokens`"
    def forward(ids, labels):
        logits = model.lm_head(model.layer(model.embed(ids)).tanh())
        return model.factor * nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    model.forward = forward
    return sum_of_tokens(model)


def mean_of_ranks(model):
    "Wrapped at the root; each rank takes the mean over its own tokens, and FSDP2 averages the ranks"
    fully_shard(model.layer)
    return fully_shard(model)


def sum_of_tokens(model):
    "Wrapped at the root; the sum over tokens, divided by the number of all ranks' tokens: FSDP2 divides by the ranks once more"
    model.options |= dict(reduction="sum")
    model.factor = dist.get_world_size() / (ROWS * TOKENS - IGNORED)
    return mean_of_ranks(model)


def head_apart(model):
    "The output layer stays sharded, a DTensor in forward; the loss is of all ranks' tokens, FSDP2 averages the rest"
    model.options |= dict(backbone_reduction="mean")
    fully_shard(model.lm_head)
    return mean_of_ranks(model)


def without_backbone_reduction(model):
    "The same, without a word on how the backbone's gradients are reduced"
    head_apart(model).options.pop("backbone_reduction")
    return model


def batch(step, tokens=TOKENS):
    "Tokens [B,T] and labels of all ranks; the first labels are ignored"
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(CLASSES, (ROWS, tokens + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels.view(-1)[:IGNORED] = -100
    return ids[:, :-1], labels


def own(tensors):
    "The rows of a batch that are this rank's"
    return [t.chunk(dist.get_world_size())[dist.get_rank()] for t in tensors]


def trained(model, rows):
    "A model after some steps of AdamW, each on two batches of the rows that a function picks"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for last in (False, True):  # gradients are reduced once, after the second batch
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            model(*rows(batch(2 * step + last))).backward()
        optimizer.step()
    return model


def distance(found, wanted):
    "The largest relative difference of any gradient of the last step and of any parameter after it"
    whole = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
    pairs = [pair for p, q in zip(found.parameters(), wanted.parameters()) for pair in ((p.grad, q.grad), (p, q))]
    with torch.no_grad():
        return max(((whole(a) - b).norm() / b.norm()).item() for a, b in pairs)


def peak_of(model):
    "Bytes of this rank at the peak of a forward and a backward pass, on eight times as many tokens"
    rows = own(batch(0, 8 * TOKENS))
    return peak_memory(lambda: model(*rows).backward())


def main():
    dist.init_process_group("gloo")
    init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    start = LanguageModel().double()
    one = trained(copy.deepcopy(start), lambda tensors: tensors)
    for wrap in (usual_logits, sum_of_tokens, head_apart, mean_of_ranks, without_backbone_reduction):
        try:
            error = distance(trained(wrap(copy.deepcopy(start)), own), one)
            line = f"{error:.0e} from one process, {si(peak_of(wrap(copy.deepcopy(start).float())), 'B')} at the peak"
        except ValueError as error:
            line = f"ValueError: {error}"
        if dist.get_rank() == 0:
            print(f"{wrap.__name__}: {line}", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that has done its work


if __name__ == "__main__":
    main()
