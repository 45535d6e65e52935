"""Run the notebooks in place on the GPU at hand and save their outputs.

    python tools/run_notebooks.py [--flags "cuda slow"] [NOTEBOOK ...]

One process and one run a notebook; a notebook that fails is left as it was.
"""
import argparse
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from workbook import MACHINE_PATH, METADATA_KEY, ROOT, code_hash, is_stage, notebook_from, notebooks, output_text


def skips(cell, flags: set[str], skip_flags: set[str]) -> bool:
    "Is this cell prose, switched off by `eval: false`, or of a kind that was not asked for?"
    found = cell.get("directives_") or {}
    off = found.get("eval:", [""])[0].lower() == "false"
    return cell.cell_type != "code" or off or bool((skip_flags - flags) & found.keys())


def execute(nb, path: Path, flags: set[str]) -> None:
    "Run the cells of `nb` in order, as `nbdev_test` does, and keep what each one shows"
    from execnb.shell import CaptureShell
    from fastcore.xtras import working_directory
    from nbdev.config import get_config

    shell, skip_flags = CaptureShell(path, mpl_format="svg"), set(get_config(path=ROOT).tst_flags.split())
    with working_directory(path.parent):
        for number, cell in enumerate(nb.cells):
            if skips(cell, flags, skip_flags):
                continue
            cell.outputs, started = [], time.perf_counter()
            shell.cell(cell)
            print(f"  cell {number}/{len(nb.cells) - 1}  {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
            if shell.exc:
                raise RuntimeError(f"{path.name}: cell {number} failed\n{shell.prettytb(path.name)}") from shell.exc


def drop_stderr(nb) -> None:
    "Progress bars and warnings go to the terminal, not into the page"
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                print("".join(output.text), file=sys.stderr)
        if "outputs" in cell:
            cell["outputs"] = [o for o in cell.outputs if o.get("name") != "stderr"]


def lean(html: str) -> str:
    "The same drawings in fewer bytes: white space and defaults go, paths are in hundredths of a point"
    number = lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip(".")
    path = lambda found: re.sub(r"-?\d+\.\d{3,}", number, found[0].replace("\n", ""))
    style = lambda found: re.sub(r"([:;]) ", r"\1", found[0]).replace("stroke-dashoffset:0;", "")
    def drawing(found: re.Match) -> str:
        svg = re.sub(r">\s+<", "><", found[0])
        return re.sub(r'(?<= style=")[^"]*', style, re.sub(r'(?<= d=")[^"]*', path, svg))
    return re.sub(r"<svg.*?</svg>", drawing, html, flags=re.DOTALL)


def thin_drawings(nb) -> None:
    "Drawings as small as they may be"
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            if html := output.get("data", {}).get("text/html"):
                output["data"]["text/html"] = lean("".join(html)).splitlines(keepends=True)


def refuse_paths(nb, path: Path) -> None:
    "A page that names the machine's folders is not saved"
    for number, cell in enumerate(nb.cells):
        for output in cell.get("outputs", []):
            if found := MACHINE_PATH.search(output_text(output)):
                raise RuntimeError(f"{path.name}: cell {number} shows the machine's path {found[0]}; not saved")


def machine() -> str:
    "The line that names the machine and the versions"
    import torch
    from fusedloss.measure import machine_line

    return machine_line("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def fresh_results(path: Path):
    "Begin with no records of this notebook; a run that fails puts the old ones back"
    results = path.parent / "results" / f"{path.stem}.json"
    before = results.read_bytes() if results.exists() else None
    results.unlink(missing_ok=True)
    try:
        yield
    except BaseException:
        results.unlink(missing_ok=True)
        if before is not None:
            results.write_bytes(before)
        raise


def run_here(path: Path, flags: set[str]) -> None:
    "Run one notebook in this process and save it in one step"
    from execnb.nbio import nb2str
    from nbdev.clean import clean_nb
    from nbdev.process import NBProcessor

    sys.path.insert(0, str(ROOT))
    nb = NBProcessor(path, rm_directives=False).nb
    with fresh_results(path):
        execute(nb, path, flags)
        drop_stderr(nb)
        thin_drawings(nb)
        refuse_paths(nb, path)
    clean_nb(nb, allowed_metadata_keys=[METADATA_KEY])
    nb.metadata[METADATA_KEY] = {"code": code_hash(notebook_from(nb2str(nb))), "machine": machine()}
    draft = path.with_suffix(".tmp")
    draft.write_text(nb2str(nb), encoding="utf-8")
    os.replace(draft, path)


def running_order(path: Path) -> tuple[bool, bool]:
    "The stages measure; the others, and the home page last of all, show what was measured"
    return not is_stage(path), path.name == "index.ipynb"


def run_all(paths: list[Path], flags: str) -> int:
    "A fresh process for each notebook; the exit code is the number that failed"
    failed = []
    for path in paths:
        print(f"{path.name} ...", flush=True)
        started = time.perf_counter()
        code = subprocess.run([sys.executable, __file__, "--here", "--flags", flags, str(path)], cwd=ROOT).returncode
        failed += [path.name] * bool(code)
        print(f"{path.name} {'FAILED' if code else 'ok'} after {time.perf_counter() - started:.0f} s", flush=True)
    print(f"{len(paths) - len(failed)} of {len(paths)} notebooks saved" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return len(failed)


def main() -> int:
    "Read the command line and run"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all, the stages first")
    parser.add_argument("--flags", default="cuda slow", help="kinds of cells to run beside the plain ones")
    parser.add_argument("--here", action="store_true", help="run in this process (one notebook)")
    args = parser.parse_args()
    paths = [p.resolve() for p in args.notebooks] or sorted(notebooks(), key=running_order)
    if not args.here:
        return run_all(paths, args.flags)
    run_here(paths[0], set(args.flags.split()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
