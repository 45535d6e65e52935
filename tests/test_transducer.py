"""A transducer's loss without its joint tensor: every path on small grids, the joint in float64, all gradients, both ways, ragged and wrong input, memory, promises."""
import functools
import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import fusedloss.lattices as lattices
import fusedloss.transducer as transducer
from fusedloss import linear_transducer_loss, recompute
from fusedloss.core import triton
from fusedloss.core.tiling import Tiling
from grids import thorough_but
from helpers import everywhere, has_no_second_derivative, need_kernels, off, planted, replays
from workbook.measure import peak_memory, saved_tensors, trace_memory

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF = math.inf
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
NAMES = "encoder", "predictor", "weight", "bias"


def take_kernels(monkeypatch, yes):
    "Let the kernels take all that they can, or nothing"
    takes = lambda x: yes and x.dtype != f64 and x.numel() > 0
    everywhere(monkeypatch, transducer, "has_kernel", takes)
    everywhere(monkeypatch, transducer, "takes_kernel", lambda x: takes(x))


@pytest.fixture(params=["plain", "kernels"])
def way(request, device, monkeypatch):
    "The device, on which either PyTorch or the kernels take everything they can"
    if request.param == "kernels":
        need_kernels(device)
    take_kernels(monkeypatch, request.param == "kernels")
    return device


@pytest.fixture(params=["plain", pytest.param("kernels", marks=pytest.mark.thorough)])
def place(request, device, monkeypatch):
    "The same, for what the kernels have no code for"
    if request.param == "kernels":
        need_kernels(device)
    take_kernels(monkeypatch, request.param == "kernels")
    return device


# the definition, in float64, by Python's numbers

def arcs_from(t, u, T, U, durations):
    "Where the arcs of a node lead, and what they take: (t, u, is a label, index of its duration)"
    for is_label in (False, True):
        for i, d in enumerate(durations or [0 if is_label else 1]):
            to = t + d, u + is_label
            if is_label and u < U and to[0] < T or not is_label and d and (to[0] < T or to == (T, U)):
                yield *to, is_label, i


def all_paths(T, U, durations=None):
    "Each path as its arcs"
    def walk(t, u):
        if (t, u) == (T, U):
            yield []
            return
        for t2, u2, is_label, i in arcs_from(t, u, T, U, durations):
            for rest in walk(t2, u2):
                yield [(t, u, is_label, i), *rest]
    yield from walk(0, 0)


def arc_scores(z, y, blank, durations, sigma):
    "The score of an arc, of logits z [T,U+1,V]"
    D = len(durations or ())
    tokens = z[..., :z.shape[-1] - D].log_softmax(-1) - sigma
    lengths = z[..., z.shape[-1] - D:].log_softmax(-1) if D else None
    return lambda t, u, is_label, i: tokens[t, u, y[u] if is_label else blank] + (lengths[t, u, i] if D else 0)


def by_paths(z, y, blank=0, durations=None, sigma=0.0):
    "The loss of one sequence, from every path"
    score = arc_scores(z, y, blank, durations, sigma)
    scores = [sum(score(*arc) for arc in path) for path in all_paths(len(z), len(y), durations)]
    return -torch.stack(scores).logsumexp(0) if scores else z.new_full((), INF)


def by_recursion(z, y, blank=0, durations=None, sigma=0.0):
    "The same by alpha, node by node"
    T, U, score, alpha = len(z), len(y), arc_scores(z, y, blank, durations, sigma), {(0, 0): [z.new_zeros(())]}
    for t, u in itertools.product(range(T), range(U + 1)):
        if (t, u) in alpha:
            here = torch.stack(alpha[t, u]).logsumexp(0)
            for t2, u2, *arc in arcs_from(t, u, T, U, durations):
                alpha.setdefault((t2, u2), []).append(here + score(t, u, *arc))
    return -torch.stack(alpha[T, U]).logsumexp(0) if (T, U) in alpha else z.new_full((), INF)


ACTIVATE = {"tanh": torch.tanh, "relu": torch.relu, None: lambda x: x}


@dataclass(frozen=True)
class Case:
    "One call: sizes N, T, U, J, V, of ragged sequences unless `full`"
    sizes: tuple[int, int, int, int, int] = (3, 5, 3, 6, 7)
    activation: str | None = "tanh"
    bias: bool = True
    blank: int = 0
    durations: tuple[int, ...] | None = None
    sigma: float = 0.0
    fastemit: float = 0.0
    clamp: float = -1.0
    budget: int | None = None
    dtype: torch.dtype = f64
    frames: tuple[int, ...] | None = None
    labels: tuple[int, ...] | None = None
    spread: float = 1.5
    offset: float = 0.0
    reduction: str = "none"

    def tensors(self, device="cpu"):
        "Leaves (encoder, predictor, weight, bias or None), targets, lengths"
        (N, T, U, J, V), g = self.sizes, torch.Generator().manual_seed(0)
        V += len(self.durations or ())
        draw = lambda *size: self.spread * torch.randn(size, generator=g, dtype=f64)
        leaves = draw(N, T, J), draw(N, U + 1, J), draw(V, J), draw(V) + self.offset if self.bias else None
        leaves = [None if t is None else t.to(self.dtype).to(device).requires_grad_() for t in leaves]
        tokens = [v for v in range(V - len(self.durations or ())) if v != self.blank]
        y = torch.tensor(tokens)[torch.randint(len(tokens), (N, U), generator=g)]
        frames = self.frames or [max(1, T - n) for n in range(N)]
        labels = self.labels or [max(0, U - n) for n in range(N)]
        return leaves, y.to(device), torch.tensor(frames, dtype=torch.int64), torch.tensor(labels, dtype=torch.int64)

    def options(self):
        return dict(activation=self.activation, blank=self.blank, reduction=self.reduction, fastemit_lambda=self.fastemit, clamp=self.clamp,
                    durations=self.durations, sigma=self.sigma, memory_budget=self.budget)


