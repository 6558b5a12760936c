"""``dapo data clean`` without its printing: rows that are mended or left out, and why, one by one.

Consumes files of rows and of rows to evaluate on; produces the rows that are left, and a :class:`CleanReport`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

from dapo.config import DataConfig
from dapo.config.data import DataItem
from dapo.data.check import Progress
from dapo.data.near import near_repeats
from dapo.data.overlap import exact_key, find_overlap
from dapo.data.parts import Part, Rows, keys_of, open_table
from dapo.data.rows import BadRow, Messages, Row
from dapo.data.unique import without_repeats
from dapo.util.escapes import eaten, restored
from dapo.util.files import json_line

Same = Callable[[str, str], bool]
"""Whether the verifier takes the second answer for the first."""

KINDS = {
    "bad": "left out: cannot be used",
    "repeated": "left out: the same prompt and answer as an earlier row",
    "conflict": "left out: the same prompt as another row, with another answer",
    "near": "left out: repeats an earlier row, but for a few words",
    "evaluation": "left out: stands in a file to evaluate on",
    "control": "mended: control characters",
    "integer": "mended: the answer is an integer, and now written as one",
    "fraction": "mended: the answer was a fraction m/n, and the row now asks for m + n",
    "same": "kept as they are",
}
"""What becomes of rows."""
_MENDED = ("control", "integer", "fraction")
_PLAIN = re.compile(r"-?\d+")
_FRAME = re.compile(r"[\s$]*(?:\\boxed\{(?P<boxed>.*)\}|(?P<bare>.*?))[\s$.]*", re.DOTALL)
_NUMBER = re.compile(r"[-\u2212]?(?:\d{1,999}|\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+)(?:\.0*)?")
_POWER = re.compile(r"(\d{1,9})\s*\^\s*\{?(\d{1,2})\}?")
_FRACTION = re.compile(r"\\[dt]?frac\{(\d{1,18})\}\{(\d{1,18})\}|(\d{1,18})\s*/\s*(\d{1,18})")
_ASKED = "\n\nThe original answer is an irreducible fraction m/n. Give the value of m + n."
"""As in the rows of DAPO-Math-17k that were made so."""


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to a row, ``file:line``, or to several of a file."""

    row: str
    what: str
    why: str
    rows: int = 1


@dataclass(slots=True)
class CleanReport:
    """``counts`` has each of the rows that were ``read`` once, by what became of it at last; ``changes`` are in the
    order in which they were made."""

    counts: dict[str, int] = field(default_factory=dict)
    read: int = 0
    written: int = 0
    changes: list[Change] = field(default_factory=list)

    def end(self, rows: Sequence[Row]) -> None:
        """``rows``: those that are left."""
        mended = {change.row: change.what for change in self.changes if change.what in _MENDED}
        found = Counter(mended.get(row.place, "same") for row in rows)
        for change in self.changes:
            if change.what not in _MENDED:
                found[change.what] += change.rows
        self.counts, self.written = {kind: found[kind] for kind in KINDS}, len(rows)


def clean_data(
    files: Sequence[DataItem],
    evaluation: Sequence[DataItem],
    data: DataConfig,
    same: Same | None,
    *,
    fractions: bool = False,
    progress: Progress = lambda text: None,
) -> tuple[list[Row], CleanReport]:
    """The rows that are left, in their order, and what was done.

    Args:
        same: the verifier; None: answers are compared as text, and none is rewritten.
        fractions: whether rows whose answer is a fraction are to ask for an integer, as the paper's were made to.

    Raises DataError: a file cannot be read at all.
    """
    report = CleanReport()
    rows = _unlike(_read(files, data, report, progress), same or str.__eq__, report)
    if evaluation:
        progress("comparing with files to evaluate on")
        rows = _unseen(rows, evaluation, data, report)
    if same is not None:
        rows = [_with_integer(row, same, fractions, report) for row in rows]
    progress("looking for near repeats")
    near = {
        place: ("near", f"{alike:.0%} like {rows[first].place}")
        for place, first, alike in near_repeats([row.text for row in rows], [row.answer for row in rows])
    }
    rows = _without(rows, near, report)
    report.end(rows)
    return rows, report


def write_rows(file: Path, rows: Sequence[Row], prompt_key: str, answer_key: str) -> None:
    with file.open("w", encoding="utf-8") as out:
        for row in rows:
            answer = {} if row.answer is None else {answer_key: row.answer}
            out.write(json_line({prompt_key: row.prompt, **answer, **row.meta}))


# --- one step after the other -------------------------------------------------------------------------------------


