"""What GPUs of compute capability 9.0 have alone: descriptions of matrices for their copy engine, and launches of kernels that take them."""

import ctypes
import functools
import math
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor

from fusedloss.core.cuda import as_bits, ask_driver, cuda_kernel
from fusedloss.core.devices import Device, device_of, Implementation
from fusedloss.core.options import LossOptions
from fusedloss.core.softmax import exp2_diff, log2_scale, merge_parts, rescaled_moment
from fusedloss.core.triton import jit, launch_kernel, on_device, tl


ELEMENT = {torch.float16: 6, torch.bfloat16: 9}  # of the driver's header, as the next two
SWIZZLE_128_BYTES, FETCH_256_BYTES = 3, 3
COLUMNS = 64  # of a tile: 128 bytes, the width of a swizzled row


def room_for_map() -> tuple[Any, int]:
    "128 bytes at a multiple of 64: what holds them, and their address."
    room = (ctypes.c_char * 192)()
    return room, -(-ctypes.addressof(room) // 64) * 64


class TensorMap:
    "Tiles of `rows` × 64 elements of a matrix [R,C] of 16-bit elements, whose rows begin at multiples of 16 bytes."

    def __init__(
        self, pointer: int, dtype: torch.dtype, shape: tuple[int, int], pitch: int, rows: int
    ):  # elements from row to row
        self.room, self.address = room_for_map()
        sizes, stride = (ctypes.c_uint64 * 2)(shape[1], shape[0]), ctypes.c_uint64(2 * pitch)
        tile, every = (ctypes.c_uint32 * 2)(COLUMNS, rows), (ctypes.c_uint32 * 2)(1, 1)
        ask_driver(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(self.address),
            ELEMENT[dtype],
            ctypes.c_uint32(2),
            ctypes.c_void_p(pointer),
            sizes,
            ctypes.byref(stride),
            tile,
            every,
            0,
            SWIZZLE_128_BYTES,
            FETCH_256_BYTES,
            0,
        )


known_map = functools.lru_cache(maxsize=256)(TensorMap)


def map_of(matrix: Tensor, rows: int) -> TensorMap:  # [R,C]
    "The map of a matrix."
    return known_map(matrix.data_ptr(), matrix.dtype, tuple(matrix.shape), matrix.stride(0), rows)


class Form(NamedTuple):
    "How `cuda/product_sm90.cu` shares the work out."

    stages: int = 4  # tiles of features that are on their way
    cluster: int = 2  # blocks that share the copies of w
    group: int = 8  # clusters whose tokens are walked through all classes together
    in_turn: bool = False  # the two groups of a block take tiles in turn; else they share each
    persistent: bool = True  # blocks stay, and take tile after tile; else one tile a block

    @property
    def classes(self) -> int:
        "Of a tile."
        return 192 if self.in_turn else 256

    @property
    def shared(self) -> int:
        "Bytes of shared memory of a block."
        return self.stages * ((128 + self.classes) * COLUMNS * 2 + 16)

    def blocks(self, n: int, v: int, multiprocessors: int) -> int:
        "Of a launch."
        clusters = -(-n // (128 * self.cluster)) * -(-v // self.classes)
        return (min(multiprocessors // self.cluster, clusters) if self.persistent else clusters) * self.cluster


SHARED, IN_TURN = Form(), Form(stages=5, in_turn=True)


def form_kernel(
    name: str, form: Form, dtype: torch.dtype, device: int
) -> Optional[Callable]:  # `device` is the current one
    "A kernel of the product; None if it was not compiled."
    return cuda_kernel(
        name,
        device,
        ("product_sm90",),
        "90a",
        STAGES=form.stages,
        CLUSTER=form.cluster,
        GROUP=form.group,
        IN_TURN=int(form.in_turn),
        HALF=str(dtype == torch.float16).lower(),
    )


@functools.cache
def form_handle(name: str, form: Form, dtype: torch.dtype, device: int, arguments: int) -> ctypes.c_void_p:
    "What the driver knows a kernel by that was compiled."
    return ctypes.c_void_p(form_kernel(name, form, dtype, device).handle(form.shared, arguments))


@functools.cache
def form_failure(form: Form, dtype: torch.dtype, device: int) -> str:
    "What hinders a form's kernels from being launched; empty if nothing does."
    with torch.cuda.device(device):
        made = form_kernel("exponentials", form, dtype, device)  # as its source is, so are all
    return "cuda/product_sm90.cu is not compiled" if made is None else ""


def maps_of(x: Tensor, w: Tensor, form: Form) -> tuple[TensorMap, TensorMap]:  # [N,H], [V,H]
    "Their maps, as a form copies them."
    return map_of(x, 128), map_of(w, form.classes // form.cluster)


def map_failure(x: Tensor, w: Tensor, form: Form) -> str:  # [N,H], [V,H]
    "What the driver says against their tensor maps; empty if nothing."
    try:
        maps_of(x, w, form)
    except (OSError, RuntimeError) as reason:
        return str(reason)
    return ""


def eight_bytes(value: Any) -> int:
    "A kernel's argument, a pointer, an integer or a float, in the first of eight bytes: the kernel reads as many as it takes."
    if isinstance(value, float):
        return ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value
    return as_bits(value) % 2**64


def launch_form(name: str, form: Form, x: Tensor, w: Tensor, *values: Any):
    "Launch a kernel on the current stream; its first arguments are the tensor maps of x and w."
    device, held = x.get_device(), (ctypes.c_uint64 * len(values))(*map(eight_bytes, values))
    first = ctypes.addressof(held)
    addresses = *[m.address for m in maps_of(x, w, form)], *range(first, first + 8 * len(held), 8)
    blocks = form.blocks(len(x), len(w), device_of(x).multiprocessors)
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device))
    with on_device(x):
        handle = form_handle(name, form, x.dtype, device, len(addresses))
        ask_driver(
            "cuLaunchKernel",
            handle,
            blocks,
            1,
            1,
            384,
            1,
            1,
            form.shared,
            stream,
            (ctypes.c_void_p * len(addresses))(*addresses),
            None,
        )


class OnHopper(Implementation):
    "What needs products of a warp group."

    def lacks(self, d: Device) -> str:
        return super().lacks(d) or ("" if d.capability == (9, 0) else "not of compute capability 9.0")


PRODUCT = OnHopper(
    "exponentials that leave a product", "cuda/product_sm90.cu", ("nvidia", "tma", "clusters"), "chunks of logits"
)


def shapes_reason(dtype: torch.dtype, pitch: int, d: Device) -> str:  # elements from row to row
    "Why the kernels of a device cannot take such matrices; empty if they can, as far as sizes tell."
    if PRODUCT.lacks(d):
        return PRODUCT.lacks(d)
    if dtype not in ELEMENT:
        return f"{dtype}: bf16 or fp16 are multiplied"
    return "rows that do not begin at multiples of 16 bytes" if 2 * pitch % 16 else ""


known_reason = functools.lru_cache(maxsize=256)(shapes_reason)  # a compiler takes the function itself


def matrix_reason(matrix: Tensor) -> str:
    "Why the kernels cannot take a matrix; empty if they can."
    why = known_reason(matrix.dtype, matrix.stride(0), device_of(matrix))
    if why or not matrix.numel():
        return why or "no elements"
    if matrix.stride(1) != 1 and matrix.shape[1] > 1:
        return "elements of a row that lie apart"
    return "a matrix that does not begin at a multiple of 16 bytes" if matrix.data_ptr() % 16 else ""


def product_reason(x: Tensor, w: Tensor, form: Form) -> str:  # [N,H], [V,H]
    "Why the kernels cannot take x and w; empty if they can."
    return (
        matrix_reason(x) or matrix_reason(w) or form_failure(form, x.dtype, x.get_device()) or map_failure(x, w, form)
    )


def score_statistics(
    x: Tensor,  # [N,H]
    w: Tensor,  # [V,H]
    y: Tensor,  # int64 [N]
    # fp32 [tiles,N,2], [N], written
    stats: Tensor,
    target_z: Tensor,
    wanted: Optional[Tensor] = None,  # int32: where it is 0, nothing is written
    form: Form = SHARED,
):
    "Of the scores x wᵀ, but the target's: each row's maximum in a tile of classes and Σ e^(z - maximum); the target's score."
    launch_form("score_statistics", form, x, w, y, stats, target_z, wanted, len(x), len(w), x.shape[1])


def score_moments(
    x: Tensor,  # [N,H]
    w: Tensor,  # [V,H]
    y: Tensor,  # int64 [N]
    # fp32 [tiles,N,2], [tiles,N], [N], written
    stats: Tensor,
    moments: Tensor,
    target_z: Tensor,
    form: Form = IN_TURN,
):
    "What `score_statistics` does; and, for the entropy, each tile's Σ e^(z - maximum) (z - maximum)."
    launch_form("score_moments", form, x, w, y, stats, moments, target_z, len(x), len(w), x.shape[1])


def score_exponentials(
    x: Tensor,  # [N,H]
    w: Tensor,  # [V,H]
    y: Tensor,  # int64 [N]
    offsets: Tensor,  # fp32 [N]
    # [N,V], fp32 [tiles,N], [N], written
    e: Tensor,
    sums: Tensor,
    target_z: Tensor,
    log2_scale: float = math.log2(math.e),
    wanted: Optional[Tensor] = None,
    form: Form = SHARED,
):
    "e = 2^(x wᵀ · log2_scale - offset), 0 at the target and where the offset is inf; sums of tiles of classes; the target's x w."
    launch_form(
        "exponentials",
        form,
        x,
        w,
        y,
        offsets,
        e,
        sums,
        target_z,
        wanted,
        len(x),
        len(w),
        x.shape[1],
        e.stride(0),
        float(log2_scale),
    )


def score_gradients(
    x: Tensor,  # [N,H]
    w: Tensor,  # [V,H]
    y: Tensor,  # int64 [N]
    offsets: Tensor,  # fp32 [N]
    coefs: Tensor,  # fp32 [N]
    # [N,V], fp32 [N], written
    dz: Tensor,
    target_z: Tensor,
    log2_scale: float = math.log2(math.e),
    form: Form = IN_TURN,
):
    "coef · 2^(x wᵀ · log2_scale - offset), 0 at the target and where the offset is inf; the target's x w."
    launch_form(
        "score_gradients",
        form,
        x,
        w,
        y,
        offsets,
        coefs,
        dz,
        target_z,
        len(x),
        len(w),
        x.shape[1],
        dz.stride(0),
        float(log2_scale),
    )


def entropy_gradients(
    # as `score_gradients`
    x: Tensor,
    w: Tensor,
    y: Tensor,
    offsets: Tensor,
    coefs: Tensor,
    slopes: Tensor,  # fp32 [N]: of the coefficient
    means: Tensor,  # natural units from the offset
    # [N,V], fp32 [N], written
    dz: Tensor,
    target_z: Tensor,
    log2_scale: float = math.log2(math.e),
    form: Form = IN_TURN,
):
    "`score_gradients` with a coefficient of each score, coef + slope (mean - t / log2_scale), where t is the power of 2."
    launch_form(
        "entropy_gradients",
        form,
        x,
        w,
        y,
        offsets,
        coefs,
        slopes,
        means,
        dz,
        target_z,
        len(x),
        len(w),
        x.shape[1],
        dz.stride(0),
        float(log2_scale),
    )


def takes_scores(x: Tensor, w: Tensor, bias: Optional[Tensor], o: LossOptions) -> bool:  # [N,H], [V,H], [V]
    "Whether the kernels can take a linear layer's scores: bare ones, without smoothing."
    bare = bias is None and o.keeps_scores and not o.label_smoothing
    return bare and not product_reason(x, w, IN_TURN)


@jit
def merge_statistics_kernel(
    stats_ptr,  # [tiles,N,2]
    moments_ptr,  # [tiles,N] or None
    y_ptr,  # [N]
    sums_ptr,  # [7,N] as `finish_kernel` takes it, the targets' scores in row 2
    N,
    V,
    tiles,
    LOG2_SCALE: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
):
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    keep = rows < N
    y = tl.load(y_ptr + rows, mask=keep, other=-1)
    z_y = tl.load(sums_ptr + 2 * N + rows, mask=(y >= 0) & (y < V), other=-float("inf"))
    row_max, s = z_y * LOG2_SCALE, tl.where(z_y > -float("inf"), 1.0, 0.0)
    moment = tl.zeros([BN], tl.float32)
    for first in range(0, tiles, BT):
        tile = first + tl.arange(0, BT)[:, None]
        at, there = stats_ptr + 2 * (tile.to(tl.int64) * N + rows[None]), (tile < tiles) & keep[None]
        part_max = tl.load(at, mask=there, other=-float("inf")) * LOG2_SCALE
        part_s = tl.load(at + 1, mask=there, other=0.0)
        new_max, new_s = merge_parts(row_max, s, part_max, part_s, LOG2_SCALE)
        if moments_ptr is not None:
            part_moment = tl.load(moments_ptr + tile.to(tl.int64) * N + rows[None], mask=there, other=0.0)
            more = rescaled_moment(part_moment, part_s, part_max, new_max[None, :], LOG2_SCALE)
            moment = rescaled_moment(moment, s, row_max, new_max, LOG2_SCALE) + tl.sum(more, 0)
        row_max, s = new_max, new_s
    tl.store(sums_ptr + rows, row_max, mask=keep)
    tl.store(sums_ptr + N + rows, s, mask=keep)
    if moments_ptr is not None:
        tl.store(sums_ptr + 4 * N + rows, moment, mask=keep)


def merge_statistics(
    sums: Tensor,  # [7,N]
    stats: Tensor,  # [tiles,N,2]
    moments: Optional[Tensor],  # [tiles,N]
    y: Tensor,  # [N]
    n_classes: int,
    scale: float,
    BN: int = 128,
    BT: int = 32,
):
    "Each row's maximum, times a scale, its sum and its moment, of all tiles and the target: rows 0, 1 and 4 of the sums."
    tiles, n, _ = stats.shape
    with on_device(stats):
        launch_kernel(
            merge_statistics_kernel,
            (-(-n // BN),),
            stats,
            moments,
            y,
            sums,
            n,
            n_classes,
            tiles,
            LOG2_SCALE=scale,
            BN=BN,
            BT=BT,
        )


def statistics_sums(x: Tensor, w: Tensor, y: Tensor, entropy: bool = False) -> Tensor:  # [N,H], [V,H], [N] to [7,N]
    "What each row knows of its scores."
    tiles, new = -(-len(w) // IN_TURN.classes), lambda kind, *size: kind(size, dtype=torch.float32)
    sums, stats = new(x.new_zeros, 7, len(x)), new(x.new_empty, tiles, len(x), 2)
    moments = new(x.new_empty, tiles, len(x)) if entropy else None
    if entropy:
        score_moments(x, w, y, stats, moments, sums[2])
    else:
        score_statistics(x, w, y, stats, sums[2], form=IN_TURN)
    merge_statistics(sums, stats, moments, y, len(w), log2_scale(x))
    return sums


@jit
def put_targets_kernel(
    dz_ptr,  # [N,V] of a slab of V classes
    terms_ptr,  # [6,N]
    target_z_ptr,  # [N]
    y_ptr,  # [N]: labels less the slab's first
    N,
    V,
    dz_stride,
    ENTROPY: tl.constexpr,
    LOG2_SCALE: tl.constexpr,
    BN: tl.constexpr,
):
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.load(y_ptr + rows, mask=rows < N, other=-1)
    there = (column >= 0) & (column < V)
    row_max = tl.load(terms_ptr + rows, mask=there, other=float("inf"))
    coef, target_coef = (
        tl.load(terms_ptr + N + rows, mask=there, other=0.0),
        tl.load(terms_ptr + 2 * N + rows, mask=there, other=0.0),
    )
    below = tl.load(target_z_ptr + rows, mask=there, other=0.0) * LOG2_SCALE - row_max
    if ENTROPY:
        slope, mean = (
            tl.load(terms_ptr + 4 * N + rows, mask=there, other=0.0),
            tl.load(terms_ptr + 5 * N + rows, mask=there, other=0.0),
        )
        coef += slope * (mean - tl.maximum(below, -1e30) / LOG2_SCALE)
    d = tl.where(row_max < float("inf"), coef * exp2_diff(below, 0.0, LOG2_SCALE) - target_coef, 0.0)
    tl.store(dz_ptr + rows.to(tl.int64) * dz_stride + column, d.to(dz_ptr.dtype.element_ty), mask=there)


def put_targets(
    dz: Tensor,  # [N,V]
    terms: Tensor,  # [6,N]
    target_z: Tensor,  # [N]
    column: Tensor,  # [N]
    scale: float,
    entropy: bool = False,
    BN: int = 128,
):
    "The gradients of those targets' scores whose column is in the slab `dz`."
    with on_device(dz):
        launch_kernel(
            put_targets_kernel,
            (-(-len(column) // BN),),
            dz,
            terms,
            target_z,
            column,
            *dz.shape,
            dz.stride(0),
            ENTROPY=entropy,
            LOG2_SCALE=scale,
            BN=BN,
        )


def put_gradients(x: Tensor, w: Tensor, dz: Tensor, y: Tensor, terms: Tensor, begin: int, entropy: bool = False):
    "`dz [N,V]` of a slab of classes from its scores; terms `[6,N]` as `launch_terms` makes them."
    column, target_z, given = y - begin, terms.new_empty(len(y)), (terms[0], terms[1])
    if entropy:
        entropy_gradients(x, w, column, *given, terms[4], terms[5], dz, target_z, log2_scale(x))
    else:
        score_gradients(x, w, column, *given, dz, target_z, log2_scale(x))
    put_targets(dz, terms, target_z, column, log2_scale(x), entropy)
