"""avg@k, pass@j, maj@j and their intervals: values by hand, every subset counted one by one, and properties."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.evaluation.statistics import (
    LARGEST_EXACT_VOTE,
    Estimate,
    Votes,
    budgets,
    count_votes,
    estimate_means,
    estimate_ratio,
    majority_at,
    pass_at,
)

# R is right, a letter an answer, None no answer
SAMPLES = st.lists(st.sampled_from(["R", "R", "a", "b", "c", None]), min_size=1, max_size=8)


def votes_of(samples: list[str | None]) -> Votes:
    return count_votes([s == "R" for s in samples], samples)


def pass_of(n: int, c: int, j: int) -> float:
    return float(pass_at(np.array([n]), np.array([c]), j)[0])


def won(subset: tuple[str | None, ...]) -> Fraction:
    """A vote by its definition: who among the most frequent ones is taken is drawn by lot."""
    counts = Counter(s for s in subset if s is not None)
    leaders = [s for s, count in counts.items() if count == max(counts.values())]
    return Fraction(int("R" in leaders), max(len(leaders), 1))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (32, [1, 2, 4, 8, 16, 32]), (5, [1, 2, 4, 5])],
)
def test_budgets_are_powers_of_two_and_k(samples: int, expected: list[int]) -> None:
    assert budgets(samples) == expected


def test_pass_by_hand() -> None:
    """1 right of 4: two draws miss it in 3 of 6 pairs. 2 right of 5: three draws are all wrong in 1 of 10 triples."""
    assert pass_of(4, 1, 2) == 0.5
    assert pass_of(5, 2, 3) == pytest.approx(0.9)
    assert pass_of(4, 0, 4) == 0.0 and pass_of(4, 4, 1) == 1.0
    assert pass_of(4, 1, 4) == 1.0


def test_pass_does_not_overflow() -> None:
    """The binomials have 1,500 digits; the chance that 2,500 of 5,000 samples miss the only right one is one half."""
    assert pass_of(5000, 1, 2500) == pytest.approx(0.5, rel=1e-12)
    assert pass_of(5000, 1, 1) == pytest.approx(1 / 5000, rel=1e-9)


@given(st.integers(1, 40), st.data())
def test_pass_is_the_formula(n: int, data: st.DataObject) -> None:
    c, j = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert pass_of(n, c, j) == pytest.approx(float(1 - Fraction(math.comb(n - c, j), math.comb(n, j))), abs=1e-12)
    assert pass_of(n, c, 1) == pytest.approx(c / n)
    assert pass_of(n, c, j) >= pass_of(n, c, max(j - 1, 1))


def test_fewer_verdicts_than_asked_for_are_taken_as_they_are() -> None:
    """3 verdicts, 1 right: pass@8 is pass@3, a lower bound, and the prompt stays in."""
    assert pass_of(3, 1, 8) == 1.0 and pass_of(3, 0, 8) == 0.0
    assert majority_at(Votes(3, 1, (1,)), 8) == majority_at(Votes(3, 1, (1,)), 3) == 0.5
    both = pass_at(np.array([3, 8]), np.array([0, 1]), 4)
    assert both.tolist() == pytest.approx([0.0, 0.5])


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ("RRa", 1.0),
        ("Raa", 0.0),
        ("Raab", 0.0),
        ("Rab", 1 / 3),  # three classes of one: by lot
        ("RRaab", 1 / 2),
        ("RRaabb", 1 / 3),
        ("aab", 0.0),
    ],
)
def test_a_vote_by_hand(samples: str, expected: float) -> None:
    assert majority_at(votes_of(list(samples)), len(samples)) == pytest.approx(expected)


def test_samples_without_an_answer_do_not_vote() -> None:
    assert majority_at(votes_of(["R", None, None, None]), 4) == 1.0
    assert majority_at(votes_of([None, None]), 2) == 0.0
    # a pair from one right and three silent ones holds the right one in 3 of 6 cases, and then it wins
    assert majority_at(votes_of(["R", None, None, None]), 2) == pytest.approx(0.5)


def test_right_samples_are_one_class() -> None:
    """However each of them is written."""
    assert majority_at(count_votes([True, True, False, False], ["1/2", "0.5", "2", "3"]), 4) == 1.0


def test_a_vote_of_some_samples_by_hand() -> None:
    """R R a: of the three pairs, RR wins and the two Ra are a draw of lots: (1 + 1/2 + 1/2) / 3."""
    assert majority_at(votes_of(["R", "R", "a"]), 2) == pytest.approx(2 / 3)


@given(SAMPLES, st.data())
def test_votes_are_the_mean_over_all_subsets(samples: list[str | None], data: st.DataObject) -> None:
    j = data.draw(st.integers(1, len(samples)))
    subsets = list(itertools.combinations(samples, j))
    expected = sum(map(won, subsets), Fraction(0)) / len(subsets)
    assert majority_at(votes_of(samples), j) == pytest.approx(float(expected), abs=1e-12)
    passed = Fraction(sum("R" in subset for subset in subsets), len(subsets))
    assert pass_of(len(samples), samples.count("R"), j) == pytest.approx(float(passed), abs=1e-12)


@given(SAMPLES, st.randoms())
def test_the_order_of_samples_does_not_matter(samples: list[str | None], random: object) -> None:
    shuffled = list(samples)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert votes_of(shuffled) == votes_of(samples)


@given(SAMPLES, st.integers(1, 8))
def test_a_vote_is_never_better_than_a_pass(samples: list[str | None], j: int) -> None:
    majority = majority_at(votes_of(samples), j)
    assert majority is not None
    assert -1e-12 <= majority <= pass_of(len(samples), samples.count("R"), j) + 1e-12
    assert majority_at(votes_of(samples), 1) == pytest.approx(samples.count("R") / len(samples))


def test_votes_too_many_to_count_are_left_out_but_for_all_of_them() -> None:
    n = LARGEST_EXACT_VOTE + 2
    assert majority_at(Votes(n, n // 2, (n // 2,)), 4) is None
    assert majority_at(Votes(n, n // 2, (n // 2,)), n) == 0.5
    most = LARGEST_EXACT_VOTE  # two classes of the same size: each wins as often
    assert majority_at(Votes(most, most // 2, (most // 2,)), 4) == pytest.approx(0.5)


# --- intervals ----------------------------------------------------------------------------------------------------


def test_an_interval_by_hand() -> None:
    """Prompts of value 0 and 1: a resample's mean is 0, 1/2 or 1 with chance 1/4, 1/2, 1/4."""
    (estimate,) = estimate_means(np.array([[0.0], [1.0]]), [False])
    assert (estimate.value, estimate.low, estimate.high) == (0.5, 0.0, 1.0)


