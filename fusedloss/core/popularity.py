"""Negatives drawn by how popular their classes are, the same for a batch or others for each row, and how often each is expected."""

__all__ = ["PopularitySampler"]


import math
from typing import NamedTuple, TYPE_CHECKING

import torch
from torch import Tensor

from fusedloss.core.checks import check_flags, check_target, expect, expect_tensor, is_integer
from fusedloss.core.operators import smaller_size
from fusedloss.core.sampling import (
    Columns,
    live_index,
    own_columns,
    plain_add_word,
    plain_block_key,
    plain_labels,
)
from fusedloss.core.steps import SeedAndStep


def expected_draws(
    popularity: Tensor,  # [V] float64, above 0
    n: int,  # up to V
) -> Tensor:  # [V] float64
    "How often each class is drawn: proportional to its popularity, at most once, n in all."
    if n >= len(popularity):
        return torch.ones_like(popularity)
    sizes, order = (popularity / popularity.amax()).sort(descending=True)
    rest = sizes.flip(0).cumsum(0).flip(0)  # [V], sums of it and of all after it
    left = (n - torch.arange(len(sizes))).clamp(min=0)
    certain = int((sizes * left >= rest).long().cumprod(0).sum())
    draws = torch.ones_like(sizes)
    draws[certain:] = sizes[certain:] * ((n - certain) / rest[certain])
    return torch.empty_like(draws).scatter_(0, order, draws.clamp(max=1))


UNIT = 2**32  # of the line's length 1


def line_of(draws: Tensor, n: int) -> Tensor:  # [V]; pieces
    "Where each class ends on the line, int64; certain classes have no length."
    room = 1 - len(draws) / (max(n, 1) * UNIT)  # for lengths that are rounded up to one unit
    lengths = (draws * (UNIT * room)).long().clamp(min=1)
    return torch.where(draws < 1, lengths, 0).cumsum(0)


def check_popularity(popularity: Tensor, num_samples: int, seed: int):
    "`ValueError` for what classes cannot be drawn by."
    expect_tensor("popularity", popularity)
    expect(popularity.dim() == 1 and len(popularity) > 0, "popularity", "shape [V]", list(popularity.shape))
    kind = popularity.dtype
    expect(not kind.is_complex and kind != torch.bool, "popularity", "counts or probabilities", kind)
    expect(not popularity.is_meta, "popularity", "a tensor with numbers", "one on meta")
    positive = bool(((popularity > 0) & popularity.isfinite()).all())
    expect(
        positive,
        "popularity",
        "finite numbers above 0 (counts + 1, where some are 0)",
        f"{popularity.amin().item():g} to {popularity.amax().item():g}",
    )
    expect(
        type(num_samples) is int and 0 < num_samples <= len(popularity),
        "num_samples",
        f"an integer from 1 to {len(popularity)}, the classes",
        repr(num_samples),
    )
    expect(type(seed) is int and 0 <= seed < 2**63, "seed", "0 to 2⁶³ − 1", repr(seed))


class PopularitySampler(SeedAndStep):
    "Negatives by popularity, for a batch or for each row: a function of seed, step and row."

    def __init__(
        self,
        popularity: Tensor,  # [V], counts or probabilities, above 0; equal numbers: uniform
        num_samples: int,  # classes that are drawn, for the batch or for each of its rows
        *,
        each_row: bool = False,  # whether each row has negatives of its own
        log_q: bool = True,  # subtract from scores the log of how often their class is drawn
        seed: int = 0,  # of the draws
    ):
        check_popularity(popularity, num_samples, seed)
        check_flags(each_row=each_row, log_q=log_q)
        super().__init__(seed)
        self.num_classes, self.num_samples = len(popularity), num_samples
        self.each_row, self.log_q = bool(each_row), bool(log_q)
        with torch.device("cpu"):  # whatever the default device is
            draws = expected_draws(popularity.detach().double().cpu(), num_samples)
            certain = (draws >= 1).nonzero()[:, 0]
            self.pieces = num_samples - len(certain)
            self.tables = {"certain": certain, "line": line_of(draws, self.pieces)}
        for name in self.tables:
            self.register_buffer(name, None, persistent=False)
        self.place_tables()

    def place_tables(self) -> None:
        "Have the tables, which no checkpoint has, where seed and step are."
        for name, table in self.tables.items():
            self._buffers[name] = table.to(self.step.device)

    def _apply(self, *args, **options):
        super()._apply(*args, **options)
        self.place_tables()  # `to_empty` leaves anything
        return self

    def _load_from_state_dict(self, *args):
        was_deferred = self.line.is_meta
        super()._load_from_state_dict(*args)
        if was_deferred:
            self.place_tables()  # with `assign`, seed and step are on meta no more

    def forward(
        self,
        rows: int = 1,  # of the batch; 1 for a sample that all share
    ) -> Tensor:  # [rows, num_samples] int64, -1 in the place of a class that was missed
        "This step's classes."
        expect(is_integer(rows) and rows >= 0, "rows", "an integer not below 0", lambda: repr(rows))
        row = torch.arange(rows, device=self.line.device)[:, None]
        piece = torch.arange(self.pieces, device=row.device)
        point = (piece << 32) + plain_add_word(plain_block_key(self.seed, self.step, row), piece)
        drawn = torch.searchsorted(self.line, point, right=True)
        drawn = torch.where(drawn < self.num_classes, drawn, -1)
        return torch.cat([self.certain.expand(rows, -1), drawn], 1)

    def log_draws(
        self,
        classes: Tensor,  # int64, any shape
    ) -> Tensor:  # float64, 0 for classes that are certain
        "The log of how often each class is drawn in a step."
        expect_tensor("classes", classes)
        check_target(classes, classes.shape, self.line.device, "mean", "classes")
        at = classes.clamp(min=0, max=self.num_classes - 1)
        length = self.line[at] - torch.where(at > 0, self.line[(at - 1).clamp(min=0)], 0)
        return torch.where(length > 0, (length.double() / UNIT).log(), 0.0)

    def extra_repr(self) -> str:
        return f"num_samples={self.num_samples}, each_row={self.each_row}, log_q={self.log_q}"

    if TYPE_CHECKING:
        __call__ = forward


