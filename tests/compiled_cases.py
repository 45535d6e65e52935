"""What losses over ranks promise under `torch.compile`: a table, loss × promise, on two ranks; each row without a graph break.

Imported by `sharded_worker.py`; `test_sharded.py` has a test of each row."""
import functools
from typing import Any, Callable, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close

import fusedloss as fl
from fusedloss.core.compiled_ranks import RankLoss
from sharded_cases import DEVICE, Model, local, mine, raises, same_gradients, shared_batch, single, spread, wrapped_apart

V, H = 11, 8
SIZES, VALUES = (4, 20, 6), (0.25, 0.5, 0.125)  # the third of each finds the graph of the second


class Loss(NamedTuple):
    "A loss to be called as `call(x, w, y, **how, **numbers)`"
    call: Callable[..., Any]
    numbers: tuple[str, ...] = ()  # options that may change from call to call
    own: bool = True  # whether ranks may have tokens of their own
    step: bool = True  # whether it has gradients


def floats(seed: int, *size: int) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=numbers).to(DEVICE).requires_grad_()


def labels(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device) % V


def several(y: Tensor) -> Tensor:
    return torch.stack([y, (y + 3) % V], -1)


def divergence(x: Tensor, w: Tensor, y: Tensor, **how) -> Tensor:
    return fl.sharded_linear_divergence(x, w, x.detach() + 1, w.detach(), **how)


def with_statistics(x: Tensor, w: Tensor, y: Tensor, **how) -> tuple[Tensor, Tensor]:
    loss, stats = fl.sharded_linear_cross_entropy(x, w, y, return_stats=True, **how)
    return loss, stats.lse, stats.entropy


def pairs(loss: Callable, **options) -> Loss:
    "A contrast of x and another of its shape, over the weight's ranks"
    return Loss(lambda x, w, y, backbone_reduction="sum", **numbers: loss(2 * x, x.flip(0) + 1, mesh=w.device_mesh, backbone_reduction=backbone_reduction, **options, **numbers),
                ("logit_scale",), own=False)


def with_positives(x: Tensor, y: Tensor, **how) -> Tensor:
    return fl.contrastive_loss(x, y, positives=torch.arange(x.shape[0], device=x.device), **how)


LOSSES = {
    "linear_cross_entropy": Loss(fl.linear_cross_entropy, ("logit_scale", "z_loss")),
    "sharded_linear_cross_entropy": Loss(fl.sharded_linear_cross_entropy, ("label_smoothing", "softcap")),
    "product": Loss(functools.partial(fl.sharded_linear_cross_entropy, method="product"), ("logit_scale",)),
    "each token": Loss(functools.partial(fl.sharded_linear_cross_entropy, reduction="none"), ("logit_scale",)),
    "statistics": Loss(with_statistics, ("z_loss",)),
    "log_probs": Loss(lambda *a, **how: fl.sharded_linear_log_probs(*a, entropy=True, **how)[:2], ("temperature", "softcap")),
    "K classes": Loss(lambda x, w, y, **how: fl.sharded_linear_log_probs(x, w, several(y), entropy=True, **how)[:2], ("temperature",)),
    "temperatures": Loss(lambda x, w, y, **how: fl.sharded_linear_log_probs(x, w, y, temperature=1 + x.detach()[:, 0].abs(), target_rank=True, **how)[0]),
    "divergence": Loss(divergence, ("temperature", "softcap")),
    "divergence, jsd of each token": Loss(functools.partial(divergence, kind="jsd", reduction="none"), ("beta",)),
    "topk": Loss(lambda x, w, y, **how: fl.sharded_linear_topk(x, w, 3, **how)[::2], ("temperature",)),
    "sample": Loss(lambda x, w, y, **how: fl.sharded_linear_sample(x, w, **how), ("temperature",), step=False),
    "sample, filtered": Loss(lambda x, w, y, **how: fl.sharded_linear_sample(x, w, top_k=5, top_p=0.9, **how), step=False),
    "contrast": pairs(fl.contrastive_loss), "contrast, positives": pairs(with_positives),
    "sigmoid contrast": pairs(fl.sigmoid_contrastive_loss, logit_bias=-1.0),
}
GIVEN = dict.fromkeys(("contrast", "contrast, positives", "sigmoid contrast"), dict(logit_scale=2.0))  # a scale has no default


