"""All SQL of the page, over the view ``samples`` of :class:`~dapo.observe.index.SampleIndex`.

Every statement is a constant; what a reader asks for goes in as a parameter. Each function takes a connection of its
own (``connection.cursor()`` where threads share one) and returns plain rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Row = dict[str, Any]

Order = Literal["newest", "longest", "hardest", "easiest", "spread", "gap"]

LAST_STEP = 2**31 - 1
DIFFICULTY_BINS = 10
"""The first one holds groups that are all wrong, the last one those that are all right."""


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Which groups to list. None: no matter. A filter on samples admits a group that has one such sample."""

    first_step: int = 0
    last_step: int = LAST_STEP
    status: str | None = None
    correct: bool | None = None
    longer_than: int | None = None
    truncated: bool = False
    disagree: bool = False
    """The held-out check says otherwise than the reward."""
    failed: bool = False
    row: int | None = None
    order: Order = "newest"
    """``hardest``: fewest right; ``spread``: of the reward; ``gap``: between engine and trainer."""
    limit: int = 50
    offset: int = 0


_GROUPS = """
    SELECT step, draw, any_value(row) AS row, any_value(status) AS status, count(*) AS size,
           count(correct) AS scored, count(*) FILTER (correct) AS right, avg(reward) AS reward,
           avg(length) AS length, max(length) AS longest, count(*) FILTER (finish_reason = 'length') AS truncated,
           max(gap_max) AS gap, count(*) FILTER (check_correct <> correct) AS disagreements,
           min(text_offset) AS text_offset, arg_min(text_length, text_offset) AS text_length,
           list(correct ORDER BY sample) AS verdicts, count(*) OVER () AS total
    FROM samples
    WHERE step BETWEEN $first_step AND $last_step
      AND ($status IS NULL OR status = $status) AND ($row IS NULL OR row = $row)
    GROUP BY step, draw
    HAVING ($correct IS NULL OR bool_or(correct = $correct))
       AND ($longer_than IS NULL OR max(length) > $longer_than)
       AND (NOT $truncated OR bool_or(finish_reason = 'length'))
       AND (NOT $disagree OR bool_or(check_correct <> correct))
       AND (NOT $failed OR bool_or(error IS NOT NULL))
    ORDER BY CASE $order
               WHEN 'longest' THEN -max(length)
               WHEN 'hardest' THEN count(*) FILTER (correct) / greatest(count(correct), 1)
               WHEN 'easiest' THEN -count(*) FILTER (correct) / greatest(count(correct), 1)
               WHEN 'spread' THEN -coalesce(stddev_pop(reward), 0)
               WHEN 'gap' THEN -coalesce(max(gap_max), 0)
               ELSE -step
             END, step DESC, min(text_offset)
    LIMIT $limit OFFSET $offset
"""


def groups(connection: DuckDBPyConnection, wanted: GroupFilter) -> list[Row]:
    """Groups with what is known of their samples together; ``total``: how many there are without the limit."""
    return _rows(connection, _GROUPS, asdict(wanted))


_GROUP = """
    SELECT * EXCLUDE (parts), map_keys(parts) AS part_names, map_values(parts) AS part_values
    FROM (SELECT *, row_number() OVER (ORDER BY text_offset) - 1 AS position FROM samples WHERE step = $step)
    WHERE draw = $draw
    ORDER BY position
"""


def group(connection: DuckDBPyConnection, step: int, draw: int) -> list[Row]:
    """The samples of a group. ``position``: of the sample among all of its step."""
    found = _rows(connection, _GROUP, {"step": step, "draw": draw})
    for row in found:
        row["parts"] = dict(zip(row.pop("part_names") or [], row.pop("part_values") or [], strict=True))
    return found


_DIFFICULTY = """
    WITH shares AS (
        SELECT step, count(*) FILTER (correct) / count(correct) AS share
        FROM samples
        GROUP BY step, draw
        HAVING count(correct) > 0
    )
    SELECT CASE WHEN step <= $early THEN 'first' WHEN step > $late THEN 'last' ELSE 'between' END AS period,
           CASE WHEN share = 0 THEN 0 WHEN share = 1 THEN $bins - 1
                ELSE 1 + least(floor(share * ($bins - 2)), $bins - 3) END::INT AS bin,
           count(*) AS groups
    FROM shares
    GROUP BY ALL
"""


def difficulty(connection: DuckDBPyConnection, early: int, late: int) -> dict[str, list[int]]:
    """How many groups have which share of right samples, in :data:`DIFFICULTY_BINS` bins.

    Returns:
        ``first``: of the steps up to ``early``; ``last``: of those after ``late``; ``all``: of all.
    """
    found = {name: [0] * DIFFICULTY_BINS for name in ("first", "last", "all")}
    for row in _rows(connection, _DIFFICULTY, {"early": early, "late": late, "bins": DIFFICULTY_BINS}):
        for name in {row["period"], "all"} & set(found):
            found[name][row["bin"]] += row["groups"]
    return found


