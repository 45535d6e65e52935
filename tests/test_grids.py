"""What is left of a grid still holds every pair."""
from itertools import combinations, product

import pytest

from grids import few, pairs, thorough_but


@pytest.mark.parametrize("sizes", [(2, 3), (3, 3, 3), (2, 5, 4, 3), (4, 4, 4, 4, 2)])
def test_every_pair_of_values_is_there(sizes):
    rows = list(product(*map(range, sizes)))
    kept = pairs(rows)
    for i, j in combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in kept} == {(row[i], row[j]) for row in rows}
    assert len(kept) <= 2 * max(a * b for a, b in combinations(sizes, 2))


@pytest.mark.parametrize("choose", [few, thorough_but])
def test_a_case_that_is_gone_cannot_be_chosen(choose):
    with pytest.raises(AssertionError, match="got \\['c'\\]"):
        choose({"a": 1, "b": 2}, "a", "c")


def test_all_cases_are_there_and_those_not_kept_are_thorough():
    first, second = thorough_but(["a", ("b", 2)], ("b", 2))
    assert (first.values, second.values) == (("a",), ("b", 2))
    assert [mark.name for mark in first.marks] == ["thorough"] and not second.marks
