"""What can go wrong between a client and its server, by what is to be done about it. What the user must mend (a wrong
token, a wrong address) is a :class:`~dapo.errors.RewardError`."""

from __future__ import annotations

from dapo.errors import shortened

_LONGEST = 300
"""Characters of a server's message that are shown."""


class Fault(Exception):
    """Ask again later: the server is down, busy, or its reply broke off.

    Args:
        cause: what happened, for people.
        pause_s: how long the server asked to be left alone.
        smaller: whether this very request may be the reason: ask for less at once next time.
        alive: whether the server itself said so.
    """

    def __init__(self, cause: str, *, pause_s: float = 0.0, smaller: bool = False, alive: bool = False) -> None:
        super().__init__(one_line(cause))
        self.pause_s, self.smaller, self.alive = pause_s, smaller, alive


class Refusal(Exception):
    """The server does not take this request, such as one that is too large: with fewer responses it may; for one alone
    there is no verdict."""

    def __init__(self, cause: str) -> None:
        super().__init__(one_line(cause))


class BadReply(Exception):
    """The reply is whole but breaks the agreement: it may happen once, by chance, and not twice."""

    def __init__(self, cause: str) -> None:
        super().__init__(one_line(cause))


def one_line(text: str) -> str:
    return shortened(" ".join(text.split()), _LONGEST)
