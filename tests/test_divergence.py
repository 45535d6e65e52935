"""A student's divergence from its teacher: every kind against its formula in float64, from heads and from lists; kernels, memory, planted bugs."""
import math
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedloss as fl
import fusedloss.divergence as divergence
from fusedloss.chunks import plan_chunks
from fusedloss.core import pairs
from fusedloss.core.pairs import DivergenceOptions, PairBlocks, launch_divergence, reference_divergence
from fusedloss.core.triton import jit, tl
from workbook.measure import MemoryTrace, relative_error
from grids import few, grid, thorough_but
from helpers import INTERPRETED, everywhere, has_no_second_derivative, planted, replays, unchanged, where_kernels_run

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
KINDS = "forward_kl", "reverse_kl", "jsd"
N, H, T_H, V, K = 13, 5, 3, 11, 4


def of_logs(kind, log_p, log_q, beta):
    "The divergence of distributions over the last dimension, p the teacher's: as TRL's GKD and Liger's JSD define beta"
    kl = lambda a, b: torch.where(a > -torch.inf, a.exp() * (a - b), 0.0).sum(-1)
    if kind == "forward_kl" or kind == "jsd" and beta == 0: return kl(log_p, log_q)
    if kind == "reverse_kl" or kind == "jsd" and beta == 1: return kl(log_q, log_p)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def scores(x, w, b, softcap, temperature, scale=1.0, n_classes=None):
    z = scale * (x @ w.T + (0 if b is None else b))[..., :n_classes]
    t = temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / t


def reduced(losses, token_weight, reduction):
    weights = torch.ones_like(losses) if token_weight is None else token_weight.to(losses)
    losses = torch.where(weights == 0, 0.0, losses * weights)
    return losses if reduction == "none" else losses.sum() / (1 if reduction == "sum" else weights.sum())


def exact(x, w, t_x=None, t_w=None, *, kind="forward_kl", beta=0.5, temperature=1.0, softcap=None, teacher_softcap=None, token_weight=None,
          reduction="mean", linear_bias=None, teacher_bias=None, teacher_top=None, top_rest="class", logit_scale=1.0, teacher_logit_scale=1.0,
          n_classes=None):
    "The loss by its definition, sharing no line with the library"
    log_q = scores(x, w, linear_bias, softcap, temperature, logit_scale, n_classes).log_softmax(-1)
    if teacher_top is None:
        log_p = scores(t_x, t_w, teacher_bias, teacher_softcap, temperature, teacher_logit_scale, n_classes).log_softmax(-1)
        return reduced(of_logs(kind, log_p, log_q, beta), token_weight, reduction)
    indices, log_p = (t.reshape(-1, t.shape[-1]) for t in teacher_top)
    weights = torch.ones(len(log_p)) if token_weight is None else token_weight.reshape(-1)
    rows = [of_list(kind, log_q_i, i[i >= 0], log_p_i[i >= 0], beta, top_rest) if weigh else log_q_i.sum() * 0
            for log_q_i, i, log_p_i, weigh in zip(log_q.reshape(len(log_p), -1), indices, log_p, weights != 0)]  # lists of any length
    return reduced(torch.stack(rows).view(log_q.shape[:-1]), token_weight, reduction)


def of_list(kind, log_q, indices, log_p, beta, top_rest):
    "The divergence of one token's log-probabilities from its list"
    others = torch.ones_like(log_q, dtype=torch.bool)
    others[indices] = False
    listed = log_q[indices]
    if top_rest == "class" and others.any():
        rest = (1 - log_p.exp().sum()).clamp(min=0).log()
        listed, log_p = torch.cat([listed, log_q[others].logsumexp(0)[None]]), torch.cat([log_p, rest[None]])
    return of_logs(kind, log_p, listed, beta)


@dataclass(frozen=True)
class Case:
    "A call: sizes, options, and what is given beside the heads"
    sizes: tuple = (N, H, T_H, V)
    options: dict = field(default_factory=dict)
    bias: bool = False
    weights: bool = False
    top: int = 0  # classes in the teacher's lists
    ragged: bool = False  # whether these end early
    pads: tuple = (0, 0)  # rows beyond the classes, of the student's head and of the teacher's
    dtype: torch.dtype = f64
    spread: float = 1.0

    def sample(self, device="cpu"):
        "Leaves of the student, and the other arguments"
        made = torch.Generator().manual_seed(3)
        n, h, t_h, v = self.sizes
        new = lambda *size: (self.spread * torch.randn(size, generator=made, dtype=f64)).to(device, self.dtype)
        rows, t_rows = (v + more for more in self.pads)
        leaves, options = [new(n, h), new(rows, h)] + [new(rows)] * self.bias, dict(self.options)
        if any(self.pads): options["n_classes"] = v
        if isinstance(options.get("temperature"), torch.Tensor): options["temperature"] = options["temperature"].to(device)
        if self.weights:
            options["token_weight"] = torch.linspace(-1, 2, n, dtype=f64).to(device, f32 if self.dtype != f64 else f64)
            options["token_weight"][[2, n - 1]] = 0
        if self.top:
            log_p, indices = new(n, v).double().log_softmax(-1).topk(self.top)
            if self.ragged: empty_some(indices, log_p)
            return leaves, (), dict(options, teacher_top=(indices, log_p.to(self.dtype)))
        if self.bias: options["teacher_bias"] = new(t_rows)
        return leaves, (new(n, t_h), new(t_rows, t_h)), options


def empty_some(indices, log_p):
    "Leave the first list as it is, and of others fewer entries, down to one, in any places; log-probabilities of the rest are no numbers"
    for i, (row, logs) in enumerate(zip(indices, log_p)):
        gone = torch.randperm(len(row), generator=torch.Generator().manual_seed(i))[:i % len(row)]
        row[gone.to(row.device)], logs[gone.to(row.device)] = -1, (torch.nan, torch.inf, 3.0)[i % 3]


def run(loss, leaves, teacher, options, g=None):
    "Loss and gradients of all leaves, for an uneven upstream gradient"
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = loss(*leaves[:2], *teacher, **options, **dict(linear_bias=leaves[2]) if leaves[2:] else {})
    g = torch.linspace(-1.5, 1, max(out.numel(), 1), device=out.device).view(out.shape) if g is None else g
    return out.detach(), *torch.autograd.grad(out, leaves, g.to(out))


def faults(case, device="cpu", loss=None, tolerance=None) -> list[str]:
    "What a loss gets wrong, in words"
    leaves, teacher, options = case.sample(device)
    wide = lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else tuple(map(wide, t)) if isinstance(t, tuple) else t
    got = run(loss or fl.linear_divergence, leaves, teacher, options)
    plain = {k: wide(v) for k, v in options.items() if k not in ("memory_budget", "max_valid")}
    truth = run(exact, [t.double() for t in leaves], wide(teacher), plain)
    limits = tolerance or {f64: (1e-10, 1e-9), f32: (1e-5, 1e-4), bf16: (2e-2, 3e-2), f16: (4e-3, 6e-3)}[case.dtype]
    wrong = []
    for name, a, e, like in zip(("loss", "dx", "dw", "db"), got, truth, (None, *leaves)):
        dtype = (f64 if case.dtype == f64 else f32) if like is None else like.dtype
        if a.dtype != dtype or a.shape != e.shape: wrong.append(f"{name} is {a.dtype} {list(a.shape)}")
        elif not (relative_error(a.cpu(), e.cpu()) <= limits[name != "loss"] or (a.double() - e).abs().max() <= 1e-12):  # NaN is off
            wrong.append(f"{name} is off by {relative_error(a.cpu(), e.cpu()):.1e}")
    return wrong


