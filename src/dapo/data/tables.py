"""What every kind of data is to the rest: numbered raw rows that can be read one by one, in any order."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from dapo.config.data import DataItem, names_a_data_set
from dapo.data.rows import plain_value


class Table(ABC):
    """The rows of one file, one data set of the hub, or one list from Python. Numbers count from 0."""

    name: str
    """As the user wrote it."""

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are."""

    @abstractmethod
    def raw(self, number: int) -> Any:
        """A row as it stands there. Raises BadRow: it cannot be read."""

    @abstractmethod
    def place(self, number: int) -> str:
        """Where a row stands, for people: ``file:line``, or ``file:row 3`` where there are no lines."""

    @abstractmethod
    def content(self) -> str:
        """A hash of all that the table holds."""

    def fingerprint(self) -> dict[str, Any]:
        """What tells this data from other data, in JSON types. The name is there for messages alone."""
        return {"name": self.name, "rows": len(self), "content": self.content()}


class PythonRows(Table):
    def __init__(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        self.name = name
        self._rows = rows
        self._content: str | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def raw(self, number: int) -> Any:
        return self._rows[number]

    def place(self, number: int) -> str:
        return f"{self.name}[{number}]"

    def content(self) -> str:
        if self._content is None:
            found = sha256()
            for row in self._rows:
                line = json.dumps(plain_value(row), sort_keys=True) + "\n"
                found.update(line.encode("utf-8", "backslashreplace"))
            self._content = found.hexdigest()
        return self._content


def open_table(item: DataItem) -> Table:
    """The rows of one item. What reads Parquet and data sets is loaded only for those.
    Raises DataError: it cannot be read, or has no rows."""
    path, name = Path(item.path), item.path
    if names_a_data_set(item):
        from dapo.data.arrow import open_dataset

        said = [f"{key}={value}" for key, value in (("name", item.name), ("split", item.split)) if value]
        return open_dataset(item.path, item.name, item.split, f"{name} ({', '.join(said)})" if said else name)
    if path.suffix == ".parquet":
        from dapo.data.arrow import open_parquet

        return open_parquet(path, name)
    from dapo.data.text import open_text

    return open_text(path, name)
