"""Margins: each formula against float64, the head in tiles against its definition, confident rows, hostile input, planted bugs."""
import copy
import itertools
import math
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import fusedloss.margins as margins
from fusedloss.baseline import baseline_linear_cross_entropy, sample_data
from fusedloss.core.cosine import EPS, HeadConfig, lengths
from fusedloss.margins import LEAST_SINE, AdaFace, ArcFace, Circle, Combined, CosFace, Margin, SubCenter, angle, batch_sums, falling_cosine, margin_cross_entropy, mean_and_std, normalize
from workbook.measure import peak_memory, relative_error, saved_tensors
from grids import few, grid, thorough_but
from helpers import TOLERANCE, fault_of, planted, unchanged, upstream

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def adaface(mean=2.0, std=1.0, **options):
    "AdaFace in float64, its statistics set and held"
    ada = AdaFace(**options).double().eval()
    ada.mean.fill_(mean), ada.std.fill_(std)
    return ada


class MagFace(Margin):
    "A user's margin: the longer the row, the larger its angle's margin (arXiv 2103.06627)"
    scale = 24.0

    def target_score(self, cos, norm):
        return self.scale * torch.cos(angle(cos) + 0.1 + 0.1 * norm.clamp(1, 4))


class PerClass(Margin):
    "A user's margin: of each class another, as LDAM's"
    scale = 24.0

    def __init__(self, margins):
        self.margins = margins

    def target_score(self, cos, norm=None, labels=None):
        return self.scale * (cos - self.margins[labels])


# Each margin, and the target's score by its published formula: of cosine, angle and length of the row.
FORMULAS = {
    "CosFace": (CosFace(), lambda c, a, n: 64 * (c - 0.35)),
    "no margin": (CosFace(0, 30), lambda c, a, n: 30 * c),
    "ArcFace": (ArcFace(), lambda c, a, n: 64 * torch.where(a + 0.5 <= math.pi, torch.cos(a + 0.5), -torch.cos(a + 0.5) - 2)),
    "ArcFace, linear": (ArcFace(past_pi="linear"), lambda c, a, n: 64 * torch.where(
        a + 0.5 <= math.pi, torch.cos(a + 0.5), c - 0.5 * math.sin(0.5))),
    "ArcFace, none": (ArcFace(0.3, 16, past_pi="none"), lambda c, a, n: 16 * torch.cos(a + 0.3)),
    "Combined": (Combined(1.0, 0.3, 0.2, past_pi="none"), lambda c, a, n: 64 * (torch.cos(a + 0.3) - 0.2)),
    "SphereFace": (Combined(2.0, 0, 0, 30), lambda c, a, n: 30 * torch.where(a <= math.pi / 2, 2 * c**2 - 1, -1 - 2 * c**2)),
    "Circle": (Circle(grad="exact"), lambda c, a, n: 256 * (1.25 - c).clamp(min=0) * (c - 0.75)),
    "MagFace": (MagFace(), lambda c, a, n: 24 * torch.cos(a + 0.1 + 0.1 * n.clamp(1, 4))),
    "AdaFace": (adaface(), lambda c, a, n: 64 * (
        torch.cos((a - 0.4 * zhat(n)).clamp(0, math.pi)) - 0.4 * zhat(n) - 0.4)),
}


def zhat(norm, mean=2.0, std=1.0):
    return ((norm.detach().clamp(1e-3, 100) - mean) / (std + 1e-3) * 0.333).clamp(-1, 1)


def definition(x, w, y, name, k=1, reduction="mean", ignore_index=-100):
    "The loss with all cosines in float64, by `FORMULAS`; the caller's w has k rows a class"
    margin, formula = FORMULAS[name]
    x, w = x.double(), w.double()
    unit = lambda t: t / torch.where(t.norm(dim=-1) > 0, t.norm(dim=-1).clamp(min=EPS), 1.0).unsqueeze(-1)
    cos = (unit(x) @ unit(w).T).unflatten(-1, (-1, k)).amax(-1)
    valid = y != ignore_index
    label = torch.where(valid, y, 0).long().unsqueeze(-1)
    c = cos.gather(-1, label).squeeze(-1)
    z = margin.scale * (torch.relu(cos + 0.25) * (cos - 0.25) if name == "Circle" else cos)
    f = formula(c, torch.acos(c.clamp(-1, 1)), x.norm(dim=-1))
    losses = F.softplus(z.scatter(-1, label, -1e5).logsumexp(-1) - f, threshold=100)  # lse − f would cancel
    losses = torch.where(valid, losses, 0.0)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / max(int(valid.sum()), 1)}[reduction]


def differentiate(loss_of, x, w):
    "Loss, dx, dw under an uneven upstream gradient"
    x, w = (t.detach().requires_grad_() for t in (x, w))
    loss = loss_of(x, w)
    return loss.detach(), *torch.autograd.grad(loss, [x, w], upstream(loss))


def sample(n=23, h=6, v=31, k=1, dtype=f64, device="cpu", ignore_index=-100, seed=0):
    "Rows of which every fifth is ignored"
    x, w, y = sample_data(n, h, v * k, dtype, device, seed, requires_grad=False)
    return x, w, (y % v).masked_fill(torch.arange(n, device=device) % 5 == 1, ignore_index)