def truth(case, tensors, one=by_recursion):
    "Losses, and gradients for the upstream of `upstream_of`, by the joint in float64"
    leaves, y, frames, labels = tensors
    e, p, w, b = (None if t is None else t.detach().cpu().double().requires_grad_() for t in leaves)
    losses, emphasis = [], []
    for n, (T, U) in enumerate(zip(frames.tolist(), labels.tolist())):
        h = ACTIVATE[case.activation](e[n, :T, None] + p[n, None, :U + 1])
        z = h @ w.T + (0 if b is None else b)
        if case.clamp > 0 and z.requires_grad: z.register_hook(functools.partial(kept_within, case, upstream_of(len(frames))[n]))
        loss = one(z, y[n, :U].tolist(), case.blank, case.durations, case.sigma)
        losses.append(loss)
        emphasis.append(with_fastemit(case, z, y[n, :U].cpu(), loss))
    given = [t for t in (e, p, w, b) if t is not None]
    total = sum((g * l for g, l in zip(upstream_of(len(losses)), emphasis) if l.requires_grad), start=e.sum() * 0)
    found = torch.autograd.grad(total, given, allow_unused=True, materialize_grads=True)
    return torch.stack([l.detach() for l in losses]), [*found, None][:4]


def kept_within(case, upstream, d):
    "A joint's gradient whose tokens' numbers, of a loss of its own, are within ±clamp"
    tokens, most = d.shape[-1] - len(case.durations or ()), case.clamp * abs(upstream)
    return torch.cat([d[..., :tokens].clamp(-most, most), d[..., tokens:]], -1)


def with_fastemit(case, z, y, loss):
    "The loss for backward: λ times the labels' part besides"
    if not case.fastemit or not len(y):
        return loss
    own = z[..., :z.shape[-1] - len(case.durations or ())].log_softmax(-1)[:, torch.arange(len(y)), y]
    return loss - case.fastemit * (label_flows(case, z.detach(), y) * own).sum()


def label_flows(case, z, y):
    "Probability that a path takes each label arc [T,U]: the derivative of log Z by a number added to its score"
    bumps = torch.zeros(len(z), len(y), dtype=f64, requires_grad=True)
    score = arc_scores(z, y.tolist(), case.blank, case.durations, case.sigma)
    T, U, alpha = len(z), len(y), {(0, 0): [z.new_zeros(())]}
    for t, u in itertools.product(range(T), range(U + 1)):
        if (t, u) in alpha:
            here = torch.stack(alpha[t, u]).logsumexp(0)
            for t2, u2, is_label, i in arcs_from(t, u, T, U, case.durations):
                more = bumps[t, u] if is_label else 0
                alpha.setdefault((t2, u2), []).append(here + score(t, u, is_label, i) + more)
    return torch.autograd.grad(torch.stack(alpha[T, U]).logsumexp(0), bumps)[0]


def upstream_of(n):
    return torch.arange(n, dtype=f64) * 0.75 - 1


def run(case, tensors, loss=linear_transducer_loss, **more):
    "Losses and gradients of the library"
    (e, p, w, b), y, frames, labels = tensors
    losses = loss(e, p, w, y, frames, labels, linear_bias=b, **case.options() | more)
    given = [t for t in (e, p, w, b) if t is not None]
    found = torch.autograd.grad(losses, given, upstream_of(len(losses)).to(losses), retain_graph=True)
    return losses.detach(), [*found, None][:4]


def wrong(case, device="cpu", tolerance=None, loss=linear_transducer_loss, **more):
    "What the library gets wrong, in words"
    tensors = case.tensors(device)
    tolerance = tolerance or {f64: 1e-11, f32: 2e-5, bf16: 2e-2, f16: 4e-3}[case.dtype]
    (expected, exact), (losses, got) = truth(case, tensors), run(case, tensors, loss, **more)
    assert losses.dtype == (f64 if case.dtype == f64 else f32)
    found = off("the losses", losses[expected < INF], expected[expected < INF], tolerance)
    if not torch.equal(losses.cpu() == INF, expected == INF):
        found.append(f"infinite at {losses == INF}")
    for name, a, e, leaf in zip(NAMES, got, exact, tensors[0]):
        if e is not None:
            assert a.dtype == leaf.dtype
            found += off(f"the gradient of {name}", a, e, tolerance, 1e-12)
    return found


