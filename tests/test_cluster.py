"""The kernel of `cuda/turnaround.cu`: it compiles everywhere, and on a GPU does what `reference_fwd` and `reference_bwd` do."""

import threading

import pytest
import torch

import fusedloss
from fusedloss import clusters
from fusedloss.clusters import Cluster, cluster_shape, launch_cluster, row_cluster, SUMMED_ROWS
from fusedloss.core.cuda import CompiledByCupy, CompiledByTorch, cuda_source
from fusedloss.core.options import LossOptions
from fusedloss.kernels import reference_bwd, reference_fwd
from workbook.measure import saved_tensors
from grids import few
from on_cpu import check_nvcc

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {bf16: 2**-8, f16: 2**-11, f32: 3e-6}
SHAPES = [Cluster(1, 8, 128, 8), Cluster(1, 8, 512, 2), Cluster(2, 16, 128, 5), Cluster(4, 3, 128, 9), Cluster(8, 1, 256, 8)]
OPTIONS = {"none": LossOptions(), "scale": LossOptions(5, logit_scale=2.0), "smoothing": LossOptions(label_smoothing=0.2),
           "everything": LossOptions(-1, 0.1, 0.5, 3.0, 0.01)}


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no GPU with clusters")


COMPILED = [(arch, *variant) for arch in (90, 100) for variant in (("bf16", "bare", 0, 8), ("f16", "scaled", 1, 2), ("f32", "capped", 0, 1))]


@pytest.mark.parametrize("arch, element, score, smooth, cluster", few(COMPILED, COMPILED[0], COMPILED[4], COMPILED[5]))
def test_it_compiles_without_a_gpu(arch, element, score, smooth, cluster):
    check_nvcc(arch, cuda_source("turnaround"), dict(ELEMENT=element, SCORE=score, SMOOTH=smooth, UNSCALED_GRAD=0, ALIGNED=0, CLUSTER=cluster, VECTORS=4, THREADS=128, BLOCKS=4))


@pytest.mark.parametrize("n", [1, 513, 1024, 1025, 4096, 4097, 16384, 16385, 32768])
def test_a_shape_holds_its_row(n):
    shape = cluster_shape(n)
    assert shape.blocks * shape.vectors * shape.threads >= n and shape.blocks in (1, 2, 4, 8)
    assert shape.together * shape.threads * (4 * shape.vectors + 24) <= 65536, "registers of a multiprocessor"
    assert cluster_shape(32769) is None


