"""What the scorers that work in worker processes share."""

from __future__ import annotations

from typing import Any

from dapo.errors import RewardError
from dapo.records import Reward
from dapo.reward.convert import reward_from_json
from dapo.reward.pool import ScoringFailed, WorkerPool


class PooledScorer:
    """A scorer on top of a :class:`~dapo.reward.pool.WorkerPool`, which a subclass makes in its ``__init__``."""

    _pool: WorkerPool

    async def start(self) -> None:
        """Start all workers and load what they need, so that errors in it show before the first rollout.
        Raises RewardError: the user's function cannot be loaded, or workers cannot start."""
        try:
            await self._pool.start()
        except ScoringFailed as error:
            raise RewardError(f"the reward workers do not start: {error}") from None

    async def close(self) -> None:
        """Kill the workers; returns within seconds."""
        await self._pool.close()

    async def _score(self, item: dict[str, Any]) -> Reward:
        try:
            return reward_from_json(await self._pool.run(item))
        except ScoringFailed as error:
            return Reward(None, 0.0, error=str(error))
