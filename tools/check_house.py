"""The imports of the package: circles, wrong directions and private names, a line for each.

    python tools/check_house.py

Core is what several stages share, in `fusedloss.core`. A stage is a module that a numbered page exports, in the order of the numbers.
Doors are what users import: the package, the modules that choose among stages, and adapters to frameworks.
"""
import ast
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from project import PACKAGE, ROOT, WORKBOOK, default_module, is_stage, notebooks, read_notebook

DOORS = ("losses", "sharded", "integrations", "doctor", "calibration", "__main__")  # and the package itself
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


def imports_of(path: Path, module: str, files: dict[str, Path]) -> set[tuple[str, str]]:
    "What a file imports of the package, anywhere in it: modules with the names taken, an empty one for a whole module"
    found = set()
    above = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {(alias.name if alias.asname else PACKAGE, "") for alias in node.names if below(alias.name, PACKAGE)}
        elif isinstance(node, ast.ImportFrom):
            parents = above[:len(above) - node.level + 1] if node.level else []
            source = ".".join(filter(None, [*parents, node.module]))
            inside = {alias.name: f"{source}.{alias.name}" for alias in node.names} if source in files else {}
            found |= {(submodule, "") if submodule in files else (source, name) for name, submodule in inside.items()}
    return found


class House:
    "The modules under `root`, by name without the package's: what each takes of which other, and the number of each stage."

    def __init__(self, root: Path):
        paths = sorted(path for path in (root / PACKAGE).rglob("*.py") if path.name != "_modidx.py")
        files = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
        self.files = {self.short(name): path for name, path in files.items()}
        self.stages: dict[str, int] = {}  # in order; of several pages the first one's number
        for path in filter(is_stage, notebooks(root)):
            if module := default_module(read_notebook(path)):
                self.stages.setdefault(self.short(module), int(path.name[:2]))
        self.taken: dict[str, dict[str, set[str]]] = {name: {} for name in self.files}  # module, other one, names; no name: all of it
        for name, path in files.items():
            for source, taken in sorted(imports_of(path, name, files)):
                if source != name:
                    self.taken[self.short(name)].setdefault(self.short(source), set()).add(taken)

    def short(self, module: str) -> str:
        "A module's name without the package's"
        return module.removeprefix(f"{PACKAGE}.")

    @cached_property
    def arrows(self) -> list[tuple[str, str]]:
        "Every module with each that it imports; the package, which imports them all, aside"
        return [(module, other) for module, others in sorted(self.taken.items()) for other in sorted(others) if module != PACKAGE]


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


def workbook_imports(house: House) -> Faults:
    "Imports of the workbook, which is not installed with the package"
    for module, path in house.files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) else []
            yield from (f"{module} imports {name}, which no wheel holds" for name in names if name and below(name, WORKBOOK))


RULES = wrong_arrows, circles, private_names, workbook_imports


def faults(root: Path = ROOT) -> list[str]:
    "What breaks a rule, in words"
    house = House(root)
    return [fault for rule in RULES for fault in rule(house)]


def main(argv: list[str]) -> int:
    "Print the faults; 0 if there are none"
    found = faults(Path(argv[0]).resolve() if argv else ROOT)
    print("\n".join(found) if found else "Imports go one way.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
