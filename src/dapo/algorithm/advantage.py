"""Group-relative advantages (Eq. 9): how much better a response is than its siblings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dapo.records import Group

Estimator = Callable[[Tensor, float], Tensor]
"""``(rewards [n] float64, epsilon) -> advantages [n]``. Called with n >= 2 rewards that are not all equal."""

FLAT_SPREAD = 2.0**-22
"""Relative spread, two float32 roundings, below which rewards are the same number: a reward model answers in float32,
and what is left after subtracting the mean would be noise divided by noise."""


def _group_norm(rewards: Tensor, epsilon: float) -> Tensor:
    # n - 1, as in the released code
    return (rewards - rewards.mean()) / (rewards.std(correction=1) + epsilon)


def _group_mean(rewards: Tensor, epsilon: float) -> Tensor:
    return rewards - rewards.mean()


def _leave_one_out(rewards: Tensor, epsilon: float) -> Tensor:
    # R_i - mean of the others, written so that no sum is subtracted from another
    n = len(rewards)
    return (rewards - rewards.mean()) * (n / (n - 1))


ESTIMATORS: dict[str, Estimator] = {
    "group-norm": _group_norm,
    "group-mean": _group_mean,
    "leave-one-out": _leave_one_out,
    "batch-norm": _group_mean,
}
OVER_THE_BATCH = frozenset({"batch-norm"})
"""Those that :func:`normalised` follows, once all groups of a rollout are there."""


def advantages(rewards: Tensor | Sequence[float], *, kind: str | Estimator, epsilon: float = 1e-6) -> Tensor:
    """The advantage of each response of one group.

    ``group-norm`` is (R - mean) / (std + epsilon) with the sample standard deviation (Eq. 9), ``group-mean`` R - mean
    (Dr. GRPO), ``leave-one-out`` R - mean of the others (RLOO), ``batch-norm`` R - mean before :func:`normalised`.

    Args:
        rewards: [n] shaped rewards of the group. They are converted to float64 first.
        kind: a name in :data:`ESTIMATORS`, or a function like those there.
        epsilon: added to the standard deviation.

    Returns:
        [n] float64. Exactly 0 for a flat group (max equals min, up to :data:`FLAT_SPREAD`), so for a group of one too.

    Raises ValueError: an unknown kind, or a reward that is not finite."""
    estimator = ESTIMATORS.get(kind) if isinstance(kind, str) else kind
    if estimator is None:
        raise ValueError(f"unknown advantage {kind!r}; one of {', '.join(ESTIMATORS)}")
    values = torch.as_tensor(rewards).to(torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"rewards must be finite, got {values.tolist()}")
    if _flat(values):
        return torch.zeros_like(values)
    return estimator(values, epsilon)


def _flat(rewards: Tensor) -> bool:
    # max against min: the standard deviation of equal numbers need not be 0 in floating point
    if len(rewards) < 2:
        return True
    return bool(rewards.max() - rewards.min() <= FLAT_SPREAD * rewards.abs().max())


def with_advantages(group: Group, *, kind: str | Estimator, epsilon: float = 1e-6) -> Group:
    """A copy of ``group`` whose samples carry ``advantage``, from the shaped rewards of the scored ones.

    Samples that overlong filtering left out of the loss still count in mean and deviation. A sample without a verdict
    does not; it gets advantage 0 and leaves the loss.
    Raises ValueError: an unknown kind, or a scored sample without a shaped reward."""
    values = iter(advantages([s.shaped_reward for s in group.scored], kind=kind, epsilon=epsilon).tolist())
    samples = (
        replace(s, advantage=next(values)) if s.scored else replace(s, advantage=0.0, in_loss=False)
        for s in group.samples
    )
    return replace(group, samples=tuple(samples))


def normalised(groups: Sequence[Group], epsilon: float = 1e-6) -> list[Group]:
    """Copies of ``groups`` whose advantages have mean 0 and deviation 1 over the loss tokens of all of them:
    REINFORCE++ with a baseline (arXiv 2501.03262), where the groups are a whole rollout."""
    scored = [sample for group in groups for sample in group.scored]
    values = torch.tensor([sample.advantage for sample in scored], dtype=torch.float64)
    tokens = torch.tensor([sample.loss_tokens for sample in scored], dtype=torch.int64)
    scaled = iter(whiten(values.repeat_interleave(tokens), epsilon, of=values).tolist())
    return [
        replace(g, samples=tuple(replace(s, advantage=next(scaled)) if s.scored else s for s in g.samples))
        for g in groups
    ]


def whiten(values: Tensor, epsilon: float = 1e-6, of: Tensor | None = None) -> Tensor:
    """(x - mean) / (std + epsilon), with the mean and the sample standard deviation of ``values``, of these or of other
    numbers. Fewer than two values, or equal ones, have none: 0 for all."""
    numbers = values if of is None else of
    if _flat(values):
        return torch.zeros_like(numbers)
    return (numbers - values.mean()) / (values.std(correction=1) + epsilon)
