"""Losses over preferences and labels: DPO and its kin, Bradley-Terry reward models, outcome models.

A group holds the responses to one prompt, each with a rank; every two of them of different rank are a pair. A pair
counts 1 / (pairs of its group x groups of the mini-batch), so that a ranking of K responses weighs as much as a pair of
two (arXiv 2203.02155, Eq. 1). All objectives are sums over groups: how the mini-batch is cut does not matter, as long
as no group is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

PairLoss = Literal["sigmoid", "ipo", "simpo"]
Statistics = dict[str, tuple[Tensor, Tensor]]
TIE = 1e-5
"""A float32 sum of log-probabilities depends in this order on the place of a response in its batch."""


def dpo_loss(margin: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """DPO (arXiv 2305.18290, Eq. 7) of margins ``[P]``; with ``label_smoothing`` e (1 - e) L(m) + e L(-m)."""
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def ipo_loss(difference: Tensor, beta: float) -> Tensor:
    """IPO (arXiv 2310.12036, Eq. 17): ``difference`` ``[P]`` is m / beta of log-ratios averaged over their tokens."""
    return (difference - 1 / (2 * beta)).square()


def simpo_loss(difference: Tensor, beta: float, gamma: float) -> Tensor:
    """SimPO (arXiv 2405.14734, Eq. 6): ``difference`` ``[P]`` of mean log-probabilities; no reference policy."""
    return -F.logsigmoid(beta * difference - gamma)


def bradley_terry_loss(better: Tensor, worse: Tensor, margin: Tensor | float = 0.0, centring: float = 0.0) -> Tensor:
    """-log sigmoid(r_w - r_l - margin) + c (r_w + r_l)^2 of scores ``[P]``."""
    return -F.logsigmoid(better - worse - margin) + centring * (better + worse).square()


def outcome_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of scores ``[N]`` (logits) on labels 0 or 1."""
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="none")


def share_right(margins: Tensor) -> Tensor:
    """1 where the better one is ahead, 0.5 where neither is by more than rounding (:data:`TIE`), else 0."""
    return ((margins > TIE).float() + (margins >= -TIE)) / 2


