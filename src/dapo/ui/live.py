"""What happens in runs, as server-sent events: ``metrics`` (new lines), ``samples`` (a new step), ``state``, ``runs``.

Looks at sizes and times of files; reads nothing else until something has changed.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

from dapo.errors import UserError
from dapo.observe.samples import samples_path, steps_with_samples
from dapo.ui.runs import Run, Runs, stamp_of

PERIOD = 0.5
"""Seconds between two looks."""
_HEARTBEAT = 30
"""Looks until a comment tells proxies that the connection lives."""


async def events(
    runs: Runs, names: Sequence[str], closing: threading.Event, period: float = PERIOD
) -> AsyncIterator[str]:
    """Events of the named runs, for as long as the browser listens and the server is not ``closing``."""
    yield _event("hello", {})
    watched = {name: _Watched() for name in names}
    known: list[str] | None = None
    looks = 0
    while not closing.is_set():
        there = await asyncio.to_thread(runs.all)
        if known is not None and [run.name for run in there] != known:
            yield _event("runs", {})
        known = [run.name for run in there]
        for run in there:
            if run.name in watched:
                for event, data in await asyncio.to_thread(watched[run.name].look, run):
                    yield _event(event, {"run": run.name} | data)
        looks += 1
        if looks % _HEARTBEAT == 0:
            yield ": still here\n\n"
        await asyncio.sleep(period)


class _Watched:
    """A run as it was at the last look."""

    def __init__(self) -> None:
        self._files: dict[str, Any] = {}
        self._state: str | None = None
        self._folder: Any = None
        self._last: Any = None

    def look(self, run: Run) -> list[tuple[str, dict[str, Any]]]:
        first = not self._files
        files = {"metrics": stamp_of(run.folder.metrics), "samples": self._newest(run)}
        changed = [name for name, stamp in files.items() if self._files.get(name) != stamp]
        self._files = files
        try:
            state, steps = run.view.state, run.view.steps_done
        except UserError:  # it is being replaced by a new one
            return []
        changed += ["state"] if state != self._state else []
        self._state = state
        return [] if first else [(name, {"state": state, "steps": steps}) for name in changed]

    def _newest(self, run: Run) -> Any:
        """The last step with samples; looked for when something in their folder, such as the index, has changed."""
        stamp = stamp_of(run.folder.samples)
        if stamp != self._folder:
            self._folder = stamp
            last = max(steps_with_samples(run.folder.samples), default=0)
            self._last = last, stamp_of(samples_path(run.folder.samples, last))
        return self._last


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
