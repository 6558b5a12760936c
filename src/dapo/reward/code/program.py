"""One running program: its processes seen from outside, how it is loaded, watched and ended.

Consumes the process that ``sandbox.py`` has started, produces the stages of its start, its use of time and memory, and
its exit status; waits with limits that the program cannot stretch.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.reward.code.runner import CONFINED, MALFORMED, READY
from dapo.reward.worker import children_of, processor_s

_START_S = 60.0  # longest time for an empty sandbox to stand on a busy machine
_LOOK_EVERY_S = 0.1
_MOST_FILES = 20_000  # in the scratch folder, whose size limit does not count what the kernel keeps about each of them
_WORDS = 4096
_STRETCH = 4  # most that a limit is stretched on a machine that is too busy to run the program


class SandboxFailed(Exception):
    """The sandbox does not work, which says nothing about the program."""


class TimeUp(Exception):
    """The program has used up its time."""


class OverLimit(Exception):
    """The program takes more memory or makes more processes than it may; the message says which."""


@dataclass(frozen=True)
class Usage:
    """What a program took, all its processes together: ``cpu_s`` in seconds, ``memory_bytes`` of the largest one.

    ``status`` is the exit status of its main process, 128 + n if signal n ended it.
    """

    status: int
    cpu_s: float
    memory_bytes: int


class Program:
    """A started process, the socket to the runner in it, and its first process inside of the sandbox."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, own_group: bool) -> None:
        self.process = process
        self.channel = channel
        self.usage: Usage | None = None
        self._own_group = own_group
        self._took: dict[int, tuple[float, int]] = {}  # by process, as last seen: a program may hide a child's end
        self._first = process.pid
        self._handle: int | None = None  # of the first process; unlike its number, it is never another's
        self.exit_fd = os.pidfd_open(process.pid)  # is ready to be read when all has ended

    def first_inside(self, pid: int) -> None:
        """The first process inside is this one; all others end with it."""
        with contextlib.suppress(ProcessLookupError):
            self._handle = os.pidfd_open(pid)
        self._first = pid

    def boot(self, code: bytes, job: tuple[Any, ...]) -> None:
        """Send the runner and its job, once the sandbox stands. Raises SandboxFailed: it does not."""
        self.channel.settimeout(_START_S)
        try:
            self.channel.sendall(code)
            if self.channel.recv(1) != READY:
                raise SandboxFailed(self._last_words())
            body = marshal.dumps(job)
            self.channel.sendall(len(body).to_bytes(4, "big") + body)
            if self.channel.recv(1) != CONFINED:
                raise SandboxFailed("what runs in it cannot give up its rights")
        except OSError:
            raise SandboxFailed(self._last_words()) from None
        self.channel.settimeout(None)

    def _last_words(self) -> str:
        self.kill()
        assert self.process.stderr is not None
        words = self.process.stderr.read(1000).decode("utf-8", "replace").strip()
        return words or f"it ended with exit status {self.wait().status} before the program began"

    def load(self, limit_s: float, limits: tuple[int, int]) -> bytes:
        """Wait until the program's top level has run, of one that is loaded as a module.

        Returns the status byte: LOADED, MALFORMED or RAISED, or nothing if it ended.
        Raises TimeUp: it takes longer than ``limit_s``; OverLimit: see :meth:`look`.
        """
        for _ in Clock(self, limits).ticks(limit_s, [self.channel.fileno()]):
            with contextlib.suppress(ConnectionError):
                return self.channel.recv(1)
            return b""
        raise AssertionError("ticks do not end")

    def is_malformed(self) -> bool:
        """Whether a script that has ended did not compile."""
        self.channel.settimeout(0)
        with contextlib.suppress(OSError):
            return self.channel.recv(1) == MALFORMED
        return False

    def complaint(self) -> str:
        """The exception that loading ended in. It is what the program says, so little of it is read."""
        self.channel.settimeout(1.0)
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            body = self.channel.recv(_WORDS, socket.MSG_WAITALL)[4:]
            _, name, _, arguments = json.loads(body)
            return f"{name}: {' '.join(map(str, arguments))}"[:200]
        return "an exception when it is loaded"

    def look(self, memory_bytes: int, processes: int) -> None:
        """See whether all processes together keep to their limits, where the kernel does not see to it.
        Raises OverLimit: they do not."""
        family = self._family()
        if len(family) > processes + 1:  # the first one is bubblewrap's own
            raise OverLimit("too many processes")
        self._note(family)
        if len(family) > 2 and _memory(family, "statm") > memory_bytes and _memory(family, "smaps") > memory_bytes:
            raise OverLimit("out of memory")
        if self._files() > _MOST_FILES:
            raise OverLimit("too many files")

    def _files(self) -> int:
        with contextlib.suppress(OSError):
            if self._handle is not None:  # it has a /tmp of its own
                folder = os.statvfs(f"/proc/{self._first}/root/tmp")
                return folder.f_files - folder.f_ffree
        return 0

    def is_alone(self) -> bool:
        """Whether it has neither other processes nor threads, which would make it wait for itself."""
        main = self._main()
        with contextlib.suppress(OSError):
            return {*self._family()} <= {self._first, main} and len([*Path(f"/proc/{main}/task").iterdir()]) == 1
        return True

    def _note(self, family: list[int]) -> None:
        for pid in family:
            if pid == self._first and not self._own_group:  # bubblewrap's own
                continue
            with contextlib.suppress(OSError, ValueError, IndexError):
                self._took[pid] = (sum(processor_s(pid)[:2]), _peak(pid))

    def _family(self) -> list[int]:
        found, new = [self._first], [self._first]
        while new and len(found) < 10_000:
            children = [child for pid in new for child in children_of(pid)]
            new = [child for child in children if child not in found]
            found += new
        return found

    def measure(self) -> Usage:
        """What its processes have taken so far: those that live, their children that were waited for, by the first
        process too (it gets the orphans), and others as they were last seen."""
        main, family, cpu_s = self._main(), self._family(), 0.0
        self._note(family)
        for pid in family:
            with contextlib.suppress(OSError, ValueError, IndexError):
                cpu_s += sum(processor_s(pid)[0 if pid != self._first or self._own_group else 2 :])
        with contextlib.suppress(OSError, ValueError, IndexError):
            cpu_s = max(cpu_s, int(Path(f"/proc/{main}/schedstat").read_text().split()[0]) / 1e9)
        return self._usage(0, cpu_s, 0)

    def _usage(self, status: int, cpu_s: float, memory_bytes: int) -> Usage:
        seen_s = sum(seconds for seconds, _ in self._took.values())
        return Usage(status, max(cpu_s, seen_s), max((memory_bytes, *(peak for _, peak in self._took.values()))))

    def _main(self) -> int:
        return self._first if self._own_group else (children_of(self._first) or [self._first])[0]

    def waited_s(self) -> float:
        """For how long its main process has been ready to run while the machine did other things."""
        main = self._main()
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{main}/schedstat").read_text().split()[1]) / 1e9
        return 0.0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self.usage is None:
                os.kill(self.process.pid, signal.SIGKILL)  # not Popen.kill, which may collect the exit status
        if self._own_group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def wait(self) -> Usage:
        """Wait for the end of all of it.

        bubblewrap reports the exit status and ends; the first process inside, which goes with it, is then a child of
        this process (see :func:`~dapo.reward.worker.adopt_orphans`), and knows what all others took.
        """
        if self.usage is None:
            _, status, used = os.wait4(self.process.pid, 0)
            self.process.returncode = os.waitstatus_to_exitcode(status)
            code, parts = self.process.returncode, [used]
            if self._handle is not None:
                ended = select.poll()
                ended.register(self._handle, select.POLLIN)
                ended.poll()
                with contextlib.suppress(ChildProcessError):  # it went before bubblewrap did, which has added it up
                    parts.append(os.wait4(self._first, 0)[2])
            cpu_s = sum(part.ru_utime + part.ru_stime for part in parts)
            memory = max(part.ru_maxrss for part in parts) * 1024
            self.usage = self._usage(code if code >= 0 else 128 - code, cpu_s, memory)
        return self.usage

    def end(self) -> Usage:
        self.kill()
        usage = self.wait()
        self.kill()  # without a sandbox, children that outlived their parent
        self.channel.close()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        for fd in (self._handle, self.exit_fd):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._handle, self.exit_fd = None, -1
        return usage


