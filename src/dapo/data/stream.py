"""A position in the rows of one source: in a seeded order without end, or (``difficulty.py``) by what is to be learned.

Consumes rows and what became of them; produces numbers of rows. The state is a few numbers in JSON types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo.config import DataConfig
from dapo.data.order import Permutation
from dapo.data.parts import Rows
from dapo.data.rows import BadRow, Row
from dapo.records import Group


class Stream:
    """Rows that are passed through again and again, in an order that follows from seed and epoch."""

    def __init__(self, rows: Rows, number: int, data: DataConfig, seed: int) -> None:
        self.rows = rows
        self.epoch = self.position = 0
        self._seed, self._number, self._shuffle = seed, number, data.shuffle
        self.load_state((0, 0))
        self._cycle = Permutation(len(rows), seed, "answers", number) if data.shuffle_answers else None

    def next(self) -> int:
        if self.position == len(self.rows):
            self.load_state((self.epoch + 1, 0))
        number = self.position if self._order is None else self._order[self.position]
        self.position += 1
        return number

    @property
    def drawn(self) -> int:
        """Rows so far."""
        return self.epoch * len(self.rows) + self.position

    def leave_out(self, number: int) -> None:
        """Hear that a row cannot be used: it is passed over each time."""

    def heard(self, groups: Mapping[int, list[Group]]) -> None:
        """Hear what became of rows, by number: the order here is that of the data, whatever it was."""

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> Any:
        return [self.epoch, self.position]

    def load_state(self, state: Any) -> None:
        self.epoch, self.position = state
        self._order = (
            Permutation(len(self.rows), self._seed, "rows", self._number, self.epoch) if self._shuffle else None
        )

    def answer(self, number: int, row: Row) -> str | None:
        """Of the row, or, for the control experiment, of the next good one on a random cycle through all rows: no row
        keeps its own. (Equal answers may still meet.)"""
        if self._cycle is None:
            return row.answer
        place = self._cycle.place_of(number)
        for step in range(1, len(self.rows)):
            try:
                return self.rows[self._cycle[(place + step) % len(self.rows)]].answer
            except BadRow:
                continue
        return row.answer
