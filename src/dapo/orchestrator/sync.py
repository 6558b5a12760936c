"""How new weights get from the learner to the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dapo.rollout.engine import Engine, hand_over

if TYPE_CHECKING:
    from dapo.training.learner import LocalLearner


class CopySync:
    """In one process: the engine copies the learner's tensors into its own."""

    async def push(self, learner: LocalLearner, engine: Engine) -> None:
        """Hand over the weights. After a cancellation the same version is handed over again."""
        await hand_over(engine, *learner.publish())
