"""Dynamic sampling (Eq. 11). The number of an entry is that of shared/cases/failures.md."""

import pytest
from algorithm_support import make_group, properties
from hypothesis import given
from hypothesis import strategies as st


def judge(algo, group, metric="acc", tolerance=1e-6):
    return algo.admission.judge(group, metric=metric, tolerance=tolerance)


def test_by_accuracy(algo):
    for correct, right in [
        ([True, False], "mixed"),
        ([True, True, True, False], "mixed"),
        ([False, False, True, False], "mixed"),
        ([True, True], "all_right"),
        ([False, False, False], "all_wrong"),
    ]:
        assert judge(algo, make_group([0.0] * len(correct), correct=correct)) == right


def test_correct_is_not_reward(algo):
    """Rewards differ, verdicts do not: dropped; and the other way round: kept."""
    assert judge(algo, make_group([0.1, 0.9], correct=[True, True])) == "all_right"
    assert judge(algo, make_group([0.5, 0.5], correct=[True, False])) == "mixed"


def test_shaped_reward_is_not_looked_at(algo):
    """Entry 27: four wrong answers of lengths 10, 10, 90, 100 are dropped."""
    group = algo.shaping.shape_rewards(
        make_group([-1, -1, -1, -1], lengths=[10, 10, 90, 100]),
        max_response_length=100,
        soft=True,
        buffer_len=20,
        penalty_factor=1.0,
        hard=False,
        filter_truncated=False,
    )
    assert len({s.shaped_reward for s in group.samples}) == 3
    assert judge(algo, group) == "all_wrong"
    assert judge(algo, group, "score") == "flat"


def test_by_score(algo):
    """Entries 19 and 28: constant continuous rewards are dropped, whatever their value."""
    for values, right in [
        ([0.5, 0.5, 0.5, 0.5], "flat"),
        ([0.35] * 7, "flat"),
        ([0.1 + 0.2, 0.3], "flat"),
        ([0.5, 0.5, 0.50001], "mixed"),
        ([-1, 1], "mixed"),
    ]:
        group = make_group(values, correct=[None] * len(values))
        assert judge(algo, group, "score") == right


def test_spread_must_exceed_the_tolerance(algo):
    for tolerance, right in [(0.25, "flat"), (0.2499, "mixed"), (0.0, "mixed")]:
        assert judge(algo, make_group([0.5, 0.75]), "score", tolerance) == right
    assert judge(algo, make_group([0.5, 0.5]), "score", 0.0) == "flat"


def test_fewer_than_two_scores(algo):
    """Entries 18 and 60: failed scores are no wrong answers."""
    for values in ([1, None], [None, None], [1]):
        for metric in ("acc", "score"):
            assert judge(algo, make_group(values), metric) == "too_few_scored"
    assert judge(algo, make_group([1, None, 1])) == "all_right"
    assert judge(algo, make_group([1, None, -1])) == "mixed"


def test_accuracy_without_correct_is_an_error(algo):
    with pytest.raises(ValueError, match="row 7"):
        judge(algo, make_group([1, -1], correct=[True, None], row=7))
    with pytest.raises(ValueError, match="seq_reward"):
        judge(algo, make_group([1, -1]), "seq_reward")


def test_admission_waits_for_earlier_draws(algo):
    """The first two kept in draw order, and only when nothing before them is pending."""
    yes, no, wait = True, False, None
    for outcomes, admitted, surplus, complete in [
        ([], (), (), False),
        ([wait, yes, yes], (), (), False),
        ([no, yes, wait, yes], (1,), (), False),
        ([wait, yes, yes, yes], (), (3,), False),
        ([no, yes, no, yes, wait], (1, 3), (), True),
        ([yes, yes, wait, yes], (0, 1), (3,), True),
        ([yes, no], (0,), (), False),
    ]:
        result = algo.admission.admit(outcomes, 2)
        assert (result.admitted, result.surplus, result.complete) == (admitted, surplus, complete), outcomes


@properties
@given(st.lists(st.booleans(), max_size=20), st.integers(0, 6), st.randoms(use_true_random=False))
def test_admission_does_not_depend_on_completion_order(algo, kept, wanted, rng):
    """Draws finish in any order; what is admitted only grows, and ends as the first ``wanted`` kept draws."""
    outcomes = [None] * len(kept)
    last = ()
    for place in rng.sample(range(len(kept)), len(kept)):
        outcomes[place] = kept[place]
        now = algo.admission.admit(outcomes, wanted).admitted
        assert now[: len(last)] == last
        last = now
    result = algo.admission.admit(kept, wanted)
    in_order = tuple(i for i, k in enumerate(kept) if k)
    assert last == result.admitted == in_order[:wanted]
    assert result.surplus == in_order[wanted:]
    assert result.complete == (len(in_order) >= wanted)


def test_refill_size(algo):
    for wanted, in_flight, rate, budget, right in [
        (4, 0, 1.0, 99, 4),
        (4, 0, 0.5, 99, 8),
        (3, 0, 0.3, 99, 10),
        (1, 0, 0.3, 99, 4),
        (4, 5, 0.5, 99, 3),
        (4, 8, 0.5, 99, 0),
        (4, 20, 0.5, 99, 0),
        (4, 0, 0.5, 6, 6),
        (4, 0, 0.0, 6, 6),
        (4, 0, 0.5, 0, 0),
        (0, 0, 0.5, 9, 0),
        (-2, 0, 0.5, 9, 0),
        (4, 0, 1e-300, 6, 6),
    ]:
        size = algo.admission.refill_size(wanted=wanted, in_flight=in_flight, keep_rate=rate, budget_left=budget)
        assert size == right, (wanted, in_flight, rate, budget)


@properties
@given(st.integers(-2, 50), st.integers(0, 50), st.floats(0, 1), st.integers(0, 100))
def test_refill_is_bounded_and_goes_on(algo, wanted, in_flight, rate, budget):
    """Entry 23: never above the budget; and never 0 while groups are missing, nothing is in flight and budget is."""
    size = algo.admission.refill_size(wanted=wanted, in_flight=in_flight, keep_rate=rate, budget_left=budget)
    assert 0 <= size <= budget
    if wanted > 0 and in_flight == 0 and budget > 0:
        assert size > 0
    if 0 < size < budget:
        assert (in_flight + size) * rate >= wanted - 1e-6