class Clock:
    """Time as it counts against a limit: what passes, less what the program waits for a busy machine.

    A program that sleeps uses up its limit as one that computes does. One that cannot get a processor does not, up to
    ``_STRETCH`` times the limit; but one with processes or threads of its own may be waiting for these, and is granted
    nothing.
    """

    def __init__(self, program: Program, limits: tuple[int, int]) -> None:
        self._program = program
        self._limits = limits
        self._new = True
        self._looked = time.monotonic()
        self.restart()

    def restart(self) -> None:
        """The next test begins."""
        self._start = time.monotonic()
        self._alone = True
        self._waited = 0.0 if self._new else self._program.waited_s()
        self._new = False

    def is_up(self, limit_s: float) -> bool:
        passed = time.monotonic() - self._start
        if passed < limit_s:
            return False
        self._alone = self._alone and self._program.is_alone()
        waited = self._program.waited_s() - self._waited if self._alone else 0.0
        return passed - waited >= limit_s or passed >= _STRETCH * limit_s

    def ticks(self, limit_s: float, reading: list[int], writing: list[int] | None = None) -> Iterator[tuple[int, ...]]:
        """The file descriptors that are ready, again and again; the lists may be changed in between.
        Raises TimeUp: the limit is reached; OverLimit: see :meth:`Program.look`."""
        while True:
            waiting = select.poll()
            for fd in reading:
                waiting.register(fd, select.POLLIN)
            for fd in writing or ():
                waiting.register(fd, select.POLLOUT)
            ready = tuple(fd for fd, _ in waiting.poll(1000 * _LOOK_EVERY_S))
            if ready:
                yield ready
            if self.is_up(limit_s):
                raise TimeUp
            if time.monotonic() - self._looked >= _LOOK_EVERY_S:
                self._looked = time.monotonic()
                self._alone = self._alone and self._program.is_alone()
                self._program.look(*self._limits)


def _peak(pid: int) -> int:
    """Most bytes in memory that it has had. Its name, which it chooses, stands in the same file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _memory(pids: list[int], source: str) -> int:
    """Bytes in memory of these processes together; ``smaps`` counts shared pages once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            if source == "statm":
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
            else:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total
