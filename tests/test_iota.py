"""The masked sum and the turnaround against their definition; the graph pass on graphs where it must fire and where it must not."""
import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fusedloss.iota
from fusedloss.iota import (backend, eager_backend, gather_cross_entropy_fwd, inductor_pass,
                            iota_cross_entropy, iota_cross_entropy_fwd, make_backend, onehot_select, rewrite_gather, target_mask)
from workbook.measure import peak_memory, relative_error, saved_tensors
from grids import few, thorough_but
from helpers import everywhere, has_no_second_derivative, off, planted, unchanged

aten = torch.ops.aten
# dz is rounded once in forward and once as a product with what comes from above: twice half a unit of 8 or 11 bits
# gradients of 16 bits are rounded twice: when they are formed, and after the upstream gradient
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def inductor(device):
    "Inductor has what it needs on this device"
    if device == "cpu" and not shutil.which("g++"):
        pytest.skip("Inductor needs a C++ compiler on a CPU")
    if device == "cpu" and " " in torch.__file__:
        pytest.skip("Inductor's command lines for C++ do not quote PyTorch's path, which has a space")


def scores(shape, dtype=torch.float64, device="cpu", seed=0):
    "Random scores that differ element by element"
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float64).to(dtype)


def labels(shape, n_classes, device="cpu", seed=1):
    "Random classes"
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(n_classes, shape, generator=generator, device=device)


def reference(z, y, *, reduction="mean", ignore_index=-100, dim=-1):
    "Loss and gradient by their definition, in float64, sharing no line with the library: z and dz with classes last inside"
    rows = z.detach().double().movedim(dim, -1)
    valid = y != ignore_index
    hot = torch.zeros_like(rows)
    for place in valid.nonzero().tolist():
        hot[(*place, int(y[tuple(place)]))] = 1
    top = rows.max(-1, keepdim=True).values if rows.shape[-1] else rows.sum(-1, keepdim=True)
    e = (rows - top).exp()
    lse = e.sum(-1).log() + top.squeeze(-1)
    losses = torch.where(valid, lse - torch.where(hot == 1, rows, 0.0).sum(-1), 0.0)
    total = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / max(int(valid.sum()), 1)}[reduction]
    dz = (e / e.sum(-1, keepdim=True) - hot) * valid.unsqueeze(-1)
    return total, (dz / (max(int(valid.sum()), 1) if reduction == "mean" else 1)).movedim(-1, dim)


def uneven(loss):
    "An upstream gradient that is uneven, negative, and zero for one token"
    steps = torch.arange(loss.numel(), dtype=loss.dtype, device=loss.device).view(loss.shape)
    return (steps - 1) * 0.75 if loss.dim() else torch.full_like(loss, -1.7)


def faults(fn, z, y, tolerance, **options):
    "What `fn` gets wrong, in words; empty if nothing"
    leaf, before = z.detach().clone().requires_grad_(), z.detach().clone()
    exact, dz = reference(z, y, **options)
    loss = fn(leaf, y, **options)
    g = uneven(loss)
    got, = torch.autograd.grad(loss, leaf, g)
    dim = options.get("dim", -1)
    dz = dz * (g.double().unsqueeze(dim) if g.dim() else g.double())
    wrong = [] if torch.equal(leaf, before) else ["z was changed"]
    wrong += [] if got.dtype == z.dtype and got.shape == z.shape else [f"dz is {got.dtype} {list(got.shape)}"]
    accumulate = torch.float64 if z.dtype == torch.float64 else torch.float32
    wrong += [] if loss.dtype == accumulate and loss.shape == exact.shape else [f"the loss is {loss.dtype} {list(loss.shape)}"]
    loss_tolerance = min(tolerance, 1e-6)  # the loss is float32 whatever the scores
    floor = 2 * torch.finfo(accumulate).eps * (1 + z.double().abs().nan_to_num(posinf=0.0).max().item() if z.numel() else 0.0)
    return wrong + off("the loss", loss, exact, loss_tolerance, floor) + off("dz", got, dz, tolerance, floor)


# ---- the masked sum

@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape, dim", [((1, 1), -1), ((7, 3), 1), ((7, 3), 0), ((2, 5, 3), 1), ((2, 5, 3), -3), ((4,), 0), ((2, 3, 4, 5), 2)])
def test_select_is_the_indexed_element(shape, dim, dtype, device):
    z = (scores(shape, device=device) * 50).abs().to(dtype)
    rows = [*shape]
    n_classes = rows.pop(dim)
    y = labels(rows, n_classes, device)
    got = onehot_select(z, y, dim)
    assert got.dtype == dtype and torch.equal(got, z.gather(dim, y.unsqueeze(dim)).squeeze(dim))
    assert torch.equal(target_mask(z, y, dim).sum(dim), torch.ones_like(y))


