"""The names by which a machine calls itself, for servers that answer this machine alone."""

from __future__ import annotations

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})


def is_loopback(host: str) -> bool:
    """Whether the header ``Host`` of a request has one of these names: a page elsewhere that reaches 127.0.0.1 through
    a name of its own brings that name."""
    return (host if host.endswith("]") else host.rpartition(":")[0] if ":" in host else host) in LOOPBACK