def added(found: Any) -> Tensor:
    return found.sum() if isinstance(found, Tensor) else sum(added(t) for t in found)


class Pair:
    "A loss and the same compiled without a graph break; what they return is compared, and the gradients of tokens and classes"
    def __init__(self, loss: Loss, mesh: DeviceMesh, **how):
        torch._dynamo.reset()
        self.loss, self.count, self.rank = loss, CompileCounterWithBackend("aot_eager"), mesh.get_local_rank()
        self.w, self.how = spread(floats(1, V, H).detach(), mesh).requires_grad_(), how
        self.run = lambda x, w, y, **numbers: added(loss.call(x, w, y, **how, **numbers))
        self.compiled = torch.compile(self.run, fullgraph=True, backend=self.count)

    def values(self, run: Callable, x: Tensor, **numbers) -> list[Tensor]:
        torch.manual_seed(0)  # samples
        found = run(x, self.w, labels(x), **numbers)
        grads = torch.autograd.grad(found, (x, self.w), allow_unused=True) if found.requires_grad else ()  # a contrast has no classes
        return [found.detach(), *(local(g) for g in grads if g is not None)]

    def same(self, x: Tensor, **numbers):
        wanted, found = (self.values(run, x, **numbers) for run in (self.run, self.compiled))
        assert len(found) == len(wanted) and (len(found) > 1) == (self.loss.step and torch.is_grad_enabled())
        for a, b in zip(found, wanted): assert_close(a, b)


def sizes(loss: Loss, mesh: DeviceMesh, given: dict):
    "At most two graphs a grad mode for any numbers of tokens"
    pair = Pair(loss, mesh)
    for n in SIZES: pair.same(floats(n, n, H), **given)
    assert pair.count.frame_count <= 2
    for n in SIZES:
        with torch.no_grad(): pair.same(floats(n, n, H), **given)
        pair.same(floats(n, n + 6, H), **given)
    assert pair.count.frame_count <= 4


def numbers(loss: Loss, mesh: DeviceMesh, given: dict):
    "Numbers that change make no further graph"
    pair = Pair(loss, mesh)
    for value in VALUES: pair.same(floats(1, 6, H), **dict.fromkeys(loss.numbers, value))
    assert pair.count.frame_count <= 2


def submesh(loss: Loss, mesh: DeviceMesh, given: dict):
    "Classes over one dimension of a mesh of two"
    of = DeviceMesh(DEVICE, [[0, 1]], mesh_dim_names=("data", "tensor"))["tensor"]
    Pair(loss, of).same(floats(1, 6, H), **given)


def own_tokens(loss: Loss, mesh: DeviceMesh, given: dict):
    "Tokens of each rank's own, and not as many: plain, and a DTensor's"
    pair = Pair(loss, mesh, backbone_reduction="sum")
    for n in SIZES: pair.same(floats(n + pair.rank, n + pair.rank, H), **given)
    assert pair.count.frame_count <= 2


def half(loss: Loss, mesh: DeviceMesh, given: dict):
    "Under autocast, which is over when a graph runs"
    pair = Pair(loss, mesh)
    with torch.autocast(DEVICE, dtype=torch.bfloat16): pair.same(floats(1, 6, H), **given)


def fits(name: str, promise: Callable) -> bool:
    "Whether a loss is asked for a promise"
    loss = LOSSES[name]
    return not (promise is numbers and not loss.numbers or promise is own_tokens and not loss.own)


def kept(name: str, promise: Callable, meshes: list[DeviceMesh]):
    "A row of the table on two ranks"
    for ranks, mesh, rank in mine(meshes[1:2]): promise(LOSSES[name], mesh, GIVEN.get(name, {}))


