"""Every argument of every public function, constructor and forward, with values that it cannot take: the error names it, and nothing has changed."""
import collections.abc
import inspect
import os
import re
import tempfile
import types
from functools import partial
from typing import Any, Iterator, NamedTuple, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim.optimizer import ParamsT

import fusedloss as fl
from fusedloss.core.options import argument_names
from fusedloss.core.rates import Machine
from test_types import functions, public, words_of

N, H, V = 6, 4, 9
made = torch.Generator().manual_seed(0)
x, w, z = (torch.randn(n, h, generator=made) for n, h in ((N, H), (V, H), (N, V)))
y = torch.arange(N)
linear = dict(input=x, linear_weight=w, target=y)
paths = dict(log_probs=torch.randn(5, 2, 4, generator=made).log_softmax(2), targets=torch.tensor([[1, 2], [3, 1]]),
             input_lengths=torch.tensor([5, 4]), target_lengths=torch.tensor([2, 1]))
frames = {k: t for k, t in paths.items() if k != "log_probs"}
grid = dict(logits=torch.randn(2, 5, 3, 4, generator=made), targets=torch.tensor([[1, 2], [2, 1]]), logit_lengths=torch.tensor([5, 4]), target_lengths=torch.tensor([2, 1]))
graph = dict(Ms=torch.randn(3, 2, 2, 2, generator=made), idx=torch.tensor([[0, 1], [1, 0]]), v0=torch.zeros(2, 2), vT=torch.zeros(2, 2))


def with_gradient(t: Tensor) -> nn.Parameter:
    "A parameter whose gradient is there"
    p = nn.Parameter(t.clone())
    p.grad = torch.ones_like(p)
    return p


def traced() -> torch.fx.GraphModule:
    "A graph of ATen operations"
    from torch.fx.experimental.proxy_tensor import make_fx
    return make_fx(lambda t: t.exp())(x)


def optimizer(kind: type) -> torch.optim.Optimizer:
    "One that has something to do"
    return kind(torch.optim.SGD, [with_gradient(w)], lr=0.1)