def test_an_interval_is_as_wide_as_the_normal_one() -> None:
    """1,000 prompts, half of them right: 1/2 +- 1.96 sqrt(1/4 / 1000)."""
    (estimate,) = estimate_means(np.repeat([[0.0], [1.0]], 500, axis=0), [False], resamples=4000)
    assert estimate.low == pytest.approx(0.5 - 0.031, abs=0.003)
    assert estimate.high == pytest.approx(0.5 + 0.031, abs=0.003)


@pytest.mark.parametrize("share", [False, True], ids=["bootstrap", "Wilson"])
def test_95_percent_of_intervals_hold_the_truth(share: bool) -> None:
    """Of 300 samples of 100 prompts with a true mean of 0.3; a binomial of 300 x 0.95 stays within 4 deviations."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(300):
        (estimate,) = estimate_means((rng.random((100, 1)) < 0.3).astype(float), [share], resamples=400)
        assert estimate.low is not None and estimate.high is not None
        held += estimate.low <= 0.3 <= estimate.high
    assert 0.95 * 300 - 4 * math.sqrt(300 * 0.95 * 0.05) <= held <= 300


@pytest.mark.parametrize(
    ("right", "rows", "low", "high"),
    [
        # with z = 1.96: z^2 / (n + z^2) = 3.8415 / 13.8415
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        # 1/2 -+ 1.96 sqrt(1/40 + 3.8415/400) / 1.38415 = 1/2 -+ 1.96 x 0.18602 / 1.38415
        (5, 10, 0.2366, 0.7634),
        (0, 50, 0.0, 0.0713),
        (1000, 1000, 0.99617, 1.0),
    ],
)
def test_rows_that_are_right_or_wrong_have_wilsons_interval(right: int, rows: int, low: float, high: float) -> None:
    (estimate,) = estimate_means(np.array([[1.0]] * right + [[0.0]] * (rows - right)), [True])
    assert estimate.value == right / rows
    assert (estimate.low, estimate.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    assert (estimate.low == 0.0, estimate.high == 1.0) == (right == 0, right == rows), "without a rounding error"


def test_rows_that_are_partly_right_are_resampled_unless_all_are_the_same() -> None:
    """Ten rows with half of their samples right say as much as ten samples would; rows of 1/4 and 3/4 are resampled."""
    same, apart = np.full((10, 1), 0.5), np.repeat([[0.25], [0.75]], 200, axis=0)
    (estimate,) = estimate_means(same, [True])
    assert (estimate.value, estimate.low, estimate.high) == (
        0.5,
        pytest.approx(0.2366, abs=1e-4),
        pytest.approx(0.7634, abs=1e-4),
    )
    (estimate,) = estimate_means(apart, [True], resamples=4000)  # 1/2 -+ 1.96 x 1/4 / sqrt(400)
    assert (estimate.low, estimate.high) == (pytest.approx(0.4755, abs=0.002), pytest.approx(0.5245, abs=0.002))


def test_another_right_answer_does_not_lower_the_upper_bound() -> None:
    """50 rows of 8 samples: none right is 0 to 7.1%, with a trial for each row; one in another row is no less."""
    lows, highs = [], []
    for right in (0, 1, 2, 4, 8, 16, 32, 50):
        shares = np.zeros((50, 1))
        shares[:right] = 1 / 8
        (few,), (most,) = estimate_means(shares, [True]), estimate_means(1 - shares, [True])
        assert few.low is not None and few.high is not None and most.low is not None and most.high is not None
        assert (most.low, most.high) == (pytest.approx(1 - few.high), pytest.approx(1 - few.low))
        lows.append(few.low)
        highs.append(few.high)
    assert highs[0] == pytest.approx(0.0713, abs=1e-4)
    assert lows == sorted(lows) and highs == sorted(highs) and len(set(highs)) == len(highs)


def test_rewards_that_are_all_the_same_have_no_interval() -> None:
    (estimate,) = estimate_means(np.full((10, 1), -1.0), [False])
    assert (estimate.value, estimate.low, estimate.high) == (-1.0, None, None)


def test_one_prompt_has_no_interval() -> None:
    (estimate,) = estimate_means(np.array([[0.25]]), [True])
    assert (estimate.value, estimate.low, estimate.high) == (0.25, None, None)


def test_resampling_in_pieces_draws_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two resamples at once: the pieces must not repeat each other."""
    monkeypatch.setattr("dapo.evaluation.statistics._CHUNK", 200)
    values = np.repeat([[0.0], [1.0]], 50, axis=0)
    (estimate,) = estimate_means(values, [False], resamples=2000)
    assert estimate.low == pytest.approx(0.4, abs=0.02) and estimate.high == pytest.approx(0.6, abs=0.02)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(-5, 5)), min_size=2, max_size=30))
