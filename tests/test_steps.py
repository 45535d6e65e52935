"""State that moves with the optimizer's steps: a recomputed forward pass is the same one, deferred modules, pickles, interruptions."""
import copy
import gc
import io
import itertools
import pickle
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from grids import thorough_but
from head_cases import SGD
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fusedloss as fl
from fusedloss.core import steps
from fusedloss.core.uncompiled import uncompiled
from fusedloss.margins import AdaFace, ArcFace, SubCenter, margin_cross_entropy

V, H, N = 50, 6, 12
POPULARITY = 1 / torch.arange(1.0, V + 1)
HEADS = {
    "a share": lambda: fl.PartialFC(V, H, sample_rate=0.3), "log q": lambda: fl.PartialFC(V, H, sampler=fl.NegativeSampler(0.3, log_q=True), sparse=False),
    "ArcFace": lambda: fl.PartialFC(V, H, sample_rate=0.3, margin=ArcFace()), "AdaFace": lambda: fl.PartialFC(V, H, sample_rate=0.3, margin=AdaFace(momentum=0.5)),
    "AdaFace, dense": lambda: fl.PartialFC(V, H, sample_rate=0.3, sparse=False, margin=AdaFace(momentum=0.5)), "sub-centres": lambda: fl.PartialFC(V, H, sample_rate=0.3, margin=SubCenter(2, AdaFace(momentum=0.5))), "all, AdaFace": lambda: fl.PartialFC(V, H, margin=AdaFace(momentum=0.5)),
    "dot products": lambda: fl.PartialFC(V, H, sample_rate=0.3, normalize=False, bias=True),
    "popular": lambda: fl.PartialFC(V, H, normalize=False, sampler=fl.PopularitySampler(POPULARITY, 9)),
    "popular, each row": lambda: fl.PartialFC(V, H, normalize=False, bias=True, sampler=fl.PopularitySampler(POPULARITY, 9, each_row=True)),
    "over ranks": lambda: fl.ShardedPartialFC(V, H, sample_rate=0.3, margin=AdaFace(momentum=0.5)),
}


def batches(count=2):
    g = torch.Generator().manual_seed(3)
    return [(5 * torch.randn(N, H, generator=g), torch.randint(V, (N,), generator=g)) for _ in range(count)]


def made(name):
    torch.manual_seed(0)
    return nn.Linear(H, H), HEADS[name]()


def state_of(head):
    return {name: t for name, t in head.state_dict().items() if name not in ("weight", "bias")}


def trained(name, call, optimizers_of=lambda body, head: [fl.RowSparse(SGD, [*body.parameters(), *head.parameters()], lr=0.1)], n_steps=3):
    "Losses and gradients of steps of two micro-batches, both forwarded before the first goes back; and the state after"
    body, head = made(name)
    optimizers, seen = optimizers_of(body, head), []
    for _ in range(n_steps):
        for p in (*body.parameters(), *head.parameters()):
            p.grad = None
        losses = [call(lambda x, y: head(body(x), y), x.clone().requires_grad_(), y) for x, y in batches()]
        for loss in losses:
            loss.backward()
        grads = [p.grad.to_dense() if p.grad.is_sparse else p.grad.clone() for p in (*body.parameters(), *head.parameters())]
        seen.append([*(loss.detach() for loss in losses), *grads])
        for optimizer in optimizers:
            optimizer.step()
    return seen, state_of(head)


