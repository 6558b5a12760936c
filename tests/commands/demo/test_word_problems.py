"""The word problems: answers by hand, numbers that never cross the border, the reward, and the recipe."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dapo.commands.demo import run as pretrained
from dapo.commands.demo.run import make_data, run_word_problems
from dapo.commands.demo.word_problems import (
    EXAMPLES,
    NUMBERS,
    SMALL,
    STORIES,
    WordProblem,
    draw_problems,
    score,
    split_pairs,
)
from dapo.config import load_config
from dapo.config.plan import recipe_path
from dapo.errors import ConfigError
from dapo.observe.progress import QuietListener

REPOSITORY = Path(__file__).parents[3]
MODEL = REPOSITORY / ".models/smollm2-135m-instruct"
SEEDS = (11, 12, 13)  # never used in tuning


@pytest.mark.parametrize(("operation", "answer"), [("+", "15"), ("-", "9"), ("*", "36")])
def test_answers_by_hand(operation: str, answer: str) -> None:
    assert WordProblem("", operation, (12, 3)).answer == answer


@pytest.mark.parametrize("seed", range(20))
def test_a_pair_of_numbers_is_on_one_side_only(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sides = split_pairs(rng)
    train, heldout = ({tuple(sorted(p.numbers)) for p in draw_problems(rng, pairs, 300)} for pairs in sides)
    assert not train & heldout
    assert len(sides[0]) + len(sides[1]) == len(NUMBERS) * (len(NUMBERS) - 1) // 2
    assert 0.25 < len(sides[1]) / (len(sides[0]) + len(sides[1])) < 0.35


@pytest.mark.parametrize("side", [0, 1])
def test_problems_are_well_formed(side: int) -> None:
    rng = np.random.default_rng(5)
    pairs = split_pairs(rng)[side]
    problems = draw_problems(rng, pairs, 300)
    assert len({p.text for p in problems}) == 300
    assert Counter(p.operation for p in problems) == dict.fromkeys(STORIES, 100)
    for problem in problems:
        assert tuple(map(int, re.findall(r"\d+", problem.text))) == problem.numbers  # what is told is what counts
        assert int(problem.answer) > 0
        assert "{" not in problem.text
        if problem.operation == "*":
            assert max(problem.numbers) <= SMALL


def test_the_examples_are_right_and_give_no_pair_away() -> None:
    for question, reply in EXAMPLES:
        a, operation, b, equals, c, label, answer = reply.split()
        assert [equals, label] == ["=", "Answer:"]
        assert WordProblem(question, operation, (int(a), int(b))).answer == c == answer
        assert re.findall(r"\d+", question) == [a, b]
        assert int(a) not in NUMBERS


def test_the_data_follow_from_the_seed(tmp_path: Path) -> None:
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_data(seed, tmp_path / folder)
    files = {folder: (tmp_path / folder / "heldout.jsonl").read_text() for folder in "abc"}
    assert files["a"] == files["b"] != files["c"]
    row = json.loads(files["a"].splitlines()[0])
    assert [m["role"] for m in row["prompt"]] == ["system", *["user", "assistant"] * len(EXAMPLES), "user"]
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
    reward = score(response, "7")
    assert (reward.correct, reward.value) == (correct, 1.0 if correct else -1.0)
    assert reward.parts == {"answer_found": found, "last_number": last}


def test_thousands_separators_are_no_border() -> None:
    assert score("Answer: 1,234", "1234").correct


def test_the_recipe_has_all_four_techniques_and_four_updates() -> None:
    config = load_config(recipe_path("cpu-smollm2"))
    algorithm = config.algorithm
    assert algorithm.clip_ratio_high > algorithm.clip_ratio_low
    assert algorithm.filter_groups.enable
    assert algorithm.overlong_buffer.enable
    assert algorithm.loss_agg_mode == "token-mean"
    assert config.updates_per_step >= 4
    assert config.model.path == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_an_unknown_demo_is_named() -> None:
    from dapo.commands.demo.command import _chosen

    with pytest.raises(ConfigError, match=r"dapo demo tetris: .*arithmetic, word-problems"):
        _chosen(["tetris"])
    run, overrides = _chosen(["word-problems", "seed=3"])
    assert (run, overrides) == (run_word_problems, ["seed=3"])
    assert _chosen(["seed=3"])[1] == ["seed=3"]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SEEDS)
def test_the_pretrained_model_learns_to_reason(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """About ten minutes a seed. Reasoning and not only format; within 8 GB."""
    if not MODEL.is_dir():
        pytest.skip(f"SmolLM2-135M-Instruct is not in {MODEL}")
    monkeypatch.chdir(tmp_path)
    summary = run_word_problems([f"seed={seed}", f"model.path={MODEL}"], QuietListener())
    print({k: v for k, v in summary.items() if k.endswith(("_before", "_after")) or k.startswith("seconds")})
    assert summary["heldout_rows"] == pretrained.HELDOUT_ROWS
    assert summary["reasoned_after"] >= summary["reasoned_before"] + 0.1
    metrics = [json.loads(line) for line in Path("runs/cpu-smollm2/metrics.jsonl").read_text().splitlines()]
    assert max(step.get("memory/rss", 0) for step in metrics) < 8e9
