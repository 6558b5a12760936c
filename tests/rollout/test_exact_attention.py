"""Attention token by token: what packed attention computes, and the bits of a step of decoding."""

from __future__ import annotations

import pytest
import torch

from dapo.model.attention import AttentionSpec
from dapo.model.packed import PackedAttention
from dapo.rollout.native import exact
from dapo.rollout.native.exact import RowAttention
from dapo.rollout.native.paged.attention import decode_attention
from helpers import let_one_number_be_an_index

LENGTHS, SHARED = [40, 70, 45, 3], [0, 0, 40, 0]  # the third has the first one as its prompt


def packed_rows(heads: int = 4, kv_heads: int = 2, dim: int = 16) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Where in the row each token stands, and query, key and value of the row."""
    place = torch.cat([torch.arange(110), torch.arange(40), torch.arange(110, 118)])
    made = torch.Generator().manual_seed(1)
    return place, [torch.randn(1, n, 118, dim, generator=made) for n in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 3.0)])
@pytest.mark.parametrize("way", ["rows", "pages", "kernel"])
def test_attention_by_rows_is_packed_attention(way: str, window, softcap, monkeypatch) -> None:
    """``pages`` and ``kernel``: as on a GPU; the kernel is interpreted."""
    if way == "kernel":
        pytest.importorskip("triton")
        let_one_number_be_an_index(monkeypatch)
        monkeypatch.setattr(exact, "attend", by_kernel)
    place, row = packed_rows()
    spec = AttentionSpec(2, 0.3, window, softcap)
    layout = RowAttention(LENGTHS, place=place, shared=SHARED)
    across = [x[0].transpose(0, 1) for x in row]
    found = (layout._over_rows if way == "rows" else layout._over_pages)(spec, *across)
    expected = PackedAttention(LENGTHS, place=place, shared=SHARED).attend(spec, *row)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if way != "kernel":
        return
    for first, count in ((0, 1), (37, 3)):  # the same tokens, as steps of decoding
        pool, table, position, _ = layout._paged
        some = slice(first, first + count)
        again = exact.attend_exactly(
            pool, AttentionSpec(0, 0.3, window, softcap), *(x[some] for x in across), table[some], position[some]
        )
        assert torch.equal(again, found[some])


def test_a_backward_pass_computes_the_ordinary_attention_once(monkeypatch) -> None:
    place, row = packed_rows()
    spec, layout, calls = AttentionSpec(2, 0.3, None, None), RowAttention(LENGTHS, place=place, shared=SHARED), []
    out, saved = layout.forward(spec, *row)
    attend = layout._padded.attend
    monkeypatch.setattr(layout._padded, "attend", lambda *given: calls.append(given) or attend(*given))
    layout.backward(spec, torch.ones_like(out), *row, out, saved)
    assert len(calls) == 1


def by_kernel(pool, spec, query, key, value, table, lengths, splits=1):
    return decode_attention(spec, query, key, value, pool.address, pool.shape, table, lengths, splits)
