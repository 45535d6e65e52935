"""A sampler's step and a margin's running statistics move once for each optimizer step, so that a forward pass that is recomputed is the same one."""

import functools
import threading
import weakref
from typing import Any

import torch
from torch import nn, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fusedloss._ops import add_op_namespace_prefix
from fusedloss.core.checks import expect
from fusedloss.core.uncompiled import uncompiled


_known, _lock = weakref.WeakSet(), threading.Lock()


def is_writable(module: nn.Module) -> bool:
    "Whether a module's buffers can be written now: real ones not under a fake mode, those of inference nowhere else."
    fakes = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    held = [t for t in module._buffers.values() if t is not None]
    return not any(
        t.is_inference() and not torch.is_inference_mode_enabled() or fakes and not isinstance(t, FakeTensor)
        for t in held
    )


def in_backward() -> bool:
    "Whether a backward pass is at work, which recomputes a forward pass that begins now; a compiler sees none."
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@torch.library.custom_op(add_op_namespace_prefix("add_if_first"), mutates_args=("held",))
def _add_if_first(held: Tensor, more: Tensor) -> None:
    if torch._C._current_graph_task_id() == -1:
        held.add_(more)


def add_if_first(held: Tensor, more: Tensor):
    "Add to `held`, unless a backward pass recomputes: a graph that is compiled finds out when it runs."
    if torch.compiler.is_compiling():
        _add_if_first(held, more)
    elif not in_backward():
        held.add_(more)


OPTIMIZER = "optimizer.step: expected no fullgraph=True under torch.compile: what samples or keeps running statistics moves after it"


@uncompiled(OPTIMIZER)
@torch.no_grad()
def move_all():
    "Move what has been used since an optimizer's last step."
    with _lock:
        modules = list(_known)
    for module in modules:
        if not (module.is_made and is_writable(module)):
            continue
        module.is_noted = False
        module.move_if_used()


@uncompiled(OPTIMIZER)
def after_step(*_: Any):
    "Move all; for an optimizer that steps within a backward pass, at its end, for the pass may still recompute."
    if in_backward():
        torch.autograd.Variable._execution_engine.queue_callback(move_all)
    else:
        move_all()


@functools.cache
def watch_steps():
    "Have every optimizer's step end with `after_step`; from the first module with such a state on."
    register_optimizer_step_post_hook(after_step)


class MovesWithSteps(nn.Module):
    "A module whose state moves after an optimizer's step, if a forward pass in training has used it."

    is_made: bool = False  # an `__init__` that raised leaves half a module
    is_noted: bool = False  # on the host: a forward pass has used the state since it moved

    def __new__(cls, *args, **options):  # of copies and of what is unpickled too
        module = super().__new__(cls)
        watch_steps()
        with _lock:
            _known.add(module)
        return module

    def begin_use(self) -> None:
        "`ValueError` for a forward pass that is recomputed after the state that it had has moved."
        if torch.compiler.is_compiling():
            return
        expect(
            self.is_noted or not in_backward(),
            "backward",
            "a backward pass before any optimizer's step, where it recomputes a forward pass that samples",
            "one after it",
        )
        self.__dict__["is_noted"] = True  # `nn.Module` would look for what it is

    def move_if_used(self) -> None:
        raise NotImplementedError

    def reset_use(self) -> None:
        raise NotImplementedError

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        at = next(t for name, t in self._buffers.items() if name not in self._non_persistent_buffers_set)
        for name in self._non_persistent_buffers_set:  # with `assign`, it may still be on meta
            held = self._buffers[name]
            self._buffers[name] = held if held.device == at.device else torch.empty_like(held, device=at.device)
        self.reset_use()


class SeedAndStep(MovesWithSteps):
    "What a sample is a function of: a seed, and a step that an optimizer's step moves."

    def __init__(
        self,
        seed: int,  # 0 to 2⁶³ − 1
    ):
        super().__init__()
        self.first_seed = seed
        self.register_buffer("seed", torch.tensor(seed))
        self.register_buffer("step", torch.tensor(0))
        self.register_buffer("used", torch.tensor(0), persistent=False)  # 1 from a forward pass to an optimizer's step
        self.is_made = True

    def reset_parameters(self) -> None:
        self.seed.fill_(self.first_seed)
        self.step.zero_()
        self.reset_use()

    def reset_use(self) -> None:
        self.used.zero_()

    def note_use(self) -> None:
        self.used.fill_(1)

    def move_if_used(self) -> None:
        self.step.add_(self.used)
        self.used.zero_()

    def advance(self) -> None:
        "Move on to the next sample: for a loop without `torch.optim`, whose optimizers do it after each step."
        self.step.add_(1)
        self.used.zero_()
