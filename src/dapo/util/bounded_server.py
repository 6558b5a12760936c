"""A uvicorn server that a few clients cannot hold up: connections are bounded in number, requests in time.

Consumes an ASGI application; whoever serves one does it with this. Half-sent requests and responses that nobody reads
end after a while, and when there are too many connections, those that ask for nothing or do not read make room. uvicorn
bounds neither: its limits begin once a request has been read. Who may ask, and how large a body may be, is the
application's affair (``limited`` helps).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import resource
import signal
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

from dapo.util.process import stop_signals

HEAD_S, BODY_S = 10.0, 60.0
"""Seconds that the head of a request may take, and all of it; a client may go that long without reading any answer."""
_LOOK_S = 2.0
_BACKLOG = 64
"""Connections that are accepted in one go, before any of them can be turned away."""
_log = logging.getLogger(__name__)


def most_connections() -> int:
    """A half of the descriptors that the process may have, less those that come at once; 1000 at most."""
    return min(1000, max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - _BACKLOG // 2))


def limited(receive: Receive, most: int, text: str) -> Receive:
    """``receive``, which raises an HTTPException (413, ``text``) once a body has more than ``most`` bytes."""
    size = 0

    async def receive_limited() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most:
            raise HTTPException(413, text, {"Connection": "close"})
        return message

    return receive_limited


def announces_more(headers: Headers, most: int) -> bool:
    """Whether a request says that its body has more than ``most`` bytes."""
    length = headers.get("content-length", "0")
    return length.isdecimal() and int(length[:20]) > most


class _Protocol(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since, self._seen = time.monotonic(), self._state
        if len(self.connections) > most_connections():
            others = [one for one in self.connections if isinstance(one, _Protocol) and one is not self]
            idle = [one for one in others if one._makes_room]
            victim = min(idle, key=lambda one: (not one._pipelines, one._since), default=self)
            self.connections.discard(victim)  # at once, lest the next newcomer picks it again
            victim.transport.abort()
        self._look()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is read or answered: none has come, or not its whole head."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def _unread(self) -> int:
        """Bytes of answers that wait for the client, the kernel's among them, if more wait than it takes."""
        if size := self.transport.get_write_buffer_size():
            with suppress(OSError, ValueError):
                sent = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
                size += struct.unpack("i", sent)[0]
        return size

    @property
    def _pipelines(self) -> bool:
        """Whether requests wait behind the one that is answered: whoever reads its answers first sends none."""
        return not self._is_idle and not self.cycle.more_body and bool(self.conn.trailing_data[0])

    @property
    def _makes_room(self) -> bool:
        return self._pipelines or (time.monotonic() - self._since > 2 * _LOOK_S if self._unread else self._is_idle)

    @property
    def _state(self) -> tuple[Any, bool, int]:
        return self.cycle, self._is_idle, self._unread

    def _look(self) -> None:
        if self not in self.connections:  # one that is closing stays until its last answer is read
            return
        half = self.timeout_keep_alive_task is None if self._is_idle else self.cycle.more_body
        if not (half or self._unread) or self._state != self._seen:
            self._since, self._seen = time.monotonic(), self._state
        if time.monotonic() - self._since > (HEAD_S if self._is_idle and not self._unread else BODY_S):
            self.transport.abort()
        else:
            self.loop.call_later(_LOOK_S, self._look)


class Server(uvicorn.Server):
    """See the module. All of :func:`~dapo.util.process.stop_signals` end it as SIGTERM does."""

    def __init__(self, app: Any, **settings: Any) -> None:
        """``settings``: of uvicorn."""
        quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
        super().__init__(uvicorn.Config(app, http=_Protocol, ws="none", backlog=_BACKLOG, **quiet, **settings))
        self._told = -1e9

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._fault)
        await super().startup(sockets)

    def _fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._told > 10:  # asyncio tells of each connection that it cannot accept
            self._told = time.monotonic()
            _log.warning("no file descriptor is left for a new connection (ulimit -n); clients wait")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            here = threading.current_thread() is threading.main_thread()
            before = {number: signal.signal(number, self.handle_exit) for number in stop_signals() if here}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
