"""A tiny deterministic run whose recipe names its data and its reward, so that a replay finds all it needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import tokens_path
from run_cases import PROMPTS, run

CHECKER = """
def score(prompt, response):
    correct = sum(map(ord, response)) % 4 == 0
    return {"correct": correct, "value": (1.0 if correct else -1.0) + 0.01 * len(response)}
"""


def recipe(folder: Path) -> dict[str, Any]:
    """Settings of a run with data and checker beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (folder / "checker.py").write_text(CHECKER)
    return {
        "data.train": str(folder / "rows.jsonl"),
        "reward.kind": "function",
        "reward.function": f"{folder / 'checker.py'}:score",
        "reward.workers": 1,
        "training.steps": 3,
        "run.save_every": 0,
    }


def make_run(folder: Path, changes: Mapping[str, Any] | None = None, **inputs: Any) -> Path:
    """Run it and return the run folder."""
    run(folder / "run", recipe(folder) | dict(changes or {}), rows=None, reward=None, **inputs)
    return folder / "run"


def change_lines(root: Path, step: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Edit the stored samples of a step."""
    path = RunFolder(root).samples / f"step-{step:05d}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_tokens(root: Path, step: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit the stored tokens of a step."""
    path = tokens_path(RunFolder(root).samples, step)
    arrays = {name: np.array(array) for name, array in load(path.read_bytes()).items()}
    change(arrays)
    path.write_bytes(save(arrays))
