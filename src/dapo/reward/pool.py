"""Worker processes driven from asyncio: each takes one item (an object that JSON can hold) at a time.

The deadline counts from when the worker gets the item; after it the worker is killed with all its children. The item of
a worker that dies is retried once, on a fresh one. Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

from dapo.errors import RewardError
from dapo.records import Reward
from dapo.reward.batching import begin
from dapo.reward.contract import Scorer
from dapo.reward.worker import HEADER, children_of, encode, processor_s

_START_TIMEOUT_S = 120.0  # for the imports of a worker on a busy machine
_DYING_S = 1.0  # for the exit status of a worker whose pipes have closed
_CLOSE_TIMEOUT_S = 5.0  # for killed processes to end
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""One each, unless the user says otherwise: hundreds of workers with a thread a core are more than a system allows."""


class ScoringFailed(Exception):
    """This item has no result (time-out, dead worker). The message says why; other items go on."""


class OutOfTime(ScoringFailed):
    """The deadline passed. ``cpu_s``: processor time that the worker used for the item; if it is short, the machine is
    the cause and not the item."""

    def __init__(self, limit_s: float, cpu_s: float) -> None:
        super().__init__(f"timed out after {limit_s:g} s")
        self.cpu_s = cpu_s


class _WorkerDied(Exception):
    pass


