"""Trainers of TRL take log-probabilities and entropies from our losses: no line of a training script changes."""

__all__ = ["patch", "unpatch"]


import contextlib
import functools
import importlib
import inspect
import itertools
import sys
import warnings
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import nn, Tensor

from fusedloss.core.checks import expect
from fusedloss.divergence import linear_divergence
from fusedloss.integrations.transformers import (
    computed,
    inner_model,
    is_partitioned,
    is_scaled,
    lazy_logits,
    LazyLogits,
    of_hidden_dtype,
    output_layer,
    with_product,
)
from fusedloss.logprobs import linear_log_probs, log_probs


def head_log_probs(
    original: Any,  # TRL's function
    hidden: Tensor,  # [N,H]
    weight: Tensor,  # [V,H]
    bias: Optional[Tensor],  # [V]
    targets: Tensor,  # [N]
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: Optional[float] = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
) -> tuple[Optional[Tensor], ...]:  # [N] each, in the order of `outputs`; None if not asked for
    "Log-probabilities of the targets, and what else of `outputs` is asked for."
    if "log_sum_sq_probs" in outputs or is_partitioned(weight):
        return original.apply(
            hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
        )
    weight, bias = of_hidden_dtype(hidden, weight, bias)
    found = linear_log_probs(
        hidden,
        weight,
        targets,
        linear_bias=bias,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=final_logit_softcapping,
        entropy="entropy" in outputs,
        mean_logits="mean_logits" in outputs,
        target_rank="is_top1" in outputs,
    )
    leads = None if found.target_rank is None else ((found.target_rank == 0) & found.log_probs.isfinite())
    return found.log_probs, found.entropy, None, found.mean_logits, leads


@torch.no_grad()
def head_entropy(
    hidden: Tensor,  # [N,H]
    weight: Tensor,  # [V,H]
    bias: Optional[Tensor],  # [V]
    temperature: float,
    softcap: Optional[float],
) -> Tensor:  # [N], nats
    "The entropy of each token's softmax."
    anything = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    return linear_log_probs(
        hidden, weight, anything, linear_bias=bias, temperature=temperature, softcap=softcap, entropy=True
    ).entropy


def head_divergence(
    original: Any,  # TRL's function
    # [N,H] [V,H] [V]
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Optional[Tensor],
    # their H its own
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Optional[Tensor],
    beta: float,
    temperature: float = 1.0,
    student_logit_scale: float = 1.0,
    student_final_logit_softcapping: Optional[float] = None,
    teacher_logit_scale: float = 1.0,
    teacher_final_logit_softcapping: Optional[float] = None,
) -> tuple[Tensor, Tensor]:  # [N] both, the latter without gradient
    "Each token's divergence, and the student's entropy."
    scaled = (student_logit_scale, teacher_logit_scale) != (1.0, 1.0)
    if scaled or is_partitioned(student_weight) or is_partitioned(teacher_weight):
        return original.apply(
            student_hidden,
            student_weight,
            student_bias,
            teacher_hidden,
            teacher_weight,
            teacher_bias,
            beta,
            temperature,
            student_logit_scale,
            student_final_logit_softcapping,
            teacher_logit_scale,
            teacher_final_logit_softcapping,
        )
    head = of_hidden_dtype(student_hidden, student_weight, student_bias)
    teacher = of_hidden_dtype(teacher_hidden, teacher_weight, teacher_bias)
    divergence = linear_divergence(
        student_hidden,
        head[0],
        teacher_hidden,
        teacher[0],
        kind="jsd",
        beta=beta,
        temperature=temperature,
        softcap=student_final_logit_softcapping,
        reduction="none",
        teacher_softcap=teacher_final_logit_softcapping,
        linear_bias=head[1],
        teacher_bias=teacher[1],
    )
    return divergence, head_entropy(student_hidden, *head, temperature, student_final_logit_softcapping)


def sum_of_divergences(
    # [n,V] both
    student: LazyLogits,
    teacher: LazyLogits,
    beta: float,
    temperature: float,
) -> Tensor:  # a scalar
    "The sum over tokens of their divergences, of logits that stay uncomputed."

    def of_both(tx, tw, nothing, linear_bias):
        tw, tb = of_hidden_dtype(tx, tw, linear_bias)
        return with_product(student, functools.partial(of_student, (tx, tw, tb)), nothing)

    def of_student(known, x, w, nothing, linear_bias):
        (tx, tw, tb), (w, b) = known, of_hidden_dtype(x, w, linear_bias)
        return linear_divergence(
            x,
            w,
            tx,
            tw,
            kind="jsd",
            beta=beta,
            temperature=temperature,
            softcap=student.cap,
            teacher_softcap=teacher.cap,
            reduction="sum",
            linear_bias=b,
            teacher_bias=tb,
        )

    return with_product(teacher, of_both, torch.empty(0))


