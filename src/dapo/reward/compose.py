"""Several rewards combined into one: a weighted sum with gates, or ordered tiers. The parts are scored together; one
with ``only_if`` waits for the part that it names."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dapo.config import ComposeReward
from dapo.config.composed_reward import Part, waits_for
from dapo.errors import RewardError
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.contract import Doubt, Scorer
from dapo.reward.convert import LARGEST
from dapo.util.asynchronous import task_group

_LATEST = 256  # scores of a part that its error rate is computed over
_ENOUGH = 20  # scores from which on the error rate counts

_Done = TypeVar("_Done")
_Ask = Callable[[Scorer], Awaitable[Reward]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one part. ``reward``: as its scorer gave it; of a part that failed or was not computed, a
    substitute that is wrong. ``value``: after ``from_range`` and ``clip``."""

    reward: Reward
    value: float
    passes: bool
    error: str | None = None


_NOT_COMPUTED = Outcome(Reward(False, 0.0), 0.0, passes=False)


class ComposedScorer(Scorer):
    """See :class:`~dapo.config.ComposeReward` for the rules. ``scorers``: by the name of their part; started and closed
    with this one.

    A part that fails with ``on_error: drop`` leaves the sample without a verdict, even if it would not have counted (a
    later tier); with ``only_if`` it is computed only where it is needed.
    """

    def __init__(self, config: ComposeReward, scorers: Mapping[str, Scorer]) -> None:
        self._config = config
        self._scorers = {name: scorers[name] for name in config.rewards}
        self._in_order = sorted(config.parts, key=self._depth)
        self._failures = {name: _Failures(name, one.max_error_rate) for name, one in config.rewards.items()}

    async def start(self) -> None:
        """Raises RewardError: the errors of all parts, with their names."""
        await self._each(lambda scorer: scorer.start())

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        found = await self._each(lambda scorer: scorer.examine(prompts))
        doubts = [replace(doubt, text=f"part {name}: {doubt.text}") for name, told in found.items() for doubt in told]
        return sorted(doubts, key=lambda doubt: doubt.position)

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        try:
            async with asyncio.timeout(self._config.timeout_s) as deadline:
                outcomes = await self._outcomes(lambda scorer: scorer.score(prompt, response, finish_reason))
        except TimeoutError:
            if not deadline.expired():
                raise
            return Reward(None, 0.0, error=f"the parts together timed out after {self._config.timeout_s:g} s")
        for name, outcome in outcomes.items():
            if outcome.error is not None and self._config.rewards[name].on_error == "drop":
                return Reward(None, 0.0, error=f"part {name}: {outcome.error}")
        return put_together(self._config, outcomes)

    async def lost_letters(self, texts: Sequence[tuple[str, str]]) -> set[str]:
        return set().union(*(await self._each(lambda scorer: scorer.lost_letters(texts))).values())

    async def close(self) -> None:
        await self._each(lambda scorer: scorer.close())

    async def _each(self, do: Callable[[Scorer], Awaitable[_Done]]) -> dict[str, _Done]:
        """``do`` with all scorers, each to its end. Raises RewardError: those of all parts together."""
        outcomes = await asyncio.gather(*map(do, self._scorers.values()), return_exceptions=True)
        done: dict[str, _Done] = {}
        problems = []
        for name, outcome in zip(self._scorers, outcomes, strict=True):
            if isinstance(outcome, RewardError):
                problems.append(f"part {name}: {outcome}")
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                done[name] = outcome
        if problems:
            raise RewardError("\n".join(problems))
        return done

    async def _outcomes(self, ask: _Ask) -> dict[str, Outcome]:
        tasks: dict[str, asyncio.Task[Outcome]] = {}
        async with task_group() as group:
            for name in self._in_order:
                tasks[name] = group.create_task(self._part(name, tasks, ask))
        return {name: tasks[name].result() for name in self._config.parts}

    async def _part(self, name: str, others: Mapping[str, asyncio.Task[Outcome]], ask: _Ask) -> Outcome:
        part = self._config.parts[name]
        if part.only_if is not None and not (await others[part.only_if]).passes:
            return _NOT_COMPUTED
        if part.of is not None:
            source, _, key = part.of.partition("/")
            return _inner(name, part, source, key, await others[source])
        # no deadline here: a scorer counts its limit from the start of the work, and waiting in a queue is no failure
        try:
            reward = await ask(self._scorers[name])
            self._failures[name].take(reward.error)
            return outcome_of(part, reward)
        except RewardError as error:
            raise RewardError(f"part {name}: {error}") from None

    def _depth(self, name: str) -> int:
        """Length of the longest chain of parts that a part waits for."""
        return max((1 + self._depth(other) for other in waits_for(self._config.parts[name])), default=0)


