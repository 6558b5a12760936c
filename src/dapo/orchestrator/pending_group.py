"""What a round of the collector keeps account of: draws on their way to groups, scores that failed, and the share of
draws that are kept.

Consumes: samples and their rewards. Produces: groups, and the estimate that sizes the next draw. Waits for nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from dapo.algorithm.admission import GroupVerdict
from dapo.config import RewardConfig
from dapo.errors import RewardError
from dapo.records import Group, Prompt, Reward, Sample
from dapo.reward.contract import in_place_of_failed
from dapo.rollout.engine import Draft

ENOUGH_SCORES = 20
"""Scores of a step after which the share of failed ones is judged at once, and not only at the end of the round."""


@dataclass(slots=True)
class AcceptanceRate:
    """Which share of draws is kept, from finished ones; those of earlier steps count less and less."""

    kept: float = 0.0
    finished: float = 0.0

    MEMORY = 0.7  # the policy changes slowly: about the last three steps

    def value(self, kept: int = 0, finished: int = 0) -> float:
        """The estimate, with draws of the running step added. One made-up kept draw keeps it off 0."""
        return (self.kept + kept + 1) / (self.finished + finished + 1)

    def learn(self, kept: int, finished: int) -> None:
        """Take in the draws of a finished step."""
        self.kept = self.MEMORY * self.kept + kept
        self.finished = self.MEMORY * self.finished + finished


@dataclass(slots=True, eq=False)
class PendingGroup:
    """A prompt on its way to a group."""

    number: int
    prompt: Prompt
    received: dict[int, Sample] = field(default_factory=dict)
    """The samples that came from the engine, by index."""
    scored: dict[int, Sample] = field(default_factory=dict)
    """Those of them that have been scored."""
    asked: tuple[int, ...] = ()
    """Which samples the engine was asked for."""
    since: int | None = None
    """Version of the engine's weights when it was first asked."""
    group: Group | None = None
    verdict: GroupVerdict | None = None
    oldest: int | None = None
    """Policy version of the group's oldest token; None: it has no token."""
    carried: bool = False
    """From an earlier step that counted it."""
    drafts: dict[int, Draft] = field(default_factory=dict)
    """Samples that were interrupted, as far as they were, by index."""
    restarted: int = 0
    """Samples that were begun again."""
    dropped_tokens: int = 0
    """Of samples that were begun again."""
    turn: tuple[int, int] | None = None
    """Of a request for one turn of an episode: its seed and the most tokens that it may have."""

    @classmethod
    def carry(cls, group: Group) -> PendingGroup:
        """A group of an earlier step that is good, and was not trained on yet."""
        draw = cls(group.draw, group.prompt, {s.index: s for s in group.samples}, carried=True)
        draw.finish(group, GroupVerdict.MIXED)
        return draw

    @classmethod
    def resume(cls, group: Group) -> PendingGroup:
        """From the samples that an interrupted round had; those whose score failed are scored again."""
        received = {s.index: s if s.scored else replace(s, reward=None) for s in group.samples}
        return cls(group.draw, group.prompt, received, {i: s for i, s in received.items() if s.scored})

    @property
    def tokens(self) -> int:
        return sum(s.length for s in self.received.values())

    def under_way(self) -> Group:
        """What there is of it: scored samples, and those that are still to be scored."""
        return Group(self.number, self.prompt, tuple(self.scored.get(i, s) for i, s in sorted(self.received.items())))

    def finish(self, group: Group, verdict: GroupVerdict) -> None:
        self.group, self.verdict = group, verdict
        self.oldest = group.oldest_version if any(s.length for s in group.samples) else None


class Scores:
    """The scores of one step: what becomes of failed ones, and when there are too many of them."""

    def __init__(self, config: RewardConfig, metric: str, step: int) -> None:
        self._config = config
        self._metric = metric
        self.step = step
        self.made = 0
        self.failed = 0
        self.before: Scores | None = None
        """Those of the step before, which has samples that count in this one."""
        self._errors: Counter[str] = Counter()

    def take(self, reward: Reward) -> Reward:
        """Count ``reward`` and return what stands for it (``reward.on_error``)."""
        self.made += 1
        if reward.error is None:
            return reward
        self.failed += 1
        self._errors[reward.error] += 1
        self.check()
        return in_place_of_failed(reward, self._config, self._metric)

    def check(self, final: bool = False) -> None:
        """Raises RewardError: the share of failed scores is above ``reward.max_error_rate``."""
        limit, both = self._config.max_error_rate, [self, *([self.before] if self.before else [])]
        made, failed = sum(one.made for one in both), sum(one.failed for one in both)
        if failed > limit * made and (final or made >= ENOUGH_SCORES):
            errors = sum((one._errors for one in both), Counter[str]())
            common = "; ".join(f"{text} ({count} x)" for text, count in errors.most_common(3))
            raise RewardError(
                f"step {self.step + 1}: {failed} of {made} scores failed "
                f"({failed / made:.0%}; reward.max_error_rate allows {limit:.0%}): {common}"
            )
