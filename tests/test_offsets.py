"""Scores that share a large offset: every loss and every gradient is as exact as that of plain PyTorch on the same scores."""
import sys
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import fusedloss as fl
from fusedloss import contrast, filter as with_filter
from fusedloss.core import negatives
from grids import thorough_but
from helpers import everywhere, need_kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
f32, f64 = torch.float32, torch.float64
N, V, H, OFFSET = 6, 37, 4, 1e6
SEEDS = range(2)


@pytest.fixture
def way(request, device, monkeypatch):
    "The device, on which either PyTorch or the Triton kernels take everything they can"
    taken = request.param == "kernels"
    if taken:
        need_kernels(device)
    for module in (with_filter, contrast):
        everywhere(monkeypatch, module, "takes_kernel", lambda x: taken and x.dtype == f32 and len(x) > 0)
    everywhere(monkeypatch, sys.modules["fusedloss.core.triton"], "has_kernel", lambda z: taken and z.dtype == f32 and z.numel() > 0)
    everywhere(monkeypatch, negatives, "fits_kernels", lambda x, o: taken and x.dtype == f32)
    return device


def quarters(g, *size, largest=4):
    "Multiples of 1/4: sums of a few of their products are exact, and stay so beside the offset"
    return torch.randint(-largest, largest + 1, size, generator=g) / 4


def logits(g):
    return [OFFSET + 2 * torch.randn(N, V, generator=g)]


def layer(g, offset=OFFSET):
    return [quarters(g, N, H), quarters(g, V, H), torch.full((V,), offset)]


def two_layers(g):
    return layer(g) + layer(g, -OFFSET / 2)


def pairs_of_features(g):
    long = torch.full((N, 1), OFFSET ** 0.5)
    return [torch.cat([quarters(g, N, H, largest=3), long], 1), torch.cat([quarters(g, N, H, largest=3), long], 1)]


def given(device, dtype=f32):
    "Labels of which one is ignored, class and token weights, probabilities, three labels a row"
    g = torch.Generator().manual_seed(5)
    y = torch.randint(V, (N,), generator=g)
    y[2] = -100
    several = torch.stack([(y + 5 * k) % V if k else y for k in range(3)], 1)
    weights = [torch.rand(n, generator=g) + 0.5 for n in (V, N)]
    soft = torch.rand(N, V, generator=g).softmax(1)
    return [t.to(device) if not t.is_floating_point() else t.to(device, dtype) for t in (y, *weights, soft, several)]


def of_labels(z, smoothing=0.0, weighted=False, z_loss=0.0, entropy=False, target="one"):
    "The loss as it is defined, of which PyTorch has all terms relative to the row's maximum; and the entropies' sum"
    y, w, t, soft, several = given(z.device, z.dtype)
    w, t = (w, t) if weighted else (torch.ones_like(w), torch.ones_like(t))
    log_p = z.log_softmax(1)
    if target == "soft":
        a = (soft * (1 - smoothing) + smoothing / V) * w
        losses, total = -(a * log_p).sum(1), t.sum()
    else:
        labels = several if target == "several" else y[:, None]
        counts = (labels != -100).to(z.dtype)
        label = labels.clamp(min=0)
        one = -(1 - smoothing) * w[label] * log_p.gather(1, label) - (smoothing / V * (w * log_p).sum(1))[:, None]
        losses, total = (counts * one).sum(1), (counts * w[label] * t[:, None]).sum()
        t = t if target == "several" else t * counts[:, 0]
    if z_loss:
        losses = losses + z_loss * z.logsumexp(1) ** 2
    loss = (t * losses).sum() / total
    if not entropy:
        return loss
    return loss, (-(log_p.exp() * log_p).sum(1) * (y != -100)).sum()


def ours(call, device, smoothing=0.0, weighted=False, z_loss=0.0, entropy=False, target="one", **how):
    "The same by the library"
    y, w, t, soft, several = given(device)
    weights = dict(weight=w, token_weight=t) if weighted else {}
    loss = call(dict(one=y, soft=soft, several=several)[target], **weights, label_smoothing=smoothing, z_loss=z_loss,
                **dict(return_stats=True) if entropy else {}, **how)
    return (loss[0], loss[1].entropy.sum()) if entropy else loss


def in_place(z, y, **how):
    return fl.cross_entropy(z * 1.0, y, inplace=True, **how)


def linear(x, w, b):
    return F.linear(x, w, b)


OPTIONS = {
    "bare": {}, "smoothing": dict(smoothing=0.2), "weights": dict(smoothing=0.2, weighted=True), "z-loss": dict(z_loss=1e-13),
    "entropy": dict(entropy=True, smoothing=0.1), "soft": dict(target="soft", smoothing=0.1, weighted=True),
}
SEVERAL = {"several": dict(target="several", smoothing=0.1), "several, weights": dict(target="several", smoothing=0.1, weighted=True)}
BARE = {"bare": {}}
FILTERED = {"bare": {}, "weights": dict(weighted=True)}


