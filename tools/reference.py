"""What the site says of every public name: nbs/reference.ipynb has the groups, the examples and what is refused; the package has the rest.

Under the heading of a name come its sentence, its signature, a table of its parameters or fields, what it returns, its page and its
source. The meaning of a parameter is the comment beside it. A name without an entry, an entry without an example that was run and a
parameter without a meaning are faults, and the site is not built.
"""
import ast
import importlib
import inspect
import io
import json
import re
import textwrap
import tokenize
import types
import typing
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Iterator, NamedTuple

from project import PACKAGE, ROOT, SETTINGS, default_module, is_stage, notebooks, output_text, read_notebook

PAGE = "reference.ipynb"
COLUMNS = 90  # of a signature
RESULTS = {"LossOptions": "core.options", "HeadStats": "partial_fc", "HeadTopK": "partial_fc", "TopK": "topk", "Paths": "scans", "Alignment": "ctc",
           "Span": "core.sequences", "CTCPosteriors": "ctc", "Hypotheses": "decode", "LabelFrames": "lattices", "LogProbs": "logprobs", "Sample": "samples", "Plan": "plans",
           "Estimate": "plans"}  # what public names take or give back, by module
SPACES = ("margins", "semirings", "integrations.transformers", "integrations.trl")  # public modules, whose names are public too
INTERNAL = {"update", "best", "filled", "new_rows", "eval_forward", "reset_parameters"}  # methods that only the library calls
TORCH = {"Tensor": "tensors.html", "nn.Module": "generated/torch.nn.Module.html", "torch.dtype": "tensor_attributes.html#torch-dtype",
         "nn.Parameter": "generated/torch.nn.parameter.Parameter.html", "torch.device": "tensor_attributes.html#torch-device",
         "Optimizer": "optim.html", "torch.Generator": "generated/torch.Generator.html", "DeviceMesh": "distributed.html"}
NAMES = {  # parameters that mean one thing everywhere: for those of which a comment gives the shape or nothing
    "S": "the semiring: what plus and times mean", "accumulate": 'where chunks of dw add up: in "float32", "native", or by the plan',
    "blank": "the class that stands for no label", "chunk_size": "rows of logits in memory at once", "device": "of the weight",
    "dtype": "of the weight", "embedding_size": "features of a row", "features": "rows to classify", "in_features": "features of a token",
    "input": "what the linear layer multiplies", "linear_bias": "of the linear layer", "linear_weight": "of the linear layer",
    "memory_budget": "bytes beyond the gradients", "n_classes": "classes", "n_features": "features of a token", "n_tokens": "tokens",
    "num_classes": "classes", "target": "the classes"}
NOUNS = {"PartialFC": "head", "Optimizer": "optimizer", "Margin": "margin", "Semiring": "semiring"}  # for an object of these classes
SHORT = {"torch": "torch.", "torch._C": "torch.", "torch.nn.modules.module": "nn.", "torch.nn.parameter": "nn.", "torch.fx.graph_module": "fx."}
LIKE = re.compile(r"\bas (?:for|in) `([\w.]+)`")  # a comment that leaves it to another function's
SHAPE = re.compile(r"\[(?![^\]]* \+ )[\w\s.,*+·\-]*\]")


class Parameter(NamedTuple):
    "One parameter of a function, or one field of a tuple."
    name: str
    annotation: Any
    default: Any = inspect.Parameter.empty
    meaning: str = ""
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD


# ---- what the sources say beside names


@cache
def source_of(obj: Any) -> tuple[ast.AST, dict[int, str], set[int]]:
    "Syntax tree of a function or class, its comments by line, and the lines that hold nothing else"
    text = textwrap.dedent(inspect.getsource(obj))
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    comments = {t.start[0]: t.string.lstrip("# ").strip() for t in tokens}
    return ast.parse(text).body[0], comments, {t.start[0] for t in tokens if t.line.strip().startswith("#")}


def joined(comments: dict[int, str], alone: set[int], line: int, step: int) -> str:
    "The comment of a line with those alone on the lines after it (step 1) or before it (step -1)"
    lines = [line]
    while lines[-1] + step in alone:
        lines.append(lines[-1] + step)
    return " ".join(comments[at] for at in sorted(lines) if at in comments)


