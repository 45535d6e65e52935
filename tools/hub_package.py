"""The package as the Hugging Face Hub's kernel loader takes it: the losses of a language model, relocatable, with operators in a namespace of their own.

    python tools/hub_package.py OUT [--id ID]
    python tools/hub_package.py OUT --ahead

OUT, which must not be there, gets the project from which kernel-builder builds (build.toml, CARD.md, flake.nix, torch-ext/), and in
OUT/build what is built from it without a compiler: a folder for each backend, which `kernels.get_local_kernel(OUT)` loads. With --ahead
the project's build compiles the CUDA kernels, and is left to kernel-builder.

The files of tools/hub/package take the place of the library's; what they import, and what that imports, goes along. The same sources
make the same bytes. Without ID the namespace is named by them.
"""
import argparse
import ast
import base64
import hashlib
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from check_house import House, imports_of
from project import PACKAGE, ROOT, SETTINGS

HUB = ROOT / "tools" / "hub"
OWN = HUB / "package"
VERSION = 0  # the Hub's: one for each interface, 0 while it may change
BACKENDS = "cpu", "cuda"
LICENSES = {"apache2": "Apache-2.0"}
INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
Files = dict[str, bytes]  # by path


class General(NamedTuple):
    "What is said of the package, all of it by settings.ini."
    name: str
    license: str
    source: str
    repo: str  # on the Hub

    @classmethod
    def of_settings(cls) -> "General":
        s = SETTINGS["DEFAULT"]
        return cls(s["lib_name"], LICENSES[s["license"]], s["git_url"], f"{s['user']}/{s['repo']}")


# ---- the modules


def own_files() -> dict[str, Path]:
    "Modules of tools/hub/package by name without the package's, an empty one for the package"
    paths = {".".join(path.relative_to(OWN).with_suffix("").parts): path for path in sorted(OWN.rglob("*.py"))}
    return {name.removesuffix("__init__").removesuffix("."): path for name, path in paths.items()}


