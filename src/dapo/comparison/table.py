"""What came of the cells of a comparison, counted. Reads the folder only, so one that is under way has a table, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dapo.comparison.folder import Cell, Comparison
from dapo.comparison.recipes import BUDGETS
from dapo.errors import UserError
from dapo.evaluation.statistics import Estimate, estimate_means, half, noise
from dapo.observe.costs import costs, gpus_of, total
from dapo.observe.run_view import RunView, is_run

Numbers = dict[str, float | None]

_COSTS: Mapping[str, tuple[str, float]] = {
    "minutes": ("{:.2f}", 1),
    "samples": ("{:,.0f}", 1),
    "tokens sampled": ("{:,.0f}", 1),
    "tokens trained": ("{:,.0f}", 1),
    "operations": ("{:.3g} TFLOP", 1e12),
    "seconds": ("{:,.0f}", 1),
    "memory": ("{:.2f} GiB", 2**30),
    "GPU memory": ("{:.1f} GiB", 2**30),
    "GPU hours": ("{:.3g}", 1),
}
"""Numbers of a cell whose means are shown: how they are written, and in which unit."""
_STABLE = ("updates skipped", "steps with alarms", "gradient spikes")


def spent(views: Sequence[RunView], until: int | None = None) -> dict[str, float]:
    """By budget, of all runs of a cell, of the last one up to and with the step ``until``: minutes of steps, samples
    drawn and tokens of responses; in stages rows, and tokens trained on."""
    used = dict.fromkeys(BUDGETS, 0.0)
    for view in views:
        steps = [
            e for e in view.metrics if e["step"] and (until is None or view is not views[-1] or e["step"] <= until)
        ]
        used["minutes"] += total(steps, "time/step") / 60
        if "rollout" in view.config:
            used["samples"] += view.config["rollout"]["samples_per_prompt"] * total(steps, "groups/drawn")
            used["tokens"] += total(steps, "tokens/generated")
        else:
            used["samples"] += view.config["training"]["rows_per_update"] * len(steps)
            used["tokens"] += total(steps, "tokens/trained")
    return used


def paired(first: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> Estimate | None:
    """Of ``other`` less ``first``, over the rows that all of them have: each row's mean over the seeds of one, less
    that of the other, and the bootstrap over rows. It says how far other rows would move it, and nothing of seeds.
    ``first``, ``other``: of each seed the values by row. None: they have no row in common."""
    rows = sorted(set.intersection(*(set(seed) for seed in (*first, *other)))) if first and other else []
    gains = [fmean(seed[row] for seed in other) - fmean(seed[row] for seed in first) for row in rows]
    return estimate_means(np.array(gains)[:, None], [False])[0] if rows else None


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell as it lies there. ``rows``: of the last evaluation; empty: it is not done. ``failed``: why. ``curve``: of
    each evaluation what was spent, and the value."""

    cell: Cell
    metric: str
    rows: Mapping[str, float]
    failed: str | None
    curve: Sequence[tuple[Mapping[str, float], float]]
    numbers: Numbers

    @classmethod
    def of(cls, cell: Cell, told: Mapping[str, Any]) -> Measured:
        """``told``: what comparison.json says of its recipe."""
        result, phases = cell.result, told["phases"]
        views = [RunView.read(cell.folder / name) for name in phases if is_run(cell.folder / name)]
        metric = str(result.get("metric", "accuracy"))
        evaluations = views[-1].evaluations if told["curve"] and len(views) == len(phases) else []
        found = [(entry["step"], entry.get(f"eval/{metric}")) for entry in evaluations]
        curve = [(spent(views, step), float(value)) for step, value in found if value is not None]
        return cls(cell, metric, result.get("rows") or {}, result.get("failed"), curve, _numbers(views))

    @property
    def value(self) -> float:
        return fmean(self.rows.values())

    def along(self, axis: str) -> tuple[list[float], list[float]]:
        return [used[axis] for used, _ in self.curve], [value for _, value in self.curve]