class _Failures:
    def __init__(self, name: str, limit: float) -> None:
        self._name, self._limit = name, limit
        self._latest: deque[str | None] = deque(maxlen=_LATEST)

    def take(self, error: str | None) -> None:
        """Raises RewardError: the share of failed scores is above the part's ``max_error_rate``."""
        self._latest.append(error)
        made = len(self._latest)
        if error is None or made < _ENOUGH:
            return
        errors = Counter(text for text in self._latest if text is not None)
        if errors.total() > self._limit * made:
            common = "; ".join(f"{text} ({count} x)" for text, count in errors.most_common(3))
            raise RewardError(
                f"{errors.total()} of its latest {made} scores failed (parts.{self._name}.reward.max_error_rate allows "
                f"{self._limit:.0%}): {common}"
            )


def outcome_of(part: Part, reward: Reward) -> Outcome:
    """Raises RewardError: ``from_range`` takes the value out of the range of numbers."""
    error = reward.error
    if error is not None and part.reward is not None:
        reward = Reward(False, part.reward.error_value)
    value = reward.value
    if part.from_range is not None:
        low, high = part.from_range
        value = (value - low) / (high - low)
    if part.clip is not None:
        value = min(max(value, part.clip[0]), part.clip[1])
    if not abs(value) <= LARGEST:
        raise RewardError(f"from_range {list(part.from_range or ())} makes {value:g} of its value {reward.value:g}")
    passes = value > part.passes_at if reward.correct is None else reward.correct
    return Outcome(reward, value, passes, error)


def _inner(name: str, part: Part, source: str, key: str, outcome: Outcome) -> Outcome:
    """The part ``key`` of another part's reward."""
    if outcome is _NOT_COMPUTED or outcome.error is not None:
        return _NOT_COMPUTED
    value = outcome.reward.parts.get(key)
    if value is None:
        given = ", ".join(outcome.reward.parts) or "none"
        raise RewardError(f"part {name}: {source} gave no part {key!r}; its parts are: {given}")
    return outcome_of(part, Reward(None, value))


def put_together(config: ComposeReward, outcomes: Mapping[str, Outcome]) -> Reward:
    """The combined reward. Raises RewardError: the sum is too large for a number."""
    if config.tiers is not None:
        value = _tiers_value([outcomes[name] for name in config.tiers])
    else:
        value = sum(part.weight * outcomes[name].value for name, part in config.parts.items())
    if not abs(value) <= LARGEST:
        raise RewardError(f"the weighted parts add up to {value:g}, which is too large for a reward")
    parts: dict[str, float] = {}
    for name, outcome in outcomes.items():
        inner = {f"{name}/{key}": part for key, part in outcome.reward.parts.items()}
        if name in config.rewards and config.rewards[name].on_error == "value":
            inner[f"{name}/failed"] = float(outcome.error is not None)
        if name == config.correct and f"{name}/answer_found" in inner:
            inner["answer_found"] = inner.pop(f"{name}/answer_found")
        parts |= {name: outcome.value, **inner}
    judge = outcomes[config.correct].reward if config.correct is not None else Reward(None, 0.0)
    return Reward(judge.correct, value, parts, extracted=judge.extracted)


def _tiers_value(tiers: Sequence[Outcome]) -> float:
    """2 (t + s) / n - 1: the first t of n tiers pass, and s in 0..1 is the value of the next one. The last tier never
    passes but is graded, so that there is always a next one."""
    last = len(tiers) - 1
    passed = next((place for place, tier in enumerate(tiers) if not tier.passes), last)
    tier = tiers[passed]
    graded = 1.0 if passed == last and tier.reward.correct else min(max(tier.value, 0.0), 1.0)
    return 2 * (passed + graded) / len(tiers) - 1
