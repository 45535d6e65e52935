"""What GPUs of compute capability 9.0 have alone: descriptions of matrices for their copy engine, and launches of kernels that take them."""

from dataclasses import dataclass, replace
import ctypes
import functools
import math
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from fusedloss.core.architectures import ScoreProduct
from fusedloss.core.cuda import as_bits, ask_driver, cuda_kernel
from fusedloss.core.devices import Device, device_of, Implementation
from fusedloss.core.triton import on_device


FP8 = torch.float8_e4m3fn
ELEMENT = {
    torch.float16: 6,
    torch.bfloat16: 9,
    FP8: 1,
}  # of the driver's header, as the next two; of FP8 a pair, as 16 bits
SWIZZLE_128_BYTES, FETCH_256_BYTES = 3, 3
LOG2E = math.log2(math.e)
COLUMNS = 64  # of a tile: 128 bytes, the width of a swizzled row


def room_for_map() -> tuple[Any, int]:
    "128 bytes at a multiple of 64: what holds them, and their address."
    room = (ctypes.c_char * 192)()
    return room, -(-ctypes.addressof(room) // 64) * 64


def words(features: int, dtype: torch.dtype) -> int:
    "Of 16 bits, which is what kernels count."
    return features * dtype.itemsize // 2


class TensorMap:
    "Tiles of `rows` × 128 bytes of a matrix [R,C], whose rows begin at multiples of 16 bytes."

    def __init__(
        self, pointer: int, dtype: torch.dtype, shape: tuple[int, int], pitch: int, rows: int
    ):  # elements from row to row
        self.room, self.address = room_for_map()
        columns, stride = words(shape[1], dtype), ctypes.c_uint64(dtype.itemsize * pitch)
        sizes = (ctypes.c_uint64 * 2)(columns, shape[0])
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


def form_kernel(
    name: str, form: "WarpGroupProduct", dtype: torch.dtype, device: int
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
        BIASED=int(form.biased),
        CAPPED=int(form.capped),
        HALF=str(dtype == torch.float16).lower(),
        EIGHT=int(dtype == FP8),
    )


@functools.cache
def form_handle(
    name: str, form: "WarpGroupProduct", dtype: torch.dtype, device: int, arguments: int
) -> ctypes.c_void_p:
    "What the driver knows a kernel by; `RuntimeError` if it was not compiled."
    made = form_kernel(name, form, dtype, device)
    if made is None:  # although another kernel of the source was
        raise RuntimeError(f"cuda/product_sm90.cu: {name} is not compiled")
    return ctypes.c_void_p(made.handle(form.shared, arguments))


@functools.cache
def form_failure(name: str, form: "WarpGroupProduct", dtype: torch.dtype, device: int) -> str:
    "What hinders a kernel from being launched; empty if nothing does."
    with torch.cuda.device(device):
        made = form_kernel(name, form, dtype, device)
    return f"cuda/product_sm90.cu: {name} is not compiled" if made is None else ""


def maps_of(x: Tensor, w: Tensor, form: "WarpGroupProduct") -> tuple[TensorMap, TensorMap]:  # [N,H], [V,H]
    "Their maps, as a form copies them."
    return map_of(x, 128), map_of(w, form.classes // form.cluster)


def map_failure(x: Tensor, w: Tensor, form: "WarpGroupProduct") -> str:  # [N,H], [V,H]
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


def launch_form(name: str, form: "WarpGroupProduct", x: Tensor, w: Tensor, *values: Any):
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


@functools.lru_cache(maxsize=256)
def known_reason(product: ScoreProduct, dtype: torch.dtype, pitch: int, d: Device) -> str:
    "`product.reason`, remembered."
    return product.reason(dtype, pitch, d)


def matrix_reason(matrix: Tensor, product: ScoreProduct) -> str:
    "Say why the kernels cannot take a matrix; empty if they can."
    why = known_reason(product, matrix.dtype, matrix.stride(0), device_of(matrix))
    if why or not matrix.numel():
        return why or "no elements"
    if matrix.stride(1) != 1 and matrix.shape[1] > 1:
        return "elements of a row that lie apart"
    return "a matrix that does not begin at a multiple of 16 bytes" if matrix.data_ptr() % 16 else ""


@dataclass(frozen=True)
class WarpGroupProduct(ScoreProduct):
    "`cuda/product_sm90.cu`, and how it shares the work out."

    stages: int = 4  # tiles of features that are on their way
    cluster: int = 2  # blocks that share the copies of w
    group: int = 8  # clusters whose tokens are walked through all classes together
    in_turn: bool = False  # the two groups of a block take tiles in turn; else they share each
    persistent: bool = True  # blocks stay, and take tile after tile; else one tile a block
    biased: bool = False  # scores with a bias
    capped: bool = False  # exponentials of scores with a soft cap

    @property
    def classes(self) -> int:
        "Classes of a tile."
        return 192 if self.in_turn else 256

    @property
    def narrow(self) -> int:
        return 64

    @property
    def shared(self) -> int:
        "Bytes of shared memory of a block."
        return self.stages * ((128 + self.classes) * COLUMNS * 2 + 16)

    def blocks(self, n: int, v: int, multiprocessors: int) -> int:
        "Blocks of a launch."
        clusters = -(-n // (128 * self.cluster)) * -(-v // self.classes)
        return (min(multiprocessors // self.cluster, clusters) if self.persistent else clusters) * self.cluster

    def lacks(self, d: Device) -> str:
        return PRODUCT.lacks(d)

    def reason(self, dtype: torch.dtype, pitch: int, d: Device) -> str:
        if self.lacks(d):
            return self.lacks(d)
        if dtype not in ELEMENT:
            return f"{dtype}: bf16 or fp16 are multiplied"
        return "rows that do not begin at multiples of 16 bytes" if dtype.itemsize * pitch % 16 else ""

    def exponentials_reason(self, dtype: torch.dtype, pitch: int, d: Device) -> str:
        if dtype not in (torch.bfloat16, FP8):
            return "not of bf16, whose range exponentials need"
        return self.reason(dtype, pitch, d)

    def failure(self, dtype: torch.dtype, device: int, kernel: str = "score_statistics") -> str:
        return form_failure(kernel, self, dtype, device)

    def matrices_reason(self, x: Tensor, w: Tensor, kernel: str = "score_statistics") -> str:
        return (
            matrix_reason(x, self)
            or matrix_reason(w, self)
            or self.failure(x.dtype, x.get_device(), kernel)
            or map_failure(x, w, self)
        )

    def statistics(self, x, w, y, stats, target_z, wanted=None, bias=None, units=None):
        form, given = replace(self, biased=bias is not None), (y, stats, target_z, wanted, bias, units)
        launch_form("score_statistics", form, x, w, *given, len(x), len(w), words(x.shape[1], x.dtype))

    def moments(self, x, w, y, stats, moments, target_z):
        launch_form("score_moments", self, x, w, y, stats, moments, target_z, len(x), len(w), x.shape[1])

    def maxima(self, x, w, y, stats, maxima, target_z):
        launch_form("score_maxima", self, x, w, y, stats, maxima, target_z, len(x), len(w), x.shape[1])

    def exponentials(
        self, x, w, y, offsets, e, sums, target_z, log2_scale=LOG2E, wanted=None, bias=None, log2_cap=0.0, units=None
    ):
        form, sizes = replace(self, biased=bias is not None, capped=log2_cap > 0), (len(x), len(w))
        given, last = (y, offsets, e, sums, target_z, wanted, bias, units), (float(log2_scale), float(log2_cap))
        launch_form("exponentials", form, x, w, *given, *sizes, words(x.shape[1], x.dtype), e.stride(0), *last)

    def gradients(self, x, w, y, offsets, coefs, dz, target_z, log2_scale=LOG2E, bias=None):
        form, given = replace(self, biased=bias is not None), (y, offsets, coefs, dz, target_z, bias)
        launch_form("score_gradients", form, x, w, *given, len(x), len(w), x.shape[1], dz.stride(0), float(log2_scale))

    def entropy_gradients(self, x, w, y, offsets, coefs, slopes, means, dz, target_z, log2_scale=LOG2E):
        given = y, offsets, coefs, slopes, means, dz, target_z
        launch_form(
            "entropy_gradients", self, x, w, *given, len(x), len(w), x.shape[1], dz.stride(0), float(log2_scale)
        )


SHARED, IN_TURN = WarpGroupProduct(), WarpGroupProduct(stages=5, in_turn=True)