def wrong(name, x, w, y, call=margin_cross_entropy, k=1, tolerance=None, margin=None, tiles=(5, 9), **options):
    "What `call` gets wrong, in words"
    margin = margin or FORMULAS[name][0]
    if isinstance(margin, torch.nn.Module):
        margin = margin.to(x.device)
    margin = SubCenter(k, margin) if k > margin.centers else margin
    got = differentiate(lambda x, w: call(x, w, y, margin=margin, token_tile=tiles[0], class_tile=tiles[1], **options), x, w)
    exact = differentiate(lambda x, w: definition(x, w, y.cpu(), name, k, **options), x.double().cpu(), w.double().cpu())
    limit = tolerance or TOLERANCE[x.dtype]
    return [f"{what} is off by {error:.1e}" for what, a, e in zip(("loss", "dx", "dw"), got, exact)
            if not (error := relative_error(a.cpu(), e)) <= limit]


# --- formulas ---

GRID = torch.linspace(-0.999, 0.999, 101, dtype=f64)


@pytest.mark.parametrize("name", FORMULAS)
def test_formula_and_slope(name):
    margin, formula = FORMULAS[name]
    norm = torch.linspace(0.1, 6, 101, dtype=f64)
    c, d = (GRID.clone().requires_grad_() for _ in "cd")
    ours, published = margin.target_score(c, norm), formula(d, torch.acos(d), norm)
    torch.testing.assert_close(ours, published)
    slopes = [torch.autograd.grad(z.sum(), t)[0] for z, t in ((ours, c), (published, d))]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_gradcheck_twice(name):
    margin, c = FORMULAS[name][0], GRID[3::7].clone().requires_grad_()  # no kink among them
    run = lambda c: margin.target_score(c, torch.full_like(c, 1.5))
    assert gradcheck(run, c) and gradgradcheck(run, c)


@pytest.mark.parametrize("name", [n for n in FORMULAS if "none" not in n and n not in ("Combined", "MagFace")])
@pytest.mark.parametrize("dtype", [f32, f64])
def test_a_better_cosine_never_scores_worse(name, dtype):
    c = torch.linspace(-1, 1, 4001, dtype=dtype)
    assert (FORMULAS[name][0].target_score(c, torch.full_like(c, 2.5)).diff() >= -1e-4 * (dtype == f32)).all()


def test_past_pi():
    ends = torch.tensor([-1.0, -0.88], dtype=f64)
    none, linear, smooth = (ArcFace(past_pi=p)(ends) for p in ("none", "linear", "smooth"))
    assert none[0] > none[1] and linear[0] < linear[1] and smooth[0] < smooth[1]  # the bug, and its mends
    torch.testing.assert_close(none, torch.tensor([-56.165, -63.999], dtype=f64), rtol=0, atol=1e-3)
    phi = torch.linspace(0, 12, 100001, dtype=f64, requires_grad=True)
    slope, = torch.autograd.grad(falling_cosine(phi).sum(), phi)
    assert falling_cosine(phi).diff().abs().max() < 2e-4 and slope.diff().abs().max() < 2e-4  # unbroken, as is its slope


def test_combined_is_combined():
    z = Combined(1.0, 0.3, 0.2)(torch.ones((), dtype=f64)).item()
    assert z == pytest.approx(64 * (math.cos(0.3) - 0.2))
    assert not z == pytest.approx(64 * (1 - 0.2), abs=1)
    torch.testing.assert_close(Combined()(GRID), ArcFace()(GRID))


def test_straight_through_has_the_value_of_one_and_the_slope_of_the_other():
    c = GRID.clone().requires_grad_()
    straight = ArcFace(grad="straight_through")(c)
    torch.testing.assert_close(straight, ArcFace()(c))
    torch.testing.assert_close(torch.autograd.grad(straight.sum(), c)[0], torch.full_like(c, 64))


def test_circle_paces_as_published():
    c = GRID.clone().requires_grad_()
    slope, = torch.autograd.grad(Circle()(c).sum(), c)
    torch.testing.assert_close(slope, 256 * (1.25 - c.detach()).clamp(min=0))


@pytest.mark.parametrize("margin", [ArcFace(), ArcFace(past_pi="linear"), Combined(3.0, 0.2, 0.1), Circle(), CosFace()], ids=repr)
@pytest.mark.parametrize("dtype", [f32, f64])
def test_slopes_are_finite_at_and_beyond_one(margin, dtype):
    c = torch.tensor([1, -1, 1 + 1e-6, -1 - 1e-6, 1 - 1e-7, 0], dtype=dtype, requires_grad=True)
    z = margin(c)
    slope, = torch.autograd.grad(z.sum(), c, create_graph=True)
    again, = torch.autograd.grad(slope.sum(), c, allow_unused=True) if slope.requires_grad else (None,)
    assert z.isfinite().all() and slope.isfinite().all() and (again is None or again.isfinite().all())
    assert slope.abs().max() <= 3 * 256 / LEAST_SINE
    assert angle(c)[0] == 0 and angle(c)[2] == 0


# --- AdaFace's statistics ---

def test_statistics_are_of_the_valid_rows_and_move_by_the_momentum():
    ada, norm = AdaFace(momentum=0.25), torch.tensor([18.0, 20.0, 25.0, 3.0])
    valid = torch.tensor([True, True, True, False])
    ada.observe(norm, valid)
    assert (ada.mean, ada.std) == (20, 100)  # until an optimizer has stepped
    ada.advance()
    torch.testing.assert_close(ada.mean, 0.75 * torch.tensor(20.0) + 0.25 * norm[:3].mean())
    torch.testing.assert_close(ada.std, 0.75 * torch.tensor(100.0) + 0.25 * norm[:3].std())
    assert set(ada.state_dict()) == {"mean", "std"}


