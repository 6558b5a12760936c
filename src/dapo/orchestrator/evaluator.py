"""The evaluations of a run: before training, after every so many steps and at its end; and which one was the best.

Consumes: held-out prompts and the engine's present weights. Produces: metrics, and the scores that a summary compares.
Waits for: the engine and the scorer, between two rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dapo.config import Config
from dapo.evaluation.early_stopping import EarlyStopping
from dapo.evaluation.evaluate import evaluate
from dapo.evaluation.result import Evaluation
from dapo.observe.changes import Change
from dapo.observe.progress import Listener
from dapo.orchestrator.budget import Budget
from dapo.orchestrator.run_state import RunState
from dapo.orchestrator.summary import scores_of
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
        engine: Engine,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        state: RunState,
        early_stopping: EarlyStopping,
        listener: Listener,
    ) -> None:
        self._config, self._heldout = config, heldout
        self._engine, self._scorer, self._decode = engine, scorer, decode
        self._state, self._early_stopping, self._listener = state, early_stopping, listener
        self.changes: Sequence[Change] = ()
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None

    async def first(self) -> Mapping[str, float]:
        """Evaluate the weights before training, if there is anything to evaluate on."""
        self.before = self.after = found = await self._evaluate("before training")
        if found is None:
            return {}
        self._listener.evaluated("before training", found.metrics())
        self._state.scores = {"before": scores_of(found), "after": scores_of(found)}
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
        self._state.scores["after"] = scores_of(found)
        self._early_stopping.observe(after.steps, found.metrics())
        return found.metrics()

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
        return await evaluate(
            self._heldout, self._engine, self._scorer, self._decode, self._config, self._listener.advance
        )


def when(after: Budget) -> str:
    """The time of an evaluation, for people."""
    return "after training" if after.used_up else f"after step {after.steps}"
