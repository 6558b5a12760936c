"""The reward server as a process, and its clients through a crash of it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from reward_servers import COMMAND, RewardServer, prompt, write

from dapo.config import ServerReward
from dapo.errors import ConfigError, RewardError
from dapo.reward.build import make_client
from dapo.util.serving import Address

FUNCTION = """
import time

def f(prompt, response, answer, **meta):
    if response == "raise":
        raise OSError("the disk is gone")
    if response == "nan":
        return float("nan")
    time.sleep(float(response))
    return response == answer
"""
RECIPE = """
reward:
  kind: function
  function: f.py:f
  workers: 2
  timeout_s: 600
  args: {password: hunter2}
"""


def recipe_in(folder: Path) -> str:
    write(folder / "f.py", FUNCTION)
    return str(write(folder / "r.yaml", RECIPE))


@pytest.fixture(scope="module")
def exact():
    with RewardServer("exact", "--max-items", "8", "--max-text", "100", "--max-body-mb", "0.01") as server:
        yield server


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory):
    with RewardServer(recipe_in(tmp_path_factory.mktemp("slow")), "--max-waiting", "3") as server:
        yield server


def post(server: RewardServer, items: list[dict], path: str = "/score", **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"items": items}, headers=headers, timeout=20, trust_env=False)


def get(server: RewardServer, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers=headers, timeout=20, trust_env=False)


def item(response: str, answer: str | None = "4", **more: object) -> dict:
    return {"prompt": "2 + 2 =", "response": response, "answer": answer, **more}


def test_results_come_in_order_with_what_the_items_came_with(exact: RewardServer) -> None:
    reply = post(exact, [item("4", id="a"), item("5", id=7), item(" 4 ")])
    assert reply.status_code == 200
    results = reply.json()["results"]
    assert [(r["index"], r["id"], r["correct"], r["value"], r["extracted"], r["error"]) for r in results] == [
        (0, "a", True, 1.0, "4", None),
        (1, 7, False, -1.0, "5", None),
        (2, None, True, 1.0, "4", None),
    ]


def test_a_stream_gives_the_fast_result_before_the_slow_one(slow: RewardServer) -> None:
    headers = {"Accept": "application/x-ndjson"}
    body = {"items": [item("0.5", "0.5"), item("0", "1")]}
    with httpx.stream("POST", f"{slow.url}/score", json=body, headers=headers, timeout=20, trust_env=False) as reply:
        lines = [json.loads(line) for line in reply.iter_lines()]
    assert [(line["index"], line["correct"]) for line in lines] == [(1, False), (0, True)]


def test_an_item_that_is_not_as_the_schema_says_is_named(exact: RewardServer) -> None:
    reply = post(exact, [item("4"), {"prompt": "p", "response": 4}])
    assert reply.status_code == 422 and reply.json()["error"].startswith("items[1].response: ")
    assert reply.json()["retry"] is False
    assert "items[0].anwser" in post(exact, [item("4", anwser="4")]).json()["error"]
    assert httpx.post(f"{exact.url}/score", content=b"{", trust_env=False).status_code == 422


def test_what_is_too_much_is_refused_with_the_limit(exact: RewardServer) -> None:
    long = post(exact, [item("4"), item("x" * 101)])
    assert (long.status_code, long.json()["error"]) == (
        422,
        "items[1].response: 101 characters; this server takes 100 (--max-text)",
    )
    assert post(exact, [item("4")] * 9).status_code == 422
    assert post(exact, [item("x" * 20_000)]).status_code == 413

    def in_chunks():
        yield b'{"items": ['
        for _ in range(2000):
            yield b" " * 10

    assert httpx.post(f"{exact.url}/score", content=in_chunks(), trust_env=False).status_code == 413


def test_schema_health_and_metrics_are_published(exact: RewardServer) -> None:
    schemas = (published := get(exact, "/openapi.json").json())["components"]["schemas"]
    assert "/score" in published["paths"] and schemas["ScoreRequest"]["properties"].keys() == {"items"}
    assert {"correct", "value", "parts", "extracted", "error"} <= set(schemas["Result"]["required"])
    assert get(exact, "/health").json() == {"state": "ready"}

    def count(name: str) -> float:
        lines = get(exact, "/metrics").text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), 0.0)

    before = count("dapo_reward_items_total"), count("dapo_reward_seconds_count")
    post(exact, [item("4"), item("5")])
    assert (count("dapo_reward_items_total"), count("dapo_reward_seconds_count")) == (before[0] + 2, before[1] + 2)
    assert count('dapo_reward_requests_total{code="200",path="/score"}') >= 1
    assert count("dapo_reward_waiting") == 0


def test_info_shows_the_reward_without_its_secrets(slow: RewardServer) -> None:
    reply = get(slow, "/info")
    assert reply.json()["kind"] == "function" and reply.json()["reward"]["workers"] == 2
    assert "hunter2" not in reply.text


def test_more_than_can_wait_is_answered_with_429(slow: RewardServer) -> None:
    thread = threading.Thread(target=post, args=(slow, [item("1"), item("1")]))
    thread.start()
    time.sleep(0.3)
    refused = post(slow, [item("0"), item("0")])
    assert post(slow, [item("0", "0")]).json()["results"][0]["correct"] is True  # there is room for one
    thread.join()
    assert refused.status_code == 429 and refused.headers["Retry-After"] == "1" and refused.json()["retry"] is True
    assert post(slow, [item("0"), item("0")]).status_code == 200


def test_a_client_that_went_away_leaves_no_work_behind(slow: RewardServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        body = {"items": [item("2"), item("2"), item("2")]}
        httpx.post(f"{slow.url}/score", json=body, timeout=0.3, trust_env=False)
    end = time.monotonic() + 20
    while "dapo_reward_waiting 0.0" not in get(slow, "/metrics").text:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert post(slow, [item("0", "0")]).json()["results"][0]["correct"] is True


def test_an_exception_is_a_failed_score_and_a_broken_contract_an_error(slow: RewardServer) -> None:
    failed = post(slow, [item("raise")]).json()["results"][0]
    assert failed["correct"] is None and "the disk is gone" in failed["error"]
    broken = post(slow, [item("nan")])
    assert broken.status_code == 500 and broken.json()["retry"] is False
    assert "f.py:f" in broken.json()["error"] and "nan" in broken.json()["error"]

    async def ask() -> None:
        client = make_client(ServerReward(kind="server", url=slow.url))
        try:
            assert "the disk is gone" in ((await client.score(prompt(), "raise")).error or "")
            with pytest.raises(RewardError, match=r"127\.0\.0\.1.*f\.py:f.*nan"):
                await client.score(prompt(), "nan")
        finally:
            await client.close()

    asyncio.run(ask())


def test_a_server_tells_a_client_what_it_thinks_of_the_rows() -> None:
    async def ask(url: str):
        client = make_client(ServerReward(kind="server", url=url))
        await client.start()
        rows = [prompt("4"), prompt("Tuesday"), *[prompt(str(k)) for k in range(70)], prompt("\\frac{1}{")]
        doubts = await client.examine(rows)
        verdict = await client.score(prompt("1/2"), "so it is \\boxed{0.5}")
        await client.close()
        return [doubt.position for doubt in doubts], verdict

    with RewardServer("math", "reward.workers=1") as server:
        positions, verdict = asyncio.run(ask(server.url))
    assert set(positions) <= {1, 72} and 72 in positions
    assert verdict.correct is True and verdict.value == 1.0


def test_the_token_is_asked_for_everywhere_but_for_health() -> None:
    with RewardServer("exact", "--token-env", "SECRET", env={"SECRET": "hunter2"}) as server:
        assert get(server, "/health").status_code == 200
        for path in ("/ready", "/metrics", "/info", "/openapi.json", "/nothing"):
            assert get(server, path).status_code == 401
        assert get(server, "/info", Authorization="Bearer hunter").status_code == 401
        assert get(server, "/info", Authorization="Bearer hunter2").status_code == 200
        assert post(server, [item("4")]).status_code == 401
        assert post(server, [item("4")], Authorization="Bearer hunter2").status_code == 200
        _, output = server.stop()
    assert "hunter2" not in output


def run_server(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COMMAND, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_an_open_address_without_a_token_is_refused() -> None:
    for host in ("0.0.0.0", "::", "example.org", "", "127.0.0.1.example.org"):
        with pytest.raises(ConfigError, match="--token-env"):
            Address(host)
        assert Address(host, token="hunter2").token == "hunter2"
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert Address(host).token is None
    done = run_server("exact", "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2 and "--token-env" in done.stderr and "Traceback" not in done.stderr
    done = run_server("exact", "--token-env", "NOT_SET_ANYWHERE")
    assert done.returncode == 2 and "NOT_SET_ANYWHERE" in done.stderr


def test_a_port_that_is_taken_and_a_reward_that_cannot_start_are_messages(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_server("exact", "--port", str(port))
    assert done.returncode == 2 and f"127.0.0.1, port {port}" in done.stderr and "Traceback" not in done.stderr
    recipe = write(tmp_path / "r.yaml", "reward: {kind: function, function: gone.py:f}")
    done = run_server(str(recipe), "--port", "0")
    assert done.returncode == 1 and "gone.py" in done.stderr and "Traceback" not in done.stderr


def test_sigterm_finishes_what_runs_in_bounded_time_and_takes_nothing_new(tmp_path: Path) -> None:
    with RewardServer(recipe_in(tmp_path), "--drain-s", "3") as server:
        replies: list[httpx.Response] = []
        running = threading.Thread(target=lambda: replies.append(post(server, [item("1.5", "1.5")])))
        running.start()
        with endless_request(server):
            time.sleep(0.5)
            assert server.process is not None
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            refused = post(server, [item("0")])
            assert refused.status_code == 503 and refused.headers["Connection"].lower() == "close"
            assert get(server, "/ready").status_code == 503 and get(server, "/health").status_code == 200
            running.join()
            assert replies[0].json()["results"][0]["correct"] is True
            assert server.process.wait(timeout=20) == 0


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with RewardServer(recipe_in(tmp_path), "--drain-s", "600") as server, endless_request(server):
        time.sleep(0.5)
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        assert server.stop()[0] == 128 + signal.SIGTERM


@contextmanager
def endless_request(server: RewardServer) -> Iterator[None]:
    """The server works for 300 s on what a client waits for."""
    body = json.dumps({"items": [item("300")]})
    kind = "Host: 127.0.0.1\r\nContent-Type: application/json"
    head = f"POST /score HTTP/1.1\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}{body}".encode())
        yield


CLIENTS, REQUESTS = 64, 100


def test_every_item_gets_exactly_one_right_verdict_though_the_server_is_killed() -> None:
    """64 clients x 100 requests over HTTP; the server is killed with SIGKILL in the middle and started again.

    Every item has an answer of its own and every third response is wrong, so that a verdict that belongs to another
    item, or one that is made up, shows.
    """
    verdicts: dict[tuple[int, int], list[tuple[bool | None, float, str | None, str | None]]] = {}
    half = CLIENTS * REQUESTS // 2

    async def one_client(number: int, url: str, halfway: asyncio.Event) -> None:
        client = make_client(ServerReward(kind="server", url=url, give_up_after_s=120, timeout_s=60))
        try:
            for k in range(REQUESTS):
                answer = f"{number}/{k}"
                response = answer if k % 3 else f"{answer}?"
                reward = await client.score(prompt(answer, row=k), response)
                seen = (reward.correct, reward.value, reward.extracted, reward.error)
                verdicts.setdefault((number, k), []).append(seen)
                if len(verdicts) >= half:
                    halfway.set()
        finally:
            await client.close()

    async def run(server: RewardServer) -> int:
        halfway = asyncio.Event()
        clients = [asyncio.create_task(one_client(k, server.url, halfway)) for k in range(CLIENTS)]
        await halfway.wait()
        at_the_kill = len(verdicts)
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(0.5)
        assert len(verdicts) < CLIENTS * REQUESTS, "the server was killed too late to matter"
        server.start()
        await asyncio.gather(*clients)
        return at_the_kill

    with RewardServer("exact") as server:
        at_the_kill = asyncio.run(run(server))
    assert half <= at_the_kill < CLIENTS * REQUESTS
    assert verdicts == {
        (number, k): [(True, 1.0, f"{number}/{k}", None) if k % 3 else (False, -1.0, f"{number}/{k}?", None)]
        for number in range(CLIENTS)
        for k in range(REQUESTS)
    }
