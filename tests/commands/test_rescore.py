"""The stored samples of a run, scored again: what counts as a change, and what is read of the run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from dapo.commands.reward.rescore import StoredRows, kind_of_change, rescore
from dapo.config import CodeReward, ExactReward, FunctionReward, load_config
from dapo.errors import DataError, UserError
from dapo.observe.samples import samples_path
from dapo.records import Reward
from stored_run import FAILED, RIGHT, ROWS, WRONG, group, stored_run

EXACT = ExactReward(kind="exact")

FUNCTIONS = """
def scaled(response, scale):
    return float(scale)

def plain(response, answer, scale=None):
    return response == answer and scale is None

def fails(response, answer):
    if response == "5":
        raise ValueError("a bug")
    return response.strip() == answer
"""


@pytest.fixture
def function(tmp_path: Path):
    (tmp_path / "f.py").write_text(FUNCTIONS)
    return lambda name: FunctionReward(kind="function", function=f"{tmp_path / 'f.py'}:{name}", workers=1)


def rescored(folder, reward, steps=(1,), warn=lambda text: None):
    config = load_config(folder.config)
    changes = []
    asyncio.run(rescore(folder, steps, reward, config, StoredRows(config, reward, warn), changes.append))
    return changes


def found(correct, value=0.0, **parts):
    return Reward(correct, value, parts)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (RIGHT, RIGHT, None),
        (RIGHT, WRONG, "right_to_wrong"),
        (WRONG, RIGHT, "wrong_to_right"),
        (WRONG, FAILED, "failed"),
        (FAILED, RIGHT, "recovered"),
        (FAILED, Reward(None, 0.0, error="another reason"), None),
        (RIGHT, Reward(None, 1.0), "value"),
        (Reward(None, 1.0), RIGHT, "value"),
        (RIGHT, Reward(True, 0.5), "value"),
        (Reward(None, 0.1 + 0.2), Reward(None, 0.3), None),
        (found(False, answer_found=0.0), found(False, answer_found=1.0), None),
    ],
)
def test_kind_of_change(before, after, kind):
    assert kind_of_change(before, after) == kind


def test_the_numbers_of_a_step(tmp_path, function):
    folder = stored_run(
        tmp_path / "run",
        {
            1: [
                # as stored: right, wrong. now: right, right: no longer mixed
                group(0, 0, [("4", RIGHT), (" 4 ", WRONG)]),
                # as stored: both wrong. now: right, wrong: newly mixed
                group(1, 1, [("6", WRONG), ("7", WRONG)]),
                # as stored: right, failed. now: right, failed (another one), wrong
                group(2, 2, [("10", RIGHT), ("5", WRONG), ("11", FAILED)]),
            ]
        },
    )
    (step,) = rescored(folder, function("fails"))
    numbers = {name: number for name, number in step.numbers.items() if number}
    assert numbers == {
        "samples": 7,
        "changed": 4,
        "compared": 5,
        "sum_before": 1 - 1 - 1 - 1 + 1,
        "sum_after": 1 + 1 + 1 - 1 + 1,
        "groups": 3,
        "kept_before": 2,
        "kept_after": 2,
        "no_longer_kept": 1,
        "newly_kept": 1,
        "wrong_to_right": 2,
        "failed": 1,
        "recovered": 1,
    }
    places = [(change.sample["draw"], change.sample["index"], change.kind) for change in step.changes]
    assert places == [(0, 1, "wrong_to_right"), (1, 0, "wrong_to_right"), (2, 1, "failed"), (2, 2, "recovered")]
    assert json.loads(json.dumps(step.as_json()))["changes"][0]["kind"] == "wrong_to_right"


def test_the_runs_own_reward_gives_its_own_verdicts_again(tmp_path):
    right, wrong = Reward(True, 1.0, {"answer_found": 1.0}), Reward(False, -1.0, {"answer_found": 1.0})
    steps = {1: [group(0, 0, [("4", right), ("5", wrong)])], 4: [group(1, 1, [("6", right), ("6", right)])]}
    first, second = rescored(stored_run(tmp_path / "run", steps), EXACT, steps=(1, 4))
    assert (first.step, second.step) == (1, 4)
    assert first.changes == second.changes == ()
    kept = [(step.numbers["kept_before"], step.numbers["kept_after"]) for step in (first, second)]
    assert kept == [(1, 1), (0, 0)]


def test_other_keys_of_a_row_are_read_from_the_runs_data(tmp_path, function):
    steps = {1: [group(0, 2, [("a", RIGHT)]), group(1, 0, [("b", RIGHT)])]}
    (step,) = rescored(stored_run(tmp_path / "run", steps), function("scaled"))
    assert [change.after.value for change in step.changes] == [ROWS[2]["scale"], ROWS[0]["scale"]]


def test_without_its_data_a_function_gets_no_other_keys_and_that_is_said(tmp_path, function):
    folder = stored_run(tmp_path / "run", {1: [group(0, 0, [("4", WRONG)])]}, rows=False)
    warnings: list[str] = []
    (step,) = rescored(folder, function("plain"), warn=warnings.append)
    assert step.changes[0].after.correct is True
    assert len(warnings) == 1 and "data.train names no files" in warnings[0]


def test_a_reward_that_looks_at_prompt_response_and_answer_needs_no_data(tmp_path):
    folder = stored_run(tmp_path / "run", {1: [group(0, 0, [("4", RIGHT)])]}, settings={"data.train": "gone.jsonl"})
    (tmp_path / "run-rows.jsonl").unlink()
    warnings: list[str] = []
    (step,) = rescored(folder, EXACT, warn=warnings.append)
    assert step.numbers["samples"] == 1 and warnings == []


def test_tests_cannot_be_done_without(tmp_path):
    folder = stored_run(tmp_path / "run", {1: [group(0, 0, [("4", RIGHT)])]})
    (tmp_path / "run-rows.jsonl").unlink()
    with pytest.raises(DataError, match=r"cannot read the rows of the run's data.*run-rows.jsonl: no such file"):
        rescored(folder, CodeReward(kind="code"))


def test_rows_that_have_changed_are_not_taken_for_those_of_the_run(tmp_path, function):
    folder = stored_run(tmp_path / "run", {1: [group(0, 0, [("4", RIGHT)]), group(1, 2, [("4", RIGHT)])]})
    rows = tmp_path / "run-rows.jsonl"
    place = samples_path(folder.samples, 1)
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    with pytest.raises(DataError, match=f"{place}:2: sampled from row 3 .* has changed: there are 2 rows"):
        rescored(folder, function("scaled"))
    rows.write_text("".join(json.dumps(row) + "\n" for row in [ROWS[1], ROWS[0], ROWS[2]]))
    with pytest.raises(DataError, match=f"{place}:1: sampled from row 1 .* {rows}:1 is another prompt"):
        rescored(folder, function("scaled"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"draw": 0, "row": 0}', "index: Field required, .*; length: Field required, .*; prompt: Field required"),
        ("{,}", "not a line of samples"),
        ({"response": 4}, "response: Input should be a valid string, found 4"),
        ({"reward": None}, "reward: should be a number, as the sample was scored, found null"),
        ({"correct": 1}, "correct: Input should be a valid boolean, found 1"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, words):
    folder = stored_run(tmp_path / "run", {1: [group(0, 0, [("4", RIGHT), ("5", WRONG)])]})
    path = samples_path(folder.samples, 1)
    first, second = path.read_text().splitlines()
    damaged = line if isinstance(line, str) else json.dumps(json.loads(second) | line)
    path.write_text(f"{first}\n{damaged}\n")
    with pytest.raises(UserError, match=f"{path}:2: {words}"):
        rescored(folder, EXACT)


def test_groups_without_right_and_wrong_are_judged_by_their_spread(tmp_path, function):
    flat, spread = Reward(None, 0.5), Reward(None, 0.7)
    settings = {"algorithm.filter_groups.metric": "score"}
    steps = {1: [group(0, 0, [("4", flat), ("5", spread)]), group(1, 1, [("6", flat), ("7", flat)])]}
    (step,) = rescored(stored_run(tmp_path / "run", steps, settings=settings), function("scaled"))
    names = ("kept_before", "kept_after", "no_longer_kept", "newly_kept")
    assert [step.numbers[name] for name in names] == [1, 0, 1, 0]
