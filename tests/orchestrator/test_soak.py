"""Three hundred steps of a run in which nothing should change: memory and time per step stay what they are."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from run_cases import Recorder, run, steps_of

STEPS, WARM_UP, WINDOW = 300, 50, 50
SOAK: dict[str, Any] = {
    "training.steps": STEPS,
    "training.learning_rate": 1e-12,  # as good as none: 0 itself is refused
    "training.warmup_steps": 0,
    "rollout.max_response_length": 12,
    "algorithm.filter_groups.enable": False,  # so that each step has as many samples as the next
    "evaluation.every": 25,
    "run.save_every": 10,
    "run.keep_last": 2,
}
"""Weights that stay, so lengths that do; and all that a long run does: evaluations, checkpoints, samples written."""


class Measure(Recorder):
    """Memory in use now and the time, after each step."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.memory: list[int] = []
        self.times: list[float] = []

    def _note(self, step: int) -> None:
        self.memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        self.times.append(time.process_time())


@pytest.mark.nightly
def test_memory_is_flat_and_steps_take_as_long_as_they_did(tmp_path: Path) -> None:
    """Entry 98. Time is that of the processor, and the lower quartile of a window: what else the machine does makes
    some steps slower, and none faster."""
    measure = Measure()
    run(tmp_path, SOAK, measure, heldout=[{"prompt": "1+1=", "answer": "2"}])
    assert len(measure.memory) == STEPS
    lengths = [entry["response_length/mean"] for entry in steps_of(tmp_path)]
    first, last = (statistics.mean(part) for part in (lengths[:WINDOW], lengths[-WINDOW:]))
    assert abs(last / first - 1) < 0.1, "the soak itself is not steady"

    memory = measure.memory
    before, after = (statistics.median(part) for part in (memory[WARM_UP:][:WINDOW], memory[-WINDOW:]))
    growth = after / before - 1
    took = [b - a for a, b in zip(measure.times, measure.times[1:], strict=False)]
    early, late = (statistics.quantiles(part, n=4)[0] for part in (took[WARM_UP:][:WINDOW], took[-WINDOW:]))
    slower = late / early - 1
    print(f"memory {before / 2**20:.1f} MiB, {growth:+.2%}; {early * 1e3:.1f} ms per step, {slower:+.1%}")
    assert growth < 0.02
    assert abs(slower) < 0.15