@pytest.mark.parametrize("count", [0, 1])
def test_a_batch_without_a_deviation_keeps_the_old_one(count):
    ada = AdaFace(momentum=0.5)
    ada.observe(torch.full((3,), 30.0), torch.arange(3) < count)
    ada.advance()
    assert ada.std == 100 and ada.mean == (25 if count else 20)


def test_evaluation_observes_nothing():
    ada = AdaFace().eval()
    margin_cross_entropy(*sample(dtype=f32)[:2], sample()[2], margin=ada)
    ada.advance()
    assert (ada.mean, ada.std) == (20, 100)


def test_ranks_that_add_their_sums_see_the_whole_batch():
    norm, valid = torch.rand(10) * 40, torch.arange(10) % 3 > 0
    near, std = torch.tensor(20.0), torch.tensor(100.0)
    halves = sum(batch_sums(norm[i], valid[i], near) for i in (slice(0, 2), slice(2, 10)))
    torch.testing.assert_close(mean_and_std(halves, near, std), mean_and_std(batch_sums(norm, valid, near), near, std))
    ada, whole = AdaFace(reduce=lambda sums: sums + batch_sums(norm[2:], valid[2:], near)), AdaFace()
    ada.observe(norm[:2], valid[:2]), whole.observe(norm, valid)
    ada.advance(), whole.advance()
    torch.testing.assert_close((ada.mean, ada.std), (whole.mean, whole.std))


CASTS = {"bfloat16": lambda m: m.bfloat16(), "half": lambda m: m.half(), "to": lambda m: m.to(bf16), "device and dtype": lambda m: m.to("cpu", f16),
         "within a model": lambda m: torch.nn.ModuleDict(dict(margin=SubCenter(2, m))).bfloat16()["margin"].margin,
         "type": lambda m: m.type(f16), "there and back": lambda m: m.half().double().bfloat16(), "float": lambda m: m.float()}


@pytest.mark.parametrize("cast", thorough_but(CASTS, "bfloat16", "type", "within a model", "there and back"))
def test_statistics_keep_their_digits_whatever_the_dtype(cast):
    "A hundredth of a difference is less than half a unit of bf16's last place"
    ada = AdaFace(momentum=1.0)
    ada.observe(torch.tensor([1.0, 2.001, 3.0]), torch.tensor([True] * 3))
    ada.advance()
    before, ada.momentum = {k: t.clone() for k, t in ada.state_dict().items()}, 0.01
    cast_, norm = CASTS[cast](ada), torch.tensor([1.0, 2.0, 3.3]).bfloat16()
    assert cast_ is ada and ada.mean.dtype == ada.std.dtype == f32 and ada.state_dict().keys() == {"mean", "std"}
    torch.testing.assert_close(dict(ada.state_dict()), before, rtol=0, atol=0)
    for _ in range(1000):
        ada.observe(norm, torch.tensor([True] * 3))
        ada.advance()
    torch.testing.assert_close((ada.mean, ada.std), (norm.float().mean(), norm.float().std()), rtol=1e-4, atol=0)


def test_statistics_of_16_bits_are_loaded_into_more():
    given = {"mean": torch.tensor(7.0, dtype=bf16), "std": torch.tensor(3.0, dtype=bf16)}
    for assign in (False, True):
        ada = AdaFace().half()
        ada.load_state_dict(given, assign=assign)
        assert (ada.mean.dtype, ada.std.dtype, ada.mean, ada.std) == (f32, f32, 7, 3)
    assert AdaFace().double().mean.dtype == f64 and copy.deepcopy(AdaFace().bfloat16()).mean.dtype == f32
    assert AdaFace().to("meta").bfloat16().mean.device.type == "meta"


def test_a_row_that_overflowed_is_not_observed():
    ada, norm = AdaFace(momentum=1.0), torch.tensor([18.0, 20.0, math.nan, math.inf])
    ada.observe(norm, torch.tensor([True] * 4))
    ada.advance()
    torch.testing.assert_close((ada.mean, ada.std), (norm[:2].mean(), norm[:2].std()))


def test_one_row_trains_with_adaface():
    ada, (x, w, y) = AdaFace(), sample_data(1, 6, 9)
    for _ in range(2):
        margin_cross_entropy(x, w, y, margin=ada).backward()
        ada.advance()
    assert ada.std.isfinite() and x.grad.isfinite().all()


# --- the head ---

@pytest.mark.parametrize("name,k,reduction", grid(list(FORMULAS), [1, 3], ["mean", "sum", "none"]))
def test_against_the_definition(name, k, reduction, device):
    assert not wrong(name, *sample(k=k, device=device), k=k, reduction=reduction)


@pytest.mark.parametrize("n, v, tiles", [(1, 1, (1, 1)), (1, 2, (3, 3)), (7, 3, (7, 1)), (47, 123, (16, 50)), (13, 100, (4, 16))])
def test_ragged_shapes(n, v, tiles, device):
    for name in ("ArcFace", "Circle"):
        x, w, y = sample(n, 5, v, device=device)
        assert not wrong(name, x, w, y, tiles=tiles)
        assert not wrong(name, x, w, v - 1 - y.clamp(max=2, min=0) % v, tiles=tiles)  # in the last, ragged tile


