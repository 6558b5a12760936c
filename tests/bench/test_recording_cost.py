"""What recording costs a step of the demo."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("duckdb")

import recording


def test_sides_are_compared_by_the_usual_time_of_each_step() -> None:
    on = [[1.1, 2.0], [1.0, 9.0], [1.06, 2.06]]
    found = recording.compared({"on": on, "off": [[1.0, 2.0], [1.0, 2.0], [5.0, 2.0]]})
    assert found["on"] == pytest.approx((1.06 + 2.06) / 2) and found["off"] == 1.5
    assert found["cost"] == pytest.approx(0.04)


@pytest.mark.nightly
def test_recording_everything_costs_less_than_three_percent(tmp_path: Path) -> None:
    assert recording.main(["--out", str(tmp_path)])["cost"] < 0.03