HEADS = {name: partial(getattr(fl, name), V, H, sample_rate=0.5) for name in ("PartialFC", "ShardedPartialFC")}
OPTIMIZERS = {name: partial(optimizer, getattr(fl, name)) for name in ("RowSparse", "ShardedRowSparse")}
OBJECTS = {  # what methods are called on
    **HEADS, **OPTIMIZERS, "CTCLoss": fl.CTCLoss, "TransducerLoss": fl.TransducerLoss, "LinearCrossEntropyLoss": partial(fl.LinearCrossEntropyLoss, H, V),
    "MemoryEfficientVocabOutput": lambda: fl.MemoryEfficientVocabOutput(nn.Parameter(w.clone())), "NegativeSampler": partial(fl.NegativeSampler, 0.5), "PopularitySampler": partial(fl.PopularitySampler, torch.ones(V), 3),
    **{name: partial(lambda kind: kind(nn.Parameter(w.clone())), getattr(fl, name)) for name in ("BaselineSoftmax", "BaselineSoftmaxNllLoss")},
}
FILES = tempfile.TemporaryDirectory()
torch.save(w, f"{FILES.name}/rank_0_softmax_weight.pt")
GOOD: dict[str, dict] = {  # one call of each that succeeds
    **dict.fromkeys(("baseline_linear_cross_entropy", "chunked_linear_cross_entropy", "linear_cross_entropy", "recompute_linear_cross_entropy",
                     "sharded_linear_cross_entropy", "tiled_linear_cross_entropy"), linear),
    **dict.fromkeys(("linear_log_probs", "sharded_linear_log_probs"), linear), "log_probs": dict(logits=z, target=y),
    **dict.fromkeys(("linear_topk", "sharded_linear_topk"), dict(input=x, linear_weight=w, k=3)), **dict.fromkeys(("linear_sample", "sharded_linear_sample"), dict(input=x, linear_weight=w)),
    "margin_cross_entropy": {**linear, "margin": fl.margins.CosFace()},
    **dict.fromkeys(("cross_entropy", "iota_cross_entropy"), dict(input=z, target=y)), "onehot_select": dict(z=z, y=y),
    "plan": dict(n_tokens=4, n_classes=16, n_features=8), "contrastive_loss": dict(x=x, y=torch.randn(N, H, generator=made), logit_scale=2.0),
    "sigmoid_contrastive_loss": dict(x=x, y=torch.randn(N, H, generator=made), logit_scale=2.0, logit_bias=-1.0),
    **dict.fromkeys(("linear_divergence", "sharded_linear_divergence"), dict(input=x, linear_weight=w, teacher_input=torch.randn(N, 3, generator=made),
                                                                             teacher_weight=torch.randn(V, 3, generator=made))),
    **dict.fromkeys(("ctc_loss", "ctc_posteriors", "forced_align", "CTCLoss.forward"), paths),
    "ctc_loss_with_logits": {"logits": paths["log_probs"], **frames}, "ctc_decode": {k: paths[k] for k in ("log_probs", "input_lengths")},
    **dict.fromkeys(("transducer_loss", "transducer_align", "TransducerLoss.forward"), grid), "TransducerLoss": {},
    "transducer_decode": dict(encoder=torch.randn(2, 5, 4, generator=made), encoder_lengths=torch.tensor([5, 4]), predict=lambda labels, state: (torch.zeros(2, 4), ()), joint=lambda frames, outputs: frames[:, :4] + outputs),
    "linear_ctc_loss": {"input": torch.randn(5, 2, H, generator=made), "linear_weight": w, **frames},
    "linear_transducer_loss": dict(encoder=torch.randn(2, 5, H, generator=made), predictor=torch.randn(2, 4, H, generator=made), linear_weight=w,
                                   targets=torch.tensor([[1, 2, 3], [4, 5, 6]]), encoder_lengths=torch.tensor([5, 4]), target_lengths=torch.tensor([3, 2])),
    **dict.fromkeys(("logz", "viterbi", "sample", "semirings.path_sum", "semirings.brute_force"), graph), "rewrite_gather": dict(gm=traced()),
    **dict.fromkeys(HEADS, dict(num_classes=V, embedding_size=H)),
    **dict.fromkeys((f"{head}.forward" for head in HEADS), dict(features=x, target=y)), **dict.fromkeys((f"{head}.extend" for head in HEADS), dict(n=2)),
    **dict.fromkeys((f"{head}.remove" for head in HEADS), dict(classes=[1, 2])),
    **dict.fromkeys(OPTIMIZERS, dict(optimizer_class=torch.optim.SGD, params=[nn.Parameter(w)])), **dict.fromkeys((f"{o}.step" for o in OPTIMIZERS), {}),
    **dict.fromkeys((f"{o}.clip_grad_norm_" for o in OPTIMIZERS), dict(max_norm=1.0)), "clip_grad_norm_": dict(parameters=w.clone(), max_norm=1.0),
    **dict.fromkeys((f"{o}.clip_grad_value_" for o in OPTIMIZERS), dict(clip_value=1.0)), "clip_grad_value_": dict(parameters=w.clone(), clip_value=1.0),
    **dict.fromkeys((f"{head}.logits" for head in HEADS), dict(features=x)), **dict.fromkeys((f"{head}.topk" for head in HEADS), dict(features=x, k=2)),
    "ignore_in_ddp": dict(module=nn.Linear(2, 2)), "load_insightface": dict(head=fl.PartialFC(V, H), files=FILES.name),
    "save_insightface": dict(head=fl.PartialFC(V, H), folder=FILES.name, ranks=1, kind="weight"),
    "PopularitySampler": dict(popularity=torch.ones(V), num_samples=3), "PopularitySampler.forward": dict(rows=2), "PopularitySampler.log_draws": dict(classes=y),
    "NegativeSampler": dict(rate=0.5), "NegativeSampler.forward": dict(stop=V), "NegativeSampler.find": dict(y=y),
    "LinearCrossEntropyLoss": dict(in_features=H, num_classes=V), "LinearCrossEntropyLoss.forward": dict(input=x, target=y), "CTCLoss": {},
    **dict.fromkeys(("MemoryEfficientVocabOutput", "BaselineSoftmax", "BaselineSoftmaxNllLoss"), dict(proj_weight=nn.Parameter(w))),
    **dict.fromkeys((f"{name}.forward" for name in ("MemoryEfficientVocabOutput", "BaselineSoftmax", "BaselineSoftmaxNllLoss")), dict(input=x, target=y)),
    "MemoryEfficientVocabOutput.eval_forward": dict(input=x), **dict.fromkeys(("margins.CosFace", "margins.ArcFace", "margins.Combined", "margins.AdaFace", "margins.Circle"), {}),
    "margins.SubCenter": dict(k=2), "semirings.KBest": dict(k=2), "semirings.CountSemiring": {}, "semirings.Sample": {},
}
THEN = {  # the call that some constructors leave the checks to
    "CTCLoss": paths, "TransducerLoss": grid, "LinearCrossEntropyLoss": dict(input=x, target=y),
    **dict.fromkeys(("MemoryEfficientVocabOutput", "BaselineSoftmax", "BaselineSoftmaxNllLoss"), dict(input=x, target=y)),
}
EXAMPLES = {**dict.fromkeys(("linear_bias", "teacher_bias"), torch.randn(V, generator=made)), "target_weight": torch.rand(3, generator=made), "weight": torch.rand(V, generator=made), "class_weight": torch.rand(V, generator=made),
            "token_weight": torch.rand(N, generator=made), "temperature": 0.5 + torch.rand(N, generator=made), "grad_buffer": torch.zeros(V, H), "lengths": torch.tensor([3, 2]), "positives": torch.arange(N)}
