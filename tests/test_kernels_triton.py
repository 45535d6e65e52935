"""The Triton kernels by their launchers: interpreted on a CPU, as they are on a GPU; and bugs planted in them."""
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st

import fusedloss.clusters as clusters
import fusedloss.kernels as kernels
from fusedloss.core import pairs
from fusedloss.core.options import ALL_STATISTICS, NO_STATISTICS, statistics_of
from fusedloss.kernels import Blocks
from workbook.measure import relative_error
from grids import FULL, few, grid, thorough_but
from helpers import INTERPRETED, TOLERANCE, everywhere, first_fault_of, interpreted, need_kernels, planted, unchanged, upstream
from test_kernels import OPTIONS, cross_entropy, differentiate, exact, sample, truth, weights, wrong

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
compiled_only = pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="no GPU that compiles kernels")
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture
def place(device, nan_in_new_memory):
    "A device on which launchers run"
    need_kernels(device)
    return device


class Guarded:
    "A tensor [O,I,V] inside a larger one that holds NaN: reading outside spoils the result, writing outside is seen"
    def __init__(self, values, inside=False):
        o, i, v = values.shape
        margin = 66 + 2100 // v  # as many rows as a program may take beyond the last
        grown = (o + 2 * margin, v + 9, i) if inside else (o + 2 * margin, i, v + 9)
        self.buffer = torch.full(grown, torch.nan, dtype=values.dtype, device=values.device)
        self.window = lambda t: (t[margin:-margin, 4:-5].transpose(1, 2) if inside else t[margin:-margin, :, 4:-5])
        self.view = self.window(self.buffer)
        self.view.copy_(values)

    @property
    def spilt(self) -> bool:
        around = torch.ones_like(self.buffer, dtype=torch.bool)
        self.window(around).fill_(False)
        return not self.buffer[around].isnan().all()


@dataclass(frozen=True)
class Case:
    "One set of rows [O,I,V] and how they are cut: None for the launchers' own choice."
    shape: tuple[int, int, int] = (5, 1, 21)
    options: dict = field(default_factory=dict)  # of `OPTIONS`
    parts: int | None = None
    scan: Blocks | None = None
    turn: Blocks | None = None
    inside: bool = False  # classes are not the last dimension in memory
    ignore_index: int = -100
    bad: int | None = -1  # the label of the fourth row
    offset: float = 0.0
    ties: bool = False
    masked: tuple[int, int] = (0, 0)  # these classes are -inf in every row but the first
    late: bool = False  # the turned gradient is not divided
    denominator: float | None = 3.7  # of losses and their gradients

    def rows(self, device, dtype=f32):
        "Logits [O,I,V], labels [M], class weights, token weights, and options for `exact`"
        z, y = sample((self.shape[0] * self.shape[1], self.shape[2]), "cpu", ignore_index=self.ignore_index)
        z = z.round() / 2 if self.ties else z + self.offset
        z[1:, slice(*self.masked)] = -torch.inf
        if self.masked[1]:
            y = torch.where(y == self.ignore_index, y, self.masked[1] + y % (self.shape[2] - self.masked[1]))
        if self.bad is not None and len(y) > 3:
            y[3] = self.bad
        options = dict(self.options, ignore_index=self.ignore_index)
        w = weights(self.shape[2], device) if options.pop("weight", False) else None
        t = weights(len(y), device, 4) if options.pop("token_weight", False) else None
        return z.to(device, dtype).view(self.shape), y.to(device), w, t, options


def off(name, got, expected, tolerance) -> list[str]:
    "What is wrong with `got`, element by element; NaN and infinities must be where they are expected"
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    if got.shape != expected.shape:
        return [f"{name} has shape {list(got.shape)}"]
    finite, odd = expected.isfinite(), [t[~expected.isfinite()].nan_to_num(7.0) for t in (got, expected)]
    if not torch.equal(*odd) or not got[finite].isfinite().all():
        return [f"{name} is not finite where it should be, or should not be and is"]
    if not finite.any():
        return []
    error, size = (got - expected)[finite].abs().max().item(), expected[finite].abs().max().item()
    return [] if error <= tolerance * max(1.0, size) else [f"{name} is off by {error:.1e} of {size:.1e}"]


def row_options(k, options):
    "`LossOptions` of the options for `exact`"
    return k.LossOptions(**{name: value for name, value in options.items() if value is not None})


def scalar(value, device):
    "A tensor of the number, None of None"
    return None if value is None else torch.tensor(value, device=device)


def launcher_faults(k, case, device, dtype=f32) -> list[str]:
    "What the launchers of module `k` get wrong on `case`"
    z, y, w, t, options = case.rows(device, dtype)
    o, m, v, tol = row_options(k, options), len(y), case.shape[-1], TOLERANCE[dtype]
    leaf = z.detach().cpu().double().view(m, v).requires_grad_()
    e = exact(leaf, y, w, token_weight=None if t is None else t.cpu(), **options)
    upstreams = [upstream(e.losses).float(), torch.linspace(-1, 2, m), torch.linspace(2, -1, m)]
    d, share = scalar(case.denominator, device), 1 / (case.denominator or 1)
    parts = [torch.where(e.valid, x, 0.0) for x in (e.losses * share, e.lse, e.entropy)]
    def gradient(*gs):
        total = sum((g * x).sum() for g, x in zip(gs, parts) if g is not None)
        return torch.autograd.grad(total, leaf, retain_graph=True)[0]
    wrong, guarded = [], Guarded(z, case.inside)
    for stats in (False, True):
        losses, lse, entropy, rows = k.launch_scan(guarded.view, y, w, t, o, statistics_of(stats), case.parts, case.scan, d)
        wrong += off("losses", losses, e.losses * share, 1e-5) + off("lse", lse, e.lse, 1e-5)
        if stats:
            wrong += off("entropy", entropy, e.entropy, 1e-5) + off("rank", rows[2], e.target_rank, 0)
            wrong += off("maximum", rows[3], e.logit_max, 1e-6) + off("norm", rows[4], e.logit_norm, 1e-5)
        for chosen in [(1, 2), (0, 1, 2)] if stats else [(0,)]:
            gs = [upstreams[i].to(device) if i in chosen else None for i in range(3)]
            dz = Guarded(torch.full_like(z, 7.0), case.inside)
            k.launch_bwd(*gs, guarded.view, dz.view, y, w, t, rows, entropy, o, d)
            expected = gradient(*(upstreams[i] if i in chosen else None for i in range(3)))
            wrong += off(f"gradient of {chosen}", dz.view.reshape(m, v), expected, tol)
            wrong += ["a gradient was written outside"] * dz.spilt
    wrong += off("the logits", guarded.view, z, 0) if not case.masked[1] else []
    wrong += ["logits were written outside"] * guarded.spilt

    turned = Guarded(z, case.inside)
    losses = k.launch_turnaround(turned.view, y, w, t, d, o, case.turn, case.late)
    wrong += off("losses turned around", losses, e.losses * share, 1e-5)
    expected = gradient(torch.full((m,), 1 / share if case.late else 1.0))
    wrong += off("gradient turned around", turned.view.reshape(m, v), expected, tol)
    return wrong + ["the turnaround wrote outside"] * turned.spilt


