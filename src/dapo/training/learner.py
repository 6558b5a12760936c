"""The learner: token batches in, annotated or trained on. Numpy at the door, torch arithmetic behind it.

Consumes: :class:`~dapo.records.TokenBatch` records. Produces: columns that advantages need (``annotate``), and for each
optimizer step a report (``update``). Holds what turns a batch into a loss: objective, importance weights, token weights
and the reference policy. Waits for: its one training thread, since cuBLAS keeps 32 MiB for each thread that ever
multiplied matrices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dapo.algorithm.kin import OBJECTIVES
from dapo.algorithm.kl import AdaptiveKL, KLEstimator
from dapo.algorithm.objective import (
    Stats,
    TokenInputs,
    importance_weights,
    interpolation_share,
    token_statistics,
    token_weights,
)
from dapo.config import AlgorithmConfig, Config
from dapo.config.user_parts import own_part
from dapo.errors import ConfigError
from dapo.model.placement import device_of, upload
from dapo.records import TokenBatch
from dapo.training.base_learner import BaseLearner, Watched
from dapo.training.critic import Critic
from dapo.training.objective_protocol import Objective, Unit, unit_of
from dapo.training.policy import Policy
from dapo.training.reference import reference_policy
from dapo.training.snapshot import LearnerSnapshot
from dapo.training.trainer import Trainer
from dapo.training.update_report import CRITIC_ONLY, OWN_STATISTIC, UpdateReport, no_update
from dapo.util.user_code import call_own


class LocalLearner(BaseLearner):
    """The learner of a run, in this process."""

    def __init__(
        self,
        trainer: Trainer,
        config: Config,
        kl: AdaptiveKL,
        objective: Objective | None = None,
        out_of_time: Callable[[], bool] = lambda: False,
        reference: Policy | None = None,
        critic: Critic | None = None,
    ) -> None:
        """
        Args:
            trainer: if the KL is asked for, a copy of its policy as it is now becomes the reference.
            kl: the coefficient of a KL in the loss; others may change it.
            objective: in place of the recipe's.
            out_of_time: as for :class:`~dapo.training.base_learner.BaseLearner`.
            reference: in place of a copy.
            critic: of PPO; None: there is none.
        """
        super().__init__(trainer, out_of_time)
        self._kl, self._given = kl, objective
        self._config, self._own = config, own_objective(config, objective)
        self._reference = reference
        if reference is None and config.algorithm.kl.mode != "off":
            self._reference = reference_policy(trainer.policy, config.algorithm.kl.reference)
        self._critic, self._step = critic, 0
        if critic is not None:
            self._trainers["critic"] = critic.trainer

    # --- the door, beside what all learners have ---------------------------------------------------------------------

    def use(self, config: Config) -> None:
        if config.algorithm.objective != self._config.algorithm.objective:
            self._own = own_objective(config, self._given)
        self._config = config
        self.trainer.use(config.training)
        if self._critic is not None:
            self._critic.use(config)

    def begin_step(self, step: int, spent: float) -> None:
        super().begin_step(step, spent)
        self._step = step

    async def snapshot(self) -> LearnerSnapshot:
        found, critic = await super().snapshot(), self._critic
        if critic is None:
            return found
        ahead = replace(critic)

        def write(folder: Path, stop_ids: Sequence[int]) -> None:
            found.write(folder, stop_ids)
            ahead.save(folder / "critic")

        return replace(found, write=write)

    async def load(self, folder: Path) -> None:
        await super().load(folder)
        if self._critic is not None:
            self._critic.load(folder / "critic")

    async def annotate(self, batch: TokenBatch) -> TokenBatch:
        return await self._compute(self.annotated, batch)

    # --- in its thread --------------------------------------------------------------------------------------------

    def annotated(self, batch: TokenBatch) -> TokenBatch:
        """With the columns ``proximal`` (``proximal: recompute``) and ``reference`` (KL), where they are asked for, and
        with ``updates_behind`` where groups may be stale: optimizer updates made since the weights of each token.
        PPO has ``values`` and ``after`` (:meth:`dapo.training.critic.Critic.columns`)."""
        columns: dict[str, Any] = {}
        if self._config.rollout.max_staleness:
            columns["updates_behind"] = self.trainer.updates_behind(batch.versions)
        if self._config.proximal == "recompute":
            columns["proximal"] = self.trainer.policy.logprobs(batch).cpu().numpy()
        if self._reference is not None:
            columns["reference"] = self._reference.logprobs(batch).cpu().numpy()
        if self._critic is not None:
            columns |= self._critic.columns(batch)
        return batch.with_columns(**columns)

    def _train(self, index: int, mini: TokenBatch) -> UpdateReport:
        """The critic's update and then the policy's, which the first steps of PPO may leave out."""
        if self._critic is None:
            return super()._train(index, mini)
        told = self._critic.learn(mini, self._out_of_time)
        if self._step < self._config.algorithm.critic.warmup_steps:
            report = no_update(mini, self.trainer.learning_rate, CRITIC_ONLY)
        else:
            report = super()._train(index, mini)
        self._critic.ahead = None
        return replace(report, statistics={**report.statistics, **told})

    # --- from a mini-batch to its loss ----------------------------------------------------------------------------

    @property
    def objective(self) -> Objective:
        """As the recipe configures it now."""
        if self._own is not None:
            return self._own
        algorithm = self._config.algorithm
        return OBJECTIVES[algorithm.objective](
            clip_ratio_low=algorithm.clip_ratio_low,
            clip_ratio_high=algorithm.clip_ratio_high,
            clip_ratio_c=algorithm.clip_ratio_c,
            kl_coef=self._kl.coef,
            kl_estimator=algorithm.kl.estimator,
            kl_in_loss=algorithm.kl.mode == "loss",
        )

    @property
    def watched_objective(self) -> Objective:
        """The same as it is trained on: with all statistics, and an eye on the time."""
        estimator = None if self._own is None else self._config.algorithm.kl.estimator
        return Watched(_Measured(self.objective, estimator), self._out_of_time)

    def inputs(self, mini: TokenBatch) -> TokenInputs:
        algorithm, longest = self._config.algorithm, self._config.rollout.max_response_length
        device = self.trainer.device
        found = objective_inputs(mini, algorithm, longest, device)
        if algorithm.proximal != "interpolate":
            return found
        before, now = mini.columns["updates_behind"], self.trainer.updates_behind(mini.versions)
        share = interpolation_share(upload(before, device), upload(now, device))
        return replace(found, proximal_share=share, correction=algorithm.correction.model_dump())


def own_objective(config: Config, given: Objective | None = None, trial: bool = False) -> Objective | None:
    """The user's objective: ``given``, or the one that the recipe names; None: it is one of ours. A class is called.
    Raises ConfigError: there is none of this name, its unit is unknown, or it fails on a few tokens (``trial``)."""
    own: Any = own_part(config, "algorithm.objective", given)
    if own is None:
        return None
    what = f"algorithm.objective: {config.algorithm.objective if given is None else given}"
    try:
        own = own() if isinstance(own, type) else own
        unit_of(own)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from None
    if trial:
        _try(own, what, config)
    return own  # type: ignore[no-any-return]


def _try(objective: Any, what: str, config: Config) -> None:
    """Raises ConfigError: an objective fails on 2 groups of 2 samples of 3 tokens, or returns what is none."""
    device = device_of(config)
    full = partial(torch.full, (12,), device=device)
    samples = torch.arange(4, device=device).repeat_interleave(3)
    given = TokenInputs(
        behaviour_logprobs=full(-1.0),
        proximal_logprobs=full(-1.0),
        advantages=1.0 - 2.0 * (samples % 2),
        importance=full(1.0),
        mask=full(True),
        weights=full(1 / 12),
        sample_ids=samples,
        group_ids=samples // 2,
        reference_logprobs=full(-1.0) if config.algorithm.kl.mode != "off" else None,
    )
    found = call_own(what, objective, full(-1.1, requires_grad=True), full(2.0, requires_grad=True), given)
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
        raise ConfigError(f"{what}: must return a loss and a dict of statistics, and returned {type(found).__name__}")
    loss, statistics = found
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
        raise ConfigError(f"{what}: its loss must be a tensor of one number, the sum over the tokens, with a gradient")
    for name, pair in statistics.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"{what}: a statistic needs a name of letters, digits, '_', '.' and '-', not {name!r}")
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(f"{what}: its statistic {name!r} must be a pair of tensors, a sum and a count")


@dataclass(frozen=True, slots=True)
class _Measured:
    """An objective that knows an interpolated pi_prox. ``estimator``: of the KL among the statistics that are measured
    whatever is minimised; None: it measures them itself."""

    objective: Objective
    estimator: KLEstimator | None

    @property
    def unit(self) -> Unit:
        return unit_of(self.objective)

    def __call__(self, logprobs: torch.Tensor, entropy: torch.Tensor, inputs: Any) -> tuple[torch.Tensor, Stats]:
        inputs = inputs.resolved(logprobs)
        if self.estimator is None:
            return self.objective(logprobs, entropy, inputs)
        loss, statistics = call_own("algorithm.objective", self.objective, logprobs, entropy, inputs)
        own = {f"{OWN_STATISTIC}{name}": pair for name, pair in statistics.items()}
        return loss, token_statistics(logprobs, entropy, inputs, self.estimator) | own


def objective_inputs(
    mini: TokenBatch, algorithm: AlgorithmConfig, max_response_length: int, device: torch.device
) -> TokenInputs:
    """Importance and weight of each token of a whole optimizer mini-batch, with what its columns say, on ``device``.
    ``max_response_length``: the constant of ``loss_agg_mode: constant``, if the recipe names none."""
    columns = {name: upload(values, device) for name, values in mini.columns.items()}
    behaviour = upload(mini.behaviour_logprobs, device)
    proximal = columns.get("proximal", behaviour)
    sample_ids = upload(mini.sample_ids, device)
    mask, correction = upload(mini.mask, device), algorithm.correction.model_dump()  # its keys are the parameters
    importance, mask = importance_weights(proximal, behaviour, sample_ids=sample_ids, mask=mask, **correction)
    return TokenInputs(
        behaviour_logprobs=behaviour,
        proximal_logprobs=proximal,
        advantages=columns["advantages"],
        importance=importance,
        mask=mask,
        weights=loss_weights(mini, algorithm, max_response_length, mask),
        sample_ids=sample_ids,
        group_ids=upload(mini.group_ids, device),
        reference_logprobs=columns.get("reference"),
    )


def loss_weights(
    mini: TokenBatch, algorithm: AlgorithmConfig, max_response_length: int, mask: torch.Tensor
) -> torch.Tensor:
    """``[R]``: :func:`~dapo.algorithm.objective.token_weights` as the recipe has them. An episode counts as one sample,
    however many sequences it has. ``mask``: ``[R]``, the loss tokens."""
    numbers = mini.sample_numbers
    return token_weights(
        algorithm.loss_agg_mode,
        mask=mask,
        sample_ids=upload(np.repeat(numbers, mini.response_lengths), mask.device),
        group_ids=upload(mini.group_ids, mask.device),
        num_samples=len(np.unique(numbers)),
        constant=algorithm.loss_constant or max_response_length,
    )
