"""Which classes a step of a head scores: a keyed permutation draws them, and columns say where each row's class stands."""

import math
from typing import Literal, NamedTuple, Optional, TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedloss.core.checks import check_flags, check_target, expect, expect_tensor, is_empty, is_integer, is_number
from fusedloss.core.operators import operator
from fusedloss.core.steps import SeedAndStep
from fusedloss.core.triton import has_kernel, jit, launch_kernel, on_device, tl


MASK, GOLDEN = 2**32 - 1, 0x9E3779B9  # 32 bits; 2³² over the golden ratio
ROUNDS = 6


def mix(h: Tensor) -> Tensor:  # int64 holding 32 bits
    "Scramble 32 bits: shifts and odd multiplications, each of which can be undone."
    h = (h ^ (h >> 16)) * 0x7FEB352D & MASK
    h = (h ^ (h >> 15)) * 0x846CA68B & MASK
    return h ^ (h >> 16)


def plain_add_word(key: Tensor, word: Tensor) -> Tensor:
    "64 bits more in a key of 32."
    return mix(mix(key ^ (word & MASK)) ^ (word >> 32))


def plain_block_key(seed: Tensor, step: Tensor, block: Tensor) -> Tensor:
    "32 bits for each block of classes, from all 64 of seed, step and block."
    key = torch.full_like(seed, GOLDEN)
    for word in (seed, step, block):
        key = plain_add_word(key, word)
    return key


def shuffle(
    # int64 below 2^bits; `bits` is even
    j: Tensor,
    key: Tensor,
    bits: int,
    back: bool = False,
) -> Tensor:  # int64 below 2^bits
    "A permutation of 0 .. 2^bits − 1 that the key picks, or its inverse: a Feistel network."
    half = bits // 2
    left, right = j >> half, j & (2**half - 1)
    if back:
        left, right = right, left
    for r in reversed(range(ROUNDS)) if back else range(ROUNDS):
        scrambled = mix((key + r * GOLDEN & MASK) ^ right) & (2**half - 1)
        left, right = right, left ^ scrambled
    return (right << half | left) if back else (left << half | right)


class Strata(NamedTuple):
    "How many classes are drawn of how many: blocks of 2^bits classes."

    bits: int
    drawn: int  # of each block
    extra_chance: int  # of one more, out of 2³²

    @property
    def slots(self) -> int:  # of a block; the last one may stay empty
        return self.drawn + (self.extra_chance > 0)

    def constants(self) -> dict[str, int]:
        "What the kernels are compiled for."
        return dict(DRAWN=self.drawn, EXTRA_CHANCE=self.extra_chance, SLOTS=self.slots, BITS=self.bits, ROUNDS=ROUNDS)


def strata_of(rate: float) -> Strata:
    "Blocks so large that some 64 to 256 of their classes are drawn."
    bits = 2 * min(15, math.ceil(math.log(64 / rate, 4) - 1e-9))
    drawn, part = divmod(rate * 2**bits, 1)
    return Strata(bits, int(drawn), round(part * 2**32))


def plain_drawn_count(key: Tensor, s: Strata) -> Tensor:
    "How many classes a block draws."
    return s.drawn + (mix(key ^ 0x5A5A5A5A) < s.extra_chance).long()


def plain_draw(seed: Tensor, step: Tensor, s: Strata, start: int, stop: int) -> Tensor:
    "Classes drawn of `start` to `stop`, -1 in empty slots; `[blocks · slots]`."
    first, last = start >> s.bits, -(-stop >> s.bits)
    if not s.slots:
        return seed.new_empty(0)
    block = torch.arange(first, last, device=seed.device)[:, None]
    key, slot = plain_block_key(seed, step, block), torch.arange(s.slots, device=seed.device)
    chosen = (block << s.bits) + shuffle(slot, key, s.bits)
    lives = (slot < plain_drawn_count(key, s)) & (chosen >= start) & (chosen < stop)
    return torch.where(lives, chosen, -1).flatten()


def plain_find_slot(y: Tensor, seed: Tensor, step: Tensor, s: Strata, start: int) -> Tensor:
    "Where the draw has the class `y`, or -1."
    block = y >> s.bits
    key = plain_block_key(seed, step, block)
    slot = shuffle(y & (2**s.bits - 1), key, s.bits, back=True)
    at = (block - (start >> s.bits)) * s.slots + slot
    return torch.where(slot < plain_drawn_count(key, s), at, -1)