@cache
def beside(obj: Any) -> dict[str, str]:
    "The comment beside each parameter of a function, and its result as `return`, or beside each field of a class"
    node, comments, alone = source_of(obj)
    if isinstance(node, ast.ClassDef):
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        return {n.target.id: comments.get(n.end_lineno) or joined(comments, alone, n.lineno, -1) for n in fields}
    a = node.args
    listed = [*a.posonlyargs, *a.args, *filter(None, [a.vararg]), *a.kwonlyargs, *filter(None, [a.kwarg])]
    last = node.returns.end_lineno if node.returns else 0  # a comment on this line is about the result
    found = {arg.arg: joined(comments, alone, arg.end_lineno, 1) for arg in listed if arg.end_lineno != last}
    return found | {"return": comments.get(last, "")}


# ---- the public names


def public_names() -> list[str]:
    "Every name that users may rely on, and what those give back"
    package = importlib.import_module(PACKAGE)
    inner = [f"{space}.{name}" for space in SPACES for name in found(space).__all__ if name not in package.__all__]
    return [*package.__all__, *inner, *RESULTS]


def found(name: str) -> Any:
    "The object of a public name"
    start, *rest = name.split(".")
    obj = getattr(importlib.import_module(f"{PACKAGE}.{RESULTS[start]}" if start in RESULTS else PACKAGE), start)
    for part in rest:
        obj = getattr(obj, part)
    return obj


@cache
def entry_of() -> dict[str, str]:
    "By the last part of each public name, and by the whole of it: the name"
    return {part: name for name in public_names() for part in (name.split(".")[-1], name)}


def named(obj: Any) -> str:
    "The public name of a class or function; its own name where it has none"
    return entry_of().get(obj.__name__, obj.__name__)


def is_tuple(obj: Any) -> bool:
    "Is it a class of named tuples?"
    return inspect.isclass(obj) and issubclass(obj, tuple) and hasattr(obj, "_fields")


def own_bases(klass: type) -> list[type]:
    "The classes of the package above a class, nearest first"
    return [c for c in klass.__mro__[1:] if c.__module__.startswith(PACKAGE)]


def maker(klass: type) -> Any:
    "The function that a class is made by: `__init__` of the nearest class of the package that has one; the class for fields; or nothing"
    for c in [klass, *own_bases(klass)]:
        if "__dataclass_fields__" in vars(c):
            return c
        if "__init__" in vars(c):
            return inspect.unwrap(vars(c)["__init__"])
    return None


# ---- what a parameter means


def others(comments: dict[str, str], method: str) -> list[Any]:
    "The functions to which comments leave it; of a class, its method of that name"
    names = [name for text in comments.values() for name in LIKE.findall(text) if name in entry_of()]
    objects = [found(entry_of()[name]) for name in dict.fromkeys(names)]
    return [inspect.unwrap(o) if not inspect.isclass(o) else getattr(o, method) if method and hasattr(o, method) else maker(o) for o in objects]


def inherited(owner: Any, method: str, name: str) -> str:
    "What classes above say of a field or of a parameter of any method, those of the same method first"
    bases = own_bases(owner) if inspect.isclass(owner) else []
    made = [fn for c in bases if (fn := maker(c)) is not None and fn is not c]
    same = [vars(c)[method] for c in bases if inspect.isfunction(vars(c).get(method))] + made
    rest = [m for c in bases for m in vars(c).values() if inspect.isfunction(m) and not m.__name__.startswith("_")]
    texts = (beside(inspect.unwrap(o)).get(name) for o in [*same, *bases, *rest])
    return next(filter(None, texts), "")


def meaning(name: str, fn: Any, owner: Any = None, method: str = "") -> str:
    "What a parameter means: by its comment, by that of the function the comments name, by those of classes above, or by its name"
    comments = beside(fn)
    text = comments.get(name, "")
    if not text or LIKE.search(text):
        elsewhere = (beside(o).get(name) for o in others(comments, method) if o is not fn)
        text = next(filter(None, elsewhere), "") or inherited(owner, method, name)
    if not text or SHAPE.fullmatch(text) or text.isupper():  # nothing, a shape or a letter
        return ", ".join(filter(None, [NAMES.get(name), text]))
    return text


