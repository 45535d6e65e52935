"""Methods over ranks, timed in turn: in every round each of them once, in an order drawn anew, the same on all ranks."""
import math
import random
import statistics
import time
from typing import Callable, NamedTuple, Optional

import torch
import torch.distributed as dist

from fusedloss.core.tables import si
from fusedloss.core.tuning import event_seconds
from workbook.measure import peak_memory
from workbook.peers import brief_error

IN_A_ROW, ROUNDS = 10, 5  # steps that follow one another, and rounds
SAME = 1e-3  # of a loss: two methods differ by no more


class Method(NamedTuple):
    "A step, and what it is compared with"
    step: Optional[Callable]  # loss first, if it has one; None on ranks that wait
    one: str = ""  # the method on one GPU, by name; "": this is one, or there is none


def draws(names, rounds, seed=0):
    "The order of the methods in each round, the same on every rank"
    order = random.Random(seed)
    return [order.sample(names, len(names)) for _ in range(rounds)]


def largest(values, mesh):
    "Each number of the rank where it is largest: of times, the slowest"
    found = torch.tensor(values, dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return found.tolist()


def of_all(value, mesh):
    "What each rank says"
    said = [None] * mesh.size()
    dist.all_gather_object(said, value, group=mesh.get_group())
    return said


def first_step(step, mesh):
    "The loss, a mean over the ranks that take the step, and why it cannot be taken, the same on all ranks"
    loss, why = None, ""
    try:
        found = step() if step else None
        loss = float(found[0]) if found else None
    except Exception as error:  # a peer may raise anything
        why = brief_error(error)
    losses, reasons = zip(*of_all((loss, why), mesh))
    losses = [loss for loss in losses if loss is not None]
    return statistics.fmean(losses) if losses else math.nan, next(filter(None, reasons), "")


def obstacles(methods, mesh):
    "Why methods are left out: they fail, or their loss is not that of one GPU"
    losses, reasons = {}, {}
    for name, method in methods.items():
        losses[name], why = first_step(method.step, mesh)
        expected = losses.get(method.one, losses[name])  # what is on one GPU stands before
        if not why and not math.isclose(losses[name], expected, rel_tol=SAME) and not math.isnan(expected):
            why = f"its loss is {losses[name]:.6g}, not {expected:.6g}"
        if why:
            reasons[name] = why
    return reasons


def seconds_of(step, calls, mesh):
    "Seconds of a step among `calls` that follow one another; 0 on a rank that waits"
    dist.barrier(mesh.get_group())  # every rank makes as many steps, or they would wait for each other for ever
    if step is None:
        return 0.0
    if mesh.device_type == "cuda":
        return event_seconds(step, calls=calls)[0]
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def in_turn(methods, mesh, rounds=ROUNDS, calls=IN_A_ROW):
    "Seconds of the slowest rank in each round, by name: in a row of steps, and one by one"
    times = {name: [] for name in methods}
    for names in draws([*methods], rounds):
        for name in names:
            times[name].append([seconds_of(methods[name].step, k, mesh) for k in (calls, 1)])
    found = largest([times[name] for name in methods], mesh)
    return {name: dict(zip(("in a row", "one by one"), zip(*rows))) for name, rows in zip(methods, found)}


def linear(one, many, ranks):
    "How much of R times the speed of one GPU: the median over rounds, of seconds on one and over ranks"
    return statistics.median(a / (ranks * b) for a, b in zip(one, many, strict=True))


def peak_of(step, mesh):
    "Bytes above what is there, of the rank with most; what other methods hold is there"
    return int(largest([peak_memory(step, mesh.device_type) if step else 0], mesh)[0])


def figures(times, peak, one, ranks):
    "What is recorded of a method, from its seconds and those of one GPU in the same rounds"
    found = dict(seconds=statistics.median(times), peak=peak)
    return found | dict(linear=linear(one, times, ranks)) if one else found


def measured(methods, mesh, rounds=ROUNDS, calls=IN_A_ROW):
    "Figures by name, or the reason why there are none"
    reasons = obstacles(methods, mesh)
    left = {name: method for name, method in methods.items() if name not in reasons}
    for method in left.values():
        for _ in range(2):  # with the first step, three before the clock
            if method.step:
                method.step()
    peaks = {name: peak_of(method.step, mesh) for name, method in left.items()}
    times, found = in_turn(left, mesh, rounds, calls), {name: dict(reason=why) for name, why in reasons.items()}
    for name, method in left.items():
        for how, suffix in (("in a row", ""), ("one by one", ", one by one")):
            one = times[method.one][how] if method.one in left else None
            found[name + suffix] = figures(times[name][how], peaks[name], one, mesh.size())
    return found


def line(name, found, ranks):
    "What is printed of a method"
    if "reason" in found:
        return f"{name}, {ranks} ranks: left out, {found['reason']}"
    of_linear = f", {found['linear']:.3f} of linear" if "linear" in found else ""
    pools = f" and {si(found['pools'], 'B')} outside PyTorch" if "pools" in found else ""
    off = "".join(f", {kind} {found[kind]:.1e}" for kind in ("loss error", "dx error", "dw error") if kind in found)
    return f"{name}, {ranks} ranks: {si(found['seconds'], 's')}{of_linear}, {si(found['peak'], 'B')} at the peak{pools}{off}"
