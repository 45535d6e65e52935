"""The plan: whether its bytes and seconds are those of a CPU, and of an H200 at random shapes; what it takes, refuses and says."""
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import fusedloss.plans as planning
from fusedloss.core.devices import Epilogue, Unaligned
from fusedloss.core.options import Asked, loss_options, LossOptions, Operands
from fusedloss.baseline import sample_data
from fusedloss.core.rates import H200, Host, Machine
from fusedloss.losses import call_of, choose, linear_cross_entropy
from fusedloss.plans import make_plan, plan
from workbook.measure import SHAPES, peak_memory
from grids import few, grid
from helpers import planted, unchanged

bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


def plans(shape, **options):
    return plan(shape.N, shape.V, shape.H, machine="H200", **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plan_of_the_three_shapes(shape):
    free = plans(shape)
    assert free.method == "product" and free["chunks"].extra <= free["eager"].extra // 2
    assert plans(shape, reduction="none").method == "recompute" == plans(shape, stats="differentiable").method
    assert plans(shape, memory_budget=2**34).method in ("eager", "product") and plans(shape, memory_budget=2**29).method == "product"
    assert plan(shape.N, shape.V, shape.H, torch.float16, machine="H200").method == "chunks"
    assert plans(shape, memory_budget=2**27 + 2**25, options=("softcap", "label_smoothing")).method == "recompute" and plans(shape, memory_budget=2**16).method is None
    assert plans(shape, needs_grad=False).method == "recompute"


@pytest.mark.parametrize("gpu", ["cuda", "cpu"])
def test_plan_is_monotonic(gpu):
    "More work costs more, and more memory costs no time"
    base = dict(n_tokens=4096, n_classes=32768, n_features=1024, device=gpu)
    for side in ("n_tokens", "n_classes", "n_features"):
        small, large = plan(**base), plan(**{**base, side: 2 * base[side]})
        assert side == "n_features" or small["eager"].extra < large["eager"].extra
        for a, b in zip(small.estimates, large.estimates):
            assert a.flops < b.flops and (a.seconds < b.seconds or gpu == "cuda" and a.seconds == b.seconds), (side, a.method)  # the host's
            assert b.flops / a.flops == pytest.approx(2, rel=1e-3)
    budgets = [2**k for k in range(26, 35)]
    found = [plan(**base, memory_budget=m, accumulate="native") for m in budgets]  # "auto" spends memory on fp32
    times = [p.chosen.seconds for p in found if p.method]
    assert times == sorted(times, reverse=True) and all(p.chosen.extra <= m for p, m in zip(found, budgets) if p.method)
    assert [bool(p.method) for p in found] == sorted(bool(p.method) for p in found), "what fits goes on to fit"


def test_plan_counts_what_is_needed():
    n, v, h = 8192, 128256, 4096
    product = 2.0 * n * v * h
    flops = lambda needs, method: round(plan(n, v, h, needs_grad=needs)[method].flops / product)
    for needs, eager, recompute in ((False, 1, 1), (True, 3, 4), ((True, False, False), 2, 3), ((False, True, True), 2, 3)):
        assert (flops(needs, "eager"), flops(needs, "chunks"), flops(needs, "recompute")) == (eager, eager, recompute)


def test_plan_keeps_dw_from_being_rounded_too_often():
    s = SHAPES[1]
    of = lambda **how: plan(s.N, s.V, s.H, torch.float16, memory_budget=2**28, machine="H200", **how)
    tight = of()
    assert tight.method == "recompute" and "rounded" in tight.reason(tight["chunks"])
    assert of(accumulate="native").method == "chunks"
    assert choose(tight, "chunks").method == "chunks"
    assert not plans(s, memory_budget=2**28)["product"].caution, "its dw has no targets in it"


def test_plan_speaks():
    p = plan(8192, 128256, 4096, reduction="none", options=("softcap",), machine="H200")
    assert p.why.startswith("recompute: the fastest within our own limit of") and "H200" in repr(p)
    assert "it has no softcap" in repr(p) and "| recompute |" in p._repr_markdown_() and p.why in p._repr_markdown_()
    assert plan(8192, 128256, 4096, memory_budget=5).why == "nothing fits a budget of 5 B"
    assert "no method" in plan(10, 10, 10, reduction="none", chunk_size=2).why
    with pytest.raises(ValueError, match="no method"):
        choose(plan(10, 10, 10, reduction="none", chunk_size=2), "auto")


def test_plan_says_what_the_taken_method_is():
    for size, budget, what in (((8192, 128256, 4096), 2**30, "fastest within"), ((8192, 128256, 2048), 2**31, "least memory of the nearly fastest within"),
                               ((4096, 128256, 512), 2**26, "fastest without a caution within")):
        p = plan(*size, torch.float16, memory_budget=budget, machine="H200")
        assert p.why.split(": the ")[1].startswith(what), p.why
    assert plan(16384, 32000, 8192, reduction="none", machine="H200").why.startswith("recompute: the least memory, above")


def test_plan_takes_another_machine():
    slow = Machine("a slow one", H200.bandwidth / 10, H200.rates, H200.device)
    assert plan(8192, 128256, 256, machine=slow)["eager"].seconds > 2 * plan(8192, 128256, 256, machine="H200")["eager"].seconds
    assert plan(512, 32000, 1024, machine="H200").method == "eager" == plan(512, 32000, 1024, device="cpu").method


def test_a_board_brings_what_its_products_fall_short_by():
    aligned = replace(H200, unaligned=Unaligned(*[(1.0, 1.0)] * 4))
    assert plan(8192, 128257, 4096, machine=aligned)["eager"].seconds < 0.5 * plan(8192, 128257, 4096, machine="H200")["eager"].seconds
    assert plan(8192, 128257, 4096, machine=aligned)["eager"].seconds == pytest.approx(plan(8192, 128256, 4096, machine="H200")["eager"].seconds, rel=1e-3)
    slow, h200 = (plan(8192, 131072, 512, machine=m) for m in (replace(H200, epilogue=Epilogue(dz=3300)), H200))
    assert slow["recompute"].seconds > 1.5 * h200["recompute"].seconds and slow["eager"].seconds == h200["eager"].seconds


def test_classes_that_are_no_multiple_of_eight_are_recomputed():
    "cuBLAS reaches a third of its rate there, or a seventh: chunks of 50257 classes took five times as long as of 50304"
    method = lambda v, **how: plan(8192, v, 768, machine="H200", **how).method
    assert method(50257) == method(50258) == method(50304) == "product", "which leaves the last few classes to products of their own"
    assert method(50257, dtype=torch.float16) == method(50258, dtype=torch.float16) == "recompute" and method(50304, dtype=torch.float16) == "chunks"
    times = lambda v: [w.seconds for w in plan(8192, v, 768, f32, machine="H200").estimates]
    assert times(50257) == pytest.approx(times(50256), rel=0.01), "fp32 matrices are read otherwise"


MEASURED = json.loads((Path(__file__).parent / "measured_plans.json").read_text(encoding="utf-8"))
SHARES = dict(eager=0.95, chunks=0.95, recompute=0.9, tiles=0.75)  # of times, within a quarter
ITS_HOST = Host(eager=1.16e-3, chunks=1.12e-3, chunk=0.139e-3, product=1.1e-3, product_chunk=0.7e-3, recompute=1.92e-3, slab=0.135e-3, plain=1.6e-3, plain_chunk=0.37e-3,
                tiles=1.88e-3, tile=0.37e-3, stripe=0.165e-3, short_rows=0.0)  # of that run


@pytest.mark.thorough
@pytest.mark.parametrize("method", SHARES)
def test_plans_are_what_an_h200_did_at_random_shapes(method):
    "Log-uniform shapes drawn by a seed; medians by events. A budget that this method no longer meets is passed over"
    assert "NVIDIA H200" in MEASURED["machine"]
    times, sizes, machine = [], [], replace(H200, host=ITS_HOST)
    for _, n, v, h, dtype, budget, name, seconds, extra in MEASURED["rows"]:
        way = plan(n, v, h, getattr(torch, dtype), memory_budget=budget, machine=machine)[method]
        if name != method or budget and way.extra > budget:
            continue
        times.append(way.seconds / seconds)
        sizes.append(way.extra / extra)
    assert len(times) > 45 and sum(0.75 <= t <= 1.25 for t in times) > SHARES[method] * len(times), sorted(times)
    assert all(0.92 <= b <= 1.08 for b in sizes), sorted(sizes)
    assert sum(0.95 <= b <= 1.05 for b in sizes) > 0.95 * len(sizes), sorted(sizes)


@pytest.mark.parametrize("options", [{}, dict(return_stats=True), dict(return_stats=True, logit_scale=2.0)], ids=str)
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_predicted_bytes_hold_without_gradients(dtype, options):
    x, w, y = sample_data(512, 16, 4000, dtype, requires_grad=False)
    shaping = {k: v for k, v in options.items() if k in LossOptions._fields}
    way = make_plan(call_of(Operands(x, w, y), Asked(loss_options(shaping), return_stats="return_stats" in options)))["eager"]
    held = peak_memory(lambda: linear_cross_entropy(x, w, y, method="eager", **options))
    assert 0.85 < held / way.extra < 1.1


def test_a_plan_is_remembered():
    assert plan(100, 200, 300) is plan(100, 200, 300)


HONEST = {"plain": {}, "none": dict(reduction="none"), "softcap": dict(softcap=3.0), "smoothing": dict(label_smoothing=0.1),
          "statistics": dict(return_stats=True), "scale": dict(logit_scale=2.0), "budget": dict(memory_budget=2**22)}


@pytest.mark.parametrize("name, dtype", few(grid(HONEST, [f64, f32, bf16]), ("plain", f64), ("none", bf16), ("softcap", bf16),
                                            ("statistics", f32), ("budget", f32)))
def test_predicted_bytes_are_those_counted(name, dtype):
    options = HONEST[name]
    n, h, v = 512, 16, 4000
    x, w, y = sample_data(n, h, v, dtype)
    told = {}
    def run(method):
        loss = linear_cross_entropy(x, w, y, method=method, **options)
        if isinstance(loss, tuple):  # an entropy that takes part has the gradient that takes most
            loss = loss[0] + loss[1].entropy.mean()
        torch.autograd.grad(loss.sum(), [x, w])
    shaping = {k: v for k, v in options.items() if k in LossOptions._fields}
    p = make_plan(call_of(Operands(x, w, y), Asked(loss_options(shaping), **{k: v for k, v in options.items() if k not in shaping})))
    for way in p.able:
        if way.extra <= p.budget and way.method != "tiles":
            told[way.method] = (peak_memory(lambda: run(way.method)) - x.nbytes - w.nbytes) / way.extra
    assert told and all(0.9 < ratio < 1.1 for ratio in told.values()), told
    assert "memory_budget" not in options or p.chosen.extra <= 2**22


def test_a_plan_takes_integers_of_any_kind():
    size = np.int64
    p = plan(size(4096), size(50257), size(512), memory_budget=size(2**28), max_valid=size(4096))
    assert p == plan(4096, 50257, 512, memory_budget=2**28, max_valid=4096) and type(p.call.n) is int
    for wrong in (True, 4096.0, "4096", torch.tensor(4096)):
        with pytest.raises(ValueError, match="^n_tokens: expected an integer not below 0"):
            plan(wrong, 50257, 512)


@pytest.mark.parametrize("shape,how", [((18459, 17, 54), dict(dtype=torch.float64, options=("softcap",), stats="differentiable")),
                                       ((36839, 25, 51), dict(dtype=f32))])
def test_what_fits_a_budget_fits_a_larger_one(shape, how):
    "Plain chunks of entropies with a softcap hold more than nine copies; those of many features more than their logits"
    budgets = [2**k for k in range(12, 36)]
    found = [plan(*shape, memory_budget=m, **how)["recompute"].extra <= m for m in budgets]
    assert found == sorted(found) and found[-1]


@pytest.mark.parametrize("how", [{}, dict(memory_budget=1000), dict(device="cpu"), dict(dtype=f32)])
def test_no_tokens_are_planned_too(how):
    "Nothing is moved less than not at all, and no round of programs is divided by"
    for w in plan(0, 2**19, 3, **how).estimates:
        assert w.flops == 0 and w.bytes >= 0 and w.seconds >= 0 and w.extra >= 0, w.method


def test_chunks_are_planned_for_the_tokens_that_count():
    whole, part, few_ = plan(8192, 50257, 512), plan(8192, 50257, 512, max_valid=1024), plan(1024, 50257, 512)
    assert part["chunks"].flops == few_["chunks"].flops < whole["chunks"].flops and part["eager"] == whole["eager"]
    assert part["chunks"].extra == few_["chunks"].extra + 2 * 1024 * 512 * 2  # picked rows of x and of dx


@pytest.mark.parametrize("asked", [dict(options=("hue",)), dict(options=("weight", "hue")), dict(reduction="hue")])
@pytest.mark.parametrize("gpu", [False, True])
def test_every_method_refuses_what_it_does_not_know(asked, gpu):
    r = plan(64, 1000, 8, device="cuda" if gpu else "cpu").call._replace(**asked)
    p = planning.make_plan(r, H200 if gpu else None)
    assert [w.refusal for w in p.estimates if "hue" not in w.refusal] == [] and not p.able and p.method is None
    assert planning.takes_bare(r._replace(options=(), reduction="sum"), H200.device) and not planning.takes_bare(r, H200.device)


# --- planted bugs ---

MUTANTS = {  # what is wrong: (text of fusedloss/plans.py, what stands in its place)
    "memory is taken for little time": ("w.seconds <= NEARLY_EQUAL *", "w.seconds <= 1.0 *"),
    "chunks give statistics without gradient": ('graded = any(r.needs) and r.stats == "differentiable"', "graded = False"),
    "chunks take a loss for each token": ('"return_stats", "chunk_size"),', '"return_stats", "chunk_size", EACH_TOKEN),'),
    "the budget is not looked at": ("w.extra <= self.budget]", "True]"),
    "the slowest is taken": ("if getattr(w, of) < getattr(best, of)", "if getattr(w, of) > getattr(best, of)"),
    "dw is rounded without end": ("chunks > most", "False"),
    "the fourth product is forgotten": ('costs += [Cost("dz", flops,', 'costs += [Cost("dz", 0.0,'),
}


CHOSEN_BUGS = few(MUTANTS, "the budget is not looked at", "the slowest is taken", "the fourth product is forgotten")


@pytest.fixture
def variant(tmp_path):
    "The module with texts replaced"
    return partial(planted, planning, tmp_path)


def any_fault(module):
    "Whether the cases notice something in the plan"
    s = SHAPES[1]
    found = [module.plan(s.N, s.V, s.H, torch.float16, memory_budget=m, machine="H200").method for m in (2**34, 2**29, 2**28, 2**27 + 2**25)]
    return (module.plan(4096, 1000, 64, device="cpu", dtype=f32).method != "chunks"
            or found != ["eager", "chunks", "recompute", "recompute"]
            or module.plan(s.N, s.V, s.H, reduction="none").method != "recompute"
            or module.plan(s.N, s.V, s.H, stats="differentiable").method != "recompute")


def test_the_unchanged_source_passes(variant):
    assert not any_fault(variant(*unchanged(MUTANTS.values())))


@pytest.mark.thorough
@pytest.mark.parametrize("bug", CHOSEN_BUGS)
def test_a_planted_bug_is_noticed(bug, variant):
    try:
        assert any_fault(variant(*MUTANTS[bug])), "nothing noticed"
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
        pass


# --- GPU ---

@cuda_only
@pytest.mark.parametrize("budget", [None, 2**28, 2**27])
def test_predicted_bytes_on_the_gpu(budget):
    x, w, y = sample_data(8192, 2048, 65536, bf16, "cuda")
    p = plan(8192, 65536, 2048, memory_budget=budget)
    held = peak_memory(lambda: torch.autograd.grad(linear_cross_entropy(x, w, y, memory_budget=budget), [x, w]), "cuda") - x.nbytes - w.nbytes
    assert 0.75 < held / p.chosen.extra < 1.25


@cuda_only
@pytest.mark.parametrize("how", [dict(softcap=30.0), dict(label_smoothing=0.1), {}], ids=str)
@pytest.mark.parametrize("budget", [None, 2**27])
def test_predicted_bytes_of_a_product_with_a_bias_on_the_gpu(how, budget):
    x, w, y = sample_data(8192, 2048, 65536, bf16, "cuda")
    b = torch.zeros(65536, dtype=bf16, device="cuda", requires_grad=True)
    p = plan(8192, 65536, 2048, memory_budget=budget, options=("linear_bias", *how), needs_grad=(True, True, True))["product"]
    step = lambda: torch.autograd.grad(linear_cross_entropy(x, w, y, linear_bias=b, memory_budget=budget, method="product", **how), [x, w, b])
    assert 0.75 < (peak_memory(step, "cuda") - x.nbytes - w.nbytes) / p.extra < 1.25


@pytest.mark.parametrize("sizes", ((32768, 32768, 512), (8192, 128256, 4096), (4096, 50257, 1024)))
@pytest.mark.parametrize("where", (dict(machine="H200"), dict(device="cpu")), ids=("H200", "cpu"))
def test_a_budget_has_room_for_what_autocast_makes(sizes, where):
    "Every method is cut so that it fits beside the operands in 16 bits, wherever a smaller cut would"
    n, v, h = sizes
    casts = 2 * h * (n + v) + ("device" in where) * 8 * v * h  # a CPU multiplies the weight in fp32, and has its gradient in it
    for budget in (casts + 2**28, casts + 2**30, casts + 2**31):
        p = plan(n, v, h, grad_dtype=torch.float32, memory_budget=budget, **where)
        beyond = {name: p[name].extra for name in ("product", "chunks", "recompute", "tiles") if p[name].extra > budget}
        assert not beyond, (budget, beyond)
