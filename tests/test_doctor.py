"""`python -m fusedloss doctor`: what it says, line by line, of a machine without a GPU, of one that works, and of each thing that may be broken."""
import ctypes
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusedloss import doctor
from fusedloss.__main__ import main
from fusedloss.core import cuda, devices, store, triton as with_triton, tuning
from fusedloss.core.devices import GPUS, Implementation
from project import ROOT

LINES = ["fusedloss", *doctor.CHECKS, "verdict"]
REQUIRED = ("torch>=2.8", "numpy", 'cupy-cuda12x; extra == "cuda12"', 'cupy-cuda13x; extra == "cuda13"', 'triton>=3.4; platform_system == "Linux" and extra == "dev"')
WORKS = "everything that this machine could use works"


def lines(text: str) -> dict[str, str]:
    "What a report says, by what its lines begin with"
    found = {line[:12].rstrip(): line[13:] for line in text.splitlines()}
    assert [*found] == LINES, text
    return found


@pytest.fixture
def run(capsys):
    "Run the command: its exit code, and its lines"
    def run():
        code = main(["doctor"])
        return code, lines(capsys.readouterr().out)
    return run


@pytest.fixture
def machine(monkeypatch, tmp_path):
    "A machine with an H200 where all works; what a test replaces is broken"
    d = GPUS["H200"]
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=d.shared_memory, total_memory=140 * 2**30)
    installed = {"torch": "2.11.0+cu130", "triton": "3.6.0", "cupy-cuda13x": "14.0.1"}
    patch = monkeypatch.setattr
    patch(torch, "__version__", "2.11.0+cu130")
    patch(torch.version, "cuda", "13.0")
    patch(torch.version, "hip", None)
    for name, value in dict(is_available=True, current_device=0, device_count=2, get_device_name="NVIDIA H200", get_device_properties=properties).items():
        patch(torch.cuda, name, lambda *index, value=value: value)
    patch(doctor, "compute_failure", lambda: "")
    patch(doctor, "driver_numbers", lambda: (2, 13000))
    patch(doctor, "requirements", lambda package="fusedloss": REQUIRED if package == "fusedloss" else ('triton==3.6.0; platform_system == "Linux"',))
    patch(doctor, "distributions", lambda module: [f"{name} {version}" for name, version in installed.items() if name.startswith(module)])
    patch(with_triton, "triton", SimpleNamespace())
    patch(with_triton, "triton_failure", lambda: "")
    patch(cuda, "COMPILERS", {"CuPy": lambda *how: None, "PyTorch": lambda *how: None})
    patch(doctor, "find_spec", lambda module: True)
    patch(store, "_warned", set())
    for name in ("TRITON_HOME", "HOME", "FUSEDLOSS_CACHE_DIR", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR", "FUSEDLOSS_CHOICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for cached in (devices.recognised, cuda.compiler_failure, with_triton.triton_works, tuning.read_choices):
        cached.cache_clear()
    yield SimpleNamespace(patch=patch, installed=installed, home=tmp_path)
    for cached in (devices.recognised, cuda.compiler_failure, with_triton.triton_works, tuning.read_choices):
        cached.cache_clear()


def test_a_machine_where_all_works(machine, run):
    code, said = run()
    assert code == 0 and not any("FAULT" in text for text in said.values())
    assert said["PyTorch"] == "2.11.0+cu130, supported: >=2.8, built for CUDA 13.0, supported: 12 13"
    assert said["GPU"].startswith("2 x NVIDIA H200, compute capability 9.0, 140.0 GiB, 132 multiprocessors, driver")
    assert said["GPU"].endswith("for CUDA 13.0")
    assert said["Triton"] == "3.6.0, supported: >=3.4 ==3.6.0, works"
    assert (said["CuPy"], said["NVRTC"]) == ("cupy-cuda13x 14.0.1, compiles", "PyTorch's compiles")
    assert said["taken"] == "; ".join(i.what for i in doctor.implementations()) and said["passed over"] == "no kernel"
    assert said["caches"] == "~/.triton/fusedloss not made yet; ~/.triton/cache not made yet; ~/.cupy/kernel_cache not made yet"
    assert said["tuning"] == "tuning.json 0 entries, rates.json 0 entries" and said["verdict"] == WORKS


def broken(run, what: str, *words: str) -> dict[str, str]:
    "The report, in which one line has a fault that says these words"
    code, said = run()
    assert code == 1 and said["verdict"] == f"broken: {what}"
    assert [name for name, text in said.items() if text.startswith("FAULT: ")] == [what]
    for word in words:
        assert word in said[what], said[what]
    return said


class Absurd(Exception):
    def __repr__(self): raise ValueError("no words")


@pytest.mark.parametrize("reason", (ImportError("libcuda.so.1: cannot open\nshared object file"), RuntimeError("numpy 2"), SystemExit(3), Absurd()), ids=lambda r: type(r).__name__)
def test_a_cupy_that_raises(machine, run, monkeypatch, reason):
    "Whatever it raises, as it is imported"
    class Raising:
        def find_spec(self, name, path=None, target=None):
            if name == "cupy": raise reason
    monkeypatch.setattr(sys, "meta_path", [Raising(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    machine.patch(cuda, "COMPILERS", cuda.COMPILERS | {"CuPy": cuda.CompiledByCupy})
    code, said = run()
    assert code == 1 and said["CuPy"].startswith("FAULT: ") and "CuPy" in said["verdict"] and said["tuning"]
    if isinstance(reason, (ImportError, RuntimeError)):
        assert said["CuPy"] == f"FAULT: it does not compile: {' '.join(repr(reason).replace(chr(92) + 'n', ' ').split())}; cupy-cuda13x 14.0.1, passed over"
        assert said["NVRTC"] == "PyTorch's compiles" and "scans over graphs" in said["taken"]


def test_kernels_that_nothing_compiles(machine, run):
    def failing(*how): raise OSError("no NVRTC")
    machine.patch(cuda, "COMPILERS", dict.fromkeys(cuda.COMPILERS, failing))
    code, said = run()
    assert code == 1 and said["verdict"] == "broken: CuPy, NVRTC" and "no NVRTC" in said["NVRTC"]
    assert said["passed over"].startswith("neither CuPy nor NVRTC compiles: ") and "scans over graphs (otherwise scans in PyTorch)" in said["passed over"]
    assert "scans over graphs" not in said["taken"] and "logits, rows by Triton" in said["taken"]


def test_a_triton_that_does_not_work(machine, run):
    machine.patch(with_triton, "triton_failure", lambda: "RuntimeError('Failed to find C compiler')")
    said = broken(run, "Triton", "FAULT: it does not work: RuntimeError('Failed to find C compiler')", "PyTorch takes its place")
    assert "no Triton that works: logits, rows by Triton (otherwise PyTorch)" in said["passed over"]


@pytest.mark.parametrize("package, version, what, words", (
    ("torch", "2.7.1+cu126", "PyTorch", "expected >=2.8, got 2.7.1+cu126"), ("triton", "3.3.1", "Triton", "expected >=3.4, got 3.3.1"),
    ("triton", "3.7.0", "Triton", "expected ==3.6.0, got 3.7.0"), ("cupy-cuda12x", "14.0.1", "CuPy", "expected one CuPy, got cupy-cuda13x, cupy-cuda12x")))
def test_versions_that_do_not_fit(machine, run, package, version, what, words):
    machine.installed[package] = version
    if package == "torch": machine.patch(torch, "__version__", version)
    broken(run, what, f"FAULT: {words}")


def test_a_cupy_for_another_cuda(machine, run):
    del machine.installed["cupy-cuda13x"]
    machine.installed["cupy-cuda12x"] = "13.6.0"
    broken(run, "CuPy", "FAULT: expected cupy-cuda13x beside a PyTorch of CUDA 13.0, got cupy-cuda12x")


def test_a_cuda_that_is_not_supported(machine, run):
    machine.patch(torch.version, "cuda", "11.8")
    broken(run, "PyTorch", "FAULT: expected CUDA 12 or 13, got 11.8")


def test_a_python_that_is_not_supported(machine, run):
    said = [f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)]  # by the package, which may not be installed here
    machine.patch(doctor.metadata, "metadata", lambda name: SimpleNamespace(get_all=lambda field: said))
    machine.patch(sys, "version_info", (3, 10, 4))
    broken(run, "Python", "FAULT: expected Python 3.11 to 3.14, got 3.10")


@pytest.mark.parametrize("version, bound, fits", (("2.8.0a0+git1", ">=2.8", True), ("2.10.0", ">=2.8", True), ("2.7.9", ">=2.8", False), ("3.6.0.post1", "==3.6.0", True),
                                                  ("3.6.1", "==3.6.0", False), ("3.6", "==3.6.0", False), ("unknown", ">=2.8", True)))
def test_bounds_of_versions(version, bound, fits):
    assert doctor.misfit(version, [bound]) == ("" if fits else f"expected {bound}, got {version}")
    assert doctor.bounds("torch", (f"torch{bound}; extra == 'a==9'", "torchvision>=9", "torch-x>=9")) == [bound]


def test_supported_versions_are_those_of_the_settings():
    settings = (ROOT / "settings.ini").read_text(encoding="utf-8")
    oldest = doctor.bounds("triton", tuple(settings.split()))
    assert oldest and f"the one that belongs to PyTorch, {oldest[0][2:]} or later" in (ROOT / "VERSIONS.md").read_text(encoding="utf-8")


def test_packages_without_a_name_are_passed_over(monkeypatch):
    "As a folder is that an interrupted installation left"
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"torch": ["torch", None, "torch"]})
    assert doctor.distributions("torch") == [f"torch {metadata.version('torch')}"] and doctor.distributions("cupy") == []


def test_a_package_that_is_not_installed_says_no_range(monkeypatch, run):
    def missing(name): raise metadata.PackageNotFoundError(name)
    doctor.requirements.cache_clear()
    monkeypatch.setattr(metadata, "requires", missing)
    monkeypatch.setattr(metadata, "metadata", missing)
    try: assert doctor.requirements() == doctor.requirements("torch") == () and "is not installed" in doctor.check_python().text and not doctor.check_python().fault
    finally: doctor.requirements.cache_clear()


def test_without_cupy_there_is_nothing_broken(machine, run):
    del machine.installed["cupy-cuda13x"]
    machine.patch(doctor, "find_spec", lambda module: None)
    code, said = run()
    assert code == 0 and said["CuPy"] == "not installed; it is optional" and ".cupy" not in said["caches"]


def test_a_gpu_that_lacks_something(machine, run):
    machine.patch(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="NVIDIA L4", major=8, minor=9, multi_processor_count=58, total_memory=24 * 2**30))
    devices.recognised.cache_clear()
    code, said = run()
    assert code == 0 and "compute capability 8.9, 24.0 GiB, 58 multiprocessors" in said["GPU"]
    assert "no clusters: logits, a row across a cluster (otherwise rows by Triton)" in said["passed over"] and "a row across" not in said["taken"]


