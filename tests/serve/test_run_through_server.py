"""A run trained through a `dapo serve` of its own is the run with the engine in process; a server that dies ends it in
bounded time, and it goes on with another one; a model behind a server is evaluated as one at hand."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save
from typer.testing import CliRunner

import dapo
from command_cases import save_model, write_rows
from dapo.checks.checklist import Entry, run_check
from dapo.checks.context import CheckContext
from dapo.checks.model import check_server
from dapo.commands import app
from dapo.commands.demo.run import run_demo
from dapo.config import build_config, load_config, nested
from dapo.config.plan import recipe_path
from dapo.observe.progress import QuietListener
from dapo.observe.run_folder import RunFolder
from dapo.orchestrator.launch import run_experiment
from dapo.rollout.openai import RemoteError
from run_cases import PROMPTS, Recorder, last_checkpoint, run, steps_of, text_sum, without_times
from served import ServeProcess

TOKEN = "a-token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
STEPS = {"training.steps": 3, "run.save_every": 1, "algorithm.proximal": "recompute", "evaluation.every": 1}
WORDS = ("data.template=plain", "data.max_prompt_length=8", "rollout.max_response_length=12")
PINNED = ("runtime.deterministic=true", "rollout.max_concurrent_samples=32")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = save_model(tmp_path_factory.mktemp("served") / "tiny", seed=5)  # not the weights that the runs start from
    settings = [word for one in (*WORDS, *PINNED) for word in ("--set", one)]
    with pytest.MonkeyPatch.context() as patch, ServeProcess(str(folder), *settings, token=TOKEN) as started:
        patch.setenv("SECRET", TOKEN)
        yield started


def through(server: ServeProcess, **more: Any) -> dict[str, Any]:
    remote = {"engine": "openai", "url": server.url, "token_env": "SECRET", "give_up_after_s": 0.5} | more
    return STEPS | {f"rollout.{key}": value for key, value in remote.items()}


def same(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but times, and what is made of the last bits of log-probabilities."""
    rows = [without_times(entry) for entry in metrics]
    return [{name: value for name, value in row.items() if not name.startswith("mismatch/")} for row in rows]


def test_a_model_behind_a_server_is_evaluated_without_its_weights(tmp_path: Path, server: ServeProcess) -> None:
    whole = save_model(tmp_path / "tiny", seed=5)
    told = {}
    for name, more in {"here": {}, "there": {"server": server.url}}.items():
        if more:
            (whole / "model.safetensors").unlink()
        settings = {key: value for key, _, value in (word.partition("=") for word in (*WORDS, *PINNED))}
        settings["rollout.token_env"] = "SECRET"
        found = dapo.evaluate(whole, PROMPTS[:6], text_sum, settings, samples=2, temperature=1.0, **more)
        told[name] = [(one["response"], one["correct"]) for one in found.samples]
        assert found.report["server"] == more.get("server")
    assert len(told["there"]) == 12 and told["there"] == told["here"]


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({}, "pass", "all that training needs"),
        ({"rollout.url": "http://127.0.0.1:1"}, "fail", "policy server http://127.0.0.1:1"),
        ({"data.max_prompt_length": 300}, "fail", "takes 20 tokens"),
    ],
)
def test_the_doctor_asks_the_server(server: ServeProcess, changes: dict[str, Any], status: str, said: str) -> None:
    lengths = {"rollout.max_response_length": 12, "data.max_prompt_length": 8}
    settings = through(server) | lengths | {"algorithm.overlong_buffer.enable": False} | changes
    context = CheckContext(build_config(nested({"model.path": "tiny", "data.train": ["rows.jsonl"]} | settings)))
    [found], _ = run_check(context, Entry("server", "machine", check_server))
    assert (found.area, found.status) == ("machine", status) and said in found.found, found


