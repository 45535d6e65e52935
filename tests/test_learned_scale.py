"""A scale of scores that is a tensor: every loss against autograd of its formula, what a number gives as before, what is refused, planted bugs."""
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import fusedloss as fl
import fusedloss.core.learned as learned
from fusedloss.margins import AdaFace, ArcFace, Circle, Combined, CosFace, SubCenter
from workbook.measure import relative_error
from grids import few, grid
from helpers import follows_plans, has_no_second_derivative, planted, unchanged

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LIMITS = {f64: 1e-11, f32: 2e-5, bf16: 3e-2, f16: 5e-3}
N, H, V = 13, 6, 11
OPTIONS = {
    "plain": {}, "cap": dict(softcap=4.0), "smooth": dict(label_smoothing=0.1, z_loss=1e-2), "weighed": dict(weighed=True), "all": dict(softcap=4.0, label_smoothing=0.1, z_loss=1e-2, weighed=True),
}
SCALES = {"above": 2.3, "below": -1.7, "none": 0.0}


def problem(dtype, scale=2.3, scale_dtype=None, seed=0):
    "Leaves x, w, b and s; labels, two of them ignored; weights of classes and tokens"
    made = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(size, generator=made, dtype=f64)
    leaves = [t.to(dtype).requires_grad_() for t in (draw(N, H), draw(V, H), draw(V))]
    y = torch.randint(V, (N,), generator=made)
    y[2], y[7] = -100, -100
    s = torch.tensor(scale, dtype=scale_dtype or dtype, requires_grad=True)
    return *leaves, s, y, draw(V).abs().float(), draw(N).abs().float()


def formula(z, y, *, weight=None, token_weight=None, softcap=None, z_loss=0.0, reduction="mean", label_smoothing=0.0):
    "The loss of scaled logits [N,V] in float64, label by label [N,K]"
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    y = y if y.dim() == 2 else y[:, None]
    weight = None if weight is None else weight.double()
    losses, total = 0.0, 0.0
    for labels in y.T:
        valid = (labels != -100).double()
        each = F.cross_entropy(z, labels, weight, reduction="none", label_smoothing=label_smoothing) + valid * z_loss * z.logsumexp(1).square()
        share = valid if token_weight is None else valid * token_weight.double()
        losses = losses + each * (1.0 if token_weight is None else token_weight.double())
        total = total + (share if weight is None else share * weight[labels.clamp(min=0)]).sum()
    return losses if reduction == "none" else losses.sum() / (total if reduction == "mean" else 1)


def logits_of(x, w, b, s):
    "Scaled logits in float64"
    return s.double() * (x.double() @ w.double().T + (0.0 if b is None else b.double()))


def of_layer(loss):
    "A loss of a linear layer, of leaves and options"
    return lambda x, w, b, s, y, **o: loss(x, w, y, linear_bias=b, logit_scale=s, **o)


def of_module(x, w, b, s, y, *, weight=None, token_weight=None, **o):
    "The module's loss, the leaves in place of its parameters"
    scale = nn.Parameter(s.detach()) if isinstance(s, torch.Tensor) else s
    module = fl.LinearCrossEntropyLoss(H, V, bias=True, class_weight=weight, logit_scale=scale, dtype=w.dtype, **o)
    return torch.func.functional_call(module, {"weight": w, "bias": b, "logit_scale": s}, (x, y), dict(token_weight=token_weight))


METHODS = {name: of_layer(partial(fl.linear_cross_entropy, method=name)) for name in ("auto", "eager", "chunks", "recompute")}
CALLS = {
    **METHODS, "chunked": of_layer(fl.chunked_linear_cross_entropy), "recomputed": of_layer(fl.recompute_linear_cross_entropy), "sharded": of_layer(fl.sharded_linear_cross_entropy),
    "module": of_module, "logits": lambda x, w, b, s, y, **o: fl.cross_entropy(F.linear(x, w, b), y, logit_scale=s, **o),
}
NO_ROWS = {"chunks", "chunked"}  # whose gradients are formed before "none" has any


