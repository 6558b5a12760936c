"""Actors of Ray as the rest of the program has them: a call gives a result, our error, or that the process is gone."""

from __future__ import annotations

import pickle
import re
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError

from dapo.training.parallel.front import RankDied

_INLINE = 100_000
"""Bytes of arguments above which they go through the object store, once for all who get them."""


class GoneError(Exception):
    """A process is gone. The message says which and, as far as that is known, why."""


class Remote:
    """One actor. ``name``: for messages, such as `engine 2`."""

    def __init__(self, actor: Any, name: str) -> None:
        self.actor, self.name = actor, name
        self.process, self.node = 0, ""

    def __str__(self) -> str:
        return f"{self.name} (process {self.process} on {self.node})" if self.process else self.name

    async def locate(self) -> None:
        """Find out where it is. Raises GoneError: it could not be started."""
        self.process, self.node = await self.get("where")

    async def get(self, method: str, *args: Any) -> Any:
        """What a method gives that does not go by ``call``. Raises GoneError."""
        try:
            return await getattr(self.actor, method).remote(*args)
        except ray.exceptions.RayTaskError:
            raise
        except RayError as error:
            raise GoneError(f"{self} {why_gone(error)}") from None

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        """Raises what the method raised, or GoneError."""
        return await self.send(method, cloudpickle.dumps((args, keywords)))

    async def send(self, method: str, packed: Any) -> Any:
        """:meth:`call` with arguments that are packed, or the reference of an object of them."""
        result, error = pickle.loads(await self.get("call", method, packed))
        if error is not None:
            raise error
        return result

    def kill(self) -> None:
        """End its process at once, if it is there."""
        if ray.is_initialized():
            ray.kill(self.actor, no_restart=True)


def why_gone(error: RayError) -> str:
    """In words, of what Ray knows."""
    text = str(error)
    if re.search(
        r"node (was|has) (terminated|died|removed)|its node has died|node is dead|unavailable node", text, re.I
    ):
        return "is gone with its node"
    if "running low on memory" in text:
        return "was ended by Ray, as its node had hardly any memory left"
    if "ray.kill" in text:
        return "was ended"
    if detail := re.search(r"exception in the actor.s constructor|creation task", text):
        return f"could not be started: {detail.string.strip().splitlines()[-1]}"
    return "ended: it or its node was killed, by hand or for its memory, or crashed"


class Packer:
    """Packs arguments for several actors once."""

    def __init__(self) -> None:
        self._last: tuple[Any, ...] = ()
        self._packed: Any = None

    def pack(self, *args: Any, **keywords: Any) -> Any:
        parts = (*args, *keywords, *keywords.values())
        same = len(parts) == len(self._last) and all(a is b for a, b in zip(parts, self._last, strict=True))
        if self._packed is None or not same:
            packed = cloudpickle.dumps((args, keywords))
            self._packed = ray.put(packed) if len(packed) > _INLINE else packed
            self._last = parts
        return self._packed


class Rank:
    """A rank of the learner (``training/parallel/front.RankHandle``)."""

    def __init__(self, remote: Remote, packer: Packer) -> None:
        """``packer``: that of all ranks."""
        self._remote, self._packer = remote, packer

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        try:
            return await self._remote.send("rank", self._packer.pack(method, *args, **keywords))
        except GoneError as error:
            raise RankDied(str(error)) from None

    async def end(self) -> None:
        self._remote.kill()
