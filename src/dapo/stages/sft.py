"""Supervised fine-tuning: imitate demonstrations, with the same trainer that reinforcement learning uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from dapo.training.packing import pack_demonstrations
from dapo.training.trainer import Trainer
from dapo.training.update_report import UpdateReport

Demonstration = tuple[Sequence[int], Sequence[int]]
"""Prompt ids and response ids, the stop token included."""


@dataclass(frozen=True, slots=True, eq=False)
class DemonstrationTokens:
    """What cross-entropy needs of R response tokens: ``weights`` ``[R]``, 1 / R each."""

    weights: torch.Tensor


def cross_entropy(
    logprobs: torch.Tensor, entropy: torch.Tensor, inputs: DemonstrationTokens
) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The objective of imitation: minus the weighted sum of log-probabilities, all ``[R]``."""
    return -(inputs.weights * logprobs).sum(), {}


def imitate(trainer: Trainer, demonstrations: Iterable[Demonstration], learning_rate: float) -> UpdateReport:
    """One optimizer step on the mean cross-entropy over all response tokens of ``demonstrations``."""
    batch = pack_demonstrations(demonstrations)
    tokens = batch.num_response_tokens
    trainer.set_learning_rate(learning_rate)
    inputs = DemonstrationTokens(torch.full((tokens,), 1.0 / max(tokens, 1), device=trainer.device))
    return trainer.update(batch, inputs, cross_entropy)
