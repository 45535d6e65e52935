"""Times, memory and launches of a call, measured beside the floor of its shape; a machine's two ceilings."""

from __future__ import annotations

__all__ = [
    "SHAPES",
    "three_products",
    "bare_products",
    "time_in_turn",
    "Shape",
    "cost_table",
    "Timing",
    "time_call",
    "time_single_calls",
    "Comparison",
    "compare",
    "trace_memory",
    "peak_memory",
    "gpu_launches",
    "saved_tensors",
    "memory_timeline",
    "measure_machine",
    "relative_error",
    "measure_in_turn",
    "measure_against_floor",
    "roofline",
]

import functools
import math
import random
import time
import weakref
from pathlib import Path
from typing import Any, Callable, Iterable, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from tqdm import tqdm

from fusedloss.core.devices import device_of
from fusedloss.core.rates import copy_bandwidth, Machine, product_rate
from fusedloss.core.tables import si, Table
from fusedloss.measure import Cost, predict_seconds, product_cost
from workbook.drawing import as_drawing, Drawing, drawing_style, GREY, stage_color
from workbook.records import machine_name, record


class Shape(NamedTuple):
    "Sizes of one loss: `N` tokens, `H` features, `V` classes."

    N: int
    H: int
    V: int


SHAPES = (Shape(8192, 4096, 128256), Shape(16384, 2048, 131072), Shape(8192, 2304, 256000))


def three_products(shape: Shape, dtype: torch.dtype) -> list[Cost]:
    "The floor of every linear loss: scores, input gradient, weight gradient."
    n, h, v = shape
    return [
        product_cost("z = x wᵀ", n, h, v, dtype),
        product_cost("dx = dz w", n, v, h, dtype),
        product_cost("dw = dzᵀ x", v, n, h, dtype),
    ]


