"""Tuning: found once, remembered on disk, imposed by a file, one for all ranks; threads and forks. Clocks are made up."""
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import pkgutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import fusedloss as fl
from fusedloss.core import store, tuning
from helpers import everywhere, follows_plans
from project import ROOT

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
VARIANTS = [(1, 8), (1, 32), (2, 8)]


class Kernel:
    "What tuning asks of a kernel of Triton"
    __name__ = "a_kernel"

    def __init__(self, source="source"):
        self.cache_key = source

    def __getitem__(self, grid):
        return lambda *args: ("launched", grid, args)

    def warmup(self, *args, grid):
        return "compiled", grid, args


class Clock:
    "Milliseconds of each variant, and how often it was asked"
    def __init__(self, *times):
        self.times, self.asked = dict(zip(VARIANTS, times)), 0

    def __call__(self, run, variant):
        self.asked += 1
        time.sleep(0.002)  # lets another thread in
        return self.times[variant]


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    "A folder of its own, and a process that knows nothing"
    monkeypatch.setenv("FUSEDLOSS_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.delenv("FUSEDLOSS_CHOICES", raising=False)
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setattr(store, "_waiting", {})
    forget(monkeypatch)


def forget(monkeypatch):
    "As a new process begins"
    monkeypatch.setattr(tuning, "_chosen", tuning._Chosen())
    tuning.read_choices.cache_clear()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock(3.0, 1.0, 2.0)
    everywhere(monkeypatch, tuning, "variant_milliseconds", made)
    return made


def best(sizes=(100, 200), kernel=None, dtype=torch.float32, first=VARIANTS[0], variants=VARIANTS, run=None, **flags):
    return tuning.fastest_variant(kernel or Kernel(), torch.empty(0, dtype=dtype), sizes, first, lambda: list(variants), run, **flags)


def test_a_variant_is_found_once_and_remembered_on_disk(clock, monkeypatch):
    assert best() == (1, 32) and clock.asked == 3 * tuning.ROUNDS
    assert best() == (1, 32) and clock.asked == 3 * tuning.ROUNDS
    forget(monkeypatch)
    assert best() == (1, 32) and clock.asked == 3 * tuning.ROUNDS, "another process reads it"
    store.folder().joinpath("tuning.json").unlink()
    assert best() == (1, 32) and clock.asked == 3 * tuning.ROUNDS, "this one knows it without the file"
    forget(monkeypatch)
    assert best() == (1, 32) and clock.asked == 6 * tuning.ROUNDS, "the file may be removed"


@pytest.mark.parametrize("other", [
    dict(sizes=(100, 300)), dict(kernel=Kernel("another source")), dict(dtype=torch.bfloat16), dict(first=VARIANTS[2]), dict(STATS=True),
    dict(STATS=False, SCORE=Kernel("a score"))], ids=lambda other: "+".join(other))
def test_what_may_change_the_answer_is_asked_again(other, clock, monkeypatch):
    best(STATS=False, SCORE=Kernel("score"))
    asked = clock.asked
    forget(monkeypatch)
    best(**dict(dict(STATS=False, SCORE=Kernel("score")), **other))
    assert clock.asked == 2 * asked


@pytest.mark.parametrize("device, torch_version", [("another GPU", None), (None, "3.0")])
def test_another_machine_and_other_versions_are_asked_again(device, torch_version, clock, monkeypatch):
    best()
    forget(monkeypatch)
    tuning.platform_of.cache_clear()
    if torch_version:
        monkeypatch.setattr(torch, "__version__", torch_version)
    else:
        everywhere(monkeypatch, tuning, "platform_of", lambda d: device)
    best()
    assert clock.asked == 6 * tuning.ROUNDS
    monkeypatch.undo()
    tuning.platform_of.cache_clear()


def test_a_remembered_variant_that_is_offered_no_longer_is_timed_again(clock, monkeypatch):
    best()
    forget(monkeypatch)
    assert best(variants=[VARIANTS[0], VARIANTS[2]]) == (2, 8)


@pytest.mark.parametrize("value", [3, {"variant": 3}, {"variant": [1, 32, 5]}, {}, None])
def test_a_damaged_entry_is_found_again(value, clock, monkeypatch):
    best()
    key, = store.read("tuning")
    store.update("tuning", key, value)
    forget(monkeypatch)
    assert best() == (1, 32) and clock.asked == 6 * tuning.ROUNDS


def test_a_damaged_store_costs_one_warning(clock):
    store.folder().mkdir(parents=True)
    (store.folder() / "tuning.json").write_text("{")
    with pytest.warns(UserWarning, match=r"tuning\.json") as seen:
        assert best() == best((1, 2)) == (1, 32)
    assert len(seen) == 1


def test_a_folder_that_cannot_be_written_costs_one_warning(clock, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEDLOSS_CACHE_DIR", str(tmp_path / "file" / "store"))
    with pytest.warns(UserWarning, match="not written") as seen:
        assert best() == best((1, 2)) == (1, 32)
    assert len(seen) == 1


def test_no_clock_runs_in_a_capture_but_what_is_remembered_is_used(clock, monkeypatch):
    with monkeypatch.context() as m:
        everywhere(m, tuning, "is_capturing", lambda: True)
        assert best() == (1, 8) and not clock.asked
    assert best() == (1, 32), "what a capture took was not remembered"
    forget(monkeypatch)
    everywhere(monkeypatch, tuning, "is_capturing", lambda: True)
    assert best() == (1, 32)


def test_a_variant_that_does_not_fit_drops_out_and_if_none_is_left_its_error_is_raised(clock, monkeypatch):
    def run(variant, compile_only=False):
        if variant[1] == 32:
            raise RuntimeError("out of resources")
    everywhere(monkeypatch, tuning, "variant_milliseconds", lambda run, variant: run(variant) or clock.times[variant])
    assert best(run=run) == (2, 8)
    with pytest.raises(RuntimeError, match="out of resources"):
        best((7, 7), variants=[VARIANTS[1]], run=run)
    assert best((8, 9), run=run) == (2, 8), "no lock is left behind"


def test_another_process_that_was_faster_to_write_decides(clock, monkeypatch):
    race = tuning._time_variants
    def slow(run, variants):
        times = race(run, variants)
        key, = tuning_keys
        store.update("tuning", key, {"variant": [2, 8]})
        return times
    kernel, x = Kernel(), torch.empty(0)
    tuning_keys = [tuning.key_of(tuning.problem_of(kernel, x.dtype, (100, 200), {}, VARIANTS[0]), kernel, x.device)]
    everywhere(monkeypatch, tuning, "_time_variants", slow)
    assert best() == (2, 8)


def test_variants_are_launched_and_compiled_by_the_same_call():
    pytest.importorskip("triton", reason="Triton is not installed")
    kernel = Kernel()
    assert tuning.launcher(kernel, (3,))(1, 2) == ("launched", (3,), (1, 2))
    assert tuning.launcher(kernel, (3,), True)(1, 2) == ("compiled", (3,), (1, 2))


@pytest.mark.parametrize("bars", [True, False])
def test_a_long_wait_is_explained_once_and_a_short_one_is_not(bars, capsys, monkeypatch):
    "With progress bars of tqdm's, which nobody need have, and without"
    if bars:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.delitem(sys.modules, "tqdm", raising=False)
    said, line, end = "", "fusedloss: times a kernel ...\n", time.monotonic() + 60
    with tuning.announced("times a kernel", after=0.01):
        while line not in said and time.monotonic() < end:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert (said + capsys.readouterr().err).count(line) == 1
    with tuning.announced("times a kernel", after=60):
        pass
    assert line not in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="no GPU whose kernels have variants")
def test_a_loss_remembers_the_variants_of_its_kernels_and_gives_the_same_bits(monkeypatch):
    "With the clock, from the disk, and by a file that imposes another variant"
    torch.manual_seed(0)
    x, w = (torch.randn(n, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (4096, 16384))
    y = torch.arange(4096, device="cuda")
    def step():
        loss = fl.linear_cross_entropy(x, w, y, method="recompute", softcap=30.0)  # whose kernels are Triton's on any GPU
        return loss, *torch.autograd.grad(loss, [x, w])
    first = step()
    kept = tuning.choices()["variants"]
    assert {key.split()[0] for key in kept} == {"lse_kernel", "dz_kernel"} and kept.keys() == store.read("tuning").keys()
    forget(monkeypatch)
    everywhere(monkeypatch, tuning, "_time_variants", None)  # nothing is timed from here on
    again = step()
    other = {key: [*v[:-1], 8 if v[-1] == 32 else 32] for key, v in kept.items()}
    path = store.folder() / "choices.json"
    path.write_text(json.dumps({"variants": other}))
    forget(monkeypatch)
    monkeypatch.setenv("FUSEDLOSS_CHOICES", str(path))
    imposed = step()
    assert tuning.choices()["variants"] == other
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, again, imposed))


