"""Optimizers of rows against PyTorch's, row by row and as a whole: states, strides, failures, kernels, planted bugs."""
import copy
import io
import itertools
import math
from functools import partial

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fusedloss as fl
from fusedloss import partial_fc, row_sparse
from fusedloss.margins import CosFace, normalize
from fusedloss.partial_fc import PartialFC
from fusedloss.row_sparse import RowSparse, Update, launch_update, plain_update
from workbook.measure import relative_error
from grids import FULL, few, grid, pairs
from head_cases import (
    ADAGRAD, ADAMW, COUNT, SGD, bf16, f32, f64, failure_fault, given_rows, kernels_for_all, make_head, place, row_by_row, sample, sparse_gradients,  # noqa: F401 (fixtures)
    state_fault)
from helpers import fault_of, planted, unchanged


# --- the optimizer ---

OF_SGD = [row for row in itertools.product((0.0, 0.9), (0.0, 0.5), (0.0, 0.1), (False, True), (False, True)) if not row[3] or row[0] and not row[1]]
SETTINGS = [(SGD, dict(lr=0.1, momentum=m, dampening=d, weight_decay=wd, nesterov=nest, maximize=up))
            for m, d, wd, nest, up in (OF_SGD if FULL else pairs(OF_SGD))]
SETTINGS += [(ADAMW, dict(lr=0.01, weight_decay=wd, betas=b, maximize=up))
             for wd, b, up in grid((0.0, 0.1), ((0.9, 0.999), (0.5, 0.6)), (False, True))]
SETTINGS += [(ADAGRAD, dict(lr=0.1, lr_decay=ld, weight_decay=wd, initial_accumulator_value=start, maximize=up))
             for ld, wd, start, up in grid((0.0, 0.3), (0.0, 0.1), (0.0, 0.5), (False, True))]


@pytest.mark.parametrize("kind,options", SETTINGS)
def test_lazy_is_pytorchs_for_each_row(kind, options, device):
    w = torch.randn(12, 5, dtype=f64)
    p, gradients = torch.nn.Parameter(w.clone().to(device)), list(sparse_gradients(w.shape, 9, f64))
    optimizer = RowSparse(kind, [p], **options)
    for rows, values in gradients:
        given_rows(p, rows, values)
        optimizer.step()
    torch.testing.assert_close(p.detach().cpu(), row_by_row(w, gradients, kind, options))


