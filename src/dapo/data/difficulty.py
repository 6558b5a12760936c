"""Draws the prompts that a policy is likely to solve now and then: only mixed groups teach anything (Eq. 11).

What is known of a prompt's pass rate is a Beta distribution: a prior, and the right and wrong samples of the prompt's
own groups, which count half after ``half_life`` policy versions. The prior's mean is a logistic regression on what rows
tell, fitted to all that was heard of their source. From it follows the chance that G samples are mixed; prompts are
drawn in proportion to a power of it. A share of the draws, the floor, is uniform: at each draw every prompt that is not
being sampled has a probability of at least floor / N, whatever is known of it, so none is forgotten. In a curriculum
the pass rate that is preferred moves with the policy's version.

This changes the distribution of prompts, and with it the objective: prompts of middling difficulty weigh more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from dapo.config import DataConfig
from dapo.data.order import point
from dapo.data.parts import Rows
from dapo.data.stream import Stream
from dapo.records import Group

Floats = npt.NDArray[np.float64]

_SHARPNESS = 4
"""Power of the chance that draws are in proportion to. In simulations 1 saves a fifth of what uniform draws waste, 4
more than a third; 8 saves more, and comes back to the same prompts ever more often."""
_STRENGTH = 0.2, 20.0
"""Bounds of the prior, in samples: below, a group alone decides; above, it hardly counts."""
_TRUSTED = 20
"""Groups from which on the prior is fitted; until then it is uniform."""
_MOST_ROWS, _MOST_COLUMNS = 50_000, 32
"""Of a source whose rows are read for what they tell: a second or two."""


def chance_mixed(right: Floats, wrong: Floats, group: int) -> Floats:
    """Of a group of so many samples to hold right and wrong ones, where the pass rate is Beta(right, wrong)."""
    of_all = np.ones((2, *np.shape(right)))
    for k in range(group):
        of_all *= (np.stack([right, wrong]) + k) / (right + wrong + k)
    mixed: Floats = 1 - of_all.sum(axis=0)
    return mixed


class DifficultyStream(Stream):
    def __init__(self, rows: Rows, number: int, data: DataConfig, seed: int, group: int) -> None:
        """``group``: G, samples of a prompt."""
        super().__init__(rows, number, data, seed)
        self._floor, self._half_life, self._group = data.sampling_floor, data.sampling_half_life, group
        self._curriculum, self._told = data.sampling_target, told_by(rows)
        self._counts = np.zeros((2, len(rows)))
        """Right and wrong samples of each row, as they counted when they were heard of last."""
        self._heard_at = np.zeros(len(rows), np.int64)
        self._out: set[int] = set()
        self._busy: set[int] = set()
        self._draws = self._version = 0
        self._weigh()

    def next(self) -> int:
        if 2 * len(self._busy) >= len(self.rows) - len(self._out):  # what is left would be drawn for no reason but that
            self._busy.clear()
        while True:
            at = point(self._seed, "difficulty", self._number, self._draws)
            self._draws += 1
            row = min(int(np.searchsorted(self._reached, at * self._reached[-1], side="right")), len(self.rows) - 1)
            if row not in self._busy and row not in self._out:
                self._busy.add(row)
                return row

    @property
    def drawn(self) -> int:
        return self._draws

    def leave_out(self, number: int) -> None:
        self._out.add(number)
        if len(self._out) == len(self.rows):  # the source says so
            self._out.clear()

    def heard(self, groups: Mapping[int, list[Group]]) -> None:
        every = [group for of_row in groups.values() for group in of_row]
        self._version = max([self._version, *(int(s.versions.max()) for g in every for s in g.samples if s.length)])
        for row, of_row in groups.items():
            now = self._counts[:, row] * self._faded(self._heard_at[row]) + sum(map(right_and_wrong, of_row))
            self._counts[:, row], self._heard_at[row] = now, self._version
        self._busy.clear()
        self._weigh()

    def _faded(self, heard_at: Any) -> Any:
        return 0.5 ** ((self._version - heard_at) / self._half_life)

    def _weigh(self) -> None:
        counts = self._counts * self._faded(self._heard_at)
        mean, strength = _prior(self._told, counts)
        right, wrong = counts + strength * np.stack([mean, 1 - mean])
        self._mixed = chance_mixed(right, wrong, self._group)
        first, last, over = self._curriculum
        target = first + (last - first) * min(self._version / over, 1)
        easier, harder = right * (1 - target), wrong * target  # odds that are even at the target
        scale = (right + wrong) / (easier + harder)
        wanted = chance_mixed(scale * easier, scale * harder, self._group) ** _SHARPNESS
        share = wanted / max(wanted.sum(), 1e-300)  # all may be known to be solved always
        weights = self._floor / len(self.rows) + (1 - self._floor) * share
        weights[list(self._out)] = 0
        self._reached = np.cumsum(weights)

    def metrics(self) -> dict[str, float]:
        """Of the prompts drawn since the last feedback, and of all."""
        known = float(np.count_nonzero(self._counts.sum(axis=0))) / len(self.rows)
        drawn = {"sampling/expected": float(self._mixed[sorted(self._busy)].mean())} if self._busy else {}
        return {**drawn, "sampling/expected_uniform": float(self._mixed.mean()), "sampling/known": known}

    def state(self) -> Any:
        rows = np.flatnonzero(self._counts.sum(axis=0))
        return {
            **{"draws": self._draws, "version": self._version, "busy": sorted(self._busy), "out": sorted(self._out)},
            **{"rows": rows, "counts": self._counts[:, rows], "heard_at": self._heard_at[rows]},
        }

    def load_state(self, state: Any) -> None:
        if not isinstance(state, Mapping):  # of the order that there is without this
            super().load_state(state)
            return
        self._draws, self._version = state["draws"], state["version"]
        self._busy, self._out = set(state["busy"]), set(state["out"])
        self._counts[:], self._heard_at[:] = 0, 0
        self._counts[:, state["rows"]], self._heard_at[state["rows"]] = state["counts"], state["heard_at"]
        self._weigh()


def right_and_wrong(group: Group) -> Floats:
    """Right and wrong samples. Where the reward knows no right and wrong: half of each, or, if all rewards are the
    same, as many right ones."""
    verdicts = [sample.verdict for sample in group.scored]
    if any(verdict.correct is None for verdict in verdicts):
        spread = len({verdict.value for verdict in verdicts}) > 1
        return np.array([1 - spread / 2, spread / 2]) * len(verdicts)
    right = sum(bool(verdict.correct) for verdict in verdicts)
    return np.array([right, len(verdicts) - right], float)


def told_by(rows: Rows) -> Floats:
    """What rows may tell of their difficulty, [N, 1 + F]: 1, and as ranks of variance 1 the length of the prompt, its
    digits, the answer if it is a number, and columns of numbers, such as a level or another model's pass rate. What is
    unknown is 0."""
    found = defaultdict[str, Floats](lambda: np.full(len(rows), np.nan))
    for number, row in rows.good() if len(rows) <= _MOST_ROWS else ():
        told = {"length": len(row.text), "digits": sum(map(str.isdigit, row.text)), "answer": row.answer}
        for name, value in {**row.meta, **told}.items():
            if isinstance(value, str | int | float) and (name in found or len(found) < _MOST_COLUMNS):
                with suppress(ValueError):
                    found[name][number] = float(str(value).rpartition(" ")[2])  # "Level 5", too
    return np.column_stack([np.ones(len(rows)), *map(_ranks, found.values())])


def _ranks(column: Floats) -> Floats:
    known = np.sort(column[~np.isnan(column)])
    ranks = np.searchsorted(known, column) + np.searchsorted(known, column, side="right") - len(known)
    centred = np.where(np.isnan(column), 0.0, ranks)
    return centred / max(float(centred.std()), 1e-9)


def _prior(told: Floats, counts: Floats) -> tuple[Floats, float]:
    """Mean of each row's pass rate, by ridge regression of its logit, and how many samples that is worth, by the method
    of moments: the variance of the rates, less that of drawing so few samples, is m (1 - m) / (strength + 1)."""
    samples = counts.sum(axis=0)
    known = samples > 1
    features, right, samples = told[known], counts[0, known], samples[known]
    if len(samples) < _TRUSTED:
        return np.full(len(told), 0.5), 2.0
    ridge = np.diag([0.01] + [1.0] * (told.shape[1] - 1))
    weights = np.zeros(told.shape[1])
    for _ in range(8):  # Newton's method
        mean = _rate(features @ weights)
        curvature = (features.T * (samples * mean * (1 - mean))) @ features + ridge
        weights += np.linalg.solve(curvature, features.T @ (right - samples * mean) - ridge @ weights)
    mean = _rate(features @ weights)
    within, total = mean * (1 - mean), samples.sum()
    spread, noise = (samples * (right / samples - mean) ** 2).sum() / total, within.sum() / total
    share = (spread - noise) / ((samples * within).sum() / total - noise)
    return _rate(told @ weights), float(np.clip(1 / max(share, 1e-3) - 1, *_STRENGTH))


def _rate(logit: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(logit, -6, 6)))
