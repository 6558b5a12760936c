"""KL estimators and the adaptive coefficient. The number of an entry is that of shared/cases/failures.md."""

import json
import math

import pytest
import torch


def test_estimators(algo):
    logprobs, reference = torch.tensor([-1.0, -2.0, -1.0]).double(), torch.tensor([-1.5, -1.0, -1.0]).double()
    for kind, right in [
        ("k1", [0.5, -1.0, 0]),
        ("k2", [0.125, 0.5, 0]),
        ("k3", [math.exp(-0.5) - 1 + 0.5, math.exp(1) - 1 - 1, 0]),
    ]:
        assert algo.kl.kl_estimate(logprobs, reference, kind).tolist() == pytest.approx(right)
    with pytest.raises(ValueError, match="k1, k2, k3"):
        algo.kl.kl_estimate(logprobs, reference, "k4")


def test_expectations_and_gradients(algo):
    """On a whole distribution: E[k1] = E[k3] = KL(theta || ref); the gradients are those algorithm.md names."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, -0.2], dtype=torch.float64).log_softmax(0)
    theta = logits.log_softmax(0)
    p, q = theta.detach().exp(), reference.exp()
    forward = (theta.exp() * (theta - reference)).sum()
    backward = (q * (reference - theta)).sum()
    for kind in ("k1", "k3"):
        assert (p * algo.kl.kl_estimate(theta, reference, kind)).sum().item() == pytest.approx(forward.item())

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0].tolist()

    wanted = {"k1": [0, 0, 0], "k2": gradient(forward), "k3": gradient(backward)}
    for kind, right in wanted.items():
        got = gradient((p * algo.kl.kl_estimate(theta, reference, kind)).sum())
        assert got == pytest.approx(right, abs=1e-12), kind


def test_k3_is_finite_and_accurate(algo):
    far = torch.tensor([-200.0], requires_grad=True)
    value = algo.kl.kl_estimate(far, torch.tensor([-0.1]), "k3")
    value.sum().backward()
    assert torch.isfinite(value).all() and far.grad.tolist() == [0.0]
    near = algo.kl.kl_estimate(torch.tensor([0.001]), torch.zeros(1), "k3")
    assert near.item() == pytest.approx(5e-7, rel=1e-3)


def test_sum_over_the_sample(algo):
    """A masked NaN changes nothing; a sample without tokens has KL 0; no gradient."""
    nan = math.nan
    logprobs = torch.tensor([-1.0, -1.0, nan, -2.0, -1.0], requires_grad=True)
    result = algo.kl.sample_kl(
        logprobs,
        torch.tensor([-1.5, -1.25, -1.0, -1.0, nan]),
        "k1",
        mask=torch.tensor([True, True, False, True, False]),
        sample_ids=torch.tensor([2, 0, 0, 2, 1]),
        num_samples=4,
    )
    assert result.tolist() == [0.25, 0, -0.5, 0] and not result.requires_grad


def test_adaptive_coefficient(algo):
    for kl, n, right in [
        (0.1, 100, 1.0),
        (0.11, 100, 1 + 0.1 * 0.1),
        (10.0, 100, 1 + 0.2 * 0.1),
        (math.inf, 100, 1 + 0.2 * 0.1),
        (0.09, 100, 1 - 0.1 * 0.1),
        (0.0, 500, 1 - 0.2 * 0.5),
        (-3.0, 500, 1 - 0.2 * 0.5),
    ]:
        controller = algo.kl.AdaptiveKL(coef=0.5, target=0.1, horizon=1000)
        assert controller.update(kl, n) == pytest.approx(0.5 * right)
        assert controller.coef == pytest.approx(0.5 * right)


def test_adaptive_coefficient_never_turns_negative(algo):
    controller = algo.kl.AdaptiveKL(coef=0.5, target=0.1, horizon=10)
    with pytest.raises(ValueError, match="horizon above 20"):
        controller.update(0.0, 100)
    with pytest.raises(ValueError, match="NaN"):
        controller.update(math.nan, 1)
    assert controller.coef == 0.5


def test_adaptive_state(algo):
    """Entry 88: the counter survives a resume."""
    first = algo.kl.AdaptiveKL(coef=0.5, target=0.1, horizon=1000)
    first.update(0.2, 300)
    second = algo.kl.AdaptiveKL(coef=0.5, target=0.1, horizon=1000)
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.update(0.3, 100) == first.update(0.3, 100)
