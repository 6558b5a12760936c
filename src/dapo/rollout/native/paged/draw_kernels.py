# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The Triton kernels behind :func:`dapo.rollout.native.paged.draw.draw`.

The work is bound by memory: 1024 rows of 151,936 float32 are 622 MB, 0.21 ms at the 3 TB/s of an H100.

* ``_partials`` reads the logits, once, and leaves the largest z of every block and the block's sum of exponentials.
* ``_choose`` finds from those sums the block that holds the token, and reads that block again: 17 MB, 0.01 ms.
* ``_record`` writes tokens down, which are some 14 small kernels in PyTorch.
* ``_thresholds`` runs only when something truncates: a bisection, which reads a row once for each halving.

A token is only ever taken where its own exponential is positive, whatever rounding says of sums: sums of different
order differ in their last bits, so that a target may lie beyond all of them or between two that should be equal.

What a row gives does not depend on the number of rows, or on the row's place among them as long as its address is a
multiple of 16 bytes; other addresses compile to a kernel that adds in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dapo.rollout.native.rows import Rows
from dapo.rollout.native.sampler import RowSettings

# 16 KB of a row. Four warps then hold 32 logits per thread, eight loads of 16 bytes in flight, and 8 programs to a
# multiprocessor are 128 KB in flight, about three times what it takes to fill 3 TB/s at 0.8 us of latency. A row of
# 152k has 38 blocks: few enough for one program to combine, small enough to read one again for nothing.
BLOCK = 4096
PARTIALS_WARPS = 4
CHOOSE_WARPS = 8  # 16 values per thread of the float64 cumulative sum: 128 registers, none spilled

RECORD_BLOCK = 32

# One program per row, and 64 bytes in flight per thread. A search reads the row at most 32 times; on 152k normal logits
# (in NumPy) 14 times for the top 50, 20 for 0.95 of the mass, 7 for that after the top 50. With the two other readings,
# 1024 rows are 22 x 622 MB, 5 ms at 3 TB/s; at worst 66 readings, 14 ms. What L2 (50 MB) still holds makes it less.
SEARCH_BLOCK = 8192
SEARCH_WARPS = 16


