"""The process that scores: ``python -m dapo.reward.worker``, started by ``pool.py``, which also keeps the deadlines.

It answers each message on standard input with one on standard output, and ends when its input does. A message is a
big-endian 4-byte length and that many bytes of JSON. The first one is the set-up ({"factory", "options", "memory_mb",
"parent"}), all others are items. A reply is {"result": ...}, or {"broken": message} where the user's code broke its
contract, which stops the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from dapo.errors import UserError

Handler = Callable[[dict[str, Any]], dict[str, Any]]

HEADER = struct.Struct(">I")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def encode(message: dict[str, Any]) -> bytes:
    """A message as bytes on the pipe. Lone surrogates in text survive (they are escaped)."""
    body = json.dumps(message).encode("ascii")
    return HEADER.pack(len(body)) + body


def main() -> None:
    source, sink = _take_pipes()
    setup = _read(source)
    if setup is None:
        return
    signal_at_parents_end(signal.SIGKILL)  # a busy worker does not notice the end of its input
    if os.getppid() != setup["parent"]:  # it died before the request
        os._exit(1)
    adopt_orphans()
    # after everything installed: a file of the user's named like a module of the library must not replace it
    sys.path.append(str(Path.cwd()))
    replies = _Replies(sink)
    try:
        module, _, name = setup["factory"].partition(":")
        handle: Handler = getattr(importlib.import_module(module), name)(setup["options"])
    except UserError as error:
        replies.send({"broken": str(error)})
        return
    if setup["memory_mb"] is not None:
        limit_memory(setup["memory_mb"] * 2**20)
    replies.send({"result": {}})
    while (item := _read(source)) is not None:
        try:
            reply: dict[str, Any] = {"result": handle(item)}
        except UserError as error:
            reply = {"broken": str(error)}
        replies.send(reply)


class _Replies:
    """Numbered replies. A process that user code has forked ends here: it must not reply in place of the worker."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._process = os.getpid()
        self._sent = 0

    def send(self, reply: dict[str, Any]) -> None:
        if os.getpid() != self._process:
            os._exit(0)
        self._sent += 1
        try:
            message = encode(reply | {"number": self._sent})
        except (TypeError, ValueError) as error:
            broken = f"the reward function returned what JSON cannot hold: {error}"
            message = encode({"broken": broken, "number": self._sent})
        self._sink.write(message)
        self._sink.flush()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The protocol's pipes. What user code prints goes to standard error, what it reads is empty."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return source, sink


def _read(source: BinaryIO) -> dict[str, Any] | None:
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    body = source.read(size)
    return None if len(body) < size else json.loads(body)


def signal_at_parents_end(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the one that started it ends (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of processes below this one whose own parent has ended, so that they are found and killed, and
    their end can be waited for (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process is gone
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread is
                found += map(int, (thread / "children").read_text().split())
    return found


def processor_s(pid: int) -> list[float]:
    """Seconds of processor time: its own in user mode and in the kernel, and those of children it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15]]


def limit_memory(extra_bytes: int) -> None:
    """On top of what the process holds now, so that the limit means the same on any machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    limit = pages * resource.getpagesize() + extra_bytes
    with contextlib.suppress(ValueError, OSError):  # a lower hard limit is in force already
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