@pytest.mark.parametrize("elsewhere", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_select_does_not_see_the_other_elements(elsewhere, dtype, device):
    y = labels((9,), 5, device)
    z = torch.full((9, 5), elsewhere, dtype=dtype, device=device)
    z[torch.arange(9), y] = torch.arange(9, device=device).to(dtype)
    assert torch.equal(onehot_select(z, y), torch.arange(9, device=device).to(dtype))


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_select_returns_what_is_there(value, device):
    z = torch.zeros(3, 4, device=device)
    z[:, 2] = value
    torch.testing.assert_close(onehot_select(z, torch.full((3,), 2, device=device)), z[:, 2], equal_nan=True)


@pytest.mark.parametrize("label", [-1, -100, 4, 2**40])
def test_labels_outside_select_nothing(label, device):
    z = scores((3, 4), device=device).requires_grad_()
    picked = onehot_select(z, torch.full((3,), label, device=device))
    assert torch.equal(picked, torch.zeros_like(picked))
    assert not torch.autograd.grad(picked.sum(), z)[0].any()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_select_of_nothing(shape, device):
    z = torch.empty(shape, device=device)
    assert torch.equal(onehot_select(z, torch.full(shape[:1], -1, device=device)), torch.zeros(shape[0], device=device))


@pytest.mark.parametrize("label_dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_select_takes_any_integer_labels(label_dtype, device):
    z, y = scores((6, 4), device=device), labels((6,), 4, device)
    assert torch.equal(onehot_select(z, y.to(label_dtype)), onehot_select(z, y))


def test_gradient_of_select_is_a_mask(device):
    z, y = scores((6, 10), device=device).requires_grad_(), labels((6,), 10, device)
    def both(z, y):
        picked = onehot_select(z, y)
        return torch.autograd.grad(picked, z, torch.arange(6.0, dtype=z.dtype, device=z.device))
    names = {n.target for n in make_fx(both)(z, y).graph.nodes}
    assert not any(word in str(t) for t in names for word in ("scatter", "gather", "index"))
    dz, = both(z, y)
    expected = torch.zeros_like(dz)
    expected[torch.arange(6), y] = torch.arange(6, dtype=dz.dtype, device=device)
    assert torch.equal(dz, expected)
    z.data[:, 3] = NAN
    assert not torch.autograd.grad(onehot_select(z, y.clamp(max=2)).sum(), z)[0].isnan().any()


# ---- the turnaround

SHAPES = [((1, 1), -1), ((7, 3), -1), ((47, 123), -1), ((64, 257), 1), ((5, 11, 4), 1), ((11, 5), 0), ((2, 3, 4, 6), -2), ((6,), 0)]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape, dim", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_loss_and_gradient_are_the_definition(shape, dim, dtype, reduction, device):
    rows = [*shape]
    n_classes = rows.pop(dim)
    y = labels(rows, n_classes, device)
    assert faults(iota_cross_entropy, scores(shape, dtype, device), y, TOLERANCE[dtype], reduction=reduction, dim=dim) == []


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 9, 10, 400])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_ignored_tokens(reduction, ignore_index, device):
    y = labels((11,), 10, device)
    y[[0, 4, 10]] = ignore_index
    assert faults(iota_cross_entropy, scores((11, 10), device=device), y, 1e-12, reduction=reduction, ignore_index=ignore_index) == []


@pytest.mark.parametrize("label_dtype, ignore_index", [(torch.int32, -100), (torch.int16, -100), (torch.int8, -100), (torch.uint8, 255)])
def test_any_integer_labels(label_dtype, ignore_index, device):
    y = labels((7,), 10, device)
    y[2] = ignore_index
    assert faults(iota_cross_entropy, scores((7, 10), device=device), y.to(label_dtype), 1e-12, ignore_index=ignore_index) == []


