"""Thresholds: the score from which on a response is kept, chosen on labelled rows for a wanted precision or recall.

Consumes scores with labels; produces a :class:`Calibration` for each language model whose responses are filtered, as
the same score means different things of different writers. What a threshold promises is measured on rows that it was
not chosen on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dapo.errors import ConfigError, DataError
from dapo.evaluation.statistics import Estimate, estimate_ratio, estimate_share
from dapo.ranking.rows import EVERY, Candidates
from dapo.ranking.score import Scored
from dapo.util.files import read_json, write_json
from dapo.util.terminal import warn

Goal = Literal["precision", "recall"]
FEWEST = 20
"""Right responses, and responses kept, that a threshold rests on at least: below, 95% could not be told from 85%."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """Scores with labels, ``[N]`` each. ``groups``: which prompt; responses to one are not independent."""

    scores: np.ndarray[Any, np.dtype[np.float64]]
    right: np.ndarray[Any, np.dtype[np.bool_]]
    groups: np.ndarray[Any, np.dtype[np.int64]]

    def of(self, groups: Iterable[int]) -> Labelled:
        keep = np.isin(self.groups, list(groups))
        return Labelled(self.scores[keep], self.right[keep], self.groups[keep])


@dataclass(frozen=True, slots=True)
class Measured:
    """Of rows at a threshold. ``kept``: so many of all ``responses``. Intervals are of 95%, by bootstrap over prompts;
    Wilson's where all that count went the same way."""

    precision: Estimate
    recall: Estimate
    kept: int
    responses: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """``threshold``: a response is kept if its score is above. ``chosen_on`` and ``check``: what it gives on the rows
    that it was chosen on, and on others."""

    threshold: float
    goal: Goal
    wanted: float
    chosen_on: Measured
    check: Measured

    @property
    def verdict(self) -> str:
        """Whether what is wanted was met on the rows that the threshold was not chosen on."""
        found: Estimate = getattr(self.check, self.goal)
        if found.value >= self.wanted:
            return "met"
        return "met within the interval" if (found.high or found.value) >= self.wanted else "missed"


def labelled_of(rows: Sequence[Candidates], scored: Sequence[Sequence[Scored]]) -> dict[str, Labelled]:
    """By the language model that wrote the responses (:data:`EVERY` where rows do not say). Failed scores are left out.
    Raises DataError: a row has no labels of right and wrong."""
    found: dict[str, list[tuple[float, bool, int]]] = {}
    prompts: dict[str, int] = {}
    for row, several in zip(rows, scored, strict=True):
        if not row.binary:
            raise DataError(
                f"{row.place}: a threshold needs labels of right (1) and wrong (0), as a pair has them, or a response "
                "with its label"
            )
        group = prompts.setdefault(row.prompt_text or f"{len(prompts)} has none", len(prompts))
        for one, label in zip(several, row.labels, strict=True):
            if one.score is not None:
                found.setdefault(row.model, []).append((one.score, label == 1, group))
    return {name: Labelled(*map(np.array, zip(*each, strict=True))) for name, each in found.items()}


def calibrate(data: Labelled, goal: Goal, wanted: float, seed: int = 0) -> Calibration:
    """The threshold that keeps most at the wanted precision, or is most precise at the wanted recall: chosen on half of
    the prompts, and measured on the others.
    Raises DataError: no threshold reaches that, or there are too few labels; says what was reached."""
    groups = np.random.default_rng(seed).permutation(np.unique(data.groups))
    chosen_on, check = data.of(groups[::2]), data.of(groups[1::2])
    threshold = _threshold(chosen_on, goal, wanted)
    return Calibration(threshold, goal, wanted, measure(chosen_on, threshold, seed), measure(check, threshold, seed))


