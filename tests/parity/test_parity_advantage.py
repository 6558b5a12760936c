"""Our advantages against those that TRL's GRPOTrainer computes in its own preparation of a batch, to 1e-5.

TRL's epsilon is 1e-4 and fixed, so ours is set to that. Not compared: flat groups, where TRL's are rounding noise
divided by the epsilon and ours exactly 0 (conformance case ``advantage/flat``), and TRL's ``scale_rewards="batch"``,
one standard deviation for the whole batch, which we do not have.
"""

from __future__ import annotations

import numpy as np
import pytest
from conformance.trl_trainer import GivenNumbers

from dapo.algorithm.advantage import advantages

KINDS = {"group": "group-norm", "none": "group-mean"}


def _ours(rewards: list[float], size: int, kind: str) -> list[float]:
    groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
    return [a for group in groups for a in advantages(group, kind=kind, epsilon=1e-4).tolist()]


@pytest.mark.parametrize("scale", KINDS)
@pytest.mark.parametrize("size", [2, 4, 16])
def test_random_rewards(size: int, scale: str) -> None:
    rewards = np.random.default_rng(size).normal(0.0, 2.0, 4 * size).astype(np.float32).tolist()
    numbers = GivenNumbers(len(rewards), num_generations=size, scale_rewards=scale)
    theirs = numbers.prepare([3] * len(rewards), rewards)["advantages"].tolist()
    assert _ours(rewards, size, KINDS[scale]) == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("scale", KINDS)
def test_right_and_wrong(scale: str) -> None:
    """Rewards of +1 and -1 with every count of right ones that dynamic sampling keeps."""
    rewards = [1.0 if i < right else -1.0 for right in range(1, 8) for i in range(8)]
    numbers = GivenNumbers(len(rewards), num_generations=8, scale_rewards=scale)
    theirs = numbers.prepare([1] * len(rewards), rewards)["advantages"].tolist()
    assert _ours(rewards, 8, KINDS[scale]) == pytest.approx(theirs, abs=1e-5)


def test_a_failed_score_is_left_out_by_both() -> None:
    rewards = [1.0, None, -1.0, 0.25]
    theirs = GivenNumbers(4, num_generations=4).prepare([1] * 4, rewards)["advantages"].tolist()
    ours = advantages([r for r in rewards if r is not None], kind="group-norm", epsilon=1e-4).tolist()
    assert [ours[0], 0.0, *ours[1:]] == pytest.approx(theirs, abs=1e-5)
