"""Run the notebooks in place on the GPUs at hand and save their outputs.

    python tools/run_notebooks.py [--jobs N] [--limit SECONDS] [--flags "cuda slow distributed"] [NOTEBOOK ...]

One process and one run a notebook; a notebook that fails or takes too long is left as it was, and so are its records.
With the outputs the machine, the date and the commit are saved. With `--jobs`, notebooks run side by side, each on a GPU of its own; one that reads
the records of others waits for them, and one with `#| distributed` cells has all GPUs for itself.
"""
import argparse
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

from project import FOLDED_KEY, MACHINE_PATH, METADATA_KEY, ROOT, directives, is_stage, notebooks, output_text, read_notebook


def skips(cell, flags: set[str], skip_flags: set[str]) -> bool:
    "Is this cell prose, switched off by `eval: false`, or of a kind that was not asked for?"
    found = cell.get("directives_") or {}
    off = found.get("eval:", [""])[0].lower() == "false"
    return cell.cell_type != "code" or off or bool((skip_flags - flags) & found.keys())


def shows_records(numbered: tuple) -> bool:
    "Is this a cell `#| shows-records`, which stands above the measurements whose records it shows?"
    return "shows-records" in (numbered[1].get("directives_") or {})


def execute(nb, path: Path, flags: set[str]) -> None:
    "Run the cells of `nb` in order, as `nbdev_test` does, but those that show records last, and keep what each one shows"
    from execnb.shell import CaptureShell
    from fastcore.xtras import working_directory
    from nbdev.config import get_config

    shell, skip_flags = CaptureShell(path, mpl_format="svg"), set(get_config(path=ROOT).tst_flags.split())
    with working_directory(path.parent):
        for number, cell in sorted(enumerate(nb.cells), key=shows_records):
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
    from workbook.records import machine_line

    return machine_line("cuda" if torch.cuda.is_available() else "cpu")


class Records:
    "A notebook's records as they are now, to be put back if its run does not end well"

    def __init__(self, path: Path):
        self.path = path.parent / "results" / f"{path.stem}.json"
        self.before = self.path.read_bytes() if self.path.exists() else None

    def put_back(self) -> None:
        "Undo what the run wrote"
        self.path.unlink(missing_ok=True)
        if self.before is not None:
            self.path.write_bytes(self.before)


@contextmanager
def kept_results(path: Path):
    "The records of a notebook; a run that fails puts them back"
    records = Records(path)
    try:
        yield records
    except BaseException:
        records.put_back()
        raise


def made_now(nb, flags: set[str], earlier: dict, commit: str) -> dict:
    "Where this run's outputs were made: those of plain cells, and of cells for a GPU if it ran them, else as `earlier`"
    from workbook.pages import needs_gpu

    made = {"machine": machine(), "date": datetime.now(timezone.utc).date().isoformat(), "commit": commit}
    if not {"cuda", "distributed"} & flags:
        return earlier | {"page": made}
    left = {"cuda", "distributed"} - flags
    ran = [cell.id for cell in nb.cells if cell.cell_type == "code" and needs_gpu(cell.source) and not left & directives(cell.source)]
    return {"page": made} | ({"gpu": made | {"cells": ran}} if ran else {})


def run_here(path: Path, flags: set[str]) -> None:
    "Run one notebook in this process and save it in one step"
    from execnb.nbio import nb2str
    from nbdev.clean import clean_nb
    from nbdev.process import NBProcessor

    sys.path.insert(0, str(ROOT))
    from workbook.sources import commit

    made_from = commit(path.parent)
    nb = NBProcessor(path, rm_directives=False).nb
    with kept_results(path) as records:
        if "cuda" in flags:
            records.path.unlink(missing_ok=True)  # those of a GPU stay where its cells are left out
        execute(nb, path, flags)
        drop_stderr(nb)
        thin_drawings(nb)
        refuse_paths(nb, path)
    clean_nb(nb, allowed_metadata_keys=[METADATA_KEY], allowed_cell_metadata_keys=[FOLDED_KEY])
    nb.metadata[METADATA_KEY] = made_now(nb, flags, nb.metadata.get(METADATA_KEY, {}), made_from)
    draft = path.with_suffix(".tmp")
    draft.write_text(nb2str(nb), encoding="utf-8")
    os.replace(draft, path)


def running_order(path: Path) -> tuple[int, Path]:
    "The stages measure; pages that show what was measured come last"
    return (0 if is_stage(path) else 2 if path.stem in ("tour", "index", "benchmarks") else 1), path


def is_distributed(path: Path) -> bool:
    "Does the page have cells for several GPUs?"
    return any("distributed" in directives(cell["source"]) for cell in read_notebook(path)["cells"] if cell["cell_type"] == "code")


