"""A run that was stopped anywhere and resumed is the run that was not stopped: same samples, same weights, to the bit.

The number of an entry is that of the public failure cases.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from dapo.commands import app
from dapo.errors import ConfigError, StarvedError, UserError
from dapo.evaluation.early_stopping import EarlyStopping
from dapo.model.fingerprint import fingerprint_model
from dapo.observe.checkpoints import MANIFEST, CheckpointId, Checkpoints, _describe
from dapo.observe.fingerprint import fingerprint_prompts, fingerprint_tokenizer
from dapo.observe.metrics import read_metrics
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import TokenArrays
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.launch import run_experiment
from dapo.orchestrator.resume import check_resumable, resume_config
from dapo.records import Prompt, Reward
from dapo.rollout.engine import EngineError
from dapo.rollout.native.decoder import Decoder
from dapo.training.checkpoint import load_tensors
from dapo.training.learner import LocalLearner
from dapo.training.trainer import Trainer
from dapo.util import spans
from dapo.util.files import json_line, write_json
from run_cases import (
    PROMPTS,
    TOKENIZER,
    Recorder,
    config_for,
    last_checkpoint,
    loads_whole,
    run,
    steps_of,
    text_sum,
    tiny_model,
    weights_hash,
    without_times,
)

LONG = {"training.steps": 4, "run.save_every": 1, "evaluation.every": 2, "training.warmup_steps": 3}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "several epochs, a held-out check": {
        "training.epochs_per_rollout": 2,
        "monitor": {"check": {"kind": "exact"}, "share": 1.0, "window": 1, "max_length_correlation": 0.0},
    },
    "adaptive KL": {"algorithm.kl": {"mode": "loss", "target": 0.01, "horizon": 200}},
    "recomputed proximal policy, KL in the reward": {
        "algorithm.proximal": "recompute",
        "algorithm.correction": {"kind": "truncate"},
        "algorithm.kl": {"mode": "reward"},
    },
}


class Stopped(Exception):
    """What stops a run in these tests."""


def resume(folder: Path, changes: Mapping[str, Any] | None = None, listener: Any = None, **inputs: Any) -> Any:
    given = {"model": tiny_model(), "tokenizer": TOKENIZER, "rows": PROMPTS, "reward": text_sum} | inputs
    given |= {"heldout": PROMPTS[:4]} if "heldout" not in inputs else {}
    config = config_for(folder, LONG | dict(changes or {}))
    return run_experiment(config, listener or Recorder(), RunOverrides(**given, resume=RunFolder(folder)))


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves but for times and places."""
    paths = RunFolder(folder)
    summary = json.loads(paths.summary.read_text())
    return {
        "weights": weights_hash(paths.model_after),
        "samples": {path.name: path.read_bytes() for path in sorted(paths.samples.glob("step-*"))},
        "metrics": [without_times(entry) for entry in read_metrics(paths.metrics)],
        "summary": {k: v for k, v in summary.items() if not k.startswith(("seconds", "run_dir"))},
        "best": Checkpoints(paths.checkpoints).best,
        "checkpoints": [p.name for p in sorted(paths.checkpoints.iterdir())][-3:],
    }


def stop_at(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, number: int) -> None:
    """Raise at the ``number``-th call of a method, before it does anything."""
    original, calls = getattr(owner, method), []

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            raise Stopped
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, counted)


def test_a_run_that_goes_on_in_another_folder_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    RunFolder(run).config.write_text("model: {path: ./model}\n")
    elsewhere = tmp_path / "elsewhere"
    with pytest.raises(ConfigError, match="a run goes on in its folder"):
        resume_config(run, None, [f"run.dir={elsewhere}"])


# --- the same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize(
    ("owner", "method", "numbers"),
    [(Trainer, "update", (1, 4)), (Decoder, "stretch", (57,)), (Trainer, "publish", (3,))],
)
def test_a_run_stopped_anywhere_goes_on_as_if_it_had_not_been(
    tmp_path: Path, technique: str, owner: type, method: str, numbers: tuple[int, ...], wholes: dict[str, Any]
) -> None:
    """Entries 35, 85, 86, 87, 88: between two updates, inside of a rollout, before the weights are handed over."""
    changes = LONG | TECHNIQUES[technique]
    if technique not in wholes:
        run(tmp_path / "whole", changes, heldout=PROMPTS[:4])
        wholes[technique] = outcome(tmp_path / "whole")
    for number in numbers:
        folder = tmp_path / f"{number}"
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, owner, method, number)
            with pytest.raises((Stopped, EngineError)):
                run(folder, changes, heldout=PROMPTS[:4])
        resume(folder, changes)
        assert outcome(folder) == wholes[technique], number


