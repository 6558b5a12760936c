"""How far engine and trainer disagree about the same tokens under the same weights.

Both compute log pi(token) of one policy, so any difference is numerical noise, or a fault: another temperature, other
token ids, weights that did not arrive. Only tokens of the trainer's own version count; once the weights have moved the
difference is what was learned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dapo.algorithm.kl import kl_estimate
from dapo.training.packing import PackedBatch


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over ``tokens`` tokens of d = log pi_engine - log pi_trainer, in nats. Adds up over parts of a batch."""

    tokens: int = 0
    absolute_sum: float = 0.0
    maximum: float = 0.0
    k3_sum: float = 0.0

    @property
    def mean(self) -> float:
        """Mean |d|; NaN if there was no token to compare."""
        return self.absolute_sum / self.tokens if self.tokens else math.nan

    @property
    def k3(self) -> float:
        """Mean of the k3 estimate of KL(engine || trainer), at tokens sampled from the engine; NaN as above."""
        return self.k3_sum / self.tokens if self.tokens else math.nan

    def exceeds(self, alarm: float) -> bool:
        """Whether mean |d| is above ``alarm``. True if log-probabilities were NaN, which compare with nothing."""
        return self.tokens > 0 and not self.mean <= alarm

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(
            self.tokens + other.tokens,
            self.absolute_sum + other.absolute_sum,
            # max() would drop a NaN or not, depending on the order
            math.nan if math.isnan(self.maximum + other.maximum) else max(self.maximum, other.maximum),
            self.k3_sum + other.k3_sum,
        )


def measure_mismatch(batch: PackedBatch, logprobs: torch.Tensor, version: int) -> Mismatch:
    """Compare on the response tokens that were sampled under ``version``.

    Args:
        batch: R response tokens, with the engine's log-probabilities.
        logprobs: ``[R]``, the trainer's, under the weights of ``version``; no gradient.
    """
    same = batch.versions == version
    engine, trainer = batch.behaviour_logprobs[same].double(), logprobs[same].double()
    if not len(engine):
        return Mismatch()
    absolute = (engine - trainer).abs()
    sums = torch.stack([absolute.sum(), absolute.max(), kl_estimate(engine, trainer, "k3").sum()])
    return Mismatch(len(engine), *sums.tolist())
