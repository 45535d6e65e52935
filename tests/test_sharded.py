"""Sharded: cases on one to four processes, ranks played by one process, what happens when a rank falls, planted bugs."""
import functools
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import fusedloss as fl
import fusedloss.sharded as sharded
import fusedloss.sharded_product as sharded_product
from fusedloss.core import options as core_options
from fusedloss.core import placement
from fusedloss.core import ranks as core_ranks
from fusedloss.core.options import Asked, LossOptions, Operands
from fusedloss.core.ranks import LINE_BYTES, pack, shard_range, unpack
from fusedloss.filter import recompute_linear_cross_entropy
from fusedloss.sharded import kernel_gradients, kernel_sums, make_terms, plain_gradients, plain_sums, sharded_linear_cross_entropy
from compiled_cases import PROMISES
from grids import few, thorough_but
from helpers import everywhere, need_kernels, planted, unchanged, where_kernels_run
from sharded_cases import arguments, CASES, ON_GPUS, problem

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch was built without torch.distributed")
HERE = Path(__file__).parent
LIMIT = 900  # seconds for a session of processes, a backstop: a case that hangs is ended by its collectives' timeout
f32, f64, inf = torch.float32, torch.float64, float("inf")


# --- several processes ---

def once(tmp_path_factory, name, run):
    "What `run` returns, made by the first of pytest's workers that asks"
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    done, lock = base / f"{name}.json", base / f"{name}.lock"
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        end = time.monotonic() + LIMIT + 30
        while not done.exists() and time.monotonic() < end:
            time.sleep(0.2)
    else:
        folder = base / name
        folder.mkdir()
        (base / f"{name}.new").write_text(json.dumps(run(folder)))
        os.replace(base / f"{name}.new", done)
    return json.loads(done.read_text())


