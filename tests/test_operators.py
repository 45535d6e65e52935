"""Operators: one registration a process, whose functions may be replaced."""
import gc
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from helpers import everywhere, planted
from test_margins import MagFace
from torch import Tensor
from project import ROOT

import fusedloss as fl
from fusedloss import chunks, contrast, kernels, linear_ctc, tiles
from fusedloss.core import operators
from fusedloss.core.operators import operator


def define(factor: float):
    "The operator `again`, every function of it new"
    def again(x: Tensor) -> Tensor:
        return x * factor

    again = operator("test_again", again, fake=lambda x: x.new_empty(x.shape), backward=lambda ctx, needs, g: {"x": g * factor * 10})
    return again


@pytest.mark.thorough
def test_defining_again_replaces_the_functions_behind_every_handle():
    first, x = define(0.0), torch.ones(3, requires_grad=True)
    call = torch.compile(lambda x: first(x), fullgraph=True, backend="aot_eager")
    for factor in range(1, 51):
        last = define(float(factor))
        if factor % 25: continue
        gc.collect()
        for handle in (first, last, torch.ops.fusedloss.test_again, call):
            y = handle(x)
            assert torch.equal(y, factor * torch.ones(3))
            if handle is not call:  # what a graph of a compiler holds is compiled
                assert torch.autograd.grad(y.sum(), x)[0].tolist() == [factor * 10] * 3


def test_another_schema_leaves_the_first_operator_as_it_is():
    first = define(2.0)
    @operator("test_again")
    def other(x: Tensor, factor: float) -> Tensor: return factor * x
    assert other is not first and other(torch.ones(()), 3.0) == 3 and first(torch.ones(())) == 2
    assert define(4.0) is first and first(torch.ones(())) == 4 and other(torch.ones(()), 3.0) == 3


@pytest.mark.thorough
def test_a_reload_and_a_fresh_import_keep_the_operators():
    "In a process of its own: classes of the library are made anew"
    code = """if True:
        import gc, importlib, sys, torch
        import fusedloss as fl
        from fusedloss import kernels
        from fusedloss.core import operators
        assert "torch.utils.flop_counter" not in sys.modules
        from torch.utils.flop_counter import FlopCounterMode  # after the operators
        with FlopCounterMode(display=False) as mode:
            fl.linear_cross_entropy(torch.ones(2, 3), torch.ones(5, 3), torch.zeros(2).long(), method="tiles")
        assert mode.get_total_flops() == 60
        z, y, first = torch.randn(5, 7, requires_grad=True), torch.arange(5), kernels.logits_loss
        call = torch.compile(lambda z: fl.cross_entropy(z, y), fullgraph=True, backend="aot_eager")
        expected = call(z)
        for module in [operators, kernels] * 2: importlib.reload(module)
        gc.collect()
        assert kernels.logits_loss is first and torch.equal(call(z), expected)
        for name in [n for n in sys.modules if n.startswith("fusedloss")]: del sys.modules[name]
        gc.collect()
        import fusedloss
        assert importlib.import_module("fusedloss.kernels").logits_loss is first
        call(z).backward()
        fusedloss.cross_entropy(z, y).backward()
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_first_call_does_not_import_dynamo_and_later_ones_are_guarded_from_it():
    "The import takes seconds of a first call; once it is there, it must not look into kernels, whose names would break a graph"
    code = """if True:
        import sys, torch, fusedloss as fl
        from fusedloss.filter import recompute_loss
        x, w, y = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True), torch.arange(4)
        for method in ("eager", "tiles", "chunks", "recompute"): fl.linear_cross_entropy(x, w, y, method=method).backward()
        fl.ctc_loss_with_logits(torch.randn(5, 1, 4, requires_grad=True), torch.ones(1, 2, dtype=torch.long), [5], [2]).backward()
        assert "torch._dynamo" not in sys.modules
        plain = recompute_loss._backend_fns[None]
        import torch._dynamo as dynamo
        from torch.utils.flop_counter import FlopCounterMode
        with FlopCounterMode(display=False): fl.linear_cross_entropy(x, w, y, method="recompute")
        assert recompute_loss._backend_fns[None] is not plain and recompute_loss.guarded is None
        def broken(x):  # in eager frames that Dynamo watches
            dynamo.graph_break()
            return fl.linear_cross_entropy(x, w, y, method="recompute")
        assert torch.compile(broken, backend="eager")(x).isfinite()
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_two_threads_may_guard_an_operator_from_dynamo():
    "The second finds nothing left to do"
    op = kernels.logits_loss
    op.guard()
    kernel = op._backend_fns[None]
    op.guard()
    assert op._backend_fns[None] is kernel is not None and op.guarded is None


