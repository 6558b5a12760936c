"""Log-probability and entropy of tokens, without ever holding the ``[R, V]`` logits.

One autograd operation turns hidden states and the output head into both numbers. It works on a chunk of rows at a
time and recomputes a chunk's logits in the backward pass, so its memory is one chunk whatever the number of tokens:
16k tokens over a vocabulary of 150k would otherwise hold 10 GB in float32 for the logits alone, and as much again for
the log-softmax and its gradient.

Logits and everything after them are float32, also under autocast and for bfloat16 hidden states (bfloat16 logits alone
cost 0.01 in log-probability): the engine samples from exactly the distribution that is computed here. With
``product_dtype`` bfloat16 the *inputs* of the product are rounded to bfloat16, as those of every other product then
are, and as the engine's weights are anyway; it is summed in float32. Rounding them here as well brings the two closer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from dapo.model.forward import Head, products_of

CHUNK_TOKENS = 1024
"""Rows at a time: at a vocabulary of 150k one buffer is 0.6 GB, at a tiny one it stays in the processor's cache."""


def token_logprobs(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    temperature: float,
    chunk_tokens: int = CHUNK_TOKENS,
    product_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of one token per row, and the entropy of the row's distribution.

    The distribution is ``softmax(logits / temperature)``. Both outputs are differentiable (once) with respect to
    ``hidden`` and the head's tensors; gradients are summed in float32 and returned in the type of their tensor.

    Args:
        hidden: ``[R, d]``, float32, bfloat16 or float16 (or float64, which is then used throughout). R may be 0.
        head: the output head.
        targets: ``[R]`` int64 token ids.
        temperature: above 0.
        chunk_tokens: rows whose logits exist at one time.
        product_dtype: bfloat16 rounds hidden states and weights to it before they are multiplied, in the backward pass
            the gradient of the logits too (where the processor has such products); sums stay float32.

    Returns:
        ``(logprobs [R], entropy [R])``, float32, in nats.

    Raises:
        ValueError: temperature or chunk size not above 0, or shapes that do not match.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected hidden [R, d] and targets [R], got {tuple(hidden.shape)} and {tuple(targets.shape)}"
        )
    settings = _Settings(head.scale, head.softcap, temperature, chunk_tokens, product_dtype)
    apply: Any = _TokenLogprobs.apply  # untyped in torch
    logprobs, entropy = apply(hidden, head.weight, head.bias, targets, settings)
    return logprobs, entropy


class _Settings(NamedTuple):
    scale: float
    softcap: float | None
    temperature: float
    chunk_tokens: int
    product_dtype: torch.dtype


class _TokenLogprobs(torch.autograd.Function):
    """The operation behind :func:`token_logprobs`. Saves its inputs and the entropy, nothing ``[R, V]``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        dtype = _compute_dtype(hidden)
        logprobs = hidden.new_empty(len(targets), dtype=dtype)
        entropy = torch.empty_like(logprobs)
        wide_weight, wide_bias = _input(weight, dtype, settings), None if bias is None else bias.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False), products_of(settings.product_dtype):
            for rows in _chunks(len(targets), settings.chunk_tokens):
                log_p = _scaled_logits(
                    _input(hidden[rows], dtype, settings), wide_weight, wide_bias, settings
                ).log_softmax(1)
                logprobs[rows] = log_p.gather(1, targets[rows, None]).squeeze(1)
                entropy[rows] = -log_p.exp().mul_(log_p).sum(1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 5
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        dtype = _compute_dtype(hidden)
        wide_weight, wide_bias = _input(weight, dtype, ctx.settings), None if bias is None else bias.to(dtype)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(wide_weight) if need_weight else None
        grad_bias = torch.zeros_like(wide_bias) if need_bias and wide_bias is not None else None
        with torch.autocast(hidden.device.type, enabled=False), products_of(ctx.settings.product_dtype):
            for rows in _chunks(len(targets), ctx.settings.chunk_tokens):
                chunk = _input(hidden[rows], dtype, ctx.settings)
                scaled = _scaled_logits(chunk, wide_weight, wide_bias, ctx.settings)
                grad = _grad_scaled_logits(
                    scaled.log_softmax(1),
                    targets[rows],
                    entropy[rows],
                    None if grad_logprobs is None else grad_logprobs[rows],
                    None if grad_entropy is None else grad_entropy[rows],
                ).mul_(_slope(scaled, ctx.settings))
                if grad_hidden is not None:
                    grad_hidden[rows] = (grad @ wide_weight).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight.addmm_(grad.T, chunk)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _input(tensor: torch.Tensor, dtype: torch.dtype, settings: _Settings) -> torch.Tensor:
    """``tensor`` as it goes into a product: in ``dtype``, with no more digits than the product is to take."""
    rounded = tensor.to(torch.bfloat16) if settings.product_dtype == torch.bfloat16 else tensor
    return rounded.to(dtype)


def _chunks(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _scaled_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, settings: _Settings
) -> torch.Tensor:
    """``softcap(scale * (hidden @ weight.T + bias)) / temperature``, ``[r, V]``, in one buffer."""
    logits = hidden @ weight.T if bias is None else torch.addmm(bias, hidden, weight.T)
    if settings.softcap is None:
        return logits.mul_(settings.scale / settings.temperature)
    return logits.mul_(settings.scale / settings.softcap).tanh_().mul_(settings.softcap / settings.temperature)


def _slope(scaled: torch.Tensor, settings: _Settings) -> torch.Tensor | float:
    """Derivative of :func:`_scaled_logits` with respect to ``hidden @ weight.T``; overwrites ``scaled``."""
    slope = settings.scale / settings.temperature
    if settings.softcap is None:
        return slope
    tanh = scaled.mul_(settings.temperature / settings.softcap)
    return tanh.square_().neg_().add_(1).mul_(slope)


def _grad_scaled_logits(
    log_p: torch.Tensor,
    targets: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient with respect to the scaled logits x, ``[r, V]``; overwrites ``log_p``. With p = softmax(x):

    d log p_t / d x_j = [j = t] - p_j        dH / d x_j = -p_j (log p_j + H)
    """
    p = log_p.exp()
    if grad_entropy is None:
        assert grad_logprobs is not None  # backward() is done when there is neither
        grad = p.mul_(-grad_logprobs[:, None])
    else:
        factor = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_logprobs is not None:
            factor.sub_(grad_logprobs[:, None])
        grad = p.mul_(factor)
    if grad_logprobs is not None:
        grad.scatter_add_(1, targets[:, None], grad_logprobs[:, None])
    return grad
