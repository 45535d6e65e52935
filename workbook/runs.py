"""A training's step, its curve, and a checkpoint of both and of what is trained: what the tutorials share."""

__all__ = ["Run"]


import copy
import os
from pathlib import Path
from typing import Any, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from fusedloss.core.checks import expect


def random_state() -> list[Tensor]:
    "The states of PyTorch's default generators: the CPU's, then each GPU's."
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


def set_random_state(states: list[Tensor]):
    "Undo what was drawn since `random_state`; GPUs that the list does not name go on as they are."
    torch.set_rng_state(states[0])
    for device, state in enumerate(states[1 : torch.cuda.device_count() + 1]):
        torch.cuda.set_rng_state(state, device)


def write_whole(path: Path, what: Any):
    "Save to `path`, which holds what it held before until all is written."
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    torch.save(what, unfinished)
    os.replace(unfinished, path)


def load_all(parts: dict[str, Any], states: dict[str, Any]):
    "Give each part its state, or, if one does not fit, leave all as they were and raise."
    before = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    try:
        for name, part in parts.items():
            part.load_state_dict(states[name])
    except Exception:
        for name, part in parts.items():
            part.load_state_dict(before[name])
        raise


class Run:
    "A training that can be interrupted: the number of its next step, its curve, and a checkpoint of both and of what is trained."

    def __init__(
        self,
        name: str,  # of the training, and of its file in `folder`
        folder: str | Path = "runs",  # made with the first checkpoint
        every: int = 500,  # steps between checkpoints
        **parts,  # what is trained: modules, optimizers, schedulers, anything with `state_dict` and `load_state_dict`
    ):
        expect(every > 0, "every", "1 or more", every)
        self.name, self.file, self.every, self.parts = name, Path(folder) / f"{name}.pt", every, parts
        self.step, self.logged = 0, {}

    def steps(
        self,
        total: int,  # steps in all, those before an interruption too
    ) -> Iterator[int]:
        "The numbers of the steps that are left, under a progress bar; a checkpoint after every `every` of them and after the last."
        for step in tqdm(range(self.step, total), initial=self.step, total=total, desc=self.name, leave=False):
            yield step
            self.step = step + 1
            if self.step % self.every == 0 or self.step == total:
                self.save()

    def log(self, **values: float | Tensor):
        "Add to the curve, for the present step: numbers, or tensors of one element."
        for name, value in values.items():
            self.logged.setdefault(name, []).append((self.step, value.detach() if isinstance(value, Tensor) else value))

    @property
    def curve(self) -> dict[str, list[tuple[int, float]]]:
        "What was logged: (step, value) under each name."
        return {name: [(step, float(value)) for step, value in points] for name, points in self.logged.items()}

    def save(self):
        "Write the checkpoint."
        self.logged = self.curve  # numbers from here on: each is read from a GPU once
        states = {name: part.state_dict() for name, part in self.parts.items()}
        write_whole(self.file, {"step": self.step, "curve": self.logged, "random": random_state(), "parts": states})

    def resume(self) -> int:
        "Go on from the checkpoint, where there is one: the number of the next step. `ValueError` if it holds other parts."
        if not self.file.exists():
            return self.step
        saved = torch.load(self.file, map_location="cpu", weights_only=True)
        expect(saved["parts"].keys() == self.parts.keys(), str(self.file), sorted(self.parts), sorted(saved["parts"]))
        load_all(self.parts, saved["parts"])
        set_random_state(saved["random"])
        self.step, self.logged = saved["step"], saved["curve"]
        return self.step
