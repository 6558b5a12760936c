"""Phases of one recipe: each from what an earlier one made, each resumable; and the page over what they leave."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dapo.commands import app
from dapo.config.plan import existing_recipe
from dapo.config.stages import load_stage
from dapo.errors import ConfigError
from dapo.observe.run_view import RunView
from dapo.stages.phases import load_phases
from run_cases import TOKENIZER, tiny_model
from stage_cases import ROWS

SIZES = {"steps": 2, "rows_per_update": 4, "warmup_steps": 0, "tokens_per_micro_batch": 64, "learning_rate": 1e-3}
QUIET = {"resources_every_s": 0}
METHOD: dict[str, Any] = {
    "dir": "runs/method",
    "phases": {
        "sft": {
            "stage": "sft",
            "model": {"path": "tiny"},
            "data": {"train": "sft.jsonl", "template": "plain", "max_length": 32},
            "training": SIZES,
            "run": QUIET,
        },
        "reward": {
            "stage": "reward_model",
            "model": {"path": "$sft"},
            "data": {"train": "dpo.jsonl", "max_length": 32},
            "evaluation": {"data": "dpo.jsonl", "rows": 8},
            "reward_model": {"template": "plain"},
            "training": SIZES,
            "run": QUIET,
        },
        "rl": {
            "stage": "dapo",
            "model": {"path": "$sft"},
            "data": {"train": "sft.jsonl", "template": "plain", "max_prompt_length": 8},
            "reward": {"kind": "model", "path": "$reward", "template": "plain", "max_length": 32},
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_response_length": 8},
            "algorithm": {"filter_groups": {"metric": "score"}, "overlong_buffer": {"len": 2}},
            "training": {"steps": 1, "groups_per_update": 1, "tokens_per_micro_batch": 64},
            "run": QUIET,
        },
    },
}


@pytest.mark.parametrize("run", ["", "run:\n", "run: {dir: null}\n"])
def test_a_stage_without_a_run_folder_gets_one_by_the_name_of_its_recipe(tmp_path: Path, run: str) -> None:
    recipe = tmp_path / "taste.yaml"
    recipe.write_text(f"stage: sft\nmodel: {{path: m}}\ndata: {{train: a.jsonl}}\n{run}")
    assert load_stage("sft", recipe).run.dir == "runs/taste"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("tiny")
    TOKENIZER.save_pretrained("tiny")
    for name in ("sft", "dpo"):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    Path("method.yaml").write_text(yaml.safe_dump(METHOD, sort_keys=False))
    return tmp_path


def invoke(*words):
    done = CliRunner().invoke(app, ["phases", "method.yaml", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_policy_is_trained_by_the_reward_model_of_a_phase_before(here):
    invoke()
    views = {name: RunView.read(here / "runs/method" / name) for name in METHOD["phases"]}
    assert {view.state for view in views.values()} == {"finished"}
    assert views["rl"].config["reward"]["path"] == "runs/method/reward/model-after"
    told = (here / "runs/method/report.md").read_text()
    assert all(f"## {name}" in told for name in views) and "| accuracy | 50.0% |" in told
    before = (here / "runs/method/sft/summary.json").stat().st_mtime_ns
    shutil.rmtree(here / "runs/method/rl")  # what comes when nobody has begun it
    (here / "runs/method/reward/summary.json").unlink()  # killed at its end
    said = invoke("--resume")
    assert "phase sft: done before" in said and "phase reward: done before" not in said
    assert (here / "runs/method/sft/summary.json").stat().st_mtime_ns == before
    assert RunView.read(here / "runs/method/rl").state == "finished"
    assert CliRunner().invoke(app, ["phases", "method.yaml"]).exit_code == 2  # it is there already
    more = METHOD["phases"]["sft"]["training"]["steps"] + 1
    for change in ("phases.reward.reward_model.centring=0.1", "phases.rl.rollout.temperature=0.5"):
        words = ["phases", "method.yaml", "--resume", f"phases.sft.training.steps={more}", change]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2 and "would make it another one" in done.output  # done, but not with this
    assert RunView.read(here / "runs/method/sft").summary["steps"] == more - 1, (
        "nothing was trained before that was said"
    )
    assert "phase reward is not done again after sft" in invoke("--resume", f"phases.sft.training.steps={more}")
    assert RunView.read(here / "runs/method/sft").summary["steps"] == more


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("phases.reward.model.path=$rl", r"phases\.reward\.model\.path: \$rl names no earlier phase; there are: \$sft"),
        ("phases.sft.stage=ppo", r"phases\.sft\.stage: is ppo, and can be sft, dpo, reward_model, dapo"),
        ("phases.sft.training.stpes=1", r"training\.stpes: unknown key"),
        ("phases=3", "must be a mapping"),
        ("phase=3", "phase: unknown key"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(here, change, message):
    with pytest.raises(ConfigError, match=message):
        load_phases("method.yaml", [change])


def test_what_begins_with_a_dollar_elsewhere_stays(here):
    reward = {"kind": "http", "url": "http://127.0.0.1:9/score", "request": {"items": ["$item"]}}
    _, found = load_phases("method.yaml", [f"phases.rl.reward={json.dumps(reward)}"])
    assert found["rl"].reward.request == {"items": ["$item"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["phases.rl.data.train=gone.jsonl"], r"phase rl: data\.train: 'gone\.jsonl' does not exist"),
        (["phases.reward.data.chosen_key=best"], r"phase reward: .*dpo\.jsonl:1: no key 'best'"),
        (["phases.rl.model.path=$reward"], r"phase rl: model\.path: .* will be a reward model"),
        (["phases.rl.reward.path=$sft"], r"phase rl: reward\.path: .* will be a policy"),
        (["phases.rl.reward.path=./gone"], r"phase rl: reward\.path: .*gone: no such folder"),
        (["phases.reward.model.path=./gone"], r"phase reward: tokenizer .*gone: no such folder"),
    ],
)
def test_what_a_later_phase_names_is_looked_at_before_the_first_one(here, changes, message):
    done = CliRunner().invoke(app, ["phases", "method.yaml", *changes])
    assert done.exit_code in (1, 2) and re.search(message, done.output.replace("\n", " ")), done.output
    assert not Path("runs/method").exists()


def test_a_dry_run_checks_all_phases_and_writes_nothing(here):
    def plan(*words):
        before = sorted(map(str, here.rglob("*")))
        done = CliRunner().invoke(app, ["phases", "method.yaml", "--dry-run", *words])
        assert sorted(map(str, here.rglob("*"))) == before
        return done

    by_epoch = ("phases.sft.training.steps=null", "phases.sft.training.epochs=0.5")
    done, rows = plan(*by_epoch), len(ROWS["sft"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"phase sft: begins; sft from tiny, {-(-rows // 8)} steps, in runs/method/sft",
        "phase reward: begins; reward_model from runs/method/sft/model-after, 2 steps, in runs/method/reward",
        "phase rl: begins; dapo from runs/method/sft/model-after, 1 step, in runs/method/rl",
    ]
    done = plan("phases.rl.data.train=gone.jsonl")
    assert done.exit_code == 2 and "phase rl: data.train" in done.output and not done.stdout
    invoke(*by_epoch)
    shutil.rmtree(here / "runs/method/rl")
    assert plan(*by_epoch).exit_code == 2  # it is there already
    said = plan(*by_epoch, "--resume", "phases.reward.training.steps=3").stdout
    assert re.findall(r"phase (\w+): ([\w ]+);", said) == [
        ("sft", "done before"),
        ("reward", "goes on"),
        ("rl", "begins"),
    ]


@pytest.mark.parametrize("command", [["train"], ["rank"], ["reward-server"]])
def test_who_needs_one_run_names_the_command_of_phases(here, command):
    done = CliRunner().invoke(app, [*command, "method.yaml", *(["sft.jsonl"] if command == ["rank"] else [])])
    assert done.exit_code == 2 and "what would work: dapo phases method.yaml" in done.output.replace("\n", " ")


@pytest.mark.parametrize(("name", "stage"), [("sft", "sft"), ("dpo", "dpo"), ("reward-model", "reward_model")])
def test_the_recipes_to_begin_with_can_be_read(name, stage):
    folder = Path(__file__).parents[2] / "recipes/method"
    assert load_stage(stage, folder / f"{name}.yaml").stage == stage
    assert list(load_phases(existing_recipe(folder / "phases.yaml"))[1]) == ["sft", "reward", "rl"]


def test_a_learning_curve_over_the_number_of_pairs(here):
    tree = {key: value for key, value in METHOD["phases"]["reward"].items() if key != "stage"}
    Path("rm.yaml").write_text(
        yaml.safe_dump(tree | {"model": {"path": "tiny"}, "run": QUIET | {"dir": "runs/rm", "save_every": 1}})
    )
    done = CliRunner().invoke(app, ["reward-model", "rm.yaml", "--curve", "8"])
    assert done.exit_code == 0, done.output
    found = json.loads(Path("runs/rm/curve.json").read_text())
    assert [point["rows"] for point in found] == [2, 4, 9, 18, 36]
    assert all("accuracy_after" in point for point in found)
    whole = (Path("runs/rm/rows-36") / "model-after/model.safetensors").read_bytes()
    shutil.rmtree("runs/rm/rows-36/model-after")
    shutil.rmtree(max(Path("runs/rm/rows-36/checkpoints").glob("step-*")))
    Path("runs/rm/rows-36/summary.json").unlink()  # killed in its second step
    Path("runs/rm/curve.json").unlink()
    done = CliRunner().invoke(app, ["reward-model", "rm.yaml", "--curve", "8"])
    assert done.exit_code == 0 and done.output.count("step 2/2") == 1, (
        done.output
    )  # of the others nothing is left to do
    assert json.loads(Path("runs/rm/curve.json").read_text()) == found
    assert (Path("runs/rm/rows-36") / "model-after/model.safetensors").read_bytes() == whole
    done = CliRunner().invoke(app, ["reward-model", "rm.yaml", "--curve", "8", "training.learning_rate=1e-4"])
    assert done.exit_code == 2 and "learning_rate" in done.output and "run.dir" in done.output
    for wrong in (["rm.yaml", "evaluation.data=[]"], ["--resume", "runs/rm/rows-36"]):
        done = CliRunner().invoke(app, ["reward-model", *wrong, "--curve", "3"])
        assert done.exit_code == 2 and "--curve compares runs from the start" in done.output


def test_the_page_report_and_inspect_show_a_stage(here):
    pytest.importorskip("duckdb")
    from page_run import served

    invoke("phases.sft.training.steps=1")
    with served(here / "runs/method") as address:
        import urllib.request

        def get(view):
            with urllib.request.urlopen(f"{address}/api/{view}", timeout=30) as answer:
                return json.loads(answer.read())

        assert {"preference/accuracy", "preference/margin", "eval/accuracy"} <= set(
            get("metrics?run=reward")["headlines"]
        )
        for view in ("curves?run=reward&metric=preference/margin", "config?run=reward", "alarms?run=reward"):
            assert get(view)
        assert get("evaluation?run=reward") and get("time?run=reward")
    for command in ("inspect", "report"):
        done = CliRunner().invoke(app, [command, "runs/method/reward"])
        assert done.exit_code == 0, done.output


def test_a_recipe_without_phases_is_told_the_commands_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("model: {path: tiny}\n")
    with pytest.raises(ConfigError, match=r"by dapo sft, dpo, reward-model$"):
        load_phases(str(tmp_path / "r.yaml"))
