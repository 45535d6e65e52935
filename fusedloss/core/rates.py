"""How many bytes and products a second a machine manages: a table of common GPUs, and for any other a measurement that is kept on disk."""

__all__ = ["H200", "Machine", "machine_of", "machine_here"]


import contextlib
import functools
import math
import platform
import re
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, NamedTuple, Optional

import torch

from fusedloss.core import devices, store
from fusedloss.core.checks import expect
from fusedloss.core.devices import Board, Device, device_of, DeviceKind, Epilogue, gpu_index, KINDS, Rates, Unaligned
from fusedloss.core.operators import observed
from fusedloss.core.tuning import event_seconds


class Host(NamedTuple):
    "Seconds of Python and launches, of a call by a method and of each part of it, where calls follow one another; medians of one to three hosts."

    eager: float = 0.78e-3
    chunks: float = 0.98e-3
    chunk: float = 0.23e-3
    product: float = 1.28e-3
    product_chunk: float = 0.685e-3
    recompute: float = 1.64e-3
    slab: float = 0.25e-3
    plain: float = 1.18e-3  # recompute by chunks of tokens
    plain_chunk: float = 0.48e-3
    tiles: float = 1.88e-3
    tile: float = 0.37e-3
    stripe: float = 0.165e-3
    short_rows: float = 0.38e-3  # of eager, beside a call, where rows have no cluster


@dataclass(frozen=True, eq=False)
class Machine:
    "What a machine reaches."

    name: str  # as the driver, or the operating system, calls it
    bandwidth: float  # bytes/s, read plus written, of a large copy
    rates: dict[str, float]  # FLOP/s of a large matrix product, by dtype name
    device: Device = devices.CPU  # what it can do, as kernels are cut for it
    unaligned: Unaligned = Unaligned()
    epilogue: Epilogue = Epilogue()
    fp8: float = 1.77  # times the rate of bfloat16, of products in FP8 whose partial sums are in fp32: an H200's
    host: Host = Host()

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


def measured_machine(d: Device, **found) -> Machine:  # fields of a machine
    "A GPU as it was measured, with what its board brings besides."
    return replace(listed_machine(d) or guessed_machine(d), name=d.name, device=d, **found)


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
    "FLOP/s of an n×n×n product of random numbers; of FP8 with partial sums in fp32."
    draw = torch.Generator(device).manual_seed(0)
    a, b = torch.randn(2, n, n, device=device, generator=draw).to(dtype)
    if dtype == torch.float8_e4m3fn:
        one, out = torch.ones((), device=device), torch.empty(n, n, dtype=torch.bfloat16, device=device)
        run = lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=out.dtype, use_fast_accum=False, out=out)
    else:
        out = torch.empty_like(a)
        run = lambda: torch.mm(a, b, out=out)
    return 2 * n**3 / clock(run)


def median_seconds(run: Callable) -> float:
    "Median seconds of a call on the current GPU, among five after a first one."
    run()
    return statistics.median(event_seconds(run, rounds=5))


@contextlib.contextmanager
def refusals():
    "What a machine cannot multiply is passed over; a lack of memory is not."
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass


NUMEL = 2**26  # of the copy
SIDES = dict(bfloat16=4096, float16=4096, float32=2048, float64=1024)  # of the products


def measure_ceilings(
    d: Device,
    device: torch.device | str,
    clock: Callable[[Callable], float] = median_seconds,  # seconds of a call
) -> Machine:
    "Measure a machine; a dtype that it cannot multiply keeps the guess."
    rates, fp8 = dict(guessed_machine(d).rates), Machine.fp8
    with torch.no_grad(), torch.autocast(torch.device(device).type, enabled=False):
        bandwidth = copy_bandwidth(device, NUMEL, clock)
        for name, side in SIDES.items():
            with refusals():
                rates[name] = product_rate(device, side, getattr(torch, name), clock)
        with refusals():
            fp8 = product_rate(device, SIDES["bfloat16"], torch.float8_e4m3fn, clock) / rates["bfloat16"]
    return measured_machine(d, bandwidth=bandwidth, rates=rates, fp8=fp8)


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


def are_rates(values, names) -> bool:
    "Whether a value from a file has a rate by each name."
    return isinstance(values, dict) and all(is_rate(values.get(name)) for name in names)


@functools.cache
def processor() -> str:
    "The CPU's name, on which seconds of Python depend."
    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux, or not for us
        said = ""
    names = re.findall(r"^model name\s*: (.*)", said, re.MULTILINE)
    return names[0] if names else platform.processor() or platform.machine()


def host_key(d: Device) -> str:
    "What seconds of Python and launches depend on: hosts of several CPUs may share the file."
    return f"{store_key(d)}, on {processor()}"


def stored_machine(d: Device) -> Optional[Machine]:
    "The measurement on disk; None if there is none that makes sense."
    kept = store.read(STORE)
    found, host = kept.get(store_key(d)), kept.get(host_key(d))
    found = found if isinstance(found, dict) else {}
    if not are_rates(found.get("rates"), H200.rates) or not is_rate(found.get("bandwidth")):
        return None
    given = dict(bandwidth=found["bandwidth"], rates={name: found["rates"][name] for name in H200.rates})
    if is_rate(found.get("fp8")):
        given["fp8"] = found["fp8"]
    if are_rates(host, Host._fields):
        given["host"] = Host(**{name: host[name] for name in Host._fields})
    return measured_machine(d, **given)


def keep_machine(found: Machine, index: int):  # of the GPU
    "Keep a measurement, on disk too: plans of this process and later ones take it."
    kept = dict(bandwidth=found.bandwidth, rates=found.rates, fp8=found.fp8)
    store.update(STORE, store_key(found.device), kept)
    if found.host != Machine.host:
        store.update(STORE, host_key(found.device), found.host._asdict())
    found_machines[index] = found


def keep_rates(
    device: str | torch.device = "cuda",
    clock: Callable[[Callable], float] = median_seconds,  # seconds of a call
    anew: bool = True,  # whatever another process keeps meanwhile; else that is taken: ranks start together
) -> Machine:
    "Measure a GPU, a second or less, and keep it; what is known of its host stays."
    d, on = device_of(device), torch.device(device)
    with torch.cuda.device(on) if on.type == "cuda" else contextlib.nullcontext():
        found = measure_ceilings(d, on, clock)
    before = stored_machine(d)
    if before is not None and not anew:
        found_machines[gpu_index(on)] = before
        return before
    found = replace(found, host=found.host if before is None else before.host)
    keep_machine(found, gpu_index(on))
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
        found_machines[index] = known or keep_rates(device, anew=False)
    except RuntimeError:
        found_machines[index] = guessed_machine(d)  # no memory is left, say


find_machine._dynamo_marked_constant = True  # torch.compiler.assume_constant_result imports Dynamo to do this


def machine_here(device: torch.device) -> Machine:
    "The GPU of a device; the H200 where there is none."
    index = gpu_index(device)
    if torch.compiler.is_compiling() or index not in found_machines:
        find_machine(device)  # first: a compiler reads dictionaries once
    return found_machines[index] if index in found_machines else guessed_machines[index]
