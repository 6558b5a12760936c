"""Flattening groups and cutting the result: nothing lost, nothing twice, nothing shifted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import SHAPE, make_group, make_sample, packed, random_groups

from dapo.config import AlgorithmConfig
from dapo.errors import ConfigError
from dapo.records import Reward
from dapo.training.learner import loss_weights
from dapo.training.micro_batch import micro_batch, micro_batches, select_tokens
from dapo.training.packing import advantage_column, pack, pack_demonstrations, plan_micro_batches

group_shapes = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 12), min_size=1, max_size=5)), min_size=1, max_size=6
)


CPU = torch.device("cpu")


def whole(batch):
    """All of it as one micro-batch."""
    return micro_batch(batch, np.arange(batch.num_samples), CPU)


def targets_of(batch):
    return whole(batch).targets.tolist()


def parts_of(batch, budget):
    return list(micro_batches(batch, budget, CPU))


def sequences_of(batch):
    """Every sequence as (draw, index, prompt, response, log-probs), read back from the flat tensors."""
    found, token, response_token = [], 0, 0
    for row in range(batch.num_samples):
        length, prompt = int(batch.lengths[row]), int(batch.prompt_lengths[row])
        ids = batch.token_ids[token : token + length].tolist()
        logprobs = batch.behaviour_logprobs[response_token : response_token + length - prompt].tolist()
        key = (int(batch.draws[row]), int(batch.indices[row]))
        found.append((*key, tuple(ids[:prompt]), tuple(ids[prompt:]), tuple(logprobs)))
        token, response_token = token + length, response_token + length - prompt
    assert (token, response_token) == (batch.num_tokens, batch.num_response_tokens)
    return found


def sequences_in(groups):
    return [
        (g.draw, s.index, tuple(g.prompt.token_ids), tuple(s.token_ids.tolist()), tuple(s.logprobs.tolist()))
        for g in groups
        for s in g.samples
        if s.scored
    ]


def test_worked_example():
    group = make_group(7, [5, 6], [make_sample([7, 8], logprobs=[-0.5, -0.25], version=3, advantage=2.0)])
    other = make_group(4, [9], [make_sample([], advantage=-1.0), make_sample([1, 1, 2], advantage=-1.0, in_loss=False)])
    batch = packed([group, other])
    part = whole(batch)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 9, 1, 1, 2]
    # the prompt [9] of two samples is computed once, and the last token of a response, 8 and 2, not at all
    assert part.row_ids.tolist() == [5, 6, 7, 9, 1, 1]
    assert part.row_positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert part.lengths == [3, 1, 3]
    assert part.predictors.tolist() == [1, 2, 3, 4, 5]
    assert part.targets.tolist() == [7, 8, 1, 1, 2]
    assert batch.behaviour_logprobs.tolist() == [-0.5, -0.25, -1, -1, -1]
    assert batch.columns["advantages"].tolist() == [2, 2, -1, -1, -1]
    assert batch.mask.tolist() == [True, True, False, False, False]
    assert batch.versions.tolist() == [3, 3, 0, 0, 0]
    assert batch.sample_ids.tolist() == [0, 0, 2, 2, 2]
    assert batch.group_ids.tolist() == [0, 0, 1, 1, 1]
    assert batch.draws.tolist() == [7, 4, 4] and batch.indices.tolist() == [0, 0, 1]
    assert (batch.num_samples, batch.num_groups, batch.num_tokens, batch.num_response_tokens) == (3, 2, 9, 5)


@pytest.mark.parametrize(
    "response",
    [
        [5, 6],  # failures 9: stopped by another stop id; nothing is searched for
        [7, 8, 2],  # failures 10: the pad id is the stop id, and the stop token is trained
        [7, 2, 2, 9],  # failures 11: several stop ids
        [2],  # failures 73: only the stop token
    ],
)
def test_lengths_and_ids_are_the_engines(response):
    batch = pack([make_group(0, [3], [make_sample(response)])])
    assert targets_of(batch) == response  # failures 37: never decoded and encoded
    assert batch.mask.tolist() == [True] * len(response)


def test_512_tokens_stay_512_failures_37():
    response = [0, 1] * 256  # a tokenizer might write each pair as one token
    assert targets_of(pack([make_group(0, [3], [make_sample(response)])])) == response


def test_unscored_samples_are_left_out_and_borders_stay_failures_21():
    failed = Reward(correct=None, value=0.0, error="sandbox down")
    first = make_group(0, [1], [make_sample([2, 2], reward=failed, advantage=float("nan")), make_sample([3])])
    second = make_group(1, [4], [make_sample([5, 5]), make_sample([6], reward=None)])
    batch = pack([first, second])
    assert batch.token_ids.tolist() == [1, 3, 4, 5, 5]
    assert batch.draws.tolist() == [0, 1] and batch.indices.tolist() == [1, 0]


def test_groups_go_by_draw_and_not_by_position_failures_20():
    groups = [make_group(draw, [1], [make_sample([token])]) for draw, token in [(8, 2), (3, 4), (8, 3), (3, 5)]]
    batch = pack(groups)
    assert batch.group_ids.tolist() == [0, 1, 0, 1]
    assert [targets_of(mini) for mini in batch.minibatches(1)] == [[2, 3], [4, 5]]


def test_groups_are_numbered_by_first_appearance():
    """Draws 9, 1 and 4 are groups 0, 1 and 2; 9 comes again at the end."""
    batch = pack([make_group(draw, [5], [make_sample([7])]) for draw in (9, 1, 4, 9)])
    assert batch.group_ids.tolist() == [0, 1, 2, 0]
    assert [part.draws.tolist() for part in batch.minibatches(1)] == [[9, 9], [1], [4]]


def test_empty_batch():
    batch = pack([])
    assert (batch.num_samples, batch.num_groups, batch.num_tokens, batch.num_response_tokens) == (0, 0, 0, 0)
    assert list(batch.minibatches(2)) == [] and parts_of(batch, 8) == []
    assert whole(batch).predictors.shape == whole(batch).row_positions.shape == (0,)


def test_bad_records_are_named():
    with pytest.raises(ValueError, match="draw 5: empty prompt"):
        pack([make_group(5, [], [make_sample([1])])])
    with pytest.raises(ValueError, match="draw 5, sample 1: in the loss, its advantage is nan"):
        advantage_column([make_group(5, [1], [make_sample([1]), make_sample([1], advantage=float("nan"))])])
    advantage_column([make_group(5, [1], [make_sample([1], advantage=float("nan"), in_loss=False)])])


def test_demonstrations():
    batch = pack_demonstrations([([1, 2], [3, 4]), ([5], [6])])
    assert targets_of(batch) == [3, 4, 6]
    assert batch.group_ids.tolist() == [0, 0, 1] and batch.mask.all()
    assert (batch.versions == -1).all()  # no engine sampled them, so no mismatch is measured on them


@settings(max_examples=60, deadline=None)
@given(shape=group_shapes, per_update=st.integers(1, 4), slack=st.integers(0, 30))
def test_every_sequence_exactly_once_within_the_budget(shape, per_update, slack):
    groups = random_groups(shape)
    batch = packed(groups)
    assert sequences_of(batch) == sequences_in(groups)

    updates = list(batch.minibatches(per_update))
    assert len(updates) == -(-len(groups) // per_update)
    assert [s for update in updates for s in sequences_of(update)] == sequences_in(groups)
    assert all(update.num_groups == per_update for update in updates[:-1])

    budget = int(batch.lengths.max()) + slack
    parts = parts_of(batch, budget)
    assert sorted(s for part in parts for s in sequences_of(part.batch)) == sorted(sequences_in(groups))
    assert all(0 < part.num_computed_tokens <= budget for part in parts)
    assert sorted(torch.cat([part.index for part in parts]).tolist()) == list(range(batch.num_response_tokens))
    for part in parts:
        index = part.index.numpy()
        for name in ("behaviour_logprobs", "mask", "versions"):
            assert np.array_equal(getattr(part.batch, name), getattr(batch, name)[index])
        assert np.array_equal(part.batch.columns["advantages"], batch.columns["advantages"][index])
        assert torch.equal(whole(batch).targets[part.index], part.targets)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=40), slack=st.integers(0, 60))
def test_micro_batches_are_few_and_depend_on_lengths_only(lengths, slack):
    budget = max(lengths, default=1) + slack
    plan = plan_micro_batches(lengths, budget)
    assert sorted(i for rows in plan for i in rows.tolist()) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in rows) for rows in plan]
    assert all(0 < load <= budget for load in loads)
    assert len(plan) <= 2 * sum(lengths) / budget + 1  # first-fit: at most one is less than half full
    again = plan_micro_batches(list(lengths), budget)
    assert all(np.array_equal(a, b) for a, b in zip(plan, again, strict=True))
    backwards = plan_micro_batches(lengths[::-1], budget)
    assert sorted(sum(lengths[::-1][i] for i in rows) for rows in backwards) == sorted(loads)


def test_eight_rows_of_seven_tokens_failures_100():
    """verl PR#7553: a cap of 8 gave one micro-batch of 14."""
    assert [rows.tolist() for rows in plan_micro_batches([7] * 8, 8)] == [[i] for i in range(8)]


