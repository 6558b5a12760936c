"""PPO through whole runs: what is trained when, what a checkpoint holds, and what a recipe cannot mean."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dapo.commands.replay.replay import replay
from dapo.config import build_config, nested
from dapo.config.on_resume import may_change
from dapo.errors import ConfigError, NumericalError
from dapo.observe.metrics import read_metrics
from dapo.observe.run_folder import RunFolder
from dapo.orchestrator.batch_builder import own_advantage
from dapo.training.critic import Critic
from dapo.training.trainer import Trainer
from dapo.util.shutdown import Stopped
from run_cases import SETTINGS, Recorder, last_checkpoint, run, steps_of, text_sum, weights_hash, without_times

PPO: dict[str, Any] = {
    "algorithm.kind": "ppo",
    "algorithm.kl.mode": "reward",
    "algorithm.critic.learning_rate": 1e-2,
    "rollout.samples_per_prompt": 1,
    "rollout.prompts_per_step": 8,
    "training.groups_per_update": 4,
    "training.steps": 3,
    "run.save_every": 1,
}


def outcome(folder: Path) -> dict[str, Any]:
    paths = RunFolder(folder)
    checkpoint = last_checkpoint(folder)
    return {
        "weights": weights_hash(paths.model_after),
        "critic": weights_hash(checkpoint / "critic/model"),
        "moments": (checkpoint / "critic/optimizer/trainer.safetensors").read_bytes(),
        "samples": {path.name: path.read_bytes() for path in sorted(paths.samples.glob("step-*"))},
        "metrics": [without_times(entry) for entry in read_metrics(paths.metrics)],
    }


@pytest.mark.parametrize("shared", [False, True])
def test_a_run_that_is_stopped_goes_on_to_the_bit(tmp_path: Path, shared: bool) -> None:
    """Before the critic's update, and between it and the policy's; in a step of the critic alone, too."""
    changes = PPO | {"algorithm.critic.share_backbone": shared, "algorithm.critic.warmup_steps": 1}
    changes |= {"algorithm.kl.target": 0.01, "algorithm.kl.horizon": 50}
    run(tmp_path / "whole", changes)
    wanted = outcome(tmp_path / "whole")
    original = Trainer.update
    for number in (2, 5, 6):  # two updates a step, of the critic alone in the first one
        folder, calls = tmp_path / f"{number}", list[int]()

        def counted(self: Any, *args: Any, at: int = number, calls: list[int] = calls, **kwargs: Any) -> Any:
            calls.append(0)
            if len(calls) == at:
                raise Stopped
            return original(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "update", counted)
            with pytest.raises(Stopped):
                run(folder, changes)
        ahead = json.loads((last_checkpoint(folder) / "critic/ahead.json").read_text())
        assert bool(ahead) is (number == 6)
        run(folder, changes, resume=RunFolder(folder))
        assert outcome(folder) == wanted, number


def test_the_first_steps_are_the_critics_and_metrics_tell_of_it(tmp_path: Path) -> None:
    listener = Recorder()
    run(tmp_path / "run", PPO | {"algorithm.critic.warmup_steps": 2}, listener)
    first, second, third = steps_of(tmp_path / "run")
    assert [s["updates"] for s in (first, second, third)] == [0, 0, 2] and third["updates/total"] == 2
    assert first["version"] == second["version"] == 0 and third["version"] == 1
    assert first["updates/skipped"] == 0 and not [w for w in listener.warnings if "skipped" in w]
    assert first["critic/explained_variance"] == 0 and first["critic/values"] != second["critic/values"] != 0
    for step in (first, second, third):
        assert step["critic/loss"] > 0 < step["critic/grad_norm"] and 0 <= step["critic/clipped"] <= 1
        assert step["advantage/mean"] == pytest.approx(0, abs=1e-6)
        assert step["advantage/std"] == pytest.approx(1, abs=0.02)
    assert first["groups/kept"] == 8  # groups of one, all of them


def test_samples_of_older_weights_are_valued_by_the_present_critic(tmp_path: Path) -> None:
    """Both are trained on them: no step is left out, and none is stale by more than one."""
    changes = {"rollout.max_staleness": 1, "runtime.deterministic": False, "algorithm.critic.learning_rate": 1e-3}
    run(tmp_path / "run", PPO | changes | {"algorithm.kl.mode": "off", "training.steps": 4})
    found = steps_of(tmp_path / "run")
    assert [step["staleness/max"] for step in found] == [0, 1, 1, 1] and found[-1]["updates/total"] == 8
    assert found[0]["critic/values"] != found[-1]["critic/values"] != 0


def test_the_recipe_implies_what_goes_with_a_critic() -> None:
    def of(**changes: Any) -> Any:
        return build_config(nested(SETTINGS | PPO | {"run.dir": "x"} | changes)).algorithm

    assert not of().filter_groups.enable and of().kl.estimator == "k1"
    assert of(**{"algorithm.kl.estimator": "k3"}).kl.estimator == "k3"
    assert of(**{"algorithm.kl.mode": "loss"}).kl.estimator == "k3"
    given = of(**{"algorithm.filter_groups.enable": True, "rollout.samples_per_prompt": 2})
    assert given.filter_groups.enable
    assert of(**{"algorithm.filter_groups.metric": "score"}).filter_groups.metric == "score"
    with pytest.raises(ConfigError, match="filter_groups"):
        of(**{"algorithm.filter_groups": "on"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm.filter_groups.enable": True}, "filter_groups.enable: one sample is never right and wrong"),
        ({"data.sampling": "difficulty"}, "data.sampling: one sample is never right and wrong"),
        ({"algorithm.advantage.kind": "group-mean"}, "advantages come from the critic; leave it out"),
        ({"algorithm.objective": "gspo"}, "advantages of tokens or turns are averaged; .* algorithm.kind=group"),
        (
            {"algorithm.kind": "group", "rollout.samples_per_prompt": 2, "algorithm.objective": "gspo"}
            | {"environment.name": "a.py:B", "environment.credit": "turn"},
            "or credit=outcome",
        ),
        ({"algorithm.critic.share_backbone": True, "algorithm.critic.model": "m"}, "leave critic.model"),
        ({"algorithm.critic.share_backbone": True, "model.lora.rank": 2}, "and model.lora out"),
        ({"algorithm.critic.bootstrap": True}, "so the length punishment would be too"),
        ({"algorithm.kl.reference": "base"}, "use base with model.lora"),
        ({"algorithm.kl.reference": "offload", "model.lora.rank": 2}, "use base with model.lora"),
        ({"runtime.kind": "ray"}, "ppo trains in one process"),
        ({"algorithm.kind": "group"}, r"needs at least 2; the paper uses 16 \(algorithm.kind=ppo"),
        ({"training.tokens_per_micro_batch": 20}, r"\+ 1 \(the critic\) = 21 tokens"),
    ],
)
def test_what_does_not_go_with_ppo_is_refused_with_the_recipe(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_config(nested(SETTINGS | PPO | {"run.dir": "x"} | changes))


def test_an_advantage_from_python_does_not_go_with_ppo() -> None:
    config = build_config(nested(SETTINGS | PPO | {"run.dir": "x"}))
    with pytest.raises(ConfigError, match="advantages come from the critic; leave the function out"):
        own_advantage(config, lambda rewards, epsilon: rewards)


@pytest.mark.parametrize("several", [False, True])
def test_a_critic_that_is_not_finite_is_kept_and_told_and_in_a_row_ends_the_run(tmp_path: Path, several: bool) -> None:
    """Its weights are those before; of a single one the policy's update is made."""
    original, listener, calls = Critic.inputs, Recorder(), list[int]()

    def broken(self: Any, mini: Any) -> Any:
        found = original(self, mini)
        calls.append(0)
        if several or len(calls) == 1:
            found.returns.fill_(float("nan"))
        return found

    ends = pytest.raises(NumericalError, match="were not finite") if several else nullcontext()
    with pytest.MonkeyPatch.context() as patch, ends:
        patch.setattr(Critic, "inputs", broken)
        run(tmp_path / "run", PPO | {"training.max_skipped_updates": 2, "training.steps": 2}, listener)
    assert list((tmp_path / "run/faults/critic").iterdir())
    if not several:
        first, second = steps_of(tmp_path / "run")
        assert (first["critic/skipped"], second["critic/skipped"], first["updates"]) == (0.5, 0, 2)
        assert sum("update of the critic was skipped" in text for text in listener.warnings) == 1


