"""The one attention function that engine and trainer share.

Hugging Face models look their attention function up by name (the Transformers attention interface). Ours, ``dapo``,
does no arithmetic itself: it hands query, key and value to the *context* that the caller has put around the forward
pass. A context knows how the tokens of this pass are laid out (packed training rows, prompts to be cached, one decode
step over the cache) and where keys and values are kept. So one module definition serves all of them, and no cache
travels through the model's keyword arguments, whose names change between releases.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

ATTENTION_NAME = "dapo"


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer wants beside plain scaled dot-product attention. ``window`` counts the query's own position."""

    layer: int
    scaling: float
    window: int | None = None
    softcap: float | None = None


class AttentionContext(Protocol):
    """How the tokens of one forward pass attend."""

    def attend(self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of one layer.

        Args:
            query: ``[B, H, T, D]``.
            key, value: ``[B, Hkv, T, D]`` of the same tokens; ``H`` is a multiple of ``Hkv``.

        Returns:
            ``[B, T, H, D]``.
        """
        ...


_local = threading.local()


@contextmanager
def attention_context(context: AttentionContext) -> Iterator[None]:
    """Route the attention of forward passes in this thread through ``context``."""
    outer = getattr(_local, "context", None)
    _local.context = context
    try:
        yield
    finally:
        _local.context = outer


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with Transformers: looks up the current context and lets it attend."""
    context: AttentionContext | None = getattr(_local, "context", None)
    if context is None:
        raise RuntimeError("the model was called outside of attention_context(...)")
    if kwargs.get("s_aux") is not None:
        raise RuntimeError("attention sinks are not supported")  # load_model refuses such models by name
    spec = AttentionSpec(
        module.layer_idx, query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap
    )
    return context.attend(spec, query, key, value), None


def register_attention() -> None:
    """Make ``attn_implementation="dapo"`` known to Transformers. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)


def masked_attention(
    spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Attention over explicitly visible keys, written out: soft-capping has no fused form on CPU, and for a single
    query per sequence two batched products are faster there than the fused kernel.

    Args:
        query: ``[B, H, Tq, D]``.
        key, value: ``[B, Hkv, Tk, D]``.
        visible: bool, broadcastable to ``[B, 1, Tq, Tk]``; each query must see at least one key.

    Returns:
        ``[B, H, Tq, D]``.
    """
    batch, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    # the query heads that share a key head become further queries of it
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * queries, dim)
    scores = (grouped @ key.transpose(-1, -2)).float().mul(spec.scaling)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.view(batch, kv_heads, -1, queries, key.shape[2]).masked_fill(~visible.unsqueeze(2), float("-inf"))
    out = torch.softmax(scores, dim=-1).to(value.dtype).view(batch, kv_heads, -1, key.shape[2]) @ value
    return out.view(batch, heads, queries, dim)


def causal_visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """``[1, 1, length, length]``: which keys each position sees, itself and (within the window) the ones before."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return visible[None, None]


def causal_attention(spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of whole sequences. Shapes as :func:`masked_attention` with ``Tq = Tk``."""
    length = query.shape[2]
    window = spec.window if spec.window is not None and spec.window < length else None
    if spec.softcap is None and window is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=spec.scaling, enable_gqa=grouped)
    return masked_attention(spec, query, key, value, causal_visible(length, window, query.device))


class PackedAttention:
    """Sequences laid end to end in one row: each attends causally to itself alone.

    CPU has no variable-length kernel with a backward pass, so the sequences are padded here, inside the attention, and
    nowhere else. They are cut into blocks of similar length, so that little of the work is padding.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._total = sum(lengths)
        starts, offset = [], 0
        for length in lengths:
            starts.append(offset)
            offset += length
        blocks = [_Block(rows, starts, lengths, device) for rows in _similar_lengths(lengths)]
        self._blocks = blocks
        order = torch.cat([b.tokens for b in blocks]) if blocks else torch.empty(0, dtype=torch.long)
        # where each token of the row lies in the concatenation of the blocks' outputs
        self._back = torch.empty_like(order)
        self._back[order] = torch.arange(len(order), device=order.device)

    def attend(self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if query.shape[0] != 1 or query.shape[2] != self._total:
            raise ValueError(f"expected one row of {self._total} tokens, got {tuple(query.shape)}")
        row = [x[0].transpose(0, 1) for x in (query, key, value)]  # [T, heads, D] each
        outputs = [block.attend(spec, *row) for block in self._blocks]
        return torch.cat(outputs).index_select(0, self._back).unsqueeze(0)


class _Block:
    """Some sequences of a packed row, padded to the longest of them."""

    def __init__(
        self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], device: torch.device | str
    ) -> None:
        start = torch.tensor([starts[r] for r in rows], device=device)
        length = torch.tensor([lengths[r] for r in rows], device=device)
        column = torch.arange(int(length.max()), device=device)
        real = column[None, :] < length[:, None]
        # padding reads the sequence's first token: finite, and never seen by a real token, which looks back only
        gather = torch.where(real, start[:, None] + column, start[:, None])
        self.tokens = gather[real]
        self._shape = gather.shape
        self._gather = gather.reshape(-1)
        # places of the real tokens in the padded block; None: there is no padding
        self._real = None if bool(real.all()) else real.reshape(-1).nonzero()[:, 0]

    def attend(self, spec: AttentionSpec, *row: torch.Tensor) -> torch.Tensor:
        """``[T, heads, D]`` of the whole row in, ``[tokens of this block, H, D]`` out."""
        # index_select and not x[index]: its backward pass is several times faster on CPU
        query, key, value = (
            x.index_select(0, self._gather).view(*self._shape, *x.shape[1:]).transpose(1, 2) for x in row
        )
        out = causal_attention(spec, query, key, value).transpose(1, 2).flatten(0, 1)
        return out if self._real is None else out.index_select(0, self._real)


def _similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Cut the sequences (empty ones left out) into blocks whose shortest is at least 3/4 of the longest.

    Fewer, larger blocks cost padding; more, smaller ones cost calls. Short sequences share a block whatever their
    lengths: there a call costs more than the padding.
    """
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    blocks: list[list[int]] = []
    for i in order:
        if blocks and lengths[i] >= 0.75 * lengths[blocks[-1][0]] - 8:
            blocks[-1].append(i)
        else:
            blocks.append([i])
    return blocks
