"""Data as Python callers give it: files, or rows in a list, a generator, a data frame or a data set."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from dapo.data.rows import PythonRows, Table
from dapo.errors import DataError

Data: TypeAlias = Iterable[Mapping[str, Any]] | Iterable[str | Path] | str | Path
"""Rows such as ``{"prompt": "2+2=", "answer": "4"}`` in a list, a generator that ends, a pandas ``DataFrame`` or a
``datasets.Dataset``; or one file or several."""
MOST_ROWS = 1_000_000
"""Rows that a generator may give."""


def files_or_rows(data: Any, name: str, tell: Callable[[str], None]) -> tuple[list[str], Table | None]:
    """``(files, None)`` or ``([], rows)``. ``name``: of the argument. ``tell``: hears of rows that take long to come.
    Raises DataError: it is neither, or both (one kind would be lost), or a generator gives no rows or does not end."""
    if isinstance(data, str | Path):
        return [str(data)], None
    if hasattr(data, "num_rows") and isinstance(data, Mapping):  # a DatasetDict
        raise DataError(f"{name}: holds the splits {', '.join(data)}; give one: {name}=data[{next(iter(data))!r}]")
    if isinstance(data, Mapping):
        raise DataError(f"{name}: expected a list of rows or files, got a single row; put it in a list")
    if hasattr(data, "features") and hasattr(data, "num_rows"):  # a Dataset: its rows stay where they are
        from dapo.data.arrow import ArrowTable

        return [], ArrowTable(name, data, PythonRows(data, name).content())
    if hasattr(data, "iloc"):  # a DataFrame; pandas has several values for "missing", rows have None
        if not hasattr(data, "columns") or not data.columns.is_unique:
            raise DataError(f"{name}: expected a data frame whose columns have different names, got a {_kind(data)}")
        data = data.astype(object).where(data.notna(), None).to_dict("records")
    if not isinstance(data, Iterable):
        raise DataError(f"{name}: expected rows or files, got {_kind(data)} {str(data)[:60]}")
    items = data if isinstance(data, Sequence) else _all_of(data, name, tell)
    if not items:
        raise DataError(f"{name}: there are no rows in the {_kind(data)}")
    files = [str(item) for item in items if isinstance(item, str | Path)]
    if files and len(files) < len(items):
        raise DataError(f"{name}: {len(files)} files and {len(items) - len(files)} rows together; give one kind")
    if len(files) > 1 and not any("." in name or os.path.exists(name) for name in files):  # noqa: PTH110
        raise DataError(
            f"{name}: a list of texts is a list of files, and {files[0]!r} is none; rows are dicts, such as "
            '{"prompt": "2+2=", "answer": "4"}'
        )
    return (files, None) if files else ([], PythonRows(items, name))


def _kind(data: Any) -> str:
    columns = getattr(data, "columns", None)
    twice = [] if columns is None else sorted({str(name) for name in columns[columns.duplicated()]})
    return type(data).__name__ + (f" with two columns {', '.join(twice)}" if twice else "")


def _all_of(data: Iterable[Any], name: str, tell: Callable[[str], None]) -> list[Any]:
    rows: list[Any] = []
    told = time.monotonic()
    for row in data:
        if len(rows) == MOST_ROWS:
            raise DataError(
                f"{name}: the {type(data).__name__} did not end after {MOST_ROWS:,} rows. Rows are drawn in random "
                f"order, so all of them are needed first: give a part, such as itertools.islice({name}, 100_000), or a "
                "file (JSONL, Parquet), which may hold more"
            )
        rows.append(row)
        if time.monotonic() - told > 5:
            told = time.monotonic()
            tell(f"{name}: {len(rows):,} rows read, and more to come")
    if not rows:
        raise DataError(f"{name}: the {type(data).__name__} gave no rows; was it read to its end before?")
    return rows
