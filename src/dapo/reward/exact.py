"""Reward by equality of text, computed in place."""

from __future__ import annotations

from dapo.config import ExactReward
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.contract import Scorer, reference
from dapo.reward.convert import verdict
from dapo.reward.thinking import behind, outside_thinking


def score_exact(response: str, answer: str, after: str | None) -> Reward:
    """+1 if the text of the response outside of thinking blocks equals ``answer``, white space around it aside, -1
    otherwise. ``after``: only what follows the last occurrence of this marker counts; without it there is no answer."""
    text = outside_thinking(response)
    if after is None:
        extracted: str | None = text.strip()
    else:
        _, marker, tail = text.rpartition(after)
        extracted = tail.strip() if marker else None
    correct = extracted is not None and extracted == answer.strip()
    return verdict(correct, extracted, answer_found=float(bool(extracted)))


class ExactScorer(Scorer):
    def __init__(self, config: ExactReward) -> None:
        self._after = config.after

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        return score_exact(behind(prompt.end, response), reference(prompt), self._after)
