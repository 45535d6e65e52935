"""What scans, CTC and decoding promise under `torch.compile` and `torch.export`: function × promise."""
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from grids import thorough_but
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusedloss as fl
from fusedloss import semirings
from fusedloss.ctc import ctc_sample
from fusedloss.scans import logz, path_score, posteriors, sample, viterbi

PYTORCH = tuple(map(int, torch.__version__.split(".")[:2]))
C, H = 5, 4
SIZES = (8, 4, 2), (12, 7, 4), (11, 6, 3)  # T, N, L; the third finds the graph of the second


class Case(NamedTuple):
    "A function of tensors; how many of its results it returns in an order of its own is for the eager one to say"
    call: Callable[..., Any]
    layout: tuple[str, ...]  # the axes of its tensors: T, N, L, or others that stay
    drawn: bool = False  # anew at each call


def tensor(axes: str, T: int, N: int, L: int) -> Tensor:
    "Scores, or what their axes say that they are"
    size = dict(T=T, N=N, L=L, U=L + 1, C=C, S=3, H=H, E=2)
    if axes == "SE": return torch.tensor([[0, 1], [1, 0], [2, 1]])
    if axes == "NL": return torch.randint(1, C, (N, L))
    if axes == "N frames": return torch.randint(2 * L, T + 1, (N,))
    if axes == "N labels": return torch.randint(1, L + 1, (N,))
    return torch.randn([size[a] for a in axes]).requires_grad_()


GRAPH = "TNSE", "SE", "NS", "NS"
TARGETS = "NL", "N frames", "N labels"


def of_log_probs(call: Callable) -> Callable:
    return lambda z, *others: call(z.log_softmax(-1), *others)


def of_graph(call: Callable, **options) -> Callable:
    return lambda Ms, idx, v0, vT, *lengths: call(Ms, idx, v0, vT, **options, **dict(zip(["lengths"], lengths)))


def linear(**options) -> Callable:
    return lambda x, w, *others: fl.linear_ctc_loss(x, w, *others, **options)


def scored(Ms: Tensor, idx: Tensor, v0: Tensor, vT: Tensor) -> Tensor:
    best = viterbi(Ms, idx, v0, vT)
    return path_score(Ms, v0, vT, best.states, best.edges)


CASES = {
    "logz": Case(of_graph(logz), GRAPH),
    "logz, lengths": Case(of_graph(logz), (*GRAPH, "N frames")),
    "logz, Max": Case(of_graph(logz, S=semirings.Max), (*GRAPH, "N frames")),
    "viterbi": Case(of_graph(viterbi), (*GRAPH, "N frames")),
    "path_score": Case(scored, GRAPH),
    "posteriors": Case(of_graph(posteriors), (*GRAPH, "N frames")),
    "sample": Case(of_graph(sample), (*GRAPH, "N frames"), drawn=True),
    "ctc_loss": Case(of_log_probs(fl.ctc_loss), ("TNC", *TARGETS)),
    "ctc_loss, no lengths": Case(of_log_probs(fl.ctc_loss), ("TNC", "NL")),
    "ctc_loss_with_logits": Case(fl.ctc_loss_with_logits, ("TNC", *TARGETS)),
    "CTCLoss": Case(fl.CTCLoss(reduction="none", logits=True), ("TNC", *TARGETS)),
    "transducer_loss": Case(lambda z, *others: fl.transducer_loss(z, *others, blank=0), ("NTUC", *TARGETS)),
    "TransducerLoss": Case(fl.TransducerLoss(blank=0, reduction="none"), ("NTUC", *TARGETS)),
    "transducer_align": Case(lambda z, *others: fl.transducer_align(z, *others, blank=0), ("NTUC", *TARGETS)),
    "linear_transducer_loss": Case(fl.linear_transducer_loss, ("NTH", "NUH", "CH", *TARGETS)),
    "linear_ctc_loss": Case(linear(), ("TNH", "CH", *TARGETS)),
    "linear_ctc_loss, each sequence": Case(linear(reduction="none"), ("TNH", "CH", *TARGETS)),
    "forced_align": Case(of_log_probs(fl.forced_align), ("TNC", *TARGETS)),
    "ctc_sample": Case(of_log_probs(ctc_sample), ("TNC", *TARGETS), drawn=True),
    "ctc_posteriors": Case(of_log_probs(fl.ctc_posteriors), ("TNC", *TARGETS)),
    "ctc_decode": Case(of_log_probs(fl.ctc_decode), ("TNC", "N frames")),
    "ctc_decode, beam": Case(of_log_probs(lambda z, t: fl.ctc_decode(z, t, beam_size=3, k=2, timesteps=True)), ("TNC", "N frames")),
}
QUICK = "logz, lengths", "ctc_loss", "linear_ctc_loss, each sequence", "ctc_posteriors", "ctc_decode, beam"  # one of each kind
ALIKE = "logz", "ctc_loss, no lengths", "ctc_loss_with_logits", "linear_ctc_loss", "ctc_decode"  # with what others run
WITH_BACKWARD = "logz, lengths", "linear_ctc_loss, each sequence"  # compiled too
each_kind = pytest.mark.parametrize("name", thorough_but(CASES, *QUICK))


