"""Write fusedloss/_arguments.py: what `help` says of the arguments and results of public functions, classes and methods.

    python tools/build_arguments.py

The meaning of an argument is the comment beside it, found as the reference finds it. Docstrings of the modules hold none of it: the
package adds the sections to them when they are imported.
"""
import inspect
import json
import textwrap
from typing import Any, Iterator

from reference import Parameter, beside, fields, found, is_tuple, loss_options, maker, parameters, public_names, sentence, type_text
from project import PACKAGE, ROOT

HEADER = '"What `help` adds to docstrings: made by tools/build_arguments.py from the comments beside arguments, and edited there."\n\n'
WIDTH = 100  # columns of a line


def entry(p: Parameter, options: dict[str, str]) -> str:
    "Name, type and meaning of a parameter, as lines"
    stars = {p.kind.VAR_POSITIONAL: "*", p.kind.VAR_KEYWORD: "**"}.get(p.kind, "")
    kind = "" if p.annotation is inspect.Parameter.empty else f" ({type_text(p.annotation)})"
    text = f"{stars}{p.name}{kind}: {p.meaning or options.get(p.name, '')}".rstrip(": ")
    return textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False, break_long_words=False)


def section(rows: list[Parameter], result: Any = None, text: str = "") -> str:
    "What a docstring lacks: the arguments and the result"
    options = {p.name: p.meaning for p in fields(loss_options())}
    parts = ["\n".join(["Args:", *(entry(p, options) for p in rows)])] if rows else []
    if result not in (None, inspect.Signature.empty):
        parts.append("Returns:\n" + textwrap.fill(f"{type_text(result)}: {text}".rstrip(": "), WIDTH, initial_indent="    ", subsequent_indent="        "))
    return "\n\n".join(parts)


def sections_of(obj: Any) -> Iterator[tuple[Any, str]]:
    "A public class or function and its methods, each with its section: a method without a docstring has that of its base"
    if inspect.ismodule(obj):
        return
    if not inspect.isclass(obj):
        if inspect.isfunction(obj):
            yield obj, section(parameters(obj), inspect.signature(obj).return_annotation, beside(inspect.unwrap(obj)).get("return", ""))
        return
    yield obj, section(fields(obj) if is_tuple(obj) else parameters(maker(obj), obj))
    for name in [] if is_tuple(obj) else dir(obj):
        held = next((vars(c)[name] for c in obj.__mro__ if name in vars(c) and sentence(vars(c)[name])[0]), None)
        if inspect.isfunction(held) and name[0] != "_" and held.__module__.startswith(PACKAGE):
            fn = inspect.unwrap(held)
            yield held, section(parameters(fn, obj, name), inspect.signature(fn).return_annotation, beside(fn).get("return", ""))


def table() -> dict[tuple[str, str], str]:
    "Sections by module and name"
    made = {}
    for name in public_names():
        for obj, text in sections_of(found(name)):
            if text:
                made.setdefault((obj.__module__, obj.__qualname__), text)
    return dict(sorted(made.items()))


def text_of(sections: dict[tuple[str, str], str]) -> str:
    "The module, one line of a section a line"
    quoted = {key: "\n".join(f"        {json.dumps(line, ensure_ascii=False)}" for line in text.splitlines(keepends=True)) for key, text in sections.items()}
    return f"{HEADER}SECTIONS = {{\n" + "".join(f"    {json.dumps(key[0])[:-1]} {key[1]}\": (\n{lines}),\n" for key, lines in quoted.items()) + "}\n"


if __name__ == "__main__":
    (ROOT / "fusedloss" / "_arguments.py").write_text(text_of(table()), encoding="utf-8")
