"""Several targets a token: the loss and its gradients against their definition in float64, the kernel, what is refused, planted bugs."""
from functools import partial

import pytest
import torch
from torch.testing import assert_close

import fusedloss as fl
import fusedloss.losses as losses
from fusedloss.core import pairs
from fusedloss.core.options import LossOptions
from fusedloss.core.versions import torch_version
from fusedloss.plans import plan
from workbook.measure import peak_memory, relative_error
from grids import few, grid, thorough_but
from helpers import TOLERANCE, first_fault_of, has_no_second_derivative, interpreted, need_kernels, off, planted, replays, unchanged

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
OPTIONS = {"plain": {}, "classes": dict(weight=True, label_smoothing=0.2), "scores": dict(softcap=3.0, logit_scale=0.5),
           "z-loss": dict(z_loss=0.1, token_weight=True), "targets": dict(target_weight=True),
           "all": dict(weight=True, label_smoothing=0.1, softcap=2.5, logit_scale=2.0, z_loss=0.01, token_weight=True, target_weight=True)}


def sample(shape=(2, 9), k=3, v=11, h=5, how="plain", dtype=f64, device="cpu") -> tuple:
    "x, w, b, labels [..., K] some of which are ignored and some equal, and the options of a name"
    made, options = torch.Generator().manual_seed(0), dict(OPTIONS[how])
    new = lambda *size: torch.randn(size, generator=made, dtype=f64)
    x, w, b, y = new(*shape, h), new(v, h), new(v), torch.randint(v, (*shape, k), generator=made)
    rows = y.view(-1, k)
    rows[0, 0], rows[1], rows[2], rows[-1, -1] = -100, -100, rows[2, 0].item(), -100
    for name, size in (("weight", (v,)), ("token_weight", shape), ("target_weight", (k,))):
        if options.pop(name, False): options[name] = torch.rand(size, generator=made, dtype=f64).to(device)
    return *(t.to(device, dtype).requires_grad_() for t in (x, w, b)), y.to(device), options


def definition(x, w, b, y, reduction="mean", *, weight=None, token_weight=None, target_weight=None, label_smoothing=0.0, logit_scale=1.0,
               softcap=None, z_loss=0.0, ignore_index=-100):
    "PyTorch's loss of each token and target, what we add to it, and the weights of all that are not ignored"
    z = logit_scale * torch.nn.functional.linear(x, w, b)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    each, weights = torch.zeros_like(z[..., 0]), torch.zeros_like(z[..., 0])
    for k in range(y.shape[-1]):
        found = torch.nn.functional.cross_entropy(z.flatten(0, -2), y[..., k].flatten(), weight, reduction="none", label_smoothing=label_smoothing,
                                                  ignore_index=ignore_index).view(each.shape) + z_loss * z.logsumexp(-1) ** 2
        counts = (y[..., k] != ignore_index) * (1 if token_weight is None else token_weight) * (1 if target_weight is None else target_weight[k])
        each = each + counts * found
        weights = weights + counts * (1 if weight is None else weight[y[..., k].clamp(min=0)])
    return {"none": each, "sum": each.sum(), "mean": each.sum() / weights.sum()}[reduction]


def faults(call, how, reduction, method, device="cpu", dtype=f64, limit=1e-10) -> list[str]:
    "What a loss gets wrong beside the definition in float64: its value, and dx, dw, db of any upstream gradient"
    *leaves, y, options = sample(how=how, dtype=dtype, device=device)
    x, w, b = leaves
    got, wide = call(x, w, y, linear_bias=b, method=method, reduction=reduction, **options), [t.detach().to(f64).requires_grad_() for t in leaves]
    exact = definition(*wide, y, reduction, **options)
    g = torch.linspace(-1, 2, max(1, exact.numel()), dtype=f64, device=device).view(exact.shape)
    found = [got, *torch.autograd.grad(got, leaves, g.to(got.dtype))]
    true = [exact, *torch.autograd.grad(exact, wide, g)]
    return [name for name, a, e in zip(("loss", "dx", "dw", "db"), found, true)
            if a.shape != e.shape or not relative_error(a.detach().cpu(), e.detach().cpu()) < limit]


@pytest.mark.parametrize("method, reduction, how", grid(("auto", "chunks", "eager"), ("mean", "sum", "none"), OPTIONS))
def test_every_method_is_the_definition(method, reduction, how, device):
    if (method, reduction) == ("chunks", "none"): pytest.skip("which chunks do not give")
    assert faults(fl.linear_cross_entropy, how, reduction, method, device) == []


@pytest.mark.parametrize("method, dtype", [("chunks", bf16), ("chunks", f16), ("eager", f32), ("eager", bf16)])
def test_narrow_numbers(method, dtype, device):
    assert faults(fl.linear_cross_entropy, "all", "mean", method, device, dtype, 4 * TOLERANCE[dtype]) == []


