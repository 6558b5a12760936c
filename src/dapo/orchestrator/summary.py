"""What a run came to, for ``summary.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo.evaluation.early_stopping import EarlyStopping
from dapo.evaluation.result import Evaluation


def summarise(
    facts: Mapping[str, Any], scores: Mapping[str, Mapping[str, Any]], best: EarlyStopping, heldout_rows: int
) -> dict[str, Any]:
    """The summary of a run.

    Args:
        facts: what is so of every run: folder, seed, steps, updates, why it stopped, times.
        scores: ``before`` and ``after`` training, as :func:`scores_of` gives them; empty: there was no evaluation, or
            no training to compare. Without ``before``: that was another evaluation.
        best: of the evaluations. If the last one was before training, there is nothing ``after``, and no best one.
        heldout_rows: how many rows they were over.
    """
    summary = dict(facts)
    if scores:
        summary["heldout_rows"] = heldout_rows
        summary |= {f"{name}_before": value for name, value in scores.get("before", {}).items()}
        if facts["steps"] and best.observed <= 0:
            return summary
        summary |= {f"{name}_after": value for name, value in scores["after"].items()}
        summary["best"] = {"step": best.step, best.metric: best.value}
    return summary


def scores_of(found: Evaluation) -> dict[str, Any]:
    """What the summary compares before and after training."""
    return {"accuracy": found.accuracy, "response_length": found.response_length}
