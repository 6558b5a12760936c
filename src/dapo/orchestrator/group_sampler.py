"""From drawn prompts to whole groups: one task reads each stream of the engine, one scores each sample as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from dapo.config import Config
from dapo.orchestrator.dynamic_sampling import DynamicSampling
from dapo.orchestrator.in_flight import InFlight
from dapo.orchestrator.pending_group import PendingGroup
from dapo.records import Reward, Sample
from dapo.reward.contract import Scorer
from dapo.rollout.engine import Engine, EngineError, Request, SampleError, Sampling
from dapo.rollout.seeds import sample_seed
from dapo.util.user_code import describe


class GroupSampler:
    """The engine's streams and the scores of a collector. A failure in any task ends the group of ``tasks``."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        config: Config,
        in_flight: InFlight,
        tasks: asyncio.TaskGroup,
        heard: Callable[[], object],
    ) -> None:
        """``heard``: called when a draw is a whole group, or sampling may go on."""
        self._engine = engine
        self._scorer = scorer
        self._decode = decode
        self._config = config
        self._tasks = tasks
        self._heard = heard
        self._running: set[asyncio.Task[None]] = set()
        self.in_flight = in_flight
        self.ledger: DynamicSampling
        """Of the draws that are in flight now."""
        self.restart()

    def restart(self) -> None:
        """Count tokens from now on."""
        self.tokens, self._began = 0, time.perf_counter()
        self._last_sample = self._began

    def resume(self, draws: Sequence[PendingGroup]) -> None:
        """Go on with interrupted draws: score what is not scored, ask for what is missing."""
        for draw in draws:
            self.ledger.scores.made += len(draw.scored)
            self._finish_if_whole(draw)
            for sample in draw.received.values():
                if sample.index not in draw.scored:
                    self._spawn(self._score(draw, sample))
        if short := [d for d in draws if len(d.received) < self._size]:
            self.start(short)

    def start(self, draws: Sequence[PendingGroup]) -> None:
        """Sample them, in one request to the engine."""
        self._spawn(self._read(draws))

    async def stop(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(time.perf_counter() - self._began, 1e-9)

    @property
    def seconds_since_last(self) -> float:
        """Since the last sample came."""
        return time.perf_counter() - self._last_sample

    # -- tasks ---------------------------------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return self._config.rollout.samples_per_prompt

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _wanted(self, draw: PendingGroup) -> int:
        return self._size if draw.turn is None else 1

    def _request(self, draw: PendingGroup) -> Request:
        rollout = self._config.rollout
        draw.asked = tuple(i for i in range(self._wanted(draw)) if i not in draw.received)
        most, row = rollout.max_response_length, draw.prompt.row
        seeds: Iterable[int] = (sample_seed(self._config.seed, row, draw.number, i) for i in draw.asked)
        if draw.turn is not None:
            seeds, most = draw.turn[:1], draw.turn[1]
        sampling = Sampling(rollout.temperature, most, stop=tuple(rollout.stop))
        begun = enumerate(draw.asked)
        drafts = tuple(replace(draw.drafts[i], index=place) for place, i in begun if i in draw.drafts)
        return Request(draw.number, draw.prompt.token_ids, tuple(seeds), sampling, drafts)

    async def _read(self, draws: Sequence[PendingGroup]) -> None:
        """Take the samples of ``draws`` as they finish, in further streams where one is interrupted."""
        while short := [d for d in draws if len(d.received) < self._wanted(d)]:
            async with self.in_flight.asking_for(short):
                await self._stream(short)

    async def _stream(self, draws: Sequence[PendingGroup]) -> None:
        """Cancelling the task of this closes the engine's stream."""
        by_number = {d.number: d for d in draws}
        stream = self._engine.generate([self._request(d) for d in draws])
        wanted = missing = sum(len(d.asked) for d in draws)
        try:
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
        except ValueError as error:  # such as arrays that no sample can have
            if (named := self._config.rollout.engine) == "native":
                raise
            raise SampleError(f"rollout.engine {named}: {describe(error)}") from error
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        if not self.in_flight.interrupted:
            raise EngineError(f"{missing} of {wanted} samples never came back")

    def _receive(self, draw: PendingGroup | None, sample: Sample) -> None:
        known = draw is not None and 0 <= sample.index < len(draw.asked)
        if draw is None or not known or draw.asked[sample.index] in draw.received:
            raise EngineError(f"sample {sample.index} of request {sample.request_id} was not asked for, or came twice")
        self.in_flight.check(sample, draw.since)
        sample = replace(sample, index=draw.asked[sample.index])  # the engine numbers them as they were asked for
        draw.received[sample.index] = sample
        draw.drafts.pop(sample.index, None)
        self.tokens += sample.length
        self._last_sample = time.perf_counter()
        if draw.turn is None:
            self._spawn(self._score(draw, sample))

    async def _score(self, draw: PendingGroup, sample: Sample) -> None:
        text = self._decode(sample.token_ids.tolist())
        await self._judge(draw, replace(sample, text=text), self._scorer.score(draw.prompt, text, sample.finish_reason))

    async def _judge(self, draw: PendingGroup, sample: Sample, verdict: Awaitable[Reward]) -> None:
        with self.in_flight.spans("scoring"):
            reward = await verdict
        draw.scored[sample.index] = replace(sample, reward=self.ledger.scores.take(reward))
        self._finish_if_whole(draw)

    def _finish_if_whole(self, draw: PendingGroup) -> None:
        if len(draw.scored) == self._size:
            self.ledger.finish(draw)
            self._heard()
