"""A linear cross entropy whose backward matmuls are in FP8: its gradients against float64 beside those of eager bf16, what is kept apart, and how memory is shared out."""
import ctypes
import itertools
import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

import fusedloss as fl
from fusedloss import fp8
from fusedloss.chunks import Gradients
from fusedloss.core.devices import device_of
from fusedloss.core.fp8 import beyond, Cut, cuts, HEAVY, held_bytes, LISTED, pieces, plan_cut, ranking_machine, Sizes, TOP, UNIT
from fusedloss.core.options import LossOptions
from fusedloss.core.rates import H200, machines
from fusedloss.core.score_product import product_of
from fusedloss.core.cuda import cuda_source
from fuzz_calls import in_eight, largest
from workbook.measure import relative_error
from grids import few
from helpers import planted, where_kernels_run
from on_cpu import check_nvcc, kernels_on_cpu

bf16, f32, f64, FP8 = torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn
N, H, V = 256, 96, 3001  # N: a power of two, by which a mean divides without rounding
PEAKS = {"random": 0.0, "begun": 3.0, "trained": 8.0, "sure": 16.0}  # how far a token's likely classes stand out
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter


@pytest.fixture(autouse=True)
def can_multiply(device):
    "On a GPU without the kernel of the scores every call is refused"
    if device == "cuda" and product_of(device_of(torch.empty(0, device=device))).lacks(device_of(torch.empty(0, device=device))):
        pytest.skip("no kernel for this GPU")


class State(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    y: torch.Tensor


def state(device: str, kind: str, n: int = N, h: int = H, v: int = V, dtype: torch.dtype = bf16, seed: int = 0) -> State:
    "Hidden states to which a few classes of a Zipf's law are likely, and targets drawn from their softmax"
    made = torch.Generator().manual_seed(seed)
    w, x = torch.randn(v, h, generator=made) / h**0.5, torch.randn(n, h, generator=made)
    if PEAKS[kind]:
        likely = torch.multinomial((1 / torch.arange(1, v + 1)).expand(n, v), 10, generator=made)
        x = 0.8 * x + torch.einsum("k,nkh->nh", PEAKS[kind] / torch.arange(1, 11), w[likely])
    y = (x @ w.T).softmax(1).multinomial(1, generator=made)[:, 0]
    return State(x.to(device, dtype), w.to(device, dtype), y.to(device))


def taken(s: State, loss) -> tuple[torch.Tensor, ...]:
    "A loss and its gradients by x and w"
    x, w = (t.detach().clone().requires_grad_() for t in s[:2])
    found = loss(x, w, s.y)
    found.backward()
    return found.detach(), x.grad, w.grad


def in_double(s: State, loss) -> tuple[torch.Tensor, ...]:
    return taken(State(s.x.double(), s.w.double(), s.y), loss)


def eager(x, w, y, **options):
    "The loss from logits that stay in fp32: the most exact one that bf16 matmuls allow"
    return F.cross_entropy(WideLogits.apply(x, w), y, **options)


class WideLogits(torch.autograd.Function):
    "x wᵀ in fp32, with bf16 matmuls backward, as cuBLAS does them: dz is rounded, sums are not"
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x.double() @ w.double().T).to(torch.promote_types(x.dtype, f32))

    @staticmethod
    def backward(ctx, dz):
        x, w = ctx.saved_tensors
        dz = dz.to(x.dtype).double()
        return (dz @ w.double()).to(x.dtype), (dz.T @ x.double()).to(w.dtype)


def eighths(x, w, y, **options):
    return fl.linear_cross_entropy(x, w, y, matmul_dtype=FP8, **options)


LOSSES = {"backward": eighths, "all": partial(eighths, forward_dtype=FP8)}
in_both = pytest.mark.parametrize("in_fp8", LOSSES.values(), ids=LOSSES)