def scale_faults(k, device, shape=(7, 2, 70), inside=True, dtype=f32, programs=2048) -> list[str]:
    "What `launch_scale` of module `k` gets wrong: with copies, expanded factors, infinite factors of zeros"
    z, _ = sample((shape[0] * shape[1], shape[2]), device, dtype)
    m, wrong = len(z), []
    z[2] = 0
    uneven = torch.linspace(-1, 2, m, device=device)
    uneven[2] = torch.inf
    for factor in (uneven, torch.stack([uneven] * 3, 1)[:, 1], torch.ones((), device=device).expand(m)):
        for denominator in (None, 3.7):
            for copy in (False, True):
                dz = Guarded(z.view(shape), inside)
                out = Guarded(torch.full(shape, torch.nan, device=device, dtype=dtype)) if copy else dz
                k.launch_scale(dz.view, out.view, factor, scalar(denominator, device), programs)
                expected = z.double().cpu() * factor.double().cpu().nan_to_num(posinf=0)[:, None] / (denominator or 1)
                wrong += off("scaled rows", out.view.reshape(m, -1), expected, TOLERANCE[dtype])
                wrong += ["scaling wrote outside"] * (out.spilt or dz.spilt)
                wrong += off("what was copied", dz.view.reshape(m, -1), z.cpu(), 0) if copy else []
    return wrong


small = dict(scan=Blocks(1, 2, 4, 1), turn=Blocks(1, 2, 4, 1))
CASES = {
    "one score": Case((1, 1, 1)),
    "one class": Case((6, 1, 1), denominator=None),
    "two classes": Case((5, 1, 2), late=True),
    "3 x 7": Case((3, 1, 7)),
    "as many rows as a program takes": Case((32, 1, 64), denominator=None),
    "47 x 123": Case((47, 1, 123), OPTIONS["everything"]),
    "64 x 257": Case((64, 1, 257)),
    "classes inside": Case((3, 4, 70), OPTIONS["everything"], inside=True),
    "classes inside, in blocks": Case((2, 2, 19), OPTIONS["everything"], **small, inside=True),
    "4 x 5000": Case((4, 1, 5000), OPTIONS["everything"], 3, Blocks(1, 4, 256, 4), Blocks(1, 4, 256, 4)),
    "turned in two launches": Case((4, 1, 1100), OPTIONS["everything"], bad=1100, late=True),
    "blocks that divide": Case((5, 1, 24), **small, denominator=None),
    "a class more": Case((5, 1, 25), **small, late=True),
    "a class less": Case((5, 1, 23), **small),
    "two parts": Case((3, 1, 37), OPTIONS["everything"], 2, **small),
    "three parts": Case((4, 1, 24), OPTIONS["everything"], 3, **small),
    "seven parts": Case((3, 1, 123), {}, 7, Blocks(1, 4, 4, 1)),
    "two rows a program": Case((7, 1, 21), OPTIONS["smooth weights"], 2, Blocks(2, 2, 4, 1), Blocks(2, 4, 8, 1)),
    "ties": Case((5, 1, 24), {}, 3, **small, ties=True),
    "ties, one block": Case((9, 1, 50), ties=True),
    "deep": Case((5, 1, 21), **small, offset=-30.0),
    "deep, one block": Case((7, 1, 50), OPTIONS["smooth weights"], offset=-30.0),
    "deep, parts": Case((4, 1, 21), {}, 3, **small, offset=-30.0),
    "the first block masked": Case((5, 1, 21), **small, masked=(0, 10)),
    "a whole part masked": Case((4, 1, 24), {}, 3, **small, masked=(8, 16)),
    "ignore_index is a class": Case((9, 1, 12), OPTIONS["label_smoothing"], ignore_index=5),
    "ignore_index is the last class": Case((9, 1, 50), ignore_index=49, bad=50),
    "ignore_index is no class": Case((9, 1, 50), ignore_index=50, bad=2**40),
    "a label just outside": Case((5, 1, 21), **small, bad=21),
    "a label beyond 32 bits": Case((5, 1, 21), **small, bad=2**32 + 1),
    **{name: Case(options=options, **small) for name, options in OPTIONS.items()},
}


@pytest.mark.parametrize("name", thorough_but(
    few(CASES, "one class", "classes inside, in blocks", "turned in two launches", "three parts", "ties", "a whole part masked", "a label just outside",
        "scale and cap"), "classes inside, in blocks", "turned in two launches", "a whole part masked", "a label just outside", "scale and cap"))
def test_launchers_are_the_definition(name, place):
    assert launcher_faults(clusters, CASES[name], place) == []


SCALED = [*product([(3, 1, 1), (7, 2, 70), (3, 1, 5000)], (False, True), (2, 2048))]


@pytest.mark.parametrize("shape, inside, programs", thorough_but(SCALED, *SCALED[::4]), ids=str)
def test_rows_are_scaled(shape, inside, programs, place):
    assert scale_faults(clusters, place, shape, inside, programs=programs) == []