INSIDE = re.compile(  # results, and what the library calls with what it made itself
    r"CrossEntropyStats|LogProbs|TopK|LinearCrossEntropyLoss\.compute|\w*RowSparse\.(update|load_state_dict|add_param_group)|.*\.(observe|moves_by|new_rows|target_score|quality|lift|sum|mul|reduce|dsum|best"
    r"|filled|pace|paced|__call__)|margins\.(Margin|WideBuffers|CosineTiles)(\..*)?|margins\.\w+\.forward")


def found(name: str) -> object:
    "What a dotted name of the package stands for"
    thing = fl
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


class Argument(NamedTuple):
    "A parameter, as an annotation says what it takes"
    name: str
    kinds: tuple[object, ...]  # types; None for NoneType
    words: tuple[str, ...]


def kinds_of(annotation: object) -> tuple[object, ...]:
    "The members of a union, of one otherwise"
    if get_origin(annotation) in (Union, types.UnionType):
        return sum(map(kinds_of, get_args(annotation)), ())
    return (None if annotation is type(None) else annotation,)


def arguments(name: str) -> Iterator[Argument]:
    "Those that a callable takes, those of a `TypedDict` of options too"
    for p in inspect.signature(found(name)).parameters.values():
        if p.name == "self" or p.kind is p.VAR_KEYWORD and p.annotation is Any:
            continue
        options = get_args(p.annotation)[0] if p.kind is p.VAR_KEYWORD else None
        hints = get_type_hints(options) if is_typeddict(options) else {p.name: p.annotation}
        yield from (Argument(k, (ParamsT,) if a is ParamsT else kinds_of(a), words_of(a)) for k, a in hints.items())


def called() -> list[str]:
    "Names of all public callables that take arguments"
    names = {name for name, f in public() if inspect.isfunction(f) or inspect.isclass(f)}
    names |= {name for name, _ in functions() if not name.endswith("__")}
    names |= {f"semirings.{name}" for name in ("path_sum", "brute_force", "KBest", "CountSemiring", "Sample")}
    return sorted(name for name in names if not INSIDE.fullmatch(name) and callable(found(name)) and any(arguments(name)))


# --- values that an argument cannot take: by its type, and by its name where the type does not say it ---