def test_a_gpu_that_does_not_compute(machine, run):
    machine.patch(doctor, "compute_failure", lambda: "PyTorch does not compute on it: no kernel image is available")
    broken(run, "GPU", "no kernel image is available; 2 x NVIDIA H200")


def test_a_gpu_that_pytorch_does_not_reach(machine, run):
    machine.patch(torch.cuda, "is_available", lambda: False)
    machine.patch(torch.version, "cuda", None)
    said = broken(run, "GPU", "PyTorch reaches none, and the driver has 2: PyTorch is 2.11.0+cu130, supported: >=2.8, built for CPUs alone")
    assert said["passed over"] == "no GPU: all" and "not needed" in said["CuPy"]


@pytest.mark.parametrize("answers, numbers", (({}, (2, 13000)), ({"cuInit": 100}, (0, 13000)), (None, (0, 0))))
def test_what_the_driver_says(monkeypatch, answers, numbers):
    "Or what is not there"
    def ask(name, *args):
        if answers is None: raise OSError("libcuda.so.1")
        if answers.get(name): raise RuntimeError(name)
        if name != "cuInit": ctypes.cast(args[0], ctypes.POINTER(ctypes.c_int))[0] = {"cuDriverGetVersion": 13000, "cuDeviceGetCount": 2}[name]
    monkeypatch.setattr(cuda, "ask_driver", ask)
    assert doctor.driver_numbers() == numbers


