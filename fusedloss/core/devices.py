"""What the GPU at hand can do, and which implementation takes it."""

__all__ = ["Device", "device_of", "Implementation"]


import functools
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor


class Device(NamedTuple):
    "What a GPU can do; a CPU is a device of no vendor."

    name: str
    vendor: str  # "nvidia", "amd" or "none"
    capability: tuple[int, int]  # NVIDIA's; (0, 0) of others
    multiprocessors: int
    shared_memory: int  # bytes that a block may opt in to
    tma: bool  # an engine that copies tiles by tensor descriptors
    clusters: bool  # blocks that reach each other's shared memory


class Rates(NamedTuple):
    "Bytes/s, read plus written, of a large copy, and FLOP/s of large matrix products by dtype."

    bandwidth: float
    bfloat16: float
    float16: float
    float32: float
    float64: float


class Unaligned(NamedTuple):
    "Shares of the rate of 16 bits that products reach where classes are no multiple of eight, and where they are odd: of an H200."

    z: tuple[float, float] = (0.35, 0.135)
    dx: tuple[float, float] = (0.34, 0.18)
    dw: tuple[float, float] = (0.35, 0.2)
    padded_dw: tuple[float, float] = (0.62, 0.65)  # from logits whose rows start on sixteen bytes


class Epilogue(NamedTuple):
    "Features whose products take as long as what follows a product: of an H200."

    z: int = 100
    exponentials: int = 190
    lse: int = 165
    dz: int = 330


class Board(NamedTuple):
    "A product that carries a GPU."

    name: str  # that a plan takes
    names: tuple[str, ...]  # by the driver
    multiprocessors: int
    peaks: Rates  # by its maker
    source: str  # where the maker says so
    measured: Optional[Rates] = None  # what it reaches
    unaligned: Unaligned = Unaligned()
    epilogue: Epilogue = Epilogue()


def peaks(
    bandwidth: float,  # bytes/s
    half: float,  # FLOP/s, and the others
    single: float,
    double: float,
) -> Rates:
    "Peaks of a GPU that multiplies bfloat16 as fast as float16."
    return Rates(bandwidth, half, half, single, double)


KINDS: list[type["DeviceKind"]] = []  # the one defined last first
GPUS: dict[str, Device] = {}  # as their makers describe them, by title


class DeviceKind:
    "What a kind of device can do, how it is recognised, and how fast its boards are."

    title = ""  # in tables; empty: a family
    backend = "cuda"  # PyTorch's type of device
    vendor, capability = "none", (0, 0)
    multiprocessors = 0
    shared_memory = 48 * 2**10  # bytes of a block; a driver that reports its own overrules them
    tma = clusters = False  # as in `Device`
    boards: tuple[Board, ...] = ()

    def __init_subclass__(cls):
        KINDS.insert(0, cls)
        if cls.title and cls.vendor != "none":
            GPUS[cls.title] = cls.model()

    @classmethod
    def matches(
        cls,
        properties: Any,  # of PyTorch, such as `torch.cuda.get_device_properties`
    ) -> bool:
        "Whether a device is of this kind: of any model of a family, or named as one of the boards."
        return not cls.title or any(properties.name in board.names for board in cls.boards)

    @classmethod
    def model(cls) -> Device:
        "A device of this kind, as its maker describes it."
        return Device(
            cls.title, cls.vendor, cls.capability, cls.multiprocessors, cls.shared_memory, cls.tma, cls.clusters
        )

    @classmethod
    def on_board(cls, board: Board) -> Device:
        "The device that a board carries, under the name that its driver gives."
        return cls.model()._replace(name=board.names[0], multiprocessors=board.multiprocessors)

    @classmethod
    def described(cls, properties: Any) -> Device:
        "The device, as its driver describes it."
        block = getattr(properties, "shared_memory_per_block", cls.shared_memory)
        most = getattr(properties, "shared_memory_per_block_optin", 0) or block
        return Device(
            properties.name, cls.vendor, cls.capability, properties.multi_processor_count, most, cls.tma, cls.clusters
        )


class Processor(DeviceKind):
    "A CPU, and whatever else has no kind: kernels run there in Triton's interpreter, if they run at all."

    title, backend = "CPU", "cpu"
    multiprocessors, shared_memory = 4, 0  # programs that the interpreter gets


CPU = Processor.model()


SHARED_KIB = {
    (7, 0): 96,
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (12, 0): 99,
    (12, 1): 99,
}  # a block, by capability


class Nvidia(DeviceKind):
    "A GPU of NVIDIA; a model has a capability in `SHARED_KIB`."

    vendor = "nvidia"

    @classmethod
    def matches(cls, properties: Any) -> bool:
        return torch.version.hip is None and super().matches(properties)

    @classmethod
    def model(cls) -> Device:
        recent = cls.capability >= (9, 0)
        return super().model()._replace(shared_memory=1024 * SHARED_KIB[cls.capability], tma=recent, clusters=recent)

    @classmethod
    def described(cls, properties: Any) -> Device:
        recent = properties.major >= 9
        return (
            super()
            .described(properties)
            ._replace(capability=(properties.major, properties.minor), tma=recent, clusters=recent)
        )


class Amd(DeviceKind):
    "A GPU of AMD, on which PyTorch is built with HIP."

    vendor, shared_memory = "amd", 2**16

    @classmethod
    def matches(cls, properties: Any) -> bool:
        return torch.version.hip is not None and super().matches(properties)


class T4(Nvidia):
    title, capability, multiprocessors = "T4", (7, 5), 40


