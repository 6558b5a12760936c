"""The math reward as the rest of the program sees it: a scorer whose work is done in worker processes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from dapo.config import MathReward
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.contract import Doubt, reference
from dapo.reward.pool import ScoringFailed, WorkerPool
from dapo.reward.pooled import PooledScorer
from dapo.reward.thinking import behind

_PLAIN_NUMBER = re.compile(r"-?\d+(\.\d+)?")


class MathScorer(PooledScorer):
    """Mathematical equality with the reference, in worker processes with a deadline and a memory limit."""

    def __init__(self, config: MathReward) -> None:
        self._pool = WorkerPool(
            "dapo.reward.math.score:make_handler",
            {"extract": config.extract},
            workers=config.workers,
            timeout_s=config.timeout_s,
            memory_mb=config.memory_mb,
        )

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        """See :class:`Scorer`."""
        return await self._score({"response": behind(prompt.end, response), "answer": reference(prompt)})

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        """References that cannot be parsed: they can only be met by their own text."""
        golds = [reference(prompt) for prompt in prompts]
        doubtful = sorted({gold for gold in golds if not _PLAIN_NUMBER.fullmatch(gold)})
        flags = await asyncio.gather(*(self._is_readable(gold) for gold in doubtful))
        bad = {gold for gold, is_readable in zip(doubtful, flags, strict=True) if not is_readable}
        return [
            Doubt(k, f"the answer {gold!r} cannot be read as mathematics; only a response with the same text is right")
            for k, gold in enumerate(golds)
            if gold in bad
        ]

    async def _is_readable(self, gold: str) -> bool:
        try:
            return bool((await self._pool.run({"answer": gold}))["readable"])
        except ScoringFailed:
            return False
