"""The PyTorch at hand, and the oldest that is supported."""

import torch


OLDEST = (2, 8)  # PyTorch that is supported, as settings.ini says


def torch_version(
    version: str = "",  # the PyTorch at hand if empty
) -> tuple[int, ...]:  # major, minor
    "A version as numbers that compare."
    return tuple(map(int, (version or torch.__version__).split(".")[:2]))


def check_torch(
    version: str = "",  # the PyTorch at hand if empty
):
    "`ImportError` for a PyTorch older than the oldest supported."
    if torch_version(version) >= OLDEST:
        return
    raise ImportError(
        "fusedloss: expected PyTorch %d.%d or later, got %s: pip install --upgrade torch"
        % (*OLDEST, version or torch.__version__)
    )
