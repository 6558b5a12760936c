"""Win rates: a judge's liking for a place is taken out by showing both orders, and counts are right by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from compared import stored_comparison, write_recipes
from dapo.comparison.pages import win_lines
from dapo.comparison.table import Table
from dapo.comparison.wins import Verdict, count, judge, read_wins
from dapo.errors import UserError
from dapo.records import Prompt, Reward
from dapo.reward.contract import Scorer
from dapo.reward.judge.rubric import Rubric

JUDGE = "reward: {kind: judge, url: 'http://127.0.0.1:9/v1', model: m}"
BETTER = {"first": {1: [0.0, 0.5]}, "other": {1: [0.0, 0.5]}}


class Scripted(Scorer):
    """A judge to whom an answer is worth the digit that it ends with, and the first place ``bias`` more."""

    def __init__(self, bias: float, fails: str = "none") -> None:
        self.bias, self.fails, self.asked = bias, fails, list[tuple[str, str]]()

    async def score(self, prompt: Prompt, response: str, finish_reason: Any = None) -> Reward:
        await asyncio.sleep(0)
        other = prompt.meta.get("compared_with", "0")
        self.asked.append((response, str(other)))
        if self.fails in response:
            return Reward(None, 0.0, error="no grade")
        return Reward(None, (int(response[-1]) - int(other[-1])) / 10 + self.bias)


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    write_recipes(tmp_path)
    (tmp_path / "judge.yaml").write_text(JUDGE)
    (tmp_path / "rule.yaml").write_text("reward: {kind: exact}")

    def compared(scorer: Scorer, first: list[str], other: list[str], reward: str = "judge.yaml") -> Any:
        stored_comparison(tmp_path / "out", BETTER, {"first": first, "other": other})
        monkeypatch.setattr("dapo.comparison.wins.make_scorer", lambda config: scorer)
        judge(tmp_path / "out", reward, lambda text: None)
        (found,) = read_wins(tmp_path / "out")
        return found

    return compared


def test_each_pair_is_judged_in_both_orders_and_bias_for_a_place_makes_no_winner(scripted: Any) -> None:
    scorer = Scripted(bias=0.25)
    found = scripted(scorer, ["a 1", "b 1", "c 1", "d 5"], ["e 5", "f 2", "g 1", "h 1"])
    # differences 0.4, 0.1, 0 and -0.4 against a bias of 0.25: the middle two are swayed by the place
    assert (found["wins"], found["ties"], found["losses"], found["failed"]) == (1, 2, 1, 0)
    assert found["rate"] == 0.5 and found["swayed"] == 0.5
    assert found["first_place"] == 6 / 8  # once each of the first and last pair was preferred in the second place
    assert sorted(scorer.asked) == sorted(
        pair
        for one, two in (("a 1", "e 5"), ("b 1", "f 2"), ("c 1", "g 1"), ("d 5", "h 1"))
        for pair in ((one, two), (two, one))
    )


def test_without_bias_the_better_answer_wins_and_an_equal_one_is_half_a_win(scripted: Any) -> None:
    found = scripted(Scripted(0.0), ["1", "1", "1", "5"], ["5", "2", "1", "1"])
    assert (found["wins"], found["ties"], found["losses"]) == (2, 1, 1)
    assert found["rate"] == 2.5 / 4 and 0 <= found["low"] < found["rate"] < found["high"] <= 1
    assert (found["first_place"], found["swayed"]) == (0.5, 0.0)


def test_pairs_without_a_grade_are_counted_apart(scripted: Any) -> None:
    found = scripted(Scripted(0.0, fails="bad"), ["1", "bad 1"], ["5", "2"])
    assert (found["wins"], found["failed"], found["rate"]) == (1, 1, 1.0)


def test_a_reward_that_sees_one_answer_prefers_the_higher_score(scripted: Any, tmp_path: Path) -> None:
    scorer = Scripted(0.0)
    found = scripted(scorer, ["1", "3", "4"], ["5", "3", "2"], "rule.yaml")
    assert (found["wins"], found["ties"], found["losses"], found["rate"]) == (1, 1, 1, 0.5)
    assert {other for _, other in scorer.asked} == {"0"} and found["first_place"] is None
    (line,) = win_lines(Table.read(tmp_path / "out"))
    assert line[:7] == ["exact", "first", "other", "1", "1", "1", "0"] and line[7].startswith("50.0% (")


def test_seeds_of_a_prompt_are_averaged_before_prompts_are() -> None:
    found = count([Verdict("x", 1.0), Verdict("x", 0.0), Verdict("y", 1.0), Verdict("z", None)])
    assert found["rate"] == 0.75 and (found["wins"], found["losses"], found["failed"]) == (2, 1, 1)


def test_answers_of_two_recipes_are_needed(scripted: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are no answers of first and another recipe"):
        scripted(Scripted(0.0), [], [])
    with pytest.raises(UserError, match="is not the folder of a comparison"):
        judge(tmp_path, "judge.yaml", lambda text: None)


def test_the_built_in_rubric_asks_of_two_what_it_asks_of_one() -> None:
    rubric = Rubric(None, (0.0, 10.0))
    one = rubric.message(Prompt(0, "why?", (), None), "because")
    both = rubric.message(Prompt(0, "why?", (), None, {"compared_with": "no idea"}), "because")
    assert "You grade a response to a task." in one and "Response B" not in one and "(right, complete and clear)" in one
    assert "You compare two responses to a task." in both and "(A is far better); 5.0 says" in both
    assert both.index("Response A") < both.index("because") < both.index("Response B") < both.index("no idea")
    assert "Grade: N" in both and "Grade: N" in one
