"""GAE, token rewards and the loss of a critic: the check values, and a second implementation over sequences."""

import math
import random

import pytest
import torch
from algorithm_support import properties
from hypothesis import given
from hypothesis import strategies as st


def column(values):
    return torch.tensor(values, dtype=torch.float64)


def test_check_value_of_gae(algo):
    """r = [0, 0, 1], V = 0.5, gamma 1, lambda 0.95."""
    values, lengths = column([0.5, 0.5, 0.5]), torch.tensor([3])
    after = algo.gae.bootstrapped(values, column([7.0] * 3), lengths, torch.tensor([False]))
    assert after.tolist() == [0.5, 0.5, 0.0]
    rewards = algo.gae.token_rewards(column([1.0]), lengths)
    found = algo.gae.gae(rewards, values, after, lengths, gamma=1.0, lam=0.95)
    assert found.tolist() == pytest.approx([0.45125, 0.475, 0.5])
    assert (found + values).tolist() == pytest.approx([0.95125, 0.975, 1.0])


def test_check_value_of_the_value_loss(algo):
    """V 1.0, V_old 0.2, eps 0.2, R 0.9: max(0.01, 0.25) / 2."""
    value = column([1.0]).requires_grad_()
    loss = algo.gae.value_losses(value, column([0.2]), column([0.9]), 0.2)
    assert loss.item() == pytest.approx(0.125)
    assert torch.autograd.grad(loss.sum(), value)[0].item() == 0  # held where it was
    assert algo.gae.value_losses(value, column([0.2]), column([0.9]), None).item() == pytest.approx(0.005)


def test_the_score_stands_at_the_last_token_and_the_kl_at_each(algo):
    lengths = torch.tensor([2, 0, 1])
    found = algo.gae.token_rewards(column([5.0, 9.0, -1.0]), lengths, column([0.1, -0.2, 0.3]), 0.5)
    assert found.tolist() == pytest.approx([-0.05, 5.1, -1.15])


def test_only_a_cut_response_is_worth_something_at_its_end(algo):
    """A planted cut: of two equal responses the one that the limit ended has the value behind its last token."""
    lengths, values, after = torch.tensor([2, 0, 2]), column([0.1, 0.3, 0.1, 0.3]), column([0.3, 0.7, 0.3, 0.7])
    found = algo.gae.bootstrapped(values, after, lengths, torch.tensor([False, True, True]))
    assert found.tolist() == [0.3, 0.0, 0.3, 0.7] and values.tolist() == [0.1, 0.3, 0.1, 0.3]
    rewards, values = torch.zeros(4), column([0.5] * 4)
    advantages = algo.gae.gae(rewards, values, found, lengths, gamma=0.9, lam=0.0)
    assert advantages.tolist() == pytest.approx([-0.23, -0.5, -0.23, 0.13])


def plain_gae(rewards, values, last, gamma, lam):
    """Of one response, by the sum in its definition."""
    following = [*values[1:], last][: len(values)]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


@properties
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.9, 0.5]), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_a_second_implementation_and_any_order(algo, seed, gamma, lam):
    """Response by response; and the order in which they stand changes nothing."""
    rng = random.Random(seed)
    responses = []
    for _ in range(rng.randint(1, 6)):
        n = rng.randint(0, 5)
        numbers = [[rng.gauss(0, 1) for _ in range(n)] for _ in range(3)]
        responses.append((*numbers, rng.gauss(0, 1), rng.gauss(0, 1), rng.random() < 0.5))  # kl, v, after, score, end
    expected = []
    for kl, values, _, score, last, cut in responses:
        rewards = [-0.1 * d for d in kl]
        if rewards:
            rewards[-1] += score
        expected.append(plain_gae(rewards, values, last if cut else 0.0, gamma, lam))
    order = list(range(len(responses)))
    rng.shuffle(order)
    kl, values, after = [], [], []
    for i in order:
        kl += responses[i][0]
        values += responses[i][1]
        after += [responses[i][4]] * len(responses[i][1])
    lengths = torch.tensor([len(responses[i][1]) for i in order])
    rewards = algo.gae.token_rewards(column([responses[i][3] for i in order]), lengths, column(kl), 0.1)
    cut = torch.tensor([responses[i][5] for i in order])
    following = algo.gae.bootstrapped(column(values), column(after), lengths, cut)
    found = algo.gae.gae(rewards, column(values), following, lengths, gamma=gamma, lam=lam)
    assert found.tolist() == pytest.approx([a for i in order for a in expected[i]], abs=1e-9)


def plain_value_loss(v, old, target, clip):
    """Loss and slope of one token, case by case."""
    if clip is None or abs(v - old) <= clip:
        return (v - target) ** 2 / 2, v - target
    held = old + math.copysign(clip, v - old)
    if (held - target) ** 2 > (v - target) ** 2:
        return (held - target) ** 2 / 2, 0.0
    return (v - target) ** 2 / 2, v - target


@properties
@given(st.integers(0, 10**6), st.sampled_from([0.2, 1.0, None]))
def test_loss_and_gradient_of_the_critic_in_any_cut(algo, seed, clip):
    rng = random.Random(seed)
    rows = [(rng.gauss(0, 1), rng.gauss(0, 1), rng.gauss(0, 1), rng.choice([0.0, 0.1, 0.2])) for _ in range(9)]
    v, old, target, weights = (column(list(c)) for c in zip(*rows, strict=True))
    v.requires_grad_()
    objective, total, told = algo.gae.ValueObjective(clip), 0.0, {}
    for part in (slice(0, 4), slice(4, 9)):
        inputs = algo.gae.ValueTokens(weights[part], old[part], target[part])
        loss, stats = objective(v[part], torch.zeros(9)[part], inputs)
        loss.backward()
        total += loss.item()
        for name, (amount, count) in stats.items():
            told[name] = told.get(name, 0.0) + amount.item()
            assert count == (weights[part] != 0).sum()
    plain = [plain_value_loss(a, b, c, clip) for a, b, c, _ in rows]
    kept = [row[3] > 0 for row in rows]
    assert total == pytest.approx(sum(w * p for (*_, w), (p, _) in zip(rows, plain, strict=True)), abs=1e-9)
    assert v.grad.tolist() == pytest.approx([w * s for (*_, w), (_, s) in zip(rows, plain, strict=True)], abs=1e-9)
    moved = [clip is not None and abs(a - b) > clip for a, b, *_ in rows]
    assert told["critic/clipped"] == sum(m and k for m, k in zip(moved, kept, strict=True))
    assert told["critic/loss"] == pytest.approx(sum(p for (p, _), k in zip(plain, kept, strict=True) if k))


def test_tokens_beside_the_loss_may_have_any_value(algo):
    value = torch.tensor([1.0, math.nan], requires_grad=True)
    inputs = algo.gae.ValueTokens(torch.tensor([1.0, 0.0]), torch.zeros(2), torch.zeros(2))
    loss, _ = algo.gae.ValueObjective(None)(value, torch.zeros(2), inputs)
    loss.backward()
    assert loss.item() == 0.5 and value.grad.tolist() == [1.0, 0.0]


def test_explained_variance(algo):
    returns = column([1.0, 2.0, 4.0])
    for values, expected in ((returns, 1.0), (returns + 3, 1.0), (returns * 0, 0.0), (-returns, -3.0)):
        assert algo.gae.explained_variance(values, returns) == pytest.approx(expected)
    assert math.isnan(algo.gae.explained_variance(returns, returns * 0 + 1))
