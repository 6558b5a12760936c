"""The word problems: answers by hand, numbers that never cross the border, the reward, and the recipe."""

import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dapo.config import load_config
from dapo.observe.progress import QuietListener
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.launch import run_experiment
from dapo.reward.convert import to_reward

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES.parent / ".models/smollm2-135m-instruct"
SEEDS = (11, 12, 13)  # never used in tuning

spec = importlib.util.spec_from_file_location("word_problems", EXAMPLES / "word_problems.py")
example = sys.modules["word_problems"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
FUNCTION = f"reward.function={EXAMPLES}/word_problems.py:score"


@pytest.mark.parametrize(("operation", "answer"), [("+", "15"), ("-", "9"), ("*", "36")])
def test_answers_by_hand(operation: str, answer: str) -> None:
    assert example.WordProblem("", operation, (12, 3)).answer == answer


@pytest.mark.parametrize("seed", range(20))
def test_a_pair_of_numbers_is_on_one_side_only(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sides = example.split_pairs(rng)
    train, heldout = ({tuple(sorted(p.numbers)) for p in example.draw_problems(rng, pairs, 300)} for pairs in sides)
    assert not train & heldout
    assert len(sides[0]) + len(sides[1]) == len(example.NUMBERS) * (len(example.NUMBERS) - 1) // 2
    assert 0.25 < len(sides[1]) / (len(sides[0]) + len(sides[1])) < 0.35


@pytest.mark.parametrize("side", [0, 1])
def test_problems_are_well_formed(side: int) -> None:
    rng = np.random.default_rng(5)
    pairs = example.split_pairs(rng)[side]
    problems = example.draw_problems(rng, pairs, 300)
    assert len({p.text for p in problems}) == 300
    assert Counter(p.operation for p in problems) == dict.fromkeys(example.STORIES, 100)
    for problem in problems:
        assert tuple(map(int, re.findall(r"\d+", problem.text))) == problem.numbers  # what is told is what counts
        assert int(problem.answer) > 0
        assert "{" not in problem.text
        if problem.operation == "*":
            assert max(problem.numbers) <= example.SMALL


def test_the_examples_are_right_and_give_no_pair_away() -> None:
    for question, reply in example.EXAMPLES:
        a, operation, b, equals, c, label, answer = reply.split()
        assert [equals, label] == ["=", "Answer:"]
        assert example.WordProblem(question, operation, (int(a), int(b))).answer == c == answer
        assert re.findall(r"\d+", question) == [a, b]
        assert int(a) not in example.NUMBERS


def test_the_data_follow_from_the_seed(tmp_path: Path) -> None:
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / folder).mkdir()
        example.write_rows(seed, tmp_path / folder)
    files = {folder: (tmp_path / folder / "word-problems-heldout.jsonl").read_text() for folder in "abc"}
    assert files["a"] == files["b"] != files["c"]
    row = json.loads(files["a"].splitlines()[0])
    assert [m["role"] for m in row["prompt"]] == ["system", *["user", "assistant"] * len(example.EXAMPLES), "user"]
    assert row["answer"] == str(int(row["answer"]))


@pytest.mark.parametrize(
    ("response", "correct", "found", "last"),
    [
        ("3 + 4 = 7\nAnswer: 7", True, 1, 1),
        ("3 + 4 = 7\nanswer: 7.", True, 1, 1),
        ("3 + 4 = 8\nAnswer: 8", False, 1, 0),
        ("3 + 4 = 7, so Tom has 7", False, 0, 1),  # reasoning without the format
        ("Answer: 7 is the sum of 3 and 4", True, 1, 0),  # right where it counts
        ("Answer: 3 Answer: 7", True, 1, 1),
        ("Answer: 7 Answer: 3", False, 1, 0),
        ("Answer: seven", False, 0, 0),
        ("Answer: 7.5", False, 0, 0),
        ("Answer: 75", False, 1, 0),
        ("Answer: -7", False, 1, 0),
        ("", False, 0, 0),
    ],
)
def test_the_reward_keeps_format_and_reasoning_apart(response: str, correct: bool, found: int, last: int) -> None:
    reward = to_reward(example.score(response, "7"), "score")
    assert (reward.correct, reward.value) == (correct, 1.0 if correct else -1.0)
    assert reward.parts == {"answer_found": found, "last_number": last}


def test_thousands_separators_are_no_border() -> None:
    assert example.score("Answer: 1,234", "1234")["correct"]


def test_the_recipe_has_all_four_techniques_and_four_updates() -> None:
    config = load_config(EXAMPLES / "word_problems.yaml")
    algorithm = config.algorithm
    assert algorithm.clip_ratio_high > algorithm.clip_ratio_low
    assert algorithm.filter_groups.enable
    assert algorithm.overlong_buffer.enable
    assert algorithm.loss_agg_mode == "token-mean"
    assert config.updates_per_step >= 4
    assert config.model.path == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SEEDS)
def test_the_pretrained_model_learns_to_reason(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """About ten minutes a seed. Reasoning and not only format; within 8 GB."""
    if not MODEL.is_dir():
        pytest.skip(f"SmolLM2-135M-Instruct is not in {MODEL}")
    monkeypatch.chdir(tmp_path)
    example.write_rows(seed, tmp_path)
    config = load_config(EXAMPLES / "word_problems.yaml", [f"seed={seed}", f"model.path={MODEL}", FUNCTION])
    summary = run_experiment(config, QuietListener(), RunOverrides())
    metrics = [json.loads(line) for line in Path("runs/word-problems/metrics.jsonl").read_text().splitlines()]
    reasoned = [step["eval/part/last_number"] for step in metrics if "eval/part/last_number" in step]
    print(summary, reasoned)
    assert reasoned[-1] >= reasoned[0] + 0.1
    assert max(step.get("memory/rss", 0) for step in metrics) < 8e9
