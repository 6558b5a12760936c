"""Held-out evaluation: its own sampling, every prompt, every sample, and numbers by hand.

The number of an entry is that of shared/cases/failures.md.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from dapo.config import build_config, nested
from dapo.errors import RewardError
from dapo.evaluation.evaluate import evaluate
from dapo.evaluation.result import Evaluation
from dapo.records import Prompt, Reward, Sample
from dapo.rollout.engine import EngineError, Request
from dapo.rollout.seeds import sample_seed

PROMPTS = [Prompt(row, f"p{row}", (5, row), answer=str(row)) for row in (4, 2, 9)]


class FakeEngine:
    """Samples of 1, 2, ... tokens in random order; fails after ``fails_after`` of them."""

    version = 0

    def __init__(self, fails_after: int | None = None) -> None:
        self.requests: list[Request] = []
        self._fails_after = fails_after

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        self.requests += requests
        order = [(r, i) for r in requests for i in range(len(r.seeds))]
        random.Random(0).shuffle(order)
        for count, (request, index) in enumerate(order):
            if count == self._fails_after:
                raise EngineError("out of memory")
            await asyncio.sleep(0)
            length = index + 1
            yield Sample(
                request_id=request.id,
                index=index,
                token_ids=np.full(length, request.prompt_ids[1], np.int32),
                logprobs=np.zeros(length, np.float32),
                versions=np.zeros(length, np.int32),
                finish_reason="length" if index == 3 else "stop",
            )


class FakeScorer:
    """``rule(row, number of tokens)`` is a reward, or an exception to raise."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule

    async def score(self, prompt: Prompt, response: str, finish_reason: str | None = None) -> Reward:
        await asyncio.sleep(0)
        found = self._rule(prompt.row, len(response.split()))
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]


def right_if_even(row: int, length: int) -> Reward:
    correct = row % 2 == 0 and length > 1
    return Reward(correct, 1.0 if correct else -1.0, parts={"answer_found": float(length > 2)})


def decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def run(rule: Any = right_if_even, engine: Any = None, **changes: Any) -> tuple[Evaluation, Any, list[tuple[int, int]]]:
    tree = {"model.path": "m", "seed": 7, "rollout.max_response_length": 20, "algorithm.overlong_buffer.len": 4}
    tree |= {"evaluation.samples_per_prompt": 4} | {key.replace("__", "."): value for key, value in changes.items()}
    engine = engine or FakeEngine()
    heard: list[tuple[int, int]] = []

    async def main() -> Evaluation:
        found = await evaluate(
            PROMPTS,
            engine,
            FakeScorer(rule),  # type: ignore[arg-type]
            decode,
            build_config(nested(tree)),
            lambda done, total: heard.append((done, total)),
        )
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return found

    return asyncio.run(main()), engine, heard


def test_every_sample_of_every_prompt_comes_back_in_order() -> None:
    found, _, heard = run()
    assert [g.prompt.row for g in found.groups] == [4, 2, 9]
    assert [[s.index for s in g.samples] for g in found.groups] == [[0, 1, 2, 3]] * 3
    assert all(
        s.text == decode(s.token_ids) and s.token_ids[0] == g.prompt.row for g in found.groups for s in g.samples
    )
    assert heard == [(k, 12) for k in range(1, 13)]


def test_evaluation_samples_with_settings_of_its_own() -> None:
    """Entry 76: greedy by default, whatever the rollout does, and on random streams that training never uses."""
    _, engine, _ = run(rollout__temperature=1.0)
    assert {(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in engine.requests} == {(0.0, 1.0, 0)}
    assert {r.sampling.max_tokens for r in engine.requests} == {20}
    seeds = {seed for r in engine.requests for seed in r.seeds}
    assert len(seeds) == 12
    assert not seeds & {sample_seed(7, row, draw, i) for row in range(10) for draw in range(50) for i in range(4)}
    _, engine, _ = run(
        evaluation__temperature=1.0,
        evaluation__top_p=0.7,
        evaluation__top_k=5,
        evaluation__max_response_length=9,
        evaluation__samples_per_prompt=2,
    )
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 0.7, 5, 9)
    assert {len(r.seeds) for r in engine.requests} == {2}


def test_the_same_seed_draws_the_same_samples_again() -> None:
    assert [r.seeds for r in run()[1].requests] == [r.seeds for r in run()[1].requests]
    assert [r.seeds for r in run()[1].requests] != [r.seeds for r in run(seed=8)[1].requests]


def test_the_numbers_by_hand() -> None:
    """Rows 4 and 2 are right at 3 of 4 lengths, row 9 never: 6 of 12 (entry 41: all shares within [0, 1]).

    Of the 27 ways to draw three rows with replacement, 8 draw no row 9 and 1 nothing else: both more than 2.5%, so
    the bootstrap reaches from 0 to 3/4. Wilson's interval: 3/4, 3/4, 0 and 0, 0, 1, 1 have the variance 1.375 / 7, so
    3 x 0.25 / (1.375 / 7) = 3.818 trials, and 0.5 +- 1.96 sqrt(0.25 / 3.818 + 1.96^2 / 3.818^2 / 4) / 2.006.
    """
    found, _, _ = run()
    assert found.accuracy == 0.5 and found.response_length == 2.5
    assert found.metrics() == {
        "eval/rows": 3,
        "eval/accuracy": 0.5,
        "eval/accuracy_low": 0.0,
        "eval/accuracy_high": pytest.approx(0.8541, abs=1e-4),
        "eval/pass@4": pytest.approx(2 / 3),
        "eval/reward": 0.0,
        "eval/response_length": 2.5,
        "eval/truncated": 0.25,
        "eval/no_answer": 0.5,
        "eval/lenient": 1.0,  # each response is the number of its row, which is its answer
    }