def environment(**more):
    "Of a process that starts ranks"
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(HERE.parent), str(HERE)]), SHARDED_LIMIT=str(LIMIT), **more)
    env.pop("FUSEDLOSS_DEBUG", None)
    if "SHARDED_BACKEND" not in more:
        env["CUDA_VISIBLE_DEVICES"] = ""  # ranks are forks, and CUDA does not survive a fork
    else:
        env["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"  # after a timeout NCCL's watchdog sleeps four times as long before it ends its process
    return env


def run_session(folder, jobs, **more):
    "One process imports, its forks are the ranks of one job after the other; what each job returned"
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([sys.executable, str(HERE / "sharded_worker.py"), str(folder / "jobs.json")], env=environment(**more), capture_output=True,
                          text=True)
    results = folder / "results.json"
    assert results.exists(), done.stderr[-3000:]
    return json.loads(results.read_text())


def chosen(request, test, names):
    "Those of a test's cases that this run asks for"
    asked = {item.callspec.params["name"] for item in request.session.items if getattr(item, "originalname", "") == test}
    return [name for name in names if name in asked]


FALLS = {"test_cases_after_one_that_fails_are_run": dict(ranks=2, cases=["rows_beside_a_mesh", "fails_on_one_rank", "ignore_index_may_be_a_class"]),
         "test_a_rank_that_dies_ends_the_job": dict(ranks=2, mode="die"), "test_a_rank_that_hangs_is_given_up": dict(ranks=2, mode="hang"),
         "test_a_rank_that_raises_ends_the_job_with_its_error": dict(ranks=2, mode="raise")}


@pytest.fixture(scope="module")
def session(request, tmp_path_factory):
    "What all processes of this run did, by the name of the test; they are started once"
    asked = {getattr(item, "originalname", "") for item in request.session.items}
    jobs = {"test_on_four_processes": dict(ranks=4, cases=chosen(request, "test_on_four_processes", CASES))}
    jobs["test_promises_over_ranks"] = dict(ranks=2, cases=chosen(request, "test_promises_over_ranks", PROMISES))
    jobs.update((test, job) for test, job in FALLS.items() if test in asked)
    return once(tmp_path_factory, "session", lambda folder: run_session(folder, jobs))


def judge(results, name):
    "Fail with the first rank's own error; what a rank wrote counts, not how its process ended"
    written, errors = results
    faults = [w.get(name, ["nothing came: the process died, or was ended after another's fault", 0])[0] for w in written]
    own = [f for f in faults if f and "closed by peer" not in f and "nothing came" not in f]
    assert not any(faults), (own or faults)[0] + (errors[0] if not written[0] else "")


LONG = ("checkpoints_reshard", "curves_do_not_know_the_ranks", "scores_do_not_know_the_ranks", "product_sends_three_numbers_a_chunk",
        "clipping_by_any_norm", "a_run_goes_on_after_resharding")
ABOUT_THE_PROJECT = ("planted_bugs_are_noticed", "bugs_planted_in_a_divergence_are_noticed", "bugs_planted_in_answers_are_noticed", "bugs_planted_in_the_ring_are_noticed",
                     "the_example_measures_in_turn", "collectives_are_counted", "hostile_topk", "hostile_samples", "answers_beside_a_mesh", "memory_has_no_scores", "peers_over_ranks_say_what_pytorch_says")
COMPILED = ("linear_cross_entropy, sizes", "product, sizes", "log_probs, sizes", "topk, sizes", "sample, sizes", "divergence, sizes", "contrast, sizes", "inside_fsdp")  # on GPUs
THOROUGH = {*LONG, *ABOUT_THE_PROJECT}
assert THOROUGH < CASES.keys()


@pytest.mark.parametrize("name", thorough_but(CASES, *CASES.keys() - THOROUGH))
def test_on_four_processes(session, name):
    judge(session["test_on_four_processes"], name)


def test_the_table_of_arguments_over_ranks_has_them_all():
    "Which is tried by a case that is a thorough one"
    assert arguments(*problem(9, 4, 11)).keys() == inspect.signature(fl.linear_cross_entropy).parameters.keys()


@pytest.mark.parametrize("name", thorough_but(PROMISES, "linear_cross_entropy, sizes"))
def test_promises_over_ranks(session, name):
    judge(session["test_promises_over_ranks"], name)


@pytest.fixture(scope="module")
def gpus(request, tmp_path_factory):
    "Results of the cases that run on two to four GPUs"
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    job = dict(ranks=min(4, torch.cuda.device_count()), cases=chosen(request, "test_on_several_gpus", (*ON_GPUS, *COMPILED)))
    return once(tmp_path_factory, "gpus", lambda folder: run_session(folder, dict(gpus=job), SHARDED_BACKEND="nccl"))["gpus"]


@pytest.mark.parametrize("name", (*ON_GPUS, *COMPILED))
def test_on_several_gpus(gpus, name):
    judge(gpus, name)


@pytest.mark.parametrize("mode", ("die", "hang"))
def test_on_several_gpus_the_survivor_ends(mode, tmp_path):
    "NCCL waits for its timeout; then the survivor of a rank that dies, or hangs, ends by itself, with an error or by NCCL's watchdog"
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    _, codes, errors = run_session(tmp_path, {mode: dict(ranks=2, mode=mode)}, SHARDED_BACKEND="nccl")[mode]
    assert codes[0] in (1, -signal.SIGABRT) and codes[1] == (9 if mode == "die" else -signal.SIGKILL), (codes, errors[0])
    assert "imed out" in errors[0] or "imeout" in errors[0], errors[0]


def test_while_a_graph_is_captured_nobody_waits_for_a_gpu(monkeypatch):
    "Without a backend for CPUs a rank looks at its own call, and plain tokens of its own, whose numbers it would have to ask for, are refused"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    group, x = mock.Mock(_get_backend=mock.Mock(side_effect=RuntimeError)), mock.Mock(is_cuda=True, device="cuda")
    call = functools.partial(placement.agreed_calls, lambda: dict(rows=3), x, core_ranks.Shards(10, 0, 5, group))
    assert call(True).calls == [dict(rows=3)]
    with pytest.raises(ValueError, match="input: expected a DTensor, or process groups with a backend for CPUs, while"):
        call(False)


def test_cases_after_one_that_fails_are_run(session, request):
    written, errors = session[request.node.name]
    first, fails, last = FALLS[request.node.name]["cases"]
    for name in (first, last):
        assert [w[name][0] for w in written] == ["", ""]
    with pytest.raises(AssertionError, match="on purpose"):
        judge((written, errors), fails)


def test_a_rank_that_dies_ends_the_job(session, request):
    written, codes, _ = session[request.node.name]
    name, message, step = written[0]
    assert codes == [1, 9] and step == 3 and "RuntimeError" in name, (written, codes)
    assert "imed out" not in message, message  # noticed, not waited for


def test_a_rank_that_hangs_is_given_up(session, request):
    written, codes, _ = session[request.node.name]
    name, message, step = written[0]
    assert codes == [1, 9] and step == 3, (written, codes)  # 9: the second still hung when the first gave up
    assert "imed out" in message or "imeout" in message, message


def test_a_rank_that_raises_ends_the_job_with_its_error(session, request):
    written, codes, errors = session[request.node.name]
    assert codes == [1, 1] and "a rank's own fault" in errors[1], (codes, errors)
    assert written[1] == ["KeyError", "\"a rank's own fault\"", 3] and "RuntimeError" in written[0][0]


@pytest.mark.thorough
def test_torchrun_shows_the_error_of_a_rank(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE / "sharded_worker.py"), "raise"]
    done = subprocess.run([*command, str(tmp_path / "result")], env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode != 0 and "a rank's own fault" in done.stderr
    assert json.loads((tmp_path / "result.1").read_text()) == ["KeyError", "\"a rank's own fault\"", 3]


# --- ranks played by one process ---

def spans_of(n, ranks, module=sharded):
    "Rows of each rank, as a module's own `core.ranks` deals them"
    deal = sys.modules[module.Shards.__module__].shard_range
    return [deal(n, ranks, k) for k in range(ranks)]


def split(t, ranks, module=sharded):
    "Rows of each rank"
    return [t[r.start:r.stop] for r in spans_of(len(t), ranks, module)]


def play(ranks, o=LossOptions(), module=sharded, n=9, v=11, seed=0):
    "Loss terms and gradients of all ranks, one after the other; and what they should be"
    g = torch.Generator().manual_seed(seed)
    x, w, b = torch.randn(n, 4, generator=g, dtype=f64), torch.randn(v, 4, generator=g, dtype=f64), torch.randn(v, generator=g, dtype=f64)
    y, weight, up = torch.randint(v, (n,), generator=g), torch.rand(v, generator=g, dtype=f64), torch.randn(4, n, generator=g, dtype=f64)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    z = o.logit_scale * (leaves[0] @ leaves[1].T + leaves[2])
    z = o.softcap * torch.tanh(z / o.softcap) if o.softcap else z
    lse = z.logsumexp(1)
    exact = torch.stack([lse, lse - z.gather(1, y[:, None])[:, 0], z @ weight, (z.softmax(1) * z).sum(1)])
    if not o.label_smoothing:
        up[2] = 0
    wanted = torch.autograd.grad((exact * up).sum(), leaves)
    mine = [module.Shards(v, s.start, s.stop).local_labels(y, -100) for s in spans_of(v, ranks, module)]
    rival = exact[0].detach() - exact[1].detach()
    parts = [split(t, ranks, module) for t in (w, b, weight)]
    sums = torch.stack([module.shard_sums(x, p, m, q, c, o, lambda own: rival) for p, q, c, m in zip(*parts, mine)])
    sums = module.merge_sums(sums, 1.0, module.class_masses(weight, v, ranks, x))
    total = sums[3] + sums[0] * weight.sum()  # of the scores themselves
    got = torch.stack([sums[0] + sums[1].log(), sums[1].log() - (sums[2] - sums[0]), total, sums[0] + sums[4] / sums[1]])
    terms, dx, rest = module.make_terms(sums, *up), torch.zeros_like(x), []
    for p, q, c, m in zip(*parts, mine):
        home, dw, db = module.shard_gradients(terms, sums, x, p, m, q, c, o, True, 0, (True,) * 3, lambda t: lambda: t)
        dx += home()
        rest.append((dw, db))
    return (got, dx, *map(torch.cat, zip(*rest))), (exact.detach(), *wanted)


@pytest.mark.parametrize("by_kernel", [False, pytest.param(True, marks=where_kernels_run)], ids=["plain", "kernels"])
def test_an_offset_of_all_scores_costs_no_digits(by_kernel, device):
    "Shares of the smoothed loss on ranks with and without the target, which are exact in fp32 but for the exponentials"
    g, o = torch.Generator().manual_seed(0), LossOptions(label_smoothing=0.2)
    x, w = (torch.randint(-4, 5, (n, 16), generator=g).to(device, f32) / 4 for n in (5, 14))
    y, weight, b = torch.randint(14, (5,), generator=g).to(device), torch.linspace(0.5, 1.5, 14, device=device), torch.full((14,), 1e6, device=device)
    sums_by = (lambda *args: kernel_sums(*args, None)) if by_kernel else (lambda *args: plain_sums(*args, None, 0))
    parts = [split(t, 3, sharded) for t in (w, b, weight)]
    mine = [sharded.Shards(14, s.start, s.stop).local_labels(y, -100) for s in spans_of(14, 3, sharded)]
    scale = sharded.log2_scale(x) if by_kernel else 1.0
    sums = sharded.merge_sums(torch.stack([sums_by(x, p, m, q, c, o) for p, q, c, m in zip(*parts, mine)]), scale, sharded.class_masses(weight, 14, 3, x))
    log_s = sums[1].log()
    losses = sharded.token_losses(sums[0] / scale, log_s, log_s - (sums[2] - sums[0] / scale), sums[3], y, y >= 0, weight, None, o, 14)
    exact = F.cross_entropy(x.double() @ w.double().T + 1e6, y, weight.double(), reduction="none", label_smoothing=0.2)
    assert_close(losses.double(), exact, rtol=1e-5, atol=1e-5)


ROWS = [LossOptions(), LossOptions(label_smoothing=0.1), LossOptions(softcap=2.0, logit_scale=1.5, label_smoothing=0.2)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 13])
@pytest.mark.parametrize("o", ROWS, ids=["plain", "smooth", "capped"])
def test_played_ranks_match_the_definition(ranks, o):
    for got, wanted in zip(*play(ranks, o)):
        assert_close(got, wanted)


