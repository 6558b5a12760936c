"""Stopping in order when a signal asks for it, within the time that is left."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any


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


RESUMABLE = 75  # exit code of a run that was told to stop and can go on: EX_TEMPFAIL of sysexits.h
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
        if do is not None and self.signal is None:  # another run begins: the one before has left
            for timer in self._timers:
                timer.cancel()
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
