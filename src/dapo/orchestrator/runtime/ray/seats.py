"""What a fleet of engines keeps of each engine, and of each request until all of its samples have come."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

from dapo.orchestrator.runtime.ray.handles import GoneError, Remote
from dapo.records import Sample
from dapo.rollout.engine import Draft, Request


@dataclass(eq=False)
class Ask:
    """A request, or what is left of it: of the engine at ``seat``, which knows it by ``key``, or waiting for one."""

    request: Request
    places: tuple[int, ...]
    """Of its samples in the request as it came."""
    events: asyncio.Queue[Sample | Draft | BaseException | None]
    drafts: bool
    came: set[int] = field(default_factory=set)
    cancelled: bool = False
    seat: Seat | None = None
    key: int = 0

    @property
    def unfinished(self) -> int:
        return len(self.places) - len(self.came)

    def again(self) -> Ask:
        """Itself, which is from now on what has not come, to be asked anew."""
        left = [place for place in range(len(self.places)) if place not in self.came]
        drafts = tuple(replace(d, index=left.index(d.index)) for d in self.request.drafts if d.index in left)
        seeds = tuple(self.request.seeds[place] for place in left)
        self.request = replace(self.request, seeds=seeds, drafts=drafts)
        self.places, self.came, self.seat = tuple(self.places[place] for place in left), set(), None
        return self

    def take(self, event: Any) -> None:
        if isinstance(event, Sample):
            self.came.add(event.index)
            if self.seat is not None:
                self.seat.load -= 1
        if isinstance(event, Sample | Draft):
            event = replace(event, index=self.places[event.index])
        self.events.put_nowait(event)


@dataclass(eq=False)
class Seat:
    """The place of one engine. Calls to it go out one after the other, so that they arrive in their order."""

    remote: Remote
    ready: bool = True
    """Whether it is there, with the weights of the fleet's version."""
    gone: bool = False
    asked: dict[int, Ask] = field(default_factory=dict)
    load: int = 0
    """Unfinished samples of those."""
    decode_steps: int = 0
    order: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def call(self, method: str, *args: Any) -> Any:
        """None, if it is gone: whoever waits for its events sees to that."""
        with contextlib.suppress(GoneError):
            async with self.order:
                return await self.remote.call(method, *args)

    def drop(self, ask: Ask) -> None:
        del self.asked[ask.key]
        self.load -= ask.unfinished