@pytest.mark.parametrize("dtype", [f32, bf16, f16])
@pytest.mark.parametrize("name", ["CosFace", "ArcFace", "Circle", "MagFace"])
def test_dtypes(name, dtype, device):
    gap = 3e-5 if dtype == f32 else 8 * TOLERANCE[dtype]  # scores up to 256: rounding 1.5e-5; dz and dx in 8 or 11 bits
    assert not wrong(name, *sample(47, 16, 123, dtype=dtype, device=device), tolerance=gap)


def test_against_stage_one_and_in_higher_dimensions(device):
    x, w, y = sample(24, device=device)
    ours = margin_cross_entropy(x.view(4, 6, -1), w, y.view(4, 6), margin=CosFace(0.2, 30), reduction="none")
    torch.testing.assert_close(ours, baseline_linear_cross_entropy(x, w, y, margin=0.2, scale=30.0, reduction="none").view(4, 6))
    one = margin_cross_entropy(x[0], w, y[0], margin=CosFace(0.2, 30), reduction="none")
    torch.testing.assert_close(one, ours[0, 0])


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=2)))
def test_gradients_only_where_asked_for(needs):
    x, w, y = sample()
    x.requires_grad_(needs[0]), w.requires_grad_(needs[1])
    loss = margin_cross_entropy(x, w, y, margin=ArcFace())
    assert loss.requires_grad == any(needs)
    if any(needs):
        loss.backward()
    assert (x.grad is not None, w.grad is not None) == needs


def test_gradcheck_of_the_head():
    x, w, y = sample(5, 3, 7)
    run = lambda x, w: margin_cross_entropy(x, w, y, margin=Combined(1.2, 0.3, 0.1, 8.0), reduction="none")
    assert gradcheck(run, (x.requires_grad_(), w.requires_grad_()))


def test_hooks_and_autograd_grad_see_the_weight():
    x, w, y = sample_data(5, 4, 9, f64)
    seen = []
    w.register_hook(seen.append)
    torch.autograd.grad(margin_cross_entropy(x, w, y, margin=ArcFace()), w, retain_graph=True)
    assert len(seen) == 1 and seen[0].shape == w.shape


def test_used_twice():
    x, w, y = sample_data(5, 4, 9, f64)
    loss = margin_cross_entropy(x, w, y, margin=ArcFace())
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_lengths_do_not_count():
    x, w, y = sample()
    scaled = margin_cross_entropy(x * 1e3, w * torch.rand(len(w), 1, dtype=f64).add(0.1), y, margin=ArcFace())
    torch.testing.assert_close(scaled, margin_cross_entropy(x, w, y, margin=ArcFace()))


COMPILED = {type(m).__name__: m for m in (ArcFace(), Circle(), SubCenter(3), adaface(), SubCenter(3, MagFace()), PerClass(torch.linspace(0, 0.5, 3, dtype=f64)))}


@pytest.mark.parametrize("name", few(COMPILED, "SubCenter"))
def test_compiles_to_one_graph(name):
    margin = COMPILED[name]
    x, w, y = sample_data(6, 4, 9, f64)
    run = lambda x, w, y: margin_cross_entropy(x, w, y % 3, margin=margin)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, w, y), run(x, w, y))
    torch.testing.assert_close(*(torch.autograd.grad(f(x, w, y), [x, w]) for f in (compiled, run)))


def test_statistics_are_state_wherever_they_stand():
    head = torch.nn.ModuleDict(dict(margin=SubCenter(2, AdaFace())))
    assert set(head.state_dict()) == {"margin.margin.mean", "margin.margin.std"}
    before = head["margin"].margin.mean.clone()
    margin_cross_entropy(*sample_data(6, 4, 8)[:2], torch.arange(6) % 4, margin=head["margin"])
    head["margin"].margin.advance()
    assert head["margin"].margin.mean != before
    assert head.eval() and not head["margin"].margin.training


def test_operator_is_sound():
    x, w, y = sample_data(6, 4, 8, f64)
    for centers, circle_margin in ((1, -1.0), (2, 0.25)):
        torch.library.opcheck(margins.cosine_lse, (x, w, y % 4, *HeadConfig(centers, 8.0, circle_margin), 4, 3))


def test_autocast(device):
    x, w, y = sample(device=device, dtype=f32)
    with torch.autocast(device, bf16):
        loss = margin_cross_entropy(x.bfloat16(), w, y, margin=ArcFace())
    assert loss.dtype == f32
    torch.testing.assert_close(loss, margin_cross_entropy(x.bfloat16(), w.bfloat16(), y, margin=ArcFace()))


# --- confident rows ---

def rows_at(cosines, twin, device):
    "fp32 rows of given cosines with class 0; the other 999 classes random, class 1 its twin if asked"
    g = torch.Generator().manual_seed(0)
    w = normalize(torch.randn(1000, 64, generator=g, dtype=f64))
    side = torch.randn(len(cosines), 64, generator=g, dtype=f64)
    side = normalize(side - (side @ w[0])[:, None] * w[0])
    if twin:
        w[1] = w[0]
    x = cosines[:, None] * w[0] + (1 - cosines**2).sqrt()[:, None] * side
    return x.float().to(device), w.float().to(device), torch.zeros(len(cosines), dtype=torch.int64, device=device)