# --- choices ---

def test_choices_are_written_and_imposed(clock, monkeypatch, tmp_path):
    best()
    written = tmp_path / "choices.json"
    tuning.write_choices(written)
    assert list(json.loads(written.read_text())["variants"].values()) == [[1, 32]]
    store.folder().joinpath("tuning.json").unlink()
    forget(monkeypatch)
    clock.times, clock.asked = dict(zip(VARIANTS, (1.0, 9.0, 9.0))), 0
    monkeypatch.setenv("FUSEDLOSS_CHOICES", str(written))
    assert best() == (1, 32) and not clock.asked and not store.read("tuning")
    assert best((1, 1)) == (1, 8) and clock.asked, "what the file does not know is found as usual"


def test_a_file_of_choices_is_whole_while_other_ranks_write_it(clock, monkeypatch, tmp_path):
    best()
    written = tmp_path / "choices.json"
    tuning.write_choices(written)
    mode, text, seen = written.stat().st_mode, written.read_text(), []
    write = Path.write_text
    def watched(path, *given, **named):
        done = write(path, *given, **named)
        with path.open("r+") as half: half.truncate(3)
        seen.append(written.read_text())
        return write(path, *given, **named) or done
    with monkeypatch.context() as m:
        m.setattr(Path, "write_text", watched)
        tuning.write_choices(written)
    assert seen == [text] and written.read_text() == text and written.stat().st_mode == mode
    assert [*tmp_path.glob("choices*")] == [written]


