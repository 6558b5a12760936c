"""Rewards over the Open Inference Protocol: against a real MLServer (nightly), and against the part of the protocol
that the client needs, written out here."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from reward_servers import prompt, serving, write

from dapo.config import KServeReward
from dapo.errors import RewardError
from dapo.records import Prompt, Reward
from dapo.reward.build import make_client
from scoring import rewards_of
from server_process import free_port

ROOT = Path(__file__).parents[2]
INPUTS = {"response": "$response", "answer": "$answer"}
RESPONSES = ["4", "five", "4", "", "x \u2265 4\nso it is"]


def score_all(url: str, responses: list[str], row: Prompt | None = None, **settings: Any) -> list[Reward]:
    config = KServeReward(**{"kind": "kserve", "url": url, "model": "scorer", "inputs": INPUTS} | settings)
    return rewards_of(make_client(config), row or prompt("4"), responses, start=True)


# A V2 endpoint of our own: no server, but enough of the protocol to be one for the client in CI.


def texts(body: Any) -> dict[str, list[str]]:
    """The columns of a request by name."""
    columns = {}
    for tensor in body["inputs"]:
        assert tensor["datatype"] == "BYTES" and tensor["shape"] == [len(tensor["data"]), 1]
        columns[tensor["name"]] = tensor["data"]
    return columns


def tensors(**columns: list[Any]) -> dict[str, Any]:
    """A reply: FP32 and BOOL tensors, as JSON."""
    kinds = {name: "BOOL" if isinstance(column[0], bool) else "FP32" for name, column in columns.items()}
    outputs = [
        {"name": name, "datatype": kinds[name], "shape": [len(column)], "data": column}
        for name, column in columns.items()
    ]
    return {"model_name": "scorer", "outputs": outputs}


def v2_endpoint(answer: Callable[[dict[str, list[str]]], Any], inputs: list[str] | None = None) -> FastAPI:
    app = FastAPI()
    described = {
        "inputs": [{"name": name, "datatype": "BYTES", "shape": [-1, 1]} for name in inputs or ()],
        "outputs": [],
    }

    @app.get("/v2/health/ready")
    @app.get("/v2/models/scorer/ready")
    def ready() -> dict[str, Any]:
        return {}

    @app.get("/v2/models/scorer")
    def metadata() -> dict[str, Any]:
        return {"name": "scorer"} | described

    @app.post("/v2/models/scorer/infer")
    async def infer(request: Request) -> Response:
        reply = answer(texts(await request.json()))
        return reply if isinstance(reply, Response) else Response(json.dumps(reply), media_type="application/json")

    return app


def as_lengths(columns: dict[str, list[str]]) -> Any:
    return tensors(
        reward=[float(len(text)) for text in columns["response"]],
        right=[text == gold for text, gold in zip(columns["response"], columns["answer"], strict=True)],
    )


def test_responses_become_tensors_and_a_tensor_becomes_rewards() -> None:
    with serving(v2_endpoint(as_lengths)) as url:
        rewards = score_all(url, RESPONSES, correct="right")
        bare = score_all(url, ["abc"])
    assert [reward.error for reward in rewards] == [None] * 5
    assert [reward.value for reward in rewards] == [1.0, 4.0, 1.0, 0.0, 14.0]
    assert [reward.correct for reward in rewards] == [True, False, True, False, False]
    assert (bare[0].correct, bare[0].value) == (None, 3.0)


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (tensors(reward=[1.0]), "has 1 numbers for 2 responses"),
        (tensors(other=[1.0, 2.0]), "no output 'reward'"),
        ({"outputs": [{"name": "reward", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}]}, "no number"),
        ({"outputs": [{"name": "reward", "datatype": "BOOL", "shape": [2], "data": [True, "x"]}]}, "holds 'x'"),
        ({"outputs": [{"name": "reward", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2], [3, 4]]}]}, "has 4"),
        ({"outputs": 3}, "cannot be read"),
        (Response(b"{"), "is not JSON"),
        (Response(b'{"outputs": [{"name": "reward", "datatype": "FP32", "shape": [2], "data": [NaN, NaN]}]}'), "nan"),
    ],
    ids=["count", "name", "bytes", "no-bool", "wide", "no-list", "no-json", "nan"],
)
def test_tensors_that_are_no_rewards_are_failed_scores(reply: Any, cause: str) -> None:
    with serving(v2_endpoint(lambda columns: reply)) as url:
        rewards = score_all(url, ["a", "b"])
    assert all(reward.correct is None and cause in (reward.error or "") for reward in rewards), rewards


def test_of_a_traceback_the_last_line_is_told() -> None:
    said = Response(b"Traceback (most recent call last):\n" + b"  File x\n" * 100 + b"RuntimeError: no memory\n", 500)
    with serving(v2_endpoint(lambda columns: said)) as url:
        (reward,) = score_all(url, ["abc"], give_up_after_s=0.1)
    assert str(reward.error).endswith("500 Internal Server Error: RuntimeError: no memory")


def test_a_wrong_name_is_a_message() -> None:
    with serving(v2_endpoint(as_lengths, inputs=["text"])) as url:
        with pytest.raises(RewardError, match="has no input 'response'; its inputs are 'text'"):
            score_all(url, ["abc"])
        with pytest.raises(RewardError, match=rf"{url}.*'other'.*404"):
            score_all(url, ["abc"], model="other")


# the real thing

RUNTIME = """
from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceResponse, ResponseOutput


