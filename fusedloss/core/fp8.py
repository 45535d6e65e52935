"""What a loss with backward matmuls in FP8 keeps apart and how it cuts its matrices: numbers that its plan and its kernels share."""

import functools
from typing import NamedTuple, Optional

from fusedloss.core.devices import Device
from fusedloss.core.rates import guessed_machine, H200, listed_machine, Machine


TOP = 448.0  # the largest number of e4m3
HEAVY = 1 / 252  # a probability above it is heavy; fewer than 253 of a row can be, though each may have been rounded up
LISTED = 256  # entries of a row that are kept apart, at most: the target and what is heavy
UNIT = TOP / HEAVY  # what multiplies a light probability
BUDGET = (
    2**30 + 2**26
)  # bytes beyond the gradients, unless the caller says; or as much as half of bf16 logits and what goes with them

LAUNCH_SECONDS = 4e-6  # of a launch, to rank cuts
TILES = ((128, 256), (128, 160), (128, 128), (112, 128), (96, 128))  # that cuBLAS chooses from
ALIGNMENT = 128  # tokens of a chunk are a multiple of it
TOKENS = 256  # that the exponentials' kernel takes together: a chunk without them all leaves multiprocessors idle
SLAB_ALIGNMENT = 2048  # and classes of a slab


class Sizes(NamedTuple):
    "What a cut depends on."

    n: int  # tokens
    h: int  # features
    v: int  # classes
    need_x: bool
    need_w: bool
    grad_size: int  # bytes of a number of dw
    row: int  # bytes of a token's exponentials
    forward: bool = False  # the forward matmul is in FP8 too


class Cut(NamedTuple):
    "How tokens and classes are cut."

    group: int  # tokens whose share of dw is made at once
    rows: int  # tokens of a chunk, whose exponentials stand together
    slab: int  # classes whose probabilities are rounded to FP8 at a time
    fresh: bool = False  # w is rounded slab by slab in each chunk; else once, and stands until the last chunk

    def keeps(self, s: Sizes) -> bool:
        "Whether probabilities of all classes stand until their group has passed; else each slab's share of dw is made at once."
        return self.group > self.rows or self.slab >= s.v

    def waits(self, s: Sizes) -> bool:
        "Whether dw is made last, so that its memory serves for others until then."
        return s.need_w and self.group >= s.n and self.keeps(s)