def faults(call, leaves, exact, limit):
    "What of a loss and its gradients is off; `call` and `exact` are given the leaves"
    got, wanted = call(*leaves), exact(*leaves)
    g = torch.linspace(-1, 2, wanted.numel(), dtype=f64).view(wanted.shape)
    names = ["loss", *(f"gradient {i}" for i, t in enumerate(leaves))]
    got = got, *torch.autograd.grad(got, leaves, g.to(got.dtype))
    wanted = wanted, *torch.autograd.grad(wanted, leaves, g)
    kinds = [None, *leaves]
    off = [f"{name}: {relative_error(a, e)}" for name, a, e in zip(names, got, wanted) if not (a.double() - e.double()).norm() <= limit * (e.double().norm() + 1e-3)]
    return off + [f"{name} is {a.dtype} {list(a.shape)}" for name, a, t in zip(names, got, kinds) if t is not None and (a.dtype, a.shape) != (t.dtype, t.shape)]


def options_of(how, reduction, weight, token_weight):
    options = dict(OPTIONS[how], reduction=reduction)
    return {**options, "weight": weight, "token_weight": token_weight} if options.pop("weighed", False) else options


@pytest.mark.parametrize("name, how, reduction, scale, dtype", [c for c in grid(CALLS, OPTIONS, ("mean", "sum", "none"), SCALES, (f64, f32)) if c[2] != "none" or c[0] not in NO_ROWS])
def test_losses_and_gradients_are_those_of_the_formula(name, how, reduction, scale, dtype):
    *leaves, y, weight, token_weight = problem(dtype, SCALES[scale])
    options = options_of(how, reduction, weight, token_weight)
    assert faults(lambda *t: CALLS[name](*t, y, **options), leaves, lambda x, w, b, s: formula(logits_of(x, w, b, s), y, **options), LIMITS[dtype]) == []


@pytest.mark.parametrize("name, scale_dtype, dtype", grid(few(CALLS, "eager", "chunks", "recompute", "logits"), (f16, bf16, f32, f64), (bf16, f16)))
def test_half_precision_and_a_scale_of_another(name, scale_dtype, dtype):
    *leaves, y, weight, token_weight = problem(dtype, 1.7, scale_dtype)
    call = lambda *t: CALLS[name](*t, y, softcap=4.0)
    assert faults(call, leaves, lambda x, w, b, s: formula(logits_of(x, w, b, s), y, softcap=4.0), LIMITS[dtype]) == []


@pytest.mark.parametrize("method", ("tiles", "tiled"))
def test_methods_without_a_bias(method):
    x, w, _, s, y, *_ = problem(f64)
    how = partial(fl.linear_cross_entropy, method=method) if method != "tiled" else partial(fl.tiled_linear_cross_entropy, token_tile=4, class_tile=3)
    assert faults(lambda x, w, s: how(x, w, y, logit_scale=s), [x, w, s], lambda x, w, s: formula(logits_of(x, w, None, s), y), 1e-11) == []


@pytest.mark.parametrize("method, how, reduction", [("eager", "all", "none"), ("chunks", "cap", "mean"), ("auto", "smooth", "sum")])
def test_several_targets(method, how, reduction):
    *leaves, y, weight, token_weight = problem(f64)
    ys, options = torch.stack([y, y.roll(1), y.roll(3)], 1), options_of(how, reduction, weight, token_weight)
    assert faults(lambda *t: METHODS[method](*t, ys, **options), leaves, lambda x, w, b, s: formula(logits_of(x, w, b, s), ys, **options), 1e-11) == []


@pytest.mark.parametrize("method", ("eager", "chunks", "logits"))
def test_probabilities(method):
    *leaves, y, _, _ = problem(f64)
    p = torch.softmax(torch.randn(N, V, generator=torch.Generator().manual_seed(1), dtype=f64), 1)
    assert faults(lambda *t: CALLS[method](*t, p), leaves, lambda x, w, b, s: F.cross_entropy(logits_of(x, w, b, s), p), 1e-11) == []


