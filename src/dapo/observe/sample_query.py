"""Which samples of a run are asked for: rows by filter and order, and their texts only once they are to be shown.

One step is read from its own file; several come from the index of samples, which is brought up to date before, or
without DuckDB from the files one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dapo.errors import UserError
from dapo.observe.index import SampleIndex, has_duckdb
from dapo.observe.run_view import RunView
from dapo.observe.sample_rows import Row, read_line, rows_of
from dapo.observe.samples import SampleFilter

if TYPE_CHECKING:
    import duckdb

Steps = tuple[int, int] | None  # first and last step to look at, both included; None: the last one that has samples


@dataclass(frozen=True, slots=True)
class Found:
    """``samples``: those to show, texts included. ``matching`` of the ``total`` in these steps were asked for."""

    samples: list[dict[str, Any]]
    matching: int
    total: int


def find(run: RunView, steps: Steps, wanted: SampleFilter, order: str | None, limit: int) -> Found:
    """Samples of a run, at most ``limit`` of them (0: all). ``order``: a column, largest values first and those without
    one last; None: as they were written.
    Raises UserError: there are no samples of these steps, or the file of one is damaged."""
    there = run.steps_with_samples
    first, last = steps or ((there[-1], there[-1]) if there else (0, 0))
    index = None if first == last and first in there else _index(run)
    if index is None:
        rows, total = list[Row](), 0
        for step in steps_asked_for(run, steps):
            found = rows_of(run.folder.samples, step)
            total += len(found)
            rows += filter(replace(wanted, contains="").admits, found)
        if order is not None:
            rows.sort(key=lambda row: (row[order] is None, -(row[order] or 0)))
        matching = len(rows)
    else:
        steps_asked_for(run, steps, index.steps)
        damaged = next((text for step, text in index.damaged.items() if first <= step <= last), None)
        if damaged:
            raise UserError(damaged)
        rows, matching, total = _from_index(index.connection(), (first, last), wanted, order, limit)
    if not wanted.contains:
        return Found([_with_text(run, row) for row in rows[: limit or None]], matching, total)
    told = [sample for row in rows if wanted.admits(sample := _with_text(run, row))]
    return Found(told[: limit or None], len(told), total)


def steps_asked_for(run: RunView, steps: Steps, there: Sequence[int] | None = None) -> list[int]:
    """The steps that are meant. Raises UserError: there are no samples of them."""
    there = run.steps_with_samples if there is None else there
    if not there:
        why = "none yet" if run.saves_samples else "its recipe says run.save_samples=false"
        raise UserError(f"{run.folder.root}: no samples were saved: {why}")
    first, last = steps or (there[-1], there[-1])
    wanted = [step for step in there if first <= step <= last]
    if not wanted:
        asked = f"step {first}" if first == last else f"steps {first} to {last}"
        raise UserError(f"{run.folder.root}: no samples of {asked}; there are those of {_ranges(there)}")
    return wanted


def _ranges(steps: Sequence[int]) -> str:
    """Numbers in order, runs of them as a range: ``steps 1 to 4, 7``."""
    pieces: list[list[int]] = []
    for step in steps:
        if pieces and step == pieces[-1][-1] + 1:
            pieces[-1].append(step)
        else:
            pieces.append([step])
    words = [str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in pieces]
    shown = words if len(words) <= 12 else [*words[:11], "...", words[-1]]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown)}"


def _with_text(run: RunView, row: Row) -> dict[str, Any]:
    """The sample as its file has it, and what the row knows beside; the row alone where the file is gone."""
    beside = {name: row[name] for name in ("prompt_length", *MEASURES) if row[name] is not None}
    if row["text_offset"] is None:
        return {name: value for name, value in row.items() if value is not None and not name.startswith("text_")}
    return {"step": row["step"], **read_line(run.folder.samples, row), **beside}


MEASURES = ("logprob_engine", "logprob_trainer", "entropy", "gap_max")


def _index(run: RunView) -> SampleIndex | None:
    if not has_duckdb():
        return None
    index = SampleIndex(run.folder.root)
    index.refresh()
    return index


def _from_index(
    samples: duckdb.DuckDBPyConnection, span: tuple[int, int], wanted: SampleFilter, order: str | None, limit: int
) -> tuple[list[Row], int, int]:
    """The rows that are asked for but for their texts, how many there are without the limit, and how many in all."""
    where, values = "step BETWEEN ? AND ?", [*span, *wanted.statuses]
    if wanted.statuses:
        where += f" AND status IN ({', '.join('?' * len(wanted.statuses))})"
    if wanted.truncated:
        where += " AND finish_reason = 'length'"
    for column, sign, value in wanted.tests():
        where += f" AND {column} {sign} ?"
        values.append(value)
    first = f"{order} DESC NULLS LAST, " if order else ""
    most = f" LIMIT {limit}" if limit and not wanted.contains else ""
    asked = samples.execute(f"SELECT * FROM samples WHERE {where} ORDER BY {first}step, text_offset{most}", values)
    names = [column[0] for column in asked.description or ()]
    rows = [dict(zip(names, row, strict=True)) for row in asked.fetchall()]
    counts = samples.execute(
        f"SELECT count(*) FILTER (WHERE {where}), count(*) FROM samples WHERE step BETWEEN ? AND ?", [*values, *span]
    ).fetchone()
    assert counts is not None
    return rows, *counts
