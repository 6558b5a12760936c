"""Shares of a card's limits, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_step_metrics import STATS, make_group, make_report
from transformers import Qwen2Config, Qwen2ForCausalLM

from dapo.orchestrator.mfu import CARDS, Card, CardLimits, card_named
from dapo.orchestrator.rollout_batch import RolloutBatch


def make_model(tied: bool = True) -> Qwen2ForCausalLM:
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=10, intermediate_size=16, tie_word_embeddings=tied, **sizes))


@pytest.mark.parametrize("tied", [True, False])
def test_a_weight_counts_if_it_is_multiplied_by(tied: bool) -> None:
    """A head of its own is multiplied by, the embedding then only looked up; tied, they are one tensor."""
    model = make_model(tied)
    used = sum(p.numel() for p in model.parameters()) - (0 if tied else 10 * 8)
    found = CardLimits.on(Card(1.0, 1.0), model, 2)
    assert found.operations_per_token == 6 * (used - 80) and found.operations_per_prediction == 6 * 80
    assert found.weight_bytes == 2 * used
    assert found.cache_bytes == 2 * 2 * 3 * 2 * 2  # key and value, 16 bits, 3 layers, 2 heads of width 2
    model.requires_grad_(False)
    frozen = CardLimits.on(Card(1.0, 1.0), model, 2)
    assert frozen.operations_per_token + frozen.operations_per_prediction == 4 * used


def test_the_shares_of_a_step() -> None:
    """33 + 17 computed tokens x 6 operations and 20 + 5 response tokens x 4 in 2 s of 1,000 a second; 5 decode steps x
    100 bytes and one sample of 10 tokens after a prompt of 1, at 2 bytes a token: 10 x (1 + 5) x 2, in the 0.5 s before
    the wait for rewards."""
    limits = CardLimits(Card(1000.0, 620.0), 6.0, 4.0, 100.0, 2.0)
    fill = RolloutBatch(0, 0, (make_group(0, [(10, True)]),), (), replace(STATS, decode_steps=5))
    sizes = [{"computed_tokens": 33, "response_tokens": 20}, {"computed_tokens": 17, "response_tokens": 5}]
    reports = [replace(make_report(9), **size) for size in sizes]
    found = limits.shares(fill, reports, {"update": 2.0, "rollout": 0.5 + STATS.reward_wait_s})
    assert found == {"share/matmul": pytest.approx(0.2), "share/bandwidth": pytest.approx(2.0)}
    assert limits.shares(replace(fill, stats=STATS), [], {"update": 2.0, "rollout": 0.5}) == {}


def test_cards_are_known_by_the_name_that_cuda_gives() -> None:
    assert card_named("NVIDIA H200") is CARDS["H200"] and card_named("NVIDIA GH200 480GB") is CARDS["GH200"]
    assert card_named("NVIDIA A100-SXM4-40GB") is CARDS["A100"] and card_named("NVIDIA L40S") is CARDS["L40S"]
    assert card_named("NVIDIA L4") is CARDS["L4"] and card_named("NVIDIA L40") is None


def test_nothing_is_known_of_a_cpu() -> None:
    assert CardLimits.of(make_model(), torch.device("cpu"), torch.bfloat16) is None
