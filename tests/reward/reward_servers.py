"""Real servers for the tests of served rewards: `dapo reward-server` in a process, and one that does as it is told."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from dapo.config import HttpReward
from dapo.records import Prompt, Reward
from dapo.reward.build import make_client
from server_process import ServerProcess

COMMAND = "import sys; from dapo.commands import main; sys.argv.insert(1, 'reward-server'); main()"


def prompt(answer: str | None = "4", row: int = 0, text: str = "2 + 2 =", **meta: Any) -> Prompt:
    return Prompt(row, text, (), answer, meta)


class RewardServer(ServerProcess):
    """A `dapo reward-server` in a process of its own; started again on the same port."""

    def __init__(self, *words: str, env: dict[str, str] | None = None) -> None:
        super().__init__(COMMAND, *words, env=env, ready=(200, 401))


Answer = Callable[[str, dict[str, Any]], Awaitable[bytes | None]]


class ScriptedServer:
    """HTTP over real sockets, byte by byte as a test says: ``answer`` makes the whole reply to a POST, headers
    included, or None to hang up without one. A GET is answered with 200."""

    def __init__(self, answer: Answer, port: int = 0) -> None:
        self._answer, self.port = answer, port
        self.requests: list[dict[str, Any]] = []
        self.running = self.most_running = 0

    async def __aenter__(self) -> ScriptedServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET"):
                writer.write(response({}))
            else:
                lengths = [line for line in head.splitlines() if line.lower().startswith("content-length:")]
                body = json.loads(await reader.readexactly(int(lengths[0].split(":")[1])))
                self.requests.append(body)
                self.running += 1
                self.most_running = max(self.most_running, self.running)
                try:
                    reply = await self._answer(head, body)
                finally:
                    self.running -= 1
                writer.write(reply or b"")
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of an ASGI application, served in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)


def response(body: Any, status: str = "200 OK", **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {"content-length": str(len(data)), "connection": "close"} | headers
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + data


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def score_all(
    answer: Answer, responses: list[str], row: Prompt | None = None, kind: type = HttpReward, **settings: Any
) -> tuple[list[Reward], ScriptedServer]:
    """Verdicts on ``responses``, asked for at the same time."""

    async def run() -> tuple[list[Reward], ScriptedServer]:
        async with ScriptedServer(answer) as server:
            client = make_client(kind(kind="http" if kind is HttpReward else "server", url=server.url, **settings))
            try:
                return await asyncio.gather(*(client.score(row or prompt(), text) for text in responses)), server
            finally:
                await client.close()

    return asyncio.run(run())


def values(rewards: list[Reward]) -> list[float]:
    assert [reward.error for reward in rewards] == [None] * len(rewards)
    return [reward.value for reward in rewards]


def lengths(body: dict[str, Any]) -> bytes:
    """The reply of a service whose reward is the length of the response."""
    return response({"results": [float(len(item["response"])) for item in body["items"]]})


def line(index: int, value: float | None = 1.0) -> bytes:
    """A result as a reward server streams it."""
    result = {"correct": None, "value": value, "parts": {}, "extracted": None, "error": None}
    return json.dumps({"index": index, "id": None} | result).encode() + b"\n"
