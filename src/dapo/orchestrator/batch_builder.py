"""From admitted groups to what the trainer takes: the algorithm's pure functions, wired as the recipe says.

Consumes: groups with raw rewards, as the buffer admitted them. Produces: :class:`Update` records, one per optimizer
step: a packed mini-batch and the inputs of the objective for its tokens. Waits for: a forward pass of the policy
(``proximal: recompute``) and of the reference policy (KL), if the recipe asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from dapo.algorithm.advantage import with_advantages
from dapo.algorithm.kl import AdaptiveKL, sample_kl
from dapo.algorithm.objective import DapoObjective, TokenInputs, importance_weights, token_weights
from dapo.algorithm.shaping import shape_rewards, subtract_kl
from dapo.config import Config
from dapo.records import Group
from dapo.training.mismatch import Mismatch, measure_mismatch
from dapo.training.packing import PackedBatch, pack
from dapo.training.policy import Policy
from dapo.training.trainer import UpdateReport


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One optimizer step: the mini-batch and the objective's inputs for its R response tokens."""

    batch: PackedBatch
    inputs: TokenInputs


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The groups of one rollout with shaped rewards and advantages, and their scored samples, packed.

    ``mismatch``: engine against trainer over the whole batch, where a forward pass was made anyway; None: the updates
    measure it on the first mini-batch.
    """

    groups: Sequence[Group]
    packed: PackedBatch
    mismatch: Mismatch | None


def shape(group: Group, config: Config) -> Group:
    """The group with shaped rewards and advantages from its raw rewards, no KL in them."""
    algorithm = config.algorithm
    buffer = algorithm.overlong_buffer
    shaped = shape_rewards(
        group,
        max_response_length=config.rollout.max_response_length,
        soft=buffer.enable,
        buffer_len=buffer.len,
        penalty_factor=buffer.penalty_factor,
        hard=algorithm.overlong_hard_punishment,
        filter_truncated=algorithm.overlong_filtering,
    )
    return _advantages(shaped, config)


def _advantages(group: Group, config: Config) -> Group:
    advantage = config.algorithm.advantage
    return with_advantages(group, kind=advantage.kind, epsilon=advantage.epsilon)


class BatchBuilder:
    """The algorithm as one recipe configures it."""

    def __init__(self, config: Config, policy: Policy) -> None:
        """``policy``: the policy that is trained. If the KL is asked for, a copy of it as it is now becomes the
        reference."""
        self._config = config
        self._policy = policy
        kl = config.algorithm.kl
        self._reference = policy.frozen_copy() if kl.mode != "off" else None
        self._adaptive = AdaptiveKL(kl.coef, kl.target, kl.horizon) if kl.target is not None else None

    def use(self, config: Config) -> None:
        """Go on with other settings. An adaptive KL coefficient stays where it is, unless ``kl.coef`` is another."""
        was, kl = self._config.algorithm.kl, config.algorithm.kl
        coef = kl.coef if self._adaptive is None or kl.coef != was.coef else self._adaptive.coef
        self._config = config
        self._adaptive = AdaptiveKL(coef, kl.target, kl.horizon) if kl.target is not None else None

    @property
    def kl_coef(self) -> float:
        return self._adaptive.coef if self._adaptive else self._config.algorithm.kl.coef

    def observe(self, reports: Sequence[UpdateReport], batch: Batch) -> None:
        """After the updates of a step: let an adaptive KL coefficient see the KL that they met.

        A KL that is not finite says nothing; the updates of that step were skipped.
        """
        if self._adaptive is None:
            return
        pairs = [r.statistics["reference_kl"] for r in reports if "reference_kl" in r.statistics]
        tokens = sum(count for _, count in pairs)
        kl = sum(total for total, _ in pairs) / tokens if tokens else math.nan
        if math.isfinite(kl):
            self._adaptive.update(kl, batch.packed.num_samples)

    @property
    def objective(self) -> DapoObjective:
        algorithm = self._config.algorithm
        return DapoObjective(
            clip_ratio_low=algorithm.clip_ratio_low,
            clip_ratio_high=algorithm.clip_ratio_high,
            clip_ratio_c=algorithm.clip_ratio_c,
            kl_coef=self.kl_coef,
            kl_estimator=algorithm.kl.estimator,
            kl_in_loss=algorithm.kl.mode == "loss",
        )

    def batch(self, groups: Sequence[Group], version: int) -> Batch:
        """Shape rewards, compute advantages, flatten, and run the forward passes that are asked for.
        ``version``: of the policy's weights, which tokens must have been sampled under to count in the mismatch."""
        shaped = [shape(group, self._config) for group in groups]
        packed = pack(shaped, self._policy.device)
        mismatch = None
        if self._config.proximal == "recompute":
            packed = replace(packed, proximal_logprobs=self._policy.logprobs(packed))
            mismatch = measure_mismatch(packed, _proximal(packed), version)
        if self._reference is not None:
            packed = replace(packed, reference_logprobs=self._reference.logprobs(packed))
        if self._config.algorithm.kl.mode == "reward":
            shaped = [_advantages(group, self._config) for group in self._take_kl_off(shaped, packed)]
            packed = replace(packed, advantages=pack(shaped, self._policy.device).advantages)
        return Batch(shaped, packed, mismatch)

    def updates(self, packed: PackedBatch, done: int = 0) -> Iterator[Update]:
        """The optimizer steps of one rollout: mini-batches of whole groups, for the configured number of epochs.
        ``done``: leave out the first so many."""
        every = self._config.training.groups_per_update
        batches = (batch for _ in range(self._config.training.epochs_per_rollout) for batch in packed.updates(every))
        for batch in islice(batches, done, None):
            yield Update(batch, self._inputs(batch))

    def count(self, packed: PackedBatch) -> int:
        """How many optimizer steps :meth:`updates` makes of a whole rollout."""
        training = self._config.training
        return training.epochs_per_rollout * math.ceil(packed.num_groups / training.groups_per_update)

    def state(self) -> dict[str, float]:
        """What a checkpoint has to keep."""
        return self._adaptive.state() if self._adaptive else {}

    def load_state(self, state: Mapping[str, float]) -> None:
        if self._adaptive:
            self._adaptive.load_state(state)

    def _take_kl_off(self, groups: Sequence[Group], packed: PackedBatch) -> Iterator[Group]:
        """KL in the reward: beta times the KL summed over the sample, subtracted before the group normalisation."""
        assert packed.reference_logprobs is not None
        kl = sample_kl(
            _proximal(packed),
            packed.reference_logprobs,
            self._config.algorithm.kl.estimator,
            mask=torch.ones_like(packed.mask),
            sample_ids=packed.sample_ids,
            num_samples=packed.num_samples,
        ).tolist()
        for group in groups:
            count = len(group.scored)  # which is what was packed of it
            yield subtract_kl(group, kl[:count], coef=self.kl_coef)
            kl = kl[count:]

    def _inputs(self, batch: PackedBatch) -> TokenInputs:
        algorithm, rollout = self._config.algorithm, self._config.rollout
        correction = algorithm.correction
        proximal = _proximal(batch)
        importance, mask = importance_weights(
            proximal,
            batch.behaviour_logprobs,
            kind=correction.kind,
            level=correction.level,
            cap=correction.cap,
            low=correction.low,
            high=correction.high,
            sample_ids=batch.sample_ids,
            mask=batch.mask,
        )
        weights = token_weights(
            algorithm.loss_agg_mode,
            mask=mask,
            sample_ids=batch.sample_ids,
            group_ids=batch.group_ids,
            num_samples=batch.num_samples,
            constant=algorithm.loss_constant or rollout.max_response_length,
        )
        return TokenInputs(
            behaviour_logprobs=batch.behaviour_logprobs,
            proximal_logprobs=proximal,
            advantages=batch.advantages,
            importance=importance,
            mask=mask,
            weights=weights,
            reference_logprobs=batch.reference_logprobs,
        )


def _proximal(batch: PackedBatch) -> torch.Tensor:
    """log pi_prox: recomputed where that was asked for, else the engine's."""
    return batch.behaviour_logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
