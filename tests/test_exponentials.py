"""A loss whose product leaves exponentials: against float64, kernels against their references, the method among the others, planted bugs."""
import logging
import math

import pytest
import torch
import torch.nn.functional as F

import fusedloss as fl
from fusedloss import product
from fusedloss.chunks import Gradients
from fusedloss.core import hopper, score_product
from fusedloss.core.architectures import ScoreProduct
from fusedloss.core.checks import acc_dtype
from fusedloss.core.devices import CPU
from fusedloss.core.options import LossOptions
from workbook.measure import relative_error
from grids import few, grid
from helpers import everywhere, interpreted, need_kernels, planted, unchanged, where_kernels_run
from test_product import launch_on_cpu

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
N, V, H = 37, 71, 16
HOW = {"plain": {}, "scaled": dict(logit_scale=0.5), "z-loss": dict(z_loss=0.1), "both": dict(logit_scale=1.5, z_loss=0.03)}
SHAPED = HOW | {"capped": dict(softcap=2.0), "capped, scaled, z-loss": dict(softcap=3.0, logit_scale=1.5, z_loss=0.03),
                "smoothed": dict(label_smoothing=0.1), "smoothed, scaled, z-loss": dict(label_smoothing=0.3, logit_scale=0.7, z_loss=0.03)}
on_hopper = pytest.mark.skipif(not HOPPER, reason="no GPU of compute capability 9.0")


def sample(dtype=f32, n=N, v=V, h=H, device="cpu", scale=1.0):
    "x, w, y, class weights, token weights, a denominator"
    made = torch.Generator().manual_seed(0)
    x, w = (scale * torch.randn(size, h, generator=made, dtype=f64).to(device, dtype) for size in (n, v))
    at = torch.arange(n, device=device)
    y = torch.where(at % 5 == 4, -100, torch.where(at % 3 == 0, 7, at * 37 % v))
    given = torch.linspace(0.5, 2, v), torch.linspace(-1, 2, n), torch.tensor(7.5)
    return x, w, y, *(t.to(device, acc_dtype(dtype)) for t in given)


def exact(x, w, y, weight, token_weight, denominator, o, b=None):
    "Losses, dx, dw and, with a bias, db in float64"
    x, w, *bias = leaves = [t.detach().double().requires_grad_() for t in (x, w, b) if t is not None]
    z = F.linear(x, w, *bias) * o.logit_scale
    z = o.softcap * torch.tanh(z / o.softcap) if o.softcap else z
    each = F.cross_entropy(z, y, None if weight is None else weight.double(), reduction="none", label_smoothing=o.label_smoothing)
    each = each + torch.where(y == -100, 0.0, o.z_loss * z.logsumexp(1) ** 2)
    losses = each * (1.0 if token_weight is None else token_weight.double()) / (1.0 if denominator is None else denominator.double())
    return losses.detach(), *torch.autograd.grad(losses.sum(), leaves)


def ours(x, w, y, *given, rows=10, form=None, module=product, wide=False, b=None):
    grads = Gradients(x, w, (True, True, b is not None), x.dtype, wide, 1.0)
    losses = module.run_exponentials(x, w, y, *given, rows, grads, form, b)
    return losses, grads.dx, grads.rounded_dw(), *[grads.db] * (b is not None)


def some_bias(like, v, size=1.0):
    return (size * torch.linspace(-1, 1, v).sin() * torch.arange(v).cos()).to(like)


