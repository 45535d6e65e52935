"""What `tools/fuzz.py --ranks` draws: calls of fuzz_calls.py whose classes, or whose pairs, are over ranks, and what each rank has of them."""
import functools
import itertools
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import fusedloss as fl
import fuzz_calls
from fusedloss.core.options import argument_names
from fusedloss.core.ranks import shard_range
from fuzz_calls import Call, Draw, alive, counted, told

DEALT = ("linear_weight", "linear_bias", "teacher_weight", "teacher_bias")  # tensors of which each rank has the rows of its classes


class Parts(NamedTuple):
    "What each rank has of a call's tensors; what is in neither list is the same on all"
    classes: tuple[str, ...] = DEALT
    tokens: tuple[str, ...] = ()  # and so each rank has the outputs of its own tokens
    dim: int = 0  # along which these are cut
    lengths: Callable[[int], list[int]] = lambda n: []  # of each rank, of n tokens
    factor: int = 1  # a wrapper divides gradients by it
    whole: tuple[str, ...] = ()  # tensors whose gradient each rank has whole, though it has tokens of its own

    def of(self, name: str, t: Tensor, ranks: int) -> list[Tensor]:
        "A tensor as each rank has it"
        if name in self.classes:
            return list(t.split([len(shard_range(len(t), ranks, rank)) for rank in range(ranks)]))
        return list(t.split(self.lengths(t.shape[self.dim]), self.dim)) if name in self.tokens else [t] * ranks

    def output(self, found: list[Tensor]) -> tuple[Tensor, bool]:
        "An output of all ranks, and whether they say the same where they should"
        own = self.tokens and found[0].dim()
        return (torch.cat(found, self.dim), True) if own else (found[0], all(same(t, found[0]) for t in found))

    def gradient(self, name: str, found: list[Tensor]) -> tuple[Tensor, bool]:
        "A tensor's gradient, likewise"
        by = lambda t: (t.double() / self.factor).to(t.dtype)
        if name in self.classes:
            return torch.cat(found), True
        if name in self.tokens:
            return by(torch.cat(found, self.dim)), True
        if self.adds(name):
            return by(torch.stack(found).double().sum(0)).to(found[0].dtype), True
        return found[0], all(same(t, found[0]) for t in found)

    def adds(self, name: str) -> bool:
        "Whether a tensor's gradient is the sum of what ranks have"
        return bool(self.tokens) and name not in (*self.classes, *self.tokens, *self.whole)

    def roundings(self, name: str, found: list[Tensor]) -> float:
        "How far off the roundings of these may make a gradient, however much of them cancels"
        return sum(t.double().norm().item() for t in found) * torch.finfo(found[0].dtype).eps / self.factor if self.adds(name) else 0.0


def same(a: Tensor, b: Tensor) -> bool:
    "Whether two tensors are equal, NaN being NaN"
    return a.shape == b.shape and a.dtype == b.dtype and (torch.equal(a, b) or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)))


class RankCall(NamedTuple):
    "A call of all ranks"
    whole: Call  # with the definition and the tensors of all
    run: Callable[..., Any]  # the same over the ranks of a mesh, of the tensors that this one has
    parts: Parts

    def here(self, tensors: dict[str, Tensor], mesh) -> Call:
        "What one rank calls with its part of these"
        part = {name: self.parts.of(name, t, mesh.size())[mesh.get_local_rank()] for name, t in tensors.items()}
        return self.whole._replace(run=functools.partial(self.run, mesh), tensors=part, expands=False, inplace="", at_home=())


def accepted(d: Draw, draw: Callable[[Draw], Call], accepts: Callable[[Call], bool]) -> Call:
    "The first call drawn that ranks can make"
    return next(call for call in (draw(d) for _ in itertools.count()) if accepts(call))


def without(call: Call, *words: str) -> Call:
    "A call without these words, which losses over ranks do not take"
    for name in words:
        call.words.pop(name, None)
    return call


def with_learned_scale(d: Draw, call: Call) -> Call:
    "A call whose logit_scale may be a tensor"
    if "logit_scale" in call.words or not d.chance():
        return call
    def exact(found, logit_scale, linear_weight, linear_bias=None, **given):
        bias = {} if linear_bias is None else dict(linear_bias=logit_scale * linear_bias)
        return call.exact(found, linear_weight=logit_scale * linear_weight, **bias, **given)
    scale = torch.tensor(d.pick((0.5, 1.5)), dtype=d.pick((d.dtype, torch.float32)))
    return call._replace(exact=exact, tensors=call.tensors | dict(logit_scale=scale), leaves=call.leaves + ["logit_scale"] * bool(call.leaves),
                         tolerance=max(call.tolerance, 1e-4))  # of a scale: a sum over all scores


