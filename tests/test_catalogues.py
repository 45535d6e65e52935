"""Heads of dot products: against their definition in float64, by kernels, their samples' statistics, hostile inputs, planted bugs."""
import copy
import io
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import fusedloss as fl
from fusedloss import partial_fc
from fusedloss.core import dots, operators, popularity
from fusedloss.core.popularity import PopularitySampler, expected_draws
from fusedloss.row_sparse import RowSparse
from workbook.measure import relative_error, saved_tensors
from grids import FULL, few, thorough_but
from head_cases import ADAMW, SGD, bf16, f16, f32, f64, kernels_for_all, place  # noqa: F401 (fixtures)
from helpers import everywhere, fault_of, has_no_second_derivative, planted, unchanged

V, H, N = 41, 6, 13
POPULARITY = 1 / torch.arange(1, V + 1, dtype=f64)


def batch(n=N, dtype=f64, device="cpu", v=V):
    "Features, labels of which some repeat and some are missing"
    made = torch.Generator().manual_seed(n)
    y = torch.randint(0, v, (n,), generator=made)
    y[1::4], y[2::7] = -1, 0
    return torch.randn(n, H, generator=made, dtype=f64).to(device, dtype).requires_grad_(), y.to(device)


def make_head(module=partial_fc, each_row=None, samples=9, log_q=True, dtype=f64, device="cpu", v=V, bias=True, **options):
    "A head whose weight and bias are drawn from a seed; without `each_row`, of other samplers or none"
    if each_row is not None:
        options["sampler"] = module.PopularitySampler(POPULARITY[:v], samples, each_row=each_row, log_q=log_q, seed=5)
    head = module.PartialFC(v, H, normalize=False, bias=bias, device=device, dtype=dtype, **options)
    made = torch.Generator().manual_seed(1)
    for p in head.parameters():
        p.data.copy_(torch.randn(p.shape, generator=made, dtype=f64))
    return head


def counts_of(head, y):
    "How often each class is among each row's negatives: [N,V], and the logs that are subtracted [V]"
    v, sampler, n = head.num_classes, head.sampler, len(y)
    if not isinstance(sampler, torch.nn.Module) or not head.training:
        counts, log_q = torch.ones(n, v), torch.zeros(v)
    elif hasattr(sampler, "num_samples"):
        drawn = sampler(n if sampler.each_row else 1).expand(n, -1).cpu()
        counts = F.one_hot(drawn + 1, v + 1).sum(1)[:, 1:]
        log_q = sampler.log_draws(torch.arange(v, device=sampler.line.device)) * sampler.log_q
        if sampler.num_samples == v:
            counts, log_q = torch.ones(n, v), torch.zeros(v)
    else:
        drawn = sampler(v).cpu()
        counts, log_q = torch.zeros(n, v), torch.zeros(v)
        counts[:, torch.cat([drawn[drawn >= 0], y[y >= 0].cpu()])] = 1
    own = F.one_hot(y.cpu().clamp(min=0), v).bool()
    return counts.masked_fill(own, 0).double(), log_q.double().cpu()


def definition(head, x, y):
    "The mean loss by its formula, in float64: negatives, their multiplicity and their corrections, from all scores"
    counts, log_q = counts_of(head, y)
    x, w = x.double().cpu(), head.weight.double().cpu()
    z = x @ w.T - log_q + (0 if head.bias is None else head.bias.double().cpu()[:, 0])
    y = y.cpu()
    rest = (z + counts.log().clamp(min=-1e5)).logsumexp(1)
    losses = F.softplus(rest - z.gather(1, y.clamp(min=0)[:, None])[:, 0], threshold=500)
    return torch.where(y >= 0, losses, 0.0).sum() / max(int((y >= 0).sum()), 1)


def gradients(head, loss, x):
    "dx and those of the parameters, dense"
    found = torch.autograd.grad(loss, [x, *head.parameters()])
    return [t.to_dense() if t.is_sparse else t for t in found]