def bare_products(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    "The three products with nothing between them, to time the floor. `x [N,H]`, `w [V,H]`."
    z = x @ w.T
    return z @ w, z.T @ x


def time_in_turn(
    runs: dict[str, Callable[[], Any]],  # what is timed, by name
    device: str | torch.device = "cpu",
    rounds: int = 7,  # times that each is measured
    seconds: float = 0.05,  # of measurement a round for each
) -> dict[str, list[float]]:  # by name, the median of each round
    "Time `runs` one after another, in an order that is drawn anew for every round."
    order, found = random.Random(0), {name: [] for name in runs}
    for _ in progress(range(rounds), "rounds"):
        for name in order.sample(list(runs), len(runs)):
            found[name].append(time_call(runs[name], device, seconds).median)
    return found


def cost_table(costs: list[Cost], machine: Machine, dtype: torch.dtype) -> Table:
    "One line a kernel and their sum: FLOPs, bytes, roofline time, and which ceiling binds."
    row = lambda c: [
        c.name,
        si(c.flops, "FLOP"),
        si(c.bytes, "B"),
        si(c.seconds(machine, dtype), "s"),
        c.bound(machine, dtype),
    ]
    total = [
        "sum",
        si(sum(c.flops for c in costs), "FLOP"),
        si(sum(c.bytes for c in costs), "B"),
        si(predict_seconds(costs, machine, dtype), "s"),
        "",
    ]
    return Table(["kernel", "FLOPs", "bytes", f"time on {machine.name}", "bound by"], [*map(row, costs), total])


class Timing(NamedTuple):
    "Seconds: the median and the 20 % and 80 % quantiles."

    median: float
    low: float
    high: float

    def __str__(self):
        return f"{si(self.median, 's')} ({si(self.low, 's')} to {si(self.high, 's')})"


def quantiles(values: Iterable[float]) -> Timing:
    "Median, 20 % and 80 % quantile of some measurements."
    numbers = torch.tensor(list(values), dtype=torch.float64)
    levels = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    median, low, high = torch.quantile(numbers, levels).tolist()
    return Timing(median, low, high)


def time_call(
    fn: Callable[[], Any],  # called without arguments, many times
    device: str | torch.device = "cpu",  # where its work runs
    seconds: float = 0.3,  # how long to measure, warm-up apart
) -> Timing:
    "Median time of one call of `fn`."
    if torch.device(device).type == "cuda":
        from triton.testing import do_bench

        times = do_bench(fn, rep=round(seconds * 1e3), quantiles=[0.5, 0.2, 0.8])
        return Timing(*(ms * 1e-3 for ms in times))
    from torch.utils.benchmark import Timer  # brings setuptools: not at import

    timer = Timer("fn()", globals=dict(fn=fn), num_threads=torch.get_num_threads())
    return quantiles(timer.blocked_autorange(min_run_time=seconds).times)


def time_single_calls(
    fn: Callable[[], Any],  # called without arguments, `calls` times
    device: str | torch.device = "cpu",  # where its work runs
    calls: int = 3,
) -> float:  # seconds, by the host's clock
    "Median time of one call of `fn` that begins on an idle device and is waited for; a GPU's L2 cache is overwritten before each."
    wait, cache, found = (lambda: None), None, []
    if torch.device(device).type == "cuda":
        wait = functools.partial(torch.cuda.synchronize, device)
        cache = torch.empty(2**28, dtype=torch.uint8, device=device)  # more than an L2 cache holds
    for _ in range(calls):
        if cache is not None:
            cache.zero_()
        wait()
        start = time.perf_counter()
        fn()
        wait()
        found.append(time.perf_counter() - start)
    return quantiles(found).median


class Comparison(NamedTuple):
    "Two callables timed alternately."

    a: Timing
    b: Timing
    ratio: Timing  # of b to a, round by round

    def __str__(self):
        return f"×{self.ratio.median:.3g} (×{self.ratio.low:.3g} to ×{self.ratio.high:.3g})"


def progress(items: Iterable, what: str):
    "A progress bar that shows itself only when the work takes more than three seconds."
    return tqdm(items, desc=what, delay=3, leave=False)


def comparison(
    a: list[float],
    b: list[float],  # seconds, one a round
) -> Comparison:
    "What two lists of timings say, ratios taken within each round."
    return Comparison(quantiles(a), quantiles(b), quantiles(r / l for l, r in zip(a, b)))


def compare(
    a: Callable[[], Any],
    b: Callable[[], Any],
    device: str | torch.device = "cpu",
    rounds: int = 7,  # times that each is measured
    seconds: float = 0.05,  # of measurement a round for each
) -> Comparison:
    "Time `a` and `b` in turn, in a fresh order each round, and give the ratio b/a."
    return comparison(*time_in_turn(dict(a=a, b=b), device, rounds, seconds).values())


class MemoryEvent(NamedTuple):
    "A storage is born (`bytes > 0`) or dies."

    op: str  # the operation that made it
    shape: tuple[int, ...]  # of the tensor that first held it
    bytes: int
    live: int  # bytes alive after this event
    storage: int  # which one, counted by birth


def storages_of(tree) -> Iterable[tuple[Tensor, torch.UntypedStorage]]:
    return ((t, t.untyped_storage()) for t in tree_iter(tree) if isinstance(t, Tensor))


class MemoryTrace(TorchDispatchMode):
    "Follow the storages that operations make; those that existed before are not counted."

    def __init__(self):
        super().__init__()
        self.events, self.live, self.peak = [], 0, 0
        self._known, self._births = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for _, storage in storages_of((args, kwargs)):
            self._meet(storage)
        out = self._run(func, args, kwargs or {})
        for tensor, storage in storages_of(out):
            if self._meet(storage):
                self._born(str(func).split(".")[1], tensor, storage)
        return out

    def _run(self, func, args, kwargs):
        with self:  # look inside custom operators and composite operations
            if func._defined_in_python:
                cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
                return func.redispatch(cpu, *args, **kwargs)
            if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                return out
        return func(*args, **kwargs)

    def _meet(self, storage) -> bool:
        "True at the first sight of a storage; it is forgotten when it dies."
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return False
        self._known.add(key)
        weakref.finalize(storage, self._known.discard, key)
        return True

    def _born(self, op, tensor, storage):
        shape, size, self._births = tuple(tensor.shape), storage.nbytes(), self._births + 1
        self._log(op, shape, size, self._births)
        weakref.finalize(storage, self._log, op, shape, -size, self._births)

    def _log(self, op, shape, size, number):
        self.live += size
        self.peak = max(self.peak, self.live)
        self.events.append(MemoryEvent(op, shape, size, self.live, number))


def trace_memory(fn: Callable[[], Any]) -> list[MemoryEvent]:
    "Births and deaths of storages while `fn` runs; what it returns dies with it."
    with MemoryTrace() as trace:
        fn()
    return list(trace.events)  # a copy: what outlives `fn` dies unseen


def drop_gradients(device: str | torch.device):
    "Return when autograd's thread holds nothing of an earlier backward pass."
    empty = torch.empty(0, device=device, requires_grad=True)
    with torch.enable_grad():
        (2 * empty).backward(torch.empty_like(empty))  # the thread's next task, without memory


def peak_memory(
    fn: Callable[[], Any],
    device: str | torch.device = "cpu",
) -> int:
    "Bytes that `fn` holds at its peak above what was allocated before."
    if torch.device(device).type != "cuda":
        return max((e.live for e in trace_memory(fn)), default=0)
    fn()  # compiles, and makes the libraries' workspaces
    drop_gradients(device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fn()
    return torch.cuda.max_memory_allocated(device) - before


class Launches(NamedTuple):
    "What a GPU did."

    kernels: int
    busy: float  # seconds, summed over kernels


def gpu_launches(fn: Callable[[], Any]) -> Launches:
    "Count the GPU's kernels and their time while `fn` runs once, after a warm-up."
    from torch.profiler import ProfilerActivity, profile

    fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        fn()
        torch.cuda.synchronize()
    kernels = [e for e in trace.key_averages() if e.self_device_time_total]
    return Launches(sum(e.count for e in kernels), sum(e.self_device_time_total for e in kernels) * 1e-6)


def graph_of(fn: Callable[[], Any]) -> Callable[[], None]:
    "A CUDA graph of `fn`, whose launches then cost the host one; a call replays it."
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
        fn()  # what is made once must not be captured
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def saved_tensors(
    fn: Callable[[], Any],  # builds a graph
    *owned: Tensor,  # the caller's own tensors, not counted
) -> list[Tensor]:
    "The tensors that autograd saves for backward while `fn` runs, one a storage."
    saved, known = [], {storage._cdata for _, storage in storages_of(owned)}

    def keep(tensor):
        key = tensor.untyped_storage()._cdata
        if key not in known:
            known.add(key)
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        fn()
    return saved


def tensor_lives(events: list[MemoryEvent], at_least: int) -> list[tuple[MemoryEvent, int, int]]:
    "(birth event, its index, index of death) of storages of `at_least` bytes, in birth order."
    deaths = {e.storage: i for i, e in enumerate(events) if e.bytes < 0}
    return [
        (e, i, deaths.get(e.storage, len(events))) for i, e in enumerate(events) if e.bytes > 0 and e.bytes >= at_least
    ]


def memory_timeline(
    events: list[MemoryEvent],
    title: str,
    alt: str,
    caption: str = "",
    at_least: int = 0,  # bytes; smaller tensors are in the total only
    stage: int | str = 1,
) -> Drawing:
    "Live bytes after each event, over one bar for the life of every large tensor."
    import matplotlib.pyplot as plt

    lives, color = tensor_lives(events, at_least), stage_color(stage)
    with drawing_style():
        rows = [5, 1 + len(lives)] if lives else [5]
        fig, axes = plt.subplots(
            len(rows), squeeze=False, sharex=True, height_ratios=rows, figsize=(7, 2.2 + 0.3 * len(lives))
        )
        top, low = axes[0, 0], axes[-1, 0]
        total = [0, *(e.live / 2**20 for e in events)]
        top.fill_between(range(len(total)), total, step="post", color=color, alpha=0.3, lw=0)
        top.step(range(len(total)), total, where="post", color=color)
        top.set(ylabel="MiB alive", title=title, ylim=0)
        for i, (e, born, died) in enumerate(lives):
            low.barh(i, died - born, left=born + 1, height=0.62, color=color, alpha=0.75)
            low.text(born + 1.15, i, f"{e.op} {list(e.shape)}", va="center", fontsize=8.5)
        if lives:
            low.set(ylim=(len(lives) - 0.4, -0.6), yticks=[])
        low.set(xlabel="storage events, in order", xlim=(0, len(total)))
        low.xaxis.get_major_locator().set_params(integer=True)
        return as_drawing(fig, alt, caption)


def measure_bandwidth(device: str | torch.device, numel: int) -> float:
    "Bytes/s, read plus written, of a copy of `numel` float32."
    return copy_bandwidth(device, numel, lambda run: time_call(run, device).median)


def measure_rate(device: str | torch.device, n: int, dtype: torch.dtype) -> float:
    "FLOP/s of an n×n×n product of random numbers."
    return product_rate(device, n, dtype, lambda run: time_call(run, device).median)


@functools.lru_cache
def measure_machine(device: str = "cpu") -> Machine:
    "Measure both ceilings of this machine; a second or two, remembered afterwards."
    gpu = torch.device(device).type == "cuda"
    numel = 2**30 if gpu else 2**26
    sizes = dict(bfloat16=8192, float16=8192, float32=4096, float64=4096) if gpu else dict(float32=1024, float64=1024)
    rates = {name: measure_rate(device, n, getattr(torch, name)) for name, n in progress(sizes.items(), "ceilings")}
    return Machine(machine_name(device), measure_bandwidth(device, numel), rates, device_of(device))


def relative_error(
    out: Tensor,
    ref: Tensor,  # the same quantity, computed in float64
) -> float:
    "‖out − ref‖ / ‖ref‖, in float64; the plain norm where `ref` is zero. Infinite beside a NaN: no comparison calls it small."
    if out.shape != ref.shape:
        raise ValueError(f"shapes differ: expected {tuple(ref.shape)}, got {tuple(out.shape)}")
    ref = ref.detach().double()
    distance, size = (out.detach().to(ref) - ref).norm().item(), ref.norm().item()
    error = distance / size if size else distance
    return math.inf if math.isnan(error) else error


def measure_in_turn(
    path: str | Path,  # the JSON file of results
    runs: dict[str, Callable[[], Any]],  # what is timed, by name
    floor: Callable[[], Any],  # timed among them
    shape: dict[str, int],
    dtype: torch.dtype,
    outputs: int = 0,  # bytes of a run's results: they count as no extra memory
    device: str | torch.device = "cuda",
    rounds: int = 5,  # times that each is measured
) -> list[dict]:  # the records
    "Time `runs` and `floor` in turn and take peak memories; recorded in `path`, and printed."
    peaks = {name: peak_memory(run, device) for name, run in runs.items()}
    times = time_in_turn({"floor": floor, **runs}, device, rounds)
    return [
        _against_floor(path, name, comparison(times["floor"], times[name]), peaks[name], outputs, shape, dtype, device)
        for name in runs
    ]


def _against_floor(path, name, c, peak, outputs, shape, dtype, device) -> dict:
    extra = max(peak - outputs, 0)  # less than the outputs: they lie in the place of inputs
    print(f"{name}: {c.b}, {c} of the reference, {si(extra, 'B')} beyond the gradients")
    return record(
        path,
        name,
        shape,
        dtype,
        device,
        seconds=c.b.median,
        floor=c.a.median,
        ratio=c.ratio.median,
        ratio_low=c.ratio.low,
        ratio_high=c.ratio.high,
        peak=peak,
        extra=extra,
    )


def measure_against_floor(
    path: str | Path,  # the JSON file of results
    name: str,  # of what `run` does
    run: Callable[[], Any],
    floor: Callable[[], Any],  # timed in turn
    shape: dict[str, int],
    dtype: torch.dtype,
    outputs: int = 0,  # bytes of `run`'s results: they count as no extra memory
    device: str | torch.device = "cuda",
    rounds: int = 5,  # times that each is measured
) -> dict:  # the record
    "`measure_in_turn` of one run."
    return measure_in_turn(path, {name: run}, floor, shape, dtype, outputs, device, rounds)[0]


def roofline(
    points: list[tuple[Cost, float]],  # what each kernel must do, and the seconds it took
    machine: Machine,
    dtype: torch.dtype,
    title: str,
    alt: str,
    caption: str = "",
) -> Drawing:
    "FLOP/s against FLOP per byte, under the two ceilings of a machine."
    import matplotlib.pyplot as plt

    peak, ridge = machine.rate(dtype), machine.rate(dtype) / machine.bandwidth
    with drawing_style():
        fig, ax = plt.subplots(figsize=(6.4, 3.6))
        ax.plot([ridge / 256, ridge, ridge * 64], [peak / 256, peak, peak], color=GREY)
        for i, (cost, seconds) in enumerate(points, 1):
            at = cost.flops / cost.bytes, cost.flops / seconds
            ax.plot(*at, "o", color=stage_color(i))
            ax.annotate(cost.name, at, xytext=(6, -14), textcoords="offset points", fontsize=9)
        ax.set(xscale="log", yscale="log", xlabel="FLOP per byte moved", ylabel="FLOP/s", title=title)
        ax.annotate(
            si(peak, "FLOP/s"),
            (ridge * 64, peak),
            xytext=(0, 5),
            textcoords="offset points",
            ha="right",
            fontsize=9,
        )
        ax.annotate(
            si(machine.bandwidth, "B/s").replace("i", ""),
            (ridge / 200, peak / 180),
            xytext=(8, 0),
            textcoords="offset points",
            fontsize=9,
        )
        return as_drawing(fig, alt, caption)
