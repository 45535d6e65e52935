"""Every test file has a budget of core-seconds, and a run that exceeds one fails."""
from types import SimpleNamespace

import conftest
import pytest
from budgets import ALLOWED, FACTOR, CoreSeconds, core_seconds, too_slow
from workbook import ROOT


def test_every_file_has_a_budget():
    assert {path.name for path in (ROOT / "tests").glob("test_*.py")} <= ALLOWED.keys()


def test_too_slow_is_more_than_the_budget_on_this_processor():
    allowed = ALLOWED["test_site.py"]
    limit = FACTOR * allowed
    assert too_slow({"test_site.py": 0.9 * limit}, 1.0) == too_slow({"test_site.py": 1.9 * limit}, 2.0) == []
    said = f"test_site.py used {limit + 1} core-seconds; it may use {allowed}, here {limit}"
    assert too_slow({"test_site.py": limit + 1.0}, 0.5) == [said], "no faster processor is asked for"
    assert too_slow({"test_new.py": 1.0}, 1.0), "a file without a budget"


@pytest.fixture
def counter():
    "A counter that enforces budgets, and the worker that reports to it"
    def start(**more) -> CoreSeconds:
        return CoreSeconds(SimpleNamespace(getoption=lambda name: True, **more))
    return start(), start(workerinput={})


def finished(counter: CoreSeconds, **more) -> SimpleNamespace:
    "A session that has ended without a failure"
    session = SimpleNamespace(exitstatus=0, config=SimpleNamespace(**more))
    counter.pytest_sessionfinish(session)
    return session


@pytest.mark.parametrize("used, status", [(1.0, 0), (1e4, 1)])
def test_a_run_that_is_too_slow_fails(used, status, counter):
    main, worker = counter
    worker.used["tests/test_site.py::test_a[b::c/d]"] = used
    output = finished(worker, workeroutput={}).config.workeroutput
    main.pytest_testnodedown(SimpleNamespace(workeroutput=output))
    assert main.by_file() == {"test_site.py": used} and finished(main).exitstatus == status


def test_work_of_a_test_is_counted(counter):
    main, _ = counter
    protocol = main.pytest_runtest_protocol(SimpleNamespace(nodeid="tests/test_site.py::test_a"))
    next(protocol)
    before = core_seconds()
    while core_seconds() < before + 0.02:
        pass
    with pytest.raises(StopIteration):
        protocol.send(None)
    assert 0.02 <= main.used["tests/test_site.py::test_a"] < 1


@pytest.mark.parametrize("minutes, late", [(0.0, True), (float("inf"), False)])
def test_a_test_whose_turn_comes_too_late_says_so(minutes, late):
    item = SimpleNamespace(config=SimpleNamespace(getoption={"--minutes": minutes}.get))
    if late:
        with pytest.raises(pytest.skip.Exception, match="its turn came after 0 minutes"):
            conftest.pytest_runtest_setup(item)
    else:
        conftest.pytest_runtest_setup(item)
