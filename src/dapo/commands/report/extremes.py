"""The best and the worst samples of some steps of a run, whatever its size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dapo.errors import UserError
from dapo.observe.run_view import RunView
from dapo.observe.sample_rows import read_line, rows_of

LOOKED_AT, SHOWN = 20, 4  # steps whose samples are read, and samples of each sort

Line = Mapping[str, Any]
Found = tuple[list[int], list[Line], list[Line]]  # the steps that were looked at, best and worst


def extremes(run: RunView) -> Found:
    """One of each prompt: by reward, then the latest step, and of equals the shortest of the good ones and the longest
    of the bad ones. A step whose samples are spoilt, or were removed meanwhile, is left out."""
    steps, rows = _some_steps(run)
    best, worst = (_with_texts(run, _in_order(rows, sign)) for sign in (-1, 1))
    return steps, best, worst


def _some_steps(run: RunView) -> tuple[list[int], list[Line]]:
    """Evenly spread steps, the first and the last one among them, and their rows that have a reward."""
    there = run.steps_with_samples
    places = [round(place * (len(there) - 1) / max(LOOKED_AT - 1, 1)) for place in range(LOOKED_AT)]
    steps, rows = list[int](), list[Line]()
    for step in sorted({there[place] for place in places}) if there else ():
        with contextlib.suppress(UserError):
            rows += [row for row in rows_of(run.folder.samples, step) if row["reward"] is not None]
            steps.append(step)
    return steps, rows


def _in_order(rows: Sequence[Line], sign: int) -> Iterator[Line]:
    """The first of each prompt."""
    seen = set()
    for row in sorted(rows, key=lambda row: (sign * row["reward"], -row["step"], -sign * (row["length"] or 0))):
        if row["row"] not in seen:
            seen.add(row["row"])
            yield row


def _with_texts(run: RunView, rows: Iterator[Line]) -> list[Line]:
    lines: list[Line] = []
    for row in rows:
        with contextlib.suppress(UserError):  # its text was removed, or is made again just now
            lines.append({"step": row["step"], **read_line(run.folder.samples, row)})
        if len(lines) == SHOWN:
            break
    return lines