def uneven(d: Draw, n: int, ranks: int) -> list[int]:
    "How many of n each rank has, some of them none"
    ends = [0, *sorted(d.r.randint(0, n) for _ in range(ranks - 1)), n]
    return [b - a for a, b in zip(ends, ends[1:])]


def dealt(n: int, ranks: int) -> list[int]:
    "How many of n each rank has as a DTensor deals them"
    return [len(shard_range(n, ranks, rank)) for rank in range(ranks)]


def as_dtensor(t: Tensor, mesh, placement, shape: torch.Size) -> DTensor:
    "A rank's part as a DTensor of this shape"
    return DTensor.from_local(t, mesh, [placement], run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride())


def of_layer(d: Draw, ranks: int, call: Call, function: Callable, beside: Callable, results: Callable = lambda found: found) -> RankCall:
    "A loss of a linear layer whose classes are dealt: as DTensors to `function`, or as rows beside a mesh to `beside`; and whose the tokens are"
    lead = call.tensors["input"].shape[:-1]
    of_tokens = [name for name in call.tensors if name not in (*DEALT, "weight", "logit_scale")]
    dim, kind = d.r.randrange(len(lead)), d.pick(("same", "replicated", "own", "own", "rows", "rows"))
    if kind == "own" and call.words.get("shift") and dim == len(lead) - 1:
        kind = "rows"  # which alone share a sequence
    shared, by_mesh, plain, V = kind in ("same", "replicated"), d.chance(0.4), d.chance(0.5), len(call.tensors["linear_weight"])
    lengths = dealt(lead[dim], ranks) if kind == "rows" else uneven(d, lead[dim], ranks)
    how = None if shared else d.pick(("mean", "sum"))
    parts = Parts(tokens=() if shared else tuple(of_tokens), dim=dim, lengths=lambda n: lengths, factor=ranks if how == "mean" else 1)
    shapes = {name: t.shape for name, t in call.tensors.items()}
    def place(name: str, t: Tensor, mesh):
        if name in DEALT:
            return t if by_mesh else as_dtensor(t, mesh, Shard(0), shapes[name])
        if kind == "replicated" and name == "input":
            return as_dtensor(t, mesh, Replicate(), shapes[name])
        return as_dtensor(t, mesh, Shard(dim), shapes[name]) if kind == "rows" and name in of_tokens and (name == "input" or not plain) else t
    def run(mesh, **given):
        where = dict(mesh=mesh, num_classes=V) if by_mesh else {}
        given = {name: place(name, t, mesh) for name, t in given.items()}
        return results((beside if by_mesh else function)(**given, **call.words, **where, backbone_reduction=how))
    said = dict(tokens=kind, dim=dim, lengths=lengths, backbone_reduction=how, by_mesh=by_mesh)
    return RankCall(call._replace(names=[*argument_names(beside), "mesh"], words=call.words | said), run, parts)


def linear_cross_entropy(d: Draw, ranks: int) -> RankCall:
    labels = lambda call: call.tensors["target"].dim() < call.tensors["input"].dim()
    accepts = lambda call: labels(call) and not call.words["return_stats"] and not {"filter_eps", "matmul_dtype"} & call.words.keys()
    call = without(accepted(d, fuzz_calls.linear_cross_entropy, accepts), "return_stats", "accumulate", "max_valid")
    call.words["method"] = d.pick(("auto", "recompute", "product") if d.dtype != torch.float16 else ("auto", "recompute"))
    if call.words["method"] == "product":
        for name in ("label_smoothing", "softcap"):
            call.words.pop(name, None)
        call.words["reduction"] = d.pick(("mean", "sum"))
        call = call._replace(tensors={name: t for name, t in call.tensors.items() if name != "linear_bias"}, leaves=[n for n in call.leaves if n != "linear_bias"])
    call = with_learned_scale(d, call)
    if call.words["method"] == "product" or not d.chance(0.3):
        return of_layer(d, ranks, call, fl.linear_cross_entropy, fl.sharded_linear_cross_entropy, lambda loss: [loss])
    telling = lambda function: functools.partial(function, return_stats=True)
    return of_layer(d, ranks, with_statistics(d, call), telling(fl.linear_cross_entropy), telling(fl.sharded_linear_cross_entropy), lambda found: told(*found))


