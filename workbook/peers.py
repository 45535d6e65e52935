"""The losses that ours are measured beside, each defined once and named for what it is: PyTorch's own, and those of other libraries that are installed."""

__all__ = [
    "eager_logits",
    "eager_fp32_logits",
    "eager_fp32_softmax",
    "linear_peers",
    "logits_peers",
    "eager_cosface",
    "partial_fc_v2",
    "torch_ctc",
    "torch_linear_ctc",
]


import functools
import importlib.util
import sys
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def eager_logits(
    z: Tensor,  # [..., V]
    y: Tensor,  # [...], int64
) -> Tensor:  # scalar, of z's dtype
    "Mean cross entropy of logits in their own dtype."
    return F.cross_entropy(z.flatten(0, -2), y.flatten())


def eager_fp32_logits(
    z: Tensor,  # [..., V]
    y: Tensor,  # [...], int64
) -> Tensor:  # scalar, float32
    "Mean cross entropy of logits, softmax in fp32."
    log_p = F.log_softmax(z.flatten(0, -2), -1, dtype=torch.float32)  # z stays as it is
    return F.nll_loss(log_p, y.flatten())


def eager_fp32_softmax(
    x: Tensor,  # [N,H]
    w: Tensor,  # [V,H]
    y: Tensor,  # [N], int64
) -> Tensor:  # scalar, float32
    "Mean cross entropy of `x @ w.T`, all N×V scores in memory, softmax in fp32."
    return eager_fp32_logits(x @ w.T, y)


def _torch_chunked() -> dict[str, Callable]:
    options = torch.nn.LinearCrossEntropyOptions()  # AttributeError before PyTorch 2.13
    return {"PyTorch, chunked": functools.partial(F.linear_cross_entropy, options=options)}


def _liger() -> dict[str, Callable]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return {"Liger": liger_fused_linear_cross_entropy}


def _cut_cross_entropy() -> dict[str, Callable]:
    from cut_cross_entropy import linear_cross_entropy

    return {"CCE": linear_cross_entropy, "CCE exact": functools.partial(linear_cross_entropy, filter_eps=None)}


def _liger_logits() -> dict[str, Callable]:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return {"Liger": liger_cross_entropy}


PEER_NAMES = (
    "eager, fp32 softmax",
    "torch.compile",
    "PyTorch, chunked",
    "Liger",
    "Liger, CuTe",
    "CCE",
    "CCE exact",
    "QuACK",
    "PyTorch, checkpointed",
    "Liger, scaled",
)


def _peers(
    eager: Callable,
    libraries: tuple[Callable, ...],
    left_out: tuple[str, ...],
) -> dict[str, Callable]:
    "The eager loss, what a compiler makes of it, and the losses of libraries that can be imported."
    found = {"eager, fp32 softmax": eager, "torch.compile": torch.compile(eager, dynamic=False)}
    for library in libraries:
        try:
            found |= library()
        except (ImportError, AttributeError):
            pass
    return {name: loss for name, loss in found.items() if name not in left_out}


def linear_peers(
    *left_out: str,  # names
) -> dict[str, Callable]:  # by name, each called with x, w, y
    "Losses of a linear layer, PyTorch's and those of other libraries that can be imported."
    return _peers(eager_fp32_softmax, (_torch_chunked, _liger, _cut_cross_entropy), left_out)


def logits_peers(
    *left_out: str,  # names
) -> dict[str, Callable]:  # by name, each called with z, y; Liger's puts the gradient in z's place
    "Losses of logits that exist, likewise."
    return _peers(eager_fp32_logits, (_liger_logits,), left_out)


def _liger_cute() -> dict[str, Callable]:
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

    return {"Liger, CuTe": liger_fused_linear_cross_entropy_sm90}


def quack_rows(n: int, h: int) -> int:
    "Tokens of QuACK's chunks: its default, 4096, or half of H where a chunk would be square, which version 0.6.5 refuses."
    return h // 2 if min(4096, n) == h else 4096


def _quack() -> dict[str, Callable]:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def quack(x, w, y):
        (n, h), v = x.shape, len(w)
        if n % 8 or h % 8 or v % 8:
            raise ValueError(f"multiples of 8 wanted, got {n} × {h} × {v}")  # as its module asks
        return chunked_linear_cross_entropy(x, w, y, quack_rows(n, h), tuned=False)

    return {"QuACK": quack}


def brief_error(error: Exception) -> str:
    "An error in a few words, none of them a path."
    words = [word for word in str(error).split() if "/" not in word]
    return f"{type(error).__name__}: {' '.join(words)}"[:80]


