# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention over packed sequences on CUDA, forward and backward, in tiles fit for short sequences.

The query heads of a key head are further rows of one tile, token by token: row r stands for token ``r // GROUP`` and
head ``r % GROUP``. So a tile of 64 rows covers few tokens, and hardly any of its scores lie above the diagonal. Every
program has a tile that something is in (lists: :mod:`dapo.model.packed_layout`). Sums are float32, in a fixed order.

Heads have ``DIM`` numbers, tiles the next power of two, ``WIDE``, of which the last ones are zeros. ``scores`` are
products of query and key, or, where they are capped, the hyperbolic tangent of ``inner`` times these; times ``scale``
they are logarithms to base 2.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dapo.model.attention import AttentionSpec
from dapo.model.packed_layout import PackedLayout


class Tile(NamedTuple):
    """Rows (tokens times heads) and keys of a step of a program; its warps and the depth of its loads' pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    """Of a thread at most, so that more programs fit a processor; None: as many as the compiler likes."""


class Tiles(NamedTuple):
    """Of the forward pass, of the gradient of queries, and of that of keys and values."""

    forward: Tile
    queries: Tile
    keys: Tile


TILES = {
    64: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3, 168)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 8, 2)),
}
"""By the widest heads they are for, on cards with ROOMY bytes of shared memory for a program or more (A100, H100)."""

SMALL_TILES = TILES | {256: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 2))}
"""On those with 99 KiB (RTX 4090)."""

ROOMY = 163 * 1024

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _query_tile(tiles, KV: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """Of this program: key head, first token of the sequence in the row, of the shared ones, number of these, and of
    each query the token in the row, head, place in the sequence and whether it is one; the first and last place."""
    item = tiles + (tl.program_id(0) // KV) * 5
    kv = tl.program_id(0) % KV
    own, count, other, shared = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    start = tl.load(item + 4)
    row = start + tl.arange(0, M)
    token = tl.minimum(row // GROUP, count - 1)
    head, first = kv * GROUP + row % GROUP, shared + start // GROUP
    last = shared + tl.minimum((start + M - 1) // GROUP, count - 1)
    return kv, own, other, shared, own + token, head, shared + token, row < count * GROUP, first, last


@triton.jit
def _keys_of(first, window, N: tl.constexpr, WINDOWED: tl.constexpr):
    """Of queries from the place ``first`` of a sequence on: where the keys that any of them sees begin, and where those
    that need a mask, because not all of them see them. With a window all do."""
    begin = tl.maximum(first + 1 - window, 0) if WINDOWED else first * 0
    return begin, begin if WINDOWED else (first + 1) // N * N


@triton.jit
def _rows_of(first, keys, count, window, GROUP: tl.constexpr, M: tl.constexpr, WINDOWED: tl.constexpr):
    """Of keys from the place ``first`` behind the shared tokens on: where the rows that see any of them begin, where
    those that need no mask, because they see all, and where they end. With a window all need one."""
    begin, end = tl.maximum(first, 0) * GROUP, count * GROUP
    border = tl.maximum((first + keys - 1) * GROUP, begin)
    border = tl.minimum(begin + tl.cdiv(border - begin, M) * M, end)
    if WINDOWED:
        end = tl.minimum(end, (first + keys - 1 + window) * GROUP)
    return begin, end if WINDOWED else border, end


@triton.jit
def _places(at, last, own, other, shared, MASKED: tl.constexpr):
    """Where in the row the keys at these places of a sequence stand; of those behind ``last`` its own."""
    at = tl.minimum(at, last) if MASKED else at
    return at + tl.where(at < shared, other, own - shared)


@triton.jit
def _load(at, DIM: tl.constexpr, WIDE: tl.constexpr):
    """``[rows, WIDE]``: what stands ``at`` these places."""
    return tl.load(at) if DIM == WIDE else tl.load(at, tl.arange(0, WIDE)[None, :] < DIM, 0.0)


@triton.jit
def _inside(rows, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Which numbers of a tile of these rows are there."""
    inside = rows[:, None]
    if DIM != WIDE:
        inside &= tl.arange(0, WIDE)[None, :] < DIM
    return inside


@triton.jit
def _scores(a, b, inner, CAPPED: tl.constexpr):
    """Of each row of one with each of the other."""
    scores = tl.dot(a, tl.trans(b), input_precision="ieee")
    if CAPPED:
        small = tl.exp2(tl.abs(scores) * (-2 * _LOG2_E * inner))  # cannot overflow
        size = (1 - small) / (1 + small)
        scores = tl.where(scores < 0, -size, size)
    return scores