# --- against the formula ---

HOW = {"plain": {}, "cool": dict(temperature=2.5), "capped": dict(softcap=3.0, temperature=0.7), "teacher capped": dict(teacher_softcap=2.0),
       "budget": dict(memory_budget=8 * 16 * 2 * 3), "scaled": dict(logit_scale=0.6, teacher_logit_scale=1.7, teacher_softcap=3.0, temperature=1.5),
       "each token": dict(temperature=torch.linspace(0.4, 3, N, dtype=f64), logit_scale=1.3, softcap=4.0, teacher_softcap=2.0)}


def for_head(name, top=True):
    "The options of that name, those of a teacher's head only where there is one"
    return {k: v for k, v in HOW[name].items() if not (top and k.startswith("teacher_"))}


@pytest.mark.parametrize("kind, reduction, how, bias, weights", grid(KINDS, ("none", "mean", "sum"), HOW, (False, True), (False, True)))
def test_heads(kind, reduction, how, bias, weights, device):
    options = dict(HOW[how], kind=kind, beta=0.3, reduction=reduction)
    assert faults(Case(options=options, bias=bias, weights=weights), device) == []


@pytest.mark.parametrize("kind, reduction, rest, how, weights", grid(KINDS, ("none", "mean"), ("class", "drop"), few(HOW, "plain", "cool", "capped", "scaled", "each token"), (False, True)))
def test_lists(kind, reduction, rest, how, weights, device):
    options = {k: v for k, v in for_head(how).items() if k != "memory_budget"}
    options |= dict(kind=kind, beta=0.3, reduction=reduction, top_rest=rest)
    assert faults(Case(options=options, weights=weights, top=K), device) == []


@pytest.mark.parametrize("kind, reduction, rest, how, top", grid(KINDS, ("none", "mean"), ("class", "drop"), few(HOW, "plain", "capped", "each token"), (K, V)))
def test_lists_that_end_early(kind, reduction, rest, how, top, device):
    options = {k: v for k, v in for_head(how).items() if k != "memory_budget"}
    options |= dict(kind=kind, beta=0.3, reduction=reduction, top_rest=rest)
    assert faults(Case(options=options, top=top, ragged=True, weights=reduction == "mean"), device) == []


@pytest.mark.parametrize("kind, pads, top, how", grid(KINDS, ((3, 0), (0, 5), (5, 2)), (0, K), ("none", "mean")))
def test_heads_whose_rows_pad(kind, pads, top, how, device):
    case = Case(options=dict(HOW["budget"], kind=kind, reduction=how, softcap=3.0), bias=True, weights=True, top=top, pads=pads)
    leaves, teacher, options = case.sample(device)
    assert faults(case, device) == []
    for t in leaves[1:] + ([] if top else [teacher[1], options["teacher_bias"]]):
        t[V:] = torch.nan  # what pads is not read
    _, dx, dw, db = run(fl.linear_divergence, leaves, teacher, options)
    assert dx.isfinite().all() and dw.isfinite().all() and db.isfinite().all() and not dw[V:].any() and not db[V:].any()


@pytest.mark.parametrize("dtype", (f16, bf16, f32))
def test_half_of_what_is_new(dtype, device):
    options = dict(temperature=torch.linspace(0.5, 2, 47, dtype=dtype), logit_scale=1.5, teacher_logit_scale=0.7, softcap=6.0)
    for case in (Case((47, 16, 24, 123), options, dtype=dtype, spread=0.5, pads=(5, 9)), Case((47, 16, 24, 123), {k: v for k, v in options.items() if k != "teacher_logit_scale"}, dtype=dtype, spread=0.5, top=9, ragged=True)):
        assert faults(case, device) == []


SHAPES = {"[2,3]": (2, 3), "[3]": (3,), "[1,3]": (1, 3), "[2,1]": (2, 1), "[]": (), "[1]": (1,)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_temperatures_of_any_shape_that_broadcasts(shape, reduction, device):
    (x, w), (t_x, t_w), _ = Case((6, H, T_H, V)).sample(device)
    x, t_x = x.view(2, 3, H), t_x.view(2, 3, T_H)
    t = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=f64).to(device) + 0.5
    whole = t.expand(2, 3)
    got = run(fl.linear_divergence, (x, w), (t_x, t_w), dict(temperature=t, reduction=reduction))
    for a, e in zip(got, run(exact, (x, w), (t_x, t_w), dict(temperature=whole, reduction=reduction))): torch.testing.assert_close(a, e)
    strided = torch.stack([t, -t], -1)[..., 0]
    assert torch.equal(fl.linear_divergence(x, w, t_x, t_w, temperature=strided, reduction=reduction), got[0])


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("scale", [1.7, -0.6, 0.0])
def test_a_learned_scale(reduction, scale, device):
    for top in (0, K):
        leaves, teacher, options = Case(options=dict(reduction=reduction, softcap=3.0, temperature=0.8), bias=True, top=top).sample(device)
        s = torch.tensor(scale, dtype=f64, device=device)
        def answers(loss, s): return run(lambda x, w, *t, linear_bias, **how: loss(x, w, *t, logit_scale=s, linear_bias=linear_bias, **how), leaves, teacher, options)
        def slope(loss):
            t = s.clone().requires_grad_()
            out = loss(*leaves[:2], *teacher, linear_bias=leaves[2], logit_scale=t, **options)
            return torch.autograd.grad(out.sum(), t)
        for a, e in zip(answers(fl.linear_divergence, s) + slope(fl.linear_divergence), answers(exact, s) + slope(exact)): torch.testing.assert_close(a, e)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 3, 2, 2), (129, 2, 1, 3), (3, 0, 2, 5), (300, 4, 6, 70)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes(kind, sizes, device):
    for reduction in ("none", "mean"):
        assert faults(Case(sizes, dict(kind=kind, reduction=reduction)), device) == []


def test_a_list_of_all_classes_is_the_teacher():
    for kind in KINDS:
        case = Case(options=dict(kind=kind, softcap=5.0), top=V)
        leaves, _, options = case.sample()
        log_p = torch.empty(N, V, dtype=f64).scatter_(-1, *options.pop("teacher_top"))
        expected = run(fl.linear_divergence, leaves, (log_p, torch.eye(V, dtype=f64)), options)
        got = run(fl.linear_divergence, *case.sample())
        for a, e in zip(got, expected): torch.testing.assert_close(a, e)