def _threshold(data: Labelled, goal: Goal, wanted: float) -> float:
    right, wrong = int(data.right.sum()), int((~data.right).sum())
    if right < FEWEST or not wrong:
        raise DataError(
            f"{right} right and {wrong} wrong responses to choose a threshold on; at least {FEWEST} right and 1 wrong "
            "are needed, and as many again to check it"
        )
    order = np.argsort(-data.scores, kind="stable")
    scores, hits = data.scores[order], np.cumsum(data.right[order])
    kept = np.arange(1, len(scores) + 1)
    cut = np.append(scores[1:] < scores[:-1], True)  # equal scores stay together
    precision, recall = hits / kept, hits / right
    if goal == "recall":
        place = int(np.flatnonzero(cut & (recall >= wanted))[0])
    else:
        allowed = np.flatnonzero(cut & (kept >= FEWEST))
        reaching = allowed[precision[allowed] >= wanted]
        if not len(reaching):
            best = allowed[np.argmax(precision[allowed])]
            raise DataError(
                f"no threshold reaches a precision of {wanted:g} with {FEWEST} responses kept: the best is "
                f"{precision[best]:.3f}, which keeps {kept[best]} of {len(scores)}; ask for less, or train a better "
                "ranker (dapo reward-model --curve says whether more labels help)"
            )
        place = int(reaching[-1])
    if place + 1 == len(scores):
        return float(scores[-1]) - 1.0
    return float((scores[place] + scores[place + 1]) / 2)  # between two scores, so that rounding decides nothing


def measure(data: Labelled, threshold: float, seed: int = 0) -> Measured:
    """Precision and recall of what is kept. Raises DataError: no label is of a right response."""
    if not data.right.any():
        raise DataError("no response of the rows to check the threshold on is right")
    kept = data.scores > threshold
    _, place = np.unique(data.groups, return_inverse=True)
    hits, count, right = (np.bincount(place, x) for x in (kept & data.right, kept, data.right))  # by prompt
    return Measured(_share(hits, count, seed), _share(hits, right, seed), int(count.sum()), len(kept))


def _share(hits: Any, of: Any, seed: int) -> Estimate:
    found, every = float(hits.sum()), float(of.sum())
    return estimate_share(found, every) if every and found in (0, every) else estimate_ratio(hits, of, seed)


# --- on disk: one file, by the language model that writes ------------------------------------------------------------


def write_calibrations(file: Path, ranker: str, found: Mapping[str, Calibration]) -> None:
    """Those of other language models that the file holds for the same ranker stay. Raises ConfigError: it holds those
    of another ranker."""
    of, before = _read(file) if file.exists() else (ranker, {})
    if of != ranker:
        raise ConfigError(f"{file}: holds thresholds of the ranker {of}; give another file")
    told = {name: {**asdict(one), "verdict": one.verdict} for name, one in found.items()}
    write_json(file, {"ranker": ranker, "models": {**before, **told}})


def read_thresholds(file: Path, ranker: object) -> dict[str, float]:
    """By language model; warns where they were chosen for another ``ranker``, by its name.
    Raises ConfigError: the file is missing, or none that ``dapo filter`` wrote."""
    of, models = _read(file)
    if of != str(ranker):
        warn(f"{file}: its thresholds are of the ranker {of}, and {ranker} scores here")
    return {name: one["threshold"] for name, one in models.items()}


def _read(file: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """The ranker, and what is known by language model. Raises ConfigError: as :func:`read_thresholds`."""
    try:
        held = read_json(file)
        models = {name: {**one, "threshold": float(one["threshold"])} for name, one in held["models"].items()}
        return held["ranker"], models
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file}: holds no thresholds ({type(error).__name__}); dapo filter RANKER --labelled ROWS --precision P "
            f"--calibration {file} makes them"
        ) from None


def passing(
    rows: Sequence[Candidates], scored: Sequence[Sequence[Scored]], thresholds: Mapping[str, float]
) -> list[list[Scored]]:
    """What is kept of each row, in the order given; of none, none.
    Raises ConfigError: there is no threshold for responses of a row's language model."""
    found = []
    for row, several in zip(rows, scored, strict=True):
        least = thresholds.get(row.model, thresholds.get(EVERY))
        if least is None:
            who = "rows that do not say who wrote them (model)" if row.model == EVERY else f"responses of {row.model}"
            known = ", ".join(thresholds)
            raise ConfigError(f"there is no threshold for {who}, only for {known}; calibrate on labelled ones, too")
        found.append([one for one in several if one.score is not None and one.score > least])
    return found
