"""What scores are worth: the best of n samples, and how well they agree with labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import comb
from typing import Any

import numpy as np

from dapo.errors import DataError
from dapo.evaluation.statistics import Estimate, budgets, calibration_error, estimate_means
from dapo.ranking.rows import Candidates, pairs_of
from dapo.ranking.score import Scored, best_first


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
    scored: Sequence[Sequence[Scored]], values: Sequence[Sequence[float]], budgets: Sequence[int]
) -> dict[int, Estimate]:
    """Mean over prompts of :func:`best_of` for each n of ``budgets`` that all prompts have samples for, with its 95%
    interval; n = 1 is a single sample. Samples whose score failed are never chosen.
    Raises DataError: there are no prompts with samples."""
    each: list[Any] = []
    for several, worth in zip(scored, values, strict=True):
        kept = [(one.score, value) for one, value in zip(several, worth, strict=True) if one.score is not None]
        each.append(list(zip(*kept, strict=True)))
    most = min((len(one[0]) if one else 0 for one in each), default=0)
    if not most:
        raise DataError("best-of-n: a prompt has no sample with a score")
    wanted = [n for n in budgets if n <= most]
    table = np.array([[best_of(given, worth, n) for n in wanted] for given, worth in each])
    return dict(zip(wanted, estimate_means(table, [False] * len(wanted)), strict=True))


def agreement(rows: Sequence[Candidates], scored: Sequence[Sequence[Scored]]) -> dict[str, Any]:
    """How often the better response has the higher score (a tie is half right): mean over rows with its 95% interval,
    and the calibration error of sigmoid(margin). Empty: labels tell no two responses of a row apart."""
    margins: dict[int, list[float]] = {}
    for number, better, worse in pairs_of(rows):
        high, low = scored[number][better].score, scored[number][worse].score
        if high is not None and low is not None:
            margins.setdefault(number, []).append(high - low)
    if not margins:
        return {}
    shares = np.array([[np.mean([(m > 0) + 0.5 * (m == 0) for m in each])] for each in margins.values()])
    error = calibration_error(np.concatenate(list(margins.values())))
    found = {"accuracy": estimate_means(shares, [True])[0], "calibration_error": error}
    return {"rows": len(margins), **found, "values": shares[:, 0].tolist()}


def least_sure(rows: Sequence[Candidates], scored: Sequence[Sequence[Scored]], most: int) -> list[dict[str, Any]]:
    """The pairs that a label would teach the ranker most: of each row the two best, those with the least difference of
    scores first. What several rows hold is asked about once."""
    found = dict[str, dict[str, Any]]()
    for row, several in zip(rows, scored, strict=True):
        two = list({one.text: one.score for one in best_first(several) if one.score is not None}.items())[:2]
        if len(two) == 2:
            (first, high), (second, low) = two
            line = {"prompt": row.prompt, "candidates": [first, second]}
            found[repr(line)] = line | {"margin": high - low}
    return sorted(found.values(), key=lambda one: float(one["margin"]))[:most]


def summary(rows: Sequence[Candidates], scored: Sequence[Sequence[Scored]]) -> dict[str, Any]:
    """What labels say of the ranking, and the mean label of the best of n; empty without labels."""
    found: dict[str, Any] = {"agreement": agreement(rows, scored)}
    many = [(several, row.labels) for row, several in zip(rows, scored, strict=True) if len(row.labels) > 1]
    fewest = min((sum(one.score is not None for one in several) for several, _ in many), default=0)
    if fewest > 1:
        found["best_of"] = best_of_n([one for one, _ in many], [labels for _, labels in many], budgets(fewest))
    return {name: value for name, value in found.items() if value}


def summary_lines(found: Mapping[str, Any]) -> Iterator[str]:
    if agreed := found.get("agreement"):
        yield f"the better response ranks higher in {agreed['accuracy'].text('.1%')} of {agreed['rows']} rows"
        yield f"calibration error of sigmoid(difference): {agreed['calibration_error']:.3f}"
    for n, estimate in found.get("best_of", {}).items():
        yield f"mean label of {'one sample' if n == 1 else f'the best of {n}'}: {estimate.text('.3f')}"
