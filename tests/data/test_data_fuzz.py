"""A hundred accidents to data files, nightly two thousand: what is bad is named with file and line, what is still good
is read, and nothing but a DataError comes out."""

from __future__ import annotations

import gzip
import json
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_cases import read, source

from dapo.data.rows import Row
from dapo.errors import DataError

COUNTS = [100, pytest.param(2000, marks=pytest.mark.nightly)]
"""Accidents in all, over all kinds of them."""

GOOD: list[dict[str, Any]] = [
    {"prompt": "2+2=", "answer": 4},
    {"prompt": "3*3=", "answer": "9", "level": 2, "source": {"name": "a", "page": 3}},
    {"prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": "5-1="}], "answer": "4"},
    {"prompt": 'Größe? π ≈ 3.14 \u2028 {"}', "answer": "0.10"},
    {"prompt": "a\nb\tc\\d", "answer": -3, "tests": "[]", "tags": [1.5, None, True]},
    {"prompt": "x" * 90, "answer": "1e5"},
    {"prompt": [{"role": "user", "content": "7+1="}], "answer": 8, "extra": None},
    {"prompt": "1/2=", "answer": "\\frac{1}{2}"},
]

LINES = [json.dumps(row, ensure_ascii=False).encode() for row in GOOD]

Spoil = Callable[[dict[str, Any], random.Random], "dict[str, Any] | bytes"]
"""A bad row in place of a good one: an object, or the bytes of its line."""

Accident = Callable[[bytes, random.Random], bytes]
"""Other content in place of a file's."""


# --- what is bad --------------------------------------------------------------------------------------------------


def cut_off(row: dict[str, Any], rng: random.Random) -> bytes:
    line = json.dumps(row).encode()
    return line[: rng.randrange(1, len(line))]