BUGS = {
    "a class too many": ("(local >= self.stop - self.start)", "(local > self.stop - self.start)"),
    "ranges that leave classes out": ("each = -(-n_classes // ranks)", "each = max(1, n_classes // ranks)"),
    "sums joined at different heights": ("grown = rise.exp()", "grown = (0 * rise).exp()"),
    "every rank has a target": ("target = torch.where(y >= 0, z.gather(1, at)[:, 0], 0.0)", "target = z.gather(1, at)[:, 0]"),
    "every rank holds the one-hot": ("torch.where(y[:, None] >= 0, -target_coef, 0.0)", "-target_coef"),
    "smoothing pushes the wrong way": ("g_gap, -g_total,", "g_gap, g_total,"),
    "entropy pulls the wrong way": ("-g_mean / s)", "g_mean / s)"),
    "the mean score's own pull": ("g_lse + g_gap + g_mean\n", "g_lse + g_gap\n"),
    "a slope left out": ("return d * slope", "return d"),
    "moments not moved": ("grown * (sums[:, MOMENT] + rise * sums[:, SUM])", "grown * sums[:, MOMENT]"),
    "dw of the last chunk alone": ("dw.addmm_(dz.T, x[i].to(dz.dtype))", "dw.copy_(dz.T @ x[i])"),
}


