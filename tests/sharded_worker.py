"""A session of ranks: `python sharded_worker.py JOBS` imports once and forks; `MODE RESULT` is one rank under torchrun."""
import json
import multiprocessing
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import sharded_cases as cases
from compiled_cases import PROMISES
from fusedloss.sharded_heads import ShardedPartialFC

BACKEND = os.environ.get("SHARDED_BACKEND", "gloo")
START = multiprocessing.get_context("spawn" if BACKEND == "nccl" else "fork")  # CUDA is not to be forked
TIMEOUT = timedelta(seconds=120)  # of a collective whose ranks all do their part
HANGS = timedelta(seconds=5)  # of one that a rank never joins
FALLS = timedelta(seconds=20) if BACKEND == "nccl" else TIMEOUT  # NCCL does not notice that a rank has died; its timeout ends the others
GRACE = 60  # seconds that ranks have to notice that another has failed; who notices ends at once


def write(path, results):
    "Results as they are so far; a process that dies leaves what it had"
    with open(f"{path}.new", "w") as file:
        json.dump(results, file)
    os.replace(f"{path}.new", path)


def run_cases(path, names):
    "All cases, on meshes of one to four ranks; a rank that fails stops, and the others notice"
    meshes, results = [DeviceMesh(cases.DEVICE, list(range(n))) for n in range(1, dist.get_world_size() + 1)], {}
    for name, case in ((n, {**cases.CASES, **cases.FAULTS, **PROMISES}[n]) for n in names):
        started = time.process_time()
        try:
            torch.manual_seed(0)
            case(meshes)
            dist.barrier()
            results[name] = ["", time.process_time() - started]
            write(path, results)
        except BaseException:  # a checkpoint's error is no Exception
            results[name] = [traceback.format_exc(), time.process_time() - started]
            write(path, results)
            os._exit(1)


def fault(path, mode):
    "What the second rank does in its fourth step: dies, raises, or hangs until the first has given up"
    if mode == "raise":
        raise KeyError("a rank's own fault")
    first = Path(path).with_suffix(".0")
    while mode == "hang" and (BACKEND == "nccl" or not first.exists()):  # NCCL's watchdog may end the first before it writes
        time.sleep(0.1)
    os._exit(9)


def fall(path, mode):
    "Two ranks train; the second falls in its fourth step, the first must not wait for ever"
    head = ShardedPartialFC(10, 4, mesh=DeviceMesh(cases.DEVICE, [0, 1]))
    try:
        for step in range(4):
            if step == 3 and mode == "hang" and BACKEND == "gloo":  # steps before have the time they need on a busy machine; NCCL has no limit for a group's first step
                head.mesh = DeviceMesh.from_group(dist.new_group(timeout=HANGS), cases.DEVICE)
            if step == 3 and dist.get_rank() == 1:
                fault(path, mode)
            head(torch.randn(3, 4, device=cases.DEVICE, requires_grad=True), torch.arange(3, device=cases.DEVICE)).backward()
    except Exception as error:
        write(path, [type(error).__name__, str(error), step])
        raise


def run_rank(mode, path, names=(), rendezvous=None, rank=None, ranks=None):
    "One rank, from its process group to its end"
    torch.set_num_threads(1)
    if BACKEND == "nccl":
        torch.cuda.set_device(int(rank if rank is not None else os.environ["LOCAL_RANK"]))
    group = dict(init_method=f"file://{rendezvous}", rank=rank, world_size=ranks) if rendezvous else {}
    dist.init_process_group(BACKEND, timeout=TIMEOUT if mode == "cases" else FALLS, **group)
    path = f"{path}.{dist.get_rank()}"
    run_cases(path, names) if mode == "cases" else fall(path, mode)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that has done its work


def child(log, *args):
    "A rank of a session: what it says goes to a file"
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    try:
        run_rank(*args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def wait_for(processes, end):
    "Until all have ended, or one has failed and the others had their time to notice, or `end`; their exit codes"
    while time.monotonic() < end and any(p.is_alive() for p in processes):
        if any(p.exitcode for p in processes):
            end = min(end, time.monotonic() + GRACE)
            break
        time.sleep(0.05)
    for process in processes:
        process.join(max(0.1, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return [p.exitcode for p in processes]


def run_ranks(folder, ranks, mode, names=(), end=float("inf")):
    "Start the ranks, wait for all of them, and return what each wrote, its exit code and its last words"
    folder.mkdir()
    logs = [folder / f"stderr.{rank}" for rank in range(ranks)]
    processes = [START.Process(target=child, args=(str(log), mode, str(folder / "result"), names, str(folder / "rendezvous"), rank, ranks))
                 for rank, log in enumerate(logs)]
    for process in processes:
        process.start()
    codes = wait_for(processes, end)
    errors = [log.read_text(errors="replace")[-20000:] for log in logs]
    written = [json.loads(p.read_text()) if (p := folder / f"result.{rank}").exists() else {} for rank in range(ranks)]
    return written, codes, errors


def run_all_cases(folder, ranks, names, limit):
    "Every case, whatever others do: after one that fails, new processes go on with the next; results, and each rank's last words"
    folder.mkdir()
    found, left, errors, end = [{} for _ in range(ranks)], list(names), [""] * ranks, time.monotonic() + limit
    while left and time.monotonic() < end:
        written, _, errors = run_ranks(folder / str(len(left)), ranks, "cases", left, end)
        for mine, new in zip(found, written):
            mine.update(new)
        passed = [all(name in w and not w[name][0] for w in written) for name in left]
        left = left[passed.index(False) + 1:] if False in passed else []
    return found, errors


def serve(path):
    "Run each job of a file: what it returned, by its name, goes to `results.json` beside it"
    path = Path(path)
    jobs, limit = json.loads(path.read_text()), float(os.environ["SHARDED_LIMIT"])
    results = {name: run_all_cases(path.parent / name, job["ranks"], job["cases"], limit) if "cases" in job else
               run_ranks(path.parent / name, job["ranks"], job["mode"], end=time.monotonic() + limit) for name, job in jobs.items()}
    write(path.parent / "results.json", results)


if __name__ == "__main__":
    serve(sys.argv[1]) if len(sys.argv) == 2 else run_rank(*sys.argv[1:])
