"""Calls to an OpenAI-compatible chat endpoint, repeated while it is down, busy or gives no grade. Between calls are
pauses that double from 1 s to 30 s, or as long as the server asks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TypeVar

from dapo.config import JudgeReward
from dapo.errors import RewardError, extra
from dapo.util.http.faults import BadReply, Fault, Pauses, error_text, requested_pause
from dapo.util.http.secrecy import Secrets, shown

FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_UNGRADED_RETRIES = 2  # A reply without a grade costs as much as one with it, and is likely to be repeated
_LARGEST_REPLY = 2**21
_REACH_TRIES = 3
_REACH_TIMEOUT_S = 10.0

_REFUSED_QUESTION = (400, 413, 422)  # statuses that concern this question only, such as one that is too long
_COMES_BACK = (408, 409, 425, 429)  # statuses below 500 after which another call may succeed

T = TypeVar("T")


class NoReply(Exception):
    """This question has no reply; others may have one."""


class _Ungraded(Fault):
    """The reply holds no grade."""


class Endpoint:
    """One model behind one address. The key is read from the environment and appears only in the header of requests.
    Raises RewardError: aiohttp is not installed, or the key is missing or cannot be a header."""

    def __init__(self, config: JudgeReward) -> None:
        with extra("remote", f"reward.kind={config.kind}", RewardError):
            from dapo.util.http.connections import HttpConnections, token_in
        self._config = config
        key = token_in(config.api_key_env, "reward.api_key_env", RewardError)
        self._secrets = Secrets(key, config.url)
        self._base = config.url.rstrip("/")
        self._name = f"judge {config.model} at {shown(config.url)}"
        self._connections = HttpConnections(key, config.concurrency)

    async def reach(self) -> None:
        """Raises RewardError: there is no server within a few seconds, or it does not accept the key. Any other answer
        is accepted."""
        for attempt in range(_REACH_TRIES):
            try:
                status, _, data = await self._request("GET", "/models", None, _REACH_TIMEOUT_S)
            except Fault as fault:
                if attempt == _REACH_TRIES - 1:
                    text = self._said(f"{fault}; is it running, and is reward.url right?")
                    raise RewardError(text) from None
                await asyncio.sleep(FIRST_PAUSE_S)
            else:
                if status == 401:
                    raise self._useless(status, error_text(data)[0])
                return

    async def ask(self, question: bytes, accept: Callable[[str], T | None]) -> tuple[str, T]:
        """The text of the model and what ``accept`` made of it (None: ask again). ``question``: JSON, the body.
        Raises NoReply: the endpoint refuses this question, or it failed too many times; RewardError: the endpoint
        refuses all questions (key, address, model)."""
        ungraded, pauses = 0, Pauses(FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        for attempt in range(self._config.retries + 1):
            try:
                return await self._answer(question, accept)
            except Fault as fault:
                last = fault
            ungraded += isinstance(last, _Ungraded)
            if attempt == self._config.retries or ungraded > _UNGRADED_RETRIES:
                break
            if not isinstance(last, _Ungraded):
                await asyncio.sleep(pauses.next(last.pause_s))
        raise NoReply(self._said(f"{last} (call {attempt + 1} of {self._config.retries + 1}, the last)"))

    async def close(self) -> None:
        await self._connections.close()

    async def _answer(self, question: bytes, accept: Callable[[str], T | None]) -> tuple[str, T]:
        status, retry_after, data = await self._request("POST", "/chat/completions", question, self._config.timeout_s)
        if status != 200:
            reason = error_text(data)[0] or "no reason given"
            if status in _REFUSED_QUESTION:
                raise NoReply(self._said(f"the question is refused: HTTP {status}: {reason}"))
            if status in _COMES_BACK or status >= 500 or 200 < status < 300:
                raise Fault(f"HTTP {status}: {reason}", pause_s=requested_pause(retry_after))
            raise self._useless(status, reason)
        text = _written(data)
        found = accept(text)
        if found is None:
            end = " ".join(self._secrets.blanked(text).split())[-80:]
            raise _Ungraded(f'the reply does not end with a grade on the scale, but with "{end}"')
        return text, found

    async def _request(
        self, method: str, path: str, body: bytes | None, limit_s: float
    ) -> tuple[int, str | None, bytes]:
        """Status, Retry-After and body. Raises Fault: no connection, no reply in time, or one that is too large."""
        from dapo.util.http.connections import whole

        try:
            async with asyncio.timeout(limit_s), self._connections.send(method, self._base + path, body) as reply:
                return reply.status, reply.headers.get("Retry-After"), await whole(reply, _LARGEST_REPLY)
        except TimeoutError:
            raise Fault(f"no reply within {limit_s:g} s") from None
        except BadReply as error:
            raise Fault(str(error)) from None

    def _useless(self, status: int, reason: str) -> RewardError:
        config = self._config
        if status in (401, 403):
            variable = f"the variable {config.api_key_env}" if config.api_key_env else ""
            hint = f"; the key comes from {variable or 'a variable named in reward.api_key_env'}"
        elif 300 <= status < 400:
            hint = "; it leads to another address, which belongs into reward.url"
        else:
            hint = "; are reward.url (up to /v1, as a rule) and reward.model right?"
        return RewardError(self._said(f"HTTP {status}: {reason}{hint}"))

    def _said(self, text: str) -> str:
        """Without the key, which some servers repeat."""
        return self._secrets.blanked(f"{self._name}: {text}")


def _written(data: bytes) -> str:
    """The complete text in a reply of the chat protocol. Raises Fault: there is none."""
    try:
        choice = json.loads(data)["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Fault(f"the reply is not one of the chat protocol: {data[:80]!r}") from None
    if reason == "length":  # a cut "Grade: 1" may have been a 10
        raise _Ungraded("the reply was cut off; raise reward.max_tokens")
    if not isinstance(text, str):
        raise _Ungraded("the reply holds no text")
    return text
