"""A saved output and a record name the commit of the code that made them."""

import subprocess
from pathlib import Path


STAMP = ".commit"
CODE = [
    f":(top)*.{suffix}" for suffix in ("py", "cu", "cuh")
]  # a changed notebook changes the module that it is exported to


def git_text(folder: Path, *args: str) -> str:
    "What a git command prints in `folder`; empty if it fails or there is no git."
    command = ["git", "--no-optional-locks", "-C", str(folder), *args]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit(
    folder: str | Path = ".",  # inside the project
) -> str:  # "unknown" if there is neither a history nor a stamp
    "The short hash of the commit of the code around `folder`; a + after it says that code has changed since."
    folder = Path(folder).resolve()
    root = next((p for p in (folder, *folder.parents) if (p / ".git").exists() or (p / STAMP).is_file()), None)
    if root is None:
        return "unknown"
    if (root / ".git").exists() and (head := git_text(root, "rev-parse", "--short=10", "HEAD")):
        return head + "+" * bool(git_text(root, "status", "--porcelain", "--", *CODE))
    return (root / STAMP).read_text(encoding="utf-8").strip() if (root / STAMP).is_file() else "unknown"
