"""A promise of how many tokens count, `max_valid`: which rows enter, where results go, and what happens if it is broken."""

from typing import Optional

import torch
from torch import Tensor

from fusedloss.core.checks import expect, may_look
from fusedloss.core.options import CrossEntropyStats


def packed_rows(
    y: Tensor,  # [N]
    ignore_index: int,
    max_valid: Optional[int],
) -> Optional[Tensor]:  # int64, or None for all rows in their order
    "The rows that enter the products, all valid ones among them, without asking the device."
    if y.is_cpu:
        valid = y != ignore_index
        return None if valid.all() else valid.nonzero()[:, 0]
    if max_valid is None or max_valid >= len(y):
        return None
    # of no row, a broken promise would leave no gradient that could be NaN
    return (y == ignore_index).byte().argsort(stable=True)[: max(max_valid, 1)]


def put_back(part: Tensor, order: Optional[Tensor], n: int, blank: float = 0.0) -> Tensor:
    "Rows `part [K,...]` where they came from among `n`; `blank` elsewhere."
    if order is None:
        return part
    return part.new_full((n, *part.shape[1:]), blank).index_copy_(0, order, part)


def check_promise(
    target: Tensor,  # any shape
    ignore_index: int,
    max_valid: Optional[int],
):
    "`ValueError` if more tokens are valid than was promised; on GPUs if FUSEDLOSS_DEBUG=1."
    if max_valid is None or not may_look(target):
        return
    valid = int((target != ignore_index).sum())
    expect(valid <= max_valid, "max_valid", f"at least the {valid} tokens that are not ignored", max_valid)


def hold_promise(
    result: Tensor | tuple[Tensor, CrossEntropyStats],  # a loss, and statistics beside it
    target: Tensor,
    ignore_index: int,
    max_valid: Optional[int],
) -> Tensor | tuple[Tensor, CrossEntropyStats]:
    "`result`; where more tokens are valid than was promised, NaN, and so are its gradients."
    if max_valid is None:
        return result
    loss, *stats = (result,) if isinstance(result, Tensor) else result
    broken = (target != ignore_index).sum() > max_valid
    factor = torch.where(broken, torch.nan, 1.0).to(loss.dtype)
    if not stats:
        return loss * factor
    lse, entropy, *others = stats[0]
    return loss * factor, CrossEntropyStats(lse * factor, entropy * factor, *others)
