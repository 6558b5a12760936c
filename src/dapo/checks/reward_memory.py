"""How much memory reward models take of the device that trains, where they share it, from their shapes.

Weights, of P parameters in ``reward.compute_dtype`` with b bytes, and what a layer holds while a batch of t tokens is
scored, in texts of at most T tokens: t b max(4 h + 3 m, 2 h + 5 q) + t (2 + b) T, the last for the mask; widths h
(hidden), m (MLP) and q (all heads). Measured in test_reward_memory.py. More than encoders take, which have no gate."""

from __future__ import annotations

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
    for reward in beside_training(config, on_gpu):
        if (shape := _shape_of(reward)) is not None:
            width = 2 if reward.compute_dtype == "bfloat16" else 4
            weights += width * sum(parameter.numel() for parameter in shape.parameters())
            scoring += _scoring(config, reward, shape, width)
    return weights, scoring


def beside_training(config: Any, on_gpu: bool) -> list[ModelReward]:
    """Those on the device that trains. On Ray they have others."""
    if isinstance(config, StageConfig) or config.runtime.kind == "ray":
        return []
    named = [one for one in (config.reward, config.monitor.check) if one is not None]
    here = "cuda" if on_gpu else "cpu"
    auto = here if on_gpu or not torch.cuda.is_available() else "cuda"
    models = [one for reward in named for one in plain_rewards(reward) if isinstance(one, ModelReward)]
    return [one for one in models if here == (auto if one.device == "auto" else one.device)]


def unknown_models(config: Any, on_gpu: bool) -> list[str]:
    return [reward.path for reward in beside_training(config, on_gpu) if _shape_of(reward) is None]


def _shape_of(reward: ModelReward) -> Any:
    """Its network without numbers; None: it is not here, or is none, of which the check of the reward tells."""
    return _shape(reward.path, reward.trust_remote_code, Path.cwd())


@cache
def _shape(path: str, trust_remote_code: bool, folder: Path) -> Any:
    """``folder``: that ``path`` counts from."""
    from transformers import AutoModelForSequenceClassification

    try:
        adapter = find_adapter(path)
        if not config_at_hand(name := adapter.base if adapter else path):
            return None
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(
                read_config(name, trust_remote_code), trust_remote_code=trust_remote_code
            )
    except Exception:  # whatever the files of a model that is none lead to
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
