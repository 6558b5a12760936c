"""What clients must not be able to do: get in without a token or by another name, use up the server, or break it."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dapo.serve.model import Limits
from served import Served, served


def raw(server: Served, *sent: bytes, wait: float = 10) -> bytes:
    """The answer to bytes as they are."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait) as connection:
        for part in sent:
            connection.sendall(part)
        found = b""
        while chunk := connection.recv(65536):
            found += chunk
        return found


def request(body: bytes, *headers: str, path: str = "/v1/completions", host: str = "127.0.0.1") -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", "Connection: close", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def ask(server: Served, body: bytes, *headers: str, **how: str) -> tuple[int, dict[str, Any]]:
    head, _, content = raw(server, request(body, *headers, **how)).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


GOOD = b'{"model": "tiny", "prompt": "1+2=", "max_tokens": 2}'


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Served]:
    with served(folder, token="hunter2") as found:
        yield found


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000,
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "\\ud800", "prompt": "1"}',
        b'{"model": "tiny", "prompt": "1", "\\ud800": 1}',
        b'{"model": "tiny", "prompt": "1", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "1", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "1", "temperature": true}',
        b'{"model": "tiny", "prompt": "1", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "1", "max_tokens": 1' + b"0" * 300 + b"}",
        b'{"model": "tiny", "prompt": "1", "n": 1000000000}',
        b'{"model": "tiny", "prompt": "1", "seed": -1}',
        b'{"model": "tiny", "prompt": "1", "seed": 1' + b"0" * 30 + b"}",
        b'{"model": "tiny", "prompt": [1, "a"]}',
        b'{"model": "tiny", "prompt": [[]]}',
        b'{"model": "tiny", "prompt": [-1]}',
        b'{"model": "tiny", "prompt": [true]}',
        b'{"model": "tiny", "prompt": {"a": 1}}',
        b'{"model": "tiny", "prompt": "1", "stop": ["\\ufffd"]}',
        b'{"model": "tiny", "prompt": "1", "stop": [' + b'"x",' * 1000 + b'"y"]}',
        b'{"model": "tiny", "prompt": [' + b"null," * 1_000_000 + b"null]}",
        b'{"model": "tiny", "prompt": [' + b'"a",' * 1_000_000 + b'"b"]}',
    ],
    ids=lambda body: str(body[-24:]),
)
def test_malformed_bodies_are_refused_at_once_and_said_to_be(server: Served, body: bytes) -> None:
    started = time.perf_counter()
    status, answer = ask(server, body)
    assert status in (400, 404) and answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"
    assert len(answer["error"]["message"]) < 2000 and time.perf_counter() - started < 5


@pytest.mark.parametrize(
    "messages",
    ["[]", "[1]", '[{"role": "user"}]', '[{"content": "x"}]', '[{"role": 1, "content": "x"}]', '"x"', "[[]]"],
)
def test_malformed_messages_too(server: Served, messages: str) -> None:
    body = f'{{"model": "tiny", "messages": {messages}}}'.encode()
    status, answer = ask(server, body, path="/v1/chat/completions")
    assert status == 400 and "messages" in answer["error"]["message"]


def test_too_large_bodies_end_as_they_are_announced_or_sent(folder: Path) -> None:
    with served(folder, limits=Limits(max_body=1000)) as server:
        assert ask(server, b" " * 2000)[0] == 413
        chunks = (b" " * 100 for _ in range(20))
        got = httpx.post(f"{server.url}/v1/completions", content=chunks, trust_env=False)
        assert got.status_code == 413 and got.json()["error"]["type"] == "invalid_request_error"
        lies = request(GOOD).replace(b"Content-Length: ", b"Content-Length: 9999999999999999999999")
        assert b" 413 " in raw(server, lies) or b" 400 " in raw(server, lies)
        assert ask(server, GOOD)[0] == 200


