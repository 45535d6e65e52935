"""How many bytes and products a second a machine manages: a table of common GPUs, and for any other a measurement that is kept on disk."""

__all__ = ["H200", "Machine", "machine_of", "machine_here"]


import contextlib
import functools
import math
import statistics
from dataclasses import dataclass, replace
from typing import Callable, Optional

import torch

from fusedloss.core import devices, store
from fusedloss.core.checks import expect
from fusedloss.core.devices import Board, Device, device_of, DeviceKind, Epilogue, gpu_index, KINDS, Rates, Unaligned
from fusedloss.core.operators import observed
from fusedloss.core.tuning import event_seconds


@dataclass(frozen=True, eq=False)
class Machine:
    "What a machine reaches."

    name: str  # as the driver, or the operating system, calls it
    bandwidth: float  # bytes/s, read plus written, of a large copy
    rates: dict[str, float]  # FLOP/s of a large matrix product, by dtype name
    device: Device = devices.CPU  # what it can do, as kernels are cut for it
    unaligned: Unaligned = Unaligned()
    epilogue: Epilogue = Epilogue()

    def rate(self, dtype: torch.dtype) -> float:
        "FLOP/s of matrix products in `dtype`; `KeyError` names the dtypes that were measured."
        name = dtype_name(dtype)
        if name not in self.rates:
            raise KeyError(f"{self.name} was measured for {sorted(self.rates)}, not for {name}")
        return self.rates[name]


def dtype_name(dtype: torch.dtype) -> str:
    "`torch.bfloat16` as `'bfloat16'`."
    return str(dtype).removeprefix("torch.")


def boards() -> dict[str, tuple[type[DeviceKind], Board]]:
    "The boards of all kinds of devices, with the kind, by the name that a plan takes."
    return {board.name: (kind, board) for kind in reversed(KINDS) for board in vars(kind).get("boards", ())}


def by_dtype(r: Rates) -> dict[str, float]:
    "FLOP/s of products by dtype name."
    return {name: rate for name, rate in r._asdict().items() if name != "bandwidth"}


CPU = Machine("a CPU", 2e10, dict(float32=1e11, float64=5e10))  # to rank methods, no more


def peak_shares() -> Rates:
    "The shares of its peaks that the H200 reaches."
    _, h200 = boards()["H200"]
    return Rates(*(rate / peak for rate, peak in zip(h200.measured, h200.peaks)))


def expected_rates(board: Board) -> Rates:
    "What a board reaches, if it comes as near its peaks as the H200 does."
    return Rates(*(peak * share for peak, share in zip(board.peaks, peak_shares())))


@functools.cache
def board_machine(kind: type[DeviceKind], board: Board) -> Machine:
    "A board as it was measured, or as it is expected to be; the same object each time."
    rates = board.measured or expected_rates(board)
    device = kind.on_board(board)
    return Machine(board.names[0], rates.bandwidth, by_dtype(rates), device, board.unaligned, board.epilogue)


def machines() -> dict[str, Machine]:
    "The machines that are known, by the name that a plan takes."
    return {name: board_machine(*entry) for name, entry in boards().items()}


H200 = board_machine(*boards()["H200"])


H200_L2 = 60 * 2**20  # bytes of its level-two cache, `L2_cache_size` of torch.cuda.get_device_properties


def machine_of(
    machine: Machine | str,  # one of `machines()` by its name, or itself
) -> Machine:
    "The machine of that name; `ValueError` names those there are."
    expect(not isinstance(machine, str) or machine in boards(), "machine", f"one of {sorted(boards())}", repr(machine))
    return machines()[machine] if isinstance(machine, str) else machine


def listed_machine(d: Device) -> Optional[Machine]:
    "The machine of a board that carries a GPU; None for others, a part of one included."
    for kind, board in boards().values():
        if d.name in board.names and d.multiprocessors == board.multiprocessors:
            return board_machine(kind, board)


def guessed_machine(d: Device) -> Machine:
    "A GPU as slow, by the multiprocessor, as the slowest of the table."
    least = lambda of: d.multiprocessors * min(of(m) / m.device.multiprocessors for m in machines().values())
    rates = {name: least(lambda m: m.rates[name]) for name in H200.rates}
    return Machine(d.name, least(lambda m: m.bandwidth), rates, d)


def measured_machine(d: Device, bandwidth: float, rates: dict[str, float]) -> Machine:
    "A GPU with measured rates, and with what its board brings besides."
    return replace(listed_machine(d) or guessed_machine(d), name=d.name, bandwidth=bandwidth, rates=rates, device=d)


def copy_bandwidth(
    device: str | torch.device,
    numel: int,
    clock: Callable[[Callable], float],  # seconds of a call
) -> float:
    "Bytes/s, read plus written, of a copy of `numel` float32."
    source = torch.randn(numel, device=device, generator=torch.Generator(device).manual_seed(0))
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock(lambda: target.copy_(source))