def errors(found, wanted) -> list[float]:
    return [relative_error(a, b) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("how", SHAPED)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype, limit", [(f64, 1e-12), (f32, 1e-5), (bf16, 4e-3)], ids=str)
def test_loss_and_gradients(how, biased, dtype, limit):
    x, w, y, *given = sample(dtype)
    o, b = LossOptions(**SHAPED[how]), some_bias(x, V) if biased else None
    for some in (given, (None, None, None)):
        assert max(errors(ours(x, w, y, *some, o, b=b), exact(x, w, y, *some, o, b))) < limit


@pytest.mark.parametrize("how", ["plain", "both", "smoothed"])
def test_a_bias_of_a_million_costs_no_digits(how):
    x, w, y, *given = sample()
    x, w, b = (4 * x).round() / 4, (4 * w).round() / 4, torch.full((V,), 1e6)
    o = LossOptions(**SHAPED[how] | dict(z_loss=0.0))
    assert max(errors(ours(x, w, y, *given, o, b=b), exact(x, w, y, *given, o, b))) < 1e-5


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_a_cap_that_all_scores_reach(size):
    x, w, y, *given = sample(f64)
    o = LossOptions(softcap=30.0)
    found, wanted, single = (of(x * size, w, y, *given, o) for of in (ours, exact, lambda x, *others: ours(x.float(), w.float(), *others[1:])))
    assert all((a - b).abs().max() <= 1e-10 * max(1.0, b.abs().max()) for a, b in zip(found, wanted))
    assert relative_error(single[0], wanted[0]) < 1e-5 and all(t.isfinite().all() for t in single)


@pytest.mark.parametrize("how", ["plain", "capped"])
def test_a_bias_may_take_classes_out(how):
    x, w, y, *given = sample()
    b, o = some_bias(x, V), LossOptions(**SHAPED[how])
    b[[5, 69]] = -math.inf
    assert not torch.isin(y, torch.tensor([5, 69])).any()
    found, wanted = (of(x, w, y, *given, o, b=b) for of in (ours, exact))
    assert max(errors(found, wanted)) < 1e-5 and (how == "capped" or not found[3][[5, 69]].any())


def test_an_ignored_token_that_is_no_number_smoothed():
    x, w, y, *given = sample()
    o, b = LossOptions(label_smoothing=0.2), some_bias(x, V)
    wanted = exact(x, w, y, *given, o, b)
    x[y == -100] = math.nan
    assert max(errors(ours(x, w, y, *given, o, b=b), wanted)) < 1e-5


@pytest.mark.parametrize("wide", [False, True])
def test_few_tokens_and_one_class(wide):
    for n, v in ((1, 1), (3, 1), (1, 9), (0, 5)):
        x, w, y, *_ = sample(n=n, v=v)
        y = torch.zeros_like(y)
        for how in ("capped", "smoothed"):
            o, b = LossOptions(**SHAPED[how]), some_bias(x, v)
            if n: assert max(errors(ours(x, w, y, None, None, None, o, b=b, wide=wide), exact(x, w, y, None, None, None, o, b))) < 1e-5
            else: assert not any(t.any() for t in ours(x, w, y, None, None, None, o, b=b))


def confident(device="cpu", **sizes):
    "Tokens along the weights of their targets"
    x, w, y, *_ = sample(bf16, device=device, **sizes)
    y = torch.arange(len(x), device=device) * 37 % len(w)
    own = w[y].float()
    return (10 * own / own.norm(dim=1, keepdim=True)).bfloat16(), w, y


def eager(x, w, y):
    "dx and dw as PyTorch makes them in bf16"
    leaves = [t.detach().requires_grad_() for t in (x, w)]
    return torch.autograd.grad(F.cross_entropy(leaves[0] @ leaves[1].T, y, reduction="sum"), leaves)


def test_a_confident_target_keeps_its_digits():
    x, w, y = confident()
    truth = exact(x, w, y, None, None, None, LossOptions())
    assert all(a <= b for a, b in zip(errors(ours(x, w, y, None, None, None, LossOptions())[1:], truth[1:]), errors(eager(x, w, y), truth[1:])))


def test_a_token_that_does_not_count_may_be_no_number():
    x, w, y, *given = sample()
    wanted = exact(x, w, y, *given, LossOptions())
    x[y == -100] = math.nan
    assert max(errors(ours(x, w, y, *given, LossOptions()), wanted)) < 1e-5


def test_a_label_outside_the_classes_is_no_number():
    x, w, y, *given = sample()
    y[11] = -100
    wanted = ours(x, w, y, *given, LossOptions())
    y[11] = V
    losses, *gradients = ours(x, w, y, *given, LossOptions())
    assert losses.isnan().nonzero().tolist() == [[11]] and not gradients[0][11].any()
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted[1:]))


