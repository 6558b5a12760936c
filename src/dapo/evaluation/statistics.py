"""Estimates over k samples per prompt: avg@k, pass@j, maj@j, and how far each may be off. Numbers in, numbers out.

All are means over prompts of a value per prompt, so that each prompt weighs the same however many of its samples have a
verdict. A prompt with fewer verdicts n than the j asked for is taken with j = n, a lower bound for pass@j: leaving it
out would choose prompts by how their scoring went. Prompts without any verdict are the caller's to leave out.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import variance

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

RESAMPLES = 2000  # bootstrap resamples of an interval
LARGEST_EXACT_VOTE = 256
"""Votes of a prompt up to which the expectation over subsets is computed; its cost grows with their cube."""
_CHUNK = 4_000_000  # numbers held at once by the bootstrap


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts and its 95% interval; without one where the prompts do not show how far they vary."""

    value: float
    low: float | None = None
    high: float | None = None

    def text(self, form: str) -> str:
        """``0.95 (0.92 to 0.97)``; without an interval the value alone."""
        if self.low is None or self.high is None:
            return format(self.value, form)
        return f"{self.value:{form}} ({self.low:{form}} to {self.high:{form}})"


@dataclass(frozen=True, slots=True)
class Votes:
    """What the samples of one prompt say.

    ``verdicts``: samples with a verdict (n). ``right``: those that are correct: one class, however each is written.
    ``wrong``: the sizes of the classes of equal wrong answers. Samples without an answer are in ``verdicts`` alone.
    """

    verdicts: int
    right: int
    wrong: tuple[int, ...]


def budgets(samples: int) -> list[int]:
    """The j that pass@j and maj@j are reported for: powers of two below ``samples``, and ``samples``."""
    return [*(2**e for e in range((samples - 1).bit_length())), samples] if samples > 0 else []


def count_votes(correct: Sequence[bool], answers: Sequence[Hashable | None]) -> Votes:
    """Votes from the verdicts of one prompt and, for each, the class of its answer (None: it has none)."""
    wrong = Counter(a for is_right, a in zip(correct, answers, strict=True) if not is_right and a is not None)
    return Votes(len(correct), sum(map(bool, correct)), tuple(sorted(wrong.values(), reverse=True)))


def pass_at(verdicts: Counts, right: Counts, budget: int) -> Values:
    """pass@j of each prompt, 1 - C(n - c, j) / C(n, j): the chance that j of its samples hold a correct one.

    As the product of the chances that each of j samples drawn one after the other is wrong, all within [0, 1]: nothing
    can overflow.

    Args:
        verdicts: n of each prompt, ``[P]``, at least 1.
        right: c of each prompt, ``[P]``.
        budget: j.

    Returns:
        ``[P]``, unbiased where n >= j.
    """
    drawn = np.arange(budget)[None, :]
    left = np.maximum(verdicts[:, None] - drawn, 1)
    wrong_left = np.clip(verdicts[:, None] - right[:, None] - drawn, 0, None)
    wrong = np.where(drawn < verdicts[:, None], wrong_left / left, 1.0)
    return np.asarray(1.0 - wrong.prod(axis=1), dtype=np.float64)


def majority_at(votes: Votes, budget: int) -> float | None:
    """maj@j of one prompt: the chance that the largest class of answers among j of its samples is the correct one.

    The exact expectation over all subsets of j samples, and over ties: of t classes that are largest together each is
    taken with chance 1/t. When no sample has an answer the vote is lost. None for subsets of more than
    :data:`LARGEST_EXACT_VOTE` samples.
    """
    budget = min(budget, votes.verdicts)
    if not votes.right:
        return 0.0
    if budget == votes.verdicts:
        largest = max((votes.right, *votes.wrong))
        return float(votes.right == largest) / (1 + votes.wrong.count(largest))
    if votes.verdicts > LARGEST_EXACT_VOTE:
        return None
    return float(_expected_majority(votes)[budget])


@functools.lru_cache(maxsize=4096)
def _expected_majority(votes: Votes) -> Values:
    """maj@j for j = 0 .. n, by counting subsets.

    With m correct samples in the subset, a class of w wrong ones may have i < m in it, in C(w, i) ways each, or m as a
    tie. The ways are the coefficients of polynomials in x (samples taken) and y (ties), one for each class.
    """
    n, c = votes.verdicts, votes.right
    silent = n - c - sum(votes.wrong)
    subsets = np.array([float(math.comb(n, j)) for j in range(n + 1)])
    won = np.zeros(n + 1)
    for m in range(1, c + 1):
        ties = sum(w >= m for w in votes.wrong)
        ways = np.zeros((n + 1, ties + 1))  # [samples taken, ties]
        ways[: silent + 1, 0] = [math.comb(silent, i) for i in range(silent + 1)]
        for w in votes.wrong:
            ways = _times_class(ways, w, m)
        chance = ways @ (1.0 / (1.0 + np.arange(ties + 1)))
        won[m:] += math.comb(c, m) * chance[: n + 1 - m]
    return np.asarray(won / subsets, dtype=np.float64)


