"""The kernel that makes weights wide against the operations of PyTorch: on the GPU if there is one, or interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from dapo.model.nf4 import NF4Linear, widened
from dapo.model.nf4_kernel import widen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_same(dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = NF4Linear(nn.Linear(192, 37, dtype=dtype))  # 7,104 numbers: the last block is not full
    expected = widened(layer.codes, layer.scales, layer.pairs)
    layer.to(device)
    cut = 0.0 if dtype == torch.float32 or device == "cuda" else 2**-7  # Triton's interpreter cuts bfloat16 off
    torch.testing.assert_close(widen(layer.codes, layer.scales, layer.pairs).cpu(), expected, rtol=cut, atol=0)
