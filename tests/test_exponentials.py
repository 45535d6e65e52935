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
from helpers import need_kernels, planted, unchanged, where_kernels_run

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
N, V, H = 37, 71, 16
HOW = {"plain": {}, "scaled": dict(logit_scale=0.5), "z-loss": dict(z_loss=0.1), "both": dict(logit_scale=1.5, z_loss=0.03)}
on_hopper = pytest.mark.skipif(not HOPPER, reason="no GPU of compute capability 9.0")


def sample(dtype=f32, n=N, v=V, h=H, device="cpu", scale=1.0):
    "x, w, y, class weights, token weights, a denominator"
    made = torch.Generator().manual_seed(0)
    x, w = (scale * torch.randn(size, h, generator=made, dtype=f64).to(device, dtype) for size in (n, v))
    at = torch.arange(n, device=device)
    y = torch.where(at % 5 == 4, -100, torch.where(at % 3 == 0, 7, at * 37 % v))
    given = torch.linspace(0.5, 2, v), torch.linspace(-1, 2, n), torch.tensor(7.5)
    return x, w, y, *(t.to(device, acc_dtype(dtype)) for t in given)


def exact(x, w, y, weight, token_weight, denominator, o):
    "Losses, dx, dw in float64"
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    z = x @ w.T * o.logit_scale
    each = F.cross_entropy(z, y, None if weight is None else weight.double(), reduction="none")
    each = each + torch.where(y == -100, 0.0, o.z_loss * z.logsumexp(1) ** 2)
    losses = each * (1.0 if token_weight is None else token_weight.double()) / (1.0 if denominator is None else denominator.double())
    return losses.detach(), *torch.autograd.grad(losses.sum(), (x, w))


def ours(x, w, y, *given, rows=10, form=None, module=product, wide=False):
    grads = Gradients(x, w, (True, True, False), x.dtype, wide, 1.0)
    losses = module.run_exponentials(x, w, y, *given, rows, grads, form)
    return losses, grads.dx, grads.rounded_dw()


