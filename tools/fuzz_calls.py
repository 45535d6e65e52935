"""What tools/fuzz.py draws: one call of a public loss, its tensors, and its definition in float64."""
import random
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedloss as fl
from fusedloss.core.options import argument_names
from fusedloss.semirings import path_sum
from head_cases import definition, scored_classes
from test_contrast import exact as exact_pairs, exact_positives, exact_sigmoid
from test_margins import FORMULAS
from test_divergence import exact as exact_divergence
from test_transducer import ACTIVATE, by_recursion

SIZES = (0, 1, 1, 2, 3, 5, 7, 8, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
BAD_LABELS = (-7, 2**31 - 1)


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

    def __str__(self):
        return str({name: f"{str(t.dtype)[6:]} {list(t.shape)}" for name, t in self.tensors.items()} | self.words)


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
    def exact(_, input, target, **given):
        return [defined(last(alive(input)), last(target) if soft else target, **given, **words)]
    def run(**given):
        return [fl.cross_entropy(**given, **words, **dict(inplace=True) if inplace else {})]
    return Call(run, exact, tensors, ["input"], argument_names(fl.cross_entropy), words | dict(inplace=inplace), bad, "input" * inplace, expands=not haunted)


def linear_cross_entropy(d: Draw) -> Call:
    V, H, lead = d.size(least=1), d.size(129), d.pick(((d.size(129),), (d.size(129),), (2, d.size(33))))
    method, target = d.pick(("auto", "eager", "tiles", "chunks", "recompute", "product")), d.pick(("labels",) * 5 + ("several", "soft"))
    tensors, words = d.layer(lead, H, V), d.options() | d.budget() | dict(method=method, reduction=d.pick(("mean", "sum", "none")))
    y = {"labels": lambda: d.labels(V, *lead), "several": lambda: d.labels(V, *lead, d.pick((1, 2, 5))), "soft": lambda: torch.rand(*lead, V, generator=d.g).to(d.dtype)}[target]()
    if method == "tiles":
        tensors.pop("linear_bias", None)
    if target == "several":
        words.pop("z_loss", None)
    tensors |= dict(target=y) | d.words(weight=lambda: d.weights(V), token_weight=lambda: d.weights(*lead))
    if target == "labels" and d.chance(0.1):
        words["shift"] = d.pick((1, 2))
    eight = d.dtype == torch.bfloat16 and d.chance(0.3 if H % 16 else 0.7)
    if eight:
        words |= dict(matmul_dtype=torch.float8_e4m3fn, method="auto")
    haunted = "shift" not in words and d.haunted(tensors["input"], y, -100)
    bad = target == "labels" and "shift" not in words and d.spoiled(y, V)
    def exact(_, input, linear_weight, target, linear_bias=None, token_weight=None, **given):
        own = {k: v for k, v in words.items() if k not in ("method", "matmul_dtype", "shift", "memory_budget")}
        k = words.get("shift", 0)
        if k:
            input, target = input[..., :max(input.shape[-2] - k, 0), :], target[..., k:]
            token_weight = None if token_weight is None else token_weight[..., k:]
        return [defined(F.linear(alive(input), linear_weight, linear_bias), target, token_weight=token_weight, **given, **own)]
    run = lambda **given: [fl.linear_cross_entropy(**given, **words)]
    return Call(run, exact, tensors, [n for n in tensors if n in ("input", "linear_weight", "linear_bias")], argument_names(fl.linear_cross_entropy), words, bad,
                tolerance=6e-2 if eight else 0.0, expands=not haunted)


def exact_log_probs(z: Tensor, target: Tensor, words: dict, temperature: float | Tensor) -> list[Tensor | None]:
    "Log-probabilities, entropy and mean of logits"
    z = capped(z, words.get("logit_scale", 1.0), words.get("softcap"), temperature)
    y = target.long().unsqueeze(-1) if target.dim() < z.dim() else target.long()
    kept = y != -100
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
    y = d.labels(V, *lead, *d.pick(((), (), (3,))))
    haunted = d.haunted(tensors[leaves[0]], y, -100)
    bad = d.spoiled(y, V)
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
    tensors, teacher = d.layer(lead, H, V), d.layer(lead, d.size(65), V)
    rename = dict(input="teacher_input", linear_weight="teacher_weight", linear_bias="teacher_bias")
    words = d.words(beta=lambda: d.pick((0.0, 0.3, 1.0)), softcap=lambda: 5.0, teacher_softcap=lambda: 3.0, logit_scale=lambda: 0.5, teacher_logit_scale=lambda: 2.0)
    words |= dict(kind=d.pick(("forward_kl", "reverse_kl", "jsd")), reduction=d.pick(("mean", "sum", "none")))
    if not sum([*lead, 1]) - 1 or 0 in lead:
        words["reduction"] = "sum"
    leaves = [*tensors]
    tensors = tensors | {rename[k]: t for k, t in teacher.items()} | d.words(token_weight=lambda: d.weights(*lead) + 0.1, temperature=lambda: d.weights(*lead) + 0.5)
    def exact(_, input, linear_weight, teacher_input, teacher_weight, **given):
        return [exact_divergence(input, linear_weight, teacher_input, teacher_weight, **given, **words)]
    budget = d.budget()
    return Call(lambda **given: [fl.linear_divergence(**given, **words, **budget)], exact, tensors, leaves, argument_names(fl.linear_divergence), words | budget)


def contrastive_loss(d: Draw) -> Call:
    N, H, words = d.size(129, 1), d.size(65), dict(reduction=d.pick(("mean", "sum", "none")))
    several, tensors = d.chance(0.5), dict(x=d.numbers(N, H, by=max(H, 1) ** -0.5))
    M = d.size(129, 1) if several else N
    tensors |= dict(y=d.numbers(M, H), logit_scale=torch.tensor(d.pick((0.5, 5.0)), dtype=d.dtype))
    if several:
        tensors["positives"] = torch.randint(M, (N, *d.pick(((), (3,)))), generator=d.g)
    definition, budget = exact_positives if several else exact_pairs, d.words(memory_budget=lambda: 2**19)
    return Call(lambda **given: [fl.contrastive_loss(**given, **words, **budget)], lambda _, **given: [definition(**given, **words)], tensors, ["x", "y", "logit_scale"],
                argument_names(fl.contrastive_loss), words | budget, tolerance=1e-4)  # of a scale: a sum of N·M terms


def sigmoid_contrastive_loss(d: Draw) -> Call:
    N, H, words = d.size(129, 1), d.size(65), dict(reduction=d.pick(("mean", "sum", "none")))
    several, numbers = d.chance(0.5), dict(logit_scale=torch.tensor(2.0, dtype=d.dtype), logit_bias=torch.tensor(-1.0, dtype=d.dtype))
    M = d.size(129, 1) if several else N
    tensors = dict(x=d.numbers(N, H, by=max(H, 1) ** -0.5), y=d.numbers(M, H)) | numbers
    leaves, more = [*tensors], dict(positives=d.labels(M, N, *d.pick(((), (3,))), ignored=-1).long()) if several else {}
    return Call(lambda **given: [fl.sigmoid_contrastive_loss(**given, **words)], lambda _, **given: [exact_sigmoid(**given, **words)], tensors | more, leaves,
                argument_names(fl.sigmoid_contrastive_loss), words, tolerance=1e-4)  # of a scale: a sum of N·M terms


def partial_fc(d: Draw) -> Call:
    V, H, N = d.size(129, 1), d.size(65, 3), d.size(65)
    name, words = d.pick(("CosFace", "ArcFace", "Combined")), dict(sample_rate=d.pick((1.0, 0.3)), method=d.pick(("auto", "auto", "tiles", "tiles", "recompute")), sparse=False)
    y = d.labels(V, N, ignored=-1)
    bad, masks = d.spoiled(y, V), []
    def run(features, weight, target):
        head = fl.PartialFC(V, H, margin=FORMULAS[name][0], device=weight.device, dtype=weight.dtype, **words)
        head.__dict__["_parameters"].pop("weight"), setattr(head, "weight", weight)
        masks[:] = [scored_classes(head, target.long())] if not bad else []
        return [head(features, target)]
    exact = lambda _, features, weight, target: [definition(features, weight, target.long(), name, masks[0])]
    return Call(run, exact, dict(features=d.numbers(N, H), weight=d.numbers(V, H), target=y), ["features", "weight"],
                [*argument_names(fl.PartialFC), *argument_names(fl.PartialFC.forward)], dict(margin=name) | words, bad,
                expands=name == "CosFace")  # an angle of 0 has no gradient


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


def of_ctc(d: Draw, function: Callable, T: int, N: int, C: int, tensors: dict[str, Tensor], logits: Callable[..., Tensor]) -> Call:
    "CTC, whose frames and labels are ragged"
    leaves, blank = [*tensors], d.r.randrange(C)
    more, bad = sequences(d, T, N, d.size(9) if C > 1 else 0, C, 0, ("input_lengths", "target_lengths"), blank)
    words = dict(reduction=d.pick(("mean", "sum", "none")), blank=blank, zero_infinity=d.chance(0.7))
    budget = d.budget() if function is fl.linear_ctc_loss else {}
    def exact(_, targets, input_lengths, target_lengths, **given):
        losses = lambda none: F.ctc_loss(logits(**given).log_softmax(-1), targets.long(), input_lengths.long(), target_lengths.long(), **words | dict(zero_infinity=none))
        return [losses(True) + torch.where(losses(words["zero_infinity"]).isposinf(), torch.inf, 0.0).detach()]  # without a path no gradient, where PyTorch has NaN
    return Call(lambda **given: [function(**given, **words, **budget)], exact, tensors | more, leaves, argument_names(function), words | budget, bad,
                at_home=d.pick(((), ("input_lengths", "target_lengths"))))


def ctc_loss_with_logits(d: Draw) -> Call:
    T, N, C = d.size(33, 1), d.size(5, 1), d.size(65, 1)
    return of_ctc(d, fl.ctc_loss_with_logits, T, N, C, dict(logits=d.numbers(T, N, C, by=d.loudness())), lambda logits: logits)


def linear_ctc_loss(d: Draw) -> Call:
    T, N, C = d.size(33, 1), d.size(5, 1), d.size(65, 1)
    return of_ctc(d, fl.linear_ctc_loss, T, N, C, d.layer((T, N), d.size(33), C), lambda input, linear_weight, linear_bias=None: F.linear(input, linear_weight, linear_bias))


def of_transducer(z: list[Tensor], targets: Tensor, frames: Tensor, lengths: Tensor, words: dict) -> list[Tensor]:
    "Sequences of logits [T,U+1,V], cut at their lengths"
    blank, given = words["blank"] % z[0].shape[-1], {k: words[k] for k in ("durations", "sigma") if k in words}
    return [reduced(torch.stack([by_recursion(z[n][:frames[n], :lengths[n] + 1], targets[n, :lengths[n]].long(), blank, **given) for n in range(len(z))]), words["reduction"])]


def transducer_loss(d: Draw) -> Call:
    N, T, U, V = d.size(3, 1), d.size(8, 1), d.size(7), d.size(65, 2)
    words = dict(reduction=d.pick(("mean", "sum", "none")), blank=d.pick((-1, 0)))
    more, bad = sequences(d, T, N, U, V, 1, ("logit_lengths", "target_lengths"), words["blank"] % V)
    tensors = dict(logits=d.numbers(N, T, U + 1, V, by=d.loudness())) | more
    exact = lambda _, logits, targets, logit_lengths, target_lengths: of_transducer([*logits], targets, logit_lengths, target_lengths, words)
    return Call(lambda **given: [fl.transducer_loss(**given, **words)], exact, tensors, ["logits"], argument_names(fl.transducer_loss), words, bad,
                at_home=d.pick(((), ("logit_lengths", "target_lengths"))))


def linear_transducer_loss(d: Draw) -> Call:
    N, T, U, J, V = d.size(3, 1), d.size(8, 1), d.size(5), d.size(33, 1), d.size(33, 2)
    words = dict(reduction=d.pick(("mean", "sum", "none")), blank=0, activation=d.pick(("tanh", "relu", None)))
    budget = d.budget()
    layer = {k: t for k, t in d.layer((N, T), J, V).items() if k != "input"}
    tensors = dict(encoder=d.numbers(N, T, J, by=0.5 * J**-0.5), predictor=d.numbers(N, U + 1, J, by=0.5 * J**-0.5)) | layer
    leaves = [*tensors]
    more, bad = sequences(d, T, N, U, V, 1, ("encoder_lengths", "target_lengths"), 0)
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
    partial_fc, ctc_loss_with_logits, linear_ctc_loss, transducer_loss, linear_transducer_loss, logz, viterbi)}
