"""One step as PyTorch's profiler recorded it: what the host issued, what the GPU ran, and for each pause of the GPU whether the host was late."""

__all__ = ["record_timeline", "run_profiled", "timeline_plot"]


import json
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Callable, NamedTuple

import torch

from workbook.drawing import as_drawing, Drawing, drawing_style, GREY, STAGE_COLORS


ON_GPU, CALLS = {"kernel", "gpu_memcpy", "gpu_memset"}, {"cuda_runtime", "cuda_driver"}
STEP = "the step"  # the name under which the profiler files what is between its start and end


class Work(NamedTuple):
    "A kernel or copy on the GPU; seconds since the step began."

    name: str
    issued: float  # when the host's call began
    start: float
    stop: float


class Timeline(NamedTuple):
    "A step: what ran on the GPU in the order of its starts, and when the host stood still for it."

    work: list[Work]
    blocked: list[tuple[float, float]]  # the host's calls that wait for the GPU, in seconds


def step_of(events: list[dict]) -> tuple[float, float]:
    "When the host began the step and when it was done with it."
    steps = [e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation"]
    if len(steps) != 1:
        raise ValueError(f"trace: expected one step, got {len(steps)}")
    return steps[0]["ts"], steps[0]["ts"] + steps[0]["dur"]


def number_of(event: dict):
    return event.get("args", {}).get("correlation")


def waits_for(call: dict, ran: list[dict]) -> bool:
    "Does the host stand still in this call, whose work on the GPU is `ran`?"
    copied = any("DtoH" in e["name"] and e["ts"] + e["dur"] <= call["ts"] + call["dur"] for e in ran)
    return "Synchronize" in call["name"] or "Memcpy" in call["name"] and copied


def read_trace(events: list[dict]) -> Timeline:  # `traceEvents` of Chrome's format
    "The step of a trace. `ValueError` where it has no step, nothing ran on a GPU, or a launch lacks its kernel."
    events = [e for e in events if e.get("ph") == "X"]
    began, ended = step_of(events)
    calls = {number_of(e): e for e in events if e.get("cat") in CALLS and began <= e["ts"] <= ended}
    ran = sorted((e for e in events if e.get("cat") in ON_GPU and e["ts"] >= began), key=lambda e: e["ts"])
    if not ran:
        raise ValueError("trace: expected work on a GPU, got none (may this process use the GPU's profiler?)")
    of_call = defaultdict(list)
    for e in ran:
        of_call[number_of(e)].append(e)
    lost = [
        call["name"]
        for number, call in calls.items()
        if re.search("LaunchKernel|GraphLaunch", call["name"]) and not of_call[number]
    ]
    if lost:
        raise ValueError(f"trace: expected a kernel of each launch, got none of {len(lost)}: {lost[:3]}")
    seconds = lambda t: (t - began) * 1e-6
    issued = lambda e: seconds(calls[number_of(e)]["ts"] if number_of(e) in calls else began)
    blocked = [
        (seconds(c["ts"]), seconds(c["ts"] + c["dur"])) for number, c in calls.items() if waits_for(c, of_call[number])
    ]
    return Timeline(
        [Work(e["name"], issued(e), seconds(e["ts"]), seconds(e["ts"] + e["dur"])) for e in ran], sorted(blocked)
    )


class Pause(NamedTuple):
    "A time in which the GPU ran nothing, in seconds."

    start: float
    stop: float
    for_host: bool  # whether what came next had been issued too late to start when the pause began


def pauses(timeline: Timeline) -> list[Pause]:
    "All pauses of the step until its last work; the first lasts from the step's begin."
    latency = max(0.0, min(w.start - w.issued for w in timeline.work))
    found, until = [], 0.0
    for work in timeline.work:
        if work.start > until:
            found.append(Pause(until, work.start, work.issued + latency > until))
        until = max(until, work.stop)
    return found


def joined(spans: list[tuple[float, float]], least: float) -> list[tuple[float, float]]:
    "Spans from start to stop in the order of their starts, each at least `least` long, those in one that are less than `least` apart."
    found = []
    for start, stop in spans:
        stop = max(stop, start + least)
        if found and start - found[-1][1] < least:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def shares(timeline: Timeline) -> dict[str, float]:
    "Parts of the time from the step's begin to the end of its last work: the first three add up to 1; `blocked` is the host's."
    end, found = max(w.stop for w in timeline.work), pauses(timeline)
    length = lambda for_host: sum(p.stop - p.start for p in found if p.for_host == for_host) / end
    blocked = sum(min(stop, end) - min(start, end) for start, stop in joined(sorted(timeline.blocked), 0.0)) / end
    return dict(busy=1 - length(True) - length(False), for_host=length(True), between=length(False), blocked=blocked)


def record_timeline(
    step: Callable[[], object],  # issues its work on the current GPU
    warmup: int = 3,  # runs before the profiler's own
) -> Timeline:
    "One run of `step` under PyTorch's profiler, on an idle GPU. `RuntimeError` without a GPU."
    if not torch.cuda.is_available():
        raise RuntimeError("record_timeline: expected a GPU, got none")
    for _ in range(warmup):
        step()
    run_profiled(step)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        run_profiled(step).export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def run_profiled(step: Callable[[], object]) -> torch.profiler.profile:
    "The profiler's record of one run, and before it of kernels of no interest: a session can lose its first ones."
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        for _ in range(64):
            torch.ones(1, device="cuda")
        torch.cuda.synchronize()
        with torch.profiler.record_function(STEP):
            step()
        torch.cuda.synchronize()
    return profile


KINDS = {
    "products": r"gemm|nvjet|cutlass|xmma|gemv|splitK",
    "copies": r"^Mem(cpy|set)",
    "PyTorch's kernels": r"at::|cub::|vectorized_|reduce_kernel|triton_(poi|red|per|tem)_",
    "ours and others'": "",
}  # of a kernel's name, the first that is found
KIND_COLORS = dict(zip(KINDS, (STAGE_COLORS[0], GREY, STAGE_COLORS[1], STAGE_COLORS[2])))


def kind_of(name: str) -> str:
    "Which of `KINDS` a kernel is."
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))