NUMBERS = {  # outside of the range
    "clamp": (), "fastemit_lambda": (-0.1,), "sigma": (-0.1,), "label_smoothing": (-0.1, 1.5), "logit_scale": (0.0, -1.0), "logit_bias": (), "softcap": (0.0, -1.0), "z_loss": (-1.0,), "scale": (0.0, -1.0), "eps": (0.0, -1.0),
    "filter_eps": (0.0, 1.0, -0.5), "margin": (), "conflict": (-1.5, 1.0), "sample_rate": (0.0, 1.5, -0.5), "rate": (0.0, 1.5, -0.5), "h": (-1.0,),
    "beta": (-0.1, 1.1), "temperature": (0.0, -1.0), "teacher_softcap": (0.0, -1.0), "teacher_logit_scale": (0.0, -1.0), "momentum": (-0.1, 1.5), "m1": (0.0, -1.0), "m2": (-1.0,), "m3": (-1.0,), "max_norm": (-1.0,), "clip_value": (-1.0,), "norm_type": (0.0, -1.0), "top_p": (0.0, -0.5, 1.5), "min_p": (-0.5, 1.5),
}
INTEGERS = {  # outside of the range; a size unless named here
    "ignore_index": (), "shift": (-1,), "seed": (2**63,), "RowSparse-seed": (), "ShardedRowSparse-seed": (), "NegativeSampler-seed": (-1, 2**63), "PopularitySampler-seed": (-1, 2**63), "rows": (-1,), "max_valid": (-1,),
    "n_tokens": (-1,), "n_features": (-1,), "in_features": (-1,), "start": (-1,), "stop": (-1,), "dim": (2, -3), "blank": (-1, 99), **dict.fromkeys(("transducer_loss-blank", "transducer_align-blank", "transducer_decode-blank", "TransducerLoss-blank"), (-5, 99)),
    "BaselineSoftmax-tile_factor": (), "BaselineSoftmaxNllLoss-tile_factor": (),
}
PARTNERS = {  # the error of a shape or device that does not fit may name the argument that it does not fit
    **dict.fromkeys(("input", "features"), ("target", "targets", "linear_weight", "token_weight", "teacher_input")),
    "linear_weight": ("input", "teacher_weight", "encoder"), "targets": ("predictor",), "teacher_input": ("teacher_weight",), "teacher_weight": ("teacher_input",), "proj_weight": ("input", "linear_weight"),
    **dict.fromkeys(("log_probs", "logits"), ("target", "targets", "input_lengths")), "Ms": ("idx", "v0"), "z": ("y",), "x": ("y",), "encoder": ("encoder_lengths", "targets"), "class_weight": ("weight",),
}
OLD_NAMES = {"beam": ("beam_size",)}  # of arguments, whose errors name the new one
FITS = {"no dimension", "more dimensions", "size", "rows", "float64", "meta"}  # the kinds that are meant
FINE = {  # kinds that this argument takes, of one callable or of all
    "linear_weight": {"rows"}, "proj_weight": {"rows"}, "targets": {"size"}, "Ms": {"rows"}, "classes": {"nested"}, "max_norm": {"inf"}, "clip_value": {"inf"}, "norm_type": {"inf"},
    **dict.fromkeys((f"{head}.{scores}-features" for head in HEADS for scores in ("logits", "topk")), {"more dimensions", "rows"}), "ignore_in_ddp-module": {"adapter", "hook", "module"},
    **dict.fromkeys(("clip_grad_norm_-parameters", "clip_grad_value_-parameters"), {"no dimension", "more dimensions", "size", "rows", "float64", "int64", "bool", "complex64", "meta"}),  # tensors without a gradient
    **dict.fromkeys(("log_probs", "ctc_loss_with_logits-logits"), {"size", "rows", "float64", "meta"}), **dict.fromkeys(("weight", "class_weight", "token_weight"), {"float64"}),
    **dict.fromkeys(("input_lengths", "target_lengths", "logit_lengths", "encoder_lengths", "lengths"), {"list"}), **dict.fromkeys(("transducer_loss-logits", "transducer_align-logits", "TransducerLoss.forward-logits"), {"size", "float64", "meta"}),
    "transducer_decode-encoder": {"size", "float64", "int64", "bool", "complex64"},
    **dict.fromkeys(("cross_entropy-input", "iota_cross_entropy-input"), {"size", "float64"}), "linear_ctc_loss-input": {"rows"},
    **dict.fromkeys(("linear_divergence-temperature", "sharded_linear_divergence-temperature"), {"number", "float64", "tensor"}),
    **dict.fromkeys(("linear_log_probs-temperature", "log_probs-temperature", "sharded_linear_log_probs-temperature"), {"number", "float64"}), "log_probs-logits": {"size", "float64"},
    **dict.fromkeys(("MemoryEfficientVocabOutput.eval_forward-input", "linear_topk-input", "sharded_linear_topk-input", "linear_sample-input", "sharded_linear_sample-input"), {"more dimensions", "rows"}), "NegativeSampler.find-y": {"no dimension", "more dimensions", "size"}, "PopularitySampler.log_draws-classes": {"no dimension", "more dimensions", "size"},
    "PopularitySampler-popularity": {"size", "float64", "int64"},
    **dict.fromkeys((f"{over}linear_{name}-temperature" for over in ("", "sharded_") for name in ("sample", "topk")), {"number", "float64"}),
    "onehot_select-z": {"size", "float64", "int64", "bool", "complex64"}, "chunked_linear_cross_entropy-linear_bias": {"float64"},
    **dict.fromkeys((f"{name}linear_divergence-{bias}_bias" for name in ("", "sharded_") for bias in ("linear", "teacher")), {"float64"}), "plan-needs_grad": {"list"}, "plan-options": {"empty"},
    "semirings.CountSemiring-dtype": {"int8"}, **dict.fromkeys(("contrastive_loss-logit_scale", "sigmoid_contrastive_loss-logit_scale"), {"0.0", "-1.0"}), "logit_scale": {"tensor"}, "logit_bias": {"tensor"},
    **dict.fromkeys((f"margins.{kind}-scale" for kind in ("AdaFace", "ArcFace", "Combined", "CosFace")), {"tensor"}),
}
NOT_FINE = dict.fromkeys(("transducer_loss-targets", "linear_transducer_loss-targets", "transducer_align-targets", "TransducerLoss.forward-targets"), {"size"}) | dict.fromkeys(("linear_divergence-linear_weight", "sharded_linear_divergence-linear_weight"), {"rows"})  # which must have the teacher's classes
WORDS = {"grad": "exact", "past_pi": "smooth"}  # annotated as any string


