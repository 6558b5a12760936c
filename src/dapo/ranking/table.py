"""Rows scored from start to end, and what is told of it: for the commands, Python and the distillation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dapo.evaluation.statistics import Estimate, budgets
from dapo.ranking.best_of import agreement, best_of_n
from dapo.ranking.rows import EVERY, Candidates
from dapo.ranking.score import Ranker, Scored, best_first
from dapo.util.asynchronous import run_async


def score_rows(ranker: Ranker, rows: Sequence[Candidates]) -> list[list[Scored]]:
    """Of each row, in the order of its candidates. The ranker is closed then."""

    async def work() -> list[list[Scored]]:
        try:
            return await ranker.all_scores(rows)
        finally:
            await ranker.close()

    return run_async(work)


def ranked_lines(rows: Sequence[Candidates], scored: Sequence[Sequence[Scored]]) -> Iterator[dict[str, Any]]:
    """A row each, its candidates with the best first."""
    for row, several in zip(rows, scored, strict=True):
        yield {"prompt": row.prompt, **_writer(row), "ranking": [told(one) for one in best_first(several)]}


def kept_lines(rows: Sequence[Candidates], kept: Sequence[Sequence[Scored]]) -> Iterator[dict[str, Any]]:
    """A line for each response that passed, as fine-tuning reads it."""
    for row, several in zip(rows, kept, strict=True):
        for one in several:
            label = {"label": row.labels[one.index]} if row.labels else {}
            yield {"prompt": row.prompt, **_writer(row), "response": one.text, "score": one.score, **label}


def _writer(row: Candidates) -> dict[str, str]:
    return {} if row.model == EVERY else {"model": row.model}


def told(one: Scored) -> dict[str, Any]:
    return {name: value for name, value in asdict(one).items() if name != "error" or value is not None}


def summary(rows: Sequence[Candidates], scored: Sequence[Sequence[Scored]]) -> dict[str, Any]:
    """What labels say of the ranking, and the mean label of the best of n; empty without labels."""
    found: dict[str, Any] = {"agreement": agreement(rows, scored)}
    many = [(row, several) for row, several in zip(rows, scored, strict=True) if row.labels and len(row.labels) > 1]
    if many:
        fewest = min(sum(one.score is not None for one in several) for _, several in many)
        if fewest > 1:
            values = [row.labels for row, _ in many]
            found["best_of"] = best_of_n([several for _, several in many], values, budgets(fewest))
    return {name: value for name, value in found.items() if value}


def summary_lines(found: Mapping[str, Any]) -> Iterator[str]:
    if agreed := found.get("agreement"):
        yield f"the better response ranks higher in {interval(agreed['accuracy'], '.1%')} of {agreed['rows']} rows"
        yield f"calibration error of sigmoid(difference): {agreed['calibration_error']:.3f}"
    for n, estimate in found.get("best_of", {}).items():
        yield f"mean label of {'one sample' if n == 1 else f'the best of {n}'}: {interval(estimate, '.3f')}"


def interval(estimate: Estimate, form: str) -> str:
    """``0.95 (0.92 to 0.97)``; without an interval the value alone."""
    if estimate.low is None or estimate.high is None:
        return format(estimate.value, form)
    return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"