@compiled_only
@pytest.mark.parametrize("name", few(["3 x 7", "47 x 123", "classes inside", "4 x 5000", "turned in two launches", "ties", "everything"],
                                     "3 x 7", "4 x 5000", "everything"))
@pytest.mark.parametrize("dtype", [f16, bf16])
def test_launchers_in_half_precision(name, dtype):
    "Not on a CPU: bf16 is wrong in Triton's interpreter"
    assert launcher_faults(clusters, CASES[name], "cuda", dtype) == []
    assert scale_faults(clusters, "cuda", dtype=dtype) == []


@compiled_only
@pytest.mark.parametrize("parts, classes", few(grid([None, 1], [1025, 4097, 8192, 8193, 65536, 65537, 128256]),
                                               (None, 1025), (1, 8192), (None, 8193), (1, 65537), (None, 128256)))
def test_blocks_for_long_rows(classes, parts):
    for dtype in (f32, bf16):
        case = Case((4, 1, classes), OPTIONS["everything"], parts, turn=clusters.turnaround_blocks(classes))
        assert launcher_faults(clusters, case, "cuda", dtype) == []


@st.composite
def cuts(draw):
    "Any rows in any blocks and parts"
    v, r, c = draw(st.integers(1, 60)), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([4, 8, 16]))
    index = draw(st.sampled_from([-100, 0, v - 1, v]))
    options = OPTIONS[draw(st.sampled_from(list(OPTIONS)))]
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 2)), v)
    return Case(shape, options, draw(st.integers(1, 5)), Blocks(draw(st.sampled_from([1, 2])), r, c, 1),
                Blocks(1, r, c, 1), draw(st.booleans()), index, draw(st.sampled_from([None, -1, v + 1])),
                0.0 if "softcap" in options else draw(st.sampled_from([0.0, -30.0])))  # at the cap all are one