def recomputed(use_reentrant):
    return lambda f, *args: checkpoint(f, *args, use_reentrant=use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_a_recomputed_forward_is_the_same_one(name, use_reentrant):
    "Bit for bit: losses, all gradients, and the state after three steps"
    torch.testing.assert_close(trained(name, recomputed(use_reentrant)), trained(name, lambda f, *args: f(*args)), rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_loss_of_a_matrix_is_recomputed_too(use_reentrant):
    found = []
    for call in (recomputed(use_reentrant), lambda f, *args: f(*args)):
        ada, (first, second) = AdaFace(momentum=0.5), batches()
        w = torch.randn(V, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
        losses = [call(lambda x, w, y: margin_cross_entropy(x, w, y, margin=ada), x, w, y) for x, y in (first, second)]
        (2 * losses[0] + losses[1]).backward()
        SGD([w], lr=0.1).step()
        found.append([*losses, w.grad, ada.mean, ada.std])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert found[0][3] != 20


@pytest.mark.parametrize("where", thorough_but(["within", "around"], "around"))
def test_compiled_and_recomputed(where):
    "One graph, whole, whose forward pass runs twice; a compiler's own recomputation wants statistics as they were before the forward pass wrote to them, and raises"
    def call(f, *args):
        if "call" not in made_once:
            inner = f if where == "around" else recomputed(False)
            compiled = torch.compile(f if where == "around" else lambda *args: inner(f, *args), backend="aot_eager", fullgraph=True)
            made_once["call"] = (lambda *args: checkpoint(compiled, *args, use_reentrant=False)) if where == "around" else compiled
        return made_once["call"](*args)
    torch._dynamo.reset()
    made_once = {}
    if where == "within":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"): trained("AdaFace, dense", call)
        return
    got = trained("AdaFace, dense", call)
    torch.testing.assert_close(got, trained("AdaFace, dense", lambda f, *args: f(*args)))


# --- when the state moves ---

ORDERS = {
    "one optimizer": lambda body, head: [fl.RowSparse(SGD, [*body.parameters(), *head.parameters()], lr=0.1)],
    "one after the other": lambda body, head: [torch.optim.AdamW(body.parameters()), fl.ShardedRowSparse(SGD, head.parameters(), lr=0.1)],
    "a head that is frozen": lambda body, head: [torch.optim.AdamW(body.parameters())],
    "a closure": lambda body, head: [SGD([nn.Parameter(torch.ones(2))], lr=0.1)],
}


@pytest.mark.parametrize("order", ORDERS)
def test_an_optimizers_step_moves_the_state_once(order):
    _, state = trained("AdaFace", lambda f, *args: f(*args), ORDERS[order])
    assert state["sampler.step"] == 3 and state["margin.mean"] != 20


def test_the_first_optimizer_moves_what_was_used_and_no_other():
    used, idle = fl.NegativeSampler(0.3), fl.NegativeSampler(0.3)
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for _ in range(3):
        used.note_use(), used.note_use()
        optimizer.step(), optimizer.step()
    assert (used.step, idle.step) == (3, 0)


@contextmanager
def imports_elsewhere():
    "Another thread imports, which a compiler that goes through all of `sys.modules` does not survive (PyTorch 2.11)"
    ends, interval = threading.Event(), sys.getswitchinterval()

    def churn():
        names = [f"module_{i}" for i in range(50)]
        for name in itertools.cycle(names):
            sys.modules[name] = sys
            if name == names[-1]: [sys.modules.pop(n) for n in names]
            if ends.is_set(): break
        [sys.modules.pop(n, None) for n in names]

    thread = threading.Thread(target=churn)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("kind", thorough_but([SGD, torch.optim.AdamW], SGD))
def test_a_compiled_step_of_an_optimizer_moves_it(kind):
    sampler, p = fl.NegativeSampler(0.3), nn.Parameter(torch.ones(3))
    optimizer = kind([p], lr=0.1)
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="eager")
    with imports_elsewhere():
        for _ in range(3):
            p.grad = torch.ones(3)
            sampler.note_use()
            step()
    assert sampler.step == 3


def test_what_is_left_uncompiled_calls_nothing_that_is_compiled():
    "Whether a compiler comes to it inside a frame or, after it gave that one up, at the call itself"
    seen = []

    def inner(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    @uncompiled("outer: expected no fullgraph=True")
    def outer(x):
        return inner(x)

    def given_up(x):
        with torch.autograd.profiler.record_function("a break in here leaves the frame to Python"):
            torch._dynamo.graph_break()
            return outer(x)

    one = torch.ones(3)
    for caller in (outer, lambda x: outer(x) * 1, given_up):
        torch._dynamo.reset()
        seen.clear()
        compiled = torch.compile(caller, backend="eager")
        assert [compiled(one).sum().item() for _ in range(3)] == [6.0] * 3 and seen == [False] * 3
    with pytest.raises(Exception, match="outer: expected no fullgraph=True"):
        torch.compile(lambda x: outer(x) * 1, backend="eager", fullgraph=True)(one)


def test_what_is_left_uncompiled_is_wrapped_once(monkeypatch):
    "In calls without a compiler, while Dynamo is there"
    made, disable = [], torch.compiler.disable
    monkeypatch.setattr(torch.compiler, "disable", lambda function, **given: made.append(function) or disable(function, **given))
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch._dynamo)
    doubled = uncompiled("doubled: expected no fullgraph=True")(lambda x: 2 * x)
    assert [doubled(x) for x in range(3)] == [0, 2, 4] and len(made) == 1


def test_evaluation_and_a_step_that_is_skipped_move_nothing():
    _, head = made("AdaFace")
    (x, y), before = batches(1)[0], {k: t.clone() for k, t in state_of(head).items()}
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    head.eval()(x, y), optimizer.step()
    head.train()(x, y)
    torch.testing.assert_close(state_of(head), before, rtol=0, atol=0)  # as a scaler that has met an overflow leaves it


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["popular", "AdaFace", "all, AdaFace", "over ranks"])
def test_a_recomputation_after_the_state_has_moved_raises(name, use_reentrant):
    "Another model's optimizer steps between a loss and its backward pass"
    _, head = made(name)
    (x, y), optimizer = batches(1)[0], SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    loss = checkpoint(head, x.requires_grad_(), y, use_reentrant=use_reentrant)
    optimizer.step()
    with pytest.raises(ValueError, match="backward: expected a backward pass before any optimizer's step"):
        loss.backward()
    head(x, y).backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_optimizers_that_step_within_the_backward_pass(compiled):
    "Each parameter's own, as soon as it has its gradient: what is recomputed later still has the state of its forward pass"
    found = []
    for call in (recomputed(False), lambda f, *args: f(*args)):
        torch.manual_seed(0)
        heads = [fl.PartialFC(V, H, sample_rate=0.3, sparse=False, margin=AdaFace(momentum=0.5)) for _ in range(3)]
        for p in (p for head in heads for p in head.parameters()):
            optimizer = SGD([p], lr=0.1)
            step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
            p.register_post_accumulate_grad_hook(lambda p, step=step, optimizer=optimizer: step() or optimizer.zero_grad())
        for x, y in batches(3):
            sum(call(head, x.requires_grad_(), y) for head in heads).backward()
        found.append([head.state_dict() for head in heads])
        assert all(head.sampler.step == 3 for head in heads)
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_statistics_are_the_published_ones():
    "One forward pass a step: each batch is scored with statistics that have taken it in, by the momentum"
    ada, mean, std = AdaFace(momentum=0.25), 20.0, 100.0
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for x, y in batches(3):
        norm = x.norm(dim=1)
        mean, std = 0.75 * mean + 0.25 * norm.mean(), 0.75 * std + 0.25 * norm.std()
        ada.observe(norm, y >= 0)
        torch.testing.assert_close(ada.quality(norm), ((norm - mean) / (std + 1e-3) * ada.h).clamp(-1, 1))
        optimizer.step()
        torch.testing.assert_close((ada.mean, ada.std), (mean, std))
        ada.eval(), torch.testing.assert_close(ada.quality(norm), ((norm - mean) / (std + 1e-3) * ada.h).clamp(-1, 1)), ada.train()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["popular, each row", "over ranks"])
