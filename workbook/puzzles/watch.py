"""What a kernel touches on Triton's interpreter: each load and store with its program and its places, accesses outside of an array, and sums in half precision."""

import math
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from fusedloss.core.triton import tl


ANYONE = -1  # a tile that every program may touch


@dataclass
class Array:
    "A matrix or a vector that a kernel gets as a pointer."

    start: Optional[Tensor]  # what it holds before the launch; None for an output, which then holds NaN
    expected: Optional[Tensor] = None  # what it holds afterwards, in float64; None for an input
    tile: tuple[int, int] = (1, 1)
    owner: Callable[[int, int], int] = lambda row, column: row  # program of a tile, by its row and column
    strides: Optional[tuple[int, int]] = None
    times: float = 1.0  # how often all programs together have to load it
    tolerance: float = 2e-5  # relative to the larger of 1 and the value
    allowed: Optional[np.ndarray] = None  # [programs, places]: where it does not follow from `owner`
    spare: Optional[Tensor] = None  # of its shape: what nobody has to load

    def __post_init__(self):
        values = self.expected if self.start is None else self.start
        self.shape = (*values.shape, 1)[:2]
        self.dtype = torch.float32 if self.start is None else values.dtype
        self.strides = self.strides or (self.shape[1], 1)

    @property
    def owners(self) -> np.ndarray:
        "The program of every place, [rows, columns]."
        return np.array(
            [
                [self.owner(i // self.tile[0], j // self.tile[1]) for j in range(self.shape[1])]
                for i in range(self.shape[0])
            ]
        )

    def may(self, program: int) -> np.ndarray:
        "Which of its places a program may touch, [places]."
        if self.allowed is not None:
            return self.allowed[program]
        return np.isin(self.owners.ravel(), (ANYONE, program))

    @property
    def needed(self) -> np.ndarray:
        "Which places some program has to load, [places]."
        if self.allowed is not None:
            return self.allowed.any(0)
        return np.full(math.prod(self.shape), True) if self.spare is None else ~self.spare.numpy().ravel()


def places_of(array: Array, offsets: np.ndarray) -> np.ndarray:
    "The number of the place that lies so many elements after the array's first one; -1 where there is none."
    (rows, columns), (down, right) = array.shape, array.strides
    if down >= right:
        i, rest = np.divmod(offsets, down)
        j, rest = np.divmod(rest, right)
    else:
        j, rest = np.divmod(offsets, right)
        i, rest = np.divmod(rest, down)
    real = (offsets >= 0) & (i < rows) & (j < columns) & (rest == 0)
    return np.where(real, i * columns + j, -1)


GAP = 1 << 14  # bytes between arrays


class Memory:
    "The arrays of one launch, and what stands behind their pointers."

    def __init__(self, arrays: dict[str, Array]):
        self.arrays = dict(sorted(arrays.items(), key=lambda item: max(item[1].strides)))
        sizes = {name: array.dtype.itemsize * array.shape[0] * array.shape[1] for name, array in arrays.items()}
        self.whole = torch.zeros(sum(sizes.values()) + 2 * GAP * (len(arrays) + 1), dtype=torch.uint8)
        self.tensors, end = {}, -self.whole.data_ptr() % 16
        for name, array in self.arrays.items():
            begin = end + GAP
            end = begin + sizes[name] + -sizes[name] % 16
            self.tensors[name] = self.whole[begin : begin + sizes[name]].view(array.dtype).view(array.shape)
            self.tensors[name].copy_(torch.tensor(torch.nan) if array.start is None else array.start.view(array.shape))

    def span(self, name: str) -> tuple[int, int]:
        "The addresses of an array's first and last place, by its strides."
        array, begin = self.arrays[name], self.tensors[name].data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides))
        return begin, begin + last * array.dtype.itemsize

    def meant(self, addresses: np.ndarray) -> str:
        "The array at which addresses aim: the nearest to their middle; far from all of them, the nearest in its own sizes."
        middle = int(np.median(addresses.astype(np.int64)))
        spans = {name: self.span(name) for name in self.arrays}
        miss = {name: max(begin - middle, middle - end, 0) for name, (begin, end) in spans.items()}
        if min(miss.values()) > GAP:
            miss = {name: far / (spans[name][1] - spans[name][0] + 1) for name, far in miss.items()}
        return min(miss, key=miss.get)

    def find(self, addresses: np.ndarray) -> tuple[str, np.ndarray, np.ndarray]:
        "The array, and in elements from its beginning how far, and in it which place each address means."
        name = self.meant(addresses)
        offsets = (addresses.astype(np.int64) - self.tensors[name].data_ptr()) // self.arrays[name].dtype.itemsize
        return name, offsets, places_of(self.arrays[name], offsets)

    def real(self, name: str, places: np.ndarray) -> np.ndarray:
        "Where the places truly lie; the array's first one for no place."
        tensor = self.tensors[name]
        return (tensor.data_ptr() + tensor.element_size() * np.maximum(places, 0)).astype(np.uint64)


