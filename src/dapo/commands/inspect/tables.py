"""Numbers by their unit, and small curves: what the reading commands print, on any terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from dapo.observe.metrics import describe
from dapo.observe.progress import duration, finite

BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"


def number(name: str, value: Any) -> str:
    """The value of a metric as a person reads it: shares in percent, bytes in MB, a dash where there is none."""
    value = finite(value)
    if value is None:
        return "-"
    unit = metric.unit if (metric := describe(name)) else ""
    if unit == "share":
        return f"{value:.1%}"
    if unit == "bytes":
        return f"{value / 1e6:,.0f} MB"
    if name == "time/elapsed":
        return duration(value)
    if isinstance(value, int) or value.is_integer():
        return f"{value:.0f}"
    return f"{value:.4g}"


def curve(values: Sequence[Any], width: int, letters: str = BLOCKS) -> str:
    """The course of a metric in at most ``width`` letters, from its lowest to its highest value; none is a blank."""
    if len(values) > width:
        cuts = [round(place * len(values) / width) for place in range(width + 1)]
        known = ([v for v in values[a:b] if v is not None] for a, b in pairwise(cuts))
        values = [fmean(part) if part else None for part in known]
    found = [v for v in values if v is not None]
    low, high = min(found, default=0.0), max(found, default=0.0)
    top = len(letters) - 1

    def letter(value: float | None) -> str:
        if value is None:
            return " "
        return letters[round(top * (value - low) / (high - low))] if high > low else letters[0]

    return "".join(map(letter, values)).rstrip()
