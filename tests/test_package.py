"""What is installed: wheel and editable, metadata, and an import that asks for nothing."""
import ast
import re
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import fusedloss
import pytest
import torch

from fusedloss.core.versions import OLDEST
from project import ROOT, copy_tree, project_files

PROBE = "// a probe\n"
SDIST = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
IMPORT = """
import os, sys
sys.path.append('tests')
from hidden_modules import hide
hide({'triton', 'cupy', 'tqdm', 'matplotlib', 'IPython', 'fastcore', 'nbdev', 'transformers', 'peft', 'accelerate', 'trl'})
import torch
hide({'fcntl', 'grp', 'pwd', 'resource', 'termios'})  # Windows has none of them
before = dict(os.environ)
import fusedloss
assert dict(os.environ) == before, 'the environment changed'
assert not torch.cuda.is_initialized(), 'CUDA was touched'
assert 'torch._dynamo' not in sys.modules or torch.__version__.startswith('2.8.'), 'a second and more for the compiler'
assert fusedloss.linear_cross_entropy, 'the package requires more than torch'
assert fusedloss.integrations.transformers.patch and fusedloss.integrations.trl.patch, 'an adapter imports its framework'
print(fusedloss.__version__)
"""

LAZY = """
import pickle, sys, torch
before = {name.partition('.')[0] for name in sys.modules}
import fusedloss as fl
loaded = {name.partition('.')[0] for name in sys.modules} - before
assert not loaded & {'triton', 'transformers', 'matplotlib', 'scipy', 'cupy', 'IPython'}, loaded
assert not [name for name in sys.modules if name.startswith('fusedloss.') and not name.startswith(('fusedloss.core', 'fusedloss._'))]
# names that are fetched for the first time while they are traced
graphs = []
def count(graph, inputs):
    graphs.append(graph)
    return graph.forward
def loss(z, x, w, y): return fl.cross_entropy(z, y) + fl.margin_cross_entropy(x, w, y, margin=fl.margins.CosFace())
z, x, w, y = torch.randn(3, 16), torch.randn(3, 4), torch.randn(16, 4), torch.arange(3)
compiled = torch.compile(loss, fullgraph=True, backend=count)
first, second, plain = compiled(z, x, w, y), compiled(z, x, w, y), loss(z, x, w, y)
torch.testing.assert_close([first, second], [plain, plain])
assert len(graphs) == 1, len(graphs)
# by any name
assert {*fl.__all__, 'integrations', '__version__'} <= {*dir(fl)} and not hasattr(fl, '__wrapped__')
for typed, meant in dict(linear_cross_entrpy='linear_cross_entropy', PartialFc='PartialFC', margin='margins', viterby='viterbi').items():
    try: getattr(fl, typed)
    except AttributeError as error: assert str(error) == f"module 'fusedloss' has no attribute '{typed}'; did you mean {meant}?", error
    else: assert False, typed
assert not hasattr(torch.ops.fusedloss, 'no_such_operator') and hasattr(torch.ops.fusedloss, 'recompute_loss')
import fusedloss.margins, fusedloss.core.options
from fusedloss import PartialFC, losses
assert fl.margins is fusedloss.margins and fl.PartialFC is PartialFC is vars(fl)['PartialFC'] and fl.partial_fc.PartialFC is PartialFC
assert fl.losses.linear_cross_entropy is losses.linear_cross_entropy is fl.linear_cross_entropy
head = pickle.loads(pickle.dumps(PartialFC(9, 4, margin=fl.margins.ArcFace())))
assert type(head) is fl.PartialFC
names = {}
exec('from fusedloss import *', names)
assert {*names} - {'__builtins__'} == {*fl.__all__}
print('done')
"""
EXPORTED = """
import sys, torch, fusedloss
x, w, y = torch.load(sys.argv[1] + ".pt")
print(torch.export.load(sys.argv[1]).module()(x, w, y).item())
"""


def pip(*args: str, cwd: Path) -> None:
    "Run pip without an index and without build isolation"
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", *args, *offline], cwd=cwd, check=True)


