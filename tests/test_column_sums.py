"""Sums of a matrix's columns: by the kernel and in PyTorch, planted bugs, the memory that they hold."""
import math

import pytest
import torch

import fusedloss as fl
from fusedloss.core import column_sums
from workbook.measure import peak_memory
from helpers import planted, where_kernels_run

bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SMALL = dict(BR=4, BC=16, programs=20)


def sample(dtype, device):
    "Rows that do not follow one another, two of them no numbers whose factor is 0; factors"
    a = torch.randn(37, 71, generator=torch.Generator().manual_seed(0), dtype=f64).to(device, dtype)
    factors = torch.linspace(-1, 2, 37, device=device)
    a[4::5], factors[4::5] = math.nan, 0
    return a[:, 1:], factors


def faults(dtype, device, module=column_sums, **blocks):
    a, factors = sample(dtype, device)
    plain = a.nan_to_num(0.0)
    close = lambda found, wanted: torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)
    return (["factors"] * (not close(module.launch_column_sums(a, factors, **blocks), column_sums.reference_column_sums(a.double(), factors.double())))
            + ["sums"] * (not close(module.launch_column_sums(plain, **blocks), plain.double().sum(0)))
            + ["no number"] * (not module.launch_column_sums(a, **blocks).isnan().all()))


@where_kernels_run
@pytest.mark.parametrize("blocks", [{}, dict(BR=4, BC=16), SMALL], ids=str)
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_column_sums_by_the_kernel(dtype, blocks, device):
    assert faults(dtype, device, **blocks) == []


@where_kernels_run
@pytest.mark.parametrize("bug", [("end = tl.minimum(first + each, R)", "end = tl.minimum(first + each - 1, R)"), ("mask=(f != 0) & inside", "mask=inside"),
                                 ("+= tl.load(at, mask=inside", "+= 0.5 * tl.load(at, mask=inside")], ids=lambda b: b[1])
def test_a_planted_bug_is_noticed(bug, tmp_path, device):
    assert faults(f32, device, planted(column_sums, tmp_path, *bug), **SMALL), "nothing noticed"


@pytest.mark.parametrize("dtype", [torch.float16, bf16, f32, f64], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_column_sums_of_any_matrix(dtype, turned, device):
    "Also of float64, of columns that follow one another, and of none"
    a = torch.arange(30, device=device).view(6, 5).to(dtype)
    a = a.T if turned else a
    found = column_sums.column_sums(a)
    assert found.dtype == (f64 if dtype == f64 else f32) and found.tolist() == a.double().sum(0).tolist()
    assert column_sums.column_sums(a[:0]).tolist() == [0.0] * a.shape[1] and column_sums.column_sums(a[:, :0]).tolist() == []


@on_gpu
@pytest.mark.parametrize("rows, columns", [(4096, 128256), (3072, 8192), (2048, 32000), (64, 4096)])
def test_sums_hold_little_memory(rows, columns):
    "PyTorch's sum of the second holds 128 MiB"
    a = torch.ones(rows, columns, dtype=bf16, device="cuda")
    assert peak_memory(lambda: column_sums.column_sums(a), "cuda") <= 4 * columns + 2**20
    assert torch.equal(column_sums.column_sums(a), torch.full((columns,), float(rows), device="cuda"))


@on_gpu
@pytest.mark.parametrize("method", ["chunks", "recompute"])
def test_a_bias_keeps_the_budget(method):
    "Of 8192 tokens and 32,000 classes; dx and dw, the bias and its gradient are beyond it"
    x, w, b = (torch.randn(size, device="cuda", dtype=bf16).requires_grad_() for size in ((8192, 512), (32000, 512), (32000,)))
    y, budget = torch.randint(32000, (8192,), device="cuda"), 2**27
    step = lambda: torch.autograd.grad(fl.linear_cross_entropy(x, w, y, linear_bias=b, method=method, memory_budget=budget), (x, w, b))
    assert peak_memory(step, "cuda") <= budget + x.nbytes + w.nbytes + 16 * len(b)
