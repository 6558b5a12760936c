"""Clients of reward servers that fail in the ways servers fail (real sockets, replies byte by byte)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fastapi import FastAPI
from reward_servers import Answer, ScriptedServer, lengths, line, prompt, response, score_all, serving, values

from dapo.config import HttpReward, ServerReward, build_config
from dapo.errors import ConfigError, RewardError
from dapo.records import Prompt, Reward
from dapo.reward.build import make_client
from dapo.reward.contract import Scorer
from server_process import free_port


def first(times: int, fault: Callable[[], Awaitable[bytes | None]]) -> Answer:
    """``fault`` so many times, then right answers."""
    left = times

    async def answer(head: str, body: dict[str, Any]) -> bytes | None:
        nonlocal left
        left -= 1
        return await fault() if left >= 0 else lengths(body)

    return answer


def replying(reply: bytes | None) -> Callable[[], Awaitable[bytes | None]]:
    async def fault() -> bytes | None:
        return reply

    return fault


ONE_RESULT = response({"results": [1.0]})


@pytest.mark.parametrize(
    "reply",
    [
        None,  # hangs up
        response({"error": "out of memory"}, "500 Internal Server Error"),
        response(b"<html>bad gateway</html>", "502 Bad Gateway"),
        response({"detail": "busy"}, "503 Service Unavailable"),
        response({"detail": "busy"}, "429 Too Many Requests", retry_after="0"),
        ONE_RESULT[:-5],  # cut off inside of the body
        ONE_RESULT[:20],  # cut off inside of the head
    ],
    ids=["hang-up", "500", "502", "503", "429", "cut-body", "cut-head"],
)
def test_a_fault_that_passes_costs_no_verdict(reply: bytes | None) -> None:
    rewards, server = score_all(first(2, replying(reply)), ["a", "bb", "ccc"])
    assert values(rewards) == [1.0, 2.0, 3.0]
    assert len(server.requests) >= 3


def test_a_server_that_refuses_for_a_while_costs_that_while() -> None:
    async def run() -> tuple[Reward, float]:
        port = free_port()
        client = make_client(HttpReward(kind="http", url=f"http://127.0.0.1:{port}"))
        asked = asyncio.create_task(client.score(prompt(), "abc"))
        begun = time.monotonic()
        await asyncio.sleep(1.0)
        assert not asked.done()
        async with ScriptedServer(first(0, replying(None)), port):
            reward = await asked
        await client.close()
        return reward, time.monotonic() - begun

    reward, seconds = asyncio.run(run())
    assert reward.value == 3.0 and seconds >= 1.0


def test_after_giving_up_the_address_and_the_cause_are_named_and_the_next_is_tried_once() -> None:
    async def run() -> None:
        url = f"http://127.0.0.1:{free_port()}"
        client = make_client(HttpReward(kind="http", url=url, give_up_after_s=1.0, concurrency=1, responses_per_call=1))
        rewards = await asyncio.gather(*(client.score(prompt(), str(k)) for k in range(20)))
        assert {reward.error for reward in rewards} == {f"reward server {url}: cannot connect: Connection refused"}
        assert all(reward.correct is None for reward in rewards)
        await client.close()

    begun = time.monotonic()
    asyncio.run(run())
    assert 1.0 <= time.monotonic() - begun < 10  # a second in all, not a second for each of the twenty


@pytest.mark.parametrize(
    ("results", "cause"),
    [
        ([1.0] * 7, "7 results came for 8 responses"),
        ([1.0] * 9, "9 results came for 8 responses"),
        ({"0": 1.0}, "a list of 8 results was expected, got dict"),
        (None, "a list of 8 results was expected, got NoneType None"),
    ],
)
def test_a_reply_of_the_wrong_length_is_asked_for_once_more_and_then_failed(results: Any, cause: str) -> None:
    async def answer(head: str, body: dict[str, Any]) -> bytes:
        return response({"results": results})

    rewards, server = score_all(answer, list("abcdefgh"))
    assert all((reward.error or "").startswith(f"reward server {server.url}: ") for reward in rewards)
    assert all(cause in (reward.error or "") for reward in rewards)
    assert [len(body["items"]) for body in server.requests] == [8, 8]


@pytest.mark.parametrize(
    "bad",
    ["NaN", "Infinity", "1e31", "null", '"1.0"', "[1.0]", '{"correct": true}', "10000000000000000000000000000000"],
)
def test_a_result_that_is_no_reward_fails_alone(bad: str) -> None:
    async def answer(head: str, body: dict[str, Any]) -> bytes:
        results = [bad if item["response"] == "bad" else "0.5" for item in body["items"]]
        return response(f'{{"results": [{", ".join(results)}]}}'.encode())

    rewards, server = score_all(answer, ["good", "bad", "good"])
    assert [reward.value for reward in rewards if reward.error is None] == [0.5, 0.5]
    failed = rewards[1]
    assert failed.correct is None and failed.error is not None
    assert failed.error.startswith(f"reward server {server.url}: result ")
    assert [len(body["items"]) for body in server.requests] == [3, 1]


def test_a_result_that_is_bad_once_is_right_the_second_time() -> None:
    rewards, _ = score_all(first(1, replying(response(b'{"results": [NaN]}'))), ["abc"])
    assert values(rewards) == [3.0]


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        ("401 Unauthorized", "token_env"),
        ("403 Forbidden", "token_env"),
        ("404 Not Found", "reward.url"),
        ("405 Method Not Allowed", "reward.url"),
        ("302 Found", "reward.url"),
        ("400 Bad Request", "does not take"),
        ("307 Temporary Redirect", "reward.url"),
    ],
)
def test_what_asking_again_cannot_mend_stops_at_once(status: str, hint: str) -> None:
    async def answer(head: str, body: dict[str, Any]) -> bytes:
        return response({"detail": "no such thing"}, status)

    with pytest.raises(RewardError, match=rf"http://127\.0\.0\.1.*{status[:3]}.*no such thing.*{hint}"):
        score_all(answer, ["abc"])


def test_a_slow_batch_is_asked_for_in_smaller_parts() -> None:
    """0.2 s an item, 1 s a request: eight at once never come through."""

    async def answer(head: str, body: dict[str, Any]) -> bytes:
        await asyncio.sleep(0.2 * len(body["items"]))
        return lengths(body)

    rewards, server = score_all(answer, ["x" * k for k in range(1, 9)], timeout_s=1.0)
    assert values(rewards) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert max(len(body["items"]) for body in server.requests) == 8


def test_one_response_that_breaks_the_server_fails_alone() -> None:
    async def answer(head: str, body: dict[str, Any]) -> bytes:
        if any(item["response"] == "poison" for item in body["items"]):
            return response({"error": "segmentation fault"}, "500 Internal Server Error")
        return lengths(body)

    rewards, _ = score_all(answer, ["poison", "bb", "ccc", "dddd"], give_up_after_s=2.0)
    assert values(rewards[1:]) == [2.0, 3.0, 4.0]
    assert "500" in (rewards[0].error or "") and "segmentation fault" in (rewards[0].error or "")


def test_requests_at_once_and_responses_in_one_are_bounded() -> None:
    async def answer(head: str, body: dict[str, Any]) -> bytes:
        await asyncio.sleep(0.02)
        return lengths(body)

    rewards, server = score_all(answer, ["x" * (k % 7) for k in range(100)], concurrency=3, responses_per_call=8)
    assert values(rewards) == [float(k % 7) for k in range(100)]
    assert server.most_running == 3 and max(len(body["items"]) for body in server.requests) == 8


def test_who_is_cancelled_is_not_asked_for() -> None:
    async def run() -> list[str]:
        async def answer(head: str, body: dict[str, Any]) -> bytes:
            await asyncio.sleep(0.1)
            return lengths(body)

        async with ScriptedServer(answer) as server:
            client = make_client(HttpReward(kind="http", url=server.url, concurrency=1, responses_per_call=1))
            calls = [asyncio.create_task(client.score(prompt(), text)) for text in "abc"]
            await asyncio.sleep(0.05)
            calls[1].cancel()
            assert (await calls[0]).value == 1.0 and (await calls[2]).value == 1.0
            await client.close()
            return [item["response"] for body in server.requests for item in body["items"]]

    assert asyncio.run(run()) == ["a", "c"]


# the protocol of dapo reward-server, whose results come one by one


def test_verdicts_that_came_before_the_connection_broke_are_kept() -> None:
    async def answer(head: str, body: dict[str, Any]) -> bytes:
        whole = response(b"".join(line(k, float(item["response"])) for k, item in enumerate(body["items"])))
        # of the first request: two lines and a half
        return whole[: -len(line(0)) * 3 // 2] if len(body["items"]) == 4 else whole

    rewards, server = score_all(answer, ["10", "11", "12", "13"], kind=ServerReward)
    assert values(rewards) == [10.0, 11.0, 12.0, 13.0]
    assert [[item["response"] for item in body["items"]] for body in server.requests] == [
        ["10", "11", "12", "13"],
        ["12", "13"],
    ]


@pytest.mark.parametrize(
    ("lines", "again", "cause"),
    [
        (line(0) + line(0), line(1), "which is not waited for"),
        (line(0) + line(2), line(2), "which is not waited for"),
        (line(0), b"", "0 results came for 1 responses"),
        (line(0) + b"{}\n", b"{}\n", "no result"),
        (line(0) + line(1)[:-1], line(0)[:-1], "cut off"),
        (line(0) + b"nonsense\n", b"nonsense\n", "not JSON"),
    ],
    ids=["twice", "beyond", "too-few", "empty", "no-end", "no-json"],
)
def test_a_stream_that_breaks_the_protocol_gives_no_false_verdict(lines: bytes, again: bytes, cause: str) -> None:
    """``again``: the answer when what is missing is asked for a second time."""

    async def answer(head: str, body: dict[str, Any]) -> bytes:
        return response(lines if len(body["items"]) == 2 else again)

    rewards, server = score_all(answer, ["a", "b"], kind=ServerReward)
    asked = [[item["response"] for item in body["items"]] for body in server.requests]
    assert asked[:2] == [["a", "b"], ["b"]]
    assert rewards[0].value == 1.0
    assert rewards[1].correct is None and rewards[1].error is not None
    assert cause in rewards[1].error


def test_a_contract_broken_in_the_middle_of_a_stream_stops_the_run() -> None:
    async def answer(head: str, body: dict[str, Any]) -> bytes:
        return response(line(0) + b'{"error": "reward function f: expected a float", "retry": false}\n')

    with pytest.raises(RewardError, match="reward function f: expected a float"):
        score_all(answer, ["a", "b"], kind=ServerReward)


# mappings


RENAMED = {"model": "v2", "pairs": [{"q": "$prompt", "a": "$response", "src": "$meta.source"}], "n": [1, 2]}


def test_a_mapping_renames_what_is_sent_and_what_comes_back() -> None:
    async def answer(head: str, body: dict[str, Any]) -> bytes:
        scores = [{"s": {"value": len(pair["a"]), "correct": True, "style": 0.5}} for pair in body["pairs"]]
        return response({"data": {"scores": scores}})

    row = Prompt(3, "2 + 2 =", (), None, {"source": "gsm"})
    rewards, server = score_all(answer, ["a", "bb"], row, request=RENAMED, results="data.scores", value="s")
    assert values(rewards) == [1.0, 2.0]
    assert rewards[0].correct is True and rewards[0].parts == {"style": 0.5}
    pairs = [{"q": "2 + 2 =", "a": "a", "src": "gsm"}, {"q": "2 + 2 =", "a": "bb", "src": "gsm"}]
    assert server.requests == [{"model": "v2", "pairs": pairs, "n": [1, 2]}]


def test_columns_and_text_around_a_field_are_filled_too() -> None:
    async def answer(head: str, body: dict[str, Any]) -> bytes:
        return response([True for _ in body["texts"]])

    request = {"texts": ["Q: $prompt A: $response ($meta.k.deep)"], "golds": ["$answer"], "price": "5$"}
    rewards, server = score_all(answer, ["4", "5"], prompt(k={"deep": 7}), request=request, results="")
    assert values(rewards) == [1.0, 1.0] and rewards[0].correct is True
    texts = ["Q: 2 + 2 = A: 4 (7)", "Q: 2 + 2 = A: 5 (7)"]
    assert server.requests == [{"texts": texts, "golds": ["4", "4"], "price": "5$"}]


def test_a_service_for_one_response_at_a_time() -> None:
    async def answer(head: str, body: dict[str, Any]) -> bytes:
        return response({"score": len(body["text"])})

    settings = {"request": {"text": "$response"}, "results": "score", "responses_per_call": 1}
    rewards, server = score_all(answer, ["a", "bb"], **settings)
    assert values(rewards) == [1.0, 2.0] and len(server.requests) == 2


def test_a_key_that_rows_lack_is_found_before_the_run() -> None:
    config = HttpReward(kind="http", url="http://127.0.0.1:1", request=RENAMED)

    async def examine(scorer: Scorer) -> list[tuple[int, str, bool]]:
        doubts = await scorer.examine([prompt(source="a"), prompt()])
        return [(doubt.position, doubt.text, doubt.unusable) for doubt in doubts]

    assert asyncio.run(examine(make_client(config))) == [
        (1, "has no $meta.source, which the reward server is sent", True)
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"url": "127.0.0.1:8000"}, "reward.url: must be the address"),
        ({"url": "http://a..b/v1"}, "reward.url: must be the address"),
        ({"url": "http://user:hunter2@host"}, "must hold no user and password"),
        ({"request": {"items": ["$itme"]}}, r"\$itme is no field"),
        ({"request": {"items": ["$prompt"]}}, "must send the response"),
        ({"request": {"text": "$response"}}, r"reward\.request: .* set responses_per_call=1"),
    ],
)
def test_a_request_that_cannot_work_is_refused_at_parse(change: dict[str, Any], said: str) -> None:
    reward = {"kind": "http", "url": "http://127.0.0.1:1"} | change
    with pytest.raises(ConfigError, match=said):
        build_config({"model": {"path": "m"}, "reward": reward})


# start, tokens, a real service


def test_start_names_an_address_where_nobody_is() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RewardError, match=rf"{url}.*not ready after 0.5 s: cannot connect: Connection refused"):
        asyncio.run(make_client(ServerReward(kind="server", url=url, give_up_after_s=0.5)).start())


def test_a_token_comes_from_the_environment_and_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[str] = []

    async def answer(head: str, body: dict[str, Any]) -> bytes:
        heads.append(head)
        return lengths(body)

    with pytest.raises(RewardError, match="REWARD_TOKEN"):
        score_all(answer, ["abc"], token_env="REWARD_TOKEN")
    monkeypatch.setenv("REWARD_TOKEN", "hunter2")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nothing goes there
    assert values(score_all(answer, ["abc"], token_env="REWARD_TOKEN")[0]) == [3.0]
    assert "Authorization: Bearer hunter2" in heads[0]


def test_a_users_own_fastapi_service() -> None:
    app = FastAPI()

    @app.post("/judge")
    def judge(body: dict[str, list[dict[str, str]]]) -> dict[str, Any]:
        return {"out": [{"reward": one["solution"] == one["truth"]} for one in body["batch"]]}

    async def run(url: str) -> list[Reward]:
        client = make_client(
            HttpReward(
                kind="http",
                url=f"{url}/judge",
                request={"batch": [{"solution": "$response", "truth": "$answer"}]},
                results="out",
                value="reward",
            )
        )
        await client.start()
        rewards = await asyncio.gather(*(client.score(prompt("4"), text) for text in ("4", "5", "4")))
        await client.close()
        return rewards

    with serving(app) as url:
        rewards = asyncio.run(run(url))
    assert [(reward.correct, reward.value) for reward in rewards] == [(True, 1.0), (False, -1.0), (True, 1.0)]