def expanded(p: inspect.Parameter, klass: type) -> Iterator[Parameter]:
    "The keywords that `**options` of a class stands for, as the class above it takes them"
    base = maker(own_bases(klass)[0])
    known = {q.name: q for q in parameters(base, own_bases(klass)[0])}
    for name in typing.get_type_hints(typing.get_args(p.annotation)[0]):
        if name in known:
            yield known[name]._replace(kind=inspect.Parameter.KEYWORD_ONLY)


def parameters(fn: Any, owner: Any = None, method: str = "") -> list[Parameter]:
    "The parameters of a function, or of the class `owner` that it makes"
    if fn is None:
        return []
    rows = []
    for p in inspect.signature(fn).parameters.values():
        if p.name == "self":
            continue
        if p.kind is p.VAR_KEYWORD and typing.get_args(p.annotation):
            rows += [q for q in expanded(p, owner) if q.name not in {r.name for r in rows}]
            continue
        rows.append(Parameter(p.name, p.annotation, p.default, meaning(p.name, fn, owner, method), p.kind))
    return rows


def fields(klass: type) -> list[Parameter]:
    "The fields of a class of tuples"
    comments, hints = beside(klass), typing.get_type_hints(klass, include_extras=True)
    empty = inspect.Parameter.empty
    return [Parameter(name, hints[name], klass._field_defaults.get(name, empty), comments.get(name, ""))
            for name in klass._fields]


# ---- types and signatures


