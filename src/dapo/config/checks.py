"""Combinations of keys that run but probably are not what was meant."""

from __future__ import annotations

from collections.abc import Sized

from dapo.config.tree import Config
from dapo.util.escapes import eaten_in


def warnings_for(config: Config, heldout: Sized | None = None) -> list[str]:
    """Combinations that run but probably are not what was meant, and texts whose backslashes were eaten.
    ``heldout``: rows from Python in place of ``evaluation.data``."""
    rows = config.evaluation.data if heldout is None else heldout
    found = eaten_in(config.model_dump(mode="json"))
    if config.training.steps and config.updates_per_step == 1:
        found.append(
            "one update per rollout step: the ratio stays 1 and clipping does nothing; the paper makes 16 (smaller "
            "training.groups_per_update, or more training.epochs_per_rollout)"
        )
    if config.evaluation.every and not rows:
        found.append("evaluation.every: has no effect without evaluation.data (files of held-out rows)")
    if config.evaluation.patience and not (config.evaluation.every and rows):
        found.append("evaluation.patience: has no effect without evaluation.data and evaluation.every")
    if config.data.system is not None and config.data.template == "plain":
        found.append("data.system: has no effect with data.template=plain, which has no system message")
    training = config.training
    if training.final_learning_rate is not None and training.final_learning_rate > training.learning_rate:
        found.append(
            f"training.final_learning_rate={training.final_learning_rate:g} is above training.learning_rate="
            f"{training.learning_rate:g}: the rate rises over the run"
        )
    if 0 < training.steps <= training.warmup_steps:
        steps, warmup, rate = training.steps, training.warmup_steps, training.learning_rate
        found.append(
            f"training.warmup_steps={warmup} is not below training.steps={steps}: the learning rate rises during the "
            f"whole run, to at most {rate * steps / warmup:.3g}; use training.warmup_steps={steps // 10}"
        )
    if config.runtime.deterministic and training.minutes is not None and training.final_learning_rate is not None:
        found.append(
            "runtime.deterministic: with training.minutes the rate that falls to training.final_learning_rate follows "
            "the clock, so no two runs are the same; use training.steps alone"
        )
    low, high = config.algorithm.clip_ratio_low, config.algorithm.clip_ratio_high
    if high < low:
        found.append(f"algorithm.clip_ratio_high={high} is below clip_ratio_low={low}: the opposite of Clip-Higher")
    rewards = config.reward.rewards.values() if config.reward.kind == "compose" else (config.reward,)
    if config.runtime.deterministic and any(reward.kind == "model" for reward in rewards):
        found.append(
            "runtime.deterministic: a reward model's last bits depend on what else is in its batch; so will the run's"
        )
    kl = config.algorithm.kl
    if kl.mode == "loss" and kl.estimator == "k1":
        found.append("algorithm.kl: k1 in the loss has a gradient of zero mean; use k2 or k3")
    return found