def modules(house: House) -> dict[str, Path]:
    "Files of the package, by name without the package's: those of tools/hub/package, and all that they lead to"
    own = own_files()
    full = lambda name: f"{PACKAGE}.{name}".removesuffix(".")
    known = {full(name): path for name, path in {**house.files, **own}.items() if name != PACKAGE}

    def leads_to(name: str) -> set[str]:
        if name not in own:
            return set(house.taken[name]) - {PACKAGE}
        return {source.removeprefix(PACKAGE).removeprefix(".") for source, _ in imports_of(own[name], full(name), known)}

    found, waiting = {}, [*own, "_ops"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = own.get(name) or house.files[name]
            waiting += [*leads_to(name), name.rpartition(".")[0]]  # and the package that it is in
    return dict(sorted(found.items()))


def relative(text: str, name: str, is_package: bool) -> str:
    "A module's text, its imports from the package relative to it"
    above = name.split(".") if is_package and name else name.split(".")[:-1]
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if not any(n == PACKAGE or n.startswith(f"{PACKAGE}.") for n in names):
            continue
        if isinstance(node, ast.Import):
            raise SystemExit(f"{name}: expected from {PACKAGE}... import, got import {names[0]}, which has no relative form")
        target = names[0].split(".")[1:]
        common = next((i for i, (a, b) in enumerate(zip(above, target)) if a != b), min(len(above), len(target)))
        dots = "." * (len(above) - common + 1)
        line = lines[node.lineno - 1]
        start = f"from {names[0]} import"
        at = line.encode()[:node.col_offset].decode()
        assert line.startswith(start, len(at)), line
        lines[node.lineno - 1] = f"{at}from {dots}{'.'.join(target[common:])} import{line[len(at) + len(start):]}"
    return "".join(lines)


def without_cupy(text: str) -> str:
    "core/cuda.py with one compiler less: the Hub's rules know no CuPy"
    (cls,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "CompiledByCupy")
    lines = text.splitlines(keepends=True)
    text = "".join(lines[:cls.lineno - 1] + lines[cls.end_lineno:]).replace("\n\n\n\n\n", "\n\n\n")
    (entry,) = re.findall(r'"CuPy": CompiledByCupy, ', text)
    return text.replace(entry, "")


def python_files(house: House) -> Files:
    "The package's modules but `_ops`, which each build writes"
    files = {}
    for name, path in modules(house).items():
        text = path.read_text(encoding="utf-8")
        text = without_cupy(text) if name == "core.cuda" else text
        is_package = path.name == "__init__.py"
        place = "/".join(filter(None, [*name.split("."), "__init__" if is_package else ""])) + ".py"
        files[place] = relative(text, name, is_package).encode()
    del files["_ops.py"]
    return files


def cuda_files(python: Files) -> Files:
    "The CUDA sources that modules name, with the headers that they include"
    text = b"\n".join(python.values()).decode()
    waiting = [path.name for path in sorted((ROOT / "cuda").glob("*.cu")) if f'"{path.stem}"' in text]
    files = {}
    while waiting:
        name = waiting.pop()
        files[f"cuda/{name}"] = (ROOT / "cuda" / name).read_bytes()
        waiting += INCLUDE.findall(files[f"cuda/{name}"].decode())
    return files


@cache
def packaged() -> Files:
    "All of the package but `_ops`"
    python = python_files(House(ROOT))
    return python | cuda_files(python)


# ---- the project and what is built of it


def ops_module(namespace: str) -> bytes:
    "The library's `_ops` with another namespace"
    text = (ROOT / PACKAGE / "_ops.py").read_text(encoding="utf-8")
    text, count = re.subn(rf'(?m)^NAMESPACE = "{PACKAGE}"$', f'NAMESPACE = "{namespace}"', text)
    assert count == 1
    return text.encode()


def build_toml(g: General, backends: tuple[str, ...], framework: str) -> str:
    "What kernel-builder is told"
    return f"""[general]
name = "{g.name}"
version = {VERSION}
edition = 5
license = "{g.license}"
source = "{g.source}"
backends = {json.dumps(backends)}

[general.hub]
repo-id = "{g.repo}"

{framework}
pyext = ["cu", "cuh", "py"]
"""


def card(g: General) -> str:
    "The card, filled in"
    text = (HUB / "CARD.md").read_text(encoding="utf-8")
    for name, value in dict(license=g.license.lower(), source=g.source, repo_id=g.repo, version=str(VERSION)).items():
        text = text.replace("{{ %s }}" % name, value)
    return text


def digest(files: Files) -> dict:
    "What the loader checks files against"
    return {"algorithm": "sha256", "files": {name: base64.b64encode(hashlib.sha256(data).digest()).decode() for name, data in sorted(files.items())}}


def variant(g: General, package: Files, backend: str, build: str) -> Files:
    "The package as it is loaded for one backend"
    namespace = f"_{g.name}_{backend}_{build}"
    files = package | {"_ops.py": ops_module(namespace)}
    metadata = {"name": g.name, "id": namespace, "version": VERSION, "license": g.license, "source": g.source, "python-depends": [], "kernel-depends": [],
                "backend": {"type": backend}, "digest": digest(files)}
    return files | {"metadata.json": (json.dumps(metadata, indent=2) + "\n").encode()}


def name_of(package: Files) -> str:
    "A name for these files and no others"
    return hashlib.sha256(repr(sorted(package.items())).encode()).hexdigest()[:10]


def project_of(g: General, package: Files, toml: str) -> Files:
    "What kernel-builder takes, by path"
    files = {"build.toml": toml.encode(), "LICENSE": (ROOT / "LICENSE").read_bytes(), **{name: (HUB / name).read_bytes() for name in ("CARD.md", "flake.nix")}}
    return files | {f"torch-ext/{g.name}/{name}": data for name, data in package.items()}


def pure(build: str = "") -> Files:
    "The project whose build needs no compiler, and its builds"
    g, package = General.of_settings(), packaged()
    files = project_of(g, package, build_toml(g, BACKENDS, "[torch-noarch]")) | {"build/README.md": card(g).encode()}
    for backend in BACKENDS:
        made = variant(g, package, backend, build or name_of(package))
        files |= {f"build/torch-{backend}/{name}": data for name, data in made.items()}
    return files


# ---- kernels compiled ahead


class Unit(NamedTuple):
    "Kernels of one source with one choice of constants."
    source: str
    kernels: list[str]
    constants: dict[str, Any] = {}

    def text(self, number: int) -> str:
        "What is compiled: each kernel under a name of its own, registered by the name that the library asks for"
        named = [(kernel, f"{kernel}_{number}", " ".join([kernel, *(f"-D{k}={v}" for k, v in self.constants.items())])) for kernel in self.kernels]
        lines = ['#include "../torch-ext/ahead.h"', *(f"#define {k} {v}" for k, v in self.constants.items()), *(f"#define {kernel} {own}" for kernel, own, _ in named),
                 f'#include "{self.source}.cuh"', *(f'static Ahead ahead_{own}("{symbol}", (const void*){own});' for _, own, symbol in named)]
        return "\n".join(lines) + "\n"


def product_units() -> list[Unit]:
    "The product by hand in every form that a loss takes it in"
    import torch
    from fusedloss.core import hopper
    from fusedloss.core.score_product import PRODUCTS

    kernels = re.findall(r"__global__ void SHAPE (\w+)\(", (ROOT / "cuda" / "product_sm90.cu").read_text(encoding="utf-8"))
    choices = [(form, dtype, biased, capped) for form in PRODUCTS for dtype in hopper.ELEMENT for biased in (False, True)
               for capped in (False, True) if dtype != torch.float16 or not capped]
    with mock.patch.object(hopper, "cuda_kernel", lambda *where, **constants: constants):
        return [Unit("product_sm90", kernels, hopper.form_kernel(kernels[0], replace(form, biased=biased, capped=capped), dtype, 0))
                for form, dtype, biased, capped in choices]


def ahead() -> Files:
    "The project whose build compiles kernels: a row's cross entropy, which has constants for each vocabulary, is left to PyTorch"
    from fusedloss.core.cuda import EMPTY_KERNEL

    g, package, cuda = General.of_settings(), packaged(), ROOT / "cuda"
    sources = {f"ahead/{name}.cuh": (cuda / f"{name}.cu").read_bytes() for name in ("zero_rows", "product_sm90", "round_fp8")}
    sources |= {f"ahead/{name}": (cuda / name).read_bytes() for name in ("common.cuh", "hopper.cuh")} | {"ahead/empty_kernel.cuh": EMPTY_KERNEL.encode()}
    units = {"common": [Unit("empty_kernel", ["empty_kernel"]), Unit("zero_rows", ["zero_rows"])], "product": [*product_units(), Unit("round_fp8", ["round_fp8"])]}
    written = {name: {f"ahead/{name}_{i}.cu": unit.text(i) for i, unit in enumerate(each)} for name, each in units.items()}
    binding = ["torch-ext/torch_binding.cpp", "torch-ext/ahead.h"]
    toml = build_toml(g, ("cuda",), f"[torch]\nsrc = {json.dumps(binding)}")
    for name, texts in written.items():
        only = 'cuda-capabilities = ["9.0a"]\n' if name == "product" else ""
        listed = json.dumps([*texts, *sources, binding[1]])
        toml += f'\n[kernel.{name}]\nbackend = "cuda"\ndepends = ["torch"]\ncuda-flags = ["-ftz=true"]\n{only}src = {listed}\n'
    texts = {path: text.encode() for each in written.values() for path, text in each.items()}
    return project_of(g, package, toml) | sources | texts | {path: (HUB / path).read_bytes() for path in binding}


def write(files: Files, out: Path) -> None:
    "Write files into a folder that is not there"
    out.mkdir(parents=True)
    for name, data in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def main() -> None:
    "Write the package"
    parser = argparse.ArgumentParser(description="The package as the Hugging Face Hub's kernel loader takes it.")
    parser.add_argument("out", type=Path, help="a folder that is not there")
    parser.add_argument("--id", default="", help="of the build, letters and digits; without it, a name for the sources")
    parser.add_argument("--ahead", action="store_true", help="a project whose build compiles the CUDA kernels")
    args = parser.parse_args()
    if args.id and not re.fullmatch(r"\w+", args.id):
        raise SystemExit(f"id: expected letters, digits and underscores, got {args.id}")
    files = ahead() if args.ahead else pure(args.id)
    write(files, args.out)
    print(f"{args.out}: {len(files)} files, {sum(map(len, files.values())) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