CASES = {
    "all": {}, "a half": dict(sample_rate=0.5), "positives": dict(sample_rate="positives"), "all, no bias": dict(bias=False),
    "shared": dict(each_row=False), "shared, no correction": dict(each_row=False, log_q=False, bias=False), "shared, one": dict(each_row=False, samples=1),
    "shared, all": dict(each_row=False, samples=V), "shared, most": dict(each_row=False, samples=35), "shared, dense": dict(each_row=False, sparse=False), "one class": dict(each_row=False, v=1, samples=1),
    "each row": dict(each_row=True), "each row, no correction": dict(each_row=True, log_q=False, bias=False), "each row, one": dict(each_row=True, samples=1),
    "each row, all": dict(each_row=True, samples=V), "each row, dense": dict(each_row=True, sparse=False, bias=False), "two classes": dict(each_row=True, v=2, samples=1),
}


def fault(case, module=partial_fc, tolerance=1e-12, n=N, dtype=f64, device="cpu"):
    "A word on the first thing in which a head differs from its definition"
    head = make_head(module, dtype=dtype, device=device, **CASES[case])
    x, y = batch(n, dtype, device, head.num_classes)
    exact = make_head(module, **CASES[case])
    exact.load_state_dict({k: t.double() if t.is_floating_point() else t for k, t in head.state_dict().items()})
    xd = x.detach().double().cpu().requires_grad_()
    for _ in range(3):
        expected = definition(exact, xd, y)
        loss = head(x, y)
        for sampler in filter(None, (exact.sampler, head.sampler)):
            sampler.advance()
        if relative_error(loss.detach().cpu().double(), expected.detach()) > tolerance:
            return f"{case}: the loss is {loss.item():.6f}, not {expected.item():.6f}"
        for name, a, b in zip(("x", "weight", "bias"), gradients(head, 3 * loss, x), gradients(exact, 3 * expected, xd)):
            if a.dtype != dtype or (a.cpu().double() - b).abs().max() > tolerance * (1 + b.abs().max()):
                return f"{case}: the gradient of {name}"
    return None


@pytest.mark.parametrize("case", CASES)
def test_definition(case, device):
    assert fault(case, device=device) is None


@pytest.mark.parametrize("case,dtype", few(list(itertools.product(CASES, (f32, bf16, f16))), ("all", bf16), ("a half", f16), ("shared", f32), ("shared", bf16),
                                           ("shared", f16), ("each row", f32), ("each row", bf16), ("each row", f16)))
def test_definition_in_other_dtypes(case, dtype, device):
    assert fault(case, dtype=dtype, device=device, tolerance={f32: 1e-5, bf16: 0.03, f16: 4e-3}[dtype]) is None


@pytest.mark.parametrize("case", ["all", "a half", "shared", "shared, one", "shared, no correction"])
def test_definition_by_kernels(case, kernels_for_all):
    assert fault(case, dtype=f32, tolerance=1e-4) is None


@pytest.mark.parametrize("n", [1, 0])
@pytest.mark.parametrize("case", ["all", "shared", "each row"])
def test_few_rows(case, n):
    head = make_head(**CASES[case])
    x, y = batch(n)
    loss = head(x, y)
    torch.testing.assert_close(loss, definition(make_head(**CASES[case]), x, y))
    assert all(g.shape == p.shape for g, p in zip(gradients(head, loss, x), [x, *head.parameters()]))


@pytest.mark.parametrize("each_row", [False, True])
def test_all_classes_are_the_full_softmax(each_row):
    "Drawn as often as once each, whatever the popularity: the correction is 0, in the loss and in its gradients"
    x, y = batch(64)
    head = make_head(each_row=each_row, samples=V)
    z = x @ head.weight.T + head.bias[:, 0]
    loss, full = head(x, y), F.cross_entropy(z, y, ignore_index=-1)
    torch.testing.assert_close(loss, full)
    torch.testing.assert_close(gradients(head, loss, x), gradients(head, full, x))
    torch.testing.assert_close(head.eval()(x, y), full)


