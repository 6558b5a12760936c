"""The whole tree: its sections together, and what follows from several of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from dapo.config.checks import _conflicts
from dapo.config.reward import MathReward, MonitorConfig, RewardConfig
from dapo.config.section import Problems, Section
from dapo.config.sections import (
    AlgorithmConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    RuntimeConfig,
    TrainingConfig,
)


class Config(Section):
    """A whole recipe."""

    seed: int = Field(0, ge=0, lt=2**32)
    """Everything random follows from it."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = MathReward()
    monitor: MonitorConfig = MonitorConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    run: RunConfig = RunConfig()

    @field_validator("reward", mode="before")
    @classmethod
    def _math_unless_said(cls, value: Any) -> Any:
        return {"kind": "math"} | value if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        problems = list(_conflicts(self))
        if problems:
            raise Problems(problems)
        return self

    @property
    def proximal(self) -> Literal["engine", "recompute"]:
        """`algorithm.proximal` with `auto` resolved."""
        if self.algorithm.proximal != "auto":
            return self.algorithm.proximal
        wants_recompute = self.rollout.max_staleness > 0 or self.algorithm.correction.kind != "none"
        return "recompute" if wants_recompute else "engine"

    @property
    def evaluated_length(self) -> int:
        """Longest response of an evaluation, in tokens."""
        return self.evaluation.max_response_length or self.rollout.max_response_length

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in one rollout step, all epochs counted."""
        per_epoch = self.rollout.prompts_per_step // self.training.groups_per_update
        return per_epoch * self.training.epochs_per_rollout