def test_copies_move_alike(name, copied):
    body, head = made(name)
    other = copied(head)
    optimizer = SGD(body.parameters(), lr=0.1)
    for x, y in batches(3):
        assert torch.equal(head(x, y), other(x, y))
        optimizer.step()
    torch.testing.assert_close(state_of(head), state_of(other), rtol=0, atol=0)
    assert head.sampler.step == 3


@pytest.mark.parametrize("name", [name for name in HEADS if name != "all, AdaFace"])
def test_a_run_that_is_resumed_draws_the_next_sample(name):
    _, head = made(name)
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for x, y in batches(3):
        head(x, y)
        optimizer.step()
    again = made(name)[1]
    again(x, y)  # what was used or observed before is forgotten
    again.load_state_dict(head.state_dict())
    optimizer.step()
    assert head.state_dict().keys() & {"sampler.used", "margin.pending"} == set()
    torch.testing.assert_close(state_of(again), state_of(head), rtol=0, atol=0)
    assert torch.equal(again(x, y), head(x, y)) and again.sampler.step == 3


def test_modules_are_let_go():
    before = len(steps._known)
    for _ in range(3):
        made("over ranks")
    gc.collect()
    assert len(steps._known) <= before


def test_what_cannot_be_moved_stops_no_optimizer():
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError):
        fl.NegativeSampler(2.0)
    with torch.inference_mode():
        inferring = [fl.NegativeSampler(0.5), AdaFace()]
    sampler = fl.NegativeSampler(0.5)
    sampler.note_use()
    with FakeTensorMode():
        fake = [fl.NegativeSampler(0.5), AdaFace()]
        SGD([nn.Parameter(torch.ones(2))], lr=0.1).step()
    assert sampler.step == 0
    optimizer.step()
    assert sampler.step == 1 and inferring and fake


