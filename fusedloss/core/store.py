"""What is worth remembering between processes, in JSON files beside Triton's cache."""

import contextlib
import errno
import functools
import json
import math
import multiprocessing.util
import os
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

try:
    import fcntl
except ImportError:
    fcntl = None  # Windows: updates are merged, without a lock


def _of_inductor(path: str) -> bool:
    "Whether TorchInductor set this place for Triton's cache."
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return bool(inductor) and Path(inductor) in Path(path).parents


def _absolute(path: str) -> Path:
    "Where a path leads; as it is if the working directory was removed."
    try:
        return Path(path).absolute()
    except OSError:
        return Path(path)


def folder() -> Path:
    "Where the files lie; it need not exist."
    if own := os.environ.get("FUSEDLOSS_CACHE_DIR"):
        return _absolute(own)
    triton = os.environ.get("TRITON_CACHE_DIR")
    if triton and not _of_inductor(triton):
        return _absolute(triton) / "fusedloss"
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return _absolute(home) / ".triton" / "fusedloss"


_warned = set()  # what a warning has named in this process


def _warn_once(path: Path, what: str):
    "One warning for each file, and one for its folder."
    if path in _warned:
        return
    _warned.add(path)
    warnings.warn(f"fusedloss: {path}: {what}", stacklevel=3)


def _why_untrusted(found: os.stat_result) -> Optional[str]:
    "Why a file is not trusted; None if it is."
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        return f"passed over: expected a file of user {os.getuid()}, got one of user {found.st_uid}"
    if os.name == "posix" and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "passed over: expected a file that its owner alone may write, got one that others may write"
    if not stat.S_ISREG(found.st_mode):
        return "passed over: expected a regular file"


LARGEST = 2**26  # bytes of a file
NOT_OURS = {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO}  # what opening says of a file that no update wrote


def _is_storable(value: Any, deep: int = 64) -> bool:
    "Whether JSON holds it, on every stack: finite numbers, nested at most so deep."
    if isinstance(value, dict):
        return deep > 0 and all(_is_storable(v, deep - 1) for v in value.values())
    if isinstance(value, list):
        return deep > 0 and all(_is_storable(v, deep - 1) for v in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or value.bit_length() <= 1024


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    "The entries of a file that an update would write; a warning if that is not all."
    try:
        found = json.loads(text) if len(text) <= LARGEST else f"more than {LARGEST} bytes"
    except (ValueError, RecursionError, MemoryError) as reason:
        found = repr(reason)
    if not isinstance(found, dict):
        what = found if isinstance(found, str) else type(found).__name__
        _warn_once(path, f"replaced at the next update: expected a JSON object, got {what:.200}")
        return {}
    kept = {key: value for key, value in found.items() if _is_storable(value)}
    if len(kept) < len(found):
        _warn_once(
            path,
            "entries passed over: expected finite numbers, and values nested at "
            f"most 64 deep, got others in {len(found) - len(kept)}",
        )
    return kept


def _read_file(path: Path) -> dict[str, Any]:
    "A file's keys and values; nothing, and a warning, if it cannot be trusted or understood."
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe must not wait
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as reason:
        if reason.errno not in NOT_OURS:
            raise
        _warn_once(path, f"replaced at the next update: {reason!r}")
        return {}
    try:
        if why := _why_untrusted(os.fstat(file)):
            _warn_once(path, why)
            return {}
        with open(file, "rb", closefd=False) as f:
            text = f.read(LARGEST + 1)
    finally:
        os.close(file)  # `open` takes no folder, and leaves it open
    return _parse(path, text)


_waiting: dict[Path, dict[str, Any]] = {}  # updates that are not written yet
_guard = threading.Lock()  # of changes to them


def _renew_guard():
    global _guard
    _guard = threading.Lock()


@functools.cache
def _watch_forks():
    "A lock that is held in another thread is held for ever in a fork."
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_renew_guard)


def _waiting_for(path: Path) -> dict[str, Any]:
    "A copy of the updates of a file that are not written yet."
    with _guard:
        return dict(_waiting.get(path, {}))


