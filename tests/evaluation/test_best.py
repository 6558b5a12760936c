"""When training stops because evaluations bring nothing better."""

from __future__ import annotations

import json

from dapo.config import EvaluationConfig
from dapo.evaluation.best import Best


def test_an_evaluation_that_is_made_again_after_a_resume_counts_once() -> None:
    config = EvaluationConfig(patience=2)
    best = Best(config)
    assert best.observe(0, {"eval/accuracy": 0.5})
    assert not best.observe(1, {"eval/accuracy": 0.4})
    again = Best(config)
    again.load_state(json.loads(json.dumps(best.state())))
    assert not again.observe(1, {"eval/accuracy": 0.4}) and again.evaluations_since == 1 and not again.converged
    assert not again.observe(2, {"eval/accuracy": 0.45}) and again.evaluations_since == 2 and again.converged
    assert (again.step, again.value, again.metric) == (0, 0.5, "eval/accuracy")


def test_the_best_evaluation_made_again_is_still_the_best_one() -> None:
    best = Best(EvaluationConfig(patience=1))
    assert best.observe(3, {"eval/accuracy": 0.5})
    again = Best(EvaluationConfig(patience=1))
    again.load_state(best.state())
    assert again.observe(3, {"eval/accuracy": 0.1}) and not again.converged and again.value == 0.5
