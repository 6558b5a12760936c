"""pi_prox between pi_engine and pi_theta (family.md, "Off-policy"), resolved where the objective is called."""

import math
import random
from dataclasses import replace

import pytest
import torch
from algorithm_support import MODES, column, inputs_of, plain_objective, random_tokens, weights_of

from dapo.training.micro_batch import select_tokens

TRUNCATE = {"kind": "truncate", "level": "token", "cap": 1.2, "low": 0.5, "high": 2.0}


def ages_of(tokens, seed=0):
    """Updates that each token is behind: when training on its batch began, and at the present."""
    rng = random.Random(seed)
    before = [rng.randrange(4) for _ in tokens]
    made = rng.randrange(3)
    return before, [age + made for age in before]


def interpolated(algo, tokens, weights, before, now, correction=TRUNCATE):
    share = algo.objective.interpolation_share(torch.tensor(before).double(), torch.tensor(now).double())
    return replace(inputs_of(algo, tokens, weights), proximal_share=share, correction=correction)


def test_share_by_hand(algo):
    """Both of the same weights: 1, be these present or not; sampled from those that training began at: 0."""
    share = algo.objective.interpolation_share(torch.tensor([3.0, 1, 0, 2, 0]), torch.tensor([3.0, 4, 5, 8, 0]))
    assert share.tolist() == [1, 0.25, 0, 0.25, 1]


def test_interpolation_by_hand(algo):
    """log pi_engine -2, log pi_theta -1: at a quarter log pi_prox is -1.75, r = exp(0.75), w = exp(0.25) up to C."""
    (token,) = [replace(random_tokens(0)[0], behaviour=-2.0, logprob=-1.0, advantage=-1.0, in_loss=True)]
    objective = algo.objective.DapoObjective()
    for correction, w in ((TRUNCATE, 1.2), (TRUNCATE | {"cap": 2.0}, math.exp(0.25)), (TRUNCATE | {"kind": "none"}, 1)):
        inputs = interpolated(algo, [token], torch.ones(1), [1], [4], correction)
        logprobs = column([token], "logprob").requires_grad_()
        found = inputs.resolved(logprobs)
        assert found.proximal_logprobs.tolist() == [-1.75] and found.importance.tolist() == pytest.approx([w])
        assert not found.proximal_logprobs.requires_grad and not found.importance.requires_grad
        loss, stats = objective(logprobs, column([token], "entropy"), found)
        (slope,) = torch.autograd.grad(loss, logprobs)
        assert loss.item() == pytest.approx(w * math.exp(0.75))
        assert slope.item() == pytest.approx(w * math.exp(0.75))  # and not a quarter less: pi_prox is a constant
        means = {name: (total / count).item() for name, (total, count) in stats.items()}
        assert means["ratio"] == pytest.approx(math.exp(0.75)) and means["importance"] == pytest.approx(w)
        assert means["proximal_kl"] == pytest.approx(math.exp(0.75) - 1 - 0.75)


def test_the_ends_are_exact(algo):
    """Before any update pi_prox is pi_theta to the bit; of a token of the present version it then is the engine's."""
    tokens = random_tokens(1)
    logprobs, ones = column(tokens, "logprob").float(), [1] * len(tokens)
    at_start = interpolated(algo, tokens, torch.ones(len(tokens)), ones, ones).resolved(logprobs)
    assert torch.equal(at_start.proximal_logprobs, logprobs)
    fresh = interpolated(algo, tokens, torch.ones(len(tokens)), [0] * len(tokens), ones).resolved(logprobs)
    assert torch.equal(fresh.proximal_logprobs, column(tokens, "behaviour").float())
    assert set(fresh.importance.tolist()) == {1.0}


def test_parity_with_a_second_implementation(algo):
    """One token at a time in plain Python, as the formula has it; loss and gradient, whole and in any parts."""
    for seed, mode in enumerate(MODES):
        tokens = random_tokens(seed)
        before, now = ages_of(tokens, seed)
        plain = []
        for t, v, n in zip(tokens, before, now, strict=True):
            a = v / n if n else 1.0
            proximal = t.behaviour + a * (t.logprob - t.behaviour)
            w = min(math.exp(proximal - t.behaviour), TRUNCATE["cap"])
            plain.append(replace(t, proximal=proximal, importance=w))
        expected_loss, expected_gradient = plain_objective(plain, mode, low=0.2, high=0.28, c=10.0)
        inputs = interpolated(algo, tokens, weights_of(algo, tokens, mode), before, now)
        logprobs, entropy = column(tokens, "logprob").requires_grad_(), column(tokens, "entropy")
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
        for parts in ([order], order.split(4)):
            losses = []
            for part in parts:
                cut = select_tokens(inputs, part).resolved(logprobs[part])
                losses.append(algo.objective.DapoObjective()(logprobs[part], entropy[part], cut)[0])
            loss = torch.stack(losses).sum()
            (gradient,) = torch.autograd.grad(loss, logprobs)
            assert loss.item() == pytest.approx(expected_loss, abs=1e-5)
            assert gradient.tolist() == pytest.approx(expected_gradient, abs=1e-5)


def test_masked_nan_does_not_leak_into_what_is_interpolated(algo):
    tokens = [*random_tokens(5), *random_tokens(6)]
    before, now = ages_of(tokens)
    weights = weights_of(algo, tokens, "token-mean")

    def run(tokens):
        logprobs = column(tokens, "logprob").requires_grad_()
        inputs = interpolated(algo, tokens, weights, before, now).resolved(logprobs)
        loss, _ = algo.objective.DapoObjective()(logprobs, column(tokens, "entropy"), inputs)
        return loss.item(), torch.autograd.grad(loss, logprobs)[0].tolist()

    assert any(not t.in_loss for t in tokens)
    assert run([t if t.in_loss else replace(t, behaviour=math.nan, logprob=math.inf) for t in tokens]) == run(tokens)