# --- modules that are deferred ---

DEFERRED = ["AdaFace", "sub-centres", "dot products", "popular", "popular, each row", "over ranks"]
FIRST = {"device": lambda name: made(name)[1].to("meta"), "a default": lambda name: deferred(name)}


def deferred(name):
    with torch.device("meta"):
        return HEADS[name]()


def reset(head):
    for module in head.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def spoilt(head):
    "What `to_empty` gives may hold anything"
    head.to_empty(device="cpu")
    for p in head.parameters():
        p.data.fill_(torch.nan)
    for module in head.modules():
        for name, t in module._buffers.items():
            if name not in ("line", "certain"):  # set by `to_empty` itself
                t.fill_(77)
    return head


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("name", DEFERRED)
def test_a_deferred_head_is_reset(name, first):
    head, (_, exact) = FIRST[first](name), made(name)
    assert all(t.is_meta for t in (*head.parameters(), *head.buffers()))
    reset(spoilt(head))
    state, wanted = head.state_dict(), exact.state_dict()
    torch.testing.assert_close(state_of(head), state_of(exact), rtol=0, atol=0)
    assert state.keys() == wanted.keys() and all(0.005 < state[p].std() < 0.02 for p in ("weight",))
    head.load_state_dict(wanted)
    for x, y in batches():
        assert torch.equal(head(x, y), exact(x, y))
        head(x, y).backward()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("name", DEFERRED)
def test_a_deferred_head_is_loaded(name, first, assign):
    head, (_, exact) = FIRST[first](name), made(name)
    exact.sampler.advance()
    head = head if assign else spoilt(head)
    head.load_state_dict(copy.deepcopy(exact.state_dict()), assign=assign)
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for x, y in batches(3):
        assert torch.equal(head(x, y), exact(x, y))
        optimizer.step()
    torch.testing.assert_close(state_of(head), state_of(exact), rtol=0, atol=0)


def test_a_head_over_ranks_gets_its_own_rows_again():
    head = fl.ShardedPartialFC(V, H, seed=5)
    reset(spoilt(head.to("meta")))
    assert torch.equal(head.weight, fl.ShardedPartialFC(V, H, seed=5).weight) and not torch.equal(head.weight, fl.ShardedPartialFC(V, H, seed=6).weight)


def test_a_sampler_that_is_still_on_meta_is_refused():
    (x, y), head = batches(1)[0], made("a share")[1]
    head.sampler.to("meta")
    with pytest.raises(ValueError, match="sampler: expected one with a state"):
        head(x, y)


