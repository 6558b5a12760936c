"""Attention over packed sequences of any lengths on CUDA: PyTorch's flash attention kernels, without padding.

The kernels are called below ``torch.nn.attention.varlen``, whose arguments differ between PyTorch 2.11 and 2.13.
Queries that are fewer than their sequence's keys are its last ones: so the samples of a group, whose prompt stands in
the row once, attend to a gathered copy of the prompt's keys and values, which are small (512 bytes a token and layer
for a model of half a billion parameters). The gradients of the copies are added up in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

LARGEST_HEAD = 256


def flash_can(query: torch.Tensor, value: torch.Tensor, softcap: float | None) -> bool:
    """Whether the kernels compute this: ``query`` and ``value`` ``[..., D]``; decided by type and shape alone."""
    dim = query.shape[-1]
    fits = dim == value.shape[-1] and dim % 8 == 0 and dim <= LARGEST_HEAD
    return query.is_cuda and softcap is None and value.dtype in (torch.bfloat16, torch.float16) and fits


class FlashLayout:
    """Where the sequences of a packed row begin and end, for queries and for keys."""

    def __init__(
        self, lengths: Sequence[int], shared: Sequence[int], place: torch.Tensor | None, device: torch.device
    ) -> None:
        """
        Args:
            lengths: of the sequences, in tokens.
            shared: how many tokens at the start of each stand in the place of another one's.
            place: ``[sum(lengths)]``, where in the row each token stands; None: in the same order. The tokens that a
                sequence does not share stand in the row in their order.
            device: CUDA.
        """
        own = [length - first for length, first in zip(lengths, shared, strict=True)]
        borders = [list(itertools.accumulate(counts, initial=0)) for counts in (own, lengths)]
        queries, keys = _to(device, torch.tensor(borders, dtype=torch.int32))
        longest = max(lengths, default=0)
        self._borders = (queries, keys, max(own, default=0), longest)
        self._borders_of_all = (keys, keys, longest, longest)
        self._place, self._own = None, None
        if any(shared):
            starts = itertools.accumulate(lengths, initial=0)
            first = [start + skipped for start, skipped in zip(starts, shared, strict=False)]
            self._place = place
            self._own = _to(device, torch.cat([torch.arange(a, a + n) for a, n in zip(first, own, strict=True)]))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor:
        """Causal attention, with gradient if enabled.

        Args:
            query: ``[1, H, T, D]``, of the T tokens of the row.
            key, value: ``[1, Hkv, T, D]``.
            scaling: of the scores.
            window: how many keys a query sees, its own one included; None: all before it.

        Returns:
            ``[1, T, H, D]``.
        """
        apply: Any = _Flash.apply  # untyped in torch
        out: torch.Tensor = apply(self, query, key, value, scaling, window)
        return out

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`attend` without gradient, and the logarithm of each softmax's divisor ``[H, T]``, float32."""
        rows, borders, own = self._laid_out(window, query, key, value)
        out, divisors, *_ = torch.ops.aten._flash_attention_forward(
            *rows, *borders, 0.0, True, False, scale=scaling, **_left(window)
        )
        if own is not None:
            out, divisors = out.index_select(0, own), divisors.index_select(1, own)
        return out.unsqueeze(0), divisors

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        divisors: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of query, key and value, shaped as these, from that of ``out``."""
        rows, borders, own = self._laid_out(window, query, key, value)
        grad, out = grad[0].contiguous(), out[0]
        if own is not None:  # the copies of queries are not looked at, so nothing comes back from them
            grad, out, divisors = (
                _spread(x, own, dim, len(rows[0])) for x, dim in ((grad, 0), (out, 0), (divisors, 1))
            )
        unused = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # the state of a dropout that there is not
        of_query, *of_copies = torch.ops.aten._flash_attention_backward(
            grad, *rows, out, divisors, *borders, 0.0, True, unused, unused, scale=scaling, **_left(window)
        )
        if own is not None:
            of_query = of_query.index_select(0, own)
        found = [of_query, *(self._add_up(g, key.shape[2]) for g in of_copies)]
        return tuple(g.transpose(0, 1).unsqueeze(0) for g in found)

    def _laid_out(
        self, window: int | None, *row: torch.Tensor
    ) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor, int, int], torch.Tensor | None]:
        """Query, key and value as ``[tokens, heads, D]``, with a copy of keys and values for each sequence that shares
        them; where the sequences begin; and which of the queries are the row's own, where they are copied too.

        With a window they are: for fewer queries than keys the kernels' backward pass then gives NaN (PyTorch 2.11).
        """
        across = [x[0].transpose(0, 1) for x in row]
        if self._place is None:
            return across, self._borders, None
        copied = 1 if window is None else 0
        across[copied:] = [x.index_select(0, self._place) for x in across[copied:]]
        return (across, self._borders, None) if window is None else (across, self._borders_of_all, self._own)

    def _add_up(self, grad: torch.Tensor, tokens: int) -> torch.Tensor:
        """From the gradient of the copies that of the ``tokens`` of the row."""
        if self._place is None:
            return grad
        total = torch.zeros(tokens, *grad.shape[1:], dtype=torch.float32, device=grad.device)
        return total.index_add_(0, self._place, grad.float()).to(grad.dtype)


def _to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory().to(device, non_blocking=True)


def _spread(tensor: torch.Tensor, index: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """``tensor`` with its entries at ``index`` of a dimension of ``size``, and 0 elsewhere."""
    shape = list(tensor.shape)
    shape[dim] = size
    return tensor.new_zeros(shape).index_copy_(dim, index, tensor)


def _left(window: int | None) -> dict[str, int]:
    """The kernels count the keys before a query's own one."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


class _Flash(torch.autograd.Function):
    """:meth:`FlashLayout.attend`."""

    @staticmethod
    def forward(
        ctx: Any,
        layout: FlashLayout,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        out, divisors = layout.forward(query, key, value, scaling, window)
        ctx.layout, ctx.spec = layout, (scaling, window)
        ctx.save_for_backward(query, key, value, out, divisors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return (None, *ctx.layout.backward(grad, *ctx.saved_tensors, *ctx.spec), None, None)
