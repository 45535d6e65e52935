"Memory- and time-efficient losses over many classes, in PyTorch, Triton and CUDA."
__version__ = "0.1.0"

from fusedloss.baseline import BaselineSoftmax, BaselineSoftmaxNllLoss, baseline_linear_cross_entropy
from fusedloss.tiles import MemoryEfficientVocabOutput, tiled_linear_cross_entropy

__all__ = ["BaselineSoftmax", "BaselineSoftmaxNllLoss", "MemoryEfficientVocabOutput", "baseline_linear_cross_entropy",
           "tiled_linear_cross_entropy"]
