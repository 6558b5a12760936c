"""Rows that repeat an earlier one but for a few words, found by MinHash (Broder 1997) over pairs of words.

Numbers count: two problems of one template with other numbers, or with another answer, are two problems."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dapo.data.overlap import words_of

ALIKE = 0.6
"""Jaccard similarity of the sets of word pairs from which on two prompts are the same."""
_BANDS, _ROWS = 16, 4
"""Two sets of similarity s are compared with probability 1 - (1 - s^4)^16: 0.998 at 0.75, 0.89 at 0.6."""
_PRIME = np.uint64(2**31 - 1)

Pairs = npt.NDArray[np.uint64]


def near_repeats(texts: Sequence[str], answers: Sequence[str | None]) -> Iterator[tuple[int, int, float]]:
    """Places of texts that repeat an earlier one that is kept, the place of that one, and how alike they are."""
    random = np.random.default_rng(0)
    factors, shifts = random.integers(1, int(_PRIME), (2, _BANDS * _ROWS, 1), dtype=np.uint64)
    kept: dict[int, Pairs] = {}
    buckets: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        words = words_of(text)
        pairs = np.unique(np.array([zlib.crc32(" ".join(pair).encode()) for pair in pairwise(words)], np.uint64))
        if not len(pairs):
            continue
        signature = ((factors * (pairs % _PRIME) + shifts) % _PRIME).min(axis=1).reshape(_BANDS, _ROWS)
        same = tuple(word for word in words if word.isdigit()), answer
        keys = [(band, row.tobytes(), *same) for band, row in enumerate(signature)]
        near = {other for key in keys for other in buckets.get(key, ())}
        alike, first = max(((_jaccard(pairs, kept[other]), -other) for other in near), default=(0.0, 0))
        if alike >= ALIKE:
            yield place, -first, alike
            continue
        kept[place] = pairs
        for key in keys:
            buckets[key].append(place)


def _jaccard(one: Pairs, other: Pairs) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)
