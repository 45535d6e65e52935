"""A snapshot reports what has changed, and nothing else."""
import json
import os
import subprocess
import sys

import pytest
import snapshot
from project import ROOT

pytestmark = pytest.mark.thorough
TESTS = """
import torch

def test_a_loss():
    x = torch.randn(3, requires_grad=True)
    (x * x).sum().mul(1.0).backward()
    assert x.grad is not None

def test_a_comparison(): torch.testing.assert_close(torch.randn(3), torch.zeros(3), atol=9, rtol=0)

def test_of_nothing(): pass
"""


@pytest.fixture
def compared(tmp_path):
    "Status and lines of a comparison of tests with the same ones, once a part of them is replaced"
    tests, path = tmp_path / "test_bits.py", tmp_path / "snapshot.json"

    def run(*args):
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        done = subprocess.run([sys.executable, str(ROOT / "tools" / "snapshot.py"), *map(str, args)], cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.returncode, [line for line in done.stdout.splitlines() if " · " in line], done.stdout + done.stderr

    def compare(old="", new=""):
        tests.write_text(TESTS)
        status, _, said = run("take", path, tests)
        assert status == 0, said
        tests.write_text(TESTS.replace(old, new))
        return run("compare", path)
    compare.run, compare.path = run, path
    return compare


def test_the_same_code_has_no_difference(compared):
    status, lines, said = compared()
    assert status == 0 and not lines and "lines, all the same" in said
    kept = json.loads(compared.path.read_text())["lines"]
    assert [line.split(",")[1] for name, line in kept.items() if "::" in name and not name.startswith("schema")] == [" 1 calls", " 1 calls", " 0 calls"]
    assert any(name.startswith("schema fusedloss::") for name in kept)


@pytest.mark.parametrize("old, new, name", [("mul(1.0)", "mul(1 + 2**-23)", "test_a_loss"), ("torch.randn(3), ", "torch.randn(3) * (1 + 2**-23), ", "test_a_comparison"),
                                            ("def test_of_nothing(): pass", "def test_of_nothing(): assert False", "test_of_nothing")])
def test_a_changed_bit_and_a_failure_are_reported(old, new, name, compared):
    status, lines, _ = compared(old, new)
    assert status == 1 and len(lines) == 1 and lines[0].startswith(f"test_bits.py::{name} · expected passed")


def test_a_missing_test_and_a_new_one_are_reported(compared):
    status, lines, _ = compared("test_of_nothing", "test_of_all")
    assert status == 1 and [line.partition(", ")[0] for line in lines] == ["test_bits.py::test_of_all · expected nothing · got passed", "test_bits.py::test_of_nothing · expected passed"]


def test_another_machine_is_refused(compared):
    compared()
    kept = json.loads(compared.path.read_text()) | {"machine": "another one"}
    compared.path.write_text(json.dumps(kept))
    status, lines, said = compared.run("compare", compared.path)
    assert status == 1 and not lines and "expected one like that of" in said and "another one" in said


def test_a_changed_schema_is_a_difference():
    before, after = ({"schema fusedloss::f": f"f({kind} n)"} for kind in ("int", "float"))
    assert snapshot.differences(before, after) == ["schema fusedloss::f · expected f(int n) · got f(float n)"]