def far_scores(far, device="cpu", **sizes):
    "One class, which the offsets do not look at, has a score far from the others'"
    x, w, *others = sample(device=device, **sizes)
    x[:, 0], w[:, 0] = 1.0, 0.0 if far > 0 else -far
    w[::len(w) // product.SAMPLED or 1, 0] = 0.0
    w[50, 0] = abs(far)
    return x, w, *others


@pytest.mark.parametrize("far", [300.0, -300.0])
def test_offsets_that_are_no_good_are_made_again(far, monkeypatch):
    monkeypatch.setattr(product, "SAMPLED", 2)
    given = far_scores(far)
    assert max(errors(ours(*given, LossOptions()), exact(*given, LossOptions()))) < 1e-4


# --- kernels, interpreted or on a GPU ---

def work(device, o, module=product, biased=False):
    "A chunk whose exponentials are there, in three tiles"
    x, w, y, *given = sample(device=device)
    y[11] = V + 3
    k = module.work_of(x, w, y, *given, o, N, None, None, some_bias(x, V, 3.0) if biased else None)
    module.reference_exponentials(k.room, x, w, y, k.offsets, k.log2_scale, k.bias, module.log2_cap(o))
    return k._replace(room=k.room._replace(sums=torch.cat([k.room.sums / 4, k.room.sums / 4, k.room.sums / 2])))


def empty_rows(device, module=product):
    return module.Rows(*(torch.full((N,), math.nan, device=device) for _ in range(4)), torch.zeros((), dtype=torch.int32, device=device))


def off(found, wanted, limit=1e-5) -> bool:
    return not torch.allclose(found.double(), wanted.double(), rtol=limit, atol=limit / 10, equal_nan=True)


def row_faults(how, blocks, device, module=product, biased=False):
    k, out = work(device, LossOptions(**SHAPED[how]), module, biased), empty_rows(device, module)
    module.launch_rows(out, k.room, *k.labels, None, *blocks)
    return [name for name, a, b in zip(out._fields, out, product.reference_rows(k.room, *k.labels)) if off(a, b)]


@where_kernels_run
@pytest.mark.parametrize("how", SHAPED)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("blocks", [(32, 16), (4, 2)])
def test_rows_by_the_kernel(how, biased, blocks, device):
    assert row_faults(how, blocks, device, biased=biased) == []


@where_kernels_run
def test_what_is_not_wanted_is_not_written(device):
    k, out, none = work(device, LossOptions()), empty_rows(device), torch.zeros((), dtype=torch.int32, device=device)
    product.launch_rows(out, k.room, *k.labels, none)
    assert out.losses.isnan().all() and out.coefs.isnan().all() and out.at_target.isnan().all()
    product.launch_rows(out, k.room, *k.labels, none + 1)
    assert out.losses.isfinite().sum() == N - 1


@pytest.mark.parametrize("away", [-200.0, 200.0])
@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=where_kernels_run)])
def test_an_offset_that_is_no_good_is_told(away, launched, device):
    k, out = work(device, LossOptions()), empty_rows(device)
    k.offsets[3] += away
    k = k._replace(room=k.room._replace(sums=k.room.sums[:1]))
    product.reference_exponentials(k.room, k.x, k.w, k.y, k.offsets, k.log2_scale)
    if launched:
        product.launch_rows(out, k.room, *k.labels)
    assert (out if launched else product.reference_rows(k.room, *k.labels)).failed


def scaled_faults(dtype, device, module=product, size=(4, 8)):
    x, w, y, *_ = sample(dtype, device=device)
    c, t = (torch.randn(N, generator=torch.Generator().manual_seed(i)).to(device) for i in (1, 2))
    c[y == -100], t[y == -100], c[6] = 0, 0, 0
    x[y == -100], found = math.nan, []
    lists = torch.stack([t, 0 * t, t.flip(0)], 1), torch.stack([y, y + V, y.roll(3).clamp(0, V - 1)], 1), w
    for more in ((), (t, y, w), lists, (t, y, w, t.flip(0), w[5].float())):
        out, wanted = torch.full((N + 2, H), math.nan, device=device, dtype=dtype), torch.empty_like(x)
        module.launch_scaled(out[1:-1], x, c, *more, *([None] * (5 - len(more))), *size)
        product.reference_scaled(wanted, x, c, *more)
        found += [len(more)] * (off(out[1:-1], wanted, 1e-5 if dtype == f32 else 1e-2) or not out[[0, -1]].isnan().all())
    return found


@where_kernels_run
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_scaled_rows_by_the_kernel(dtype, device):
    assert scaled_faults(dtype, device) == []


def target_faults(dtype, device, module=product, size=(4, 8)):
    x, w, y, *_ = sample(dtype, device=device)
    y[11], y[3] = V + 3, -1
    t = torch.linspace(-1, 2, N, device=device)
    t[y == -100], x[y == -100] = 0, math.nan
    dw, wanted = w.clone(), w.clone()
    module.launch_targets(dw, x, y, t, *size)
    product.reference_targets(wanted, x, y, t)
    again = w.clone()
    module.launch_targets(again, x, y, t, *size)
    lists, of_lists, of_several, each = torch.stack([y, y, y.roll(5)], 1), torch.stack([t, 0 * t, 0.5 * t], 1), w.clone(), w.clone()
    of_lists[y.roll(5) < 0, 2] = of_lists[y < 0] = 0
    module.launch_targets(of_several, x, lists, of_lists, *size)
    for column in range(3):
        product.reference_targets(each, x, lists[:, column].contiguous(), of_lists[:, column].contiguous())
    tolerance = 1e-5 if dtype == f32 else 1e-2
    return ["sum"] * off(dw, wanted, tolerance) + ["lists"] * off(of_several, each, tolerance) + ["bits"] * (not torch.equal(dw, again))