@pytest.mark.parametrize("bug", thorough_but(BUGS, "every rank has a target"))
def test_planted_bugs_are_seen(bug, tmp_path, monkeypatch):
    module = planted(sharded, tmp_path, *BUGS[bug])
    if "chunk" in bug:
        everywhere(monkeypatch, module, "plain_chunks", lambda x, w, budget: [slice(0, 4), slice(4, len(x))])
    try:
        pairs = list(zip(*play(3, ROWS[2], module)))
    except (RuntimeError, IndexError):
        return
    assert any(a.shape != b.shape or not torch.allclose(a, b) for a, b in pairs)


def test_the_unchanged_source_passes(tmp_path):
    pairs = zip(*play(3, ROWS[2], planted(sharded, tmp_path, *unchanged(BUGS.values()))), strict=True)
    assert all(a.shape == b.shape and torch.allclose(a, b) for a, b in pairs)


def test_packets_carry_rows_of_any_width():
    for dtype, h in ((torch.bfloat16, 3), (torch.float16, 8), (f32, 5), (f64, 1), (f32, 0)):
        x, y = torch.randn(h, 4).to(dtype).T, torch.tensor([3, -100, 2**40, 0])
        sent = pack(x, y, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=f64), 6, -7)
        came = unpack(sent, h, dtype)
        assert torch.equal(came.features[:4], x) and (came.features[4:] == 0).all()
        assert came.labels.tolist() == [*y.tolist(), -7, -7] and came.weights[:4].tolist() == [0.1, 0.2, 0.3, 0.4]
        assert sent.shape[1] % LINE_BYTES == 0 and (not h or came.features.data_ptr() == sent.data_ptr())


