"""Supervised fine-tuning: imitate demonstrations, with the same trainer that reinforcement learning uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dapo.data.examples import Example, conversation
from dapo.model.placement import upload
from dapo.records import TokenBatch
from dapo.stages.batches import demonstrations as demonstration_batch
from dapo.stages.stage import PolicyStage, in_parts
from dapo.training.trainer import Trainer
from dapo.training.update_report import UpdateReport

Demonstration = tuple[Sequence[int], Sequence[int]]
"""Prompt ids and response ids, the stop token included."""


@dataclass(frozen=True, slots=True, eq=False)
class DemonstrationTokens:
    """What cross-entropy needs of R response tokens: ``weights`` ``[R]``, of N that are learned 1 / N each."""

    weights: torch.Tensor


def cross_entropy(
    logprobs: torch.Tensor, entropy: torch.Tensor, inputs: DemonstrationTokens
) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The objective of imitation: minus the weighted sum of log-probabilities, all ``[R]``."""
    return -(inputs.weights * logprobs).sum(), {}


def inputs_of(batch: TokenBatch, device: torch.device) -> DemonstrationTokens:
    """Of :func:`dapo.stages.batches.demonstrations`."""
    return DemonstrationTokens(upload(batch.columns["weights"], device))


def imitate(trainer: Trainer, demonstrations: Iterable[Demonstration], learning_rate: float) -> UpdateReport:
    """One optimizer step on the mean cross-entropy over all response tokens of ``demonstrations``."""
    batch = demonstration_batch([Example(tuple(p), (tuple(r),)) for p, r in demonstrations])
    trainer.set_learning_rate(learning_rate)
    return trainer.update(batch, inputs_of(batch, trainer.device), cross_entropy)


class SFT(PolicyStage):
    """The stage ``sft``: mean NLL over the response tokens of the whole mini-batch."""

    objective = staticmethod(cross_entropy)
    batch = staticmethod(demonstration_batch)
    inputs = staticmethod(inputs_of)

    def encode(self, row: Any) -> Sequence[Example]:
        return list(self.text.pieces(conversation(row, self.config.data)))

    def evaluate(self, trainer: Trainer, examples: Sequence[Example]) -> dict[str, float]:
        total, tokens = 0.0, 0
        for part in in_parts(examples):
            batch = demonstration_batch(part)
            total -= float(trainer.logprobs(batch).cpu().double()[torch.from_numpy(batch.mask)].sum())
            tokens += int(batch.mask.sum())
        return {"eval/loss": total / max(tokens, 1), "eval/rows": float(len(examples))}
