"Memory- and time-efficient losses over many classes: cross entropies and log-probabilities, of logits or of hidden states without logits."

from .core.versions import check_torch

check_torch()  # before names that an older one lacks

from . import ahead as ahead, layers
from .clusters import cross_entropy
from .core.options import CrossEntropyStats
from .integrations.causal_lm import causal_lm_loss
from .logprobs import LogProbs, linear_log_probs, log_probs
from .losses import LinearCrossEntropyLoss, linear_cross_entropy

__all__ = [
    "linear_cross_entropy",
    "cross_entropy",
    "linear_log_probs",
    "log_probs",
    "causal_lm_loss",
    "LinearCrossEntropyLoss",
    "CrossEntropyStats",
    "LogProbs",
    "layers",
]
