"""What an optimizer update reports. Numbers and numpy arrays only: it may come from another process."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from dapo.records import FloatArray, TokenBatch

CRITIC_ONLY = "the critic alone is trained (algorithm.critic.warmup_steps)"
OWN_STATISTIC = "objective/"
"""Before the names of statistics of the user's objective, so that none takes the place of ours."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over ``tokens`` tokens of d = log pi_engine - log pi_trainer, in nats. Adds up over parts of a batch."""

    tokens: int = 0
    absolute_sum: float = 0.0
    maximum: float = 0.0
    k3_sum: float = 0.0
    tail: float = 0.0
    """Tokens with pi_trainer / pi_engine outside [0.9, 1.1]."""

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
            self.tail + other.tail,
        )


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One optimizer step. ``skipped`` says why the weights were left alone; None: they were updated.

    ``loss``, ``grad_norm`` (before clipping) and ``statistics`` (name -> (sum, count)) are of the whole mini-batch.
    ``mismatch`` covers its tokens if it is the first update since the weights were published. Sizes are in tokens,
    times in seconds, on CUDA waited for. ``logprobs`` (float32) and ``entropy`` (float16) are of its response tokens,
    ``[R]``, before the update. ``logprobs`` are None where the weights are no longer those that were sampled from,
    both where nothing was computed.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: str | None
    tokens: int
    response_tokens: int
    loss_tokens: int
    micro_batches: int
    statistics: dict[str, tuple[float, float]]
    mismatch: Mismatch
    seconds_forward: float
    seconds_backward: float
    seconds_optimizer: float
    logprobs: FloatArray | None = field(default=None, compare=False, repr=False)
    entropy: Any = field(default=None, compare=False, repr=False)
    computed_tokens: int = 0
    """Those that went through the model: a prompt that samples share does so once. 0: of an older version."""


def no_update(batch: TokenBatch, learning_rate: float, why: str) -> UpdateReport:
    """Of a mini-batch from which the policy learned nothing, as it was not meant to."""
    names = "loss grad_norm seconds_forward seconds_backward seconds_optimizer"
    nothing: dict[str, Any] = dict.fromkeys(names.split(), 0.0)
    return UpdateReport(
        **nothing,
        learning_rate=learning_rate,
        skipped=why,
        tokens=batch.num_tokens,
        response_tokens=batch.num_response_tokens,
        loss_tokens=int(batch.mask.sum()),
        micro_batches=0,
        statistics={},
        mismatch=Mismatch(),
    )
