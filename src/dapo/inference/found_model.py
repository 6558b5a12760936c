"""The model that a name stands for (a folder, a run, a checkpoint, or a name on the hub), and what its recipe says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.config import load_config, nested
from dapo.config.data import DataConfig
from dapo.config.reading import flat
from dapo.config.sections import EvaluationConfig
from dapo.config.stages import load_stage, stage_named
from dapo.errors import ModelError
from dapo.observe.checkpoints import Checkpoints
from dapo.util.files import holds_model

OF_VLLM = ("engine", "tensor_parallel", "engine_args")
_FROM_RECIPE = (
    *("seed", "environment", "reward"),
    *(f"model.{name}" for name in ("tokenizer", "compute_dtype", "trust_remote_code", "lora.base")),
    *(f"data.{name}" for name in ("prompt_key", "answer_key", "max_prompt_length", *DataConfig.WRITING)),
    *(f"rollout.{name}" for name in ("max_response_length", "stop_token_ids", "stop", *OF_VLLM)),
    *("rollout.max_concurrent_samples", "rollout.cache_gib"),
    *(f"evaluation.{name}" for name in ("data", "rows", "samples_per_prompt", "temperature", "top_p", "top_k")),
    *(f"evaluation.{name}" for name in ("min_p", "stop", "max_response_length", "metrics")),
    *("runtime.threads", "runtime.deterministic"),  # not the device: it may be another machine
)
FROM_RECIPE: Mapping[str, Any] = nested(dict.fromkeys(_FROM_RECIPE, True))
"""What a recipe says that concerns inference."""
_ASKED_FOR = (
    *("runtime.device", "rollout.device"),
    *(f"rollout.{name}" for name in ("url", "token_env", "model", "request", "text", "timeout_s", "give_up_after_s")),
)
"""What inference takes beside it, where it is asked for."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """``path``: folder in Hugging Face layout, or a name on the hub. ``recipe``: of the run that it comes from."""

    path: str
    recipe: Path | None = None


def find_model(name: str) -> FoundModel:
    """The model that ``name`` stands for: a folder in Hugging Face layout, a run folder (its last weights, which are
    model-after/ or else those of the last checkpoint), a checkpoint folder, or a name on the hub.
    Raises ModelError: there is such a folder, but no model in it; or a path that leads nowhere."""
    folder = Path(name).expanduser()
    if os.path.isfile(folder):  # noqa: PTH113  (the methods of Path raise for a name that is too long)
        raise ModelError(f"model {name}: is a file; name the folder that holds config.json and the weights")
    if not name or not os.path.isdir(folder):  # noqa: PTH112
        if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name:
            raise ModelError(f"model {name!r}: no such folder")
        return FoundModel(name)  # whether the hub has it shows when it is loaded
    runs = folder / "checkpoints"
    kept = (runs / place.name / "model" for place in reversed(Checkpoints(runs).places()))  # the furthest first
    places = [folder, folder / "model", folder / "model-after", *kept]
    found = next((place for place in places if holds_model(place)), None)
    if found is None:
        raise ModelError(
            f"model {name}: the folder holds no model: neither config.json (Hugging Face layout), nor "
            "adapter_config.json (a LoRA adapter), nor model/ (a checkpoint), nor model-after/ or checkpoints/ (a run "
            "folder)"
        )
    return FoundModel(str(found), _recipe_of(found))


def _recipe_of(model: Path) -> Path | None:
    """The resolved recipe of the run whose folder a model lies in: RUN/model-after or RUN/checkpoints/NAME/model."""
    for run in list(model.resolve().parents)[:3:2]:
        if (run / "config.yaml").is_file() and (run / "environment.json").is_file():
            return run / "config.yaml"
    return None


def said_in(recipe: Path) -> dict[str, Any]:
    """What a recipe says that concerns inference; one of a stage does not say how to sample or to score."""
    if stage := stage_named(recipe):
        wanted = {name: FROM_RECIPE[name] for name in ("seed", "model", "data", "runtime")}
        return load_stage(stage, recipe).model_dump(include=wanted, exclude_unset=True)
    return load_config(recipe).model_dump(include=FROM_RECIPE, exclude_unset=True)


def without_effect(*settings: Mapping[str, Any], unused: Sequence[str] = ()) -> list[str]:
    """Of each key in ``settings`` that inference does not take, or is one of ``unused``, what to do about it."""
    keys = dict.fromkeys(key for tree in settings for key, _ in flat(tree))
    taken = tuple(f"{one}." for one in (*_FROM_RECIPE, *_ASKED_FOR) if not one.startswith(tuple(unused)))
    lost = {key: key.startswith(tuple(unused)) for key in keys if not f"{key}.".startswith(taken)}
    own = {"model.path": "the model is the command's (or the function's) first argument"}
    if "evaluation" not in unused:
        own |= {f"rollout.{name}": f"evaluation.{name} is what counts" for name in EvaluationConfig.model_fields}
    kinds = ("training", "training and evaluation")
    return [f"{k}: is for {kinds[e]}, and has no effect here; {own.get(k, 'leave it out')}" for k, e in lost.items()]