def python(code: str, *flags: str, **kwargs) -> str:
    "What a fresh Python prints"
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def settings() -> dict:
    config = ConfigParser(delimiters="=")
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(config["DEFAULT"])


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    "A copy of the project with one more kernel and one more subpackage"
    if not shutil.which("git"):
        pytest.skip("no git on this machine")
    copy = tmp_path_factory.mktemp("a folder") / "copy"
    copy_tree(copy)
    (copy / "cuda" / "probe.cu").write_text(PROBE, encoding="utf-8")
    (copy / "fusedloss" / "planted").mkdir()
    (copy / "fusedloss" / "planted" / "__init__.py").write_text("from fusedloss.planted.part import found\n", encoding="utf-8")
    (copy / "fusedloss" / "planted" / "part.py").write_text("found = True\n", encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def wheel(source) -> zipfile.ZipFile:
    pip("wheel", ".", "--wheel-dir", "wheels", cwd=source)
    return zipfile.ZipFile(next((source / "wheels").glob("*.whl")))


@pytest.fixture(scope="module")
def unpacked(source) -> Path:
    "The source distribution of the copy, unpacked"
    python(SDIST, cwd=source)
    archive = next((source / "dist").glob("*.tar.gz"))
    shutil.unpack_archive(archive, source / "dist", filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


def imported(module: str, files: dict[str, str]) -> set[str]:
    "The modules among `files` that one of them imports, anywhere in it, and the packages that they are in"
    names = set()
    for node in ast.walk(ast.parse(files[module])):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {".".join(parts[:n]) for parts in (name.split(".") for name in names) for n in range(1, len(parts) + 1)} & files.keys()


def contents(wheel: zipfile.ZipFile) -> dict[str, bytes]:
    "The files of a wheel"
    return {name: wheel.read(name) for name in wheel.namelist()}


def test_wheel_holds_modules_and_kernels(source, wheel):
    "And neither the workbook nor the index of what notebooks export"
    expected = {p.relative_to(source).as_posix() for p in (source / "fusedloss").rglob("*")
                if p.suffix in {".py", ".pyi"} and p.name != "_modidx.py" or p.name == "py.typed"}
    expected |= {f"fusedloss/cuda/{p.name}" for p in (source / "cuda").iterdir() if p.suffix in {".cu", ".cuh", ".py"}}
    assert {f"fusedloss/{name}" for name in ("cuda/probe.cu", "planted/part.py", "py.typed", "__init__.pyi")} < expected
    assert expected == {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_every_module_of_the_wheel_is_reached(wheel):
    "By `import fusedloss`, its public functions, an integration or the command: imports inside functions count"
    files = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): wheel.read(name).decode()
             for name in wheel.namelist() if name.endswith(".py") and "planted" not in name}
    public = {f"fusedloss.{name}" for name in (*fusedloss._NAMES, *fusedloss._SPACES, "__main__", "integrations.transformers", "integrations.trl")}
    reached, waiting = set(), {"fusedloss", *public}
    while waiting:
        module = waiting.pop()
        reached.add(module)
        waiting |= imported(module, files) - reached
    assert reached == files.keys()


def test_modules_need_nothing_that_is_not_required(wheel, settings):
    "What a module imports before anything is asked of it comes with Python, or is a requirement"
    required = {re.match(r"\w+", line)[0] for line in settings["requirements"].split()}
    needed = {}
    for name in (name for name in wheel.namelist() if name.endswith(".py")):
        for node in ast.parse(wheel.read(name)).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) else []
            needed |= {module.partition(".")[0]: name for module in modules}
    assert {"torch", "numpy", "functools"} <= needed.keys()
    assert {module: name for module, name in needed.items() if module not in {"fusedloss", *required, *sys.stdlib_module_names}} == {}


@pytest.mark.thorough
def test_source_distribution_makes_the_same_wheel(unpacked, wheel):
    pip("wheel", ".", "--wheel-dir", "wheels", cwd=unpacked)
    assert contents(zipfile.ZipFile(next((unpacked / "wheels").glob("*.whl")))) == contents(wheel)


@pytest.mark.thorough
def test_source_distribution_holds_the_sources(source, unpacked):
    folders = ("cuda", "examples", "fusedloss", "nbs", "tests", "tools", "workbook")
    tracked = {p.relative_to(source) for p in project_files(source) if p.relative_to(source).parts[0] in folders}
    expected = tracked | {p.relative_to(source) for pattern in ("*.md", "*.ini", "*.cff", "*.toml", "*.txt", "setup.py", "Makefile", "LICENSE")
                          for p in source.glob(pattern)}
    assert {Path("settings.ini"), Path("CITATION.cff"), Path("tests/ctc_on_cpu.cpp"), Path("nbs/20_ctc.ipynb")} < expected
    assert sorted(path for path in expected if not (unpacked / path).is_file()) == []


@pytest.mark.thorough
def test_installed_wheel_needs_no_checkout(source, wheel, tmp_path):
    pip("install", wheel.filename, "--target", str(tmp_path / "site"), cwd=source)
    (tmp_path / "empty").mkdir()
    code = (f"import runpy, sys; sys.path[:0] = [{str(tmp_path / 'site')!r}]; sys.path += {[p for p in sys.path if p.endswith('-packages')]}\n"
            "import fusedloss.core.cuda, fusedloss.planted\n"
            f"runpy.run_path({str(ROOT / 'tools' / 'smoke.py')!r}, run_name='__main__')\n"
            "print(fusedloss.core.cuda.cuda_source('ctc'), end='')")
    said, _, text = python(code, "-S", cwd=tmp_path / "empty").partition("\n")
    assert Path(said.split(" from ")[1]).parent == tmp_path / "site" / "fusedloss"
    ctc, common = ((source / "cuda" / name).read_text(encoding="utf-8") for name in ("ctc.cu", "common.cuh"))
    assert text == ctc.replace('#include "common.cuh"\n', common).strip() != ctc.strip()


