"""What recording costs a step of the demo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
pytest.importorskip("duckdb")

import recording


def test_sides_are_compared_step_by_step_and_by_the_fastest_round() -> None:
    found = recording.compared({"on": [[1.1, 2.2, 9.0], [5.0, 2.04, 3.06]], "off": [[1.0, 2.0, 3.0], [1.0, 2.5, 3.5]]})
    assert found["off"] == 2.0 and found["on"] == 2.04
    assert found["cost"] == pytest.approx(0.02)  # of 10%, 2% and 2%


@pytest.mark.nightly
def test_recording_everything_costs_less_than_three_percent(tmp_path: Path) -> None:
    assert recording.main(["--out", str(tmp_path)])["cost"] < 0.03
