"""Measure anew what plans are held to, on the GPU at hand: `python tools/measure_plans.py [METHOD ...]`.

Rows of tests/measured_plans.json whose method is named, or all, get this machine's seconds and bytes; a row whose budget its method
does not meet stays as it is. The file is then of one machine only if all rows were measured on it, so another kind of GPU is refused.
"""

import json
import sys
from pathlib import Path

import torch

import fusedloss as fl
from workbook.measure import peak_memory, time_call
from workbook.records import machine_line

FILE = Path(__file__).parents[1] / "tests" / "measured_plans.json"


def measured(n: int, v: int, h: int, dtype: torch.dtype, budget: int | None, method: str) -> tuple[float, int]:
    "Seconds of a step, and its bytes beyond the gradients"
    x, w = (torch.randn(size, h, device="cuda", dtype=dtype).mul(0.1).requires_grad_() for size in (n, v))
    y = torch.randint(v, (n,), device="cuda")
    step = lambda: torch.autograd.grad(fl.linear_cross_entropy(x, w, y, method=method, memory_budget=budget), (x, w))
    return time_call(step, "cuda", 0.1).median, max(0, peak_memory(step, "cuda") - x.nbytes - w.nbytes)


def main(methods: list[str]) -> None:
    known = json.loads(FILE.read_text(encoding="utf-8"))
    name = torch.cuda.get_device_name()
    if not known["machine"].startswith(name):
        raise SystemExit(f"expected the GPU of {FILE.name}, got {name}: {known['machine']}")
    for row in known["rows"]:
        _, n, v, h, dtype, budget, method, *_ = row
        if methods and method not in methods:
            continue
        try:
            seconds, extra = measured(n, v, h, getattr(torch, dtype), budget, method)
        except ValueError as refused:
            print(row, refused)
            continue
        row[-2:] = float(f"{seconds:.4g}"), extra
    lines = ",\n".join(map(json.dumps, known["rows"]))
    heads = {k: v for k, v in known.items() if k != "rows"}
    FILE.write_text(f'{json.dumps(heads)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    print(machine_line("cuda"))


if __name__ == "__main__":
    main(sys.argv[1:])
