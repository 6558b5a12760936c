"""The command line: exit codes, messages for people, speed, and a dry run that touches nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from dapo.commands import app
from dapo.commands.demo.task import make_tokenizer
from dapo.commands.shared.options import files_and_settings
from dapo.commands.train import next_commands
from dapo.config import build_config
from dapo.config.plan import recipe_path
from dapo.errors import DataError, ModelError, NumericalError, RewardError, StarvedError, UserError
from dapo.orchestrator.resume import how_to_resume
from dapo.rollout.engine import NotFiniteError

RECIPE = {
    "model": {"path": "some/model"},
    "data": {"train": "train.jsonl"},
    "rollout": {"prompts_per_step": 16, "samples_per_prompt": 8},
    "training": {"groups_per_update": 4},
}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a recipe and its data."""
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(yaml.safe_dump(RECIPE))
    Path("train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def replace_run(monkeypatch: pytest.MonkeyPatch, effect: Any) -> list[Any]:
    """Put a stand-in where the orchestrator is: raises ``effect`` or returns it. The list collects its arguments."""
    calls: list[Any] = []

    def stand_in(*arguments: Any) -> Any:
        calls.append(arguments)
        if isinstance(effect, BaseException):
            raise effect
        return effect

    Path(RECIPE["model"]["path"]).mkdir(parents=True, exist_ok=True)  # a training asks first whether it can be had
    for name, function in (("dapo.orchestrator.launch", "run_experiment"), ("dapo.commands.demo.run", "run_demo")):
        module = ModuleType(name)
        setattr(module, function, stand_in)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


# --- without a run ------------------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert run("--version").output == "dapo 0.1.0\n"
    assert "train" in run("--help").output and "demo" in run("--help").output
    assert "Exit codes" in run("--help").output and "Exit codes" in run("train", "--help").output


def test_a_usage_error_is_2() -> None:
    assert run("train").exit_code == 2
    assert run("train", "r.yaml", "--no-such-option").exit_code == 2
    assert run("trian").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "missing.yaml"], "missing.yaml: cannot read the recipe"),
        (["train", "r.yaml", "training.stepz=3"], "did you mean training.steps?"),
        (["train", "r.yaml", "training.steps"], "expected section.key=value"),
        (["train", "r.yaml", "data.train=[]"], "data.train: required"),
        (["train", "r.yaml", "data.train=gone.jsonl"], "data.train: 'gone.jsonl' does not exist"),
        (["train", "r.yaml", "evaluation.data=gone.jsonl", "--dry-run"], "evaluation.data: 'gone.jsonl'"),
    ],
)
def test_an_error_of_the_users_is_a_message_on_stderr_and_2(arguments: list[str], expected: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and expected in result.stderr
    assert "Traceback" not in result.output


def test_where_there_is_no_recipe_those_that_come_with_dapo_are_named() -> None:
    said = run("train", "gsm8k").stderr
    assert said.startswith("error: gsm8k: cannot read the recipe: No such file") and said.count("\n") == 1
    assert "those that come with dapo: cpu-demo, dapo-32b-paper, gsm8k-1gpu, cispo, dpo, dr-grpo, grpo, gspo" in said


def test_a_recipe_that_comes_with_dapo_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    by_name, by_file = run("config", "cpu-demo"), run("config", str(recipe_path("cpu-demo")))
    assert by_name.exit_code == 0 and by_name.stdout == by_file.stdout
    assert "`dapo demo` makes what this recipe trains on" in run("train", "cpu-demo").stderr
    (tmp_path / "cpu-demo").write_text("seed: 77\nmodel: {path: m}\n")  # a file of that name goes first
    assert "seed: 77" in run("config", "cpu-demo").stdout


def test_the_recipes_of_methods_go_by_their_names_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "dir: runs/grpo" in run("config", "grpo").stdout
    assert "what would work: dapo sft" in run("train", "sft").stderr
    assert "data.train: 'pairs.jsonl' does not exist" in run("dpo", "dpo").stderr


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("evaluate m --data a.jsonl evaluation.data=b.jsonl", "--data: is a.jsonl, and evaluation.data is b.jsonl"),
        ("evaluate m --rows 3 evaluation.rows=4 --data a", "--rows: is 3, and evaluation.rows is 4"),
        (
            'evaluate m --samples 2 evaluation={"samples_per_prompt":4} --data a',
            "--samples: is 2, and evaluation.samples_",
        ),
        ("generate m p --temperature 1 --set evaluation.temperature=0.5", "--temperature: is 1.0, and evaluation.temp"),
        (
            "generate m p --max-tokens 9 --set evaluation.max_response_length=8",
            "--max-tokens: is 9, and evaluation.max",
        ),
        ("generate m p --stop x --stop y --set evaluation.stop=[x]", "--stop: is x, y, and evaluation.stop is x"),
        ("data check a.jsonl --eval b.jsonl evaluation.data=c.jsonl", "--eval: is b.jsonl, and evaluation.data is c"),
        ("compare a.yaml --minutes 5 training.minutes=6", "--minutes: is 5.0, and training.minutes is 6"),
        ("compare a.yaml --minutes 5 --seeds 1,2 seed=3", "--seeds: is 1, 2, and seed is 3"),
    ],
)
def test_an_option_and_a_key_that_say_two_things_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").touch()
    result = run(*command.split())
    assert result.exit_code == 2 and f"error: {named}" in result.stderr


