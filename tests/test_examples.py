"""The scripts that measure whole models and first calls: each runs on a CPU at a small size, and bugs planted in them are noticed."""
import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from project import ROOT

TINY = dict(vocab_size=32, hidden_size=8)


def script(name: str, folder: Path, *pairs: str) -> ModuleType:
    "A program of `examples`, from a file of its own in which texts that stand there once are replaced"
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times: plant this bug elsewhere"
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"planted_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TinyModel(nn.Module):
    "What the steps take of a language model: a loss of tokens and labels, whose last layer has a factor"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.factor = nn.Embedding(TINY["vocab_size"], TINY["hidden_size"]), 1.0

    def forward(self, input_ids, labels, use_cache):
        z = self.factor * self.embedding(input_ids) @ self.embedding.weight.T
        return SimpleNamespace(loss=nn.functional.cross_entropy(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


def scaled(factor: float):
    "A way to a loss that is off by a factor of the logits"
    def way(model):
        model.factor = factor
        return model
    return way


def absent(model):
    "A way whose library is not there"
    raise ModuleNotFoundError("No module named 'liger_kernel'")


def measure(module: ModuleType, monkeypatch, **ways) -> dict[str, dict]:
    "Figures of a tiny model with its own loss and others"
    monkeypatch.setattr(module, "random_llama", lambda config, device: TinyModel())
    return module.measured({"as it comes": lambda model: model, **ways}, module.Size(2, 9, TINY), "cpu", rounds=1, seconds=1e-3)


def refuses(module: ModuleType, monkeypatch, error: type, **ways) -> list[str]:
    "What is wrong if a run with these losses goes through"
    try:
        measure(module, monkeypatch, **ways)
    except error:
        return []
    return [f"{[*ways]} went through"]


def first_norm(model: nn.Module) -> float:
    "The norm of a single step's gradient"
    model.zero_grad()
    ids = torch.arange(18).view(2, 9)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return model.embedding.weight.grad.norm().item()


def faults(module: ModuleType, monkeypatch) -> list[str]:
    "What is wrong with how losses of whole models are measured"
    wrong = refuses(module, monkeypatch, ValueError, patched=scaled(1.1)) + refuses(module, monkeypatch, ValueError, Liger=scaled(float("nan")))
    wrong += refuses(module, monkeypatch, ModuleNotFoundError, patched=absent)
    try:
        found = measure(module, monkeypatch, patched=scaled(1 + 1e-6), Liger=absent)
    except Exception as error:
        return [*wrong, f"{type(error).__name__} of what is right"]
    ours = found["patched"]
    wrong += [] if found["Liger"] == dict(reason="ModuleNotFoundError: No module named 'liger_kernel'") else ["the reason is not kept"]
    wrong += [] if ours["tokens"] == pytest.approx(18 / ours["seconds"]) and ours["peak"] > 0 else ["tokens are not those of a second"]
    model = TinyModel()
    steps = module.working_steps({"as it comes": lambda model: model, "patched": scaled(1.0)}, model, torch.arange(18).view(2, 9))[0]
    grads = [(step(), model.embedding.weight.grad)[1] for step in (*steps.values(),) * 2]
    if any(grad is None for grad in grads):
        return [*wrong, "a loss has weights of its own"]
    norm = grads[-1].norm()
    return wrong + ([] if norm == pytest.approx(first_norm(model), rel=1e-4) else ["gradients of losses are added up"])


BUGS = {  # what is wrong: (text of the script, what stands in its place)
    "losses may be anything": ("abs(got - expected) <= allowed", "True"),
    "a loss that is not a number passes": ("abs(got - expected) <= allowed", "not abs(got - expected) > allowed"),
    "only the last loss is compared": ("(name, expected), *others = losses.items()", "*_, (name, expected), others = [None, *losses.items(), []]"),
    "rounding is not allowed": ("allowed = 2**-8 * expected", "allowed = 2**-60 * expected"),
    "our own loss may be missing": ("if name not in PEERS", "if name not in WAYS"),
    "a peer must not be missing": ("if name not in PEERS", "if name in WAYS"),
    "gradients are kept": ("model.zero_grad()", "pass"),
    "each loss has weights of its own": ("{id(p): p for p in model.parameters()}", "{}"),
    "tokens of one sequence count": ("tokens=tokens / times[name]", "tokens=size.length / times[name]"),
}


def test_losses_of_whole_models_are_held_to_each_other(monkeypatch, tmp_path):
    assert faults(script("whole_models", tmp_path), monkeypatch) == []


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bug_in_whole_models_is_noticed(bug, monkeypatch, tmp_path):
    assert faults(script("whole_models", tmp_path, *bug), monkeypatch)


@pytest.mark.thorough
def test_small_model_trains_with_each_loss(tmp_path, capsys):
    pytest.importorskip("transformers")
    script("whole_models", tmp_path).main(["--small"])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(", ")[1].partition(":")[0] for line in lines if "tokens a second" in line][:1] == ["as it comes"]
    assert any(line.startswith("small, patched: ") and "tokens a second" in line for line in lines)
    assert sorted(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize("name", ["whole_models", "first_calls"])
def test_script_asks_for_a_gpu(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        script(name, tmp_path).main([])
    assert "expected a GPU, got none: --small runs on a CPU" in str(ended.value) + capsys.readouterr().err


def cache_faults(module: ModuleType, folder: Path, monkeypatch) -> list[str]:
    "Caches of a process that are not in its folder, and choices that it did not make"
    monkeypatch.setenv("FUSEDLOSS_CHOICES", "choices.json")
    env = module.with_caches(folder)
    wrong = [f"{key} is elsewhere" for key in ("TRITON_CACHE_DIR", "FUSEDLOSS_CACHE_DIR", "CUPY_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
             if folder not in Path(env.get(key, "/")).parents]
    return wrong + ["choices are imposed"] * ("FUSEDLOSS_CHOICES" in env)


CACHE_BUGS = {  # as above
    "CuPy keeps its cache": ('"CUPY_CACHE_DIR": "cupy", ', ""),
    "choices come from outside": ('if key != "FUSEDLOSS_CHOICES"', 'if key != "FUSEDLOSS_CHOICE"'),
    "caches of outside win": ("return env | {key: str(Path(folder) / part) for key, part in CACHES.items()}",
                              "return {key: str(Path(folder) / part) for key, part in CACHES.items()} | env"),
}


def test_caches_lie_in_the_folder(tmp_path, monkeypatch):
    assert cache_faults(script("first_calls", tmp_path), tmp_path / "caches", monkeypatch) == []


@pytest.mark.thorough
@pytest.mark.parametrize("bug", CACHE_BUGS.values(), ids=CACHE_BUGS)
def test_planted_bug_in_caches_is_noticed(bug, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    assert cache_faults(script("first_calls", tmp_path, *bug), tmp_path / "caches", monkeypatch)


@pytest.mark.thorough
def test_every_first_call_ends(tmp_path):
    module = script("first_calls", tmp_path)
    for name in [name for name in module.LOSSES if name != "torch.compile"]:
        found = module.this_process(name, True)
        assert found.keys() == {"imports", "seconds", "again"} and min(found.values()) > 0


@pytest.mark.thorough
def test_first_calls_are_those_of_fresh_processes(tmp_path, monkeypatch, capsys):
    module = script("first_calls", tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    module.main(["--small", "eager, fp32 softmax"])
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert first.startswith("eager, fp32 softmax, empty caches: ") and second.startswith("eager, fp32 softmax, warm disk: ")
    assert sorted(tmp_path.rglob("*.json")) == []


@pytest.mark.thorough
@pytest.mark.skipif(not torch.cuda.is_available() and not shutil.which("g++"), reason="Inductor needs a C++ compiler on a CPU")
def test_second_process_finds_what_the_first_compiled(tmp_path, monkeypatch):
    module = script("first_calls", tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    kept = []
    for _ in range(2):
        module.fresh_process("torch.compile", True, tmp_path / "caches")
        kept.append({path.relative_to(tmp_path) for path in (tmp_path / "caches" / "inductor").rglob("*.py")})
    assert kept[0] and kept[1] == kept[0]


def test_process_that_fails_is_told(tmp_path, monkeypatch):
    module = script("first_calls", tmp_path)
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **options: SimpleNamespace(returncode=1, stderr="no memory", stdout=""))
    with pytest.raises(RuntimeError, match="auto: expected a process that ends well, got no memory"):
        module.fresh_process("auto", True, tmp_path)


def test_medians_are_by_loss_and_state(tmp_path, monkeypatch):
    module, seen = script("first_calls", tmp_path), []

    def process(name, small, folder):
        seen.append((name, folder))
        return dict(seconds=float(len(seen)), again=0.0, imports=0.0)

    monkeypatch.setattr(module, "fresh_process", process)
    found = module.measured(["auto", "CTC"], True, 3)
    assert [*found] == [(name, state) for name in ("auto", "CTC") for state in module.STATES]
    orders = [tuple(name for name, _ in seen[i:i + 4:2]) for i in (0, 4, 8)]
    assert len({*orders}) == 2 and all(sorted(order) == ["CTC", "auto"] for order in orders)
    assert [a == b for (_, a), (_, b) in zip(seen[::2], seen[1::2])] == [True] * 6 and len({folder for _, folder in seen}) == 6
    of_auto = [i + 1.0 for i, (name, _) in enumerate(seen) if name == "auto"]
    assert found["auto", "empty caches"]["seconds"] == sorted(of_auto[::2])[1] and found["auto", "warm disk"]["seconds"] == sorted(of_auto[1::2])[1]
