"""`dapo serve` as a process: what it says when it cannot, and how it ends."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import save

from command_cases import dapo, save_model
from dapo.rollout.engine import some_elements
from run_cases import tiny_model
from served import ServeProcess

TOKEN = "a-token"
LONG = {"model": "tiny", "prompt": [5, 6, 7], "n": 200, "max_tokens": 200, "temperature": 3.0, "stream": True}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "--token-env"),
        (["--token-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
        (["--adapter", "poet"], "expected NAME=folder"),
        (["--adapter", "a=x", "--adapter", "a=y"], "two have the same name"),
        (["--port", "0", "--adapter", "tiny=x"], "--name"),
        (["--port", "0", "--set", "data.max_prompt_lenght=3"], "max_prompt_length"),
        (
            ["--port", "0", "--set", "evaluation.max_response_length=60", "--adapter", "a=gone"],
            "adapter gone: no such folder; name one with adapter_config.json and adapter_model.safetensors",
        ),
        (
            ["--port", "0", "--set", "evaluation.data=[gone.jsonl]"],
            "evaluation.data: is for training and evaluation, and has no effect here; leave it out",
        ),
        (["--port", "0", "--set", "evaluation={samples_per_prompt: 4}"], "evaluation.samples_per_prompt: is for"),
        (["--port", "0", "--set", "data.answer_key=a"], "data.answer_key: is for training and evaluation"),
        (["--port", "0", "--set", "rollout.engine=vllm"], "vllm is not installed"),
        (["--port", "0", "--set", "evaluation.max_response_length=256"], "use evaluation.max_response_length=128"),
    ],
)
def test_what_is_wrong_is_named_at_once(folder: Path, words: list[str], said: str) -> None:
    found = dapo("serve", folder, *words)
    assert found.exit_code in (1, 2) and said in found.output and "Traceback" not in found.output
    assert "listening" not in found.output


def test_a_port_that_is_taken_and_a_model_that_is_not_there(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = dapo("serve", folder, "--port", port, "--set", "evaluation.max_response_length=60")
    assert found.exit_code == 2 and f"127.0.0.1, port {port}" in found.output
    found = dapo("serve", "./gone", "--port", 0)
    assert found.exit_code in (1, 2) and "no such folder" in found.output


def serving(folder: Path, *words: str) -> ServeProcess:
    settings = ("data.template=plain", "rollout.max_response_length=200", "rollout.max_concurrent_samples=4")
    return ServeProcess(str(folder), *(word for one in settings for word in ("--set", one)), *words, token=TOKEN)


def begun(client: httpx.Client, **body: Any) -> tuple[threading.Thread, list[Any]]:
    """A request under way, and where its status and its end will be."""
    found: list[Any] = []

    def ask() -> None:
        with client.stream("POST", "/v1/completions", json=LONG | body) as got:
            found.append(got.status_code)
            try:
                found.append(got.read()[-300:])
            except httpx.TransportError as error:
                found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, found


def test_it_ends_in_time_however_much_is_under_way(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny")
    with serving(folder, "--drain-s", "1", "--max-waiting", "40000") as server, asking(server) as client:
        running = [begun(client, n=9_000) for _ in range(4)]
        whole, told = begun(client, n=1_000, stream=False)
        time.sleep(0.5)
        started = time.monotonic()
        assert server.stop()[0] == 0
        assert time.monotonic() - started < 1 + 3.5
        for thread, found in running:
            thread.join(10)
            assert b"[DONE]" not in str(found).encode(), found
        whole.join(10)
        assert told[0] == 503 and b"the engine was closed" in told[1]


def test_an_update_that_is_under_way_is_finished_and_what_waits_for_it_too(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny")
    tensors = {name: parameter.detach() for name, parameter in tiny_model(1).named_parameters()}
    with serving(folder) as server, asking(server) as client:
        update = {"update": client.post("/weights/begin", json={"version": 1}).json()["update"]}
        thread, found = begun(client, n=1, max_tokens=5, return_token_ids=True)
        time.sleep(0.3)
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert client.post("/v1/completions", json=LONG).status_code == 503
        assert client.put("/weights/bucket", params=update, content=save(tensors)).status_code == 200
        fingerprint = save({name: some_elements(tensor) for name, tensor in tensors.items()})
        assert client.post("/weights/commit", params=update, content=fingerprint).json() == {"version": 1}
        thread.join(20)
        assert found[0] == 200 and b"[DONE]" in found[1] and b'"versions":[1' in found[1].replace(b" ", b"")
        assert server.process.wait(20) == 0


def asking(server: ServeProcess) -> httpx.Client:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=30)