def _times_class(ways: Values, size: int, limit: int) -> Values:
    """``ways`` with a further class of ``size`` samples, at most ``limit`` of which are taken."""
    out = np.zeros_like(ways)
    for taken in range(min(size, limit) + 1):
        shifted = math.comb(size, taken) * ways[: len(ways) - taken]
        if taken < limit:
            out[taken:] += shifted
        else:
            out[taken:, 1:] += shifted[:, :-1]
    return out


def estimate_means(values: Values, shares: Sequence[bool], seed: int = 0, resamples: int = RESAMPLES) -> list[Estimate]:
    """Mean over prompts of each column and its 95% interval; without one for fewer than two prompts.

    Prompts, whose samples are not independent, are drawn with replacement, the same ones for all columns: a percentile
    bootstrap. It is too narrow over a few zeros and ones, and without a width where all prompts have the same value:
    shares have Wilson's interval there, with a trial for each prompt, and other values that are all the same none. It
    is too narrow where few prompts are partly right, too: shares have the outer bounds of both.
    ``values``: ``[P, M]``, a row for each prompt, at least one. ``shares``: of each column, whether it holds shares.
    """
    prompts, means = len(values), values.mean(axis=0)
    if prompts < 2:
        return [Estimate(float(mean)) for mean in means]
    drawn = _resampled_sums(values, seed, resamples) / prompts
    found = []
    for column, mean, resampled, share in zip(values.T, means, drawn.T, shares, strict=True):
        same = column.min() == column.max()
        if share and (same or np.isin(column, (0.0, 1.0)).all()):
            found.append(estimate_share(float(column.sum()), prompts))
        elif same:
            found.append(Estimate(float(mean)))
        else:  # rounding in the sums must not put a mean outside of its own interval
            bounds = [mean, *np.quantile(resampled, [0.025, 0.975])]
            if share:  # with the trials that are worth as much; as few answers tell no spread, two prompts all right
                # and two all wrong are added, as Agresti and Coull do
                more = np.concatenate([column, [0.0, 0.0, 1.0, 1.0]])
                trials = float(prompts * more.mean() * (1 - more.mean()) / more.var())
                wilson = estimate_share(float(mean) * trials, trials)
                bounds += [wilson.low, wilson.high]
            found.append(Estimate(float(mean), float(min(bounds)), float(max(bounds))))
    return found


def _resampled_sums(values: Values, seed: int, resamples: int = RESAMPLES) -> Values:
    """Sums over as many prompts, drawn with replacement: ``[P, M]`` to ``[resamples, M]``."""
    prompts, columns = values.shape
    rng, drawn = np.random.default_rng(seed), np.empty((resamples, columns))
    step = max(1, _CHUNK // prompts)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        picks = rng.integers(0, prompts, (rows, prompts)) + np.arange(rows)[:, None] * prompts
        drawn[start : start + rows] = np.bincount(picks.ravel(), minlength=rows * prompts).reshape(rows, -1) @ values
    return drawn


def estimate_ratio(above: Values, below: Values, seed: int = 0) -> Estimate:
    """Of the sums of two values of each prompt, ``[P]`` each, with its 95% interval by bootstrap over prompts. Draws in
    which the sum of ``below`` is not above 0 are left out; not a number: it is not above 0 in the first place."""
    over, under = float(above.sum()), float(below.sum())
    if under <= 0:
        return Estimate(math.nan)
    drawn = _resampled_sums(np.stack([above, below], axis=1), seed)
    low, high = np.quantile(np.divide(*drawn[drawn[:, 1] > 0].T), [0.025, 0.975])
    return Estimate(over / under, float(low), float(high))


def estimate_share(successes: float, trials: float) -> Estimate:
    """A share and its 95% Wilson interval: it has a width where all trials went the same way, too.
    ``trials``: at least one, independent of each other. ``successes``: a sum of shares where a trial has one."""
    z = 1.959964
    share, spread = successes / trials, z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(max(0.0, share * (1 - share)) / trials + spread / trials / 4) / (1 + spread)
    # at 0 and 1 one of the bounds is the share itself, but for rounding
    return Estimate(share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def calibration_error(margins: Values, bins: int = 10) -> float:
    """Expected calibration error of sigmoid(margin) as the probability that a better response has the higher score:
    over bins of the confidence, from 1/2 to 1, the mean distance of confidence and share that is right.
    ``margins``: ``[P]``, the score of the better one less that of the other; at least one."""
    confidence = 1 / (1 + np.exp(-np.abs(margins)))
    right = (margins > 0) + 0.5 * (margins == 0)
    place = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    gaps = [abs(float(np.sum((confidence - right)[place == k]))) for k in range(bins)]
    return sum(gaps) / len(margins)


T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for 95%, by degrees of freedom from 1; for more of them the last one, which is a little wide."""

Noise = tuple[float, int]


def noise(groups: Iterable[Sequence[float]]) -> Noise | None:
    """The standard deviation between seeds, pooled over recipes, and its degrees of freedom: with two seeds, a recipe's
    own spread says nothing. None: no recipe has two seeds."""
    known = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in known)
    if not freedom:
        return None
    return math.sqrt(sum((len(group) - 1) * variance(group) for group in known) / freedom), freedom


def half(found: Noise, *counts: int) -> float:
    """Half of the 95% interval of the mean of so many seeds, or of the difference of two such means."""
    deviation, freedom = found
    return T_95[min(freedom, len(T_95)) - 1] * deviation * math.sqrt(sum(1 / count for count in counts))
