"""Variants of a kernel are timed once, remembered on disk, and the same on all ranks; what was chosen can be read, written to a file, and imposed."""

__all__ = ["fastest_variant"]


import contextlib
import functools
import json
import logging
import os
import random
import statistics
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from fusedloss.core import store
from fusedloss.core.devices import device_of
from fusedloss.core.triton import launch_kernel


def say(line: str):
    "Print to stderr, above the progress bars of a process that has some."
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    write = bars.write if bars else print
    write(line, file=sys.stderr)


@contextlib.contextmanager
def announced(
    what: str,
    after: float = 1.0,  # seconds
) -> Iterator[None]:
    "Say on stderr what is being done, if it takes longer."
    timer = threading.Timer(after, say, [f"fusedloss: {what} ..."])
    timer.daemon = True
    with contextlib.suppress(RuntimeError):
        timer.start()  # no threads while Python ends
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def platform_of(device: torch.device) -> str:
    "GPU and versions."
    triton = sys.modules.get("triton")
    d = device_of(device)
    where = d.name
    if d.vendor != "none":
        where += f" {d.capability} with {d.multiprocessors} multiprocessors"
    version = torch.version.hip and f"HIP {torch.version.hip}" or f"CUDA {torch.version.cuda}"
    return f"{where}, torch {torch.__version__}, triton {getattr(triton, '__version__', None)}, {version}"


def flag_text(value: Any) -> str:
    "A flag in words; a function of Triton by its name and source."
    key = getattr(value, "cache_key", None)
    return repr(value) if key is None else f"{value.__name__}:{key[:12]}"


def problem_of(
    kernel,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    flags: dict[str, Any],
    first: tuple,  # the variant that is taken untimed
) -> str:
    "What a caller asks of a kernel."
    shape = "×".join(str(2 ** (size - 1).bit_length()) for size in sizes)
    options = " ".join(f"{name}={flag_text(value)}" for name, value in flags.items())
    tile = ",".join(map(str, first))
    return f"{kernel.__name__} {str(dtype).removeprefix('torch.')} {shape} [{tile}] {options}".strip()


def key_of(problem: str, kernel, device: torch.device) -> str:
    "A problem on a platform."
    return f"{problem} | {platform_of(device)}, source {getattr(kernel, 'cache_key', '')[:16]}"


def event_seconds(
    run: Callable[[], Any],  # warm: its first call may compile
    rounds: int = 1,  # measurements
    calls: int = 1,  # calls of each, which follow one another
) -> list[float]:  # one for each round
    "Seconds of a call on the current GPU."
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in pairs:
        begin.record()
        for _ in range(calls):
            run()
        end.record()
    pairs[-1][1].synchronize()
    return [begin.elapsed_time(end) * 1e-3 / calls for begin, end in pairs]


def _compile_all(run: Callable[..., None], variants: list[tuple]):
    "Compile side by side where Triton can; what fails will fail again where it is launched."
    try:
        from triton import AsyncCompileMode
    except ImportError:
        return
    with contextlib.suppress(Exception), ThreadPoolExecutor(len(variants)) as pool:
        with AsyncCompileMode(pool, ignore_errors=True):
            for variant in variants:
                run(variant, True)


def launcher(kernel, grid: tuple[int, ...], compile_only: bool = False) -> Callable[..., Any]:
    "What launches a kernel of Triton, or only compiles it."
    if compile_only:
        return functools.partial(kernel.warmup, grid=grid)
    return functools.partial(launch_kernel, kernel, grid)


def variant_milliseconds(run: Callable[..., None], variant: tuple) -> float:
    "Time of the second and third of three launches."
    run(variant)
    return 1e3 * event_seconds(functools.partial(run, variant), calls=2)[0]


ROUNDS = 3


def _time_variants(run: Callable[..., None], variants: list[tuple]) -> dict[tuple, float]:
    "Median milliseconds of each variant that works."
    _compile_all(run, variants)
    found, reason, order = {variant: [] for variant in variants}, None, random.Random(0)
    for _ in range(ROUNDS):
        for variant in order.sample([*found], len(found)):  # one that follows a cool one gains
            try:
                found[variant].append(variant_milliseconds(run, variant))
            except Exception as failure:
                reason = failure
                del found[variant]
    if not found:
        raise reason
    return {variant: statistics.median(times) for variant, times in found.items()}


class _Chosen:
    "What this process has chosen."

    def __init__(self):
        self.lock = threading.RLock()
        self.variants: dict[Hashable, tuple] = {}  # by what a launch looks up
        self.used: dict[str, tuple] = {}  # by key
        self.methods: dict[Hashable, str] = {}  # by request


_chosen = _Chosen()
logger = logging.getLogger("fusedloss")


def _renew_lock():
    _chosen.lock = threading.RLock()


@functools.cache
def _watch_forks():
    "A lock that is held in another thread is held for ever in a fork."
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_renew_lock)


