"""What took long to find out about a data file, kept between runs.

The folder is ``$DAPO_CACHE``, else ``$XDG_CACHE_HOME/dapo``, else ``~/.cache/dapo``. It can be deleted at any time. An
entry is a folder that appears whole or not at all; a damaged one is made again, and where the cache cannot be written
to, a temporary folder is used that goes away with the process."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

_META = "meta.json"
_SPARE = 256 * 2**20
"""Bytes that are left free on the disk."""


def cache_folder(kind: str) -> Path:
    """The folder of entries of one kind, which can be written to; where the cache cannot, a temporary one."""
    folder = _lasting(kind)
    if not can_be_written_to(folder):
        folder = _temporary() / kind
        folder.mkdir(exist_ok=True)
    return folder


def can_be_written_to(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _lasting(kind: str) -> Path:
    """Where the cache has them; it need not exist. A relative XDG_CACHE_HOME is to be ignored, says its standard."""
    if named := os.environ.get("DAPO_CACHE"):
        return Path(os.path.expanduser(named), kind)  # noqa: PTH111 (Path.expanduser raises where there is no home)
    places = [os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")]  # noqa: PTH111
    return Path(next(filter(os.path.isabs, places), None) or _temporary(), "dapo", kind)


@cache
def _temporary() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="dapo-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def key_of(*parts: Any) -> str:
    """A name for an entry that holds whatever follows from ``parts``."""
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def file_key(path: Path, *parts: Any) -> str:
    """As :func:`key_of`, for what follows from a file too: by place, size, time of change and inode."""
    found = path.stat()
    place = str(path.resolve())
    return key_of(place, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, *parts)


def cached(kind: str, key: str, build: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """The entry ``key``: the folder that ``build`` filled and the numbers and text that it returned.
    ``key``: of :func:`key_of` or :func:`file_key`. ``build``: called with an empty folder when there is no entry, or a
    damaged one.
    Raises OSError: there is no room, in the cache or the temporary folder."""
    for entry in (_lasting(kind) / key, (parent := cache_folder(kind)) / key):
        if (known := _read(entry)) is not None:
            return entry, known
    folder = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=parent))
    try:
        facts = build(folder)
        sums = {path.name: [path.stat().st_size, _checksum(path)] for path in folder.iterdir()}
        (folder / _META).write_text(json.dumps({"facts": facts, "files": sums}), encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if _read(entry) is None:  # what stands there is damaged
        shutil.rmtree(entry, ignore_errors=True)
    try:
        folder.rename(entry)
    except OSError:  # another process made it just now, or it cannot be made
        if _read(entry) is None:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            return folder, facts
        shutil.rmtree(folder, ignore_errors=True)
    return entry, facts


def _read(entry: Path) -> dict[str, Any] | None:
    try:
        meta = json.loads((entry / _META).read_text(encoding="utf-8"))
        for name, (size, checksum) in meta["files"].items():
            path = entry / name
            if path.stat().st_size != size or _checksum(path) != checksum:
                return None
        facts: dict[str, Any] = dict(meta["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return facts


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            total = zlib.crc32(chunk, total)
    return total


def write_with_room(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a long file, and stop before the disk is full. Raises OSError: there is too little room."""
    with path.open("wb") as file:
        for number, chunk in enumerate(chunks):
            if number % 16 == 0 and shutil.disk_usage(path.parent).free < _SPARE:
                raise OSError(f"less than {_SPARE >> 20} MiB are free in {path.parent}")
            file.write(chunk)
