"""Samples that are being written while something else happens to the engine: new weights, an evaluation, sleep.

``rollout.in_flight`` says what becomes of them at a push: they go on under the new weights (``keep``), are waited for
(``drain``), or are begun again (``restart``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from dapo.config import Config
from dapo.orchestrator.pending_group import PendingGroup
from dapo.records import Sample
from dapo.rollout.engine import Engine, EngineError, InterruptibleEngine, SampleError, fault_of, in_flight_policy
from dapo.util.spans import Spans

Hold = Literal["evaluation", "weights", "pause", "sleep"]
"""What the engine does while nothing more is asked of it."""


class InFlight:
    """The draws that the engine has been asked for.

    Attributes:
        interrupted: whether the engine was told to end its streams early.
        spans: of sampling and scoring.
    """

    def __init__(self, engine: Engine, config: Config, go_on: Callable[[], object], vocabulary: int | None) -> None:
        """``go_on``: called when the engine may be asked again. ``vocabulary``: tokens that the model knows."""
        self._engine, self._go_on, self._vocabulary = engine, go_on, vocabulary or 2**31
        self.policy = in_flight_policy(config, engine)
        self._draws: dict[int, PendingGroup] = {}
        self._fewer, self._gate = asyncio.Event(), asyncio.Event()
        self._gate.set()
        self._holds = self._episodes = 0
        self.interrupted = False
        self.spans = Spans()

    @property
    def held(self) -> bool:
        """Whether no prompts are to be drawn now."""
        return self._holds > 0

    @contextlib.asynccontextmanager
    async def asking_for(self, draws: Sequence[PendingGroup]) -> AsyncIterator[None]:
        """Inside, there is a stream for ``draws``. Waits until there may be one."""
        while not self._gate.is_set():
            await self._gate.wait()
        self._draws |= {draw.number: draw for draw in draws}
        for draw in draws:
            draw.since = self._engine.version if draw.since is None else draw.since
        try:
            with self.spans("sampling"):
                yield
        finally:
            for draw in draws:
                del self._draws[draw.number]
            self._fewer.set()

    @contextlib.asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        """Inside, an episode is played. Where what is in flight is waited for, that is the whole of it; otherwise what
        goes on, or is begun again, are its turns."""
        while not self._gate.is_set():
            await self._gate.wait()
        self._episodes += 1
        try:
            yield
        finally:
            self._episodes -= 1
            self._fewer.set()

    @contextlib.asynccontextmanager
    async def holding(self, before: Hold) -> AsyncIterator[None]:
        """Inside, nothing more is asked of the engine; after an error this stays so. Beside an evaluation what is in
        flight goes on; at new weights and in a pause ``rollout.in_flight`` decides; before the engine sleeps nothing
        may be left."""
        self._holds += 1
        if self._holds == 1:
            sleep, can_go_on = before == "sleep", isinstance(self._engine, InterruptibleEngine)
            if before != "evaluation" and (self.policy == "drain" or (sleep and not can_go_on)):
                await self._until_empty(episodes=True)  # streams that have begun are read to their end
            self._gate.clear()
            if sleep or (before != "evaluation" and self.policy == "restart"):
                await self._interrupt()
        with self.spans.pausing("sampling") if before == "pause" else contextlib.nullcontext():
            yield
        self._holds -= 1
        if not self._holds:
            self.interrupted = False
            self._gate.set()
            self._go_on()

    async def _until_empty(self, episodes: bool = False) -> None:
        while self._draws or (episodes and self._episodes):
            self._fewer.clear()
            await self._fewer.wait()

    async def _interrupt(self) -> None:
        """Have the engine end its streams. What there is of unfinished samples is kept for the next request, or not."""
        draws = dict(self._draws)
        if not draws:
            return
        self.interrupted = True
        assert isinstance(self._engine, InterruptibleEngine)
        drafts = await self._engine.cancel(list(draws))
        await self._until_empty()
        try:
            for draft in drafts:
                draw = draws[draft.request_id]
                index = draw.asked[draft.index]
                if self.policy == "restart":
                    draw.restarted += 1
                    draw.dropped_tokens += len(draft.token_ids)
                else:
                    draw.drafts[index] = replace(draft, index=index)
        except (TypeError, AttributeError, LookupError) as error:
            what = f"cancel() returned {drafts!r:.200}, and not a Draft for each unfinished sample that was asked for"
            raise EngineError(f"rollout.engine {type(self._engine).__name__}: {what}") from error

    def check(self, sample: Sample, since: int | None = None) -> None:
        """``since``: version of the engine's weights when it was first asked for.
        Raises SampleError: ids, log-probs or versions are not what the tokens of one sample can have."""
        if wrong := self._fault(sample, since):
            name = f"rollout.engine {type(self._engine).__name__}"
            raise SampleError(f"{name}: sample {sample.index} of request {sample.request_id}: {wrong}")

    def _fault(self, sample: Sample, since: int | None) -> str | None:
        for name, kind in (("token_ids", np.integer), ("logprobs", np.floating), ("versions", np.integer)):
            values = getattr(sample, name)
            if not isinstance(values, np.ndarray) or values.ndim != 1 or not issubclass(values.dtype.type, kind):
                found = getattr(values, "dtype", type(values).__name__)
                return f"{name} must be a NumPy array of one dimension with np.{kind.__name__}, not {found}"
        if (wrong := fault_of(sample, self._vocabulary)) or not sample.length:
            return wrong
        versions, newest = sample.versions, self._engine.version
        first, last = int(versions[0]), int(versions[-1])
        outside = last > newest or (since is not None and first < since)
        if outside or (self.policy != "keep" and first != last):
            wrong = f"tokens of the versions {first} to {last}, with weights of the versions {since} to {newest}"
            return f"{wrong} since it was asked for, and rollout.in_flight={self.policy}"
        return None
