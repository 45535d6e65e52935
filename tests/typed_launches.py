"""What Triton's interpreter accepts, its compiler must accept too: every new kind of launch is lowered for sm_90, without a GPU.

The interpreter runs Python and NumPy, where an integer argument is never a constant and a type never unknown. Its tests
send each launch's types to a process of its own, which does not interpret, and lowers the kernel to Triton's IR.
"""
import atexit
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int16: "i16", torch.int32: "i32",
         torch.int64: "i64", torch.bool: "i1", torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv"}


def named(fn) -> list[str]:
    "Where a kernel or a device function is found"
    return [fn.fn.__module__, fn.fn.__name__]


def typed(parameter: inspect.Parameter, value) -> tuple[str, object]:
    "Type of an argument as the compiler sees it, and its value where that is a constant"
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype], None
    if hasattr(value, "block_shape"):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>", None
    if hasattr(value, "fn"):
        return "constexpr", {"function": named(value)}
    if hasattr(value, "_fields"):  # options: a tuple of types, by name
        return {"options": [type(value).__module__, type(value).__name__], "types": [typed(parameter, v) for v in value]}, None
    constant = value is None or value is True or value is False or "constexpr" in str(parameter.annotation)
    if constant or type(value) is int and value == 1:  # Triton makes a constant of an integer that is 1
        return "constexpr", value
    return ("fp32", None) if isinstance(value, float) else ("i32" if -2**31 <= value < 2**31 else "i64", None)


def launch_types(kernel, args: tuple, options: dict) -> str:
    "A launch as a line of text: equal lines are lowered once"
    parameters = inspect.signature(kernel.fn).parameters
    given = dict(zip(parameters, args)) | {k: v for k, v in options.items() if k in parameters}
    types = {name: typed(p, given.get(name, p.default)) for name, p in parameters.items()}
    return json.dumps([named(kernel), types])


def sixteenfold(value) -> bool:
    "Does Triton compile a kernel of its own for this value, as for an aligned pointer or an even stride?"
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return type(value) is int and value != 1 and value % 16 == 0


def build_line(kernel, args: tuple, options: dict) -> str:
    "A launch as a line of text, with all that the compiled kernel depends on but the architecture"
    name, types = json.loads(launch_types(kernel, args, options))
    given = dict(zip(inspect.signature(kernel.fn).parameters, args)) | options
    even = [k for k, (t, _) in types.items() if t != "constexpr" and sixteenfold(given.get(k))]  # of options none is an offset
    flags = {k: v for k, v in options.items() if k in ("num_warps", "num_stages", "maxnreg")}
    return json.dumps([name, types, even, flags])


