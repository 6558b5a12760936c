"""Keys and values of the sequences in flight.

The decoder speaks to a cache in the terms of a paged one: prompts are stored once and reference-counted, sequences
start from a stored prompt when there is room, and are released when they end. How that is laid out is the cache's own
business. On CPU each sequence has a contiguous slot, because gathering pages would copy the whole context at every
step; the prompt's keys and values, computed once for its group, are copied into a slot when a sequence starts there.
See docs/decisions/0003-cpu-cache.md.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dapo.errors import ModelError
from dapo.model.attention import AttentionContext, AttentionSpec, step_attention
from dapo.model.loading import key_value_heads
from dapo.model.packed import PackedAttention
from dapo.util.files import size_text


@dataclass(slots=True)
class PromptEntry:
    """A prompt in the cache. ``users`` counts the sequences that have yet to start from it."""

    length: int
    users: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class DecodeContext(AttentionContext, Protocol):
    """The context of one decode step."""

    @property
    def position_ids(self) -> Tensor:
        """``[rows]``: the place of each new token in its sequence."""
        ...


class KVCache(Protocol):
    """What a decoder needs of a cache. Rows are numbered from 0 without gaps."""

    @property
    def rows_computed(self) -> int:
        """Rows that a decode step computes: those in use, and perhaps idle ones after them."""
        ...

    def room(self) -> int:
        """How many more sequences can start now."""
        ...

    def add_prompts(self, lengths: Sequence[int], users: Sequence[int]) -> tuple[AttentionContext, list[PromptEntry]]:
        """Places for prompts, and the context for the one packed forward pass that fills them."""
        ...

    def start(self, prompt: PromptEntry) -> int:
        """Begin a sequence with this prompt; returns its row. The last user releases the stored prompt."""
        ...

    def release(self, row: int) -> int | None:
        """End a sequence. The last row takes its place: returns that row's old number, or None if it was the last."""
        ...

    def decode_context(self) -> DecodeContext:
        """The context of one decode step: one token for each row, stored after those it already has."""
        ...

    def advance(self) -> None:
        """The decode step is done: every row in use has a token more."""
        ...

    def clear(self) -> None:
        """End all sequences."""
        ...

    def drop(self) -> None:
        """Give the memory back. Only while no row is in use."""
        ...


