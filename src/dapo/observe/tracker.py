"""A tracker keeps the metrics of a run somewhere beside metrics.jsonl. Each works in a thread of its own: training
neither waits for one nor ends with one, and hears once that it failed."""

from __future__ import annotations

import contextlib
import numbers
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

CLOSE_SECONDS = 30.0  # for which the trackers of a run are waited for, all together


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of a rollout step (0: the evaluation before training). May raise anything."""

    def summarise(self, summary: Mapping[str, Any]) -> None:
        """Keep what the run came to, as in summary.json. May come more than once."""

    def close(self) -> None:
        """No more will come."""


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that there are; one that is not finite stays so."""
    found = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    return {name: float(value) for name, value in found.items() if isinstance(value, numbers.Real)}


class Background:
    """A tracker in a thread of its own, which makes it (``make``) and closes it. Raises nothing: the first failure ends
    it, and the next call tells of it, once."""

    def __init__(self, name: str, make: Callable[[], Tracker], tell: Callable[[str], object]) -> None:
        self._name, self._make, self._tell = name, make, tell
        self._work: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._fault: str | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=f"dapo-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._hand_over(lambda tracker: tracker.log(step, metrics))

    def summarise(self, summary: Mapping[str, Any]) -> None:
        self._hand_over(lambda tracker: tracker.summarise(summary))

    def end(self) -> None:
        """No more will come. Does not wait."""
        self._work.put(None)

    def close(self, seconds: float | None = None) -> None:
        """Wait until the tracker has all that it was given, ``seconds`` at most; None: :data:`CLOSE_SECONDS`."""
        self.end()
        self._thread.join(CLOSE_SECONDS if seconds is None else seconds)
        if self._thread.is_alive():
            self._fault = f"it did not end within {CLOSE_SECONDS:g} s"
        self._tell_fault()

    def _hand_over(self, work: Callable[[Tracker], None]) -> None:
        self._tell_fault()
        if self._fault is None:
            self._work.put(work)

    def _tell_fault(self) -> None:
        if self._fault is not None and not self._told:
            self._told = True
            self._tell(f"tracker {self._name} failed, and the run goes on without it: {self._fault}")

    def _run(self) -> None:
        try:
            with contextlib.closing(self._make()) as tracker:
                while (work := self._work.get()) is not None:
                    work(tracker)
        except BaseException as error:  # SystemExit too: some packages end the program where they cannot log in
            self._fault = f"{type(error).__name__}: {error}"


def close_all(trackers: Sequence[Tracker]) -> None:
    """Close them all at once: several that hang are waited for no longer than one."""
    until = time.monotonic() + CLOSE_SECONDS
    for tracker in trackers:
        if isinstance(tracker, Background):
            tracker.end()
    for tracker in trackers:
        if isinstance(tracker, Background):
            tracker.close(max(0.0, until - time.monotonic()))
        else:
            tracker.close()
