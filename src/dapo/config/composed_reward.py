"""The ``reward`` section as a whole: rewards that are put together from others, and all kinds by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field, field_validator

from dapo.config.reward import Plain, PlainReward, RewardBase
from dapo.config.secrets import is_secret
from dapo.config.section import Section

Kind = TypeVar("Kind", bound=RewardBase)


class Part(Section):
    """One part of a reward that is put together. Its value is what its reward gave, after `from_range` and `clip`. It
    passes where it is right, or, if it knows no right and wrong, where its value is above `passes_at`."""

    reward: PlainReward | None = None
    """What scores it: a reward of any other kind, with its own time limit and its own policy for failed scores. With
    `on_error` = `drop` a failed part leaves the whole without a verdict; with `value`, `error_value` stands in for what
    it would have given, it is not right, and `NAME/failed` among the parts tells how often. If its share of failed
    scores exceeds its `max_error_rate`, the run stops."""
    of: str | None = None
    """In place of a reward: PART/KEY, the part KEY of what the reward of another part gave, such as `solved/style`. It
    knows no right and wrong; where the other one failed or was not computed, it is 0 and does not pass."""
    weight: float = 1.0
    """Its factor in the sum; with 0 it is measured only. (With `tiers`: 0 for a part outside of them, else 1.)"""
    only_if: str | None = None
    """Name of another part: this one counts only where that one passes. Elsewhere it is 0, is not right, and is not
    computed."""
    clip: tuple[float, float] | None = None
    """Lowest and highest value; what is beyond is cut."""
    from_range: tuple[float, float] | None = None
    """Map this range of values to 0..1 (before `clip`; values outside of it go beyond), such as [-1, 1] for the kinds
    `math` and `code`."""
    passes_at: float = 0.0
    """The value above which it passes, where it knows no right and wrong: for `tiers` and `only_if`."""

    @field_validator("clip", "from_range")
    @classmethod
    def _low_is_below_high(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError("the first must be below the second, such as [0, 1]")
        return value


class ComposeReward(RewardBase):
    kind: Literal["compose"]
    """Several rewards put together: a weighted sum, or ordered tiers. The value is the sum of weight x value over the
    parts, or what `tiers` say."""
    parts: dict[str, Part] = Field(min_length=1)
    """The parts by name. Each one appears in the metrics and in the stored samples with its value (before its weight),
    and its own parts as NAME/PART."""
    correct: str | None = None
    """The part that says whether a response is correct; null: right and wrong are left open. The answer that it took
    from the response is shown as that of the whole."""
    tiers: list[str] | None = Field(None, min_length=1)
    """In place of a sum: parts in order, such as format, correctness, quality. A part counts only if all before it
    pass. With n tiers, of which the first t pass, the value is 2 (t + s) / n - 1, where s is the value of the next one,
    cut to 0..1: between -1 (nothing of the first) and 1. The last tier is graded in this way too, unless it is right,
    which is 1."""
    timeout_s: float = Field(3600.0, gt=0)
    """Longest time for all parts of one response, waiting for a free worker or server included. Each part has its own
    limit for the work itself."""

    @property
    def rewards(self) -> dict[str, PlainReward]:
        return {name: part.reward for name, part in self.parts.items() if part.reward is not None}

    def problems(self) -> Iterator[str]:
        yield from (*_broken_names(self), *_broken_links(self), *_without_effect(self))


RewardConfig = Annotated[Plain | ComposeReward, Field(discriminator="kind")]


class MonitorConfig(Section):
    """Watching for reward hacking."""

    check: RewardConfig | None = None
    """A second reward that is never trained on, such as another verifier: the held-out check."""
    share: float = Field(0.25, gt=0, le=1)
    """Share of the samples that it scores."""
    window: int = Field(5, ge=1)
    """Rollout steps that are averaged, at the start of the run and now, before anything is said."""
    max_false_right: float = Field(0.2, ge=0, le=1)
    """Share of the responses that the reward calls right and the check calls wrong above which an alarm is raised."""
    max_divergence: float = Field(1.0, gt=0)
    """How much more the reward may rise than the check, each in its own standard deviations at the start."""
    max_length_correlation: float = Field(0.7, ge=0, le=1)
    """Correlation of reward and length within groups above which lengths that move the same way raise an alarm."""


REWARD_KINDS: dict[str, type[RewardBase]] = {
    str(get_args(kind.model_fields["kind"].annotation)[0]): kind for kind in get_args(Plain | ComposeReward)
}
"""The classes of the union, by the value of ``kind``."""


def plain_rewards(reward: RewardBase) -> Iterator[RewardBase]:
    if isinstance(reward, ComposeReward):
        yield from reward.rewards.values()
    else:
        yield reward


def changed_each(reward: Kind, change: Callable[[Any], Mapping[str, Any]]) -> Kind:
    """With the values that ``change`` gives for each of :func:`plain_rewards`."""
    if not isinstance(reward, ComposeReward):
        return reward.model_copy(update=change(reward))
    parts = {
        name: part.model_copy(update={"reward": part.reward and changed_each(part.reward, change)})
        for name, part in reward.parts.items()
    }
    return reward.model_copy(update={"parts": parts})


def off_gpu(reward: Kind) -> Kind:
    """With reward models of ``device: auto`` on the processor, where the GPUs are others'."""
    return changed_each(reward, lambda one: {"device": "cpu"} if getattr(one, "device", None) == "auto" else {})


