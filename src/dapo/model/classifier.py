"""Sequence classifiers: a score head on the backbone of a language model, which is what a reward model is."""

from __future__ import annotations

import copy
from typing import Any

import torch

from dapo.errors import ModelError
from dapo.model.adapters import has_adapter


def as_classifier(model: Any, pad_token_id: int) -> Any:
    """The sequence classifier of Transformers over the backbone of ``model``, which it shares.
    Raises ModelError: Transformers has none for this architecture."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(model.config)
    config.num_labels, config.pad_token_id = 1, pad_token_id
    with torch.device("meta"):
        try:
            found = AutoModelForSequenceClassification.from_config(config)
        except ValueError:
            raise ModelError(f"model.path: Transformers has no sequence classifier for {config.model_type}") from None
    backbone = model.base_model
    setattr(found, found.base_model_prefix, backbone)
    device = next(backbone.parameters()).device
    found.score = torch.nn.Linear(config.hidden_size, 1, bias=False, device=device, dtype=torch.float32)
    torch.nn.init.zeros_(found.score.weight)  # every text begins with the score 0
    found.generation_config, found.source_dtype = model.generation_config, getattr(model, "source_dtype", None)
    if has_adapter(model):  # its head belongs to the adapter
        found.peft_config = {name: copy.copy(one) for name, one in model.peft_config.items()}
        for one in found.peft_config.values():
            one.task_type = "SEQ_CLS"
    return found.eval()