def test_the_command_samples_on_a_server_too(tmp_path: Path, server: ServeProcess) -> None:
    model, rows = save_model(tmp_path / "tiny", seed=5), write_rows(tmp_path / "rows.jsonl", PROMPTS[:6])
    (model / "model.safetensors").unlink()
    words = ["evaluate", str(model), "--data", str(rows), "--server", server.url, "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*words, "rollout.token_env=SECRET", "reward.kind=exact", *WORDS])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert report["server"] == server.url and report["files"][0]["prompts"] == 6


def test_a_run_through_a_server_is_the_run_in_process(tmp_path: Path, server: ServeProcess) -> None:
    heard = Recorder()
    run(tmp_path / "there", through(server), heard, heldout=PROMPTS[:8])
    run(tmp_path / "here", STEPS, heldout=PROMPTS[:8])
    there, here = steps_of(tmp_path / "there"), steps_of(tmp_path / "here")
    assert same(there) == same(here) and len(there) == 3
    assert [text.partition(":")[0] for text in heard.warnings] == ["doctor"]  # of rows that are the same, on purpose
    assert max(entry["mismatch/mean"] for entry in there) < 1e-5
    assert httpx.get(f"{server.url}/v1/models", headers=HEADERS, trust_env=False).json()["data"][0]["version"] >= 3


def test_a_server_that_dies_ends_the_run_in_time_with_a_checkpoint_from_which_it_goes_on(
    tmp_path: Path, server: ServeProcess
) -> None:
    run(tmp_path / "whole", STEPS)
    killed = []

    def kill(step: int) -> None:
        if step == 2 and not killed:
            server.kill()
            killed.append(time.monotonic())

    with pytest.raises(RemoteError, match=rf"policy server {server.url}: cannot connect.*\n.*to go on"):
        run(tmp_path / "run", through(server), Recorder(on_step=kill))
    assert time.monotonic() - killed[0] < 20
    assert last_checkpoint(tmp_path / "run").is_dir()
    with pytest.raises(RemoteError, match="cannot connect"):  # nothing is spent on a run that cannot be
        run(tmp_path / "run", through(server), resume=RunFolder(tmp_path / "run"))
    server.start()
    server.wait_ready()
    run(tmp_path / "run", through(server), resume=RunFolder(tmp_path / "run"))
    assert same(steps_of(tmp_path / "run")) == same(steps_of(tmp_path / "whole"))


def test_a_run_goes_on_with_a_server_that_waits_for_weights(tmp_path: Path, server: ServeProcess) -> None:
    """Another run was lost in the middle of a push."""
    to = {"headers": HEADERS, "trust_env": False}
    httpx.post(f"{server.url}/weights/begin", json={"version": 30, "update": "lost"}, **to)
    httpx.put(f"{server.url}/weights/bucket?update=lost", content=save({"none": torch.ones(1)}), **to)
    assert httpx.get(f"{server.url}/ready", **to).status_code == 503
    run(tmp_path / "there", through(server) | {"training.steps": 1})
    run(tmp_path / "here", STEPS | {"training.steps": 1})
    assert same(steps_of(tmp_path / "there")) == same(steps_of(tmp_path / "here"))


def test_a_run_does_not_wait_for_the_update_of_another_that_was_lost(tmp_path: Path, server: ServeProcess) -> None:
    begun = {"version": 60, "update": "silent"}
    httpx.post(f"{server.url}/weights/begin", json=begun, headers=HEADERS, trust_env=False)
    start = time.monotonic()
    run(tmp_path / "run", through(server) | {"training.steps": 1})
    assert time.monotonic() - start < 45  # of the minute that the server waits


def test_a_run_of_other_weights_than_the_server_takes_is_refused_before_it_sends_any(
    tmp_path: Path, server: ServeProcess
) -> None:
    rank = {"model.path": str(save_model(tmp_path / "tiny", seed=5)), "model.lora.rank": 4}
    with pytest.raises(
        RemoteError, match=r"no adapter, and the run trains an adapter \(rank 4\): use model.lora.rank=0"
    ):
        run(tmp_path / "run", through(server) | rank, model=None)
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_the_demo_learns_through_a_server_as_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", TOKEN)
    changes = ["training.steps=30", "evaluation.every=0", "algorithm.proximal=recompute"]
    here = run_demo(changes, QuietListener())
    model = RunFolder(Path(here["run_dir"])).model_before
    sizes = ("data.template=plain", "data.max_prompt_length=16", "rollout.max_response_length=48")
    with ServeProcess(str(model), *(word for one in sizes for word in ("--set", one)), token=TOKEN) as server:
        remote = ["rollout.engine=openai", f"rollout.url={server.url}", "rollout.token_env=SECRET", "run.dir=there"]
        there = run_experiment(load_config(recipe_path("cpu-demo"), changes + remote), QuietListener())
    assert there["accuracy_before"] == pytest.approx(here["accuracy_before"], abs=0.005)
    assert there["accuracy_after"] - there["accuracy_before"] > 0.1
    assert there["accuracy_after"] == pytest.approx(here["accuracy_after"], abs=0.07)  # 1000 rows: 3 standard errors
    kept = [[entry["groups/kept"] for entry in steps_of(folder)] for folder in (Path(here["run_dir"]), Path("there"))]
    assert kept[0] == kept[1]
