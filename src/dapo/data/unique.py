"""Tables without the rows that repeat an earlier one: the published DAPO-Math-17k holds each about 100 times.

Consumes a table, produces one of its first rows of each kind. Which these are is kept in the cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from dapo.config.data import DataItem
from dapo.data.cache import cached, key_of
from dapo.data.rows import VERL_ANSWER, BadRow, Keys, Table, look_up

_NUMBERS = "numbers.bin"


class UniqueRows(Table):
    """The rows of ``table`` with these numbers."""

    def __init__(self, table: Table, numbers: np.ndarray[Any, Any]) -> None:
        super().__init__(table.name, len(numbers), f"{table.content()} without repeats")
        self._table, self._numbers = table, numbers
        self.left_out = len(table) - len(numbers)

    def raw(self, number: int) -> Any:
        return self._table.raw(int(self._numbers[number]))

    def place(self, number: int) -> str:
        return self._table.place(int(self._numbers[number]))


def without_repeats(table: Table, item: DataItem, keys: Keys) -> Table:
    """The table, or, as ``item.unique`` says, what is left of it without rows that repeat prompt and answer. By default
    only files of verl's layout are looked through: there a row may well stand twice because it is to count twice."""
    if not (_has_verls_layout(table, item) if item.unique is None else item.unique):
        return table

    def build(folder: Path) -> dict[str, Any]:
        seen: set[bytes] = set()
        numbers = []
        for number, row in enumerate(table.all_raw()):
            key = _key(row, keys)
            if key is None or key not in seen:  # a row that cannot be read is named later
                numbers.append(number)
                seen.update([key] if key else [])
        np.array(numbers, "<u8").tofile(folder / _NUMBERS)
        return {"rows": len(numbers)}

    folder, _ = cached("unique", key_of(1, table.content(), keys.prompt, keys.answer), build)
    numbers = np.fromfile(folder / _NUMBERS, "<u8")
    return UniqueRows(table, numbers) if len(numbers) < len(table) else table


def _has_verls_layout(table: Table, item: DataItem) -> bool:
    try:
        return item.path.endswith(".parquet") and look_up(table.raw(0), VERL_ANSWER)[0]
    except BadRow:
        return False


def _key(row: Any, keys: Keys) -> bytes | None:
    if not isinstance(row, Mapping):
        return None
    found = [look_up(row, key) for key in (keys.prompt, keys.answer, VERL_ANSWER)]
    return blake2b(json.dumps(found, default=str).encode("utf-8", "backslashreplace"), digest_size=16).digest()
