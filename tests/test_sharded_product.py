"""Classes over ranks by product: ranks played by one process in both forms, offsets that fail on one of them, the choice of the method, planted bugs."""
import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import fusedloss as fl
import fusedloss.sharded_product as sharded_product
from fusedloss import product
from fusedloss.core import hopper
from fusedloss.core.hopper import IN_TURN
from fusedloss.core.options import LossOptions
from fusedloss.core.ranks import RankTokens, shard_range, Shards
from workbook.measure import peak_memory, relative_error
from grids import few, thorough_but
from helpers import INTERPRETED, everywhere, has_no_second_derivative, interpreted, need_kernels, planted, unchanged
from test_product import launch_on_cpu

bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
HOW = {"plain": {}, "scaled": dict(logit_scale=0.5), "z-loss": dict(z_loss=0.1), "both": dict(logit_scale=1.5, z_loss=0.03)}


class Rank(Shards):
    "One of several ranks that one process plays"
    rank = property(lambda self: round(self.group[0]))
    ranks = property(lambda self: self.group[1])


def sample(dtype=f64, n=23, v=29, h=8):
    "x, w, y, class weights, token weights, a denominator; every fifth token is ignored"
    made = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, h, generator=made, dtype=f64).to(dtype) for size in (n, v))
    at = torch.arange(n)
    y = torch.where(at % 5 == 4, -100, torch.where(at % 3 == 0, 7, at * 37) % v)
    wide = f64 if dtype == f64 else f32
    return x, w, y, torch.linspace(0.5, 2, v, dtype=wide), torch.linspace(-1, 2, n, dtype=wide), torch.tensor(7.5, dtype=wide)


def exact(x, w, y, weight, token_weight, denominator, o):
    "Losses, dx, dw in float64, of all classes"
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    z, double = x @ w.T * o.logit_scale, lambda t, other: other if t is None else t.double()
    each = F.cross_entropy(z, y, double(weight, None), reduction="none")
    each = each + torch.where(y == -100, 0.0, o.z_loss * z.logsumexp(1) ** 2)
    losses = each * double(token_weight, 1.0) / double(denominator, 1.0)
    return losses.detach(), *torch.autograd.grad(losses.sum(), (x, w))


