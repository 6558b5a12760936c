"""Engines in a process of their own: what launches kernels shares no interpreter with what serves clients.

Consumes calls of the engine's protocol; what has come of a stretch returns as one message. Messages are pickled, over a
socket that nobody else has; new weights go through memory that both see. When the process ends, whoever waits for it
hears why; when the one that started it ends, so does it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dapo.errors import UserError
from dapo.records import Sample
from dapo.rollout.engine import Draft, EngineError, Request, portable
from dapo.rollout.group import Layout, layout_of, unpacked
from dapo.rollout.native.checks import check_request
from dapo.util.asynchronous import in_thread, until_done
from dapo.util.shutdown import stop_signals

if TYPE_CHECKING:
    from dapo.rollout.native.engine import NativeEngine

Load = Callable[[Any], "tuple[Mapping[str, NativeEngine], Any]"]
"""Makes engines, by name, and says something of them; tells a listener how far it is."""

_START = "import sys; sys.path[:] = sys.argv[3:]; from dapo.rollout.process import main; main(*map(int, sys.argv[1:3]))"
_PATIENCE_S = 5.0


class ProcessError(EngineError, UserError):
    """The process of an engine did not start, or has ended; the message says why."""


class EngineProcess:
    """A process with engines. ``broken``: why it has ended."""

    def __init__(self, load: Load) -> None:
        """``load`` is called there, so it has to be pickled, as its engines need not be."""
        self._socket, theirs = socket.socketpair()
        self._memory = os.fdopen(os.memfd_create("dapo-weights"), "r+b", 0)  # /dev/shm is too small in many containers
        given = theirs.fileno(), self._memory.fileno()
        words = [sys.executable, "-c", _START, *map(str, given), *sys.path]
        self._process = subprocess.Popen(words, pass_fds=given, start_new_session=True)  # Ctrl-C is for us
        theirs.close()
        self._socket.sendall(_message(load))
        self.broken: EngineError | None = None
        self._hearing: dict[int, Callable[[Any], None]] = {}
        self._keys = itertools.count()
        self._reading: asyncio.Task[None] | None = None
        self._open = asyncio.Event()
        self._putting = asyncio.Lock()
        self._writer: asyncio.StreamWriter

    def loaded(self, listener: Any) -> tuple[dict[str, dict[str, tuple[int, ...]]], Any]:
        """Wait for ``load``, of which ``listener`` is told. Returns the shapes of the weights of each engine, and what
        it says of them. Raises what it raises; ProcessError: the process has ended."""
        while True:
            told = _received(self._socket)
            if told is None:
                raise ProcessError(f"the engine did not start: {self._last_words()} while it loaded the model")
            if isinstance(told, BaseException):
                raise told
            what, *arguments = told
            if what == "loaded":
                return arguments[0], arguments[1]
            getattr(listener, what)(*arguments)

    async def asked(self, name: str, method: str, *args: Any) -> AsyncGenerator[Any]:
        """What a method of engine ``name`` yields, or what its coroutine returns and the engine's version then. To be
        closed, which ends it there too. Raises EngineError."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(), name="dapo-engine")
        await self._open.wait()
        if self.broken:
            raise self.broken
        key, queue = next(self._keys), asyncio.Queue[Any]()
        self._hearing[key] = queue.put_nowait
        self._writer.write(_message((key, name, method, args)))
        event: Any = ()
        try:
            while (event := await queue.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            del self._hearing[key]
            if not (event is None or isinstance(event, Exception) or self.broken):
                self._writer.write(_message((key,)))

    async def put(
        self, bucket: Sequence[tuple[str, Tensor]], take: Callable[[Layout], Coroutine[Any, Any, Any]]
    ) -> None:
        """Call ``take`` when some weights are in memory that both processes see."""
        async with self._putting:
            try:
                layout = await in_thread(self._shared, bucket)
                work = asyncio.ensure_future(take(layout))
                await until_done(work)  # whoever asks may go, but the engine reads from there
            finally:
                self._memory.truncate(0)
            work.result()

    def _shared(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> Layout:
        layout, size = layout_of(bucket)
        self._memory.truncate(size)
        views = _mapped(self._memory.fileno(), layout)
        for name, tensor in bucket:
            views[name].copy_(tensor)
        return layout

    async def _read(self) -> None:
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._socket)
            self._open.set()
            while True:
                size = int.from_bytes(await reader.readexactly(8))
                for key, event in pickle.loads(await reader.readexactly(size)):
                    if key is None:
                        self.broken = event
                    elif (hear := self._hearing.get(key)) is not None:
                        hear(event)
        except (OSError, asyncio.IncompleteReadError):
            self.broken = self.broken or ProcessError(await in_thread(self._last_words))
        finally:
            self.broken = self.broken or EngineError("the engine was closed")
            self._open.set()
            for hear in self._hearing.values():
                hear(self.broken)

    def _last_words(self) -> str:
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_PATIENCE_S)
        why = " (killed, as the system does where memory is short)" if code == -9 else ""
        return f"its process ended with exit code {code}{why}"

    def kill(self) -> None:
        """End it, which has nothing to lose."""
        self.broken = self.broken or EngineError("the engine was closed")
        self._process.kill()
        self._process.wait()