def test_chunks_of_tokens_and_a_shift():
    x, w, _, y, _ = sample((2, 300))
    by = torch.linspace(0, 1, 600, dtype=f64).view(2, 300)
    for how in (dict(method="eager"), dict(method="chunks"), dict(method="chunks", memory_budget=8 * 16 * 64 * 4)):
        found = fl.linear_cross_entropy(x, w, y, shift=2, token_weight=by, **how)
        exact = definition(x[:, :-2], w, None, y[:, 2:], token_weight=by[:, 2:])
        assert_close(found, exact)
        for a, e in zip(torch.autograd.grad(found, (x, w)), torch.autograd.grad(exact, (x, w))): assert_close(a, e)


@pytest.mark.parametrize("method", ["auto", "eager", "chunks", "recompute", "product", "tiles"])
def test_one_target_in_a_dimension_of_its_own_is_one_target(method):
    "Bit for bit, and its weight is the token's"
    x, w, _, y, _ = sample(k=1)
    calls = (lambda **given: fl.linear_cross_entropy(x, w, y, method=method, **given)), lambda **given: fl.linear_cross_entropy(x, w, y[..., 0], method=method, **given)
    for given, plain in [({}, {})] + [(dict(target_weight=torch.tensor([0.5])), dict(token_weight=torch.full((2, 9), 0.5)))] * (method != "tiles"):
        found = [[loss, *torch.autograd.grad(loss, (x, w))] for loss in (calls[0](**given), calls[1](**plain))]
        assert all(torch.equal(a, e) for a, e in zip(*found))


def test_a_token_alone_and_many_targets():
    x, w, _, y, _ = sample((4,), k=7)
    assert_close(fl.linear_cross_entropy(x[3], w, y[3] % 11, reduction="none"), definition(x, w, None, y % 11, "none")[3])
    nothing = torch.full_like(y, -100)
    loss = fl.linear_cross_entropy(x, w, nothing)
    assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, (x, w)))
    assert fl.linear_cross_entropy(x[:0], w, y[:0]) == 0


def test_labels_outside_are_found(device):
    x, w, _, y, _ = sample(device=device)
    y[0, 3, 1] = 11
    if device == "cpu":
        with pytest.raises(IndexError, match=r"target\[0, 3, 1\] is 11: expected 0 ≤ label < 11"): fl.linear_cross_entropy(x, w, y)
        return
    for method in ("eager", "chunks"):  # where nothing looks at them
        losses_ = fl.linear_cross_entropy(x, w, y, method="eager", reduction="none")
        assert losses_.isnan().nonzero().tolist() == [[0, 3]]
        loss = fl.linear_cross_entropy(x, w, y, method=method)
        assert loss.isnan() and torch.autograd.grad(loss, x)[0][1].isfinite().all()


@pytest.mark.skipif(torch_version() < (2, 9), reason="plans are traced from PyTorch 2.9 on")
@pytest.mark.parametrize("method", ["eager", "chunks"])
def test_compiled(method):
    x, w, b, y, options = sample(how="all", dtype=f32)
    call = lambda x, w: fl.linear_cross_entropy(x, w, y, linear_bias=b, method=method, **options)
    run = lambda call: (loss := call(x, w), *torch.autograd.grad(loss, (x, w)))
    for a, e in zip(run(torch.compile(call, fullgraph=True, backend="aot_eager")), run(call)): assert_close(a, e)
    assert has_no_second_derivative(call(x, w), x)


def test_the_operator_takes_logits_of_any_strides(device):
    z, y = torch.randn(75, 7, generator=torch.Generator().manual_seed(0)).to(device).T.requires_grad_(), sample((7,), v=75, device=device)[3]
    found, exact = (pairs.labels_loss(a, y, None, None, None, LossOptions()) for a in (z, z.contiguous()))
    assert_close(found, exact)
    assert_close(torch.autograd.grad(found.sum(), z), torch.autograd.grad(exact.sum(), z))


def test_the_module_takes_them():
    x, _, _, y, _ = sample(dtype=f32)
    layer = fl.LinearCrossEntropyLoss(5, 11)
    assert_close(layer(x, y), definition(x, layer.weight, None, y))


