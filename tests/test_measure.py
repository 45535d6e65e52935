"""Predictions, timings and peaks: each against a count made by hand."""
import re
from functools import partial

import pytest
import torch
from torch.utils import benchmark

from fusedloss.core.rates import H200, Machine, machine_of
from fusedloss.measure import Cost, predict_seconds, product_cost, sweep_cost
from workbook import measure as m, records
from workbook.measure import MemoryEvent, Shape, compare, peak_memory, quantiles, relative_error, saved_tensors, tensor_lives, time_call, trace_memory
from workbook.records import load_results, results_table
from helpers import everywhere

TOY = Machine("toy", 100.0, dict(float32=1000.0, bfloat16=2000.0))


@torch.library.custom_op("fusedloss_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    "4x, by way of a tensor of three times the size"
    return x.repeat(3)[:len(x)] * 4


def test_cost_is_bound_by_the_slower_ceiling():
    bytes_bound, flops_bound = Cost("copy", 10.0, 200.0), Cost("product", 9000.0, 200.0)
    assert (bytes_bound.seconds(TOY, torch.float32), bytes_bound.bound(TOY, torch.float32)) == (2.0, "bytes")
    assert (flops_bound.seconds(TOY, torch.float32), flops_bound.bound(TOY, torch.float32)) == (9.0, "FLOPs")
    assert flops_bound.seconds(TOY, torch.bfloat16) == 4.5
    assert predict_seconds([bytes_bound, flops_bound], TOY, torch.float32) == 11.0
    assert Cost("nothing").seconds(TOY, torch.int8) == 0.0


def test_a_machine_is_found_by_its_name():
    assert machine_of("H200") is machine_of(H200) is H200
    with pytest.raises(ValueError, match="^machine: expected one of .*'H200'.*, got 'H20'"):
        machine_of("H20")


def test_a_plan_takes_a_machine_by_its_name():
    from fusedloss.plans import plan
    assert repr(plan(4096, 32000, 512, machine="H200")) == repr(plan(4096, 32000, 512, machine=H200))


def test_products_and_sweeps_are_counted():
    assert product_cost("p", 2, 3, 5, torch.bfloat16) == Cost("p", 60.0, 2 * (6 + 15 + 10))
    assert sweep_cost("s", 7, torch.float32, torch.float16) == Cost("s", 0.0, 42)
    floor = m.three_products(Shape(2, 3, 5), torch.float32)
    assert [c.flops for c in floor] == [60.0] * 3 and [c.bytes for c in floor] == [4 * 31] * 3


def test_bare_products_are_the_three_that_the_floor_counts():
    x, w = torch.randn(2, 3), torch.randn(5, 3)
    dx, dw = m.bare_products(x, w)
    torch.testing.assert_close(dx, x @ w.T @ w)
    torch.testing.assert_close(dw, w @ x.T @ x)


def test_unmeasured_dtype_is_named():
    with pytest.raises(KeyError, match=r"toy was measured for \['bfloat16', 'float32'\], not for float16"):
        Cost("c", 1.0, 1.0).seconds(TOY, torch.float16)


def test_cost_table_ends_with_the_sum():
    table = m.cost_table([Cost("a", 2000.0, 100.0), Cost("b", 0.0, 300.0)], TOY, torch.float32)
    assert table.rows[-1] == ["sum", "2 kFLOP", "400 B", "5 s", ""]
    assert [row[-1] for row in table.rows] == ["FLOPs", "bytes", ""]


def test_quantiles_are_of_any_order():
    assert quantiles(iter([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])) == pytest.approx((3.5, 2.0, 5.0))
    assert quantiles([2.0]) == (2.0, 2.0, 2.0)
    assert str(quantiles([0.001, 0.002, 0.003])) == "2 ms (1.4 ms to 2.6 ms)"


@pytest.fixture
def sleep(monkeypatch):
    "Sleeps by a played clock, which nothing else moves: seconds are exact on a busy machine too"
    now = [0.0]
    monkeypatch.setattr(benchmark, "Timer", partial(benchmark.Timer, timer=lambda: now[0]))

    def sleep(seconds):
        now[0] += seconds
    return sleep


def test_time_of_a_sleep(sleep):
    assert time_call(lambda: sleep(0.005), seconds=0.03) == pytest.approx((0.005, 0.005, 0.005))


def test_comparison_finds_three_times_the_work(sleep):
    comparison = compare(lambda: sleep(0.002), lambda: sleep(0.006), rounds=3, seconds=0.01)
    assert comparison.ratio == pytest.approx((3, 3, 3)) and str(comparison) == "×3 (×3 to ×3)"


def test_order_is_drawn_anew_in_every_round(monkeypatch):
    order, names = [], ["floor", "a", "b", "c"]
    everywhere(monkeypatch, m, "time_call", lambda fn, *args: m.Timing(*[float(fn())] * 3))
    runs = {name: lambda name=name: order.append(name) or len(order) for name in names}
    times = m.time_in_turn(runs, "cpu", 30)
    rounds = [tuple(order[i:i + 4]) for i in range(0, len(order), 4)]
    assert all(sorted(r) == sorted(names) for r in rounds) and len(set(rounds)) > 12, "every round times all of them, in many orders"
    assert {r[0] for r in rounds} == {r[-1] for r in rounds} == set(names), "each is first once, and last"
    assert {(a, b) for r in rounds for a, b in zip(r, r[1:])} == {(a, b) for a in names for b in names if a != b}, "each follows each"
    assert times == {name: [i + 1.0 for i, found in enumerate(order) if found == name] for name in names}, "timings stay in their round"
    assert m.time_in_turn(runs, "cpu", 30).keys() == times.keys() and [*zip(*[iter(order[120:])] * 4)] == rounds, "a fixed seed"


def test_comparison_pairs_the_timings_of_a_round(monkeypatch):
    order = []
    everywhere(monkeypatch, m, "time_call", lambda fn, *args: order.append(fn) or m.Timing(*[fn * len(order)] * 3))
    compared = compare(1.0, 3.0, rounds=12)
    firsts = order[::2]
    assert {1.0, 3.0} == set(firsts) and 0 < firsts.count(1.0) < 12, "neither comes first in every round"
    ratios = [3 * (2 * i + 1 + (f == 1.0)) / (2 * i + 1 + (f != 1.0)) for i, f in enumerate(firsts)]
    assert compared.ratio == pytest.approx(quantiles(ratios))


def test_a_gradient_in_the_place_of_an_input_is_no_negative_memory(tmp_path, monkeypatch, capsys):
    everywhere(monkeypatch, m, "time_call", lambda *args: m.Timing(1.0, 1.0, 1.0))
    buffer = torch.ones(1000)
    entry = m.measure_against_floor(tmp_path / "r.json", "a", buffer.exp_, buffer.exp, {}, torch.float32, buffer.nbytes, "cpu")
    figures = entry["figures"]
    assert (figures["peak"], figures["extra"]) == (0, 0) and "0 B beyond" in capsys.readouterr().out
    assert results_table([dict(entry, stage="00_measure", figures=dict(figures, extra=-7))]).rows[0][-1] == "0 B"


def test_timing_passes_an_exception_on():
    with pytest.raises(ZeroDivisionError):
        time_call(lambda: 1 / 0, seconds=0.01)


def test_single_calls_are_waited_for_one_by_one(monkeypatch):
    now, events, lengths = [0.0], [], iter((0.004, 0.002, 0.009))

    class Cache:
        def zero_(self): events.append("cache")

    def synchronize(device):
        now[0] += sum(e for e in events if isinstance(e, float))  # the work of a call ends here, not when it returns
        events[:] = [e for e in events if not isinstance(e, float)] + ["wait"]

    monkeypatch.setattr(m.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(m.torch, "empty", lambda *args, **kwargs: Cache())
    assert m.time_single_calls(lambda: events.append(next(lengths)), "cuda", 3) == pytest.approx(0.004), "the median"
    assert events == ["cache", "wait", "wait"] * 3, "the device is idle and its cache overwritten before each call"


def test_single_calls_on_a_cpu(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(m.time, "perf_counter", lambda: now[0])
    assert m.time_single_calls(lambda: now.__setitem__(0, now[0] + 0.005), calls=5) == pytest.approx(0.005)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_time_of_a_gpu_waits_for_the_gpu():
    a = torch.randn(4096, 4096, device="cuda")
    assert m.time_single_calls(lambda: a @ a, "cuda") > 2 * 4096**3 / 2e15
    assert time_call(lambda: a @ a, "cuda", 0.05).median > 2 * 4096**3 / 2e15  # no GPU gives two PFLOP/s in float32


INPUT = torch.zeros(100, requires_grad=True)
PEAKS = {  # bytes at the peak, counted by hand; a float32 takes four
    "nothing": (0, lambda: None),
    "views of an input": (0, lambda: INPUT.view(10, 10).T[2:]),
    "one tensor": (400, lambda: torch.zeros(100)),
    "two at once": (800, lambda: (torch.zeros(100), torch.zeros(100))),
    "one after the other": (400, lambda: [torch.zeros(100).shape for _ in range(3)]),
    "a slice keeps its whole": (404, lambda: torch.zeros(100)[:1] + 1),
    "in place": (400, lambda: torch.zeros(100).add_(1).mul_(2)),
    "in place on an input": (0, lambda: INPUT.detach().mul_(1)),
    "out of place": (800, lambda: torch.zeros(100) + 1),
    "into an input": (0, lambda: torch.mul(INPUT.detach(), 1, out=INPUT.detach())),
    "a chain holds two": (800, lambda: torch.zeros(100).exp().exp().exp()),
    "two bytes": (200, lambda: torch.zeros(100, dtype=torch.bfloat16)),
    "no elements": (0, lambda: (torch.zeros(0), torch.zeros(3, 0) + 1)),
    "an expanded tensor": (4, lambda: torch.zeros(1).expand(1000)),
    "inside a custom operator": (1600, lambda: twice(INPUT.detach())),
    "inside a composite operation": (1200, lambda: torch.nn.functional.linear(torch.zeros(10, 10), torch.zeros(10, 10))),
    "backward": (808, lambda: torch.autograd.grad(INPUT.exp().sum(), INPUT)),  # exp, its gradient, the sum, a one
}


@pytest.mark.parametrize("case", PEAKS)
def test_peak_is_what_a_hand_counts(case):
    expected, fn = PEAKS[case]
    assert peak_memory(fn) == expected


def test_peak_counts_what_stands_where_an_input_died():
    inputs = [torch.zeros(50)]

    def fn():
        inputs.pop().sum()
        return [torch.zeros(100) for _ in range(3)]

    assert peak_memory(fn) == 1200


def test_peak_counts_what_stands_where_a_literal_died():
    def fn():
        for _ in range(3):
            torch.tensor([1.0, 2.0]).sum()
        return [torch.zeros(100) for _ in range(3)]

    assert peak_memory(fn) == 1200


def test_trace_ends_when_the_function_fails():
    with pytest.raises(RuntimeError, match="shape|size"):
        trace_memory(lambda: torch.zeros(2) + torch.zeros(3))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert trace_memory(lambda: torch.zeros(100))[0].live == 400


def test_trace_names_births_and_deaths():
    def fn():
        a = torch.zeros(10)
        b = a.exp()
        del a
        return b.view(2, 5)

    assert trace_memory(fn) == [
        ("zeros", (10,), 40, 40, 1), ("exp", (10,), 40, 80, 2), ("zeros", (10,), -40, 40, 1), ("exp", (10,), -40, 0, 2)]


def test_trace_does_not_grow_after_its_end():
    kept = []
    events = trace_memory(lambda: kept.append(torch.zeros(10)))
    before = list(events)
    kept.clear()
    assert events == before


def test_trace_changes_no_result():
    x = torch.randn(5, 3, requires_grad=True)
    results = []
    fn = lambda: results.append((y := torch.nn.functional.softmax(twice(x.detach()[:, 0]) + x.exp().T, -1), torch.autograd.grad(y.std(), x)[0]))
    fn()
    trace_memory(fn)
    assert all(map(torch.equal, *results))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_peak_of_a_gpu_is_above_what_was_there():
    torch.cuda.empty_cache()  # a block that another test left may be larger than what is asked for
    held = torch.zeros(2**20, device="cuda")
    assert peak_memory(lambda: held + 1, "cuda") == held.nbytes
    with torch.no_grad():
        assert peak_memory(lambda: held + 1, "cuda") == held.nbytes
    assert peak_memory(lambda: held.add_(1), "cuda") == 0
    assert peak_memory(lambda: (held + 1).exp_(), "cuda") == held.nbytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_launches_of_a_gpu_are_counted():
    x = torch.zeros(2**20, device="cuda")
    launches = m.gpu_launches(lambda: x.add_(1).mul_(2).exp_())
    assert launches.kernels == 3 and 0 < launches.busy < 1e-2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_a_graph_repeats_what_it_captured():
    x = torch.zeros(3, device="cuda")
    replay = m.graph_of(lambda: x.add_(1))
    x.zero_()
    replay(), replay()
    assert x.tolist() == [2, 2, 2]


def test_saved_tensors_are_one_a_storage(device):
    x, w = (torch.ones(3, 3, device=device, requires_grad=True) for _ in range(2))
    assert {t.data_ptr() for t in saved_tensors(lambda: x @ w)} == {x.data_ptr(), w.data_ptr()}
    assert saved_tensors(lambda: x @ w, x, w) == []
    assert [t.data_ptr() for t in saved_tensors(lambda: (x @ w, x.T @ w), w)] == [x.data_ptr()]
    assert [t.shape for t in saved_tensors(lambda: x.exp().sum(), x)] == [(3, 3)]
    assert saved_tensors(lambda: x.detach() * 2) == saved_tensors(lambda: None) == []


def test_saving_is_watched_no_longer_after_a_failure():
    x, seen = torch.ones(3, requires_grad=True), []
    with pytest.raises(ZeroDivisionError):
        saved_tensors(lambda: (x.exp(), 1 / 0))
    assert saved_tensors(lambda: seen.append(x.exp()), x)[0].data_ptr() == seen[0].data_ptr()


@pytest.mark.parametrize("out, ref, error", [
    ([3.0, 4.0], [3.0, 4.0], 0.0), ([3.0, 5.0], [3.0, 4.0], 0.2), ([0.3], [0.0], 0.3), ([], [], 0.0), (2.0, 1.0, 1.0),
])
def test_relative_error_is_a_ratio_of_norms(out, ref, error):
    assert relative_error(torch.tensor(out), torch.tensor(ref)) == pytest.approx(error, rel=1e-6)


def test_relative_error_is_taken_in_float64(device):
    ref = torch.full((4,), 1e200, dtype=torch.float64, device=device)[:1]
    assert relative_error(ref * (1 + 1e-12), ref) == pytest.approx(1e-12, rel=1e-3)
    assert relative_error(torch.ones(3, dtype=torch.bfloat16, requires_grad=True), torch.ones(3).int()) == 0
    assert relative_error(torch.full((1,), 6e4, dtype=torch.float16), torch.full((1,), -6e4)) == 2


@pytest.mark.parametrize("out, ref", [(float("nan"), 1.0), (1.0, float("nan")), (float("nan"), 0.0), (float("inf"), float("inf"))])
def test_nan_is_within_no_tolerance(out, ref):
    assert max(1.0, relative_error(torch.tensor([1.0, out]), torch.tensor([1.0, ref]))) > 1e30


@pytest.mark.parametrize("shape", [(3, 1), (1,), (), (4,)])
def test_errors_of_other_shapes_are_not_broadcast(shape):
    with pytest.raises(ValueError, match=re.escape(f"shapes differ: expected (3,), got {shape}")):
        relative_error(torch.ones(shape), torch.ones(3))


def test_loss_is_measured_against_its_floor(tmp_path, monkeypatch, capsys):
    asked, run, floor = [], lambda: None, lambda: 0
    found = m.Comparison(a=m.Timing(2.0, 1.9, 2.1), b=m.Timing(6.0, 5.9, 6.1), ratio=m.Timing(3.5, 3.0, 4.0))
    everywhere(monkeypatch, m, "time_in_turn", lambda runs, *args: asked.append((*runs.values(), *args)) or dict.fromkeys(runs, []))
    everywhere(monkeypatch, m, "comparison", lambda a, b: found)
    everywhere(monkeypatch, m, "peak_memory", lambda *args: asked.append(args) or 5 * 2**20)
    everywhere(monkeypatch, records, "machine_name", lambda device: f"a {device}")
    against = lambda name, *options: m.measure_against_floor(tmp_path / "r.json", name, run, floor, dict(N=2, V=3), torch.bfloat16, *options)
    entries = [against("first"), against("last", 2**20, "cpu", 9)]
    assert asked == [(run, "cuda"), (floor, run, "cuda", 5), (run, "cpu"), (floor, run, "cpu", 9)]
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: 6 s (5.9 s to 6.1 s), ×3.5 (×3 to ×4) of the reference, {extra} MiB beyond the gradients" for name, extra in (("first", 5), ("last", 4))]
    figures = dict(seconds=6.0, floor=2.0, ratio=3.5, ratio_low=3.0, ratio_high=4.0, peak=5 * 2**20)
    assert [r["figures"] for r in entries] == [dict(figures, extra=5 * 2**20), dict(figures, extra=4 * 2**20)]
    assert [[r[k] for k in ("name", "shape", "dtype", "machine", "stage")] for r in load_results(tmp_path)] == [
        ["first", dict(N=2, V=3), "bfloat16", "a cuda", "r"], ["last", dict(N=2, V=3), "bfloat16", "a cpu", "r"]]
    assert load_results(tmp_path) == [dict(r, stage="r") for r in entries]


def test_time_and_memory_against_a_floor_are_real(tmp_path, device):
    start, size = torch.ones(512, 512, device=device), 4 * 512**2

    def run():
        out = start
        for _ in range(64):
            out = out.exp()
        return out

    figures = m.measure_against_floor(tmp_path / "r.json", "a", run, start.exp, dict(N=512), torch.float32, size, device, rounds=2)["figures"]
    assert (figures["peak"], figures["extra"]) == (2 * size, size)
    assert figures["ratio_low"] <= figures["ratio"] <= figures["ratio_high"] and figures["seconds"] > figures["floor"] > 0


def test_lives_join_births_to_deaths():
    birth, other = MemoryEvent("zeros", (10,), 40, 40, 1), MemoryEvent("exp", (2,), 8, 48, 2)
    twin = birth._replace(live=88, storage=3)
    events = [birth, other, twin, birth._replace(bytes=-40), other._replace(bytes=-8)]
    assert tensor_lives(events, 40) == [(birth, 0, 3), (events[2], 2, 5)]
    assert [life[1:] for life in tensor_lives(events, 0)] == [(0, 3), (1, 4), (2, 5)]
    assert tensor_lives([], 0) == tensor_lives(events, 1000) == []


def test_lives_of_empty_tensors_are_left_out():
    assert tensor_lives(trace_memory(lambda: torch.zeros(0)), 0) == []


def test_machine_is_measured_once(monkeypatch):
    m.measure_machine.cache_clear()
    everywhere(monkeypatch, m, "measure_rate", lambda device, n, dtype: 1e9)
    everywhere(monkeypatch, m, "measure_bandwidth", lambda device, numel: 1e10)
    machine = m.measure_machine()
    assert machine.rate(torch.float32) == machine.rate(torch.float64) == 1e9 and machine.bandwidth == 1e10
    assert m.measure_machine() is machine
    m.measure_machine.cache_clear()


def test_ceilings_are_of_a_plausible_size(device):
    assert 1e8 < m.measure_bandwidth(device, 2**20) < 1e14
    assert 1e7 < m.measure_rate(device, 128, torch.float32) < 1e15


def test_progress_gives_every_item():
    assert list(m.progress(range(3), "three")) == [0, 1, 2]
