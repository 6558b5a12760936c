"""The rows of several files as one: which part a row is in, what its keys are called, and its token ids."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, islice, repeat
from operator import getitem
from pathlib import Path
from typing import Any

from dapo.config import DataConfig
from dapo.config.data import DataItem, names_a_data_set
from dapo.data.procedural import open_procedural
from dapo.data.rows import BadRow, Keys, PythonRows, Row, Table, check_row, listed
from dapo.data.template import PromptTemplate
from dapo.data.unique import UniqueRows, without_repeats
from dapo.errors import ConfigError, DataError


def open_table(item: DataItem) -> Table:
    """The rows of one item. What reads Parquet and data sets is loaded only for those.
    Raises DataError: it cannot be read, or has no rows."""
    path, name = Path(item.path), item.path
    if (rows := open_procedural(name)) is not None:
        return rows
    if names_a_data_set(item):
        from dapo.data.arrow import open_dataset

        said = [f"{key}={value}" for key, value in (("name", item.name), ("split", item.split)) if value]
        return open_dataset(item.path, item.name, item.split, f"{name} ({', '.join(said)})" if said else name)
    if path.suffix == ".parquet":
        from dapo.data.arrow import open_parquet

        return open_parquet(path, name)
    from dapo.data.text import open_text

    return open_text(path, name)


CHECKED_ROWS = 10_000
"""Rows that are looked at before anything else is loaded."""
_AT_ONCE = 500  # rows that are tokenized together

DataInput = Sequence[str | DataItem] | Sequence[Mapping[str, Any]] | Table
"""Files and data sets, or rows from Python."""


@dataclass(frozen=True, slots=True)
class Part:
    """A table, which of its keys hold what, and what to call it in a fingerprint."""

    table: Table
    keys: Keys
    label: str
    weight: float | None = None

    def fingerprint(self) -> dict[str, Any]:
        found = {"rows": len(self.table), "content": self.table.content()}
        return found if self.weight is None else {**found, "weight": self.weight}


def open_parts(data: DataConfig, source: DataInput, answer_required: bool) -> tuple[list[Part], list[float] | None]:
    """The parts of the data, and their weights if it is a mixture.
    Raises DataError: with what is wrong in any of them."""
    if not source:
        raise DataError("no data files are given, and no rows")
    if not isinstance(source, Table) and any(not isinstance(item, str | DataItem) for item in source):
        source = PythonRows([item for item in source if not isinstance(item, str | DataItem)], "prompts")
    if isinstance(source, Table):
        return [Part(source, Keys(data.prompt_key, data.answer_key, answer_required), "prompts")], None
    named = [item for item in source if isinstance(item, str | DataItem)]
    items = [DataItem(path=item) if isinstance(item, str) else item for item in named]
    parts: list[Part] = []
    faults: list[str] = []
    for number, item in enumerate(items, start=1):
        try:
            keys = keys_of(item, data, answer_required)
            table = without_repeats(open_table(item), item, keys)
            parts.append(Part(table, keys, f"{number} {Path(item.path).name or item.path}", item.weight))
        except DataError as fault:
            faults.append(str(fault))
    if faults:
        raise DataError(listed(faults + list(_first_faults(parts))))
    weights = [item.weight for item in items if item.weight is not None]
    return parts, weights or None


def _first_faults(parts: Sequence[Part]) -> Iterator[str]:
    """What is wrong in the files that could be opened, so that one run shows it all."""
    streams = [Rows([part]) for part in parts]
    for part, number in spread(streams):
        try:
            streams[part][number]
        except BadRow as fault:
            yield f"{streams[part].place(number)}: {fault}"


def keys_of(item: DataItem, data: DataConfig, answer_required: bool | None) -> Keys:
    """Raises ConfigError: prompt and answer are the same key."""
    keys = Keys(item.prompt_key or data.prompt_key, item.answer_key or data.answer_key, answer_required)
    if keys.prompt == keys.answer:
        raise ConfigError(f"{item.path}: prompt_key and answer_key are the same key ({keys.prompt!r})")
    return keys


class Rows:
    """The rows of several parts, one after the other, checked as they are read."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._ends = list(accumulate(len(part.table) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Row:
        """Raises BadRow: the row cannot be used."""
        part, inside = self._find(number)
        return check_row(part.table.raw(inside), part.keys, part.table.place(inside))

    def good(self) -> Iterator[tuple[int, Row]]:
        """Those that can be used, with their numbers."""
        for number in range(len(self)):
            with suppress(BadRow):
                yield number, self[number]

    def keys(self, number: int) -> Keys:
        return self._find(number)[0].keys

    def place(self, number: int) -> str:
        """``file:line``, or what is like it."""
        part, inside = self._find(number)
        return part.table.place(inside)

    def _find(self, number: int) -> tuple[Part, int]:
        k = bisect_right(self._ends, number)
        return self.parts[k], number - (self._ends[k - 1] if k else 0)


def spread(streams: Sequence[Rows]) -> Iterator[tuple[int, int]]:
    """The first rows of every part: 10,000 in all, as evenly as their sizes allow. Stream and row number."""
    sizes = [(len(part.table), s, p) for s, rows in enumerate(streams) for p, part in enumerate(rows.parts)]
    shares: dict[tuple[int, int], int] = {}
    left = CHECKED_ROWS
    for place, (size, *at) in enumerate(sorted(sizes)):
        share = min(size, left // (len(sizes) - place))
        shares[at[0], at[1]] = share
        left -= share
    for s, rows in enumerate(streams):
        start = 0
        for p, part in enumerate(rows.parts):
            yield from ((s, start + k) for k in range(shares[s, p]))
            start += len(part.table)


def left_out(parts: Sequence[Part]) -> Iterator[str]:
    """What to say of parts whose repeated rows are left out."""
    for table in (part.table for part in parts):
        if isinstance(table, UniqueRows):
            again = f"{table.left_out:,} rows repeat an earlier one and are left out"
            yield f"{table.name}: {again}, {len(table):,} are left"


def names_of(rows: Rows) -> str:
    return ", ".join(part.table.name for part in rows.parts)


def encode(row: Row, template: PromptTemplate, ids: Sequence[int] | None = None) -> tuple[int, ...]:
    """``ids``: what the template makes of the row, if it is known.
    Raises BadRow: the template refuses the row, or there is nothing in it."""
    try:
        ids = template.encode(row.prompt) if ids is None else ids
    except DataError as error:
        raise BadRow(" ".join(str(error).split())) from None
    if not ids:
        raise BadRow(f"the tokenizer makes no tokens of this prompt: {row.text[:60]!r}")
    return tuple(ids)


def encode_all(
    places: Iterable[tuple[Rows, int]], template: PromptTemplate
) -> Iterator[tuple[Row, tuple[int, ...]] | BadRow]:
    """Each of the rows with its token ids, or why it cannot be used; many are tokenized at once."""
    left = iter(places)
    while some := list(islice(left, _AT_ONCE)):
        read = [_tried(getitem, *place) for place in some]
        known: Iterator[list[int] | None] = repeat(None)
        with suppress(DataError):  # of one of them, which its own turn names
            known = iter(template.encode_all([row.prompt for row in read if isinstance(row, Row)]))
        for row in read:
            ids = row if isinstance(row, BadRow) else _tried(encode, row, template, next(known))
            yield ids if isinstance(ids, BadRow) else (row, ids)


def _tried(make: Callable[..., Any], *given: Any) -> Any:
    try:
        return make(*given)
    except BadRow as fault:
        return fault
