"""Typical calls as a type checker sees them; tests/test_types.py runs it over this file, and nobody runs the file."""
from typing import assert_type

import torch
from torch import Tensor, nn

import fusedloss as fl
from fusedloss.ctc import Alignment, CTCPosteriors
from fusedloss.decode import Hypotheses
from fusedloss.lattices import LabelFrames
from fusedloss.partial_fc import HeadStats
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
    assert_type(fl.linear_cross_entropy(x, w, y, matmul_dtype=torch.float8_e4m3fn), Tensor)
    assert_type(fl.linear_cross_entropy(x, w, y, matmul_dtype=torch.float8_e4m3fn, forward_dtype=torch.float8_e4m3fn), Tensor)
    assert_type(fl.chunked_linear_cross_entropy(x, w, y, accumulate="native", return_stats=True), Pair)
    assert_type(fl.recompute_linear_cross_entropy(x, w, y, filter_eps=2.0**-12), Tensor)
    assert_type(fl.sharded_linear_cross_entropy(x, w, y, backbone_reduction="mean", method="product"), Tensor)
    assert_type(fl.sharded_linear_log_probs(x, w, y, temperature=0.7, entropy=True), fl.LogProbs)
    assert_type(fl.sharded_linear_topk(x, w, 3, backbone_reduction="sum"), fl.TopK)
    assert_type(fl.sharded_linear_sample(x, w, top_p=0.9).tokens, Tensor)
    assert_type(fl.tiled_linear_cross_entropy(x, w, y, reduction="none"), Tensor)
    assert_type(fl.linear_cross_entropy(x, w, y, return_stats=True)[1].entropy, Tensor)


def adapters(model: nn.Linear) -> None:
    "A model keeps its type"
    assert_type(fl.integrations.transformers.patch(model, method="chunks", memory_budget=2**30), nn.Linear)
    assert_type(fl.integrations.transformers.causal_lm_loss(x, y, num_items_in_batch=3), Tensor)
    assert_type(fl.integrations.trl.patch(), tuple[str, ...])
    assert_type(fl.integrations.trl.unpatch(), tuple[str, ...])


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
    fl.PartialFC(16, 8, normalize=False, bias=True, sampler=fl.PopularitySampler(torch.ones(16), 4, each_row=True, log_q=False))
    optimizer = fl.RowSparse(torch.optim.AdamW, head.parameters(), lr=1e-3, mode="dense")
    assert_type(optimizer.step(), float | None)
    assert_type(optimizer.clip_grad_norm_(1.0), Tensor)
    optimizer.clip_grad_value_(1.0)
    fl.clip_grad_value_(head.parameters(), 1.0, foreach=True)
    fl.RowSparse(torch.optim.Adagrad, head.parameters(), lr=0.1, rowwise=True)
    assert_type(head.remove([3, 5], optimizer), Tensor)
    assert_type(head.logits(x), Tensor)
    assert_type(head.topk(x, 3).indices, Tensor)
    assert_type(fl.clip_grad_norm_(head.parameters(), 1.0, error_if_nonfinite=True), Tensor)
    fl.load_insightface(head, fl.save_insightface(head, "weights", 4, kind="weight"))
    fl.ignore_in_ddp(nn.Sequential(head))


def calls_of_modules(asked: bool) -> None:
    "A module's call has the type of its forward; a head's depends on `return_stats`"
    head, over_ranks = fl.PartialFC(16, 8, class_weight=torch.ones(16), reduction="none"), fl.ShardedPartialFC(16, 8, reduction="sum")
    for called in (head, over_ranks):
        assert_type(called(x, y), Tensor)
        assert_type(called(x, y, token_weight=torch.ones(4)), Tensor)
        assert_type(called(x), Tensor)
        assert_type(called(x, y, True), tuple[Tensor, HeadStats])
        assert_type(called(x, y, return_stats=True)[1].accuracy, Tensor)
        assert_type(called(x, y, return_stats=asked), Tensor | tuple[Tensor, HeadStats])
    assert_type(fl.LinearCrossEntropyLoss(8, 16)(x, y, token_weight=torch.ones(4)), Tensor)
    assert_type(fl.MemoryEfficientVocabOutput(nn.Parameter(w))(x, y), Tensor)
    assert_type(fl.BaselineSoftmax(nn.Parameter(w))(x), Tensor)
    assert_type(fl.BaselineSoftmaxNllLoss(nn.Parameter(w))(x, y), Tensor)
    assert_type(fl.CTCLoss()(x[:, None], y[None]), Tensor)
    assert_type(fl.NegativeSampler(0.5)(16), Tensor)
    assert_type(fl.PopularitySampler(torch.ones(16), 4)(2), Tensor)
    assert_type(fl.margins.ArcFace()(x[:, 0]), Tensor)
    assert_type(fl.margins.AdaFace()(x[:, 0], x[:, 1]), Tensor)
    assert_type(fl.margins.SubCenter(2)(x[:, 0]), Tensor)


