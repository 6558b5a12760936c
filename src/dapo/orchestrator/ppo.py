"""What PPO makes of an annotated batch: rewards, advantages and returns of tokens, from the values of a critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dapo.algorithm.advantage import whiten
from dapo.algorithm.gae import bootstrapped, explained_variance, gae, token_rewards
from dapo.algorithm.kl import kl_estimate
from dapo.config import Config
from dapo.records import FloatArray, Group, Sample, TokenBatch


def ppo_columns(
    groups: Sequence[Group], batch: TokenBatch, config: Config, coef: float
) -> tuple[list[Group], dict[str, FloatArray]]:
    """The groups, whose samples have the mean advantage of their tokens, and columns ``advantages`` and ``returns``.

    An episode is one response: the tokens that the model sampled, end to end. What the environment said in between is
    part of the state that the next one was sampled in.

    Args:
        groups: with shaped rewards; their scored samples are those of ``batch``.
        batch: with ``values`` and ``after``, and ``reference`` for a KL in the reward.
        coef: beta of that.
    """
    section, kl = config.algorithm.critic, config.algorithm.kl
    scored, sampled = [s for g in groups for s in g.scored], torch.from_numpy(batch.sampled)
    lengths = torch.tensor([s.length for s in scored], dtype=torch.int64)
    goes_on = torch.tensor([section.bootstrap and s.truncated for s in scored], dtype=torch.bool)
    values, after = (torch.from_numpy(batch.columns[name])[sampled].double() for name in ("values", "after"))
    taken = None
    if kl.mode == "reward":
        policy, reference = (torch.from_numpy(x)[sampled] for x in (batch.proximal, batch.columns["reference"]))
        taken = kl_estimate(policy, reference, kl.estimator)
    by_turn = config.environment.credit == "turn"
    paid = [p for s, cut in zip(scored, goes_on.tolist(), strict=True) for p in _payments(s, by_turn, cut)]
    scores, tokens = torch.tensor(paid, dtype=torch.float64).reshape(-1, 2).unbind(1)
    rewards = token_rewards(scores, tokens.long(), taken, coef)
    following = bootstrapped(values, after, lengths, goes_on)
    advantages = gae(rewards, values, following, lengths, gamma=section.gamma, lam=section.lam)
    returns, mask = advantages + values, torch.from_numpy(batch.mask)
    if section.whiten:
        advantages = whiten(advantages[mask[sampled]], config.algorithm.advantage.epsilon, of=advantages)
    means = iter([float(part.sum()) / max(len(part), 1) for part in torch.split(advantages, lengths.tolist())])
    found = [
        replace(g, samples=tuple(replace(s, advantage=next(means)) if s.scored else s for s in g.samples))
        for g in groups
    ]
    columns = {"advantages": advantages, "returns": returns}
    return found, {
        name: torch.zeros(len(mask)).masked_scatter(sampled, column.float()).numpy() for name, column in columns.items()
    }


def _payments(sample: Sample, by_turn: bool, goes_on: bool) -> list[tuple[float, int]]:
    """What a sample is paid for, end to end: an amount and the tokens whose last one earns it. The rewards of turns are
    parts of its score, and the rest is for its end; a response that goes on has none there, as it has a value: with
    both, that value would be a score more than itself, and have no bound."""
    turns = [turn for part in sample.parts for turn in part.turns] if by_turn else []
    paid = [(turn.reward, n) for turn in turns if (n := turn.end - turn.start)]  # else no token earns it
    *before, (last, tokens) = paid or [(0.0, sample.length)]
    rest = 0.0 if goes_on else sample.shaped_reward - sum(amount for amount, _ in paid)
    return [*before, (last + rest, tokens)]


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
