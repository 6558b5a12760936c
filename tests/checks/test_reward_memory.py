"""What a reward model on the learner's device takes, beside what PyTorch allocates for a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dapo.checks.memory import predict_memory, predicted_from, smaller
from dapo.config import Config, build_config, nested
from dapo.config.reading import with_values
from dapo.reward.model.network import load_network
from dapo.reward.model.text import Encoded
from helpers import most_allocated, random_model
from run_cases import TOKENIZER

SIZES: dict[str, Any] = {
    "model.path": "policy",
    "data.max_prompt_length": 56,
    "rollout.prompts_per_step": 2,
    "rollout.samples_per_prompt": 4,
    "rollout.max_response_length": 200,
    "algorithm.overlong_buffer.len": 4,
    "training.groups_per_update": 2,
}
WIDE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 64}


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    return saved(tmp_path / "judge", **WIDE)


def saved(folder: Path, **sizes: Any) -> Path:
    from transformers import AutoModelForSequenceClassification

    settings = random_model("qwen2", **sizes).config
    settings.num_labels, settings.pad_token_id = 1, 0
    AutoModelForSequenceClassification.from_config(settings).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def recipe(judge: Path, **changes: Any) -> Config:
    reward = {"kind": "model", "path": str(judge), "template": "plain", "correct_above": 0, "max_length": 256}
    return build_config(nested(SIZES | {"reward": reward} | {k.replace("__", "."): v for k, v in changes.items()}))


@pytest.mark.parametrize("mlp", [128, 1024])
@pytest.mark.parametrize("length", [64, 256])
def test_scoring_takes_what_is_predicted(tmp_path: Path, mlp: int, length: int) -> None:
    folder = saved(tmp_path, **WIDE | {"intermediate_size": mlp})
    config = recipe(folder, rollout__max_response_length=length - 56)
    network = load_network(with_values(config, {"reward.device": "cpu"}).reward)
    items = [Encoded((5,) * (length - 9 * (row == 3))) for row in range(8)]
    predicted = predict_memory(config, random_model("qwen2"), on_gpu=True).scoring
    assert predicted / most_allocated(lambda: network.score(items)) == pytest.approx(1.0, abs=0.2)


def test_weights_and_scoring_count_where_they_share_the_device(judge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    policy = random_model("qwen2")
    base = predict_memory(recipe(judge), policy, on_gpu=True)
    parameters = sum(p.numel() for p in random_model("qwen2", **WIDE).base_model.parameters()) + 128
    assert base.reward_model == 4 * parameters and base.scoring > 0
    assert {"reward model", "scoring"} <= base.parts().keys()
    rules = predict_memory(recipe(judge, reward={"kind": "exact"}), policy, on_gpu=True)
    assert base.total(on_gpu=True) >= rules.total(on_gpu=True) + base.reward_model
    for reward, device, count in (
        ({}, False, 0),  # auto is a GPU that the learner does not use
        ({"device": "cpu"}, False, 4),
        ({"device": "cpu"}, True, 0),
        ({"device": "cuda", "compute_dtype": "bfloat16"}, True, 2),
    ):
        config = recipe(judge, **{f"reward__{key}": value for key, value in reward.items()})
        assert predict_memory(config, policy, device).reward_model == count * parameters, (reward, device)
    taste = {"reward": dict(recipe(judge).reward)}
    twice = recipe(judge, reward={"kind": "compose", "correct": "taste", "parts": {"taste": taste, "again": taste}})
    assert predict_memory(twice, policy, on_gpu=True).reward_model == 2 * base.reward_model
    checked = recipe(judge, reward={"kind": "exact"}, monitor__check=dict(recipe(judge).reward))
    assert predict_memory(checked, policy, on_gpu=True).reward_model == base.reward_model
    by_ray = with_values(recipe(judge), {"runtime.kind": "ray"})
    assert predict_memory(by_ray, policy, on_gpu=True).reward_model == 0, "Ray gives it a GPU"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert predict_memory(recipe(judge), policy, on_gpu=False).reward_model == 4 * parameters


def test_where_nothing_else_is_enough_the_reward_model_may_leave_the_gpu(tmp_path: Path) -> None:
    large = saved(tmp_path, **WIDE | {"vocab_size": 200_000})
    policy, config = random_model("qwen2"), recipe(large)
    without = predict_memory(with_values(config, {"reward.device": "cpu"}), policy, on_gpu=True).total(on_gpu=True)
    assert smaller(config, policy, 2 * without, on_gpu=True).endswith("reward.device=cpu")
    assert "reward" not in smaller(recipe(large, reward={"kind": "exact"}), policy, 10, on_gpu=True)


def test_the_forecast_tells_of_it(judge: Path, tmp_path: Path) -> None:
    random_model("qwen2").save_pretrained(tmp_path / "policy")
    config = recipe(judge, model__path=str(tmp_path / "policy"), runtime__device="cuda")
    told = predicted_from(with_values(config, {"reward.tokens_per_batch": 2**20, "rollout.prompts_per_step": 999}))
    assert "scoring " in told and "without the reward model" not in told
    (judge / "config.json").unlink()
    absent = predicted_from(recipe(judge / "gone", model__path=str(tmp_path / "policy"), runtime__device="cuda"))
    assert f"without the reward model {judge}/gone, which is not here" in absent