def every_linear_peer() -> tuple[
    dict[str, Callable], dict[str, str]
]:  # called with x, w, y; by name, why one is missing
    "All losses of a linear layer that can be imported, those for Hopper GPUs among them."
    found, missing = _peers(eager_fp32_softmax, (), ()), {}
    wanted = {
        "PyTorch, chunked": _torch_chunked,
        "Liger": _liger,
        "Liger, CuTe": _liger_cute,
        "CCE": _cut_cross_entropy,
        "QuACK": _quack,
    }
    for name, library in wanted.items():
        try:
            found[name] = library()[name]
        except Exception as error:
            missing[name] = brief_error(error)  # a library may raise anything
    return found, missing


def eager_log_probs(
    x: Tensor,  # [N,H]
    w: Tensor,  # [V,H]
    y: Tensor,  # [N]
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:  # [N], [N]
    "Log-probabilities of the targets, and the entropy, all N×V of them in memory in fp32."
    log_p = F.log_softmax(x @ w.T, -1, dtype=torch.float32)
    found = log_p.gather(1, y[:, None])[:, 0]
    return found, -(log_p.exp() * log_p).sum(1) if entropy else None


def checkpointed_log_probs(
    # as `eager_log_probs`
    x: Tensor,
    w: Tensor,
    y: Tensor,
    entropy: bool = False,
    rows: int = 1024,  # tokens of a chunk
) -> tuple[Tensor, Tensor | None]:
    "`eager_log_probs` by chunks of tokens, whose logits backward makes again."
    chunks = [
        checkpoint(eager_log_probs, *part, entropy, use_reentrant=False)
        for part in zip(x.split(rows), [w] * len(x), y.split(rows))
    ]
    found, entropies = zip(*chunks)
    return torch.cat(found), torch.cat(entropies) if entropy else None


def _checkpointed() -> dict[str, Callable]:
    return {"PyTorch, checkpointed": checkpointed_log_probs}


def _liger_scaled() -> dict[str, Callable]:
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as scaled

    def liger(x, w, y, entropy=False):
        found = scaled.apply(x, w, y, 1.0, -100, 1, entropy)  # temperature, ignored label, tiles
        return (-found[0], found[1]) if entropy else (-found, None)

    return {"Liger, scaled": liger}


def log_probs_peers(
    *left_out: str,  # names
) -> dict[str, Callable]:  # by name, each called with x, w, y, and whether the entropy is asked for
    "Log-probabilities of a linear layer, PyTorch's and those of libraries that can be imported."
    return _peers(eager_log_probs, (_checkpointed, _liger_scaled), left_out)


def _step(loss: Callable) -> Callable:  # called with x, w (a DTensor), y
    "A step of a loss that takes each rank's own classes."

    def step(x, w, y):
        found = loss(x, w.to_local(), y)
        return found.detach(), *torch.autograd.grad(found, [x, w])

    return step


def _loss_parallel(mesh) -> dict[str, Callable]:
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import loss_parallel

    def step(x, w, y):
        with loss_parallel():
            z = F.linear(DTensor.from_local(x, mesh, [Replicate()], run_check=False), w)
            loss = F.cross_entropy(z if z.dtype == torch.float64 else z.float(), y)
            return loss.detach().to_local(), *torch.autograd.grad(loss, [x, w])

    return {"PyTorch, loss_parallel": step}


def _megatron(mesh) -> dict[str, Callable]:
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy as fused
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as plain
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as linear

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(mesh.size(), create_gloo_process_groups=False)
    group = mesh.get_group()
    logits = lambda x, w: linear(x, w, None, False, True, False, tp_group=group)  # no bias; dx is reduced
    return {
        "Megatron": _step(lambda x, w, y: plain(logits(x, w), y).mean()),
        "Megatron, compiled": _step(lambda x, w, y: fused(logits(x, w), y, group).mean()),
    }


def _liger_over_ranks(mesh) -> dict[str, Callable]:
    from liger_kernel.transformers.functional import liger_fused_linear_scaled_cross_entropy_tp as scaled

    name, group = "Liger, chunks", mesh.get_group()
    if importlib.util.find_spec("liger_cute_kernels"):
        from liger_cute_kernels import nvshmem, tvm_ffi
        from liger_kernel.ops.cute.fused_linear_scaled_cross_entropy_tp import is_available

        if not tvm_ffi.nvshmem_is_initialized():
            nvshmem.init_from_pg()
        nvshmem.resolve_team(group)
        if not is_available():
            raise RuntimeError("a native core without these losses, which would run by chunks")
        name = "Liger, NVSHMEM"

    def both(x, w, y):
        nll, entropy = scaled(x, w, y, group, return_entropy=True)
        return (entropy + nll).mean()

    return {name: _step(lambda x, w, y: scaled(x, w, y, group).mean()), f"{name}, log-probs": _step(both)}


def liger_pools(n: int, h: int, v: int) -> int:  # tokens, features, classes of a rank
    "Bytes that Liger's kernels over ranks hold outside PyTorch's allocator."
    from liger_cute_kernels import tvm_ffi

    forward = tvm_ffi.fused_linear_scaled_cross_entropy_forward_workspace_bytes(n, v)
    return forward + tvm_ffi.fused_linear_scaled_cross_entropy_backward_workspace_bytes(
        n, h, v, 1
    )  # tiles of a message


def end_peers():
    "Have libraries give back what they hold of the ranks, before process groups end."
    nvshmem = sys.modules.get("liger_cute_kernels.nvshmem")
    if nvshmem and sys.modules["liger_cute_kernels.tvm_ffi"].nvshmem_is_initialized():
        nvshmem.finalize()


def peers_over_ranks(
    mesh,  # of all ranks, in one dimension
) -> tuple[
    dict[str, Callable], dict[str, str]
]:  # by name, each called with x, w, y: loss, dx, dw; why a library is missing
    "Steps of the cross entropies over ranks that can be imported; a name that ends in log-probs adds the entropy to the loss."
    found, missing = {}, {}
    for name, library in {
        "PyTorch, loss_parallel": _loss_parallel,
        "Megatron": _megatron,
        "Liger, chunks": _liger_over_ranks,
    }.items():
        try:
            found |= library(mesh)
        except Exception as obstacle:
            missing[name] = brief_error(obstacle)
    return found, missing


def eager_cosface(
    x: Tensor,  # [N,H]
    w: Tensor,  # [V,H]
    y: Tensor,  # [N]
    margin: float = 0.35,
    scale: float = 64.0,
) -> Tensor:  # scalar, float32
    "Mean cross entropy of a cosine head with CosFace's margin, all N×V scores in memory."
    z = F.linear(F.normalize(x), F.normalize(w)).float()
    return F.cross_entropy(scale * (z - torch.zeros_like(z).scatter_(1, y[:, None], margin)), y)


def _drawn_classes(y: Tensor, n_classes: int, rate: float) -> Tensor:
    "The batch's own classes and random others, `rate` of all together, sorted; the own ones alone if they are more."
    own, size = y.unique(), int(rate * n_classes)
    if len(own) > size:
        return own
    order = torch.rand(n_classes, device=y.device)
    order[own] = 2.0  # above all random numbers
    return order.topk(size).indices.sort().values


class _OverwritingCrossEntropy(torch.autograd.Function):
    "Mean cross entropy whose probabilities, and then gradients, overwrite the logits; one backward pass."

    @staticmethod
    def forward(ctx, z, y):
        p = z.sub_(z.amax(1, keepdim=True)).exp_()
        p.div_(p.sum(1, keepdim=True))
        ctx.p, ctx.y = p, y
        return -p.gather(1, y[:, None]).clamp_min(1e-30).log().mean()

    @staticmethod
    def backward(ctx, g):
        p, y = ctx.p, ctx.y
        del ctx.p
        p[torch.arange(len(y), device=y.device), y] -= 1
        return p.mul_(g / len(y)), None


def partial_fc_v2(
    x: Tensor,  # [N,H]
    w: Tensor,  # [V,H]; its gradient has all rows
    y: Tensor,  # [N]
    rate: float = 1.0,  # of the classes that are scored
    margin: float = 0.4,
    scale: float = 64.0,
) -> Tensor:  # scalar, float32
    "The algorithm, not the code, of insightface's `PartialFC_V2` on one GPU, with CosFace's margin."
    rows, place = w, y
    if rate < 1:
        classes = _drawn_classes(y, len(w), rate)
        rows, place = w[classes], torch.searchsorted(classes, y)
    z = F.linear(F.normalize(x), F.normalize(rows))
    z = (z if z.dtype == torch.float64 else z.float()).clamp(-1, 1)
    z[torch.arange(len(y), device=y.device), place] -= margin
    return _OverwritingCrossEntropy.apply(scale * z, place)


def torch_ctc(
    z: Tensor,  # [T,N,C], logits
    # as PyTorch takes them
    targets: Tensor,
    input_lengths,
    target_lengths,
    blank: int = 0,
    reduction: str = "mean",
) -> Tensor:
    "PyTorch's CTC loss, of fp32 log-probabilities."
    wide = z if z.dtype == torch.float64 else z.float()
    return F.ctc_loss(wide.log_softmax(-1), targets, input_lengths, target_lengths, blank, reduction)


def torch_linear_ctc(
    x: Tensor,  # [T,N,H]
    w: Tensor,  # [C,H]
    *rest,  # as `torch_ctc`
) -> Tensor:
    "PyTorch's CTC loss of a linear layer, all T×N×C logits in memory."
    return torch_ctc(F.linear(x, w), *rest)