def cross_entropies():
    "Of logits: made of leaves, by the library, by the definition"
    for name, o in OPTIONS.items():
        yield f"cross_entropy, {name}", logits, lambda z, o=o: ours(partial(fl.cross_entropy, z), z.device, **o), lambda z, o=o: of_labels(z, **o)
        if name not in ("entropy", "soft"):
            yield f"in place, {name}", logits, lambda z, o=o: ours(partial(in_place, z), z.device, **o), lambda z, o=o: of_labels(z, **o)
    yield "iota", logits, lambda z: ours(lambda y, **_: fl.iota_cross_entropy(z, y), z.device), of_labels


def linear_losses():
    "Of a linear layer whose bias is the offset"
    methods = {"eager": OPTIONS | SEVERAL, "chunks": {k: v for k, v in OPTIONS.items() if k != "entropy"} | SEVERAL,
               "recompute": {k: v for k, v in OPTIONS.items() if k != "soft"}}
    for method, options in methods.items():
        for name, o in options.items():
            run = lambda x, w, b, o=o, method=method: ours(partial(fl.linear_cross_entropy, x, w), x.device, linear_bias=b, method=method, **o)
            yield f"{method}, {name}", layer, run, lambda x, w, b, o=o: of_labels(linear(x, w, b), **o)


def without_bias(g):
    "Features with one more, of which every class has the same"
    x, w, _ = layer(g)
    long = OFFSET ** 0.5
    return [torch.cat([x, x.new_full((N, 1), long)], 1), torch.cat([w, w.new_full((V, 1), long)], 1)]


def tiled():
    yield ("tiles", without_bias, lambda x, w: ours(lambda y, **_: fl.tiled_linear_cross_entropy(x, w, y, token_tile=4, class_tile=8), x.device),
           lambda x, w: of_labels(x @ w.T))
    yield ("filter", layer, lambda x, w, b: ours(lambda y, **_: fl.recompute_linear_cross_entropy(x, w, y, linear_bias=b, filter_eps=1e-30), x.device),
           lambda x, w, b: of_labels(linear(x, w, b)))


def said(z):
    "Log-probabilities, entropies and means, each summed"
    y = given(z.device)[0]
    log_p, counts = z.log_softmax(1), (y != -100).to(z.dtype)
    entropy = -(log_p.exp() * log_p).sum(1)
    return (counts * log_p.gather(1, y.clamp(min=0)[:, None])[:, 0]).sum(), (counts * entropy).sum()


def log_probabilities():
    of = lambda found: (found.log_probs.sum(), found.entropy.sum())
    yield "log_probs", logits, lambda z: of(fl.log_probs(z, given(z.device)[0], entropy=True)), said
    yield ("linear_log_probs", layer, lambda x, w, b: of(fl.linear_log_probs(x, w, given(x.device)[0], linear_bias=b, entropy=True)),
           lambda x, w, b: said(linear(x, w, b)))


def divergence(x, w, b, *teacher, kind):
    log_q, log_p = linear(x, w, b).log_softmax(1), linear(*(t.detach() for t in teacher)).log_softmax(1)
    of = lambda a, b: (a.exp() * (a - b)).sum() / N
    if kind == "jsd":
        m = torch.logaddexp(log_p, log_q) - torch.tensor(2.0, dtype=x.dtype).log()
        return (of(log_p, m) + of(log_q, m)) / 2
    return of(log_p, log_q) if kind == "forward_kl" else of(log_q, log_p)


def listed(x, w, b, *teacher):
    "The five classes that the teacher's list has, and their log-probabilities"
    top = linear(*(t.detach() for t in teacher)).log_softmax(1).topk(5)
    return top.indices, top.values


def from_list(x, w, b, *teacher):
    indices, log_p = listed(x, w, b, *teacher)
    log_q = linear(x, w, b).log_softmax(1)
    rest = torch.full_like(log_q, 0.0).scatter(1, indices, -torch.inf)
    log_q = torch.cat([log_q.gather(1, indices), (log_q + rest).logsumexp(1, keepdim=True)], 1)
    log_p = torch.cat([log_p, (1 - log_p.exp().sum(1, keepdim=True)).log()], 1)
    return (log_p.exp() * (log_p - log_q)).sum() / N


def divergences():
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        yield (f"divergence, {kind}", two_layers, lambda x, w, b, *t, kind=kind: fl.linear_divergence(x, w, *t[:2], linear_bias=b, teacher_bias=t[2], kind=kind),
               partial(divergence, kind=kind))
    yield ("divergence from a list", two_layers, lambda x, w, b, *t: fl.linear_divergence(x, w, linear_bias=b, teacher_top=listed(x, w, b, *t)), from_list)


def both_directions(x, y):
    z = x @ y.T
    return -(z.log_softmax(1).diagonal() + z.log_softmax(0).diagonal()).mean() / 2


def contrasts():
    yield "contrast", pairs_of_features, lambda x, y: fl.contrastive_loss(x, y, 1.0), both_directions
    yield ("contrast, positives", pairs_of_features, lambda x, y: fl.contrastive_loss(x, y, 1.0, positives=torch.arange(len(x), device=x.device)),
           both_directions)


SAMPLERS = {"all classes": None, "shared negatives": False, "negatives of each row": True}


