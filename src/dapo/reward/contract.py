"""What the rest of the program knows of rewards: text in, a :class:`~dapo.records.Reward` out."""

from __future__ import annotations

from typing import Protocol

from dapo.records import Prompt, Reward


class Scorer(Protocol):
    """Scores one response at a time; many calls may be awaited at once.

    A failed score (time-out, exception in the user's function, dead worker) comes back as ``Reward(error=...)``,
    never as a wrong answer. A function that breaks its contract (wrong type, NaN) raises ``RewardError``.
    """

    async def start(self) -> None:
        """Get ready, so that a mistake in the user's function shows before the first rollout.

        Raises:
            RewardError: the function cannot be loaded, or workers cannot start.
        """
        ...

    async def score(self, prompt: Prompt, response: str) -> Reward:
        """The verdict on ``response``. Waits for a free worker and for the score; the deadline ends both."""
        ...

    async def close(self) -> None:
        """Stop all workers, within a bounded time."""
        ...
