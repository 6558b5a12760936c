"""HTTP connections to one server, for the clients of reward servers and for the judge.

Consumes requests, produces replies whose bodies are not read yet. Waits without a limit: callers set one for a request
as a whole. What is sent goes to the address that the recipe names, and to no other.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from dapo.errors import RewardError
from dapo.reward.client.faults import Fault

_IDLE_S = 4.0
"""Idle connections are kept for less than servers keep them, many of which do so for 5 s."""


class HttpConnections:
    """At most ``most`` connections at once, opened when needed. Belongs to the event loop that it is first used in.

    Proxies and logins from the environment, cookies and redirects are not followed. Replies are asked for uncompressed,
    and read also if they are not.
    """

    def __init__(self, token: str | None, most: int) -> None:
        self._token, self._most = token, most
        self._session: aiohttp.ClientSession | None = None

    def _opened(self) -> aiohttp.ClientSession:
        """Made when first needed: it wants to be made on the event loop."""
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
        self, method: str, url: str, body: bytes | None = None, accept: str = "application/json"
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A reply whose body is not read yet. ``body``: JSON.
        Raises Fault: the connection could not be made, or broke."""
        headers = {"Accept": accept} | ({} if body is None else {"Content-Type": "application/json"})
        try:
            async with self._opened().request(method, url, data=body, headers=headers, allow_redirects=False) as reply:
                yield reply
        except (aiohttp.ClientError, OSError) as error:
            raise connection_fault(error) from None

    @staticmethod
    async def beginning(reply: aiohttp.ClientResponse, most: int) -> bytes:
        """The first ``most`` bytes of the body, or all of it if there are fewer."""
        body = bytearray()
        async for chunk in reply.content.iter_any():
            body += chunk
            if len(body) >= most:
                break
        return bytes(body[:most])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def connection_fault(error: Exception) -> Fault:
    """What an exception of the connection's means: a server that is not there, or one that went away."""
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


def token_in(variable: str | None, key: str) -> str | None:
    """The token in an environment variable; ``key`` of the recipe names the variable.
    Raises RewardError: it is not set, or cannot be a header."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise RewardError(f"{key}: the environment variable {variable} is not set, or empty")
    if not (token.isascii() and token.isprintable()):
        raise RewardError(f"{key}: the value of {variable} holds characters that no token has")
    return token
