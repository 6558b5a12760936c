"""When training stops because evaluations bring nothing better."""

from __future__ import annotations

import json

from dapo.config import EvaluationConfig
from dapo.evaluation.early_stopping import EarlyStopping


def test_an_evaluation_that_is_made_again_after_a_resume_counts_once() -> None:
    config = EvaluationConfig(patience=2)
    best = EarlyStopping(config)
    assert best.observe(0, {"eval/accuracy": 0.5})
    assert not best.observe(1, {"eval/accuracy": 0.4})
    again = EarlyStopping(config)
    again.load_state(json.loads(json.dumps(best.state())))
    assert not again.observe(1, {"eval/accuracy": 0.4}) and again.evaluations_since == 1 and not again.converged
    assert not again.observe(2, {"eval/accuracy": 0.45}) and again.evaluations_since == 2 and again.converged
    assert (again.step, again.value, again.metric) == (0, 0.5, "eval/accuracy")


def test_the_best_evaluation_made_again_is_still_the_best_one() -> None:
    best = EarlyStopping(EvaluationConfig(patience=1))
    assert best.observe(3, {"eval/accuracy": 0.5})
    again = EarlyStopping(EvaluationConfig(patience=1))
    again.load_state(best.state())
    assert again.observe(3, {"eval/accuracy": 0.1}) and not again.converged and again.value == 0.5


def test_better_is_more_than_the_improvement_asked_for_and_the_first_one_needs_none() -> None:
    """By steps of a quarter, which are exact: 0.75 is not more than 0.25 above 0.5, and 0.875 is."""
    best = EarlyStopping(EvaluationConfig(patience=3, min_improvement=0.25))
    seen = [best.observe(step, {"eval/accuracy": value}) for step, value in enumerate((0.5, 0.75, 0.5, 0.875))]
    assert seen == [True, False, False, True]
    assert (best.step, best.value, best.evaluations_since) == (3, 0.875, 0)
    for step in (4, 5):
        assert not best.observe(step, {"eval/accuracy": 0.875}) and not best.converged
    assert not best.observe(6, {"eval/accuracy": 0.0}) and best.converged and best.evaluations_since == 3


def test_a_metric_of_the_users_that_is_called_best_decides_while_it_is_there() -> None:
    best, own = EarlyStopping(EvaluationConfig()), "eval/metric/best"
    seen = [best.observe(step, {"eval/accuracy": 0.1 * step, own: value}) for step, value in enumerate((0.5, 0.4, 0.6))]
    assert seen == [True, False, True] and (best.metric, best.value) == (own, 0.6)
    assert best.observe(3, {"eval/accuracy": 0.1}) and (best.metric, best.value) == ("eval/accuracy", 0.1)


def test_without_an_improvement_asked_for_the_same_again_is_none() -> None:
    best = EarlyStopping(EvaluationConfig())
    assert best.observe(0, {"eval/accuracy": 0.0}) and not best.observe(1, {"eval/accuracy": 0.0})


def test_of_a_stage_the_lowest_loss_is_the_best() -> None:
    best = EarlyStopping(EvaluationConfig(patience=1))
    assert [best.observe(step, {"eval/loss": loss, "eval/rows": 4.0}) for step, loss in enumerate((2.0, 1.5, 1.6))] == [
        True,
        True,
        False,
    ]
    assert (best.step, best.value) == (1, 1.5) and "eval/loss has not fallen" in best.reason()
