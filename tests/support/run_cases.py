"""What the tests of whole runs share: a tiny random model, prompts, a reward with all kinds of verdicts, and settings
with which a run takes a fraction of a second."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dapo.commands.demo.task import make_tokenizer
from dapo.config import Config, build_config, nested
from dapo.observe.checkpoints import Checkpoints
from dapo.observe.metrics import read_metrics
from dapo.observe.progress import QuietListener
from dapo.observe.run_folder import RunFolder
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.launch import run_experiment
from dapo.records import Reward
from helpers import random_model

TOKENIZER = make_tokenizer()

PROMPTS = [{"prompt": f"{a}{op}{b}=", "answer": str((a + b) % 10)} for a in range(5) for b in range(4) for op in "+*"]

SETTINGS: dict[str, Any] = {
    "seed": 9,
    "model.path": "tiny",
    "data.template": "plain",
    "data.max_prompt_length": 8,
    "rollout.prompts_per_step": 4,
    "rollout.samples_per_prompt": 4,
    "rollout.max_response_length": 12,
    "rollout.max_concurrent_samples": 32,
    "algorithm.overlong_buffer.len": 4,
    "algorithm.clip_ratio_c": 3.0,
    "training.steps": 1,
    "training.groups_per_update": 2,
    "training.learning_rate": 3e-3,
    "training.warmup_steps": 0,
    "training.tokens_per_micro_batch": 64,
    "training.mismatch_alarm": 0.5,
    "runtime.deterministic": True,
}
ON_GPU: dict[str, Any] = {
    "runtime.device": "cuda",
    "model.compute_dtype": "bfloat16",
    "rollout.prompts_per_step": 16,
    "rollout.samples_per_prompt": 8,
    "rollout.max_response_length": 48,
    "rollout.max_concurrent_samples": 128,
    "rollout.cache_gib": 0.25,
    "training.groups_per_update": 8,
    "training.tokens_per_micro_batch": 4096,
}
"""What a run on a GPU has otherwise."""
TIMES = ("time/", "overlap/", "idle/", "tokens_per_second/", "samples_per_second", "memory/", "resources/", "share/")
"""Metrics that no two runs have in common."""


def tiny_model(seed: int = 0, name: str = "qwen2", **changes: Any) -> Any:
    return random_model(name, seed, **({"vocab_size": len(TOKENIZER)} | changes))


def wide_model() -> Any:
    """One with heads that the GPU's kernels take."""
    return tiny_model(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)


def text_sum(prompt: str, response: str) -> Reward:
    """Right for a quarter of a random model's responses; the value also grows with the length, so no two are alike."""
    correct = sum(map(ord, response)) % 4 == 0
    return Reward(correct, (1.0 if correct else -1.0) + 0.01 * len(response), parts={"length": float(len(response))})


class Recorder(QuietListener):
    """Keeps what it hears. ``on_step`` is called with the number of each finished step."""

    def __init__(self, on_step: Any = None) -> None:
        self.warnings: list[str] = []
        self.phases: list[str] = []
        self.plan: dict[str, Any] = {}
        self._on_step = on_step

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def started(self, plan: dict[str, Any]) -> None:
        self.plan = plan

    def step(self, step: int, total: int, metrics: dict[str, Any]) -> None:
        if self._on_step:
            self._on_step(step)


def config_for(folder: Path, changes: Mapping[str, Any] | None = None) -> Config:
    return build_config(nested(SETTINGS | {"run.dir": str(folder)} | dict(changes or {})))


def run(
    folder: Path, changes: Mapping[str, Any] | None = None, listener: Recorder | None = None, **inputs: Any
) -> dict[str, Any]:
    """Run with the settings above and ``changes`` (dotted keys); returns the summary."""
    given = {"model": tiny_model(), "tokenizer": TOKENIZER, "rows": PROMPTS, "reward": text_sum} | inputs
    return run_experiment(config_for(folder, changes), listener or Recorder(), RunOverrides(**given))


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each rollout step (line 0, where there is one, is the evaluation before training)."""
    return [entry for entry in read_metrics(RunFolder(folder).metrics) if entry["step"]]


def without_times(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.startswith(TIMES)}


def weights_hash(folder: Path) -> str:
    """Of the weights in a folder in Hugging Face layout."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def last_checkpoint(root: Path) -> Path:
    """The newest checkpoint of a run."""
    found = Checkpoints(RunFolder(root).checkpoints).latest()
    assert found is not None
    return found


def loads_whole(folder: Path) -> torch.Tensor:
    """Load a folder the way any user of Transformers would; returns the logits of a prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("1+2=", return_tensors="pt").input_ids
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits
    assert logits.isfinite().all()
    return logits
