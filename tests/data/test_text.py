"""JSON lines and arrays, plain and compressed: the same rows whatever the file, with or without a cache."""

import gzip
import json
import os
import random
import shutil
import tempfile

import pytest
import zstandard
from data_cases import read, source, write

import dapo.data.text
from dapo.config.data import DataItem
from dapo.data.cache import cache_folder, cached
from dapo.data.parts import open_table
from dapo.data.rows import BadRow
from dapo.data.text import open_text
from dapo.errors import DataError

ROWS = [{"prompt": f"p{k}é", "answer": k + 0.5, "x": {"y": [k]}} for k in range(50)]
LINES = "\n".join(json.dumps(row, ensure_ascii=k % 2 == 0) for k, row in enumerate(ROWS)).encode()
ARRAY = json.dumps(ROWS, indent=1).encode()
CONTENTS = {
    "rows.jsonl": LINES,
    "lines.json": LINES + b"\n",
    "array.json": ARRAY,
    "bom.json": b"\xef\xbb\xbf \n" + ARRAY + b"\n",
    "rows.jsonl.gz": gzip.compress(LINES),
    "two.jsonl.gz": gzip.compress(LINES[:300]) + gzip.compress(LINES[300:]),
    "array.json.gz": gzip.compress(ARRAY),
    "rows.jsonl.zst": zstandard.compress(LINES),
    "two.jsonl.zst": zstandard.compress(LINES[:300])
    + zstandard.ZstdCompressor(write_checksum=True).compress(LINES[300:]),
    "array.json.zst": zstandard.compress(ARRAY),
}


@pytest.fixture(params=["memory", "cache"])
def kept(request, monkeypatch):
    """Both ways: as small files, and as large ones, whose index goes into the cache; in chunks that cut lines."""
    if request.param == "cache":
        monkeypatch.setattr(dapo.data.text, "_SMALL", -1)
        monkeypatch.setattr(dapo.data.text, "_SMALL_COMPRESSED", -1)
        monkeypatch.setattr(dapo.data.text, "_CHUNK", 37)
    return request.param


@pytest.mark.parametrize("name", CONTENTS)
def test_the_same_rows_from_every_format(tmp_path, kept, name):
    path = tmp_path / name
    path.write_bytes(CONTENTS[name])
    for _ in range(2):
        rows = read(path)
        assert [row.text for row in rows] == [row["prompt"] for row in ROWS]
        assert [row.answer for row in rows] == [str(row["answer"]) for row in ROWS]
        assert rows[7].meta == {"x": {"y": [7]}}
    array = "array" in name or "bom" in name
    assert rows[2].place == (f"{path}:row 3" if array else f"{path}:3")
    assert bool(list(cache_folder("rows").rglob("index.bin"))) == (kept == "cache")


def test_line_numbers_count_blank_lines(tmp_path, kept):
    path = write(tmp_path, "", '{"prompt": "a", "answer": 1}', "  \t", "", ' {"prompt": "b", "answer": 2}', "x", "")
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:6: ") and len(str(caught.value).splitlines()) == 1


BROKEN = {
    "array.json": [
        (b'[{"prompt": "a", "answer": 1},\n {"prompt": "b", "ans', ":2: not valid JSON", "cut off"),
        (b'[{"prompt": "a", "answer": 1}\n {"prompt": "b"}]', ":2: not valid JSON", "a comma or ] is missing"),
        (b'[{"prompt": "a", "answer": 1}] x', ":1: not valid JSON", "behind the end"),
        (b"[" + b"[" * 100_000, ":1: not valid JSON", "nested too deeply"),
        (b"[]", ": the file has no rows", ""),
        (b"[", ":1: not valid JSON", "cut off"),
    ],
    "rows.jsonl.gz": [
        (gzip.compress(LINES)[:-12], ": cannot be read", ""),
        (LINES, ": cannot be read", "gzip"),
        (b"", ": the file has no rows", ""),
    ],
    "rows.jsonl.zst": [
        (zstandard.compress(LINES)[:-12], ": cannot be read", "cut off"),
        (LINES, ": cannot be read", "Zstandard"),
        (b"", ": the file has no rows", ""),
    ],
}


@pytest.mark.parametrize(("name", "case"), [(name, k) for name, cases in BROKEN.items() for k in range(len(cases))])
def test_broken_files_are_named(tmp_path, kept, name, case):
    content, start, said = BROKEN[name][case]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}{start}") and said in str(caught.value)