@pytest.fixture(scope="module")
def wholes() -> dict[str, Any]:
    """What the runs come to that are not stopped, one for each technique."""
    return {}


def test_a_checkpoint_inside_of_a_step_knows_how_far_it_was(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, Trainer, "update", 4)  # two updates a step: the second one of step 2
        with pytest.raises(Stopped):
            run(tmp_path, LONG, heldout=PROMPTS[:4])
    assert last_checkpoint(tmp_path).name == "step-00001-update-00001"
    loads_whole(last_checkpoint(tmp_path) / "model")


def test_between_two_processes_nobody_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sampling ahead, the time until a run goes on inside of a step counts in no metric of the steps after it."""
    changes = LONG | {"rollout.max_staleness": 1, "runtime.deterministic": False}
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, Trainer, "update", 4)  # two updates a step: the second one of step 2
        with pytest.raises(Stopped):
            run(tmp_path / "run", changes, heldout=PROMPTS[:4])
    monkeypatch.setattr("dapo.util.spans._EPOCH", spans._EPOCH + 1e6)
    resume(tmp_path / "run", changes)
    later = steps_of(tmp_path / "run")[1:]
    assert len(later) == 3 and all(0 < entry["overlap/wall"] < 1e3 for entry in later)
    assert all(0 <= entry[f"idle/{who}"] <= entry["overlap/wall"] for entry in later for who in ("learner", "engine"))


def test_stopped_again_and_again(tmp_path: Path) -> None:
    """Each process gets a little further; the numbers add up all the same."""
    run(tmp_path / "whole", LONG, heldout=PROMPTS[:4])
    folder = tmp_path / "parts"
    for attempt in range(12):
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, Trainer, "update", 2)
            try:
                if attempt == 0:
                    run(folder, LONG, heldout=PROMPTS[:4])
                else:
                    resume(folder)
                break
            except Stopped:
                continue
    assert attempt == 7  # eight updates: one in each process, and the last one finishes
    assert outcome(folder) == outcome(tmp_path / "whole")
    resumed = json.loads(RunFolder(folder).environment.read_text())["resumed"]
    assert len(resumed) == 7 and all(entry["started"] for entry in resumed)


def test_stopped_before_the_first_checkpoint_starts_again(tmp_path: Path) -> None:
    run(tmp_path / "whole", LONG, heldout=PROMPTS[:4])
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, Decoder, "stretch", 3)  # in the evaluation before training
        with pytest.raises((Stopped, EngineError)):
            run(folder, LONG, heldout=PROMPTS[:4])
    assert Checkpoints(RunFolder(folder).checkpoints).latest() is None
    listener = Recorder()
    resume(folder, listener=listener)
    assert "no checkpoint yet: from the start" in listener.phases
    assert outcome(folder) == outcome(tmp_path / "whole")


def test_a_run_that_is_done_goes_on_with_more_steps(tmp_path: Path) -> None:
    run(tmp_path / "whole", LONG | {"evaluation.every": 1}, heldout=PROMPTS[:4])
    changes = {"evaluation.every": 1}
    run(tmp_path / "short", LONG | changes | {"training.steps": 2}, heldout=PROMPTS[:4])
    assert resume(tmp_path / "short", changes | {"training.steps": 2})["steps"] == 2  # nothing to do
    resume(tmp_path / "short", changes)
    assert outcome(tmp_path / "short") == outcome(tmp_path / "whole")


def test_starved_and_resumed_with_what_was_kept(tmp_path: Path) -> None:
    """Entry 23: the groups that were found wait in the checkpoint for a larger budget or better luck."""
    hard = {"on": True}

    def reward(prompt: str, response: str) -> Any:
        return False if hard["on"] and prompt[0] not in "01" else text_sum(prompt, response)

    changes = {"algorithm.filter_groups.max_num_gen_batches": 2, "data.shuffle": False}
    with pytest.raises(StarvedError):
        run(tmp_path, LONG | changes | {"rollout.prompts_per_step": 16}, heldout=PROMPTS[:4], reward=reward)
    hard["on"] = False
    summary = resume(tmp_path, changes | {"rollout.prompts_per_step": 16}, reward=reward)
    assert summary["steps"] == 4
    assert steps_of(tmp_path)[0]["groups/drawn"] < 32


# --- not deterministic --------------------------------------------------------------------------------------------


def test_finished_samples_of_an_interrupted_rollout_are_kept(tmp_path: Path) -> None:
    """Without pinned shapes: the same prompts, versions, learning rates and optimizer, and no sample twice."""
    free = {"runtime.deterministic": False, "run.save_every": 1}
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, Decoder, "stretch", 52)
        with pytest.raises((Stopped, EngineError)):
            run(tmp_path, LONG | free | {"rollout.max_concurrent_samples": 8}, heldout=PROMPTS[:4])
    saved = last_checkpoint(tmp_path)
    assert saved.name.endswith("-rollout")
    state = json.loads((saved / "state.json").read_text())
    kept = [len(group["samples"]["$tuple"]) for group in state["buffer"]["under_way"]["$tuple"]]
    assert sum(kept) > 0
    scored: list[str] = []

    def counting(prompt: str, response: str) -> Any:
        scored.append(prompt)
        return text_sum(prompt, response)

    resume(tmp_path, free | {"rollout.max_concurrent_samples": 8}, reward=counting)
    entries = steps_of(tmp_path)
    assert [e["version"] for e in entries] == [1, 2, 3, 4]
    assert [e["lr"] for e in entries] == pytest.approx([1e-3, 2e-3, 3e-3, 3e-3])
    draws = [json.loads(line)["draw"] for p in sorted(RunFolder(tmp_path).samples.glob("*.jsonl")) for line in p.open()]
    assert all(draws.count(draw) == 4 for draw in set(draws))
    assert load_tensors(last_checkpoint(tmp_path) / "optimizer")[1]["updates"] == 8


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The folder of a recipe on disk with a run that was stopped after one step."""
    write_recipe(tmp_path)
    done = CliRunner().invoke(app, ["train", str(tmp_path / "r.yaml"), "training.steps=1", f"run.dir={tmp_path}/run"])
    assert done.exit_code == 0, done.output
    return tmp_path


