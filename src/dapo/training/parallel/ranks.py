"""The processes that train one model together, and what they tell each other.

All of them call these together, in the same order, each from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dapo.errors import UserError

T = TypeVar("T")
AGREED = (UserError, FileExistsError)
"""What all ranks raise together and go on after."""


class Ranks:
    """One process: what it has is all there is."""

    rank = 0
    size = 1

    def gather(self, value: T) -> Sequence[T]:
        """What every rank has, by rank: small Python objects."""
        return [value]

    def add_up(self, tensor: torch.Tensor) -> None:
        """Put the sum over all ranks in its place."""

    def together(self, work: Callable[[], T], alone: Collection[int] | None = None) -> T:
        """What ``work``, which exchanges nothing, gives here. Where it fails on one rank, it fails on all.
        ``alone``: the only ranks that do it; None: all.
        Raises UserError: the same on all ranks, of the first one that failed. Its class and FileExistsError are kept.
        """
        return work()


class ProcessRanks(Ranks):
    """The processes of a group of ``torch.distributed``."""

    def __init__(self, group: Any = None, control: Any = None) -> None:
        """``group``: for tensors, None: all processes. ``control``: for objects, on the host; None: the same."""
        self.group: Any = group or dist.group.WORLD
        self._control = control or self.group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def gather(self, value: T) -> Sequence[T]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def add_up(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def together(self, work: Callable[[], T], alone: Collection[int] | None = None) -> T:
        result, failure, told = None, None, None
        try:
            result = work() if alone is None or self.rank in alone else None
        except Exception as error:
            kind, failure = type(error) if isinstance(error, AGREED) else None, error
            told = kind or UserError, f"rank {self.rank}: {'' if kind else type(error).__name__ + ': '}{error}"
        for raised, line in filter(None, self.gather(told)):
            raise raised(line) from failure
        return result  # type: ignore[return-value]
