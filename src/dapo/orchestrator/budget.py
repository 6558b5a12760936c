"""How long a run trains: so many rollout steps, minutes of them, samples or tokens, whichever are over first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dapo.config import TrainingConfig
from dapo.config.plan import UNBOUNDED
from dapo.util.terminal import counted


@dataclass(slots=True)
class Budget:
    """``training.steps``, ``minutes``, ``samples`` and ``tokens``, and what has been used of them.

    Attributes:
        steps: rollout steps done.
        seconds: what they took, evaluations and files left out.
        last: seconds of the latest one.
        samples, tokens: drawn so far, or trained on in a stage; ``last_samples`` and ``last_tokens`` of the latest one.
    """

    config: TrainingConfig
    steps: int = 0
    seconds: float = 0.0
    last: float = 0.0
    samples: int = 0
    last_samples: int = 0
    tokens: int = 0
    last_tokens: int = 0

    def after(self, step_seconds: float, samples: int = 0, tokens: int = 0) -> Budget:
        """The budget once another step, which took so much, is done."""
        seconds, drawn, written = self.seconds + step_seconds, self.samples + samples, self.tokens + tokens
        return Budget(self.config, self.steps + 1, seconds, step_seconds, drawn, samples, written, tokens)

    @property
    def used_up(self) -> bool:
        """Whether no further step is to begin: all are done, or another one like the latest would be too much."""
        return self.steps >= self.config.steps or self._over is not None

    @property
    def spent(self) -> float:
        """The share of the run that is over, from 0 to 1: of its steps or of another limit, whichever is more."""
        shares = [self.steps / self.config.steps if self.config.steps else 1.0]
        shares += [used / most for _, used, _, most in self._limits()]
        return min(1.0, max(shares))

    @property
    def _over(self) -> str | None:
        """The limit that another step would go beyond; None: there is none. A first step is always made."""
        over = (name for name, used, last, most in self._limits() if self.steps and used + last > most)
        return next(over, None)

    def shown(self) -> dict[str, tuple[str, float, float]]:
        """Under ``budget``, where another budget ends the run in place of its steps, the one that is over first: its
        key, how much of it is used, and how much there is."""
        if self.config.steps < UNBOUNDED:
            return {}
        units = {"minutes": 60.0}
        limits = [(key, used / units.get(key, 1), most / units.get(key, 1)) for key, used, _, most in self._limits()]
        return {"budget": max(limits, key=lambda one: one[1] / one[2])} if limits else {}

    def _limits(self) -> Iterator[tuple[str, float, float, float]]:
        """Of each limit that is set its key, what is used of it, by the latest step, and what there is."""
        used = {"minutes": (self.seconds, self.last, 60.0), "samples": (self.samples, self.last_samples, 1.0)}
        used["tokens"] = (self.tokens, self.last_tokens, 1.0)
        for name, (so_far, last, unit) in used.items():
            if (most := getattr(self.config, name)) is not None:
                yield name, so_far, last, unit * most

    def reason(self) -> str:
        """Why training stops, for people."""
        over = self._over
        if self.steps >= self.config.steps or over is None:
            return "all steps are done"
        took, latest = f"{self.seconds / 60:.1f} minutes", f"{self.last:.0f} s"
        if over != "minutes":
            took, latest = (f"{getattr(self, name):,}" for name in (over, f"last_{over}"))
        return (
            f"the {over} are over: {counted(self.steps, 'step')} took {took}, and another one like the latest "
            f"({latest}) would end after training.{over}={getattr(self.config, over):g}"
        )

    def how_to_go_on(self) -> str:
        """The setting with which a resumed run would train on."""
        over = self._over or next((name for name, *_ in self._limits()), None)
        if over is not None and self.steps < self.config.steps:
            return f"training.{over}={2 * getattr(self.config, over):g}"
        return f"training.steps={2 * self.steps}"

    def state(self) -> dict[str, float]:
        names = ("seconds", "last", "samples", "last_samples", "tokens", "last_tokens")
        return {name: getattr(self, name) for name in names}

    def load_state(self, steps: int, state: Mapping[str, float]) -> None:
        """Go on after ``steps`` from :meth:`state`, perhaps of a version that counted less."""
        self.steps = steps
        for name in self.state():
            setattr(self, name, state.get(name, 0))
