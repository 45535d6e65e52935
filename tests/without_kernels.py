"""Each public function once, forward and backward, where there is no Triton, no CuPy, no compiler and nothing of POSIX: as on Windows."""
import os
import tempfile

import torch

from hidden_modules import hide

hide({"triton", "cupy", "cuda", "fcntl", "resource", "pwd", "grp", "termios"})
os.environ["PATH"] = ""  # no compiler
os.environ["USERNAME"] = "somebody"  # as Windows has it, where PyTorch asks for one

import fusedloss as fl  # noqa: E402

N, V, H, T = 6, 11, 8, 7
y, graph = torch.randint(V, (N,)), torch.tensor([[0, -1], [1, 0], [2, 1]])
targets, frames, lengths = torch.randint(1, V, (N, 3)), torch.full((N,), T), torch.full((N,), 3)
ctc = targets, frames, lengths
leaf = lambda *size, dtype=torch.float32: torch.randn(size).to(dtype).requires_grad_()  # noqa: E731


def head(loss, **how):
    "Of x, w and y"
    return lambda dtype: loss(leaf(N, H, dtype=dtype), leaf(V, H, dtype=dtype), y, **how)


def module(make):
    "Of x and y, with a weight of its own"
    return lambda dtype: make().to(dtype)(leaf(N, H, dtype=dtype), y)


def logits(loss, *size, **how):
    "Of logits"
    return lambda dtype: loss(leaf(*size, dtype=dtype), **how)


def paths(find):
    "Of edges' scores; nothing to differentiate"
    def run(dtype):
        found = find(torch.randn(T, N, 3, 2), graph, torch.zeros(N, 3), torch.zeros(N, 3))
        assert found.states.shape == (N, T + 1)
        return leaf()
    return run


def row_sparse(kind, partial_fc):
    "A step"
    def run(dtype):
        made = partial_fc()
        made(leaf(N, H), y).backward()
        kind(torch.optim.SGD, made.parameters(), lr=0.1).step()
        return leaf()
    return run


def decoded(dtype):
    "The best path, and a beam's; nothing to differentiate"
    log_probs = torch.randn(T, N, V).log_softmax(-1).to(dtype)
    for beam in (1, 3):
        assert (fl.ctc_decode(log_probs, frames, beam_size=beam).lengths <= T).all()
    return leaf()


def named(log_probs, dtype):
    "All that may be asked of log-probabilities"
    found = log_probs(dtype, entropy=True, mean_logits=True, target_rank=True, temperature=torch.rand(N) + 0.5)
    assert isinstance(found, fl.LogProbs) and found.target_rank.shape == found.mean_logits.shape == (N,)
    return found.log_probs + found.entropy


def clipped(dtype):
    "Gradients of rows beside others"
    layer, rows = torch.nn.Linear(H, H), sampled()
    rows(layer(leaf(N, H)), y).backward()
    fl.clip_grad_value_([*layer.parameters(), *rows.parameters()], 0.2)
    return fl.clip_grad_norm_([*layer.parameters(), *rows.parameters()], 0.1) + leaf()


def through_files(dtype):
    "A head's weight, written and read"
    ours, theirs = (fl.PartialFC(V, H) for _ in "ab")
    with tempfile.TemporaryDirectory() as folder:
        fl.save_insightface(ours, folder, 3)
        fl.load_insightface(theirs, folder)
    assert torch.equal(ours.weight, theirs.weight)
    return leaf()


def drawn(dtype):
    "Classes of a step"
    assert len(fl.NegativeSampler(0.5)(100)) >= 50
    return leaf()