def write_recipe(folder: Path, changes: Mapping[str, Any] | None = None) -> None:
    tiny_model().save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text("".join(map(json_line, PROMPTS)))
    (folder / "heldout.jsonl").write_text("".join(map(json_line, PROMPTS[:4])))
    (folder / "reward.py").write_text(
        "def reward(prompt, response, answer):\n    return sum(map(ord, response)) % 4 == 0\n"
    )
    places = {
        "model.path": str(folder / "model"),
        "data.train": "train.jsonl",
        "evaluation.data": "heldout.jsonl",
        "reward.kind": "function",
        "reward.function": "reward.py:reward",
    }
    config = config_for(folder / "run", LONG | {"training.steps": 3} | places | dict(changes or {}))
    (folder / "r.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))


def go_on(folder: Path, *overrides: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["train", "--resume", str(folder / "run"), *overrides])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_line_goes_on(stopped: Path) -> None:
    said = go_on(stopped, "training.steps=2")
    assert "going on from" in said and f"dapo report {stopped / 'run'}\n" in said
    assert "accuracy: " in said and " before, " in said  # also of a demo, whose own table a resumed run does not know
    assert len(steps_of(stopped / "run")) == 2
    assert yaml.safe_load((stopped / "run" / "config.yaml").read_text())["training"]["steps"] == 2
    recipe = CliRunner().invoke(app, ["train", str(stopped / "r.yaml"), "--resume", str(stopped / "run")])
    assert recipe.exit_code == 0 and len(steps_of(stopped / "run")) == 3


def test_a_changed_data_file_is_refused_with_the_difference(stopped: Path) -> None:
    """Entry 89."""
    with (stopped / "train.jsonl").open("a") as file:
        file.write('{"prompt": "9+9=", "answer": "8"}\n')
    output = go_on(stopped, "training.steps=2", code=1)
    assert "what it started from has changed" in output and "data.train" in output and "train.jsonl" in output


def test_a_changed_model_is_refused(stopped: Path) -> None:
    tiny_model(seed=1).save_pretrained(stopped / "model")
    output = go_on(stopped, "training.steps=2", code=1)
    assert re.search(r'model\.weights: was "\w+", is now "\w+"', output)


def test_changed_held_out_rows_are_said_aloud(stopped: Path) -> None:
    (stopped / "heldout.jsonl").write_text("".join(map(json_line, PROMPTS[1:5])))
    file = stopped / "run" / "fingerprint.json"
    then = json.loads(file.read_text())
    said = " ".join(go_on(stopped, "training.steps=2").split())
    assert "the evaluation is not the one that the run started with: evaluation.data.hash: was" in said
    assert json.loads(file.read_text())["evaluation.data"] != then["evaluation.data"]


def test_a_changed_reward_file_is_said_aloud(stopped: Path) -> None:
    with (stopped / "reward.py").open("a") as file:
        file.write("# mended\n")
    assert "the reward is not the one that the run started with" in go_on(stopped, "training.steps=2")


def test_a_run_of_a_version_without_the_newest_keys_goes_on_with_their_defaults(tmp_path: Path) -> None:
    """Stop texts and min-p came later; a recipe that lacks them means the defaults, and nothing else."""
    config = config_for(tmp_path)
    stored = config.model_dump(mode="json")
    del stored["rollout"]["stop"], stored["evaluation"]["stop"], stored["evaluation"]["min_p"]
    RunFolder(tmp_path).config.write_text(yaml.safe_dump(stored))
    check_resumable(RunFolder(tmp_path), config)
    changed = {"rollout.stop": ["x"], "rollout.temperature": 0.5, "evaluation.min_p": 0.1}
    with pytest.raises(ConfigError) as caught:
        check_resumable(RunFolder(tmp_path), config_for(tmp_path, changed))
    assert 'rollout.stop: was [], is now ["x"]' in str(caught.value)
    assert "rollout.temperature: was 1.0, is now 0.5" in str(caught.value)
    assert "evaluation.min_p" not in str(caught.value)
    RunFolder(tmp_path).config.write_text(yaml.safe_dump(stored | {"gone": 1}))
    with pytest.raises(ConfigError, match="gone: was 1, is now null"):
        check_resumable(RunFolder(tmp_path), config)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rollout.temperature=0.5", "rollout.temperature: was 1.0, is now 0.5"),
        ("seed=6", "seed: was 9, is now 6"),
        ("data.template=chat", 'data.template: was "plain", is now "chat"'),
        ("runtime.threads=3", "runtime.threads: was null, is now 3"),  # deterministic: another order of additions
    ],
)
def test_a_setting_that_would_make_it_another_run_is_refused(stopped: Path, override: str, named: str) -> None:
    output = go_on(stopped, "training.steps=2", override, code=2)
    assert named in output and "model.path" in output