def type_text(kind: Any) -> str:
    "A type as an annotation, in Python's words"
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return type_text(args[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_text(a) for a in args)
    if origin is typing.Literal:
        return f"Literal[{', '.join(json.dumps(a) for a in args)}]"
    if isinstance(kind, list):
        return f"[{', '.join(map(type_text, kind))}]"
    if origin and not args:
        return origin.__name__
    if origin:
        return f"{getattr(origin, '__name__', origin)}[{', '.join(map(type_text, args))}]".replace("collections.abc.", "")
    if isinstance(kind, typing.TypeVar):
        return type_text(kind.__bound__)
    if kind in (None, type(None)) or kind is Ellipsis:
        return "..." if kind is Ellipsis else "None"
    name = getattr(kind, "__name__", str(kind))
    return name if name == "Tensor" else SHORT.get(getattr(kind, "__module__", ""), "") + name


def linked(text: str) -> str:
    "A type as code, linked where it has an entry here or a page of PyTorch's"
    if text in TORCH:
        return f"[`{text}`](https://docs.pytorch.org/docs/stable/{TORCH[text]})"
    if text in entry_of():
        return f"[`{text}`](#{entry_of()[text]})"
    return f"`{text}`"


def type_words(kind: Any) -> str:
    "A type for a table: alternatives as words, each linked where it can be"
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return type_words(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_words(a) for a in args)
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(a)}`" for a in args)
    if origin is tuple and args[-1] is not Ellipsis:
        return f"({', '.join(map(type_words, args))})"
    return linked(type_text(kind))


def default_text(value: Any) -> str:
    "A default as Python writes it"
    if is_dataclass(value):
        return f"{type(value).__name__}()"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def parts(rows: list[Parameter]) -> list[str]:
    "The parameters of a signature, with the star before those that are keywords alone"
    out = []
    for p in rows:
        if p.kind is p.kind.KEYWORD_ONLY and "*" not in out and not any(s.startswith("*") for s in out):
            out.append("*")
        star = {p.kind.VAR_POSITIONAL: "*", p.kind.VAR_KEYWORD: "**"}.get(p.kind, "")
        kind = "" if p.annotation is inspect.Parameter.empty else f": {type_text(p.annotation)}"
        default = "" if p.default is inspect.Parameter.empty else f" = {default_text(p.default)}"
        out.append(f"{star}{p.name}{kind}{default}")
    return out


def signature(name: str, rows: list[Parameter], result: Any = None) -> str:
    "A call in at most 88 columns: on one line, or one parameter a line"
    tail = "" if result in (None, inspect.Signature.empty) else f" -> {type_text(result)}"
    listed = parts(rows)
    line = f"{name}({', '.join(listed)}){tail}"
    return line if len(line) <= COLUMNS else "\n".join([f"{name}(", *(f"    {part}," for part in listed), f"){tail}"])


# ---- Markdown


def prose(text: str) -> str:
    "A comment as Markdown: shapes and words in quotation marks are code, and nothing else is markup"
    pieces = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(pieces), 2):
        plain = re.split(rf'("[^"]*"|{SHAPE.pattern})', pieces[i])
        plain[0::2] = [re.sub(r"([*_<>\[\]])", r"\\\1", part) for part in plain[0::2]]
        plain[1::2] = [f"`{part}`" for part in plain[1::2]]
        pieces[i] = "".join(plain)
    return "".join(pieces)


def code(text: str) -> str:
    "A block of Python"
    return f"```python\n{text}\n```"


def table(head: list[str], rows: list[list[str]]) -> str:
    "A table of Markdown that a narrow screen shows row by row"
    lines = [head, ["---"] * len(head), *rows]
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)
    return f"::: {{.fields{' .parameters' * (len(head) == 4)}}}\n\n{body}\n\n:::"


def loss_options() -> type:
    "The class that lists the options of the cross entropies"
    return found("LossOptions")


def parameter_table(rows: list[Parameter]) -> str:
    "Name, type, default and meaning of each parameter; the options of the cross entropies in one row"
    options = [p for p in rows if p.name in loss_options()._fields and not p.meaning]
    listed = [p for p in rows if p not in options]
    cells = [[f"`{p.name}`{{.nolink}}", "" if p.annotation is inspect.Parameter.empty else type_words(p.annotation),
              "" if p.default is inspect.Parameter.empty else f"`{default_text(p.default)}`", prose(p.meaning)] for p in listed]
    if options:
        names = ", ".join(f"`{p.name}`{{.nolink}}" for p in options)
        cells.append([names, "numbers", "", "what shapes the loss: [`LossOptions`](#LossOptions) has type, default and meaning of each"])
    return table(["parameter", "type", "default", "meaning"], cells) if cells else ""


def field_table(klass: type) -> str:
    "Name, type, default and meaning of each field, and what may be given where a check says it"
    rows = fields(klass)
    checks = [next((m for m in getattr(p.annotation, "__metadata__", ())), None) for p in rows]
    head = ["field", "type", *["default", "what may be given"] * any(checks), "meaning"]
    extra = lambda p, check: [f"`{None if check.optional else p.default}`", check.expected] if any(checks) else []
    return table(head, [[f"`{p.name}`{{.nolink}}", type_words(p.annotation), *extra(p, c), prose(p.meaning)] for p, c in zip(rows, checks)])


def sentence(obj: Any) -> tuple[str, str]:
    "The first line of a docstring, and the lines after it up to the sections that `help` adds"
    first, _, rest = re.split(r"(?m)^(?:Args|Returns):$", inspect.cleandoc(obj.__doc__ or ""))[0].partition("\n")
    return first, rest.strip()


def returned(result: Any, text: str) -> str:
    "What a function gives back"
    if result in (None, inspect.Signature.empty):
        return ""
    return f"**Returns** {type_words(result)}{': ' + prose(text) if text else ''}."


def shown_methods(klass: type) -> dict[str, Any]:
    "Methods to show, by name: a module's call, and what has a docstring and is no entry's above"
    above = [c for c in own_bases(klass) if c.__name__ in entry_of()]
    own = [c for c in reversed([klass, *own_bases(klass)]) if c not in above]
    methods = {name: m for c in own for name, m in vars(c).items() if inspect.isfunction(m) and name[0] != "_" and name not in INTERNAL}
    if "target_score" in methods:  # whose call is that
        methods.pop("forward", None)
    kept = {name: m for name, m in methods.items() if m.__doc__ or name in ("forward", "step")}
    return {name: inspect.unwrap(m) for name, m in kept.items() if name == "forward" or not any(hasattr(c, name) for c in above)}


def method_text(klass: type, name: str, fn: Any) -> str:
    "Signature, sentence, parameters and result of a method; `forward` is the call of a module"
    rows, result = parameters(fn, klass, name), inspect.signature(fn).return_annotation
    noun = next((NOUNS[c.__name__] for c in klass.__mro__ if c.__name__ in NOUNS), "module")
    called = noun if name == "forward" else f"{noun}.{name}"
    pieces = [code(signature(called, rows, result)), prose(sentence(fn)[0]), parameter_table(rows),
              returned(result, beside(fn).get("return", ""))]
    return "\n\n".join(filter(None, pieces))


def property_table(klass: type) -> str:
    "The properties of a class, with the comment beside or the docstring"
    held = {name: p.fget for c in reversed([klass, *own_bases(klass)]) for name, p in vars(c).items() if isinstance(p, property)}
    texts = {name: beside(f).get("return") or sentence(f)[0] for name, f in held.items()}
    kinds = {name: inspect.signature(f).return_annotation for name, f in held.items()}
    rows = [[f"`{name}`{{.nolink}}", type_words(kinds[name]), prose(text)] for name, text in texts.items() if text]
    return table(["attribute", "type", "meaning"], rows) if rows else ""


def attribute_table(klass: type) -> str:
    "What a class made by nothing asks its subclasses to have"
    rows = [[f"`{name}`{{.nolink}}", f"`{getattr(klass, name)!r}`" if hasattr(klass, name) else "", prose(text)] for name, text in beside(klass).items()]
    return table(["attribute", "default", "meaning"], rows)


def class_text(name: str, klass: type) -> list[str]:
    "How a class is made, what it is and what it does"
    rows = parameters(maker(klass), klass)
    above = next((c for c in own_bases(klass) if c.__name__ in entry_of()), None)
    base = f"A subclass of {linked(named(above))}." if above else ""
    attributes = attribute_table(klass) if maker(klass) is None and not above else ""
    return [code(signature(f"fl.{name}", rows)), base, parameter_table(rows), attributes, *(method_text(klass, *m) for m in shown_methods(klass).items())]


def function_text(name: str, obj: Any) -> list[str]:
    "How a function is called and what it returns"
    fn = inspect.unwrap(obj)
    rows, result = parameters(obj), inspect.signature(obj).return_annotation
    return [code(signature(f"fl.{name}", rows, result)), prose(sentence(fn)[1]), parameter_table(rows), returned(result, beside(fn)["return"])]


def body(name: str, obj: Any) -> list[str]:
    "What the package says of a public name, but for its sentence"
    if inspect.ismodule(obj):
        return []
    if is_tuple(obj):
        return [field_table(obj)]
    if inspect.isclass(obj):
        return [property_table(obj)] if name in RESULTS else class_text(name, obj)
    return function_text(name, obj)


# ---- the page


class Entry(NamedTuple):
    "A heading of the page and what follows it."
    names: list[str]  # the first is its anchor
    heading: str  # with its marks
    prose: str  # below it, in the same cell
    cell: int
    shows: bool  # whether an example below it shows what it gave

    @property
    def obj(self) -> Any:
        "What it is about: of an instance and its class the class"
        objects = [found(name) for name in self.names]
        return next(filter(inspect.isclass, objects), objects[0])


HEADING = re.compile(r"#{3,4} (?!\\d)([\w., ]+)(?:\n|$)")


def entries(nb: dict) -> list[Entry]:
    "The entries of the page, in order"
    at = [i for i, c in enumerate(nb["cells"]) if c["cell_type"] == "markdown" and c["source"].startswith("##")]
    made = []
    for i, after in zip(at, [*at[1:], len(nb["cells"])]):
        if match := HEADING.match(nb["cells"][i]["source"]):
            shown = [c for c in nb["cells"][i:after] if c["cell_type"] == "code" and any(map(output_text, c["outputs"]))]
            rest = nb["cells"][i]["source"][match.end():].strip()
            made.append(Entry(match[1].strip().split(", "), match[0].strip(), rest, i, bool(shown)))
    return made


def blanks(rows: list[Parameter], where: str) -> Iterator[str]:
    "Parameters that nothing describes"
    options = set(loss_options()._fields)
    yield from (f"{where}: {p.name} has no meaning: a comment beside it gives it one" for p in rows if not p.meaning and p.name not in options)


def faults_of(entry: Entry) -> Iterator[str]:
    "What an entry lacks"
    obj, name = entry.obj, entry.names[0]
    if not sentence(obj)[0]:
        yield f"{name}: no docstring"
    if not entry.shows and name not in RESULTS:
        yield f"{name}: no example with an output"
    if is_tuple(obj):
        yield from blanks(fields(obj), name)
    elif inspect.ismodule(obj) or name in RESULTS:
        return
    elif inspect.isclass(obj):
        yield from blanks(parameters(maker(obj), obj), name)
        for key, fn in shown_methods(obj).items():
            yield from blanks(parameters(fn, obj, key), f"{name}.{key}")
    else:
        yield from blanks(parameters(obj), name)


def faults(nb: dict) -> list[str]:
    "What the page lacks: entries of public names, and what each entry needs"
    public, listed = public_names(), [name for entry in entries(nb) for name in entry.names]
    lost = [f"{name}: no entry in nbs/{PAGE}" for name in public if name not in listed]
    unknown = [f"{name}: an entry in nbs/{PAGE}, and no public name" for name in listed if name not in public]
    return lost + unknown + [fault for entry in entries(nb) if entry.names[0] in public for fault in faults_of(entry)]


@cache
def pages() -> dict[str, tuple[str, str]]:
    "By the module of a stage: its page, from nbs/, and the page's title"
    made = {}
    for path in filter(is_stage, notebooks()):
        nb = read_notebook(path)
        title = nb["cells"][0]["source"].split("\n")[0].removeprefix("# ")
        made.setdefault(default_module(nb), (path.name, f"Stage {int(path.name[:2])} · {title}"))
    return made


def links(obj: Any, source: str) -> str:
    "The page of the stage that an object comes from, if one does, and its source at the version's tag"
    module = obj.__name__ if inspect.ismodule(obj) else obj.__module__
    line = "" if inspect.ismodule(obj) else f"#L{inspect.getsourcelines(inspect.unwrap(obj))[1]}"
    href, title = pages().get(module, ("", ""))
    return (f"[{title}]({href}) · " if href else "") + f"[source]({source}/{module.replace('.', '/')}.py{line})"


def entry_text(entry: Entry, source: str) -> str:
    "The Markdown of an entry"
    name, obj = entry.names[0], entry.obj
    more = "".join(f'<span id="{other}"></span>' for other in entry.names[1:])
    pieces = [f"{entry.heading} {{#{name}}}", more + prose(sentence(obj)[0]), entry.prose, *body(name, obj), links(obj, source)]
    return "\n\n".join(filter(None, pieces))


def overview(nb: dict) -> str:
    "The names of each group, linked"
    rows, listed = [], {entry.cell: entry for entry in entries(nb)}
    for i, cell in enumerate(nb["cells"]):
        if cell["cell_type"] == "markdown" and cell["source"].startswith("## "):
            rows.append([cell["source"].split("\n")[0][3:], []])
        if i in listed:
            rows[-1][1].append(f"[`{listed[i].names[0]}`](#{listed[i].names[0]})")
    return table(["group", "names"], [[group, " · ".join(names)] for group, names in rows if names])


def anchors() -> dict[str, str]:
    "By each way to write a public name: the anchor of its entry"
    made = {}
    for entry in entries(read_notebook(ROOT / "nbs" / PAGE)):
        for name in entry.names:
            made |= {way: entry.names[0] for way in (name, f"fl.{name}", f"{PACKAGE}.{name}")}
            made.setdefault(name.split(".")[-1], entry.names[0])
    return made


def tag_url(repository: str) -> str:
    "Where the repository shows its files at this version's tag"
    return f"{repository}/blob/v{SETTINGS['DEFAULT']['version']}"


def fill(path: Path, repository: str) -> None:
    "Put into the page what the package says; `ValueError` names what is lacking"
    nb = read_notebook(path)
    if lacking := faults(nb):
        raise ValueError("\n".join(lacking))
    texts = {entry.cell: entry_text(entry, tag_url(repository)) for entry in entries(nb)}
    glance = overview(nb)
    for i, cell in enumerate(nb["cells"]):
        cell["source"] = texts.get(i, cell["source"])
        if cell["source"].startswith("## All names"):
            cell["source"] += f"\n\n{glance}"
    path.write_text(json.dumps(nb), encoding="utf-8")
