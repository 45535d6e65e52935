"""Other libraries' losses are called as their users call them; one that cannot be imported is named, with a reason."""
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import workbook.peers
from workbook import peers
from helpers import planted, unchanged

pytestmark = pytest.mark.thorough
QUACK, LIGER = "quack.linear_cross_entropy", "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
BUGS = {  # what is wrong: (text of the source, what stands in its place)
    "only an ImportError is caught": ("except Exception as error: missing", "except ImportError as error: missing"),
    "a reason holds a path": ('if "/" not in word', "if word"),
    "a square chunk is taken": ("if min(4096, n) == h else 4096", "if n == h else 4096"),
    "sizes that do not fit are passed on": ("if n % 8 or h % 8 or v % 8:", "if n % 8 or h % 8:"),
    "kernels are tuned at each shape": ("quack_rows(n, h), tuned=False)", "quack_rows(n, h))"),
    "Liger's loss for Hopper is its other one": ('"Liger, CuTe": _liger_cute', '"Liger, CuTe": _liger'),
}


def library(path: str, monkeypatch, **names) -> None:
    "A module of that path which can be imported, and its parents"
    parts = path.split(".")
    for k in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:k]), ModuleType(".".join(parts[:k])))
    vars(sys.modules[path]).update(names)


def faults(peers: ModuleType, monkeypatch) -> list[str]:
    "What is wrong with how libraries are found and called"
    calls = []
    library(QUACK, monkeypatch, chunked_linear_cross_entropy=lambda x, w, y, rows, tuned=True: calls.append((rows, tuned)))
    library(LIGER, monkeypatch, liger_fused_linear_cross_entropy_sm90="the one for Hopper")
    library("cut_cross_entropy", monkeypatch, __getattr__=lambda name: 1 / 0 if name == "linear_cross_entropy" else None)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    try:
        found, missing = peers.every_linear_peer()
    except Exception as error:
        return [f"an error of a library is not caught: {error!r}"]
    wrong = [] if missing.get("CCE") == "ZeroDivisionError: division by zero" else ["CCE's error is not the reason"]
    wrong += [] if found.get("Liger, CuTe") == "the one for Hopper" else ["Liger's loss for Hopper is not found"]
    wrong += [] if missing.get("Liger", "").startswith("ModuleNotFoundError") else ["Liger is not missing"]
    wrong += [] if peers.brief_error(OSError("no file /a/b here")) == "OSError: no file here" else ["a path is in a reason"]
    call = lambda n, h, v: found["QuACK"](torch.empty(n, h), torch.empty(v, h), torch.empty(n))
    for sizes in ((8192, 4096, 8), (2048, 2048, 8), (64, 16, 8)): call(*sizes)
    wrong += [] if calls == [(2048, False), (1024, False), (4096, False)] else [f"QuACK is called with {calls}"]
    for sizes in ((9, 16, 8), (8, 17, 8), (8, 16, 9)):
        try:
            call(*sizes)
            wrong.append(f"{sizes} are not refused")
        except ValueError as error:
            wrong += [] if str(error).endswith(" × ".join(map(str, sizes))) else [f"{error} does not name {sizes}"]
    return wrong


def test_libraries_are_found_and_called_as_they_should(monkeypatch):
    assert faults(workbook.peers, monkeypatch) == []


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_noticed(bug, tmp_path, monkeypatch):
    assert faults(planted(workbook.peers, tmp_path, *BUGS[bug]), monkeypatch)


def test_without_a_bug_nothing_is_noticed(tmp_path, monkeypatch):
    assert faults(planted(workbook.peers, tmp_path, *unchanged(BUGS.values())), monkeypatch) == []


def scaled(x, w, y, group, return_entropy=False):
    "As Liger's loss over ranks is called, on one"
    log_p = (x @ w.T).log_softmax(1)
    nll, entropy = -log_p[range(len(y)), y], -(log_p.exp() * log_p).sum(1)
    return (nll, entropy) if return_entropy else nll


@pytest.mark.parametrize("native", [False, True])
def test_ligers_loss_over_ranks_has_the_name_of_what_runs(native, monkeypatch):
    calls, peers = [], workbook.peers
    library("liger_kernel.transformers.functional", monkeypatch, liger_fused_linear_scaled_cross_entropy_tp=scaled)
    library("liger_cute_kernels", monkeypatch, tvm_ffi=SimpleNamespace(nvshmem_is_initialized=lambda: "init" in calls),
            nvshmem=SimpleNamespace(init_from_pg=lambda: calls.append("init"), resolve_team=calls.append))
    library("liger_kernel.ops.cute.fused_linear_scaled_cross_entropy_tp", monkeypatch, is_available=lambda: True)
    library("liger_kernel.transformers.functional", monkeypatch, liger_fused_linear_scaled_cross_entropy_tp=scaled)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: native and name == "liger_cute_kernels")
    steps = [peers._liger_over_ranks(SimpleNamespace(get_group=lambda: "all")) for _ in range(2)][1]
    assert calls == (["init", "all", "all"] if native else [])
    name = "Liger, NVSHMEM" if native else "Liger, chunks"
    assert [*steps] == [name, f"{name}, log-probs"]
    x, w, y = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True), torch.tensor([0, 4, 2, 2])
    w.to_local = lambda: w
    nll, entropy = scaled(x, w, y, None, True)
    for key, expected in ((name, nll.mean()), (f"{name}, log-probs", (nll + entropy).mean())):
        torch.testing.assert_close(steps[key](x, w, y), (expected.detach(), *torch.autograd.grad(expected, [x, w], retain_graph=True)))


