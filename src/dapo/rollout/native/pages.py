"""Who owns which page of the cache: bookkeeping on the host, in numpy, with no tensor in sight.

A page holds the keys and values of ``page_tokens`` consecutive tokens of one sequence, in all layers. Samples of a
group share the full pages of their prompt, which are counted. Page 0 belongs to nobody: padding is written there.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

PageArray = npt.NDArray[np.int32]
_Count = TypeVar("_Count", int, npt.NDArray[np.int64])


class PageAllocator:
    """Hands out page numbers and takes them back; a page is free when its last owner has released it."""

    def __init__(self, pages: int) -> None:
        """``pages``: in the pool, page 0 included."""
        self.pages = pages
        self._references = np.zeros(pages, np.int32)
        self._free = np.arange(pages - 1, 0, -1, dtype=np.int32)  # a stack: the lowest numbers go first
        self.free = pages - 1
        """Pages that can be taken now."""

    def take(self, count: int) -> PageArray:
        """``count`` pages, each with one owner. Raises ValueError: more than are free."""
        if count > self.free:
            raise ValueError(f"{count} pages asked for, {self.free} are free")
        self.free -= count
        taken = self._free[self.free : self.free + count].copy()
        self._references[taken] = 1
        return taken

    def share(self, pages: PageArray) -> None:
        """One more owner for each of ``pages``, which are all different."""
        self._references[pages] += 1

    def release(self, pages: PageArray) -> None:
        """One owner less for each of ``pages``, which are all different."""
        self._references[pages] -= 1
        freed = pages[self._references[pages] == 0]
        self._free[self.free : self.free + len(freed)] = freed
        self.free += len(freed)


class BlockTables:
    """The pages of every row, in the order of its tokens: what the attention kernel looks positions up in."""

    def __init__(self, allocator: PageAllocator, rows: int, max_tokens: int, page_tokens: int) -> None:
        self._allocator = allocator
        self._page_tokens = page_tokens
        self.table = np.zeros((rows, pages_for(max_tokens, page_tokens)), np.int32)
        self.held = np.zeros(rows, np.int32)

    def begin(self, row: int, pages: PageArray) -> None:
        """An empty row takes over ``pages``, which become its own to release."""
        self.table[row, : len(pages)] = pages
        self.held[row] = len(pages)

    def missing(self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many more pages each of ``rows`` needs to hold ``tokens``."""
        needed = pages_for(tokens, self._page_tokens)
        short: npt.NDArray[np.int64] = np.maximum(needed - self.held[rows], 0)
        return short

    def grow(self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """Give each of ``rows`` room for ``tokens``. All at once: at 1,024 rows a loop would cost a step of decoding.
        Raises ValueError: more pages are missing than are free."""
        missing = self.missing(rows, tokens)
        pages = self._allocator.take(int(missing.sum()))
        row = np.repeat(rows, missing)
        first = np.repeat(np.cumsum(missing) - missing, missing)
        self.table[row, self.held[row] + np.arange(len(row)) - first] = pages
        self.held[rows] += missing.astype(np.int32)

    def end(self, row: int) -> None:
        if self.held[row]:
            self._allocator.release(self.table[row, : self.held[row]])
            self.held[row] = 0
            self.table[row] = 0

    def move(self, source: int, target: int) -> None:
        """A row gets another number; ``target`` is empty."""
        self.table[target], self.held[target] = self.table[source], self.held[source]
        self.table[source], self.held[source] = 0, 0


def pages_for(tokens: _Count, page_tokens: int) -> _Count:
    """None at all where ``page_tokens`` is 0: of such a cache there is always enough."""
    return -(-tokens // page_tokens) if page_tokens else tokens * 0


def minimum_pages(max_sequence_tokens: int, page_tokens: int) -> int:
    """The smallest pool in which all finish: a sequence, the page that another one copied of its prompt, and page 0."""
    return pages_for(max_sequence_tokens, page_tokens) + 2


def slots_of(pages: PageArray, tokens: int, page_tokens: int) -> npt.NDArray[np.int64]:
    """Where the tokens of a sequence stand in the pool."""
    place = np.arange(tokens)
    return pages.astype(np.int64)[place // page_tokens] * page_tokens + place % page_tokens
