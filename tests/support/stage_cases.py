"""What the tests of stages share: rows of sums, a tiny model and settings with which a stage takes a second."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo.config import nested
from dapo.config.stages import StageConfig, build_stage
from dapo.data.rows import PythonRows
from dapo.observe.run_folder import RunFolder
from dapo.orchestrator.inputs import RunOverrides
from dapo.stages.run import run_stage
from run_cases import TOKENIZER, Recorder, tiny_model

SUMS = [(a, b) for a in range(6) for b in range(6)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": f"{a}+{b}=", "response": f"#{(a + b) % 10}"} for a, b in SUMS],
    "dpo": [
        {"prompt": f"{a}+{b}=", "chosen": f"#{(a + b) % 10}", "rejected": f"#{(a + b + 1 + a) % 10}"} for a, b in SUMS
    ],
}
ROWS["reward_model"] = ROWS["dpo"]
SETTINGS: dict[str, Any] = {
    "seed": 5,
    "model.path": "tiny",
    "data.max_length": 32,
    "training.steps": 6,
    "training.rows_per_update": 4,
    "training.learning_rate": 1e-3,
    "training.warmup_steps": 2,
    "training.tokens_per_micro_batch": 64,
    "evaluation.every": 4,
    "run.save_every": 2,
    "run.resources_every_s": 0,
}
OWN: dict[str, dict[str, Any]] = {
    "sft": {"data.template": "plain"},
    "dpo": {"data.template": "plain", "dpo.nll": 0.1},
    "reward_model": {"reward_model.template": "plain"},
}


def stage_config(stage: str, folder: Path, changes: Mapping[str, Any] | None = None) -> StageConfig:
    return build_stage(stage, nested(SETTINGS | OWN[stage] | {"run.dir": str(folder)} | dict(changes or {})))


def run(
    stage: str,
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    listener: Any = None,
    rows: Any = None,
    model: Any = None,
    tokenizer: Any = TOKENIZER,
) -> dict[str, Any]:
    """Run a stage with the settings above and ``changes`` (dotted keys); returns the summary."""
    rows = rows or ROWS[stage]
    table, heldout = PythonRows(rows, "rows"), PythonRows(rows[:10], "heldout")
    folders = RunFolder(folder) if resume else None
    given = RunOverrides(model or tiny_model(), tokenizer, table, heldout, resume=folders)
    config = stage_config(stage, folder, changes)
    return run_stage(config, listener or Recorder(), given)
