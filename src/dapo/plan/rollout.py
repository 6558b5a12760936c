"""How long the engine of one GPU samples for a step: lengths are drawn, rows are filled, and each decoding step costs what
its bytes and products do.

Pure arithmetic. Lengths are lognormal, cut at the limit; prompts are drawn as dynamic sampling does (first as many as are
wanted, then for those that are filtered), so that the tail of long samples and of late prompts is in it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

SPREAD = 0.35
"""Standard deviation of the logarithm of a response's length: 0.353 in 2,048 responses to GSM8K (bench/)."""
STRETCH = 32
"""Decoding steps between two looks of the host."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """Seconds of a decoding step: ``step`` however many rows, and more for each row and each token of context."""

    step: float
    row: float
    token: float
    prompt_token: float
    """Of reading a prompt in."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What one engine samples for a step.

    Attributes:
        groups: to be kept, each of ``samples`` responses to a prompt of ``prompt`` tokens.
        keep: share of the groups drawn that is kept.
        length, limit: tokens of a response, on average and at most.
        rows: sequences at once, at most.
    """

    groups: int
    samples: int
    keep: float
    prompt: int
    length: float
    limit: int
    rows: int


@dataclass(frozen=True, slots=True)
class Sampled:
    seconds: float
    tokens: int
    drawn: int


def sample(work: Sampling, cost: Decoding, ahead: bool = False, seed: int = 0) -> Sampled:
    """One step's sampling. ``ahead``: of an engine that never runs empty, as the next step's prompts are drawn already."""
    if not ahead:
        return _sample(work, cost, work.groups, seed)
    one, two = (_sample(work, cost, rounds * work.groups, seed) for rounds in (2, 4))
    return Sampled((two.seconds - one.seconds) / 2, (two.tokens - one.tokens) // 2, (two.drawn - one.drawn) // 2)


def _sample(work: Sampling, cost: Decoding, wanted: int, seed: int) -> Sampled:
    stretch = max(STRETCH, work.limit // 128)
    random = np.random.default_rng(seed)
    drawn = kept = seconds = tokens = 0.0
    queue: list[int] = []  # groups by number, once for each sample that is to begin
    missing: dict[int, int] = {}  # samples of a group that are not there yet
    left, done, group = (np.zeros(0, dtype=np.int64) for _ in range(3))
    middle = np.log(work.length) - SPREAD**2 / 2
    while True:
        open_groups = len(missing)
        rate = work.keep if drawn else 1.0
        for _ in range(max(0, ceil((wanted - kept) / rate - open_groups - 1e-9))):
            number = int(drawn)
            drawn += 1
            missing[number] = work.samples
            queue += [number] * work.samples
            seconds += work.prompt * cost.prompt_token
        if begun := queue[: work.rows - len(left)]:
            del queue[: len(begun)]
            new = np.exp(random.normal(middle, SPREAD, len(begun))).clip(1, work.limit).astype(np.int64)
            left, done = np.append(left, new), np.append(done, np.zeros_like(new))
            group = np.append(group, np.array(begun, dtype=np.int64))
        steps = min(stretch, int(left.max()))
        context = float((work.prompt + done + np.minimum(left, steps) / 2).sum())
        seconds += steps * (cost.step + len(left) * cost.row + context * cost.token)
        tokens += int(np.minimum(left, steps).sum())
        left, done = left - steps, done + steps
        for number in group[left <= 0].tolist():
            missing[number] -= 1
            if not missing[number]:
                del missing[number]
                kept += random.random() < work.keep
        left, done, group = left[left > 0], done[left > 0], group[left > 0]
        if kept >= wanted:
            return Sampled(float(seconds), int(tokens), int(drawn))
