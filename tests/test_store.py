"""The store on disk: any number of processes, files that are damaged or not ours, folders that cannot be written."""
import json
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest

from fusedloss.core import store

POSIX = pytest.mark.skipif(os.name != "posix", reason="permissions and locks of POSIX")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    "A folder of its own, not made yet; no warning has been given"
    monkeypatch.setenv("FUSEDLOSS_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setattr(store, "_waiting", {})
    return tmp_path / "store"


@pytest.mark.parametrize("env, expected", [
    ({"FUSEDLOSS_CACHE_DIR": "/a/b", "TRITON_CACHE_DIR": "/c"}, "/a/b"),
    ({"TRITON_CACHE_DIR": "/c", "TRITON_HOME": "/h"}, "/c/fusedloss"),
    ({"TRITON_HOME": "/h"}, "/h/.triton/fusedloss"),
    ({"HOME": "/u"}, "/u/.triton/fusedloss"),
    # what TorchInductor sets for its own process
    ({"TRITON_CACHE_DIR": "/i/triton/0", "TORCHINDUCTOR_CACHE_DIR": "/i", "HOME": "/u"}, "/u/.triton/fusedloss"),
    ({"TRITON_CACHE_DIR": "/c", "TORCHINDUCTOR_CACHE_DIR": "/i"}, "/c/fusedloss"),
])
def test_the_folder_follows_triton(env, expected, monkeypatch):
    for name in ("FUSEDLOSS_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert store.folder() == Path(expected)


@POSIX
def test_what_is_written_is_read_and_nobody_else_may_read_it(place):
    assert store.read("x") == {} and not place.exists()  # reading makes nothing
    store.update("x", "a", [1, {"b": None}])
    store.update("x", "c", 2.5)
    store.update("y", "a", "other")
    assert store.read("x") == {"a": [1, {"b": None}], "c": 2.5} and store.read("y") == {"a": "other"}
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in place.iterdir()} == {0o600}
    assert {p.suffix for p in place.iterdir()} == {".json", ".lock"}  # no file is left behind
    (place / "x.json").unlink()
    assert store.read("x") == {}


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\0\xff", "[" * 100_000, "[" * 700 + "]" * 700, '{"a": ' + "[" * 100_000])
def test_a_damaged_file_costs_one_warning_that_names_it_and_is_replaced(place, text):
    place.mkdir()
    (place / "x.json").write_bytes(text.encode("latin-1"))
    with pytest.warns(UserWarning, match=r"x\.json.*expected a JSON object") as seen:
        assert store.read("x") == {} and store.read("x") == {}
        store.update("x", "a", 1)
    assert len(seen) == 1
    assert store.read("x") == {"a": 1}


@pytest.mark.parametrize("bad", ["NaN", "-Infinity", "1e999", '[{"c": [Infinity]}]', "[" * 70 + "]" * 70, '{"c":' * 500 + "1" + "}" * 500, "9" * 1000])
def test_an_entry_that_no_update_would_write_is_passed_over_and_the_others_stay(place, bad):
    place.mkdir()
    (place / "x.json").write_text(f'{{"a": {bad}, "b": [1.5, null]}}')
    with pytest.warns(UserWarning, match=r"x\.json: entries passed over") as seen:
        assert store.read("x") == {"b": [1.5, None]}
        store.update("x", "c", 1)
    assert len(seen) == 1 and json.loads((place / "x.json").read_text()) == store.read("x") == {"b": [1.5, None], "c": 1}


def test_what_is_written_is_what_is_read(place):
    "Tuples become lists, and numbers that are keys become words; the same value once more writes nothing"
    for value in ((1, 2), {1: {2: (None,)}}, [[[1]]], "\ud800", 2**64, True):
        store.update("x", "a", value)
        before = (place / "x.json").stat().st_ino
        store.update("x", "a", value)
        assert (place / "x.json").stat().st_ino == before and json.loads((place / "x.json").read_text()) == store.read("x")
    deep = []
    for _ in range(70):
        deep = [deep]
    for key, value in (("deep", deep), ("large", 10**400), ("endless", [float("inf")])):
        with pytest.warns(UserWarning, match="not written"):
            store.update(key, "a", value)
        assert store.read(key) == {}


def test_a_file_larger_than_any_is_not_read(place, monkeypatch):
    monkeypatch.setattr(store, "LARGEST", 200)
    place.mkdir()
    (place / "x.json").write_text('{"a": 1' + " " * 300 + "}")
    with pytest.warns(UserWarning, match="expected a JSON object, got more than 200 bytes"):
        assert store.read("x") == {}
    store.update("x", "b", 2)
    with pytest.warns(UserWarning, match="y.json: not written"):
        store.update("y", "b", "b" * 200)
    assert store.read("x") == {"b": 2} and store.read("y") == {}


@POSIX
@pytest.mark.parametrize("inside", [(), ("kept", "x.json")], ids=["empty", "full"])
def test_a_folder_in_the_place_of_a_file_is_replaced_and_what_is_in_it_stays(place, inside):
    (place / "x.json").mkdir(parents=True)
    for name in inside:
        (place / "x.json" / name).write_text(name)
    with pytest.warns(UserWarning, match="regular file"):
        store.update("x", "a", 1)
    assert store.read("x") == {"a": 1}
    assert {p.name: p.read_text() for p in place.glob("x.json-*/*")} == {name: name for name in inside}


@POSIX
def test_what_cannot_be_opened_is_replaced(place, monkeypatch):
    (place).mkdir()
    (place / "x.json").symlink_to("x.json")  # an endless way
    (place / "x.lock").mkdir()  # and no lock
    with pytest.warns(UserWarning, match="x.json: replaced at the next update"):
        assert store.read("x") == {}
    store.update("x", "a", 1)
    assert store.read("x") == {"a": 1} and not (place / "x.json").is_symlink()
    opened = os.open
    def refuse(path, flags, *mode):  # as for a file without permissions, which root may read
        if Path(path) == place / "x.json": raise PermissionError(13, "Permission denied")
        return opened(path, flags, *mode)
    with monkeypatch.context() as m:
        m.setattr(os, "open", refuse)
        store.update("x", "b", 2)
    assert store.read("x") == {"b": 2}


@POSIX
def test_a_file_that_fails_to_be_read_for_once_loses_nothing(place, monkeypatch):
    store.update("x", "a", 1)
    def fail(*_): raise OSError(5, "Input/output error")
    with monkeypatch.context() as m, pytest.warns(UserWarning, match="not written"):
        m.setattr(os, "fstat", fail)
        store.update("x", "b", 2)
    store.update("x", "c", 3)
    assert store.read("x") == {"a": 1, "b": 2, "c": 3}


@POSIX
def test_a_file_that_others_may_write_is_passed_over(place):
    store.update("x", "a", 1)
    (place / "x.json").chmod(0o622)
    with pytest.warns(UserWarning, match="owner alone"):
        assert store.read("x") == {}
    store.update("x", "b", 2)
    assert store.read("x") == {"b": 2} and stat.S_IMODE((place / "x.json").stat().st_mode) == 0o600


@POSIX
def test_a_file_of_another_user_is_passed_over(place, monkeypatch):
    store.update("x", "a", 1)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.warns(UserWarning, match=f"expected a file of user {me + 1}, got one of user {me}"):
        assert store.read("x") == {}


@POSIX
def test_a_folder_in_the_place_of_a_file_costs_a_warning_and_no_open_file(place):
    (place / "x.json").mkdir(parents=True)
    opened = lambda: len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    before = opened()
    with pytest.warns(UserWarning, match="regular file|not read") as seen:
        assert [store.read("x") for _ in range(20)] == [{}] * 20
    assert len(seen) == 1 and opened() == before


@POSIX
def test_a_working_directory_that_was_removed_costs_a_warning(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.setenv("FUSEDLOSS_CACHE_DIR", "relative")
    (tmp_path / "gone").rmdir()
    assert store.read("x") == {}
    with pytest.warns(UserWarning, match="not written"):
        store.update("x", "a", 1)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    store._write_last()  # nothing waits for a place that is another one now
    assert not [*(tmp_path / "other").iterdir()]


@POSIX
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(place):
    place.mkdir()
    os.mkfifo(place / "x.json", 0o600)
    with pytest.warns(UserWarning, match="regular file"):
        assert store.read("x") == {}


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEDLOSS_CACHE_DIR", str(tmp_path / "file" / "store"))  # for root too
    with pytest.warns(UserWarning, match="not written") as seen:
        for n in range(3):
            store.update("x", str(n), n)
    assert len(seen) == 1


def test_values_that_are_not_json_cost_a_warning(place):
    with pytest.warns(UserWarning, match="not written"):
        store.update("x", "a", {1, 2})
    with pytest.warns(UserWarning, match="not written"):
        store.update("y", "a", float("nan"))
    assert store.read("x") == store.read("y") == {}


def test_a_write_that_fails_leaves_the_old_file_and_no_other(place, monkeypatch):
    store.update("x", "a", 1)
    def full(*_): raise OSError(28, "No space left on device")
    with monkeypatch.context() as m, pytest.warns(UserWarning, match="No space left"):
        m.setattr(os, "replace", full)
        store.update("x", "b", 2)
    assert json.loads((place / "x.json").read_text()) == {"a": 1} and {p.suffix for p in place.iterdir()} == {".json", ".lock"}
    store.update("x", "c", 3)  # writes both
    assert json.loads((place / "x.json").read_text()) == {"a": 1, "b": 2, "c": 3}


# without PyTorch: the store alone, under its own name
WRITER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("store", sys.argv[1])
store = importlib.util.module_from_spec(spec)
spec.loader.exec_module(store)
for n in range(20): store.update("x", f"{sys.argv[2]}-{n}", n)
"""


@POSIX
def test_updates_of_many_processes_are_all_kept(place):
    command = [sys.executable, "-S", "-W", "error", "-c", WRITER, store.__file__]
    processes = [subprocess.Popen([*command, str(i)]) for i in range(4)]
    assert [p.wait(60) for p in processes] == [0] * 4
    assert store.read("x") == {f"{i}-{n}": n for i in range(4) for n in range(20)}


@POSIX
def test_updates_of_threads_are_all_kept():
    threads = [threading.Thread(target=lambda i=i: [store.update("x", f"{i}-{n}", n) for n in range(10)]) for i in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(store.read("x")) == 40


@POSIX
def test_a_lock_that_is_never_released_is_not_waited_for_and_costs_no_update(place, monkeypatch):
    import fcntl
    store.update("x", "a", 1)
    monkeypatch.setattr(store, "WAIT", 0.05)
    monkeypatch.setattr(store, "LAST_WAIT", 0.05)
    written = lambda: json.loads((place / "x.json").read_text())
    with (place / "x.lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.monotonic()
        store.update("x", "b", 2)
        assert time.monotonic() - start < 5
        store.update("x", "b", 3)
        assert store.read("x") == {"a": 1, "b": 3} and written() == {"a": 1}
        with pytest.warns(UserWarning, match="x.lock: 1 updates not written"):
            store._write_last()  # as the process ends
    store.update("x", "c", 4)
    assert written() == store.read("x") == {"a": 1, "b": 3, "c": 4} and not store._waiting[place / "x.json"]


LAST = """
import importlib.util, multiprocessing, sys
spec = importlib.util.spec_from_file_location("store", sys.argv[1])
store = importlib.util.module_from_spec(spec)
spec.loader.exec_module(store)
store.WAIT = 0.01
def late(key):
    store.update("x", key, 1)
    print("waits", flush=True)
if sys.argv[2] == "fork":
    worker = multiprocessing.get_context("fork").Process(target=late, args=("fork",))
    worker.start(), worker.join()
else: late("alone")
"""


@POSIX
@pytest.mark.parametrize("how", ["alone", "fork"])
def test_the_end_of_a_process_writes_what_waits(place, how):
    import fcntl
    store.update("x", "a", 1)
    with (place / "x.lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        late = subprocess.Popen([sys.executable, "-S", "-W", "error", "-c", LAST, store.__file__, how], stdout=subprocess.PIPE, text=True)
        assert late.stdout.readline() == "waits\n" and store.read("x") == {"a": 1}
    assert late.wait(60) == 0 and store.read("x") == {"a": 1, how: 1}


@POSIX
def test_writers_killed_at_any_moment_damage_nothing(place):
    "Each killed writer's updates are there from its first on, and the next writer finds no lock held"
    chance, endless = random.Random(0), WRITER.replace("range(20)", "range(10**6)")
    for first in range(0, 32, 4):
        writers = [subprocess.Popen([sys.executable, "-S", "-W", "error", "-c", endless, store.__file__, str(first + i)]) for i in range(4)]
        for writer in chance.sample(writers, 4):
            time.sleep(chance.uniform(0, 0.15))
            writer.kill()
        assert [w.wait(60) for w in writers] == [-9] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = store.read("x")
        store.update("x", "a", 1)
    for writer in range(32):
        own = {key: n for key, n in found.items() if key.startswith(f"{writer}-")}
        assert own == {f"{writer}-{n}": n for n in range(len(own))}
    assert found and store.read("x") == {**found, "a": 1}


@POSIX
def test_what_a_killed_writer_leaves_is_removed(place):
    kill = "import os; os.replace = lambda *_: os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-S", "-c", f"{kill}\n{WRITER}", store.__file__, "0"]).returncode == -9
    left, = place.glob(".x-*.tmp")
    store.update("x", "a", 1)
    assert left.exists()  # it may be at work
    os.utime(left, (0, 0))
    store.update("x", "b", 2)
    assert not left.exists() and {p.suffix for p in place.iterdir()} == {".json", ".lock"} and store.read("x") == {"a": 1, "b": 2}


@POSIX
@pytest.mark.parametrize("where", [(os, "replace"), (os, "open"), (json, "dumps"), (json, "loads"), (tempfile, "mkstemp"), (time, "monotonic")], ids=lambda w: w[1])
def test_an_interruption_leaves_no_file_and_no_lock(place, monkeypatch, where):
    store.update("x", "a", 1)
    calls = []
    def interrupted(*args, own=getattr(*where), **options):
        calls.append(1)
        if len(calls) == (2 if where[0] is json else 1): raise KeyboardInterrupt  # json has a part before any file has
        return own(*args, **options)
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(*where, interrupted)
        store.update("x", "b", 2)
    assert {p.suffix for p in place.iterdir()} == {".json", ".lock"}
    start = time.monotonic()
    store.update("x", "c", 3)
    assert time.monotonic() - start < store.WAIT / 2 and store.read("x") == {"a": 1, "b": 2, "c": 3}


@POSIX
def test_a_worker_forked_during_an_update_keeps_no_lock(place, monkeypatch):
    "The worker holds the open lock file; the next update of its parent must not wait for its end"
    replace, workers = os.replace, []
    def forking(*args):
        if not workers:
            workers.append(os.fork())
            if workers[0] == 0:
                time.sleep(30)
                os._exit(0)
        replace(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        monkeypatch.setattr(os, "replace", forking)
        store.update("x", "a", 1)
    start = time.monotonic()
    store.update("x", "b", 2)
    waited = time.monotonic() - start
    os.kill(workers[0], 9), os.waitpid(workers[0], 0)
    assert waited < store.WAIT / 2 and store.read("x") == {"a": 1, "b": 2}


@POSIX
def test_a_file_system_without_locks_still_keeps_updates(place, monkeypatch):
    def refuse(*_): raise OSError(95, "Operation not supported")
    monkeypatch.setattr(store.fcntl, "flock", refuse)
    store.update("x", "a", 1)
    monkeypatch.setattr(store, "fcntl", None)  # Windows
    store.update("x", "b", 2)
    assert json.loads((place / "x.json").read_text()) == {"a": 1, "b": 2}