class SlotCache:
    """A contiguous slot per sequence, ``[slots, Hkv, tokens, D]`` in each layer.

    Memory is taken page by page as sequences reach it, and given back by :meth:`drop`.
    """

    def __init__(
        self, model_config: Any, slots: int, max_tokens: int, dtype: torch.dtype, pinned: bool = False
    ) -> None:
        """
        Args:
            slots: sequences that can be in flight at once.
            max_tokens: longest sequence, prompt and response.
            pinned: every decode step computes all slots over the full length, so that the shapes of matrix products,
                and with them the bits of a row, never depend on what else is in flight.

        Raises:
            ModelError: the machine cannot give so much memory.
        """
        text_config = model_config.get_text_config()
        heads, dim = key_value_heads(text_config)
        self._layers = text_config.num_hidden_layers
        self._shape = (slots, heads, max_tokens, dim)
        self._dtype = dtype
        self.pinned = pinned
        self.slots = slots
        self.max_tokens = max_tokens
        self._in_use = 0
        self._keys: list[Tensor]
        self._values: list[Tensor]
        self._take_memory()  # pages that nobody writes cost nothing: where it fails, it does so before there is work
        self.drop()
        self.lengths = torch.zeros(slots, dtype=torch.long)

    @property
    def rows_computed(self) -> int:
        return self.slots if self.pinned else self._in_use

    def room(self) -> int:
        return self.slots - self._in_use

    def drop(self) -> None:
        if self._in_use:
            raise RuntimeError(f"{self._in_use} sequences are still in the cache")
        self._keys, self._values = [], []

    def clear(self) -> None:
        self._in_use = 0
        self.lengths.zero_()

    def add_prompts(self, lengths: Sequence[int], users: Sequence[int]) -> tuple[AttentionContext, list[PromptEntry]]:
        entries = [PromptEntry(length, n) for length, n in zip(lengths, users, strict=True)]
        return _Prefill(entries), entries

    def start(self, prompt: PromptEntry) -> int:
        if not self._keys:
            self._take_memory()
        row = self._in_use
        self._in_use += 1
        for layer in range(self._layers):
            self._keys[layer][row, :, : prompt.length] = prompt.keys[layer]
            self._values[layer][row, :, : prompt.length] = prompt.values[layer]
        self.lengths[row] = prompt.length
        prompt.users -= 1
        if prompt.users == 0:
            prompt.keys, prompt.values = [], []
        return row

    def _take_memory(self) -> None:
        try:
            stores = [_untouched_zeros(self._shape, self._dtype) for _ in range(2 * self._layers)]
        except (OSError, OverflowError, ValueError, MemoryError):
            size = 2 * self._layers * math.prod(self._shape) * self._dtype.itemsize
            raise ModelError(
                f"keys and values of {self.slots:,} sequences of {self.max_tokens:,} tokens take {size_text(size)}, "
                "which this machine does not give; lower rollout.max_concurrent_samples or rollout.max_response_length"
            ) from None
        self._keys, self._values = stores[::2], stores[1::2]  # both or neither

    def release(self, row: int) -> int | None:
        self._in_use -= 1
        last = self._in_use
        moved = None
        if row != last:
            used = int(self.lengths[last])
            for store in (*self._keys, *self._values):
                store[row, :, :used] = store[last, :, :used]
            self.lengths[row] = used
            moved = last
        self.lengths[last] = 0
        return moved

    def decode_context(self) -> DecodeContext:
        return _Decode(self)

    def advance(self) -> None:
        self.lengths[: self._in_use] += 1


class _Prefill:
    """Packed causal attention that also keeps each prompt's keys and values."""

    def __init__(self, entries: Sequence[PromptEntry]) -> None:
        self._entries = entries
        self._packed = PackedAttention([e.length for e in entries])

    def attend(self, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        end = 0
        for entry in self._entries:
            start, end = end, end + entry.length
            entry.keys.append(key[0, :, start:end])
            entry.values.append(value[0, :, start:end])
        return self._packed.attend(spec, query, key, value)


class _Decode:
    """One token per row: store its key and value, attend over the row's own tokens."""

    def __init__(self, cache: SlotCache) -> None:
        rows = cache.rows_computed
        self._keys, self._values = cache._keys, cache._values
        self._row = torch.arange(rows)
        self._position = cache.lengths[:rows].clone()
        reach = cache.max_tokens if cache.pinned else min(cache.max_tokens, _bucket(int(self._position.max()) + 1))
        self._reach = reach
        self._distance = self._position[:, None, None, None] - torch.arange(reach)
        self._visible: dict[int | None, Tensor] = {}

    @property
    def position_ids(self) -> Tensor:
        return self._position

    def attend(self, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._keys[spec.layer], self._values[spec.layer]
        keys[self._row, :, self._position] = key[:, :, 0]
        values[self._row, :, self._position] = value[:, :, 0]
        rows = len(self._row)
        out = step_attention(
            spec, query, keys[:rows, :, : self._reach], values[:rows, :, : self._reach], self._mask(spec.window)
        )
        return out.transpose(1, 2)

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._visible:
            visible = self._distance >= 0
            self._visible[window] = visible if window is None else visible & (self._distance < window)
        return self._visible[window]


def _untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written: pages of the system's own, whatever the allocator does.

    Zeros and not garbage: masked keys get weight 0, and 0 times a stray NaN would still be NaN.
    """
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def _bucket(tokens: int) -> int:
    """The reach of a decode step: rounded up, so that few shapes occur and little beyond the longest row is read."""
    return -(-tokens // 16) * 16