weight = lambda: torch.nn.Parameter(torch.randn(V, H))  # noqa: E731
sampled = lambda: fl.PartialFC(V, H, sample_rate=0.5)  # noqa: E731
LOSSES = {
    "BaselineSoftmax": lambda dtype: fl.BaselineSoftmax(weight())(leaf(N, H), y)[0],
    "BaselineSoftmaxNllLoss": lambda dtype: fl.BaselineSoftmaxNllLoss(weight())(leaf(N, H), y),
    "TransducerLoss": lambda dtype: fl.TransducerLoss()(leaf(N, T, 4, V + 1), *ctc),
    "transducer_align": lambda dtype: (fl.transducer_align(torch.randn(N, T, 4, V + 1), *ctc), leaf())[1],
    "transducer_decode": lambda dtype: ([fl.transducer_decode(torch.randn(N, T, V), frames, lambda labels, state: (torch.zeros(1 if labels is None else len(labels), V), ()), torch.add, beam_size=b) for b in (1, 3)], leaf())[1],
    "transducer_loss": lambda dtype: fl.transducer_loss(leaf(N, T, 4, V + 1, dtype=dtype), *ctc),
    "CTCLoss": lambda dtype: fl.CTCLoss(logits=True)(leaf(T, N, V), *ctc),
    "LinearCrossEntropyLoss": module(lambda: fl.LinearCrossEntropyLoss(H, V)),
    "MemoryEfficientVocabOutput": lambda dtype: fl.MemoryEfficientVocabOutput(weight())(leaf(N, H), y),
    "PartialFC": lambda dtype: sampled()(leaf(N, H), y),
    "LogProbs": lambda dtype: named(lambda dtype, **how: head(fl.linear_log_probs, batch_invariant=True, **how)(dtype), dtype),
    "NegativeSampler": drawn,
    "PopularitySampler": lambda dtype: fl.PartialFC(V, H, normalize=False, bias=True, sampler=fl.PopularitySampler(torch.ones(V), 3))(leaf(N, H), y),
    "RowSparse": row_sparse(fl.RowSparse, sampled),
    "ShardedPartialFC": lambda dtype: fl.ShardedPartialFC(V, H, sample_rate=0.5)(leaf(N, H), y),
    "ShardedRowSparse": row_sparse(fl.ShardedRowSparse, lambda: fl.ShardedPartialFC(V, H, sample_rate=0.5)),
    "TopK": head(lambda x, w, y: fl.linear_topk(x, w, V).lse.sum()),
    "baseline_linear_cross_entropy": head(fl.baseline_linear_cross_entropy),
    "chunked_linear_cross_entropy": head(fl.chunked_linear_cross_entropy, chunk_size=4),
    "clip_grad_norm_": clipped,
    "clip_grad_value_": clipped,
    "ctc_decode": decoded,
    "cross_entropy": lambda dtype: fl.cross_entropy(leaf(N, V, dtype=dtype), y) + fl.cross_entropy(1 * leaf(N, V), y, inplace=True),
    "ctc_loss": lambda dtype: fl.ctc_loss(leaf(T, N, V).log_softmax(-1), *ctc),
    "ctc_posteriors": lambda dtype: (fl.ctc_posteriors(torch.randn(T, N, V).log_softmax(-1), *ctc), leaf())[1],
    "forced_align": lambda dtype: (fl.forced_align(torch.randn(T, N, V).log_softmax(-1), *ctc), leaf())[1],
    "ctc_loss_with_logits": lambda dtype: fl.ctc_loss_with_logits(leaf(T, N, V, dtype=dtype), *ctc),
    "linear_sample": lambda dtype: (fl.linear_sample(torch.randn(N, H), torch.randn(V, H), top_k=3), leaf())[1],
    "ignore_in_ddp": lambda dtype: fl.ignore_in_ddp(fl.PartialFC(V, H))(leaf(N, H), y),
    "contrastive_loss": lambda dtype: fl.contrastive_loss(leaf(N, H, dtype=dtype), leaf(N, H, dtype=dtype), 5.0),
    "sigmoid_contrastive_loss": lambda dtype: fl.sigmoid_contrastive_loss(leaf(N, H, dtype=dtype), leaf(V, H, dtype=dtype), 5.0, -2.0, positives=y),
    "iota_cross_entropy": lambda dtype: fl.iota_cross_entropy(leaf(N, V, dtype=dtype), y),
    "linear_cross_entropy": lambda dtype: sum(head(fl.linear_cross_entropy, method=m)(dtype).float()
                                              for m in ("auto", "eager", "chunks", "recompute", "tiles")),
    "linear_divergence": head(lambda x, w, y: fl.linear_divergence(x, w, x.detach() + 1, w.detach(), kind="jsd")),
    "linear_log_probs": lambda dtype: named(lambda dtype, **how: head(fl.linear_log_probs, **how)(dtype), dtype),
    "linear_topk": head(lambda x, w, y: fl.linear_topk(x, w, 2).log_probs.sum()),
    "load_insightface": through_files,
    "log_probs": lambda dtype: named(lambda dtype, **how: fl.log_probs(leaf(N, V, dtype=dtype), y, **how), dtype),
    "linear_ctc_loss": lambda dtype: fl.linear_ctc_loss(leaf(T, N, H, dtype=dtype), leaf(V, H, dtype=dtype), *ctc),
    "linear_transducer_loss": lambda dtype: fl.linear_transducer_loss(leaf(N, T, H, dtype=dtype), leaf(N, 4, H, dtype=dtype), leaf(V + 1, H, dtype=dtype), *ctc),
    "logz": lambda dtype: fl.logz(leaf(T, N, 3, 2), graph, leaf(N, 3), leaf(N, 3)).sum(),
    "onehot_select": lambda dtype: fl.onehot_select(leaf(N, V, dtype=dtype), y),
    "plan": lambda dtype: (fl.plan(N, V, H, dtype), leaf())[1],
    "margin_cross_entropy": head(fl.margin_cross_entropy, margin=fl.margins.CosFace(0.4, 8.0)),
    "recompute_linear_cross_entropy": lambda dtype: sum(head(fl.recompute_linear_cross_entropy, filter_eps=eps)(dtype) for eps in (None, 0.01)),
    "sample": paths(fl.sample),
    "save_insightface": through_files,
    "sharded_linear_cross_entropy": head(fl.sharded_linear_cross_entropy),
    "sharded_linear_divergence": head(lambda x, w, y: fl.sharded_linear_divergence(x, w, x.detach() + 1, w.detach(), kind="jsd")),
    "sharded_linear_log_probs": head(lambda x, w, y: fl.sharded_linear_log_probs(x, w, y).log_probs.sum()),
    "sharded_linear_sample": lambda dtype: (fl.sharded_linear_sample(torch.randn(N, H), torch.randn(V, H), top_k=3), leaf())[1],
    "sharded_linear_topk": head(lambda x, w, y: fl.sharded_linear_topk(x, w, 2).log_probs.sum()),
    "tiled_linear_cross_entropy": head(fl.tiled_linear_cross_entropy),
    "viterbi": paths(fl.viterbi),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    for name, loss in LOSSES.items():
        for dtype in (torch.float32, torch.bfloat16):
            value = loss(dtype).float().sum()
            assert value.isfinite() and value.requires_grad, name
            value.backward()
    print(*LOSSES)
