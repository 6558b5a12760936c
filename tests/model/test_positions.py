"""The longest sequence that a model was made for, as engines derive it from its config."""

from __future__ import annotations

from typing import Any

import pytest

from dapo.model.loading import context_limit
from helpers import ARCHITECTURES

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("name", "settings", "limit"),
    [
        ("qwen2", {}, 256),
        ("gpt2", {}, 256),
        ("mistral", {"sliding_window": 8}, 256),
        # as Qwen's model card says it
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 256),
        (
            "qwen3",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
            1024,
        ),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 512),
        # max_position_embeddings may hold the factor already: what counts is the original
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 256),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 1024),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 512),
        ("llama", {"rope_scaling": LLAMA3}, 256),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 256),
        ("llama", {"max_sequence_length": 128}, 128),
    ],
)
def test_positions_are_those_that_engines_derive(name: str, settings: dict[str, Any], limit: int) -> None:
    from transformers import AutoConfig

    assert context_limit(AutoConfig.for_model(**ARCHITECTURES[name] | settings)) == limit


def test_a_model_that_states_none_has_no_limit() -> None:
    class Config:
        max_position_embeddings = None

    assert context_limit(Config()) is None
