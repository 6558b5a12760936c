"""The memory of this process: its peak, what it may still take, and what the allocator keeps or gives back."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def peak_memory() -> int:
    """The most memory this program has held, in bytes."""
    with suppress(OSError, IndexError):
        return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux no less than whoever started it had held
    return used if sys.platform == "darwin" else used * 1024  # kilobytes everywhere else


@contextmanager
def collecting_later() -> Iterator[None]:
    """No cycles of objects are collected until a model is loaded, or the block ends. What a start makes before that
    (modules, a vocabulary) stays, and looking through it again and again takes a fifth of its time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def free_memory() -> int | None:
    """Bytes of RAM that this process may still take: of the machine, and of the container it is in. None: unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        free = found["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return min([free, *_left_in_containers()])


def _left_in_containers() -> Iterator[int]:
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            yield max(0, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # there is no such file, or "max"
            continue


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_KEPT_FREE_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next tensor instead of giving it back to the system at once.

    A step allocates and frees the same large tensors again and again, and a fresh page costs more than computing what
    is in it: without this, a softmax over the vocabulary takes four times as long. One arena for all threads, since
    others than the main one cannot hold large blocks. glibc only; elsewhere nothing happens.
    """
    mallopt = _c_function("mallopt")
    if mallopt is not None:
        for option, value in ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, (1 << 31) - 1), (_M_ARENA_MAX, 1)):
            mallopt(option, value)


def give_back_memory() -> None:
    """Give kept memory back to the system if it is more than a GiB and more than is in use.

    Tensors of ever other sizes leave holes between them, and the process would grow with every update.
    """
    count, trim = _c_function("mallinfo2"), _c_function("malloc_trim")
    if count is None or trim is None:
        return
    count.restype = _MallInfo
    found = count()
    if found.free > max(_KEPT_FREE_BYTES, found.used):
        trim(0)


class _MallInfo(ctypes.Structure):
    """``mallinfo2`` of malloc.h: ten sizes, of which two are asked for here, in bytes."""

    _fields_ = (
        ("_others", ctypes.c_size_t * 7),
        ("used", ctypes.c_size_t),
        ("free", ctypes.c_size_t),
        ("_at_end", ctypes.c_size_t),
    )


def _c_function(name: str) -> Any:
    """A function of the C library; None where it has none of this name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