def product_rate(
    device: str | torch.device,
    n: int,
    dtype: torch.dtype,
    clock: Callable[[Callable], float],  # seconds of a call
) -> float:
    "FLOP/s of an n×n×n product of random numbers."
    draw = torch.Generator(device).manual_seed(0)
    a, b = torch.randn(2, n, n, device=device, generator=draw).to(dtype)
    out = torch.empty_like(a)
    return 2 * n**3 / clock(lambda: torch.mm(a, b, out=out))


def median_seconds(run: Callable) -> float:
    "Median seconds of a call on the current GPU, among five after a first one."
    run()
    return statistics.median(event_seconds(run, rounds=5))


NUMEL = 2**26  # of the copy
SIDES = dict(bfloat16=4096, float16=4096, float32=2048, float64=1024)  # of the products


def measure_ceilings(
    d: Device,
    device: torch.device | str,
    clock: Callable[[Callable], float] = median_seconds,  # seconds of a call
) -> Machine:
    "Measure a machine; a dtype that it cannot multiply keeps the guess."
    rates = dict(guessed_machine(d).rates)
    with torch.no_grad(), torch.autocast(torch.device(device).type, enabled=False):
        bandwidth = copy_bandwidth(device, NUMEL, clock)
        for name, side in SIDES.items():
            try:
                rates[name] = product_rate(device, side, getattr(torch, name), clock)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                pass
    return measured_machine(d, bandwidth, rates)


STORE = "rates"  # the file


def float32_precision() -> str:
    "How products of fp32 are made: since PyTorch 2.9 by a switch, beside which the older question raises."
    found = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return found or torch.get_float32_matmul_precision()


def store_key(d: Device) -> str:
    "What a measurement depends on."
    return f"{d.name}, {d.multiprocessors} multiprocessors, torch {torch.__version__}, float32 {float32_precision()}"


def is_rate(value) -> bool:
    "Whether a value from a file is a rate."
    return type(value) in (int, float) and 0 < value < math.inf


def stored_machine(d: Device) -> Optional[Machine]:
    "The measurement on disk; None if there is none that makes sense."
    found = store.read(STORE).get(store_key(d))
    found = found if isinstance(found, dict) else {}
    rates = found.get("rates")
    sound = isinstance(rates, dict) and all(is_rate(rates.get(name)) for name in H200.rates)
    if not sound or not is_rate(found.get("bandwidth")):
        return None
    return measured_machine(d, found["bandwidth"], {name: rates[name] for name in H200.rates})


def calibrate(
    device: str | torch.device = "cuda",
    clock: Callable[[Callable], float] = median_seconds,  # seconds of a call
    anew: bool = True,  # whatever another process keeps meanwhile; else that is taken: ranks start together
) -> Machine:
    "Measure a GPU, a second or less, and keep it on disk: plans of this process and later ones take it."
    d, on = device_of(device), torch.device(device)
    with torch.cuda.device(on) if on.type == "cuda" else contextlib.nullcontext():
        found = measure_ceilings(d, on, clock)
    other = None if anew else stored_machine(d)
    if other is None:
        store.update(STORE, store_key(d), dict(bandwidth=found.bandwidth, rates=found.rates))
    found_machines[gpu_index(on)] = found = other or found
    return found


found_machines: dict[int, Machine] = {}  # what this process found, by the index of the GPU


def may_measure() -> bool:
    "Whether kernels may run now as in a plain call."
    traced = torch._guards.TracingContext.try_get() is not None  # by a compiler that called us as we are
    return not traced and not observed() and not torch.cuda.is_current_stream_capturing()


guessed_machines: dict[int, Machine] = {}  # where nothing could be measured yet


def find_machine(device: torch.device) -> None:
    "Put a GPU into `found_machines`, as the disk, the table or a measurement has it; else into `guessed_machines`."
    d, index = device_of(device), gpu_index(device)
    if index in found_machines:
        return
    known = H200 if d.vendor == "none" else stored_machine(d) or listed_machine(d)
    if known is None and not may_measure():
        guessed_machines[index] = guessed_machine(d)
        return
    try:
        found_machines[index] = known or calibrate(device, anew=False)
    except RuntimeError:
        found_machines[index] = guessed_machine(d)  # no memory is left, say


find_machine._dynamo_marked_constant = True  # torch.compiler.assume_constant_result imports Dynamo to do this


def machine_here(device: torch.device) -> Machine:
    "The GPU of a device; the H200 where there is none."
    index = gpu_index(device)
    if torch.compiler.is_compiling() or index not in found_machines:
        find_machine(device)  # first: a compiler reads dictionaries once
    return found_machines[index] if index in found_machines else guessed_machines[index]
