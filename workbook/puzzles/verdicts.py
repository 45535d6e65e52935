"""Rules that look at what a kernel did and say the first thing that is wrong: where it reads and writes, who wins when two programs write, what it leaves out, how it sums, which values are wrong, and what it loads too often."""

from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from workbook.puzzles.tasks import Case
from workbook.puzzles.watch import Access, Array, called, Watch


def row_and_column(array: Array, offset: int) -> tuple[int, int]:
    "A place by its distance from the first, also where the array has none."
    down, right = array.strides
    if down >= right:
        return offset // down, offset % down // right
    return offset % right // down, offset // right


def run_words(values: list[int]) -> str:
    "The first run of neighbours among numbers."
    end = next((i for i in range(1, len(values)) if values[i] != values[i - 1] + 1), len(values))
    return str(values[0]) if end == 1 else f"{values[0]}…{values[end - 1]}"


def place_words(name: str, array: Array, offsets: np.ndarray) -> str:
    "The first places of one row, and how many there are in all."
    places = [row_and_column(array, int(offset)) for offset in np.unique(offsets)]
    row = places[0][0]
    of_row = sorted(column for i, column in places if i == row)
    if array.shape[1] == 1:
        return f"{name}[{run_words(sorted(i for i, _ in places))}]"
    more = f" and {len(places) - len(of_row)} more" if len(places) > len(of_row) else ""
    return f"{name}[{run_words(of_row)}]{more}" if array.shape[0] == 1 else f"{name}[{row}, {run_words(of_row)}]{more}"


def offsets_of(array: Array, places: np.ndarray) -> np.ndarray:
    "Distances of places from the first, in elements."
    i, j = np.divmod(places, array.shape[1])
    return i * array.strides[0] + j * array.strides[1]


Words = Iterator[str]


def size_words(array: Array) -> str:
    "The shape of an array; of a vector its length."
    return " × ".join(str(size) for size in array.shape if size > 1) or "1"


def strides_words(array: Array) -> str:
    "The strides, if they are not those of a matrix without gaps."
    return "" if array.strides == (array.shape[1], 1) else " with strides of {} and {} elements".format(*array.strides)


def missed_words(a: Access, array: Array, program: str, why: str) -> str:
    "An access that misses its array."
    offsets = a.offsets[a.places < 0]
    far = ", at an offset made of a value that nobody has loaded," if abs(int(offsets[0])) >= 1 << 39 else ","
    wide = " If both factors of an offset are int32, so is their product." if int(offsets.min()) < -(1 << 20) else ""
    why = why or "Is a mask missing, or is the offset not that of the program's part?"
    return (
        f"Out of bounds: program {program} {a.kind} {place_words(a.name, array, offsets)}{far} but {a.name} is {size_words(array)}"
        f"{strides_words(array)}. {why}{wide}"
    )


def why_stray(a: Access, array: Array, watch: Watch) -> str:
    "Why an access goes astray that is partly the program's own: it begins at another place, or ends too late."
    own = array.may(a.program)
    if array.allowed is not None or not own[a.places].any():
        return "Compare with the picture of the question."
    touched = np.concatenate([b.places for b in watch.touched(a.kind, a.name) if b.program == a.program])
    left_out = np.setdiff1d(np.flatnonzero(own), touched)
    if not len(left_out) or own[: left_out[0]].any():
        return "The block runs on into what follows: a mask is missing, or is that of another axis."
    row = f" A row of {a.name} is {array.shape[1]} elements long." if array.shape[1] > 1 else ""
    return (
        f"Program {called(a.program, watch.grid)} does not begin where its part does: it leaves out "
        f"{place_words(a.name, array, offsets_of(array, left_out))}.{row}"
    )


def stray_words(a: Access, array: Array, watch: Watch, why: str) -> str:
    "An access to another program's part, or to what is to be left alone."
    wrong = ~array.may(a.program)[a.places]
    owner = called(array.owners.ravel()[a.places[wrong][0]], watch.grid)
    whose = "which has to be skipped" if array.allowed is not None else f"which belongs to program {owner}"
    return (
        f"Program {called(a.program, watch.grid)} {a.kind} {place_words(a.name, array, a.offsets[wrong])}, {whose}. "
        f"{why or why_stray(a, array, watch)}"
    )


