"""Seconds of the host: how often the plan counts each part, the fit, what is kept, and the command."""

import json
import platform
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fusedloss import calibration
from fusedloss.calibration import fitted_host, host_counts, Step, STEPS
from fusedloss.core import rates, store
from fusedloss.core.rates import H200, Host, machine_here, stored_machine
from fusedloss.plans import plan
from helpers import everywhere

PARTS = {name: i for i, name in enumerate(Host._fields)}


@pytest.fixture
def place(tmp_path, monkeypatch):
    "An empty folder for what is kept"
    monkeypatch.setenv("FUSEDLOSS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(rates, "found_machines", {})
    monkeypatch.setattr(store, "_waiting", {})
    return tmp_path / f"{rates.STORE}.json"


def test_a_step_has_each_part_as_often_as_its_plan_counts():
    counts = dict(zip(Host._fields, host_counts(Step("chunks", 512, 1024, 256, memory_budget=2**17), H200)))
    _, rows, *_ = plan(512, 1024, 256, memory_budget=2**17, accumulate="native", machine="H200")["chunks"].cut
    assert counts.pop("chunks") == 1 and counts.pop("chunk") == -(-512 // rows) > 2 and not any(counts.values())
    tiles = host_counts(Step("tiles", 512, 1024, 256, memory_budget=3 * 2**19), H200)
    assert (tiles[PARTS["tiles"]], tiles[PARTS["tile"]], tiles[PARTS["stripe"]]) == (1, 8, 4)


@pytest.mark.parametrize("s", STEPS, ids=lambda s: f"{s.method}, {s.memory_budget}")
def test_each_step_fits_its_budget(s):
    found = plan(s.n, s.v, s.h, s.dtype, memory_budget=s.memory_budget, accumulate="native", machine="H200")
    assert s.method in [estimate.method for estimate in found.fits]


def test_the_steps_tell_all_parts_apart():
    counts = torch.tensor([host_counts(s, H200) for s in STEPS], dtype=torch.float64)
    assert torch.linalg.matrix_rank(counts) == len(Host._fields)


def test_the_fit_finds_the_seconds_of_each_part():
    counts = torch.tensor([host_counts(s, H200) for s in STEPS])
    true = Host(*((1 + i) * 1e-4 for i in range(len(Host._fields))))
    found = fitted_host(counts, counts.double() @ torch.tensor(true, dtype=torch.float64), Host())
    assert found == pytest.approx(true, rel=1e-6)


def test_parts_that_no_step_has_keep_their_seconds():
    counts = torch.zeros(2, len(Host._fields), dtype=torch.int64)
    counts[:, PARTS["chunks"]], counts[1, PARTS["chunk"]] = 1, 4
    found = fitted_host(counts, torch.tensor([1e-3, 2e-3], dtype=torch.float64), Host())
    assert found == pytest.approx(Host()._replace(chunks=1e-3, chunk=2.5e-4))


def test_what_noise_leaves_no_time_keeps_its_seconds():
    counts = torch.zeros(2, len(Host._fields), dtype=torch.int64)
    counts[:, PARTS["chunks"]], counts[1, PARTS["chunk"]] = 1, 4
    found = fitted_host(counts, torch.tensor([1e-3, 0.9e-3], dtype=torch.float64), Host())
    assert found == pytest.approx(Host()._replace(chunks=1e-3))


def test_a_cpu_is_not_calibrated_as_a_gpu(place):
    with pytest.raises(ValueError, match="device: expected a GPU, got 'cpu'"):
        calibration.calibrate("cpu")
    assert not place.exists() and not rates.found_machines


def test_a_measured_host_is_kept_beside_the_rates(place, monkeypatch):
    "In the file, for the next process, and when the rates are measured again"
    host = Host(*[1e-3] * len(Host._fields))
    found = replace(H200, bandwidth=1e12, fp8=1.5, host=host)
    rates.keep_machine(found, 0)
    assert rates.found_machines[0] is found
    again = stored_machine(H200.device)
    assert (again.bandwidth, again.fp8, again.host, again.rates) == (1e12, 1.5, host, H200.rates)
    everywhere(monkeypatch, rates, "measure_ceilings", lambda d, on, clock: H200)
    monkeypatch.setattr(rates, "device_of", lambda device: H200.device)
    assert rates.keep_rates("cpu").host == host and stored_machine(H200.device).bandwidth == H200.bandwidth


@pytest.mark.parametrize("host", [None, {}, {"eager": 1e-3}, dict.fromkeys(Host._fields, -1.0), dict.fromkeys(Host._fields, "1"), [1]])
def test_a_host_on_disk_that_makes_no_sense_is_not_taken(host, place):
    kept = dict(bandwidth=1e12, rates=H200.rates, fp8=1.5)
    place.write_text(json.dumps({rates.store_key(H200.device): kept} | ({} if host is None else {rates.host_key(H200.device): host})))
    assert stored_machine(H200.device).host == Host() and stored_machine(H200.device).fp8 == 1.5


def test_hosts_that_share_a_file_keep_their_own_seconds(place, monkeypatch):
    for name, seconds in (("one", 1e-3), ("other", 2e-3)):
        monkeypatch.setattr(rates, "processor", lambda name=name: name)
        rates.keep_machine(replace(H200, host=Host(eager=seconds)), 0)
    assert stored_machine(H200.device).host.eager == 2e-3
    for name, seconds in (("one", 1e-3), ("a third", Host().eager)):
        monkeypatch.setattr(rates, "processor", lambda name=name: name)
        assert stored_machine(H200.device).host.eager == seconds


def test_a_cpu_whose_name_cannot_be_read_has_one(monkeypatch):
    def refused(self, *given, **words):
        raise PermissionError(self)

    monkeypatch.setattr(rates.Path, "read_text", refused)
    assert rates.processor.__wrapped__() == (platform.processor() or platform.machine())


def test_plans_take_the_host_and_the_rate_of_fp8():
    slow = replace(H200, host=Host(*[1.0] * len(Host._fields)))
    for v, parts in ((8192, 1.0), (64, 2.0)):  # rows of so few classes have another kernel
        assert plan(8, v, 8, machine=slow)["eager"].seconds == parts > plan(8, v, 8, machine="H200")["eager"].seconds
    seconds = lambda machine: plan(8192, 128256, 4096, options=("matmul_dtype",), machine=machine)["product"].seconds
    assert seconds(replace(H200, fp8=1.0)) > 1.2 * seconds(H200)


def test_the_command_says_that_there_is_no_gpu():
    code = "import torch; torch.cuda.is_available = lambda: False; from fusedloss.__main__ import main; raise SystemExit(main(['calibrate']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith("no GPU: "), done


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_calibrated_on_a_gpu(place, capsys):
    "Each part takes time, less than a second, and plans take what was measured"
    assert calibration.report("cuda") == 0
    found = machine_here(torch.device("cuda"))
    assert stored_machine(found.device).host == found.host and all(0 < s < 1 for s in found.host)
    assert found.fp8 > 1 or found.device.capability < (8, 9)
    assert plan(8, 64, 8)["eager"].seconds == pytest.approx(found.host.eager)
    assert "host: eager" in capsys.readouterr().out