class Lora(nn.Linear):
    "A linear layer that does more than the product"
    def forward(self, t: Tensor) -> Tensor:
        return super().forward(t) + 1


def hooked() -> nn.Linear:
    "A linear layer with a hook"
    layer = nn.Linear(H, V, bias=False)
    layer.register_forward_hook(lambda *_: None)
    return layer


def tensors(name: str, good: Tensor) -> Iterator[tuple[str, object]]:
    "No tensors; tensors of another shape, dtype or device"
    yield from {"list": good.tolist(), "None": None, "str": "words", "number": 3.0}.items()
    yield from {"no dimension": good.new_zeros(()), "more dimensions": good[None, None], "size": torch.cat([good, good], -1)[..., :good.shape[-1] + 1]}.items()
    if good.dim() > 1:
        yield "rows", torch.cat([good, good])[:len(good) + 1]
    dtypes = (torch.float64, torch.int64, torch.bool, torch.complex64) if good.is_floating_point() else (torch.float32, torch.bool, torch.complex64)
    yield from ((str(d).removeprefix("torch."), good.to(d)) for d in dtypes)
    yield "meta", good.to("meta")
    if name in ("weight", "class_weight", "token_weight"):
        yield "gradient", good.clone().requires_grad_()
    if name in ("target", "targets", "idx", "positives") or name.endswith("lengths"):
        yield from ((str(number), torch.full_like(good, number)) for number in (99, -7))


def sequences(name: str) -> Iterator[tuple[str, object]]:
    "No integers"
    yield from {"str": "words", "None": None, "number": 1.5, "floats": [1.5, 2.0], "words": ["a", "b"], "nested": [[1, 2]], "large": [99, 1], "negative": [-7, 1]}.items()


