"""Paged decode attention: the kernel against the reference, and the reference against attention written out here.

Without a GPU the kernel runs in Triton's interpreter, which has to be chosen before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from dapo.model.attention import AttentionSpec
from dapo.rollout.native.paged import attention as paged
from dapo.rollout.native.paged.pool import Pool, PoolShape
from helpers import let_one_number_be_an_index

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYER = 1
NO_PAGE = 2**30
F32, BF16 = torch.float32, torch.bfloat16
# Outputs are averages of unit normals. Float32: rounding of sums. Bfloat16: weights and output are rounded to 8 bits.
TOLERANCE = {F32: {"atol": 3e-6, "rtol": 3e-6}, BF16: {"atol": 8e-3, "rtol": 8e-3}}
LONG_TOLERANCE = {"atol": 1e-3, "rtol": 8e-3}  # over hundreds of tokens the rounding of weights averages out


@dataclass
class Rows:
    """Some rows in a pool whose other places are NaN. ``contexts``: keys and values ``[2, length, Hkv, D]`` of each."""

    spec: AttentionSpec
    shape: PoolShape
    pool: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    contexts: list[torch.Tensor]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def make_rows(
    lengths: list[int],
    group: int,
    kv_heads: int,
    dim: int,
    page_tokens: int,
    dtype: torch.dtype,
    window: int | None = None,
    softcap: float | None = None,
    shared_tokens: int = 0,
    device: str = DEVICE,
) -> Rows:
    """``shared_tokens``, of whole pages, begin every row that is long enough: they lie in the pages of the first."""
    generator = torch.Generator(device).manual_seed(sum(lengths) + dim)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=device).to(dtype)

    needed = [length // page_tokens + 1 if length >= 0 else 0 for length in lengths]
    shape = PoolShape(2, sum(needed) + 3, kv_heads, page_tokens, dim, dtype)
    pool = torch.full(shape.sizes, float("nan"), dtype=dtype, device=device)
    table = torch.full((len(lengths), max(needed) + 1), NO_PAGE, dtype=torch.int32, device=device)
    free = (1 + torch.randperm(shape.pages - 1, generator=generator, device=device)).int()
    prompt = normal(2, shared_tokens, kv_heads, dim)
    contexts, taken = [], 0
    for row, (length, pages) in enumerate(zip(lengths, needed, strict=True)):
        table[row, :pages] = free[taken : taken + pages]
        taken += pages
        tokens = normal(2, max(length, 0), kv_heads, dim)
        if shared_tokens and length >= shared_tokens:
            tokens[:, :shared_tokens] = prompt
            table[row, : shared_tokens // page_tokens] = table[0, : shared_tokens // page_tokens]
        for start in range(0, length, page_tokens):
            page = tokens[:, start : start + page_tokens].transpose(1, 2)
            pool[LAYER, :, table[row, start // page_tokens], :, : page.shape[2]] = page
        contexts.append(tokens)
    # as a model gives them: [1, heads, rows, D], seen from the rows
    query, key, value = (normal(1, n * kv_heads, len(lengths), dim)[0].transpose(0, 1) for n in (group, 1, 1))
    spec = AttentionSpec(LAYER, dim**-0.5, window, softcap)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Rows(spec, shape, pool, table, on_device, contexts, query, key, value)


def dense(rows: Rows) -> torch.Tensor:
    """Softmax over each row's tokens, head by head; zeros for idle rows."""
    out = torch.zeros_like(rows.query, dtype=F32)
    for row, length in enumerate(rows.lengths.tolist()):
        if length < 0:
            continue
        new = torch.stack([rows.key[row], rows.value[row]])[:, None]
        keys, values = torch.cat([rows.contexts[row], new], dim=1).float()
        first = 0 if rows.spec.window is None else max(0, length + 1 - rows.spec.window)
        for head in range(rows.query.shape[1]):
            kv_head = head * rows.shape.kv_heads // rows.query.shape[1]
            scores = keys[first:, kv_head] @ rows.query[row, head].float() * rows.spec.scaling
            if rows.spec.softcap is not None:
                scores = rows.spec.softcap * torch.tanh(scores / rows.spec.softcap)
            out[row, head] = scores.softmax(0) @ values[first:, kv_head]
    return out


