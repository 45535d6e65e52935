"""States, what enters them, and how a kernel holds them: what both losses over label sequences walk."""

import functools
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedloss.core.sequences import clamped_targets, Targets


def active(
    lengths: Optional[Tensor],  # [N]
    t: int,  # a step
) -> Tensor | bool:  # [N,1]
    "Which sequences take step t."
    return True if lengths is None else (t < lengths)[:, None]


def update_active(go, new, old):
    "`new`, but `old` where a sequence is over."
    return new if go is True else torch.where(go, new, old)


def interleave(
    y: Tensor,  # [N,L] labels
    blank: int,
) -> Tensor:  # [N,2L+1]
    "The symbol of each state: a blank before, between and after the labels."
    states = y.new_full((y.shape[0], 2 * y.shape[1] + 1), blank)
    states[:, 1::2] = y
    return states


def may_skip(
    states: Tensor,  # [N,S] of `interleave`
) -> Tensor:  # [N,S] bool
    "Where a path may come from two states before: at a label unlike the one before it."
    before = F.pad(states, (2, 0), value=-1)[:, :-2]
    return (before >= 0) & (states != before)  # a blank is always like the one before it


def may_end(
    S: int,
    lengths: Tensor,  # [N]
) -> Tensor:  # [N,S] bool
    "Where a path may end: in the last label, or in the blank after it."
    at = torch.arange(S, device=lengths.device)
    return (at <= 2 * lengths[:, None]) & (at >= 2 * lengths[:, None] - 1)


def predecessors(alpha, skip):
    "What arrives at each state [3,N,S]: from itself, from one before, from two before."
    one, two = (F.pad(alpha, (k, 0), value=-torch.inf)[:, :-k] for k in (1, 2))
    return torch.stack([alpha, one, two.masked_fill(~skip, -torch.inf)])


class Lattice(NamedTuple):
    "All that the loops know of a batch."

    states: Tensor  # [N,S]
    skip: Tensor  # [N,S] bool
    emitted: Tensor  # [T,N,S] float64
    frames: Tensor  # [N]
    lengths: Tensor  # [N]
    bad: Tensor  # [N] bool: targets or lengths that cannot be


def make_lattice(z: Tensor, p: Targets, blank: int) -> Lattice:
    "States and what they emit."
    y, frames, lengths, bad = clamped_targets(p, len(z), z.shape[2], blank)
    states = interleave(y, blank)
    emitted = z.gather(2, states.expand(len(z), -1, -1)).double()
    return Lattice(states, may_skip(states), emitted, frames, lengths, bad)


class ScanShape(NamedTuple):
    "How a sequence's states lie in registers."

    pairs: int  # of a blank and a label, in a lane
    ahead: int  # frames between renormalisations
    cluster: int  # blocks that share the sequence
    warps: int  # of a direction in a block
    strips: int = 1  # of the states: a block goes through them one after another

    @property
    def plane(self) -> int:  # pairs of a direction
        return 32 * self.pairs * self.warps * max(1, self.cluster // 2) * self.strips

    @property
    def threads(self) -> int:  # of a block
        return 32 * self.warps * (2 if self.cluster == 1 else 1)


@functools.lru_cache(maxsize=4096)
def scan_shape(
    longest: int,  # target
    clusters: bool,  # whether the device has them
) -> ScanShape:
    "The fewest blocks and states a lane that hold it, or strips that one block holds."
    ladder = [(1, 8, 1, 4), (2, 8, 1, 4), (4, 4, 1, 4), (4, 4, 1, 8)]
    if clusters:
        ladder = [(1, 8, 2, 8), (1, 8, 4, 8), (1, 8, 8, 8), (2, 8, 8, 8), (4, 4, 8, 8), (4, 4, 8, 16)]
    for pairs, ahead, cluster, most in ladder:
        warps = -(-(longest // (32 * pairs) + 1) // max(1, cluster // 2))
        warps = 1 << (warps - 1).bit_length()  # few sizes, few compilations
        if warps <= most:
            return ScanShape(pairs, ahead, cluster, warps)
    return ScanShape(4, 4, 1, 8, 1 << (longest // 1024).bit_length())


def strip_states(
    z: Tensor,  # on the device where they are wanted
    N: int,  # sequences
    T: int,  # frames
    s: ScanShape,
) -> Optional[Tensor]:  # states of 8 bytes; None for one strip
    "Memory for what one strip leaves to the next, and for the states of all at the middle."
    if s.strips == 1:
        return None
    return z.new_empty(N * (2 * s.strips * (T + 1) + 4 * s.plane), dtype=torch.int64)
