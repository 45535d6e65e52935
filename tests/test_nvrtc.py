"""Every `.cu` compiles with the NVRTC of CUDA 12 and of CUDA 13, with the constants that the library gives it, for six architectures."""
from dataclasses import replace

import pytest
import torch

import nvrtc
from fusedloss import clusters, ctc, fp8, lattices, scans, segments
from fusedloss.core import hopper, ignored
from fusedloss.core.cuda import cuda_source, kernel_alone
from fusedloss.core.devices import GPUS
from fusedloss.core.lattice import scan_shape
from fusedloss.core.options import LossOptions
from fusedloss.semirings import Log, Max
from grids import few, FULL, pairs
from helpers import everywhere
from offline import cuda, told_of
from workbook.support import ONE_EACH

pytest.importorskip("triton")

f16, bf16, f32, f64, i64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64
LENGTHS = [0, 31, 63, 127, 255, 511, 1023, 1500, 2047, 4095, 8191, 20000]  # targets of every shape of a scan
WIDTHS = [1, 40, 1024, 1025, 3000, 8192, 200000]  # alphabets, from one class a thread to the most


def ctc_calls(device):
    for dtype, length, tables in pairs([(d, n, t) for d in ctc.ELEMENTS for n in LENGTHS for t in (True, False)]):
        yield lambda: ctc.kernels_for.__wrapped__(0, dtype, 40, ctc.LOGITS, scan_shape(length, device.clusters), tables)
    for dtype, C, form in pairs([(d, C, form) for d in ctc.ELEMENTS for C in WIDTHS for form in (ctc.LOGITS, ctc.TORCH_GRADIENT, ctc.EXACT_GRADIENT)]):
        yield lambda: ctc.kernels_for.__wrapped__(0, dtype, C, form)


def linear_ctc_calls(device):
    for dtype, length, near in pairs([(d, n, near) for d in ctc.ELEMENTS for n in LENGTHS for near in (True, False)]):
        yield lambda: segments.compile_kernels.__wrapped__(0, dtype, scan_shape(length, device.clusters), near)


def scan_calls(device):
    graphs = [(3, 2), (32, 2), (100, 5), (512, 5), (1000, 8), (3000, 4), (20, 24), (64, 12)]  # states, edges a state
    for (c, nz), dtype, S in pairs([(g, d, S) for g in graphs for d in scans.REALS for S in (Log, Max)]):
        Ms, idx, v = cuda(9, 2, c, nz, dtype=dtype), cuda(c, nz, dtype=i64), cuda(2, c, dtype=dtype)
        cut = scans.fused_shape(c, nz, S, dtype.itemsize, device.shared_memory)
        for phase in (0, 1, 2) if S is Log else (0, 2, 3):
            if cut:
                yield lambda: scans.fused_kernel(phase, cut, S, Ms)
        out = scans.OutEdges(cuda(c + 1, dtype=i64), cuda(c * nz, dtype=i64))
        yield lambda: scans.launch_scan(Ms, idx, None, v, S)
        yield lambda: scans.launch_scan(Ms, idx, None, v, S, out, v, Ms)


def turnaround_calls(device):
    if not device.clusters:
        return
    sizes = [4097, 8192, 16385, 32768, 50257, 65536, 100000, 128256, 131072, 200001, 262144]
    options = [LossOptions(), LossOptions(logit_scale=2.0), LossOptions(softcap=9.0), LossOptions(label_smoothing=0.1)]
    for dtype, V, o, late, odd in pairs([(d, V, o, late, odd) for d in ctc.ELEMENTS for V in sizes for o in options for late in (0, 1) for odd in (0, 1)]):
        z = cuda(512, 1, V + odd, dtype=dtype)[..., :V]
        shape = clusters.row_cluster(z, None, o)
        if shape:
            yield lambda: clusters.launch_cluster(z, z, cuda(512, dtype=i64), None, None, None, o, shape, bool(late))


def transducer_calls(device):
    for most, best, flows in pairs([(most, best, flows) for most in (0, 31, 40, 100, 127, 128, 1023, 4095) for best in (True, False) for flows in (True, False)]):
        yield lambda: lattices.cuda_lattice.__wrapped__(0, most, best, flows)


def zero_calls(device):
    yield lambda: ignored.zero_rows.__wrapped__(0, 5, 64, -100)


def rounding_calls(device):
    yield lambda: fp8.rounding_kernel.__wrapped__(0)


def product_calls(device):
    shapes = [(dtype, form, biased, capped) for dtype in (bf16, f16, hopper.FP8) for form in (hopper.IN_TURN, hopper.SHARED) for biased in (False, True) for capped in (False, True)]
    for dtype, form, biased, capped in pairs(shapes):
        for name in ("score_statistics", "score_moments", "score_maxima", "exponentials", "score_gradients", "entropy_gradients"):
            yield lambda: hopper.form_kernel(name, replace(form, biased=biased, capped=capped), dtype, 0)


CALLS = {"ctc": ctc_calls, "linear_ctc": linear_ctc_calls, "transducer": transducer_calls, "sparse": scan_calls, "turnaround": turnaround_calls, "zeros": zero_calls, "rounding": rounding_calls, "product": product_calls}


def choices(name: str, arch: int, monkeypatch) -> list[tuple[str, tuple[str, ...], tuple]]:
    "Kernels, sources and constants that the library chooses for an architecture, each once"
    found, device = {}, GPUS[ONE_EACH[arch]]
    with told_of(device, monkeypatch), monkeypatch.context() as patch:
        def recorded(kernel, index, sources=(), own="", **constants):
            found[kernel, sources or (kernel,), tuple(constants.items())] = True
            return lambda *args, **options: None
        everywhere(patch, clusters, "cuda_kernel", recorded)
        everywhere(patch, clusters, "Bound", lambda *how: lambda *addresses: None)
        clusters.bound_launches.cache_clear()
        for call in CALLS[name](device):
            call()
        clusters.bound_launches.cache_clear()
    return list(found)


@pytest.fixture(params=[12, 13])
def compiler(request):
    "NVRTC of a version of CUDA"
    found = nvrtc.library(request.param)
    if found is None:
        pytest.skip(f"no NVRTC of CUDA {request.param} on this machine")
    assert nvrtc.version(found)[0] == request.param
    return found


SERVED = {"turnaround": (90, 100, 120), "product": (90,), "rounding": (89, 90, 100, 120)}  # other sources serve all architectures
GRID = [(arch, name) for arch in ONE_EACH for name in CALLS if arch in SERVED.get(name, ONE_EACH)]


@pytest.mark.parametrize("arch, name", few(GRID, (80, "sparse"), (120, "turnaround"), (90, "product")))
def test_sources_compile_as_the_library_chooses(arch, name, compiler, monkeypatch):
    if not nvrtc.knows(compiler, arch):
        pytest.skip(f"NVRTC {nvrtc.version(compiler)} does not know sm_{arch}")
    chosen = choices(name, arch, monkeypatch)
    assert chosen
    for kernel, sources, constants in chosen if FULL else {of[:2]: of for of in chosen}.values():  # else each kernel once
        source = kernel_alone("".join(map(cuda_source, sources)), kernel)
        complaint = nvrtc.complaint(compiler, source, dict(constants), "90a" if name == "product" else arch)
        assert not complaint, f"{kernel} of {sources} {dict(constants)}:\n{complaint}"


def test_what_does_not_compile_is_noticed(compiler):
    assert "undefined" in nvrtc.complaint(compiler, "__global__ void f() { g(); }", {}, 90)