def draw(
    logits: Tensor, uniform: Tensor, settings: RowSettings, *, truncate: bool, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """See :func:`dapo.rollout.native.paged.draw.draw`; ``block`` (a power of two): logits per block of a row."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, block)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs, threshold = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    peaks, masses = (torch.empty(rows, blocks, dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows == 0:
        return tokens, logprobs
    temperature = settings.temperature
    with torch.cuda.device_of(logits):
        if truncate:
            _thresholds[(rows,)](
                logits, temperature, settings.top_k, settings.top_p, settings.min_p, threshold,
                VOCABULARY=vocabulary, BLOCK=SEARCH_BLOCK, num_warps=SEARCH_WARPS,
            )  # fmt: skip
        _partials[(rows * blocks,)](
            logits, temperature, threshold, peaks, masses,
            VOCABULARY=vocabulary, BLOCKS=blocks, TRUNCATE=truncate, BLOCK=block, num_warps=PARTIALS_WARPS,
        )  # fmt: skip
        _choose[(rows,)](
            logits, uniform, temperature, threshold, peaks, masses, tokens, logprobs,
            VOCABULARY=vocabulary, BLOCKS=blocks, PADDED=triton.next_power_of_2(blocks), TRUNCATE=truncate,
            BLOCK=block, num_warps=CHOOSE_WARPS,
        )  # fmt: skip
    return tokens, logprobs


def record(rows: Rows, tokens: Tensor, logprobs: Tensor) -> None:
    """:meth:`Rows.record` as one kernel; of idle rows it writes nothing."""
    count = len(tokens)
    state = (rows.lengths, rows.generated, rows.limits, rows.last_tokens, rows.tokens, rows.logprobs)
    with torch.cuda.device_of(tokens):
        _record[(triton.cdiv(count, RECORD_BLOCK),)](
            tokens, logprobs, *state, rows.stop_ids, count, rows.tokens.shape[1],
            STOP_IDS=len(rows.stop_ids), BLOCK=RECORD_BLOCK, num_warps=1,
        )  # fmt: skip


@triton.jit
def _scores(row_logits, offsets, temperature, smallest, VOCABULARY: tl.constexpr):
    """z; minus infinity below ``smallest`` and beyond the row. NaN is not below: it stays, and reaches the sums.

    The division is the exact one, so that this is the CPU's z, with its ties and on its side of a threshold.
    """
    raw = tl.load(row_logits + offsets, mask=offsets < VOCABULARY, other=float("-inf"))
    z = tl.div_rn(raw, tl.where(temperature == 0, 1.0, temperature))
    return tl.where(z < smallest, float("-inf"), z)


@triton.jit
def _pick(wanted, possible, index, SIZE: tl.constexpr):
    """The first index that is wanted and possible; without one, the last possible; without any, 0."""
    first = tl.min(tl.where(wanted & possible, index, SIZE), axis=0)
    last = tl.max(tl.where(possible, index, 0), axis=0)
    return tl.where(first < SIZE, first, last)


@triton.jit
def _partials(
    logits, temperature, threshold, peaks, masses,
    VOCABULARY: tl.constexpr, BLOCKS: tl.constexpr, TRUNCATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row: its largest z (NaN aside) and the sum of exp(z - largest), NaN if the block holds one."""
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    offsets = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    smallest = tl.load(threshold + row) if TRUNCATE else float("-inf")
    z = _scores(logits + row * VOCABULARY, offsets, tl.load(temperature + row), smallest, VOCABULARY)
    peak = tl.max(tl.where(z == z, z, float("-inf")), axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)  # minus infinity less itself would be NaN
    tl.store(peaks + program, peak)
    tl.store(masses + program, tl.sum(tl.exp(z - shift), axis=0))


@triton.jit
def _choose(
    logits, uniform, temperature, threshold, peaks, masses, tokens, logprobs,
    VOCABULARY: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, TRUNCATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of one row: first its block, then its place in the block."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    greedy = heat == 0

    index = tl.arange(0, PADDED)
    inside = index < BLOCKS
    peak = tl.load(peaks + row * BLOCKS + index, mask=inside, other=float("-inf"))
    best = tl.max(peak, axis=0)
    shift = tl.where(best == float("-inf"), 0.0, best).to(tl.float64)
    mass = tl.load(masses + row * BLOCKS + index, mask=inside, other=0.0) * tl.exp(peak.to(tl.float64) - shift)
    total = tl.sum(mass, axis=0)
    target = tl.load(uniform + row) * total
    chosen = _pick(tl.where(greedy, peak == best, tl.cumsum(mass, axis=0) > target), mass > 0, index, PADDED)

    before = tl.sum(tl.where(index < chosen, mass, 0.0), axis=0)
    block_peak = tl.sum(tl.where(index == chosen, peak, 0.0), axis=0)
    block_peak = tl.where(block_peak == float("-inf"), 0.0, block_peak)
    target = (target - before) / tl.exp(block_peak.to(tl.float64) - shift)  # as `_partials` counts in this block

    lane = tl.arange(0, BLOCK)
    smallest = tl.load(threshold + row) if TRUNCATE else float("-inf")
    z = _scores(logits + row * VOCABULARY, chosen * BLOCK + lane, heat, smallest, VOCABULARY)
    weight = tl.exp(z - block_peak)
    reached = tl.cumsum(weight.to(tl.float64), axis=0) > target
    place = _pick(tl.where(greedy, z == best, reached), weight > 0, lane, BLOCK)
    score = tl.sum(tl.where(lane == place, z, 0.0), axis=0).to(tl.float64)
    sound = (total > 0) & (total < float("inf"))
    tl.store(tokens + row, (chosen * BLOCK + place).to(tl.int64))
    tl.store(logprobs + row, tl.where(sound, score - shift - tl.log(total), float("nan")).to(tl.float32))


@triton.jit(do_not_specialize=["count", "width"])
def _record(
    tokens, logprobs, lengths, generated, limits, last_tokens, all_tokens, all_logprobs, stop_ids, count, width,
    STOP_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + row, mask=row < count, other=-1)
    active = length >= 0
    token = tl.load(tokens + row, mask=active, other=0)
    at = tl.load(generated + row, mask=active, other=0)
    done = at + 1 >= tl.load(limits + row, mask=active, other=0)
    for stop in range(STOP_IDS):
        done |= token == tl.load(stop_ids + stop)
    place = row.to(tl.int64) * width + at
    tl.store(all_tokens + place, token.to(tl.int32), mask=active)
    tl.store(all_logprobs + place, tl.load(logprobs + row, mask=active), mask=active)
    tl.store(generated + row, at + 1, mask=active)
    tl.store(last_tokens + row, token, mask=active)
    tl.store(lengths + row, tl.where(done, -1, length + 1), mask=active)


@triton.jit
def _key(value):
    """Of float32, the integer of the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    """The float32 of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _survey(row_logits, heat, best, at, VOCABULARY: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Of the z >= ``at``: how many, or the sum of exp(z - best); the smallest of them; the largest of the others.

    Sums run in float32 in each lane and in float64 across the lanes. Each addition rounds a larger sum to no smaller a
    result, so a lower ``at`` never weighs less: what the search relies on.
    """
    lane = tl.arange(0, BLOCK)
    weight = tl.zeros([BLOCK], dtype=tl.float32)
    above = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    below = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        z = _scores(row_logits, start + lane, heat, float("-inf"), VOCABULARY)
        inside = z >= at
        if WEIGHTED:
            weight += tl.where(inside, tl.exp(z - best), 0.0)
        else:
            weight += tl.where(inside, 1.0, 0.0)
        above = tl.minimum(above, tl.where(inside, z, float("inf")))
        below = tl.maximum(below, tl.where(inside, float("-inf"), z))
    return tl.sum(weight.to(tl.float64), axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@triton.jit
def _search(row_logits, heat, best, low, goal, VOCABULARY: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key, from ``low`` to that of the largest z, at which :func:`_survey` reaches ``goal``.

    The keys left at least halve with each reading, which bounds their number whatever the logits hold; and both ends
    move on to the key of a z, so that a search ends as soon as no two different z are left to tell apart.
    """
    high = _key(best) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        weight, above, below = _survey(row_logits, heat, best, _value(middle), VOCABULARY, WEIGHTED, BLOCK)
        reached = weight >= goal
        # zero has two keys: the nearest z may lie on the wrong side of the middle by one
        low = tl.where(reached, tl.maximum(_key(above), middle), low)
        high = tl.where(reached, high, tl.minimum(_key(below) + 1, middle))
    return low


@triton.jit
def _thresholds(logits, temperature, top_k, top_p, min_p, threshold, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest z of one row to keep."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * VOCABULARY
    heat = tl.load(temperature + row)
    keep = tl.load(top_k + row)
    share = tl.load(top_p + row)
    ratio = tl.load(min_p + row)
    smallest = tl.full([], float("-inf"), dtype=tl.float32)
    if (keep > 0) | (share < 1) | (ratio > 0):
        _, _, best = _survey(row_logits, heat, 0.0, float("inf"), VOCABULARY, False, BLOCK)
        low = _key(smallest)
        if (keep > 0) & (keep < VOCABULARY):
            low = _search(row_logits, heat, best, low, keep.to(tl.float64), VOCABULARY, False, BLOCK)
        if share < 1:
            mass, _, _ = _survey(row_logits, heat, best, _value(low), VOCABULARY, True, BLOCK)
            low = _search(row_logits, heat, best, low, share.to(tl.float64) * mass, VOCABULARY, True, BLOCK)
        smallest = _value(low)
        if ratio > 0:
            smallest = tl.maximum(smallest, (best.to(tl.float64) + tl.log(ratio.to(tl.float64))).to(tl.float32))
        smallest = tl.minimum(smallest, best)
    tl.store(threshold + row, smallest)
