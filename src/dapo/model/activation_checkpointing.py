"""Activation checkpointing: of each decoder layer only its input is kept for the backward pass, and the layer computed
once more there.

Transformers' own works in training mode only, which models here are never in (dropout), and it knows nothing of the
attention's context: the backward pass of a GPU runs in a thread of autograd's, where nobody has set one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from dapo.model.attention import attention_context, current_context
from dapo.model.compiling import decoder_layers
from dapo.model.exact import parameters_of_now


def checkpoint_layers(model: Any) -> None:
    """Have the decoder layers of ``model`` recomputed in the backward pass, compiled ones by their compiled code.

    To be called after ``compile_layers``, which puts its own call in the same place. Copies of the model do without.
    """
    for layer in decoder_layers(model):
        layer._compiled_call_impl = _recomputed(layer, layer._compiled_call_impl or layer._call_impl)


def _recomputed(layer: Any, call: Any) -> Any:
    """``call`` of ``layer``, whose inner values are made again in the backward pass, with the attention context and the
    parameters of now."""

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        context, parameters = current_context(), parameters_of_now(layer)

        def run(*args: Any, **kwargs: Any) -> Any:
            with attention_context(context), parameters():
                return call(*args, **kwargs)

        # there is no dropout, so no state of a random generator to bring back
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed
