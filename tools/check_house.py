"""The structure of the package held to limits: a line for each fault.

    python tools/check_house.py

Core is what several stages share, in `fusedloss.core`. A stage is a module that a numbered page exports, in the order of the numbers.
Doors are what users import: the package, the modules that choose among stages, and adapters to frameworks.
"""
import ast
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from package_code import PACKAGE, Package
from workbook import ROOT, is_stage, notebooks, read_notebook

DOORS = ("losses", "sharded", "tour", "puzzles", "integrations")  # and the package itself
MODULE_LINES = 600  # of a module
NAMES_TAKEN = 15  # by a module outside of core from another one
NAMES_LISTED = 150  # in the `__all__`s of all modules, the package's own aside
CUDA_COLUMNS = 120  # of a line of `cuda/`
Faults = Iterator[str]


def below(module: str, parent: str) -> bool:
    "Is it this module, or one in it?"
    return f"{module}.".startswith(f"{parent}.")


def in_core(module: str) -> bool:
    "Is it a module of core?"
    return below(module, "core")


def is_door(module: str) -> bool:
    "Is it a module that users import, and no other module?"
    return module == PACKAGE or any(below(module, door) for door in DOORS)


def exported_module(path: Path) -> str | None:
    "The module that a page is exported to"
    found = (re.search(r"^#\|\s*default_exp\s+(\S+)", cell["source"], re.MULTILINE) for cell in read_notebook(path)["cells"])
    return next((match[1] for match in found if match), None)


class House:
    "The modules under `root`, by name without the package's: what each takes of which other, and the number of each stage."

    def __init__(self, root: Path):
        self.root = root
        package = Package(root)
        self.files = {self.short(name): path for name, path in package.files.items()}
        self.stages: dict[str, int] = {}  # in order; of several pages the first one's number
        for path in filter(is_stage, notebooks(root)):
            if module := exported_module(path):
                self.stages.setdefault(module, int(path.name[:2]))
        self.taken: dict[str, dict[str, set[str]]] = {name: {} for name in self.files}  # module, other one, names; no name: all of it
        for name, module in package.modules.items():
            for source, taken in sorted(set().union(*module.imported.values())):
                if source != name:
                    self.taken[self.short(name)].setdefault(self.short(source), set()).add(taken)

    def short(self, module: str) -> str:
        "A module's name without the package's"
        return module.removeprefix(f"{PACKAGE}.")

    @cached_property
    def arrows(self) -> list[tuple[str, str]]:
        "Every module with each that it imports; the package, which imports them all, aside"
        return [(module, other) for module, others in sorted(self.taken.items()) for other in sorted(others) if module != PACKAGE]


def long_modules(house: House) -> Faults:
    "Modules of too many lines"
    for module, path in sorted(house.files.items()):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MODULE_LINES:
            yield f"{module}: {lines} lines, at most {MODULE_LINES}"


def wrong_arrows(house: House) -> Faults:
    "Imports of a door, of a later stage, and of any stage by core"
    number = house.stages
    for module, other in house.arrows:
        if is_door(module):
            continue
        if is_door(other):
            yield f"{module} imports the door {other}"
        elif in_core(module) and other in number:
            yield f"{module} imports the stage {other}"
        elif module in number and number.get(other, -1) > number[module]:
            yield f"{module} imports the later stage {other}"


def circles(house: House) -> Faults:
    "Modules that import each other, directly or not; each circle once, from where the search meets it"
    after = {module: [other for source, other in house.arrows if source == module and other != PACKAGE] for module in house.files}
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> Faults:
        if module in path:
            yield f"circle of imports: {' → '.join([*path[path.index(module):], module])}"
        elif module not in done:
            for other in after[module]:
                yield from visit(other, [*path, module])
            done.add(module)
    for module in sorted(house.files):
        yield from visit(module, [])


def private_names(house: House) -> Faults:
    "Names with an underscore that one module takes of another"
    for module, other in house.arrows:
        yield from (f"{module} takes the private name {name} of {other}" for name in sorted(house.taken[module][other]) if name.startswith("_"))


def wide_seams(house: House) -> Faults:
    "Modules outside of core that take too many names of one other"
    for module, other in house.arrows:
        count = len(house.taken[module][other])
        if count > NAMES_TAKEN and not in_core(module):
            yield f"{module} takes {count} names of {other}, at most {NAMES_TAKEN}"


def listed_names(path: Path) -> int:
    "How many names a module's `__all__` has"
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) == "__all__":
            return len(ast.literal_eval(statement.value))
    return 0


def many_names(house: House) -> Faults:
    "Too many names that modules offer"
    count = sum(listed_names(path) for module, path in house.files.items() if module != PACKAGE and not below(module, "integrations"))
    if count > NAMES_LISTED:
        yield f"{count} names in the __all__ of modules, at most {NAMES_LISTED}"


def wide_lines(house: House) -> Faults:
    "Lines of CUDA sources that are too wide"
    for path in sorted((house.root / "cuda").glob("*.cu*")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if len(line) > CUDA_COLUMNS:
                yield f"cuda/{path.name}:{number}: {len(line)} columns, at most {CUDA_COLUMNS}"


RULES = long_modules, wrong_arrows, circles, private_names, wide_seams, many_names, wide_lines


def faults(root: Path = ROOT) -> list[str]:
    "What breaks a limit, in words"
    house = House(root)
    return [fault for rule in RULES for fault in rule(house)]


def main(argv: list[str]) -> int:
    "Print the faults; 0 if there are none"
    found = faults(Path(argv[0]).resolve() if argv else ROOT)
    print("\n".join(found) if found else "The structure keeps its limits.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