def case(v, dtype, o, offset=0, inner=3):
    "Logits [3,inner,V] inside a buffer of NaN, `offset` elements from its start; labels, weights of classes and tokens"
    torch.manual_seed(v)
    buffer = torch.full((3, inner, v + offset + 8), torch.nan, device="cuda", dtype=dtype)
    z = buffer[..., offset:offset + v].copy_(3 * torch.randn(3, inner, v))
    y = torch.randint(v, (3 * inner,)).where(torch.arange(3 * inner) > 3, torch.tensor([v, o.ignore_index, 2**40, -7] * 3)[:3 * inner])
    if v > 6: z[1, 1, 2], z[1, 2, :v // 2], y[5] = -torch.inf, -torch.inf, v - 1
    some = o.label_smoothing == 0.1
    return buffer, z, y.cuda(), torch.rand(v).cuda() if some else None, torch.rand(3 * inner).cuda() if some else None


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("v", [1, 3, 104, 1000, 5003])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_losses_and_gradients(dtype, options, v, offset, hopper):
    o, share = OPTIONS[options], torch.tensor(3.0, device="cuda")
    buffer, z, y, w, t = case(v, dtype, o, offset)
    raw, wide = z.reshape(9, v).double(), [x if x is None else x.double() for x in (w, t)]
    losses, _, entropy, rows = reference_fwd(raw, y, *wide, o, denominator=share)
    for shape in SHAPES:
        if shape.blocks * shape.vectors * shape.threads * 16 < (v + 8) * z.element_size(): continue
        for late in (False, True):
            dz = reference_bwd(torch.ones_like(losses), None, None, raw, y, *wide, rows, entropy, o, None if late else share)
            after = buffer.clone()
            got = after[..., offset:offset + v]
            ours = launch_cluster(got, got, y, w, t, share, o, shape, late)
            assert torch.allclose(ours.double(), losses, rtol=1e-6, atol=2e-6, equal_nan=True)
            assert (got.reshape(9, v).double() - dz).abs().max() <= TOLERANCE[dtype] * dz.abs().max().clamp(min=1e-2)
            assert after[..., :offset].isnan().all() and after[..., offset + v:].isnan().all(), "written outside"


@pytest.mark.parametrize("v", [5000, 50257, 128256, 151936, 262144])
def test_long_rows_by_the_front_door(v, hopper):
    z = torch.randn(140, 1, v, device="cuda", dtype=bf16)
    y = torch.randint(v, (140,), device="cuda")
    o, exact = LossOptions(), z[:, 0].double()
    assert row_cluster(z, None, o)
    losses, _, entropy, rows = reference_fwd(exact, y, None, None, o)
    dz = reference_bwd(torch.ones_like(losses), None, None, exact, y, None, None, rows, entropy, o)
    runs = [z.clone() for _ in range(3)]
    ours = [clusters.launch_both(run, run, y, None, None, None, o, False) for run in runs]
    assert torch.allclose(ours[0].double(), losses, rtol=1e-6)
    assert (runs[0][:, 0].double() - dz).abs().max() <= 2**-8
    assert all(torch.equal(runs[0], run) for run in runs) and all(torch.equal(ours[0], loss) for loss in ours)


@pytest.mark.parametrize("value", [1e20, -3e38])
@pytest.mark.parametrize("dtype", [bf16, f32])
def test_scores_of_any_size(value, dtype, hopper):
    z = torch.full((2, 1, 5000), value, device="cuda", dtype=dtype)
    losses = launch_cluster(z, z, torch.tensor([0, 4999], device="cuda"), None, None, None, LossOptions(), Cluster(2, 8, 128, 8))
    assert torch.allclose(losses, torch.tensor(5000.0, device="cuda").log())
    assert (z[:, 0, 1:4999] - 1 / 5000).abs().max() < 1e-6


def test_gradient_in_another_tensor(hopper):
    "whose rows start elsewhere within sixteen bytes"
    z, y = torch.randn(9, 1, 5003, device="cuda", dtype=bf16), torch.arange(9, device="cuda")
    before, turned = z.clone(), z.clone()
    apart = torch.full((9, 1, 5010), torch.nan, device="cuda", dtype=bf16)
    shape = Cluster(2, 4, 128, 8)
    ours = launch_cluster(z, apart[..., 3:5006], y, None, None, None, LossOptions(), shape)
    assert torch.equal(ours, launch_cluster(turned, turned, y, None, None, None, LossOptions(), shape))
    assert torch.equal(z, before) and torch.equal(apart[..., 3:5006], turned) and apart.isnan().sum() == 9 * 7


def test_out_of_place_the_gradient_waits_in_the_stead_of_the_logits(hopper):
    z = torch.randn(140, 5000, device="cuda", dtype=bf16, requires_grad=True)
    y = torch.randint(5000, (140,), device="cuda")
    h = 2 * z
    expected, = torch.autograd.grad(torch.nn.functional.cross_entropy(h.float(), y), z, retain_graph=True)
    loss, before = fusedloss.cross_entropy(h, y), h.detach().clone()
    (once,), (twice,) = (torch.autograd.grad(loss, z, g, retain_graph=True) for g in (None, torch.tensor(-2.0, device="cuda")))
    last, = torch.autograd.grad(loss, z)
    assert torch.equal(h, before) and torch.equal(once, last) and torch.equal(twice, -2 * once)
    assert (once - expected).abs().max() < 2**-7 * expected.abs().max()
    kept = saved_tensors(lambda: fusedloss.cross_entropy(h, y), h)
    assert sorted(t.numel() for t in kept) == [len(y) + 2, h.numel()]  # losses, on which a refused second derivative hangs, and what divided them


def weighed(v: int, n: int, dtype: torch.dtype) -> dict:
    "Weights of classes and tokens, and a label that counts nothing"
    return {"weight": torch.rand(v, device="cuda").to(dtype), "token_weight": torch.rand(n, device="cuda"), "ignore_index": 7}


@pytest.mark.parametrize("n", [140, 1025, SUMMED_ROWS, SUMMED_ROWS + 1])
@pytest.mark.parametrize("more", [None, "weights"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_reduced_losses_and_scaled_gradients(dtype, reduction, more, n, hopper):
    "in place and not, twice with the same bits, times factors that are one and others"
    v = 4099 if n > 10000 else 9001
    z, y = 2 * torch.randn(n, v, device="cuda", dtype=dtype), torch.randint(v, (n,), device="cuda")
    y[3::5] = 7
    given = weighed(v, n, f32) if more else {"ignore_index": 7}
    token = given.get("token_weight", torch.ones(n, device="cuda")).double()
    w = given.get("weight", torch.ones(v, device="cuda")).double()
    part = torch.tensor(1.0, dtype=torch.float64, device="cuda") if reduction == "sum" else ((y != 7) * token * w[y]).sum()
    p = z.double().softmax(1)
    coef = ((y != 7) * token * w[y] / part)[:, None]
    loss = -(coef[:, 0] * p.gather(1, y[:, None])[:, 0].log()).sum()
    dz = coef * p.scatter_add_(1, y[:, None], -torch.ones(n, 1, dtype=torch.float64, device="cuda"))
    for factor in (None, -2.0, 0.25):
        found = []
        for inplace in (False, True, True):
            h = z.clone().requires_grad_() * 1
            ours = fusedloss.cross_entropy(h, y, reduction=reduction, inplace=inplace, **given)
            g, = torch.autograd.grad(ours, h, None if factor is None else torch.tensor(factor, device="cuda"))
            assert torch.allclose(ours.double(), loss, rtol=2e-6)
            exact = dz if factor is None else factor * dz
            smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # subnormal; fp16 has no digits left of a gradient near it
            assert (g.double() - exact).abs().max() <= max(2 * TOLERANCE[dtype] * exact.abs().max(), smallest)
            found.append((ours, g))
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_labels_that_all_count_nothing(hopper):
    z = torch.randn(140, 5000, device="cuda", dtype=bf16, requires_grad=True)
    loss = fusedloss.cross_entropy(z, torch.full((140,), -100, device="cuda"))
    loss.backward()
    assert loss == 0 and not z.grad.any()


def test_a_graph_and_a_fresh_thread(hopper):
    "A captured step sees new labels; a thread that has asked CUDA for nothing launches"
    z, y = torch.randn(140, 5000, device="cuda", dtype=bf16, requires_grad=True), torch.randint(5000, (140,), device="cuda")
    step = lambda: torch.autograd.grad(fusedloss.cross_entropy(z, y), z)[0]
    before = [step() for _ in range(2)][0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    y.copy_(y.roll(1))
    graph.replay()
    expected = step()
    assert torch.equal(captured, expected) and not torch.equal(captured, before)
    found = []
    thread = threading.Thread(target=lambda: found.append(fusedloss.cross_entropy(z, y).detach()))
    thread.start()
    thread.join()
    assert torch.equal(found[0], fusedloss.cross_entropy(z, y).detach())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_softmax_is_nan_and_alone(bad, hopper):
    z = torch.randn(3, 1, 5000, device="cuda")
    z[1] = bad
    losses = launch_cluster(z, z, torch.tensor([0, 1, 2], device="cuda"), None, None, None, LossOptions(), Cluster(4, 4, 128, 8))
    assert losses.isnan().tolist() == [False, True, False] and z.isnan().flatten(1).any(1).tolist() == [False, True, False]


def test_two_compilers_give_the_same_bits(hopper):
    pytest.importorskip("cupy")
    constants = dict(ELEMENT="bf16", SCORE="bare", SMOOTH=0, UNSCALED_GRAD=0, ALIGNED=1, CLUSTER=2, VECTORS=4, THREADS=128, BLOCKS=8)
    source, options = cuda_source("turnaround"), ("--std=c++17", *(f"-D{k}={v}" for k, v in constants.items()))
    z, y = torch.randn(9, 6000, device="cuda").bfloat16(), torch.randint(6000, (9,), device="cuda")
    seen = []
    for compiled in (CompiledByCupy, CompiledByTorch):
        run, losses = z.clone(), torch.empty(9, device="cuda")
        compiled(source, "turnaround", options)(18, 128, run, run, y, None, None, None, None, losses, None, None, 9, 6000, 1, *[6000] * 4,
                                                *LossOptions())
        seen.append((losses, run))
    assert all(torch.equal(a, b) for a, b in zip(*seen))


def test_it_launches_on_the_current_stream(hopper):
    z, y, side = torch.randn(140, 1, 5000, device="cuda"), torch.arange(140, device="cuda"), torch.cuda.Stream()
    turned = z.clone()
    expected = clusters.launch_both(turned, turned, y, None, None, None, LossOptions(), False)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**8)
        late = z.clone()
        got = clusters.launch_both(late, late, y, None, None, None, LossOptions(), False)
    side.synchronize()
    assert torch.equal(got, expected)