# --- the sample ---

@pytest.mark.parametrize("popularity,n", [(POPULARITY, 1), (POPULARITY, 11), (torch.ones(V), 7), (torch.tensor([1e9, 1.0, 1.0, 1e-9]), 2),
                                          (torch.arange(1, V + 1), V - 1), (torch.full((7,), 1 / 7), 7), (torch.rand(3000).square() + 1e-12, 700)])
def test_draws_are_as_popular(popularity, n):
    popularity = popularity.double()
    draws = expected_draws(popularity, n)
    assert draws.amax() <= 1 and math.isclose(draws.sum(), n, rel_tol=1e-9)
    loose = draws < 1
    assert not loose.any() or relative_error(draws[loose] / draws[loose].sum(), popularity[loose] / popularity[loose].sum()) < 1e-9
    assert loose.all() or not loose.any() or popularity[~loose].min() >= popularity[loose].max()
    sampler = PopularitySampler(popularity, n)
    told = sampler.log_draws(torch.arange(len(popularity))).exp()
    assert (told - draws).abs().max() < 1e-6 and (told > 0).all()


@pytest.mark.parametrize("n", [1, 6, 30])
def test_classes_come_as_often_as_is_told(n):
    "20 000 draws: each class within five standard deviations; in a row, none but the neighbours of a cut is drawn twice, and none thrice"
    rows, sampler = 20_000, PopularitySampler(POPULARITY, n, each_row=True, seed=8)
    drawn = sampler(rows)
    assert drawn.shape == (rows, n) and drawn.min() >= -1 and (drawn < 0).float().mean() < 1e-3
    counts = F.one_hot(drawn + 1, V + 1).sum(1)[:, 1:].double()
    told = sampler.log_draws(torch.arange(V)).exp()
    assert ((counts.mean(0) - told).abs() <= 5 * counts.std(0) / rows**0.5 + 1e-6).all()
    assert counts.amax() <= 2 and (counts.var(0) <= told + 0.02).all()


def test_steps_rows_and_seeds_draw_others():
    sampler = PopularitySampler(torch.ones(10_000), 500, each_row=True, seed=1)
    share = lambda a, b: torch.isin(a, b).double().mean()
    rows = sampler(3)
    sampler.advance()
    later, other = sampler(3), PopularitySampler(torch.ones(10_000), 500, seed=2)(3)
    assert all(share(a, b) < 0.12 for a, b in ((rows[0], rows[1]), (rows[0], later[0]), (rows[0], other[0])))  # 0.05 by chance
    torch.testing.assert_close(PopularitySampler(torch.ones(10_000), 500, seed=1)(1), rows[:1])


STEPS = 1500 if FULL else 500


@pytest.mark.parametrize("each_row", thorough_but([False, True], True))
def test_the_sum_of_the_other_classes_is_unbiased(each_row):
    "The mean over steps of what a step tells as `rest`, exponentiated, is the sum over all classes: within four standard errors"
    x, y = batch(16)
    x, y = x.detach() * 0.5, torch.where(y < 0, 3, y)
    head = make_head(each_row=each_row, samples=8, bias=True)
    with torch.no_grad():
        z = (x @ head.weight.T + head.bias[:, 0]).scatter(1, y[:, None], -torch.inf)
        sums = torch.stack([(head(x, y, return_stats=True)[1].rest.exp(), head.sampler.advance())[0] for _ in range(STEPS)])
    error = (sums.mean(0) - z.exp().sum(1)) / (sums.std(0) / len(sums) ** 0.5)
    assert error.abs().max() < 4 and head.sampler.step == STEPS
    biased = make_head(each_row=each_row, samples=8, log_q=False)
    with torch.no_grad():
        sums = torch.stack([biased(x, y, return_stats=True)[1].rest.exp() for _ in range(300)])
    assert ((sums.mean(0) - z.exp().sum(1)).abs() / (sums.std(0) / 300**0.5)).max() > 8