def test_a_shift_and_sequences():
    x, w, b, s, y, *_ = problem(f64)
    x, y = x.detach()[:12].view(2, 6, H).requires_grad_(), y[:12].view(2, 6)
    exact = lambda x, w, b, s: formula(logits_of(x[:, :-1].reshape(-1, H), w, b, s), y[:, 1:].reshape(-1))
    assert faults(lambda x, w, b, s: fl.linear_cross_entropy(x, w, y, linear_bias=b, logit_scale=s, shift=1), [x, w, b, s], exact, 1e-11) == []


@pytest.mark.parametrize("name", ("eager", "recompute", "sharded", "logits"))
def test_statistics_have_gradients_by_the_scale(name):
    *leaves, y, _, _ = problem(f64)
    def exact(x, w, b, s):
        log_p, valid = logits_of(x, w, b, s).log_softmax(1), y != -100
        return (((logits_of(x, w, b, s).logsumexp(1)).square() + -(log_p.exp() * log_p).sum(1)) * valid).sum()
    def call(*t):
        _, stats = CALLS[name](*t, y, return_stats=True)
        return (stats.lse.square() + stats.entropy).sum()
    assert faults(call, leaves, exact, 1e-10) == []


@pytest.mark.parametrize("temperature", ("one", "each"))
@pytest.mark.parametrize("linear", (True, False))
def test_log_probabilities(linear, temperature):
    x, w, b, s, y, _, token_weight = problem(f64)
    T = 0.7 if temperature == "one" else 0.5 + token_weight.double()
    divide = T if temperature == "one" else T[:, None]
    def exact(x, w, b, s):
        log_p, valid = ((3.0 * torch.tanh(logits_of(x, w, b, s) / 3.0)) / divide).log_softmax(1), y != -100
        return torch.where(valid, log_p.gather(1, y.clamp(min=0)[:, None])[:, 0] - (log_p.exp() * log_p).sum(1), 0.0)
    def call(x, w, b, s):
        options = dict(temperature=T, logit_scale=s, softcap=3.0, entropy=True)
        found = fl.linear_log_probs(x, w, y, linear_bias=b, **options) if linear else fl.log_probs(F.linear(x, w, b), y, **options)
        return found.log_probs + found.entropy
    assert faults(call, [x, w, b, s], exact, 1e-10) == []


# --- margins ---

MARGINS = {
    "CosFace": (1, partial(CosFace, 0.2)), "ArcFace": (1, partial(ArcFace, 0.3)), "Combined": (1, partial(Combined, 1.1, 0.2, 0.1)), "straight": (1, partial(ArcFace, 0.3, grad="straight_through")),
    "AdaFace": (1, lambda scale: AdaFace(scale=scale).eval()), "SubCenter": (2, lambda scale: SubCenter(2, ArcFace(scale=scale))),
}


def cosine_loss(x, w, y, s, margin, k):
    "The mean over valid rows, by all cosines"
    cos = F.normalize(x.double()) @ F.normalize(w.double()).T
    cos = cos.view(len(x), -1, k).amax(2)
    at = y.clamp(min=0)[:, None]
    target = margin.target_score(cos.gather(1, at)[:, 0], x.detach().double().norm(dim=1))
    z = (s.double() * cos).scatter(1, at, target[:, None])
    return F.cross_entropy(z, y)


