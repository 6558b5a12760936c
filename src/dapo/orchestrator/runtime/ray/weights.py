"""New weights on their way from rank 0 to engines in other processes, bucket by bucket.

By a group of processes, made anew when engines are others than before: rank 0 broadcasts, from GPU to GPU by NCCL. Or
through Ray's object store, which every engine reads on its node in shared memory: for a new engine, and for the rest
of an update in which an engine died or hung. One that died is left out. Every wait is bounded.
"""

from __future__ import annotations

import asyncio
import pickle
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch

from dapo.errors import first_line
from dapo.rollout.engine import EngineError, hand_over
from dapo.rollout.group import Group, GroupError, meeting_point, packed

if TYPE_CHECKING:
    from dapo.orchestrator.runtime.ray.fleet import Fleet
    from dapo.orchestrator.runtime.ray.handles import Remote
    from dapo.training.parallel.front import RankedLearner

Sent = Mapping[str, tuple[np.ndarray[Any, Any], str, tuple[int, ...]]]
"""By name: bytes, type and shape."""
SECONDS = 600.0
"""The longest that an engine may take for a bucket, or for putting all of them to use."""
GROUP_SECONDS = 45.0
"""For the group to meet, or for a bucket to be everywhere: less than after which NCCL ends a process."""
_POLL_SECONDS = 0.1


def sent(bucket: Iterable[tuple[str, torch.Tensor]]) -> Sent:
    """What Ray carries without a copy."""
    found = {}
    for name, tensor in bucket:
        plain = tensor.detach().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy()
        found[name] = (data, str(plain.dtype).removeprefix("torch."), tuple(plain.shape))
    return found


