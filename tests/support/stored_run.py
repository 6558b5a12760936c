"""A run folder with samples that were chosen by hand, written by what writes them in a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dapo.config import build_config, nested
from dapo.observe.metrics import MetricsLog
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import write_samples
from dapo.records import Group, Prompt, Reward, Sample

ROWS = [
    {"prompt": "2+2=", "answer": "4", "scale": 3},
    {"prompt": "3+3=", "answer": "6", "scale": 5},
    {"prompt": "5+5=", "answer": "10", "scale": 7},
]

RIGHT, WRONG = Reward(True, 1.0), Reward(False, -1.0)
FAILED = Reward(None, 0.0, error="timed out after 10 s")


def group(draw: int, row: int, samples: Sequence[tuple[str, Reward]]) -> Group:
    """The texts of its samples, each with the reward that it was given."""
    ids = np.array([5], np.int32)
    made = [
        Sample(draw, index, ids, np.zeros(1, np.float32), ids, "stop", text=text, reward=reward, in_loss=False)
        for index, (text, reward) in enumerate(samples)
    ]
    return Group(draw, Prompt(row, ROWS[row]["prompt"], (5,), ROWS[row]["answer"]), tuple(made))


def stored_run(
    root: Path, steps: Mapping[int, Sequence[Group]], rows: bool = True, settings: Mapping[str, Any] | None = None
) -> RunFolder:
    """The folder of a run over ROWS (which lie beside it, unless ``rows`` is false) with these groups in its steps."""
    given = {"model.path": "some/model", "run.dir": str(root), "reward.kind": "exact", **(settings or {})}
    if rows:
        data = root.with_name(f"{root.name}-rows.jsonl")
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
        given["data.train"] = str(data)
    folder = RunFolder.create(build_config(nested(given)), ["dapo", "train", "r.yaml"])
    with MetricsLog(folder.metrics) as log:
        for step, groups in steps.items():
            log.append(step, {"accuracy": 0.5})
            write_samples(folder.samples, step, [(one, "kept") for one in groups])
    return folder
