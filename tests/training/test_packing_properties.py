"""Packing, micro-batches, order and padding against one padded sequence at a time through the unmodified model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import SHAPE, distance, gradient, make_inputs, make_trainer, packed, random_groups, with_budget

from dapo.algorithm.objective import DapoObjective
from helpers import random_model

ARCHITECTURES = ["qwen2", "llama", "gpt2", "gemma2"]
TEMPERATURE = 0.9


def one_sequence(model, prompt_ids, sample, padding):
    """Log-probs of one response by the plain formula, with ``padding`` tokens behind it."""
    ids = torch.tensor([*prompt_ids, *sample.token_ids.tolist(), *[0] * padding])
    seen = torch.tensor([1] * (len(ids) - padding) + [0] * padding)
    logits = model(input_ids=ids[None], attention_mask=seen[None]).logits[0]
    first = len(prompt_ids) - 1
    rows = torch.log_softmax(logits[first : first + sample.length] / TEMPERATURE, -1)
    return rows.gather(1, torch.from_numpy(sample.token_ids).long()[:, None])[:, 0]


def plain_loss(model, groups, paddings, mode):
    """Eq. 12 with the clip of Eq. 10 written out sample by sample; ``mode`` token-mean or prompt-mean."""
    tokens = {g.draw: sum(s.length for s in g.samples if s.in_loss) for g in groups}
    used = [draw for draw, n in tokens.items() if n]
    total = torch.zeros(())
    for group in groups:
        divisor = sum(tokens.values()) if mode == "token-mean" else tokens[group.draw] * len(used)
        for sample in group.samples:
            if not (sample.in_loss and sample.length):
                continue
            logprobs = one_sequence(model, group.prompt.token_ids, sample, next(paddings))
            ratio = (logprobs - torch.from_numpy(sample.logprobs)).clamp(-20, 20).exp()
            surrogate = torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.28) * sample.advantage)
            if sample.advantage < 0:
                surrogate = surrogate.clamp(min=10 * sample.advantage)
            total = total - surrogate.sum() / divisor
    return total


def plain_gradient(model, groups, paddings, mode):
    model.zero_grad()
    loss = plain_loss(model, groups, paddings, mode)
    loss.backward()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return loss.item(), torch.cat([g.flatten() for g in grads])


@pytest.fixture(scope="module")
def pairs():
    """For each architecture the unmodified model and a trainer of the same weights."""
    return {
        name: (random_model(name).requires_grad_(), make_trainer(name, temperature=TEMPERATURE))
        for name in ARCHITECTURES
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_equals_unpacked_logprobs(pairs, name):
    model, trainer = pairs[name]
    groups = random_groups([*SHAPE, (5, [30, 7])])
    with torch.no_grad():
        plain = [one_sequence(model, g.prompt.token_ids, s, padding=3) for g in groups for s in g.samples if s.length]
    for budget in (35, 60, 1000):
        found = with_budget(trainer, budget).logprobs(packed(groups))
        torch.testing.assert_close(found, torch.cat(plain), rtol=0, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_cut_order_or_padding_changes_loss_or_gradient(pairs, data):
    """Random groups, mask, order, budget and padding: the trainer gives the plain reference's loss and gradient."""
    model, trainer = pairs[data.draw(st.sampled_from(ARCHITECTURES))]
    lengths = st.lists(st.integers(0, 14), min_size=1, max_size=4)
    shape = data.draw(st.lists(st.tuples(st.integers(1, 6), lengths), min_size=1, max_size=4))
    masked = data.draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4))
    groups = random_groups(shape, data.draw(st.integers(0, 2**16)), lambda draw, index: (draw, index) not in masked)
    if not any(s.in_loss and s.length for g in groups for s in g.samples):
        return
    mode = data.draw(st.sampled_from(["token-mean", "prompt-mean"]))
    loss, expected = plain_gradient(model, groups, iter(lambda: data.draw(st.integers(0, 5)), None), mode)

    shuffled = [replace(g, samples=tuple(data.draw(st.permutations(g.samples)))) for g in groups]
    batch = packed(data.draw(st.permutations(shuffled)))
    budget = int(batch.lengths.max()) + data.draw(st.integers(0, 60))
    with_budget(trainer, budget)
    inputs = make_inputs(batch, mode)
    seen = []

    def objective(logprobs, entropy, part):
        part_loss, stats = DapoObjective()(logprobs, entropy, part)
        seen.append(part_loss.item())
        return part_loss, stats

    got = gradient(trainer, batch, inputs, objective)
    assert sum(seen) == pytest.approx(loss, rel=1e-4, abs=1e-5)
    if expected.norm() > 1e-6:
        assert distance(got, expected) < 1e-4
    else:
        assert got.norm() < 1e-5
