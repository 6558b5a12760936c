"""The attention of ``runtime.exact``: every token a row of its own, computed as a step of decoding computes it.

The engine reads prompts with it and the trainer makes its forward pass by it, so that both have the bits of decoding.
On a GPU that is the decode kernel itself, over pages; on a CPU :func:`attend_in_blocks`. Backward passes are those of
the ordinary packed attention.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from dapo.config import Config
from dapo.model.attention import AttentionSpec, attention_context, seen_keys
from dapo.model.packed import PackedAttention, opaque_packed_attention
from dapo.model.packed_layout import kernels_can
from dapo.rollout.native.paged.attention import attend, store
from dapo.rollout.native.paged.pool import Pool, PoolShape

PAGE_TOKENS = 32
BLOCK = 64
"""Keys that are summed over at a time on a CPU."""
AT_ONCE = 64
"""Queries at a time there, which bounds the memory."""


class RowAttention(PackedAttention):
    """Packed sequences as :class:`~dapo.model.packed.PackedAttention` has them, token by token."""

    _paged: tuple[Pool, Tensor, Tensor, Tensor] | None = None

    def attend(self, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with attention_context(self):
            found = opaque_packed_attention(query, key, value, spec.scaling, spec.window, spec.softcap)
        out: Tensor = found[0]
        return out

    def forward(self, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, D] each
        out = self._over_pages(spec, query, key, value) if query.is_cuda else self._over_rows(spec, query, key, value)
        return out.unsqueeze(0), query.new_empty(query.shape[1], 0, dtype=torch.float32)

    def backward(
        self,
        spec: AttentionSpec,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        saved: Tensor,
    ) -> tuple[Tensor, ...]:
        """Of the ordinary attention, which is computed once more for it."""
        found = super().forward(spec, query, key, value) if kernels_can(query, value) else (out, saved)
        return super().backward(spec, grad, query, key, value, *found)

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the sequences' tokens, laid end to end: sequence, place in it, and place in the row."""
        lengths = torch.tensor(self.lengths, device=self._device)
        sequence = torch.arange(len(lengths), device=self._device).repeat_interleave(lengths)
        token = torch.arange(len(sequence), device=self._device)
        inside = token - (lengths.cumsum(0) - lengths)[sequence]
        return sequence, inside, self._places

    def _over_rows(self, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """On a CPU, sequence by sequence."""
        out = torch.empty_like(query)
        place, start = self._tokens[2], 0
        for length, shared in zip(self.lengths, self._shared, strict=True):
            of_sequence = place[start : start + length]
            start += length
            keys, values = (x[of_sequence].transpose(0, 1)[None] for x in (key, value))
            for first in range(shared, length, AT_ONCE):
                position = torch.arange(first, min(first + AT_ONCE, length))
                rows, end = of_sequence[position], int(position[-1]) + 1
                out[rows] = attend_in_blocks(spec, query[rows], keys[:, :, :end], values[:, :, :end], position)
        return out

    def _over_pages(self, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """On a GPU, each sequence with pages of its own, which all layers use in turn."""
        if self._paged is None:
            self._paged = self._make_pages(key.shape[1], key.shape[2], key.dtype)
        pool, table, position, slots = self._paged
        place = self._tokens[2]
        store(pool.tensor, 0, key.index_select(0, place), value.index_select(0, place), slots)
        of_pool = AttentionSpec(0, spec.scaling, spec.window, spec.softcap)
        return attend_exactly(pool, of_pool, query, key, value, table, position)

    def _make_pages(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Pool, Tensor, Tensor, Tensor]:
        """A pool, for each token of the row the pages of its sequence and its place there, and where to store each."""
        sequence, inside, place = self._tokens
        counts = torch.tensor([-(-length // PAGE_TOKENS) for length in self.lengths], device=self._device)
        first = counts.cumsum(0) - counts
        pages = int(counts.sum())
        pool = Pool(PoolShape(1, pages, kv_heads, PAGE_TOKENS, head_dim, dtype), self._device)
        pool.attach(torch.empty(pool.shape.sizes, dtype=dtype, device=self._device))
        own = inside >= torch.tensor(self._shared, device=self._device)[sequence]
        of_row = torch.empty((2, self._total), dtype=torch.int64, device=self._device)
        of_row[:, place[own]] = torch.stack([sequence[own], inside[own]])
        tables = (first[:, None] + torch.arange(int(counts.max()), device=self._device)).int()
        slots = (first * PAGE_TOKENS)[sequence] + inside
        return pool, tables.index_select(0, of_row[0]), of_row[1].int(), slots


def exact_attention(config: Config) -> type[PackedAttention] | None:
    """What a trainer is to attend with; None: as it likes."""
    return RowAttention if config.runtime.exact else None


def exact_temperature(config: Config) -> float | None:
    """The trainer's, for the engine that samples what is trained on; None: its log-probabilities need not be equal."""
    return config.rollout.temperature if config.runtime.exact else None


def attend_exactly(
    pool: Pool, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    """:func:`~dapo.rollout.native.paged.attention.attend`, a row's bits by that row alone. The rows are given the
    strides of their shape, which a size of 1 leaves open: for strides of another kind the kernel is compiled anew, and
    might add in another order."""
    query, key, value = (x.reshape(-1).view(x.shape) for x in (query, key, value))
    return attend(pool, spec, query, key, value, table, lengths, splits=1)


def attend_in_blocks(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
    """Attention of single tokens on a CPU. What a query gets depends on itself and the keys that it sees: sums run over
    a number of keys that is always the same, and one block after the other.

    Args:
        query: ``[n, H, D]``.
        key, value: ``[n, Hkv, T, D]``, or ``[1, ...]`` for all of them.
        position: ``[n]``, where in its sequence each query stands, below T.

    Returns:
        ``[n, H, D]``.
    """
    (rows, heads, dim), kv_heads = query.shape, key.shape[1]
    grouped = query.float().reshape(rows, kv_heads, heads // kv_heads, 1, dim)
    visible = seen_keys(position[:, None], key.shape[2], spec.window, "cpu")
    blocks = range(0, key.shape[2], BLOCK)
    scores = torch.cat([_dots(grouped, _block(key, at)[:, :, None]) for at in blocks], -1).mul_(spec.scaling)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores[..., : key.shape[2]].masked_fill_(~visible, float("-inf"))
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    out, divisor = torch.zeros(rows, kv_heads, heads // kv_heads, dim), torch.zeros(*scores.shape[:3], 1)
    for at in blocks:
        some = F.pad(weights[..., at : at + BLOCK], (0, BLOCK - min(BLOCK, key.shape[2] - at))).contiguous()
        across = _block(value, at).transpose(-1, -2).contiguous()
        out += _dots(some[..., None, :], across[:, :, None])
        divisor += some.sum(-1, keepdim=True)
    return (out / divisor).reshape(rows, heads, dim).to(query.dtype)


def _block(x: Tensor, at: int) -> Tensor:
    """A block of keys or values in float32, the last one filled up with zeros."""
    block = x[:, :, at : at + BLOCK].float()
    return F.pad(block, (0, 0, 0, BLOCK - block.shape[2]))


def _dots(left: Tensor, right: Tensor) -> Tensor:
    """Products over the last dimension. Not as matrices: a library's order is another for another number of them."""
    return (left * right).contiguous().sum(-1)
