"""Our kernels for packed sequences against the padded way: on the GPU if there is one, or else interpreted."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from dapo.model import tile_kernels
from dapo.model.attention import AttentionSpec, attention_context, attention_forward
from dapo.model.flash import FlashLayout
from dapo.model.packed import PackedAttention
from dapo.model.tile_kernels import Tile, Tiles
from dapo.model.tiles import TiledLayout, tiles_can

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Sequences = tuple[list[int], list[int], list[int]]
SMALL = Tiles(Tile(32, 16, 4, 2), Tile(16, 32, 4, 2), Tile(32, 16, 4, 2))
"""So that short sequences have several, and interpreting them takes little."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_kernels, "TILES", {128: SMALL})


def laid(groups: Sequence[tuple[int, Sequence[int]]]) -> Sequences:
    """Lengths, shared and place of groups: tokens of the prompt and of each response. The first of a group has its
    prompt."""
    lengths, shared, place, end = list[int](), list[int](), list[int](), 0
    for prompt, responses in groups:
        start = end
        for number, response in enumerate(responses):
            common = prompt if number else 0
            lengths.append(prompt + response)
            shared.append(common)
            place += [*range(start, start + common), *range(end, end + prompt + response - common)]
            end += prompt + response - common
    return lengths, shared, place


def normal(sequences: Sequences, heads: int, kv: int, dim: int, seed: int = 0) -> list[Tensor]:
    """Query, key, value as the model has them, and a gradient of the output."""
    made, tokens = torch.Generator().manual_seed(seed), len(set(sequences[2]))
    row = [torch.randn(1, tokens, n, dim, generator=made).to(DEVICE) for n in (heads, kv, kv, heads)]
    return [*(x.transpose(1, 2) for x in row[:3]), row[3]]


def by_tiles(sequences: Sequences, tensors: list[Tensor], scaling: float, window: int | None) -> list[Tensor]:
    """Output, gradients of query, key and value, and divisors."""
    *row, grad = tensors
    lengths, shared, place = sequences
    layout = TiledLayout(lengths, shared, torch.tensor(place), DEVICE)
    out, divisors = layout.forward(row[0], row[1], row[2], scaling, window)
    return [out, *layout.backward(grad, row[0], row[1], row[2], out, divisors, scaling, window), divisors]


def by_padding(sequences: Sequences, tensors: list[Tensor], scaling: float, window: int | None) -> list[Tensor]:
    """All of it but the divisors."""
    *row, grad = (x.detach().requires_grad_() for x in tensors)
    lengths, shared, place = sequences
    layout = PackedAttention(lengths, DEVICE, torch.tensor(place), shared)
    out = layout.attend(AttentionSpec(0, scaling, window), row[0], row[1], row[2])
    return [out, *torch.autograd.grad(out, row, grad)]


