# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The two passes over a chunk of logits on CUDA: what is read of a row, and the gradient with respect to it.

Written out in PyTorch each would read and write the ``[r, V]`` numbers several times, which at a vocabulary of 150k
takes longer than the products around them. Arithmetic as in :mod:`dapo.model.head`, float32 throughout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # numbers of a row that a program works on at a time


@triton.jit
def _scaled(raw, scale, cap, temperature, CAPPED: tl.constexpr):
    """``softcap(scale * raw) / temperature``."""
    x = raw * scale
    if CAPPED:  # tanh, written so that it does not overflow
        e = tl.exp(-2.0 * tl.abs(x / cap))
        x = tl.where(x < 0, -cap, cap) * (1.0 - e) / (1.0 + e)
    return x / temperature


@triton.jit
def _statistics(
    raw,
    targets,
    logprobs,
    entropies,
    divisors,
    scale,
    cap,
    temperature,
    CAPPED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program a row, which is read once: m is the largest x so far, s = sum e^(x - m), t = sum e^(x - m) (x - m)."""
    row = tl.program_id(0)
    start_of_row = raw + row.to(tl.int64) * VOCABULARY
    m = tl.full((), -1e30, tl.float32)
    s = tl.zeros((), tl.float32)
    t = tl.zeros((), tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < VOCABULARY
        x = _scaled(tl.load(start_of_row + columns, mask=inside, other=0.0), scale, cap, temperature, CAPPED)
        x = tl.where(inside, x, -1e30)
        largest = tl.maximum(m, tl.max(x, 0))
        shrink = tl.exp(m - largest)
        e = tl.exp(x - largest)
        t = shrink * (t + s * (m - largest)) + tl.sum(tl.where(inside, e * (x - largest), 0.0), 0)
        s = shrink * s + tl.sum(e, 0)
        m = largest
    target = tl.load(targets + row)
    x = _scaled(tl.load(start_of_row + target), scale, cap, temperature, CAPPED)
    tl.store(logprobs + row, x - m - tl.log(s))
    tl.store(entropies + row, tl.log(s) - t / s)
    tl.store(divisors + row, m + tl.log(s))


@triton.jit
def _gradient(
    raw,
    targets,
    entropies,
    divisors,
    grad_logprobs,
    grad_entropies,
    out,
    scale,
    cap,
    temperature,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for a block of a row."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < VOCABULARY
    place = row.to(tl.int64) * VOCABULARY + columns
    x = _scaled(tl.load(raw + place, mask=inside, other=0.0), scale, cap, temperature, CAPPED)
    log_p = x - tl.load(divisors + row)
    of_logprob = tl.load(grad_logprobs + row)
    factor = -of_logprob
    if ENTROPY:
        factor -= tl.load(grad_entropies + row) * (log_p + tl.load(entropies + row))
    grad = tl.exp(log_p) * factor + tl.where(columns == tl.load(targets + row), of_logprob, 0.0)
    if CAPPED:
        tanh = x * temperature / cap
        grad *= 1.0 - tanh * tanh
    grad *= scale / temperature
    tl.store(out + place, grad.to(out.dtype.element_ty), mask=inside)


def row_statistics(
    raw: Tensor, targets: Tensor, scale: float, softcap: float | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target, entropy, and logarithm of the softmax's divisor of each row.

    Args:
        raw: ``[r, V]`` float32, hidden states times the head's weights.
        targets: ``[r]`` int64.
        scale, softcap, temperature: of the head and of the rollout.

    Returns:
        Three times ``[r]``, float32.
    """
    rows, vocabulary = raw.shape
    logprobs, entropies, divisors = (raw.new_empty(rows) for _ in range(3))
    if rows:
        with torch.cuda.device_of(raw):
            _statistics[(rows,)](
                raw.contiguous(),
                targets,
                logprobs,
                entropies,
                divisors,
                scale,
                softcap or 0.0,
                temperature,
                CAPPED=softcap is not None,
                VOCABULARY=vocabulary,
                BLOCK=BLOCK,
                num_warps=8,
            )
    return logprobs, entropies, divisors


def row_gradient(
    raw: Tensor,
    targets: Tensor,
    entropies: Tensor,
    divisors: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    scale: float,
    softcap: float | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient with respect to ``raw``, ``[r, V]`` in ``dtype``; arguments and results of :func:`row_statistics`."""
    rows, vocabulary = raw.shape
    out = torch.empty(rows, vocabulary, dtype=dtype, device=raw.device)
    if rows:
        with torch.cuda.device_of(raw):
            _gradient[(rows, triton.cdiv(vocabulary, BLOCK))](
                raw.contiguous(),
                targets,
                entropies,
                divisors,
                grad_logprobs.contiguous(),
                grad_logprobs if grad_entropies is None else grad_entropies.contiguous(),
                out,
                scale,
                softcap or 0.0,
                temperature,
                CAPPED=softcap is not None,
                ENTROPY=grad_entropies is not None,
                VOCABULARY=vocabulary,
                BLOCK=BLOCK,
                num_warps=8,
            )
    return out
