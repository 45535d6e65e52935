"""Samples from hidden states: Philox against its published numbers, frequencies against the softmax, the kernels against PyTorch, filters against a naive form, what is refused, planted bugs."""
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedloss as fl
import fusedloss.samples as samples
from fusedloss.core.options import LossOptions
from fusedloss.core.tiling import Tiling
from fusedloss.core.triton import jit, tl
from fusedloss.samples import check_generator, Filters
from helpers import follows_plans, planted, unchanged, where_kernels_run

f16, bf16, f32, f64, i64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
INFINITE = float("inf")
FILTERS = {"none": Filters(), "top-k": Filters(top_k=5), "argmax": Filters(top_k=1), "top-p": Filters(top_p=0.6), "min-p": Filters(min_p=0.2),
           "all": Filters(top_k=4, top_p=0.9, min_p=0.01), "no top-k": Filters(top_p=0.999, min_p=0.01)}


def numbers(n, v, h, dtype=f64, device="cpu", seed=0, scale=1.0):
    "Features and a weight whose scores differ by some units, and a seed for each row"
    made = torch.Generator().manual_seed(seed)
    x, w = torch.randn(n, h, generator=made, dtype=f64), torch.randn(v, h, generator=made, dtype=f64) * scale / h**0.5
    return x.to(device, dtype), w.to(device, dtype), torch.randint(-2**63, 2**63 - 1, (n,), generator=made).to(device)


def naive_kept(row: list[float], f: Filters) -> set[int]:
    "Classes that the filters keep, by their definition, one after the other"
    order = sorted((c for c in range(len(row)) if row[c] > -INFINITE), key=lambda c: (-row[c], c))
    order = order[:f.top_k or None]
    shares = [torch.tensor(row[c] - row[order[0]], dtype=f64).exp().item() for c in order]
    kept, mass = [], 0.0
    for c, share in zip(order, shares):
        if f.top_p == 1 or mass < f.top_p * sum(shares): kept.append(c)
        mass += share
    return {c for c, share in zip(kept, shares) if share >= f.min_p}


def counted(tokens, v):
    return torch.bincount(tokens.reshape(-1).cpu(), minlength=v).double()


def is_unlikely(counts, p) -> bool:
    "Whether counts are further from the probabilities p than chi-square allows once in some millions"
    seen = p > 0
    if counts[~seen].sum(): return True
    expected = p[seen] * counts.sum()
    chi, freedom = ((counts[seen] - expected)**2 / expected).sum().item(), max(int(seen.sum()) - 1, 1)
    return chi > freedom + 5.2 * (2 * freedom)**0.5 + 10


# --- noise ---

