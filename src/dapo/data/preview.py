"""The first rows of the data, read one by one before anything else is loaded: which are good, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from dapo.config import DataConfig
from dapo.data.parts import Rows, encode, names_of, spread
from dapo.data.rows import SHOWN_FAULTS, BadRow, listed
from dapo.data.template import PromptTemplate
from dapo.errors import DataError


@dataclass(frozen=True, slots=True)
class DataReport:
    """What is in the rows that were checked. All counts are rows.

    ``duplicates``: rows whose prompt stood in an earlier row already; ``conflicts``: those of them whose answer
    differs from that of the first one. They are kept: a row is a prompt of its own."""

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


def preview(
    streams: Sequence[Rows], template: PromptTemplate, data: DataConfig
) -> tuple[list[tuple[int, int]], set[tuple[int, int]], DataReport]:
    """Stream and number of each row that can be used and of each that cannot, among the first ones, and what they hold.
    Raises DataError: as the recipe's policy says, or if no row is left."""
    places = list(spread(streams))
    good: list[tuple[int, int]] = []
    bad: dict[tuple[int, int], str] = {}
    lengths: list[int] = []
    doubts: dict[str, list[str]] = {}
    answers: dict[bytes, str | None] = {}
    duplicates = conflicts = 0
    for stream, number in places:
        rows = streams[stream]
        try:
            row = rows[number]
            lengths.append(len(encode(row, template)))
        except BadRow as fault:
            bad[stream, number] = f"{rows.place(number)}: {fault}"
            continue
        for what, said in row.doubts(rows.keys(number)):
            doubts.setdefault(what, []).append(f"{row.place}: {said}")
        text = blake2b(row.text.encode(), digest_size=16).digest()
        duplicates += text in answers
        conflicts += answers.setdefault(text, row.answer) != row.answer
        if lengths[-1] <= data.max_prompt_length:
            good.append((stream, number))
    _refuse(streams, data, places, good, list(bad.values()), lengths)
    fitting = [length for length in lengths if length <= data.max_prompt_length]
    report = DataReport(
        rows=sum(map(len, streams)),
        checked=len(places),
        too_long=len(lengths) - len(fitting),
        duplicates=duplicates,
        conflicts=conflicts,
        longest=max(fitting),
        bad=len(bad),
        doubts=doubts,
        faults=tuple(list(bad.values())[:SHOWN_FAULTS]),
    )
    return good, set(bad), report


def _refuse(
    streams: Sequence[Rows],
    data: DataConfig,
    places: Sequence[tuple[int, int]],
    good: Sequence[tuple[int, int]],
    faults: list[str],
    lengths: Sequence[int],
) -> None:
    if faults and data.on_bad_row == "fail":
        raise DataError(listed(faults))
    count = len(places)
    if len(faults) > data.max_bad_rows * count:
        raise DataError(
            f"{len(faults)} of {count} rows are bad ({len(faults) / count:.1%}), more than "
            f"data.max_bad_rows={data.max_bad_rows:g} allows:\n{listed(faults)}"
        )
    if not good:
        read = f"{'' if count == sum(map(len, streams)) else 'the first '}{count} rows were read, all of them"
        if not lengths:
            raise DataError(f"no prompt is left: {read} bad:\n{listed(faults)}")
        raise DataError(
            f"no prompt is left: {read} longer than data.max_prompt_length={data.max_prompt_length} tokens (the "
            f"shortest has {min(lengths)})"
        )
    usable, looked_at = Counter(s for s, _ in good), Counter(s for s, _ in places)
    for number, rows in enumerate(streams):
        if not usable[number] and looked_at[number] == len(rows):
            raise DataError(f"{names_of(rows)}: none of its {len(rows)} rows can be used")