def test_failed_scores_are_reported_and_count_nowhere_else() -> None:
    """Entry 60: a failed score is not a wrong answer."""

    def one_in_four_fails(row: int, length: int) -> Reward:
        return Reward(None, 0.0, error="time-out") if length == 1 else right_if_even(row, length)

    found, _, _ = run(one_in_four_fails, reward__max_error_rate=0.25)
    assert found.metrics()["eval/errors"] == 0.25
    assert found.accuracy == pytest.approx(6 / 9)
    nothing, _, _ = run(lambda row, length: Reward(None, 0.0, error="down"), reward__max_error_rate=1.0)
    assert nothing.accuracy is None and nothing.metrics()["eval/errors"] == 1


def test_prompts_weigh_the_same_however_many_verdicts_they_have() -> None:
    """Row 4: 1 of 1 right; row 2: 2 of 4; row 9: none has a verdict. The mean of rows is 3/4, of samples 3/5."""

    def rule(row: int, length: int) -> Reward:
        if row == 9 or (row == 4 and length > 1):
            return Reward(None, 0.0, error="down")
        return Reward(row == 4 or length > 2, 1.0)

    found, _, _ = run(rule, reward__max_error_rate=0.9)
    assert found.accuracy == 0.75
    told = found.as_json()
    assert told["metrics"]["avg@4"]["value"] == told["metrics"]["pass@1"]["value"] == 0.75
    assert told["metrics"]["pass@2"]["value"] == pytest.approx((1 + 5 / 6) / 2)  # row 4 with the one it has
    assert (told["prompts"], told["prompts_short"], told["prompts_unscored"]) == (3, 1, 1)
    assert [(r["row"], r["verdicts"], r["correct"]) for r in told["rows"]] == [(4, 1, 1), (2, 4, 2), (9, 0, 0)]
    assert told["shares"]["failed"] == pytest.approx(7 / 12)


def test_a_majority_is_of_answers() -> None:
    """Row 4: right twice, wrong twice alike but for spelling: by lot. Row 2: right once, three wrong ones apart: 1/4.
    Row 9: right once, the others have no answer: won."""

    def rule(row: int, length: int) -> Reward:
        answers: dict[int, list[str | None]] = {
            4: ["7", "7.0", r"\\dfrac 1 2", r"\\frac{1}{2}"],
            2: ["7", "1", "2", "3"],
            9: ["7", None, None, None],
        }
        answer = answers[row][length - 1]
        correct = answer in ("7", "7.0")
        return Reward(correct, 1.0, extracted=answer, parts={"answer_found": float(answer is not None)})

    found, _, _ = run(rule)
    assert found.metrics()["eval/maj@4"] == pytest.approx((1 / 2 + 1 / 4 + 1) / 3)
    shares = found.shares()
    assert (shares["correct"], shares["wrong"], shares["no_answer"]) == (4 / 12, 5 / 12, 3 / 12)
    lines = list(found.sample_lines())
    assert [line["extracted"] for line in lines[8:]] == ["7", None, None, None]
    assert lines[0]["gold"] == "4" and lines[0]["correct"] is True and lines[0]["length"] == 1


def test_too_many_failed_scores_end_an_evaluation() -> None:
    """An average over the few that were scored would lie."""
    with pytest.raises(RewardError, match=r"evaluation: 12 of 12 scores failed .*such as: down"):
        run(lambda row, length: Reward(None, 0.0, error="down"))


def test_a_reward_without_right_and_wrong_has_no_accuracy() -> None:
    found, _, _ = run(lambda row, length: Reward(None, float(length)))
    assert found.accuracy is None
    assert found.metrics()["eval/reward"] == 2.5 and "eval/accuracy" not in found.metrics()


def test_nothing_to_evaluate() -> None:
    nothing = Evaluation(())
    assert nothing.accuracy is None and nothing.response_length == 0
    assert nothing.metrics() == {"eval/rows": 0, "eval/response_length": 0, "eval/truncated": 0}


def test_the_first_failure_comes_through_as_it_is() -> None:
    with pytest.raises(RewardError, match="a broken contract"):
        run(lambda row, length: RewardError("a broken contract") if row == 2 else right_if_even(row, length))
    with pytest.raises(EngineError, match="out of memory"):
        run(engine=FakeEngine(fails_after=5))


def test_a_metric_that_is_cancelled_is_waited_for() -> None:
    """A thread that goes on alone would hold up the end of the process, and use what has been closed."""
    seen: list[str] = []

    def slow(groups: Any) -> float:
        seen.append("begun")
        time.sleep(0.2)
        seen.append("done")
        return 1.0

    async def main() -> None:
        config, scorer = build_config({"model": {"path": "m"}}), FakeScorer(right_if_even)
        work = evaluate(PROMPTS, FakeEngine(), scorer, decode, config, metrics={"slow": slow})  # type: ignore[arg-type]
        task = asyncio.create_task(work)
        while not seen:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and seen == ["begun", "done"]

    asyncio.run(main())