@triton.jit
def _masked(scores, at, position, window, MASKED: tl.constexpr, WINDOWED: tl.constexpr):
    if MASKED:
        visible = at[None, :] <= position[:, None]
        if WINDOWED:
            visible &= at[None, :] > position[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit(do_not_specialize=["tokens", "window"])
def _forward(
    query, key, value, out, divisors, tiles, tokens, scale, inner, window,
    q_head, q_token, k_head, k_token, v_head, v_token,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A program a tile of queries."""
    kv, own, other, shared, token, head, position, there, first, last = _query_tile(tiles, KV, GROUP, M)
    dim = tl.arange(0, WIDE)
    q = _load(query + (token * q_token + head * q_head)[:, None] + dim[None, :], DIM, WIDE)
    highest = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDE], tl.float32)
    begin, border = _keys_of(first, window, N, WINDOWED)
    for masked in tl.static_range(WINDOWED, 2):
        for start in tl.range(border if masked else begin, last + 1 if masked else border, N):
            at = start + tl.arange(0, N)
            where = _places(at, last, own, other, shared, masked)[:, None]
            k = _load(key + kv * k_head + (where * k_token + dim[None, :]), DIM, WIDE)
            v = _load(value + kv * v_head + (where * v_token + dim[None, :]), DIM, WIDE)
            scores = _masked(_scores(q, k, inner, CAPPED), at, position, window, masked, WINDOWED)
            higher = tl.maximum(highest, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - higher[:, None])
            fade = tl.exp2(highest - higher)
            total = total * fade + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
            highest = higher
    to = (token * (KV * GROUP) + head)[:, None] * DIM + dim[None, :]
    tl.store(out + to, (acc / total[:, None]).to(out.dtype.element_ty), mask=_inside(there, DIM, WIDE))
    tl.store(divisors + head * tokens + token, (highest + tl.log2(total)) / _LOG2_E, mask=there)


@triton.jit(do_not_specialize=["tokens", "window"])
def _query_gradient(
    query, key, value, out, grad, divisors, rows, found, tiles, tokens, scale, inner, window,
    q_head, q_token, k_head, k_token, v_head, v_token,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A program a tile of queries. ``rows`` ``[T, H, 2]``: to base 2 what ``divisors`` are, and each product of output
    and gradient."""
    kv, own, other, shared, token, head, position, there, first, last = _query_tile(tiles, KV, GROUP, M)
    dim = tl.arange(0, WIDE)
    q = _load(query + (token * q_token + head * q_head)[:, None] + dim[None, :], DIM, WIDE)
    of_query = token * (KV * GROUP) + head
    to = of_query[:, None] * DIM + dim[None, :]
    g = _load(grad + to, DIM, WIDE)
    delta = tl.sum(g.to(tl.float32) * _load(out + to, DIM, WIDE).to(tl.float32), 1)
    divisor = tl.load(divisors + head * tokens + token) * _LOG2_E
    tl.store(rows + 2 * of_query, divisor, mask=there)
    tl.store(rows + 2 * of_query + 1, delta, mask=there)
    acc = tl.zeros([M, WIDE], tl.float32)
    begin, border = _keys_of(first, window, N, WINDOWED)
    for masked in tl.static_range(WINDOWED, 2):
        for start in tl.range(border if masked else begin, last + 1 if masked else border, N):
            at = start + tl.arange(0, N)
            where = _places(at, last, own, other, shared, masked)[:, None]
            k = _load(key + kv * k_head + (where * k_token + dim[None, :]), DIM, WIDE)
            v = _load(value + kv * v_head + (where * v_token + dim[None, :]), DIM, WIDE)
            scores = _scores(q, k, inner, CAPPED)
            weights = tl.exp2(_masked(scores, at, position, window, masked, WINDOWED) * scale - divisor[:, None])
            slopes = weights * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
            if CAPPED:
                slopes *= 1 - scores * scores
            acc = tl.dot(slopes.to(k.dtype), k, acc, input_precision="ieee")
    tl.store(found + to, (acc * (scale / _LOG2_E * inner)).to(found.dtype.element_ty), mask=_inside(there, DIM, WIDE))


@triton.jit(do_not_specialize=["tokens", "window", "copies"])
def _key_gradients(
    query, key, value, grad, rows, of_key, of_value, parts, tiles, tokens, scale, inner, window, copies,
    q_head, q_token, k_head, k_token, v_head, v_token,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A program a tile of keys and what one sequence's queries add to its gradients: these, or the part of them."""
    item = tiles + (tl.program_id(0) // KV) * 7
    kv = tl.program_id(0) % KV
    own, count, shared = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    position, here, keys, slot = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    dim, column, line = tl.arange(0, WIDE), tl.arange(0, N), tl.arange(0, M)
    where = (here + tl.minimum(column, keys - 1))[:, None]
    k = _load(key + kv * k_head + where * k_token + dim[None, :], DIM, WIDE)
    v = _load(value + kv * v_head + where * v_token + dim[None, :], DIM, WIDE)
    first = own * (KV * GROUP) + kv * GROUP
    query += own.to(tl.int64) * q_token + kv * (GROUP * q_head)
    grad += first.to(tl.int64) * DIM
    rows += 2 * first
    key_acc = tl.zeros([N, WIDE], tl.float32)
    value_acc = tl.zeros([N, WIDE], tl.float32)
    begin, border, end = _rows_of(position - shared, keys, count, window, GROUP, M, WINDOWED)
    for late in tl.static_range(0, 2 - WINDOWED):
        for start in tl.range(border if late else begin, end if late else border, M):
            row = start + line
            there, token = row < end, row // GROUP
            of_query = row + token * ((KV - 1) * GROUP)
            # rows that are not there: a query and a gradient of zeros add nothing
            at = (row * q_head + token * (q_token - GROUP * q_head))[:, None] + dim[None, :]
            inside = _inside(there, DIM, WIDE)
            q = tl.load(query + at, inside, 0.0)
            g = tl.load(grad + (of_query[:, None] * DIM + dim[None, :]), inside, 0.0)
            # one load of both: in two, so small, every thread would load all of its rows
            pair = tl.load(rows + (2 * of_query[:, None] + tl.arange(0, 2)[None, :]), there[:, None], 0.0)
            divisor, delta = tl.split(pair)
            scores = _scores(k, q, inner, CAPPED)
            weights = tl.exp2(scores * scale - divisor[None, :])
            if not late:
                earliest = ((position + column - shared) * GROUP)[:, None]
                visible = row[None, :] >= earliest
                if WINDOWED:
                    visible &= row[None, :] < earliest + window * GROUP
                weights = tl.where(visible, weights, 0.0)
            value_acc = tl.dot(weights.to(g.dtype), g, value_acc, input_precision="ieee")
            slopes = weights * (tl.dot(v, tl.trans(g), input_precision="ieee") - delta[None, :])
            if CAPPED:
                slopes *= 1 - scores * scores
            key_acc = tl.dot(slopes.to(q.dtype), q, key_acc, input_precision="ieee")
    key_acc *= scale / _LOG2_E * inner
    real = _inside(column < keys, DIM, WIDE)
    if slot < 0:
        to = ((here + column).to(tl.int64) * KV + kv)[:, None] * DIM + dim[None, :]
        tl.store(of_key + to, key_acc.to(of_key.dtype.element_ty), mask=real)
        tl.store(of_value + to, value_acc.to(of_value.dtype.element_ty), mask=real)
    else:
        to = ((slot + column).to(tl.int64) * KV + kv)[:, None] * DIM + dim[None, :]
        tl.store(parts + to, key_acc, mask=real)
        tl.store(parts + copies.to(tl.int64) * (KV * DIM) + to, value_acc, mask=real)


@triton.jit(do_not_specialize=["copies"])
def _add_up(parts, starts, order, places, of_key, of_value, copies, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program a token that several sequences have in common: the sum of the parts of its two gradients."""
    number, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < WIDTH
    key_sum = tl.zeros([BLOCK], tl.float32)
    value_sum = tl.zeros([BLOCK], tl.float32)
    for at in range(tl.load(starts + number), tl.load(starts + number + 1)):
        part = parts + tl.load(order + at).to(tl.int64) * WIDTH + column
        key_sum += tl.load(part, mask=inside, other=0.0)
        value_sum += tl.load(part + copies.to(tl.int64) * WIDTH, mask=inside, other=0.0)
    to = tl.load(places + number).to(tl.int64) * WIDTH + column
    tl.store(of_key + to, key_sum.to(of_key.dtype.element_ty), mask=inside)
    tl.store(of_value + to, value_sum.to(of_value.dtype.element_ty), mask=inside)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    if device.type != "cuda":
        return ROOMY  # interpreted
    properties: Any = torch.cuda.get_device_properties(device)  # PyTorch's types lack it
    return int(properties.shared_memory_per_block_optin)


class Row(NamedTuple):
    """Query, key and value of a packed row, ``[1, heads, T, D]``, and how the queries attend."""

    query: Tensor
    key: Tensor
    value: Tensor
    spec: AttentionSpec

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def wide(self) -> int:
        """Numbers of a head's row in a tile, of which products need 16."""
        power: int = triton.next_power_of_2(self.query.shape[3])
        return max(16, power)

    @property
    def tiles(self) -> Tiles:
        table = TILES if _shared_memory(self.query.device) >= ROOMY else SMALL_TILES
        return table[min(size for size in table if size >= self.wide)]

    def launch(self, kernel, programs: Tensor, tile: Tile, tensors, numbers=()) -> None:
        """A program of ``kernel`` for each line of ``programs`` and each key head."""
        if not len(programs):
            return
        tokens, kv = self.query.shape[2], self.key.shape[1]
        scaling, window, cap = self.spec.scaling, self.spec.window, self.spec.softcap
        scale, inner = (scaling, 1.0) if cap is None else (cap, scaling / cap)
        strides = [n for x in self[:3] for n in x.stride()[1:3]]
        with torch.cuda.device_of(self.query):
            kernel[(len(programs) * kv,)](
                *(*self[:3], *tensors, programs, tokens, scale * _LOG2_E.value, inner, window or 0, *numbers),
                *strides,
                KV=kv,
                GROUP=self.group,
                DIM=self.query.shape[3],
                WIDE=self.wide,
                CAPPED=cap is not None,
                WINDOWED=window is not None,
                M=tile.rows,
                N=tile.keys,
                num_warps=tile.warps,
                num_stages=tile.stages,
                maxnreg=tile.registers,
            )


def make_row(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Row:
    """Copies only what does not lie number by number, or too far apart to count in 32 bits."""
    near = (x.stride(3) == 1 and x.stride(2) * x.shape[2] < 2**31 for x in (query, key, value))
    first, second, third = (x if so else x.contiguous() for x, so in zip((query, key, value), near, strict=True))
    return Row(first, second, third, spec)


def forward(
    layout: PackedLayout, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Causal attention without gradient.

    Args:
        query: ``[1, H, T, D]``, of the T tokens of the row.
        key, value: ``[1, Hkv, T, D]``.

    Returns:
        ``[1, T, H, D]``, and the logarithm of each softmax's divisor ``[H, T]``, float32.
    """
    row = make_row(query, key, value, layout.narrow(spec))
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    divisors = out.new_empty(query.shape[1:3], dtype=torch.float32)
    tile = row.tiles.forward
    row.launch(_forward, layout.query_tiles(row.group, tile.rows), tile, (out, divisors))
    return out, divisors


def backward(
    layout: PackedLayout,
    spec: AttentionSpec,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    divisors: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, shaped as these, from that of ``out``."""
    row, grad = make_row(query, key, value, layout.narrow(spec)), grad.contiguous()
    of_query, rows = torch.empty_like(out), divisors.new_empty(*out.shape[1:3], 2)
    tile = row.tiles.queries
    tensors = (out, grad, divisors, rows, of_query)
    row.launch(_query_gradient, layout.query_tiles(row.group, tile.rows), tile, tensors)

    _, kv, tokens, dim = key.shape
    starts, order, places = layout.sums
    of_key, of_value = (grad.new_empty(1, tokens, kv, dim) for _ in range(2))
    parts = grad.new_empty(2, len(order), kv, dim, dtype=torch.float32)
    tile = row.tiles.keys
    given = (grad, rows, of_key, of_value, parts)
    row.launch(_key_gradients, layout.key_tiles(tile.keys), tile, given, (len(order),))
    if len(places):
        width = kv * dim
        with torch.cuda.device_of(grad):
            sizes = {"WIDTH": width, "BLOCK": triton.next_power_of_2(width), "num_warps": 4}
            _add_up[(len(places),)](parts, starts, order, places, of_key, of_value, len(order), **sizes)
    return tuple(g.transpose(1, 2) for g in (of_query, of_key, of_value))
