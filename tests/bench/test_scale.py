"""How many samples the orchestrator carries, measured over a few of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import scale
from dapo.commands.demo.task import make_tokenizer


@pytest.mark.usefixtures("in_this_process")
def test_a_simulated_run_comes_to_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "LENGTH", 20)
    monkeypatch.setattr(scale, "READY", 2)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("1+2-3=" * 50)
    monkeypatch.setattr(scale, "HERE", tmp_path / "bench")
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    common = ["--tokenizer", str(tmp_path / "tokenizer"), "--prompts", "4", "--rate", "100000", "--rows", "32"]
    found = scale.main(["run", "--out", str(tmp_path / "out"), "--gpus", "0", "4", *common])
    free, limited = found["sides"]
    assert free["error"] is limited["error"] is None
    assert limited["limit"] == 2 * 100_000 / 20 and limited["samples_s"] > 0
    assert free["cpu_ms"] >= free["loop_ms"] > 0
    assert not list((tmp_path / "out").glob("*-run")), "what a run wrote is removed"


def test_slots_take_as_many_groups_at_once_as_there_are() -> None:
    slots = scale.Slots(gpus=1, rate=1000.0, rows=32)
    times = sorted(slots.done_in(0.0) for _ in range(4))
    usual = 32 * scale.LENGTH / 1000
    assert times[1] <= 1.5 * usual and times[2] >= usual, "the third waits for the first"


def test_the_speed_leaves_out_the_first_step_and_the_last() -> None:
    found = scale.speed([(0, 0, 0, 0), (10, 1, 1, 100), (20, 2, 1.5, 300), (50, 4, 2, 400)])
    assert found == {"samples_s": 20, "cpu_ms": 10, "loop_ms": 5, "carries": 100}