class WorkerPool:
    """At most ``workers`` processes that run one handler. Belongs to the event loop it is first used in.

    Args:
        factory: ``module:name`` of a function that makes the handler from ``options``, called once in each worker.
        options: what the factory gets; must be JSON.
        workers: processes, started when first needed.
        timeout_s: longest time for one item.
        memory_mb: memory that a worker may take on top of what it has after its start; None: no limit.
    """

    def __init__(
        self, factory: str, options: Mapping[str, Any], *, workers: int, timeout_s: float, memory_mb: int | None = None
    ) -> None:
        self._setup = {"factory": factory, "options": dict(options), "memory_mb": memory_mb, "parent": os.getpid()}
        self._timeout_s = timeout_s
        self._size = workers
        self._free = asyncio.Semaphore(workers)
        self._idle: list[_Worker] = []
        self._live: set[_Worker] = set()
        self._killed: set[_Worker] = set()
        self._exchanges: set[asyncio.Task[dict[str, Any]]] = set()
        self._closed = asyncio.Event()

    async def start(self) -> None:
        """Start all workers now; without it they start when first needed.
        Raises RewardError: the user's code cannot be loaded; ScoringFailed: workers die or hang while they start."""
        missing = self._size - len(self._live)
        started = await asyncio.gather(*(self._start_worker() for _ in range(missing)), return_exceptions=True)
        self._idle += [w for w in started if isinstance(w, _Worker)]
        for outcome in started:
            if isinstance(outcome, _WorkerDied):
                raise ScoringFailed(f"a worker could not be started: {outcome}")
            if isinstance(outcome, BaseException):
                raise outcome

    async def run(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """The handler's result for ``item``. Raises ScoringFailed: the worker died twice, or (:class:`OutOfTime`) the
        deadline passed; RewardError: the user's code cannot be loaded or broke its contract."""
        message = _message(item)
        await self._free.acquire()
        # if the caller is cancelled, the item is finished all the same: its worker need not be killed
        exchange = begin(self._exchanges, self._attempts(message))
        exchange.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(exchange)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A worker for one caller, who sends it one item after the other; killed if the last one was not answered.
        Raises ScoringFailed: no worker can be started."""
        async with self._free:
            try:
                worker = await self._take()
            except _WorkerDied as error:
                raise ScoringFailed(f"a worker could not be started: {error}") from None
            session = Session(worker, self._timeout_s)
            try:
                yield session
            finally:
                if session.alive and not self._closed.is_set():
                    self._idle.append(worker)
                else:
                    self._discard(worker)

    async def _attempts(self, message: bytes) -> dict[str, Any]:
        try:
            return await self._attempt(message)
        except _WorkerDied:
            try:
                return await self._attempt(message)
            except _WorkerDied as error:
                raise ScoringFailed(f"two workers died on it, the last one {error}") from None

    async def close(self) -> None:
        """Kill all workers and wait, for a bounded time, until they are gone. Items still running fail."""
        self._closed.set()
        for worker in self._live:
            worker.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.gather(*(worker.process.wait() for worker in self._live | self._killed))
                await asyncio.gather(*self._exchanges, return_exceptions=True)
        self._idle.clear()
        self._live.clear()
        self._killed.clear()

    async def _attempt(self, message: bytes) -> dict[str, Any]:
        worker = await self._take()
        used = worker.cpu_s()
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await worker.exchange(message)
        except BaseException as error:  # the worker is busy or broken: it must not be used again
            took = worker.cpu_s() - used
            self._discard(worker)
            if isinstance(error, TimeoutError):
                raise OutOfTime(self._timeout_s, took) from None
            raise
        self._idle.append(worker)
        return _result(reply)

    async def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.process.returncode is None:
                return worker
            self._discard(worker)
        return await self._start_worker()

    async def _start_worker(self) -> _Worker:
        if self._closed.is_set():
            raise ScoringFailed("the scorer is closed")
        worker = await _Worker.spawn()
        if self._closed.is_set():  # while it started
            self._discard(worker)
            raise ScoringFailed("the scorer is closed")
        self._live.add(worker)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                _result(await worker.exchange(encode(self._setup)))
        except BaseException as error:
            self._discard(worker)
            if isinstance(error, TimeoutError):
                raise ScoringFailed(f"a worker was not ready after {_START_TIMEOUT_S:g} s") from None
            raise
        if self._closed.is_set():
            self._discard(worker)
        return worker

    def _discard(self, worker: _Worker) -> None:
        worker.kill()
        self._live.discard(worker)
        self._killed = {w for w in self._killed if w.process.returncode is None} | {worker}


class Session:
    """See :meth:`WorkerPool.session`. ``alive``: whether all items were answered."""

    def __init__(self, worker: _Worker, timeout_s: float) -> None:
        self._worker, self._timeout_s = worker, timeout_s
        self.alive = True

    async def ask(self, item: Mapping[str, Any], *, timed: bool = True) -> dict[str, Any]:
        """As :meth:`WorkerPool.run`, without a second attempt. ``timed``: False: whoever waits has a limit."""
        message = _message(item)
        self.alive = False
        try:
            async with asyncio.timeout(self._timeout_s if timed else None) as limit:
                reply = await self._worker.exchange(message)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ScoringFailed(f"timed out after {self._timeout_s:g} s") from None
        except _WorkerDied as error:
            raise ScoringFailed(f"its process was {error}") from None
        self.alive = True
        return _result(reply)


def _message(item: Mapping[str, Any]) -> bytes:
    try:
        return encode(dict(item))
    except RecursionError:  # of a call that a model has written
        raise ScoringFailed("it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise RewardError(f"a worker process can only be sent what JSON can hold: {error}") from None


def _result(reply: Mapping[str, Any]) -> dict[str, Any]:
    if "broken" in reply:
        raise RewardError(reply["broken"])
    result: dict[str, Any] = reply["result"]
    return result


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None  # both were asked for
        self.process = process
        self._exchanges = 0
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    async def spawn(cls) -> _Worker:
        """In a process group of its own, so that it can be killed with all its children."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # do not put the working folder first on the import path: a json.py there would win
            "-m",
            "dapo.reward.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**dict.fromkeys(_THREADS, "1"), **os.environ},
        )
        return cls(process)

    def cpu_s(self) -> float:
        """Processor time of the process in seconds; 0 if it is not known."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            return sum(processor_s(self.process.pid)[:2])
        return 0.0

    async def exchange(self, message: bytes) -> dict[str, Any]:
        self._exchanges += 1
        try:
            self._stdin.write(message)
            await self._stdin.drain()
            (size,) = HEADER.unpack(await self._stdout.readexactly(HEADER.size))
            reply = json.loads(await self._stdout.readexactly(size))
        except (ConnectionError, asyncio.IncompleteReadError, ValueError):
            raise _WorkerDied(await self._cause_of_death()) from None
        # a function that forks, or writes to our pipe, could shift replies and give a sample another's reward
        if not isinstance(reply, dict) or reply.get("number") != self._exchanges:
            raise _WorkerDied("sent what is no reply to it")
        return reply

    async def _cause_of_death(self) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DYING_S):  # its pipes close shortly before it ends
                code = await self.process.wait()
                return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return "closed its pipes"

    def kill(self) -> None:
        if self.process.returncode is None:
            _kill_descendants(self.process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._stdin.close()
        # Close our end of its output too (asyncio has no public name for it). Not transport.close(): that collects
        # the exit status before asyncio's own watcher, which then warns.
        output = self.process._transport.get_pipe_transport(1)  # type: ignore[attr-defined]
        if output is not None:
            output.close()


def _kill_descendants(root: int) -> None:
    """Kill what a process has started, also in sessions of their own (Linux only). It is halted first, so that it
    starts nothing more; what others start meanwhile is found in the next round."""
    killed: set[int] = set()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(root, signal.SIGSTOP)
        while found := set(_descendants(root)) - killed:
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            killed |= found


def _descendants(root: int) -> list[int]:
    found = children_of(root)
    return found + [pid for child in found for pid in _descendants(child)]


class PooledScorer(Scorer):
    """Scores with the :class:`~dapo.reward.pool.WorkerPool` that a subclass makes in its ``__init__``."""

    _pool: WorkerPool

    async def start(self) -> None:
        try:
            await self._pool.start()
        except ScoringFailed as error:
            raise RewardError(f"the reward workers do not start: {error}") from None

    async def close(self) -> None:
        await self._pool.close()

    async def _score(self, item: dict[str, Any]) -> Reward:
        try:
            return Reward(**await self._pool.run(item))
        except ScoringFailed as error:
            return Reward(None, 0.0, error=str(error))
