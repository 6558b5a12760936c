"""What the flash kernels are given, and what is made of their gradients, with the kernels written out for the CPU.

The kernels themselves are compared in tests/training/test_trainer_cuda.py. Here stands what they promise: queries that
are fewer than the keys of their sequence are its last ones, and a window counts the keys before a query's own one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dapo.model.attention import AttentionSpec
from dapo.model.flash import flash_can
from dapo.model.packed import PackedAttention

HEADS, KV_HEADS, DIM = 4, 2, 8


def attention(row: list[torch.Tensor], borders: tuple[Any, ...], scale: float, left: int | None) -> torch.Tensor:
    """``[tokens, heads, D]`` in and out; ``borders``: of queries and of keys, and the most of each in a sequence."""
    queries, keys = (b.tolist() for b in borders[:2])
    assert borders[2:] == tuple(int(np.diff(b).max()) for b in (queries, keys))
    found = []
    for q, q_end, k, k_end in zip(queries, queries[1:], keys, keys[1:], strict=False):
        query = row[0][q:q_end]
        key, value = (x[k:k_end].repeat_interleave(HEADS // KV_HEADS, 1) for x in row[1:])
        place = torch.arange(q_end - q)[:, None] + (k_end - k) - (q_end - q)
        before = place - torch.arange(k_end - k)
        hidden = (before < 0) | (before > (k_end if left is None else left))
        scores = (torch.einsum("qhd,khd->hqk", query, key) * scale).masked_fill(hidden, float("-inf"))
        found.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
    return torch.cat(found)


def forward(*given: Any, scale: float, **window: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = attention(list(given[:3]), given[3:7], scale, window.get("window_size_left"))
    return out, torch.zeros(HEADS, len(out))


def backward(*given: Any, scale: float, **window: int) -> tuple[torch.Tensor, ...]:
    def out(*row: torch.Tensor) -> torch.Tensor:
        return attention(list(row), given[6:10], scale, window.get("window_size_left"))

    found: tuple[torch.Tensor, ...] = torch.func.vjp(out, *given[1:4])[1](given[0])
    return found


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("sharing", [True, False])
def test_the_kernels_get_the_sequences_and_the_row_its_gradients(
    sharing: bool, window: int | None, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups, the samples of the first one apart from each other, one of them without a token of its own."""
    lengths, shared = [9, 5, 12, 6, 9], [0, 0, 6, 6, 4]
    first, second, place, end = list(range(6)), list(range(9, 13)), [], 0
    for length, common, prompt in zip(lengths, shared, [[], [], first, first, second], strict=True):
        place += [*prompt, *range(end, end + length - common)]
        end += length - common
    if not sharing:
        place, shared, end = list(range(sum(lengths))), [0] * len(lengths), sum(lengths)
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, heads, end, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    row = [torch.randn(size, generator=generator, requires_grad=True) for size in sizes]
    towards = torch.randn(1, end, HEADS, DIM, generator=generator)
    spec = AttentionSpec(0, DIM**-0.5, window)
    results = []
    for by_kernels in (True, False):
        monkeypatch.setattr("dapo.model.packed.flash_can", lambda *_, by_kernels=by_kernels: by_kernels)
        layout = PackedAttention(lengths, "cpu", torch.tensor(place), shared)
        out = layout.attend(spec, *row)
        results.append([out, *torch.autograd.grad(out, row, towards)])
    for have, want in zip(*results, strict=True):
        torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("card", "works"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_older_cards_go_the_padded_way(card: tuple[int, int], works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    query: Any = SimpleNamespace(shape=(1, 2, 3, 64), is_cuda=True, device="cuda:0", dtype=torch.bfloat16)
    assert flash_can(query, query, None) is works
    assert not flash_can(query, query, 5.0)
