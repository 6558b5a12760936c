"""Single items worked on in batches. No item waits for a batch to fill: a lone item goes at once, and batches grow when
items come faster than they are done."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def begin(tasks: set[asyncio.Task[Result]], work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """``work`` as a task that is kept in ``tasks`` until it is done, also if the caller does not wait for it."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    task.add_done_callback(retrieve)
    return task


def retrieve(task: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting an exception that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


class Batcher(Generic[Item, Result]):
    """Belongs to the event loop that it is first used in.
    ``work``: a batch of 1 to ``size`` items to as many results, in order. Its exception is raised to each caller.
    ``size``: most items of one batch; None: as many as wait, or as ``pick`` says. ``concurrency``: batches at once.
    ``pick``: positions of the waiting items that make the next batch; by default the oldest."""

    def __init__(
        self,
        work: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        *,
        size: int | None = None,
        concurrency: int = 1,
        pick: Callable[[Sequence[Item]], Sequence[int]] | None = None,
    ) -> None:
        self._work, self._size, self._concurrency, self._pick = work, size, concurrency, pick
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    async def submit(self, item: Item) -> Result:
        """The result for ``item``. A caller that is cancelled before its batch starts drops its item.
        Raises RuntimeError: the batcher is closed."""
        if self._closed:
            raise RuntimeError("the batcher is closed")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        # deferred, so that items submitted in the same turn of the loop share a batch
        asyncio.get_running_loop().call_soon(self._start)
        return await future

    async def close(self) -> None:
        """Cancel what runs; callers that still wait get :class:`asyncio.CancelledError`."""
        self._closed = True
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._concurrency and not self._closed:
            batch = self._take()
            if not batch:
                return
            task = asyncio.get_running_loop().create_task(self._run(batch))
            self._running.add(task)
            task.add_done_callback(self._done)

    def _take(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        if self._pick is None:
            batch: list[tuple[Item, asyncio.Future[Result]]] = []
            while self._waiting and (self._size is None or len(batch) < self._size):
                pair = self._waiting.popleft()
                if not pair[1].done():
                    batch.append(pair)
            return batch
        alive = [(item, future) for item, future in self._waiting if not future.done()]
        places = self._pick([item for item, _ in alive])[: self._size] if alive else []
        chosen = set(places)
        self._waiting = deque(pair for place, pair in enumerate(alive) if place not in chosen)
        return [alive[place] for place in places]

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._start()

    async def _run(self, batch: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._work([item for item, _ in batch])
            if len(results) != len(batch):
                raise ValueError(f"a batch of {len(batch)} items gave {len(results)} results")
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)
