"""Clients of reward servers: what is too much for a server, who leaves while it fails, what it repeats of secrets."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from reward_servers import Answer, ScriptedServer, lengths, line, prompt, response, score_all, serving, values

from dapo.config import ExactReward, HttpReward, KServeReward, ServerReward
from dapo.errors import RewardError
from dapo.records import Prompt, Reward
from dapo.reward.build import make_client, make_scorer
from dapo.reward.client import scorer as scorer_module
from dapo.reward.contract import Doubt
from dapo.reward.server import ServerLimits, Service, create_app
from dapo.util.http.secrecy import shown
from server_process import free_port

BUSY = response({"detail": "busy"}, "503 Service Unavailable")


# who leaves, and idle times


def test_an_idle_time_is_not_a_time_without_an_answer() -> None:
    """A caller leaves while the server is busy; after a time in which nobody asks, a short fault must be waited for."""
    faults = 10**6

    async def answer(head: str, body: dict[str, Any]) -> bytes:
        nonlocal faults
        faults -= 1
        return BUSY if faults >= 0 else lengths(body)

    async def run() -> Reward:
        nonlocal faults
        async with ScriptedServer(answer) as server:
            client = make_client(HttpReward(kind="http", url=server.url, give_up_after_s=1.0))
            leaves = asyncio.create_task(client.score(prompt(), "a"))
            await asyncio.sleep(0.3)
            leaves.cancel()
            await asyncio.sleep(1.2)
            faults = 1
            reward = await client.score(prompt(), "abc")
            await client.close()
            return reward

    assert values([asyncio.run(run())]) == [3.0]


def test_who_leaves_does_not_cut_the_pause_short_that_the_server_asked_for() -> None:
    times: list[float] = []

    async def answer(head: str, body: dict[str, Any]) -> bytes:
        times.append(time.monotonic())
        await asyncio.sleep(0.2)
        busy = response({"detail": "busy"}, "429 Too Many Requests", retry_after="1")
        return busy if len(times) == 1 else lengths(body)

    async def run() -> Reward:
        async with ScriptedServer(answer) as server:
            client = make_client(HttpReward(kind="http", url=server.url))
            leaves, stays = (asyncio.create_task(client.score(prompt(), text)) for text in ("a", "abc"))
            await asyncio.sleep(0.1)
            leaves.cancel()
            reward = await stays
            await client.close()
            return reward

    assert values([asyncio.run(run())]) == [3.0]
    assert times[1] - times[0] >= 1.0


# replies that are broken in two ways


def test_one_broken_reply_is_one_strike_however_broken_it_is() -> None:
    replies = [response(line(0, None)), response(line(0, 5.0) + line(1, 6.0))]

    async def answer(head: str, body: dict[str, Any]) -> bytes:
        return replies.pop(0)  # the first: no value for item 0, and nothing for item 1

    rewards, _ = score_all(answer, ["a", "b"], kind=ServerReward)
    assert values(rewards) == [5.0, 6.0] and replies == []


# too much for the server


@pytest.mark.parametrize("status", ["413 Content Too Large", "422 Unprocessable"])
def test_what_a_server_does_not_take_is_sent_in_smaller_parts_and_alone_is_a_failed_score(status: str) -> None:
    async def answer(head: str, body: dict[str, Any]) -> bytes:
        texts = [item["response"] for item in body["items"]]
        return response({"detail": "no more than 3"}, status) if sum(map(len, texts)) > 3 else lengths(body)

    begun = time.monotonic()
    rewards, server = score_all(answer, ["a", "bb", "cccc", "ddd", "", "f"])
    assert values([*rewards[:2], *rewards[3:]]) == [1.0, 2.0, 3.0, 0.0, 1.0]
    assert rewards[2] == Reward(None, 0.0, error=f"reward server {server.url}: {status}: no more than 3")
    assert len(server.requests) <= 2 * 6
    assert time.monotonic() - begun < 30  # not for give_up_after_s


def reward_server(scorer: Any = None, **limits: int) -> tuple[Any, Service]:
    config = ExactReward(kind="exact")
    service = Service(scorer or make_scorer(config), config, ServerLimits(**limits))
    service.state = "ready"
    return create_app(service), service


class Examiner:
    """Doubts every row whose answer is "?"."""

    async def examine(self, prompts: list[Prompt]) -> list[Doubt]:
        return [Doubt(k, f"row {row.row}") for k, row in enumerate(prompts) if row.answer == "?"]


@pytest.mark.parametrize("limits", [{"max_body": 4096}, {"max_items": 8}], ids=["413", "422"])
def test_rows_that_are_too_many_for_one_request_are_examined_in_parts(limits: dict[str, int]) -> None:
    rows = [prompt("?" if k in (0, 33, 70) else "4", row=k, text="x" * 100) for k in range(71)]

    async def examine(url: str) -> list[Doubt]:
        client = make_client(ServerReward(kind="server", url=url))
        try:
            return list(await client.examine(rows))
        finally:
            await client.close()

    with serving(reward_server(Examiner(), **limits)[0]) as url:
        doubts = asyncio.run(examine(url))
    assert doubts == [Doubt(0, "row 0"), Doubt(33, "row 33"), Doubt(70, "row 70")]


def test_a_row_that_the_server_does_not_take_alone_is_unusable() -> None:
    async def examine(url: str) -> list[Doubt]:
        client = make_client(ServerReward(kind="server", url=url))
        try:
            return list(await client.examine([prompt(), prompt(text="x" * 5000), prompt("?")]))
        finally:
            await client.close()

    with serving(reward_server(Examiner(), max_body=4096)[0]) as url:
        large, doubted = asyncio.run(examine(url))
    assert (large.position, large.unusable) == (1, True) and "does not take it: 413" in large.text
    assert doubted == Doubt(2, "row 0")


# rows are examined with patience


def examine_one(answer: Answer, late_s: float = 0.0, **settings: Any) -> list[Doubt]:
    """What a server says of one row that is asked ``late_s`` before there is one."""

    async def run() -> list[Doubt]:
        server = ScriptedServer(answer, free_port())
        client = make_client(ServerReward(kind="server", url=f"http://127.0.0.1:{server.port}", **settings))
        asked = None
        if late_s:
            asked = asyncio.create_task(client.examine([prompt()]))
            await asyncio.sleep(late_s)
        try:
            async with server:
                return list(await (asked or client.examine([prompt()])))
        finally:
            await client.close()

    return asyncio.run(run())


def test_a_request_that_took_all_its_time_is_made_again() -> None:
    left = 1

    async def answer(head: str, body: dict[str, Any]) -> bytes:
        nonlocal left
        left -= 1
        if left >= 0:
            await asyncio.sleep(1.0)
        return response({"doubts": []})

    assert examine_one(answer, timeout_s=0.5, give_up_after_s=0.5) == []


def test_rows_are_waited_for_as_long_as_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_module, "_REACHED_WITHIN_S", 0.1)

    async def answer(head: str, body: dict[str, Any]) -> bytes:
        return response({"doubts": []})

    assert examine_one(answer, late_s=0.8, give_up_after_s=60.0) == []


# secrets

TOKEN = "t0ken-hunter2-abcdef"
REPEATED = {
    "later": response({"error": f"header Bearer {TOKEN}", "retry": True}, "502 Bad Gateway"),
    "refused": response({"error": f"wrong token {TOKEN}"}, "401 Unauthorized"),
    "moved": response({}, "307 Temporary Redirect", location=f"http://127.0.0.1:1/?key={TOKEN}"),
    "too-much": response({"error": TOKEN}, "413 Content Too Large"),
    "no-json": response(f"debug {TOKEN}".encode()),
    "cut": response(b"x" * 65 + TOKEN.encode()),  # 80 bytes are shown: 15 of the token
    "long": response(b"x" * 250 + TOKEN.encode() * 9, "400 Bad Request"),
    "result": response({"results": [{"error": f"no grade for {TOKEN}"}]}),
    "bad-result": response({"results": [{TOKEN: 1}]}),
    "key": response({TOKEN: 1}),
}


def said_by(reply: bytes, query: str = "", **settings: Any) -> str:
    async def answer(head: str, body: dict[str, Any]) -> bytes:
        return reply

    async def run() -> str:
        async with ScriptedServer(answer) as server:
            client = make_client(HttpReward(kind="http", url=server.url + query, give_up_after_s=0.1, **settings))
            try:
                return str((await client.score(prompt(), "a")).error)
            except RewardError as error:
                return str(error)
            finally:
                await client.close()

    return asyncio.run(run())


@pytest.mark.parametrize("reply", REPEATED.values(), ids=REPEATED)
def test_a_token_that_the_server_repeats_is_not_shown(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    said = said_by(reply, token_env="REWARD_TOKEN")
    assert said.startswith("reward server http://127.0.0.1:") and "***" in said
    assert not any(TOKEN[begin : begin + 8] in said for begin in range(len(TOKEN) - 7)), said


@pytest.mark.parametrize("reply", REPEATED.values(), ids=REPEATED)
def test_a_key_in_the_query_of_the_address_is_not_shown(reply: bytes) -> None:
    said = said_by(reply, f"/score?api_key={TOKEN}&v=1")
    assert "/score?...: " in said and "***" in said
    assert not any(TOKEN[begin : begin + 8] in said for begin in range(len(TOKEN) - 7)), said


def test_a_key_in_the_query_is_sent_and_not_shown_of_a_server_that_is_not_there() -> None:
    heads: list[str] = []

    async def answer(head: str, body: dict[str, Any]) -> bytes:
        heads.append(head)
        return lengths(body)

    async def run() -> None:
        async with ScriptedServer(answer) as server:
            client = make_client(HttpReward(kind="http", url=f"{server.url}/score?api_key={TOKEN}"))
            assert (await client.score(prompt(), "abc")).value == 3.0
            await client.close()

    asyncio.run(run())
    assert f"POST /score?api_key={TOKEN} HTTP/1.1" in heads[0]
    url = f"http://127.0.0.1:{free_port()}/score?api_key={TOKEN}"
    client = make_client(HttpReward(kind="http", url=url, give_up_after_s=0.1))
    with pytest.raises(RewardError, match=r"/score\?\.\.\.: not ready") as raised:
        asyncio.run(client.start())
    assert TOKEN not in str(raised.value)


def test_a_token_in_a_doubt_or_in_a_line_of_a_stream_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    doubt = {"position": 0, "text": f"not with {TOKEN}", "unusable": False}

    async def answer(head: str, body: dict[str, Any]) -> bytes:
        if "rows" in body:
            return response({"doubts": [doubt]})
        return response(json.dumps({"error": f"function f: {TOKEN}", "retry": False}).encode() + b"\n")

    assert examine_one(answer, token_env="REWARD_TOKEN") == [Doubt(0, "not with ***")]
    with pytest.raises(RewardError, match=r"function f: \*\*\*$"):
        score_all(answer, ["a"], kind=ServerReward, token_env="REWARD_TOKEN")


def test_an_address_is_shown_without_what_may_be_secret() -> None:
    assert shown("https://user:hunter2@host:8000/a/b?key=hunter2#c") == "https://host:8000/a/b?..."
    assert shown("http://[::1]:8000/") == "http://[::1]:8000"


def test_a_query_is_for_addresses_that_are_used_as_they_are() -> None:
    for kind, more in ((ServerReward, {}), (KServeReward, {"model": "m"})):
        for url in ("http://host?", "http://host/v2?key=1", "http://host#part"):
            with pytest.raises(ValueError, match=r"must hold no query.*token_env"):
                kind(kind="server" if kind is ServerReward else "kserve", url=url, **more)


def test_an_outage_is_said_once_and_the_next_one_again(caplog: pytest.LogCaptureFixture) -> None:
    replies = [BUSY, BUSY, None, BUSY, None]

    async def answer(head: str, body: dict[str, Any]) -> bytes:
        return replies.pop(0) or lengths(body)

    score_all(answer, ["a", "bc"], responses_per_call=1, concurrency=1)
    said = [record.getMessage() for record in caplog.records if record.name == scorer_module.__name__]
    assert len(said) == 2 and all(
        "does not answer: " in text and "asking again for up to 600 s" in text for text in said
    )


def test_a_long_line_in_small_pieces_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x" * 300_000

    async def answer(head: str, body: dict[str, Any]) -> bytes:
        line = {"index": 0, "correct": True, "value": 1.0, "parts": {}, "error": None, "extracted": text}
        return response(json.dumps(line).encode() + b"\n")

    ((reward,), _) = score_all(answer, ["a"], kind=ServerReward)
    assert reward.extracted is not None and reward.extracted.endswith("(cut, it had 300,000 characters)")
