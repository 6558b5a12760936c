"""How much memory reward models take of the device that trains, where they share it, from their shapes.

Weights, of P parameters in ``reward.compute_dtype`` with b bytes, and what a layer holds while a batch of t tokens is
scored, in texts of at most T tokens: t b max(4 h + 3 m, 2 h + 5 q) + t (2 + b) T, the last for the mask; widths h
(hidden), m (MLP) and q (all heads). Measured in test_reward_memory.py. More than encoders take, which have no gate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dapo.checks.context import config_at_hand
from dapo.config import ModelReward
from dapo.config.composed_reward import plain_rewards
from dapo.config.stages import StageConfig
from dapo.model.adapters import find_adapter
from dapo.model.loading import key_value_heads, read_config


def reward_memory(config: Any, on_gpu: bool) -> tuple[int, int]:
    """Bytes of weights, and of scoring, of those that are here: see :func:`unknown_models`."""
    weights = scoring = 0
    for reward, shape in _beside_training(config, on_gpu):
        if shape is not None:
            width = 2 if reward.compute_dtype == "bfloat16" else 4
            weights += width * sum(parameter.numel() for parameter in shape.parameters())
            scoring += _scoring(config, reward, shape, width)
    return weights, scoring


def unknown_models(config: Any, on_gpu: bool) -> list[str]:
    return [reward.path for reward, shape in _beside_training(config, on_gpu) if shape is None]


def _beside_training(config: Any, on_gpu: bool) -> Iterator[tuple[ModelReward, Any]]:
    """Those on the device that trains, each with its shape. On Ray they have others."""
    if isinstance(config, StageConfig) or config.runtime.kind == "ray":
        return
    here = ("cuda", "auto") if on_gpu else ("cpu",) if torch.cuda.is_available() else ("cpu", "auto")
    for named in filter(None, (config.reward, config.monitor.check)):
        for reward in plain_rewards(named):
            if isinstance(reward, ModelReward) and reward.device in here:
                yield reward, _shape(reward.path, reward.trust_remote_code, Path.cwd())


@cache
def _shape(path: str, trust_remote_code: bool, folder: Path) -> Any:
    """A network without numbers, where ``path`` counts from ``folder``; None: it is not here, or is none."""
    from transformers import AutoModelForSequenceClassification

    try:
        adapter = find_adapter(path)
        if not config_at_hand(name := adapter.base if adapter else path):
            return None
        found = read_config(name, trust_remote_code)
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(found, trust_remote_code=trust_remote_code)
    except Exception:  # whatever the files of a model that is none lead to; the check of the reward tells
        return None


def mlp_width(shape: Any) -> int:
    text = shape.config.get_text_config()
    return getattr(text, "intermediate_size", None) or 4 * int(text.hidden_size)


def _scoring(config: Any, reward: ModelReward, shape: Any, width: int) -> int:
    longest = min(reward.max_length, config.data.max_prompt_length + config.rollout.max_response_length)
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    tokens = min(reward.tokens_per_batch, samples * longest)
    text, mlp = shape.config.get_text_config(), mlp_width(shape)
    hidden, heads = text.hidden_size, text.num_attention_heads * key_value_heads(text)[1]
    return int(tokens * (width * max(4 * hidden + 3 * mlp, 2 * hidden + 5 * heads) + (2 + width) * longest))
