# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""On CUDA: the gradients of keys and values that several sequences have copies of."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_up(copies, starts, order, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program a row of ``out``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    first, end = tl.load(starts + row).to(tl.int32), tl.load(starts + row + 1).to(tl.int32)
    for number in range(first, end):
        place = tl.load(order + number) * WIDTH + columns
        total += tl.load(copies + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, total.to(out.dtype.element_ty), mask=inside)


def add_up_copies(copies: Tensor, starts: Tensor, order: Tensor) -> Tensor:
    """``[rows, ...]``: each row the sum in float32 of its ``copies`` ``[C, ...]``, in their order. ``order`` ``[C]``:
    their numbers by row, and ``starts`` ``[rows + 1]``: where those of each row begin in it; both int64."""
    copies = copies.contiguous()
    out = copies.new_empty(len(starts) - 1, *copies.shape[1:])
    width = copies[0].numel()
    with torch.cuda.device_of(copies):
        sizes = {"WIDTH": width, "BLOCK": triton.next_power_of_2(width), "num_warps": 1 if width <= 256 else 4}
        _add_up[(len(out),)](copies, starts, order, out, **sizes)
    return out
