"""Reading JSONL: one object a line, checked as a whole before anything else is loaded.

Consumes files (plain or gzip) or rows from Python; produces :class:`Row` records, or one
:class:`~dapo.errors.DataError` that names every fault as ``file:line: reason``.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dapo.errors import DataError

_SHOWN_ERRORS = 20

Messages = tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it stands in the data. ``prompt`` is text or chat messages; ``place`` says where it came from."""

    prompt: str | Messages
    answer: str | None
    meta: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""

    @property
    def text(self) -> str:
        """The prompt as text: of a single message its content, of several each with its role."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1:
            return self.prompt[0]["content"]
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)


@dataclass(frozen=True, slots=True)
class Keys:
    """Which keys of a row hold what, and whether a row without an answer is a fault."""

    prompt: str = "prompt"
    answer: str = "answer"
    answer_required: bool = True


class _Number(str):
    """A JSON number, as it is written. Kept as text, so that 0.10 and 12345678901234567890 stay what they are."""

    __slots__ = ()


class _BadRow(Exception):
    pass


def read_rows(files: Sequence[str | Path], keys: Keys) -> list[Row]:
    """All rows of ``files``, in order. Empty lines are skipped; a byte order mark is accepted.

    Raises:
        DataError: with the faults of all files.
    """
    if not files:
        raise DataError("no data files are given")
    rows: list[Row] = []
    errors: list[str] = []
    for file in files:
        found, faults = _read_file(Path(file), keys)
        rows += found
        errors += faults
        if not found and not faults:
            errors.append(f"{file}: the file has no rows")
    if errors:
        _fail(errors)
    return rows


def rows_from_python(rows: Sequence[Mapping[str, Any]], keys: Keys, name: str = "prompts") -> list[Row]:
    """The same checks for rows from Python, named ``prompts[3]``.

    Raises:
        DataError: with all faults.
    """
    checked: list[Row] = []
    errors: list[str] = []
    for k, row in enumerate(rows):
        try:
            checked.append(_check(row, keys, f"{name}[{k}]"))
        except _BadRow as fault:
            errors.append(f"{name}[{k}]: {fault}")
    if not rows:
        errors.append(f"{name}: no rows")
    if errors:
        _fail(errors)
    return checked


def _fail(errors: Sequence[str]) -> NoReturn:
    shown = list(errors[:_SHOWN_ERRORS])
    if len(errors) > len(shown):
        shown.append(f"... and {len(errors) - len(shown)} more; {len(errors)} errors in all")
    raise DataError("\n".join(shown))


def _read_file(file: Path, keys: Keys) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    errors: list[str] = []
    try:
        for number, line in _lines(file):
            place = f"{file}:{number}"
            try:
                rows.append(_check(_parse(line), keys, place))
            except _BadRow as fault:
                errors.append(f"{place}: {fault}")
            except RecursionError:
                errors.append(f"{place}: nested too deeply")
    except IsADirectoryError:
        errors.append(f"{file}: is a folder, not a file")
    except FileNotFoundError:
        errors.append(f"{file}: no such file")
    except (OSError, EOFError, zlib.error) as error:  # unreadable, or a damaged gzip file
        errors.append(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}")
    return rows, errors


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers from 1. As bytes: one bad line must not hide the others."""
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield number, line


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"), parse_int=_Number, parse_float=_Number, parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise _BadRow(f"not UTF-8 text (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        cut = error.pos >= len(line.decode("utf-8").rstrip()) or error.msg.startswith("Unterminated")
        hint = "; the line seems to be cut off" if cut else ""
        raise _BadRow(f"not valid JSON: {error.msg} (column {error.colno}){hint}") from None
    except RecursionError:
        raise _BadRow("not valid JSON: nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise _BadRow(f"{constant} is not valid JSON; leave the key out or use null")


# --- one row ------------------------------------------------------------------------------------------------------


def _check(row: Any, keys: Keys, place: str) -> Row:
    if not isinstance(row, Mapping):
        raise _BadRow(f"expected an object such as {{{json.dumps(keys.prompt)}: ...}}, got {_kind(row)}")
    if keys.prompt not in row:
        present = ", ".join(str(key) for key in row) or "none"
        raise _BadRow(f"no key {keys.prompt!r} (data.prompt_key); the keys are {present}")
    prompt = _prompt(row[keys.prompt], keys.prompt)
    answer = _answer(row, keys)
    meta = {str(key): _value(value) for key, value in row.items() if key not in (keys.prompt, keys.answer)}
    return Row(prompt, answer, meta, place)


def _prompt(value: Any, key: str) -> str | Messages:
    if isinstance(value, str) and not isinstance(value, _Number):
        if not value.strip():
            raise _BadRow(f"{key!r} is empty")
        return _unicode(value, key)
    if not isinstance(value, list | tuple):
        raise _BadRow(f"{key!r} must be text or a list of chat messages, got {_kind(value)}")
    if not value:
        raise _BadRow(f"{key!r} is an empty list of messages")
    return tuple(_message(message, f"{key}[{k}]") for k, message in enumerate(value))


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise _BadRow(f"{where} must be a message with role and content, got {_kind(message)}")
    for key in ("role", "content"):
        value = message.get(key)
        if not isinstance(value, str) or isinstance(value, _Number):
            raise _BadRow(f"{where}: {key!r} must be text, got {_kind(value) if key in message else 'nothing'}")
    if not message["role"].strip():
        raise _BadRow(f"{where}: 'role' is empty")
    return {"role": message["role"], "content": _unicode(message["content"], where)}


def _unicode(text: str, where: str) -> str:
    """JSON can hold halves of surrogate pairs, which are no characters and which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadRow(f"{where!r} holds half a surrogate pair (character {error.start})") from None
    return text


def _answer(row: Mapping[Any, Any], keys: Keys) -> str | None:
    value = row.get(keys.answer)
    if value is None:
        if not keys.answer_required:
            return None
        if keys.answer in row:
            raise _BadRow(f"{keys.answer!r} is null, but this reward compares with it")
        raise _BadRow(f"no key {keys.answer!r} (data.answer_key); the keys are {', '.join(str(key) for key in row)}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _BadRow(f"{keys.answer!r} must be text or a number, got {_kind(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise _BadRow(f"{keys.answer!r} is {value}, not a finite number")
    answer = _unicode(str(value), keys.answer)
    if keys.answer_required and not answer.strip():
        raise _BadRow(f"{keys.answer!r} is empty")
    return answer


def _value(value: Any) -> Any:
    """A value for ``meta``: numbers that were kept as they are written become numbers."""
    if isinstance(value, _Number):
        try:
            return int(value)
        except ValueError:
            return float(value)
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    return value


def _kind(value: Any) -> str:
    """What came, for a person who knows JSON."""
    if value is None:
        return "null"
    names = {_Number: "a number", str: "text", bool: "true or false", int: "a number", float: "a number"}
    names |= {list: "a list", tuple: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
