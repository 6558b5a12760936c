"""The best evaluation of a run so far, and whether better ones are still to be expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dapo.config import EvaluationConfig
from dapo.util.terminal import counted

_OWN = "eval/metric/best"
_LOSS = "eval/loss"
"""Of a stage: the lower the better."""


@dataclass(slots=True)
class EarlyStopping:
    """Follows a metric of the user's called ``best``, or accuracy, or reward where nothing says what is right."""

    config: EvaluationConfig
    metric: str = ""
    value: float = float("-inf")
    step: int = -1  # rollout steps done when it was reached; 0: before training
    evaluations_since: int = 0  # evaluations without an improvement
    observed: int = -1
    """Steps at the last evaluation. One that is made again, since a run was stopped after it, counts once."""

    def observe(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Take in an evaluation; whether it is the best one so far, by more than ``evaluation.min_improvement``."""
        if step <= self.observed:
            return step == self.step
        if (_OWN in metrics) != (self.metric == _OWN):  # it came or went: the values so far are another metric's
            self.forget()
        self.observed = step
        self.metric = self.metric or next(
            m for m in (_OWN, "eval/accuracy", "eval/reward", _LOSS, "eval/rows") if m in metrics
        )
        value = metrics.get(self.metric)
        gain = 0.0 if value is None else self.value - value if self.metric == _LOSS else value - self.value
        first = self.step < 0 and value is not None and math.isfinite(value)
        if value is not None and (first or gain > self.config.min_improvement):
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
            f"converged: {self.metric} has not {'fallen' if self.metric == _LOSS else 'risen'} by more than {least} in "
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
