"""Whose fault it is that a verdict does not come in time: the response's, the row's or the machine's."""

import asyncio
from pathlib import Path

import pytest

from dapo.config import MathReward
from dapo.records import Prompt
from dapo.reward.math import score
from dapo.reward.math.scorer import MathScorer
from dapo.reward.pool import OutOfTime, WorkerPool


def forever(*texts):
    while True:
        pass


def test_a_response_that_takes_too_long_is_wrong(monkeypatch):
    monkeypatch.setattr(score, "equivalent", forever)
    reward = score.score_math(r"\boxed{8}", "7", ["boxed"])
    assert (reward.correct, reward.value, reward.error, reward.extracted) == (False, -1.0, None, "8")
    assert reward.parts == {"answer_found": 1.0, "out_of_time": 1.0}


def test_the_search_for_the_answer_is_within_the_limit(monkeypatch):
    monkeypatch.setattr(score, "final_answer", forever)
    reward = score.score_math(r"\boxed{7}", "7", ["boxed"])
    assert (reward.correct, reward.error, reward.parts["out_of_time"]) == (False, None, 1.0)


def test_a_reference_that_takes_too_long_is_not_blamed_on_responses(monkeypatch):
    monkeypatch.setattr(score, "equivalent", forever)
    monkeypatch.setattr(score, "readable", forever)
    reward = score.score_math(r"\boxed{8}", "7", ["boxed"])
    assert reward.correct is None and "takes too long to read" in reward.error
    assert score.make_handler({"extract": ["boxed"]})({"answer": "7"}) == {"readable": None}


@pytest.mark.parametrize("cpu_s, correct", [(0.1, None), (1.9, None), (2.1, False), (9.0, False)])
def test_a_deadline_is_blamed_on_who_computed_until_it(cpu_s, correct):
    class Pool:
        async def run(self, item):
            raise OutOfTime(10, cpu_s)

    scorer = MathScorer(MathReward())
    scorer._pool = Pool()
    reward = asyncio.run(scorer.score(Prompt(0, "", (), "7"), r"\boxed{7}"))
    assert reward.correct is correct and (reward.error is None) == (correct is False)


@pytest.mark.parametrize("kind, worked", [("sleep", False), ("spin", True)])
def test_the_pool_says_how_long_a_worker_computed(kind, worked, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))

    async def run():
        pool = WorkerPool("misbehaving_handler:make_handler", {"state": str(tmp_path)}, workers=1, timeout_s=1.0)
        try:
            with pytest.raises(OutOfTime) as caught:
                await pool.run({"does": kind})
            return caught.value.cpu_s
        finally:
            await pool.close()

    assert (asyncio.run(run()) > 0.1) is worked
