"""How much of a grid of parameters a run tries: every pair of values once, or with `FUSEDLOSS_GRIDS=full` all of it."""
import os
from itertools import combinations, product
from typing import Any, Iterable, Mapping, Sequence

import pytest

FULL = os.environ.get("FUSEDLOSS_GRIDS") == "full"


def pairs(rows: Sequence[tuple]) -> list[tuple]:
    "The fewest of `rows`, found greedily, that hold every pair of values that some row holds"
    held = {row: {((i, row[i]), (j, row[j])) for i, j in combinations(range(len(row)), 2)} for row in rows}
    wanted, taken = set().union(*held.values()), []
    while wanted:
        taken.append(max(rows, key=lambda row: len(held[row] & wanted)))
        wanted -= held[taken[-1]]
    return [row for row in rows if row in set(taken)]


def grid(*axes: Sequence) -> list[tuple]:
    "Combinations of hashable values, one of each axis: for `pytest.mark.parametrize` with several names"
    rows = list(product(*axes))
    return rows if FULL or len(axes) < 3 else pairs(rows)


def few(cases: Sequence | Mapping[str, Any], *chosen: Any) -> list:
    "All cases in a full run, else the chosen ones, each of which must be a case"
    missing = [case for case in chosen if case not in cases]
    assert not missing, f"expected cases among {list(cases)}, got {missing}"
    return list(cases) if FULL else list(chosen)


def thorough_but(cases: Iterable, *kept: Any) -> list:
    "All cases, of which those that are not kept are marked `thorough`; each kept one must be a case. A tuple is a row of several parameters"
    cases = list(cases)
    missing = [case for case in kept if case not in cases]
    assert not missing, f"expected cases among {cases}, got {missing}"
    values = lambda case: case if isinstance(case, tuple) else (case,)
    return [pytest.param(*values(case), marks=[] if case in kept else pytest.mark.thorough) for case in cases]