@where_kernels_run
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_targets_by_the_kernel(dtype, device):
    assert target_faults(dtype, device) == []


def offset_faults(dtype, device, module=product, cap=0.0):
    x, w, y, *_ = sample(dtype, device=device)
    wide = product.sampled_scores(x, w)
    z = wide[:, :-1]  # rows that do not follow each other
    z[5], z[6, 3] = -math.inf, math.inf
    found, wanted = (of(z, y, LossOptions(logit_scale=1.25, softcap=cap)) for of in (module.launch_offsets, product.reference_offsets))
    return ["offsets"] * off(found, wanted)


@where_kernels_run
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_offsets_by_the_kernel(dtype, cap, device):
    assert offset_faults(dtype, device, cap=cap) == []


MUTANTS = {
    "a token that does not count has an offset": ("tl.where(y == o.ignore_index, float(\"inf\"), most)", "most"),
    "a row's parts are not all added": ("(tile < tiles) & keep[None], other=0.0)\n    s", "(tile < tiles - 1) & keep[None], other=0.0)\n    s"),
    "the z-loss is not in the slope": ("tl.where(known, scale * (by_class + others), 0.0)", "tl.where(known, scale * by_class, 0.0)"),
    "the target forgets its class weight": ("(others * e_t - by_class * s)\n    tl", "(others * e_t - s)\n    tl"),
    "the bias's shift is not in the log-sum-exp": ("full += o.logit_scale * tl.load(shift_ptr)", "full += 0.0"),
    "the target forgets the cap's slope": ("return score * LOG2E, slope", "return score * LOG2E, o.logit_scale"),
    "smoothing has no share of the sum": ("others += smooth * total", "others += 0.0"),
    "no pull of the mean class": ("total += tl.where(pull != 0, ", "total += 0 * tl.where(pull != 0, "),
    "a label outside costs nothing": ("tl.where(known, loss, tl.where(ignored, 0.0, float(\"nan\")))", "tl.where(known, loss, 0.0)"),
    "the first of a target's tokens counts twice": ("total, place, more = own * x.to(tl.float32), first + 1, 1", "total, place, more = own * x.to(tl.float32), first, 1"),
    "0 times NaN": ("mask=(c != 0)[:, None] & (cols < H), other=0.0)", "mask=keep[:, None] & (cols < H), other=0.0)"),
    "a target's first tokens alone": ("more = tl.min(same.to(tl.int32), 0)", "more = 0"),
    "each token of a target adds all": ("begins = (first == 0) | (before != y)", "begins = (first == 0) | (before == before)"),
}


def kernel_faults(module, device="cpu"):
    return (row_faults("both", (4, 2), device, module, True) or row_faults("capped", (4, 2), device, module) or row_faults("smoothed", (4, 2), device, module) or
            offset_faults(f32, device, module) or scaled_faults(f32, device, module) or target_faults(f32, device, module))


@where_kernels_run
def test_the_unchanged_kernels_pass(tmp_path, device):
    assert kernel_faults(planted(product, tmp_path, *unchanged(MUTANTS.values())), device) == []


@pytest.mark.thorough
@where_kernels_run
@pytest.mark.parametrize("bug", few(MUTANTS, "a label outside costs nothing", "each token of a target adds all", "0 times NaN"))
def test_a_planted_bug_is_noticed(bug, tmp_path, device):
    assert kernel_faults(planted(product, tmp_path, *MUTANTS[bug]), device), "nothing noticed"


# --- the method ---

def call(method, data, **options):
    x, w, y, *b = data
    x, w, *b = leaves = [t.detach().clone().requires_grad_() for t in (x, w, *b)]
    loss = fl.linear_cross_entropy(x, w, y, method=method, linear_bias=b[0] if b else None, **options)
    return loss.detach(), *torch.autograd.grad(2 * loss, leaves)


