"""Overlong shaping (Eq. 13). The number of an entry is that of shared/cases/failures.md."""

import math

import pytest
from algorithm_support import make_group, properties, with_shaped
from hypothesis import given
from hypothesis import strategies as st


def shape(algo, group, **changes):
    options = {
        "max_response_length": 100,
        "soft": True,
        "buffer_len": 20,
        "penalty_factor": 1.0,
        "hard": False,
        "filter_truncated": False,
    }
    return algo.shaping.shape_rewards(group, **(options | changes))


def shaped(group):
    return [s.shaped_reward for s in group.samples]


def test_penalty_table(algo):
    """Entries 30 and 31: borders and sign, in tokens."""
    for length, right in [(1, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1), (101, -1), (999, -1)]:
        penalty = algo.shaping.overlong_penalty(length, max_response_length=100, buffer_len=20, penalty_factor=1.0)
        assert penalty == pytest.approx(right), length


def test_penalty_factor_scales(algo):
    for length, right in [(80, 0), (90, -0.25), (100, -0.5), (101, -0.5)]:
        penalty = algo.shaping.overlong_penalty(length, max_response_length=100, buffer_len=20, penalty_factor=0.5)
        assert penalty == pytest.approx(right), length


def test_penalty_without_buffer(algo):
    """Entry 31: a buffer of 0 is a step, not a division by zero."""
    for length, right in [(99, 0), (100, 0), (101, -1)]:
        assert algo.shaping.overlong_penalty(length, max_response_length=100, buffer_len=0, penalty_factor=1.0) == right


def test_penalty_with_buffer_of_all(algo):
    for length, right in [(0, 0), (1, -0.01), (100, -1)]:
        penalty = algo.shaping.overlong_penalty(length, max_response_length=100, buffer_len=100, penalty_factor=1.0)
        assert penalty == pytest.approx(right)


def test_buffer_longer_than_limit_is_refused(algo):
    """Entry 31."""
    for wrong in (-1, 101):
        with pytest.raises(ValueError, match="buffer_len"):
            algo.shaping.overlong_penalty(5, max_response_length=100, buffer_len=wrong, penalty_factor=1.0)


@properties
@given(st.integers(1, 300), st.data())
def test_penalty_is_monotone_and_bounded(algo, limit, data):
    buffer = data.draw(st.integers(0, limit))
    penalties = [
        algo.shaping.overlong_penalty(n, max_response_length=limit, buffer_len=buffer, penalty_factor=1.0)
        for n in range(limit + 3)
    ]
    assert penalties == sorted(penalties, reverse=True)
    assert penalties[0] == 0 and penalties[-1] == -1


def test_soft_is_added_to_the_raw_reward(algo):
    group = make_group([1, 1, -1, -1], lengths=[80, 90, 100, 81], truncated=(2,))
    result = shape(algo, group)
    assert shaped(result) == pytest.approx([1, 0.5, -2, -1.05])
    assert [s.reward.value for s in result.samples] == [1, 1, -1, -1]
    assert all(s.in_loss for s in result.samples)


def test_full_length_with_stop_token_is_not_truncated(algo):
    """|y| counts the stop token; a response whose stop token is the last allowed one is whole."""
    group = make_group([1, 1], lengths=[100, 100], truncated=(1,))
    result = shape(algo, group, soft=False, hard=True, filter_truncated=True)
    assert shaped(result) == [1, -1]
    assert [s.in_loss for s in result.samples] == [True, False]


def test_nothing_on_means_raw_reward(algo):
    """Entry 32: disabled means that no other key is looked at."""
    group = make_group([1, 0.25], lengths=[100, 200], truncated=(1,))
    result = shape(algo, group, soft=False, buffer_len=-5, max_response_length=1)
    assert shaped(result) == [1, 0.25]


def test_hard_replaces_the_reward(algo):
    result = shape(algo, make_group([1, 0.5, 7], lengths=[9, 9, 100], truncated=(2,)), soft=False, hard=True)
    assert shaped(result) == [1, 0.5, -1]


def test_soft_and_hard_exclude_each_other(algo):
    with pytest.raises(ValueError, match="exclude"):
        shape(algo, make_group([1, -1]), soft=True, hard=True)


def test_filtering_keeps_the_reward(algo):
    """Entry 21: a truncated response still counts in the statistics of its group."""
    result = shape(algo, make_group([1, -1], truncated=(1,)), filter_truncated=True)
    assert shaped(result) == [1, -1]
    assert [s.in_loss for s in result.samples] == [True, False]


def test_no_verdict_no_reward(algo):
    """Entry 60: a failed score is not a wrong answer."""
    result = shape(algo, make_group([1, None, -1]))
    assert math.isnan(result.samples[1].shaped_reward)
    assert [s.in_loss for s in result.samples] == [True, False, True]


def test_kl_comes_off_the_shaped_reward(algo):
    group = with_shaped(make_group([1, None, -1]), [0.5, math.nan, -1])
    result = shaped(algo.shaping.subtract_kl(group, [2, -1], coef=0.1))
    assert result == pytest.approx([0.3, math.nan, -0.9], nan_ok=True)
    with pytest.raises(ValueError, match="1 KLs for 2"):
        algo.shaping.subtract_kl(group, [2], coef=0.1)