def _broken_names(reward: ComposeReward) -> Iterator[str]:
    for name in reward.parts:
        if not re.fullmatch(r"[^\W\d]\w*", name):  # so that it can be a key of an override, and of a metric
            yield f"parts.{name}: a part's name is made of letters, digits and _, and begins with no digit"
        elif is_secret(name):
            yield f"parts.{name}: what stands under a name like this is kept out of all files; use another name"
        elif name == "answer_found":
            yield f"parts.{name}: this name is taken: it tells whether there is an answer"
    links = {f"parts.{name}.only_if": part.only_if for name, part in reward.parts.items()}
    for key, named in {"correct": reward.correct, **links}.items():
        if named is not None and named not in reward.parts:
            yield f"{key}: there is no part {named!r}; the parts are {', '.join(reward.parts)}"
    for name in dict.fromkeys(reward.tiers or ()):
        if name not in reward.parts:
            yield f"tiers: there is no part {name!r}; the parts are {', '.join(reward.parts)}"


def _broken_links(reward: ComposeReward) -> Iterator[str]:
    for name, part in reward.parts.items():
        if (part.reward is None) == (part.of is None):
            yield f"parts.{name}: needs either a reward or `of` (a part of another part's reward, such as solved/style)"
        if part.of is not None:
            source, slash, key = part.of.partition("/")
            if not (slash and key) or source not in reward.rewards:
                known = ", ".join(f"{other}/..." for other in reward.rewards)
                yield f"parts.{name}.of: {part.of!r} is no PART/KEY of a part with a reward; such are {known}"
        chain = _waits_for_itself(reward, name)
        if chain:
            yield f"parts.{name}: {' waits for '.join(chain)} can never begin"
    for name, count in Counter(reward.tiers or ()).items():
        if count > 1:
            yield f"tiers: {name} is named {count} times"


def waits_for(part: Part) -> list[str]:
    return [name for name in (part.only_if, part.of and part.of.partition("/")[0]) if name]


def _waits_for_itself(reward: ComposeReward, name: str) -> list[str]:
    """A chain of parts, each waiting for the next, from ``name`` to itself; empty: there is none."""
    chains = [[name]]
    for chain in chains:  # which grows
        for other in waits_for(reward.parts[chain[-1]]):
            if other == name:
                return [*chain, name]
            if other in reward.parts and other not in chain:
                chains.append([*chain, other])
    return []


def _without_effect(reward: ComposeReward) -> Iterator[str]:
    if reward.tiers is None:
        if all(part.weight == 0 for part in reward.parts.values()):
            yield "parts: every weight is 0, so that the reward is 0 always"
        return
    asked = {reward.correct, *(name for part in reward.parts.values() for name in waits_for(part))}
    for name, part in reward.parts.items():
        if name in reward.tiers and part.weight != 1:
            yield f"parts.{name}.weight: is {part.weight:g}, but weights are for a sum, and {name} is one of the tiers"
        elif name not in reward.tiers and name not in asked and part.weight != 0:
            yield (
                f"parts.{name}: is none of the tiers, no other part waits for it, and `correct` does not name it; "
                "put it into tiers, or give it weight 0 to measure it only"
            )
