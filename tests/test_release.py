"""A release: one version everywhere, notes of each, pages of the last one; what is built holds what it should and installs where there is nothing."""
import os
import re
import shutil
import subprocess
import sys
import venv
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import fusedloss
import pytest
import release
from packaging.requirements import Requirement
from project import ROOT, SETTINGS, copy_tree

BUILD = "from setuptools.build_meta import {0}; {0}('dist')"
CHANGES = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- a loss\n\n## [0.1.0] - 2026-01-31\n\n- the first\n"


@pytest.fixture
def tree(tmp_path) -> Path:
    "A small tree that could be released but for the name of its notes"
    files = {"settings.ini": "[DEFAULT]\nlib_version = 9\nversion = 0.2.0\n", "fusedloss/__init__.py": '"A loss."\n__version__ = "0.2.0"\n', "CITATION.cff": "cff-version: 1.2.0\nversion: 0.2.0\n",
             "docs/index.html": '<div class="nav-footer-left">fusedloss 0.2.0</div>', "docs/reference.html": 'https://example.org/blob/v0.2.0/a.py', "CHANGELOG.md": CHANGES}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    git(tmp_path, "init", "--quiet")
    return tmp_path


def git(root: Path, *args: str) -> None:
    if not shutil.which("git"):
        pytest.skip("no git on this machine")
    subprocess.run(["git", "-C", root, "-c", "user.name=a", "-c", "user.email=a@b.c", *args], check=True)


def commit(root: Path, *tags: str) -> None:
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "a change")
    for tag in tags:
        git(root, "tag", tag)


def test_every_place_has_the_version_of_settings():
    version = SETTINGS["DEFAULT"]["version"]
    assert release.versions(ROOT, release.WRITTEN) == dict.fromkeys(release.WRITTEN, version) and fusedloss.__version__ == version
    assert release.VERSION.fullmatch(version) and not re.search(r"(?m)^version", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert release.notes(ROOT, version) or release.notes(ROOT, "Unreleased"), "what the next release brings is written as it is made"


def test_a_release_is_prepared(tree, monkeypatch):
    monkeypatch.setattr(release, "today", lambda: "2026-12-01")
    commit(tree)
    assert [*release.waits_for(tree, "v0.2.0")] == ["CHANGELOG.md: expected a section [0.2.0] with a date (python tools/release.py name), got none"]
    release.name_section(tree)
    assert [*release.waits_for(tree, "v0.2.0")] == ["a clean tree: M CHANGELOG.md"]
    commit(tree)
    assert [*release.waits_for(tree, "v0.2.0")] == [*release.waits_for(tree, "")] == []
    assert (tree / "CHANGELOG.md").read_text(encoding="utf-8") == CHANGES.replace("## [Unreleased]\n", "## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n")
    assert [release.notes(tree, version) for version in ("Unreleased", "0.2.0", "0.1.0", "0.3.0")] == ["", "### Added\n\n- a loss", "- the first", ""]
    with pytest.raises(SystemExit, match="has a section 0.2.0 already"):
        release.name_section(tree)
    release.set_version(tree, "0.3.0")
    with pytest.raises(SystemExit, match="expected notes below ## .Unreleased., got none"):
        release.name_section(tree)


@pytest.mark.parametrize("name, old, new, said", [
    ("fusedloss/__init__.py", "0.2.0", "0.1.0", "fusedloss/__init__.py: expected version 0.2.0, got 0.1.0"),
    ("CITATION.cff", "\nversion: 0.2.0", "", "CITATION.cff: expected version 0.2.0, got none"),
    ("docs/index.html", "0.2.0", "0.1.0", "docs/index.html: expected version 0.2.0, got 0.1.0"),
    ("docs/reference.html", "blob", "blob/v0.1.0/b.py https://example.org/blob", "docs/reference.html: expected version 0.2.0, got 0.1.0 0.2.0"),
    ("settings.ini", "0.2.0", "0.2.1", "the tag: expected v0.2.1, got v0.2.0"),
    ("CHANGELOG.md", "- a loss\n", "", "CHANGELOG.md: expected notes below [0.2.0], got none"),
    ("CHANGELOG.md", "2026-12-01", "soon", "CHANGELOG.md: expected a section [0.2.0] with a date (python tools/release.py name), got ## [0.2.0] - soon"),
])
def test_what_a_release_waits_for_is_named(name, old, new, said, tree):
    text = CHANGES.replace("## [Unreleased]\n\n### Added\n", "## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n")
    (tree / "CHANGELOG.md").write_text(text, encoding="utf-8")
    path = tree / name
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    commit(tree)
    assert said in release.waits_for(tree, "v0.2.0")


def test_a_version_is_written_in_every_place(tree):
    release.set_version(tree, "0.3.0.dev20270131")
    assert release.versions(tree, release.WRITTEN) == dict.fromkeys(release.WRITTEN, "0.3.0.dev20270131")
    assert (tree / "settings.ini").read_text(encoding="utf-8") == "[DEFAULT]\nlib_version = 9\nversion = 0.3.0.dev20270131\n"
    with pytest.raises(SystemExit, match="expected one such as 0.3.0, .* got v0.3"):
        release.set_version(tree, "v0.3")


def test_a_nightly_version_is_before_that_of_the_release(tree, monkeypatch):
    monkeypatch.setattr(release, "ROOT", tree)
    monkeypatch.setattr(release, "today", lambda: "2026-12-01")
    for _ in range(2):  # of a nightly version too
        assert release.main("nightly") == 0 and release.version_of(tree) == "0.2.0.dev20261201"


def test_the_site_keeps_the_pages_of_the_last_release(tree):
    page, out = tree / "docs" / "index.html", tree.with_name(f"{tree.name} out")
    for text, tags in {"old": ["v0.9.0"], "last": ["v0.10.0"], "candidate": ["v0.11.0rc1", "vnothing"], "main": []}.items():
        page.write_text(text, encoding="utf-8")
        commit(tree, *tags)
    for _ in range(2):
        release.write_site(tree, out)
    assert [(out / name).read_text(encoding="utf-8") for name in ("index.html", "stable/index.html")] == ["main", "last"]
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "reference.html", "stable"]
    git(tree, "tag", "--delete", "v0.9.0", "v0.10.0")
    release.write_site(tree, out)
    assert (out / "stable" / "index.html").read_text(encoding="utf-8") == "main", "before the first release"


