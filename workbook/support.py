"""Which implementation each GPU takes, how it is cut for it and how far that was tried, as a table."""

__all__ = ["implementations", "support_rows"]


from types import ModuleType
from typing import Iterable

from fusedloss.core import devices
from fusedloss.core.devices import Device, Implementation


def implementations(*modules: ModuleType) -> list[Implementation]:
    "What the modules have defined, each once."
    found = [v for m in modules for v in vars(m).values() if isinstance(v, Implementation)]
    return list(dict.fromkeys(found))


COMPILED = {(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)}  # capabilities


def tried(d: Device) -> str:
    "How far the library was tried on a GPU: timed, compiled for it, or not at all."
    if any(board.measured for kind in devices.KINDS if kind.title == d.name for board in kind.boards):
        return "runs"
    return "compiled" if d.capability in COMPILED else "not tried"


def support(i: Implementation, d: Device) -> str:
    "Whether a GPU takes an implementation, how far that was tried, and how it is cut."
    if i.lacks(d):
        return f"passed over: {i.lacks(d)}"
    return f"{tried(d)}; {i.how(d)}" if i.how(d) else tried(d)


def support_rows(
    found: Iterable[Implementation],
    gpus: Iterable[Device],
) -> tuple[list[str], list[list[str]]]:  # the names of the columns; a row for each implementation
    "A table of what each GPU takes, and what is done where it does not."
    gpus = list(gpus)
    rows = [[i.what, i.source, *(support(i, d) for d in gpus), i.otherwise] for i in found]
    return ["", "kernels", *(d.name for d in gpus), "otherwise"], rows