def errors(found, wanted) -> list[float]:
    return [relative_error(a, b) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype, limit", [(f64, 1e-12), (f32, 1e-5), (bf16, 4e-3)], ids=str)
def test_loss_and_gradients(how, dtype, limit):
    x, w, y, *given = sample(dtype)
    for some in (given, (None, None, None)):
        assert max(errors(ours(x, w, y, *some, LossOptions(**HOW[how])), exact(x, w, y, *some, LossOptions(**HOW[how])))) < limit


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

def work(device, o, module=product):
    "A chunk whose exponentials are there, in three tiles"
    x, w, y, *given = sample(device=device)
    y[11] = V + 3
    k = module.work_of(x, w, y, *given, o, N, None, None)
    module.reference_exponentials(k.room, x, w, y, k.offsets, k.log2_scale)
    return k._replace(room=k.room._replace(sums=torch.cat([k.room.sums / 4, k.room.sums / 4, k.room.sums / 2])))


def empty_rows(device, module=product):
    return module.Rows(*(torch.full((N,), math.nan, device=device) for _ in range(3)), torch.zeros((), dtype=torch.int32, device=device))


def off(found, wanted, limit=1e-5) -> bool:
    return not torch.allclose(found.double(), wanted.double(), rtol=limit, atol=limit / 10, equal_nan=True)


def row_faults(how, blocks, device, module=product):
    k, out = work(device, LossOptions(**HOW[how]), module), empty_rows(device, module)
    module.launch_rows(out, k.room, *k.labels, None, *blocks)
    return [name for name, a, b in zip(out._fields, out, product.reference_rows(k.room, *k.labels)) if off(a, b)]


@where_kernels_run
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("blocks", [(32, 16), (4, 2)])
def test_rows_by_the_kernel(how, blocks, device):
    assert row_faults(how, blocks, device) == []


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
    for more in ((), (t, y, w), lists):
        out, wanted = torch.full((N + 2, H), math.nan, device=device, dtype=dtype), torch.empty_like(x)
        module.launch_scaled(out[1:-1], x, c, *more, *([None] * (3 - len(more))), *size)
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


def offset_faults(dtype, device, module=product):
    x, w, y, *_ = sample(dtype, device=device)
    wide = product.sampled_scores(x, w)
    z = wide[:, :-1]  # rows that do not follow each other
    z[5], z[6, 3] = -math.inf, math.inf
    found, wanted = (of(z, y, 1.25, -100) for of in (module.launch_offsets, product.reference_offsets))
    return ["offsets"] * (not torch.equal(found, wanted))


@where_kernels_run
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_offsets_by_the_kernel(dtype, device):
    assert offset_faults(dtype, device) == []


MUTANTS = {
    "a token that does not count has an offset": ("tl.where(y == ignore_index, float(\"inf\"), most)", "most"),
    "a row's parts are not all added": ("(tile < tiles) & keep[None], other=0.0)\n    s", "(tile < tiles - 1) & keep[None], other=0.0)\n    s"),
    "the z-loss is not in the slope": ("tl.where(known, scale * (by_class + rise), 0.0)", "tl.where(known, scale * by_class, 0.0)"),
    "the target forgets its class weight": ("tl.where(known, scale * (rise * e_t - by_class * s), 0.0)", "tl.where(known, scale * (rise * e_t - s), 0.0)"),
    "a label outside costs nothing": ("tl.where(known, loss, tl.where(ignored, 0.0, float(\"nan\")))", "tl.where(known, loss, 0.0)"),
    "the first of a target's tokens counts twice": ("total, place, more = own * x.to(tl.float32), first + 1, 1", "total, place, more = own * x.to(tl.float32), first, 1"),
    "0 times NaN": ("mask=(c != 0)[:, None] & (cols < H), other=0.0)", "mask=keep[:, None] & (cols < H), other=0.0)"),
    "a target's first tokens alone": ("more = tl.min(same.to(tl.int32), 0)", "more = 0"),
    "each token of a target adds all": ("begins = (first == 0) | (before != y)", "begins = (first == 0) | (before == before)"),
}


def kernel_faults(module, device="cpu"):
    return (row_faults("both", (4, 2), device, module) or offset_faults(f32, device, module) or scaled_faults(f32, device, module) or target_faults(f32, device, module))


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
    x, w, y = data
    leaves = [t.detach().clone().requires_grad_() for t in (x, w)]
    loss = fl.linear_cross_entropy(*leaves, y, method=method, **options)
    return loss.detach(), *torch.autograd.grad(2 * loss, leaves)


@pytest.mark.parametrize("options", [{}, dict(reduction="sum", z_loss=0.1, logit_scale=0.5), dict(max_valid=30)], ids=str)
def test_where_there_is_no_such_gpu_chunks_take_its_place(options, device, caplog):
    if HOPPER and device == "cuda":
        pytest.skip("here it is")
    x, w, y, *_ = sample(device=device)
    with caplog.at_level(logging.DEBUG, "fusedloss"):
        found = call("product", (x, w, y), **options)
    assert any("goes by chunks: " in line for line in caplog.messages)
    assert all(torch.equal(a, b) for a, b in zip(found, call("chunks", (x, w, y), **options)))


@pytest.mark.parametrize("options, lacks", [(dict(softcap=5.0), "softcap"), (dict(label_smoothing=0.1), "label_smoothing"), (dict(return_stats=True), "return_stats"),
                                            (dict(reduction="none"), "'none'"), (dict(filter_eps=1e-4), "filter_eps")], ids=str)
def test_what_it_cannot_do_raises(options, lacks, device):
    x, w, y, *_ = sample(device=device)
    with pytest.raises(ValueError, match=rf"expected .*got 'product': .*{lacks}"):
        fl.linear_cross_entropy(x, w, y, method="product", **options)


def test_the_plan_says_why_it_is_passed_over():
    of = lambda machine, *sizes, dtype=bf16, **more: fl.plan(*(sizes or (8192, 128256, 4096)), dtype, machine=machine, **more)["product"]
    assert fl.plan(8192, 128256, 4096, machine="H200").method == "product" and not of("H200").caution
    for found, why in ((of("A100 80GB"), "by chunks: no tensor descriptors"), (of("B200"), "by chunks: not of compute capability 9.0"), (of("H200", dtype=torch.float16), "by chunks: not of bf16, whose range exponentials need"),
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
    classes = 16

    def __init__(self):
        self.used = []

    def lacks(self, d): return ""

    def reason(self, dtype, pitch, d): return ""

    def exponentials_reason(self, dtype, pitch, d): return "" if dtype == bf16 else "too narrow"

    def failure(self, dtype, device): return ""

    def matrices_reason(self, x, w): return ""

    def scores(self, what, x, w, y, target_z):
        "All scores, and where the targets are"
        self.used.append(what)
        z = x.float() @ w.float().T
        at = torch.arange(len(w), device=y.device) == y[:, None]
        target_z.copy_(torch.where(at, z, 0.0).sum(1))
        return z, at

    def by_tiles(self, t): return [part for part in t.split(self.classes, 1)]

    def statistics(self, x, w, y, stats, target_z, wanted=None):
        if wanted is not None and not wanted.any(): return
        z, at = self.scores("statistics", x, w, y, target_z)
        for tile, part in zip(stats, self.by_tiles(z.masked_fill(at, -torch.inf))):
            top = part.amax(1)
            tile.copy_(torch.stack([top, (part - top.nan_to_num(neginf=0.0)[:, None]).exp().sum(1)], 1))

    def exponentials(self, x, w, y, offsets, e, sums, target_z, log2_scale=math.log2(math.e), wanted=None):
        if wanted is not None and not wanted.any(): return
        z, at = self.scores("exponentials", x, w, y, target_z)
        e.copy_(torch.where(at | offsets.isinf()[:, None], 0.0, torch.exp2(z * log2_scale - offsets[:, None])))
        for tile, part in zip(sums, self.by_tiles(e.float())): tile.copy_(part.sum(1))

    def moments(self, *tensors): raise AssertionError("no loss here asks for moments")

    gradients = entropy_gradients = moments


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