@pytest.mark.parametrize("options", [{}, dict(reduction="sum", z_loss=0.1, logit_scale=0.5), dict(max_valid=30), dict(softcap=5.0), dict(label_smoothing=0.1)], ids=str)
def test_where_there_is_no_such_gpu_chunks_take_its_place(options, device, caplog):
    if HOPPER and device == "cuda":
        pytest.skip("here it is")
    x, w, y, *_ = sample(device=device)
    data = x, w, y, some_bias(x, V)
    with caplog.at_level(logging.DEBUG, "fusedloss"):
        found = call("product", data, **options)
    assert any("goes by chunks: " in line for line in caplog.messages)
    assert all(torch.equal(a, b) for a, b in zip(found, call("chunks", data, **options)))


@pytest.mark.parametrize("options, lacks", [(dict(return_stats=True), "return_stats"),
                                            (dict(reduction="none"), "'none'"), (dict(filter_eps=1e-4), "filter_eps")], ids=str)
def test_what_it_cannot_do_raises(options, lacks, device):
    x, w, y, *_ = sample(device=device)
    with pytest.raises(ValueError, match=rf"expected .*got 'product': .*{lacks}"):
        fl.linear_cross_entropy(x, w, y, method="product", **options)


def test_the_plan_says_why_it_is_passed_over():
    of = lambda machine, *sizes, dtype=bf16, **more: fl.plan(*(sizes or (8192, 128256, 4096)), dtype, machine=machine, **more)["product"]
    assert fl.plan(8192, 128256, 4096, machine="H200").method == "product" and not of("H200").caution
    assert all(of("H200", options=(name, "linear_bias")).caution == "" for name in ("softcap", "label_smoothing"))
    for found, why in ((of("H200", options=("softcap", "label_smoothing")), "by chunks: label smoothing under a soft cap, whose gradient has no mean class"), (of("A100 80GB"), "by chunks: no tensor descriptors"), (of("B200"), "by chunks: not of compute capability 9.0"), (of("H200", dtype=torch.float16), "by chunks: not of bf16, whose range exponentials need"),
                       (of("H200", 8192, 128256, 4100), "by chunks: rows that do not begin at multiples of 16 bytes"), (of("H200", needs_grad=False), "it is for gradients"),
                       (of("H200", memory_budget=2**24), "dw would be rounded too often")):
        assert found.caution == why


# --- on a GPU that has it ---

@pytest.mark.parametrize("n, most, rows", [(8192, 4187, 4096), (4096, 1766, 1536), (8192, 1748, 1536), (8192, 3497, 3072), (8192, 2075, 2048), (300, 4096, 300), (1000, 400, 400), (5, 2, 2)])
def test_rows_of_a_chunk(n, most, rows):
    assert product.product_rows(n, most) == rows


FORMS = {"shared": hopper.WarpGroupProduct(), "in turn": hopper.IN_TURN, "alone": hopper.WarpGroupProduct(5, cluster=1, in_turn=True)}


class ByPyTorch(ScoreProduct):
    "The product of an architecture that nobody has"
    classes, narrow = 16, 8

    def __init__(self):
        self.used = []

    def lacks(self, d): return ""

    def reason(self, dtype, pitch, d): return ""

    def exponentials_reason(self, dtype, pitch, d): return "" if dtype == bf16 else "too narrow"

    def failure(self, dtype, device, kernel=""): return ""

    def matrices_reason(self, x, w, kernel=""): return ""

    def scores(self, what, x, w, y, target_z, bias, units):
        "All scores, and where the targets are"
        self.used.append(what)
        z = product.reference_scores(x, w, bias, units)
        at = torch.arange(len(w), device=y.device) == y[:, None]
        target_z.copy_(torch.where(at, z, 0.0).sum(1))
        return z, at

    def by_tiles(self, t): return [part for part in t.split(self.classes, 1)]

    def statistics(self, x, w, y, stats, target_z, wanted=None, bias=None, units=None):
        if wanted is not None and not wanted.any(): return
        z, at = self.scores("statistics", x, w, y, target_z, bias, units)
        for tile, part in zip(stats, self.by_tiles(z.masked_fill(at, -torch.inf))):
            top = part.amax(1)
            tile.copy_(torch.stack([top, (part - top.nan_to_num(neginf=0.0)[:, None]).exp().sum(1)], 1))

    def exponentials(self, x, w, y, offsets, e, sums, target_z, log2_scale=math.log2(math.e), wanted=None, bias=None, log2_cap=0.0, units=None):
        if wanted is not None and not wanted.any(): return
        z, at = self.scores("exponentials", x, w, y, target_z, bias, units)
        t = log2_cap * torch.tanh(z * log2_scale / log2_cap) if log2_cap else z * log2_scale
        whole = torch.where(at | offsets.isinf()[:, None], 0.0, torch.exp2(t - offsets[:, None]))
        e.copy_(whole * (1 - (t / log2_cap) ** 2) if log2_cap else whole)
        for tile, part in zip(sums, self.by_tiles(whole)): tile.copy_(part.sum(1))

    def moments(self, *tensors): raise AssertionError("no loss here asks for moments")

    gradients = entropy_gradients = maxima = moments


