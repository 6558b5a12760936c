"""Random order without memory: permutations that can be entered anywhere, and choices by weight."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.data.order import Choice, Permutation


@settings(deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32))
def test_a_permutation_holds_every_number_once_and_can_be_inverted(size, seed):
    found = Permutation(size, seed)
    numbers = [found[k] for k in range(size)]
    assert sorted(numbers) == list(range(size))
    assert [found.place_of(number) for number in numbers[:50]] == list(range(size))[:50]
    assert len(found) == size
    with pytest.raises(IndexError):
        found[size]


def test_the_order_is_the_same_everywhere_and_for_ever():
    """Worked out once; a change would send every resumed run to other rows."""
    assert [Permutation(10, 1, "rows", 0, 0)[k] for k in range(10)] == [3, 1, 5, 6, 9, 4, 7, 8, 2, 0]
    assert [Permutation(10_000_000, 1)[k] for k in range(3)] == [318208, 4123885, 8905751]


@pytest.mark.parametrize(("size", "limit"), [(3, 24), (5, 46), (6, 60), (12, 185)])
def test_every_number_lands_at_every_place(size, limit):
    """Chi-square with (size - 1)^2 degrees of freedom; chance exceeds the limit once in 10,000 times."""
    tables = [Counter() for _ in range(size)]
    trials = 1500
    for seed in range(trials):
        found = Permutation(size, seed)
        for place in range(size):
            tables[place][found[place]] += 1
    expected = trials / size
    assert sum((table[k] - expected) ** 2 / expected for table in tables for k in range(size)) < limit


def test_neighbours_do_not_stay_neighbours():
    found = Permutation(100_000, 3)
    close = sum(abs(found[k] - found[k + 1]) <= 100 for k in range(20_000))
    assert close < 20_000 * 0.002 * 1.6  # 0.2 % by chance


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(0, 1000))
def test_choices_follow_the_weights(weights, seed):
    choice = Choice(weights, seed)
    found = Counter(choice[k] for k in range(2000))
    for k, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(found[k] / 2000 - share) < 5 * (share * (1 - share) / 2000) ** 0.5 + 1e-3
    assert choice[7] == Choice(weights, seed)[7]


@pytest.mark.parametrize(("word", "chosen"), [(0, 1), (2**64 - 1, 3)])
def test_what_has_no_weight_is_never_chosen(monkeypatch, word, chosen):
    """The lowest point is the border of the first one, and the highest, 2**64 - 1 over 2**64, is 1.0 as a float."""
    monkeypatch.setattr("dapo.data.order._word", lambda *seed: word)
    assert Choice([0.0, 0.1, 0.2, 0.3, 0.0], 5)[0] == chosen
