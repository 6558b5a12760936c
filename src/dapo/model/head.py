"""Log-probability and entropy of tokens, without ever holding the ``[R, V]`` logits.

One autograd operation turns hidden states and the output head into both numbers. It works on a chunk of rows at a
time, so its memory is that of one chunk whatever the number of tokens: 16k tokens over a vocabulary of 150k would
otherwise hold 10 GB in float32 for the logits alone, and as much again for the log-softmax and its gradient. The logits
of a single chunk are kept for the backward pass, those of several are computed again in it: who can take the gradient
chunk by chunk, as the trainer does, saves a third of the products.

Logits and everything after them are float32, also under autocast and for bfloat16 hidden states (bfloat16 logits alone
cost 0.01 in log-probability): the engine samples from exactly the distribution that is computed here. With
``product_dtype`` bfloat16 the *inputs* of the product are rounded to bfloat16, as those of every other product then
are, and as the engine's weights are anyway; it is summed in float32. Rounding them here as well brings the two closer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dapo.model.forward import Head, products_of

CPU_CHUNK = 1024
CUDA_CHUNK_LOGITS = 2**30
"""Rows at a time on a CPU, and logits at a time on CUDA, 4.3 GB of them: see :func:`chunk_rows`."""
BLOCK_LOGITS = 2**20


def chunk_rows(device: torch.device, vocabulary: int) -> int:
    """Rows whose logits are made at a time.

    On a CPU a buffer at a vocabulary of 150k is 0.6 GB then, and at a tiny one it stays in the processor's cache. On
    CUDA each chunk adds to the gradient of the weights, which takes as long as the products of 800 rows: 7,040 rows at
    150k keep that near a tenth.
    """
    if device.type == "cpu":
        return CPU_CHUNK
    return min(8192, max(128, CUDA_CHUNK_LOGITS // vocabulary // 128 * 128))


def token_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int | None = None,
    product_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Log-probability of one token per row, and the entropy of the row's distribution.

    The distribution is ``softmax(logits / temperature)``. Both outputs are differentiable (once) with respect to
    ``hidden`` and the head's tensors; gradients are summed in float32 and returned in the type of their tensor.

    Args:
        hidden: ``[R, d]``, float32, bfloat16 or float16 (or float64, which is then used throughout). R may be 0.
        targets: ``[R]`` int64 token ids.
        temperature: above 0.
        chunk_tokens: rows whose logits exist at one time; None: as suits the device.
        product_dtype: bfloat16 rounds hidden states and weights to it before they are multiplied, in the backward pass
            the gradient of the logits too (where the processor has such products); sums stay float32.

    Returns:
        ``(logprobs [R], entropy [R])``, float32, in nats.

    Raises ValueError: temperature or chunk size not above 0, or shapes that do not match.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if chunk_tokens is None:
        chunk_tokens = chunk_rows(hidden.device, head.weight.shape[0])
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected hidden [R, d] and targets [R], got {tuple(hidden.shape)} and {tuple(targets.shape)}"
        )
    rest = (temperature, chunk_tokens, product_dtype, head.rounded, head.gradient)
    settings = _Settings(head.scale, head.softcap, *rest)
    apply: Any = _TokenLogprobs.apply  # untyped in torch
    logprobs, entropy = apply(hidden, head.weight, head.bias, targets, settings)
    return logprobs, entropy


def read_logprobs(raw: Tensor, head: Head, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probs ``[R]`` of tokens, with the bits that :func:`token_logprobs` gives them where the products have the
    same. ``raw``: ``[R, V]``, as :meth:`Head.raw` gives it; kept as it is."""
    settings = _Settings(head.scale, head.softcap, temperature, len(raw), raw.dtype, None, None)
    logits = raw if _by_kernels(raw, raw.dtype) else _scaled(raw.clone(), settings)
    return _read(logits, tokens, settings)[0]


class _Settings(NamedTuple):
    scale: float
    softcap: float | None
    temperature: float
    chunk_tokens: int
    product_dtype: torch.dtype
    rounded: Tensor | None
    gradient: Tensor | None


