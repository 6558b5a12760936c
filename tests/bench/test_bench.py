"""The benchmarks against TRL do the same work on both sides, and run from end to end at their smallest size."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import cpu_cycle  # noqa: E402
import sides  # noqa: E402

SMALL = sides.Work("demo", "float32", threads=1, prompts=4, samples=2, updates=2, tokens=5, cycles=2)


def test_both_sides_sample_and_train_on_the_same_number_of_tokens() -> None:
    ours, theirs = sides.run_ours(SMALL), sides.run_theirs(SMALL)
    for timing in (ours, theirs):
        assert timing.samples == 2 * 4 * 2
        assert timing.generated == timing.trained == 16 * 5
        assert timing.updates == 2 * 2
        assert timing.seconds == pytest.approx(sum(timing.phases.values()))
        assert min(timing.phases[name] for name in ("rollout", "update")) > 0
        assert timing.cpu_seconds > 0


def test_every_prompt_is_used_once_and_both_kinds_of_verdict_occur() -> None:
    rows = [row["prompt"] for row in SMALL.rows]
    assert len(set(rows)) == len(rows) == 4 * 3
    verdicts = [sides.verdict(str(i)) for i in range(1000)]
    assert 400 < sum(verdicts) < 600


def test_a_ratio_of_unequal_work_is_refused() -> None:
    one = sides.Timing(1.0, 1.0, {}, samples=8, generated=40, trained=40, updates=2)
    cpu_cycle.same_work({"ours": [one], "theirs": [one]}, natural=False)
    with pytest.raises(SystemExit, match="trained differ: 40 and 39"):
        cpu_cycle.same_work({"ours": [one], "theirs": [replace(one, trained=39)]}, natural=False)
    cpu_cycle.same_work({"ours": [one], "theirs": [replace(one, trained=39)]}, natural=True)


def test_updates_that_would_cut_groups_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cpu_cycle.parse(["--prompts", "6", "--updates", "4"])
    assert "--prompts 6 cannot be cut into 4 updates" in capsys.readouterr().err


@pytest.mark.nightly
def test_cycle_from_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompts", "2", "--samples", "2", "--updates", "1", "--tokens", "4", "--cycles", "1"]
    ratio = cpu_cycle.main([*sizes, "--repetitions", "2"])
    assert capsys.readouterr().out.splitlines()[-1] == f"{ratio:.1f}x"


@pytest.mark.nightly
def test_learning_from_end_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import cpu_learning

    difference = cpu_learning.main(["--seeds", "1", "--steps", "2", "--out", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[-1] == f"{difference:+.1f} points"
