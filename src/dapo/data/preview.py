"""The first rows of the data, read one by one before anything else is loaded: which are good, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate

from dapo.config import DataConfig
from dapo.data.parts import encode, names_of, spread
from dapo.data.rows import SHOWN_FAULTS, BadRow, listed
from dapo.data.stream import Stream
from dapo.data.template import PromptTemplate
from dapo.errors import DataError


@dataclass(frozen=True, slots=True)
class DataReport:
    """What is in the rows that were checked. All counts are rows.

    ``duplicates``: rows whose prompt stood in an earlier row already; ``conflicts``: those of them whose answer
    differs from that of the first one. They are kept: a row is a prompt of its own.
    """

    rows: int
    """In all the data."""
    checked: int
    too_long: int
    duplicates: int
    conflicts: int
    longest: int
    """Length in tokens of the longest prompt that is used."""
    bad: int = 0
    doubts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Rows that can be used and may be wrong (:meth:`Row.doubts`), by kind, as ``file:line: key holds ...``."""
    faults: tuple[str, ...] = ()
    """The first bad rows, as ``file:line: reason``."""

    @property
    def usable(self) -> int:
        return self.checked - self.too_long - self.bad

    @property
    def whole(self) -> bool:
        return self.checked == self.rows


class Head:
    def __init__(self, streams: Sequence[Stream], template: PromptTemplate, data: DataConfig) -> None:
        """Raises DataError: as the recipe's policy says, or if no row is left."""
        self._streams, self._template, self._data = streams, template, data
        self._starts = [0, *accumulate(len(stream.rows) for stream in streams)]
        self._size = self._starts[-1]
        self._prompts: dict[bytes, str | None] = {}
        self._duplicates = self._conflicts = 0
        self._doubts: dict[str, list[str]] = {}
        self.good: list[tuple[int, int]] = []
        """Stream and number of each row that can be used."""
        self.bad: set[tuple[int, int]] = set()
        """Those that cannot."""
        rows = list(spread([stream.rows for stream in streams]))
        lengths: list[int] = []
        faults: list[str] = []
        for stream, number in rows:
            try:
                lengths.append(self._look_at(stream, number, data.max_prompt_length))
            except BadRow as fault:
                self.bad.add((stream, number))
                faults.append(f"{streams[stream].rows.place(number)}: {fault}")
        self._refuse(faults, lengths, rows)
        fitting = [length for length in lengths if length <= data.max_prompt_length]
        self.report = DataReport(
            rows=self._size,
            checked=len(rows),
            too_long=len(lengths) - len(fitting),
            duplicates=self._duplicates,
            conflicts=self._conflicts,
            longest=max(fitting),
            bad=len(faults),
            doubts=self._doubts,
            faults=tuple(faults[:SHOWN_FAULTS]),
        )

    def _refuse(self, faults: list[str], lengths: Sequence[int], rows: Sequence[tuple[int, int]]) -> None:
        data, streams = self._data, self._streams
        if faults and data.on_bad_row == "fail":
            raise DataError(listed(faults))
        if len(faults) > data.max_bad_rows * len(rows):
            raise DataError(
                f"{len(faults)} of {len(rows)} rows are bad ({len(faults) / len(rows):.1%}), more than "
                f"data.max_bad_rows={data.max_bad_rows:g} allows:\n{listed(faults)}"
            )
        if not self.good:
            said = "" if len(rows) == self._size else "the first "
            if not lengths:
                raise DataError(
                    f"no prompt is left: {said}{len(rows)} rows were read, all of them bad:\n{listed(faults)}"
                )
            raise DataError(
                f"no prompt is left: {said}{len(rows)} rows were read, all of them longer than data.max_prompt_length="
                f"{data.max_prompt_length} tokens (the shortest has {min(lengths)})"
            )
        usable, looked_at = Counter(s for s, _ in self.good), Counter(s for s, _ in rows)
        for number, stream in enumerate(streams):
            if not usable[number] and looked_at[number] == len(stream.rows):
                raise DataError(f"{names_of(stream.rows)}: none of its {len(stream.rows)} rows can be used")

    def _look_at(self, stream: int, number: int, limit: int) -> int:
        row = self._streams[stream].rows[number]
        length = len(encode(row, self._template))
        for what, said in row.doubts(self._streams[stream].rows.keys(number)):
            self._doubts.setdefault(what, []).append(f"{row.place}: {said}")
        text = blake2b(row.text.encode(), digest_size=16).digest()
        if text in self._prompts:
            self._duplicates += 1
            self._conflicts += self._prompts[text] != row.answer
        else:
            self._prompts[text] = row.answer
        if length <= limit:
            self.good.append((stream, number))
        return length