def test_equal_to_tensorflows_formula():
    "Candidates and target minus the log of their expected count, accidental hits out: the definition of sampled_softmax_loss"
    x, y = batch(30)
    y = y.clamp(min=0)
    head = make_head(each_row=False, samples=12)
    sampled, log_q = head.sampler()[0], head.sampler.log_draws(torch.arange(V))
    z = x @ head.weight.T + head.bias[:, 0] - log_q
    candidates = z[:, sampled].masked_fill(sampled == y[:, None], -1e9)
    expected = F.cross_entropy(torch.cat([z.gather(1, y[:, None]), candidates], 1), torch.zeros_like(y))
    torch.testing.assert_close(head(x, y), expected)


# --- what a head is ---

@pytest.mark.parametrize("each_row", [False, True])
def test_deterministic_and_continued_from_a_checkpoint(each_row):
    def run(head, steps):
        optimizer = RowSparse(SGD, head.parameters(), lr=0.1)
        x, y = batch(20)
        for _ in range(steps):
            optimizer.zero_grad()
            head(x, y).backward()
            optimizer.step()
        return head
    whole, half = run(make_head(each_row=each_row), 6), run(make_head(each_row=each_row), 3)
    torch.save(half.state_dict(), file := io.BytesIO())
    again = make_head(each_row=each_row)
    file.seek(0)
    again.load_state_dict(torch.load(file))
    assert {*half.state_dict()} == {"weight", "bias", "sampler.seed", "sampler.step"}
    for a, b in zip(whole.state_dict().values(), run(copy.deepcopy(again), 3).state_dict().values()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("each_row", [False, True])
@pytest.mark.parametrize("make", [lambda p: RowSparse(ADAMW, p, lr=0.1), lambda p: RowSparse(SGD, p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1),
                                  lambda p: torch.optim.SparseAdam(list(p), lr=0.1)])
def test_only_rows_that_were_scored_move(make, each_row):
    head = make_head(each_row=each_row, samples=5)
    x, y = batch()
    before, optimizer = copy.deepcopy(head.state_dict()), make(head.parameters())
    scored = torch.cat([head.sampler(N if each_row else 1)[(y >= 0) if each_row else slice(None)].flatten(), y]).unique()
    scored = scored[scored >= 0]
    head(x, y).backward()
    assert head.weight.grad.is_sparse and head.bias.grad.is_sparse and len(scored) < V
    index, rows = head.weight.grad_rows
    assert (rows >= 0).sum() == len(scored) and torch.equal(rows[rows >= 0].sort().values, scored)
    optimizer.step()
    still = torch.ones(V, dtype=torch.bool).index_fill(0, scored, False)
    for p, name in ((head.weight, "weight"), (head.bias, "bias")):
        assert torch.equal(p[still], before[name][still]) and (p != before[name]).any()


@pytest.mark.parametrize("each_row", [None, False, True])
def test_extend_and_remove(each_row):
    head = make_head(each_row=each_row, sparse=False)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1)
    x, y = batch()
    head(x, y).backward()
    optimizer.step()
    bias, moments = head.bias.detach().clone(), optimizer.state[head.bias]["exp_avg"].clone()
    assert head.extend(2, optimizer) == range(V, V + 2)
    head.remove([0, 5], optimizer)
    keep = [c for c in range(V) if c not in (0, 5)]
    assert torch.equal(head.bias[:-2], bias[keep]) and not head.bias[-2:].any() and torch.equal(optimizer.state[head.bias]["exp_avg"][:-2], moments[keep])
    head.remove([0], optimizer)
    if each_row is None:
        assert head(x, y.clamp(max=30)).isfinite()
        return
    with pytest.raises(ValueError, match="sampler: expected popularity of 40 classes, got 41"):
        head(x, y.clamp(max=30))
    assert head.sampler.step == 1
    head.sampler = PopularitySampler(POPULARITY[1:], 4, each_row=each_row)
    assert head(x, y.clamp(max=30)).isfinite()


