"""Megatron Core's GPT model with its loss from hidden states, on two processes of a CPU, against the same model with its own loss.

    torchrun --nproc-per-node 2 examples/with_megatron.py

Embedding, `GPTModel.forward`, output layer and loss are Megatron's. Its layers want a GPU, so one linear layer stands for the decoder.
"""
import copy
import functools
import os
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fusedloss as fl

CLASSES, PADDED, FEATURES, TOKENS = 101, 128, 16, 8


@functools.cache
def mesh_of(group, device_type="cuda"):
    "A process group as a mesh, made once"
    print("fusedloss takes the place of Megatron's output layer and loss")
    return DeviceMesh.from_group(group, device_type)


def weight_of(output_layer, output_weight, config):
    "The weight, after the forward pre-hook of Megatron's DDP that waits for it under --overlap-param-gather, since the layer's forward is not called"
    waits = list(output_layer._forward_pre_hooks.values())
    others = [hook for hook in waits if hook.__module__ != "megatron.core.distributed.distributed_data_parallel"]
    if others or output_layer._forward_hooks or output_layer._backward_hooks or output_layer._backward_pre_hooks:
        raise ValueError("output_layer: expected no hooks but those of Megatron's DDP, got others (of FSDP, or of an adapter)")
    if config.mtp_num_layers and config.gradient_accumulation_fusion:
        raise ValueError("multi-token prediction: expected --no-gradient-accumulation-fusion, or DDP drops this loss's gradient of the weight")
    for hook in waits:
        hook(output_layer)
    return output_layer.weight if output_weight is None else output_weight  # a tied weight is given, an untied one is the layer's


def losses_of_tokens(*, hidden_states, output_layer, output_weight, labels, context, config, **others):
    "Losses [b,s] of hidden states [s,b,H], as `GPTModel` returns them; `context` is the mesh of the tensor-parallel ranks"
    weight = weight_of(output_layer, output_weight, config)
    if config.sequence_parallel:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)  # its backward splits
    losses = fl.sharded_linear_cross_entropy(
        hidden_states, weight, labels.T, logit_scale=config.mup_output_mult if config.use_mup else 1.0,
        reduction="none", mesh=context, num_classes=weight.shape[0] * context.size())
    return losses.T


def gathered_and_added(*, config, hidden_states, **given):
    "The mistake: the gather as the output layer calls it, whose backward adds the ranks' gradients, which are whole already"
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    given["config"] = copy.copy(config)
    given["config"].sequence_parallel = False
    if config.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states)
    return losses_of_tokens(hidden_states=hidden_states, **given)


class Decoder(nn.Module):
    "A linear layer in the place of Megatron's decoder; under sequence parallelism of this rank's tokens"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def set_input_tensor(self, tensor): pass

    def forward(self, hidden_states, **others): return self.layer(hidden_states).tanh()


def gpt(ranks, **options):
    "A Megatron GPT model in float64 with an output layer over the ranks"
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    config = TransformerConfig(
        num_layers=1, hidden_size=FEATURES, num_attention_heads=4, use_cpu_initialization=True, tensor_model_parallel_size=ranks,
        hidden_dropout=0.0, gradient_accumulation_fusion=False)
    model = GPTModel(config, get_gpt_layer_local_spec(normalization="LayerNorm"), PADDED, TOKENS, position_embedding_type="learned_absolute", **options)
    torch.manual_seed(0)
    model.decoder = Decoder()
    return model.double()


def sequence_parallel(model):
    "The model with hidden states of a part of the tokens on each rank"
    model.config.sequence_parallel = True
    model.output_layer.sequence_parallel, model.output_layer.allreduce_dgrad = True, False
    return model


def gradients(model, mask, **how):
    "Losses of tokens, and the gradients of their mean over a mask, which Megatron adds over ranks for the decoder of a part of the tokens"
    made = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(CLASSES, (2, *mask.shape), generator=made)
    model.zero_grad()
    losses = model(ids, torch.arange(TOKENS).expand_as(ids), None, labels=labels, **how)
    ((losses * mask).sum() / mask.sum()).backward()
    if model.config.sequence_parallel:
        for p in model.decoder.parameters():
            dist.all_reduce(p.grad)
    return [losses.detach(), *(p.grad.clone() for p in model.parameters())]


def tensor_ranks(size=None):
    "The mesh of Megatron's tensor-parallel ranks, by default all processes, on a CPU"
    from megatron.core import parallel_state, tensor_parallel
    torch.cuda.current_device = lambda: torch.device("cpu")  # where Megatron makes buffers
    tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)  # nothing is dropped
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size or dist.get_world_size())
    return mesh_of(parallel_state.get_tensor_model_parallel_group(), "cpu")


def after_a_step(processor, context):
    "Losses under Megatron's distributed optimizer with overlap_param_gather, when each data rank has just changed its own part of the weights"
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    torch.manual_seed(1)
    model = gpt(1)
    how = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1)
    model = DistributedDataParallel(model.config, how, model)
    for bucket in (bucket for buffer in model.buffers for bucket in buffer.buckets):
        bucket.param_data.view(dist.get_world_size(), -1)[dist.get_rank()] += 0.1
    ids = torch.arange(2 * TOKENS).view(2, TOKENS)
    return model(ids, torch.arange(TOKENS).expand_as(ids), None, labels=ids, output_processor=processor, output_processor_context=context).detach()


def without_waiting(*, output_layer, **given):
    "The mistake: the weight without the hook that waits for it, which is the old one if the gather is slower than the decoder"
    layer = nn.Linear(1, 1, bias=False)  # which has no hooks
    layer.weight = output_layer.weight
    return losses_of_tokens(output_layer=layer, **given)


def distance_after_a_step(processor, context):
    "How far these losses are from those with Megatron's own loss: the largest relative difference of any rank"
    found, expected = after_a_step(processor, context), after_a_step(None, None)
    error = (found - expected).norm() / expected.norm()
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return error.item()


def distance(model, processor, context, rows=2):
    "How far losses and gradients with an output processor are from those with Megatron's own loss: the largest relative difference of any rank"
    mask = torch.rand(rows, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.6
    expected = gradients(model, mask)
    found = gradients(model, mask, output_processor=processor, output_processor_context=context)
    error = torch.tensor(max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected)))
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return error.item()


def main():
    import megatron.core
    dist.init_process_group("gloo")
    mesh, ranks = tensor_ranks(), dist.get_world_size()
    errors = {
        "tensor parallel": distance(gpt(ranks), losses_of_tokens, mesh),
        "tied weights": distance(gpt(ranks, share_embeddings_and_output_weights=True), losses_of_tokens, mesh),
        "sequence parallel": distance(sequence_parallel(gpt(ranks)), losses_of_tokens, mesh),
        "gathered and added": distance(sequence_parallel(gpt(ranks)), gathered_and_added, mesh)}
    from megatron.core import parallel_state
    parallel_state.destroy_model_parallel()
    mesh = tensor_ranks(1)  # all processes are data ranks now
    errors["overlap_param_gather"] = distance_after_a_step(losses_of_tokens, mesh)
    old = [distance_after_a_step(without_waiting, mesh) for _ in range(10)]
    if dist.get_rank() == 0:
        print(f"megatron-core {megatron.core.__version__}", *(f"{name}: {error:.0e} from Megatron's own loss" for name, error in errors.items()), sep="\n")
        print(f"without waiting: {sum(error > 1e-6 for error in old)} of {len(old)} steps wrong, by up to {max(old):.0e}", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that has done its work


if __name__ == "__main__":
    main()
