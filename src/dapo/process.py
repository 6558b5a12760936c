"""The process that a run lives in: its time, its memory, and work beside the event loop."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Clock:
    """Seconds by phase. A phase may have several laps; they add up."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """The time since the last lap went into ``phase``."""
        now = time.perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._last
        self._last = now


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``function`` in a thread. Nothing can stop a thread, so a cancellation takes effect only once it has ended.

    Otherwise weights could be written to disk while an update is still changing them.
    """
    work = asyncio.create_task(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # taken note of: the cancellation matters more
        raise


def peak_memory() -> int:
    """The most memory this process has held, in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # kilobytes everywhere else