def test_micro_batches_are_balanced():
    """First-fit would make 10 + 10 + 1."""
    loads = [sum([5, 5, 5, 5, 1][i] for i in rows) for rows in plan_micro_batches([5, 5, 5, 5, 1], 10)]
    assert sorted(loads) == [5, 6, 10]


def test_budget_holds_where_balance_would_break_it():
    lengths = [8, 7, 6, 6, 5]  # the least loaded first would give 8 + 6 and 7 + 6 + 5 = 18
    plan = plan_micro_batches(lengths, 17)
    assert [[lengths[i] for i in rows] for rows in plan] == [[8, 7], [6, 6, 5]]


def test_a_sequence_above_the_budget_is_an_error_with_numbers_failures_100():
    batch = pack([make_group(3, [1] * 6, [make_sample([2]), make_sample([2] * 9)])])
    with pytest.raises(ConfigError, match=r"is 14, but sample 1 of draw 3 has 6 \(prompt\) \+ 9 \(response\) = 15"):
        parts_of(batch, 14)
    assert [part.batch.num_tokens for part in parts_of(batch, 15)] == [15, 7]


def test_columns_are_cut_together_with_the_rest():
    batch = pack(random_groups(SHAPE))
    numbers = np.arange(batch.num_response_tokens, dtype=np.float32)
    batch = batch.with_columns(proximal=numbers, reference=numbers + 0.5)
    for mini in batch.minibatches(2):
        for part in parts_of(mini, 20):
            assert np.array_equal(part.batch.columns["reference"], part.batch.columns["proximal"] + 0.5)
    assert np.array_equal(np.concatenate([mini.columns["proximal"] for mini in batch.minibatches(2)]), numbers)


