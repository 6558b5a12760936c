"""Work beside and on the event loop: threads, tasks that work for each other, a queue with an end, bounded waits."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Generic, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


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

    def check(self) -> None:
        """Raises the reason, if it is closed with one."""
        if self._end is not None:
            raise self._end

    def drain(self) -> list[T]:
        """The items that nobody has taken."""
        items = list(self._items)
        self._items.clear()
        return items

    async def get(self) -> T:
        while not self._items:
            self.check()
            self._changed.clear()
            await self._changed.wait()
        return self._items.popleft()


async def next_event(event: asyncio.Event) -> None:
    """Wait until it is set, and wait for the next one from then on."""
    await event.wait()
    event.clear()


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


async def in_thread(function: Callable[[*Ts], T], *args: *Ts, pool: ThreadPoolExecutor | None = None) -> T:
    """Run ``function`` in a thread. Nothing can stop a thread, so a cancellation takes effect only once it has ended.

    Otherwise weights could be written to disk while an update is still changing them.
    ``pool``: of threads to take one of; without, any.
    """
    # in the context of now, as asyncio.to_thread does: settings of torch.compile are part of it
    there = partial(contextvars.copy_context().run, function, *args)
    work = asyncio.get_running_loop().run_in_executor(pool, there)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        with contextlib.suppress(asyncio.CancelledError):  # a second Ctrl-C stops no thread either
            await until_done(work)
        raise


@contextlib.contextmanager
def event_loop() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines one after the other in one loop. Inside of a running loop (a notebook's) it is in a thread of its
    own; there, too, Ctrl-C cancels the work and waits for its end."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner() as runner:  # which would keep the context of its start for all that it runs
            yield lambda work: runner.run(work, context=contextvars.copy_context())
        return
    outer, runner = asyncio.current_task(), asyncio.Runner()
    cancelled_before = outer.cancelling() if outer is not None else 0
    cancel: list[Callable[[], object]] = []

    async def cancellable(work: Coroutine[Any, Any, Any]) -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel[:] = [partial(loop.call_soon_threadsafe, task.cancel)]
        return await work

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        running = thread.submit(runner.run, cancellable(work), context=contextvars.copy_context())
        try:
            while not wait([running], timeout=0.5).done:
                # Ctrl-C under asyncio.run cancels the task that waits here
                if outer is not None and outer.cancelling() > cancelled_before:
                    raise KeyboardInterrupt
            return running.result()
        except KeyboardInterrupt:  # of this thread: the other one does not hear of it
            for stop in cancel:
                stop()
            raise

    with ThreadPoolExecutor(1) as thread:
        try:
            yield run
        finally:
            thread.submit(runner.close).result()


def run_async(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """``asyncio.run``, but also inside of a running event loop."""
    with event_loop() as run:
        result: T = run(work())
        return result


async def closed_in_time(close: Callable[[], Awaitable[None]], limit_s: float) -> bool:
    """Whether ``close`` came to its end within a time. If not it is cancelled, and not waited for any longer."""
    task = asyncio.ensure_future(close())
    await asyncio.wait({task}, timeout=limit_s)
    if not task.done():
        task.cancel()
        return False
    task.result()
    return True
