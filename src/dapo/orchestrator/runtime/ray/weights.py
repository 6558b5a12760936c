"""New weights on their way to engines: within a process, or bucket by bucket through Ray's object store.

Rank 0 puts a bucket into the store once; every engine reads it there, on its node in shared memory. An engine that dies
meanwhile is left out, and the others get theirs. At most two buckets are in the store at a time.
"""

from __future__ import annotations

import asyncio
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dapo.rollout.engine import EngineError, hand_over

if TYPE_CHECKING:
    from dapo.orchestrator.runtime.ray.fleet import Fleet
    from dapo.orchestrator.runtime.ray.handles import Remote
    from dapo.training.parallel.front import RankedLearner

Sent = Mapping[str, tuple[np.ndarray[Any, Any], str, tuple[int, ...]]]
"""By name: bytes, type and shape."""
SECONDS = 600.0
"""The longest that an engine may take for a bucket, or for putting all of them to use."""


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


def hand_over_to(
    actors: Sequence[Any], version: int, tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> list[int]:
    """Which of the engines have all of them. To be called where there is no event loop.

    Args:
        actors: of :class:`~dapo.orchestrator.runtime.ray.actors.Worker`.
        dtype: to send in; None: as they are.

    Raises:
        EngineError: an engine refused them, or took too long.
    """
    to = _Engines(actors)
    asyncio.run(hand_over(to, version, ((name, t if dtype is None else t.to(dtype)) for name, t in tensors)))  # type: ignore[arg-type]
    return to.reached


class _Engines:
    """Takes weights as an engine does, for several."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors, self.reached = actors, list(range(len(actors)))

    async def begin(self, version: int) -> None:
        self._tell("begin", version)

    async def put(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        import ray

        stored = ray.put(sent(bucket))
        self._all("take", stored, lambda error: error)

    async def commit(self, fingerprint: Mapping[str, torch.Tensor]) -> None:
        self._tell("commit", {name: tensor.cpu() for name, tensor in fingerprint.items()})

    def _tell(self, method: str, *args: Any) -> None:
        packed = pickle.dumps(((method, *args), {}))
        self._all("call", "engine", packed, lambda outcome: pickle.loads(outcome)[1])

    def _all(self, method: str, *args: Any) -> None:
        import ray

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


class RaySync:
    """From the ranks of a learner to the engines of a fleet (``orchestrator/protocols.WeightSync``)."""

    def __init__(self) -> None:
        self._updates = 0  # as of the weights that engines have

    async def push(self, learner: Any, engine: Any) -> None:
        """Every engine that is there has the weights, or is replaced by one that gets them."""
        fleet: Fleet = engine

        async def send(actors: list[Any]) -> tuple[int, list[int] | None]:
            sent: tuple[int, list[int] | None] = await learner.call("hand_over", actors)
            self._updates = learner.facts.updates
            return sent

        await fleet.change(send)

    async def give(self, learner: RankedLearner, engine: Remote) -> int | None:
        """Hand a new engine the weights that the others have, unless there are newer ones, which a push is to bring.
        Returns the version."""
        given = await learner.call("hand_over", [engine.actor], at=self._updates)
        if given is None or not given[1]:
            return None
        return int(given[0])
