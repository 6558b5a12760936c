"""What the suite asks of a trainer: an :class:`Adapter` of small functions, each of them optional.

All values are plain numbers and lists, so an adapter may use any library. A function may

- return a mapping with the keys that its docstring names,
- raise :class:`NotOffered`: the trainer has no such thing, which is reported apart from a failure,
- raise :class:`Refused`: the trainer rejects this input with an error for its user, which some cases expect.

Any other exception is a failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Rows = Sequence[Sequence[float]]
"""One list per response, as long as the response."""

Aggregation = Literal["token-mean", "prompt-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]


class NotOffered(Exception):
    """The trainer does not have what a case asks for; the text says so in a few words."""


class Refused(Exception):
    """The trainer rejects the input; the text is its message."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Weights for the difference between the engine that sampled and the trainer, from q = pi_old / pi_sampled.

    ``truncate``: each token's loss times min(q, cap). ``mask``: tokens with q outside [low, high] leave the loss.
    At level ``sequence`` q is the product over the response.
    """

    kind: Literal["truncate", "mask"]
    level: Literal["token", "sequence"] = "token"
    cap: float = 2.0
    low: float = 0.5
    high: float = 2.0


@dataclass(frozen=True, slots=True)
class LossBatch:
    """The responses of one rollout, and how their loss is to be computed."""

    logprobs: Rows
    """log pi_theta, what the gradient is taken with respect to."""
    advantages: Sequence[float]
    """One per response."""
    old_logprobs: Rows | None = None
    """log pi_old, at the centre of the clip; None: equal to ``logprobs``."""
    sampled_logprobs: Rows | None = None
    """log pi of the engine, for ``correction``."""
    reference_logprobs: Rows | None = None
    """log pi_ref, for ``kl_coef``."""
    mask: Rows | None = None
    """1: in the loss. None: all."""
    groups: Sequence[int] | None = None
    """The group (prompt) of each response; None: all of one."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_c: float | None = None
    """Dual clip: at most c |A| for a negative advantage."""
    objective: Literal["dapo", "gspo", "cispo"] = "dapo"
    """What is clipped: each token's ratio, that of the whole response, or the weight of the gradient."""
    aggregation: Aggregation = "token-mean"
    constant: int | None = None
    """C of aggregation ``constant``: the sum over tokens, divided by C times the number of responses."""
    kl_coef: float = 0.0
    """Weight of the k3 estimate of the KL to the reference, added to each token's loss."""
    correction: Correction | None = None
    update: Sequence[int] | None = None
    """The responses of the optimizer step in question; the others belong to other steps of the same rollout."""
    micro_batches: Sequence[Sequence[int]] | None = None
    """How the step is cut for gradient accumulation; all parts have the same number of responses. None: not cut."""
    pad_to: int | None = None
    """Pad responses to this width, where the trainer pads at all."""

    @property
    def rows(self) -> Sequence[int]:
        """The responses of the optimizer step."""
        return range(len(self.logprobs)) if self.update is None else self.update

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """The responses of each micro-batch."""
        return [self.rows] if self.micro_batches is None else self.micro_batches


class Adapter:
    """A trainer, as the suite sees it. Override what the trainer has."""

    name = "unnamed"
    """As shown in the report, with the version."""
    stated: Mapping[str, str] = {}
    """Case id -> in what the trainer's design differs. Such a mismatch is reported as ``differs`` and not as a failure,
    with observed and expected values shown all the same."""

    def loss(self, batch: LossBatch) -> Mapping[str, Any]:
        """``loss``: of the optimizer step, summed over its micro-batches. ``gradient``: rows, with respect to
        ``logprobs``; 0 for responses of other steps."""
        raise NotOffered("loss")

    def advantages(self, *, rewards: Sequence[float | None], groups: Sequence[int], kind: str) -> Mapping[str, Any]:
        """``advantages``: one per response. A reward None is a score that failed. ``kind``: group-norm (divided by the
        standard deviation), group-mean (not divided) or leave-one-out."""
        raise NotOffered("advantages")

    def overlong_penalty(self, *, length: int, limit: int, buffer: int) -> Mapping[str, Any]:
        """``penalty``: the soft overlong punishment of a response of ``length`` tokens."""
        raise NotOffered("overlong penalty")

    def overlong_filter(
        self, *, rewards: Sequence[float], lengths: Sequence[int], truncated: Sequence[bool]
    ) -> Mapping[str, Any]:
        """One group with overlong filtering on. ``advantages``: one per response; ``loss_tokens``: tokens in the loss
        of each; ``divisor``: what the token-mean loss divides by."""
        raise NotOffered("overlong filtering")

    def keep_group(
        self, *, correct: Sequence[bool | None], rewards: Sequence[float], metric: str, shaped: Sequence[float] | None
    ) -> Mapping[str, Any]:
        """``keep``: the verdict of dynamic sampling. ``metric``: acc (by ``correct``) or score (by ``rewards``).
        ``shaped``: rewards with the length penalty; None: as ``rewards``."""
        raise NotOffered("dynamic sampling")

    def admit(self, *, outcomes: Sequence[bool | None], wanted: int) -> Mapping[str, Any]:
        """``admitted``: places of the groups to train on, of groups kept (True), dropped (False) or not finished (None)
        in the order of their draws. ``complete``: no draw that is still pending can change which."""
        raise NotOffered("dynamic sampling")

    def logprob(self, *, logits: Sequence[float], token: int, temperature: float) -> Mapping[str, Any]:
        """``logprob``: of ``token`` as the trainer computes it for samples drawn at ``temperature``."""
        raise NotOffered("log-probabilities at a temperature")

    def rollout(
        self,
        *,
        chain: Mapping[int, int],
        prompts: Sequence[Sequence[int]],
        eos: Sequence[int],
        tokenizer_eos: int,
        pad: int,
        limit: int,
        vocabulary: int,
    ) -> Mapping[str, Any]:
        """Roll out a model in which token a is followed by ``chain[a]`` (``scripted.chain_model`` makes one), all
        prompts in one batch. ``tokens``: for each response the ids that are in the loss; ``truncated``: for each,
        whether it counts as cut at the limit."""
        raise NotOffered("rollout")

    def learning_rates(self, *, rate: float, warmup: int, updates_per_step: int, steps: int) -> Mapping[str, Any]:
        """``rates``: learning rate of each optimizer update; the warm-up is counted in rollout steps."""
        raise NotOffered("learning-rate schedule")

    def adapted_kl_coef(
        self, *, coef: float, target: float, horizon: int, kl: float, samples: int
    ) -> Mapping[str, Any]:
        """``coef``: the KL coefficient after ``samples`` samples with this KL."""
        raise NotOffered("adaptive KL coefficient")

    def configure(self, *, setting: str, value: float) -> Mapping[str, Any]:
        """Read a config in which only this is set: ``temperature``, ``samples_per_prompt`` or ``overlong_buffer`` (with
        a limit of 100 tokens). ``accepted``: True; else Refused."""
        raise NotOffered("configuration")
