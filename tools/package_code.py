"""Which statements of the package a piece of code uses, directly or not. The files are read; nothing is imported.

What cannot be told by reading counts as used: a whole module, where the module itself is passed on.
"""
import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "fusedloss"
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
DOCUMENTED = (*DEFINITION, ast.Module)
IMPORT = (ast.Import, ast.ImportFrom)
WHOLE = ""  # in place of a name: the module itself
Use = tuple[str, str]  # a module and a name in it


def chain(node: ast.AST) -> tuple[str, ...]:
    "`a.b.c` as its parts; empty where it does not begin with a name"
    if isinstance(node, ast.Name):
        return (node.id,)
    before = chain(node.value) if isinstance(node, ast.Attribute) else ()
    return (*before, node.attr) if before else ()


def quoted_code(text: str) -> list[ast.stmt]:
    "The statements of a script that is written in a string and imports the package"
    if not re.search(rf"^\s*(import|from) {PACKAGE}\b", text, re.MULTILINE):
        return []
    try:
        return ast.parse(textwrap.dedent(text)).body
    except SyntaxError:
        return []


class Facts:
    "What a tree reads, found once: names and attributes of names, string constants, imports."

    def __init__(self, tree: ast.AST):
        nodes = list(ast.walk(tree))
        self.texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        nodes += [n for text in self.texts for statement in quoted_code(text) for n in ast.walk(statement)]
        inner = {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}
        self.chains = {c for n in nodes if isinstance(n, ast.Name | ast.Attribute) and id(n) not in inner and (c := chain(n))}
        self.chains |= {(n.id,) for n in nodes if isinstance(n, ast.Name) and id(n) in inner} - {c[:1] for c in self.chains}
        self.imports = [n for n in nodes if isinstance(n, IMPORT)]


def is_docstring(statement: ast.stmt) -> bool:
    "Is this statement nothing but a string?"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)


def bound_names(statement: ast.stmt) -> set[str]:
    "The names that a top-level statement gives a value"
    if isinstance(statement, DEFINITION):
        return {statement.name}
    nodes = list(ast.walk(statement))
    found = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found | {n.name for n in nodes if isinstance(n, DEFINITION)}


def changed_names(statement: ast.stmt) -> set[str]:
    "The names behind which a top-level statement may change something: by `x.f(y)`, by `x.y = z`, by a decorator `@x.f`"
    changing = statement.decorator_list if isinstance(statement, DEFINITION) else [statement]
    if isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets):
        return set()  # whoever needs it reads the name that it gives
    nodes = [n for part in changing for n in ast.walk(part)]
    called = {id(n.func) for n in nodes if isinstance(n, ast.Call)} | {id(d) for d in changing}
    return {n.id for n in nodes if isinstance(n, ast.Name) and id(n) not in called}


def canonical(node: object) -> str:
    "A syntax tree as text, the same in every version of Python: they differ in empty fields and in how they cut f-strings; without docstrings"
    if isinstance(node, list):
        return f"[{','.join(map(canonical, node))}]"
    if isinstance(node, ast.JoinedStr):
        return f"JoinedStr({''.join(v.value if isinstance(v, ast.Constant) else f'{{{canonical(v)}}}' for v in node.values)!r})"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
    if isinstance(node, DOCUMENTED) and is_docstring(node.body[0]):
        fields = [(name, value[1:] if name == "body" else value) for name, value in fields]
    return f"{type(node).__name__}({','.join(f'{name}={canonical(value)}' for name, value in fields)})"


