"""The interface of all rewards: text in, a :class:`~dapo.records.Reward` out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dapo.config import RewardConfig
from dapo.errors import RewardError
from dapo.records import FinishReason, Prompt, Reward


@dataclass(frozen=True, slots=True)
class Doubt:
    """What is wrong with a row, as far as its reward is concerned.

    ``position``: among the rows that were examined. ``unusable``: no response to it can be scored (broken tests);
    otherwise scores may be wrong (a reference that cannot be parsed).
    """

    position: int
    text: str
    unusable: bool = False


class Scorer:
    """Scores one response at a time; many calls may be awaited at once, and a scorer may put them into batches.

    A failed score (time-out, exception in the user's function, dead worker, server that is down) is a
    ``Reward(error=...)``, never a wrong answer. A function that breaks its contract (wrong type, NaN) raises
    ``RewardError``. A scorer that needs no preparation, accepts all rows or holds nothing inherits these defaults.
    """

    async def start(self) -> None:
        """Load or reach what scores, so that mistakes show before the first rollout. Raises RewardError: that fails."""

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        """What is wrong with these rows, in their order: answers that cannot be read, tests that are missing. Token ids
        are not needed."""
        return ()

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        """The verdict on ``response``, which continues ``prompt.end``. Waits for a free worker and the score; the
        deadline ends both. ``finish_reason``: None: not known."""
        raise NotImplementedError

    async def score_all(self, prompt: Prompt, responses: Sequence[str]) -> list[Reward]:
        """Of each response to one prompt, in their order, as :meth:`score` gives it."""
        return list(await asyncio.gather(*(self.score(prompt, response) for response in responses)))

    async def lost_letters(self, texts: Sequence[tuple[str, str]]) -> set[str]:
        """Letters of prompts and responses for which its models have no token."""
        return set()

    async def close(self) -> None:
        """Stop all workers, within a bounded time."""


class NoScorer(Scorer):
    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        return Reward(None, 0.0, error="there is no reward")


def in_place_of_failed(reward: Reward, config: RewardConfig, metric: str) -> Reward:
    """``reward``, or its substitute if it failed and ``reward.on_error`` is value. ``metric``:
    ``algorithm.filter_groups.metric``; under ``acc`` the substitute is wrong."""
    if reward.error is None or config.on_error == "drop":
        return reward
    return replace(reward, error=None, correct=False if metric == "acc" else None, value=config.error_value)


def reference(prompt: Prompt) -> str:
    """The row's answer, for rewards that compare with it. Raises RewardError: it has none."""
    if prompt.answer is None:
        raise RewardError(f"row {prompt.row + 1} has no reference answer, which this reward compares with")
    return prompt.answer


def fields(prompt: Prompt, response: str, finish_reason: FinishReason | None) -> dict[str, Any]:
    """What users' functions, requests and rubrics may name of a response."""
    said = {"prompt": prompt.text, "response": response, "answer": prompt.answer, "meta": dict(prompt.meta)}
    return {**said, "finish_reason": finish_reason, "prompt_end": prompt.end}
