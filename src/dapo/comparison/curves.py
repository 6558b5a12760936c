"""How far a run had come, by minutes, samples and tokens, and how good it was there. Reads run folders only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.observe.costs import total
from dapo.observe.run_view import RunView

Used = dict[str, float]
"""``minutes`` of steps; ``samples`` drawn and ``tokens`` of responses, in stages rows and tokens trained on."""


def _counts(view: RunView) -> Mapping[str, tuple[str, float]]:
    """The metric that each is counted by, and how much of it one is."""
    if "rollout" in view.config:
        samples = ("groups/drawn", float(view.config["rollout"]["samples_per_prompt"]))
        return {"minutes": ("time/step", 1 / 60), "samples": samples, "tokens": ("tokens/generated", 1.0)}
    rows = float(view.config["training"]["rows_per_update"])
    return {"minutes": ("time/step", 1 / 60), "samples": ("steps", rows), "tokens": ("tokens/trained", 1.0)}


def spent(view: RunView, until: int | None = None) -> Used:
    """Of the steps up to and with ``until``, or of all."""
    steps = [e | {"steps": 1} for e in view.metrics if e["step"] and (until is None or e["step"] <= until)]
    return {name: unit * total(steps, metric) for name, (metric, unit) in _counts(view).items()}


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation, once so much was used."""

    used: Used
    value: float


def curve(views: Sequence[RunView], metric: str) -> list[Point]:
    """Evaluations of the last one of the runs of a cell; what the ones before it used counts."""
    *before, last = views
    start = [spent(view) for view in before]
    found = []
    for entry in last.evaluations:
        value: Any = entry.get(f"eval/{metric}")
        if value is not None:
            here = spent(last, entry["step"])
            found.append(Point({key: here[key] + sum(s[key] for s in start) for key in here}, float(value)))
    return found