def test_a_replay_says_why_not_and_a_critic_stays_what_it_is(tmp_path: Path) -> None:
    run(tmp_path / "run", PPO | {"training.steps": 1})
    with pytest.raises(ConfigError, match="values of its critic are not kept"):
        replay(tmp_path / "run", 1)
    fixed = ("algorithm.kind", "algorithm.critic.model", "algorithm.critic.share_backbone", "algorithm.kl.reference")
    assert not any(may_change(key, deterministic=False) for key in fixed)
    assert may_change("algorithm.critic.learning_rate", deterministic=True)


def test_a_critic_may_begin_as_a_reward_model_and_the_policy_with_an_adapter(tmp_path: Path) -> None:
    from stage_cases import run as run_stage

    run_stage("reward_model", tmp_path / "reward", {"training.steps": 1})
    changes = PPO | {"algorithm.critic.model": str(tmp_path / "reward/model-after"), "training.steps": 2}
    run(tmp_path / "run", changes, reward=text_sum)
    assert steps_of(tmp_path / "run")[0]["critic/values"] != 0
    run(tmp_path / "policy", PPO | {"training.steps": 2})
    assert weights_hash(last_checkpoint(tmp_path / "run") / "critic/model") != weights_hash(
        last_checkpoint(tmp_path / "policy") / "critic/model"
    )