def _numbers(views: Sequence[RunView]) -> Numbers:
    """Sums over the phases of a cell, and of memory the most."""
    entries = [entry for view in views for entry in view.metrics if entry["step"]]
    gpu = [costs(view).gpu_seconds for view in views]
    parameters: list[Any] = [(view.fingerprint.get("model") or {}).get("parameters") for view in views]

    def most(name: str) -> float | None:
        return max((entry[name] for entry in entries if entry.get(name) is not None), default=None)

    return {
        **spent(views),
        "tokens sampled": total(entries, "tokens/generated"),
        "tokens trained": total(entries, "tokens/trained"),
        "operations": None if None in parameters else sum(map(_operations, views, parameters)),
        "seconds": sum(view.seconds or 0.0 for view in views),
        "memory": most("memory/rss"),
        "GPU memory": most("resources/gpu_memory") if any(gpus_of(view) for view in views) else None,
        "GPU hours": None if None in gpu else sum(one or 0.0 for one in gpu) / 3600,
        "steps": len(entries),
        "updates skipped": total(entries, "updates/skipped"),
        "steps with alarms": sum((entry.get("alarms/count") or 0) > 0 for entry in entries),
        "gradient spikes": sum(map(_spikes, views)),
    }


def _operations(view: RunView, parameters: int) -> float:
    """6 for each parameter and token of an update, 2 for each token sampled: passes of critics, references and reward
    models are not in it."""
    updates = sum(e.get("tokens/computed") or e.get("tokens/trained") or 0 for e in view.metrics)
    return parameters * (6 * updates + 2 * total(view.metrics, "tokens/generated"))


def _spikes(view: RunView) -> int:
    """Steps in which the alarm of this name was on."""
    try:
        return sum("gradient spike" in found for _, found, _ in view.alarms())
    except UserError:  # of another version
        return 0


