"""From hidden states to the gradient: what happens at the head in one micro-batch of an update."""

from __future__ import annotations

from typing import Any

import torch

from dapo.model.head import chunks
from dapo.training.micro_batch import MicroBatch, select_tokens
from dapo.training.objective_protocol import Objective, unit_of
from dapo.training.policy import Policy
from dapo.training.update_totals import PhaseClock, Totals

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def through_head(
    policy: Policy, part: MicroBatch, states: Any, inputs: Any, objective: Objective, totals: Totals, clock: PhaseClock
) -> Three:
    """Log-probs and entropies ``[R]`` of the response tokens, and the gradient of ``states`` ``[R, d]``, the detached
    hidden states that predict them. Adds to the gradient of the head, and loss and statistics to ``totals``.

    The loss of an objective of tokens is a sum over them, so each chunk is done while its logits are there. One of
    sequences or pairs gets the log-probs of all tokens first; then the logits of each chunk are computed once more,
    with the slope of the loss at its tokens.
    """
    at_once, head = policy.in_chunks(states)
    parts = list(chunks(len(states), at_once))

    def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor, rows: slice) -> torch.Tensor:
        cut = select_tokens(inputs, part.index[rows])
        loss, statistics = objective(logprobs, entropy, cut)
        # a loss may be finite without them: a ratio is clipped, be its logarithm minus infinity
        totals.add(loss.detach(), statistics, ((cut.weights != 0) & ~logprobs.detach().isfinite()).sum())
        return loss

    slopes: tuple[torch.Tensor | None, ...] | None = None
    if unit_of(objective) != "token":
        with clock("forward"), torch.no_grad():
            read = [policy.read(states[rows], part.targets[rows], head) for rows in parts]
        logprobs, entropy = (torch.cat(values).requires_grad_() for values in zip(*read, strict=True))
        with clock("forward"):
            loss = loss_of(logprobs, entropy, slice(None))
        with clock("backward"):
            slopes = torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True)
    found, gradients = [], []
    for rows in parts:
        with clock("forward"):
            leaf = states[rows].requires_grad_()
            values = policy.read(leaf, part.targets[rows], head)
            if slopes is None:
                loss = loss_of(*values, rows)
            else:
                used = [(s[rows] * value).sum() for s, value in zip(slopes, values, strict=True) if s is not None]
                loss = torch.stack(used).sum()
        with clock("backward"):
            torch.autograd.backward(loss)
        found.append([value.detach() for value in values])
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    logprobs, entropy = (torch.cat(values) for values in zip(*found, strict=True))
    return logprobs, entropy, torch.cat(gradients)
