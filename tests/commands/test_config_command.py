"""``dapo config``: what is shown is what is used, and is itself a recipe."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dapo.commands import app
from dapo.config import all_keys, build_config, load_config, nested
from dapo.config.reference import keys_of
from dapo.config.tree import Config

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))

RECIPE = """\
model: {path: some/model}
data: {train: train.jsonl, system: "two\\nlines: 'a' # no comment \\u2028 \\U0001F600"}
reward: {kind: function, function: "f.py:g", args: {names: [a, "true"], api_key: sk-1, when: 2024-01-31, n: {m: null}}}
training: {groups_per_update: 64}
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RECIPE)
    Path("train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def shown(*arguments: str) -> str:
    result = run("config", *arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def test_what_is_shown_is_a_recipe_that_resolves_to_the_same() -> None:
    Path("x.yaml").write_text(shown("r.yaml", "seed=7", "reward.args.api_key=null"))
    assert load_config("x.yaml") == load_config("r.yaml", ["seed=7", "reward.args.api_key=null"])
    one, two = (
        run("train", "x.yaml", "--dry-run"),
        run("train", "r.yaml", "--dry-run", "seed=7", "reward.args.api_key=null"),
    )
    assert one.exit_code == 0 and one.stdout == two.stdout


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_every_shipped_recipe_goes_round(recipe: Path) -> None:
    Path("x.yaml").write_text(shown(str(recipe)))
    assert load_config("x.yaml") == load_config(recipe)


def test_each_key_has_its_meaning_type_and_default() -> None:
    text = shown("r.yaml")
    assert "# N: groups that one rollout step trains on. (integer >= 1; default 512)" in text
    assert "groups_per_update: 64  # changed" in text
    assert "samples_per_prompt: 16\n" in text
    assert "(one of off, measure, loss, reward; default 'off')" in " ".join(text.split()).replace("# ", "")
    names = {line.strip().partition(":")[0] for line in text.splitlines() if not line.strip().startswith("#")}
    missing = [k for k in all_keys() if not k.startswith("reward.") and k.rpartition(".")[2] not in names]
    assert missing == []


def test_without_a_recipe_there_are_the_defaults_and_a_gap() -> None:
    text = shown()
    assert "path: null  # to be filled in" in text and "# changed" not in text
    filled = yaml.safe_load(text)
    filled["model"]["path"] = "m"
    assert build_config(filled) == build_config({"model": {"path": "m"}})
    Path("new.yaml").write_text(text)
    assert "new.yaml" in run("train", "new.yaml").stderr and "model.path" in run("train", "new.yaml").stderr


def test_overrides_need_no_recipe() -> None:
    tree = yaml.safe_load(shown("training.steps=3", "reward.kind=function"))
    assert tree["training"]["steps"] == 3 and tree["reward"]["function"] is None
    result = run("config", "training.stepz=3")
    assert result.exit_code == 2 and "did you mean training.steps?" in result.stderr


def test_secrets_are_blanked() -> None:
    for options in ([], ["--json"]):
        text = shown("r.yaml", *options)
        assert "sk-1" not in text and "(not recorded)" in text


def test_as_json() -> None:
    found = json.loads(shown("r.yaml", "--json"))
    assert found["training.groups_per_update"] == {
        "value": 64,
        "default": 32,
        "required": False,
        "type": "integer >= 1",
        "choices": [],
        "meaning": "Groups in one optimizer mini-batch.",
    }
    values = {key: one["value"] for key, one in json.loads(shown("r.yaml", "reward.args={}", "--json")).items()}
    assert build_config(nested(values)) == load_config("r.yaml", ["reward.args={}"])


def test_types_are_said_in_words() -> None:
    types = {key.name: key.type for key in keys_of(Config)}
    assert types["seed"] == "integer >= 0 and < 4294967296"
    assert types["algorithm.clip_ratio_c"] == "number > 1, or null"
    assert types["training.betas"] == "list: number, number"
    assert types["reward.extract"] == "list of boxed or answer_line"
    assert types["evaluation.data"] == "list of items"
    assert types["run.dir"] == "text or null"
    assert types["data.shuffle"] == "true or false"


# --- reading ------------------------------------------------------------------------------------------------------


def test_the_home_folder_may_be_written_as_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    files = ["data.train=[~/a.jsonl, b~.jsonl]", "evaluation.data=~/e.jsonl", "reward.function='~/f.py:g'"]
    found = load_config("r.yaml", ["model.path=~/m", "model.tokenizer=~/t", "run.dir=~/runs/x", *files])
    assert (found.model.path, found.model.tokenizer) == ("/home/ann/m", "/home/ann/t")
    assert [item.path for item in found.data.train] == ["/home/ann/a.jsonl", "b~.jsonl"]
    assert [item.path for item in found.evaluation.data] == ["/home/ann/e.jsonl"]
    assert found.run.dir == "/home/ann/runs/x"
    assert found.reward.function == "/home/ann/f.py:g"  # type: ignore[union-attr]


def test_a_date_is_the_text_that_was_written() -> None:
    assert load_config("r.yaml").reward.args["when"] == "2024-01-31"  # type: ignore[union-attr]
    assert run("train", "r.yaml", "--dry-run").exit_code == 0


@pytest.mark.parametrize(
    "value", ["!!binary gIGC", "{1: 2}", "[.nan]", "!!set {a}", '"\\ud800"', "!!timestamp 2024-01-31"]
)
def test_arguments_that_a_run_folder_cannot_hold_are_refused_by_key(value: str) -> None:
    result = run("train", "r.yaml", f"reward.args.deep={value}", "--dry-run")
    assert result.exit_code == 2 and re.search(r"reward.args(: |\.)deep", result.stderr)
