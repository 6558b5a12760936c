"""Evaluates assert tests (trusted data) outside of the sandbox, on plain copies of what the program returns.

The program never sees what it is compared with: the names in a test that are the program's become stand-ins
(:class:`~dapo.reward.code.remote.Remote`), whose calls cross the border, and comparisons happen here. Runs in a process
of its own, because a comparison of hostile values may never end.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, Literal, cast

from dapo.reward.code.border import Border, ProgramGone
from dapo.reward.code.names import Snippet, load_known
from dapo.reward.code.remote import PLAIN, plain_of
from dapo.reward.worker import limit_memory

Outcome = Literal["pass", "fail", "timeout", "error"]


class Evaluator:
    """The process that evaluates one program after another. It is replaced when a test's time is up. ``memory_bytes``:
    on top of what this process holds; ``reply_bytes``: longest reply of a program that is read."""

    def __init__(self, memory_bytes: int, reply_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._reply_bytes = reply_bytes
        self._pid: int | None = None
        self._link: socket.socket | None = None

    def begin(self, channel: socket.socket, tests: Sequence[Snippet]) -> int:
        """Start to evaluate ``tests`` in order with the program at the other end of ``channel``, which is closed here.

        Returns the file descriptor of the reports, lines of JSON: ``[outcome, detail]`` for each test, then ``null``.
        They end early after a test that the program or this process did not survive.
        Raises OSError: no process can be started.
        """
        job = marshal.dumps([(test.source, test.free, test.known, test.has_variables) for test in tests])
        for _ in range(2):  # it may have died since
            if self._link is None:
                self._start()
            try:
                link = cast(socket.socket, self._link)
                socket.send_fds(link, [len(job).to_bytes(4, "big")], [channel.fileno()])
                link.sendall(job)
                channel.close()
                return link.fileno()
            except ConnectionError:
                self.kill()
        raise OSError("the process that evaluates tests dies")

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                _confine(self._memory_bytes, theirs.fileno())
                while _serve(theirs, self._reply_bytes):
                    pass
            except BaseException:
                os._exit(1)
            os._exit(0)
        theirs.close()
        self._pid, self._link = pid, ours

    def kill(self) -> None:
        """End the process; the next program gets a new one."""
        if self._pid is not None and self._link is not None:
            self._link.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = self._link = None


def _serve(link: socket.socket, reply_bytes: int) -> bool:
    """One program; False: there are no more."""
    header, fds, _, _ = socket.recv_fds(link, 4, 1)
    if not fds:
        return False
    job = link.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
    with socket.socket(fileno=fds[0]) as channel:
        border = Border(channel, reply_bytes)
        namespace: dict[str, Any] = {"__name__": "tests", PLAIN: plain_of}
        for fields in marshal.loads(job):
            outcome, detail = _run(border, Snippet(*fields), namespace)
            link.sendall(json.dumps([outcome, detail[:500]]).encode() + b"\n")
            if border.gone:
                break
    link.sendall(b"null\n")
    return True


def _confine(memory_bytes: int, kept: int) -> None:
    """Hostile values may be large; nothing that a test prints may reach the worker's pipes. Files of other threads must
    not stay open here, or they would wait for their end. Integers may be as long as the test's time allows."""
    sys.set_int_max_str_digits(0)
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 of names, not of paths
        if int(entry) > 2 and int(entry) != kept:
            with contextlib.suppress(OSError):
                os.close(int(entry))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    limit_memory(memory_bytes)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _run(border: Border, test: Snippet, namespace: dict[str, Any]) -> tuple[Outcome, str]:
    """One test. It passes only if it comes to its end, has used something of the program's, and the program lives."""
    try:
        code = compile(test.source, "test", "exec", dont_inherit=True, optimize=0)  # never without its asserts
        border.track_changes = test.has_variables
        found = border.names(test.free)
        namespace.update(found | {name: load_known(path) for name, path in test.known})
        exec(code, namespace)
    except AssertionError as error:
        return "fail", f"{type(error).__name__} {_text(error)}".strip()
    except ProgramGone as error:
        return ("fail", str(error)) if error.too_long else ("error", str(error))
    except BaseException as error:
        return "error", f"{type(error).__name__}: {_text(error)}"
    if border.gone:
        return "error", "the program ended within the test"
    if not found:
        return "fail", "the test uses nothing that the program defines"
    return "pass", ""


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "(not printable)"
