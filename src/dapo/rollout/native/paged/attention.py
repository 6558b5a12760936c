"""Decode attention over a paged cache (``pool.py``): one new token per row, stored and attended for in one go.

A row's tokens lie in the pages that its row of the *table* names, ``page_tokens`` to a page; rows may share pages.
Page 0 belongs to nobody, so that a table may name it where a row has no page.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dapo.model.attention import AttentionSpec, masked_attention, seen_keys
from dapo.rollout.native.paged.pool import Pool, PoolShape

COPY_BYTES = 64 * 2**20
"""Most that :func:`copy_pages` has in temporary memory."""

_ENOUGH_PROGRAMS = 3.8  # 256 rows of two key heads on 132 processors are 3.88
_WANTED_PROGRAMS = 8
_SHORT_CONTEXT = 1280 * 64  # numbers, of the keys of one head
_LEAST_TOKENS = 128
_MOST_SPLITS = 64


def attend(
    pool: Pool,
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    lengths: Tensor,
    splits: int = 1,
    wide: bool = False,
) -> Tensor:
    """:func:`decode_attention` where there is a GPU, :func:`decode_attention_reference` where there is none."""
    if query.is_cuda:
        return decode_attention(spec, query, key, value, pool.address, pool.shape, table, lengths, splits, wide)
    return decode_attention_reference(spec, query, key, value, pool.tensor, table, lengths)


def decode_attention(
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    address: Tensor,
    shape: PoolShape,
    table: Tensor,
    lengths: Tensor,
    splits: int,
    wide: bool = False,
) -> Tensor:
    """Store one new token per row and attend from it over the row's tokens, itself included. Triton kernels, on the
    current device and stream; nothing waits for the device, so a CUDA graph can capture it.

    Args:
        query: ``[R, H, D]``, any strides between rows and heads. Rounded to the pool's type, like key and value.
        key, value: ``[R, Hkv, D]``, likewise.
        address: int64 ``[1]``, where a pool of ``shape`` lies.
        table: int32 ``[R, P]``, the pages of each row in order; what lies beyond the new token's page is not used.
        lengths: int32 ``[R]``, tokens already stored. The new one is stored at this position, in a page that no other
            row has, unless what it stores is the same (``rollout.native.exact``). -1: the row is idle, nothing is read
            or stored for it.
        splits, wide: programs that share the context of one row and key head, and whether each has more warps, see
            :func:`choose_programs`. Results differ between them by rounding; for one choice, a row's depends on nothing
            but the row.

    Returns:
        ``[R, H, D]`` contiguous, in query's type; zeros for idle rows.
    """
    from dapo.rollout.native.paged import attention_kernel  # needs Triton

    _check(query, key, value, shape, table, lengths)
    tile = attention_kernel.choose_tile(shape.head_dim, query.shape[1] // shape.kv_heads, shape.dtype, wide)
    return attention_kernel.launch(spec, query, key, value, address, shape, table, lengths, splits, tile)


def decode_attention_reference(
    spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, pool: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    """What :func:`decode_attention` computes, in plain PyTorch and float32. It takes the pool itself."""
    shape = PoolShape.of(pool)
    _check(query, key, value, shape, table, lengths)
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    active = (lengths >= 0).nonzero()[:, 0]
    if not len(active):
        return out
    position = lengths[active].long()[:, None]
    pages = table[active].long()
    slots = pages.gather(1, position // shape.page_tokens) * shape.page_tokens + position % shape.page_tokens
    store(pool, spec.layer, key[active], value[active], slots[:, 0])

    used = int(position.max()) // shape.page_tokens + 1
    in_use = torch.arange(used, device=pages.device) * shape.page_tokens <= position
    pages = pages[:, :used].where(in_use, 0)  # what a table names beyond may be no page
    keys, values = (pool[spec.layer, i][pages].transpose(1, 2).flatten(2, 3).float() for i in range(2))
    visible = seen_keys(position, keys.shape[2], spec.window, keys.device)
    # where no token is stored yet there may be NaN, which a weight of 0 does not silence
    values = values.where(visible[:, :, 0, :, None], 0.0)
    rounded = query[active].to(shape.dtype).float()[:, :, None]
    out[active] = masked_attention(spec, rounded, keys, values, visible)[:, :, 0].to(query.dtype)
    return out


def choose_programs(rows: int, shape: PoolShape, max_context_tokens: int, processors: int) -> tuple[int, bool]:
    """Into how many programs to split the context of a row and key head, and whether they are wide.

    1 where rows and key heads alone give each processor some four programs: two of them have more reads under way than
    its share of the bandwidth needs, and splitting costs a second kernel. With fewer programs, wide ones are through a
    short context sooner than two kernels. Otherwise as many as give each processor eight, so that rows of different
    lengths even out, but none of less than 128 tokens.
    """
    programs = rows * shape.kv_heads
    if programs >= _ENOUGH_PROGRAMS * processors:
        return 1, False
    if max_context_tokens * shape.head_dim <= _SHORT_CONTEXT and shape.dtype == torch.bfloat16:
        return 1, True
    wanted = math.ceil(_WANTED_PROGRAMS * processors / programs)
    return max(1, min(wanted, max_context_tokens // _LEAST_TOKENS, _MOST_SPLITS)), False


def store(pool: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Store tokens, such as those of prompts.

    Args:
        key, value: ``[T, Hkv, D]``; rounded to the pool's type.
        slots: int64 ``[T]``, page * page_tokens + place in the page, each once.
    """
    page_tokens = pool.shape[4]
    page, place = slots // page_tokens, slots % page_tokens
    pool[layer, 0][page, :, place] = key.to(pool.dtype)
    pool[layer, 1][page, :, place] = value.to(pool.dtype)


def copy_pages(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy whole pages, all layers of each.
    ``source``, ``target``: int64 ``[n]``. No target may occur twice or be a source."""
    at_a_time = max(1, COPY_BYTES // PoolShape.of(pool).page_bytes)
    for start in range(0, len(source), at_a_time):
        some = slice(start, start + at_a_time)
        pool.index_copy_(2, target[some], pool.index_select(2, source[some]))


def _check(query: Tensor, key: Tensor, value: Tensor, shape: PoolShape, table: Tensor, lengths: Tensor) -> None:
    rows, heads, dim = query.shape
    new_token = (rows, shape.kv_heads, shape.head_dim)
    if dim != shape.head_dim or heads % shape.kv_heads or key.shape != new_token or value.shape != new_token:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not fit {shape}"
        )
    if any(x.stride(-1) != 1 for x in (query, key, value, table)):
        raise ValueError("the last dimension of query, key, value and table must be contiguous")
    if table.dtype != torch.int32 or lengths.dtype != torch.int32 or not lengths.is_contiguous():
        raise ValueError("table and lengths must be int32, lengths contiguous")
    if len(table) != rows or len(lengths) != rows:
        raise ValueError(f"{rows} rows, but a table of {len(table)} and {len(lengths)} lengths")