def test_pages_lead_to_those_of_the_last_release_once_there_is_one(monkeypatch):
    build_site = pytest.importorskip("build_site", exc_type=ImportError)
    project = SimpleNamespace(website={"repo-url": "https://example.org/x"})
    for origin, link in (("repository", ""), ("index", f" · [last release]({build_site.address()}/stable/)")):
        monkeypatch.setitem(SETTINGS["DEFAULT"], "install_from", origin)
        assert build_site.footer(project)["left"] == f"fusedloss {fusedloss.__version__}{link}"


def test_workflow_publishes_what_was_built_and_tried_alone():
    "From a tag, by a short-lived identity; nothing on a schedule"
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    jobs = pytest.importorskip("yaml").safe_load(text)["jobs"]
    publish = jobs["publish"]
    assert {"build", "thorough", "install"} <= set(publish["needs"]) and publish["environment"]["name"] and "startsWith(github.ref, 'refs/tags/v')" in publish["if"]
    assert publish["permissions"] == {"id-token": "write"} and "secrets." not in text and "password" not in text
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish", "site"]
    assert {*jobs["install"]["strategy"]["matrix"]["os"]} == {"ubuntu-latest", "macos-latest", "windows-latest"}
    steps = [step.get("run", "") for step in jobs["build"]["steps"]]
    commands = [command for step in steps for command in re.findall(r"tools/release\.py (\w+)", step)]
    assert commands == ["check", "nightly", "notes"] and any("twine check --strict" in step for step in steps)


# --- what is built ---

