"""Typical calls as a type checker sees them; tests/test_types.py runs it over this file, and nobody runs the file."""
from typing import assert_type

import torch
from torch import Tensor, nn

import fusedloss as fl
from fusedloss.ctc import Alignment, CTCPosteriors
from fusedloss.plans import Plan
from fusedloss.scans import Paths

x, w, y = torch.zeros(4, 8), torch.zeros(16, 8, requires_grad=True), torch.zeros(4, dtype=torch.long)
Pair = tuple[Tensor, fl.CrossEntropyStats]


def losses(asked: bool) -> None:
    "A tensor, with `return_stats=True` a pair, and either where that is known at run time only"
    assert_type(fl.cross_entropy(x, y, reduction="sum", label_smoothing=0.1), Tensor)
    assert_type(fl.cross_entropy(x, y, return_stats=False), Tensor)
    assert_type(fl.cross_entropy(x, y, return_stats=True), Pair)
    assert_type(fl.cross_entropy(x, y, return_stats=asked), Tensor | Pair)
    assert_type(fl.linear_cross_entropy(x, w, y, softcap=30.0, method="recompute", shift=1), Tensor)
    assert_type(fl.linear_cross_entropy(x, nn.Linear(8, 16), y, return_stats=True), Pair)
    assert_type(fl.chunked_linear_cross_entropy(x, w, y, accumulate="native", return_stats=True), Pair)
    assert_type(fl.recompute_linear_cross_entropy(x, w, y, filter_eps=2.0**-12), Tensor)
    assert_type(fl.sharded_linear_cross_entropy(x, w, y, backbone_reduction="mean"), Tensor)
    assert_type(fl.tiled_linear_cross_entropy(x, w, y, reduction="none"), Tensor)
    assert_type(fl.linear_cross_entropy(x, w, y, return_stats=True)[1].entropy, Tensor)


def plans() -> None:
    "What a plan says"
    p = fl.plan(8192, 65536, 2048, torch.bfloat16, device=torch.device("cuda"), reduction="sum", accumulate="float32")
    assert_type(p, Plan)
    assert_type(p.method, str | None)
    assert_type(p.why, str)


def modules() -> None:
    "Modules are built as their options say"
    loss = fl.LinearCrossEntropyLoss(8, 16, bias=True, method="chunks", reduction="sum", device="cpu", dtype=torch.bfloat16)
    assert_type(loss.linear_weight, Tensor)
    assert_type(fl.MemoryEfficientVocabOutput(nn.Parameter(w), reduction="mean").eval_forward(x), Tensor)
    head = fl.PartialFC(16, 8, sample_rate="positives", margin=fl.margins.ArcFace(), method="tiles", conflict_mode="zero")
    fl.PartialFC(16, 8, margin=fl.margins.SubCenter(3, fl.margins.AdaFace()), device=torch.device("cpu"))
    fl.ShardedPartialFC(16, 8, backbone_reduction="sum", sampler=fl.NegativeSampler(0.1), method="tiles")
    optimizer = fl.RowSparse(torch.optim.AdamW, head.parameters(), lr=1e-3, mode="dense")
    assert_type(optimizer.step(), float | None)
    assert_type(optimizer.clip_grad_norm_(1.0), Tensor)
    assert_type(head.remove([3, 5], optimizer), Tensor)


def paths() -> None:
    "Lengths are tensors, tuples or lists"
    log_probs, targets = torch.zeros(9, 2, 5), torch.ones(2, 3, dtype=torch.long)
    assert_type(fl.ctc_loss(log_probs, targets, (9, 9), [3, 2], reduction="none", gradient="exact"), Tensor)
    assert_type(fl.ctc_loss_with_logits(log_probs, targets, torch.tensor([9, 9]), (3, 2)), Tensor)
    assert_type(fl.linear_ctc_loss(log_probs, torch.zeros(7, 5), targets, (9, 9), (3, 2), memory_budget=2**20), Tensor)
    assert_type(fl.forced_align(log_probs, targets, (9, 9), (3, 2)), Alignment)
    assert_type(fl.ctc_posteriors(log_probs, targets, (9, 9), (3, 2)), CTCPosteriors)
    Ms, idx, ends = torch.zeros(4, 2, 3, 2), torch.zeros(3, 2, dtype=torch.long), torch.zeros(2, 3)
    assert_type(fl.logz(Ms, idx, ends, ends, fl.semirings.Max, method="loop"), Tensor)
    assert_type(fl.viterbi(Ms, idx, ends, ends), Paths)


class Steep(fl.margins.Margin):
    "A margin of one's own"
    scale = 32.0

    def target_score(self, cos: Tensor, norm: Tensor | None = None) -> Tensor:
        return self.scale * (cos - 0.5)


assert_type(fl.margin_cross_entropy(x, w, y, margin=Steep()), Tensor)
