"""Our kernels for packed sequences against the padded way: on the GPU if there is one, or else interpreted."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from dapo.model import packed_kernels
from dapo.model.attention import AttentionSpec, attention_context, attention_forward
from dapo.model.packed import PackedAttention
from dapo.model.packed_kernels import Tile, Tiles
from dapo.model.packed_layout import PackedLayout, kernels_can

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Sequences = tuple[list[int], list[int], list[int]]
DIMS = (8, 16, 24, 64, 80, 96, 128, 256)
SMALL = Tiles(Tile(32, 16, 4, 2), Tile(16, 32, 4, 2), Tile(32, 16, 4, 2))
"""So that short sequences have several, and interpreting them takes little."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_kernels, "TILES", {256: SMALL})


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


def by_kernels(sequences: Sequences, tensors: list[Tensor], spec: AttentionSpec) -> list[Tensor]:
    """Output, gradients of query, key and value, and divisors."""
    *row, grad = tensors
    lengths, shared, place = sequences
    layout = PackedLayout(lengths, shared, torch.tensor(place), DEVICE)
    out, divisors = packed_kernels.forward(layout, spec, row[0], row[1], row[2])
    found = packed_kernels.backward(layout, spec, grad, row[0], row[1], row[2], out, divisors)
    return [out, *found, divisors]


def attended(sequences: Sequences, tensors: list[Tensor], spec: AttentionSpec) -> list[Tensor]:
    """All of it but the divisors, as the trainer has it: padded, for half precision on CUDA by the kernels."""
    *row, grad = (x.detach().requires_grad_() for x in tensors)
    lengths, shared, place = sequences
    layout = PackedAttention(lengths, DEVICE, torch.tensor(place), shared)
    out = layout.attend(spec, row[0], row[1], row[2])
    return [out, *torch.autograd.grad(out, row, grad)]


def test_two_tokens_by_hand(small: None) -> None:
    """The second query weighs its keys with 1/4 and 3/4."""
    query, key, value, grad = (torch.zeros(1, 1, 2, 16, device=DEVICE) for _ in range(4))
    query[0, 0, :, 0], key[0, 0, 1, 0], value[0, 0, 1, 0] = 1.0, math.log(3), 4.0
    grad = grad.transpose(1, 2).contiguous()
    grad[0, 1, 0, 0] = 1.0
    out, *found, divisors = by_kernels(([2], [0], [0, 1]), [query, key, value, grad], AttentionSpec(0, 1.0))
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
    sequences, dim, kv = laid(groups), DIMS[seed % len(DIMS)], draw.choice([1, 2])
    group = draw.choice([1, 3, 7] if dim < 64 else [1, 2])
    spec = AttentionSpec(0, dim**-0.5, draw.choice([None, None, 1, 5, 20, 1000]), draw.choice([None, None, 1.5]))
    tensors = normal(sequences, kv * group, kv, dim, seed)
    *found, divisors = by_kernels(sequences, tensors, spec)
    for have, want in zip(found, attended(sequences, tensors, spec), strict=True):
        torch.testing.assert_close(have, want, atol=2e-5, rtol=1e-4)
    assert divisors.shape == (kv * group, len(set(sequences[2]))) and bool(divisors.isfinite().all())


def test_the_bits_of_a_group_do_not_depend_on_others(small: None) -> None:
    alone, among = laid([(20, [9, 30])]), laid([(33, [2, 5]), (20, [9, 30]), (3, [40])])
    strangers = 33 + 2 + 5
    tensors = normal(among, 3, 1, 16)
    here = slice(strangers, strangers + 59)
    ours = [*(x[:, :, here] for x in tensors[:3]), tensors[3][:, here]]
    spec = AttentionSpec(0, 0.25)
    out, *found, divisors = by_kernels(among, tensors, spec)
    cut = [out[:, here], *(x[:, :, here] for x in found), divisors[:, here]]
    for have, want in zip(cut, by_kernels(alone, ours, spec), strict=True):
        assert torch.equal(have, want)


def test_every_program_has_work_and_the_longest_begin() -> None:
    """Group of 7 heads: 101 tokens are 707 rows, 12 tiles of 64; then 30 (4), 0 and 80 (9) of the others."""
    lengths, shared, place = laid([(100, [1, 30, 0, 80])])
    layout = PackedLayout(lengths, shared, torch.tensor(place), torch.device("cpu"))
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
        PackedLayout(lengths, shared, torch.tensor(place), DEVICE)


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"dim": 80}, True),
        ({"dim": 256}, True),
        ({"dim": 84}, False),
        ({"dim": 264}, False),
        ({"value_dim": 128}, False),
        ({"dtype": torch.float32}, False),
        ({"tokens": 2**24 - 1}, True),
        ({"tokens": 2**24}, False),  # more numbers than 32 bits count
        ({"card": (7, 5)}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_what_the_kernels_compute(change: dict[str, Any], fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"dim": 64, "dtype": torch.bfloat16, "tokens": 3, "card": (8, 0), "device": "cuda"} | change
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case["card"])

    def tensor(dim: int) -> Any:
        meta = torch.empty(1, 2, case["tokens"], dim, device="meta")
        names = {"is_cuda": case["device"] == "cuda", "device": case["device"], "dtype": case["dtype"]}
        return SimpleNamespace(shape=meta.shape, numel=meta.numel, **names)

    assert kernels_can(tensor(case["dim"]), tensor(case.get("value_dim", case["dim"]))) is fits


