"""From a recipe's ``reward`` section, or a Python function, to the :class:`~dapo.reward.contract.Scorer` that does it.

Cheap rewards run in place; those that can hang, crash or eat memory run in worker processes (``pool.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, assert_never

from dapo.config import ExactReward, FunctionReward, MathReward
from dapo.errors import RewardError
from dapo.records import Prompt, Reward
from dapo.reward.contract import Scorer
from dapo.reward.convert import reward_from_json, to_reward
from dapo.reward.exact import score_exact
from dapo.reward.function import BoundFunction
from dapo.reward.pool import ScoringFailed, WorkerPool

_PLAIN_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_MAX_LOST_THREADS = 16
"""Calls that may hang in threads, which cannot be killed, before the run is stopped."""
_ASYNC_CONCURRENCY = 64
"""Calls of an async function that are awaited at once."""


def make_scorer(
    config: MathReward | ExactReward | FunctionReward, function: Callable[..., Any] | None = None
) -> Scorer:
    """The scorer that a recipe asks for. Workers start with the first score, or with ``start``.

    Args:
        config: the recipe's ``reward`` section.
        function: a function passed from Python, used in place of the recipe's kind; the section's time limit holds.
    """
    if function is not None:
        return CallableScorer(function, config.timeout_s)
    match config:
        case MathReward():
            return MathScorer(config)
        case ExactReward():
            return ExactScorer(config)
        case FunctionReward():
            return FunctionScorer(config)
        case _:
            assert_never(config)


def needs_answer(config: MathReward | ExactReward | FunctionReward) -> bool:
    """Whether every row must have a reference answer: a user's function may do without."""
    return not isinstance(config, FunctionReward)


class ExactScorer:
    """Equality of text, in place."""

    def __init__(self, config: ExactReward) -> None:
        self._after = config.after

    async def start(self) -> None:
        """Nothing to start."""

    async def score(self, prompt: Prompt, response: str) -> Reward:
        """See :class:`Scorer`."""
        return score_exact(response, _answer(prompt), self._after)

    async def close(self) -> None:
        """Nothing to stop."""


class _PooledScorer:
    """What the scorers in worker processes share."""

    _pool: WorkerPool

    async def start(self) -> None:
        """Start all workers and load what they need, so that errors in it show before the first rollout.

        Raises:
            RewardError: the user's function cannot be loaded, or workers cannot start.
        """
        try:
            await self._pool.start()
        except ScoringFailed as error:
            raise RewardError(f"the reward workers do not start: {error}") from None

    async def close(self) -> None:
        """Kill the workers; returns within seconds."""
        await self._pool.close()

    async def _score(self, item: dict[str, Any]) -> Reward:
        try:
            return reward_from_json(await self._pool.run(item))
        except ScoringFailed as error:
            return Reward(None, 0.0, error=str(error))


class MathScorer(_PooledScorer):
    """Mathematical equality with the reference, in worker processes with a deadline and a memory limit."""

    def __init__(self, config: MathReward) -> None:
        self._pool = WorkerPool(
            "dapo.reward.math:make_handler",
            {"extract": config.extract},
            workers=config.workers,
            timeout_s=config.timeout_s,
            memory_mb=config.memory_mb,
        )

    async def score(self, prompt: Prompt, response: str) -> Reward:
        """See :class:`Scorer`."""
        return await self._score({"response": response, "answer": _answer(prompt)})

    async def unreadable(self, golds: Sequence[str]) -> list[int]:
        """Which references cannot be parsed: they can only be met by their own text. For a report at load.

        Returns:
            Their positions in ``golds``, in order.
        """
        doubtful = sorted({gold for gold in golds if not _PLAIN_NUMBER.fullmatch(gold)})
        flags = await asyncio.gather(*(self._is_readable(gold) for gold in doubtful))
        bad = {gold for gold, is_readable in zip(doubtful, flags, strict=True) if not is_readable}
        return [k for k, gold in enumerate(golds) if gold in bad]

    async def _is_readable(self, gold: str) -> bool:
        try:
            return bool((await self._pool.run({"answer": gold}))["readable"])
        except ScoringFailed:
            return False


class FunctionScorer(_PooledScorer):
    """The user's function named in the recipe, in worker processes: it may hang or crash and harms nothing."""

    def __init__(self, config: FunctionReward) -> None:
        self._name = config.function
        self._pool = WorkerPool(
            "dapo.reward.function:make_handler",
            {"function": config.function, "args": config.args},
            workers=config.workers,
            timeout_s=config.timeout_s,
        )

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


def _answer(prompt: Prompt) -> str:
    if prompt.answer is None:
        raise RewardError(f"row {prompt.row} has no reference answer, which this reward compares with")
    return prompt.answer
