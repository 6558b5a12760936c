"""How long a run trains: so many rollout steps, or so many minutes of them, whichever is over first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dapo.config import TrainingConfig
from dapo.util.terminal import counted


@dataclass(slots=True)
class Budget:
    """``training.steps`` and ``training.minutes``, and what has been used of them.

    Attributes:
        steps: rollout steps done.
        seconds: what they took, evaluations and files left out.
        last: seconds of the latest one.
    """

    config: TrainingConfig
    steps: int = 0
    seconds: float = 0.0
    last: float = 0.0

    def after(self, step_seconds: float) -> Budget:
        """The budget once another step, which took so long, is done."""
        return Budget(self.config, self.steps + 1, self.seconds + step_seconds, step_seconds)

    @property
    def used_up(self) -> bool:
        """Whether no further step is to begin: all are done, or another one like the latest would end too late."""
        return self.steps >= self.config.steps or self._out_of_minutes

    @property
    def spent(self) -> float:
        """The share of the run that is over, from 0 to 1: of its steps or of its minutes, whichever is more."""
        shares = [self.steps / self.config.steps if self.config.steps else 1.0]
        if self.config.minutes is not None:
            shares.append(self.seconds / (60 * self.config.minutes))
        return min(1.0, max(shares))

    @property
    def _out_of_minutes(self) -> bool:
        minutes = self.config.minutes
        return minutes is not None and self.steps > 0 and self.seconds + self.last > 60 * minutes

    def reason(self) -> str:
        """Why training stops, for people."""
        if self.steps >= self.config.steps:
            return "all steps are done"
        return (
            f"the minutes are over: {counted(self.steps, 'step')} took {self.seconds / 60:.1f} minutes, and another "
            f"one like the latest ({self.last:.0f} s) would end after training.minutes={self.config.minutes:g}"
        )

    def how_to_go_on(self) -> str:
        """The setting with which a resumed run would train on."""
        if self.steps >= self.config.steps:
            return f"training.steps={2 * self.steps}"
        return f"training.minutes={2 * (self.config.minutes or 0):g}"

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"seconds": self.seconds, "last": self.last}

    def load_state(self, steps: int, state: Mapping[str, float]) -> None:
        """Go on after ``steps`` from :meth:`state`."""
        self.steps, self.seconds, self.last = steps, state.get("seconds", 0.0), state.get("last", 0.0)