@pytest.mark.parametrize("each_row", [False, True])
def test_a_sampler_follows_its_head(each_row, device):
    "One that the head is given, and one that takes its place later"
    head = make_head(each_row=each_row).to(device)
    x, y = batch(device=device)
    for _ in range(2):
        assert head(x, y).isfinite() and head.sampler.line.device == head.weight.device
        head.sampler = PopularitySampler(POPULARITY, 4, each_row=each_row)


def test_a_change_that_fails_has_changed_nothing():
    head = make_head()
    of_weight, before = torch.optim.AdamW([head.weight], lr=0.1), copy.deepcopy(head.state_dict())
    with pytest.raises(ValueError, match="optimizers"):
        head.extend(3, of_weight)  # it does not hold the bias
    assert head.num_classes == V and all(torch.equal(t, before[k]) for k, t in head.state_dict().items())


@pytest.mark.filterwarnings("ignore:the state dict has the weight alone")
def test_a_linear_layer_is_loaded():
    layer, head = torch.nn.Linear(H, V), make_head(each_row=False, dtype=f32)
    with pytest.warns(UserWarning, match="sampler.seed, sampler.step"):
        head.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, H)
    torch.testing.assert_close(head.logits(x), layer(x))
    torch.testing.assert_close(head.eval()(x), layer(x))
    best = head.topk(x, 4)
    torch.testing.assert_close(best.values, layer(x).topk(4).values)
    torch.testing.assert_close(layer(x).gather(-1, best.indices), best.values)
    with pytest.raises(RuntimeError, match="bias"):
        head.load_state_dict({"weight": layer.weight})
    cosines = fl.PartialFC(V, H, sample_rate=0.5)
    assert {*cosines.state_dict()} == {"weight", "sampler.seed", "sampler.step"}  # as ever


def test_statistics():
    x, y = batch(40)
    for each_row in (False, True):
        head = make_head(each_row=each_row)
        counts, log_q = counts_of(head, y)
        _, told = head(x, y, return_stats=True)
        z, known = (x @ head.weight.T + head.bias[:, 0]).detach(), y >= 0
        score = z.gather(1, y.clamp(min=0)[:, None])[:, 0]
        rivals = (z - log_q).masked_fill(counts == 0, -torch.inf)
        torch.testing.assert_close(told.cos, torch.where(known, score, 0.0))
        torch.testing.assert_close(told.rest[known], (rivals + counts.log().clamp(min=-1e5)).logsumexp(1)[known])
        leads = (score - log_q[y.clamp(min=0)])[known] > rivals.amax(1)[known]
        assert abs(told.accuracy - leads.double().mean()) < 0.06 if not each_row else told.accuracy == leads.double().mean()
        assert told.n_valid == known.sum() and not told.rest.requires_grad


# --- hostile ---

@pytest.mark.parametrize("case", ["all", "shared", "each row"])
def test_ignored_rows_and_extreme_scores(case):
    head = make_head(**CASES[case], dtype=f32)
    x, y = batch(dtype=f32)
    x = x.detach()
    x[1], x[0] = torch.nan, 1e4  # row 1 has no label
    x.requires_grad_()
    loss = head(x, y)
    found = gradients(head, loss, x)
    assert loss.isfinite() and all(g.isfinite().all() for g in found) and not found[0][1].any()
    nothing = head(x, torch.full_like(y, -1))
    assert nothing == 0 and not any(g.any() for g in gradients(head, nothing, x))


def test_a_class_that_is_not_a_number_reaches_its_rows_alone():
    head = make_head(each_row=True, samples=2)
    x, y = batch()
    drawn = head.sampler(N)
    touched = ((drawn == 7).any(1) | (y == 7)) & (y >= 0)
    head.weight.data[7] = torch.nan
    dx, _, _ = gradients(head, head(x, y), x)
    assert torch.equal(dx.isnan().any(1), touched) or not touched.any()


