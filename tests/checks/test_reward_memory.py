"""What a reward model on the learner's device takes, beside what PyTorch allocates for a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_doctor_memory import config
from transformers import AutoModelForSequenceClassification

from dapo.checks.memory import predict_memory, smaller
from dapo.config import Config
from dapo.config.reading import with_values
from dapo.reward.model.network import load_network
from dapo.reward.model.text import Encoded
from helpers import most_allocated, random_model
from run_cases import TOKENIZER

WIDE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 64}


def judge(folder: Path, **sizes: Any) -> dict[str, Any]:
    settings = random_model("qwen2", **WIDE | sizes).config
    settings.num_labels, settings.pad_token_id = 1, 0
    AutoModelForSequenceClassification.from_config(settings).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return {"kind": "model", "path": str(folder), "template": "plain", "correct_above": 0, "max_length": 256}


@pytest.mark.parametrize(("mlp", "length"), [(128, 64), (128, 256), (1024, 64), (1024, 256)])
def test_scoring_takes_what_is_predicted(tmp_path: Path, mlp: int, length: int) -> None:
    reward = {**judge(tmp_path, intermediate_size=mlp), "device": "cpu", "tokens_per_batch": 8 * length}
    given = config(reward=reward | {"max_length": length}, rollout__max_response_length=248)
    network, items = load_network(given.reward), [Encoded((5,) * (length - 9 * (row == 3))) for row in range(8)]
    predicted = predict_memory(with_values(given, {"reward.device": "cuda"}), random_model("qwen2"), True).scoring
    assert predicted / most_allocated(lambda: network.score(items)) == pytest.approx(1.0, abs=0.2)


def test_weights_count_where_they_share_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    policy, given, rules = random_model("qwen2"), judge(tmp_path), {"kind": "exact"}
    size = sum(p.numel() for p in random_model("qwen2", **WIDE).base_model.parameters()) + 128

    def counted(recipe: Config, on_gpu: bool = True) -> float:
        return predict_memory(recipe, policy, on_gpu).reward_model / size

    gpu, none = (predict_memory(config(reward=one), policy, True) for one in (given, rules))
    assert gpu.total(True) >= none.total(True) + 4 * size and {"reward model", "scoring"} <= gpu.parts().keys()
    assert counted(config(reward=given), on_gpu=False) == 0, "auto is a GPU that the learner does not use"
    assert [counted(config(reward={**given, "device": "cpu"}), on_gpu) for on_gpu in (False, True)] == [4, 0]
    assert counted(config(reward={**given, "device": "cuda", "compute_dtype": "bfloat16"})) == 2
    parts = {"taste": {"reward": given}, "again": {"reward": given}}
    assert counted(config(reward={"kind": "compose", "correct": "taste", "parts": parts})) == 8
    assert counted(config(reward=rules, monitor__check=given)) == 4
    assert counted(with_values(config(reward=given), {"runtime.kind": "ray"})) == 0, "Ray gives it a GPU"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert counted(config(reward=given), on_gpu=False) == 4


def test_where_nothing_else_is_enough_the_reward_model_may_leave_the_gpu(tmp_path: Path) -> None:
    policy, given = random_model("qwen2"), config(reward=judge(tmp_path, vocab_size=200_000))
    without = predict_memory(with_values(given, {"reward.device": "cpu"}), policy, True).total(True)
    assert smaller(given, policy, 2 * without, on_gpu=True).endswith("reward.device=cpu")
    assert "reward" not in smaller(config(), policy, 10, on_gpu=True)