def results(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [t for t in found if t is not None]


def compare(case: Case, run: Callable, tensors: list[Tensor], call: Callable | None = None):
    "The same results and gradients as in eager mode; of a sample, the same shapes"
    got, want = results(run(*tensors)), results((call or case.call)(*tensors))
    for a, b in zip(got, want, strict=True):
        if b.dim() == 3 and a.shape[2] > b.shape[2]:  # posteriors of states that no target has
            assert not a[..., b.shape[2]:].any()
            a = a[..., :b.shape[2]]
        assert (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
        if case.drawn: continue
        torch.testing.assert_close(a.detach(), b.detach())
        if b.requires_grad:
            leaves = [t for t in tensors if t.requires_grad]
            g = torch.rand_like(b)
            torch.testing.assert_close(torch.autograd.grad(a, leaves, g), torch.autograd.grad(b, leaves, g))


def made(case: Case, *sizes: int) -> list[Tensor]:
    return [tensor(axes, *sizes) for axes in case.layout]


# without a backward pass of its own a graph costs half as much, and sizes that are unknown ask more of the backward pass
@pytest.mark.parametrize("name, backend", thorough_but(product(CASES, ("eager", "aot_eager")), *((name, "aot_eager" if name in WITH_BACKWARD else "eager") for name in CASES if name not in ALIKE)))
def test_two_graphs_a_grad_mode_for_any_sizes(name, backend):
    torch._dynamo.reset()
    case, count = CASES[name], CompileCounterWithBackend(backend)
    run = torch.compile(case.call, fullgraph=True, backend=count)
    for sizes in SIZES: compare(case, run, made(case, *sizes))
    if name == "linear_ctc_loss, each sequence" and PYTORCH < (2, 9): return  # whose compiler leaves no size open unasked: a graph each
    assert count.frame_count <= 2
    for sizes in SIZES:
        with torch.no_grad(): compare(case, run, made(case, *sizes))
        compare(case, run, made(case, *sizes))
    assert count.frame_count <= 4


@pytest.mark.skipif(PYTORCH < (2, 9), reason="PyTorch 2.8's own log_softmax asks for sizes")
@each_kind
def test_sizes_that_no_compiler_knows(name):
    torch._dynamo.reset()
    case, count = CASES[name], CompileCounterWithBackend("aot_eager")

    def call(keep, *tensors):
        kept = [t[:, keep] if axes.startswith("TN") else t[keep] if axes.startswith("N") else t for axes, t in zip(case.layout, tensors)]
        return case.call(*kept)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(call, fullgraph=True, backend=count)
        for n in (4, 6, 3):
            keep, tensors = torch.arange(7) < n, made(case, 12, 7, 4)
            compare(case, lambda *t: run(keep, *t), tensors, lambda *t: call(keep, *t))
    assert count.frame_count <= 2


class Exported(nn.Module):
    "A function as a module"
    def __init__(self, call: Callable):
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> list[Tensor]: return results(self.call(*tensors))


@pytest.mark.parametrize("name, strict", thorough_but(product(CASES, (False, True)), *((name, False) for name in QUICK), ("ctc_loss", True)))
def test_export_of_any_frames_sequences_and_labels(name, strict):
    case, dims = CASES[name], {a: torch.export.Dim(a, min=2, max=999) for a in "TNL"}
    dims["U"] = dims["L"] + 1
    shapes = tuple({i: dims[a] for i, a in enumerate(axes.partition(" ")[0]) if a in dims} for axes in case.layout)
    program = torch.export.export(Exported(case.call), tuple(t.detach() for t in made(case, *SIZES[0])), strict=strict, dynamic_shapes={"tensors": shapes})
    for sizes in SIZES[1:]: compare(case, program.module(), [t.detach() for t in made(case, *sizes)])


@pytest.mark.parametrize("name, wrong", thorough_but(
    [("logz, lengths", "lengths"), ("viterbi", "lengths"), ("ctc_loss", "input_lengths"), ("linear_ctc_loss", "input_lengths"),
     ("forced_align", "input_lengths"), ("ctc_posteriors", "input_lengths"), ("ctc_decode", "input_lengths")],
    ("logz, lengths", "lengths"), ("ctc_loss", "input_lengths"), ("linear_ctc_loss", "input_lengths"), ("ctc_decode", "input_lengths")))
def test_lengths_are_checked_when_the_graph_runs(name, wrong):
    case = CASES[name]
    torch._dynamo.reset()
    tensors = made(case, *SIZES[0])
    run = torch.compile(case.call, fullgraph=True, backend="eager")
    run(*tensors)
    tensors[case.layout.index("N frames")][2] = 99
    with pytest.raises(ValueError, match=rf"{wrong}\[2\] is 99: expected 0 ≤ length ≤ 8"): run(*tensors)
    assert torch.is_grad_enabled()


def test_a_state_that_does_not_exist_is_seen_when_the_graph_runs():
    torch._dynamo.reset()
    tensors = made(CASES["logz"], *SIZES[0])
    run = torch.compile(CASES["logz"].call, fullgraph=True, backend="eager")
    run(*tensors)
    tensors[1][1, 0] = 7
    with pytest.raises(IndexError, match=r"idx\[1, 0\] is 7: expected 0 ≤ state < 3, or −1"): run(*tensors)


def test_samples_of_one_graph_differ_and_follow_the_seed():
    graph = torch.zeros(40, 2, 3, 2), torch.tensor([[0, 1], [1, 0], [2, 1]]), *torch.zeros(2, 2, 3)
    z, y = torch.zeros(40, 2, C).log_softmax(-1), torch.ones(2, 5, dtype=torch.int64)
    run = torch.compile(lambda: (sample(*graph).edges, sample(*graph).edges, ctc_sample(z, y).states, ctc_sample(z, y).states), fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    a, b, c, d = once = run()
    assert not torch.equal(a, b) and not torch.equal(c, d)
    torch.manual_seed(0)
    assert all(map(torch.equal, once, run()))


@pytest.mark.parametrize("call", [lambda g: sample(torch.zeros(4, 2, 3, 2), torch.zeros(3, 2).long(), *torch.zeros(2, 2, 3), g),
                                  lambda g: ctc_sample(torch.zeros(4, 2, C), torch.ones(2, 1).long(), generator=g)])
def test_a_compiler_hands_on_no_generator(call):
    torch._dynamo.reset()
    call(g := torch.Generator())
    with pytest.raises(Exception, match="generator: expected None in a compiled or exported function"):
        torch.compile(call, backend="eager")(g)


def test_a_sample_by_a_compiler_comes_as_often_as_its_probability():
    torch.manual_seed(0)
    N = 4000
    graph = [t.detach() if t.dim() < 3 or i else t.detach().expand(-1, N, -1, -1) for i, t in enumerate(made(CASES["logz"], 4, 1, 1))]
    graph[2:] = (t.expand(N, -1) for t in graph[2:])
    drawn = torch.compile(sample, fullgraph=True, backend="aot_eager")(*graph)
    p = posteriors(*graph).states[:, 0]  # [T+1,C]
    share = nn.functional.one_hot(drawn.states, 3).double().mean(0)
    assert ((share - p).abs() < 5 * (p * (1 - p) / N).sqrt() + 1e-6).all()


def test_a_second_derivative_is_refused_and_not_wrong():
    Ms, idx, v0, vT = made(CASES["logz"], *SIZES[0])
    torch._dynamo.reset()
    z = torch.compile(logz, fullgraph=True, backend="eager")(Ms, idx, v0, vT)
    first, = torch.autograd.grad(z.square().sum(), Ms, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"): first.sum().backward()