def test_labels_out_of_range():
    for each_row in (None, False, True):
        head = make_head(each_row=each_row)
        x, y = batch()
        with pytest.raises(IndexError, match="is 41: expected 0 ≤ label < 41"):
            head(x, y.index_fill(0, torch.tensor([0]), V))
        assert head.sampler is None or head.sampler.step == 0


def test_labels_out_of_range_unseen(monkeypatch):
    "As on a GPU, where nobody looks at labels: a NaN, and no access outside"
    everywhere(monkeypatch, partial_fc, "check_labels", lambda *args: None)
    for each_row in (None, False, True):
        x, y = batch()
        for wrong in (V, 10**9, -5):
            assert make_head(each_row=each_row)(x, y.index_fill(0, torch.tensor([0]), wrong)).isnan()


@pytest.mark.parametrize("options,match", [
    (dict(bias=True), "bias: expected False, or normalize=False, got True"), (dict(normalize=0.5), "normalize: expected True or False"),
    (dict(normalize=False, margin=fl.margins.CosFace()), "margin: expected None"), (dict(normalize=False, conflict=0.5), "conflict: expected None"),
    (dict(normalize=False, eps=0.1), "eps: expected 1e-05"), (dict(sampler=PopularitySampler(POPULARITY, 3)), "sampler: expected a NegativeSampler"),
    (dict(normalize=False, sampler=PopularitySampler(POPULARITY[1:], 3)), "sampler: expected popularity of 41 classes, got 40"),
    (dict(normalize=False, sampler=PopularitySampler(POPULARITY, 3), sample_rate=0.5), "sample_rate"), (dict(normalize=False, sampler="zipf"), "sampler: expected a Neg"),
    (dict(normalize=False, sampler=PopularitySampler(POPULARITY, 3, each_row=True), method="recompute"), "method: expected 'auto' or 'tiles'"),
])
def test_options_that_do_not_go_together(options, match):
    with pytest.raises(ValueError, match=match):
        fl.PartialFC(V, H, **options)


@pytest.mark.parametrize("args,match", [
    ((POPULARITY - 1, 3), "popularity: expected finite numbers above 0"), ((POPULARITY.log(), 3), "above 0"), ((POPULARITY / 0, 3), "popularity: expected finite"),
    ((torch.zeros(0), 3), r"popularity: expected shape \[V\], got \[0\]"), ((POPULARITY[None], 3), "popularity"), ((POPULARITY > 0, 3), "popularity: expected counts"),
    (([1, 2], 1), "popularity: expected a tensor"), ((POPULARITY, 0), "num_samples: expected an integer from 1 to 41"), ((POPULARITY, V + 1), "num_samples"),
    ((POPULARITY, 2.0), "num_samples"),
])
def test_samplers_that_cannot_be(args, match):
    with pytest.raises(ValueError, match=match):
        PopularitySampler(*args)


def test_what_goes_with_cosines_alone(tmp_path):
    with pytest.raises(ValueError, match="normalize: expected True"):
        fl.ShardedPartialFC(V, H, normalize=False)
    with pytest.raises(ValueError, match="sampler: expected a NegativeSampler"):
        fl.ShardedPartialFC(V, H, sampler=PopularitySampler(POPULARITY, 3))
    with pytest.raises(ValueError, match="head: expected one of cosines"):
        fl.save_insightface(make_head(), tmp_path / "files", 1)
    assert not (tmp_path / "files").exists()


# --- operators ---

@pytest.mark.parametrize("case", ["all", "shared", "each row"])
def test_operators_and_their_functions_give_the_same_bits(case, monkeypatch):
    x, y = batch(dtype=f32)
    results = []
    for looked_at in (True, False):
        everywhere(monkeypatch, operators, "observed", lambda: looked_at)
        head = make_head(**CASES[case], dtype=f32)
        loss = head(x, y)
        results.append([loss, *gradients(head, loss, x)])
    assert all(torch.equal(*pair) for pair in zip(*results))
    assert has_no_second_derivative(make_head(**CASES[case] | dict(sparse=False), dtype=f32)(x, y), x)


