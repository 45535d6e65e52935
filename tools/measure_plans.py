"""Measure anew the bytes that plans are held to, on the GPU at hand: `python tools/measure_plans.py [METHOD ...]`.

Rows of tests/measured_plans.json whose method is named, or all, get the bytes beyond the gradients that a step holds now; a row whose budget
its method does not meet stays as it is. Seconds stay too: those of small shapes are of the host that they were measured on.
"""
import json
import sys
from pathlib import Path

import torch

import fusedloss as fl
from workbook.measure import drop_gradients

FILE = Path(__file__).parents[1] / "tests" / "measured_plans.json"


def measured_bytes(n: int, v: int, h: int, dtype: torch.dtype, budget: int | None, method: str) -> int:
    "Bytes of a step beyond its gradients"
    x, w = (torch.randn(size, h, device="cuda", dtype=dtype).mul(0.1).requires_grad_() for size in (n, v))
    y = torch.randint(v, (n,), device="cuda")
    step = lambda: torch.autograd.grad(fl.linear_cross_entropy(x, w, y, method=method, memory_budget=budget), (x, w))
    step()  # compiles, and makes the libraries' workspaces
    drop_gradients("cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    step()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]  # what was asked for: not the rest of a block that was there already
    return max(0, peak - before - x.nbytes - w.nbytes)


def main(methods: list[str]) -> None:
    known = json.loads(FILE.read_text(encoding="utf-8"))
    name = torch.cuda.get_device_name()
    if not known["machine"].startswith(name):
        raise SystemExit(f"expected the GPU of {FILE.name}, {known['machine']}, got {name}")
    for row in known["rows"]:
        _, n, v, h, dtype, budget, method, *_ = row
        if methods and method not in methods:
            continue
        try:
            row[-1] = measured_bytes(n, v, h, getattr(torch, dtype), budget, method)
        except ValueError as refused:
            print(row, refused)
    lines = ",\n".join(map(json.dumps, known["rows"]))
    heads = {k: v for k, v in known.items() if k != "rows"}
    FILE.write_text(f'{json.dumps(heads)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
