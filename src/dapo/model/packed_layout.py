"""Attention over packed sequences on CUDA by kernels of our own: the lists of their tiles, made once for a packed row.

Keys and values of a prompt that several samples share are read where they stand. What each sample adds to their
gradients is computed by a program of its own, so that none has much more to do than others; the sums are made after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dapo.model.attention import AttentionSpec
from dapo.model.placement import upload
from dapo.records import IntArray, joined_ranges, starts_of

LARGEST_HEAD = 256
OLDEST_CARD = (8, 0)  # compute capability: bfloat16 products and copies in the background, which a T4 or V100 lacks


def kernels_can(query: Tensor, value: Tensor) -> bool:
    """Whether the kernels compute this: ``query`` and ``value`` ``[..., D]``; decided by card, type and shape alone."""
    dim = query.shape[-1]
    if not query.is_cuda or torch.version.hip or value.dtype not in (torch.bfloat16, torch.float16):
        return False
    if dim != value.shape[-1] or dim % 8 or dim > LARGEST_HEAD:
        return False
    if torch.cuda.get_device_capability(query.device) < OLDEST_CARD:
        return False
    return max(query.numel(), value.numel()) < 2**31  # they count in 32 bits


class PackedLayout:
    """Where the sequences of a packed row stand."""

    def __init__(
        self, lengths: Sequence[int], shared: Sequence[int], place: Tensor | None, device: torch.device
    ) -> None:
        """As :class:`~dapo.model.packed.PackedAttention`. Raises ValueError: shared tokens are not the first ones of a
        sequence that itself shares none."""
        every, common = np.asarray(lengths, np.int64), np.asarray(shared, np.int64)
        asking = every > common
        self._shared, self._count = common[asking], (every - common)[asking]
        self._own = starts_of(self._count)
        self._other = self._own  # where the shared tokens begin
        self._lent = np.zeros_like(self._own)  # how many tokens at the start are others' too
        sharers = np.flatnonzero(self._shared)
        if len(sharers):
            assert place is not None
            first, places, count = starts_of(every)[asking][sharers], place.numpy(), self._shared[sharers]
            self._other = self._own.copy()
            self._other[sharers] = other = places[first]
            source = np.searchsorted(self._own, other)
            apart = places[joined_ranges(first, count)] != joined_ranges(other, count)
            known = np.isin(other, self._own).all()
            if not known or apart.any() or (self._shared[source] > 0).any() or (count > self._count[source]).any():
                raise ValueError("sequences can share only the first tokens of one that itself shares none")
            np.maximum.at(self._lent, source, count)
        self._device, self._made = device, dict[tuple[int, ...], Tensor]()

    def narrow(self, spec: AttentionSpec) -> AttentionSpec:
        """Without a window where every sequence fits into it: more scores need no mask."""
        longest = (self._shared + self._count).max(initial=0)
        return replace(spec, window=None) if spec.window and spec.window >= longest else spec

    def query_tiles(self, group: int, rows: int) -> Tensor:
        """``[programs, 5]``, those with most keys first: first token of the sequence in the row, its number of tokens
        there, first of the shared ones and their number, and the first row, ``group`` of them a token."""
        if (group, rows) not in self._made:
            tiles = -(-self._count * group // rows)
            number = np.repeat(np.arange(len(tiles)), tiles)
            first = joined_ranges(np.zeros_like(tiles), tiles) * rows
            keys = self._shared[number] + np.minimum((first + rows) // group, self._count[number])
            columns = [x[number] for x in (self._own, self._count, self._other, self._shared)]
            self._made[group, rows] = self._listed([*columns, first], keys)
        return self._made[group, rows]

    def key_tiles(self, keys: int) -> Tensor:
        """``[programs, 7]``, those with most queries first: of the queries' sequence first token in the row, number of
        tokens there, number of shared ones; of the keys place in the sequence, first one in the row, number, and where
        their part of the gradients begins (-1: it is the whole)."""
        if (keys,) not in self._made:
            number, position, here, count, slot = self._stretches
            tiles = -(-count // keys)
            which, offset = np.repeat(np.arange(len(tiles)), tiles), joined_ranges(np.zeros_like(tiles), tiles) * keys
            number, position = number[which], position[which] + offset
            queries = self._count[number] - np.maximum(position - self._shared[number], 0)
            columns = [x[number] for x in (self._own, self._count, self._shared)]
            columns += [position, here[which] + offset, np.minimum(keys, count[which] - offset)]
            columns.append(np.where(slot[which] < 0, -1, slot[which] + offset))
            self._made[keys,] = self._listed(columns, queries)
        return self._made[keys,]

    @cached_property
    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the gradients of tokens that are shared: where in the second the parts of each begin, all parts by token,
        and the tokens."""
        _, _, here, count, slot = self._stretches
        places = joined_ranges(here[slot >= 0], count[slot >= 0])
        tokens, starts = np.unique(np.sort(places), return_index=True)
        columns = (np.append(starts, len(places)), np.argsort(places, kind="stable"), tokens)
        first, second, third = (upload(column.astype(np.int32), self._device) for column in columns)
        return first, second, third

    @cached_property
    def _stretches(self) -> tuple[IntArray, ...]:
        """Keys that one sequence's queries see, in stretches: sequence, place in it, first token in the row, number,
        and where the parts of their gradients begin (-1: there are no others)."""
        every, none = np.arange(len(self._own)), np.zeros_like(self._own)
        lent, shared, own = self._lent > 0, self._shared > 0, self._count > self._lent
        number = np.concatenate([every[lent], every[shared], every[own]])
        position = np.concatenate([none[lent], none[shared], (self._shared + self._lent)[own]])
        here = np.concatenate([self._own[lent], self._other[shared], (self._own + self._lent)[own]])
        count = np.concatenate([self._lent[lent], self._shared[shared], (self._count - self._lent)[own]])
        slot = np.where(np.arange(len(number)) < len(number) - own.sum(), starts_of(count), -1)
        return number, position, here, count, slot

    def _listed(self, columns: Sequence[IntArray], work: IntArray) -> Tensor:
        return upload(np.stack(columns, 1)[np.argsort(-work, kind="stable")].astype(np.int32), self._device)