def _read(files: Sequence[DataItem], data: DataConfig, report: CleanReport, progress: Progress) -> list[Row]:
    """Rows that can be used, without control characters and without those that are the same to the letter."""
    first: dict[tuple[str, str | None], Row] = {}
    for item in files:
        keys, table = keys_of(item, data, None), open_table(item)
        rows = Rows([Part(without_repeats(table, item, keys), keys, item.path)])
        report.read += len(table)
        if again := len(table) - len(rows):
            report.changes.append(Change(item.path, "repeated", "the same as earlier rows of the file", again))
        for number in range(len(rows)):
            if number % 1000 == 0:
                progress(f"{item.path}: {number:,} of {len(rows):,} rows")
            try:
                row = _mended(rows[number], report)
            except BadRow as fault:
                report.changes.append(Change(rows.place(number), "bad", str(fault)))
                continue
            if (known := first.setdefault((row.text, row.answer), row)) is not row:
                report.changes.append(Change(row.place, "repeated", f"the same as {known.place}"))
    return list(first.values())


def _mended(row: Row, report: CleanReport) -> Row:
    texts = [row.prompt] if isinstance(row.prompt, str) else [message["content"] for message in row.prompt]
    found = [eaten(text) for text in texts] + [eaten(row.answer or "", is_answer=True)]
    if not any(found):
        return row
    report.changes.append(Change(row.place, "control", "; ".join(filter(None, found))))
    prompt: str | Messages = (
        restored(row.prompt)
        if isinstance(row.prompt, str)
        else tuple({**message, "content": restored(message["content"])} for message in row.prompt)
    )
    return replace(row, prompt=prompt, answer=row.answer and restored(row.answer))


def _unlike(rows: Sequence[Row], same: Same, report: CleanReport) -> list[Row]:
    """Without equal prompts, white space and case apart: of those that agree the first is kept, of others none."""
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(exact_key(row.text), []).append(place)
    found: dict[int, tuple[str, str]] = {}
    for first, *others in groups.values():
        start = rows[first]
        differ = [k for k in others if not _agree(start.answer, rows[k].answer, same)]
        why = f"the same as {start.place}"
        if differ:
            why = f"{start.place} has {start.answer!r}, {rows[differ[0]].place} has {rows[differ[0]].answer!r}"
            found[first] = "conflict", why
        found |= dict.fromkeys(others, ("conflict" if differ else "repeated", why))
    return _without(rows, found, report)


def _agree(one: str | None, other: str | None, same: Same) -> bool:
    return one == other or (one is not None and other is not None and (same(one, other) or same(other, one)))


def _unseen(rows: Sequence[Row], evaluation: Sequence[DataItem], data: DataConfig, report: CleanReport) -> list[Row]:
    held = [Rows([Part(open_table(item), keys_of(item, data, False), item.path)]) for item in evaluation]
    found: dict[int, tuple[str, str]] = {}
    texts = [((number, row.text) for number, row in one.good()) for one in held]
    for hit in find_overlap(texts, [enumerate(row.text for row in rows)]):
        where = held[hit.eval_file].place(hit.eval_row)
        why = f"the same prompt as {where}" if hit.exact else f"shares with {where}: {hit.words}"
        found.setdefault(hit.train_row, ("evaluation", why))
    return _without(rows, found, report)


def _without(rows: Sequence[Row], found: Mapping[int, tuple[str, str]], report: CleanReport) -> list[Row]:
    report.changes += [Change(rows[place].place, what, why) for place, (what, why) in sorted(found.items())]
    return [row for place, row in enumerate(rows) if place not in found]


# --- answers ------------------------------------------------------------------------------------------------------


def _with_integer(row: Row, same: Same, fractions: bool, report: CleanReport) -> Row:
    """The row with an integer for an answer, if the verifier takes each of the two for the other."""
    answer = row.answer or ""
    value = None if _PLAIN.fullmatch(answer) else number_of(answer)
    if value is None:
        return row
    m, n = value.numerator, value.denominator
    written = str(m) if n == 1 else f"\\frac{{{m}}}{{{n}}}"
    if (n > 1 and not fractions) or not (same(answer, written) and same(written, answer)):
        return row
    if n == 1:
        report.changes.append(Change(row.place, "integer", f"{answer!r} is {written}"))
        return replace(row, answer=written)
    report.changes.append(Change(row.place, "fraction", f"{answer!r} is {m}/{n}, now {m + n}"))
    return replace(row, prompt=_asking(row.prompt), answer=str(m + n))


def number_of(answer: str) -> Fraction | None:
    """What a number, a power or a fraction is; None: something else, such as a number with a unit."""
    frame = _FRAME.fullmatch(answer)
    text = ((frame["boxed"] or frame["bare"] or "") if frame else "").strip()
    if _NUMBER.fullmatch(text):
        return Fraction(re.sub(r"[,{}\\]", "", text).replace("\u2212", "-").rstrip("."))
    if power := _POWER.fullmatch(text):
        return Fraction(int(power[1]) ** int(power[2]))
    if found := _FRACTION.fullmatch(text):
        m, n = (int(part) for part in found.groups() if part is not None)
        return Fraction(m, n) if n else None
    return None


def _asking(prompt: str | Messages) -> str | Messages:
    if isinstance(prompt, str):
        return prompt + _ASKED
    *before, last = prompt
    return (*before, {**last, "content": last["content"] + _ASKED})
