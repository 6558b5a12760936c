"""From logits to tokens, with the log-probability of each token under the very distribution it was drawn from.

Every sample brings its own stream of uniform numbers, and a token is the inverse of the cumulative distribution at the
next of them. So what a sample becomes depends on its seed and its logits alone, not on its neighbours in the batch.

Truncation is one threshold per row (:func:`thresholds`): a rule that says nothing of the order of equal tokens, and so
one that every device can follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dapo.rollout.engine import Sampling


@dataclass(frozen=True, slots=True)
class RowSettings:
    """The sampling settings of rows as tensors, ``[R]`` each: what a kernel reads.

    Float32 but for ``top_k``, which is int32. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0
    are off.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, settings: Sequence[Sampling], device: torch.device | str = "cpu") -> RowSettings:
        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            column([s.temperature for s in settings], torch.float32),
            column([min(s.top_k, 2**31 - 1) for s in settings], torch.int32),
            column([s.top_p for s in settings], torch.float32),
            column([s.min_p for s in settings], torch.float32),
        )

    def first(self, rows: int) -> RowSettings:
        """Those of the first ``rows`` rows."""
        return RowSettings(self.temperature[:rows], self.top_k[:rows], self.top_p[:rows], self.min_p[:rows])


def uniforms(seed: int, count: int) -> Tensor:
    """The ``count`` uniform numbers in [0, 1) that decide the tokens of the sample with this seed; float64."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).random(count))


def sample(logits: Tensor, uniform: Tensor, settings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: ``[R, V]`` float32; overwritten.
        uniform: ``[R]`` float64 in [0, 1).
        settings: one per row.

    Returns:
        tokens ``[R]`` int64 and their log-probabilities ``[R]`` float32 under what is left after truncation. A greedy
        token's is that of temperature 1.
    """
    greedy = torch.tensor([s.temperature == 0 for s in settings])
    logits /= _temperatures(settings)
    if any(s.top_k or s.top_p < 1 or s.min_p for s in settings):
        logits.masked_fill_(logits < thresholds(logits, RowSettings.of(settings))[:, None], float("-inf"))
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = torch.empty(len(logits), dtype=torch.long)
    if not bool(greedy.all()):
        tokens = _inverse_cdf(logprobs, uniform)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def thresholds(logits: Tensor, rows: RowSettings) -> Tensor:
    """What a logit has to reach for its token to stay: the largest of what top-k, top-p and min-p ask for.

    Top-k: the k-th largest logit. Top-p, of the distribution over what top-k leaves: the last logit of the shortest
    descending prefix whose mass reaches p. Min-p: a probability of ``min_p`` times the largest. So tokens that tie with
    a threshold stay, and the most likely one always does.

    Args:
        logits: ``[R, V]`` float32, after the temperature.
        rows: the settings of the rows; minus infinity comes of those that truncate nothing.

    Returns:
        ``[R]`` float32.
    """
    vocabulary = logits.shape[1]
    ordered = logits.sort(dim=-1, descending=True).values
    by_k = _column(ordered, torch.where(rows.top_k > 0, rows.top_k, vocabulary).clamp(max=vocabulary) - 1)
    # float64: the sum over a large vocabulary must not decide where the prefix ends
    mass = ordered.double().masked_fill_(ordered < by_k[:, None], float("-inf")).softmax(dim=-1).cumsum(dim=-1)
    by_p = _column(ordered, (mass < rows.top_p[:, None]).sum(dim=-1).clamp(max=vocabulary - 1))
    off = torch.full_like(by_k, float("-inf"))
    limits = [
        torch.where(rows.top_k > 0, by_k, off),
        torch.where(rows.top_p < 1, by_p, off),
        ordered[:, 0] + rows.min_p.log(),  # the logarithm of 0 is minus infinity: off
    ]
    return torch.stack(limits).amax(dim=0)


def most_likely(logits: Tensor, settings: Sequence[Sampling]) -> list[tuple[Tensor, Tensor] | None]:
    """The ``top_logprobs`` most likely tokens of each row: what the model says, before any truncation.

    Args:
        logits: ``[R, V]`` float32, before the temperature.
        settings: one per row.

    Returns:
        For each row ids ``[k]`` int64, most likely first and of equal ones the lowest id, and their log-probabilities
        ``[k]`` float32 at the row's temperature (greedy: 1). Fewer than k where the vocabulary is smaller, and None
        where none are asked for.
    """
    asked = [i for i, s in enumerate(settings) if s.top_logprobs]
    found: list[tuple[Tensor, Tensor] | None] = [None] * len(settings)
    scaled = logits[asked] / _temperatures([settings[i] for i in asked])
    for i, logprobs in zip(asked, torch.log_softmax(scaled, dim=-1), strict=True):
        count = min(settings[i].top_logprobs, len(logprobs))
        candidates = (logprobs >= logprobs.topk(count).values[-1]).nonzero()[:, 0]
        best, order = logprobs[candidates].sort(descending=True, stable=True)
        found[i] = candidates[order[:count]], best[:count]
    return found


def _temperatures(settings: Sequence[Sampling]) -> Tensor:
    return torch.tensor([s.temperature or 1.0 for s in settings], dtype=torch.float32)[:, None]


def _column(rows: Tensor, places: Tensor) -> Tensor:
    """The element at ``places[r]`` of each row."""
    return rows.gather(1, places[:, None].long())[:, 0]


def _inverse_cdf(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform number.

    Float64, so that rounding in the sum over a large vocabulary does not shift tokens; scaled by the sum itself, so
    that a number close to 1 still finds a token. A token of probability 0 adds nothing and is never the first.
    """
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    target = (uniform * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logprobs.shape[1] - 1)