def library() -> dict[str, tuple]:
    "The functions of the library's operators, by name"
    each = [op for known in operators._registered().values() for op in known.values() if op._namespace == "fusedloss"]
    return {op._qualname: (op.fn, op.fake, op.save, op.backward) for op in each}


@pytest.mark.parametrize("name", ["logits_loss", "contrastive_loss_over_ranks"])  # one by its name in quotes, one that a decorator names
def test_a_planted_operator_leaves_the_library_alone(name, tmp_path):
    module, same = {"logits_loss": (kernels, "return losses if reduction"), "contrastive_loss_over_ranks": (contrast, "def fake_contrast(")}[name]
    before = library()
    variant = planted(module, tmp_path, same, same).__name__.partition("_")[0]
    assert library() == before and {f"{space}::{name}" for space in ("fusedloss", variant)} <= operators._registered().keys()


def sample(h=3, dtype=torch.float64):
    "x [6,h], w [9,h], y [6]"
    torch.manual_seed(0)
    x, w = torch.randn(6, h, dtype=dtype), torch.randn(9, h, dtype=dtype)
    return x.requires_grad_(), w.requires_grad_(), torch.tensor([0, 3, 8, -100, 2, 3])


def linear(**options):
    return lambda x, w, y: fl.linear_cross_entropy(x, w, y, **options).sum()


def of_logits(loss, **options):
    return lambda x, w, y: loss(x @ w.T, y, **options).sum()


FRAMES = [3, 2]


def of_paths(loss, **options):
    "x as three frames of two sequences"
    return lambda x, w, y: loss(x.view(3, 2, -1), w, torch.tensor([[1], [2]]), FRAMES, [1, 1], **options).sum()


def with_stats(loss, **options):
    def run(x, w, y):
        l, stats = loss(x, w, y, return_stats=True, **options)
        return l.sum() + stats.entropy.sum()
    return run


def head(kind=fl.PartialFC, **options):
    "A head whose weight is given"
    def run(x, w, y):
        m = kind(9, x.shape[1], dtype=w.dtype, ignore_index=-100, sparse=False, **options)
        return torch.func.functional_call(m, {"weight": w}, (x, y))
    return run


CTC = lambda x, w, *rest, **options: fl.ctc_loss_with_logits(x @ w.T, *rest, **options)
# by name: losses whose first derivative is all there is
ONCE = {
    **{f"linear, {m}": linear(method=m) for m in ("auto", "eager", "tiles", "chunks", "recompute")},
    "chunks, statistics": lambda x, w, y: fl.chunked_linear_cross_entropy(x, w, y, return_stats=True)[0],
    "recompute, each row": linear(method="recompute", reduction="none"),
    "recompute, statistics": with_stats(fl.recompute_linear_cross_entropy),
    "recompute, filtered": linear(method="recompute", filter_eps=1e-3),
    "LMCL in tiles": lambda x, w, y: fl.tiled_linear_cross_entropy(x, w, y, scale=8.0),
    "cross entropy": of_logits(fl.cross_entropy),
    "cross entropy, each row": of_logits(fl.cross_entropy, reduction="none"),
    "cross entropy, in place": of_logits(fl.cross_entropy, inplace=True),
    "cross entropy, each row in place": of_logits(fl.cross_entropy, inplace=True, reduction="none"),
    "iota": of_logits(fl.iota_cross_entropy),
    **{type(m).__name__: lambda x, w, y, m=m: fl.margin_cross_entropy(x, w, y, margin=m) for m in (
        fl.margins.CosFace(), fl.margins.ArcFace(), fl.margins.AdaFace().double().eval(), fl.margins.SubCenter(1, fl.margins.Combined()), MagFace())},
    "PartialFC": head(),
    "linear CTC": of_paths(fl.linear_ctc_loss),
    "linear CTC, each row": of_paths(fl.linear_ctc_loss, reduction="none"),
    **{f"classes over ranks, {m}": lambda x, w, y, m=m: fl.sharded_linear_cross_entropy(x, w, y, method=m) for m in ("recompute", "product")},
    "log-probabilities over ranks": lambda x, w, y: fl.sharded_linear_log_probs(x, w, y).log_probs.sum(),
    "the best classes over ranks": lambda x, w, y: (lambda found: found.log_probs.sum() + found.lse.sum())(fl.sharded_linear_topk(x, w, 3)),
    "several classes over ranks": lambda x, w, y: fl.sharded_linear_log_probs(x, w, torch.stack([y, (y + 1) % len(w)], 1)).log_probs.sum(),
    "divergence over ranks": lambda x, w, y: fl.sharded_linear_divergence(x, w, torch.ones_like(x), w.detach()),
    "head over ranks": head(kind=fl.ShardedPartialFC),
}
TWICE = {"CTC": of_paths(CTC), "log_softmax": lambda x, w, y: torch.nn.functional.cross_entropy(x @ w.T, y)}


