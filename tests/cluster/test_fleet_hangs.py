"""Engines that hang, or cannot be replaced at once. Without Ray: what their processes say is made up."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest

from dapo.orchestrator.runtime.ray import fleet as module
from dapo.orchestrator.runtime.ray import handles
from dapo.orchestrator.runtime.ray.fleet import Fleet, FleetError
from dapo.orchestrator.runtime.ray.handles import GoneError, Remote
from dapo.records import Sample
from dapo.rollout.engine import Request, Sampling

REQUEST = Request(7, (1, 2), (3, 4), Sampling(1.0, 4))


class Process(Remote):
    """``way``: it is `well`, is `silent`, or says that it has made no step (`stuck`)."""

    def __init__(self, name: str, way: str) -> None:
        super().__init__(None, name)
        self.way, self.ended, self._asked = way, asyncio.Event(), asyncio.Queue[list[Any]]()

    async def get(self, method: str, *args: Any) -> Any:
        if self.way == "silent":
            await self.ended.wait()
        if self.way == "stuck":
            await asyncio.sleep(0.02)
            return pickle.dumps((5, []))
        return pickle.dumps((6, [event for request in await self._asked.get() for event in self._done(*request)]))

    def _done(self, key: int, request: Request, drafts: bool) -> list[tuple[int, Sample | None]]:
        tokens = np.asarray([1], np.int32)
        made = [
            Sample(request.id, i, tokens, -np.ones(1, np.float32), 0 * tokens, "stop")
            for i in range(len(request.seeds))
        ]
        return [(key, sample) for sample in (*made, None)]

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        if method == "ask":
            self._asked.put_nowait(args[0])

    def kill(self) -> None:
        self.ended.set()


def fleet_of(engines: list[Process], ways: list[str], told: list[str]) -> Fleet:
    """Engines that are made in the place of others are of these ways, in their order; `none`: it cannot be made."""

    async def make(number: int) -> Remote:
        if (way := ways.pop(0)) == "none":
            raise RuntimeError("no room")
        return Process(f"engine {number}", way)

    async def give(remote: Remote) -> int:
        return 0

    return Fleet(engines, make, told.append, give)


async def sampled(way: str, ways: list[str], told: list[str]) -> list[int]:
    """The samples' indices, by one engine and those in its place."""
    fleet = fleet_of([Process("engine 0", way)], ways, told)
    try:
        return sorted([sample.index async for sample in fleet.generate([REQUEST])])
    finally:
        await fleet.close()


@pytest.mark.parametrize("way", ["silent", "stuck"])
def test_an_engine_that_hangs_is_ended_and_replaced(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HUNG_SECONDS", 1.0)
    told: list[str] = []
    assert asyncio.run(sampled(way, ["well"], told)) == [0, 1]
    hung = "engine 0 did not go on for 1 s and was ended"
    assert told == [f"{hung}; its 2 unfinished samples are asked for again, and it is replaced"]


def test_a_run_whose_last_engine_cannot_be_replaced_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HUNG_SECONDS", 1.0)
    with pytest.raises(FleetError, match=r"no engine is left, and no other one could be started \(no room\)"):
        asyncio.run(sampled("silent", ["none"], []))


def test_an_engine_is_tried_again_while_others_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "AGAIN_SECONDS", 0.05)
    ways, told = ["none", "none", "well"], list[str]()

    async def work() -> None:
        fleet = fleet_of([Process("engine 0", "well"), Process("engine 1", "well")], ways, told)
        fleet._lost(0, GoneError("engine 0 ended"))
        while not all(seat.ready for seat in fleet._seats):
            await asyncio.sleep(0.02)
        await fleet.close()

    asyncio.run(work())
    assert told[1:] == ["engine 0: no other one could be started (no room); tried again"] and not ways
