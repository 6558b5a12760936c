"""What the rest of the program knows of rewards: text in, a :class:`~dapo.records.Reward` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dapo.config import RewardConfig
from dapo.errors import RewardError
from dapo.records import FinishReason, Prompt, Reward


@dataclass(frozen=True, slots=True)
class Doubt:
    """What is wrong with a row, as far as its reward is concerned.

    ``position``: of the row among those that were examined. ``unusable``: no response to it can be scored (broken
    tests); otherwise scores are made, but may not mean what was meant (a reference that cannot be parsed).
    """

    position: int
    text: str
    unusable: bool = False


class Scorer(Protocol):
    """Scores one response at a time; many calls may be awaited at once, and a scorer may put them into batches.

    A failed score (time-out, exception in the user's function, dead worker, server that is down) comes back as
    ``Reward(error=...)``, never as a wrong answer. A function that breaks its contract (wrong type, NaN) raises
    ``RewardError``.
    """

    async def start(self) -> None:
        """Get ready, so that a mistake in the user's function shows before the first rollout.
        Raises RewardError: what scores cannot be loaded or reached."""
        ...

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        """What is wrong with these rows: answers that cannot be read, tests that are missing. Their token ids may be
        left out. In the order of ``prompts``."""
        ...

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        """The verdict on ``response``, which goes on from ``prompt.end``. Waits for a free worker and the score; the
        deadline ends both. ``finish_reason``: why the response ended; None: not known, as of one that was typed."""
        ...

    async def close(self) -> None:
        """Stop all workers, within a bounded time."""
        ...


def in_place_of_failed(reward: Reward, config: RewardConfig, metric: str) -> Reward:
    """What stands for a score (``reward.on_error``): itself, unless it failed and a value is to be taken instead.
    ``metric``: ``algorithm.filter_groups.metric``; under ``acc`` what stands for a failed score is not right."""
    if reward.error is None or config.on_error == "drop":
        return reward
    return replace(reward, error=None, correct=False if metric == "acc" else None, value=config.error_value)


def reference(prompt: Prompt) -> str:
    """The row's answer, for rewards that compare with it. Raises RewardError: it has none."""
    if prompt.answer is None:
        raise RewardError(f"row {prompt.row + 1} has no reference answer, which this reward compares with")
    return prompt.answer
