"""How far engine and trainer disagree about the same tokens under the same weights.

Both compute log pi(token) of one policy, so any difference is numerical noise, or a fault: another temperature, other
token ids, weights that did not arrive. Only samples wholly of the trainer's own version count: once the weights have
moved the difference is what was learned, and the later tokens of a sample that was continued under new weights stand on
keys and values of the older ones.
"""

from __future__ import annotations

import numpy as np
import torch

from dapo.algorithm.kl import kl_estimate
from dapo.model.placement import upload
from dapo.records import TokenBatch
from dapo.training.update_report import Mismatch

TAIL = (0.9, 1.1)
"""Ratios pi_trainer / pi_engine outside of these are the tail: the mean of many tokens may hide it."""


def measure_mismatch(batch: TokenBatch, logprobs: torch.Tensor, version: int) -> Mismatch:
    """Compare on the responses all of whose tokens were sampled under ``version``.

    Args:
        batch: R response tokens, with the engine's log-probabilities.
        logprobs: ``[R]``, the trainer's, under the weights of ``version``; no gradient.
    """
    sample_ids = batch.sample_ids
    others = np.bincount(sample_ids, batch.sampled & (batch.versions != version), minlength=batch.num_samples)
    same = np.flatnonzero((others[sample_ids] == 0) & batch.sampled)
    if not len(same):
        return Mismatch()
    engine = upload(batch.behaviour_logprobs[same], logprobs.device).double()
    trainer = logprobs[upload(same, logprobs.device)].double()
    absolute = (engine - trainer).abs()
    ratio = (trainer - engine).exp()
    tail = ~((ratio >= TAIL[0]) & (ratio <= TAIL[1]))  # NaN is in it, too
    sums = torch.stack([absolute.sum(), absolute.max(), kl_estimate(engine, trainer, "k3").sum(), tail.double().sum()])
    return Mismatch(len(engine), *sums.tolist())
