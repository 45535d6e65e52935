"""What moves of code must not change: the schemas of operators, and the bits of all tensors that tests differentiate or compare.

    python tools/snapshot.py take FILE [TESTS]     before the move; TESTS as pytest takes them, by default all that `make test` runs
    python tools/snapshot.py compare FILE          after it: prints a line for each test whose bits differ, and fails if there is one

Signatures and docstrings of what is public stand in `fusedloss/__init__.pyi` and `fusedloss/_arguments.py`, whose changes git shows.
With TRITON_INTERPRET=1 the tests run Triton's kernels on a CPU. Bits are compared with those of the same machine alone.
"""
import json
import os
import platform
import random
import re
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import fusedloss
from fusedloss.core.operators import observed

Lines = dict[str, str]
WATCHED = (torch.autograd, "backward"), (torch.autograd, "grad"), (torch.testing, "assert_close"), (torch, "equal"), (torch, "allclose")


def bits(tensors: list[torch.Tensor]) -> int:
    "A checksum of tensors' bits, with dtypes and shapes"
    found = 0
    for t in tensors:
        found = zlib.crc32(f"{t.dtype} {list(t.shape)}".encode(), found)
        found = zlib.crc32(t.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), found)
    return found


def is_plain(value: Any) -> bool:
    "Whether a value is a tensor that has bits"
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_meta


def gradients(nodes: list) -> list[torch.Tensor]:
    "Those of all leaves that nodes of autograd's graph lead to"
    seen, found = {None}, []
    while nodes:
        if (node := nodes.pop()) not in seen:
            seen.add(node)
            nodes += [other for other, _ in node.next_functions]
            found += [node.variable.grad] if hasattr(node, "variable") else []
    return found


class Recorder:
    "A plugin of pytest: after each test, how it ended, and the bits of what it differentiated or compared, by its name."

    def __init__(self):
        self.lines: Lines = {}
        self.seen: list[int] = []

    def watched(self, function):
        "A function whose tensors are recorded: arguments, result, and of a backward pass the gradients"
        def recorded(*args, **options):
            graphs = [t.grad_fn for t in tree_leaves(args) if is_plain(t)]  # which the call may free
            result = function(*args, **options)
            if not observed():  # by a compiler, whose tensors have no bits
                given = tree_leaves((args, options, result))
                self.seen.append(bits(list(filter(is_plain, [*given, *gradients(graphs)]))))
            return result
        return recorded

    def pytest_runtest_setup(self):
        torch.manual_seed(0)
        random.seed(0)
        self.seen = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.lines[report.nodeid] = f"{report.outcome}, {len(self.seen)} calls, {zlib.crc32(repr(sorted(self.seen)).encode()):08x}"  # threads are in no order


def schemas() -> Lines:
    "Those of the package's operators"
    for name in fusedloss.__all__:  # operators are there once their module is
        getattr(fusedloss, name)
    return {f"schema {s.name}": str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("fusedloss::")}


def machine() -> str:
    "What bits may depend on, the code aside"
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    processor = f"{models[0] if models else platform.processor()} {torch.backends.cpu.get_cpu_capability()}"
    kernels = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if torch.cuda.is_available() else f"TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET', '')}"
    return f"{processor}, {kernels}, Python {platform.python_version()}, torch {torch.__version__}, CuPy {'yes' if find_spec('cupy') else 'no'}"


def record(tests: list[str]) -> Lines:
    "Run tests; what each saw, and the schemas"
    recorder = Recorder()
    before = [getattr(module, name) for module, name in WATCHED]
    for module, name in WATCHED:  # before a test imports it
        setattr(module, name, recorder.watched(getattr(module, name)))
    torch.manual_seed(0)
    try:
        pytest.main(["-q", "-p", "no:xdist", "--hypothesis-seed=0", *tests], plugins=[recorder])
    finally:
        for (module, name), function in zip(WATCHED, before):
            setattr(module, name, function)
    return recorder.lines | schemas()


def differences(before: Lines, after: Lines) -> list[str]:
    "A line for each thing that is missing, new or not the same"
    return [f"{name} · expected {before.get(name, 'nothing')} · got {after.get(name, 'nothing')}"
            for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]


def main(argv: list[str]) -> int | str:
    "Write a snapshot, or print how the code differs from one; 0 if it does not"
    if len(argv) < 2 or argv[0] not in ("take", "compare") or argv[0] == "compare" and len(argv) > 2:
        return __doc__
    path = Path(argv[1])
    if argv[0] == "take":
        tests = argv[2:] or ["-m", "not thorough"]
        taken = {"machine": machine(), "tests": tests, "lines": record(tests)}
        path.write_text(json.dumps(taken, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{len(taken['lines'])} lines in {path}")
        return 0
    before = json.loads(path.read_text(encoding="utf-8"))
    if before["machine"] != machine():
        return f"bits of two machines are not compared: expected one like that of {path}, {before['machine']}, got {machine()}"
    found = differences(before["lines"], record(before["tests"]))
    print("\n".join(found) if found else f"{len(before['lines'])} lines, all the same")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
