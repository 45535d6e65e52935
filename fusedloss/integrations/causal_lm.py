"""The loss of a causal language model, in the place that transformers keeps for a kernel of it."""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedloss.clusters import cross_entropy
from fusedloss.core.checks import expect
from fusedloss.losses import linear_cross_entropy


def causal_lm_loss(
    logits: Optional[Tensor] = None,  # [B,T,V]; None: of `hidden_states` and `lm_head_weight`
    labels: Optional[Tensor] = None,  # [B,T], of the same positions as the logits
    vocab_size: Optional[int] = None,  # V
    num_items_in_batch: Optional[Tensor | int] = None,  # the sum is divided by it; None: the mean
    ignore_index: int = -100,  # labels that count nothing
    shift_labels: Optional[Tensor] = None,  # [B,T], labels of the positions after
    hidden_states: Optional[Tensor] = None,  # [B,T,H]
    lm_head_weight: Optional[Tensor] = None,  # [V,H]
    lm_head_bias: Optional[Tensor] = None,  # [V]
    **kwargs: Any,  # `final_logit_softcapping` caps logits that are not given; others have no effect, as in transformers
) -> Tensor:  # float32 (float64 for float64), a scalar
    "The loss of transformers' `ForCausalLMLoss`, of logits or without them."
    if shift_labels is None:
        expect(isinstance(labels, Tensor), "labels", "a tensor", type(labels).__name__)
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    classes = lm_head_weight if logits is None else logits.mT
    expect(isinstance(classes, Tensor), "lm_head_weight", "a tensor where logits are None", None)
    v = classes.shape[-2]
    expect(vocab_size in (None, v), "vocab_size", v, vocab_size)
    o: dict[str, Any] = dict(ignore_index=ignore_index, reduction="mean" if num_items_in_batch is None else "sum")
    if logits is not None:
        loss = cross_entropy(logits.reshape(-1, v), shift_labels.reshape(-1).to(logits.device), **o)
    else:
        o |= dict(linear_bias=lm_head_bias, softcap=kwargs.get("final_logit_softcapping"))
        loss = linear_cross_entropy(hidden_states, lm_head_weight, shift_labels.to(lm_head_weight.device), **o)
    if num_items_in_batch is None:
        return loss
    return loss / torch.as_tensor(num_items_in_batch).to(loss.device)


causal_lm_loss.can_torch_compile = True
