"""Actors of Ray as the rest of the program has them: a call gives a result, our error, or that the process is gone."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import ray
from ray import cloudpickle
from ray.exceptions import RayError

from dapo.reward.batching import retrieve
from dapo.training.parallel.front import RankDied

T = TypeVar("T")
LOAD_SECONDS = 1800.0
"""For a process to be there with what it is to load, a model of hundreds of GB over a network included."""
AGAIN_SECONDS = 60.0
"""Until another attempt to replace one."""
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


async def in_time(loading: Coroutine[Any, Any, T], what: str) -> T:
    """What ``loading`` gives. It is not waited for any longer once its time is over: it may hear of no cancellation.
    Raises GoneError: it took too long."""
    task = asyncio.ensure_future(loading)
    task.add_done_callback(retrieve)
    try:
        if not (await asyncio.wait([task], timeout=LOAD_SECONDS))[0]:
            raise GoneError(f"{what} took more than {LOAD_SECONDS / 60:g} minutes; Ray's logs tell more, on its node")
        return task.result()
    finally:
        task.cancel()


class Replacing:
    """Makes processes in the place of those that died."""

    def __init__(
        self,
        make: Callable[[int], Coroutine[Any, Any, Remote]],
        tell: Callable[[str], object],
        left: Callable[[], bool],
    ) -> None:
        """``make``: that of a number. ``left``: whether any of its kind is there."""
        self._make, self._tell, self._left = make, tell, left
        self._coming = 0  # that are being made

    async def another(self, number: int, name: str) -> Remote:
        """It is tried until it is there. Raises GoneError: it could not be made, and none is left nor on its way."""
        for attempt in itertools.count():
            self._coming += 1
            try:
                return await in_time(self._make(number), f"to start {name}")
            except Exception as error:
                why = f"no other one could be started ({error})"
            finally:
                self._coming -= 1
            if not attempt:
                self._tell(f"{name}: {why}; tried again")
            if not (self._coming or self._left()):
                raise GoneError(why)
            await asyncio.sleep(AGAIN_SECONDS)
        raise AssertionError


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
