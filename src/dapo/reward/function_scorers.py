"""Scorers around the user's own function: in worker processes if a recipe names it, in this process if it was passed
from Python."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from dapo.config import FunctionReward
from dapo.errors import RewardError
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.batching import Batcher, begin
from dapo.reward.contract import Scorer, fields
from dapo.reward.function import ASYNC_AT_ONCE, BoundFunction
from dapo.reward.pool import PooledScorer, ScoringFailed, WorkerPool
from dapo.reward.registry import declaration

_MAX_LOST_THREADS = 16  # calls that may hang in threads, which cannot be killed, before the run is stopped
_ASYNC_BATCHES = 4
"""Calls of a batched async function at once: fewer than of others, so that batches can grow meanwhile."""

_Item = Mapping[str, Any]
"""See :meth:`BoundFunction.arguments`."""
_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


async def _score_items(
    call: Callable[[Sequence[_Item]], Awaitable[list[Reward]]], items: Sequence[_Item]
) -> list[Reward]:
    """One call for all; if it fails, one for each, so that an item on which the function hangs or crashes costs no
    other."""
    try:
        return await call(items)
    except ScoringFailed as error:
        if len(items) == 1:
            return [Reward(None, 0.0, error=str(error))]
    alone = await asyncio.gather(*(_score_items(call, [item]) for item in items))
    return [reward for (reward,) in alone]


class FunctionScorer(PooledScorer):
    """A function named in the recipe, in worker processes: it may hang or crash."""

    def __init__(self, config: FunctionReward) -> None:
        self._name = config.function
        self._workers = config.workers
        self._pool = WorkerPool(
            "dapo.reward.function:make_handler",
            {"function": config.function, "args": config.args, "responses_per_call": config.responses_per_call},
            workers=config.workers,
            timeout_s=config.timeout_s,
        )
        self._asking = asyncio.Lock()
        self._submit: Callable[[_Item], Awaitable[Reward]] | None = None

    async def start(self) -> None:
        await super().start()
        with contextlib.suppress(ScoringFailed):  # asked again with the first score
            await self._how_to_submit()

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        try:
            submit = self._submit or await self._how_to_submit()
        except ScoringFailed as error:
            return Reward(None, 0.0, error=str(error))
        return await submit(fields(prompt, response, finish_reason))

    async def _how_to_submit(self) -> Callable[[_Item], Awaitable[Reward]]:
        async with self._asking:
            if self._submit is None:
                size = (await self._run({"about": True}))["responses_per_call"]
                work = functools.partial(_score_items, self._call)
                # nobody closes the batcher: once the pool is closed, whatever still waits fails by itself
                self._submit = Batcher(work, size=size or 1, concurrency=self._workers).submit
            return self._submit

    async def _call(self, items: Sequence[_Item]) -> list[Reward]:
        reply = await self._run({"items": items})
        if "raised" in reply:
            raise ScoringFailed(reply["raised"])
        return [Reward(**reward) for reward in reply["rewards"]]

    async def _run(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return await self._pool.run(message)
        except ScoringFailed as error:
            raise ScoringFailed(f"reward function {self._name}: {error}") from None


class CallableScorer(Scorer):
    """A Python function passed through the API, called in this process.

    A sync function runs in a thread, an async one on the event loop. Neither can be killed: a call that exceeds
    ``timeout_s`` is reported and left behind, even if it ignores its cancellation. Calls at once: 1 of a sync function,
    which need not be thread-safe, 64 of an async one, 4 if that is batched.
    """

    def __init__(self, function: Callable[..., Any], timeout_s: float = 10.0) -> None:
        if not callable(function):
            raise RewardError(f"reward: expected a function, got {type(function).__name__} {function!r}")
        declared = declaration(function)
        own_name = getattr(function, "__qualname__", type(function).__name__)
        self._bound = BoundFunction(function, declared.name if declared else own_name)
        self._timeout_s = timeout_s
        size = self._bound.responses_per_call
        concurrency = (_ASYNC_BATCHES if size else ASYNC_AT_ONCE) if self._bound.is_async else 1
        self._free = asyncio.Semaphore(concurrency)
        self._batcher: Batcher[_Item, Reward] | None = None
        if size is not None:
            work = functools.partial(_score_items, self._call)
            self._batcher = Batcher(work, size=size, concurrency=concurrency)
        self._idle: list[_Calls] = []  # of threads that are free
        self._closed = False
        self._lost: list[Future[Any]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        item = fields(prompt, response, finish_reason)
        if self._batcher is not None:
            return await self._batcher.submit(item)
        (reward,) = await _score_items(self._call, [item])
        return reward

    async def _call(self, items: Sequence[_Item]) -> list[Reward]:
        bound = self._bound
        arguments = bound.arguments(items)
        await self._free.acquire()
        # A thread goes on when its caller is cancelled; the next call waits for it: not every function is thread-safe.
        call = begin(self._tasks, self._timed_call(arguments))
        call.add_done_callback(lambda _: self._free.release())
        result = await (call if bound.is_async else asyncio.shield(call))
        return bound.rewards(result, len(items))

    async def _timed_call(self, arguments: dict[str, Any]) -> Any:
        """What the function returned. Raises ScoringFailed: it raised, or took too long."""
        self._lost = [outcome for outcome in self._lost if not outcome.done()]
        if len(self._lost) >= _MAX_LOST_THREADS:
            raise RewardError(
                f"reward function {self._bound.name}: {len(self._lost)} calls hang and cannot be stopped; name the "
                "function in the recipe (reward.kind=function), where it runs in processes that can be killed"
            )
        work = begin(self._tasks, self._result(arguments))
        try:  # not asyncio.timeout, which waits for as long as an async function ignores its cancellation
            in_time, _ = await asyncio.wait({work}, timeout=self._timeout_s)
        finally:
            work.cancel()
        if not in_time:
            raise ScoringFailed(f"reward function {self._bound.name}: timed out after {self._timeout_s:g} s")
        if work.cancelled():  # by the user's function, where an inner task was cancelled
            raise ScoringFailed(self._bound.raised(RuntimeError("it raised CancelledError")))
        try:
            return work.result()
        except Exception as error:
            raise ScoringFailed(self._bound.raised(error)) from None

    async def close(self) -> None:
        """A thread ends with the call it is at. One that hangs is a daemon and does not keep the program alive."""
        self._closed = True
        while self._idle:
            self._idle.pop().put(None)
        if self._batcher is not None:
            await self._batcher.close()

    async def _result(self, arguments: dict[str, Any]) -> Any:
        call = functools.partial(self._bound.function, **arguments)
        if self._bound.is_async:
            return await call()
        outcome: Future[Any] = Future()
        if self._idle:
            calls = self._idle.pop()
        else:  # a daemon: in a pool of Python's own, one that hangs would keep the program from ending
            calls = _Calls()
            threading.Thread(target=self._work, args=(calls,), name="reward function", daemon=True).start()
        calls.put((outcome, call))
        try:
            result = await asyncio.wrap_future(outcome)
        finally:
            if not outcome.done():
                self._lost.append(outcome)
        return await result if inspect.isawaitable(result) else result

    def _work(self, calls: _Calls) -> None:
        """What a thread does, up to a call that nobody waits for any more."""
        while (waiting := calls.get()) is not None:
            outcome, call = waiting
            try:
                if outcome.set_running_or_notify_cancel():  # otherwise the deadline was first
                    outcome.set_result(call())
            except BaseException as raised:
                ours = not isinstance(raised, Exception) or isinstance(raised, StopIteration)  # asyncio takes none
                outcome.set_exception(RuntimeError(f"it raised {type(raised).__name__}") if ours else raised)
            if self._closed or outcome in self._lost:
                return
            self._idle.append(calls)
