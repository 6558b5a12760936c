"""Sampling: the right distribution, the right log-probabilities, and nothing shared between rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.rollout.engine import Sampling
from dapo.rollout.native import sampler
from dapo.rollout.native.runner import Variant
from dapo.rollout.native.sampler import RowSettings, thresholds, top_logprobs, uniforms
from dapo.rollout.seeds import sample_seed

PLAIN = Sampling(temperature=1.0, max_tokens=1)


def sample(logits: torch.Tensor, uniform: torch.Tensor, rows: list[Sampling]) -> tuple[torch.Tensor, torch.Tensor]:
    return sampler.sample(logits, uniform, RowSettings.of(rows), truncate=Variant.of(rows).truncate)


def _draw(logits: list[float], settings: Sampling, count: int, seed: int = 0) -> torch.Tensor:
    rows = torch.tensor([logits]).repeat(count, 1)
    return sample(rows, uniforms(seed, count), [settings] * count)[0]


def test_worked_value_of_the_temperature() -> None:
    """Failures 12: logits [2, 0] at temperature 0.5, token 0: -0.01815, not -0.12693."""
    _, logprob = sample(torch.tensor([[2.0, 0.0]]), torch.tensor([0.0], dtype=torch.float64), [Sampling(0.5, 1)])
    assert float(logprob[0]) == pytest.approx(-0.01815, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_pass_a_chi_square_test(temperature: float) -> None:
    """40,000 draws over 6 tokens; the 99.9% point of chi-square with 5 degrees of freedom is 20.5."""
    logits, count = [0.0, 1.0, -1.0, 2.0, 0.5, -3.0], 40_000
    expected = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, 0) * count
    found = torch.bincount(_draw(logits, Sampling(temperature, 1), count), minlength=6)
    assert float(((found - expected) ** 2 / expected).sum()) < 20.5


def test_frequencies_of_uniforms_from_many_seeds() -> None:
    """One number from each of 20,000 samples' seeds: 20 bins; 99.9% point for 19 degrees of freedom is 43.8."""
    numbers = [float(uniforms(sample_seed(7, row, row, i), 1)) for row in range(5000) for i in range(4)]
    found, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert float(((found - 1000) ** 2 / 1000).sum()) < 43.8


def test_seeds_differ_in_every_argument() -> None:
    seeds = {sample_seed(*args) for args in [(1, 2, 3, 4), (2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5)]}
    assert len(seeds) == 5
    assert sample_seed(0, 1, 0, 0) != sample_seed(1, 0, 0, 0)  # a sum would confuse these


def test_greedy_takes_the_largest_logit_and_reports_temperature_one() -> None:
    token, logprob = sample(
        torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([0.99], dtype=torch.float64), [Sampling(0, 1)]
    )
    assert token.tolist() == [1]
    assert float(logprob[0]) == pytest.approx(3 - math.log(1 + math.exp(3) + math.exp(1)), abs=1e-5)


def test_a_token_of_probability_zero_is_never_drawn_even_at_the_borders() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).repeat(4, 1)
    uniform = torch.tensor([0.0, 0.5, np.nextafter(1.0, 0.0), 0.4999999], dtype=torch.float64)
    tokens, logprobs = sample(logits, uniform, [PLAIN] * 4)
    assert tokens.tolist() == [1, 3, 3, 1]
    assert torch.allclose(logprobs, torch.full((4,), math.log(0.5)))


def test_top_k_and_top_p_keep_what_they_should_and_renormalise() -> None:
    """Probabilities 0.5, 0.3, 0.15, 0.05."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert set(_draw(logits, Sampling(1.0, 1, top_k=2), 2000).tolist()) == {0, 1}
    assert set(_draw(logits, Sampling(1.0, 1, top_p=0.7), 2000).tolist()) == {0, 1}
    assert set(_draw(logits, Sampling(1.0, 1, top_p=0.81), 2000).tolist()) == {0, 1, 2}
    assert set(_draw(logits, Sampling(1.0, 1, top_p=0.01), 200).tolist()) == {0}
    _, logprob = sample(torch.tensor([logits]), torch.tensor([0.1], dtype=torch.float64), [Sampling(1.0, 1, top_k=2)])
    assert float(logprob[0]) == pytest.approx(math.log(0.5 / 0.8), abs=1e-5)


def kept_by_the_definition(logits: list[float], row: Sampling) -> set[int]:
    """Token by token, in Python's own numbers."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = {i for i in order if not row.top_k or logits[i] >= logits[order[min(row.top_k, len(order)) - 1]]}
    weights = {i: math.exp(logits[i] - logits[order[0]]) for i in order if i in kept}
    if row.top_p < 1:
        mass = 0.0
        for last in (i for i in order if i in kept):
            mass += weights[last] / sum(weights.values())
            if mass >= row.top_p:
                break
        kept = {i for i in kept if logits[i] >= logits[last]}
    return {i for i in kept if weights[i] >= row.min_p * max(weights.values())}