@pytest.mark.parametrize("fwd", [iota_cross_entropy_fwd, gather_cross_entropy_fwd])
@pytest.mark.parametrize("shape, dim", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_both_turns_are_the_definition(fwd, shape, dim, dtype, device):
    z = scores(shape, dtype, device)
    rows = [*shape]
    n_classes = rows.pop(dim)
    y = labels(rows, n_classes, device)
    before = z.clone()
    losses, dz = fwd(z, y, dim)
    exact, dz_exact = reference(z, y, reduction="none", dim=dim)
    assert torch.equal(z, before) and dz.dtype == dtype and dz.shape == z.shape
    assert relative_error(losses, exact) < min(TOLERANCE[dtype], 1e-6) and relative_error(dz, dz_exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("shape", [(0, 5), (0, 3, 4), (4, 0)])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_empty(shape, reduction, device):
    z = torch.empty(shape, device=device, requires_grad=True)
    loss = iota_cross_entropy(z, torch.full(shape[:-1], -100, device=device), reduction=reduction)
    assert loss.shape == (shape[:-1] if reduction == "none" else ()) and not loss.any()
    assert torch.autograd.grad(loss.sum(), z)[0].shape == shape


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_all_ignored(dtype, device):
    z = scores((5, 4), dtype, device).requires_grad_()
    loss = iota_cross_entropy(z, torch.full((5,), -100, device=device))
    assert loss == 0 and not torch.autograd.grad(loss, z)[0].any()


def test_rows_with_masked_classes(device):
    z, y = scores((6, 10), torch.float32, device), labels((6,), 5, device)
    z[:, 5:] = -INF
    assert faults(iota_cross_entropy, z, y, 1e-6, reduction="none") == []
    z.requires_grad_()
    dz, = torch.autograd.grad(iota_cross_entropy(z, y), z)
    assert not dz[:, 5:].any()
    assert iota_cross_entropy(z, y + 5, reduction="none").isposinf().all()


@pytest.mark.parametrize("spread", [120.0, 1e4])
def test_scores_far_apart_keep_their_loss(spread, device):
    z = torch.tensor([[spread, 0.0]], device=device, requires_grad=True)
    for label in (0, 1):
        loss = iota_cross_entropy(z, torch.tensor([label], device=device))
        assert loss == spread * label
        assert torch.equal(torch.autograd.grad(loss, z)[0], torch.tensor([[1.0, -1.0]], device=device) * label)


def test_confident_half_precision_gradient_is_a_difference_before_rounding(device):
    z = torch.tensor([[9.0, 0.0, 0.0]], dtype=torch.bfloat16, device=device, requires_grad=True)
    dz, = torch.autograd.grad(iota_cross_entropy(z, torch.tensor([0], device=device)), z)
    exact = -2 / (2 + torch.tensor(9.0, dtype=torch.float64).exp())
    assert abs(dz[0, 0].double().cpu() / exact - 1) < 2**-8  # softmax rounded to bf16 would be 1, and the difference 0


def test_backward_twice_and_per_token(device):
    z, y = scores((6, 10), device=device).requires_grad_(), labels((6,), 10, device)
    losses = iota_cross_entropy(z, y, reduction="none")
    first, = torch.autograd.grad(losses, z, torch.ones_like(losses), retain_graph=True)
    scaled, = torch.autograd.grad(losses, z, -3 * torch.ones_like(losses), retain_graph=True)
    again, = torch.autograd.grad(losses, z, torch.ones_like(losses))
    assert torch.equal(first, again) and torch.equal(scaled, -3 * first)


def test_gradcheck(device):
    y = labels((5,), 4, device)
    y[1] = -100
    z = scores((5, 4), device=device).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: iota_cross_entropy(z, y, reduction="none"), z)
    assert torch.autograd.gradcheck(lambda z: onehot_select(z, y), z)


def test_a_second_derivative_is_refused(device):
    z, y = scores((5, 4), device=device).requires_grad_(), labels((5,), 4, device)
    assert has_no_second_derivative(iota_cross_entropy(z, y), z)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_saves_dz_and_nothing_else(dtype, device):
    z, y = scores((64, 100), dtype, device).requires_grad_(), labels((64,), 100, device)
    saved = [t for t in saved_tensors(lambda: iota_cross_entropy(z, y), z, y) if t.numel() >= z.numel()]
    assert [(t.shape, t.dtype) for t in saved] == [(z.shape, dtype)]
    assert saved_tensors(lambda: iota_cross_entropy(z.detach(), y), z, y) == []


def test_without_grad_mode_nothing_is_kept(device):
    z, y = scores((64, 100), device=device).requires_grad_(), labels((64,), 100, device)
    with torch.no_grad():
        loss = iota_cross_entropy(z, y)
    assert not loss.requires_grad


def test_peak_memory_is_dz_and_its_product():
    z, y = scores((128, 1000), torch.float32).requires_grad_(), labels((128,), 1000)
    assert peak_memory(lambda: torch.autograd.grad(iota_cross_entropy(z, y), z)) < 2.1 * z.nbytes


@pytest.mark.parametrize("label", [-1, 10, 10**6])
def test_a_label_out_of_range(label, device):
    z, y = scores((4, 10), torch.float32, device).requires_grad_(), labels((4,), 10, device)
    y[2] = label
    if device == "cpu":
        with pytest.raises(IndexError, match=rf"target\[2\] is {label}"):
            iota_cross_entropy(z, y)
    else:
        losses = iota_cross_entropy(z, y, reduction="none")
        assert losses.isnan().tolist() == [False, False, True, False]


def test_strided_expanded_and_transposed_scores(device):
    y = labels((6,), 10, device)
    for z in (scores((10, 6), device=device).T, scores((12, 20), device=device)[::2, ::2], scores((1, 10), device=device).expand(6, 10)):
        assert faults(iota_cross_entropy, z, y, 1e-12, reduction="none") == []


def test_autocast(device):
    z, y = scores((6, 10), torch.float32, device).requires_grad_(), labels((6,), 10, device)
    with torch.autocast(device, torch.bfloat16):
        loss = iota_cross_entropy(z, y)
    assert loss.dtype == torch.float32 and relative_error(loss, reference(z, y)[0]) < 1e-6


# ---- the rules, on graphs

def traced(f, *args, mode="real"):
    return make_fx(f, tracing_mode=mode)(*args)


def targets(gm):
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


def fires(gm, *args):
    "Does the pass change the graph? The changed graph must give the same numbers, an unchanged one must be the same."
    expected, before = gm(*args), str(gm.graph)
    assert rewrite_gather(gm) is gm
    torch.testing.assert_close(gm(*args), expected)
    gm.graph.lint()
    return str(gm.graph) != before


Z, Y = scores((6, 10), torch.float32), labels((6, 1), 10)
G = torch.arange(6.0).view(6, 1)
zeros, full = torch.zeros, torch.full

FIRES = {
    "log-softmax": (lambda z, y: z.log_softmax(1).gather(1, y), Z, Y),
    "softmax": (lambda z, y: z.softmax(-1).gather(-1, y), Z, Y),
    "log-softmax, then squeezed and averaged": (lambda z, y: -z.log_softmax(1).gather(1, y).squeeze(1).mean(), Z, Y),
    "log-sum-exp minus the target's score": (lambda z, y: z.logsumexp(1, keepdim=True) - z.gather(1, y), Z, Y),
    "a maximum": (lambda z, y: z.amax(1, keepdim=True) - z.gather(1, y), Z, Y),
    "a sum elsewhere": (lambda z, y: (z.sum(1, keepdim=True), (z * 2).gather(1, y)), Z, Y),
    "classes first": (lambda z, y: z.log_softmax(0).gather(0, y), Z.T.contiguous(), Y.T.contiguous()),
    "classes in the middle": (lambda z, y: z.log_softmax(1).gather(1, y), scores((2, 5, 3), torch.float32), labels((2, 1, 3), 5)),
    "take_along_dim": (lambda z, y: z.log_softmax(1).take_along_dim(y, 1), Z, Y),
    "take_along_dim, broadcast": (lambda z, y: z.log_softmax(1).take_along_dim(y, 1), Z, Y[:1]),
    "bfloat16": (lambda z, y: z.log_softmax(1).gather(1, y), Z.bfloat16(), Y),
    "shifted and scaled": (lambda z, y: (3 * (z - z.amax(1, keepdim=True)) / 2).gather(1, y), Z, Y),
    "weighted by class": (lambda z, y, w: (z.log_softmax(1) * w).gather(1, y), Z, Y, torch.arange(10.0).view(1, 10)),
    "one class": (lambda z, y: z.log_softmax(1).gather(1, y), Z[:, :1], Y * 0),
    "one row": (lambda z, y: z.log_softmax(1).gather(1, y), Z[:1], Y[:1]),
    "a vector": (lambda z, y: z.log_softmax(0).gather(0, y), Z[0], Y[0]),
    "through a slice of what is swept": (lambda z, y: z.log_softmax(1)[:4].gather(1, y[:4]), Z, Y),
    "scatter into zeros": (lambda z, y: zeros(6, 10).scatter(1, y, -1.0), Z, Y),
    "scatter into zeros_like": (lambda z, y: torch.zeros_like(z).scatter(1, y, -1.0), Z, Y),
    "scatter into new_zeros": (lambda z, y: z.new_zeros(6, 10).scatter(1, y, -1.0), Z, Y),
    "scatter into full": (lambda z, y: full((6, 10), 7.0).scatter(-1, y, 2.0), Z, Y),
    "scatter into full_like": (lambda z, y: torch.full_like(z, 7.0).scatter(1, y, 2.0), Z, Y),
    "scatter into new_full": (lambda z, y: z.new_full((6, 10), 7.0).scatter(1, y, 2.0), Z, Y),
    "scatter of integers": (lambda z, y: zeros(6, 10, dtype=torch.int64).scatter(1, y, 3), Z, Y),
    "scatter along the rows": (lambda z, y: zeros(10, 6).scatter(0, y, 1.0), Z, Y.T.contiguous()),
    "scatter_add into zeros": (lambda g, y: zeros(6, 10).scatter_add(1, y, g), G, Y),
    "scatter_add into zeros_like, half": (lambda z, y: torch.zeros_like(z).scatter_add(1, y, z[:, :1]), Z.bfloat16(), Y),
}

KEEPS = {
    "two a row": (lambda z, y: z.log_softmax(1).gather(1, y), Z, labels((6, 2), 10)),
    "as many as classes": (lambda z, y: z.log_softmax(1).gather(1, y), Z, labels((6, 10), 10)),
    "none a row": (lambda z, y: z.log_softmax(1).gather(1, y), Z, labels((6, 0), 10)),
    "an index for some rows": (lambda z, y: z.log_softmax(1).gather(1, y), Z, Y[:4]),
    "read twice": (lambda z, y: (lambda p: (p + 1, p * 2))(z.log_softmax(1).gather(1, y)), Z, Y),
    "swept by nobody": (lambda z, y: z.gather(1, y), Z, Y),
    "computed, but swept by nobody": (lambda z, y: (z * 2 + 1).gather(1, y), Z, Y),
    "swept along the other axis": (lambda z, y: z.log_softmax(0).gather(1, y), Z, Y),
    "another tensor is swept": (lambda z, y, t: z.log_softmax(1).sum() + t.gather(1, y).sum(), Z, Y, Z + 1),
    "a table of class weights": (lambda z, y: z.log_softmax(1).sum() + torch.arange(10.0).expand(6, 10).gather(1, y).sum(), Z, Y),
    "integers": (lambda z, y: z.amax(1, keepdim=True) + z.gather(1, y), (Z * 9).long(), Y),
    "sparse gradient": (lambda z, y: z.log_softmax(1).gather(1, y, sparse_grad=True), Z, Y),
    "an index tensor": (lambda z, y: z.log_softmax(1)[torch.arange(6), y[:, 0]], Z, Y),
    "index_select": (lambda z, y: z.log_softmax(1).index_select(1, y[:, 0]), Z, Y),
    "an embedding": (lambda w, y: F.embedding(y, w), Z, Y % 6),
    "scatter into what is no constant": (lambda z, y: z.scatter(1, y, -1.0), Z, Y),
    "scatter into a computed tensor": (lambda z, y: (z * 0).scatter(1, y, -1.0), Z, Y),
    "scatter of a tensor": (lambda g, y: zeros(6, 10).scatter(1, y, g), G, Y),
    "scatter with reduce": (lambda z, y: full((6, 10), 2.0).scatter(1, y, 3.0, reduce="multiply"), Z, Y),
    "scatter of two a row": (lambda z, y: zeros(6, 10).scatter(1, y, -1.0), Z, labels((6, 2), 10)),
    "scatter into some rows": (lambda z, y: zeros(6, 10).scatter(1, y, -1.0), Z, Y[:4]),
    "the constant is read elsewhere": (lambda z, y: (lambda c: (c + 1, c.scatter(1, y, -1.0)))(zeros(6, 10)), Z, Y),
    "scatter_add onto ones": (lambda g, y: full((6, 10), 1.0).scatter_add(1, y, g), G, Y),
    "scatter_add onto scores": (lambda z, y: z.scatter_add(1, y, z[:, :1]), Z, Y),
    "scatter_add of two a row": (lambda z, y: zeros(6, 10).scatter_add(1, y, z), Z, labels((6, 2), 10)),
    "scatter_add of some of the values": (lambda z, y: zeros(6, 10).scatter_add(1, y, z), Z, Y),
    "scatter_reduce": (lambda g, y: zeros(6, 10).scatter_reduce(1, y, g, "amax"), G, Y),
}


@pytest.mark.parametrize("case", FIRES)
def test_the_pass_fires(case):
    f, *args = FIRES[case]
    gm = traced(f, *args)
    assert fires(gm, *args)
    assert not {aten.gather.default, aten.scatter.value, aten.scatter_add.default} & set(targets(gm))


@pytest.mark.parametrize("case", KEEPS)
def test_the_pass_leaves_near_misses_alone(case):
    f, *args = KEEPS[case]
    assert not fires(traced(f, *args), *args)


UNKNOWN = {"take_along_dim, broadcast", "through a slice of what is swept", *(k for k in FIRES if k.startswith("scatter") and "like" not in k)}


@pytest.mark.parametrize("mode", thorough_but(["fake", "symbolic"], "symbolic"))
@pytest.mark.parametrize("case", FIRES)
def test_the_pass_fires_on_fake_and_symbolic_shapes(case, mode):
    f, *args = FIRES[case]
    if mode == "symbolic" and case in UNKNOWN:
        pytest.skip("whether the rule is valid depends on the sizes")
    assert fires(traced(f, *args, mode=mode), *args)


def test_symbols_stand_for_any_size():
    gm = traced(lambda z, y: z.log_softmax(1).gather(1, y), Z, Y, mode="symbolic")
    assert fires(gm, Z, Y)
    z, y = scores((3, 17), torch.float32), labels((3, 1), 17)
    torch.testing.assert_close(gm(z, y), z.log_softmax(1).gather(1, y))


@pytest.mark.parametrize("elsewhere", [INF, -INF, NAN])
def test_the_rewritten_graph_reads_one_element_a_row(elsewhere):
    z = torch.full((6, 10), elsewhere).scatter(1, Y, 1.0)
    gm = traced(lambda z, y: (z.amax(1), z.gather(1, y)), z, Y)
    assert rewrite_gather(gm) and aten.gather.default not in targets(gm)
    assert torch.equal(gm(z, Y)[1], torch.ones(6, 1))


@pytest.mark.parametrize("label", [-1, 10, 1000])
def test_an_index_outside_makes_the_rewritten_row_nan(label):
    gm = rewrite_gather(traced(lambda z, y: z.log_softmax(1).gather(1, y), Z, Y))
    y = Y.clone()
    y[3] = label
    assert gm(Z, y).isnan().squeeze(1).tolist() == [False] * 3 + [True] + [False] * 2


def test_the_choice_climbs_to_the_scores():
    table = torch._decomp.get_decompositions([aten._log_softmax])
    gm = make_fx(lambda z, y: z.log_softmax(1).gather(1, y), decomposition_table=table)(Z, Y)
    expected = gm(Z, Y)
    rewrite_gather(gm)
    chosen, = [n.args[1] for n in gm.graph.nodes if n.target is aten.where.self and n.meta["val"].shape == Z.shape]
    assert chosen.op == "placeholder"
    torch.testing.assert_close(gm(Z, Y), expected)


def test_a_graph_without_shapes_is_left_alone():
    gm = traced(FIRES["log-softmax"][0], Z, Y)
    for node in gm.graph.nodes:
        node.meta.clear()
    assert not fires(gm, Z, Y)


def test_new_nodes_know_their_shapes():
    gm = rewrite_gather(traced(lambda z, y: (z.log_softmax(1).gather(1, y), zeros(6, 10).scatter(1, y, 1.0)), Z, Y))
    run = torch.fx.Interpreter(gm)
    run.run(Z, Y)
    assert all("val" in n.meta for n in gm.graph.nodes if n.op == "call_function")
    out = gm(Z, Y)
    for node, value in zip(gm.graph.output_node().args[0], out):
        assert (node.meta["val"].shape, node.meta["val"].dtype) == (value.shape, value.dtype)


# ---- whole models

class MaskedLM(nn.Module):
    "A BERT-style head: embedding, transform, norm, decoder tied to the embedding; most labels ignored"
    def __init__(self):
        super().__init__()
        self.embed, self.dense, self.norm, self.bias = nn.Embedding(50, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Parameter(torch.zeros(50))

    def forward(self, tokens, y):
        hidden = self.norm(F.gelu(self.dense(self.embed(tokens))))
        return F.cross_entropy(F.linear(hidden, self.embed.weight, self.bias).view(-1, 50), y.view(-1))

    def batch(self, device):
        y = labels((4, 9), 50, device, seed=3)
        return labels((4, 9), 50, device), y.masked_fill(torch.arange(36, device=device).view(4, 9) % 7 != 0, -100)


class Classifier(nn.Module):
    "An image classifier with label smoothing"
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 10)

    def forward(self, image, y):
        return F.cross_entropy(self.head(self.conv(image).relu().mean((2, 3))), y, label_smoothing=0.1)

    def batch(self, device):
        return scores((6, 3, 8, 8), torch.float32, device), labels((6,), 10, device)


class Weighted(nn.Module):
    "`F.nll_loss` with class weights and ignored targets"
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 10)
        self.register_buffer("weights", torch.linspace(0.5, 2, 10))

    def forward(self, x, y):
        return F.nll_loss(self.head(x).log_softmax(1), y, self.weights, ignore_index=3)

    def batch(self, device):
        return scores((20, 5), torch.float32, device), labels((20,), 10, device)


