"""New weights by a group of rank 0, which is this process here, and engines in processes of a real Ray."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dapo.data.template import PromptTemplate
from dapo.model.loading import embedding_rows
from dapo.orchestrator.runtime.ray.fleet import Fleet
from dapo.orchestrator.runtime.ray.weights import Sender
from dapo.rollout import engine as engines
from dapo.rollout.engine import EngineError, Request, Sampling
from ray_cases import fleet_of, workers
from run_cases import TOKENIZER, config_for, tiny_model

pytestmark = pytest.mark.usefixtures("ray_here")
Tensors = list[tuple[str, torch.Tensor]]
GREEDY = Request(1, (3, 4), (1,), Sampling(0.0, 8))


def weights(seed: int) -> Tensors:
    """As a learner has them: parameters once each."""
    generator = torch.Generator().manual_seed(seed)
    named = tiny_model().named_parameters()
    return [(name, p.detach() + 0.2 * torch.randn(p.shape, generator=generator)) for name, p in named]


class Engines:
    """Those of a fleet, and what becomes of a push of new weights."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.sender = fleet, Sender()
        self.actors = [seat.remote.actor for seat in fleet._seats]

    def push(self, version: int, tensors: Tensors | Iterator[Any], backend: str | None = "gloo") -> None:
        self.sender.send(self.actors, version, iter(tensors), None, backend)

    async def samples(self, number: int) -> list[int]:
        """Of one engine: what it computes with its weights."""
        seat = self.fleet._seats[number]
        for other in self.fleet._seats:
            other.ready = other is seat
        [sample] = [one async for one in self.fleet.generate([GREEDY])]
        return [int(token) for token in sample.token_ids] + [int(version) for version in sample.versions]


def with_engines(count: int, tiny: Path, folder: Path, work: Callable[[Engines], Awaitable[None]]) -> None:
    config = config_for(folder, {"model.path": str(tiny)})
    template = PromptTemplate(config.data, TOKENIZER, embedding_rows(str(tiny)))

    async def run() -> None:
        fleet = await fleet_of(config, template, (1,), count)
        try:
            await work(Engines(fleet))
        finally:
            await fleet.close()

    asyncio.run(run())


def test_engines_have_what_was_sent_by_a_group_or_through_the_store_and_hold_on_to_none_of_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "BUCKET_BYTES", 2**14)

    async def work(them: Engines) -> None:
        found = []
        for version, backend in ((1, "gloo"), (2, None)):
            await asyncio.to_thread(them.push, version, weights(7), backend)
            found += [await them.samples(number) for number in range(2)]
        tokens = [one[: len(one) // 2] for one in found]
        assert tokens[1:] == tokens[:-1] and [one[-1] for one in found] == [1, 1, 2, 2]
        with pytest.raises(EngineError, match="parameters were not given"):
            await asyncio.to_thread(them.push, 3, weights(7)[1:])
        processes = [psutil.Process(), *(psutil.Process(pid) for _, pid in workers())]
        before: list[int] = []
        for version in range(3, 53):
            await asyncio.to_thread(them.push, version, weights(version))
            before = before or [one.memory_info().rss for one in processes] if version == 12 else before
        grown = [one.memory_info().rss - size for one, size in zip(processes, before, strict=True)]
        assert (
            them.sender.word is None and them.sender._group is not None and len(grown) == 3 and max(grown) < 8 * 2**20
        ), grown
        await asyncio.to_thread(them.push, 53, weights(7))
        assert (await them.samples(0))[: len(tokens[0])] == tokens[0]
        other = Sender()  # another one at a time: its port is another
        await asyncio.to_thread(other.send, them.actors, 54, iter(weights(7)), None, "gloo")
        assert other.word is None and other.reached == [0, 1]

    with_engines(2, tiny, tmp_path, work)


def test_an_engine_that_dies_in_the_middle_is_left_out_and_the_others_get_the_rest(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at once, and while rank 0 waits for it. The next weights go by a group of those that are left."""
    monkeypatch.setattr(engines, "BUCKET_BYTES", 2**14)

    async def work(them: Engines) -> None:
        them.fleet._replacing = None  # they stay away
        processes = dict(workers())

        def tensors(victim: int, hangs: bool) -> Iterator[tuple[str, torch.Tensor]]:
            for number, named in enumerate(weights(7)):
                if number == 8:
                    os.kill(victim, signal.SIGSTOP if hangs else signal.SIGKILL)
                if number == 8 and hangs:
                    threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
                yield named

        for version, hangs in ((1, False), (3, True)):
            await asyncio.to_thread(them.push, version, weights(5))
            assert them.sender.word is None and them.sender._group is not None
            last = len(them.actors) - 1
            sent = asyncio.to_thread(them.push, version + 1, tensors(processes[f"engine {last}"], hangs))
            await asyncio.wait_for(sent, 30)
            assert them.sender.reached == list(range(last)) and them.sender._group is None
            word = them.sender.word
            assert word is not None and re.match("weights: .*; they go through Ray's object store until", word)
            them.actors.pop()
        await asyncio.to_thread(them.push, 5, weights(7))
        assert them.sender.word is None and them.sender._group is not None

    with_engines(3, tiny, tmp_path, work)