@pytest.mark.parametrize("name", ["CosFace", "ArcFace", "Circle"])
def test_confident_rows_keep_their_digits(name, device):
    "Relative, row by row: a loss of 1e-6 has five digits too"
    x, w, y = rows_at(torch.linspace(0.2, 0.97, 12, dtype=f64), False, device)
    loss, dx, _ = differentiate(lambda x, w: margin_cross_entropy(x, w, y, margin=FORMULAS[name][0], reduction="none"), x, w)
    exact, exact_dx, _ = differentiate(lambda x, w: definition(x, w, y.cpu(), name, reduction="none"), x.double().cpu(), w.double().cpu())
    limit = 2e-4  # gaps of up to 500 in steps of 3e-5
    assert ((loss.cpu().double() - exact).abs() <= limit * exact).all()
    error = (dx.cpu().double() - exact_dx).norm(dim=1)
    assert (error <= 2 * limit * exact_dx.norm(dim=1)).all()


def test_near_one_the_loss_is_off_by_a_hundredth_at_most(device):
    x, w, y = rows_at(1 - torch.logspace(-2, -9, 15, dtype=f64), True, device)
    loss = margin_cross_entropy(x, w, y, margin=ArcFace(), reduction="none")
    exact = definition(x.cpu(), w.cpu(), y.cpu(), "ArcFace", reduction="none")
    assert (loss.cpu() - exact).abs().max() < 64 * math.sin(0.5) * (2 * 3e-7) ** 0.5


def test_far_from_right_the_loss_is_a_line(device):
    w = torch.eye(3, 4, device=device)
    loss = margin_cross_entropy(-5 * w[:1], w, torch.zeros(1, dtype=torch.int64, device=device), margin=CosFace(0.35, 1e4))
    assert loss.item() == pytest.approx(1.35e4 + math.log(2), rel=1e-6)  # not −log 1e-30


def test_float64_keeps_its_digits_beyond_softplus_threshold():
    w = torch.eye(2, dtype=f64)
    loss = margin_cross_entropy(w[:1], w, torch.tensor([1]), margin=CosFace(0.0, 25.0))
    assert loss.item() == pytest.approx(25 + math.log1p(math.exp(-25)), abs=1e-14)  # of 1.4e-11, and a rounding of 25 is 3.6e-15


# --- hostile input ---

@pytest.mark.parametrize("scale", [1e-6, 1e6, 1e30])
@pytest.mark.parametrize("make", [partial(CosFace, 0.35), partial(ArcFace, 0.5), partial(Circle, 0.25)])
def test_any_scale(make, scale, device):
    x, w, y = sample(device=device, dtype=f32)
    loss, dx, dw = differentiate(lambda x, w: margin_cross_entropy(x, w, y, margin=make(scale=scale)), x, w)
    assert all(t.isfinite().all() and t.any() for t in (loss, dx, dw))


def test_strides_of_any_kind(device):
    x, w, y = sample(24, device=device)
    exact = margin_cross_entropy(x, w, y, margin=ArcFace())
    torch.testing.assert_close(margin_cross_entropy(x.T.contiguous().T, w.T.contiguous().T, y, margin=ArcFace()), exact)
    same = margin_cross_entropy(x[:1].expand(24, -1), w, y[:1].expand(24), margin=ArcFace())
    torch.testing.assert_close(same, margin_cross_entropy(x[:1], w, y[:1], margin=ArcFace()))


@pytest.mark.parametrize("margin", [ArcFace(), Circle(), SubCenter(2, AdaFace())], ids=lambda m: type(m).__name__)
def test_copies_and_pickles(margin):
    x, w, y = sample_data(6, 4, 8)
    for twin in (copy.deepcopy(margin), pickle.loads(pickle.dumps(margin))):
        torch.testing.assert_close(*(margin_cross_entropy(x, w, y % 4, margin=m) for m in (copy.deepcopy(margin), twin)))

MARGINS = {**{n: m for n, (m, _) in FORMULAS.items()}, "straight": ArcFace(grad="straight_through"), "paced": Circle(), "huge": ArcFace(0.5, 1e6)}


@pytest.mark.parametrize("name", MARGINS)
@pytest.mark.parametrize("dtype", few([f32, f64], f32))
def test_on_and_against_the_class_and_zero(name, dtype, device):
    w = torch.eye(5, 6, dtype=dtype, device=device)
    w[4] = 0
    x = torch.stack([7 * w[0], -3 * w[1], 0 * w[0], torch.linspace(-1, 1, 6, dtype=dtype, device=device), w[0]])
    margin = MARGINS[name].to(device) if isinstance(MARGINS[name], torch.nn.Module) else MARGINS[name]
    loss, dx, dw = differentiate(lambda x, w: margin_cross_entropy(x, w, torch.arange(5, device=device), margin=margin), x, w)
    assert loss.isfinite()
    for d in (dx, dw):
        assert d.isfinite().all() and d.norm(dim=1).max() <= 4 * margin.scale  # slope ≤ 2 s, |upstream| 1.7; 1e12 elsewhere


def test_short_rows_are_bounded_by_eps():
    x, w, y = sample()
    x[0], x[2] = 1e-30 * x[0], 1e-7 * x[2]
    for eps in (1e-5, 1e-3):
        _, dx, _ = differentiate(lambda x, w: margin_cross_entropy(x, w, y, margin=CosFace(), eps=eps, reduction="sum"), x, w)
        assert dx.norm(dim=1).max() <= 1.7 * 2 * 64 / eps
        by_hand = differentiate(lambda x, w: F.cross_entropy(
            64 * (normalize(x, eps) @ normalize(w, eps).T - 0.35 * F.one_hot(y.clamp(min=0), 31)), y, reduction="sum"), x, w)
        torch.testing.assert_close(dx, by_hand[1])