class Segmenter(nn.Module):
    "Classes in the second of four dimensions, as for images; no reduction"
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 1)

    def forward(self, image, y):
        return F.cross_entropy(self.conv(image), y, reduction="none", ignore_index=2).square().sum()

    def batch(self, device):
        return scores((2, 3, 4, 5), torch.float32, device), labels((2, 4, 5), 7, device)


class ByGather(nn.Module):
    "Log-sum-exp minus a gathered score: its backward is a scatter_add"
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 10)

    def forward(self, x, y):
        z = self.head(x)
        return (z.logsumexp(-1) - z.gather(-1, y[:, None]).squeeze(-1)).mean()

    def batch(self, device):
        return scores((20, 5), torch.float32, device), labels((20,), 10, device)


MODELS = {model.__name__: model for model in (MaskedLM, Classifier, Weighted, Segmenter, ByGather)}


@pytest.fixture
def fired(monkeypatch):
    "How often the rules fired, graph by graph"
    counts, rewrite = [], fusedloss.iota._rewrite
    def counted(graph, rules):
        counts.append(rewrite(graph, rules))
        return counts[-1]
    everywhere(monkeypatch, fusedloss.iota, "_rewrite", counted)
    torch._dynamo.reset()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # two convolutions may then be compared
        yield counts


