"""The learner of a stage: that of a run, in this process, with the stage's loss in place of an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dapo.data.examples import Example
from dapo.records import TokenBatch
from dapo.stages.stage import Stage
from dapo.training.base_learner import BaseLearner, Watched
from dapo.training.objective_protocol import Objective
from dapo.training.trainer import Trainer


class StageLearner(BaseLearner):
    """Trains on batches of :meth:`Stage.batch`, which carry all that the loss needs to know."""

    def __init__(self, trainer: Trainer, stage: Stage, out_of_time: Callable[[], bool]) -> None:
        """Arguments as for :class:`~dapo.training.base_learner.BaseLearner`."""
        super().__init__(trainer, out_of_time)
        self._stage = stage

    @property
    def watched_objective(self) -> Objective:
        return Watched(self._stage.objective, self._out_of_time)

    def inputs(self, mini: TokenBatch) -> Any:
        return self._stage.inputs(mini, self.trainer.device)

    async def evaluate(self, heldout: Sequence[Example]) -> dict[str, float]:
        """Metrics ``eval/...`` of the present weights on held-out rows."""
        return await self._compute(self._stage.evaluate, self.trainer, heldout)
