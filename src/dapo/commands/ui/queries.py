"""All SQL of the page, over the view ``samples`` of :class:`~dapo.observe.index.SampleIndex`.

Every statement is a constant; what a reader asks for goes in as a parameter. Each function takes a connection of its
own (``connection.cursor()`` where threads share one) and returns plain rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Row = dict[str, Any]

Order = Literal["newest", "longest", "hardest", "easiest", "spread", "gap"]

LAST_STEP = 2**31 - 1
MOST, PIECES = 4 * 2**20, 512  # bytes that are read of a long file of lines, in so many pieces
DIFFICULTY_BINS = 10  # the first one holds groups that are all wrong, the last one those that are all right


Whole = Annotated[int, Field(ge=0, le=2**63 - 1)]  # as the index stores it


class GroupFilter(BaseModel, frozen=True):
    """Which groups to list. None: no matter. A filter on samples admits a group that has one such sample."""

    first_step: Whole = 0
    last_step: int = Field(LAST_STEP, ge=0, le=LAST_STEP)
    status: str | None = None
    correct: bool | None = None
    longer_than: Whole | None = None
    truncated: bool = False
    disagree: bool = False  # the held-out check says otherwise than the reward
    failed: bool = False
    row: Whole | None = None
    order: Order = "newest"  # ``hardest``: fewest right; ``spread``: of the reward; ``gap``: between engine and trainer
    limit: int = Field(50, ge=1, le=200)
    offset: int = Field(0, ge=0, le=10**9)


_CHOSEN = """
    SELECT step, draw, count(*) OVER () AS total,
           row_number() OVER (ORDER BY {order}, step DESC, min(text_offset)) AS rank
    FROM samples
    WHERE step BETWEEN $first_step AND $last_step {where}
    GROUP BY step, draw
    {having}
    QUALIFY rank > $offset AND rank <= $offset + $limit
"""
_GROUPS = """
    WITH chosen AS MATERIALIZED ({chosen})
    SELECT step, draw, any_value(row) AS row, any_value(status) AS status, count(*) AS size,
           count(correct) AS scored, count(*) FILTER (correct) AS right, avg(reward) AS reward,
           avg(length) AS length, max(length) AS longest, count(*) FILTER (finish_reason = 'length') AS truncated,
           max(gap_max) AS gap, count(*) FILTER (check_correct <> correct) AS disagreements,
           min(text_offset) AS text_offset, arg_min(text_length, text_offset) AS text_length,
           list(correct ORDER BY sample) AS verdicts, any_value(total) AS total
    FROM samples JOIN chosen USING (step, draw)
    GROUP BY step, draw
    ORDER BY any_value(rank)
"""
_WHERE = {"status": "AND status = $status", "row": "AND row = $row"}
_HAVING = {
    "correct": "bool_or(correct = $correct)",
    "longer_than": "max(length) > $longer_than",
    "truncated": "bool_or(finish_reason = 'length')",
    "disagree": "bool_or(check_correct <> correct)",
    "failed": "bool_or(error IS NOT NULL)",
}
_ORDER: Mapping[Order, str] = {
    "newest": "step DESC",
    "longest": "max(length) DESC",
    "hardest": "avg(correct::INT) NULLS LAST",
    "easiest": "avg(correct::INT) DESC NULLS LAST",
    "spread": "stddev_pop(reward) DESC NULLS LAST",
    "gap": "max(gap_max) DESC NULLS LAST",
}
"""Parts of the statement, so that no column is read that nobody asked about; values are parameters here too."""


def groups(connection: DuckDBPyConnection, wanted: GroupFilter) -> list[Row]:
    """Groups with what is known of their samples together; ``total``: how many there are without the limit."""
    given = {name: value for name, value in wanted.model_dump().items() if value is not None and value is not False}
    if wanted.correct is not None:
        given["correct"] = wanted.correct  # false is a value here
    having = " AND ".join(term for name, term in _HAVING.items() if name in given)
    chosen = _CHOSEN.format(
        order=_ORDER[wanted.order],
        where=" ".join(term for name, term in _WHERE.items() if name in given),
        having=f"HAVING {having}" if having else "",
    )
    flags = {"order", "truncated", "disagree", "failed"}  # have no value in the statement
    return _rows(connection, _GROUPS.format(chosen=chosen), {k: v for k, v in given.items() if k not in flags})


_GROUP = """
    SELECT * FROM (SELECT *, row_number() OVER (ORDER BY text_offset) - 1 AS position FROM samples WHERE step = $step)
    WHERE draw = $draw
    ORDER BY position
