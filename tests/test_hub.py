"""The package for the Hugging Face Hub's kernel loader: relocatable, with operators of its own, and the same losses. Where `kernels` is not installed,
what it does to load a folder stands here in six lines, and tests of the loader itself are skipped."""
import ast
import base64
import copy
import hashlib
import importlib.util
import inspect
import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fusedloss as fl
import hub_package
from fusedloss.core import cuda
from fusedloss.integrations.transformers import causal_lm_loss
from project import ROOT

ALLOWED = {*sys.stdlib_module_names, "torch", "triton"}  # the Hub's rules; Triton comes with PyTorch
REGISTERING = {"custom_op", "triton_op", "register_kernel", "register_fake", "register_vmap", "register_torch_dispatch"}  # that kernel-builder looks at
IMPORTED = """
import builtins, torch
asked, real = set(), builtins.__import__
def watched(name, scope=None, names=None, wanted=(), level=0):
    if not level and (scope or {}).get("__name__", "").startswith("_fusedloss_"):
        asked.add(name.partition(".")[0])
    return real(name, scope, names, wanted, level)
builtins.__import__ = watched
kernel = loaded(Path(sys.argv[1]))
x, w, y = torch.randn(5, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True), torch.arange(5)
for method in ("eager", "tiles", "chunks", "recompute", "auto"):
    kernel.linear_cross_entropy(x, w, y, method=method).backward()
kernel.cross_entropy(x, y).backward()
kernel.linear_log_probs(x, w, y).log_probs.sum().backward()
print(*asked)
"""