class Module:
    "One file: its statements, by the names that they bind, and where its imported names come from."

    def __init__(self, name: str, is_package: bool, tree: ast.Module, files: dict[str, Path]):
        self.name, self.files = name, files
        self.parent = name if is_package else name.rpartition(".")[0]
        self.statements = [s for s in tree.body if not is_docstring(s) and not isinstance(s, IMPORT) and "__all__" not in bound_names(s)]
        self.facts = [Facts(s) for s in self.statements]
        self.givers: dict[str, list[int]] = {}
        for number, statement in enumerate(self.statements):
            for bound in bound_names(statement):
                self.givers.setdefault(bound, []).append(number)
        self.imported: dict[str, set[Use]] = {}
        self.origins: dict[str, set[str]] = {}  # what an import calls by another name
        self.stars: set[str] = set()
        top = [s for s in tree.body if isinstance(s, IMPORT)]
        for statement in [*top, *(inner for found in self.facts for inner in found.imports)]:
            self.add_import(statement)

    def add_import(self, statement: ast.stmt) -> None:
        "Note what an import brings from the package, and what it calls by which name"
        self.add_origins(statement)
        if isinstance(statement, ast.Import):
            for alias in (a for a in statement.names if a.name.split(".")[0] == PACKAGE):
                self.imported.setdefault(alias.asname or PACKAGE, set()).add((alias.name if alias.asname else PACKAGE, WHOLE))
            return
        above = self.parent.split(".")[:len(self.parent.split(".")) - statement.level + 1] if statement.level else []
        source = ".".join(filter(None, [*above, statement.module or ""]))
        for alias in statement.names if source in self.files else ():
            if alias.name == "*":
                self.stars.add(source)
            inside = f"{source}.{alias.name}"
            use = (inside, WHOLE) if inside in self.files else (source, alias.name)
            self.imported.setdefault(alias.asname or alias.name, set()).add(use)

    def add_origins(self, statement: ast.stmt) -> None:
        "Note the origin of each name that an import binds; within the package the other name, for its module may change"
        source = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
        inside = source.split(".")[0] in (PACKAGE, "None") or bool(getattr(statement, "level", 0))
        for alias in statement.names:
            name = alias.asname or (alias.name if source else alias.name.split(".")[0])
            if not inside or name != alias.name:
                self.origins.setdefault(name, set()).add(alias.name if inside else source + alias.name)

    @functools.cache
    def text(self, number: int) -> str:
        "A statement as `canonical` text, and where its imported names come from"
        names = sorted({first for first, *_ in self.facts[number].chains} & self.origins.keys())
        return canonical(self.statements[number]) + "".join(f"\n{name} is {sorted(self.origins[name])}" for name in names)

    def find(self, name: str) -> Iterator[Use]:
        "Where `name` may come from"
        if name in self.givers:
            yield self.name, name
        yield from self.imported.get(name, ())
        yield from ((module, name) for module in self.stars)

    def uses(self, found: Facts) -> Iterator[Use]:
        "What of the package is used by a statement of this module"
        for first, *rest in found.chains:
            for module, name in self.find(first):
                while name == WHOLE and rest and f"{module}.{rest[0]}" in self.files:
                    module, rest = f"{module}.{rest[0]}", rest[1:]
                yield module, rest[0] if name == WHOLE and rest else name
        yield from ((text, WHOLE) for text in found.texts if text in self.files)


def operators(found: Facts) -> set[str]:
    "The operators that a statement names: in a string, `package::name`, or as `torch.ops.package.name`"
    called = {f"{PACKAGE}::{c[3]}" for c in found.chains if c[:3] == ("torch", "ops", PACKAGE) and len(c) > 3}
    return called | {text for text in found.texts if text.startswith(f"{PACKAGE}::")}


class Package:
    "The package under `root`, read."

    def __init__(self, root: Path):
        paths = sorted((root / PACKAGE).rglob("*.py"))
        name = lambda p: ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        self.files = {name(p): p for p in paths if p.name != "_modidx.py"}
        self.cuda = {p.stem: p for p in (root / "cuda").glob("*.cu")}
        self.headers = {p.name: p for p in (root / "cuda").glob("*.cuh")}
        self.modules = {n: Module(n, p.name == "__init__.py", ast.parse(p.read_text(encoding="utf-8")), self.files)
                        for n, p in self.files.items()}
        self.changers: dict[object, list[tuple[Module, int]]] = {}  # by what they may change: a use, or an operator
        for module in self.modules.values():
            for number, statement in enumerate(module.statements):
                changed = [use for name in changed_names(statement) for use in module.find(name)]
                for key in {*changed, *operators(module.facts[number])}:
                    self.changers.setdefault(key, []).append((module, number))

    def behind(self, key: Use | str) -> Iterator[tuple[Module, int]]:
        "The statements that give a name its value or may change it, or that name an operator"
        if isinstance(key, tuple) and (module := self.modules.get(key[0])):
            numbers = range(len(module.statements)) if key[1] == WHOLE else module.givers.get(key[1], ())
            yield from ((module, number) for number in numbers)
        yield from self.changers.get(key, ())

    def used_by(self, tree: ast.Module) -> list[str]:
        "The code that `tree` uses, a text for each statement and CUDA file, in an order that no move between files changes"
        page = Module("", True, tree, self.files)
        waiting: list[object] = [key for found in page.facts for key in (*page.uses(found), *operators(found))]
        seen, taken, texts = set(), set(), set().union(*(found.texts for found in page.facts))
        while waiting:
            key = waiting.pop()
            if key in seen:
                continue
            seen.add(key)
            for module, number in set(self.behind(key)) - taken:
                taken.add((module, number))
                texts |= module.facts[number].texts
                waiting += [*module.uses(module.facts[number]), *operators(module.facts[number])]
            if isinstance(key, tuple) and key[0] in self.modules:  # imported there from elsewhere in the package
                waiting += [use for use in self.modules[key[0]].find(key[1]) if use != key]
        return sorted({*(module.text(number) for module, number in taken), *map(self.cuda_text, texts & self.cuda.keys())})

    @functools.cache
    def cuda_text(self, name: str) -> str:
        "The source of a CUDA file with its headers in it, without comments and spaces"
        source = self.cuda[name].read_text(encoding="utf-8")
        source = re.sub(r'^#include "(.+)"$', lambda m: self.headers[m[1]].read_text(encoding="utf-8"), source, flags=re.MULTILINE)
        return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL).split())


@functools.cache
def package(root: Path) -> Package:
    "The package under `root`, read once"
    return Package(root)
