"""The DAPO objective: token-level policy gradient loss with decoupled clipping (Eq. 8, 10 and 12).

Everything is about R response tokens in one flat row, in any order, cut into micro-batches in any way. What depends on
the whole optimizer mini-batch (the divisor, the importance weights) is computed once, by :func:`token_weights` and
:func:`importance_weights`, before it is cut. So a loss is a plain sum over tokens, and neither value nor gradient can
depend on micro-batch size, packing, order or ranks.

Masked positions may hold anything, NaN included. Inputs are therefore replaced with ``where`` before they are used:
NaN times 0 is NaN, and even a ``where`` on the result would let NaN into the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dapo.algorithm.kl import KLEstimator, kl_estimate

LossAggMode = Literal["token-mean", "prompt-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]
CorrectionKind = Literal["none", "truncate", "mask"]
Stats = dict[str, tuple[Tensor, Tensor]]
"""Name -> (sum, count), both float64 scalars without gradient: add them over micro-batches and ranks, then divide."""

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """What the objective needs to know of R response tokens, beside the current policy. All are [R], no gradient."""

    behaviour_logprobs: Tensor
    """log pi_engine, as sampled."""
    proximal_logprobs: Tensor
    """log pi_prox, of the policy when training on this rollout started."""
    advantages: Tensor
    importance: Tensor
    """w, from :func:`importance_weights`."""
    mask: Tensor
    """bool: the loss tokens."""
    weights: Tensor
    """From :func:`token_weights`, over the whole optimizer mini-batch."""
    sample_ids: Tensor
    """int: the response that a token belongs to."""
    group_ids: Tensor
    """int: the group, which is the pair of a preference."""
    reference_logprobs: Tensor | None = None
    """log pi_ref, if the KL to the initial policy is asked for."""
    proximal_share: Tensor | None = None
    """From :func:`interpolation_share`. pi_prox and w then follow from the present log-probs (:meth:`resolved`)."""
    correction: Mapping[str, Any] | None = None
    """Options of :func:`importance_weights` for that w, of a kind and level that leave the mask alone."""

    def resolved(self, logprobs: Tensor) -> TokenInputs:
        """With pi_prox interpolated: log pi_prox = log pi_engine + a (log pi_theta - log pi_engine), and w of that.

        Without a ``proximal_share`` the same inputs. ``logprobs``: [R] log pi_theta; no gradient flows through them.
        """
        if self.proximal_share is None:
            return self
        current = logprobs.detach()
        behaviour, share = self.behaviour_logprobs.to(current.dtype), self.proximal_share.to(current.dtype)
        proximal, importance = torch.lerp(behaviour, current, share), self.importance  # exact at 0 and 1
        if self.correction is not None:
            ids, mask = self.sample_ids, self.mask
            importance, _ = importance_weights(proximal, behaviour, sample_ids=ids, mask=mask, **self.correction)
        return replace(self, proximal_logprobs=proximal, importance=importance, proximal_share=None)

    def selected(self) -> TokenInputs:
        """A copy in which masked positions hold neutral numbers."""
        found: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and value.is_floating_point():
                found[field.name] = _select(self.mask, value)
        return replace(self, **found)


def _select(mask: Tensor, values: Tensor) -> Tensor:
    """``values`` in float32 or better, 0 where masked (no gradient there)."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(mask, values, 0)


# --- computed once for an optimizer mini-batch --------------------------------------------------------------------


def token_weights(
    mode: LossAggMode,
    *,
    mask: Tensor,
    sample_ids: Tensor,
    group_ids: Tensor,
    num_samples: int,
    constant: float | None = None,
) -> Tensor:
    """The weight of each token, such that ``loss = sum(weights * token_loss)``.

    ======================  ==============================================================================
    ``token-mean``          1 / loss tokens of the mini-batch (DAPO, as released)
    ``prompt-mean``         mean over the tokens of each group, then over groups (Eq. 8 as printed)
    ``seq-mean-token-mean`` mean over the tokens of each response, then over responses (GRPO, Eq. 5)
    ``seq-mean-token-sum``  sum over the tokens of each response, then mean over responses
    ``constant``            1 / (constant x responses), loss tokens or not (Dr. GRPO)
    ======================  ==============================================================================

    Groups and responses without a loss token do not count in the means.

    Args:
        mode: ``loss_agg_mode``.
        mask: [R] bool, the loss tokens of the whole optimizer mini-batch, over all micro-batches and ranks.
        sample_ids: [R] int, which response a token belongs to. Any numbers, unique over the mini-batch.
        group_ids: [R] int, which group. Any numbers.
        num_samples: all responses of the mini-batch, wholly masked ones too.
        constant: C of mode ``constant``.

    Returns:
        [R] float32, 0 where masked; all 0 if everything is masked.

    Raises ValueError: an unknown mode, or mode ``constant`` without a positive constant and number of samples."""
    mask = mask.bool()
    match mode:
        case "token-mean":
            weights = 1 / mask.sum().double()
        case "prompt-mean":
            weights = _mean_of_means(mask, group_ids)
        case "seq-mean-token-mean":
            weights = _mean_of_means(mask, sample_ids)
        case "seq-mean-token-sum":
            weights = 1 / sample_ids.new_tensor(torch.unique(sample_ids[mask]).numel()).double()
        case "constant":
            if constant is None or constant <= 0 or num_samples <= 0:
                raise ValueError(f"mode constant needs positive numbers, got {constant=} and {num_samples=}")
            weights = torch.tensor(1 / (constant * num_samples), dtype=torch.float64, device=mask.device)
        case _:
            raise ValueError(f"unknown loss_agg_mode {mode!r}")
    # with nothing left the divisor above is 0, but then no position is selected either
    return torch.where(mask, weights, 0).float()


