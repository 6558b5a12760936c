"""PPO: rewards of tokens, generalised advantage estimation, and the loss of a critic.

A value V_t belongs to the state in which response token t is sampled. S responses stand end to end, with R tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.algorithm.objective import Stats, average


def token_rewards(scores: Tensor, lengths: Tensor, kl: Tensor | None = None, coef: float = 0.0) -> Tensor:
    """``[R]`` float64: -coef KL_t of each token, and the score of a response added at its last one (arXiv 2203.02155).

    Args:
        scores: ``[S]``. A response without a token has none.
        lengths: ``[S]``, tokens.
        kl: ``[R]`` estimates; None: no KL.
    """
    tokens = int(lengths.sum())
    rewards = torch.zeros(tokens, dtype=torch.float64) if kl is None else -coef * kl.double()
    ends = lengths.cumsum(0) - 1
    return rewards.index_add(0, ends[lengths > 0], scores.double()[lengths > 0])


def bootstrapped(values: Tensor, after: Tensor, lengths: Tensor, goes_on: Tensor) -> Tensor:
    """``[R]``, V_{t+1}: the next of ``values``; at the last token of a response 0, as nothing is to come, and where
    it ``goes_on`` (``[S]`` bool: it was cut, and has no score for that) the value behind that token, from ``after``."""
    ends = (lengths.cumsum(0) - 1)[lengths > 0]
    found = values.double().roll(-1)
    found[ends] = after[ends].double() * goes_on[lengths > 0]
    return found


def gae(rewards: Tensor, values: Tensor, after: Tensor, lengths: Tensor, *, gamma: float, lam: float) -> Tensor:
    """``[R]`` float64: A_t = sum over l of (gamma lambda)^l delta_{t+l} within a response, with
    delta_t = r_t + gamma V_{t+1} - V_t (arXiv 1506.02438, Eq. 16).

    Args:
        rewards, values: ``[R]``, r_t and V_t.
        after: ``[R]``, V_{t+1}, from :func:`bootstrapped`.
        lengths: ``[S]``, tokens of each response.
    """
    deltas = rewards.double() + gamma * after.double() - values.double()
    ends, found = lengths.cumsum(0), torch.zeros_like(deltas)
    carried = torch.zeros(len(lengths), dtype=torch.float64)
    for back in range(int(lengths.max()) if len(lengths) else 0):  # all responses at once, from their ends
        rows = lengths > back
        place = ends[rows] - 1 - back
        carried[rows] = deltas[place] + gamma * lam * carried[rows]
        found[place] = carried[rows]
    return found


def value_losses(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """``[R]``: 0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2); ``clip`` None: 0.5 (V - R)^2."""
    plain = (values - returns).square()
    if clip is None:
        return plain / 2
    return torch.maximum(plain, (old + (values - old).clamp(-clip, clip) - returns).square()) / 2


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one, below 0 for one that is worse than that.
    NaN where all returns are the same."""
    spread = returns.double().var(correction=0)
    return float(1 - (returns.double() - values.double()).var(correction=0) / spread) if spread > 0 else float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class ValueTokens:
    """What the loss of a critic knows of R response tokens, ``[R]`` each: ``weights`` in the loss, V_old and R."""

    weights: Tensor
    old: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """The loss of a critic, a sum over tokens. ``clip``: how far a value may move in a step; None: at will."""

    clip: float | None = 0.2

    def __call__(self, values: Tensor, entropy: Tensor, inputs: ValueTokens) -> tuple[Tensor, Stats]:
        mask = inputs.weights != 0
        kept = torch.where(mask, values, inputs.old)  # those beside the loss may be anything
        losses = torch.where(mask, value_losses(kept, inputs.old, inputs.returns, self.clip), 0)
        clipped = (kept - inputs.old).abs() > (float("inf") if self.clip is None else self.clip)
        told = {"loss": losses, "clipped": clipped, "values": kept, "returns": inputs.returns}
        return (inputs.weights * losses).sum(), {f"critic/{name}": average(value, mask) for name, value in told.items()}
