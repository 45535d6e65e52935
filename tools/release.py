"""What a release needs: one version everywhere, notes, and the pages of the last release beside those of today.

    python tools/release.py version 0.3.0    write the version in every place
    python tools/release.py nightly          the same, with today's date behind it: 0.3.0.dev20270131
    python tools/release.py name             CHANGELOG.md's section Unreleased becomes that of the version, of today
    python tools/release.py check [TAG]      say what a release of this tree waits for; its tag is TAG, if given
    python tools/release.py notes [VERSION]  print the notes of a version, of this tree's if none is named
    python tools/release.py site OUT         write docs/ to OUT, and that of the last release to OUT/stable

Nothing here publishes. A tag v* does, by .github/workflows/release.yml.
"""
import io
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from project import ROOT

VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+|\.dev\d+)?")
RELEASE = re.compile(r"v\d+\.\d+\.\d+")  # the tag of one that is no candidate
WRITTEN = {"settings.ini": r"(?m)^version = (\S+)$", "fusedloss/__init__.py": r'(?m)^__version__ = "([^"]+)"$', "CITATION.cff": r"(?m)^version: (\S+)$"}
RENDERED = {"docs/index.html": r'nav-footer-left">fusedloss ([\w.]+)', "docs/reference.html": r"/blob/v([\w.]+)/"}  # by `make docs`
CHANGELOG, UNRELEASED = "CHANGELOG.md", "## [Unreleased]"


def today() -> str:
    "The date, in UTC"
    return datetime.now(timezone.utc).date().isoformat()


def read(root: Path, name: str) -> str:
    "The text of a file; none if it is not there"
    return (root / name).read_text(encoding="utf-8") if (root / name).is_file() else ""


def versions(root: Path, places: dict[str, str]) -> dict[str, str]:
    "By place: the version that it names, several if it names several"
    return {name: " ".join(sorted(set(re.findall(pattern, read(root, name))))) for name, pattern in places.items()}


def version_of(root: Path) -> str:
    "The version of a tree"
    return versions(root, WRITTEN)["settings.ini"]


def set_version(root: Path, version: str) -> None:
    "Write the version in every place"
    if not VERSION.fullmatch(version):
        raise SystemExit(f"version: expected one such as 0.3.0, 0.3.0rc1 or 0.3.0.dev20270131, got {version}")
    for name, pattern in WRITTEN.items():
        text = read(root, name)
        (begin, end), = (found.span(1) for found in re.finditer(pattern, text))
        (root / name).write_text(text[:begin] + version + text[end:], encoding="utf-8")


def heading(root: Path, version: str) -> str:
    "The line that begins a version's section of the changelog; none if there is no such section"
    found = re.search(rf"(?m)^## \[{re.escape(version)}\].*$", read(root, CHANGELOG))
    return found[0] if found else ""


def notes(root: Path, version: str) -> str:
    "A version's section of the changelog, without its heading; none if there is no such section"
    _, _, below = read(root, CHANGELOG).partition(f"{heading(root, version)}\n")
    return re.split(r"(?m)^## \[", below)[0].strip() if heading(root, version) else ""


def name_section(root: Path) -> None:
    "Give the section Unreleased the version's number and today's date, and begin a new one above it"
    text, version = read(root, CHANGELOG), version_of(root)
    if heading(root, version):
        raise SystemExit(f"{CHANGELOG}: has a section {version} already")
    if not notes(root, "Unreleased"):
        raise SystemExit(f"{CHANGELOG}: expected notes below {UNRELEASED}, got none")
    text = text.replace(UNRELEASED, f"{UNRELEASED}\n\n## [{version}] - {today()}", 1)
    (root / CHANGELOG).write_text(text, encoding="utf-8")


def git(root: Path, *args: str) -> bytes:
    "What git answers"
    return subprocess.run(["git", "-C", str(root), *args], check=True, stdout=subprocess.PIPE).stdout


def waits_for(root: Path, tag: str) -> Iterator[str]:
    "What a release of this tree waits for; its tag may be empty"
    version = version_of(root)
    if tag and tag != f"v{version}":
        yield f"the tag: expected v{version}, got {tag}"
    for name, found in versions(root, WRITTEN | RENDERED).items():
        if found != version:
            yield f"{name}: expected version {version}, got {found or 'none'}"
    for line in git(root, "status", "--porcelain").decode().splitlines():
        yield f"a clean tree: {line.strip()}"
    if not re.fullmatch(rf"## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", heading(root, version)):
        yield f"{CHANGELOG}: expected a section [{version}] with a date (python tools/release.py name), got {heading(root, version) or 'none'}"
    elif not notes(root, version):
        yield f"{CHANGELOG}: expected notes below [{version}], got none"


def last_release(root: Path) -> str:
    "The tag of the newest release; empty before the first"
    tags = git(root, "tag", "--list", "v*", "--sort=-version:refname").decode().split()
    return next(filter(RELEASE.fullmatch, tags), "")


def write_site(root: Path, out: Path) -> None:
    "The pages of this tree and, in stable/, those of the last release; before the first these are the same"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(root / "docs", out)
    with tarfile.open(fileobj=io.BytesIO(git(root, "archive", last_release(root) or "HEAD", "docs"))) as archive:
        archive.extractall(out / "archive", filter="data")
    (out / "archive" / "docs").rename(out / "stable")
    (out / "archive").rmdir()


def main(command: str = "", *args: str) -> int:
    "Do what the command says; 1 if a release waits for something"
    if command == "version" and args:
        set_version(ROOT, args[0])
    elif command == "nightly":
        set_version(ROOT, f"{version_of(ROOT).partition('.dev')[0]}.dev{today().replace('-', '')}")
    elif command == "name":
        name_section(ROOT)
    elif command == "check":
        found = [*waits_for(ROOT, *args or [""])]
        print("\n".join(found) or f"{version_of(ROOT)} can be released.")
        return bool(found)
    elif command == "notes":
        print(notes(ROOT, *args or [version_of(ROOT)]))
    elif command == "site" and args:
        write_site(ROOT, Path(args[0]))
    else:
        raise SystemExit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
