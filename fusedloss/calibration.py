"""What plans count on, measured on this machine: rates of its GPU, and seconds of Python and launches. `python -m fusedloss calibrate`."""

import statistics
import time
from dataclasses import replace
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from fusedloss.core import rates
from fusedloss.core.checks import expect
from fusedloss.core.devices import gpu_index
from fusedloss.core.rates import Host, Machine
from fusedloss.core.tables import si
from fusedloss.losses import linear_cross_entropy
from fusedloss.plans import plan

bf16, f32 = torch.bfloat16, torch.float32


class Step(NamedTuple):
    "Loss and gradients of a call whose kernels take less time than its Python."

    method: str
    n: int  # tokens
    v: int  # classes
    h: int  # features
    dtype: torch.dtype = bf16
    memory_budget: Optional[int] = None  # of which there are more parts


STEPS = (
    *(Step("eager", 512, v, 256) for v in (8192, 1024)),  # by either kernel
    *(Step("chunks", 512, 1024, 256, memory_budget=budget) for budget in (None, 2**17)),
    *(Step("product", 512, 1024, 256, memory_budget=budget) for budget in (None, 2**17)),
    *(Step("recompute", 512, 65536, 64, memory_budget=budget) for budget in (None, 2**21)),
    *(Step("recompute", 512, 1024, 256, f32, budget) for budget in (None, 2**21)),
    *(Step("tiles", 512, 1024, 256, memory_budget=budget) for budget in (None, 2**21, 3 * 2**19)),
)


def host_counts(s: Step, machine: Machine) -> list[int]:
    "How often the step has each part of `Host`, as its plan counts."
    found = []
    for name in Host._fields:
        one = replace(machine, host=Host(*[0.0] * len(Host._fields))._replace(**{name: 1.0}))
        how = dict(memory_budget=s.memory_budget, accumulate="native", machine=one)
        found.append(int(plan(s.n, s.v, s.h, s.dtype, **how)[s.method].seconds))  # a GPU needs less than one second
    return found


def issue_seconds(s: Step, device: torch.device, calls: int = 20) -> float:
    "Seconds until the host has issued the step, where one follows another."
    draw = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(size, s.h, device=device, generator=draw).to(s.dtype).requires_grad_() for size in (s.n, s.v))
    y = torch.randint(s.v, (s.n,), device=device, generator=draw)
    how = dict(method=s.method, memory_budget=s.memory_budget, accumulate="native")
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        torch.autograd.grad(linear_cross_entropy(x, w, y, **how), (x, w))
    passed = time.perf_counter() - begin
    torch.cuda.synchronize(device)
    return passed / calls


def fitted_host(counts: Tensor, seconds: Tensor, before: Host) -> Host:  # [steps, parts], [steps]
    "The seconds of each part that add up to those of the steps; as they were, of parts that no step has, or that noise leaves none."
    scaled = (counts / seconds[:, None]).double()
    found = torch.linalg.lstsq(scaled, torch.ones(len(seconds), 1, dtype=torch.float64), driver="gelsd").solution[:, 0]
    return Host(*(t if t > 0 and here else old for t, here, old in zip(found.tolist(), counts.any(0), before)))


def measure_host(device: torch.device | str, machine: Machine, rounds: int = 5) -> Host:
    "The seconds of this machine's host: medians of rounds, in each all steps in turn, after one that compiles."
    on = torch.device(device)
    counts = torch.tensor([host_counts(s, machine) for s in STEPS])
    with torch.cuda.device(on):
        _, *timed = ([issue_seconds(s, on) for s in STEPS] for _ in range(1 + rounds))
    seconds = torch.tensor([statistics.median(of_step) for of_step in zip(*timed)])
    return fitted_host(counts, seconds, machine.host)


def calibrate(device: torch.device | str = "cuda") -> Machine:
    "Measure a GPU and its host, and keep both on disk, by board and CPU: plans of this process and later ones take them."
    expect(torch.device(device).type == "cuda", "device", "a GPU", repr(str(device)))
    found = rates.keep_rates(device)
    found = replace(found, host=measure_host(device, found))
    rates.keep_machine(found, gpu_index(torch.device(device)))
    return found


def report(device: str) -> int:  # the exit code
    "Calibrate, and print what was found; 1 without a GPU."
    if not torch.cuda.is_available():
        print("no GPU: plans of a CPU rank methods by nominal rates, and nothing is measured")
        return 1
    found = calibrate(device)
    print(f"{found.name}: copies {si(found.bandwidth, 'B/s')}; matmuls", end=" ")
    print(*(f"{name} {si(rate, 'FLOP/s')}," for name, rate in found.rates.items()), f"FP8 ×{found.fp8:.2f} of bfloat16")
    print("host:", ", ".join(f"{name.replace('_', ' ')} {si(s, 's')}" for name, s in found.host._asdict().items()))
    return 0