def wrong_accesses(case: Case, watch: Watch) -> Words:
    "The first access that misses its array, or touches what is not the program's."
    for a in watch.accesses:
        array, why = case.arrays[a.name], case.strays.get((a.name, a.program), "") if len(a.places) == 1 else ""
        if (a.places < 0).any():
            return (yield missed_words(a, array, called(a.program, watch.grid), why))
        if not array.may(a.program)[a.places].all():
            return (yield stray_words(a, array, watch, why))


def atomics(case: Case, watch: Watch) -> Words:
    "Sums of several programs in memory."
    if a := next((a for a in watch.accesses if a.kind == "adds to"), None):
        yield (
            f"Not deterministic: program {called(a.program, watch.grid)} adds to {a.name} by an atomic operation, and "
            "floating-point sums depend on the order in which programs come. One program can hold the whole sum."
        )


def races(case: Case, watch: Watch) -> Words:
    "Places that two programs store, or that one stores and another one loads."
    for name, array in case.arrays.items():
        stored = np.full(array.shape[0] * array.shape[1], -1)
        for a in watch.touched("stores", name):
            twice = (stored[a.places] >= 0) & (stored[a.places] != a.program)
            if twice.any():
                first = a.places[twice][0]
                where = place_words(name, array, offsets_of(array, np.array([first])))
                both = f"{called(stored[first], watch.grid)} and {called(a.program, watch.grid)}"
                yield f"Not deterministic: programs {both} both store {where}, and whichever comes last wins."
            stored[a.places] = a.program


def unwritten(case: Case, watch: Watch) -> Words:
    "Places of an output that no program stores."
    for name, array in case.arrays.items():
        if array.expected is None:
            continue
        stored = [a.places for a in watch.touched("stores", name)]
        missing = np.setdiff1d(np.arange(array.shape[0] * array.shape[1]), np.concatenate([*stored, []]))
        if len(missing):
            where = place_words(name, array, offsets_of(array, missing.astype(int)))
            yield f"Not stored: {where}, {len(missing)} of {array.expected.numel()} places."


def half_sums(case: Case, watch: Watch) -> Words:
    "Sums in half precision."
    for what in sorted(watch.narrow):
        yield f"The dtype of a sum is wrong: {what} is done in float16, which keeps 11 bits. Convert first: `.to(tl.float32)`."


def wrong_places(values: Tensor, expected: Tensor, tolerance: float) -> Tensor:
    "Where values differ from what is expected by more than the tolerance."
    values, expected = values.double().view(expected.shape), expected.double()
    near = (values - expected).abs() <= tolerance * expected.abs().clamp(min=1)
    return ~(near | (values == expected))


def explains(mistake: dict[str, Tensor], case: Case, watch: Watch) -> bool:
    "Does a known mistake lead to what the kernel stored, and does it make a difference here?"

    def same(name: str, values: Tensor) -> bool:
        array, stored = case.arrays[name], watch.memory.tensors[name]
        finite = values.double().nan_to_num(nan=3.0)
        return not wrong_places(
            stored.double().nan_to_num(nan=3.0), finite, max(10 * array.tolerance, 1e-4)
        ).any() and bool(wrong_places(values, array.expected, array.tolerance).any())

    return all(same(name, values) for name, values in mistake.items())


def listed(names: list[str]) -> str:
    "Names with commas, the last with `and`."
    return " and ".join([", ".join(names[:-1])] * bool(names[:-1]) + names[-1:])


def undefined_lanes(case: Case, watch: Watch, wrong: dict[str, Tensor]) -> Words:
    "A lane without a value that reached an output."
    for name, places in wrong.items():
        stored = watch.memory.tensors[name].view(case.arrays[name].expected.shape)
        if watch.undefined and not torch.isfinite(stored[places]).any():
            loads = "loads of {} have" if len(watch.undefined) > 1 else "a load of {} has"
            yield (
                f"Undefined values reach {name}: {loads.format(listed(sorted(watch.undefined)))} a mask and no `other=`. "
                "The lanes that the mask leaves out hold anything then, here ∞: give them a neutral value."
            )


