"""The recipes on torchtitan, Megatron, nanochat, modded-nanogpt, verl, Axolotl and LLaMA-Factory: the pages notice faults, and each script agrees with its framework."""
import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from project import ROOT
from test_recipes import run_page

FAULTS = {  # where a fault is planted, and how; the page of each must raise
    "a factor": ("pretraining", "fusedloss", "linear_cross_entropy", lambda f: lambda *a, **k: 1.01 * f(*a, **k)),
    "a mean": ("pretraining", "fusedloss", "linear_cross_entropy", lambda f: lambda *a, **k: f(*a, **k | {"reduction": "mean"})),
    "no soft cap": ("pretraining", "fusedloss", "linear_cross_entropy", lambda f: lambda *a, softcap=None, **k: f(*a, **k)),
    "no bias": ("pretraining", "fusedloss", "linear_cross_entropy", lambda f: lambda *a, linear_bias=None, **k: f(*a, **k)),
    "targets weigh alike": ("pretraining", "fusedloss", "linear_cross_entropy", lambda f: lambda *a, target_weight=None, **k: f(*a, **k)),
    "no temperature": ("finetuning", "fusedloss", "linear_log_probs", lambda f: lambda *a, temperature=1.0, **k: f(*a, **k)),
    "a patched loss has a factor": ("finetuning", "fusedloss.integrations.transformers", "linear_cross_entropy", lambda f: lambda *a, **k: 1.01 * f(*a, **k)),
    "nothing is patched": ("finetuning", "fusedloss.integrations.transformers", "patch", lambda f: lambda model, **k: model),
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_page_notices(fault, monkeypatch):
    page, module, name, how = FAULTS[fault]
    if page == "finetuning" and "log_probs" not in name:
        pytest.importorskip("transformers", reason="transformers is not installed")
    module = importlib.import_module(module)
    monkeypatch.chdir(ROOT / "nbs" / "recipes")
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which a page adds examples/
    monkeypatch.setattr(module, name, how(getattr(module, name)))
    with pytest.raises((AssertionError, RuntimeError)):
        run_page(page)


SCRIPTS = {  # package, processes, and lines that show a mistake
    "axolotl": ("axolotl", 1, ()),
    "llamafactory": ("llamafactory", 1, ()),
    "megatron": ("megatron", 2, ("gathered and added",)),
    "modded_nanogpt": ("torch", 1, ("a cap of 23 without the 5",)),
    "nanochat": ("nanochat", 1, ("padded rows are classes", "without the soft cap", "labels shifted twice")),
    "torchtitan": ("torchtitan", 4, ("mean of ranks",)),
    "verl": ("verl", 1, ()),
    "verl, over ranks": ("verl", 2, ()),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_agrees_with_its_framework(name):
    package, processes, mistakes = SCRIPTS[name]
    if not find_spec(package):
        pytest.skip(f"{package} is not installed")
    script = ROOT / "examples" / f"with_{name.partition(',')[0]}.py"
    launcher = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    path = os.pathsep.join([str(ROOT), str(script.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, *launcher, str(script)], capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    errors = {line: float(error) for line, error in re.findall(r"^(.+): (\S+) from ", done.stdout, re.MULTILINE)}
    assert set(mistakes) < errors.keys(), done.stdout
    assert max(error for line, error in errors.items() if line not in mistakes) < 1e-5, done.stdout
    assert all(errors[line] > 1e-3 for line in mistakes), done.stdout
