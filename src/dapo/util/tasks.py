"""Tasks of an event loop that work for each other: a queue with an end, a group, and waiting for one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Channel(Generic[T]):
    """A queue that its producer closes with a reason, so that nobody waits for one that is gone."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._end: BaseException | None = None
        self._changed = asyncio.Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._changed.set()

    def close(self, reason: BaseException) -> None:
        """What :meth:`get` raises once all items are taken."""
        self._end = reason
        self._changed.set()

    def drain(self) -> list[T]:
        """The items that nobody has taken."""
        items = list(self._items)
        self._items.clear()
        return items

    async def get(self) -> T:
        """The next item; waits for it."""
        while not self._items:
            if self._end is not None:
                raise self._end
            self._changed.clear()
            await self._changed.wait()
        return self._items.popleft()


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A group of tasks that ends with the first error of its tasks or of the body itself, not with a group of them."""
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        failure = group.exceptions[0]  # the others followed from it, or came in the same moment
    if failure is not None:  # its own cause or context, and not that a task was cancelled for it
        raise failure from failure.__cause__ or failure.__context__


async def until_done(work: asyncio.Future[Any]) -> None:
    """Wait for the end of ``work``, whatever came of it. A cancellation takes effect only then."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if not work.cancelled():
        work.exception()  # taken note of
    if cancelled is not None:
        raise cancelled