class Access(NamedTuple):
    "What one instruction of one program asked for."

    kind: str  # "loads", "stores" or "adds to"
    program: int
    name: str  # of the array
    offsets: np.ndarray  # of the lanes that the mask leaves in, in elements
    places: np.ndarray  # -1: outside of the array
    product: int  # how many products this program had made


def called(program: int, grid: tuple[int, ...]) -> str:
    "A program's number on its grid; of a grid with several axes, its numbers."
    return str(program) if len(grid) == 1 else "({})".format(", ".join(map(str, np.unravel_index(program, grid))))


class Watch:
    "All that the programs of one launch did."

    def __init__(self, arrays: dict[str, Array], grid: tuple[int, ...]):
        self.memory, self.grid, self.program = Memory(arrays), grid, 0
        self.accesses: list[Access] = []
        self.undefined: set[str] = set()  # arrays loaded with a mask and without `other=`
        self.narrow: set[str] = set()  # what was done in half precision
        self.not_associative: set[str] = set()  # functions of a scan
        self.products = [0] * math.prod(grid)
        self.operations = 0  # of the present program

    def note(self, kind: str, pointers: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        "Write an access down; where each lane truly lies, and which lanes are both wanted and there."
        wanted = np.broadcast_to(mask, pointers.shape).astype(bool)
        if not wanted.any():
            return np.full(pointers.shape, self.memory.whole.data_ptr(), np.uint64), wanted
        name = self.memory.find(pointers[wanted])[0]
        tensor, array = self.memory.tensors[name], self.memory.arrays[name]
        offsets = (pointers.astype(np.int64) - tensor.data_ptr()) // tensor.element_size()
        places = places_of(array, offsets)
        self.accesses.append(
            Access(kind, self.program, name, offsets[wanted], places[wanted], self.products[self.program])
        )
        return self.memory.real(name, places), wanted & (places >= 0)

    def touched(self, kind: str, name: str) -> Iterator[Access]:
        "The accesses of one kind to one array."
        return (a for a in self.accesses if a.kind == kind and a.name == name)


def poison(dtype: np.dtype) -> np.ndarray:
    "What a lane holds that nobody has given a value: infinity, or a large integer."
    return np.array(
        np.inf if dtype.kind == "f" else min(1 << 40, np.iinfo(dtype).max) if dtype.kind in "iu" else True, dtype
    )


def watched_load(watch: Watch, load: Callable) -> Callable:
    "The builder's masked load, written down."

    def masked_load(pointers, mask, other, *rest):
        real, there = watch.note("loads", pointers.data, mask.data)
        result = load(handle_like(pointers, real), handle_like(mask, there), other, *rest)
        wanted = np.broadcast_to(mask.data, there.shape).astype(bool)
        given = other is not None or wanted.size == 1  # of a single lane the interpreter takes `other=0` for none
        if not given and wanted.any() and not wanted.all():
            watch.undefined.add(watch.accesses[-1].name)
        return handle_like(result, np.where(there | (~wanted & given), result.data, poison(result.data.dtype)))

    return masked_load


def watched_store(watch: Watch, store: Callable) -> Callable:
    "The builder's masked store, written down."

    def masked_store(pointers, value, mask, *rest):
        real, there = watch.note("stores", pointers.data, mask.data)
        return store(handle_like(pointers, real), value, handle_like(mask, there), *rest)

    return masked_store


def watched_atomic(watch: Watch, atomic: Callable) -> Callable:
    "The builder's atomic operation, written down."

    def atomic_rmw(operation, pointers, value, mask, *rest):
        real, there = watch.note("adds to", pointers.data, mask.data)
        return atomic(operation, handle_like(pointers, real), value, handle_like(mask, there), *rest)

    return atomic_rmw


def handle_like(handle: Any, data: np.ndarray):
    "A value of the interpreter with other data."
    return type(handle)(data, handle.dtype)


def is_narrow(handle: Any) -> bool:
    "Does a value of the interpreter hold half-precision numbers?"
    return handle.dtype.scalar in (tl.float16, tl.bfloat16)


def watched_sum(watch: Watch, what: str, compute: Callable) -> Callable:
    "An operation of the builder whose first operand should not be in half precision."

    def computed(first, *rest):
        if is_narrow(first):
            watch.narrow.add(what)
        return compute(first, *rest)

    return computed


def watched_dot(watch: Watch, dot: Callable) -> Callable:
    "The builder's product, counted."

    def counted(a, b, accumulator, *rest):
        watch.products[watch.program] += 1
        if is_narrow(accumulator):
            watch.narrow.add("a product's sum")
        return dot(a, b, accumulator, *rest)

    return counted


def watched_reduction(watch: Watch, reduce: Callable) -> Callable:
    "A sum over an axis of a block."

    def summed(self, values):
        if is_narrow(values.handle):
            watch.narrow.add("`tl.sum`")
        return reduce(self, values)

    return summed


def watched_place(watch: Watch, move: Callable) -> Callable:
    "The builder's step to the next program, whose number is kept."

    def moved(*place):
        watch.program = int(np.ravel_multi_index(place[: len(watch.grid)], watch.grid))
        watch.operations = 0
        return move(*place)

    return moved


def brackets_agree(join: Callable, a: tuple, b: tuple, c: tuple) -> bool:
    "Whether three steps, combined from the left and from the right, give one result."
    tupled = lambda result: result if isinstance(result, tuple) else (result,)
    pairs = zip(tupled(join(*tupled(join(*a, *b)), *c)), tupled(join(*a, *tupled(join(*b, *c)))))
    numbers = lambda value: value.handle.data if isinstance(value, tl.tensor) else value
    return all(np.allclose(numbers(left), numbers(right), rtol=1e-3, equal_nan=True) for left, right in pairs)


def watched_scan(watch: Watch, scan: Callable) -> Callable:
    "A scan, of which three steps in the middle are combined both ways first."

    def scanned(self, values):
        middle = values[0].handle.data.size // 2
        if values[0].handle.data.ndim == 1 and middle > 1:
            steps = [
                tuple(self.to_tensor(v.handle.data[at], v.dtype) for v in values)
                for at in (middle - 1, middle, middle + 1)
            ]
            if not brackets_agree(self.combine_fn.fn, *steps):
                watch.not_associative.add(self.combine_fn.fn.__name__)
        return scan(self, values)

    return scanned


OPERATIONS = 30_000  # of one program, after which it is taken to be endless


class Endless(Exception):
    "A program that does not come to an end."


def every_operation(watch: Watch, builder: Any) -> dict[str, Callable]:
    "All operations of the builder, by name: counted, and comparisons given the type that they have on a GPU."

    def counted(name: str, operation: Callable) -> Callable:
        def operate(*operands):
            watch.operations += 1
            if watch.operations > OPERATIONS:
                raise Endless
            result = operation(*operands)
            return type(result)(result.data, tl.int1) if "cmp" in name else result

        return operate

    return {name: counted(name, getattr(builder, name)) for name in dir(builder) if name.startswith("create_")}


@contextmanager
def watching(watch: Watch):
    "Within it, the interpreter tells what its programs do."
    from triton.runtime import interpreter

    builder, reductions, scans = interpreter.interpreter_builder, interpreter.ReduceOps, interpreter.ScanOps
    ours = dict(
        create_masked_load=watched_load,
        create_masked_store=watched_store,
        create_atomic_rmw=watched_atomic,
        create_dot=watched_dot,
        set_grid_idx=watched_place,
    )
    replaced = every_operation(watch, builder)
    replaced |= {name: wrap(watch, replaced.get(name, getattr(builder, name))) for name, wrap in ours.items()}
    for name, what in (("create_fadd", "an addition"), ("create_fsub", "a subtraction")):
        replaced[name] = watched_sum(watch, what, replaced[name])
    usual_sum, usual_scan = reductions.sum, scans.generic_scan
    try:
        vars(builder).update(replaced)
        reductions.sum, scans.generic_scan = watched_reduction(watch, usual_sum), watched_scan(watch, usual_scan)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        reductions.sum, scans.generic_scan = usual_sum, usual_scan
        for name in replaced:
            vars(builder).pop(name, None)


def watch_kernel(
    watch: Watch,  # filled in, as far as the kernel comes
    kernel: Any,
    others: dict[str, Any],  # sizes and constants, by name
) -> Watch:
    "Launch a kernel on the interpreter; every array is its argument `NAME_ptr`."
    pointers = {f"{name}_ptr": tensor for name, tensor in watch.memory.tensors.items()}
    with watching(watch):
        kernel[watch.grid](**pointers, **others)
    return watch