def rounded_logits(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # [N,H], [V,H], float64
    "Logits of x and w in FP8, with the gradients of exact ones"
    z = in_eight(x, largest(x, 1)) @ in_eight(w, largest(w, 0, 1)).T
    exact = x @ w.T
    return exact + (z - exact).detach()


def shares(s: State, loss=eighths, logits=lambda x, w: x @ w.T, **options) -> list[float]:
    "Errors of loss, dx and dw by `loss`, the latter as shares of eager bf16's"
    exact = in_double(s, lambda *t: F.cross_entropy(logits(*t[:2]), t[2], **options))
    right = in_double(s, lambda *t: F.cross_entropy(t[0] @ t[1].T, t[2], **options))
    got, usual = taken(s, lambda *t: loss(*t, **options)), taken(s, lambda *t: eager(*t, **options))
    off = lambda found, exact: [relative_error(a, b) for a, b in zip(found, exact)]
    return [off(got, exact)[0], *(a / b for a, b in zip(off(got, exact)[1:], off(usual, right)[1:]))]


@pytest.mark.parametrize("kind", PEAKS)
def test_gradients_err_as_those_of_bf16_do(kind, device):
    loss, dx, dw = shares(state(device, kind))
    assert loss < 2e-6 and max(dx, dw) < 1.15, (loss, dx, dw)


@pytest.mark.parametrize("kind", PEAKS)
def test_with_all_matmuls_in_fp8_gradients_err_as_those_of_bf16_do_beside_the_same_logits(kind, device):
    loss, dx, dw = shares(state(device, kind), LOSSES["all"], rounded_logits)
    sums = 0.0 if device == "cpu" else 2.0**-10  # tensor cores keep about 14 bits of a logit
    assert loss < 2e-6 + sums and max(dx, dw) < (1.15 if device == "cpu" else 2.0), (loss, dx, dw)


def test_a_logit_in_fp8_is_off_by_what_the_documentation_says(device):
    s = state("cpu", "trained")
    x, w = s.x.double(), s.w.double()
    size = (x.square() @ w.square().T).sqrt()
    off = (rounded_logits(x, w) - x @ w.T) / size
    assert 0.03 < off.square().mean().sqrt() < 0.04


@pytest.mark.parametrize("change, least", [(("HEAVY = 1 / 252", "HEAVY = 2.0"), 2.5), (("out.values[:, 0] = torch.where(known, rows.at_target, 0.0)", "out.values[:, 0] = rounded8(torch.where(known, rows.at_target * len(y), 0.0)).float() / len(y)"), 2.0)],
                         ids=["no heavy entries apart", "the target rounded"])
def test_errors_show_what_is_not_kept_apart(change, least, tmp_path, device):
    if device == "cuda":
        pytest.skip("the bugs are in PyTorch's path")
    module = planted(fp8, tmp_path, *change)
    s = state(device, "trained")
    assert max(shares(s, lambda x, w, y: _loss_by(module, x, w, y))[1:]) > least


def _loss_by(module, x, w, y):
    "The mean, by a variant's operator"
    return module.fp8_loss(x, w, None, y, None, None, LossOptions(), bf16, bf16, True, None, "auto", None, True, True, False)[0]


def rounding(kind: str) -> tuple[float, float]:
    "The errors of dx with dz rounded to FP8 as it is, and with the target apart, in float64 but for that"
    s = state("cpu", kind)
    x, w, y = s.x.double(), s.w.double(), s.y
    p = (x @ w.T).softmax(1)
    hot = F.one_hot(y, V).double()
    exact = (p - hot) @ w
    units = w.abs().amax(1)  # of w's rows, which a matmul's scales cannot be: they multiply dz before it is rounded
    largest = lambda t: (t * units).abs().amax() / 448
    to8 = lambda t: (t * units / largest(t)).float().to(FP8).double() * largest(t) / units
    return relative_error(to8(p - hot) @ w, exact), relative_error(to8(p * (1 - hot)) @ w - ((1 - p) * hot) @ w, exact)


def test_a_target_among_the_others_costs_the_digits():
    whole, apart = rounding("random")
    assert whole > 1.5e-2 > 10 * apart, (whole, apart)


# --- what is kept apart ---

def equal_classes(count: int, device: str, target_score: float = -20.0) -> tuple[State, torch.Tensor]:
    "A token to which `count` classes are equally likely, and no other; and its probabilities"
    x, w = torch.zeros(1, 16), torch.zeros(600, 16)
    x[:, 0], w[:, 0] = 1, -60
    w[5:5 + count, 0], w[0, 0] = 0, target_score
    w[:, 1] = torch.linspace(-1, 1, 600)
    s = State(x.to(device, bf16), w.to(device, bf16), torch.zeros(1, dtype=torch.int64, device=device))
    return s, (s.x.double() @ s.w.double().T).softmax(1)


@pytest.mark.parametrize("count", [1, 128, 251, 252, 253, 300])
def test_as_many_heavy_classes_as_there_can_be(count, device):
    s, p = equal_classes(count, device)
    wanted = int((p > HEAVY).sum())
    assert wanted == (count if count < 252 else 0)
    _, dx, dw = taken(s, eighths)
    exact = in_double(s, lambda *t: F.cross_entropy(t[0] @ t[1].T, t[2]))
    limit = 4e-3 if wanted else 4e-2  # equal probabilities all err alike
    assert relative_error(dx, exact[1]) < limit and relative_error(dw, exact[2]) < limit


ways = pytest.mark.parametrize("way", ["PyTorch", pytest.param("kernels", marks=where_kernels_run)])


def passes(way: str, device: str) -> fp8.Passes8:
    "By kernels: on a CPU those of Triton, which its interpreter runs"
    if way == "PyTorch":
        return fp8.PYTORCH8
    return fp8.KERNELS8 if device == "cuda" else fp8.KERNELS8._replace(round=fp8.reference_rounded)


def narrow(device: str) -> torch.dtype:
    "What exponentials are in; Triton's interpreter has no bf16"
    return bf16 if device == "cuda" else f32


def listed(e: torch.Tensor, y: torch.Tensor, by, tile: int = 128) -> tuple[fp8.Entries, torch.Tensor]:
    "The entries of exponentials with coefficients of 1"
    one, total = torch.ones(len(e), device=e.device), e.float().sum(1)
    rows = fp8.Rows(one, one, -one, total, one)
    light = torch.zeros(len(e), -(-e.shape[1] // 16) * 16, device=e.device).to(FP8)
    heavy, found = torch.zeros(len(e), -(-e.shape[1] // tile), dtype=torch.uint8, device=e.device), fp8.new_entries(e, len(e), e.shape[1])
    inverses = fp8.row_inverses(rows)
    by.round(fp8.Rounded(light, None, heavy), e, inverses)
    by.entries(found, e, y, rows, inverses, heavy, tile)
    return found, light


@ways
def test_no_row_has_more_entries_than_fit(way, device):
    "Every exponential rounded up: none is beyond the range, none is left out"
    by = passes(way, device)
    for count in (1, 200, 251, 252, 253):
        e = torch.zeros(2, 520, device=device, dtype=narrow(device))
        e[1, 7:7 + count] = 1.0
        e[0, ::2] = 1.0
        found, light = listed(e, torch.tensor([1, 3], device=device), by)
        assert found.counts.tolist() == [1, 1 + count * (count < 252)] and found.counts.max() <= LISTED
        assert light.float().isfinite().all() and light.float().max() <= TOP
        assert found.classes[1, :found.counts[1]].tolist() == [3, *range(7, 7 + count)][:found.counts[1]]
    rounded_up = torch.full((1, 300), 0.0, device=device, dtype=narrow(device))
    rounded_up[0, :252] = 1 + 2**-7
    one = torch.ones(1, device=device)
    rows = fp8.Rows(one, one, -one, 252 * one, one)  # of the sum before rounding
    heavy, found = torch.zeros(1, 3, dtype=torch.uint8, device=device), fp8.new_entries(rounded_up, 1, 300)
    inverses = fp8.row_inverses(rows)
    by.round(fp8.Rounded(heavy=heavy), rounded_up, inverses)
    by.entries(found, rounded_up, torch.tensor([299], device=device), rows, inverses, heavy, 128)
    assert found.counts.item() == 253 <= LISTED and HEAVY * UNIT == TOP


def test_a_sure_token_keeps_its_small_gradient(device):
    "p(target) = 1 - 1e-4: the gradient is what is left, and is right"
    s, p = equal_classes(3, device, target_score=10.0)
    got, exact = taken(s, eighths), in_double(s, lambda *t: F.cross_entropy(t[0] @ t[1].T, t[2]))
    assert 1e-5 < 1 - p[0, 0] < 1e-3
    assert relative_error(got[2], exact[2]) < 4e-3 and relative_error(got[1], exact[1]) < 4e-3 and relative_error(got[0], exact[0]) < 1e-3


# --- what a loss must do ---

@in_both
def test_ignored_tokens_bring_nothing(in_fp8, device):
    s = state(device, "trained")
    some, x = torch.arange(N, device=device) % 3 != 0, s.x.clone()
    x[~some] = math.nan
    y = torch.where(some, s.y, -100)
    loss, dx, dw = taken(State(x, s.w, y), in_fp8)
    alone = taken(State(s.x[some], s.w, s.y[some]), in_fp8)
    assert (dx[~some] == 0).all() and torch.allclose(loss, alone[0], rtol=1e-6)
    assert relative_error(dx[some], alone[1]) < 1e-3 and relative_error(dw, alone[2]) < 1e-3


@in_both
@pytest.mark.parametrize("ignored", [True, False])
def test_no_token_gives_zeros(in_fp8, ignored, device):
    s = state(device, "random")
    s = State(s.x, s.w, torch.full_like(s.y, -100)) if ignored else State(s.x[:0], s.w, s.y[:0])
    assert all((t == 0).all() for t in taken(s, in_fp8))


OPTIONS = {"bias": {}, "z_loss": dict(z_loss=1e-2), "softcap": dict(softcap=8.0), "logit_scale": dict(logit_scale=0.7), "sum": dict(reduction="sum"), "all": dict(z_loss=1e-2, softcap=8.0, logit_scale=1.3, reduction="sum")}


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("weighed", [False, True])
def test_options_of_the_loss(how, weighed, device):
    s, made = state(device, "begun"), torch.Generator().manual_seed(1)
    bias = torch.randn(V, generator=made).to(device, bf16)
    given = dict(weight=torch.rand(V, generator=made).to(device), token_weight=torch.rand(N, generator=made).to(device)) if weighed else {}

    def of(dtype, **more):
        x, w, b = (t.detach().to(dtype).requires_grad_() for t in (s.x, s.w, bias))
        loss = fl.linear_cross_entropy(x, w, s.y, linear_bias=b, **given, **OPTIONS[how], **more)
        (loss * 3).backward()
        return loss.detach(), x.grad, w.grad, b.grad

    off = [relative_error(a, b) for a, b in zip(of(bf16, matmul_dtype=FP8), of(f64, method="eager"))]
    assert off[0] < 2e-6 and max(off[1:]) < 4e-3, off


@in_both
@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_a_gradient_that_nobody_wants(in_fp8, needs, device):
    s = state(device, "trained")
    x, w = s.x.clone().requires_grad_(needs[0]), s.w.clone().requires_grad_(needs[1])
    in_fp8(x, w, s.y).backward()
    both = taken(s, in_fp8)
    for t, g in ((x, both[1]), (w, both[2])):
        assert (t.grad is None) != t.requires_grad and (t.grad is None or torch.equal(t.grad, g))


def test_the_loss_is_that_of_bf16_with_and_without_gradients(device):
    s = state(device, "trained")
    with torch.no_grad():
        loss = eighths(*s)
    assert torch.equal(loss, taken(s, eighths)[0])
    if device == "cuda":
        assert torch.allclose(loss, fl.linear_cross_entropy(*s, method="product"), rtol=1e-6)


@in_both
def test_the_same_call_gives_the_same_bits(in_fp8, device):
    s = state(device, "trained", seed=3)
    first = taken(s, in_fp8)
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(taken(s, in_fp8), first))


@in_both
def test_micro_batches_add_up(in_fp8, device):
    s = state(device, "trained")
    x, w = s.x.clone().requires_grad_(), s.w.clone().requires_grad_()
    for i in (slice(0, 80), slice(80, N)):
        in_fp8(x[i], w, s.y[i], reduction="sum").backward()
    whole = taken(s, lambda *t: in_fp8(*t, reduction="sum"))
    assert relative_error(w.grad, whole[2]) < 3e-3 and relative_error(x.grad, whole[1]) < 1e-3


@in_both
def test_a_weight_that_moves_between_calls_is_read_anew(in_fp8, device):
    s = state(device, "begun")
    first = taken(s, in_fp8)
    w = s.w.clone().requires_grad_()
    in_fp8(s.x, w, s.y).backward()
    with torch.no_grad():
        w.mul_(2)
    w.grad = None
    x = s.x.clone().requires_grad_()
    in_fp8(x, w, s.y).backward()
    fresh = taken(State(s.x, s.w * 2, s.y), in_fp8)
    assert torch.equal(x.grad, fresh[1]) and torch.equal(w.grad, fresh[2]) and not torch.equal(x.grad, first[1])


def test_tied_weights(device):
    "An embedding that is the head's weight too gets both gradients"
    s = state(device, "random")

    def tied(dtype, **more):
        w = s.w.detach().clone().to(dtype).requires_grad_()
        fl.linear_cross_entropy(torch.tanh(w[s.y.flip(0)]) * 4, w, s.y, **more).backward()
        return w.grad

    assert relative_error(tied(bf16, matmul_dtype=FP8), tied(f64, method="eager")) < 8e-3


def test_weights_in_float32_under_autocast(device):
    s = state(device, "trained")
    x, w = s.x.float().requires_grad_(), s.w.float().requires_grad_()
    with torch.autocast(device, bf16):
        eighths(x, w, s.y).backward()
    exact = in_double(s, lambda *t: F.cross_entropy(t[0] @ t[1].T, t[2]))
    assert x.grad.dtype == w.grad.dtype == f32
    assert relative_error(x.grad, exact[1]) < 2e-3 and relative_error(w.grad, exact[2]) < 2e-3  # nothing is rounded to bf16


@in_both
@pytest.mark.parametrize("how", ["transposed", "strided", "every other row"])
def test_weights_of_any_strides(in_fp8, how, device):
    s = state(device, "trained")
    lay = {"transposed": lambda t: t.T.contiguous().T, "strided": lambda t: torch.stack([t, t], 2)[..., 0], "every other row": lambda t: torch.stack([t, t], 1)[:, 0]}[how]
    x, w = lay(s.x).requires_grad_(), lay(s.w).requires_grad_()
    in_fp8(x, w, s.y).backward()
    plain = taken(s, in_fp8)
    assert torch.equal(x.grad, plain[1]) and torch.equal(w.grad, plain[2])


@in_both
@pytest.mark.parametrize("size", [2.0**-100, 2.0**-20, 2.0**10, 2.0**60])
def test_features_of_any_size(in_fp8, size, device):
    s = state(device, "begun")
    small = State((s.x.float() * size).to(bf16), (s.w.float() / size).to(bf16), s.y)
    for got, wanted in zip(taken(small, in_fp8), (1, 1 / size, size)):
        assert got.isfinite().all()
    off = [relative_error(a.double() / f, b) for a, b, f in zip(taken(small, in_fp8), taken(s, in_fp8), (1, 1 / size, size))]
    assert max(off) < 1e-3, off


@in_both
def test_large_finite_scores_give_finite_numbers(in_fp8, device):
    s = state(device, "trained")
    for factor in (30.0, 3000.0):
        assert all(t.isfinite().all() for t in taken(State((s.x.float() * factor).to(bf16), s.w, s.y), in_fp8))


@in_both
@pytest.mark.parametrize("where", ["x", "w"])
def test_what_is_no_number_is_not_hidden(in_fp8, where, device):
    s = state(device, "random")
    getattr(s, where)[7, 3] = math.nan
    loss, dx, dw = taken(s, in_fp8)
    assert loss.isnan() and dx.isnan().any() and dw.isnan().any()


@in_both
def test_a_weight_of_zeros(in_fp8, device):
    s = state(device, "random")
    loss, dx, dw = taken(State(s.x, torch.zeros_like(s.w), s.y), in_fp8)
    exact = in_double(State(s.x, torch.zeros_like(s.w), s.y), lambda *t: F.cross_entropy(t[0] @ t[1].T, t[2]))
    assert (dx == 0).all() and relative_error(dw, exact[2]) < 3e-3 and torch.allclose(loss.double(), exact[0])


@in_both
def test_compiled_in_one_graph_for_any_number_of_tokens(in_fp8, device):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w, y: in_fp8(x * 1, w, y), backend=keep, fullgraph=True, dynamic=True)
    s = state(device, "trained")
    for n in (64, 80, N):
        cut = State(s.x[:n], s.w, s.y[:n])
        assert all(torch.equal(a, b) for a, b in zip(taken(cut, compiled), taken(cut, in_fp8)))
    assert len(graphs) == 1


@in_both
def test_a_promise_and_a_shift(in_fp8, device):
    s = state(device, "trained")
    y = torch.where(torch.arange(N, device=device) % 2 == 0, s.y, -100)
    got, plain = taken(State(s.x, s.w, y), lambda *t: in_fp8(*t, max_valid=N // 2)), taken(State(s.x, s.w, y), in_fp8)
    assert torch.allclose(got[0], plain[0]) and relative_error(got[1], plain[1]) < 1e-3 and relative_error(got[2], plain[2]) < 1e-3
    x, y = s.x.view(2, -1, H), s.y.view(2, -1)
    assert torch.allclose(in_fp8(x, s.w, y, shift=1), in_fp8(x[:, :-1], s.w, y[:, 1:]))


def test_the_module_hands_it_on(device):
    for loss in LOSSES.values():
        module = fl.LinearCrossEntropyLoss(H, V, **(loss.keywords if loss is not eighths else {}), matmul_dtype=FP8, device=device, dtype=bf16)
        s = state(device, "random")
        assert repr(module).count("float8_e4m3fn") == 1 + (loss is not eighths)
        module(s.x, s.y).backward()
        assert torch.equal(module.weight.grad, taken(State(s.x, module.weight.detach(), s.y), loss)[2])


# --- what it does not go with ---

REFUSED = {
    "another dtype": (dict(matmul_dtype=torch.float8_e5m2), "matmul_dtype: expected torch.float8_e4m3fn or None, got torch.float8_e5m2"),
    "a word": (dict(matmul_dtype="float8"), "matmul_dtype: expected torch.float8_e4m3fn or None, got 'float8'"),
    "another dtype forward": (dict(forward_dtype=bf16), "forward_dtype: expected torch.float8_e4m3fn or None, got torch.bfloat16"),
    "forward alone": (dict(matmul_dtype=None, forward_dtype=FP8), "forward_dtype: expected None without matmul_dtype, got torch.float8_e4m3fn"),
    "forward, statistics": (dict(forward_dtype=FP8, return_stats=True), "return_stats"),
    "another method": (dict(method="chunks"), "method: expected 'auto' or 'product' beside matmul_dtype, got 'chunks'"),
    "each token": (dict(reduction="none"), "reduction 'none'"),
    "label smoothing": (dict(label_smoothing=0.1), "label_smoothing"),
    "statistics": (dict(return_stats=True), "return_stats"),
    "a filter": (dict(filter_eps=1e-4), "filter_eps"),
    "a budget": (dict(memory_budget=1000), "memory_budget: expected at least"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_go_with_is_refused(name, device):
    given, words = REFUSED[name]
    s = state(device, "random")
    with pytest.raises(ValueError) as error:
        fl.linear_cross_entropy(*s, **dict(matmul_dtype=FP8) | given)
    assert words in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, f32, f64])
def test_operands_of_other_dtypes_are_refused(dtype, device):
    s = state(device, "random", dtype=dtype)
    with pytest.raises(ValueError, match=f"matmul_dtype: expected None for this call, got torch.float8_e4m3fn: FP8 goes with bfloat16 operands, not {str(dtype)[6:]}"):
        eighths(*s)


@pytest.mark.parametrize("h", [88, 0])
def test_features_that_sixteen_does_not_divide_are_refused(h, device):
    s = state(device, "random", h=h)
    with pytest.raises(ValueError, match=f"matmul_dtype: .* positive multiple of 16 features, not {h}"):
        eighths(*s)


def test_several_targets_and_probabilities_are_refused(device):
    s = state(device, "random")
    for y in (torch.stack([s.y, s.y], 1), torch.zeros(N, V, device=device)):
        with pytest.raises(ValueError, match="matmul_dtype: expected None for this call"):
            eighths(s.x, s.w, y)


def test_a_gpu_without_the_kernel_is_refused():
    for name in ("A100 80GB", "L4", "B200"):
        found = fl.plan(1024, 32000, 1024, options=("matmul_dtype",), machine=name)
        assert found.chosen is None and "FP8 needs the scores' own kernel" in found["product"].refusal


def test_a_plan_knows_a_forward_in_fp8():
    backward, both = (fl.plan(8192, 128256, 4096, options=options, machine="H200")["product"] for options in (("matmul_dtype",), ("matmul_dtype", "forward_dtype")))
    assert both.seconds < 0.9 * backward.seconds and both.extra > backward.extra and "all in FP8" in str(both.cut)
    alone = fl.plan(8192, 128256, 4096, options=("forward_dtype",), machine="H200")
    assert alone.chosen is None and alone["product"].refusal == "FP8 forward goes with FP8 backward"


# --- how matrices are cut ---

SIZES = [Sizes(*size, *needs, grad, 2 * size[2], forward) for forward in (False, True) for size in ((1, 16, 5), (70, 64, 300), (8192, 4096, 128256), (16384, 2048, 131072), (8192, 896, 151936))
         for needs in ((True, True), (True, False), (False, True)) for grad in (2, 4)]


@pytest.mark.parametrize("budget", [None, 2**29, 2**31])
def test_a_cut_fits_and_matmuls_can_take_it(budget):
    for s in SIZES:
        c = plan_cut(s, H200, budget)
        assert held_bytes(c, s) <= (budget or 2**62) or c == min(cuts(s, False), key=lambda c: held_bytes(c, s))
        assert c.rows <= c.group <= max(s.n, 1) and (c.group % c.rows == 0 or c.group == s.n)
        assert (c.rows % 128 == 0 or c.rows == s.n) and (c.slab % 2048 == 0 or c.slab == s.v)
        assert plan_cut(s, H200, budget, True).group >= s.n


def test_each_board_ranks_cuts_by_its_own_figures():
    boards = [machines()[name] for name in ("H200", "H100", "H100 PCIe")]
    assert [ranking_machine(m.device) for m in boards] == boards and ranking_machine(device_of("cpu")) is H200
    sizes = (16384, 131072, 2048), (8192, 151936, 896)
    found = [tuple(fl.plan(*size, memory_budget=2**31, options=("matmul_dtype",), machine=m)["product"].cut for size in sizes) for m in boards]
    assert len(set(found)) == 3


def test_a_loss_cuts_as_the_board_under_it(monkeypatch):
    asked, x, w, y = [], torch.randn(8, 16, dtype=bf16), torch.randn(48, 16, dtype=bf16, requires_grad=True), torch.arange(8)
    monkeypatch.setattr(fp8, "device_of", lambda t: machines()["H100 PCIe"].device)
    monkeypatch.setattr(fp8, "plan_cut", lambda s, by, *rest: asked.append(by) or plan_cut(s, by, *rest))
    fl.linear_cross_entropy(x, w, y, matmul_dtype=FP8).backward()
    assert asked == [machines()["H100 PCIe"]]


def test_a_part_of_a_board_ranks_cuts_by_the_multiprocessors_it_has():
    s, part = Sizes(8192, 896, 151936, True, True, 2, 303872), H200.device._replace(name="NVIDIA H200 MIG 3g.71gb", multiprocessors=60)
    assert ranking_machine(part).device == part and ranking_machine(part) is ranking_machine(part)
    assert plan_cut(s, ranking_machine(part)) != plan_cut(s, H200)


def test_one_sum_of_dw_is_rounded_once():
    assert all(plan_cut(s, H200, 2**20, True).group == s.n for s in SIZES)


@pytest.mark.parametrize("forward, fitting", [(False, 2), (True, 2)])
def test_memory_that_is_not_written_yet_serves(forward, fitting):
    s, c = Sizes(512, 256, 4096, True, True, 2, 8192, forward), Cut(512, 128, 4096)
    dw = torch.empty(4096, 256, dtype=bf16)
    room = fp8.Room(dw, dw)
    taken_bytes = [room.take(torch.uint8, size) for size in pieces(c, s)]
    inside = [t.data_ptr() // 1 in range(dw.data_ptr(), dw.data_ptr() + dw.nbytes) for t in taken_bytes]
    assert c.waits(s) and sum(t.nbytes for t, within in zip(taken_bytes, inside) if not within) == beyond(pieces(c, s), dw.nbytes)
    assert inside.count(True) == fitting and all(a.data_ptr() + a.nbytes <= b.data_ptr() for a, b in zip(taken_bytes, taken_bytes[1:]) if b.data_ptr() > a.data_ptr())


CUTS = [Cut(70, 70, 300), Cut(70, 16, 300), Cut(32, 16, 300), Cut(32, 32, 128), Cut(64, 16, 128), Cut(70, 32, 256), Cut(70, 32, 128, True), Cut(32, 32, 256, True)]


def by_cut(cut: Cut, by, s: State, bias: torch.Tensor | None = None, forward: bool = False) -> tuple[torch.Tensor, ...]:
    "Losses, dx, dw and db of all tokens; what is not written stays NaN"
    sizes = Sizes(*s.x.shape, len(s.w), True, True, s.w.element_size(), s.x.element_size() * len(s.w), forward)
    grads = Gradients(s.x, s.w, (True, True, True), s.w.dtype, False, 1.0)
    grads.dx.fill_(math.nan), grads.dw.fill_(math.nan)
    losses = fp8.run_groups(s.x, s.w, s.y, None, None, None, LossOptions(), cut, sizes, grads, None, bias, by)
    return losses, grads.dx, grads.dw, grads.db


@ways
@pytest.mark.parametrize("cut", few(CUTS, Cut(70, 16, 300), Cut(64, 16, 128), Cut(32, 32, 256, True)), ids=str)
@pytest.mark.parametrize("forward", [False, True])
def test_any_cut_gives_the_same_gradients(cut, way, forward, device):
    x, w, y = state(device, "begun", 70, 32, 300, narrow(device))
    y[5], x[5] = -100, math.nan
    s, bias = State(x, w, y), torch.linspace(-1, 1, 300, device=device)
    wanted = by_cut(CUTS[0], fp8.PYTORCH8, s, bias, forward)
    losses, dx, dw, db = by_cut(cut, passes(way, device), s, bias, forward)
    alike = 1e-5 if device == "cpu" else 2e-3  # a GPU's quotients may round another way, and then bf16 too
    assert torch.allclose(losses, wanted[0]) and torch.allclose(db, wanted[3], atol=1e-6) and relative_error(dx, wanted[1]) < alike
    assert relative_error(dw, wanted[2]) < (alike if cut.group == 70 else 4e-3)  # groups are rounded to FP8 by units of their own


@pytest.mark.parametrize("kind", ["random", "trained"])
def test_many_groups_round_no_large_number_twice(kind, device):
    s = state(device, kind, n=1024)
    exact = in_double(s, lambda x, w, y: F.cross_entropy(x @ w.T, y, reduction="sum"))[2]
    usual = taken(s, lambda *t: eager(*t, reduction="sum"))[2]
    assert relative_error(by_cut(Cut(128, 128, V), fp8.PYTORCH8, s)[2], exact) < 1.15 * relative_error(usual, exact)


# --- kernels beside PyTorch ---

def round_by(kernels, monkeypatch):
    "Launch these on the CPU; a float is a double there"
    launch = kernels("round_fp8", 0)
    double = lambda value: ctypes.c_double(value) if type(value) is float else value
    monkeypatch.setattr(fp8, "rounding_kernel", lambda device: lambda grid, block, *args: launch(grid, block, *map(double, args)))


@pytest.fixture
def by_source(device, monkeypatch):
    "On a CPU the kernel's source, thread by thread"
    if device == "cpu":
        round_by(kernels_on_cpu("round_fp8_on_cpu.cpp", "-O1", round_fp8=None), monkeypatch)


def test_rounding_is_that_of_pytorch(by_source, device):
    "Every number of e4m3, those between, and the halves, both signs, as signs in bf16 times factors"
    known = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    between = torch.cat([known, (known[1:] + known[:-1]) / 2, known[1:] * 0.999 + known[:-1] * 0.001, torch.rand(300) * 460, torch.rand(300) * 0.02])
    a = torch.cat([between, -between, torch.tensor([math.nan, math.inf, -math.inf])])[:, None]
    wide, factors = a.sign().expand(-1, 3).contiguous().to(device, bf16), a[:, 0].abs().nan_to_num(nan=1.0, posinf=1e30).to(device)
    wide[-3] = math.nan
    out = [fp8.Rounded(torch.zeros(len(a), 16, device=device).to(FP8), torch.zeros(3, -(-len(a) // 16) * 16, device=device).to(FP8)) for _ in range(2)]
    for by, to in zip((fp8.launch_rounded, fp8.reference_rounded), out):
        by(to, wide, factors)
    assert all(torch.equal(x.view(torch.uint8) & 127, y.view(torch.uint8) & 127) and torch.equal(x.float().nan_to_num(), y.float().nan_to_num()) for x, y in zip(out[0][:2], out[1][:2]))
    assert torch.equal(out[0].straight.float()[:-3, 0].cpu(), a[:-3, 0].clamp(-TOP, TOP).to(FP8).float()) and out[0].straight[-3, :3].float().isnan().all()


ROUNDED = {
    str(c): c for c in itertools.product([(1, 1), (130, 70), (16, 64), (257, 3), (300, 272), (64, 136)], [(True, True), (True, False), (False, True)], [False, True], [0, 16])
}


@pytest.mark.parametrize("case", few(ROUNDED, *[str(c) for c in (((130, 70), (True, True), True, 16), ((1, 1), (True, True), True, 0), ((300, 272), (True, True), True, 0), ((257, 3), (False, True), False, 0), ((64, 136), (True, False), False, 16))]))
def test_matrices_in_eight_bits(case, by_source, device):
    "Either way round, with heavy entries apart and without; also where rows have room for more numbers, which are anything"
    (R, C), wanted, parted, room = ROUNDED[case]
    made = torch.Generator().manual_seed(R)
    whole = torch.full((R, -(-C // 16) * 16 + room if room else C), math.nan, device=device, dtype=bf16)
    a, factors = whole[:, :C], torch.rand(R, generator=made).add(0.1).to(device)
    a.copy_((torch.randn(R, C, generator=made) * 3).exp() if parted else torch.randn(R, C, generator=made) * 30)
    if parted: factors = factors / a.float().sum(1)
    factors[R // 2] = 0
    a[R // 2] = math.nan
    room8 = lambda rows, columns, beside: torch.full((rows + 2, -(-columns // 16) * 16 + beside), 7.0, device=device).to(FP8)
    found = []
    for by in (fp8.launch_rounded, fp8.reference_rounded):
        straight, turned = room8(R, C, 16), room8(C, R, 32)
        heavy = torch.full((R, -(-C // 128) + 1), 99, dtype=torch.uint8, device=device)
        by(fp8.Rounded(straight[1:-1, :-16] if wanted[0] else None, turned[1:-1, 16:-16] if wanted[1] else None, heavy[:, :-1] if parted else None), a, factors)
        found.append((straight.float(), turned.float(), heavy))
    for got, right in zip(found[0][:2], found[1][:2]):  # a GPU's products may round another way, by one step of e4m3
        off = got != right
        assert not off.any() or device == "cuda" and off.double().mean() < 1e-2 and ((got - right).abs() <= 0.13 * right.abs() + 2.0**-9).all()
    assert torch.equal(found[0][2], found[1][2]) and (not parted or R == 1 or found[0][2][:, :-1].sum() > 0)


@where_kernels_run
@pytest.mark.parametrize("size, room", [((1, 7), 0), ((70, 300), 0), ((64, 256), 16), ((129, 400), 16)])
def test_listed_entries_are_those_of_pytorch(size, room, device):
    "With ignored tokens, a target that is none, and rows that have room for more classes, whose numbers are anything"
    B, S = size
    made = torch.Generator().manual_seed(B)
    whole = torch.full((B, S + room), math.nan, device=device, dtype=narrow(device))
    e = whole[:, :S]
    e.copy_((torch.randn(B, S, generator=made) * 3).exp())
    coefs, y = torch.randn(B, generator=made).to(device), torch.randint(S, (B,), generator=made).to(device)
    coefs[B // 2] = 0
    y[-1] = S + 4
    rows = fp8.Rows(coefs, coefs, coefs - 1, e.float().sum(1), coefs)
    heavy, inverses, found = torch.zeros(B, -(-S // fp8.TILE) + 1, dtype=torch.uint8, device=device)[:, :-1], fp8.row_inverses(rows), []
    fp8.reference_rounded(fp8.Rounded(heavy=heavy), e, inverses)
    for by in (fp8.launch_entries, fp8.reference_entries):
        entries = fp8.new_entries(e, B, S)
        by(entries, e, y, rows, inverses, heavy, fp8.TILE)
        found.append(entries)
    assert all(torch.equal(a, b) if device == "cpu" else torch.allclose(a.float(), b.float(), rtol=1e-5) for a, b in zip(*found))
    assert found[0].counts.sum() > B or S == 7


BUGS = {
    "numbers beyond the last column are read": ("wide && column + COLUMNS <= C", "wide && column < C"),
    "a row without a factor counts": ("factor == 0.0f ? 0 : words[i]", "words[i]"),
    "heavy entries stay": ("count++, v[i] = 0.0f;", "count++;"),
    "counts are of half a row": ("for (int o = ACROSS / 2; o; o >>= 1)", "for (int o = ACROSS / 4; o; o >>= 1)"),
    "rows are transposed in another order": ("w[0] = __byte_perm(a, c, 0x5410), w[1] = __byte_perm(a, c, 0x7632);", "w[1] = __byte_perm(a, c, 0x5410), w[0] = __byte_perm(a, c, 0x7632);"),
    "nobody waits for the words": ("  __syncthreads();\n", ""),
    "rows beyond the last are written": ("if (first + column < C && row < height)", "if (first + column < C)"),
    "columns beyond the width are written": ("row < R && column < width", "row < R"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_the_rounding_is_noticed(bug, monkeypatch, device):
    if device == "cuda":
        pytest.skip("the source runs on the CPU")
    source, (old, new) = cuda_source("round_fp8"), BUGS[bug]
    assert source.count(old) == 1
    kernels = kernels_on_cpu("round_fp8_on_cpu.cpp", "-O1", round_fp8=source.replace(old, new))
    kernels.seed = 2
    round_by(kernels, monkeypatch)
    for case in (((130, 70), (True, True), True, 16), ((64, 136), (True, True), False, 16)):
        try:
            test_matrices_in_eight_bits(str(case), None, device)
        except AssertionError:
            return
    pytest.fail(f"no case notices that {bug}")


@pytest.mark.parametrize("arch", ["89", "90a", "100a"])
def test_the_rounding_compiles(arch):
    check_nvcc(arch, cuda_source("round_fp8"), {})


@where_kernels_run
@pytest.mark.parametrize("size", [(1, 5), (70, 64), (1300, 1100)])
def test_factors_of_rows(size, device):
    "With ignored tokens whose features are no numbers, sums that are too small to have an inverse, and negative weights"
    made = torch.Generator().manual_seed(size[1])
    x = torch.randn(size[0], size[1] + 3, generator=made).mul(5).to(device, narrow(device))[:, :-3]
    coefs, rests = torch.randn(size[0], generator=made).to(device), torch.rand(size[0], generator=made).to(device)
    coefs[1::3], x[1::3], rests[2::7] = 0, math.nan, 2.0**-140
    rows, found = fp8.Rows(coefs, coefs, coefs, rests, coefs), []
    for factors_of, divide in ((fp8.launch_row_factors, fp8.launch_divided), (fp8.reference_row_factors, fp8.reference_divided)):
        out = fp8.RowFactors(*torch.full((3, size[0]), 7.0, device=device))
        factors_of(out, rows, x)
        found.append((*out, *divide(out)))
    assert all(torch.allclose(got, right, rtol=1e-6, atol=0) for got, right in zip(*found))
    divided, unit = found[0][3:]
    assert (found[0][0][1::3] == 0).all() and (divided[:, None] * x.nan_to_num(0.0)).abs().amax().item() == pytest.approx(TOP, rel=1e-5) and unit > 0


@where_kernels_run
def test_tokens_without_a_weight_have_factors_of_zero(device):
    x, zeros = torch.full((5, 8), math.inf, device=device, dtype=narrow(device)), torch.zeros(5, device=device)
    out = fp8.RowFactors(*torch.full((3, 5), 7.0, device=device))
    fp8.launch_row_factors(out, fp8.Rows(zeros, zeros, zeros, zeros, zeros), x)
    divided, unit = fp8.launch_divided(out)
    assert not any(t.any() for t in (*out, divided)) and unit == fp8.SMALLEST / TOP


@where_kernels_run
@pytest.mark.parametrize("h", [5, 64, 1100])
def test_sums_of_entries(h, device):
    B, V = 37, 90
    made = torch.Generator().manual_seed(h)
    x, w, light = (torch.randn(size, h, generator=made).to(device) for size in (B, V, B))
    entries, (coefs, rests) = fp8.new_entries(x, B, V), torch.rand(2, B, generator=made).to(device)
    for i, count in enumerate(itertools.islice(itertools.cycle((1, 5, 0, 20)), B)):
        entries.classes[i, :count] = torch.randperm(V, generator=made)[:count].to(device, torch.int32)
        entries.values[i, :count] = torch.randn(count, generator=made).to(device)
        entries.counts[i] = max(count, 1)
    for i in range(30):  # a class of many tokens
        if entries.counts[i] > 4 and 11 not in entries.classes[i]: entries.classes[i, 3] = 11
    coefs[4], x[2], light[4] = 0, math.nan, math.nan
    entries.values[2] = 0
    rows = fp8.Rows(coefs, coefs, coefs, rests, coefs)
    ways = [(fp8.reference_row_sums, fp8.reference_class_sums), *((fp8.launch_row_sums, partial(fp8.launch_class_sums, frequent=m)) for m in (0, 3, 512))]
    for row_sums, class_sums in ways:
        dx, dw = torch.full((B, h), math.nan, device=device), torch.ones(V, h, device=device)
        row_sums(dx, light, rows, w, entries), class_sums(dw, x, entries)
        dense = torch.zeros(B, V + 1, dtype=f64, device=device).scatter_add_(1, entries.classes.long(), entries.values.double())[:, :V]
        assert relative_error(dx, (coefs * rests)[:, None].double() * light.nan_to_num().double() + dense @ w.double()) < 1e-6
        assert relative_error(dw, 1 + dense.T @ x.nan_to_num().double()) < 1e-6
