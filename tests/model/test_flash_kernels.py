"""The sums over copies against ``index_add``: on the GPU if there is one, or else interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from dapo.model.flash_kernels import add_up_copies

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 8), (8, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_is_the_sum_of_its_copies(dtype: torch.dtype, heads: int, dim: int) -> None:
    """Rows with one copy, with several, and without any."""
    place = torch.tensor([0, 1, 2, 4, 0, 1, 5, 0, 1, 2, 6], device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    copies = torch.randn(len(place), heads, dim, generator=generator).to(DEVICE, dtype)
    places, order = place.sort(stable=True)
    found = add_up_copies(copies, torch.searchsorted(places, torch.arange(8, device=DEVICE)), order)
    want = torch.zeros(7, heads, dim, device=DEVICE).index_add_(0, place, copies.float())
    torch.testing.assert_close(found, want.to(dtype))