def test_a_recorded_gradient_is_right_and_its_derivative_raises():
    for name, loss in ONCE.items():
        x, w, y = sample()
        expected = torch.autograd.grad(loss(x, w, y), (x, w))
        for i, leaf in enumerate((x, w)):
            l = loss(x, w, y)
            g = torch.autograd.grad(l, (x, w), create_graph=True)
            assert all(torch.equal(a, e) for a, e in zip(g, expected)), name
            penalty = l + 10 * g[i].pow(2).sum()
            for by in (x, w):
                with pytest.raises(RuntimeError, match="no derivative of its own"):
                    torch.autograd.grad(penalty, by, retain_graph=True)
                    pytest.fail(f"{name}: a second derivative was left out")
            other = torch.autograd.grad(leaf.pow(3).sum() + l * 2, leaf)[0]  # of which the gradient was recorded too
            torch.testing.assert_close(other, 3 * leaf.detach() ** 2 + 2 * expected[i])


@pytest.mark.parametrize("name", ONCE)
def test_a_gradient_is_recorded_under_checkpointing(name):
    "Which hands out a saved tensor once"
    x, w, y = sample()
    run = lambda x: torch.utils.checkpoint.checkpoint(lambda x: ONCE[name](x, w, y), x, use_reentrant=False)
    g, = torch.autograd.grad(run(x), x, create_graph=True)
    assert torch.equal(g, torch.autograd.grad(ONCE[name](x, w, y), x)[0])
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        torch.autograd.grad(g.pow(2).sum(), x)


