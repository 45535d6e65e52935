"""What tools/fuzz.py draws: one call of a public loss, its tensors, and its definition in float64."""
import copy
import math
import random
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedloss as fl
from fusedloss.core.cosine import EPS
from fusedloss.core.options import argument_names, CrossEntropyStats
from fusedloss.margins import Circle, Margin, SubCenter
from fusedloss.semirings import path_sum
from test_contrast import exact as exact_pairs, exact_positives, exact_sigmoid
from test_margins import FORMULAS, PerClass
from test_divergence import exact as exact_divergence
from test_transducer import ACTIVATE, arcs_from

SIZES = (0, 1, 1, 2, 3, 5, 7, 8, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
BAD_LABELS = (-7, 2**31 - 1)


def no_slack(ups: list[Tensor], **given: Tensor) -> dict[str, float]:
    "Of a call whose gradients are exact"
    return {}


class Call(NamedTuple):
    "A call and its definition: both take the tensors by name; the definition also what the call gave, for what it chose"
    run: Callable[..., Any]
    exact: Callable[..., Any]
    tensors: dict[str, Tensor]
    leaves: list[str]  # names of those that get gradients
    names: list[str]  # of arguments, which an error may name
    words: dict[str, Any]  # other arguments
    impossible: bool = False  # a label or a length that cannot be
    inplace: str = ""  # the tensor that the call may overwrite
    at_home: tuple[str, ...] = ()  # tensors that stay on the CPU
    tolerance: float = 0.0  # of gradients, if more than that of the dtype
    expands: bool = True  # whether all numbers of a row or column may be the same
    under: torch.dtype | None = None  # of autocast, if the call is made within
    slack: Callable[..., dict[str, float]] = no_slack  # of upstream gradients and the tensors: how far its gradients may be off by what it states

    def __str__(self):
        return str({name: f"{str(t.dtype)[6:]} {list(t.shape)}" for name, t in self.tensors.items()} | self.words | (dict(autocast=str(self.under)[6:]) if self.under else {}))


def within_autocast(run: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    "A function of tensors by name, called within autocast"
    def call(*of, **given):
        with torch.autocast(given["linear_weight"].device.type, dtype):
            return run(*of, **given)
    return call


def under_autocast(call: Call, dtype: torch.dtype) -> Call:
    "A call of float32 numbers that this dtype has, too, within autocast: operands lose nothing, scores and gradients are rounded"
    tensors = {name: t.to(dtype).float() if t.dtype == torch.float32 else t for name, t in call.tensors.items()}
    return call._replace(run=within_autocast(call.run, dtype), tensors=tensors, under=dtype)


class Draw:
    "What chance gives to one call"
    def __init__(self, seed: str, dtypes: list[torch.dtype], most: int):
        self.r = random.Random(seed)
        self.g = torch.Generator().manual_seed(self.r.getrandbits(60))
        self.dtype, self.pick, self.most = self.r.choice(dtypes), self.r.choice, most

    def chance(self, p: float = 0.25) -> bool:
        "Whether something that happens with probability p does"
        return self.r.random() < p

    def size(self, most: int = 257, least: int = 0) -> int:
        "One that is near a border"
        return self.pick([n for n in SIZES if least <= n <= min(most, self.most)])

    def numbers(self, *shape: int, by: float = 1.0, dtype=None) -> Tensor:
        "Normal ones"
        return torch.randn(shape, generator=self.g, dtype=torch.float64).mul(by).to(dtype or self.dtype)

    def weights(self, *shape: int) -> Tensor:
        "Not negative, some 0, of a dtype of their own"
        t = torch.rand(shape, generator=self.g)
        return (t * (t > 0.2) + 0.01 * (t > 0.2)).to(self.pick((self.dtype, torch.float32)))

    def labels(self, V: int, *shape: int, ignored: int | None = -100) -> Tensor:
        "Classes, of which none, some or all are ignored"
        y = torch.randint(V, shape, generator=self.g)
        if ignored is not None and self.chance(0.6):
            y[torch.rand(shape, generator=self.g) < self.pick((0.1, 0.5, 1.0))] = ignored
        return y.to(self.pick((torch.int64, torch.int64, torch.int32)))

    def spoiled(self, y: Tensor, V: int) -> bool:
        "Put a label that is no class among some"
        if not y.numel() or not self.chance(0.04):
            return False
        y.view(-1)[self.r.randrange(y.numel())] = self.pick((*BAD_LABELS, V))
        return True

    def haunted(self, x: Tensor, y: Tensor, ignored: int) -> bool:
        "Put NaN where a token is ignored, perhaps"
        here = self.chance(0.3)
        if here and y.shape == x.shape[:-1]:
            x[y == ignored] = torch.nan
        return here

    def loudness(self) -> float:
        "What scores are about as large as"
        return self.pick((0.0, 1.0, 1.0, 3.0, 3.0) if self.dtype.itemsize == 2 else (0.0, 1.0, 1.0, 3.0, 30.0, 1e3))

    def words(self, **of) -> dict[str, Any]:
        "Some of these options, each drawn by its function"
        return {name: value() for name, value in of.items() if self.chance()}

    def budget(self) -> dict[str, int]:
        "Perhaps one that cuts a call into chunks, or that is too small"
        return self.words(memory_budget=lambda: 2 ** self.r.randrange(6, 20))

    def options(self) -> dict[str, Any]:
        "Of a cross entropy"
        return self.words(label_smoothing=lambda: self.pick((0.1, 1.0)), logit_scale=lambda: self.pick((0.5, 2.0)), softcap=lambda: self.pick((2.0, 30.0)), z_loss=lambda: 0.1)

    def layer(self, n: tuple[int, ...], H: int, V: int) -> dict[str, Tensor]:
        "Features, a weight and perhaps a bias, whose scores are moderate"
        by = self.loudness()
        bias = dict(linear_bias=self.numbers(V, by=by)) if self.chance() else {}
        return dict(input=self.numbers(*n, H, by=by / max(H, 1) ** 0.5), linear_weight=self.numbers(V, H)) | bias


def alive(x: Tensor) -> Tensor:
    "0 in place of NaN, which stands where it is ignored"
    return torch.where(x.isnan(), 0.0, x)


def scores(x: Tensor, w: Tensor, b: Tensor | None, logit_scale=1.0, softcap=None, temperature=1.0) -> Tensor:
    "Of a linear layer"
    return capped(F.linear(x, w, b), logit_scale, softcap, temperature)


def capped(z: Tensor, logit_scale=1.0, softcap=None, temperature: float | Tensor = 1.0) -> Tensor:
    "Scores of logits"
    z = z * logit_scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    return z / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)


def defined(z: Tensor, y: Tensor, weight=None, token_weight=None, *, label_smoothing=0.0, z_loss=0.0, ignore_index=-100, reduction="mean", logit_scale=1.0, softcap=None) -> Tensor:
    "Cross entropy of logits [...,V]: of labels [...], of K labels a row, of probabilities"
    z, V = capped(z, logit_scale, softcap), z.shape[-1]
    shape, z = z.shape[:-1], z.flatten(0, -2) if z.dim() > 1 else z[None]
    t = torch.ones(len(z), dtype=z.dtype) if token_weight is None else token_weight.reshape(-1)
    w = torch.ones(V, dtype=z.dtype) if weight is None else weight
    if y.is_floating_point():
        soft = y.reshape(-1, V) * (1 - label_smoothing) + label_smoothing / V
        losses, total = -t * (soft * w * z.log_softmax(1)).sum(1), t.sum()
    else:
        y = y.long().flatten(0, -2) if y.dim() > len(shape) > 0 else y.long().reshape(-1, 1)
        kept = y != ignore_index
        label = torch.where(kept, y, 0)
        log_p = z.log_softmax(1)
        one = -(1 - label_smoothing) * w[label] * log_p.gather(1, label)
        if label_smoothing:
            one = one - label_smoothing / V * (w * log_p).sum(1, keepdim=True)
        if z_loss:
            one = one + z_loss * z.logsumexp(1, keepdim=True) ** 2
        losses, total = torch.where(kept, one * t[:, None], 0.0).sum(1), (kept * w[label] * t[:, None]).sum()
        z_loss = 0.0
    if z_loss:
        losses = losses + z_loss * t * z.logsumexp(1) ** 2
    if reduction == "none":
        return losses.view(shape)
    return losses.sum() / (torch.where(total == 0, 1.0, total) if reduction == "mean" else 1.0)


TOLD = "lse", "entropy", "target_rank", "logit_max", "logit_norm", "accuracy", "z_loss", "n_valid"


def told(loss: Tensor, stats: CrossEntropyStats) -> list[Tensor]:
    "A loss and its statistics"
    return [loss, *(getattr(stats, name) for name in TOLD)]


def counted(found: list[Tensor], z: Tensor, y: Tensor, token_weight: Tensor | None, words: dict[str, Any], dtype: torch.dtype) -> CrossEntropyStats:
    "Statistics of logits [...,V] by their definition, for labels [...]; of ranks that roundings may exchange, those found in `told`"
    z, kept = capped(z, words.get("logit_scale", 1.0), words.get("softcap")), y != words.get("ignore_index", -100)
    log_p, lse, at, known = z.log_softmax(-1), z.logsumexp(-1), z.detach(), lambda t: torch.where(kept, t, 0.0)
    own = at.gather(-1, torch.where(kept, y, 0).long()[..., None])
    near = max(1e-4, 4 * torch.finfo(torch.bfloat16 if dtype == torch.float32 else dtype).eps) * (1 + at.abs().max() if at.numel() else at.new_zeros(()))
    least, most = (at > own + near).sum(-1), (at > own - near).sum(-1) - 1
    rank = torch.where(kept, torch.minimum(torch.maximum(found[1 + TOLD.index("target_rank")].view(y.shape), least), most), -1)
    share = words.get("z_loss", 0.0) * lse.detach() ** 2 * (1.0 if token_weight is None else token_weight)
    known_entropy = known(-(log_p.exp() * log_p).sum(-1))
    given = (t.detach() for t in (known(lse), known_entropy)) if words.get("method") == "chunks" else (known(lse), known_entropy)  # chunks give them no gradient
    accuracy = (rank == 0).sum().double() / kept.sum().clamp(min=1)
    return CrossEntropyStats(*given, accuracy, rank, known(at.amax(-1)), known(at.norm(dim=-1)), known(share), kept.sum())


def promised(d: Draw, valid: Tensor) -> dict[str, int]:
    "Perhaps a promise of so many tokens that count, or of a few more"
    return dict(max_valid=int(valid.sum()) + d.pick((0, 0, 1, 7))) if d.chance(0.15) else {}


def cross_entropy(d: Draw) -> Call:
    V, N, more = d.size(least=1), d.size(65), d.pick(((), (), (d.size(9),), (2, 3)))
    shape, rows = ((V,), ()) if d.chance(0.05) else ((N, V, *more), (N, *more))
    ignore = d.pick((-100, -100, 0, -1))
    z = d.numbers(*shape, by=d.loudness())
    soft = d.chance(0.15)
    y = torch.rand(shape, generator=d.g).to(d.dtype) if soft else d.labels(V, *rows, ignored=ignore)
    words = d.options() | dict(reduction=d.pick(("mean", "sum", "none")))
    if not soft:
        words |= dict(ignore_index=ignore)
    inplace = not soft and d.chance(0.3)
    tensors = dict(input=z, target=y) | d.words(weight=lambda: d.weights(V), token_weight=lambda: d.weights(*rows))
    if not soft and len(shape) > 1 and V > 2 and not {"label_smoothing", "softcap"} & {*words} and d.chance(0.2):
        hidden = torch.rand(shape, generator=d.g) < 0.2
        z.masked_fill_(hidden.scatter_(1, torch.where((y < 0), 0, y).long().unsqueeze(1), False) if N else hidden, -torch.inf)
        hidden_rows = (z == -torch.inf).all(1, keepdim=True)
        z.masked_fill_(hidden_rows, 0.0)
    last = lambda t: t if t.dim() < 2 else t.movedim(1, -1)
    haunted = not soft and len(shape) > 1 and d.haunted(last(z), y, ignore)
    bad = not soft and d.spoiled(y, V)
    stats = not soft and not (z == -torch.inf).any() and d.chance(0.15)
    def exact(found, input, target, **given):
        loss = defined(last(alive(input)), last(target) if soft else target, **given, **words)
        return told(loss, counted(found, last(alive(input)), target, given.get("token_weight"), words, d.dtype)) if stats else [loss]
    def run(**given):
        found = fl.cross_entropy(**given, **words, inplace=inplace, return_stats=stats)
        return told(*found) if stats else [found]
    return Call(run, exact, tensors, ["input"], argument_names(fl.cross_entropy), words | dict(inplace=inplace, return_stats=stats), bad, "input" * inplace, expands=not haunted)


def linear_cross_entropy(d: Draw) -> Call:
    filters = d.chance(0.15)  # several tiles of classes, and few of targets
    V, H, lead = d.size(least=min(127, d.most) if filters else 1), d.size(129), d.pick(((d.size(129),), (d.size(8 if filters else 129),), (2, d.size(33))))
    ignore, method, target = d.pick((-100, -100, 0, -1)), d.pick(("auto", "eager", "tiles", "chunks", "recompute", "product")), d.pick(("labels",) * 5 + ("several", "soft"))
    tensors, words = d.layer(lead, H, V), d.options() | d.budget() | dict(method=method, reduction=d.pick(("mean", "sum", "none")))
    y = {"labels": lambda: d.labels(V, *lead, ignored=ignore), "several": lambda: d.labels(V, *lead, d.pick((1, 2, 5)), ignored=ignore), "soft": lambda: torch.rand(*lead, V, generator=d.g).to(d.dtype)}[target]()
    if method == "tiles":
        tensors.pop("linear_bias", None)
    if target == "several":
        words.pop("z_loss", None)
    tensors |= dict(target=y) | d.words(weight=lambda: d.weights(V), token_weight=lambda: d.weights(*lead))
    if target == "several":
        tensors |= dict(target_weight=d.weights(y.shape[-1])) if d.chance(0.5) else {}
    if target == "labels" and d.chance(0.1):
        words["shift"] = d.pick((1, 2))
    elif target == "labels" and filters:
        words |= dict(filter_eps=d.pick((1e-30, 2.0**-12, 0.01, 0.1)), method=d.pick(("auto", "recompute")))
        words.pop("label_smoothing", None)
    eight = d.dtype == torch.bfloat16 and "filter_eps" not in words and d.chance(0.3 if H % 16 else 0.7)
    if eight:
        words |= dict(matmul_dtype=torch.float8_e4m3fn, method="auto") | d.words(forward_dtype=lambda: torch.float8_e4m3fn)
    if target != "soft":
        words["ignore_index"] = ignore
    haunted = "shift" not in words and d.haunted(tensors["input"], y, ignore)
    bad = target == "labels" and "shift" not in words and d.spoiled(y, V)
    words |= d.words(accumulate=lambda: d.pick(("float32", "native")))
    if target == "labels" and not bad:
        words |= promised(d, y[..., words.get("shift", 0):] != ignore)
    words["return_stats"] = stats = target == "labels" and "filter_eps" not in words and not eight and d.chance(0.15)
    def exact(found, input, linear_weight, target, linear_bias=None, token_weight=None, target_weight=None, **given):
        own = {k: v for k, v in words.items() if k not in ("method", "matmul_dtype", "forward_dtype", "shift", "memory_budget", "filter_eps", "accumulate", "max_valid", "return_stats")}
        k = words.get("shift", 0)
        if k:
            input, target = input[..., :max(input.shape[-2] - k, 0), :], target[..., k:]
            token_weight = None if token_weight is None else token_weight[..., k:]
        z = F.linear(alive(input), linear_weight, linear_bias)
        if "forward_dtype" in words:
            x, w = alive(input), linear_weight
            z = z + (F.linear(in_eight(x, largest(x, -1)), in_eight(w, largest(w, 0, 1)), linear_bias) - z).detach()
        if target_weight is not None:
            return [of_several(z, target, target_weight, token_weight, given.get("weight"), own)]
        loss = defined(z, target, token_weight=token_weight, **given, **own)
        return told(loss, counted(found, z, target, token_weight, words, d.dtype)) if stats else [loss]
    def slack(ups, **given):
        return filter_error(ups[0].reshape(-1), words, **given) if "filter_eps" in words and ups else {}
    def run(**given):
        found = fl.linear_cross_entropy(**given, **words)
        return told(*found) if stats else [found]
    return Call(run, exact, tensors, [n for n in tensors if n in ("input", "linear_weight", "linear_bias")], argument_names(fl.linear_cross_entropy), words, bad,
                tolerance=6e-2 if eight else 0.0, expands=not haunted, slack=slack)


def largest(t: Tensor, *dims: int) -> Tensor:
    "The largest number along these, by size"
    return t.abs().amax(dims, keepdim=True).clamp(min=2.0**-118) if t.numel() else t.new_ones(())


def in_eight(t: Tensor, most: Tensor) -> Tensor:
    "Numbers of e4m3, where `most` is its largest"
    unit = most.float() / 448
    return (t.float() * (1 / unit)).clamp(-448, 448).to(torch.float8_e4m3fn).to(t.dtype) * unit.to(t.dtype)


def of_several(z: Tensor, y: Tensor, target_weight: Tensor, token_weight: Tensor | None, weight: Tensor | None, own: dict[str, Any]) -> Tensor:
    "Each token K times, once with each of its targets, weighed by both"
    z, by = z.unsqueeze(-2).expand(*y.shape, z.shape[-1]), target_weight if token_weight is None else token_weight[..., None] * target_weight
    each = defined(z.flatten(0, -2), y.reshape(-1), weight, by.expand(y.shape).reshape(-1), **own)
    return each.view(y.shape).sum(-1) if own["reduction"] == "none" else each


def filter_error(g: Tensor, words: dict[str, Any], input, linear_weight, target, linear_bias=None, weight=None, token_weight=None) -> dict[str, float]:
    "How long the errors of page 8's two bounds may be: probabilities below eps go by the means of their tiles"
    x, y, eps, by = alive(input).flatten(0, -2), target.reshape(-1).long(), 1.01 * words["filter_eps"], words.get("logit_scale", 1.0)
    z = capped(F.linear(x, linear_weight, linear_bias), by, words.get("softcap"))
    kept = y != words["ignore_index"]
    label = torch.where(kept, y, 0)
    one, t = torch.ones(len(y), dtype=z.dtype), kept if token_weight is None else kept * token_weight.reshape(-1)
    w = one if weight is None else weight[label]
    c = g.expand(len(y)) * t * (w + 2 * words.get("z_loss", 0.0) * z.logsumexp(1))
    if words["reduction"] == "mean":
        total = (t * w).sum()
        c = c / torch.where(total == 0, 1.0, total)
    p = z.softmax(1).scatter(1, label[:, None], 0.0)
    small, size = torch.where(p < eps, p, 0.0).sum(1), linear_weight.norm(dim=1).amax()
    return dict(input=(2 * by * size * c * small).norm().item(), linear_weight=eps * by * (c.abs() * x.norm(dim=1)).sum().item() * len(linear_weight) ** 0.5)


def exact_log_probs(z: Tensor, target: Tensor, words: dict, temperature: float | Tensor) -> list[Tensor | None]:
    "Log-probabilities, entropy and mean of logits"
    z = capped(z, words.get("logit_scale", 1.0), words.get("softcap"), temperature)
    y = target.long().unsqueeze(-1) if target.dim() < z.dim() else target.long()
    kept = y != words["ignore_index"]
    log_p = z.log_softmax(-1)
    said = torch.where(kept, log_p.gather(-1, torch.where(kept, y, 0)), 0.0)
    alive = kept.any(-1)
    entropy = torch.where(alive, -(log_p.exp() * log_p).sum(-1), 0.0) if words.get("entropy") else None
    mean = torch.where(alive, z.mean(-1), 0.0).detach() if words.get("mean_logits") else None
    return [said.view(target.shape), entropy, mean]


def of_log_probs(d: Draw, function: Callable, tensors: dict[str, Tensor], lead: tuple[int, ...], V: int, leaves: list[str], logits: Callable[..., Tensor]) -> Call:
    "Log-probabilities of labels, or of several a row"
    words = d.words(logit_scale=lambda: 0.5, softcap=lambda: 5.0, entropy=lambda: True, mean_logits=lambda: True)
    if function is fl.linear_log_probs:
        words |= d.words(batch_invariant=lambda: True) | d.budget()
    words["ignore_index"] = ignore = d.pick((-100, -100, 0, -1))
    y = d.labels(V, *lead, *d.pick(((), (), (3,))), ignored=ignore)
    haunted = d.haunted(tensors[leaves[0]], y, ignore)
    bad = d.spoiled(y, V)
    if function is fl.linear_log_probs and not bad:
        words |= promised(d, (y != ignore).view(*lead, -1).any(-1) if y.numel() else y != ignore)
    tensors = tensors | dict(target=y) | d.words(temperature=lambda: d.weights(*lead) + 0.5)
    def exact(_, target, temperature=1.0, **given):
        return exact_log_probs(logits(**given), target, words, temperature)
    return Call(lambda **given: function(**given, **words)[:3], exact, tensors, leaves, argument_names(function), words, bad, expands=not haunted)


def linear_log_probs(d: Draw) -> Call:
    V, H, lead = d.size(least=1), d.size(129), d.pick(((d.size(129),), (2, d.size(33))))
    tensors = d.layer(lead, H, V)
    return of_log_probs(d, fl.linear_log_probs, tensors, lead, V, [*tensors], lambda input, linear_weight, linear_bias=None: F.linear(alive(input), linear_weight, linear_bias))


def log_probs(d: Draw) -> Call:
    V, lead = d.size(least=1), d.pick(((d.size(129),), (2, d.size(33)), ()))
    return of_log_probs(d, fl.log_probs, dict(logits=d.numbers(*lead, V, by=d.loudness())), lead, V, ["logits"], lambda logits: alive(logits))


def chosen(d: Draw, function: Callable, words: dict, tensors: dict[str, Tensor], lead: tuple[int, ...], leaves: list[str], exact: Callable) -> Call:
    "Of classes that a call chooses: their log-probabilities"
    words = words | d.words(logit_scale=lambda: 0.5, softcap=lambda: 5.0)
    tensors = tensors | d.words(temperature=lambda: d.weights(*lead) + 0.5)
    def of(found, input, linear_weight, linear_bias=None, temperature=1.0):
        z = scores(input, linear_weight, linear_bias, words.get("logit_scale", 1.0), words.get("softcap"), temperature)
        return exact(found, z)
    return Call(lambda **given: function(**given, **words), of, tensors, leaves, argument_names(function), words)


def linear_topk(d: Draw) -> Call:
    V, H, lead = d.size(least=1), d.size(129), d.pick(((d.size(65),), (2, d.size(33))))
    tensors, k = d.layer(lead, H, V), d.size(min(V, 64), 1)
    def exact(found, z):
        log_p = z.log_softmax(-1)
        best = log_p.topk(k, -1).values
        near = log_p.gather(-1, found[1])  # of equals either
        return [best.detach() - near.detach() + near, found[1], z.logsumexp(-1)]
    return chosen(d, fl.linear_topk, dict(k=k) | d.budget(), tensors, lead, [*tensors], exact)


def linear_sample(d: Draw) -> Call:
    V, H, lead = d.size(least=1), d.size(129), d.pick(((d.size(65),), (2, d.size(33))))
    tensors = d.layer(lead, H, V)
    exact = lambda found, z: [found[0].clamp(0, V - 1), z.log_softmax(-1).gather(-1, found[0][..., None])[..., 0].detach()]
    return chosen(d, fl.linear_sample, d.words(top_k=lambda: d.pick((1, 3)), top_p=lambda: 0.7, min_p=lambda: 0.1), tensors, lead, [], exact)


def linear_divergence(d: Draw) -> Call:
    V, H, lead = d.size(129, 1), d.size(65), d.pick(((d.size(65),), (2, d.size(17))))
    more = d.pick((0, 0, 0, 1, 5))  # rows of a head beyond the classes
    tensors, teacher = d.layer(lead, H, V + more), d.layer(lead, d.size(65), V + d.pick((0, 3)) * (more > 0))
    rename = dict(input="teacher_input", linear_weight="teacher_weight", linear_bias="teacher_bias")
    words = d.words(beta=lambda: d.pick((0.0, 0.3, 1.0)), softcap=lambda: 5.0, logit_scale=lambda: 0.5) | (dict(n_classes=V) if more else {})
    words |= dict(kind=d.pick(("forward_kl", "reverse_kl", "jsd")), reduction=d.pick(("mean", "sum", "none")))
    if not sum([*lead, 1]) - 1 or 0 in lead:
        words["reduction"] = "sum"
    leaves = [*tensors]
    lists = 0 not in lead and d.chance(0.3)
    if lists:
        words |= d.words(top_rest=lambda: "drop")
        tensors |= teacher_lists(d, lead, V, d.size(min(V, 17), 1))
    else:
        words |= d.words(teacher_softcap=lambda: 3.0, teacher_logit_scale=lambda: 2.0)
        tensors |= {rename[k]: t for k, t in teacher.items()}
    tensors |= d.words(token_weight=lambda: d.weights(*lead) + 0.1, temperature=lambda: d.weights(*lead) + 0.5)
    def listed(top_indices=None, top_log_probs=None, **given):
        return given | (dict(teacher_top=(top_indices, top_log_probs)) if lists else {})
    def exact(_, input, linear_weight, **given):
        given = listed(**given)
        return [exact_divergence(input, linear_weight, given.pop("teacher_input", None), given.pop("teacher_weight", None), **given, **words)]
    budget = d.budget()
    return Call(lambda **given: [fl.linear_divergence(**listed(**given), **words, **budget)], exact, tensors, leaves, argument_names(fl.linear_divergence), words | budget,
                expands=not lists)  # a list has a class once


def teacher_lists(d: Draw, lead: tuple[int, ...], V: int, K: int) -> dict[str, Tensor]:
    "A teacher's likeliest classes, the first list whole, in some of the others places without one"
    log_p, indices = d.numbers(*lead, V, by=2.0, dtype=torch.float64).log_softmax(-1).topk(K)
    gone = torch.rand(indices.shape, generator=d.g) < d.pick((0.0, 0.3, 1.0))
    gone[..., 0] = False
    log_p -= 0.1 * (gone.any(-1, keepdim=True) | (K < V))  # something is left for the others
    log_p[gone] = d.pick((torch.nan, torch.inf, 3.0))
    return dict(top_indices=indices.masked_fill(gone, -1).to(d.pick((torch.int64, torch.int32))), top_log_probs=log_p.to(d.dtype))


def some_rows(d: Draw, N: int, M: int, none: bool) -> Tensor:
    "Which of M rows belong to each of N: one, or up to three of which some are none or are named twice, all of them perhaps if `none`"
    y = torch.randint(M, (N, *d.pick(((), (3,)))), generator=d.g)
    if y.dim() == 2 and d.chance(0.5):
        y[:, 1] = y[:, 0]
    gone = torch.rand(y.shape, generator=d.g) < d.pick((0.0, 0.3, 1.0))
    if not none:
        gone.view(N, -1)[:, -1] = False
    return y.masked_fill(gone, -1).to(d.pick((torch.int64, torch.int64, torch.int32)))


def of_contrast(d: Draw, function: Callable, exact: Callable, numbers: dict[str, tuple[float, ...]], none: bool) -> Call:
    "Of pairs, or of what belongs together; scale and bias are numbers or tensors"
    N, H, words, values = d.size(129, 1), d.size(65), dict(reduction=d.pick(("mean", "sum", "none"))), {k: d.pick(v) for k, v in numbers.items()}
    several, learned = d.chance(0.5), d.chance(0.75)
    M = d.size(129, 1) if several else N
    tensors = dict(x=d.numbers(N, H, by=max(H, 1) ** -0.5), y=d.numbers(M, H))
    if learned:
        tensors |= {k: torch.tensor(v, dtype=d.pick((d.dtype, d.dtype, torch.float64))) for k, v in values.items()}
    leaves, bad, given_numbers = [*tensors], False, {} if learned else values
    if several:
        tensors["positives"] = some_rows(d, N, M, none)
        bad = d.chance(0.05)
    if bad:
        tensors["positives"].view(-1)[d.r.randrange(tensors["positives"].numel())] = d.pick((*BAD_LABELS, M))
    budget = d.words(memory_budget=lambda: 2**19)
    return Call(lambda **given: [function(**given, **words, **budget, **given_numbers)], lambda _, **given: [exact(several, given | given_numbers, words)], tensors, leaves,
                argument_names(function), words | budget | given_numbers, bad, tolerance=1e-4)  # of a scale: a sum of N·M terms


def contrastive_loss(d: Draw) -> Call:
    exact = lambda several, given, words: (exact_positives if several else exact_pairs)(**whole(given), **words)
    return of_contrast(d, fl.contrastive_loss, exact, dict(logit_scale=(0.5, 5.0, 5.0, -2.0, 0.0)), False)


def sigmoid_contrastive_loss(d: Draw) -> Call:
    exact = lambda several, given, words: exact_sigmoid(**whole(given), **words)
    return of_contrast(d, fl.sigmoid_contrastive_loss, exact, dict(logit_scale=(2.0, 2.0, -2.0, 0.0), logit_bias=(-1.0, -1.0, 0.0, 10.0)), True)


def whole(given: dict[str, Any]) -> dict[str, Any]:
    "Arguments whose integers are int64"
    return {k: v.long() if isinstance(v, Tensor) and not v.is_floating_point() else v for k, v in given.items()}


class Kind(NamedTuple):
    "A margin and its formulas, whose scale is that of `margin`"
    margin: Margin
    target: Callable[..., Tensor]  # the target's score, of cosine, angle, length of the row and class
    other: Callable[[Tensor], Tensor]  # another class's score, of its cosine
    centers: int

    def made(self, scale: Tensor | None, like: Tensor) -> Margin:
        "The margin for one call"
        margin = copy.deepcopy(self.margin)
        if scale is not None:
            object.__setattr__(margin, "scale", scale)
        for name, t in vars(margin).items():
            if isinstance(t, Tensor) and name != "scale":
                setattr(margin, name, t.to(like.device))
        margin = margin if self.centers == 1 else SubCenter(self.centers, margin)
        return margin.to(like.device) if isinstance(margin, torch.nn.Module) else margin


def some_margin(d: Draw, V: int) -> tuple[str, Kind]:
    "Any margin, perhaps of several centres a class"
    name, centers = d.pick((*FORMULAS, "Circle, paced", "of each class")), d.pick((1, 1, 1, 2, 3))
    of_class = torch.linspace(0.0, 0.5, V)
    if name == "of each class":
        return name, Kind(PerClass(of_class), lambda c, a, n, y: 24 * (c - of_class[y]), lambda c: 24 * c, centers)
    if name == "Circle, paced":
        return name, Kind(Circle(), lambda c, a, n, y: 256 * (1.25 - c).clamp(min=0).detach() * (c - 0.75), lambda c: 256 * (c + 0.25).clamp(min=0).detach() * (c - 0.25), centers)
    margin, formula = FORMULAS[name]
    other = (lambda c: 256 * (c + 0.25).clamp(min=0) * (c - 0.25)) if name == "Circle" else lambda c: margin.scale * c
    return name, Kind(margin, lambda c, a, n, y: formula(c, a, n), other, centers)


def cosines(x: Tensor, w: Tensor, centers: int, eps: float) -> Tensor:
    "Of rows and classes, each with the nearest of its centres [N,V]"
    unit = lambda t: t / torch.where(t.norm(dim=-1) > 0, t.norm(dim=-1).clamp(min=eps), 1.0).unsqueeze(-1)
    return (unit(x) @ unit(w).T).unflatten(-1, (-1, centers)).amax(-1)


def against_others(others: Tensor, score: Tensor, y: Tensor) -> Tensor:
    "The loss of each row, of its class's score [N] against those of the others [N,V]; its own among them, -1 being none, does not count"
    hot = torch.zeros_like(others, dtype=torch.bool).scatter_(1, y.clamp(min=0)[:, None], True)
    return torch.where(y >= 0, F.softplus(others.masked_fill(hot, -1e30).logsumexp(1) - score, threshold=100), 0.0)


def with_margin(cos: Tensor, x: Tensor, y: Tensor, kind: Kind, scale: Tensor | None, change: Callable[[Tensor], Tensor] = lambda z: z) -> Tensor:
    "The loss of each row; the other classes' scores are changed as said"
    by, label = 1.0 if scale is None else scale / kind.margin.scale, y.clamp(min=0)
    c = cos.gather(1, label[:, None])[:, 0]
    return against_others(change(by * kind.other(cos)), by * kind.target(c, torch.acos(c.clamp(-1, 1)), x.norm(dim=-1), label), y)


def weighed(losses: Tensor, y: Tensor, of_class: Tensor | None, of_row: Tensor | None, reduction: str) -> Tensor:
    "The losses of rows whose class is not -1, by the weights of classes and rows"
    t = (y >= 0).to(losses.dtype)
    for w in (None if of_class is None else of_class[y.clamp(min=0)], None if of_row is None else of_row.reshape(-1)):
        t = t if w is None else torch.where(y >= 0, t * w, 0.0)
    return losses * t if reduction == "none" else (losses * t).sum() / (torch.where(t.sum() == 0, 1.0, t.sum()) if reduction == "mean" else 1.0)


def of_rows(d: Draw, lead: tuple[int, ...], H: int, V: int, centers: int, ignored: int) -> tuple[dict[str, Tensor], Tensor]:
    "Rows, vectors of classes and labels: some rows are near their class, some short or 0"
    y, w, x = d.labels(V, *lead, ignored=ignored), d.numbers(V * centers, H), d.numbers(*lead, H, by=d.pick((0.3, 1.0)))
    if d.chance(0.4):
        x = torch.where((torch.rand(lead, generator=d.g) < 0.3)[..., None], 2 * w[torch.where(y == ignored, 0, y).long() * centers] + x, x)
    if centers == 1 and d.chance(0.3):
        x, w = (t * (torch.rand(t.shape[:-1], generator=d.g) > 0.2)[..., None] for t in (x, w))
    return dict(x=x, w=w), y


ANGLES = ("CosFace", "no margin", "Circle", "Circle, paced", "of each class")  # margins with a slope where a row has its class's direction


def margin_cross_entropy(d: Draw) -> Call:
    V, lead, ignore = d.size(129, 1), d.pick(((d.size(65),), (2, d.size(17)), ())), d.pick((-100, -1))
    name, kind = some_margin(d, V)
    H = d.size(65, 2 if name in ANGLES else 3)  # of one feature all cosines are 1
    rows, y = of_rows(d, lead, H, V, kind.centers, ignore)
    words = dict(reduction=d.pick(("mean", "sum", "none")), ignore_index=ignore, method=d.pick(("auto", "auto", "tiles", "recompute")))
    words |= d.words(eps=lambda: 0.5, token_tile=lambda: d.pick((1, 5, 64)), class_tile=lambda: d.pick((1, 7, 64)))
    haunted = d.haunted(rows["x"], y, ignore)
    bad, learned = d.spoiled(y, V), "Circle" not in name and d.chance()
    tensors = dict(input=rows["x"], linear_weight=rows["w"]) | (dict(scale=torch.tensor(d.pick((5.0, 30.0)), dtype=d.pick((d.dtype, torch.float32)))) if learned else {})
    leaves = [*tensors]
    tensors |= dict(target=y) | d.words(weight=lambda: d.weights(V), token_weight=lambda: d.weights(*lead))
    if haunted and "token_weight" in tensors:
        tensors["token_weight"].masked_fill_(y == ignore, torch.nan)
    def run(scale=None, **given):
        return [fl.margin_cross_entropy(**given, margin=kind.made(scale, given["input"]), **words)]
    def exact(_, input, linear_weight, target, scale=None, weight=None, token_weight=None):
        x, y = alive(input).reshape(target.numel(), input.shape[-1]), target.reshape(-1).long()
        y = torch.where(y == ignore, -1, y)
        losses = with_margin(cosines(x, linear_weight, kind.centers, words.get("eps", EPS)), x, y, kind, scale)
        found = weighed(losses, y, weight, token_weight, words["reduction"])
        return [found.view(target.shape) if words["reduction"] == "none" else found]
    return Call(run, exact, tensors, leaves, argument_names(fl.margin_cross_entropy), dict(margin=name, centers=kind.centers) | words, bad,
                expands=not haunted and kind.centers == 1 and name in ANGLES)  # an angle of 0 has no gradient, nor have equal centres one


def between(cos: Tensor) -> float:
    "A cosine that no entry is near"
    at = torch.linspace(0.05, 0.6, 112, dtype=torch.float64)
    return at[(at[:, None] - cos.reshape(-1)).abs().amin(1).argmax()].item() if cos.numel() else 0.3


def of_head(d: Draw, V: int, H: int, name: str, tensors: dict[str, Tensor], leaves: list[str], more: dict[str, Any], losses: Callable, expands: bool) -> Call:
    "A PartialFC whose parameters are given; `more` makes its other arguments anew, `losses` are of its rows, of the classes that are scored and its head"
    words = dict(reduction=d.pick(("mean", "sum", "none")), method=d.pick(("auto", "auto", "tiles", "tiles", "recompute")))
    rows = d.words(token_weight=lambda: d.weights(*tensors["target"].shape))
    bad, heads = d.spoiled(tensors["target"], V), []
    tensors = tensors | rows | d.words(class_weight=lambda: d.weights(V))
    def run(features, weight, target, class_weight=None, token_weight=None, bias=None, scale=None, head=None):
        made = {k: v(weight, scale) for k, v in more.items()}
        head = (head or fl.PartialFC)(V, H, class_weight=class_weight, device=weight.device, dtype=weight.dtype, sparse=False, **words, **made)
        for parameter, t in (("weight", weight), ("bias", bias)):
            if t is not None:
                head.__dict__["_parameters"].pop(parameter), setattr(head, parameter, t)
        heads[:] = [copy.deepcopy(head.sampler)]
        return [head(features, target, token_weight=token_weight)]
    def exact(_, features, weight, target, class_weight=None, token_weight=None, bias=None, scale=None):
        x, y = alive(features).reshape(target.numel(), H), target.reshape(-1).long()
        found = weighed(losses(x, weight, y, bias, scale, heads[0]), y, class_weight, token_weight, words["reduction"])
        return [found.view(target.shape) if words["reduction"] == "none" else found]
    return Call(run, exact, tensors, leaves, [*argument_names(fl.PartialFC), *argument_names(fl.PartialFC.forward)], dict(head=name, num_classes=V) | words, bad, expands=expands)


def drawn_by(sampler, V: int, y: Tensor) -> Tensor:
    "Which classes a step scores, by asking its sampler"
    mask = torch.zeros(V, dtype=torch.bool)
    drawn = torch.arange(V) if sampler is None else sampler.cpu()(V)
    mask[torch.cat([drawn, y])[torch.cat([drawn, y]) >= 0]] = True
    return mask


def others_of(V: int, y: Tensor) -> Tensor:
    "1 for each class that no row has, else 0"
    return (~torch.isin(torch.arange(V), y[y >= 0])).double()


def partial_fc(d: Draw) -> Call:
    V, lead = d.size(129, 1), d.pick(((d.size(65),), (2, d.size(17))))
    name, kind = some_margin(d, V)
    H = d.size(65, 2 if name in ANGLES else 3)  # of one feature all cosines are 1
    rows, y = of_rows(d, lead, H, V, kind.centers, -1)
    rate, seed, log_q, eps = d.pick((1.0, 0.3, 0.3, "positives")), d.pick((0, 7, 2**62)), d.chance(), d.pick((EPS, EPS, 0.5))
    sampled = rate != 1.0
    corrects = sampled and rate != "positives" and log_q
    tensors = dict(features=rows["x"], weight=rows["w"])
    learned, conflicts = "Circle" not in name and d.chance(), d.dtype.itemsize > 2 and d.chance()
    if learned:
        tensors["scale"] = torch.tensor(d.pick((5.0, 30.0)), dtype=d.pick((d.dtype, torch.float32)))
    haunted = d.haunted(tensors["features"], y, -1)
    conflict = between(cosines(alive(rows["x"]).double().flatten(0, -2), rows["w"].double(), kind.centers, eps)) if conflicts else None
    mode = d.pick(("drop", "zero"))
    more = dict(margin=lambda weight, scale: kind.made(scale, weight), eps=lambda *_: eps, conflict=lambda *_: conflict, conflict_mode=lambda *_: mode)
    if sampled:
        more["sampler"] = lambda *_: fl.NegativeSampler(rate, seed, log_q=corrects)
    def losses(x, w, y, _, scale, sampler):
        cos = cosines(x, w, kind.centers, eps)
        def change(z):
            z = z if conflict is None else torch.where(cos > conflict, 0.0 if mode == "zero" else -1e30, z)
            z = z - math.log(rate) * others_of(V, y) if corrects else z
            return z.masked_fill(~drawn_by(sampler, V, y), -1e30)
        return with_margin(cos, x, y, kind, scale, change)
    said = f"{name}, {kind.centers} centres, rate {rate}, seed {seed}, log q {corrects}, conflict {conflict} {mode}, eps {eps}"
    return of_head(d, V, H, said, tensors | dict(target=y), [*tensors], more, losses, not haunted and not conflicts and kind.centers == 1 and name in ANGLES)


def partial_fc_of_products(d: Draw) -> Call:
    V, H, lead = d.size(129, 1), d.size(65), d.pick(((d.size(65),), (2, d.size(17))))
    layer, y = d.layer(lead, H, V), d.labels(V, *lead, ignored=-1)
    tensors = dict(features=layer["input"], weight=layer["linear_weight"]) | {"bias": t[:, None] for k, t in layer.items() if k == "linear_bias"}
    kind, seed, log_q, each = d.pick(("all", "uniform", "popular")), d.pick((0, 7, 2**62)), d.chance(0.5), d.chance(0.5)
    popularity, k = torch.rand(V, generator=d.g) + 0.01, d.size(V, 1)
    haunted = d.haunted(tensors["features"], y, -1)
    more = dict(normalize=lambda *_: False, bias=lambda *_: "bias" in tensors)
    if kind != "all":
        new = (lambda: fl.PopularitySampler(popularity, k, each_row=each, log_q=log_q, seed=seed)) if kind == "popular" else lambda: fl.NegativeSampler(0.3, seed, log_q=log_q)
        more["sampler"] = lambda weight, _: new().to(weight.device)
    def losses(x, w, y, bias, _, sampler):
        z, own = F.linear(x, w, None if bias is None else bias[:, 0]), y.clamp(min=0)
        if kind != "popular":
            shift = math.log(0.3) if kind == "uniform" and log_q else 0.0
            others = (z - shift * others_of(V, y)).masked_fill(~drawn_by(sampler, V, y), -1e30)
            return against_others(others, z.gather(1, own[:, None])[:, 0], y)
        drawn = sampler.cpu()(len(y) if each else 1).expand(len(y), -1)
        z = z - sampler.log_draws(torch.arange(V)) if log_q else z
        times = torch.zeros(len(y), V + 1, dtype=z.dtype).scatter_add_(1, torch.where(drawn < 0, V, drawn), torch.ones(drawn.shape, dtype=z.dtype))[:, :V]
        return against_others(torch.where(times > 0, z + times.clamp(min=1).log(), -1e30), z.gather(1, own[:, None])[:, 0], y)
    said = f"{kind}, seed {seed}, log q {log_q}, {k} drawn {'for each row' if each else ''}"
    return of_head(d, V, H, said, tensors | dict(target=y), [*tensors], more, losses, not haunted)


def sequences(d: Draw, T: int, N: int, L: int, C: int, least: int, names: tuple[str, str], blank: int) -> tuple[dict[str, Tensor], bool]:
    "Labels that are no blanks, and lengths of a batch; whether one of them cannot be"
    y = torch.randint(max(C - 1, 1), (N, L), generator=d.g)
    y += y >= blank
    frames, lengths = torch.randint(least, T + 1, (N,), generator=d.g), torch.randint(L + 1, (N,), generator=d.g)
    n = d.r.randrange(N)
    bad = d.pick(("label", "frames", "length") if lengths[n] and frames[n] > least else ("frames", "length")) if d.chance(0.06) else ""
    if bad == "label":
        y[n, 0] = d.pick((*BAD_LABELS, C))
    elif bad:
        (frames if bad == "frames" else lengths)[n] = d.pick((-3, 10**6, T + L + 1))
    kinds = [d.pick((torch.int64, torch.int32)) for _ in range(3)]
    return dict(targets=y.to(kinds[0])) | {name: t.to(kind) for name, t, kind in zip(names, (frames, lengths), kinds[1:])}, bool(bad)


def reduced(losses: Tensor, reduction: str) -> Tensor:
    "Of sequences"
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def of_ctc(d: Draw, function: Callable, T: int, N: int, C: int, tensors: dict[str, Tensor], log_probs: Callable[..., Tensor]) -> Call:
    "CTC, whose frames and labels are ragged"
    leaves, blank = [*tensors], d.r.randrange(C)
    more, bad = sequences(d, T, N, d.size(9) if C > 1 else 0, C, 0, ("input_lengths", "target_lengths"), blank)
    words = dict(reduction=d.pick(("mean", "sum", "none")), blank=blank, zero_infinity=d.chance(0.7))
    budget = d.budget() if function is fl.linear_ctc_loss else {}
    def exact(_, targets, input_lengths, target_lengths, **given):
        losses = lambda none: F.ctc_loss(log_probs(**given), targets.long(), input_lengths.long(), target_lengths.long(), **words | dict(zero_infinity=none))
        return [losses(True) + torch.where(losses(words["zero_infinity"]).isposinf(), torch.inf, 0.0).detach()]  # without a path no gradient, where PyTorch has NaN
    return Call(lambda **given: [function(**given, **words, **budget)], exact, tensors | more, leaves, argument_names(function), words | budget, bad,
                at_home=d.pick(((), ("input_lengths", "target_lengths"))))


def ctc_loss_with_logits(d: Draw) -> Call:
    T, N, C = d.size(33, 1), d.size(5, 1), d.size(65, 1)
    return of_ctc(d, fl.ctc_loss_with_logits, T, N, C, dict(logits=d.numbers(T, N, C, by=d.loudness())), lambda logits: logits.log_softmax(-1))


def linear_ctc_loss(d: Draw) -> Call:
    T, N, C = d.size(33, 1), d.size(5, 1), d.size(65, 1)
    return of_ctc(d, fl.linear_ctc_loss, T, N, C, d.layer((T, N), d.size(33), C), lambda input, linear_weight, linear_bias=None: F.linear(input, linear_weight, linear_bias).log_softmax(-1))


def ctc_loss(d: Draw) -> Call:
    T, N, C = d.size(33, 1), d.size(5, 1), d.size(65, 1)
    return of_ctc(d, fl.ctc_loss, T, N, C, dict(log_probs=normalised(d, T, N, C)), lambda log_probs: log_probs)  # whose gradient is PyTorch's


def normalised(d: Draw, *shape: int) -> Tensor:
    "Log-probabilities"
    return d.numbers(*shape, by=d.loudness(), dtype=torch.float64).log_softmax(-1).to(d.dtype)


def by_states(log_p: Tensor, y: Tensor, blank: int, add: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    "The classes [S] of CTC's states of labels [L], what the paths to each come to [T,S], and all of them: by their sum or their maximum"
    of = torch.full((2 * len(y) + 1,), blank)
    of[1::2] = y
    skips = torch.zeros(len(of), dtype=torch.bool)
    skips[3::2] = y[1:] != y[:-1]
    later = lambda a, k: F.pad(a, (k, 0), value=-torch.inf)[:len(a)]
    rows = [log_p[:1, of].squeeze(0).masked_fill(torch.arange(len(of)) > 1, -torch.inf)] if len(log_p) else []
    for now in log_p[1:, of]:
        a = rows[-1]
        rows.append(add(torch.stack([a, later(a, 1), later(a, 2).masked_fill(~skips, -torch.inf)])) + now)
    whole = add(rows[-1][-2:]) if rows else log_p.new_tensor(-torch.inf if len(y) else 0.0)
    return of, torch.stack(rows) if rows else log_p.new_zeros(0, len(of)), whole


def of_paths(d: Draw, function: Callable, results: Callable, of_one: Callable) -> Call:
    "What is asked of CTC's paths: of one sequence `of_one` its log-probabilities and labels, and what was found of it"
    T, N, C = d.size(33, 1), d.size(5, 1), d.size(65, 1)
    blank = d.r.randrange(C)
    more, bad = sequences(d, T, N, d.size(9) if C > 1 else 0, C, 0, ("input_lengths", "target_lengths"), blank)
    def exact(found, log_probs, targets, input_lengths, target_lengths):
        each = [of_one(log_probs[:input_lengths[n], n], targets[n, :target_lengths[n]].long(), blank, [t[n] for t in found]) for n in range(N)]
        return [torch.stack(of) for of in zip(*each)]
    return Call(lambda **given: results(function(**given, blank=blank)), exact, dict(log_probs=normalised(d, T, N, C)) | more, [], argument_names(function), dict(blank=blank), bad,
                at_home=d.pick(((), ("input_lengths", "target_lengths"))))


def forced_align(d: Draw) -> Call:
    def of_one(log_p, y, blank, found):
        *_, best = by_states(log_p, y, blank, lambda a: a.amax(0))
        path, frames = found[1][:len(log_p)].long(), torch.zeros_like(found[2], dtype=log_p.dtype)
        said = path.unique_consecutive()
        if best.isfinite() and torch.equal(said[said != blank], y):  # else its frames sum to 0, not to the best score
            frames[:len(log_p)] = log_p.gather(1, path[:, None])[:, 0]
        return best, found[1], frames, torch.where(best.isfinite(), best, 0.0)
    return of_paths(d, fl.forced_align, lambda a: [a.score, a.labels, a.frame_scores, a.frame_scores.sum(1)], of_one)


def ctc_posteriors(d: Draw) -> Call:
    def of_one(log_p, y, blank, found):
        add = lambda a: a.logsumexp(0)
        (of, before, whole), (_, after, _) = by_states(log_p, y, blank, add), by_states(log_p.flip(0), y.flip(0), blank, add)
        here, states = log_p[:, of], torch.zeros_like(found[0], dtype=log_p.dtype)
        if not whole.isfinite():
            return states, whole, torch.zeros_like(whole)
        gamma = (before + after.flip(0, 1) - here - whole).exp()
        states[:len(gamma), :len(of)] = gamma
        return states, whole, (whole - (gamma * here).sum()) / (1 + whole.abs())
    return of_paths(d, fl.ctc_posteriors, lambda p: [*p[:2], p.entropy / (1 + p.log_likelihood.abs())], of_one)  # a difference of such numbers


def by_arcs(z: Tensor, y: Tensor, blank: int, durations=None, sigma: float = 0.0, fastemit_lambda: float = 0.0, fused_log_softmax: bool = True) -> Tensor:
    "The loss of one sequence of logits [T,U+1,V] by alpha, node by node; a label's gradient counts 1 + λ times"
    T, U, D = len(z), len(y), len(durations or ())
    tokens, lengths = z[..., :z.shape[-1] - D], z[..., z.shape[-1] - D:].log_softmax(-1)
    tokens = tokens.log_softmax(-1) - sigma if fused_log_softmax else tokens
    labels = tokens + fastemit_lambda * (tokens - tokens.detach())
    alpha = {(0, 0): [z.new_zeros(())]}
    for t in range(T):
        for u in range(U + 1):
            here = torch.stack(alpha[t, u]).logsumexp(0) if (t, u) in alpha else None
            for to, row, is_label, i in arcs_from(t, u, T, U, durations) if here is not None else ():
                score = labels[t, u, y[u]] if is_label else tokens[t, u, blank]
                alpha.setdefault((to, row), []).append(here + score + (lengths[t, u, i] if D else 0.0))
    return -torch.stack(alpha[T, U]).logsumexp(0) if (T, U) in alpha else z.sum() * 0 + torch.inf


def kept_within(z: Tensor, tokens: int, clamp: float, loss: Callable[[Tensor], Tensor]) -> Tensor:
    "A loss of scores, each number of whose gradient by those of the tokens is kept within ±clamp"
    own = z.detach().requires_grad_()
    with torch.enable_grad():
        found = loss(own)
    d = torch.autograd.grad(found, own)[0] if found.isfinite() else torch.zeros_like(own)
    most = torch.full_like(own[0, 0], torch.inf)
    if clamp > 0:
        most[:tokens] = clamp
    return found.detach() + (d.clamp(-most, most) * (z - own.detach())).sum()


def of_transducer(z: list[Tensor], targets: Tensor, frames: Tensor, lengths: Tensor, words: dict) -> list[Tensor]:
    "Sequences of logits [T,U+1,V], cut at their lengths"
    tokens = z[0].shape[-1] - len(words.get("durations", ()))
    how = {k: v for k, v in words.items() if k not in ("reduction", "blank", "activation", "clamp")}
    one = lambda z, y: kept_within(z, tokens, words.get("clamp", -1.0), lambda z: by_arcs(z, y, words["blank"] % tokens, **how))
    return [reduced(torch.stack([one(z[n][:frames[n], :lengths[n] + 1], targets[n, :lengths[n]].long()) for n in range(len(z))]), words["reduction"])]


def transducer_loss(d: Draw) -> Call:
    N, T, U, V = d.size(3, 1), d.size(8, 1), d.size(7), d.size(65, 2)
    words = dict(reduction=d.pick(("mean", "sum", "none")), blank=d.pick((-1, 0))) | d.words(clamp=lambda: d.pick((0.0, 0.01, 0.3)), fused_log_softmax=lambda: False)
    more, bad = sequences(d, T, N, U, V, 1, ("logit_lengths", "target_lengths"), words["blank"] % V)
    z = d.numbers(N, T, U + 1, V, by=d.loudness())
    if "fused_log_softmax" in words:
        z = z.double().log_softmax(-1).to(z.dtype)
    exact = lambda _, logits, targets, logit_lengths, target_lengths: of_transducer([*logits], targets, logit_lengths, target_lengths, words)
    return Call(lambda **given: [fl.transducer_loss(**given, **words)], exact, dict(logits=z) | more, ["logits"], argument_names(fl.transducer_loss), words, bad,
                at_home=d.pick(((), ("logit_lengths", "target_lengths"))))


def linear_transducer_loss(d: Draw) -> Call:
    N, T, U, J, V = d.size(3, 1), d.size(8, 1), d.size(5), d.size(33, 1), d.size(33, 2)
    words = dict(reduction=d.pick(("mean", "sum", "none")), blank=d.pick((0, V - 1)), activation=d.pick(("tanh", "relu", None)))
    words |= d.words(clamp=lambda: d.pick((0.0, 0.01, 0.3)), fastemit_lambda=lambda: d.pick((0.01, 0.7)))
    if d.chance(0.4):
        words |= dict(durations=d.pick(((0, 1, 2), (2, 0, 1), (1, 3), (2,), (0, 1, 2, 3, 4)))) | d.words(sigma=lambda: 0.05)
    budget = d.budget()
    layer = {k: t for k, t in d.layer((N, T), J, V + len(words.get("durations", ()))).items() if k != "input"}
    tensors = dict(encoder=d.numbers(N, T, J, by=0.5 * J**-0.5), predictor=d.numbers(N, U + 1, J, by=0.5 * J**-0.5)) | layer
    leaves = [*tensors]
    more, bad = sequences(d, T, N, U, V, 1, ("encoder_lengths", "target_lengths"), words["blank"])
    def exact(_, encoder, predictor, linear_weight, targets, encoder_lengths, target_lengths, linear_bias=None):
        z = F.linear(ACTIVATE[words["activation"]](encoder[:, :, None] + predictor[:, None]), linear_weight, linear_bias)
        return of_transducer([*z], targets, encoder_lengths, target_lengths, words)
    return Call(lambda **given: [fl.linear_transducer_loss(**given, **words, **budget)], exact, tensors | more, leaves, argument_names(fl.linear_transducer_loss), words | budget, bad,
                at_home=d.pick(((), ("encoder_lengths", "target_lengths"))),
                tolerance=0.05 if words["activation"] == "tanh" and d.dtype.itemsize == 2 else 0.0)  # its slope is that of what is rounded


def graph(d: Draw) -> dict[str, Tensor]:
    "Of a semiring's paths"
    T, N, C, nz = d.size(17), d.size(5), d.size(17, 1), d.size(3, 1)
    tensors = dict(Ms=d.numbers(T, N, C, nz), idx=torch.randint(-1, C, (C, nz), generator=d.g), v0=d.numbers(N, C), vT=d.numbers(N, C))
    return tensors | d.words(lengths=lambda: torch.randint(T + 1, (N,), generator=d.g))


def exact_paths(Ms, idx, v0, vT, S, lengths=None) -> Tensor:
    "The sum over all paths of each sequence, cut at its length"
    T, N = Ms.shape[:2]
    if not N:
        return path_sum(Ms, idx, v0, vT, S)
    cut = [T] * N if lengths is None else lengths.tolist()
    return torch.cat([path_sum(Ms[:cut[n], n:n + 1], idx, v0[n:n + 1], vT[n:n + 1], S) for n in range(N)], -1)


def logz(d: Draw) -> Call:
    S, words = fl.semirings.Log, dict(method=d.pick(("auto", "auto", "autograd", "loop", "scan")))
    return Call(lambda **given: [fl.logz(**given, S=S, **words)], lambda _, **given: [exact_paths(**given, S=S)], graph(d), ["Ms", "v0", "vT"], argument_names(fl.logz), words)


def viterbi(d: Draw) -> Call:
    exact = lambda _, **given: [exact_paths(**given, S=fl.semirings.Max).detach()]
    return Call(lambda **given: [fl.viterbi(**given).score.detach()], exact, graph(d), [], argument_names(fl.viterbi), {})


LOSSES: dict[str, Callable[[Draw], Call]] = {f.__name__: f for f in (
    cross_entropy, linear_cross_entropy, log_probs, linear_log_probs, linear_topk, linear_sample, linear_divergence, contrastive_loss, sigmoid_contrastive_loss,
    margin_cross_entropy, partial_fc, partial_fc_of_products, ctc_loss, ctc_loss_with_logits, linear_ctc_loss, forced_align, ctc_posteriors, transducer_loss, linear_transducer_loss, logz, viterbi)}
