"""The kernels of product.cu on a GPU: tiles are described to it by the driver, and sources compiled for what Hopper alone has."""
import ctypes
import math
from functools import cache

import torch

BF16, FP16, SWIZZLE_128_BYTES, L2_256_BYTES = 9, 6, 3, 3  # of cuda.h
MULTIPROCESSORS, STAGE = 132, (32768 + 16384, 24576 + 16384)  # bytes of a stage: groups that share tiles, groups in turn


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def tensor_map(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    "What tells the GPU's copies where tiles of so many rows and 64 columns lie: 128 bytes on the GPU"
    room = (ctypes.c_char * 192)()
    place = (ctypes.addressof(room) + 63) // 64 * 64
    sizes, strides = (ctypes.c_uint64 * 2)(matrix.shape[1], matrix.shape[0]), (ctypes.c_uint64 * 1)(2 * matrix.stride(0))
    box, steps = (ctypes.c_uint32 * 2)(64, rows), (ctypes.c_uint32 * 2)(1, 1)
    kind = BF16 if matrix.dtype == torch.bfloat16 else FP16
    failed = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(place), kind, ctypes.c_uint32(2), ctypes.c_void_p(matrix.data_ptr()), sizes, strides, box, steps, 0,
        SWIZZLE_128_BYTES, L2_256_BYTES, 0)
    assert not failed, f"the driver refuses a tensor map: {failed}"
    return torch.frombuffer(bytearray(ctypes.string_at(place, 128)), dtype=torch.uint8).cuda()


@cache
def module(source: str, **constants):
    from cupy import RawModule
    return RawModule(code=source, options=("--std=c++17", "-arch=sm_90a", *(f"-D{name}={value}" for name, value in constants.items())))


class Launch:
    "A launch of `score_statistics`, or with offsets `exponentials`, that can be made again; what it leaves"
    def __init__(self, source: str, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor | None = None, stages: int = 4, cluster: int = 2,
                 group: int = 8, in_turn: int = 0, e: torch.Tensor | None = None):
        import cupy
        (n, h), v, classes = x.shape, len(w), (256, 192)[in_turn]
        self.x_map, self.w_map = tensor_map(x, 128), tensor_map(w, classes // cluster)
        self.stats = torch.full((-(-v // classes), n, 2 if offsets is None else 1), math.nan, device="cuda")
        self.targets_z = torch.full((n,), math.nan, device="cuda")
        self.e = torch.full((n, -(-v // 8) * 8), math.nan, device="cuda", dtype=x.dtype) if e is None and offsets is not None else e
        self.inputs = x, w, y, offsets
        self.kernel = module(source, STAGES=stages, CLUSTER=cluster, GROUP=group, IN_TURN=in_turn, HALF=str(x.dtype == torch.float16).lower()).get_function(
            "score_statistics" if offsets is None else "exponentials")
        self.shared = stages * (STAGE[in_turn] + 16)
        self.kernel.max_dynamic_shared_size_bytes = self.shared
        sizes = *map(cupy.int32, (n, v, h)),
        more, last = ((), ()) if offsets is None else ((offsets, self.e), (cupy.int64(self.e.stride(0)), cupy.float32(math.log2(math.e))))
        self.args = (*(t.data_ptr() for t in (self.x_map, self.w_map, y, *more, self.stats, self.targets_z)), *sizes, *last)
        self.grid = min(MULTIPROCESSORS // cluster, -(-n // (128 * cluster)) * -(-v // classes)) * cluster

    def __call__(self):
        import cupy
        self.kernel((self.grid,), (384,), self.args, shared_mem=self.shared, stream=cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream))
        return self
