"""The client of vLLM's core, over a core that does what a test says."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dapo.config import build_config
from dapo.errors import UserError
from dapo.rollout.engine import Draft, EngineError, Request, Sampling
from dapo.rollout.vllm import engine as module
from dapo.rollout.vllm.flight import Flight
from helpers import random_model

pytestmark = pytest.mark.vllm
SAMPLING = Sampling(1.0, 4)


class Core:
    """Each request is a token at once, or as many as there are ``finish_reasons``. Keeps what it was asked for."""

    def __init__(self) -> None:
        self.finish_reasons: list[str | None] = ["length"]
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.asked: list[str] = []
        self.waits: dict[str, asyncio.Event] = {}

    async def get_output_async(self) -> Any:
        output = await self.outputs_queue.get()
        if isinstance(output, Exception):
            raise output
        return output

    async def add_request_async(self, request: Any) -> None:
        self.asked.append("add")
        await asyncio.sleep(0.001)
        logprobs = SimpleNamespace(logprobs=np.zeros((1, 1), np.float32))
        for reason in self.finish_reasons:
            output = SimpleNamespace(
                request_id=request.request_id, new_token_ids=[5], new_logprobs=logprobs, finish_reason=reason
            )
            self.outputs_queue.put_nowait(SimpleNamespace(outputs=[output]))

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            self.asked.append(name.removesuffix("_async"))
            if name in self.waits:
                await self.waits[name].wait()
            return [{"found": {"type": "cpu", "uuid": ""}}]

        return call


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    core = Core()
    processes = SimpleNamespace(core=core, close=lambda: None, last_words=lambda text: text)
    monkeypatch.setattr(module, "Processes", lambda *args: processes)
    monkeypatch.setattr(module, "engine_arguments", lambda *args: {})
    monkeypatch.setattr(module, "model_folder", lambda *args: nullcontext(""))
    return core


def engine_of(decode: Any = None) -> Any:
    sizes = {"max_sequence_tokens": 20, "max_concurrent_samples": 4}
    return module.VLLMEngine(
        build_config({"model": {"path": "none"}}), random_model("qwen2"), [0], decode=decode, loaded=True, **sizes
    )


def test_the_first_sample_comes_before_the_last_is_asked_for(core: Core) -> None:
    async def run() -> None:
        stream = engine_of().generate([Request(0, (3, 4), tuple(range(500)), SAMPLING)])
        assert (await anext(stream)).token_ids.tolist() == [5]
        assert core.asked.count("add") < 20
        assert len([sample async for sample in stream]) == 499

    asyncio.run(run())


def test_a_stream_hears_of_each_token_before_the_next_is_taken(core: Core) -> None:
    """However many are waiting to be taken: they would keep a cancel from being heard."""

    async def run() -> None:
        engine, request = engine_of(), Request(0, (3,), (1,), Sampling(1.0, 9))
        core.finish_reasons = [None] * 8 + ["length"]
        async for event in engine.stream([request]):
            if isinstance(event, Draft):
                assert event.start + len(event.token_ids) == len(engine._flights["0"].ids)

    asyncio.run(run())


def test_a_pause_that_was_cancelled_is_asked_for_again(core: Core) -> None:
    async def run() -> None:
        engine = engine_of()
        core.waits["pause_scheduler_async"] = asyncio.Event()
        for stop in (engine.pause, lambda: engine.begin(1)):
            task = asyncio.create_task(stop())
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])
        core.waits.clear()
        with pytest.raises(EngineError, match="version 1 arrived in part"):
            await anext(engine.generate([Request(0, (3,), (1,), SAMPLING)]))
        core.asked.clear()
        await engine.pause()
        await engine.resume()
        assert core.asked == ["pause_scheduler"]  # the weights are still to come
        await engine.begin(1)
        engine._transfer._missing.clear()
        await engine.commit({})
        assert core.asked[-1] == "resume_scheduler"

    asyncio.run(run())


def test_what_is_paused_stays_so_when_it_wakes(core: Core) -> None:
    async def run() -> None:
        engine = engine_of()
        engine._can_sleep = True
        await engine.sleep()
        await engine.pause()
        await engine.wake()
        assert core.asked[-2:] == ["wake_up", "pause_scheduler"]
        await engine.resume()
        assert core.asked[-1] == "resume_scheduler"

    asyncio.run(run())


def test_a_fault_of_one_request_is_its_own(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(ids: Any) -> str:
        raise KeyError("5")

    async def run() -> None:
        engine = engine_of(decode)
        with pytest.raises(EngineError, match=r"request 7: .*cannot be read: KeyError"):
            await anext(engine.generate([Request(7, (3,), (1,), Sampling(1.0, 4, stop=("x",)))]))
        with (
            monkeypatch.context() as patch,
            pytest.raises(EngineError, match=r"request 8: vLLM does not take it: .*no"),
        ):
            patch.setattr("vllm.SamplingParams", lambda **given: (_ for _ in ()).throw(ValueError("no")))
            await anext(engine.generate([Request(8, (3,), (1,), SAMPLING)]))
        assert (await anext(engine.generate([Request(9, (3,), (1,), SAMPLING)]))).length == 1

    asyncio.run(run())


def test_an_engine_that_is_killed_is_no_fault_of_dapos(core: Core) -> None:
    async def run() -> None:
        engine = engine_of()
        core.outputs_queue.put_nowait(RuntimeError("killed"))
        with pytest.raises(UserError, match=r"vLLM ended: .*killed.* a lower rollout.cache_gib"):
            await engine.pause()

    asyncio.run(run())


def test_no_more_likeliest_tokens_are_asked_for_than_there_are_nor_taken_than_asked_for() -> None:
    flight = Flight("0", Request(0, (3,), (1,), Sampling(1.0, 1, top_logprobs=20)), 0, print, False)
    assert flight.asked([0], 7, None).sampling_params.logprobs == 7
    flight = Flight("0", Request(0, (3,), (1,), Sampling(1.0, 1, top_logprobs=2)), 0, print, False)
    five = SimpleNamespace(logprobs=-np.ones((1, 6), np.float32), logprob_token_ids=np.arange(6)[None])
    sample: Any = flight.take(SimpleNamespace(new_token_ids=[0], new_logprobs=five, finish_reason="stop"), 0, [0], None)
    assert sample.top_ids.tolist() == [[1, 2]] and sample.top_logprobs.shape == (1, 2)