def right(*given, **more):
    assert not (found := wrong(*given, **more)), found


# --- the definition ---

@pytest.mark.parametrize("durations", [None, (0, 1, 2), (2, 1), (1, 3)])
@pytest.mark.parametrize("T, U", [(1, 0), (1, 2), (2, 0), (3, 2), (4, 3)])
def test_every_path(T, U, durations):
    case = Case(sizes=(1, T, U, 3, 4), durations=durations, sigma=0.05 if durations else 0.0, frames=(T,), labels=(U,))
    tensors = case.tensors()
    expected, _ = truth(case, tensors, by_paths)
    torch.testing.assert_close(truth(case, tensors)[0], expected)
    right(case)


def published(z):
    "Leaves whose joint is z [T,U+1,V]: relu of a frame's and a state's sum is 1 in one feature for each node"
    T, columns, V = z.shape
    at = torch.arange(T * columns).view(T, columns)
    e, p = torch.zeros(1, T, T * columns, dtype=z.dtype), torch.full((1, columns, T * columns), -1.0, dtype=z.dtype)
    for t, u in itertools.product(range(T), range(columns)):
        e[0, t, at[t, u]], p[0, u, at[t, u]] = 1, 0
    return e, p, z.flatten(0, 1).T.contiguous()


Z = torch.tensor([[[.1, .6, .1, .1, .1], [.1, .1, .6, .1, .1], [.1, .1, .2, .8, .1]], [[.1, .6, .1, .1, .1], [.1, .1, .2, .1, .1], [.7, .1, .2, .1, .1]]], dtype=f64)


@pytest.mark.parametrize("blank, loss", [(0, 4.495666), (4, 5.0956669)])
def test_published_values(blank, loss):
    e, p, w = published(Z)
    w.requires_grad_()
    got = linear_transducer_loss(e, p, w, torch.tensor([[1, 2]]), [2], [2], activation="relu", blank=blank)
    assert abs(got.item() - loss) < 2e-6
    dz = torch.autograd.grad(got, w)[0].T
    if blank == 0:
        torch.testing.assert_close(dz[0], torch.tensor([-.13116688, -.3999269, .17703125, .17703125, .17703125], dtype=f64), atol=2e-7, rtol=0)


def test_published_values_with_durations():
    e, p, w = published(torch.zeros(3, 2, 7, dtype=f64))
    w.requires_grad_()
    got = linear_transducer_loss(e, p, w, torch.tensor([[1]]), [3], [1], activation="relu", blank=3, durations=[0, 1, 2], sigma=0.05)
    assert abs(got.item() - 4.155739) < 1e-6
    dz = torch.autograd.grad(got, w)[0].T[0]
    # of logits that are all equal, sums over the tokens and over the durations
    torch.testing.assert_close(dz[:4], torch.tensor([.25, -.64962804, .25, .14962798], dtype=f64), atol=1e-6, rtol=0)
    torch.testing.assert_close(dz[4:], torch.tensor([.2672583, -.16792619, -.09933221], dtype=f64), atol=1e-6, rtol=0)


def test_of_equal_scores():
    T, U, V = 7, 4, 9
    zero = lambda *size: torch.zeros(size, dtype=f64)
    got = linear_transducer_loss(zero(1, T, 2), zero(1, U + 1, 2), zero(V, 2), torch.ones(1, U, dtype=torch.int64), [T], [U])
    assert math.isclose(got.item(), (T + U) * math.log(V) - math.log(math.comb(T - 1 + U, U)))


# --- every option, both ways ---

CASES = {
    "tanh": Case(), "relu": Case(activation="relu"), "no activation": Case(activation=None), "no bias": Case(bias=False),
    "another blank": Case(blank=3), "the last blank": Case(blank=6), "FastEmit": Case(fastemit=0.3), "a clamp": Case(clamp=0.05), "a clamp, durations, FastEmit": Case(clamp=0.1, durations=(0, 1, 2), fastemit=0.3),
    "durations": Case(durations=(0, 1, 2)), "durations, σ, FastEmit": Case(durations=(2, 0, 1), sigma=0.05, fastemit=0.5, blank=4),
    "durations that cannot add up": Case(durations=(2,), frames=(5, 4, 1), labels=(0, 0, 0)),
    "chunks of few nodes": Case(budget=600), "chunks of one node": Case(budget=1), "chunks, durations": Case(budget=900, durations=(0, 1, 3)),
    "full": Case(frames=(5, 5, 5), labels=(3, 3, 3)), "one frame": Case(sizes=(2, 1, 3, 4, 5)), "no label": Case(sizes=(3, 4, 0, 4, 5)),
    "one frame, no label": Case(sizes=(2, 1, 0, 4, 5)), "some without labels": Case(frames=(1, 5, 2), labels=(0, 0, 3)),
    "two classes": Case(sizes=(2, 4, 2, 3, 2)),
    "wide scores": Case(spread=6.0), "an offset": Case(offset=1e6), "more classes than a tile": Case(sizes=(2, 4, 2, 20, 150)),
}
EXACT = {"an offset": 1e-8}


@pytest.mark.parametrize("name", CASES)
def test_every_option(name):
    right(CASES[name], tolerance=EXACT.get(name))


