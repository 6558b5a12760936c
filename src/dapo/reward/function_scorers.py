"""Scorers around the user's own function: in worker processes if a recipe names it, in this process if it was passed
from Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dapo.config import FunctionReward
from dapo.errors import RewardError
from dapo.records import Prompt, Reward
from dapo.reward.contract import Doubt
from dapo.reward.convert import to_reward
from dapo.reward.function import BoundFunction
from dapo.reward.pool import WorkerPool
from dapo.reward.pooled import PooledScorer

_MAX_LOST_THREADS = 16
"""Calls that may hang in threads, which cannot be killed, before the run is stopped."""
_ASYNC_CONCURRENCY = 64
"""Calls of an async function that are awaited at once."""


class FunctionScorer(PooledScorer):
    """The user's function named in the recipe, in worker processes: it may hang or crash and harms nothing."""

    def __init__(self, config: FunctionReward) -> None:
        self._name = config.function
        self._pool = WorkerPool(
            "dapo.reward.function:make_handler",
            {"function": config.function, "args": config.args},
            workers=config.workers,
            timeout_s=config.timeout_s,
        )

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        """Any row will do."""
        return ()

    async def score(self, prompt: Prompt, response: str) -> Reward:
        """See :class:`Scorer`."""
        item = {"prompt": prompt.text, "response": response, "answer": prompt.answer, "meta": dict(prompt.meta)}
        reward = await self._score(item)
        if reward.error is not None and self._name not in reward.error:
            return Reward(None, 0.0, error=f"reward function {self._name}: {reward.error}")
        return reward


class CallableScorer:
    """A Python function passed through the API, called in this process.

    A sync function runs in a thread, an async one on the event loop. Neither can be killed: what exceeds its time is
    reported and left behind. Functions that may hang belong into a file named in the recipe (:class:`FunctionScorer`).

    Args:
        function: see :mod:`dapo.reward.function` for its contract.
        timeout_s: longest time for one score.
        concurrency: calls at once; by default 1 for a sync function, which need not be thread-safe, and 64 for an
            async one.
    """

    def __init__(self, function: Callable[..., Any], timeout_s: float = 10.0, concurrency: int | None = None) -> None:
        if not callable(function):
            raise RewardError(f"reward: expected a function, got {type(function).__name__} {function!r}")
        self._bound = BoundFunction(function, getattr(function, "__qualname__", type(function).__name__))
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(concurrency or (_ASYNC_CONCURRENCY if self._bound.is_async else 1))
        self._lost: list[threading.Thread] = []
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> None:
        """Nothing to start."""

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        """Any row will do."""
        return ()

    async def score(self, prompt: Prompt, response: str) -> Reward:
        """See :class:`Scorer`."""
        name = self._bound.name
        arguments = self._bound.arguments(prompt.text, response, prompt.answer, prompt.meta)
        await self._free.acquire()
        # A thread goes on when its caller is cancelled; the next call waits for it: not every function is thread-safe.
        call = asyncio.create_task(self._timed_call(arguments))
        self._calls.add(call)
        call.add_done_callback(self._settle)
        if self._bound.is_async:
            result = await call
        else:
            result = await asyncio.shield(call)
        return result if isinstance(result, Reward) and result.error is not None else to_reward(result, name)

    async def _timed_call(self, arguments: dict[str, Any]) -> Any:
        """What the function returned, or ``Reward(error=...)``."""
        self._check_lost_threads()
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await self._call(arguments)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed or task is None or task.cancelling():
                raise
            # it came out of the user's function, where an inner task was cancelled: a failed score like any other
            return self._bound.failure(RuntimeError("it raised CancelledError"))
        except Exception as error:
            if deadline.expired():
                text = f"reward function {self._bound.name}: timed out after {self._timeout_s:g} s"
                return Reward(None, 0.0, error=text)
            return self._bound.failure(error)

    def _settle(self, call: asyncio.Task[Any]) -> None:
        self._calls.discard(call)
        self._free.release()
        if not call.cancelled():
            call.exception()  # taken note of, also if the caller has gone

    async def close(self) -> None:
        """Threads left behind are daemons and do not keep the program alive."""
        self._closed = True

    async def _call(self, arguments: dict[str, Any]) -> Any:
        call = functools.partial(self._bound.function, **arguments)
        if self._bound.is_async:
            return await call()
        thread, outcome = _in_daemon_thread(call)
        try:
            result = await outcome
        finally:
            if thread.is_alive():
                self._lost.append(thread)
        return await result if inspect.isawaitable(result) else result

    def _check_lost_threads(self) -> None:
        self._lost = [thread for thread in self._lost if thread.is_alive()]
        if len(self._lost) >= _MAX_LOST_THREADS:
            raise RewardError(
                f"reward function {self._bound.name}: {len(self._lost)} calls hang and cannot be stopped; name the "
                "function in the recipe (reward.kind=function), where it runs in processes that can be killed"
            )


def _in_daemon_thread(call: Callable[[], Any]) -> tuple[threading.Thread, asyncio.Future[Any]]:
    """Start ``call`` in a thread of its own. In a shared pool, one that hangs would keep the program from ending."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if outcome.done():  # the deadline was first
            return
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def run() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = call()
        except BaseException as raised:
            if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
                error = raised
            else:  # a future takes none of these
                error = RuntimeError(f"it raised {type(raised).__name__}")
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, result, error)

    thread = threading.Thread(target=run, name="reward function", daemon=True)
    thread.start()
    return thread, outcome