def pool_afterwards(rows: Rows) -> torch.Tensor:
    """The pool as it was, and the new token of each row at its place."""
    pool = rows.pool.clone()
    for row, length in enumerate(rows.lengths.tolist()):
        if length >= 0:
            page, place = int(rows.table[row, length // rows.shape.page_tokens]), length % rows.shape.page_tokens
            pool[LAYER, 0, page, :, place] = rows.key[row]
            pool[LAYER, 1, page, :, place] = rows.value[row]
    return pool


def by_reference(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    pool = rows.pool.clone()
    arguments = (rows.spec, rows.query, rows.key, rows.value, pool, rows.table, rows.lengths)
    return paged.decode_attention_reference(*arguments), pool


@pytest.fixture
def by_kernel(monkeypatch) -> Callable[[Rows, int], tuple[torch.Tensor, torch.Tensor]]:
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        let_one_number_be_an_index(monkeypatch)

    def run(rows: Rows, splits: int, wide: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        pool = rows.pool.clone()
        address = torch.tensor([pool.data_ptr()], device=pool.device)
        tokens = (rows.query, rows.key, rows.value)
        out = paged.decode_attention(rows.spec, *tokens, address, rows.shape, rows.table, rows.lengths, splits, wide)
        return out, pool

    return run


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    """Of pools, where NaN equals NaN."""
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# lengths in tokens; group, key heads, D, tokens per page, type; window and soft cap
CASES = {
    "7 to 1": ([0, -1, 15, 16, 70], 7, 1, 64, 16, F32, None, None),
    "4 to 1, two key heads": ([31, 32, -1, 33], 4, 2, 64, 32, F32, None, None),
    "D 80, window": ([3, 20, 16, 37, -1], 1, 2, 80, 16, F32, 17, None),
    "D 128, soft cap": ([0, 47, 31], 4, 1, 128, 16, F32, None, 1.5),
    "bfloat16": ([0, -1, 31, 32, 69], 7, 1, 64, 32, BF16, None, None),
    "bfloat16, D 80": ([-1, 16, 45], 1, 2, 80, 16, BF16, None, None),
    "bfloat16, D 128, window": ([15, 0, 50], 4, 1, 128, 16, BF16, 33, None),
    "bfloat16, D 256, both": ([40, -1, 7], 2, 1, 256, 16, BF16, 9, 2.0),
    "window of one": ([5, 32], 1, 1, 64, 16, F32, 1, None),
    "more query heads than a tile": ([33, 0], 20, 1, 64, 16, F32, None, None),
    "nobody": ([-1, -1], 2, 1, 64, 16, BF16, None, None),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_is_attention_over_the_tokens(case) -> None:
    rows = make_rows(*case)
    out, pool = by_reference(rows)
    assert out.dtype == rows.query.dtype and out.is_contiguous()
    torch.testing.assert_close(out.float(), dense(rows), **TOLERANCE[rows.shape.dtype])
    assert_same_bits(pool, pool_afterwards(rows))


@pytest.mark.parametrize("seed", range(20))
def test_the_reference_at_random_lengths(seed) -> None:
    lengths = torch.randint(-1, 70, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = make_rows(lengths, 2, 2, 16, 16, F32, window=(None, 1, 8, 16, 40)[seed % 5], softcap=(None, 3.0)[seed % 2])
    out, pool = by_reference(rows)
    torch.testing.assert_close(out, dense(rows), **TOLERANCE[F32])
    assert_same_bits(pool, pool_afterwards(rows))


@pytest.mark.parametrize(
    ("case", "splits"),
    [
        pytest.param(case, splits, id=f"{name}, splits {splits}")
        for i, (name, case) in enumerate(CASES.items())
        for splits in (1, (3, 8)[i % 2])
    ],
)
def test_the_kernel_agrees_with_both(by_kernel, case, splits) -> None:
    rows = make_rows(*case)
    out, pool = by_kernel(rows, splits)
    assert out.dtype == rows.query.dtype and out.is_contiguous()
    torch.testing.assert_close(out.float(), dense(rows), **TOLERANCE[rows.shape.dtype])
    torch.testing.assert_close(out, by_reference(rows)[0], **TOLERANCE[rows.shape.dtype])
    assert not out[rows.lengths < 0].any()
    assert_same_bits(pool, pool_afterwards(rows))


def test_wide_programs_agree_with_the_reference(by_kernel) -> None:
    """At the ends of their blocks of 128 tokens."""
    rows = make_rows([0, 127, -1, 128, 129, 300], 7, 2, 64, 16, BF16)
    out, pool = by_kernel(rows, 1, wide=True)
    torch.testing.assert_close(out.float(), dense(rows), **TOLERANCE[BF16])
    assert_same_bits(pool, pool_afterwards(rows))


def test_rows_share_the_pages_of_a_prompt(by_kernel) -> None:
    rows = make_rows([32, 35, 50, 10], 2, 1, 64, 16, F32, shared_tokens=32)
    assert rows.table[0, 0] == rows.table[2, 0] != rows.table[3, 0]
    for out, pool in (by_reference(rows), by_kernel(rows, 2)):
        torch.testing.assert_close(out, dense(rows), **TOLERANCE[F32])
        assert_same_bits(pool, pool_afterwards(rows))


def test_what_is_stored_is_what_the_next_token_reads(by_kernel) -> None:
    """A second step sees the token of the first as any other; tokens in float32, the pool in bfloat16."""
    rows = make_rows([14, 16, 3], 2, 1, 64, 16, BF16)
    rows.query, rows.key, rows.value = (x.float() * 1.001 for x in (rows.query, rows.key, rows.value))
    first = torch.stack([rows.key, rows.value]).to(BF16)
    _, rows.pool = by_kernel(rows, 1)
    rows.lengths += 1
    rows.contexts = [torch.cat([c, first[:, i, None]], dim=1) for i, c in enumerate(rows.contexts)]
    out, _ = by_kernel(rows, 1)
    assert out.dtype == F32
    torch.testing.assert_close(out, dense(rows), **TOLERANCE[BF16])


def test_rows_know_nothing_of_each_other(by_kernel) -> None:
    """The very bits of a row, alone and among others."""
    rows = make_rows([20, 3, -1, 40], 2, 1, 64, 16, BF16)
    together, _ = by_kernel(rows, 2)
    for row in range(4):
        one = slice(row, row + 1)
        alone = replace(
            rows, **{name: getattr(rows, name)[one] for name in ("query", "key", "value", "table", "lengths")}
        )
        assert torch.equal(by_kernel(alone, 2)[0], together[one])


def test_the_kernel_follows_the_address(by_kernel) -> None:
    """It is all that the kernel knows of where the pool is; the tensor that holds it stays in its place."""
    rows = make_rows([20, 3], 2, 1, 64, 16, F32)
    pool = Pool(rows.shape, DEVICE)
    place = pool.address.data_ptr()
    arguments = (rows.spec, rows.query, rows.key, rows.value, pool.address, rows.shape, rows.table, rows.lengths, 1)
    held = []
    for _ in range(2):
        held.append(rows.pool.clone())
        pool.attach(held[-1])
        torch.testing.assert_close(paged.decode_attention(*arguments), dense(rows), **TOLERANCE[F32])
        assert_same_bits(pool.tensor, pool_afterwards(rows))
        pool.detach()
        rows.key += 1
    assert pool.address.data_ptr() == place and pool.address.item() == 0


def test_attend_takes_whichever_the_device_has() -> None:
    rows = make_rows([20, -1, 3], 2, 1, 64, 16, F32)
    pool = Pool(rows.shape, DEVICE)
    pool.attach(rows.pool)
    after = pool_afterwards(rows)
    out = paged.attend(pool, rows.spec, rows.query, rows.key, rows.value, rows.table, rows.lengths)
    torch.testing.assert_close(out, dense(rows), **TOLERANCE[F32])
    assert_same_bits(pool.tensor, after)


def test_a_pool_without_memory_says_so() -> None:
    pool = Pool(PoolShape(1, 2, 1, 16, 64, F32), DEVICE)
    with pytest.raises(RuntimeError, match="no memory"):
        _ = pool.tensor
    with pytest.raises(ValueError, match="contiguous"):
        pool.attach(torch.zeros(1, 2, 3, 1, 16, 64, device=DEVICE))


@pytest.mark.parametrize(
    ("change", "named"), [({"dtype": torch.float16}, "float16"), ({"page_tokens": 24}, "24"), ({"head_dim": 20}, "20")]
)
def test_a_shape_that_the_kernel_cannot_read_is_refused(change, named) -> None:
    sizes = {"layers": 1, "pages": 2, "kv_heads": 1, "page_tokens": 16, "head_dim": 64, "dtype": F32}
    with pytest.raises(ValueError, match=named):
        PoolShape(**(sizes | change))


def test_the_sizes_of_a_pool() -> None:
    shape = PoolShape(3, 5, 2, 16, 64, BF16)
    pool = torch.empty(shape.sizes, dtype=BF16)
    assert shape == PoolShape.of(pool)
    assert shape.bytes == pool.nbytes and shape.page_bytes == pool[:, :, 0].nbytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: {"key": r.key[:, :1].repeat(1, 2, 1)}, "do not fit"),
        (lambda r: {"query": r.query.transpose(1, 2).contiguous().transpose(1, 2)}, "must be contiguous"),
        (lambda r: {"lengths": r.lengths.long()}, "must be int32"),
        (lambda r: {"table": r.table[:1]}, "2 rows, but a table of 1 and 2 lengths"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, said: str) -> None:
    rows = make_rows([3, 5], 2, 1, 64, 16, F32)
    for name, tensor in change(rows).items():
        setattr(rows, name, tensor)
    with pytest.raises(ValueError, match=said):
        by_reference(rows)


def test_store_puts_each_token_into_its_slot() -> None:
    pool = torch.full((2, 2, 5, 3, 16, 8), float("nan"), dtype=BF16)
    key, value = torch.randn(2, 4, 3, 8)
    slots = [16, 35, 79, 34]
    expected = pool.clone()
    for i, slot in enumerate(slots):
        expected[LAYER, 0, slot // 16, :, slot % 16] = key[i].to(BF16)
        expected[LAYER, 1, slot // 16, :, slot % 16] = value[i].to(BF16)
    paged.store(pool, LAYER, key, value, torch.tensor(slots))
    assert_same_bits(pool, expected)


@pytest.mark.parametrize("pages_at_a_time", [0.5, 2, 100])
def test_copy_pages_copies_all_layers(monkeypatch, pages_at_a_time) -> None:
    pool = torch.randn(2, 2, 9, 1, 16, 8)
    monkeypatch.setattr(paged, "COPY_BYTES", int(pages_at_a_time * PoolShape.of(pool).page_bytes))
    source, target = [3, 1, 3, 8, 1], [2, 4, 7, 5, 6]
    expected = pool.clone()
    for a, b in zip(source, target, strict=True):
        expected[:, :, b] = pool[:, :, a]
    paged.copy_pages(pool, torch.tensor(source), torch.tensor(target))
    assert_same_bits(pool, expected)


@pytest.mark.parametrize(
    ("rows", "kv_heads", "dim", "tokens", "dtype", "programs"),
    [
        (1024, 2, 64, 700, BF16, (1, False)),  # more programs than the card holds
        (256, 2, 64, 700, BF16, (1, False)),  # 3.9 for each processor
        (64, 4, 64, 4096, BF16, (5, False)),  # 256 programs on 132 processors
        (64, 4, 64, 1280, BF16, (1, True)),
        (64, 4, 128, 1024, BF16, (5, False)),
        (64, 4, 64, 1024, F32, (5, False)),
        (1, 2, 64, 4096, BF16, (32, False)),  # no program under 128 tokens
        (1, 1, 64, 10**6, BF16, (64, False)),
        (1, 2, 64, 100, F32, (1, False)),
    ],
)
def test_programs_fill_the_card_and_no_more(rows, kv_heads, dim, tokens, dtype, programs) -> None:
    shape = PoolShape(1, 1, kv_heads, 16, dim, dtype)
    assert paged.choose_programs(rows, shape, tokens, processors=132) == programs


def random_lengths(rows: int, most: int) -> list[int]:
    return torch.randint(-1, most + 1, (rows,), generator=torch.Generator().manual_seed(rows)).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "most", "group", "kv_heads", "dim", "window", "softcap"),
    [
        (1024, 700, 7, 2, 64, None, None),
        (64, 4096, 7, 4, 128, None, None),
        (48, 1500, 2, 4, 256, 512, 50.0),
        (100, 900, 1, 8, 80, None, None),
        (16, 900, 32, 1, 128, None, None),
    ],
)
@pytest.mark.parametrize(("splits", "wide"), [(1, False), (1, True), (8, False)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_large_batches_on_a_gpu(
    by_kernel, rows, most, group, kv_heads, dim, window, softcap, splits, wide, dtype
) -> None:
    batch = make_rows(random_lengths(rows, most), group, kv_heads, dim, 16, dtype, window, softcap)
    out, pool = by_kernel(batch, splits, wide)
    expected, expected_pool = by_reference(batch)
    assert_same_bits(pool, expected_pool)
    short = batch.lengths < 256
    tolerance = TOLERANCE[BF16] if dtype == BF16 else {"atol": 1e-5, "rtol": 1e-5}  # exp2 and division are approximate
    torch.testing.assert_close(out[short], expected[short], **tolerance)
    torch.testing.assert_close(out[~short], expected[~short], **(LONG_TOLERANCE if dtype == BF16 else tolerance))


@pytest.mark.gpu
def test_the_kernel_is_compiled_once_for_every_number_of_splits(by_kernel) -> None:
    from dapo.rollout.native.paged import attention_kernel

    rows = make_rows(random_lengths(32, 500), 7, 2, 64, 16, BF16)
    by_kernel(rows, 3)
    kernels = (attention_kernel._attend, attention_kernel._combine)
    before = [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]
    for splits in (2, 5, 6, 9, 16):
        by_kernel(rows, splits)
    assert [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels] == before


@pytest.mark.gpu
def test_a_captured_graph_follows_the_pool() -> None:
    rows = make_rows(random_lengths(32, 500), 7, 2, 64, 16, BF16)
    expected, _ = by_reference(rows)
    pool = Pool(rows.shape, DEVICE)
    pool.attach(rows.pool.clone())

    def step() -> torch.Tensor:
        return paged.attend(pool, rows.spec, rows.query, rows.key, rows.value, rows.table, rows.lengths, splits=3)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(2):
        held = pool.tensor  # so that the next one lies elsewhere
        pool.detach()
        pool.attach(rows.pool.clone())
        assert pool.tensor.data_ptr() != held.data_ptr()
        out.zero_()
        graph.replay()
        torch.testing.assert_close(out, expected, **TOLERANCE[BF16])
        assert_same_bits(pool.tensor, pool_afterwards(rows))