def run(model, call, batch):
    loss = call(*batch)
    return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))


def agree(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("name", thorough_but(MODELS, "MaskedLM", "ByGather"))
def test_whole_models_rewritten_and_run_eagerly(name, device, fired):
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    batch = model.batch(device)
    agree(run(model, torch.compile(model, backend=eager_backend, fullgraph=True), batch), run(model, model, batch))
    assert fired == [1, 1], "a gather in forward and a scatter in backward"


@pytest.mark.usefixtures("inductor")
@pytest.mark.parametrize("name", thorough_but(MODELS))
def test_whole_models_through_inductor(name, device, fired):
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    batch = model.batch(device)
    with torch._inductor.config.patch(force_disable_caches=True):
        agree(run(model, torch.compile(model, backend=backend, fullgraph=True), batch), run(model, model, batch))
    assert [n for n in fired if n] == [2], "both rules in the joint graph, and in no other"


@pytest.mark.thorough
@pytest.mark.usefixtures("inductor")
def test_inductor_does_not_confuse_its_stored_graphs(device, fired, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = ByGather().to(device)
    batch = model.batch(device)
    for compiled in (torch.compile(model), torch.compile(model, backend=backend)):
        torch._dynamo.reset()
        agree(run(model, compiled, batch), run(model, model, batch))
    assert sum(fired) == 2, "a graph compiled without the pass must not stand in for one with it"
    assert inductor_pass().uuid() != inductor_pass(fusedloss.iota.SCATTERS).uuid()


@pytest.mark.thorough
@pytest.mark.usefixtures("inductor")
def test_rules_can_be_chosen(device, fired):
    model = ByGather().to(device)
    batch = model.batch(device)
    options = {"joint_custom_pre_pass": inductor_pass(fusedloss.iota.SCATTERS)}
    with torch._inductor.config.patch(force_disable_caches=True):
        agree(run(model, torch.compile(model, options=options), batch), run(model, model, batch))
    assert [n for n in fired if n] == [1]


def test_dynamic_sizes(device, fired):
    f = torch.compile(lambda z, y: F.cross_entropy(z, y), backend=eager_backend, dynamic=True)
    for n, v in ((6, 10), (9, 33)):
        z, y = scores((n, v), torch.float32, device).requires_grad_(), labels((n,), v, device)
        agree([f(z, y), *torch.autograd.grad(f(z, y), z)], [F.cross_entropy(z, y), *torch.autograd.grad(F.cross_entropy(z, y), z)])
    assert fired == [1, 1], "compiled once, for any size"


@pytest.mark.thorough
@pytest.mark.usefixtures("inductor")
def test_dynamic_sizes_through_inductor(device):
    torch._dynamo.reset()
    f = torch.compile(lambda z, y: F.cross_entropy(z, y), backend=backend, dynamic=True)
    for n, v in ((6, 10), (9, 33)):
        z, y = scores((n, v), torch.float32, device).requires_grad_(), labels((n,), v, device)
        loss, expected = f(z, y), F.cross_entropy(z, y)
        agree([loss, *torch.autograd.grad(loss, z)], [expected, *torch.autograd.grad(expected, z)])


def test_a_backend_of_ones_own_gets_both_graphs():
    seen = []
    own = make_backend(lambda gm, inputs: seen.append(targets(gm)) or gm.forward)
    torch._dynamo.reset()
    z, y = Z.clone().requires_grad_(), Y[:, 0]
    torch.autograd.grad(torch.compile(lambda z, y: F.cross_entropy(z, y), backend=own)(z, y), z)
    assert len(seen) == 2 and not {aten.gather.default, aten.scatter.value} & {*seen[0], *seen[1]}


@pytest.mark.usefixtures("inductor")
@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16], torch.bfloat16))
def test_the_loss_itself_compiles_without_a_break(dtype, device):
    torch._dynamo.reset()
    z, y = scores((16, 40), dtype, device), labels((16,), 40, device)
    y[3] = -100
    compiled = torch.compile(iota_cross_entropy, fullgraph=True)
    assert faults(compiled, z, y, 2 * TOLERANCE[dtype], reduction="none") == []