def teachers() -> None:
    "A teacher's head, or lists of its classes"
    x, w = torch.zeros(4, 8), torch.zeros(16, 8)
    assert_type(fl.linear_divergence(x, nn.Linear(8, 16), x, w, kind="jsd", beta=0.1, reduction="none"), Tensor)
    assert_type(fl.linear_divergence(x, w, teacher_top=(torch.zeros(4, 1).long(), torch.zeros(4, 1)), top_rest="drop"), Tensor)
    assert_type(fl.sharded_linear_divergence(x, w, x, nn.Linear(8, 16), kind="reverse_kl", backbone_reduction="sum"), Tensor)
    assert_type(fl.linear_divergence(x, w, x, w, temperature=torch.ones(4), logit_scale=torch.tensor(1.0), teacher_logit_scale=2.0, n_classes=15), Tensor)


def pairs() -> None:
    "Features of two sides, and a scale that is learned or not"
    x, scale = torch.zeros(4, 8), torch.zeros(())
    assert_type(fl.contrastive_loss(x, x, 20.0), Tensor)
    assert_type(fl.contrastive_loss(x, x, scale.exp(), reduction="none", memory_budget=2**30), Tensor)
    assert_type(fl.contrastive_loss(x, x, 20.0, positives=y), Tensor)
    assert_type(fl.sigmoid_contrastive_loss(x, x, scale.exp(), -10.0, positives=y, reduction="sum"), Tensor)


def policies() -> None:
    "A temperature is a number or a tensor"
    hidden, layer, tokens = torch.zeros(3, 5), nn.Linear(5, 7), torch.zeros(3, dtype=torch.long)
    assert_type(fl.linear_log_probs(hidden, layer, tokens, temperature=torch.ones(3), entropy=True), fl.LogProbs)
    assert_type(fl.log_probs(layer(hidden), tokens, temperature=0.7).log_probs, Tensor)
    assert_type(fl.linear_sample(hidden, layer, top_k=3, top_p=0.9, generator=torch.Generator()).tokens, Tensor)
    assert_type(fl.linear_topk(hidden, layer, 3, temperature=torch.ones(3)), fl.TopK)
    assert_type(fl.linear_log_probs(hidden, layer, tokens[:, None].expand(3, 4)).log_probs, Tensor)


def paths() -> None:
    "Lengths are tensors, tuples or lists"
    log_probs, targets = torch.zeros(9, 2, 5), torch.ones(2, 3, dtype=torch.long)
    assert_type(fl.ctc_loss(log_probs, targets, (9, 9), [3, 2], reduction="none", gradient="exact"), Tensor)
    assert_type(fl.ctc_loss_with_logits(log_probs, targets, torch.tensor([9, 9]), (3, 2)), Tensor)
    assert_type(fl.linear_ctc_loss(log_probs, torch.zeros(7, 5), targets, (9, 9), (3, 2), memory_budget=2**20), Tensor)
    assert_type(fl.forced_align(log_probs, targets, (9, 9), (3, 2)), Alignment)
    assert_type(fl.ctc_posteriors(log_probs, targets, (9, 9), (3, 2)), CTCPosteriors)
    assert_type(fl.CTCLoss().forward(log_probs, targets), Tensor)
    assert_type(fl.ctc_loss(log_probs, targets, target_lengths=[3, 2]), Tensor)
    assert_type(fl.ctc_decode(log_probs, beam_size=4, k=2), Hypotheses)
    logits = torch.zeros(2, 9, 4, 5)
    assert_type(fl.transducer_loss(logits, targets, (9, 9), [3, 2], blank=0, reduction="sum"), Tensor)
    assert_type(fl.linear_transducer_loss(log_probs.mT, log_probs[:, :, :4].mT, torch.zeros(7, 9), targets, (9, 9), [3, 2], activation=None, durations=(0, 1)), Tensor)
    assert_type(fl.TransducerLoss(clamp=0.5)(logits, targets, (9, 9), [3, 2]), Tensor)
    assert_type(fl.transducer_align(logits, targets, (9, 9), [3, 2]), LabelFrames)
    assert_type(fl.transducer_decode(logits[:, :, 0], (9, 9), lambda labels, state: (state, state), lambda frames, outputs: frames), Hypotheses)
    assert_type(fl.transducer_decode(logits[:, :, 0], (9, 9), lambda labels, state: (state, state), lambda frames, outputs: frames, beam_size=4, k=2), Hypotheses)
    Ms, idx, ends = torch.zeros(4, 2, 3, 2), torch.zeros(3, 2, dtype=torch.long), torch.zeros(2, 3)
    assert_type(fl.logz(Ms, idx, ends, ends, fl.semirings.Max, method="loop"), Tensor)
    assert_type(fl.viterbi(Ms, idx, ends, ends), Paths)


class Steep(fl.margins.Margin):
    "A margin of one's own"
    scale = 32.0

    def target_score(self, cos: Tensor, norm: Tensor | None = None) -> Tensor:
        return self.scale * (cos - 0.5)


class PerClass(Steep):
    "A margin for each class"
    def target_score(self, cos: Tensor, norm: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        return self.scale * (cos - 0.1 * labels)


assert_type(fl.margin_cross_entropy(x, w, y, margin=Steep(), weight=torch.ones(16), token_weight=torch.ones(4)), Tensor)
assert_type(fl.PartialFC(16, 8, margin=PerClass())(x, y), Tensor)