class Lowerer:
    "A process that lowers kernels, begun at the first launch"
    def __init__(self):
        quiet = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        quiet["PYTHONPATH"] = os.pathsep.join(sys.path)
        self.process = subprocess.Popen([sys.executable, __file__], env=quiet, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        atexit.register(self.process.kill)

    def ask(self, line: str) -> str | dict:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    @cache  # noqa: B019: one for each process of tests
    def complaint(self, line: str) -> str:
        "What the compiler has against a launch; empty if nothing"
        return self.ask(line)

    @cache  # noqa: B019: as above
    def narrow_products(self, line: str) -> str | list[str]:
        "Strides that a launch multiplies in 32 bits; or a complaint"
        return self.ask(json.dumps([*json.loads(line)[:2], "products"]))

    @cache  # noqa: B019: as above
    def usage(self, line: str, arch: int) -> str | dict[str, int]:
        "What a launch of `build_line` asks of an architecture: bytes of shared memory, registers, bytes of stack; or a complaint"
        return self.ask(json.dumps([*json.loads(line), arch]))


@cache
def lowerer() -> Lowerer:
    return Lowerer()


def can_look() -> bool:
    "Are launches to be seen? Without Triton there are none, and before 3.5 they have no place in common"
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        return False
    return hasattr(InterpretedFunction, "run")


def kind_of(line: str) -> str:
    "What a launch of `launch_types` has in common with others: the kernel, the types of its pointers, the arguments that are None"
    name, types = json.loads(line)
    pointers = {t for t, _ in types.values() if isinstance(t, str) and t.startswith("*")}
    absent = [k for k, (t, v) in types.items() if t == "constexpr" and v is None]
    return json.dumps([name, sorted(pointers), absent])


LOWERED = set()  # kinds of launches


def check_launches(monkeypatch, each: bool) -> None:
    "From now on launches of the library's own kernels are lowered before they are interpreted: each one, or the first of its kind"
    if not can_look():
        return
    from triton.runtime.interpreter import InterpretedFunction
    run = InterpretedFunction.run
    def lowered_first(self, *args, **options):
        if self.fn.__module__.startswith("fusedloss."):
            line = launch_types(self, args, options)
            kind = kind_of(line)
            if each or kind not in LOWERED:
                complaint = lowerer().complaint(line)
                assert not complaint, f"the compiler refuses {self.fn.__name__}:\n{complaint}"
                LOWERED.add(kind)
        return run(self, *args, **options)
    monkeypatch.setattr(InterpretedFunction, "run", lowered_first)


def found(name: list[str]):
    return getattr(importlib.import_module(name[0]), name[1])


def source_of(name: list[str], types: dict, even: list[str] = ()):
    "What Triton's compiler takes: a kernel for these types and constants"
    from triton.compiler import ASTSource
    constants = {k: found(v["function"]) if isinstance(v, dict) else v for k, (t, v) in types.items() if t == "constexpr"}
    grouped = {k: t for k, (t, _) in types.items() if isinstance(t, dict)}
    constants |= {(list(types).index(k), i): v for k, group in grouped.items() for i, (t, v) in enumerate(group["types"]) if t == "constexpr"}
    signature = {k: found(t["options"])._make(part for part, _ in t["types"]) if k in grouped else t for k, (t, _) in types.items()}
    attributes = {(i,): [["tt.divisibility", 16]] for i, k in enumerate(types) if k in even}
    return ASTSource(found(name), signature, constants, attributes)


def lower(name: list[str], types: dict) -> str:
    "Triton's IR of a kernel for these types, as text; raises as the compiler does"
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    target = GPUTarget("cuda", 90, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source, options = source_of(name, types), backend.parse_options({})
    return str(source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context))


ARGUMENT = re.compile(r'(%\w+): i32 (?:\{[^}]*\} )?loc\("(\w*(?:stride\w*|_row|_col))"')  # of a function of the library: a stride
STEP = re.compile(r"\s*(%\w+) = (tt\.splat|tt\.broadcast|tt\.expand_dims|arith\.muli) ([^:]*):(.*)")


def narrow_products(text: str) -> list[str]:
    "Strides that Triton's IR multiplies in 32 bits: the offset that comes of it may be larger"
    wrong, strides = set(), {}
    for line in text.splitlines():
        if "tt.func" in line:
            strides = dict(ARGUMENT.findall(line))
        step = STEP.match(line)
        held = [strides[v] for v in re.findall(r"%\w+", step[3]) if v in strides] if step else []
        if held and step[2] != "arith.muli":
            strides[step[1]] = held[0]
        elif held and "i32" in step[4]:
            wrong.add(held[0])
    return sorted(wrong)


def resources(name: list[str], types: dict, even: list[str], flags: dict, arch: int) -> dict[str, int]:
    "What the kernel that Triton makes for an architecture asks of it"
    import triton
    from triton.backends.compiler import GPUTarget
    kernel = triton.compile(source_of(name, types, even), GPUTarget("cuda", arch, 32), flags)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK"))
    return dict(shared=kernel.metadata.shared, registers=registers, stack=stack)


def serve() -> None:
    "Lower what comes by lines; answer with what went wrong"
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = resources(*request) if len(request) == 5 else lower(*request[:2])
            answer = narrow_products(answer) if len(request) == 3 else answer if len(request) == 5 else ""
        except Exception as error:
            answer = f"{error}\n{error.__cause__ or ''}\n{line}"
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
