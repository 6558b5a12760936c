"""The made-up run that the page is timed on is a run like others, only larger."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("duckdb")

import synthetic_run
from dapo.observe.index import SampleIndex
from dapo.observe.run_view import RunView
from dapo.observe.sample_rows import read_line


def test_a_small_one_hangs_together(tmp_path: Path) -> None:
    folder = synthetic_run.make_run(tmp_path / "run", steps=12, groups=16, samples=4, texts=2)
    view = RunView.read(folder.root)
    assert (view.state, view.steps_done, view.steps_with_samples) == ("finished", 12, [1, 12])
    samples = SampleIndex(folder.root).connection()
    assert samples.execute("SELECT count(*), count(DISTINCT step) FROM samples").fetchall() == [(12 * 16 * 4, 12)]
    odd = samples.execute(
        "SELECT draw FROM samples GROUP BY draw HAVING count(*) <> 4 OR count(DISTINCT status) <> 1 "
        "OR any_value(status) <> CASE avg(correct::INT) WHEN 0 THEN 'all_wrong' WHEN 1 THEN 'all_right' ELSE 'kept' END"
    )
    assert odd.fetchall() == []
    told = samples.execute(
        "SELECT step, text_offset, text_length, sample, gold FROM samples WHERE text_offset IS NOT NULL"
    )
    names = [column[0] for column in told.description]
    rows = [dict(zip(names, row, strict=True)) for row in told.fetchall()]
    assert len(rows) == 2 * 16 * 4
    line = read_line(folder.samples, rows[-1])
    assert (line["index"], line["gold"]) == (rows[-1]["sample"], rows[-1]["gold"])
