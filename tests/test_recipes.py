"""What an extension takes: each is added to a copy, or from a module of its own, and nothing else is touched.

And the recipe pages: what they show exists, and what they compare would show a fault.
"""
import ast
import functools
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import fusedloss
import fusedloss.integrations.trl as adapter
from fusedloss import clusters, kernels, scans, semirings
from fusedloss.core import devices, rates, tiling
from fusedloss.core.cuda import cuda_source
from nvrtc import complaint, knows, library
from project import read_notebook, ROOT
from fusedloss.doctor import implementations
from workbook.support import support_rows

DEVICE = '''
from fusedloss.core.devices import Board, DeviceKind, peaks

class Toy(DeviceKind):
    "A made-up accelerator that runs Triton: descriptors, no clusters, little shared memory."
    title, vendor, multiprocessors, shared_memory, tma = "Toy", "toymaker", 24, 48 * 2**10, True
    boards = Board("Toy 16GB", ("Toymaker Toy 16GB",), 20, peaks(1e12, 100e12, 10e12, 5e12), "a data sheet"),
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    "The class of a device, from a module that nothing else knows; forgotten afterwards"
    monkeypatch.setattr(devices, "KINDS", [*devices.KINDS])
    monkeypatch.setattr(devices, "GPUS", {**devices.GPUS})
    monkeypatch.setattr(rates, "KINDS", devices.KINDS)
    path = tmp_path / "toymaker.py"
    path.write_text(DEVICE)
    spec = importlib.util.spec_from_file_location("toymaker", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    devices.recognised.cache_clear()
    yield module.Toy
    devices.recognised.cache_clear()


def play(monkeypatch, name, **fields):
    "Let PyTorch report a GPU"
    properties = SimpleNamespace(name=name, major=9, minor=9, **fields)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def test_a_device_is_one_class(toy, monkeypatch, tmp_path):
    d = devices.GPUS["Toy"]
    # its limits decide how products are cut
    for desc in (False, True):
        for busy in (False, True):
            t = tiling.cut(d, desc, busy)
            fits = [t for t in ((tiling.BUSY if busy else tiling.WIDE) if desc else tiling.POINTERS) if tiling.shared_bytes(t, d) <= d.shared_memory]
            assert t == (fits[0] if fits else (tiling.BUSY if busy else tiling.WIDE)[-1]) and not tiling.deeper(t, d, True)
    assert tiling.deeper(tiling.POINTERS[0], d._replace(shared_memory=2 * d.shared_memory), True)
    # what it lacks decides which implementations take it
    found = implementations()
    assert {i.what for i in found if not i.lacks(d)} == {kernels.TRITON_ROWS.what, tiling.BY_POINTERS.what}
    assert tiling.BY_DESCRIPTORS.lacks(d) == "not of NVIDIA" and clusters.ROW_CLUSTERS.lacks(d._replace(vendor="nvidia")) == "no clusters"
    _, rows = support_rows(found, [d])
    assert {row[2].partition(";")[0] for row in rows} == {"passed over: not of NVIDIA", "not tried"}
    # a plan knows its board, and says what it is passed over for
    p = fusedloss.plan(8192, 65536, 2048, machine="Toy 16GB")
    said = {row[0]: row[-1] for row in p.table.rows}
    assert p.machine == "Toymaker Toy 16GB" and p.device.multiprocessors == 20
    assert said["recompute"].endswith("operands by pointers: not of NVIDIA") and said["chunks"].endswith("rows by Triton: not of NVIDIA")
    assert p["recompute"].seconds > 3 * fusedloss.plan(8192, 65536, 2048, machine="H200")["recompute"].seconds
    # and it is recognised where it is at hand
    play(monkeypatch, "Toymaker Toy 16GB", multi_processor_count=20)
    monkeypatch.setenv("FUSEDLOSS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(rates, "found_machines", {})
    assert devices.device_of("cuda") == toy.on_board(toy.boards[0])
    assert rates.machine_here(torch.device("cuda")) is rates.machine_of("Toy 16GB")


def test_an_accelerator_of_another_backend_is_one_class_too(toy, monkeypatch):
    class Other(toy):
        title, backend, boards = "Other", "xpu", ()

        @classmethod
        def matches(cls, properties): return properties.name == "Other 1"
    there = SimpleNamespace(is_available=lambda: True, current_device=lambda: 0,
                            get_device_properties=lambda index: SimpleNamespace(name="Other 1", multi_processor_count=7))
    monkeypatch.setattr(torch, "get_device_module", lambda backend: there)
    assert devices.device_of("xpu") == devices.GPUS["Other"]._replace(name="Other 1", multiprocessors=7)
    assert devices.device_of("cpu") is devices.CPU


def test_the_class_that_is_defined_last_describes_a_device(toy):
    class Better(toy):
        title, shared_memory = "Better", 2**17
    seen = SimpleNamespace(name="Toymaker Toy 16GB", multi_processor_count=20)
    first, second = [kind for kind in devices.KINDS if kind.matches(seen)][:2]
    assert (first, second) == (Better, toy) and first.described(seen).shared_memory == 2**17


OPTION = {  # a constant that every score has besides: file, lines and what stands in their place
    "fusedloss/core/options.py": [
        ("    z_loss: Annotated", "    logit_bias: Annotated[float, Check('a number', is_number)] = 0.0  # added to the scaled logits\n    z_loss: Annotated"),
        ("import did_you_mean, expect,", "import did_you_mean, is_number, expect,"),
        ("(self.logit_scale, self.softcap) == (1.0, 0.0)", "(self.logit_scale, self.softcap, self.logit_bias) == (1.0, 0.0, 0.0)"),
        ("    softcap: Optional[float]\n", "    softcap: Optional[float]\n    logit_bias: float\n")],
    "fusedloss/core/reference.py": [("(o.softcap or 1.0))", "(o.softcap or 1.0)).add_(o.logit_bias / (o.softcap or 1.0))")],
    "fusedloss/core/softmax.py": [
        ("return raw * o.logit_scale, o.logit_scale", "return raw * o.logit_scale + o.logit_bias, o.logit_scale"),
        ("x = o.logit_scale / o.softcap * raw", "x = o.logit_scale / o.softcap * raw + o.logit_bias / o.softcap")],
    "fusedloss/plans.py": [('"softcap", "z_loss", "token_weight")\nIN_FP8', '"softcap", "logit_bias", "z_loss", "token_weight")\nIN_FP8')],
    "cuda/turnaround.cu": [
        ("logit_scale, softcap, z_loss; };", "logit_scale, softcap, logit_bias, z_loss; };"),
        ("double softcap, double z_loss)", "double softcap, double logit_bias, double z_loss)"),
        ("(float)softcap, (float)z_loss}", "(float)softcap, (float)logit_bias, (float)z_loss}"),
        ("logit * o.logit_scale;", "logit * o.logit_scale + o.logit_bias;"),
        ("o.logit_scale / o.softcap * logit,", "(o.logit_scale * logit + o.logit_bias) / o.softcap,")]}
WITH_OPTION = """
import inspect, torch, fusedloss as fl
from fusedloss import clusters
from fusedloss.core.options import LossOptions
from fusedloss.core.triton import triton
assert fl.__file__.startswith({root!r})
f64, y = torch.float64, torch.tensor([1, 8, 2, -100, 0, 4], device={device!r})
x, w = (torch.randn(n, 5, dtype=f64, generator=torch.Generator().manual_seed(n)).to(y.device).requires_grad_() for n in (6, 9))

def defined(z, softcap):
    z = 2 * z + 0.7
    return torch.nn.functional.cross_entropy(softcap * torch.tanh(z / softcap) if softcap else z, y)

for softcap in (None, 3.0):
    o = dict(logit_bias=0.7, logit_scale=2.0, softcap=softcap)
    expected = defined(x @ w.T, softcap)
    exact = [expected, *torch.autograd.grad(expected, [x, w])]
    losses = [fl.cross_entropy(x @ w.T, y, **o)] + [fl.linear_cross_entropy(x, w, y, method=m, **o) for m in ("eager", "chunks", "recompute")]
    if softcap: losses += [torch.compile(lambda x, w: fl.linear_cross_entropy(x, w, y, method="recompute", **o), fullgraph=True, backend="aot_eager")(x, w)]
    for loss in losses:
        torch.testing.assert_close([loss, *torch.autograd.grad(loss, [x, w])], exact)
    if triton is not None:
        z = (x @ w.T).detach().float()[:, None].contiguous().requires_grad_()
        given = z.detach().clone(), y, None, None, torch.tensor(5.0, device=y.device), LossOptions(**{{**o, "softcap": softcap or 0.0}})
        found = clusters.launch_turnaround(*given)
        torch.testing.assert_close(found.sum().double(), exact[0].detach(), rtol=1e-5, atol=1e-5)
        dz, = torch.autograd.grad(defined(z[:, 0], softcap), z)
        torch.testing.assert_close(given[0], dz, rtol=1e-4, atol=1e-6)
        loss = fl.cross_entropy(z[:, 0], y, **o)  # CUDA where there is a GPU
        torch.testing.assert_close([loss, *torch.autograd.grad(loss, [z])], [exact[0].detach().float(), dz], rtol=1e-4, atol=1e-6)
try: fl.linear_cross_entropy(x, w, y, method="tiles", logit_bias=0.7)
except ValueError as error: assert "logit_bias" in str(error), error
else: assert False, "tiles have no such option"
try: fl.cross_entropy(x @ w.T, y, logit_bias="much")
except ValueError as error: assert str(error) == "logit_bias: expected a number, got much"
else: assert False, "the option is not checked"
assert "logit_bias: float = 0.0" in str(inspect.signature(fl.linear_cross_entropy))
assert "logit_bias" in repr(fl.plan(64, 100, 8, options=("logit_bias",)))
"""


@pytest.mark.thorough
def test_an_option_is_a_field_and_its_terms(tmp_path, device):
    "Its field, its term once for PyTorch, Triton and CUDA; on a copy, by every method against its definition"
    for folder in ("fusedloss", "cuda"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, places in OPTION.items():
        path, text = tmp_path / name, (ROOT / name).read_text(encoding="utf-8")
        for old, new in places:
            assert text.count(old) == 1, f"{name} holds {old!r} {text.count(old)} times"
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": str(int(device == "cpu"))}
    done = subprocess.run([sys.executable, "-c", WITH_OPTION.format(root=str(tmp_path), device=device)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    nvrtc = library(13) or library(12)
    if nvrtc and knows(nvrtc, 90):
        source = cuda_source("turnaround").replace((ROOT / "cuda/turnaround.cu").read_text(encoding="utf-8"), (tmp_path / "cuda/turnaround.cu").read_text(encoding="utf-8"))
        for score in ("bare", "scaled", "capped"):
            constants = dict(ELEMENT="bf16", SCORE=score, SMOOTH=1, UNSCALED_GRAD=0, ALIGNED=1, CLUSTER=2, VECTORS=8, THREADS=128, BLOCKS=8)
            assert not complaint(nvrtc, source, constants, 90)


SEMIRING = '''
import torch
from fusedloss.semirings import Semiring

