"""Sums of a matrix's columns."""

from typing import Optional

import torch
from torch import Tensor

from fusedloss.core.checks import acc_dtype
from fusedloss.core.products import wide
from fusedloss.core.triton import has_kernel, jit, launch_kernel, on_device, tl


def reference_column_sums(a: Tensor, factors: Tensor) -> Tensor:  # [R,C], [R] to [C]
    "`launch_column_sums` with factors, in PyTorch."
    return factors @ torch.where(factors[:, None] == 0, 0.0, wide(a))  # 0 · NaN would be NaN


@jit
def column_sums_kernel(
    a_ptr,
    factor_ptr,
    out_ptr,  # [R,C], [R] or None, [parts,C]
    R,
    C,
    each,
    a_stride,
    BR: tl.constexpr,
    BC: tl.constexpr,  # each: rows of a part
):
    cols, first = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1) * each
    end = tl.minimum(first + each, R)
    total = tl.zeros([BR, BC], tl.float32)
    for row in range(first, end, BR):
        rows = row + tl.arange(0, BR)
        inside = (rows < end)[:, None] & (cols < C)[None]
        at = a_ptr + rows.to(tl.int64)[:, None] * a_stride + cols[None]
        if factor_ptr is None:
            total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        else:
            f = tl.load(factor_ptr + rows, mask=rows < end, other=0.0)[:, None]
            total += f * tl.load(at, mask=(f != 0) & inside, other=0.0).to(tl.float32)
    to = out_ptr + tl.program_id(1).to(tl.int64) * C + cols
    tl.store(to, tl.sum(total, 0), mask=cols < C)


def column_parts(rows: int, columns: int, BR: int = 32, BC: int = 128, programs: int = 1024) -> int:
    "Parts of the rows whose sums are apart: at most so many programs, of whole blocks of BR rows."
    return min(-(-rows // BR), max(1, programs // -(-columns // BC)))


def launch_column_sums(
    a: Tensor,  # [R,C]
    factors: Optional[Tensor] = None,  # fp32 [R]; None: 1
    BR: int = 32,
    BC: int = 128,
    programs: int = 1024,
) -> Tensor:  # [C]
    "Each column's sum of a · factor of its row, in fp32; a row whose factor is 0 is not read."
    (R, C), n_parts = a.shape, max(1, column_parts(*a.shape, BR, BC, programs))
    each = -(-R // (BR * n_parts)) * BR
    parts = a.new_empty((n_parts, C), dtype=torch.float32)
    with on_device(a):
        grid = -(-C // BC), n_parts
        launch_kernel(column_sums_kernel, grid, a, factors, parts, R, C, each, a.stride(0), BR=BR, BC=BC)
    return parts[0] if n_parts == 1 else parts.sum(0)


def column_sums(a: Tensor) -> Tensor:  # [R,C] to [C]
    "Each column's sum, in `acc_dtype`. A GPU's kernel holds a few rows; PyTorch's own sum of many columns can hold hundreds."
    by_kernel = has_kernel(a) and a.stride(1) == 1
    return launch_column_sums(a) if by_kernel else a.sum(0, dtype=acc_dtype(a.dtype))