# --- what hangs on a parameter ---

@pytest.mark.parametrize("name", ["a share", "dot products", "popular, each row", "over ranks"])
def test_a_weight_is_saved_without_what_hangs_on_it(name):
    _, head = made(name)
    (x, y), optimizer = batches(1)[0], fl.RowSparse(SGD, head.parameters(), lr=0.1, momentum=0.9)
    head(x, y).backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"w": head.weight, "all": dict(head.named_parameters())}, file)
    file.seek(0)
    weight = torch.load(file, weights_only=True)["w"]
    assert torch.equal(weight, head.weight) and not any(vars(weight).values())
    other = copy.deepcopy(head)
    head.weight, before = nn.Parameter(weight.detach()), weight.detach().clone()  # one that was loaded trains
    head.weight.__dict__.update(weight.__dict__)
    optimizer = fl.RowSparse(SGD, head.parameters(), lr=0.1)
    for each in (head, other):
        each.zero_grad()
        each(x, y).backward()
    optimizer.step()
    fl.clip_grad_norm_(other.parameters(), 1.0)
    assert not torch.equal(before, head.weight)


# --- a weight that is computed ---

@pytest.mark.parametrize("name", ["a share", "ArcFace", "dot products", "popular", "popular, each row"])
def test_a_weight_that_is_computed_gets_a_dense_gradient(name):
    "Of an item tower: as a head whose gradient is dense, through the tower by the chain rule"
    head, exact = made(name)[1], made(name)[1]
    (x, y), tower, items = batches(1)[0], nn.Linear(H, H), torch.randn(V, H)
    exact.weight.data, exact.sparse = tower(items).detach(), False
    del head.weight
    head.weight = tower(items)
    losses = head(x, y), exact(x, y)
    assert torch.equal(*losses)
    dw, = torch.autograd.grad(losses[1], exact.weight)
    torch.testing.assert_close(torch.autograd.grad(losses[0], tower.weight)[0], dw.T @ items)
    for change in (lambda: head.extend(1), lambda: head.remove([0]), head.reset_parameters):
        with pytest.raises(ValueError, match="weight: expected a parameter, got a tensor that is computed"):
            change()
    assert head.num_classes == V


# --- classes that come and go ---

def interrupted(change, at):
    "Run a function, and interrupt it at its `at`-th line in the library; whether it was"
    left = at

    def trace(frame, event, _):
        nonlocal left
        if "fusedloss" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace
    sys.settrace(trace)
    try:
        change()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("change", [lambda head, *o: head.extend(3, *o), lambda head, *o: head.remove([1, 4], *o)], ids=["extend", "remove"])
def test_an_interruption_leaves_all_or_nothing(change):
    "At every line: weight, bias, momentum and the number of classes have either the old size or the new one"
    (x, y), ended = batches(1)[0], 0
    for at in range(1, 400):
        torch.manual_seed(0)
        head = fl.PartialFC(V, H, sample_rate=0.3, normalize=False, bias=True)
        optimizer = fl.RowSparse(SGD, head.parameters(), lr=0.1, momentum=0.9)
        head(x, y).backward()
        optimizer.step()
        before = {name: t.clone() for name, t in (*head.named_parameters(), ("momentum", optimizer.state[head.weight]["momentum_buffer"]))}
        was = interrupted(lambda: change(head, optimizer), at)
        sizes = {len(head.weight), len(head.bias), head.num_classes, *(len(optimizer.state[p]["momentum_buffer"]) for p in head.parameters())}
        assert len(sizes) == 1, (at, sizes)
        if sizes == {V}:
            assert torch.equal(head.weight, before["weight"]) and torch.equal(head.bias, before["bias"]) and head.weight.grad is not None
            assert torch.equal(optimizer.state[head.weight]["momentum_buffer"], before["momentum"])
        else:
            ended += 1
        if not was:
            break
    assert not was and at > 30 and ended >= 1
