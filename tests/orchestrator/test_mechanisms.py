"""The four techniques of DAPO are alive in the whole loop: asserted on what they do, not on how well a model gets.

Each test trains a tiny random model twice, with and without a technique, on the same prompts and seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dapo.algorithm.objective import TokenInputs
from dapo.commands.demo.task import make_model, make_tokenizer
from dapo.config import build_config, nested
from dapo.observe.metrics import read_metrics
from dapo.observe.progress import QuietListener
from dapo.observe.samples import read_samples
from dapo.orchestrator.experiment import Experiment
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.launch import run_to_end
from dapo.records import TokenBatch
from dapo.training.learner import LocalLearner

Update = tuple[TokenBatch, TokenInputs]

BASE: dict[str, Any] = {
    "seed": 5,
    "model.path": "tiny",
    "data.template": "plain",
    "data.max_prompt_length": 8,
    "rollout.prompts_per_step": 8,
    "rollout.samples_per_prompt": 8,
    "rollout.max_response_length": 24,
    "rollout.max_concurrent_samples": 64,
    "algorithm.overlong_buffer.len": 8,
    "training.steps": 1,
    "training.groups_per_update": 2,
    "training.learning_rate": 3e-3,
    "training.warmup_steps": 0,
    "training.tokens_per_micro_batch": 4096,
    "runtime.deterministic": True,
}
PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a)} for a in range(10) for b in range(4)]


def starts_low(prompt: str, response: str, answer: str) -> bool:
    """Right if the response begins with a digit below 5: about a quarter of a random model's responses."""
    return response[:1] in set("01234") and len(response) > 0


def easy_for_half(prompt: str, response: str, answer: str) -> bool:
    """No response to a prompt below 5 is right: half of the groups have nothing to learn from."""
    return int(answer) >= 5 and starts_low(prompt, response, answer)


def run(folder: Path, reward: Any = starts_low, **settings: Any) -> Experiment:
    settings = {key.replace("__", "."): value for key, value in settings.items()}
    config = build_config(nested(BASE | {"run.dir": str(folder)} | settings))
    tokenizer = make_tokenizer()
    model = make_model(1, len(tokenizer))
    experiment = Experiment(
        config, QuietListener(), RunOverrides(model=model, tokenizer=tokenizer, rows=PROMPTS, reward=reward)
    )
    run_to_end(experiment)
    return experiment


def metrics(experiment: Experiment) -> dict[str, Any]:
    return list(read_metrics(experiment.folder.metrics))[-1]


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[Update]:
    """Batch and inputs of every update that a run makes, in order."""
    seen: list[Update] = []
    plain = LocalLearner.inputs

    def record(self: LocalLearner, mini: TokenBatch) -> TokenInputs:
        seen.append((mini, plain(self, mini)))
        return seen[-1][1]

    monkeypatch.setattr(LocalLearner, "inputs", record)
    return seen


def test_clip_higher_changes_which_tokens_are_clipped_from_above(tmp_path: Path) -> None:
    """Eq. 10: with a higher upper border fewer tokens are clipped, and those that are have moved further up."""
    narrow = metrics(run(tmp_path / "narrow", algorithm__clip_ratio_high=0.05, training__epochs_per_rollout=3))
    wide = metrics(run(tmp_path / "wide", algorithm__clip_ratio_high=0.28, training__epochs_per_rollout=3))
    assert narrow["clip/high"] > wide["clip/high"] > 0
    assert narrow["clip/high_probability"] != pytest.approx(wide["clip/high_probability"], rel=1e-3)
    assert narrow["tokens/loss"] == wide["tokens/loss"]  # the same rollout: only the clip differs


def test_dynamic_sampling_fills_the_batch_that_shrinks_without_it(tmp_path: Path, updates: list[Update]) -> None:
    """Eq. 11: N groups with a gradient against about half of them.

    Without the length punishment, which would give groups of wrong answers a gradient of its own.
    """
    plain = {"algorithm__overlong_buffer__enable": False}

    def groups_with_a_gradient() -> int:
        rows = {(int(d), float(a)) for u in updates for d, a in _advantage_of_samples(u)}
        return len({draw for draw, advantage in rows if advantage != 0})

    kept = metrics(run(tmp_path / "with", easy_for_half, **plain))
    with_sampling = groups_with_a_gradient()
    updates.clear()
    unfiltered = metrics(run(tmp_path / "without", easy_for_half, algorithm__filter_groups__enable=False, **plain))
    without = groups_with_a_gradient()
    assert with_sampling == kept["groups/kept"] == 8
    assert kept["groups/drawn"] > 8
    assert without < 8
    assert unfiltered["groups/drawn"] == unfiltered["groups/kept"] == 8
    assert kept["groups/all_wrong"] > 0


def _advantage_of_samples(update: Update) -> list[tuple[int, float]]:
    """(draw, advantage) of each sample with a response."""
    batch, inputs = update
    first = np.cumsum(batch.response_lengths) - batch.response_lengths
    return list(zip(batch.draws.tolist(), inputs.advantages[first].tolist(), strict=True))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_token_level_loss_weighs_long_samples_by_their_tokens(tmp_path: Path, updates: list[Update], mode: str) -> None:
    """Eq. 8 against GRPO's Eq. 5: a sample's share of the loss is its share of the tokens, or 1 / samples."""
    run(tmp_path / "run", algorithm__loss_agg_mode=mode)
    assert updates
    for batch, inputs in updates:
        lengths = torch.from_numpy(batch.response_lengths).double()
        assert len(set(lengths.tolist())) > 1
        sample_ids = torch.from_numpy(batch.sample_ids)
        shares = torch.zeros(len(lengths)).double().index_add(0, sample_ids, inputs.weights.double())
        expected = lengths / lengths.sum() if mode == "token-mean" else torch.full_like(lengths, 1 / len(lengths))
        assert torch.allclose(shares, expected, atol=1e-6)


def test_overlong_punishment_hits_exactly_the_samples_in_the_buffer(tmp_path: Path) -> None:
    """Eq. 13, L_max 24, L_cache 8: nothing up to 16 tokens, (16 - |y|) / 8 above; read back from the samples file."""
    experiment = run(tmp_path / "run")
    rows = [r for r in read_samples(experiment.folder.samples / "step-00001.jsonl") if r["status"] == "kept"]
    assert any(r["length"] <= 16 for r in rows)
    assert any(r["length"] > 16 for r in rows)
    for row in rows:
        penalty = min(0.0, (16 - row["length"]) / 8)
        assert row["shaped_reward"] == pytest.approx(row["reward"] + penalty)
    off = run(tmp_path / "off", algorithm__overlong_buffer__enable=False)
    rows = [r for r in read_samples(off.folder.samples / "step-00001.jsonl") if r["status"] == "kept"]
    assert rows and all(r["shaped_reward"] == r["reward"] for r in rows)
