"""Losses over preferences and labels: worked values, the pairs of a ranking, and what is told of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from dapo.algorithm.objective import TokenInputs
from dapo.algorithm.preference import (
    LabelledTokens,
    OnlineDPO,
    PairObjective,
    RankedTokens,
    ScoreObjective,
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    outcome_loss,
    outcome_objective,
    simpo_loss,
)


def one(value):
    return torch.tensor([value], dtype=torch.float64, requires_grad=True)


def ranked(lengths, ranks, groups=None, **fields):
    """Inputs of responses of these lengths; one group unless ``groups`` says otherwise."""
    groups = groups or [0] * len(lengths)
    spread = {
        "sample_ids": list(range(len(lengths))),
        "group_ids": groups,
        "ranks": ranks,
        "weights": [1.0] * len(lengths),
        "margins": [0.0] * len(lengths),
        "reference": [0.0] * len(lengths),
        "nll": [0.0] * len(lengths),
    } | fields
    counts = torch.tensor(lengths)
    return RankedTokens(**{k: torch.tensor(v).repeat_interleave(counts, 0) for k, v in spread.items()})


@pytest.mark.parametrize(
    ("found", "loss", "slope"),
    [
        (lambda x: dpo_loss(0.1 * (x - (-1.0))), 0.554355, -0.1 / (1 + math.exp(0.3))),  # differences 2 and -1
        (lambda x: dpo_loss(0.1 * (x + 1.0), 0.1), 0.9 * 0.554355 + 0.1 * 0.854355, None),
        (lambda x: ipo_loss(x + 1.0, 0.1), 4.0, 2 * (3 - 5)),
        (lambda x: simpo_loss(x - 1.0, 2.0, 0.5), math.log1p(math.exp(-1.5)), -2 / (1 + math.exp(1.5))),
        (lambda x: bradley_terry_loss(x - 1.0, torch.zeros(1), 0.0, 0.01), 0.323262, None),
        (lambda x: bradley_terry_loss(x - 1.0, torch.zeros(1), 0.5), math.log1p(math.exp(-0.5)), None),
        (lambda x: outcome_loss(x - 2.0, torch.ones(1, dtype=torch.float64)), math.log(2), -0.5),
    ],
)
def test_worked_values(found, loss, slope):
    x = one(2.0)
    value = found(x)
    value.sum().backward()
    assert value.item() == pytest.approx(loss, abs=1e-6)
    if slope is not None:
        assert x.grad.item() == pytest.approx(slope, abs=1e-6)


def test_the_objective_over_tokens_is_the_worked_value():
    inputs = ranked([2, 1], [0.0, 1.0], reference=[-2.0, -1.0])
    logprobs = torch.tensor([0.5, -0.5, -2.0], requires_grad=True)  # differences 2 and -1
    loss, told = PairObjective(beta=0.1)(logprobs, torch.zeros(3), inputs)
    loss.backward()
    slope = 0.1 / (1 + math.exp(0.3))
    assert loss.item() == pytest.approx(0.554355, abs=1e-6)
    assert logprobs.grad.tolist() == pytest.approx([-slope, -slope, slope], abs=1e-6)
    means = {name: (total / count).item() for name, (total, count) in told.items()}
    assert means == pytest.approx(
        {
            "preference/accuracy": 1.0,
            "preference/margin": 0.3,
            "preference/chosen": 0.2,
            "preference/rejected": -0.1,
            "preference/chosen_logprob": 0.0,
            "preference/rejected_logprob": -2.0,
        },
        abs=1e-6,
    )


def test_ipo_and_simpo_average_over_tokens_and_simpo_has_no_reference():
    inputs = ranked([4, 2], [0.0, 1.0], reference=[-1.0, -1.0])
    logprobs = torch.tensor([0.5, 0.5, 0.0, 0.0, -1.0, 0.0])  # sums 1 and -1
    ipo, _ = PairObjective("ipo", beta=0.25)(logprobs, torch.zeros(6), inputs)
    assert ipo.item() == pytest.approx(((1 + 1) / 4 - (-1 + 1) / 2 - 2) ** 2)
    simpo, _ = PairObjective("simpo", beta=2.0, gamma=0.5)(logprobs, torch.zeros(6), inputs)
    assert simpo.item() == pytest.approx(math.log1p(math.exp(-(2 * (0.25 + 0.5) - 0.5))))


def test_the_nll_term_is_of_the_best_responses_alone():
    inputs = ranked([2, 1], [0.0, 1.0], nll=[0.25, 0.0])
    logprobs = torch.tensor([-1.0, -3.0, -2.0])
    without, _ = PairObjective()(logprobs, torch.zeros(3), ranked([2, 1], [0.0, 1.0]))
    with_it, _ = PairObjective()(logprobs, torch.zeros(3), inputs)
    assert (with_it - without).item() == pytest.approx(0.25 * 4, abs=1e-6)


def test_a_ranking_is_all_of_its_pairs_but_for_ties():
    scores = torch.tensor([3.0, 1.0, 1.0, 0.5])  # one token each
    inputs = ranked([1] * 4, [0.0, 1.0, 1.0, 3.0], weights=[0.2] * 4)
    loss, told = ScoreObjective()(scores, torch.zeros(4), inputs)
    pairs = [(3.0, 1.0), (3.0, 1.0), (3.0, 0.5), (1.0, 0.5), (1.0, 0.5)]
    assert loss.item() == pytest.approx(sum(0.2 * math.log1p(math.exp(b - a)) for a, b in pairs), abs=1e-6)
    assert told["preference/margin"][1].item() == 5


def test_responses_of_different_groups_are_no_pair():
    inputs = ranked([1] * 4, [0.0, 1.0, 0.0, 1.0], groups=[0, 0, 1, 1])
    _, told = ScoreObjective()(torch.tensor([1.0, 0.0, -5.0, 5.0]), torch.zeros(4), inputs)
    assert told["preference/accuracy"] == (1.0, 2.0)


def test_a_score_is_read_at_the_last_token_and_nowhere_else():
    inputs = ranked([3, 2], [0.0, 1.0], margins=[0.5, 0.5])
    scores = torch.tensor([9.0, math.nan, 1.0, -9.0, 0.0], requires_grad=True)
    loss, _ = ScoreObjective(0.01)(scores, torch.zeros(5), inputs)
    loss.backward()
    assert loss.item() == pytest.approx(math.log1p(math.exp(-0.5)) + 0.01)
    assert scores.grad[[0, 1, 3]].tolist() == [0.0, 0.0, 0.0]


def test_online_the_samples_of_a_group_are_ranked_by_their_advantage():
    """As the pairs of a ranking; what is masked is in no pair, and a group without pairs counts nothing."""
    lengths, advantages, groups = [2, 1, 3, 1, 2, 1], [1.0, -1.0, 1.0, 5.0, 0.0, 0.0], [0, 0, 0, 0, 1, 1]
    counts, rng = torch.tensor(lengths), torch.Generator().manual_seed(0)
    logprobs, reference = (torch.randn(10, generator=rng).requires_grad_() for _ in range(2))
    spread = {"advantages": advantages, "sample_ids": list(range(6)), "group_ids": groups, "mask": [True] * 6}
    spread["mask"][3] = False
    tokens = {name: torch.tensor(values).repeat_interleave(counts) for name, values in spread.items()}
    weights = torch.full((10,), 0.5) / torch.tensor([7.0] * 7 + [3.0] * 3)
    some = dict.fromkeys(("behaviour_logprobs", "proximal_logprobs", "importance"), torch.zeros(10))
    given = TokenInputs(**tokens, **some, weights=weights, reference_logprobs=reference.detach())
    loss, told = OnlineDPO()(logprobs, torch.zeros(10), given)
    gains = [
        (new - old).sum() for new, old in zip(logprobs.split(lengths), reference.detach().split(lengths), strict=True)
    ]
    weight = weights[:7][given.mask[:7]].sum() / 2
    expected = weight * (dpo_loss(0.1 * (gains[0] - gains[1])) + dpo_loss(0.1 * (gains[2] - gains[1])))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, logprobs, retain_graph=True)[0] for x in (loss, expected)))
    assert told["accuracy"][1] == 2
    with pytest.raises(ValueError, match=r"algorithm\.kl\.mode=measure"):
        OnlineDPO()(logprobs, torch.zeros(10), dataclasses.replace(given, reference_logprobs=None))


@pytest.mark.parametrize("ahead", [0.0, 1e-6, -1e-6])
def test_a_tie_is_half_right(ahead):
    """Up to rounding: the same text has another last bit elsewhere in a batch."""
    inputs = ranked([1, 1], [0.0, 1.0])
    told = ScoreObjective()(torch.tensor([ahead, 0.0]), torch.zeros(2), inputs)[1]
    assert told["preference/accuracy"][0] == 0.5


def test_an_outcome_counts_where_it_has_a_weight():
    inputs = LabelledTokens(weights=torch.tensor([0.0, 0.5, 0.0, 0.5]), labels=torch.tensor([1.0, 1.0, 0.0, 0.0]))
    loss, told = outcome_objective(torch.tensor([7.0, 2.0, 7.0, 1.0]), torch.zeros(4), inputs)
    assert loss.item() == pytest.approx(0.5 * math.log1p(math.exp(-2)) + 0.5 * math.log1p(math.exp(1)))
    assert told["preference/accuracy"] == (1.0, 2.0)
