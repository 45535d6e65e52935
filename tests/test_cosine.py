"""Kernels of a cosine head against PyTorch: unit rows and their gradients, scores and theirs; planted bugs."""
import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fusedloss.core import cosine, negatives
from fusedloss.core.cosine import EPS, HeadConfig, launch_negatives_lse, plain_negatives_lse, tangent_kernel, unit_kernel, unit_rows_of
from fusedloss.core.negatives import slab_products
from fusedloss.core.tiling import Tiling
from fusedloss.margins import normalize
from workbook.measure import relative_error
from grids import few
from head_cases import bf16, f32, f64, guarded, place  # noqa: F401 (fixtures)
from helpers import everywhere, fault_of, planted, unchanged


@pytest.mark.parametrize("shape,some", few([(shape, some) for shape in ((1, 1), (23, 40), (9, 130)) for some in (True, False)],
                                           ((1, 1), False), ((9, 40 + 90), True), ((23, 40), False)))
def test_unit_and_tangent_kernels(shape, some, place):
    (v, h), g = shape, torch.Generator().manual_seed(0)
    t = torch.randn(v, h, generator=g)
    if v > 5:
        t[4], t[5] = 0, t[5] * 1e-7
    t = guarded(v, h, device=place, values=t)
    rows = torch.cat([torch.randperm(v, generator=g), torch.tensor([-1])]).to(place) if some else None
    r = v + 1 if some else v
    unit, inverse = guarded(r, h, device=place), guarded(r, device=place)
    x, kept = guarded(7, h, dtype=bf16, device=place, values=torch.randn(7, h, generator=g)), torch.tensor([0, 1, -1, 3, 4, -1, 6], device=place)
    ux, xi = guarded(7, h, dtype=bf16, device=place), guarded(7, device=place)
    unit_kernel[(-(-r // 4) + 2,)](x, kept, ux, xi, 7, *x.stride(), t, rows, unit, inverse, r, *t.stride(), h, EPS, BR=4, BH=32)
    exact = unit_rows_of(x.double().cpu(), kept.cpu(), f64, EPS)
    torch.testing.assert_close([ux.double().cpu(), xi.double().cpu()], list(exact), rtol=1e-2, atol=1e-6)
    exact = unit_rows_of(t.double().cpu(), None if rows is None else rows.cpu(), f64, EPS)
    torch.testing.assert_close([unit.double().cpu(), inverse.double().cpu()], list(exact), rtol=1e-5, atol=1e-6)
    d = torch.randn(r, h, generator=g)
    out, factor = guarded(r, h, device=place, values=d), torch.tensor(1.5, device=place)
    tangent_kernel[(-(-r // 4),)](out, unit, inverse, factor, out, r, h, BR=4, BH=32)
    expected = torch.empty(r, h, dtype=f64)
    cosine.to_tangent(d.double(), *exact, torch.tensor(1.5, dtype=f64), expected)
    assert relative_error(out.cpu(), expected) < 1e-5


OF_SCORES = {"plain": HeadConfig(scale=16.0), "dropped": HeadConfig(scale=16.0, conflict=0.1),
             "at zero": HeadConfig(scale=64.0, conflict=0.1, conflict_score=0.0)}
SCORES = [(name, shifted, size) for name, shifted, size in itertools.product(OF_SCORES, (True, False), [(1, 1, 3), (19, 70, 40), (33, 128, 32)])]


@pytest.mark.parametrize("name,shifted,size", few(SCORES, *SCORES[::4], SCORES[7]))
def test_score_kernels(name, shifted, size, place):
    n, t, h = size
    o, g, tiling = OF_SCORES[name], torch.Generator().manual_seed(0), Tiling(False, 16, 32, 32)
    draw_ = lambda *size: torch.randn(size, generator=g).to(place)
    x, w = guarded(n, h, device=place, values=normalize(draw_(n, h))), guarded(t, h, device=place, values=normalize(draw_(t, h)))
    slot = torch.randint(t, (n,), generator=g).to(place)
    slot[n // 2] = -1
    shift = None
    if shifted:
        shift = torch.where(draw_(t) > 1, -math.inf, 1.2 * (draw_(t) > 0))
    got, exact = launch_negatives_lse(x, w, slot, shift, o, tiling), plain_negatives_lse(x.double(), w.double(), slot, shift, o, 13)
    for a, e in zip(got, exact):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-4)
    g_rest, g_cos, grads = draw_(n), draw_(n), {}
    for kernel, (a, b, rest) in {True: (x, w, got[0]), False: (x.double(), w.double(), exact[0])}.items():
        dw = torch.full_like(b, math.nan)
        def accumulate_grads(rows, dz):
            dw[rows] = dz.T @ a
        dx = slab_products(g_rest.to(a.dtype), g_cos.to(a.dtype), a, b, rest, slot, shift, o, kernel, accumulate_grads=accumulate_grads, need_x=True, tiling=tiling)
        grads[kernel] = dx, dw
    for a, e in zip(grads[True], grads[False]):
        assert relative_error(a.cpu(), e.cpu()) < 1e-4


# --- planted bugs ---

SCORE_BUGS = {
    "dead columns score": ("mask=cols < T, other=-float(\"inf\"))[None, :]", "mask=cols < T, other=0.0)[None, :]"),
    "columns past the end score": ("z = tl.where((cols < T)[None, :], z, -float(\"inf\"))", "z = z"),
    "targets stay in the sum": ("return tl.where(cols[None, :] == target_column[:, None], -float(\"inf\"), z)", "return z"),
    "conflicts stay": ("z = tl.where(product > conflict, conflict_score, z)", "z = z"),
    "conflicts pull": ("d = tl.where(product > conflict, 0.0, d)", "d = d"),
    "targets pull like others": ("d = tl.where(cols[None, :] == target_column[:, None], target_coef[:, None], d)", "d = d"),
    "slabs begin at 0": ("target_column_ptr + rows, mask=in_batch, other=-1) - begin", "target_column_ptr + rows, mask=in_batch, other=-1)"),
    "runs do not join": ("& (RUN > 1)", "& (RUN > 99)"),
}
ROW_BUGS = {
    "dead rows are read": ("alive = inside & (row >= 0)", "alive = inside"),
    "short rows have a direction": ("sign = tl.where(norm > eps, 1.0, -1.0)", "sign = tl.where(norm > 0, 1.0, -1.0)"),
    "what is along short rows goes": ("radial = tl.where(inverse > 0, radial, 0.0)", "radial = radial"),
    "rows of zeros are divided": ("tl.where(norm > 0, 1 / tl.maximum(norm, eps), 1.0)", "1 / tl.maximum(norm, eps)"),
    "the factor is forgotten": ("scale *= tl.load(factor_ptr)", "scale *= 1"),
    "parts are added as they are": ("    s = rescaled(s, row_max, new_max, LOG2_SCALE)\n    return new_max, s + tl.sum(rescaled(part_s", "    return new_max, s + tl.sum(rescaled(part_s"),
    "the largest of the last parts": ("new_max = tl.maximum(row_max, tl.max(part_max, 0))", "new_max = tl.max(part_max, 0)"),
    "the offset is forgotten": ("lse - (slope * cos + offset)", "lse - slope * cos"),
    "the loss is not shared": ("loss_weight * loss, mask=in_batch", "loss, mask=in_batch"),
    "the slope is forgotten": ("-slope * g_loss * loss_slope", "-g_loss * loss_slope"),
    "below 0 the rise is another": ("tl.where(gap < 0, e, 1.0)", "1.0"),
    "small losses vanish": ("e * (1 - e * (1 / 2 - e / 3))", "0 * e"),
    "rows without a label have a cosine": ("(in_batch & (target_column >= 0))[:, None]", "in_batch[:, None]"),
}


def row_fault(m, place, g):
    "A word on what a kernel does otherwise than PyTorch"
    t, rows = torch.randn(23, 40, generator=g), torch.cat([torch.randperm(23, generator=g), torch.tensor([-1])])
    t[4], t[5] = 0, t[5] * 1e-7
    unit, inverse = torch.empty(24, 40, device=place), torch.empty(24, device=place)
    held = torch.cat([torch.full((1, 40), 3.0), t]).to(place)[1:]  # a row before the first, which nobody may read
    x, kept, ux, xi = torch.randn(5, 40, generator=g), torch.tensor([0, -1, 2, 3, 4]), torch.empty(5, 40, device=place), torch.empty(5, device=place)
    m.unit_kernel[(8,)](x.to(place), kept.to(place), ux, xi, 5, 40, 1, held, rows.to(place), unit, inverse, 24, 40, 1, 40, EPS, BR=4, BH=32)
    exact = unit_rows_of(t, rows, f32, EPS)
    if not all(torch.allclose(a.cpu(), e, rtol=1e-4) for a, e in zip((ux, xi, unit, inverse), (*unit_rows_of(x, kept, f32, EPS), *exact))):
        return "unit rows"
    parts, slot = torch.randn(2, 300, 19, generator=g), torch.arange(-1, 18)
    parts[0] = 20 * parts[0] - torch.linspace(0, 90, 19)  # gaps of both signs
    parts[1] = parts[1].abs()
    out, line = ([torch.empty(19, device=place) for _ in range(3)] for _ in range(2))
    share = torch.linspace(0, 1, 19)
    m.merge_lse_kernel[(3,)](parts.to(place), unit, torch.cat([torch.full((1, 40), 3.0).to(place), unit])[1:], slot.to(place), *out, share.to(place), *line, 7.0, -2.0, 19, 300, 40, LOG2_SCALE=1.0, BN=8,
                              BP=128, BH=32)
    own = (exact[0][:19] * exact[0][slot.clamp(min=0)]).sum(1).masked_fill(slot < 0, 0.0)
    for a, e in zip(out, ((parts[0] + parts[1].log()).logsumexp(0), own, parts[0].amax(0))):
        if not torch.allclose(a.cpu(), e, rtol=1e-4, atol=1e-5):
            return "merge"
    gap = out[0].cpu().double() - 7 * out[1].cpu().double() + 2
    gap, share = gap.requires_grad_(), share.double()
    loss = share * F.softplus(gap, threshold=100)
    rise, = torch.autograd.grad(loss.sum(), gap)
    if not all(torch.allclose(a.cpu().double(), e, rtol=1e-4, atol=1e-7) for a, e in zip(line, (loss, rise, -7 * rise))):
        return "affine margin"
    d, factor, out, expected = torch.randn(24, 40, generator=g), torch.tensor(1.5), torch.empty(24, 40, device=place), torch.empty(24, 40)
    m.tangent_kernel[(6,)](d.to(place), unit, inverse, factor.to(place), out, 24, 40, BR=4, BH=32)
    cosine.to_tangent(d, *exact, factor, expected)
    if not torch.allclose(out.cpu(), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item()):
        return "tangent"


def score_fault(m, place, g):
    tiling = Tiling(False, 16, 32, 32)
    for name, shifted in (("plain", True), ("at zero", False), ("dropped", True)):
        o, (n, t, h) = m.HeadConfig(*OF_SCORES[name]), (11, 75, 24)
        x, w = (normalize(torch.randn(k, h, generator=g)).to(place) for k in (n, t))
        slot = torch.randint(t, (n,), generator=g).to(place)
        shift = torch.where(torch.rand(t, generator=g) > 0.8, -math.inf, 1.2).to(place) if shifted else None
        if shifted:
            shift[slot] = 0.0
        with pytest.MonkeyPatch.context() as patch:
            everywhere(patch, cosine, "run_length", lambda *sizes: 2)
            everywhere(patch, m, "slab_columns", lambda *sizes: 64)
            got, exact = m.launch_negatives_lse(x, w, slot, shift, o, tiling), plain_negatives_lse(x, w, slot, shift, OF_SCORES[name], 130)
            if not all(torch.allclose(a, e, rtol=1e-4, atol=1e-4) for a, e in zip(got, exact)):
                return f"rest, {name}"
            terms, grads = (torch.randn(n, generator=g).to(place), torch.randn(n, generator=g).to(place)), []
            for module, kernel in ((m, True), (negatives, False)):
                dw = torch.zeros_like(w)
                def accumulate_grads(rows, dz):
                    dw[rows] = dz.T @ x
                grads.append((module.slab_products(*terms, x, w, exact[0], slot, shift, o, kernel, accumulate_grads=accumulate_grads, need_x=True, tiling=tiling), dw))
        if not all(torch.allclose(a, e, rtol=1e-3, atol=1e-4 * e.abs().max().item()) for a, e in zip(*grads)):
            return f"dz, {name}"


KERNEL_BUGS = {bug: (look, pair) for look, bugs in ((row_fault, ROW_BUGS), (score_fault, SCORE_BUGS)) for bug, pair in bugs.items()}
OF = {row_fault: cosine, score_fault: negatives}


@pytest.mark.parametrize("look", OF)
def test_the_unchanged_kernels_pass(look, tmp_path, place):
    m = planted(OF[look], tmp_path, *unchanged(pair for of, pair in KERNEL_BUGS.values() if of is look))
    assert not look(m, place, torch.Generator().manual_seed(0))


@pytest.mark.thorough
@pytest.mark.parametrize("bug", KERNEL_BUGS)
def test_a_bug_in_a_kernel_is_noticed(bug, tmp_path, place):
    look, pair = KERNEL_BUGS[bug]
    find = partial(look, place=place, g=torch.Generator().manual_seed(0))
    assert fault_of(find, OF[look], tmp_path, *pair), f"no case notices that {bug}"


def test_lengths_and_unit_rows_are_never_divided_by_zero():
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-7, 0.0]])
    torch.testing.assert_close(cosine.lengths(rows), torch.tensor([5.0, 1.0, EPS]))
    unit, inverse = unit_rows_of(rows, torch.tensor([0, -1, 2, 1]), torch.float32, EPS)
    torch.testing.assert_close(unit, torch.tensor([[0.6, 0.8], [0, 0], [1e-2, 0], [0, 0]]))
    torch.testing.assert_close(inverse, torch.tensor([0.2, -1.0, -1e5, -1.0]))
    assert [cosine.row_block(h) for h in (1, 512, 4096)] == [(128, 16), (4, 512), (2, 1024)]
    x, w, x_rows = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, -1, 2])
    pair = cosine.unit_rows_of_two(x, x_rows, w, None, torch.float32, EPS)
    torch.testing.assert_close(pair, (*unit_rows_of(x, x_rows, torch.float32, EPS), *unit_rows_of(w, None, torch.float32, EPS)))


def test_scores_of_negatives_by_the_definition():
    assert cosine.locate(torch.tensor([2, 9, -1]), slice(0, 4)).inside[:, 0].tolist() == [True, False, False]
    target = cosine.locate(torch.tensor([0, 9]), slice(0, 3))
    z, which = cosine.nearest_centers(torch.tensor([[4.0, 2, 3, 8, -1, 0], [1, 1, 6, 5, 9, 8]]), HeadConfig(centers=2))
    assert (z.tolist(), which.tolist()) == ([[4.0, 8, 0], [1, 6, 9]], [[0, 1, 1], [0, 0, 0]])
    assert cosine.target_cosines(z, target, HeadConfig(scale=2.0)).tolist() == [2.0, 0.0]
    scores, _ = cosine.plain_negative_scores(z, torch.tensor([0.0, 1.0, 0.0]), target, HeadConfig(scale=10.0, conflict=0.7))
    assert scores.tolist() == [[-math.inf, -math.inf, 0.0], [1, 7, -math.inf]]


def test_the_slope_of_reweighted_logits_is_their_derivative():
    z, circle = torch.linspace(-1, 1, 8, dtype=f64, requires_grad=True), HeadConfig(scale=16.0, circle_margin=0.25)
    scores = cosine.reweighted_logits(z * 1, circle)
    torch.testing.assert_close(scores, 16 * (z + 0.25).clamp(min=0) * (z - 0.25))
    torch.testing.assert_close(torch.autograd.grad(scores.sum(), z)[0], cosine.reweighted_slope(z.detach() * 1, circle))


def test_gradients_of_cosines_by_the_definition():
    "To the log-sum-exp of the negatives and to the target's cosine, in float64"
    x, w = (F.normalize(torch.randn(n, 12, dtype=f64, generator=torch.Generator().manual_seed(n))).requires_grad_() for n in (9, 40))
    target_column, plain = torch.arange(9) * 4, HeadConfig(scale=16.0)
    z = 16 * x @ w.T
    others, lse = z.scatter(1, target_column[:, None], -math.inf), plain_negatives_lse(x.detach(), w.detach(), target_column, None, plain, 7)[0]
    g_lse, g_cos = torch.randn(9, dtype=f64), torch.randn(9, dtype=f64)
    expected, = torch.autograd.grad([others.logsumexp(1), z[torch.arange(9), target_column] / 16], w, [g_lse, g_cos])
    tile = cosine.scaled_cosines(x.detach(), w.detach(), plain)
    dz = cosine.plain_cosine_dz(*tile, None, cosine.locate(target_column, slice(0, 40)), lse, 16 * g_lse, g_cos, plain)
    torch.testing.assert_close(dz.T @ x.detach(), expected)


def test_which_head_takes_kernels():
    plain = HeadConfig(scale=16.0)
    assert not negatives.uses_kernels("auto", torch.randn(5, 8), f32, plain), "fp32 goes through PyTorch"
    with pytest.raises(ValueError, match="'tiles'"):
        negatives.uses_kernels("recompute", torch.randn(5, 8), f32, plain)
    assert negatives.all_classes_lse(torch.randn(9, 12), torch.randn(40, 12), torch.arange(9), plain, "auto") is None, "fp32: tiles"


def test_gradients_of_few_rows_and_small_upstream_gradients():
    index, values = torch.tensor([4, 4, 2]), torch.tensor([[1.0], [0.0], [2.0]])
    sparse, dense = (negatives.rows_gradient(index, values, torch.Size([6, 1]), kind) for kind in (True, False))
    assert sparse.is_sparse and sparse.to_dense()[:, 0].tolist() == dense[:, 0].tolist() == [0, 0, 2, 0, 1, 0]
    small = torch.tensor([1e-9, 2e-9])
    in_range, _, factor = negatives.within_range(small, small, torch.tensor(3.0), 64.0, torch.float16)
    torch.testing.assert_close(in_range * factor, 3 * small)
