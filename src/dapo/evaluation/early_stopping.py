"""The best evaluation of a run so far, and whether better ones are still to be expected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dapo.config import EvaluationConfig
from dapo.errors import ConfigError
from dapo.util.terminal import counted


@dataclass(slots=True)
class EarlyStopping:
    """Follows ``evaluation.best``, or ``eval/accuracy``, or ``eval/reward`` where no right and wrong is known."""

    config: EvaluationConfig
    metric: str = ""
    value: float = float("-inf")
    step: int = -1  # rollout steps done when it was reached; 0: before training
    evaluations_since: int = 0  # evaluations without an improvement
    observed: int = -1
    """Steps at the last evaluation. One that is made again, since a run was stopped after it, counts once."""

    def observe(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Take in an evaluation; whether it is the best one so far, by more than ``evaluation.min_improvement``.
        Raises ConfigError: there is no metric ``evaluation.best``."""
        if step <= self.observed:
            return step == self.step
        self.observed = step
        wanted = (
            [self.config.best, f"metric/{self.config.best}"] if self.config.best else ["accuracy", "reward", "rows"]
        )
        self.metric = self.metric or next((f"eval/{name}" for name in wanted if f"eval/{name}" in metrics), "")
        if not self.metric:
            raise ConfigError(f"evaluation.best: there is no eval/{wanted[0]}; an evaluation has {', '.join(metrics)}")
        value = metrics.get(self.metric)
        if value is not None and value > self.value + (self.config.min_improvement if self.step >= 0 else 0):
            self.value, self.step, self.evaluations_since = float(value), step, 0
            return True
        self.evaluations_since += 1
        return False

    @property
    def converged(self) -> bool:
        """``evaluation.patience`` evaluations in a row brought nothing better."""
        return self.config.patience is not None and self.evaluations_since >= self.config.patience

    def reason(self) -> str:
        least = f"evaluation.min_improvement={self.config.min_improvement:g}"
        return (
            f"converged: {self.metric} has not risen by more than {least} in "
            f"{counted(self.evaluations_since, 'evaluation')} (evaluation.patience); the best was {self.value:.4g} "
            f"after step {self.step}"
        )

    def forget(self) -> None:
        """The next evaluation is the first: those so far were of other rows, or by other settings."""
        self.metric, self.value, self.step, self.evaluations_since, self.observed = "", float("-inf"), -1, 0, -1

    def state(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "config"}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