def test_a_small_body_is_read_before_its_refusal_is_sent(folder: Path) -> None:
    """A socket that is closed with bytes unread resets the connection, and the answer may be lost."""
    with served(folder, limits=Limits(max_body=1000)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        head, _, body = request(b" " * 2000).partition(b"\r\n\r\n")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head + b"\r\n\r\n")
            assert select.select([connection], [], [], 0.3)[0] == []
            connection.sendall(body)
            assert b" 413 " in connection.recv(65536)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8000", "[::1].evil", ""])
def test_without_a_token_only_names_of_this_machine_pass(server: Served, host: str) -> None:
    """A page elsewhere that points its own name at 127.0.0.1."""
    status, answer = ask(server, GOOD, host=host)
    assert status == 403 and answer["error"]["type"] == "permission_error"
    assert ask(server, GOOD, host="localhost:1")[0] == 200


def test_a_page_elsewhere_cannot_have_its_forms_read_as_json(server: Served) -> None:
    """A form's content type needs no permission of the browser's; JSON in it must not be taken."""
    for kind in (b"text/plain", b"application/x-www-form-urlencoded", b"text/plain; application/json", b""):
        assert b" 400 " in raw(server, request(GOOD).replace(b"application/json", kind))
    assert b" 200 " in raw(server, request(GOOD).replace(b"application/json", b"Application/JSON; charset=utf-8"))


def test_a_fault_of_the_servers_is_told_logged_and_frees_what_was_held(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("of its own")

    with monkeypatch.context() as patched:
        patched.setattr("dapo.serve.model.written", fault)
        for more in ({}, {"stream": True}):
            answer = server.complete(**more)
            assert answer.status_code == 500 and "ZeroDivisionError: of its own" in answer.json()["error"]["message"]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError] * 2
    assert server.model.room.waiting == 0 and server.complete(max_tokens=2).status_code == 200
    assert server.post("/v1/completions/", prompt="1").status_code == 404
    assert httpx.get(f"{server.url}/v1/completions", trust_env=False).status_code == 405


@pytest.mark.parametrize(
    "header",
    [
        "X: 1",
        "Authorization: hunter2",
        "Authorization: Bearer",
        "Authorization: Bearer hunter",
        "Authorization: Bearer hunter22",
        "Authorization: Basic hunter2",
        "Authorization: Bearer hunter2\x00",
        "Authorization: Bearer \xff",
        "Cookie: dapo_token=hunter2",
        "X-Forwarded-For: 127.0.0.1",
    ],
)
def test_nothing_but_the_token_opens(guarded: Served, header: str) -> None:
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/weights",
        "/nothing",
        "//v1/completions",
        "/v1/../health",
    ):
        answer = raw(guarded, request(GOOD, header, path=path))
        assert answer.split()[1] in (b"401", b"400"), answer
    for path in ("/v1/models", "/metrics", "/ready", "/openapi.json", "/health/", "/health?x", "/%68ealth"):
        got = httpx.get(f"{guarded.url}{path}", headers={}, trust_env=False).status_code
        assert got == 401 or path in ("/health?x", "/%68ealth")
    assert ask(guarded, GOOD, "Authorization: Bearer hunter2")[0] == 200


