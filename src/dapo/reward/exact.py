"""Reward by equality of text: cheap enough to need no worker."""

from __future__ import annotations

from dapo.records import Reward
from dapo.reward.convert import verdict


def score_exact(response: str, answer: str, after: str | None) -> Reward:
    """+1 if the answer text equals ``answer`` after trimming white space, -1 otherwise.

    Args:
        response: the response.
        answer: the reference.
        after: the answer text is what follows the last occurrence of this marker; None: the whole response. A response
            without the marker has no answer and is wrong.
    """
    if after is None:
        extracted: str | None = response.strip()
    else:
        _, marker, tail = response.rpartition(after)
        extracted = tail.strip() if marker else None
    correct = extracted is not None and extracted == answer.strip()
    return verdict(correct, extracted, answer_found=float(bool(extracted)))
