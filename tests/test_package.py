"""What is installed: wheel and editable, metadata, and an import that asks for nothing."""
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import pytest

from workbook import ROOT, copy_tree

PROBE = "// a probe\n"
IMPORT = """
import os, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {'triton', 'cupy', 'matplotlib', 'IPython', 'fastcore', 'nbdev'}: raise ImportError(name)
sys.meta_path.insert(0, Absent())
before = dict(os.environ)
import fusedloss, torch
assert dict(os.environ) == before, 'the environment changed'
assert not torch.cuda.is_initialized(), 'CUDA was touched'
print(fusedloss.__version__)
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
    "A copy of the project with one more kernel"
    copy = tmp_path_factory.mktemp("a folder") / "copy"
    copy_tree(copy)
    (copy / "cuda" / "probe.cu").write_text(PROBE, encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def wheel(source) -> zipfile.ZipFile:
    pip("wheel", ".", "--wheel-dir", "wheels", cwd=source)
    return zipfile.ZipFile(next((source / "wheels").glob("*.whl")))


def test_wheel_holds_modules_and_kernels(source, wheel):
    expected = {p.relative_to(source).as_posix() for p in (source / "fusedloss").rglob("*.py")}
    expected |= {f"fusedloss/cuda/{p.name}" for p in (source / "cuda").iterdir() if p.suffix in {".cu", ".py"}}
    assert "fusedloss/cuda/probe.cu" in expected
    assert expected == {name for name in wheel.namelist() if name.startswith("fusedloss/")}


def test_wheel_metadata_is_settings(wheel, settings):
    info = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    meta = Parser().parsestr(wheel.read(info).decode())
    assert [meta[key] for key in ("Name", "Version", "Summary")] == [settings[key] for key in ("lib_name", "version", "description")]
    assert meta["Requires-Python"] == f">={settings['min_python']}"
    plain = {line for line in meta.get_all("Requires-Dist") if "extra ==" not in line}
    assert plain == set(settings["requirements"].split())
    assert set(meta.get_all("Provides-Extra")) == {"dev", "cuda12", "cuda13"}
    assert any(name.endswith("LICENSE") for name in wheel.namelist())
    scripts = wheel.read(info.replace("METADATA", "entry_points.txt")).decode().replace(" ", "")
    assert settings["console_scripts"] in scripts


def test_editable_install_finds_kernels(source, tmp_path):
    pip("install", "--editable", ".", "--target", str(tmp_path), cwd=source)
    # -S -E: this tree may be installed in editable mode or named by PYTHONPATH itself, and would be found first
    code = (f"import site, sys; sys.path += {[p for p in sys.path if p.endswith('-packages')]}; site.addsitedir({str(tmp_path)!r}); "
            "import fusedloss; from fusedloss.core.cuda import cuda_source; "
            "print(fusedloss.__file__); print(cuda_source('probe'))")
    found, text = python(code, "-S", "-E", cwd=tmp_path).splitlines()
    assert Path(found).parent == source / "fusedloss" and text == PROBE.strip()


def test_import_needs_torch_alone(settings):
    assert python(IMPORT, cwd=ROOT) == settings["version"]