def heads(kind, x, w, y, s, margin):
    "The loss of a function, a head, or a head over one rank, its weight being `w`"
    if kind == "function": return fl.margin_cross_entropy(x, w, y, margin=margin)
    if kind == "tiles": return fl.margin_cross_entropy(x, w, y, margin=margin, token_tile=4, class_tile=3)
    make = fl.PartialFC if kind == "head" else fl.ShardedPartialFC
    head = make(len(w) // margin.centers, H, margin=margin, ignore_index=-100, dtype=w.dtype)
    return torch.func.functional_call(head, dict(weight=w), (x, y))


@pytest.mark.parametrize("kind, name, dtype", grid(("function", "tiles", "head", "sharded"), MARGINS, (f64, f32)))
def test_heads_with_margins(kind, name, dtype):
    k, make = MARGINS[name]
    x, _, _, s, y, *_ = problem(dtype, 7.0)
    w = torch.randn(V * k, H, generator=torch.Generator().manual_seed(2), dtype=f64).to(dtype).requires_grad_()
    call = lambda x, w, s: heads(kind, x, w, y, s, make(scale=s))
    exact = lambda x, w, s: cosine_loss(x, w, y, s, make(scale=s), k)
    if name == "straight": exact = lambda x, w, s: straight_through(x, w, y, s)
    assert faults(call, [x, w, s], exact, 10 * LIMITS[dtype]) == []


def straight_through(x, w, y, s):
    "ArcFace's scores with the slope of a cosine"
    cos = F.normalize(x.double()) @ F.normalize(w.double()).T
    at = y.clamp(min=0)[:, None]
    c = cos.gather(1, at)
    moved = c + (torch.cos(torch.acos(c) + 0.3) - c).detach()
    return F.cross_entropy(s.double() * cos.scatter(1, at, moved), y)


def sampling_head(scale, weight=None):
    "One that draws the same classes at each first step"
    head = fl.PartialFC(300, H, sample_rate=0.3, margin=CosFace(0.2, scale), sparse=False, ignore_index=-100, dtype=f64)
    if weight is not None: head.weight.data.copy_(weight)
    return head


def test_a_head_that_samples():
    x, _, _, s, y, *_ = problem(f64, 7.0)
    number = sampling_head(7.0)
    tensor = sampling_head(nn.Parameter(s.detach()), number.weight)
    (a, told), (b, seen) = (head(x, y, return_stats=True) for head in (number, tensor))
    assert_close((b, *seen), (a, *told))
    *found, ds = torch.autograd.grad(b, (x, tensor.weight, tensor.margin.scale))
    assert_close(found, [*torch.autograd.grad(a, (x, number.weight))])
    low, high = (sampling_head(7.0 + step, number.weight)(x, y).detach() for step in (-1e-4, 1e-4))
    assert_close(ds, (high - low) / 2e-4, rtol=1e-6, atol=0)
    assert_close(tensor.logits(x), number.logits(x))
    assert_close(tuple(tensor.topk(x, 3)), tuple(number.topk(x, 3)))


def test_rows_without_a_label_and_rows_of_zeros():
    x, w, _, s, y, *_ = problem(f64)
    with torch.no_grad(): x[2], x[3] = torch.nan, 0.0
    for found in (fl.PartialFC(V, H, margin=CosFace(scale=s), ignore_index=-100, dtype=f64)(x, y), fl.margin_cross_entropy(x, w, y, margin=CosFace(scale=s))):
        dx, ds = torch.autograd.grad(found, (x, s))
        assert found.isfinite() and ds.isfinite() and (dx[2] == 0).all() and dx[3].isfinite().all()


# --- whoever calls ---

def test_a_number_takes_the_path_that_it_took(monkeypatch):
    *leaves, _, y, weight, token_weight = problem(f32)
    monkeypatch.setattr(learned, "scaled_by", None)
    options, made = options_of("all", "mean", weight, token_weight), {}
    for scale in (1.7, 1):
        for name in ("eager", "chunks", "recompute", "sharded", "logits"):
            assert CALLS[name](*leaves, scale, y, **options).isfinite()
        made[scale] = fl.margin_cross_entropy(*leaves[:2], y, margin=CosFace(scale=scale))
    assert made[1.7] != made[1]


@pytest.mark.parametrize("name", CALLS)
def test_without_gradients_and_for_the_scale_alone(name):
    *leaves, y, _, _ = problem(f64)
    bare = [t.detach() for t in leaves]
    wanted = formula(logits_of(*bare), y)
    with torch.no_grad(): assert_close(CALLS[name](*leaves, y), wanted)
    assert_close(CALLS[name](*bare, y), wanted)
    alone = [*bare[:3], leaves[3]]
    if name != "module": assert_close(torch.autograd.grad(CALLS[name](*alone, y), leaves[3]), torch.autograd.grad(formula(logits_of(*alone), y), leaves[3]))


def test_a_module_has_its_scale():
    scale = nn.Parameter(torch.tensor(2.0))
    for given, place in ((scale, "named_parameters"), (torch.tensor(2.0), "named_buffers")):
        module = fl.LinearCrossEntropyLoss(H, V, logit_scale=given)
        assert module.logit_scale is given and "logit_scale" in dict(getattr(module, place)()) and "logit_scale" in module.state_dict()
    assert "logit_scale" not in fl.LinearCrossEntropyLoss(H, V, logit_scale=2.0).state_dict()
    x, y = torch.randn(5, H), torch.tensor([0, 1, 2, 3, 4])
    module = fl.LinearCrossEntropyLoss(H, V, logit_scale=scale, monitoring=True)
    module(x, y).backward()
    assert scale.grad is not None and scale.grad != 0 and scale.grad.shape == ()


def test_a_head_has_its_scale():
    for margin in (CosFace(), AdaFace(), SubCenter(2)):
        assert not [n for n, _ in fl.PartialFC(V, H, margin=margin).named_parameters() if "scale" in n]
    for make in (lambda s: CosFace(scale=s), lambda s: AdaFace(scale=s), lambda s: SubCenter(2, ArcFace(scale=s)), lambda s: SubCenter(2, AdaFace(scale=s))):
        scale = nn.Parameter(torch.tensor(8.0))
        for kind in (fl.PartialFC, fl.ShardedPartialFC):
            head = kind(V, H, margin=make(scale))
            assert sum(p is scale for p in head.parameters()) == 1, kind.__name__
            head(torch.randn(4, H), torch.arange(4)).backward()
            assert scale.grad is not None
            head.load_state_dict(head.state_dict())
    fl.PartialFC(V, H, margin=CosFace(scale=nn.Parameter(torch.tensor(8.0)))).extend(2)


def test_strided_inputs_and_none_at_all():
    x, w, b, s, y, *_ = problem(f64)
    turned = x.detach().T.contiguous().T.requires_grad_()
    for t in (turned, x.detach()[:1].expand(N, H).requires_grad_()):
        for name in ("eager", "recompute"):
            assert faults(lambda *leaves: CALLS[name](*leaves, y), [t, w, b, s], lambda x, w, b, s: formula(logits_of(x, w, b, s), y), 1e-11) == []
    empty = torch.zeros(0, H, dtype=f64, requires_grad=True)
    loss = fl.linear_cross_entropy(empty, w, y[:0], logit_scale=s)
    assert loss == 0 and torch.autograd.grad(loss, s)[0] == 0
    images = torch.randn(2, V, 3, 4, dtype=f64).contiguous(memory_format=torch.channels_last).requires_grad_()
    labels = torch.randint(V, (2, 3, 4))
    assert faults(lambda z, s: fl.cross_entropy(z, labels, logit_scale=s), [images, s], lambda z, s: F.cross_entropy(z * s, labels), 1e-11) == []


def test_inplace_leaves_the_callers_logits():
    x, w, b, s, y, *_ = problem(f64)
    z = F.linear(x, w, b)
    before = z.detach().clone()
    found = fl.cross_entropy(z, y, logit_scale=s, inplace=True)
    assert_close(torch.autograd.grad(found, (x, s)), torch.autograd.grad(formula(logits_of(x, w, b, s), y), (x, s)))
    assert torch.equal(z, before)


@follows_plans
@pytest.mark.parametrize("name", few(("eager", "chunks", "recompute", "logits"), "logits"))
def test_compiled_whole(name):
    *leaves, y, _, _ = problem(f64)
    call = lambda *t: CALLS[name](*t, y, softcap=4.0)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, e in zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (compiled, call))): assert_close(a, e)


