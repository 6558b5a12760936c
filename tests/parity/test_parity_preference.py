"""Our losses over preferences against those of TRL on random numbers: value and gradient, to 1e-5. TRL's own functions
are called, with what they read of a trainer and a model in its place; neither is written down again."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss
from trl import DPOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer

from dapo.algorithm.preference import PairObjective, ScoreObjective
from dapo.data.examples import Example
from dapo.stages.batches import demonstrations, ranked_inputs, rankings
from dapo.stages.sft import cross_entropy, inputs_of

CPU = torch.device("cpu")
PAIRS, BETA = 6, 0.3


def _pairs(seed: int) -> tuple[list[Example], list[float]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, (PAIRS, 2))
    examples = [Example((1, 2), tuple(tuple(range(n)) for n in pair), (0.0, 1.0)) for pair in lengths]
    return examples, rng.normal(-8, 3, 2 * PAIRS).tolist()


def _trainer(**fields: Any) -> Any:
    def same(values: Any) -> Any:
        return values

    accelerator = SimpleNamespace(device=CPU, gather=same, gather_for_metrics=same)
    fields |= {"accelerator": accelerator, "beta": BETA, "_metrics": {"train": defaultdict(list)}, "alpha": 0.0}
    return SimpleNamespace(model=SimpleNamespace(training=True), _total_train_tokens=0, _tp_size=1, **fields)


def _padded(rows: list[torch.Tensor]) -> torch.Tensor:
    """``[2B, L]``: first all chosen responses, then all rejected ones."""
    return torch.nn.utils.rnn.pad_sequence(rows[0::2] + rows[1::2], batch_first=True)


def _trl_dpo(logprobs: torch.Tensor, lengths: list[int], reference: list[float], kinds: dict[str, float]) -> Any:
    rows = list(torch.split(logprobs, lengths))
    mask = _padded([torch.ones_like(row) for row in rows]).detach().long()
    whole = torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask], 1)  # the prompt's last token
    outputs = SimpleNamespace(
        log_probs=_padded(rows),
        entropy=torch.zeros(mask.shape),
        mean_logits=torch.zeros(mask.shape),
        is_top1=torch.zeros(mask.shape, dtype=torch.bool),
    )
    self = _trainer(
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        loss_types=list(kinds),
        loss_weights=list(kinds.values()),
        label_smoothing=0.0,
    )
    inputs = {
        "input_ids": whole,
        "attention_mask": whole,
        "completion_mask": whole,
        "ref_chosen_logps": torch.tensor(reference[0::2]),
        "ref_rejected_logps": torch.tensor(reference[1::2]),
    }
    return DPOTrainer._compute_loss(self, lambda **_: outputs, inputs, False)


def _same(ours: Any, theirs: Any, seed: int, lengths: list[int]) -> None:
    numbers = torch.from_numpy(np.random.default_rng(seed).normal(-2, 1, sum(lengths)).astype(np.float32))
    found = []
    for loss_of in (ours, theirs):
        logprobs = numbers.clone().requires_grad_()
        loss = loss_of(logprobs)
        loss.backward()
        found.append((loss.item(), logprobs.grad))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    assert found[0][1].abs().max() > 1e-4
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "nll"), [("sigmoid", 0.0), ("ipo", 0.0), ("sigmoid", 0.2)])
def test_dpo_ipo_and_the_nll_term(kind: Any, nll: float, seed: int) -> None:
    examples, reference = _pairs(seed)
    batch = rankings(examples, nll=nll, reference=reference)
    inputs, lengths = ranked_inputs(batch, CPU), batch.response_lengths.tolist()
    kinds = {kind: 1.0} | ({"sft": nll} if nll else {})
    _same(
        lambda lp: PairObjective(kind, BETA)(lp, torch.zeros_like(lp), inputs)[0],
        lambda lp: _trl_dpo(lp, lengths, reference, kinds),
        seed,
        lengths,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "smoothing", "gamma"), [("sigmoid", 0.1, 0.0), ("simpo", 0.0, 0.5)])
def test_label_smoothing_and_simpo(kind: Any, smoothing: float, gamma: float, seed: int) -> None:
    """Of CPO's trainer, which has both: its sigmoid loss is DPO's with a reference of 0."""
    examples, _ = _pairs(seed)
    batch = rankings(examples)
    inputs, lengths = ranked_inputs(batch, CPU), batch.response_lengths.tolist()
    self = _trainer(loss_type=kind, label_smoothing=smoothing, simpo_gamma=gamma)

    def theirs(logprobs: torch.Tensor) -> torch.Tensor:
        rows = torch.split(logprobs, lengths)
        values = torch.stack([row.mean() if kind == "simpo" else row.sum() for row in rows])
        losses: torch.Tensor = CPOTrainer.cpo_loss(self, values[0::2], values[1::2])[0]
        return losses.mean()

    objective = PairObjective(kind, BETA, smoothing, gamma)
    _same(lambda lp: objective(lp, torch.zeros_like(lp), inputs)[0], theirs, seed, lengths)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("margin", "centring"), [(0.0, None), (0.7, None), (0.0, 0.01)])
def test_reward_models(margin: float, centring: float | None, seed: int) -> None:
    examples = [Example((1,), ((2,), (3,)), (0.0, 1.0), margin * k) for k in range(PAIRS)]
    inputs = ranked_inputs(rankings(examples, scored=True), CPU)

    def theirs(scores: torch.Tensor) -> torch.Tensor:
        logits = torch.cat([scores[0::2], scores[1::2]])[:, None]
        self = _trainer(args=SimpleNamespace(center_rewards_coefficient=centring))
        given = {"attention_mask": torch.ones(2 * PAIRS, 1)}
        given |= {"margin": torch.tensor([one.margin for one in examples])} if margin else {}
        found: torch.Tensor = RewardTrainer.compute_loss(self, lambda **_: SimpleNamespace(logits=logits), given)
        return found

    objective = ScoreObjective(centring or 0.0)
    _same(lambda s: objective(s, torch.zeros_like(s), inputs)[0], theirs, seed, [1] * 2 * PAIRS)


def test_demonstrations() -> None:
    """TRL's SFTTrainer leaves the loss to Transformers: the mean over all response tokens of the batch, padded."""
    rng = np.random.default_rng(0)
    examples = [Example((1, 2), (tuple(rng.integers(0, 9, n).tolist()),)) for n in (1, 5, 8)]
    batch, width, vocabulary = demonstrations(examples), 10, 9
    labels = torch.full((3, width), -100)
    for row, one in zip(labels, examples, strict=True):
        row[2 : one.longest] = torch.tensor(one.responses[0])
    numbers = torch.from_numpy(rng.normal(0, 2, (3, width, vocabulary)).astype(np.float32))

    def ours(logits: torch.Tensor) -> torch.Tensor:
        rows = [logits[k, 1 : one.longest - 1] for k, one in enumerate(examples)]  # what predicts each response token
        logprobs = torch.cat(rows).log_softmax(-1)
        targets = torch.tensor([token for one in examples for token in one.responses[0]])
        return cross_entropy(logprobs.gather(1, targets[:, None])[:, 0], logprobs, inputs_of(batch, CPU))[0]

    found = []
    for loss_of in (ours, lambda logits: ForCausalLMLoss(logits, labels, vocabulary)):
        logits = numbers.clone().requires_grad_()
        loss = loss_of(logits)
        loss.backward()
        found.append((loss.item(), logits.grad))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=0)