@pytest.mark.parametrize("how", SHAPED)
@pytest.mark.parametrize("wide", [False, True])
def test_what_kernels_do_around_a_product(how, wide):
    need_kernels("cpu")
    x, w, y, *given = sample(bf16)
    o, b = LossOptions(**SHAPED[how]), some_bias(x, V, 2.0)
    found = ours(x, w, y, *given, o, form=ByPyTorch(), b=b, wide=wide)
    assert all(a < limit for a, limit in zip(errors(found, exact(x, w, y, *given, o, b)), (1e-4, 8e-3, 8e-3, 4e-3)))


LAUNCHED = {"speedrun": (dict(softcap=11.5, logit_scale=11.5 / 15), True), "capped": (dict(softcap=2.0, z_loss=0.03), False), "biased": (dict(z_loss=0.03), True),
            "smoothed": (dict(label_smoothing=0.1), True)}


@interpreted
@pytest.mark.parametrize("far", few([False, True], False))
@pytest.mark.parametrize("name", LAUNCHED)
def test_the_launched_form_thread_by_thread(name, far, monkeypatch):
    "The product by hand on a CPU; a bias that is far makes it try twice"
    everywhere(monkeypatch, hopper, "launch_form", launch_on_cpu)
    how, biased = LAUNCHED[name]
    x, w, y, *given = sample(bf16, n=20, v=300, h=64, scale=64 ** -0.25)
    o, b = LossOptions(**how), some_bias(x, 300, 2.0) if biased or far else None
    if far: b[50] = 300.0
    found = ours(x, w, y, *given, o, rows=16, form=hopper.IN_TURN, b=b)
    assert all(a < limit for a, limit in zip(errors(found, exact(x, w, y, *given, o, b)), (1e-4, 8e-3, 8e-3, 4e-3)))


def test_a_second_try_with_a_bias(monkeypatch):
    need_kernels("cpu")
    monkeypatch.setattr(product, "SAMPLED", 2)
    x, w, y, *given = sample(bf16)
    for how in ({}, dict(softcap=90.0)):
        by_pytorch, b, o = ByPyTorch(), some_bias(x, V), LossOptions(**how)
        b[50], y[3] = 300.0, 50
        found, wanted = ours(x, w, y, *given, o, form=by_pytorch, b=b), exact(x, w, y, *given, o, b)
        assert by_pytorch.used.count("statistics") and all(a < limit for a, limit in zip(errors(found, wanted), (1e-4, 4e-3, 4e-3, 4e-3)))


def test_a_budget_holds_the_vectors_too():
    of = lambda **how: product.plan_product(8192, 64, 50304, bf16, bf16, (True, True), 2**25, "auto", 192, **how).rows
    vectors = product.vectors_bytes(8192, 64, 50304, True, True, True)
    assert of(vectors=vectors) < of() and product.product_row(64, 50304, bf16, True, 192) * of(vectors=vectors) + vectors <= 2**25
    assert not product.vectors_bytes(8192, 64, 50304, False, True, False)
    none_left = product.plan_product(8192, 2048, 128256, bf16, bf16, (False, True), 2**20, "float32", 192, 2**20)
    assert none_left.rows == 1


def test_another_architecture_changes_no_caller(monkeypatch):
    need_kernels("cpu")
    made = torch.Generator().manual_seed(3)
    x, w = (torch.randn(n, 8, generator=made).bfloat16().requires_grad_() for n in (21, 50))
    y = torch.randint(50, (21,), generator=made)
    y[4] = -100
    by_pytorch = ByPyTorch()
    monkeypatch.setattr(score_product, "PRODUCTS", (by_pytorch,))
    assert product.usable_product(x, w) is by_pytorch
    assert product.product_obstacle(f32, 8, CPU) == "too narrow" and not product.product_obstacle(bf16, 8, CPU)
    losses, dx, dw, *_ = ours(x.detach(), w.detach(), y, None, None, None, LossOptions(), form=product.usable_product(x, w))
    expected = F.cross_entropy(x.float() @ w.float().T, y, reduction="none")
    truth = torch.autograd.grad(expected.sum(), [x, w])
    assert by_pytorch.used[0] == "exponentials"
    for got, wanted in zip((losses, dx, dw), (expected.detach(), *truth)): torch.testing.assert_close(got.float(), wanted.float(), rtol=3e-2, atol=3e-2)