@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    "The wheel and the source distribution, from a copy of the tree"
    copy = tmp_path_factory.mktemp("release") / "copy"
    copy_tree(copy)
    for kind in ("build_sdist", "build_wheel"):
        subprocess.run([sys.executable, "-c", BUILD.format(kind)], cwd=copy, check=True, capture_output=True)
    return {path.suffix: path for path in (copy / "dist").iterdir()}


@pytest.mark.thorough
def test_files_are_named_by_the_version_and_hold_licence_and_types(built):
    version = SETTINGS["DEFAULT"]["version"]
    assert {path.name for path in built.values()} == {f"fusedloss-{version}.tar.gz", f"fusedloss-{version}-py3-none-any.whl"}
    names = ZipFile(built[".whl"]).namelist()
    info = f"fusedloss-{version}.dist-info"
    assert {f"{info}/licenses/LICENSE", "fusedloss/py.typed", "fusedloss/__init__.pyi"} < {*names}
    assert {name.partition("/")[0] for name in names} == {"fusedloss", info}
    assert {f"fusedloss/cuda/{path.name}" for path in (ROOT / "cuda").glob("*.cu*")} < {*names}


@pytest.mark.thorough
def test_long_description_leads_out_of_the_index(built):
    "Each link is absolute, and files of the repository are there"
    wheel = ZipFile(built[".whl"])
    text = Parser().parsestr(wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA"))).decode()).get_payload()
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)", text)
    ours = f"{SETTINGS['DEFAULT']['git_url']}/"
    tag = f"/v{SETTINGS['DEFAULT']['version']}/"
    assert len(links) > 40 and [url for _, url in links if not url.startswith(("https://", "#"))] == []
    files = [(picture, url) for picture, url in links if tag in url]
    assert {url.split(tag)[0].removeprefix(ours) for picture, url in files if not picture} == {"blob"}
    assert {url.split(tag)[0].removeprefix(ours) for picture, url in files if picture} == {"raw"}
    assert [url for _, url in files if not (ROOT / url.split(tag)[1].partition("#")[0]).is_file()] == []


@pytest.mark.thorough
def test_metadata_is_what_an_index_takes(built):
    pytest.importorskip("twine")
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, built.values())], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def required_entries() -> set[Path]:
    "What lies in this environment's folder of packages and belongs to a requirement of the package, or to a requirement of one"
    waiting, found = [Requirement(line) for line in SETTINGS["DEFAULT"]["requirements"].split()], {}
    while waiting:
        asked = waiting.pop()
        if asked.name not in found and (not asked.marker or asked.marker.evaluate({"extra": ""})):
            found[asked.name] = distribution(asked.name)
            waiting += map(Requirement, found[asked.name].requires or ())
    tops = {Path(d.locate_file(file.parts[0])) for d in found.values() for file in d.files if file.parts[0] not in ("..", "__pycache__")}
    assert {"torch", "numpy"} <= {path.name for path in tops}
    return tops


@pytest.mark.thorough
def test_wheel_installs_where_there_is_nothing_and_its_losses_run(built, tmp_path):
    "In an environment that sees neither this tree nor an editable install of it, and of other packages only those that it requires"
    home, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    venv.create(home, with_pip=False)
    python = next(path for path in (home / "bin" / "python", home / "Scripts" / "python.exe") if path.exists())

    def run(*words: str) -> str:
        done = subprocess.run([python, "-I", *words], cwd=empty, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # pip would find this tree there, and install nothing
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", built[".whl"]], check=True, env=own)
    site = Path(run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for entry in required_entries():
        (site / entry.name).symlink_to(entry)
    assert run(str(ROOT / "tools" / "smoke.py")) == f"fusedloss {fusedloss.__version__} from {site / 'fusedloss' / '__init__.py'}\n"
    assert "eager" in run("-m", "fusedloss", "plan", "--tokens", "8192", "--classes", "128256", "--features", "4096", "--machine", "H200")
    assert run("-c", "from importlib.metadata import version; print(version('fusedloss'))").strip() == fusedloss.__version__
