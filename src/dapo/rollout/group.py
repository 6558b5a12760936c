"""Tensors from one process to several: packed into one buffer at a time, and broadcast.

A group is one of its own, beside those of a learner's ranks and of vLLM. Waits for all of its members, a bounded time.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from dapo.rollout.engine import EngineError

c10d: Any = torch.distributed  # its stubs lack most of what is used here
TIMEOUT = timedelta(seconds=60)
"""The longest that one member waits for the others."""
_ALIGNED = 16  # bytes, for any type
Layout = Sequence[tuple[str, str, Sequence[int], int]]
"""Of tensors in one buffer: name, type, shape, offset in bytes."""


class GroupError(EngineError):
    """Another member is gone or does not answer: the group is of no use any more."""


def meeting_point(host: str) -> tuple[Any, str]:
    """For the members of one group, at a free port of this machine, which the others know as ``host``; and its address.
    It is there as long as somebody holds it."""
    store = c10d.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    return store, f"{host}:{store.port}"


class Group:
    """A member of a group of ``size``, of which the first one sends; made by all at once."""

    def __init__(self, backend: str, where: Any, rank: int, size: int, device: torch.device | str) -> None:
        """``where``: the meeting point, or its address. ``device``: of buffers; on a GPU if ``backend`` is nccl.
        Raises GroupError."""
        self.device = torch.device(device)
        try:
            if isinstance(where, str):
                host, _, port = where.rpartition(":")
                where = c10d.TCPStore(host, int(port), is_master=False, timeout=TIMEOUT)
            if backend == "gloo":
                self._group = c10d.ProcessGroupGloo(where, rank, size, TIMEOUT)
            else:
                options = c10d.ProcessGroupNCCL.Options()
                options._timeout = TIMEOUT
                self._group = c10d.ProcessGroupNCCL(where, rank, size, options)
        except RuntimeError as error:
            raise GroupError(str(error)) from error

    def broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        """``buffer`` as the first member has it, in place. Raises GroupError."""
        try:
            self._group.broadcast(buffer, 0).wait()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        except RuntimeError as error:
            raise GroupError(str(error)) from error
        return buffer

    def receive(self, size: int) -> torch.Tensor:
        """A buffer of so many bytes, of the first member's. Raises GroupError."""
        return self.broadcast(torch.empty(size, dtype=torch.uint8, device=self.device))

    def leave(self) -> None:
        """End what waits in it, as far as the backend can, without waiting for that."""

        def abort() -> None:
            with contextlib.suppress(Exception):
                self._group.abort()

        threading.Thread(target=abort, daemon=True).start()


def packed(
    tensors: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, Layout]:
    """One buffer of them, on ``device``. ``dtype``: see :func:`wire`."""
    layout, size = layout_of(tensors.items(), dtype)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    for name, view in unpacked(buffer, layout).items():
        view.copy_(tensors[name])
    return buffer, layout


def layout_of(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> tuple[Layout, int]:
    """Of one buffer of them, and its bytes."""
    layout, size = [], 0
    for name, tensor in tensors:
        kind = wire(tensor, dtype)
        layout.append((name, str(kind).removeprefix("torch."), tuple(tensor.shape), size))
        size += -(-tensor.numel() * kind.itemsize // _ALIGNED) * _ALIGNED
    return layout, size


def wire(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """That a tensor goes in: floating-point numbers in ``dtype`` (None: their own), others as they are."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def unpacked(buffer: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """Views of the tensors in one buffer of bytes, by name."""
    found: dict[str, torch.Tensor] = {}
    for name, dtype, shape, offset in layout:
        kind = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        found[name] = buffer[offset : offset + size].view(kind).view(tuple(shape))
    return found