def for_chunks(head: Head, hidden: Tensor, product_dtype: torch.dtype) -> Head:
    """``head``, for several calls of :func:`token_logprobs` with parts of ``hidden``, each with its backward pass: the
    weight is rounded once, and its gradient added to ``weight.grad`` by the products themselves."""
    weight, dtype = head.weight, _compute_dtype(hidden)
    adds = weight.requires_grad and weight.dtype == dtype
    if adds and weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return replace(head, rounded=_input(weight.detach(), dtype, product_dtype), gradient=weight.grad if adds else None)


class _TokenLogprobs(torch.autograd.Function):
    """The operation behind :func:`token_logprobs`. Saves its inputs, what was read of each row, and the logits of a
    single chunk; those of several are computed again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        ctx.settings, ctx.kept = settings, (None, None)
        ctx.set_materialize_grads(False)
        dtype = _compute_dtype(hidden)
        logprobs = hidden.new_empty(len(targets), dtype=dtype)
        entropy, divisors = torch.empty_like(logprobs), torch.empty_like(logprobs)
        head = _inputs(weight, bias, dtype, settings)
        parts = list(chunks(len(targets), settings.chunk_tokens))
        with torch.autocast(hidden.device.type, enabled=False), products_of(settings.product_dtype):
            for rows in parts:
                logits = _logits(_input(hidden[rows], dtype, settings.product_dtype), *head, settings)
                logprobs[rows], entropy[rows], divisors[rows] = _read(logits, targets[rows], settings)
        if len(parts) == 1 and any(ctx.needs_input_grad):
            ctx.kept = (logits, head)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, divisors)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 5
        hidden, weight, bias, targets, entropy, divisors = ctx.saved_tensors
        dtype = _compute_dtype(hidden)
        (kept, head), ctx.kept = ctx.kept, (None, None)
        wide_weight, wide_bias = head or _inputs(weight, bias, dtype, ctx.settings)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight, grad_bias = ctx.settings.gradient, None
        with torch.autocast(hidden.device.type, enabled=False), products_of(ctx.settings.product_dtype):
            for rows in chunks(len(targets), ctx.settings.chunk_tokens):
                chunk = _input(hidden[rows], dtype, ctx.settings.product_dtype)
                grad = _grad_logits(
                    _logits(chunk, wide_weight, wide_bias, ctx.settings) if kept is None else kept,
                    targets[rows],
                    entropy[rows],
                    divisors[rows],
                    None if grad_logprobs is None else grad_logprobs[rows],
                    None if grad_entropy is None else grad_entropy[rows],
                    ctx.settings,
                )
                if grad_hidden is not None:
                    grad_hidden[rows] = _product(grad, wide_weight)
                if need_weight:
                    grad_weight = _add(grad_weight, grad.T, chunk)
                if need_bias and bias is not None:
                    of_rows = grad.sum(0, dtype=dtype)
                    grad_bias = of_rows if grad_bias is None else grad_bias + of_rows
        return (
            grad_hidden,
            _as(grad_weight, weight) if need_weight and ctx.settings.gradient is None else None,
            _as(grad_bias, bias) if need_bias and bias is not None else None,
            None,
            None,
        )


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _input(tensor: Tensor, dtype: torch.dtype, product_dtype: torch.dtype) -> Tensor:
    """``tensor`` as it goes into a product: in ``dtype``, with no more digits than the product is to take."""
    if product_dtype != torch.bfloat16:
        return tensor.to(dtype)
    rounded = tensor.to(torch.bfloat16)
    return rounded if _by_kernels(rounded, dtype) else rounded.to(dtype)


def _inputs(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype, settings: _Settings
) -> tuple[Tensor, Tensor | None]:
    rounded = _input(weight, dtype, settings.product_dtype) if settings.rounded is None else settings.rounded
    return rounded, None if bias is None else bias.to(dtype)


def _by_kernels(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether products take bfloat16 as it is and sum in float32, and :mod:`dapo.model.head_kernels` does the rest."""
    return tensor.is_cuda and dtype == torch.float32


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, of bfloat16 matrices in float32."""
    if left.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def _add(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """``total + left @ right``, in place; None: nothing yet."""
    if total is None:
        return _product(left, right)
    if left.dtype != torch.bfloat16:
        return total.addmm_(left, right)
    if _adds_wide(left.device):
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
        return total
    return total.add_(_product(left, right))


@cache
def _adds_wide(device: torch.device) -> bool:
    """Whether PyTorch adds the product of bfloat16 matrices to a float32 one: older ones want all in one type."""
    total, ones = (torch.ones(16, 16, device=device, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    try:
        torch.ops.aten.addmm.dtype_out(total, ones, ones, torch.float32, out=total)
    except (RuntimeError, AttributeError):
        return False
    return bool((total == 17).all())


def _as(grad: Tensor | None, of: Tensor) -> Tensor:
    return torch.zeros_like(of) if grad is None else grad.to(of.dtype)


def chunks(rows: int, size: int) -> Iterator[slice]:
    """``rows`` cut into chunks of at most ``size``."""
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings) -> Tensor:
    """``[r, V]`` in one buffer: ``hidden @ weight.T + bias``, which the kernels take, or else :func:`_scaled` of it."""
    logits = _product(hidden, weight.T)
    if bias is not None:
        logits += bias
    return logits if _by_kernels(logits, logits.dtype) else _scaled(logits, settings)


def _read(logits: Tensor, targets: Tensor, settings: _Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of :func:`_logits`: log-prob of the target, entropy, logarithm of the softmax's divisor."""
    if _by_kernels(logits, logits.dtype):
        from dapo.model.head_kernels import row_statistics

        return row_statistics(logits, targets, settings.scale, settings.softcap, settings.temperature)
    logprobs, entropy = (logits.new_empty(len(targets)) for _ in range(2))
    for rows in _blocks(logits):
        log_p = logits[rows].log_softmax(1)
        logprobs[rows] = log_p.gather(1, targets[rows, None]).squeeze(1)
        entropy[rows] = -log_p.exp().mul_(log_p).sum(1)
    return logprobs, entropy, logits.gather(1, targets[:, None]).squeeze(1) - logprobs


