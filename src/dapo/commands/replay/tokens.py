"""Single samples of an update: their share in its gradient, and what the objective made of each of their tokens.

Each sample is computed by itself, so its log-probabilities may differ from those inside of the batch in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dapo.algorithm.kl import kl_estimate
from dapo.algorithm.objective import DapoObjective, TokenInputs, clipped_loss, policy_ratio
from dapo.commands.replay.recompute import plain_number
from dapo.records import Sample, TokenBatch
from dapo.training.micro_batch import MicroBatch, micro_batch, select_tokens
from dapo.training.objective import Objective, unit_of
from dapo.training.policy import Policy


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One optimizer step: the mini-batch and the objective's inputs for its R response tokens."""

    batch: TokenBatch
    inputs: TokenInputs


def gradient_norms(policy: Policy, update: Update, objective: Objective, count: int) -> list[dict[str, Any]]:
    """Loss and gradient norm of single samples: their parts of the sums that the update adds up.

    Args:
        policy: with the weights before the update.
        count: look at so many, those first whose tokens weigh most (weight times advantage); one backward pass each.
    """
    batch, inputs = update.batch, update.inputs
    if unit_of(objective) == "pair":  # a sample alone has no loss
        return []
    stakes = (inputs.weights * inputs.advantages.abs().nan_to_num()).double()
    by_sample = torch.zeros(batch.num_samples, dtype=torch.float64, device=stakes.device)
    by_sample = by_sample.index_add(0, torch.from_numpy(batch.sample_ids).to(stakes.device), stakes)
    order = torch.argsort(by_sample, descending=True, stable=True).tolist()
    found = []
    for number in order[:count]:
        loss, norm = _gradient_norm(policy, update, objective, number)
        draw, index = int(batch.draws[number]), int(batch.indices[number])
        found.append({"draw": draw, "index": index, "loss": plain_number(loss), "grad_norm": plain_number(norm)})
    return found


def _gradient_norm(policy: Policy, update: Update, objective: Objective, number: int) -> tuple[float, float]:
    part, inputs = _alone(policy, update, number)
    if not len(part.targets):
        return 0.0, 0.0
    with torch.enable_grad():
        logprobs, entropy = policy.evaluate(part)
        loss, _ = objective(logprobs, entropy, inputs)
        parameters = [p for p in policy.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    norm = torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
    return float(loss.detach()), float(norm)


def _alone(policy: Policy, update: Update, number: int) -> tuple[MicroBatch, TokenInputs]:
    part = micro_batch(update.batch, np.array([number]), policy.device)
    return part, select_tokens(update.inputs, part.index)


def place_in(update: Update, draw: int, index: int) -> int | None:
    """Number of a sample in an update's batch; None: it is not in there."""
    found = np.flatnonzero((update.batch.draws == draw) & (update.batch.indices == index))
    return int(found[0]) if len(found) else None


def stored_tokens(sample: Sample, decode: Callable[[int], str]) -> list[dict[str, Any]]:
    """What is known of a sample's tokens without weights."""
    return [
        {"token": int(token), "text": decode(int(token)), "version": int(version), "engine_logprob": float(logprob)}
        for token, logprob, version in zip(sample.token_ids, sample.logprobs, sample.versions, strict=True)
    ]


@torch.no_grad()
def traced_tokens(policy: Policy, update: Update, objective: Objective, number: int) -> list[dict[str, Any]]:
    """What the objective makes of each token of a sample: ``trainer_logprob``, ``ratio`` (to the proximal policy),
    ``advantage``, ``importance``, ``in_loss``, ``clip`` (``low``, ``high``, ``dual`` or None), ``entropy`` in nats and
    ``loss``, its contribution to the loss of the update. Of an objective of the user's there is neither ``clip`` nor
    ``loss``.

    Args:
        policy: with the weights before the update.
        number: of the sample in the update's batch.
    """
    part, inputs = _alone(policy, update, number)
    if not len(part.targets):
        return []
    logprobs, entropy = policy.evaluate(part)
    columns = {
        "trainer_logprob": logprobs,
        "ratio": policy_ratio(logprobs, inputs.proximal_logprobs),
        "advantage": inputs.advantages,
        "importance": inputs.importance,
        "in_loss": inputs.mask,
        "entropy": entropy,
    }
    if isinstance(objective, DapoObjective):
        columns["loss"] = _losses(logprobs, inputs, objective)
    lists = {name: [plain_number(value) for value in column.tolist()] for name, column in columns.items()}
    rows = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    return [{**row, "clip": _clip(row, objective)} if isinstance(objective, DapoObjective) else row for row in rows]


def _losses(logprobs: torch.Tensor, inputs: TokenInputs, objective: DapoObjective) -> torch.Tensor:
    """Of each token, with its weight."""
    known = inputs.selected()
    safe = torch.where(inputs.mask, logprobs, 0)
    loss = clipped_loss(
        safe,
        known.proximal_logprobs,
        known.advantages,
        known.importance,
        low=objective.clip_ratio_low,
        high=objective.clip_ratio_high,
        c=objective.clip_ratio_c,
    )
    if objective.kl_in_loss and known.reference_logprobs is not None:
        loss = loss + objective.kl_coef * kl_estimate(safe, known.reference_logprobs, objective.kl_estimator)
    return known.weights * loss


def _clip(row: dict[str, Any], objective: DapoObjective) -> str | None:
    """On which side a token is clipped, so that it has no gradient; as the objective counts it."""
    ratio, advantage = row["ratio"], row["advantage"]
    if not row["in_loss"] or ratio is None or advantage is None:
        return None
    if advantage > 0:
        return "high" if ratio > 1 + objective.clip_ratio_high else None
    if advantage < 0 and ratio < 1 - objective.clip_ratio_low:
        return "low"
    c = objective.clip_ratio_c
    return "dual" if advantage < 0 and c is not None and ratio > c else None