def test_inputs_are_cut_by_token():
    @dataclass(frozen=True)
    class Inputs:
        weights: torch.Tensor
        absent: torch.Tensor | None = None
        coefficient: float = 0.5

    cut = select_tokens(Inputs(torch.tensor([1.0, 2.0, 3.0])), torch.tensor([2, 0]))
    assert cut.weights.tolist() == [3.0, 1.0] and cut.absent is None and cut.coefficient == 0.5


def test_groups_per_update_is_checked():
    with pytest.raises(ValueError, match="at least 1"):
        list(pack(random_groups(SHAPE)).minibatches(0))


def test_the_model_row_holds_a_shared_prompt_once():
    """Draw 0: prompt of 3 with responses of 3 and 2; draw 1, whose samples lie apart, prompt of 2 with 2 and 1."""
    shape = [(3, [3, 2]), (2, [2, 1])]
    batch = pack(random_groups(shape)).select(np.array([2, 0, 3, 1]))
    part = whole(batch)
    # the last token of a response predicts nothing, so that of one token is not computed
    assert part.num_computed_tokens == (3 + 2 + 1) + (2 + 1 + 0)
    assert part.lengths == [3, 5, 2, 4]
    tokens = np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1])
    every = np.concatenate([ids[:n] for ids, n in zip(tokens, part.lengths, strict=True)])
    assert part.row_ids[part.place].tolist() == every.tolist()  # every token finds itself
    places = np.split(part.place.numpy(), np.cumsum(part.lengths)[:-1])
    assert places[0][:2].tolist() == places[2][:2].tolist()  # the prompt of draw 1
    assert places[1][:3].tolist() == places[3][:3].tolist()
    responses = [p[n:] for p, n in zip(places, batch.prompt_lengths, strict=True)]
    assert len(np.unique(np.concatenate(responses))) == 2 + 1 + 1


def test_demonstrations_share_nothing():
    batch = pack_demonstrations([((5, 6), (7,)), ((5, 6), (8,))])
    assert whole(batch).place.tolist() == list(range(4))  # a response of one token predicts nothing


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum", "constant"])
def test_an_episode_counts_as_one_sample_however_many_sequences_it_has(mode):
    """As the same tokens in one sequence do."""
    tail = make_sample([8, 9], prompt_ids=np.array([6, 7], np.int32))
    found = []
    for first in (make_sample([3, 4, 5], more=(tail,)), make_sample([3, 4, 5, 8, 9])):
        batch = pack([make_group(0, [1], [first, make_sample([2] * 4)]), make_group(1, [1], [make_sample([2])])])
        algorithm = AlgorithmConfig(loss_agg_mode=mode)
        found.append(loss_weights(batch, algorithm, 16, torch.from_numpy(batch.mask)).tolist())
    assert found[0] == found[1] and batch.sample_numbers.tolist() == [0, 1, 2]
