"""The sample and its columns: laws of the draw, the kernels against PyTorch, planted bugs."""
import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fusedloss.core import sampling
from fusedloss.core.sampling import NegativeSampler, plain_block_key, step_columns, draw, plain_draw, first_occurrence, shuffle, plain_find_slot, strata_of
from grids import FULL, few
from head_cases import f32, f64, place  # noqa: F401 (fixtures)
from helpers import fault_of, planted, unchanged


# --- the sample ---

numbers = st.integers(0, 2**62)
rates = st.floats(1e-4, 1.0)


@settings(max_examples=60 if FULL else 15, deadline=None)
@given(numbers, st.integers(1, 10).map(lambda k: 2 * k))
def test_a_key_permutes(key, bits):
    j = torch.arange(min(2**bits, 4096)) + max(0, 2**bits - 4096) // 2
    images = shuffle(j, plain_block_key(torch.tensor(key), torch.tensor(1), torch.tensor(5)), bits)
    assert images.unique().numel() == len(j) and images.min() >= 0 and images.max() < 2**bits
    assert torch.equal(shuffle(images, plain_block_key(torch.tensor(key), torch.tensor(1), torch.tensor(5)), bits, back=True), j)


@settings(max_examples=100 if FULL else 25, deadline=None)
@given(numbers, numbers, rates, st.integers(1, 5000), st.data())
def test_ranks_draw_what_one_draws(seed, step, rate, n_classes, data):
    seed, step, s = torch.tensor(seed), torch.tensor(step), strata_of(rate)
    whole = plain_draw(seed, step, s, 0, n_classes)
    alive = whole[whole >= 0]
    assert len(alive.unique()) == len(alive) and (alive < n_classes).all()
    cuts = sorted(data.draw(st.lists(st.integers(0, n_classes), max_size=5)))
    edges = [0, *cuts, n_classes]
    parts = [plain_draw(seed, step, s, a, b) for a, b in zip(edges, edges[1:])]  # empty ranks included
    y = data.draw(st.lists(st.integers(0, n_classes - 1), max_size=9).map(lambda v: torch.tensor(v, dtype=torch.int64)))
    args = seed, step, s
    one = sampling.plain_columns(y, *args, 0, n_classes, -1, 0.7, f64)
    ranks = [sampling.plain_columns(y, *args, a, b, -1, 0.7, f64) for a, b in zip(edges, edges[1:])]
    scored = lambda c, a: {(r + a, q) for r, q in zip(c.w_rows.tolist(), c.shift.tolist()) if r >= 0}
    assert set.union(*(scored(c, a) for c, a in zip(ranks, edges))) == scored(one, 0)
    for part, a, b in zip(parts, edges, edges[1:]):
        assert ((part < 0) | (part >= a) & (part < b)).all()
    assert torch.equal(torch.cat([p[p >= 0] for p in parts]).sort().values, alive.sort().values)


@settings(max_examples=60 if FULL else 15, deadline=None)
@given(numbers, numbers, rates, st.integers(1, 3000), st.integers(0, 3000))
def test_a_class_is_found_where_it_was_drawn(seed, step, rate, n_classes, start):
    seed, step, s, y = torch.tensor(seed), torch.tensor(step), strata_of(rate), torch.arange(start, start + n_classes)
    drawn, at = plain_draw(seed, step, s, start, start + n_classes), plain_find_slot(y, seed, step, s, start)
    assert torch.equal(drawn[at[at >= 0]], y[at >= 0]) and (at >= 0).sum() == (drawn >= 0).sum()


@settings(max_examples=200 if FULL else 50, deadline=None)
@given(st.floats(1e-9, 1.0))
def test_strata_draw_the_rate(rate):
    s = strata_of(rate)
    mean = s.drawn + s.extra_chance / 2**32
    assert mean / 2**s.bits == pytest.approx(rate, rel=1e-6, abs=2**-52) and s.bits % 2 == 0 and s.slots <= 2**s.bits
    assert rate < 1e-7 or s.slots <= 1.02 * mean  # few slots stay empty


@pytest.mark.parametrize("rate", few([0.07, 0.37, 0.9], 0.07, 0.9))
def test_alone_and_in_pairs(rate):
    s, steps, v = strata_of(rate), 1500 if FULL else 500, 2**strata_of(rate).bits + 70
    hits = torch.zeros(steps, v)
    for k in range(steps):
        drawn = plain_draw(torch.tensor(3), torch.tensor(k), s, 0, v)
        hits[k, drawn[drawn >= 0]] = 1
    alone = hits.mean(0)
    assert alone.mean().item() == pytest.approx(rate, abs=0.002)
    assert alone.std().item() == pytest.approx((rate * (1 - rate) / steps) ** 0.5, rel=0.15)
    joint = (hits.T @ hits / steps)[~torch.eye(v, dtype=torch.bool)]
    assert joint.mean().item() == pytest.approx(rate**2, rel=0.02)  # without replacement: 1 % fewer
    assert joint.std().item() == pytest.approx((rate**2 * (1 - rate**2) / steps) ** 0.5, rel=0.15)
    lag = (hits[1:] * hits[:-1]).mean().item()  # a step says nothing of the next
    assert lag == pytest.approx(rate**2, rel=0.06)


