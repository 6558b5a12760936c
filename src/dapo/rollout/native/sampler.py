"""From logits to tokens, with the log-probability of each token under the very distribution it was drawn from.

Every sample brings its own stream of uniform numbers, and a token is the inverse of the cumulative distribution at the
next of them. So what a sample becomes depends on its seed and its logits alone, not on its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dapo.rollout.engine import Sampling


@dataclass(frozen=True, slots=True)
class RowSettings:
    """The sampling settings of rows as tensors, ``[R]`` each: what a kernel reads.

    ``temperature`` float32 (0: greedy), ``top_k`` int32 (0: off), ``top_p`` float32 (1: off), ``min_p`` float32 (0: off).
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, settings: Sequence[Sampling], device: torch.device | str = "cpu") -> RowSettings:
        def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            column([s.temperature for s in settings], torch.float32),
            column([s.top_k for s in settings], torch.int32),
            column([s.top_p for s in settings], torch.float32),
            column([s.min_p for s in settings], torch.float32),
        )


def uniforms(seed: int, count: int) -> torch.Tensor:
    """The ``count`` uniform numbers in [0, 1) that decide the tokens of the sample with this seed; float64."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).random(count))


def sample(
    logits: torch.Tensor, uniform: torch.Tensor, settings: Sequence[Sampling]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Args:
        logits: ``[R, V]`` float32; overwritten.
        uniform: ``[R]`` float64 in [0, 1).
        settings: one per row.

    Returns:
        tokens ``[R]`` int64 and their log-probabilities ``[R]`` float32. A greedy token's is that of temperature 1.
    """
    greedy = torch.tensor([s.temperature == 0 for s in settings])
    temperature = torch.tensor([s.temperature or 1.0 for s in settings], dtype=torch.float32)
    logits /= temperature[:, None]
    if any(s.top_k or s.top_p < 1 for s in settings):
        _truncate(logits, settings)
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = torch.empty(len(logits), dtype=torch.long)
    if not bool(greedy.all()):
        tokens = _inverse_cdf(logprobs, uniform)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _inverse_cdf(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the uniform number.

    Float64, so that rounding in the sum over a large vocabulary does not shift tokens; scaled by the sum itself, so
    that a number close to 1 still finds a token. A token of probability 0 adds nothing and is never the first.
    """
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    target = (uniform * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logprobs.shape[1] - 1)


def _truncate(logits: torch.Tensor, settings: Sequence[Sampling]) -> None:
    """Set logits outside of each row's top-k and top-p to minus infinity, in place."""
    ordered, index = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[1])
    top_k = torch.tensor([s.top_k or logits.shape[1] for s in settings])[:, None]
    top_p = torch.tensor([s.top_p for s in settings], dtype=torch.float32)[:, None]
    kept = torch.where(rank < top_k, ordered, float("-inf"))
    probabilities = kept.softmax(dim=-1)
    # a token stays while the probability *before* it is below top_p, so the most likely one always does
    drop = (rank >= top_k) | ((probabilities.cumsum(dim=-1) - probabilities >= top_p) & (top_p < 1))
    logits.masked_fill_(torch.zeros_like(drop).scatter(1, index, drop), float("-inf"))
