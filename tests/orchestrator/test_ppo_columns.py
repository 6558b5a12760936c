"""Rewards, advantages and returns of tokens as PPO makes them of whole rollouts: by hand, and beside a second
implementation that goes through one episode at a time in plain Python."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dapo.config import Config, build_config, nested
from dapo.model.loading import load_model
from dapo.orchestrator.batch_builder import BatchBuilder
from dapo.orchestrator.ppo import critic_metrics
from dapo.records import NOBODY, Group, Prompt, Reward, Sample, TokenBatch, Turn
from dapo.training.critic import make_critic
from dapo.training.learner import LocalLearner
from dapo.training.trainer import Trainer
from helpers import random_model

BASE = {
    "model.path": "tiny",
    "algorithm.kind": "ppo",
    "algorithm.overlong_buffer.enable": False,
    "algorithm.critic.whiten": False,
    "rollout.samples_per_prompt": 2,
    "environment.name": "a.py:B",
}


def config_of(**changes: Any) -> Config:
    return build_config(nested(BASE | {key.replace("__", "."): value for key, value in changes.items()}))


def conversation(turns: list[tuple[int, int, float, str]], versions: int = 0, **rest: Any) -> dict[str, Any]:
    """Fields of a sample. ``turns``: tokens of the environment before it, its own, its reward, why it ended."""
    made, marks = list[Turn](), list[int]()
    for before, own, reward, stop in turns:
        marks += [NOBODY] * before + [versions] * own
        made.append(Turn(len(marks) - own, len(marks), stop, reward))
    ids = np.arange(len(marks), dtype=np.int32)
    logprobs = np.where(np.array(marks, int) == NOBODY, 0, -1.0 - 0.1 * ids).astype(np.float32)
    arrays = {"token_ids": ids, "logprobs": logprobs, "versions": np.array(marks, np.int32)}
    return arrays | {"turns": tuple(made), "finish_reason": "stop"} | rest


def episode(index: int, reward: float | None, *parts: list[tuple[int, int, float, str]], **rest: Any) -> Sample:
    verdict = Reward(None, 0.0, error="no") if reward is None else Reward(None, reward)
    head, *more = (Sample(0, index, **conversation(turns, **rest), reward=verdict) for turns in parts)
    own = (replace(one, prompt_ids=np.array([1, 2 + k], np.int32)) for k, one in enumerate(more))
    return replace(head, more=tuple(own))


def columns_of(batch: TokenBatch, **values: list[float]) -> TokenBatch:
    """``values``: of the tokens that were sampled; at the others stands what nobody may read."""
    found = {}
    for name, numbers in values.items():
        column = np.full(batch.num_response_tokens, math.nan, np.float32)
        column[batch.sampled] = numbers
        found[name] = column
    return batch.with_columns(**found)


TWO_TURNS = [(0, 2, 0.5, "stop"), (3, 1, 0.0, "stop")]


@pytest.mark.parametrize(
    ("changes", "cut", "rewards", "behind"),
    [
        ({}, False, [0, 0, 1.0], 0.0),
        ({"environment__credit": "turn"}, False, [0, 0.5, 0.5], 0.0),
        ({}, True, [0, 0, 1.0], 0.0),
        ({"algorithm__critic__bootstrap": True}, False, [0, 0, 1.0], 0.0),
        ({"algorithm__critic__bootstrap": True}, True, [0, 0, 0.0], 0.7),
        ({"algorithm__critic__bootstrap": True, "environment__credit": "turn"}, True, [0, 0.5, 0.0], 0.7),
    ],
)
def test_two_turns_by_hand(changes: dict[str, Any], cut: bool, rewards: list[float], behind: float) -> None:
    """Two tokens, three of the environment, one more; worth 1, of which 0.5 for the first turn. What follows a token is
    the next one that was sampled, and gamma and lambda count no others. A planted cut is worth something behind it
    where that was asked for, and then it has no score."""
    gamma, lam, v = 0.9, 0.5, [0.2, 0.4, 0.1]
    builder = BatchBuilder(config_of(algorithm__critic__gamma=gamma, algorithm__critic__lam=lam, **changes))
    group = Group(0, Prompt(0, "", (1,)), (episode(0, 1.0, TWO_TURNS, finish_reason="length" if cut else "stop"),))
    batch = columns_of(builder.build([group]), values=v, after=[0.3, 0.9, 0.7])
    _, batch = builder.finish([group], batch)
    d = [rewards[0] + gamma * v[1] - v[0], rewards[1] + gamma * v[2] - v[1], rewards[2] + gamma * behind - v[2]]
    wanted = [d[0] + 0.45 * d[1] + 0.45**2 * d[2], d[1] + 0.45 * d[2], d[2]]
    assert batch.columns["advantages"].tolist() == pytest.approx([*wanted[:2], 0, 0, 0, wanted[2]])
    assert batch.columns["returns"].tolist() == pytest.approx([*np.add(wanted, v)[:2], 0, 0, 0, wanted[2] + v[2]])


def test_stale_tokens_are_those_of_the_present_policy_and_critic() -> None:
    """In the ratio and in the KL stands the policy that training on the batch begins with, whatever the engine sampled
    from; values, V_old too, are those of the critic then. With lambda 0 an advantage is a reward and two values."""
    config = config_of(
        **{"algorithm__kl": {"mode": "reward", "coef": 0.5}, "rollout__max_staleness": 1, "environment__name": None},
        algorithm__critic__lam=0.0,
    )
    model = load_model(random_model("qwen2"))
    critic = make_critic(config, model)
    assert critic is not None
    trainer, builder = Trainer(model, config.training, 1.0), BatchBuilder(config)
    learner = LocalLearner(trainer, config, builder.kl, critic=critic)
    torch.manual_seed(0)
    with torch.no_grad():  # both have learned something since
        critic.trainer.policy.model.score.weight.normal_()
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    samples = [replace(episode(i, 1.0, [(0, n, 0.0, "stop")]), turns=()) for i, n in enumerate((3, 2))]
    groups = [Group(0, Prompt(0, "", (5, 6)), tuple(samples))]
    batch = learner.annotated(builder.build(groups))
    now, values = trainer.logprobs(batch).numpy(), critic.columns(batch)["values"]
    _, batch = builder.finish(groups, batch)
    inputs = learner.inputs(batch)
    assert inputs.proximal_logprobs.numpy() == pytest.approx(now, abs=1e-6)
    assert inputs.behaviour_logprobs.tolist() == batch.behaviour_logprobs.tolist() != now.tolist()
    assert critic.inputs(batch).old.numpy() == pytest.approx(values, abs=1e-6) and values.all()
    kl = now - batch.columns["reference"]
    following = np.array([values[1], values[2], 0, values[4], 0])
    wanted = -0.5 * kl + np.array([0, 0, 1, 0, 1]) + following - values
    assert batch.columns["advantages"] == pytest.approx(wanted, abs=1e-5) and np.abs(kl).max() > 1e-3


def test_what_is_told_of_a_step_is_of_its_loss_tokens() -> None:
    """Returns 1, 2, 4 and values 1, 2, 3: errors 0, 0, 1, and a variance of 2 / 9 against one of 14 / 9."""
    batch = BatchBuilder(config_of()).build(
        [Group(0, Prompt(0, "", (1,)), (episode(0, 1.0, [(1, 3, 0.0, "stop"), (2, 1, 0.0, "length")]),))]
    )
    values, returns, advantages = [1.0, 2.0, 3.0, 50.0], [1.0, 2.0, 4.0, -50.0], [-1.0, 0.0, 4.0, 90.0]
    found = critic_metrics(columns_of(batch, values=values, returns=returns, advantages=advantages))
    assert found == pytest.approx(
        {
            "critic/explained_variance": 1 - 2 / 14,
            "advantage/mean": 1,
            "advantage/std": math.sqrt(14 / 3),
            "advantage/mean_abs": 5 / 3,
        }
    )


def test_a_step_that_kept_no_group_is_no_update() -> None:
    """With filter_groups.on_starved: train."""
    builder = BatchBuilder(config_of())
    groups, batch = builder.finish([], columns_of(builder.build([]), values=[], after=[]))
    assert groups == [] and batch.columns["advantages"].shape == (0,) and not list(builder.minibatches(batch))


# --- a second implementation --------------------------------------------------------------------------------------


def random_rollout(rng: random.Random) -> list[Group]:
    """Episodes in one conversation or two, some cut, some without a verdict; turns without a token, too, whose rewards
    come at the end."""
    groups = []
    for draw in range(rng.randint(1, 4)):
        samples = []
        for index in range(rng.randint(1, 3)):
            parts = [
                [
                    (rng.randint(0, 2), rng.randint(0, 3), rng.choice([0.0, 0.3, -0.2]), rng.choice(["stop", "length"]))
                    for _ in range(rng.randint(1, 3))
                ]
                for _ in range(rng.randint(1, 2))
            ]
            reward = None if rng.random() < 0.2 else rng.uniform(-1, 1)
            rest = {"finish_reason": rng.choice(["stop", "length"])}
            samples.append(episode(index, reward, *parts, **rest))
        groups.append(Group(draw, Prompt(draw, "", (1, 9)), tuple(samples)))
    return groups


def plain(groups: list[Group], config: Config, coef: float, known: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Of each token that was sampled, in order: advantage, return, and whether it is in the loss."""
    critic, at = config.algorithm.critic, 0
    for sample in (s for g in groups for s in g.samples if s.reward and s.reward.error is None):
        turns = [turn for part in sample.parts for turn in part.turns]
        tokens = [(turn, token == turn.end - 1) for turn in turns for token in range(turn.start, turn.end)]
        here = slice(at, at + len(tokens))
        at += len(tokens)
        values, after = known["values"][here], known["after"][here]
        logprobs = [float(x) for part in sample.parts for x in part.logprobs[part.versions != NOBODY]]
        assert sample.reward is not None
        left = sample.reward.value
        rewards = [0.0] * len(tokens)
        for t, (turn, last) in enumerate(tokens):
            if config.algorithm.kl.mode == "reward":
                rewards[t] -= coef * (logprobs[t] - known["reference"][here][t])
            if last and config.environment.credit == "turn":
                rewards[t] += turn.reward
                left -= turn.reward
        goes_on = critic.bootstrap and sample.finish_reason == "length"
        if tokens and not goes_on:
            rewards[-1] += left
        following = [*values[1:], after[-1] if goes_on else 0.0] if tokens else []
        deltas = [r + critic.gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
        in_loss = not (config.algorithm.overlong_filtering and sample.finish_reason == "length")
        for t, (turn, _) in enumerate(tokens):
            advantage = sum((critic.gamma * critic.lam) ** k * d for k, d in enumerate(deltas[t:]))
            yield {"a": advantage, "r": advantage + values[t], "in": in_loss and turn.stop != "length"}


@settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_a_second_implementation(
    seed: int, by_turn: bool, kl: bool, bootstrap: bool, whiten: bool, filtering: bool
) -> None:
    """Whatever is on together. Whitened over all loss tokens of the rollout, each once: the mini-batches are cut from
    what is whitened already."""
    rng = random.Random(seed)
    changes = {
        "environment.credit": "turn" if by_turn else "outcome",
        "algorithm.kl": {"mode": "reward", "coef": 0.3} if kl else {"mode": "off"},
        "algorithm.critic": {
            "bootstrap": bootstrap,
            "whiten": whiten,
            "gamma": rng.choice([1.0, 0.9]),
            "lam": rng.choice([1.0, 0.5, 0.0]),
        },
        "algorithm.overlong_filtering": filtering,
    }
    config = build_config(nested({k: v for k, v in BASE.items() if not k.startswith("algorithm.critic")} | changes))
    groups, builder = random_rollout(rng), BatchBuilder(config)
    batch = builder.build(groups)
    count = int(batch.sampled.sum())
    known = {
        name: np.array([rng.gauss(0, 1) for _ in range(count)], np.float32).tolist() for name in ("values", "after")
    }
    known["reference"] = np.array([rng.gauss(-1, 1) for _ in range(count)], np.float32).tolist()
    shaped, batch = builder.finish(groups, columns_of(batch, **known))
    tokens = list(plain(groups, config, 0.3, known))
    advantages = [token["a"] for token in tokens]
    kept = [token["a"] for token in tokens if token["in"]]
    if whiten:
        mean, std = (statistics.mean(kept), statistics.stdev(kept)) if len(kept) > 1 else (0.0, 0.0)
        advantages = [(a - mean) / (std + 1e-6) if std else 0.0 for a in advantages]
    found = {name: batch.columns[name][batch.sampled].tolist() for name in ("advantages", "returns")}
    assert batch.mask[batch.sampled].tolist() == [token["in"] for token in tokens]
    assert found["returns"] == pytest.approx([token["r"] for token in tokens], abs=1e-5)
    assert found["advantages"] == pytest.approx(advantages, abs=1e-5)
    sizes = np.cumsum([0, *(s.length for g in shaped for s in g.scored)])
    means = [statistics.fmean(advantages[a:b] or [0.0]) for a, b in pairwise(sizes)]
    assert [s.advantage for g in shaped for s in g.scored] == pytest.approx(means, abs=1e-5)
    again = [mini.columns["advantages"][mini.sampled] for mini in batch.minibatches(1)]
    assert np.concatenate(again or [[]]).tolist() == found["advantages"]
