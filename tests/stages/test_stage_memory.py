"""The predicted memory of a stage, beside what a process really takes for it; and what `dapo doctor` makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dapo.checks.memory import predict_memory
from dapo.commands import app
from dapo.model.classifier import as_classifier
from dapo.util import memory as system_memory
from helpers import random_model
from run_cases import TOKENIZER, tiny_model
from stage_cases import ROWS, stage_config

FACTOR = 1.5
"""Prediction and measurement lie within this factor of each other."""
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 8192}
SIZES: dict[str, Any] = {
    "data.max_length": 128,
    "training.rows_per_update": 8,
    "training.tokens_per_micro_batch": 2048,
    "training.steps": 2,
    "runtime.deterministic": False,
    "run.save_every": 0,
}
MEASURED = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from pathlib import Path
import torch
torch.set_num_threads(1)
from dapo.util.memory import peak_memory
from stage_cases import run
from test_stage_memory import SIZES, SHAPE, random_model, rows

stage, folder = sys.argv[2], Path(sys.argv[3])
run(stage, folder / "first", {"training.steps": 1})  # what is loaded when it is first used
before = peak_memory()
summary = run(stage, folder / "second", SIZES, model=random_model("qwen2", **SHAPE), rows=rows(stage))
print(json.dumps({"bytes": peak_memory() - before, "updates": summary["updates"]}))
"""


def rows(stage: str) -> list[dict[str, str]]:
    """Of the full length each, one token a character."""
    texts = [("1+2=" * 4 + f"{n % 10}") + "37" * 55 for n in range(16)]
    if stage == "sft":
        return [{"prompt": "1+2=", "response": text[:123]} for text in texts]
    return [{"prompt": "1+2=", "chosen": "7" + text[:122], "rejected": "4" + text[:122]} for text in texts]


def predicted(stage: str) -> int:
    config = stage_config(stage, Path("run"), SIZES)
    model = random_model("qwen2", **SHAPE)
    return predict_memory(config, as_classifier(model, 0) if stage == "reward_model" else model).total(on_gpu=False)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is counted otherwise")
@pytest.mark.parametrize("stage", ["sft", "dpo", "reward_model"])
def test_the_prediction_is_near_what_a_stage_takes(stage: str, tmp_path: Path) -> None:
    here = Path(__file__).parents[1]
    paths = [str(path) for path in (here / "stages", here / "support", here)]
    command = [sys.executable, "-c", MEASURED, json.dumps(paths), stage, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["updates"] == 2
    total = predicted(stage)
    print(f"{stage}: predicted {total / 2**20:.0f} MiB, measured {found['bytes'] / 2**20:.0f} MiB")
    assert 1 / FACTOR <= total / found["bytes"] <= FACTOR


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("tiny")
    TOKENIZER.save_pretrained("tiny")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS["dpo"]))
    tree = {"stage": "dpo", "model": {"path": "tiny"}, "data": {"train": "rows.jsonl", "template": "plain"}}
    Path("dpo.yaml").write_text(yaml.safe_dump(tree))
    return "dpo.yaml"


def findings(*words: str) -> dict[str, dict[str, str]]:
    done = CliRunner().invoke(app, ["doctor", "--json", *words])
    return {one["name"]: one for one in json.loads(done.stdout)["findings"]}


def test_what_does_not_fit_is_said_with_what_takes_less(recipe, monkeypatch):
    monkeypatch.setattr(system_memory, "free_memory", lambda: 10 * 2**20)
    found = findings(recipe, "data.max_length=1024")["memory"]
    assert found["status"] == "fail" and found["fix"].startswith("training.tokens_per_micro_batch=")


def test_a_row_that_cannot_be_used_is_a_finding(recipe):
    Path("rows.jsonl").write_text('{"prompt": "1", "chosen": "2"}\n')
    found = findings(recipe)
    assert found["rows"]["status"] == "fail" and "rejected" in found["rows"]["found"]
    assert "disk" in found["not-checked"]["found"]


def test_a_stage_of_a_published_size_is_planned_on_one_gpu(recipe):
    """An adapter's base has neither gradients nor moments; a reward model has scores in place of logits."""
    words = ["plan", recipe, "model.path=0.5B", "model.compute_dtype=bfloat16", "--json", "--cluster", "H200"]
    found = json.loads(CliRunner().invoke(app, words).stdout)
    assert found["fits"] and found["tokens_trained_per_step"] == 32 * 3 * 512
    assert {"weights", "gradients", "adam", "activations", "logits"} <= found["gpu_gib"].keys()
    assert not {"engine", "cache", "decoding", "reference"} & found["gpu_gib"].keys()
    assert found["step_seconds"]["reference"] < found["step_seconds"]["update"]
    for budget in ("samples=330", f"tokens={330 * 3 * 512}"):  # 32 rows an update
        budgeted = CliRunner().invoke(app, [*words, "training.steps=1000", f"training.{budget}"])
        assert json.loads(budgeted.stdout)["steps"] == 10
    adapter = json.loads(CliRunner().invoke(app, [*words, "model.lora.rank=16"]).stdout)["gpu_gib"]
    assert adapter["adam"] < found["gpu_gib"]["adam"] / 10 and adapter["weights"] < found["gpu_gib"]["weights"]
    large = CliRunner().invoke(app, ["plan", recipe, "model.path=7B", "--cluster", "H100"])
    assert (
        large.exit_code == 1 and "model.lora.rank=16" in large.stdout and "GPUs  " not in large.stdout.split("less")[1]
    )
