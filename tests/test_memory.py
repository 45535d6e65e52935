"""Whether plans count what is held, and what is held is bounded: kernels on meta tensors of any size, plain paths on the CPU."""
import contextlib

import pytest
import torch
import torch.nn.functional as F

import fusedloss.chunks as chunks
import fusedloss.recompute as recompute
import fusedloss.sharded as sharded
import fusedloss.tiles as tiles
from fusedloss.core import products
from fusedloss.baseline import sample_data
from fusedloss.chunks import Chunks, chunk_bytes, plan_chunks
from fusedloss.core.options import LossOptions, statistics_of
from fusedloss.core.tiling import Tiling
from fusedloss.losses import linear_cross_entropy
from fusedloss.plans import plan
from workbook.measure import SHAPES, MemoryTrace, peak_memory
from grids import grid
from helpers import everywhere

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
MIB = 2**20
SIZES = [(8192, 4096, 128256), (131072, 1024, 128256), (16384, 2048, 131072), (4096, 512, 32000)]


class Launched:
    "In the place of a kernel: what it would write is there, and nothing runs"
    def __getitem__(self, grid): return lambda *_, **__: None


@pytest.fixture
def silent(monkeypatch):
    "Stage 7 as on a GPU of 132 multiprocessors, on meta tensors"
    pytest.importorskip("triton", reason="Triton is not installed")
    if not products.adds_in_float32(torch.device("meta")):
        pytest.skip("this PyTorch adds no product to a float32 sum on meta tensors")
    for kernel in ("target_kernel", "lse_kernel", "merge_kernel", "finish_kernel", "terms_kernel", "dz_kernel"):
        everywhere(monkeypatch, recompute, kernel, Launched())
    everywhere(monkeypatch, recompute, "fastest", lambda kernel, t, sizes, first, *_, **__: first)
    everywhere(monkeypatch, recompute, "multiprocessors", lambda device: 132)
    everywhere(monkeypatch, recompute, "tiling_of", lambda x, w, busy=False: Tiling(False, 128, 128 if busy else 256, 64))
    everywhere(monkeypatch, recompute, "on_device", lambda t: torch.autograd.profiler.record_function("none"))
    everywhere(monkeypatch, recompute, "score_fn", lambda o: None)
    everywhere(monkeypatch, recompute, "log2_scale", lambda x: 1.0)
    everywhere(monkeypatch, products, "adds_in_float32", lambda device: True)


def meta(n, h, v, dtype):
    "x, w, labels of any size, and no memory"
    new = lambda *size, dtype=dtype: torch.empty(size, dtype=dtype, device="meta")
    return new(n, h), new(v, h), new(n, dtype=torch.int64), new(v)


def held(run):
    "Most bytes alive at once of what `run` makes"
    with MemoryTrace() as trace:
        run()
    return trace.peak


def forward_bytes(sizes, dtype, o, stats, budget):
    x, w, y, b = meta(*sizes, dtype)
    return held(lambda: recompute.launch_lse(x, w, y, b, None, None, None, o, statistics_of(stats), None, budget))


def backward_bytes(sizes, dtype, o, needs, entropy, budget):
    x, w, y, b = meta(*sizes, dtype)
    rows, none = torch.empty(2, len(x), device="meta"), torch.empty(len(x) * entropy, device="meta")
    g = torch.empty((), device="meta").expand(len(x))
    upstream = g, None, g if entropy else None
    return held(lambda: recompute.kernel_bwd(upstream, x, w, y, b if needs[2] else None, None, None, None, rows, none, o, budget, needs))


def gradients(sizes, needs, itemsize=2):
    n, h, v = sizes
    return itemsize * h * (n * needs[0] + v * needs[1]) + 4 * v * needs[2]


@pytest.mark.parametrize("sizes, how, budget", grid(SIZES, [(False, 0.0), (True, 0.0), (False, 0.1)], [0, 2**25]), ids=str)
def test_a_forward_pass_holds_what_its_plan_says(sizes, how, budget, silent):
    (n, h, v), (stats, smoothing) = sizes, how
    found = forward_bytes(sizes, bf16, LossOptions(label_smoothing=smoothing, logit_scale=0.5), stats, budget)  # bare scores go by stage 9's kernels
    options = ("logit_scale",) + ("label_smoothing",) * (smoothing > 0)
    p = plan(n, v, h, needs_grad=False, stats="detached" if stats else "", options=options, memory_budget=budget or None, machine="H200")
    assert found == pytest.approx(p["recompute"].extra, rel=0.05)
    assert found <= 1.25 * (budget or 2**26) or n == 131072, "the partial sums of one run, at the least"
    assert found <= max(1.25 * (budget or 2**26), 60 * n)


NEEDS = [(True, True, False), (True, True, True), (False, True, True), (True, False, True)]