OVER_LINES = {
    "an object": ('{\n  "prompt": "2+2=",\n  "answer": "4"\n}\n', 1, "object"),
    "several objects": ('\n{\n  "prompt": "2+2="\n}\n{\n  "prompt": "2+3="\n}\n', 2, "object"),
    "an object around a list": ('{"data": [\n  {"prompt": "2+2="}\n]}\n', 1, "object"),
    "an array": ('[\n  {\n    "prompt": "2+2="\n  }\n]\n', 1, "array"),
    "an array, a row a line": ('[{"prompt": "2+2="},\n {"prompt": "2+3="}]\n', 1, "array"),
}


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".jsonl.gz"])
@pytest.mark.parametrize("case", OVER_LINES)
def test_json_printed_over_several_lines_is_named_as_such(tmp_path, kept, case, ending):
    text, line, kind = OVER_LINES[case]
    file = tmp_path / f"rows{ending}"
    file.write_bytes(gzip.compress(text.encode()) if ending.endswith(".gz") else text.encode())
    if kind == "array" and ending == ".json":
        assert open_table(DataItem(path=str(file))).raw(0) == {"prompt": "2+2="}
        return
    with pytest.raises(DataError) as error:
        open_table(DataItem(path=str(file)))
    assert (
        f"{file}:{line}: this looks like one JSON {kind} over several lines; JSON lines need one object per line"
        in str(error.value)
    )


@pytest.mark.parametrize("first", ['{"prompt": "cut off, ', '{"prompt": "2+2="} {}', "[1,", '{"prompt": 1}', "["])
def test_a_first_row_that_is_wrong_by_itself_is_a_bad_row(tmp_path, first):
    file = tmp_path / "rows.jsonl"
    file.write_text(first + '\nnot JSON\n{"prompt": "2+3="}\n')
    table = open_table(DataItem(path=str(file)))
    assert len(table) == 3 and table.raw(2) == {"prompt": "2+3="}


def test_bad_rows_of_an_array_are_named_by_row(tmp_path, kept):
    path = tmp_path / "a.json"
    path.write_text('[{"prompt": "a", "answer": 1}, {"prompt": ""}, {"prompt": "c", "answer": NaN}]')
    with pytest.raises(DataError) as caught:
        read(path)
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{path}:row 2: ") and second.startswith(f"{path}:row 3: NaN")


# --- the cache ----------------------------------------------------------------------------------------------------


@pytest.fixture
def large(monkeypatch):
    monkeypatch.setattr(dapo.data.text, "_SMALL", -1)
    monkeypatch.setattr(dapo.data.text, "_SMALL_COMPRESSED", -1)


def built(monkeypatch):
    """Counts how often an index is built."""
    count = []
    build = dapo.data.text._index_lines
    monkeypatch.setattr(dapo.data.text, "_index_lines", lambda chunks: count.append(1) or build(chunks))
    return count


def test_the_index_is_built_once_for_each_content(tmp_path, large, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES)
    count = built(monkeypatch)
    first = source(path).fingerprint
    assert source(path).fingerprint == first and len(count) == 1
    path.write_bytes(LINES + b'\n{"prompt": "new", "answer": 1}')
    assert source(path).report.rows == 51 and len(count) == 2
    other = LINES.replace(b"p7", b"q7")  # of the same size, and given the same time of change
    stat = path.stat()
    path.unlink()
    path.write_bytes(other + b'\n{"prompt": "new", "answer": 1}')
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert source(path).prompts[7].text.startswith("q7") and len(count) == 3


