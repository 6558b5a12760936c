"""The evaluations of a run: before training, after every so many steps and at its end; and which one was the best.

Consumes: held-out prompts and the engine's present weights. Produces: metrics, and the scores that a summary compares.
Waits for: the engine and the scorer, between two rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from dapo.config import Config
from dapo.environments.player import Player
from dapo.evaluation.early_stopping import EarlyStopping
from dapo.evaluation.evaluate import Metric, evaluate
from dapo.evaluation.result import Evaluation
from dapo.observe.changes import Change
from dapo.observe.progress import Listener
from dapo.orchestrator.budget import Budget
from dapo.orchestrator.run_state import RunState
from dapo.records import Prompt
from dapo.reward.contract import Scorer
from dapo.rollout.engine import Engine


class Evaluator:
    """Evaluates when it is due.

    Attributes:
        changes: of the run's settings, which may make evaluations incomparable.
        before: what was found before training; None: nothing, or in an earlier process.
        after: what was found last.
    """

    def __init__(
        self,
        config: Config,
        heldout: Sequence[Prompt],
        engine: Callable[[], AbstractAsyncContextManager[Engine]],
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        state: RunState,
        early_stopping: EarlyStopping,
        listener: Listener,
        metrics: Mapping[str, Metric],
        player: Callable[[], Player] | None = None,
    ) -> None:
        """``engine``: gives the one to evaluate with, which has the present weights and nothing else to do. ``player``:
        makes one, for episodes."""
        self._config, self._heldout = config, heldout
        self._engine, self._scorer, self._decode = engine, scorer, decode
        self._state, self._early_stopping, self._listener = state, early_stopping, listener
        self._metrics, self._player = metrics, player
        self.changes: Sequence[Change] = ()
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None

    async def first(self) -> Mapping[str, float]:
        """Evaluate the weights before training, if there is anything to evaluate on."""
        self.before = self.after = found = await self._evaluate("before training")
        if found is None:
            return {}
        self._listener.evaluated("before training", found.metrics())
        self._state.scores = {"before": _scores(found), "after": _scores(found)}
        self._early_stopping.observe(0, found.metrics())
        return found.metrics()

    async def maybe(self, after: Budget) -> Mapping[str, float]:
        """Evaluation metrics after every so many steps and after the last one. ``after``: with the present step."""
        every = self._config.evaluation.every
        if not after.used_up and not (every and after.steps % every == 0):
            return {}
        with self._state.spans("evaluation"):
            found = await self._evaluate(when(after))
        if found is None:
            return {}
        if self.evaluated_otherwise:  # not before: until now a run can go on with the evaluation that it had
            self._early_stopping.forget()
            self._state.scores = {}
        self.after = found
        self._state.scores["after"] = _scores(found)
        self._early_stopping.observe(after.steps, found.metrics())
        return found.metrics()

    def summary(self, steps: int) -> dict[str, Any]:
        """What the evaluations before and after ``steps`` of training found. Without what was before: that was another
        evaluation. If the last one was before training, there is nothing after it, and no best one."""
        scores, best = self._state.scores, self._early_stopping
        if not scores or (not steps and self._config.training.steps):
            return {}
        found: dict[str, Any] = {"heldout_rows": len(self._heldout)}
        found |= {f"{name}_before": value for name, value in scores.get("before", {}).items()}
        if steps and best.observed <= 0:
            return found
        found |= {f"{name}_after": value for name, value in scores["after"].items()}
        return found | {"best": {"step": best.step, best.metric: best.value}}

    @property
    def evaluated_otherwise(self) -> bool:
        """Whether evaluations so far cannot be compared with the next one."""
        last = max((change.step for change in self.changes if change.of_evaluation), default=0)
        return 0 <= self._early_stopping.observed < last

    async def _evaluate(self, name: str) -> Evaluation | None:
        if not self._heldout:
            return None
        self._state.tell("", f"the evaluation {name}", 0, 0)
        self._listener.phase(f"evaluating {name}")
        async with self._engine() as engine:
            work = (self._heldout, engine, self._scorer, self._decode, self._config)
            return await evaluate(*work, self._listener.advance, self._metrics, self._player)


def _scores(found: Evaluation) -> dict[str, Any]:
    """What the summary compares."""
    return {"accuracy": found.accuracy, "response_length": found.response_length}


def when(after: Budget) -> str:
    """The time of an evaluation, for people."""
    return "after training" if after.used_up else f"after step {after.steps}"
