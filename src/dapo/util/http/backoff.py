"""Pauses between attempts: growing ones, or as long as the server asks for."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

LONGEST_REQUESTED_S = 120.0
"""Limit of Retry-After."""


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