def test_an_operator_takes_arguments_by_name():
    x, w, y = (t.detach() for t in sample())
    given = dict(margin=0.0, scale=None, token_tile=4, class_tile=4, logit_scale=2.0)
    lse, score, row_max = tiles.tiled_lse(x, w, y, *given.values())
    for call in (tiles.tiled_lse, torch.compile(lambda *t, **k: tiles.tiled_lse(*t, **k), fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(call(x, w, y, **given), (lse, score, row_max))
    _, total = torch.func.grad_and_value(lambda x: tiles.tiled_lse(x, w, y, **given)[0].sum())(x)
    torch.testing.assert_close(total, lse.sum())
    with pytest.raises(TypeError, match="tile_of_tokens"):
        tiles.tiled_lse(x, w, y, tile_of_tokens=4, **given)


def test_operators_raise_for_second_derivatives_where_a_mode_looks_on():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, fn, types, args=(), kwargs=None): return fn(*args, **(kwargs or {}))

    for name, loss in [*ONCE.items(), ("CTC", TWICE["CTC"])]:
        x, w, y = sample()
        with Looks():
            l = loss(x, w, y)
            g, = torch.autograd.grad(l, x, create_graph=True)
            with pytest.raises(RuntimeError, match="no derivative of its own"):
                torch.autograd.grad(l + 10 * g.pow(2).sum(), x)
                pytest.fail(f"{name}: a second derivative was left out")


def test_second_derivatives_that_are_there_are_right():
    for name, loss in TWICE.items():
        x, w, y = sample()
        def penalty(x): return 10 * torch.autograd.grad(loss(x, w, y), x, create_graph=True)[0].pow(2).sum()
        assert torch.autograd.gradcheck(penalty, x), name


def test_a_hessian_raises():
    x, w, y = sample()
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        torch.autograd.functional.hessian(lambda x: fl.linear_cross_entropy(x, w, y), x)


# by name: losses that `torch.func.grad` takes, and those that say what to use
FUNCTIONAL = [name for name in ONCE if name not in ("iota", "PartialFC") and "over ranks" not in name]


def test_func_grad():
    for name in [*FUNCTIONAL, *TWICE]:
        loss, (x, w, y) = {**ONCE, **TWICE}[name], sample()
        expected = torch.autograd.grad(loss(x, w, y), (x, w))
        got, value = torch.func.grad_and_value(loss, argnums=(0, 1))(x.detach(), w.detach(), y)
        for a, e in zip(got, expected): torch.testing.assert_close(a, e, msg=lambda m: f"{name}: {m}")
        assert not value.requires_grad and not got[0].requires_grad
        later = torch.func.vjp(lambda x, w: loss(x, w, y), x.detach(), w.detach())[1]  # called when its level is gone
        for a, e in zip(later(torch.ones((), dtype=x.dtype)), expected): torch.testing.assert_close(a, e, msg=lambda m: f"{name}: {m}")


def test_a_tensor_that_a_transform_left_behind(monkeypatch):
    "It has no address to launch a kernel with: what is under it is taken, on a GPU too"
    left, y = [], torch.tensor([0, 2, 8, 4])
    x = torch.randn(4, 9)
    torch.func.grad(lambda x: left.append(x) or x.square().sum())(x)
    everywhere(monkeypatch, fl.clusters, "has_kernel", lambda z: z.shape == (4, 9))
    for loss in (fl.cross_entropy, lambda x, y: fl.log_probs(x, y)[0].sum(), lambda x, y: fl.ctc_loss(x[:, None], y[None, 1:3], (4,), (2,))):
        assert left[0].requires_grad and torch.equal(loss(left[0], y), loss(x, y))


def test_func_grad_of_a_gradient_raises():
    for name in FUNCTIONAL:
        loss, (x, w, y) = ONCE[name], sample()
        def slope(x): return torch.func.grad(loss)(x, w.detach(), y).pow(2).sum()
        with pytest.raises(RuntimeError, match="no derivative of its own"):
            torch.func.grad(slope)(x.detach())
            pytest.fail(f"{name}: a second derivative was left out")


def test_func_grad_of_a_model_as_torchs():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5)).double()
    torch.manual_seed(0)
    x, y, parameters = torch.randn(7, 4).double(), torch.arange(7) % 5, dict(model.named_parameters())
    def loss(parameters, by): return by(torch.func.functional_call(model, parameters, (x,)), y, label_smoothing=0.1)
    got, expected = (torch.func.grad(loss)(parameters, by) for by in (fl.cross_entropy, torch.nn.functional.cross_entropy))
    for key, e in expected.items(): torch.testing.assert_close(got[key], e)


def test_statistics_do_not_move_under_a_transform():
    x, w, y = (t.detach() for t in sample())
    with pytest.raises(RuntimeError, match="AdaFace in training: .*; use eval"):
        torch.func.grad(lambda x: fl.margin_cross_entropy(x, w, y, margin=fl.margins.AdaFace().double()))(x)


def test_a_margin_alone_is_batched_and_differentiated():
    x = torch.linspace(-0.8, 0.9, 6).double().view(2, 3)
    score = fl.margins.ArcFace()
    torch.testing.assert_close(torch.vmap(score)(x), score(x))
    slope = torch.vmap(torch.vmap(torch.func.grad(score)))(x)
    torch.testing.assert_close(slope, torch.autograd.functional.jacobian(lambda x: score(x).sum(), x))


def test_what_takes_no_transform_says_what_to_use():
    for name in set(ONCE) - set(FUNCTIONAL):
        loss, (x, w, y) = ONCE[name], sample()
        with pytest.raises(RuntimeError, match="; use "):
            torch.func.grad(loss)(x, w, y)
            pytest.fail(name)


