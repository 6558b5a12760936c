"""HTTP connections to one server, for the clients of policy and reward servers and for the judge, and what a reply's
status says. Callers set the time limits. Requests go to the address that the recipe names, and to no other."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp

from dapo.errors import UserError
from dapo.util.http.faults import BadReply, Fault, Refusal, error_text, requested_pause

_IDLE_S = 4.0  # less than servers keep idle connections: many do so for 5 s


class HttpConnections:
    """At most ``most`` connections at once. Belongs to the event loop that it is first used in. Proxies and logins from
    the environment, cookies and redirects are ignored."""

    def __init__(self, token: str | None, most: int) -> None:
        self._token, self._most = token, most
        self._session: aiohttp.ClientSession | None = None

    def _opened(self) -> aiohttp.ClientSession:
        """Made when first needed, as it must be made on the event loop."""
        if self._session is None:
            authorization = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
            self._session = aiohttp.ClientSession(
                headers={"Accept-Encoding": "identity", **authorization},
                connector=aiohttp.TCPConnector(limit=self._most, keepalive_timeout=_IDLE_S),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session

    @asynccontextmanager
    async def send(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        accept: str = "application/json",
        kind: str = "application/json",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A reply whose body is not read yet. ``kind``: of ``body``. Raises Fault: no connection, or it broke."""
        headers = {"Accept": accept} | ({} if body is None else {"Content-Type": kind})
        try:
            async with self._opened().request(method, url, data=body, headers=headers, allow_redirects=False) as reply:
                yield reply
        except (aiohttp.ClientError, OSError) as error:
            raise connection_fault(error) from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def beginning(reply: aiohttp.ClientResponse, most: int) -> bytes:
    """The first ``most`` bytes of the body."""
    body = bytearray()
    async for chunk in reply.content.iter_any():
        body += chunk
        if len(body) >= most:
            break
    return bytes(body[:most])


async def whole(reply: aiohttp.ClientResponse, most: int) -> bytes:
    """The body. Raises BadReply: it has more than ``most`` bytes."""
    body = await beginning(reply, most + 1)
    if len(body) > most:
        raise BadReply(f"the reply is larger than {most // 2**20} MiB")
    return body


def connection_fault(error: Exception) -> Fault:
    number = getattr(error, "errno", None) or 0
    if isinstance(error, aiohttp.ClientSSLError):
        cause = str(error.args[-1])  # what TLS says; its numbers are not those of the system
    elif number > 0:
        cause = os.strerror(number)  # asyncio's own text names the call that failed
    else:
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorError):
        return Fault(f"cannot connect: {cause}")
    return Fault(f"the connection broke: {cause}", smaller=True)


def token_in(variable: str | None, key: str, error: type[UserError]) -> str | None:
    """The token in the environment variable that ``key`` of the recipe names.
    Raises ``error``: it is not set, or cannot be a header."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise error(f"{key}: the environment variable {variable} is not set, or empty")
    if not (token.isascii() and token.isprintable()):
        raise error(f"{key}: the value of {variable} holds characters that no token has")
    return token


_LARGEST_ERROR = 2**16
_LATER = (408, 425, 429)
_NOT_READY = (502, 503, 504)
_REFUSED = (413, 422)  # statuses that concern this request only, such as one that is too large


async def checked(
    reply: aiohttp.ClientResponse, name: str, section: str, error: type[UserError]
) -> aiohttp.ClientResponse:
    """``reply``, if all is well. ``section``: of the recipe, whose keys say how the server is reached.
    Raises, by the status, Fault: ask again later; Refusal: ask for less; ``error``: asking again is no use."""
    if 200 <= reply.status < 300:
        return reply
    text, retry = error_text(await beginning(reply, _LARGEST_ERROR))
    code = reply.status
    cause = f"{code} {reply.reason}" + (f": {text}" if text else "")
    if retry is not False and (code in _LATER or code >= 500):
        pause_s = requested_pause(reply.headers.get("Retry-After"))
        raise Fault(cause, pause_s=pause_s, smaller=code == 500, alive=code in _NOT_READY)
    if code in _REFUSED:
        raise Refusal(cause)
    raise error(f"{name}: {cause}{_advice(code, reply.headers, section)}")


def _advice(code: int, headers: Mapping[str, str], section: str) -> str:
    if code in (401, 403):
        return f"; {section}.token_env names the environment variable with the token of the server"
    if code in (301, 302, 303, 307, 308):
        return f"; it points to {headers.get('Location', 'another address')}: put that into {section}.url"
    if code in (404, 405):
        return f"; is {section}.url right?"
    return "; the server does not take what it was sent" if code == 400 else ""