def test_a_setting_that_was_edited_in_the_run_folder_is_refused_too(stopped: Path) -> None:
    config = stopped / "run" / "config.yaml"
    text = config.read_text()
    assert "seed: 9" in text
    config.write_text(text.replace("seed: 9", "seed: 8"))
    assert "seed: was 9, is now 8" in go_on(stopped, "training.steps=2", code=2)
    config.write_text(text.replace("steps: 1\n", "steps: 2\n", 1))
    go_on(stopped)


def test_files_may_lie_elsewhere_if_they_hold_the_same(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stopped / "moved").mkdir()
    for name in ("train.jsonl", "heldout.jsonl", "model"):
        (stopped / name).rename(stopped / "moved" / name)
    moved = [f"data.train={stopped}/moved/train.jsonl", f"model.path={stopped}/moved/model"]
    said = go_on(stopped, "training.steps=2", *moved, f"evaluation.data={stopped}/moved/heldout.jsonl")
    assert len(steps_of(stopped / "run")) == 2
    assert "cannot be compared" not in said and "accuracy_before" in RunFolder(stopped / "run").summary.read_text()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "--resume", str(tmp_path)])
    assert result.exit_code == 2 and "not a run folder" in result.output
    assert CliRunner().invoke(app, ["train"]).exit_code == 2


def test_two_processes_cannot_write_to_one_run(stopped: Path) -> None:
    with RunFolder(stopped / "run").lock():
        assert "another process" in go_on(stopped, "training.steps=2", code=1)


def test_secrets_have_to_be_given_again(tmp_path: Path) -> None:
    write_recipe(tmp_path, {"reward.args": {"api_key": "sk-1"}, "training.steps": 1})
    (tmp_path / "reward.py").write_text(
        "def reward(prompt, response, answer, api_key):\n    return sum(map(ord, response)) % 4 == 0\n"
    )
    assert CliRunner().invoke(app, ["train", str(tmp_path / "r.yaml")]).exit_code == 0
    assert "reward.args.api_key" in go_on(tmp_path, "training.steps=2", code=2)
    go_on(tmp_path, "training.steps=2", "reward.args.api_key=sk-1")
    assert "sk-1" not in (tmp_path / "run" / "config.yaml").read_text()


# --- checkpoints --------------------------------------------------------------------------------------------------


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path: Path) -> None:
    """Entry 83: also after a resume."""
    changes = {"training.steps": 6, "run.keep_last": 2, "evaluation.every": 1}
    run(tmp_path, LONG | changes, heldout=PROMPTS[:4])
    best = Checkpoints(RunFolder(tmp_path).checkpoints).best
    kept = {place.steps for place in Checkpoints(RunFolder(tmp_path).checkpoints).places()}
    assert best and kept == {5, 6} | ({best["step"]} - {0})
    for _ in range(2):
        changes["training.steps"] += 2
        resume(tmp_path, changes)
    best = Checkpoints(RunFolder(tmp_path).checkpoints).best
    kept = {place.steps for place in Checkpoints(RunFolder(tmp_path).checkpoints).places()}
    assert best and kept == {9, 10} | ({best["step"]} - {0})


