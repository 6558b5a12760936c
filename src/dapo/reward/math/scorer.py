"""The math reward as the rest of the program sees it: a scorer whose work is done in worker processes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from dapo.config import MathReward
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.contract import Doubt, reference
from dapo.reward.convert import out_of_time
from dapo.reward.math import CPU_LIMIT_S
from dapo.reward.pool import OutOfTime, PooledScorer, ScoringFailed, WorkerPool
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
        """See :class:`Scorer`. A worker that computes until the deadline, where its own limit cannot stop it, has a
        response to blame, which is wrong; one that did not get to run has none."""
        item = {"response": behind(prompt.end, response), "answer": reference(prompt)}
        try:
            return Reward(**await self._pool.run(item))
        except ScoringFailed as error:
            if isinstance(error, OutOfTime) and error.cpu_s > 2 * CPU_LIMIT_S:
                return out_of_time()
            return Reward(None, 0.0, error=str(error))

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        """References that cannot be parsed: they can only be met by their own text."""
        golds = [reference(prompt) for prompt in prompts]
        doubtful = sorted({gold for gold in golds if not _PLAIN_NUMBER.fullmatch(gold)})
        faults = await asyncio.gather(*(self._fault(gold) for gold in doubtful))
        found = dict(zip(doubtful, faults, strict=True))
        return [
            Doubt(k, f"the answer {gold!r} {found[gold]}; only a response with the same text is right")
            for k, gold in enumerate(golds)
            if found.get(gold)
        ]

    async def _fault(self, gold: str) -> str | None:
        try:
            readable = (await self._pool.run({"answer": gold}))["readable"]
        except ScoringFailed:
            readable = None
        if readable is None:
            return "takes too long to read"
        return None if readable else "cannot be read as mathematics"
