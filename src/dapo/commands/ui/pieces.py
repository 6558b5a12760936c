"""The text of single tokens, as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dapo.rollout.native.stopping import NO_TEXT


class Pieces:
    """What each token adds to the text of a response; put together they are the whole.

    A token is decoded behind the one before it, which it may owe a space. A character that is spread over several
    tokens comes with the last of them; those before it, and tokens that are not text, add nothing.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._open: list[int] = []  # the last token, and those that are no whole character yet
        self._before = ""  # the text of what was told of these

    def add(self, token_ids: Sequence[int], last: bool = False) -> list[str]:
        """One text for each token. ``last``: nothing follows, so what is no character will not become one."""
        return [self._next(token, last and place == len(token_ids)) for place, token in enumerate(token_ids, start=1)]

    def _next(self, token: int, last: bool) -> str:
        self._open.append(token)
        text = self._decode(self._open)
        if text.endswith(NO_TEXT) and text != self._before and not last:
            return ""
        piece = text[len(self._before) :]
        self._open = self._open[-1:]
        self._before = self._decode(self._open)
        return piece