def received(bucket: Sent) -> list[tuple[str, torch.Tensor]]:
    """Views of it, to be read only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they cannot be written to
        return [
            (name, torch.from_numpy(data).view(getattr(torch, dtype)).view(shape))
            for name, (data, dtype, shape) in bucket.items()
        ]


class Sender:
    """Gives weights to engines in other processes, as one engine takes them. To be used where there is no event loop.

    Attributes:
        reached: numbers of the engines, among those of :meth:`send`, that have all of them.
        word: what went wrong on the way and was made up for.
    """

    def __init__(self) -> None:
        self.reached: list[int] = []
        self.word: str | None = None
        self._members: list[Any] = []
        """Those that a group was last made with."""
        self._group: Group | None = None

    def send(
        self,
        actors: Sequence[Any],
        version: int,
        tensors: Iterator[tuple[str, torch.Tensor]],
        dtype: torch.dtype | None,
        backend: str | None,
    ) -> None:
        """All of them, to all of those that live.

        Args:
            actors: of :class:`~dapo.orchestrator.runtime.ray.actors.Worker`.
            dtype: to send in; None: as they are.
            backend: of the group; None: through the object store.

        Raises EngineError: an engine refused them, or took too long.
        """
        self._actors, self.reached, self.word = actors, [*range(len(actors))], None
        self._meet(backend)
        asyncio.run(hand_over(self, version, ((name, t if dtype is None else t.to(dtype)) for name, t in tensors)))  # type: ignore[arg-type]

    async def begin(self, version: int) -> None:
        self._tell("begin", version)

    async def put(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        if self._group is not None and bucket:
            buffer, layout = packed(dict(bucket), self._group.device)
            send = partial(self._group.broadcast, buffer)
            if self._together(send, lambda actor, _: actor.receive.remote(layout, buffer.numel())) is not None:
                return
        stored = ray.put(sent(bucket))
        self._all("take", stored, lambda error: error)

    async def commit(self, fingerprint: Mapping[str, torch.Tensor]) -> None:
        self._tell("commit", {name: tensor.cpu() for name, tensor in fingerprint.items()})

    # --- through the object store, and what is said -------------------------------------------------------------------

    def _tell(self, method: str, *args: Any) -> None:
        packed = pickle.dumps(((method, *args), {}))
        self._all("call", "engine", packed, lambda outcome: pickle.loads(outcome)[1])

    def _all(self, method: str, *args: Any) -> None:
        *given, error_of = args
        asked = {number: getattr(self._actors[number], method).remote(*given) for number in self.reached}
        for number, answer in asked.items():
            try:
                error = error_of(ray.get(answer, timeout=SECONDS))
            except ray.exceptions.GetTimeoutError:
                raise EngineError(f"weights: engine {number} did not take them within {SECONDS:g} s") from None
            except ray.exceptions.RayError:  # it is gone; the fleet hears of it, and sees to another
                self.reached.remove(number)
                continue
            if error is not None:
                raise error

    # --- by a group ---------------------------------------------------------------------------------------------------

    def _meet(self, backend: str | None) -> None:
        """Have a group of these engines, unless one of the same was given up."""
        members, size = [actor._actor_id for actor in self._actors if backend], 1 + len(self._actors)
        if members == self._members:
            return
        self._members, self._group = members, None
        if members and backend:
            store, where = meeting_point(ray.util.get_node_ip_address())
            rest = size, "cuda" if backend == "nccl" else "cpu"
            join = partial(Group, backend, store, 0, *rest)
            self._group = self._together(join, lambda actor, rank: actor.meet.remote(backend, where, rank, *rest))

    def _together(self, ours: Callable[[], Any], theirs: Callable[[Any, int], Any]) -> Any:
        """What ``ours`` gives, while all engines do ``theirs`` as they wait for each other. None: a member is gone or
        hangs, so the group is given up. Raises what an engine raised."""
        asked = {theirs(actor, 1 + number): number for number, actor in enumerate(self._actors)}
        work, began = ThreadPoolExecutor(1).submit(ours), time.monotonic()  # left alone where it hangs
        lost: BaseException | None = None
        while lost is None and (asked or not work.done()):
            wait([work], 0 if asked else _POLL_SECONDS)
            ready = ray.wait([*asked], num_returns=len(asked), timeout=_POLL_SECONDS)[0] if asked else ()
            for answer in ready:
                error = _error_of(answer, asked.pop(answer))
                if isinstance(error, GroupError):
                    lost = error
                elif error is not None:
                    raise error
            passed = time.monotonic() - began
            if work.done():
                lost = lost or work.exception()
            elif passed > GROUP_SECONDS:
                lost = lost or GroupError(f"engines were not reached within {GROUP_SECONDS:g} s")
            if passed > SECONDS:
                raise EngineError(f"weights: engines did not take them within {SECONDS:g} s")
        lost = lost or work.exception()
        if lost is None:
            return work.result()
        if self._group is not None:
            self._group.leave()
            self._group = None
        self.word = f"weights: {first_line(lost)}; they go through Ray's object store until engines are replaced"
        return None


def _error_of(answer: Any, number: int) -> Exception | None:
    try:
        error: Exception | None = ray.get(answer)
        return error
    except ray.exceptions.RayError:
        return GroupError(f"engine {number} is gone")


class RaySync:
    """From the ranks of a learner to the engines of a fleet (``orchestrator/protocols.WeightSync``)."""

    def __init__(self, backend: str | None, tell: Callable[[str], object]) -> None:
        """``backend``: of the group of rank 0 and the engines; None: the object store. ``tell``: hears what went wrong
        on the way."""
        self._backend, self._tell = backend, tell
        self._updates = 0  # as of the weights that engines have

    async def push(self, learner: Any, engine: Any) -> None:
        """Every engine that is there has the weights, or is replaced by one that gets them."""
        fleet: Fleet = engine

        async def send(actors: list[Any]) -> tuple[int, list[int] | None]:
            version, reached, word = await learner.call("hand_over", actors, backend=self._backend)
            self._updates = learner.facts.updates
            if word is not None:
                self._tell(word)
            return version, reached

        await fleet.change(send)

    async def give(self, learner: RankedLearner, engine: Remote) -> int | None:
        """Hand a new engine the weights that the others have, unless there are newer ones, which a push is to bring.
        Returns the version."""
        given = await learner.call("hand_over", [engine.actor], at=self._updates)
        if given is None or not given[1]:
            return None
        return int(given[0])