def _mean_of_means(mask: Tensor, ids: Tensor) -> Tensor:
    """[R] 1 / (loss tokens of the token's unit x units with a loss token)."""
    unit, tokens = per_unit(mask.double(), ids)
    return 1 / (tokens[unit] * (tokens > 0).sum())


def per_unit(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The unit of each token as 0 .. U - 1, [R], and the sum of ``values`` [R] over each unit, [U].
    ``ids``: [R] int, which unit: ``sample_ids`` or ``group_ids`` of :class:`TokenInputs`."""
    names, unit = torch.unique(ids, return_inverse=True)
    return unit, values.new_zeros(names.numel()).index_add(0, unit, values)


def importance_weights(
    proximal: Tensor,
    behaviour: Tensor,
    *,
    kind: CorrectionKind,
    level: Literal["token", "sequence"],
    cap: float,
    low: float,
    high: float,
    sample_ids: Tensor,
    mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Correct for tokens that were sampled from pi_engine while training starts from pi_prox.

    ``truncate``: w = min(pi_prox / pi_engine, cap), truncated importance sampling. ``mask``: w = 1, and tokens whose
    ratio is outside [low, high] leave the loss (and, since :func:`token_weights` comes after, the divisor). ``none``:
    w = 1. At level ``sequence`` the ratio is that of the whole response, the product over its tokens.

    Args:
        proximal: [R] log pi_prox.
        behaviour: [R] log pi_engine.
        kind: ``none``, ``truncate`` or ``mask``.
        level: ratio of each token, or of the response.
        cap: C of ``truncate``.
        low: lower border of ``mask``, inside.
        high: upper border of ``mask``, inside.
        sample_ids: [R] int, which response a token belongs to. All its tokens must be here.
        mask: [R] bool, the loss tokens.

    Returns:
        (w [R] float32 or better, the new mask [R]), without gradient. w is 1 at masked positions.

    Raises ValueError: an unknown kind or level."""
    if kind not in ("none", "truncate", "mask") or level not in ("token", "sequence"):
        raise ValueError(f"unknown correction {kind!r} at level {level!r}")
    log_ratio = _select(mask, proximal.detach()) - _select(mask, behaviour.detach())
    if level == "sequence":
        unit, total = per_unit(log_ratio.double(), sample_ids)
        log_ratio = total[unit].to(log_ratio.dtype)
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    if kind == "truncate":
        return torch.where(mask, ratio.clamp(max=cap), 1.0), mask
    if kind == "mask":
        mask = mask & (ratio >= low) & (ratio <= high)
    return torch.ones_like(ratio), mask


def interpolation_share(before: Tensor, now: Tensor) -> Tensor:
    """a = (v_prox - v_behave) / (v_theta - v_behave), [R]: how far pi_prox lies from pi_engine towards pi_theta.

    Versions are counted in optimizer updates. Where pi_theta is pi_engine, a is 1.

    Args:
        before: [R] v_prox - v_behave: updates from the weights of a token to those that training on its batch began at.
        now: [R] v_theta - v_behave: updates from the weights of a token to the present ones, at least ``before``.
    """
    return torch.where(now > 0, before / now.clamp(min=1), 1.0)


# --- the loss -----------------------------------------------------------------------------------------------------


def policy_ratio(logprobs: Tensor, proximal: Tensor) -> Tensor:
    """r = pi_theta / pi_prox, [R], the exponent held within [-20, 20] so that it never overflows."""
    return (logprobs - proximal).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def clipped_loss(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    importance: Tensor,
    *,
    low: float,
    high: float,
    c: float | None,
) -> Tensor:
    """The loss of each token with decoupled clipping (Eq. 8, 10, 12): w * -min(r A, clip(r, 1 - low, 1 + high) A).

    Args:
        logprobs: [R] log pi_theta, with gradient.
        proximal: [R] log pi_prox.
        advantages: [R] A.
        importance: [R] w; no gradient flows through it.
        low: epsilon_low (``clip_ratio_low``).
        high: epsilon_high (``clip_ratio_high``), above ``low`` for Clip-Higher.
        c: dual clip (``clip_ratio_c``): where A < 0, the loss before w is at most c |A|. None: off.

    Returns:
        [R]. Clipped tokens have no gradient.
    """
    ratio = policy_ratio(logprobs, proximal)
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    if c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -c * advantages), loss)
    return importance.detach() * loss


