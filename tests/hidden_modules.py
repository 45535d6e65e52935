"""Hide modules from this process, as on a machine that lacks them: importing one raises, and asking for it finds none."""
import sys
from collections.abc import Iterable
from typing import Any


class Hiding:
    "A finder of modules that does not find some of them"

    def __init__(self, finder: Any, names: set[str]):
        self.finder, self.names = finder, names

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)

    def find_spec(self, name: str, path=None, target=None):
        "As the finder's own, but None for a hidden module and what is in it"
        return None if name.partition(".")[0] in self.names else self.finder.find_spec(name, path, target)


def hide(names: Iterable[str]) -> None:
    "From here on, these modules are not there"
    names = set(names)
    sys.meta_path[:] = [Hiding(finder, names) for finder in sys.meta_path]
    for loaded in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[loaded]
