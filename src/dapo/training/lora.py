"""The model that a run trains: all of its parameters, or a LoRA adapter on a frozen base.

Masters of what is trained are float32. A frozen base is held in ``model.compute_dtype``, in which the engine computes
too, so that engine, trainer and reference policy share its memory (:func:`dapo.model.loading.copy_model`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dapo.config.sections import ModelConfig
from dapo.config.stages import RewardModelConfig
from dapo.errors import ConfigError, ModelError, first_line
from dapo.model.adapters import Adapter, find_adapter, has_adapter, new_adapter, put_on
from dapo.model.classifier import as_classifier
from dapo.model.loading import load_model
from dapo.model.nf4 import narrow_base


def load_trainable(source: Any, config: ModelConfig, device: torch.device | str | None = None) -> Any:
    """The model of a run as its folder has it: :func:`begin_adapter` is to follow.

    Args:
        source: as for :func:`dapo.model.loading.load_model`. Training goes on with the adapter of an adapter's folder.
        config: compute type and adapter; its path is not looked at.

    Raises:
        ModelError: it cannot be loaded, or is a model in memory on which an adapter is to be trained.
        ConfigError: the folder holds another adapter than ``config`` describes.
    """
    named = isinstance(source, str | Path)
    adapter = find_adapter(source) if named else None
    if adapter is not None:
        _check_same(adapter, config)
    if not named and (config.lora.rank or has_adapter(source)):
        raise ModelError(
            "model: an adapter's files name the folder of its base, and this model was given without one; save it "
            "(save_pretrained) and give the folder"
        )
    frozen = adapter is not None or config.lora.rank > 0
    model = load_model(
        source,
        getattr(torch, config.compute_dtype) if frozen else torch.float32,
        trust_remote_code=config.trust_remote_code,
        device=device,
        adapter_dtype=torch.float32,
    )
    return model if not adapter and config.lora.rank else _base_as_asked(model, config)


def begin_adapter(model: Any, config: ModelConfig, seed: int) -> Any:
    """``model``, with a new adapter on it if ``config`` asks for one and there is none yet. It adds nothing yet.
    Raises ModelError: PEFT is not installed, or the model has no such modules."""
    lora = config.lora
    if not lora.rank or has_adapter(model):
        return model
    return _base_as_asked(new_adapter(model, lora.rank, alpha_of(config), lora.target_modules, seed), config)


def _base_as_asked(model: Any, config: ModelConfig) -> Any:
    return narrow_base(model) if config.lora.base == "nf4" else model


def trainable_shape(config: ModelConfig, model_config: Any, classifier: bool = False) -> Any:
    """What :func:`load_trainable` and :func:`begin_adapter` make, on the meta device: names, shapes and no numbers.

    Args:
        config: its path is looked at for an adapter.
        model_config: Transformers' config of the (base) model.
        classifier: what the stage of reward models makes of it.

    Raises ModelError, ConfigError: as the two.
    """
    from transformers import AutoModelForCausalLM

    adapter = find_adapter(config.path)
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(model_config)
        except Exception as error:  # sizes that do not fit together raise whatever is made of them first
            raise ModelError(f"model {config.path}: config.json describes none: {first_line(error)}") from None
        if adapter is not None:
            _check_same(adapter, config)
            model = put_on(model, adapter)
        if adapter is not None or not config.lora.rank:
            model = _base_as_asked(model, config)
        return begin_adapter(as_classifier(model, 0) if classifier else model, config, 0)


def held_whole(config: Any, shape: Any) -> bool:
    """Whether each of several workers that train holds all that is trained, as an adapter's always do."""
    return has_adapter(shape) or config.runtime.learner.sharded is False


def in_main_memory(config: Any, shape: Any, workers: int) -> bool:
    """Whether parameters, gradients and moments lie there (``runtime.learner.cpu_offload``)."""
    return config.runtime.learner.cpu_offload and workers > 1 and not held_whole(config, shape)


def shape_of(config: Any, model_config: Any) -> Any:
    """:func:`trainable_shape` of a whole recipe, of a run or a stage."""
    return trainable_shape(config.model, model_config, isinstance(config, RewardModelConfig))


def alpha_of(config: ModelConfig) -> float:
    """What the adapter adds is multiplied by this over its rank."""
    return 2.0 * config.lora.rank if config.lora.alpha is None else config.lora.alpha


def _check_same(adapter: Adapter, config: ModelConfig) -> None:
    """An adapter's folder says itself what it is; a recipe that says it too must not say something else."""
    lora, found = config.lora, adapter.settings
    if not lora.rank:
        return
    stated: dict[str, Any] = {"rank": lora.rank, "alpha": alpha_of(config)}
    held = {"rank": found.get("r", 8), "alpha": found.get("lora_alpha", 8)}
    if lora.target_modules != "all-linear" and isinstance(found.get("target_modules"), list):
        stated["target_modules"], held["target_modules"] = (
            sorted(names) for names in (lora.target_modules, found["target_modules"])
        )
    for key, value in stated.items():
        if held[key] != value:
            raise ConfigError(
                f"model.lora.{key}: is {value}, but the adapter {adapter.folder} that training is to go on with has "
                f"{held[key]}; leave model.lora out, or give its base as model.path for a new adapter"
            )