@jit
def mix_bits(h):
    "`mix` of uint32."
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@jit
def add_word(key, word):
    "`plain_add_word`: 64 bits more in a key."
    key = mix_bits(key ^ (word & 0xFFFFFFFF).to(tl.uint32))
    return mix_bits(key ^ (word >> 32).to(tl.uint32))


@jit
def block_key(seed_ptr, step_ptr, block, B: tl.constexpr):
    "`plain_block_key` of blocks [B]."
    key = add_word(tl.full([B], 0x9E3779B9, tl.uint32), tl.load(seed_ptr))
    return add_word(add_word(key, tl.load(step_ptr)), block)


@jit
def drawn_count(key, DRAWN: tl.constexpr, EXTRA_CHANCE: tl.constexpr, B: tl.constexpr):
    "`plain_drawn_count` keys [B]."
    drawn = tl.full([B], DRAWN, tl.uint32)
    if EXTRA_CHANCE > 0:
        more = mix_bits(key ^ 0x5A5A5A5A).to(tl.int64) < EXTRA_CHANCE
        drawn = tl.where(more, drawn + 1, drawn)
    return drawn


@jit
def draw_kernel(
    # [total]; [total] or None
    out_ptr,
    shift_ptr,
    seed_ptr,
    step_ptr,
    # chosen classes count from `begin`
    first,
    start,
    stop,
    total,
    begin,
    drawn_shift,
    DRAWN: tl.constexpr,
    EXTRA_CHANCE: tl.constexpr,
    SLOTS: tl.constexpr,
    BITS: tl.constexpr,
    ROUNDS: tl.constexpr,
    B: tl.constexpr,
):
    at = tl.program_id(0) * B + tl.arange(0, B)
    block, slot = first + (at // SLOTS).to(tl.int64), (at % SLOTS).to(tl.uint32)  # [B]  ①
    key = block_key(seed_ptr, step_ptr, block, B)  # [B]  ②
    HALF: tl.constexpr = BITS // 2
    SIDE: tl.constexpr = 2**HALF - 1
    left, right = slot >> HALF, slot & SIDE  # ③
    turn = key
    for r in tl.static_range(ROUNDS):
        new = left ^ (mix_bits(turn ^ right) & SIDE)
        left = right
        right = new
        turn += 0x9E3779B9
    chosen = (block << BITS) + (left << HALF | right).to(tl.int64)  # [B]  ④
    lives = (slot < drawn_count(key, DRAWN, EXTRA_CHANCE, B)) & (chosen >= start) & (chosen < stop)
    tl.store(out_ptr + at, tl.where(lives, chosen - begin, -1), mask=at < total)  # ⑤
    if shift_ptr is not None:
        tl.store(shift_ptr + at, tl.where(lives, drawn_shift, -float("inf")), mask=at < total)


def draw(seed: Tensor, step: Tensor, s: Strata, start: int, stop: int) -> Tensor:
    "`plain_draw`, by the kernel where there is one."
    if not has_kernel(seed):
        return plain_draw(seed, step, s, start, stop)
    first = start >> s.bits
    total = ((-(-stop >> s.bits)) - first) * s.slots
    out = seed.new_empty(total)
    if not total:
        return out
    with on_device(seed):
        launch_kernel(
            draw_kernel,
            (-(-total // 256),),
            out,
            None,
            seed,
            step,
            first,
            start,
            stop,
            total,
            0,
            0.0,
            **s.constants(),
            B=256,
        )
    return out


def check_bounds(**bounds: int):
    "`ValueError` naming the first that is no number of classes."
    for name, at in bounds.items():
        expect(is_integer(at) and at >= 0, name, "an integer not below 0", lambda: repr(at))


class NegativeSampler(SeedAndStep):
    "Which classes are scored beside the batch's own: a function of seed, step and class."

    def __init__(
        self,
        rate: float | Literal["positives"],  # of the classes, in (0, 1]; or the batch's alone
        seed: int = 0,  # of the draws
        log_q: bool = False,  # correct the sum for the classes that were not drawn
    ):
        named = rate == "positives"
        expect(named or is_number(rate) and 0 < rate <= 1, "rate", "a number in (0, 1], or 'positives'", repr(rate))
        expect(type(seed) is int and 0 <= seed < 2**63, "seed", "0 to 2⁶³ − 1", repr(seed))
        check_flags(log_q=log_q)
        super().__init__(seed)
        self.rate, self.log_q = 0.0 if named else float(rate), bool(log_q)
        self.strata = Strata(0, 0, 0) if named else strata_of(self.rate)

    def forward(
        self,
        stop: int,  # the class after the last
        start: int = 0,  # the first class; a rank draws from its own
    ) -> Tensor:  # int64, -1 in empty slots
        "This step's classes among `start` to `stop`."
        check_bounds(stop=stop, start=start)
        return draw(self.seed, self.step, self.strata, start, stop)

    def find(
        self,
        y: Tensor,  # classes
        start: int = 0,  # as in the call
    ) -> Tensor:  # int64 of y's shape
        "Where `forward` has the classes `y`, or -1."
        check_bounds(start=start)
        expect_tensor("y", y)
        check_target(y, y.shape, self.seed.device, "mean", "y")
        return plain_find_slot(y, self.seed, self.step, self.strata, start)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}, log_q={self.log_q}"

    if TYPE_CHECKING:
        __call__ = forward


def first_occurrence(y: Tensor) -> Tensor:  # [N], int64
    "For each row the first row with the same label."
    order = y.argsort(stable=True)
    ordered, n = y[order], torch.arange(y.shape[0], device=y.device)
    fresh = ordered != ordered.roll(1)
    start = torch.where(fresh | (n == 0), n, 0).cummax(0).values
    return torch.empty_like(y).scatter_(0, order, order[start])


class Columns(NamedTuple):
    "The classes that are scored, a column each, T of them; and what is scored of the batch."

    w_rows: Optional[Tensor]  # [T] classes, -1 in dead columns; None for all V
    target_column: Tensor  # [N], each row's column; -1 without a label
    shift: Optional[Tensor]  # [T], added to scores: -inf in dead columns
    grad_index: Optional[Tensor]  # [T] as w_rows, but dead columns name a class that is alive
    x_rows: Tensor  # [N], the row's own number; -1 without a label
    loss_weight: Tensor  # [N], of its loss in the mean: 0 if ignored, NaN without a class here


def live_index(rows: Tensor) -> Tensor:  # [T]
    "Rows, where the dead name one that lives; 0 if none does."
    if is_empty(rows):
        return rows.clone()
    return torch.where(rows < 0, rows.amax().clamp(min=0), rows)


def plain_labels(
    y: Tensor,  # [N]
    ignore_index: int,
    start: int,  # the first class
    stop: int,  # the class after the last
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # y or -1, x_rows, loss_weight: [N] each
    "What labels say of their rows."
    wanted, n = y != ignore_index, torch.arange(y.shape[0], device=y.device)
    known = wanted & (y >= start) & (y < stop)
    loss_weight = known.to(dtype).masked_fill_(wanted ^ known, torch.nan) / wanted.sum().clamp(min=1)
    none = y.new_full((), -1)
    return torch.where(known, y, none), torch.where(known, n, none), loss_weight


def own_columns(
    y: Tensor,  # [N], -1 without a label
    drawn: Tensor,  # [K]
    slot: Tensor,  # [N], y's place in it or -1
) -> tuple[Tensor, Tensor]:  # w_rows, target_column of `Columns`
    "Columns for what was drawn, then one for each row, used if its class has none."
    n, k = torch.arange(y.shape[0], device=y.device), drawn.shape[0]
    own_column = k + first_occurrence(y)
    target_column = torch.where(y >= 0, torch.where(slot >= 0, slot, own_column), -1)
    w_rows = torch.cat([drawn, torch.where(target_column == k + n, y, -1)])
    return F.pad(w_rows, (0, -w_rows.shape[0] % 8), value=-1), target_column


def plain_columns(
    y: Tensor,  # [N]
    seed: Tensor,
    step: Tensor,
    s: Strata,
    start: int,  # the first class; what is returned counts from it
    stop: int,  # the class after the last
    ignore_index: int,
    drawn_shift: float,  # added to the scores of those that were drawn
    dtype: torch.dtype,  # of `shift` and `loss_weight`
) -> Columns:
    "Columns of a step, in PyTorch."
    y, x_rows, loss_weight = plain_labels(y, ignore_index, start, stop, dtype)
    drawn = plain_draw(seed, step, s, start, stop)
    slot = plain_find_slot(y.clamp(min=start), seed, step, s, start)
    w_rows, target_column = own_columns(y, drawn, slot)
    shift = w_rows.new_full(w_rows.shape, drawn_shift, dtype=dtype)
    shift.masked_fill_(w_rows < 0, -torch.inf)
    present = torch.zeros(len(w_rows) + 1, dtype=torch.bool, device=y.device)
    present[target_column] = True  # -1 is the spare place at the end
    if drawn_shift:
        shift = torch.where(present[:-1], 0.0, shift)  # the batch's are certain
    w_rows = torch.where(w_rows < 0, -1, w_rows - start)
    return Columns(w_rows, target_column, shift, live_index(w_rows), x_rows, loss_weight)


@jit
def unshuffle(y, key, BITS: tl.constexpr, ROUNDS: tl.constexpr):
    "Where in its block a class [B] stands: `shuffle`, backwards."
    HALF: tl.constexpr = BITS // 2
    SIDE: tl.constexpr = 2**HALF - 1
    j = (y & (2**BITS - 1)).to(tl.uint32)
    left, right = j >> HALF, j & SIDE
    turn = key + ((ROUNDS - 1) * 0x9E3779B9 & 0xFFFFFFFF)
    for r in tl.static_range(ROUNDS):
        new = right ^ (mix_bits(turn ^ left) & SIDE)
        right = left
        left = new
        turn -= 0x9E3779B9
    return left << HALF | right


@jit
def load_classes(y_ptr, at, N, ignore_index, start, stop):
    "Labels at `at` [B], whether each is wanted, and whether it is one of these classes."
    y = tl.load(y_ptr + at, mask=at < N, other=0)
    wanted = (at < N) & (y != ignore_index)
    return y, wanted, wanted & (y >= start) & (y < stop)


@jit
def live_class(w_rows_ptr, y_ptr, N, K, ignore_index, start, stop, B: tl.constexpr):
    "A class that lives: of those that were drawn, else of the batch; 0 if there is none."
    live_row, at = tl.full([], -1, tl.int64), 0
    while (live_row < 0) & (at < K):
        here = at + tl.arange(0, B)
        live_row = tl.max(tl.load(w_rows_ptr + here, mask=here < K, other=-1))
        at += B
    at = 0
    while (live_row < 0) & (at < N):
        y, _, known = load_classes(y_ptr, at + tl.arange(0, B), N, ignore_index, start, stop)
        live_row = tl.max(tl.where(known, y - start, -1))
        at += B
    return tl.maximum(live_row, 0)


@jit
def columns_kernel(
    # [N]; [T] each, of which K were drawn
    y_ptr,
    w_rows_ptr,
    shift_ptr,
    grad_index_ptr,
    # [N] each; [1] each
    target_column_ptr,
    x_rows_ptr,
    loss_weight_ptr,
    seed_ptr,
    step_ptr,
    # `first` block of the classes
    ignore_index,
    first,
    start,
    stop,
    K,
    N,
    T,
    DRAWN: tl.constexpr,
    EXTRA_CHANCE: tl.constexpr,
    SLOTS: tl.constexpr,
    BITS: tl.constexpr,
    ROUNDS: tl.constexpr,
    B: tl.constexpr,
    BIG: tl.constexpr,
):
    labels = tl.cdiv(T - K, B)
    live_row = live_class(w_rows_ptr, y_ptr, N, K, ignore_index, start, stop, BIG)
    if tl.program_id(0) >= labels:  # columns that were drawn
        column = (tl.program_id(0) - labels) * BIG + tl.arange(0, BIG)
        row = tl.load(w_rows_ptr + column, mask=column < K, other=-1)
        tl.store(grad_index_ptr + column, tl.where(row < 0, live_row, row), mask=column < K)
    else:
        batch_rows = tl.program_id(0) * B + tl.arange(0, B)
        y, wanted, known = load_classes(y_ptr, batch_rows, N, ignore_index, start, stop)
        earliest, n = batch_rows, tl.zeros([B], tl.int32)
        for begin in range(0, N, B):
            other = begin + tl.arange(0, B)
            z, counts, _ = load_classes(y_ptr, other, N, ignore_index, start, stop)
            same = (y[:, None] == z[None, :]) & (other < N)[None, :]
            earliest = tl.minimum(earliest, tl.min(tl.where(same, other[None, :], N), 1))
            n += counts.to(tl.int32)
        target_column = tl.where(known, K + earliest, -1).to(tl.int64)
        if SLOTS > 0:
            key = block_key(seed_ptr, step_ptr, tl.where(known, y >> BITS, 0), B)
            slot = unshuffle(y, key, BITS, ROUNDS)
            drawn = known & (slot < drawn_count(key, DRAWN, EXTRA_CHANCE, B))
            drawn_column = ((y >> BITS) - first) * SLOTS + slot.to(tl.int64)
            target_column = tl.where(drawn, drawn_column, target_column)
        loss_weight = tl.where(known, 1.0, tl.where(wanted, float("nan"), 0.0))
        loss_weight = tl.div_rn(loss_weight, tl.maximum(tl.sum(n), 1).to(tl.float32))
        tl.store(target_column_ptr + batch_rows, target_column, mask=batch_rows < N)
        tl.store(x_rows_ptr + batch_rows, tl.where(known, batch_rows, -1), mask=batch_rows < N)
        tl.store(loss_weight_ptr + batch_rows, loss_weight, mask=batch_rows < N)
        own_column, in_columns = known & (target_column == K + batch_rows), K + batch_rows < T
        tl.store(w_rows_ptr + K + batch_rows, tl.where(own_column, y - start, -1), mask=in_columns)
        tl.store(grad_index_ptr + K + batch_rows, tl.where(own_column, y - start, live_row), mask=in_columns)
        tl.store(shift_ptr + K + batch_rows, tl.where(own_column, 0.0, -float("inf")), mask=in_columns)
        was_drawn = known & (target_column < K)
        tl.store(shift_ptr + target_column, 0.0, mask=was_drawn)  # the batch's classes were certain


def launch_columns(
    y: Tensor,
    seed: Tensor,
    step: Tensor,
    s: Strata,
    start: int,
    stop: int,
    ignore_index: int,
    drawn_shift: float,
    dtype: torch.dtype,
) -> Columns:
    "`plain_columns` by the kernels."
    n, first, new = len(y), start >> s.bits, y.new_empty
    k = (-(-stop >> s.bits) - first) * s.slots
    t = -(-(k + n) // 8) * 8
    c = Columns(new(t), new(n), new(t, dtype=dtype), new(t), new(n), new(n, dtype=dtype))
    with on_device(y):
        if k:
            launch_kernel(
                draw_kernel,
                (-(-k // 256),),
                c.w_rows,
                c.shift,
                seed,
                step,
                first,
                start,
                stop,
                k,
                start,
                drawn_shift,
                **s.constants(),
                B=256,
            )
        if t:
            launch_kernel(
                columns_kernel,
                (-(-(t - k) // 64) + -(-k // 1024),),
                y,
                c.w_rows,
                c.shift,
                c.grad_index,
                c.target_column,
                c.x_rows,
                c.loss_weight,
                seed,
                step,
                ignore_index,
                first,
                start,
                stop,
                k,
                n,
                t,
                **s.constants(),
                B=64,
                BIG=1024,
            )
    return c


def sample_columns(
    y: Tensor,
    seed: Tensor,
    step: Tensor,
    s: Strata,
    start: int,
    stop: int,
    ignore_index: int,
    drawn_shift: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    "`Columns` by kernels or PyTorch; float64 keeps the digits of `drawn_shift`."
    make = launch_columns if has_kernel(y) and dtype != torch.float64 else plain_columns
    return tuple(make(y, seed, step, s, start, stop, ignore_index, drawn_shift, dtype))


def fake_columns(y, seed, step, s, start, stop, ignore_index, drawn_shift, dtype):
    "The shapes of `sample_columns`'s results."
    blocks = -(-stop >> s.bits) - (start >> s.bits)
    n, new = y.shape[0], y.new_empty
    t = (blocks * s.slots + n + 7) // 8 * 8
    return new(t), new(n), new(t, dtype=dtype), new(t), new(n), new(n, dtype=dtype)


sampled_columns = operator("sampled_columns", sample_columns, fake=fake_columns)


def step_columns(
    y: Tensor,  # [N]
    ignore_index: int,
    n_classes: int,
    sampler: Optional[NegativeSampler],
    dtype: torch.dtype,
    start: int = 0,  # a rank's first class
) -> Columns:
    "The columns of a step; rows have a label among `n_classes` from `start` on, or none."
    stop = start + n_classes
    if sampler is None:
        y, x_rows, loss_weight = plain_labels(y, ignore_index, start, stop, dtype)
        return Columns(None, torch.where(y < 0, -1, y - start), None, None, x_rows, loss_weight)
    drawn_shift = -math.log(sampler.rate) if sampler.log_q and sampler.rate else 0.0
    with torch.no_grad():  # integers: the operator need not look for what has a gradient
        return Columns(
            *sampled_columns(
                y, sampler.seed, sampler.step, sampler.strata, start, stop, ignore_index, drawn_shift, dtype
            )
        )