def test_normalize():
    t = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-7, 0.0]], dtype=f64, requires_grad=True)
    torch.testing.assert_close(lengths(t), torch.tensor([5.0, 1.0, EPS], dtype=f64))
    assert gradcheck(normalize, t[:1].detach().requires_grad_())
    normalize(t).sum().backward()
    assert t.grad.abs().max() <= 1 / EPS and t.grad[1].eq(1).all()
    assert normalize(t.half()).dtype == f16


def test_ignored_rows_count_nothing(device):
    x, w, y = sample(device=device)
    valid = y != -100
    x[~valid] *= 50
    loss, dx, dw = differentiate(lambda x, w: margin_cross_entropy(x, w, y, margin=ArcFace()), x, w)
    alone = differentiate(lambda x, w: margin_cross_entropy(x, w, y[valid], margin=ArcFace()), x[valid], w)
    torch.testing.assert_close((loss, dx[valid], dw), alone)
    assert not dx[~valid].any()


@pytest.mark.parametrize("ignore_index", [-1, 0, 5, 31, 99])
def test_ignore_index_of_any_value(ignore_index):
    x, w, y = sample(ignore_index=ignore_index)
    assert not wrong("ArcFace", x, w, y, ignore_index=ignore_index)


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_that_counts(rows, reduction, device):
    x, w, _ = sample(rows, device=device)
    y = torch.full((rows,), -100, device=device)
    for margin in (ArcFace(), AdaFace().to(device)):
        loss, dx, dw = differentiate(lambda x, w: margin_cross_entropy(x, w, y, margin=margin, reduction=reduction), x, w)
        assert loss == 0 and not dx.any() and not dw.any() and dx.shape == x.shape


def test_one_class_has_nothing_to_beat():
    x, w, _ = sample(4, 3, 1)
    loss, dx, dw = differentiate(lambda x, w: margin_cross_entropy(x, w, torch.zeros(4, dtype=torch.int64), margin=ArcFace()), x, w)
    assert loss == 0 and not dx.any() and not dw.any()


def test_the_callers_tensors_are_left_alone():
    x, w, y = sample()
    before = [t.clone() for t in (x, w, y)]
    y = y.view(-1, 1)  # a column: some heads squeeze it in place
    margin_cross_entropy(x.view(-1, 1, 6), w, y, margin=ArcFace())
    assert y.shape == (23, 1) and all(torch.equal(a, b.view(a.shape)) for a, b in zip((x, w, y), before))