def test_the_size_is_bounded_and_nearly_fixed():
    sizes = []
    for step in range(40):
        drawn = plain_draw(torch.tensor(1), torch.tensor(step), strata_of(0.1), 0, 10**6)
        sizes.append(int((drawn >= 0).sum()))
    assert all(abs(n - 10**5) < 120 for n in sizes) and len(drawn) < 1.02 * 10**5  # a binomial's deviation would be 300


def test_classes_beyond_32_bits():
    s, start = strata_of(0.1), 2**33 + 123
    drawn = plain_draw(torch.tensor(1), torch.tensor(2), s, start, start + 5000)
    alive = drawn[drawn >= 0]
    assert abs(len(alive) - 500) < 60 and alive.min() >= start and alive.max() < start + 5000
    low = plain_draw(torch.tensor(1), torch.tensor(2), s, 0, 5000)
    assert len(set((alive - 2**33).tolist()) & set(low.tolist())) < 120  # another block, another permutation


@pytest.mark.parametrize("seeds", [((1, 0), (2, 0)), ((1, 0), (1, 1)), ((1, 0), (1 + 2**32, 0)), ((1, 0), (1, 2**32)), ((1, 2), (2, 1))])
def test_all_bits_of_seed_and_step_count(seeds):
    one, two = (set(plain_draw(torch.tensor(a), torch.tensor(b), strata_of(0.1), 0, 20000).tolist()) for a, b in seeds)
    assert 0.05 * 2000 < len(one & two) < 0.15 * 2000


@settings(max_examples=60 if FULL else 15, deadline=None)
@given(st.lists(st.integers(-1, 12), max_size=30))
def test_first_occurrence(labels):
    assert first_occurrence(torch.tensor(labels, dtype=torch.int64)).tolist() == [labels.index(v) for v in labels]