class A100(Nvidia):
    title, capability, multiprocessors = "A100", (8, 0), 108
    boards = (
        Board(
            "A100 40GB",
            ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
            108,
            peaks(1.555e12, 312e12, 19.5e12, 19.5e12),
            "NVIDIA A100 Tensor Core GPU data sheet, 2021",
        ),
        Board(
            "A100 80GB",
            ("NVIDIA A100-SXM4-80GB",),
            108,
            peaks(2.039e12, 312e12, 19.5e12, 19.5e12),
            "NVIDIA A100 Tensor Core GPU data sheet, 2021",
        ),
    )


class RTX3090(Nvidia):
    title, capability, multiprocessors = "RTX 3090", (8, 6), 82


class L4(Nvidia):
    title, capability, multiprocessors = "L4", (8, 9), 58
    boards = (
        Board("L4", ("NVIDIA L4",), 58, peaks(300e9, 121e12, 30.3e12, 0.47e12), "NVIDIA L4 Tensor Core GPU data sheet"),
    )


class L40S(Nvidia):
    title, capability, multiprocessors = "L40S", (8, 9), 142
    boards = (
        Board("L40S", ("NVIDIA L40S",), 142, peaks(864e9, 362e12, 91.6e12, 1.43e12), "NVIDIA L40S GPU data sheet"),
    )


class RTX4090(Nvidia):
    title, capability, multiprocessors = "RTX 4090", (8, 9), 128
    boards = (
        Board(
            "RTX 4090",
            ("NVIDIA GeForce RTX 4090",),
            128,
            peaks(1.008e12, 165.2e12, 82.6e12, 1.29e12),
            "NVIDIA Ada GPU architecture white paper",
        ),
    )


class H100(Nvidia):
    title, capability, multiprocessors = "H100", (9, 0), 132
    boards = (
        Board(
            "H100",
            ("NVIDIA H100 80GB HBM3",),
            132,
            peaks(3.35e12, 989e12, 67e12, 67e12),
            "NVIDIA H100 Tensor Core GPU data sheet, SXM",
        ),
        Board(
            "H100 PCIe",
            ("NVIDIA H100 PCIe",),
            114,
            peaks(2.0e12, 756e12, 51e12, 51e12),
            "NVIDIA H100 Tensor Core GPU data sheet, PCIe",
        ),
    )


class H200(Nvidia):
    title, capability, multiprocessors = "H200", (9, 0), 132
    boards = (
        Board(
            "H200",
            ("NVIDIA H200",),
            132,
            peaks(4.8e12, 989e12, 67e12, 67e12),
            "NVIDIA H200 Tensor Core GPU data sheet, SXM",
            Rates(4.3e12, 700e12, 670e12, 51e12, 62e12),
        ),
    )


class B200(Nvidia):
    title, capability, multiprocessors = "B200", (10, 0), 148
    boards = (
        Board(
            "B200",
            ("NVIDIA B200",),
            148,
            peaks(7.7e12, 2250e12, 75e12, 37e12),
            "NVIDIA HGX B200 data sheet, an eighth of the board",
        ),
    )


class RTX5090(Nvidia):
    title, capability, multiprocessors = "RTX 5090", (12, 0), 170
    boards = (
        Board(
            "RTX 5090",
            ("NVIDIA GeForce RTX 5090",),
            170,
            peaks(1.792e12, 209.5e12, 104.8e12, 1.64e12),
            "NVIDIA RTX Blackwell GPU architecture white paper",
        ),
    )


class MI300X(Amd):
    title, multiprocessors = "MI300X", 304


def gpu_index(device: torch.device) -> int:
    "Which device of its backend it is: the current one if it does not say."
    if device.index is not None or device.type == "cpu":
        return device.index or 0
    here = torch.get_device_module(device.type)
    return here.current_device() if here.is_available() else 0


@functools.cache
def recognised(
    backend: str,  # PyTorch's type of device
    index: int,  # which of them
) -> Device:
    "A device by the first kind that recognises it, as the driver describes it; `CPU` where there is none."
    here = torch.get_device_module(backend)
    if not here.is_available():
        return CPU
    properties = here.get_device_properties(index)
    for kind in KINDS:
        if kind.backend == backend and kind.matches(properties):
            return kind.described(properties)
    return CPU


def device_of(
    where: Tensor | torch.device | str | int,  # an integer: the GPU of this index
) -> Device:
    "What there is where a tensor lies; `CPU` for whatever is of no other kind."
    if isinstance(where, int):
        return recognised("cuda", where)
    device = where.device if isinstance(where, Tensor) else torch.device(where)
    if device.type in ("cpu", "meta"):
        return CPU
    return recognised(device.type, gpu_index(device))


FEATURES = dict(
    gpu=("no GPU", lambda d: d.vendor != "none"),
    nvidia=("not of NVIDIA", lambda d: d.vendor == "nvidia"),
    tma=("no tensor descriptors", lambda d: d.tma),
    clusters=("no clusters", lambda d: d.clusters),
)  # what it is like to lack them


def lacks(
    d: Device,
    *features: str,  # keys of `FEATURES`
) -> str:
    "Why `d` is passed over by what needs the features; empty if it has them."
    for reason, has in map(FEATURES.get, features):
        if not has(d):
            return reason
    return ""


class Implementation(NamedTuple):
    "One way to compute something, and what it needs of a GPU."

    what: str
    source: str  # its kernels, or their file
    needs: tuple[str, ...]  # keys of `FEATURES`
    otherwise: str  # what is done where it is passed over
    how: Callable[[Device], str] = lambda d: ""  # how it is cut for a GPU

    def lacks(self, d: Device) -> str:
        "Why it passes `d` over; empty if it does not."
        return lacks(d, *self.needs)