@pytest.mark.parametrize("label", [-1, 31, 10**6])
def test_labels_out_of_range(label):
    x, w, y = sample()
    y[2] = label
    with pytest.raises(IndexError, match=f"is {label}: expected 0 ≤ label < 31"):
        margin_cross_entropy(x, w, y, margin=ArcFace())
    with pytest.raises(IndexError):  # V is the number of classes, not of rows
        margin_cross_entropy(x, w.repeat(2, 1), y, margin=SubCenter(2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_labels_out_of_range_are_nan_on_a_gpu():
    x, w, y = sample(device="cuda")
    y[2] = 31
    losses = margin_cross_entropy(x, w, y, margin=ArcFace(), reduction="none")
    assert losses.isnan().nonzero().flatten().tolist() == [2]


X, W, Y = sample(6)
BAD = {
    "linear_weight: expected a positive multiple of 2 rows": dict(margin=SubCenter(2)), "linear_weight: expected a positive": dict(linear_weight=W[:0]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_calls(message):
    call = dict(input=X, linear_weight=W, target=Y, margin=ArcFace()) | BAD[message]
    with pytest.raises(ValueError, match=message):
        margin_cross_entropy(**call)


def test_statistics_on_another_device():
    "They are refused, and have noted nothing"
    x, w, y = sample_data(1, 6, 9)
    ada = AdaFace().to("meta")
    with pytest.raises(ValueError, match="^margin: expected statistics on the input's device cpu, got meta$"):
        margin_cross_entropy(x, w, y, margin=ada)
    assert not ada.is_noted


@pytest.mark.parametrize("make", [lambda: Combined(2, past_pi="linear"), lambda: SubCenter(2, SubCenter(2)), lambda: AdaFace(clip=(2.0, 1.0))])
def test_bad_margins(make):
    with pytest.raises(ValueError, match="expected .*, got"):
        make()


def test_a_margin_of_ones_own():
    class Half(Margin):
        scale = 10.0
        def target_score(self, cos, norm=None): return 5 * cos
    x, w, y = sample_data(5, 4, 7, f64)
    z = 10 * normalize(x) @ normalize(w).T
    expected = F.cross_entropy(z * (1 - 0.5 * F.one_hot(y, 7)), y)
    torch.testing.assert_close(margin_cross_entropy(x, w, y, margin=Half()), expected)


# --- margins that see lengths and labels ---

def plain_loss(x, w, y, margin, **labels):
    "The mean cross entropy of a margin's scores, all of them in PyTorch's own autograd"
    cos = F.normalize(x, dim=-1) @ F.normalize(w, dim=-1).T
    at, known = y.clamp(min=0)[:, None], y != -100
    score = margin.target_score(cos.gather(1, at)[:, 0], x.norm(dim=-1), **labels)
    return F.cross_entropy((margin.scale * cos).scatter(1, at, score[:, None])[known], y[known])


@pytest.mark.parametrize("make", [MagFace, lambda: SubCenter(1, MagFace()), lambda: type("Learned", (MagFace,), {"scale": torch.tensor(24.0, dtype=f64)})()])
def test_a_gradient_through_the_length(make):
    "Rows of zeros, and rows without a label that hold no numbers"
    (x, w, y), margin = sample(12), make()
    x[0] = 0
    spoilt = x.masked_fill((y < 0)[:, None], math.nan).requires_grad_()
    ours, = torch.autograd.grad(margin_cross_entropy(torch.where(y[:, None] < 0, spoilt.nan_to_num(), spoilt), w, y, margin=margin), spoilt)
    exact, = torch.autograd.grad(plain_loss(x.requires_grad_(), w, y, margin), x)
    torch.testing.assert_close(ours[1:], exact[1:])
    assert ours.isfinite().all() and ((ours * x).sum(1).abs() > 1e-4)[2:][y[2:] >= 0].any()


@pytest.mark.parametrize("base", [Margin, CosFace, AdaFace, lambda: SubCenter(1, CosFace())], ids=["Margin", "CosFace", "AdaFace", "SubCenter"])
def test_a_margin_made_of_another_has_a_gradient_by_the_length_too(base):
    "Unless it says that it has none; built-in ones have no node in the graph"
    made = base() if isinstance(base, type) else base()
    class Own(type(made)):
        scale = 16.0
        def target_score(self, cos, norm): return 16.0 * cos - norm
    own = Own(1, CosFace()) if isinstance(made, SubCenter) else Own()
    x, w, y = sample_data(5, 4, 7, f64)
    dx, = torch.autograd.grad(margin_cross_entropy(x, w, y, margin=own), x)
    assert (dx * x).sum().abs() > 1e-3
    Own.norm_gradient, own.__dict__["norm_gradient"] = False, False
    dx, = torch.autograd.grad(margin_cross_entropy(x, w, y, margin=own), x)
    assert (dx * x).sum().abs() < 1e-12


@pytest.mark.parametrize("k", [1, 2])
def test_a_margin_for_each_class(k):
    (x, w, y), margins = sample(v=31), torch.linspace(0, 0.6, 31, dtype=f64)
    margin = PerClass(margins) if k == 1 else SubCenter(k, PerClass(margins))
    got = torch.autograd.grad(margin_cross_entropy(x.requires_grad_(), w.repeat_interleave(k, 0).requires_grad_(), y, margin=margin), x)
    exact = torch.autograd.grad(plain_loss(x, w, y, PerClass(margins), labels=y.clamp(min=0)), x)
    torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("score", [lambda self, cos: cos, lambda self, cos, norm, classes: cos, lambda self, cos, norm, other, labels: cos])
def test_a_margin_that_no_head_can_call_is_refused_where_it_is_defined(score):
    with pytest.raises(ValueError, match="target_score: expected .*labels.*, got"):
        type("Wrong", (Margin,), {"target_score": score})


# --- memory ---

@pytest.mark.parametrize("make", few([ArcFace, Circle, AdaFace], Circle, AdaFace))
def test_nothing_of_rows_times_classes(make):
    margin = make()
    n, h, v, tile = 256, 8, 20000, 512
    x, w, y = sample_data(n, h, v)
    run = lambda: margin_cross_entropy(x, w, y, margin=margin, class_tile=tile)
    assert all(t.numel() <= n for t in saved_tensors(run, x, w, y))
    peak = peak_memory(lambda: torch.autograd.grad(run(), [x, w]))
    assert peak <= 4 * ((5 if margin.pace is not None else 3.5) * n * tile + 2 * v * h) + 2**17  # tiles; dw and [V] lengths


def test_no_index_lists_and_no_synchronisation():
    "Nothing whose size depends on the data, in forward or backward"
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = []
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))
    x, w, y = sample_data(6, 4, 9)
    with Watch():
        losses = margins.cosine_lse_fwd(x.detach(), w.detach(), y, HeadConfig(scale=64.0), 4, 4)
        F.softplus(losses[0] - AdaFace()(losses[1], losses[1])).sum()
    assert not [name for name in seen if any(word in name for word in ("nonzero", "unique", "_local_scalar", "masked_select"))]


# --- planted bugs ---

MUTANTS = {
    "the target stays in the sum": ("torch.where(target.inside, -torch.inf, z.gather(1, target.column))", "z.gather(1, target.column)"),
    "a neighbour leaves the sum": ("torch.where(target.inside, -torch.inf,", "torch.where(target.inside | True, -torch.inf,"),
    "the cosine keeps its scale": ("0.0)[:, 0] / o.tile_scale", "0.0)[:, 0]"),
    "a later tile erases the cosine": ("cos[i] += target_cosines", "cos[i] = target_cosines"),
    "only the last tile counts": ("torch.logaddexp(lse[i], torch.logsumexp(scores, 1))", "torch.logsumexp(scores, 1)"),
    "the target's gradient is scaled": ("g_cos * (tiles.rows / o.tile_scale)", "g_cos * tiles.rows"),
    "columns are not normalised": ("dz = dz.mul_(tiles.columns[part]).to(tiles.dtype)", "dz = dz.to(tiles.dtype)"),
    "dw keeps its radial part": ("take_off_radial(slice_of_dw, w[part], tiles.columns[part], direction[part],", "take_off_radial(slice_of_dw, w[part], tiles.columns[part], -direction[part],"),
    "dx keeps its radial part": ("take_off_radial(dx[i], x[i], inverse[i], direction[i], grad_scale, out[i])", "out[i] = dx[i] * grad_scale"),
    "a short row has a direction": ("torch.where(inverse < shortest, 1.0, -1.0)", "torch.where(inverse > 0, 1.0, -1.0)"),
    "dw is left in its scale": ("grad_scale, dw[part])", "grad_scale**0, dw[part])"),
    "Circle's slope is forgotten": ("if slope is not None: d.mul_(slope)", "pass"),
    "Circle's exact slope is halved": ("2 * z * (weights > 0)", "z * (weights > 0)"),
    "Circle's negatives have no margin": (".mul_(z - o.circle_margin)", ".mul_(z)"),
    "the farthest centre counts": ("z.view(len(z), -1, o.centers).max(2)", "z.view(len(z), -1, o.centers).min(2)"),
    "the first centre learns": (
        "of_centers.scatter_(2, which[..., None],", "of_centers.scatter_(2, 0 * which[..., None],"),
    "zero rows are divided by eps": ("torch.where(norms > 0, norms.clamp(min=eps), 1.0)", "norms.clamp(min=eps)"),
    "eps is forgotten": ("norms.clamp(min=eps)", "norms"),
    "it rises again": ('if past_pi == "smooth" else', 'if past_pi == "never" else'),
    "the margin is taken off the angle": ("m1 * angle(cos) + m2", "m1 * angle(cos) - m2"),
    "m2 is dropped beside m3": ("phi = m1 * angle(cos) + m2", "phi = m1 * angle(cos) + (0 if m3 else m2)"),
    "the slope has no bound": (".clamp(min=LEAST_SINE**2)", ""),
    "ignore_index is forgotten": ("y, n_classes, ignore_index, reduction)", "y, n_classes, -100, reduction)"),
    "softplus becomes a line": ("threshold=50", "threshold=20"),
    "statistics are cast": ("if t is None or t.dtype == held[name].dtype: continue", "continue"),
    "rows that overflowed are observed": ("valid & norm.isfinite()", "valid"),
    "the deviation is that of all there is": ("(n - 1).clamp(min=1)", "n.clamp(min=1)"),
    "older batches are forgotten": ("std - self.std]) * self.momentum", "std - self.std])"),
    "evaluation observes": ("if not self.training: return", "pass"),
    "long rows are the poor ones": ("norm.detach().clamp(*self.clip) - mean", "mean - norm.detach().clamp(*self.clip)"),
    "quality adds no margin": ("torch.cos(phi) - push - self.margin", "torch.cos(phi) - self.margin"),
    "ignored rows are observed": ("margin.observe(norm, known)", "margin.observe(norm, y.reshape(-1) > -200)"),
}


def statistics_fault(m) -> str | None:
    "A word on what AdaFace does wrong"
    ada, valid = m.AdaFace(momentum=0.25).bfloat16(), torch.tensor([True, True, False, True])
    ada.observe(torch.tensor([3.0, 5.0, 90.0, math.inf]), valid)
    ada.advance()
    ada.eval().observe(torch.tensor([30.0, 50.0, 90.0, 1.0]), valid)
    ada.advance()
    if not torch.allclose(torch.stack([ada.mean, ada.std]), torch.tensor([16.0, 75 + 0.25 * 2**0.5])):
        return "statistics"
    ada.double().mean.fill_(2.0), ada.std.fill_(1.0)
    norm = torch.linspace(0.1, 6, 101, dtype=f64)
    return None if torch.allclose(ada(GRID, norm), FORMULAS["AdaFace"][1](GRID, torch.acos(GRID), norm)) else "scores"


def first_fault(m) -> str | None:
    "The first small case that a module's head does not pass"
    if found := statistics_fault(m):
        return found
    for name in FORMULAS:
        own = {"CosFace": m.CosFace(), "ArcFace": m.ArcFace(), "Circle": m.Circle(grad="exact"), "SphereFace": m.Combined(2.0, 0, 0, 30),
               "Combined": m.Combined(1.0, 0.3, 0.2, past_pi="none")}.get(name)
        for k in (1, 3) if own else ():
            x, w, y = sample(17, 4, 13, k, ignore_index=5)
            x[2] *= 1e-7
            if k == 1:  # of several centres at a cosine of 0, any may learn
                x[0], w[3] = 0, 0
            x[3] = -w[int(y[3]) * k]  # past π
            inner = m.SubCenter(k, own) if k > 1 else own
            if found := wrong(name, x, w, y, m.margin_cross_entropy, k, 1e-9, inner, (5, 4), ignore_index=5):
                return f"{name}, {k}: {found}"
    c = torch.ones((), dtype=f64, requires_grad=True)
    if not torch.autograd.grad(m.ArcFace()(c), c)[0].isfinite():
        return "no finite slope at 1"
    w = torch.eye(2, dtype=f64)
    if abs(m.margin_cross_entropy(w[:1], w, torch.tensor([1]), margin=m.CosFace(0.0, 25.0)).item() - 25 - math.log1p(math.exp(-25))) > 2e-15:
        return "few digits"
    ada = m.AdaFace(momentum=1.0)
    m.margin_cross_entropy(torch.tensor([[3.0, 0], [0, 5.0], [90, 0]]), w.float(), torch.tensor([0, 1, -100]), margin=ada)
    ada.advance()
    return None if ada.mean == 4 else "ignored rows count"


def test_the_unchanged_source_passes(tmp_path):
    assert first_fault(planted(margins, tmp_path, *unchanged(MUTANTS.values()))) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", MUTANTS)
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert fault_of(first_fault, margins, tmp_path, *MUTANTS[bug]), f"no case notices that {bug}"
