"""Contrast of pairs in both directions: against open_clip's formula in float64, blocks, kernels, memory, what is refused, planted bugs."""
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fusedloss as fl
import fusedloss.contrast as contrast
from fusedloss.core.tiling import Tiling
from workbook.measure import MemoryTrace, relative_error
from grids import few, grid
from helpers import everywhere, has_no_second_derivative, planted, replays, unchanged, where_kernels_run

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
LEAST = 2**19  # bytes of scores
LIMITS = {f64: (1e-12, 1e-10), f32: (1e-5, 2e-5), bf16: (1e-5, 6e-3), f16: (1e-5, 1.5e-3)}  # of the loss, of gradients


def exact(x, y, logit_scale, *, reduction="mean"):
    "As open_clip's ClipLoss: cross entropy of images among texts and of texts among images"
    logits, labels = logit_scale * x @ y.T, torch.arange(len(x), device=x.device)
    each = (F.cross_entropy(logits, labels, reduction="none") + F.cross_entropy(logits.T, labels, reduction="none")) / 2
    return each if reduction == "none" else each.sum() / (len(x) if reduction == "mean" else 1)


def sample(n, h, dtype, device="cpu", unit=True, seed=3):
    "Features of pairs that are somewhat alike"
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(n, h, generator=made, dtype=f64)
    y = x + 2 * torch.randn(n, h, generator=made, dtype=f64)
    return [(F.normalize(t, dim=1) if unit else t).to(device, dtype) for t in (x, y)]


def run(loss, x, y, scale, **options):
    "Loss and gradients, the scale's last, for an uneven upstream gradient"
    x, y, scale = leaves = [t.detach().requires_grad_() for t in (x, y, scale)]
    out = loss(x, y, scale, **options)
    g = torch.linspace(-1.5, 1, max(out.numel(), 1), dtype=f64, device=x.device).view(out.shape).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, g)


def faults(loss, n, h, dtype, scale=14.0, device="cpu", **options) -> list[str]:
    "What a loss gets wrong, in words"
    x, y = sample(n, h, dtype, device)
    s = torch.tensor(scale, dtype=f64 if dtype == f64 else f32, device=device)
    got = run(loss, x, y, s, **options)
    truth = run(exact, x.double(), y.double(), s.double(), **{k: v for k, v in options.items() if k == "reduction"})
    wrong = []
    for name, a, e, kind in zip(("loss", "dx", "dy", "dscale"), got, truth, (s.dtype, dtype, dtype, s.dtype)):
        limit = LIMITS[dtype][name in ("dx", "dy")]
        if a.dtype != kind or a.shape != e.shape: wrong.append(f"{name} is {a.dtype} {list(a.shape)}")
        elif not (a.double() - e).norm() <= limit * max(e.norm(), 1e-3): wrong.append(f"{name} is off by {relative_error(a.cpu(), e.cpu()):.1e}")
    return wrong


# --- against the formula ---

SIZES = (1, 1), (5, 3), (130, 24), (300, 7)  # the last two in 2 × 2 and 3 × 3 blocks, where memory is least


@pytest.mark.parametrize("size, dtype, reduction, budget", grid(SIZES, (f64, f32, bf16, f16), ("mean", "sum", "none"), (None, LEAST)))
def test_against_the_formula(size, dtype, reduction, budget, device):
    assert faults(fl.contrastive_loss, *size, dtype, device=device, reduction=reduction, memory_budget=budget) == []


@pytest.mark.parametrize("scale", [0.0, -3.0, 1e-3, 100.0, 1e4])
def test_scales(scale):
    assert faults(fl.contrastive_loss, 140, 8, f64, scale, memory_budget=LEAST) == []
    x, y = sample(140, 8, f64)
    assert torch.equal(fl.contrastive_loss(x, y, scale), fl.contrastive_loss(x, y, torch.tensor(scale, dtype=f64)))


def test_the_scale_is_learned_through_its_logarithm():
    x, y = sample(40, 6, f64)
    for loss in (fl.contrastive_loss, exact):
        log_scale = torch.tensor(2.0, dtype=f64, requires_grad=True)
        loss(x, y, log_scale.exp()).backward()
        if loss is fl.contrastive_loss: found = log_scale.grad
    torch.testing.assert_close(found, log_scale.grad)


@pytest.mark.parametrize("dtype", [bf16, f16, f64])
def test_a_scale_of_another_dtype(dtype):
    x, y = sample(40, 6, f32)
    scale = torch.tensor(8.0, dtype=dtype, requires_grad=True)
    fl.contrastive_loss(x, y, scale).backward()
    assert scale.grad.dtype == dtype


@pytest.mark.parametrize("wanted", ["x", "y", "scale", "xy", ""])
def test_only_wanted_gradients(wanted):
    x, y = (t.requires_grad_(name in wanted) for t, name in zip(sample(20, 4, f64), "xy"))
    scale = torch.tensor(3.0, dtype=f64, requires_grad="scale" in wanted)
    loss = fl.contrastive_loss(x, y, scale)
    assert loss.requires_grad == bool(wanted)
    if not wanted: return
    loss.backward()
    assert [t.grad is not None for t in (x, y, scale)] == ["x" in wanted, "y" in wanted, "scale" in wanted]


def test_one_tensor_on_both_sides_has_both_gradients():
    x = sample(30, 5, f64)[0].requires_grad_()
    got, = torch.autograd.grad(fl.contrastive_loss(x, x, 5.0), x)
    torch.testing.assert_close(got, torch.autograd.grad(exact(x, x, 5.0), x)[0])