@on_hopper
@pytest.mark.parametrize("form, far, how", grid(FORMS, (0.0, 300.0, -300.0), HOW))
def test_on_a_gpu(form, far, how):
    x, w, y, *given = far_scores(far, "cuda", n=1000, v=5003, h=264, scale=0.25)
    x, w, y[17] = x.bfloat16(), w.bfloat16(), 6000 if how == "plain" else 3
    x[4], o = math.nan, LossOptions(**HOW[how])
    found = ours(x, w, y, *given, o, rows=384, form=FORMS[form])
    again = ours(x, w, y, *given, o, rows=384, form=FORMS[form])
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(found, again))
    x[4] = 0
    if how == "plain":
        assert found[0].isnan().nonzero().tolist() == [[17]] and not found[1][17].any()
        y[17] = -100
        assert all(torch.equal(a, b) for a, b in zip(found[1:], ours(x, w, y, *given, o, rows=384, form=FORMS[form])[1:]))
        return
    few = lambda loss, *gradients: (loss, *(g[:, 1:] for g in gradients))  # what is left of large numbers in the first column has lost digits
    assert all(a < b for a, b in zip(errors(few(*found), few(*exact(x, w, y, *given, o))), (1e-4, 4e-3, 4e-3)))


GEMMA, SPEEDRUN = dict(softcap=30.0), dict(softcap=11.5, logit_scale=11.5 / 15)
HEADS = SHAPED | {"Gemma": GEMMA, "speedrun": SPEEDRUN, "cap above all": dict(softcap=1e3), "smoothed, all": dict(label_smoothing=1.0)}
LARGER = [(1000, 5003, 264), (2048, 32768, 2048), (777, 50257, 896)]


