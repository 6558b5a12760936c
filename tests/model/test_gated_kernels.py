"""The gated activation's kernels against the formula: on the GPU if there is one, or else interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from dapo.model.gated_kernels import gated, gated_gradient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("width", [48, 1024, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_are_the_formula(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    both, towards = (3 * torch.randn(1, 3, n, generator=generator).to(DEVICE, dtype) for n in (2 * width, width))
    both[0, 0, :2], both[0, 0, width] = torch.tensor([-60.0, 60.0]), 0.0
    leaf = both.double().requires_grad_()
    gate, up = leaf.split(width, -1)
    want = torch.nn.functional.silu(gate) * up
    (slope,) = torch.autograd.grad(want, leaf, towards.double())
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-6}
    torch.testing.assert_close(gated(both).double(), want, **tolerance)
    torch.testing.assert_close(gated_gradient(towards, both).double(), slope, **tolerance)
