# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The Triton kernels behind :mod:`dapo.rollout.native.paged.attention`. Imports Triton, so import it on first use.

One program attends for the query heads of one key head of one row, over one split of the row's context. Decoding
reads every cached byte once and does little with it, so the kernel is written to keep many reads under way:

- The query heads of a key head form the rows of one small matrix product (at least 16 rows, the tensor core's tile), so
  that keys and values are read once for all of them.
- A program is one warp where the accumulator allows. Then no two warps wait for each other inside the loop: the
  maximum and the sum of a row are four lanes' shuffles, and the probabilities are in the registers of the second
  product already. Processors are filled by many small programs instead.
- Before its first read of the cache a program waits for memory twice: for the row's length and the pool's address, then
  for the first pages and the query. The new token is merged after the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dapo.model.attention import AttentionSpec
from dapo.rollout.native.paged.pool import PoolShape


@dataclass(frozen=True, slots=True)
class Tile:
    """``block``: keys per step of the loop; ``warps`` per program; ``stages``: depth of the loads' pipeline."""

    block: int
    warps: int
    stages: int


def choose_tile(head_dim: int, group: int, dtype: torch.dtype, wide: bool = False) -> Tile:
    """The shape of a program. Fixed by head size, query heads per key head and type: no tuning when an engine starts.

    An H100 or H200 moves 3.3 to 4.8 TB/s with some 700 ns from request to arrival, so by Little's law each of its 132
    processors needs 18 to 25 KB of reads under way. A pipeline of three stages has two blocks of keys and values under
    way. In bfloat16, with the 227 KB of shared memory and 64 K registers of a processor:

        ===  =====  =====  ===============  ==================  =====================  ===============
        D    block  warps  bytes per block  registers a thread  programs at a time     reads under way
        ===  =====  =====  ===============  ==================  =====================  ===============
        64   32     1      8 KB             168                 11 (by shared memory)  176 KB
        128  64     4      32 KB            -                   2 (by shared memory)   128 KB
        256  32     4      32 KB            150                 3 (by shared memory)   192 KB
        ===  =====  =====  ===============  ==================  =====================  ===============

    Six times what is needed, which covers programs that are starting or ending. A loop step is about 400 instructions
    for 8 KB, so at full bandwidth (21 bytes per clock and processor) one of the four schedulers' slots is in use. At
    D = 64 every tile that was tried reads 3.4 to 3.6 TB/s on an H200 (which copies at 4.2). At D = 128 this one reads
    3.6, two warps with blocks of 32 read 3.4, and one warp with blocks of 16, which is all its registers hold, 3.2.
    With wider heads or more than 16 query heads one warp cannot hold the accumulator. Where ``wide`` programs are asked
    for, there are too few to fill the processors: a step of 128 keys takes them hardly longer than one of 32.

    Float32 is exact and not fast: its products run on the ordinary units, so the block is small and the warps are many.
    """
    if dtype == torch.float32:
        return Tile(block=16, warps=4, stages=2)
    if head_dim <= 64 and group <= 16:
        return Tile(block=128, warps=4, stages=3) if wide else Tile(block=32, warps=1, stages=3)
    return Tile(block=64 if head_dim <= 128 and group <= 16 else 32, warps=4, stages=3)


@triton.jit
def _logit2(product, scaling, softcap):
    """The attention logit of a query-key product, in base 2: times log2(e), so that exp2 serves for exp.

    The soft cap's hyperbolic tangent is written with an exponential that cannot overflow.
    """
    if softcap is None:
        logit = product * (scaling * 1.4426950408889634)
    else:
        small = tl.exp2(tl.abs(product) * (-2.0 * 1.4426950408889634 * scaling / softcap))
        size = (softcap * 1.4426950408889634) * (1.0 - small) / (1.0 + small)
        logit = tl.where(product < 0, -size, size)
    return logit


@triton.jit(do_not_specialize=["layer", "pages", "splits", "table_row"])
def _attend(
    query,
    key,
    value,
    address,
    table,
    lengths,
    out,
    partial,
    extremes,
    layer,
    pages,
    splits,
    scaling,
    window,
    softcap,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    table_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    where = tl.load(address)

    group = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + group
    in_tile = (group < GROUP)[:, None] & (dim < DIM)[None, :]
    out_place = (row * (KV_HEADS * GROUP) + head)[:, None] * DIM + dim[None, :]
    if length < 0:
        if ONE:
            tl.store(out + out_place, tl.zeros([BLOCK_G, BLOCK_D], out.dtype.element_ty), mask=in_tile)
        return

    page_size: tl.constexpr = KV_HEADS * PAGE_TOKENS * DIM
    pool = tl.multiple_of(where.to(tl.pointer_type(DTYPE)), 16)
    keys = pool + layer.to(tl.int64) * 2 * pages * page_size + kv_head * (PAGE_TOKENS * DIM)
    values = keys + pages.to(tl.int64) * page_size

    # this split's part of the cached tokens that are visible; they begin at `first`, so only the end needs a mask
    first = 0
    if window is not None:
        first = tl.maximum(length + 1 - window, 0)
    blocks = tl.cdiv(length - first, BLOCK_N)
    begin = first + blocks * split // splits * BLOCK_N
    end = tl.minimum(first + blocks * (split + 1) // splits * BLOCK_N, length)

    column = tl.arange(0, BLOCK_N)
    table += row * table_row
    page = tl.load(table + (begin + column) // PAGE_TOKENS, mask=begin + column < end, other=0)

    # the type of the pool, so that a new key weighs now what it will weigh when it is read back
    q = tl.load(query + row * query_row + head[:, None] * query_head + dim[None, :], mask=in_tile, other=0.0).to(DTYPE)
    new_key = tl.load(key + row * key_row + kv_head * key_head + dim, mask=dim < DIM, other=0.0).to(DTYPE)
    new_value = tl.load(value + row * value_row + kv_head * value_head + dim, mask=dim < DIM, other=0.0).to(DTYPE)

    scores_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    weights_sum = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        token = start + column
        inside = token < end
        place = (page.to(tl.int64) * page_size + (token & (PAGE_TOKENS - 1)) * DIM)[:, None] + dim[None, :]
        # the pages of the next block: a table read in the same step would take half of the pipeline's depth
        page = tl.load(table + (token + BLOCK_N) // PAGE_TOKENS, mask=token + BLOCK_N < end, other=0)
        # never read what no token has been written to: 0 times a stray NaN is NaN
        readable = inside[:, None] & (dim < DIM)[None, :]
        k = tl.load(keys + place, mask=readable, other=0.0)
        v = tl.load(values + place, mask=readable, other=0.0)

        product = tl.dot(q.to(PRODUCT_DTYPE), tl.trans(k.to(PRODUCT_DTYPE)), input_precision="ieee")
        scores = tl.where(inside[None, :], _logit2(product, scaling, softcap), float("-inf"))
        higher = tl.maximum(scores_max, tl.max(scores, 1))  # finite: a block has at least one token
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(scores_max - higher)
        weights_sum = weights_sum * fade + tl.sum(weights, 1)
        acc = tl.dot(
            weights.to(DTYPE).to(PRODUCT_DTYPE), v.to(PRODUCT_DTYPE), acc * fade[:, None], input_precision="ieee"
        )
        scores_max = higher

    if split == 0:  # the one program of this row and key head that has, and stores, the new token
        product = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1)
        score = _logit2(product, scaling, softcap)
        higher = tl.maximum(scores_max, score)
        weight = tl.exp2(score - higher)
        fade = tl.exp2(scores_max - higher)
        weights_sum = weights_sum * fade + weight
        acc = acc * fade[:, None] + weight[:, None] * new_value.to(tl.float32)[None, :]
        scores_max = higher

        new_page = tl.load(table + length // PAGE_TOKENS).to(tl.int64)
        new_place = new_page * page_size + (length & (PAGE_TOKENS - 1)) * DIM + dim
        tl.store(keys + new_place, new_key, mask=dim < DIM)
        tl.store(values + new_place, new_value, mask=dim < DIM)

    if ONE:
        tl.store(out + out_place, (acc / weights_sum[:, None]).to(out.dtype.element_ty), mask=in_tile)
    else:
        part = (row * (KV_HEADS * GROUP) + head) * splits + split
        tl.store(extremes + 2 * part, scores_max, mask=group < GROUP)
        tl.store(extremes + 2 * part + 1, weights_sum, mask=group < GROUP)
        if split == 0 or begin < end:  # what has no token is not read either
            tl.store(partial + part[:, None] * DIM + dim[None, :], acc, mask=in_tile)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    partial,
    extremes,
    lengths,
    out,
    splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row and query head: its splits, each weighed by what its softmax would have been beside the others."""
    row = tl.program_id(0).to(tl.int64)
    head = row * HEADS + tl.program_id(1)
    dim = tl.arange(0, BLOCK_D)
    if tl.load(lengths + row) < 0:
        tl.store(out + head * DIM + dim, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=dim < DIM)
        return
    split = tl.arange(0, BLOCK_S)
    place = head * splits + split
    scores_max = tl.load(extremes + 2 * place, mask=split < splits, other=float("-inf"))
    weights_sum = tl.load(extremes + 2 * place + 1, mask=split < splits, other=0.0)
    weight = tl.exp2(scores_max - tl.max(scores_max, 0))  # split 0 has the new token, so the maximum is finite
    used = (scores_max > float("-inf"))[:, None] & (dim < DIM)[None, :]
    acc = tl.load(partial + place[:, None] * DIM + dim[None, :], mask=used, other=0.0)
    result = tl.sum(acc * weight[:, None], 0) / tl.sum(weights_sum * weight, 0)
    tl.store(out + head * DIM + dim, result.to(out.dtype.element_ty), mask=dim < DIM)


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def launch(
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    address: Tensor,
    shape: PoolShape,
    table: Tensor,
    lengths: Tensor,
    splits: int,
    tile: Tile,
) -> Tensor:
    """Run the kernels. Arguments as in :func:`attention.decode_attention`, which has checked them."""
    rows, heads, dim = query.shape
    group = heads // shape.kv_heads
    out = torch.empty(rows, heads, dim, dtype=query.dtype, device=query.device)
    partial = extremes = out  # not touched with one split
    if splits > 1:
        partial = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=query.device)
        extremes = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=query.device)
    block_d = max(16, triton.next_power_of_2(dim))  # 16: the least that a matrix product sums over
    _attend[(rows, shape.kv_heads, splits)](
        *(query, key, value, address, table, lengths, out, partial, extremes),
        spec.layer,
        shape.pages,
        splits,
        spec.scaling,
        spec.window,
        spec.softcap,
        *(stride for x in (query, key, value) for stride in x.stride()[:2]),
        table.stride(0),
        KV_HEADS=shape.kv_heads,
        GROUP=group,
        PAGE_TOKENS=shape.page_tokens,
        DIM=dim,
        DTYPE=_TYPES[shape.dtype],
        # Triton's interpreter, which runs this on a CPU in tests, would multiply the bits of bfloat16 as integers
        PRODUCT_DTYPE=_TYPES[shape.dtype] if query.is_cuda else tl.float32,
        ONE=splits == 1,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_D=block_d,
        BLOCK_N=tile.block,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        _combine[(rows, heads)](
            *(partial, extremes, lengths, out),
            splits,
            HEADS=heads,
            DIM=dim,
            BLOCK_S=16 if splits <= 16 else triton.next_power_of_2(splits),
            BLOCK_D=block_d,
            num_warps=4,
        )
    return out
