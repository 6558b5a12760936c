"""Scores in the place of log-probabilities: one number for each state that predicts a response token.

A reward model reads the last one of a text, a critic all of them. The trainer knows nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dapo.config import TrainingConfig
from dapo.errors import ModelError, first_line
from dapo.model.adapters import has_adapter
from dapo.model.attention import ATTENTION_NAME, register_attention
from dapo.model.classifier import as_classifier
from dapo.model.loading import check_supported, load_model, read_config
from dapo.training.parallel.holding import Replica
from dapo.training.policy import Policy
from dapo.training.trainer import Trainer

_ROWS_AT_ONCE = 2**16


def score_trainer(model: Any, config: TrainingConfig, dtype: torch.dtype, held: Replica | None = None) -> Trainer:
    """A trainer of a classifier with one output, from :func:`dapo.model.classifier.as_classifier`."""
    trainer = Trainer(model, config, 1.0, dtype, held=held)
    policy = trainer.policy
    trainer.policy = ScorePolicy(policy.model, 1.0, policy.tokens_per_micro_batch, dtype, policy.held)
    return trainer


@dataclass(frozen=True, slots=True, eq=False)
class ScorePolicy(Policy):
    """Scores in place of log-probabilities: one for each state, and no entropy."""

    def in_chunks(self, states: torch.Tensor) -> tuple[int, None]:
        return _ROWS_AT_ONCE, None

    def read(self, states: torch.Tensor, targets: torch.Tensor, head: None = None) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        with torch.autocast(states.device.type, enabled=False):
            scores = torch.nn.functional.linear(states.float(), self.model.score.weight).squeeze(-1)
        return scores, torch.zeros_like(scores)


def load_classifier(path: str, pad_token_id: int, trust_remote_code: bool, device: torch.device) -> Any:
    """A classifier with a head of zeros on the backbone of a reward model, or of a language model, in a folder.
    Raises ModelError: it cannot be read, or is of an architecture that is not supported."""
    config = read_config(path, trust_remote_code)
    if not (config.architectures or [""])[0].endswith("ForSequenceClassification"):
        model = load_model(path, torch.float32, trust_remote_code, device)
        if has_adapter(model):
            raise ModelError(f"{path}: holds an adapter, and a critic is trained whole; merge it into its base")
        return as_classifier(model, pad_token_id)
    from transformers import AutoModelForSequenceClassification, GenerationConfig

    register_attention()
    config.num_labels, config.architectures = 1, None  # as a policy it would be refused
    check_supported(config)
    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": ATTENTION_NAME, "config": config}
    try:
        model = AutoModelForSequenceClassification.from_pretrained(path, trust_remote_code=trust_remote_code, **how)
    except Exception as error:  # a damaged weight file raises whatever its reader raises
        raise ModelError(f"{path}: cannot be read: {first_line(error)}") from None
    torch.nn.init.zeros_(model.score.weight)
    model.generation_config, model.source_dtype = GenerationConfig(), torch.float32
    return model.to(device).eval()
