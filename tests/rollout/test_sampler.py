"""Sampling: the right distribution, the right log-probabilities, and nothing shared between rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dapo.rollout.engine import Sampling
from dapo.rollout.native.sampler import sample, uniforms
from dapo.rollout.seeds import sample_seed

PLAIN = Sampling(temperature=1.0, max_tokens=1)


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


def test_rows_with_different_settings_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 11)
    settings = [Sampling(0, 1), PLAIN, Sampling(0.3, 1), Sampling(1.0, 1, top_k=3), Sampling(1.0, 1, top_p=0.5)]
    uniform = uniforms(3, 5)
    tokens, logprobs = sample(logits.clone(), uniform, settings)
    for i, one in enumerate(settings):
        token, logprob = sample(logits[i : i + 1].clone(), uniform[i : i + 1], [one])
        assert token.tolist() == [int(tokens[i])]
        assert float(logprob[0]) == pytest.approx(float(logprobs[i]), abs=1e-6)


def test_a_large_vocabulary_is_summed_precisely() -> None:
    """A cumulative sum in float32 over 150k equal tokens is off by far more than one token at its end."""
    vocabulary = 150_000
    uniform = torch.tensor([0.25, 0.5, 0.999999], dtype=torch.float64)
    tokens, _ = sample(torch.zeros(3, vocabulary), uniform, [PLAIN] * 3)
    assert [abs(int(t) - u * vocabulary) <= 1 for t, u in zip(tokens, uniform.tolist(), strict=True)] == [True] * 3
