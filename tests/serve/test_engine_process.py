"""Engines in a process of their own, as `dapo serve` has them on a GPU: the same answers, and what becomes of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from dapo.errors import ConfigError, ModelError
from dapo.observe.progress import QuietListener
from dapo.rollout.engine import Request, Sampling
from dapo.rollout.process import EngineProcess, ProcessEngine, ProcessError
from dapo.serve.door import Refused
from dapo.serve.model import Job, prepare_served
from served import PINNED, SMALL, Served, served
from server_process import ServerProcess

APART = """
import functools, sys
from dapo.serve import model
model.prepare_served = functools.partial(model.prepare_served, apart=True)
from dapo.commands import main
sys.argv.insert(1, 'serve'); main()
"""
LONG: dict[str, Any] = {"model": "tiny", "prompt": "1+2=", "n": 16, "max_tokens": 60, "temperature": 3.0}


@pytest.fixture(scope="module")
def apart(folder: Path) -> Iterator[Served]:
    with served(folder, *PINNED, apart=True) as found:
        yield found


def test_answers_are_those_of_an_engine_in_the_servers_process(server: Served, apart: Served) -> None:
    how: list[dict[str, Any]] = [
        {"n": 3, "seed": 5, "logprobs": 2, "return_token_ids": True},
        {"stop": ["a", "e"], "seed": 6, "max_tokens": 50},
        {"prompt": ["1+2=", "3*3="], "seeds": [7, 8], "temperature": 0},
        {"max_tokens": 1000},  # refused
    ]
    told = [[one.complete(**asked).json() for asked in how] for one in (server, apart)]
    for ours, theirs in zip(*told, strict=True):
        assert {**ours, "id": 0, "created": 0} == {**theirs, "id": 0, "created": 0}


def test_streams_at_once_are_what_whole_answers_are(apart: Served) -> None:
    api = apart.openai()
    engine_of(apart)._process._process.terminate()  # as a scheduler does: what runs is finished first

    def ask(seed: int) -> bool:
        asked: dict[str, Any] = {"model": "tiny", "prompt": f"{seed}+1=", "seed": seed, "max_tokens": 40}
        texts = ["", ""]
        for chunk in api.completions.create(**asked, n=2, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        return [choice.text for choice in api.completions.create(**asked, n=2).choices] == texts

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(32)))


def test_who_goes_away_leaves_nothing_in_the_engine(apart: Served) -> None:
    stream = apart.openai().completions.create(**LONG | {"n": 200}, stream=True)
    next(iter(stream))
    stream.close()
    started = time.monotonic()
    assert apart.complete(max_tokens=1).status_code == 200
    end = time.monotonic() + 20
    while apart.model.room.waiting or engine_of(apart)._process._hearing:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert time.monotonic() - started < 20


def engine_of(server: Served) -> ProcessEngine:
    engine = server.model.doors["tiny"].engines[0]
    assert isinstance(engine, ProcessEngine)
    return engine


def test_a_process_that_is_killed_is_an_error_for_all_who_wait_and_all_who_come(folder: Path) -> None:
    with served(folder, *SMALL, apart=True) as server, ThreadPoolExecutor(2) as pool:
        stream = server.openai().completions.create(**LONG | {"n": 200}, stream=True)
        chunks = iter(stream)
        next(chunks)
        whole = pool.submit(lambda: server.complete(n=200, max_tokens=60))
        while server.model.room.waiting < 400:
            time.sleep(0.01)
        engine_of(server)._process._process.kill()
        with pytest.raises(openai.APIError, match="process ended with exit code -9"):
            list(chunks)
        late = server.complete()
        assert whole.result(20).status_code == late.status_code == 503
        assert "exit code -9" in whole.result().text and "restart the server" in late.text
        assert server.model.room.waiting == 0


def test_the_command_ends_with_its_engine_and_tells_who_waits_for_an_update(folder: Path) -> None:
    words = [str(folder), "--token-env", "SECRET", *(word for one in SMALL for word in ("--set", one))]
    headers = {"Authorization": "Bearer x"}
    client = httpx.Client(headers=headers, trust_env=False, timeout=60)
    with ServerProcess(APART, *words, env={"SECRET": "x"}, headers=headers) as server, ThreadPoolExecutor(1) as pool:
        assert client.post(f"{server.url}/weights/begin", json={"version": 1}).status_code == 200
        waits = pool.submit(client.post, f"{server.url}/v1/completions", json=LONG)  # for the rest of the weights
        time.sleep(0.3)
        os.kill(child_of(server), signal.SIGKILL)
        assert waits.result().status_code == 503 and "exit code -9" in waits.result().text
        assert server.process is not None
        output, _ = server.process.communicate(timeout=20)
        assert server.process.returncode == 1 and "ended with exit code -9" in output and "Traceback" not in output


class _Loads(Exception):
    """It has come so far."""


class _Listener(QuietListener):
    def phase(self, text: str) -> None:
        raise _Loads(text)


def slowly(listener: Any) -> Any:
    listener.phase("loading")
    time.sleep(60)


def test_a_process_that_loads_ends_with_the_one_that_started_it() -> None:
    process = EngineProcess(slowly)
    with pytest.raises(_Loads):
        process.loaded(_Listener())
    process._socket.close()
    assert process._process.wait(20) == 0


def test_a_process_that_is_killed_before_it_reads_what_to_load() -> None:
    process = EngineProcess(slowly)
    process._process.kill()
    with pytest.raises(ProcessError, match="did not start: its process ended with exit code -9"):
        process.loaded(QuietListener())


def test_memory_that_is_shared_stays_until_it_is_read_though_whoever_asked_has_gone() -> None:
    process = EngineProcess(slowly)
    sizes: list[int] = []

    async def run() -> None:
        begun, read = asyncio.Event(), asyncio.Event()

        async def take(layout: Any) -> None:
            begun.set()
            await read.wait()
            sizes.append(os.fstat(process._memory.fileno()).st_size)

        put = asyncio.create_task(process.put([("a", torch.ones(8))], take))
        await begun.wait()
        put.cancel()
        await asyncio.sleep(0)
        read.set()
        with pytest.raises(asyncio.CancelledError):
            await put
        sizes.append(os.fstat(process._memory.fileno()).st_size)

    asyncio.run(run())
    process.kill()
    assert sizes == [32, 0]


def test_engines_that_share_a_gpu_are_told_how_much_of_it_each_takes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"--engines 2: more than the GPUs here \(1\).* rollout.cache_gib=8"):
        prepare_served(str(folder), QuietListener(), overrides=SMALL, copies=2, apart=True)()


SLOWLY = """
import sys, time
from dapo.serve import model
model.prepare_served = lambda *args, **more: lambda: time.sleep(60)
from dapo.commands import main
sys.argv.insert(1, 'serve'); main()
"""


def test_a_server_that_loads_ends_at_once_when_it_is_told_to() -> None:
    with ServerProcess(SLOWLY, "tiny", ready=(503,)) as server:
        started = time.monotonic()
        assert server.stop()[0] == 0
        assert time.monotonic() - started < 10


def test_who_waits_for_an_update_hears_that_the_server_ends(folder: Path) -> None:
    model = prepare_served(str(folder), QuietListener(), overrides=SMALL)()

    async def run() -> None:
        model.doors["tiny"].hold()
        parts = model.submit(Job("tiny", [Request(0, (5, 6), (1,), Sampling(1.0, 3))]))
        waits = asyncio.ensure_future(anext(parts))
        await asyncio.sleep(0.01)
        await model.close()
        with pytest.raises(Refused, match="the server has ended"):
            await waits

    asyncio.run(run())


def child_of(server: ServerProcess) -> int:
    assert server.process is not None
    pid = server.process.pid
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [int(one) for task in tasks for one in (task / "children").read_text().split()]
    [child] = [one for one in found if b"dapo.rollout.process" in Path(f"/proc/{one}/cmdline").read_bytes()]
    return child


def test_what_goes_wrong_while_it_loads_is_told_as_in_one_process(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "tiny"
    shutil.copytree(folder, damaged)
    (damaged / "model.safetensors").write_bytes(b"no weights")
    for apart in (False, True):
        with pytest.raises(ModelError, match="cannot be loaded: Error while deserializing"):
            prepare_served(str(damaged), QuietListener(), overrides=SMALL, apart=apart)()
