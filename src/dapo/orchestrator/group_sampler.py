"""From drawn prompts to whole groups: one task reads each stream of the engine, one scores each sample as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from dapo.config import Config
from dapo.orchestrator.dynamic_sampling import DynamicSampling
from dapo.orchestrator.pending_group import PendingGroup
from dapo.records import Sample
from dapo.reward.contract import Scorer
from dapo.rollout.engine import Engine, EngineError, Request, Sampling
from dapo.rollout.seeds import sample_seed


class GroupSampler:
    """The engine's streams and the scores of one round. A failure in any task ends the group of ``tasks``."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        config: Config,
        ledger: DynamicSampling,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._engine = engine
        self._scorer = scorer
        self._decode = decode
        self._config = config
        self._ledger = ledger
        self._tasks = tasks
        self._running: set[asyncio.Task[None]] = set()
        self._finished = asyncio.Event()
        self._tokens, self._began = 0, time.perf_counter()
        self._last_sample = self._began
        self.in_flight = 0
        """Draws that are not whole groups yet."""

    def resume(self, draws: Sequence[PendingGroup]) -> None:
        """Go on with the draws of an interrupted round: score what is not scored, ask for what is missing."""
        self.in_flight += len(draws)
        for draw in draws:
            self._ledger.scores.made += len(draw.scored)
            self._finish_if_whole(draw)
            for sample in draw.received.values():
                if sample.index not in draw.scored:
                    self._spawn(self._score(draw, sample))
        if short := [d for d in draws if len(d.received) < self._size]:
            self._spawn(self._read(short))

    def start(self, draws: Sequence[PendingGroup]) -> None:
        """Sample them, in one request to the engine."""
        self.in_flight += len(draws)
        self._spawn(self._read(draws))

    async def next_finished(self) -> None:
        """Wait until another draw is a whole group."""
        await self._finished.wait()
        self._finished.clear()

    def cancel(self) -> None:
        """Stop all that is in flight."""
        for task in self._running:
            task.cancel()

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / max(time.perf_counter() - self._began, 1e-9)

    @property
    def seconds_since_last(self) -> float:
        """Since the last sample came."""
        return time.perf_counter() - self._last_sample

    @property
    def _size(self) -> int:
        return self._config.rollout.samples_per_prompt

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _request(self, draw: PendingGroup) -> Request:
        rollout = self._config.rollout
        draw.asked = tuple(i for i in range(self._size) if i not in draw.received)
        seeds = (sample_seed(self._config.seed, draw.prompt.row, draw.number, i) for i in draw.asked)
        sampling = Sampling(rollout.temperature, rollout.max_response_length, stop=tuple(rollout.stop))
        return Request(draw.number, draw.prompt.token_ids, tuple(seeds), sampling)

    async def _read(self, draws: Sequence[PendingGroup]) -> None:
        """Take the samples of ``draws`` as they finish; cancelling this task closes the engine's stream."""
        by_number = {d.number: d for d in draws}
        stream = self._engine.generate([self._request(d) for d in draws])
        wanted = missing = sum(len(d.asked) for d in draws)
        try:
            with self._ledger.spans("sampling"):
                async for sample in stream:
                    self._receive(by_number.get(sample.request_id), sample)
                    missing -= 1
                    if not missing:
                        return  # without waiting for the engine to say so
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EngineError("the engine's stream was cancelled, and not by the run") from None
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        raise EngineError(f"{missing} of {wanted} samples never came back")

    def _receive(self, draw: PendingGroup | None, sample: Sample) -> None:
        known = draw is not None and 0 <= sample.index < len(draw.asked)
        if draw is None or not known or draw.asked[sample.index] in draw.received:
            raise EngineError(f"sample {sample.index} of request {sample.request_id} was not asked for, or came twice")
        sample = replace(sample, index=draw.asked[sample.index])  # the engine numbers them as they were asked for
        draw.received[sample.index] = sample
        self._tokens += sample.length
        self._last_sample = time.perf_counter()
        self._spawn(self._score(draw, sample))

    async def _score(self, draw: PendingGroup, sample: Sample) -> None:
        text = self._decode(sample.token_ids.tolist())
        with self._ledger.spans("scoring"):
            reward = self._ledger.scores.take(await self._scorer.score(draw.prompt, text, sample.finish_reason))
        draw.scored[sample.index] = replace(sample, text=text, reward=reward)
        self._finish_if_whole(draw)

    def _finish_if_whole(self, draw: PendingGroup) -> None:
        if len(draw.scored) == self._size:
            self._ledger.finish(draw)
            self.in_flight -= 1
            self._finished.set()