@pytest.mark.parametrize("command", ["inspect", "ui", "report"])
def test_a_name_that_no_file_can_have_is_a_mistake_of_the_users(command: str) -> None:
    result = run(command, "x" * 300)
    assert result.exit_code == 1 and "xxx: no file can have a name that long" in result.stderr


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_a_missing_file_is_told_with_the_comment_that_may_say_how_it_is_made(
    workplace: Path, option: list[str]
) -> None:
    assert "the comment" not in run("train", "r.yaml", "data.train=gone.jsonl", *option).stderr
    text = Path("r.yaml").read_text(encoding="utf-8")
    Path("named.yaml").write_text(f"# named.yaml\n{text}", encoding="utf-8")
    assert "the comment" not in run("train", "named.yaml", "data.train=gone.jsonl", *option).stderr
    Path("told.yaml").write_text(f"# made by make_it.py\n{text}", encoding="utf-8")
    said = run("train", "told.yaml", "data.train=gone.jsonl", *option).stderr
    assert "see the comment at the top of told.yaml" in said


@pytest.mark.parametrize(
    ("command", "option", "says"),
    [
        ("train", "--steps", "did you mean training.steps?"),
        ("train", "--num-generations=8", "did you mean rollout.samples_per_prompt?"),
        ("train", "--zzzz", "No such option: --zzzz"),
        ("train", "--dry-rn", "(Possible options: --dry-run)"),
        ("evaluate", "--steps", "No such option: --steps"),
    ],
)
def test_a_key_that_is_given_as_an_option_is_told_how_it_is_given(command: str, option: str, says: str) -> None:
    result = run(command, "r.yaml", option)
    text = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 2 and says in text
    assert ("SECTION.KEY=VALUE, without dashes" in text) == says.startswith("did you")


def test_a_folder_that_is_taken_is_told_before_the_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = replace_run(monkeypatch, {})
    Path("taken").mkdir()
    Path("taken/notes.txt").write_text("mine")
    result = run("train", "r.yaml", "run.dir=taken")
    assert result.exit_code == 1 and "run.dir: the folder taken exists" in result.stderr
    assert calls == []


def test_a_message_is_not_read_as_markup() -> None:
    result = run("train", "r.yaml", "rollout.stop_token_ids=[red]")
    assert "[red]" in result.stderr


def test_a_dry_run_prints_the_recipe_and_its_numbers_and_writes_nothing(workplace: Path) -> None:
    before = sorted(workplace.rglob("*"))
    result = run("train", "r.yaml", "seed=5", "--dry-run", "training.groups_per_update=16")
    assert result.exit_code == 0
    assert build_config(yaml.safe_load(result.stdout)).seed == 5  # what is not YAML of the recipe is a comment
    assert "# samples per step: 128" in result.stdout
    assert "# tokens per step, at most: 2,883,584" in result.stdout
    assert "# memory: not predicted, as the model is not on this machine" in result.stdout
    assert "# warning: one update per rollout step" in result.stdout
    assert sorted(workplace.rglob("*")) == before