class Scorer(MLModel):
    async def predict(self, payload):
        columns = {tensor.name: StringCodec.decode_input(tensor) for tensor in payload.inputs}
        responses, answers = columns["response"], columns["answer"]
        if "fail" in responses:
            raise RuntimeError("the model failed")
        rewards = [0.25 + len(text) for text in responses]
        right = [text == gold for text, gold in zip(responses, answers)]
        return InferenceResponse(
            model_name=self.name,
            outputs=[
                ResponseOutput(name="reward", shape=[len(rewards), 1], datatype="FP32", data=rewards),
                ResponseOutput(name="right", shape=[len(right)], datatype="BOOL", data=right),
            ],
        )
"""


@pytest.mark.nightly
def test_a_real_mlserver_scores(tmp_path: Path) -> None:
    made = subprocess.run([ROOT / "scripts" / "mlserver_env"], capture_output=True, text=True, timeout=600, check=False)
    assert made.returncode == 0, made.stderr
    python = Path(made.stdout.strip())
    port = free_port()
    settings = {"host": "127.0.0.1", "http_port": port, "grpc_port": free_port(), "metrics_port": free_port()}
    write(tmp_path / "settings.json", json.dumps(settings | {"parallel_workers": 0}))
    write(tmp_path / "model-settings.json", json.dumps({"name": "scorer", "implementation": "runtime.Scorer"}))
    write(tmp_path / "runtime.py", RUNTIME)
    url = f"http://127.0.0.1:{port}"
    command = [str(python.with_name("mlserver")), "start", str(tmp_path)]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""})
    try:
        rewards = score_all(url, RESPONSES, correct="right", timeout_s=30)
        assert [reward.error for reward in rewards] == [None] * 5
        assert [reward.value for reward in rewards] == [1.25, 4.25, 1.25, 0.25, 14.25]
        assert [reward.correct for reward in rewards] == [True, False, True, False, False]
        many = score_all(url, ["x" * (k % 9) for k in range(300)])
        assert [reward.value for reward in many] == [0.25 + k % 9 for k in range(300)]
        failed = score_all(url, ["fail", "abc"], give_up_after_s=2.0)
        assert "the model failed" in (failed[0].error or "") and failed[1].value == 3.25
        with pytest.raises(RewardError, match="no_such_model"):
            score_all(url, ["abc"], model="no_such_model")
        assert httpx.get(f"{url}/v2", trust_env=False).json()["name"] == "mlserver"
    except BaseException:
        print((tmp_path / "log").read_text()[-3000:])
        raise
    finally:
        server.terminate()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            time.sleep(0.1)