@on_hopper
@pytest.mark.parametrize("how", HEADS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n, v, h", few(LARGER, (1000, 5003, 264)))
def test_all_heads_on_a_gpu(how, biased, weighted, n, v, h):
    x, w, y, *given = sample(bf16, n, v, h, "cuda", h ** -0.25)
    given = given if weighted else (None, None, given[2])
    x[4], o, b = math.nan, LossOptions(**HEADS[how]), some_bias(x, v, 2.0) if biased else None
    y[9] = -100
    found, again = (ours(x, w, y, *given, o, rows=384, form=hopper.IN_TURN, b=b) for _ in range(2))
    assert y[4] == -100 and all(torch.equal(s, t) for s, t in zip(found, again))
    x[4] = 0
    limits = 1e-4, 4e-3, 6e-3 if o.label_smoothing else 4e-3, 4e-3  # dw that begins with its constant is rounded once more
    off = errors(found, exact(x, w, y, *given, o, b))
    assert all(a < limit for a, limit in zip(off, limits)), [float(a) for a in off]


@on_hopper
@pytest.mark.parametrize("how", [{}, dict(softcap=90.0), dict(label_smoothing=0.1)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_far_bias_on_a_gpu(how, form):
    x, w, y, *given = sample(bf16, 1000, 5003, 264, "cuda", 0.25)
    b, o = some_bias(x, 5003).float(), LossOptions(**how)
    b[50], b[60], y[3] = 300.0, -math.inf if "label_smoothing" not in how else -300.0, 50
    y[y == 60] = 61
    found = ours(x, w, y, *given, o, rows=384, form=FORMS[form], b=b)
    assert all(a < limit for a, limit in zip(errors(found, exact(x, w, y, *given, o, b)), (1e-4, 4e-3, 4e-3, 4e-3)))


@on_hopper
@pytest.mark.parametrize("how", [{}, dict(z_loss=1e-13), dict(label_smoothing=0.1)], ids=str)
def test_a_bias_of_a_million_on_a_gpu(how):
    x, w, y, *given = sample(bf16, 300, 1003, 64, "cuda")
    x, w, o, b = (4 * x).round() / 4, (4 * w).round() / 4, LossOptions(**how), torch.full((1003,), 2.0**20, device="cuda")
    found = ours(x, w, y, *given, o, rows=128, form=hopper.IN_TURN, b=b)
    assert all(a < limit for a, limit in zip(errors(found, exact(x, w, y, *given, o, b)), (1e-4, 4e-3, 4e-3, 4e-3)))


@on_hopper
def test_scores_far_beyond_the_cap_on_a_gpu():
    x, w, y, *given = sample(bf16, 300, 1003, 64, "cuda")
    o = LossOptions(softcap=30.0)
    found, wanted = (of(x * 1024, w, y, *given, o) for of in (lambda *t: ours(*t, form=hopper.IN_TURN), exact))
    assert errors(found[:1], wanted[:1])[0] < 1e-4 and all(t.isfinite().all() for t in found)
    assert all((a.double() - b).abs().max() <= 1e-2 * b.abs().max() for a, b in zip(found[1:], wanted[1:]))


@on_hopper
@pytest.mark.parametrize("options", [GEMMA, SPEEDRUN, dict(label_smoothing=0.1), dict(softcap=30.0, z_loss=1e-4, accumulate="float32"), dict(label_smoothing=0.1, accumulate="float32"),
                                     dict(label_smoothing=0.1, max_valid=900), dict(softcap=30.0, memory_budget=2**22)], ids=str)
def test_the_method_with_heads_on_a_gpu(options, caplog):
    x, w, y, *_ = sample(bf16, 1000, 5003, 264, "cuda", 0.25)
    b, free = some_bias(x, 5003), {k: v for k, v in options.items() if k not in ("memory_budget", "accumulate")}
    with caplog.at_level(logging.DEBUG, "fusedloss"):
        found = call("product", (x, w, y, b), **options)
    assert not any("goes by chunks" in line for line in caplog.messages)
    assert all(a < c for a, c in zip(errors(found, call("chunks", (x.double(), w.double(), y, b.double()), **free)), (1e-5, 4e-3, 4e-3, 4e-3)))


@on_hopper
def test_label_smoothing_under_a_cap_goes_by_chunks(caplog):
    x, w, y, *_ = sample(bf16, 300, 1000, 64, "cuda")
    how = dict(softcap=30.0, label_smoothing=0.1)
    with caplog.at_level(logging.DEBUG, "fusedloss"):
        found = call("product", (x, w, y), **how)
    assert any("label smoothing under a soft cap" in line for line in caplog.messages)
    assert all(torch.equal(a, b) for a, b in zip(found, call("chunks", (x, w, y), **how)))


@on_hopper
@pytest.mark.parametrize("n, v, h", [(1000, 5000, 904), (2048, 32768, 2048), (6001, 50257, 896)])
@pytest.mark.parametrize("rows", [10**6, 512])
@pytest.mark.parametrize("kind", ["random", "confident"])
def test_errors_are_not_above_those_of_pytorch(n, v, h, rows, kind):
    x, w, y = confident("cuda", n=n, v=v, h=h) if kind == "confident" else sample(bf16, n, v, h, "cuda", h ** -0.25)[:3]
    y = torch.arange(n, device="cuda") * 37 % v
    truth = exact(x, w, y, None, None, None, LossOptions())[1:]
    found = errors(ours(x, w, y, None, None, None, LossOptions(), rows=rows, form=hopper.IN_TURN)[1:], truth)
    usual = errors(eager(x, w, y), truth)
    assert all(a <= 1.02 * b for a, b in zip(found, usual)), (found, usual)


@on_hopper
@pytest.mark.parametrize("options", [{}, dict(reduction="sum", z_loss=1e-3, logit_scale=0.5), dict(max_valid=900), dict(memory_budget=2**22)], ids=str)
def test_the_method_on_a_gpu(options):
    x, w, y, *_ = sample(bf16, 1000, 5003, 264, "cuda", 0.25)
    found, wanted = call("product", (x, w, y), **options), call("chunks", (x.double(), w.double(), y), **{k: v for k, v in options.items() if k != "memory_budget"})
    assert all(a < b for a, b in zip(errors(found, wanted), (1e-5, 4e-3, 4e-3)))


@on_hopper
@pytest.mark.parametrize("spoil, why", [(lambda x: x.half(), "not of bf16"), (lambda x: x[:, :-3], "multiples of 16 bytes"), (lambda x: x.float(), "bf16")], ids=["fp16", "stride", "fp32"])
def test_what_the_copy_engine_cannot_take_goes_by_chunks(spoil, why, caplog):
    import re
    x, w, y, *_ = sample(bf16, 300, 1000, 64, "cuda")
    data = spoil(x), spoil(w), y
    with caplog.at_level(logging.DEBUG, "fusedloss"):
        found = call("product", data)
    assert any(re.search(f"goes by chunks: .*({why})", line) for line in caplog.messages)
    assert all(torch.equal(a, b) for a, b in zip(found, call("chunks", data)))