@pytest.mark.parametrize("damage", ["empty", "flip", "meta", "missing", "facts"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_damaged_cache_is_made_again(tmp_path, large, damage, name):
    path = tmp_path / name
    path.write_bytes(CONTENTS[name])
    read(path)
    (entry,) = cache_folder("rows").iterdir()
    for file in entry.iterdir():
        if damage == "empty":
            file.write_bytes(b"")
        elif damage == "flip" and file.name != "meta.json":
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        elif damage == "meta" and file.name == "meta.json":
            file.write_text("[1, 2]")
        elif damage == "facts" and file.name == "meta.json":
            file.write_text('{"facts": 3, "files": {}}')
        elif damage == "missing" and file.name != "meta.json":
            file.unlink()
    assert [row.text for row in read(path)] == [row["prompt"] for row in ROWS]
    assert [row.text for row in read(path)] == [row["prompt"] for row in ROWS]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.zst"])
def test_a_cache_that_cannot_be_written_to_is_done_without(tmp_path, large, monkeypatch, name):
    path = tmp_path / name
    path.write_bytes(CONTENTS[name])
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DAPO_CACHE", str(blocked / "cache"))
    assert len(read(path)) == 50


def test_a_full_disk_is_said_with_what_to_do(tmp_path, large, monkeypatch):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(CONTENTS["rows.jsonl.gz"])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=2**20))
    with pytest.raises(
        DataError, match=r"rows.jsonl.gz: no room .*decompressed text: less than 256 MiB.* set DAPO_CACHE"
    ):
        read(path)
    assert not [p for p in cache_folder("rows").rglob("*") if p.is_file()]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DAPO_CACHE", "~/mine")
    assert cache_folder("rows") == tmp_path / "home/mine/rows"
    monkeypatch.delenv("DAPO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("rows") == tmp_path / "xdg/dapo/rows"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder("rows") == tmp_path / "home/.cache/dapo/rows"


@pytest.mark.parametrize("home", ["a-file", "nowhere", "~"])
def test_without_a_home_a_temporary_folder_is_the_cache(monkeypatch, tmp_path, home):
    (tmp_path / "a-file").write_text("")
    for name in ("DAPO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", {"nowhere": "/proc/nowhere", "~": "~"}.get(home, str(tmp_path / home)))
    folder = cache_folder("rows")
    assert folder.is_dir() and folder.is_relative_to(tempfile.gettempdir()) and folder.name == "rows"
    assert cached("rows", "key", lambda _: {"made": 1})[1] == {"made": 1}
    assert cached("rows", "key", lambda _: {"made": 2})[1] == {"made": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


def test_a_file_that_changes_in_use_is_noticed(tmp_path, large):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES)
    prompts = source(path)
    with path.open("ab") as file:
        file.write(b"\n{}")
    with pytest.raises(DataError, match="was changed while it was in use"):
        prompts.next()


# --- anything at all ----------------------------------------------------------------------------------------------


def mutations(count, content, seed):
    """Bytes changed, left out, doubled, swapped and cut off, at seeded places."""
    pick = random.Random(seed)
    for _ in range(count):
        data = bytearray(content)
        for _ in range(pick.randint(1, 3)):
            at, size = pick.randrange(len(data)), pick.randint(1, 12)
            match pick.randrange(6):
                case 0:
                    data[at] = pick.randrange(256)
                case 1:
                    del data[at : at + size]
                case 2:
                    data[at:at] = data[at : at + size]
                case 3:
                    data[at:at] = pick.choice(
                        [b"\n", b"{", b'"', b"null", b"\xff", b"\\ud800", b"[]", b",", b"NaN", b" "]
                    )
                case 4:
                    data[at : at + 1] = pick.choice([b'"', b"\\", b"}", b"\x00", b"1e999", b":"])
                case _:
                    del data[max(1, len(data) - size * 20) :]
        yield bytes(data)


FUZZED = {"rows.jsonl": 500, "array.json": 200, "rows.jsonl.gz": 100, "rows.jsonl.zst": 100}


@pytest.mark.parametrize("name", FUZZED)
def test_mutated_files_are_read_or_refused_by_name(tmp_path, name):
    """Never another exception; a refusal names file and line; what Python's own JSON accepts as good rows is read."""
    path = tmp_path / name
    small = CONTENTS[name] if ".gz" in name or ".zst" in name else json.dumps(ROWS[:8]).encode()
    if name == "rows.jsonl":
        small = b"\n".join(LINES.splitlines()[:8])
    accepted = refused = 0
    for content in mutations(FUZZED[name], small, seed=name):
        path.write_bytes(content)
        try:
            read(path)
            accepted += 1
        except DataError as error:
            refused += 1
            assert not plainly_good(content, name), (content, str(error))
            for line in str(error).splitlines():
                assert line.startswith((f"{path}:", "... and ")), line
                if name == "rows.jsonl" and "no rows" not in line and not line.startswith("..."):
                    number = line.removeprefix(f"{path}:").partition(":")[0]
                    assert 1 <= int(number) <= content.count(b"\n") + 1
    assert refused > 5 and (accepted or not name.endswith("json"))


def plainly_good(content, name):
    """Rows that Python reads with text for a prompt and text or a number for an answer, in a plain file."""
    if not name.endswith(("jsonl", "json")):
        return False
    try:
        text = content.decode("ascii")
        rows = json.loads(text) if name == "array.json" else [json.loads(x) for x in text.split("\n") if x.strip()]
        texts = [(row["prompt"], row["answer"]) for row in rows]
        good = all(isinstance(p, str) and p.strip() and type(a) in (str, int) and str(a).strip() for p, a in texts)
        json.dumps(rows, allow_nan=False)
        json.dumps(texts, ensure_ascii=False).encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return good and bool(rows)


def test_an_object_over_several_lines_is_named_as_such_wherever_it_begins(tmp_path):
    rows = ['{"prompt": "p", "answer": 1}', '{"prompt": "q",', ' "answer": 2}', '{"prompt": "cut', "{broken"]
    table = open_text(write(tmp_path, *rows), "rows.jsonl")
    with pytest.raises(BadRow, match="one JSON object over several lines"):
        table.raw(1)
    for number in (2, 3, 4):
        with pytest.raises(BadRow, match=r"^not valid JSON"):
            table.raw(number)
