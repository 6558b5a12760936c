"""Where a run stands, beside what its roles remember, and when it is to end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dapo.evaluation.early_stopping import EarlyStopping
from dapo.orchestrator.budget import Budget
from dapo.orchestrator.step_metrics import step_seconds
from dapo.orchestrator.step_state import StepState
from dapo.util.spans import Spans


@dataclass
class RunState:
    budget: Budget
    """What has been used of steps, minutes, samples and tokens."""
    step: StepState | None = None
    """The one between its rollout and its end."""
    spans: Spans = field(default_factory=Spans)
    """Seconds by role since the metrics of the latest step."""
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the evaluations before and after training."""
    seconds: Spans = field(default_factory=Spans)
    """Of the whole run: ``start``, ``writing`` at its end, and the rest, which is training."""
    tell: Callable[[str, str, int, int], object] = lambda role, what, done, total: None
    """Hears what the run waits for: the role, in words, and how much of it is done."""
    on_commit: Callable[[StepState], object] = lambda step: None
    """Called when a step is done: what its roles saw of it counts from now on."""

    @property
    def steps_done(self) -> int:
        """Rollout steps that are complete."""
        return self.budget.steps

    @contextlib.contextmanager
    def doing(self, role: str, what: str, done: int = 0, total: int = 0) -> Iterator[None]:
        """What the run waits for inside is ``role``'s, and takes its time."""
        self.tell(role, f"{what}, in step {self.steps_done + 1}", done, total)
        with self.spans(role):
            yield

    def after_step(self) -> Budget:
        """The budget with the present step, from the commit before; evaluation and writing left out."""
        assert self.step is not None
        seconds = step_seconds(self.step.seconds or self.spans.seconds)
        stats = getattr(self.step.rollout, "stats", None)
        if stats is None:  # of a stage
            rows = getattr(self.budget.config, "rows_per_update", 0)
            return self.budget.after(seconds, rows, sum(report.tokens for report in self.step.reports))
        return self.budget.after(seconds, stats.samples, stats.tokens)

    def commit(self, after: Budget) -> None:
        """The step's metrics and samples are written: it is done, and ``after`` is what is left."""
        assert self.step is not None
        self.on_commit(self.step)
        self.budget, self.step = after, None

    def state(self) -> dict[str, Any]:
        return {
            "steps_done": self.steps_done,
            "budget": self.budget.state(),
            "step": vars(self.step) if self.step else None,
            "laps": self.spans.seconds,
            "spans": self.spans.done,
            "scores": self.scores,
            "seconds": self.seconds.seconds,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.budget.load_state(int(state["steps_done"]), state.get("budget", {}))
        step, laps = state["step"], state.get("laps", {})
        if step and "fill" in step:  # of a version that kept what the step had taken with it
            laps = step["seconds"]
            step = {"rollout": step["fill"]}
        self.step = StepState(**step) if step else None
        self.spans.cut()
        self.spans.add(laps, state.get("spans", ()))
        self.scores = state["scores"]
        self.seconds.add({"rest" if role == "rl" else role: taken for role, taken in state["seconds"].items()})


@dataclass(frozen=True)
class Plan:
    """What a run is to do.

    ``groups``: of a rollout step. ``colocated``: engine and learner share a device, and take turns in its memory.
    """

    groups: int
    early_stopping: EarlyStopping
    colocated: bool = True

    def finished(self, state: RunState) -> bool:
        """Whether no further step is to begin, and none is to be finished."""
        return state.step is None and (state.budget.used_up or self.early_stopping.converged)

    def reason(self, state: RunState) -> str:
        """Why training stops, for people."""
        return self.early_stopping.reason() if self.early_stopping.converged else state.budget.reason()
