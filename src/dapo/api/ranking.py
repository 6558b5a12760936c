"""``dapo.rank`` and ``dapo.filter``: what these commands do, with candidates from Python."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.config import flat
from dapo.data.rows import BadRow
from dapo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from dapo.data.rows import Messages
    from dapo.ranking.score import Scored


def rank(
    model: Any,
    prompt: str | Messages,
    candidates: Sequence[str],
    *,
    reference: str | None = None,
    settings: Mapping[str, Any] | None = None,
    **fields: Any,
) -> list[Scored]:
    """``candidates`` with their scores, the best first; each has ``index`` (among those given), ``text`` and ``score``.

    Args:
        model: reward model or its run, run of ``dapo dpo``, recipe with a reward, kind of reward, or a function as for
            :func:`dapo.train`.
        prompt: text, or chat messages.
        reference: the policy that DPO began with, where ``model`` is a policy without its run.
        settings: keys such as ``{"reward.max_length": 512}``.
        fields: what else the reward needs of a row, such as ``answer`` or ``tests``.

    Raises UserError: there is no such model, or it ranks nothing."""
    from dapo.ranking import rows
    from dapo.ranking.score import best_first, load_ranker, score_rows

    if isinstance(candidates, str):
        raise DataError("candidates: expected a list of texts, got a text; put it in a list")
    overrides = [f"{key}={json.dumps(value)}" for key, value in flat(settings or {})]
    try:
        row = rows.candidates({**fields, "prompt": prompt or None, "candidates": list(candidates)})
    except BadRow as fault:
        raise DataError(f"rank: {fault}") from None
    return best_first(score_rows(load_ranker(model, reference=reference, overrides=overrides), [row], most_failed=1)[0])


def filter(
    model: Any,
    prompt: str | Messages,
    candidates: Sequence[str],
    threshold: float | None = None,
    *,
    calibration: str | Path | None = None,
    writer: str = "*",
    **how: Any,
) -> list[Scored]:
    """Those of ``candidates`` that score above ``threshold``, in their order; an empty list where none does.

    Args:
        calibration: file of ``dapo filter --calibration`` to take the threshold from, in place of ``threshold``.
        writer: the language model that wrote the candidates, where the file has thresholds for several.
        how: as for :func:`rank`.

    Raises ConfigError: there is no threshold, or none for this writer; others as :func:`rank`."""
    from dapo.ranking.calibrate import passing, read_thresholds
    from dapo.ranking.rows import Candidates

    if (threshold is None) == (calibration is None):
        raise ConfigError("filter: give one of threshold (a number) and calibration (of dapo filter --calibration)")
    thresholds = {writer: threshold or 0.0} if calibration is None else read_thresholds(Path(calibration), model)
    scored = sorted(rank(model, prompt, candidates, **how), key=lambda one: one.index)
    return passing([Candidates(prompt, (), model=writer)], [scored], thresholds)[0]
