"""Overlong reward shaping: what a response's length does to its reward and to its part in the loss (Eq. 13)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dapo.records import Group, Sample

HARD_PUNISHMENT = -1.0
"""The reward of a truncated response under the hard punishment, whatever it says."""


def overlong_penalty(length: int, *, max_response_length: int, buffer_len: int, penalty_factor: float) -> float:
    """The soft overlong punishment of one response (Eq. 13).

    Args:
        length: |y|, response length in tokens, the stop token counted.
        max_response_length: L_max, in tokens.
        buffer_len: L_cache, the last tokens before L_max, in which the punishment grows linearly. 0: no such ramp.
        penalty_factor: size of the punishment at L_max and above.

    Returns a number from ``-penalty_factor`` to 0, to be added to the reward.
    Raises ValueError: the buffer is negative or longer than L_max."""
    if not 0 <= buffer_len <= max_response_length:
        raise ValueError(f"buffer_len {buffer_len} is not between 0 and max_response_length {max_response_length}")
    excess = length - (max_response_length - buffer_len)
    if excess <= 0:
        return 0.0
    if length > max_response_length:  # tested before the ramp, which a buffer of 0 could not divide by
        return -penalty_factor
    return -penalty_factor * excess / buffer_len


def shape_rewards(
    group: Group,
    *,
    max_response_length: int,
    soft: bool,
    buffer_len: int,
    penalty_factor: float,
    hard: bool,
    filter_truncated: bool,
) -> Group:
    """A copy of ``group`` whose samples carry ``shaped_reward`` and ``in_loss``; the raw rewards stay as they are.

    Args:
        group: with rewards. A sample without a verdict keeps the shaped reward NaN and leaves the loss.
        max_response_length: L_max, in tokens.
        soft: add :func:`overlong_penalty` to the raw reward.
        buffer_len: L_cache of the soft punishment; not looked at when it is off.
        penalty_factor: of the soft punishment; not looked at when it is off.
        hard: the reward of a truncated sample is -1.
        filter_truncated: overlong filtering. Truncated samples leave the loss, but keep their reward: they still
            count in the statistics of the group.

    Raises ValueError: soft and hard together."""
    if soft and hard:
        raise ValueError("the soft and the hard overlong punishment exclude each other")

    def shape(sample: Sample) -> Sample:
        if not sample.scored:
            return replace(sample, shaped_reward=math.nan, in_loss=False)
        reward = sample.verdict.value
        if soft:
            reward += overlong_penalty(
                sample.length,
                max_response_length=max_response_length,
                buffer_len=buffer_len,
                penalty_factor=penalty_factor,
            )
        if hard and sample.truncated:
            reward = HARD_PUNISHMENT
        return replace(sample, shaped_reward=reward, in_loss=not (filter_truncated and sample.truncated))

    return replace(group, samples=tuple(shape(s) for s in group.samples))


def subtract_kl(group: Group, kl: Sequence[float], *, coef: float) -> Group:
    """A copy of ``group`` with ``coef`` times the KL of each sample taken off its shaped reward (KL in the reward).

    Comes between :func:`shape_rewards` and the advantage, so that the group is normalised with the KL inside.

    Args:
        group: with shaped rewards.
        kl: for each *scored* sample, in order, the KL to the reference policy summed over its tokens
            (``kl.sample_kl``).
        coef: beta.

    Raises ValueError: not one KL per scored sample.
    """
    if len(kl) != len(group.scored):
        raise ValueError(f"draw {group.draw}: {len(kl)} KLs for {len(group.scored)} scored samples")
    left = iter(kl)
    samples = (replace(s, shaped_reward=s.shaped_reward - coef * next(left)) if s.scored else s for s in group.samples)
    return replace(group, samples=tuple(samples))