@settings(max_examples=60 if FULL else 15, deadline=None)
@given(st.lists(st.integers(-1, 40), max_size=30), st.sampled_from([0.03, 0.3, 0.8, 1.0, "positives"]), st.booleans(), st.integers(0, 10**9))
def test_columns(labels, rate, log_q, seed):
    y, sampler = torch.tensor(labels, dtype=torch.int64), NegativeSampler(rate, seed, log_q)
    columns = step_columns(y, -1, 41, sampler, f64)
    alive = columns.w_rows[columns.w_rows >= 0]
    assert len(columns.w_rows) == -(-(len(sampler(41)) + len(labels)) // 8) * 8  # known beforehand
    assert len(alive.unique()) == len(alive)
    assert set(alive.tolist()) == set(sampler(41).tolist()) - {-1} | set(labels) - {-1}
    assert torch.equal(columns.w_rows[columns.target_column[y >= 0]], y[y >= 0]) and (columns.target_column[y < 0] == -1).all()
    present = torch.isin(columns.w_rows, y)
    drawn_shift = -math.log(rate) if log_q and rate != "positives" else 0.0
    expected = torch.full(columns.w_rows.shape, drawn_shift, dtype=f64).masked_fill(present, 0).masked_fill(columns.w_rows < 0, -math.inf)
    assert torch.equal(columns.shift, expected)


def test_log_q_makes_the_sum_right_on_average():
    z = torch.randn(4000, dtype=f64, generator=torch.Generator().manual_seed(0))
    y, sums = torch.arange(0, 4000, 400), {True: [], False: []}
    for log_q in sums:
        sampler = NegativeSampler(0.1, 5, log_q)
        for _ in range(200):
            sampler.advance()
            columns = step_columns(y, -1, 4000, sampler, f64)
            sums[log_q].append(((z[columns.w_rows.clamp(min=0)] + columns.shift).exp().sum() / z.exp().sum()).item())
    mean = {k: sum(v) / len(v) for k, v in sums.items()}
    assert mean[True] == pytest.approx(1, abs=0.01) and mean[False] == pytest.approx(0.1, abs=0.01)


DRAWS = list(itertools.product([1.0, 0.1, 0.37, 1e-5], [(0, 1), (0, 777), (1300, 5000), (2**33, 2**33 + 300)]))


@pytest.mark.parametrize("rate,span", few(DRAWS, *DRAWS[::5], *DRAWS[2::7]))
def test_draw_kernel(rate, span, place):
    s, seed, step = strata_of(rate), torch.tensor(2**40 + 5, device=place), torch.tensor(3, device=place)
    first = span[0] >> s.bits
    total = (-(-span[1] >> s.bits) - first) * s.slots
    out, shift = torch.full((total + 9,), -7, device=place), torch.full((total + 9,), math.nan, device=place)
    sampling.draw_kernel[(-(-total // 256),)](out, shift, seed, step, first, *span, total, 0, 1.5, s.drawn, s.extra_chance, s.slots, s.bits,
                                                sampling.ROUNDS, B=256)
    exact = plain_draw(seed.cpu(), step.cpu(), s, *span)
    assert torch.equal(out[:total].cpu(), exact) and (out[total:] == -7).all()
    assert torch.equal(shift[:total].cpu(), torch.where(exact < 0, -math.inf, 1.5)) and shift[total:].isnan().all()
    assert torch.equal(draw(seed, step, s, *span), out[:total])


def same_columns(got, exact):
    "All that columns say is the same; which living class the dead name is free"
    alive, index = got.w_rows[got.w_rows >= 0].cpu(), got.grad_index.cpu()
    free = torch.equal(index[exact.w_rows >= 0], alive) and torch.isin(index, alive if len(alive) else torch.tensor([0])).all()
    rest = zip(got._replace(grad_index=exact.grad_index), exact)
    return free and all(a.shape == e.shape and torch.allclose(a.cpu().double(), e.double(), rtol=0, atol=0, equal_nan=True) for a, e in rest)


BATCHES = [(1, (0, 1)), (5, (0, 3)), (70, (300, 340)), (200, (0, 3000)), (200, (1234, 4000)), (9, (2**33 + 5, 2**33 + 900)), (0, (0, 900)), (9, (50, 50))]
COLUMNS = list(itertools.product(BATCHES, [1.0, 0.1, 0.37, 1e-5, "positives"], [True, False]))


@pytest.mark.parametrize("batch,rate,log_q", few(COLUMNS, *COLUMNS[::11], COLUMNS[25], (BATCHES[3], "positives", True)))
def test_columns_kernel(batch, rate, log_q, place):
    n, span = batch
    sampler, g = NegativeSampler(rate, 2**33 + 1, log_q), torch.Generator().manual_seed(n)
    y = torch.randint(span[0], max(span[1], span[0] + 1), (n,), generator=g)
    sampler.step += 9
    y[torch.arange(n) % 7 == 3] += 10**12  # no class at all
    ignored = y[1].item() if n > 1 else -5  # a class may be one that is ignored
    known = (y != ignored) & (y < span[1])
    drawn_shift = -math.log(rate) if log_q and rate != "positives" else 0.0
    args = sampler.seed, sampler.step, sampler.strata, *span
    exact = sampling.plain_columns(y, *args, ignored, drawn_shift, f32)
    got = sampling.launch_columns(y.to(place), *(a.to(place) for a in args[:2]), *args[2:], ignored, drawn_shift, f32)
    assert same_columns(got, exact)
    chosen = step_columns(torch.where(known, y, -1).to(place), -1, span[1] - span[0], sampler.to(place), f32, span[0])
    assert same_columns(chosen, sampling.plain_columns(torch.where(known, y, -1), *args, -1, drawn_shift, f32))
    assert torch.equal(exact.x_rows, torch.where(known, torch.arange(n), -1)) and torch.equal(exact.loss_weight.isnan(), (y != ignored) & ~known)
    wanted = max(int((y != ignored).sum()), 1)
    assert torch.equal(exact.loss_weight.nan_to_num(0.0), known / torch.tensor(wanted, dtype=f32))
    assert torch.equal(exact.w_rows[exact.target_column[known]], y[known] - span[0]) and exact.w_rows.lt(span[1] - span[0]).all()


# --- planted bugs ---

MUTANTS = {
    "the permutation forgets its key": ("(key + r * GOLDEN & MASK) ^ right", "(r * GOLDEN & MASK) ^ right"),
    "the step is forgotten": ("for word in (seed, step, block)", "for word in (seed, seed, block)"),
    "blocks share a permutation": ("for word in (seed, step, block)", "for word in (seed, step, step)"),
    "one more is always drawn": ("(mix(key ^ 0x5A5A5A5A) < s.extra_chance).long()", "1"),
    "the last classes are never drawn": ("first, last = start >> s.bits, -(-stop >> s.bits)", "first, last = start >> s.bits, stop >> s.bits"),
    "classes past the end are drawn": ("(slot < plain_drawn_count(key, s)) & (chosen >= start) & (chosen < stop)", "(slot < plain_drawn_count(key, s)) & (chosen >= start)"),
    "the inverse runs forward": ("key, s.bits, back=True)", "key, s.bits)"),
    "the step stands still": ("self.step.add_(1)", "pass"),
}


def sampler_fault(m):
    "A word on what a sampler does wrong"
    for rate, v in ((0.1, 2500), (0.37, 700), (0.5, 700)):  # the last draws the same number of each block
        sampler = m.NegativeSampler(rate, 3)
        last, total = None, 0
        for _ in range(30):
            sampler.advance()
            drawn = sampler(v)
            alive = drawn[drawn >= 0]
            if len(alive.unique()) != len(alive) or alive.max() >= v:
                return "a draw is no subset"
            at = sampler.find(torch.arange(v))
            if not torch.equal(drawn[at[at >= 0]], torch.arange(v)[at >= 0]) or (at >= 0).sum() != len(alive):
                return "a class is not found"
            if last is not None and len(set(alive.tolist()) & set(last.tolist())) > 1.5 * rate * len(alive) + 20:
                return "steps repeat"
            size = 2**sampler.strata.bits
            if v >= 2 * size and len(set((alive[alive < size]).tolist()) & set((alive[(alive >= size) & (alive < 2 * size)] - size).tolist())) > 3 * rate * rate * size + 20:
                return "blocks repeat"
            last, total = alive, total + len(alive)
        if abs(total / 30 / v - rate) > 0.004:
            return "the rate is wrong"
        if alive.max() < v - 60 / rate / 10 - 40:
            return "the last classes are missing"


def test_the_unchanged_source_passes(tmp_path):
    assert sampler_fault(planted(sampling, tmp_path, *unchanged(MUTANTS.values()))) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", MUTANTS)
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert fault_of(sampler_fault, sampling, tmp_path, *MUTANTS[bug]), f"no case notices that {bug}"


KERNEL_BUGS = {
    "rounds share a key": ("turn += 0x9E3779B9", "turn += 0"),
    "the inverse starts elsewhere": ("turn = key + ((ROUNDS - 1) * 0x9E3779B9 & 0xFFFFFFFF)", "turn = key"),
    "duplicates get two columns": ("earliest = tl.minimum(earliest, tl.min(tl.where(same, other[None, :], N), 1))", "earliest = earliest"),
    "drawn labels get another column": ("target_column = tl.where(drawn,", "target_column = tl.where(drawn & False,"),
    "the batch's classes are corrected": ("tl.store(shift_ptr + target_column, 0.0, mask=was_drawn)", "pass"),
    "rows count from 0": ("tl.where(own_column, y - start, -1)", "tl.where(own_column, y, -1)"),
    "the batch's dead name row 0": ("tl.where(own_column, y - start, live_row)", "tl.where(own_column, y - start, 0)"),
    "the dead that were drawn name row 0": ("tl.where(row < 0, live_row, row)", "tl.where(row < 0, 0, row)"),
    "ignored rows are kept": ("tl.where(known, batch_rows, -1), mask", "batch_rows, mask"),
    "ignored rows count": ("n += counts.to(tl.int32)", "n += (other < N).to(tl.int32)"),
    "labels out of range are ignored": ("tl.where(wanted, float(\"nan\"), 0.0)", "0.0"),
}


def columns_fault(m, place, g):
    "A word on what the kernels do otherwise than PyTorch"
    seed, step = torch.tensor(2**33 + 1), torch.tensor(4)
    for rate, n, span in [(0.37, 70, (0, 40)), (0.1, 60, (1234, 4000))]:
        y = torch.randint(*span, (n,), generator=g)
        y[3], y[5] = -1, 10**12
        args = strata_of(rate), *span, -1, 1.5, f32
        exact = sampling.plain_columns(y, seed, step, *args)
        if not same_columns(m.launch_columns(y.to(place), seed.to(place), step.to(place), *args), exact):
            return "columns"


def test_the_unchanged_kernels_pass(tmp_path, place):
    m = planted(sampling, tmp_path, *unchanged(KERNEL_BUGS.values()))
    assert not columns_fault(m, place, torch.Generator().manual_seed(0))


@pytest.mark.thorough
@pytest.mark.parametrize("bug", KERNEL_BUGS)
def test_a_bug_in_a_kernel_is_noticed(bug, tmp_path, place):
    find = partial(columns_fault, place=place, g=torch.Generator().manual_seed(0))
    assert fault_of(find, sampling, tmp_path, *KERNEL_BUGS[bug]), f"no case notices that {bug}"
