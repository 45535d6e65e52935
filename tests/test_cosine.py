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
    "the slope is forgotten": ("-slope * loss_weight * loss_slope", "-loss_weight * loss_slope"),
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