@pytest.mark.thorough
@pytest.mark.usefixtures("inductor")
def test_compiled_without_a_gradient(device):
    torch._dynamo.reset()
    z, y = scores((16, 40), torch.float32, device), labels((16,), 40, device)
    assert relative_error(torch.compile(iota_cross_entropy, fullgraph=True)(z, y), reference(z, y)[0]) < 1e-6


# ---- planted bugs

MUTANTS = {  # what is wrong: (text of the source, what stands in its place)
    "the mask is multiplied": ("torch.where(target_mask(z, y, dim), z, 0)", "(target_mask(z, y, dim) * z)"),
    "the mask looks one class on": ("== y.unsqueeze(dim)\n\n", "== y.unsqueeze(dim) + 1\n\n"),
    "the classes are always last": ("shape[dim] = z.shape[dim]", "shape[-1] = z.shape[-1]"),
    "the masked turn rounds first": ("torch.where(target_mask(z, y, dim), p - 1, p).to(z.dtype)",
                                     "torch.where(target_mask(z, y, dim), p.to(z.dtype) - 1, p.to(z.dtype))"),
    "the indexed turn rounds first": ("at_target = target.exp()", "at_target = target.exp().to(z.dtype)"),
    "the one is not subtracted": ("p - 1, p)", "p, p)"),
    "the log-sum-exp is of rounded scores": ("wide = z.to(acc_dtype(z.dtype))", "wide = z"),
    "backward overwrites dz": ("(dz * g).to", "dz.mul_(g).to"),
    "one upstream gradient for all": ("(dz * g)", "(dz * g.mean())"),
    "dz is kept when nobody asks": ("if torch.is_grad_enabled() else input.detach()", ""),
    "ignore_index is forgotten": ("input.shape[dim], ignore_index, reduction)", "input.shape[dim], -100, reduction)"),
    "two a row are taken": ("[*rows[:dim], 1, *rows[dim + 1:]]", "[*rows[:dim], *_value(index).shape[dim:dim + 1], *rows[dim + 1:]]"),
    "short indices are taken": ("return 0 <= dim < len(rows) and _equal(", "return _equal(_value(index).shape[dim], 1) or _equal("),
    "two readers are allowed": ("len(node.users) != 1 or not v", "not v"),
    "no sweep is needed": (" or not _is_swept(source, dim)", ""),
    "any axis counts as swept": ("return any(_equal(_value(node).shape[d], size) for d in dims)", "return True"),
    "integers are taken": (" or not v.is_floating_point()", ""),
    "an index outside gives zero": ('_constant(graph, v, float("nan"))', "_constant(graph, v, 0.0)"),
    "the choice climbs over anything": ("and all(_is_row_constant(a, v, dim) for a in rest)", ""),
    "the choice stays where it is": ("if (source.target in ROWWISE", "if (False and source.target in ROWWISE"),
    "any base counts as zeros": ("return number if isinstance", "return 0 if number is None else number if isinstance"),
    "a shared constant is taken": ("or len(node.users) != 1: return None\n    number", ": return None\n    number"),
    "the background is lost": ("_constant(graph, v, fill))", "_constant(graph, v, 0.0))"),
    "scatter_add onto anything": ("elif fill != 0 or", "elif"),
    "a longer source is taken": (" or not _equal(_value(new).shape, _value(index).shape)", ""),
    "an option is overlooked": ("rule is None or node.kwargs or", "rule is None or"),
}