def in_dtype(name, dtype):
    "The case with sizes that 16 bits can follow"
    case = CASES[name]
    (N, T, U, *others) = case.sizes
    sizes = case.sizes if case.frames or case.labels else (N, min(T, 4), min(U, 2), *others)  # the interpreter is slow
    return replace(case, sizes=sizes, dtype=dtype, spread=min(case.spread, 1.0), offset=min(case.offset, 8.0))


@pytest.mark.parametrize("name", thorough_but(CASES, "tanh", "relu", "durations, σ, FastEmit", "chunks of few nodes"))
def test_float32(way, name):
    right(in_dtype(name, f32), way)


HALVES = ["tanh", "relu", "no activation", "no bias", "FastEmit", "durations, σ, FastEmit", "chunks of few nodes", "one frame", "no label",
          "durations that cannot add up", "more classes than a tile", "a clamp", "a clamp, durations, FastEmit"]


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize("name", thorough_but(HALVES, "tanh", "no bias", "durations, σ, FastEmit", "a clamp"))
def test_half_precision(way, name, dtype):
    "Against the same rounded inputs in float64: h, and dz by the kernels, are rounded"
    if way == "cpu" and dtype == bf16 and transducer.takes_kernel(torch.zeros(1)): pytest.skip("the interpreter has no bfloat16")
    right(in_dtype(name, dtype), way)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions(reduction):
    case = Case(reduction=reduction)
    leaves, *given = case.tensors()
    losses, _ = truth(case, (leaves, *given))
    e, p, w, b = leaves
    got = linear_transducer_loss(e, p, w, *given, linear_bias=b, reduction=reduction)
    torch.testing.assert_close(got.detach(), losses.mean() if reduction == "mean" else losses.sum())
    each = linear_transducer_loss(e, p, w, *given, linear_bias=b, reduction="none")
    for a, s in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(each.mean() if reduction == "mean" else each.sum(), leaves)):
        torch.testing.assert_close(a, s)


@pytest.mark.parametrize("name", ["tanh", "durations"])
def test_the_loss_alone(place, name):
    "Without a gradient: the same losses, and no flows are made"
    case = in_dtype(name, f32)
    (e, p, w, b), *given = case.tensors(place)
    losses, _ = run(case, ((e, p, w, b), *given))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        everywhere(patch, lattices, "arc_flows", None)
        assert torch.equal(linear_transducer_loss(e, p, w, *given, linear_bias=b, **case.options()), losses)


def test_fastemit_leaves_the_loss():
    (e, p, w, b), *given = Case().tensors()
    assert torch.equal(linear_transducer_loss(e, p, w, *given, linear_bias=b), linear_transducer_loss(e, p, w, *given, linear_bias=b, fastemit_lambda=0.7))


def test_no_sequences_no_loss():
    (e, p, w, b), *given = Case(sizes=(0, 4, 2, 3, 5)).tensors()
    loss = linear_transducer_loss(e, p, w, *given, linear_bias=b)
    assert loss.item() == 0 and all((g == 0).all() for g in torch.autograd.grad(loss, (e, p, w, b)))


# --- what is given in other forms ---

def test_modules_give_weight_and_bias():
    (e, p, _, _), *given = Case().tensors()
    layer, table = nn.Linear(6, 7, dtype=f64), nn.Embedding(7, 6, dtype=f64)
    assert torch.equal(linear_transducer_loss(e, p, layer, *given), linear_transducer_loss(e, p, layer.weight, *given, linear_bias=layer.bias))
    assert torch.equal(linear_transducer_loss(e, p, table, *given), linear_transducer_loss(e, p, table.weight, *given))


def test_lengths_in_every_form():
    (e, p, w, _), y, frames, labels = Case().tensors()
    expected = linear_transducer_loss(e, p, w, y, frames, labels)
    for form in (lambda t: t.tolist(), lambda t: tuple(t.tolist()), lambda t: t.int()):
        assert torch.equal(linear_transducer_loss(e, p, w, y.int(), form(frames), form(labels)), expected)


def test_padding_is_not_read(way):
    (e, p, w, b), y, frames, labels = in_dtype("tanh", f32).tensors(way)
    hostile = [t.detach().clone() for t in (e, p)]
    y_hostile = y.clone()
    for n in range(3):
        hostile[0][n, frames[n]:], hostile[1][n, labels[n] + 1:], y_hostile[n, labels[n]:] = math.nan, math.nan, -7
    hostile = [t.requires_grad_() for t in hostile]
    case = in_dtype("tanh", f32)
    losses, grads = run(case, ((e, p, w, b), y, frames, labels))
    again, found = run(case, ((*hostile, w, b), y_hostile, frames, labels))
    assert torch.equal(losses, again) and all(torch.equal(a, g) for a, g in zip(found, grads))
    for n in range(3):
        assert (found[0][n, frames[n]:] == 0).all() and (found[1][n, labels[n] + 1:] == 0).all()