@dataclass(frozen=True)
class Table:
    """All cells by recipe, the first of which the others are compared with."""

    comparison: Comparison
    every: Mapping[str, Sequence[Measured]]

    @classmethod
    def read(cls, root: Path) -> Table:
        """Raises UserError: there is no comparison in ``root``, or a run in it is damaged."""
        found = Comparison.read(root)
        cells = {n: [Measured.of(Cell(root, n, s), told) for s in found.seeds] for n, told in found.recipes.items()}
        return cls(found, cells)

    def __repr__(self) -> str:
        return "\n".join("  ".join(line) for line in [["", *self.names], *self.lines()])

    @property
    def names(self) -> list[str]:
        return list(self.every)

    @property
    def _cells(self) -> list[Measured]:
        return [one for several in self.every.values() for one in several]

    @cached_property
    def done(self) -> dict[str, list[Measured]]:
        return {name: [one for one in cells if one.rows] for name, cells in self.every.items()}

    @cached_property
    def metric(self) -> str:
        return next((one.metric for one in self._cells if one.rows), "accuracy")

    @cached_property
    def ends(self) -> dict[str, float]:
        """By budget the place up to which the curves of all cells that are done and have one go."""
        last = [one.curve[-1][0] for one in self._cells if one.rows and one.curve]
        return {axis: min(used[axis] for used in last) for axis in BUDGETS} if last else {}

    def values(self, axis: str | None = None) -> dict[str, list[float]]:
        """By recipe the quality of each seed: after training, or where all curves have come to on ``axis``, on straight
        lines between evaluations."""
        if axis is None:
            return {name: [one.value for one in cells] for name, cells in self.done.items()}
        end = self.ends[axis]
        curves = {name: [one.along(axis) for one in cells if one.curve] for name, cells in self.done.items()}
        return {n: [float(np.interp(end, *one)) for one in of if one[0][0] <= end] for n, of in curves.items()}

    def mean_curve(self, name: str, axis: str, points: int = 60) -> list[list[float]]:
        """``[x, mean, lowest, highest]`` over the seeds of a recipe that have a curve, as far as all of these go."""
        curves = [one.along(axis) for one in self.every[name] if len(one.curve) > 1]
        if not curves:
            return []
        shared = np.linspace(max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves), points)
        values = np.array([np.interp(shared, *one) for one in curves])
        return [list(row) for row in np.stack([shared, values.mean(0), values.min(0), values.max(0)], axis=1).tolist()]

    def lines(self) -> list[list[str]]:
        """Label, and a text for each recipe."""
        names, what = self.names, f"held-out {self.metric}"
        lines = [
            [f"{what}, after training", *self._means(self.values())],
            ["minus the first, by seeds", *map(self._by_seeds, names)],
            ["minus the first, by rows", *map(self._by_rows, names)],
        ]
        for axis, end in self.ends.items():
            lines.append([f"{what} at {end:,.{2 * (axis == 'minutes')}f} {axis}", *self._means(self.values(axis))])
        for label, (form, unit) in _COSTS.items():
            known = [[v for one in cells if (v := one.numbers[label]) is not None] for cells in self.done.values()]
            lines.append([label, *(form.format(fmean(of) / unit) if of else "-" for of in known)])
        for label in _STABLE:
            sums = [[sum(c.numbers[key] or 0 for c in self.every[n]) for key in (label, "steps")] for n in names]
            lines.append([label, *(f"{count:,.0f} of {steps:,.0f} steps" for count, steps in sums)])
        lines.append(["seeds done", *(f"{len(self.done[n])} of {len(self.every[n])}" for n in names)])
        failed = [", ".join(f"seed {one.cell.seed}" for one in cells if one.failed) for cells in self.every.values()]
        needs = [", ".join(told["needs"]) for told in self.comparison.recipes.values()]
        return [*lines, ["failed", *(one or "none" for one in failed)], ["needs", *(one or "nothing" for one in needs)]]

    def failures(self) -> list[str]:
        failed = [one for one in self._cells if one.failed]
        return [f"{one.cell.name} failed: {one.failed} (see {one.cell.file('log')})" for one in failed]

    def cells(self) -> list[dict[str, Any]]:
        """What the lines are made of."""
        return [
            {"recipe": one.cell.recipe, "seed": one.cell.seed, "failed": one.failed}
            | {self.metric: one.value if one.rows else None, **one.numbers}
            for one in self._cells
        ]

    @property
    def _unit(self) -> tuple[int, int]:
        """What a value is told in, and its digits: shares in per cent, or points."""
        return (100, 1) if self.metric == "accuracy" else (1, 3)

    def _text(self, value: float, sign: str = "") -> str:
        unit, digits = self._unit
        return f"{unit * value:{sign}.{digits}f}"

    def _means(self, values: Mapping[str, Sequence[float]]) -> list[str]:
        spread, unit = noise(values.values()), "%" if self.metric == "accuracy" else ""
        around = [f" ± {self._text(half(spread, len(of)))}" if spread and of else "" for of in values.values()]
        return [self._text(fmean(v)) + unit + a if v else "-" for v, a in zip(values.values(), around, strict=True)]

    def _by_seeds(self, name: str) -> str:
        values = self.values()
        first, other, spread = values[self.names[0]], values[name], noise(values.values())
        if name == self.names[0] or not first or not other:
            return ""
        around = f" ± {self._text(half(spread, len(first), len(other)))}" if spread else ""
        return self._text(fmean(other) - fmean(first), "+") + around

    def _by_rows(self, name: str) -> str:
        unit, digits = self._unit
        first, other = (
            [{row: unit * v for row, v in one.rows.items()} for one in self.done[n]] for n in (self.names[0], name)
        )
        gain = None if name == self.names[0] else paired(first, other)
        return "" if gain is None else gain.text(f"+.{digits}f")