def test_forward_mode_raises():
    from torch.autograd import forward_ad
    for name, loss in {**ONCE, "CTC": TWICE["CTC"]}.items():
        x, w, y = (t.detach() for t in sample())
        def jvp(): return torch.func.jvp(lambda x: loss(x, w, y), (x,), (torch.ones_like(x),))
        def dual():
            with forward_ad.dual_level(): return loss(forward_ad.make_dual(x, torch.ones_like(x)), w, y)
        def dual_that_requires_grad():
            with forward_ad.dual_level(): return loss(forward_ad.make_dual(x, torch.ones_like(x)), w.clone().requires_grad_(), y)
        for way in (jvp, dual, dual_that_requires_grad):
            with pytest.raises(RuntimeError, match="forward-mode"):
                way()
                pytest.fail(f"{name}, {way.__name__}: no tangent")


def test_a_dual_level_without_tangents_changes_nothing():
    from torch.autograd import forward_ad
    x, w, y = sample()
    with forward_ad.dual_level():
        l = fl.linear_cross_entropy(x, w, y, method="recompute")
    torch.testing.assert_close(l, fl.linear_cross_entropy(x, w, y, method="recompute"))


def test_vmap_raises():
    x, w, y = (t.detach() for t in sample())
    for method in ("tiles", "recompute", "chunks", "eager"):
        with pytest.raises(RuntimeError, match="vmap"):
            torch.func.vmap(lambda x: fl.linear_cross_entropy(x, w, y, method=method))(torch.stack([x, x]))
    for split in (lambda f: f, torch.func.grad):  # over labels, which are looked at first
        with pytest.raises(RuntimeError, match="not batched by torch.vmap"):
            torch.func.vmap(split(lambda x, y: fl.linear_cross_entropy(x, w, y)), (None, 0))(x, torch.stack([y, y]))


def divergence(x, w, y):
    return fl.linear_divergence(x, w, torch.ones_like(x), w.detach() + 1)


# by name: losses of which a backward pass changes what it has saved, or asks other operators
BATCHED = {**ONCE, **TWICE, "contrast": lambda x, w, y: fl.contrastive_loss(x, w[:6], 2.0),
           "contrast, positives": lambda x, w, y: fl.contrastive_loss(x, w, 2.0, positives=torch.arange(6)),
           "SigLIP": lambda x, w, y: fl.sigmoid_contrastive_loss(x, w, 2.0, -1.0, positives=torch.arange(6)), "divergence": divergence,
           "divergence of each token": lambda x, w, y: fl.linear_divergence(x, w, torch.ones_like(x), w.detach() + 1, reduction="none").sum(),
           "log-probabilities": lambda x, w, y: fl.linear_log_probs(x, w, y, entropy=True).entropy.sum(),
           "the best classes": lambda x, w, y: (lambda found: found.log_probs.sum() + found.lse.sum())(fl.linear_topk(x, w, 3)),
           "a transducer": lambda x, w, y: fl.linear_transducer_loss(x.view(2, 3, 3), x.view(2, 3, 3), w, torch.tensor([[1, 2], [3, 4]]), [3, 2], [2, 1]),
           "probabilities": lambda x, w, y: fl.cross_entropy(x @ w.T, torch.full((6, 9), 1 / 9, dtype=x.dtype)),
           "several targets": lambda x, w, y: fl.linear_cross_entropy(x, w, torch.arange(12).view(6, 2) % 9),
           "paths of a graph": lambda x, w, y: fl.logz(x.view(6, 1, 1, 3), torch.zeros(1, 3, dtype=torch.long), *x.new_zeros(2, 1, 1)).sum() + 0 * w.sum()}


@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_of_upstream_gradients(name):
    loss, (x, w, y) = BATCHED[name], sample()
    l, g = loss(x, w, y), torch.tensor([2.0, -3.0, 0.5]).double()
    made = torch.autograd.grad(l, (x, w), g, is_grads_batched=True)  # of what backward may overwrite
    expected = torch.autograd.grad(loss(x, w, y), (x, w))
    for a, e in zip(made, expected): torch.testing.assert_close(a, g[:, None, None] * e)
    rows = torch.autograd.functional.jacobian(lambda x: loss(x, w, y) * g, x, vectorize=True)
    torch.testing.assert_close(rows, g[:, None, None] * expected[0])


