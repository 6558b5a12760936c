"""How new weights get from the learner to the engine."""

from __future__ import annotations

from typing import Any, Protocol

from dapo.rollout.engine import Engine


class Publisher(Protocol):
    """A learner of this process."""

    def publish(self) -> tuple[int, Any]:
        """The version, one up if an update was applied since the last call, and the tensors by name."""
        ...


class CopySync:
    """In one process: the engine copies the learner's tensors into its own."""

    async def push(self, learner: Publisher, engine: Engine) -> None:
        """Hand over the weights. After a cancellation the same version is handed over again."""
        await engine.load_weights(*learner.publish())
