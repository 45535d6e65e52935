"""How a product is cut: tiles of a size that the shared memory of the GPU at hand holds, and the variants of a kernel that are timed."""

import functools
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from fusedloss.core.devices import Device, device_of, Implementation
from fusedloss.core.options import LossOptions
from fusedloss.core.tuning import fastest_variant


class Tiling(NamedTuple):
    "Tiles of BN × BV scores, BH features at a time; loaded by descriptors, or by pointers."

    desc: bool
    BN: int
    BV: int
    BH: int
    warps: int = 8
    stages: int = 3  # tiles of operands in flight
    group: int = 8  # tiles of tokens that share a walk over the classes


def shared_bytes(
    t: Tiling,
    d: Device,
    stores: bool = True,  # whether the kernel writes tiles of 16 bits
) -> int:
    "Bytes of shared memory that a kernel asks for, at most."
    major = d.capability[0]
    operands = 2 * t.BH * (t.BN + t.BV) * (t.stages - (major not in (9, 10)))
    stored = t.BN * t.BV * stores * t.desc  # half a tile
    if major == 10:
        stored = stored * 3 // 2  # on its way from tensor memory
    return operands + stored + 4 * t.warps * max(t.BN, t.BV) + 1024  # sums of warps; barriers


WIDE = Tiling(True, 128, 256, 64), Tiling(True, 128, 256, 32)  # the best that fits is taken
BUSY = Tiling(True, 128, 128, 64, stages=4), Tiling(True, 128, 128, 64)
POINTERS = (Tiling(False, 128, 128, 32),)


def cut(d: Device, desc: bool, busy: bool) -> Tiling:
    "Tiles for the kernels; `busy` if much is computed of each score, and wants registers."
    if d.vendor == "none":
        return Tiling(False, 16, 32, 32)  # the interpreter
    tilings = (BUSY if busy else WIDE) if desc else POINTERS
    fit = [t for t in tilings if shared_bytes(t, d) <= d.shared_memory]
    return fit[0] if fit else tilings[-1]


def deeper(
    t: Tiling,
    d: Device,
    stores: bool,  # as for `shared_bytes`
) -> tuple[int, ...]:
    "Other numbers of tiles in flight that may be faster, and fit."
    more = t._replace(stages=t.stages + 1)
    fits = more.stages <= 4 and shared_bytes(more, d, stores) <= d.shared_memory
    return (more.stages,) if fits else ()


def _tiles(desc: bool):
    "How a GPU's products are cut, in words."
    return lambda d: "{1}×{2}×{3}, {5} in flight".format(*cut(d, desc, False))


BY_DESCRIPTORS = Implementation(
    "products of scores, operands by descriptors",
    "lse_kernel, dz_kernel",
    ("nvidia", "tma"),
    "operands by pointers",
    _tiles(True),
)
BY_POINTERS = Implementation(
    "products of scores, operands by pointers", "lse_kernel, dz_kernel", ("gpu",), "PyTorch", _tiles(False)
)


def copyable(
    t: Tensor,  # [R,K]
    stride: int,  # elements from row to row
) -> bool:
    "Whether the copy engine takes tiles of a matrix like `t`, rows `stride` apart."
    return not BY_DESCRIPTORS.lacks(device_of(t)) and t.element_size() == 2 and stride > 0 and stride * 2 % 16 == 0


def describable(
    t: Tensor,  # [R,K]
) -> bool:
    "Whether a tensor descriptor can stand for `t`."
    return (
        t.numel() > 0
        and copyable(t, t.stride(0))
        and t.stride(1) == 1
        and t.stride(0) >= t.shape[1]
        and t.data_ptr() % 16 == 0
    )


def tiling_of(
    x: Tensor,  # [N,H]
    w: Tensor,  # [V,H]
    busy: bool = False,
) -> Tiling:
    "How the kernels cut x wᵀ, and how they load it."
    return cut(device_of(x), describable(x) and describable(w), busy)


def is_busy(o: LossOptions, extra: bool) -> bool:
    "Whether scores need more than an exponential each."
    return extra or o.softcap != 0 or o.label_smoothing > 0  # NaN is a cap that a compiler does not know


def multiprocessors(device: torch.device) -> int:
    "How many programs run at once."
    return device_of(device).multiprocessors


def run_length(
    n_tokens: int,  # N
    tiles_v: int,  # tiles in a row
    numbers: int = 2,  # fp32, that a run leaves for each token
    budget: int = 0,  # bytes; 0 for our own choice
) -> int:  # tiles
    "Tiles of a run: as few as leave partial sums of at most 64 MiB, and within the budget."
    run, most = 1, min(2**26, budget or 2**26)
    while 4 * numbers * n_tokens * -(-tiles_v // run) > most and run < tiles_v:
        run *= 2
    return run


def operand(t: Tensor, rows: int, width: int, desc: bool):
    "A descriptor of `t` with tiles [rows, width], or `t` itself."
    if not desc:
        return t
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, width])


TIMED = 1e11  # FLOPs


def variants(t: Tiling, stages: tuple[int, ...]) -> list[Tiling]:
    "The same tiles, walked and loaded otherwise; every one gives the same bits."
    others = [t._replace(stages=s, group=g) for s in (t.stages, *stages) for g in (8, 32)]
    return list(dict.fromkeys([t, *others]))


def is_timed(
    x: Tensor,  # [N,H]
    dtype: torch.dtype,  # that of products
    n_classes: int,  # V
) -> bool:
    "Whether a product is large enough to time variants of its kernel; the same on all ranks."
    return x.is_cuda and dtype.itemsize == 2 and 2.0 * x.numel() * n_classes >= TIMED


def fastest(
    kernel,
    x: Tensor,  # [N,H]
    n_classes: int,  # V
    t: Tiling,  # the first choice
    stages: tuple[int, ...],  # others to try
    run: Callable[..., None],  # launches the kernel, or compiles it
    **flags,  # options that it is compiled for
) -> Tiling:
    "The fastest variant for this class of shapes; measured once for a GPU."
    small = 2.0 * x.numel() * n_classes < TIMED
    if small or not (t.desc or x.is_cuda):
        return t
    return fastest_variant(kernel, x, (*x.shape, n_classes), t, functools.partial(variants, t, stages), run, **flags)
