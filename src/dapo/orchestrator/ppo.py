"""What PPO makes of an annotated batch: rewards, advantages and returns of tokens, from the values of a critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from dapo.algorithm.advantage import whiten
from dapo.algorithm.gae import bootstrapped, explained_variance, gae, token_rewards
from dapo.algorithm.kl import kl_estimate
from dapo.config import AlgorithmConfig
from dapo.records import FloatArray, Group, TokenBatch


def ppo_columns(
    groups: Sequence[Group], batch: TokenBatch, algorithm: AlgorithmConfig, coef: float
) -> tuple[list[Group], dict[str, FloatArray]]:
    """The groups, whose samples have the mean advantage of their tokens, and columns ``advantages`` and ``returns``.

    Args:
        groups: with shaped rewards; their scored samples are those of ``batch``.
        batch: with ``values`` and ``after``, and ``reference`` for a KL in the reward.
        coef: beta of that.
    """
    section, kl = algorithm.critic, algorithm.kl
    lengths, scored = torch.from_numpy(batch.response_lengths), [s for g in groups for s in g.scored]
    scores = torch.tensor([s.shaped_reward for s in scored], dtype=torch.float64)
    goes_on = torch.tensor([section.bootstrap and s.truncated for s in scored], dtype=torch.bool)
    values, after = (torch.from_numpy(batch.columns[name]).double() for name in ("values", "after"))
    taken = None
    if kl.mode == "reward":
        reference = torch.from_numpy(batch.columns["reference"])
        taken = kl_estimate(torch.from_numpy(batch.proximal), reference, kl.estimator)
    # With both, the value of a cut response would be its score and a value beside it, which has no bound.
    rewards = token_rewards(scores.masked_fill(goes_on, 0), lengths, taken, coef)
    following = bootstrapped(after, lengths, goes_on)
    advantages = gae(rewards, values, following, lengths, gamma=section.gamma, lam=section.lam)
    returns = advantages + values
    if section.whiten:
        advantages = whiten(advantages[torch.from_numpy(batch.mask)], algorithm.advantage.epsilon, of=advantages)
    sums = np.bincount(batch.sample_ids, advantages.numpy(), batch.num_samples)
    means = iter((sums / np.maximum(batch.response_lengths, 1)).tolist())
    found = [
        replace(g, samples=tuple(replace(s, advantage=next(means)) if s.scored else s for s in g.samples))
        for g in groups
    ]
    return found, {"advantages": advantages.float().numpy(), "returns": returns.float().numpy()}


def critic_metrics(batch: TokenBatch) -> dict[str, float | None]:
    """Of the loss tokens of a step: what the critic knew before its updates, and the advantages as trained on."""
    if not batch.mask.any():
        return {}
    kept = {name: torch.from_numpy(values[batch.mask]) for name, values in batch.columns.items()}
    advantages = kept["advantages"].double()
    return {
        "critic/explained_variance": explained_variance(kept["values"], kept["returns"]),
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std(correction=0)),
        "advantage/mean_abs": float(advantages.abs().mean()),
    }
