"""How long prompts are: counts by length, and what follows from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Lengths:
    """Prompts by length. ``unit`` says what a length counts: tokens, or words where there is no tokenizer."""

    unit: str
    counts: Counter[int] = field(default_factory=Counter)

    @classmethod
    def from_json(cls, value: Mapping[str, int], unit: str) -> Lengths:
        return cls(unit, Counter({int(length): count for length, count in value.items()}))

    @classmethod
    def together(cls, several: Iterable[Lengths], unit: str) -> Lengths:
        total: Counter[int] = Counter()
        for lengths in several:
            total += lengths.counts
        return cls(unit, total)

    @property
    def total(self) -> int:
        return self.counts.total()

    def at(self, share: float) -> int:
        """The shortest length that at least this share of the prompts do not exceed; 0 if there are none."""
        reached, wanted = 0, share * self.total
        for length in sorted(self.counts):
            reached += self.counts[length]
            if reached >= wanted:
                return length
        return 0

    def above(self, limit: int) -> int:
        return sum(count for length, count in self.counts.items() if length > limit)

    def histogram(self) -> list[tuple[int, int, int]]:
        """First and last length of each bin, and the prompts in it. Bins double, from the first to the last in use."""
        bins: Counter[int] = Counter()
        for length, count in self.counts.items():
            bins[length.bit_length()] += count
        if not bins:
            return []
        used = range(min(bins), max(bins) + 1)
        return [(2 ** (k - 1) if k else 0, 2**k - 1, bins[k]) for k in used]