@pytest.mark.parametrize("sizes, needs, dtype, budget", grid(SIZES, NEEDS, [bf16, f16], [0, 2**29]), ids=str)
def test_a_backward_pass_holds_what_its_plan_says(sizes, needs, dtype, budget, silent):
    n, h, v = sizes
    found = backward_bytes(sizes, dtype, LossOptions(), needs, False, budget) - gradients(sizes, needs)
    options = ("linear_bias",) * needs[2]
    p = plan(n, v, h, dtype, needs_grad=needs, options=options, memory_budget=budget or None, machine="H200")
    assert found == pytest.approx(p["recompute"].extra, rel=0.05)
    if n < 131072 and (budget or n * h < 2**25):  # else x, dx in fp32 and slabs of sixteen tiles take more than our own limit
        assert found <= 1.05 * (budget or 2**28)


def test_partial_sums_of_a_bias_take_little(silent):
    "A number for each tile of tokens and class of a slab; of all classes they took 501 MiB"
    sizes = 131072, 1024, 128256
    without, with_bias = (backward_bytes(sizes, bf16, LossOptions(), (True, True, b), False, 0) for b in (False, True))
    assert with_bias - without < 32 * MIB


def test_ranks_hold_no_more(silent):
    n, h, v = sizes = 65536, 1024, 128256
    x, w, y, b = meta(*sizes, bf16)
    terms = torch.empty(6, n, device="meta")
    run = lambda bias: held(lambda: sharded.kernel_gradients(
        terms, x, w, y, bias, None, LossOptions(), False, 0, (True, True, bias is not None), lambda total: lambda: total))
    assert run(b) - run(None) < 32 * MIB


@pytest.mark.parametrize("sizes, dtype, budget", [
    ((8192, 2048, 32064), bf16, None), ((8192, 1024, 12480), bf16, 2**26), ((12288, 2048, 4096), bf16, None),
    ((1280, 4160, 2304), f32, None), ((4096, 256, 8192), f32, 2**24)], ids=str)
def test_tiles_hold_what_their_plan_says(sizes, dtype, budget, silent, monkeypatch):
    "On meta tensors, multiplied as on a GPU; what a gradient will take is free while there are only scores"
    everywhere(monkeypatch, products, "product_dtype", lambda t: t.dtype)
    n, h, v = sizes
    x, w, y, _ = meta(*sizes, dtype)
    way = plan(n, v, h, dtype, memory_budget=budget, machine="H200")["tiles"]
    sides, one = way.cut[1:], torch.empty(n, device="meta")
    forward = held(lambda: tiles.tiled_lse_fwd(x, w, y, 0.0, None, *sides))
    backward = held(lambda: tiles.tiled_lse_bwd(one, one, x, w, y, one, one, 0.0, None, *sides, True, True))
    rows = n * h * dtype.itemsize  # with zeros for ignored tokens
    assert way.extra == pytest.approx(rows + max(forward, backward) - gradients(sizes, (1, 1, 0), dtype.itemsize), rel=0.05)


@pytest.mark.parametrize("sizes, dtype, how", [
    ((8192, 4096, 128256), bf16, {}), ((32768, 512, 7743), bf16, {}), ((1664, 3520, 34048), f32, {}), ((16384, 2048, 131072), bf16, dict(memory_budget=2**28)),
    ((32768, 512, 7743), bf16, dict(accumulate="float32")), ((8192, 4096, 128256), bf16, dict(memory_budget=2**28, accumulate="native"))], ids=str)
def test_chunks_hold_what_their_plan_says(sizes, dtype, how, silent, monkeypatch):
    "On meta tensors, with losses in the place of the kernel that turns logits around"
    n, h, v = sizes
    way = plan(n, v, h, dtype, machine="H200", **how)["chunks"]
    everywhere(monkeypatch, chunks, "chunk_loss", lambda z, y, *_: (torch.empty(len(y), device="meta"),))
    everywhere(monkeypatch, products, "rounded_operand", lambda t, dtype: t)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # meta tensors have none
    x, w, y, _ = meta(*sizes, dtype)
    options = LossOptions(), dtype, dtype, True, None, how.get("memory_budget"), how.get("accumulate", "auto")
    found = held(lambda: chunks.chunked_loss_fwd(x, w, None, y, None, None, *options, None, True, True, False, False))
    assert way.extra == pytest.approx(found - gradients(sizes, (1, 1, 0), dtype.itemsize), rel=0.05)


PLAIN = {
    "plain": {}, "scale": dict(logit_scale=0.5), "softcap": dict(softcap=5.0), "smoothing": dict(label_smoothing=0.1),
    "statistics": dict(return_stats=True), "statistics, scale": dict(return_stats=True, logit_scale=0.5),
    "statistics, softcap": dict(return_stats=True, softcap=5.0), "statistics, smoothing": dict(return_stats=True, label_smoothing=0.1),
}


