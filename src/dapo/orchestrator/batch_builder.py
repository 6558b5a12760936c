"""From admitted groups to mini-batches: the algorithm's pure functions, wired as the recipe says.

Consumes: groups with raw rewards, as the collector admitted them. Produces: a :class:`~dapo.records.TokenBatch` for the
learner to annotate (``build``), the same with advantages (``finish``), and one mini-batch for each optimizer step.
Advantages come last because a KL in the reward needs the log-probabilities of the reference policy. Waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch

from dapo.algorithm.advantage import OVER_THE_BATCH, Estimator, normalised, with_advantages
from dapo.algorithm.credit import with_turn_advantages
from dapo.algorithm.kl import AdaptiveKL, sample_kl
from dapo.algorithm.shaping import shape_rewards, subtract_kl
from dapo.config import Config
from dapo.config.user_parts import own_part
from dapo.errors import ConfigError
from dapo.orchestrator.ppo import ppo_columns
from dapo.records import Group, TokenBatch
from dapo.rollout.engine import SampleError
from dapo.training.mismatch import measure_mismatch
from dapo.training.packing import advantage_column, pack
from dapo.training.update_report import Mismatch, UpdateReport
from dapo.util.user_code import call_own


def own_advantage(config: Config, given: Estimator | None = None) -> Estimator | None:
    """The user's advantage: ``given``, or the function that the recipe names; None: it is one of ours.
    Raises ConfigError: there is no function of this name; when it is called, that it fails."""
    key = "algorithm.advantage.kind"
    own = own_part(config, key, given)
    if own is None:
        return None
    if config.algorithm.kind == "ppo":
        raise ConfigError(f"{key}: with algorithm.kind=ppo advantages come from the critic; leave the function out")

    def estimate(rewards: torch.Tensor, epsilon: float) -> torch.Tensor:
        found = call_own(key, lambda: torch.as_tensor(own(rewards, epsilon)).double())
        if found.shape != rewards.shape or not bool(found.isfinite().all()):
            raise ConfigError(f"{key}: {len(rewards)} rewards must get as many finite numbers, got {found.tolist()}")
        return found  # type: ignore[no-any-return]

    return estimate


OTHER_WEIGHTS = 1.0
"""Nats between engine and trainer, on average over the tokens of a step, that no rounding explains."""


class BatchBuilder:
    """The algorithm as one recipe configures it.

    Attributes:
        config: as it is in force.
        kl: the coefficient of a KL in the reward or in the loss, which adapts itself if the recipe has a target.
    """

    def __init__(self, config: Config, advantage: Estimator | None = None) -> None:
        """``advantage``: in place of the recipe's."""
        self.config, self._given, self._own = config, advantage, own_advantage(config, advantage)
        kl = config.algorithm.kl
        self.kl = AdaptiveKL(kl.coef, kl.target, kl.horizon)

    def use(self, config: Config) -> None:
        """Go on with other settings. An adaptive KL coefficient stays where it is, unless ``kl.coef`` is another."""
        was, kl = self.config.algorithm.kl, config.algorithm.kl
        if config.algorithm.advantage.kind != self.config.algorithm.advantage.kind:
            self._own = own_advantage(config, self._given)
        self.config = config
        if kl.coef != was.coef or was.target is None or kl.target is None:
            self.kl.coef = kl.coef
        self.kl.target, self.kl.horizon = kl.target, kl.horizon

    def build(self, groups: Sequence[Group]) -> TokenBatch:
        """The scored samples, flattened, with the mask that shaping leaves; no advantages yet."""
        return pack(map(self._shaped, groups))

    def shape(self, groups: Sequence[Group]) -> list[Group]:
        """The groups of a rollout with shaped rewards and advantages from their raw rewards, no KL in them."""
        shaped = list(map(self._shaped, groups))
        return self._with_advantages(shaped)

    def finish(
        self, groups: Sequence[Group], batch: TokenBatch, version: int | None = None
    ) -> tuple[list[Group], TokenBatch]:
        """The groups with shaped rewards and advantages, and the batch with ``advantages``.

        Args:
            groups: those that were given to :meth:`build`.
            batch: what it made of them, with the learner's columns.
            version: of the weights that these come from; None: they are not compared with what the engine says.

        Raises SampleError: the engine had other weights (``algorithm.proximal: recompute``).
        """
        mismatch = None if version is None else batch_mismatch(batch, version)
        if mismatch is not None and mismatch.mean > OTHER_WEIGHTS:
            raise SampleError(
                "the engine computes with other weights than the trainer's (lost at a sync or in its sleep): the "
                f"log-probabilities of {mismatch.tokens} tokens differ by {mismatch.mean:.3g} nats on average. Nothing "
                "was learned from them, and a resumed run samples anew; where that does not help, try another "
                "runtime.sync, rollout.cache_gib (then it does not sleep), or another rollout.engine"
            )
        shaped = list(map(self._shaped, groups))
        if self.config.algorithm.kind == "ppo":
            shaped, columns = ppo_columns(shaped, batch, self.config, self.kl.coef)
            return shaped, batch.with_columns(**columns)
        if self.config.algorithm.kl.mode == "reward":
            shaped = list(self._take_kl_off(shaped, batch))
        shaped = self._with_advantages(shaped)
        return shaped, batch.with_columns(advantages=advantage_column(shaped))

    def minibatches(self, batch: TokenBatch, start: int = 0) -> Iterator[tuple[int, TokenBatch]]:
        """The optimizer steps of one rollout with their numbers: mini-batches of whole groups, for the configured
        number of epochs. ``start``: leave out the first so many."""
        every = self.config.training.groups_per_update
        batches = (mini for _ in range(self.config.training.epochs_per_rollout) for mini in batch.minibatches(every))
        return islice(enumerate(batches), start, None)

    def count(self, batch: TokenBatch) -> int:
        """How many optimizer steps :meth:`minibatches` makes of a whole rollout."""
        training = self.config.training
        return training.epochs_per_rollout * math.ceil(batch.num_groups / training.groups_per_update)

    def observe(self, reports: Sequence[UpdateReport], batch: TokenBatch) -> None:
        """After the updates of a step: let an adaptive KL coefficient see the KL that they met.

        A KL that is not finite says nothing; the updates of that step were skipped.
        """
        pairs = [r.statistics["reference_kl"] for r in reports if "reference_kl" in r.statistics]
        tokens = sum(count for _, count in pairs)
        kl = sum(total for total, _ in pairs) / tokens if tokens else math.nan
        if math.isfinite(kl):
            self.kl.update(kl, len(np.unique(batch.sample_numbers)))

    def _shaped(self, group: Group) -> Group:
        algorithm = self.config.algorithm
        buffer = algorithm.overlong_buffer
        return shape_rewards(
            group,
            max_response_length=self.config.rollout.max_response_length,
            soft=buffer.enable,
            buffer_len=buffer.len,
            penalty_factor=buffer.penalty_factor,
            hard=algorithm.overlong_hard_punishment,
            filter_truncated=algorithm.overlong_filtering,
        )

    def _with_advantages(self, groups: Sequence[Group]) -> list[Group]:
        advantage = self.config.algorithm.advantage
        kind, epsilon = self._own or advantage.kind, advantage.epsilon
        found = [with_advantages(group, kind=kind, epsilon=epsilon) for group in groups]
        if self.config.environment.credit == "turn":
            return [with_turn_advantages(group, kind=kind, epsilon=epsilon) for group in found]
        return normalised(found, epsilon) if kind in OVER_THE_BATCH else found

    def _take_kl_off(self, groups: Sequence[Group], batch: TokenBatch) -> Iterator[Group]:
        """KL in the reward: beta times the KL summed over the sample, subtracted before the group normalisation."""
        parts = [len(sample.parts) for group in groups for sample in group.scored]
        episodes = np.repeat(np.arange(len(parts)), parts)  # the KL of an episode is that of all its sequences
        kl = sample_kl(
            torch.from_numpy(batch.proximal),
            torch.from_numpy(batch.columns["reference"]),
            self.config.algorithm.kl.estimator,
            mask=torch.from_numpy(batch.sampled),
            sample_ids=torch.from_numpy(episodes[batch.sample_ids]),
            num_samples=len(parts),
        ).tolist()
        for group in groups:
            count = len(group.scored)  # which is what was packed of it
            yield subtract_kl(group, kl[:count], coef=self.kl.coef)
            kl = kl[count:]


def batch_mismatch(batch: TokenBatch, version: int) -> Mismatch | None:
    """Engine against trainer over the whole batch, where its log-probabilities were computed anyway (``proximal``).
    None: the updates measure it on the first mini-batch.
    ``version``: of the weights then, which tokens must have been sampled under to count."""
    if "proximal" not in batch.columns:
        return None
    return measure_mismatch(batch, torch.from_numpy(batch.proximal), version)