def _lock() -> threading.RLock:
    _watch_forks()
    return _chosen.lock


CHOICES_FORMAT = '{"variants": {key: [fields]}, "methods": {request: name}}'


def _checked_choices(path: str, found: Any) -> dict[str, dict]:
    "`ValueError` if a file holds anything but choices."

    def is_map(part, kind):
        return isinstance(part, dict) and all(isinstance(v, kind) for v in part.values())

    fits = isinstance(found, dict) and found.keys() <= {"variants", "methods"}
    if fits and is_map(found.get("variants", {}), list) and is_map(found.get("methods", {}), str):
        return {"variants": found.get("variants", {}), "methods": found.get("methods", {})}
    raise ValueError(f"FUSEDLOSS_CHOICES={path}: expected {CHOICES_FORMAT}, got {found!r:.200}")


@functools.cache
def read_choices(path: str) -> dict[str, dict]:
    "A file of choices; raises a `ValueError` that names it."
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as reason:
        raise ValueError(f"FUSEDLOSS_CHOICES={path}: expected a file of choices in JSON, got {reason!r}") from reason
    return _checked_choices(path, found)


def _from_file(kind: str, key: str) -> Any:
    "What the file says of a key; None if there is no file, or nothing."
    path = os.environ.get("FUSEDLOSS_CHOICES")
    return read_choices(path)[kind].get(key) if path else None


def _invalid_choice(key: str, offered: list, got: Any) -> ValueError:
    "The error for a choice that is none."
    return ValueError(
        f"FUSEDLOSS_CHOICES={os.environ.get('FUSEDLOSS_CHOICES')}: {key}: expected one of {offered}, got {got!r}"
    )


def _variant_with(variants: list[tuple], fields: Any) -> Optional[tuple]:
    "The variant with these fields; None if there is none."
    return next((v for v in variants if isinstance(fields, list) and list(v) == fields), None)


def choices() -> dict[str, dict]:
    "What this process has chosen so far: variants by key, methods of the last 4096 requests of `auto`."
    with _lock():
        return {
            "variants": {key: list(v) for key, v in sorted(_chosen.used.items())},
            "methods": dict(sorted((repr(r), m) for r, m in _chosen.methods.items())),
        }


def write_choices(path: str | Path) -> None:
    "Write `choices()` to a file for `FUSEDLOSS_CHOICES`; the file is whole at any time, as every rank may write it."
    new = Path(f"{path}.{uuid.uuid4().hex}")
    try:
        new.write_text(json.dumps(choices(), indent=1) + "\n", encoding="utf-8")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


class _Agreement:
    "The variants that ranks have agreed on for one kind of call."

    def __init__(self, leads: bool):
        self.leads, self.calls = leads, 0
        self.table: dict[str, list] = {}  # by problem
        self.variants: dict[Hashable, tuple] = {}  # by what a launch looks up

    @property
    def closed(self) -> bool:
        return self.calls == 2

    def agreed(self, problem: str, variants: list[tuple]) -> Optional[tuple]:
        "The variant of a problem, or of another shape or tile of the same kernel."
        kernel = problem.split()[0]
        others = [fields for other, fields in self.table.items() if other.split()[0] == kernel]
        return _variant_with(variants, self.table.get(problem, others[0] if others else None))


_agreements = weakref.WeakKeyDictionary()  # by process group, then by kind of call
_thread = threading.local()