def bad_values(name: str, a: Argument, good: object) -> Iterator[tuple[str, object]]:
    "Kind and value"
    of = lambda *types: any(t in a.kinds for t in types)
    if of(Tensor, nn.Parameter):
        if isinstance(good, Tensor):
            yield from tensors(a.name, good)
        if any(get_origin(k) is collections.abc.Sequence for k in a.kinds):
            yield from sequences(a.name)
    if any(get_origin(k) is collections.abc.Sequence and get_args(k) == (int,) for k in a.kinds) and not of(Tensor):
        yield from {"str": "words", "number": 3, "words": ["a"], "twice": [1, 1], "negative": [-1, 1], "empty": []}.items()
    if of(float) and (a.name == "temperature" or not isinstance(good, Tensor)):
        yield from {"str": "1", "bool": True, "list": [1.0], "None": None, "nan": float("nan"), "inf": float("inf"), "tensor": torch.tensor(0.5)}.items()
        yield from ((str(value), value) for value in NUMBERS[a.name])
        if name.startswith("margins."):
            yield "-1.0", -1.0
    elif of(int) and not of(str):
        yield from {"str": "1", "bool": True, "fraction": 1.5, "list": [1], "None": None, "nan": float("nan")}.items()
        yield from ((str(value), value) for value in INTEGERS.get(f"{name}-{a.name}", INTEGERS.get(a.name, (0, -1))))
    elif of(bool):
        yield from {"str": "no", "None": None, "list": [True], "number": 2}.items()
    if of(nn.Module):
        yield from {"adapter": Lora(H, V, bias=False), "hook": hooked(), "module": nn.ReLU()}.items()
    if of(nn.Module) and not of(Tensor) or of(fl.PartialFC):
        yield from {"str": "words", "number": 3, "class": nn.Linear, "None": None}.items()
    if of(os.PathLike):
        yield from {"number": 3, "numbers": [1, 2], "empty": [], "None": None}.items()
    if a.words or a.name in WORDS:
        yield from {"word": "a word of its own", "number": 7, "list": ["mean"], "None": None}.items()
    if of(torch.dtype):
        yield from {"str": "float32", "number": 8, "None": None, "int8": torch.int8}.items()
    if of(str) and a.name == "device":
        yield from {"str": "nowhere", "number": 1.5, "list": ["cpu"], "None": None}.items()
    if any(get_origin(k) is collections.abc.Callable for k in a.kinds):
        yield from {"str": "words", "number": 3, "None": None}.items()
    if of(fl.margins.Margin, fl.NegativeSampler, fl.semirings.Semiring, DeviceMesh, torch.Generator, torch.fx.GraphModule, Machine, type, torch.optim.Optimizer):
        yield from {"str": "words", "number": 3, "list": [], "class": list, "None": None}.items()
    if of(ParamsT):
        yield from {"None": None, "number": 3, "str": "words", "tensor": w, "numbers": [1, 2], "empty": []}.items()
    if any(get_origin(k) is tuple for k in a.kinds):
        yield from {"str": "words", "number": 3, "None": None, "empty": (), "words": ("a", "b"), "many": (1, 2, 3, 4), "numbers": [1.5, "a"]}.items()


def cases(name: str, a: Argument) -> dict[str, object]:
    "Values of an argument by kind; None is none where the annotation allows it"
    given = bad_values(name, a, GOOD[name].get(a.name, EXAMPLES.get(a.name)))
    return {kind: value for kind, value in given if not (value is None and None in a.kinds)}


def invoke(name: str, given: dict, objects: dict = {}):
    "The call, and the one that a constructor leaves its checks to"
    owner, _, method = name.rpartition(".")
    f = getattr(objects[owner], method) if owner in OBJECTS else found(name)
    parameters = inspect.signature(f).parameters.values()
    several = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    if several in given:
        given = dict(given)
        return f(*[given[p.name] for p in parameters if p.name in given and p.name != several], given[several])
    result = f(**given)
    return result(**THEN[name]) if name in THEN else result


def held(name: str, given: dict, objects: dict) -> list[Tensor]:
    "All tensors that a call could change"
    owner = objects.get(name.rpartition(".")[0])
    own = list(owner.state_dict().values()) if isinstance(owner, nn.Module) else [p for g in getattr(owner, "param_groups", ()) for p in g["params"]]
    return [t.detach() for t in (*own, *given.values()) if isinstance(t, Tensor)]


def said(name: str, given: dict, objects: dict) -> str:
    "What is raised, or what came instead"
    before = [(t, t._version, None if t.is_meta else t.clone()) for t in held(name, given, objects)]
    try:
        invoke(name, given, objects)
        text = "nothing"
    except (ValueError, IndexError) as error:
        text = str(error)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    if text == "nothing":  # a head's step counts
        before = before[len(before) - sum(isinstance(t, Tensor) for t in given.values()):]
    for t, version, bits in before:
        if t._version != version or bits is not None and not torch.equal(t.nan_to_num(), bits.nan_to_num()):
            return f"a tensor has changed; {text}"
    return text


