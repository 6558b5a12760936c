"""Writing files so that a reader, or a run that resumes, finds the old file or the whole new one, never half of it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from dapo.errors import TakenError, UserError


def write_atomic(path: Path, pieces: str | bytes | Iterable[str]) -> None:
    """Write text (as UTF-8) or bytes under a temporary name, flush it to the disk and rename it over ``path``."""
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")
    try:
        with temporary.open("wb") as file:
            for piece in [pieces] if isinstance(pieces, str | bytes) else pieces:
                file.write(piece if isinstance(piece, bytes) else piece.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_lines(path: Path, values: Iterable[Any], rights: int = 0o666) -> None:
    """Add values as lines of JSON, all of them or none, and flush them to the disk; processes that do so wait for each
    other. Half a line that a killed one left at the end is cut off. ``rights``: of a new file.
    Raises OSError: the file cannot be written; its lines are as they were before."""
    data = "".join(map(json_line, values)).encode()
    # a buffer would be written once more when the file is closed
    with open(path, "a+b", buffering=0, opener=partial(os.open, mode=rights)) as file:
        lock_file(file, fcntl.LOCK_EX)  # freed with the file
        whole = file.seek(0, os.SEEK_END)
        if whole:
            with mmap.mmap(file.fileno(), whole, access=mmap.ACCESS_READ) as text:
                whole = text.rfind(b"\n") + 1
        file.truncate(whole)
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(whole)
            raise


def file_hash(path: Path) -> str:
    """SHA-256 of a file, as ``sha256sum`` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path, most: int = 16 * 2**20) -> str:
    """The text of a file that somebody else may have written.
    Raises OSError: it cannot be read; ValueError: it is no text in UTF-8, or has more than ``most`` bytes."""
    with path.open("rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise ValueError(f"larger than {size_text(most)}")
    return found.decode("utf-8-sig")


def read_json(path: Path, most: int = 16 * 2**20) -> Any:
    """What a file of JSON holds. Errors as for :func:`read_text`; ValueError also for what is no JSON."""
    return parse_json(read_text(path, most))


def parse_json(text: str | bytes, decoder: json.JSONDecoder | None = None) -> Any:
    """Raises ValueError: it is no JSON, or nested too deeply."""
    try:
        return (decoder or _DECODER).decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def json_or_text(text: str) -> Any:
    """What ``text`` is as JSON; itself where it is none."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def lines_of(path: Path, most: int = 64 * 2**20) -> Iterator[bytes]:
    """The lines of a file with their ends; the last one may lack it.
    Raises OSError: it cannot be read; ValueError: a line has more than ``most`` bytes."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(most + 1):
            number += 1
            if len(line) > most:
                raise ValueError(f"line {number} is longer than {size_text(most)}")
            yield line


_DECODER = json.JSONDecoder()


def size_text(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside ``target`` that becomes ``target`` once the block ends without an error.
    Raises TakenError: ``target`` is a file or a folder with something in it."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise TakenError(f"{target} exists and is not overwritten")
    staging = target.with_name(f".{target.name}.{threading.get_native_id()}.tmp")
    shutil.rmtree(staging, ignore_errors=True)  # of a killed process that had the same number
    staging.mkdir(parents=True)
    try:
        yield staging
        follow_umask(staging)
        for path in [*staging.rglob("*"), staging]:
            flush_to_disk(path)
        staging.replace(target)
        flush_to_disk(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def follow_umask(folder: Path) -> None:
    """Give the files in a folder that was just made its own rights: safetensors lets nobody but the owner read."""
    rights = folder.stat().st_mode & 0o666  # the umask itself can only be read by changing it, for all threads
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(rights)


def flush_to_disk(path: Path) -> None:
    """fsync a file or a folder (its list of names), where the file system has that for folders."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # CIFS, sshfs: no such thing for folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF) or not path.is_dir():
            raise
    finally:
        os.close(handle)


def lock_file(file: IO[Any], how: int) -> OSError | None:
    """``flock``, freed with the file. What is returned says why the file system has no locks (NFS, Lustre).
    Raises BlockingIOError: another process holds the lock, and ``how`` is not to wait."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        raise
    except OSError as error:
        return error
    return None


@contextmanager
def writing(what: Path) -> Iterator[None]:
    """Raises UserError: ``what`` cannot be written. Whatever is raised inside is taken for that: to safetensors and to
    tokenizers a full disk is no OSError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: cannot be written: {getattr(error, 'strerror', None) or error}") from None


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    write_atomic(path, _dump(value, indent=2))


def json_line(value: Any) -> str:
    """``value`` as one line of JSON, line end included. What is in JSON's own types and finite takes the short way."""
    try:
        return _printable(_COMPACT.encode(value))
    except (TypeError, ValueError):
        return _dump(value)


def _dump(value: Any, indent: int | None = None) -> str:
    return _printable(json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False))


_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def _printable(text: str) -> str:
    """Lone surrogates cannot be written as UTF-8: they stay escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"


def plain(value: Any) -> Any:
    """``value`` in JSON's own types: arrays and tensors become lists, paths text, and what is not finite null."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch
        return plain(value.tolist())
    return str(value)


def holds_model(folder: Path) -> bool:
    """Whether there is a model in Hugging Face layout in ``folder``, or an adapter in PEFT's."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
