"""Writing whole files or none."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from dapo.training.checkpoint import save_tensors
from dapo.util.files import append_lines, flush_to_disk, new_folder, plain, write_atomic, write_json


def test_json_holds_plain_types_and_null_for_what_is_not_finite(tmp_path: Path) -> None:
    value = {
        "f": np.float32(0.5),
        "i": np.int64(3),
        "b": np.bool_(True),
        "a": np.array([1.0, np.nan]),
        "t": torch.tensor([[1, 2]]),
        "p": Path("x/y"),
        "n": float("inf"),
        1: (None, {2}),
    }
    write_json(tmp_path / "x.json", value)
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "f": 0.5, "i": 3, "b": True, "a": [1.0, None], "t": [[1, 2]], "p": "x/y", "n": None, "1": [None, [2]]
    }  # fmt: skip


def test_flags_stay_flags() -> None:
    assert plain([True, 1, 1.0, "1"]) == [True, 1, 1.0, "1"]
    assert isinstance(plain(np.bool_(False)), bool)


def test_threads_that_write_one_file_do_not_meet(tmp_path: Path) -> None:
    texts = [str(k) * 10**5 for k in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda text: write_atomic(tmp_path / "file", text), texts * 5))
    assert (tmp_path / "file").read_text() in texts and len(list(tmp_path.iterdir())) == 1


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def pieces() -> Iterator[str]:
        yield "new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, pieces())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_of_a_new_folder_follow_the_umask_whoever_writes_them(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with new_folder(tmp_path / "outer") as staging:
            save_tensors(staging / "optimizer", {"w": torch.zeros(2)}, {})
            write_json(staging / "state.json", {})
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "outer").rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {path.stat().st_mode & 0o777 for path in files} == {mode}


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_file_system_that_cannot_flush_folders_can_be_written_to_and_failing_disks_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    failing = {"folder": code, "file": 0}

    def fsync(handle: int) -> None:
        if number := failing["folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"]:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with new_folder(tmp_path / "made") as staging:
        (staging / "file").write_text("x")
    assert (tmp_path / "made" / "file").read_text() == "x"
    failing["file"] = code
    with pytest.raises(OSError, match=os.strerror(code)):
        flush_to_disk(tmp_path / "made" / "file")
    failing["folder"] = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        flush_to_disk(tmp_path)


@pytest.mark.parametrize("left", [b"", b"half a line", b"whole\nhalf", b"whole\n" + b"h" * 10_000])
def test_lines_that_several_append_at_once_stay_whole_and_half_a_line_goes(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(left)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda k: append_lines(path, [{"k": k, "text": "x" * 5000}, {"k": k}]), range(40)))
    kept, lines = left.count(b"\n"), path.read_bytes().splitlines()
    found = [json.loads(line)["k"] for line in lines[kept:]]
    assert lines[:kept] == [b"whole"][:kept] and found[::2] == found[1::2] and sorted(found[::2]) == list(range(40))
