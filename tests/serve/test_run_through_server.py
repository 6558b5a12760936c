"""A run trained through a `dapo serve` of its own is the run with the engine in process; a server that dies ends it in
bounded time, and it goes on with another one; a model behind a server is evaluated as one at hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

import dapo
from dapo.observe.run_folder import RunFolder
from dapo.rollout.openai import RemoteError
from policy_server import TOKEN, PolicyServer, saved_model
from run_cases import PROMPTS, Recorder, last_checkpoint, run, steps_of, text_sum, without_times

STEPS = {"training.steps": 3, "run.save_every": 1, "algorithm.proximal": "recompute", "evaluation.every": 1}
WORDS = ("data.template=plain", "data.max_prompt_length=8", "rollout.max_response_length=12")
PINNED = ("runtime.deterministic=true", "rollout.max_concurrent_samples=32")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyServer]:
    folder = saved_model(tmp_path_factory.mktemp("served") / "tiny", 5)  # not the weights that the runs start from
    settings = [word for one in (*WORDS, *PINNED) for word in ("--set", one)]
    with pytest.MonkeyPatch.context() as patch, PolicyServer(folder, *settings) as started:
        patch.setenv("POLICY_TOKEN", TOKEN)
        yield started


def through(server: PolicyServer, **more: Any) -> dict[str, Any]:
    remote = {"engine": "openai", "url": server.url, "token_env": "POLICY_TOKEN", "give_up_after_s": 0.5} | more
    return STEPS | {f"rollout.{key}": value for key, value in remote.items()}


def same(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but times, and what is made of the last bits of log-probabilities."""
    rows = [without_times(entry) for entry in metrics]
    return [{name: value for name, value in row.items() if not name.startswith("mismatch/")} for row in rows]


def test_a_model_behind_a_server_is_evaluated_without_its_weights(tmp_path: Path, server: PolicyServer) -> None:
    whole = saved_model(tmp_path / "tiny", 5)
    told = {}
    for name, more in {"here": {}, "there": {"server": server.url}}.items():
        if more:
            (whole / "model.safetensors").unlink()
        settings = {key: value for key, _, value in (word.partition("=") for word in (*WORDS, *PINNED))}
        settings["rollout.token_env"] = "POLICY_TOKEN"
        found = dapo.evaluate(whole, PROMPTS[:6], text_sum, settings, samples=2, temperature=1.0, **more)
        told[name] = [(one["response"], one["correct"]) for one in found.samples]
        assert found.report["server"] == more.get("server")
    assert len(told["there"]) == 12 and told["there"] == told["here"]


def test_a_run_through_a_server_is_the_run_in_process(tmp_path: Path, server: PolicyServer) -> None:
    heard = Recorder()
    run(tmp_path / "there", through(server), heard, heldout=PROMPTS[:8])
    run(tmp_path / "here", STEPS, heldout=PROMPTS[:8])
    there, here = steps_of(tmp_path / "there"), steps_of(tmp_path / "here")
    assert same(there) == same(here) and len(there) == 3
    assert max(entry["mismatch/mean"] for entry in there) < 1e-5 and not heard.warnings
    models = httpx.get(f"{server.url}/v1/models", headers=server.headers, trust_env=False).json()
    assert models["data"][0]["version"] >= 3


def test_a_server_that_dies_ends_the_run_in_time_with_a_checkpoint_from_which_it_goes_on(
    tmp_path: Path, server: PolicyServer
) -> None:
    run(tmp_path / "whole", STEPS)
    killed = []

    def kill(step: int) -> None:
        if step == 2 and not killed:
            server.kill()
            killed.append(time.monotonic())

    with pytest.raises(RemoteError, match=rf"policy server {server.url}: cannot connect.*\n.*to go on"):
        run(tmp_path / "run", through(server), Recorder(on_step=kill))
    assert time.monotonic() - killed[0] < 10
    assert last_checkpoint(tmp_path / "run").is_dir()
    with pytest.raises(RemoteError, match="cannot connect"):  # nothing is spent on a run that cannot be
        run(tmp_path / "run", through(server), resume=RunFolder(tmp_path / "run"))
    server.start()
    server.wait_ready()
    run(tmp_path / "run", through(server), resume=RunFolder(tmp_path / "run"))
    assert same(steps_of(tmp_path / "run")) == same(steps_of(tmp_path / "whole"))


def test_a_run_goes_on_with_a_server_that_waits_for_weights(tmp_path: Path, server: PolicyServer) -> None:
    """Another run was lost in the middle of a push."""
    to = {"headers": server.headers, "trust_env": False}
    httpx.post(f"{server.url}/weights/begin", json={"version": 30, "update": "lost"}, **to)
    httpx.put(f"{server.url}/weights/bucket?update=lost", content=save({"none": torch.ones(1)}), **to)
    assert httpx.get(f"{server.url}/ready", **to).status_code == 503
    run(tmp_path / "there", through(server) | {"training.steps": 1})
    run(tmp_path / "here", STEPS | {"training.steps": 1})
    assert same(steps_of(tmp_path / "there")) == same(steps_of(tmp_path / "here"))