@pytest.mark.parametrize("method", ["eager", "recompute"])
@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("shape", [(256, 8, 3000), (100, 64, 2000)], ids=str)
def test_plain_paths_hold_what_their_plan_says(options, method, shape):
    "An entropy that takes part has a gradient, which holds two more copies of the logits"
    n, h, v = shape
    x, w, y = sample_data(n, h, v, f32)
    def run():
        found = linear_cross_entropy(x, w, y, method=method, **options)
        loss = found if isinstance(found, torch.Tensor) else found[0] + found[1].entropy.mean()
        torch.autograd.grad(loss, [x, w])
    names = tuple(name for name in options if name != "return_stats")
    p = plan(n, v, h, f32, device="cpu", stats="differentiable" if "return_stats" in options else "", options=names)
    assert peak_memory(run) - x.nbytes - w.nbytes == pytest.approx(p[method].extra, rel=0.1)


def test_an_entropys_gradient_is_not_taken_by_all_logits():
    p = plan(1024, 32000, 64, f32, device="cpu", stats="differentiable")
    assert p.method == "recompute" and p["eager"].extra > 3 * 4 * 1024 * 32000 and p.chosen.extra <= p.budget


# --- no more memory for no less time ---

@pytest.mark.parametrize("sizes", [*SHAPES, (4096, 2048, 151936), (8192, 896, 151936), (512, 1024, 32000), (65536, 2048, 131072)], ids=str)
def test_more_memory_buys_time(sizes):
    "Of two budgets that are spent, the larger is the faster one; and what is taken by default is on that line"
    n, h, v = sizes
    found = [plan(n, v, h, memory_budget=2**k, machine="H200") for k in (27, 28, 29, 30, 31, 32, 34)] + [plan(n, v, h, machine="H200")]
    ways = sorted(((p.chosen.extra, p.chosen.seconds) for p in found if p.method), key=lambda way: way[0])
    for (less, slow), (more, fast) in zip(ways, ways[1:]):
        assert more <= 1.01 * less or fast <= slow, (ways, sizes)


def test_nearly_equal_times_take_the_smaller_memory():
    for s in SHAPES:
        for budget in (2**30, 2**32, 2**35):
            p = plan(s.N, s.V, s.H, memory_budget=budget, machine="H200")
            fastest = min(w.seconds for w in p.fits)
            assert p.chosen.seconds <= 1.02 * fastest
            assert not [w for w in p.fits if w.seconds <= 1.02 * fastest and w.extra < p.chosen.extra and not w.caution]


def test_few_chunks_add_in_their_own_dtype():
    "16384 × 2048 × 131072 summed dw in fp32: 512 MiB more, and slower on an H200 than 4096 rows in bf16"
    n, h, v = SHAPES[1]
    found = plan_chunks(n, h, v, bf16, bf16)
    assert found == Chunks(4096, False) and chunk_bytes(found, h, v, bf16, bf16) == 2**30
    assert plan_chunks(n, h, v, bf16, bf16, accumulate="float32") == Chunks(4096, True)
    assert plan_chunks(8 * n, h, v, bf16, bf16) == Chunks(4096, True), "many chunks are summed in fp32"


# --- products ---

@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("layout", ["shifted", "transposed"])
def test_eager_adds_its_bias_in_one_product(shift, layout):
    "A view that is not contiguous became a batch of products and a separate sum: a second N×V tensor"
    x, w, y = sample_data(48, 8, 500, f32, requires_grad=False)
    x, y = x.view(4, 12, 8), y.view(4, 12)
    if layout == "transposed":
        x, y = x.transpose(0, 1), y.T
    b = torch.linspace(-1, 1, 500)
    logits = x.shape[0] * (x.shape[1] - shift) * 500
    with MemoryTrace() as trace:
        linear_cross_entropy(x, w, y, linear_bias=b, shift=shift, method="eager")
    made = [e.op for e in trace.events if e.bytes == 4 * logits]
    assert made.count("addmm") == 1 and not {"bmm", "baddbmm", "add"} & {*made}, made


def test_eagers_bias_is_rounded_once():
    x, w, y = sample_data(512, 64, 300, bf16, requires_grad=False, seed=1)
    x, y = x.view(8, 64, 64), y.view(8, 64)
    b = torch.linspace(-4, 4, 300).to(bf16)
    exact = F.cross_entropy(F.linear(x[:, :-1].double(), w.double(), b.double()).flatten(0, 1), y[:, 1:].flatten(), reduction="none")
    error = lambda method: (linear_cross_entropy(x, w, y, linear_bias=b, shift=1, reduction="none", method=method).flatten().double() - exact).norm()
    whole = F.linear(x[:, :-1].reshape(-1, 64), w, b).float()
    once = (F.cross_entropy(whole, y[:, 1:].flatten(), reduction="none").double() - exact).norm()
    assert error("eager") <= 1.01 * once


def test_products_are_added_where_nothing_adds_to_float32(monkeypatch):
    "One fallback serves every stage: a CPU can neither multiply nor add half precision into float32"
    everywhere(monkeypatch, products, "wide_product", lambda a, b: a.float() @ b.float())
    a, b, total = torch.randn(9, 4).to(bf16), torch.randn(4, 5).to(bf16), torch.ones(9, 5)
    tiles.add_product(total, a, b)
    torch.testing.assert_close(total, 1 + a.float() @ b.float())