def test_what_ligers_kernels_hold_is_counted_and_given_back(monkeypatch):
    done, core = [], SimpleNamespace(
        nvshmem_is_initialized=lambda: not done, fused_linear_scaled_cross_entropy_forward_workspace_bytes=lambda n, v: n * v,
        fused_linear_scaled_cross_entropy_backward_workspace_bytes=lambda n, h, v, tiles: n * h * v * tiles)
    workbook.peers.end_peers()  # where nothing is to be given back
    library("liger_cute_kernels", monkeypatch, tvm_ffi=core)
    monkeypatch.setitem(sys.modules, "liger_cute_kernels.tvm_ffi", core)
    monkeypatch.setitem(sys.modules, "liger_cute_kernels.nvshmem", SimpleNamespace(finalize=lambda: done.append("finalize")))
    assert workbook.peers.liger_pools(2, 3, 5) == 10 + 30
    for _ in range(2): workbook.peers.end_peers()
    assert done == ["finalize"]


def test_plain_peers_are_their_definition():
    x, w, y = torch.randn(4, 3, requires_grad=True), torch.randn(9, 3), torch.tensor([0, 8, 3, 3])
    log_p = (x @ w.T).log_softmax(1)
    assert_close(peers.eager_fp32_softmax(x, w, y), -log_p[range(4), y].mean())
    z = (x @ w.T).detach()
    assert_close(peers.eager_fp32_logits(z.bfloat16()[None], y[None]), peers.eager_logits(z.bfloat16().float(), y))
    expected = log_p[range(4), y], torch.distributions.Categorical(logits=x @ w.T).entropy()
    assert_close(peers.eager_log_probs(x, w, y, entropy=True), expected)
    assert_close(peers.checkpointed_log_probs(x, w, y, entropy=True, rows=3), expected)
    assert peers.checkpointed_log_probs(x, w, y)[1] is None
    shifted = F.normalize(x) @ F.normalize(w).T - 0.5 * F.one_hot(y, 9)
    assert_close(peers.eager_cosface(x, w, y, 0.5, 8.0), peers.eager_logits(8 * shifted, y))
    frames, weight, given = torch.randn(5, 2, 3), torch.randn(4, 3), (torch.tensor([[1, 2], [3, 3]]), torch.tensor([5, 4]), torch.tensor([2, 1]))
    assert_close(peers.torch_linear_ctc(frames, weight, *given, 0, "sum"), F.ctc_loss((frames @ weight.T).log_softmax(-1), *given, reduction="sum"))


def test_partial_fc_v2_is_cosface_over_its_own_classes_and_a_sample(monkeypatch):
    x, w = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), torch.randn(40, 4, dtype=torch.float64, requires_grad=True)
    y, drawn = torch.tensor([39, 0, 7, 7, 20, 3]), []
    draw = peers._drawn_classes
    monkeypatch.setattr(peers, "_drawn_classes", lambda *given: drawn.append(draw(*given)) or drawn[-1])
    for rate, size in ((1.0, 40), (0.5, 20), (0.1, 5)):
        loss = 3 * peers.partial_fc_v2(x, w, y, rate, 0.3, 16.0)
        classes = drawn[-1] if rate < 1 else torch.arange(40)
        assert len(classes) == len(classes.unique()) == size and torch.isin(y, classes).all()
        expected = 3 * peers.eager_cosface(x, w[classes], torch.searchsorted(classes, y), 0.3, 16.0).double()
        assert_close(loss, expected, atol=1e-5, rtol=1e-5)  # eager_cosface is in float32
        assert_close(torch.autograd.grad(loss, [x, w]), torch.autograd.grad(expected, [x, w]), atol=1e-5, rtol=1e-5)
    assert not torch.equal(draw(y, 40, 0.5), draw(y, 40, 0.5)), "another sample in each step"


def test_every_peer_is_offered_or_missing_and_has_a_name():
    every, missing = peers.every_linear_peer()
    assert {"eager, fp32 softmax", "torch.compile"} <= every.keys() and not every.keys() & missing.keys()
    assert {*peers.PEER_NAMES} >= every.keys() | missing.keys() >= {"PyTorch, chunked", "Liger", "Liger, CuTe", "CCE", "QuACK"}
    assert "torch.compile" in peers.linear_peers() and "torch.compile" not in peers.linear_peers("torch.compile")
    assert (peers.linear_peers() | peers.logits_peers() | peers.log_probs_peers()).keys() <= {*peers.PEER_NAMES}
    assert [*peers.logits_peers("Liger")] == ["eager, fp32 softmax", "torch.compile"]