def drawn_shift(sampler: PopularitySampler, drawn: Tensor, dtype: torch.dtype) -> Tensor:
    "What is added to the scores of classes that were drawn; -inf where there is none."
    shift = -sampler.log_draws(drawn) if sampler.log_q else torch.zeros_like(drawn, dtype=torch.float64)
    return shift.masked_fill(drawn < 0, -torch.inf).to(dtype)


def target_shift(sampler: PopularitySampler, y: Tensor, dtype: torch.dtype) -> Tensor:  # [N]
    "What is added to the scores of the rows' own classes."
    if not sampler.log_q:
        return torch.zeros_like(y, dtype=dtype)
    return -sampler.log_draws(y).to(dtype)


def find_in(y: Tensor, drawn: Tensor) -> Tensor:  # [N], [K]
    "Where each class of y stands among those that were drawn, or -1."
    ordered, order = drawn.sort()
    at = torch.searchsorted(ordered, y).clamp(max=drawn.shape[0] - 1)
    return torch.where((ordered[at] == y) & (y >= 0), order[at], -1)


@torch.no_grad()
def shared_columns(
    y: Tensor,  # [N]
    ignore_index: int,
    sampler: PopularitySampler,
    dtype: torch.dtype,
) -> Columns:
    "Columns of a step whose rows share their negatives, the first `num_samples` columns."
    y, x_rows, loss_weight = plain_labels(y, ignore_index, 0, sampler.num_classes, dtype)
    drawn = sampler()[0]
    twice = (drawn == drawn.roll(1)) & (drawn >= 0) & (torch.arange(drawn.shape[0], device=y.device) > 0)
    shift = drawn_shift(sampler, drawn, dtype) + math.log(2) * twice.roll(-1).to(dtype)
    drawn, shift = drawn.masked_fill(twice, -1), shift.masked_fill(twice, -torch.inf)
    w_rows, target_column = own_columns(y, drawn, find_in(y, drawn))
    return Columns(w_rows, target_column, shift, live_index(w_rows), x_rows, loss_weight)


class RowDraws(NamedTuple):
    "What each row is scored against, and where the gradient's rows are."

    classes: Tensor  # [N, K + 1], -1 for none; the last is the row's own
    shift: Tensor  # [N, K], added to scores: -inf where there is none
    place: Tensor  # [N, K + 1], of each class among the gradient's rows
    w_rows: Tensor  # [T] classes, -1 in dead rows; else all different
    grad_index: Tensor  # [T] as w_rows, but dead rows name a class that is alive
    x_rows: Tensor  # [N], as in `Columns`
    loss_weight: Tensor  # [N], as in `Columns`


def distinct(classes: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:  # [T], and of its shape
    "The classes that occur, in order, then -1; and where each of them stands."
    ordered, order = classes.flatten().sort()
    fresh = (ordered != ordered.roll(1)) & (ordered >= 0)
    fresh[:1] = ordered[:1] >= 0
    rank = (fresh.cumsum(0) - 1).clamp(min=0)
    rows = ordered.new_full((smaller_size(ordered.shape[0], num_classes) + 1,), -1)
    rows[torch.where(fresh, rank, rows.shape[0] - 1)] = torch.where(fresh, ordered, -1)
    return rows[:-1], torch.empty_like(rank).scatter_(0, order, rank).view(classes.shape)


@torch.no_grad()
def row_draws(
    y: Tensor,  # [N]
    ignore_index: int,
    sampler: PopularitySampler,
    dtype: torch.dtype,
) -> RowDraws:
    "What a step scores whose rows have negatives of their own; a row's own class is none."
    y, x_rows, loss_weight = plain_labels(y, ignore_index, 0, sampler.num_classes, dtype)
    drawn = sampler(y.shape[0])
    drawn = torch.where((drawn == y[:, None]) | (y < 0)[:, None], -1, drawn)
    classes = torch.cat([drawn, y[:, None]], 1)
    w_rows, place = distinct(classes, sampler.num_classes)
    return RowDraws(classes, drawn_shift(sampler, drawn, dtype), place, w_rows, live_index(w_rows), x_rows, loss_weight)