def loss(**options) -> torch.Tensor:
    x, w = torch.ones(4, 3, requires_grad=True), torch.ones(7, 3, requires_grad=True)
    return fl.linear_cross_entropy(x, w, torch.tensor([0, 1, 2, 3]), **options)


def test_methods_of_auto_are_written_and_imposed(monkeypatch, tmp_path, caplog):
    loss()
    found = tuning.choices()["methods"]
    (request, method), = found.items()
    assert method == fl.plan(4, 7, 3, torch.float32, device="cpu").method != "tiles"
    (tmp_path / "choices.json").write_text(json.dumps({"methods": {request: "tiles"}}))
    forget(monkeypatch)
    monkeypatch.setenv("FUSEDLOSS_CHOICES", str(tmp_path / "choices.json"))
    loss(), loss(method="eager")
    assert tuning.choices()["methods"] == {request: "tiles"}
    with caplog.at_level("DEBUG", "fusedloss"):
        loss()
    assert "tiles, by a file of choices" in caplog.text


@pytest.mark.parametrize("text, cause", [
    (None, "No such file"), ("", "JSONDecodeError"), ("\xff", "Decode"), ("[]", "expected {\"variants\""), ('{"kernels": {}}', "expected {\"variants\""),
    ('{"variants": {"a": 3}}', "expected {\"variants\""), ('{"methods": {"a": 3}}', "expected {\"variants\"")], ids=str)
def test_a_file_of_choices_that_means_nothing_is_an_error_that_names_it(text, cause, clock, monkeypatch, tmp_path):
    path = tmp_path / "choices.json"
    monkeypatch.setenv("FUSEDLOSS_CHOICES", str(path))
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    for call in (best, loss):
        with pytest.raises(ValueError, match=r"FUSEDLOSS_CHOICES=.*choices\.json") as error:
            call()
        assert cause in str(error.value)
    assert not clock.asked