def test_a_batch_of_upstream_gradients_by_torch_func():
    for name in [n for n in FUNCTIONAL if n in BATCHED]:
        loss, (x, w, y) = BATCHED[name], sample()
        expected, = torch.autograd.grad(loss(x, w, y), x)
        rows = torch.func.jacrev(lambda x: torch.stack([loss(x, w.detach(), y), loss(x, w.detach(), y) * 2]))(x.detach())
        torch.testing.assert_close(rows, torch.stack([expected, 2 * expected]), msg=lambda m: f"{name}: {m}")


def test_a_batch_of_sparse_gradients_raises():
    x, _, y = sample()
    sparse = fl.PartialFC(9, 3, dtype=x.dtype, ignore_index=-100, sample_rate=0.5)
    with pytest.raises(RuntimeError, match="sparse=False"):
        torch.autograd.grad(sparse(x, y), (x, sparse.weight), x.new_ones(2), is_grads_batched=True)


def counted(run) -> int:
    from torch.utils.flop_counter import FlopCounterMode
    added = {torch.ops.aten.addmm_: lambda total, a, b, **_: 2 * a[0] * a[1] * b[1]}  # which PyTorch leaves out
    with FlopCounterMode(display=False, custom_mapping=added) as mode:
        run()
    return mode.get_total_flops()


# by name: products forward, and backward
PRODUCTS = {"linear, auto": (1, 2), "linear, eager": (1, 2), "linear, tiles": (1, 3), "linear, chunks": (3, 0), "linear, recompute": (1, 3),
            "LMCL in tiles": (1, 3), "recompute, filtered": (1, 3), "CosFace": (1, 3), "PartialFC": (1, 3)}


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops(name):
    (x, w, _), (forward, backward), y = sample(), PRODUCTS[name], torch.tensor([0, 3, 8, 1, 2, 3])
    losses, product = [], 2 * 6 * 3 * 9
    assert counted(lambda: losses.append(ONCE[name](x, w, y))) == forward * product
    assert counted(losses[0].backward) == backward * product
    assert counted(lambda: ONCE[name](x.detach(), w, y).backward()) == (forward + backward - 1) * product


@pytest.mark.parametrize("name, module", [("linear, chunks", chunks), ("PartialFC", operators), ("linear CTC", linear_ctc),
                                          ("linear CTC, each row", linear_ctc)])
def test_flops_are_those_of_the_products_that_are_made(name, module, monkeypatch):
    "Without the operator, a counter sees PyTorch's own products"
    x, w, _ = sample()
    monkeypatch.setitem(globals(), "FRAMES", [3, 3])  # frames that are not there are counted
    run = lambda: ONCE[name](x, w, torch.arange(6)).backward()
    told = counted(run)
    everywhere(monkeypatch, module, "observed", lambda: False)
    assert told == counted(run) > 0


def test_a_path_that_a_backward_pass_left_out_raises():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.square()
            ctx.save_for_backward(2 * x.detach(), y)  # y for the path to x
            return y

        @staticmethod
        @operators.first_order
        def backward(ctx, g): return g * ctx.saved_tensors[0],

    x = torch.tensor(3.0, requires_grad=True)
    slope, = torch.autograd.grad(Square.apply(x), x, create_graph=True)
    assert slope == 6
    with pytest.raises(RuntimeError, match=re.escape(operators.SECOND)):
        torch.autograd.grad(slope + x, x)


def test_modes_that_look_on_are_seen():
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert operators.observed() and not operators.transformed()
    with torch.autograd.forward_ad.dual_level():
        assert operators.transformed()
    assert not operators.observed()


class Line(NamedTuple):
    "Options of `line`."
    scale: float = 1.0
    shift: float = 0.0


def line(x: Tensor, o: Line, twice: bool) -> Tensor:
    return x * o.scale + o.shift


def test_options_are_flat_in_a_schema_and_a_tuple_for_a_function():
    arguments = operators.Arguments(line)
    assert [*arguments.signature(Tensor).parameters] == ["x", "scale", "shift", "twice", "numbers"]
    assert arguments.flat((5, Line(2.0), True)) == [5, 2.0, 0.0, True]
    assert arguments.group([5, 2.0, 0.0, True]) == (5, Line(2.0), True)
    assert arguments.gradients({"x": 7}, True) == (7, None, None, None, None)
