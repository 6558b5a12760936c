"""One row of data: what it may be, and the reason when it is not; and tables, from which rows are read one by one.

Consumes raw rows (bytes of JSON, or mappings from Parquet, a hub data set or Python); produces :class:`Row` records.
Numbers of JSON are kept as they are written, so that an answer 0.10 stays 0.10."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import sha256
from typing import Any, NoReturn

from dapo.errors import shortened
from dapo.util.escapes import eaten_in

SHOWN_FAULTS, SHOWN_PLACES = 20, 4
EATEN, NO_ANSWER = "hold control characters", "have a placeholder for an answer"
"""What may be wrong with rows that can be used (:meth:`Row.doubts`)."""
_NO_ANSWER = re.compile(
    r"(?:[\W_]|\\[a-z]+\{)*(?:NA|(?i:n/a|n\.a|nan|none|null|nil|proof|unknown|missing|tbd|todo|omitted|unavailable"
    r"|(?:no|without) (?:answer|solution given)|not[ _-]?(?:found|available|applicable|given|provided)"
    r"|(?:see|refer to|as in)( the)? (?:solution|proof|above|below|explanation|figure|attached)))[\W_]*"
    r"|\s*(?:\?+|-+|[.\u2026\u2013\u2014_]+)\s*"
)
_PLAIN_BELOW = 1e21
"""Whole floats below this are written out."""

Messages = tuple[Mapping[str, str], ...]

VERL_ANSWER = "reward_model.ground_truth"
"""Where the Parquet files of verl and of the DAPO authors hold the answer."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it stands in the data. ``prompt`` is text or chat messages; ``place`` says where it came from."""

    prompt: str | Messages
    answer: str | None
    meta: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""

    def doubts(self, keys: Keys) -> Iterator[tuple[str, str]]:
        """What may well be wrong with a row that can be used: what to say of all such rows, and where it is."""
        eaten = eaten_in(self.prompt, keys.prompt) + eaten_in(self.answer, keys.answer, is_answer=True)
        if found := [*eaten, *eaten_in(self.meta)][:3]:
            yield EATEN, "; ".join(found)
        if keys.answer_required is not False and _NO_ANSWER.fullmatch(self.answer or ""):
            yield NO_ANSWER, f"{keys.answer} is {self.answer!r}"

    @property
    def text(self) -> str:
        """The prompt as text: of a single message its content, of several each with its role."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1:
            return self.prompt[0]["content"]
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)

    @property
    def messages(self) -> Messages:
        """Those of a prompt that is a chat; of a text none."""
        return () if isinstance(self.prompt, str) else self.prompt


@dataclass(frozen=True, slots=True)
class Keys:
    """Which keys of a row hold what, and whether a row without an answer is a fault (None: not known, so it is none).

    A key with dots, such as ``reward_model.ground_truth``, leads into mappings, unless a row has it as it is written.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    answer_required: bool | None = True


class BadRow(Exception):
    """A row cannot be used. The message is the reason, without the place."""


def listed(faults: Sequence[str]) -> str:
    """``faults``, each as ``place: reason``, by their reasons."""
    found: dict[str, list[str]] = {}
    for place, _, reason in (fault.partition(": ") for fault in faults):
        found.setdefault(reason, []).append(place)
    return "\n".join(by_reason({reason: (len(places), places) for reason, places in found.items()}, len(faults)))


def by_reason(found: Mapping[str, tuple[int, Sequence[str]]], faults: int) -> list[str]:
    """A line for each reason. ``found``: how many faults have it, and the first places. ``faults``: how many in all."""
    lines, shown = [], list(found.items())[:SHOWN_FAULTS]
    for reason, (count, (first, *others)) in shown:
        also = ", ".join(others[: SHOWN_PLACES - 1]) + ", ..." * (count > SHOWN_PLACES)
        lines.append(f"{first}: {reason}" + f" ({count - 1:,} more with this: {also})" * (count > 1))
    if rest := faults - sum(count for _, (count, _) in shown):
        lines.append(f"... and {rest:,} more; {faults:,} errors in all")
    return lines


