"""KL to a reference policy: estimators, its sum over a sample, and an adaptive coefficient.

DAPO has no KL term by default (section 2.3); these serve those who want one, or only want to watch it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

_MAX_EXPONENT = 20.0


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: KLEstimator) -> Tensor:
    """Per-token estimate of KL(theta || ref) at tokens sampled from theta, on d = log pi_theta - log pi_ref.

    k1 = d is unbiased but noisy and signed; k2 = d^2 / 2; k3 = exp(-d) - 1 + d is unbiased and never negative. As a
    loss term k1 has a gradient of zero mean, k2 that of KL(theta || ref), k3 that of KL(ref || theta).

    Args:
        logprobs: [R] log pi_theta; the gradient flows through it.
        reference: [R] log pi_ref.
        kind: the estimator.

    Returns:
        [R]. In k3, d is held above -20, where exp would overflow in float32 before long (no gradient beyond).

    Raises ValueError: an unknown kind."""
    d = logprobs - reference
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        d = d.clamp(min=-_MAX_EXPONENT)
        return torch.expm1(-d) + d  # expm1: d is mostly tiny, and exp(-d) - 1 would cancel
    raise ValueError(f"unknown KL estimator {kind!r}; one of k1, k2, k3")


def sample_kl(
    logprobs: Tensor, reference: Tensor, kind: KLEstimator, *, mask: Tensor, sample_ids: Tensor, num_samples: int
) -> Tensor:
    """The KL of each sample, summed over its tokens: what KL in the reward subtracts (k1 there: KL(theta || ref)).

    Args:
        logprobs: [R] log pi_theta.
        reference: [R] log pi_ref.
        kind: the estimator.
        mask: [R] bool, the response tokens. Whatever stands at the others, NaN too, changes nothing.
        sample_ids: [R] int, the sample of each token, from 0 to ``num_samples`` - 1.
        num_samples: S.

    Returns:
        [S] float64, without gradient.
    """
    values = torch.where(mask, kl_estimate(logprobs.detach(), reference.detach(), kind), 0).double()
    return values.new_zeros(num_samples).index_add(0, sample_ids, values)


@dataclass(slots=True)
class AdaptiveKL:
    """A KL coefficient beta that steers the measured KL to ``target``; without a target it stays.

    beta *= 1 + clip(KL / target - 1, -0.2, 0.2) * n / horizon, with n the samples that the KL was measured on.
    """

    coef: float
    target: float | None
    horizon: int

    def update(self, kl: float, n: int) -> float:
        """The new coefficient after ``n`` samples with mean KL ``kl``.
        Raises ValueError: ``kl`` is NaN, or so many samples came at once that beta would change its sign."""
        if self.target is None:
            return self.coef
        if math.isnan(kl):
            raise ValueError("the KL is NaN")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        factor = 1 + error * n / self.horizon
        if factor <= 0:
            raise ValueError(f"{n} samples at once need a horizon above {n // 5}, which is {self.horizon}")
        self.coef *= factor
        return self.coef

    def state(self) -> dict[str, float]:
        """What a checkpoint has to keep."""
        return {} if self.target is None else {"coef": self.coef}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from :meth:`state`; target and horizon stay those of the config."""
        if self.target is not None:
            self.coef = float(state["coef"])
