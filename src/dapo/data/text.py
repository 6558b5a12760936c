"""JSON lines and JSON arrays, plain or compressed, row by row without holding them.

An index of where each row begins is made in one pass. Small files stay in memory; of
others the index, and what was compressed, is kept in the cache. Reading a row is two short reads."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dapo.data.cache import cached, file_key, write_with_room
from dapo.data.rows import BadRow, Table, parse_json
from dapo.errors import DataError, install
from dapo.util.files import file_hash

_VERSION = 1
"""Of what is kept in the cache."""
_SMALL = 8 * 2**20
"""Bytes up to which a file stays in memory."""
_SMALL_COMPRESSED = 2**20
_CHUNK = 8 * 2**20
_LOOKED_AT = 2**20
"""Bytes from the first row on that are searched for the end of one that is printed over several lines."""
_ENTRY = 16
"""Bytes of the index per row: the offset of its first byte, and its line (of an array: the offset of its end)."""
_BOM = b"\xef\xbb\xbf"
_BLANK = re.compile(r"[ \t\n\r]*")
_INDEX, _CONTENT = "index.bin", "content"


class TextTable(Table):
    def __init__(self, name: str, content: _Bytes, index: _Bytes, facts: dict[str, Any]) -> None:
        """``index``: 16 bytes for each row. ``facts``: ``rows``, ``sha256`` and ``array``."""
        super().__init__(name, int(facts["rows"]), str(facts["sha256"]))
        self._bytes, self._index, self._array = content, index, bool(facts["array"])

    def raw(self, number: int) -> Any:
        start, other = self._entry(number)
        try:
            data = self._bytes.read(start, other - start) if self._array else self._bytes.line(start)
        except OSError as error:
            raise DataError(f"{self.place(number)}: cannot be read: {error.strerror or error}") from None
        except _Unreadable as error:
            raise DataError(f"{self.name}:{error}") from None
        try:
            return parse_json(data.removeprefix(_BOM) if start == 0 else data)
        except BadRow as fault:
            if (kind := self._over_several_lines(start)) is None:
                raise
            raise BadRow(f"this looks like one JSON {kind} over several lines ({fault})") from None

    def place(self, number: int) -> str:
        return super().place(number) if self._array else f"{self.name}:{self._entry(number)[1]}"

    def require_a_row_per_line(self) -> None:
        """Raises DataError if the first row goes on in the lines after it."""
        if kind := self._over_several_lines(self._entry(0)[0]):
            raise DataError(
                f"{self.place(0)}: this looks like one JSON {kind} over several lines; JSON lines need one object per "
                "line (a JSON array, [{...}, {...}], may have more, in a file named .json)"
            )

    def _over_several_lines(self, start: int) -> str | None:
        """What begins there and goes on in the next lines, an object or an array; None: nothing of the kind."""
        text = self._bytes.read(start, _LOOKED_AT).decode("utf-8", errors="replace").lstrip("\ufeff \t\r")
        first, kind = text.partition("\n")[0].rstrip(), {"{": "object", "[": "array"}.get(text[:1])
        if self._array or kind is None:
            return None
        try:  # of an array, which may be longer than what is looked at, the first item
            row, end = json.JSONDecoder().raw_decode(text, 0 if kind == "object" else _skip(text, 1))
        except (ValueError, RecursionError):
            return None
        several = isinstance(row, dict) and ("\n" in text[:end] or (kind == "array" and first.endswith(",")))
        return kind if several else None

    def _entry(self, number: int) -> tuple[int, int]:
        entry = self._index.read(number * _ENTRY, _ENTRY)
        return int.from_bytes(entry[:8], "little"), int.from_bytes(entry[8:], "little")


def open_text(path: Path, name: str) -> TextTable:
    """Index a file, or find its index in the cache. Raises DataError: it cannot be read, is no JSON array though it
    begins like one, begins with an object or array that is printed over several lines, or has no rows."""
    try:
        table = _open(path, name)
    except FileNotFoundError:
        raise DataError(f"{name}: no such file") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from None
    except _Unreadable as error:
        raise DataError(f"{name}:{error}") from None
    if not len(table):
        raise DataError(f"{name}: the file has no rows")
    table.require_a_row_per_line()
    return table


def _open(path: Path, name: str) -> TextTable:
    compressed = path.suffix in _OPENERS
    if path.stat().st_size > (_SMALL_COMPRESSED if compressed else _SMALL):
        return _from_cache(path, name, compressed)
    data = bytearray()
    for chunk in _chunks_of(path):
        data += chunk
        if len(data) > 8 * _SMALL:  # it only looked small
            return _from_cache(path, name, compressed)
    content = _Bytes(bytes(data))
    array = _is_array(path, content)
    index = b"".join(_index(content, array))
    digest = file_hash(path) if compressed else hashlib.sha256(data).hexdigest()
    return TextTable(name, content, _Bytes(index), _facts(len(index), digest, array))


def _from_cache(path: Path, name: str, compressed: bool) -> TextTable:
    original = _Bytes(path)

    def build(folder: Path) -> dict[str, Any]:
        content = original
        if compressed:
            write_with_room(folder / _CONTENT, _chunks_of(path))
            content = _Bytes(folder / _CONTENT)
        array = _is_array(path, content)
        write_with_room(folder / _INDEX, _index(content, array))
        digest = file_hash(path)
        original.check()
        return _facts((folder / _INDEX).stat().st_size, digest, array)

    try:
        folder, facts = cached("rows", file_key(path, _VERSION), build)
    except OSError as error:
        raise DataError(
            f"{name}: no room to keep its index{' and its decompressed text' if compressed else ''}: "
            f"{error.strerror or error}; set DAPO_CACHE to a folder with more room"
        ) from None
    content = _Bytes(folder / _CONTENT) if compressed else original
    return TextTable(name, content, _Bytes(folder / _INDEX), facts)


def _facts(index_bytes: int, sha256: str, array: bool) -> dict[str, Any]:
    return {"rows": index_bytes // _ENTRY, "sha256": sha256, "array": array}


# --- bytes, wherever they are -------------------------------------------------------------------------------------


class _Unreadable(Exception):
    """Why, as it stands behind the name of the file and a colon."""


class _Bytes:
    """Of a file on the disk, which must not change meanwhile, or in memory."""

    def __init__(self, source: Path | bytes) -> None:
        self._file: BinaryIO = BytesIO(source) if isinstance(source, bytes) else source.open("rb")
        self._stat = self._now()

    def read(self, offset: int, size: int) -> bytes:
        self.check()
        self._file.seek(offset)
        return self._file.read(size)

    def line(self, offset: int) -> bytes:
        self.check()
        self._file.seek(offset)
        return self._file.readline()

    def chunks(self) -> Iterator[bytes]:
        self._file.seek(0)
        yield from _plain_chunks(self._file)

    def check(self) -> None:
        """Raises _Unreadable: it was written to."""
        if self._now() != self._stat:
            raise _Unreadable(" the file was changed while it was in use; start again")

    def _now(self) -> tuple[int, int] | None:
        if isinstance(self._file, BytesIO):
            return None
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


def _chunks_of(path: Path) -> Iterator[bytes]:
    """The content, decompressed. Raises _Unreadable: it is not what its name says, or not whole; DataError: a package
    is missing."""
    with path.open("rb") as file:
        try:
            yield from _OPENERS.get(path.suffix, _plain_chunks)(file)
        except (OSError, EOFError, zlib.error) as error:
            raise _Unreadable(f" cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _plain_chunks(source: Any) -> Iterator[bytes]:
    while chunk := source.read(_CHUNK):
        yield chunk


def _zstd_chunks(source: Any) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise DataError(f"files that end in .zst need the package zstandard: {install('data')}") from None
    frame: Any = None
    try:
        while chunk := source.read(2**16):
            while chunk:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise OSError(f"not a whole Zstandard file ({error})") from None
    if frame is not None:
        raise EOFError("the compressed file is cut off")


_OPENERS = {".gz": lambda source: _plain_chunks(gzip.GzipFile(fileobj=source, mode="rb")), ".zst": _zstd_chunks}


# --- where rows begin ---------------------------------------------------------------------------------------------


def _index(content: _Bytes, array: bool) -> Iterator[bytes]:
    return _index_array(b"".join(content.chunks())) if array else _index_lines(content.chunks())


def _index_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    offset, number = 0, 1
    pieces: list[bytes] = []
    for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        pieces.append(chunk[:cut] if cut else chunk)
        if not cut:
            continue
        block = b"".join(pieces)
        found, lines = _rows_in(block, offset, number)
        yield found
        offset, number, pieces = offset + len(block), number + lines, [chunk[cut:]]
    if block := b"".join(pieces):
        yield _rows_in(block, offset, number)[0]


def _rows_in(block: bytes, offset: int, number: int) -> tuple[bytes, int]:
    data = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    starts = np.concatenate([[0], ends + 1]).astype(np.int64)
    if starts[-1] == len(block):
        starts = starts[:-1]
    blank = [k for k in np.flatnonzero(data[starts] <= ord(" ")).tolist() if not _line(block, starts, k).strip()]
    if offset == 0 and not _line(block, starts, 0).removeprefix(_BOM).strip():
        blank.append(0)
    entries = np.stack([starts + offset, np.arange(number, number + len(starts))], axis=1).astype("<u8")
    return np.delete(entries, blank, axis=0).tobytes(), len(starts)


def _line(block: bytes, starts: Any, k: int) -> bytes:
    return block[starts[k] : starts[k + 1] if k + 1 < len(starts) else None]


def _is_array(path: Path, content: _Bytes) -> bool:
    """Only files named .json can be arrays: in .jsonl a line that begins with a bracket is a row that is wrong."""
    inner = path.with_suffix("") if path.suffix in _OPENERS else path
    return inner.suffix == ".json" and content.read(0, 4096).removeprefix(_BOM).lstrip()[:1] == b"["


def _index_array(data: bytes) -> Iterator[bytes]:
    """Offset of beginning and end of every item of an array.

    Read as Latin-1, in which every byte is one character: all that structures JSON is ASCII, and is found where it is.
    """
    text = data.decode("latin-1")
    scan = json.JSONDecoder().raw_decode
    place = _skip(text, _skip(text, 3 if data.startswith(_BOM) else 0) + 1)
    entries: list[tuple[int, int]] = []
    mark = text[place : place + 1]
    while mark != "]":
        try:
            _, end = scan(text, place)
        except (ValueError, RecursionError) as error:
            at, reason = getattr(error, "pos", place), getattr(error, "msg", "nested too deeply")
            raise _broken(text, at, f"{reason} (in row {len(entries) + 1})") from None
        entries.append((place, end))
        place = _skip(text, end)
        mark = text[place : place + 1]
        if mark == ",":
            place = _skip(text, place + 1)
        elif mark != "]":
            raise _broken(text, place, f"a comma or ] is missing after row {len(entries)}")
    if text[place + 1 :].strip(" \t\r\n"):
        raise _broken(text, place + 1, "something stands behind the end of the list")
    yield np.array(entries, dtype="<u8").tobytes()


def _broken(text: str, place: int, reason: str) -> _Unreadable:
    cut = "; the file seems to be cut off" if place >= len(text.rstrip()) or reason.startswith("Unterminated") else ""
    return _Unreadable(f"{text.count(chr(10), 0, place) + 1}: not valid JSON: {reason}{cut}")


def _skip(text: str, place: int) -> int:
    found = _BLANK.match(text, place)
    return found.end() if found else place
