"""From logits to tokens, with the log-probability of each token under the very distribution it was drawn from.

Every sample brings its own stream of uniform numbers, and a token is the inverse of the cumulative distribution at the
next of them. So what a sample becomes depends on its seed and its logits alone, not on its neighbours in the batch.

Truncation is one threshold per row (:func:`thresholds`): a rule that says nothing of the order of equal tokens, and so
one that every device can follow.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo.rollout.engine import Sampling

# `top_logprobs` holds some 24 bytes for each logit of so many rows: 120 MB for a vocabulary of 152k
ROWS_AT_ONCE = 32


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

    @property
    def divisors(self) -> Tensor:
        """``[R, 1]``: what logits are divided by."""
        return torch.where(self.temperature == 0, 1.0, self.temperature)[:, None]

    def of_rows(self, rows: Any) -> RowSettings:
        return RowSettings(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


@functools.lru_cache(maxsize=256)  # twice what is drawn ahead (in_flight.py)
def uniforms(seed: int, count: int) -> Tensor:
    """The ``count`` uniform numbers in [0, 1) that decide the tokens of the sample with this seed; float64. To be read
    only, as a second call may return the same tensor."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).random(count))


def sample(logits: Tensor, uniform: Tensor, settings: RowSettings, *, truncate: bool) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: ``[R, V]`` float32; overwritten.
        uniform: ``[R]`` float64 in [0, 1).
        settings: ``[R]`` each.
        truncate: whether top-k, top-p and min-p of ``settings`` apply; without, they are not read.

    Returns:
        tokens ``[R]`` int64 and their log-probabilities ``[R]`` float32 under what is left after truncation. A greedy
        token's is that of temperature 1.
    """
    greedy = settings.temperature == 0
    logits /= settings.divisors
    if truncate:
        logits.masked_fill_(logits < thresholds(logits, settings)[:, None], float("-inf"))
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


def top_logprobs(logits: Tensor, settings: RowSettings, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` most likely tokens of each row before truncation.

    Args:
        logits: ``[R, V]`` float32; kept as they are.
        settings: ``[R]`` each; only the temperature is read.
        k: 1 .. V.

    Returns:
        ids ``[R, k]`` int64, most likely first and of equal ones the lowest id, and log-probabilities ``[R, k]``
        float32 at the row's temperature (greedy: 1).
    """
    ids = torch.empty(len(logits), k, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(logits), k, dtype=torch.float32, device=logits.device)
    descending = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    divisors = settings.divisors
    for start in range(0, len(logits), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        z = logits[rows] / divisors[rows] + 0.0  # a zero with a sign would be a key of its own
        bits = z.view(torch.int32)
        keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers of the order of z
        # of equal values topk takes any, on CUDA not always the same: with the id in them no two keys are equal
        best = ((keys << 32) + descending).topk(k, dim=-1).indices
        ids[rows] = best
        logprobs[rows] = z.gather(1, best) - torch.logsumexp(z, dim=-1, keepdim=True)
    return ids, logprobs


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