class Tempered(Semiring):
    "Log at half the temperature: between the sum over paths and the best one."
    zero, one, additive = -torch.inf, 0.0, True
    def mul(self, a, b): return a + b
    def reduce(self, x, dim): return (2 * x).logsumexp(dim) / 2
    def dsum(self, x, dim=-1): return (2 * x).softmax(dim).nan_to_num(0.0)
'''


def semiring_of(folder):
    "An element of the class above, from a module that nothing else knows"
    path = folder / "tempered.py"
    path.write_text(SEMIRING, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("tempered", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Tempered()


def random_graph():
    "Scores of edges, some absent and some −∞, sources, scores of starts and ends, lengths"
    generator = torch.Generator().manual_seed(0)
    Ms = torch.randn(4, 3, 5, 3, generator=generator, dtype=torch.float64)
    Ms[1, 0, 2] = -torch.inf
    idx = torch.randint(-1, 5, (5, 3), generator=generator)
    return Ms, idx, *torch.randn(2, 3, 5, generator=generator, dtype=torch.float64), torch.tensor([4, 2, 0])


def test_a_semiring_is_one_class(tmp_path, monkeypatch):
    S, (Ms, idx, v0, vT, lengths) = semiring_of(tmp_path), random_graph()
    leaves = [t.requires_grad_() for t in (Ms, v0, vT)]
    want = semirings.brute_force(Ms, idx, v0, vT, S)
    assert ((semirings.brute_force(Ms, idx, v0, vT, semirings.Max) < want) & (want < semirings.brute_force(Ms, idx, v0, vT))).all()
    d_want = torch.autograd.grad(want.sum(), leaves)
    # the sum over paths, and every rung that a semiring without a kernel has, their gradients too
    ways = [lambda: semirings.path_sum(Ms, idx, v0, vT, S), *(lambda m=m: scans.logz(Ms, idx, v0, vT, S, method=m) for m in ("auto", "autograd", "loop"))]
    for way in ways:
        got = way()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), leaves), d_want)
    # each sequence ends at its own length
    each = torch.stack([semirings.brute_force(Ms[:n, i:i + 1], idx, v0[i:i + 1], vT[i:i + 1], S)[0] for i, n in enumerate(lengths)])
    for method in ("auto", "autograd", "loop"):
        torch.testing.assert_close(scans.logz(Ms, idx, v0, vT, S, lengths, method=method), each)
    # a class that another one inherits has its gradient by hand too, unless ⊗ or ⊕ is another
    shifted = type("Shifted", (type(S),), dict(mul=lambda self, a, b: a + b + 1.0))()
    assert scans.additive(S) and not scans.additive(shifted)
    torch.testing.assert_close(scans.logz(Ms, idx, v0, vT, shifted), semirings.brute_force(Ms, idx, v0, vT, shifted))
    # a kernel has a struct for a semiring or passes it over: asked for by name it raises, else the loop runs
    monkeypatch.setattr(scans.SCANS.__class__, "lacks", lambda self, device: "")
    assert scans.runs_kernel(Ms, semirings.Log) and not scans.runs_kernel(Ms, S) and not scans.runs_kernel(Ms, semirings.Sample())
    assert scans.choose_rung("auto", Ms, S) == scans.Scan(True)
    torch.testing.assert_close(scans.logz(Ms, idx, v0, vT, S), want)
    for method in ("scan", "fused"):
        with pytest.raises(ValueError, match=f"method: expected auto, which takes one that can, got '{method}'"):
            scans.logz(Ms, idx, v0, vT, S, method=method)


def test_a_semiring_whose_struct_is_not_there_runs_without_a_kernel(tmp_path, monkeypatch):
    S, (Ms, idx, v0, vT, _) = semiring_of(tmp_path), random_graph()
    want, asked = semirings.brute_force(Ms, idx, v0, vT, S), []
    monkeypatch.setattr(scans.SCANS.__class__, "lacks", lambda self, device: "")
    monkeypatch.setattr(type(S), "struct", "Tempered", raising=False)
    monkeypatch.setattr(scans, "shared_memory_limit", lambda device: 2**16)
    monkeypatch.setattr(scans, "cuda_kernel", lambda name, device, **constants: asked.append((name, constants["SEMIRING"])))  # which warns, and gives None
    torch.testing.assert_close(scans.logz(Ms, idx, v0, vT, S), want)
    assert {("sparse_logz", "Tempered"), ("sparse_scan", "Tempered")} == set(asked)


MARGIN = '''
from fusedloss.margins import Margin