@dataclass(frozen=True, slots=True, eq=False)
class RankedTokens:
    """What a loss over pairs knows of R response tokens, ``[R]`` each; those of a response stand together.

    Attributes:
        weights: of each pair of the token's group in the loss; 0: the token itself does not count.
        sample_ids, group_ids: the response and its group.
        ranks: of the response in its group; a lower one is better, equal ones are no pair.
        margins: of the group: how far ahead the better one has to be (reward models).
        reference: log-probability of the whole response under the reference policy.
        nll: weights of the NLL term; 0 beside the best response of a group.
    """

    weights: Tensor
    sample_ids: Tensor
    group_ids: Tensor
    ranks: Tensor
    margins: Tensor
    reference: Tensor
    nll: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LabelledTokens:
    """What an outcome model knows of R tokens, ``[R]`` each: ``weights`` is 0 but for the last one of a text."""

    weights: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Responses:
    """Some tokens by response, S of them: ``place`` ``[R]`` of each token's, ``lengths`` and ``ends`` (its last token)
    ``[S]``, and the pairs ``better``, ``worse`` ``[P]`` as numbers of responses."""

    place: Tensor
    lengths: Tensor
    ends: Tensor
    better: Tensor
    worse: Tensor

    @classmethod
    def of(cls, inputs: RankedTokens) -> Responses:
        _, place, lengths = torch.unique_consecutive(inputs.sample_ids, return_inverse=True, return_counts=True)
        ends = lengths.cumsum(0) - 1
        groups, ranks = inputs.group_ids[ends], inputs.ranks[ends]
        pairs = (groups[:, None] == groups) & (ranks[:, None] < ranks)
        better, worse = pairs.nonzero(as_tuple=True)
        return cls(place, lengths, ends, better, worse)

    def sums(self, values: Tensor) -> Tensor:
        """``[S]``: of the tokens of each response."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.place, values)


@dataclass(frozen=True, slots=True)
class PairObjective:
    """DPO, IPO or SimPO over the log-probabilities of response tokens, with ``nll`` times the NLL of the best responses
    (mean over their tokens) on top."""

    loss: PairLoss = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.0
    unit: ClassVar[Literal["pair"]] = "pair"

    def rewards(self, logprobs: Tensor, inputs: RankedTokens, found: Responses) -> Tensor:
        """``[S]``: the implicit reward of each response, beta (log pi - log ref), over tokens as the loss has it."""
        sums = found.sums(logprobs)
        if self.loss != "simpo":
            sums = sums - inputs.reference[found.ends]
        return self.beta * (sums if self.loss == "sigmoid" else sums / found.lengths)

    def pair_losses(self, margin: Tensor) -> Tensor:
        """``[P]``, of the difference of two implicit rewards."""
        if self.loss == "ipo":
            return ipo_loss(margin / self.beta, self.beta)
        if self.loss == "simpo":
            return simpo_loss(margin / self.beta, self.beta, self.gamma)
        return dpo_loss(margin, self.label_smoothing)

    def __call__(self, logprobs: Tensor, entropy: Tensor, inputs: RankedTokens) -> tuple[Tensor, Statistics]:
        found = Responses.of(inputs)
        rewards = self.rewards(logprobs, inputs, found)
        better, worse = found.better, found.worse
        margin = rewards[better] - rewards[worse]
        loss = (inputs.weights[found.ends[better]] * self.pair_losses(margin)).sum()
        loss = loss - (inputs.nll * logprobs).sum()
        sums = found.sums(logprobs.detach())
        told = {"chosen_logprob": sums[better], "rejected_logprob": sums[worse]}
        return loss, pair_statistics(rewards.detach(), found) | _means(told)


@dataclass(frozen=True, slots=True)
class OnlineDPO(PairObjective):
    """The same on the policy's own samples, as an objective of reinforcement learning: of two samples of a group the
    one with the higher advantage is the better one. A group weighs what its tokens weigh together."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, inputs: Any) -> tuple[Tensor, Statistics]:
        if inputs.reference_logprobs is None:
            raise ValueError("needs the reference policy; use algorithm.kl.mode=measure")
        kept = (inputs.weights, inputs.sample_ids, inputs.group_ids, -inputs.advantages, inputs.reference_logprobs)
        weights, samples, groups, ranks, reference = (values[inputs.mask] for values in kept)
        none = torch.zeros_like(reference)
        given = RankedTokens(weights, samples, groups, ranks, none, none, none)
        found = Responses.of(given)
        _, group = groups.unique(return_inverse=True)
        zeros = none.new_zeros(len(group))
        pairs = zeros.index_add(0, group[found.ends[found.better]], torch.ones_like(found.better, dtype=zeros.dtype))
        weights = zeros.index_add(0, group, weights) / pairs.clamp(min=1)
        given = replace(given, weights=weights[group], reference=found.sums(reference)[found.place])
        loss, told = PairObjective.__call__(self, logprobs[inputs.mask], entropy, given)
        return loss, {name.removeprefix("preference/"): pair for name, pair in told.items()}


@dataclass(frozen=True, slots=True)
class ScoreObjective:
    """Bradley-Terry over the scores of responses, read at the last token of each: what stands at the others, and in
    ``entropy``, does not count."""

    centring: float = 0.0
    unit: ClassVar[Literal["pair"]] = "pair"

    def rewards(self, scores: Tensor, inputs: RankedTokens, found: Responses) -> Tensor:
        """``[S]``."""
        return scores[found.ends]

    def __call__(self, scores: Tensor, entropy: Tensor, inputs: RankedTokens) -> tuple[Tensor, Statistics]:
        found = Responses.of(inputs)
        rewards, ends = self.rewards(scores, inputs, found), found.ends[found.better]
        losses = bradley_terry_loss(rewards[found.better], rewards[found.worse], inputs.margins[ends], self.centring)
        return (inputs.weights[ends] * losses).sum(), pair_statistics(rewards.detach(), found)


def outcome_objective(scores: Tensor, entropy: Tensor, inputs: LabelledTokens) -> tuple[Tensor, Statistics]:
    """Binary cross-entropy of the scores ``[R]`` that have a weight."""
    counts = inputs.weights != 0
    weights, scores, labels = inputs.weights[counts], scores[counts], inputs.labels[counts]
    right = share_right(torch.where(labels > 0.5, scores, -scores).detach())
    return (weights * outcome_loss(scores, labels)).sum(), _means({"accuracy": right, "score": scores.detach()})


def pair_statistics(rewards: Tensor, found: Responses) -> Statistics:
    """Of pairs: how often the better response has the higher reward, by how much, and both rewards."""
    chosen, rejected = rewards[found.better], rewards[found.worse]
    right = share_right(chosen - rejected)
    return _means({"accuracy": right, "margin": chosen - rejected, "chosen": chosen, "rejected": rejected})


def _means(values: dict[str, Tensor]) -> Statistics:
    return {f"preference/{name}": (v.double().sum(), v.new_tensor(v.numel())) for name, v in values.items()}
