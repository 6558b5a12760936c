"""A position in rows that are passed through again and again."""

from __future__ import annotations

from dapo.config import DataConfig
from dapo.data.order import Permutation
from dapo.data.parts import Rows
from dapo.data.rows import BadRow, Row


class Stream:
    def __init__(self, rows: Rows, number: int, data: DataConfig, seed: int) -> None:
        self.rows = rows
        self._seed, self._number, self._shuffle = seed, number, data.shuffle
        self.go_to(0, 0)
        self._cycle = Permutation(len(rows), seed, "answers", number) if data.shuffle_answers else None

    def go_to(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self._order = Permutation(len(self.rows), self._seed, "rows", self._number, epoch) if self._shuffle else None

    def next(self) -> int:
        if self.position == len(self.rows):
            self.go_to(self.epoch + 1, 0)
        number = self.position if self._order is None else self._order[self.position]
        self.position += 1
        return number

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