def test_a_dry_run_tells_of_a_folder_that_is_in_the_way(workplace: Path) -> None:
    Path("taken").write_text("", encoding="utf-8")
    for where in ("taken", "taken/run"):
        found = run("train", "r.yaml", "--dry-run", f"run.dir={where}")
        assert found.exit_code in (1, 2) and "run.dir: " in found.stderr and "# samples per step" in found.stdout


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_a_folder_that_cannot_be_written_to_is_told_at_once(option: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = replace_run(monkeypatch, {})
    monkeypatch.setattr("dapo.commands.train._require_data", lambda *given: None)
    found = run("train", "r.yaml", "run.dir=/proc/run", *option)  # where root cannot write either
    assert found.exit_code == 1 and re.search("cannot write to /proc: .+; set run.dir to another", found.stderr)
    assert calls == []


def test_a_dry_run_refuses_what_does_not_go_with_sampling_ahead(workplace: Path) -> None:
    ahead = ("train", "r.yaml", "--dry-run", "rollout.max_staleness=2", "runtime.device=cpu")
    assert "# prompts drawn per step, at most: 160" in run(*ahead).stdout
    Path("own.py").write_text("class Mine:\n    def __init__(self, *given): ...\n")
    refused = run(*ahead, "rollout.engine=own.py:Mine", "rollout.in_flight=restart")
    assert refused.exit_code == 2 and "restart needs an engine" in refused.stderr


def test_a_dry_run_shows_no_secrets() -> None:
    result = run("train", "r.yaml", "--dry-run", "reward={kind: function, function: 'f.py:g', args: {api_key: sk-1}}")
    assert "sk-1" not in result.output and "api_key" in result.output


def subprocess_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\nfrom dapo.commands import main\ntry:\n    main()\n"
        "finally:\n    print('HEAVY', *({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, env=environment
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["train", "--help"], 0),
        (["train", "r.yaml", "training.stepz=3"], 2),
        (["train", "r.yaml", "data.train=gone.jsonl"], 2),
        (["train", "r.yaml", "--dry-run"], 0),
    ],
)
def test_nothing_heavy_is_loaded_before_the_recipe_is_checked(arguments: list[str], code: int) -> None:
    done = subprocess_run(*arguments)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == "HEAVY"


def test_python_m_dapo_is_dapo() -> None:
    done = subprocess.run([sys.executable, "-m", "dapo", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "dapo 0.1.0\n"


# --- with a stand-in for the run ----------------------------------------------------------------------------------


def test_train_hands_over_the_config_and_shows_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = replace_run(monkeypatch, {"accuracy_before": 0.1, "accuracy_after": 0.9, "run_dir": "runs/r"})
    Path("runs/r/samples").mkdir(parents=True)
    Path("runs/r/samples/step-00001.jsonl").touch()
    Path("runs/r/model-after").mkdir()
    result = run("train", "r.yaml", "training.steps=7", "run.dir=runs/new")
    assert result.exit_code == 0, result.output
    assert calls[0][0].training.steps == 7
    assert "accuracy: 10.0% before, 90.0% after" in result.stdout
    assert "run folder: runs/r" in result.stdout
    # and not r.yaml, which knows nothing of training.steps=7
    assert "dapo train runs/r/config.yaml model.path=runs/r/model-after run.dir=runs/r-more\n" in result.stdout


def test_a_runs_own_config_is_no_recipe_without_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = replace_run(monkeypatch, {"run_dir": "runs/r"})
    Path("f.py").write_text("def score(response, answer): ...")
    reward = "reward={{kind: function, function: 'f.py:score', args: {{api_key: {}}}}}"
    result = run("train", "r.yaml", reward.format("(not recorded)"))
    assert result.exit_code == 2 and not calls
    assert "r.yaml: secrets are not kept in a run folder: give reward.args.api_key again" in result.stderr
    assert run("train", "r.yaml", reward.format("sk-one")).exit_code == 0 and calls


def test_quiet_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_run(monkeypatch, {"accuracy_before": 0.1, "accuracy_after": 0.9, "run_dir": "runs/r"})
    result = run("train", "r.yaml", "--quiet")
    assert (result.exit_code, result.output) == (0, "")


def test_demo_hands_over_its_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = replace_run(monkeypatch, {"run_dir": "runs/cpu-demo"})
    result = run("demo", "seed=7", "training.steps=2")
    assert result.exit_code == 0, result.output
    assert calls[0][0] == ["seed=7", "training.steps=2"]
    assert isinstance(calls[0][2], Console)  # for the comparison at the end
    assert run("demo", "--quiet").output == ""
    assert calls[1][0] == [] and calls[1][2] is None


@pytest.mark.parametrize("begun", [False, True])
def test_a_signal_ends_a_demo_as_it_ends_a_training(monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    def demo(overrides: Any, listener: Any, console: Any, shutdown: Any) -> None:
        shutdown.run = Path("runs/cpu-demo") if begun else None
        signal.raise_signal(signal.SIGTERM)

    replace_run(monkeypatch, {})
    monkeypatch.setattr(sys.modules["dapo.commands.demo.run"], "run_demo", demo)
    result = run("demo")
    assert result.exit_code == (75 if begun else 143)
    said = "to go on: dapo train --resume runs/cpu-demo" if begun else "before the run had begun"
    assert f"stopped by SIGTERM, {said}" in " ".join(result.output.split())


@pytest.mark.parametrize("command", [["train", "r.yaml"], ["demo"]])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("train.jsonl:3: bad row"), 2),
        (ModelError("no model"), 1),
        (RewardError("a reward"), 1),
        (UserError("a folder"), 1),
        (StarvedError("0 mixed"), 3),
        (NumericalError("nan three times"), 3),
        (NotFiniteError("logits"), 3),
        (ExceptionGroup("tasks", [ValueError("cancelled"), ExceptionGroup("inner", [StarvedError("0 mixed")])]), 3),
    ],
)
def test_each_kind_of_error_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, command: list[str], error: Exception, code: int
) -> None:
    replace_run(monkeypatch, error)
    result = run(*command)
    assert result.exit_code == code
    text = "0 mixed" if isinstance(error, ExceptionGroup) else str(error)
    assert result.stderr == f"error: {text}\n"


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_run(monkeypatch, KeyboardInterrupt())
    result = run("train", "r.yaml")
    assert result.exit_code == 130 and "interrupted" in result.stderr


