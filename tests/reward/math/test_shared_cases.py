"""The shared math cases, which users do not have: run by ``make test-shared``."""

import json
from pathlib import Path

import pytest

from dapo.reward.math.score import score_math

CASES = Path(__file__).parents[4] / "shared" / "cases" / "math_reward_cases.jsonl"


@pytest.mark.shared
def test_all_math_cases_agree():
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    assert len(cases) > 50
    wrong = [
        f"{case['gold']} | {case['response'][:80]} | expected {case['expected']}"
        for case in cases
        if score_math(case["response"], case["gold"], ["boxed", "answer_line"]).correct != case["expected"]
    ]
    assert wrong == []
    assert not Path("/tmp/canary_math_eval").exists()