@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("bias", [True, False])
def test_operators_by_opcheck(bias, dtype):
    x, y = batch(dtype=f32)
    looks = ("test_schema", "test_faketensor")
    checked = lambda op, *given: torch.library.opcheck(op, op.arguments.flat(given), test_utils=looks) and op(*given)
    head = make_head(each_row=False, dtype=f32, bias=bias)
    c, r = (make(y, -1, head.sampler, f32) for make in (popularity.shared_columns, popularity.row_draws))
    given = x.detach(), head.weight.detach(), None if head.bias is None else head.bias.detach()
    for rows in ((c.x_rows, c.w_rows, c.grad_index, c.target_column, c.shift, 9), (c.x_rows, None, None, y, None, V)):
        lse, _, _, *saved = checked(dots.dot_lse, *given, *rows, dtype, False, True)
        saved[1] = saved[1] if len(saved[1]) else given[1]
        checked(dots.dot_lse_grad, lse, lse, lse, *saved, rows[3], rows[5], f32, f32, f32, False, True, bias, bias)
    lse, *_ = checked(dots.row_lse, *given, r.x_rows, r.classes, r.shift, r.place, r.grad_index, dtype, True)
    checked(dots.row_lse_grad, lse, lse, lse, *given, r.x_rows, r.classes, r.shift, r.place, len(r.grad_index), dtype, True, bias, bias)


@pytest.mark.parametrize("each_row", few([False, True], False))
def test_compiles_whole(each_row):
    x, y = batch(dtype=f32)
    head = make_head(each_row=each_row, sparse=False, dtype=f32)
    expected = gradients(head, head(x, y), x)
    head.sampler.used.zero_()
    torch._dynamo.reset()
    loss = torch.compile(head, backend="aot_eager", fullgraph=True)(x, y)
    torch.testing.assert_close(gradients(head, loss, x), expected)
    assert head.sampler.used == 1


@pytest.mark.parametrize("case", ["shared", "each row"])
def test_autocast(case, device):
    x, y = batch(dtype=f32, device=device)
    head = make_head(**CASES[case], dtype=f32, device=device)
    with torch.autocast(device, bf16):
        loss = head(x, y)
    assert loss.dtype == f32 and all(g.dtype == f32 for g in gradients(head, loss, x))
    assert relative_error(loss.detach(), definition(make_head(**CASES[case], dtype=f32), x, y).float().detach().to(device)) < 0.02