def _grad_logits(
    logits: Tensor,
    targets: Tensor,
    entropy: Tensor,
    divisors: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    settings: _Settings,
) -> Tensor:
    """Gradient with respect to ``hidden @ weight.T + bias``, ``[r, V]``; overwrites what :func:`_logits` gave."""
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(entropy)
    if _by_kernels(logits, logits.dtype):
        from dapo.model.head_kernels import row_gradient

        scales = (settings.scale, settings.softcap, settings.temperature, settings.product_dtype)
        return row_gradient(logits, targets, entropy, divisors, grad_logprobs, grad_entropy, *scales)
    for rows in _blocks(logits):
        slope = _slope(logits[rows], settings)
        grad = logits[rows].sub_(divisors[rows, None])
        p = grad.exp()
        # of the scaled logits x:  d log p_t / d x_j = [j = t] - p_j        dH / d x_j = -p_j (log p_j + H)
        if grad_entropy is None:
            grad.zero_()
        else:
            grad.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None])
        grad.sub_(grad_logprobs[rows, None]).mul_(p)
        grad.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None]).mul_(slope)
    return logits


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Rows that are read at a time: what is made of all of them anew would be memory that the system clears first."""
    return chunks(len(logits), max(1, BLOCK_LOGITS // logits.shape[1]))


def _scaled(logits: Tensor, settings: _Settings) -> Tensor:
    """``softcap(scale * logits) / temperature``, in place."""
    if settings.softcap is None:
        return logits.mul_(settings.scale / settings.temperature)
    return logits.mul_(settings.scale / settings.softcap).tanh_().mul_(settings.softcap / settings.temperature)


def _slope(scaled: Tensor, settings: _Settings) -> Tensor | float:
    """Derivative of :func:`_scaled` with respect to ``hidden @ weight.T``."""
    slope = settings.scale / settings.temperature
    if settings.softcap is None:
        return slope
    tanh = scaled * (settings.temperature / settings.softcap)
    return tanh.square_().neg_().add_(1).mul_(slope)