"""


def group(connection: DuckDBPyConnection, step: int, draw: int) -> list[Row]:
    """The samples of a group. ``position``: of the sample among all of its step."""
    return _rows(connection, _GROUP, {"step": step, "draw": draw})


_OUTCOMES = """
    WITH groups AS (
        SELECT step, any_value(status) AS status, count(*) AS samples, sum(length)::BIGINT AS tokens,
               count(*) FILTER (correct) / nullif(count(correct), 0) AS share
        FROM samples
        GROUP BY step, draw
    )
    SELECT status, CASE WHEN step <= $early THEN 'first' WHEN step > $late THEN 'last' ELSE 'between' END AS period,
           CASE WHEN share = 0 THEN 0 WHEN share = 1 THEN $bins - 1
                ELSE 1 + least(floor(share * ($bins - 2)), $bins - 3) END::INT AS bin,
           count(*) AS groups, sum(samples)::BIGINT AS samples, sum(tokens)::BIGINT AS tokens
    FROM groups
    GROUP BY ALL
"""


def outcomes(connection: DuckDBPyConnection, early: int, late: int) -> Row:
    """What became of the groups, and how many have which share of right samples.
    Returns ``difficulty``: counts in :data:`DIFFICULTY_BINS` bins; of the steps up to ``early`` under ``first``, of
    those after ``late`` under ``last``, of all under ``all``. ``statuses``: rows of status, groups, samples and tokens.
    """
    found = _rows(connection, _OUTCOMES, {"early": early, "late": late, "bins": DIFFICULTY_BINS})
    difficulty = {name: [0] * DIFFICULTY_BINS for name in ("first", "last", "all")}
    statuses: dict[str, Row] = {}
    for row in found:
        if row["bin"] is not None:
            for name in {row["period"], "all"} & set(difficulty):
                difficulty[name][row["bin"]] += row["groups"]
        sums = statuses.setdefault(row["status"], {"status": row["status"], "groups": 0, "samples": 0, "tokens": 0})
        for name in ("groups", "samples", "tokens"):
            sums[name] += row[name]
    return {"difficulty": difficulty, "statuses": sorted(statuses.values(), key=lambda row: -row["groups"])}


_BOUNDS = """
    SELECT min(step) AS first, max(step) AS last, count(*) AS samples, count(check_correct) AS checked,
           count(*) FILTER (check_correct <> correct) AS disagree
    FROM samples
"""


def bounds(connection: DuckDBPyConnection) -> Row:
    """First and last step with samples (null: there is none), and counts of samples: all, checked, disputed."""
    return _rows(connection, _BOUNDS, {})[0]


_RANGE = """
    SELECT min(length) AS shortest, max(length) AS longest, min(reward) AS lowest, max(reward) AS highest
    FROM samples WHERE reward IS NOT NULL
"""
_LENGTHS = """
    SELECT least(floor((length - $shortest) / $width), $columns - 1)::INT AS x,
           least(floor((reward - $lowest) / $height), $rows - 1)::INT AS y, count(*) AS samples
    FROM samples WHERE reward IS NOT NULL
    GROUP BY ALL
