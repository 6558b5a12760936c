"""Labelled cases: how they are read, and when a reward agrees with them."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest

from dapo.config import CodeReward, ExactReward, FunctionReward, MathReward
from dapo.errors import DataError, RewardError
from dapo.records import Prompt, Reward
from dapo.reward.check import Case, check_cases, read_cases, running, score_each

EXACT = ExactReward(kind="exact")

FUNCTIONS = '''
import time

def says(prompt, response, answer, **meta):
    """What the response asks for."""
    if response == "fail":
        raise ValueError("no verdict")
    if response == "broken":
        return float("nan")
    if response == "meta":
        return {"value": float(len(meta)), "correct": sorted(meta) == ["level", "note"] and meta["level"] == 3}
    if response == "prompt":
        return prompt == "2+2="
    time.sleep(0.2 if response == "0.25" else 0)
    return float(response)
'''


@pytest.fixture
def says(tmp_path: Path) -> FunctionReward:
    (tmp_path / "says.py").write_text(FUNCTIONS)
    return FunctionReward(kind="function", function=f"{tmp_path / 'says.py'}:says")


def written(path: Path, *cases: object) -> str:
    path.write_text("".join((c if isinstance(c, str) else json.dumps(c)) + "\n" for c in cases), encoding="utf-8")
    return str(path)


def agreements(path: Path, config: object, *cases: object, **options: float) -> list[bool]:
    found = read_cases([written(path / "cases.jsonl", *cases)], config)
    return [one.agrees for one in asyncio.run(check_cases(found, config, **options))]


# --- reading ------------------------------------------------------------------------------------------------------


def test_every_fault_of_every_file_is_named_with_its_line(tmp_path):
    good = {"gold": "1", "response": "1", "expected": True}
    one = written(
        tmp_path / "one.jsonl",
        good,
        good | {"response": 1},
        good | {"expected": "yes"},
        {"answer": "1", "response": "1", "expected": True},
        good | {"gold": None},
        "",
        '{"gold": "1", "response": "1", "expected": tr',
        [1],
        {"solution": "print(1)", "tests": [], "expected": "pass"},
        good | {"also_ok": "error"},
        good | {"also_ok": ["error", "pass"]},
        {"gold": "1", "response": "1"},
        {"gold": "1", "expected": True},
        good | {"gold": {"text": "1"}},
        good | {"prompt": 4},
    )
    two = written(tmp_path / "two.jsonl", good | {"expected": None})
    with pytest.raises(DataError) as caught:
        read_cases([one, str(tmp_path / "none.jsonl"), two], EXACT)
    faults = str(caught.value).splitlines()
    for place, words in {
        f"{one}:2": "'response' must be text, got 1",
        f"{one}:3": "'expected' must be true (right), false (wrong), a number (the reward) or \"error\", got 'yes'",
        f"{one}:4": "no key 'gold', the reference that this reward compares with; it is not called 'answer' here",
        f"{one}:5": "'gold' is null, but this reward compares with it",
        f"{one}:7": "not valid JSON",
        f"{one}:8": "expected an object such as",
        f"{one}:9": "'solution' without 'response' is a case for reward.kind=code, not for reward.kind=exact",
        f"{one}:10": "'also_ok' must be a list",
        f"{one}:11": "'also_ok' must be true (right)",
        f"{one}:12": "no key 'expected'; the keys are 'gold', 'response'",
        f"{one}:13": "no key 'response'; the keys are 'gold', 'expected'",
        f"{one}:14": "'gold' must be text or a number, got an object",
        f"{one}:15": "'prompt' must be text or a list of chat messages, got a number",
        f"{tmp_path / 'none.jsonl'}": "no such file",
        f"{two}:1": "'expected' must be true (right)",
    }.items():
        assert faults.pop(0).startswith(f"{place}: {words}")
    assert faults == []


def test_a_compressed_file_is_read_and_numbers_stay_as_they_are_written(tmp_path):
    path = tmp_path / "cases.jsonl.gz"
    path.write_bytes(gzip.compress(b'\n{"gold": 0.10, "response": "0.10", "expected": true, "name": "n"}\n'))
    (case,) = read_cases([str(path)], EXACT)
    assert case.place == f"{path}:2" and case.about == {"name": "n"}
    assert (case.prompt.answer, case.response, case.accepted) == ("0.10", "0.10", (True,))


def test_what_can_become_of_a_program_is_one_of_four_words(tmp_path):
    program = {"solution": "print(1)", "tests": [{"stdin": "", "stdout": "1"}], "entry_point": "f"}
    good = program | {"expected": "fail", "also_ok": ["error"]}
    code = CodeReward(kind="code")
    (case,) = read_cases([written(tmp_path / "good.jsonl", good)], code)
    assert case.is_program and case.response == "print(1)" and case.accepted == ("fail", "error")
    assert case.prompt.meta["tests"] == program["tests"] and case.prompt.meta["entry_point"] == "f"
    bad = written(
        tmp_path / "bad.jsonl",
        program | {"expected": True},
        program | {"expected": "pass", "also_ok": ["ok"]},
        {"solution": "print(1)", "expected": "pass"},
        program | {"expected": "pass", "solution": ["print(1)"]},
    )
    with pytest.raises(DataError) as caught:
        read_cases([bad], code)
    first, second, third, fourth = str(caught.value).splitlines()
    assert first == f"{bad}:1: 'expected' of a solution must be one of pass, fail, timeout, error, got True"
    assert second == f"{bad}:2: 'also_ok' of a solution must be one of pass, fail, timeout, error, got 'ok'"
    assert third.startswith(f"{bad}:3: no key 'tests'") and fourth.startswith(f"{bad}:4: 'solution' must be text")


def test_a_response_with_tests_is_a_case_for_the_whole_code_reward(tmp_path):
    case = {"response": "```python\nprint(1)\n```", "tests": ["assert 1"], "solution": "x", "expected": True}
    (found,) = read_cases([written(tmp_path / "cases.jsonl", case)], CodeReward(kind="code"))
    assert not found.is_program and found.prompt.answer is None
    assert found.prompt.meta == {"tests": ["assert 1"], "solution": "x"}


# --- agreement ----------------------------------------------------------------------------------------------------


def test_a_verdict_agrees_only_with_the_same_verdict(tmp_path):
    right, wrong = {"gold": "4", "response": " 4 "}, {"gold": "4", "response": "5"}
    cases = [
        right | {"expected": True},
        right | {"expected": False},
        wrong | {"expected": False},
        wrong | {"expected": True},
        wrong | {"expected": True, "also_ok": [False]},
        right | {"expected": 1},
        wrong | {"expected": 1, "also_ok": ["error"]},
        right | {"expected": "error"},
    ]
    assert agreements(tmp_path, EXACT, *cases) == [True, False, True, False, True, True, False, False]


def test_a_number_agrees_within_the_tolerance_and_is_neither_right_nor_wrong(tmp_path, says):
    cases = [
        {"response": "0.5", "expected": 0.5},
        {"response": "0.5", "expected": 0.5000000001},
        {"response": "0.5", "expected": 0.50001},
        {"response": "1.0", "expected": True},
        {"response": "-1.0", "expected": False},
        {"response": "1e15", "expected": 1000000000000001},
    ]
    assert agreements(tmp_path, says, *cases) == [True, True, False, False, False, True]
    assert agreements(tmp_path, says, cases[2], tolerance=1e-3) == [True]


def test_a_failed_score_agrees_only_where_that_was_said_to_be_fine(tmp_path, says):
    failed = {"response": "fail", "gold": "4"}
    cases = [
        failed | {"expected": False},
        failed | {"expected": 0},
        failed | {"expected": False, "also_ok": ["error"]},
        failed | {"expected": "error"},
    ]
    assert agreements(tmp_path, says, *cases) == [False, False, True, True]


def test_prompt_and_other_keys_reach_the_function_but_not_what_is_expected(tmp_path, says):
    cases = [
        {"response": "meta", "gold": "4", "level": 3, "note": "n", "expected": 2, "also_ok": ["error"]},
        {"response": "meta", "level": 3, "note": "n", "expected": True},
        {"response": "prompt", "prompt": "2+2=", "expected": True},
        {"response": "prompt", "prompt": [{"role": "user", "content": "2+2="}], "expected": True},
        {"response": "prompt", "expected": False},
    ]
    assert agreements(tmp_path, says, *cases) == [True] * 5


def test_results_are_in_the_order_of_the_cases_whatever_is_done_first(tmp_path, says):
    values = ["0.25", "1.0", "2.0", "3.0", "4.0"]
    cases = [{"response": value, "expected": float(value)} for value in values]
    found = read_cases([written(tmp_path / "cases.jsonl", *cases)], says)
    done: list[int] = []
    checked = asyncio.run(check_cases(found, says, advance=done.append))
    assert [one.reward.value for one in checked] == [0.25, 1.0, 2.0, 3.0, 4.0]
    assert done == [1, 2, 3, 4, 5]


def test_a_broken_contract_ends_it_and_names_the_case(tmp_path, says):
    path = written(tmp_path / "cases.jsonl", {"response": "1", "expected": 1}, {"response": "broken", "expected": 1})
    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(check_cases(read_cases([path], says), says))
    (error,) = caught.value.exceptions
    assert isinstance(error, RewardError) and str(error).startswith(f"{path}:2: reward function ")


def test_a_disagreement_says_what_is_wrong_with_the_case_itself(tmp_path):
    math = MathReward(workers=1)
    cases = [
        {"gold": "4", "response": "\\boxed{5}", "expected": True},
        {"gold": "\\frac{1}{", "response": "\\boxed{1}", "expected": True},
        {"gold": "\\frac{1}{", "response": "\\boxed{1}", "expected": False},
    ]
    found = read_cases([written(tmp_path / "cases.jsonl", *cases)], math)
    first, second, third = asyncio.run(check_cases(found, math))
    assert first.doubt is None and third.doubt is None
    assert "cannot be read as mathematics" in str(second.doubt)
    assert json.loads(json.dumps(second.as_json()))["doubt"] == second.doubt


# --- programs -----------------------------------------------------------------------------------------------------


def test_programs_are_graded_as_they_stand_and_agree_with_what_is_also_fine(tmp_path):
    tests = [{"stdin": "3 4\n", "stdout": "7\n"}, {"stdin": "1 1\n", "stdout": "2\n"}]
    adds = "print(sum(map(int, input().split())))"
    cases = [
        {"solution": adds, "tests": tests, "expected": "pass"},
        {"solution": "print(7)", "tests": tests, "expected": "fail"},
        {"solution": "print(7)", "tests": tests, "expected": "pass"},
        {"solution": "print(7)", "tests": tests, "expected": "pass", "also_ok": ["timeout", "fail"]},
        {"solution": "def add(a, b): return a + b", "tests": ["assert add(1, 2) == 3"], "expected": "pass"},
        {"solution": "while True: pass", "tests": tests, "expected": "timeout"},
        {"solution": f"```python\n{adds}\n```", "tests": tests, "expected": "error"},
        {"solution": adds, "tests": [], "expected": "pass"},
        {"response": f"```python\n{adds}\n```", "tests": tests, "expected": True},
    ]
    config = CodeReward(kind="code", test_timeout_s=1.0)
    found = read_cases([written(tmp_path / "cases.jsonl", *cases)], config)
    checked = asyncio.run(check_cases(found, config))
    assert [one.agrees for one in checked] == [True, True, False, True, True, True, True, False, True]
    outcomes = ["pass", "fail", "fail", "fail", "pass", "timeout", "error", "error", None]
    assert [one.outcome for one in checked] == outcomes
    assert checked[7].detail.startswith("its tests cannot be used: ")
    assert checked[2].as_json()["solution"] == "print(7)" and checked[2].as_json()["outcome"] == "fail"


# --- the scorer ---------------------------------------------------------------------------------------------------


class _Slow:
    """Counts how many scores are under way."""

    def __init__(self, starts: bool = True) -> None:
        self.starts, self.closed, self.now, self.most = starts, False, 0, 0

    async def start(self) -> None:
        if not self.starts:
            raise RewardError("not today")

    async def score(self, prompt: Prompt, response: str, finish_reason: str | None = None) -> Reward:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        return Reward(None, float(response))

    async def close(self) -> None:
        self.closed = True


def test_many_scores_are_asked_for_at_once_but_not_all():
    scorer = _Slow()
    items = [(str(k), Prompt(k, "", ()), str(k), None) for k in range(1000)]
    rewards = asyncio.run(score_each(scorer, items, lambda: None))
    assert [reward.value for reward in rewards] == list(range(1000))
    assert scorer.most == 256


def test_a_scorer_is_closed_even_if_it_does_not_start():
    async def use(scorer: _Slow) -> None:
        async with running(scorer):
            pass

    scorer = _Slow(starts=False)
    with pytest.raises(RewardError, match="not today"):
        asyncio.run(use(scorer))
    assert scorer.closed


def test_no_cases_need_no_scorer():
    config = FunctionReward(kind="function", function="no.such.module:f")
    assert asyncio.run(check_cases(list[Case](), config)) == []