def test_a_failed_save_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry 80: keep 1, and the disk fills up: the run stops with a message, and what there was is there."""
    original = Trainer.save_state

    def full(self: Trainer, folder: Path) -> None:
        if self.version >= 2:
            raise OSError(28, "No space left on device")
        original(self, folder)

    monkeypatch.setattr(Trainer, "save_state", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        run(tmp_path, LONG | {"run.keep_last": 1}, heldout=PROMPTS[:4])
    assert [p.name for p in RunFolder(tmp_path).checkpoints.glob("*step*")] == ["step-00001"]
    monkeypatch.undo()
    assert resume(tmp_path, {"run.keep_last": 1})["steps"] == 4


def test_half_written_checkpoints_are_not_seen_and_go_away(tmp_path: Path) -> None:
    """Entry 81."""
    run(tmp_path, LONG | {"training.steps": 2}, heldout=PROMPTS[:4])
    half = RunFolder(tmp_path).checkpoints / ".step-00009.123.tmp"
    (half / "model").mkdir(parents=True)
    fault = RunFolder(tmp_path).faults / ".step-00009-update-1.123.tmp"
    fault.mkdir(parents=True)
    assert last_checkpoint(tmp_path).name == "step-00002"
    resume(tmp_path)
    assert not half.exists() and not fault.exists()


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    """More about damage is in test_checkpoints.py."""
    run(tmp_path / "whole", LONG, heldout=PROMPTS[:4])
    run(tmp_path / "run", LONG | {"training.steps": 2}, heldout=PROMPTS[:4])
    (last_checkpoint(tmp_path / "run") / "state.json").write_text('{"steps_done": ')
    listener = Recorder()
    resume(tmp_path / "run", listener=listener)
    assert [w for w in listener.warnings if "step-00002 is damaged (state.json has 15 bytes" in w]
    (RunFolder(tmp_path / "run").checkpoints / "damaged-step-00002").rename(tmp_path / "damaged")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (CheckpointId(12), "step-00012"),
        (CheckpointId(12, sampling=True), "step-00012-rollout"),
        (CheckpointId(12, 3), "step-00012-update-00003"),
        (CheckpointId(12, sampling=True, repeat=2), "step-00012-rollout.2"),
    ],
)
def test_names_of_checkpoints(place: CheckpointId, name: str) -> None:
    assert place.name == name and CheckpointId.parse(name) == place
    assert (
        CheckpointId(12)
        < CheckpointId(12, sampling=True)
        < CheckpointId(12, sampling=True, repeat=2)
        < CheckpointId(12, 1)
        < CheckpointId(13)
    )
    assert CheckpointId.parse("best.json") is None and CheckpointId.parse(".step-00001.tmp") is None


def test_checkpoints_hold_nothing_that_unpickles(tmp_path: Path) -> None:
    run(tmp_path, LONG | {"training.steps": 1}, heldout=PROMPTS[:4])
    kinds = {path.suffix for path in last_checkpoint(tmp_path).rglob("*") if path.is_file()}
    assert kinds <= {".json", ".safetensors", ".jinja", ".txt"}


# --- when to stop -------------------------------------------------------------------------------------------------


def test_training_stops_when_the_held_out_metric_no_longer_rises(tmp_path: Path) -> None:
    changes = LONG | {"evaluation.every": 1, "evaluation.patience": 2, "training.steps": 50, "run.keep_last": 1}
    summary = run(tmp_path, changes | {"evaluation.min_improvement": 1.0}, heldout=PROMPTS[:4])
    assert summary["steps"] == 2 and summary["stopped"].startswith("converged: eval/accuracy has not risen")
    assert summary["best"]["step"] == 0
    again = resume(tmp_path, changes | {"evaluation.min_improvement": 1.0})
    assert again["steps"] == 2
    more = resume(tmp_path, changes | {"evaluation.min_improvement": 1.0, "evaluation.patience": 3})
    assert more["steps"] == 3


# --- kill -9 ------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dapo", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


def kill_and_resume(
    start: list[str], folder: Path, points: list[Callable[[Path], bool]], limit: float = 120
) -> tuple[int, list[str]]:
    """Start a run, kill it at each point in turn, resume; the last process is left to finish. Returns its exit code."""
    words, log = start, []
    for point in [*points, None]:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment())
        deadline = time.monotonic() + limit
        while point is not None and process.poll() is None and not point(folder) and time.monotonic() < deadline:
            time.sleep(0.002)
        if point is not None:
            process.send_signal(signal.SIGKILL)
        output, _ = process.communicate(timeout=limit)
        log.append(output.decode())
        if point is not None:  # otherwise it was done before, and nothing was tried
            assert process.returncode == -signal.SIGKILL, log[-1]
        if (folder / "config.yaml").exists():
            words = command("train", "--resume", str(folder))
    assert process.returncode == 0, log[-1]
    return process.returncode, log


def at_step(number: int, pause: float) -> Callable[[Path], bool]:
    """So many seconds after a run has written the metrics of a step."""
    reached: list[float] = []

    def there(folder: Path) -> bool:
        metrics = folder / "metrics.jsonl"
        if not reached and metrics.exists() and metrics.read_bytes().count(b"\n") > number:
            reached.append(time.monotonic())
        return bool(reached) and time.monotonic() >= reached[0] + pause

    return there


SEED = int(os.environ.get("DAPO_KILL_SEED", "18"))
"""Of the moments of the kills; others are tried by setting it."""


def killed_equals_whole(tmp_path: Path, count: int, seed: int) -> None:
    steps = 30
    changes = {"algorithm.filter_groups.on_starved": "train", "training.learning_rate": 1e-4}
    write_recipe(tmp_path, changes | {"training.steps": steps, "run.save_every": 2, "evaluation.every": 10})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    recipe = str(tmp_path / "r.yaml")
    subprocess.run(command("train", recipe, f"run.dir={whole}"), check=True, env=environment(), capture_output=True)
    print(f"moments of seed {seed}; DAPO_KILL_SEED={SEED} draws them again")
    rng = random.Random(seed)
    numbers = sorted(rng.sample(range(steps - 5), count))  # a pause later there is still something to do
    points = [at_step(number, rng.uniform(0, 0.3)) for number in numbers]
    kill_and_resume(command("train", recipe, f"run.dir={parts}"), parts, points)
    assert outcome(parts) == outcome(whole)


@pytest.mark.timeout(900)  # four processes, one after the other
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    killed_equals_whole(tmp_path, 2, seed=SEED)


@pytest.mark.nightly
@pytest.mark.parametrize("turn", range(3))
def test_killed_ten_times_and_resumed_equals_uninterrupted(tmp_path: Path, turn: int) -> None:
    killed_equals_whole(tmp_path, 10, seed=SEED + turn)


@pytest.mark.nightly
def test_the_demo_killed_ten_times_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    rng = random.Random(7)
    settings = ["seed=7", "runtime.deterministic=true", "run.save_every=3"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = command("demo", *settings, f"run.dir={whole}")
    subprocess.run(words, check=True, env=environment(), capture_output=True)
    points = [at_step(number, rng.uniform(0, 0.7)) for number in sorted(rng.sample(range(49), 10))]
    kill_and_resume(command("demo", *settings, f"run.dir={parts}"), parts, points, limit=600)
    found, wanted = outcome(parts), outcome(whole)
    for of in (found, wanted):
        for name in ("sft_steps", "sft_skill"):
            of["summary"].pop(name, None)  # the demo's own, which a resumed run does not know
    assert found == wanted


# --- stopped by hand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "method", "number"),
    [
        (Trainer, "update", 1),
        (Trainer, "update", 3),
        (Trainer, "publish", 2),
        (Trainer, "save", 3),
        (LocalLearner, "annotated", 2),
        (EarlyStopping, "observe", 2),
    ],
)
def test_an_interrupt_while_something_is_done_is_neither_lost_nor_made_twice(
    tmp_path: Path, owner: type, method: str, number: int
) -> None:
    """Ctrl-C inside of a call, most of which run in a thread that nothing can stop."""
    run(tmp_path / "whole", LONG, heldout=PROMPTS[:4])
    folder, calls = tmp_path / "run", []
    original = getattr(owner, method)

    def interrupting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.2)  # so that the cancellation comes before the end of the call
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, interrupting)
        with pytest.raises((KeyboardInterrupt, UserError)):
            run(folder, LONG, heldout=PROMPTS[:4])
    resume(folder)
    found, wanted = outcome(folder), outcome(tmp_path / "whole")
    assert found == wanted


def test_starved_where_there_is_a_checkpoint_already_is_saved_all_the_same(tmp_path: Path) -> None:
    done: list[int] = []

    def reward(prompt: str, response: str) -> Any:
        return False if len(done) == 1 else text_sum(prompt, response)

    changes = {"algorithm.filter_groups.max_num_gen_batches": 2}
    with pytest.raises(StarvedError, match="step-00001-rollout"):
        run(tmp_path, LONG | changes, Recorder(on_step=done.append), heldout=PROMPTS[:4], reward=reward)
    done.append(2)
    assert resume(tmp_path, changes, reward=text_sum)["steps"] == 4
    assert steps_of(tmp_path)[1]["groups/drawn"] > 0


def test_a_run_that_is_going_on_keeps_its_folder(tmp_path: Path) -> None:
    run(tmp_path / "run", {"run.if_exists": "rename"})
    with RunFolder(tmp_path / "run").lock(), pytest.raises(UserError, match="another process"):
        run(tmp_path / "run", {"run.if_exists": "rename"})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_fingerprint_tells_another_answer_template_and_stop_token() -> None:
    def of_model(stop: Any) -> str:
        model = tiny_model()
        model.generation_config.eos_token_id = stop
        return str(fingerprint_model(model, model.device)["model"]["config"])

    def of_tokenizer(template: str | None) -> str:
        tokenizer = copy.deepcopy(TOKENIZER)
        tokenizer.chat_template = template
        return str(fingerprint_tokenizer(tokenizer)["hash"])

    def of_prompt(text: str, answer: str) -> str:
        return str(fingerprint_prompts([Prompt(0, text, (1,), answer)])["hash"])

    assert of_model(1) == of_model(1) != of_model([1, 2])
    assert of_tokenizer(None) == of_tokenizer(None) != of_tokenizer("{{ messages }}")
    assert of_prompt("2+2=", "4") == of_prompt("2+2=", "4") != of_prompt("2+2=", "5")
    assert of_prompt("2+2=", "4") != of_prompt("2+3=", "4")


def test_a_model_with_another_config_is_refused(stopped: Path) -> None:
    config = json.loads((stopped / "model" / "config.json").read_text())
    (stopped / "model" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert "model.config: was" in go_on(stopped, "training.steps=2", code=1)


def test_a_lost_record_of_the_best_step_is_written_again(tmp_path: Path) -> None:
    """Otherwise the best checkpoint would be the next one to go. Both held-out answers are right after step 2 only."""
    heldout = [{"prompt": "9+9=", "answer": "8"}, {"prompt": "9+8=", "answer": "7"}]
    evaluated = itertools.count()

    def reward(prompt: str, response: str) -> Reward:
        if prompt.startswith("9"):
            right = next(evaluated) // len(heldout) == 2  # before training, after step 1, after step 2
            return Reward(right, float(right))
        return text_sum(prompt, response)

    changes = {"evaluation.every": 1, "run.keep_last": 1}
    run(tmp_path, LONG | changes, heldout=heldout, reward=reward)
    checkpoints = Checkpoints(RunFolder(tmp_path).checkpoints)
    best = checkpoints.best
    assert best is not None and (best["step"], best["value"]) == (2, 1.0)
    (RunFolder(tmp_path).checkpoints / "best.json").write_text('{"step')
    resume(tmp_path, changes | {"training.steps": 5}, heldout=heldout, reward=reward)
    assert checkpoints.best == best and (tmp_path / best["path"]).is_dir()
    kept = RunFolder(tmp_path).checkpoints.glob("step-*")
    assert sorted(path.name for path in kept) == ["step-00002", "step-00005"]


def test_a_lost_fingerprint_is_said_aloud(stopped: Path) -> None:
    (stopped / "run" / "fingerprint.json").unlink()
    assert "whether data and model are still the same is not known" in go_on(stopped, "training.steps=2")


def test_a_record_without_the_model_is_refused(stopped: Path) -> None:
    """Only what older versions did not record may be missing."""
    (stopped / "run" / "fingerprint.json").write_text("{}")
    assert "\nmodel: was null" in go_on(stopped, "training.steps=2", code=1)


@pytest.mark.parametrize("content", ['{"a', "[1]", '{"resumed": 3}', "\udcff"])
def test_a_damaged_record_of_the_environment_ends_no_run(stopped: Path, content: str) -> None:
    (stopped / "run" / "environment.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    go_on(stopped, "training.steps=2")
    assert len(json.loads((stopped / "run" / "environment.json").read_text())["resumed"]) == 1


def test_a_lock_that_cannot_be_taken_is_no_fault_of_the_program(stopped: Path) -> None:
    (stopped / "run" / ".lock").unlink()
    (stopped / "run" / ".lock").mkdir()
    assert "cannot write to this run folder" in go_on(stopped, "training.steps=2", code=1)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("format", 99, "is of format 99"),
        ("buffer", {}, "state of the run cannot be read"),
        ("monitor", None, "state of the run cannot be read"),
        ("steps_done", "six", "state of the run cannot be read"),
    ],
)
def test_a_state_that_is_not_of_this_program_is_refused(tmp_path: Path, key: str, value: object, says: str) -> None:
    """Its manifest is whole, as that of a later version's would be."""
    run(tmp_path, LONG | {"training.steps": 1}, heldout=PROMPTS[:4])
    checkpoint = last_checkpoint(tmp_path)
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(state | {key: value}))
    (checkpoint / MANIFEST).unlink()
    write_json(checkpoint / MANIFEST, {"format": 2, "files": _describe(checkpoint)})
    with pytest.raises(UserError, match=says):
        resume(tmp_path)


