"""The two halves of a causal language model: the backbone (token ids to hidden states) and the output head.

Engine and trainer call the same two halves, so that their log-probabilities agree. The head's output is float32
(``model/head.py``), whatever type the backbone computes in; its one matrix product takes inputs of that type.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from dapo.model import exact
from dapo.model.attention import AttentionContext, attention_context


@dataclass(frozen=True, slots=True)
class Head:
    """The output head as plain tensors: ``logits = softcap(scale * (hidden @ weight.T + bias))``.

    Shapes: ``weight`` ``[V, d]``, ``bias`` ``[V]`` or None. ``softcap(z) = c tanh(z / c)``; None: off.
    For a head that is read chunk by chunk (:func:`dapo.model.head.for_chunks`): ``rounded`` is the weight as it goes
    into products, and to ``gradient`` the gradient of the weight is added, in place of autograd.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    rounded: torch.Tensor | None = None
    gradient: torch.Tensor | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[R, V]`` of hidden states ``[R, d]``."""
        return self.shaped(self.raw(hidden))

    def raw(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same before scale and soft cap."""
        if hidden.is_cuda and hidden.dtype == self.weight.dtype != torch.float32:
            logits = torch.mm(hidden, self.weight.T, out_dtype=torch.float32)  # no widened copy of the weight
        else:
            with products_of(hidden.dtype):
                logits = hidden.float() @ self.weight.float().T
        return logits if self.bias is None else logits + self.bias.float()

    def shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """With scale and soft cap; with neither of them as they are."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def in_float32(self) -> Head:
        """The same numbers, held in float32: for a head that is used often between two changes of the weights."""
        return replace(self, weight=self.weight.float(), bias=None if self.bias is None else self.bias.float())


@contextmanager
def products_of(dtype: torch.dtype) -> Iterator[None]:
    """Inside, products of float32 matrices on a CPU need no more of their inputs than ``dtype`` can hold.

    For inputs that are bfloat16 numbers this loses nothing: the products are exact and are summed in float32 as before.
    Processors with bfloat16 units are then several times faster; others go on as they did. The setting is the
    process's; a thread that multiplies something else meanwhile would be affected, so what is inside is kept short.
    """
    if dtype != torch.bfloat16 or exact.in_use():
        yield
        return
    with _lock:  # engine and trainer may be in here at once: the first one in sets it, the last one out puts it back
        _before.append(_before[0] if _before else _MATMUL.fp32_precision)
        _MATMUL.fp32_precision = "bf16"
    try:
        yield
    finally:
        with _lock:
            before = _before.pop()
            if not _before:
                _MATMUL.fp32_precision = before


_BACKEND: Any = torch.backends.mkldnn  # its stub lacks the setting
_MATMUL = _BACKEND.matmul
_lock = threading.Lock()
_before: list[str] = []  # the setting as it was, once for each thread that is inside


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
    node: Any = out.grad_fn  # its stub is wrong
    if node is not None:
        node.metadata["attention"] = context  # compiled attention looks it up in the backward pass
    return out[0] if packed else out