@pytest.mark.parametrize("kind,options", SETTINGS)
def test_dense_is_pytorchs_for_the_whole(kind, options, device):
    w = torch.randn(12, 5, dtype=f64, device=device)
    p, q = torch.nn.Parameter(w.clone()), torch.nn.Parameter(w.clone())
    ours, theirs = RowSparse(kind, [p], mode="dense", **options), kind([q], **options)
    for rows, values in sparse_gradients(w.shape, 9, f64):
        given_rows(p, rows, values)
        q.grad = p.grad.to_dense()
        ours.step(), theirs.step()
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize("kind,options", SETTINGS)
def test_dense_gradients_and_any_shape(kind, options, device):
    shapes = [(4, 3), (7,), (2, 3, 4), (1,)]
    ps = [torch.nn.Parameter(torch.randn(s, dtype=f64, device=device)) for s in shapes]
    qs = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    ours, theirs = RowSparse(kind, ps, **options), kind(qs, **options)
    for _ in range(5):
        for p, q in zip(ps, qs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step(), theirs.step()
    torch.testing.assert_close(ps, qs)


def test_foreign_and_accumulated_gradients(device):
    "An embedding's gradient has duplicates; two backward passes make one gradient"
    torch.manual_seed(0)
    e = torch.nn.Embedding(10, 3, sparse=True, device=device)
    f = torch.nn.Embedding(10, 3, device=device)
    f.load_state_dict(e.state_dict())
    ours, theirs = RowSparse(SGD, e.parameters(), lr=0.1, mode="dense", momentum=0.9), SGD(f.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for o in (ours, theirs):
            o.zero_grad()
        for seed in (1, 2):
            ids = torch.randint(10, (8,), generator=torch.Generator().manual_seed(seed)).to(device)
            e(ids).square().sum().backward(), f(ids).square().sum().backward()
        ours.step(), theirs.step()
    torch.testing.assert_close(e.weight, f.weight)


def test_a_heads_gradient_is_known(device):
    "Its rows go to the optimizer as they are: no sort, no wait"
    x, w, y = sample(device=device)
    head, layer = make_head(w, sample_rate=0.3), torch.nn.Linear(6, 6, device=device, dtype=f64)
    for _ in range(3):
        head.zero_grad()
        head(layer(x), y).backward()
        known, g = head.weight.grad_rows, head.weight.grad
        assert not g.is_coalesced() and g._indices().data_ptr() == known.index.data_ptr()
        assert row_sparse.live_rows(head.weight, g)[0] is known.rows


def test_accumulation_over_the_head(device):
    x, w, y = sample(device=device)
    head = make_head(w, sample_rate=0.3)
    optimizer = RowSparse(SGD, head.parameters(), lr=0.1)
    head(x[:10], y[:10]).backward()
    head(x[10:], y[10:]).backward()  # another sample
    total = head.weight.grad.to_dense()
    optimizer.step()
    torch.testing.assert_close(head.weight, w - 0.1 * total)


def test_two_forwards_then_their_backwards(device):
    x, w, y = sample(device=device)
    head = make_head(w, sample_rate=0.3)
    optimizer = RowSparse(SGD, head.parameters(), lr=0.1)
    one = head(x[:10], y[:10])
    two = head(x[10:], y[10:])
    one.backward()  # its rows are not those of the last forward
    total = head.weight.grad.to_dense()
    optimizer.step()
    torch.testing.assert_close(head.weight, w - 0.1 * total)
    del two


@pytest.mark.parametrize("kind,options", [(SGD, dict(lr=0.1, momentum=0.9, dampening=0.5)), (ADAMW, dict(lr=0.01)), (ADAGRAD, dict(lr=0.1, lr_decay=0.1, rowwise=True))])
def test_resume_bit_for_bit(kind, options, device):
    def make():
        torch.manual_seed(1)
        head = PartialFC(COUNT, 6, sample_rate=0.2, device=device)
        return head, RowSparse(kind, head.parameters(), **options)
    def run(head, optimizer, steps):
        losses = []
        for k in steps:
            x, _, y = sample(dtype=f32, device=device, seed=k)
            optimizer.zero_grad()
            loss = head(x, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses
    (a, oa), (b, ob) = make(), make()
    run(a, oa, range(4))
    file = io.BytesIO()
    torch.save([a.state_dict(), oa.state_dict()], file)
    file.seek(0)
    for held, state in zip((b, ob), torch.load(file, weights_only=True)):
        held.load_state_dict(state)
    assert run(a, oa, range(4, 8)) == run(b, ob, range(4, 8)) and torch.equal(a.weight, b.weight)


def test_state_keeps_its_dtypes():
    p = torch.nn.Parameter(torch.randn(6, 3).bfloat16())
    optimizer = RowSparse(ADAMW, [p], lr=0.1)
    for rows, values in sparse_gradients(p.shape, 3, bf16, count=2):
        given_rows(p, rows, values)
        optimizer.step()
    other = RowSparse(ADAMW, [p], lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, t in optimizer.state[p].items():
        held = other.state[p][name]
        assert held.dtype == t.dtype and torch.equal(held, t) and held is not t
    assert other.state[p]["exp_avg"].dtype == f32 and other.state[p]["row_steps"].dtype == torch.int32


# --- states of other optimizers, and of this one ---

def stepped(optimizer, p, count, seed):
    "Dense gradients for all rows, the same for each optimizer with this seed"
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        p.grad = torch.randn(p.shape, generator=g, dtype=f64).to(p)
        optimizer.step()


@pytest.mark.parametrize("flags", [{}, dict(foreach=True), dict(fused=True)], ids=str)
@pytest.mark.parametrize("mode", ["lazy", "dense"])
def test_goes_on_from_pytorchs_state(mode, flags):
    for kind, options in SETTINGS:
        q = torch.nn.Parameter(torch.randn(8, 3, dtype=f64, generator=torch.Generator().manual_seed(1)))
        theirs = kind([q], **options, **flags)
        stepped(theirs, q, 3, 0)
        p, bare = torch.nn.Parameter(q.detach().clone()), 1e9 * torch.ones(())
        ours = RowSparse(kind, [p], mode=mode, **options | dict(lr=bare.item()))  # the state dict's numbers hold
        state = theirs.state_dict()
        for group in state["param_groups"]:
            group.update({n: True for n in ("capturable", "differentiable") if n in group})  # how it was run, which says nothing of what comes out
        ours.load_state_dict(state)
        assert not any(ours.param_groups[0].get(n) for n in ("capturable", "differentiable"))
        stepped(theirs, q, 3, 9), stepped(ours, p, 3, 9)
        torch.testing.assert_close(p, q, msg=f"{kind.__name__} {options}")


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_momentum_that_begins_later_begins_as_pytorchs(dampening):
    "Momentum from step 3 on, in a run of ours and in one that PyTorch began"
    ends = []
    for begun, goes_on in itertools.product(("ours", "theirs"), ("ours", "theirs")):
        p = torch.nn.Parameter(torch.ones(4, 3, dtype=f64))
        make = dict(ours=partial(RowSparse, SGD), theirs=SGD)
        first, then = (make[name]([p], lr=0.1, dampening=dampening) for name in (begun, goes_on))
        stepped(first, p, 2, 0)
        then.load_state_dict(first.state_dict())
        then.param_groups[0]["momentum"] = 0.9
        stepped(then, p, 3, 1)
        ends.append(p.detach())
    for end in ends:
        torch.testing.assert_close(end, ends[-1])


def test_rows_of_a_strided_index_come_one_after_the_other():
    "Kernels read them so; `coalesce` leaves an index as it lies"
    g = torch.sparse_coo_tensor(torch.arange(10)[::2][None], torch.randn(5, 4), (10, 4), is_coalesced=True, check_invariants=True)
    assert g.indices()[0].stride() == (2,)
    rows, _ = row_sparse.live_rows(torch.zeros(10, 4), g)
    assert rows.is_contiguous() and rows.tolist() == [0, 2, 4, 6, 8]


def test_dampening_that_begins_later_spares_rows_that_had_no_step():
    p, grads = torch.nn.Parameter(torch.zeros(3, 2, dtype=f64)), torch.ones(1, 2, dtype=f64)
    optimizer = RowSparse(SGD, [p], lr=1.0, momentum=0.9)
    for row in (0, 0, 2, 0):
        given_rows(p, torch.tensor([row]), grads)
        optimizer.step()
        optimizer.param_groups[0]["dampening"] = 0.25 if row == 2 else optimizer.param_groups[0]["dampening"]
    given_rows(p, torch.tensor([1, 2]), grads.repeat(2, 1))
    optimizer.step()
    assert p[1, 0] == -1  # its first gradient, whole
    torch.testing.assert_close(p[2, 0].item(), -1 - (0.9 + 0.75))  # its second one, damped


def test_what_cannot_be_loaded_raises_and_changes_nothing():
    p = torch.nn.Parameter(torch.ones(3, 2))
    def state_of(optimizer):
        stepped(optimizer, p, 1, 0)
        return optimizer.state_dict()
    adamw, sgd = state_of(ADAMW([p], lr=0.1)), state_of(SGD([p], lr=0.1, momentum=0.9))
    short = copy.deepcopy(adamw)
    short["state"][0]["exp_avg"] = torch.zeros(2, 2)
    half = copy.deepcopy(adamw)
    del half["state"][0]["exp_avg_sq"]
    for kind, bad, words in ((ADAMW, state_of(ADAMW([p], amsgrad=True)), "amsgrad: expected False, got True"), (ADAMW, sgd, "state_dict: expected one of AdamW.*without.*betas"),
                             (SGD, adamw, "state_dict: expected one of SGD.*without momentum"), (ADAMW, short, r"state: expected exp_avg of \[3, 2\]"), (ADAMW, half, "state_dict: expected a state with exp_avg, exp_avg_sq")):
        ours = RowSparse(kind, [p], lr=0.5)
        stepped(ours, p, 1, 0)
        before = copy.deepcopy(ours.state_dict())
        with pytest.raises(ValueError, match=words):
            ours.load_state_dict(bad)
        torch.testing.assert_close(ours.state_dict(), before)
        assert not ours._optimizer_load_state_dict_pre_hooks and not ours._optimizer_load_state_dict_post_hooks


def test_a_state_dict_from_before_an_option_was_there_loads():
    p = torch.nn.Parameter(torch.ones(3, 2))
    for kind in (SGD, ADAMW, ADAGRAD):
        theirs = kind([p], lr=0.1)
        stepped(theirs, p, 1, 0)
        state = theirs.state_dict()
        state["param_groups"] = [{n: v for n, v in g.items() if v is not None and not isinstance(v, bool)} for g in state["param_groups"]]
        if "step" in state["state"].get(0, {}):
            state["state"][0]["step"] = 1  # a number, as it was once
        ours = RowSparse(kind, [p], lr=0.5, maximize=True)
        ours.load_state_dict(state)
        assert ours.param_groups[0]["lr"] == 0.1 and not ours.param_groups[0]["maximize"]
        stepped(ours, p, 1, 1)


@pytest.mark.parametrize("kind", [SGD, ADAMW, ADAGRAD])
@pytest.mark.parametrize("make", [RowSparse, fl.ShardedRowSparse])
def test_hooks_are_pytorchs(make, kind):
    "Which run, in which order, how often, and what becomes of what they change"
    p = torch.nn.Parameter(torch.ones(3, 2))
    other = kind([p], lr=0.1)
    stepped(other, p, 1, 0)
    seen = {}
    for maker in (partial(make, kind), kind):
        optimizer, order = maker([p], lr=0.1), seen.setdefault(maker is kind, [])
        note = lambda name, *changed: lambda o, *a: (order.append(name), changed[0](o, *a) if changed else None)[1]
        halved = lambda o, state: {**state, "param_groups": [{**g, "lr": g["lr"] / 2} for g in state["param_groups"]],
                                   "state": {i: {n: t + 1 if isinstance(t, torch.Tensor) else t for n, t in held.items()} for i, held in state["state"].items()}}
        def afterwards(o):
            order.append(("after", o.param_groups[0]["lr"], sorted((n, float(t.sum())) for n, t in o.state[p].items() if isinstance(t, torch.Tensor))))
            o.state[p] = {n: torch.full_like(t, 7) for n, t in o.state[p].items() if isinstance(t, torch.Tensor)}
        optimizer.register_load_state_dict_pre_hook(note("load 2", halved))
        optimizer.register_load_state_dict_pre_hook(note("load 1", lambda o, state: state.update(extra=1)), prepend=True)
        optimizer.register_load_state_dict_post_hook(afterwards)
        optimizer.register_state_dict_pre_hook(note("save"))
        optimizer.register_state_dict_post_hook(note("saved", lambda o, state: {**state, "mine": 1}))
        optimizer.register_step_pre_hook(note("step"))
        optimizer.register_step_post_hook(note("stepped"))
        everyones = [register_optimizer_step_pre_hook(note("any step")), register_optimizer_step_post_hook(note("any stepped"))]
        optimizer.load_state_dict(other.state_dict())
        order.append(sorted((n, float(t.sum())) for n, t in optimizer.state[p].items()))
        for schedule in (torch.optim.lr_scheduler.StepLR(optimizer, 1),):
            stepped(optimizer, p, 2, 0)
            schedule.step()
        assert optimizer.state_dict()["mine"] == 1
        for handle in everyones:
            handle.remove()
    assert seen[False] == seen[True] and seen[True].count("stepped") == seen[True].count("any stepped") == 2


def test_a_scaler_skips_steps_and_unscales_rows():
    "PyTorch's GradScaler: a gradient of infinity steps nothing and runs no hook"
    ends = []
    for sparse in (True, False):
        e = torch.nn.Embedding(6, 2, sparse=sparse)
        with torch.no_grad():
            e.weight.copy_(torch.arange(12.0).view(6, 2))
        optimizer, scaler, steps = RowSparse(SGD, e.parameters(), lr=0.1, momentum=0.9), torch.amp.GradScaler("cpu", init_scale=8.0), []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        for factor in (1.0, math.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale(e(torch.tensor([1, 1, 4])).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        assert len(steps) == 2 and scaler.get_scale() == 4.0
        ends.append(e.weight.detach())
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("kind,options", [(SGD, dict(lr=0.1, momentum=0.9, dampening=0.5)), (ADAMW, dict(lr=0.01)), (ADAGRAD, dict(lr=0.1, rowwise=True))])
def test_a_copy_goes_on_as_its_original(kind, options):
    p = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = RowSparse(kind, [p], mode="dense", seed=3, **options)
    stepped(optimizer, p, 2, 0)
    again = copy.deepcopy(optimizer), torch.load(io.BytesIO(file.getvalue()), weights_only=False) if torch.save(optimizer, file := io.BytesIO()) is None else None
    stepped(optimizer, p, 2, 1)
    for other in again:
        q = other.param_groups[0]["params"][0]
        stepped(other, q, 2, 1)
        assert torch.equal(p, q)


def test_groups_and_parameters_that_cannot_be_stepped_are_refused_when_they_come():
    p, q = torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
    optimizer = RowSparse(ADAMW, [p], lr=0.1)
    for group, words in ((dict(params=[torch.nn.Parameter(torch.ones(2))], amsgrad=True), "amsgrad: expected False"), (dict(params=iter([q])), "params: expected tensors of a floating dtype.*complex64")):
        with pytest.raises(ValueError, match=words):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
        with pytest.raises(ValueError, match=words):
            RowSparse(ADAMW, [dict(group, params=[q] if "amsgrad" not in group else group["params"])])
    optimizer.add_param_group(dict(params=iter([torch.nn.Parameter(torch.ones(2))]), lr=0.5))
    assert len(optimizer.param_groups[1]["params"]) == 1


# --- row-wise Adagrad ---

def rowwise_adagrad(w, grads, lr, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10, maximize=False, touched=None):
    "By its definition, every row in every step, or those that are touched"
    w, total = w.clone(), torch.full((len(w),), initial_accumulator_value, dtype=w.dtype)
    steps = torch.zeros(len(w), dtype=w.dtype)
    for k, g in enumerate(grads):
        moved = torch.ones(len(w), dtype=torch.bool) if touched is None else touched[k]
        g = (-g if maximize else g) + weight_decay * w
        total = torch.where(moved, total + g.square().mean(1), total)
        rate = lr / (1 + steps * lr_decay)
        w = torch.where(moved[:, None], w - (rate / (total.sqrt() + eps))[:, None] * g, w)
        steps += moved
    return w, total


@pytest.mark.parametrize("options", [options for kind, options in SETTINGS if kind is ADAGRAD], ids=str)
@pytest.mark.parametrize("mode", ["lazy", "dense"])
def test_rowwise_adagrad_is_its_definition(mode, options, device):
    w = torch.randn(12, 5, dtype=f64)
    p, gradients = torch.nn.Parameter(w.clone().to(device)), list(sparse_gradients(w.shape, 9, f64))
    optimizer = RowSparse(ADAGRAD, [p], rowwise=True, mode=mode, **options)
    for rows, values in gradients:
        given_rows(p, rows, values)
        optimizer.step()
    dense = [torch.zeros_like(w).index_copy(0, rows, values) for rows, values in gradients]
    touched = [torch.isin(torch.arange(12), rows) for rows, _ in gradients] if mode == "lazy" else None
    exact, total = rowwise_adagrad(w, dense, touched=touched, **options)
    torch.testing.assert_close(p.detach().cpu(), exact)
    torch.testing.assert_close(optimizer.state[p]["sum"].cpu(), total)
    assert optimizer.state[p]["sum"].shape == (12,)


def test_rowwise_adagrad_of_other_shapes_and_with_extended_rows():
    for shape in ((4, 3, 2), (7,), (3, 0), ()):
        w = torch.randn(shape, dtype=f64)
        p, rows = torch.nn.Parameter(w.clone()), w.reshape(1 if w.dim() < 2 else len(w), -1)
        optimizer = RowSparse(ADAGRAD, [p], rowwise=True, lr=0.1)
        grads = [torch.randn(shape, dtype=f64) for _ in range(3)]
        for p.grad in grads:
            optimizer.step()
        if w.numel():
            torch.testing.assert_close(p.detach().view(rows.shape), rowwise_adagrad(rows, [g.view(rows.shape) for g in grads], 0.1)[0])
    head = PartialFC(9, 3, sample_rate=0.5)
    optimizer = RowSparse(ADAGRAD, head.parameters(), rowwise=True, lr=0.1, initial_accumulator_value=0.5)
    def step():
        optimizer.zero_grad()
        head(torch.randn(4, 3), torch.arange(4)).backward()
        optimizer.step()
    step()
    kept = optimizer.state[head.weight]["sum"][2:].clone()
    head.extend(3, optimizer)
    step()
    head.remove([0, 1], optimizer)
    assert len(optimizer.state[head.weight]["sum"]) == 10
    assert (optimizer.state[head.weight]["sum"][:7] >= kept).all() and (optimizer.state[head.weight]["sum"] >= 0.5).all()
    with pytest.raises(ValueError, match=r"state: expected sum of \[10\]"):
        theirs = ADAGRAD([torch.nn.Parameter(torch.ones(10, 3))])
        optimizer.load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match="rowwise: expected torch.optim.Adagrad, got SGD"):
        RowSparse(SGD, head.parameters(), rowwise=True, lr=0.1)


def test_schedules_groups_and_closures():
    p, q = (torch.nn.Parameter(torch.ones(3, 2)) for _ in "pq")
    optimizer = RowSparse(SGD, [dict(params=[p]), dict(params=[q], lr=1.0)], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    def closure():
        optimizer.zero_grad()
        loss = (p.sum() + q.sum())
        loss.backward()
        return loss
    assert optimizer.step(closure) == 12
    schedule.step()
    assert optimizer.step(closure) < 12
    assert p[0, 0].item() == pytest.approx(1 - 0.1 - 0.01) and q[0, 0].item() == pytest.approx(1 - 1.0 - 0.1)


@pytest.mark.parametrize("kind,options,match", [
    (torch.optim.Adam, dict(lr=0.1), "optimizer_class"), ("sgd", {}, "optimizer_class"), (SGD, dict(lr=0.1, mode="eager"), "mode"),
    (SGD, dict(lr=-1.0), "learning rate"), (ADAMW, dict(amsgrad=True), "amsgrad"), (SGD, dict(lr=0.1, nesterov=True), "Nesterov")])
def test_optimizers_that_cannot_be(kind, options, match):
    with pytest.raises(ValueError, match=match):
        RowSparse(kind, [torch.nn.Parameter(torch.zeros(2, 2))], **options)


STRIDED = {  # a weight [6,4,2,2] or [6,4] of other strides than its own copy's
    "transposed": lambda d: torch.empty(4, 6, device=d).T, "every other column": lambda d: torch.empty(6, 8, device=d)[:, ::2],
    "every other row": lambda d: torch.empty(12, 4, device=d)[::2], "channels last": lambda d: torch.empty(6, 4, 2, 2, device=d).to(memory_format=torch.channels_last),
    "permuted": lambda d: torch.empty(2, 4, 6, 2, device=d).permute(2, 1, 3, 0), "a slice of four": lambda d: torch.empty(6, 4, 2, 5, device=d)[..., 1:3],
}


def strided_steps(name, kind, mode, device, dtype, rows):
    "A strided parameter after some steps, a contiguous copy of it after the same, and the bits that nobody may write"
    g, ends = torch.Generator().manual_seed(0), []
    like = STRIDED[name](device)
    whole = torch.full((like.untyped_storage().nbytes() // 4,), 7.0, device=device).to(dtype)
    own = whole.as_strided(like.shape, like.stride(), like.storage_offset())
    own.copy_(torch.randn(like.shape, generator=g))
    mine, plain = torch.nn.Parameter(own), torch.nn.Parameter(own.clone(memory_format=torch.contiguous_format))
    options = dict(lr=0.1, weight_decay=0.1) | (dict(momentum=0.9, dampening=0.5) if kind is SGD else {})
    given = [(torch.randperm(6, generator=g)[:3], torch.randn(3, *like.shape[1:], generator=g).to(dtype)) for _ in range(3)]
    for p in (mine, plain):
        optimizer = RowSparse(kind, [p], mode=mode, **options)
        for at, values in given:
            p.grad = torch.sparse_coo_tensor(at[None], values, p.shape, check_invariants=False).to(device)
            p.grad = p.grad if rows else p.grad.to_dense().mT.contiguous().mT
            optimizer.step()
        ends.append(p.detach().clone(memory_format=torch.contiguous_format))
    own.fill_(7.0)
    return *ends, whole


STEPS = [(SGD, True, "lazy"), (ADAMW, True, "lazy"), (SGD, True, "dense"), (ADAMW, True, "dense"), (SGD, False, "lazy"), (ADAMW, False, "lazy")]
STRIDED_STEPS = [(name, *step) for name in STRIDED for step in STEPS]


@pytest.mark.parametrize("name,kind,rows,mode", few(STRIDED_STEPS, *STRIDED_STEPS[::5], *STRIDED_STEPS[3::5]))
def test_strides_do_not_count(name, kind, rows, mode, device):
    for dtype in (f32, bf16):
        mine, plain, whole = strided_steps(name, kind, mode, device, dtype, rows)
        # numbers up to 4, rounded by the kernel and by PyTorch: 2⁻²² in fp32, a step of 2⁻⁶ in bf16
        torch.testing.assert_close(mine, plain, rtol=0, atol=2**-6 if dtype == bf16 else 1e-6)
        assert (whole == 7).all()


@pytest.mark.parametrize("name,kind,rows,mode", few(STRIDED_STEPS, *STRIDED_STEPS[::9]))
def test_strides_do_not_count_in_kernels(name, kind, rows, mode, kernels_for_all):
    test_strides_do_not_count(name, kind, rows, mode, kernels_for_all)


def test_the_update_kernel_follows_strides(place):
    p = torch.arange(6.0, device=place).view(2, 3).T  # rows 0 3, 1 4, 2 5
    u = Update(False, 1.0, 0.0, 0.9, 0.0, 0.0, False, 1.0)
    m, g = torch.zeros(3, 4, device=place)[:, ::2], torch.ones(4, 3, device=place).T[:, 2:]
    launch_update(p, m, None, None, g, None, None, u, None)
    assert p.tolist() == [[-1, 2], [0, 3], [1, 4]] and (m == 0.1 * 0 + 1).all()


def test_memory_that_elements_share_is_refused_before_anything_moves():
    moved = torch.nn.Parameter(torch.ones(3, 2))
    for shared in (torch.zeros(1, 3).expand(4, 3), torch.zeros(6).as_strided((4, 3), (1, 1)), torch.zeros(4, 1).expand(4, 3)):
        p = torch.nn.Parameter(shared)
        p.grad, moved.grad = torch.ones(4, 3), torch.ones(3, 2)
        with pytest.raises(ValueError, match="params: expected elements that share no memory"):
            RowSparse(SGD, [moved, p], lr=0.1).step()
        assert (moved == 1).all() and (p == 0).all()
    assert not row_sparse.may_overlap(torch.zeros(3, 0)) and not row_sparse.may_overlap(torch.zeros(())) and not row_sparse.may_overlap(torch.zeros(1, 3).T)


def test_a_step_that_fails_has_moved_nothing():
    ps = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizer = RowSparse(ADAMW, ps, lr=0.1)
    def step():
        for p in ps:
            p.grad = torch.ones_like(p)
        optimizer.step()
    step()
    before = [p.detach().clone() for p in ps], {n: t.clone() for n, t in optimizer.state[ps[0]].items()}
    for name, bad in (("exp_avg", torch.zeros(4, 2)), ("row_steps", torch.zeros(4, dtype=torch.int32))):
        good, optimizer.state[ps[1]][name] = optimizer.state[ps[1]][name], bad
        with pytest.raises(ValueError, match=f"state: expected {name} of .*give extend and remove the optimizer"):
            step()
        optimizer.state[ps[1]][name] = good
        torch.testing.assert_close(([p.detach() for p in ps], optimizer.state[ps[0]]), before)
    for shape, dims in ((ps[1].shape, 2), ((3,), 1)):  # single elements of a weight, or of a vector
        ps[1] = torch.nn.Parameter(torch.ones(shape))
        ps[1].grad = torch.sparse_coo_tensor(torch.zeros(dims, 1, dtype=torch.int64), torch.ones(1), shape, check_invariants=False)
        with pytest.raises(ValueError, match="grad: expected a dense one, or the rows of a weight"):
            RowSparse(SGD, ps, lr=0.1).step()
        torch.testing.assert_close(ps[0].detach(), before[0][0])


def test_a_state_that_cannot_be_loaded_changes_nothing():
    p = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = RowSparse(SGD, [p], lr=0.1, momentum=0.9)
    p.grad = torch.ones_like(p)
    optimizer.step()
    held, state = optimizer.state[p], optimizer.state_dict()
    class Broken(torch.Tensor):
        def detach(self):
            raise torch.OutOfMemoryError("no room")
    two = RowSparse(SGD, [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)], lr=0.5).state_dict()
    broken = dict(state, state={0: dict(state["state"][0], momentum_buffer=torch.zeros(3, 2).as_subclass(Broken))}, param_groups=[dict(state["param_groups"][0], lr=9.0)])
    for bad, error in ((two, ValueError), (broken, torch.OutOfMemoryError)):
        with pytest.raises(error):
            optimizer.load_state_dict(bad)
        assert optimizer.state[p] is held and optimizer.param_groups[0]["lr"] == 0.1


def test_bf16_weights_arrive_where_fp32_weights_do(device):
    "A step of 2⁻¹¹ of a weight is lost by rounding to nearest, not by chance"
    start = torch.ones(64, 64, device=device)
    def train(dtype, chance):
        p = torch.nn.Parameter(start.to(dtype, copy=True))
        optimizer = RowSparse(SGD, [p], lr=2**-11, stochastic_rounding=chance)
        for _ in range(256):
            given_rows(p, torch.arange(64), -torch.ones(64, 64, dtype=dtype))
            optimizer.step()
        return p.detach().float()
    assert torch.equal(train(bf16, False), start)
    assert train(f32, True).mean().item() == pytest.approx(1 + 256 / 2048, abs=1e-4)
    assert train(bf16, True).mean().item() == pytest.approx(1 + 256 / 2048, abs=1e-3)
    assert torch.equal(train(bf16, True), train(bf16, True))


@pytest.mark.thorough
def test_bf16_heads_learn():
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(100, 16, generator=g)
    def accuracy(dtype):
        torch.manual_seed(0)
        head, layer = PartialFC(100, 16, sample_rate=0.5, margin=CosFace(0.2, 16.0), dtype=dtype), torch.nn.Linear(16, 16)
        optimizer = RowSparse(SGD, [*head.parameters(), *layer.parameters()], lr=0.02, momentum=0.9)
        for k in range(120):
            y = torch.randint(100, (128,), generator=g.manual_seed(k + 1))
            optimizer.zero_grad()
            head(layer(centres[y] + 0.4 * torch.randn(128, 16, generator=g)), y).backward()
            optimizer.step()
        y = torch.arange(100).repeat(5)
        x = layer(centres[y] + 0.4 * torch.randn(500, 16, generator=g.manual_seed(0)))
        return (normalize(x) @ normalize(head.weight.float()).T).argmax(1).eq(y).float().mean().item()
    full, half = accuracy(f32), accuracy(bf16)
    assert full > 0.9 and half > full - 0.03


UPDATES = {"SGD": Update(False, 0.1, 0.0, 0.0, 0.0, 0.0, False, 1.0), "momentum": Update(False, 0.1, 0.01, 0.9, 0.0, 0.0, False, 1.0),
           "dampening": Update(False, 0.1, 0.01, 0.9, 0.3, 0.0, False, 1.0), "Nesterov": Update(False, 0.1, 0.01, 0.9, 0.0, 0.0, True, -1.0),
           "AdamW": Update(True, 0.1, 0.01, 0.9, 0.999, 1e-8, False, 1.0), "Adagrad": Update(False, 0.1, 0.01, 0.2, 0.0, 1e-8, False, 1.0, True),
           "row-wise Adagrad": Update(False, 0.1, 0.01, 0.2, 0.0, 1e-8, False, -1.0, True, True)}


def state_for(u, dtype, times, v, h, g):
    "A weight and the state that an update of it needs"
    made = torch.randn(v, h, generator=g).to(dtype), torch.rand(v, *[h] * (not u.rowwise), generator=g), torch.rand(v, h, generator=g), times
    return [t if keep else None for t, keep in zip(made, (True, u.beta1 > 0, u.adam, u.counts))]


@pytest.mark.parametrize("name,mode,dtype", grid(list(UPDATES), ["rows", "all", "slots"], [f32, bf16]))
def test_update_kernel(name, mode, dtype, place):
    u, (v, h, t), g = UPDATES[name], (30, 20, 12), torch.Generator().manual_seed(0)
    rows = torch.randperm(v, generator=g)[:t]
    rows[2] = -1
    times = torch.randint(40, (v,), generator=g, dtype=torch.int32)
    times[:9] = 0
    values = torch.randn(v if mode == "all" else t, h, generator=g)
    made = state_for(u, dtype, times, v, h, g.manual_seed(1))
    ours, exact = ([None if t is None else t.clone().to(d) for t in made] for d in (place, "cpu"))
    seed = None if dtype == f32 else 5 << 40
    spare, slots, some, used = torch.where(rows < 0, v, rows), None, rows.to(place), values
    keep = rows >= 0
    if mode == "slots":
        slots = torch.full((v + 1,), -1, dtype=torch.int32)
        slots[spare] = torch.arange(t, dtype=torch.int32)
        slots, some, used = slots.to(place), None, torch.zeros(v + 1, h).index_copy_(0, spare, values)[:-1]
    elif mode == "all":
        some = None
    launch_update(*ours, values.to(place), some, slots, u, seed)
    plain_update(*exact, *((values[keep], rows[keep]) if mode == "rows" else (used, None)), u, seed)
    for a, e in zip(ours, exact):
        if a is not None:
            tight = a.dtype != bf16
            torch.testing.assert_close(a.cpu(), e, rtol=1e-5 if tight else 8e-3, atol=1e-6 if tight else 1e-2)


@pytest.mark.parametrize("h", [1, 5, 96])
def test_threads_do_not_read_what_others_wrote(h, device):
    "Rows narrower than a program's threads, and counts that several threads read: the same bits, and PyTorch's"
    v = 3000 if device == "cuda" else 60
    w = torch.randn(v, h, generator=torch.Generator().manual_seed(0))
    ends = []
    for mode in ("lazy", "dense", "dense"):
        p = torch.nn.Parameter(w.to(device, copy=True))
        q = torch.nn.Parameter(w.double())
        ours, theirs = RowSparse(ADAMW, [p], lr=0.01, mode=mode), ADAMW([q], lr=0.01)
        for rows, values in sparse_gradients(w.shape, 12, f32, count=v if mode == "lazy" else v // 3):
            given_rows(p, rows, values)
            q.grad = p.grad.to_dense().double().cpu()
            ours.step(), theirs.step()
        assert relative_error(p.detach().cpu(), q.detach()) < 1e-6
        ends.append(p.detach())
    assert torch.equal(*ends[1:])
    x, y = torch.randn(9, h, device=device), torch.arange(9, device=device)
    head = PartialFC(2000, h, device=device, sample_rate=0.5)
    grads = []
    for _ in range(2):
        grads.append(torch.autograd.grad(head(x, y), head.weight)[0].to_dense())
    assert torch.equal(*grads)


# --- clipping ---

def clipped_pair(seed=0):
    "Parameters with rows, rows that are there twice, and dense gradients among theirs; and the same with dense ones"
    g = torch.Generator().manual_seed(int(min(seed, 9)))
    params = [torch.nn.Parameter(torch.randn(*shape, generator=g, dtype=f64)) for shape in ((9, 3), (4,), (6, 2), (2, 2))]
    given_rows(params[0], *next(sparse_gradients((9, 3), 1, f64)))
    params[1].grad = torch.randn(4, generator=g, dtype=f64)
    values = torch.randn(3, 2, generator=g, dtype=f64)
    params[2].grad = torch.sparse_coo_tensor([[5, 0, 5]], values, (6, 2), check_invariants=False)
    dense = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for p, d in zip(params, dense):
        d.grad = None if p.grad is None else p.grad.to_dense().clone()
    return params, dense


def test_clipping_is_pytorchs():
    assert clipping_fault(row_sparse) is None
    params, dense = clipped_pair()
    grads = [p.grad.to_dense() for p in params[:3]]
    for limit in (1e9, math.inf):  # nothing is longer
        assert torch.allclose(fl.clip_grad_norm_(params, limit), torch.nn.utils.get_total_norm([d.grad for d in dense[:3]]))
        assert all(torch.equal(p.grad.to_dense(), g) for p, g in zip(params, grads))
    fl.clip_grad_norm_(params[0], 0)  # one tensor, to nothing
    assert not params[0].grad.to_dense().any() and torch.equal(params[1].grad, grads[1])


@pytest.mark.parametrize("dtype", [f64, f32, bf16], ids=str)
@pytest.mark.parametrize("options", [dict(), dict(norm_type=1.0), dict(norm_type=math.inf, foreach=False), dict(foreach=True), dict(error_if_nonfinite=True)], ids=str)
def test_clipping_of_plain_gradients_has_pytorchs_bits(options, dtype):
    made = [clipped_pair()[1] for _ in "ab"]
    for params in made:
        for p in params:
            p.data, p.grad = p.data.to(dtype), None if p.grad is None else p.grad.to(dtype)
    norms = [clip(params, 0.7, **options) for clip, params in zip((fl.clip_grad_norm_, torch.nn.utils.clip_grad_norm_), made)]
    assert torch.equal(*norms) and norms[0].dtype == norms[1].dtype
    assert all(p.grad is None and q.grad is None or torch.equal(p.grad, q.grad) for p, q in zip(*made))
    assert torch.equal(fl.clip_grad_norm_([], 1.0), torch.nn.utils.clip_grad_norm_([], 1.0))


@pytest.mark.parametrize("limit", [0.0, 0.5, math.inf, 1])
def test_clipping_by_value_is_pytorchs(limit):
    params, dense = clipped_pair()
    assert fl.clip_grad_value_(iter(params), limit) is None
    torch.nn.utils.clip_grad_value_(dense, limit)
    for p, d in zip(params[:3], dense):
        assert torch.equal(p.grad.to_dense(), d.grad) and (limit == math.inf or p.grad.to_dense().abs().max() <= limit)
    head = RowSparse(SGD, params, lr=0.1)
    head.clip_grad_value_(0.25)
    assert max(p.grad.to_dense().abs().max() for p in params[:3]) <= 0.25
    plain = [clipped_pair()[1] for _ in "ab"]
    fl.clip_grad_value_(plain[0], 0.1, foreach=True), torch.nn.utils.clip_grad_value_(plain[1], 0.1)
    assert all(p.grad is None and q.grad is None or torch.equal(p.grad, q.grad) for p, q in zip(*plain))
    assert fl.clip_grad_value_([], 1.0) is None and fl.clip_grad_value_(params[3], 1.0) is None  # no gradient
    for bad in (-1.0, "1", math.nan, True):
        before = [p.grad.to_dense().clone() for p in params[:3]]
        with pytest.raises(ValueError, match="clip_value: expected a number not below 0"):
            fl.clip_grad_value_(params, bad)
        assert all(torch.equal(p.grad.to_dense(), g) for p, g in zip(params, before))


def test_clipping_that_cannot_be_changes_nothing():
    params, _ = clipped_pair()
    params[1].grad[2] = math.nan
    before = [p.grad.to_dense().clone() for p in params[:3]]
    for given, words in ((dict(max_norm=-1.0), "max_norm: expected"), (dict(norm_type=0.0), "norm_type: expected"), (dict(norm_type=-math.inf), "norm_type: expected"),
                         (dict(norm_type="inf"), "norm_type: expected"), (dict(parameters=[*params, 3]), "parameters: expected"),
                         (dict(error_if_nonfinite=True), "norm_type 2.0: expected a finite norm of the gradients, got nan")):
        with pytest.raises((ValueError, RuntimeError), match=words):
            fl.clip_grad_norm_(**dict(parameters=params, max_norm=1.0) | given)
    assert all(torch.equal(p.grad.to_dense().nan_to_num(), b.nan_to_num()) for p, b in zip(params, before))
    assert fl.clip_grad_norm_(params, 1.0).isnan() and params[0].grad.to_dense().isnan().any()  # as PyTorch's


@pytest.mark.parametrize("rows", [False, True])
def test_a_gradient_of_another_shape_is_refused(rows):
    p = torch.nn.Parameter(torch.zeros(4, 3))
    p.grad = torch.sparse_coo_tensor([[0]], torch.ones(1, 3), (4, 3), check_invariants=False) if rows else torch.ones(4, 3)
    p.data = torch.zeros(5, 3)
    with pytest.raises(ValueError, match=r"grad: expected shape \[5, 3\].*before extend or remove.*got \[4, 3\]"):
        RowSparse(SGD, [p], lr=0.1).step()
    assert not p.any()


# --- planted bugs ---

MUTANTS = {
    "momentum is plain": ("g = g + u.beta1 * m if u.nesterov else m", "g = m"),
    "dampening from the start": ("t == 1, g, u.beta1 * m + (1 - u.beta2) * g)", "t == 0, g, u.beta1 * m + (1 - u.beta2) * g)"),
    "decay reaches no weight": ("g = g + u.weight_decay * old", "pass"),
    "AdamW forgets to correct": ("(1 - x**exponent)", "(1 + 0 * x**exponent)"),
    "AdamW decays the gradient": ("new = old - u.lr * u.weight_decay * old", "new = old"),
    "rows' steps are the run's": ("(of_rows(row_steps) + 1)", "(row_steps.amax().expand(len(old)) + 1)"),
    "dead rows are stepped": ("if rows is not None: rows, g = rows[rows >= 0], g[rows >= 0]", "pass"),
    "dense is lazy": ("if rows is not None and dense:", "if False:"),
    "any gradient is taken for a known one": ("known.index.data_ptr() == g._indices().data_ptr()", "True"),
    "it always minimises": ('-1.0 if group["maximize"] else 1.0', "1.0"),
    "both moments are corrected alike": ("for x in (u.beta1, u.beta2))", "for x in (u.beta1, u.beta1))"),
    "a resumed row starts anew": ('int(state.get("step", 0)), dtype=torch.int32', "0, dtype=torch.int32"),
    "a loaded state has the weight's dtype": ("for p, name, t in loaded: self.state[p][name] = t", "for p, name, t in loaded: self.state[p][name] = t.to(p.dtype)"),
    "Adagrad forgets": ("m = m + (g.square()", "m = m * 0 + (g.square()"),
    "a row's squares add up": ("/ max(1, g[:1].numel()) if", "* 1 if"),
    "short gradients grow": ("(norm + 1e-6)).clamp(max=1)", "(norm + 1e-6))"),
    "every norm is the Euclidean one": ("torch.linalg.vector_norm(values, norm_type, dtype=dtype)", "torch.linalg.vector_norm(values, dtype=dtype)"),
    "norms add up": ("norm = norm_of(torch.stack(found), norm_type)", "norm = torch.stack(found).sum()"),
    "the last gradient alone is scaled": ("for v in values: v.mul_(factor", "for v in values[-1:]: v.mul_(factor"),
    "the norm forgets duplicates": ("if not known or rows is not known.rows: p.grad = p.grad.coalesce()", "pass"),
    "the first parameter alone is checked": ("for p, _, names in given:  # all of them", "for p, _, names in given[:1]:  # all of them"),
    "memory may be shared": ("if stride <= reach: return True", "if stride < reach: return True"),
}
PROBED = [(SGD, dict(lr=0.1, maximize=True)), (SGD, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)),
          (SGD, dict(lr=0.1, momentum=0.9, dampening=0.5)), (ADAMW, dict(lr=0.01, weight_decay=0.1, betas=(0.5, 0.6))),
          (ADAGRAD, dict(lr=0.1, lr_decay=0.2, weight_decay=0.1))]


def optimizer_fault(m):
    "A word on what the optimizer does wrong"
    w = torch.randn(8, 3, dtype=f64, generator=torch.Generator().manual_seed(0))
    for kind, options in PROBED:
        p, q = torch.nn.Parameter(w.clone()), torch.nn.Parameter(w.clone())
        gradients = list(sparse_gradients(w.shape, 5, f64, count=4))
        lazy, dense, theirs = m.RowSparse(kind, [p], **options), m.RowSparse(kind, [q], mode="dense", **options), None
        e = torch.nn.Parameter(w.clone())
        theirs = kind([e], **options)
        for rows, values in gradients:
            given_rows(p, rows, values), given_rows(q, rows, values)
            e.grad = q.grad.to_dense()
            lazy.step(), dense.step(), theirs.step()
        if not torch.allclose(p, row_by_row(w, gradients, kind, options)):
            return f"lazy {kind.__name__} {options}"
        if not torch.allclose(q, e):
            return f"dense {kind.__name__} {options}"
    p = torch.nn.Parameter(w.clone())
    rowwise, grads = m.RowSparse(ADAGRAD, [p], rowwise=True, lr=0.1), [torch.ones_like(w), 2 * w]
    for p.grad in grads:
        rowwise.step()
    if not torch.allclose(p, rowwise_adagrad(w, grads, 0.1)[0]):
        return "row-wise Adagrad"


def resumed_fault(m):
    "A word on what an optimizer does with a state, and on clipping"
    p, q = (torch.nn.Parameter(torch.ones(3, 2, dtype=bf16)) for _ in "pq")
    theirs, ours = ADAMW([q], lr=0.1), m.RowSparse(ADAMW, [p], lr=0.1)
    for _ in range(3):
        q.grad = torch.ones_like(q)
        theirs.step()
    state = theirs.state_dict()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].float() + 2**-20
    ours.load_state_dict(state)
    if not torch.equal(ours.state[p]["exp_avg"], state["state"][0]["exp_avg"]):
        return "the state is rounded"
    p.grad = torch.sparse_coo_tensor([[0, 0]], torch.tensor([[3.0, 0], [0, 4.0]], dtype=bf16), p.shape, check_invariants=False)
    if ours.clip_grad_norm_(100.0) != 5 or ours.clip_grad_norm_(2.0) != 5 or not 1.98 < p.grad.to_dense().float().norm() < 2.02:
        return "clipping"
    p.grad = torch.sparse_coo_tensor([[0, 0]], torch.ones(2, 2, dtype=bf16), p.shape, check_invariants=False)
    if ours.clip_grad_norm_(100.0) != 8**0.5:
        return "duplicates"
    ours.step()
    if ours.state[p]["row_steps"].tolist() != [4, 3, 3]:
        return "counts"


def clipping_fault(m):
    "A word on clipping that differs from PyTorch's, of gradients that are as large and dense"
    for norm_type in (1.0, 2.0, 3.5, math.inf):
        params, dense = clipped_pair(norm_type)
        norm, exact = m.clip_grad_norm_(iter(params), 0.5, norm_type), torch.nn.utils.clip_grad_norm_(dense, 0.5, norm_type)
        if norm.dim() or not torch.allclose(norm, exact) or not all(torch.allclose(p.grad.to_dense(), d.grad) for p, d in zip(params[:3], dense)):
            return f"norm {norm_type}"


def first_fault(m):
    if found := clipping_fault(m):
        return found
    for look in (resumed_fault, partial(failure_fault, partial_fc), optimizer_fault, partial(state_fault, partial_fc)):
        if found := look(m):
            return found
    return None


def test_the_unchanged_source_passes(tmp_path):
    assert first_fault(planted(row_sparse, tmp_path, *unchanged(MUTANTS.values()))) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", MUTANTS)
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert fault_of(first_fault, row_sparse, tmp_path, *MUTANTS[bug]), f"no case notices that {bug}"


KERNEL_BUGS = {
    "others' gradients are read": ("has_grad = alive & (grad_row >= 0)", "has_grad = alive"),
    "dampening from the start": ("m = tl.where(steps[:, None] == 1, g, beta1 * m + beta2_left * g)", "m = beta1 * m + beta2_left * g"),
    "Nesterov is plain": ("g = g + beta1 * m if NESTEROV else m", "g = m"),
    "counts stand still": ("tl.store(row_steps_ptr + row, count, mask=alive)", "count = count"),
    "counts are those before": ("steps = tl.load(row_steps_ptr + row, mask=alive, other=2).to(tl.float32)", "steps = tl.load(row_steps_ptr + row, mask=alive, other=2).to(tl.float32) - 1"),
    "AdamW forgets to correct": ("p -= lr / correction1[:, None] * m", "p -= lr * m"),
    "AdamW forgets to decay": ("p -= lr * weight_decay * p", "p -= 0 * p"),
    "a row's squares add up": ("return total / H", "return total"),
    "a row's squares forget": ("squares += tl.atomic_add(moment1_ptr + row * moment1_row, squares, mask=alive)", "tl.atomic_add(moment1_ptr + row * moment1_row, squares, mask=alive)"),
    "the decay has no part in a row's squares": ("g_row, g_col, H, sign * weight_decay, BR, BH)", "g_row, g_col, H, 0.0, BR, BH)"),
    "noise is the same everywhere": ("add_word(tl.full([BR, BH], 0x9E3779B9, tl.uint32), number ^ seed)", "add_word(tl.full([BR, BH], 0x9E3779B9, tl.uint32), number * 0 + seed)"),
    "rows of the weight touch each other": ("here = (row * p_row)[:, None] + cols * p_col", "here = (row * H)[:, None] + cols"),
    "momentum lies as the weight": ("in_moment1 = (row * moment1_row)[:, None] + cols * moment1_col", "in_moment1 = here"),
    "the second moment lies as the first": ("in_moment2 = (row * moment2_row)[:, None] + cols * moment2_col", "in_moment2 = in_moment1"),
    "rows of gradients touch each other": ("there = (grad_row * g_row)[:, None] + cols * g_col", "there = (grad_row * H)[:, None] + cols"),
    "rounding is down": ("(bits + (noise & 0xFFFF))", "(bits + 0 * noise)"),
}


def update_fault(m, place, g):
    for name, mode, dtype in grid(list(UPDATES), ("rows", "slots"), (f32, bf16)):
        u, rows, values = UPDATES[name], torch.randperm(30, generator=g)[:12], torch.randn(12, 20, generator=g)
        rows[2] = -1
        times = torch.randint(40, (30,), generator=g, dtype=torch.int32)
        times[:9] = 0
        made = state_for(u, dtype, times, 30, 20, g)
        ours, exact = ([None if t is None else t.clone().to(d) for t in made] for d in (place, "cpu"))
        spare = torch.where(rows < 0, 30, rows)
        slots = torch.full((31,), -1, dtype=torch.int32).index_copy_(0, spare, torch.arange(12, dtype=torch.int32)).to(place)
        seed = None if dtype == f32 else 5 << 40
        held = torch.cat([torch.full((1, 20), 3.0), values]).to(place).T.contiguous().T[1:]
        ours[0] = ours[0].T.contiguous().T  # strides of their own for each, within their own memory
        ours[2] = None if ours[2] is None else ours[2].repeat_interleave(2, 1)[:, ::2]
        m.launch_update(*ours, held, rows.to(place) if mode == "rows" else None, None if mode == "rows" else slots, u, seed)
        whole = torch.zeros(31, 20).index_copy_(0, spare, values)[:-1]
        plain_update(*exact, *((values[rows >= 0], rows[rows >= 0]) if mode == "rows" else (whole, None)), u, seed)
        for a, e in zip(ours, exact):
            if a is not None and (a.cpu().float() - e.float()).abs().max() > (1e-5 if dtype == f32 else 1e-2 if a.dtype == bf16 else 1e-5):
                return f"update, {name}, {mode}"
            if a is not None and a.dtype == bf16 and (a.cpu() != e).float().mean() > 0.02:
                return "rounding"


def test_the_unchanged_kernels_pass(tmp_path, place):
    m = planted(row_sparse, tmp_path, *unchanged(KERNEL_BUGS.values()))
    assert not update_fault(m, place, torch.Generator().manual_seed(0))


@pytest.mark.thorough
@pytest.mark.parametrize("bug", KERNEL_BUGS)
def test_a_bug_in_a_kernel_is_noticed(bug, tmp_path, place):
    find = partial(update_fault, place=place, g=torch.Generator().manual_seed(0))
    assert fault_of(find, row_sparse, tmp_path, *KERNEL_BUGS[bug]), f"no case notices that {bug}"