def value_words(name: str, case: Case, values: Tensor, places: Tensor) -> str:
    "Where an output is wrong, and what stands there."
    array, first = case.arrays[name], int(places.flatten().nonzero()[0])
    where = place_words(name, array, offsets_of(array, np.array([first])))
    only = [
        words for words, region in case.regions.items() if region.shape == places.shape and not (places & ~region).any()
    ]
    why = " NaN comes from −∞ − (−∞), ∞ − ∞ or 0 · ∞." if torch.isnan(values.flatten()[first]) else ""
    return (
        f"Wrong values: {name} is wrong at {int(places.sum())} of {places.numel()} places{', only ' + only[0] if only else ''}. "
        f"{where} should be {float(array.expected.flatten()[first]):.6g}, got {float(values.flatten()[first]):.6g}.{why}"
    )


def never_loaded(case: Case, watch: Watch) -> Words:
    "Places of an input that no program loads, though it takes all of them to come to the result."
    for name, array in case.arrays.items():
        if array.start is None:
            continue
        loaded = np.concatenate([*(a.places for a in watch.touched("loads", name)), []])
        if len(missing := np.setdiff1d(np.flatnonzero(array.needed), loaded)):
            yield f"Never loaded: {place_words(name, array, offsets_of(array, missing))}."


def wrong_values(case: Case, watch: Watch) -> Words:
    "Outputs that differ from what was expected."
    outputs = {name: array for name, array in case.arrays.items() if array.expected is not None}
    wrong = {
        name: wrong_places(watch.memory.tensors[name], array.expected, array.tolerance)
        for name, array in outputs.items()
    }
    wrong = {name: places for name, places in wrong.items() if places.any()}
    if not wrong:
        return
    known = [words for words, mistake in case.mistakes.items() if explains(mistake, case, watch)]
    said = list(undefined_lanes(case, watch, wrong)) or known or list(never_loaded(case, watch))
    yield from said[:1]
    for name, places in wrong.items():
        yield value_words(name, case, watch.memory.tensors[name], places)


def brackets(case: Case, watch: Watch) -> Words:
    "Functions of a scan whose result depends on the order in which steps are combined."
    for name in sorted(watch.not_associative):
        yield f"`{name}` is not associative: a GPU combines steps in pairs, and gets another result than one step after the other."


def loaded_times(case: Case, watch: Watch, name: str) -> float:
    "Elements loaded of an array, in multiples of its size."
    array = case.arrays[name]
    return sum(len(np.unique(a.places)) for a in watch.touched("loads", name)) / (array.shape[0] * array.shape[1])


def loads_too_often(case: Case, watch: Watch) -> Words:
    "Arrays of which more is loaded than needed."
    for name, array in case.arrays.items():
        if (times := loaded_times(case, watch, name)) > array.times + 1e-9:
            yield (
                f"The result is right, but {name} is loaded {times:.3g} times; {array.times:.3g} {'is' if array.times <= 1 else 'are'} "
                "enough. What is in registers need not be loaded again."
            )


def loads_along(case: Case, watch: Watch) -> Iterator[tuple[int, int, int]]:
    "For each tile of the products' operands that is loaded: the program, the step along H, and how many products it had made."
    for name in ("x", "w"):
        for a in watch.touched("loads", name):
            yield a.program, int((a.places % case.arrays[name].shape[1]).min()) // case.others["BH"], a.product


def waits(case: Case, watch: Watch) -> Words:
    "The first step that is not loaded before the product of the step before, or is loaded too early."
    for program, step, made in loads_along(case, watch) if case.ahead else ():
        who, after_words = called(program, watch.grid), f"{made} product{'s' * (made != 1)}"
        if step and made >= step:
            return (
                yield f"The result is right, but nothing is on its way: program {who} loads step {step} after {after_words}, "
                f"so that product {step} waits for it. Load it before product {step - 1}."
            )
        if step - made > case.ahead:
            return (
                yield f"The result is right, but program {who} holds too many tiles: it loads step {step} after {after_words}. "
                "Two buffers are enough, one for this step and one for the next."
            )


RULES = wrong_accesses, atomics, races, unwritten, half_sums, wrong_values, brackets, loads_too_often, waits


def faults(case: Case, watch: Watch) -> list[str]:
    "What the first rule that finds something has to say; nothing if all is right."
    return next((found for found in (list(rule(case, watch)) for rule in RULES) if found), [])
