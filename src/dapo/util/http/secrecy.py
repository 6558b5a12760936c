"""Keeps the secrets of a client out of its messages: a server may repeat them in its answers."""

from __future__ import annotations

from os.path import commonprefix
from urllib.parse import parse_qsl, unquote, urlsplit

_BLANK = "***"
_TELLING = 8
"""Least characters of a secret that are blanked, as of one that was cut off. Shorter values in the query of an address
("v1") are no secrets."""


class Secrets:
    """What must not be shown: the ``token``, and the values in the query of ``url``, one of which may be a key."""

    def __init__(self, token: str | None, url: str) -> None:
        query = urlsplit(url).query
        values = {value for _, value in parse_qsl(query)} | {part.partition("=")[2] for part in query.split("&")}
        values = {value for value in values | set(map(unquote, values)) if len(value) >= _TELLING}
        # the longest first: one may be a part of another
        self._secrets = sorted(values | ({token} if token else set()), key=len, reverse=True)

    def blanked(self, text: str) -> str:
        """``text`` without the secrets and the beginnings of secrets."""
        for secret in self._secrets:
            begin, rest = secret[:_TELLING], secret[_TELLING:]
            before, *after = text.split(begin)
            shared = (len(commonprefix([part, rest])) for part in after)  # noqa: RUF071 (of characters, not of folders)
            text = before + "".join(_BLANK + part[length:] for part, length in zip(after, shared, strict=True))
        return text


def shown(url: str) -> str:
    """The address for messages: without the query and a login."""
    parts = urlsplit(url)
    query = "?..." if parts.query else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}{query}"