"""


def reward_by_length(connection: DuckDBPyConnection, columns: int = 40, rows: int = 16) -> Row:
    """Reward against length as counts on a grid; ``cells`` of [column, row, samples], column 0 the shortest."""
    extent = _rows(connection, _RANGE, {})[0]
    if extent["shortest"] is None:
        return {**extent, "columns": columns, "rows": rows, "cells": []}
    width = max(extent["longest"] - extent["shortest"] + 1, 1) / columns
    height = ((extent["highest"] - extent["lowest"]) or 1.0) / rows
    grid = {"shortest": extent["shortest"], "lowest": extent["lowest"], "width": width, "height": height}
    found = _rows(connection, _LENGTHS, grid | {"columns": columns, "rows": rows})
    return {**extent, "columns": columns, "rows": rows, "cells": [[r["x"], r["y"], r["samples"]] for r in found]}


_DISAGREEMENTS = """
    SELECT step, draw, sample, row, correct, check_correct, reward, length, extracted, gold, text_offset, text_length
    FROM samples
    WHERE check_correct <> correct
    ORDER BY correct DESC, reward DESC, step DESC, draw, sample
    LIMIT $limit
"""


def disagreements(connection: DuckDBPyConnection, limit: int = 20) -> list[Row]:
    """Samples that reward and held-out check judge differently: those first that the reward calls right."""
    return _rows(connection, _DISAGREEMENTS, {"limit": limit})


_RESOURCES = """
    WITH lines AS (
        SELECT time, host, role, cpu, rss, disk_read, disk_write, net_sent, net_received, memory_used, idle, version,
               list_avg([g.util FOR g IN gpu]) AS gpu_util, list_sum([g.memory FOR g IN gpu]) AS gpu_memory,
               list_sum([g.power FOR g IN gpu]) AS gpu_power
        FROM read_json($path, format = 'newline_delimited', ignore_errors = true, hive_partitioning = false,
                       columns = {
            time: 'DOUBLE', host: 'VARCHAR', role: 'VARCHAR', cpu: 'DOUBLE', rss: 'DOUBLE',
            gpu: 'STRUCT(util DOUBLE, memory DOUBLE, power DOUBLE)[]',
            disk_read: 'DOUBLE', disk_write: 'DOUBLE', net_sent: 'DOUBLE', net_received: 'DOUBLE',
            memory_used: 'DOUBLE', idle: 'DOUBLE', version: 'DOUBLE'})
        WHERE time IS NOT NULL
    ), extent AS (SELECT min(time) AS first, greatest(max(time) - min(time), 1e-9) AS span FROM lines)
    SELECT host, role, avg(time - first) AS seconds, avg(cpu) AS cpu, max(rss) AS rss, avg(gpu_util) AS gpu_util,
           max(gpu_memory) AS gpu_memory, avg(gpu_power) AS gpu_power, avg(disk_read) AS disk_read,
           avg(disk_write) AS disk_write, avg(net_sent) AS net_sent, avg(net_received) AS net_received,
           max(memory_used) AS memory_used, avg(idle) AS idle, min(version) AS version
    FROM lines, extent
    GROUP BY host, role, least(floor((time - first) / span * $points), $points - 1)
    ORDER BY host, role, seconds
"""


def resources(connection: DuckDBPyConnection, path: Path, points: int = 200) -> list[Row]:
    """What each role of each host used, in at most ``points`` intervals since the first line of the file."""
    return _rows(connection, _RESOURCES, {"path": str(path), "points": points})


@contextmanager
def thinned(path: Path, most: int = MOST, pieces: int = PIECES) -> Iterator[Path]:
    """The file itself, or, if it is longer than ``most`` bytes, one with whole lines of ``pieces`` pieces of it, the
    first and the last line among them, for as long as the block lasts."""
    size, piece = path.stat().st_size, most // pieces
    if size <= most:
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="dapo-", suffix=path.suffix) as found, path.open("rb") as file:
        for place in range(pieces):
            start = (size - piece) * place // (pieces - 1)
            file.seek(start)
            text = file.read(piece)
            found.write(text[text.find(b"\n") + 1 if start else 0 : text.rfind(b"\n") + 1])
        found.flush()
        yield Path(found.name)


def _rows(connection: DuckDBPyConnection, statement: str, parameters: Mapping[str, Any]) -> list[Row]:
    found = connection.execute(statement, dict(parameters))
    names = [column[0] for column in found.description or []]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
