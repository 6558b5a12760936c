"""What can go wrong between a client and its server, by what is to be done about it, and pauses between attempts. What
the user must change (a wrong token, a wrong address) is a :class:`~dapo.errors.RewardError`."""

from __future__ import annotations

import json
import math
import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from dapo.errors import shortened

_LONGEST = 300  # characters of a server's message that are shown


class _Problem(Exception):
    def __init__(self, cause: str) -> None:
        super().__init__(one_line(cause))


class Fault(_Problem):
    """Ask again later: the server is down, busy, or its reply broke off.

    ``pause_s``: how long the server asked to be left alone. ``smaller``: this request may be the cause; ask for less at
    once next time. ``alive``: the server itself said so.
    """

    def __init__(self, cause: str, *, pause_s: float = 0.0, smaller: bool = False, alive: bool = False) -> None:
        super().__init__(cause)
        self.pause_s, self.smaller, self.alive = pause_s, smaller, alive


class Refusal(_Problem):
    """The server does not take this request, which may be too large: ask for fewer responses. A single one has no
    verdict."""


class BadReply(_Problem):
    """The reply is complete but breaks the protocol. After a second one the score has failed."""


def one_line(text: str) -> str:
    return shortened(" ".join(text.split()), _LONGEST)


def from_json(body: bytes) -> Any:
    """Raises BadReply: it is not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadReply(f"the reply is not JSON ({error}): {body[:80]!r}") from None


def error_text(body: bytes) -> tuple[str, bool | None]:
    """The server's message (``detail`` in FastAPI, ``error.message`` in OpenAI's API), and whether to ``retry``."""
    try:
        data = from_json(body)
    except BadReply:
        text = body.decode("utf-8", "replace").strip()
        return one_line(text.rpartition("\n")[2] if text.startswith("Traceback (") else text), None
    if not isinstance(data, dict):
        return one_line(str(data)), None
    retry, said = data.get("retry"), data.get("error") or data.get("detail") or data
    said = said.get("message", said) if isinstance(said, dict) else said
    return one_line(str(said)), retry if isinstance(retry, bool) else None


LONGEST_REQUESTED_S = 120.0  # limit of Retry-After


class Pauses:
    """Pauses in seconds that double from ``first_s`` to ``longest_s``, each shortened at random by up to a half, so
    that clients that failed together do not come back together."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._next_s, self._longest_s = min(first_s, longest_s), longest_s

    def next(self, requested_s: float = 0.0) -> float:
        own = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._longest_s, 2.0 * self._next_s)
        return max(own, requested_s * random.uniform(1.0, 1.1))


def requested_pause(retry_after: str | None) -> float:
    """Seconds of a Retry-After header (a number, or a date in UTC), up to ``LONGEST_REQUESTED_S``; 0 if there is
    none."""
    text = retry_after or "0"
    try:
        seconds = float(text)
    except ValueError:
        try:
            date = parsedate_to_datetime(text)
            seconds = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), LONGEST_REQUESTED_S) if math.isfinite(seconds) else 0.0
