"""Calls to an OpenAI-compatible chat endpoint that go on while the endpoint is down, busy or talks nonsense.

Consumes the body of a question, produces what the model wrote. Waits for the reply, at most ``timeout_s`` a call, and
between calls for pauses that double from 1 s to 30 s, or as long as the server asks for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from dapo.config import JudgeReward
from dapo.errors import RewardError, install
from dapo.reward.client.faults import Fault
from dapo.reward.client.pauses import Pauses, requested_pause
from dapo.reward.client.secrecy import Secrets, shown

FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_UNGRADED_RETRIES = 2
"""An answer that holds no grade costs as much as one that does, and the next is likely to be like it."""
_LARGEST_REPLY = 2**21
"""Bytes. A reply of ``max_tokens`` is a hundredth of that."""
_REACH_TRIES = 3
_REACH_TIMEOUT_S = 10.0

_REFUSED_QUESTION = (400, 413, 422)
"""Statuses that are about this question, such as one that is too long, and say nothing of the next."""
_COMES_BACK = (408, 409, 425, 429)
"""Statuses below 500 that another try may mend."""

T = TypeVar("T")


class NoReply(Exception):
    """This question has no reply. The message says why; other questions go on."""


class _Again(Exception):
    """Another call may help. ``wait_s``: how long the server wants to be left alone."""

    def __init__(self, text: str, wait_s: float = 0.0, ungraded: bool = False) -> None:
        super().__init__(text)
        self.wait_s, self.ungraded = wait_s, ungraded


class Endpoint:
    """One model behind one address.

    The key is read from the environment and appears in the header of a request and nowhere else.

    Raises:
        RewardError: aiohttp is not installed, or the key is missing or cannot be a header.
    """

    def __init__(self, config: JudgeReward) -> None:
        try:
            from dapo.reward.client.connections import HttpConnections, token_in
        except ImportError as error:
            raise RewardError(
                f"reward.kind=judge needs {error.name}, which is not installed: {install('remote')}"
            ) from None
        self._config = config
        key = token_in(config.api_key_env, "reward.api_key_env")
        self._secrets = Secrets(key, config.url)
        self._base = config.url.rstrip("/")
        self._name = f"judge {config.model} at {shown(config.url)}"
        self._connections = HttpConnections(key, config.concurrency)

    async def reach(self) -> None:
        """Find out in a few seconds whether there is a server at all.
        Raises RewardError: there is none, or it does not accept the key. Any other answer is one."""
        for attempt in range(_REACH_TRIES):
            try:
                status, _, data = await self._request("GET", "/models", None, _REACH_TIMEOUT_S)
            except _Again as failure:
                if attempt == _REACH_TRIES - 1:
                    text = self._said(f"{failure}; is it running, and is reward.url right?")
                    raise RewardError(text) from None
                await asyncio.sleep(FIRST_PAUSE_S)
            else:
                if status == 401:
                    raise self._useless(status, self._reason(data))
                return

    async def ask(self, question: bytes, accept: Callable[[str], T | None]) -> tuple[str, T]:
        """What the model wrote and what ``accept`` made of it.

        Args:
            question: JSON, the body of the request.
            accept: None for a text that will not do.

        Raises:
            NoReply: the endpoint refuses this question, or it failed too many times.
            RewardError: the endpoint refuses all questions (key, address, model).
        """
        ungraded, pauses = 0, Pauses(FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        for attempt in range(self._config.retries + 1):
            try:
                return await self._answer(question, accept)
            except _Again as failure:
                last = failure
            ungraded += last.ungraded
            if attempt == self._config.retries or ungraded > _UNGRADED_RETRIES:
                break
            if not last.ungraded:
                await asyncio.sleep(pauses.next(last.wait_s))
        raise NoReply(self._said(f"{last} (call {attempt + 1} of {self._config.retries + 1}, the last)"))

    async def close(self) -> None:
        await self._connections.close()

    async def _answer(self, question: bytes, accept: Callable[[str], T | None]) -> tuple[str, T]:
        status, retry_after, data = await self._request("POST", "/chat/completions", question, self._config.timeout_s)
        if status != 200:
            reason = self._reason(data)
            if status in _REFUSED_QUESTION:
                raise NoReply(self._said(f"the question is refused: HTTP {status}: {reason}"))
            if status in _COMES_BACK or status >= 500 or 200 < status < 300:
                raise _Again(f"HTTP {status}: {reason}", requested_pause(retry_after))
            raise self._useless(status, reason)
        text = _written(data)
        found = accept(text)
        if found is None:
            end = " ".join(self._secrets.blanked(text).split())[-80:]
            raise _Again(f'the reply does not end with a grade on the scale, but with "{end}"', ungraded=True)
        return text, found

    async def _request(
        self, method: str, path: str, body: bytes | None, limit_s: float
    ) -> tuple[int, str | None, bytes]:
        """Status, Retry-After and body. Raises _Again: no connection, no reply in time, or one that does not end."""
        try:
            async with asyncio.timeout(limit_s), self._connections.send(method, self._base + path, body) as reply:
                data = await self._connections.beginning(reply, _LARGEST_REPLY + 1)
        except TimeoutError:
            raise _Again(f"no reply within {limit_s:g} s") from None
        except Fault as fault:
            raise _Again(str(fault)) from None
        if len(data) > _LARGEST_REPLY:
            raise _Again(f"the reply is larger than {_LARGEST_REPLY // 2**20} MiB")
        return reply.status, reply.headers.get("Retry-After"), data

    def _useless(self, status: int, reason: str) -> RewardError:
        config = self._config
        if status in (401, 403):
            key = (
                f"the variable {config.api_key_env}" if config.api_key_env else "a variable named in reward.api_key_env"
            )
            hint = f"; the key comes from {key}"
        elif 300 <= status < 400:
            hint = "; it leads to another address, which belongs into reward.url"
        else:
            hint = "; are reward.url (up to /v1, as a rule) and reward.model right?"
        return RewardError(self._said(f"HTTP {status}: {reason}{hint}"))

    def _said(self, text: str) -> str:
        """A message about this endpoint, without the key, which some servers repeat."""
        return self._secrets.blanked(f"{self._name}: {text}")

    @staticmethod
    def _reason(data: bytes) -> str:
        """What an error reply says, on one line."""
        try:
            found: Any = json.loads(data)
            found = found.get("error", found.get("detail", found))
            found = found.get("message", found) if isinstance(found, dict) else found
        except (ValueError, AttributeError, RecursionError):
            found = data[:2000].decode("utf-8", "replace")
        return " ".join(str(found).split())[:200] or "no reason given"


def _written(data: bytes) -> str:
    """The text in a reply of the chat protocol, whole. Raises _Again: there is none."""
    try:
        choice = json.loads(data)["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise _Again(f"the reply is not one of the chat protocol: {data[:80]!r}") from None
    if reason == "length":  # a cut "Grade: 1" may have been a 10
        raise _Again("the reply was cut off; raise reward.max_tokens", ungraded=True)
    if not isinstance(text, str):
        raise _Again("the reply holds no text", ungraded=True)
    return text
