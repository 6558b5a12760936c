"""The kernels for the head's rows against the formulas: on the GPU if there is one, or else interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from dapo.model.head_kernels import row_gradient, row_statistics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, VOCABULARY = 5, 9001  # three blocks, the last one not full


@pytest.fixture
def raw() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    raw = 4 * torch.randn(ROWS, VOCABULARY, generator=generator)
    raw[1] += 300.0  # far from zero
    raw[2, 17] = 90.0  # all but certain
    raw[3] = -2.0  # uniform
    return raw.to(DEVICE)


TARGETS = torch.tensor([0, 4096, 17, 9000, 8192], device=DEVICE)


def formula(raw: torch.Tensor, scale: float, softcap: float | None, temperature: float) -> list[torch.Tensor]:
    x = raw * scale
    x = (x if softcap is None else softcap * torch.tanh(x / softcap)) / temperature
    log_p = x.log_softmax(1)
    return [log_p.gather(1, TARGETS[:, None])[:, 0], -(log_p.exp() * log_p).sum(1), x.logsumexp(1)]


SETTINGS = [(1.0, None, 1.0), (0.5, None, 0.7), (1.0, 30.0, 1.3)]


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_read_of_a_row(raw: torch.Tensor, settings: tuple[float, float | None, float]) -> None:
    found = row_statistics(raw, TARGETS, *settings)
    for have, want in zip(found, formula(raw.double(), *settings), strict=True):
        torch.testing.assert_close(have.double(), want, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_gradient_of_a_row(
    raw: torch.Tensor, settings: tuple[float, float | None, float], with_entropy: bool
) -> None:
    of_logprobs = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], device=DEVICE)
    of_entropies = torch.tensor([0.1, 0.2, -0.3, 1.0, 0.0], device=DEVICE) if with_entropy else None
    leaf = raw.double().requires_grad_()
    logprobs, entropies, _ = formula(leaf, *settings)
    loss = (logprobs * of_logprobs).sum()
    if of_entropies is not None:
        loss = loss + (entropies * of_entropies).sum()
    (want,) = torch.autograd.grad(loss, leaf)
    _, entropy, divisors = row_statistics(raw, TARGETS, *settings)
    found = row_gradient(raw, TARGETS, entropy, divisors, of_logprobs, of_entropies, *settings, torch.float32)
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=2e-6)
    narrow = row_gradient(raw, TARGETS, entropy, divisors, of_logprobs, of_entropies, *settings, torch.bfloat16)
    torch.testing.assert_close(narrow, found.bfloat16())


def test_a_row_that_is_not_finite_shows() -> None:
    raw = torch.zeros(2, 5000, device=DEVICE)
    raw[1, 4500] = float("nan")
    found = row_statistics(raw, torch.tensor([0, 0], device=DEVICE), 1.0, None, 1.0)
    assert all(x[0].isfinite() and x[1].isnan() for x in found)