CASES = [pytest.param(name, a, id=f"{name}-{a.name}") for name in called() for a in (arguments(name) if name in GOOD else ())]


def test_every_public_callable_has_a_good_call():
    assert set(GOOD) == set(called())
    for name, given in GOOD.items():
        invoke(name, given, {name.rpartition(".")[0]: OBJECTS.get(name.rpartition(".")[0], lambda: None)()})


def is_sentence(text: str, names: tuple[str, ...]) -> bool:
    "Whether it begins with an argument, or an element of one, and says what was expected and what came"
    return bool(re.match(rf"({'|'.join(names)})(: expected .*, got |(\[[\d, ]*\])+ is .*: expected |: label .* is .*: expected )", text, re.DOTALL))


@pytest.mark.parametrize("name, argument", CASES)
def test_a_bad_argument_is_named(name, argument):
    values, owner, wrong = cases(name, argument), name.rpartition(".")[0], []
    assert values, f"{argument.name}: expected an annotation or a name that the tables know, got {argument.kinds}"
    objects = {owner: OBJECTS[owner]()} if owner in OBJECTS else {}
    fine = FINE.get(argument.name, set()) | FINE.get(f"{name}-{argument.name}", set())
    fine = fine - NOT_FINE.get(f"{name}-{argument.name}", set())
    for kind, value in values.items():
        text = said(name, GOOD[name] | {argument.name: value}, objects)
        names = argument.name, *OLD_NAMES.get(argument.name, ()), *(PARTNERS.get(argument.name, ()) if kind in FITS else ())
        if text != "nothing" if kind in fine else not is_sentence(text, names):
            wrong.append(f"{kind}: {text}")
    assert not wrong, "\n" + "\n".join(wrong)


TAKES_OPTIONS = {name: argument_names(found(name)) for name in sorted(GOOD) if any(  # a list of options in the signature, or behind `**options`
    p.name == "label_smoothing" or p.kind is p.VAR_KEYWORD and p.annotation is not Any for p in inspect.signature(found(name)).parameters.values())}


@pytest.mark.parametrize("name", TAKES_OPTIONS)
def test_a_name_nearly_right_is_answered_with_the_right_one(name):
    "Of each argument, and all that there are"
    own = set(inspect.signature(found(name)).parameters) - {"options"}
    assert own <= {*TAKES_OPTIONS[name]} and "ignore_index" in TAKES_OPTIONS[name]
    for known in TAKES_OPTIONS[name]:
        with pytest.raises(TypeError) as raised:
            invoke(name, GOOD[name] | {f"{known}_": 1})
        start, _, listed = str(raised.value).partition(" (expected ")
        assert start == f"{found(name).__name__}() got an unexpected keyword argument '{known}_'; did you mean {known}?"
        assert listed.removesuffix(")").split(", ") == TAKES_OPTIONS[name]


def test_a_part_of_a_name_is_answered_with_it():
    for part, whole in dict(bias="linear_bias", smoothing="label_smoothing", Ignore_Index="ignore_index").items():
        with pytest.raises(TypeError, match=rf"'{part}'; did you mean {whole}\? "):
            fl.linear_cross_entropy(**linear, **{part: 1})
    with pytest.raises(TypeError, match=r"'something_else' \(expected input, "):
        fl.linear_cross_entropy(**linear, something_else=1)


WORDS_OF = [pytest.param(case.values[0], case.values[1], id=case.id) for case in CASES if case.values[1].words]


@pytest.mark.parametrize("name, argument", WORDS_OF)
def test_a_word_nearly_right_is_answered_with_the_right_one(name, argument):
    objects = {owner: OBJECTS[owner]() for owner in [name.rpartition(".")[0]] if owner in OBJECTS}
    for word in filter(None, argument.words):
        answers = {said(name, GOOD[name] | {argument.name: wrong}, objects).rpartition("; did you mean ")[2] for wrong in (f"{word}_", word.upper())}
        refused = said(name, GOOD[name] | {argument.name: "a word of its own"}, objects)
        assert answers == {f"{word}?"} and repr(word) in refused and "did you mean" not in refused, f"{word}: {answers}"


