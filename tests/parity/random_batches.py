"""Random rollouts for both trainers: lengths, log-probabilities, advantages, masks."""

from __future__ import annotations

from typing import Any

import numpy as np
from conformance.contract import LossBatch


def random_batch(seed: int, responses: int = 8, spread: float = 0.4, masked: float = 0.0, **settings: Any) -> LossBatch:
    """Responses of 1 to 12 tokens whose log-ratios have standard deviation ``spread``, so that many are clipped.

    Args:
        masked: share of tokens out of the loss; the first of each response stays in.
        settings: of :class:`LossBatch`.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 13, responses)

    def rows(scale: float, shift: float = 0.0) -> list[list[float]]:
        return [(shift + scale * rng.standard_normal(n)).tolist() for n in lengths]

    def near(base: list[list[float]]) -> list[list[float]]:
        return [(np.array(row) + spread * rng.standard_normal(len(row))).tolist() for row in base]

    logprobs = rows(1.0, -3.0)
    mask = [[1.0, *(rng.random(n - 1) >= masked).astype(float)] for n in lengths] if masked else None
    old = near(logprobs)
    return LossBatch(
        logprobs=logprobs,
        old_logprobs=old,
        sampled_logprobs=near(old) if settings.get("correction") else None,
        reference_logprobs=near(logprobs) if settings.get("kl_coef") else None,
        advantages=rng.standard_normal(responses).tolist(),
        mask=mask,
        groups=[i // 4 for i in range(responses)],
        **settings,
    )
