"""One of several processes: `python sharded_worker.py MODE RESULT RENDEZVOUS RANK RANKS`, or MODE and RESULT under torchrun."""
import json
import os
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=float(os.environ.get("SHARDED_TIMEOUT", 60)))


def write(path, results):
    "Results as they are so far; a process that dies leaves what it had"
    with open(f"{path}.new", "w") as file:
        json.dump(results, file)
    os.replace(f"{path}.new", path)


def run_cases(path):
    "All cases, on meshes of one to four ranks; a rank that fails stops, and the others notice"
    from torch.distributed.device_mesh import DeviceMesh
    from sharded_cases import CASES, DEVICE, FAULTS, ON_GPUS
    meshes, results = [DeviceMesh(DEVICE, list(range(n))) for n in range(1, dist.get_world_size() + 1)], {}
    names = os.environ.get("SHARDED_CASES", "").split() or (ON_GPUS if DEVICE == "cuda" else CASES)
    for name, case in ((n, {**CASES, **FAULTS}[n]) for n in names):
        started = time.perf_counter()
        try:
            torch.manual_seed(0)
            case(meshes)
            dist.barrier()
            results[name] = ["", time.perf_counter() - started]
            write(path, results)
        except BaseException:  # a checkpoint's error is no Exception
            results[name] = [traceback.format_exc(), time.perf_counter() - started]
            write(path, results)
            os._exit(1)


def fall(path, mode):
    "Two ranks train; the second dies, raises or hangs in its third step, the first must not wait for ever"
    from torch.distributed.device_mesh import DeviceMesh
    from fusedloss.sharded import ShardedPartialFC
    rank = dist.get_rank()
    head = ShardedPartialFC(10, 4, mesh=DeviceMesh("cpu", [0, 1]))
    started = time.perf_counter()
    try:
        for step in range(10**6):
            if rank == 1 and step == 3:
                if mode == "raise":
                    raise KeyError("a rank's own fault")
                time.sleep(12 if mode == "hang" else 0)
                os._exit(9)
            head(torch.randn(3, 4, requires_grad=True), torch.arange(3)).backward()
    except Exception as error:
        write(path, [type(error).__name__, str(error), step, time.perf_counter() - started])
        raise


def main(mode, path, rendezvous=None, rank=None, ranks=None):
    torch.set_num_threads(1)
    backend = os.environ.get("SHARDED_BACKEND", "gloo")
    if backend == "nccl":
        torch.cuda.set_device(int(rank or os.environ["LOCAL_RANK"]))
    if rendezvous:
        dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(ranks), timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, timeout=TIMEOUT)
    path = f"{path}.{dist.get_rank()}"
    run_cases(path) if mode == "cases" else fall(path, mode)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that has done its work


if __name__ == "__main__":
    main(*sys.argv[1:])