@interpreted
@settings(max_examples=10 if FULL else 4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(cuts())
def test_any_cut_is_the_definition(case):
    assert launcher_faults(clusters, case, "cpu") == []


@pytest.mark.parametrize("parts", thorough_but(few([1, 2, 3, 7, 100], 3, 100), 3))
def test_result_does_not_depend_on_the_cut(parts, place):
    z, y, w, t, options = Case((3, 1, 70), OPTIONS["everything"]).rows(place)
    o = row_options(clusters, options)
    whole = kernels.launch_scan(z, y, w, t, o, ALL_STATISTICS)
    for blocks in (Blocks(1, 1, 16, 1), Blocks(2, 4, 4, 1), Blocks(4, 2, 32, 2)):
        for a, b in zip(kernels.launch_scan(z, y, w, t, o, ALL_STATISTICS, parts, blocks)[:3], whole):
            assert torch.allclose(a, b, rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("blocks", [None, pytest.param(Blocks(1, 2, 8, 1), marks=pytest.mark.thorough)])
def test_a_row_does_not_depend_on_the_others(blocks, place):
    z, y, w, t, options = Case((9, 1, 35), OPTIONS["everything"]).rows(place)
    o, other = row_options(clusters, options), sample((9, 35), place, seed=1)[0].view(9, 1, 35)
    other[4] = z[4]
    y2 = torch.where(torch.arange(9, device=place) == 4, y, -100)
    scans = [kernels.launch_scan(*rows, w, t, o, ALL_STATISTICS, None, blocks) for rows in ((z, y), (other, y2))]
    for a, b in zip(*scans):
        assert torch.equal(a[..., 4], b[..., 4])
    clusters.launch_turnaround(z, y, w, t, None, o, blocks)
    clusters.launch_turnaround(other, y2, w, t, None, o, blocks)
    assert torch.equal(z[4], other[4])


def garbage_faults(k, device, blocks=Blocks(1, 2, 4, 1)) -> list[str]:
    "Where NaN in ignored rows shows"
    z, y, *_ = Case((6, 1, 21), bad=None).rows(device)
    z[y == -100] = torch.nan
    o = k.LossOptions()
    losses, lse, entropy, rows = k.launch_scan(z, y, None, None, o, ALL_STATISTICS, None, blocks)
    dz = torch.full_like(z, 7.0)
    k.launch_bwd(losses, lse, entropy, z, dz, y, None, None, rows, entropy, o)
    turned = k.launch_turnaround(z, y, None, None, None, o, blocks)
    seen = dict(losses=losses, lse=lse, entropy=entropy, turned=turned, z=z, dz=dz)
    return [name for name, t in seen.items() if not t.isfinite().all() or t[y == -100].any()]


@pytest.mark.parametrize("blocks", [None, Blocks(1, 2, 4, 1)])
def test_garbage_in_ignored_rows(blocks, place):
    assert garbage_faults(clusters, place, blocks) == []


@pytest.mark.parametrize("mask", [-torch.inf, torch.finfo(f32).min])
@pytest.mark.parametrize("blocks", [None, Blocks(1, 2, 8, 1)])
def test_masked_classes(mask, blocks, place):
    z, y, *_ = Case((5, 1, 70), masked=(0, 50), bad=None).rows(place)
    z[1:, :, :50] = mask
    e, o = exact(z.view(5, 70), y), clusters.LossOptions()
    losses, lse, entropy, rows = kernels.launch_scan(z, y, None, None, o, ALL_STATISTICS, None, blocks)
    dz = torch.full_like(z, 7.0)
    kernels.launch_bwd(torch.ones_like(lse), None, torch.ones_like(lse), z, dz, y, None, None, rows, entropy, o)
    for name, got in dict(losses=losses, lse=lse, entropy=entropy).items():
        assert off(name, got, getattr(e, name), 1e-5) == []
    assert dz.isfinite().all() and not dz[1:, :, :50].any()
    assert off("turned", clusters.launch_turnaround(z, y, None, None, None, o, blocks), e.losses, 1e-5) == []


@pytest.mark.parametrize("bad", few([-torch.inf, torch.nan, torch.inf], -torch.inf, torch.inf))
@pytest.mark.parametrize("blocks", [None, Blocks(1, 2, 8, 1)])
def test_a_row_without_a_softmax_is_nan_and_alone(bad, blocks, place):
    z, y, *_ = Case((5, 1, 70), bad=None).rows(place)
    z[2] = bad
    losses, lse, entropy, rows = kernels.launch_scan(z, y, None, None, clusters.LossOptions(), ALL_STATISTICS, None, blocks)
    turned = clusters.launch_turnaround(z, y, None, None, None, clusters.LossOptions(), blocks)
    for t in (losses, entropy, turned, z.view(5, 70)[:, int(y[2])]):
        assert t.isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("height", thorough_but([300.0, 2.0**24, -(2.0**24), 1e9, 1e20, -3e38], 300.0, -3e38))
@pytest.mark.parametrize("blocks", [None, Blocks(1, 2, 8, 1)])
def test_logits_far_from_zero(height, blocks, place):
    z, y = torch.full((2, 1, 21), height, device=place), torch.tensor([0, 20], device=place)
    z[:, 0, 20] -= abs(height) * 2.0**-23  # the next number
    e = exact(z.view(2, 21), y)
    losses = kernels.launch_scan(z, y, None, None, clusters.LossOptions(), NO_STATISTICS, None, blocks)[0]
    turned = clusters.launch_turnaround(z, y, None, None, None, clusters.LossOptions(), blocks)
    assert off("losses", losses, e.losses, 3e-5) + off("turned", turned, e.losses, 3e-5) == []


@pytest.mark.parametrize("cap", [0.5, 30.0, 1e3, 1e6])
def test_soft_caps_of_any_height(cap, place):
    z, y, *_ = Case((5, 1, 300), bad=None).rows(place)
    z[0] *= 100
    e = exact(z.view(5, 300), y, softcap=cap)
    losses = kernels.launch_scan(z, y, None, None, clusters.LossOptions(softcap=cap))[0]
    assert off("losses", losses, e.losses, 2e-6) == []


def test_gradient_over_the_logits_by_two_launches(place):
    "`launch_bwd` may write where it reads"
    z, y, w, t, options = Case((5, 2, 70), OPTIONS["everything"], inside=True).rows(place)
    o, copy = row_options(clusters, options), z.clone()
    losses, _, entropy, rows = kernels.launch_scan(z, y, w, t, o)
    kernels.launch_bwd(losses, None, None, z, z, y, w, t, rows, entropy, o)
    dz = torch.empty_like(copy)
    kernels.launch_bwd(losses, None, None, copy, dz, y, w, t, rows, entropy, o)
    assert torch.equal(z, dz)


def test_expanded_and_strided_upstream_gradients(place):
    z, y, w, t, options = Case((7, 1, 70)).rows(place)
    o = row_options(clusters, options)
    *_, entropy, rows = kernels.launch_scan(z, y, w, t, o, ALL_STATISTICS)
    got = []
    g = torch.full((7, 3), 1.5, device=place)
    for g in (g[0, 0].expand(7), g[:, 1].contiguous(), g[:, 1]):
        got.append(torch.empty_like(z))
        kernels.launch_bwd(g, g, g, z, got[-1], y, w, t, rows, entropy, o)
    assert got[0].isfinite().all() and torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


@interpreted
def test_numbers_of_half_a_billion_rows_lie_beyond_32_bits(tmp_path):
    "Of such a table's rows only the first are written, in files that take no room"
    V, flags = 4, dict(TOTAL=False, ENTROPY=True, RANKS=True, LOG2_SCALE=kernels.log2_scale(torch.empty(0)))
    z, y, o = torch.randn(8, 1, V), torch.arange(8) % V, clusters.LossOptions()
    b = kernels.scan_blocks(V)
    found = []
    for M in (8, 2**29 + 8):
        sums, rows = (torch.from_file(str(tmp_path / f"{n} {M}"), shared=True, size=n * M, dtype=torch.float32).view(n, M) for n in (7, 5))
        out = torch.empty(3, 8)
        kernels.scan_kernel[(1,)](z, y, None, None, sums, M, V, b.R * b.C, 1, 1, *z.stride(), o, SCORE=kernels.score_fn(o), **flags, SKIP=False,
                                  BN=8, R=b.R, C=b.C)
        kernels.finish_kernel[(1,)](sums, y, None, None, None, None, *out, rows, M, V, 1, o, **flags, MEAN=False, BN=8)
        found.append(torch.cat([out, sums[[0, 1, 2, 4, 5, 6], :8], rows[:, :8]]))
    assert torch.equal(*found)


def test_long_rows_turn_in_one_launch_where_they_may(place):
    aligned, skewed = (torch.empty(140, 1, 1104, device=place)[..., i:1100 + i] for i in (0, 1))
    turns = lambda z: clusters.turns_in_one_launch(z, 132)
    assert turns(aligned)
    inside = torch.empty(140, 1100, 1, device=place).transpose(1, 2)
    assert not any(map(turns, (skewed, aligned[:5], inside)))
    assert all(map(turns, (skewed[..., :1024], aligned[:1, :, :7])))


@pytest.fixture
def on_kernels(monkeypatch):
    "`cross_entropy` takes the kernels for CPU tensors too"
    everywhere(monkeypatch, kernels, "has_kernel", lambda z: z.dtype != f64)


@interpreted
@pytest.mark.parametrize("inplace, shape, options", grid([False, True], [(7,), (5, 70), (3, 9, 4), (0, 7), (2, 1100)], ["plain", "everything"]))
def test_the_front_door_on_kernels(shape, inplace, options, on_kernels):
    for dtype, reduction in few(((f32, "none"), (f32, "mean"), (f16, "mean")), (f32, "none"), (f16, "mean")):
        z, y = sample(shape, "cpu", dtype)
        more = dict(OPTIONS[options])
        w = weights(z.shape[min(1, z.dim() - 1)], "cpu") if more.pop("weight", False) else None
        if more.pop("token_weight", False):
            more["token_weight"] = weights(y.shape, "cpu", 4)
        assert wrong(z, y, w, reduction=reduction, inplace=inplace, **more) == []


@interpreted
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [f32, f16])
def test_backward_twice_on_kernels(inplace, dtype, on_kernels):
    z, y = sample((5, 70), "cpu", dtype)
    z.requires_grad_()
    losses = cross_entropy(z * 1, y, reduction="none", inplace=inplace)
    for g in (upstream(losses), torch.zeros(5), torch.ones(5), -upstream(losses)):
        dz, = torch.autograd.grad(losses, z, g, retain_graph=True)
        assert off("gradient", dz, truth(z, y, reduction="none", g=g)[1], TOLERANCE[dtype]) == []


@interpreted
def test_statistics_on_kernels(on_kernels):
    z, y = sample((5, 70), "cpu")
    def penalised(z, y):
        loss, stats = cross_entropy(z, y, return_stats=True)
        return loss + stats.lse.square().sum() + stats.entropy.sum()
    def expected(z, y):
        e = exact(z, y)
        return e.losses.sum() / e.total + e.lse.square().sum() + e.entropy.sum()
    for a, b in zip(differentiate(penalised, z, y), differentiate(expected, z.double(), y)):
        assert off("gradient", a, b, 1e-5) == []


# Bugs planted in the source, one at a time: the checks above must notice each


def front_door_faults(k) -> list[str]:
    "What `cross_entropy` of module `k` gets wrong on the CPU"
    faults = []
    for dtype in (f64, f16):
        for reduction in ("none", "mean", "sum"):
            for options in ("plain", "everything", "smooth weights"):
                z, y = sample((9, 12), "cpu", dtype)
                more = dict(OPTIONS[options])
                w = weights(12, "cpu") if more.pop("weight", False) else None
                t = dict(token_weight=weights(9, "cpu", 4)) if more.pop("token_weight", False) else {}
                for inplace in (False, True):
                    faults += wrong(z, y, w, call=k.cross_entropy, inplace=inplace, reduction=reduction, **t, **more)
    z, y = sample((9, 7, 3), "cpu", f64, ignore_index=3)
    for more in (dict(reduction="none"), dict(inplace=True)):
        faults += wrong(z, y, call=k.cross_entropy, ignore_index=3, **more)
    z, y = sample((9, 12), "cpu", f64)
    z[3, :6], z[2], y[2:5] = -torch.inf, torch.tensor([3.0, 1.0] * 6), torch.tensor([0, 7, 2])
    e, (_, stats) = exact(z, y), k.cross_entropy(z, y, return_stats=True)
    for name in ("lse", "entropy", "target_rank", "logit_max", "logit_norm", "accuracy", "n_valid"):
        faults += off(name, getattr(stats, name), getattr(e, name), 1e-9)
    loss, dz = differentiate(k.cross_entropy, z, torch.full_like(y, -100))
    faults += ["a loss of nothing is not 0"] * (bool(loss) or bool(dz.any()))
    faults += ["a weight of 0 is divided by"] * (k.cross_entropy(z[4:], y[4:], torch.zeros(12)).item() != 0)
    z[0], z[1] = torch.nan, torch.nan
    faults += ["an ignored row has a gradient"] * bool(differentiate(k.cross_entropy, z, y)[1][1].any())
    faults += ["NaN counts as right"] * (k.cross_entropy(z[:1], y[:1], return_stats=True)[1].accuracy.item() != 0)
    return faults


def in_place_faults(k) -> list[str]:
    "What module `k` gets wrong in place, on the CPU"
    z, y = sample((5, 7), "cpu")
    leaf = z.requires_grad_()
    losses = k.cross_entropy(leaf * 1, y, reduction="none", inplace=True)
    faults = []
    for g, retain in ((torch.full((5,), 2.0), True), (torch.ones(5), True), (torch.full((5,), -3.0), False)):
        dz, = torch.autograd.grad(losses, leaf, g, retain_graph=retain)
        faults += off("gradient in place", dz, truth(z, y, reduction="none", g=g)[1], 1e-6)
    logits = leaf * 1
    k.cross_entropy(logits, y, inplace=True).backward()
    faults += ["the logits are not their gradient"] * (not torch.equal(logits, leaf.grad))
    many, labels = sample((70_000, 3), "cpu", f16)
    got = differentiate(lambda *args: 65536 * k.cross_entropy(*args, inplace=True), many, labels, g=torch.ones(()))[1]
    expected = truth(many, labels, g=torch.tensor(65536.0))[1]
    faults += ["fp16 is divided too early"] * (relative_error(got, expected) > 1e-3)
    for refused in (torch.tanh, lambda z: z, lambda z: (z[:1] * 1).expand(5, 7)):
        try:
            k.cross_entropy(refused(leaf), y, inplace=True).backward()
            faults.append("accepted what it would spoil")
        except (RuntimeError, ValueError):
            pass
    return faults


def kernel_in_place_faults(k) -> list[str]:
    "The same with kernels, whose writing PyTorch does not see"
    with pytest.MonkeyPatch.context() as patch:
        everywhere(patch, k, "has_kernel", lambda z: z.dtype == f32)
        z, y = sample((4, 7), "cpu")
        nothing = k.cross_entropy(z, torch.full_like(y, -100)) + k.cross_entropy(z, y, weight=torch.zeros(z.shape[1]))
        return in_place_faults(k) + ["a loss of nothing is not 0"] * (nothing.item() != 0)


CHECKS = {name: partial(launcher_faults, case=case, device="cpu") for name, case in CASES.items()} | {
    "scaling": partial(scale_faults, device="cpu", shape=(3, 1, 20), inside=False),
    "scaling in turn": partial(scale_faults, device="cpu", shape=(70, 1, 70), programs=2),
    "garbage": partial(garbage_faults, device="cpu"),
    "front door": front_door_faults, "in place": in_place_faults, "in place on kernels": kernel_in_place_faults}
MUTANTS = {  # what is wrong: (which check must notice, text of the source, what stands in its place, ...)
    "padded lanes are classes": (
        "3 x 7", 'z = tl.where(inside, z, -float("inf"))\n        old_max', "z = z + 0.0\n        old_max"),
    "-inf minus -inf": ("3 x 7", 'return tl.where(row_max == -float("inf"), 0.0, row_max)', "return row_max"),
    "sums are not rescaled": ("deep", "    s = rescaled(s, row_max, new_max, LOG2_SCALE)\n    return new_max, s + tl.sum(exponentials(", "    return new_max, s + tl.sum(exponentials("),
    "lanes are not rescaled when they meet": (
        "3 x 7", "tl.sum(rescaled(s, row_max, new_max[:, None], LOG2_SCALE), 1)", "tl.sum(s, 1)"),
    "rows of the second index are taken for the first": (
        "classes inside", "(rows // inner).to(tl.int64), (rows % inner)", "rows.to(tl.int64), (rows % inner)"),
    "rows of a program begin at the wrong row": (
        "47 x 123", "tl.program_id(0) // parts * BN", "tl.program_id(0) // parts"),
    "parts forget where they begin": (
        "two parts", "start = (start + begin.to(tl.int64) * stride_v)[:, None, None]", "start = start[:, None, None]"),
    "parts overlap": ("two parts", "size = tl.minimum(part_size, V - begin)", "size = V - begin"),
    "parts know the label of the row, not their own": (
        "three parts", "y, stored, lanes = (y - begin)[:, None, None]", "y, stored, lanes = y[:, None, None]"),
    "parts weigh the first classes": (
        "two parts", "class_weight(weight_ptr, begin + first + lanes, inside)",
        "class_weight(weight_ptr, first + lanes, inside)"),
    "valid rows are skipped": (
        "two rows a program", "bound = size * tl.max(valid.to(tl.int32), 0) if SKIP",
        "bound = size * tl.min(valid.to(tl.int32), 0) if SKIP"),
    "only the first part counts": ("two parts", "for part in range(parts)", "for part in range(1)"),
    "parts are not rescaled when they meet": (
        "two parts", "s = rescaled(s, row_max, new_max, LOG2_SCALE) + rescaled(part_s, part_max, new_max, LOG2_SCALE)", "s = s + part_s"),
    "moments of parts are not rescaled": (
        "two parts", "rescaled_moment(moment, s, row_max, new_max, LOG2_SCALE) + rescaled_moment(part_moment, part_s, part_max, new_max, LOG2_SCALE)",
        "moment + part_moment"),
    "an ignored class is a label": (
        "ignore_index is a class", "ignored, inside & (y != ignore_index)", "ignored, inside"),
    "the label V is a class": ("a label just outside", "(y >= 0) & (y < V)", "(y >= 0) & (y <= V)"),
    "a label outside costs nothing": ("two classes", 'tl.where(ignored, 0.0, float("nan"))', "0.0"),
    "smoothing without class weights": (
        "deep, one block", "return target_coef + smoothing_coef * w_all +", "return target_coef + smoothing_coef * V +"),
    "smoothing keeps the whole target": (
        "ignore_index is a class", "(1 - o.label_smoothing) * (w_y * w_t / divisor)", "w_y * w_t / divisor"),
    "smoothing forgets the token's weight": ("classes inside", "o.label_smoothing / V * each", "o.label_smoothing / V / divisor + 0 * each"),
    "half the z-loss gradient": ("classes inside", "smoothing_coef * w_all + 2 * z_coef * lse", "smoothing_coef * w_all + z_coef * lse"),
    "z-loss is linear": ("classes inside", "z_coef * lse * lse", "z_coef * lse"),
    "scores are smoothed where there are none": (
        "ignore_index is a class", "tl.where(inside, (z - near) * w, 0.0), 1)\n        if ENTROPY", "(z - near) * w, 1)\n        if ENTROPY"),
    "the cap has the slope of a line": (
        "classes inside", "return o.softcap * tanh, o.logit_scale * 4 * e * r * r",
        "return o.softcap * tanh, o.logit_scale"),
    "the scale has no slope": ("logit_scale", "return raw * o.logit_scale, o.logit_scale", "return raw * o.logit_scale, 1.0"),
    "the series of tanh has a wrong sign": ("classes inside", "series = x * (1 - x2", "series = x * (1 + x2"),
    "ties go to the higher index": ("ties, one block", "((cols < y) & (z == z_y))", "((cols > y) & (z == z_y))"),
    "ties lose": ("ties, one block", "((z > z_y) | ((cols < y) & (z == z_y)))", "(z > z_y)"),
    "the norm counts the padding": ("3 x 7", "tl.where(inside, z * z, 0.0)", "z * z"),
    "the moment is not shifted": ("3 x 7", "(moment + rise * s)", "moment"),
    "0 · -inf is in the entropy": (
        "3 x 7", "tl.maximum(below, -1e4)", "below"),
    "entropy of ignored rows": ("3 x 7", "tl.where(valid, log_s - moment / s, 0.0)", "log_s - moment / s"),
    "the loss forgets the sum": ("3 x 7", "(z_y * LOG2_SCALE - row_max) / LOG2_SCALE - log_s, smoothed", "(z_y * LOG2_SCALE - row_max) / LOG2_SCALE, smoothed"),
    "the upstream gradient misses the pull": ("3 x 7", "softmax_coef *= g", "softmax_coef *= 1.0"),
    "the upstream gradient misses the target": ("3 x 7", "softmax_coef, target_coef * g, smoothing_coef * g", "softmax_coef, target_coef, smoothing_coef * g"),
    "the gradient of lse is lost": (
        "3 x 7", "softmax_coef += tl.load(g_lse_ptr + rows.to(tl.int64) * g_lse_stride, mask=valid, other=0.0)", "softmax_coef += 0.0"),
    "the entropy's gradient has no mean": ("3 x 7", "(below / LOG2_SCALE - mean[:, None])", "below / LOG2_SCALE"),
    "0 · -inf is in the entropy's gradient": (
        "the first block masked", "tl.where(p > 0, g_h[:, None] * p * (below / LOG2_SCALE - mean[:, None]), 0.0)",
        "g_h[:, None] * p * (below / LOG2_SCALE - mean[:, None])"),
    "ignored rows leave their gradient as it was": (
        "3 x 7", "mask=(rows < M)[:, None] & (cols < V))", "mask=valid[:, None] & (cols < V))"),
    "gradients of rows that are not": ("3 x 7", "mask=(rows < M)[:, None] & (cols < V))", "mask=cols < V)"),
    "gradients of classes that are not": (
        "3 x 7", "mask=(rows < M)[:, None] & (cols < V))", "mask=(rows < M)[:, None] & (cols >= 0))"),
    "the target's column is not moved": ("deep", "lanes == y - first", "lanes == y"),
    "the target is not divided": ("3 x 7", "(w_y * w_t / divisor)", "(w_y * w_t)"),
    "the softmax is no share": ("3 x 7", "(softmax_coef / s)[:, None, None], target_coef", "softmax_coef[:, None, None], target_coef"),
    "smoothing is not divided": ("ignore_index is a class", "each = w_t / divisor", "each = w_t"),
    "the loss is not divided": ("3 x 7", "w_all, o, V, divisor_of(denominator_ptr))\n    smoothed", "w_all, o, V, 1.0)\n    smoothed"),
    "the gradient is not divided": ("3 x 7", "w_all, o, V, divisor_of(denominator_ptr))\n    g =", "w_all, o, V, 1.0)\n    g ="),
    "the turned loss is not divided": ("3 x 7", "w_all, o, V, divisor)\n    log_p = (z_y * LOG2_SCALE - row_max) /", "w_all, o, V, 1.0)\n    log_p = (z_y * LOG2_SCALE - row_max) /"),
    "late is never": ("two classes", "    if UNSCALED_GRAD:\n        softmax_coef", "    if False:\n        softmax_coef"),
    "early is never": ("3 x 7", "    if UNSCALED_GRAD:\n        softmax_coef", "    if True:\n        softmax_coef"),
    "the turnaround has no slope": ("classes inside", "dz *= slope\n    at = start", "at = start"),
    "the turnaround writes rows that are not": (
        "3 x 7", "tl.where(valid, dz, 0.0).to(raw.dtype), mask=stored & (cols < size))",
        "tl.where(valid, dz, 0.0).to(raw.dtype), mask=cols < size)"),
    "the turnaround writes classes that are not": (
        "3 x 7", "tl.where(valid, dz, 0.0).to(raw.dtype), mask=stored & (cols < size))",
        "tl.where(valid, dz, 0.0).to(raw.dtype), mask=stored)"),
    "the held block of an ignored row has a gradient": (
        "garbage", "tl.where(valid, dz, 0.0).to(raw.dtype)", "dz.to(raw.dtype)"),
    "an ignored row keeps its logits": (
        "garbage", "for blank in range(0, edge - live, B)", "for blank in range(0, 0, B)"),
    "the held block is counted twice": ("3 x 7", "live = edge * tl.max", "live = (edge + B) * tl.max"),
    "the last block of the second sweep is left out": (
        "deep", "for back in range(0, live, B)", "for back in range(B, live, B)"),
    "the blocks of a turnaround forget the first": (
        "deep", "for first in range(0, live, B)", "for first in range(B, live, B)"),
    "the held block starts too early": (
        "garbage", "tl.cdiv(tl.maximum(V - HELD * C, 0), B) * B", "tl.maximum(V - HELD * C, 0) // B * B"),
    "the target's score is read after it is overwritten": (
        "3 x 7", "    tl.store(loss_ptr + rows, loss, mask=rows < M)\n", "",
        "    for blank in range(0, edge - live",
        "    overwritten = row_start(z_ptr, rows, inner, stride_o, stride_i) + tl.max(tl.max(y, 2), 1)\n"
        "    overwritten = tl.load(overwritten, mask=valid, other=0.0)\n"
        "    loss += (1 - o.label_smoothing) * w_y * w_t * (z_y - overwritten)\n"
        "    tl.store(loss_ptr + rows, loss, mask=rows < M)\n    for blank in range(0, edge - live"),
    "zeros times infinity": ("scaling", "tl.where(dz == 0, 0.0, dz * factor[:, None])", "dz * factor[:, None]"),
    "a copy of what stays is not made": ("scaling", "busy = COPY | (", "busy = ("),
    "the first row's factor is everyone's": ("scaling", "factor_ptr + rows.to(tl.int64) * factor_stride", "factor_ptr + rows * 0"),
    "factors are not divided": ("scaling", "other=1.0).to(tl.float32) / divisor", "other=1.0).to(tl.float32)"),
    "one factor is not divided": ("scaling", "tl.load(factor_ptr).to(tl.float32) / divisor", "tl.load(factor_ptr).to(tl.float32)"),
    "a program takes one block": ("scaling in turn", "for block in range(tl.program_id(0), blocks, tl.num_programs(0))", "for block in range(tl.program_id(0), blocks, blocks)"),
    "scaling writes classes that are not": (
        "scaling", "dz.to(out_ptr.dtype.element_ty), mask=inside)",
        "dz.to(out_ptr.dtype.element_ty), mask=keep[:, None])"),
    "smoothing in parts is lost": (
        "ignore_index is a class", "TOTAL=stats.mean or o.label_smoothing > 0", "TOTAL=False"),
    "a cap is taken for none": ("classes inside", "if o.softcap: return capped_score", "if False: return capped_score"),
    "PyTorch: -inf minus -inf": (
        "front door", "gap.exp().mul_(gap).masked_fill_(z == -torch.inf, 0.0)",
        "gap.exp().mul_(gap)"),
    "PyTorch: ignored rows have a gradient": (
        "front door", "dz.masked_fill_(~t.valid[:, None], 0.0)", "dz"),
    "PyTorch: a cap without slope": (
        "front door", "(e + 1).square_().reciprocal_().mul_(e).mul_(4 * o.logit_scale)", "o.logit_scale"),
    "PyTorch: ties lose": ("front door", "| (before & (z == z_y))).sum(1)", "| (z == z_y)).sum(1)"),
    "PyTorch: the target is not held": ("in place", "-(target_coef * g)[:, None])", "-(target_coef * 0)[:, None])"),
    "classes stay in the second dimension": (
        "front door", "last = input.movedim(1, -1)", "last = input.reshape(len(input), -1, input.shape[1])"),
    "a mean without class weights": ("front door", "counted = counted * weight[", "counted = counted + 0 * weight["),
    "a mean without token weights": (
        "front door", "counted = counted * token_weight", "counted = counted + 0 * token_weight"),
    "a mean over all tokens": ("in place", "counted = target != ignore_index", "counted = target == target"),
    "0 / 0 of no weights": ("front door", "torch.where(denominator == 0, 1.0, denominator)", "denominator"),
    "0 / 0 of no weights, in a kernel": ("in place on kernels", "return tl.where(total == 0, 1.0, total)", "return total"),
    "fp16 divides too early": ("in place", "late, given = z.dtype == torch.float16,", "late, given = False,"),
    "fp16 divides twice": (
        "in place", "None if unscaled_grad else denominator)\n    out.copy_", "denominator)\n    out.copy_"),
    "a kept gradient is scaled again": (
        "in place", "keep = keeps_graph()\n        dz = scaled", "keep = False\n        dz = scaled"),
    "the version is not raised": ("in place on kernels", "torch.autograd.graph.increment_version(input)", "pass"),
    "leaves are overwritten": ("in place", "    if inplace: check_overwrite(input, return_stats)\n", ""),
    "NaN is right": ("front door", "((rank == 0) & lse.isfinite())", "(rank == 0)"),
    "accuracy over all tokens": ("front door", "/ n_valid.clamp(min=1)", "/ len(lse)"),
}


CHOSEN_BUGS = few(MUTANTS, "sums are not rescaled", "rows of a program begin at the wrong row", "parts overlap", "the label V is a class",
                  "the target is not divided", "an ignored row keeps its logits", "zeros times infinity", "fp16 divides too early",
                  "the version is not raised", "classes stay in the second dimension")


@pytest.fixture
def variant(tmp_path):
    "The module of the function, with texts of it and of what it imports replaced"
    return partial(planted, clusters, tmp_path)


@interpreted
@pytest.mark.parametrize("check", ["front door", "in place", "in place on kernels", "scaling"])
def test_the_unchanged_source_passes(check, variant):
    assert CHECKS[check](variant(*unchanged(pairs for _, *pairs in MUTANTS.values()))) == []


@interpreted
@pytest.mark.parametrize("bug", thorough_but(CHOSEN_BUGS, "sums are not rescaled"))
def test_a_planted_bug_is_noticed(bug, variant):
    check, *pairs = MUTANTS[bug]
    assert first_fault_of([partial(CHECKS[check], variant(*pairs))]), f"{check} does not notice that {bug}"


# --- rows of logits and probabilities ---

SOFT_BLOCKS = {"own": None, "small": pairs.PairBlocks(2, 2, 16, 1)}


def soft_faults(k, how, blocks, inside, dtype, device) -> list[str]:
    "What the launcher of module `k` gets wrong, in and beside the place of the logits"
    made, options = torch.Generator().manual_seed(0), dict(how)
    z, t = torch.randn(3, 2, 75, generator=made, dtype=f64) * 3, torch.rand(3, 2, 75, generator=made, dtype=f64)
    z[0, 1, 20:70], t[0, 1, 20:70] = -torch.inf, 0
    w = torch.rand(75, generator=made).to(device) if options.pop("weight", False) else None
    w_t = torch.linspace(-1, 1, 6).round().to(device) if options.pop("token_weight", False) else None
    o, total = kernels.LossOptions(**options), torch.tensor(1.5, device=device)
    held, share = Guarded(z.to(device, dtype), inside), Guarded(t.to(device, dtype), inside)
    wide = lambda a: None if a is None else a.double()
    losses, dz = pairs.reference_soft(held.view.double().reshape(6, 75), share.view.double().reshape(6, 75), wide(w), wide(w_t), wide(total), o, True)
    apart = torch.full(z.shape, torch.nan, dtype=dtype, device=device)
    found = [k.launch_soft(held.view, share.view, out, w, w_t, total, o, False, blocks) for out in (None, apart, held.view)]
    wrong = [fault for a in found for fault in off("loss", a, losses, 3e-5)]
    wrong += off("gradient", apart.view(6, 75), dz, TOLERANCE[dtype]) + off("gradient in place", held.view.reshape(6, 75), dz, TOLERANCE[dtype])
    return wrong + ["it writes outside"] * held.spilt


SOFT_OPTIONS = [(), (("label_smoothing", 0.2), ("weight", True)), (("softcap", 3.0), ("logit_scale", 0.5)), (("z_loss", 0.1), ("token_weight", True))]


@pytest.mark.parametrize("how, blocks, inside, dtype", grid(few(SOFT_OPTIONS, *SOFT_OPTIONS[1:3]), SOFT_BLOCKS, (False, True), (f32, bf16)))
def test_rows_against_probabilities(how, blocks, inside, dtype, place):
    if ("label_smoothing", 0.2) in how:  # of a masked class the loss is infinite
        how = tuple(pair for pair in how if pair[0] != "label_smoothing")
    assert soft_faults(pairs, how, SOFT_BLOCKS[blocks], inside, dtype, place) == []


SOFT_BUGS = {
    "an old maximum": ("below += (old - new) * mass + ", "below += "),
    "the lanes' maxima": ("tl.sum(below + (zero_if_neg_inf(row_max) - zero_if_neg_inf(top)[:, None]) * mass, 1)", "tl.sum(below, 1)"),
    "one for the sum of targets": ("coef, at = (total + 2", "coef, at = (1 + 2"),
    "0 · inf": ("tl.where(a != 0, a * (z - new[:, None, :]), 0.0)", "a * (z - new[:, None, :])"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("bug", few(SOFT_BUGS, "an old maximum", "one for the sum of targets"))
def test_a_bug_in_rows_against_probabilities_is_noticed(bug, tmp_path, place):
    k = planted(pairs, tmp_path, *SOFT_BUGS[bug])
    assert soft_faults(k, (("z_loss", 0.1),), SOFT_BLOCKS["small"], False, f32, place), "nothing noticed"
