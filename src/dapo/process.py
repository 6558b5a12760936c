"""The process that a run lives in: its time, its memory, and work beside the event loop."""

from __future__ import annotations

import asyncio
import ctypes
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Clock:
    """Seconds by phase. A phase may have several laps; they add up."""

    def __init__(self, laps: dict[str, float] | None = None) -> None:
        """
        Args:
            laps: what has been counted already, to be added to.
        """
        self._last = time.perf_counter()
        self.laps = {} if laps is None else laps

    def lap(self, phase: str) -> None:
        """The time since the last lap went into ``phase``."""
        now = time.perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._last
        self._last = now

    def add(self, phase: str, seconds: float) -> None:
        """Count time that another process took."""
        self.laps[phase] = self.laps.get(phase, 0.0) + seconds

    @property
    def total(self) -> float:
        """All laps, and the time since the last one."""
        return sum(self.laps.values()) + time.perf_counter() - self._last


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


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_KEPT_FREE_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next tensor instead of giving it back to the system at once.

    A step allocates and frees the same large tensors again and again, and a fresh page costs more than computing what
    is in it: without this, a softmax over the vocabulary takes four times as long. One arena for all threads, since
    others than the main one cannot hold large blocks. glibc only; elsewhere nothing happens.
    """
    mallopt = _c_function("mallopt")
    if mallopt is not None:
        for option, value in ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, (1 << 31) - 1), (_M_ARENA_MAX, 1)):
            mallopt(option, value)


def give_back_memory() -> None:
    """Give kept memory back to the system if it is more than a GiB and more than is in use.

    Tensors of ever other sizes leave holes between them, and the process would grow with every update.
    """
    count, trim = _c_function("mallinfo2"), _c_function("malloc_trim")
    if count is None or trim is None:
        return
    count.restype = _MallInfo
    found = count()
    if found.free > max(_KEPT_FREE_BYTES, found.used):
        trim(0)


class _MallInfo(ctypes.Structure):
    """``mallinfo2`` of malloc.h: ten sizes, of which two are asked for here, in bytes."""

    _fields_ = (
        ("_others", ctypes.c_size_t * 7),
        ("used", ctypes.c_size_t),
        ("free", ctypes.c_size_t),
        ("_at_end", ctypes.c_size_t),
    )


def _c_function(name: str) -> Any:
    """A function of the C library; None where it has none of this name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
