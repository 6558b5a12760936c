"""The alarms of a run, told again from its metrics: which, when, what was seen, what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dapo.config import Config, build_config
from dapo.errors import UserError
from dapo.observe.alarms import RULES, Alarms
from dapo.observe.changes import Change
from dapo.observe.run_view import HACKING


def alarm_history(
    config: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], changes: Sequence[Change] = ()
) -> list[dict[str, Any]]:
    """Every rule, those that were raised last first: ``name``, ``advice``, ``steps`` it was on in, ``seen`` last."""
    recipe = readable_recipe(config)
    found: dict[str, dict[str, Any]] = {
        rule.name: {"name": rule.name, "advice": rule.advice, "reads": list(rule.reads), "steps": [], "seen": None}
        for rule in RULES
    }
    alarms = None if recipe is None else Alarms(recipe, changes)
    for entry in entries:
        if alarms is None or not (step := entry.get("step")):
            continue
        alarms.observe(step, entry)
        alarms.settle()
        for name, seen in alarms.found.items():
            found[name]["steps"].append(step)
            found[name]["seen"] = seen
    return sorted(found.values(), key=lambda alarm: -(alarm["steps"] or [0])[-1])


def hacking_history(steps: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """The signs of reward hacking, told in the same way; ``steps`` as ``RunView.hacking`` has them."""
    signs = HACKING | {"": "; or ".join(HACKING.values())} if "" in steps else HACKING
    return [
        {
            "name": f"reward hacking: {sign.replace('_', ' ')}" if sign else "reward hacking",
            "advice": "see reward against length in the view Hacking, and read samples that the check disputes",
            "reads": [f"monitor/alarms/{sign}" if sign else "monitor/alarms"],
            "steps": list(steps.get(sign, ())),
            "seen": seen,
        }
        for sign, seen in signs.items()
    ]


def readable_recipe(config: Mapping[str, Any]) -> Config | None:
    """None: it is of a version with other keys."""
    try:
        return build_config(dict(config))
    except UserError:
        return None