CHOSEN_BUGS = few(MUTANTS, "the mask looks one class on", "the masked turn rounds first", "backward overwrites dz", "ignore_index is forgotten",
                  "two readers are allowed", "an index outside gives zero", "the background is lost")


@pytest.fixture
def variant(tmp_path):
    "The iota module with texts replaced"
    return partial(planted, fusedloss.iota, tmp_path)


def loss_faults(m):
    "What the module's loss gets wrong"
    for name, args in {
            "plain": dict(z=scores((7, 10)), y=labels((7,), 10)),
            "first dimension": dict(z=scores((10, 7)), y=labels((7,), 10), dim=0, reduction="none"),
            "ignored": dict(z=scores((7, 10)), y=labels((7,), 10).masked_fill(torch.arange(7) == 2, 4), ignore_index=4),
            "per token": dict(z=scores((7, 10)), y=labels((7,), 10), reduction="none")}.items():
        yield from (f"{name}: {w}" for w in faults(m.iota_cross_entropy, tolerance=1e-12, **args))
    half, y = (scores((64, 300)) * 2).bfloat16(), labels((64,), 300)
    half[torch.arange(64), y] = 12
    exact, dz = reference(half, y, reduction="none")
    for fwd in (m.iota_cross_entropy_fwd, m.gather_cross_entropy_fwd):
        losses, got = fwd(half, y)
        yield from ["half loss"] * bool((losses - exact).abs().max() > 1e-5)  # a few roundings of a score of 12
        at = got[torch.arange(64), y], dz[torch.arange(64), y]
        yield from ["half dz"] * (relative_error(*at) > 2**-7)
    z = torch.full((4, 5), -INF)
    z[:, 2] = 1
    for turned, dim in ((z, 1), (z.T, 0)):
        yield from ["select"] * (not torch.equal(m.onehot_select(turned, torch.full((4,), 2), dim), torch.ones(4)))
    z, y = scores((6, 10)).requires_grad_(), labels((6,), 10)
    loss = m.iota_cross_entropy(z, y, reduction="sum")
    first, second = (torch.autograd.grad(loss, z, torch.tensor(3.0, dtype=z.dtype), retain_graph=True)[0] for _ in range(2))
    yield from ["second backward"] * (not torch.equal(first, second))
    kept = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        seen = m.IotaCrossEntropy.forward
        m.IotaCrossEntropy.forward = staticmethod(lambda ctx, *a: kept.append(ctx.needs_input_grad[0]) or seen(ctx, *a))
        m.iota_cross_entropy(z, y)
    yield from ["dz without grad mode"] * any(kept)


