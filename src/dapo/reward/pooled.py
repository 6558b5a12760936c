"""What scorers with worker processes share."""

from __future__ import annotations

from typing import Any

from dapo.errors import RewardError
from dapo.records import Reward
from dapo.reward.contract import Scorer
from dapo.reward.convert import reward_from_json
from dapo.reward.pool import ScoringFailed, WorkerPool


class PooledScorer(Scorer):
    """Scores with the :class:`~dapo.reward.pool.WorkerPool` that a subclass makes in its ``__init__``."""

    _pool: WorkerPool

    async def start(self) -> None:
        try:
            await self._pool.start()
        except ScoringFailed as error:
            raise RewardError(f"the reward workers do not start: {error}") from None

    async def close(self) -> None:
        await self._pool.close()

    async def _score(self, item: dict[str, Any]) -> Reward:
        try:
            return reward_from_json(await self._pool.run(item))
        except ScoringFailed as error:
            return Reward(None, 0.0, error=str(error))
