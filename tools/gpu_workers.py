"""How many of pytest's workers one machine feeds: one a core but one, and 9 GiB of the GPU's memory for each.

    python tools/gpu_workers.py
"""
import os

import torch

GIB_A_WORKER = 9  # a context, kernels, and the tests that are not marked `big`


def workers(cores: int, memory: int) -> int:
    "At least one"
    return max(1, min(cores - 1, memory // (GIB_A_WORKER * 2**30)))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("expected a GPU, got none")
    print(workers(len(os.sched_getaffinity(0)), torch.cuda.mem_get_info()[1]))