def _asks(method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def ask(self: ProcessEngine, *args: Any) -> Any:
        [(found, self.version)] = [answer async for answer in self._process.asked(self._name, method, *args)]
        return found

    return ask


class ProcessEngine:
    """One of the engines in a process."""

    def __init__(self, process: EngineProcess, name: str, shapes: Mapping[str, tuple[int, ...]], **limits: Any) -> None:
        """``limits``: as :func:`~dapo.rollout.native.checks.check_request` has them."""
        self._process, self._name, self._limits = process, name, limits
        self.shapes, self.version = shapes, 0

    @property
    def broken(self) -> EngineError | None:
        return self._process.broken

    def check(self, request: Request) -> None:
        check_request(request, can_decode=True, **self._limits)

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        return self._process.asked(self._name, "generate", requests)

    def stream(self, requests: Sequence[Request]) -> AsyncIterator[Sample | Draft]:
        return self._process.asked(self._name, "stream", requests)

    cancel, pause, resume, begin, commit, sleep, wake, _put = map(
        _asks, ("cancel", "pause", "resume", "begin", "commit", "sleep", "wake", "put")
    )

    async def put(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        if bucket:
            await self._process.put(bucket, self._put)

    async def close(self) -> None:
        """End the process, with the other engines in it."""
        await in_thread(self._process.kill)


def _message(content: Any) -> bytes:
    data = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(8) + data


def _received(line: socket.socket) -> Any:
    """None: it has ended."""
    content = b""
    with suppress(ConnectionError):  # it has not read all that was sent to it
        content = line.recv(int.from_bytes(line.recv(8, socket.MSG_WAITALL)), socket.MSG_WAITALL)
    return pickle.loads(content) if content else None


def _mapped(memory: int, layout: Layout) -> dict[str, Tensor]:
    """Tensors in memory that both processes see."""
    size = os.fstat(memory).st_size
    return unpacked(torch.from_file(f"/proc/self/fd/{memory}", True, size, dtype=torch.uint8), layout)


# --- the process itself -----------------------------------------------------------------------------------------------


class _Telling:
    """A listener whose words go to the process that has started this one."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *args: self._line.sendall(_message((method, *args)))


def main(line: int, memory: int) -> None:
    """Load engines, and do what is asked of them until nobody is there to ask."""
    for number in stop_signals():  # which schedulers send to all processes: what runs is finished first
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(1e-4)  # each launch lets the interpreter go, and has to wait for it where the loop is at work
    with socket.socket(fileno=line) as ours, suppress(ConnectionError, EOFError):
        threading.Thread(target=_end_with, args=(line,), daemon=True).start()
        try:
            load: Load = _received(ours)
            engines, about = load(_Telling(ours))
        except Exception as error:
            ours.sendall(_message(portable(error)))
            return
        gc.freeze()
        ours.sendall(_message(("loaded", {name: engine.shapes for name, engine in engines.items()}, about)))
        asyncio.run(_serve(engines, ours, memory))


def _end_with(line: int) -> None:
    """Leave at once, whatever this process is at, when the other side has gone."""
    waiting = select.poll()
    waiting.register(line, select.POLLRDHUP)
    waiting.poll()
    os._exit(0)


async def _serve(engines: Mapping[str, NativeEngine], line: socket.socket, memory: int) -> None:
    reader, writer = await asyncio.open_connection(sock=line)
    loop, tasks, events = asyncio.get_running_loop(), dict[int, asyncio.Task[None]](), list[tuple[int | None, Any]]()

    def send() -> None:
        writer.write(_message(events))
        events.clear()

    def tell(key: int | None, event: Any) -> None:
        if not events:
            loop.call_soon(send)  # behind all that one stretch has woken
        events.append((key, event))

    async def answer(key: int, name: str, method: str, args: Sequence[Any]) -> None:
        engine = engines[name]
        try:
            given = [list(_mapped(memory, *args).items())] if method == "put" else args
            asked = getattr(engine, method)(*given)
            if isinstance(asked, AsyncGenerator):
                async with aclosing(asked):
                    async for event in asked:
                        tell(key, event)
            else:
                tell(key, (await asked, engine.version))
            tell(key, None)
        except Exception as error:
            tell(key, portable(error))
        finally:
            tasks.pop(key, None)
            if engine.broken:
                tell(None, portable(engine.broken))

    while True:
        size = int.from_bytes(await reader.readexactly(8))
        key, *asked = pickle.loads(await reader.readexactly(size))
        if asked:
            tasks[key] = loop.create_task(answer(key, *asked))
        elif key in tasks:
            tasks.pop(key).cancel()