def test_smuggled_requests_and_odd_headers_break_nothing(server: Served) -> None:
    both = request(GOOD + b"\r\n\r\n", "Transfer-Encoding: chunked")
    assert raw(server, both).split()[1] in (b"400", b"413")
    assert b" 400 " in raw(server, b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
    assert b" 4" in raw(server, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n")
    got = httpx.post(f"{server.url}/v1/completions", content=GOOD, headers={"X-Y": "a" * 5000}, trust_env=False)
    assert got.status_code in (200, 400)
    assert ask(server, GOOD)[0] == 200


def test_a_client_that_goes_away_frees_its_slots_and_its_tokens_are_counted(folder: Path) -> None:
    with served(folder) as server:
        goes_away(server)


def goes_away(server: Served) -> None:
    body = json.dumps({"model": "tiny", "prompt": "1=", "n": 64, "max_tokens": 60, "temperature": 3})
    for stream in (b"false", b"true"):
        sent = request(body.encode()[:-1] + b', "stream": ' + stream + b"}")
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
            end = time.monotonic() + 10
            while not server.model.room.waiting:
                assert time.monotonic() < end
                time.sleep(0.001)
            if stream == b"true":
                connection.recv(10)
        server.wait_idle()
    told = httpx.get(f"{server.url}/metrics", trust_env=False).text
    assert float(told.split('dapo_policy_tokens_total{kind="response"} ')[1].split()[0]) > 0  # of the broken stream


def test_one_that_does_not_read_costs_nobody_else(server: Served) -> None:
    """Its answer is larger than what the sockets take; others are answered meanwhile."""
    body = {"model": "tiny", "prompt": "1=", "n": 100, "max_tokens": 60, "temperature": 3, "stream": True}
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    host, port = server.url.removeprefix("http://").split(":")
    slow.connect((host, int(port)))
    try:
        slow.sendall(request(json.dumps(body | {"logprobs": 0, "return_token_ids": True}).encode()))
        time.sleep(0.2)
        assert server.complete("1=", max_tokens=5, seed=1).status_code == 200
        end = time.monotonic() + 30
        while server.busy:  # what it asked for is written all the same
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        slow.close()
    server.wait_idle()


def test_a_request_that_takes_too_long_is_given_up(folder: Path) -> None:
    with served(folder, limits=Limits(seconds=0.2)) as server:
        server.model.doors["tiny"].hold()  # as while weights change
        got = server.complete()
        assert got.status_code == 504 and "--timeout-s" in got.json()["error"]["message"]
        server.model.doors["tiny"].release()
        assert server.complete(max_tokens=2).status_code == 200
        assert server.model.room.waiting == 0


def test_requests_wait_or_begin_again_while_weights_change(server: Served) -> None:
    model = server.model
    whole = server.complete("1=", seed=5, max_tokens=60, temperature=2).json()["choices"][0]["text"]
    door = model.doors["tiny"]
    engine = door.engines[0]

    def begun(**body: Any) -> tuple[threading.Thread, list[httpx.Response]]:
        found: list[httpx.Response] = []
        ask = {"seed": 5, "max_tokens": 60, "temperature": 2, **body}
        thread = threading.Thread(target=lambda: found.append(server.complete("1=", **ask)))
        thread.start()
        return thread, found

    asyncio.run(engine.pause())  # so that the requests are surely under way
    whole_thread, answers = begun()
    end = time.monotonic() + 10
    while not server.busy:
        assert time.monotonic() < end
        time.sleep(0.01)
    door.hold()
    asyncio.run(door._restart())
    later, others = begun(n=2)
    asyncio.run(engine.resume())
    time.sleep(0.2)
    assert not answers and not others
    door.release()
    whole_thread.join(20)
    later.join(20)
    assert answers[0].json()["choices"][0]["text"] == whole
    assert others[0].json()["choices"][0]["text"] == whole


def test_what_is_refused_anyway_is_refused_before_its_texts_are_read(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(type(server.model.prompting.template), "encode_text", read)
    assert server.complete(model="gpt-4").status_code == 404
    assert server.complete(n=1025).status_code == server.complete(["1"] * 1025).status_code == 400
    monkeypatch.setattr(server.model.room, "waiting", server.model.limits.max_waiting)
    assert server.complete().status_code == 429
    chat = [{"role": "user", "content": "x" * 500}, {"role": "user", "content": "x" * 301}]
    monkeypatch.setattr(server.model.room, "waiting", 0)
    said = server.post("/v1/chat/completions", messages=chat).json()["error"]
    assert said["param"] == "messages" and "801 characters" in said["message"]
    assert server.model.room.waiting == 0