def logits_divergence(
    original: Callable,  # TRL's function
    student_logits: Tensor | LazyLogits,  # [B,T,V]
    teacher_logits: Tensor | LazyLogits,  # [B,T,V]
    labels: Optional[Tensor] = None,  # [B,T], -100 where nothing counts
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Optional[Tensor | int] = None,
) -> Tensor:  # a scalar
    "GKD's loss: the sum of divergences, by the number of tokens."
    rest = labels, beta, temperature, reduction, num_items_in_batch
    if not isinstance(student_logits, LazyLogits):
        return original(student_logits, teacher_logits, *rest)
    scaled = is_scaled(student_logits) or is_scaled(teacher_logits)
    if scaled or labels is None or reduction != "batchmean":
        with torch.no_grad():
            teacher_logits = computed(teacher_logits)
        return original(computed(student_logits), teacher_logits, *rest)
    counts = labels != -100
    total = sum_of_divergences(student_logits[counts], teacher_logits[counts], beta, temperature)
    if num_items_in_batch is None:
        return total / counts.sum().clamp_min(1)
    return total / torch.as_tensor(num_items_in_batch).to(total.device)


def can_wait(
    model: nn.Module,  # as it is called
    inner: nn.Module,  # and without its wrapper
) -> bool:
    "Whether a model may leave its logits to their divergence."
    ddp = isinstance(model, nn.parallel.DistributedDataParallel) and not model.find_unused_parameters
    if not (model is inner or ddp):
        return False
    try:
        with lazy_logits(inner):
            head = output_layer(inner_model(inner))
    except ValueError:
        return False
    return not any(map(is_partitioned, head.parameters()))


def gkd_loss(
    original: Callable,  # TRL's method
    self: Any,  # TRL's trainer
    model: nn.Module,
    inputs: dict[str, Tensor],
    return_outputs: bool = False,
    num_items_in_batch: Optional[Tensor | int] = None,
) -> Any:  # a scalar; and the student's outputs, if they are asked for
    "The loss of `GKDTrainer`, whose models wait with their logits."
    models = {m: self.accelerator.unwrap_model(m) for m in (model, self.teacher_model)}
    with contextlib.ExitStack() as waiting:
        if not return_outputs and all(itertools.starmap(can_wait, models.items())):
            for inner in models.values():
                waiting.enter_context(lazy_logits(inner))
        return original(self, model, inputs, return_outputs, num_items_in_batch)


MASKED = -(2**31)


def unmasked(
    # [...] both
    index: Tensor,
    row_mask: Optional[Tensor],
) -> Tensor:
    "The classes of the positions that matter."
    return index if row_mask is None else index.masked_fill(row_mask == 0, MASKED)


def logits_log_probs(
    # TRL's function; [...,V], [...] or [...,K]
    original: Callable,
    logits: Tensor,
    index: Tensor,
    temperature: float = 1.0,
    row_mask: Optional[Tensor] = None,
) -> Tensor:  # of the index's shape
    "Log-probabilities of the classes of an index; 0 where the mask is."
    if index.shape != logits.shape[:-1]:
        return original(logits, index, temperature, row_mask)
    return log_probs(logits, unmasked(index, row_mask), temperature=temperature, ignore_index=MASKED).log_probs


def logits_entropy(
    original: Callable,  # TRL's function
    logits: Tensor,  # [...,V]
    chunk_size: int = 128,  # no effect
) -> Tensor:  # [...], nats
    "The entropy of each position's softmax."
    anything = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return log_probs(logits, anything, entropy=True).entropy