def with_statistics(d: Draw, call: Call) -> Call:
    "A cross entropy and what it tells of its tokens"
    shift, words = call.words.get("shift", 0), call.words
    def exact(found, **given):
        x, y, t = alive(given["input"]), given["target"], given.get("token_weight")
        if shift:
            x, y, t = x[..., :max(x.shape[-2] - shift, 0), :], y[..., shift:], None if t is None else t[..., shift:]
        z = given.get("logit_scale", 1.0) * F.linear(x, given["linear_weight"], given.get("linear_bias"))
        return [*call.exact(found, **given), *told(found[0], counted(found, z, y, t, words, d.dtype))[1:]]
    return call._replace(exact=exact)


def sharded_linear_log_probs(d: Draw, ranks: int) -> RankCall:
    call = without(fuzz_calls.linear_log_probs(d), "batch_invariant", "max_valid")
    return of_layer(d, ranks, with_learned_scale(d, call), fl.sharded_linear_log_probs, fl.sharded_linear_log_probs, lambda found: found[:3])


def sharded_linear_divergence(d: Draw, ranks: int) -> RankCall:
    accepts = lambda call: "n_classes" not in call.words and "top_indices" not in call.tensors
    if d.dtype == torch.float16:
        d.dtype = torch.bfloat16
    call = with_learned_scale(d, accepted(d, fuzz_calls.linear_divergence, accepts))
    return of_layer(d, ranks, call, fl.sharded_linear_divergence, fl.sharded_linear_divergence, lambda loss: [loss])


def sharded_linear_topk(d: Draw, ranks: int) -> RankCall:
    return of_layer(d, ranks, with_learned_scale(d, fuzz_calls.linear_topk(d)), fl.sharded_linear_topk, fl.sharded_linear_topk)


def sharded_linear_sample(d: Draw, ranks: int) -> RankCall:
    return of_layer(d, ranks, fuzz_calls.linear_sample(d), fl.sharded_linear_sample, fl.sharded_linear_sample)


def of_pairs(d: Draw, ranks: int, draw: Callable[[Draw], Call], function: Callable) -> RankCall:
    "A contrast of all ranks' rows, of which each has as many"
    call = accepted(d, draw, lambda call: all(len(call.tensors[name]) % ranks == 0 for name in ("x", "y")))
    how = d.pick(("mean", "sum"))
    parts = Parts((), ("x", "y", "positives"), 0, functools.partial(dealt, ranks=ranks), ranks if how == "mean" else 1)
    run = lambda mesh, **given: [function(**given, **call.words, mesh=mesh, backbone_reduction=how)]
    return RankCall(call._replace(names=[*call.names, "mesh"], words=call.words | dict(backbone_reduction=how)), run, parts)


def contrastive_loss(d: Draw, ranks: int) -> RankCall:
    return of_pairs(d, ranks, fuzz_calls.contrastive_loss, fl.contrastive_loss)


def sigmoid_contrastive_loss(d: Draw, ranks: int) -> RankCall:
    return of_pairs(d, ranks, fuzz_calls.sigmoid_contrastive_loss, fl.sigmoid_contrastive_loss)


def sharded_partial_fc(d: Draw, ranks: int) -> RankCall:
    def accepts(call):  # a class's centres lie on one rank
        n, V = len(call.tensors["weight"]), call.words["num_classes"]
        return -(-n // ranks) == n // V * -(-V // ranks)
    call = accepted(d, fuzz_calls.partial_fc, accepts)
    n, how = len(call.tensors["target"]), d.pick(("mean", "sum"))
    equal = n % ranks == 0 and d.chance(0.5)
    lengths = dealt(n, ranks) if equal else uneven(d, n, ranks)
    parts = Parts(("weight",), ("features", "target", "token_weight"), 0, lambda n: lengths, ranks if how == "mean" else 1, ("scale",))
    def run(mesh, weight, **given):
        head = functools.partial(fl.ShardedPartialFC, mesh=mesh, equal_batch=equal, backbone_reduction=how)
        return call.run(weight=as_dtensor(weight, mesh, Shard(0), call.tensors["weight"].shape), head=head, **given)
    said = dict(lengths=lengths, equal_batch=equal, backbone_reduction=how)
    return RankCall(call._replace(names=[*call.names, *argument_names(fl.ShardedPartialFC), "mesh"], words=call.words | said), run, parts)


LOSSES: dict[str, Callable[[Draw, int], RankCall]] = {f.__name__: f for f in (
    linear_cross_entropy, sharded_linear_log_probs, sharded_linear_divergence, sharded_linear_topk, sharded_linear_sample, contrastive_loss,
    sigmoid_contrastive_loss, sharded_partial_fc)}
