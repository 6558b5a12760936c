"""Serving HTTP: where a server listens, and how it ends.

Consumes an ASGI application; the page, the reward server and the Prometheus endpoint are served with this. uvicorn's
limits begin once a request has been read. :class:`Server` bounds what comes before: half-sent requests and responses
that nobody reads end after a while, and when there are too many connections, those that ask for nothing or do not read
make room. Who may ask is in ``gate.py``; :func:`run_service` ends a server without losing the requests it has begun.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import ipaddress
import logging
import os
import resource
import signal
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from dapo.errors import ConfigError
from dapo.util.shutdown import stop_signals

LOCAL = "127.0.0.1"
HEAD_S, BODY_S, BODY_BYTES = 10.0, 60.0, 2**20
"""Seconds that the head of a request may take, and so many bytes of its body, or all of it; a client may go that long
without reading any answer."""
_LOOK_S = 2.0
_DESCRIPTORS = 4096  # of the process that a server has to itself
_BACKLOG = 64  # connections that are accepted in one go, before any of them can be turned away
_log = logging.getLogger(__name__)


# --- where ------------------------------------------------------------------------------------------------------------


def listening_socket(host: str, ports: Sequence[int]) -> socket.socket:
    """A socket that listens on the first of ``ports`` that is free; 0: any.
    Raises ConfigError: the address cannot be listened on."""
    problem: OSError | None = None
    for port in ports:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            # the protocol is named since asyncio switches off Nagle's delay, 40 ms a reply, where it is TCP by name
            found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        except (OSError, UnicodeError) as error:  # UnicodeError: of a name that cannot be one
            raise ConfigError(f"--host {host}: not an address of this machine: {error}") from None
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
            found.listen(128)
            return found
        except OSError as error:
            found.close()
            problem = error
    shown = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else f"{ports[0]}"
    raise ConfigError(f"cannot listen on {host}, port {shown}: {problem and problem.strerror}; try --port 0")


def url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. ``token``: what clients must bring; needed wherever others than this machine can reach."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None

    def __post_init__(self) -> None:
        if self.token is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host}: others can reach this address, so the server wants a token: put one into an "
                "environment variable and name it with --token-env; or listen on 127.0.0.1"
            )

    @staticmethod
    def token_in(name: str | None) -> str | None:
        """The token in an environment variable; None: none is named. Raises ConfigError: it is not set."""
        token = None if name is None else os.environ.get(name, "").strip()
        if token == "":
            raise ConfigError(f"--token-env {name}: this environment variable is not set, or empty")
        return token


def is_loopback(host: str) -> bool:
    """Whether an address, or the header ``Host`` of a request, is of this machine."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]") or (":" in name.strip("[]") and not name.endswith("]")):
        name, port = host, "0"  # there is none; all colons belong to an address of IPv6
    name = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    try:
        if not port.isdecimal() or name.lower() in ("localhost", "localhost."):
            return port.isdecimal()
        address = ipaddress.ip_address(name)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return False


# --- the server -------------------------------------------------------------------------------------------------------


def most_connections() -> int:
    """A half of the descriptors that the process may have, less those that come at once; 1000 at most."""
    return min(1000, max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - _BACKLOG // 2))


class _Protocol(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._received = 0
        self._since, self._seen = time.monotonic(), self._state
        if len(self.connections) > most_connections():
            others = [one for one in self.connections if isinstance(one, _Protocol) and one is not self]
            idle = [one for one in others if one._makes_room]
            victim = min(idle, key=lambda one: (not one._pipelines, one._since), default=self)
            self.connections.discard(victim)  # at once, lest the next newcomer picks it again
            victim.transport.abort()
        self._look()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)

    @property
    def _is_idle(self) -> bool:
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
    def _state(self) -> tuple[Any, bool, int, int]:
        return self.cycle, self._is_idle, self._unread, self._received // BODY_BYTES

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
    """See the module. All of :func:`~dapo.util.shutdown.stop_signals` end it as SIGTERM does."""

    def __init__(self, app: Any, **settings: Any) -> None:
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


# --- an end without loss ----------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a server is that drains. ``answering``: requests whose answer is not yet written."""

    state: Literal["starting", "ready", "draining"] = "starting"
    answering: int = 0


class OwnSignals(Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the caller's; uvicorn's way would end the process with the signal's exit code."""
        yield


async def run_service(
    app: ASGIApp,
    address: Address,
    progress: Progress,
    start: Callable[[], Coroutine[Any, Any, object]],
    close: Callable[[], Coroutine[Any, Any, object]],
    *,
    drain_s: float,
    say: Callable[[str], object],
    starting: str,
    ready: str,
    until: Callable[[], Coroutine[Any, Any, object]] = lambda: asyncio.Event().wait(),
) -> None:
    """Serve from now on, and be ready once ``start`` is done, until a signal comes. The first one drains: running
    requests are finished within ``drain_s`` seconds, and the application refuses new ones. The second one ends the
    process. In the end calls ``close``, which makes what still runs fail.

    Args:
        progress: kept up to date for the application, which counts what it answers.
        starting, ready: what to say then; ``{}`` in the second one becomes the address.
        until: returns when the application can work no more, which ends it as a signal does.

    Raises ConfigError: the address cannot be listened on; and what ``start`` raises.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))  # the usual 1024 are not enough
    try:
        listening = listening_socket(address.host, [address.port])
    except ConfigError:
        await close()
        raise
    where, signalled = url(*listening.getsockname()[:2]), _on_signals()
    # connections are kept longer than clients keep an idle one, so that none is closed in the moment it is used
    server = OwnSignals(app, lifespan="off", timeout_keep_alive=75, timeout_graceful_shutdown=1)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        say(f"listening on {where}, {starting}")
        if await _before(signalled.wait(), start(), serving):
            progress.state = "ready"
            say(f"ready: {ready.format(where)}")
            await _before(signalled.wait(), until(), serving)
        progress.state = "draining"
        say(f"stopping; {progress.answering} requests to finish, within {drain_s:g} s")
        end = time.monotonic() + drain_s
        while progress.answering and time.monotonic() < end:
            await asyncio.sleep(0.05)
    finally:
        await close()  # before the server's own end, for which there is no answer but 500
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)


async def _before(end: Coroutine[Any, Any, Any], work: Coroutine[Any, Any, Any], serving: asyncio.Task[None]) -> bool:
    """Whether ``work`` is done before ``end`` comes; what it raises is raised, and so is what ends ``serving``."""
    tasks = asyncio.create_task(end), asyncio.create_task(work)
    try:
        await asyncio.wait({*tasks, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        if tasks[1].done():
            tasks[1].result()
        return tasks[1].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _on_signals() -> asyncio.Event:
    """Set by the first signal; the second one ends the process."""
    signalled = asyncio.Event()

    def handle(number: int) -> None:
        if signalled.is_set():
            os._exit(128 + number)
        signalled.set()

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, handle, number)
    return signalled
