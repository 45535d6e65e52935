"Adapters to frameworks, loaded when they are asked for. None of them imports its framework before it is used."

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusedloss.integrations import transformers as transformers
    from fusedloss.integrations import trl as trl

NAMES = ("transformers", "trl")


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return [*globals(), *NAMES]
