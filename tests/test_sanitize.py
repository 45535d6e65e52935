"""What tools/sanitize.py makes of compute-sanitizer's output."""
import pytest
import sanitize

pytestmark = pytest.mark.thorough
SOURCE = ["first", "  put(p, v);", "  v = get(p);"]
RACES = """kernels: ctc; launched: ctc_scan
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at put(State *, State)+0x1230 in 0123.cubin.cu:2
=========     and Read access at get(const State *)+0x1480 in 0123.cubin.cu:3 [1536 hazards]
=========
========= Error: Race reported between Write access at put(State *, State)+0x1330 in 0124.cubin.cu:2
=========     and Read access at get(const State *)+0x1580 in 0124.cubin.cu:3 [8 hazards]
=========
========= Warning: Race reported between Read access at ctc_grad+0x20
=========     and Write access at ctc_grad+0x40 [4 hazards]
=========
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)
"""
MEMORY = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at lse_kernel+0x7f0 in recompute.py:150
=========     by thread (3,0,0) in block (0,0,0)
=========     Address 0x7f1234 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x33] in libcuda.so
=========
========= ERROR SUMMARY: 1 error
"""
CLEAN = "========= COMPUTE-SANITIZER\nctc: Stage 20\n========= ERROR SUMMARY: 0 errors\n"
RING = "racecheck: Race reported between Write access at put(State *, State) [put(p, v);] and Read access at get(const State *) [v = get(p);]"
GRAD = "racecheck: Warning: Race reported between Read access at ctc_grad and Write access at ctc_grad"


def test_races_are_told_by_place_and_once():
    assert len(list(sanitize.reports(RACES))) == 3
    assert sanitize.found("racecheck", RACES, SOURCE) == {RING, GRAD}


def test_an_error_of_memory_has_its_kernel_and_no_address():
    assert sanitize.found("memcheck", MEMORY, SOURCE) == {"memcheck: Invalid __global__ write of size 4 bytes at lse_kernel"}


def test_kernels_of_libraries_are_not_ours():
    theirs = RACES.replace("ctc_grad+0x20", "nvjet_sm90_tst_64x16+0x20")
    assert len(list(sanitize.reports(theirs))) == 3 and sanitize.found("racecheck", theirs, SOURCE) == {RING}


def test_nothing_is_found_in_a_clean_run():
    assert sanitize.found("memcheck", CLEAN, SOURCE) == set()


def test_more_and_less_than_expected_are_both_wrong():
    assert sanitize.disagreements({RING}, {RING}) == []
    assert sanitize.disagreements({RING, GRAD}, {RING}) == [f"unexpected: {GRAD}"]
    assert sanitize.disagreements(set(), {RING}) == [f"expected, and not reported: {RING}"]


def test_the_list_is_of_these_tools():
    lines = sanitize.EXPECTED.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines)) and all(line.partition(":")[0] in sanitize.TOOLS for line in lines)


def test_the_status_follows_the_list(monkeypatch, tmp_path, capsys):
    (tmp_path / "list").write_text(f"{GRAD}\n", encoding="utf-8")
    monkeypatch.setattr(sanitize, "EXPECTED", tmp_path / "list")
    monkeypatch.setattr(sanitize, "run", lambda tool: (0, CLEAN if tool != "racecheck" else RACES[:RACES.index("========= Error")] + RACES[RACES.index("========= Warning"):]))
    assert sanitize.main([]) == 0 and "racecheck: 1 reports" in capsys.readouterr().out
    monkeypatch.setattr(sanitize, "run", lambda tool: (0, CLEAN))
    assert sanitize.main(["racecheck"]) == 1 and sanitize.main(["memcheck"]) == 0
    monkeypatch.setattr(sanitize, "run", lambda tool: (1, CLEAN))
    assert sanitize.main(["memcheck"]) == 1
    monkeypatch.setattr(sanitize, "run", lambda tool: (0, MEMORY))
    assert sanitize.main(["memcheck", "--accept"]) == 0 and len((tmp_path / "list").read_text(encoding="utf-8").splitlines()) == 2
