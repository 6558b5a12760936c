"""The one attention function that engine and trainer share.

Hugging Face models look their attention function up by name (the Transformers attention interface). Ours, ``dapo``,
does no arithmetic itself: it hands query, key and value to the *context* that the caller has put around the forward
pass. A context knows how the tokens of this pass are laid out (packed training rows, prompts to be cached, one decode
step over the cache) and where keys and values are kept. So one module definition serves all of them, and no cache
travels through the model's keyword arguments, whose names change between releases.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ATTENTION_NAME = "dapo"
WRITTEN_OUT_TOKENS = 192
"""Up to here the fused kernel's backward pass in bfloat16 on a CPU is slower than two products and a softmax, three
times so at 90 tokens; beyond, it is faster and does not hold the scores."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer wants beside plain scaled dot-product attention. ``window`` counts the query's own position."""

    layer: int
    scaling: float
    window: int | None = None
    softcap: float | None = None


class AttentionContext(Protocol):
    """How the tokens of one forward pass attend."""

    def attend(self, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of one layer.

        Args:
            query: ``[B, H, T, D]``.
            key, value: ``[B, Hkv, T, D]`` of the same tokens; ``H`` is a multiple of ``Hkv``.

        Returns:
            ``[B, T, H, D]``.
        """


LAYER_NUMBER = "layer_number"
"""A buffer on attention modules: their place in the model, as a tensor on the CPU (see ``model/compiling.py``)."""

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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with Transformers: looks up the current context and lets it attend."""
    if kwargs.get("s_aux") is not None:
        raise RuntimeError("attention sinks are not supported")  # load_model refuses such models by name
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled():
            # under autocast, rotary embedding leaves queries and keys in float32
            query, key = query.to(value.dtype), key.to(value.dtype)
            # registered by dapo.model.packed, which whoever trains has imported
            return torch.ops.dapo.packed_attention(query, key, value, scaling, sliding_window, softcap)[0], None
        layer = getattr(module, LAYER_NUMBER)
        return torch.ops.dapo.attention(query, key, value, layer, scaling, sliding_window, softcap), None
    spec = AttentionSpec(module.layer_idx, scaling, sliding_window, softcap)
    return current_context().attend(spec, query, key, value), None


def current_context() -> AttentionContext:
    """That of this thread. Raises RuntimeError: there is none."""
    context: AttentionContext | None = getattr(_local, "context", None)
    if context is None:
        raise RuntimeError("the model was called outside of attention_context(...)")
    return context


@torch.library.custom_op("dapo::attention", mutates_args=())
def opaque_attention(
    query: Tensor, key: Tensor, value: Tensor, layer: Tensor, scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attention as one operation that the compiler does not look into: it would copy a cache that it saw written to.

    The context is looked up when the operation runs, so the same compiled code serves prompts and decoding. Without
    gradient. Shapes as :meth:`AttentionContext.attend`; ``layer``: int64 ``[]`` on the CPU.
    """
    return current_context().attend(AttentionSpec(int(layer), scaling, window, softcap), query, key, value).contiguous()


@opaque_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, layer: Tensor, scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return value.new_empty(batch, tokens, heads, value.shape[3])


def register_attention() -> None:
    """Make ``attn_implementation="dapo"`` known to Transformers. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)


def masked_attention(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Attention over explicitly visible keys, written out: soft-capping has no fused form on CPU, and for short
    sequences the products are faster there than the fused kernel and its backward pass.

    Args:
        query: ``[B, H, Tq, D]``.
        key, value: ``[B, Hkv, Tk, D]``.
        visible: bool, broadcastable to ``[B, 1, Tq, Tk]``; each query must see at least one key.

    Returns:
        ``[B, H, Tq, D]``.
    """
    batch, heads, queries, dim = query.shape
    # the query heads that share a key head become further queries of it
    shared = heads // key.shape[1]
    grouped = query.reshape(batch, -1, shared * queries, dim)
    scores = (grouped @ key.transpose(-1, -2)).float().mul_(spec.scaling)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores.masked_fill_(~visible.repeat(1, 1, shared, 1), float("-inf"))
    return (torch.softmax(scores, dim=-1).to(value.dtype) @ value).view(batch, heads, queries, dim)


def step_attention(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """:func:`masked_attention` without gradient and for one query per sequence: a step of decoding.

    In bfloat16 the fused kernel reads keys and values where they lie, in under half the time; the products copy them.
    In float32 there is no difference.
    """
    if spec.softcap is not None or value.dtype == torch.float32:
        return masked_attention(spec, query, key, value, visible)
    # the query heads of a key head as queries of it: what the kernel does for them by itself takes 4 to 10 times that
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    return F.scaled_dot_product_attention(grouped, key, value, attn_mask=visible, scale=spec.scaling).view(query.shape)


def seen_keys(query_position: Tensor, keys: int, window: int | None, device: torch.device | str) -> Tensor:
    """``[B, 1, Tq, keys]``: which keys (they stand at 0, 1, ...) a query at each position ``[B, Tq]`` sees: its own one
    and, within the window, those before."""
    distance = query_position[:, None, :, None] - torch.arange(keys, device=device)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def causal_attention(
    spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, query_position: Tensor | None = None
) -> Tensor:
    """Causal attention. Shapes as :func:`masked_attention`.
    ``query_position``: ``[B, Tq]``, where in its sequence each query stands; None: every token is one, ``Tq = Tk``."""
    queries, keys = query.shape[2], key.shape[2]
    window = spec.window if spec.window is not None and spec.window < keys else None
    # chosen by shape and type alone, never by whether a gradient is wanted: both have to give the same bits
    short = queries * keys <= WRITTEN_OUT_TOKENS**2 and query.device.type == "cpu"
    fused = spec.softcap is None and not (short and value.dtype == torch.bfloat16)
    how: dict[str, Any] = {"scale": spec.scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    if fused and window is None and query_position is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **how)
    if query_position is None:
        query_position = torch.arange(keys, device=query.device)[None]
    visible = seen_keys(query_position, keys, window, query.device)
    if fused:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, **how)
    return masked_attention(spec, query, key, value, visible)