def test_packets_of_no_rows_whose_features_are_not_beside_each_other():
    sent = pack(torch.randn(0, 6)[:, ::2], torch.zeros(0, dtype=torch.int64), None, 2, -7)
    assert unpack(sent, 3, f32).labels.tolist() == [-7, -7]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ranges_are_those_of_dtensors(ranks):
    for v in (1, 2, 5, 8, 11, 1000003):
        chunks = [len(c) for c in torch.arange(v).chunk(ranks)]
        assert [len(shard_range(v, ranks, k)) for k in range(ranks)] == chunks + [0] * (ranks - len(chunks))


KERNEL_CALLS = {"plain": (ROWS[0], False), "smooth": (ROWS[1], False), "capped": (ROWS[2], False),
                "plain, statistics": (ROWS[0], True), "smooth, statistics": (ROWS[1], True), "capped, statistics": (ROWS[2], True)}


@pytest.mark.parametrize("call", few(KERNEL_CALLS, "plain", "capped, statistics"))
def test_kernels_say_what_pytorch_says(call, device):
    o, stats = KERNEL_CALLS[call]
    need_kernels(device)
    g = torch.Generator().manual_seed(0)
    x, w, b, weight = (t.to(device) for t in (torch.randn(37, 24, generator=g), torch.randn(75, 24, generator=g), torch.randn(75, generator=g),
                                              torch.rand(75, generator=g)))
    y = torch.randint(-1, 75, (37,), generator=g).to(device)
    y = torch.where(y < 40, y, -1)
    agree, x = torch.clone if stats else None, unpack(pack(x, y, None, 37, -100), 24, f32).features  # rows that came with their labels
    assert x.stride(0) > x.shape[1]
    by_kernel, plain = kernel_sums(x, w, y, b, weight, o, agree), plain_sums(x, w, y, b, weight, o, agree, 0)
    plain[3] *= o.label_smoothing > 0  # nobody asks the kernel for Σ w z without smoothing
    assert_close(by_kernel, plain, rtol=1e-4, atol=1e-4)
    up = torch.randn(4, 37, generator=g).to(device)
    terms = make_terms(plain_sums(x, w, y, b, weight, o, torch.clone, 0), *up)
    sent = []
    send = lambda t: sent.append(t.clone()) or (lambda: t)
    for fn in (kernel_gradients, plain_gradients):
        home, dw, db = fn(terms, x, w, y, b, weight, o, True, 2**12, (True,) * 3, send)
        sent[-1:] = [sent[-1], dw, db]
    for a, e in zip(sent[:3], sent[3:]):
        assert_close(a, e, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_gpu_without_a_group_is_stage_6(dtype):
    if not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    g = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(n, 256, generator=g, device="cuda").mul_(0.2).to(dtype).requires_grad_() for n in (700, 3000))
    y = torch.randint(3000, (700,), generator=g, device="cuda")
    for options in (dict(), dict(label_smoothing=0.1, softcap=10.0, z_loss=1e-3)):
        losses = [f(x, w, y, **options) for f in (sharded_linear_cross_entropy, recompute_linear_cross_entropy)]
        assert_close(*losses, rtol=1e-5, atol=1e-5)
        for a, b in zip(*(torch.autograd.grad(loss, [x, w]) for loss in losses)):
            assert (a - b).float().norm() < 1e-2 * b.float().norm()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_extreme_scores_and_empty_batches(reduction):
    w = torch.randn(6, 4, dtype=f64, requires_grad=True)
    for x in (torch.randn(0, 4, dtype=f64), 1e3 * torch.randn(5, 4, dtype=f64)):
        x, y = x.requires_grad_(), torch.arange(len(x))
        losses = [f(x, w, y, reduction=reduction) for f in (sharded_linear_cross_entropy, recompute_linear_cross_entropy)]
        assert_close(*losses)
        for a, b in zip(*(torch.autograd.grad(loss.sum(), [x, w]) for loss in losses)):
            assert_close(a, b)


