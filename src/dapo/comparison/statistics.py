"""Intervals of a comparison: over seeds, and over the rows that all were evaluated on. Numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, variance

import numpy as np

from dapo.evaluation.statistics import Estimate, estimate_means

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for 95%, by degrees of freedom from 1; for more of them the last one, which is a little wide."""

Noise = tuple[float, int]


def noise(groups: Iterable[Sequence[float]]) -> Noise | None:
    """The standard deviation between seeds, pooled over variants, and its degrees of freedom: with two seeds, a
    variant's own spread says nothing. None: no variant has two seeds."""
    known = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in known)
    if not freedom:
        return None
    return math.sqrt(sum((len(group) - 1) * variance(group) for group in known) / freedom), freedom


def half(found: Noise, *counts: int) -> float:
    """Half of the 95% interval of the mean of so many seeds, or of the difference of two such means."""
    deviation, freedom = found
    return T_95[min(freedom, len(T_95)) - 1] * deviation * math.sqrt(sum(1 / count for count in counts))


def paired(first: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> Estimate | None:
    """Of ``other`` less ``first``, over the rows that all of them have: each row's mean over the seeds of one, less
    that of the other, and the bootstrap over rows. It says how far other rows would move it, and nothing of seeds.
    ``first``, ``other``: of each seed the values by row. None: they have no row in common."""
    rows = sorted(set.intersection(*(set(seed) for seed in (*first, *other)))) if first and other else []
    if not rows:
        return None
    gains = [fmean(seed[row] for seed in other) - fmean(seed[row] for seed in first) for row in rows]
    return estimate_means(np.array(gains)[:, None], [False])[0]


def at(xs: Sequence[float], values: Sequence[float], place: float) -> float | None:
    """The value at ``place``, on straight lines between evaluations; None: the curve does not reach it."""
    if not xs or not xs[0] <= place <= xs[-1]:
        return None
    return float(np.interp(place, xs, values))