def logits_log_probs_and_entropy(
    # TRL's function; [...,V], [...]
    original: Callable,
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:  # [...] both
    "Log-probabilities and entropy in one pass over the logits; 0 where the mask is."
    found = log_probs(logits, unmasked(index, row_mask), temperature=temperature, entropy=True, ignore_index=MASKED)
    return found.log_probs, found.entropy if entropy_requires_grad else found.entropy.detach()


class Seam(NamedTuple):
    "A name of TRL, and what takes its place."

    module: str
    name: str  # with its class, if it has one
    ours: Callable  # takes the original, then what that takes
    optional: bool = False  # whether a TRL without it is taken


GKD = "trl.experimental.gkd.gkd_trainer"
SEAMS = (
    Seam("trl.trainer.utils", "_ChunkedLogProbFunction", head_log_probs),
    Seam("trl.trainer.utils", "selective_log_softmax", logits_log_probs),
    Seam("trl.trainer.utils", "entropy_from_logits", logits_entropy),
    Seam("trl.trainer.utils", "selective_log_softmax_and_entropy", logits_log_probs_and_entropy),
    Seam("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction", head_divergence),
    Seam(GKD, "GKDTrainer.compute_loss", gkd_loss, optional=True),
    Seam(GKD, "GKDTrainer.generalized_jsd_loss", logits_divergence, optional=True),
)


def takes(
    function: Callable,
    first: int = 0,  # the first parameter that is listed
) -> str:
    "Names and defaults of what a function takes."
    listed = list(inspect.signature(function).parameters.values())[first:]
    return str(inspect.Signature([p.replace(annotation=p.empty) for p in listed]))


def described(
    original: Any,
) -> str:
    "What an autograd function, a function or a method takes; of anything else its type."
    if isinstance(original, staticmethod):
        original = original.__func__
    if isinstance(original, type) and issubclass(original, torch.autograd.Function):
        return takes(original.forward, 1)  # without the context
    return takes(original) if inspect.isfunction(original) else f": {type(original).__name__}"


def loaded(
    module: str,
) -> Any:
    "A module of TRL, without the warning that what is experimental may change."
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*trl.experimental")
        return importlib.import_module(module)


def is_there(
    seam: Seam,
) -> bool:
    "Whether this TRL has a name, or ought to."
    try:
        module = loaded(seam.module)
    except ModuleNotFoundError:
        return not seam.optional
    return hasattr(module, seam.name.partition(".")[0]) or not seam.optional


def original_of(
    seam: Seam,
) -> Any:
    "What TRL has there; `ValueError` if ours does not take what that takes."
    *classes, name = seam.name.split(".")
    owner = functools.reduce(getattr, classes, loaded(seam.module))
    original = vars(owner).get(name)
    expected, got = takes(seam.ours, 1), described(original)
    version = getattr(importlib.import_module("trl"), "__version__", "of an unknown version")
    expect(
        got == expected,
        "trl",
        f"{seam.module}.{seam.name}{expected}",
        f"{seam.name}{got} in TRL {version}, of which nothing is replaced",
    )
    return original


def substitute(
    original: Any,
    ours: Callable,
) -> Any:
    "What TRL calls in the original's place, in the way that it calls that."
    if isinstance(original, type):
        return SimpleNamespace(apply=functools.partial(ours, original))
    if isinstance(original, staticmethod):
        return staticmethod(substitute(original.__func__, ours))

    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return ours(original, *args, **kwargs)

    return replacement


REPLACED: dict[str, tuple[Any, Any]] = {}  # by its name TRL's own and ours, while it is replaced


def holders() -> list[Any]:
    "TRL's modules that are loaded, and the classes in them."
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "trl" and m is not None]
    classes = [v for m in modules for v in vars(m).values() if isinstance(v, type) and v.__module__ == m.__name__]
    return modules + classes


def exchange(old: Any, new: Any):
    "Let each name in TRL's modules and classes that means `old` mean `new`."
    for holder in holders():
        names = [name for name, value in vars(holder).items() if value is old]
        for name in names:
            setattr(holder, name, new)


def patch() -> tuple[str, ...]:  # the names that are replaced
    """Let trainers of TRL compute by `linear_log_probs`, `log_probs` and `linear_divergence`.

    For the whole process, in any order with imports of TRL, and once however often it is called.
    `ValueError`, and nothing has changed, where a function of TRL takes other arguments than ours.
    """
    if not REPLACED:
        seams = [seam for seam in SEAMS if is_there(seam)]
        originals = [original_of(seam) for seam in seams]  # all of them are looked at first
        for seam, original in zip(seams, originals):
            REPLACED[seam.name] = original, substitute(original, seam.ours)
            exchange(*REPLACED[seam.name])
    return tuple(REPLACED)


def unpatch() -> tuple[str, ...]:  # the names that mean TRL's own functions again
    "Undo `patch`; without one, nothing."
    names = tuple(REPLACED)
    for original, ours in REPLACED.values():
        exchange(ours, original)
    REPLACED.clear()
    return names
