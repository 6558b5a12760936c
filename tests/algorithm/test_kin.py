"""GSPO, CISPO and the advantage of REINFORCE++: their check values, and a second implementation over sequences."""

import itertools
import math
import statistics
from dataclasses import replace

import pytest
import torch
from algorithm_support import (
    MODES,
    Token,
    column,
    inputs_of,
    make_group,
    plain_weight,
    properties,
    random_tokens,
    weights_of,
    with_shaped,
)
from hypothesis import given
from hypothesis import strategies as st

from dapo.config.algorithm import ADVANTAGES, OBJECTIVES

WIDE = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": None}
NARROW = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "clip_ratio_c": None}


def token(log_ratio, advantage, **changes):
    known = {"behaviour": -1.0, "proximal": -1.0, "reference": -1.0, "entropy": 1.0, "importance": 1.0}
    known |= {"in_loss": True, "sample": 0, "group": 0}
    return Token(**(known | {"logprob": log_ratio - 1.0, "advantage": advantage} | changes))


def run(algo, name, tokens, mode="seq-mean-token-mean", **options):
    """Loss, gradient by log-probability and statistics, as numbers."""
    objective = algo.kin.OBJECTIVES[name](**options)
    logprobs = column(tokens, "logprob").requires_grad_()
    inputs = inputs_of(algo, tokens, weights_of(algo, tokens, mode).double())
    loss, stats = objective(logprobs, column(tokens, "entropy"), inputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    told = {key: (total / count.clamp(min=1)).item() for key, (total, count) in stats.items()}
    return loss.item(), gradient.tolist(), told


def test_the_names_are_those_of_the_recipe(algo):
    assert tuple(algo.kin.OBJECTIVES) == OBJECTIVES and tuple(algo.advantage.ESTIMATORS) == ADVANTAGES


def test_gspo_check_value(algo):
    """Log-ratios [0.02, 0.04] give s = exp(0.03); inside of the clip, and outside."""
    tokens = [token(0.02, 1.0), token(0.04, 1.0)]
    loss, gradient, told = run(algo, "gspo", tokens, **WIDE)
    assert -loss == pytest.approx(1.030455, abs=1e-6)
    assert gradient == pytest.approx([-1.030455 / 2] * 2, abs=1e-6)
    loss, gradient, told = run(algo, "gspo", tokens, **NARROW)
    assert -loss == pytest.approx(1.0004) and gradient == [0.0, 0.0] and told["clip_high"] == 1
    assert run(algo, "gspo", [replace(t, advantage=-1.0) for t in tokens], **NARROW)[1][0] > 0


def test_cispo_check_value(algo):
    """r = 2, high 0.28, A = 1: a weight of 1.28 on the gradient of log pi, which is there whatever the sign of A."""
    loss, gradient, told = run(algo, "cispo", [token(math.log(2), 1.0)], **WIDE)
    assert gradient == pytest.approx([-1.28]) and loss == pytest.approx(-1.28 * (math.log(2) - 1))
    _, gradient, told = run(algo, "cispo", [token(math.log(20), -1.0)], **WIDE | {"clip_ratio_c": 10.0})
    assert gradient == pytest.approx([1.28]) and told["clip_high"] == 1 and "clip_dual" not in told
    _, gradient, told = run(algo, "cispo", [token(math.log(0.1), 1.0)], **WIDE)
    assert gradient == pytest.approx([-0.8]) and told["clip_low"] == 1


def plain_gspo(tokens, mode, low, high):
    loss, gradient = 0.0, [0.0] * len(tokens)
    for sample in {t.sample for t in tokens}:
        own = [i for i, t in enumerate(tokens) if t.sample == sample and t.in_loss]
        if not own:
            continue
        s = math.exp(sum(tokens[i].logprob - tokens[i].proximal for i in own) / len(own))
        a = tokens[own[0]].advantage
        clipped = s > 1 + high if a > 0 else s < 1 - low
        value = -min(max(s, 1 - low), 1 + high) * a if clipped else -s * a
        weight = sum(plain_weight(tokens[i], tokens, mode) * tokens[i].importance for i in own)
        loss += weight * value
        for i in own:
            gradient[i] = 0.0 if clipped else -weight * s * a / len(own)
    return loss, gradient


def plain_cispo(tokens, mode, low, high):
    loss, gradient = 0.0, []
    for t in tokens:
        clipped = min(max(math.exp(t.logprob - t.proximal), 1 - low), 1 + high)
        slope = -plain_weight(t, tokens, mode) * t.importance * clipped * t.advantage if t.in_loss else 0.0
        loss += slope * t.logprob
        gradient.append(slope)
    return loss, gradient


def test_value_and_gradient_are_those_of_a_second_implementation(algo):
    plain_ones = {"gspo": plain_gspo, "cispo": plain_cispo}
    for seed, mode, (name, plain) in itertools.product(range(6), MODES, plain_ones.items()):
        tokens = random_tokens(seed)
        loss, gradient, _ = run(algo, name, tokens, mode, **WIDE)
        expected = plain(tokens, mode, 0.2, 0.28)
        assert loss == pytest.approx(expected[0], abs=1e-6)
        assert gradient == pytest.approx(expected[1], abs=1e-6)


@properties
@given(st.integers(0, 10**6), st.sampled_from(["gspo", "cispo"]), st.randoms(use_true_random=False))
def test_order_and_cuts_change_nothing(algo, seed, name, random):
    """Cut between responses, in any order: packing, micro-batches and ranks are no more than that."""
    tokens = random_tokens(seed)
    weights = weights_of(algo, tokens, "seq-mean-token-mean").double()
    objective = algo.kin.OBJECTIVES[name](**WIDE)
    whole, *_ = run(algo, name, tokens, **WIDE)
    parts = [[i for i, t in enumerate(tokens) if t.sample == s] for s in {t.sample for t in tokens}]
    random.shuffle(parts)
    total = 0.0
    for first in range(0, len(parts), 2):
        index = [i for part in parts[first : first + 2] for i in part]
        random.shuffle(index)
        cut = [tokens[i] for i in index]
        loss, _ = objective(column(cut, "logprob"), column(cut, "entropy"), inputs_of(algo, cut, weights[index]))
        total += loss.item()
    assert total == pytest.approx(whole, abs=1e-9)


def test_masked_tokens_may_hold_anything(algo):
    tokens = [token(0.02, 1.0), token(0.04, 1.0), token(math.nan, math.nan, in_loss=False, importance=math.nan)]
    for name in OBJECTIVES:
        assert run(algo, name, tokens, **WIDE)[0] == pytest.approx(run(algo, name, tokens[:2], **WIDE)[0])
        assert run(algo, name, tokens, **WIDE)[1][2] == 0
    logprobs = torch.tensor([-1.0, 5.0])  # what is compared of a response is that of its loss tokens
    inputs = inputs_of(algo, [token(0.0, 1.0), token(0.0, 1.0, in_loss=False)], torch.ones(2))
    assert algo.kin.OBJECTIVES["gspo"]().compared(logprobs, inputs)[0].tolist() == [0.0, 0.0]


def test_a_kl_in_the_loss_is_that_of_tokens(algo):
    tokens = random_tokens(3)
    options = WIDE | {"kl_coef": 0.3, "kl_estimator": "k2"}
    expected = sum(
        plain_weight(t, tokens, "token-mean") * 0.3 * (t.logprob - t.reference) ** 2 / 2 for t in tokens if t.in_loss
    )
    for name in OBJECTIVES:
        plain, *_ = run(algo, name, tokens, "token-mean", **options)
        with_kl, *_ = run(algo, name, tokens, "token-mean", **options, kl_in_loss=True)
        assert with_kl - plain == pytest.approx(expected)


def test_reinforce_pp_is_normalised_over_the_loss_tokens_of_the_batch(algo):
    rewards, lengths = [[1.0, 0.0, 0.0], [2.0, 2.0, None]], [[2, 2, 3], [4, 1, 9]]
    groups = [
        algo.advantage.with_advantages(with_shaped(make_group(r, lengths=n)), kind="batch-norm")
        for r, n in zip(rewards, lengths, strict=True)
    ]
    raw = [s.advantage for g in groups for s in g.scored]
    assert raw == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0])
    counts = [2, 2, 0, 4, 1]
    groups[0] = replace(groups[0], samples=(*groups[0].samples[:2], replace(groups[0].samples[2], in_loss=False)))
    tokens = [a for a, n in zip(raw, counts, strict=True) for _ in range(n)]
    found = algo.advantage.normalised(groups, 0.01)
    mean, deviation = statistics.mean(tokens), statistics.stdev(tokens)
    scaled = [s.advantage for g in found for s in g.scored]
    assert scaled == pytest.approx([(a - mean) / (deviation + 0.01) for a in raw])
    assert found[1].samples[2].advantage == 0  # it has no verdict


def test_whitened_values(algo):
    found = algo.advantage.whiten(torch.tensor([1.0, 2.0, 6.0]), 0.0)
    assert found.mean().item() == pytest.approx(0, abs=1e-6) and found.std().item() == pytest.approx(1)
    for flat in ([0.1, 0.1, 0.1], [5.0], []):
        assert algo.advantage.whiten(torch.tensor(flat)).tolist() == [0.0] * len(flat)
