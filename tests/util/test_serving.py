"""What a few clients cannot do to a server: hold it up with half requests, use up its descriptors, fill its memory."""

from __future__ import annotations

import asyncio
import errno
import http.client
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from dapo.util.serving import is_loopback

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

from dapo.config import ExactReward
from dapo.reward.build import make_scorer
from dapo.reward.server import ServerLimits, Service, create_app
from dapo.util.gate import limited
from dapo.util.serving import Server, _Protocol, listening_socket

HALF_HEAD = b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nX:"
HALF_BODY = b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"


@contextmanager
def serving(token: str | None = None, app: object = None, **limits: int) -> Iterator[int]:
    """The reward server without its process, or an app; gives its port."""
    config = ExactReward(kind="exact")
    service = Service(make_scorer(config), config, ServerLimits(**limits), token)
    service.state = "ready"
    server = Server(app or create_app(service), lifespan="off", timeout_graceful_shutdown=1)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(20)


def asked(port: int, headers: dict[str, str] | None = None, path: str = "/health", method: str = "GET") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers=headers or {})
    return connection.getresponse().status


@pytest.mark.parametrize("part", [HALF_HEAD, HALF_BODY, b""])
def test_half_a_request_is_hung_up_on(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"HEAD_S": 0.3, "BODY_S": 0.3, "_LOOK_S": 0.05}.items():
        monkeypatch.setattr(f"dapo.util.serving.{name}", seconds)
    with serving() as port, socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(part)
        assert client.makefile("rb").read() == b""


@pytest.mark.parametrize(("enough", "status"), [(40, b"422"), (10_000, b"")])
def test_a_body_is_waited_for_as_long_as_enough_of_it_comes(
    enough: int, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"BODY_S": 0.5, "_LOOK_S": 0.05, "BODY_BYTES": enough}.items():
        monkeypatch.setattr(f"dapo.util.serving.{name}", value)
    with serving() as port, socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(HALF_BODY.replace(b"100", b"1001"))
        with suppress(ConnectionError):
            for _ in range(20):
                client.sendall(b" " * 50)
                time.sleep(0.1)
        client.settimeout(5)
        found = b""
        with suppress(ConnectionError):
            found = client.recv(100)
        assert found[9:12] == status


def test_bodies_that_are_packed_are_refused_in_words() -> None:
    with serving() as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/score", b"x", {"Content-Encoding": "gzip"})
        answer = connection.getresponse()
        assert answer.status == 415 and b"is sent as gzip; send it as it is" in answer.read()


def test_half_a_second_request_on_the_same_connection_is_hung_up_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"HEAD_S": 0.3, "_LOOK_S": 0.05}.items():
        monkeypatch.setattr(f"dapo.util.serving.{name}", seconds)
    with serving() as port, socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        client.sendall(HALF_HEAD)
        assert b"HTTP" not in client.makefile("rb").read()


def test_connections_that_ask_for_nothing_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo.util.serving.most_connections", lambda: 5)
    with serving() as port, ExitStack() as held:
        clients = [held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(40)]
        for client in clients:
            client.sendall(HALF_HEAD)
        assert asked(port) == 200
        with pytest.raises(ConnectionError):  # the first one made room
            assert clients[0].recv(1) == b""
            raise ConnectionResetError


