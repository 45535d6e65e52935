"""Which implementation each GPU takes, how it is cut for it and how far that was tried, as tables."""

__all__ = ["ONE_EACH", "support_rows", "gpu_rows"]


from collections import Counter
from pathlib import Path
from typing import Iterable

from fusedloss.core import devices
from fusedloss.core.devices import Device, Implementation
from workbook.records import load_results
from workbook.trend import FOLDER

ONE_EACH = {
    80: "A100",
    86: "RTX 3090",
    89: "L4",
    90: "H200",
    100: "B200",
    120: "RTX 5090",
}  # one GPU for each architecture that tests compile every kernel for, without a GPU


def measured_machines(
    *folders: Path,  # of records
) -> set[str]:
    "The machines that records name."
    return {r["machine"] for folder in folders for r in load_results(folder) if "machine" in r}


def tried(d: Device, machines: set[str]) -> str:
    "How far the library was tried on a GPU: measured, compiled for it, or not at all."
    boards = [name for kind in devices.KINDS if kind.title == d.name for board in kind.boards for name in board.names]
    if machines & {*boards}:
        return "measured"
    return "compiled only" if d.capability in {divmod(arch, 10) for arch in ONE_EACH} else "not tried"


def support(i: Implementation, d: Device, machines: set[str]) -> str:
    "Whether a GPU takes an implementation, how far that was tried, and how it is cut."
    if i.lacks(d):
        return f"passed over: {i.lacks(d)}"
    return f"{tried(d, machines)}; {i.how(d)}" if i.how(d) else tried(d, machines)


def support_rows(
    found: Iterable[Implementation],
    gpus: Iterable[Device],
    folders: Iterable[Path] = (FOLDER.parent, FOLDER),  # of records
) -> tuple[list[str], list[list[str]]]:  # the names of the columns; a row for each implementation
    "A table of what each GPU takes, and what is done where it does not."
    gpus, machines = list(gpus), measured_machines(*folders)
    rows = [[i.what, i.source, *(support(i, d, machines) for d in gpus), i.otherwise] for i in found]
    return ["", "kernels", *(d.name for d in gpus), "otherwise"], rows


LEVELS = ("measured", "compiled only", "not tried")


def gpu_rows(
    found: Iterable[Implementation],
    gpus: Iterable[Device],
    folders: Iterable[Path] = (FOLDER.parent, FOLDER),  # of records
) -> tuple[
    list[str], list[list[str]]
]:  # the names of the columns; a row for each GPU, those that were tried most first
    "A table of GPUs: how far each was tried, and how many implementations it takes."
    found, machines, rows = list(found), measured_machines(*folders), []
    for d in gpus:
        reasons = Counter(why for i in found if (why := i.lacks(d)))
        capability = "{}.{}".format(*d.capability) if d.vendor == "nvidia" else ""
        passed = ", ".join(f"{why}: {count}" for why, count in reasons.items())
        rows.append([d.name, capability, tried(d, machines), f"{len(found) - reasons.total()} of {len(found)}", passed])
    rows.sort(key=lambda row: LEVELS.index(row[2]))
    return ["GPU", "compute capability", "", "implementations taken", "passed over"], rows