def loaded(variant: Path) -> ModuleType:
    "What the loader makes of a build's folder"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def in_a_fresh_process(code: str, variant: Path) -> str:
    "What a program prints that finds `loaded`"
    program = f"import importlib.util, json, sys\nfrom pathlib import Path\nfrom types import ModuleType\n{inspect.getsource(loaded)}{code}"
    done = subprocess.run([sys.executable, "-c", program, str(variant)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def part(kernel: ModuleType, name: str) -> ModuleType:
    "A module of a loaded build"
    return importlib.import_module(f"{kernel.__name__}.{name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "a kernel"
    hub_package.write(hub_package.pure(), out)
    return out


@pytest.fixture(scope="module")
def kernel(folder) -> ModuleType:
    return loaded(folder / "build" / "torch-cpu")


@pytest.fixture(scope="module")
def package(folder) -> dict[str, ast.Module]:
    "Every module, parsed"
    top = folder / "torch-ext" / "fusedloss"
    return {path.relative_to(top).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in top.rglob("*.py")}


def tensors(device: str = "cpu") -> list[torch.Tensor]:
    "Hidden states, a weight, a bias and labels"
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=g).to(device).requires_grad_() for shape in ((12, 16), (33, 16), (33,))]
    return [*leaves, torch.randint(33, (12,), generator=g).to(device)]


def results(loss: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]


def with_parameters(module: nn.Module, w: torch.Tensor, b: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(module, {name: w if p.dim() == 2 else b for name, p in module.named_parameters()}, given)


CALLS = {
    **{method: lambda f, x, w, b, y, method=method: f.linear_cross_entropy(x, w, y, linear_bias=b, method=method) for method in ("eager", "chunks", "recompute", "auto")},
    "options": lambda f, x, w, b, y: f.linear_cross_entropy(x, w, y, linear_bias=b, reduction="none", softcap=3.0, logit_scale=0.7, z_loss=0.1, label_smoothing=0.2),
    "logits": lambda f, x, w, b, y: f.cross_entropy(x @ w.mT + b, y, label_smoothing=0.1),
    "log-probs": lambda f, x, w, b, y: f.linear_log_probs(x, w, y, linear_bias=b).log_probs,
    "tiles": lambda f, x, w, b, y: f.linear_cross_entropy(x, w, y, method="tiles") + 0 * b.sum(),
    "module": lambda f, x, w, b, y: with_parameters(f.LinearCrossEntropyLoss(16, 33, bias=True, ignore_index=3), w, b, x, y),
    "causal": lambda f, x, w, b, y: getattr(f, "causal_lm_loss", causal_lm_loss)(labels=y[None], hidden_states=x[None], lm_head_weight=w, lm_head_bias=b, num_items_in_batch=7),
}


@pytest.mark.parametrize("name", CALLS)
def test_losses_and_gradients_are_those_of_the_library(name, kernel, device):
    *leaves, y = tensors(device)
    within = dict(rtol=0, atol=0) if device == "cpu" else dict(rtol=1e-4, atol=1e-6)  # on a GPU each may choose another tile
    assert_close(results(CALLS[name](kernel, *leaves, y), leaves), results(CALLS[name](fl, *leaves, y), leaves), **within)


def test_all_that_is_promised_is_there(kernel):
    assert all(hasattr(kernel, name) for name in kernel.__all__)
    assert kernel.linear_cross_entropy is not fl.linear_cross_entropy and kernel.linear_cross_entropy.__module__ == f"{kernel.__name__}.losses"


def test_a_fresh_process_needs_no_more_than_the_hub_allows(folder):
    "With what is imported when losses run: no CuPy, no fusedloss"
    asked = set(in_a_fresh_process(IMPORTED, folder / "build" / "torch-cpu").split())
    assert "torch" in asked and asked <= ALLOWED


def test_no_module_imports_by_an_absolute_name(package):
    wrong = []
    for name, tree in package.items():
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            wrong += [(name, found) for found in names if found.partition(".")[0] not in ALLOWED]
    assert len(package) > 40 and not wrong


def test_registrations_have_the_builds_namespace(package):
    "As kernel-builder's own hook looks for them, and none by a text"
    found = 0
    for name, tree in package.items():
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        assert not any("fusedloss::" in text for text in texts), name
        for decorator in (d for node in tree.body for d in getattr(node, "decorator_list", []) if isinstance(d, ast.Call)):
            if getattr(decorator.func, "attr", getattr(decorator.func, "id", "")) in REGISTERING:
                found += 1
                assert decorator.args[0].func.id == "add_op_namespace_prefix", name
    assert found and "_ops.py" not in package  # which the builder writes


def test_operators_are_in_the_builds_namespace(kernel):
    name = kernel.__name__
    assert name.startswith("_fusedloss_cpu_") and part(kernel, "_ops").ops is getattr(torch.ops, name)
    for module, operator in (("filter", "recompute_loss"), ("kernels", "logits_loss"), ("core.steps", "_add_if_first")):
        assert getattr(part(kernel, module), operator)._qualname.startswith(f"{name}::")
    x, w, _, y = tensors()
    targets = []
    def count(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward
    torch.compile(lambda: kernel.linear_cross_entropy(x, w, y), fullgraph=True, backend=count)()
    assert any(target.startswith(f"{name}.") for target in targets) and not any(target.startswith("fusedloss.") for target in targets)


def test_two_builds_in_one_process_do_not_collide(kernel, tmp_path):
    *leaves, y = tensors()
    before = results(CALLS["recompute"](kernel, *leaves, y), leaves)
    others = []
    for build in ("first", "second"):
        hub_package.write({name: data for name, data in hub_package.pure(build).items() if name.startswith("build/torch-cpu/")}, tmp_path / build)
        others.append(loaded(tmp_path / build / "build" / "torch-cpu"))
    operators = [part(k, "filter").recompute_loss for k in (kernel, *others)]
    assert [op._qualname.partition("::")[0] for op in operators] == [kernel.__name__, "_fusedloss_cpu_first", "_fusedloss_cpu_second"]
    part(others[0], "filter").recompute_loss.fn = lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        CALLS["recompute"](others[0], *leaves, y)
    for k in (kernel, others[1], fl):
        assert_close(results(CALLS["recompute"](k, *leaves, y), leaves), before, rtol=0, atol=0)


def contents(folder: Path) -> dict[str, bytes]:
    "Files that were written"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def test_the_same_sources_make_the_same_bytes(folder, tmp_path):
    command = [sys.executable, "tools/hub_package.py", str(tmp_path / "again")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert contents(tmp_path / "again") == contents(folder)
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode  # the folder is there
    changed = hub_package.packaged() | {"losses.py": b""}
    assert hub_package.name_of(changed) != hub_package.name_of(hub_package.packaged())


@pytest.mark.parametrize("backend", hub_package.BACKENDS)
def test_metadata_describe_the_build(folder, backend):
    variant = folder / "build" / f"torch-{backend}"
    said = json.loads((variant / "metadata.json").read_text())
    files = [path for path in variant.rglob("*") if path.is_file() and "__pycache__" not in path.parts and path.name != "metadata.json"]
    digests = {path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode() for path in files}
    assert said["digest"] == {"algorithm": "sha256", "files": digests} and said["backend"] == {"type": backend} and said["id"].isidentifier()
    assert f'NAMESPACE = "{said["id"]}"' in (variant / "_ops.py").read_text()
    assert {"cuda/common.cuh", "cuda/turnaround.cu", "cuda/product_sm90.cu"} < digests.keys()


def test_the_card_is_filled_in(folder):
    text = (folder / "build" / "README.md").read_text()
    assert "{{" not in text and 'get_kernel("fusedloss/fusedloss", version=0' in text


def test_cuda_sources_are_those_of_the_build(kernel, tmp_path):
    assert part(kernel, "core.cuda").cuda_source("zero_rows") == cuda.cuda_source("zero_rows") and [*part(kernel, "core.cuda").COMPILERS] == ["PyTorch"]
    files = {name.removeprefix("build/torch-cpu/"): data for name, data in hub_package.pure("sources").items() if name.startswith("build/torch-cpu/")}
    hub_package.write(files | {"cuda/zero_rows.cu": b"// another"}, tmp_path / "kernel")
    assert part(loaded(tmp_path / "kernel"), "core.cuda").cuda_source("zero_rows") == "// another"


def test_a_module_without_a_relative_form_is_refused():
    with pytest.raises(SystemExit, match="core.a: expected from fusedloss"):
        hub_package.relative("import fusedloss.core.b\n", "core.a", False)


@pytest.mark.parametrize("name, is_package, line, expected", [
    ("losses", False, "from fusedloss.core.checks import expect", "from .core.checks import expect"),
    ("core.rows", False, "from fusedloss.core.checks import expect", "from .checks import expect"),
    ("core.rows", False, "    from fusedloss.kernels import a, b", "    from ..kernels import a, b"),
    ("core.rows", False, "from fusedloss.core import checks", "from . import checks"),
    ("core", True, "from fusedloss.core.checks import expect", "from .checks import expect"),
    ("", True, "from fusedloss.losses import (a,\n  b)", "from .losses import (a,\n  b)"),
    ("losses", False, "from fusedloss_other import a", "from fusedloss_other import a")])
def test_imports_become_relative(name, is_package, line, expected):
    head = "if 1:\n" if line[0] == " " else ""
    assert hub_package.relative(head + line, name, is_package) == head + expected


# ---- in transformers


def llama() -> tuple[nn.Module, torch.Tensor]:
    hf = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)), torch.randint(64, (2, 7))


def step(model: nn.Module, ids: torch.Tensor, **given) -> list[torch.Tensor]:
    loss = model(input_ids=ids, labels=ids.masked_fill(ids % 5 == 0, -100), **given).loss
    return results(loss, list(model.parameters()))


@pytest.mark.parametrize("given", [{}, dict(num_items_in_batch=torch.tensor(9))], ids=["mean", "sum"])
def test_the_slot_of_transformers(kernel, given, monkeypatch):
    model, ids = llama()
    own, expected = copy.deepcopy(model), step(model, ids, **given)
    own.loss_function = kernel.causal_lm_loss
    assert_close(step(own, ids, **given), expected, rtol=1e-5, atol=1e-7)
    from transformers.loss.loss_utils import LOSS_MAPPING
    calls = []
    monkeypatch.setitem(LOSS_MAPPING, "ForCausalLM", lambda *args, **kwargs: calls.append(1) or kernel.causal_lm_loss(*args, **kwargs))
    assert_close(step(model, ids, **given), expected, rtol=1e-5, atol=1e-7)
    assert calls


def test_a_soft_cap_holds_for_logits_that_are_not_given(kernel):
    x, w, _, y = tensors()
    given = dict(labels=y[None], hidden_size=16, final_logit_softcapping=1.5)  # as transformers hands them to a kernel
    capped = 1.5 * torch.tanh(x @ w.mT / 1.5)
    expected = results(kernel.causal_lm_loss(capped[None], **given), [x, w])  # the model has capped them
    assert_close(expected[0], nn.functional.cross_entropy(capped[:-1], y[1:]).detach())
    for loss in (kernel.causal_lm_loss, causal_lm_loss):
        assert_close(results(loss(hidden_states=x[None], lm_head_weight=w, **given), [x, w]), expected, rtol=1e-5, atol=1e-6)


def test_the_layer_is_as_the_loader_wants_it(kernel):
    "No constructor and no members of its own, and the loss's arguments"
    layer = kernel.layers.ForCausalLMLoss
    assert layer.__init__ is nn.Module.__init__ and {*dir(layer)} - {*dir(nn.Module)} == {"can_torch_compile"}
    _, *own = inspect.signature(layer.forward).parameters.values()
    assert [(p.name, p.kind, p.default) for p in own] == [(p.name, p.kind, p.default) for p in inspect.signature(causal_lm_loss).parameters.values()]
    x, w, b, y = tensors()
    given = dict(labels=y[None], vocab_size=33, num_items_in_batch=5, shift_labels=y.flip(0)[None], hidden_states=x[None], lm_head_weight=w, lm_head_bias=b,
                 ignore_index=4, final_logit_softcapping=2.0)
    expected = results(causal_lm_loss(**given), [x, w, b])
    for way in (layer(), torch.compile(layer(), fullgraph=True, backend="aot_eager")):
        assert_close(results(way(**given), [x, w, b]), expected, rtol=1e-5, atol=1e-6)
    assert_close(layer()((x @ w.mT + b)[None], y[None]), causal_lm_loss((x @ w.mT + b)[None], y[None]))


# ---- by the loader itself


def test_the_loader_takes_the_folder(folder):
    hub = pytest.importorskip("kernels", reason="kernels is not installed: `loaded` does what its loader does")
    found = hub.get_local_kernel(folder, backend="cpu")
    *leaves, y = tensors()
    assert_close(results(CALLS["auto"](found, *leaves, y), leaves), results(CALLS["auto"](fl, *leaves, y), leaves), rtol=0, atol=0)
    for backend in hub_package.BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        digest = hub._rust.Digest.hash_variant(hub._rust.DigestAlgorithm.SHA256, variant)
        assert digest.files == json.loads((variant / "metadata.json").read_text())["digest"]["files"]


def test_the_builder_takes_the_projects(folder, tmp_path):
    hub = pytest.importorskip("kernels", reason="kernels is not installed: nothing here reads build.toml as the builder does")
    hub_package.write(hub_package.ahead(), tmp_path / "ahead")
    assert hub._rust.Build.open(folder) and hub._rust.Build.open(tmp_path / "ahead")


def test_a_marked_loss_is_replaced_by_the_layer(folder):
    "The name, and the arguments, of the kernel that transformers maps; its models do not mark their loss yet"
    hub = pytest.importorskip("kernels", reason="kernels is not installed: nothing here replaces layers")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.loss.loss_utils import ForCausalLMLoss

    @hub.use_kernel_forward_from_hub("ForCausalLMLoss")
    class Loss(nn.Module):
        def forward(self, logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, hidden_states=None, lm_head_weight=None,
                    lm_head_bias=None, **kwargs):
            return ForCausalLMLoss(nn.functional.linear(hidden_states, lm_head_weight, lm_head_bias), labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)

    x, w, b, y = tensors()
    given = dict(logits=None, labels=y[None], vocab_size=33, hidden_states=x[None], lm_head_weight=w, lm_head_bias=b)
    expected = results(Loss()(**given), [x, w, b])
    mode = hub.Mode.TRAINING | hub.Mode.TORCH_COMPILE
    with hub.use_kernel_mapping({"ForCausalLMLoss": {"cpu": {mode: hub.LocalLayerRepository(folder, layer_name="ForCausalLMLoss")}}}):
        replaced = hub.kernelize(Loss(), mode=mode, device="cpu", use_fallback=False)
    assert replaced.forward.__func__.__module__.startswith("_fusedloss_cpu_")
    assert_close(results(replaced(**given), [x, w, b]), expected, rtol=1e-5, atol=1e-6)


# ---- kernels compiled ahead


def test_kernels_compiled_ahead_have_the_names_that_the_library_asks_for(kernel, monkeypatch):
    files, ahead, own = hub_package.ahead(), part(kernel, "ahead"), part(kernel, "core.cuda")
    text = b"".join(data for name, data in files.items() if name.startswith("ahead/") and name.endswith(".cu")).decode()
    monkeypatch.setattr(ahead, "ops", SimpleNamespace(function=lambda name, shared: int(f'("{name}", ' in text)))
    monkeypatch.setattr(own, "COMPILERS", {"the build": ahead.compiled})
    hopper, products = part(kernel, "core.hopper"), part(kernel, "core.score_product").PRODUCTS
    kernels = ["score_statistics", "score_moments", "score_maxima", "exponentials", "score_gradients", "entropy_gradients"]
    with monkeypatch.context() as patch:
        patch.setattr(own, "compiler_failure", lambda compiler, device: None)
        patch.setattr(hopper, "cuda_kernel", own.compiled_kernel.__wrapped__)
        made = [hopper.form_kernel(name, form, dtype, 0) for name in kernels for form in products for dtype in (torch.bfloat16, torch.float16)]
        made.append(own.compiled_kernel.__wrapped__("zero_rows", 0, ("zero_rows",), ""))
    made.append(ahead.compiled(own.EMPTY_KERNEL, "empty_kernel", own.OPTIONS))
    assert {type(one) for one in made} == {ahead.CompiledAhead} and made[-2].handle(0, 4) == 1
    with pytest.raises(ValueError, match="zero_rows: expected 4 arguments, got 3"):
        made[-2].handle(0, 3)


REGISTRATION = """
#include <Python.h>
#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)
#define TORCH_LIBRARY_EXPAND(name, module) TORCH_LIBRARY(name, module)
#define REGISTER_EXTENSION(name) \\
  PyMODINIT_FUNC NAMED(PyInit_, name)() { static PyModuleDef def{PyModuleDef_HEAD_INIT, "ahead", nullptr, 0, nullptr}; return PyModule_Create(&def); }
"""  # as kernel-builder writes it into its builds
BUILT = """
import torch
kernel = loaded(Path(sys.argv[1]))
ops = kernel.ahead.ops
assert list(kernel.ahead.cuda.COMPILERS) == ["the build"]
gpu = torch.cuda.is_available()
for name in ("empty_kernel", "zero_rows"): assert bool(ops.function(name, 0)) == gpu, name
assert ops.function("none of this name", 0) == 0
assert kernel.cross_entropy(torch.zeros(2, 4), torch.arange(2)).isfinite()
if gpu and torch.cuda.get_device_capability() == (9, 0):
    import fusedloss as fl
    kernel.ahead.cuda.CompiledByTorch = None  # what is compiled ahead does without
    x, w = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in ((4096, 512), (32000, 512)))
    y = torch.randint(32000, (4096,), device="cuda").masked_fill(torch.arange(4096, device="cuda") % 3 == 0, -100)
    for how in (dict(method="product"), dict(method="product", linear_bias=torch.randn(32000, device="cuda", dtype=torch.bfloat16)), dict(method="recompute"),
                dict(method="product", softcap=30.0)):
        both = [package.linear_cross_entropy(x, w, y, **how) for package in (kernel, fl)]
        grads = [torch.autograd.grad(loss, (x, w)) for loss in both]
        torch.testing.assert_close((both[0], grads[0]), (both[1], grads[1]))
print("done")
"""


@pytest.mark.thorough
def test_a_build_with_a_compiler_is_loaded(tmp_path):
    "On a Hopper with all kernels, which run; elsewhere with two, and the operator that finds them"
    if not (shutil.which("nvcc") and shutil.which("g++")):
        pytest.skip("no nvcc and g++ on this machine")
    name, torch_home = "_fusedloss_cuda_compiled", Path(torch.__file__).parent
    hub_package.write(hub_package.ahead() | {"registration.h": REGISTRATION.encode()}, tmp_path / "ahead")
    asked = subprocess.run(["nvcc", "--dryrun", "none.cu"], capture_output=True, text=True, cwd=tmp_path).stderr
    cuda_home = Path(next(line.partition("TOP=")[2] for line in asked.splitlines() if "TOP=" in line)).resolve()
    includes = [tmp_path / "ahead", cuda_home / "include", torch_home / "include", torch_home / "include" / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"]]
    variant = tmp_path / "ahead" / "build" / "torch213-cxx11-cu130-x86_64-linux"
    shutil.copytree(tmp_path / "ahead" / "torch-ext" / "fusedloss", variant)
    units = sorted(path.stem for path in (tmp_path / "ahead" / "ahead").glob("*.cu"))
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
        units = [unit for unit in units if unit.startswith("common")]
    arch = {"product": ["-gencode", "arch=compute_90a,code=sm_90a"]}
    commands = [["nvcc", "-std=c++17", "-ftz=true", *arch.get(unit.partition("_")[0], []), "-Xcompiler", "-fPIC", "-c", f"ahead/{unit}.cu", "-o", f"{unit}.o"] for unit in units]
    commands.append(["g++", "-std=c++20", "-fPIC", f"-DTORCH_EXTENSION_NAME={name}", *(f"-I{path}" for path in includes), "-c", "torch-ext/torch_binding.cpp", "-o", "binding.o"])
    commands.append(["g++", "-shared", "-o", str(variant / f"{name}.abi3.so"), *(f"{unit}.o" for unit in units), "binding.o", f"-L{torch_home / 'lib'}", "-ltorch_cpu", "-lc10",
                     f"-L{cuda_home / 'lib64'}", "-lcudart_static", "-lrt", "-ldl", "-lpthread"])
    for command in commands:
        subprocess.run(command, check=True, cwd=tmp_path / "ahead", capture_output=True)
    (variant / "_ops.py").write_text(f"import torch\nfrom . import {name}\nops = torch.ops.{name}\ndef add_op_namespace_prefix(op_name): return f'{name}::{{op_name}}'\n")
    (variant / "metadata.json").write_text(json.dumps({"name": "fusedloss", "id": name}))
    assert in_a_fresh_process(BUILT, variant) == "done"
