"""From logits to tokens on the device of the logits: :mod:`dapo.rollout.native.sampler` for a step that never waits.

A token is the inverse of the cumulative distribution at a uniform number that its sample brings, so a seed gives the
same tokens here as on the CPU, but where the number falls within rounding (about 1e-7 of the mass) of a border between
two tokens. Nothing here waits for the device or has a shape that depends on data: a CUDA graph may hold all of it.

Truncation is the threshold per row of :func:`dapo.rollout.native.sampler.thresholds`: a token that ties with it stays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo.rollout.native.rows import Rows
from dapo.rollout.native.sampler import RowSettings, thresholds


def draw(logits: Tensor, uniform: Tensor, settings: RowSettings, *, truncate: bool) -> tuple[Tensor, Tensor]:
    """Draw one token per row; kernels on CUDA, :func:`draw_reference` elsewhere.

    Args:
        logits: ``[R, V]`` float32, contiguous; kept as they are.
        uniform: ``[R]`` float64 in [0, 1).
        settings: ``[R]`` each, on the device of the logits.
        truncate: whether top-k, top-p and min-p of ``settings`` apply; without, they are not read.

    Returns:
        tokens ``[R]`` int64, and their log-probabilities ``[R]`` float32 among the tokens that were kept. A greedy
        token's is that of temperature 1. Where logits hold NaN or infinity, or nothing but minus infinity, the
        token is some index below V and its log-probability NaN. No row depends on another or on their number.

    Raises ValueError: a tensor of the wrong type, shape or layout.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous float32 [R, V], not {logits.dtype} {tuple(logits.shape)}")
    if uniform.dtype != torch.float64 or uniform.shape != logits.shape[:1]:
        raise ValueError(f"uniform must be float64 [{len(logits)}], not {uniform.dtype} {tuple(uniform.shape)}")
    if not logits.is_cuda:
        return draw_reference(logits, uniform, settings, truncate=truncate)
    from dapo.rollout.native.paged import draw_kernels

    return draw_kernels.draw(logits, uniform, settings, truncate=truncate)


def record(rows: Rows, tokens: Tensor, logprobs: Tensor) -> None:
    """:meth:`Rows.record`, on CUDA as one kernel."""
    if not tokens.is_cuda:
        return rows.record(tokens, logprobs)
    from dapo.rollout.native.paged import draw_kernels

    draw_kernels.record(rows, tokens, logprobs)


def draw_reference(logits: Tensor, uniform: Tensor, settings: RowSettings, *, truncate: bool) -> tuple[Tensor, Tensor]:
    """:func:`draw` in PyTorch and float64: what the kernels are tested against."""
    z = logits / settings.divisors
    if truncate:
        z = z.masked_fill(z < thresholds(z, settings)[:, None], float("-inf"))
    relative = z.double() - z.amax(dim=-1, keepdim=True).double()
    weights = relative.exp()
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    tokens = _pick(cumulative > (uniform * total)[:, None], weights > 0)
    tokens = torch.where(settings.temperature == 0, z.argmax(dim=-1), tokens)
    return tokens, (relative.gather(1, tokens[:, None])[:, 0] - total.log()).float()


def _pick(wanted: Tensor, possible: Tensor) -> Tensor:
    """``[R]``: the first index that is wanted and possible; without one, the last possible; without any, 0."""
    size = wanted.shape[1]
    index = torch.arange(size, device=wanted.device)
    first = torch.where(wanted & possible, index, size).amin(dim=-1)
    last = torch.where(possible, index, 0).amax(dim=-1)
    return torch.where(first < size, first, last)