REFUSED = {
    "another shape": (dict(target=torch.zeros(5, 3, dtype=torch.long)), r"target: expected shape \[6\], got \[5, 3\]"),
    "no target": (dict(target=torch.zeros(6, 0, dtype=torch.long)), r"target: expected shape \[6\], or at least one target a token, got \[6, 0\]"),
    "one-hot integers": (dict(target=torch.zeros(6, 11, dtype=torch.long)), "target: expected fewer integers a token than classes, or probabilities as floats"),
    "booleans": (dict(target=torch.zeros(6, 3, dtype=torch.bool)), "target: expected an integer dtype"),
    "weights of other targets": (dict(target_weight=torch.ones(2)), r"target_weight: expected floats of shape \[3\]"),
    "a list": (dict(target_weight=[1, 2, 3]), "target_weight: expected a tensor or None, got list"),
    "a gradient": (dict(target_weight=torch.ones(3, requires_grad=True)), "target_weight: expected a tensor without gradient"),
    "one target": (dict(target=torch.zeros(6, dtype=torch.long), target_weight=torch.ones(3)), "target_weight: expected None beside one target a token"),
    "probabilities": (dict(target=torch.rand(6, 11), target_weight=torch.ones(3)), "target_weight: expected None beside one target a token"),
    "weights of all": (dict(token_weight=torch.ones(6, 3)), r"token_weight: expected floats of shape \[6\]"),
    "statistics": (dict(return_stats=True), "return_stats: expected nothing beside several targets a token"),
    "a promise": (dict(max_valid=3), "max_valid: expected nothing beside several targets a token"),
    "a filter": (dict(filter_eps=1e-3), "filter_eps: expected nothing beside several targets a token"),
    **{m: (dict(method=m), f"method: expected 'eager' or 'chunks' for this call, got '{m}': it has no target_weight") for m in ("recompute", "product", "tiles")},
    "chunks of each": (dict(method="chunks", reduction="none"), "method: expected 'eager' for this call, got 'chunks': its gradients are formed before"),
    "too little memory": (dict(memory_budget=1), "memory_budget: expected at least"),
}