# ---- folders


def test_a_cache_folder_that_others_own(machine, run):
    (machine.home / ".triton" / "cache").mkdir(parents=True)
    there, own = os.stat, machine.home.stat().st_uid
    machine.patch(os, "getuid", lambda: own)
    class Others:
        st_uid = own + 7
    machine.patch(doctor.os, "stat", lambda path, **how: Others() if path == machine.home / ".triton" / "cache" else there(path, **how))
    broken(run, "caches", f"FAULT: ~/.triton/cache: expected a folder of user {own}, got one of user {own + 7}; ~/.triton/fusedloss not made yet")


@pytest.mark.parametrize("made", (False, True))
def test_a_cache_folder_that_cannot_be_written(machine, run, made):
    "Or made"
    if made: (machine.home / ".triton" / "fusedloss").mkdir(parents=True)
    locked, access = machine.home / ".triton" / "fusedloss" if made else machine.home, os.access
    machine.patch(os, "access", lambda path, mode, **how: Path(path) != locked and access(path, mode, **how))
    broken(run, "caches", f"FAULT: {'~/.triton/fusedloss' if made else '~'} cannot be written")


def test_a_file_where_a_folder_should_be(machine, run):
    (machine.home / ".cupy").write_text("")
    broken(run, "caches", "FAULT: ~/.cupy: expected a folder, got a file")


