"""Our objective against the loss of TRL's GRPOTrainer on random numbers: value and gradient, to 1e-5.

Both are called, neither is written down again. One optimizer step uses the whole generation batch, where TRL's divisor
(the tokens of the generation batch) and ours (those of the optimizer mini-batch) are the same. What differs by design,
and so is not compared here, is in the ``STATED`` table of TRL's adapter: the divisor of a batch that is cut into
several optimizer steps, wholly masked responses in a mean over responses, and masking by importance ratio.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conformance.adapters.dapo import DapoAdapter
from conformance.adapters.trl import TrlAdapter
from conformance.contract import Correction, LossBatch
from random_batches import random_batch

from dapo.algorithm.kl import kl_estimate

TOLERANCE = 1e-5
CUTS = {"whole": None, "halves": [[0, 3, 5, 6], [1, 2, 4, 7]], "single": [[i] for i in range(8)]}
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "dapo": {"aggregation": "token-mean"},
    "grpo": {"aggregation": "seq-mean-token-mean"},
    "dr_grpo": {"aggregation": "constant", "constant": 16},
    "luspo": {"aggregation": "seq-mean-token-sum"},
}


def _same(batch: LossBatch) -> None:
    ours, theirs = DapoAdapter().loss(batch), TrlAdapter().loss(batch)
    assert math.isfinite(ours["loss"])
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=TOLERANCE)
    assert any(any(row) for row in ours["gradient"]), "nothing was compared: the gradient is 0 everywhere"
    for our_row, their_row in zip(ours["gradient"], theirs["gradient"], strict=True):
        torch.testing.assert_close(torch.tensor(our_row), torch.tensor(their_row), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("masked", [0.0, 0.3])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_every_loss_type_under_every_cut(loss_type: str, cut: str, masked: float) -> None:
    _same(random_batch(1, masked=masked, micro_batches=CUTS[cut], **AGGREGATIONS[loss_type]))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_many_batches(loss_type: str, seed: int) -> None:
    _same(random_batch(10 + seed, responses=16, spread=0.6, **AGGREGATIONS[loss_type]))


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.2, 0.2), (0.1, 0.5), (0.0, 0.0)])
def test_decoupled_clip(low: float, high: float) -> None:
    _same(random_batch(2, clip_low=low, clip_high=high))


@pytest.mark.parametrize("c", [1.5, 3.0, 10.0])
def test_dual_clip_is_delta(c: float) -> None:
    _same(random_batch(3, spread=1.5, clip_c=c))


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_kl_k3_in_the_loss(loss_type: str) -> None:
    """Without TRL's ``use_bias_correction_kl``, which multiplies the KL by the ratio."""
    _same(random_batch(4, kl_coef=0.3, **AGGREGATIONS[loss_type]))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("cap", [1.2, 3.0])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_truncated_importance_sampling(loss_type: str, cap: float, level: Any) -> None:
    correction = Correction("truncate", level, cap=cap)
    _same(random_batch(5, masked=0.2, correction=correction, **AGGREGATIONS[loss_type]))


@pytest.mark.parametrize("masked", [0.0, 0.3])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.2, 0.28)])
def test_gspo(low: float, high: float, cut: str, masked: float) -> None:
    settings: dict[str, Any] = {"objective": "gspo", "aggregation": "seq-mean-token-mean"}
    _same(random_batch(11, clip_low=low, clip_high=high, masked=masked, micro_batches=CUTS[cut], **settings))


@pytest.mark.parametrize("masked", [0.0, 0.3])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("high", [0.28, 4.0])
def test_cispo(high: float, cut: str, masked: float) -> None:
    settings: dict[str, Any] = {"objective": "cispo", "clip_low": 1.0, "clip_high": high, "spread": 0.9}
    _same(random_batch(12, masked=masked, micro_batches=CUTS[cut], **settings))


def test_everything_at_once() -> None:
    settings: dict[str, Any] = {"clip_c": 2.0, "kl_coef": 0.1, "correction": Correction("truncate", "token", cap=1.5)}
    _same(random_batch(6, spread=0.8, masked=0.3, micro_batches=CUTS["halves"], **settings))


def test_the_comparison_sees_a_wrong_clip() -> None:
    """The tests above can fail: with another border on one side they do."""
    ours = DapoAdapter().loss(random_batch(7, clip_high=0.28))
    theirs = TrlAdapter().loss(random_batch(7, clip_high=0.2))
    assert abs(ours["loss"] - theirs["loss"]) > 100 * TOLERANCE


def test_k3_has_the_value_that_the_loss_adds() -> None:
    """The KL of ``dapo.algorithm.kl`` is what TRL adds to the loss of a batch without advantages."""
    plain = random_batch(8, kl_coef=1.0)
    batch = LossBatch(
        logprobs=plain.logprobs, reference_logprobs=plain.reference_logprobs, advantages=[0.0] * 8, kl_coef=1.0
    )
    assert plain.reference_logprobs is not None
    flat = [torch.tensor([x for row in rows for x in row]) for rows in (plain.logprobs, plain.reference_logprobs)]
    assert float(kl_estimate(flat[0], flat[1], "k3").mean()) == pytest.approx(
        TrlAdapter().loss(batch)["loss"], abs=1e-5
    )