_BOUNDS = """
    SELECT min(step) AS first, max(step) AS last, count(*) AS samples, count(check_correct) AS checked
    FROM samples
"""


def bounds(connection: DuckDBPyConnection) -> Row:
    """First and last step with samples (null: there is none), how many samples there are and how many were checked."""
    return _rows(connection, _BOUNDS, {})[0]


_STATUSES = """
    SELECT status, count(DISTINCT (step, draw)) AS groups, count(*) AS samples, sum(length)::BIGINT AS tokens
    FROM samples GROUP BY status ORDER BY groups DESC
"""


def statuses(connection: DuckDBPyConnection) -> list[Row]:
    """What became of the groups, with how many samples and tokens that were."""
    return _rows(connection, _STATUSES, {})


_RANGE = """
    SELECT min(length) AS shortest, max(length) AS longest, min(reward) AS lowest, max(reward) AS highest
    FROM samples WHERE reward IS NOT NULL AND step BETWEEN $first AND $last
"""
_LENGTHS = """
    SELECT least(floor((length - $shortest) / $width), $columns - 1)::INT AS x,
           least(floor((reward - $lowest) / $height), $rows - 1)::INT AS y, count(*) AS samples
    FROM samples WHERE reward IS NOT NULL AND step BETWEEN $first AND $last
    GROUP BY ALL
"""


def reward_by_length(
    connection: DuckDBPyConnection, first: int = 0, last: int = LAST_STEP, columns: int = 40, rows: int = 16
) -> Row:
    """Reward against length as counts on a grid; ``cells`` of [column, row, samples], column 0 the shortest."""
    steps = {"first": first, "last": last}
    extent = _rows(connection, _RANGE, steps)[0]
    if extent["shortest"] is None:
        return {**extent, "columns": columns, "rows": rows, "cells": []}
    width = max(extent["longest"] - extent["shortest"] + 1, 1) / columns
    height = ((extent["highest"] - extent["lowest"]) or 1.0) / rows
    grid = {"shortest": extent["shortest"], "lowest": extent["lowest"], "width": width, "height": height}
    found = _rows(connection, _LENGTHS, steps | grid | {"columns": columns, "rows": rows})
    return {**extent, "columns": columns, "rows": rows, "cells": [[r["x"], r["y"], r["samples"]] for r in found]}


_DISAGREEMENTS = """
    SELECT step, draw, sample, row, correct, check_correct, reward, length, extracted, gold, text_offset, text_length,
           count(*) OVER () AS total
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
        SELECT time, host, role, cpu, rss, disk_read, disk_write, net_sent, net_received,
               list_avg([g.util FOR g IN gpu]) AS gpu_util, list_sum([g.memory FOR g IN gpu]) AS gpu_memory,
               list_sum([g.power FOR g IN gpu]) AS gpu_power
        FROM read_json($path, format = 'newline_delimited', ignore_errors = true, columns = {
            time: 'DOUBLE', host: 'VARCHAR', role: 'VARCHAR', cpu: 'DOUBLE', rss: 'DOUBLE',
            gpu: 'STRUCT(util DOUBLE, memory DOUBLE, power DOUBLE)[]',
            disk_read: 'DOUBLE', disk_write: 'DOUBLE', net_sent: 'DOUBLE', net_received: 'DOUBLE'})
        WHERE time IS NOT NULL
    ), extent AS (SELECT min(time) AS first, greatest(max(time) - min(time), 1e-9) AS span FROM lines)
    SELECT host, role, avg(time - first) AS seconds, avg(cpu) AS cpu, max(rss) AS rss, avg(gpu_util) AS gpu_util,
           max(gpu_memory) AS gpu_memory, avg(gpu_power) AS gpu_power, avg(disk_read) AS disk_read,
           avg(disk_write) AS disk_write, avg(net_sent) AS net_sent, avg(net_received) AS net_received
    FROM lines, extent
    GROUP BY host, role, least(floor((time - first) / span * $points), $points - 1)
    ORDER BY host, role, seconds
"""


def resources(connection: DuckDBPyConnection, path: Path, points: int = 200) -> list[Row]:
    """What each role of each host used, in at most ``points`` intervals since the first line of the file."""
    return _rows(connection, _RESOURCES, {"path": str(path), "points": points}) if path.is_file() else []


def _rows(connection: DuckDBPyConnection, statement: str, parameters: Mapping[str, Any]) -> list[Row]:
    found = connection.execute(statement, dict(parameters))
    names = [column[0] for column in found.description or []]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