def test_memory_goes_with_the_sample(monkeypatch):
    "Shared: what is kept has no more rows than columns. Of each row: the draws, no gathered rows, and blocks as large as is said"
    v, n = 5000, 64
    x, y = torch.randn(n, 8, requires_grad=True), torch.arange(n)
    head = fl.PartialFC(v, 8, normalize=False, bias=True, sampler=PopularitySampler(torch.ones(v), 100))
    assert all(t.numel() <= (100 + n + 8) * 8 for t in saved_tensors(lambda: head(x, y), x, *head.parameters(), y))
    head.sampler = PopularitySampler(torch.ones(v), 100, each_row=True)
    assert all(t.numel() <= n * 101 for t in saved_tensors(lambda: head(x, y), x, *head.parameters(), y))
    expected = [t for t in gradients(head, head(x, y), x)]
    monkeypatch.setattr(dots, "GATHERED", 100 * 8 * 12 * 3)
    blocks = dots.row_blocks(x, head.weight, torch.zeros(n, 101))
    assert len(blocks) == 32 and blocks[0] == slice(0, 2)
    torch.testing.assert_close(gradients(head, head(x, y), x), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("case", ["all", "a half", "shared", "each row"])
def test_no_step_waits_for_the_host(case):
    x, y = batch(64, bf16, "cuda")
    head = make_head(**CASES[case], dtype=f32, device="cuda")
    optimizer = RowSparse(ADAMW, head.parameters(), lr=0.1)
    def step():
        head(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- planted bugs ---

BUGS = {
    "the correction has the wrong sign": ("shift = -sampler.log_draws(drawn)", "shift = sampler.log_draws(drawn)"),
    "targets are not corrected": ("return -sampler.log_draws(y).to(dtype)", "return 0 * sampler.log_draws(y).to(dtype)"),
    "what was drawn twice counts once": ("+ math.log(2) * twice.roll(-1)", ""),
    "what was drawn twice stands twice": ("shift = drawn.masked_fill(twice, -1), shift.masked_fill(twice, -torch.inf)", "shift = drawn, shift"),
    "accidental hits stay": ("(drawn == y[:, None]) | (y < 0)[:, None]", "(y < 0)[:, None]"),
    "a shared target stays": ("inside = columns[:n_shared], torch.where(target_column < n_shared, target_column, -1)", "inside = columns[:n_shared], target_column * 0 - 1"),
    "others' targets are negatives": ("n_shared = shared_columns(y, head.ignore_index, sampler, sums), sampler.num_samples",
                                      "n_shared = (c := shared_columns(y, head.ignore_index, sampler, sums))._replace(shift=F.pad(c.shift, (0, len(c.w_rows) - len(c.shift)))), len(c.w_rows)"),
    "targets get no bias": ("    if len(biases): z = z + biases[at]\n", ""),
    "negatives get no bias": ("torch.where(shift == -torch.inf, shift, biases[:n_shared] + shift)", "shift"),
    "a column's bias is another's": ("biases = taken_rows(bias, w_rows, dtype)[:, 0] -", "biases = taken_rows(bias, w_rows, dtype)[:, 0].flip(0) -"),
    "the bias has no gradient": ("biases[rows] = column_sums(dz)", "pass"),
    "own columns bring x nothing": ("dx += g[:, None] * wide(columns[target_column.clamp(min=0)])", "pass"),
    "own columns go to one row": ("(target_column - n_shared).clamp(min=0)", "(target_column - n_shared).clamp(min=0, max=0)"),
    "own biases stay": ("biases[n_shared:] = add_rows(n, place, g)", "pass"),
    "rows are of another place": ("scatter_(0, order, rank)", "scatter_(0, order.flip(0), rank)"),
    "ignored rows count": ("g_score = torch.where(classes[:, -1] >= 0, g_score, 0.0)", "g_score = g_score + 1"),
    "a row's bias is forgotten": ("z if bias is None else z + (bias[at, 0].to(z.dtype) - level)", "z"),
    "certain classes are missed": ("torch.cat([self.certain.expand(rows, -1), drawn], 1)", "torch.cat([0 * self.certain.expand(rows, -1) - 1, drawn], 1)"),
}
PROBES = ["all", "shared", "shared, most", "shared, all", "shared, no correction", "each row", "each row, all"]


def first_fault(module):
    return next((found for case in PROBES for n in (N, 60) if (found := fault(case, module, n=n))), None)


def test_the_unchanged_source_passes(tmp_path):
    assert first_fault(planted(partial_fc, tmp_path, *unchanged(BUGS.values()))) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert fault_of(first_fault, partial_fc, tmp_path, *BUGS[bug]), f"no case notices that {bug}"


def test_draws_lie_on_a_line_and_classes_are_found_once():
    line = popularity.line_of(torch.tensor([1, 0.25, 0.25, 0.5], dtype=f64), 1)
    assert (line.diff(prepend=torch.zeros(1, dtype=torch.int64)) > 0).tolist() == [False, True, True, True] and line[-1] <= 2**32
    rows, places = popularity.distinct(torch.tensor([[5, -1, 2], [2, 7, 5]]), 9)
    assert rows.tolist() == [2, 5, 7, -1, -1, -1] and places.tolist() == [[1, 0, 0], [0, 2, 1]]