def whole_blocks(size: int, block: int = 16) -> int:
    "A size rounded up to blocks: FP8 matmuls take sixteen bytes at a time."
    return -(-size // block) * block


def pieces(c: Cut, s: Sizes) -> list[int]:
    "Bytes of what stands while chunks pass, in the order in which it is placed: exponentials, w in FP8, straight and transposed, probabilities of a slab."
    turned, slab = whole_blocks(c.slab if c.fresh else s.v), whole_blocks(c.slab)
    return [c.rows * whole_blocks(s.row, 32), s.v * s.h * s.forward, turned * s.h * s.need_x, c.rows * slab * s.need_x]


def beyond(sizes: list[int], own: int) -> int:
    "Bytes of the pieces that do not fit into so many bytes, each placed where there is room."
    total = 0
    for size in sizes:
        size = whole_blocks(size, 256)
        total, own = (total, own - size) if size <= own else (total + size, own)
    return total


def added_classes(
    h: int,
    v: int,  # classes whose shares of dw are added one after another
) -> int:
    "Classes whose share is made at once: equal parts, of at most 36 MiB in 16 bits, which stay in the L2 cache."
    most = max(256, 9 * 2**21 // max(h, 1) // 256 * 256)
    return whole_blocks(-(-v // max(1, -(-v // most))), 256)


def held_bytes(c: Cut, s: Sizes) -> int:
    "Bytes beyond the gradients at the peak."
    group, listed = whole_blocks(min(c.group, s.n)), 8 * LISTED * s.n
    standing = beyond(pieces(c, s), s.v * s.h * s.grad_size if c.waits(s) else 0)
    turned = (s.v if c.keeps(s) else c.slab) * group * s.need_w
    dx = 4 * s.h * c.rows * (1 + (c.slab < s.v)) * s.need_x
    added = added_classes(s.h, s.v if c.keeps(s) else c.slab)
    dw = (s.h * group + s.grad_size * s.h * min(s.v, added) * (c.group < s.n)) * s.need_w
    standing += s.n * s.h * s.forward
    passing = standing + turned + (max(dx, dw) if c.keeps(s) else dx + dw)
    return listed + max(passing, (3 * listed + 2 * s.n * s.h) * s.need_w)


@functools.cache
def ranking_machine(device: Device) -> Machine:
    "The rates that rank cuts: of the board, measured or not, so that a device cuts alike in each process; the H200's on a CPU."
    return H200 if device.vendor == "none" else listed_machine(device) or guessed_machine(device)


def busy_share(c: Cut, s: Sizes, by: Machine) -> float:
    "Of the multiprocessors, how many the matmul of a chunk's dx keeps busy on average."
    count = by.device.multiprocessors
    rounds = lambda tile: -(-(-(-c.rows // tile[0]) * -(-s.h // tile[1])) // count)
    return max(c.rows * s.h / (tile[0] * tile[1] * count * rounds(tile)) for tile in TILES)


def lost_seconds(c: Cut, s: Sizes, by: Machine) -> float:
    "What a cut costs beside the matmuls: idle multiprocessors, sums that are read and written again, launches."
    seconds = 2.0 * s.n * s.v * s.h / (by.rates["bfloat16"] * by.fp8)  # of the matmul of dx
    idle = seconds * (1 / busy_share(c, s, by) - 1) * s.need_x
    idle += seconds * (1.0 if s.forward else by.fp8) * (whole_blocks(c.rows, TOKENS) / c.rows - 1)
    groups, chunks, slabs = -(-s.n // c.group), -(-s.n // c.rows), -(-s.v // c.slab)
    again = (groups - 1) * 2 * s.v * s.h * s.grad_size * s.need_w + (slabs - 1) * 12 * s.n * s.h * s.need_x
    again += 3 * s.v * s.h * (chunks - 1) * c.fresh
    together = s.v if c.keeps(s) else c.slab
    added = -(-s.v // together) * -(-together // added_classes(s.h, together))
    launches = chunks * (8 + 4 * slabs) + (groups - 1) * 2 * added
    return idle + again / by.bandwidth + launches * LAUNCH_SECONDS


def cuts(s: Sizes, single: bool) -> list[Cut]:
    "The cuts that are compared."
    most, found = max(s.n, 1), {}
    slabs = [min(s.v, whole_blocks(-(-s.v // parts), SLAB_ALIGNMENT)) for parts in (1, 2, 4, 8)]
    for groups in range(1, 2 if single else 33):
        group = whole_blocks(-(-most // groups), ALIGNMENT)
        for parts in range(1, 33):
            rows = min(most, whole_blocks(-(-group // parts), ALIGNMENT))
            for slab in slabs:
                cut = Cut(min(most, whole_blocks(group, rows)), rows, slab)
                found |= {cut: None} | ({cut._replace(fresh=True): None} if slab < s.v and s.need_x else {})
    return list(found)


@functools.lru_cache(maxsize=1024)
def plan_cut(
    s: Sizes,
    by: Machine,  # as `ranking_machine` has it
    budget: Optional[int] = None,  # bytes beyond the gradients
    single: bool = False,  # dw is to be rounded once
) -> Cut:
    "The cut that loses least time among those that fit; the smallest one, where none does."
    known = [(held_bytes(c, s), lost_seconds(c, s, by), c) for c in cuts(s, single)]
    most = budget or max(BUDGET, 2**26 + s.n * (s.v + s.h + 8 * LISTED)) + s.v * s.h * s.forward
    fit = [(seconds, c) for size, seconds, c in known if size <= most]
    return min(fit)[1] if fit else min(known)[2]
