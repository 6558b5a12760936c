"""What can go wrong between a client and its server, by what is to be done about it. What the user must change (a wrong
token, a wrong address) is a :class:`~dapo.errors.RewardError`."""

from __future__ import annotations

import json
from typing import Any

from dapo.errors import shortened

_LONGEST = 300
"""Characters of a server's message that are shown."""


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
        return one_line(body.decode("utf-8", "replace")), None
    if not isinstance(data, dict):
        return one_line(str(data)), None
    retry, said = data.get("retry"), data.get("error") or data.get("detail") or data
    said = said.get("message", said) if isinstance(said, dict) else said
    return one_line(str(said)), retry if isinstance(retry, bool) else None
