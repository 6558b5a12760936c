"""Packed attention with shared prompts against every sequence on its own."""

from __future__ import annotations

import pytest
import torch

from dapo.model.attention import WRITTEN_OUT_TOKENS, AttentionSpec
from dapo.model.packed import PackedAttention

HEADS, KV_HEADS, DIM = 4, 2, 8


def alone(spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of one sequence, ``[T, heads, D]`` in and out, by the formula."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * spec.scaling
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
    hidden = (distance < 0) | (distance >= (spec.window or len(query)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


@pytest.mark.parametrize("sizes", [(5, [3, 7, 0, 4]), (150, [90, 260, 100])], ids=["short", "long"])
@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 2.0}, {"window": 60, "softcap": 3.0}])
def test_a_shared_prompt_changes_no_output_and_no_gradient(
    sizes: tuple[int, list[int]], options: dict[str, float]
) -> None:
    """One prompt and several responses in one row, and a stranger behind them; the long ones take the fused kernel."""
    prompt, responses = sizes
    assert (max(responses) * (prompt + max(responses)) > WRITTEN_OUT_TOKENS**2) == (prompt > 100)
    spec = AttentionSpec(0, DIM**-0.5, **options)  # type: ignore[arg-type]
    lengths = [*(prompt + n for n in responses), 6]
    shared = [0, *[prompt] * (len(responses) - 1), 0]
    place, end = [], 0
    for length, common in zip(lengths, shared, strict=True):
        place += [*range(common), *range(end, end + length - common)]
        end += length - common
    generator = torch.Generator().manual_seed(0)
    row = [torch.randn(end, n, DIM, generator=generator, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS)]
    towards = torch.randn(end, HEADS, DIM, generator=generator)

    packed = PackedAttention(lengths, place=torch.tensor(place), shared=shared)
    got = packed.attend(spec, *(x.transpose(0, 1).unsqueeze(0) for x in row))[0]
    got_gradients = torch.autograd.grad((got * towards).sum(), row)

    expected = torch.zeros(end, HEADS, DIM)
    start = 0
    for length, common in zip(lengths, shared, strict=True):
        places = torch.tensor(place[start : start + length])
        start += length
        out = alone(spec, *(x[places] for x in row))
        expected = expected.index_add(0, places[common:], out[common:])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    expected_gradients = torch.autograd.grad((expected * towards).sum(), row)
    for mine, theirs in zip(got_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_a_row_of_another_length_is_refused() -> None:
    packed = PackedAttention([3, 4], place=torch.tensor([0, 1, 2, 0, 1, 3, 4]), shared=[0, 2])
    spec = AttentionSpec(0, 1.0)
    with pytest.raises(ValueError, match="expected one row of 5 tokens"):
        packed.attend(spec, *(torch.zeros(1, 1, 7, DIM) for _ in range(3)))


def test_padding_beyond_a_window_leaves_gradients_finite() -> None:
    """Two sequences of one block: a long shared prompt with one token of its own, a short one with nine."""
    first = range(10)
    place = [*first, 10, *first, 11, 12, 13, 12, *range(14, 23)]
    packed = PackedAttention([11, 11, 2, 10], place=torch.tensor(place), shared=[0, 10, 0, 1])
    generator = torch.Generator().manual_seed(0)
    row = [torch.randn(1, n, 23, DIM, generator=generator, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS)]
    packed.attend(AttentionSpec(0, 1.0, window=3), *row).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in row)