@pytest.mark.parametrize("loss", [fl.linear_cross_entropy, sharded_linear_cross_entropy])
def test_in_one_process_a_wrapper_reduces_nothing(loss):
    x, w, y = torch.randn(6, 4, dtype=f64, requires_grad=True), torch.randn(5, 4, dtype=f64, requires_grad=True), torch.arange(6) % 5
    wanted = loss(x, w, y)
    for how in ("mean", "sum"):
        got = loss(x, w, y, backbone_reduction=how)
        assert_close(got, wanted)
        for a, e in zip(torch.autograd.grad(got, [x, w]), torch.autograd.grad(wanted, [x, w], retain_graph=True)):
            assert_close(a, e)


def test_a_bias_on_meta_gives_a_loss_on_meta():
    x, w, b = (torch.empty(size, device="meta") for size in ((6, 4), (9, 4), (9,)))
    loss = fl.sharded_linear_cross_entropy(x, w, torch.empty(6, dtype=torch.int64, device="meta"), linear_bias=b)
    assert loss.is_meta and loss.shape == ()


def test_a_sure_prediction_keeps_its_small_loss():
    x = torch.full((1, 1), 100.0)
    w = torch.tensor([[1.0], [0.89], [0.85]])
    exact = F.cross_entropy((x.double() @ w.double().T), torch.tensor([0]))
    assert_close(sharded_linear_cross_entropy(x, w, torch.tensor([0])).double(), exact, rtol=5e-3, atol=0.0)


@where_kernels_run
def test_answers_of_one_rank_by_the_kernels(device):
    "The k best, samples, and K classes a row: as one process has them, with their gradients"
    made = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(size, generator=made).to(device, torch.float16)
    x, w, b = (draw(*size).requires_grad_() for size in ((20, 32), (300, 32), (300,)))
    lists, how = torch.randint(300, (20, 4), generator=made).to(device), dict(linear_bias=b, softcap=6.0, logit_scale=0.4)
    g = torch.linspace(-1, 2, 80, device=device).view(20, 4)
    topks, each = (fl.linear_topk, fl.sharded_linear_topk), {"temperature": torch.linspace(0.5, 2, 20, device=device)}
    for (single, ranks), given, more in ((topks, (x, w, 4), {}), (topks, (x, w, 4), each), ((fl.linear_log_probs, fl.sharded_linear_log_probs), (x, w, lists), {})):
        found, wanted = (call(*given, **how, **more) for call in (ranks, single))
        assert_close([*found], [*wanted], rtol=1e-3, atol=1e-3)
        for a, e in zip(*(torch.autograd.grad((g * of.log_probs).sum(), (x, w, b)) for of in (found, wanted))):
            assert_close(a, e, rtol=2e-2, atol=5e-3)
    for f in (dict(), dict(top_k=7), dict(top_p=0.7), dict(top_k=20, top_p=0.8, min_p=0.05)):
        found, wanted = (call(x, w, generator=torch.Generator(device).manual_seed(3), **how, **f) for call in (fl.sharded_linear_sample, fl.linear_sample))
        assert (found.tokens != wanted.tokens).sum() <= 1, f  # scores that are close are rounded in another order
        same = found.tokens == wanted.tokens
        assert_close(found.log_probs[same], wanted.log_probs[same], rtol=1e-3, atol=1e-3)