def test_strided_inputs(place):
    case = in_dtype("tanh", f32)
    (e, p, w, b), *given = case.tensors(place)
    strided = [e.detach().transpose(0, 1).contiguous().transpose(0, 1), p.detach().mT.contiguous().mT, w.detach().T.contiguous().T,
               torch.stack([b.detach(), b.detach()], 1)[:, 0]]
    losses, grads = run(case, ((e, p, w, b), *given))
    again, found = run(case, ([t.requires_grad_() for t in strided], *given))
    torch.testing.assert_close(again, losses)
    for a, g in zip(found, grads): torch.testing.assert_close(a, g)


@pytest.mark.parametrize("wanted", [c for k in (1, 2, 3) for c in itertools.combinations(range(4), k)])
def test_gradients_where_they_are_asked_for(wanted):
    (e, p, w, b), *given = Case().tensors()
    every = torch.autograd.grad(linear_transducer_loss(e, p, w, *given, linear_bias=b), (e, p, w, b))
    leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate((e, p, w, b))]
    linear_transducer_loss(*leaves[:3], *given, linear_bias=leaves[3]).backward()
    for i, leaf in enumerate(leaves):
        assert leaf.grad is None if i not in wanted else torch.equal(leaf.grad, every[i])


def test_a_sequence_with_nan_is_alone(place):
    case = in_dtype("tanh", f32)
    (e, p, w, b), *given = case.tensors(place)
    losses, grads = run(case, ((e, p, w, b), *given))
    spoilt = e.detach().clone()
    spoilt[1, 0, 0] = math.nan
    again, found = run(case, ((spoilt.requires_grad_(), p, w, b), *given))
    assert again[1].isnan() and torch.equal(again[[0, 2]], losses[[0, 2]])
    for a, g in zip(found[:2], grads): torch.testing.assert_close(a[[0, 2]], g[[0, 2]])


def test_an_unused_class_may_be_masked(place):
    case = in_dtype("tanh", f32)
    (e, p, w, b), y, *given = case.tensors(place)
    used = set(y.flatten().tolist()) | {0}
    masked = next(v for v in range(7) if v not in used) if len(used) < 7 else None
    if masked is None:
        y = torch.where(y == 6, 5, y)
        masked = 6
    hidden = b.detach().clone()
    hidden[masked] = -INF
    rest = [v for v in range(7) if v != masked]
    index = torch.zeros(7, dtype=torch.int64, device=place)
    index[rest] = torch.arange(6, device=place)
    losses, grads = run(case, ((e, p, w, hidden.requires_grad_()), y, *given))
    expected, exact = run(case, ((e, p, w.detach()[rest].requires_grad_(), b.detach()[rest].requires_grad_()), index[y], *given))
    torch.testing.assert_close(losses, expected)
    for a, g in zip(grads[:2], exact): torch.testing.assert_close(a, g)
    assert (grads[2][masked] == 0).all() and grads[3][masked] == 0


# --- promises ---

def test_gradcheck():
    (e, p, w, b), *given = Case(sizes=(2, 3, 2, 2, 4), spread=0.7).tensors()
    for options in ({}, dict(durations=(1, 0), sigma=0.1)):
        if options:
            w, b = torch.randn(6, 2, dtype=f64).requires_grad_(), torch.randn(6, dtype=f64).requires_grad_()
        assert torch.autograd.gradcheck(lambda e, p, w, b: linear_transducer_loss(e, p, w, *given, linear_bias=b, reduction="none", **options), (e, p, w, b))


def test_no_second_derivative():
    (e, p, w, b), *given = Case().tensors()
    assert has_no_second_derivative(linear_transducer_loss(e, p, w, *given, linear_bias=b), e)


def test_upstream_of_zero():
    (e, p, w, b), *given = Case().tensors()
    grads = torch.autograd.grad(linear_transducer_loss(e, p, w, *given, linear_bias=b, reduction="none"), (e, p, w, b), torch.tensor([1.0, 0, 0], dtype=f64))
    assert (grads[0][1:] == 0).all() and (grads[1][1:] == 0).all() and grads[0][0].abs().sum() > 0


def test_the_same_bits_again(place):
    case = in_dtype("chunks of few nodes", f32)
    tensors = case.tensors(place)
    (losses, grads), (again, found) = run(case, tensors), run(case, tensors)
    assert torch.equal(losses, again) and all(torch.equal(a, g) for a, g in zip(found, grads))


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_autocast(place, dtype):
    if place == "cpu" and dtype == bf16 and transducer.takes_kernel(torch.zeros(1)): pytest.skip("the interpreter has no bfloat16")
    (e, p, w, b), *given = in_dtype("tanh", f32).tensors(place)
    with torch.autocast(torch.device(place).type, dtype):
        loss = linear_transducer_loss(e, p, w, *given, linear_bias=b)
    grads = torch.autograd.grad(loss, (e, p, w, b))
    halves = [t.detach().to(dtype).requires_grad_() for t in (e, p, w, b)]
    expected = linear_transducer_loss(*halves[:3], *given, linear_bias=halves[3])
    assert torch.equal(loss, expected) and loss.dtype == f32
    for a, g in zip(grads, torch.autograd.grad(expected, halves)):
        assert a.dtype == f32 and torch.equal(a, g.float())


