"""The processes that train one model together, and what they tell each other.

Every method that exchanges something is called by all ranks, in the same order, each from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """One process: what it has is all there is."""

    rank = 0
    size = 1

    def gather(self, value: T) -> Sequence[T]:
        """What every rank has, by rank: small Python objects."""
        return [value]

    def add_up(self, tensor: torch.Tensor) -> None:
        """Put the sum over all ranks in its place."""


class ProcessRanks(Ranks):
    """The processes of a group of ``torch.distributed``."""

    def __init__(self, group: Any = None, control: Any = None) -> None:
        """``group``: for tensors, None: all processes. ``control``: for objects, on the host; None: the same."""
        self.group = group or dist.group.WORLD
        self._control = control or self.group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def gather(self, value: T) -> Sequence[T]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def add_up(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)


def open_address(host: str, size: int) -> tuple[Any, str]:
    """A free port of ``host``, which is this machine, where ``size`` ranks meet: ``(store, address)``. Rank 0 gives the
    store to :func:`join`; all others get the address."""
    store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
    return store, f"{host}:{store.port}"


def join(rank: int, size: int, meeting: Any, backend: str = "gloo", timeout_s: float = 600.0) -> ProcessRanks:
    """Become ``rank`` of ``size``.

    Args:
        meeting: the store of :func:`open_address` on rank 0, the address elsewhere.
        backend: ``gloo`` (CPU) or ``nccl``, beside which there is gloo for what is on the host.
        timeout_s: how long a rank waits for the others at most.
    """
    limit = timedelta(seconds=timeout_s)
    if isinstance(meeting, str):
        host, _, port = meeting.rpartition(":")
        meeting = dist.TCPStore(host, int(port), size, is_master=False, timeout=limit)
    both = "gloo" if backend == "gloo" else f"cpu:gloo,cuda:{backend}"
    dist.init_process_group(both, store=meeting, rank=rank, world_size=size, timeout=limit)
    return ProcessRanks(control=None if backend == "gloo" else dist.new_group(backend="gloo", timeout=limit))
