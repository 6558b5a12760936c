"""The kin of DAPO through whole runs: what is recorded of them, and made again by a replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo.commands.replay.replay import replay
from run_cases import run, steps_of

KIN: dict[str, dict[str, Any]] = {
    "gspo": {"algorithm.loss_agg_mode": "seq-mean-token-mean", "algorithm.clip_ratio_high": 4e-4},
    "cispo": {"algorithm.clip_ratio_low": 1.0},
}


@pytest.mark.parametrize("name", KIN)
def test_a_run_and_its_replay(tmp_path: Path, name: str) -> None:
    settings = KIN[name] | {"algorithm.objective": name, "training.epochs_per_rollout": 2}
    run(tmp_path / "run", settings)
    (step,) = steps_of(tmp_path / "run")
    assert step["updates"] == 4 and step["clip/high"] > 0 and step["clip/low"] is not None
    found = replay(tmp_path / "run", 1)
    assert found.differences == [] and len(found.updates) == 4


def test_advantages_of_reinforce_pp_are_recorded_as_they_are_trained_on(tmp_path: Path) -> None:
    run(tmp_path / "run", {"algorithm.advantage.kind": "batch-norm", "algorithm.overlong_filtering": True})
    lines = [json.loads(line) for line in (tmp_path / "run/samples/step-00001.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["status"] == "kept"]
    tokens = np.repeat([s["advantage"] for s in kept], [s["length"] * s["in_loss"] for s in kept])
    assert tokens.mean() == pytest.approx(0, abs=1e-5) and tokens.std(ddof=1) == pytest.approx(1, abs=1e-3)
    assert replay(tmp_path / "run", 1).differences == []
