"""Where time goes, and when."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

Span = tuple[str, float, float]  # role, begin and end, in seconds since 1970

MOST = 16  # spans of a role that a cut gives
_EPOCH = time.time() - time.perf_counter()  # by the clock that nobody sets back


class Spans:
    """Seconds by role. Spans of several roles may run side by side; what none of them covers is ``rest``."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.done: list[Span] = []
        self._open: dict[int, list[Any]] = {}  # by identity: role and begin; thousands where rewards are slow
        self._earlier = 0.0
        self._since: float | None = None

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Time counts from the begin of this to its end."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._earlier, self._since = self.total, None

    @contextlib.contextmanager
    def __call__(self, role: str) -> Iterator[None]:
        """What happens inside is ``role``'s, however it ends."""
        span = [role, time.perf_counter()]
        self._open[id(span)] = span
        try:
            yield
        finally:
            if self._open.pop(id(span), None):  # not while it is paused
                self._end(span)
            span[1] = None

    @contextlib.contextmanager
    def pausing(self, role: str) -> Iterator[None]:
        """Inside, spans of ``role`` that are open do not go on."""
        paused = [span for span in self._open.values() if span[0] == role]
        for span in paused:
            self._end(self._open.pop(id(span)))
        try:
            yield
        finally:
            for span in paused:
                if span[1] is not None:  # it did not end meanwhile
                    span[1] = time.perf_counter()
                    self._open[id(span)] = span

    def _end(self, span: list[Any]) -> None:
        (role, began), ended = span, time.perf_counter()
        self._seconds[role] = self._seconds.get(role, 0.0) + ended - began
        self.done.append((role, _EPOCH + began, _EPOCH + ended))

    def credit(self, role: str) -> None:
        """All that was counted in this process so far was ``role``'s."""
        assert self._since is not None
        self._seconds[role] = self._seconds.get(role, 0.0) + time.perf_counter() - self._since

    @property
    def total(self) -> float:
        return self._earlier + (time.perf_counter() - self._since if self._since is not None else 0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """By role, with the ``rest``, up to now: a checkpoint is taken inside of a span."""
        covered = {role: seconds for role, seconds in self._seconds.items() if role != "rest"}
        for role, began in self._open.values():
            covered[role] = covered.get(role, 0.0) + time.perf_counter() - began
        return covered | {"rest": max(0.0, self.total - sum(covered.values()))}

    def add(self, seconds: Mapping[str, float], spans: Sequence[Span] = ()) -> None:
        """Count time that another process took."""
        self.done.extend(spans)
        for role, taken in seconds.items():
            self._seconds[role] = self._seconds.get(role, 0.0) + taken
            self._earlier += taken

    def cut(self) -> tuple[dict[str, float], list[Span]]:
        """:attr:`seconds`, and the spans of each role; the count starts anew. Those that overlap become one, and so do
        those with the least time between them where there are more than ``MOST``. One that is open is cut in two."""
        for span in self._open.values():
            self._end(span)
            span[1] = self.done[-1][2] - _EPOCH
        found = self.seconds, [span for role in self._seconds for span in _joined(role, self.done)]
        self._seconds, self.done, self._earlier = {}, [], 0.0
        self._since = self._since and time.perf_counter()
        return found


def covered(spans: Iterable[Span], begin: float = -math.inf, end: float = math.inf) -> float:
    """Seconds between ``begin`` and ``end`` in which there is a span, or several."""
    total, reached = 0.0, begin
    for began, ended in sorted((began, ended) for _, began, ended in spans):
        total += max(0.0, min(ended, end) - max(began, reached))
        reached = max(reached, ended)
    return total


def _joined(role: str, spans: Sequence[Span]) -> list[Span]:
    own = sorted(span for span in spans if span[0] == role)
    ends = [*accumulate((end for _, _, end in own), max)]
    gaps = [math.inf, *(begin - end for (_, begin, _), end in zip(own[1:], ends, strict=False))]
    least = min(sorted(gaps)[-MOST:])
    starts = [place for place, gap in enumerate(gaps[: len(own)]) if gap > 0 and gap >= least]
    return [(role, own[first][1], ends[after - 1]) for first, after in pairwise([*starts, len(own)])]