def test_philox_gives_its_published_numbers():
    "Random123's first known answer, and the pseudo-code's own arithmetic for other keys"
    found = samples.plain_philox(torch.zeros(1, dtype=i64), torch.zeros(1, dtype=i64))
    assert [int(word) for word in found] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    key, counter = 0xA4093822299F31D0, 0x243F6A88
    words, keys = [counter, 0, 0, 0], [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, c = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [(c >> 32) ^ words[1] ^ keys[0], c & 0xFFFFFFFF, (a >> 32) ^ words[3] ^ keys[1], a & 0xFFFFFFFF]
        keys = [keys[0] + 0x9E3779B9 & 0xFFFFFFFF, keys[1] + 0xBB67AE85 & 0xFFFFFFFF]
    found = samples.plain_philox(torch.tensor([key - 2**64]), torch.tensor([counter]))
    assert [int(word) for word in found] == words


@jit
def noise_kernel(seeds_ptr, out_ptr, V, first, start, BN: tl.constexpr, BV: tl.constexpr, ODD: tl.constexpr):
    rows, cols = tl.arange(0, BN), first + tl.arange(0, BV)
    noise = samples.gumbel_tile(tl.load(seeds_ptr + rows), start + first, BN, BV, 10, ODD)
    tl.store(out_ptr + rows[:, None] * V + cols[None, :], noise, mask=(cols < V)[None, :])


@where_kernels_run
def test_the_kernels_make_the_same_noise(device):
    seeds, v = torch.tensor([0, 1, -1, 2**62, -2**63, 2**63 - 1, 12345, -99], device=device), 75
    whole = samples.plain_gumbel(seeds, v + 8, f32)
    for start in (0, 5, 8):  # the first class of a rank
        out = torch.zeros(8, v, device=device)
        for first in range(0, v, 16):
            noise_kernel[(1,)](seeds, out, v, first, start, BN=8, BV=16, ODD=start % 2 == 1)
        torch.testing.assert_close(out, samples.plain_gumbel(seeds, v, f32, start), rtol=0, atol=1e-5)
        assert torch.equal(samples.plain_gumbel(seeds, v, f32, start), whole[:, start:start + v])


def test_noise_is_gumbels():
    "Mean γ, variance π²/6, and the share of the largest values: the tails decide which classes are drawn"
    g = samples.plain_gumbel(torch.arange(1000), 2000, f32).double()
    assert abs(g.mean() - 0.5772157) < 5e-3 and abs(g.var() - torch.pi**2 / 6) < 1e-2
    for t in (-1.5, 0.0, 2.0, 5.0, 10.0):
        expected = -torch.tensor(-t, dtype=f64).exp().neg().expm1() * g.numel()
        assert abs((g > t).sum() - expected) < 6 * expected**0.5 + 1
    torch.testing.assert_close(g[g > -2], samples.plain_gumbel(torch.arange(1000), 2000, f64)[g > -2], rtol=0, atol=1e-3)


@where_kernels_run
def test_small_and_large_words(device):
    "The corners of the noise's formula, against float64"
    upper = torch.tensor([0, 0, 1, 2, 100, 2**20, 2**27, 2**28 - 1, 2**28, 2**28 + 1, 2**31, 2**32 - 2**9, 2**32 - 2, 2**32 - 1])
    lower = torch.tensor([0, 2**32 - 1, 7, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 2**32 - 1])

    out = torch.zeros(16, device=device)
    pad = lambda t: F.pad(t, (0, 2)).to(device)
    corner_kernel[(1,)](pad(upper), pad(lower), out, B=16)
    u = ((lower.double() + 0.5) * 2**-32 + upper.double()) * 2**-32
    exact = -(-torch.log1p(-u.clamp(max=1 - 2**-24))).log()
    torch.testing.assert_close(out[:14].cpu().double(), exact, rtol=1e-6, atol=1e-5)


@jit
def corner_kernel(upper_ptr, lower_ptr, out_ptr, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.store(out_ptr + at, samples.gumbel_of(tl.load(upper_ptr + at).to(tl.uint32), tl.load(lower_ptr + at).to(tl.uint32)))


# --- frequencies ---

def frequencies_faults(module) -> list[str]:
    "Which of the filters' samples are not distributed as the softmax of what they keep"
    draws, v, wrong = 20000, 24, []
    x, w, _ = numbers(1, v, 8, f32, scale=2.0)
    z = (x.double() @ w.double().T)[0]
    for name, f in FILTERS.items():
        torch.manual_seed(5)
        seeds = torch.randint(-2**63, 2**63 - 1, (draws,))
        tokens, log_probs = module.plain_samples(x.expand(draws, -1), w, seeds, None, None, LossOptions(), module.Filters(*f))
        kept = naive_kept(z.tolist(), f)
        masked = torch.tensor([z[c].item() if c in kept else -INFINITE for c in range(v)], dtype=f64)
        if is_unlikely(counted(tokens, v), masked.softmax(0)): wrong.append(name)
        if (log_probs.double() - z.log_softmax(0)[tokens]).abs().max() > 1e-5: wrong.append(f"log-probabilities, {name}")
    return wrong


def test_frequencies_are_those_of_the_softmax():
    assert frequencies_faults(samples) == []


def test_frequencies_of_many_classes():
    "Of a flat row: 8000 classes, in eight groups"
    draws, v = 1000, 8000
    seeds = torch.arange(draws) * 7919 - 2**40
    tokens, _ = samples.plain_samples(torch.zeros(draws, 1), torch.zeros(v, 1), seeds, None, None, LossOptions(), Filters())
    assert not is_unlikely(counted(tokens // (v // 8), 8), torch.full((8,), 1 / 8, dtype=f64))
    assert not is_unlikely(counted(tokens % 2, 2), torch.full((2,), 1 / 2, dtype=f64))
    assert len(tokens.unique()) > 0.85 * v * (1 - torch.tensor(-draws / v).exp())


def test_rows_are_independent():
    "Pairs of neighbours with one score: each pair of tokens as often as the product of their probabilities"
    tokens = fl.linear_sample(torch.zeros(40000, 2), torch.zeros(4, 2), generator=torch.Generator().manual_seed(3)).tokens
    pairs = tokens[::2] * 4 + tokens[1::2]
    assert not is_unlikely(counted(pairs, 16), torch.full((16,), 1 / 16, dtype=f64))


MUTANTS = {
    "a noise too flat": ("return -torch.log(-torch.log1p(-u.clamp(", "return -0.9 * torch.log(-torch.log1p(-u.clamp("),
    "noise that classes share": ("pairs[None, :])]", "pairs[None, :] // 4)]"),
    "noise that rows share": ("plain_philox(seeds[:, None],", "plain_philox(0 * seeds[:, None],"),
    "one class too many": ("kept[:, f.top_k:] = False", "kept[:, f.top_k + 1:] = False"),
    "a class too few": ("share.cumsum(1) - share <", "share.cumsum(1) <"),
    "top-p of all classes": ("        share[:, f.top_k:] = 0\n", "        pass\n"),
    "no floor": ("z >= z[:, :1] + f.least", "z >= z[:, :1] - 99"),
}


@pytest.mark.parametrize("bug", MUTANTS)
def test_planted_bugs_are_noticed(bug, tmp_path):
    assert frequencies_faults(planted(samples, tmp_path, *MUTANTS[bug])), "nothing noticed"


def test_planting_alone_changes_nothing(tmp_path):
    assert frequencies_faults(planted(samples, tmp_path, *unchanged(MUTANTS.values()))) == []


# --- filters ---

@pytest.mark.parametrize("f", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("rounded", [False, True], ids=["no equals", "equals"])
def test_filters_keep_what_their_definition_keeps(f, rounded):
    z = 2 * torch.randn(40, 30, dtype=f64, generator=torch.Generator().manual_seed(1))
    z = z.round() if rounded else z
    z[::3, 4] = -INFINITE
    kept = samples.plain_kept(z, f) & (z > -INFINITE)
    assert [set(row.nonzero()[:, 0].tolist()) for row in kept] == [naive_kept(row, f) for row in z.tolist()]


def test_argmax_of_equals_is_the_lower_class():
    w = torch.tensor([[0.0], [1.0], [1.0], [0.5], [1.0]])
    found = fl.linear_sample(torch.ones(50, 1), w, top_k=1)
    assert found.tokens.eq(1).all()
    torch.testing.assert_close(found.log_probs, w[:, 0].log_softmax(0)[1].expand(50))
    assert fl.linear_sample(torch.ones(50, 1), w, top_p=1e-9).tokens.eq(1).all()
    assert set(fl.linear_sample(torch.ones(200, 1), w, min_p=1.0).tokens.tolist()) == {1, 2, 4}


def test_filters_that_keep_all_change_nothing():
    x, w, _ = numbers(50, 40, 8, f32)
    plain, *others = (fl.linear_sample(x, w, generator=torch.Generator().manual_seed(2), **how).tokens
                      for how in ({}, dict(top_k=40), dict(top_p=1.0), dict(min_p=0.0), dict(top_k=40, top_p=1.0, min_p=0.0)))
    assert all(torch.equal(plain, other) for other in others)


# --- the kernels ---

def given(dtype, device, n, v, h, how):
    "Arguments of `plain_samples` but for the filters"
    x, w, seeds = numbers(n, v, h, dtype, device, scale=3.0)
    bias = torch.linspace(-1, 1, v, device=device, dtype=dtype) if "bias" in how else None
    temperature = torch.linspace(0.5, 2, n, device=device) if "temperatures" in how else None
    o = LossOptions(logit_scale=1.5 if "scale" in how else 1.0, softcap=2.0 if "softcap" in how else 0.0)
    return x, w, seeds, bias, temperature, o


def differences(found, exact, close=0) -> list[str]:
    "Where tokens differ but for `close` rows, or log-probabilities are off"
    wrong, tokens = [], found[0].cpu() == exact[0].cpu()
    if (~tokens).sum() > close: wrong.append(f"tokens {found[0].tolist()} for {exact[0].tolist()}")
    if ((found[1] - exact[1]).cpu()[tokens].abs() > 1e-3).any(): wrong.append("log-probabilities")
    return wrong


@where_kernels_run
@pytest.mark.parametrize("n, v, h, run, how", [
    (5, 77, 20, 0, ""), (18, 100, 32, 2, "bias temperatures"), (3, 64, 8, 1, "scale softcap"), (1, 1, 4, 0, ""), (17, 33, 40, 3, "bias softcap"), (2, 700, 16, 0, "")])
def test_the_kernel_draws_as_pytorch(n, v, h, run, how, device):
    for dtype in (f16, bf16 if device == "cuda" else f32):
        args = given(dtype, device, n, v, h, how)
        assert not differences(samples.launch_samples(*args, Filters(), run=run), samples.plain_samples(*args, Filters()))


@where_kernels_run
@pytest.mark.parametrize("cuts", [(0, 41, 77), (0, 26, 52, 77, 77)], ids=str)
def test_shards_draw_as_all_classes(cuts, device):
    "Of each shard, which may begin with an odd class or have none, five numbers; merged by the kernel and by PyTorch"
    x, w, seeds, b, t, o = given(f16, device, 9, 77, 20, "bias temperatures")
    part = lambda start, stop: (x, w[start:stop], seeds, b[start:stop], t, o, start)
    found = [samples.shard_samples(*part(*cut)) for cut in zip(cuts, cuts[1:])]
    parts, tokens = torch.stack([p for p, _ in found], 1), torch.stack([k for _, k in found]).int()
    exact = samples.plain_samples(x, w, seeds, b, t, o, Filters())
    for merge in (samples.merge_samples, samples.plain_pick):
        assert not differences(merge(parts, tokens), exact)


@where_kernels_run
def test_a_shard_draws_from_what_is_kept(device):
    "By the kernel and by PyTorch, of classes from an odd one on; a threshold among equals, and a row without a class"
    z, seeds = torch.arange(150, device=device).mul(7).remainder(11).sub(5.0).view(3, 50), torch.arange(3, device=device)
    low, last, top = torch.tensor([0.0, 1.0, 9.0], device=device), torch.tensor([20, -1, -1], device=device, dtype=torch.int32), z.amax(1)
    kept = (z > low[:, None]) | (z == low[:, None]) & (torch.arange(50, device=device) <= last[:, None])
    parts, tokens = samples.plain_parts(z, seeds, 7, kept)
    sums = torch.zeros(7, 3, device=device)
    sums[0], sums[1] = top, parts[1]
    drawn = samples.launch_draw(z, seeds, sums, low, last, 50, -30.0, 7)
    found = samples.merge_samples(*drawn)
    assert torch.equal(found[0][:2], tokens[:2]) and found[1][2].isnan()
    torch.testing.assert_close(found[1][:2], samples.plain_pick(parts[:, None], tokens[None])[1][:2])


@where_kernels_run
@pytest.mark.parametrize("f", list(FILTERS.values())[1:], ids=list(FILTERS)[1:])
def test_the_kernel_filters_as_pytorch(f, device):
    for how, n, v in (("bias temperatures", 3, 77), ("softcap", 2, 40)):
        args = given(f16, device, n, v, 20, how)
        assert not differences(samples.launch_samples(*args, f), samples.plain_samples(*args, f))


@where_kernels_run
@pytest.mark.parametrize("f", [Filters(top_k=3), Filters(top_p=0.5), Filters(top_k=6, top_p=0.7), Filters(min_p=1.0)], ids=str)
def test_the_kernel_filters_equals_as_pytorch(f, device):
    "Scores that are small integers, exact in any precision, and shares that add up exactly: powers of two"
    made = torch.Generator().manual_seed(4)
    w = torch.randint(-2, 3, (70, 1), generator=made).to(device, f16)
    x = torch.full((3, 1), 1.0, device=device, dtype=f16)
    seeds = torch.arange(3, device=device)
    args = x, w, seeds, None, torch.full((3,), 1.4426950408889634, device=device), LossOptions()
    assert not differences(samples.launch_samples(*args, f), samples.plain_samples(*args, f))


@where_kernels_run
def test_more_classes_than_a_block_of_the_filter(device):
    "Equals in the first block and in the second: the lower classes stay"
    w = torch.zeros(4200, 1, device=device, dtype=f16)
    w[4090:4100] = 1
    x, seeds = torch.full((2, 1), 8.0, device=device, dtype=f16), torch.arange(2, device=device)
    args = x, w, seeds, None, None, LossOptions()
    for f in (Filters(top_k=8), Filters(min_p=0.5)):
        found = samples.launch_samples(*args, f)
        assert not differences(found, samples.plain_samples(*args, f))
        assert found[0].ge(4090).all() and found[0].lt(4090 + (f.top_k or 10)).all()


@where_kernels_run
@pytest.mark.parametrize("f", [Filters(), Filters(top_k=3, top_p=0.9)], ids=["all", "filtered"])
def test_hostile_rows_of_the_kernel(f, device):
    hostile_rows(lambda *args: samples.launch_samples(*args, f), f16, device, 5)


@pytest.mark.parametrize("f", [Filters(), Filters(top_k=3, top_p=0.9)], ids=["all", "filtered"])
@pytest.mark.parametrize("dtype", [f32, f64])
def test_hostile_rows(f, dtype):
    hostile_rows(lambda *args: samples.plain_samples(*args, f), dtype, "cpu")


def hostile_rows(draw, dtype, device, n=40):
    "Classes of -inf are never drawn; a row with a NaN, or of -inf alone, gives a class and NaN, and spoils no other"
    v = 37
    x, w, seeds = numbers(n, v, 8, dtype, device)
    bias = torch.zeros(v, device=device, dtype=dtype)
    bias[::2] = -INFINITE
    tokens, log_probs = draw(x, w, seeds, bias, None, LossOptions())
    assert (tokens % 2 == 1).all() and log_probs.isfinite().all()
    bad = x.clone()
    bad[1], bad[3, 2] = torch.nan, INFINITE
    found = draw(bad, w, seeds, bias, None, LossOptions())
    rest = [i for i in range(n) if i not in (1, 3)]
    assert torch.equal(found[0][rest], tokens[rest]) and torch.equal(found[1][rest], log_probs[rest])
    assert found[1][[1, 3]].isnan().all() and found[0].ge(0).all() and found[0].lt(v).all()
    found = draw(x, w, seeds, torch.full_like(bias, -INFINITE), None, LossOptions())
    assert found[1].isnan().all() and found[0].ge(0).all() and found[0].lt(v).all()


@where_kernels_run
def test_scores_far_from_zero_of_the_kernel(device):
    far_scores(samples.launch_samples, f16, device)


def test_scores_far_from_zero():
    far_scores(samples.plain_samples, f32, "cpu")


def far_scores(draw, dtype, device):
    "An offset of a million, by the scale: noise is added to differences, so the frequencies are those of the softmax"
    n = 3000 if device == "cpu" and dtype == f32 else 400
    w = torch.tensor([[1024.0], [1024.0], [0.0]], device=device).to(dtype)
    x = torch.full((n, 1), 1.0, device=device, dtype=dtype)
    tokens, log_probs = draw(x, w, torch.arange(n, device=device), None, None, LossOptions(logit_scale=1000.0), Filters())
    assert not is_unlikely(counted(tokens, 3), torch.tensor([0.5, 0.5, 0.0], dtype=f64))
    torch.testing.assert_close(log_probs, torch.full_like(log_probs, 0.5).log())


# --- what a sample depends on ---

@where_kernels_run
@pytest.mark.parametrize("f", [Filters(), Filters(top_k=9, top_p=0.8)], ids=["all", "filtered"])
def test_a_row_does_not_see_its_batch(f, device):
    x, w, seeds, *rest = given(f16, device, 5, 70, 16, "bias")
    for draw in (samples.launch_samples, samples.plain_samples):
        tokens, _ = draw(x, w, seeds, *rest, f)
        order = torch.randperm(5, generator=torch.Generator().manual_seed(1)).to(device)
        for rows in (order[:3], order[:1]):
            assert torch.equal(draw(x[rows], w, seeds[rows], *rest, f)[0], tokens[rows])


@where_kernels_run
def test_tilings_draw_alike(device):
    args = given(f16, device, 20, 100, 40, "")
    tokens = samples.launch_samples(*args, Filters())[0]
    for t in (Tiling(False, 16, 64, 32), Tiling(False, 32, 16, 16)) if device == "cpu" else (Tiling(False, 64, 64, 32, warps=4), Tiling(False, 128, 128, 32)):
        assert torch.equal(samples.launch_samples(*args, Filters(), t)[0], tokens)


def test_chunks_draw_alike(monkeypatch):
    x, w, seeds = numbers(23, 40, 8, f32)
    rest = None, torch.linspace(0.5, 2, 23), LossOptions(), Filters(top_k=5)
    tokens = samples.plain_samples(x, w, seeds, *rest)[0]
    monkeypatch.setattr(samples, "BUDGET", samples.PLAIN_BYTES * 40 * 4)
    assert torch.equal(samples.plain_samples(x, w, seeds, *rest)[0], tokens)


@where_kernels_run
def test_chunks_of_the_kernel_draw_alike(device, monkeypatch):
    args = given(f16, device, 5, 40, 8, "temperatures")
    tokens = samples.launch_samples(*args, Filters(top_k=5))[0]
    monkeypatch.setattr(samples, "BUDGET", 4 * 40 * 2)
    assert torch.equal(samples.launch_samples(*args, Filters(top_k=5))[0], tokens)


def test_the_generator_decides():
    x, w, _ = numbers(30, 50, 8, f32)
    draw = lambda seed, **how: fl.linear_sample(x, w, generator=torch.Generator().manual_seed(seed), **how).tokens
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    torch.manual_seed(7)
    first, second = fl.linear_sample(x, w).tokens, fl.linear_sample(x, w).tokens
    torch.manual_seed(7)
    assert torch.equal(fl.linear_sample(x, w).tokens, first) and not torch.equal(first, second)
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    for wrong in (dict(top_k=0), dict(temperature=-1.0), dict(min_p=2.0)):
        with pytest.raises(ValueError): fl.linear_sample(x, w, generator=generator, **wrong)
    assert torch.equal(generator.get_state(), state)  # a call that raises has drawn nothing


# --- the function ---

@pytest.mark.parametrize("options", [{}, dict(temperature=0.7, softcap=3.0), dict(logit_scale=2.0, top_k=4, top_p=0.9), dict(logit_scale=torch.tensor(1.7)),
                                     dict(temperature=torch.tensor([[0.5, 1.0, 2.0], [3.0, 0.1, 1.0]]))], ids=str)
def test_log_probabilities_are_those_of_linear_log_probs(options):
    x, w, _ = numbers(6, 20, 8, f64)
    x, b = x.view(2, 3, 8), torch.linspace(-1, 1, 20, dtype=f64)
    found = fl.linear_sample(x, w, linear_bias=b, **options)
    assert found.tokens.shape == found.log_probs.shape == (2, 3) and found.tokens.dtype == i64 and found.log_probs.dtype == f64
    asked = {k: v for k, v in options.items() if not k.startswith("top")}
    torch.testing.assert_close(found.log_probs, fl.linear_log_probs(x, w, found.tokens, linear_bias=b, **asked).log_probs)


def test_shapes_and_layouts():
    w = torch.randn(9, 4)
    assert fl.linear_sample(torch.randn(4), w).tokens.shape == ()
    for shape in ((0, 4), (2, 0, 4)):
        assert fl.linear_sample(torch.randn(shape), w, top_k=2).tokens.shape == shape[:-1]
    assert fl.linear_sample(torch.randn(3, 4), w[:1]).tokens.tolist() == [0, 0, 0]
    x = torch.randn(10, 8)[:, ::2]
    draw = lambda *a: fl.linear_sample(*a, generator=torch.Generator().manual_seed(0)).tokens
    assert torch.equal(draw(x, w), draw(x.contiguous(), w.T.contiguous().T))


def test_no_gradient_and_nothing_changed():
    x, layer = torch.randn(3, 4, requires_grad=True), nn.Linear(4, 9)
    versions = [t._version for t in (x, layer.weight, layer.bias)]
    found = fl.linear_sample(x, layer)
    assert not (found.log_probs.requires_grad or found.tokens.requires_grad)
    assert versions == [t._version for t in (x, layer.weight, layer.bias)]


def test_modules_and_autocast():
    x, layer = torch.randn(30, 8), nn.Linear(8, 12)
    draw = lambda *a, **k: fl.linear_sample(*a, generator=torch.Generator().manual_seed(0), **k)
    for found, exact in zip(draw(x, layer), draw(x, layer.weight, linear_bias=layer.bias)): assert torch.equal(found, exact)
    embedding = nn.Embedding(12, 8, _weight=layer.weight.detach())
    assert torch.equal(draw(x, embedding).tokens, draw(x, layer.weight).tokens)
    with torch.autocast("cpu", bf16): mixed = draw(x, layer)
    for found, exact in zip(mixed, draw(x.bfloat16(), layer.weight.bfloat16(), linear_bias=layer.bias.bfloat16())): assert torch.equal(found, exact)


@pytest.mark.parametrize("options, words", [
    (dict(top_k=0), "top_k: expected an integer from 1 to the 9 classes, or None, got 0"), (dict(top_k=10), "top_k: expected .*, got 10"),
    (dict(top_k=1.5), "top_k"), (dict(top_k=True), "top_k"), (dict(top_p=0.0), "top_p: expected a number above 0, at most 1, or None, got 0.0"),
    (dict(top_p=1.1), "top_p"), (dict(top_p=float("nan")), "top_p"), (dict(min_p=-0.1), "min_p: expected a number from 0 to 1"), (dict(min_p=1.1), "min_p"),
    (dict(temperature=0.0), "temperature: expected a positive number"), (dict(temperature=torch.ones(2)), "temperature: .* of the input's leading shape"),
    (dict(generator=3), "generator: expected a torch.Generator or None, got int"), (dict(softcap=-1.0), "softcap"), (dict(linear_bias=torch.ones(3)), "linear_bias")])
def test_what_is_refused(options, words):
    with pytest.raises(ValueError, match=words): fl.linear_sample(torch.randn(3, 4), torch.randn(9, 4), **options)


class Drawing(torch.Generator):
    "A generator that says that it is of another device"
    device = None


@pytest.mark.parametrize("of, fits", [("cuda", True), ("cuda:0", True), ("cuda:1", False), ("cpu", False)])
def test_a_generator_without_an_index_is_of_any_gpu(of, fits, monkeypatch):
    "As torch.Generator('cuda') is"
    monkeypatch.setattr(Drawing, "device", torch.device(of))
    with nullcontext() if fits else pytest.raises(ValueError, match=f"generator: expected one of the input's device cuda:0, got {of}"):
        check_generator(Drawing(), SimpleNamespace(device=torch.device("cuda:0")))


@where_kernels_run
def test_a_generator_of_the_device_as_pytorch_makes_it(device):
    x, w = torch.randn(3, 4, device=device), torch.randn(9, 4, device=device)
    draw = lambda: fl.linear_sample(x, w, generator=torch.Generator(device).manual_seed(1)).tokens
    assert torch.equal(draw(), draw())


def test_a_generator_of_another_device_is_refused():
    with pytest.raises(ValueError, match="generator: expected one of the input's device meta, got cpu"):
        fl.linear_sample(torch.randn(3, 4, device="meta"), torch.randn(9, 4, device="meta"), generator=torch.Generator())


# --- torch.compile ---

@follows_plans
def test_compiled_for_any_size_and_numbers():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def draw(x, w, t, p): return fl.linear_sample(x, w, temperature=t, top_p=p, top_k=3)

    w = torch.randn(9, 4)
    for n, t, p in ((4, 0.7, 0.9), (20, 1.3, 0.5), (7, 2.5, 0.25), (9, 0.125, 0.75)):
        torch.manual_seed(n)
        x = torch.randn(n, 4)
        torch.manual_seed(1)
        found = draw(x, w, t, p)
        torch.manual_seed(1)
        exact = fl.linear_sample(x, w, temperature=t, top_p=p, top_k=3)
        assert torch.equal(found.tokens, exact.tokens)
        torch.testing.assert_close(found.log_probs, exact.log_probs)
    assert len(graphs) <= 3


def test_the_operator_is_one():
    x, w, seeds = numbers(5, 20, 8, f32)
    torch.library.opcheck(samples.samples_of_rows._opoverload, samples.samples_of_rows.arguments.flat((x, w, seeds, None, None, LossOptions(), Filters(3))))
