"""What a rollout step trains on, and what it took to sample it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dapo.records import Group
from dapo.util.spans import Span, covered


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """What it took to sample one step. Counts are of this step's own draws, unless they say otherwise."""

    drawn: int
    """Prompts drawn."""
    rounds: int
    """Times that prompts were drawn, one or many at once."""
    samples: int
    """Samples that came from the engine."""
    tokens: int
    """Response tokens of these samples."""
    all_right: int
    mixed: int
    all_wrong: int
    flat: int
    too_few_scored: int
    kept: int
    """Groups handed out, carried-over ones included."""
    surplus: int
    """Good groups beyond N, discarded."""
    carried: int
    """Good groups beyond N (of earlier steps too), kept for the next step."""
    stale: int
    """Good groups, of earlier steps too, that became too old and were dropped."""
    cancelled: int
    """Draws that were stopped because N groups had been found."""
    wasted_tokens: int
    """Tokens of surplus, stale and cancelled draws, as far as their samples had come."""
    scores: int
    """Scores made, failed ones included."""
    failed_scores: int
    keep_rate: float
    """Running estimate of the share of draws that are kept, over this and earlier steps."""
    staleness_mean: float
    """Versions between the oldest token of a group handed out and the policy it will train; 0 if there is none."""
    staleness_max: int
    reward_wait_s: float
    """Seconds from the last sample's arrival to the end of the round."""
    decode_steps: int = 0
    """Of the engine in the round, where it counts them."""
    ages: tuple[int, ...] = ()
    """Groups handed out by the age of their oldest token in versions, from 0; S + 1 places at most."""
    unfinished: int = 0
    """Draws that were in flight when this batch was handed out, and go on."""
    continued: int = 0
    """Samples of the draws finished in this step whose tokens are of more than one version."""
    restarted: int = 0
    """Samples that were begun again under newer weights; their earlier tokens count as wasted."""
    window_tokens: int = 0
    """Tokens of all samples that came since the batch before, whichever step their draws are settled in."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """Draws since the run began: ``produced``, and what became of them, which adds up to it: ``trained, filtered,
    stale, surplus, cancelled, carried, unfinished``."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """What one rollout step trains on.

    ``groups``: with raw rewards, in draw order. ``rejected``: the other finished groups with what became of them, in
    draw order: the name of a :class:`GroupVerdict`, ``surplus`` or ``stale``. ``first_draw``: number of the first draw
    of this step; groups with a lower one are of earlier steps. ``spans``: of sampling and scoring.
    """

    step: int
    first_draw: int
    groups: tuple[Group, ...]
    rejected: tuple[tuple[Group, str], ...]
    stats: RolloutStats
    spans: tuple[Span, ...] = ()

    @property
    def seconds_sampling(self) -> float:
        """In which the engine had something to sample, since the batch before."""
        return covered(span for span in self.spans if span[0] == "sampling")

    @property
    def sampled(self) -> list[Group]:
        """The finished groups of this step's own draws, kept or not. Carried ones were counted when they came."""
        finished = [*self.groups, *(group for group, _ in self.rejected)]
        return [group for group in finished if group.draw >= self.first_draw]
