"What takes the place of a module's forward."

from typing import Any, Optional

from torch import nn, Tensor

from .integrations.causal_lm import causal_lm_loss


class ForCausalLMLoss(nn.Module):
    "transformers' `ForCausalLMLoss`, of logits or of hidden states."

    can_torch_compile = True

    def forward(
        self,
        logits: Optional[Tensor] = None,  # [B,T,V]; None: of `hidden_states` and `lm_head_weight`
        labels: Optional[Tensor] = None,  # [B,T]
        vocab_size: Optional[int] = None,  # V
        num_items_in_batch: Optional[Tensor | int] = None,
        ignore_index: int = -100,
        shift_labels: Optional[Tensor] = None,  # [B,T]
        hidden_states: Optional[Tensor] = None,  # [B,T,H]
        lm_head_weight: Optional[Tensor] = None,  # [V,H]
        lm_head_bias: Optional[Tensor] = None,  # [V]
        **kwargs: Any,
    ) -> Tensor:
        return causal_lm_loss(
            logits,
            labels,
            vocab_size,
            num_items_in_batch,
            ignore_index,
            shift_labels,
            hidden_states,
            lm_head_weight,
            lm_head_bias,
            **kwargs,
        )