class Cubed(Margin):
    "scale · (cos³ θ − margin)."
    def __init__(self, margin, scale): self.margin, self.scale = margin, scale

    def target_score(self, cos, norm=None): return self.scale * (cos**3 - self.margin)
'''


def by_formula(x, w, y, margin, scale):
    "The mean loss of the rows with a label, dx and dw, with all cosines in float64"
    cos = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(w).T
    labelled = y >= 0
    target = torch.nn.functional.one_hot(y.clamp(min=0), len(w)).bool()
    z = scale * torch.where(target, cos**3 - margin, cos)
    loss = torch.nn.functional.cross_entropy(z[labelled], y[labelled])
    return loss, *torch.autograd.grad(loss, [x, w])


def test_a_margin_is_one_class(tmp_path):
    path = tmp_path / "cubed.py"
    path.write_text(MARGIN, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("cubed", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    margin, made = module.Cubed(0.2, 16.0), torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 6, generator=made, dtype=torch.float64).requires_grad_() for rows in (7, 30))
    y = torch.tensor([3, 29, -1, 0, 3, 17, 8])
    expected = by_formula(x, w, y, 0.2, 16.0)
    loss = fusedloss.margin_cross_entropy(x, w, y, margin=margin, ignore_index=-1, token_tile=3, class_tile=8)
    torch.testing.assert_close((loss, *torch.autograd.grad(loss, [x, w])), expected)
    for head_class in (fusedloss.PartialFC, fusedloss.ShardedPartialFC):
        head = head_class(30, 6, margin=margin, dtype=torch.float64)
        with torch.no_grad():
            head.weight.copy_(w)
        loss = head(x, y)
        torch.testing.assert_close((loss, *torch.autograd.grad(loss, [x, head.weight])), expected)


# --- the pages of nbs/recipes ---

RECIPES = {path.stem: path for path in sorted((ROOT / "nbs" / "recipes").glob("*.ipynb"))}
ELSEWHERE = ("prologue", "saves-code", "ddp-code")  # cells that need no test beside `make pages`: set-up, memory, a process group
BLOCK = re.compile(r"^```py\n(.*?)^```", re.MULTILINE | re.DOTALL)


def prose_of(page: str) -> str:
    "The Markdown of a page"
    return "\n\n".join(cell["source"] for cell in read_notebook(RECIPES[page])["cells"] if cell["cell_type"] == "markdown")


def code_of(page: str) -> list[dict]:
    return [cell for cell in read_notebook(RECIPES[page])["cells"] if cell["cell_type"] == "code"]


def run_page(page: str, package=fusedloss) -> dict:
    "The names of a page after its cells have run in this process, with a package in the place of `fl`"
    names = dict(__name__="page", os=os, torch=torch, fl=package)
    for cell in code_of(page):
        if not cell["id"].endswith(ELSEWHERE) and not cell["source"].startswith("#| cuda"):
            source = cell["source"].replace("import fusedloss as fl\n", "")
            exec(compile(source, f"{page}, {cell['id']}", "exec"), names)
    return names


@pytest.mark.parametrize("page", RECIPES)
def test_a_recipe_is_in_the_guide_and_what_it_shows_is_python(page):
    guide = "\n".join(cell["source"] for cell in read_notebook(ROOT / "nbs" / "guide.ipynb")["cells"])
    assert f"](recipes/{page}.ipynb)" in guide
    for block in BLOCK.findall(prose_of(page)):
        ast.parse(f"def method(self):\n{textwrap.indent(block, ' ')}")


@pytest.mark.parametrize("page", RECIPES)
def test_a_recipe_names_what_is_there(page):
    "Every `fl.name` of prose and code, and in a call that is shown every argument"
    text = prose_of(page) + "\n".join(cell["source"] for cell in code_of(page))
    for dotted in set(re.findall(r"\bfl((?:\.\w+)+)", text)):
        functools.reduce(getattr, dotted[1:].split("."), fusedloss)
    calls = re.findall(r"`(fl\.[\w.]+\([^`]*\))`", text) + [c for block in BLOCK.findall(text) for c in re.findall(r"fl\.[\w.]+\([^()]*\)", block)]
    for call in calls:
        node = ast.parse(call.replace(", ...)", ")"), mode="eval").body
        of = inspect.signature(functools.reduce(getattr, ast.unparse(node.func).split(".")[1:], fusedloss))
        names = {k.arg for k in node.keywords}
        open_ended = any(p.kind is p.VAR_KEYWORD for p in of.parameters.values())
        assert open_ended or names <= of.parameters.keys(), f"{call}: {names - of.parameters.keys()}"


def test_the_table_of_losses_names_arguments_that_exist():
    rows = [row.strip("| \n").split(" | ") for row in prose_of("coming_from").split("## What you change: logits")[0].splitlines() if row.startswith("| ")]
    assert len(rows) > 14 and all(len(row) == 5 for row in rows[1:])
    ours = inspect.signature(fusedloss.linear_cross_entropy).parameters.keys()
    theirs = inspect.signature(getattr(F, "linear_cross_entropy", fusedloss.linear_cross_entropy)).parameters.keys() | {"acc_policy", "options"}
    for row in rows[1:]:
        assert set(re.findall(r"(\w+)=", row[1])) <= ours and set(re.findall(r"(\w+)=", row[4])) <= theirs, row[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", ("coming_from", "evaluation", "finetuning", "hub", "lightning", "multi_token", "pretraining", "trl", pytest.param("meshes", marks=pytest.mark.thorough)))
def test_a_recipe_runs(page, monkeypatch):
    monkeypatch.chdir(RECIPES[page].parent)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which some add examples/
    run_page(page)


def wrong(name: str, how) -> SimpleNamespace:
    "The package with one function, or class, that another one is in place of"
    names = {n: getattr(fusedloss, n) for n in fusedloss.__all__}
    return SimpleNamespace(integrations=fusedloss.integrations, **names | {name: how(names[name])})


FAULTS = {  # of which each must be noticed by what the page on other losses compares
    "a loss without its factor": ("linear_cross_entropy", lambda f: lambda *a, **k: 1.001 * f(*a, **k)),
    "token weights are lost": ("linear_cross_entropy", lambda f: lambda *a, token_weight=None, **k: f(*a, **k)),
    "no shift": ("linear_cross_entropy", lambda f: lambda *a, shift=0, **k: f(*a, **k)),
    "no gradient of w": ("linear_cross_entropy", lambda f: lambda x, w, *a, **k: f(x, w.detach(), *a, **k) + 0 * w.sum()),
    "class weights are lost": ("cross_entropy", lambda f: lambda *a, weight=None, **k: f(*a, **k)),
    "ArcFace's own gradient": ("PartialFC", lambda f: lambda *a, margin=None, **k: f(*a, margin=getattr(margin, "grad", "") and fusedloss.margins.ArcFace(), **k)),
    "conflicts are dropped": ("PartialFC", lambda f: lambda *a, **k: f(*a, **k | {"conflict_mode": "drop"})),
    "all frames": ("ctc_loss", lambda f: lambda z, targets, input_lengths, target_lengths, **k: f(z, targets, None, target_lengths, **k)),
    "logits twice normalised": ("ctc_loss_with_logits", lambda f: lambda z, *a, **k: f(2 * z, *a, **k)),
    "a path of another target": ("forced_align", lambda f: lambda z, y, *a: f(z, y.flip(1), *a)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
def test_coming_from_notices(fault):
    with pytest.raises(AssertionError):
        run_page("coming_from", wrong(*FAULTS[fault]))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_the_page_on_lightning_notices_another_token():
    with pytest.raises(AssertionError):
        run_page("lightning", wrong("LinearCrossEntropyLoss", lambda f: lambda *a, shift: f(*a, shift=shift + 1)))


PAGE_FAULTS = {  # of which each must be noticed by what the pages on evaluation and on several tokens compare
    "a factor": ("evaluation", "linear_log_probs", lambda f: lambda x, *a, **k: f(1.01 * x, *a, **k)),
    "a rank that is none": ("evaluation", "linear_log_probs", lambda f: lambda *a, **k: f(*a, **k)._replace(target_rank=torch.zeros_like(a[2]))),
    "the least likely class": ("evaluation", "linear_topk", lambda f: lambda x, *a, **k: f(-x, *a, **k)),
    "token weights are lost": ("multi_token", *FAULTS["token weights are lost"]),
    "no shift": ("multi_token", *FAULTS["no shift"]),
    "no gradient of w": ("multi_token", "linear_cross_entropy", lambda f: lambda x, w, *a, **k: f(x, getattr(w, "weight", w).detach(), *a, **k)),
    "a head's states get nothing": ("multi_token", "linear_cross_entropy", lambda f: lambda x, *a, **k: f(torch.cat([x[:1].detach(), x[1:]]), *a, **k)),
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", PAGE_FAULTS)
def test_the_pages_on_evaluation_and_several_tokens_notice(fault):
    page, name, how = PAGE_FAULTS[fault]
    if page == "evaluation":
        pytest.importorskip("accelerate", reason="accelerate is not installed")
    with pytest.raises((AssertionError, RuntimeError)):  # RuntimeError: autograd finds a parameter without a gradient
        run_page(page, wrong(name, how))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_the_evaluation_page_agrees_with_lm_eval(capsys):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    run_page("evaluation")
    assert "lm-eval's HFLM: the same answers" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, how", [
    ("linear_divergence", lambda f: lambda *a, **k: 1.01 * f(*a, **k)),
    ("linear_log_probs", lambda f: lambda x, *a, **k: f(1.1 * x, *a, **k))])
def test_the_page_on_trl_notices(name, how, monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed")
    monkeypatch.setattr(adapter, name, how(getattr(adapter, name)))
    with pytest.raises(AssertionError):
        run_page("trl")
    adapter.unpatch()