async def large(scope: object, receive: object, send: Callable[[dict[str, object]], Awaitable[None]]) -> None:
    """An app: 20 MiB for a GET, nothing for a HEAD."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(20 * 2**20)})


def asking(port: int, head: str = "") -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    client.settimeout(20)
    client.connect(("127.0.0.1", port))
    client.sendall(f"GET / HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode() * 2)
    return client


@pytest.mark.parametrize("head", ["", "Connection: close\r\n"])
def test_a_client_that_does_not_read_is_hung_up_on(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BODY_S": 0.5, "_LOOK_S": 0.05}.items():
        monkeypatch.setattr(f"dapo.util.serving.{name}", seconds)
    with serving(app=large) as port, asking(port, head) as client:
        time.sleep(2)
        size = 0
        with suppress(ConnectionError):
            while part := client.recv(2**20):
                size += len(part)
        assert size < 15 * 2**20  # what the kernel held; the rest was given up


def test_a_client_that_reads_slowly_is_not_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BODY_S": 0.8, "_LOOK_S": 0.05}.items():
        monkeypatch.setattr(f"dapo.util.serving.{name}", seconds)
    with serving(app=large) as port, asking(port) as client:
        for _ in range(40):
            time.sleep(0.05)
            assert client.recv(2**15)
        size = 0
        while size < 20 * 2**20:
            size += len(client.recv(2**20))


def test_connections_that_do_not_read_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo.util.serving.most_connections", lambda: 5)
    monkeypatch.setattr("dapo.util.serving._LOOK_S", 0.05)
    with serving(app=large) as port, ExitStack() as held:
        for _ in range(5):
            held.enter_context(asking(port))
        status, until = 0, time.monotonic() + 30
        while status == 0 and time.monotonic() < until:  # until all five are known not to read
            time.sleep(0.2)
            with suppress(OSError, http.client.HTTPException):
                status = asked(port, method="HEAD")
        assert status == 200


def test_a_burst_of_connections_stays_within_the_bound_and_those_that_pipeline_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dapo.util.serving.most_connections", lambda: 5)
    released: list[asyncio.Event] = []
    most = [0]

    async def waits(
        scope: dict[str, str], receive: object, send: Callable[[dict[str, object]], Awaitable[None]]
    ) -> None:
        if scope["method"] == "GET":
            released.append(asyncio.Event())
            await asyncio.wait_for(released[-1].wait(), 20)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    made = _Protocol.connection_made

    def counted(self: _Protocol, transport: asyncio.Transport) -> None:
        made(self, transport)
        most[0] = max(most[0], len(self.connections))

    monkeypatch.setattr(_Protocol, "connection_made", counted)
    with serving(app=waits) as port, ExitStack() as held:
        for _ in range(5):
            held.enter_context(asking(port))  # two requests at once
        until = time.monotonic() + 20
        while len(released) < 5 and time.monotonic() < until:
            time.sleep(0.01)
        assert asked(port, method="HEAD") == 200
        for _ in range(30):
            held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        assert asked(port, method="HEAD") == 200
    assert most[0] == 5


def test_the_most_connections_leave_descriptors_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from dapo.util.serving import most_connections

    for allowed, expected in ((200, 68), (1024, 480), (10**6, 1000), (16, 8)):
        monkeypatch.setattr("resource.getrlimit", lambda _, found=allowed: (found, found))
        assert most_connections() == expected


def test_a_shortage_of_descriptors_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    async def short() -> None:
        server = Server(None)
        for _ in range(1000):
            found = {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "")}
            server._fault(asyncio.get_running_loop(), found)

    with caplog.at_level(logging.WARNING):
        asyncio.run(short())
    assert [record.message for record in caplog.records] == [
        "no file descriptor is left for a new connection (ulimit -n); clients wait"
    ]


def test_a_body_is_read_up_to_its_limit() -> None:
    from starlette.exceptions import HTTPException

    async def read(most: int) -> int:
        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b"12345", "more_body": True}

        bounded = limited(receive, most, "too much")
        return len([await bounded() for _ in range(3)])

    assert asyncio.run(read(15)) == 3
    with pytest.raises(HTTPException) as found:
        asyncio.run(read(14))
    assert found.value.status_code == 413


@pytest.mark.parametrize("path", ["/health", "/ready", "/info", "/score", "/metrics"])
def test_a_reward_server_without_a_token_answers_to_this_machine_s_own_names_only(path: str) -> None:
    """A web page can reach 127.0.0.1 through a name of its own (DNS rebinding)."""
    method = "POST" if path == "/score" else "GET"
    with serving() as port:
        assert asked(port, {"Host": "evil.example:8000"}, path, method) == 403
        assert asked(port, {"Host": f"LOCALHOST:{port}"}, path, method) in (200, 422)
    with serving(token="t") as port:
        headers = {"Host": "gpu7.example", "Authorization": "Bearer t"}
        assert asked(port, headers, path, method) in (200, 422)


def test_the_page_refuses_a_large_body(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    from page_run import page_run, served

    page_run(tmp_path / "r", steps=0)
    with served(tmp_path) as address:
        port = int(address.rpartition(":")[2])
        assert asked(port, {"Content-Length": str(60 * 2**20)}, "/api/votes?run=r", "POST") == 413
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            head = f"POST /api/playground HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            answer = b""
            try:
                for _ in range(60):
                    client.sendall(b"100000\r\n" + b"x" * 2**20 + b"\r\n")
            except OSError:
                pass  # it has hung up
            else:
                answer = client.recv(4096)
            assert b" 200 " not in answer and b" 422 " not in answer


@pytest.mark.parametrize(
    ("host", "own"),
    [
        *((name, True) for name in ("localhost", "LocalHost:80", "127.0.0.1", "127.0.0.1:8000", "127.9.9.9:1")),
        *((name, True) for name in ("::1", "[::1]", "[::1]:80", "localhost.", "localhost.:80")),
        *((name, True) for name in ("[::ffff:127.0.0.1]", "[::ffff:127.0.0.1]:80")),
        *((name, False) for name in ("localhost..", "[::ffff:10.0.0.1]:80", "localhost.:x")),
        *((name, False) for name in ("", ":80", "evil.example", "evil.example:80", "localhost.evil.example")),
        *((name, False) for name in ("127.0.0.1.evil.example", "127.0.0.1:80@evil.example", "0.0.0.0", "10.0.0.1:80")),
        *((name, False) for name in ("localhost:", "localhost:80:80", "[::2]:80", "[::1", "127.0.0.1:x")),
    ],
)
def test_own_names(host: str, own: bool) -> None:
    assert is_loopback(host) is own


def test_replies_go_at_once() -> None:
    """With Nagle's delay the second part of a reply waits for the other side's late acknowledgement: 40 ms."""

    async def work() -> int:
        found = asyncio.get_running_loop().create_future()

        def accepted(_: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            found.set_result(to.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        listening = listening_socket("127.0.0.1", [0])
        async with await asyncio.start_server(accepted, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            delay_off = int(await found)
            writer.close()
        return delay_off

    assert asyncio.run(work()) == 1
