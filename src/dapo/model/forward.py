"""The two halves of a causal language model: the backbone (token ids to hidden states) and the output head.

Engine and trainer call the same two halves, so that their log-probabilities agree: the head always computes in
float32 (``model/head.py``), whatever type the backbone computes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dapo.model.attention import AttentionContext, attention_context


@dataclass(frozen=True, slots=True)
class Head:
    """The output head as plain tensors: ``logits = softcap(scale * (hidden @ weight.T + bias))``.

    Shapes: ``weight`` ``[V, d]``, ``bias`` ``[V]`` or None. ``softcap(z) = c tanh(z / c)``; None: off.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[R, V]`` of hidden states ``[R, d]``."""
        logits = hidden.float() @ self.weight.float().T
        if self.bias is not None:
            logits = logits + self.bias.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def output_head(model: Any) -> Head:
    """The head of ``model``; its tensors are the model's own parameters."""
    linear = model.get_output_embeddings()
    return Head(
        weight=linear.weight,
        bias=getattr(linear, "bias", None),
        softcap=getattr(model.config, "final_logit_softcapping", None),
    )


def hidden_states(
    model: Any, token_ids: torch.Tensor, position_ids: torch.Tensor, context: AttentionContext
) -> torch.Tensor:
    """The backbone's last hidden states.

    Args:
        model: a causal language model from :func:`dapo.model.loading.load_model`.
        token_ids, position_ids: ``[T]`` (one packed row) or ``[B, T]``.
        context: how these tokens attend.

    Returns:
        ``[T, d]`` or ``[B, T, d]``.
    """
    packed = token_ids.dim() == 1
    if packed:
        token_ids, position_ids = token_ids.unsqueeze(0), position_ids.unsqueeze(0)
    with attention_context(context):
        out: torch.Tensor = model.base_model(
            input_ids=token_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
    return out[0] if packed else out