def test_a_label_that_is_no_class_is_nan_where_nobody_looks(monkeypatch):
    everywhere(monkeypatch, sharded, "check_labels", lambda *args: None)  # as on a GPU
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    losses = sharded_linear_cross_entropy(x, w, torch.tensor([0, 5, -3, -100]), reduction="none")
    assert losses.isnan().tolist() == [False, True, True, False] and losses[3] == 0
    dx, dw = torch.autograd.grad(losses[[0, 3]].sum(), [x, w])
    assert dx.isfinite().all() and dw.isfinite().all() and (dx[1:] == 0).all()


def test_ranks_of_tensors_without_data_send_nothing(monkeypatch):
    "Sizes alone are followed: there is no table that could be read"
    from torch._subclasses.fake_tensor import FakeTensorMode
    everywhere(monkeypatch, core_ranks, "is_timed", lambda *_: True)
    everywhere(monkeypatch, core_ranks, "rank_agreement", lambda *_: "agreed")
    x, s = torch.ones(2, 3), core_ranks.Shards(4, 0, 2, object())
    monkeypatch.setattr(core_ranks.Shards, "ranks", 2)
    assert core_ranks.tuning_agreement(x, x.dtype, s) == "agreed"
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    assert core_ranks.tuning_agreement(fake, x.dtype, s) is None


ALONE = core_ranks.Shards(9, 0, 9)  # all classes on one rank


def test_ranks_share_classes_and_know_their_labels():
    assert [len(shard_range(5, 4, k)) for k in range(4)] == [2, 2, 1, 0]
    middle = core_ranks.Shards(10, 3, 6)
    assert middle.local_labels(torch.tensor([0, 3, 5, 6, 4]), 4).tolist() == [-1, 0, 2, -1, -1] and (middle.ranks, middle.rank) == (1, 0)
    assert core_ranks.shards_of(torch.ones(5, 2)) == core_ranks.Shards(5, 0, 5) and core_ranks.shards_on(None, 7) == core_ranks.Shards(7, 0, 7)


def test_rows_travel_with_their_labels():
    x, y = torch.randn(3, 5, dtype=torch.bfloat16), torch.tensor([4, 0, 7])
    arrived = unpack(pack(x, y, None, 4, -100), 5, x.dtype)
    assert arrived.labels.tolist() == [4, 0, 7, -100] and torch.equal(arrived.features[:3], x)


def test_one_rank_exchanges_nothing():
    x, y, b = torch.randn(3, 5), torch.tensor([4, 0, 7]), core_ranks.RankTokens(True, 3, 3)
    assert core_ranks.all_gather(torch.ones(3), ALONE).shape == (1, 3) and core_ranks.all_reduce(torch.ones(2), ALONE).tolist() == [1, 1]
    assert core_ranks.RankTokens(False, 2, 3).token_slice(ALONE) == slice(0, 2)
    assert core_ranks.gather_rows(x, y, None, b, ALONE, -100)[0] is x
    assert core_ranks.reduce_scatter_rows(x, b, ALONE)().shape == x.shape
    assert not core_ranks.is_token_sharded(x) and not core_ranks.is_dtensor(x) and core_ranks.dtensor_of_rows(x, None, x.shape) is x
    assert core_ranks.all_say(True, ALONE, x.device) and not core_ranks.all_say(False, ALONE, x.device)
    assert core_ranks.tuning_agreement(x, torch.float32, ALONE) is None, "nothing is timed on a CPU"
    assert core_ranks.one_or_nan([torch.ones(3), torch.arange(2)], ALONE).item() == 1


def test_labels_are_shifted_by_the_tokens_ahead():
    assert core_ranks.shifted_ahead(torch.tensor([[1, 2, 3]]), 2, -100, 0, ALONE).tolist() == [[3, -100, -100]]
    assert core_ranks.shifted_ahead(torch.tensor([1, 2]), 5, -1, 0, ALONE).tolist() == [-1, -1]
    assert (core_ranks.within(7, 1, 0, 7, ALONE), core_ranks.within(2, 5, 0, 2, ALONE)) == (6, 0)


