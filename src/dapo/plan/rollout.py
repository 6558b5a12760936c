"""How long the engine of one GPU samples for a step: rows are filled, and each decoding step costs what its bytes and
products do. Pure arithmetic.

Lengths are lognormal, cut at the limit; prompts are drawn as dynamic sampling does (as many as are wanted, then others
for those that are filtered), so that the tail of long samples and of late prompts is in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import numpy as np

SPREAD = 0.35
"""Standard deviation of the logarithm of a response's length: 0.353 in 2,048 responses to GSM8K (bench/)."""
STRETCH = 32
"""Decoding steps between two looks of the host; more of them where responses are long or there are many."""
MOST_STRETCHES = 5000


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
    ``groups``: to be kept, each of ``samples`` responses to a prompt of ``prompt`` tokens. ``keep``: share of the
    groups drawn that is kept. ``length``, ``limit``: tokens of a response, on average and at most. ``rows``: sequences
    at once, at most."""

    groups: int
    samples: int
    keep: float
    prompt: int
    length: float
    limit: int
    rows: int


@cache
def sample(work: Sampling, cost: Decoding, ahead: bool = False, worlds: int = 4) -> tuple[float, float, float]:
    """Seconds, tokens and groups drawn, means over some worlds. ``ahead``: of an engine that never runs empty, as
    prompts of the next step are drawn already."""

    def mean(wanted: int) -> Any:
        return np.mean([_sample(work, cost, wanted, seed) for seed in range(worlds)], axis=0)

    found = (mean(4 * work.groups) - mean(2 * work.groups)) / 2 if ahead else mean(work.groups)
    return float(found[0]), float(found[1]), float(found[2])


def _sample(work: Sampling, cost: Decoding, wanted: int, seed: int) -> tuple[float, int, int]:
    tokens_a_row = wanted * work.samples * work.length / work.keep / work.rows
    stretch = max(STRETCH, work.limit // 128, int(tokens_a_row / MOST_STRETCHES))
    random = np.random.default_rng(seed)
    spread = min(SPREAD, float(np.log(work.limit / work.length)) / 2)  # the cut must not change the mean
    seconds, tokens, drawn, kept = 0.0, 0, 0, 0
    queue: list[int] = []  # groups by number, once for each sample that is to begin
    missing: dict[int, int] = {}  # samples of a group that are not there yet
    left, done, group = (np.zeros(0, dtype=np.int64) for _ in range(3))
    while kept < wanted:
        more = ceil((wanted - kept) / (work.keep if drawn else 1.0)) - len(missing)
        for number in range(drawn, drawn + max(0, more)):
            missing[number] = work.samples
            queue += [number] * work.samples
            seconds += work.prompt * cost.prompt_token
        drawn += max(0, more)
        begun = np.array(queue[: work.rows - len(left)], dtype=np.int64)
        del queue[: len(begun)]
        new = work.length * np.exp(random.normal(-(spread**2) / 2, spread, len(begun)))
        left = np.append(left, new.clip(1, work.limit).astype(np.int64))
        done, group = np.append(done, np.zeros_like(begun)), np.append(group, begun)
        steps = min(stretch, int(left.max()))
        made = np.minimum(left, steps)
        seconds += steps * (
            cost.step + len(left) * cost.row + float((work.prompt + done + made / 2).sum()) * cost.token
        )
        tokens += int(made.sum())
        left, done = left - steps, done + steps
        for number in group[left <= 0].tolist():
            missing[number] -= 1
            if not missing[number]:
                del missing[number]
                kept += random.random() < work.keep
        going = left > 0
        left, done, group = left[going], done[going], group[going]
    return seconds, tokens, drawn