def read(
    name: str,  # of the store
) -> dict[str, Any]:
    "All keys and values of a store; never raises."
    path = folder() / f"{name}.json"
    waiting = _waiting_for(path)  # before the file, into which they may go meanwhile
    try:
        return _read_file(path) | waiting
    except OSError as reason:
        _warn_once(path.parent, f"not read: {reason!r}")
    return waiting


WAIT, LAST_WAIT = 2.0, 10.0  # seconds for a lock; at the end of a process


@contextlib.contextmanager
def _locked(path: Path, wait: float) -> Iterator[bool]:
    "No other process updates `path` meanwhile, as far as the file system can lock; False if one does so all the time."
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        file = os.open(path.with_suffix(".lock"), flags, 0o600) if fcntl else None
    except OSError:
        file = None  # no file of ours: what cannot be written will say so
    held, end = file is None, time.monotonic() + wait
    try:
        while not held:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    break
                time.sleep(0.005)
                continue
            except OSError:
                pass  # no locks here
            held = True
        yield held
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # held or not: an interruption may hide it
            os.close(file)


STALE = 60.0  # seconds after which no writer is still at work on a file


def _remove_stale(path: Path):
    "Remove files that killed writers left."
    for left in path.parent.glob(f".{path.stem}-*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE:
                left.unlink()


def _make_room(path: Path):
    "Remove an empty folder in a file's place; give a full one another name."
    try:
        path.rmdir()
    except OSError:
        path.rename(tempfile.mkdtemp(dir=path.parent, prefix=f"{path.name}-"))


def _replace_file(path: Path, text: str):
    "Put a file with this text in the place of `path`."
    file, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")  # 0600
    try:
        with open(file, "w", encoding="utf-8") as f:
            f.write(text)
        if path.is_dir() and not path.is_symlink():
            _make_room(path)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def _merge(path: Path, values: dict[str, Any], wait: float) -> bool:
    "Write values into a file; False if another process updates it all the time."
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(path, wait) as held:
        if not held:
            return False
        _remove_stale(path)
        known = _read_file(path)
        if known | values != known:
            text = json.dumps(known | values, indent=1, sort_keys=True, allow_nan=False)
            if len(text) > LARGEST:
                raise ValueError(f"expected at most {LARGEST} bytes, got {len(text)}")
            _replace_file(path, text)
    return True


def _write(path: Path, last: bool = False):  # the process ends
    "Write what waits for a file; what cannot be written waits on, or is lost with a warning."
    values = _waiting_for(path)
    if not values:
        return  # another thread has written them
    try:
        written = _merge(path, values, LAST_WAIT if last else WAIT)
    except (OSError, ValueError, RecursionError, MemoryError) as reason:
        return _warn_once(path.parent if isinstance(reason, OSError) else path, f"not written: {reason!r}")
    if not written and last:
        _warn_once(
            path.with_suffix(".lock"), f"{len(values)} updates not written: expected a free lock, got a held one"
        )
    with _guard:
        for key, value in values.items():
            if written and _waiting[path].get(key) is value:
                del _waiting[path][key]


def _write_last():
    "Write what waits as the process ends."
    for path in [*_waiting]:
        _write(path, last=True)


@functools.cache
def _at_end(process: int):  # its number: a worker that is forked has an end of its own
    multiprocessing.util.Finalize(None, _write_last, exitpriority=0)


def update(
    name: str,  # of the store
    key: str,  # within it
    value: Any,  # what JSON can hold: finite numbers, nested at most 64 deep
) -> None:
    "Keep a value; other keys stay, whoever wrote them. Never raises."
    path = folder() / f"{name}.json"
    if not path.is_absolute():  # it would be another place later
        return _warn_once(path.parent, "not written: expected a working directory, got one that was removed")
    try:
        text = json.dumps({key: value}, allow_nan=False)
        ((key, value),) = json.loads(text).items()  # as they will be read
        fits = _is_storable(value) and len(text) < LARGEST // 2
        if not fits:
            raise ValueError("expected integers of at most 1024 bits, nested at most 64 deep, in 32 MiB")
    except (ValueError, TypeError, RecursionError) as reason:
        return _warn_once(path, f"not written: {reason!r}")
    _watch_forks()
    with _guard:
        _waiting.setdefault(path, {})[key] = value
    try:
        _write(path)
    finally:
        if _waiting_for(path):
            _at_end(os.getpid())
