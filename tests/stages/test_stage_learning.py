"""Each stage learns what it should, on a CPU within a minute; and a policy earns more of what a learned reward stands
for."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
import pytest

import dapo
from dapo.commands.demo.task import CHARACTERS, make_model, make_tokenizer
from dapo.observe.progress import QuietListener
from dapo.observe.samples import read_samples, samples_path

pytestmark = pytest.mark.nightly

TOKENIZER = make_tokenizer()
SIZES = {
    "data.max_length": 48,
    "training.rows_per_update": 16,
    "training.learning_rate": 1e-3,
    "training.warmup_steps": 10,
    "training.weight_decay": 0.01,
    "run.resources_every_s": 0,
}


def model() -> Any:
    return make_model(0, len(TOKENIZER))


def text(rng: np.random.Generator) -> str:
    """A random text of 4 to 12 characters."""
    return "".join(rng.choice(list(CHARACTERS), rng.integers(4, 13)))


def gold(response: str) -> float:
    """What is wanted: sevens."""
    return response.count("7") / max(len(response), 1)


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Of two random texts the one with the larger share of sevens is chosen."""
    rng, found = np.random.default_rng(seed), list[dict[str, str]]()
    while len(found) < count:
        one, other = text(rng), text(rng)
        if rng.random() < 0.7:
            place = int(rng.integers(len(one)))
            one = one[:place] + "7" + one[place:]
        better, worse = sorted((one, other), key=gold, reverse=True)
        if gold(better) > gold(worse):
            found.append({"prompt": f"{rng.integers(10)}+{rng.integers(10)}=", "chosen": better, "rejected": worse})
    return found


def test_sft_learns_sums(tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "response": f"#{(a + b) % 10}"} for a in range(10) for b in range(10)]
    settings = SIZES | {"training.steps": 300, "run.dir": str(tmp_path / "run")}
    result = dapo.sft(model(), rows, settings, tokenizer=TOKENIZER, listener=QuietListener(), heldout=rows)
    asked = [{"prompt": row["prompt"], "answer": row["response"]} for row in rows]
    found = dapo.evaluate(str(result.model_path), asked, lambda response, answer: response == answer, max_tokens=8)
    assert result.summary["loss_after"] < 0.1 and found.metrics["avg@1"].value > 0.9


def test_dpo_prefers_what_was_preferred(tmp_path):
    settings = SIZES | {"training.steps": 150, "training.learning_rate": 3e-4, "run.dir": str(tmp_path / "run")}
    result = dapo.dpo(
        model(), pairs(1200, 0), settings, tokenizer=TOKENIZER, listener=QuietListener(), heldout=pairs(200, 1)
    )
    assert result.summary["accuracy_before"] == 0.5 and result.summary["accuracy_low_after"] > 0.75


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A reward model for sevens."""
    folder = tmp_path_factory.mktemp("rm") / "run"
    settings = SIZES | {"training.steps": 300, "run.dir": str(folder)}
    return dapo.reward_model(
        model(), pairs(3000, 0), settings, tokenizer=TOKENIZER, listener=QuietListener(), heldout=pairs(300, 1)
    )


def test_a_reward_model_tells_what_is_separable(judge):
    assert judge.summary["accuracy_before"] == 0.5
    assert judge.summary["accuracy_after"] > 0.9 and judge.summary["calibration_error_after"] < 0.15


def test_a_policy_earns_more_of_what_its_learned_reward_stands_for(judge, tmp_path):
    settings = {
        "reward.kind": "model",
        "reward.path": str(judge.model_path),
        "reward.template": "plain",
        "reward.max_length": 48,
        "data.template": "plain",
        "algorithm.filter_groups.metric": "score",
        "algorithm.overlong_buffer.enable": False,
        "rollout.max_response_length": 12,
        "training.steps": 30,
        "training.learning_rate": 1e-3,
        "run.dir": str(tmp_path / "run"),
    }
    prompts = [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)]
    dapo.train(model(), prompts, None, settings, tokenizer=TOKENIZER, listener=QuietListener())

    def earned(step: int) -> float:
        return fmean(gold(s["response"]) for s in read_samples(samples_path(tmp_path / "run/samples", step)))

    assert earned(30) > earned(1) + 0.2
