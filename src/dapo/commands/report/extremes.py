"""The best and the worst samples of a run, whatever its size: by its sample index, or else of some of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dapo.errors import UserError
from dapo.observe.index import SampleIndex, has_duckdb
from dapo.observe.run_view import RunView
from dapo.observe.sample_rows import read_line
from dapo.observe.samples import read_samples, samples_path

LOOKED_AT, SHOWN = 20, 4
"""Steps whose samples are read where there is no index, and samples of each sort."""

CANDIDATES = 200
"""Samples that are tried for their texts: somebody may have removed those of some steps."""

Line = Mapping[str, Any]
Found = tuple[list[int], list[Line], list[Line]]
"""The steps that were looked at, best and worst."""


def extremes(run: RunView) -> Found:
    """One of each prompt: by reward, then the latest step, and of equals the shortest of the good ones and the longest
    of the bad ones. A step whose samples are spoilt, or were removed meanwhile, is left out.
    """
    if has_duckdb() and (run.folder.samples / "index/manifest.json").is_file():
        return _by_index(run)
    return _of_some_steps(run)


def _by_index(run: RunView) -> Found:
    index = SampleIndex(run.folder.root)
    index.refresh()
    best, worst = (
        _first_rows(run, index, order) for order in ("reward DESC, step DESC, length", "reward, step DESC, length DESC")
    )
    return index.steps, best, worst


def _first_rows(run: RunView, index: SampleIndex, order: str) -> list[Line]:
    connection = index.connection()
    connection.execute(
        f"""SELECT step, text_offset, text_length FROM samples WHERE reward IS NOT NULL
            QUALIFY row_number() OVER (PARTITION BY "row" ORDER BY {order}) = 1 ORDER BY {order} LIMIT {CANDIDATES}"""
    )
    rows = [{"step": step, "text_offset": start, "text_length": size} for step, start, size in connection.fetchall()]
    lines: list[Line] = []
    for row in rows:
        if len(lines) == SHOWN:
            break
        try:
            lines.append({"step": row["step"], **read_line(run.folder.samples, row)})
        except UserError:  # its text was removed, or is made again just now
            continue
    return lines


def _of_some_steps(run: RunView) -> Found:
    """Of steps that are evenly spread, the first and the last one among them."""
    there = run.steps_with_samples
    places = [round(place * (len(there) - 1) / max(LOOKED_AT - 1, 1)) for place in range(LOOKED_AT)]
    looked_at: list[int] = []
    best: dict[Any, Line] = {}
    worst: dict[Any, Line] = {}
    for step in sorted({there[place] for place in places}) if there else ():
        try:
            samples = read_samples(samples_path(run.folder.samples, step))
        except (OSError, UserError):
            continue
        looked_at.append(step)
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
    return -sign * float(line["reward"]), -int(line["step"]), sign * int(line.get("length") or 0)