def test_strided_features():
    x, y = torch.randn(9, 50, dtype=f64).T.requires_grad_(), torch.randn(50, 9, 3, dtype=f64)[:, :, 1].requires_grad_()
    for a, e in zip(*(torch.autograd.grad(loss(x, y, 2.0), (x, y)) for loss in (fl.contrastive_loss, exact))): torch.testing.assert_close(a, e)


def test_no_pairs_and_no_features():
    for n, h in ((0, 4), (0, 0), (3, 0)):
        x, y = torch.zeros(n, h, requires_grad=True), torch.zeros(n, h, requires_grad=True)
        scale = torch.tensor(2.0, requires_grad=True)
        for reduction in ("mean", "sum", "none"):
            loss = fl.contrastive_loss(x, y, scale, reduction=reduction)
            grads = torch.autograd.grad(loss.sum(), (x, y, scale))
            assert loss.shape == ((n,) if reduction == "none" else ()) and all(g.shape == t.shape and not g.any() for g, t in zip(grads, (x, y, scale)))
            torch.testing.assert_close(loss, torch.full_like(loss, torch.tensor(float(max(n, 1))).log().item() * (n if reduction == "sum" else 1)))


def test_certain_pairs_have_no_negative_loss():
    x = 30 * torch.eye(6)
    assert fl.contrastive_loss(x, x, 1.0, reduction="none").tolist() == [0.0] * 6


def test_one_row_far_above_and_one_column_far_below():
    "Row 0 is certain of its own pair; column 1 has no better row than row 0: each direction has its own exponential"
    z = torch.tensor([[120.0, 10.0], [0.0, 8.0]], dtype=f64)
    for dtype in (f32, f64):
        assert faults_of_scores(z, dtype) < 8 * 120 * torch.finfo(dtype).eps  # roundings of the largest score


def faults_of_scores(z, dtype) -> float:
    "Relative error of dy for features whose products are `z`"
    grads = []
    for loss, kind in ((fl.contrastive_loss, dtype), (exact, f64)):
        x, y = z.to(kind).requires_grad_(), torch.eye(2, dtype=kind, requires_grad=True)
        grads.append(torch.cat([g.flatten().double() for g in torch.autograd.grad(loss(x, y, 1.0), (x, y))]))
    return relative_error(*grads)


def test_a_nan_spoils_the_loss_and_an_inf_does():
    for bad in (torch.nan, torch.inf):
        x, y = sample(10, 4, f32)
        x[3, 1] = bad
        assert fl.contrastive_loss(x, y, 2.0).isnan()


def test_small_upstream_gradients_survive_in_fp16():
    x, y = (t.requires_grad_() for t in sample(64, 8, f16))
    found = torch.autograd.grad(fl.contrastive_loss(x, y, 10.0), (x, y), torch.tensor(1e-3))
    truth = torch.autograd.grad(exact(x.double(), y.double(), 10.0) * 1e-3, (x, y))
    for a, e in zip(found, truth): assert relative_error(a, e) < 0.05


# --- how it is called ---

def test_autocast_is_that_of_a_linear_layer():
    x, y = (t.requires_grad_() for t in sample(40, 6, f32))
    with torch.autocast("cpu", bf16): loss = fl.contrastive_loss(x, y, 5.0)
    expected = fl.contrastive_loss(x.to(bf16), y.to(bf16), 5.0)
    assert loss.dtype == f32 and torch.equal(loss, expected) and torch.autograd.grad(loss, x)[0].dtype == f32
    with torch.autocast("cpu", bf16): assert fl.contrastive_loss(x.double(), y.double(), 5.0).dtype == f64


def test_second_derivatives_and_transforms_are_refused():
    x, y = (t.requires_grad_() for t in sample(8, 3, f64))
    scale = torch.tensor(2.0, dtype=f64, requires_grad=True)
    assert has_no_second_derivative(fl.contrastive_loss(x, y, scale), x)
    assert has_no_second_derivative(fl.contrastive_loss(x, y, scale), scale)
    with pytest.raises(RuntimeError, match="not batched by torch.vmap"): torch.vmap(lambda a: fl.contrastive_loss(a, y, 2.0))(x[None])
    with pytest.raises(RuntimeError, match="no forward-mode derivative"): torch.func.jvp(lambda a: fl.contrastive_loss(a, y, 2.0), (x,), (x,))
    found = torch.func.grad(lambda a: fl.contrastive_loss(a, y.detach(), 2.0))(x.detach())
    torch.testing.assert_close(found, torch.autograd.grad(exact(x, y, 2.0), x)[0])


def test_compiled_whole():
    x, y = (t.requires_grad_() for t in sample(20, 4, f64))
    scale = torch.tensor(4.0, dtype=f64, requires_grad=True)
    compiled = torch.compile(fl.contrastive_loss, fullgraph=True, backend="aot_eager")
    for a, e in zip(*(torch.autograd.grad(loss(x, y, scale), (x, y, scale)) for loss in (compiled, exact))): torch.testing.assert_close(a, e)


