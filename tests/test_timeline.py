"""Timelines: what a trace holds, whose pause it is, and the picture."""
import pytest
import torch
from helpers import need_fonts
from torch.testing import assert_close

from workbook.timeline import Pause, Timeline, Work, joined, kind_of, pauses, read_trace, record_timeline, shares, timeline_plot


def event(cat: str, name: str, ts: float, dur: float, number: int | None = None) -> dict:
    "An event of Chrome's format"
    return dict(ph="X", cat=cat, name=name, ts=ts, dur=dur, args={} if number is None else {"correlation": number})


def call(ts: float, number: int, name: str = "cudaLaunchKernel", dur: float = 4, cat: str = "cuda_runtime") -> dict:
    "The host's call that launches the work of this number"
    return event(cat, name, ts, dur, number)


# A matmul, a copy for which the host waits, and a kernel that is launched late. The profiler files the step a second time, among the GPU's rows.
BY_HAND = [event("user_annotation", "the step", 1000, 100), event("gpu_user_annotation", "the step", 1010, 110),
           call(1002, 1), event("kernel", "sm90_xmma_gemm", 1010, 30, 1),
           call(1010, 2, "cudaMemcpyAsync", 42), event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 1042, 8, 2),
           call(1054, 5, "cudaMemcpyAsync"), event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1060, 4, 5),
           call(1070, 3, "cuLaunchKernelEx", cat="cuda_driver"), event("kernel", "finish_kernel", 1080, 40, 3),
           call(900, 9), event("kernel", "of an earlier step", 990, 5, 9), dict(ph="M", name="process_name")]


def test_a_trace_has_the_work_of_the_step_and_the_hosts_waits():
    made = read_trace(BY_HAND)
    assert [w.name[:11] for w in made.work] == ["sm90_xmma_g", "Memcpy DtoH", "Memcpy DtoD", "finish_kern"]
    assert_close(made.blocked, [(10e-6, 52e-6)], msg="in the copy to the host, and not in the one on the GPU")
    assert [kind_of(w.name) for w in made.work] == ["products", "copies", "copies", "ours and others'"]
    assert kind_of("void at::native::vectorized_elementwise_kernel<4>") == "PyTorch's kernels"


@pytest.mark.parametrize("key, gone, words", [("name", ("the step",), "expected one step, got 0"), ("name", ("finish_kernel",), r"got none of 1: \['cuLaunchKernelEx'\]"),
                                              ("cat", ("kernel", "gpu_memcpy"), "expected work on a GPU, got none")])
def test_a_trace_that_lacks_something_is_refused(key, gone, words):
    with pytest.raises(ValueError, match=words):
        read_trace([e for e in BY_HAND if e.get(key) not in gone])


def test_a_pause_is_the_hosts_where_the_next_call_came_too_late():
    made = read_trace(BY_HAND)
    assert [p.for_host for p in pauses(made)] == [True, False, True, True]
    assert_close(shares(made), dict(busy=82 / 120, for_host=36 / 120, between=2 / 120, blocked=42 / 120))


def test_what_overlaps_counts_once():
    overlapping = Timeline([Work("a", 0.0, 1.0, 5.0), Work("b", 0.5, 2.0, 3.0), Work("c", 0.6, 6.0, 8.0)], [(0.0, 4.0), (2.0, 9.0)])
    assert pauses(overlapping) == [Pause(0.0, 1.0, True), Pause(5.0, 6.0, False)]
    assert_close(shares(overlapping), dict(busy=6 / 8, for_host=1 / 8, between=1 / 8, blocked=1.0))
    assert joined([(0.0, 1.0), (1.01, 2.0), (3.0, 3.01), (4.0, 8.0), (5.0, 6.0)], 0.1) == [(0.0, 2.0), (3.0, 3.1), (4.0, 8.0)]


def test_kernels_shorter_than_the_latency_wait_for_the_host():
    made = shares(Timeline([Work("small", 6e-6 * i, 6e-6 * i + 5e-6, 6e-6 * i + 8e-6) for i in range(100)], []))
    assert 0.48 < made["for_host"] < 0.52 and made["between"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_recorded():
    with pytest.raises((RuntimeError, ValueError), match="expected a GPU, got none"):
        record_timeline(print)


def test_the_picture_says_the_shares():
    need_fonts("DejaVuSans")
    step = Timeline([Work("nvjet_gemm", 0.0, 5e-6, 45e-6), Work("at::native::add", 1e-5, 45e-6, 85e-6), Work("ours", 90e-6, 95e-6, 100e-6)], [(10e-6, 90e-6)])
    drawn = timeline_plot({"two and one": step}, "A title", "What it shows.")
    assert "What it shows. two and one: 0.1 ms: GPU busy 85%, waits for the host 15%" in drawn.alt and len(drawn.svg) < 40_000
