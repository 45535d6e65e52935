"""Machines without one at hand: the table, a measurement by a false clock, what is kept on disk, what a plan takes."""
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fusedloss import plan
from fusedloss.core import rates, store
from fusedloss.core.devices import Device, Epilogue, Unaligned
from fusedloss.core.tiling import cut
from fusedloss.core.rates import CPU, H200, Machine, boards, by_dtype, guessed_machine, stored_machine, listed_machine, machine_here, machine_of, machines
from grids import thorough_but
from helpers import everywhere, follows_plans

ODD = Device("NVIDIA H20", "nvidia", (9, 0), 78, 2**17, True, True)  # that no table lists
SAME = Device("NVIDIA H200", "nvidia", (9, 0), 132, 2**17, True, True)
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    "A store of its own; nothing is known in this process"
    monkeypatch.setenv("FUSEDLOSS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(rates, "found_machines", {})
    monkeypatch.setattr(rates, "guessed_machines", {})
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setattr(store, "_waiting", {})
    return tmp_path / "rates.json"


def measured(monkeypatch, d, gpu=True):
    "Stand before a GPU whose ceilings are those of a toy; the list says how often they were measured"
    calls = []
    def ceilings(d, device, clock):
        calls.append(d.name)
        return Machine(d.name, 1e12, dict.fromkeys(H200.rates, 1e14), d)
    rates.found_machines.clear()
    monkeypatch.setattr(rates, "device_of", lambda device: d)
    everywhere(monkeypatch, rates, "measure_ceilings", ceilings)
    monkeypatch.setattr(torch.cuda, "device", lambda on: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return calls


def test_every_listed_gpu_reaches_less_than_it_promises():
    for name, (kind, board) in boards().items():
        m = machines()[name]
        assert m.bandwidth < board.peaks.bandwidth and m.device.multiprocessors == board.multiprocessors and board.source
        assert all(0 < m.rates[d] < peak for d, peak in by_dtype(board.peaks).items()) and m.name in board.names
        assert machine_of(name) is m and m.device == kind.on_board(board)
    names = [n for _, board in boards().values() for n in board.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", boards())
def test_a_listed_gpu_is_known_by_its_drivers_name_and_its_size(name):
    _, board = boards()[name]
    d = SAME._replace(name=board.names[0], multiprocessors=board.multiprocessors)
    assert listed_machine(d) is machines()[name] and listed_machine(d._replace(multiprocessors=14)) is None
    assert listed_machine(d._replace(name=f"{d.name} MIG 1g.18gb")) is None


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"^machine: expected one of \['A100 40GB', .*'RTX 5090'\], got 'H20'"):
        plan(10, 10, 10, machine="H20")


def test_a_guess_is_below_every_listed_gpu():
    for m in machines().values():
        g = guessed_machine(ODD._replace(multiprocessors=m.device.multiprocessors))
        assert g.bandwidth <= 1.001 * m.bandwidth and all(g.rates[d] <= 1.001 * m.rates[d] for d in m.rates)
        assert g.device.multiprocessors == m.device.multiprocessors


def test_a_measurement_counts_bytes_and_products(monkeypatch):
    "By a clock that runs each call once and says a hundredth of a second"
    monkeypatch.setattr(rates, "NUMEL", 1000)
    monkeypatch.setattr(rates, "SIDES", dict(bfloat16=16, float32=8, float64=4))
    def clock(run):
        run()
        return 0.01
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rates.measure_ceilings(ODD, "cpu", clock)
    assert found.bandwidth == 2 * 4 * 1000 / 0.01 and found.device is ODD and found.name == "NVIDIA H20"
    assert (found.rates["bfloat16"], found.rates["float32"], found.rates["float64"]) == (2 * 16**3 / 0.01, 2 * 8**3 / 0.01, 2 * 4**3 / 0.01)
    assert found.rates["float16"] == guessed_machine(ODD).rates["float16"], "what was not measured is guessed"
    assert torch.equal(before, torch.get_rng_state()), "the program's random numbers are its own"


def test_a_measured_board_keeps_what_its_products_fall_short_by(monkeypatch):
    kind, board = boards()["H200"]
    own, longer = Unaligned(z=(0.9, 0.8)), Epilogue(dz=5)
    listed = rates.board_machine(kind, board._replace(unaligned=own, epilogue=longer))
    everywhere(monkeypatch, rates, "listed_machine", lambda d: listed)
    everywhere(monkeypatch, rates, "product_rate", lambda *_: 5.0)
    everywhere(monkeypatch, rates, "copy_bandwidth", lambda *_: 7.0)
    monkeypatch.setattr(rates, "device_of", lambda device: SAME)
    for found in (rates.keep_rates("cpu"), stored_machine(SAME)):
        assert (found.unaligned, found.epilogue) == (own, longer) and found.bandwidth == 7.0 and found.device is SAME


def test_what_cannot_be_multiplied_is_guessed(monkeypatch):
    def product(device, n, dtype, clock):
        if dtype == torch.bfloat16: raise RuntimeError("not implemented for this GPU")
        return 5.0
    everywhere(monkeypatch, rates, "product_rate", product)
    everywhere(monkeypatch, rates, "copy_bandwidth", lambda *_: 7.0)
    found = rates.measure_ceilings(ODD, "cpu")
    assert found.rates == dict(guessed_machine(ODD).rates, float16=5.0, float32=5.0, float64=5.0) and found.bandwidth == 7.0


def test_another_gpu_is_measured_once_and_kept(monkeypatch, place):
    calls = measured(monkeypatch, ODD)
    first = machine_here(GPU)
    assert machine_here(GPU) is first and first.bandwidth == 1e12 and calls == ["NVIDIA H20"]
    rates.found_machines.clear()  # the next process
    again = machine_here(GPU)
    assert (again.name, again.bandwidth, again.rates, again.device) == ("NVIDIA H20", 1e12, first.rates, ODD)
    assert calls == ["NVIDIA H20"] and len(json.loads(place.read_text())) == 1


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="a switch of later versions")
@pytest.mark.parametrize("d", [ODD, SAME], ids=["measured", "listed_machine"])
def test_the_newer_switch_for_tf32_stops_no_plan_and_is_told_apart(d, monkeypatch):
    measured(monkeypatch, d)
    switch = torch.backends.cuda.matmul
    before, key = switch.fp32_precision, rates.store_key(d)
    switch.fp32_precision = "tf32"
    try: assert rates.store_key(d) != key and machine_here(GPU).name == d.name
    finally: switch.fp32_precision = before


def test_processes_that_measure_together_take_the_same(monkeypatch, place):
    "Who keeps it first decides"
    calls = measured(monkeypatch, ODD)
    ceilings, entry = rates.measure_ceilings, dict(bandwidth=2e12, rates=dict.fromkeys(H200.rates, 3e14))
    def slow(*given):
        rates.store.update(rates.STORE, rates.store_key(ODD), entry)  # another process, meanwhile
        return ceilings(*given)
    everywhere(monkeypatch, rates, "measure_ceilings", slow)
    assert machine_here(GPU).bandwidth == stored_machine(ODD).bandwidth == 2e12 and calls == ["NVIDIA H20"]
    assert rates.keep_rates(GPU).bandwidth == stored_machine(ODD).bandwidth == 1e12, "what is asked for is measured anew"


def test_a_listed_gpu_is_measured_on_demand(monkeypatch):
    calls = measured(monkeypatch, SAME)
    assert machine_here(GPU) is H200 and not calls
    assert rates.keep_rates(GPU) is machine_here(GPU) is not H200 and calls == ["NVIDIA H200"]
    rates.found_machines.clear()
    assert machine_here(GPU).bandwidth == 1e12, "a measurement is better than the table"


BAD = {"no JSON": "{", "a list": "[]", "no entry": "{}", "a number": 5, "no rates": dict(bandwidth=1e12),
       "a dtype is missing": dict(bandwidth=1e12, rates=dict(float32=1e13)), "no numbers": dict(bandwidth="fast", rates=dict.fromkeys(H200.rates, 1e14)),
       "below zero": dict(bandwidth=1e12, rates=dict.fromkeys(H200.rates, -1.0)), "a bool": dict(bandwidth=True, rates=dict.fromkeys(H200.rates, 1e14)),
       "infinite": "{\"%s\": {\"bandwidth\": 1e999, \"rates\": {}}}"}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
@pytest.mark.filterwarnings("ignore:fusedloss")
def test_a_corrupt_entry_is_measured_anew(text, monkeypatch, place):
    calls, key = measured(monkeypatch, ODD), rates.store_key(ODD)
    place.write_text(text.replace("%s", key) if isinstance(text, str) else json.dumps({key: text}))
    place.chmod(0o600)
    assert stored_machine(ODD) is None
    assert machine_here(GPU).bandwidth == 1e12 and calls == ["NVIDIA H20"] and stored_machine(ODD).bandwidth == 1e12


def test_nothing_is_measured_while_something_looks_on(monkeypatch, place):
    "Inside capture, a compiler or a dispatch mode: a guess, which is not remembered"
    calls = measured(monkeypatch, ODD)
    with monkeypatch.context() as m:
        m.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert machine_here(GPU).bandwidth == guessed_machine(ODD).bandwidth
    with FlopCounterMode(display=False):
        assert machine_here(GPU).bandwidth == guessed_machine(ODD).bandwidth
    assert not calls and not place.exists() and not rates.found_machines
    assert machine_here(GPU).bandwidth == 1e12 and calls


def test_a_full_gpu_is_guessed_once(monkeypatch, place):
    calls = measured(monkeypatch, ODD)
    def full(*_): calls.append("tried"); raise torch.OutOfMemoryError("no memory is left")
    everywhere(monkeypatch, rates, "measure_ceilings", full)
    assert machine_here(GPU) is machine_here(GPU) and calls == ["tried"] and not place.exists()


def test_a_plan_is_for_the_machine_at_hand(monkeypatch):
    "or for the one that is named, or for an H200 where there is none"
    sizes = 4096, 32000, 512
    named = plan(*sizes, machine="H200")
    assert plan(*sizes, machine="RTX 4090").machine == "NVIDIA GeForce RTX 4090"
    assert plan(*sizes, machine="L4")["eager"].seconds > 4 * named["eager"].seconds
    assert plan(*sizes, torch.float32, device="cpu").machine == CPU.name
    if not torch.cuda.is_available():
        assert repr(plan(*sizes)) == repr(named) == repr(plan(*sizes, device="cuda:3"))
    measured(monkeypatch, ODD)
    assert plan(*sizes).machine == "NVIDIA H20" and repr(plan(*sizes, machine="H200")) == repr(named)
    assert plan(*sizes, torch.float32, device="cpu").machine == CPU.name


def test_a_named_machine_is_not_measured(monkeypatch):
    calls = measured(monkeypatch, ODD)
    plan(4096, 32000, 512, machine="H200")
    assert not calls and not rates.found_machines


def test_slabs_follow_the_multiprocessors():
    cuts = {name: plan(8192, 128256, 4096, machine=name)["recompute"].cut for name in ("H200", "L4", "B200")}
    assert len(set(cuts.values())) > 1 and all(v % cut(machines()[name].device, machines()[name].device.tma, False).BV == 0 for name, (_, v) in cuts.items())


@follows_plans
@pytest.mark.parametrize("known", thorough_but(["table", "disk", "guessed_machine"], "table"))
def test_a_compiled_call_plans_for_the_machine_at_hand(known, monkeypatch):
    "No graph breaks; the plan is of the machine that runs it"
    from fusedloss import linear_cross_entropy, losses
    x, w, y = torch.randn(6, 8), torch.randn(50, 8), torch.randint(50, (6,))
    torch.compile(linear_cross_entropy, backend="eager")(x, w, y)  # Dynamo asks once what the GPU can do, before another one is played
    calls = measured(monkeypatch, SAME if known == "table" else ODD)
    if known == "disk": rates.keep_rates(GPU); rates.found_machines.clear(); calls.clear()
    everywhere(monkeypatch, losses, "has_kernels", lambda t: True)
    torch._dynamo.reset()
    def step(x, w, y):
        loss = linear_cross_entropy(x, w, y)
        return loss * machine_here(x.device).bandwidth
    out = torch.compile(step, fullgraph=True, backend="eager")(x, w, y)
    expected = {"table": H200.bandwidth, "disk": 1e12, "guessed_machine": guessed_machine(ODD).bandwidth}[known]
    assert len(calls) <= (known == "guessed_machine"), "a GPU that no table lists is measured by the run, as without a compiler"
    torch.testing.assert_close(out, linear_cross_entropy(x, w, y, method="eager") * expected)
    torch._dynamo.reset()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_this_gpu_is_measured():
    "and reaches about what the table says, if it is there; less where others compute on it, never more"
    found = rates.keep_rates(GPU)
    assert machine_here(GPU) is found and stored_machine(found.device).rates == found.rates
    known = listed_machine(found.device)
    if known is not None:
        assert 0.05 < found.bandwidth / known.bandwidth < 1.4
        assert all(0.05 < found.rates[d] / known.rates[d] < 1.6 for d in ("bfloat16", "float16", "float32"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_a_capture_plans_without_measuring(monkeypatch):
    "On a GPU that no table lists: what a captured call would measure would be captured"
    everywhere(monkeypatch, rates, "listed_machine", lambda d: None)
    from fusedloss import linear_cross_entropy
    x, w = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in (64, 512))
    y = torch.randint(512, (64,), device="cuda")
    expected = linear_cross_entropy(x, w, y, method="eager")  # compiles, and measures
    rates.found_machines.clear()
    everywhere(monkeypatch, rates, "stored_machine", lambda d: None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = linear_cross_entropy(x, w, y, method="eager")
    graph.replay()
    torch.testing.assert_close(loss, expected)
    assert not rates.found_machines and rates.guessed_machines


def test_a_machine_names_the_dtypes_that_were_measured():
    toy = Machine("toy", 100.0, dict(float32=1000.0))
    assert toy.rate(torch.float32) == 1000.0
    with pytest.raises(KeyError, match=r"toy was measured for \['float32'\], not for int8"):
        toy.rate(torch.int8)


def test_peaks_of_boards_stand_in_proportion():
    for name in ("L4", "L40S", "RTX 4090", "RTX 5090"):
        most = boards()[name][1].peaks
        assert 64 * most.float64 == pytest.approx(most.float32, rel=0.02)
    for _, board in boards().values():
        assert board.source and board.peaks.float16 > board.peaks.float32 >= board.peaks.float64
    assert all(0.6 < share < 1 for share in rates.peak_shares())
    assert rates.expected_rates(boards()["H200"][1]).bandwidth == pytest.approx(H200.bandwidth)


def test_a_slice_of_a_gpu_is_not_the_gpu():
    assert listed_machine(SAME) is H200 and listed_machine(SAME._replace(multiprocessors=16)) is None