def test_operators_are_as_declared():
    x, y = (t.requires_grad_() for t in sample(7, 3, f64))
    torch.library.opcheck(torch.ops.fusedloss.contrast.default, (x, y, torch.tensor(2.0, dtype=f64, requires_grad=True), None),
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


REFUSED = {
    "y": (lambda x, y: (x, y[1:], 1.0), {}, r"y: expected x's shape \[8, 3\], got \[7, 3\]"),
    "y's dtype": (lambda x, y: (x, y.double(), 1.0), {}, "y: expected x's dtype torch.float32, got torch.float64"),
    "x's dimensions": (lambda x, y: (x[0], y[0], 1.0), {}, r"x: expected shape \[N, H\], got \[3\]"),
    "a list": (lambda x, y: (x, y.tolist(), 1.0), {}, "y: expected a tensor, got list"),
    "a vector of scales": (lambda x, y: (x, y, torch.ones(1)), {}, r"logit_scale: expected a number or a 0-dim tensor, got shape \[1\]"),
    "an integer's scale": (lambda x, y: (x, y, torch.tensor(1)), {}, "logit_scale: expected a floating dtype"),
    "an infinite scale": (lambda x, y: (x, y, float("inf")), {}, "logit_scale: expected a finite number"),
    "reduction": (lambda x, y: (x, y, 1.0), dict(reduction="avg"), "reduction: expected 'none', 'mean' or 'sum', got 'avg'"),
    "memory": (lambda x, y: (x, y, 1.0), dict(memory_budget=1000), "memory_budget: expected an integer of at least 524288 bytes, or None, got 1000"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    given, options, message = REFUSED[what]
    with pytest.raises(ValueError, match=message): fl.contrastive_loss(*given(*sample(8, 3, f32)), **options)


# --- more columns than rows, several positives; SigLIP ---

def named_in(positives, n, m):
    "Which columns [N,M] the rows name"
    mask = torch.zeros(n, m + 1, dtype=torch.bool, device=positives.device)
    return mask.scatter_(1, torch.where(positives < 0, m, positives).view(n, -1), True)[:, :m]


def exact_positives(x, y, logit_scale, *, positives, reduction="mean"):
    "Each row's mean over its positives, and each named column's over the rows that name it"
    z, mask = logit_scale * x @ y.T, named_in(positives, len(x), len(y))
    rows = (-z.log_softmax(1) * mask).sum(1) / mask.sum(1)
    named = mask.sum(0)
    terms = -z.log_softmax(0) * mask / named.clamp(min=1)
    if reduction == "mean": return (rows.mean() + terms.sum() / (named > 0).sum()) / 2
    return (rows.sum() + terms.sum()) / 2 if reduction == "sum" else (rows + terms.sum(1)) / 2


def exact_sigmoid(x, y, logit_scale, logit_bias, *, positives=None, reduction="mean"):
    "As SigLIP's paper: a binary decision for each row and column"
    named = named_in(torch.arange(len(x), device=x.device) if positives is None else positives, len(x), len(y))
    each = -F.logsigmoid(torch.where(named, 1, -1) * (logit_scale * x @ y.T + logit_bias)).sum(1)
    return each if reduction == "none" else each.sum() / (len(x) if reduction == "mean" else 1)


def some_positives(n, m, p, device="cpu"):
    "The first of each row is one; among the others are none, and some twice"
    found = torch.randint(-1, m, (n, p), generator=torch.Generator().manual_seed(5))
    found[:, 0] = torch.randint(0, m, (n,), generator=torch.Generator().manual_seed(6))
    found[::2, -1] = found[::2, 0]
    return (found if p > 1 else found[:, 0]).to(device)


OTHERS = {"positives": (fl.contrastive_loss, exact_positives, (14.0,)), "SigLIP": (fl.sigmoid_contrastive_loss, exact_sigmoid, (8.0, -4.0))}
UNEVEN = {"one column": (5, 1, 3, 1), "few columns": (40, 6, 7, 4), "hard negatives": (130, 290, 24, 1), "both": (300, 140, 7, 5)}  # N, M, H, P


def other_faults(kind, n, m, h, p, dtype, device="cpu", loss=None, **options) -> list[str]:
    "What a loss of `OTHERS` gets wrong, in words"
    ours, truth, numbers = OTHERS[kind]
    x, y = sample(max(n, m), h, dtype)
    x, y, positives = x[:n].to(device), y[:m].to(device), some_positives(n, m, p, device) if p else None
    results = []
    for run_loss, kind_of in ((loss or ours, dtype), (truth, f64)):
        leaves = [t.detach().to(kind_of).requires_grad_() for t in (x, y)]
        leaves += [torch.tensor(v, dtype=f64 if kind_of == f64 else f32, device=device, requires_grad=True) for v in numbers]
        how = options if run_loss is not truth else {k: v for k, v in options.items() if k == "reduction"}
        out = run_loss(*leaves, positives=positives, **how)
        g = torch.linspace(-1.5, 1, max(out.numel(), 1), dtype=f64, device=device).view(out.shape).to(out.dtype)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, g)))
    wrong = []
    for name, a, e, t in zip(("loss", "dx", "dy", "dscale", "dbias"), *results, (results[0][0], *leaves)):
        limit = LIMITS[dtype][name in ("dx", "dy")]
        kind_of = dtype if name in ("dx", "dy") else f64 if dtype == f64 else f32
        if a.dtype != kind_of or a.shape != e.shape: wrong.append(f"{name} is {a.dtype} {list(a.shape)}")
        elif not (a.double() - e).norm() <= limit * max(e.norm(), 1e-3): wrong.append(f"{name} is off by {relative_error(a.cpu(), e.cpu()):.1e}")
    return wrong