def test_small_gradients_in_float16(place):
    "A loss that is divided by much keeps its gradients"
    case = in_dtype("tanh", f16)
    (e, p, w, b), *given = case.tensors(place)
    loss = lambda scale: linear_transducer_loss(e, p, w, *given, linear_bias=b, reduction="sum") * scale
    for whole, small in zip(torch.autograd.grad(loss(1.0), (e, p, w, b)), torch.autograd.grad(loss(2.0**-8), (e, p, w, b))):
        torch.testing.assert_close(small.float() * 2**8, whole.float(), atol=2e-3, rtol=1e-2)


def test_checkpointing_and_hooks():
    (e, p, w, b), *given = Case().tensors()
    call = lambda e, p, w, b: linear_transducer_loss(e, p, w, *given, linear_bias=b)
    expected = torch.autograd.grad(call(e, p, w, b), (e, p, w, b))
    with torch.autograd.graph.save_on_cpu():
        loss = torch.utils.checkpoint.checkpoint(call, e, p, w, b, use_reentrant=False)
    for a, g in zip(torch.autograd.grad(loss, (e, p, w, b)), expected): assert torch.equal(a, g)


@pytest.mark.parametrize("durations", [None, (0, 1)])
def test_compile_with_changing_sizes(durations):
    call = lambda e, p, w, b, y, frames, labels: linear_transducer_loss(e, p, w, y, frames, labels, linear_bias=b, durations=durations)
    graphs = []

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counting)
    for N, T, U in ((2, 5, 3), (3, 5, 4), (4, 9, 4)):
        (e, p, w, b), *given = Case(sizes=(N, T, U, 6, 7), durations=durations, frames=(T,) * N, labels=(U,) * N).tensors()
        got = compiled(e, p, w, b, *given)
        torch.testing.assert_close(got, call(e, p, w, b, *given))
        for a, g in zip(torch.autograd.grad(got, (e, p, w, b)), torch.autograd.grad(call(e, p, w, b, *given), (e, p, w, b))):
            torch.testing.assert_close(a, g)
    assert len(graphs) == 1


def test_on_meta():
    meta = lambda *size: torch.zeros(size, device="meta")
    loss = linear_transducer_loss(meta(2, 5, 4).requires_grad_(), meta(2, 4, 4), meta(7, 4), meta(2, 3).long(), meta(2).long(), meta(2).long())
    assert loss.is_meta and loss.shape == ()


def test_opcheck():
    (e, p, w, b), y, frames, labels = Case(sizes=(2, 3, 2, 4, 5), frames=(3, 3), labels=(2, 2)).tensors()  # else some memory is left as it was
    torch.library.opcheck(transducer.linear_transducer, (e, p, w, y, frames, labels, b, 0.0, -1.0, [], 0.0, 0, "tanh", 0, True, None))


# --- memory ---

def test_no_joint_in_memory():
    N, T, U, J, V = 2, 40, 19, 8, 512
    (e, p, w, b), *given = Case(sizes=(N, T, U, J, V), dtype=f32, frames=(T,) * N, labels=(U,) * N).tensors()
    nodes, budget = N * T * (U + 1), 2**20
    step = lambda: linear_transducer_loss(e, p, w, *given, linear_bias=b, memory_budget=budget).backward()
    largest = max((event.bytes for event in trace_memory(step)), default=0)
    assert largest < nodes * V * 4 / 8  # of a joint tensor
    assert peak_memory(step) < 3 * budget
    kept = saved_tensors(lambda: linear_transducer_loss(e, p, w, *given, linear_bias=b), e, p, w, b, *given)
    assert sum(t.untyped_storage().nbytes() for t in kept) <= 16 * nodes + 64