@pytest.mark.parametrize("kind, call, value", [("variants", best, [5, 5]), ("methods", loss, "swift")])
def test_choices_that_do_not_exist_are_an_error_that_names_them(kind, call, value, clock, monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEDLOSS_CHOICES", str(tmp_path / "choices.json"))
    (tmp_path / "choices.json").write_text("{}")
    call()
    key, = tuning.choices()[kind]
    (tmp_path / "choices.json").write_text(json.dumps({kind: {key: value}}))
    forget(monkeypatch)
    with pytest.raises(ValueError, match="FUSEDLOSS_CHOICES=.*expected one of .*got"):
        call()


def test_of_many_token_counts_the_last_are_kept(monkeypatch):
    monkeypatch.setattr(tuning, "MOST", 8)
    w = torch.ones(7, 3, requires_grad=True)
    for n in [*range(1, 30), 3]:
        fl.linear_cross_entropy(torch.ones(n, 3), w, torch.zeros(n, dtype=torch.int64)).backward()
    kept = tuning.choices()["methods"]
    asked = [fl.plan(n, 7, 3, torch.float32, device="cpu").call.n for n in (3, *range(23, 30))]
    assert len(kept) == 8 and all(any(f"n={n}," in request for request in kept) for n in asked)


FEW = {"device", "backend", "index", "path", "compiler", "kind", "board",  # what a machine has
       "name", "sources", "arch", "constants", "form", "dtype", "arguments", "s", "staged",  # what kernels are compiled for
       "process", "package"}  # this one; what is installed


def test_every_table_has_a_bound_or_few_keys():
    "Sizes, numbers and tensors vary without end; what is kept by them is kept for the last thousands"
    for module in pkgutil.walk_packages(fl.__path__, "fusedloss."):
        if "integrations" not in module.name:
            importlib.import_module(module.name)
    tables = {found for name, module in sys.modules.items() if name.partition(".")[0] == "fusedloss" for found in vars(module).values()
              if isinstance(found, functools._lru_cache_wrapper)}
    unbound = {f"{t.__module__}.{t.__name__}": set(inspect.signature(t).parameters) - FEW for t in tables if t.cache_parameters()["maxsize"] is None}
    assert len(tables) > 20 and not {name: more for name, more in unbound.items() if more}


@follows_plans
def test_a_compiled_loss_takes_what_a_file_imposes(monkeypatch, tmp_path, caplog):
    "Its operator plans when it runs, for the same request as a call without a compiler"
    tensors = torch.ones(4, 3), torch.ones(7, 3), torch.tensor([0, 1, 2, 3])
    forget(monkeypatch)
    fl.linear_cross_entropy(*tensors)
    request, = tuning.choices()["methods"]
    (tmp_path / "choices.json").write_text(json.dumps({"methods": {request: "tiles"}}))
    monkeypatch.setenv("FUSEDLOSS_CHOICES", str(tmp_path / "choices.json"))
    forget(monkeypatch)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w, y: fl.linear_cross_entropy(x, w, y), backend="eager", fullgraph=True)
    with caplog.at_level("DEBUG", "fusedloss"): assert compiled(*tensors).isfinite()
    assert "tiles, by a file of choices" in caplog.text and tuning.choices()["methods"] == {request: "tiles"}


# --- threads and forks ---

