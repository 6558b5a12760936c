"""From hidden states to the gradient: what happens at the head in one micro-batch of an update.

Both functions return the log-probs and entropies ``[R]`` of its response tokens and the gradient of ``states``
``[R, d]``, the hidden states that predict them. They add to the gradient of the head, and loss and statistics to
``totals``.
"""

from __future__ import annotations

from typing import Any

import torch

from dapo.model.head import chunks
from dapo.training.micro_batch import MicroBatch, select_tokens
from dapo.training.objective import Objective
from dapo.training.policy import Policy
from dapo.training.totals import PhaseClock, Totals

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def by_chunks(
    policy: Policy,
    part: MicroBatch,
    states: torch.Tensor,
    inputs: Any,
    objective: Objective[Any],
    totals: Totals,
    clock: PhaseClock,
) -> Found:
    """For an objective of tokens: the loss is a sum over them, so each chunk is done while its logits are there."""
    found, entropies, slopes = [], [], []
    for rows in chunks(len(states), policy.rows_at_once):
        with clock("forward"):
            leaf = states[rows].requires_grad_()
            logprobs, entropy = policy.read(leaf, part.targets[rows])
            cut = select_tokens(inputs, part.index[rows])
            loss, statistics = objective(logprobs, entropy, cut)
        with clock("backward"):
            torch.autograd.backward(loss)
        found.append(logprobs.detach())
        entropies.append(entropy.detach())
        assert leaf.grad is not None
        slopes.append(leaf.grad)
        # a loss may be finite without them: a ratio is clipped, be its logarithm minus infinity
        totals.add(loss.detach(), statistics, ((cut.weights != 0) & ~found[-1].isfinite()).sum())
    return torch.cat(found), torch.cat(entropies), torch.cat(slopes)


def as_a_whole(
    policy: Policy,
    part: MicroBatch,
    states: torch.Tensor,
    inputs: Any,
    objective: Objective[Any],
    totals: Totals,
    clock: PhaseClock,
) -> Found:
    """For one of sequences or pairs: the log-probs of all tokens first, then the logits of each chunk once more, with
    the slope of the loss at its tokens."""
    parts = list(chunks(len(states), policy.rows_at_once))
    with clock("forward"):
        with torch.no_grad():
            read = [policy.read(states[rows], part.targets[rows]) for rows in parts]
        logprobs, entropy = (torch.cat(values).requires_grad_() for values in zip(*read, strict=True))
        cut = select_tokens(inputs, part.index)
        loss, statistics = objective(logprobs, entropy, cut)
    with clock("backward"):
        gradients = torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True)
    slopes = []
    for rows in parts:
        with clock("forward"):
            leaf = states[rows].requires_grad_()
            again = policy.read(leaf, part.targets[rows])
        with clock("backward"):
            used = [(value, slope[rows]) for value, slope in zip(again, gradients, strict=True) if slope is not None]
            torch.autograd.backward([value for value, _ in used], [slope for _, slope in used])
        assert leaf.grad is not None
        slopes.append(leaf.grad)
    logprobs, entropy = logprobs.detach(), entropy.detach()
    totals.add(loss.detach(), statistics, ((cut.weights != 0) & ~logprobs.isfinite()).sum())
    return logprobs, entropy, torch.cat(slopes)
