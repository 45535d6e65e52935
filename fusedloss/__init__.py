"Memory- and time-efficient losses over many classes, in PyTorch, Triton and CUDA."
__version__ = "0.1.0"

from fusedloss.core.versions import check_torch

check_torch()  # before names that an older one lacks

from fusedloss import margins, semirings
from fusedloss import integrations as integrations
from fusedloss.baseline import BaselineSoftmax, BaselineSoftmaxNllLoss, baseline_linear_cross_entropy
from fusedloss.chunks import chunked_linear_cross_entropy
from fusedloss.clusters import cross_entropy
from fusedloss.contrast import contrastive_loss
from fusedloss.ctc import CTCLoss, ctc_loss, ctc_loss_with_logits, ctc_posteriors, forced_align
from fusedloss.decode import ctc_decode
from fusedloss.divergence import linear_divergence
from fusedloss.iota import iota_cross_entropy, onehot_select, rewrite_gather
from fusedloss.core.options import CrossEntropyStats
from fusedloss.core.popularity import PopularitySampler
from fusedloss.core.sampling import NegativeSampler
from fusedloss.linear_ctc import linear_ctc_loss
from fusedloss.logprobs import LogProbs, linear_log_probs, log_probs
from fusedloss.losses import LinearCrossEntropyLoss, linear_cross_entropy
from fusedloss.margins import margin_cross_entropy
from fusedloss.filter import recompute_linear_cross_entropy
from fusedloss.partial_fc import PartialFC
from fusedloss.plans import plan
from fusedloss.row_sparse import RowSparse, clip_grad_norm_, clip_grad_value_
from fusedloss.scans import logz, sample, viterbi
from fusedloss.sharded import sharded_linear_cross_entropy, sharded_linear_divergence, sharded_linear_log_probs
from fusedloss.sharded_heads import (
    ShardedPartialFC, ShardedRowSparse, ignore_in_ddp, load_insightface, save_insightface)
from fusedloss.tiles import MemoryEfficientVocabOutput, tiled_linear_cross_entropy

__all__ = ["BaselineSoftmax", "BaselineSoftmaxNllLoss", "CTCLoss", "CrossEntropyStats", "LinearCrossEntropyLoss",
           "LogProbs", "MemoryEfficientVocabOutput", "NegativeSampler", "PartialFC", "PopularitySampler", "RowSparse", "ShardedPartialFC",
           "ShardedRowSparse", "baseline_linear_cross_entropy", "chunked_linear_cross_entropy", "clip_grad_norm_", "clip_grad_value_",
           "contrastive_loss", "cross_entropy", "ctc_decode", "ctc_loss", "ctc_loss_with_logits", "ctc_posteriors", "forced_align",
           "ignore_in_ddp", "iota_cross_entropy", "linear_cross_entropy", "linear_ctc_loss", "linear_divergence",
           "linear_log_probs", "load_insightface", "log_probs", "logz", "margin_cross_entropy", "margins",
           "onehot_select", "plan", "recompute_linear_cross_entropy", "rewrite_gather", "sample", "save_insightface",
           "semirings", "sharded_linear_cross_entropy", "sharded_linear_divergence", "sharded_linear_log_probs", "tiled_linear_cross_entropy", "viterbi"]