class _Number(str):
    """A JSON number, as it is written. Kept as text, so that 0.10 and 12345678901234567890 stay what they are."""

    __slots__ = ()


def parse_json(data: bytes) -> Any:
    """The value that ``data`` holds. Raises BadRow: it is not JSON in UTF-8."""
    try:
        return json.loads(data.decode("utf-8"), parse_int=_Number, parse_float=_Number, parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 text (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        cut = error.pos >= len(data.decode("utf-8").rstrip()) or error.msg.startswith("Unterminated")
        hint = "; the line seems to be cut off" if cut else ""
        raise BadRow(f"not valid JSON: {error.msg} (column {error.colno}){hint}") from None
    except RecursionError:
        raise BadRow("not valid JSON: nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise BadRow(f"{constant} is not valid JSON; leave the key out or use null")


def check_row(row: Any, keys: Keys, place: str) -> Row:
    """A raw row as a :class:`Row`. Raises BadRow: a key is missing, or holds what it must not."""
    if not isinstance(row, Mapping):
        raise BadRow(f"expected an object such as {{{json.dumps(keys.prompt)}: ...}}, got {_kind(row)}")
    prompt = text_or_messages(row, keys.prompt)
    answer = _answer(row, keys)
    meta = {str(key): plain_value(value) for key, value in row.items() if key not in (keys.prompt, keys.answer)}
    return Row(prompt, answer, meta, place)


def look_up(row: Mapping[Any, Any], key: str) -> tuple[bool, Any]:
    """Whether a row has a key, which with dots leads into mappings, and what it holds."""
    if key in row:
        return True, row[key]
    found: Any = row
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return False, None
        found = found[part]
    return True, found


def text_or_messages(row: Mapping[Any, Any], key: str, setting: str = "data.prompt_key") -> str | Messages:
    """What a key holds: text or chat messages. ``setting``: that names it. Raises BadRow: it holds neither."""
    there, value = look_up(row, key)
    if not there:
        raise BadRow(f"no key {key!r} ({setting}); the keys are {_names(row)}")
    value = _from_array(value)
    if isinstance(value, str) and not isinstance(value, _Number):
        if not value.strip():
            raise BadRow(f"{key!r} is empty")
        return unicode_text(value, key)
    if not isinstance(value, list | tuple):
        raise BadRow(f"{key!r} must be text or a list of chat messages, got {_kind(value)}")
    if not value:
        raise BadRow(f"{key!r} is an empty list of messages")
    return tuple(_message(message, f"{key}[{k}]") for k, message in enumerate(value))


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise BadRow(f"{where} must be a message with role and content, got {_kind(message)}")
    for key in ("role", "content"):
        value = message.get(key)
        if not isinstance(value, str) or isinstance(value, _Number):
            raise BadRow(f"{where}: {key!r} must be text, got {_kind(value) if key in message else 'nothing'}")
    if not message["role"].strip():
        raise BadRow(f"{where}: 'role' is empty")
    return {"role": unicode_text(message["role"], where), "content": unicode_text(message["content"], where)}


def unicode_text(text: str, where: str) -> str:
    """JSON can hold halves of surrogate pairs, which are no characters and which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(f"{where!r} holds half a surrogate pair (character {error.start})") from None
    return text


def _answer(row: Mapping[Any, Any], keys: Keys) -> str | None:
    key = keys.answer
    there, value = look_up(row, key)
    if not there and key == "answer":
        there, value = look_up(row, VERL_ANSWER)
    value = _from_array(value)
    missing = value is None or (isinstance(value, float | Decimal) and math.isnan(value))
    if missing and not keys.answer_required:
        return None
    if missing and not there:
        raise BadRow(f"no key {key!r} (data.answer_key); the keys are {_names(row)}")
    if missing:
        said = "null" if value is None else "nan, not a finite number"
        raise BadRow(f"{key!r} is {said}, but this reward compares with it")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise BadRow(f"{key!r} must be text or a number, got {_kind(value)}")
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        raise BadRow(f"{key!r} is {value}, not a finite number")
    answer = unicode_text(_text_of(value, key), key)
    if keys.answer_required and not answer.strip():
        raise BadRow(f"{key!r} is empty")
    return answer


def _text_of(value: str | int | float | Decimal, key: str) -> str:
    """Of a typed number the shortest one: a column of integers in which one is missing holds floats, and 2.0 is 2."""
    if isinstance(value, Decimal) or (isinstance(value, float) and (abs(value) < _PLAIN_BELOW and value.is_integer())):
        digits = f"{Decimal(repr(value)) if isinstance(value, float) else value:f}"
        value = (digits.rstrip("0").rstrip(".") if "." in digits else digits).removeprefix("-" if not value else "")
    try:
        return str(value)
    except ValueError:
        raise BadRow(f"{key!r} is a number of more digits than Python writes") from None


def _names(row: Mapping[Any, Any]) -> str:
    shown = [key if isinstance(key, str) and key.isprintable() else repr(key) for key in row]
    return shortened(", ".join(shown) or "none", 200, " ...")


def _from_array(value: Any) -> Any:
    """Numbers and arrays of numpy (a data frame's rows hold them) in Python's own types; a short float as it prints."""
    if type(value).__name__ in ("float16", "float32"):
        return float(str(value))
    return value.tolist() if hasattr(value, "tolist") else value


def plain_value(value: Any) -> Any:
    """A value for ``meta``, in the types of JSON: what is not a number is null, dates and the like become text.
    Raises BadRow: it is nested too deeply."""
    try:
        return _plain(value)
    except RecursionError:
        raise BadRow("nested too deeply") from None


def _plain(value: Any) -> Any:
    value = _from_array(value)
    if isinstance(value, _Number):
        return _number(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)


def _number(written: str) -> int | float | str:
    value = float(written)
    if not math.isfinite(value):  # it would end whatever computes with it
        return str(written)
    return int(written) if written.lstrip("-").isdigit() else value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {_Number: "a number", str: "text", bool: "true or false", int: "a number", float: "a number"}
    names |= {list: "a list", tuple: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


class Table:
    """The rows of one file, one data set of the hub, or one list from Python. Numbers count from 0.
    ``name``: as the user wrote it. ``content``: a hash of all that the table holds."""

    def __init__(self, name: str, rows: int, content: str = "") -> None:
        self.name, self._size, self._content = name, rows, content

    def __len__(self) -> int:
        return self._size

    def raw(self, number: int) -> Any:
        """A row as it stands there. Raises BadRow: it cannot be read."""
        raise NotImplementedError

    def all_raw(self) -> Iterator[Any]:
        """All rows as :meth:`raw` gives them, None in place of one that cannot be read."""
        for number in range(len(self)):
            try:
                yield self.raw(number)
            except BadRow:
                yield None

    def place(self, number: int) -> str:
        """Where a row stands, for people: ``file:line``, or ``file:row 3`` where there are no lines."""
        return f"{self.name}:row {number + 1}"

    def content(self) -> str:
        return self._content


class PythonRows(Table):
    def __init__(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        super().__init__(name, len(rows))
        self._rows = rows

    def raw(self, number: int) -> Any:
        return self._rows[number]

    def place(self, number: int) -> str:
        return f"{self.name}[{number}]"

    def content(self) -> str:
        if not self._content:
            found = sha256()
            for row in self._rows:
                line = json.dumps(plain_value(row), sort_keys=True) + "\n"
                found.update(line.encode("utf-8", "backslashreplace"))
            self._content = found.hexdigest()
        return self._content
