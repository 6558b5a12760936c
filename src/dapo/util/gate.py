"""Who may ask a server over HTTP, and how much a client may take: checks that come before a request is read.

Consumes an ASGI application. The page and the servers of rewards and policies stand behind this.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dapo.util.serving import Progress, is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI  # not all who stand behind a gate have it

_T = TypeVar("_T")


class Gate:
    """An application behind its checks. A subclass says whom it turns away; bodies have at most ``most`` bytes, what
    is larger is answered with 413."""

    def __init__(self, app: ASGIApp, token: str | None, most: int) -> None:
        self._app, self._token, self._most = app, token, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def noticed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.begins(scope, message)
            await send(message)

        headers = Headers(scope=scope)
        refusal = self.refusal(scope, headers)
        if refusal is not None:
            await _read_little(receive, headers)
        answer = refusal or self._app
        await answer(scope, limited(receive, self.most(scope["path"]), self.too_large(scope["path"])), noticed)

    def refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer to a request that is turned away; None: it may pass."""
        raise NotImplementedError

    def most(self, path: str) -> int:
        """Bytes of a body."""
        return self._most

    def too_large(self, path: str) -> str:
        return f"the request is larger than the {self.most(path) / 2**20:.3g} MiB that this server takes"

    def begins(self, scope: Scope, message: Message) -> None:
        """An answer begins: to add headers, or to count it."""

    def wrong_name(self, headers: Headers, or_else: str) -> str | None:
        """What is wrong with the name that the server is asked by. Without a token only names of this machine pass: a
        page elsewhere can reach 127.0.0.1 through a name of its own."""
        host = headers.get("host", "")
        if self._token is not None or is_loopback(host):
            return None
        return f"no such name here: {host[:100]}; use 127.0.0.1, or {or_else}"

    def is_token(self, given: bytes) -> bool:
        return self._token is not None and hmac.compare_digest(given, self._token.encode())

    def announces_more(self, scope: Scope, headers: Headers) -> bool:
        length = headers.get("content-length", "0")
        return length.isdecimal() and int(length[:20]) > self.most(scope["path"])


async def _read_little(receive: Receive, headers: Headers) -> None:
    """Read a small body that a refused client is sending, for a second: a connection closed with unread bytes is
    reset, and the client may lose the answer."""
    length = headers.get("content-length", "0")
    left = int(length) if length.isdecimal() and len(length) < 8 else 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1):
            while 0 < left < 2**20 and (message := await receive()).get("more_body"):
                left -= len(message["body"])


class WorkGate(Gate):
    """The gate of a server that works for programs: it asks for the token everywhere but at ``/health``, refuses work
    while the server starts or drains, and keeps ``progress.answering``.
    ``works``: whether a path asks for work. ``error``: an answer with a status, a text and headers. ``count``: hears
    the path and the status of each answer; paths that ask for no work are ``other``. ``larger``: of paths that go with
    what runs, so that they pass while the server drains: bytes of their bodies."""

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        most: int,
        progress: Progress,
        works: Callable[[str], bool],
        error: Callable[[int, str, dict[str, str]], Response],
        count: Callable[[str, str], object],
        larger: Callable[[str], int | None] = lambda path: None,
    ) -> None:
        super().__init__(app, token, most)
        self._progress, self._works, self._error, self._count = progress, works, error, count
        self._larger = larger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        works = self._works(scope.get("path", ""))
        self._progress.answering += works
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._progress.answering -= works

    def most(self, path: str) -> int:
        return self._larger(path) or self._most

    def too_large(self, path: str) -> str:
        return f"{super().too_large(path)} ({'all weights of its model' if self._larger(path) else '--max-body-mb'})"

    def begins(self, scope: Scope, message: Message) -> None:
        self._count(scope["path"] if self._works(scope["path"]) else "other", str(message["status"]))

    def refusal(self, scope: Scope, headers: Headers) -> Response | None:
        state, path = self._progress.state, scope["path"]
        if wrong := self.wrong_name(headers, "give the server a --token-env"):
            return self._error(403, wrong, {})
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if (
            self._token is not None
            and path != "/health"
            and not (scheme.lower() == "bearer" and self.is_token(given.encode("latin-1")))
        ):
            return self._error(401, "the bearer token is missing or wrong", {"WWW-Authenticate": "Bearer"})
        if not self._works(path):
            return None
        if state == "draining" and self._larger(path) is None:
            return self._error(503, "the server is shutting down", {"Connection": "close", "Retry-After": "1"})
        if state == "starting":
            return self._error(503, "the server is starting", {"Retry-After": "1"})
        if (coding := headers.get("content-encoding", "identity")) != "identity":
            return self._error(415, f"the body is sent as {coding[:50]}; send it as it is", {"Connection": "close"})
        larger = self.announces_more(scope, headers)
        return self._error(413, self.too_large(path), {"Connection": "close"}) if larger else None


class Room:
    """Counts the items that wait or are worked on; more than ``most`` are refused. ``what`` they are called."""

    def __init__(self, most: int, what: str) -> None:
        self.most, self.what, self.waiting = most, what, 0

    def take(self, count: int) -> None:
        """Have ``count`` more items wait. Raises HTTPException: 429, there is no room for so many."""
        if self.waiting + count > self.most:
            text = f"{self.waiting} {self.what} wait, and with these {count} it would be more than {self.most}"
            raise HTTPException(429, f"{text} (--max-waiting)", {"Retry-After": "1"})
        self.waiting += count

    def give(self, count: int) -> None:
        self.waiting -= count

    @contextlib.contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """:meth:`take`, and give back at the end."""
        self.take(count)
        try:
            yield
        finally:
            self.give(count)


async def disconnected(request: Request) -> None:
    """Returns when the client goes away. To be begun when the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """What ``work`` comes to, which is cancelled when the client goes away. Raises ClientDisconnect: it has gone."""
    gone, task = asyncio.create_task(disconnected(request)), asyncio.create_task(work)
    try:
        await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)


def place_in_body(location: Sequence[Any]) -> str:
    """``items[3].response`` for ``("body", "items", 3, "response")``; empty: the body itself."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[1:])
    return text.lstrip(".")


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


def metrics_response(registry: Any) -> Response:
    """What a registry of prometheus-client has collected, as every version of Prometheus reads it."""
    from prometheus_client import generate_latest

    return Response(generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def add_reports(
    app: FastAPI, progress: Progress, registry: Any, lacking: Callable[[], str | None] = lambda: None
) -> None:
    """Routes that say how a server is. ``lacking``: why it cannot work although it is ready."""

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive. Needs no token."""
        return {"state": progress.state}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether work can be asked for: 503 while the server starts or drains, or lacks something."""
        told = {"state": progress.state} if (reason := lacking()) is None else {"state": "waiting", "reason": reason}
        return JSONResponse(told, 200 if told["state"] == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return metrics_response(registry)