def test_folders_that_the_environment_names(machine, run, monkeypatch):
    for name in ("FUSEDLOSS", "TRITON", "CUPY"): monkeypatch.setenv(f"{name}_CACHE_DIR", str(machine.home / "x" / name))
    (machine.home / "x" / "CUPY").mkdir(parents=True)
    assert run()[1]["caches"] == f"~/x/FUSEDLOSS not made yet; ~/x/TRITON not made yet; ~/x/CUPY of user {machine.home.stat().st_uid}"


def test_tuning_is_counted(machine, run):
    store.update("tuning", "a", {"variant": [1]}), store.update("tuning", "b", {"variant": [2]})
    assert run()[1]["tuning"] == "tuning.json 2 entries, rates.json 0 entries"


def test_tuning_that_cannot_be_read(machine, run):
    store.update("tuning", "a", {"variant": [1]})
    (machine.home / ".triton" / "fusedloss" / "tuning.json").write_text("[")
    broken(run, "tuning", "FAULT: fusedloss: ~/.triton/fusedloss/tuning.json: replaced at the next update: expected a JSON object")


def test_tuning_of_another_user(machine, run):
    store.update("tuning", "a", {"variant": [1]})
    there = os.fstat
    machine.patch(store.os, "fstat", lambda file: os.stat_result((*there(file)[:4], os.getuid() + 7, *there(file)[5:10])))
    broken(run, "tuning", "passed over: expected a file of user")


@pytest.mark.parametrize("text, fault", (("[", "expected a file of choices in JSON"), ('{"variants": {"k": [1]}}', "")))
def test_a_file_of_choices(machine, run, monkeypatch, text, fault):
    monkeypatch.setenv("FUSEDLOSS_CHOICES", str(machine.home / "choices.json"))
    (machine.home / "choices.json").write_text(text)
    if fault: broken(run, "tuning", f"FAULT: FUSEDLOSS_CHOICES=~/choices.json: {fault}")
    else: assert run()[1]["tuning"].endswith("FUSEDLOSS_CHOICES 1 variants")


# ---- the report