def test_an_optimizer_without_its_moments_is_refused(tmp_path: Path) -> None:
    """Failure 87. Such a one would train on, with other numbers."""
    run(tmp_path, LONG | {"training.steps": 1}, heldout=PROMPTS[:4])
    checkpoint = last_checkpoint(tmp_path)
    save_file({}, checkpoint / "optimizer" / "trainer.safetensors")
    known = json.loads((checkpoint / "optimizer" / "trainer.json").read_text())
    (checkpoint / "optimizer" / "trainer.json").write_text(json.dumps(known | {"tensors": []}))
    (checkpoint / MANIFEST).unlink()
    write_json(checkpoint / MANIFEST, {"format": 2, "files": _describe(checkpoint)})
    with pytest.raises(UserError, match="no moments"):
        resume(tmp_path)


@pytest.mark.parametrize("content", ["[]", '{"steps_done": 1}'])
def test_a_checkpoint_of_other_content_is_named(tmp_path: Path, content: str) -> None:
    run(tmp_path, LONG | {"training.steps": 1}, heldout=PROMPTS[:4])
    checkpoint = last_checkpoint(tmp_path)
    (checkpoint / MANIFEST).unlink()
    (checkpoint / "state.json").write_text(content)
    write_json(checkpoint / MANIFEST, {"format": 2, "files": _describe(checkpoint)})
    with pytest.raises(UserError, match="the state of the run cannot be read"):
        resume(tmp_path)


