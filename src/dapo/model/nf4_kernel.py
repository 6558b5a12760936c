# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Weights in 4 bits made wide on CUDA in one pass, as :func:`dapo.model.nf4.widened` does it in three.

They are made again in each step of decoding, where nothing but the memory's speed counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _widen(codes, scales, pairs, wide, count, PER_SCALE: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = number < count
    byte = tl.load(codes + number // 2, mask=inside, other=0).to(tl.int32)
    value = tl.load(pairs + 2 * byte + (number % 2).to(tl.int32))
    scale = tl.load(scales + number // PER_SCALE, mask=inside, other=0.0)
    product = value.to(tl.float32) * scale.to(tl.float32)
    tl.store(wide + number, product.to(wide.dtype.element_ty), mask=inside)


def widen(codes: torch.Tensor, scales: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """``[out, in]``, in the type of the scales."""
    wide = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=scales.dtype, device=codes.device)
    grid = (triton.cdiv(wide.numel(), BLOCK),)
    with torch.cuda.device_of(wide):
        _widen[grid](codes, scales, pairs, wide, wide.numel(), wide.numel() // scales.numel(), BLOCK)
    return wide