@pytest.mark.parametrize(("memory", "much"), [(101_376, False), (166_912, True), (232_448, True)])
def test_tiles_fit_the_card(memory: int, much: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_kernels, "_shared_memory", lambda device: memory)
    row = packed_kernels.make_row(*(torch.empty(1, 2, 3, 192, device="meta") for _ in range(3)), AttentionSpec(0, 1.0))
    assert row.tiles is (packed_kernels.TILES if much else packed_kernels.SMALL_TILES)[256]


COMPILE = """
import triton
from dapo.model import packed_kernels as kernels
sizes = {"KV": 2, "GROUP": 3, "DIM": 24, "WIDE": 32, "CAPPED": True, "WINDOWED": False, "M": 16, "N": 16}
types = dict.fromkeys(("divisors", "rows", "parts"), "*fp32") | {"tiles": "*i32", "scale": "fp32", "inner": "fp32"}
names = ("query", "key", "value", "out", "grad", "found", "of_key", "of_value")
types |= dict.fromkeys(names, "*bf16") | dict.fromkeys(sizes, "constexpr")
for kernel in (kernels._forward, kernels._query_gradient, kernels._key_gradients):
    constants = {(place,): sizes[name] for place, name in enumerate(kernel.arg_names) if name in sizes}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    source = triton.compiler.ASTSource(kernel, signature, constants)
    print(len(triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 80, 32)).asm["ptx"]))
"""


def test_the_compiler_takes_what_the_interpreter_does(tmp_path: Path) -> None:
    """Such as a variable of one type in both branches. Needs no GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.split()) == 3, done.stderr


@pytest.mark.parametrize(("dim", "softcap"), [(16, None), (24, 2.0)])
@pytest.mark.parametrize("compiled", [False, True])
def test_packed_attention_takes_them(
    compiled: bool, dim: int, softcap: float | None, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as one operation of compiled code, whose shapes the compiler is told; keys and values lie head by head."""
    sequences = laid([(20, [9, 30]), (3, [4])])
    tensors = normal(sequences, 4, 2, dim)
    tensors[1:3] = [x.contiguous() for x in tensors[1:3]]
    expected = attended(sequences, tensors, AttentionSpec(0, 0.25, 8, softcap))
    monkeypatch.setattr("dapo.model.packed.kernels_can", lambda query, value: query.numel() < 2**31)
    used = list[int]()
    listed = PackedLayout.query_tiles
    monkeypatch.setattr(PackedLayout, "query_tiles", lambda self, *given: used.append(1) or listed(self, *given))
    *row, grad = (x.detach().requires_grad_() for x in tensors)
    layout = PackedAttention(sequences[0], DEVICE, torch.tensor(sequences[2]), sequences[1])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        module = SimpleNamespace(layer_idx=0)
        return attention_forward(module, 2 * query, key, value, None, 0.125, sliding_window=8, softcap=softcap)[0]

    run = torch.compile(attend, backend="aot_eager", dynamic=True) if compiled else attend
    with attention_context(layout):
        out = run(*row)
    for have, want in zip([out, *torch.autograd.grad(out, row, grad)], expected, strict=True):
        torch.testing.assert_close(have, want, atol=2e-5, rtol=1e-4)
    assert len(used) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table", ["TILES", "SMALL_TILES"])
@pytest.mark.parametrize(
    ("heads", "kv", "dim", "softcap"),
    [
        (14, 2, 64, None),
        (28, 4, 128, None),
        (4, 4, 32, None),
        (8, 1, 16, None),
        (8, 2, 80, None),
        (4, 2, 192, None),
        (8, 4, 256, None),
        (8, 4, 256, 50.0),
        (4, 2, 96, 2.0),
    ],
)
def test_as_exact_as_half_precision_is(
    heads: int,
    kv: int,
    dim: int,
    softcap: float | None,
    table: str,
    dtype: torch.dtype,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against float64, for the tiles of each kind of card; the trainer has the same bits."""
    monkeypatch.setattr(packed_kernels, "TILES", getattr(packed_kernels, table))
    draw = random.Random(dim)
    sequences = laid([(draw.randint(1, 300), [draw.randint(0, 700) for _ in range(6)]) for _ in range(5)])
    rounded = [x.to(dtype) for x in normal(sequences, heads, kv, dim)]
    spec = AttentionSpec(0, dim**-0.5, window, softcap)
    exact = attended(sequences, [x.double() for x in rounded], spec)
    *found, divisors = by_kernels(sequences, rounded, spec)
    assert all(torch.equal(a, b) for a, b in zip(found, attended(sequences, rounded, spec), strict=True))
    assert bool(divisors.isfinite().all())
    bound = 0.008 if dtype == torch.bfloat16 else 0.001  # some three roundings to the type
    for have, want in zip(found, exact, strict=True):
        assert (have - want).norm() < bound * want.norm()