@pytest.mark.parametrize("method", ("auto", "eager", "tiles", "chunks", "recompute", "product"))
def test_a_budget_too_small_is_told_each_number_once(method):
    "What the method takes, and what another one takes where that is less"
    text = said("linear_cross_entropy", linear | dict(method=method, memory_budget=1), {})
    numbers = re.findall(r"\d+ bytes", text)
    assert len(numbers) == len(set(numbers)) <= 3 and numbers[-1] == "1 bytes" and (method == "auto" or f"for {method!r}" in text), text


@pytest.mark.parametrize("name", sorted(GOOD))
def test_help_says_what_each_argument_means(name):
    "Once, with its type and a meaning; the result too, and nothing of PyTorch's"
    text, of = inspect.getdoc(found(name)), inspect.signature(found(name))
    said_of = re.search(r"^Args:\n(.*?)(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)[1]
    entries = re.findall(r"^    (\*{0,2}\w+)(?: \(.*?\))?: \S", said_of, re.MULTILINE)
    assert len(re.findall("^Args:$", text, re.MULTILINE)) == 1 and len(entries) == len(set(entries))
    wanted = {p.name for p in of.parameters.values() if p.name not in ("self", "options")}
    assert wanted <= {e.lstrip("*") for e in entries}, wanted - {e.lstrip("*") for e in entries}
    returns = inspect.isfunction(found(name)) and of.return_annotation not in (None, of.empty)
    assert len(re.findall("^Returns:$", text, re.MULTILINE)) == returns
    assert text.partition("\n")[0][-1] in ".:" and "raises as" not in text and "Should be overridden" not in text


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    "Of this process alone"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


OVER_RANKS = {"linear_cross_entropy-linear_weight", "sharded_linear_cross_entropy-linear_weight", "sharded_linear_cross_entropy-weight",  # which may be DTensors
              "sharded_linear_divergence-linear_weight", "sharded_linear_log_probs-linear_weight", "sharded_linear_topk-linear_weight", "sharded_linear_sample-linear_weight", "clip_grad_norm_-parameters", "clip_grad_value_-parameters"}
SPREAD = [pytest.param(*case.values, id=case.id) for case in CASES
          if isinstance(GOOD[case.values[0]].get(case.values[1].name, EXAMPLES.get(case.values[1].name)), Tensor)
          and {Tensor, nn.Parameter} & {*case.values[1].kinds}]


@pytest.mark.parametrize("name, argument", SPREAD)
def test_a_dtensor_is_taken_or_answered_with_what_to_do(name, argument, mesh):
    "Never with what PyTorch says of tensors that are mixed"
    good, owner = GOOD[name].get(argument.name, EXAMPLES.get(argument.name)), name.rpartition(".")[0]
    objects = {owner: OBJECTS[owner]()} if owner in OBJECTS else {}
    for placement in (Replicate(), Shard(0))[:1 + bool(good.dim())]:
        spread = distribute_tensor(good.detach(), mesh, [placement])
        spread = nn.Parameter(spread) if isinstance(good, nn.Parameter) else spread
        try:
            invoke(name, GOOD[name] | {argument.name: spread}, objects)
            text = "nothing"
        except ValueError as error:
            text = str(error)
        may, must = f"{name}-{argument.name}" in OVER_RANKS, placement != Replicate()
        assert may and text == "nothing" or not (may and must) and is_sentence(text, (argument.name, "y")), text


@pytest.mark.parametrize("name", ["linear_log_probs", "linear_divergence"])
def test_a_weight_over_ranks_is_answered_with_the_function_that_takes_it(name, mesh):
    "Whose loss is that of the whole weight"
    given = GOOD[name]
    spread = given | {key: distribute_tensor(given[key], mesh, [Shard(0)]) for key in ("linear_weight", "teacher_weight") if key in given}
    with pytest.raises(ValueError, match=rf"^linear_weight: expected .*fl\.sharded_{name}.*, got a DTensor$"):
        getattr(fl, name)(**spread)
    torch.testing.assert_close(getattr(fl, f"sharded_{name}")(**spread), getattr(fl, name)(**given))
