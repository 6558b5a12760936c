"""Reward by equality of text: cheap enough to need no worker."""

from __future__ import annotations

from collections.abc import Sequence

from dapo.config import ExactReward
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.contract import Doubt, reference
from dapo.reward.convert import verdict
from dapo.reward.thinking import behind, outside_thinking


def score_exact(response: str, answer: str, after: str | None) -> Reward:
    """+1 if the answer text equals ``answer`` after trimming white space, -1 otherwise.

    Args:
        response: the response; its thinking blocks are left out.
        after: the answer text is what follows the last occurrence of this marker; None: the whole response. A response
            without the marker has no answer and is wrong.
    """
    text = outside_thinking(response)
    if after is None:
        extracted: str | None = text.strip()
    else:
        _, marker, tail = text.rpartition(after)
        extracted = tail.strip() if marker else None
    correct = extracted is not None and extracted == answer.strip()
    return verdict(correct, extracted, answer_found=float(bool(extracted)))


class ExactScorer:
    """Equality of text, in place."""

    def __init__(self, config: ExactReward) -> None:
        self._after = config.after

    async def start(self) -> None:
        """Nothing to start."""

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        """Any row will do."""
        return ()

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        return score_exact(behind(prompt.end, response), reference(prompt), self._after)

    async def close(self) -> None:
        """Nothing to stop."""
