"""Many steps in which timing decides what is cancelled: the real engine, and scores that take their time."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from dapo.observe.metrics import read_metrics
from dapo.records import Reward
from run_cases import run, text_sum


@pytest.mark.parametrize("staleness", [0, 1])
def test_forty_steps_with_early_stops_and_slow_scores(tmp_path: Path, staleness: int) -> None:
    """Draws are cancelled while they are handed over, decoded and scored; every step still trains on N groups."""
    dice = random.Random(1)

    async def slowly(prompt: str, response: str) -> Reward:
        await asyncio.sleep(dice.choice((0, 0, 0.001, 0.004)))
        return text_sum(prompt, response)

    changes = {
        "training.steps": 40,
        "training.learning_rate": 1e-6,
        "runtime.deterministic": False,
        "rollout.max_staleness": staleness,
        "run.save_samples": False,
    }
    summary = run(tmp_path / "run", changes, reward=slowly)
    steps = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert summary["steps"] == len(steps) == 40
    assert all(step["groups/kept"] == 4 for step in steps)
    cancelled, carried = (sum(step[f"groups/{what}"] for step in steps) for what in ("cancelled", "carried"))
    if staleness:  # what is not needed any more finishes and waits
        assert cancelled == 0 and carried > 0 and {step["staleness/max"] for step in steps} == {0, 1}
    else:
        assert cancelled > 0 and carried == 0 and {step["staleness/max"] for step in steps} == {0}
