"""Group-relative advantages (Eq. 9). The number of an entry is that of shared/cases/failures.md."""

import math
import statistics

import pytest
import torch
from algorithm_support import make_group, properties, with_shaped
from hypothesis import given
from hypothesis import strategies as st

KINDS = ("group-norm", "group-mean", "leave-one-out")
rewards = st.floats(-10, 10).map(lambda x: round(x, 3))


def test_worked_example(algo):
    result = algo.advantage.advantages([1, -1, -1, -1], kind="group-norm", epsilon=1e-6)
    assert result.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=2e-6)
    assert result[0] < 1.5


def test_epsilon_is_added_to_the_deviation(algo):
    """std of [1, -1] is sqrt(2) with n - 1."""
    result = algo.advantage.advantages([1, -1], kind="group-norm", epsilon=0.5)
    assert result.tolist() == pytest.approx([1 / (math.sqrt(2) + 0.5), -1 / (math.sqrt(2) + 0.5)])


def test_other_kinds(algo):
    assert algo.advantage.advantages([1, 0, 0, 0], kind="group-mean").tolist() == [0.75, -0.25, -0.25, -0.25]
    result = algo.advantage.advantages([1, 0, 0, 0], kind="leave-one-out")
    assert result.tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    with pytest.raises(ValueError, match="group-norm"):
        algo.advantage.advantages([1, 0], kind="gae")


def test_group_of_one(algo):
    """Entry 18."""
    for kind in KINDS:
        assert algo.advantage.advantages([1.0], kind=kind).tolist() == [0.0]
        assert algo.advantage.advantages([], kind=kind).tolist() == []


def test_flat_group_in_float32(algo):
    """Entry 19: seven rewards of 0.35 have a standard deviation that is not 0."""
    for kind in KINDS:
        for epsilon in (1e-6, 0.0):
            for value in (0.35, 0.0, -1.0):
                flat = torch.full((7,), value, dtype=torch.float32)
                assert algo.advantage.advantages(flat, kind=kind, epsilon=epsilon).tolist() == [0.0] * 7


def test_flat_up_to_rounding(algo):
    """Entry 19: 0.1 + 0.2 against 0.3, and neighbours in float32."""
    neighbours = torch.tensor([0.35, math.nextafter(0.35, 1)]).float()
    neighbours[1] = torch.nextafter(neighbours[0], torch.tensor(1.0))
    for kind in KINDS:
        assert algo.advantage.advantages([0.1 + 0.2, 0.3, 0.3], kind=kind, epsilon=0).tolist() == [0, 0, 0]
        assert algo.advantage.advantages(neighbours, kind=kind, epsilon=0).tolist() == [0, 0]


def test_small_but_real_differences_are_not_flat(algo):
    result = algo.advantage.advantages([1.0, 1.001], kind="group-norm", epsilon=0)
    assert result.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_leave_one_out_stays_of_order_one(algo):
    """Entry 19."""
    values = torch.tensor([0.35] * 7 + [0.95], dtype=torch.float32)
    result = algo.advantage.advantages(values, kind="leave-one-out").tolist()
    assert result == pytest.approx([-0.6 / 7] * 7 + [0.6], abs=1e-6)


def test_not_finite_is_refused(algo):
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            algo.advantage.advantages([1, wrong], kind="group-norm")


@properties
@given(st.sampled_from(KINDS), st.floats(-1e6, 1e6), st.integers(1, 40), st.sampled_from([0.0, 1e-6]))
def test_flat_groups_give_exactly_zero(algo, kind, value, n, epsilon):
    for dtype in (torch.float32, torch.float64):
        result = algo.advantage.advantages(torch.full((n,), value, dtype=dtype), kind=kind, epsilon=epsilon)
        assert result.tolist() == [0.0] * n


@properties
@given(st.lists(rewards, min_size=2, max_size=16), st.randoms(use_true_random=False))
def test_against_the_statistics_module(algo, values, rng):
    """Centred, equal to a textbook implementation, and the same whatever the order of the samples."""
    if len(set(values)) == 1:
        return
    mean, n = statistics.fmean(values), len(values)
    right = {
        "group-norm": [(v - mean) / (statistics.stdev(values) + 1e-6) for v in values],
        "group-mean": [v - mean for v in values],
        "leave-one-out": [v - (sum(values) - v) / (n - 1) for v in values],
    }
    order = rng.sample(range(n), n)
    for kind in KINDS:
        result = algo.advantage.advantages(values, kind=kind, epsilon=1e-6).tolist()
        assert result == pytest.approx(right[kind], rel=1e-6, abs=1e-7 * max(1.0, *map(abs, right[kind])))
        assert sum(result) == pytest.approx(0, abs=1e-6)
        moved = algo.advantage.advantages([values[i] for i in order], kind=kind, epsilon=1e-6).tolist()
        assert moved == pytest.approx([result[i] for i in order], abs=1e-9)


def advantage_of(algo, group, **options):
    return [s.advantage for s in algo.advantage.with_advantages(group, kind="group-norm", **options).samples]


def test_groups_by_draw_not_by_position(algo):
    """Entries 20 and 74: equal prompts p, p with rewards 1, 1 and 0, 0 are two flat groups; uneven ones 4, 3, 4."""
    for values in ([1.0, 1.0], [0.0, 0.0]):
        assert advantage_of(algo, with_shaped(make_group(values))) == [0, 0]
    groups = [make_group(values) for values in ([1, 2, 3, 4], [5, 5, 5], [0, 0, 1, 0])]
    assert advantage_of(algo, with_shaped(groups[1])) == [0, 0, 0]


def test_statistics_before_filtering(algo):
    """Entry 21: the truncated sample has left the loss and still counts in mean and deviation."""
    group = algo.shaping.shape_rewards(
        make_group([1, -1, -1, -1], truncated=(3,)),
        max_response_length=100,
        soft=False,
        buffer_len=0,
        penalty_factor=0,
        hard=False,
        filter_truncated=True,
    )
    result = algo.advantage.with_advantages(group, kind="group-norm", epsilon=1e-6)
    assert [s.advantage for s in result.samples] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert [s.in_loss for s in result.samples] == [True, True, True, False]


def test_failed_scores_do_not_count(algo):
    """Entry 60: statistics over the samples left."""
    group = with_shaped(make_group([1, None, -1, -1, None, -1]))
    result = algo.advantage.with_advantages(group, kind="group-norm", epsilon=0)
    assert [s.advantage for s in result.samples] == pytest.approx([1.5, 0, -0.5, -0.5, 0, -0.5])
    assert [s.in_loss for s in result.samples] == [True, False, True, True, False, True]


def test_one_score_left(algo):
    """Entry 18."""
    assert advantage_of(algo, with_shaped(make_group([None, 1, None]))) == [0, 0, 0]


def test_shaped_reward_is_what_counts(algo):
    group = with_shaped(make_group([1, 1]), [1.0, 0.5])
    assert advantage_of(algo, group, epsilon=0) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


def test_unshaped_group_is_refused(algo):
    with pytest.raises(ValueError, match="finite"):
        algo.advantage.with_advantages(make_group([1, -1]), kind="group-norm")
