"""Scores in other processes, by many at a time. Without Ray: what its processes do is made up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dapo.errors import RewardError
from dapo.orchestrator.runtime.ray import handles
from dapo.orchestrator.runtime.ray.handles import GoneError, Remote, in_time
from dapo.orchestrator.runtime.ray.rewards import TOGETHER, RayScorer
from dapo.records import Prompt, Reward
from ray_cases import on_ray
from run_cases import config_for

PROMPT = Prompt(0, "2 + 2", (1, 2), "4", {})


class Process(Remote):
    """Ends when it is to score ``deadly``."""

    def __init__(self, name: str, calls: list[list[str]]) -> None:
        super().__init__(None, name)
        self.calls, self.gone = calls, False

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        if method == "close":
            return None
        responses = [response for _, response, _ in args[0]]
        self.calls.append(responses)
        await asyncio.sleep(0)
        if self.gone or "deadly" in responses:
            self.gone = True
            raise GoneError(f"{self.name} ended")
        return [Reward(True, float(len(response))) for response in responses]

    def kill(self) -> None: ...


class Scores(RayScorer):
    """Two processes. Of those in their place so many as ``fail`` says cannot be made."""

    def __init__(self, folder: Path, told: list[str], fail: int = 0) -> None:
        config = on_ray(config_for(folder, {}), reward={"workers": 2})
        super().__init__(config, None, told.append)
        self.calls: list[list[str]] = []
        self.fail, self._actors = fail, [Process(f"reward {n}", self.calls) for n in range(2)]

    async def start(self) -> None: ...

    async def _made(self, number: int) -> Remote:
        self.fail -= 1
        if self.fail >= 0:
            raise RuntimeError("no room")
        return Process(f"reward {number}", self.calls)

    async def of(self, *responses: str) -> list[Reward]:
        return await asyncio.gather(*(self.score(PROMPT, response) for response in responses))


def test_what_comes_at_once_goes_in_one_call_and_each_gets_its_own_score(tmp_path: Path) -> None:
    async def work() -> None:
        scorer = Scores(tmp_path, [])
        texts = ["x" * n for n in range(TOGETHER + 10)]
        assert [one.value for one in await scorer.of(*texts)] == [*range(TOGETHER + 10)]
        assert [len(call) for call in scorer.calls] == [TOGETHER, 10]
        await scorer.close()

    asyncio.run(work())


def test_only_the_response_that_ends_processes_has_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "AGAIN_SECONDS", 0.01)
    told: list[str] = []

    async def work() -> None:
        scorer = Scores(tmp_path, told, fail=1)
        good, deadly, other = await scorer.of("abc", "deadly", "ab")
        assert (good.value, other.value) == (3.0, 2.0) and deadly.correct is None
        assert deadly.error is not None and deadly.error.startswith("3 processes died on it; reward ")
        await scorer.close()

    asyncio.run(work())
    assert any("no other one could be started (no room); tried again" in line for line in told)


def test_a_run_whose_last_scorer_cannot_be_replaced_ends(tmp_path: Path) -> None:
    async def work() -> None:
        scorer = Scores(tmp_path, [], fail=100)
        with pytest.raises(RewardError, match=r"no process is left, and no other one could be started \(no room\)"):
            await scorer.of("deadly")
        await scorer.close()

    asyncio.run(work())


def test_loading_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "LOAD_SECONDS", 0.05)

    async def work() -> None:
        with pytest.raises(GoneError, match=r"^engine 1: to load m took more than"):
            await in_time(asyncio.sleep(60), "engine 1: to load m")

    asyncio.run(work())
