"""The process that a run lives in: its time, its memory, and work beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple

from dapo.util.tasks import until_done

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


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


@contextlib.contextmanager
def awake_for_signals() -> Iterator[None]:
    """Inside, a signal wakes the event loop, which has to be that of the main thread; in others nothing happens.

    Python runs handlers in the main thread, once that gets to it. A signal that another thread receives, or that comes
    in the instant between letting go of the interpreter and going to sleep, leaves the loop asleep until something
    else happens, which may be the end of an update. ``loop.add_signal_handler`` would wake it too, but takes the place
    of the handler, which could then no longer end a process whose loop does not turn.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, (heard, told) = asyncio.get_running_loop(), socket.socketpair()
    heard.setblocking(False)
    told.setblocking(False)
    loop.add_reader(heard, heard.recv, 4096)
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        loop.remove_reader(heard)
        heard.close()
        told.close()


RESUMABLE = 75
"""Exit code of a run that was told to stop and can go on: EX_TEMPFAIL of sysexits.h."""
_ECHO_S = 0.1
_LEAVE_S = 30.0


def stop_signals() -> list[signal.Signals]:
    """Signals that ask a program to end and leave it time to: of a person, a terminal that goes away, a scheduler
    before a job's time is over, a limit of processor time. Without those that the program was started to ignore, as
    ``nohup`` does. SIGQUIT is not one: it asks for a core dump, now."""
    asked = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
    return [number for number in asked if signal.getsignal(number) != signal.SIG_IGN]


class Stopped(Exception):
    """A run was told to stop by a signal, and did."""


class Shutdown:
    """Whether the process was told to stop (see :func:`stop_signals`), and by when it has to be gone.

    A context: inside of it the first signal asks the run to stop, and starts a clock: when the time is over the process
    ends, whatever it is at. The second signal ends it at once. What waits, waits for what ``doing`` names.

    Attributes:
        within_s: seconds from the first signal to the end of the process.
        signal: the first one that came.
        doing: what is waited for, for messages.
        run: folder of the run that can go on; None: there is none yet.
        saved: its last checkpoint, as far as is known.
    """

    def __init__(self, within_s: float = math.inf, code_of: Callable[[BaseException], int] = lambda error: 1) -> None:
        """
        Args:
            within_s: from the first signal to the end of the process.
            code_of: exit code for the error that a run ended with.
        """
        self.signal: signal.Signals | None = None
        self.doing = "what was under way"
        self.run: Path | None = None
        self.saved: Path | None = None
        self.within_s = within_s
        self._code_of = code_of
        self._since = math.inf
        self._ask: Callable[[], object] | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._timers: list[threading.Timer] = []
        self._code = 1

    def __enter__(self) -> Shutdown:
        if threading.current_thread() is threading.main_thread():  # others may not have handlers
            for number in stop_signals():
                self._handlers[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for timer in self._timers:
            timer.cancel()
        if _workers():  # they would be waited for once the main thread is at its end
            threading.Thread(target=self._outlive, name="dapo-exit", daemon=True).start()

    def ask(self, do: Callable[[], object] | None) -> None:
        """What a first signal does from now on; None: it raises KeyboardInterrupt where the program is."""
        self._ask = do
        if do is not None and self.signal is not None:  # it came before, and what it raised was caught by others
            do()

    @property
    def seconds_left(self) -> float:
        """Until the process is ended; infinite as long as no signal has come."""
        return self.within_s - (time.monotonic() - self._since) if self.signal else math.inf

    @property
    def exit_code(self) -> int:
        """75 if the run can go on, else that of the signal."""
        return RESUMABLE if self.run is not None else 128 + (self.signal or signal.SIGINT)

    def leave(self, error: BaseException | None) -> None:
        """The run is over: the process has half a minute to end by itself, which a thread that hangs would prevent."""
        self._code = 0 if error is None else self.exit_code if isinstance(error, Stopped) else self._code_of(error)
        self._later(_LEAVE_S, self._leave_behind)

    def _outlive(self) -> None:
        threading.main_thread().join()
        time.sleep(_LEAVE_S)
        self._leave_behind()

    def _leave_behind(self) -> None:
        names = ", ".join(_workers()) or "something"
        self._end(self._code, f"the run is over, but these threads still work: {names}; ended without them")

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            # a terminal and a launcher may both pass on the same Ctrl-C; the kernel repeats SIGXCPU every second
            if time.monotonic() - self._since > _ECHO_S and number != signal.SIGXCPU:
                self._end(128 + number, f"a second signal, {signal.Signals(number).name}: ended at once")
            return
        self.signal, self._since = signal.Signals(number), time.monotonic()
        self._later(self.within_s, self._out_of_time)  # first: whatever happens to the rest, the process ends
        if self._ask is None:
            raise KeyboardInterrupt
        _tell(f"{self.signal.name}: stopping, within {self.within_s:g} s (run.stop_within_s); again to end at once")
        self._ask()

    def _out_of_time(self) -> None:
        left = f"the run can go on from {self.saved}" if self.saved else "there is no checkpoint yet"
        self._end(
            self.exit_code,
            f"the {self.within_s:g} s of run.stop_within_s are over, and it still waited for {self.doing}; {left}",
        )

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        if math.isfinite(seconds):
            timer = threading.Timer(seconds, do)
            timer.daemon = True
            timer.start()
            self._timers.append(timer)

    @staticmethod
    def _end(code: int, text: str) -> None:
        """End the process, without waiting for anything. Workers die with it."""
        with contextlib.suppress(OSError):
            if os.isatty(1):
                os.write(1, b"\x1b[?25h")  # a live display hides the cursor
        _tell(text)
        os._exit(code)


def _workers() -> list[str]:
    """Names of the threads that Python waits for at its end."""
    return sorted(t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread())


def _tell(text: str) -> None:
    """A line on standard error, past all buffers and locks: also from inside of a signal handler."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:  # a reader that stopped reading must not hold up the end
            os.write(2, f"{text}\n".encode())


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
