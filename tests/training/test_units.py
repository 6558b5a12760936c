"""Objectives that see whole responses or pairs: worked values, and the gradient of a plain padded implementation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import (
    distance,
    gradient,
    make_group,
    make_inputs,
    make_sample,
    make_trainer,
    packed,
    random_groups,
    weights_of,
    with_budget,
)

from dapo.algorithm.objective import DapoObjective
from dapo.errors import ConfigError
from dapo.training.faults import diagnose
from helpers import random_model
from own_methods import Gspo, preference

SETTINGS = settings(max_examples=25, deadline=None)
MODE = "seq-mean-token-mean"


def inputs_of(batch, reference=None):
    columns = {} if reference is None else {"reference": reference}
    return make_inputs(batch.with_columns(**columns), MODE)


# --- worked values ------------------------------------------------------------------------------------------------


def two_tokens(ratios, advantage):
    """Inputs of one response, and its log-probs at these log-ratios to the proximal policy."""
    inputs = inputs_of(packed([make_group(0, [1], [make_sample([2, 3], advantage=advantage)])]))
    return (inputs.proximal_logprobs + torch.tensor(ratios)).requires_grad_(), inputs


@pytest.mark.parametrize(
    ("ratios", "advantage", "loss", "slope"),
    [
        ([0.02, 0.04], -1.0, 1.030455, 1.030455 / 2),  # s = exp(0.03), not clipped from above where A < 0
        ([0.02, 0.04], 1.0, -1.0004, 0.0),  # clipped at 1 + 4e-4: no gradient
        ([-0.02, -0.04], -1.0, 1 - 3e-4, 0.0),
        ([-0.02, -0.04], 1.0, -math.exp(-0.03), -math.exp(-0.03) / 2),
        ([0.5, -0.5], 1.0, -1.0, -0.5),  # by token both would be clipped; s is 1
    ],
)
def test_the_ratio_of_a_response_is_clipped_as_a_whole(ratios, advantage, loss, slope):
    logprobs, inputs = two_tokens(ratios, advantage)
    found, statistics = Gspo()(logprobs, torch.zeros(2), inputs)
    found.backward()
    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad.tolist() == pytest.approx([slope] * 2, abs=1e-6)
    assert statistics["clipped"][0].item() == (2.0 if slope == 0 else 0.0)


def test_a_preference_is_the_worked_value():
    """Differences to the reference of 2 and -1 and beta 0.1 give a margin of 0.3 and a loss of 0.554355."""
    samples = [make_sample([2, 3], advantage=1.0), make_sample([4], advantage=-1.0)]
    batch = packed([make_group(0, [1], samples)])
    inputs = inputs_of(batch, np.full(3, -1.0, np.float32))
    logprobs = torch.tensor([0.5, -0.5, -2.0], requires_grad=True)  # differences 1.5 + 0.5 and -1
    loss, _ = preference(logprobs, torch.zeros(3), inputs)
    loss.backward()
    assert loss.item() == pytest.approx(0.554355, abs=1e-6)
    slope = 0.1 / (1 + math.exp(0.3))
    assert logprobs.grad.tolist() == pytest.approx([-slope, -slope, slope], abs=1e-6)


# --- the gradient of a plain implementation -----------------------------------------------------------------------


def padded_logprobs(model, batch):
    """Log-probs of each response through the unmodified model, one padded row per sequence."""
    ids = torch.zeros(batch.num_samples, int(batch.lengths.max()), dtype=torch.long)
    seen = torch.zeros_like(ids)
    for row, part in enumerate(np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1])):
        ids[row, : len(part)], seen[row, : len(part)] = torch.from_numpy(part), 1
    logits = model(input_ids=ids, attention_mask=seen).logits.log_softmax(-1)
    return [
        logits[row, prompt - 1 : length - 1].gather(1, ids[row, prompt:length, None])[:, 0]
        for row, (prompt, length) in enumerate(zip(batch.prompt_lengths, batch.lengths, strict=True))
    ]


def per_sample(batch, values):
    return torch.split(torch.from_numpy(values), batch.response_lengths.tolist())


def plain_gspo(model, batch):
    old, advantages, masks = (
        per_sample(batch, v) for v in (batch.behaviour_logprobs, batch.columns["advantages"], batch.mask)
    )
    losses = []
    for new, before, a, mask in zip(padded_logprobs(model, batch), old, advantages, masks, strict=True):
        if mask.any():
            s = (new - before)[mask].mean().exp()
            losses.append(-torch.minimum(s * a[0], s.clamp(1 - 0.2, 1 + 0.3) * a[0]))
    return torch.stack(losses).mean()


def plain_preference(model, batch):
    gains = [
        (new - ref).sum()
        for new, ref in zip(padded_logprobs(model, batch), per_sample(batch, batch.columns["reference"]), strict=True)
    ]
    losses = []
    for draw in np.unique(batch.draws):
        better, worse = np.flatnonzero(batch.draws == draw)
        if batch.columns["advantages"][batch.response_index(np.array([better]))][0] < 0:
            better, worse = worse, better
        losses.append(-torch.nn.functional.logsigmoid(0.1 * (gains[better] - gains[worse])))
    return torch.stack(losses).mean()


def plain_gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def pair():
    """The unmodified model and a trainer of the same weights."""
    return random_model("qwen2").requires_grad_(), make_trainer("qwen2")


@SETTINGS
@given(data=st.data())
def test_no_cut_or_order_changes_the_gradient_of_sequences(pair, data):
    model, trainer = pair
    lengths = st.lists(st.integers(0, 14), min_size=1, max_size=4)
    shape = data.draw(st.lists(st.tuples(st.integers(1, 6), lengths), min_size=1, max_size=4))
    masked = data.draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3))
    groups = random_groups(shape, data.draw(st.integers(0, 2**16)), lambda draw, index: (draw, index) not in masked)
    if not any(s.in_loss and s.length for g in groups for s in g.samples):
        return
    near = packed(groups)  # ratios near 1, so that some are clipped and some are not
    old = with_budget(trainer, 1000).logprobs(near).numpy() + np.random.default_rng(0).normal(
        0, 0.3, near.num_response_tokens
    )
    near = replace(near, behaviour_logprobs=old.astype(np.float32))
    expected = plain_gradient(model, plain_gspo(model, near))
    order = np.array(data.draw(st.permutations(range(near.num_samples))))
    batch = near.select(order)
    with_budget(trainer, int(batch.lengths.max()) + data.draw(st.integers(0, 60)))
    got = gradient(trainer, batch, inputs_of(batch), Gspo(0.2, 0.3)) if expected.norm() > 1e-6 else expected
    assert distance(got, expected) < 1e-4


@SETTINGS
@given(data=st.data())
def test_no_cut_or_order_changes_the_gradient_of_pairs(pair, data):
    model, trainer = pair
    length = st.integers(1, 12)
    shape = data.draw(st.lists(st.tuples(st.integers(1, 6), st.tuples(length, length)), min_size=1, max_size=4))
    groups = [
        replace(g, samples=tuple(replace(s, advantage=a) for s, a in zip(g.samples, (1.0, -1.0), strict=True)))
        for g in random_groups(shape, data.draw(st.integers(0, 2**16)))
    ]
    batch = packed(groups)
    batch = batch.select(np.array(data.draw(st.permutations(range(batch.num_samples)))))  # pairs lie apart
    rng = np.random.default_rng(1)
    batch = batch.with_columns(reference=rng.normal(-4, 1, batch.num_response_tokens).astype(np.float32))
    expected = plain_gradient(model, plain_preference(model, batch))
    largest = max(len(g.prompt.token_ids) + sum(s.length for s in g.samples) for g in groups)
    with_budget(trainer, largest + data.draw(st.integers(0, 60)))
    assert distance(gradient(trainer, batch, make_inputs(batch, MODE), preference), expected) < 1e-4


def test_chunks_of_the_head_do_not_change_the_gradient(monkeypatch):
    batch = packed(random_groups([(3, [5, 1, 9]), (1, [2, 0, 12])]))
    found = []
    for rows in (1000, 3):
        monkeypatch.setattr("dapo.training.policy.chunk_rows", lambda device, vocabulary, rows=rows: rows)
        trainer = make_trainer()
        report = trainer.update(batch, inputs_of(batch), Gspo(0.2, 0.3))
        found.append((weights_of(trainer), report.loss, report.logprobs, report.statistics))
    (whole, *one), (cut, *other) = found
    assert distance(cut, whole) < 1e-5 and one[0] == pytest.approx(other[0], rel=1e-5)
    np.testing.assert_allclose(one[1], other[1], rtol=1e-5, atol=1e-5)
    assert one[2]["s"] == pytest.approx(other[2]["s"], rel=1e-5)


def test_the_two_passes_give_the_gradient_of_one():
    """The objective of tokens as if it needed to see sequences; the entropy has a slope, too."""

    def both(logprobs, entropy, inputs):
        loss, statistics = DapoObjective()(logprobs, entropy, inputs)
        return loss - 0.1 * (inputs.weights * entropy).sum(), statistics

    batch = packed(random_groups([(3, [5, 1, 9]), (1, [2, 0, 12])]))
    once = gradient(make_trainer(), batch, make_inputs(batch), both)
    both.unit = "sequence"
    assert distance(gradient(make_trainer(), batch, make_inputs(batch), both), once) < 1e-5


# --- what is refused and named ------------------------------------------------------------------------------------


def test_a_pair_above_the_budget_is_an_error_with_a_number():
    batch = packed(random_groups([(4, [9, 9]), (2, [3, 3])]))
    trainer = make_trainer(tokens_per_micro_batch=20)
    with pytest.raises(ConfigError, match=r"is 20, which not every group fits in.* use at least 22"):
        trainer.update(batch, inputs_of(batch, batch.behaviour_logprobs), preference)
    with_budget(trainer, 22)
    assert trainer.update(batch, inputs_of(batch, batch.behaviour_logprobs), preference).micro_batches == 2


def test_an_unknown_unit_is_named():
    def odd(logprobs, entropy, inputs):
        return logprobs.sum(), {}

    odd.unit = "batch"
    batch = packed(random_groups([(2, [3])]))
    with pytest.raises(ValueError, match="one of token, sequence, pair, not 'batch'"):
        make_trainer().update(batch, make_inputs(batch), odd)


@pytest.mark.parametrize("objective", [Gspo(), preference])
def test_a_number_that_is_not_finite_is_found_in_its_sample_or_pair(objective):
    batch = packed(random_groups([(2, [3, 4]), (3, [2, 5])]))
    inputs = inputs_of(batch, batch.behaviour_logprobs)
    place = 8  # in the last sample but one
    inputs.proximal_logprobs[place] = inputs.reference_logprobs[place] = math.nan
    trainer = make_trainer()
    report = trainer.update(batch, inputs, objective)
    assert report.skipped is not None and "draw 1" in report.skipped
    fault = diagnose(trainer.policy, batch, inputs, objective, trainer._parameters)
    assert fault.token is not None and fault.token.draw == 1


def test_a_fault_is_named_in_its_own_sequence_of_an_episode():
    tail = make_sample([7, 8, 9], prompt_ids=np.array([4, 5], np.int32))
    batch = packed([make_group(0, [1, 2], [make_sample([3, 4], more=(tail,))])])
    inputs = inputs_of(batch)
    inputs.advantages[3] = math.nan
    trainer = make_trainer()
    trainer.update(batch, inputs, DapoObjective())
    token = diagnose(trainer.policy, batch, inputs, DapoObjective(), trainer._parameters).token
    assert (token.sequence, token.token, token.given) == (1, 1, "advantages")
