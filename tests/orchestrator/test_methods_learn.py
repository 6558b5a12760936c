"""Each method learns, by the algorithm of its preset, to write sevens; and PPO holds a KL where it is told to."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from dapo.commands.demo.task import make_model, make_tokenizer
from dapo.config import build_config, load_config
from dapo.observe.progress import QuietListener
from dapo.orchestrator import batch_builder
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.launch import run_experiment
from dapo.records import Reward
from run_cases import PROMPTS, steps_of

pytestmark = pytest.mark.nightly

FOLDER = Path(__file__).parents[2] / "recipes/method"
METHODS = ("grpo", "dr-grpo", "rloo", "reinforce-pp", "gspo", "cispo", "ppo")


def sevens(prompt: str, response: str) -> Reward:
    """The share of sevens; right with at least two."""
    count = response.count("7")
    return Reward(count >= 2, count / max(len(response), 1))


def learn(name: str, folder: Path, steps: int, rate: float = 1e-3, **algorithm: Any) -> list[dict[str, Any]]:
    """A run with the algorithm of a preset on an untrained model, 128 samples a step; its metrics."""
    preset = load_config(FOLDER / f"{name}.yaml")
    given = preset.algorithm.model_dump() | {"overlong_buffer": {"enable": False}} | algorithm
    ppo, updates = name == "ppo", preset.updates_per_step
    groups, each = (128, 1) if ppo else (16, 8)
    tree = {
        "seed": 3,
        "model": {"path": "tiny"},
        "data": {"template": "plain", "max_prompt_length": 8},
        "algorithm": given,
        "rollout": {"prompts_per_step": groups, "samples_per_prompt": each, "max_response_length": 12},
        "training": {"steps": steps, "groups_per_update": groups // updates, "learning_rate": rate},
        "run": {"dir": str(folder), "resources_every_s": 0},
    }
    tree["training"] |= {"tokens_per_micro_batch": 4096, "warmup_steps": 2, "weight_decay": 0.0}
    tokenizer = make_tokenizer()
    inputs = RunOverrides(model=make_model(0, len(tokenizer)), tokenizer=tokenizer, rows=PROMPTS * 4, reward=sevens)
    run_experiment(build_config(tree), QuietListener(), inputs)
    return steps_of(folder)


@pytest.mark.parametrize("name", METHODS)
def test_each_method_learns(tmp_path: Path, name: str) -> None:
    found = [step["reward/mean"] for step in learn(name, tmp_path, 12)]
    print(name, [round(value, 3) for value in found])
    assert found[0] < 0.1 and fmean(found[-3:]) > 0.9


def test_a_critic_of_a_policy_that_stands_still_learns_what_its_states_are_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the mean reward of all samples that have as many tokens and sevens so far."""
    found, seven, original = list[list[float]](), make_tokenizer().convert_tokens_to_ids("7"), batch_builder.ppo_columns

    def kept(groups: Any, batch: Any, *rest: Any) -> Any:
        values = iter(batch.columns["values"].tolist())
        for sample in (sample for group in groups for sample in group.scored):
            sevens = np.cumsum(sample.token_ids == seven) - (sample.token_ids == seven)
            found.extend([n, int(count), sample.shaped_reward, next(values)] for n, count in enumerate(sevens))
        return original(groups, batch, *rest)

    monkeypatch.setattr(batch_builder, "ppo_columns", kept)
    critic = {"learning_rate": 5e-4, "warmup_steps": 40}
    explained = [step["critic/explained_variance"] for step in learn("ppo", tmp_path, 40, critic=critic)]
    place, count, reward, value = np.array(found).T
    state, last = (place * 100 + count).astype(int), slice(-len(found) // 8, None)  # of the last five steps
    sums, sizes = np.bincount(state, reward), np.bincount(state)
    truth = sums[state] / sizes[state]
    known = 1 - np.var(reward[last] - truth[last]) / np.var(reward[last])
    print(f"explained {fmean(explained[-5:]):.2f} of {known:.2f}")
    assert fmean(explained[-5:]) == pytest.approx(known, abs=0.1) and known > 0.3
    assert value[last].mean() == pytest.approx(truth[last].mean(), abs=0.02)
    assert np.corrcoef(value[last], truth[last])[0, 1] > 0.85


def test_ppo_with_an_adaptive_kl_holds_its_target(tmp_path: Path) -> None:
    """Nats per token, as the mean over the last steps: within 30%. Without the term the policy goes on."""
    kl = {"mode": "reward", "estimator": "k1", "coef": 0.1, "target": 0.1, "horizon": 200}
    steps = learn("ppo", tmp_path / "held", 40, rate=3e-4, kl=kl)
    print([(round(s["kl/reference"], 3), round(s["kl/coef"], 3)) for s in steps if "kl/reference" in s])
    assert fmean(step["kl/reference"] for step in steps[-15:]) == pytest.approx(0.1, rel=0.3)