def test_two_threads_that_call_first_tune_once(clock):
    found, begin = [], threading.Barrier(4)
    def call():
        begin.wait()
        found.append(best())
    threads = [threading.Thread(target=call) for _ in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert found == [(1, 32)] * 4 and clock.asked == 3 * tuning.ROUNDS


@FORKS
def test_a_worker_forked_while_another_thread_tunes_is_not_stopped(clock, monkeypatch):
    began, end = threading.Event(), threading.Event()
    def slow(run, variant):
        began.set()
        assert end.wait(60)
        return 1.0
    with monkeypatch.context() as m:
        everywhere(m, tuning, "variant_milliseconds", slow)
        thread = threading.Thread(target=lambda: best((7, 7)))
        thread.start()
        assert began.wait(60)
        everywhere(m, tuning, "variant_milliseconds", clock)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            worker = multiprocessing.get_context("fork").Process(target=lambda: os._exit(best() != (1, 32)))
            worker.start()
        worker.join(20)
        alive = worker.is_alive()
        worker.kill()
        end.set()
        thread.join()
    assert not alive and worker.exitcode == 0, "the lock is held for ever in the worker"


@FORKS
def test_processes_that_start_together_come_to_one_choice(monkeypatch):
    "Each with a clock of its own; who writes first decides for those that look later"
    def tune(rank, queue):
        everywhere(monkeypatch, tuning, "variant_milliseconds", Clock(*(float((i + rank) % 3) for i in range(3))))
        best()
        queue.put(rank)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        workers = [context.Process(target=tune, args=(rank, queue)) for rank in range(3)]
        for w in workers: w.start()
    for w in workers: w.join(60)
    assert [w.exitcode for w in workers] == [0] * 3
    stored, = store.read("tuning").values()
    assert best() == tuple(stored["variant"])


# --- ranks ---

class Group:
    "Ranks of one process: what the first sends, the others get"
    def __init__(self, ranks=2):
        self.ranks, self.rank, self.mail, self.collectives = ranks, 0, [], 0


@pytest.fixture
def group(monkeypatch) -> Group:
    import torch.distributed as dist
    made = Group()
    monkeypatch.setattr(dist, "get_world_size", lambda g: g.ranks)
    monkeypatch.setattr(dist, "get_rank", lambda g: g.rank)
    monkeypatch.setattr(dist, "get_global_rank", lambda g, rank: rank)
    def broadcast(t, src, group):
        group.collectives += 1
        if group.rank == src: group.mail.append(t.clone())
        else: t.copy_(group.mail.pop(0))
    monkeypatch.setattr(dist, "broadcast", broadcast)
    return made


class Rank:
    "A rank that is played: its own store, clock and memory"
    def __init__(self, group, number, folder, *times):
        self.group, self.number, self.folder, self.clock = group, number, str(folder / f"rank{number}"), Clock(*times)
        self.known, self.steps = tuning._Chosen(), type(tuning._agreements)()

    def __call__(self, monkeypatch, *calls, kind="loss"):
        self.group.rank = self.number
        with monkeypatch.context() as m:
            m.setenv("FUSEDLOSS_CACHE_DIR", self.folder)
            m.setattr(tuning, "_chosen", self.known), m.setattr(tuning, "_agreements", self.steps), everywhere(m, tuning, "variant_milliseconds", self.clock)
            with tuning.keep_agreement(tuning.rank_agreement(self.group, torch.device("cpu"), kind, 3)):
                return [best(**call) for call in calls]


def test_ranks_with_other_clocks_and_caches_take_the_same(group, monkeypatch, tmp_path):
    ranks = [Rank(group, 0, tmp_path, 3.0, 1.0, 2.0), Rank(group, 1, tmp_path, 3.0, 2.0, 1.0)]
    with monkeypatch.context() as m:  # the second has a cache of its own, filled alone
        m.setenv("FUSEDLOSS_CACHE_DIR", ranks[1].folder)
        everywhere(m, tuning, "variant_milliseconds", ranks[1].clock)
        assert best() == (2, 8)
    ranks[1].clock.asked = 0
    steps = [[rank(monkeypatch, {}, dict(sizes=(5, 5), A=1)) for rank in ranks] for _ in range(4)]
    assert steps[0] == [[(1, 32)] * 2, [(1, 8)] * 2], "the first finds, the others take the untimed one"
    assert steps[1:] == [[[(1, 32)] * 2] * 2] * 3, "all keep to what the first found"
    assert ranks[1].clock.asked == 0 and group.collectives == 8  # two calls, two messages, two ranks
    assert ranks[0](monkeypatch, dict(sizes=(900, 900))) == ranks[1](monkeypatch, dict(sizes=(900, 900))) == [(1, 32)], "another shape"


def test_ranks_agree_at_once_on_what_the_first_remembers(group, monkeypatch, tmp_path):
    for _ in range(2):  # the second time as new processes
        ranks = [Rank(group, 0, tmp_path, 3.0, 1.0, 2.0), Rank(group, 1, tmp_path / "elsewhere", 1.0, 2.0, 3.0)]
        steps = [[rank(monkeypatch, {}) for rank in ranks] for _ in range(2)]
    assert steps == [[[(1, 32)], [(1, 32)]]] * 2 and not ranks[0].clock.asked and not ranks[1].clock.asked


@pytest.mark.parametrize("value", [3, [], {"table": 3}, {"table": {"": [1, 32], "a_kernel": 3}}, {"table": None}, {}], ids=str)
def test_a_damaged_agreement_stops_no_rank(value, group, monkeypatch, tmp_path):
    "Where the first rank raised, the others would wait for ever"
    first = lambda: Rank(group, 0, tmp_path, 3.0, 1.0, 2.0)
    for _ in range(2):
        rank = first()
        rank(monkeypatch, {}), rank(monkeypatch, {})
    with monkeypatch.context() as m:
        m.setenv("FUSEDLOSS_CACHE_DIR", rank.folder)
        key, = (key for key in store.read("tuning") if "ranks" in key)
        store.update("tuning", key, value)
    rank = first()
    assert [rank(monkeypatch, {}) for _ in range(3)] == [[(1, 32)]] * 3


def test_a_rank_that_launches_nothing_or_offers_less_stops_nobody(group, monkeypatch, tmp_path):
    ranks = [Rank(group, 0, tmp_path, 3.0, 1.0, 2.0), Rank(group, 1, tmp_path, 3.0, 2.0, 1.0)]
    for step in range(3):
        first = ranks[0](monkeypatch, {})
        assert ranks[1](monkeypatch) == [] if step else ranks[1](monkeypatch, dict(variants=[(1, 8)])) == [(1, 8)]
    assert first == [(1, 32)] and ranks[1](monkeypatch, dict(variants=[(1, 8)])) == [(1, 8)] and not group.mail


def test_a_backward_pass_in_another_thread_keeps_the_agreement(group, monkeypatch, tmp_path):
    rank = Rank(group, 1, tmp_path, 1.0, 2.0, 3.0)
    group.mail = [torch.tensor([2]), torch.tensor([*b"{}"], dtype=torch.uint8)]
    group.rank = 1
    everywhere(monkeypatch, tuning, "variant_milliseconds", rank.clock)
    step, found = tuning.rank_agreement(group, torch.device("cpu"), "loss"), []
    def backward():
        assert tuning.current_agreement() is None
        with tuning.keep_agreement(step): found.append(best())
    thread = threading.Thread(target=backward)
    thread.start(), thread.join()
    assert found == [(1, 8)] and not rank.clock.asked


def test_no_collective_in_a_capture_nor_for_one_rank(group, monkeypatch):
    with monkeypatch.context() as m:
        everywhere(m, tuning, "is_capturing", lambda: True)
        assert tuning.rank_agreement(group, torch.device("cpu"), "loss") is None
    assert tuning.rank_agreement(None, torch.device("cpu"), "loss") is None
    group.ranks = 1
    assert tuning.rank_agreement(group, torch.device("cpu"), "loss") is None and not group.collectives


# --- Triton's compiler, without a GPU ---

SIDE_BY_SIDE = """
import threading
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from fusedloss.core import tuning

class Offline:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

@triton.jit
def doubles(p, n, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.store(p + at, 2 * tl.load(p + at, mask=at < n), mask=at < n)

def run(variant, only_compile=False):
    threads.append(threading.active_count())
    tuning.launcher(doubles, (1,), only_compile)(torch.float32, 7, B=variant[0])

threads = []
driver.set_active(Offline())
tuning._compile_all(run, [(32,), (3,), (64,)])  # 3 is no power of two
kernels = doubles.device_caches[0][0].values()
assert [type(k).__name__ for k in kernels].count("CompiledKernel") == 2, kernels
assert max(threads) > 1, threads
"""


@pytest.mark.thorough
def test_variants_compile_side_by_side_and_one_that_fails_stops_none(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "side.py").write_text(SIDE_BY_SIDE)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-W", "ignore", str(tmp_path / "side.py")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_launch_takes_the_time_between_two_events(monkeypatch):
    class Played:
        "An event: the clock goes on by a second with each call, and events read it in milliseconds"
        clock = 0
        def __init__(self, enable_timing): assert enable_timing
        def record(self): self.at = Played.clock
        def synchronize(self): assert self.at == Played.clock, "the last event is waited for"
        def elapsed_time(self, end): return 1e3 * (end.at - self.at)

    def tick(): Played.clock += 1
    monkeypatch.setattr(torch.cuda, "Event", Played)
    assert tuning.event_seconds(tick, rounds=3, calls=4) == [1, 1, 1] and Played.clock == 12


def test_sizes_near_each_other_share_a_variant(clock):
    assert best((100, 200)) == best((120, 130)) == (1, 32) and clock.asked == 3 * tuning.ROUNDS
    assert len(tuning.choices()["variants"]) == 1 and best((50, 200)) == (1, 32) and clock.asked == 6 * tuning.ROUNDS