FOR_HOST, FOR_GPU = "the GPU waits for the host", "the host waits for the GPU"
LANES = {"host": 2.5, "GPU": 1.5, "waits": 0.5}


def draw_spans(ax, lane: str, spans: list[tuple[float, float]], color: str, **style):
    "Bars of a lane, from start to stop in seconds, as one path; the axis is in milliseconds."
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path as Outline

    boxes = [Rectangle((start * 1e3, LANES[lane] - 0.4), (stop - start) * 1e3, 0.8) for start, stop in spans]
    outlines = [box.get_patch_transform().transform_path(box.get_path()) for box in boxes]
    if outlines:
        ax.add_patch(PathPatch(Outline.make_compound_path(*outlines), color=color, linewidth=0, **style))


def draw_step(ax, timeline: Timeline, least: float):
    "Three lanes: the host's calls, and lighter its waits; what the GPU ran; and the pauses in which the GPU waited for the host."
    draw_spans(ax, "host", timeline.blocked, GREY, alpha=0.3)
    draw_spans(ax, "host", joined([(t, t) for t in sorted(w.issued for w in timeline.work)], least), GREY)
    for kind, color in KIND_COLORS.items():
        draw_spans(
            ax, "GPU", joined([(w.start, w.stop) for w in timeline.work if kind_of(w.name) == kind], least), color
        )
    draw_spans(ax, "waits", joined([(p.start, p.stop) for p in pauses(timeline) if p.for_host], least), STAGE_COLORS[3])
    ax.set_yticks(list(LANES.values()), ["host", "GPU", "waits"])


def legend_of(fig, timelines: list[Timeline]):
    "The kinds that occur, and the colours of waiting."
    from matplotlib.patches import Patch

    kinds = {kind_of(w.name) for timeline in timelines for w in timeline.work}
    handles = [Patch(color=color, label=kind) for kind, color in KIND_COLORS.items() if kind in kinds]
    handles += [Patch(color=STAGE_COLORS[3], label=FOR_HOST), Patch(color=GREY, alpha=0.3, label=FOR_GPU)]
    fig.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)


def summary(timeline: Timeline) -> str:
    "How long the step took, and what became of the GPU's time."
    part, end = shares(timeline), max(w.stop for w in timeline.work)
    return (
        f"{end * 1e3:.3g} ms: GPU busy {part['busy']:.0%}, waits for the host {part['for_host']:.0%}, "
        f"between kernels {part['between']:.0%}; host waits {part['blocked']:.0%}"
    )


def timeline_plot(
    steps: dict[str, Timeline],  # by the name of the step
    title: str,
    alt: str,
    caption: str = "",
) -> Drawing:
    "Steps below one another on one axis of time: the host's calls, what the GPU ran, and its waits for the host."
    import matplotlib.pyplot as plt

    end = max(w.stop for timeline in steps.values() for w in timeline.work)
    with drawing_style():
        fig, axes = plt.subplots(len(steps), 1, figsize=(7.4, 1.1 + 1.35 * len(steps)), sharex=True, squeeze=False)
        for ax, (name, timeline) in zip(axes[:, 0], steps.items()):
            draw_step(ax, timeline, end / 600)
            ax.set(xlim=(0, end * 1e3), ylim=(0, 3))
            ax.set_title(f"{name}: {summary(timeline)}", fontsize=9, fontweight="normal", pad=4)
        axes[-1, 0].set_xlabel("ms since the step began")
        fig.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        legend_of(fig, list(steps.values()))
        return as_drawing(
            fig, f"{alt} " + " ".join(f"{name}: {summary(timeline)}." for name, timeline in steps.items()), caption
        )
