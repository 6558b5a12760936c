"""Dynamic sampling (Eq. 11): which groups hold something to learn from, which of them are trained on, how many more
prompts to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from dapo.records import Group

FilterMetric = Literal["acc", "score"]


class GroupVerdict(StrEnum):
    """What a finished group is worth."""

    MIXED = "mixed"
    """Right and wrong responses, or rewards that differ: the only kind with a gradient."""
    ALL_RIGHT = "all_right"
    ALL_WRONG = "all_wrong"
    FLAT = "flat"
    """The raw rewards are equal (metric ``score``)."""
    TOO_FEW_SCORED = "too_few_scored"
    """Fewer than two samples have a verdict: nothing to compare."""


def judge(group: Group, *, metric: FilterMetric, tolerance: float = 1e-6, least: int = 2) -> GroupVerdict:
    """Whether ``group`` satisfies the constraint of Eq. 11, 0 < #correct < #scored, and if not, why.

    Only raw verdicts are looked at, never the shaped reward: the length penalty would make a group of wrong answers
    look informative.

    Args:
        group: with rewards; samples without a verdict are left out of all counts.
        metric: ``acc`` decides by ``correct``; ``score`` by the spread of the raw reward, for tasks without right and
            wrong.
        tolerance: with ``score``, max - min must exceed it.
        least: samples with a verdict that a group needs; 1 where nothing is compared.

    Raises ValueError: metric ``acc``, but ``correct`` of a scored sample is None; or an unknown metric."""
    verdicts = [s.verdict for s in group.scored]
    if len(verdicts) < least:
        return GroupVerdict.TOO_FEW_SCORED
    if metric == "score":
        values = [v.value for v in verdicts]
        return GroupVerdict.MIXED if max(values) - min(values) > tolerance else GroupVerdict.FLAT
    if metric != "acc":
        raise ValueError(f"unknown metric {metric!r}; one of acc, score")
    if any(v.correct is None for v in verdicts):
        raise ValueError(f"metric acc needs `correct`, which a reward of prompt row {group.prompt.row} leaves open")
    right = sum(bool(v.correct) for v in verdicts)
    if 0 < right < len(verdicts):
        return GroupVerdict.MIXED
    return GroupVerdict.ALL_RIGHT if right else GroupVerdict.ALL_WRONG


@dataclass(frozen=True, slots=True)
class Admission:
    """Places in the list of draws: the ``admitted`` ones, and the kept ones that can no longer be (``surplus``).

    ``complete``: as many as wanted are admitted, and no draw still pending can change which.
    """

    admitted: tuple[int, ...]
    surplus: tuple[int, ...]
    complete: bool


def admit(outcomes: Sequence[bool | None], wanted: int) -> Admission:
    """The rule of issue order: the first ``wanted`` kept groups in the order their prompts were drawn.

    Not in the order they finished, which would favour short responses and make a resume depend on timing. So a kept
    group is admitted only once every earlier draw has finished. ``outcomes``: for each draw, in draw order: kept, not
    kept, or None while it is pending.
    """
    pending = outcomes.index(None) if None in outcomes else len(outcomes)
    kept = [place for place, outcome in enumerate(outcomes) if outcome]
    admitted = [place for place in kept if place < pending][:wanted]
    return Admission(tuple(admitted), tuple(kept[wanted:]), len(admitted) == wanted)


def refill_size(*, wanted: int, in_flight: int, keep_rate: float, budget_left: int) -> int:
    """How many more prompts to draw so that, at the running keep-rate, just enough groups will be kept.

    Args:
        wanted: groups still missing, those in flight not counted.
        in_flight: draws not finished yet.
        keep_rate: expected share of draws that are kept, from 0 to 1.
        budget_left: draws still allowed in this step.

    Returns:
        From 0 to ``budget_left``.
    """
    if wanted <= 0 or budget_left <= 0:
        return 0
    if wanted >= keep_rate * (in_flight + budget_left):  # all of the budget will hardly do
        return budget_left
    needed = math.ceil(wanted / keep_rate - 1e-9)  # the small number: 3 / 0.3 is not to become 11
    return max(needed - in_flight, 0)
