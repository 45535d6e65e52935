"Kernels of `cuda/` that were compiled with the package, where its build has a compiler."

from typing import Any

from .core import cuda
from ._ops import ops


class CompiledAhead(cuda.Compiled):
    "A kernel of this build, which `Bound` and the product launch."

    def __init__(self, source: str, name: str, symbol: str):
        super().__init__(source, name)
        self.symbol = symbol

    def handle(self, shared: int, arguments: int) -> int:  # bytes that a launch may ask for; their number
        "What the driver knows it by."
        self.check_arguments(arguments)
        return ops.function(self.symbol, shared)


def compiled(source: str, name: str, options: tuple[str, ...], arch: str = "") -> Any:  # as of `cuda.COMPILERS`
    "A kernel of this build; one that it lacks, or has not for this GPU, is compiled by PyTorch."
    symbol = " ".join([name, *(o for o in options if o.startswith("-D"))])
    return (
        CompiledAhead(source, name, symbol)
        if ops.function(symbol, 0)
        else cuda.CompiledByTorch(source, name, options, arch)
    )


if hasattr(ops, "function"):  # a build of pure Python has none
    cuda.COMPILERS = {"the build": compiled}
