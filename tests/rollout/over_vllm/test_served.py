"""`dapo serve` over vLLM: the API, weights from a run and adapters by name, as over the native engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from dapo.model.adapters import adapter_parameters, new_adapter, save_adapter
from dapo.model.loading import load_model
from dapo.rollout.engine import Request, Sampling
from dapo.rollout.native.engine import NativeEngine
from served import ServeProcess, save_byte_model

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
SETTINGS = ("rollout.engine=vllm", "model.compute_dtype=float32", "data.max_prompt_length=60")
SMALL = ("evaluation.max_response_length=40", "rollout.max_concurrent_samples=8")
PROMPT = [40, 50, 60]
HEADERS = {"Authorization": "Bearer a-token"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("vllm") / "tiny", **SHAPE)


def save_poet(folder: Path, base: Path, sign: float = 1.0) -> Path:
    """An adapter that changes what is sampled."""
    folder.mkdir()
    model = new_adapter(load_model(str(base), torch.float32), 2, 4.0, "all-linear", 1)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            parameter.normal_(std=0.3).mul_(sign if "lora_A" in name else 1.0)
    save_adapter(model, folder)
    return folder


@pytest.fixture(scope="module")
def poet(folder: Path) -> Path:
    return save_poet(folder.parent / "poet", folder)


@pytest.fixture(scope="module")
def server(folder: Path, poet: Path) -> Iterator[ServeProcess]:
    settings = [word for one in (*SETTINGS, *SMALL) for word in ("--set", one)]
    more = ["--adapter", f"poet={poet}", "--weights-dir", str(folder.parent)]
    with ServeProcess(str(folder), *settings, *more, token="a-token", start_s=600) as started:
        yield started


def greedy(source: Path, tokens: int = 20) -> list[int]:
    async def run() -> list[int]:
        engine = NativeEngine(load_model(source), [1], max_sequence_tokens=100, max_concurrent_samples=1)
        [sample] = [s async for s in engine.generate([Request(0, tuple(PROMPT), (1,), Sampling(0.0, tokens))])]
        await engine.close()
        return list(sample.token_ids.tolist())

    return asyncio.run(run())


def ask(server: ServeProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=HEADERS, timeout=60, trust_env=False)


def complete(server: ServeProcess, model: str) -> dict[str, Any]:
    asked = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0.0, "return_token_ids": True, "logprobs": 2}
    reply = ask(server, "/v1/completions", model=model, **asked)
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["choices"][0])


def test_model_and_adapter_are_served_and_the_adapter_takes_weights(
    server: ServeProcess, folder: Path, poet: Path
) -> None:
    assert complete(server, "tiny")["token_ids"] == greedy(folder)
    choice = complete(server, "poet")
    assert choice["token_ids"] == greedy(poet) != greedy(folder)
    assert set(choice["versions"]) == {0} and len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    other = save_poet(folder.parent / "other", folder, -1.0)
    taken = ask(server, "/weights", checkpoint="other", model="poet")
    assert taken.status_code == 200 and taken.json()["version"] == 1, taken.text
    assert complete(server, "poet")["token_ids"] == greedy(other) != greedy(poet)
    assert complete(server, "tiny")["token_ids"] == greedy(folder)


def test_streams_and_refusals_are_those_of_the_native_engine(server: ServeProcess) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "stream": True, "seed": 3}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=HEADERS, trust_env=False) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 2
    for body, said in (
        ({"prompt": [9999]}, "token ids must be in 0..257"),
        ({"prompt": PROMPT, "max_tokens": 5000}, "exceed the engine's 100"),
        ({"prompt": PROMPT, "logprobs": 2, "top_p": 0.5}, "goes without top_p"),
    ):
        refused = ask(server, "/v1/completions", model="tiny", **body)
        assert refused.status_code == 400 and said in refused.json()["error"]["message"], refused.text
