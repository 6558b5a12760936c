"""What a reward function may return (failures.md 71, 72)."""

import json

import numpy as np
import pytest
import torch

from dapo.errors import RewardError
from dapo.records import Reward
from dapo.reward.convert import reward_to_json, to_reward, to_rewards

GOOD = [
    (0.0, Reward(None, 0.0)),
    (2, Reward(None, 2.0)),
    (-0.5, Reward(None, -0.5)),
    (True, Reward(True, 1.0)),
    (False, Reward(False, -1.0)),
    (np.float32(0.5), Reward(None, 0.5)),
    (np.bool_(True), Reward(True, 1.0)),
    (torch.tensor(0.25), Reward(None, 0.25)),
    (Reward(False, 0.0, parts={"a": 1.0}), Reward(False, 0.0, parts={"a": 1.0})),
    (Reward(None, 0.0, error="no"), Reward(None, 0.0, error="no")),
    ({"value": 0.0}, Reward(None, 0.0)),
    ({"value": 1, "correct": np.bool_(False), "format": 1}, Reward(False, 1.0, parts={"format": 1.0})),
    ({"value": 1, "parts": {"a": 2}, "b": True, "extracted": "x"}, Reward(None, 1.0, {"a": 2.0, "b": 1.0}, None, "x")),
]


@pytest.mark.parametrize("result, reward", GOOD, ids=[repr(result)[:40] for result, _ in GOOD])
def test_accepted(result, reward):
    assert to_reward(result, "f") == reward


BAD = [
    (None, r"got NoneType None; is a `return` missing"),
    ("1", "got str '1'"),
    (float("nan"), "expected a finite number, got float nan"),
    (float("inf"), "got float inf"),
    (10**400, "expected a finite number"),
    (2e30, r"expected a finite number of at most 1e\+30, got float 2e\+30"),
    ([1.0], r"got list \[1.0\]; it is called for one response at a time"),
    ([0.5] * 7, "one response at a time"),
    (np.ones(9), "one response at a time"),
    ({"score": 1}, r"needs the key \"value\"; its keys are 'score'"),
    ({}, "its keys are none"),
    ({"value": None}, 'expected a finite number under "value", got NoneType None'),
    ({"value": 1, "correct": 1}, 'expected a bool or None under "correct", got int 1'),
    ({"value": 1, "format": "good"}, "expected a finite number under 'format', got str 'good'"),
    ({"value": 1, "parts": [1]}, 'under "parts"'),
    (Reward("yes", 1.0), "whose correct is a bool"),
    (object, "got type"),
]


@pytest.mark.parametrize("result, message", BAD, ids=[repr(result)[:40] for result, _ in BAD])
def test_refused_with_name_expected_and_got(result, message):
    with pytest.raises(RewardError, match=message) as caught:
        to_reward(result, "mine.py:f")
    assert "reward function mine.py:f: " in str(caught.value)


LISTS = [[0.0, True, {"value": 2}], (0, np.bool_(True), np.float32(2)), [torch.tensor(0.0), True, Reward(None, 2.0)]]


@pytest.mark.parametrize("results", LISTS, ids=[repr(results)[:40] for results in LISTS])
def test_each_value_of_a_batch_is_taken_as_one_alone(results):
    assert to_rewards(results, "f", 3) == [Reward(None, 0.0), Reward(True, 1.0), Reward(None, 2.0)]


def test_arrays_and_tensors_with_one_dimension_are_lists():
    for results in (np.array([0.5, 2.0]), torch.tensor([0.5, 2.0], dtype=torch.bfloat16, requires_grad=True)):
        assert to_rewards(results, "f", 2) == [Reward(None, 0.5), Reward(None, 2.0)]
    assert to_rewards(torch.tensor([True, False]), "f", 2) == [Reward(True, 1.0), Reward(False, -1.0)]


SHAPES = [
    (np.ones((3, 1)), "expected a list of 3 values, one for each response, got ndarray"),
    (torch.ones(1), "got Tensor .* of length 1"),
    (torch.tensor(1.0), r"got Tensor tensor\(1\.\)"),
    (np.array([1.0, np.nan, 2.0]), "f, value 2 of 3: expected a finite number, got float nan"),
    ((x for x in (1.0, 2.0, 3.0)), "got generator"),
]


@pytest.mark.parametrize("results, message", SHAPES, ids=[message for _, message in SHAPES])
def test_batches_of_another_shape_are_refused(results, message):
    with pytest.raises(RewardError, match=message):
        to_rewards(results, "f", 3)


def test_json_round_trip():
    for reward in (Reward(True, 1.0, {"a": 0.5}, None, "x"), Reward(None, 0.0, error="broken")):
        assert Reward(**json.loads(json.dumps(reward_to_json(reward), allow_nan=False))) == reward
