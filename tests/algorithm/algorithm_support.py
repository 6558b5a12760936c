"""Builders, and a second implementation of the objective: plain Python, one token at a time, derivative by hand."""

from __future__ import annotations

import importlib
import math
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings

from dapo.records import Group, Prompt, Reward, Sample

MODULES = ("shaping", "advantage", "admission", "objective", "kl", "kin", "gae")
MODES = ("token-mean", "prompt-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")

# no database: a mutant's counterexample is not to be replayed on the real code
properties = settings(
    max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def load_modules(package: str) -> SimpleNamespace:
    """The modules of a package that looks like ``dapo.algorithm``."""
    return SimpleNamespace(**{name: importlib.import_module(f"{package}.{name}") for name in MODULES})


def make_group(
    rewards: list[float | None],
    *,
    correct: list[bool | None] | None = None,
    lengths: list[int] | None = None,
    truncated: tuple[int, ...] = (),
    draw: int = 0,
    row: int = 0,
) -> Group:
    """A scored group. Reward None: scoring failed. ``correct`` is by default the sign of the reward."""
    samples = []
    for i, value in enumerate(rewards):
        if value is None:
            reward = Reward(None, math.nan, error="no answer from the scorer")
        else:
            reward = Reward(value > 0 if correct is None else correct[i], value)
        length = lengths[i] if lengths else 3
        samples.append(
            Sample(
                request_id=draw,
                index=i,
                token_ids=np.arange(length, dtype=np.int32),
                logprobs=np.full(length, -1.0, np.float32),
                versions=np.zeros(length, np.int32),
                finish_reason="length" if i in truncated else "stop",
                reward=reward,
            )
        )
    return Group(draw, Prompt(row, "2+2?", (1, 2)), tuple(samples))


def with_shaped(group: Group, values: list[float] | None = None) -> Group:
    """``group`` with its raw rewards (or ``values``) as shaped ones."""
    values = values or [s.reward.value if s.scored else math.nan for s in group.samples]
    samples = (replace(s, shaped_reward=v) for s, v in zip(group.samples, values, strict=True))
    return replace(group, samples=tuple(samples))


@dataclass
class Token:
    """One response token of an optimizer mini-batch."""

    logprob: float
    behaviour: float
    proximal: float
    reference: float
    entropy: float
    advantage: float
    importance: float
    in_loss: bool
    sample: int
    group: int


def random_tokens(seed: int, *, groups: int = 3, samples: int = 3, longest: int = 5) -> list[Token]:
    """A mini-batch of whole groups with all cases of the clip in it; some tokens and whole responses are masked."""
    rng = random.Random(seed)
    tokens = []
    for sample in range(groups * samples):
        advantage = rng.choice([-1.5, -0.3, 0.4, 2.0])
        whole = rng.random() < 0.8
        for _ in range(rng.randint(1, longest)):
            proximal = -rng.uniform(0.05, 4)
            tokens.append(
                Token(
                    logprob=proximal + rng.gauss(0, 0.6) + rng.choice([0, 0, 0, 2.5]),
                    behaviour=proximal + rng.gauss(0, 0.3),
                    proximal=proximal,
                    reference=proximal + rng.gauss(0, 0.4),
                    entropy=rng.uniform(0, 2),
                    advantage=advantage,
                    importance=rng.uniform(0.3, 2),
                    in_loss=whole and rng.random() < 0.9,
                    sample=sample,
                    group=sample // samples,
                )
            )
    return tokens


def column(tokens: list[Token], name: str) -> torch.Tensor:
    """One field of all tokens as a tensor, floats in float64."""
    values = [getattr(t, name) for t in tokens]
    return torch.tensor(values, dtype=torch.float64 if isinstance(values[0], float) else None)


def weights_of(algo: SimpleNamespace, tokens: list[Token], mode: str, *, num_samples: int = 9) -> torch.Tensor:
    """``token_weights`` of the mini-batch, with a constant of 7."""
    return algo.objective.token_weights(
        mode,
        mask=column(tokens, "in_loss"),
        sample_ids=column(tokens, "sample"),
        group_ids=column(tokens, "group"),
        num_samples=num_samples,
        constant=7,
    )


def inputs_of(algo: SimpleNamespace, tokens: list[Token], weights: torch.Tensor) -> Any:
    """``TokenInputs`` of (a part of) the mini-batch."""
    return algo.objective.TokenInputs(
        behaviour_logprobs=column(tokens, "behaviour"),
        proximal_logprobs=column(tokens, "proximal"),
        advantages=column(tokens, "advantage"),
        importance=column(tokens, "importance"),
        mask=column(tokens, "in_loss"),
        weights=weights,
        sample_ids=column(tokens, "sample"),
        group_ids=column(tokens, "group"),
        reference_logprobs=column(tokens, "reference"),
    )


# --- the second implementation ------------------------------------------------------------------------------------


def plain_token_loss(
    t: Token, *, low: float, high: float, c: float | None, kl_coef: float = 0.0, kind: str = "k3"
) -> tuple[float, float]:
    """The loss of one token and its derivative by the log-probability, case by case from Eq. 8 and 10."""
    ratio, a = math.exp(t.logprob - t.proximal), t.advantage
    if a > 0:
        clipped = ratio > 1 + high
        loss = -(1 + high) * a if clipped else -ratio * a
    else:
        clipped = ratio < 1 - low
        loss = (1 - low) * -a if clipped else ratio * -a
        if c is not None and loss > c * -a:
            loss, clipped = c * -a, True
    slope = 0.0 if clipped else -ratio * a
    d = t.logprob - t.reference
    kl, kl_slope = {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d))}[kind]
    return t.importance * loss + kl_coef * kl, t.importance * slope + kl_coef * kl_slope


def plain_weight(t: Token, tokens: list[Token], mode: str, *, num_samples: int = 9, constant: float = 7) -> float:
    """The weight of one token, counted out."""
    if not t.in_loss:
        return 0.0
    kept = [u for u in tokens if u.in_loss]
    if mode == "token-mean":
        return 1 / len(kept)
    if mode == "prompt-mean":
        return 1 / len([u for u in kept if u.group == t.group]) / len({u.group for u in kept})
    if mode == "seq-mean-token-mean":
        return 1 / len([u for u in kept if u.sample == t.sample]) / len({u.sample for u in kept})
    if mode == "seq-mean-token-sum":
        return 1 / len({u.sample for u in kept})
    return 1 / (constant * num_samples)


def plain_objective(tokens: list[Token], mode: str, **options: Any) -> tuple[float, list[float]]:
    """Loss and gradient of a whole mini-batch."""
    loss, gradient = 0.0, []
    for t in tokens:
        weight = plain_weight(t, tokens, mode)
        value, slope = plain_token_loss(t, **options) if t.in_loss else (0.0, 0.0)
        loss += weight * value
        gradient.append(weight * slope)
    return loss, gradient
