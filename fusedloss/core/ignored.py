"""Hidden states without those of ignored tokens, in one copy and one launch."""

import functools
from typing import Optional

import torch
from torch import Tensor

from fusedloss.core.cuda import Bound, cuda_kernel
from fusedloss.core.devices import device_of, Implementation
from fusedloss.core.operators import observed
from fusedloss.core.reference import counted_rows
from fusedloss.core.triton import on_device

ZERO_ROWS = Implementation(
    "hidden states, zeros for ignored tokens", "cuda/zero_rows.cu", ("nvidia",), "two operations of PyTorch"
)
THREADS = 256
VECTOR = 16  # bytes that a thread writes at once


@functools.lru_cache(maxsize=4096)
def zero_rows(device: int, rows: int, row_bytes: int, ignore_index: int) -> Optional[Bound]:
    "What writes zeros, on the current device; None where the kernel cannot be had."
    if row_bytes % VECTOR or ZERO_ROWS.lacks(device_of(device)):
        return None
    kernel = cuda_kernel("zero_rows", device)
    return kernel and Bound(kernel, device, rows, THREADS, 2, row_bytes // VECTOR, ignore_index)


def counted_copy(
    x: Tensor,  # [N,H]
    y: Tensor,  # [N]
    ignore_index: int,
) -> Tensor:
    "`counted_rows` for losses in which ignored tokens have no gradient: that of the copy is then that of `x`."
    if not (x.is_cuda and y.dtype == torch.int64 and y.is_contiguous() and len(x)) or observed():
        return counted_rows(x, y, ignore_index)
    with on_device(x):
        launch = zero_rows(x.get_device(), len(x), x.shape[1] * x.element_size(), ignore_index)
        if launch is None:
            return counted_rows(x, y, ignore_index)
        x = x.clone(memory_format=torch.contiguous_format)
        launch(x, y)
    return x
