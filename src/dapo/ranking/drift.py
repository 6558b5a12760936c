"""Drift: whether new rows are judged worse than reference rows, and how many rows retraining would want."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from dapo.errors import ConfigError, DataError
from dapo.evaluation.statistics import Estimate, Values, estimate_means
from dapo.util.files import read_json

FALSE_ALARMS = 0.05
"""Rate at which rows that did not change are said to be worse, at most."""
_PERMUTATIONS = 4000


@dataclass(frozen=True, slots=True)
class Drift:
    """``reference`` and ``new``: means with their intervals; ``fall``: of the mean, in the same unit. ``p``: chance of
    such a fall, or a larger one, if nothing had changed."""

    reference: Estimate
    new: Estimate
    fall: float
    p: float
    rows: tuple[int, int]

    @property
    def due(self) -> bool:
        return self.p <= FALSE_ALARMS


def compare(reference: Sequence[float], new: Sequence[float], seed: int = 0) -> Drift:
    """A permutation test of the means of one value for each row: if nothing has changed, which rows are the new ones
    says nothing of their values, so that the rate of false alarms is at most :data:`FALSE_ALARMS` whatever they are.
    Raises DataError: fewer than two rows on one side."""
    if min(len(reference), len(new)) < 2:
        raise DataError(f"{len(reference)} reference rows and {len(new)} new ones: at least two of each are needed")
    old, fresh = np.asarray(reference, np.float64), np.asarray(new, np.float64)
    shares = bool(np.isin(np.concatenate([old, fresh]), (0.0, 0.5, 1.0)).all())
    before, now = (estimate_means(one[:, None], [shares], seed)[0] for one in (old, fresh))
    return Drift(before, now, before.value - now.value, chance_of_fall(old, fresh, seed), (len(old), len(fresh)))


def chance_of_fall(old: Values, new: Values, seed: int) -> float:
    """That the new rows have so low a sum, or a lower one, among all ways to name as many rows new."""
    every, size = np.concatenate([old, new]), len(new)
    if np.isin(every, (0.0, 1.0)).all():  # exactly: how many right ones are among them is hypergeometric
        right, most = int(every.sum()), int(new.sum())
        ways = [math.comb(right, k) * math.comb(len(every) - right, size - k) for k in range(most + 1)]
        return float(sum(ways) / math.comb(len(every), size))
    rng, lower = np.random.default_rng(seed), 0
    bound = float(new.sum()) + 1e-9 * max(1.0, float(np.abs(every).sum()))  # rounding makes no difference
    for _ in range(_PERMUTATIONS // 100):
        lower += int((rng.permuted(np.tile(every, (100, 1)), axis=1)[:, :size].sum(axis=1) <= bound).sum())
    return (1 + lower) / (1 + _PERMUTATIONS)


def since(rows: Sequence[Mapping[str, Any]], date: str) -> list[bool]:
    """Which rows are of ``date`` (such as 2026-11-30, UTC where it names no zone) or later, by their ``time``: Unix
    seconds, or a date. Raises ConfigError: it is no date; DataError: a row has none."""
    try:
        start = _seconds(date)
    except ValueError:
        raise ConfigError(f"--since {date}: neither a file nor a date such as 2026-11-30") from None
    found = list[bool]()
    try:
        for row in rows:
            found.append(_seconds(row["time"]) >= start)
    except (KeyError, ValueError):
        number = len(found) + 1
        raise DataError(f"row {number}: has no time (Unix seconds, or a date), so --since cannot place it") from None
    return found


def _seconds(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    found = datetime.fromisoformat(str(value))
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def rows_wanted(curve: Sequence[tuple[int, float]], accuracy: float) -> int | None:
    """Rows at which a learning curve reaches ``accuracy``: errors fall as a power of the rows, fitted in logarithms.
    None: by this curve more rows do not help. Raises DataError: fewer than two points."""
    if len(curve) < 2:
        raise DataError("a learning curve needs two points at least: dapo reward-model RECIPE --curve 4")
    rows, values = np.asarray(curve, np.float64).T
    slope, start = np.polyfit(np.log(rows), np.log(np.maximum(1 - values, 1e-3)), 1)
    if slope >= -1e-3:
        return None
    wanted = (math.log(max(1 - accuracy, 1e-3)) - float(start)) / float(slope)
    return math.ceil(math.exp(wanted)) if wanted < math.log(1e9) else None


def read_curve(run: Path) -> list[tuple[int, float]]:
    """Of a run folder of ``dapo reward-model --curve``. Raises ConfigError: there is none in it."""
    try:
        return [(int(one["rows"]), float(one["accuracy_after"])) for one in read_json(run / "curve.json")]
    except (OSError, ValueError, TypeError, KeyError):
        raise ConfigError(f"--curve {run}: holds no curve.json; dapo reward-model RECIPE --curve 4 makes one") from None
