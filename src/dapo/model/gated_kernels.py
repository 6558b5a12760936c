# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""SiLU(gate) x up on CUDA where both are halves of one product, and its gradient as one tensor for the next products.

Compiled code would write the two halves of the gradient by masks, and read gate, up and what comes in twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _gated(both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program for a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    place = both + row * 2 * WIDTH + columns
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    found = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + columns, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(grad, both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    place = row * 2 * WIDTH + columns
    slope = tl.load(grad + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(both + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    of_gate = slope * up * share * (1.0 + gate * (1.0 - share))
    tl.store(out + place, of_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + place + WIDTH, (slope * gate * share).to(out.dtype.element_ty), mask=inside)


def gated(both: Tensor) -> Tensor:
    """``[..., 2 I]`` in, gate and up; ``[..., I]`` out."""
    both = both.contiguous()
    return _run(_gated, both.new_empty(*both.shape[:-1], both.shape[-1] // 2), both)


def gated_gradient(grad: Tensor, both: Tensor) -> Tensor:
    """That of ``both``."""
    return _run(_gradient, torch.empty_like(both.contiguous()), grad.contiguous(), both.contiguous())


def _run(kernel, out: Tensor, *given: Tensor) -> Tensor:
    width = given[-1].shape[-1] // 2
    rows = given[-1].numel() // (2 * width)
    if rows:
        with torch.cuda.device_of(out):
            kernel[(rows, triton.cdiv(width, BLOCK))](*given, out, WIDTH=width, BLOCK=BLOCK)
    return out
