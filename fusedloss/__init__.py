"Memory- and time-efficient losses over many classes, in PyTorch, Triton and CUDA."
__version__ = "0.1.0"

from fusedloss import margins, semirings
from fusedloss.baseline import BaselineSoftmax, BaselineSoftmaxNllLoss, baseline_linear_cross_entropy
from fusedloss.chunks import chunked_linear_cross_entropy
from fusedloss.iota import iota_cross_entropy, onehot_select, rewrite_gather
from fusedloss.kernels import CrossEntropyStats, cross_entropy
from fusedloss.losses import LinearCrossEntropyLoss, linear_cross_entropy, plan
from fusedloss.margins import margin_cross_entropy
from fusedloss.partial_fc import NegativeSampler, PartialFC, RowSparse
from fusedloss.recompute import recompute_linear_cross_entropy
from fusedloss.sharded import ShardedPartialFC, ShardedRowSparse, sharded_linear_cross_entropy
from fusedloss.tiles import MemoryEfficientVocabOutput, tiled_linear_cross_entropy

__all__ = ["BaselineSoftmax", "BaselineSoftmaxNllLoss", "CrossEntropyStats", "LinearCrossEntropyLoss",
           "MemoryEfficientVocabOutput", "NegativeSampler", "PartialFC", "RowSparse", "ShardedPartialFC", "ShardedRowSparse",
           "baseline_linear_cross_entropy", "chunked_linear_cross_entropy", "cross_entropy", "iota_cross_entropy", "linear_cross_entropy",
           "margin_cross_entropy", "margins", "onehot_select", "plan", "recompute_linear_cross_entropy",
           "rewrite_gather", "semirings", "sharded_linear_cross_entropy", "tiled_linear_cross_entropy"]
