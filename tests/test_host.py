"""The host's share of a small call: what Python runs and what it asks PyTorch for, as on a GPU, whose kernels here do nothing.

On a GPU the matrices of a small call take less time than the functions that launch them. Tensors are told that they lie on an
H200; all that plans, checks and launches runs, and launches end before the driver. Counts are exact, and hold the functions of
the library and the operators of PyTorch; the clock is told little, and holds the rest.
"""
import contextlib
import ctypes
import gc
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from fusedloss import clusters, ctc, linear_ctc, losses, segments
from fusedloss.core import cuda, devices, hopper, products, sequences, triton
from helpers import everywhere, planted
from offline import triton_kernels

pytestmark = pytest.mark.skipif(triton.triton is None, reason="needs Triton")
H200 = devices.H200.model()._replace(multiprocessors=1)  # so that few rows fill it
LOGITS_CALLS = {False: 48, True: 56}  # of a step of `cross_entropy`, by whether it is in place
LOGITS_OPERATORS = {False: 6, True: 6}  # of PyTorch; its own loss has 5
LOGITS_TIMES = {False: 5, True: 5}  # as long as PyTorch's step, whose kernels do something
CALLS = {"auto": 69, "eager": 67, "chunks": 131, "product": 284, "ctc": 77}  # Python functions of the library, in a step of training
OPERATORS = {"auto": 12, "eager": 12, "chunks": 33, "product": 40, "ctc": 11}  # of PyTorch; its own loss has 12
LINEAR_CTC = {"GPU": (307, 80, 21, 5), "host": (332, 103, 24, 7)}  # lengths there: functions and operators of a step, and of each segment
TIMES = {"auto": 6, "eager": 6, "chunks": 9, "product": 16}  # as long as PyTorch's step, whose kernels do something


class Nothing:
    "A kernel, and what launches it"
    def __getitem__(self, grid): return self
    def __call__(self, *args, **options): return 0
    def __getattr__(self, name): return self


def forget() -> None:
    "What was kept of launches and of matrices"
    for kept in (clusters.bound_launches, clusters.known_launches, hopper.form_failure, hopper.known_map):
        kept.cache_clear()


@pytest.fixture
def gpu(monkeypatch) -> None:
    "Tensors lie on an H200, whose kernels do nothing"
    nothing, here = Nothing(), torch.device("cuda", 0)
    for name, value in dict(is_cuda=True, is_cpu=False, device=here).items():
        monkeypatch.setattr(torch.Tensor, name, property(lambda t, value=value: value), raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda t: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    for kind in {type(kernel) for kernel in triton_kernels().values()}:
        monkeypatch.setattr(kind, "run", lambda kernel, *args, **options: nothing)
    monkeypatch.setattr(triton, "_compiled", {})
    everywhere(monkeypatch, triton, "triton_works", lambda: True)
    everywhere(monkeypatch, devices, "recognised", lambda backend, index: H200)
    everywhere(monkeypatch, cuda, "cuda_kernel", lambda *args, **constants: nothing)
    everywhere(monkeypatch, cuda, "driver", lambda: nothing)
    everywhere(monkeypatch, hopper, "form_handle", lambda *args: ctypes.c_void_p(1))
    everywhere(monkeypatch, products, "adds_in_float32", lambda device: False)
    forget()
    yield
    forget()


def step(method: str | None, module: ModuleType = losses, v: int = 4104) -> Callable[[], tuple]:
    "A step of training by a method, by PyTorch's own loss if None"
    made = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 8, generator=made).bfloat16().requires_grad_() for n in (8, v))
    y = torch.randint(v, (8,), generator=made)
    loss = (lambda: F.cross_entropy(x @ w.T, y)) if method is None else lambda: module.linear_cross_entropy(x, w, y, method=method)
    return lambda: torch.autograd.grad(loss(), (x, w))