def test_a_check_that_fails_is_a_finding(machine, run):
    def failing(): raise KeyError("x")
    machine.patch(doctor, "CHECKS", doctor.CHECKS | {"CuPy": failing})
    broken(run, "CuPy", "FAULT: KeyError('x'); the check itself failed")


@pytest.mark.parametrize("text, shown", (("/h/me/x and '/h/me' but /h/me2, /a/h/me", "~/x and '~' but /h/me2, /a/h/me"), ("\u00e9", "\\xe9"),
                                         ("'@/a.b/x', @/a, /srv@/a, C:\\\\Users\\\\a\\\\x", "'~/x', ~, /srv@/a, ~\\\\x")))
def test_a_line_names_no_home_directory_and_is_ascii(monkeypatch, text, shown):
    monkeypatch.setenv("HOME", "/h/me")
    text, shown = (words.replace("@", "/" + "home") for words in (text, shown))  # no page or test names such a path
    assert doctor.Finding("what", text).line() == f"what         {shown}"
    assert doctor.Finding("what", "", text).line() == f"what         FAULT: {shown}; "


def test_a_home_that_is_the_root_is_no_word(monkeypatch):
    monkeypatch.setenv("HOME", "/")
    assert doctor.without_home("a/b /c") == "a/b /c"


def test_all_implementations_are_listed():
    from offline import MODULES
    found = {v for m in MODULES for v in vars(m).values() if isinstance(v, Implementation)}
    assert found == set(doctor.implementations()) and all(i.what.isascii() and i.otherwise.isascii() for i in found)


PLANTED = {"triton": "raise RuntimeError('a Triton that raises')", "cupy": "raise OSError('a CuPy that raises')"}


@pytest.fixture
def elsewhere(tmp_path):
    "Run Python where no GPU is seen, and Triton and CuPy raise as they are imported"
    for name, text in PLANTED.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    env = {k: v for k, v in os.environ.items() if not k.endswith("_CACHE_DIR")} | {"CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path / "home"), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    return lambda *args: subprocess.run([sys.executable, "-W", "error", *args], cwd=tmp_path, env=env, capture_output=True, text=True)


def test_no_gpu_and_broken_packages_that_nothing_needs(elsewhere):
    done = elsewhere("-m", "fusedloss", "doctor")
    said = lines(done.stdout)
    assert (done.returncode, done.stderr) == (0, "") and said["verdict"] == WORKS
    assert said["GPU"] == "none of NVIDIA or AMD; PyTorch takes the place of all kernels"
    assert said["Triton"].endswith("is not imported, RuntimeError('a Triton that raises'), and not needed without a GPU")
    assert said["CuPy"].endswith("is not imported, OSError('a CuPy that raises'), and not needed without a GPU of NVIDIA")
    assert (said["taken"], said["passed over"]) == ("no kernel", "no GPU: all") and "~/.triton/fusedloss not made yet" in said["caches"]


def test_a_loss_runs_where_triton_raises(elsewhere):
    done = elsewhere("-c", "import torch, fusedloss as fl\nfl.cross_entropy(torch.randn(3, 9, requires_grad=True), torch.arange(3)).backward()")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_triton_that_raises_is_named(elsewhere):
    done = elsewhere("-c", "import warnings; from fusedloss.core import triton as t\nwith warnings.catch_warnings(record=True) as w: print(warnings.simplefilter('always') or t.triton_works(), t.triton_works(), *[x.message for x in w])")
    assert done.stdout == "False False Triton does not work here, and PyTorch takes its place: RuntimeError('a Triton that raises')\n"


def test_nothing_heavy_is_imported_before_it_must(elsewhere):
    code = "import sys, fusedloss.__main__, fusedloss.doctor\nprint(sorted({'triton', 'cupy', 'fusedloss.plans', 'fusedloss.core.tuning'} & {*sys.modules}))"
    assert elsewhere("-c", code).stdout == "[]\n"


def test_help_says_what_the_exit_code_means(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "Exit code 0 if everything that this machine could use works; 1 if something is broken" in " ".join(capsys.readouterr().out.split())
