"""torchtitan's Llama under its own FSDP and tensor parallelism with a loss from hidden states, on four processes of a CPU, against its chunked loss.

    torchrun --nproc-per-node 4 examples/with_torchtitan.py
"""
import os
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import fusedloss as fl
from torchtitan.components.loss import ChunkedLossWrapper


class FusedLoss(ChunkedLossWrapper):
    "The loss of hidden states: the trainer gives every `ChunkedLossWrapper` the output layer, and its model leaves out the logits"
    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        memory_budget: int | None = None

    def __init__(self, config, *, compile_config=None):
        self.lm_head, self.memory_budget = None, config.memory_budget
        print("fusedloss takes the place of torchtitan's ChunkedLossWrapper")

    def __call__(self, pred, labels, global_valid_tokens=None, **others):
        if others:
            raise ValueError(f"expected hidden states, labels and the number of valid tokens, got {', '.join(others)} too")
        if type(self.lm_head).forward is not nn.Linear.forward or self.lm_head.bias is not None:
            raise ValueError(f"lm_head: expected a layer that multiplies by its weight alone, got {type(self.lm_head).__name__} with a forward of its own or a bias")
        if isinstance(self.lm_head, FSDPModule):
            self.lm_head.unshard()  # the weight is whole over data ranks; over tensor ranks it stays split, as a DTensor
        if self.lm_head.weight.shape[0] != self.lm_head.out_features:
            raise ValueError(f"lm_head.weight: expected {self.lm_head.out_features} rows, got {self.lm_head.weight.shape[0]}: this rank's, in a plain tensor")
        loss = fl.linear_cross_entropy(pred, self.lm_head.weight, labels, reduction="sum", memory_budget=self.memory_budget)
        if isinstance(self.lm_head, FSDPModule) and not loss.requires_grad:
            self.lm_head.reshard()  # in validation no backward pass does
        return loss if global_valid_tokens is None else loss / global_valid_tokens, {}


class MeanOfRanks(FusedLoss):
    "The mistake: each rank's mean over its own tokens, where the trainer adds what ranks and micro-batches give"
    @dataclass(kw_only=True, slots=True)
    class Config(FusedLoss.Config): ...  # an inherited one builds its own class

    def __call__(self, pred, labels, global_valid_tokens=None, **others):
        mean = super().__call__(pred, labels, (labels != -100).sum())[0]
        return mean / dist.get_world_size(), {}


STEPS, ACCUMULATED, ROWS, TOKENS = 2, 2, 2, 32


def parallel(tp=1, cp=1, tied=False):
    "The debug model of torchtitan over all processes, and its meshes"
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import parallel_dims, ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry, parallelize
    parallel_dims.device_type = "cpu"
    parallelize.apply_cp_to_forward = lambda *_: None  # ring attention has no CPU kernel: each part of a sequence attends to itself
    how = ParallelismConfig(tensor_parallel_degree=tp, context_parallel_degree=cp, spmd_backend="partial_dtensor", context_parallel_load_balancer=None)
    training = TrainingConfig(mixed_precision_param="float32", seq_len=TOKENS)
    dims = ParallelDims.from_config(how, dist.get_world_size())
    set_spmd_backend(how.spmd_backend)
    dims.build_mesh()
    spec = model_registry("debugmodel")
    config = spec.model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # FlexAttention has no backward pass on a CPU
    config.enable_weight_tying = tied
    config.update_from_config(config=SimpleNamespace(parallelism=how, training=training, debug=SimpleNamespace(moe_force_load_balance=False)))
    config.layers = config.layers[:1]
    with torch.device("meta"):
        model = config.build()
    spec.parallelize_fn(model, parallel_dims=dims, training=training, parallelism=how, compile_config=CompileConfig(enable=False),
                        ac_config=None, dump_folder=".")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it adds
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    model._skip_lm_head = True  # as the trainer sets it
    return model, dims


def trained(loss_class, **how):
    "Losses of steps and of validation, and gradients, as torchtitan's trainer counts tokens and takes steps"
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.distributed.utils import get_spmd_context
    model, dims = parallel(**how)
    of_class = CrossEntropyLoss.Config(global_vocab_size=2048)
    loss_of = loss_class.Config(loss_fn=of_class, num_chunks=4).build()
    loss_of.set_lm_head(model.lm_head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch, losses, gradients = dims.get_mesh("batch"), [], []
    made = torch.Generator().manual_seed(1)
    over = dims.get_optional_mesh("loss")

    def part(t, mesh, dim):
        return t.chunk(mesh.size(), dim)[mesh.get_local_rank()]

    with get_spmd_context(parallel_dims=dims)():
        for _ in range(STEPS):
            ids, labels = torch.randint(2048, (2, ACCUMULATED, ROWS * batch.size(), TOKENS), generator=made)
            labels[:, 0, :TOKENS - 5] = -100
            for micro in range(ACCUMULATED):
                mine = [part(t[micro], batch, 0) for t in (ids, labels)]
                if dims.cp_enabled:
                    mine = [part(t, dims.get_mesh("cp"), 1) for t in mine]
                loss, _ = loss_of(model(mine[0]), mine[1], (labels != -100).sum())
                loss.backward()
                loss = (loss.to_local() if hasattr(loss, "to_local") else loss).detach()
                dist.all_reduce(loss, group=over.get_group())
                losses.append(loss)
            gradients += [p.grad.full_tensor() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss, _ = loss_of(model(mine[0]), mine[1])
            losses.append(loss.to_local() if hasattr(loss, "to_local") else loss)
    return [torch.stack(losses), *gradients]


def main():
    from importlib.metadata import version
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # FSDP2 would give each process a GPU of its own, if there are any
    dist.init_process_group("gloo")
    told = print if dist.get_rank() == 0 else lambda *_, **__: None
    told(f"torchtitan {version('torchtitan')}")
    cases = {
        "FSDP": (FusedLoss, {}), "FSDP, tied weights": (FusedLoss, dict(tied=True)), "FSDP and tensor parallel": (FusedLoss, dict(tp=2)),
        "FSDP and context parallel": (FusedLoss, dict(cp=2)), "mean of ranks": (MeanOfRanks, {})}
    for name, (kind, how) in cases.items():
        expected, found = (trained(k, **how) for k in (ChunkedLossWrapper, kind))
        error = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected))
        told(f"{name}: {error:.0e} from torchtitan's own loss", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that has done its work


if __name__ == "__main__":
    main()