def head_of(each_row, device):
    "Of dot products and a bias; without `each_row` all classes are scored"
    sampler = None if each_row is None else fl.PopularitySampler(torch.linspace(0.1, 3, V), 20, each_row=each_row, seed=3)
    return fl.PartialFC(V, H, normalize=False, bias=True, sampler=sampler, sparse=False, ignore_index=-100, device=device)


def head_loss(x, w, b, each_row):
    head = head_of(each_row, x.device)
    return torch.func.functional_call(head, dict(weight=w, bias=b[:, None]), (x, given(x.device)[0]))


def head_definition(x, w, b, each_row):
    "From all scores: each negative as often as it was drawn, corrected by its log-probability"
    y, sampler = given(x.device)[0], head_of(each_row, x.device).sampler
    own, log_counts, log_q = F.one_hot(y.clamp(min=0), V).bool(), x.new_zeros(N, V), x.new_zeros(V)
    if each_row is not None:
        drawn = sampler(N if each_row else 1).expand(N, -1)
        log_counts = F.one_hot(drawn + 1, V + 1).sum(1)[:, 1:].to(x.dtype).masked_fill(own, 1).log()
        log_q = sampler.log_draws(torch.arange(V, device=x.device)).to(x.dtype)
    z = linear(x, w, b)
    log_p = (z - z.detach().amax(1, keepdim=True) - log_q + log_counts).log_softmax(1)
    return -(log_p.gather(1, y.clamp(min=0)[:, None])[:, 0] * (y != -100)).sum() / (y != -100).sum()


def heads():
    for name, each_row in SAMPLERS.items():
        yield f"head, {name}", layer, partial(head_loss, each_row=each_row), partial(head_definition, each_row=each_row)


FRAMES, SEQUENCES, LABELS = 8, 3, 3


def frames(g):
    return [OFFSET + 2 * torch.randn(FRAMES, SEQUENCES, V, generator=g)]


def layer_of_frames(g):
    return [quarters(g, FRAMES, SEQUENCES, H), quarters(g, V, H), torch.full((V,), OFFSET)]


def of_frames(loss, z):
    "A CTC loss of z [T,N,V]: its arguments come from a seed"
    labels = 1 + torch.randint(V - 1, (SEQUENCES, LABELS), generator=torch.Generator().manual_seed(6))
    lengths = [torch.full((SEQUENCES,), n, device=z.device) for n in (FRAMES, LABELS)]
    return loss(labels.to(z.device), *lengths)


def of_log_probs(z):
    return of_frames(partial(F.ctc_loss, z.log_softmax(-1)), z)


def ctc_losses():
    yield "ctc", frames, lambda z: of_frames(partial(fl.ctc_loss_with_logits, z), z), of_log_probs
    yield ("linear ctc", layer_of_frames, lambda x, w, b: of_frames(partial(fl.linear_ctc_loss, x, w, linear_bias=b), x),
           lambda x, w, b: of_log_probs(F.linear(x, w, b)))


CASES = {name: case for cases in (cross_entropies, linear_losses, tiled, log_probabilities, divergences, contrasts, heads, ctc_losses) for name, *case in cases()}


def results(loss, leaves):
    "What a loss returns, and each gradient of it"
    found = loss(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    grads = torch.autograd.grad(sum((k + 1) * f for k, f in enumerate(found)), leaves, allow_unused=True)
    return [t.detach().cpu().double() for t in (*found, *grads) if t is not None]


# of losses by the same kernels the gate tries one; each goes by PyTorch too
BY_KERNELS = ("cross_entropy, weights", "in place, smoothing", "eager, soft", "chunks, several", "recompute, weights", "recompute, z-loss", "recompute, entropy", "filter",
              "log_probs", "linear_log_probs", "divergence, jsd", "contrast", "head, all classes", "head, shared negatives")


@pytest.mark.parametrize("name, way", thorough_but(product(CASES, ("plain", "kernels")), *product(CASES, ["plain"]), *product(BY_KERNELS, ["kernels"])), indirect=["way"])
def test_an_offset_costs_no_digits(name, way):
    leaves_of, loss, definition = CASES[name]
    if name == "iota" and way != "cpu": pytest.skip("PyTorch's alone")
    worst = {"ours": [], "torch": []}
    for seed in SEEDS:
        leaves = [t.to(way) for t in leaves_of(torch.Generator().manual_seed(seed))]
        new = lambda dtype, leaves=leaves: [t.to(dtype, copy=True).requires_grad_() for t in leaves]
        exact = results(definition, new(f64))
        for who, fn in (("ours", loss), ("torch", definition)):
            got = results(fn, new(f32))
            assert [t.shape for t in got] == [t.shape for t in exact], who
            worst[who].append([(a - b).abs().max().item() / b.abs().max().clamp(min=1e-3).item() for a, b in zip(got, exact)])
    ours_, torchs = (torch.tensor(worst[who]).amax(0) for who in ("ours", "torch"))
    allowed = 4 * torchs + 16 * torch.finfo(f32).eps
    assert (ours_ <= allowed).all(), f"{ours_.tolist()} where PyTorch has {torchs.tolist()}"