def test_what_ranks_tell_each_other_of_a_call():
    assert core_ranks.agreed_facts(lambda: dict(rows=3), ALONE, "cpu").calls == [dict(rows=3)]
    assert bytes(core_ranks.written(dict(rows=3), "cpu").numpy()).strip() == b'{"rows": 3}'
    assert core_ranks.found_facts(lambda: int("three"))[0] == {"error": "invalid literal for int() with base 10: 'three'"}
    assert core_ranks.told_facts(dict(y=torch.tensor([1, 2]), k=3)) == (dict(y=dict(sums=[3.0, 5.0]), k=3), [])
    with pytest.raises(ValueError, match=r"k: expected the same on all ranks, got \{0: 3, 1: 4\}"):
        core_ranks.check_calls([dict(k=3), dict(k=4)], (), {})
    core_ranks.check_calls([dict(k=3), dict(k=4)], ("k",), {})
    assert core_ranks.words_of_ranks([dict(sums=[3.0, 5.0]), dict(sums=[4.0, 5.0])]) == "another on ranks [1] than on rank 0"
    with pytest.raises(ValueError, match="invalid literal"):  # and no rank to tell
        core_ranks.tells_ranks(core_ranks.mesh_of_call)(int)("three")
    assert (core_ranks.fingerprint(torch.tensor([1.0, 2.0])) != core_ranks.fingerprint(torch.tensor([2.0, 1.0]))).any()


def test_a_call_of_one_rank_has_its_tensors_as_they_are():
    x, w, y = torch.ones(2, 3), torch.ones(9, 3), torch.tensor([1, 8])
    call = placement.local_call(Operands(x, w, y), Asked(LossOptions()))
    assert (call.shards, call.tensors.input is x, call.batch.own) == (ALONE, True, 2)
    assert placement.batch_of(torch.ones(2, 3, 4), ALONE, None) == (core_ranks.RankTokens(True, 6, 6, 1), -1)
    assert placement.local_of(x, "input", None, []) is x and placement.kinds_for(x) == []
    assert placement.own_rows(y, core_ranks.RankTokens(True, 2, 2), ALONE) is y and placement.class_shards(w, None, None) == ALONE


@pytest.mark.parametrize("call, words", {
    "reduction": (lambda x, w: placement.check_reduction("average", x, ALONE), "'mean', 'sum' or None"),
    "bias": (lambda x, w: placement.check_bias(x, w, torch.ones(2)), "linear_bias: expected"),
    "classes": (lambda x, w: placement.class_shards(w, None, 0), "num_classes: expected a positive integer")}.values())
def test_a_call_that_cannot_be_made_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.ones(2, 3), torch.ones(9, 3))


def with_field(kind, default):
    "A named tuple with one more field, `made_up`"
    made = namedtuple(kind.__name__, [*kind._fields, "made_up"], defaults=[*kind._field_defaults.values(), default])
    for name in {"changed", "keeps_scores"} & {*vars(kind)}:
        setattr(made, name, vars(kind)[name])
    return made


@pytest.mark.parametrize("method", ["auto", "product", "recompute"])
@pytest.mark.parametrize("new", [Operands, Asked, LossOptions])
def test_an_argument_that_no_method_lists_is_refused_over_ranks(new, method, monkeypatch):
    "Whether it is a tensor, a word or an option of the loss: nothing is silently ignored"
    monkeypatch.setitem(core_options.KINDS, "made_up", (float, core_options.Check("a number", lambda v: True)))
    default = 0.0 if new is LossOptions else None
    kinds = {kind: with_field(kind, default) if kind is new else kind for kind in (Operands, Asked, LossOptions)}
    def ask(value):
        more = lambda kind: dict(made_up=value) if kind is new else {}
        o = kinds[LossOptions](**more(LossOptions))
        return sharded.loss_over_ranks(kinds[Operands](torch.ones(2, 3), torch.ones(9, 3), torch.tensor([1, 8]), **more(Operands)),
                                       kinds[Asked](o, method=method, **more(Asked)))
    assert_close(ask(default), torch.tensor(9.0).log())
    with pytest.raises(ValueError, match=f"made_up: expected {'0' if new is LossOptions else 'None'} for classes over ranks"):
        ask(torch.ones(2) if new is Operands else 2.0)


@pytest.mark.parametrize("method", sharded_product.OVER_RANKS)
def test_methods_over_ranks_list_no_argument_that_there_is_not(method):
    known = {*Operands._fields, *Asked._fields, *LossOptions._fields}
    assert sharded_product.OVER_RANKS[method].keys() <= known