def learned(meshes):
    "A scale, a bias and weights of classes and tokens, and rows beside a mesh"
    for ranks, mesh, rank in mine(meshes[1:2]):
        w, b, class_weight = floats(1, V, H), floats(2, V), floats(3, V).detach().abs()
        w, b = (local(spread(t.detach(), mesh)).clone().requires_grad_() for t in (w, b))
        scale, x = torch.tensor(1.3, device=DEVICE, requires_grad=True), floats(4, 6, H)
        call = lambda x, w, b, scale: fl.sharded_linear_cross_entropy(
            x, w, labels(x), linear_bias=b, logit_scale=scale, weight=class_weight, token_weight=x.detach()[:, 0].abs(), mesh=mesh, num_classes=V)
        torch._dynamo.reset()
        wanted, found = (torch.autograd.grad(run(x, w, b, scale), (x, w, b, scale)) for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")))
        assert_close(found, wanted)


def alone(meshes):
    "Without a mesh one process has all classes; an upstream gradient in fp16 that a loss scale multiplies"
    for dtype in (torch.float32, torch.float16):
        x, w = (t.detach().to(dtype).requires_grad_() for t in (floats(1, 6, H), floats(2, V, H)))
        call = lambda x, w: 2**16 * fl.sharded_linear_cross_entropy(x, w, labels(x)) + fl.sharded_linear_log_probs(x, w, labels(x)).log_probs.sum()
        torch._dynamo.reset()
        wanted, found = (torch.autograd.grad(run(x, w), (x, w)) for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")))
        assert_close(found, wanted)


def sequences(meshes):
    "Tokens of a sequence over the ranks, a loss of each, its target two ahead"
    for ranks, mesh, rank in mine(meshes[1:2]):
        w, x = spread(floats(1, V, H).detach(), mesh).requires_grad_(), floats(2, 3, 8, H)
        x, y = spread(x.detach(), mesh, 1).requires_grad_(), spread(torch.arange(24, device=DEVICE).view(3, 8) % V, mesh, 1)
        call = lambda x, w, y: fl.linear_cross_entropy(x, w, y, reduction="none", shift=2, backbone_reduction="sum")
        torch._dynamo.reset()
        losses, found = (run(x, w, y) for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")))
        assert_close(found, losses)
        pairs = [torch.autograd.grad(t.sum(), (x, w)) for t in (losses, found)]
        for a, b in zip(*pairs): assert_close(local(a), local(b))


def errors(meshes):
    "Wrong labels and other shapes when the graph runs, a generator before: every rank raises"
    for ranks, mesh, rank in mine(meshes[1:2]):
        w, x = spread(floats(1, V, H).detach(), mesh).requires_grad_(), floats(2, 4 + rank, H)
        torch._dynamo.reset()
        compiled = torch.compile(fl.sharded_linear_cross_entropy, fullgraph=True, backend="aot_eager")
        raises(ValueError, "target: expected shape [4]", lambda: compiled(x[:4], w, labels(x[:3])))
        raises(ValueError, "shape of input: expected the same on all ranks", lambda: compiled(x, w, labels(x)))
        if DEVICE == "cpu": raises(IndexError, "expected 0 ≤ label < 11", lambda: compiled(x[:4], w, labels(x[:4]) + 20))
        draw = torch.compile(lambda x, w: fl.sharded_linear_sample(x, w, generator=torch.Generator(DEVICE)), fullgraph=True, backend="aot_eager")
        raises(Exception, "", lambda: draw(x[:4], w))


def inside_fsdp(meshes):
    "A model under FSDP2 with its head apart: hooks of FSDP2 break the graph, the loss is an operator all the same"
    for ranks, mesh, rank in mine(meshes[1:2]):
        together, own = shared_batch(mesh)
        for how in ("mean", "sum"):
            model, wanted = wrapped_apart(mesh, how, False), single([together])
            torch._dynamo.reset()
            with mock.patch.object(RankLoss, "made", autospec=True, side_effect=RankLoss.made) as made:
                loss = torch.compile(model, backend="aot_eager")(*own)
                loss.backward()
            assert made.call_count == 1
            assert_close(loss.detach(), Model()(*together).detach())
            same_gradients(model, wanted)


PROMISES = {f"{name}, {promise.__name__}": functools.partial(kept, name, promise)
            for promise in (sizes, numbers, submesh, own_tokens, half) for name in LOSSES if fits(name, promise)}
PROMISES |= {fn.__name__: fn for fn in (alone, learned, sequences, errors, inside_fsdp)}
