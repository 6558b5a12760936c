"""What came of the cells of a comparison, counted. Reads the folder only, so one that is under way has a table, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from dapo.comparison.curves import Point, curve, spent
from dapo.comparison.folder import Cell, Declared
from dapo.comparison.recipes import BUDGETS
from dapo.comparison.statistics import Noise, at, half, noise, paired
from dapo.config import build_config
from dapo.config.stages import build_stage
from dapo.errors import UserError
from dapo.evaluation.statistics import Estimate
from dapo.observe.alarms import Alarms
from dapo.observe.costs import costs, gpus_of, total
from dapo.observe.run_view import RunView, is_run

Numbers = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell as it lies there. ``rows``: of the last evaluation; empty: it is not done. ``failed``: why."""

    cell: Cell
    metric: str
    rows: Mapping[str, float]
    failed: str | None
    curve: Sequence[Point]
    numbers: Numbers

    @property
    def value(self) -> float:
        return fmean(self.rows.values())


def measure(cell: Cell, told: Mapping[str, Any]) -> Measured:
    """``told``: what comparison.json says of its recipe."""
    result = cell.result
    views = [RunView.read(cell.folder / name) for name in told["phases"] if is_run(cell.folder / name)]
    whole, metric = len(views) == len(told["phases"]), str(result.get("metric", "accuracy"))
    points = curve(views, metric) if told["curve"] and whole else []
    rows = result.get("rows") or {}
    return Measured(cell, metric, rows, result.get("failed"), points, _numbers(views, result.get("seconds")))


def _numbers(views: Sequence[RunView], seconds: float | None) -> Numbers:
    """Sums over the phases of a cell, and of memory the most."""
    used = [spent(view) for view in views]
    entries = [entry for view in views for entry in view.metrics if entry["step"]]
    gpu = [costs(view).gpu_seconds for view in views]

    def most(name: str) -> float | None:
        return max((entry[name] for entry in entries if entry.get(name) is not None), default=None)

    return {
        **{name: sum(one[name] for one in used) for name in BUDGETS},
        "tokens sampled": total(entries, "tokens/generated"),
        "tokens trained": total(entries, "tokens/trained"),
        "operations": _operations(views),
        "seconds": seconds,
        "memory": most("memory/rss"),
        "GPU memory": most("resources/gpu_memory") if any(gpus_of(view) for view in views) else None,
        "GPU hours": None if None in gpu else sum(one or 0.0 for one in gpu) / 3600,
        "steps": len(entries),
        "updates skipped": total(entries, "updates/skipped"),
        "steps with alarms": sum((entry.get("alarms/count") or 0) > 0 for entry in entries),
        "gradient spikes": sum(map(_spikes, views)),
    }


def _operations(views: Sequence[RunView]) -> float | None:
    """6 for each parameter and token of an update, 2 for each token sampled: passes of critics, references and reward
    models are not in it. None: a run did not record its parameters."""
    found = 0.0
    for view in views:
        parameters = (view.fingerprint.get("model") or {}).get("parameters")
        if parameters is None:
            return None
        updates = sum(e.get("tokens/computed") or e.get("tokens/trained") or 0 for e in view.metrics)
        found += parameters * (6 * updates + 2 * total(view.metrics, "tokens/generated"))
    return found


def _spikes(view: RunView) -> int:
    """Steps in which the alarm of this name was on."""
    tree = dict(view.config)
    try:
        config: Any = build_stage(tree["stage"], tree) if "stage" in tree else build_config(tree)
    except UserError:  # of another version
        return 0
    alarms, count = Alarms(config, view.changes), 0
    for entry in view.metrics:
        if entry["step"]:
            alarms.observe(entry["step"], entry)
            alarms.settle()
            count += "gradient spike" in alarms.found
    return count