def played(data, o, ranks=3, rows=10, form=None, module=sharded_product, needs=(True, True)):
    "Losses of the last rank, dx of all ranks, dw of all classes: each rank's numbers are written down, then each runs with those of all"
    x, w, y, *given = data
    shards = [Rank(len(w), r.start, r.stop, (k, ranks)) for k in range(ranks) for r in [shard_range(len(w), ranks, k)]]
    told = [[] for _ in shards]

    def run(s, arrivals):
        t = module.Tokens(x, y, module.labels_here(y, s, o.ignore_index), *given, o, len(w))

        def start(numbers, s):
            told[s.rank].append(numbers.clone())
            at = len(told[s.rank]) - 1 if arrivals is None else next(arrivals)
            return lambda: torch.stack([told[s.rank if arrivals is None else k][at] for k in range(ranks)])
        patch = pytest.MonkeyPatch()
        patch.setattr(module, "start_gather", start)
        def send(dx, b, s):
            sent = dx.clone()
            return lambda: sent
        patch.setattr(module, "reduce_scatter_rows", send)
        try:
            return module.run_over_ranks(t, w[s.start:s.stop], needs, rows, RankTokens(True, len(x), len(x)), s, form)
        finally:
            patch.undo()
    for s in shards:
        run(s, None)
    found = [run(s, iter(range(-(-len(x) // rows)))) for s in shards]
    dx = sum(sums.home().double() for _, sums in found) if needs[0] else None
    dw = torch.cat([sums.dw for _, sums in found]) if needs[1] else None
    if not all(torch.equal(losses.nan_to_num(7.0), found[0][0].nan_to_num(7.0)) for losses, _ in found):
        raise RuntimeError("losses of ranks differ")
    return found[-1][0], dx, dw


def errors(found, wanted):
    return [relative_error(a, b) for a, b in zip(found, wanted, strict=True)]


# --- in PyTorch ---

@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 31])
def test_loss_and_gradients(how, ranks):
    x, w, y, *given = sample()
    for some in (given, (None, None, None)):
        data, o = (x, w, y, *some), LossOptions(**HOW[how])
        assert max(errors(played(data, o, ranks), exact(*data, o))) < 1e-12


@pytest.mark.parametrize("rows", [1, 8, 23, 100])
def test_chunks_of_any_size(rows):
    data, o = sample(), LossOptions(z_loss=0.1)
    assert max(errors(played(data, o, rows=rows), exact(*data, o))) < 1e-12


def test_gradients_that_nobody_wants_are_not_made():
    data, o = sample(), LossOptions()
    losses, dx, dw = exact(*data, o)
    only_x, only_w, none = (played(data, o, needs=needs) for needs in ((True, False), (False, True), (False, False)))
    assert only_x[2] is None and only_w[1] is None and none[1:] == (None, None)
    assert max(errors((only_x[0], only_x[1], only_w[2], none[0]), (losses, dx, dw, losses))) < 1e-12


def test_a_token_that_does_not_count_may_be_no_number():
    data, o = sample(), LossOptions()
    wanted = exact(*data, o)
    data[0][data[2] == -100] = math.nan
    found = played(data, o)
    assert max(errors(found, wanted)) < 1e-12 and (found[1][data[2] == -100] == 0).all()


@pytest.mark.parametrize("label", [-1, 29, 2**40])
def test_a_label_outside_the_classes_has_no_loss_and_no_gradient(label):
    data = sample()
    assert len(data[1]) == 29
    data[2][11] = label
    losses, *found = played(data, LossOptions())
    data[2][11] = -100
    _, *wanted = played(data, LossOptions())
    assert losses.isnan().nonzero().tolist() == [[11]] and max(errors(found, wanted)) < 1e-12


def far_scores(far, at, dtype=f64, **sizes):
    "One class, which its rank's offsets do not look at, has a score far from all others'"
    x, w, *others = sample(dtype, **sizes)
    x[:, 0], w[:, 0] = 1.0, 0.0 if far > 0 else -far
    w[at, 0] = abs(far) if far > 0 else 0.0
    return x, w, *others


@pytest.mark.parametrize("at", [3, 13, 28])  # of the classes of three ranks, 10, 10 and 9
@pytest.mark.parametrize("far", [300.0, -300.0])
def test_an_offset_that_fails_on_one_rank_is_made_again(far, at, monkeypatch):
    monkeypatch.setattr(product, "SAMPLED", 2)  # the first class of a rank, and its fifth or sixth
    again, maxima = [], sharded_product.maxima
    monkeypatch.setattr(sharded_product, "maxima", lambda k: again.append(len(k.w)) or maxima(k))
    data = far_scores(far, at)
    assert max(errors(played(data, LossOptions(), rows=23), exact(*data, LossOptions()))) < 1e-10
    assert again == ([[10, 10, 9][at // 10]] * 2 if far > 0 else []), "in both runs, on the rank that owns the class"


def losses_beside_minus_infinity(module=sharded_product):
    "Losses where all scores of the first rank are -inf, and all others far below 0; and what they should be"
    x, w, y, *_ = sample()
    x[:, 0], w[:, 0] = 1.0, -3000.0
    w[:10, 0] = -math.inf
    y = torch.where(y == -100, y, 10 + y % 19)
    wanted = exact(x, w[10:], torch.where(y == -100, y, y - 10), None, None, None, LossOptions())
    return played((x, w, y, None, None, None), LossOptions(), module=module), wanted


def test_a_rank_whose_scores_are_all_minus_infinity():
    (losses, dx, dw), (wanted, wanted_dx, wanted_dw) = losses_beside_minus_infinity()
    assert_close((losses, dx[:, 1:], dw[10:]), (wanted, wanted_dx[:, 1:], wanted_dw))


def infinite_scores(dtype=f64, **sizes):
    "One class of the last rank scores +inf with some rows"
    x, w, *others = sample(dtype, **sizes)
    w[-1, 0] = math.inf
    return x, w, *others


def test_an_infinite_score_is_no_number_on_any_rank():
    data = infinite_scores()
    found, wanted = played(data, LossOptions())[0], exact(*data, LossOptions())[0]
    assert 5 < wanted.isnan().sum() < 20 and torch.equal(found.isnan(), wanted.isnan())


def test_the_same_bits_in_every_run():
    data, o = sample(f32), LossOptions(z_loss=0.1)
    assert all(torch.equal(a, b) for a, b in zip(played(data, o), played(data, o)))


def test_a_confident_target_on_another_rank_keeps_its_digits():
    "1 - p of the target comes from the sum of the others, which is exact however small it is"
    x, w = torch.full((1, 1), 100.0), torch.tensor([[0.85], [1.0], [0.89]])
    data = x, w, torch.tensor([1]), None, None, None
    found, wanted = played(data, LossOptions()), exact(*data, LossOptions())
    assert all(a < b for a, b in zip(errors(found, wanted), (1e-2, 1e-4, 1e-4)))


# --- the kernels, interpreted ---

def chunk_with_sums(o, module):
    "A chunk of a rank whose exponentials are there, in three tiles, and its tokens"
    x, w, y, *given = sample(f32)
    y[11] = len(w) + 3
    s = Rank(len(w), 10, 20, (1, 3))
    t = module.Tokens(x, y, module.labels_here(y, s, -100), *given, o, len(w))
    k = module.rooms_of(t, w[10:20], len(x), None)[0].of(slice(0, len(x)), None)
    product.reference_exponentials(k.room, k.x, k.w, k.y, k.offsets, k.log2_scale)
    return k._replace(room=k.room._replace(sums=torch.cat([k.room.sums / 4, k.room.sums / 4, k.room.sums / 2]))), t


def numbers_faults(module):
    "What the kernel of the three numbers gets wrong: numbers, failures, or what nobody wanted"
    k, _ = chunk_with_sums(LossOptions(logit_scale=0.5), module)
    known, elsewhere = ((k.y >= 0).nonzero()[0], (k.y == -1).nonzero()[0])
    found, wrong = [], []
    for away, share in ((0.0, 1.0), (-200.0, 1.0), (200.0, 0.0), (math.inf, 1.0)):  # as it is; a target far above the offset; no score for a token that counts; an infinite one
        k.offsets[known] += away
        k.room.sums[:, elsewhere] *= share
        for fill in (module.launch_numbers, sharded_product.reference_numbers):
            numbers, failed = torch.full((3, len(k.y)), math.nan), torch.zeros((), dtype=torch.int32)
            fill(numbers, failed, k)
            found.append((numbers, failed))
        (a, failed), (b, expected) = found[-2:]
        wrong += ["numbers"] * (not torch.allclose(a, b, equal_nan=True)) + ["failed"] * bool(failed != expected)
    blank = torch.full((3, len(k.y)), math.nan)
    module.launch_numbers(blank, failed, k, torch.zeros((), dtype=torch.int32), 4, 2)
    wrong += ["written though not wanted"] * (not blank.isnan().all())
    module.launch_numbers(blank, failed, k, torch.ones((), dtype=torch.int32), 4, 2)
    return wrong + ["numbers of other blocks"] * (not torch.allclose(blank, found[-1][0], equal_nan=True))


def merge_faults(how, module):
    "What the kernel of losses and coefficients gets wrong"
    _, t = chunk_with_sums(LossOptions(**HOW[how]), module)
    n, made = len(t.y), torch.Generator().manual_seed(1)
    parts = torch.rand(4, 3, n, generator=made) * 5 + 1
    parts[2, 0], parts[2, 1] = -math.inf, 0.0
    found, wanted = (module.Merged(*torch.full((3, n), math.nan)) for _ in range(2))
    module.launch_merge(found, parts, 1, t, 8)
    sharded_product.reference_merge(wanted, parts, 1, t)
    return [name for name, a, b in zip(found._fields, found, wanted) if not torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)]


@interpreted
def test_numbers_by_the_kernel():
    assert numbers_faults(sharded_product) == []


@interpreted
@pytest.mark.parametrize("how", HOW)
def test_merging_by_the_kernel(how):
    assert merge_faults(how, sharded_product) == []


def by_kernels(data, o, monkeypatch, **how):
    "All of the launched form; the product by hand runs thread by thread"
    everywhere(monkeypatch, hopper, "launch_form", launch_on_cpu)
    return played(data, o, form=IN_TURN, **how)


LAUNCHED = {"two ranks": dict(ranks=2), "a rank without classes": dict(ranks=4, v=9), "one chunk": dict(ranks=2, rows=64)}


@interpreted
@pytest.mark.parametrize("case", thorough_but(few(LAUNCHED, "two ranks", "a rank without classes"), "two ranks"))
def test_the_launched_form(case, monkeypatch):
    how = {"v": 300, "rows": 16, **LAUNCHED[case]}
    data, o = sample(bf16, n=20, v=how.pop("v"), h=64), LossOptions(logit_scale=0.2, z_loss=0.03)
    found = by_kernels(data, o, monkeypatch, **how)
    assert all(a < b for a, b in zip(errors(found, exact(*data, o)), (1e-5, 8e-3, 8e-3)))  # dw of few classes is rounded with each chunk, and with its targets


@interpreted
def test_the_launched_form_of_infinite_scores(monkeypatch):
    data = infinite_scores(bf16, n=20, v=40, h=64)
    found = by_kernels(data, LossOptions(), monkeypatch, ranks=2, rows=32)[0]
    assert torch.equal(found.isnan(), exact(*data, LossOptions())[0].isnan()) and 2 < found.isnan().sum() < 20


@interpreted
@pytest.mark.parametrize("at", thorough_but([31, 290], 290))
def test_the_launched_form_makes_an_offset_again(at, monkeypatch):
    data, o = far_scores(300.0, at, bf16, n=20, v=300, h=64), LossOptions(logit_scale=0.5)
    monkeypatch.setattr(product, "SAMPLED", 2)
    found = by_kernels(data, o, monkeypatch, ranks=2, rows=32)
    wanted = exact(*data, o)
    part = lambda loss, *gradients: (loss, *(g[:, 1:] for g in gradients))  # what is left of large numbers in the first column has lost digits
    assert all(a < b for a, b in zip(errors(part(*found), part(*wanted)), (1e-4, 8e-3, 8e-3)))


# --- a call ---

def call(method, data, g=1.0, **options):
    x, w, y = data
    leaves = [t.detach().clone().requires_grad_() for t in (x, w)]
    loss = fl.sharded_linear_cross_entropy(*leaves, y, method=method, **options)
    return loss.detach(), *torch.autograd.grad(loss, leaves, torch.tensor(g, dtype=loss.dtype))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype, limit", [(f64, 1e-12), (f32, 1e-5), (bf16, 8e-3)], ids=str)
def test_one_process_is_its_own_rank(reduction, dtype, limit):
    x, w, y, weight, token_weight, _ = sample(dtype)
    options = dict(reduction=reduction, weight=weight, token_weight=token_weight.abs(), logit_scale=0.5, z_loss=0.1)
    found, wanted = (call(method, data, -2.5, **options) for method, data in (("product", (x, w, y)), ("recompute", (x.double(), w.double(), y))))
    assert found[1].dtype == found[2].dtype == dtype and max(errors(found, wanted)) < limit


def test_upstream_gradients_twice():
    x, w, y, *_ = sample()
    x.requires_grad_()
    loss = fl.sharded_linear_cross_entropy(x, w, y, method="product")
    first, = torch.autograd.grad(3 * loss, x, retain_graph=True)
    second, = torch.autograd.grad(loss, x)
    assert_close(first, 3 * second)


def test_a_gradient_of_a_gradient_raises():
    x, w, y, *_ = sample()
    x.requires_grad_()
    assert has_no_second_derivative(fl.sharded_linear_cross_entropy(x, w, y, method="product"), x)


def test_without_gradients_and_without_tokens():
    x, w, y, *_ = sample()
    wanted = fl.sharded_linear_cross_entropy(x, w, y)
    assert_close(fl.sharded_linear_cross_entropy(x, w, y, method="product"), wanted)
    with torch.no_grad():
        assert_close(fl.sharded_linear_cross_entropy(x.clone().requires_grad_(), w, y, method="product"), wanted)
    loss, dx, dw = call("product", (x[:0], w, y[:0]))
    assert loss == 0 and dx.shape == (0, 8) and (dw == 0).all()


LACKS = {"reduction": dict(reduction="none"), "linear_bias": dict(linear_bias=torch.zeros(29, dtype=f64)), "return_stats": dict(return_stats=True),
         "label_smoothing": dict(label_smoothing=0.1), "softcap": dict(softcap=5.0)}


@pytest.mark.parametrize("name", LACKS)
def test_what_it_lacks_is_named_and_goes_by_recompute(name, monkeypatch):
    data = sample()[:3]
    with pytest.raises(ValueError, match=rf"{name}: expected .* for method='product' over ranks"):
        fl.sharded_linear_cross_entropy(*data, method="product", **LACKS[name])
    monkeypatch.setattr(sharded_product, "kernel_everywhere", lambda x, s: True)
    fl.sharded_linear_cross_entropy(data[0].requires_grad_(), *data[1:], **LACKS[name])


def test_half_precision_without_range_is_refused():
    x, w, y, *_ = sample(f32)
    with pytest.raises(ValueError, match="input: expected bfloat16, float32 or float64 for method='product' over ranks, got torch.float16"):
        fl.sharded_linear_cross_entropy(x.half(), w.half(), y, method="product")


def taken(monkeypatch, usable, **how):
    "Whether a call goes by product where the kernel is usable, or not"
    x, w, y, *_ = sample()
    gone = []
    real = sharded_product.product_over_ranks
    monkeypatch.setattr(sharded_product, "product_over_ranks", lambda *args: gone.append(1) or real(*args))
    monkeypatch.setattr(sharded_product, "kernel_everywhere", lambda x, s: usable)
    monkeypatch.setattr(sharded_product, "usable_product", lambda x, w: None)
    graded = how.pop("graded", True)
    fl.sharded_linear_cross_entropy(x.requires_grad_(graded), w, y, **how)
    return bool(gone)


def test_auto_takes_it_where_the_kernel_is_and_gradients_are_wanted(monkeypatch):
    assert taken(monkeypatch, True) and not taken(monkeypatch, False)
    assert not taken(monkeypatch, True, graded=False) and not taken(monkeypatch, True, method="recompute")
    assert taken(monkeypatch, False, method="product")
    assert not taken(monkeypatch, True, label_smoothing=0.1)


def test_auto_rounds_dw_at_most_so_often(monkeypatch):
    monkeypatch.setattr(sharded_product, "MOST_WITHOUT_TARGETS", 3)
    row = sharded_product.chunk_row(8, 29, f64, IN_TURN.classes)
    assert taken(monkeypatch, True, memory_budget=8 * row) and not taken(monkeypatch, True, memory_budget=7 * row)


def test_a_budget_holds_and_changes_nothing():
    made = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, 8, generator=made).requires_grad_() for size in (64, 5000))
    y, budget = torch.randint(5000, (64,), generator=made), 2**20
    run = lambda **how: torch.autograd.grad(fl.sharded_linear_cross_entropy(x, w, y, method="product", **how), [x, w])
    assert sharded_product.chunk_rows(64, 8, 5000, f32, budget, None) < 16
    peak = peak_memory(lambda: run(memory_budget=budget))
    assert peak < budget + 2 * (x.nbytes + w.nbytes) + 2**16, peak
    for a, b in zip(run(memory_budget=budget), run()):
        assert_close(a, b, rtol=1e-4, atol=1e-6)


# --- planted bugs ---

WANTED = """if tl.load(wanted_ptr) == 0: return
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    keep = rows < B
    y = tl.load(y_ptr + rows, mask=keep, other=out)"""
MUTANTS = {
    "an infinite score is lost": ("torch.where(lost, torch.nan, k.room.sums.sum(0))", "k.room.sums.sum(0)"),
    "an infinite score is lost by the kernel": ('tl.where((y != out) & (offset == float("inf")), float("nan"), tl.sum(parts, 0))', "tl.sum(parts, 0)"),
    "a rank's own sum for all": ("s = (share * parts[:, SUM]).sum(0)", "s = share[rank] * parts[rank, SUM]"),
    "sums added at different heights": ("share = (parts[:, OFFSET] - offset).exp2()", "share = torch.ones_like(parts[:, OFFSET])"),
    "coefficients relative to another rank's offset": ("of(scale * (by_class + rise) * share[rank])", "of(scale * (by_class + rise))"),
    "every rank adds the target": ("torch.where(t.here >= 0, of(scale * (rise * e_t - by_class * s)), 0.0)", "of(scale * (rise * e_t - by_class * s))"),
    "the room of the chunk before": ("rooms[at % len(rooms)] if rooms", "rooms[0] if rooms"),
    "dx sent before its last chunk": ("sums.spend(k, m, i, i.stop == n, scale)", "sums.spend(k, m, i, i.start == 0, scale)"),
    "dw of the last chunk alone": ("put_dw(self.dw, k, m, i.start > 0, scale)", "put_dw(self.dw, k, m, False, scale)"),
    "targets left out of dw": ("if sums.dw is not None and rooms: add_targets", "if False: add_targets"),
    "offsets that failed are kept": ("if again: k = k._replace(offsets=maxima(k))", "if again: break"),
    "a rank of no scores counts": ("torch.where(whole > 0, k.offsets, -torch.inf), s", "k.offsets, s"),
    "the kernel adds sums at different heights": ("share = tl.exp2(tl.load(at, mask=keep, other=0.0) - offset)", "share = 1.0"),
    "the kernel's own part is the first rank's": ("parts_ptr + 3 * rank * B + rows", "parts_ptr + rows"),
    "the kernel gives every rank the target": ("at_target = tl.where(here, scale * (rise * e_t - by_class * s), 0.0)", "at_target = scale * (rise * e_t - by_class * s)"),
    "the kernel's failures forget the target": ("whole = s + tl.where(here, tl.exp2(target - offset), 0.0)", "whole = s"),
    "the kernel writes what nobody wants": (WANTED, WANTED.replace("== 0: return", "== 9: return")),
}


def faults(module):
    "What is wrong with a module, in words"
    def off(data, o=LossOptions(), limit=1e-10, **how):
        return max(errors(played(data, o, module=module, **how), exact(*data, o)), default=0.0)
    patch, wrong = pytest.MonkeyPatch(), []
    everywhere(patch, product, "sampled_scores", lambda x, w, bias: F.linear(x, w[:1]))
    try:
        for name, data in (("ranks", sample()), ("far", far_scores(3000.0, 28))):
            error = off(data, LossOptions(z_loss=0.1))
            wrong += [name] * (not error < 1e-10)
    finally:
        patch.undo()
    losses, wanted = (found[0] for found in losses_beside_minus_infinity(module))
    wrong += ["minus infinity"] * (not torch.allclose(losses, wanted))
    lost = [found[0].isnan() for data in [infinite_scores()] for found in (played(data, LossOptions(), module=module), exact(*data, LossOptions()))]
    wrong += ["infinity"] * (not torch.equal(*lost))
    return wrong + (numbers_faults(module) + merge_faults("both", module) if INTERPRETED else [])


@pytest.mark.usefixtures("nan_in_new_memory")
def test_the_unchanged_source_passes(tmp_path):
    assert faults(planted(sharded_product, tmp_path, *unchanged(MUTANTS.values()))) == []


@pytest.mark.thorough
@pytest.mark.parametrize("bug", few(MUTANTS, "an infinite score is lost by the kernel", "sums added at different heights", "the room of the chunk before", "dx sent before its last chunk", "every rank adds the target",
                                    "the kernel's own part is the first rank's", "a rank of no scores counts"))
@pytest.mark.usefixtures("nan_in_new_memory")
def test_a_planted_bug_is_noticed(bug, tmp_path):
    if "kernel" in bug:
        need_kernels("cpu")
    try:
        assert faults(planted(sharded_product, tmp_path, *MUTANTS[bug])), "nothing noticed"
    except (RuntimeError, TypeError):
        return