def reads_of(path: Path, paths: list[Path]) -> set[Path]:
    "The pages of `paths` whose records this one shows: those it names, all earlier stages, or for the last pages all"
    if running_order(path)[0] == 2:
        return {other for other in paths if running_order(other)[0] < 2}
    code = "\n".join(cell["source"] for cell in read_notebook(path)["cells"] if cell["cell_type"] == "code")
    named = {other for other in paths if is_stage(other) and other != path and f"results/{other.stem}.json" in code}
    everything = re.search(r"load_results\([\"']results[\"']\)", code)
    return named | {other for other in paths if everything and is_stage(other) and running_order(other) < running_order(path)}


def waits_for(paths: list[Path], alone: set[Path]) -> dict[Path, set[Path]]:
    "For each page the pages to run before it; a page that is to be alone waits for all that do not wait for it"
    needs = {path: reads_of(path, paths) for path in paths}

    def after(path: Path) -> set[Path]:
        return needs[path].union(*map(after, needs[path]))

    for path in sorted(alone):
        needs[path] |= {other for other in paths if other != path and path not in after(other)}
    return needs


def gpus() -> list[str]:
    "The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them"
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def environment(devices: list[str], jobs: int) -> dict[str, str]:
    "What a page's process finds: its GPUs, and its share of the cores"
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // jobs))
    found = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {"TRITON_INTERPRET": "1"}
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # of programs that a page starts
    return os.environ | {"OMP_NUM_THREADS": threads} | found


class Run:
    "One page in a process of its own."

    def __init__(self, path: Path, flags: str, slot: int, env: dict[str, str], command: list[str]):
        self.path, self.slot, self.started = path, slot, time.perf_counter()
        self.records = Records(path)
        self.process = subprocess.Popen([*command, "--flags", flags, str(path)], cwd=ROOT, env=env, start_new_session=True)

    def seconds(self) -> float:
        "Since it began"
        return time.perf_counter() - self.started

    def stop(self) -> None:
        "End the page's process and all that it started"
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def outcome(self, limit: float) -> str:
        "How it ended; empty while it runs. A page that did not end well has the records that it had."
        code = self.process.poll()
        if code is None and self.seconds() < limit:
            return ""
        if code is None:
            self.stop()
        if code != 0:
            self.records.put_back()
        return {0: "ok", None: f"stopped at its limit of {limit:.0f} s,"}.get(code, "FAILED")


HERE = [sys.executable, __file__, "--here"]


def run_all(paths: list[Path], flags: str, jobs: int = 1, limit: float = float("inf"), command: list[str] = HERE) -> int:
    "A fresh process for each notebook, `jobs` at a time; the exit code is the number that failed"
    waiting, running, failed, devices = sorted(paths, key=running_order), [], [], gpus()
    alone = {path for path in paths if jobs > 1 and is_distributed(path)}
    needs = waits_for(paths, alone)
    try:
        while waiting or running:
            busy = {*waiting, *(run.path for run in running)}
            slots = sorted(set(range(jobs)) - {run.slot for run in running})
            ready = [path for path in waiting if not needs[path] & busy]
            if not ready and not running:
                ready = waiting[:1]  # of pages that read each other's records the first begins
            for path in ready[:len(slots)]:
                waiting.remove(path)
                slot = slots.pop(0)
                mine = devices if jobs == 1 or path in alone else devices[slot % max(1, len(devices)):][:1]
                print(f"{path.name} ...", flush=True)
                running.append(Run(path, flags, slot, environment(mine, 1 if path in alone else jobs), command))
            for run, outcome in [(run, outcome) for run in running if (outcome := run.outcome(limit))]:
                running.remove(run)
                failed += [run.path.name] * (outcome != "ok")
                print(f"{run.path.name} {outcome} after {run.seconds():.0f} s", flush=True)
            time.sleep(0.1)
    finally:
        for run in running:
            run.stop()
    print(f"{len(paths) - len(failed)} of {len(paths)} notebooks saved" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return len(failed)


def main() -> int:
    "Read the command line and run"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all, the stages first")
    parser.add_argument("--flags", default="cuda slow distributed", help="kinds of cells to run beside the plain ones")
    parser.add_argument("--jobs", type=int, default=1, help="notebooks at a time, each on one GPU")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for one notebook")
    parser.add_argument("--here", action="store_true", help="run in this process (one notebook)")
    args = parser.parse_args()
    paths = [p.resolve() for p in args.notebooks] or notebooks()
    if args.here:
        run_here(paths[0], set(args.flags.split()))
        return 0
    if args.jobs > (count := len(gpus()) or args.jobs):
        parser.error(f"--jobs: expected at most {count}, the number of GPUs, got {args.jobs}")
    return run_all(paths, args.flags, args.jobs, args.limit)


if __name__ == "__main__":
    sys.exit(main())
