"""Several engines that are one: requests are shared out, weights go to all, and one that dies is replaced.

A request is one engine's as a whole, so that its samples share the prompt: the engine's with the fewest unfinished
samples. What an engine had not finished when it died is asked of the others at once, with the seeds that it had; what
had come is not asked again. Of each engine one call is always waiting for events, so its end is heard of at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from dapo.errors import UserError
from dapo.orchestrator.runtime.ray.handles import GoneError, Remote, Replacing
from dapo.orchestrator.runtime.ray.seats import Ask, Seat
from dapo.records import Sample
from dapo.rollout.engine import Draft, EngineError, Request
from dapo.training.parallel.front import RankError
from dapo.util.asynchronous import closed_in_time
from dapo.util.terminal import counted

if TYPE_CHECKING:
    import torch

CLOSE_SECONDS = 10.0
HUNG_SECONDS = 600.0
"""Without a word or, while it has samples to write, a step: such an engine is ended, and replaced as one that died."""


class Fleet:
    """The engines of a run (``rollout/engine.InterruptibleEngine``)."""

    def __init__(
        self,
        engines: Sequence[Remote],
        make: Callable[[int], Coroutine[Any, Any, Remote]] | None,
        tell: Callable[[str], object],
        give: Callable[[Remote], Awaitable[int | None]] | None = None,
        in_turn: bool = False,
        closed: Callable[[], Awaitable[None]] | None = None,
        version: int = 0,
    ) -> None:
        """
        Args:
            engines: all of version ``version``.
            make: an engine in the place of that of a number; None: none can be made, and the first one to die ends all.
            tell: hears of those that died.
            give: hand a new engine the weights of now, if nothing is in the way; returns their version.
            in_turn: share requests out by number, and not by what engines have to do.
            closed: called when it is closed.
        """
        self._seats = [Seat(remote) for remote in engines]
        self._tell, self._give, self._in_turn, self._then = tell, give, in_turn, closed
        self._replacing = make and Replacing(make, tell, lambda: not all(seat.gone for seat in self._seats))
        self._keys, self._turns = itertools.count(), itertools.count()
        self._waiting: list[Ask] = []  # until there is an engine
        self._failure: BaseException | None = None
        self._damaged: Exception | None = None
        self.version, self._paused, self._changing = version, False, False
        self._tasks: set[asyncio.Task[None]] = set()
        self.replaced = self.asked_again = 0
        """Engines, and samples that were asked for once more, so far."""
        for number in range(len(engines)):
            self._begin(self._listen(number))

    # --- as an engine -------------------------------------------------------------------------------------------------

    @property
    def decode_steps(self) -> int:
        """Of all engines together, so far."""
        return sum(seat.decode_steps for seat in self._seats)

    def counts(self) -> dict[str, float]:
        return {"engines/replaced": self.replaced, "engines/asked_again": self.asked_again}

    def facts(self) -> dict[str, dict[str, float]]:
        """Of each engine that samples, by its name: the version of its weights, and its unfinished samples."""
        ready = [seat for seat in self._seats if seat.ready]
        return {seat.remote.name: {"version": self.version, "in_flight": seat.load} for seat in ready}

    @property
    def about(self) -> str:
        return f"{counted(len(self._seats), 'engine')}: {', '.join(str(seat.remote) for seat in self._seats)}"

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        return cast(AsyncIterator[Sample], self.stream(requests, drafts=False))

    async def stream(self, requests: Sequence[Request], *, drafts: bool = True) -> AsyncIterator[Sample | Draft]:
        """Of a sample whose engine died, drafts begin again."""
        events: asyncio.Queue[Sample | Draft | BaseException | None] = asyncio.Queue()
        asks = [Ask(request, tuple(range(len(request.seeds))), events, drafts) for request in requests]
        self._route(asks)
        left = len(asks)
        try:
            while left:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                left -= event is None
                if event is not None:
                    yield event
        finally:
            self._forget(asks)

    async def cancel(self, request_ids: Collection[int]) -> list[Draft]:
        for ask in [ask for ask in self._waiting if ask.request.id in request_ids]:
            self._waiting.remove(ask)
            ask.take(None)
        seats = []
        for seat in self._seats:
            mine = [ask for ask in seat.asked.values() if ask.request.id in request_ids]
            for ask in mine:
                ask.cancelled = True
            seats += [(seat, {ask.request.id: ask.places for ask in mine})] if mine else []
        found = await asyncio.gather(*(seat.call("engine", "cancel", set(places)) for seat, places in seats))
        return [
            replace(draft, index=places[draft.request_id][draft.index])
            for (_, places), drafts in zip(seats, found, strict=True)
            for draft in drafts or ()
        ]

    async def pause(self) -> None:
        self._paused = True
        await self._all("pause")

    async def resume(self) -> None:
        self._paused = False
        await self._all("resume")

    async def sleep(self) -> None:
        if self._waiting or any(seat.asked for seat in self._seats):
            raise EngineError("cannot sleep while requests are in flight")
        await self._all("sleep")

    async def wake(self) -> None:
        await self._all("wake")

    async def begin(self, version: int) -> None:
        if version < self.version:
            raise EngineError(f"weights: version {version} was given after version {self.version}")
        self._changing, self._damaged, self._coming = True, None, version
        await self._all("begin", version)

    async def put(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        with self._arriving():
            await self._all("put", list(bucket))

    async def commit(self, fingerprint: Mapping[str, torch.Tensor]) -> None:
        with self._arriving():
            await self._all("commit", dict(fingerprint))
        self._changed(self._coming)

    @contextlib.contextmanager
    def _arriving(self) -> Iterator[None]:
        """After an error in it nothing can be sampled until weights have come whole."""
        try:
            yield
        except Exception:
            self._damaged = EngineError("the weights arrived in part; load them again")
            self._route_waiting()
            raise

    async def close(self) -> None:
        self.fail(EngineError("the engine is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(self._end(seat) for seat in self._seats if not seat.gone))
        if self._then is not None:
            await self._then()

    async def _end(self, seat: Seat) -> None:
        await closed_in_time(lambda: seat.call("engine", "close"), CLOSE_SECONDS)
        seat.gone = True
        seat.remote.kill()

    async def _all(self, method: str, *args: Any) -> None:
        """Have all engines do it. Raises the first error, once all are done."""
        seats = [seat for seat in self._seats if not seat.gone]
        done = await asyncio.gather(*(seat.call("engine", method, *args) for seat in seats), return_exceptions=True)
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome

    # --- weights that come from elsewhere -----------------------------------------------------------------------------

    async def change(self, send: Callable[[list[Any]], Awaitable[tuple[int, Collection[int] | None]]]) -> None:
        """Have ``send`` give weights to the engines, actors, that there are; it returns the version of these weights,
        and which of the engines have them (None: all). Requests that are made meanwhile wait."""
        seats = [seat for seat in self._seats if not seat.gone]
        self._changing, self._damaged = True, None
        with self._arriving():
            version, reached = await send([seat.remote.actor for seat in seats])
        self._changed(version, seats if reached is None else [seats[place] for place in reached])

    def _changed(self, version: int, seats: Collection[Seat] | None = None) -> None:
        self.version, self._changing = version, False
        for seat in self._seats:
            seat.ready = not seat.gone and (seats is None or seat in seats)
            if not (seat.ready or seat.gone):
                self._begin(self._catch_up(seat))  # it came meanwhile
        self._route_waiting()

    # --- who does what ------------------------------------------------------------------------------------------------

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What nobody expected ends all: those who wait would wait for ever."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def _route(self, asks: Sequence[Ask]) -> None:
        if error := self._failure or self._damaged:
            for ask in asks:
                ask.events.put_nowait(error)
            return
        able = [seat for seat in self._seats if seat.ready]
        if not able or self._changing:
            self._waiting += asks
            return
        shares: dict[Seat, list[tuple[int, Request, bool]]] = {}
        for ask in asks:
            seat = able[next(self._turns) % len(able)] if self._in_turn else min(able, key=lambda one: one.load)
            ask.seat, ask.key = seat, next(self._keys)
            seat.asked[ask.key] = ask
            seat.load += ask.unfinished
            shares.setdefault(seat, []).append((ask.key, ask.request, ask.drafts))
        for seat, requests in shares.items():
            self._begin(seat.call("ask", requests))

    def _route_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._route(waiting)

    def _forget(self, asks: Sequence[Ask]) -> None:
        """Nobody reads these any more."""
        gone = {*asks}
        self._waiting = [ask for ask in self._waiting if ask not in gone]
        for ask in asks:
            if (seat := ask.seat) is not None and ask.key in seat.asked:
                seat.drop(ask)
                if not seat.gone:
                    self._begin(seat.call("forget", [ask.key]))

    async def _listen(self, number: int) -> None:
        seat = self._seats[number]
        moved = time.monotonic()
        try:
            while True:
                async with asyncio.timeout(HUNG_SECONDS):  # it says something twice a minute
                    steps, events = pickle.loads(await seat.remote.get("events"))
                at_work = bool(steps and seat.load) and not (self._paused or self._changing)
                if events or steps != seat.decode_steps or not at_work:
                    moved, seat.decode_steps = time.monotonic(), steps
                elif time.monotonic() - moved > HUNG_SECONDS:
                    raise TimeoutError
                for key, event in events:
                    if ask := seat.asked.get(key):
                        if not isinstance(event, Sample | Draft):
                            seat.drop(ask)
                        ask.take(event)
        except GoneError as error:
            self._lost(number, error)
        except TimeoutError:
            seat.remote.kill()
            self._lost(number, GoneError(f"{seat.remote} did not go on for {HUNG_SECONDS:g} s and was ended"))

    # --- one that dies ------------------------------------------------------------------------------------------------

    def watch(self, remote: Remote, what: str) -> None:
        """Have the end of this process of a rank end all that is asked for. ``what`` happened then, in words."""

        async def wait() -> None:
            try:
                await remote.get("forever")
            except GoneError as error:
                self.fail(RankError(f"{what}: {error}"))

        self._begin(wait())

    def fail(self, error: BaseException) -> None:
        """Nothing more can be sampled."""
        if self._failure is not None:
            return
        self._failure = error
        asks = [*self._waiting, *(ask for seat in self._seats for ask in seat.asked.values())]
        self._waiting = []
        for ask in asks:
            ask.events.put_nowait(error)

    def _lost(self, number: int, error: GoneError) -> None:
        seat = self._seats[number]
        asks, seat.asked, seat.ready, seat.gone = [*seat.asked.values()], {}, False, True
        if self._failure is not None:
            return
        if self._replacing is None:
            self.fail(FleetError(str(error)))
            return
        for ask in asks:
            if ask.cancelled or not ask.unfinished:
                ask.take(None)
        again = [ask.again() for ask in asks if ask.unfinished and not ask.cancelled]
        samples = sum(ask.unfinished for ask in again)
        self.replaced, self.asked_again = self.replaced + 1, self.asked_again + samples
        self._tell(f"{error}; its {samples} unfinished samples are asked for again, and it is replaced")
        self._waiting += again
        self._route_waiting()
        self._begin(self._replace(number))

    async def _replace(self, number: int) -> None:
        """Until there is one, or until none is left and none could be made."""
        assert self._replacing is not None
        try:
            remote = await self._replacing.another(number, self._seats[number].remote.name)
        except GoneError as error:
            self.fail(FleetError(f"no engine is left, and {error}"))
            return
        seat = self._seats[number] = Seat(remote, ready=False)
        if self._paused:
            await seat.call("engine", "pause")
        self._begin(self._listen(number))
        await self._catch_up(seat)

    async def _catch_up(self, seat: Seat) -> None:
        """Have a new engine sample, once it has the weights of now. If there are newer ones, it gets those with the
        others."""
        given = 0 if self._give is None or self._changing else await self._give(seat.remote)
        if given == self.version and not (self._changing or seat.gone):
            seat.ready = True
            self._route_waiting()


class FleetError(EngineError, UserError):
    """No engine is left. The run goes on from its last checkpoint."""
