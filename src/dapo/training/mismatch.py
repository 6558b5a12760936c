"""How far engine and trainer disagree about the same tokens under the same weights.

Both compute log pi(token) of one policy, so any difference is numerical noise, or a fault: another temperature, other
token ids, weights that did not arrive. Only tokens of the trainer's own version count; once the weights have moved the
difference is what was learned.
"""

from __future__ import annotations

import numpy as np
import torch

from dapo.algorithm.kl import kl_estimate
from dapo.records import TokenBatch
from dapo.training.micro_batch import upload
from dapo.training.update_report import Mismatch


def measure_mismatch(batch: TokenBatch, logprobs: torch.Tensor, version: int) -> Mismatch:
    """Compare on the response tokens that were sampled under ``version``.

    Args:
        batch: R response tokens, with the engine's log-probabilities.
        logprobs: ``[R]``, the trainer's, under the weights of ``version``; no gradient.
    """
    same = np.flatnonzero(batch.versions == version)
    if not len(same):
        return Mismatch()
    engine = upload(batch.behaviour_logprobs[same], logprobs.device).double()
    trainer = logprobs[upload(same, logprobs.device)].double()
    absolute = (engine - trainer).abs()
    sums = torch.stack([absolute.sum(), absolute.max(), kl_estimate(engine, trainer, "k3").sum()])
    return Mismatch(len(engine), *sums.tolist())
