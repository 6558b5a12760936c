"""Attention over sequences laid end to end in one row: what the trainer computes, and the engine for prompts.

As one operation with a gradient where there are kernels for it or code is compiled, and as plain PyTorch for the rest.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch

from dapo.model.attention import AttentionSpec, attention_context, causal_attention, current_context
from dapo.model.packed_layout import PackedLayout, kernels_can
from dapo.model.placement import upload


class PackedAttention:
    """Sequences laid end to end in one row: each attends causally to itself alone.

    Sequences may share tokens of the row, such as the prompt of a group: then these are queries in one of them only.

    On CUDA in half precision kernels take the row as it is (:mod:`dapo.model.packed_layout`). Elsewhere the sequences
    are padded here, inside the attention, and nowhere else: in blocks of similar length, so that little of the work is
    padding.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        place: torch.Tensor | None = None,
        shared: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            lengths: of the sequences, in tokens.
            place: ``[sum(lengths)]``, where in the row each token of the sequences stands, these laid end to end; None:
                in the same order. On the host.
            shared: how many tokens at the start of each sequence are those of another one, in whose places they stand.
        """
        self.lengths = lengths
        self._device = torch.device(device)
        self._place = place
        self._shared = [0] * len(lengths) if shared is None else shared
        self._total = sum(lengths) - sum(self._shared)
        self.number = next(_numbers)
        _layouts[self.number] = self

    def attend(self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if query.shape[0] != 1 or query.shape[2] != self._total:
            raise ValueError(f"expected one row of {self._total} tokens, got {tuple(query.shape)}")
        # under autocast, rotary embedding leaves queries and keys in float32
        query, key = query.to(value.dtype), key.to(value.dtype)
        if kernels_can(query, value):
            with attention_context(self):
                found = opaque_packed_attention(query, key, value, spec.scaling, spec.window, spec.softcap)
            out: torch.Tensor = found[0]
            return out
        return self._padded.attend(spec, query, key, value)

    def forward(
        self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`attend` without gradient: ``(out, what backward needs beside it)``."""
        if kernels_can(query, value):
            from dapo.model import packed_kernels  # needs Triton

            return packed_kernels.forward(self._tiled, spec, query, key, value)
        out = self._padded.attend(spec, query, key, value).contiguous()
        return out, query.new_empty(query.shape[1], 0, dtype=torch.float32)

    def backward(
        self,
        spec: AttentionSpec,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        saved: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of :meth:`forward`, whose results are ``out`` and ``saved``; padded blocks are computed again."""
        if kernels_can(query, value):
            from dapo.model import packed_kernels

            return packed_kernels.backward(self._tiled, spec, grad, query, key, value, out, saved)
        vjp: Any = torch.func.vjp  # autograd itself does not record inside of an operation
        grads: tuple[torch.Tensor, ...] = vjp(partial(self._padded.attend, spec), query, key, value)[1](grad)
        return grads

    @cached_property
    def _tiled(self) -> PackedLayout:
        return PackedLayout(self.lengths, self._shared, self._place, self._device)

    @cached_property
    def _padded(self) -> _Padding:
        return _Padding(self.lengths, self._shared, self._places)

    @cached_property
    def _places(self) -> torch.Tensor:
        """Where in the row each token of the sequences stands, on the device."""
        place = torch.arange(sum(self.lengths)) if self._place is None else self._place
        return upload(place.numpy(), self._device)


# --- as one operation ---------------------------------------------------------------------------------------------

_numbers = itertools.count()
_layouts: weakref.WeakValueDictionary[int, PackedAttention] = weakref.WeakValueDictionary()
"""Those in use, by number: a backward pass looks its own up. It lives as long as the graph does (``hidden_states``)."""


@torch.library.custom_op("dapo::packed_attention", mutates_args=())
def opaque_packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:class:`PackedAttention` as one operation with a gradient, for the kernels and for compiled code that is trained.

    The layout is looked up when the operation runs. Its backward pass runs in a thread of PyTorch's own, which no
    context surrounds; so the number of the layout is among the results: ``(out [1, T, H, D], what the backward pass
    needs, number [] on the CPU)``.
    """
    layout = current_context()
    assert isinstance(layout, PackedAttention), "only packed sequences are trained on"
    out, saved = layout.forward(AttentionSpec(-1, scaling, window, softcap), query, key, value)
    return out, saved, torch.tensor(layout.number)


@opaque_packed_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, tokens, dim = query.shape
    out = value.new_empty(batch, tokens, heads, dim)
    saved = query.new_empty(heads, tokens if kernels_can(query, value) else 0, dtype=torch.float32)
    return out, saved, torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("dapo::packed_attention_backward", mutates_args=())
def _packed_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    saved: torch.Tensor,
    number: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    layout = _layouts[int(number)]
    spec = AttentionSpec(-1, scaling, window, softcap)
    grads = layout.backward(spec, grad, query, key, value, out, saved)
    # in the layout that is promised to the compiler
    first, second, third = (g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads)
    return first, second, third


@_packed_attention_backward.register_fake
def _(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def like(x: torch.Tensor) -> torch.Tensor:
        batch, heads, tokens, dim = x.shape
        return x.new_empty(batch, tokens, heads, dim).transpose(1, 2)

    return like(query), like(key), like(value)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, *ctx.spec = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[Any, ...]:
    return (*torch.ops.dapo.packed_attention_backward(grad, *ctx.saved_tensors, *ctx.spec), None, None, None)


opaque_packed_attention.register_autograd(_backward, setup_context=_keep_for_backward)


# --- padded -------------------------------------------------------------------------------------------------------


class _Padding:
    """A packed row as padded blocks."""

    def __init__(self, lengths: Sequence[int], shared: Sequence[int], place: torch.Tensor) -> None:
        starts = list(itertools.accumulate(lengths, initial=0))
        asking = [i for i, length in enumerate(lengths) if length > shared[i]]  # sequences with a query of their own
        whole, tails = ([i for i in asking if bool(shared[i]) == tail] for tail in (False, True))
        self._blocks = [
            _Block([(starts[i], lengths[i], shared[i]) for i in rows], place)
            for some in (whole, tails)
            for rows in _similar_lengths(lengths, some)
        ]
        order = torch.cat([b.places for b in self._blocks]) if self._blocks else torch.empty(0, dtype=torch.long)
        # where each place of the row lies in the concatenation of the blocks' outputs
        self._back = torch.empty_like(order)
        self._back[order] = torch.arange(len(order), device=order.device)

    def attend(self, spec: AttentionSpec, *row: torch.Tensor) -> torch.Tensor:
        """As :meth:`PackedAttention.attend`."""
        across = [x[0].transpose(0, 1) for x in row]  # [T, heads, D] each
        outputs = [block.attend(spec, *across) for block in self._blocks]
        return torch.cat(outputs).index_select(0, self._back).unsqueeze(0)


class _Block:
    """Some sequences of a packed row, padded to the longest: all their tokens as keys, those not shared as queries."""

    def __init__(self, sequences: Sequence[tuple[int, int, int]], place: torch.Tensor) -> None:
        """``sequences``: (start, length, shared) of each; either all of them share tokens or none does."""
        start, length, shared = torch.tensor(sequences, device=place.device).T
        self._keys = _Padded(start, length, place)
        tails = bool(shared.any())
        self._queries = _Padded(start + shared, length - shared, place) if tails else self._keys
        # padding asks from the place of the last real query: further on, a window might show it no key at all, and the
        # gradient of a softmax over nothing is NaN even where nobody asks for it
        column = torch.minimum(self._queries.column, (length - shared)[:, None] - 1)
        self._position = shared[:, None] + column if tails else None
        self.places = self._queries.places

    def attend(self, spec: AttentionSpec, *row: torch.Tensor) -> torch.Tensor:
        """``[T, heads, D]`` of the whole row in, ``[queries of this block, H, D]`` out."""
        sources = (self._queries, self._keys, self._keys)
        query, key, value = (part.gather(x) for part, x in zip(sources, row, strict=True))
        return self._queries.scatter(causal_attention(spec, query, key, value, self._position))


class _Padded:
    """Some stretches of tokens of a row as a padded block ``[B, heads, T, D]``, and back.

    Padding reads a stretch's first token: finite, and never seen by a real one, which looks back only.
    """

    def __init__(self, start: torch.Tensor, length: torch.Tensor, place: torch.Tensor) -> None:
        self.column = torch.arange(int(length.max()), device=place.device)
        real = self.column < length[:, None]
        tokens = torch.where(real, start[:, None] + self.column, start[:, None])
        self.places = place[tokens[real]]
        self._shape = tokens.shape
        self._index = place[tokens.reshape(-1)]
        self._real = None if bool(real.all()) else real.reshape(-1).nonzero()[:, 0]  # None: there is no padding

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """``[T, heads, D]`` of the row in."""
        # index_select and not row[index]: its backward pass is several times faster on CPU
        return row.index_select(0, self._index).view(*self._shape, *row.shape[1:]).transpose(1, 2)

    def scatter(self, block: torch.Tensor) -> torch.Tensor:
        """``[real tokens, heads, D]``."""
        flat = block.transpose(1, 2).flatten(0, 1)
        return flat if self._real is None else flat.index_select(0, self._real)


def _similar_lengths(lengths: Sequence[int], some: Sequence[int]) -> list[list[int]]:
    """Cut some of the sequences into blocks whose shortest is at least 3/4 of the longest.

    Fewer, larger blocks cost padding; more, smaller ones cost calls. Short sequences share a block whatever their
    lengths: there a call costs more than the padding.
    """
    order = sorted(some, key=lambda i: -lengths[i])
    blocks: list[list[int]] = []
    for i in order:
        if blocks and lengths[i] >= 0.75 * lengths[blocks[-1][0]] - 8:
            blocks[-1].append(i)
        else:
            blocks.append([i])
    return blocks
