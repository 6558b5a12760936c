"""The verdict on a response: a record that the processes of rewards and environments need, without NumPy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

LONGEST_TEXT = 10_000
"""Characters that a reward may say of a response: a program fits. They go into memory and files for every sample."""


@dataclass(frozen=True, slots=True)
class Reward:
    """The verdict on one response.

    ``correct`` (None: the task has no notion of it) decides dynamic sampling; ``value`` is what training sees. They
    are two fields and never confused. ``error`` says that scoring failed: such a sample has no verdict at all.
    ``error`` and ``extracted`` (the answer that was read) are cut after :data:`LONGEST_TEXT`, with a mark that says so.
    """

    correct: bool | None
    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    extracted: str | None = None

    def __post_init__(self) -> None:
        if self.error is None and not math.isfinite(self.value):
            raise ValueError(f"a reward must be finite, got {self.value!r}")
        for name in ("error", "extracted"):
            text = getattr(self, name)
            if isinstance(text, str) and len(text) > LONGEST_TEXT:
                mark = f" ... (cut, it had {len(text):,} characters)"
                object.__setattr__(self, name, text[: LONGEST_TEXT - len(mark)] + mark)
