"""The best and the worst samples of a run, whatever its size: some of its steps are looked at, not all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dapo.errors import UserError
from dapo.observe.run_view import RunView
from dapo.observe.samples import read_samples, samples_path

LOOKED_AT, SHOWN = 20, 4
"""Steps whose samples are read, and samples of each sort."""

Line = Mapping[str, Any]


def extremes(run: RunView) -> tuple[list[int], list[Line], list[Line]]:
    """The steps that were looked at, evenly spread with the last one among them, and their best and worst samples.

    A step whose samples are spoilt, or were removed meanwhile, is left out.
    """
    there = run.steps_with_samples
    wanted = (
        {there[round(place * (len(there) - 1) / max(LOOKED_AT - 1, 1))] for place in range(LOOKED_AT)} if there else ()
    )
    looked_at: list[int] = []
    best: dict[Any, Line] = {}
    worst: dict[Any, Line] = {}
    for step in sorted(wanted, reverse=True):
        try:
            samples = read_samples(samples_path(run.folder.samples, step))
        except (OSError, UserError):
            continue
        looked_at.insert(0, step)
        for sample in samples:
            if sample.get("reward") is not None:
                line = {"step": step, **sample}
                _keep(best, line, sign=1)
                _keep(worst, line, sign=-1)
    return looked_at, _first(best.values(), sign=1), _first(worst.values(), sign=-1)


def _keep(found: dict[Any, Line], line: Line, sign: int) -> None:
    """The most extreme one of each prompt."""
    row = line.get("row")
    if row not in found or _order(line, sign) < _order(found[row], sign):
        found[row] = line


def _first(lines: Iterable[Line], sign: int) -> list[Line]:
    return sorted(lines, key=lambda line: _order(line, sign))[:SHOWN]


def _order(line: Line, sign: int) -> tuple[float, int, int]:
    """By reward, then the latest step; of equals the shortest of the good and the longest of the bad."""
    return -sign * float(line["reward"]), -int(line["step"]), sign * int(line.get("length") or 0)
