"""Best-of-n: what the best one of n samples is worth, and how well a ranker agrees with labels. Numbers in and out."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Any

import numpy as np

from dapo.errors import DataError
from dapo.evaluation.statistics import Estimate, Values, calibration_error, estimate_means
from dapo.ranking.rows import Candidates, pairs_of
from dapo.ranking.score import Scored


def best_of(scores: Sequence[float], values: Sequence[float], n: int) -> float:
    """Expected value of the sample with the highest score among n of k, drawn without replacement: unbiased for n new
    samples. The one with rank i (1 is the lowest) is the best of C(i - 1, n - 1) of the C(k, n) subsets; samples with
    equal scores share theirs.
    ``scores``, ``values``: of each sample, ``[k]``. Raises ValueError: k < n."""
    k = len(scores)
    if not 0 < n <= k:
        raise ValueError(f"the best of {n} needs {n} samples, and there are {k}")
    given, worth = np.asarray(scores, np.float64), np.asarray(values, np.float64)
    order = np.argsort(given, kind="stable")
    chance = np.array([comb(i, n - 1) / comb(k, n) for i in range(k)])
    _, first, counts = np.unique(given[order], return_index=True, return_counts=True)
    shared = np.repeat(np.add.reduceat(chance, first) / counts, counts)
    return float(shared @ worth[order])


def best_of_n(
    scored: Sequence[Sequence[Scored]], values: Sequence[Sequence[float]], budgets: Sequence[int], seed: int = 0
) -> dict[int, Estimate]:
    """Mean over prompts of :func:`best_of` for each n of ``budgets`` that all prompts have samples for, with its 95%
    interval; n = 1 is a single sample. Samples whose score failed are never chosen.
    Raises DataError: there are no prompts with samples."""
    each = []
    for several, worth in zip(scored, values, strict=True):
        kept = [k for k, one in enumerate(several) if one.score is not None]
        each.append(([several[k].score or 0.0 for k in kept], [worth[k] for k in kept]))
    most = min((len(one) for one, _ in each), default=0)
    if not most:
        raise DataError("best-of-n: a prompt has no sample with a score")
    wanted = [n for n in budgets if n <= most]
    table = np.array([[best_of(*one, n) for n in wanted] for one in each])
    return dict(zip(wanted, estimate_means(table, [False] * len(wanted), seed), strict=True))


def agreement(rows: Sequence[Candidates], scored: Sequence[Sequence[Scored]], seed: int = 0) -> dict[str, Any]:
    """How often the better response has the higher score (a tie is half right): mean over rows with its 95% interval,
    and the calibration error of sigmoid(margin). Empty: labels tell no two responses of a row apart."""
    margins: dict[int, list[float]] = {}
    for number, better, worse in pairs_of(rows):
        high, low = scored[number][better].score, scored[number][worse].score
        if high is not None and low is not None:
            margins.setdefault(number, []).append(high - low)
    if not margins:
        return {}
    shares: Values = np.array([[np.mean([(m > 0) + 0.5 * (m == 0) for m in each])] for each in margins.values()])
    found = estimate_means(shares, [True], seed)[0]
    error = calibration_error(np.array([margin for each in margins.values() for margin in each]))
    return {"rows": len(margins), "accuracy": found, "calibration_error": error, "values": shares[:, 0].tolist()}


def least_sure(rows: Sequence[Candidates], scored: Sequence[Sequence[Scored]], most: int) -> list[dict[str, Any]]:
    """The pairs that a label would teach the ranker most: of each row the two best, those with the least difference of
    scores first. What several rows hold is asked about once."""
    found: dict[str, dict[str, Any]] = {}
    for row, several in zip(rows, scored, strict=True):
        kept = {one.text: one for one in several if one.score is not None}
        two = sorted(kept.values(), key=lambda one: -(one.score or 0.0))[:2]
        if len(two) == 2:
            margin = (two[0].score or 0.0) - (two[1].score or 0.0)
            texts = [one.text for one in two]
            found[repr((row.prompt, texts))] = {"prompt": row.prompt, "candidates": texts, "margin": margin}
    return sorted(found.values(), key=lambda one: one["margin"])[:most]