@torch.no_grad()
@pytest.mark.parametrize("dtype", [f16, bf16])
def test_a_chunk_holds_the_bytes_that_are_counted(dtype, monkeypatch):
    "Of the Triton kernels' ways, whose launches are left out: memory alone matters. Products are a GPU's, which copies no operand"
    pytest.importorskip("triton", reason="Triton is not installed")
    nothing = lambda *args, **options: None
    take_kernels(monkeypatch, True)
    for module, name in ((triton, "launch_kernel"), (transducer, "launch_dz"), (transducer, "add_product")):
        everywhere(monkeypatch, module, name, nothing)
    everywhere(monkeypatch, recompute, "launcher", lambda *args: nothing)
    everywhere(monkeypatch, recompute, "fastest", lambda kernel, x, v, tiling, *args, **options: tiling)
    everywhere(monkeypatch, transducer, "wide_product", lambda x, y: x.new_empty(len(x), y.shape[1], dtype=f32))
    everywhere(monkeypatch, recompute, "tiling_of", lambda *args: Tiling(False, 128, 128, 64))
    sizes = 1, 64, 15, 64, 256
    (e, p, w, b), y, frames, labels = Case(sizes=sizes, dtype=dtype, frames=(64,), labels=(15,)).tensors()
    a, lengths = transducer.pack_nodes(e, len(w), y, frames, labels, 0)
    R, rows, flows = a.rows, torch.ones(2, a.rows), torch.ones(2, a.rows)
    forward, back = (transducer.node_bytes(e, w, back) for back in (False, True))
    k, layer = transducer.Joint(e, p, a, 0, "tanh"), transducer.layer_of(e, w, b)
    assert peak_memory(lambda: transducer.node_scores(k, slice(0, R), layer, rows, flows)) == R * forward
    peaks = [peak_memory(lambda: transducer.linear_transducer_bwd(
        torch.ones(1), e, p, w, y, frames, labels, b, rows, flows, torch.ones(R, 0), lengths, 0.0, -1.0, 0, "tanh", n * back, *[True] * 4)) for n in (R // 2, R)]
    assert 0 <= back - (peaks[1] - peaks[0]) / (R // 2) <= 12  # a clamp and a token-and-duration transducer need a few


def test_backward_does_not_check_again(monkeypatch):
    (e, p, w, b), *given = Case().tensors()
    loss = linear_transducer_loss(e, p, w, *given, linear_bias=b)
    for name in ("check_nodes", "clean_nodes"): everywhere(monkeypatch, lattices, name, no_check)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (e, p, w, b)))
    with pytest.raises(AssertionError, match="checked"): linear_transducer_loss(e, p, w, *given, linear_bias=b)


def no_check(*given):
    raise AssertionError("checked")


# --- input that cannot be ---

def changed(**other):
    "The arguments of a call that is right, with others"
    (e, p, w, b), y, frames, labels = Case(frames=(5, 4, 3), labels=(3, 2, 1)).tensors()
    given = dict(encoder=e, predictor=p, linear_weight=w, targets=y, encoder_lengths=frames, target_lengths=labels, linear_bias=b)
    return given | {k: v(given[k]) if callable(v) else v for k, v in other.items()}


def put(t, at, value):
    t = t.clone()
    t[at] = value
    return t


WRONG = {
    "more frames than there are": (dict(encoder_lengths=[6, 4, 3]), r"encoder_lengths\[0\] is 6: expected 1 ≤ length ≤ 5"),
    "no frames": (dict(encoder_lengths=[5, 0, 3]), r"encoder_lengths\[1\] is 0: expected 1 ≤ length ≤ 5"),
    "more labels than there are": (dict(target_lengths=[3, 4, 1]), r"target_lengths\[1\] is 4: expected 0 ≤ length ≤ 3"),
    "a negative length": (dict(target_lengths=[3, -1, 1]), r"target_lengths\[1\] is -1"),
    "a blank among the labels": (dict(targets=lambda y: put(y, (1, 1), 0)), r"targets\[1, 1\] is 0: expected a label that is not the blank"),
    "a state too few": (dict(predictor=lambda p: p[:, 1:]), r"predictor: expected shape \[3, 4, 6\].*one state more.*got \[3, 3, 6\]"),
    "a batch of another size": (dict(predictor=lambda p: p[1:]), r"predictor: expected shape \[3, 4, 6\]"),
    "targets of another size": (dict(targets=lambda y: y[1:]), "targets: expected the encoder's 3 sequences, got 2"),
    "no frames at all": (dict(encoder=lambda e: e[:, :0]), "encoder: expected at least one frame"),
    "another width": (dict(encoder=lambda e: e[..., 1:]), r"encoder: expected shape \[N, T, J\] with J = 6, got \[3, 5, 5\]"),
    "two dimensions": (dict(encoder=lambda e: e[0]), "encoder: expected shape"),
    "another dtype": (dict(predictor=lambda p: p.float()), "predictor: expected the weight's dtype torch.float64"),
    "integers": (dict(encoder=lambda e: e.long()), "encoder: expected a floating dtype"),
    "lengths of another batch": (dict(encoder_lengths=[5, 4]), "encoder_lengths: expected 3 integers"),
    "lengths with a point": (dict(target_lengths=[1.0, 2.0, 1.0]), "target_lengths: expected 3 integers"),
    "targets with a point": (dict(targets=lambda y: y.double()), "targets: expected integers"),
    "a bias of another size": (dict(linear_bias=lambda b: b[1:]), "linear_bias"),
    "an activation": (dict(activation="tahn"), "activation: expected 'tanh', 'relu' or None, got 'tahn'; did you mean tanh"),
    "a blank beyond": (dict(blank=7), "blank: expected a class below 7, got 7"),
    "a blank among durations": (dict(blank=5, durations=[1, 2]), "blank: expected a class below 5"),
    "a reduction": (dict(reduction="avg"), "reduction"),
    "a negative λ": (dict(fastemit_lambda=-0.1), "fastemit_lambda"), "a clamp that is no number": (dict(clamp="no"), "clamp"),
    "σ alone": (dict(sigma=0.05), "sigma: expected 0 without durations"),
    "durations twice": (dict(durations=[1, 1]), "durations: expected different integers"),
    "no duration above 0": (dict(durations=[0]), "durations"),
    "more durations than rows": (dict(durations=list(range(7))), "durations: expected fewer than the weight's 7 rows"),
    "a budget": (dict(memory_budget=0), "memory_budget"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be(name):
    given, message = WRONG[name]
    given = changed(**given)
    before = {k: v.clone() for k, v in given.items() if isinstance(v, torch.Tensor)}
    with pytest.raises(ValueError, match=message):
        linear_transducer_loss(**given)
    assert all(torch.equal(given[k], v) for k, v in before.items())


def test_labels_that_are_no_classes():
    with pytest.raises(IndexError, match=r"targets\[2, 0\] is 7"):
        linear_transducer_loss(**changed(targets=lambda y: put(y, (2, 0), 7)))
    with pytest.raises(IndexError, match="is 5: expected 0 ≤ label < 5"):
        linear_transducer_loss(**changed(targets=lambda y: put(y, (2, 0), 5), durations=[1, 2]))


def blind(monkeypatch):
    "As on a GPU, where no check looks at numbers"
    everywhere(monkeypatch, lattices, "readable_on_host", lambda t: False)


UNSEEN = "more frames than there are", "no frames", "more labels than there are", "a negative length", "a blank among the labels"


@pytest.mark.parametrize("name", thorough_but(UNSEEN, "no frames", "a blank among the labels"))
def test_what_is_not_looked_at_is_nan_alone(way, name, monkeypatch):
    blind(monkeypatch)
    case = replace(CASES["tanh"], dtype=f32, frames=(5, 4, 3), labels=(3, 2, 1))
    (e, p, w, b), y, frames, labels = case.tensors(way)
    spoilt = {k: (v(y) if callable(v) else torch.tensor(v)) for k, v in WRONG[name][0].items()}
    n = 0 if name == "more frames than there are" else 1
    others = [i for i in range(3) if i != n]
    losses, grads = run(case, ((e, p, w, b), y, frames, labels))
    again, found = run(case, ((e, p, w, b), spoilt.get("targets", y), spoilt.get("encoder_lengths", frames), spoilt.get("target_lengths", labels)))
    assert again[n].isnan() and torch.equal(again[others], losses[others])
    for a, g in zip(found[:2], grads):
        torch.testing.assert_close(a[others], g[others])
        assert (a[n] == 0).all()
    assert all(g.isfinite().all() for g in found)


@pytest.mark.parametrize("unknown", [False, True])
def test_rows_of_padding(way, unknown, monkeypatch):
    "Where the host does not know the lengths there are rows that are no nodes"
    place = transducer.place_nodes
    padded = lambda e, targets, *given: place(e, targets, *given)._replace(rows=e.shape[0] * e.shape[1] * (targets.shape[1] + 1))
    case = in_dtype("chunks of few nodes", f32)
    tensors = case.tensors(way)
    expected, grads = run(case, tensors)
    if unknown: everywhere(monkeypatch, transducer, "place_nodes", padded)
    losses, found = run(case, tensors)
    torch.testing.assert_close(losses, expected)
    for a, g in zip(found, grads): torch.testing.assert_close(a, g)


# --- bugs ---

BUGS = {
    "the label of the state before": ("label = torch.where(at.final, NONE, a.targets.flatten()[at.state])", "label = torch.where(at.final, NONE, a.targets.flatten().roll(1)[at.state])"),
    "frames and states swapped": ("t, u = (at // width).clamp(max=T - 1), at % width", "t, u = (at % width).clamp(max=T - 1), at % width"),
    "no slope": ("dh * SLOPES[activation](wide(h))", "dh"),
    "FastEmit on blanks": ("torch.stack([upstream[i], upstream[i] * (1 + fastemit)])", "torch.stack([upstream[i] * (1 + fastemit), upstream[i]])"),
    "a clamp after the upstream gradient": ("clamp * upstream[i, None]", "clamp * torch.ones_like(upstream[i, None])"),
    "a flow taken once": ("torch.where(there, -flows.T, 0)", "torch.where(there, -flows.T, 0) * there.new_tensor([1, 0])"),
    "half of σ": (".sub_(s.log().add_(sigma))", ".sub_(s.log().add_(sigma / 2))"),
    "another sequence's gradient": ("F.pad(g, (0, 1)), counts", "F.pad(g.flip(0), (0, 1)), counts"),
    "durations without a node": ("log_d.exp_().mul_(node[:, None])", "log_d.exp_()"),
    "a mean over labels": ("losses = losses / encoder.shape[0]", "losses = losses / targets.shape[1]"),
}


@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_seen(name, tmp_path):
    module = planted(transducer, tmp_path, *BUGS[name])
    cases = [CASES["tanh"], CASES["durations, σ, FastEmit"], CASES["a clamp"]]
    if name == "a mean over labels":
        (e, p, w, _), *given = Case(sizes=(2, 5, 3, 6, 7)).tensors()
        assert module.linear_transducer_loss(e, p, w, *given) != linear_transducer_loss(e, p, w, *given)
    else:
        assert any(wrong(case, loss=module.linear_transducer_loss) for case in cases)


# --- on a GPU ---

@cuda_only
def test_no_synchronisation_and_graphs():
    case = Case(sizes=(3, 12, 5, 64, 130), dtype=bf16, spread=1.0)
    (e, p, w, b), y, frames, labels = case.tensors("cuda")
    for lengths in ((frames.cuda(), labels.cuda()), (frames, labels)):
        assert replays(lambda: torch.autograd.grad(linear_transducer_loss(e, p, w, y, *lengths, linear_bias=b), (e, p, w, b)))