@settings(max_examples=400, deadline=None)
@given(
    # few distinct values, so that there are ties; of them no sum of probabilities is a round number
    logits=st.lists(st.sampled_from([-3.1, -1.7, 0.0, 0.3, 0.9, 1.1, 2.3]), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.013, 0.31, 0.57, 0.83, 0.977]),
    min_p=st.sampled_from([0.0, 0.012, 0.17, 0.43, 0.91]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_what_stays_is_what_the_definition_says(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    row = Sampling(temperature, 1, top_p=top_p, top_k=top_k, min_p=min_p)
    scaled = torch.tensor([logits, logits]) / temperature
    limits = thresholds(scaled, RowSettings.of([row, PLAIN]))
    kept = set((scaled[0] >= limits[0]).nonzero()[:, 0].tolist())
    assert kept == kept_by_the_definition([x / temperature for x in logits], row)
    assert float(limits[1]) == -math.inf
    count = 40
    tokens, logprobs = sample(torch.tensor([logits]).repeat(count, 1), uniforms(0, count), [row] * count)
    assert set(tokens.tolist()) <= kept
    inside = {i: math.exp(logits[i] / temperature) for i in kept}
    expected = [math.log(inside[token] / sum(inside.values())) for token in tokens.tolist()]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-5)


def test_truncation_by_hand() -> None:
    """Probabilities 0.4, 0.2, 0.2, 0.1, 0.1. A tie with the last one stays; top-p counts of what top-k leaves."""

    def kept(**row: float) -> int:
        logits = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]]).log()
        return int((logits >= thresholds(logits, RowSettings.of([Sampling(1.0, 1, **row)]))).sum())

    assert kept(top_k=1) == 1 and kept(top_k=2) == 3 and kept(top_k=4) == 5 and kept(top_k=99) == 5
    assert kept(top_p=0.39) == 1 and kept(top_p=0.41) == 3 and kept(top_p=0.81) == 5
    assert kept(top_p=0.49) == 3 and kept(top_p=0.49, top_k=2) == 1  # 0.4 of 0.8 is half
    assert kept(min_p=0.51) == 1 and kept(min_p=0.49) == 3 and kept(min_p=0.26) == 3 and kept(min_p=0.24) == 5
    assert kept(min_p=0.24, top_p=0.41) == 3 and kept(min_p=0.999, top_k=5) == 1


def test_the_most_likely_tokens_are_those_before_truncation() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.1, 0.3], [0.1, 0.5, 0.1, 0.3], [0.25, 0.25, 0.25, 0.25]]).log()
    rows = [Sampling(1.0, 1, top_k=1), Sampling(0.5, 1), Sampling(0, 1)]
    ids, logprobs = top_logprobs(logits, RowSettings.of(rows), 3)
    assert ids.tolist() == [[1, 3, 0], [1, 3, 0], [0, 1, 2]]  # of equal ones the lowest id
    assert logprobs[0].exp().tolist() == pytest.approx([0.5, 0.3, 0.1])
    assert float(logprobs[1, 0].exp()) == pytest.approx(0.25 / (0.25 + 0.09 + 0.01 + 0.01))
    assert logprobs[2].exp().tolist() == pytest.approx([0.25] * 3)


def test_a_drawn_token_has_the_log_probability_that_is_reported_among_the_likeliest() -> None:
    torch.manual_seed(0)
    logits, rows = torch.randn(20, 18), [Sampling(0.7, 1)] * 20
    ids, values = top_logprobs(logits, RowSettings.of(rows), 18)
    tokens, logprobs = sample(logits.clone(), uniforms(1, 20), rows)
    torch.testing.assert_close(values[ids == tokens[:, None]], logprobs, atol=1e-6, rtol=0)


def test_rows_with_different_settings_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 11)
    truncated = [Sampling(1.0, 1, top_k=3), Sampling(1.0, 1, top_p=0.5), Sampling(1.0, 1, min_p=0.3)]
    rows = [Sampling(0, 1), PLAIN, Sampling(0.3, 1), *truncated]
    uniform = uniforms(3, 6)
    tokens, logprobs = sample(logits.clone(), uniform, rows)
    for i, one in enumerate(rows):
        token, logprob = sample(logits[i : i + 1].clone(), uniform[i : i + 1], [one])
        assert token.tolist() == [int(tokens[i])]
        assert float(logprob[0]) == pytest.approx(float(logprobs[i]), abs=1e-6)


def test_a_large_vocabulary_is_summed_precisely() -> None:
    """A cumulative sum in float32 over 150k equal tokens is off by far more than one token at its end."""
    vocabulary = 150_000
    uniform = torch.tensor([0.25, 0.5, 0.999999], dtype=torch.float64)
    tokens, _ = sample(torch.zeros(3, vocabulary), uniform, [PLAIN] * 3)
    assert [abs(int(t) - u * vocabulary) <= 1 for t, u in zip(tokens, uniform.tolist(), strict=True)] == [True] * 3