def test_a_fault_of_ours_is_70_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_run(monkeypatch, IndexError("list index [0] out of range"))
    result = run("train", "r.yaml")
    assert result.exit_code == 70
    assert "IndexError: list index [0] out of range" in result.stderr
    assert "fault of dapo's" in result.stderr and "--debug" in result.stderr and "Traceback" not in result.stderr
    result = run("train", "r.yaml", "--debug")
    assert result.exit_code == 70 and "Traceback" in result.stderr and "stand_in" in result.stderr


def test_debug_shows_the_traceback_of_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_run(monkeypatch, RewardError("yours"))
    result = run("train", "r.yaml", "--debug")
    assert result.exit_code == 1 and "Traceback" in result.stderr and "error: yours" in result.stderr


def test_only_what_exists_is_recommended(workplace: Path) -> None:
    assert next_commands(None) == []
    assert next_commands(str(workplace / "nothing")) == []


def test_samples_in_json_lines_are_recommended_by_name(workplace: Path) -> None:
    (workplace / "samples").mkdir()
    for step in (2, 1):
        (workplace / "samples" / f"step-{step:05d}.jsonl").write_text(json.dumps({}))
    assert next_commands(str(workplace))[0].endswith(f"dapo inspect {workplace} --samples")


def test_a_model_is_recommended_to_train_on_from(workplace: Path) -> None:
    (workplace / "model-after").mkdir()
    assert "model.path=" in next_commands(str(workplace))[0]


def test_recommended_commands_can_be_pasted_whatever_the_name_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "it's a run"
    (folder / "samples").mkdir(parents=True)
    (folder / "model-after").mkdir()
    for file in ("samples/step-00001.jsonl", "metrics.jsonl"):
        (folder / file).touch()
    told = [shlex.split(line[line.index(": dapo ") + 2 :]) for line in next_commands(str(folder))]
    more = [f"{folder}/config.yaml", f"model.path={folder}/model-after", f"run.dir={folder}-more"]
    assert told == [
        ["dapo", "inspect", str(folder), "--samples"],
        ["dapo", "train", *more],
        ["dapo", "report", str(folder)],
        ["dapo", "ui", str(folder)],
    ]
    assert shlex.split(how_to_resume(folder, [])) == ["dapo", "train", "--resume", str(folder)]


def test_a_dry_run_tries_the_template_with_a_tokenizer_that_is_at_hand(workplace: Path) -> None:
    make_tokenizer().save_pretrained(workplace / "tokenizer")
    arguments = ["train", "r.yaml", "model.tokenizer=./tokenizer", "--dry-run"]
    assert run(*arguments, "data.template=plain").exit_code == 0
    refused = run(*arguments, "data.template=chat")
    assert refused.exit_code == 2
    assert "data.template: is chat, but the tokenizer has no chat template" in " ".join(refused.stderr.split())


def test_a_file_whose_name_holds_an_equals_sign_is_no_setting(tmp_path: Path) -> None:
    file = tmp_path / "lr=1e-6.jsonl"
    file.write_text("{}")
    words = [str(file), "seed=3", "other.jsonl"]
    assert files_and_settings(words) == ([str(file), "other.jsonl"], ["seed=3"])