@pytest.mark.parametrize("kind, size, dtype, reduction, budget", grid(tuple(OTHERS), tuple(UNEVEN), (f64, f32, bf16, f16), ("mean", "sum", "none"), (None, LEAST)))
def test_against_the_definition(kind, size, dtype, reduction, budget, device):
    assert other_faults(kind, *UNEVEN[size], dtype, device=device, reduction=reduction, memory_budget=budget) == []


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_positives_of_the_diagonal_are_pairs(reduction):
    x, y = sample(150, 7, f64)
    s = torch.tensor(9.0, dtype=f64)
    paired = run(fl.contrastive_loss, x, y, s, reduction=reduction, memory_budget=LEAST)
    for positives in (torch.arange(150), torch.arange(150, dtype=torch.int32)[:, None], torch.stack([torch.arange(150), torch.full((150,), -1), torch.arange(150)], 1)):
        for a, e in zip(run(fl.contrastive_loss, x, y, s, reduction=reduction, positives=positives), paired): torch.testing.assert_close(a, e)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_siglip_of_pairs(reduction):
    assert other_faults("SigLIP", 140, 140, 6, 0, f64, reduction=reduction, memory_budget=LEAST) == []


def test_rows_that_share_an_offset_of_a_million():
    "Softmaxes do not see it; of SigLIP's logits, each 1e6, all that is not a positive costs as much"
    found, positives = [], some_positives(40, 60, 3)
    for shift in (0.0, 1e6):
        x, y = sample(60, 6, f64)
        x[:, 0], y[:, 0] = 1.0, shift
        found.append(run(fl.contrastive_loss, x[:40], y, torch.tensor(1.0, dtype=f64), positives=positives, reduction="none")[:2])
    torch.testing.assert_close(*((loss, dx[:, 1:]) for loss, dx in found), rtol=1e-8, atol=1e-8)
    x, y, positives = torch.ones(8, 1), torch.full((12, 1), 1e6), some_positives(8, 12, 2)
    loss = fl.sigmoid_contrastive_loss(x, y, 1.0, 0.0, positives=positives, reduction="none")
    torch.testing.assert_close(loss, 1e6 * (~named_in(positives, 8, 12)).sum(1).float())


def test_certain_answers_keep_their_digits():
    "SigLIP's losses of 1e-9 each, which 1 + e would lose"
    x, y = 20 * torch.eye(6), torch.eye(6)
    found = fl.sigmoid_contrastive_loss(x, y, 2.0, -20.0, reduction="none")
    torch.testing.assert_close(found, exact_sigmoid(x.double(), y.double(), 2.0, -20.0, reduction="none").float(), rtol=1e-5, atol=0)


def test_siglip_has_rows_without_positives():
    x, y = sample(9, 4, f64)
    none = torch.full((9, 2), -1)
    torch.testing.assert_close(fl.sigmoid_contrastive_loss(x, y, 3.0, -1.0, positives=none), exact_sigmoid(x, y, 3.0, -1.0, positives=none))


@pytest.mark.parametrize("kind", OTHERS)
def test_sizes_of_nothing(kind):
    loss, _, numbers = OTHERS[kind]
    for n, m, h in ((0, 3, 4), (0, 0, 4), (3, 2, 0)):
        x, y = torch.zeros(n, h, requires_grad=True), torch.zeros(m, h, requires_grad=True)
        for reduction in ("mean", "sum", "none"):
            out = loss(x, y, *numbers, positives=torch.zeros(n, 1, dtype=torch.long), reduction=reduction)
            grads = torch.autograd.grad(out.sum(), (x, y))
            assert out.isfinite().all() and all(g.shape == t.shape and not g.any() for g, t in zip(grads, (x, y)))


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (-1,), (0, 1), ()])
def test_only_wanted_gradients_of_others(kind, wanted):
    loss, _, numbers = OTHERS[kind]
    leaves = [*sample(20, 4, f64), *(torch.tensor(v, dtype=f64) for v in numbers)]
    wanted = [leaves[k].requires_grad_() for k in wanted]
    out = loss(*leaves, positives=some_positives(20, 20, 2))
    assert out.requires_grad == bool(wanted)
    if wanted: out.backward()
    assert all((t.grad is not None) == any(t is w for w in wanted) for t in leaves)


