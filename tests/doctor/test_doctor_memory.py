"""The predicted memory of a training, beside what a process really takes for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dapo.config import Config, build_config, nested
from dapo.doctor import memory
from dapo.doctor.memory import GIB, Memory, predict_memory
from helpers import random_model

FACTOR = 1.4
"""Prediction and measurement lie within this factor of each other."""

SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 8192}
SETTINGS: dict[str, Any] = {
    "model.path": "tiny",
    "data.max_prompt_length": 8,
    "rollout.prompts_per_step": 8,
    "rollout.samples_per_prompt": 8,
    "rollout.max_response_length": 120,
    "rollout.max_concurrent_samples": 64,
    "algorithm.overlong_buffer.len": 4,
    "algorithm.filter_groups.enable": False,
    "training.groups_per_update": 4,
    "training.tokens_per_micro_batch": 2048,
}
MEASURED = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from pathlib import Path
import torch
torch.set_num_threads(1)
from dapo.process import peak_memory
from run_cases import Recorder, TOKENIZER, run, text_sum, tiny_model
from test_doctor_memory import SETTINGS, SHAPE, random_model

folder = Path(sys.argv[2])
run(folder / "first", {"training.steps": 1})  # what is loaded when it is first used
before = peak_memory()
settings = SETTINGS | {"training.steps": 1, "runtime.deterministic": False, "run.save_every": 0}
summary = run(folder / "second", settings, model=random_model("qwen2", **SHAPE))
print(json.dumps({"bytes": peak_memory() - before, "updates": summary["updates"]}))
"""
"""A whole run: rollout, updates, checkpoint. A random model over 8,192 tokens hardly ever ends a response."""


def config(**changes: Any) -> Config:
    given = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    return build_config(nested(given))


def predicted(**changes: Any) -> Memory:
    return predict_memory(config(**changes), random_model("qwen2", **SHAPE))


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is counted otherwise")
def test_the_prediction_is_near_what_a_training_takes(tmp_path: Path) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-c", MEASURED, json.dumps([str(here), str(here.parent)]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["updates"] == 2
    measured = found["bytes"]
    total = predicted().total(on_gpu=False)
    print(f"predicted {total / 2**20:.0f} MiB, measured {measured / 2**20:.0f} MiB")
    assert 1 / FACTOR <= total / measured <= FACTOR, (total / 2**20, measured / 2**20, predicted())


def test_each_part_grows_with_what_it_is_for() -> None:
    base = predicted()
    parameters = sum(p.numel() for p in random_model("qwen2", **SHAPE).parameters())
    assert (base.weights, base.gradients, base.adam, base.engine) == (
        *(4 * parameters, 4 * parameters, 8 * parameters, 4 * parameters),
    )
    assert base.reference == 0 and predicted(algorithm__kl__mode="loss").reference == 4 * parameters
    # 64 sequences of 128 tokens, 4 layers, 2 key heads of 64 numbers, keys and values, 4 bytes
    assert base.cache == 64 * 128 * 4 * 2 * 2 * 64 * 4
    assert predicted(rollout__max_concurrent_samples=16).cache == base.cache // 4
    assert predicted(rollout__max_concurrent_samples=1000).cache == base.cache, "a step has 64 samples"
    assert predicted(training__tokens_per_micro_batch=1024).activations == base.activations // 2
    assert predicted(model__compute_dtype="bfloat16").engine == base.engine // 2


def test_on_a_gpu_cache_and_activations_take_turns() -> None:
    base = predicted()
    every = base.weights + base.gradients + base.adam + base.engine + base.cache + base.activations + base.logits
    assert base.total(on_gpu=True) == every - min(base.cache, base.activations)
    assert base.total(on_gpu=False) == int(1.25 * every)
    bounded = predict_memory(config(rollout__cache_gib=0.001), random_model("qwen2", **SHAPE), on_gpu=True)
    assert bounded.cache == int(0.001 * GIB)


def test_free_memory_is_that_of_the_container_where_that_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if memory.free_memory() is None:
        pytest.skip("how much is free cannot be told here")
    monkeypatch.setattr(memory, "_left_in_containers", lambda: iter([12345]))
    assert memory.free_memory() == 12345