def test_wheel_metadata_is_settings(wheel, settings):
    info = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    meta = Parser().parsestr(wheel.read(info).decode())
    assert [meta[key] for key in ("Name", "Version", "Summary")] == [settings[key] for key in ("lib_name", "version", "description")]
    assert meta["Requires-Python"] == f">={settings['min_python']}"
    plain = {line for line in meta.get_all("Requires-Dist") if "extra ==" not in line}
    assert plain == set(settings["requirements"].split())
    versions = settings["python_versions"].split()
    assert versions[0] == settings["min_python"] and {f"Programming Language :: Python :: {v}" for v in versions} < set(meta.get_all("Classifier"))
    assert set(meta.get_all("Provides-Extra")) == {"dev", "cuda12", "cuda13"}
    assert any(name.endswith("LICENSE") for name in wheel.namelist())
    assert wheel.read(info.replace("METADATA", "top_level.txt")).split() == [b"fusedloss"]


def test_an_old_torch_is_refused_in_a_sentence(settings):
    code = "import torch; torch.__version__ = '2.7.1+cpu'\ntry: import fusedloss\nexcept ImportError as error: print(error)"
    oldest = ".".join(map(str, OLDEST))
    assert f"torch>={oldest}" in settings["requirements"].split()
    assert python(code, cwd=ROOT) == f"fusedloss: expected PyTorch {oldest} or later, got 2.7.1+cpu: pip install --upgrade torch"


def test_papers_about_the_project_agree_with_its_settings(settings):
    citation, versions = ((ROOT / name).read_text(encoding="utf-8") for name in ("CITATION.cff", "VERSIONS.md"))
    cited = dict(re.findall(r"(?m)^([\w-]+): (.+)$", citation))
    assert (cited["title"], cited["version"]) == (settings["title"].replace("%(lib_name)s", settings["lib_name"]), settings["version"])
    assert cited["repository-code"] == settings["git_url"].replace("%(user)s", settings["user"]).replace("%(repo)s", settings["repo"])
    assert settings["description"] in citation
    first, *_, last = settings["python_versions"].split()
    assert f"| Python | {first} to {last} |" in versions and f"| PyTorch | {'.'.join(map(str, OLDEST))} or later |" in versions


def test_workflow_runs_every_version(settings):
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    tested = re.search(r'python-version: "(.*)"', text)[1]
    later, smoke = (re.findall(r"\d\.\d+", versions) for versions in re.findall(r"python-version: \[(.*)\]", text))
    versions = settings["python_versions"].split()
    assert [tested, *later] == versions and smoke == [versions[0], versions[-1]]


@pytest.mark.thorough
def test_editable_install_finds_kernels_and_the_workbook(source, tmp_path):
    pip("install", "--editable", ".", "--target", str(tmp_path), cwd=source)
    # -S -E: this tree may be installed in editable mode or named by PYTHONPATH itself, and would be found first
    code = (f"import site, sys; sys.path += {[p for p in sys.path if p.endswith('-packages')]}; site.addsitedir({str(tmp_path)!r}); "
            "import fusedloss, workbook.puzzles, workbook.tour; from fusedloss.core.cuda import cuda_source; "
            "print(fusedloss.__file__); print(workbook.tour.__file__); print(cuda_source('probe'))")
    package, tour, text = python(code, "-S", "-E", cwd=tmp_path).splitlines()
    assert Path(package).parent == source / "fusedloss" and Path(tour).parent == source / "workbook" and text == PROBE.strip()


def test_import_needs_torch_alone(settings):
    assert python(IMPORT, cwd=ROOT) == settings["version"]


def test_import_loads_no_framework_and_every_name_is_there():
    "And may be fetched while it is traced"
    assert python(LAZY, cwd=ROOT) == "done"


def test_an_exported_program_finds_its_operators(tmp_path):
    "In a process that imports the package and calls none of its functions"
    given, path = (torch.randn(3, 4), torch.randn(9, 4), torch.arange(3)), tmp_path / "loss.pt2"

    class Loss(torch.nn.Module):
        def forward(self, x, w, y):
            return fusedloss.linear_cross_entropy(x, w, y, method="recompute")
    torch.export.save(torch.export.export(Loss(), given), path)
    torch.save(given, f"{path}.pt")
    assert float(python(EXPORTED.replace("sys.argv[1]", repr(str(path))), cwd=ROOT)) == pytest.approx(Loss()(*given).item(), rel=1e-5)