# --- the prompts as the model sees them ---------------------------------------------------------------------------


class Clock(date):
    """A date whose today() is set."""

    now = date(2024, 2, 5)

    @classmethod
    def today(cls) -> date:  # type: ignore[override]
        return cls.now


DATED = (
    "{{ strftime_now('%d') }}{% if short %}={% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{% endif %}"
)


@pytest.fixture
def dated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of one step whose chat template writes the date, begun on the 5th."""
    monkeypatch.setattr("dapo.data.template.date", Clock)
    monkeypatch.setattr(Clock, "now", date(2024, 2, 5))
    (tmp_path / "chat.jinja").write_text(DATED)
    run_dated(tmp_path, steps=1)
    return tmp_path


def run_dated(folder: Path, *, steps: int = 2, resume: bool = False, **changes: Any) -> Any:
    settings = {"data.template": "chat", "data.chat_template": str(folder / "chat.jinja"), "training.steps": steps}
    inputs = {"resume": RunFolder(folder / "run")} if resume else {}
    config = config_for(folder / "run", settings | changes)
    if resume:
        check_resumable(RunFolder(folder / "run"), config)
    tokenizer = copy.deepcopy(TOKENIZER)
    given = {"model": tiny_model(), "tokenizer": tokenizer, "rows": PROMPTS, "reward": text_sum} | inputs
    return run_experiment(config, Recorder(), RunOverrides(**given))


def prompts_seen(folder: Path) -> set[str]:
    """The two characters that the prompts of a run begin with."""
    files = sorted(RunFolder(folder / "run").samples.glob("*.safetensors"))
    arrays = [TokenArrays.read(path) for path in files]
    starts = [np.cumsum(one.prompt_lengths) - one.prompt_lengths for one in arrays]
    return {TOKENIZER.decode(a.prompt_ids[k : k + 2]) for a, ks in zip(arrays, starts, strict=True) for k in ks}


def test_a_run_tells_one_date_throughout(dated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert yaml.safe_load((dated / "run" / "config.yaml").read_text())["data"]["today"] == "2024-02-05"
    monkeypatch.setattr(Clock, "now", date(2024, 2, 17))
    run_dated(dated, resume=True)
    assert len(steps_of(dated / "run")) == 2 and prompts_seen(dated) == {"05"}
    assert resume_config(dated / "run").data.today == date(2024, 2, 5)


def test_other_prompts_are_refused(dated: Path) -> None:
    with pytest.raises(UserError, match=r"what it started from has changed:\nprompt: was"):
        run_dated(dated, resume=True, **{"data.today": "2024-02-06"})
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs"):
        run_dated(dated, resume=True, **{"data.chat_template_kwargs": {"short": True}})
    (dated / "chat.jinja").write_text(DATED + " ")
    with pytest.raises(UserError, match=r"tokenizer\.hash: was"):
        run_dated(dated, resume=True)
