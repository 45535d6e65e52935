"""Errors of Triton's interpreter, with the line of the kernel; and what its compiler refuses though the interpreter runs it."""

import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Optional


IN_WORDS = {  # a message, or a part of one: the same for who wrote the kernel
    r"incompatible dimensions at index \d+: (\d+) and (\d+)": r"blocks of \1 and \2 lanes do not fit: is it the wrong axis, or a missing `[:, None]`?",
    "object is not iterable": "Python's brackets, loops, `max` and `sum` know neither pointers nor blocks. Use `tl.load(z_ptr + at)`, `tl.max(z, 0)`.",
    r"axis (\d+) out of bounds": r"the block has no axis \1: a block of numbers has axis 0, a tile has 0 and 1.",
    "cannot be block type if pointer": "a block of values goes to one place: reduce it first, or make a block of places.",
    "does not support item assignment": "a pointer is not assigned to. Use `tl.store(out_ptr + at, values)`.",
    "Both operands must be same dtype. Got (.*) and (.*)": r"`tl.dot` takes operands of one dtype, and got \1 and \2. Convert one: `.to(tl.float16)`.",
    r"Cannot access global variable (\w+)": r"a kernel knows only constants: write `\1 = tl.constexpr(...)`.",
    "unsupported AST node type: (Continue|Break)": "there is no `continue` and no `break`: put the lines that they leave out under an `if`.",
    r"Loop-carried variable (\w+) has initial type (.*?) but is re-assigned to (.*?) in loop": r"`\1` begins as \2 and becomes \3 in the loop. A variable keeps its shape and dtype: begin with `tl.zeros`, or `tl.full`.",
}


def in_words(message: str) -> str:
    "What a message says, for who wrote the kernel; the message itself where we know no better."
    found = ((re.search(pattern, message), words) for pattern, words in IN_WORDS.items())
    return next((match.expand(words) for match, words in found if match), message)


def line_words(number: int, line: str) -> str:
    "A line of a kernel."
    return f"line {number}, `{line.strip()}`"


def with_causes(error: BaseException) -> list[BaseException]:
    "An error, its cause, the cause of that: the interpreter raises once more in each function that a kernel calls."
    return [error, *(with_causes(error.__cause__) if error.__cause__ else ())]


def stop_words(
    kernel: Any,
    error: BaseException,  # with its traceback
) -> str:
    "The kernel's line at which the interpreter stopped, and why."
    first = with_causes(error)[-1]
    message = in_words(str(first))
    why = message if message != str(first) else f"{type(first).__name__}: {message}"
    frames = [frame for each in with_causes(error) for frame in traceback.extract_tb(each.__traceback__)]
    frames = [frame for frame in frames if frame.filename == kernel.fn.__code__.co_filename]
    return f", {line_words(frames[-1].lineno, frames[-1].line)}: {why}" if frames else f": {why}"


TYPES = {"torch.float16": "*fp16", "torch.float32": "*fp32", "torch.int64": "*i64"}


def argument_type(name: str, value: Any, constant: bool) -> str:
    "How the compiler calls the type of an argument."
    if constant:
        return "constexpr"
    if hasattr(value, "dtype"):
        return TYPES[str(value.dtype)]
    return "fp32" if isinstance(value, float) else "i32"


def definition_of(name: str, value: Any) -> str:
    "Text that defines a name as it is here; raises if there is none."
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, (bool, int, float, str)):
        return f"{name} = {value!r}"
    if type(value).__name__ == "constexpr":
        return f"{name} = triton.language.constexpr({value.value!r})"
    function = getattr(value, "fn", value)
    if not callable(function):
        raise TypeError(f"{name}: expected a module, a number or a function, got {type(value).__name__}")
    if function.__module__.startswith("triton."):
        return f"from {function.__module__} import {function.__name__} as {name}"
    return textwrap.dedent(inspect.getsource(function))


def text_of(kernel: Any) -> str:
    "A kernel as text, with what it names."
    found, wanted = {"tl": "import triton.language as tl", "jit": "from triton import jit"}, [kernel]
    found[kernel.fn.__name__] = definition_of(kernel.fn.__name__, kernel)
    while wanted:
        function = wanted.pop().fn
        for name in function.__code__.co_names:
            if name in found or name not in function.__globals__:
                continue
            value = function.__globals__[name]
            found[name] = definition_of(name, value)
            if hasattr(value, "fn"):
                wanted.append(value)
    functions_last = sorted(found.values(), key=lambda text: text.startswith("@"))
    return "\n\n".join(["import triton", "from math import inf, nan", *functions_last])


def module_of(text: str) -> dict[str, Any]:
    "The names that a text defines, from a file, as Triton reads a kernel's source."
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.py"
        path.write_text(text, encoding="utf-8")
        return runpy.run_path(str(path))


def lower(text: str, name: str, signature: dict[str, str], constants: dict[str, Any]) -> Optional[tuple[str, str]]:
    "Compile the kernel `name` of a text to Triton's intermediate representation; the line and the message if Triton refuses."
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, CompilationError
    from triton.compiler.compiler import make_backend

    target, context = GPUTarget("cuda", 90, 32), ir.context()
    backend = make_backend(target)
    ir.load_dialects(context)
    backend.load_dialects(context)
    source, options = ASTSource(module_of(text)[name], signature, constants), backend.parse_options({})
    try:
        source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    except CompilationError as error:
        return refused_line(error), reason_of(error)
    return None


def refused_line(error: Exception) -> str:
    "The kernel's line that does not compile, if the compiler says it."
    return error.src.splitlines()[error.node.lineno - 1] if error.src and hasattr(error.node, "lineno") else ""


def reason_of(error: Exception) -> str:
    "What a compiler says in the innermost of the functions that a line calls."
    while type(error.__cause__) is type(error):
        error = error.__cause__
    return error.error_message or str(error.__cause__ or error)


def answer() -> None:
    "Compile the kernel that comes in as text."
    try:
        found = lower(**json.load(sys.stdin))
    except Exception:
        found = None  # of another version of Triton, or of text that is no module: nothing can be said
    print(json.dumps(found))


def compiled(**request) -> Optional[tuple[str, str]]:
    "`lower` in a process that does not interpret."
    quiet = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = f"import runpy; runpy.run_path({find_spec('workbook.puzzles.refusals').origin!r})['answer']()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(request),
        env=quiet,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return json.loads(done.stdout)


def refusal(
    kernel: Any,  # that the interpreter ran
    arguments: dict[str, Any],  # by name: what its pointers point at, and its sizes and constants
) -> Optional[str]:
    "Why Triton's compiler does not take a kernel, in words; None if it does, or if it cannot be asked."
    constants = {name: arguments[name] for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
    signature = {name: argument_type(name, arguments[name], name in constants) for name in kernel.arg_names}
    try:
        found = compiled(text=text_of(kernel), name=kernel.fn.__name__, signature=signature, constants=constants)
    except (OSError, subprocess.SubprocessError, TypeError, ValueError):
        return None  # without its text, or without the process
    if found is None:
        return None
    line, message = found
    where = f" `{line.strip()}`:" if line else ""
    return f"The values are right, but Triton does not compile it.{where} {in_words(message)}"
