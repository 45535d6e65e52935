"""`python -m fusedloss plan`: it prints the plan that the function makes, and says what an argument should be."""
import subprocess
import sys

import pytest
import torch
from project import ROOT

import fusedloss as fl
from fusedloss.__main__ import byte_count, main

SIZES = ["plan", "--tokens", "8192", "--classes", "128256", "--features", "4096"]
OPTIONS = ["--dtype", "float16", "--grad-dtype", "float32", "--memory-budget", "2GiB", "--reduction", "none", "--accumulate", "native", "--needs-grad", "weight", "bias",
           "--stats", "detached", "--options", "softcap", "linear_bias", "--chunk-size", "256", "--max-valid", "8000"]
GIVEN = dict(grad_dtype=torch.float32, memory_budget=2**31, reduction="none", accumulate="native", needs_grad=(False, True, True), stats="detached",
             options=("softcap", "linear_bias"), chunk_size=256, max_valid=8000)


@pytest.fixture
def run(capsys):
    "Run the command; the exit code, standard output, standard error"
    def run(*argv: str):
        try:
            code = main([*argv])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()
    return run


def test_the_table_and_the_reason_are_the_functions(run):
    found = fl.plan(8192, 128256, 4096, machine="H200")
    assert run(*SIZES, "--machine", "H200") == (0, f"{found!r}\n", "") and found.why in repr(found)


def test_every_option_reaches_the_plan(run):
    found = fl.plan(8192, 128256, 4096, torch.float16, machine="L4", **GIVEN)
    assert run(*SIZES, "--machine", "L4", *OPTIONS)[1] == f"{found!r}\n"


@pytest.mark.parametrize("cut", [place for place, word in enumerate(OPTIONS) if word.startswith("--")], ids=lambda place: OPTIONS[place])
def test_each_option_matters(monkeypatch, run, cut):
    "A plan without it is asked otherwise"
    asked = []
    monkeypatch.setattr("fusedloss.plans.plan", lambda *args, **given: asked.append((args, given)) or fl.plan(8, 8, 8, machine="H200"))
    end = next((i for i in range(cut + 1, len(OPTIONS)) if OPTIONS[i].startswith("--")), len(OPTIONS))
    run(*SIZES, *OPTIONS), run(*SIZES, *OPTIONS[:cut], *OPTIONS[end:])
    assert asked[0] != asked[1]


@pytest.mark.parametrize("gpu, machine, device", ((True, None, None), (False, None, "cpu"), (True, "H200", None), (False, "H200", None)))
def test_the_machine_at_hand_unless_one_is_named(monkeypatch, run, gpu, machine, device):
    asked = []
    monkeypatch.setattr("fusedloss.plans.plan", lambda *args, **given: asked.append(given) or fl.plan(8, 8, 8, machine="H200"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert run(*SIZES, *["--machine", machine] * bool(machine))[0] == 0
    assert (asked[0]["machine"], asked[0]["device"]) == (machine, device)


def test_nothing_fits(run):
    code, out, _ = run(*SIZES, "--machine", "H200", "--memory-budget", "1MiB")
    assert code == 1 and out.splitlines()[-1] == "nothing fits a budget of 1 MiB, by NVIDIA H200"


@pytest.mark.parametrize("argv, said", (
    (["--machine", "H2000"], "machine: expected one of ['A100 40GB', "), (["--tokens", "-1"], "n_tokens: expected an integer not below 0, got -1"),
    (["--options", "soft"], "options: expected a tuple of names among linear_bias, "), (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    (["--tokens", "many"], "argument --tokens: invalid int value: 'many'"), (["--memory-budget", "2 buckets"], "expected a size such as 2GiB, got '2 buckets'"),
    (["--memory-budget", "0"], "memory_budget: expected an integer not below 1 or None, got 0")))
def test_a_wrong_argument_is_named(run, argv, said):
    code, out, err = run(*SIZES, *argv)
    assert (code, out) == (2, "") and said in err and err.startswith("usage: python -m fusedloss plan")


def test_a_size_is_missing(run):
    code, _, err = run(*SIZES[:-2])
    assert code == 2 and "the following arguments are required: --features" in err


@pytest.mark.parametrize("text, size", (("2GiB", 2**31), ("512 MiB", 2**29), ("1.5gib", 3 * 2**29), ("2GB", 2 * 10**9), ("3k", 3000), ("4Ki", 4096), ("1TiB", 2**40), ("7", 7), ("7B", 7)))
def test_byte_count(text, size):
    assert byte_count(text) == size


def test_without_a_command_it_prints_help():
    done = subprocess.run([sys.executable, "-m", "fusedloss"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m fusedloss [-h] COMMAND") and "plan" in done.stdout and not done.stderr
