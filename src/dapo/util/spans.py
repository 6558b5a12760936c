"""Where time goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping


class Spans:
    """Seconds by role. Spans of several roles may run side by side; what none of them covers is ``rest``."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
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
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[role] = self._seconds.get(role, 0.0) + time.perf_counter() - began

    def credit(self, role: str) -> None:
        """All that was counted in this process so far was ``role``'s."""
        assert self._since is not None
        self._seconds[role] = self._seconds.get(role, 0.0) + time.perf_counter() - self._since

    @property
    def total(self) -> float:
        """Seconds in all."""
        return self._earlier + (time.perf_counter() - self._since if self._since is not None else 0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """By role, with the ``rest``, up to now."""
        covered = {role: seconds for role, seconds in self._seconds.items() if role != "rest"}
        return covered | {"rest": max(0.0, self.total - sum(covered.values()))}

    def add(self, seconds: Mapping[str, float]) -> None:
        """Count time that another process took."""
        for role, taken in seconds.items():
            self._seconds[role] = self._seconds.get(role, 0.0) + taken
            self._earlier += taken

    def cut(self) -> dict[str, float]:
        """:attr:`seconds`, and the count starts anew."""
        found = self.seconds
        self._seconds, self._earlier = {}, 0.0
        self._since = self._since and time.perf_counter()
        return found