def _from_first_rank(table: dict, group, device: torch.device) -> dict:
    "The first rank's table."
    import torch.distributed as dist

    send = functools.partial(dist.broadcast, src=dist.get_global_rank(group, 0), group=group)
    text = torch.frombuffer(bytearray(json.dumps(table).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([len(text)], device=device)
    send(size)
    if dist.get_rank(group):
        text = torch.empty(int(size), dtype=torch.uint8, device=device)
    send(text)
    return json.loads(bytes(text.tolist()))


def in_graph() -> bool:
    "Whether a CUDA graph is being captured here."
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_capturing() -> bool:
    "Whether a CUDA graph is being captured here, or a compiler traces."
    return torch.compiler.is_compiling() or in_graph()


def _stored_table(key: str) -> dict[str, list]:
    "The table that the disk holds for a key; without what is none: a rank that raised here would leave the others waiting."
    found = store.read("tuning").get(key)
    table = found.get("table") if isinstance(found, dict) else None
    if not isinstance(table, dict):
        return {}
    return {problem: fields for problem, fields in table.items() if problem.split() and isinstance(fields, list)}


def rank_agreement(
    group,  # a process group whose ranks all make this call; None: one process
    device: torch.device,  # of the group's tensors
    *kind,  # of the call: words and numbers that are the same on all ranks
) -> Optional[_Agreement]:
    "The ranks' agreement on a kind of call; a collective in the first two calls."
    if group is None:
        return None
    call = " ".join(map(str, kind))
    if is_capturing():
        return _agreements.get(group, {}).get(call)
    import torch.distributed as dist

    if dist.get_world_size(group) == 1:
        return None
    agreement = _agreements.setdefault(group, {}).setdefault(call, _Agreement(dist.get_rank(group) == 0))
    if agreement.closed:
        return agreement
    key, agreement.calls = f"{call}, {dist.get_world_size(group)} ranks | {platform_of(device)}", agreement.calls + 1
    if agreement.leads and agreement.calls == 1:
        agreement.table = _stored_table(key)
    elif agreement.leads and agreement.table:
        store.update("tuning", key, {"table": agreement.table})
    agreement.table = _from_first_rank(agreement.table, group, device)
    agreement.variants.clear()
    return agreement


def keep_agreement(
    agreement: Optional[_Agreement],  # of `rank_agreement`; None: as without
) -> contextlib.AbstractContextManager:
    "Launches of this thread keep to an agreement; a compiler sees none, as it times nothing."
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return _with_agreement(agreement)


@contextlib.contextmanager
def _with_agreement(agreement: Optional[_Agreement]) -> Iterator[None]:
    before, _thread.agreement = current_agreement(), agreement
    try:
        yield
    finally:
        _thread.agreement = before


def current_agreement() -> Optional[_Agreement]:
    "The agreement that holds here, for a backward pass to keep."
    return getattr(_thread, "agreement", None)


def _time_and_store(kernel, key: str, variants: list[tuple], run: Callable[..., None]) -> tuple:
    "The fastest by the clock, unless another process was faster to write its own."
    with announced(f"compiles and times {len(variants)} variants of {kernel.__name__}, once for this GPU"):
        times = _time_variants(run, variants)
    logger.debug("%s: %s", key, times)
    best = min(times, key=times.get)
    other = _stored_variant(key, variants)
    if other is None:
        store.update("tuning", key, {"variant": list(best), "milliseconds": times[best]})
    return other or best


def _stored_variant(key: str, variants: list[tuple]) -> Optional[tuple]:
    "The variant that the disk remembers."
    found = store.read("tuning").get(key)
    return _variant_with(variants, found.get("variant")) if isinstance(found, dict) else None


def _choose_variant(
    kernel,
    problem: str,
    key: str,
    variants: list[tuple],
    run: Callable[..., None],
    agreement: Optional[_Agreement],
) -> Optional[tuple]:  # None: the untimed one, for now
    "The variant to take from now on."
    imposed = _from_file("variants", key)
    if imposed is not None:
        found = _variant_with(variants, imposed)
        if found is None:
            raise _invalid_choice(key, [list(v) for v in variants], imposed)
        return found
    if agreement is not None:
        found = agreement.agreed(problem, variants)
        if agreement.closed:
            return found or variants[0]
        if found is not None or not agreement.leads:
            return found
    found = _stored_variant(key, variants)
    return found if found is not None or is_capturing() else _time_and_store(kernel, key, variants, run)


def fastest_variant(
    kernel,  # of Triton
    t: Tensor,  # the operand that tells device and dtype
    sizes: tuple[int, ...],  # sizes of the work
    first: tuple,  # the one that is taken untimed
    variants: Callable[[], list[tuple]],  # all of them
    run: Callable[..., None],  # `run(variant)` launches, `run(variant, True)` only compiles
    **flags,  # whatever else the kernel is compiled for
) -> tuple:
    "The fastest variant for this class of sizes."
    agreement, classes = current_agreement(), tuple((size - 1).bit_length() for size in sizes)
    looked_up = kernel.__name__, t.device, t.dtype, classes, first, *flags.values()
    variants_here = (_chosen if agreement is None else agreement).variants
    if (found := variants_here.get(looked_up)) is not None:
        return found
    problem = problem_of(kernel, t.dtype, sizes, flags, first)
    key = key_of(problem, kernel, t.device)
    with _lock():
        if (found := variants_here.get(looked_up)) is not None:
            return found
        found = _choose_variant(kernel, problem, key, variants(), run, agreement)
        if found is None:
            return first
        variants_here[looked_up] = _chosen.used[key] = found
        if agreement is not None and agreement.leads:
            agreement.table[problem] = list(found)
    return found


MOST = 4096  # requests whose methods are kept, as by the tables of plans


def chosen_method(
    request: Hashable,  # all that the choice depends on; its `repr` is the key in a file
    planned: str,  # what the plan takes
    able: Callable[[], list[str]],  # what it could take
) -> str:
    "The method to take, by the file of choices or by the plan."
    if _chosen.methods.get(request) == planned:
        return planned
    found = _from_file("methods", repr(request))
    if found is not None and found not in able():
        raise _invalid_choice(repr(request), able(), found)
    with _lock():
        _chosen.methods[request] = found or planned
        if len(_chosen.methods) > MOST:
            del _chosen.methods[next(iter(_chosen.methods))]  # the oldest
    return found or planned
