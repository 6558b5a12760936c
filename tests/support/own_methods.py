"""Methods as a user writes them into a file of their own; docs/extending.md shows the first one."""

from __future__ import annotations

import torch

from dapo.algorithm.objective import average, per_unit


class Gspo:
    """Group sequence policy optimization (arXiv 2507.18071): the ratio is that of the whole response, by its length."""

    unit = "sequence"

    def __init__(self, low=3e-4, high=4e-4):
        self.low, self.high = low, high

    def __call__(self, logprobs, entropy, inputs):
        known = inputs.selected()  # masked tokens hold neutral numbers
        log_ratio = torch.where(known.mask, logprobs, 0) - known.proximal_logprobs
        sample, total = per_unit(log_ratio, known.sample_ids)
        _, tokens = per_unit(known.mask.float(), known.sample_ids)
        s = (total / tokens.clamp(min=1)).exp()[sample]  # of each token's response
        a = known.advantages
        loss = torch.maximum(-s * a, -s.clamp(1 - self.low, 1 + self.high) * a)
        clipped = torch.where(a > 0, s > 1 + self.high, s < 1 - self.low)
        return (known.weights * loss).sum(), {"clipped": average(clipped, known.mask), "s": average(s, known.mask)}


def preference(logprobs, entropy, inputs, beta=0.1):
    """Direct preference optimization: of each pair the sample with the positive advantage is the better one."""
    known = inputs.selected()
    gain = torch.where(known.mask, logprobs, 0) - known.reference_logprobs
    pair, margin = per_unit(beta * known.advantages.sign() * gain, known.group_ids)
    _, weight = per_unit(known.weights, known.group_ids)  # 1 / pairs, with loss_agg_mode=seq-mean-token-mean
    loss = torch.nn.functional.softplus(-margin)  # -log sigmoid
    return (weight * loss).sum(), {"right": average((margin > 0)[pair], known.mask)}


preference.unit = "pair"


def centred(rewards, epsilon):
    """A user's advantage: the distance to the median."""
    return rewards - rewards.median()