@dataclass(frozen=True, slots=True)
class DapoObjective:
    """The loss of DAPO on a flat row of response tokens, and what to watch while it falls.

    Under ``kl_in_loss``, ``kl_coef`` times the KL to the reference policy is added to the loss of each token.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    clip_ratio_c: float | None = 10.0
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_in_loss: bool = False
    clips_both_ways: ClassVar[bool] = False
    """Whether a ratio is clipped at either border whatever the sign of the advantage."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, inputs: TokenInputs) -> tuple[Tensor, Stats]:
        """Loss and statistics of a micro-batch.

        Args:
            logprobs: [R] log pi_theta of the response tokens, with gradient.
            entropy: [R] entropy of the distribution each was sampled from, in nats; for statistics only.
            inputs: the rest.

        Returns:
            (the sum over loss tokens of weight x (token loss + KL term), statistics). Losses of micro-batches add up
            to that of the mini-batch. With no loss token at all the loss is 0 and still has a gradient (of zeros), so
            that a rank with nothing to learn takes part in every collective.

        Raises ValueError: ``kl_in_loss`` without reference log-probabilities."""
        known = inputs.selected()
        logprobs = _select(inputs.mask, logprobs)
        loss = self.token_losses(logprobs, known)
        total = (known.weights * loss).sum()  # weights are 0 where masked, and every loss is finite by now
        return total, self._stats(logprobs.detach(), entropy, known)

    def compared(self, logprobs: Tensor, known: TokenInputs) -> tuple[Tensor, Tensor]:
        """``[R]``, ``[R]``: what r is the ratio of, as logarithms."""
        return logprobs, known.proximal_logprobs

    def policy_losses(self, logprobs: Tensor, known: TokenInputs) -> Tensor:
        """``[R]``: the loss of each token, before its weight and without the KL term."""
        return clipped_loss(
            *self.compared(logprobs, known),
            known.advantages,
            known.importance,
            low=self.clip_ratio_low,
            high=self.clip_ratio_high,
            c=self.clip_ratio_c,
        )

    def token_losses(self, logprobs: Tensor, known: TokenInputs) -> Tensor:
        """``[R]``, loss + KL term of each token, before its weight.
        ``logprobs``, ``known``: with neutral numbers where masked (:meth:`TokenInputs.selected`).
        Raises ValueError: ``kl_in_loss`` without reference log-probabilities."""
        loss = self.policy_losses(logprobs, known)
        if self.kl_in_loss:
            if known.reference_logprobs is None:
                raise ValueError("KL in the loss needs the log-probabilities of the reference policy")
            loss = loss + self.kl_coef * kl_estimate(logprobs, known.reference_logprobs, self.kl_estimator)
        return loss

    @torch.no_grad()
    def _stats(self, logprobs: Tensor, entropy: Tensor, known: TokenInputs) -> Stats:
        """Metrics of the paper's section 4.3 and Fig. 3a, on inputs that hold neutral numbers where masked."""
        mask, advantages = known.mask, known.advantages
        probability = logprobs.exp()
        ratio, both = policy_ratio(*self.compared(logprobs, known)), self.clips_both_ways
        clipped_up = mask & (both | (advantages > 0)) & (ratio > 1 + self.clip_ratio_high)
        clipped_down = mask & (both | (advantages < 0)) & (ratio < 1 - self.clip_ratio_low)
        stats = token_statistics(logprobs, entropy, known, self.kl_estimator) | {
            "clip_low": average(clipped_down, mask),
            "clip_high": average(clipped_up, mask),
            "clip_up_probability": average(probability, clipped_up),
        }
        if self.clip_ratio_c is not None and not both:
            stats["clip_dual"] = average(mask & (advantages < 0) & (ratio > self.clip_ratio_c), mask)
        return stats


@torch.no_grad()
def token_statistics(logprobs: Tensor, entropy: Tensor, inputs: TokenInputs, estimator: KLEstimator) -> Stats:
    """What is worth watching whatever is minimised: of the policy that is trained beside those it is compared with."""
    known, mask = inputs.selected(), inputs.mask
    logprobs, entropy = _select(mask, logprobs.detach()), _select(mask, entropy.detach())
    stats = {
        "entropy": average(entropy, mask),
        "probability": average(logprobs.exp(), mask),
        "ratio": average(policy_ratio(logprobs, known.proximal_logprobs), mask),
        # KL(prox || theta), at tokens sampled from prox: so the k3 of the reversed pair
        "proximal_kl": average(kl_estimate(known.proximal_logprobs, logprobs, "k3"), mask),
        "importance": average(known.importance, mask),
    }
    if known.reference_logprobs is not None:
        stats["reference_kl"] = average(kl_estimate(logprobs, known.reference_logprobs, estimator), mask)
    return stats


def average(values: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """A statistic: (sum, count) of ``values`` at the selected positions."""
    return torch.where(where, values.detach(), 0).sum(dtype=torch.float64), where.sum(dtype=torch.float64)