def test_transforms_and_second_derivatives():
    *leaves, y, _, _ = problem(f64)
    bare = [t.detach() for t in leaves]
    found = torch.func.grad(lambda s: METHODS["recompute"](*bare[:3], s, y))(bare[3])
    assert_close(found, torch.autograd.grad(METHODS["recompute"](*leaves, y), leaves[3])[0])
    for leaf in (leaves[0], leaves[3]): assert has_no_second_derivative(METHODS["eager"](*leaves, y), leaf)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"): torch.func.jvp(lambda s: METHODS["eager"](*bare[:3], s, y), (bare[3],), (bare[3],))
    with pytest.raises(RuntimeError, match="not batched by torch.vmap"): torch.vmap(lambda s: METHODS["eager"](*bare[:3], s, y))(bare[3].expand(2))


@pytest.mark.parametrize("name", ("eager", "chunks", "recompute"))
def test_autocast(name):
    *leaves, y, _, _ = problem(f32)
    def call(*t):
        with torch.autocast("cpu", bf16): return CALLS[name](*t, y)
    assert faults(call, leaves, lambda x, w, b, s: formula(logits_of(x, w, b, s), y), 3e-2) == []


def test_the_scale_is_not_rounded_to_the_features():
    t, s = torch.full((64,), 1.9921875, dtype=bf16), torch.tensor(1.003, requires_grad=True)
    made = learned.scaled_by(t, s)
    assert made.dtype == bf16 and (made == 2).all()
    ds, = torch.autograd.grad(made, s, torch.full_like(made, 2.0**-9))
    assert ds == t.double().sum() * 2.0**-9 and ds.dtype == f32


