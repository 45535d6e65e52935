"""The product by hand, on a CPU: thread by thread, with copies that land late and products that are computed when they are waited for."""
import ctypes
import math
import shutil
import subprocess
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch

import fusedloss.kernels as kernels_page
import fusedloss.logprobs as logprobs
from fusedloss import recompute
from fusedloss.core import hopper, score_product
from fusedloss.core.cuda import cuda_source
from fusedloss.core.devices import GPUS
from fusedloss.core.hopper import IN_TURN, WarpGroupProduct
from fusedloss.core.options import LossOptions
from workbook.measure import relative_error
from grids import few
from helpers import everywhere, interpreted, planted, where_kernels_run
from movement import of_page
from on_cpu import check_nvcc, kernels_on_cpu

FP8 = torch.float8_e4m3fn
CLASSES, KINDS = {0: 256, 1: 192}, {"bf16": torch.bfloat16, "f16": torch.float16}


SOURCE = cuda_source("product_sm90")


def scored(n: int, v: int, h: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    "x, w and their scores in float64"
    made = torch.Generator().manual_seed(n + v + h)
    x, w = ((scale * torch.randn(size, h, generator=made)).to(dtype) for size in (n, v))
    return x, w, x.double() @ w.double().T


class Found(NamedTuple):
    "What a kernel leaves; NaN where it writes nothing"
    stats: torch.Tensor  # [tiles,N,2], or [tiles,N,1]: sums alone
    targets_z: torch.Tensor  # [N]
    exponentials: torch.Tensor  # [N,V]


def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor | None = None, cluster: int = 1, grid: int = 1, stages: int = 2, group: int = 2,
        seed: int = 0, source: str | None = None, log2_scale: float = math.log2(math.e), pitch: int | None = None, in_turn: int = 0, wanted: torch.Tensor | None = None,
        bias: torch.Tensor | None = None, log2_cap: float = 0.0, units: torch.Tensor | None = None) -> Found:
    "`score_statistics`, or with offsets `exponentials`, by so many clusters of blocks"
    kernels = kernels_on_cpu("product_on_cpu.cpp", "-O1", product_sm90=source or SOURCE)
    kernels.seed = seed
    (n, h), v = x.shape, len(w)
    launch = kernels("score_statistics" if offsets is None else "exponentials", 0, STAGES=stages, CLUSTER=cluster, GROUP=group, IN_TURN=in_turn,
                     BIASED=int(bias is not None), CAPPED=int(log2_cap > 0), HALF=str(x.dtype == torch.float16).lower(), EIGHT=int(x.dtype == FP8))
    pitch = pitch or -(-v // 8) * 8
    room, targets_z, e = torch.full((-(-v // CLASSES[in_turn]) + 2, n, 2 if offsets is None else 1), math.nan), torch.full((n + 2,), math.nan), torch.full((n + 2, pitch), math.nan, dtype=torch.bfloat16 if x.dtype == FP8 else x.dtype)
    more, last = ((), ()) if offsets is None else ((offsets, e[1:-1]), (ctypes.c_int64(pitch), ctypes.c_float(log2_scale), ctypes.c_float(log2_cap)))
    launch(grid * cluster, 384, x, w, y, *more, room[1:-1], targets_z[1:-1], wanted, bias, units, n, v, hopper.words(h, x.dtype), *last)
    assert all(t[[0, -1]].isnan().all() for t in (room, targets_z, e)) and e[:, v:].isnan().all(), "it writes outside"
    return Found(room[1:-1], targets_z[1:-1], e[1:-1, :v])


def targets_of(n: int, v: int) -> torch.Tensor:
    "A class of each token, and for every fifth none"
    y = torch.arange(n) * 37 % v
    return torch.where(torch.arange(n) % 5 == 4, -100, y)


def without_targets(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    "Scores of the other classes; that of the target is −∞"
    at = y.clamp(min=0)[:, None]
    return scores.scatter(1, at, torch.where(y[:, None] < 0, scores.gather(1, at), -math.inf))


def statistics_error(x: torch.Tensor, w: torch.Tensor, scores: torch.Tensor, **how) -> float:
    "The error of `score_statistics`"
    y = targets_of(*scores.shape)
    found = run(x, w, y, **how)
    return max(error(found.stats, without_targets(scores, y), CLASSES[how.get("in_turn", 0)]), target_error(found.targets_z, scores, y))


def target_error(got: torch.Tensor, scores: torch.Tensor, y: torch.Tensor) -> float:
    "Of the targets' scores, in the units of `error`; infinite where there is one without a target"
    if not torch.equal(got.isnan(), y < 0):
        return math.inf
    off = (got.double() - scores.gather(1, y.clamp(min=0)[:, None])[:, 0])[y >= 0].abs()
    return off.max().item() / 1e-6 / (1 + scores.abs().max().item()) if len(off) else 0.0


def error(got: torch.Tensor, scores: torch.Tensor, classes: int) -> float:
    "The largest error of a maximum, or of a sum relative to it, in units of 1e-6 of the largest score; infinite for what is missing"
    errors = [0.0]
    for (m, s), z in zip((t.unbind(1) for t in got.double()), scores.split(classes, 1), strict=True):
        top = z.amax(1)
        some, sums = top > -math.inf, (z - top.clamp(min=-1e300)[:, None]).exp().sum(1)
        errors += [0.0 if torch.equal(m[~some], top[~some]) and not s[~some].any() else math.inf]
        errors += [(m - top)[some].abs().max().item(), (s / sums - 1)[some].abs().max().item()] if some.any() else []
    size = scores[scores > -math.inf].abs().max().item()
    return max(math.inf if math.isnan(e) else e / 1e-6 / (1 + size) for e in errors)


SIZES = {"one tile": (128, 256, 64), "parts of tiles": (70, 300, 72), "a token": (1, 257, 8), "a ring that goes round": (130, 256, 328), "many tiles": (300, 770, 136)}


@pytest.mark.parametrize("size", few(SIZES, "parts of tiles", "many tiles"))
@pytest.mark.parametrize("cluster, grid, stages, seed, in_turn", few(list(product((1, 2), (1, 3), (2, 3), (0, 2), (0, 1))), (1, 1, 2, 0, 1), (2, 1, 2, 2, 0), (1, 3, 3, 2, 1)))
def test_statistics_of_tiles(size, cluster, grid, stages, seed, in_turn):
    x, w, scores = scored(*SIZES[size])
    assert statistics_error(x, w, scores, cluster=cluster, grid=grid, stages=stages, seed=seed, in_turn=in_turn) < 1


@pytest.mark.parametrize("kind", KINDS)
def test_both_dtypes_and_large_scores(kind):
    x, w, scores = scored(64, 300, 64, KINDS[kind], 4.0)
    assert statistics_error(x, w, scores) < 1


def test_a_row_of_minus_infinity_and_one_that_is_no_number():
    x, w, _ = scored(4, 256, 64)
    x[1] = 0
    x[1, 0], w[:, 0] = -math.inf, 1
    x[2, 3] = math.nan
    got = run(x, w, torch.full((4,), -100)).stats[0]
    assert got[1].tolist() == [-math.inf, 0] and got[2].isnan().any() and got[[0, 3]].isfinite().all()


def test_tiles_of_any_group_are_the_same():
    x, w, scores = scored(*SIZES["many tiles"])
    y = targets_of(*scores.shape)
    first = run(x, w, y, group=1)
    assert all(torch.equal(run(x, w, y, cluster=2, grid=2, group=g).stats, first.stats) for g in (2, 3))


def exponentials_error(x: torch.Tensor, w: torch.Tensor, scores: torch.Tensor, **how) -> float:
    "The error of `exponentials` relative to each row's offset, its rounding to 16 bits aside, in the units of `error`"
    y, scale = targets_of(*scores.shape), how.get("log2_scale", math.log2(math.e))
    offsets = (scores.amax(1) * scale).float().round() + torch.arange(len(x)) % 7 - 3
    found = run(x, w, y, offsets, **how)
    t = without_targets(scores, y) * scale - offsets.double()[:, None]
    unit = 1e-6 * (1 + (scores * scale).abs().max().item())
    worst = target_error(found.targets_z, scores, y)
    for s, part in zip(found.stats[..., 0].double(), t.split(CLASSES[how.get("in_turn", 0)], 1), strict=True):
        worst = max(worst, (s / part.exp2().sum(1) - 1).abs().nan_to_num(math.inf).max().item() / unit)
    step, least = (2**-11, 2**-24) if x.dtype == torch.float16 else (2**-8, 0.0)
    off = (found.exponentials.double() - t.exp2()).abs() - (step + unit) * t.exp2() - least
    return max(worst, 0.0 if (off <= 0).all() else math.inf)


@pytest.mark.parametrize("size", few([size for size in SIZES if size != "a token"], "parts of tiles"))
@pytest.mark.parametrize("cluster, kind, seed, in_turn", few(list(product((1, 2), KINDS, (0, 2), (0, 1))), (2, "bf16", 2, 1), (1, "f16", 0, 0)))
def test_exponentials(size, cluster, kind, seed, in_turn):
    x, w, scores = scored(*SIZES[size], KINDS[kind], 0.4)
    assert exponentials_error(x, w, scores, cluster=cluster, seed=seed, in_turn=in_turn) < 2


@pytest.mark.parametrize("log2_scale, pitch", [(0.3, None), (math.log2(math.e), 320)])
def test_exponentials_of_scaled_scores_and_in_wider_rows(log2_scale, pitch):
    x, w, scores = scored(70, 300, 72, scale=0.5)
    assert exponentials_error(x, w, scores, log2_scale=log2_scale, pitch=pitch) < 2


def shaped_error(size: tuple[int, int, int], cap: float = 0.0, biased: bool = False, scale: float = 1.0, **how) -> float:
    "The error of `exponentials` of scores with a bias and a soft cap, its rounding to 16 bits aside, in the units of `error`"
    x, w, scores = scored(*size, scale=0.4)
    n, v = scores.shape
    classes, y, log2e = CLASSES[how.get("in_turn", 0)], targets_of(n, v), math.log2(math.e)
    bias = wavy_bias(v, classes)
    scores = scores + bias[:v].double() * biased
    score, slope = scores * scale, 1.0
    if cap: score, slope = cap * (score / cap).tanh(), 1 / (score / cap).cosh() ** 2
    offsets = torch.where(y < 0, math.inf, score.amax(1) * log2e).float()
    x[4] = math.nan  # a token that does not count
    found = run(x, w, y, offsets, log2_scale=scale * log2e, log2_cap=cap * log2e, bias=bias if biased else None, **how)
    whole = torch.exp2(without_targets(score, y) * log2e - offsets.double()[:, None])
    wanted, unit = whole * slope, 2e-6 * (1 + (score * log2e).abs().max().item())
    worst = target_error(found.targets_z, scores, y)
    for s, part in zip(found.stats[..., 0].double(), whole.split(classes, 1), strict=True):
        worst = max(worst, ((s - part.sum(1)).abs() / (part.sum(1) + 1e-300)).nan_to_num(math.inf).max().item() / unit)
    off = (found.exponentials.double() - wanted).abs() - (2**-8 + unit) * wanted - 1e-6 * whole - 1e-38
    return max(worst, 0.0 if (off <= 0).all() else math.inf)


def wavy_bias(v: int, classes: int) -> torch.Tensor:
    "A bias of `v` classes, and zeros on to whole tiles"
    return torch.cat([5 * (torch.arange(v) * 0.7).sin(), torch.zeros(-v % classes)])


SHAPES = {"cap": dict(cap=3.0), "cap above all": dict(cap=500.0), "cap below all": dict(cap=0.5), "bias": dict(biased=True), "speedrun": dict(cap=23.0, biased=True, scale=1.7)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cluster, seed, in_turn", few(list(product((1, 2), (0, 2), (0, 1))), (2, 2, 1)))
def test_exponentials_with_a_bias_and_a_cap(shape, cluster, seed, in_turn):
    assert shaped_error(SIZES["parts of tiles"], **SHAPES[shape], cluster=cluster, seed=seed, in_turn=in_turn) < 2


@pytest.mark.parametrize("sign", (1, -1))
def test_slopes_of_saturated_scores_keep_their_digits(sign):
    "Scores of nine caps on either side, whose slopes are 6e-8"
    x, w, cap = torch.full((4, 64), sign / 8), torch.ones(256, 64), 8 * math.log2(math.e) / 9
    found = run(x.bfloat16(), w.bfloat16(), torch.full((4,), 300), torch.full((4,), sign * cap), log2_cap=cap)
    expected = 2 ** (cap * math.tanh(9 * sign) - sign * cap) / math.cosh(9) ** 2
    torch.testing.assert_close(found.exponentials.double(), torch.full((4, 256), expected, dtype=torch.float64), rtol=2**-8, atol=0)


def test_minus_infinity_has_the_score_of_minus_the_cap():
    x, w, _ = scored(4, 256, 64)
    x[1] = 0
    x[1, 0], w[:, 0] = -math.inf, 1
    x[2, 3] = math.nan
    found = run(x, w, torch.full((4,), 7), torch.zeros(4), log2_cap=4.0)
    assert torch.allclose(found.stats[0, 1], torch.tensor(255 * 2.0**-4)) and not found.exponentials[1].any()
    assert found.stats[0, 2].isnan().all() and found.stats[0, [0, 3]].isfinite().all() and not found.exponentials[[0, 1, 3], 7].any()


def test_statistics_with_a_bias():
    x, w, scores = scored(*SIZES["parts of tiles"])
    y, bias = targets_of(*scores.shape), wavy_bias(300, 256)
    scores = scores + bias[:300].double()
    found = run(x, w, y, bias=bias)
    assert error(found.stats, without_targets(scores, y), 256) < 1 and target_error(found.targets_z, scores, y) < 1


def in_eight(n: int, v: int, h: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    "x and w in FP8, what multiplies each row of their scores, and these in float64"
    x, w, scores = scored(n, v, h, FP8)
    units = 0.1 * (1 + torch.arange(n) % 3)
    return x, w, units, scores * units.double()[:, None]


@pytest.mark.parametrize("size", [(70, 300, 80), (130, 256, 656), (1, 257, 16)])
@pytest.mark.parametrize("cluster, seed, in_turn", few(list(product((1, 2), (0, 2), (0, 1))), (2, 2, 1), (1, 0, 0)))
def test_scores_of_eight_bits(size, cluster, seed, in_turn):
    x, w, units, scores = in_eight(*size)
    how = dict(cluster=cluster, seed=seed, in_turn=in_turn, units=units)
    assert statistics_error(x, w, scores, **how) < 1 and exponentials_error(x, w, scores, **how) < 2


def test_scores_of_eight_bits_with_a_bias():
    x, w, units, scores = in_eight(70, 300, 80)
    bias = wavy_bias(300, 256)
    assert exponentials_error(x, w, scores + bias[:300].double(), units=units, bias=bias) < 2


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU of compute capability 9.0")
@pytest.mark.parametrize("size", [(70, 300, 80), (1000, 5003, 912), (130, 256, 16)])
def test_scores_of_eight_bits_on_a_gpu(size):
    "The tensor cores keep about 14 bits of a sum: errors are shares of the longest row and class vector"
    x, w, units, scores = in_eight(*size)
    y, (n, v), tiles = targets_of(*scores.shape), scores.shape, -(-len(w) // IN_TURN.classes)
    largest = 2.0**-11 * (units[:, None].double() * x.double().norm(dim=1, keepdim=True) * w.double().norm(dim=1).amax())
    offsets = torch.where(y < 0, math.inf, scores.amax(1) * math.log2(math.e)).float()
    new = lambda *size, dtype=torch.float32: torch.full(size, math.nan, dtype=dtype, device="cuda")
    e, sums, stats, targets_z = new(n, -(-v // 8) * 8, dtype=torch.bfloat16), new(tiles, n), new(tiles, n, 2), new(2, n)
    given = x.cuda(), w.cuda(), y.cuda()
    IN_TURN.exponentials(*given, offsets.cuda(), e[:, :v], sums, targets_z[0], units=units.cuda())
    IN_TURN.statistics(*given, stats, targets_z[1], units=units.cuda())
    known, others = y >= 0, without_targets(scores, y)
    exact = scores.gather(1, y.clamp(min=0)[:, None])
    assert torch.equal(targets_z.isnan().cpu(), (~known).expand(2, n)) and ((targets_z.cpu().double().T - exact).abs() <= largest)[known].all()
    tops = torch.stack([z.amax(1) for z in others.split(IN_TURN.classes, 1)])
    assert ((stats[..., 0].cpu().double() - tops).abs() <= largest.T).all()
    off = e[:, :v].cpu().double() / torch.exp2(others * math.log2(math.e) - offsets.double()[:, None])
    there = known[:, None] & (others > -math.inf) & (others > scores.amax(1, keepdim=True) - 60)
    assert (off.log().abs() <= largest + 2.0**-8)[there].all() and not e[:, :v].cpu()[~known].any()
    assert torch.allclose(sums.sum(0).cpu()[known], e[:, :v].float().sum(1).cpu()[known], rtol=2.0**-7)


def gradients(x, w, y, offsets, coefs, in_turn=0, source=None, bias=None):
    "e and the targets' scores by `score_gradients`; NaN stands around"
    kernels = kernels_on_cpu("product_on_cpu.cpp", "-O1", product_sm90=source or SOURCE)
    (n, h), v = x.shape, len(w)
    pitch = -(-v // 8) * 8
    e, targets_z = torch.full((n + 2, pitch), math.nan, dtype=x.dtype), torch.full((n + 2,), math.nan)
    launch = kernels("score_gradients", 0, STAGES=2, CLUSTER=1, GROUP=2, IN_TURN=in_turn, BIASED=int(bias is not None), CAPPED=0, HALF=str(x.dtype == torch.float16).lower(), EIGHT=int(x.dtype == FP8))
    launch(1, 384, x, w, y, offsets, coefs, e[1:-1], targets_z[1:-1], bias, n, v, h, ctypes.c_int64(pitch), ctypes.c_float(math.log2(math.e)))
    assert all(t[[0, -1]].isnan().all() for t in (e, targets_z)) and e[:, v:].isnan().all(), "it writes outside"
    return e[1:-1, :v], targets_z[1:-1]


def gradients_error(x, w, scores, made=gradients, **how) -> float:
    "The error of `score_gradients`, in half steps of 16 bits; infinite for a target's score that is wrong"
    y, coefs = targets_of(*scores.shape), torch.linspace(-1, 2, len(x))
    offsets = torch.where(y < 0, math.inf, scores.logsumexp(1) * math.log2(math.e)).float()
    got, targets_z = made(x, w, y, offsets, coefs, **how)
    wanted = torch.exp2(without_targets(scores, y) * math.log2(math.e) - offsets.double()[:, None]) * coefs.double()[:, None]
    if target_error(targets_z, scores, y) > 8: return math.inf
    step, least = (2**-11, 2**-24) if x.dtype == torch.float16 else (2**-9, 1e-38)
    return ((got.double() - wanted).abs() / (step * wanted.abs() + least)).max().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_turn", [0, 1])
def test_gradients_of_scores(kind, in_turn):
    assert gradients_error(*scored(150, 300, 72, KINDS[kind], 0.4), in_turn=in_turn) < 2.1


@pytest.mark.parametrize("in_turn", [0, 1])
def test_gradients_of_scores_with_a_bias(in_turn):
    x, w, scores = scored(150, 300, 72)
    bias = wavy_bias(300, 192 if in_turn else 256)
    assert gradients_error(x, w, scores + bias[:300].double(), in_turn=in_turn, bias=bias) < 2.1


def gradients_on_gpu(x, w, y, offsets, coefs, bias=None):
    "As `gradients`, by the launcher of the library"
    e, targets_z = torch.full((len(x), -(-len(w) // 8) * 8), math.nan, dtype=x.dtype, device="cuda"), torch.full((len(x),), math.nan, device="cuda")
    bias = {} if bias is None else dict(bias=bias.cuda())
    IN_TURN.gradients(x.cuda(), w.cuda(), y.cuda(), offsets.cuda(), coefs.cuda(), e[:, :len(w)], targets_z, **bias)
    return e[:, :len(w)].cpu(), targets_z.cpu()


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU of compute capability 9.0")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_scores_on_a_gpu(kind):
    assert gradients_error(*scored(1000, 5003, 904, KINDS[kind], 904 ** -0.25), made=gradients_on_gpu) < 2.1


# --- for entropies ---

def launch_on_cpu(name: str, form: WarpGroupProduct, x: torch.Tensor, w: torch.Tensor, *values, source: str | None = None) -> None:
    "As the launcher of the library, whose last arguments are N, V, H, and for some a pitch and a scale"
    kernels = kernels_on_cpu("product_on_cpu.cpp", "-O1", product_sm90=source or SOURCE)
    launch = kernels(name, 0, STAGES=2, CLUSTER=1, GROUP=2, IN_TURN=int(form.in_turn), BIASED=int(form.biased), CAPPED=int(form.capped), HALF=str(x.dtype == torch.float16).lower(), EIGHT=int(x.dtype == FP8))
    sizes = 3 + next(i for i, v in enumerate(values) if type(v) is int)
    last = [ctypes.c_int64(v) if type(v) is int else ctypes.c_float(v) for v in values[sizes:]]
    launch(1, 384, x, w, *values[:sizes], *last)


def moments_error(x: torch.Tensor, w: torch.Tensor, scores: torch.Tensor, form: WarpGroupProduct = IN_TURN) -> float:
    "The error of `score_moments`, in the units of `error`; infinite where its statistics are not those of `score_statistics`"
    y, new, tiles = targets_of(*scores.shape).to(x.device), partial(torch.full, fill_value=math.nan, device=x.device), -(-len(w) // form.classes)
    stats, plain, found, (z_y, again) = new((tiles, len(x), 2)), new((tiles, len(x), 2)), new((tiles + 2, len(x))), new((2, len(x)))
    form.moments(x, w, y, stats, found[1:-1], z_y)
    form.statistics(x, w, y, plain, again)
    if not torch.equal(stats, plain) or not torch.equal(z_y.nan_to_num(), again.nan_to_num()) or not found[[0, -1]].isnan().all(): return math.inf
    worst = 0.0
    for got, z in zip(found[1:-1].cpu().double(), without_targets(scores, y.cpu()).split(form.classes, 1), strict=True):
        t = z - z.amax(1, keepdim=True).clamp(min=-1e300)
        terms = (t.exp() * t).nan_to_num()  # 0 · -inf
        worst = max(worst, ((got - terms.sum(1)).abs() / (t.exp() - terms).sum(1).clamp(min=1e-300)).nan_to_num(math.inf).max().item())
    return worst / 1e-6 / (1 + scores.abs().max().item())


def maxima_error(x: torch.Tensor, w: torch.Tensor, scores: torch.Tensor, form: WarpGroupProduct = IN_TURN) -> float:
    "The error of `score_maxima`, in the units of `error`; infinite where its statistics are not those of `score_statistics`"
    y, new, tiles = targets_of(*scores.shape).to(x.device), partial(torch.full, fill_value=math.nan, device=x.device), -(-len(w) // form.classes)
    stats, plain, found, (z_y, again) = new((tiles, len(x), 2)), new((tiles, len(x), 2)), new((tiles * form.classes // form.narrow + 2, len(x))), new((2, len(x)))
    form.maxima(x, w, y, stats, found[1:-1], z_y)
    form.statistics(x, w, y, plain, again)
    if not torch.equal(stats, plain) or not torch.equal(z_y.nan_to_num(), again.nan_to_num()) or not found[[0, -1]].isnan().all(): return math.inf
    z = without_targets(scores, y.cpu())
    wanted = torch.nn.functional.pad(z, (0, tiles * form.classes - len(w)), value=-math.inf).unflatten(1, (-1, form.narrow)).amax(2).T
    off = torch.where(found[1:-1].cpu() == wanted, 0.0, (found[1:-1].cpu().double() - wanted).abs())
    return off.nan_to_num(math.inf).max().item() / 1e-6 / (1 + scores.abs().max().item())


def entropy_gradients_error(x: torch.Tensor, w: torch.Tensor, scores: torch.Tensor, form: WarpGroupProduct = IN_TURN) -> float:
    "The error of `entropy_gradients`, in half steps of 16 bits of its largest part"
    (n, v), log2e = scores.shape, math.log2(math.e)
    y, coefs, slopes, means = targets_of(n, v), torch.linspace(-1, 2, n), torch.linspace(1.5, -1, n), torch.linspace(-3, 0, n)
    offsets = torch.where(y < 0, math.inf, scores.logsumexp(1) * log2e).float()
    dz, z_y = torch.full((n + 2, -(-v // 8) * 8), math.nan, dtype=x.dtype, device=x.device), torch.full((n,), math.nan, device=x.device)
    form.entropy_gradients(x, w, *(t.to(x.device) for t in (y, offsets, coefs, slopes, means)), dz[1:-1, :v], z_y)
    if target_error(z_y.cpu(), scores, y) > 8 or not dz[[0, -1]].isnan().all() or not dz[:, v:].isnan().all(): return math.inf
    of = lambda numbers: numbers.double()[:, None]
    t = without_targets(scores, y) - of(offsets) / log2e
    part = t.exp(), (t.exp() * (of(means) - t)).nan_to_num()  # 0 · -inf
    wanted, parts = of(coefs) * part[0] + of(slopes) * part[1], of(coefs).abs() * part[0] + of(slopes).abs() * part[1].abs()
    step, least = (2**-11, 2**-24) if x.dtype == torch.float16 else (2**-9, 1e-38)
    return ((dz[1:-1, :v].cpu().double() - wanted).abs() / (step * parts + least)).max().item()


def on_cpu(monkeypatch: pytest.MonkeyPatch, source: str | None = None) -> None:
    "What the library launches on Hopper runs thread by thread"
    everywhere(monkeypatch, hopper, "launch_form", partial(launch_on_cpu, source=source))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_turn", [False, True])
def test_moments_and_gradients_of_entropies(kind, in_turn, monkeypatch):
    on_cpu(monkeypatch)
    data, form = scored(150, 300, 72, KINDS[kind], 0.4), WarpGroupProduct(in_turn=in_turn)
    assert moments_error(*data, form) < 1 and entropy_gradients_error(*data, form) < 2.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("v", [300, 577])
def test_maxima_of_narrow_tiles(v, kind, in_turn, monkeypatch):
    on_cpu(monkeypatch)
    assert maxima_error(*scored(150, v, 72, KINDS[kind], 0.4), WarpGroupProduct(in_turn=in_turn)) < 1


def log_probs_errors(n: int, v: int, h: int, device: str) -> list[float]:
    "Of log-probabilities, entropies, and what both together leave of gradients, in bf16"
    x, w, scores = scored(n, v, h, scale=h ** -0.25)
    y, ramp = targets_of(n, v), torch.linspace(-1, 2, n)
    leaves, exact = ([t.to(device, dtype).requires_grad_() for t in (x, w)] for device, dtype in ((device, x.dtype), ("cpu", torch.float64)))
    found = logprobs.linear_log_probs(*leaves, y.to(device), entropy=True)
    p = (exact[0] @ exact[1].T).log_softmax(1)
    values = torch.where(y < 0, 0.0, p.gather(1, y.clamp(min=0)[:, None])[:, 0]), torch.where(y < 0, 0.0, -(p.exp() * p).sum(1))
    of = lambda log_probs, entropy: (ramp.to(log_probs) * log_probs).sum() + ((0.7 - ramp.to(entropy)) * entropy).sum()
    made, wanted = torch.autograd.grad(of(*found[:2]), leaves), torch.autograd.grad(of(*values), exact)
    return [relative_error(a.detach().cpu(), b.detach()) for a, b in zip((*found[:2], *made), (*values, *wanted), strict=True)]


def held_log_probs(n: int, v: int, h: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    "They hold the errors of bf16, by these kernels alone"
    launched, launch = [], hopper.launch_form
    everywhere(monkeypatch, hopper, "launch_form", lambda name, *values: (launched.append(name), launch(name, *values)))
    found = log_probs_errors(n, v, h, device)
    assert all(a < b for a, b in zip(found, (1e-5, 1e-5, 6e-3, 6e-3))) and {*launched} == {"score_moments", "entropy_gradients"}, (found, launched)


on_hopper = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU of compute capability 9.0")


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
def test_log_probs_with_entropies_by_these_kernels(monkeypatch):
    on_cpu(monkeypatch)
    everywhere(monkeypatch, score_product, "takes_scores", lambda *_: True)
    everywhere(monkeypatch, logprobs, "takes_kernel", lambda x: True)
    everywhere(monkeypatch, kernels_page, "has_kernel", lambda z: True)
    held_log_probs(150, 300, 72, "cpu", monkeypatch)


def slabs_of(n: int, v: int, h: int, budget: int, module=recompute) -> tuple[torch.Tensor, torch.Tensor]:
    "dx and dw of recomputed scores, within a budget"
    x, w, _ = scored(n, v, h, scale=h ** -0.25)
    y, g = targets_of(n, v), torch.linspace(-1, 2, n)
    stored = (x.float() @ w.float().T).aminmax(dim=1).max * math.log2(math.e), torch.full((n,), 30.0)
    return module.kernel_bwd((g, None, g), x, w, y, None, None, None, None, torch.stack(stored), torch.zeros(n), LossOptions(), budget, (True, True, False))[:2]


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("off", [None, ("dw.view(-1)[j.stop * h:j.stop * h + n * size]", "dw.view(-1)[j.start * h:j.start * h + n * size]")], ids=["as it is", "where its own dw is"])
def test_slabs_that_stand_in_dw_leave_it_right(off, tmp_path, monkeypatch):
    on_cpu(monkeypatch)
    everywhere(monkeypatch, score_product, "takes_scores", lambda *_: True)
    module = recompute if off is None else planted(recompute, tmp_path, *off)
    (dx, dw), (whole_dx, whole_dw) = slabs_of(40, 900, 136, 1, module), slabs_of(40, 900, 136, 0)
    assert (max(relative_error(dw, whole_dw), relative_error(dx, whole_dx)) < 4e-3) == (off is None)


@on_hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [IN_TURN, WarpGroupProduct()], ids=["in turn", "shared"])
def test_moments_and_gradients_of_entropies_on_a_gpu(kind, form):
    x, w, scores = scored(1000, 5003, 904, KINDS[kind], 904 ** -0.25)
    assert moments_error(x.cuda(), w.cuda(), scores, form) < 4 and entropy_gradients_error(x.cuda(), w.cuda(), scores, form) < 2.1
    assert maxima_error(x.cuda(), w.cuda(), scores, form) < 4


@on_hopper
@pytest.mark.parametrize("sizes", [(1000, 5003, 904), (3000, 32768, 2048)], ids=str)
def test_log_probs_with_entropies_on_a_gpu(sizes, monkeypatch):
    held_log_probs(*sizes, "cuda", monkeypatch)


def run_on_gpu(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor | None = None, **how) -> Found:
    "`run` by the launchers of the library, twice"
    x, w, y, form = x.cuda(), w.cuda(), y.cuda(), WarpGroupProduct(**how)
    new = lambda *size, dtype=torch.float32: torch.full(size, math.nan, dtype=dtype, device="cuda")
    e, found = new(len(x), -(-len(w) // 8) * 8, dtype=x.dtype), []
    for _ in range(2):
        stats, targets_z = new(-(-len(w) // form.classes), len(x), *([2] if offsets is None else [])), new(len(x))
        if offsets is None:
            form.statistics(x, w, y, stats, targets_z)
        else:
            form.exponentials(x, w, y, offsets.cuda(), e[:, :len(w)], stats, targets_z)
        found.append((stats.cpu(), targets_z.cpu()))
    assert torch.equal(found[0][0], found[1][0]) and e[:, len(w):].isnan().all()
    stats, targets_z = found[0]
    return Found(stats if offsets is None else stats[..., None], targets_z, e[:, :len(w)].cpu())


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU of compute capability 9.0")
@pytest.mark.parametrize("size", [*SIZES.values(), (1000, 5000, 904), (4096, 32000, 1024)], ids=str)
@pytest.mark.parametrize("how", [dict(cluster=1), dict(stages=3, group=3), dict(in_turn=1, stages=5), dict(in_turn=1, stages=3, cluster=1), dict(persistent=0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(size, how, kind, monkeypatch):
    monkeypatch.setitem(globals(), "run", run_on_gpu)
    x, w, scores = scored(*size, KINDS[kind], scale=size[2] ** -0.25)
    assert statistics_error(x, w, scores, **how) < 4
    assert exponentials_error(x, w, scores, **how) < 8


def test_a_token_that_does_not_count_leaves_zeros():
    x, w, _ = scored(70, 300, 72)
    x[3, 5] = math.nan
    offsets = torch.zeros(70)
    offsets[3] = math.inf
    for in_turn in (0, 1):
        found = run(x, w, torch.full((70,), -100), offsets, in_turn=in_turn)
        assert not found.exponentials[3].any() and not found.stats[:, 3].any() and found.exponentials[[2, 4]].all()


def test_a_launch_that_is_not_wanted_writes_nothing():
    x, w, _ = scored(70, 300, 72)
    for offsets in (None, torch.zeros(70)):
        found = run(x, w, targets_of(70, 300), offsets, wanted=torch.zeros(1, dtype=torch.int32))
        assert found.stats.isnan().all() and found.targets_z.isnan().all() and found.exponentials.isnan().all()
        assert run(x, w, targets_of(70, 300), offsets, wanted=torch.ones(1, dtype=torch.int32)).stats.isfinite().all()


def test_gradients_from_exponentials_of_a_confident_target():
    "dx of Σ (lse − z of the target) by a plain product with e and one row of w, without a matrix of probabilities between"
    x, w, _ = scored(64, 300, 64, scale=0.5)
    y = torch.arange(64) * 4 % 300
    x = (8 * w[y].float() / w[y].float().norm(dim=1, keepdim=True) + 0.1 * x.float()).bfloat16()
    z = x.double() @ w.double().T
    offsets = (z.amax(1) * math.log2(math.e)).float()
    found = run(x, w, y, offsets)
    others = found.stats[..., 0].sum(0)
    total = others + torch.exp2(found.targets_z * math.log2(math.e) - offsets)
    dx = (found.exponentials.float() @ w.float() - others[:, None] * w.float()[y]) / total[:, None]
    wanted = (z.softmax(1) - torch.nn.functional.one_hot(y, 300)) @ w.double()
    assert others.div(total).min() < 1e-3 and (dx - wanted).norm() / wanted.norm() < 4e-3


BUGS = {  # what is wrong: text of product.cu, what stands in its place
    "a stage is given back before its products are over": ("if (before >= 0) give_back(ring, before, thread);\n    before = p.stage;", "give_back(ring, p.stage, thread);\n    before = -1;"),
    "the last products are not waited for": ("  wait_products<0>();\n", ""),
    "a stage is filled before it is empty": ("      wait_for(&ring.empty[p.stage], p.parity ^ 1);\n", ""),
    "a stage is read before it is full": ("    wait_for(&ring.full[p.stage], p.parity);\n", ""),
    "parities never change": ("stage = 0, parity ^= 1", "stage = 0"),
    "all blocks have the first tokens": ("ring.x[p.stage] + block_of(b, group) * 64 * FEATURES", "ring.x[p.stage]"),
    "a group does not pass over the other's stages": ("{ p.skip(stages); continue; }", "continue;"),
    "a group does not wait for its turn": ("if (IN_TURN && !first) wait_for_turn(group);", ""),
    "both groups take the first tile": ("(turn ^= 1) != group", "(turn ^= 1) != 0"),
    "a group in turn gives back twice": ("2 / BLOCKS * CLUSTER", "2 * CLUSTER"),
    "scores of a tile before are kept": ("h + k > 0)", "true)"),
    "features are counted in elements": ("descriptor_of(ring.w[p.stage], 2 * k)", "descriptor_of(ring.w[p.stage], k)"),
    "a block copies the classes of the other": ("tile.type + rank * PART, full", "tile.type, full"),
    "classes beyond the last count": ("if (tile.type + CLASSES <= V) return;", "return;"),
    "tokens beyond the last are written": ("thread % 4 == 0 && token < N", "thread % 4 == 0"),
    "the target is among the others": ("found = z[i], z[i] = -infinity()", "found = z[i]"),
    "a target is that of the other row": ("if (i % 4 / 2 == r && column_of(i, thread) == column)", "if (column_of(i, thread) == column)"),
    "another thread looks for the target": ("column / 2 % 4 != thread % 4", "column / 2 % 4 != thread % 2"),
    "words of the second swap stay": ("swap_words(words, 1, thread), swap_words(words, 2, thread);", "swap_words(words, 1, thread);"),
    "an offset is another row's": ("offsets[token] : 0.0f", "offsets[0] : 0.0f"),
    "exponentials beyond the last class are written": ("if (type + 8 <= V) return store_words(to, words);", "return store_words(to, words);"),
    "a coefficient is another row's": ("row.coef = coefs[token]", "row.coef = coefs[0]"),
    "a row has the other one's unit": ("rows[i % 4 / 2].unit", "rows[0].unit"),
    "a unit is another row's": ("units[token] : 1.0f", "units[0] : 1.0f"),
    "a class has its neighbour's bias": ("z[i] += b.x, z[i + 1] += b.y", "z[i] += b.y, z[i + 1] += b.x"),
    "a capped sum has the slopes": ("s += e, z[i] = e * t.y;", "s += z[i] = e * t.y;"),
    "what does not count is capped": ("z[i] == -infinity() ? 0.0f : exp2_approx(fmaf(t.x", "exp2_approx(fmaf(t.x"),
    "a token that does not count has a capped sum": ("      s = 0.0f;\n", ""),
    "a maximum is of half its classes": ("i * (NARROW / 2), (i + 1) * (NARROW / 2)", "i * (NARROW / 2), i * (NARROW / 2) + NARROW / 4"),
    "maxima stand where a tile's first one does": ("tile.type / NARROW + i, token", "tile.type / NARROW, token"),
    "a moment is one thread's": ("of_row(moment, [](float a, float b) { return a + b; })", "moment"),
    "a moment is in units of 2": (" / LOG2E, tile", ", tile"),
    "classes that do not count make no number": ("return fmaxf(t, -200.0f);", "return t;"),
    "a coefficient does not fall": ("fmaf(-row.slope, above_zeros(t), row.coef)", "row.coef"),
    "a slope is in units of 2": ("row.slope = slopes[token] / log2_scale", "row.slope = slopes[token]"),
    "a coefficient forgets the mean": ("fmaf(slopes[token], means[token], row.coef)", "row.coef"),
    "a row's other threads are forgotten": ("return both(v, __shfl_xor_sync(~0u, v, 2));", "return v;"),
    "tiles of the last group are skipped": ("const int rows = min(GROUP, pairs - first);", "const int rows = GROUP;"),
    "one block of the cluster gives a stage back": ("if (thread < CLUSTER) arrive_at", "if (thread < 1) arrive_at"),
}


def entropies_fault(source: str, form: WarpGroupProduct) -> bool:
    "Whether a text of the kernels gets moments, maxima, or gradients of entropies, wrong"
    with pytest.MonkeyPatch.context() as patch:
        on_cpu(patch, source)
        data = scored(*SIZES["parts of tiles"], scale=0.4)
        return not (moments_error(*data, form) < 1 and maxima_error(*data, form) < 1 and entropy_gradients_error(*data, form) < 2.1)


def eight_fault(**how) -> bool:
    "Whether scores of eight bits are wrong"
    x, w, units, scores = in_eight(70, 300, 80)
    return not (statistics_error(x, w, scores, units=units, **how) < 1 and exponentials_error(x, w, scores, units=units, **how) < 2)


def fault(source: str) -> str | None:
    "The first case that a text of the kernels gets wrong"
    for (name, cluster, grid), seed in product((("many tiles", 2, 1), ("parts of tiles", 1, 1), ("a ring that goes round", 1, 2)), (0, 2)):
        how = dict(cluster=cluster, grid=grid, seed=seed, in_turn=seed // 2, source=source)
        try:
            if not statistics_error(*scored(*SIZES[name]), **how) < 1 or not exponentials_error(*scored(*SIZES[name], scale=0.4), **how) < 2:
                return name
            if name == "parts of tiles" and not gradients_error(*scored(*SIZES[name], scale=0.4), in_turn=seed // 2, source=source) < 2.1:
                return "gradients"
            if name == "parts of tiles" and any(not shaped_error(SIZES[name], **SHAPES[shape], in_turn=seed // 2, source=source) < 2 for shape in ("speedrun", "cap below all")):
                return "a bias and a cap"
            if name == "parts of tiles" and entropies_fault(source, WarpGroupProduct(in_turn=bool(seed))):
                return "entropies"
            if name == "parts of tiles" and eight_fault(in_turn=seed // 2, source=source):
                return "FP8"
        except AssertionError as outside:
            return f"{name}: {outside}"
    return None


@pytest.mark.thorough
def test_the_unchanged_source_passes():
    assert fault(SOURCE) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", few(BUGS, "a stage is given back before its products are over", "a group does not wait for its turn"))
def test_a_planted_bug_is_noticed(bug):
    old, new = BUGS[bug]
    assert SOURCE.count(old) == 1, f"{SOURCE.count(old)} places hold {old!r}"
    assert fault(SOURCE.replace(old, new)), f"no case notices that {bug}"


FORMS = few(list(product((1, 2), (("false", 0), ("true", 0), ("false", 1)), (0, 1), (0, 1), (0, 1))), (2, ("false", 0), 1, 0, 0), (2, ("false", 1), 1, 1, 1))


@pytest.mark.parametrize("cluster, numbers, in_turn, biased, capped", FORMS)
def test_it_compiles_for_hopper(cluster, numbers, in_turn, biased, capped):
    half, eight = numbers
    check_nvcc("90a", SOURCE, dict(STAGES=4, CLUSTER=cluster, GROUP=8, HALF=half, EIGHT=eight, IN_TURN=in_turn, BIASED=biased, CAPPED=capped))


def test_the_kernels_of_the_page_compile():
    "Page 9 writes them itself, above what the library's kernels share"
    names = "HEADERS", "SETUP", "PRODUCER", "CONSUMERS", "EPILOGUE", "KERNEL", "NAIVE", "SHARED"
    *parts, naive, shared = of_page("09_product", dict(cuda_source=cuda_source), *names).values()
    for source in "".join(parts), naive, shared:
        check_nvcc("90a", source, {})


@pytest.mark.thorough
@pytest.mark.parametrize("eight", [0, 1])
def test_its_registers_suffice(eight, tmp_path):
    "128 sums a thread, and products that the compiler does not put in a row because it cannot see that they are independent"
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc on this machine")
    (tmp_path / "product.cu").write_text(SOURCE, encoding="utf-8")
    fixed = [f"-D{name}" for name in ("STAGES=4", "CLUSTER=2", "GROUP=8", "HALF=false", f"EIGHT={eight}", "IN_TURN=0", "BIASED=0", "CAPPED=0")]
    made = subprocess.run(["nvcc", "--std=c++17", "-cubin", "-arch=sm_90a", "-Xptxas", "-v", *fixed, "-o", "out", "product.cu"], cwd=tmp_path, capture_output=True, text=True)
    said = made.stdout + made.stderr
    assert said.count("Used 168 registers") == said.count("0 bytes spill stores, 0 bytes spill loads") == 6 and "C75" not in said, said


# --- what recompute makes of them, by Triton ---


@where_kernels_run
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("scale", [1.0, math.log2(math.e)])
def test_statistics_of_tiles_become_those_of_rows(scale, entropy, device):
    scores, y = torch.randn(21, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64), targets_of(21, 70)
    scores[3] = -math.inf
    y[5] = 90
    others, known = without_targets(scores, torch.where(y < 70, y, -1)), (y >= 0) & (y < 70)
    parts = others.split(30, 1)
    stats = torch.stack([torch.stack([z.amax(1), (z - z.amax(1, keepdim=True).clamp(min=-1e300)).exp().sum(1)], 1) for z in parts]).float()
    moments = torch.stack([((z - m[:, None]).exp() * (z - m[:, None])).nan_to_num().sum(1) for z in parts for m in [z.amax(1).clamp(min=-1e300)]]).float()
    sums = torch.full((7, 21), math.nan, device=device)
    sums[2] = torch.where(known, scores.gather(1, y.clamp(0, 69)[:, None])[:, 0], math.nan)
    score_product.merge_statistics(sums, stats.to(device), moments.to(device) if entropy else None, y.to(device), 70, scale, 8, 2)
    top = scores.amax(1)
    assert torch.allclose(sums[0].cpu(), (top * scale).float()) and sums[[3, 5, 6] if entropy else slice(3, None)].isnan().all()
    t = scores - top.clamp(min=-1e300)[:, None]
    assert not entropy or torch.allclose(sums[4].cpu(), (t.exp() * t).nan_to_num().sum(1).float(), rtol=1e-5)
    assert torch.allclose(sums[1].cpu(), (scores - top.clamp(min=-1e300)[:, None]).exp().sum(1).float(), rtol=1e-5)


@where_kernels_run
@pytest.mark.parametrize("entropy", [False, True])
def test_targets_are_put_into_their_slab(entropy, device):
    made = torch.Generator().manual_seed(0)
    terms, target_z = torch.randn(6, 21, generator=made), torch.randn(21, generator=made)
    terms[0, 4] = math.inf
    column = torch.arange(21) * 7 % 40 - 10
    dz = torch.full((21, 24), 9.0, device=device)[:, :20]
    score_product.put_targets(dz, terms.to(device), target_z.to(device), column.to(device), 1.0, entropy, 8)
    wanted = torch.full((21, 20), 9.0)
    for i, j in enumerate(column.tolist()):
        below = target_z[i] - terms[0, i]
        coef = terms[1, i] + (terms[4, i] * (terms[5, i] - below) if entropy else 0)
        if 0 <= j < 20: wanted[i, j] = 0.0 if i == 4 else coef * below.exp() - terms[2, i]
    torch.testing.assert_close(dz.cpu(), wanted)


def test_a_launch_is_cut_to_the_multiprocessors_and_the_shared_memory():
    assert hopper.SHARED.shared <= 227 * 1024 >= IN_TURN.shared and WarpGroupProduct(5).shared > 227 * 1024
    assert hopper.SHARED.blocks(8192, 128256, 132) == 132 and hopper.SHARED.blocks(100, 300, 132) == 4
    assert WarpGroupProduct(persistent=False).blocks(8192, 128256, 132) == 64 * 501


def test_arguments_of_a_launch_have_eight_bytes_and_maps_are_aligned():
    room, address = hopper.room_for_map()
    assert address % 64 == 0 and ctypes.addressof(room) <= address <= ctypes.addressof(room) + 64
    assert [hopper.eight_bytes(value) for value in (None, -1, 7, 1.0)] == [0, 2**64 - 1, 7, 0x3f800000]


def test_a_reason_says_what_the_product_cannot_take():
    assert [name for name, d in GPUS.items() if not hopper.PRODUCT.lacks(d)] == ["H100", "H200"]
    assert IN_TURN.matrices_reason(torch.zeros(8, 8), torch.zeros(8, 8)) == "not of NVIDIA"
    reason = lambda dtype, h: IN_TURN.reason(dtype, h, GPUS["H200"])
    assert not reason(torch.bfloat16, 16) and reason(torch.float32, 16) and reason(torch.float16, 12)
