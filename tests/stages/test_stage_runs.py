"""A stage from its recipe to its summary, stopped anywhere and resumed: the same weights and metrics, to the bit."""

from __future__ import annotations

import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dapo.commands import app
from dapo.config.stages import build_stage
from dapo.errors import ConfigError, UserError
from dapo.observe.run_folder import RunFolder
from dapo.observe.run_view import RunView
from dapo.orchestrator.model_writer import ModelWriter
from dapo.stages.learner import StageLearner
from dapo.stages.run import as_begun, resume_stage
from data.tokenizers_for_tests import CHAT, char_tokenizer
from run_cases import TOKENIZER, Recorder, loads_whole, steps_of, tiny_model, weights_hash, without_times
from stage_cases import OWN, ROWS, SETTINGS, run, stage_config

STAGES = ["sft", "dpo", "reward_model"]


def told(folder):
    return [without_times(entry) for entry in steps_of(folder)], weights_hash(folder / "model-after")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Each stage, run without a stop."""
    folders = {stage: tmp_path_factory.mktemp(stage) / "run" for stage in STAGES}
    return {stage: (run(stage, folder), folder) for stage, folder in folders.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_learns_and_says_so(whole, stage):
    summary, folder = whole[stage]
    view = RunView.read(folder)
    assert (summary["steps"], summary["updates"], summary["stopped"]) == (6, 6, "all steps are done")
    assert [e["step"] for e in view.metrics] == list(range(7)) and view.state == "finished"
    assert [e["step"] for e in view.evaluations] == [0, 4, 6]
    assert summary["loss_after"] < summary["loss_before"]
    assert summary["heldout_rows"] == 10 and view.metrics[-1]["epoch"] == pytest.approx(24 / 36)
    if stage != "sft":
        assert summary["accuracy_before"] == 0.5  # policy and reference are the same, and the head is 0
        assert 0 <= summary["calibration_error_after"] <= 0.5
        assert {"preference/accuracy", "preference/margin"} < view.metrics[-1].keys()
    if stage == "dpo":
        assert "preference/chosen_logprob" in view.metrics[-1]
    if stage != "reward_model":
        loads_whole(folder / "model-after")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kept", [4, 0])
def test_killed_and_resumed_equals_not_killed(whole, stage, kept, tmp_path):
    """What a killed process leaves: metrics that are further than the last checkpoint, and no summary."""
    folder = tmp_path / "run"
    shutil.copytree(whole[stage][1], folder)
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name[5:10]) > kept:
            shutil.rmtree(path)
    shutil.rmtree(folder / "model-after")
    (folder / "summary.json").unlink()
    run(stage, folder, resume=True)
    assert told(folder) == told(whole[stage][1])


@pytest.mark.parametrize("place", ["step", "update", "evaluation"])
def test_stopped_and_resumed_equals_not_stopped(whole, place, tmp_path, monkeypatch):
    folder, calls = tmp_path / "run", []

    def stop_at(number):
        calls.append(number)
        if len(calls) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if place != "step":
            name, at = ("inputs", 4) if place == "update" else ("evaluate", 2)
            patched.setattr(StageLearner, name, stopping(getattr(StageLearner, name), at))
        with pytest.raises(KeyboardInterrupt):
            run("dpo", folder, listener=Recorder(stop_at) if place == "step" else None)
    assert not (folder / "model-after").exists()
    assert json.loads((folder / "summary.json").read_text())["stopped"] == "interrupted"
    run("dpo", folder, resume=True)
    assert told(folder) == told(whole["dpo"][1])


def test_a_stage_that_fails_says_how_it_goes_on(tmp_path, monkeypatch):
    async def full(_):
        raise UserError("model-after: cannot be written: No space left on device")

    monkeypatch.setattr(ModelWriter, "write_after", full)
    with pytest.raises(UserError, match=r"the state is in .*step-00001; to go on: dapo\.sft\(\.\.\.\)"):
        run("sft", tmp_path / "run", {"training.steps": 1})


def stopping(method, at):
    """``method``, but its call number ``at`` is interrupted."""
    calls = []

    def called(self, given):
        calls.append(given)
        if len(calls) == at:
            raise KeyboardInterrupt
        return method(self, given)

    return called


def test_a_longer_run_goes_on_where_a_shorter_one_ended(whole, tmp_path):
    run("dpo", tmp_path / "run", {"training.steps": 3})
    run("dpo", tmp_path / "run", resume=True)
    then, now = told(whole["dpo"][1]), told(tmp_path / "run")
    assert now[1] == then[1]


def test_what_would_make_it_another_run_is_refused(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole["dpo"][1], folder)
    begun = RunFolder(folder)
    assert as_begun(begun, stage_config("dpo", folder, {"training.steps": 9})).training.steps == 9
    with pytest.raises(ConfigError, match=r"dpo\.beta: was 0\.1, is now 0\.2"):
        as_begun(begun, stage_config("dpo", folder, {"dpo.beta": 0.2}))
    with pytest.raises(ConfigError, match=r"stage: is dpo, and this is sft; what would work: dapo dpo"):
        as_begun(begun, stage_config("sft", folder))
    with pytest.raises(ConfigError, match=r"was begun in Python.*dapo\.dpo\("):
        resume_stage("dpo", folder)
    with pytest.raises(UserError, match=r"data\.train"):
        run("dpo", folder, {"training.steps": 9}, resume=True, rows=ROWS["dpo"][:-1])


def test_epochs_are_steps(tmp_path):
    assert run("sft", tmp_path / "run", {"training.steps": None, "training.epochs": 0.5})["steps"] == 5  # 18 rows by 4


def test_the_day_that_a_template_tells_is_that_of_the_start(tmp_path):
    tokenizer = char_tokenizer(chat_template="{{ strftime_now('%Y-%m-%d') }}" + CHAT)
    model = tiny_model(vocab_size=len(tokenizer))
    changes = {"data.template": "chat", "data.max_length": 48, "training.steps": 1}
    begun = {"model": model, "tokenizer": tokenizer}
    run("sft", tmp_path / "run", changes | {"data.today": date(2024, 5, 1)}, **begun)
    config = as_begun(RunFolder(tmp_path / "run"), stage_config("sft", tmp_path / "run", changes))
    assert config.data.today == date(2024, 5, 1)
    run("sft", tmp_path / "other", changes, **begun)
    assert yaml.safe_load((tmp_path / "other/config.yaml").read_text())["data"]["today"] is not None


def test_a_tree_says_what_is_wrong():
    base = {"model": {"path": "x"}}
    for stage, section, message in (
        ("dpo", {"dpo": {"gamma": 1.0}}, "dpo.gamma: is for loss=simpo"),
        ("dpo", {"dpo": {"bta": 1.0}}, "dpo.bta: unknown key; did you mean dpo.beta?"),
        ("sft", {"training": {"steps": 1, "epochs": 1}}, "training.epochs: is 1, and steps is 1"),
        ("sft", {"training": {"tokens_per_micro_batch": 9}}, "training.tokens_per_micro_batch: is 9"),
        ("sft", {"runtime": {"kind": "ray"}}, "runtime.kind"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_stage(stage, base | section)


def test_lora_trains_an_adapter(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    summary = run("sft", tmp_path / "run", {"model.lora.rank": 2}, model=str(tmp_path / "base"))
    assert (tmp_path / "run/model-after/adapter_config.json").is_file()
    assert summary["loss_after"] < summary["loss_before"]


@pytest.mark.parametrize("stage", STAGES)
def test_the_command_line(stage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("tiny")
    TOKENIZER.save_pretrained("tiny")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[stage]), encoding="utf-8")
    tree: dict[str, Any] = {
        "stage": stage,
        "data": {"train": "rows.jsonl"},
        "evaluation": {"data": "rows.jsonl", "rows": 8},
    }
    for key, value in (SETTINGS | OWN[stage]).items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {}).update({name: value}) if name else tree.update({section: value})
    Path("stage.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    command = stage.replace("_", "-")
    done = CliRunner().invoke(app, [command, "stage.yaml", "--dry-run"])
    assert done.exit_code == 0 and f"stage: {stage}" in done.stdout, done.output
    assert "# memory: about " in done.stdout
    done = CliRunner().invoke(app, ["doctor", "stage.yaml", "--json"])
    found = {one["name"]: one["status"] for one in json.loads(done.stdout)["findings"]}
    assert done.exit_code == 0 and set(found.values()) == {"pass"}, done.output
    assert {"rows", "architecture", "memory", "snapshot", "disk", "weights"} < found.keys()
    done = CliRunner().invoke(app, ["plan", "stage.yaml", "--cluster", "H200"])
    assert done.exit_code == 0 and "tokens trained" in done.stdout and "6 steps" in done.stdout, done.output
    assert not RunFolder(tmp_path / "runs/stage").config.exists()
    assert f"is a recipe of dapo {command}" in CliRunner().invoke(app, ["train", "stage.yaml"]).output
    done = CliRunner().invoke(app, [command, "stage.yaml", "training.steps=2"])
    assert done.exit_code == 0 and "all steps are done" in done.output, done.output
    done = CliRunner().invoke(app, [command, "--resume", "runs/stage", "training.steps=3"])
    assert done.exit_code == 0 and "step 3/3" in done.output, done.output
    assert CliRunner().invoke(app, [command]).exit_code == 2
