"""What happens in runs, as server-sent events: ``metrics`` (new lines), ``samples`` (a new step), ``state``, ``runs``.

Looks at sizes and times of files, once for all who listen; reads nothing else until something has changed.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dapo.commands.ui.runs import Refused, Run, Runs, stamp_of
from dapo.errors import UserError
from dapo.observe.samples import samples_path, steps_with_samples

PERIOD = 0.5  # seconds between two looks
MOST_STREAMS = 50  # pages that are told of what is new
_HEARTBEAT = 15.0  # seconds until a comment tells proxies that the connection lives


class Full(Refused):
    """As many pages listen as may."""

    headers: Mapping[str, str] = {"Retry-After": "30"}

    def __str__(self) -> str:
        return f"{MOST_STREAMS} pages follow the runs already; this one shows them, but does not follow them"


class Live:
    """Looks at the runs while somebody listens, every ``period`` seconds, and tells each what is new in the runs that
    it shows. Streams end when ``closing`` is set, so that the server can. For one event loop."""

    def __init__(self, runs: Runs, closing: threading.Event, period: float = PERIOD) -> None:
        self._runs, self._closing, self._period = runs, closing, period
        self._listeners: set[Listener] = set()
        self._looking: asyncio.Task[None] | None = None

    def join(self, names: Sequence[str]) -> Listener:
        """Who hears of the runs of these names until it leaves. Raises Full if there are :data:`MOST_STREAMS`."""
        if len(self._listeners) >= MOST_STREAMS:
            raise Full
        listener = Listener(names)
        self._listeners.add(listener)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    async def _look(self) -> None:
        watched: dict[str, _Watched] = {}
        known: list[str] | None = None
        try:
            while self._listeners and not self._closing.is_set():
                there = await asyncio.to_thread(self._runs.all)
                names = [run.name for run in there]
                if known not in (None, names):
                    self._tell("runs", {})
                known = names
                wanted = set().union(*(listener.names for listener in self._listeners))
                watched = {name: watched.get(name) or _Watched() for name in wanted}
                for run in (run for run in there if run.name in watched):
                    for event, data in await asyncio.to_thread(watched[run.name].look, run):
                        self._tell(event, {"run": run.name} | data)
                await asyncio.sleep(self._period)
        finally:
            self._looking = None
            for listener in self._listeners:  # whatever went wrong: browsers connect again
                listener.end()

    def _tell(self, event: str, data: dict[str, Any]) -> None:
        for listener in self._listeners:
            if event == "runs" or data["run"] in listener.names:
                listener.tell(event, data)


class Listener:
    """One page. What it has not taken yet is replaced by what is newer, so one that is slow costs no memory."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)
        self._news: dict[tuple[str, str], str] = {}
        self._there = asyncio.Event()
        self._ended = False

    def tell(self, event: str, data: dict[str, Any]) -> None:
        self._news[event, data.get("run", "")] = _event(event, data)
        self._there.set()

    def end(self) -> None:
        self._ended = True
        self._there.set()

    async def events(self) -> AsyncIterator[str]:
        yield _event("hello", {})
        while not self._ended:
            try:
                await asyncio.wait_for(self._there.wait(), _HEARTBEAT)
            except TimeoutError:
                yield ": still here\n\n"
                continue
            self._there.clear()
            news, self._news = self._news, {}
            for text in news.values():
                yield text


class LiveResponse(StreamingResponse):
    """The events of one page; it has left when the connection ends, however that comes about."""

    def __init__(self, live: Live, names: Sequence[str]) -> None:
        self._live, self._listener = live, live.join(names)
        super().__init__(self._listener.events(), media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._live.leave(self._listener)


class _Watched:
    """A run as it was at the last look."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self._newest: tuple[Any, Any] = (None, None)

    def look(self, run: Run) -> list[tuple[str, dict[str, Any]]]:
        folder = run.folder.samples
        stamp = stamp_of(folder)
        if stamp != self._newest[0]:  # something in the folder of the samples, such as the index, has changed
            last = max(steps_with_samples(folder), default=0)
            self._newest = stamp, (last, stamp_of(samples_path(folder, last)))
        now: dict[str, Any] = {"metrics": stamp_of(run.folder.metrics), "samples": self._newest[1]}
        before, self._known = self._known, now | {"state": self._known.get("state")}
        try:
            state, steps = run.view.state, run.view.steps_done
        except UserError:  # it is being replaced by a new one
            return []
        now = self._known = now | {"state": state}
        news = [name for name in now if before and before.get(name) != now[name]]
        return [(name, {"state": state, "steps": steps}) for name in news]


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
