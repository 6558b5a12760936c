"""Series of metrics, thinned out for the screen, and tables of several runs side by side. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dapo.changes import Change
from dapo.config import flat
from dapo.observe.metrics import METRICS, PHASES

Entry = Mapping[str, Any]

HEADLINES = (
    *("eval/accuracy", "accuracy", "reward/mean", "response_length/mean", "entropy", "probability/mean"),
    *("groups/share_all_right", "clip/high", "grad_norm", "mismatch/mean", "kl/reference", "tokens_per_second/total"),
)
"""What is worth a look first: section 4.3 of the paper, then what tells of trouble."""


def names_in(entries: Sequence[Entry]) -> list[str]:
    """Metrics that have a number in some line, in the order of the registry."""
    order = {name: place for place, name in enumerate(METRICS)}
    found = {"step"}
    for entry in entries:
        found.update(name for name in entry.keys() - found if _is_number(entry[name]))
    return sorted(found - {"step"}, key=lambda name: (order.get(name, len(order)), name))


def curve(entries: Sequence[Entry], name: str, points: int, x: str = "step") -> list[list[float]]:
    """Points ``[x, mean, lowest, highest]`` of a metric, at most ``points`` of them, each of as many steps.

    What was measured before training stands at 0, whatever ``x`` is.
    """
    places = [(0.0 if not entry.get("step") else entry.get(x), entry.get(name)) for entry in entries]
    pairs = [pair for pair in places if all(map(_is_number, pair))]
    if not pairs:
        return []
    array = np.array(pairs, np.float64)
    parts = np.array_split(array, min(points, len(array)))
    return [[_round(part[-1, 0]), *map(_round, _spread(part[:, 1]))] for part in parts]


def curves(
    entries: Sequence[Entry], names: Iterable[str], points: int, x: str = "step"
) -> dict[str, list[list[float]]]:
    """The curve of each of these metrics."""
    return {name: curve(entries, name, points, x) for name in names}


def marks(entries: Sequence[Entry], changes: Sequence[Change], x: str = "step") -> list[list[Any]]:
    """``[x, text]`` of each step from which on settings were others; of one that is not done yet nothing."""
    places = {entry["step"]: entry.get(x) for entry in entries}
    texts: dict[int, list[str]] = {}
    for change in changes:
        texts.setdefault(change.step, []).append(str(change))
    return [[places[step], "\n".join(said)] for step, said in texts.items() if _is_number(places.get(step))]


def phases(entries: Sequence[Entry], points: int) -> dict[str, Any]:
    """Seconds of each phase per step: series for the screen (means over neighbours) and totals over the run.

    ``other`` is what no phase has, such as writing samples and checkpoints.
    """
    steps = [entry for entry in entries if entry.get("step")]
    table = np.array([_phases_of(entry) for entry in steps], np.float64).reshape(len(steps), len(PHASES) + 1)
    numbers = np.array([entry["step"] for entry in steps], np.float64)
    count = min(points, len(steps))
    parts = zip(*(np.array_split(array, count) for array in (numbers, table)), strict=True) if count else ()
    rows = [[_round(step[-1]), *map(_round, part.mean(axis=0))] for step, part in parts]
    names = [*PHASES, "other"]
    return {"names": names, "rows": rows, "totals": dict(zip(names, map(_round, table.sum(axis=0)), strict=True))}


_OF_THE_RUN = ("run.", "monitor.every")
"""Keys in which runs differ without being different experiments."""


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that do not have the same value in all these recipes; one that is not there is as good as null."""
    tables = [dict(flat(config)) for config in configs]
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if any(table.get(key) != tables[0].get(key) for table in tables)]


def ablation_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that make these runs different experiments."""
    return [key for key in differing(configs) if not key.startswith(_OF_THE_RUN)]


def final(entries: Sequence[Entry], name: str, over: int = 10) -> float | None:
    """The end of a curve: the last value of an evaluation or of the time so far, of other metrics the mean over the
    last ``over`` steps."""
    values = [entry[name] for entry in entries[-200:] if _is_number(entry.get(name))]
    if not values:
        return None
    return float(values[-1] if name.startswith(("eval/", "time/elapsed")) else np.mean(values[-over:]))


def _phases_of(entry: Entry) -> list[float]:
    seconds = {name: float(entry.get(f"time/{name}") or 0.0) for name in PHASES}
    wall = entry.get("time/wall") or (entry.get("time/step") or 0.0) + seconds["evaluation"]  # older runs have no wall
    return [*seconds.values(), max(float(wall) - sum(seconds.values()), 0.0)]


def _spread(values: Any) -> tuple[float, float, float]:
    return float(values.mean()), float(values.min()), float(values.max())


def _round(value: float) -> float:
    """Six digits are more than a screen shows."""
    return float(f"{value:.6g}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