@pytest.mark.parametrize("dtype, scale_dtype", [(f64, f64), (bf16, f32)])
def test_operators_are_as_declared(dtype, scale_dtype):
    t, s = torch.randn(5, 3).to(dtype).requires_grad_(), torch.tensor(2.0, dtype=scale_dtype, requires_grad=True)
    torch.library.opcheck(torch.ops.fusedloss.scaled_by.default, (t, s), test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


REFUSED = {
    "one element": (lambda: torch.ones(1), r"expected a number or a 0-dim tensor, got shape \[1\]"),
    "integers": (lambda: torch.tensor(2), "expected a floating dtype of 16, 32 or 64 bits, got torch.int64"),
    "complex": (lambda: torch.tensor(2j), "expected a floating dtype of 16, 32 or 64 bits, got torch.complex64"),
    "meta": (lambda: torch.ones((), device="meta"), "expected input's device cpu, got meta"),
    "negative": (lambda: -1.0, "expected a positive number, got -1.0"),
    "word": (lambda: "2", "expected a positive number, got"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_scale_is_refused(case):
    make, words = REFUSED[case]
    x, w, b, _, y, *_ = problem(f32)
    kept = x.detach().clone()
    for name in CALLS.keys() - {"module"}:
        with pytest.raises(ValueError, match="logit_scale: " + words): CALLS[name](x, w, b, make(), y)
    for call in (lambda s: fl.linear_log_probs(x, w, y, logit_scale=s), lambda s: fl.log_probs(x @ w.T, y, logit_scale=s), lambda s: fl.tiled_linear_cross_entropy(x, w, y, logit_scale=s)):
        with pytest.raises(ValueError, match="logit_scale: " + words): call(make())
    if case != "meta":
        with pytest.raises(ValueError, match="scale: expected"): fl.LinearCrossEntropyLoss(H, V, logit_scale=make())
    with pytest.raises(ValueError, match="scale: expected"): fl.margin_cross_entropy(x, w, y, margin=CosFace(scale=make()))
    assert x.grad is None and torch.equal(x, kept)


def test_heads_that_cannot_learn_a_scale():
    s, (x, w, _, _, y, *_) = torch.tensor(7.0), problem(f32)
    with pytest.raises(ValueError, match="scale: expected a positive number, got"): Circle(scale=s)
    with pytest.raises(ValueError, match="conflict: expected None beside a scale that is a tensor, got 0.5"): fl.PartialFC(V, H, margin=CosFace(scale=s), conflict=0.5)
    with pytest.raises(ValueError, match="logit_scale: expected a number beside LMCL"): fl.tiled_linear_cross_entropy(x, w, y, scale=8.0, logit_scale=s)


def test_other_errors_are_told_as_before():
    x, w, b, s, y, *_ = problem(f32)
    for wrong, words in ((dict(input=[1.0]), "input: expected"), (dict(input=x.long()), "input: expected a floating"), (dict(linear_bias=b.detach()[1:]), "linear_bias"), (dict(linear_bias="b"), "linear_bias"), (dict(linear_bias=b.detach().to("meta")), "linear_bias")):
        with pytest.raises(ValueError, match=words): fl.linear_cross_entropy(**{**dict(input=x, linear_weight=w, target=y, linear_bias=b, logit_scale=s), **wrong})


# --- planted bugs ---

BUGS = {
    "the last chunk is left out": ("[torch.where(g[i] == 0, 0.0, g[i].to(acc) * t[i]).sum() for i in tile_slices(len(t), CHUNK)]", "[torch.where(g[i] == 0, 0.0, g[i].to(acc) * t[i]).sum() for i in tile_slices(len(t), CHUNK)[:-1]]"),
    "the gradient is not scaled": ("dt = scaled_fwd(g, s) if need_t", "dt = g.clone() if need_t"),
    "a scale in the features' dtype": ("return s.to(acc_dtype(t.dtype)).reshape(1)", "return s.to(t.dtype).to(acc_dtype(t.dtype)).reshape(1)"),
    "a gradient in half precision": ("g[i].to(acc) * t[i]", "(g[i] * t[i]).to(acc)"),
    "what is ignored counts": ("torch.where(g[i] == 0, 0.0, g[i].to(acc) * t[i])", "(g[i].to(acc) * t[i])"),
    "the gradient of a scale in the features' dtype": ("grad_of_scale(g, t).to(s.dtype)", "grad_of_scale(g, t).to(t.dtype)"),
    "no bias": ("for t in (input, *others))", "for t in (input, *others[:0])) + others"),
    "any scale": ('    check_scale(scale, input.device, "input")\n    return tuple', "    return tuple"),
}


def any_fault(module) -> list[str]:
    "What products of many chunks and a folded bias show"
    module.CHUNK = 16
    made = torch.Generator().manual_seed(0)
    t, up = (torch.randn(9, 5, generator=made).to(bf16) for _ in range(2))
    t[3], up[3] = torch.inf, 0.0
    t, s, found = t.requires_grad_(), torch.tensor(1.003, requires_grad=True), []
    try:
        dt, ds = torch.autograd.grad(module.scaled_by(t, s), (t, s), up)
        x, b = module.fold_scale(s, t, torch.ones(5))
        module.fold_scale(torch.ones(()), t, None)
    except RuntimeError as error: return [repr(error)]
    rows = t.detach().double()
    rows[3] = 0.0
    exact = (rows * up.double()).sum()
    if not torch.equal(dt, (up.float() * 1.003).to(bf16)): found.append("dt")
    if ds.dtype != f32 or not abs(ds - exact) < 1e-5: found.append("ds")
    if not torch.equal(x, (t.float() * 1.003).to(bf16)): found.append("x")
    if not torch.equal(b, torch.full((5,), 1.003)): found.append("b")
    try: module.fold_scale(torch.ones(1), t)
    except ValueError: return found
    return [*found, "any scale"]


def test_the_unchanged_source_passes(tmp_path):
    assert any_fault(planted(learned, tmp_path, *unchanged([bug for name, bug in BUGS.items() if name in ("no bias", "a scale in the features' dtype", "the gradient is not scaled")]))) == []


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert any_fault(planted(learned, tmp_path, *BUGS[bug])), "nothing noticed"


def test_a_scale_is_taken_out_of_options_and_folded_into_features():
    t, s = torch.randn(5, 7, dtype=torch.float64), torch.tensor(-2.5, dtype=torch.float64, requires_grad=True)
    options = dict(softcap=30.0, logit_scale=s)
    assert learned.take_scale(options) is s and options == dict(softcap=30.0) and learned.take_scale(dict(logit_scale=2.0)) is None
    x, bias = learned.fold_scale(s, t, None)
    assert bias is None and torch.equal(x, t * s) and learned.fold_scale(None, t, None)[0] is t
    leaf = torch.tensor(2.0, requires_grad=True)
    assert torch.autograd.grad(learned.gathered_scale(leaf, lambda g: 4 * g) * 3, leaf)[0] == 12


def test_a_product_is_rounded_once():
    half, fine = torch.full((64,), 1.9921875, dtype=torch.bfloat16), torch.tensor(1.003)
    assert (learned.scaled_by(half, fine) == 2).all() and fine.bfloat16() == 1