@dataclass(frozen=True)
class Table:
    """All cells by recipe, the first of which the others are compared with."""

    declared: Declared
    cells: Mapping[str, Sequence[Measured]] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> Table:
        """Raises UserError: there is no comparison in ``root``, or a run in it is damaged."""
        declared = Declared.read(root)
        found = [measure(cell, declared.variants[cell.variant]) for cell in declared.cells]
        return cls(declared, {n: [one for one in found if one.cell.variant == n] for n in declared.variants})

    @property
    def names(self) -> list[str]:
        return list(self.cells)

    @cached_property
    def metric(self) -> str:
        return next((one.metric for several in self.cells.values() for one in several if one.rows), "accuracy")

    def done(self, name: str) -> list[Measured]:
        return [one for one in self.cells[name] if one.rows]

    @cached_property
    def ends(self) -> dict[str, float]:
        """By budget the place up to which the curves of all cells that are done and have one go."""
        curves = [one.curve for name in self.names for one in self.done(name) if one.curve]
        return {axis: min(points[-1].used[axis] for points in curves) for axis in BUDGETS} if curves else {}

    def values(self, axis: str | None = None) -> dict[str, list[float]]:
        """By recipe the quality of each seed: after training, or where all curves have come to on ``axis``."""
        if axis is None:
            return {name: [one.value for one in self.done(name)] for name in self.names}
        found: dict[str, list[float]] = {}
        for name in self.names:
            places = [
                at([p.used[axis] for p in one.curve], [p.value for p in one.curve], self.ends[axis])
                for one in self.done(name)
            ]
            found[name] = [place for place in places if place is not None]
        return found

    def rows_gain(self, name: str) -> Estimate | None:
        """Of a recipe less the first one, over the same rows."""
        first = self.done(self.names[0])
        return paired([one.rows for one in first], [one.rows for one in self.done(name)])

    def mean(self, name: str, number: str) -> float | None:
        known = [value for one in self.done(name) if (value := one.numbers[number]) is not None]
        return fmean(known) if known else None

    def sum(self, name: str, number: str) -> float:
        return sum(one.numbers[number] or 0.0 for one in self.cells[name])

    def lines(self) -> list[list[str]]:
        """Label, and a text for each recipe."""
        lines = [[f"{self.metric} after training", *self._means(self.values())], ["less the first, by seeds"]]
        spread, values = noise(self.values().values()), self.values()
        lines[1] += [self._less(values[self.names[0]], values[name], spread) for name in self.names]
        lines.append(["less the first, by rows", *(self._by_rows(name) for name in self.names)])
        for axis, end in self.ends.items():
            where = f"{end:.2f}" if axis == "minutes" else f"{end:,.0f}"
            lines.append([f"{self.metric} at {where} {axis}", *self._means(self.values(axis))])
        for label, form in _COSTS.items():
            lines.append([label, *(_shown(self.mean(name, label), form) for name in self.names)])
        for label in ("updates skipped", "steps with alarms", "gradient spikes"):
            lines.append(
                [label, *(f"{self.sum(n, label):,.0f} of {self.sum(n, 'steps'):,.0f} steps" for n in self.names)]
            )
        lines.append(["seeds done", *(f"{len(self.done(n))} of {len(self.cells[n])}" for n in self.names)])
        lines.append(["failed", *(", ".join(f"seed {s}" for s in self._failed(n)) or "none" for n in self.names)])
        lines.append(["needs", *(", ".join(self.declared.variants[n]["needs"]) or "nothing" for n in self.names)])
        return lines

    def failures(self) -> list[str]:
        """What went wrong, a line for each cell."""
        every = [one for several in self.cells.values() for one in several]
        return [f"{one.cell.name} failed: {one.failed}" for one in every if one.failed]

    def as_json(self) -> dict[str, Any]:
        """The texts and what they are made of, cell by cell."""
        cells = [
            {"recipe": name, "seed": one.cell.seed, "failed": one.failed, self.metric: one.value if one.rows else None}
            | one.numbers
            for name in self.names
            for one in self.cells[name]
        ]
        return {"metric": self.metric, "recipes": self.names, "lines": self.lines(), "cells": cells, "ends": self.ends}

    def _failed(self, name: str) -> list[int]:
        return [one.cell.seed for one in self.cells[name] if one.failed]

    def _means(self, values: Mapping[str, Sequence[float]]) -> list[str]:
        spread = noise(values.values())
        return [_interval(of, spread, self._form) for of in values.values()]

    @property
    def _form(self) -> Callable[[float], str]:
        return (lambda v: f"{100 * v:.1f}%") if self.metric == "accuracy" else (lambda v: f"{v:.3f}")

    def _less(self, first: Sequence[float], other: Sequence[float], spread: Noise | None) -> str:
        if first is other or not first or not other:
            return ""
        scale, digits = (100, 1) if self.metric == "accuracy" else (1, 3)
        text = f"{scale * (fmean(other) - fmean(first)):+.{digits}f}"
        return text + (f" ± {scale * half(spread, len(first), len(other)):.{digits}f}" if spread else "")

    def _by_rows(self, name: str) -> str:
        gain = None if name == self.names[0] else self.rows_gain(name)
        if gain is None:
            return ""
        scale, digits = (100, 1) if self.metric == "accuracy" else (1, 3)
        value, *ends = (None if v is None else f"{scale * v:+.{digits}f}" for v in (gain.value, gain.low, gain.high))
        return f"{value} ({ends[0]} to {ends[1]})" if None not in ends else f"{value}"


_COSTS: Mapping[str, Callable[[float], str]] = {
    "minutes": lambda v: f"{v:.2f}",
    "samples": lambda v: f"{v:,.0f}",
    "tokens sampled": lambda v: f"{v:,.0f}",
    "tokens trained": lambda v: f"{v:,.0f}",
    "operations": lambda v: f"{v:.2e} FLOP",
    "seconds": lambda v: f"{v:,.0f}",
    "memory": lambda v: f"{v / 2**30:.2f} GiB",
    "GPU memory": lambda v: f"{v / 2**30:.1f} GiB",
    "GPU hours": lambda v: f"{v:.3g}",
}
"""Means over the seeds that are done: what a line is of, and how it is written."""


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def _interval(values: Sequence[float], spread: Noise | None, form: Callable[[float], str]) -> str:
    if not values:
        return "-"
    return form(fmean(values)) + (f" ± {form(half(spread, len(values)))}" if spread else "")
