"""The reward server around scorers that misbehave: what cannot be written, what is examined while clients leave."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from reward_servers import prompt, serving

from dapo.config import ExactReward, ServerReward
from dapo.errors import RewardError
from dapo.records import Prompt, Reward
from dapo.reward.build import make_client
from dapo.reward.contract import Doubt
from dapo.reward.server import ServerLimits, Service, create_app

HALF = "\ud800"
"""Half of a letter, which UTF-8 cannot hold."""

REWARDS: dict[str, Any] = {
    "good": Reward(True, 1.0, {"part": 0.5}, extracted="4"),
    "half": Reward(True, 1.0, {f"p{HALF}": 0.5}, extracted=f"4{HALF}"),
    "failed": Reward(None, math.nan, error=f"raised {HALF}"),
    "nan": Reward(True, 1.0, {"part": math.nan}),
    "inf": Reward(True, 1.0, {"part": math.inf}),
    "text": Reward(True, 1.0, {"part": "much"}),
    "none": None,
}


class Odd:
    """Gives for a response the reward of that name; examines for as long as it is let."""

    def __init__(self) -> None:
        self.examining = self.dropped = 0

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, prompt: Prompt, response: str, finish_reason: str | None = None) -> Reward:
        if response == "broken":
            raise RewardError(f"it gave {HALF}")
        return REWARDS[response]  # type: ignore[no-any-return]

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        if prompts[0].answer == "now":
            return [Doubt(0, f"holds {HALF}")]
        self.examining += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        return ()


def service_of(scorer: Odd, **limits: int) -> Service:
    service = Service(scorer, ExactReward(kind="exact"), ServerLimits(**limits))
    service.state = "ready"
    return service


def post(url: str, body: dict[str, Any], timeout_s: float = 20.0) -> httpx.Response:
    return httpx.post(url, json=body, timeout=timeout_s, trust_env=False)


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_written_costs_no_other_item_its_verdict(stream: bool) -> None:
    names = ["good", *REWARDS, "good"]
    items = [{"prompt": "", "response": name} for name in names]
    with serving(create_app(service_of(Odd()))) as url:
        reply = post(f"{url}/score?stream={str(stream).lower()}", {"items": items})
    assert reply.status_code == 200
    found = [json.loads(line) for line in reply.text.splitlines()] if stream else reply.json()["results"]
    found = sorted(found, key=lambda result: result["index"])
    assert [result["index"] for result in found] == list(range(len(names)))
    for good in found[0], found[1], found[-1]:
        assert (good["correct"], good["value"], good["extracted"], good["error"]) == (True, 1.0, "4", None)
    results = dict(zip(names, found, strict=True))
    assert (results["half"]["extracted"], results["half"]["parts"]) == ("4?", {"p?": 0.5})
    assert results["failed"]["error"] == "raised ?" and results["failed"]["correct"] is None
    for name in ("nan", "inf", "text", "none"):
        assert results[name]["correct"] is None and results[name]["error"], name
    assert "parts.part: " in results["nan"]["error"]


def test_a_client_gets_a_verdict_on_each_item_though_one_cannot_be_written() -> None:
    async def ask(url: str) -> list[Reward]:
        client = make_client(ServerReward(kind="server", url=url, give_up_after_s=5.0))
        try:
            return await asyncio.gather(*(client.score(prompt(), name) for name in ("good", "nan", "half")))
        finally:
            await client.close()

    with serving(create_app(service_of(Odd()))) as url:
        good, nan, half = asyncio.run(ask(url))
    assert good == REWARDS["good"] and half == Reward(True, 1.0, {"p?": 0.5}, extracted="4?")
    assert nan.correct is None and "cannot be sent" in (nan.error or "")


def test_messages_that_cannot_be_written_are_messages_all_the_same() -> None:
    broken = {"items": [{"prompt": "", "response": "broken"}]}
    with serving(create_app(service_of(Odd()))) as url:
        replies = post(f"{url}/score", broken), post(f"{url}/score?stream=true", broken)
        doubts = post(f"{url}/examine", {"rows": [{"prompt": "", "answer": "now"}]})
        odd_key = httpx.post(f"{url}/score", content=b'{"items": [], "\\ud800": 1}', trust_env=False)
    for reply in replies:
        assert json.loads(reply.text) == {"error": "it gave ?", "retry": False}
    assert doubts.json() == {"doubts": [{"position": 0, "text": "holds ?", "unusable": False}]}
    assert odd_key.status_code == 422


def test_rows_that_are_examined_count_as_waiting_and_are_dropped_with_their_client() -> None:
    scorer = Odd()
    service = service_of(scorer, max_waiting=3)
    rows = {"rows": [{"prompt": ""}] * 2}

    async def run(url: str) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            leaves = asyncio.create_task(client.post(f"{url}/examine", json=rows))
            await until(lambda: scorer.examining == 1)
            assert service.room.waiting == 2
            refused = await client.post(f"{url}/examine", json=rows)
            assert refused.status_code == 429 and refused.json()["retry"] is True and refused.headers["Retry-After"]
            score = {"items": [{"prompt": "", "response": "good"}] * 2}
            assert (await client.post(f"{url}/score", json=score)).status_code == 429
            leaves.cancel()
            await until(lambda: service.room.waiting == 0)
            assert (await client.post(f"{url}/score", json=score)).status_code == 200
        await until(lambda: scorer.dropped == 1)

    with serving(create_app(service)) as url:
        asyncio.run(run(url))


async def until(holds: Any) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
