"""A model under FSDP2, DDP and tensor parallelism on two processes of a CPU: how far its gradients are from one process's.

    torchrun --nproc-per-node 2 examples/wrappers.py
"""
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, Shard
from torch.nn.parallel import DistributedDataParallel

import fusedloss as fl


class Model(nn.Module):
    "A backbone and a head of 11 classes; the loss is in forward, where wrappers prepare to reduce gradients"
    def __init__(self, **options):
        super().__init__()
        self.body, self.head, self.options = nn.Linear(6, 6), nn.Linear(6, 11, bias=False), options

    def forward(self, x, y):
        return fl.linear_cross_entropy(self.body(x), self.head.weight, y, **self.options)


def fsdp_at_the_root(model, mesh):
    "In forward the head's weight is whole; FSDP2 averages all gradients over ranks"
    return fully_shard(model, mesh=mesh)


def fsdp_with_its_head_apart(model, mesh):
    "In forward the head's weight is a DTensor; FSDP2 averages the backbone's gradients alone"
    model.options = dict(backbone_reduction="mean")
    fully_shard(model.body, mesh=mesh)
    fully_shard(model.head, mesh=mesh)
    return model


def ddp(model, mesh):
    "DDP averages all gradients over ranks, if its own forward is called and not its module's"
    return DistributedDataParallel(model, process_group=mesh.get_group())


def tensor_parallel(model, mesh):
    "The head's classes over ranks; every rank has the same tokens"
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(0)]))
    return model


def farthest(found, wanted):
    "The largest relative error of any parameter's gradient"
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in found.parameters()]
    return max(((g - p.grad).norm() / p.grad.norm()).item() for g, p in zip(whole, wanted.parameters()))


def main():
    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    torch.manual_seed(0)
    start, x, y = Model().double(), torch.randn(8, 6, dtype=torch.float64), torch.arange(8)
    one = copy.deepcopy(start)
    one(x, y).backward()  # one process with all tokens
    own = x.chunk(mesh.size())[rank], y.chunk(mesh.size())[rank]
    for wrap in (fsdp_at_the_root, fsdp_with_its_head_apart, ddp, tensor_parallel):
        model = wrap(copy.deepcopy(start), mesh)
        model(*((x, y) if wrap is tensor_parallel else own)).backward()
        error = farthest(model, one)
        assert error < 1e-12, f"{wrap.__name__}: {error}"
        if rank == 0:
            print(f"{wrap.__name__}: every gradient within {error:.0e} of one process", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that has done its work


if __name__ == "__main__":
    main()