def pass_faults(m):
    "What the module's pass gets wrong"
    for cases, wanted in ((FIRES, True), (KEEPS, False)):
        for name, (f, *args) in cases.items():
            gm = traced(f, *args)
            expected, before = gm(*args), str(gm.graph)
            m.rewrite_gather(gm)
            yield from [f"{name}: fires {not wanted}"] * ((str(gm.graph) != before) != wanted)
            same = all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (gm(*args), expected))))
            yield from [f"{name}: changes the result"] * (not same)
    gm = m.rewrite_gather(traced(FIRES["log-softmax"][0], Z, Y))
    yield from ["outside"] * (not gm(Z, Y + 10).isnan().all())
    table = torch._decomp.get_decompositions([aten._log_softmax])
    gm = m.rewrite_gather(make_fx(FIRES["log-softmax"][0], decomposition_table=table)(Z, Y))
    chosen = [n.args[1].op for n in gm.graph.nodes if n.target is aten.where.self and n.meta["val"].shape == Z.shape]
    yield from ["does not climb"] * (chosen != ["placeholder"])


def first_fault(module):
    "The first thing that the module gets wrong"
    try:
        return next(loss_faults(module), None) or next(pass_faults(module), None)
    except (RuntimeError, IndexError, AssertionError, TypeError) as error:
        return repr(error)


def test_the_unchanged_source_passes(variant):
    assert first_fault(variant(*unchanged(MUTANTS.values()))) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", CHOSEN_BUGS)
def test_a_planted_bug_is_noticed(bug, variant):
    assert first_fault(variant(*MUTANTS[bug])), f"nothing notices that {bug}"
