"""Scores from processes of their own, each with a scorer as the recipe says, and the GPUs that it is to have."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dapo.config import Config
from dapo.config.composed_reward import off_gpu
from dapo.errors import RewardError
from dapo.orchestrator.runtime.ray.actors import ScoringActor
from dapo.orchestrator.runtime.ray.cluster import Cluster
from dapo.orchestrator.runtime.ray.handles import GoneError, Remote, Replacing, in_time
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.batching import Batcher, begin
from dapo.reward.contract import Doubt, Scorer
from dapo.util.asynchronous import closed_in_time

ATTEMPTS = 3
"""At one response, each of which ended the process that was to score it."""
TOGETHER, CALLS = 64, 8
"""Responses of one call at most, and calls at once to each process. One that takes long holds those of its call."""
CLOSE_SECONDS = 5.0
_Item = tuple[Prompt, str, FinishReason | None]


class RayScorer(Scorer):
    """Responses that come in the same moment, or while all are busy, go in one call, to who has the least to do. Of one
    that dies the responses are scored again by others, in halves until it is known which response ends processes."""

    def __init__(self, config: Config, function: Callable[..., Any] | None, tell: Callable[[str], object]) -> None:
        self._config, self._function, self._tell = config, function, tell
        self._cluster: Cluster | None = None
        self._actors: list[Remote | None] = []
        self._load: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._replacing = Replacing(self._made, tell, lambda: any(self._actors))
        calls = CALLS * max(1, config.runtime.reward.workers)
        self._batcher: Batcher[_Item, Reward] = Batcher(self._score, size=TOGETHER, concurrency=calls)
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        async with self._lock:
            if self._cluster is None:
                self._cluster = Cluster.join(self._config)
                await self._cluster.start()
                numbers = range(len(self._cluster.of("reward")))
                try:
                    made = [in_time(self._made(number), f"to start reward {number}") for number in numbers]
                    self._actors = list(await asyncio.gather(*made))
                except GoneError as error:
                    raise RewardError(f"reward: {error}") from None

    async def _made(self, number: int) -> Remote:
        assert self._cluster is not None
        bundle, reward = self._cluster.of("reward")[number], self._config.reward
        remote = await self._cluster.actor(ScoringActor, bundle)
        await remote.call("make", reward if bundle.device == "cuda" else off_gpu(reward), self._function)
        return remote

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        found: Sequence[Doubt] = await self._ask("examine", prompts)
        return found

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        return await self._batcher.submit((prompt, response, finish_reason))

    async def _score(self, items: Sequence[_Item]) -> Sequence[Reward]:
        try:
            rewards: Sequence[Reward] = await self._ask("score", items, attempts=1 if len(items) > 1 else ATTEMPTS)
        except GoneError as error:
            if middle := len(items) // 2:  # one after the other, so that none dies with what is not in its half
                return [*await self._score(items[:middle]), *await self._score(items[middle:])]
            return [Reward(None, 0.0, error=f"{ATTEMPTS} processes died on it; {error}")]
        return rewards

    async def _ask(self, method: str, *args: Any, attempts: int = ATTEMPTS) -> Any:
        await self.start()
        for attempt in range(attempts):
            number = await self._free()
            remote = self._actors[number]
            assert remote is not None
            self._load[number] += 1
            try:
                return await remote.call(method, *args)
            except GoneError as error:
                self._lost(number, remote, error)
                if attempt == attempts - 1:
                    raise
            finally:
                self._load[number] -= 1
        raise AssertionError

    async def _free(self) -> int:
        """The number of the one with the least to do. Raises RewardError: none is left."""
        while True:
            if able := [number for number, remote in enumerate(self._actors) if remote is not None]:
                return min(able, key=lambda number: self._load[number])
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()

    def _lost(self, number: int, remote: Remote, error: GoneError) -> None:
        if self._actors[number] is not remote:
            return  # others have told of it
        self._actors[number] = None
        self._tell(f"{error}; what it had to score is scored by others, and it is replaced")
        begin(self._tasks, self._replace(number))

    async def _replace(self, number: int) -> None:
        try:
            self._actors[number] = await self._replacing.another(number, f"reward {number}")
        except GoneError as error:
            self._failure = RewardError(f"reward: no process is left, and {error}")
        self._changed.set()

    async def close(self) -> None:
        await self._batcher.close()
        for task in self._tasks:
            task.cancel()
        there = [remote for remote in self._actors if remote is not None]
        await asyncio.gather(*(closed_in_time(lambda one=remote: one.call("close"), CLOSE_SECONDS) for remote in there))  # type: ignore[misc]
        for remote in there:
            remote.kill()
        if self._cluster is not None:
            await self._cluster.leave()
