"""verl's actor with log-probabilities and entropies from hidden states, on a CPU, against the same actor with verl's own function.

    python examples/with_verl.py
    torchrun --nproc-per-node 2 examples/with_verl.py   # under verl's FSDP2; and with Megatron Core, if it is installed

A random Llama of transformers, whose forward verl replaces as it does for `use_fused_kernels`.
"""
import os
from importlib.util import find_spec
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

import fusedloss as fl


def whole(weight, dtype):
    "A weight that FSDP2 wraps apart, in all its rows; their gradients are averaged over the ranks in fp32, as FSDP2 does"
    mesh = weight.device_mesh
    weight = weight.redistribute(placements=[Replicate()] * mesh.ndim, forward_dtype=dtype, backward_dtype=torch.float32)
    weight = weight.to_local(grad_placements=[Partial()] * mesh.ndim)
    if weight.requires_grad:
        weight.register_hook(lambda g: g / mesh.size())
    return weight


def linear_cross_entropy(hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
    "Log-probabilities and entropies of labels, in the place of `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy`"
    if reduction != "none" or dist_process_group is not None:
        raise ValueError(f"expected reduction='none' of a whole weight, got {reduction!r}, {dist_process_group}: Megatron's actor calls `log_probs_of_tokens`")
    weight = whole(weight, hidden.dtype) if isinstance(weight, DTensor) else weight.to(hidden.dtype)
    found = fl.linear_log_probs(hidden, weight, labels, temperature=temperature, entropy=True)
    return found.log_probs, found.entropy


def log_probs_of_tokens(*, hidden_states, output_layer, output_weight, labels, context, config, **others):
    "Log-probabilities and entropies [s] of packed tokens [s,1,H], in the place of `verl.models.mcore.model_forward_fused.fused_output_processor`"
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from verl.utils.model import CausalLMOutputForPPO
    from with_megatron import mesh_of, weight_of
    mesh = mesh_of(parallel_state.get_tensor_model_parallel_group(), hidden_states.device.type)
    weight = weight_of(output_layer, output_weight, config)
    if config.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)  # its backward splits
    found = fl.sharded_linear_log_probs(
        hidden_states.squeeze(1), weight, labels.squeeze(0), temperature=context.temperature, entropy=True,
        mesh=mesh, num_classes=weight.shape[0] * mesh.size())
    return CausalLMOutputForPPO(hidden_states=hidden_states, log_probs=found.log_probs, entropy=found.entropy)


def install(megatron=False):
    "Tell verl of these functions in each worker, where `actor_rollout_ref.model.external_lib` is a module that calls this"
    import verl.utils.kernel.linear_cross_entropy as kernel
    kernel.linear_cross_entropy = linear_cross_entropy  # `fused_kernel_options.impl_backend: triton` calls it
    if megatron:
        import verl.models.mcore.model_forward_fused as hook
        hook.fused_output_processor = log_probs_of_tokens
    print("fusedloss takes the place of verl's linear_cross_entropy")


def actor(backend, tied):
    "A random Llama in float32 with verl's forward for a backend"
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.models.transformers.monkey_patch import patch_forward_with_backends
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        initializer_range=0.2, tie_word_embeddings=tied))
    model.__class__ = type("Actor", (LlamaForCausalLM,), {})  # verl patches the class
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend=backend)
    return model


def drawn():
    "Tokens, their labels, advantages, and a mask of what counts, of the first sequence less than of the second"
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(1000, (2, 48), generator=made)
    return ids, ids.roll(-1, -1), torch.randn(2, 48, generator=made), torch.arange(48) > torch.tensor([[30], [5]])


def step(model, temperature, data, factor):
    "Log-probabilities, entropies and all gradients of a policy's loss, the sum over tokens that count times a factor"
    ids, labels, advantages, counts = data
    out = model(input_ids=ids, temperature=temperature, shift_labels=labels, return_dict=True, use_cache=False)
    (-(out.log_probs * advantages + 0.01 * out.entropy) * counts).sum().mul(factor).backward()
    return [out.log_probs.detach(), out.entropy.detach(), *(p.grad for p in model.parameters())]


def distance(found, expected):
    "The largest relative difference"
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected))


def under_fsdp2(tied):
    "The same tokens over the ranks, under verl's own wrapping, of which the output layer is apart if it is not tied: the gradients' error"
    from verl.utils.fsdp_utils import apply_fsdp2
    data, ranks, rank = drawn(), dist.get_world_size(), dist.get_rank()
    factor = 1 / data[3].sum()
    expected = step(actor("triton", tied), 0.7, data, factor)
    model = actor("triton", tied)
    apply_fsdp2(model, dict(mesh=dist.init_device_mesh("cpu", (ranks,))), {})
    found = step(model, 0.7, [t.chunk(ranks)[rank] for t in data], factor * ranks)
    return distance([g.full_tensor() for g in found[2:]], expected[2:])


def with_megatron_core():
    "verl's hook of Megatron Core, against minus the losses of Megatron: errors with tensor- and with sequence-parallel ranks"
    import with_megatron as other
    mesh = other.tensor_ranks()

    def losses(context, **given):
        return -log_probs_of_tokens(context=SimpleNamespace(temperature=1.0), **given).log_probs[None]
    ranks = mesh.size()
    return {"tensor parallel": other.distance(other.gpt(ranks), losses, mesh, rows=1),
            "sequence parallel": other.distance(other.sequence_parallel(other.gpt(ranks)), losses, mesh, rows=1)}


def main():
    import verl
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # FSDP2 would give each process a GPU of its own, if there are any
    install()
    lines = [f"verl {verl.__version__}"]
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        lines += [f"FSDP2, {'tied' if tied else 'output layer apart'}: {under_fsdp2(tied):.0e} from one process" for tied in (True, False)]
        if find_spec("megatron"):
            lines += [f"Megatron, {name}: {error:.0e} from Megatron's own loss" for name, error in with_megatron_core().items()]
    else:
        data = drawn()
        for tied in (False, True):
            for temperature in (1.0, 0.7):
                expected, found = (step(actor(backend, tied), temperature, data, 1 / 48) for backend in ("torch", "triton"))
                lines.append(f"{'tied' if tied else 'untied'}, temperature {temperature}: {distance(found, expected):.0e} from verl's own function")
    if int(os.environ.get("RANK", 0)) == 0:
        print(*lines, sep="\n", flush=True)
    if dist.is_initialized():
        dist.barrier()
        os._exit(0)  # gloo's threads may abort a process that has done its work


if __name__ == "__main__":
    main()