@pytest.mark.parametrize("beta, kind", [(0, "forward_kl"), (1, "reverse_kl"), (0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_the_ends_of_beta_are_the_two_divergences(beta, kind):
    leaves, teacher, _ = Case().sample()
    assert torch.equal(fl.linear_divergence(*leaves, *teacher, kind="jsd", beta=beta), fl.linear_divergence(*leaves, *teacher, kind=kind))


def test_kl_div_of_torch():
    leaves, (t_x, t_w), _ = Case().sample()
    log_q, log_p = (leaves[0] @ leaves[1].T).log_softmax(-1), (t_x @ t_w.T).log_softmax(-1)
    for kind, a, b in (("forward_kl", log_q, log_p), ("reverse_kl", log_p, log_q)):
        torch.testing.assert_close(fl.linear_divergence(*leaves, t_x, t_w, kind=kind), F.kl_div(a, b, reduction="batchmean", log_target=True))


@pytest.mark.parametrize("dtype, t_dtype, reduction, kind", grid((f16, bf16, f32), (bf16, f32), ("none", "mean"), KINDS))
def test_dtypes_of_student_and_teacher(dtype, t_dtype, reduction, kind, device):
    case = Case((47, 16, 24, 123), dict(kind=kind, reduction=reduction), dtype=dtype, spread=0.5)
    leaves, teacher, options = case.sample(device)
    teacher = tuple(t.to(t_dtype) for t in teacher)
    got = run(fl.linear_divergence, leaves, teacher, options)
    truth = run(exact, [t.double() for t in leaves], [t.double() for t in teacher], options)
    limit = max({f16: 4e-3, bf16: 3e-2, f32: 1e-4}[dtype], {bf16: 1e-2, f32: 0}[t_dtype] if device == "cuda" else 0)
    for a, e, like in zip(got, truth, (torch.zeros(()), *leaves)):
        assert a.dtype == like.dtype and relative_error(a.cpu(), e.cpu()) < limit


def test_small_upstream_gradients_of_fp16_are_kept():
    (x, w), teacher, options = Case((47, 16, 24, 123), dict(reduction="none"), dtype=f16, spread=0.3).sample()
    leaves, g = [x / 30, w * 30], torch.full((47,), 1e-5)  # of which dx is 1e-5, and dz 1e-7
    got, truth = run(fl.linear_divergence, leaves, teacher, options, g), run(exact, [t.double() for t in leaves], [t.double() for t in teacher], options, g)
    assert relative_error(got[1], truth[1]) < 3e-2


# --- hostile scores ---

@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_ten_thousand(kind):
    made = torch.Generator().manual_seed(0)
    q, p = (1e4 * torch.randn(7, V, generator=made, dtype=f64) for _ in range(2))
    p[0] = q[0] + 0.1 * torch.randn(V, generator=made)
    eye = torch.eye(V, dtype=f64)
    leaf = q.clone().requires_grad_()
    losses = fl.linear_divergence(leaf, eye, p, eye, kind=kind, beta=0.25, reduction="none")
    losses.sum().backward()
    log_q = q.clone().requires_grad_()
    truth = of_logs(kind, p.log_softmax(-1), log_q.log_softmax(-1), 0.25)
    torch.testing.assert_close(losses, truth) if kind != "jsd" else torch.testing.assert_close(losses.isfinite(), torch.ones(7, dtype=torch.bool))
    assert leaf.grad.isfinite().all()
    if kind != "jsd": torch.testing.assert_close(leaf.grad, torch.autograd.grad(truth.sum(), log_q)[0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_classes_spoil_no_other_token(kind):
    z, t = torch.randn(2, 4, V, dtype=f64, generator=torch.Generator().manual_seed(0)) * 2
    z[:, 2] = t[:, 2] = -torch.inf  # both: 0 · log 0
    z[0, 5], t[1, 6] = -torch.inf, -torch.inf  # one: infinite for the divergence that weighs the other
    def rows(z): return reference_divergence(z, t, None, None, DivergenceOptions(kind, 0.25), True)
    dz = z.clone()
    losses = rows(dz)
    expected = of_logs(kind, t.log_softmax(-1)[2:], z.log_softmax(-1)[2:].nan_to_num(neginf=-1e9), 0.25) if kind == "forward_kl" else losses[2:]
    assert losses.isinf().tolist() == [kind == "forward_kl", kind == "reverse_kl", False, False]
    assert torch.allclose(losses[2:], expected) and dz.isfinite().all() and (dz[2:].abs().sum(1) > 0).all() and (dz[:, 2] == 0).all()


def test_an_infinite_loss_leaves_the_gradients_of_others():
    x, w = torch.eye(4, dtype=f64).requires_grad_(), torch.randn(6, 4, dtype=f64)
    bias = torch.zeros(6, dtype=f64)
    bias[3] = -torch.inf
    for kind, given in (("forward_kl", dict(linear_bias=bias)), ("reverse_kl", dict(teacher_bias=bias))):
        loss = fl.linear_divergence(x, w, x.detach(), w, kind=kind, **given)
        assert loss == torch.inf and torch.autograd.grad(loss, x)[0].isfinite().all()


def test_a_rest_far_below_the_list_keeps_its_digits():
    z = torch.full((1, 6), -20.0)
    z[0, :2] = torch.tensor([1.0, 0.0])
    log_p = torch.tensor([[0.5, 0.3]]).log()
    top = torch.tensor([[0, 1]]), log_p
    for how in (dict(), dict(softcap=100.0)):
        truth = exact(z.double(), torch.eye(6).double(), teacher_top=(top[0], log_p.double()), **how)
        torch.testing.assert_close(fl.linear_divergence(z, torch.eye(6), teacher_top=top, **how), truth.float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", (f64, f32))
@pytest.mark.parametrize("how", ("plain", "capped", "each token"))
@pytest.mark.parametrize("rest", ("class", "drop"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_rest_without_a_probability_has_its_gradient(kind, rest, how, dtype, device):
    "Scores of the other classes are so low that their probabilities are 0: the teacher's share of them is not"
    z = torch.tensor([[900.0, -2.0, -900.0, -901.0, -900.5], [1.0, 0.5, 2.0, 0.0, -1.0]], dtype=f64)
    top = torch.tensor([[0, 1]] * 2), torch.tensor([[0.5, 0.2]] * 2, dtype=f64).log()
    options = dict(softcap=1e3) if how == "capped" else dict(temperature=torch.tensor([0.7, 2.0], dtype=f64)) if how == "each token" else {}
    options, leaves = dict(options, kind=kind, top_rest=rest, reduction="none"), [torch.eye(2, dtype=f64), z.T]
    there = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    found = run(fl.linear_divergence, [t.to(device, dtype) for t in leaves], (), dict(there, teacher_top=(top[0].to(device), top[1].to(device, dtype))))
    for got, truth in zip(found, run(exact, leaves, (), dict(options, teacher_top=top))):
        torch.testing.assert_close(got.cpu().double(), truth, rtol=1e-9 if dtype == f64 else 1e-5, atol=1e-9 if dtype == f64 else 1e-3)


# --- rows by the kernel ---

BLOCKS = {"own": None, "small": PairBlocks(2, 2, 16, 1), "one row": PairBlocks(1, 4, 16, 1)}


def row_faults(k, kind, shape, options, blocks, dtype, device, weights=True, late=False, rows=None, each=False):
    "What the launcher of module `k` gets wrong, beside NaN that it must not read or write"
    made = torch.Generator().manual_seed(1)
    m, v = shape
    q, p = ((2 * torch.randn(m, v, generator=made, dtype=f64)) for _ in range(2)) if rows is None else rows
    q, p = q.to(device, dtype), p.to(device, dtype)
    w_t = torch.linspace(-1, 2, m).to(device) if weights else None
    if weights and m > 2: w_t[2] = 0
    o, total = DivergenceOptions(kind, 0.3, **options), torch.tensor(3.5, device=device)
    cool = torch.linspace(0.3, 2, m).to(device) if each else None
    frame = torch.full((m + 2, v + 9), torch.nan, dtype=dtype, device=device)
    z = frame[1:-1, 4:-5]
    z.copy_(q)
    losses = k.launch_divergence(z, p, w_t, total, o, True, late, cool, blocks)
    quiet = k.launch_divergence(q.clone(), p, w_t, total, o, False, late, cool, blocks)
    expected = q.double()
    truth = reference_divergence(expected, p.double(), None if w_t is None else w_t.double(), total.double(), o, True, late, cool)
    inside = torch.zeros_like(frame, dtype=torch.bool)
    inside[1:-1, 4:-5] = True
    limit = {f32: 2e-5, bf16: 1e-2, f16: 2e-3}[dtype]
    close = lambda a, e, limit: torch.allclose(a.double(), e, rtol=limit, atol=limit * max(1.0, e[e.isfinite()].abs().max().item() if e.isfinite().any() else 1.0), equal_nan=True)
    return [text for text, right in (("loss", close(losses, truth, 2e-5)), ("quiet loss", close(quiet, truth, 2e-5)), ("gradient", close(z, expected, limit)),
                                     ("outside", bool(frame[~inside].isnan().all()))) if not right]


KERNEL_GRID = grid(KINDS, few(BLOCKS, "own", "small"), ("plain", "cool and capped", "each token"), few((f32, bf16, f16), f32, bf16))


@where_kernels_run
@pytest.mark.parametrize("kind, blocks, how, dtype", thorough_but(KERNEL_GRID, *KERNEL_GRID[::2]))
def test_the_kernel(kind, blocks, how, dtype, device):
    options = dict(logit_scale=0.5, teacher_logit_scale=1.5, softcap=3.0, teacher_softcap=2.0) if how != "plain" else {}
    assert row_faults(pairs, kind, (5, 75), options, BLOCKS[blocks], dtype, device, each=how == "each token") == []


def of_ranks(z, t, places, o, w_t, cool=None):
    "Losses of rows whose classes are cut in `places`, and the gradient in the place of `z`, as ranks make them"
    sums = lambda at: sum(pairs.mixture_numbers(z[:, j], t[:, j], at, o, cool) for j in places)
    joined = pairs.join_pairs(torch.stack([pairs.pair_numbers(z[:, j], t[:, j], o, cool) for j in places]), o, sums)
    losses, scale = pairs.weigh_rows(joined.divergence.clamp(min=0), w_t, None, o, False)
    for j in places: pairs.put_joined_gradient(z[:, j], t[:, j], joined, scale, o, cool)
    return losses


PLACES = [slice(0, 33), slice(33, 33), slice(33, 40), slice(40, 75)]


@where_kernels_run
@pytest.mark.parametrize("dtype", (f32, bf16))
@pytest.mark.parametrize("how", ("plain", "cool and capped", "hostile", "each token"))
@pytest.mark.parametrize("kind", KINDS)
def test_rows_whose_classes_are_cut(kind, how, dtype, device):
    "The kernels of classes over ranks, and their forms in PyTorch, beside the row as a whole"
    options = dict(logit_scale=0.5, teacher_logit_scale=1.5, softcap=3.0, teacher_softcap=2.0) if how in ("cool and capped", "each token") else {}
    o, made = DivergenceOptions(kind, 0.3, **options), torch.Generator().manual_seed(3)
    cool = torch.linspace(0.3, 2, 5, device=device) if how == "each token" else None
    q, t = ((1e3 if how == "hostile" else 2) * torch.randn(2, 5, 75, generator=made, dtype=f64)).to(device, dtype)
    if how == "hostile":
        q[1, :33], t[1, :33] = -torch.inf, -torch.inf  # a place without a score
        q[3, 5:50] = -torch.inf  # a divergence of infinity by forward KL
        t[3:] /= 1e3  # no probability of the teacher is too small for fp32
        t[4, 40:] = -torch.inf
    w_t = torch.tensor([1.0, 2.0, 0.0, -1.0, 0.5], device=device)
    expected = q.double()
    truth = reference_divergence(expected, t.double(), w_t.double(), None, o, True, False, cool)
    for wide, limit in ((lambda z: z.clone(), {f32: 2e-5, bf16: 1e-2}[dtype]), (lambda z: z.double(), 1e-9)):
        z = wide(q)
        losses = of_ranks(z, wide(t), PLACES, o, w_t.to(torch.promote_types(z.dtype, f32)), cool)
        for got, right, at_most in ((losses, truth, min(limit, 2e-5)), (z, expected, limit)):
            size = right[right.isfinite()].abs().max().item()
            torch.testing.assert_close(got.double(), right, rtol=at_most, atol=at_most * max(1.0, size), equal_nan=True)


@where_kernels_run
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_of_hostile_rows(kind, device):
    made = torch.Generator().manual_seed(2)
    q, p = 1e4 * torch.randn(2, 4, 40, generator=made, dtype=f64)
    q[1, 3:30], p[2, :9], q[3, :35], p[3, :35] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    p[1, 3:30] = -torch.inf
    assert row_faults(pairs, kind, (4, 40), {}, BLOCKS["small"], f32, device, weights=False, rows=(q.float().double(), p.float().double())) == []
    nothing = torch.full((1, 40), -torch.inf, device=device)
    found = pairs.launch_divergence(nothing.clone(), nothing, None, None, DivergenceOptions(kind), True, False, None, BLOCKS["small"])
    assert found.isnan().all()


@where_kernels_run
def test_the_kernel_reads_nothing_of_tokens_without_weight(device):
    z, t = torch.randn(3, 20, device=device), torch.randn(3, 20, device=device)
    z[1] = t[1] = torch.nan
    losses = launch_divergence(z, t, torch.tensor([1.0, 0.0, 2.0], device=device), None, DivergenceOptions(), True)
    assert losses[1] == 0 and (z[1] == 0).all() and z.isfinite().all() and losses.isfinite().all()


@where_kernels_run
@pytest.mark.parametrize("kind, top, how, reduction", [("forward_kl", 0, "cool", "none"), ("reverse_kl", K, "capped", "mean"), ("jsd", K, "plain", "none"),
                                                     ("jsd", 0, "each token", "mean"), ("forward_kl", K, "each token", "none"), ("reverse_kl", 0, "scaled", "sum")])
def test_calls_by_kernels(kind, top, how, reduction, device, monkeypatch):
    "As on a GPU, where logits, lists and gradients go through kernels"
    everywhere(monkeypatch, pairs, "has_kernel", lambda z: z.dtype != f64 and z.numel() > 0)
    case = Case(options=dict(for_head(how, top), kind=kind, beta=0.3, reduction=reduction), weights=True, top=top, dtype=f32)
    assert faults(case, device) == []


# --- a citizen of autograd ---

@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
def test_gradients_where_they_are_asked_for(needs, device):
    for reduction, top in (("mean", 0), ("none", 0), ("none", K)):
        leaves, teacher, options = Case(options=dict(reduction=reduction), bias=True, top=top).sample(device)
        whole = run(fl.linear_divergence, leaves, teacher, options)[1:]
        given = [t.requires_grad_(bool(n)) for t, n in zip(leaves, needs)]
        out = fl.linear_divergence(*given[:2], *teacher, linear_bias=given[2], **options)
        assert out.requires_grad == any(needs)
        if any(needs):
            out.backward(torch.linspace(-1.5, 1, max(out.numel(), 1), device=device).view(out.shape).to(out))
            for t, e in zip(given, whole): torch.testing.assert_close(t.grad, e if t.requires_grad else None)


def test_the_teacher_gets_no_gradient():
    (x, w), teacher, _ = Case().sample()
    t_x, t_w = (t.requires_grad_() for t in teacher)
    for reduction in ("mean", "none"):
        loss = fl.linear_divergence(x.requires_grad_(), w, t_x, t_w, reduction=reduction)
        assert torch.autograd.grad(loss.sum(), [t_x, t_w], allow_unused=True) == (None, None)
    assert not fl.linear_divergence(x.detach(), w, t_x, t_w).requires_grad
    top = torch.tensor([[0, 1]]).expand(N, -1), torch.full((N, 2), -1.0, dtype=f64).requires_grad_()
    assert torch.autograd.grad(fl.linear_divergence(x, w, teacher_top=top), top[1], allow_unused=True) == (None,)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_upstream_gradients_and_a_second_backward(reduction, device):
    leaves, teacher, options = Case(options=dict(reduction=reduction)).sample(device)
    x, w = (t.requires_grad_() for t in leaves)
    out = fl.linear_divergence(x, w, *teacher, **options).sum()
    one = torch.autograd.grad(out, [x, w], retain_graph=True)
    again = torch.autograd.grad(-3 * out, [x, w])
    for a, b in zip(one, again): torch.testing.assert_close(-3 * a, b)
    assert has_no_second_derivative(fl.linear_divergence(x, w, *teacher, **options).sum(), x)


def test_compilers_and_checks_of_operators(device):
    "One whole graph for any number of tokens; and what PyTorch asks of custom operators"
    leaves, teacher, _ = Case((20, H, T_H, V), dtype=f32).sample(device)
    x, w = (t.requires_grad_() for t in leaves)
    for reduction in ("mean", "none"):
        call = lambda x, t_x: fl.linear_divergence(x, w, t_x, teacher[1], reduction=reduction, kind="jsd").sum()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
        for n in (20, 13):
            grads = [torch.autograd.grad(f(x[:n], teacher[0][:n]), [x, w]) for f in (compiled, call)]
            for a, e in zip(*grads): torch.testing.assert_close(a, e)
        torch.func.grad(call)(x.detach(), teacher[0])
    each, scale = torch.linspace(0.5, 2, 20, device=device), torch.tensor(1.5, device=device, requires_grad=True)
    lists = (torch.arange(3, device=device) - 1).repeat(20, 1), torch.full((20, 3), -2.0, device=device)
    for how in (dict(teacher_input=teacher[0], teacher_weight=F.pad(teacher[1], (0, 0, 0, 2)), n_classes=V - 1), dict(teacher_top=lists)):
        call = lambda x, t, **rows: fl.linear_divergence(x, w, temperature=t, logit_scale=scale, **how | rows)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
        for n in (20, 13):
            rows = {k: v[:n] if k == "teacher_input" else tuple(t[:n] for t in v) for k, v in how.items() if k in ("teacher_input", "teacher_top")}
            grads = [torch.autograd.grad(f(x[:n], each[:n], **rows), [x, w, scale]) for f in (compiled, call)]
            for a, e in zip(*grads): torch.testing.assert_close(a, e)
    o = list(DivergenceOptions())
    torch.library.opcheck(torch.ops.fusedloss.divergence, (x, w, None, *teacher, *[None] * 5, *o, f32, f32, V, True, None, None, True, True, False),
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    torch.library.opcheck(torch.ops.fusedloss.token_divergence, (x, w, None, *teacher, *[None] * 5, *o, f32, f32, V, None, None),
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


def test_autocast_rounds_as_linear_does():
    leaves, teacher, _ = Case((30, 8, 6, 20), dtype=f32).sample()
    with torch.autocast("cpu", dtype=bf16):
        got = fl.linear_divergence(*leaves, *teacher)
    rounded = fl.linear_divergence(*(t.to(bf16) for t in leaves), *(t.to(bf16) for t in teacher))
    assert got.dtype == f32 and torch.equal(got, rounded)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("top", [0, K])
def test_a_graph_replays_it(top):
    for reduction in ("mean", "none"):
        leaves, teacher, options = Case((64, 16, 24, 200), dict(reduction=reduction), weights=True, top=top, dtype=bf16).sample("cuda")
        x, w = (t.requires_grad_() for t in leaves)
        assert replays(lambda: torch.autograd.grad(fl.linear_divergence(x, w, *teacher, **options).sum(), [x, w]))


# --- tokens ---

def test_no_tokens_and_no_weight():
    (x, w), (t_x, t_w), _ = Case().sample()
    w.requires_grad_()
    for reduction in ("mean", "sum", "none"):
        empty = fl.linear_divergence(x[:0], w, t_x[:0], t_w, reduction=reduction)
        assert empty.shape == (x[:0, 0].shape if reduction == "none" else ()) and empty.sum() == 0
        assert not torch.autograd.grad(empty.sum(), w)[0].any()
        none = fl.linear_divergence(x, w, t_x, t_w, reduction=reduction, token_weight=torch.zeros(N))
        assert none.sum() == 0 and not torch.autograd.grad(none.sum(), w)[0].any()


def test_tokens_without_weight_enter_no_product_here():
    (x, w), (t_x, t_w), _ = Case().sample()
    weight = torch.ones(N, dtype=f64)
    weight[4:] = 0
    x[4:] = t_x[4:] = torch.nan
    x.requires_grad_()
    for how in (dict(), dict(reduction="none"), dict(max_valid=4)):
        loss = fl.linear_divergence(x, w, t_x, t_w, token_weight=weight, **how)
        g, = torch.autograd.grad(loss.sum(), x)
        assert loss.isfinite().all() and g.isfinite().all() and not g[4:].any()
    with pytest.raises(ValueError, match="max_valid: expected at least the 4 tokens"):
        fl.linear_divergence(x, w, t_x, t_w, token_weight=weight, max_valid=3)


def test_shapes_strides_and_modules():
    (x, w), (t_x, t_w), _ = Case((12, H, T_H, V)).sample()
    expected = fl.linear_divergence(x, w, t_x, t_w, reduction="none")
    assert torch.equal(fl.linear_divergence(x.view(3, 4, H), w, t_x.view(3, 4, T_H), t_w, reduction="none"), expected.view(3, 4))
    spread = torch.stack([x, x], -1)[..., 0], w.T.contiguous().T, t_x.T.contiguous().T, torch.stack([t_w, t_w], 1)[:, 1]
    torch.testing.assert_close(fl.linear_divergence(*spread, reduction="none"), expected)
    one = fl.linear_divergence(x[:1].expand(5, -1), w, t_x[:1].expand(5, -1), t_w, reduction="none", token_weight=torch.ones(()).expand(5))
    torch.testing.assert_close(one, expected[:1].expand(5))
    head, t_head = nn.Linear(H, V).double(), nn.Embedding(V, T_H).double()
    got = fl.linear_divergence(x, head, t_x, t_head)
    assert torch.equal(got, fl.linear_divergence(x, head.weight, t_x, t_head.weight, linear_bias=head.bias))
    assert fl.linear_divergence(x[0], w, t_x[0], t_w, reduction="none").shape == ()


# --- memory and work ---

def test_the_products_that_are_made():
    from torch.utils.flop_counter import FlopCounterMode
    student, teachers = 2 * N * H * V, 2 * N * T_H * V
    for reduction, top, expected in (("sum", 0, 3 * student + teachers), ("none", 0, 4 * student + 2 * teachers), ("mean", K, 3 * student)):
        case = Case(options=dict(reduction=reduction), top=top, pads=(7, 9))  # of which no product is made
        leaves, teacher, options = case.sample()
        x, w = (t.requires_grad_() for t in leaves)
        with FlopCounterMode(display=False) as mode:
            fl.linear_divergence(x, w, *teacher, **options).sum().backward()
        assert mode.get_total_flops() == expected


@pytest.mark.parametrize("budget", [None, 2**26, 2**28])
@pytest.mark.parametrize("sizes", [(8192, 2048, 4096, 128256), (4096, 1024, 2048, 151936)], ids=str)
def test_chunks_hold_what_the_budget_says(sizes, budget, monkeypatch):
    "On meta tensors, as on a GPU: both chunks of logits, and a sum in fp32 where one is taken, within the budget"
    for name, value in (("has_kernel", lambda z: True), ("launch_kernel", lambda *_, **__: None), ("on_device", lambda t: nullcontext())):
        everywhere(monkeypatch, pairs, name, value)
    n, h, t_h, v = sizes
    new = lambda *size: torch.empty(size, dtype=bf16, device="meta")
    given = new(n, h), new(v, h), None, new(n, t_h), new(v, t_h), *[None] * 5
    monkeypatch.setattr("fusedloss.core.products.product_dtype", lambda t: t.dtype)
    with MemoryTrace() as trace:
        divergence.divergence_fwd(*given, DivergenceOptions(), bf16, bf16, v, True, budget, None, True, True, False)
    held = trace.peak - 2 * h * (n + v)
    assert held <= (budget or 2 * 2 * v * n // 2) + 16 * n
    assert budget is None or held > budget // 4


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_budget_has_room_for_autocasts_copies(reduction, monkeypatch):
    "Of x, the student's classes that are used, and the teacher's: chunks are then those of 16-bit operands, and less is refused"
    n, h, t_h, v = 512, 32, 16, 256
    x, w, t, u = (torch.randn(shape) for shape in ((n, h), (v + 8, h), (n, t_h), (v + 8, t_h)))
    row, copies, plans = 2 * v * 2, 2 * (n * h + v * h + v * t_h), []
    everywhere(monkeypatch, divergence, "plan_chunks", lambda *given: plans.append(plan_chunks(*given)) or plans[-1])
    def loss(budget, *operands): return fl.linear_divergence(*operands, n_classes=v, memory_budget=budget, reduction=reduction)
    with torch.autocast("cpu", bf16):
        found = loss(copies + 64 * row, x, w, t, u)
        assert torch.equal(loss(n * row * 8 + copies, x, w, t, u), loss(None, x, w, t, u))
        loss(copies + row, x, w, t, u)
        least = rf"memory_budget: expected an integer of at least {copies + row} bytes here, or None, got {copies + row - 1}"
        with pytest.raises(ValueError, match=least): loss(copies + row - 1, x, w, t, u)
    expected = loss(64 * row, *(operand.to(bf16) for operand in (x, w, t, u)))
    assert plans[0].rows == plans[-1].rows <= 64 < n and torch.equal(found, expected)


def test_saved_tensors_are_the_gradients_or_the_inputs():
    from workbook.measure import saved_tensors
    leaves, teacher, _ = Case((64, 8, 6, 512), dtype=f32).sample()
    x, w = (t.requires_grad_() for t in leaves)
    for reduction in ("mean", "none"):
        saved = saved_tensors(lambda: fl.linear_divergence(x, w, *teacher, reduction=reduction), x, w, *teacher)
        assert all(len(s) < 2 or 512 not in s[1:] for s in [tuple(t.shape) if hasattr(t, "shape") else t for t in saved] if isinstance(s, tuple))


# --- what is refused ---

TOP = torch.zeros(N, 2, dtype=torch.int64) + torch.tensor([0, 3]), torch.full((N, 2), -1.0, dtype=f64)
REFUSED = {
    "another vocabulary": (dict(teacher_weight=torch.zeros(V + 1, T_H, dtype=f64)), r"teacher_weight: expected the student's 11 classes, got 12 classes"),
    "other tokens": (dict(teacher_input=torch.zeros(N + 1, T_H, dtype=f64)), r"teacher_input: expected shape \[13, 3\], got \[14, 3\]"),
    "another width": (dict(teacher_input=torch.zeros(N, 9, dtype=f64)), r"teacher_input: expected shape \[\.\.\., 3\], got \[13, 9\]"),
    "two dtypes of the teacher": (dict(teacher_input=torch.zeros(N, T_H)), "teacher_weight: expected the teacher_input's dtype torch.float32"),
    "no teacher": (dict(teacher_input=None, teacher_weight=None), "teacher_input: expected a tensor, or `teacher_top`"),
    "half a teacher": (dict(teacher_weight=None), "teacher_weight: expected a tensor, or `teacher_top`"),
    "two teachers": (dict(teacher_top=TOP), "teacher_top: expected None beside a teacher's head, got both"),
    "temperature 0": (dict(temperature=0.0), "temperature: expected a positive, finite number, got 0.0"),
    "temperature inf": (dict(temperature=float("inf")), "temperature: expected a positive, finite number, got inf"),
    "beta": (dict(beta=1.01), "beta: expected a number from 0 to 1, got 1.01"),
    "kind": (dict(kind="kl"), "kind: expected 'forward_kl', 'reverse_kl' or 'jsd', got 'kl'"),
    "rest": (dict(top_rest="keep"), "top_rest: expected 'class' or 'drop', got 'keep'"),
    "softcap": (dict(softcap=0.0), "softcap: expected a positive number or None, got 0.0"),
    "teacher's softcap": (dict(teacher_softcap=-1.0), "teacher_softcap: expected a positive number or None"),
    "reduction": (dict(reduction="batchmean"), "reduction: expected 'none', 'mean' or 'sum', got 'batchmean'"),
    "weights of another shape": (dict(token_weight=torch.ones(N, 1)), r"token_weight: expected floats of shape \[13\]"),
    "a bias of another shape": (dict(teacher_bias=torch.ones(V + 1, dtype=f64)), r"teacher_bias: expected floats of shape \[11\]"),
    "memory": (dict(memory_budget=10), "memory_budget: expected an integer of at least 256 bytes here, or None, got 10"),
    "a scale": (dict(logit_scale=0.0), "logit_scale: expected a positive, finite number, got 0.0"),
    "a scale of two numbers": (dict(logit_scale=torch.ones(2, dtype=f64)), r"logit_scale: expected a number or a 0-dim tensor, got shape \[2\]"),
    "a learned scale of the teacher": (dict(teacher_logit_scale=torch.ones(())), r"teacher_logit_scale: expected a positive, finite number, got tensor\(1.\)"),
    "temperatures of other tokens": (dict(temperature=torch.ones(N + 1)), r"temperature: expected a positive number, or floats that broadcast to \[13\], got torch.float32 \[14\]"),
    "temperatures of more dimensions": (dict(temperature=torch.ones(2, N)), r"temperature: expected a positive number, or floats that broadcast to \[13\], got torch.float32 \[2, 13\]"),
    "integers for temperatures": (dict(temperature=torch.ones(N).long()), "temperature: expected a positive number, or floats"),
    "temperatures of 0": (dict(temperature=torch.arange(N).double()), r"temperature: expected positive, finite numbers, got \[0.0\]"),
    "temperatures that learn": (dict(temperature=torch.ones(N, requires_grad=True)), "temperature: expected a tensor without gradient, got requires_grad=True"),
    "more classes than the student has": (dict(n_classes=V + 1), "n_classes: expected an integer from 1 to the student's 11 classes, or None, got 12"),
    "no classes": (dict(n_classes=0), "n_classes: expected an integer from 1 to the student's 11 classes, or None, got 0"),
    "classes that are no number": (dict(n_classes=True), "n_classes: expected an integer from 1 to the student's 11 classes, or None, got True"),
    "more classes than the teacher has": (dict(n_classes=V, teacher_weight=torch.zeros(V - 1, T_H, dtype=f64)), "teacher_weight: expected at least 11 classes, got 10 classes"),
    "a promise about all": (dict(max_valid=3), "max_valid: expected at least the 13 tokens that have a weight, got 3"),
}
LISTS = {
    "an index that is no class": ((TOP[0] + 8, TOP[1]), IndexError, r"teacher_top's indices: expected 0 ≤ index < 11, or -1 for an empty entry, got \[8, 11\] for token 0"),
    "an index below": ((TOP[0] - 2, TOP[1]), IndexError, r"teacher_top's indices: expected 0 ≤ index < 11, or -1 for an empty entry, got \[-2, 1\] for token 0"),
    "nothing": ((TOP[0] * 0 - 1, TOP[1]), ValueError, r"teacher_top's indices: expected at least one that is not -1, got \[-1, -1\] for token 0"),
    "a class twice": ((TOP[0] * 0, TOP[1]), ValueError, r"teacher_top's indices: expected each class once a token, got \[0, 0\] for token 0"),
    "above 0": ((TOP[0], -TOP[1]), ValueError, r"teacher_top's log_probs: expected numbers not above 0, got \[1.0, 1.0\] for token 0"),
    "no number": ((TOP[0], TOP[1] * torch.nan), ValueError, "teacher_top's log_probs: expected numbers not above 0"),
    "floats": ((TOP[1], TOP[1]), ValueError, "teacher_top's indices: expected torch.int32 or torch.int64, got torch.float64"),
    "of other tokens": ((TOP[0][1:], TOP[1][1:]), ValueError, r"teacher_top's indices: expected shape \[13, 'K'\], 1 ≤ K ≤ 11, got \[12, 2\]"),
    "of two lengths": ((TOP[0], TOP[1][:, :1]), ValueError, "teacher_top: expected as many indices as log-probabilities, got 2 and 1"),
    "not a pair": (TOP[0], ValueError, r"teacher_top: expected \(indices, log_probs\), got Tensor"),
}


@pytest.mark.parametrize("given, words", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(given, words):
    (x, w), (t_x, t_w), _ = Case().sample()
    with pytest.raises(ValueError, match=words):
        fl.linear_divergence(**{"input": x, "linear_weight": w, "teacher_input": t_x, "teacher_weight": t_w} | given)


@pytest.mark.parametrize("top, error, words", LISTS.values(), ids=LISTS)
def test_lists_that_are_refused(top, error, words):
    (x, w), _, _ = Case().sample()
    with pytest.raises(error, match=words):
        fl.linear_divergence(x, w, teacher_top=top)


@pytest.mark.parametrize("option", (dict(teacher_softcap=3.0), dict(teacher_logit_scale=2.0)))
def test_options_of_a_teachers_head_are_refused_beside_lists(option):
    (x, w), _, _ = Case().sample()
    name, = option
    with pytest.raises(ValueError, match=f"{name}: expected {'None' if name == 'teacher_softcap' else 1.0} beside teacher_top"):
        fl.linear_divergence(x, w, teacher_top=TOP, **option)


def test_lists_of_tokens_without_weight_may_be_anything():
    (x, w), _, _ = Case().sample()
    indices, weight = TOP[0].clone(), torch.ones(N)
    indices[3], weight[3] = -1, 0
    assert fl.linear_divergence(x, w, teacher_top=(indices, TOP[1]), token_weight=weight).isfinite()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_token_without_numbers_has_no_loss_and_is_alone(kind, who, device):
    (x, w), (t_x, t_w), _ = Case(dtype=f32).sample(device)
    (x if who == "student" else t_x).data[3] = torch.nan
    losses = fl.linear_divergence(x, w, t_x, t_w, kind=kind, reduction="none")
    assert losses.isnan().tolist() == [i == 3 for i in range(N)]
    if who == "student":
        top = [t.to(device) for t in TOP]
        assert fl.linear_divergence(x, w, teacher_top=(top[0], top[1].float()), kind=kind, reduction="none").isnan().tolist() == [i == 3 for i in range(N)]


def test_a_bad_list_is_nan_for_its_token_where_none_looks():
    z = torch.randn(6, V)
    indices, log_p = torch.tensor([[0, 1], [0, V], [2, 2], [-1, -1], [4, -2], [-1, 3]]), torch.full((6, 2), -1.0)
    log_p[5, 0] = torch.nan
    for softcap in (0.0, 3.0):
        for rest in (False, True):
            dz = z.clone()
            losses = divergence.top_rows(dz, indices, log_p, None, None, DivergenceOptions(softcap=softcap, drops_rest=rest), True)
            assert losses.isnan().tolist() == [False, True, True, True, True, False] and dz.isfinite().all() and not dz[1:5].any() and dz[5].all()


def test_a_bad_temperature_is_nan_for_its_token_where_none_looks(device):
    o, t = DivergenceOptions(), torch.tensor([1.0, 0.0, -1.0, torch.inf, torch.nan, 2.0], device=device)
    for kind in KINDS:
        losses = pairs.divergence_rows(torch.randn(6, V, device=device), torch.randn(6, V, device=device), None, None, o._replace(kind=kind), False, False, t)
        assert losses.isnan().tolist() == [False, True, True, True, True, False]
    weightless = torch.tensor([1.0, 0, 0, 0, 0, 1], device=device)
    z = torch.randn(6, V, device=device)
    assert pairs.divergence_rows(z, torch.randn(6, V, device=device), weightless, None, o, True, False, t).isfinite().all() and z.isfinite().all() and not z[1:5].any()


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_scores_of_tokens_with_a_temperature_each(kind, device):
    "Scores that an offset of 1e6 shifts, classes that cannot be, ties: a temperature each, against float64"
    made = torch.Generator().manual_seed(4)
    q, p = torch.randn(2, 6, V, generator=made, dtype=f64)
    q[0] = p[1] = 0.25
    q[:, 2] = p[:, 2] = -torch.inf
    t = torch.tensor([0.5, 2, 1, 0.01, 50, 0.3], dtype=f64)
    o = DivergenceOptions(kind, 0.3, 1.5, 0.5)
    truth = q.clone()
    losses = reference_divergence(truth, p, None, None, o, True, False, t)
    log_q, log_p = ((s * z / t[:, None]).log_softmax(1) for s, z in ((1.5, q), (0.5, p)))
    keep = torch.arange(V) != 2
    torch.testing.assert_close(losses, of_logs(kind, log_p[:, keep], log_q[:, keep], 0.3))
    z = (q + 2.0 ** 20).to(device)
    got = pairs.divergence_rows(z, (p + 2.0 ** 20).to(device), None, None, o, True, False, t.to(device))
    torch.testing.assert_close(got.cpu(), losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(z.cpu(), truth, rtol=1e-5, atol=1e-6)


# --- planted bugs ---

MUTANTS = {  # what is wrong: (text of the source, what stands in its place)
    "p and q change places": ("of(p, log_p - log_q), -p", "of(q, log_q - log_p), -p"),
    "reverse KL without its one": ("return terms, terms + q", "return terms, terms"),
    "the mixture has the student's share": ("log_p + math.log(beta), log_q + math.log1p(-beta)", "log_q + math.log(beta), log_p + math.log1p(-beta)"),
    "the mixture's gradient is not divided": ("rest = (1 - o.beta) * of", "rest = of"),
    "each token's temperature is the first's": ("unscaled_grad, part(temperature, i))", "unscaled_grad, part(temperature, slice(0, i.stop - i.start)))"),
    "temperatures are not packed": ("pick(temperature)", "temperature"),
    "the rest is not cooled": ("o, temperature=temperature)\n    row_max", "o)\n    row_max"),
    "an empty entry is a class": ("t.to(score.dtype).masked_fill(empty, -torch.inf)", "t.to(score.dtype)"),
    "an empty entry's gradient stays in its place": ("dz.gather(1, place)", "dz"),
    "a full list has a rest": ("log_p_rest = p_rest.log().masked_fill(full[:, None], -torch.inf)", "log_p_rest = p_rest.log()"),
    "the teacher's scale is the student's": ("cool(teacher_logit_scale)", "cool(logit_scale)"),
    "the temperature is forgotten in the slope": ("total[:, None]) * slope * scale", "total[:, None]) * scale"),
    "the teacher is not cooled": ("return LossOptions(logit_scale=self.teacher_logit_scale, softcap=self.teacher_softcap)", "return LossOptions(softcap=self.teacher_softcap)"),
    "the teacher's cap is the student's": ("cool(softcap),\n                             cool(teacher_softcap)", "cool(softcap),\n                             cool(softcap)"),
    "the first teacher's rows for all": ("make_logits(z, teacher.x[i]", "make_logits(z, teacher.x[:len(z)]"),
    "the first token weights for all": ("(part(token_weight, i), denominator", "(part(token_weight, slice(0, i.stop - i.start)), denominator"),
    "teacher's rows are not packed": ("teacher.rows(order)", "teacher"),
    "the mean is over all tokens": ("else token_weight.sum(dtype=acc)\n    denominator", "else x.new_full((), len(x), dtype=acc)\n    denominator"),
    "upstream gradients of tokens are dropped": ("torch.where(token_weight == 0, 0.0, g * token_weight)", "token_weight"),
    "a list without its rest's gradient": ("else u[:, k]) - log_q_rest", "else 0.0) - log_q_rest"),
    "a list's places keep their zeros": ("z.scatter_(1, at, dz.gather(1, place).to(z.dtype))", "pass"),
    "a cap's share stays in the rest": ("if o.softcap:\n        lowest", "if False:\n        lowest"),
}
CHOSEN_BUGS = few(MUTANTS, "p and q change places", "reverse KL without its one", "the teacher is not cooled", "the first teacher's rows for all",
                  "teacher's rows are not packed", "a list without its rest's gradient", "a cap's share stays in the rest",
                  "each token's temperature is the first's", "an empty entry's gradient stays in its place", "a full list has a rest")
NOTICED = [Case(options=dict(HOW["budget"], kind=kind, beta=0.3, reduction=reduction, temperature=0.7, softcap=3.0), weights=True, top=top)
           for kind in KINDS for reduction, top in (("none", 0), ("mean", 0), ("mean", K))]
NOTICED.append(Case(options=dict(kind="reverse_kl", top_rest="drop"), top=K))
NOTICED += [Case(options=dict(for_head("each token", top), kind=kind, memory_budget=8 * 16 * 2 * 3, reduction=reduction), weights=True, top=top)
            for kind, reduction, top in (("forward_kl", "none", 0), ("jsd", "mean", 0), ("reverse_kl", "mean", K))]
NOTICED += [Case(options=dict(HOW["scaled"], kind="forward_kl")), Case(options=dict(kind="forward_kl", softcap=3.0), top=V, ragged=True)]


def any_fault(module) -> list[str]:
    "What the cases notice, or the error that they run into"
    try: return [fault for case in NOTICED for fault in faults(case, loss=module.linear_divergence)]
    except (RuntimeError, ValueError, IndexError) as error: return [repr(error)]


def test_the_unchanged_source_passes(tmp_path):
    assert any_fault(planted(divergence, tmp_path, *unchanged(MUTANTS.values()))) == []


@pytest.mark.thorough
@pytest.mark.parametrize("bug", CHOSEN_BUGS)
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert any_fault(planted(divergence, tmp_path, *MUTANTS[bug])), "nothing noticed"


def flush_small_numbers(monkeypatch) -> None:
    "`log2` as a GPU's instruction: what is no normal number is 0 to it"
    @jit
    def flushing(x):
        return tl.log2(tl.where(x < 1.1754943508222875e-38, 0.0, x))
    monkeypatch.setattr(pairs, "log2", flushing)


@where_kernels_run
@pytest.mark.parametrize("beta", [1e-6, 0.5, 1 - 1e-6])
def test_probabilities_of_nearly_nothing(beta, device, monkeypatch):
    if INTERPRETED: flush_small_numbers(monkeypatch)
    far = torch.tensor([[0.0, -86.0, -87.0, -88.0, -torch.inf]], device=device)
    for z, teacher in ((far, far.flip(1)), (far, far.clone()), (far.flip(1), far)):
        o, truth = DivergenceOptions("jsd", beta), z.double()
        losses = reference_divergence(truth, teacher.double(), None, None, o, True)
        got = z.clone()
        torch.testing.assert_close(pairs.launch_divergence(got, teacher, None, None, o, True).double(), losses, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(got.double(), truth, rtol=1e-4, atol=1e-6)


KERNEL_MUTANTS = {
    "an old sum is not rescaled": ("tl.where(factor > 0, (cross + rise * s) * factor, 0.0)", "tl.where(factor > 0, cross + rise * s, 0.0)"),
    "an old sum keeps its maxima": ("(cross + rise * s) * factor", "cross * factor"),
    "lse of the teacher is added": ("- (p_log_s - q_log_s)", "+ (p_log_s - q_log_s)"),
    "reverse KL's gradient has no mean": ("p_top[:, None]) - slant)", "p_top[:, None]))"),
    "reverse KL's mean has the other sign": ("p_top[:, None]) - slant)", "p_top[:, None]) + slant)"),
    "the mixture's gradient has no mean": ("(1 - beta) * q * LN2 * ((log_q - log_m) - slant)", "(1 - beta) * q * LN2 * (log_q - log_m)"),
    "the mixture's value is one of base 2": ("+ (1 - beta) * slant) * LN2", "+ (1 - beta) * slant)"),
    "the cap has no slope": ("tl.where(live, dz * scale * slope, 0.0).to(q_start", "tl.where(live, dz * scale, 0.0).to(q_start"),
    "0 · inf": ("tl.where(e > 0, e * gap_of(z, new_max, other, new_other), 0.0)", "e * gap_of(z, new_max, other, new_other)"),
}


@pytest.mark.thorough
@where_kernels_run
@pytest.mark.parametrize("bug", few(KERNEL_MUTANTS, "an old sum is not rescaled", "0 · inf"))
def test_a_bug_planted_in_the_kernel_is_noticed(bug, tmp_path, device):
    k = planted(pairs, tmp_path, *KERNEL_MUTANTS[bug])
    options, masked = dict(logit_scale=0.5, softcap=3.0), torch.randn(2, 3, 40, dtype=f64)
    masked[:, :, :17] = -torch.inf
    found = [row_faults(k, kind, (5, 75), options, BLOCKS["small"], f32, device) for kind in KINDS]
    found += [row_faults(k, kind, (3, 40), {}, BLOCKS["small"], f32, device, weights=False, rows=masked) for kind in KINDS]
    assert any(found), "nothing noticed"