def without_a_key(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    gone = rng.choice(["prompt", "answer"])
    return {key: value for key, value in row.items() if key != gone}


def misspelt_key(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    name = rng.choice(["prompt", "answer"])
    other = rng.choice([name.upper(), name + "s", name[:-1], f" {name}", name + "\u200b", ""])
    return {other if key == name else key: value for key, value in row.items()}


def odd_prompt(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    message = {"role": "user", "content": "x"}
    odd: list[Any] = [None, 3, 1.5, True, "", "  \n", [], {}, [[]], [None], ["x"], [message, 3], {"user": "x"}]
    odd += [[{"role": "user"}], [{"content": "x"}], [message | {"role": None}], [message | {"content": [message]}]]
    odd += [[message | {"role": " "}], "\ud800", [message | {"content": "a\udc00b"}], [message | {"content": 3}]]
    return row | {"prompt": rng.choice(odd)}


def odd_answer(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    return row | {"answer": rng.choice([None, True, [], ["4"], {}, {"value": 4}, "", " \t", "\udfff"])}


def no_number(row: dict[str, Any], rng: random.Random) -> bytes:
    text = json.dumps(row | {"answer": "HERE"})
    return text.replace(
        '"HERE"', rng.choice(["NaN", "Infinity", "-Infinity", "nan", "01", "+1", "1.", ".5", "0x1"])
    ).encode()


def no_object(row: dict[str, Any], rng: random.Random) -> bytes:
    return rng.choice(
        ["3", "null", '"text"', "[]", "[1, 2]", "true", "{}", "text", "<html>", "---", "{", "]", "\\"]
    ).encode()


def not_utf8(row: dict[str, Any], rng: random.Random) -> bytes:
    line = json.dumps(row).encode()
    at = rng.randrange(len(line))
    return line[:at] + rng.choice([b"\xff", b"\xc3(", b"\xe4", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"]) + line[at:]


def two_on_a_line(row: dict[str, Any], rng: random.Random) -> bytes:
    return json.dumps(row).encode() + rng.choice([b"", b",", b" ", b"\0"]) + json.dumps(row).encode()


def too_deep(row: dict[str, Any], rng: random.Random) -> bytes:
    depth = rng.choice([2000, 20_000, 200_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
    return f'{{"prompt": {opening * depth}1{closing * depth}, "answer": 1}}'.encode()


BAD: list[Spoil] = [
    *(cut_off, without_a_key, misspelt_key, odd_prompt, odd_answer, no_number, no_object, not_utf8, two_on_a_line),
    too_deep,
]

# --- what is still good -------------------------------------------------------------------------------------------


def blank_lines(content: bytes, rng: random.Random) -> bytes:
    lines = content.split(b"\n")
    for _ in range(rng.randint(1, 5)):
        lines.insert(rng.randint(0, len(lines)), rng.choice([b"", b"  ", b"\t", b"\r"]))
    return b"\n".join(lines)


def other_line_ends(content: bytes, rng: random.Random) -> bytes:
    return content.replace(b"\n", b"\r\n") + rng.choice([b"", b"\n", b"\r\n", b"\n\n"])


def byte_order_mark(content: bytes, rng: random.Random) -> bytes:
    return b"\xef\xbb\xbf" + content


def other_spelling(content: bytes, rng: random.Random) -> bytes:
    def again(line: bytes) -> bytes:
        row = list(json.loads(line).items())
        rng.shuffle(row)
        style = {"ensure_ascii": rng.random() < 0.5, "separators": rng.choice([(",", ":"), (" ,  ", " :\t")])}
        return rng.choice([b"", b"  "]) + json.dumps(dict(row), **style).encode() + rng.choice([b"", b" "])

    return b"\n".join(map(again, content.split(b"\n")))


def more_keys(content: bytes, rng: random.Random) -> bytes:
    odd = ["null", "1e999", "-0.0", "123456789012345678901234567890", '"\\u2028"', "[[[]]]", "{}", '"x"']

    def with_one(line: bytes) -> bytes:
        return line[:-1] + f', "{rng.choice(["id", "π", "a b", "prompt ", "Answer"])}": {rng.choice(odd)}}}'.encode()

    return b"\n".join(map(with_one, content.split(b"\n")))


def as_an_array(content: bytes, rng: random.Random) -> bytes:
    gap = rng.choice([b",", b",\n", b" ,\n\n  "])
    return (
        rng.choice([b"[", b"\n [\n", b"\xef\xbb\xbf["]) + gap.join(content.split(b"\n")) + rng.choice([b"]", b"\n]\n"])
    )


STILL_GOOD: list[Accident] = [blank_lines, other_line_ends, byte_order_mark, other_spelling, more_keys, as_an_array]

# --- what may be either -------------------------------------------------------------------------------------------


def other_bytes(content: bytes, rng: random.Random) -> bytes:
    raw = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] = rng.choice([rng.randrange(256), *b'"{}[]\\,:\n\0'])
    return bytes(raw)


def bytes_gone(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    return content[:start] + content[start + rng.randint(1, 40) :]


def bytes_twice(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    return content[: start + rng.randint(1, 60)] + content[start:]


def only_the_beginning(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def lines_in_another_order(content: bytes, rng: random.Random) -> bytes:
    lines = content.split(rng.choice([b"\n", b","]))
    rng.shuffle(lines)
    return b"\n".join(lines)


EITHER: list[Accident] = [other_bytes, bytes_gone, bytes_twice, only_the_beginning, lines_in_another_order]

ALL = len(BAD) + len(STILL_GOOD) + 4 * len(EITHER)  # the last ones in four kinds of files


def share(kind: Callable[..., Any], in_all: int) -> list[random.Random]:
    """Of so many accidents those of one kind, each with its own random numbers."""
    return [random.Random(f"{kind.__name__} {n}") for n in range(-(-in_all // ALL))]


def shown(row: Row) -> tuple[Any, Any]:
    return row.prompt, row.answer


def file_of(folder: Path, content: bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("in_all", COUNTS)
@pytest.mark.parametrize("spoil", BAD, ids=lambda kind: kind.__name__)
def test_a_bad_row_is_refused_with_file_and_line(spoil: Spoil, in_all: int, tmp_path: Path) -> None:
    for rng in share(spoil, in_all):
        lines, numbers = list(LINES), rng.sample(range(len(GOOD)), rng.randint(1, 3))
        for number in numbers:
            row = spoil(GOOD[number], rng)
            lines[number] = row if isinstance(row, bytes) else json.dumps(row).encode()
        path = file_of(tmp_path, b"\n".join(lines))
        wanted = [number + 1 for number in sorted(numbers)]
        for reading in (read, source):
            with pytest.raises(DataError) as caught:
                reading(path)
            assert all(line.startswith(f"{path}:") or "on_bad_row" in line for line in str(caught.value).splitlines())
            assert sorted(map(int, re.findall(rf"{re.escape(str(path))}:(\d+)", str(caught.value)))) == wanted


@pytest.mark.parametrize("in_all", COUNTS)
@pytest.mark.parametrize("accident", STILL_GOOD, ids=lambda kind: kind.__name__)
def test_what_is_still_good_is_read(accident: Accident, in_all: int, tmp_path: Path) -> None:
    wanted = [shown(row) for row in read(file_of(tmp_path, b"\n".join(LINES), "good.jsonl"))]
    for rng in share(accident, in_all):
        content = accident(b"\n".join(LINES), rng)
        packed, name = rng.random() < 0.3, "rows.json" if accident is as_an_array else "rows.jsonl"
        path = file_of(tmp_path, gzip.compress(content) if packed else content, name + ".gz" * packed)
        assert [shown(row) for row in read(path)] == wanted, content
        assert source(path).report.usable == len(GOOD)


def kinds(folder: Path) -> dict[str, bytes]:
    """The good rows in each kind of file, by its name."""
    pytest.importorskip("datasets")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    simple = [{"prompt": str(row["prompt"]), "answer": str(row["answer"])} for row in GOOD]
    parquet.write_table(pyarrow.Table.from_pylist(simple), folder / "made.parquet")
    lines = b"\n".join(LINES)
    array = b"[" + b",\n".join(LINES) + b"]"
    return {
        "rows.jsonl": lines,
        "rows.json": array,
        "rows.jsonl.gz": gzip.compress(lines),
        "rows.parquet": (folder / "made.parquet").read_bytes(),
    }


@pytest.mark.parametrize("in_all", COUNTS)
@pytest.mark.parametrize("accident", EITHER, ids=lambda kind: kind.__name__)
def test_any_accident_is_read_or_refused_with_its_place(accident: Accident, in_all: int, tmp_path: Path) -> None:
    refused = 0
    for name, content in kinds(tmp_path).items():
        for rng in share(accident, in_all):
            path = file_of(tmp_path, accident(content, rng), name)
            for reading in (read, source):
                try:
                    reading(path)
                except DataError as error:
                    assert_says_where(error, path)
                    refused += 1
                else:
                    assert not certainly_bad(path), path.read_bytes()
    assert refused


def certainly_bad(path: Path) -> bool:
    """Whether something in the file is no JSON, as Python's own reader sees it."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if ".jsonl" in path.name:
            for line in filter(bytes.strip, content.split(b"\n")):
                json.loads(line.decode())
        elif path.suffix == ".json":
            json.loads(content.decode())
    except (OSError, EOFError, zlib.error, ValueError):
        return True
    return False


def assert_says_where(error: DataError, path: Path) -> None:
    """The file in the first line; in each other one a file and a row, or what is in all of them."""
    lines = str(error).splitlines()
    assert lines and str(path) in lines[0], error
    for line in lines:
        about_a_row = re.search(r":(\d+|row \d+): \S", line)
        about_the_file = re.search(r"no rows|cannot be read|none of the|longer than|\d+ errors in all|on_bad_row", line)
        assert about_a_row or about_the_file, error
