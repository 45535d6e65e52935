"""Tables and numbers with units, as text and as Markdown."""

__all__ = ["Table", "si"]


import math
import re
from typing import Any, Iterable


class Table:
    "Rows under a header, those of nothing but dashes left out; numbers are aligned right. Without rows it shows nothing."

    def __init__(self, header: list[str], rows: Iterable[Iterable[Any]]):
        self.header, rows = [str(h) for h in header], [[str(c) for c in r] for r in rows]
        self.rows = [row for row in rows if len(row) < 2 or {*row[1:]} != {"–"}]
        number = lambda cell: re.match(r"[×−+-]?\d[\d.]*([ e%]|$)|–?$", cell)
        self.right = [all(map(number, column)) and any(column) for column in zip(*self.rows)] or [False] * len(header)

    def _repr_markdown_(self) -> str:
        if not self.rows:
            return ""
        lines = [self.header, ["--:" if right else ":--" for right in self.right], *self.rows]
        row = lambda line: "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |"
        return "\n".join(map(row, lines))

    def __repr__(self) -> str:
        if not self.rows:
            return ""
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows)]
        pad = lambda line: "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, self.right))
        lines = [self.header, ["-" * w for w in widths], *self.rows]
        return "\n".join(pad(line).rstrip() for line in lines)


def si(
    value: float,
    unit: str = "",  # `B` counts in powers of 1024, as memory does; all else in powers of 1000
) -> str:
    "A number with three figures and a prefix: `si(0.0121, 's')` is `'12.1 ms'`."
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}".rstrip()
    if unit == "B":
        power = max(0, min(int(math.log(abs(value) * 1.0005, 1024)), 4))
        return f"{value / 1024**power:.4g} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"
    value = float(f"{value:.3g}")
    power = max(-4, min(math.floor(math.log10(abs(value)) / 3 + 1e-9), 5))
    return f"{value / 1000**power:.3g} {'pnµm kMGTP'[power + 4].strip()}{unit}".rstrip()
