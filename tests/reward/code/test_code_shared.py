"""The shared code cases and data, which users do not have: run by ``make test-shared``."""

import asyncio
import contextlib
import gzip
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from grading import grade

from dapo.config import CodeReward
from dapo.records import Prompt
from dapo.reward.code.scorer import CodeScorer

SHARED = Path(__file__).parents[3] / ".." / "shared"
DATA = (
    "train/mbpp_train.jsonl",
    "train/leetcode_train.jsonl.gz",
    "eval/humaneval_test.jsonl",
    "eval/mbpp_validation.jsonl",
)
DOUBTFUL = {"mbpp_train-00000"} | {f"humaneval_test-000{number}" for number in (32, 33, 38, 50)}
"""Rows whose tests call a helper of the program, or compare two of its values."""
pytestmark = pytest.mark.shared


def rows(name):
    data = (SHARED / "data" / "code" / name).read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data
    return [json.loads(line) for line in text.decode("utf-8").splitlines()]


def stub(entry_point):
    name = entry_point.split(".")[-1]
    if entry_point.startswith("Solution"):
        return f"class Solution:\n    def {name}(self, *args, **kwargs):\n        return None\n"
    return f"def {name}(*args, **kwargs):\n    return None\n"


def check_rows(chosen):
    """Reference solutions are right and stubs are wrong."""
    programs = [program for row in chosen for program in (row["solution"], stub(row["entry_point"]))]
    prompts = [Prompt(k, "", (), None, row) for k, row in enumerate(chosen) for _ in range(2)]

    async def run():
        scorer = CodeScorer(CodeReward(kind="code", packages=["sortedcontainers"]))  # eight LeetCode solutions use it
        await scorer.start()
        try:
            doubts = await scorer.examine(prompts)
            assert [doubt for doubt in doubts if doubt.unusable] == []
            assert {chosen[doubt.position // 2]["id"] for doubt in doubts} <= DOUBTFUL
            responses = [f"```python\n{program}\n```" for program in programs]
            return await asyncio.gather(*map(scorer.score, prompts, responses))
        finally:
            await scorer.close()

    rewards = asyncio.run(run())
    unexpected = [
        f"{row['id']}: {'reference' if expected else 'stub'} {reward}"
        for k, row in enumerate(chosen)
        for reward, expected in zip(rewards[2 * k : 2 * k + 2], (True, False), strict=True)
        if reward.correct is not expected
    ]
    assert unexpected == []


def test_all_code_cases_agree():
    cases = [json.loads(line) for line in (SHARED / "cases/code_reward_cases.jsonl").read_text().splitlines()]
    assert len(cases) > 40
    os.environ["SANDBOX_CANARY_SECRET"] = "1"
    config = CodeReward(kind="code", test_timeout_s=2.5)
    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(lambda case: grade(case["solution"], case["tests"], None, config), cases))
    wrong = [
        f"{case['name']}: {outcome}, expected {case['expected']}"
        for case, outcome in zip(cases, outcomes, strict=True)
        if outcome not in (case["expected"], *case.get("also_ok", ()))
    ]
    assert wrong == []
    assert not Path("/tmp/canary_code_write").exists()
    assert not Path("/tmp/canary_code_escape").exists()  # its process would write later; that none is left is tested
    children: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since has none
            children += (task / "children").read_text().split()
    assert [child for child in children if "bwrap" in Path(f"/proc/{child}/comm").read_text()] == []


def test_reference_solutions_of_a_sample_pass_and_stubs_do_not():
    check_rows([row for name in DATA for row in random.Random(4).sample(rows(name), 40)])


@pytest.mark.nightly
@pytest.mark.parametrize("name", DATA)
def test_reference_solutions_pass_and_stubs_do_not(name):
    check_rows(rows(name))