@pytest.mark.parametrize("kind", OTHERS)
def test_others_as_they_are_called(kind):
    loss, truth, numbers = OTHERS[kind]
    x, y = (t.requires_grad_() for t in sample(20, 4, f64))
    positives = some_positives(20, 20, 3)
    call = lambda loss, x=x, y=y: loss(x, y, *numbers, positives=positives)  # noqa: E731
    compiled = torch.compile(lambda x, y: loss(x, y, *numbers, positives=positives), fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(call(truth), (x, y))
    for a, e in zip(torch.autograd.grad(compiled(x, y), (x, y)), expected): torch.testing.assert_close(a, e)
    assert has_no_second_derivative(call(loss), x)
    with pytest.raises(RuntimeError, match="not batched by torch.vmap"): torch.vmap(lambda a: call(loss, a))(x[None])
    torch.testing.assert_close(torch.func.grad(lambda a: call(loss, a, y.detach()))(x.detach()), expected[0])
    narrow = [t.detach().float() for t in (x, y)]
    with torch.autocast("cpu", bf16): found = call(loss, *narrow)
    assert found.dtype == f32 and torch.equal(found, call(loss, *(t.to(bf16) for t in narrow)))


def test_operators_of_others_are_as_declared():
    x, y = (t.requires_grad_() for t in sample(7, 3, f64))
    s, b = (torch.tensor(v, dtype=f64, requires_grad=True) for v in (2.0, -1.0))
    checks = dict(test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    torch.library.opcheck(torch.ops.fusedloss.contrast_positives.default, (x, y, s, contrast.listed(some_positives(7, 7, 2)), True, None), **checks)
    torch.library.opcheck(torch.ops.fusedloss.contrast_sigmoid.default, (x, y, s, b, None, None), **checks)


NAMES_REFUSED = {
    "floats": (torch.ones(8), ValueError, "positives: expected int64, got torch.float32"),
    "a list": ([1] * 8, ValueError, "positives: expected a tensor or None, got list"),
    "too few": (torch.zeros(7, dtype=torch.long), ValueError, r"positives: expected shape \[8\] or \[8, P\], P ≥ 1, got \[7\]"),
    "no columns": (torch.zeros(8, 0, dtype=torch.long), ValueError, "P ≥ 1"),
    "behind the last": (torch.full((8, 2), 8), IndexError, "positives: expected 0 ≤ row of y < 8, or -1 for none, got 8 in row 0"),
    "before the first": (torch.full((8,), -2), IndexError, "got -2 in row 0"),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("what", NAMES_REFUSED)
def test_refused_positives(kind, what):
    loss, _, numbers = OTHERS[kind]
    positives, error, message = NAMES_REFUSED[what]
    with pytest.raises(error, match=message): loss(*sample(8, 3, f32), *numbers, positives=positives)


def test_what_else_is_refused_of_others():
    x, y = sample(8, 3, f32)
    with pytest.raises(ValueError, match="positives: expected at least one in each row, got none in row 2"):
        fl.contrastive_loss(x[:3], y, 1.0, positives=torch.tensor([[0, -1], [-1, 3], [-1, -1]]))
    with pytest.raises(ValueError, match=r"y: expected shape \[M, 3\], got \[8, 2\]"):
        fl.contrastive_loss(x, y[:, :2], 1.0, positives=torch.arange(8))
    with pytest.raises(ValueError, match=r"y: expected x's shape \[8, 3\], got \[7, 3\]"): fl.sigmoid_contrastive_loss(x, y[1:], 1.0, 0.0)
    with pytest.raises(ValueError, match="logit_bias: expected a finite number"): fl.sigmoid_contrastive_loss(x, y, 1.0, float("nan"))
    with pytest.raises(ValueError, match="reduction: expected"): fl.sigmoid_contrastive_loss(x, y, 1.0, 0.0, reduction="avg")


@pytest.mark.parametrize("kind", OTHERS)
def test_others_have_the_same_bits_again(kind):
    loss, _, numbers = OTHERS[kind]
    x, y = sample(300, 8, f32)
    positives = some_positives(300, 300, 4)
    once, again = (run(lambda x, y, s, loss=loss: loss(x, y, s, *numbers[1:], positives=positives, memory_budget=LEAST), x, y, torch.tensor(9.0)) for _ in range(2))
    assert all(map(torch.equal, once, again))


# --- memory, and bits ---

def peak(n, h, budget, dtype=f32) -> int:
    "Bytes of a step beyond the gradients"
    x, y = (t.requires_grad_() for t in sample(n, h, dtype))
    with MemoryTrace() as trace: grads = torch.autograd.grad(fl.contrastive_loss(x, y, 9.0, memory_budget=budget), (x, y))
    return max(e.live for e in trace.events) - sum(g.nbytes for g in grads)


def test_memory_is_that_of_a_block_and_linear():
    found = [peak(n, 16, LEAST) for n in (512, 1024, 2048)]
    assert found[0] < 1.5 * LEAST and found[2] - found[1] < 1024 * 100, "far below 4 bytes for each of 1024 × 1024 scores"


def test_the_same_bits_again_and_in_blocks_of_other_sizes_the_same_numbers():
    x, y = sample(300, 8, f32)
    first, again, whole = (run(fl.contrastive_loss, x, y, torch.tensor(9.0), memory_budget=budget) for budget in (LEAST, LEAST, None))
    assert all(map(torch.equal, first, again))
    for a, e in zip(first, whole): torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-7)


# --- kernels, by the interpreter where there is no GPU ---

SMALL = Tiling(False, 16, 32, 16, warps=4)


def kernel_faults(k, r, c, h, dtype, device, paired, scale=1.5, shift=0.0, fresh=(False, False), several=False) -> list[str]:
    "What the kernels of a module `k` get wrong of a block"
    made = torch.Generator().manual_seed(1)
    x, y = (torch.randn(n, h, generator=made).to(device, dtype) for n in (r, c))
    y[:, 0] += shift
    s, wrong = torch.tensor([scale], device=device), []
    sums = [[torch.stack([torch.linspace(-2, 3, n, device=device), torch.linspace(1, 4, n, device=device)]) for n in (r, c)] for _ in range(2)]
    for before in sums:
        before[0][0, 0], before[0][1, 0] = -torch.inf, 0.0
    k.launch_statistics(x, y, s, *sums[0], fresh, SMALL)
    contrast.plain_statistics(x, y, s, *sums[1], fresh)
    coefs, dz = [torch.linspace(-1, 2, n, device=device) for n in (r, c)], torch.full((r, c + 3), 7.0, device=device, dtype=dtype)
    whole = torch.empty(r, c, device=device)
    terms = tuple(zip(sums[1], coefs))
    index = (torch.arange(3 * r, device=device).view(r, 3) * 7) % (c + 20) - 1  # of columns from 10 on, some before and behind the block
    marks = contrast.Positives(index, *(torch.linspace(-1, 1, n, device=device) for n in (r, r, c))) if several else None
    parts = k.launch_dz(x, y, s, *terms, paired, marks, 10, True, dz[:, :c], SMALL).sum(), contrast.plain_dz(x, y, s, *terms, paired, marks, 10, True, whole).sum()
    limit = 1e-4 if dtype == f32 else 2e-3
    for name, a, e, most in (("rows", sums[0][0].flatten(), sums[1][0].flatten(), 1e-5), ("columns", sums[0][1].flatten(), sums[1][1].flatten(), 1e-5), ("dz", dz[:, :c], whole, limit), ("scale", *parts, 1e-4)):
        if not relative_error(a, e) <= most: wrong.append(f"{name} off by {relative_error(a, e):.1e}")
    if (dz[:, c:] != 7).any(): wrong.append("written beyond the edge")
    return wrong


BLOCKS = {"small": (9, 9, 5, 0.0), "ragged": (40, 50, 20, 0.0), "far below": (17, 70, 33, -60.0)}


@where_kernels_run
@pytest.mark.parametrize("block, dtype, targets", grid(tuple(BLOCKS), (f32, f16), (None, "paired", "several")))
def test_kernels(block, dtype, targets, device):
    r, c, h, shift = BLOCKS[block]
    paired, fresh = targets == "paired", (targets == "several", targets is None)
    assert kernel_faults(contrast, r, r if paired else c, h, dtype, device, paired, shift=shift, fresh=fresh, several=targets == "several") == []


def cut_in_32(monkeypatch, device, sums: bool):
    "Blocks of 32 rows and a rest, in fp16: those of gradients, and where `sums` also those of sums, which else are one"
    if device == "cpu": everywhere(monkeypatch, contrast, "takes_kernel", lambda x: x.dtype == f16)
    for name in ("blocks_of", "sum_blocks")[:1 + sums]:
        monkeypatch.setattr(contrast, name, lambda x, memory_budget: [slice(k, min(k + 32, len(x))) for k in range(0, len(x), 32)])


@where_kernels_run
@pytest.mark.parametrize("sums", [False, True])
def test_the_whole_loss_by_kernels(sums, device, monkeypatch):
    cut_in_32(monkeypatch, device, sums)
    assert faults(fl.contrastive_loss, 70, 24, f16, device=device, reduction="none") == []


@where_kernels_run
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("kind", OTHERS)
def test_others_by_kernels(kind, sums, device, monkeypatch):
    cut_in_32(monkeypatch, device, sums)
    for p, reduction in ((1, "none"), (3, "mean" if sums else "none"), (1, "sum" if sums else "mean")):
        assert other_faults(kind, 40, 70, 24, p, f16, device=device, reduction=reduction) == []
    if kind == "SigLIP": assert other_faults(kind, 70, 70, 24, 0, f16, device=device, reduction="none") == []


@where_kernels_run
@pytest.mark.parametrize("kind", OTHERS)
def test_by_kernels_positives_of_any_strides(kind, device, monkeypatch):
    cut_in_32(monkeypatch, device, False)
    (x, y), (call, _, numbers) = (torch.randn(n, 24, generator=torch.Generator().manual_seed(n)).to(device, f16) for n in (40, 70)), OTHERS[kind]
    for p in (1, 3):
        positives = some_positives(40, 70, p, device)
        wide = torch.full((2 * 40 * p,), 10**6, device=device)[::2].view(40, p) if p > 1 else torch.full((80,), 10**6, device=device)[::2]
        wide.copy_(positives)
        for strided in (wide, positives.t().contiguous().t()):
            got, want = (call(x, y, *numbers, positives=t, reduction="none") for t in (strided, positives))
            assert torch.equal(got, want)


@where_kernels_run
@pytest.mark.parametrize("kind", OTHERS)
def test_by_kernels_a_row_spoils_itself(kind, device, monkeypatch):
    "A row that names what is not there has no loss, and an infinite upstream gradient no finite sum in its columns"
    cut_in_32(monkeypatch, device, False)
    monkeypatch.setattr(contrast, "may_look", lambda t: False)
    loss, _, numbers = OTHERS[kind]
    x, y = (t.to(device).requires_grad_() for t in sample(40, 24, f16))
    positives = some_positives(40, 40, 3, device)
    positives[7, 1], positives[8, 2], positives[9] = 40, -2, -1
    losses = loss(x, y, *numbers, positives=positives, reduction="none")
    assert losses.isnan().nonzero().flatten().tolist() == ([7, 8, 9] if kind == "positives" else [7, 8])
    positives = torch.arange(40, device=device) // 2
    losses = loss(x, y, *numbers, positives=positives, reduction="none")
    for bad in (torch.inf, torch.nan):
        g = torch.ones_like(losses)
        g[4] = bad
        dx, dy = torch.autograd.grad(losses, (x, y), g, retain_graph=True)
        if kind == "SigLIP": assert (~dx.isfinite()).any(1).nonzero().flatten().tolist() == [4]
        else: assert not dy.isfinite().all(1).any() and not dx.isfinite().all(1).any()  # row 4 reaches all columns, and its own column all rows


@where_kernels_run
def test_by_kernels_a_step_has_few_launches(device, monkeypatch):
    "Forward and backward, of one block a side and of two"
    seen, real, tiles = [], contrast.launch_kernel, contrast.launcher
    if device == "cpu": everywhere(monkeypatch, contrast, "takes_kernel", lambda x: x.dtype == f16)
    monkeypatch.setattr(contrast, "launch_kernel", lambda kernel, *a, **k: (seen.append(kernel.__name__), real(kernel, *a, **k)))
    monkeypatch.setattr(contrast, "launcher", lambda kernel, *a: (seen.append(kernel.__name__), tiles(kernel, *a))[1])
    x, y = (t.to(device).requires_grad_() for t in sample(40, 24, f16))
    for wanted, blocks in ((2 + 2, 1), (2 + 1 + 4, 2)):
        if blocks == 2: cut_in_32(monkeypatch, device, False)
        for loss, more in ((fl.contrastive_loss, 0), (partial(fl.sigmoid_contrastive_loss, logit_bias=-3.0), 0),
                           (partial(fl.contrastive_loss, positives=torch.arange(40, device=device)), 4)):
            seen.clear()
            torch.autograd.grad(loss(x, y, logit_scale=9.0), (x, y))
            assert len(seen) == wanted + more, seen


@where_kernels_run
def test_by_kernels_the_same_bits_again(device, monkeypatch):
    "Many rows to a column, in any order"
    cut_in_32(monkeypatch, device, False)
    x, y = (t.to(device) for t in sample(70, 24, f16))
    positives, s = some_positives(70, 5, 3, device), torch.tensor(9.0, device=device)
    first, again = (run(fl.contrastive_loss, x, y[:5], s, positives=positives, reduction="none") for _ in range(2))
    assert all(map(torch.equal, first, again))


@where_kernels_run
@pytest.mark.parametrize("block, dtype", grid(tuple(BLOCKS), (f32, f16)))
def test_sigmoid_kernels(block, dtype, device):
    r, c, h, shift = BLOCKS[block]
    made = torch.Generator().manual_seed(2)
    x, y = (torch.randn(n, h, generator=made).to(device, dtype) for n in (r, c))
    y[:, 0] += shift / 4
    s, b, index = torch.tensor([1.5], device=device), torch.tensor([-9.0], device=device), (torch.arange(3 * r, device=device).view(r, 3) * 7) % (c + 20) - 1
    given, coef, limit = (x, y, s, b), torch.linspace(-1, 2, r, device=device), 1e-4 if dtype == f32 else 2e-3
    for at in (contrast.listed(index), index[:, :1].contiguous(), None):
        dz, whole = torch.full((r, c + 3), 7.0, device=device, dtype=dtype), torch.empty(r, c, device=device)
        for fresh in (True, False):
            losses = [torch.linspace(1, 2, r, device=device) for _ in range(2)]
            ours = contrast.BlockTargets(at is None and r == c, at, 10, c + 20)
            theirs = ours if at is None else ours._replace(index=contrast.as_positives(at, c + 20))
            contrast.launch_sigmoid_losses(*given, ours, losses[0], fresh, SMALL)
            contrast.plain_sigmoid_losses(*given, theirs, losses[1], fresh)
            torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-7)
        parts = contrast.launch_sigmoid_dz(*given, ours, coef, True, dz[:, :c], SMALL).sum(1), contrast.plain_sigmoid_dz(*given, theirs, coef, True, whole).sum(1)
        assert relative_error(*parts) <= 1e-4 and relative_error(dz[:, :c], whole) <= limit and (dz[:, c:] == 7).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("kind", OTHERS)
def test_others_on_a_gpu(kind):
    "By descriptors and pointers; replayed; a row that names what is not there"
    loss, _, numbers = OTHERS[kind]
    for h in (64, 67): assert other_faults(kind, 1500, 2300, h, 3, bf16, device="cuda", reduction="none", memory_budget=LEAST) == []
    x, y = (t.requires_grad_() for t in sample(300, 64, bf16, "cuda"))
    positives = some_positives(300, 300, 3, "cuda")
    assert replays(lambda: torch.autograd.grad(loss(x, y, *numbers, positives=positives, memory_budget=LEAST), (x, y)))
    positives[7, 1], positives[8, 2] = 300, -2
    assert loss(x, y, *numbers, positives=positives, reduction="none").isnan().nonzero().flatten().tolist() == [7, 8]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_a_graph_replays_on_a_gpu():
    x, y = (t.requires_grad_() for t in sample(300, 64, bf16, "cuda"))
    scale = torch.tensor(10.0, device="cuda", requires_grad=True)
    assert replays(lambda: torch.autograd.grad(fl.contrastive_loss(x, y, scale, memory_budget=LEAST), (x, y, scale)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_a_gpu_by_descriptors_and_pointers(dtype):
    for h in (64, 67):
        assert faults(fl.contrastive_loss, 1500, h, dtype, 60.0, "cuda", reduction="none", memory_budget=LEAST) == []


# --- planted bugs ---

MUTANTS = {  # what is wrong: (text of the source, what stands in its place)
    "columns are rows": ("(col_sums, z.T, fresh[1]))", "(col_sums, z if len(x) == len(y) else z.T, fresh[1]))"),
    "a block replaces what was summed": ("no_sums(len(scores), scale) if new else sums", "no_sums(len(scores), scale)"),
    "the columns' sums are those of the first block": ("columns_in(col_sums, j), new)", "columns_in(col_sums, slice(0, j.stop - j.start)), new)"),
    "each block has a diagonal": ("paired and i == j,", "paired and d.shape[0] == d.shape[1],"),
    "columns take their rows' upstream gradients": ("of(row_terms, i), of(col_terms, j), paired", "of(row_terms, i), (col_terms[0][:, j], col_terms[1][:j.stop - j.start]), paired"),
    "the diagonal counts once": ("dz.diagonal().sub_(2 * row_coef)", "dz.diagonal().sub_(row_coef)"),
    "dx of the last block alone": ("part(y, j).to(dz.dtype), not new[0])", "part(y, j).to(dz.dtype), False)"),
    "dy begins with what was there": ("part(x, i).to(dz.dtype), not new[1])", "part(x, i).to(dz.dtype), True)"), "dy of the last block alone": ("part(x, i).to(dz.dtype), not new[1])", "part(x, i).to(dz.dtype), False)"),
    "the scale is forgotten in dx": ("scale * unit, unit", "unit, unit"),
    "the scale's gradient is not halved": ("scale * unit, unit", "scale * unit, 2 * unit"),
    "the scale's gradient is of scores": ("product.mul_(dz).sum()", "product.mul_(scale).mul_(dz).sum()"),
    "upstream gradients are dropped": ("return (g / top).contiguous(), scale", "return torch.ones_like(g / top), scale"),
    "the mean is a sum": ("losses.mean() if s.ranks == 1", "losses.sum() if s.ranks == 1"),
    "losses are not halved": ("loss_below(own, *col_sums)) / 2", "loss_below(own, *col_sums))"),
    "pairs' scores without the scale": ("own = pair_scores(x, y, blocks) * scale", "own = pair_scores(x, y, blocks)"),
}
OTHER_MUTANTS = {
    "a positive twice counts twice": ("at[:, 1:].masked_fill_((index[:, 1:] == index[:, :-1]) & (at[:, 1:] >= 0), -1)", "pass"),
    "columns are divided by all": ("*col_sums[:, at]) / counts[at], 0", "*col_sums[:, at]) / counts[:-1].sum(), 0"),
    "the mean is over all columns": ("counts[-1] = (counts[:-1] > 0).sum()", "counts[-1] = len(counts) - 1"),
    "rows are not divided by their positives": ("own / (n.index >= 0).sum(1), coef", "own, coef"),
    "columns of one row alone": ("column_sums(torch.where(inside, at, -1), weights[2]", "column_sums(torch.where(inside, at, -1)[:, :1], weights[2]"),
    "positives of the first block": ("at = index - first", "at = index"),
    "SigLIP's positives are negatives in backward": ("flip_positives(dz, targets)", "pass"),
    "SigLIP's bias is forgotten": (".mul_(scale).add_(bias)", ".mul_(scale)"),
    "SigLIP's upstream gradients are dropped": ("out=dz).mul_(coef[:, None])", "out=dz)"),
}
CHOSEN_BUGS = few(MUTANTS, "a block replaces what was summed", "each block has a diagonal", "columns take their rows' upstream gradients", "dx of the last block alone",
                  "dy begins with what was there", "the scale's gradient is of scores", "the mean is a sum")


def any_fault(module) -> list[str]:
    "What two cases notice, or the error that they run into"
    try: return [f for reduction in ("none", "mean") for f in faults(module.contrastive_loss, 256 if reduction == "none" else 130, 5, f64, reduction=reduction, memory_budget=LEAST)]
    except (RuntimeError, ValueError, IndexError) as error: return [repr(error)]


def test_the_unchanged_source_passes(tmp_path):
    assert any_fault(planted(contrast, tmp_path, *unchanged(MUTANTS.values()))) == []


@pytest.mark.thorough
@pytest.mark.parametrize("bug", CHOSEN_BUGS)
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert any_fault(planted(contrast, tmp_path, *MUTANTS[bug])), "nothing noticed"


def other_fault(module) -> list[str]:
    "What a case of each loss notices"
    named = {"positives": module.contrastive_loss, "SigLIP": module.sigmoid_contrastive_loss}
    return [f for kind, loss in named.items() for reduction in ("none", "mean")
            for f in other_faults(kind, 140, 290, 5, 3, f64, loss=loss, reduction=reduction, memory_budget=LEAST)]


def test_the_unchanged_source_passes_for_others(tmp_path):
    assert other_fault(planted(contrast, tmp_path, *unchanged(OTHER_MUTANTS.values()))) == []


@pytest.mark.thorough
@pytest.mark.parametrize("bug", OTHER_MUTANTS)
def test_a_bug_planted_in_others_is_noticed(bug, tmp_path):
    assert other_fault(planted(contrast, tmp_path, *OTHER_MUTANTS[bug])), "nothing noticed"


KERNEL_MUTANTS = {
    "rows beyond the edge count in columns": ("tl.where(keep[:, None] & inside[None, :], product * scale", "tl.where(inside[None, :], product * scale"),
    "columns beyond the edge count in rows": ("tl.where(keep[:, None] & inside[None, :], product * scale", "tl.where(keep[:, None], product * scale"),
    "what was summed is forgotten": ("s = tl.load(sums_ptr + stride + rows, mask=rows < N, other=0.0)", "s = tl.zeros([BN], tl.float32)"),
    "positives are counted from the block": ("other=-1).to(tl.int64) - first\n", "other=-1).to(tl.int64)\n"),
    "the first positive alone": ("found = found | (named_column", "found = (named_column"),
    "columns by the rows' sums": ("col_coef * exp2_diff(z, col_max, 1.0)", "col_coef * exp2_diff(z, row_max, 1.0)"),
    "the diagonal counts once in the kernel": ("tl.where(rows[:, None] == cols[None, :], 2 * own_coef, 0.0)", "tl.where(rows[:, None] == cols[None, :], own_coef, 0.0)"),
    "the scale's part of the last tile alone": ("dscale_ptr is not None:\n            dscale += tl.sum(d * product, 1)", "dscale_ptr is not None:\n            dscale = tl.sum(d * product, 1)"),
    "a tile's maximum is not taken off": ("top = tl.max(z, AXIS)", "top = tl.max(z, AXIS) * 0.0"),
}


@pytest.mark.thorough
@where_kernels_run
@pytest.mark.parametrize("bug", few(KERNEL_MUTANTS, "rows beyond the edge count in columns", "what was summed is forgotten", "columns by the rows' sums"))
def test_a_bug_planted_in_a_kernel_is_noticed(bug, tmp_path, device):
    k = planted(contrast, tmp_path, *KERNEL_MUTANTS[bug])
    check = partial(kernel_faults, k, dtype=f32, device=device)
    assert check(40, 50, 20, paired=False) or check(40, 50, 20, paired=False, several=True) or check(17, 17, 33, paired=True, shift=-60.0) or check(40, 50, 20, paired=False, scale=60.0), "nothing noticed"