@pytest.mark.parametrize("loops", [1, 2])
def test_two_tokens_by_hand(loops: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second query weighs its keys with 1/4 and 3/4."""
    monkeypatch.setattr(tile_kernels, "TILES", {16: Tiles(*(tile._replace(loops=loops) for tile in SMALL))})
    query, key, value, grad = (torch.zeros(1, 1, 2, 16, device=DEVICE) for _ in range(4))
    query[0, 0, :, 0], key[0, 0, 1, 0], value[0, 0, 1, 0] = 1.0, math.log(3), 4.0
    grad = grad.transpose(1, 2).contiguous()
    grad[0, 1, 0, 0] = 1.0
    out, *found, divisors = by_tiles(([2], [0], [0, 1]), [query, key, value, grad], 1.0, None)
    expected = [[0.0, 3.0], [0.0, 0.75 * math.log(3)], [-0.75, 0.75], [0.25, 0.75], [0.0, math.log(4)]]
    for have, want in zip([out[0, :, 0, 0], *(x[0, 0, :, 0] for x in found), divisors[0]], expected, strict=True):
        torch.testing.assert_close(have.cpu(), torch.tensor(want), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_random_rows(seed: int, small: None) -> None:
    draw = random.Random(seed)
    groups = []
    for _ in range(draw.randint(1, 2)):
        more = [draw.choice([0, 1, 5, 30]) for _ in range(draw.randint(0, 2))]  # some ask nothing of their own
        groups.append((draw.choice([1, 7, 16, 33]), [draw.choice([0, 1, 9]), *more]))
    sequences, dim = laid(groups), draw.choice([16, 32, 64, 128])
    kv, group, window = (
        draw.choice([1, 2]),
        draw.choice([1, 3, 7] if dim < 64 else [1, 2]),
        draw.choice([None, None, 1, 5, 20, 1000]),
    )
    tensors = normal(sequences, kv * group, kv, dim, seed)
    *found, divisors = by_tiles(sequences, tensors, dim**-0.5, window)
    for have, want in zip(found, by_padding(sequences, tensors, dim**-0.5, window), strict=True):
        torch.testing.assert_close(have, want, atol=2e-5, rtol=1e-4)
    assert divisors.shape == (kv * group, len(set(sequences[2]))) and bool(divisors.isfinite().all())


def test_the_bits_of_a_group_do_not_depend_on_others(small: None) -> None:
    alone, among = laid([(20, [9, 30])]), laid([(33, [2, 5]), (20, [9, 30]), (3, [40])])
    strangers = 33 + 2 + 5
    tensors = normal(among, 3, 1, 16)
    here = slice(strangers, strangers + 59)
    ours = [*(x[:, :, here] for x in tensors[:3]), tensors[3][:, here]]
    out, *found, divisors = by_tiles(among, tensors, 0.25, None)
    cut = [out[:, here], *(x[:, :, here] for x in found), divisors[:, here]]
    for have, want in zip(cut, by_tiles(alone, ours, 0.25, None), strict=True):
        assert torch.equal(have, want)


def test_every_program_has_work_and_the_longest_begin() -> None:
    """Group of 7 heads: 101 tokens are 707 rows, 12 tiles of 64; then 30 (4), 0 and 80 (9) of the others."""
    lengths, shared, place = laid([(100, [1, 30, 0, 80])])
    layout = TiledLayout(lengths, shared, torch.tensor(place), torch.device("cpu"))
    own, count, _, before, row = layout.query_tiles(7, 64).numpy().T
    assert len(row) == 12 + 4 + 9 and (row < 7 * count).all() and set(own.tolist()) == {0, 101, 131}
    seen = before + np.minimum((row + 64) // 7, count)
    assert (np.diff(seen) <= 0).all() and seen[0] == 180
    # keys: of the first one 2 tiles of its prompt and 1 behind it, of the others 2 of the prompt, and 1 and 2 of theirs
    own, count, before, position, here, keys, slot = layout.key_tiles(64).numpy().T
    assert sorted(zip(own, position, here, keys, slot, strict=True)) == [
        (0, 0, 0, 64, 0),
        (0, 64, 64, 36, 64),
        (0, 100, 100, 1, -1),
        (101, 0, 0, 64, 100),
        (101, 64, 64, 36, 164),
        (101, 100, 101, 30, -1),
        (131, 0, 0, 64, 200),
        (131, 64, 64, 36, 264),
        (131, 100, 131, 64, -1),
        (131, 164, 195, 16, -1),
    ]
    assert (np.diff(count - np.maximum(position - before, 0)) <= 0).all()
    starts, order, tokens = (x.tolist() for x in layout.sums)
    assert tokens == list(range(100)) and starts == list(range(0, 301, 3)) and order[3:6] == [1, 101, 201]


@pytest.mark.parametrize(
    ("lengths", "shared", "place"),
    [
        ([6, 5], [0, 3], [0, 1, 2, 3, 4, 5, 1, 2, 3, 6, 7]),  # not the first tokens of another
        ([6, 5], [0, 3], [0, 1, 2, 3, 4, 5, 0, 2, 1, 6, 7]),  # not in their order
        ([4, 6, 7], [0, 3, 4], [0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 4, 5, 6, 7, 7, 8, 9]),  # of one that itself shares
        ([2, 6], [0, 3], [0, 1, 0, 1, 2, 2, 3, 4]),  # more than the other one has
    ],
)
def test_other_ways_of_sharing_are_refused(lengths: list[int], shared: list[int], place: list[int]) -> None:
    with pytest.raises(ValueError, match="share only the first tokens"):
        TiledLayout(lengths, shared, torch.tensor(place), DEVICE)


@pytest.mark.parametrize(("dim", "fits"), [(8, False), (16, True), (64, True), (96, False), (128, True), (256, False)])
def test_which_heads_are_taken(dim: int, fits: bool) -> None:
    query = torch.empty(1, 2, 3, dim, device="meta")
    assert tiles_can(query, query) is fits
    large = torch.empty(1, 2, 2**30 // dim, dim, device="meta")
    assert not tiles_can(large, large)


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_attention_takes_them(compiled: bool, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as one operation of compiled code, whose shapes the compiler is told; keys and values lie head by head."""
    sequences = laid([(20, [9, 30]), (3, [4])])
    tensors = normal(sequences, 4, 2, 16)
    tensors[1:3] = [x.contiguous() for x in tensors[1:3]]
    expected = by_padding(sequences, tensors, 0.25, 8)
    for module in ("packed", "flash"):
        monkeypatch.setattr(f"dapo.model.{module}.flash_can", lambda *_: True)
    used = list[int]()
    listed = TiledLayout.query_tiles
    monkeypatch.setattr(TiledLayout, "query_tiles", lambda self, *given: used.append(1) or listed(self, *given))
    *row, grad = (x.detach().requires_grad_() for x in tensors)
    layout = PackedAttention(sequences[0], DEVICE, torch.tensor(sequences[2]), sequences[1])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        module = SimpleNamespace(layer_idx=0)
        return attention_forward(module, 2 * query, key, value, None, scaling=0.125, sliding_window=8)[0]

    run = torch.compile(attend, backend="aot_eager") if compiled else attend
    with attention_context(layout):
        out = run(*row)
    for have, want in zip([out, *torch.autograd.grad(out, row, grad)], expected, strict=True):
        torch.testing.assert_close(have, want, atol=2e-5, rtol=1e-4)
    assert len(used) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(14, 2, 64), (28, 4, 128), (4, 4, 32), (8, 1, 16)])
def test_no_less_exact_than_flash(heads: int, kv: int, dim: int, dtype: torch.dtype, window: int | None) -> None:
    draw = random.Random(dim)
    sequences = laid([(draw.randint(1, 300), [draw.randint(0, 700) for _ in range(6)]) for _ in range(5)])
    lengths, shared, place = sequences
    rounded = [x.to(dtype) for x in normal(sequences, heads, kv, dim)]
    exact = by_padding(sequences, [x.double() for x in rounded], dim**-0.5, window)
    *row, grad = rounded
    flash = FlashLayout(lengths, shared, torch.tensor(place, device=DEVICE), DEVICE)
    out, divisors = flash.forward(row[0], row[1], row[2], dim**-0.5, window)
    theirs = [out, *flash.backward(grad, row[0], row[1], row[2], out, divisors, dim**-0.5, window)]
    first, second = (by_tiles(sequences, rounded, dim**-0.5, window) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "bits repeat"
    torch.testing.assert_close(first[4], divisors, atol=1e-3, rtol=1e-3)
    for ours, other, want in zip(first[:4], theirs, exact, strict=True):
        assert (ours - want).norm() < 1.2 * (other - want).norm() + 1e-4 * want.norm()