@pytest.mark.parametrize("given, words", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        fl.linear_cross_entropy(**dict(input=torch.randn(6, 4), linear_weight=torch.randn(11, 4), target=torch.zeros(6, 3, dtype=torch.long)) | given)


def test_the_plan_says_what_several_targets_cost():
    one, several = (plan(8192, 128256, 4096, machine="H200", options=o) for o in ((), ("target_weight",)))
    assert several.method == "chunks" and several["recompute"].refusal == several["product"].refusal == "it has no target_weight"
    assert one["chunks"].seconds < several["chunks"].seconds < 1.05 * one["chunks"].seconds and one["chunks"].extra == several["chunks"].extra


@pytest.mark.parametrize("dtype, how", [(f64, {}), (f32, dict(label_smoothing=0.1)), (bf16, {}), (f32, dict(reduction="none"))], ids=str)
def test_predicted_bytes_are_those_counted(dtype, how):
    x, w, _, y, _ = sample((512,), v=4000, h=16, dtype=dtype)
    p = plan(512, 4000, 16, dtype, device="cpu", options=("target_weight", *[k for k in how if k != "reduction"]), reduction=how.get("reduction", "mean"))
    run = lambda method: torch.autograd.grad(fl.linear_cross_entropy(x, w, y, method=method, **how).sum(), (x, w))
    told = {way.method: (peak_memory(lambda: run(way.method)) - x.nbytes - w.nbytes) / way.extra for way in p.able}
    assert told and all(0.9 < ratio < 1.1 for ratio in told.values()), told


# --- the kernel ---

BLOCKS = {"own": None, "small": pairs.PairBlocks(1, 2, 16, 1), "two": pairs.PairBlocks(2, 4, 32, 1)}


@pytest.fixture
def place(device):
    "A device on which launchers run"
    need_kernels(device)
    return device


def kernel_faults(k, how, blocks, dtype, labels=3, device="cpu") -> list[str]:
    "What the launcher of module `k` gets wrong, in and beside the place of the logits, which lie amid NaN"
    made, (*_, y, options) = torch.Generator().manual_seed(0), sample((7,), labels, 75, how=how, device=device)
    y[4, -1] = 75 if labels > 2 else y[4, -1]  # no class
    share, w = torch.rand(y.shape, generator=made).to(device), options.pop("weight", None)
    for name in ("token_weight", "target_weight"): options.pop(name, None)
    o, total, wide = LossOptions(**options), torch.tensor(1.5, device=device), torch.full((9, 96), torch.nan, device=device, dtype=dtype)
    z = wide[1:8, 8:83].copy_(torch.randn(7, 75, generator=made) * 3)
    z[3, 20:40] = 30.0
    exact, dz = pairs.reference_labels(z.double(), y, w, share.double(), total.double(), o, True)
    apart = torch.full((7, 75), torch.nan, dtype=dtype, device=device)
    w = None if w is None else w.float()
    found = [k.launch_labels(z, y, out, w, share, total, o, False, blocks) for out in (None, apart, z)]
    right = [f for a in found for f in off("loss", a.nan_to_num(-7.0), exact.nan_to_num(-7.0), 3e-5)]
    right += off("gradient", apart, dz, TOLERANCE[dtype]) + off("gradient in place", z, dz, TOLERANCE[dtype])
    around = torch.ones_like(wide, dtype=torch.bool)
    around[1:8, 8:83] = False
    return right + ["it writes outside"] * (not wide[around].isnan().all())


KERNEL_GRID = grid(few(OPTIONS, "plain", "z-loss", "all"), BLOCKS, (f32, bf16))


@pytest.mark.parametrize("how, blocks, dtype", thorough_but(KERNEL_GRID, *KERNEL_GRID[::2]))
def test_the_kernel(how, blocks, dtype, place):
    assert kernel_faults(pairs, how, BLOCKS[blocks], dtype, device=place) == []


@pytest.mark.parametrize("labels", few([1, 2, 5, 40], 5))
def test_any_number_of_labels(labels, place):
    assert kernel_faults(pairs, "classes", BLOCKS["small"], f32, labels, place) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("method", ["eager", "chunks"])
def test_nothing_waits_for_the_gpu_and_a_graph_captures_it(method):
    x, w, _, y, options = sample((512,), 3, 5003, 64, "all", bf16, "cuda")
    def step():
        loss = fl.linear_cross_entropy(x, w, y, method=method, **options)
        return loss.detach(), *torch.autograd.grad(2 * loss, [x, w])
    assert replays(step)


# --- planted bugs ---

KERNEL_BUGS = {
    "the first of equal labels alone": ("taken += tl.where(y == y_k,", "taken = tl.where(y == y_k,"),
    "equal labels once each": ("taken += tl.where(y == y_k,", "taken += tl.where((y == y_k) & (each == k),"),
    "a bad label is ignored": ("(tl.max((~ignored & ~valid).to(tl.int32), 1) == 0)", "(tl.max(valid.to(tl.int32), 1) > 0)"),
    "a label forgets its slope": ("(dz_y * slope_y)", "(dz_y * 1.0)"),
    "a label forgets smoothing": ("dz_y -= all_smoothing[:, None]", "dz_y -= 0 * all_smoothing[:, None]"),
    "the next row's labels": ("at = tl.where(each < K, own + each, size)", "at = own + each"),
    "a mean of one label": ("tl.sum(softmax_coef, 1) / s", "tl.max(softmax_coef, 1) / s"),
    "an ignored row keeps its logits": ("range(0, edge * (1 - busy), B)", "range(0, 0, B)"),
}
KERNEL_WAYS = [("classes", "small", f32), ("scores", "two", f32), ("plain", "small", f32)]


def noticed(k) -> list[str] | None:
    return first_fault_of([partial(kernel_faults, k, how, BLOCKS[blocks], dtype) for how, blocks, dtype in KERNEL_WAYS])


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize("bug", few(KERNEL_BUGS, "the first of equal labels alone", "equal labels once each", "an ignored row keeps its logits"))
def test_a_bug_in_the_kernel_is_noticed(bug, tmp_path):
    assert noticed(planted(pairs, tmp_path, *KERNEL_BUGS[bug])), "nothing noticed"


LOSS_BUGS = {
    "targets weigh the same": ("share = by if token_weight is None else token_weight[:, None] * by", "share = by if token_weight is None else token_weight[:, None] * torch.ones_like(by)"),
    "tokens weigh the same": ("share = by if token_weight is None else token_weight[:, None] * by", "share = by"),
    "a mean over tokens": ("return total_weight(flat(target), weight, flat(token_weight),", "return total_weight(target[:, 0], weight, None,"),
    "smoothing without class weights": ("smoothing_coef * (log_q @ t.w)[:, None]", "smoothing_coef * log_q.sum(1, keepdim=True)"),
    "smoothing once a token": ("dz.addr_(smoothing_coef.sum(1), t.w, alpha=-1)", "dz.addr_(smoothing_coef[:, 0], t.w, alpha=-1)"),
    "an ignored target counts": ("losses = torch.where(t.ignored, 0.0, torch.where(t.valid, losses, torch.nan)).sum(1)", "losses = losses.sum(1) + t.ignored.sum(1)"),
    "one label takes all": ("dz.scatter_add_(1, t.label, -target_coef)", "dz.scatter_add_(1, t.label, -target_coef.sum(1, keepdim=True) * (torch.arange(3) == 0))"),
}


def loss_faults(module) -> list[str] | None:
    call = module.linear_cross_entropy
    return first_fault_of([partial(faults, call, "all", "mean", "chunks"), partial(faults, call, "all", "none", "eager")])


def test_the_unchanged_source_passes(tmp_path):
    assert loss_faults(planted(losses, tmp_path, *unchanged(LOSS_BUGS.values()))) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", few(LOSS_BUGS, "targets weigh the same", "a mean over tokens"))
def test_a_bug_in_the_loss_is_noticed(bug, tmp_path):
    assert loss_faults(planted(losses, tmp_path, *LOSS_BUGS[bug])), "nothing noticed"
