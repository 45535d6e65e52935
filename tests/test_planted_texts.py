"""Every planted bug has a place: what a table of bugs replaces stands once in the sources. The tests that run with the bugs are thorough ones."""
import ast
import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers import replaced, with_texts_replaced

TESTS = Path(__file__).parent
TABLES = ("BUGS", "MUTANTS")  # what names of tables end with
FILES = [path.stem for path in sorted(TESTS.glob("*.py")) if any(f"{table} = {{" in path.read_text(encoding="utf-8") for table in TABLES)]
APART = "cuda/*.cu", "examples/*.py", "nbs/tutorials/*.ipynb", "tools/*.py", "tools/*.js"  # where some bugs are planted by other means


def text_of(path: Path) -> str:
    "A file, of a page its code"
    text = path.read_text(encoding="utf-8")
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"]) if path.suffix == ".ipynb" else text


@pytest.fixture(scope="module")
def apart() -> list[str]:
    "Texts of files that are no modules of the library"
    return [text_of(path) for pattern in APART for path in sorted(TESTS.parent.glob(pattern))]


def strings(value: Any) -> list[str]:
    "The texts in a bug, at any depth"
    return [value] if isinstance(value, str) else [text for part in value for text in strings(part)] if isinstance(value, (tuple, list)) else []


def bugs_of(module: ModuleType) -> Iterator[tuple[str, list[str]]]:
    "The bugs of a module of tests: a name, and texts with what is put in their place"
    for table, bugs in vars(module).items():
        if table.endswith(TABLES) and isinstance(bugs, Mapping):
            for bug, value in bugs.items():
                texts = strings(value)
                yield f"{table}: {bug}", texts[len(texts) % 2:]  # the name of a case may come first


def named(words: str, module: Any) -> Any:
    "What a name with dots means in a module; None for no such name"
    for word in words.split("."):
        module = getattr(module, word, None)
    return module


def modules_given(module: ModuleType) -> list[str]:
    "The modules of the library and the workbook that a module of tests gives to functions, such as `planted`"
    calls = [node for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    given = dict.fromkeys(ast.unparse(arg) for call in calls for arg in call.args if isinstance(arg, (ast.Name, ast.Attribute)))
    found = [value.__name__ for words in given if isinstance(value := named(words, module), ModuleType)]
    return [name for name in found if name.startswith(("fusedloss.", "workbook."))]


def faults(*tries) -> list[str]:
    "What all tries have raised; nothing where one has not"
    found = []
    for function, given, pairs in tries:
        try:
            function(given, *pairs)
        except AssertionError as error:
            found.append(str(error).partition("\n")[0])
        else:
            return []
    return found


def test_tables_are_found():
    assert len(FILES) > 30 and {"sharded_cases", "test_ctc", "test_transducer"} < {*FILES}


@pytest.mark.parametrize("name", FILES)
def test_what_is_replaced_stands_in_one_place(name, apart):
    module = import_module(name)
    tops, missing = modules_given(module), {}
    for bug, texts in bugs_of(module):
        assert texts, f"{bug}: no texts"
        if found := faults(*((with_texts_replaced, top, texts) for top in tops), *((replaced, source, texts) for source in apart)):
            missing[bug] = found[0]
    assert not missing