def ctc_step(module: ModuleType = ctc, dtype: torch.dtype = torch.float32, C: int = 9) -> Callable[[], tuple]:
    "A step of training by CTC, its lengths on the GPU"
    made = torch.Generator().manual_seed(0)
    z, y = torch.randn(20, 8, C, generator=made).to(dtype).requires_grad_(), torch.randint(1, C, (8, 4), generator=made)
    lengths = torch.full((8,), 20), torch.full((8,), 4)
    return lambda: torch.autograd.grad(module.ctc_loss_with_logits(z, y, *lengths), z)


def step_of(name: str) -> Callable[[], tuple]:
    "A step by a name in `CALLS`"
    return ctc_step() if name == "ctc" else step(name)


@contextlib.contextmanager
def counted_calls() -> Iterator[list[str]]:
    "The functions of the library, or of a planted variant, that run meanwhile"
    found = []
    def note(frame, event, _):
        if event == "call" and re.match(r"fusedloss\b|variant\d+_", frame.f_globals.get("__name__", "")):
            found.append(frame.f_code.co_name)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def calls_of(run: Callable[[], tuple]) -> list[str]:
    "Python functions of the library in a step like one that was made before"
    run(), run()
    with counted_calls() as found:
        run()
    return found


def operators_of(run: Callable[[], tuple]) -> list[str]:
    "Operators of PyTorch that a step asks for, those within others left out"
    run(), run()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    inner = lambda event: event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
    return [event.name for event in seen.events() if event.name.startswith("aten::") and not inner(event)]


def does_more(run: Callable[[], tuple], other: Callable[[], tuple]) -> bool:
    return len(calls_of(run)) > len(calls_of(other)) or len(operators_of(run)) > len(operators_of(other))


@pytest.mark.parametrize("method", CALLS)
def test_functions_of_a_step_are_few(method, gpu):
    found = calls_of(step_of(method))
    assert len(found) <= CALLS[method], found


@pytest.mark.parametrize("method", OPERATORS)
def test_operators_of_a_step_are_few(method, gpu):
    found = operators_of(step_of(method))
    assert len(found) <= OPERATORS[method], found


def times(runs: dict, rounds: int = 15, calls: int = 10) -> dict:
    "Median seconds of the processor of each, in turn, while nothing is collected as garbage"
    gc.disable()
    found = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            begin = time.process_time()
            for _ in range(calls):
                runs[name]()
            found[name].append((time.process_time() - begin) / calls)
    gc.enable()
    return {name: statistics.median(each) for name, each in found.items()}


def test_a_step_takes_no_longer_than_it_did(gpu):
    runs = {method: step(method, v=16) for method in (None, *TIMES)}
    for run in runs.values():
        run()
    found = times(runs)
    assert all(found[method] <= most * found[None] for method, most in TIMES.items()), {m: s / found[None] for m, s in found.items()}


def logits_step(inplace: bool | None, module: ModuleType = clusters, v: int = 4104) -> Callable[[], tuple]:
    "A step of the loss of logits that an operation made, by PyTorch's own loss if None"
    made = torch.Generator().manual_seed(0)
    z, y = torch.randn(8, v, generator=made).bfloat16().requires_grad_(), torch.randint(v, (8,), generator=made)
    loss = F.cross_entropy if inplace is None else lambda h, y: module.cross_entropy(h, y, inplace=inplace)
    def run():
        h = z.view_as(z) if inplace is None else Made.apply(z)
        return torch.autograd.grad(loss(h, y), h)
    return run


class Made(torch.autograd.Function):
    "Hands its input on as if it had computed it"
    forward = staticmethod(lambda ctx, z: z.detach())
    backward = staticmethod(lambda ctx, g: g)


@pytest.mark.parametrize("inplace", LOGITS_CALLS)
def test_functions_and_operators_of_a_step_of_logits_are_few(inplace, gpu):
    run = logits_step(inplace)
    assert len(found := calls_of(run)) <= LOGITS_CALLS[inplace], found
    assert len(found := operators_of(run)) <= LOGITS_OPERATORS[inplace], found