def test_an_interval_holds_its_estimate(rows: list[tuple[float, float]]) -> None:
    values = np.array(rows)
    share, value = estimates = estimate_means(values, [True, False], resamples=200)
    assert share.low is not None and share.high is not None
    assert 0 <= share.low <= share.value <= share.high <= 1 and share.low < share.high
    if np.ptp(values[:, 1]):
        assert value.low is not None and value.high is not None
        lowest, highest = values[:, 1].min(), values[:, 1].max()
        assert lowest - 1e-9 <= value.low <= value.value <= value.high <= highest + 1e-9
    assert estimate_means(values, [True, False], resamples=200) == estimates


def test_a_ratio_of_sums_is_bootstrapped_over_prompts() -> None:
    found = estimate_ratio(np.array([1.0, 0.0, 2.0]), np.array([2.0, 1.0, 2.0]))
    assert (found.value, found.low, found.high) == (
        0.6,
        0.0,
        1.0,
    )  # one in 27 draws is three times the second, or third
    without = estimate_ratio(
        np.array([0.0, 1.0]), np.array([0.0, 1.0])
    )  # draws of the first prompt alone have no ratio
    assert (without.value, without.low, without.high) == (1.0, 1.0, 1.0)
    assert np.isnan(estimate_ratio(np.ones(2), np.zeros(2)).value)
    assert Estimate(0.5, 0.25, 0.75).text(".1%") == "50.0% (25.0% to 75.0%)" and Estimate(1.0).text("+.1f") == "+1.0"
