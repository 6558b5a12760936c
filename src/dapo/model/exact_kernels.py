# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The Triton kernels behind :mod:`dapo.model.exact`: products and means of rows, in an order that is always the same.

An element of a product is summed over the inner dimension from its first number to its last, by one program. Tiles of
two sizes serve few rows and many; both are made of the same instruction, which sums 16 products at a time, so an
element's bits should not depend on the size. Whether that is so on this card is tried once; if not, the small one
serves all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns and inner numbers of a step of a program; its warps and the depth of its loads' pipeline."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


# 64 rows are the least of Hopper's instruction for a group of four warps; fewer rows would be another instruction. Few
# columns, since decoding has few rows and must keep all processors reading weights.
NARROW = Tile(64, 32, 128, 4, 4)
WIDE = Tile(128, 128, 64, 8, 3)
FLOAT32 = Tile(64, 64, 32, 4, 2)
"""Without tensor cores: exact and not fast."""

_ENOUGH_PROGRAMS = 132
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit(do_not_specialize=["rows"])
def _product(
    left, right, bias, out, rows, left_row, right_inner, right_column,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr, PRODUCT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """One tile of the result. Programs go down bands of ``BAND`` tiles, so that neighbours in time share what they
    read."""
    program = tl.program_id(0)
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(COLUMNS, BLOCK_N)
    band = program // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    inside = program - band * BAND * across
    row = ((band * BAND + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = ((inside // height) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    there, wanted = row < rows, column < COLUMNS
    lefts = left + tl.where(there, row, 0)[:, None] * left_row + inner[None, :]
    rights = right + inner[:, None].to(tl.int64) * right_inner + tl.where(wanted, column, 0)[None, :] * right_column
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            a = tl.load(lefts)
            b = tl.load(rights)
        else:
            a = tl.load(lefts, mask=(start + inner < DEPTH)[None, :], other=0.0)
            b = tl.load(rights, mask=(start + inner < DEPTH)[:, None], other=0.0)
        acc = tl.dot(a.to(PRODUCT_DTYPE), b.to(PRODUCT_DTYPE), acc, input_precision="ieee")
        lefts += BLOCK_K
        rights += BLOCK_K * right_inner
    if BIASED:
        acc += tl.load(bias + column, mask=wanted, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * COLUMNS + column[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=there[:, None] & wanted[None, :])


@triton.jit
def _mean(values, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program a row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    x = tl.load(values + row * WIDTH + place, mask=place < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row, (tl.sum(x, 0) / WIDTH).to(out.dtype.element_ty))


def product(left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``left @ right + bias`` ``[M, N]`` in ``dtype``, summed in float32; an element depends on its row and column
    alone.

    Args:
        left: ``[M, K]``, bfloat16 or float32.
        right: ``[K, N]``, of this type, with any strides.
        bias: ``[N]``.
    """
    rows, columns = len(left), right.shape[1]
    if left.dtype != right.dtype or left.dtype not in _TYPES:
        raise RuntimeError(f"runtime.exact multiplies bfloat16 or float32, not {left.dtype} and {right.dtype}")
    out = torch.empty(rows, columns, dtype=dtype, device=left.device)
    if out.numel():
        _launch(left.contiguous(), right, bias, out, _tile(rows, columns, left))
    return out


def _tile(rows: int, columns: int, left: Tensor) -> Tile:
    if left.dtype == torch.float32:
        return FLOAT32
    many = rows > NARROW.rows and triton.cdiv(rows, WIDE.rows) * triton.cdiv(columns, WIDE.columns) >= _ENOUGH_PROGRAMS
    return WIDE if many and tiles_agree(left.device) else NARROW


def _launch(left: Tensor, right: Tensor, bias: Tensor | None, out: Tensor, tile: Tile) -> None:
    (rows, depth), columns = left.shape, right.shape[1]
    programs = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    with torch.cuda.device_of(left):
        _product[(programs,)](
            *(left, right, left if bias is None else bias, out, rows, depth, *right.stride()),
            COLUMNS=columns,
            DEPTH=depth,
            BIASED=bias is not None,
            # Triton's interpreter, on a CPU in tests, would multiply the bits of bfloat16 as integers
            PRODUCT_DTYPE=_TYPES[left.dtype] if left.is_cuda else tl.float32,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.inner,
            BAND=8,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


@cache
def tiles_agree(device: torch.device) -> bool:
    """Whether products of both tiles have the same bits on this card, whatever the right side's layout, and where a
    last step is not full."""
    made = torch.Generator().manual_seed(0)
    for depth in (4096, 4100):
        left, weight = (torch.randn(n, depth, generator=made).to(device, torch.bfloat16) for n in (200, 300))
        for right in (weight.T, weight.T.contiguous()):
            narrow, wide = torch.empty(2, 200, 300, device=device)
            _launch(left, right, None, narrow, NARROW)
            _launch(left, right, None, wide, WIDE)
            if not torch.equal(narrow, wide):
                return False
    return True


def row_means(values: Tensor) -> Tensor:
    """``values.mean(-1)``; a mean depends on its row alone."""
    values = values.contiguous()
    if values.data_ptr() % 16:  # code for other addresses might add in another order
        values = values.clone()
    out = torch.empty(values.shape[:-1], dtype=values.dtype, device=values.device)
    if out.numel():
        width = values.shape[-1]
        with torch.cuda.device_of(values):
            _mean[(out.numel(),)](values, out, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4)
    return out
