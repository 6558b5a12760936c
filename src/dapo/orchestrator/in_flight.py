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

from dapo.checks.start import in_flight_policy
from dapo.config import Config
from dapo.orchestrator.pending_group import PendingGroup
from dapo.records import Sample
from dapo.rollout.engine import Engine, EngineError, InterruptibleEngine


class InFlight:
    """The draws that the engine has been asked for.

    Attributes:
        interrupted: whether the engine was told to end its streams early.
    """

    def __init__(self, engine: Engine, config: Config, go_on: Callable[[], object]) -> None:
        """``go_on``: called when the engine may be asked again."""
        self._engine, self._go_on = engine, go_on
        self.policy = in_flight_policy(config, engine)
        self._draws: dict[int, PendingGroup] = {}
        self._fewer, self._gate = asyncio.Event(), asyncio.Event()
        self._gate.set()
        self._holds = 0
        self.interrupted = False

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
        try:
            yield
        finally:
            for draw in draws:
                del self._draws[draw.number]
            self._fewer.set()

    @contextlib.asynccontextmanager
    async def holding(self, before: Literal["evaluation", "weights", "sleep"]) -> AsyncIterator[None]:
        """Inside, nothing more is asked of the engine; after an error this stays so. Beside an evaluation what is in
        flight goes on; at new weights ``rollout.in_flight`` decides; before the engine sleeps nothing may be left."""
        self._holds += 1
        if self._holds == 1:
            sleep, can_go_on = before == "sleep", isinstance(self._engine, InterruptibleEngine)
            if before != "evaluation" and (self.policy == "drain" or (sleep and not can_go_on)):
                await self._until_empty()  # streams that have begun are read to their end
            self._gate.clear()
            if sleep or (before == "weights" and self.policy == "restart"):
                await self._interrupt()
        yield
        self._holds -= 1
        if not self._holds:
            self.interrupted = False
            self._gate.set()
            self._go_on()

    async def _until_empty(self) -> None:
        while self._draws:
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
        for draft in drafts:
            draw = draws[draft.request_id]
            if self.policy == "restart":
                draw.restarted += 1
                draw.dropped_tokens += len(draft.token_ids)
            else:
                index = draw.asked[draft.index]
                draw.drafts[index] = replace(draft, index=index)

    def check_versions(self, sample: Sample) -> None:
        """Raises EngineError: they are not what the tokens of one sample can have."""
        versions, newest = sample.versions, self._engine.version
        if not len(versions):
            return
        first, last = int(versions[0]), int(versions[-1])
        if (versions[1:] < versions[:-1]).any() or last > newest or (self.policy != "keep" and first != last):
            raise EngineError(
                f"sample {sample.index} of request {sample.request_id}: tokens of the versions {first} to {last}, "
                f"with weights of version {newest} and rollout.in_flight={self.policy}"
            )
