"""``dapo reward check`` and ``dapo reward score``: what they print, write and end with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dapo.commands import app
from dapo.config import load_reward
from dapo.config.reward import ExactReward, FunctionReward, MathReward
from dapo.errors import ConfigError
from dapo.observe.samples import samples_path
from dapo.records import Reward
from stored_run import FAILED, group, stored_run

SHARED = Path(__file__).parents[3] / "shared" / "cases"

RIGHT, WRONG = Reward(True, 1.0, {"answer_found": 1.0}), Reward(False, -1.0, {"answer_found": 1.0})


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def reward(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["reward", *map(str, arguments)])


def written(name: str, *cases: dict[str, Any]) -> str:
    Path(name).write_text("".join(json.dumps(case) + "\n" for case in cases), encoding="utf-8")
    return name


def flat(text: str) -> str:
    return " ".join(text.split())


# --- the reward of a recipe ---------------------------------------------------------------------------------------


def test_a_reward_is_a_kind_or_a_recipe_that_need_hold_nothing_else():
    Path("r.yaml").write_text("reward: {kind: exact, after: '=', timeout_s: 3}\n")
    assert load_reward("math") == MathReward()
    assert load_reward("r.yaml", ["reward.timeout_s=4"]) == ExactReward(kind="exact", after="=", timeout_s=4)
    Path("whole.yaml").write_text("model: {path: m}\ntraining: {steps: 5}\n")
    assert load_reward("whole.yaml") == MathReward()


def test_the_file_of_a_reward_is_found_beside_its_recipe():
    Path("sub").mkdir()
    Path("sub/r.yaml").write_text("reward: {kind: function, function: 'f.py:g'}\n")
    Path("sub/f.py").touch()
    assert load_reward("sub/r.yaml") == FunctionReward(kind="function", function="sub/f.py:g")


def test_a_kind_is_meant_even_where_a_folder_has_its_name():
    Path("exact").mkdir()
    assert load_reward("exact") == ExactReward(kind="exact")


@pytest.mark.parametrize(
    ("named", "overrides", "words"),
    [
        ("maths", [], "maths: there is no such recipe, and no such kind of reward; the kinds are code, compose, exact"),
        (
            "bad.yaml",
            [],
            "bad.yaml:3: reward.timeuot_s: unknown key; did you mean reward.timeout_s?\nbad.yaml:4: rewrd",
        ),
        ("math", ["reward.workers=0"], "override reward.workers=0: reward.workers: Input should be greater than"),
        ("math", ["seed=3"], "override 'seed=3': only keys of the reward can be changed here"),
        ("function", [], "reward function: reward.function: required but not given"),
    ],
)
def test_a_reward_that_is_wrong_is_explained_as_in_any_recipe(named, overrides, words):
    Path("bad.yaml").write_text("reward:\n  kind: exact\n  timeuot_s: 3\nrewrd: {}\n")
    with pytest.raises(ConfigError) as caught:
        load_reward(named, overrides)
    assert str(caught.value).startswith(words)


# --- check --------------------------------------------------------------------------------------------------------


def test_all_agree_is_exit_code_0_and_the_last_line_says_so():
    cases = written("c.jsonl", *[{"gold": "4", "response": r, "expected": r == "4"} for r in ("4", "5", "4.0")])
    result = reward("check", "exact", cases)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "agree 3 of 3"
    assert reward("check", "exact", cases, "--quiet").stdout == "agree 3 of 3\n"


def test_every_disagreement_is_shown_and_the_exit_code_is_1():
    response = "[bold]x[/bold] :smile: \x1b[31m= 7"
    cases = written(
        "c.jsonl",
        {"gold": "4", "response": "4", "expected": True},
        {"gold": "7", "response": response, "expected": False, "name": "odd", "note": "a note", "also_ok": ["error"]},
        {"gold": "9", "prompt": "8+1=", "response": "= 8", "expected": True, "source": "a report"},
    )
    result = reward("check", "exact", cases, "reward.after='='")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[-1] == "agree 0 of 3"
    assert [line for line in lines if line.startswith("c.jsonl")] == ["c.jsonl:1", "c.jsonl:2  odd", "c.jsonl:3"]
    second, third = result.stdout.split("\n\n")[1:3]
    assert second.splitlines()[1:] == [
        "  response | [bold]x[/bold] :smile: \\x1b[31m= 7",
        "  extracted 7  gold 7",
        "  expected wrong or error, got right (reward +1, answer_found 1)",
        "  note: a note",
    ]
    assert third.splitlines()[1:] == [
        "  prompt   | 8+1=",
        "  response | = 8",
        "  extracted 8  gold 9",
        "  expected right, got wrong (reward -1, answer_found 1)",
        "  source: a report",
    ]


def test_a_long_response_is_shortened_and_a_failed_score_says_why():
    Path("f.py").write_text("def f(response):\n    raise ValueError('a bug of mine')\n")
    cases = written("c.jsonl", {"response": "a" * 4000 + "the end", "expected": 0.5})
    result = reward("check", "function", "reward.function=f.py:f", cases)
    assert result.exit_code == 1 and len(result.stdout) < 2500
    assert "the end" in flat(result.stdout)
    assert "expected a reward of 0.5, got no verdict: reward function f.py:f raised ValueError: a bug of mine" in flat(
        result.stdout
    )


def test_bad_cases_are_exit_code_2_and_all_are_named_before_anything_is_scored():
    Path("f.py").write_text("import pathlib\npathlib.Path('loaded').touch()\ndef f(response):\n    return 1.0\n")
    cases = written("c.jsonl", {"response": "x"}, {"response": "x", "expected": 1}, {"expected": 1})
    result = reward("check", "function", "reward.function=f.py:f", cases)
    assert result.exit_code == 2 and result.stdout == ""
    assert "c.jsonl:1: no key 'expected'" in result.stderr and "c.jsonl:3: no key 'response'" in result.stderr
    assert "c.jsonl:2" not in result.stderr and not Path("loaded").exists()
    assert reward("check", "math", "none.jsonl").exit_code == 2
    assert reward("check", "maths", cases).exit_code == 2
    assert "no files are named" in reward("check", "math", "reward.workers=1").stderr


def test_cases_where_the_reward_belongs_are_told():
    cases = written("c.jsonl", {"gold": "4", "response": "4", "expected": True})
    for word, said in (("reward.kind=exact", "error: no files are named: "), (cases, "error: ")):
        result = reward("check", cases, word)
        assert result.exit_code == 2
        assert f"{said}'c.jsonl' is taken for the recipe or kind of reward, which comes before" in flat(result.stderr)


def test_a_broken_reward_function_is_exit_code_1_and_names_the_case():
    Path("f.py").write_text("def f(response):\n    return None if response == 'x' else 1.0\n")
    cases = written("c.jsonl", {"response": "y", "expected": 1}, {"response": "x", "expected": 1})
    result = reward("check", "function", "reward.function=f.py:f", cases)
    assert result.exit_code == 1
    assert flat(result.stderr).startswith("error: c.jsonl:2: reward function f.py:f: expected a float")
    assert "Traceback" not in result.stderr


def test_json_holds_every_verdict_and_no_secret():
    Path("f.py").write_text("def f(response, api_key):\n    return {'value': 1.0, 'correct': True, 'style': 0.5}\n")
    good = {"response": "\ud800", "expected": True, "name": "one"}
    cases = written("c.jsonl", good, good | {"expected": False, "also_ok": [0.25]})
    secret = ("reward.function=f.py:f", "reward.args.api_key=sk-1")
    result = reward("check", "function", *secret, cases, "--json", "new/out.json")
    assert result.exit_code == 1
    text = Path("new/out.json").read_text()
    assert "sk-1" not in text
    found = json.loads(text)
    assert (found["cases"], found["agree"], found["reward"]["kind"]) == (2, 1, "function")
    first, second = found["verdicts"]
    assert first["agrees"] is True and second["agrees"] is False
    assert (second["place"], second["name"], second["expected"], second["also_ok"]) == (
        "c.jsonl:2",
        "one",
        False,
        [0.25],
    )
    assert (second["correct"], second["value"], second["parts"]) == (True, 1.0, {"style": 0.5})


def test_json_never_takes_the_place_of_what_is_read():
    cases = written("c.jsonl", {"gold": "4", "response": "4", "expected": True})
    before = Path(cases).read_text()
    assert reward("check", "exact", cases, "--json", "./c.jsonl").exit_code == 2
    assert reward("check", "exact", cases, "--json", "c.jsonl/out").exit_code == 1
    assert Path(cases).read_text() == before


def test_an_interrupt_leaves_no_process_behind():
    Path("f.py").write_text(
        "import os, pathlib, time\n"
        "def f(response):\n"
        "    pathlib.Path(f'{os.getpid()}.pid').touch()\n"
        "    time.sleep(60)\n"
    )
    cases = written("c.jsonl", {"response": "x", "expected": 1})
    command = [sys.executable, "-m", "dapo", "reward", "check", "function", "reward.function=f.py:f"]
    process = subprocess.Popen([*command, "reward.timeout_s=50", cases], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not list(Path().glob("*.pid")) and time.monotonic() < until:
        time.sleep(0.05)
    (worker,) = Path().glob("*.pid")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in said and "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(worker.stem), 0)


# --- score --------------------------------------------------------------------------------------------------------


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def run() -> Path:
    steps = {
        1: [group(0, 0, [("4", RIGHT), ("so 4", WRONG)]), group(1, 1, [("6", RIGHT), ("= 7", WRONG)])],
        3: [group(2, 2, [("= 10", WRONG), ("10", FAILED)])],
    }
    return stored_run(Path("runs/one"), steps).root


def test_the_own_reward_shows_whether_verdicts_can_be_reproduced(run):
    before = everything(run)
    result = reward("score", run, "--step", 1)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "nothing changed: 4 samples"
    assert result.stdout.startswith("runs/one: reward exact, scored again with its own (exact)\n")
    assert everything(run) == before


def test_another_reward_shows_what_changes(run):
    Path("r.yaml").write_text("reward: {kind: exact, after: '='}\n")
    before = everything(run)
    result = reward("score", run, "--reward", "r.yaml", "--json", "out.json")
    assert result.exit_code == 0, result.output
    # step 1: 4 and 6 are wrong now (no "="); step 3: 10 is right now, and the failed one is wrong
    table = [line.split() for line in result.stdout.split("\n\n")[1].splitlines()]
    numbers = {row[0]: row[1:] for row in table[1:]}
    columns = ["samples", "right -> wrong", "wrong -> right", "now scored", "reward"]
    assert flat(" ".join(columns)) in flat(result.stdout)
    assert numbers["1"] == ["4", "2", "0", "0", "+0.0000", "-1.0000", "2", "2", "0"]
    assert numbers["3"] == ["2", "0", "1", "1", "-1.0000", "+1.0000", "1", "0", "1"]
    assert numbers["all"] == ["6", "2", "1", "1", "-0.2000", "-0.6000", "3", "2", "1"]
    assert "step 1  row 0  draw 0  index 0  right -> wrong" in result.stdout
    assert "step 3  row 2  draw 2  index 0  wrong -> right" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last == (
        "changed: 4 of 6 samples; dynamic sampling decides otherwise about 3 of 3 groups (2 no longer kept, 1 newly)"
    )
    told = json.loads(Path("out.json").read_text())
    assert [step["step"] for step in told["steps"]] == [1, 3]
    assert [(c["draw"], c["index"], c["kind"]) for c in told["steps"][1]["changes"]] == [
        (2, 0, "wrong_to_right"),
        (2, 1, "recovered"),
    ]
    assert everything(run) == before


def test_examples_are_bounded_and_of_many_kinds(run):
    arguments = ("score", run, "--reward", "exact", "reward.after='='")
    shown = [line for line in reward(*arguments, "--examples", 3).stdout.splitlines() if line.startswith("step ")]
    kinds = [line.split("  ")[4] for line in shown[1:]]
    assert kinds == ["right -> wrong", "wrong -> right", "now scored"]
    assert not [line for line in reward(*arguments, "--examples", 0).stdout.splitlines() if "index" in line]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["none"], 1, "none: no such folder"),
        (["runs"], 1, "runs: is not a run folder"),
        (["runs/one", "--step", "2"], 1, "no samples of step 2; there are those of steps 1, 3"),
        (["runs/one", "--step", "x"], 2, "--steps x: expected a step"),
        (["runs/one", "--reward", "maths"], 2, "no such kind of reward"),
        (["runs/one", "math"], 2, "math: expected reward.key=value; the reward is named by --reward"),
        (["runs/one", "--reward", "exact", "seed=3"], 2, "only keys of the reward"),
        (["runs/two"], 1, "no samples were saved: its recipe says run.save_samples=false"),
        (["runs/key"], 2, "give reward.args.api_key again, as reward.key=value, or name the recipe that the run"),
    ],
)
def test_what_cannot_be_scored_is_explained(run, arguments, code, words):
    stored_run(Path("runs/two"), {}, settings={"run.save_samples": False})
    Path("f.py").write_text("def f(response, api_key):\n    return 1.0\n")
    secret = {"reward.kind": "function", "reward.function": "f.py:f", "reward.args": {"api_key": "sk-1"}}
    stored_run(Path("runs/key"), {1: [group(0, 0, [("4", RIGHT)])]}, settings=secret)
    result = reward("score", *arguments)
    assert result.exit_code == code, result.output
    assert words in flat(result.stderr) and "Traceback" not in result.stderr


def test_a_line_that_was_cut_off_while_it_was_written_is_left_out(run):
    path = samples_path(run / "samples", 1)
    path.write_text(path.read_text() + '{"draw": 9, "ro')
    assert reward("score", run, "--step", 1).stdout.splitlines()[-1] == "nothing changed: 4 samples"


# --- the shared cases ---------------------------------------------------------------------------------------------


@pytest.mark.shared
def test_all_shared_math_cases_agree():
    result = reward("check", "math", SHARED / "math_reward_cases.jsonl")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "agree 85 of 85"), result.stdout


@pytest.mark.shared
def test_all_shared_code_cases_agree():
    result = reward("check", "code", SHARED / "code_reward_cases.jsonl")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "agree 45 of 45"), result.stdout
