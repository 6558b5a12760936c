"""What cannot be meant in a reward that is put together from parts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the section calls these checks when it is built
    from dapo.config.reward import ComposeReward


def compose_problems(reward: ComposeReward) -> Iterator[str]:
    """Every mistake, as `key: what is wrong; what would work`, where the key counts from the section."""
    yield from _broken_names(reward)
    yield from _broken_links(reward)
    yield from _without_effect(reward)


def _broken_names(reward: ComposeReward) -> Iterator[str]:
    for name in reward.parts:
        if not re.fullmatch(r"[^\W\d]\w*", name):  # so that it can be a key of an override, and of a metric
            yield f"parts.{name}: a part's name is made of letters, digits and _, and begins with no digit"
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
    for name in reward.parts:
        chain = [name]
        gate = reward.parts[name].only_if
        while gate is not None and gate in reward.parts and gate not in chain:
            chain.append(gate)
            gate = reward.parts[gate].only_if
        if gate == name:
            yield f"parts.{name}.only_if: {' only if '.join([*chain, name])} can never begin"
    for name, count in Counter(reward.tiers or ()).items():
        if count > 1:
            yield f"tiers: {name} is named {count} times"


def _without_effect(reward: ComposeReward) -> Iterator[str]:
    if reward.tiers is None:
        if all(part.weight == 0 for part in reward.parts.values()):
            yield "parts: every weight is 0, so that the reward is 0 always"
        return
    asked = {reward.correct, *(part.only_if for part in reward.parts.values())}
    for name, part in reward.parts.items():
        if name in reward.tiers and part.weight != 1:
            yield f"parts.{name}.weight: is {part.weight:g}, but weights are for a sum, and {name} is one of the tiers"
        elif name not in reward.tiers and name not in asked and part.weight != 0:
            yield (
                f"parts.{name}: is none of the tiers, no only_if and not what `correct` names; put it into tiers, or "
                "give it weight 0 to measure it only"
            )
