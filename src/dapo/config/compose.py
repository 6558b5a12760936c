"""What cannot be meant in a reward that is put together from parts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dapo.config.secrets import is_secret

if TYPE_CHECKING:  # the section calls these checks when it is built
    from dapo.config.reward import ComposeReward, Part


def compose_problems(reward: ComposeReward) -> Iterator[str]:
    """Every mistake, as `key: what is wrong; what would work`, where the key counts from the section."""
    yield from _broken_names(reward)
    yield from _broken_links(reward)
    yield from _without_effect(reward)


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
    """The parts that must be known before ``part`` can be."""
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
