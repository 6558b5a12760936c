"""The kernels of ``runtime.exact`` against the formulas: on the GPU if there is one, or else interpreted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")
from dapo.model import exact, exact_kernels
from dapo.model.exact import row_invariant
from dapo.model.exact_kernels import FLOAT32, NARROW, WIDE, Tile, product, row_means
from helpers import put_operations_back

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MADE = torch.Generator().manual_seed(5)


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """Other tests of this process have PyTorch's own operations."""
    yield
    put_operations_back()


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=MADE).to(DEVICE, dtype)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 32, 48), (70, 200, 33), (3, 24, 300), (0, 16, 8)])
def test_a_product(rows: int, depth: int, columns: int, dtype: torch.dtype, biased: bool) -> None:
    left, weight = normal(rows, depth, dtype=dtype), normal(columns, depth, dtype=dtype)
    bias = normal(columns, dtype=dtype) if biased else None
    expected = left.double() @ weight.double().T + (0 if bias is None else bias.double())
    for right in (weight.T, weight.T.contiguous()):  # a linear layer's, and GPT-2's
        found = product(left, right, bias, torch.float32)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
        narrow = product(left, right, bias, dtype)  # which the interpreter cuts, and does not round
        torch.testing.assert_close(narrow.float(), found, rtol=0 if dtype == torch.float32 else 2**-7, atol=1e-6)


@pytest.mark.parametrize("tile", [NARROW, WIDE, FLOAT32])
def test_each_tile_computes_all_of_it(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over more than one band of tiles, the last of them not full."""
    monkeypatch.setattr(exact_kernels, "_tile", lambda *_: tile)
    dtype = torch.float32 if tile is FLOAT32 else torch.bfloat16
    left, weight = normal(9 * tile.rows + 5, 40, dtype=dtype), normal(2 * tile.columns + 3, 40, dtype=dtype)
    found = product(left, weight.T, None, torch.float32)
    torch.testing.assert_close(found.double(), left.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [16, 100, 896])
def test_means_of_rows(width: int) -> None:
    values = normal(2, 7, width)
    torch.testing.assert_close(row_means(values), values.mean(-1), rtol=1e-6, atol=1e-6)
    assert torch.equal(row_means(values[1, 3:4]), row_means(values)[1, 3:4])


def test_other_types_are_refused() -> None:
    with pytest.raises(RuntimeError, match="multiplies bfloat16 or float32, not torch"):
        product(normal(2, 4).half(), normal(4, 2).half(), None, torch.float16)


@pytest.mark.gpu
def test_the_two_tiles_agree() -> None:
    assert exact_kernels.tiles_agree(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("depth", [4096, 4100])
@pytest.mark.parametrize("row_major", [False, True])
def test_tiles_that_differ_in_one_case_do_not_agree(depth: int, row_major: bool, monkeypatch) -> None:
    def launch(left, right, bias, out, tile) -> None:
        out.fill_(tile is WIDE and left.shape[1] == depth and right.is_contiguous() == row_major)

    monkeypatch.setattr(exact_kernels, "_launch", launch)
    assert not exact_kernels.tiles_agree.__wrapped__(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("depth", "columns"), [(896, 1152), (896, 9728), (4864, 896), (100, 77)])
def test_the_bits_of_a_row_do_not_depend_on_others(depth: int, columns: int, dtype: torch.dtype) -> None:
    left, weight = normal(3000, depth, dtype=dtype), normal(columns, depth, dtype=dtype)
    bias = normal(columns).to(dtype)
    with row_invariant(), torch.inference_mode():
        every = torch.nn.functional.linear(left, weight, bias)
        means = left.float().pow(2).mean(-1, keepdim=True)
        for start, count in ((0, 1), (17, 1), (5, 8), (100, 64), (1001, 200), (2999, 1), (64, 2000)):
            some = left[start : start + count]
            assert torch.equal(torch.nn.functional.linear(some, weight, bias), every[start : start + count])
            assert torch.equal(some.float().pow(2).mean(-1, keepdim=True), means[start : start + count])


@pytest.mark.gpu
def test_products_outside_are_what_they_were() -> None:
    left, weight = normal(300, 896, dtype=torch.bfloat16), normal(640, 896, dtype=torch.bfloat16)
    bias = normal(640, dtype=torch.bfloat16)

    def compute() -> list[torch.Tensor]:
        wide = torch.mm(left, weight.T, out_dtype=torch.float32)
        return [left @ weight.T, torch.addmm(bias, left, weight.T), wide, left.float().mean(-1)]

    before = compute()
    with row_invariant():
        inside = compute()
    for found, expected, other in zip(compute(), before, inside, strict=True):
        assert torch.equal(found, expected)
        torch.testing.assert_close(other, expected, rtol=1e-2, atol=0.5)


@pytest.mark.parametrize(("depth", "columns"), [(96, 7), (7, 96), (5, 5), (64, 64)])
def test_products_on_a_cpu_and_what_is_put_back(depth: int, columns: int) -> None:
    left, right = torch.randn(40, depth, generator=MADE), torch.randn(depth, columns, generator=MADE)
    before = left @ right
    with exact.row_invariant():
        assert exact.active() and exact.in_use()
        rows = torch.cat([row[None] @ right for row in left])
        assert torch.equal(left @ right, rows) and torch.equal(left @ right.t().contiguous().t(), rows)
        with exact.row_invariant():  # inside of itself
            pass
        assert exact.active() and exact.in_use()
    torch.testing.assert_close(rows, before)
    for end in (lambda: None, put_operations_back):
        end()
        assert not exact.active() and not exact.in_use() and torch.equal(left @ right, before)