def test_a_step_of_logits_takes_no_longer_than_it_did(gpu):
    runs = {inplace: logits_step(inplace, v=4104 if inplace is not None else 16) for inplace in (None, *LOGITS_TIMES)}
    for run in runs.values():
        run()
    found = times(runs)
    assert all(found[inplace] <= most * found[None] for inplace, most in LOGITS_TIMES.items()), {m: s / found[None] for m, s in found.items()}


CHECK = "check_call(input, linear_weight, target, given, method, *how, max_valid, filter_eps)"
BUGS = {
    "each call is checked anew": ("@once_for_alike\ndef check_call(", "def check_call("),
    "a check is run twice": (f"        {CHECK}\n", f"        {CHECK}\n        {CHECK}\n"),
    "each call is planned anew": ("(planned_choice if compiling else known_choice)", "planned_choice"),
    "operators for nothing": ("F.linear(as_rows(input), linear_weight, linear_bias)", "F.linear(as_rows(input)[:], linear_weight, linear_bias)"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug, gpu, tmp_path):
    assert does_more(step("eager", planted(losses, tmp_path, *BUGS[bug])), step("eager")), "nothing noticed"


LOGITS_BUGS = {
    "each call is checked anew": ("@once_for_alike\ndef check_logits(", "def check_logits("),
    "operators add up the losses": ("    loss, late = losses[:m].sum() if loss is None else loss,", "    loss, late = losses[:m].sum(),"),
    "operators count the labels": ("    launches = turning_launches(input, weight, o, inplace) if", "    launches = None if"),
    "kernels are bound anew": ("@functools.lru_cache(maxsize=4096)\ndef known_launches(", "def known_launches(",
                              "@functools.lru_cache(maxsize=4096)\ndef bound_launches(", "def bound_launches("),
    "a matrix is viewed": ("    z = input if input.dim() == 2 else rows_view(input.detach())\n", "    z = rows_view(input.detach())\n"),
    "labels are converted": ("labels = target if target.dtype == torch.int64 else target.long()", "labels = target.int().long()"),
}


@pytest.mark.parametrize("bug", LOGITS_BUGS)
def test_a_planted_bug_of_logits_is_noticed(bug, gpu, tmp_path):
    assert does_more(logits_step(False, planted(clusters, tmp_path, *LOGITS_BUGS[bug])), logits_step(False)), "nothing noticed"


@pytest.mark.parametrize("C", [9, 200])
def test_half_precision_takes_the_host_no_longer(C, gpu):
    assert len(operators_of(ctc_step(dtype=torch.float16, C=C))) <= OPERATORS["ctc"]
    assert len(calls_of(ctc_step(dtype=torch.float16, C=C))) <= CALLS["ctc"] + 2


CTC_BUGS = {
    "each call is checked anew": ("@once_for_alike\ndef check_loss(", "def check_loss("),
    "losses are added by PyTorch": ("_CTC.apply(grad, reduction != \"none\", options, *given)", "_CTC.apply(grad, False, options, *given).sum()"),
    "factors are made of lengths by PyTorch": ("    if launch_ctc_scale(g, dz, out, lengths)", "    if launch_ctc_scale(g * 1, dz, out, lengths)"),
}


@pytest.mark.parametrize("bug", CTC_BUGS)
def test_a_bug_planted_in_ctc_is_noticed(bug, gpu, tmp_path):
    assert does_more(ctc_step(planted(ctc, tmp_path, *CTC_BUGS[bug])), ctc_step()), "nothing noticed"


class Zeroing(Nothing):
    "A kernel of linear CTC, which leaves zeros where others take indices from"
    def __init__(self, name):
        self.written = {"ctc_targets": 5, "ctc_kept": 3}.get(name)

    def __call__(self, *args, **options):
        if self.written:
            ctypes.memset(args[self.written].data_ptr(), 0, args[self.written].nbytes)


@pytest.fixture(params=LINEAR_CTC)
def lengths_lie(request, gpu, monkeypatch) -> str:
    "Where: sequences end early, which the GPU cannot tell the host; products sum in float32"
    segments.compile_kernels.cache_clear()
    real = torch.bmm
    everywhere(monkeypatch, cuda, "cuda_kernel", lambda name, *args, **constants: Zeroing(name))
    everywhere(monkeypatch, sequences, "readable_on_host", lambda t: request.param == "host" and t.dim() == 1)
    for asked in ("multiplies_in_float32", "adds_in_float32"):
        everywhere(monkeypatch, products, asked, lambda device: True)
    monkeypatch.setattr(torch, "bmm", lambda a, b, out_dtype: real(a, b))
    monkeypatch.setattr(torch.ops.aten.addmm, "dtype_out", lambda total, *given, **factors: total.add_(0))
    yield request.param
    segments.compile_kernels.cache_clear()


def linear_ctc_step(patch: pytest.MonkeyPatch, module: ModuleType = linear_ctc, parts: int = 6) -> Callable[[], tuple]:
    "A step of training by linear CTC, in so many segments"
    made, K = torch.Generator().manual_seed(0), 8
    x, w = (torch.randn(*size, generator=made).bfloat16().requires_grad_() for size in ((K * parts, 4, 16), (512, 16)))
    y, frames, lengths = torch.randint(1, 512, (4, 3), generator=made), torch.linspace(K * parts, K * parts // 3, 4).long(), torch.full((4,), 3)
    counts = segments.FrameCounts(K, K * parts, K * parts, 4)
    def run():
        with patch.context() as here:
            everywhere(here, module, "frame_counts", lambda *given: counts)
            return torch.autograd.grad(module.linear_ctc_loss(x, w, y, frames, lengths), (x, w))
    return run


def counts_of(patch: pytest.MonkeyPatch, module: ModuleType = linear_ctc) -> tuple[int, int, int, int]:
    "Functions and operators of a step in six segments, and what each of these adds"
    few, many = (linear_ctc_step(patch, module, parts) for parts in (2, 6))
    more = [(len(count(many)), len(count(many)) - len(count(few))) for count in (calls_of, operators_of)]
    return tuple(n for n, _ in more) + tuple(-(-difference // 4) for _, difference in more)


def test_functions_and_operators_of_linear_ctc_are_few(lengths_lie, monkeypatch):
    found = counts_of(monkeypatch)
    assert all(n <= most for n, most in zip(found, LINEAR_CTC[lengths_lie])), found


LINEAR_CTC_BUGS = {
    "each call is checked anew": ("@once_for_alike\ndef check_linear_ctc(", "def check_linear_ctc("),
    "the softmax is prepared for each segment": ("softmax = softmax or tiled_softmax(x,", "softmax = tiled_softmax(x,"),
    "the variant is looked up for each segment": ("        if size not in self.variants:", "        if True:"),
    "rows are cut out for each segment": ("    x = b.sequences[:, at]\n", "    x = b.x[at].transpose(0, 1)\n"),
    "rows are converted": ("x if x.dtype == dz.dtype else x.to(dz.dtype)", "x.to(dz.dtype)"),
    "states of β are selected": ("    beta = kept.beta if", "    beta = kept.states[1] if"),
}


@pytest.mark.parametrize("bug", LINEAR_CTC_BUGS)
@pytest.mark.parametrize("lengths_lie", ["GPU"], indirect=True)
def test_a_bug_planted_in_linear_ctc_is_noticed(bug, lengths_lie, tmp_path, monkeypatch):
    more, usual = counts_of(monkeypatch, planted(linear_ctc, tmp_path, *LINEAR_CTC_BUGS[bug])), counts_of(monkeypatch)
    assert any(n > most for n, most in zip(more, usual)), (more, usual)
